/* Several processes that run one model: see ranks.h. Owns the shared object that speaks MPI. */
#include "base/ranks.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/ranks_link.h"

#include <dlfcn.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    SPINS = 2000,         /* looks before the first nap */
    NAP_NS = 20000,       /* the first one */
    MOST_NAP_NS = 500000, /* when nothing has come for long */
    VOCAB_UNIT = 64,      /* rows of a head that stay together */
};

static struct ranks *world;

bool ranks_launched(void)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS",
                                        "SLURM_STEP_NUM_TASKS"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *n = getenv(names[i]);
        if (n && atoi(n) > 1)
            return true;
    }
    return false;
}

/* Beside the program, where it was built, or where it was installed. */
static void *find_link(char *why, size_t size)
{
    char self[4096], path[4224];
    const char *named = getenv("STEEL_MPI");
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    self[n > 0 ? n : 0] = 0;
    char *slash = strrchr(self, '/');
    if (slash)
        *slash = 0;
    const char *const places[] = {"%s/steel-mpi.so", "%s/../lib/steel/steel-mpi.so",
                                  "%s/../steel-mpi.so"};
    for (size_t i = 0; i <= sizeof places / sizeof *places; i++) {
        if (i == 0 && !named)
            continue;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        snprintf(path, sizeof path, i ? places[i - 1] : "%s", i ? self : named);
#pragma GCC diagnostic pop
        if (access(path, R_OK) != 0)
            continue;
        void *lib = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
        if (!lib)
            snprintf(why, size, "%s", dlerror());
        return lib;
    }
    snprintf(why, size,
             "no steel-mpi.so beside the program (`make mpi` builds it, where MPI is installed)");
    return NULL;
}

struct ranks *ranks_open(struct error *err)
{
    char why[512] = "";
    void *lib = find_link(why, sizeof why);
    ranks_link_open *open = NULL;
    if (lib)
        *(void **)&open = dlsym(lib, "steel_ranks_link");
    const struct ranks_link *link = open ? open(RANKS_LINK_VERSION, why, sizeof why) : NULL;
    if (!link) {
        error_set(err, "several processes were started, and MPI is not to be had: %s", why);
        return NULL;
    }
    struct ranks *r = mem_zalloc(1, sizeof *r);
    r->link = link;
    r->rank = link->rank;
    r->size = link->size;
    r->local = link->local;
    r->n_local = link->n_local;
    r->tp = r->size;
    r->pp = 1;
    world = r;
    return r;
}

struct ranks *ranks_world(void)
{
    return world;
}

void ranks_close(struct ranks *r)
{
    if (!r)
        return;
    if (ranks_ok(r, NULL))
        r->link->finalize(); /* waits for the others, which would be in vain after a failure */
    mem_free(r->scratch);
    mem_free(r);
    world = NULL;
}

bool ranks_ok(const struct ranks *r, struct error *err)
{
    if (!r || !r->failure.msg[0])
        return true;
    return error_set(err, "%s", r->failure.msg);
}

/* Waits for an operation, politely: who waits long sleeps. */
static bool wait_for(struct ranks *r, void *request, bool idle, const char *what)
{
    int64_t start = clock_ns(), nap = NAP_NS;
    if (!request)
        return error_set(&r->failure, "rank %d: MPI refused %s", r->rank, what);
    for (int spins = 0;; spins++) {
        int state = r->link->test(request);
        if (state > 0)
            break;
        if (state < 0)
            return error_set(&r->failure,
                             "rank %d: %s failed: another rank has ended, or the "
                             "network has",
                             r->rank, what);
        if (atomic_load(&r->stop))
            return error_set(&r->failure, "rank %d: another rank has ended", r->rank);
        if (spins < SPINS) {
            sched_yield(); /* ranks may share cores */
            continue;
        }
        int64_t waited = clock_ns() - start;
        if (!idle && waited > (int64_t)RANKS_TIMEOUT * 1000000000)
            return error_set(&r->failure, "rank %d: %s: no answer from another rank for %d s",
                             r->rank, what, RANKS_TIMEOUT);
        nanosleep(&(struct timespec){0, nap}, NULL);
        if (idle && nap < MOST_NAP_NS && waited > 1000000000)
            nap *= 2;
    }
    return true;
}

bool ranks_tell(struct ranks *r, void *buf, size_t bytes, bool idle)
{
    return ranks_ok(r, NULL) &&
           wait_for(r, r->link->bcast(buf, bytes, 0, 0), idle && r->rank > 0, "word from rank 0");
}

void ranks_reserve(struct ranks *r, size_t floats)
{
    size_t n = floats * (size_t)(r->tp > 2 ? r->tp : 2) + (size_t)r->tp;
    if (r->n_scratch >= n)
        return;
    r->scratch = mem_realloc(r->scratch, n, sizeof *r->scratch);
    r->n_scratch = n;
}

static float *scratch(struct ranks *r, size_t n)
{
    CHECK(n <= r->n_scratch, "%zu floats, %zu reserved", n, r->n_scratch);
    return r->scratch;
}

/* out[i] = sum over lanes of parts[lane][i], in their order. */
static void add_parts(float *out, const float *parts, size_t n, int lanes)
{
    memcpy(out, parts, n * sizeof *out);
    for (int t = 1; t < lanes; t++) {
        const float *part = parts + (size_t)t * n;
        for (size_t i = 0; i < n; i++)
            out[i] += part[i];
    }
}

void ranks_sum(struct ranks *r, float *rows, size_t n)
{
    size_t lanes = r ? (size_t)r->tp : 1;
    if (lanes == 1 || !ranks_ok(r, NULL))
        return;
    if (n * sizeof(float) <= RANKS_GATHER_BYTES) {
        float *all = scratch(r, n * lanes);
        if (wait_for(r, r->link->allgather(rows, all, n * sizeof(float), 1), false, "a sum"))
            add_parts(rows, all, n, r->tp);
        return;
    }
    /* Each lane adds up a piece and gives it to the others. */
    size_t each = (n + lanes - 1) / lanes, whole = each * lanes;
    float *mine = scratch(r, 2 * whole), *all = mine + whole;
    memcpy(mine, rows, n * sizeof(float));
    memset(mine + n, 0, (whole - n) * sizeof(float));
    if (!wait_for(r, r->link->alltoall(mine, all, each * sizeof(float), 1), false, "a sum"))
        return;
    add_parts(mine, all, each, r->tp);
    if (wait_for(r, r->link->allgather(mine, all, each * sizeof(float), 1), false, "a sum"))
        memcpy(rows, all, n * sizeof(float));
}

struct run ranks_vocab(const struct ranks *r, int n_vocab, int lane)
{
    return run_of(n_vocab, VOCAB_UNIT, lane, r->tp);
}

/* (n_rows, of.n) behind each other to their columns of (n_rows, width), which may be the same place. */
static void spread(float *to, const float *from, int n_rows, struct run of, int width)
{
    for (int i = n_rows - 1; i >= 0; i--)
        memmove(to + (size_t)i * (size_t)width + of.first, from + (size_t)i * (size_t)of.n,
                (size_t)of.n * sizeof(float));
}

void ranks_collect(struct ranks *r, float *rows, int n_rows, int n_vocab)
{
    struct run mine = ranks_vocab(r, n_vocab, r->lane);
    int base = r->stage * r->tp;
    if (r->lane > 0) {
        ranks_send(r, rows, (size_t)n_rows * (size_t)mine.n * sizeof(float), base);
        return;
    }
    spread(rows, rows, n_rows, mine, n_vocab);
    for (int t = 1; t < r->tp; t++) {
        struct run theirs = ranks_vocab(r, n_vocab, t);
        size_t n = (size_t)n_rows * (size_t)theirs.n;
        float *part = scratch(r, n);
        if (!ranks_recv(r, part, n * sizeof(float), base + t))
            return;
        spread(rows, part, n_rows, theirs, n_vocab);
    }
}

struct ranks_wait *ranks_send_begin(struct ranks *r, const void *buf, size_t bytes, int to)
{
    if (!ranks_ok(r, NULL))
        return NULL;
    void *request = r->link->send(buf, bytes, to, 0);
    if (!request)
        error_set(&r->failure, "rank %d: MPI refused rows for another rank", r->rank);
    return request;
}

void ranks_wait_end(struct ranks *r, struct ranks_wait **wait)
{
    if (*wait && ranks_ok(r, NULL))
        wait_for(r, *wait, false, "rows for another rank");
    *wait = NULL;
}

bool ranks_send(struct ranks *r, const void *buf, size_t bytes, int to)
{
    return ranks_ok(r, NULL) &&
           wait_for(r, r->link->send(buf, bytes, to, 0), false, "rows for another rank");
}

bool ranks_recv(struct ranks *r, void *buf, size_t bytes, int from)
{
    return ranks_ok(r, NULL) &&
           wait_for(r, r->link->recv(buf, bytes, from, 0), false, "rows of another rank");
}

bool ranks_share(struct ranks *r, const void *mine, void *all, size_t bytes)
{
    return ranks_ok(r, NULL) &&
           wait_for(r, r->link->allgather(mine, all, bytes, 0), true, "all ranks");
}

bool ranks_agree(struct ranks *r, bool ok, struct error *err)
{
    if (!r)
        return ok;
    struct error mine = {0}, *all = mem_zalloc((size_t)r->size, sizeof *all);
    if (!ok)
        mine = *err;
    if (!ok && !mine.msg[0])
        error_set(&mine, "failed");
    bool heard = ranks_share(r, &mine, all, sizeof mine);
    for (int i = 0; heard && ok && i < r->size; i++)
        if (all[i].msg[0])
            ok = error_set(err, "rank %d: %.1000s", i, all[i].msg);
    mem_free(all);
    return ok && (heard || ranks_ok(r, err));
}

struct run run_of(int n, int unit, int at, int of)
{
    int units = (n + unit - 1) / unit, each = units / of, more = units % of;
    int first = at * each + (at < more ? at : more), last = first + each + (at < more);
    struct run out = {first * unit < n ? first * unit : n, 0};
    out.n = (last * unit < n ? last * unit : n) - out.first;
    return out;
}

bool ranks_same(struct ranks *r, const char *what, const char *value, struct error *err)
{
    char mine[512] = "", *all = mem_zalloc((size_t)r->size, sizeof mine);
    snprintf(mine, sizeof mine, "%s", value);
    bool ok = ranks_share(r, mine, all, sizeof mine) || ranks_ok(r, err);
    for (int i = 1; ok && i < r->size; i++) {
        const char *other = all + (size_t)i * sizeof mine;
        if (strcmp(all, other) != 0)
            ok = error_set(err, "%s differ: rank 0 has \"%.400s\", rank %d \"%.400s\"", what, all,
                           i, other);
    }
    mem_free(all);
    return ok;
}

bool ranks_arrange(struct ranks *r, int tp, int pp, bool ep, struct error *err)
{
    pp = pp > 0 ? pp : 1;
    if (tp == 0)
        tp = r->size / pp;
    if (tp < 1 || tp * pp != r->size)
        return error_set(err, "--tp %d times --pp %d are %d ranks; %d were started", tp, pp,
                         tp * pp, r->size);
    if (r->size > RANKS_MOST)
        return error_set(err, "%d ranks were started; %d is the most", r->size, RANKS_MOST);
    r->tp = tp;
    r->pp = pp;
    r->ep = ep;
    r->lane = r->rank % tp;
    r->stage = r->rank / tp;
    if (r->link->split(r->stage, r->lane) != 0)
        return error_set(err, "rank %d: MPI refused a group of %d", r->rank, tp);
    return true;
}
