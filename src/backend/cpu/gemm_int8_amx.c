/*
 * Packed panels times many input rows on AMX's 8-bit tiles. Inputs are packed in groups of 16 rows, once for all the
 * weights they meet. Two panels are unpacked, 256 columns at a time; then a group at a time, in steps of four tile products: two blocks of columns (two parts
 * of one block where its scales or its inputs are in two parts) times two panels. Their 16 x 16 integer
 * sums go through memory to the float accumulators, a step behind the tiles, so that both work at
 * once. Dot products are exact and the additions come in the order of gemm_int8_kernel.h: the same bytes
 * as without AMX.
 *
 *   C (16 inputs, 16 weight rows) += A (16 inputs, 32 columns) * B (32 columns, 16 weight rows), all
 *   signed: B's rows are the column groups of an unpacked panel.
 * tmm0-3: C of (block, panel); tmm4, 6: A; tmm5, 7: B. Q6_K has its scales per 16 columns: half of that. Inputs in two parts: Q8_0, MXFP4, GPTQ4.
 *
 * The limit is the float part: 3 to 5 vector operations for 16 x 32 products. Tiles are configured and
 * released in each call: nothing is left to switch between threads.
 */
#include "backend/cpu/amx.h"
#include "backend/cpu/gemm_kernels.h"
#include "backend/cpu/panel_unpack.h"

enum { ROWS = 16 };

/* How a block becomes floats. */
enum kind {
    KIND_MIN,   /* scale and min per 32: Q4_K Q5_K */
    KIND_PLAIN, /* scale per 32: Q4_0 IQ4_NL IQ4_XS */
    KIND_SIX,   /* scale per 16: Q6_K */
    KIND_FINE,  /* scale per 32, inputs in two parts: Q8_0 MXFP4 */
    KIND_ZERO,  /* the same, and a min: GPTQ4 */
};

/* What one thread works on. Inputs are packed once and kept for all weight rows they meet. */
struct scratch {
    struct {
        unsigned stamp;
        const void *q, *rows;
        int n, n_in;
        bool zero;
    } key; /* whose inputs are packed; first, so that any other use of the memory destroys it */
    struct chunk chunk[2];                             /* of two panels */
    _Alignas(64) float acc[GEMM_CHUNK][GEMM_UNIT];     /* sums of all input rows */
    _Alignas(64) int32_t dots[2][4][ROWS][GEMM_PANEL]; /* of (block, panel); two steps */
    _Alignas(64) uint8_t packed[];
};

/*
 * Packed inputs, per group of 16 rows: what a step reads is one piece of memory.
 *   codes  (columns / 64, 16 rows, 64), fine parts likewise
 *   scale, sum  float (columns / 32, 16 rows)
 */
struct group_layout {
    size_t fine, scale, sum, bytes;
};

static inline struct group_layout group_layout(int n_in)
{
    struct group_layout g;
    g.fine = (size_t)(n_in + 63) / 64 * 64 * ROWS;
    g.scale = 2 * g.fine;
    g.sum = g.scale + (size_t)(n_in + 31) / 32 * ROWS * sizeof(float);
    g.bytes = (g.sum + (size_t)(n_in + 31) / 32 * ROWS * sizeof(float) + 63) & ~(size_t)63;
    return g;
}

size_t gemm_int8_scratch_amx(int n_in)
{
    return sizeof(struct scratch) + GEMM_CHUNK / ROWS * group_layout(n_in).bytes;
}

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 4")
#endif

/* One group of packed inputs. */
struct inputs {
    const uint8_t *codes, *fine;
    const float *scale, *sum;
    int rows; /* that count: the others are any bytes */
};

/* Where column col of a group's codes is. */
INLINE size_t in_at(int col)
{
    return (size_t)(col / 64) * 64 * ROWS + (size_t)(col % 64);
}

/* dots = codes `a` at column `at` times both panels, codes `b` at column `next` times both; k: column
 * of the inputs where the unpacked ones begin */
INLINE void tile_step(int32_t (*dots)[ROWS][GEMM_PANEL], const uint8_t *const *codes,
                      const uint8_t *a, const uint8_t *b, int k, int at, int next)
{
    amx_zero(0);
    amx_zero(1);
    amx_zero(2);
    amx_zero(3);
    amx_load(4, a + in_at(k + at), 64);
    amx_load(5, codes[0] + 16 * at, 64);
    amx_dot(0, 4, 5);
    amx_load(7, codes[1] + 16 * at, 64);
    amx_dot(1, 4, 7);
    amx_load(6, b + in_at(k + next), 64);
    if (next != at) {
        amx_load(5, codes[0] + 16 * next, 64);
        amx_load(7, codes[1] + 16 * next, 64);
    }
    amx_dot(2, 6, 5);
    amx_dot(3, 6, 7);
    amx_store(0, dots[0], 64);
    amx_store(1, dots[1], 64);
    amx_store(2, dots[2], 64);
    amx_store(3, dots[3], 64);
}

/* Step at block b of the n columns from k on. */
INLINE void tiles(struct scratch *s, int which, const uint8_t *const *codes,
                  const struct inputs *in, int k, int b, int n, const enum kind kind)
{
    int at = 32 * b;
    if (kind == KIND_FINE || kind == KIND_ZERO)
        tile_step(s->dots[which], codes, in->codes, in->fine, k, at, at);
    else if (kind == KIND_SIX)
        tile_step(s->dots[which], codes, in->codes, in->codes, k, at, at + 16);
    else /* a last odd block is computed twice and counted once */
        tile_step(s->dots[which], codes, in->codes, in->codes, k, at, at + 32 < n ? at + 32 : at);
}

/* Adds `blocks` blocks from b on, block blk of the inputs, to the accumulators. */
INLINE void add_blocks(struct scratch *s, float (*acc)[GEMM_UNIT], int which,
                       const struct inputs *in, int b, int blk, const int blocks,
                       const enum kind kind)
{
    VF w[2][2], m[2][2];
    UNROLL
    for (int i = 0; i < blocks; i++)
        UNROLL
    for (int p = 0; p < 2; p++) {
        w[i][p] = vf_load(s->chunk[p].scale[b + i]);
        m[i][p] = kind == KIND_MIN ? vf_load(s->chunk[p].min[b + i]) : vf_zero();
    }
    const float *scale = in->scale + ROWS * blk, *sum = in->sum + ROWS * blk;
    for (int t = 0; t < in->rows; t++) {
        VF a[2] = {vf_load(acc[t]), vf_load(acc[t] + GEMM_PANEL)};
        UNROLL
        for (int i = 0; i < blocks; i++) {
            VF xs = vf_set1(scale[ROWS * i + t]), xm = vf_set1(sum[ROWS * i + t]);
            UNROLL
            for (int p = 0; p < 2; p++) {
                VF v = vi_to_f(vi_load(s->dots[which][2 * i + p][t]));
                a[p] = vf_fma(v, vf_mul(w[i][p], xs), a[p]);
                if (kind == KIND_MIN)
                    a[p] = vf_fnma(m[i][p], xm, a[p]);
            }
        }
        vf_store(acc[t], a[0]);
        vf_store(acc[t] + GEMM_PANEL, a[1]);
    }
}

/* One block of Q6_K, whose halves have scales of their own, or of those with inputs in two parts: codes, then fine
 * parts. */
INLINE void add_halves(struct scratch *s, float (*acc)[GEMM_UNIT], int which,
                       const struct inputs *in, int b, int blk, const enum kind kind)
{
    const VF unit = vf_set1(1.0f / 254.0f);
    VF w[2][2];
    UNROLL
    for (int i = 0; i < 2; i++)
        UNROLL
    for (int p = 0; p < 2; p++)
        w[i][p] = vf_load(s->chunk[p].scale[kind == KIND_SIX ? 2 * b + i : b]);
    const float *scale = in->scale + ROWS * blk, *sum = in->sum + ROWS * blk;
    for (int t = 0; t < in->rows; t++) {
        VF xs = vf_set1(scale[t]);
        UNROLL
        for (int p = 0; p < 2; p++) {
            VF v = vi_to_f(vi_load(s->dots[which][p][t]));
            VF u = vi_to_f(vi_load(s->dots[which][2 + p][t]));
            VF a = vf_load(acc[t] + GEMM_PANEL * p);
            if (kind == KIND_SIX)
                a = vf_fma(vf_fma(u, w[1][p], vf_mul(v, w[0][p])), xs, a);
            else
                a = vf_fma(vf_fma(u, unit, v), vf_mul(w[0][p], xs), a);
            if (kind == KIND_ZERO)
                a = vf_fnma(vf_load(s->chunk[p].min[b]), vf_set1(sum[t]), a);
            vf_store(acc[t] + GEMM_PANEL * p, a);
        }
    }
}

/* Memory that is needed later, asked for in equal shares per step. */
struct ahead {
    const uint8_t *panel[2]; /* `bytes` of each */
    int bytes;
};

/* Columns [k, k + n) of two panels for one group of input rows. */
INLINE void multiply(struct scratch *s, const uint8_t *const *codes, const struct inputs *in, int k,
                     int n, float (*acc)[GEMM_UNIT], const struct ahead *ahead,
                     const enum kind kind)
{
    const int step = kind == KIND_MIN || kind == KIND_PLAIN ? 2 : 1;
    int blocks = n / 32, share = (ahead->bytes * step / blocks + 63) & ~63;
    tiles(s, 0, codes, in, k, 0, n, kind);
    for (int b = 0, which = 0, at = 0; b < blocks; b += step, which ^= 1) {
        if (b + step < blocks)
            tiles(s, !which, codes, in, k, b + step, n, kind);
        for (int end = at + share < ahead->bytes ? at + share : ahead->bytes; at < end; at += 64) {
            _mm_prefetch((const char *)ahead->panel[0] + at, _MM_HINT_T1);
            _mm_prefetch((const char *)ahead->panel[1] + at, _MM_HINT_T1);
        }
        if (step == 1)
            add_halves(s, acc, which, in, b, k / 32 + b, kind);
        else if (b + 1 < blocks)
            add_blocks(s, acc, which, in, b, k / 32 + b, 2, kind);
        else
            add_blocks(s, acc, which, in, b, k / 32 + b, 1, kind);
    }
}

/* Packs the call's inputs, unless they still are from the call before. */
INLINE void pack_inputs(const struct gemm_call *c, struct scratch *s, const struct group_layout *g,
                        const enum kind kind)
{
    const struct gemm_x *x = c->x;
    int n_in = c->w->n_in;
    if (x->stamp && s->key.stamp == x->stamp && s->key.q == x->q && s->key.rows == c->rows &&
        s->key.n == c->n && s->key.n_in == n_in && s->key.zero == (kind == KIND_ZERO))
        return;
    s->key.stamp = x->stamp;
    s->key.q = x->q;
    s->key.rows = c->rows;
    s->key.n = c->n;
    s->key.n_in = n_in;
    s->key.zero = kind == KIND_ZERO;
    struct input_layout l = input_layout(n_in);
    bool fine = kind == KIND_FINE || kind == KIND_ZERO || c->w->wants_fine;
    size_t sums = kind == KIND_ZERO ? l.fine_sum : l.sum;
    for (int i = 0; i < c->n; i++) {
        const uint8_t *from = x->q + (size_t)(c->rows ? c->rows[i] : i) * l.bytes;
        uint8_t *to = s->packed + (size_t)(i / ROWS) * g->bytes;
        for (int k = 0; k < n_in; k += 64) { /* rounded up: records are longer than their codes */
            size_t at = in_at(k) + (size_t)(i % ROWS) * 64;
            vi_store(to + at, vi_load(from + k));
            if (fine)
                vi_store(to + g->fine + at, vi_load(from + l.fine + k));
        }
        float *scale = (float *)(to + g->scale) + i % ROWS,
              *sum = (float *)(to + g->sum) + i % ROWS;
        for (int b = 0; b < n_in / 32; b++) {
            scale[ROWS * b] = ((const float *)(from + l.scale))[b];
            sum[ROWS * b] = ((const float *)(from + sums))[b];
        }
    }
}

/* The accumulators of up to two panels to y. */
static void store(const struct gemm_call *c, const struct scratch *s, int col)
{
    int width = c->n_rows - col;
    for (int i = 0; i < c->n; i++) {
        float *y = c->y + (size_t)i * c->stride + col;
        if (width >= GEMM_UNIT && !c->bias) {
            vf_store(y, vf_load(s->acc[i]));
            vf_store(y + GEMM_PANEL, vf_load(s->acc[i] + GEMM_PANEL));
            continue;
        }
        for (int j = 0; j < GEMM_UNIT && j < width; j++)
            y[j] = s->acc[i][j] + (c->bias ? c->bias[col + j] : 0.0f);
    }
}

INLINE void gemm(const struct gemm_call *c, const enum kind kind,
                 const uint8_t *(*unpack)(const uint8_t *, int, int, struct chunk *))
{
    struct scratch *s = c->scratch;
    const struct gemm_seg *seg = c->seg;
    int n_in = c->w->n_in, depth = kind == KIND_SIX ? 16 : 32;
    struct group_layout g = group_layout(n_in);
    pack_inputs(c, s, &g, kind);
    s->chunk[0].group_len = s->chunk[1].group_len = seg->group_len;
    struct amx_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        bool input = i == 4 || i == 6, weight = i == 5 || i == 7;
        config.rows[i] = (uint8_t)(weight ? depth / 4 : ROWS);
        config.row_bytes[i] = (uint16_t)(input ? depth : 64);
    }
    amx_configure(&config);
    size_t first = (size_t)c->expert * (size_t)seg->n_panels + (size_t)(c->row / GEMM_PANEL);
    const uint8_t *panel = seg->data + first * seg->panel_bytes;
    for (int col = 0; col < c->n_rows; col += GEMM_UNIT, panel += 2 * seg->panel_bytes) {
        const uint8_t *second = col + GEMM_PANEL < c->n_rows ? panel + seg->panel_bytes : panel;
        memset(s->acc, 0, (size_t)c->n * sizeof s->acc[0]);
        for (int k = 0; k < n_in; k += CHUNK_COLUMNS) {
            int n = n_in - k < CHUNK_COLUMNS ? n_in - k : CHUNK_COLUMNS;
            const uint8_t *codes[2] = {unpack(panel, k, n, &s->chunk[0]),
                                       unpack(second, k, n, &s->chunk[1])};
            /* The next two panels, where this chunk is now. */
            size_t at = seg->panel_bytes * (size_t)k / (size_t)n_in + 2 * seg->panel_bytes;
            struct ahead ahead = {{panel + at, panel + seg->panel_bytes + at},
                                  (int)(seg->panel_bytes * (size_t)n / (size_t)n_in)};
            for (int i0 = 0; i0 < c->n; i0 += ROWS, ahead.bytes = 0) {
                const uint8_t *group = s->packed + (size_t)(i0 / ROWS) * g.bytes;
                struct inputs in = {group, group + g.fine, (const float *)(group + g.scale),
                                    (const float *)(group + g.sum),
                                    c->n - i0 < ROWS ? c->n - i0 : ROWS};
                multiply(s, codes, &in, k, n, s->acc + i0, &ahead, kind);
            }
        }
        store(c, s, col);
    }
    amx_release();
}

#define GEMM(name, kind)                                                                           \
    static void gemm_##name(const struct gemm_call *c)                                             \
    {                                                                                              \
        gemm(c, kind, unpack_##name);                                                              \
    }

GEMM(q4k, KIND_MIN)
GEMM(q5k, KIND_MIN)
GEMM(q6k, KIND_SIX)
GEMM(iq4xs, KIND_PLAIN)
GEMM(q4_0, KIND_PLAIN)
GEMM(iq4nl, KIND_PLAIN)
GEMM(mxfp4, KIND_FINE)
GEMM(q8_0, KIND_FINE)
GEMM(gptq4, KIND_ZERO)

void gemm_int8_amx(const struct gemm_call *c)
{
    static void (*const by_type[DT_COUNT])(const struct gemm_call *c) = {
        [DT_Q4_K] = gemm_q4k,     [DT_Q5_K] = gemm_q5k,  [DT_Q6_K] = gemm_q6k,
        [DT_IQ4_XS] = gemm_iq4xs, [DT_Q4_0] = gemm_q4_0, [DT_IQ4_NL] = gemm_iq4nl,
        [DT_MXFP4] = gemm_mxfp4,  [DT_Q8_0] = gemm_q8_0, [DT_GPTQ4] = gemm_gptq4,
    };
    by_type[c->seg->type](c);
}
