/*
 * Packed panels times many input rows on AMX's 8-bit tiles. Two panels are unpacked, 512 columns at a
 * time; then 16 input rows at a time: a tile product per block of columns and panel (two blocks in
 * flight), whose 16 x 16 integer sums go through memory to the float accumulators. Dot products are
 * exact and the additions come in the order of panel_kernel.h: the same bytes as without AMX.
 *
 *   C (16 inputs, 16 weight rows) += A (16 inputs, 32 columns, signed) * B (32 columns, 16 weight
 *   rows, unsigned): B's rows are the column groups of a panel as they lie.
 * tmm0-3: C of (block, panel); tmm4: A; tmm5: B. Q6_K has its scales per 16 columns: half of that.
 *
 * Tiles are configured and released in each call: nothing is left to switch between threads.
 */
#include "backend/cpu/amx.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/unpack.h"

enum { ROWS = 16 };

/* How a block becomes floats. */
enum kind {
    KIND_MIN,  /* scale and min per 32: Q4_K Q5_K */
    KIND_INIT, /* scale per 32, codes + 128: Q4_0 IQ4_NL IQ4_XS MXFP4 */
    KIND_SIX,  /* scale per 16, codes + 32: Q6_K */
    KIND_FINE, /* as INIT, inputs in two parts: Q8_0 */
};

struct scratch {
    struct chunk chunk[2];                                    /* of two panels */
    _Alignas(64) float acc[MM_CHUNK][MM_UNIT];                /* sums of all input rows */
    _Alignas(64) int32_t dots[4][ROWS][MM_PANEL];             /* of (block, panel) */
    _Alignas(64) uint8_t inputs[2][ROWS][CHUNK_COLUMNS + 64]; /* codes and fine parts; the 64 keep
                                                                 rows out of one another's sets */
};

_Static_assert(sizeof(struct scratch) <= GEMM_SCRATCH, "scratch");

#define INLINE static inline __attribute__((always_inline))

/* dots[0..1] = block at column `at` of both panels, dots[2..3] = the one `width` columns on. */
INLINE void tile_dots(struct scratch *s, const uint8_t *const *codes,
                      const uint8_t (*in)[CHUNK_COLUMNS + 64], int at, const int width)
{
    const size_t in_stride = sizeof in[0];
    amx_zero(0);
    amx_zero(1);
    amx_zero(2);
    amx_zero(3);
    amx_load(4, in[0] + at, in_stride);
    amx_load(5, codes[0] + 16 * at, 64);
    amx_dot_su(0, 4, 5);
    amx_load(5, codes[1] + 16 * at, 64);
    amx_dot_su(1, 4, 5);
    amx_load(6, in[0] + at + width, in_stride);
    amx_load(7, codes[0] + 16 * (at + width), 64);
    amx_dot_su(2, 6, 7);
    amx_load(7, codes[1] + 16 * (at + width), 64);
    amx_dot_su(3, 6, 7);
    amx_store(0, s->dots[0], 64);
    amx_store(1, s->dots[1], 64);
    amx_store(2, s->dots[2], 64);
    amx_store(3, s->dots[3], 64);
}

INLINE VF dot_of(const struct scratch *s, int tile, int t, int32_t init)
{
    return vi_to_f(vi_add32(vi_load(s->dots[tile][t]), vi_set1_32(init)));
}

/* The pieces of a record that the epilogue reads, from column k on. */
struct record {
    const float *scale, *sum;
    const int32_t *init32, *init16, *fine_init;
};

INLINE struct record record_at(const uint8_t *x, const struct x_layout *l, int k)
{
    return (struct record){
        (const float *)(x + l->scale) + k / 32, (const float *)(x + l->sum) + k / 32,
        (const int32_t *)(x + l->init32) + k / 32, (const int32_t *)(x + l->init16) + k / 16,
        (const int32_t *)(x + l->fine_init) + k / 32};
}

/* Adds one pair of blocks (b, b + 1; only b where `one`) to the accumulators of input row t. */
INLINE void add_pair(struct scratch *s, float *acc, const struct record *r, int b, int t, bool one,
                     const enum kind kind)
{
    for (int p = 0; p < 2; p++) {
        VF sum = vf_load(acc + MM_PANEL * p);
        for (int i = 0; i < (one ? 1 : 2); i++) {
            VF v = dot_of(s, 2 * i + p, t, kind == KIND_INIT ? r->init32[b + i] : 0);
            VF w = vf_load(s->chunk[p].scale[b + i]);
            sum = vf_fma(v, vf_mul(w, vf_set1(r->scale[b + i])), sum);
            if (kind == KIND_MIN)
                sum = vf_fnma(vf_load(s->chunk[p].min[b + i]), vf_set1(r->sum[b + i]), sum);
        }
        vf_store(acc + MM_PANEL * p, sum);
    }
}

/* One block of Q6_K: its two halves have scales of their own. */
INLINE void add_six(struct scratch *s, float *acc, const struct record *r, int b, int t)
{
    for (int p = 0; p < 2; p++) {
        VF v = vf_mul(dot_of(s, p, t, r->init16[2 * b]), vf_load(s->chunk[p].scale[2 * b]));
        v = vf_fma(dot_of(s, 2 + p, t, r->init16[2 * b + 1]), vf_load(s->chunk[p].scale[2 * b + 1]),
                   v);
        VF sum = vf_load(acc + MM_PANEL * p);
        vf_store(acc + MM_PANEL * p, vf_fma(v, vf_set1(r->scale[b]), sum));
    }
}

/* One block of Q8_0: tiles 0-1 with the codes of the inputs, 2-3 with the fine parts. */
INLINE void add_fine(struct scratch *s, float *acc, const struct record *r, int b, int t)
{
    const VF unit = vf_set1(1.0f / 254.0f);
    for (int p = 0; p < 2; p++) {
        VF v = vf_fma(dot_of(s, 2 + p, t, r->fine_init[b]), unit, dot_of(s, p, t, r->init32[b]));
        VF w = vf_mul(vf_load(s->chunk[p].scale[b]), vf_set1(r->scale[b]));
        vf_store(acc + MM_PANEL * p, vf_fma(v, w, vf_load(acc + MM_PANEL * p)));
    }
}

INLINE void tile_fine(struct scratch *s, const uint8_t *const *codes, int at)
{
    const size_t in_stride = sizeof s->inputs[0][0];
    amx_zero(0);
    amx_zero(1);
    amx_zero(2);
    amx_zero(3);
    amx_load(4, s->inputs[0][0] + at, in_stride);
    amx_load(6, s->inputs[1][0] + at, in_stride);
    amx_load(5, codes[0] + 16 * at, 64);
    amx_dot_su(0, 4, 5);
    amx_dot_su(2, 6, 5);
    amx_load(7, codes[1] + 16 * at, 64);
    amx_dot_su(1, 4, 7);
    amx_dot_su(3, 6, 7);
    amx_store(0, s->dots[0], 64);
    amx_store(1, s->dots[1], 64);
    amx_store(2, s->dots[2], 64);
    amx_store(3, s->dots[3], 64);
}

/* Columns [k, k + n) for input rows [i0, i0 + rows), whose codes are in s->inputs. */
INLINE void multiply(struct scratch *s, const uint8_t *const *codes, const uint8_t *const *x,
                     const struct x_layout *l, int k, int n, int i0, int rows, const enum kind kind)
{
    struct record r[ROWS];
    for (int t = 0; t < rows; t++)
        r[t] = record_at(x[t], l, k);
    for (int b = 0; b < n / 32; b++) {
        bool one = b + 1 == n / 32;
        if (kind == KIND_FINE)
            tile_fine(s, codes, 32 * b);
        else if (kind == KIND_SIX)
            tile_dots(s, codes, s->inputs[0], 32 * b, 16);
        else /* a last odd block is computed twice */
            tile_dots(s, codes, s->inputs[0], 32 * b, one ? 0 : 32);
        for (int t = 0; t < rows; t++) {
            float *acc = s->acc[i0 + t];
            if (kind == KIND_FINE)
                add_fine(s, acc, &r[t], b, t);
            else if (kind == KIND_SIX)
                add_six(s, acc, &r[t], b, t);
            else
                add_pair(s, acc, &r[t], b, t, one, kind);
        }
        b += kind == KIND_MIN || kind == KIND_INIT;
    }
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
            for (int i0 = 0; i0 < c->n; i0 += ROWS) {
                int rows = c->n - i0 < ROWS ? c->n - i0 : ROWS;
                const uint8_t *x[ROWS];
                for (int t = 0; t < rows; t++) {
                    size_t row = (size_t)(c->rows ? c->rows[i0 + t] : i0 + t);
                    x[t] = c->x->q + row * l.bytes;
                    memcpy(s->inputs[0][t], x[t] + k, (size_t)n);
                    if (kind == KIND_FINE)
                        memcpy(s->inputs[1][t], x[t] + l.fine + k, (size_t)n);
                }
                multiply(s, codes, x, &l, k, n, i0, rows, kind);
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
GEMM(iq4xs, KIND_INIT)
GEMM(q4_0, KIND_INIT)
GEMM(iq4nl, KIND_INIT)
GEMM(mxfp4, KIND_INIT)
GEMM(q8_0, KIND_FINE)
