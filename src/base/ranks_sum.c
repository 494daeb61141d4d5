/*
 * Sums over the lanes of a stage (ranks.h). Each goes through stages: what lanes have is exchanged, added up in
 * the order of lanes, and given to all. A stage begins when the messages of the one before have come, which is
 * found out by who waits for the sum, or pokes. Up to three are under way, each in a group of its own: in which
 * order their stages begin may differ from lane to lane. Owns the memory for them.
 */
#include "base/mem.h"
#include "base/ranks.h"
#include "base/ranks_int.h"
#include "base/ranks_link.h"

#include <string.h>

enum stage {
    SUM_GATHER, /* few rows: everybody gets all that lanes have */
    SUM_PIECES, /* each lane gets its piece of what the others have */
    SUM_RESULT, /* and gives what it added up to all */
};

void ranks_reserve(struct ranks *r, size_t floats)
{
    size_t n = floats * (size_t)(r->tp > 2 ? r->tp : 2) + (size_t)r->tp;
    if (r->n_scratch >= n)
        return;
    r->scratch = mem_realloc(r->scratch, n, sizeof *r->scratch);
    r->n_scratch = n;
}

void ranks_reserve_halves(struct ranks *r, int rows, int width)
{
    size_t lanes = (size_t)r->tp, few = RANKS_GATHER_BYTES / sizeof(float);
    /* Pieces are as long as the longest, of either half; and either may be few. */
    size_t n = 2 * ((size_t)rows + 2 * lanes) * (size_t)width + 2 * lanes * few;
    if (r->n_half_scratch < n) {
        r->half_scratch = mem_realloc(r->half_scratch, n, sizeof *r->half_scratch);
        r->n_half_scratch = n;
    }
    if (r->n_half_from < (size_t)rows) {
        r->half_from = mem_realloc(r->half_from, 2 * (size_t)rows, sizeof *r->half_from);
        r->n_half_from = (size_t)rows;
    }
}

void ranks_release(struct ranks *r)
{
    mem_free(r->scratch);
    mem_free(r->half_scratch);
    mem_free(r->half_from);
    r->scratch = r->half_scratch = NULL;
    r->half_from = NULL;
    r->n_scratch = r->n_half_scratch = r->n_half_from = 0;
}

float *ranks_scratch(struct ranks *r, size_t n)
{
    CHECK(n <= r->n_scratch, "%zu floats, %zu reserved", n, r->n_scratch);
    return r->scratch;
}

/* Room for a sum: halves share one block, from both ends. */
static float *room_of(struct ranks *r, const struct ranks_sum *s)
{
    if (s == &r->sums[0])
        return ranks_scratch(r, s->need);
    const struct ranks_sum *other = s == &r->sums[1] ? &r->sums[2] : &r->sums[1];
    size_t taken = other->request ? other->need : 0;
    CHECK(s->need + taken <= r->n_half_scratch, "%zu and %zu floats, %zu reserved", s->need, taken,
          r->n_half_scratch);
    return s == &r->sums[1] ? r->half_scratch : r->half_scratch + r->n_half_scratch - s->need;
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

/* rows [of.first, of.first + of.n) that lane t has something of, one behind the other, from `rows` to `to`.
 * How many floats. */
static int pack_rows(float *to, const float *rows, struct run of, int width, int t,
                     const uint64_t *from)
{
    int n = 0;
    for (int i = of.first; i < of.first + of.n; i++)
        if (from[i] >> t & 1) {
            memcpy(to + n, rows + (size_t)i * (size_t)width, (size_t)width * sizeof *to);
            n += width;
        }
    return n;
}

/* out (of.n, width) += what lane t sent of them, packed. */
static void add_packed(float *out, const float *packed, struct run of, int width, int t,
                       const uint64_t *from)
{
    for (int i = 0; i < of.n; i++) {
        if (!(from[of.first + i] >> t & 1))
            continue;
        for (int k = 0; k < width; k++)
            out[(size_t)i * (size_t)width + (size_t)k] += packed[k];
        packed += width;
    }
}

static bool is_sparse(const struct ranks_sum *s)
{
    return s->from != NULL;
}

/* The first half of the room is what goes out, the second what comes in. */
static float *incoming(const struct ranks *r, const struct ranks_sum *s)
{
    return s->room + s->each * (size_t)r->tp;
}

/* Each lane's pieces to those who add them up. */
static void *begin_pieces(struct ranks *r, struct ranks_sum *s)
{
    size_t whole = s->each * (size_t)r->tp;
    if (!is_sparse(s)) {
        memcpy(s->room, s->rows, s->n * sizeof(float));
        memset(s->room + s->n, 0, (whole - s->n) * sizeof(float));
        return r->link->alltoall(s->room, incoming(r, s), s->each * sizeof(float), s->group);
    }
    struct run mine = run_of(s->n_rows, 1, r->lane, r->tp);
    int sent = 0, got = 0;
    for (int t = 0; t < r->tp; t++) {
        s->talk[1][t] = sent;
        s->talk[0][t] = pack_rows(s->room + sent, s->rows, run_of(s->n_rows, 1, t, r->tp), s->width,
                                  r->lane, s->from);
        sent += s->talk[0][t];
        s->talk[3][t] = got;
        s->talk[2][t] = 0;
        for (int i = mine.first; i < mine.first + mine.n; i++)
            s->talk[2][t] += s->from[i] >> t & 1 ? s->width : 0;
        got += s->talk[2][t];
    }
    return r->link->exchange(s->room, s->talk[0], s->talk[1], incoming(r, s), s->talk[2],
                             s->talk[3], s->group);
}

/* This lane's piece, added up, to all. */
static void *begin_result(struct ranks *r, struct ranks_sum *s)
{
    const float *in = incoming(r, s);
    if (!is_sparse(s)) {
        add_parts(s->room, in, s->each, r->tp);
    } else {
        struct run mine = run_of(s->n_rows, 1, r->lane, r->tp);
        memset(s->room, 0, s->each * sizeof(float));
        for (int t = 0; t < r->tp; t++)
            add_packed(s->room, in + s->talk[3][t], mine, s->width, t, s->from);
    }
    return r->link->allgather(s->room, incoming(r, s), s->each * sizeof(float), s->group);
}

/* All pieces to where they belong. */
static void take_result(const struct ranks *r, const struct ranks_sum *s)
{
    const float *in = incoming(r, s);
    if (!is_sparse(s)) {
        memcpy(s->rows, in, s->n * sizeof(float));
        return;
    }
    for (int t = 0; t < r->tp; t++) {
        struct run theirs = run_of(s->n_rows, 1, t, r->tp);
        memcpy(s->rows + (size_t)theirs.first * (size_t)s->width, in + (size_t)t * s->each,
               (size_t)theirs.n * (size_t)s->width * sizeof(float));
    }
}

static void begin_stage(struct ranks *r, struct ranks_sum *s, enum stage stage)
{
    s->stage = (int)stage;
    if (stage == SUM_GATHER)
        s->request = r->link->allgather(s->rows, s->room, s->n * sizeof(float), s->group);
    else
        s->request = stage == SUM_PIECES ? begin_pieces(r, s) : begin_result(r, s);
    if (!s->request)
        ranks_give_up(r, "a sum", "MPI refused it");
}

/* The messages of its stage have come. */
static void go_on(struct ranks *r, struct ranks_sum *s)
{
    s->request = NULL;
    if (s->stage == SUM_GATHER)
        add_parts(s->rows, s->room, s->n, r->tp);
    else if (s->stage == SUM_PIECES)
        begin_stage(r, s, SUM_RESULT);
    else
        take_result(r, s);
}

static void begin(struct ranks *r, int which, float *rows, int n_rows, int width, size_t n,
                  const uint64_t *from)
{
    size_t lanes = r ? (size_t)r->tp : 1;
    if (lanes == 1 || n == 0 || !ranks_ok(r, NULL))
        return;
    struct ranks_sum *s = &r->sums[which];
    CHECK(!s->request, "a sum of half %d is under way", which - 1);
    bool few = n * sizeof(float) <= RANKS_GATHER_BYTES, sparse = from && !few && n <= INT32_MAX / 2;
    s->rows = rows;
    s->n = n;
    s->n_rows = n_rows;
    s->width = width;
    s->from = sparse ? from : NULL;
    s->group = 1 + which;
    s->each =
        sparse ? (size_t)run_of(n_rows, 1, 0, r->tp).n * (size_t)width : (n + lanes - 1) / lanes;
    s->need = few ? n * lanes : 2 * s->each * lanes;
    s->room = room_of(r, s);
    if (sparse && which > 0) { /* the caller's is gone by the end */
        uint64_t *own = r->half_from + (size_t)(which - 1) * r->n_half_from;
        CHECK((size_t)n_rows <= r->n_half_from, "%d rows, %zu reserved", n_rows, r->n_half_from);
        memcpy(own, from, (size_t)n_rows * sizeof *own);
        s->from = own;
    }
    begin_stage(r, s, few ? SUM_GATHER : SUM_PIECES);
}

static void end(struct ranks *r, int which)
{
    struct ranks_sum *s = r ? &r->sums[which] : NULL;
    while (s && s->request && ranks_ok(r, NULL)) {
        s->held = true;
        bool ok = ranks_wait_for(r, s->request, IN_STEP, "a sum");
        s->held = false;
        if (ok)
            go_on(r, s);
    }
}

void ranks_advance(struct ranks *r)
{
    for (size_t i = 1; i < sizeof r->sums / sizeof *r->sums; i++) {
        struct ranks_sum *s = &r->sums[i];
        int state = s->request && !s->held && ranks_ok(r, NULL) ? r->link->test(s->request) : 0;
        if (state > 0)
            go_on(r, s);
        else if (state < 0)
            ranks_give_up(r, "a sum", "another rank has ended, or the network has");
    }
}

void ranks_sum(struct ranks *r, float *rows, size_t n)
{
    begin(r, 0, rows, 0, 0, n, NULL);
    end(r, 0);
}

void ranks_sum_rows(struct ranks *r, float *rows, int n_rows, int width, const uint64_t *from)
{
    begin(r, 0, rows, n_rows, width, (size_t)n_rows * (size_t)width, from);
    end(r, 0);
}

void ranks_sum_begin(struct ranks *r, int half, float *rows, size_t n)
{
    begin(r, 1 + half, rows, 0, 0, n, NULL);
}

void ranks_sum_rows_begin(struct ranks *r, int half, float *rows, int n_rows, int width,
                          const uint64_t *from)
{
    begin(r, 1 + half, rows, n_rows, width, (size_t)n_rows * (size_t)width, from);
}

void ranks_sum_end(struct ranks *r, int half)
{
    end(r, 1 + half);
}
