/*
 * Sums over the ranks of a pipeline stage (ranks.h). The phases of a sum: exchange, add in the order of ranks,
 * distribute the result. The thread that waits for a sum starts its next phase when the messages of the previous
 * one have arrived. Owns the scratch memory.
 */
#include "base/mem.h"
#include "dist/ranks.h"
#include "dist/ranks_int.h"
#include "dist/ranks_link.h"

#include <string.h>

enum { ADD_FLOATS = 4096 }; /* block size: the blocks of all ranks fit the CPU's cache */

enum phase {
    SUM_GATHER, /* few rows: all ranks get everything (allgather) and add it up */
    SUM_PIECES, /* each rank gets the others' summands of its piece (reduce-scatter) */
    SUM_RESULT, /* and sends the sum to all (allgather) */
};

void ranks_reserve(struct ranks *r, size_t floats)
{
    size_t n = floats * (size_t)(r->tp > 2 ? r->tp : 2) + (size_t)r->tp;
    if (r->n_scratch >= n)
        return;
    r->scratch = mem_realloc(r->scratch, n, sizeof *r->scratch);
    r->n_scratch = n;
}

void ranks_release(struct ranks *r)
{
    mem_free(r->scratch);
    r->scratch = NULL;
    r->n_scratch = 0;
}

float *ranks_scratch(struct ranks *r, size_t n)
{
    CHECK(n <= r->n_scratch, "%zu floats, %zu reserved", n, r->n_scratch);
    return r->scratch;
}

/* out[i] = sum over t of parts[t][i], in order of t */
static void add_parts(float *out, const float *parts, size_t n, int tp)
{
    memcpy(out, parts, n * sizeof *out);
    for (int t = 1; t < tp; t++) {
        const float *part = parts + (size_t)t * n;
        for (size_t i = 0; i < n; i++)
            out[i] += part[i];
    }
}

static bool is_sparse(const struct ranks_sum *s)
{
    return s->from != NULL;
}

/* The floats that rank t adds up. */
static struct range piece_of(const struct ranks *r, const struct ranks_sum *s, int t)
{
    if (is_sparse(s)) {
        struct range rows = range_share(s->n_rows, 1, t, r->tp);
        return (struct range){rows.first * s->width, rows.n * s->width};
    }
    size_t first = s->each * (size_t)t < s->n ? s->each * (size_t)t : s->n;
    size_t n = s->n - first < s->each ? s->n - first : s->each;
    return (struct range){(int)first, (int)n};
}

/* Packs the rows of a piece to which rank t contributes. Returns the number of floats. */
static int pack_rows(float *to, const struct ranks_sum *s, struct range piece, int t)
{
    int n = 0;
    for (int at = piece.first; at < piece.first + piece.n; at += s->width)
        if (s->from[at / s->width] >> t & 1) {
            memcpy(to + n, s->rows + at, (size_t)s->width * sizeof *to);
            n += s->width;
        }
    return n;
}

/* The number of floats that rank t contributes to a piece. */
static int count_floats(const struct ranks_sum *s, struct range piece, int t)
{
    int n = is_sparse(s) ? 0 : piece.n;
    for (int at = piece.first; is_sparse(s) && at < piece.first + piece.n; at += s->width)
        n += s->from[at / s->width] >> t & 1 ? s->width : 0;
    return n;
}

/* Receives the others' summands of this rank's piece. A copy of the outgoing floats lies before it, if one is needed. */
static float *incoming(const struct ranks *r, const struct ranks_sum *s)
{
    return s->room + (is_sparse(s) || s->to ? s->each * (size_t)r->tp : 0);
}

/* Sends each piece to the rank that adds it up. This rank's own piece is not moved. */
static void *begin_pieces(struct ranks *r, struct ranks_sum *s)
{
    struct range mine = piece_of(r, s, r->tp_rank);
    int sent = 0, got = 0;
    for (int t = 0; t < r->tp; t++) {
        struct range theirs = piece_of(r, s, t);
        bool other = t != r->tp_rank;
        s->counts[1][t] = is_sparse(s) ? sent : theirs.first;
        s->counts[0][t] = !other         ? 0
                          : is_sparse(s) ? pack_rows(s->room + sent, s, theirs, r->tp_rank)
                                         : theirs.n;
        sent += s->counts[0][t];
        s->counts[3][t] = got;
        s->counts[2][t] = other ? count_floats(s, mine, t) : 0;
        got += s->counts[2][t];
    }
    return r->link->exchange(is_sparse(s) ? s->room : s->rows, s->counts[0], s->counts[1],
                             incoming(r, s), s->counts[2], s->counts[3], RANKS_STAGE_GROUP);
}

static void add(float *restrict to, const float *restrict from, int n)
{
    for (int i = 0; i < n; i++)
        to[i] += from[i];
}

/* own (n) = the sum of parts (ranks) in order; parts[t] NULL: rank t contributes nothing. own is one of the parts, or
 * zeros. The other parts are overwritten. */
static void add_in_order(float *own, float *const *parts, int tp, int n)
{
    float *sum = NULL;
    for (int t = 0; t < tp; t++) {
        float *part = parts[t];
        if (part && sum && part == own)
            add(own, sum, n);
        else if (part && sum)
            add(sum, part, n);
        if (part && (!sum || part == own))
            sum = part;
    }
    if (sum && sum != own)
        memcpy(own, sum, (size_t)n * sizeof *own);
}

/* Adds up this rank's piece in place. */
static void add_up(const struct ranks *r, const struct ranks_sum *s)
{
    struct range mine = piece_of(r, s, r->tp_rank);
    float *own = s->rows + mine.first, *next[RANKS_MOST], *parts[RANKS_MOST];
    int width = is_sparse(s) ? s->width : ADD_FLOATS, row = is_sparse(s) ? mine.first / width : 0;
    for (int t = 0; t < r->tp; t++)
        next[t] = t == r->tp_rank ? own : incoming(r, s) + s->counts[3][t];
    for (int at = 0; at < mine.n; at += width, row++) {
        int n = mine.n - at < width ? mine.n - at : width;
        for (int t = 0; t < r->tp; t++) {
            bool has = !is_sparse(s) || (s->from[row] >> t & 1);
            parts[t] = has ? next[t] : NULL;
            next[t] += has || t == r->tp_rank ? n : 0;
        }
        add_in_order(own + at, parts, r->tp, n);
    }
}

/* Adds up this rank's piece and starts the exchange of all pieces. */
static void *begin_result(struct ranks *r, struct ranks_sum *s)
{
    add_up(r, s);
    for (int t = 0; t < r->tp; t++) {
        struct range piece = piece_of(r, s, t);
        s->counts[0][t] = piece.n;
        s->counts[1][t] = piece.first;
    }
    return r->link->complete(s->rows, s->counts[0], s->counts[1], RANKS_STAGE_GROUP);
}

static void begin_phase(struct ranks *r, struct ranks_sum *s, enum phase phase)
{
    s->phase = (int)phase;
    if (phase == SUM_GATHER)
        s->request = r->link->allgather(s->rows, s->room, s->n * sizeof(float), RANKS_STAGE_GROUP);
    else
        s->request = phase == SUM_PIECES ? begin_pieces(r, s) : begin_result(r, s);
    if (!s->request)
        ranks_give_up(r, "a sum", "MPI refused it");
}

/* Finishes the current phase, whose messages have arrived. */
static void advance(struct ranks *r, struct ranks_sum *s)
{
    s->request = NULL;
    if (s->phase == SUM_GATHER)
        add_parts(s->rows, s->room, s->n, r->tp);
    else if (s->phase == SUM_PIECES)
        begin_phase(r, s, SUM_RESULT);
    else if (s->to)
        memcpy(s->to, s->rows, s->n * sizeof(float));
}

static void begin(struct ranks *r, float *rows, int n_rows, int width, size_t n,
                  const uint64_t *from)
{
    size_t tp = r ? (size_t)r->tp : 1;
    if (tp == 1 || n == 0 || !ranks_ok(r, NULL))
        return;
    if (n > INT32_MAX) {
        ranks_give_up(r, "a sum", "it has more rows than MPI can count");
        return;
    }
    struct ranks_sum *s = &r->sum;
    bool few = n * sizeof(float) <= RANKS_GATHER_BYTES, sparse = from && !few;
    s->rows = rows;
    s->n = n;
    s->n_rows = n_rows;
    s->width = width;
    s->from = sparse ? from : NULL;
    s->each =
        sparse ? (size_t)range_share(n_rows, 1, 0, r->tp).n * (size_t)width : (n + tp - 1) / tp;
    /* MPI may let other ranks read the rows directly, which does not work for memory pinned by a GPU driver. */
    bool copied = r->comm.n_on_device > 0 && !few && !sparse;
    s->need = few ? n * tp : (sparse || copied ? 2 : 1) * s->each * tp;
    s->room = ranks_scratch(r, s->need);
    s->to = copied ? rows : NULL;
    if (copied)
        s->rows = memcpy(s->room, rows, n * sizeof(float));
    begin_phase(r, s, few ? SUM_GATHER : SUM_PIECES);
}

static void end(struct ranks *r)
{
    struct ranks_sum *s = r ? &r->sum : NULL;
    while (s && s->request && ranks_ok(r, NULL))
        if (ranks_wait_for(r, s->request, WAIT_STEP, "a sum"))
            advance(r, s);
}

void ranks_sum(struct ranks *r, float *rows, size_t n)
{
    begin(r, rows, 0, 0, n, NULL);
    end(r);
}

void ranks_sum_rows(struct ranks *r, float *rows, int n_rows, int width, const uint64_t *from)
{
    begin(r, rows, n_rows, width, (size_t)n_rows * (size_t)width, from);
    end(r);
}
