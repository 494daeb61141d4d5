/*
 * Packed panels times many input rows on AMX 8-bit tiles.
 *
 *   C (16 inputs, 16 weight rows) += A (16 inputs, 32 columns) * B (32 columns, 16 weight rows)
 * All bytes are signed. B's rows are the column groups of an unpacked panel. tmm0-3: C of (block, panel);
 * tmm4, 6: A; tmm5, 7: B. Q6_K has a scale per 16 columns and uses tiles of half that depth. Q8_0, MXFP4
 * and GPTQ4 read inputs in two parts (codes and fine part).
 *
 * Inputs are packed once, in groups of 16 rows, for all weights they meet. Two panels are unpacked, 256
 * columns at a time, and multiplied with one group after the other. A step is four tile products: two
 * parts times two panels. The parts are two blocks of columns, or the two parts of one block's scales or
 * inputs. The 16 x 16 integer sums go through memory to the float accumulators, one step after the tiles,
 * so that tiles and vectors work at the same time. Dot products are exact, and additions have the order of
 * gemm_int8_kernel.h, so the bytes are the same as without AMX.
 *
 * The limit is the float part: 3 to 5 vector operations for 16 x 32 products. Against VNNI on a Xeon, 128
 * rows are 1.6 times as fast for Q4_K and 1.03 times for Q6_K (pick.c). Tiles are configured and released
 * in each call, so that no tile state outlives it.
 */
#include "backend/cpu/amx.h"
#include "backend/cpu/gemm_kernels.h"
#include "backend/cpu/panel_unpack.h"

enum { ROWS = 16 };

/* How a block's sums become floats. */
enum kind {
    KIND_SCALE32_MIN, /* scale and min per 32: Q4_K Q5_K */
    KIND_SCALE32,     /* scale per 32: Q4_0 IQ4_NL IQ4_XS */
    KIND_SCALE16,     /* scale per 16: Q6_K */
    KIND_FINE,        /* scale per 32, inputs in two parts: Q8_0 MXFP4 */
    KIND_FINE_MIN,    /* the same with a min: GPTQ4 */
};

/* A thread's working memory. */
struct int8_scratch {
    struct {
        unsigned stamp;
        const void *q, *rows;
        int n, n_in;
        bool zero;
    } key; /* the inputs that are packed; first, so that any other use of the memory overwrites it */
    struct chunk chunk[2];                             /* of two panels */
    _Alignas(64) float acc[GEMM_CHUNK][GEMM_UNIT];     /* sums of all input rows */
    _Alignas(64) int32_t dots[2][4][ROWS][GEMM_PANEL]; /* (block, panel) sums of two steps */
    _Alignas(64) uint8_t packed[];
};

/*
 * Packed inputs of a group of 16 rows. A step reads contiguous memory.
 *   codes  (columns / 64, 16 rows, 64); fine parts likewise
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
    return sizeof(struct int8_scratch) + GEMM_CHUNK / ROWS * group_layout(n_in).bytes;
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
    int rows; /* valid rows; the others hold garbage */
};

/* Offset of column col in a group's codes. */
INLINE size_t input_offset(int col)
{
    return (size_t)(col / 64) * 64 * ROWS + (size_t)(col % 64);
}

/* dots = codes `a` at column `at` times both panels, then codes `b` at column `next` times both. k:
 * the input column of the first unpacked column. */
INLINE void tile_step(int32_t (*dots)[ROWS][GEMM_PANEL], const uint8_t *const *codes,
                      const uint8_t *a, const uint8_t *b, int k, int at, int next)
{
    amx_zero(0);
    amx_zero(1);
    amx_zero(2);
    amx_zero(3);
    amx_load(4, a + input_offset(k + at), 64);
    amx_load(5, codes[0] + 16 * at, 64);
    amx_dot(0, 4, 5);
    amx_load(7, codes[1] + 16 * at, 64);
    amx_dot(1, 4, 7);
    amx_load(6, b + input_offset(k + next), 64);
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

/* Computes the step at block b of the n columns from k on. */
INLINE void tiles(struct int8_scratch *s, int which, const uint8_t *const *codes,
                  const struct inputs *in, int k, int b, int n, const enum kind kind)
{
    int at = 32 * b;
    if (kind == KIND_FINE || kind == KIND_FINE_MIN)
        tile_step(s->dots[which], codes, in->codes, in->fine, k, at, at);
    else if (kind == KIND_SCALE16)
        tile_step(s->dots[which], codes, in->codes, in->codes, k, at, at + 16);
    else /* a last odd block is computed twice and added once */
        tile_step(s->dots[which], codes, in->codes, in->codes, k, at, at + 32 < n ? at + 32 : at);
}

/* Adds `blocks` blocks from b on (block blk of the inputs) to the accumulators. */
INLINE void add_blocks(struct int8_scratch *s, float (*acc)[GEMM_UNIT], int which,
                       const struct inputs *in, int b, int blk, const int blocks,
                       const enum kind kind)
{
    VF w[2][2], m[2][2];
    UNROLL
    for (int i = 0; i < blocks; i++)
        UNROLL
    for (int p = 0; p < 2; p++) {
        w[i][p] = vf_load(s->chunk[p].scale[b + i]);
        m[i][p] = kind == KIND_SCALE32_MIN ? vf_load(s->chunk[p].min[b + i]) : vf_zero();
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
                if (kind == KIND_SCALE32_MIN)
                    a[p] = vf_fnma(m[i][p], xm, a[p]);
            }
        }
        vf_store(acc[t], a[0]);
        vf_store(acc[t] + GEMM_PANEL, a[1]);
    }
}

/* Adds one block in two parts: two halves with a scale each (Q6_K), or codes and fine parts of the
 * inputs. */
INLINE void add_two_parts(struct int8_scratch *s, float (*acc)[GEMM_UNIT], int which,
                          const struct inputs *in, int b, int blk, const enum kind kind)
{
    const VF unit = vf_set1(FINE_UNIT);
    VF w[2][2];
    UNROLL
    for (int i = 0; i < 2; i++)
        UNROLL
    for (int p = 0; p < 2; p++)
        w[i][p] = vf_load(s->chunk[p].scale[kind == KIND_SCALE16 ? 2 * b + i : b]);
    const float *scale = in->scale + ROWS * blk, *sum = in->sum + ROWS * blk;
    for (int t = 0; t < in->rows; t++) {
        VF xs = vf_set1(scale[t]);
        UNROLL
        for (int p = 0; p < 2; p++) {
            VF v = vi_to_f(vi_load(s->dots[which][p][t]));
            VF u = vi_to_f(vi_load(s->dots[which][2 + p][t]));
            VF a = vf_load(acc[t] + GEMM_PANEL * p);
            if (kind == KIND_SCALE16)
                a = vf_fma(vf_fma(u, w[1][p], vf_mul(v, w[0][p])), xs, a);
            else
                a = vf_fma(vf_fma(u, unit, v), vf_mul(w[0][p], xs), a);
            if (kind == KIND_FINE_MIN)
                a = vf_fnma(vf_load(s->chunk[p].min[b]), vf_set1(sum[t]), a);
            vf_store(acc[t] + GEMM_PANEL * p, a);
        }
    }
}

/* Panels that are needed later, prefetched in equal shares per step. */
struct panel_prefetch {
    const uint8_t *panel[2]; /* `bytes` of each */
    int bytes;
};

/* Multiplies columns [k, k + n) of two panels by one group of input rows. */
INLINE void multiply(struct int8_scratch *s, const uint8_t *const *codes, const struct inputs *in,
                     int k, int n, float (*acc)[GEMM_UNIT], const struct panel_prefetch *later,
                     const enum kind kind)
{
    const int step = kind == KIND_SCALE32_MIN || kind == KIND_SCALE32 ? 2 : 1;
    int blocks = n / 32, share = (later->bytes * step / blocks + 63) & ~63;
    tiles(s, 0, codes, in, k, 0, n, kind);
    for (int b = 0, which = 0, at = 0; b < blocks; b += step, which ^= 1) {
        if (b + step < blocks)
            tiles(s, !which, codes, in, k, b + step, n, kind);
        for (int end = at + share < later->bytes ? at + share : later->bytes; at < end; at += 64) {
            _mm_prefetch((const char *)later->panel[0] + at, _MM_HINT_T1);
            _mm_prefetch((const char *)later->panel[1] + at, _MM_HINT_T1);
        }
        if (step == 1)
            add_two_parts(s, acc, which, in, b, k / 32 + b, kind);
        else if (b + 1 < blocks)
            add_blocks(s, acc, which, in, b, k / 32 + b, 2, kind);
        else
            add_blocks(s, acc, which, in, b, k / 32 + b, 1, kind);
    }
}

/* Packs the call's inputs, unless they are still packed from the call before. */
INLINE void pack_inputs(const struct gemm_call *c, struct int8_scratch *s,
                        const struct group_layout *g, const enum kind kind)
{
    const struct gemm_x *x = c->x;
    int n_in = c->w->n_in;
    if (x->stamp && s->key.stamp == x->stamp && s->key.q == x->q && s->key.rows == c->rows &&
        s->key.n == c->n && s->key.n_in == n_in && s->key.zero == (kind == KIND_FINE_MIN))
        return;
    s->key.stamp = x->stamp;
    s->key.q = x->q;
    s->key.rows = c->rows;
    s->key.n = c->n;
    s->key.n_in = n_in;
    s->key.zero = kind == KIND_FINE_MIN;
    struct input_layout l = input_layout(n_in);
    bool fine = kind == KIND_FINE || kind == KIND_FINE_MIN || c->w->wants_fine;
    size_t sums = kind == KIND_FINE_MIN ? l.fine_sum : l.sum;
    for (int i = 0; i < c->n; i++) {
        const uint8_t *from = x->q + (size_t)(c->rows ? c->rows[i] : i) * l.bytes;
        uint8_t *to = s->packed + (size_t)(i / ROWS) * g->bytes;
        for (int k = 0; k < n_in; k += 64) { /* rounded up: records are longer than their codes */
            size_t at = input_offset(k) + (size_t)(i % ROWS) * 64;
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

/* Stores the accumulators of up to two panels to y. */
static void store(const struct gemm_call *c, const struct int8_scratch *s, int col)
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
    struct int8_scratch *s = c->scratch;
    const struct gemm_seg *seg = c->seg;
    int n_in = c->w->n_in, depth = kind == KIND_SCALE16 ? 16 : 32;
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
            /* The part of the next two panels that corresponds to this chunk. */
            size_t at = seg->panel_bytes * (size_t)k / (size_t)n_in + 2 * seg->panel_bytes;
            struct panel_prefetch later = {{panel + at, panel + seg->panel_bytes + at},
                                           (int)(seg->panel_bytes * (size_t)n / (size_t)n_in)};
            for (int i0 = 0; i0 < c->n; i0 += ROWS, later.bytes = 0) {
                const uint8_t *group = s->packed + (size_t)(i0 / ROWS) * g.bytes;
                struct inputs in = {group, group + g.fine, (const float *)(group + g.scale),
                                    (const float *)(group + g.sum),
                                    c->n - i0 < ROWS ? c->n - i0 : ROWS};
                multiply(s, codes, &in, k, n, s->acc + i0, &later, kind);
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

GEMM(q4k, KIND_SCALE32_MIN)
GEMM(q5k, KIND_SCALE32_MIN)
GEMM(q6k, KIND_SCALE16)
GEMM(iq4xs, KIND_SCALE32)
GEMM(q4_0, KIND_SCALE32)
GEMM(iq4nl, KIND_SCALE32)
GEMM(mxfp4, KIND_FINE)
GEMM(q8_0, KIND_FINE)
GEMM(gptq4, KIND_FINE_MIN)

void gemm_int8_amx(const struct gemm_call *c)
{
    static void (*const by_type[DT_COUNT])(const struct gemm_call *c) = {
        [DT_Q4_K] = gemm_q4k,     [DT_Q5_K] = gemm_q5k,  [DT_Q6_K] = gemm_q6k,
        [DT_IQ4_XS] = gemm_iq4xs, [DT_Q4_0] = gemm_q4_0, [DT_IQ4_NL] = gemm_iq4nl,
        [DT_MXFP4] = gemm_mxfp4,  [DT_Q8_0] = gemm_q8_0, [DT_GPTQ4] = gemm_gptq4,
    };
    by_type[c->seg->type](c);
}
