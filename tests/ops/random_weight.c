#include "random_weight.h"

#include "base/error.h"
#include "base/mem.h"

#include <math.h>
#include <string.h>

uint64_t random_u64(uint64_t *s)
{
    uint64_t z = (*s += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static float uniform(uint64_t *s)
{
    return (float)(random_u64(s) >> 40) * 0x1p-24f;
}

float random_float(uint64_t *s)
{
    float sum = 0;
    for (int i = 0; i < 6; i++)
        sum += uniform(s);
    return (sum - 3.0f) * 1.4142f;
}

static void *block(struct random_weight *w, size_t bytes)
{
    CHECK(w->n_blocks < 64, "too many blocks");
    return w->blocks[w->n_blocks++] = mem_zalloc(1, bytes);
}

static void put_half(uint8_t *p, float v)
{
    uint16_t h = f32_to_f16(v);
    memcpy(p, &h, 2);
}

/* Offsets of the half fields of a block and how large a value of 0.02 wants them. */
static void fix_block(enum dtype t, uint8_t *b, uint64_t *s)
{
    float u = 0.7f + 0.6f * uniform(s);
    switch (t) {
    case DT_Q1_0:
    case DT_Q2_0:
        put_half(b, u * 0.02f);
        break;
    case DT_Q4_0:
    case DT_IQ4_NL:
        put_half(b, u * (t == DT_Q4_0 ? 0.005f : 0.0004f));
        break;
    case DT_Q5_0:
        put_half(b, u * 0.0025f);
        break;
    case DT_Q4_1:
        put_half(b, u * 0.005f);
        put_half(b + 2, -0.035f * u);
        break;
    case DT_Q5_1:
        put_half(b, u * 0.0025f);
        put_half(b + 2, -0.035f * u);
        break;
    case DT_Q8_0:
        put_half(b, u * 0.0003f);
        break;
    case DT_Q2_K:
        put_half(b + 80, u * 0.002f);
        put_half(b + 82, u * 0.002f);
        break;
    case DT_Q3_K:
        put_half(b + 108, u * 0.0006f);
        break;
    case DT_Q4_K:
        put_half(b, u * 1.2e-4f);
        put_half(b + 2, u * 9e-4f);
        break;
    case DT_Q5_K:
        put_half(b, u * 6e-5f);
        put_half(b + 2, u * 9e-4f);
        break;
    case DT_Q6_K:
        put_half(b + 208, u * 2e-5f);
        break;
    case DT_IQ4_XS:
        put_half(b, u * 2e-5f);
        break;
    case DT_IQ3_S:
        put_half(b, u * 2e-4f);
        break;
    case DT_IQ3_XXS:
        put_half(b, u * 2e-4f);
        break;
    case DT_IQ2_XXS:
    case DT_IQ2_XS:
    case DT_IQ2_S:
        put_half(b, u * 3e-4f);
        break;
    case DT_IQ1_S:
        put_half(b, u * 2.5e-3f);
        break;
    case DT_IQ1_M: { /* a nibble of d at the top of each 16 bits of scales */
        uint16_t d = f32_to_f16(u * 2.5e-3f);
        for (int i = 0; i < 4; i++)
            b[49 + 2 * i] = (uint8_t)((b[49 + 2 * i] & 15) | (d >> 4 * i & 15) << 4);
        break;
    }
    case DT_TQ1_0:
        put_half(b + 52, u * 0.02f);
        break;
    case DT_TQ2_0:
        for (int i = 0; i < 64; i++)
            b[i] &= (uint8_t) ~(b[i] >> 1 & 0x55); /* 3 is no digit */
        put_half(b + 64, u * 0.02f);
        break;
    case DT_NVFP4:
        for (int i = 0; i < 4; i++)
            b[i] = (uint8_t)(4 + random_u64(s) % 8);
        break;
    case DT_NF4:
    case DT_FP4: {
        float d = u * 0.04f;
        memcpy(b, &d, 4);
        break;
    }
    case DT_MXFP4:
        b[0] = (uint8_t)(118 + random_u64(s) % 4);
        break;
    default:
        break;
    }
}

static void fill_rows(enum dtype t, uint8_t *p, size_t values, uint64_t *s)
{
    size_t len = (size_t)dtype_table[t].block_len, bytes = (size_t)dtype_table[t].block_bytes;
    for (size_t i = 0; i < values / len; i++, p += bytes) {
        if (t == DT_F32) {
            float v = 0.02f * random_float(s);
            memcpy(p, &v, 4);
        } else if (t == DT_F16) {
            put_half(p, 0.02f * random_float(s));
        } else if (t == DT_BF16) {
            uint16_t h = f32_to_bf16(0.02f * random_float(s));
            memcpy(p, &h, 2);
        } else if (t == DT_F8_E4M3) {
            do
                *p = (uint8_t)random_u64(s);
            while ((*p & 0x7f) > 0x50);
        } else {
            for (size_t j = 0; j < bytes; j += 8) {
                uint64_t r = random_u64(s);
                memcpy(p + j, &r, bytes - j < 8 ? bytes - j : 8);
            }
            fix_block(t, p, s);
        }
    }
}

static int ceil_to(int a, int b)
{
    return (a + b - 1) / b;
}

void random_weight_make(struct random_weight *w, const struct random_spec *sp, uint64_t *s)
{
    memset(w, 0, sizeof *w);
    w->raw = (struct raw_weight){
        .n_in = sp->n_in, .n_expert = sp->n_expert, .n_seg = sp->n_seg, .transient = true};
    size_t n_in = (size_t)sp->n_in, experts = (size_t)sp->n_expert;
    for (int i = 0; i < sp->n_seg; i++) {
        struct raw_seg *g = &w->raw.seg[i];
        size_t rows = (size_t)sp->rows[i], real = sp->same_experts ? 1 : experts;
        *g = (struct raw_seg){.type = sp->type[i], .rows = sp->rows[i]};
        w->raw.n_out += sp->rows[i];
        size_t bytes = dtype_bytes(g->type, n_in * rows);
        uint8_t *data = block(w, bytes * real);
        const uint8_t **table = block(w, experts * sizeof *table);
        fill_rows(g->type, data, n_in * rows * real, s);
        size_t alike = sp->alike ? dtype_bytes(g->type, n_in * (size_t)sp->alike) : bytes * real;
        for (size_t at = alike; at < bytes * real; at++)
            data[at] = data[at - alike];
        if (sp->nudge > 0)
            for (size_t k = n_in * (size_t)sp->alike; k < n_in * rows; k++)
                ((float *)data)[k] *= 1.0f + sp->nudge * (float)(k / (n_in * (size_t)sp->alike));
        if (sp->bad)
            memset(data + (size_t)(sp->bad - 1) * bytes, 0xff, bytes);
        for (size_t e = 0; e < experts; e++)
            table[e] = data + (sp->same_experts ? 0 : e * bytes);
        g->data = table;
        if (g->type == DT_F8_E4M3) {
            size_t n = rows * (size_t)ceil_to(sp->n_in, 128);
            float *scale = block(w, experts * n * sizeof *scale);
            const void **st = block(w, experts * sizeof *st);
            for (size_t j = 0; j < experts * n; j++)
                scale[j] = 0.01f * (0.5f + uniform(s));
            for (size_t e = 0; e < experts; e++)
                st[e] = scale + e * n;
            g->scale = st;
        }
        if (g->type == DT_NVFP4) {
            float *scale = block(w, experts * sizeof *scale);
            const void **st = block(w, experts * sizeof *st);
            for (size_t e = 0; e < experts; e++) {
                scale[e] = 0.5f + uniform(s);
                st[e] = &scale[e];
            }
            g->scale = st;
        }
        if (g->type == DT_GPTQ4) {
            g->group_len = sp->group_len;
            size_t n = rows * (size_t)ceil_to(sp->n_in, sp->group_len);
            uint16_t *scale = block(w, experts * n * sizeof *scale);
            uint8_t *zero = block(w, experts * n);
            const void **st = block(w, experts * sizeof *st);
            const uint8_t **zt = block(w, experts * sizeof *zt);
            for (size_t j = 0; j < experts * n; j++) {
                scale[j] = f32_to_f16(0.004f * (0.5f + uniform(s)));
                zero[j] = (uint8_t)(random_u64(s) % 17);
            }
            for (size_t e = 0; e < experts; e++) {
                st[e] = scale + e * n;
                zt[e] = zero + e * n;
            }
            g->scale = st;
            g->zero = zt;
            if (sp->act_order) {
                int32_t *perm = block(w, experts * n_in * sizeof *perm);
                const int32_t **pt = block(w, experts * sizeof *pt);
                for (size_t e = 0; e < experts; e++) {
                    pt[e] = perm + e * n_in;
                    for (size_t j = 0; j < n_in; j++)
                        perm[e * n_in + j] = (int32_t)j;
                    for (size_t j = n_in; j > 1; j--) {
                        size_t o = random_u64(s) % j;
                        int32_t t = perm[e * n_in + j - 1];
                        perm[e * n_in + j - 1] = perm[e * n_in + o];
                        perm[e * n_in + o] = t;
                    }
                }
                g->perm = pt;
            }
        }
    }
    if (sp->bias) {
        int n = w->raw.n_expert * w->raw.n_out;
        float *bias = block(w, (size_t)n * sizeof *bias);
        for (int i = 0; i < n; i++)
            bias[i] = i == sp->low - 1 ? -1e4f : 0.1f * random_float(s);
        w->raw.bias = bias;
    }
}

void random_weight_free(struct random_weight *w)
{
    for (int i = 0; i < w->n_blocks; i++)
        mem_free(w->blocks[i]);
    memset(w, 0, sizeof *w);
}
