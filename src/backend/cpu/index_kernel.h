/*
 * Kernels of indexers over vec.h, compiled per instruction set by index.c (plain C), index_avx2.c, index_avx512.c and
 * index_neon.c. The includer defines KERNELS. A lane has one head, so that a key's components are broadcast and its dot
 * products with all heads need no horizontal sums. Four keys share each load of the queries. A key's score depends on
 * nothing but its row and the query.
 */
#include "backend/cpu/index.h"
#include "backend/cpu/vec.h"
#include "quant/kvblock.h"

enum { IVECS = INDEX_LANES / VW, IKEYS = 4 };

static void load_key(enum dtype type, const void *from, int dim, float *to)
{
    int i = 0;
    if (type == DT_F16)
        for (; i + VW <= dim; i += VW)
            vec_store(to + i, vec_load_f16((const uint16_t *)from + i));
    else if (type == DT_BF16)
        for (; i + VW <= dim; i += VW)
            vec_store(to + i, vec_load_bf16((const uint16_t *)from + i));
    if (i < dim && !kv_quantised(type))
        quant_dequantize(type, (const char *)from + dtype_bytes(type, (size_t)i), to + i,
                         (size_t)(dim - i));
    else if (i < dim)
        kv_row_get(type, from, dim, to);
}

/* dots[k][j]: of key k with INDEX_LANES heads, from lane h on */
INLINE void dot_keys(const float *q, int heads, int dim, const float *rows, VEC dots[IKEYS][IVECS])
{
    UNROLL
    for (int k = 0; k < IKEYS; k++)
        UNROLL
    for (int j = 0; j < IVECS; j++)
        dots[k][j] = vec_set(0.0f);
    for (int d = 0; d < dim; d++) {
        VEC in[IVECS];
        UNROLL
        for (int j = 0; j < IVECS; j++)
            in[j] = vec_load(q + (size_t)d * (size_t)heads + (size_t)(j * VW));
        UNROLL
        for (int k = 0; k < IKEYS; k++) {
            VEC x = vec_set(rows[(size_t)k * (size_t)dim + (size_t)d]);
            UNROLL
            for (int j = 0; j < IVECS; j++)
                dots[k][j] = vec_fma(x, in[j], dots[k][j]);
        }
    }
}

/* Loads keys i.. as floats; rows past n repeat the last one. */
static void load_keys(enum dtype type, const void *(*row)(void *, int), void *arg, int i, int n,
                      int dim, float *rows)
{
    for (int k = 0; k < IKEYS; k++)
        load_key(type, row(arg, i + k < n ? i + k : n - 1), dim, rows + (size_t)k * (size_t)dim);
}

static void keys(const float *q, const float *w, int heads, int dim, enum dtype type,
                 const void *(*row)(void *, int), void *arg, int n, float *rows, float *out)
{
    for (int i = 0; i < n; i += IKEYS) {
        float sum[IKEYS] = {0};
        load_keys(type, row, arg, i, n, dim, rows);
        for (int h = 0; h < heads; h += INDEX_LANES) {
            VEC dots[IKEYS][IVECS];
            dot_keys(q + h, heads, dim, rows, dots);
            for (int k = 0; k < IKEYS; k++)
                for (int j = 0; j < IVECS; j++)
                    sum[k] += vec_sum(
                        vec_mul(vec_load(w + h + j * VW), vec_max(dots[k][j], vec_set(0.0f))));
        }
        for (int k = 0; k < IKEYS && i + k < n; k++)
            out[i + k] = sum[k];
    }
}

static void block(const float *q, int heads, int dim, enum dtype type,
                  const void *(*row)(void *, int), void *arg, int n, float *rows, float *best)
{
    for (int i = 0; i < n; i += IKEYS) {
        load_keys(type, row, arg, i, n, dim, rows);
        for (int h = 0; h < heads; h += INDEX_LANES) {
            VEC dots[IKEYS][IVECS];
            dot_keys(q + h, heads, dim, rows, dots);
            for (int j = 0; j < IVECS; j++) {
                VEC top = vec_load(best + h + j * VW);
                for (int k = 0; k < IKEYS; k++)
                    top = vec_max(top, dots[k][j]);
                vec_store(best + h + j * VW, top);
            }
        }
    }
}

const struct index_kernels KERNELS = {.keys = keys, .block = block};
