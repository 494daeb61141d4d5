/* Ranks, the processes that run one model together: see ranks.h. Owns the shared object that uses MPI. */
#include "dist/ranks.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/os.h"
#include "dist/ranks_int.h"
#include "dist/ranks_line.h"
#include "dist/ranks_link.h"

#include <dlfcn.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    SPIN_NS = 1000000,    /* polling before the first nap */
    LATE_NS = 50000,      /* a yield that takes longer: other programs compete for the core */
    CROWDED_NS = 5000,    /* then a wait polls only this long */
    CROWDED_WAITS = 1000, /* number of waits for which that holds */
    SLICE_NS = 100000,    /* and the thread requests this scheduler slice */
    NAP_NS = 20000,       /* the first nap */
    MOST_NAP_NS = 500000, /* the longest nap */
    VOCAB_UNIT = 64,      /* rows of a head that stay together */
    SETTLE_MS =
        500, /* time for the lines to report which rank has ended, once MPI reports that one has */
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

bool ranks_first(void)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *n = getenv(names[i]);
        if (n)
            return atoi(n) == 0;
    }
    return true;
}

/* Searches beside the program, in the build folder and in the install folder. */
static void *find_link(char *why, size_t size)
{
    char self[4096], path[4224];
    const char *named = getenv("STEEL_MPI");
    os_program(self, sizeof self);
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
        if (i > 0 && access(path, R_OK) != 0)
            continue;
        void *lib = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
        if (!lib)
            snprintf(why, size, "%s%s", i ? "" : "STEEL_MPI: ", dlerror());
        return lib;
    }
    snprintf(why, size,
             "no steel-mpi.so beside the program (`make mpi` builds it, where MPI is installed)");
    return NULL;
}

/* Connects a line from every rank to rank 0. The end of a rank without a line is noticed by the timeout only. */
static bool connect_lines(struct ranks *r, struct error *err)
{
    enum { HOME = 256 };
    struct ranks_offer offer = {0};
    char mine[HOME] = "", *homes = mem_zalloc((size_t)r->size, HOME), *all = homes;
    os_network_name(mine, sizeof mine);
    bool ok = ranks_allgather(r, mine, homes, sizeof mine), nearby = true;
    for (int i = 1; i < r->size; i++)
        nearby &= !strcmp(homes, homes + (size_t)i * HOME);
    if (ok && r->rank == 0)
        ranks_line_listen(r->line, nearby, &offer);
    ok = ok && ranks_broadcast(r, &offer, sizeof offer, true);
    bool has = ok && r->rank > 0 && ranks_line_dial(r->line, &offer, !strcmp(homes, mine));
    mine[0] = has || r->rank == 0;
    ok = ok && ranks_allgather(r, mine, all, 1);
    r->lined = ok && !memchr(all, 0, (size_t)r->size);
    if (ok && r->rank == 0 && !r->lined)
        error_set(&r->comm.notice,
                  "rank %d does not reach rank 0 over TCP%s%s (STEEL_RANK_ADDRESS names %s "
                  "address): its end will be noticed late",
                  (int)((char *)memchr(all, 0, (size_t)r->size) - all), offer.named ? " at " : "",
                  offer.named ? offer.address[0] : "", offer.named ? "this" : "another");
    mem_free(homes);
    ranks_line_ready(r->line);
    if (has) {
        /* Launchers send these signals to all ranks. Only rank 0 acts on them; the others end with it. */
        signal(SIGTERM, SIG_IGN);
        signal(SIGINT, SIG_IGN);
    }
    return ok || ranks_ok(r, err);
}

static struct ranks *ranks_new(void)
{
    struct ranks *r = mem_zalloc(1, sizeof *r);
    atomic_store(&r->timeout_s, RANKS_TIMEOUT);
    r->alarm = os_wake_fd();
    r->line = ranks_line_new(r);
    return r;
}

static void ranks_free(struct ranks *r)
{
    ranks_line_free(r->line);
    if (r->alarm >= 0)
        close(r->alarm);
    ranks_release(r);
    mem_free(r);
    world = NULL;
}

/* Loads and starts MPI. NULL: `why` has the reason. */
static const struct ranks_link *open_link(char *why, size_t size)
{
    void *lib = find_link(why, size);
    ranks_link_open *open = NULL;
    if (lib)
        *(void **)&open = dlsym(lib, "steel_ranks_link");
    if (lib && !open)
        snprintf(why, size, "steel-mpi.so has no steel_ranks_link");
    return open ? open(RANKS_LINK_VERSION, why, size) : NULL;
}

struct ranks *ranks_open(struct error *err)
{
    char why[512] = "";
    struct ranks *r = ranks_new();
    world = r;
    os_exact_naps();
    bool ok = r->line && r->alarm >= 0;
    if (!ok)
        error_set(err, "the system has no thread for the ranks");
    const struct ranks_link *link = ok ? open_link(why, sizeof why) : NULL;
    if (ok && !link)
        ok = error_set(err, "several processes were started, but MPI is not available: %s", why);
    if (link) {
        r->link = link;
        r->rank = link->rank;
        r->tp = r->size = link->size;
        r->pp = 1;
        r->local = link->local;
        r->n_local = link->n_local;
    }
    if (ok && r->size > RANKS_MOST)
        ok = error_set(err, "%d ranks were started; %d is the most", r->size, RANKS_MOST);
    if (ok && connect_lines(r, err))
        return r;
    ranks_free(r);
    return NULL;
}

struct ranks *ranks_world(void)
{
    return world;
}

void ranks_close(struct ranks *r)
{
    if (!r)
        return;
    if (atomic_load(&r->stop) && ranks_ok(r, NULL))
        r->failure = r->lost; /* no wait has set it */
    if (ranks_ok(r, NULL)) {
        ranks_line_bye(r->line);
        r->link->finalize();
    } else {
        /* MPI would wait for the others in vain. Rank 0 reports for all ranks, so it is sent the reason. */
        ranks_line_tell(r->line, r->failure.msg);
    }
    ranks_free(r);
}

bool ranks_ok(const struct ranks *r, struct error *err)
{
    if (!r || !r->failure.msg[0])
        return true;
    return error_set(err, "%s", r->failure.msg);
}

bool ranks_lose(struct ranks *r, const char *fmt, ...)
{
    if (atomic_exchange(&r->losing, true))
        return false;
    va_list ap;
    va_start(ap, fmt);
    char text[sizeof r->lost.msg];
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    error_set(&r->lost, "%s", text);
    atomic_store(&r->stop, true);
    os_wake(r->alarm);
    if (r->line)
        ranks_line_wake(r->line);
    return true;
}

static void nap_for(int64_t ns)
{
    nanosleep(&(struct timespec){0, ns}, NULL);
}

/* Loses the job, unless another thread has, and makes the reason this rank's failure. */
static void lose_by(struct ranks *r, const char *what, const char *why)
{
    ranks_lose(r, "rank %d: %s%.900s", r->rank, what, why);
    while (!atomic_load(&r->stop)) /* another thread is writing */
        nap_for(NAP_NS);
    error_set(&r->failure, "%s", r->lost.msg);
}

bool ranks_give_up(struct ranks *r, const char *what, const char *why)
{
    char begin[128];
    for (int i = 0; i < SETTLE_MS && !atomic_load(&r->stop); i++)
        nap_for(1000000);
    snprintf(begin, sizeof begin, "%s: ", what);
    lose_by(r, begin, why);
    return false;
}

void ranks_fail(struct ranks *r, const char *why)
{
    if (ranks_ok(r, NULL))
        lose_by(r, "", why);
}

/* Whether a wait has exceeded its limit. */
static bool too_long(struct ranks *r, int64_t waited, enum wait kind)
{
    int64_t limit = (int64_t)atomic_load(&r->timeout_s) * 1000000000 + SETTLE_MS * 1000000;
    int64_t most = kind == WAIT_STEP ? RANKS_PATIENCE * limit : RANKS_LONG * 1000000000LL;
    if (waited <= limit || (kind == WAIT_IDLE && r->lined))
        return false;
    /* Without all lines it is unknown who is busy. A rank that opens a model may be. */
    bool may_work = (r->line && ranks_line_busy(r->line)) || (kind != WAIT_STEP && !r->lined);
    return waited > most || !may_work;
}

/* Requests a shorter scheduler slice for this thread, so that it preempts threads with longer slices when it wakes. */
static void shorten_slice(void)
{
    static _Thread_local bool done;
    if (!done)
        os_short_slice(SLICE_NS);
    done = true;
}

/* Whether to keep polling; false: it is time to nap. A thread that spins on a shared core uses up its share for
 * nothing, and has to wait for the core when the message arrives. */
static bool keep_polling(struct ranks *r, int64_t waited)
{
    if (r->crowded)
        return waited < CROWDED_NS;
    if (waited >= SPIN_NS)
        return false;
    int64_t before = clock_ns();
    sched_yield(); /* ranks may share cores */
    if (clock_ns() - before > LATE_NS) {
        r->crowded = CROWDED_WAITS;
        shorten_slice();
    }
    return true;
}

/* Waits for an operation. Polls first, then naps, so that a long wait leaves the core to others. */
static bool wait_to_end(struct ranks *r, void *request, enum wait kind, const char *what)
{
    int64_t start = clock_ns(), last = start, nap = NAP_NS;
    if (!request)
        return ranks_give_up(r, what, "MPI refused it");
    for (;;) {
        int state = r->link->test(request);
        if (state > 0)
            return true;
        if (state < 0)
            return ranks_give_up(r, what, "another rank has ended, or the network has");
        if (atomic_load(&r->stop))
            return ranks_give_up(r, what, "the job ends");
        int64_t now = clock_ns(), waited;
        if (now - last >= RANKS_AWAY_MS * 1000000LL)
            start += now - last;
        last = now;
        waited = now - start;
        if (keep_polling(r, waited))
            continue;
        if (too_long(r, waited, kind))
            return ranks_give_up(r, what, "no answer from another rank (--rank-timeout)");
        nap_for(nap);
        if (kind != WAIT_STEP && nap < MOST_NAP_NS && waited > 1000000000)
            nap *= 2;
    }
}

bool ranks_wait_for(struct ranks *r, void *request, enum wait kind, const char *what)
{
    atomic_store_explicit(&r->waiting, true, memory_order_relaxed);
    bool ok = wait_to_end(r, request, kind, what);
    r->crowded -= r->crowded > 0;
    atomic_fetch_add_explicit(&r->done, 1, memory_order_relaxed);
    atomic_store_explicit(&r->waiting, false, memory_order_relaxed);
    return ok;
}

bool ranks_broadcast(struct ranks *r, void *buf, size_t bytes, bool idle)
{
    return ranks_ok(r, NULL) &&
           ranks_wait_for(r, r->link->bcast(buf, bytes, 0, 0),
                          idle && r->rank > 0 ? WAIT_IDLE : WAIT_STEP, "a message from rank 0");
}

struct ranks_wait *ranks_broadcast_begin(struct ranks *r, void *buf, size_t bytes)
{
    if (!ranks_ok(r, NULL))
        return NULL;
    void *request = r->link->bcast(buf, bytes, 0, 0);
    if (!request)
        ranks_give_up(r, "a broadcast", "MPI refused it");
    return request;
}

void ranks_progress(struct ranks *r)
{
    if (!ranks_ok(r, NULL))
        return;
    r->link->poke();
}

struct range ranks_vocab(const struct ranks *r, int n_vocab, int tp_rank)
{
    return range_share(n_vocab, VOCAB_UNIT, tp_rank, r->tp);
}

/* Spreads contiguous (n_rows, of.n) to columns `of` of (n_rows, width). The two may overlap. */
static void spread(float *to, const float *from, int n_rows, struct range of, int width)
{
    for (int i = n_rows - 1; i >= 0; i--)
        memmove(to + (size_t)i * (size_t)width + of.first, from + (size_t)i * (size_t)of.n,
                (size_t)of.n * sizeof(float));
}

void ranks_gather_logits(struct ranks *r, float *rows, int n_rows, int n_vocab)
{
    struct range mine = ranks_vocab(r, n_vocab, r->tp_rank);
    int base = r->stage * r->tp;
    if (r->tp_rank > 0) {
        ranks_send(r, rows, (size_t)n_rows * (size_t)mine.n * sizeof(float), base);
        return;
    }
    spread(rows, rows, n_rows, mine, n_vocab);
    for (int t = 1; t < r->tp; t++) {
        struct range theirs = ranks_vocab(r, n_vocab, t);
        size_t n = (size_t)n_rows * (size_t)theirs.n;
        float *part = ranks_scratch(r, n);
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
        ranks_give_up(r, "rows for another rank", "MPI refused them");
    return request;
}

void ranks_wait_end(struct ranks *r, struct ranks_wait **wait)
{
    if (*wait && ranks_ok(r, NULL))
        ranks_wait_for(r, *wait, WAIT_STEP, "rows for another rank");
    *wait = NULL;
}

bool ranks_send(struct ranks *r, const void *buf, size_t bytes, int to)
{
    return ranks_ok(r, NULL) &&
           ranks_wait_for(r, r->link->send(buf, bytes, to, 0), WAIT_STEP, "rows for another rank");
}

bool ranks_recv(struct ranks *r, void *buf, size_t bytes, int from)
{
    return ranks_ok(r, NULL) &&
           ranks_wait_for(r, r->link->recv(buf, bytes, from, 0), WAIT_STEP, "rows of another rank");
}

bool ranks_allgather(struct ranks *r, const void *mine, void *all, size_t bytes)
{
    return ranks_ok(r, NULL) &&
           ranks_wait_for(r, r->link->allgather(mine, all, bytes, 0), WAIT_OPEN, "all ranks");
}

bool ranks_barrier(struct ranks *r)
{
    char mine = 0, all[RANKS_MOST];
    return ranks_ok(r, NULL) &&
           ranks_wait_for(r, r->link->allgather(&mine, all, 1, 0), WAIT_STEP, "all ranks");
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
    bool heard = ranks_allgather(r, &mine, all, sizeof mine);
    for (int i = 0; heard && ok && i < r->size; i++)
        if (all[i].msg[0])
            ok = error_set(err, "rank %d: %.1000s", i, all[i].msg);
    mem_free(all);
    return ok && (heard || ranks_ok(r, err));
}

/* An error that shows both values, starting a little before their first difference. */
static bool name_both(struct error *err, const char *what, const char *a, const char *b, int rank)
{
    size_t same = 0, from;
    while (a[same] && a[same] == b[same])
        same++;
    from = same > 200 ? same - 40 : 0;
    const char *cut = from ? "..." : "";
    return error_set(err, "%s differ: rank 0 has \"%s%.400s\", rank %d \"%s%.400s\"", what, cut,
                     a + from, rank, cut, b + from);
}

bool ranks_same(struct ranks *r, const char *what, const char *value, struct error *err)
{
    char *mine = mem_zalloc(1, RANKS_VALUE), *all = mem_zalloc((size_t)r->size, RANKS_VALUE);
    snprintf(mine, RANKS_VALUE, "%s", value);
    bool ok = ranks_allgather(r, mine, all, RANKS_VALUE) || ranks_ok(r, err);
    for (int i = 1; ok && i < r->size; i++) {
        const char *other = all + (size_t)i * RANKS_VALUE;
        if (strcmp(all, other) != 0)
            ok = name_both(err, what, all, other, i);
    }
    mem_free(mine);
    mem_free(all);
    return ok;
}

void ranks_set_timeout(struct ranks *r, int seconds)
{
    atomic_store(&r->timeout_s, seconds);
    ranks_line_beat(r->line);
}

bool ranks_arrange(struct ranks *r, int tp, int pp, bool ep, struct error *err)
{
    pp = pp > 0 ? pp : 1;
    if (tp == 0)
        tp = r->size / pp;
    if (tp < 1 || tp * pp != r->size)
        return error_set(err, "--tp %d times --pp %d are %d ranks; %d were started", tp, pp,
                         tp * pp, r->size);
    r->tp = tp;
    r->pp = pp;
    r->ep = ep;
    r->tp_rank = r->rank % tp;
    r->stage = r->rank / tp;
    ranks_line_limit(r->line, RANKS_START, "MPI has not made a group of ranks in two minutes");
    bool made = r->link->split(r->stage, r->tp_rank) == 0;
    ranks_line_ready(r->line);
    if (!made)
        return error_set(err, "rank %d: MPI refused a group of %d", r->rank, tp);
    return true;
}
