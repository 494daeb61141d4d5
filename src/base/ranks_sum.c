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

enum { ADD_FLOATS = 4096 }; /* at a time: of all lanes they are in the cache */

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

static bool is_sparse(const struct ranks_sum *s)
{
    return s->from != NULL;
}

/* The floats that lane t adds up. */
static struct run piece_of(const struct ranks *r, const struct ranks_sum *s, int t)
{
    if (is_sparse(s)) {
        struct run rows = run_of(s->n_rows, 1, t, r->tp);
        return (struct run){rows.first * s->width, rows.n * s->width};
    }
    size_t first = s->each * (size_t)t < s->n ? s->each * (size_t)t : s->n;
    size_t n = s->n - first < s->each ? s->n - first : s->each;
    return (struct run){(int)first, (int)n};
}

/* Rows of a piece that lane t has something of, one behind the other. How many floats. */
static int pack_rows(float *to, const struct ranks_sum *s, struct run piece, int t)
{
    int n = 0;
    for (int at = piece.first; at < piece.first + piece.n; at += s->width)
        if (s->from[at / s->width] >> t & 1) {
            memcpy(to + n, s->rows + at, (size_t)s->width * sizeof *to);
            n += s->width;
        }
    return n;
}

/* Floats that lane t has of a piece. */
static int count_floats(const struct ranks_sum *s, struct run piece, int t)
{
    int n = is_sparse(s) ? 0 : piece.n;
    for (int at = piece.first; is_sparse(s) && at < piece.first + piece.n; at += s->width)
        n += s->from[at / s->width] >> t & 1 ? s->width : 0;
    return n;
}

/* What the others have of this lane's piece. In front of it lies a copy of what goes out, where one is needed. */
static float *incoming(const struct ranks *r, const struct ranks_sum *s)
{
    return s->room + (is_sparse(s) || s->to ? s->each * (size_t)r->tp : 0);
}

/* Each lane's pieces to those who add them up; its own stays where it is. */
static void *begin_pieces(struct ranks *r, struct ranks_sum *s)
{
    struct run mine = piece_of(r, s, r->lane);
    int sent = 0, got = 0;
    for (int t = 0; t < r->tp; t++) {
        struct run theirs = piece_of(r, s, t);
        bool other = t != r->lane;
        s->talk[1][t] = is_sparse(s) ? sent : theirs.first;
        s->talk[0][t] = !other         ? 0
                        : is_sparse(s) ? pack_rows(s->room + sent, s, theirs, r->lane)
                                       : theirs.n;
        sent += s->talk[0][t];
        s->talk[3][t] = got;
        s->talk[2][t] = other ? count_floats(s, mine, t) : 0;
        got += s->talk[2][t];
    }
    return r->link->exchange(is_sparse(s) ? s->room : s->rows, s->talk[0], s->talk[1],
                             incoming(r, s), s->talk[2], s->talk[3], s->group);
}

static void add(float *restrict to, const float *restrict from, int n)
{
    for (int i = 0; i < n; i++)
        to[i] += from[i];
}

/* own (n) = the sum of parts (lanes), in their order; NULL: that lane has nothing. own is one of them, or zeros. The
 * others' are not needed any more. */
static void add_in_order(float *own, float *const *parts, int lanes, int n)
{
    float *sum = NULL;
    for (int t = 0; t < lanes; t++) {
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

/* This lane's piece, added up where it is. */
static void add_up(const struct ranks *r, const struct ranks_sum *s)
{
    struct run mine = piece_of(r, s, r->lane);
    float *own = s->rows + mine.first, *next[RANKS_MOST], *parts[RANKS_MOST];
    int width = is_sparse(s) ? s->width : ADD_FLOATS, row = is_sparse(s) ? mine.first / width : 0;
    for (int t = 0; t < r->tp; t++)
        next[t] = t == r->lane ? own : incoming(r, s) + s->talk[3][t];
    for (int at = 0; at < mine.n; at += width, row++) {
        int n = mine.n - at < width ? mine.n - at : width;
        for (int t = 0; t < r->tp; t++) {
            bool has = !is_sparse(s) || (s->from[row] >> t & 1);
            parts[t] = has ? next[t] : NULL;
            next[t] += has || t == r->lane ? n : 0;
        }
        add_in_order(own + at, parts, r->tp, n);
    }
}

/* It goes to all, and theirs come to where they belong. */
static void *begin_result(struct ranks *r, struct ranks_sum *s)
{
    add_up(r, s);
    for (int t = 0; t < r->tp; t++) {
        struct run piece = piece_of(r, s, t);
        s->talk[0][t] = piece.n;
        s->talk[1][t] = piece.first;
    }
    return r->link->complete(s->rows, s->talk[0], s->talk[1], s->group);
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
    else if (s->to)
        memcpy(s->to, s->rows, s->n * sizeof(float));
}

static void begin(struct ranks *r, int which, float *rows, int n_rows, int width, size_t n,
                  const uint64_t *from)
{
    size_t lanes = r ? (size_t)r->tp : 1;
    if (lanes == 1 || n == 0 || !ranks_ok(r, NULL))
        return;
    if (n > INT32_MAX) {
        ranks_give_up(r, "a sum", "it has more rows than MPI can count");
        return;
    }
    struct ranks_sum *s = &r->sums[which];
    CHECK(!s->request, "a sum of half %d is under way", which - 1);
    bool few = n * sizeof(float) <= RANKS_GATHER_BYTES, sparse = from && !few;
    s->rows = rows;
    s->n = n;
    s->n_rows = n_rows;
    s->width = width;
    s->from = sparse ? from : NULL;
    s->group = 1 + which;
    s->each =
        sparse ? (size_t)run_of(n_rows, 1, 0, r->tp).n * (size_t)width : (n + lanes - 1) / lanes;
    /* MPI may let the others read rows where they are, and memory that a GPU's driver has pinned is not to be read so. */
    bool copied = r->sharers > 0 && !few && !sparse;
    s->need = few ? n * lanes : (sparse || copied ? 2 : 1) * s->each * lanes;
    s->room = room_of(r, s);
    s->to = copied ? rows : NULL;
    if (copied)
        s->rows = memcpy(s->room, rows, n * sizeof(float));
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
