/*
 * Kernels for packed panels with 8-bit inputs, by dot products of bytes.
 *
 *   acc[t][row] += dot(w codes, x[t] codes) * (w scale * x[t] scale)    for each block of 32 columns
 *   acc[t][row] -= w min * x[t] sum                                     for formats with mins
 *
 * A vector is V_LANES weight rows, with four adjacent columns in each 32-bit lane. Each column group
 * multiplies one load of weights by T broadcasts of inputs. Blocks are taken in column order, and their
 * integer dot products are exact. The order is the same for any number of input rows T, which is a
 * constant in each copy of a pass, so a row's bytes do not depend on T.
 *
 * Few rows are limited by memory bandwidth. Many are limited by arithmetic: a Q4_K block needs 3 float
 * operations next to every 8 dot products, which allows at most 73 % of the int8 peak. Whole models in
 * Q4_K_M reach, with VNNI on Zen 4, 57 to 63 % of the int8 peak for prompts and 71 to 72 % of the memory
 * limit for one sequence; on a Xeon 86 to 93 % of the memory limit (docs/performance.md).
 *
 * Included once per instruction set, after these definitions:
 *   V_LANES 16 or 8      rows of a panel per vector; narrower sets take a panel in two parts
 *   VI, VF               vectors of integers and floats; vi_*, vf_*: operations on them
 *   vi_dot(acc, u, s)    acc + dot product of 4 unsigned bytes (< 128) with 4 signed ones, per lane
 *   vi_start, vi_dot8    the same for codes stored as code + 128; vi_start is acc's initial value
 *   vi_levels(t)         a table of 16 bytes, for lookups
 *   vi_dot_at, vi_dot8_at  optional: the same with the input's four columns from col on, the lane-th of
 *                        the 16 around them; COLUMNS then unrolls loops over columns
 *   vi_mla(a, b, n)      optional: a + b * n of 32-bit integers; fine parts are then added as integers
 *   v_base(p)            p; where it helps, in a register of its own
 *   MAX_T                input rows per pass; FEW_PASSES: compile passes for fewer values of T
 *   NAME(x)              x with the set's suffix; X_QUANTIZE: the set's function to quantise inputs
 */
#include "backend/cpu/gemm_kernels.h"
#include "backend/cpu/gemm_tables.h"

#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

enum { V_BYTES = V_LANES * 4, V_PARTS = GEMM_PANEL / V_LANES, PREFETCH_BYTES = 12288 };

/* One pass: V_LANES rows of a panel times T input rows. */
struct pass {
    const uint8_t *panel;
    size_t lane4; /* byte offset of this part's first lane in a vector of 32-bit lanes */
    int n_in, group_len;
    bool prefetch_few;
    struct input_layout l;
    const uint8_t *x[MAX_T]; /* records */
};

/* Prefetches `bytes` bytes of the panel (or the next one), PREFETCH_BYTES further on. Passes of one
 * or two rows leave prefetching to the hardware where that is good: see gemm_prefetch_few. */
INLINE void prefetch_panel(const struct pass *p, const uint8_t *at, const int bytes, const int T)
{
    if (T < 3 && !p->prefetch_few)
        return;
    UNROLL
    for (int i = 0; i < bytes; i += 64)
        v_prefetch(at + PREFETCH_BYTES + i);
}

INLINE VI vi_bcast(const uint8_t *p)
{
    int32_t v;
    memcpy(&v, p, 4);
    return vi_set1_32(v);
}

INLINE VF vf_bcast(const uint8_t *p)
{
    float v;
    memcpy(&v, p, 4);
    return vf_set1(v);
}

#ifndef v_base
#define v_base(p) (p)
#endif
#ifndef vi_dot_at
#define vi_dot_at(acc, u, x, col, lane)  ((void)(lane), vi_dot(acc, u, vi_bcast((x) + (col))))
#define vi_dot8_at(acc, u, x, col, lane) ((void)(lane), vi_dot8(acc, u, vi_bcast((x) + (col))))
#define COLUMNS
#endif

/* acc[t] += dot[t] * (scale of the weights * scale of the input), for block `blk` */
INLINE void add_block(VF *acc, const VI *dot, VF w_scale, const struct pass *p, int blk,
                      const int T)
{
    UNROLL
    for (int t = 0; t < T; t++) {
        VF s = vf_mul(w_scale, vf_bcast(p->x[t] + p->l.scale + 4 * (size_t)blk));
        acc[t] = vf_fma(vi_to_f(dot[t]), s, acc[t]);
    }
}

/* The same for column k and inputs with a fine part, whose dot products are in `fine`. */
INLINE void add_block_fine(VF *acc, const VI *dot, const VI *fine, VF w_scale, const struct pass *p,
                           size_t k, const int T)
{
    const VF unit = vf_set1(FINE_UNIT);
#ifdef vi_mla
    w_scale = vf_mul(w_scale, unit);
#endif
    UNROLL
    for (int t = 0; t < T; t++) {
#ifdef vi_mla
        VF sum = vi_to_f(vi_mla(fine[t], dot[t], FINE_PER_CODE));
#else
        VF sum = vf_fma(vi_to_f(fine[t]), unit, vi_to_f(dot[t]));
#endif
        VF scale = vf_mul(w_scale, vf_bcast(p->x[t] + p->l.scale + k / 8));
        acc[t] = vf_fma(sum, scale, acc[t]);
    }
}

/* dot[t] += codes u of one column group times the inputs at column col; lane: col / 4 % 4, a
 * constant */
INLINE void dot_group(VI *dot, VI u, const struct pass *p, size_t col, const int lane, const int T)
{
    UNROLL
    for (int t = 0; t < T; t++)
        dot[t] = vi_dot_at(dot[t], u, p->x[t], col, lane);
}

INLINE void dot8_group(VI *dot, VI u, const struct pass *p, size_t col, const int lane, const int T)
{
    UNROLL
    for (int t = 0; t < T; t++)
        dot[t] = vi_dot8_at(dot[t], u, p->x[t], col, lane);
}

/* Q4_K (five = 0) and Q5_K (five = 1). */
INLINE void pass_k45(const struct pass *p, VF *acc, const int five, const int T)
{
    const VI nib = vi_set1_8(15), two = vi_set1_8(0x30), fifth = vi_set1_8(16);
    const VI byte = vi_set1_32(0xff);
    const size_t bytes = five ? Q5K_BLOCK : Q4K_BLOCK, at = p->lane4;
    const uint8_t *s = p->panel, *q = s + K45_SCALES + at;
    for (int k = 0; k < p->n_in; k += 256, s = q - at, q += K45_SCALES) {
        prefetch_panel(p, s, K45_SCALES, T);
        VI sl = vi_load(s + at), ml = vi_load(s + 64 + at), h = vi_load(s + 128 + at);
        VF d = vf_load_f16(s + 192 + at / 2), dmin = vf_load_f16(s + 224 + at / 2);
        VI sc = vi_or_and(vi_and(sl, nib), vi_sll16(h, 4), two);
        VI mn = vi_or_and(vi_and(ml, nib), h, two);
        VI sc_next = vi_or_and(vi_high4(sl, nib), vi_sll16(h, 2), two);
        VI mn_next = vi_or_and(vi_high4(ml, nib), vi_srl16(h, 2), two);
        for (int b = 0; b < 8; b++, q += bytes) {
            size_t col = (size_t)(k + 32 * b);
            prefetch_panel(p, q, (int)bytes, T);
            VI dot[MAX_T], high = five ? vi_load(q) : vi_zero();
            const uint8_t *nibbles = five ? q + 64 : q;
            UNROLL
            for (int t = 0; t < T; t++)
                dot[t] = vi_zero();
            COLUMNS
            for (int i = 0; i < 4; i++, col += 8) {
                VI v = vi_load(nibbles + 64 * i);
                VI lo = vi_and(v, nib), hi = vi_high4(v, nib);
                if (five) {
                    lo = vi_or_and(lo, vi_sll16(high, 4), fifth);
                    hi = vi_or_and(hi, vi_sll16(high, 3), fifth);
                    high = vi_srl16(high, 2);
                }
                dot_group(dot, lo, p, col, 2 * i % 4, T);
                dot_group(dot, hi, p, col + 4, 2 * i % 4 + 1, T);
            }
            VF scale = vf_mul(vi_to_f(vi_and(sc, byte)), d);
            VF min = vf_mul(vi_to_f(vi_and(mn, byte)), dmin);
            add_block(acc, dot, scale, p, k / 32 + b, T);
            UNROLL
            for (int t = 0; t < T; t++)
                acc[t] =
                    vf_fnma(min, vf_bcast(p->x[t] + p->l.sum + 4 * (size_t)(k / 32 + b)), acc[t]);
            sc = b == 3 ? sc_next : vi_srl32(sc, 8);
            mn = b == 3 ? mn_next : vi_srl32(mn, 8);
        }
    }
}

INLINE void pass_q4k(const struct pass *p, VF *acc, const int T)
{
    pass_k45(p, acc, 0, T);
}

INLINE void pass_q5k(const struct pass *p, VF *acc, const int T)
{
    pass_k45(p, acc, 1, T);
}

/* Dot products of 16 columns of Q6_K: two vectors of nibbles and one of high bits. */
INLINE void dot_6bit(VI *dot, const uint8_t *q, const struct pass *p, size_t col, const int T)
{
    const VI nib = vi_set1_8(15), two = vi_set1_8(0x30);
    UNROLL
    for (int t = 0; t < T; t++)
        dot[t] = vi_bcast(p->x[t] + p->l.init16 + col / 4);
    VI v = vi_load(q), w = vi_load(q + 64), h = vi_load(q + 128);
    dot_group(dot, vi_or_and(vi_and(v, nib), vi_sll16(h, 4), two), p, col, 0, T);
    dot_group(dot, vi_or_and(vi_high4(v, nib), vi_sll16(h, 2), two), p, col + 4, 1, T);
    dot_group(dot, vi_or_and(vi_and(w, nib), h, two), p, col + 8, 2, T);
    dot_group(dot, vi_or_and(vi_high4(w, nib), vi_srl16(h, 2), two), p, col + 12, 3, T);
}

INLINE void pass_q6k(const struct pass *p, VF *acc, const int T)
{
    const uint8_t *q = p->panel + p->lane4;
    for (int k = 0; k < p->n_in; k += 256) {
        prefetch_panel(p, q, Q6K_SCALES, T);
        const uint8_t *s = q;
        VF d = vf_load_f16(q + 256 - p->lane4 / 2);
        VI sc = vi_zero();
        q += Q6K_SCALES;
        for (int b = 0; b < 8; b++, q += Q6K_BLOCK) {
            prefetch_panel(p, q, Q6K_BLOCK, T);
            if (b % 2 == 0)
                sc = vi_load(s + 32 * b);
            VF s0 = vf_mul(vi_to_f(vi_sra32(vi_sll32(sc, 24), 24)), d);
            VF s1 = vf_mul(vi_to_f(vi_sra32(vi_sll32(sc, 16), 24)), d);
            sc = vi_srl32(sc, 16);
            size_t col = (size_t)(k + 32 * b);
            VI dot[MAX_T];
            VF sum[MAX_T];
            dot_6bit(dot, q, p, col, T);
            UNROLL
            for (int t = 0; t < T; t++)
                sum[t] = vf_mul(vi_to_f(dot[t]), s0);
            dot_6bit(dot, q + 192, p, col + 16, T);
            UNROLL
            for (int t = 0; t < T; t++) {
                sum[t] = vf_fma(vi_to_f(dot[t]), s1, sum[t]);
                acc[t] = vf_fma(sum[t], vf_bcast(p->x[t] + p->l.scale + col / 8), acc[t]);
            }
        }
    }
}

/* Dot products of 32 columns of 4-bit codes that index a table. */
INLINE void dot_table(VI *dot, const uint8_t *q, VI table, const struct pass *p, size_t col,
                      const int T)
{
    const VI nib = vi_set1_8(15);
    UNROLL
    for (int t = 0; t < T; t++)
        dot[t] = vi_start(p->x[t] + p->l.init32 + col / 8);
    COLUMNS
    for (int i = 0; i < 4; i++, col += 8) {
        VI v = vi_load(q + 64 * i);
        dot8_group(dot, vi_lookup(table, vi_and(v, nib)), p, col, 2 * i % 4, T);
        dot8_group(dot, vi_lookup(table, vi_high4(v, nib)), p, col + 4, 2 * i % 4 + 1, T);
    }
}

INLINE void pass_4bit_table(const struct pass *p, VF *acc, const uint8_t *table, const int T)
{
    const size_t at = p->lane4;
    const uint8_t *q = p->panel;
    VI lut = vi_table(table);
    for (int k0 = 0; k0 < p->n_in; k0 += 64) {
        prefetch_panel(p, q, UNIT_SCALES, T);
        const uint8_t *s = q + at / 2;
        q += UNIT_SCALES;
        for (int k = k0; k < k0 + 64 && k < p->n_in; k += 32, q += 256, s += 32) {
            VI dot[MAX_T];
            prefetch_panel(p, q, 256, T);
            dot_table(dot, v_base(q + at), lut, p, (size_t)k, T);
            add_block(acc, dot, vf_load_f16(s), p, k / 32, T);
        }
    }
}

INLINE void pass_q4_0(const struct pass *p, VF *acc, const int T)
{
    pass_4bit_table(p, acc, table_q4_0, T);
}

INLINE void pass_iq4nl(const struct pass *p, VF *acc, const int T)
{
    pass_4bit_table(p, acc, table_iq4, T);
}

/* Initial values of a block's dot products, for weights stored as code + 128. */
INLINE void start_fine(VI *dot, VI *fine, const struct pass *p, size_t k, const int T)
{
    UNROLL
    for (int t = 0; t < T; t++) {
        dot[t] = vi_start(p->x[t] + p->l.init32 + k / 8);
        fine[t] = vi_start(p->x[t] + p->l.fine_init + k / 8);
    }
}

/* Adds one column group to both dot products. */
INLINE void dot8_fine(VI *dot, VI *fine, VI u, const struct pass *p, size_t k, const int lane,
                      const int T)
{
    dot8_group(dot, u, p, k, lane, T);
    UNROLL
    for (int t = 0; t < T; t++)
        fine[t] = vi_dot8_at(fine[t], u, p->x[t] + p->l.fine, k, lane);
}

/* Two dot products per block: with the input's codes, and with the fine part. */
INLINE void pass_mxfp4(const struct pass *p, VF *acc, const int T)
{
    const VI nib = vi_set1_8(15), lut = vi_table(table_mxfp4);
    const size_t at = p->lane4;
    const uint8_t *q = p->panel;
    for (int k0 = 0; k0 < p->n_in; k0 += 128) {
        prefetch_panel(p, q, UNIT_SCALES, T);
        const uint8_t *s = q + at / 4;
        q += UNIT_SCALES;
        for (int k = k0; k < k0 + 128 && k < p->n_in; k += 32, q += 256, s += 16) {
            VI dot[MAX_T], fine[MAX_T];
            const uint8_t *codes = v_base(q + at);
            prefetch_panel(p, q, 256, T);
            start_fine(dot, fine, p, k, T);
            COLUMNS
            for (int i = 0; i < 4; i++) {
                VI v = vi_load(codes + 64 * i);
                dot8_fine(dot, fine, vi_lookup(lut, vi_and(v, nib)), p, k + 8 * i, 2 * i % 4, T);
                dot8_fine(dot, fine, vi_lookup(lut, vi_high4(v, nib)), p, k + 8 * i + 4,
                          2 * i % 4 + 1, T);
            }
            add_block_fine(acc, dot, fine, vf_load_e8m0_half(s), p, (size_t)k, T);
        }
    }
}

INLINE void pass_iq4xs(const struct pass *p, VF *acc, const int T)
{
    const VI low = vi_set1_32(15), two = vi_set1_32(0x30), center = vi_set1_32(32);
    const size_t at = p->lane4;
    VI lut = vi_table(table_iq4);
    const uint8_t *s = p->panel, *q = s + IQ4XS_SCALES + at;
    for (int k = 0; k < p->n_in; k += 256, s = q - at, q += IQ4XS_SCALES) {
        prefetch_panel(p, s, IQ4XS_SCALES, T);
        VI sl = vi_load(s + at), sh = vi_sll32(vi_load_u16(s + 64 + at / 2), 4);
        VF d = vf_load_f16(s + 96 + at / 2);
        for (int b = 0; b < 8; b++, q += 256) {
            VI dot[MAX_T];
            prefetch_panel(p, q, 256, T);
            dot_table(dot, q, lut, p, (size_t)(k + 32 * b), T);
            VI sc = vi_sub32(vi_or_and(vi_and(sl, low), sh, two), center);
            add_block(acc, dot, vf_mul(vi_to_f(sc), d), p, k / 32 + b, T);
            sl = vi_srl32(sl, 4);
            sh = vi_srl32(sh, 2);
        }
    }
}

/* Columns [k, k + 32) of Q8_0: two dot products, as for MXFP4. q: this part's codes; s: its scales. */
INLINE void block_q8_0(const struct pass *p, VF *acc, const uint8_t *q, const uint8_t *s, size_t k,
                       const int T)
{
    VI dot[MAX_T], fine[MAX_T];
    prefetch_panel(p, q - p->lane4, 512, T);
    start_fine(dot, fine, p, k, T);
    COLUMNS
    for (size_t g = 0; g < 8; g++)
        dot8_fine(dot, fine, vi_load8(q + 64 * g), p, k + 4 * g, g % 4, T);
    add_block_fine(acc, dot, fine, vf_load_f16(s), p, k, T);
}

INLINE void pass_q8_0(const struct pass *p, VF *acc, const int T)
{
    const size_t at = p->lane4, n_in = (size_t)p->n_in;
    const uint8_t *q = p->panel + at;
    for (size_t k = 0; k < n_in; k += 64, q += 1024) {
        const uint8_t *s = q - at / 2;
        prefetch_panel(p, q - at, UNIT_SCALES, T);
        q = v_base(q + UNIT_SCALES);
        block_q8_0(p, acc, q, s, k, T);
        if (k + 32 >= n_in)
            break;
        block_q8_0(p, acc, v_base(q + 512), s + 32, k + 32, T);
    }
}

/* Two dot products per block, as for MXFP4. A group's zero points act as mins. */
INLINE void pass_gptq4(const struct pass *p, VF *acc, const int T)
{
    const VI nib = vi_set1_8(15);
    const size_t at = p->lane4;
    const uint8_t *q = p->panel;
    for (int k0 = 0; k0 < p->n_in; k0 += p->group_len) {
        prefetch_panel(p, q, UNIT_SCALES, T);
        VF w_scale = vf_load_f16(q + at / 2);
        VF min = vf_mul(w_scale, vi_to_f(vi_load_u8(q + 32 + at / 4)));
        int end = k0 + p->group_len < p->n_in ? k0 + p->group_len : p->n_in;
        q += UNIT_SCALES;
        for (int k = k0; k < end; k += 32, q += 256) {
            VI dot[MAX_T], fine[MAX_T];
            const uint8_t *codes = v_base(q + at);
            prefetch_panel(p, q, 256, T);
            UNROLL
            for (int t = 0; t < T; t++)
                dot[t] = fine[t] = vi_zero();
            size_t col = (size_t)k;
            COLUMNS
            for (int i = 0; i < 4; i++, col += 8) {
                VI v = vi_load(codes + 64 * i);
                VI lo = vi_and(v, nib), hi = vi_high4(v, nib);
                dot_group(dot, lo, p, col, 2 * i % 4, T);
                dot_group(dot, hi, p, col + 4, 2 * i % 4 + 1, T);
                dot_group(fine, lo, p, p->l.fine + col, 2 * i % 4, T);
                dot_group(fine, hi, p, p->l.fine + col + 4, 2 * i % 4 + 1, T);
            }
            add_block_fine(acc, dot, fine, w_scale, p, (size_t)k, T);
            UNROLL
            for (int t = 0; t < T; t++) {
                size_t blk = (size_t)k / 8;
                acc[t] = vf_fnma(min, vf_bcast(p->x[t] + p->l.fine_sum + blk), acc[t]);
            }
        }
    }
}

/* The scales of sub-blocks 2b and 2b + 1, the lowest two bytes of a lane. */
INLINE VF scale_first(VI sc)
{
    return vi_to_f(vi_sra32(vi_sll32(sc, 24), 24));
}

INLINE VF scale_second(VI sc)
{
    return vi_to_f(vi_sra32(vi_sll32(sc, 16), 24));
}

/* dot[t] += 16 columns of 2-bit codes */
INLINE void dot_2bit(VI *dot, VI v, const struct pass *p, size_t col, const int T)
{
    const VI two = vi_set1_8(3);
    dot_group(dot, vi_and(v, two), p, col, 0, T);
    dot_group(dot, vi_and(vi_srl16(v, 2), two), p, col + 4, 1, T);
    dot_group(dot, vi_and(vi_srl16(v, 4), two), p, col + 8, 2, T);
    dot_group(dot, vi_and(vi_srl16(v, 6), two), p, col + 12, 3, T);
}

/* Half a block of Q2_K: sum[t] += scale * dot - min * sum of the inputs. min is passed times 1/32,
 * since init16 is -32 times that sum. */
INLINE void add_2bit(VF *sum, const uint8_t *q, VF scale, VF min, const struct pass *p, size_t col,
                     const int T)
{
    VI dot[MAX_T];
    UNROLL
    for (int t = 0; t < T; t++)
        dot[t] = vi_zero();
    dot_2bit(dot, vi_load(q), p, col, T);
    UNROLL
    for (int t = 0; t < T; t++) {
        sum[t] = vf_fma(vi_to_f(dot[t]), scale, sum[t]);
        sum[t] = vf_fma(vi_to_f(vi_bcast(p->x[t] + p->l.init16 + col / 4)), min, sum[t]);
    }
}

/* acc[t] += sum[t] * scale of the inputs at column col */
INLINE void add_sums(VF *acc, const VF *sum, const struct pass *p, size_t col, const int T)
{
    UNROLL
    for (int t = 0; t < T; t++)
        acc[t] = vf_fma(sum[t], vf_bcast(p->x[t] + p->l.scale + col / 8), acc[t]);
}

INLINE void pass_q2k(const struct pass *p, VF *acc, const int T)
{
    const VI nib = vi_set1_32(15);
    const uint8_t *q = p->panel + p->lane4;
    for (int k = 0; k < p->n_in; k += 256) {
        prefetch_panel(p, q, LOW_SCALES, T);
        const uint8_t *s = q;
        VF d = vf_load_f16(q + 256 - p->lane4 / 2);
        VF dmin = vf_mul(vf_load_f16(q + 288 - p->lane4 / 2), vf_set1(1.0f / 32));
        VI sc = vi_zero();
        q += LOW_SCALES;
        for (int b = 0; b < 8; b++, q += Q2K_BLOCK) {
            prefetch_panel(p, q, Q2K_BLOCK, T);
            if (b % 2 == 0)
                sc = vi_load(s + 32 * b);
            size_t col = (size_t)(k + 32 * b);
            VF sum[MAX_T];
            UNROLL
            for (int t = 0; t < T; t++)
                sum[t] = vf_zero();
            add_2bit(sum, q, vf_mul(vi_to_f(vi_and(sc, nib)), d),
                     vf_mul(vi_to_f(vi_and(vi_srl32(sc, 4), nib)), dmin), p, col, T);
            add_2bit(sum, q + 64, vf_mul(vi_to_f(vi_and(vi_srl32(sc, 8), nib)), d),
                     vf_mul(vi_to_f(vi_and(vi_srl32(sc, 12), nib)), dmin), p, col + 16, T);
            sc = vi_srl32(sc, 16);
            add_sums(acc, sum, p, col, T);
        }
    }
}

/* 16 columns of Q3_K, stored as code + 4: low bits in v, third bits at bits 2, 3, 4 and 5 of h. */
INLINE void add_3bit(VF *sum, VI v, VI h, VF scale, const struct pass *p, size_t col, const int T)
{
    const VI two = vi_set1_8(3), third = vi_set1_8(4);
    VI dot[MAX_T];
    UNROLL
    for (int t = 0; t < T; t++) /* -4 times the sum of the inputs */
        dot[t] = vi_sra32(vi_bcast(p->x[t] + p->l.init16 + col / 4), 3);
    dot_group(dot, vi_or_and(vi_and(v, two), h, third), p, col, 0, T);
    dot_group(dot, vi_or_and(vi_and(vi_srl16(v, 2), two), vi_srl16(h, 1), third), p, col + 4, 1, T);
    dot_group(dot, vi_or_and(vi_and(vi_srl16(v, 4), two), vi_srl16(h, 2), third), p, col + 8, 2, T);
    dot_group(dot, vi_or_and(vi_and(vi_srl16(v, 6), two), vi_srl16(h, 3), third), p, col + 12, 3,
              T);
    UNROLL
    for (int t = 0; t < T; t++)
        sum[t] = vf_fma(vi_to_f(dot[t]), scale, sum[t]);
}

INLINE void pass_q3k(const struct pass *p, VF *acc, const int T)
{
    const uint8_t *q = p->panel + p->lane4;
    for (int k = 0; k < p->n_in; k += 256) {
        prefetch_panel(p, q, LOW_SCALES, T);
        const uint8_t *s = q;
        VF d = vf_load_f16(q + 256 - p->lane4 / 2);
        VI sc = vi_zero();
        q += LOW_SCALES;
        for (int b = 0; b < 8; b++, q += Q3K_BLOCK) {
            prefetch_panel(p, q, Q3K_BLOCK, T);
            if (b % 2 == 0)
                sc = vi_load(s + 32 * b);
            size_t col = (size_t)(k + 32 * b);
            VI h = vi_load(q);
            VF sum[MAX_T];
            UNROLL
            for (int t = 0; t < T; t++)
                sum[t] = vf_zero();
            add_3bit(sum, vi_load(q + 64), vi_sll16(h, 2), vf_mul(scale_first(sc), d), p, col, T);
            add_3bit(sum, vi_load(q + 128), vi_srl16(h, 2), vf_mul(scale_second(sc), d), p,
                     col + 16, T);
            sc = vi_srl32(sc, 16);
            add_sums(acc, sum, p, col, T);
        }
    }
}

/* Q4_1, Q5_0 and Q5_1: codes of 4 or 5 bits, plus m (Q5_0: -16 * d) times the sum of the inputs. */
INLINE void pass_offset(const struct pass *p, VF *acc, const int five, const int mins, const int T)
{
    const VI nib = vi_set1_8(15), fifth = vi_set1_8(16);
    const size_t at = p->lane4, bytes = five ? Q5K_BLOCK : 256;
    const uint8_t *q = p->panel, *s = NULL;
    for (int k = 0; k < p->n_in; k += 32, q += bytes, s += 32) {
        if (k % 64 == 0) {
            prefetch_panel(p, q, mins ? 2 * UNIT_SCALES : UNIT_SCALES, T);
            s = q + at / 2;
            q += mins ? 2 * UNIT_SCALES : UNIT_SCALES;
        }
        prefetch_panel(p, q, (int)bytes, T);
        VI dot[MAX_T], high = five ? vi_load(q + at) : vi_zero();
        const uint8_t *nibbles = v_base(q + at + (five ? 64 : 0));
        UNROLL
        for (int t = 0; t < T; t++)
            dot[t] = vi_zero();
        size_t col = (size_t)k;
        COLUMNS
        for (int i = 0; i < 4; i++, col += 8) {
            VI v = vi_load(nibbles + 64 * i);
            VI lo = vi_and(v, nib), hi = vi_high4(v, nib);
            if (five) {
                lo = vi_or_and(lo, vi_sll16(high, 4), fifth);
                hi = vi_or_and(hi, vi_sll16(high, 3), fifth);
                high = vi_srl16(high, 2);
            }
            dot_group(dot, lo, p, col, 2 * i % 4, T);
            dot_group(dot, hi, p, col + 4, 2 * i % 4 + 1, T);
        }
        VF d = vf_load_f16(s);
        VF m = mins ? vf_load_f16(s + UNIT_SCALES) : vf_mul(d, vf_set1(-16.0f));
        add_block(acc, dot, d, p, k / 32, T);
        UNROLL
        for (int t = 0; t < T; t++)
            acc[t] = vf_fma(m, vf_bcast(p->x[t] + p->l.sum + 4 * (size_t)(k / 32)), acc[t]);
    }
}

INLINE void pass_q4_1(const struct pass *p, VF *acc, const int T)
{
    pass_offset(p, acc, 0, 1, T);
}

INLINE void pass_q5_0(const struct pass *p, VF *acc, const int T)
{
    pass_offset(p, acc, 1, 0, T);
}

INLINE void pass_q5_1(const struct pass *p, VF *acc, const int T)
{
    pass_offset(p, acc, 1, 1, T);
}

#include "backend/cpu/gemm_int8_levels.h"

/* Stores n sums of V_LANES rows, from `col` on, to y. Not inlined, since there are many passes. */
static __attribute__((noinline)) void store(const struct gemm_call *c, float (*sum)[V_LANES],
                                            int col, int i0, int n)
{
    int width = c->n_rows - col;
    for (int t = 0; t < n; t++) {
        float *y = c->y + (size_t)(i0 + t) * c->stride + col;
        if (width >= V_LANES) {
            VF v = vf_load(sum[t]);
            vf_store(y, c->bias ? vf_add(v, vf_load(c->bias + col)) : v);
        } else {
            for (int j = 0; j < width; j++)
                y[j] = sum[t][j] + (c->bias ? c->bias[col + j] : 0.0f);
        }
    }
}

/* The records of input rows [i0, i0 + n). For weights with a column order of their own, they are
 * quantised here, in scratch, from permuted floats. */
static void find_records(const struct gemm_call *c, int i0, int n, const uint8_t **x)
{
    int n_in = c->w->n_in;
    size_t bytes = input_layout(n_in).bytes;
    const int32_t *perm = c->seg->perm ? c->seg->perm + (size_t)c->expert * (size_t)n_in : NULL;
    for (int t = 0; t < n; t++) {
        size_t row = (size_t)(c->rows ? c->rows[i0 + t] : i0 + t);
        if (!perm) {
            x[t] = c->x->q + row * bytes;
            continue;
        }
        const float *src = c->x->x + row * (size_t)n_in;
        float *ordered = c->scratch;
        uint8_t *record = (uint8_t *)(ordered + n_in) + (size_t)t * bytes;
        for (int k = 0; k < n_in; k++)
            ordered[k] = src[perm[k]];
        X_QUANTIZE(ordered, n_in, 0, n_in, true, record);
        x[t] = record;
    }
}

/* Passes are compiled for some values of T. Other numbers of rows repeat the last row. */
#if MAX_T == 4
enum { PASS_3 = 4, PASS_6 = 0 };
#define PASSES(X, name) X(name, 1) X(name, 2) X(name, 4)
#elif defined FEW_PASSES
enum { PASS_3 = 4, PASS_6 = 8 };
#define PASSES(X, name) X(name, 1) X(name, 2) X(name, 4) X(name, 8)
#else
enum { PASS_3 = 3, PASS_6 = 6 };
#define PASSES(X, name) X(name, 1) X(name, 2) X(name, 3) X(name, 4) X(name, 6) X(name, 8)
#endif

static inline int pass_rows(int n)
{
    return n <= 2 ? n : n == 3 ? PASS_3 : n == 4 ? 4 : n <= 6 ? PASS_6 : 8;
}

/* Runs all panels of the call, in passes of at most MAX_T input rows, as even as pass_rows allows.
 * passes[T] writes (T) sums of V_LANES to `sum`. */
static void run(const struct gemm_call *c,
                void (*const *passes)(const struct pass *p, float (*sum)[V_LANES]))
{
    const struct gemm_seg *s = c->seg;
    size_t first = (size_t)c->expert * (size_t)s->n_panels + (size_t)(c->row / GEMM_PANEL);
    int n_passes = (c->n + MAX_T - 1) / MAX_T;
    float sum[MAX_T][V_LANES];
    struct pass p = {.n_in = c->w->n_in,
                     .group_len = s->group_len,
                     .prefetch_few = gemm_prefetch_few,
                     .l = input_layout(c->w->n_in)};
    for (int k = 0, i0 = 0, n; i0 < c->n; k++, i0 += n) {
        int left = c->n - i0, T = pass_rows((left + n_passes - k - 1) / (n_passes - k));
        n = T < left ? T : left;
        find_records(c, i0, n, p.x);
        for (int t = n; t < T; t++)
            p.x[t] = p.x[n - 1];
        for (int col = 0; col < c->n_rows; col += V_LANES) {
            p.panel = s->data + (first + (size_t)(col / GEMM_PANEL)) * s->panel_bytes;
            p.lane4 = (size_t)(col % GEMM_PANEL) * 4;
            passes[T](&p, sum);
            store(c, sum, col, i0, n);
        }
    }
}

#define PASS(name, T)                                                                              \
    static void run_##name##_##T(const struct pass *p, float(*sum)[V_LANES])                       \
    {                                                                                              \
        VF acc[MAX_T];                                                                             \
        UNROLL                                                                                     \
        for (int t = 0; t < T; t++)                                                                \
            acc[t] = vf_zero();                                                                    \
        pass_##name(p, acc, T);                                                                    \
        UNROLL                                                                                     \
        for (int t = 0; t < T; t++)                                                                \
            vf_store(sum[t], acc[t]);                                                              \
    }
#define ENTRY(name, T) [T] = run_##name##_##T,
#define KERNEL(name)                                                                               \
    PASSES(PASS, name)                                                                             \
    static void name(const struct gemm_call *c)                                                    \
    {                                                                                              \
        static void (*const passes[])(const struct pass *p,                                        \
                                      float(*sum)[V_LANES]) = {PASSES(ENTRY, name)};               \
        run(c, passes);                                                                            \
    }

KERNEL(q4k)
KERNEL(q5k)
KERNEL(q6k)
KERNEL(q8_0)
KERNEL(q4_0)
KERNEL(iq4nl)
KERNEL(mxfp4)
KERNEL(iq4xs)
KERNEL(gptq4)
KERNEL(q2k)
KERNEL(q3k)
KERNEL(q4_1)
KERNEL(q5_0)
KERNEL(q5_1)
KERNEL(iq3s)
KERNEL(iq3xxs)
KERNEL(iq2)
KERNEL(iq1)
KERNEL(tq)
KERNEL(nvfp4)

void NAME(gemm_int8)(const struct gemm_call *c)
{
    static void (*const by_type[DT_COUNT])(const struct gemm_call *c) = {
        [DT_Q4_K] = q4k,    [DT_Q5_K] = q5k,     [DT_Q6_K] = q6k,    [DT_Q8_0] = q8_0,
        [DT_Q4_0] = q4_0,   [DT_IQ4_NL] = iq4nl, [DT_MXFP4] = mxfp4, [DT_IQ4_XS] = iq4xs,
        [DT_GPTQ4] = gptq4, [DT_Q2_K] = q2k,     [DT_Q3_K] = q3k,    [DT_Q4_1] = q4_1,
        [DT_Q5_0] = q5_0,   [DT_Q5_1] = q5_1,    [DT_IQ3_S] = iq3s,  [DT_IQ3_XXS] = iq3xxs,
        [DT_IQ2_XXS] = iq2, [DT_IQ2_XS] = iq2,   [DT_IQ2_S] = iq2,   [DT_IQ1_S] = iq1,
        [DT_IQ1_M] = iq1,   [DT_TQ1_0] = tq,     [DT_TQ2_0] = tq,    [DT_NVFP4] = nvfp4,
    };
    by_type[c->seg->type](c);
}
