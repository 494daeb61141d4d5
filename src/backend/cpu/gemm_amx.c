/*
 * Packed panels times many input rows on AMX's 8-bit tiles. Two panels are unpacked, 512 columns at a
 * time; then 16 input rows at a time, in steps of four tile products: two blocks of columns (two parts
 * of one block where its scales or its inputs are in two parts) times two panels. Their 16 x 16 integer
 * sums go through memory to the float accumulators, a step behind the tiles, so that both work at
 * once. Dot products are exact and the additions come in the order of panel_kernel.h: the same bytes
 * as without AMX.
 *
 *   C (16 inputs, 16 weight rows) += A (16 inputs, 32 columns) * B (32 columns, 16 weight rows), all
 *   signed: B's rows are the column groups of an unpacked panel.
 * tmm0-3: C of (block, panel); tmm4, 6: A; tmm5, 7: B. Q6_K has its scales per 16 columns: half of that.
 *
 * The limit is the float part: 3 to 5 vector operations for 16 x 32 products. Tiles are configured and
 * released in each call: nothing is left to switch between threads.
 */
#include "backend/cpu/amx.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/unpack.h"

enum { ROWS = 16 };

/* How a block becomes floats. */
enum kind {
    KIND_MIN,   /* scale and min per 32: Q4_K Q5_K */
    KIND_PLAIN, /* scale per 32: Q4_0 IQ4_NL IQ4_XS MXFP4 */
    KIND_SIX,   /* scale per 16: Q6_K */
    KIND_FINE,  /* scale per 32, inputs in two parts: Q8_0 */
};

struct scratch {
    struct chunk chunk[2];                                    /* of two panels */
    _Alignas(64) float acc[MM_CHUNK][MM_UNIT];                /* sums of all input rows */
    _Alignas(64) int32_t dots[2][4][ROWS][MM_PANEL];          /* of (block, panel); two steps */
    _Alignas(64) uint8_t inputs[2][ROWS][CHUNK_COLUMNS + 64]; /* codes and fine parts; the 64 keep
                                                                 rows out of one another's sets */
};

_Static_assert(sizeof(struct scratch) <= GEMM_SCRATCH, "scratch");

#define INLINE static inline __attribute__((always_inline))

/* 16 input rows of some columns: codes (and fine parts) for tiles, records for scales. */
struct inputs {
    const uint8_t *codes, *fine;
    size_t stride;
    const uint8_t *record[ROWS];
    int rows; /* that count: the others are any bytes */
};

/* dots = codes `a` at column `at` times both panels, codes `b` at column `next` times both */
INLINE void tile_step(int32_t (*dots)[ROWS][MM_PANEL], const uint8_t *const *codes,
                      const uint8_t *a, const uint8_t *b, size_t stride, int at, int next)
{
    amx_zero(0);
    amx_zero(1);
    amx_zero(2);
    amx_zero(3);
    amx_load(4, a + at, stride);
    amx_load(5, codes[0] + 16 * at, 64);
    amx_dot(0, 4, 5);
    amx_load(7, codes[1] + 16 * at, 64);
    amx_dot(1, 4, 7);
    amx_load(6, b + next, stride);
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

/* Step at block b of a chunk of n columns. */
INLINE void tiles(struct scratch *s, int which, const uint8_t *const *codes,
                  const struct inputs *in, int b, int n, const enum kind kind)
{
    int at = 32 * b;
    if (kind == KIND_FINE)
        tile_step(s->dots[which], codes, in->codes, in->fine, in->stride, at, at);
    else if (kind == KIND_SIX)
        tile_step(s->dots[which], codes, in->codes, in->codes, in->stride, at, at + 16);
    else /* a last odd block is computed twice and counted once */
        tile_step(s->dots[which], codes, in->codes, in->codes, in->stride, at,
                  at + 32 < n ? at + 32 : at);
}

/* Adds `blocks` blocks from b on (column 32 * blk of the record) to the accumulators. */
INLINE void add_blocks(struct scratch *s, float (*acc)[MM_UNIT], int which, const struct inputs *in,
                       const struct x_layout *l, int b, int blk, const int blocks,
                       const enum kind kind)
{
    VF w[2][2], m[2][2];
    for (int i = 0; i < blocks; i++)
        for (int p = 0; p < 2; p++) {
            w[i][p] = vf_load(s->chunk[p].scale[b + i]);
            m[i][p] = kind == KIND_MIN ? vf_load(s->chunk[p].min[b + i]) : vf_zero();
        }
    for (int t = 0; t < in->rows; t++) {
        const float *scale = (const float *)(in->record[t] + l->scale) + blk;
        const float *sum = (const float *)(in->record[t] + l->sum) + blk;
        VF a[2] = {vf_load(acc[t]), vf_load(acc[t] + MM_PANEL)};
        for (int i = 0; i < blocks; i++) {
            VF xs = vf_set1(scale[i]), xm = vf_set1(sum[i]);
            for (int p = 0; p < 2; p++) {
                VF v = vi_to_f(vi_load(s->dots[which][2 * i + p][t]));
                a[p] = vf_fma(v, vf_mul(w[i][p], xs), a[p]);
                if (kind == KIND_MIN)
                    a[p] = vf_fnma(m[i][p], xm, a[p]);
            }
        }
        vf_store(acc[t], a[0]);
        vf_store(acc[t] + MM_PANEL, a[1]);
    }
}

/* One block of Q6_K, whose halves have scales of their own, or of Q8_0: codes, then fine parts. */
INLINE void add_halves(struct scratch *s, float (*acc)[MM_UNIT], int which, const struct inputs *in,
                       const struct x_layout *l, int b, int blk, const enum kind kind)
{
    const VF unit = vf_set1(1.0f / 254.0f);
    VF w[2][2];
    for (int i = 0; i < 2; i++)
        for (int p = 0; p < 2; p++)
            w[i][p] = vf_load(s->chunk[p].scale[kind == KIND_SIX ? 2 * b + i : b]);
    for (int t = 0; t < in->rows; t++) {
        VF xs = vf_set1(((const float *)(in->record[t] + l->scale))[blk]);
        for (int p = 0; p < 2; p++) {
            VF v = vi_to_f(vi_load(s->dots[which][p][t]));
            VF u = vi_to_f(vi_load(s->dots[which][2 + p][t]));
            VF a = vf_load(acc[t] + MM_PANEL * p);
            if (kind == KIND_SIX)
                a = vf_fma(vf_fma(u, w[1][p], vf_mul(v, w[0][p])), xs, a);
            else
                a = vf_fma(vf_fma(u, unit, v), vf_mul(w[0][p], xs), a);
            vf_store(acc[t] + MM_PANEL * p, a);
        }
    }
}

/* Columns [k, k + n) of two panels for one group of input rows. On the way asks for the memory of both
 * panels at ahead[], `fetch` bytes each, in equal shares per step. */
INLINE void multiply(struct scratch *s, const uint8_t *const *codes, const struct inputs *in,
                     const struct x_layout *l, int k, int n, float (*acc)[MM_UNIT],
                     const uint8_t *const *ahead, int fetch, const enum kind kind)
{
    const int step = kind == KIND_MIN || kind == KIND_PLAIN ? 2 : 1;
    int blocks = n / 32, share = (fetch * step / blocks + 63) & ~63;
    tiles(s, 0, codes, in, 0, n, kind);
    for (int b = 0, which = 0, at = 0; b < blocks; b += step, which ^= 1) {
        if (b + step < blocks)
            tiles(s, !which, codes, in, b + step, n, kind);
        for (int end = at + share < fetch ? at + share : fetch; at < end; at += 64) {
            _mm_prefetch((const char *)ahead[0] + at, _MM_HINT_T1);
            _mm_prefetch((const char *)ahead[1] + at, _MM_HINT_T1);
        }
        if (step == 1)
            add_halves(s, acc, which, in, l, b, k / 32 + b, kind);
        else if (b + 1 < blocks)
            add_blocks(s, acc, which, in, l, b, k / 32 + b, 2, kind);
        else
            add_blocks(s, acc, which, in, l, b, k / 32 + b, 1, kind);
    }
}

/* Input rows [i0, i0 + 16) of a call, columns [k, k + n): in place where 16 records follow one another,
 * else copied together. */
INLINE struct inputs gather(const struct mm_call *c, struct scratch *s, const struct x_layout *l,
                            int k, int n, int i0, const enum kind kind)
{
    struct inputs in = {.rows = c->n - i0 < ROWS ? c->n - i0 : ROWS};
    for (int t = 0; t < in.rows; t++)
        in.record[t] = c->x->q + (size_t)(c->rows ? c->rows[i0 + t] : i0 + t) * l->bytes;
    if (!c->rows && in.rows == ROWS) {
        in.codes = in.record[0] + k;
        in.fine = in.codes + l->fine;
        in.stride = l->bytes;
        return in;
    }
    in.codes = s->inputs[0][0];
    in.fine = s->inputs[1][0];
    in.stride = sizeof s->inputs[0][0];
    for (int t = 0; t < in.rows; t++)
        for (int i = 0; i < n; i += 64) { /* rounded up: records are longer than their codes */
            vi_store(s->inputs[0][t] + i, vi_load(in.record[t] + k + i));
            if (kind == KIND_FINE)
                vi_store(s->inputs[1][t] + i, vi_load(in.record[t] + l->fine + k + i));
        }
    return in;
}

INLINE void gemm(const struct mm_call *c, const enum kind kind,
                 const uint8_t *(*unpack)(const uint8_t *, int, int, struct chunk *))
{
    struct scratch *s = c->scratch;
    const struct mm_seg *seg = c->seg;
    struct x_layout l = x_layout(c->w->n_in);
    int n_in = c->w->n_in, depth = kind == KIND_SIX ? 16 : 32;
    struct amx_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        bool input = i == 4 || i == 6, weight = i == 5 || i == 7;
        config.rows[i] = (uint8_t)(weight ? depth / 4 : ROWS);
        config.row_bytes[i] = (uint16_t)(input ? depth : 64);
    }
    amx_configure(&config);
    size_t first = (size_t)c->expert * (size_t)seg->n_panels + (size_t)(c->row / MM_PANEL);
    const uint8_t *panel = seg->data + first * seg->panel_bytes;
    for (int col = 0; col < c->n_rows; col += MM_UNIT, panel += 2 * seg->panel_bytes) {
        const uint8_t *second = col + MM_PANEL < c->n_rows ? panel + seg->panel_bytes : panel;
        memset(s->acc, 0, (size_t)c->n * sizeof s->acc[0]);
        for (int k = 0; k < n_in; k += CHUNK_COLUMNS) {
            int n = n_in - k < CHUNK_COLUMNS ? n_in - k : CHUNK_COLUMNS;
            const uint8_t *codes[2] = {unpack(panel, k, n, &s->chunk[0]),
                                       unpack(second, k, n, &s->chunk[1])};
            /* The next two panels, where this chunk is now. */
            size_t at = seg->panel_bytes * (size_t)k / (size_t)n_in + 2 * seg->panel_bytes;
            const uint8_t *ahead[2] = {panel + at, panel + seg->panel_bytes + at};
            int fetch = (int)(seg->panel_bytes * (size_t)n / (size_t)n_in);
            for (int i0 = 0; i0 < c->n; i0 += ROWS, fetch = 0) {
                struct inputs in = gather(c, s, &l, k, n, i0, kind);
                multiply(s, codes, &in, &l, k, n, s->acc + i0, ahead, fetch, kind);
            }
        }
        int width = c->n_rows - col < MM_UNIT ? c->n_rows - col : MM_UNIT;
        for (int i = 0; i < c->n; i++) {
            float *y = c->y + (size_t)i * c->stride + col;
            for (int j = 0; j < width; j++)
                y[j] = s->acc[i][j] + (c->bias ? c->bias[col + j] : 0.0f);
        }
    }
    amx_release();
}

#define GEMM(name, kind)                                                                           \
    void mm_gemm_##name##_amx(const struct mm_call *c)                                             \
    {                                                                                              \
        gemm(c, kind, unpack_##name);                                                              \
    }

GEMM(q4k, KIND_MIN)
GEMM(q5k, KIND_MIN)
GEMM(q6k, KIND_SIX)
GEMM(iq4xs, KIND_PLAIN)
GEMM(q4_0, KIND_PLAIN)
GEMM(iq4nl, KIND_PLAIN)
GEMM(mxfp4, KIND_PLAIN)
GEMM(q8_0, KIND_FINE)
