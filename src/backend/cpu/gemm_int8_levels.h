/*
 * Passes over panels whose codes index a table of levels (IQ1 IQ2 IQ3 TQ NVFP4): part of
 * gemm_int8_kernel.h, which includes this after its helpers. One register lookup turns a code into its
 * level + 64. The initial value of a dot product subtracts the 64.
 */

/* 2n + 1, for the nibble n at the bottom of each lane */
INLINE VF odd_scale(VI nibbles)
{
    return vi_to_f(vi_or_and(vi_set1_32(1), vi_sll32(nibbles, 1), vi_set1_32(30)));
}

/* dot[t] = 32 columns of 4-bit codes */
INLINE void dot_levels32(VI *dot, const uint8_t *q, VI lut, const struct pass *p, size_t col,
                         const int T)
{
    const VI nib = vi_set1_8(15);
    UNROLL
    for (int t = 0; t < T; t++) /* init32: -128 times the sum of the inputs */
        dot[t] = vi_sra32(vi_bcast(p->x[t] + p->l.init32 + col / 8), 1);
    COLUMNS
    for (int i = 0; i < 4; i++, col += 8) {
        VI v = vi_load(q + 64 * i);
        dot_group(dot, vi_lookup(lut, vi_and(v, nib)), p, col, 2 * i % 4, T);
        dot_group(dot, vi_lookup(lut, vi_high4(v, nib)), p, col + 4, 2 * i % 4 + 1, T);
    }
}

INLINE void pass_iq3(const struct pass *p, VF *acc, const uint8_t *levels, const float factor,
                     const int T)
{
    const size_t at = p->lane4;
    VI lut = vi_levels(levels);
    const uint8_t *s = p->panel, *q = s + IQ3_SCALES + at;
    for (int k = 0; k < p->n_in; k += 256, s = q - at, q += IQ3_SCALES) {
        prefetch_panel(p, s, IQ3_SCALES, T);
        VI sc = vi_load(s + at);
        VF d = vf_mul(vf_load_f16(s + 64 + at / 2), vf_set1(factor));
        for (int b = 0; b < 8; b++, q += 256) {
            VI dot[MAX_T];
            prefetch_panel(p, q, 256, T);
            dot_levels32(dot, q, lut, p, (size_t)(k + 32 * b), T);
            add_block(acc, dot, vf_mul(odd_scale(sc), d), p, k / 32 + b, T);
            sc = vi_srl32(sc, 4);
        }
    }
}

INLINE void pass_iq3s(const struct pass *p, VF *acc, const int T)
{
    pass_iq3(p, acc, levels_iq3s, 1.0f, T);
}

INLINE void pass_iq3xxs(const struct pass *p, VF *acc, const int T)
{
    pass_iq3(p, acc, levels_iq3xxs, 0.25f, T);
}

/* sum[t] += scale * 16 columns of levels, four columns per vector */
INLINE void add_levels(VF *sum, VI u0, VI u1, VI u2, VI u3, VF scale, const struct pass *p,
                       size_t col, const int T)
{
    VI dot[MAX_T];
    UNROLL
    for (int t = 0; t < T; t++) /* init16: -32 times the sum of the inputs */
        dot[t] = vi_sll32(vi_bcast(p->x[t] + p->l.init16 + col / 4), 1);
    dot_group(dot, u0, p, col, 0, T);
    dot_group(dot, u1, p, col + 4, 1, T);
    dot_group(dot, u2, p, col + 8, 2, T);
    dot_group(dot, u3, p, col + 12, 3, T);
    UNROLL
    for (int t = 0; t < T; t++)
        sum[t] = vf_fma(vi_to_f(dot[t]), scale, sum[t]);
}

/* 16 columns of 3-bit codes: low two bits in v, the third in bit 2 of the bytes of h0-h3, one
 * vector per group */
INLINE void add_3bit_levels(VF *sum, VI v, VI h0, VI h1, VI h2, VI h3, VI lut, VF scale,
                            const struct pass *p, size_t col, const int T)
{
    const VI two = vi_set1_8(3), third = vi_set1_8(4);
    add_levels(sum, vi_lookup(lut, vi_or_and(vi_and(v, two), h0, third)),
               vi_lookup(lut, vi_or_and(vi_and(vi_srl16(v, 2), two), h1, third)),
               vi_lookup(lut, vi_or_and(vi_and(vi_srl16(v, 4), two), h2, third)),
               vi_lookup(lut, vi_or_and(vi_and(vi_srl16(v, 6), two), h3, third)), scale, p, col, T);
}

/* IQ2 (one = 0) stores third bits with the codes; IQ1 stores one per 8 columns, with the scales. */
INLINE void pass_iq12(const struct pass *p, VF *acc, const int one, const int T)
{
    const int scales = one ? IQ1_SCALES : IQ2_SCALES, bytes = one ? Q2K_BLOCK : Q3K_BLOCK;
    const size_t at = p->lane4;
    VI lut = vi_levels(one ? levels_iq1 : levels_iq2);
    const uint8_t *s = p->panel, *q = s + scales + at;
    for (int k = 0; k < p->n_in; k += 256, s = q - at, q += scales) {
        prefetch_panel(p, s, scales, T);
        VF d = vf_mul(vf_load_f16(s + 128 + at / 2), vf_set1(0.125f));
        VI sc = vi_zero(), down = one ? vi_load(s + 192 + at) : vi_zero();
        for (int b = 0; b < 8; b++, q += bytes) {
            prefetch_panel(p, q, bytes, T);
            if (b % 4 == 0)
                sc = vi_load(s + 16 * b + at);
            VF s0 = vf_mul(odd_scale(sc), d), s1 = vf_mul(odd_scale(vi_srl32(sc, 4)), d);
            size_t col = (size_t)(k + 32 * b);
            VF sum[MAX_T];
            UNROLL
            for (int t = 0; t < T; t++)
                sum[t] = vf_zero();
            if (one) {
                VI m0 = vi_sra32(vi_sll32(down, 31), 31), m1 = vi_sra32(vi_sll32(down, 30), 31);
                VI m2 = vi_sra32(vi_sll32(down, 29), 31), m3 = vi_sra32(vi_sll32(down, 28), 31);
                add_3bit_levels(sum, vi_load(q), m0, m0, m1, m1, lut, s0, p, col, T);
                add_3bit_levels(sum, vi_load(q + 64), m2, m2, m3, m3, lut, s1, p, col + 16, T);
                down = vi_srl32(down, 4);
            } else {
                VI h = vi_load(q);
                add_3bit_levels(sum, vi_load(q + 64), vi_sll16(h, 2), vi_sll16(h, 1), h,
                                vi_srl16(h, 1), lut, s0, p, col, T);
                add_3bit_levels(sum, vi_load(q + 128), vi_srl16(h, 2), vi_srl16(h, 3),
                                vi_srl16(h, 4), vi_srl16(h, 5), lut, s1, p, col + 16, T);
            }
            sc = vi_srl32(sc, 8);
            add_sums(acc, sum, p, col, T);
        }
    }
}

INLINE void pass_iq2(const struct pass *p, VF *acc, const int T)
{
    pass_iq12(p, acc, 0, T);
}

INLINE void pass_iq1(const struct pass *p, VF *acc, const int T)
{
    pass_iq12(p, acc, 1, T);
}

INLINE void pass_tq(const struct pass *p, VF *acc, const int T)
{
    const size_t at = p->lane4;
    const uint8_t *s = p->panel, *q = s + UNIT_SCALES + at;
    for (int k = 0; k < p->n_in; k += 256, s = q - at, q += UNIT_SCALES) {
        prefetch_panel(p, s, UNIT_SCALES, T);
        VF d = vf_load_f16(s + at / 2);
        for (int b = 0; b < 8; b++, q += Q2K_BLOCK) {
            size_t col = (size_t)(k + 32 * b);
            VI dot[MAX_T];
            prefetch_panel(p, q, Q2K_BLOCK, T);
            UNROLL
            for (int t = 0; t < T; t++) /* codes are values + 1 */
                dot[t] = vi_sra32(vi_bcast(p->x[t] + p->l.init32 + col / 8), 7);
            dot_2bit(dot, vi_load(q), p, col, T);
            dot_2bit(dot, vi_load(q + 64), p, col + 16, T);
            add_block(acc, dot, d, p, k / 32 + b, T);
        }
    }
}

/* add_levels for inputs with a fine part. */
INLINE void add_levels_fine(VF *sum, const VI *u, VF scale, const struct pass *p, size_t col,
                            const int T)
{
    const VF unit = vf_set1(FINE_UNIT);
    VI dot[MAX_T], fine[MAX_T];
    UNROLL
    for (int t = 0; t < T; t++) {
        dot[t] = vi_sll32(vi_bcast(p->x[t] + p->l.init16 + col / 4), 1);
        fine[t] = vi_sll32(vi_bcast(p->x[t] + p->l.fine_init16 + col / 4), 1);
    }
    UNROLL
    for (int i = 0; i < 4; i++) {
        dot_group(dot, u[i], p, col + 4 * (size_t)i, i, T);
        dot_group(fine, u[i], p, p->l.fine + col + 4 * (size_t)i, i, T);
    }
    UNROLL
    for (int t = 0; t < T; t++)
        sum[t] = vf_fma(vf_fma(vi_to_f(fine[t]), unit, vi_to_f(dot[t])), scale, sum[t]);
}

/* Two dot products, as for MXFP4. */
INLINE void pass_nvfp4(const struct pass *p, VF *acc, const int T)
{
    const VI nib = vi_set1_8(15);
    const VF unit =
        vf_set1(0x1p119f); /* half of the factor that converts E4M3's exponent to a float's */
    const size_t at = p->lane4;
    VI lut = vi_levels(levels_fp4);
    const uint8_t *s = p->panel + NVFP4_HEAD, *q = s + UNIT_SCALES + at;
    for (int k = 0; k < p->n_in; k += 64, s = q - at, q += UNIT_SCALES) {
        prefetch_panel(p, s, UNIT_SCALES, T);
        for (int b = 0; b < 2; b++, q += 256) {
            size_t col = (size_t)(k + 32 * b);
            VF sum[MAX_T];
            prefetch_panel(p, q, 256, T);
            UNROLL
            for (int t = 0; t < T; t++)
                sum[t] = vf_zero();
            for (int i = 0; i < 2; i++) {
                VI bits = vi_sll32(vi_load_u8(s + 32 * b + 16 * i + at / 4), 20);
                VI v = vi_load(q + 128 * i), w = vi_load(q + 128 * i + 64);
                VI u[] = {vi_lookup(lut, vi_and(v, nib)), vi_lookup(lut, vi_high4(v, nib)),
                          vi_lookup(lut, vi_and(w, nib)), vi_lookup(lut, vi_high4(w, nib))};
                add_levels_fine(sum, u, vf_mul(vf_from_bits(bits), unit), p, col + 16 * (size_t)i,
                                T);
            }
            add_sums(acc, sum, p, col, T);
        }
    }
    VF scale = vf_load((const float *)(p->panel + at)); /* the tensor's scale */
    UNROLL
    for (int t = 0; t < T; t++)
        acc[t] = vf_mul(acc[t], scale);
}
