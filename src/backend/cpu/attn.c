/*
 * The attention op of the CPU backend: plans the step's work, distributes it over the threads and folds
 * partial results. The arithmetic is in attn_kernel.h, compiled per instruction set. This file is also
 * its plain C instance, which takes any head_dim.
 *
 * A unit of work is a run of a sequence's tokens x one kv head, with all query heads of its group, so
 * that the group shares each read of K and V. A unit that is long compared with the step is split
 * further by key chunk, and the thread that finishes last folds its partial results. Prefill and decode
 * differ only in the number of rows in a unit.
 *
 * Invariant: the bytes of an output row depend only on its query, its keys and values, its position, the
 * window and the kernels. They do not depend on the rest of the batch, the split of the prompt into
 * steps, the page numbers, or the number of threads. (The choice of kernels depends on the step with
 * ISA_AMX only.)
 *   1. Keys are taken in blocks of ATTN_BLOCK and chunks of ATTN_CHUNK at absolute positions. A chunk
 *      starts from empty sums. The chunks of a row are always folded in order, even when one thread runs
 *      them all.
 *   2. Within a block every sum runs in key or component order in a lane of its own (attn_kernel.h).
 *   3. Blocks, chunks and keys that only other rows of a tile see add weight exactly 0.
 *
 * A cache of rows (cpu_attention_rows) has one kv head. Each unit packs its keys into the kernels' order,
 * a transposition, before it computes with them.
 *
 * A unit reads every key and value once. Prefill is limited by FMA (or tile) throughput, since a unit's
 * rows share each block; so is decode with GQA groups that fill a tile (attn_kernel.h).
 */
#define KERNELS     attn_kernels_c
#define ROW_KERNELS attn_rows_c
#define ROWS        4
#define NV          4
#include "backend/cpu/attn_kernel.h"

#include "backend/cpu/ops.h"
#include "backend/cpu/pick.h"
#include "base/error.h"

#include <stdatomic.h>

enum {
    /* target query rows of a unit: enough to pay for converting a block of K and V, and for
     * transposing it in a cache of rows */
    UNIT_ROWS = 128,
    UNIT_ROWS_TRANSPOSED = 256,
    UNITS_PER_THREAD = 4,
    SPLITS_PER_THREAD = 4, /* units of more than 1/(this * threads) of the work are split */
    MIN_ROWS = 4,
    SPLIT_ROWS = 8, /* average rows of a split unit, which is usually a decode */
    ALIGN = 64,
};

#define LOG2_E 1.44269504f

struct unit {
    int seq, kv_head, head, heads; /* query heads [head, head + heads) */
    int token, tokens;             /* rows of the batch */
    int lo, hi;                    /* keys that any row sees; hi < lo: none */
    int64_t cost;
    int chunk, chunks;    /* chunks of [lo, hi] */
    size_t partial;       /* split: first row in the partial arrays, (chunks, rows) */
    _Atomic int unfolded; /* split: tasks still running; 0 = not split */
    const struct attn_kernels *kernels;
    bool pack; /* convert K and V of each block first */
    /* Sparse attention, of one token: the keys it sees are list[i / block] * block + i % block, of which all ranges above
     * count i. NULL: the sequence's. */
    const int32_t *list;
};

struct task {
    int unit, chunk, chunks; /* chunks 0: the whole unit */
};

struct attn_job {
    const struct bounds *s;
    const struct batch *b;
    const struct attention *l;
    bool
        row_cache; /* k is a cache of rows: D values per token, the first Dv of which are its value */
    struct pick *pick;
    const struct key_choice *choice; /* NULL = all keys */
    const struct relative *rel;      /* table NULL = none */
    const void *k, *v;
    const float *q;
    float *a;
    struct unit *units;
    struct task *tasks;
    float *part_m, *part_l, *part_o; /* (split_rows), (split_rows), (split_rows, Dv) */
    char *thread;                    /* (n_threads) areas of thread_bytes */
    size_t thread_bytes;
    int rows_cap, units_cap, n_units, n_tasks;
    int64_t cost; /* (row, key) pairs where the row sees the key */
};

/* One thread's working memory, for units of up to rows_cap rows. */
struct area {
    struct attn_tile *tiles, **seen;    /* (tiles) all of the unit; those that see the block */
    float *q, *m, *l, *o, *s, *scale;   /* (tiles) arrays of struct attn_tile */
    float *total_m, *total_l, *total_o; /* (rows), (rows), (rows, Dv) */
    float *k_pack, *v_pack;             /* (ATTN_CHUNK, D rounded up to whole panels) each */
    float *rows;                        /* (ATTN_ROWS, D) */
    float *bias;                        /* (rows, bias_stride) of relative positions */
    int *lo, *hi;                       /* (rows) */
};

/* Sizes that follow from the model's shape and the number of threads. */
struct limits {
    int rows_cap;   /* rows of a unit, a multiple of ATTN_MAX_ROWS */
    int tokens_cap; /* tokens of a unit */
    size_t units, tasks, split_rows, thread_bytes;
};

/* First query head that reads kv head k: the least h with h * K / H >= k. */
static int first_head(const struct attention *l, int k)
{
    return (k * l->n_heads + l->n_kv_heads - 1) / l->n_kv_heads;
}

/* The next `bytes` of the memory at base. With base NULL it only counts. */
static void *take(char *base, size_t *at, size_t bytes)
{
    void *p = base ? base + *at : NULL;
    *at += (bytes + ALIGN - 1) / ALIGN * ALIGN;
    return p;
}

static size_t widest(const struct attention *l)
{
    return (size_t)(l->k_dim > l->v_dim ? l->k_dim : l->v_dim);
}

size_t cpu_relative_stride(const struct attention *l)
{
    return ((size_t)l->rel_len + ATTN_MAX_WIDTH - 1) / ATTN_MAX_WIDTH * ATTN_MAX_WIDTH;
}

/* A row's biases, between zeros: vectors of keys begin before the farthest key with a bias, and end after the row's own. */
static size_t bias_stride(const struct attention *l)
{
    return cpu_relative_stride(l) + 2 * ATTN_MAX_WIDTH;
}

/* Lays out an area at base and returns its size. */
static size_t area_layout(struct area *a, char *base, const struct attention *l, int rows)
{
    size_t at = 0, n = (size_t)rows, dim = widest(l);
    size_t panels = (dim + 2 * ATTN_MAX_WIDTH) * ATTN_CHUNK * sizeof(float);
    /* No instruction set has tiles of fewer than MIN_ROWS rows. */
    size_t tiles = n / MIN_ROWS, lanes = ATTN_MAX_ROWS * sizeof(float);
    a->tiles = take(base, &at, tiles * sizeof *a->tiles);
    a->seen = take(base, &at, tiles * sizeof *a->seen);
    a->q = take(base, &at, n * dim * sizeof(float));
    a->m = take(base, &at, tiles * lanes);
    a->l = take(base, &at, n * ATTN_MAX_WIDTH * sizeof(float));
    a->o = take(base, &at, n * dim * sizeof(float));
    /* Scores of all tiles, or those of one tile over a whole chunk with as much again for
     * weights. */
    size_t s_len = n * ATTN_BLOCK, chunk = 2 * ATTN_MAX_ROWS * ATTN_CHUNK;
    a->s = take(base, &at, (s_len > chunk ? s_len : chunk) * sizeof(float));
    a->scale = take(base, &at, tiles * lanes);
    a->total_m = take(base, &at, n * sizeof(float));
    a->total_l = take(base, &at, n * sizeof(float));
    a->total_o = take(base, &at, n * dim * sizeof(float));
    a->k_pack = take(base, &at, panels);
    a->v_pack = take(base, &at, panels);
    a->rows = take(base, &at, ATTN_ROWS * dim * sizeof(float));
    a->bias = take(base, &at, l->wrel ? n * bias_stride(l) * sizeof(float) : 0);
    a->lo = take(base, &at, n * sizeof(int));
    a->hi = take(base, &at, n * sizeof(int));
    return at;
}

static struct limits limits_of(const struct bounds *s, const struct attention *l, bool rows,
                               int n_threads)
{
    struct limits x;
    int group = (l->n_heads + l->n_kv_heads - 1) / l->n_kv_heads;
    int aim = rows ? UNIT_ROWS_TRANSPOSED : UNIT_ROWS;
    x.tokens_cap = group < aim ? aim / group : 1;
    x.rows_cap = (x.tokens_cap * group + ATTN_MAX_ROWS - 1) / ATTN_MAX_ROWS * ATTN_MAX_ROWS;
    size_t chunks = ((size_t)s->max_pages * (size_t)s->page_len) / ATTN_CHUNK + 1;
    size_t threads = (size_t)n_threads, kv = (size_t)l->n_kv_heads;
    size_t tokens = l->index.n_chosen ? 1 : (size_t)x.tokens_cap; /* rows that see the same keys */
    x.units = kv * ((size_t)s->max_seqs + (size_t)s->max_tokens / tokens + 1) +
              UNITS_PER_THREAD * threads;
    /* Fewer than SPLITS_PER_THREAD units per thread are large enough. Units without room for their
     * chunks are not split. */
    size_t split = n_threads > 1 ? SPLITS_PER_THREAD / 2 * threads * chunks : 0;
    x.tasks = x.units + split;
    x.split_rows = split * (size_t)(group > SPLIT_ROWS ? group : SPLIT_ROWS);
    struct area a;
    x.thread_bytes = area_layout(&a, NULL, l, x.rows_cap);
    return x;
}

/* Lays out the job's arrays at base and returns their size. */
static size_t job_layout(struct attn_job *j, const struct limits *x, const struct attention *l,
                         int n_threads, char *base)
{
    size_t at = 0;
    j->units = take(base, &at, x->units * sizeof *j->units);
    j->tasks = take(base, &at, x->tasks * sizeof *j->tasks);
    j->part_m = take(base, &at, x->split_rows * sizeof(float));
    j->part_l = take(base, &at, x->split_rows * sizeof(float));
    j->part_o = take(base, &at, x->split_rows * widest(l) * sizeof(float));
    j->rows_cap = x->rows_cap;
    j->units_cap = (int)x->units;
    j->thread_bytes = x->thread_bytes;
    j->thread = take(base, &at, x->thread_bytes * (size_t)n_threads);
    return at;
}

size_t cpu_attention_scratch(const struct bounds *s, const struct attention *l, int n_threads)
{
    struct limits x = limits_of(s, l, false, n_threads);
    struct attn_job j;
    return job_layout(&j, &x, l, n_threads, NULL);
}

size_t cpu_attention_rows_scratch(const struct bounds *s, const struct attention *l, int n_threads)
{
    struct limits x = limits_of(s, l, true, n_threads);
    struct attn_job j;
    return job_layout(&j, &x, l, n_threads, NULL);
}

/* The keys or blocks chosen for a row, *n of them; NULL: it sees all its keys. */
static const int32_t *chosen_of(const struct attn_job *j, int kv_head, int t, int *n)
{
    const struct key_choice *c = j->choice;
    size_t at = c ? (size_t)t * (size_t)c->groups + (size_t)(c->groups > 1 ? kv_head : 0) : 0;
    *n = c ? c->n[at] : -1;
    return *n < 0 ? NULL : c->list + at * (size_t)c->most;
}

/* [*lo, *hi]: the keys that row t of a sequence sees, or of those chosen for it; empty for padding. */
static void row_range(const struct attn_job *j, int seq, int kv_head, int t, int *lo, int *hi)
{
    int n;
    *lo = 0;
    *hi = -1;
    if (j->b->slot[t] < 0)
        return;
    if (chosen_of(j, kv_head, t, &n)) /* the row's own block is the last */
        *hi = (n - 1) * j->choice->block + j->b->pos[t] % j->choice->block;
    else
        batch_keys(j->b, j->l, seq, t, lo, hi);
}

/* The sequence's key that is the unit's key i. */
static int key_of(const struct attn_job *j, const struct unit *u, int i)
{
    int block = u->list ? j->choice->block : 1;
    return u->list ? u->list[i / block] * block + i % block : i;
}

/* The length of the runs in which a unit's keys are adjacent in memory. */
static int key_run(const struct attn_job *j, const struct unit *u)
{
    int a = j->s->page_len, b = u->list ? j->choice->block : a;
    while (b) { /* the greatest common divisor */
        int rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static void unit_add(struct attn_job *j, int seq, int kv_head, int token, int tokens)
{
    CHECK(j->n_units < j->units_cap, "more than %d units of attention", j->units_cap);
    struct unit *u = &j->units[j->n_units++];
    int head = first_head(j->l, kv_head), end = first_head(j->l, kv_head + 1);
    *u = (struct unit){.seq = seq,
                       .kv_head = kv_head,
                       .head = head,
                       .heads = end - head,
                       .token = token,
                       .tokens = tokens,
                       .lo = INT32_MAX,
                       .hi = -1};
    for (int t = token; t < token + tokens; t++) {
        int lo, hi;
        row_range(j, seq, kv_head, t, &lo, &hi);
        if (hi < lo)
            continue;
        u->lo = lo < u->lo ? lo : u->lo;
        u->hi = hi > u->hi ? hi : u->hi;
        u->cost += hi - lo + 1;
    }
    int n_list;
    if (tokens == 1)
        u->list = chosen_of(j, kv_head, token, &n_list);
    u->cost *= u->heads;
    int rows = tokens * u->heads;
    const struct pick_row *row =
        j->row_cache ? pick_latent(j->pick, j->s->k_type, j->l->k_dim, j->l->v_dim, rows)
                     : pick_attn(j->pick, j->s->k_type, j->s->v_type, j->l->k_dim, j->l->v_dim,
                                 key_run(j, u), j->l->wrel != NULL, rows);
    pick_count(j->pick, j->row_cache ? PICK_LATENT : PICK_ATTN, row);
    u->kernels = row->attn;
    u->pack = row->pack;
    if (u->hi >= u->lo) {
        u->chunk = u->lo / ATTN_CHUNK;
        u->chunks = u->hi / ATTN_CHUNK - u->chunk + 1;
    }
}

/* Fills units and tasks. Its choices affect the schedule, never the result. */
static void plan(struct attn_job *j, const struct limits *x, int n_threads)
{
    const struct batch *b = j->b;
    int kv = j->l->n_kv_heads;
    int64_t want = (int64_t)b->n_tokens * kv / (UNITS_PER_THREAD * n_threads) + 1;
    int tokens = j->choice ? 1 : want < x->tokens_cap ? (int)want : x->tokens_cap;
    int64_t total = 0;
    for (int seq = 0; seq < b->n_seqs; seq++)
        for (int k = 0; k < kv; k++)
            /* Last tokens first: they see the most keys, so short units balance the end. */
            for (int end = b->q_start[seq + 1]; end > b->q_start[seq]; end -= tokens) {
                int begin = end - tokens > b->q_start[seq] ? end - tokens : b->q_start[seq];
                unit_add(j, seq, k, begin, end - begin);
                total += j->units[j->n_units - 1].cost;
            }
    j->cost = total;
    size_t rows = 0, room = x->tasks - x->units;
    for (int i = 0; i < j->n_units; i++) {
        struct unit *u = &j->units[i];
        size_t need = (size_t)u->chunks * (size_t)(u->tokens * u->heads);
        int64_t share = u->cost * SPLITS_PER_THREAD * n_threads;
        if (n_threads == 1 || u->chunks < 2 || share <= total || rows + need > x->split_rows ||
            (size_t)j->n_tasks + (size_t)u->chunks > room)
            continue;
        u->partial = rows;
        rows += need;
        /* Each task is a run of chunks, since the next chunk is prefetched within a run. There are
         * as many runs as balance the end. */
        int tasks = share / total < u->chunks ? (int)(share / total) : u->chunks;
        u->unfolded = tasks;
        for (int t = 0; t < tasks; t++) {
            int first, last;
            pool_split(u->chunks, 1, t, tasks, &first, &last);
            j->tasks[j->n_tasks++] = (struct task){i, u->chunk + first, last - first};
        }
    }
    for (int i = 0; i < j->n_units; i++)
        if (!j->units[i].unfolded)
            j->tasks[j->n_tasks++] = (struct task){i, 0, 0};
}

/* The biases of row r of a unit, of query `head` of a token, for the keys that it sees. */
static void fill_bias(const struct attn_job *j, const struct unit *u, const struct area *a, int r,
                      int token, int head)
{
    const struct attention *l = j->l;
    size_t stride = j->rel->stride, wide = bias_stride(l);
    float *row = a->bias + (size_t)r * wide, *out = row + ATTN_MAX_WIDTH;
    int seen = a->hi[r] - a->lo[r] + 1, n = seen < l->rel_len ? seen : l->rel_len;
    memset(row, 0, ATTN_MAX_WIDTH * sizeof *row);
    memset(out + stride, 0, ATTN_MAX_WIDTH * sizeof *row);
    u->kernels->row->relative(j->rel->r + ((size_t)token * (size_t)l->n_heads + (size_t)head) *
                                              (size_t)l->rel_dim,
                              j->rel->table, stride, l->rel_dim,
                              n < l->rel_len ? (int)stride - n : 0, (int)stride, LOG2_E, out);
}

/* Sets up the unit's tiles: queries, scaled so that scores are in log2 units, and each row's range
 * of keys. o: (rows, Dv) the rows' sums. */
static int load_tiles(const struct attn_job *j, const struct unit *u, const struct area *a,
                      float *o)
{
    const struct attn_kernels *kn = u->kernels;
    int rows = u->tokens * u->heads, n = 0;
    size_t dim = (size_t)j->l->k_dim;
    for (int first = 0; first < rows; first += kn->rows, n++) {
        struct attn_tile *t = &a->tiles[n];
        const float *from[ATTN_MAX_ROWS];
        *t = (struct attn_tile){.rows = rows - first < kn->rows ? rows - first : kn->rows,
                                .lo = INT32_MAX,
                                .hi = -1,
                                .row_lo = a->lo + first,
                                .row_hi = a->hi + first,
                                .q = a->q + (size_t)first * dim,
                                .m = a->m + n * ATTN_MAX_ROWS,
                                .l = a->l + first * kn->width,
                                .o = o + (size_t)first * (size_t)j->l->v_dim,
                                .s = kn->block == ATTN_BLOCK ? a->s + first * ATTN_BLOCK : a->s,
                                .scale = a->scale + n * ATTN_MAX_ROWS,
                                .cap = j->l->softcap * LOG2_E};
        if (j->l->wrel) {
            t->bias_stride = bias_stride(j->l);
            t->bias = a->bias + (size_t)first * t->bias_stride + ATTN_MAX_WIDTH;
            t->bias_own = (int)j->rel->stride - 1;
        }
        for (int i = 0; i < t->rows; i++) {
            int r = first + i, token = u->token + r / u->heads, head = u->head + r % u->heads;
            from[i] = j->q + ((size_t)token * (size_t)j->l->n_heads + (size_t)head) * dim;
            row_range(j, u->seq, u->kv_head, token, &a->lo[r], &a->hi[r]);
            if (a->hi[r] < a->lo[r])
                continue;
            if (j->l->wrel)
                fill_bias(j, u, a, r, token, head);
            t->lo = a->lo[r] < t->lo ? a->lo[r] : t->lo;
            t->hi = a->hi[r] > t->hi ? a->hi[r] : t->hi;
        }
        kn->load(from, t->rows, j->l->k_dim, j->l->scale * LOG2_E, a->q + (size_t)first * dim);
    }
    return n;
}

/* The pool tiles that hold a key and its value, and the token's index in them. */
struct key_place {
    const char *k, *v;
    size_t off;
};

static struct key_place find_key(const struct attn_job *j, const int32_t *pages, int kv_head,
                                 int key)
{
    const struct bounds *s = j->s;
    size_t page = (size_t)pages[key / s->page_len], len = (size_t)s->page_len;
    size_t tile = page * (size_t)j->l->n_kv_heads + (size_t)kv_head, dim = (size_t)j->l->k_dim;
    size_t v_dim = (size_t)j->l->v_dim;
    return (struct key_place){.k = (const char *)j->k + tile * kv_tile_bytes(s->k_type, len, dim),
                              .v = (const char *)j->v + tile * kv_tile_bytes(s->v_type, len, v_dim),
                              .off = (size_t)key % len};
}

/* Points b at packed keys and values in a thread's area. */
static void point_at(const struct attn_kernels *kn, int first, int dim, const struct area *a,
                     struct attn_block *b)
{
    int panel = kn->panel;
    b->first = first;
    b->next = b;
    b->k_stride = b->v_stride = (size_t)panel;
    b->v_panel = (size_t)ATTN_BLOCK * (size_t)panel;
    b->k_step = b->v_step = (size_t)kn->width * sizeof(float);
    for (int i = 0; i < ATTN_BLOCK / kn->width; i++) {
        int at = i * kn->width;
        b->k[i] = a->k_pack + (size_t)(at / panel) * (size_t)(dim * panel) + at % panel;
        b->v[i] = a->v_pack + (size_t)(at * panel);
        b->k_tile[i] = b->k[i];
        b->v_tile[i] = b->v[i];
    }
}

/* Packs the block's tokens up to `last` from a cache of rows. */
static void pack_from_rows(const struct attn_job *j, const struct unit *u, int first, int last,
                           const struct area *a, struct attn_block *b)
{
    const int32_t *pages = j->b->pages + (size_t)u->seq * (size_t)j->b->max_pages;
    const struct attn_kernels *kn = u->kernels;
    int dim = j->l->k_dim, len = j->s->page_len;
    last = last < first + kn->block - 1 ? last : first + kn->block - 1;
    for (int at = first; at <= last; at += ATTN_ROWS) {
        const void *from[ATTN_ROWS];
        for (int i = 0; i < ATTN_ROWS; i++) {
            int key = at + i;
            int at_key = key > last ? 0 : key_of(j, u, key);
            size_t slot = (size_t)pages[at_key / len] * (size_t)len + (size_t)(at_key % len);
            from[i] = key > last
                          ? NULL
                          : (const char *)j->k + dtype_bytes(j->s->k_type, slot * (size_t)dim);
        }
        kn->pack_rows(j->s->k_type, from, at - first, dim, j->l->v_dim, a->rows, a->k_pack,
                      a->v_pack);
    }
    point_at(kn, first, dim, a, b);
}

/* Packs keys [k0, k1] of the block one by one, for page lengths that are not a multiple of the
 * vector width. */
static void pack_keys(const struct attn_job *j, const struct unit *u, int first, int k0, int k1,
                      const struct area *a, struct attn_block *b)
{
    const int32_t *pages = j->b->pages + (size_t)u->seq * (size_t)j->b->max_pages;
    k0 = k0 > first ? k0 : first;
    k1 = k1 < first + ATTN_BLOCK - 1 ? k1 : first + ATTN_BLOCK - 1;
    const struct attn_kernels *kn = u->kernels;
    int dim = j->l->k_dim, v_dim = j->l->v_dim, panel = kn->panel;
    size_t len = (size_t)j->s->page_len;
    for (int key = k0; key <= k1; key++) {
        struct key_place at = find_key(j, pages, u->kv_head, key_of(j, u, key));
        int i = key - first;
        float *kp = a->k_pack + (size_t)(i / panel) * (size_t)(dim * panel) + i % panel;
        float *vp = a->v_pack + (size_t)(i * panel);
        for (int d = 0; d < dim; d++)
            kp[(size_t)d * (size_t)panel] =
                kv_tile_get(j->s->k_type, at.k, true, len, (size_t)dim, at.off, (size_t)d);
        for (int d = 0; d < v_dim; d++)
            vp[(size_t)(d / panel) * (size_t)(ATTN_BLOCK * panel) + (size_t)(d % panel)] =
                kv_tile_get(j->s->v_type, at.v, false, len, (size_t)v_dim, at.off, (size_t)d);
    }
    point_at(kn, first, dim, a, b);
}

/* Points b at keys [k0, k1] of the block at `first`, in their pages. */
static void find_block(const struct attn_job *j, const struct unit *u, int first, int k0, int k1,
                       struct attn_block *b)
{
    const struct bounds *s = j->s;
    const int32_t *pages = j->b->pages + (size_t)u->seq * (size_t)j->b->max_pages;
    int width = u->kernels->width, last = u->kernels->block / width - 1;
    int i0 = k0 > first ? (k0 - first) / width : 0;
    int i1 = (k1 - first) / width < last ? (k1 - first) / width : last;
    size_t dim = (size_t)j->l->k_dim, v_dim = (size_t)j->l->v_dim;
    size_t len = (size_t)s->page_len, w = (size_t)width;
    size_t k_step = kv_key_step(s->k_type), v_step = kv_value_step(s->v_type, v_dim);
    b->first = first;
    b->k_stride = b->scale_stride = len;
    b->v_stride = kv_quantised(s->v_type) ? v_step : v_dim;
    b->v_panel = (size_t)u->kernels->panel;
    b->next = b;
    b->k_step = (kv_tile_bytes(s->k_type, w, dim) + dim - 1) / dim;
    b->v_step = (kv_tile_bytes(s->v_type, w, v_dim) + v_dim - 1) / v_dim;
    for (int i = 0; i <= last; i++) {
        int key = first + (i < i0 ? i0 : i > i1 ? i1 : i) * width;
        struct key_place at = find_key(j, pages, u->kv_head, key_of(j, u, key));
        b->k[i] = at.k + at.off * k_step;
        b->v[i] = at.v + at.off * v_step;
        if (kv_scaled(s->k_type))
            b->k_scale[i] = kv_tile_scales(s->k_type, at.k, len, dim) + at.off;
        if (kv_scaled(s->v_type))
            b->v_scale[i] = kv_tile_scales(s->v_type, at.v, len, v_dim) + at.off;
        b->k_tile[i] = at.k + kv_tile_bytes(s->k_type, at.off, dim);
        b->v_tile[i] = at.v + kv_tile_bytes(s->v_type, at.off, v_dim);
    }
}

/* Attends to one chunk of keys with the n tiles of a unit. Tiles that see none of it stay fresh. */
static void run_chunk(const struct attn_job *j, const struct unit *u, int chunk, int n,
                      const struct area *a)
{
    const struct attn_kernels *kn = u->kernels;
    for (int i = 0; i < n; i++) {
        a->tiles[i].fresh = true;
        for (int r = 0; r < ATTN_MAX_ROWS; r++)
            a->tiles[i].m[r] = ATTN_START;
    }
    int begin = chunk * ATTN_CHUNK, end = begin + ATTN_CHUNK - 1;
    begin = u->lo > begin ? u->lo : begin;
    end = u->hi < end ? u->hi : end;
    bool whole = key_run(j, u) % kn->width == 0, packed = u->pack;
    struct attn_block found[2], pack;
    found[0].fp16 = found[1].fp16 = (uint16_t *)a->k_pack;
    int at = 0, start = begin / kn->block * kn->block;
    for (int first = start; first <= end; first += kn->block) {
        int next = first + kn->block, n_seen = 0;
        const struct attn_block *b = &found[at];
        if (j->row_cache) {
            pack_from_rows(j, u, first, end, a, &found[at]);
        } else if (!whole) {
            pack_keys(j, u, first, begin, end, a, &found[at]);
        } else {
            if (first == start)
                find_block(j, u, first, begin, end, &found[at]);
            /* The next block is prefetched while this one is computed, also across the end of the
             * chunk. */
            if (next <= u->hi) {
                find_block(j, u, next, begin, u->hi, &found[1 - at]);
                found[at].next = &found[1 - at];
            }
            if (packed) {
                int k0 = begin > first ? begin - first : 0;
                int k1 = end < next ? end - first : kn->block - 1;
                kn->pack(j->s->k_type, j->s->v_type, b, k0, k1, j->l->k_dim, j->l->v_dim, a->k_pack,
                         a->v_pack, &pack);
                b = &pack;
            }
            at = 1 - at;
        }
        for (int i = 0; i < n; i++)
            if (a->tiles[i].lo < next && a->tiles[i].hi >= first)
                a->seen[n_seen++] = &a->tiles[i];
        bool plain = j->row_cache ? !kn->packs_own : (packed && !kn->packs_own) || !whole;
        enum dtype v_type = j->row_cache ? j->s->k_type : j->s->v_type;
        kn->attend(plain ? DT_F32 : j->s->k_type, plain ? DT_F32 : v_type, a->seen, n_seen, b,
                   j->l->k_dim, j->l->v_dim);
    }
}

/* Row r's sums over one chunk. */
struct partial {
    float m, l;
    const float *o; /* (Dv), not read where l is 0 */
};

static struct partial partial_of(const struct attn_job *j, const struct unit *u,
                                 const struct area *a, int r)
{
    int rows = u->kernels->rows;
    const struct attn_tile *t = &a->tiles[r / rows];
    r %= rows;
    return (struct partial){.m = t->m[r],
                            .l = t->fresh ? 0 : u->kernels->row->sum(t->l + r * u->kernels->width),
                            .o = t->o + (size_t)r * (size_t)j->l->v_dim};
}

/* Output of row r: o / l, or zeros where it saw no key (l = 0; o is not read). A sink is one more
 * key, without a value. */
static void write_row(const struct attn_job *j, const struct unit *u, int r, float m, float l,
                      const float *o)
{
    if (j->l->sinks && l != 0) {
        float more = j->l->sinks[u->head + r % u->heads] * LOG2_E - m;
        l += u->kernels->row->exp2(more < 126.0f ? more : 126.0f);
    }
    size_t dim = (size_t)(j->row_cache ? j->l->k_dim : j->l->v_dim);
    size_t row = (size_t)u->token + (size_t)(r / u->heads);
    row = row * (size_t)j->l->n_heads + (size_t)u->head + (size_t)(r % u->heads);
    u->kernels->row->finish(l, o, j->a + row * dim, j->l->v_dim);
    if (!j->row_cache && kv_turned(j->s->v_type))
        u->kernels->row->turn(j->a + row * dim, j->l->v_dim);
}

/* Folds a chunk's partial result into a row's total (*m, *l, to). *l is 0 before the first. */
static void fold(const struct attn_job *j, const struct unit *u, float *m, float *l, float *to,
                 struct partial p)
{
    if (p.l == 0)
        return;
    if (*l == 0) {
        *m = p.m;
        *l = p.l;
        memcpy(to, p.o, (size_t)j->l->v_dim * sizeof(float));
    } else {
        u->kernels->row->merge(m, l, to, p.m, p.l, p.o, j->l->v_dim);
    }
}

static void run_unit(const struct attn_job *j, const struct unit *u, const struct area *a)
{
    int rows = u->tokens * u->heads;
    size_t dim = (size_t)j->l->v_dim;
    int n = load_tiles(j, u, a, a->o);
    for (int r = 0; r < rows; r++)
        a->total_l[r] = 0;
    for (int c = 0; c < u->chunks; c++) {
        run_chunk(j, u, u->chunk + c, n, a);
        for (int r = 0; r < rows; r++) {
            struct partial p = partial_of(j, u, a, r);
            if (c == u->chunks - 1 && a->total_l[r] == 0)
                write_row(j, u, r, p.m, p.l, p.o);
            else
                fold(j, u, &a->total_m[r], &a->total_l[r], a->total_o + (size_t)r * dim, p);
        }
    }
    if (u->chunks != 1)
        for (int r = 0; r < rows; r++)
            if (u->chunks == 0 || a->total_l[r] != 0)
                write_row(j, u, r, a->total_m[r], a->total_l[r], a->total_o + (size_t)r * dim);
}

static void run_split(const struct attn_job *j, struct unit *u, const struct task *task,
                      const struct area *a)
{
    size_t rows = (size_t)u->tokens * (size_t)u->heads, dim = (size_t)j->l->v_dim;
    size_t at = u->partial + (size_t)(task->chunk - u->chunk) * rows;
    int n = load_tiles(j, u, a, j->part_o + at * dim);
    for (int c = 0; c < task->chunks; c++, at += rows) {
        run_chunk(j, u, task->chunk + c, n, a);
        for (size_t r = 0; r < rows; r++) {
            struct partial p = partial_of(j, u, a, (int)r);
            j->part_m[at + r] = p.m;
            j->part_l[at + r] = p.l;
        }
        for (int i = 0; i < n; i++)
            a->tiles[i].o += rows * dim;
    }
    if (atomic_fetch_sub_explicit(&u->unfolded, 1, memory_order_acq_rel) != 1)
        return;
    for (size_t r = 0; r < rows; r++) {
        float m = 0, l = 0;
        for (int c = 0; c < u->chunks; c++) {
            size_t row = u->partial + (size_t)c * rows + r;
            struct partial p = {j->part_m[row], j->part_l[row], j->part_o + row * dim};
            fold(j, u, &m, &l, a->total_o, p);
        }
        write_row(j, u, (int)r, m, l, a->total_o);
    }
}

static void run_tasks(void *arg, int ith, int first, int last)
{
    struct attn_job *j = arg;
    struct area a;
    area_layout(&a, j->thread + (size_t)ith * j->thread_bytes, j->l, j->rows_cap);
    for (int i = first; i < last; i++) {
        struct unit *u = &j->units[j->tasks[i].unit];
        if (j->tasks[i].chunks == 0)
            run_unit(j, u, &a);
        else
            run_split(j, u, &j->tasks[i], &a);
    }
}

static void run(struct attn_job *j, void *scratch, struct pool *pool)
{
    int n_threads = pool_size(pool);
    const struct attention *l = j->l;
    struct limits x = limits_of(j->s, l, j->row_cache, n_threads);
    CHECK(j->b->n_tokens <= j->s->max_tokens && j->b->n_seqs <= j->s->max_seqs,
          "step of %d tokens, %d sequences", j->b->n_tokens, j->b->n_seqs);
    job_layout(j, &x, l, n_threads, scratch);
    plan(j, &x, n_threads);
    if (j->n_tasks > 1 && !pick_single_thread(SMALL_ATTN, (size_t)j->cost * (size_t)l->k_dim))
        pool_each(pool, j->n_tasks, POOL_SINGLE, run_tasks, j);
    else
        run_tasks(j, 0, 0, j->n_tasks);
}

void cpu_attention(const struct bounds *s, const struct batch *b, const struct attention *l,
                   const struct kv_layer *kv, const struct key_choice *choice,
                   const struct relative *rel, const float *q, float *a, void *scratch,
                   struct pool *pool, struct pick *pick)
{
    struct attn_job j = {.s = s,
                         .b = b,
                         .l = l,
                         .pick = pick,
                         .choice = choice,
                         .rel = rel,
                         .k = kv->k,
                         .v = kv->v,
                         .q = q,
                         .a = a};
    run(&j, scratch, pool);
}

void cpu_attention_rows(const struct bounds *s, const struct batch *b, const struct attention *l,
                        const void *rows, const struct key_choice *choice, float *q, void *scratch,
                        struct pool *pool, struct pick *pick)
{
    /* q may alias a: a unit has read its queries before it writes. */
    struct attn_job j = {.s = s,
                         .b = b,
                         .l = l,
                         .row_cache = true,
                         .choice = choice,
                         .pick = pick,
                         .k = rows,
                         .q = q,
                         .a = q};
    CHECK(l->n_kv_heads == 1 && l->v_dim <= l->k_dim,
          "a cache of rows needs one kv head, and v_dim <= k_dim");
    run(&j, scratch, pool);
}
