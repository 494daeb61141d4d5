/*
 * A panel of a recurrent state, as gated delta nets and state-space models update it. Included by their kernels after
 * vec.h, once per instruction set.
 */
#ifndef STEEL_BACKEND_CPU_STATE_PANEL_H
#define STEEL_BACKEND_CPU_STATE_PANEL_H

#include "backend/cpu/vec.h"

/* Columns of a head's state that are stored and computed together; independent chains of sums over its rows. */
enum { STATE_PANEL = 16, VECS = STATE_PANEL / VW, CHAINS = 4 };

/* to (n, STATE_PANEL) = decay * from + k in^T; sum = to^T q. from NULL = zeros; it may be `to`. */
INLINE void update_panel(const float *from, float *to, const float *k, const float *q,
                         const VEC in[VECS], float decay, int n, VEC sum[VECS])
{
    VEC acc[CHAINS][VECS];
    UNROLL
    for (int c = 0; c < CHAINS; c++)
        UNROLL
    for (int j = 0; j < VECS; j++)
        acc[c][j] = vec_set(0.0f);
    int i = 0;
    for (; i + CHAINS <= n; i += CHAINS) {
        UNROLL
        for (int c = 0; c < CHAINS; c++)
            UNROLL
        for (int j = 0; j < VECS; j++) {
            VEC s = vec_mul(vec_set(k[i + c]), in[j]);
            if (from)
                s = vec_fma(vec_load(from + (i + c) * STATE_PANEL + j * VW), vec_set(decay), s);
            vec_store(to + (i + c) * STATE_PANEL + j * VW, s);
            acc[c][j] = vec_fma(s, vec_set(q[i + c]), acc[c][j]);
        }
    }
    for (; i < n; i++) {
        UNROLL
        for (int j = 0; j < VECS; j++) {
            VEC s = vec_mul(vec_set(k[i]), in[j]);
            if (from)
                s = vec_fma(vec_load(from + i * STATE_PANEL + j * VW), vec_set(decay), s);
            vec_store(to + i * STATE_PANEL + j * VW, s);
            acc[0][j] = vec_fma(s, vec_set(q[i]), acc[0][j]);
        }
    }
    UNROLL
    for (int j = 0; j < VECS; j++)
        sum[j] = vec_add(vec_add(acc[0][j], acc[1][j]), vec_add(acc[2][j], acc[3][j]));
}

#endif
