/*
 * Attention of M = 16 MT queries over tiles of 64 keys in shared memory whose first 512 values are also the values, with
 * mma.sync: for latents (latent_attn.cu) and for lists of keys (list_attn.cu). ROW: bytes of a key.
 */
#ifndef STEEL_BACKEND_CUDA_LATENT_MMA_CUH
#define STEEL_BACKEND_CUDA_LATENT_MMA_CUH

#include "backend/cuda/attn/attn.cuh"
#include "backend/cuda/mixers/latent.cuh"

#include <math.h>

enum { LAT_KEYS = LATENT_KEYS, LAT_WARPS = 8, LAT_MAX_MT = 4 };

/* Shared memory: queries, probabilities, per-row data, one or two tiles of keys. */
template <int MT, int ROW> struct latent_shared {
    enum { M = 16 * MT, GROUPS = LAT_WARPS / MT, TILE = LAT_KEYS * ROW };
    uint8_t q[M * ROW], p[M * LAT_KEYS * 2];
    float most[GROUPS][M], shrink[M];
    int pos[M], token[M], head[M]; /* pos -1: a padding row; token -1: no query */
    uint8_t keys[TILE];            /* a second tile may follow */
};

/* The ldmatrix address of this lane for an A fragment of 16 rows: rows 0-7 k 0-7, rows 8-15 k
 * 0-7, then k 8-15. */
DEVICE const uint8_t *latent_a_at(const uint8_t *base, int row_bytes, int row0, int piece)
{
    int r = row0 + (lane_id() & 15);
    return base + r * row_bytes + (((piece + (lane_id() >> 4)) ^ (r & 7)) << 4);
}

/* s = Q K^T: m tile mt, 8 MT keys from key0 on. */
template <int MT, bool BF16, int ROW>
DEVICE void latent_scores(const uint8_t *q, const uint8_t *keys, int mt, int key0,
                          float (&s)[MT][4])
{
    const int CHAINS = MT == 1 ? 4 : 2; /* independent accumulator chains */
    int lane = lane_id();
    float sum[CHAINS][MT][4] = {};
#pragma unroll 6
    for (int i = 0; i < ROW / 64; i++) {
        uint32_t a[2][4], b[2][MT][2];
#pragma unroll
        for (int k = 0; k < 2; k++)
            ldmatrix4(a[k], latent_a_at(q, ROW, mt * 16, 4 * i + 2 * k));
        if constexpr (MT == 1) {
            uint32_t r[4];
            int key = key0 + (lane & 7), piece = 4 * i + (lane >> 3);
            ldmatrix4(r, keys + key * ROW + ((piece ^ (key & 7)) << 4));
            b[0][0][0] = r[0], b[0][0][1] = r[1], b[1][0][0] = r[2], b[1][0][1] = r[3];
        } else {
#pragma unroll
            for (int k = 0; k < 2; k++)
#pragma unroll
                for (int j = 0; j < MT; j += 2) {
                    uint32_t r[4];
                    int key = key0 + j * 8 + (lane >> 4) * 8 + (lane & 7);
                    int piece = 4 * i + 2 * k + (lane >> 3 & 1);
                    ldmatrix4(r, keys + key * ROW + ((piece ^ (key & 7)) << 4));
                    b[k][j][0] = r[0], b[k][j][1] = r[1];
                    b[k][j + 1][0] = r[2], b[k][j + 1][1] = r[3];
                }
        }
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int j = 0; j < MT; j++)
                mma_kv<BF16>(sum[(2 * i + k) % CHAINS][j], a[k], b[k][j][0], b[k][j][1]);
    }
#pragma unroll
    for (int j = 0; j < MT; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            s[j][e] = sum[0][j][e] + sum[1][j][e];
            if constexpr (MT == 1)
                s[j][e] += sum[2][j][e] + sum[3][j][e];
        }
}

/* out += P V: all rows, 64 columns from col0 on. */
template <int MT, bool BF16, int ROW>
DEVICE void latent_gather(const uint8_t *weights, const uint8_t *keys, int col0,
                          float (&out)[MT][8][4])
{
    int lane = lane_id();
#pragma unroll
    for (int i = 0; i < LAT_KEYS / 16; i++) {
        uint32_t a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
            ldmatrix4(a[m], latent_a_at(weights, LAT_KEYS * 2, m * 16, 2 * i));
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t b[4];
            int key = i * 16 + (lane & 15), piece = col0 / 8 + j * 2 + (lane >> 4);
            ldmatrix4_trans(b, keys + key * ROW + ((piece ^ (key & 7)) << 4));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma_kv<BF16>(out[m][2 * j], a[m], b[0], b[1]);
                mma_kv<BF16>(out[m][2 * j + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/* Scores of rows g, g + 8 of m tile mt become probabilities in shared memory; updates top and
 * total. The warps that share the rows exchange their maxima first. */
template <int MT, bool BF16, int ROW>
DEVICE void latent_softmax(struct latent_shared<MT, ROW> *sh, int mt, int group, int base, int last,
                           float (&s)[MT][4], float (&top)[2], float (&total)[2])
{
    int lane = lane_id(), g = lane >> 2, c = lane & 3, key0 = group * 8 * MT;
    int pos[2] = {min(sh->pos[mt * 16 + g], last), min(sh->pos[mt * 16 + g + 8], last)};
    float m[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < MT; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (base + key0 + j * 8 + 2 * c + (i & 1) > pos[i >> 1])
                s[j][i] = -INFINITY;
            m[i >> 1] = fmaxf(m[i >> 1], s[j][i]);
        }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        m[r] = fmaxf(m[r], __shfl_xor_sync(FULL_WARP, m[r], 1));
        m[r] = fmaxf(m[r], __shfl_xor_sync(FULL_WARP, m[r], 2));
        if (c == 0)
            sh->most[group][mt * 16 + g + 8 * r] = m[r];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = mt * 16 + g + 8 * r;
        float most = top[r];
#pragma unroll
        for (int i = 0; i < (latent_shared<MT, ROW>::GROUPS); i++)
            most = fmaxf(most, sh->most[i][row]);
        float anchor = most == -INFINITY ? 0.0f : most, shrink = fast_exp2(top[r] - anchor);
        if (group == 0 && c == 0)
            sh->shrink[row] = shrink;
        top[r] = most;
        total[r] *= shrink;
#pragma unroll
        for (int j = 0; j < MT; j++) {
            float a = fast_exp2(s[j][2 * r] - anchor), b = fast_exp2(s[j][2 * r + 1] - anchor);
            int key = key0 + j * 8 + 2 * c;
            total[r] += a + b;
            *(uint32_t *)(sh->p + row * (LAT_KEYS * 2) + (((key >> 3) ^ (row & 7)) << 4) +
                          (key & 7) * 2) = pack_kv<BF16>(a, b);
        }
    }
    __syncthreads();
}

#endif
