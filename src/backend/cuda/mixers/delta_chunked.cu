/*
 * The recurrence of a gated delta net for prompts on tensor cores, in chunks of 64 rows; heads of
 * 128 x 128. With c_i the sum of log decays up to row i of a chunk and S the state before it:
 *    A_ij = beta_i exp(c_i - c_j) k_i.k_j (j < i),  T = (I + A)^-1
 *    W = T (beta exp(c) K),  U = T (beta V),  V' = U - W S
 *    o_i = exp(c_i) S^T q_i + sum of P_ij V'_j,  P_ij = exp(c_i - c_j) q_i.k_j (j <= i)
 *    S = exp(c_63) S + sum of exp(c_63 - c_j) k_j V'_j^T
 * delta_chunk computes what does not depend on S, for all chunks and heads in parallel. delta_carry
 * walks the chunks of a sequence with columns of S in registers. All exponents are differences <=
 * 0, so nothing overflows. Operands are fp16; accumulators and S are floats. Projections, norms and
 * gates are in delta_net.cu.
 */
#include "backend/cuda/mixers/delta_net.cuh"

enum { CHUNK = 64, CHUNK_THREADS = 128, ROW_DIM = DELTA_DIM * 2, ROW_CHUNK = CHUNK * 2 };
/* A chunk of a k head: q and k, fp16 (64, 128). Below: a chunk of a v head. All matrices are
 * stored in the swizzled layout they have in shared memory; u in accumulator order, (16 columns,
 * two tiles of 8 rows, lane). */
struct key_chunk {
    uint8_t q[CHUNK * ROW_DIM], k[CHUNK * ROW_DIM];
};
struct head_chunk {
    uint8_t w[CHUNK * ROW_DIM], p[CHUNK * ROW_CHUNK]; /* -W (64, 128), P (64, 64) */
    float c[CHUNK];                                   /* in units of log2 */
};
struct head_values {
    uint4 u[DELTA_DIM / 16][4][32];
};
/* Bytes of one chunk slot: all k heads, then all v heads. p.chunks is an array of slots. */
static __host__ __device__ constexpr size_t chunk_bytes(int n_k, int n_v)
{
    return (size_t)n_k * sizeof(struct key_chunk) +
           (size_t)n_v * (sizeof(struct head_chunk) + sizeof(struct head_values));
}
DEVICE struct key_chunk *chunk_keys(const struct delta_args &p, int slot, int kh)
{
    return (struct key_chunk *)(p.chunks + (size_t)slot * chunk_bytes(p.n_k, p.n_v)) + kh;
}
DEVICE struct head_chunk *chunk_head(const struct delta_args &p, int slot, int h)
{
    return (struct head_chunk *)chunk_keys(p, slot, p.n_k) + h;
}
DEVICE struct head_values *chunk_values(const struct delta_args &p, int slot, int h)
{
    return (struct head_values *)chunk_head(p, slot, p.n_v) + h;
}
/* The slot of the first chunk of the launch's i-th sequence. Each sequence may need a partial
 * chunk, hence + i. */
DEVICE int chunk_slot(const struct delta_args &p, int i)
{
    return (p.step.q_start[p.first_seq + i] - p.first_row) / CHUNK + i;
}
DEVICE int chunk_owner(const struct delta_args &p, int seqs, int slot)
{
    int below = 0;
    for (int i = 0; i < seqs; i += 32) {
        int s = i + lane_id();
        below += __popc(__ballot_sync(FULL_WARP, s < seqs && chunk_slot(p, s) <= slot));
    }
    return below - 1;
}

/* A 16-byte unit of a row of fp16. Units are XOR-swizzled by row, so eight rows fall into
 * different banks. */
template <int ROW> DEVICE uint8_t *unit_at(uint8_t *m, int row, int unit)
{
    return m + row * ROW + ((unit ^ (row & 7)) << 4);
}
/* MMA fragments from rows r0.. and units u0.. (8 columns each) of such a matrix. A: matrix rows
 * are fragment rows. B: matrix rows are fragment columns, two n tiles. _trans: the same from a
 * transposed matrix. */
template <int ROW> DEVICE void frag_a(uint32_t (&r)[4], uint8_t *m, int r0, int u0)
{
    ldmatrix4(r, unit_at<ROW>(m, r0 + (lane_id() & 15), u0 + (lane_id() >> 4)));
}
template <int ROW> DEVICE void frag_b(uint32_t (&r)[4], uint8_t *m, int r0, int u0)
{
    int l = lane_id();
    ldmatrix4(r, unit_at<ROW>(m, r0 + (l & 7) + (l >> 4) * 8, u0 + (l >> 3 & 1)));
}
template <int ROW> DEVICE void frag_a_trans(uint32_t (&r)[4], uint8_t *m, int r0, int u0)
{
    int l = lane_id();
    ldmatrix4_trans(r, unit_at<ROW>(m, r0 + (l & 7) + (l >> 4) * 8, u0 + (l >> 3 & 1)));
}
template <int ROW> DEVICE void frag_b_trans(uint32_t (&r)[4], uint8_t *m, int r0, int u0)
{
    ldmatrix4_trans(r, unit_at<ROW>(m, r0 + (lane_id() & 15), u0 + (lane_id() >> 4)));
}

/*
 * Computes what does not depend on S. Grid: (v heads, slots). A warp has 16 rows of A, P and W, and
 * 32 columns of U.
 */
enum { SOLVE_ROW = CHUNK + 1 };
struct chunk_shared {
    uint8_t k[CHUNK * ROW_DIM]; /* later -W */
    uint8_t q[CHUNK * ROW_DIM]; /* later P, then V */
    union {
        float a[CHUNK][SOLVE_ROW];
        struct {
            uint8_t w[CHUNK * ROW_CHUNK], u[CHUNK * ROW_CHUNK]; /* T for W and for U */
        } t;
    };
    float beta[CHUNK], c[CHUNK];
};

/* Loads 64 rows of floats as fp16. Rows from n on become zeros. */
DEVICE void chunk_load(uint8_t *to, const float *from, size_t stride, int n)
{
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < CHUNK * ROW_DIM / 16; i += CHUNK_THREADS) {
        int row = i / (ROW_DIM / 16), unit = i % (ROW_DIM / 16);
        uint4 h = make_uint4(0, 0, 0, 0);
        if (row < n) {
            const float4 *x = (const float4 *)(from + (size_t)row * stride + (size_t)(unit * 8));
            float4 a = x[0], b = x[1];
            h = make_uint4(pack_half2(a.x, a.y), pack_half2(a.z, a.w), pack_half2(b.x, b.y),
                           pack_half2(b.z, b.w));
        }
        *(uint4 *)unit_at<ROW_DIM>(to, row, unit) = h;
    }
}
DEVICE void chunk_copy(void *to, const void *from, int bytes)
{
    for (int i = (int)threadIdx.x; i < bytes / 16; i += CHUNK_THREADS)
        ((uint4 *)to)[i] = ((const uint4 *)from)[i];
}

/* One warp loads beta and computes c by a prefix sum. Lane l has rows 2l and 2l + 1. */
DEVICE void chunk_gates(const struct delta_args &p, struct chunk_shared *sh, int row0, int n, int h)
{
    int r = lane_id() * 2;
    float g[2] = {}, b[2] = {};
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (r + i < n) {
            const float *ba = p.ba + (size_t)(row0 + r + i) * (size_t)(2 * p.n_v) + (size_t)h;
            b[i] = ba[0];
            g[i] = log2f(fmaxf(ba[p.n_v], 1e-37f));
        }
    float sum = g[0] + g[1];
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        float up = __shfl_up_sync(FULL_WARP, sum, d);
        sum += lane_id() >= d ? up : 0.0f;
    }
    sh->c[r] = sum - g[1];
    sh->c[r + 1] = sum;
    sh->beta[r] = b[0];
    sh->beta[r + 1] = b[1];
}

/* Computes A into sh->a and a lane's fragment of P into `p`. Entries above the diagonal are
 * zeros. */
DEVICE void chunk_products(struct chunk_shared *sh, uint32_t (&p)[8][2])
{
    int w = warp_id(), g = lane_id() >> 2, c = lane_id() & 3;
    float kk[8][4] = {}, qk[8][4] = {};
#pragma unroll
    for (int s = 0; s < DELTA_DIM / 16; s++) {
        uint32_t k[4], q[4], b[4];
        frag_a<ROW_DIM>(k, sh->k, 16 * w, 2 * s);
        frag_a<ROW_DIM>(q, sh->q, 16 * w, 2 * s);
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (j <= w) {
                frag_b<ROW_DIM>(b, sh->k, 16 * j, 2 * s);
                mma_f16(kk[2 * j], k, b[0], b[1]);
                mma_f16(kk[2 * j + 1], k, b[2], b[3]);
                mma_f16(qk[2 * j], q, b[0], b[1]);
                mma_f16(qk[2 * j + 1], q, b[2], b[3]);
            }
    }
#pragma unroll
    for (int t = 0; t < 8; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = 16 * w + g + 8 * half, j = 8 * t + 2 * c;
            float a[2], x[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float f = i >= j + e ? fast_exp2(sh->c[i] - sh->c[min(j + e, i)]) : 0.0f;
                x[e] = f * qk[t][2 * half + e];
                a[e] = i > j + e ? sh->beta[i] * f * kk[t][2 * half + e] : 0.0f;
            }
            sh->a[i][j] = a[0];
            sh->a[i][j + 1] = a[1];
            p[t][half] = pack_half2(x[0], x[1]);
        }
}
DEVICE void chunk_put_p(uint8_t *to, const uint32_t (&p)[8][2])
{
    int row = 16 * warp_id() + (lane_id() >> 2);
#pragma unroll
    for (int t = 0; t < 8; t++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            *(uint32_t *)(unit_at<ROW_CHUNK>(to, row + 8 * half, t) + 4 * (lane_id() & 3)) =
                p[t][half];
}

/* sh->a = (I + A)^-1 by blocks of 16. Diagonal blocks are inverted by forward substitution, one
 * warp each. Then, one block row after the other: T_IJ = -T_II (sum over K of A_IK T_KJ). */
DEVICE void chunk_solve(struct chunk_shared *sh)
{
    int d = 16 * warp_id(), lane = lane_id();
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        x[i] = i == (lane & 15) ? 1.0f : 0.0f;
#pragma unroll
        for (int k = 0; k < i; k++)
            x[i] -= sh->a[d + i][d + k] * x[k];
    }
    __syncwarp();
    if (lane < 16)
#pragma unroll
        for (int i = 0; i < 16; i++)
            sh->a[d + i][d + lane] = x[i];
    __syncthreads();
    int r = (int)threadIdx.x >> 3, col = (int)threadIdx.x & 7;
#pragma unroll
    for (int b = 1; b < 4; b++) {
        float y[6] = {}, z[6] = {};
        float *row = sh->a[16 * b + r];
#pragma unroll 4
        for (int k = 0; k < 16 * b; k++)
#pragma unroll
            for (int m = 0; m < 2 * b; m++)
                y[m] += row[k] * sh->a[k][col + 8 * m];
        __syncthreads();
#pragma unroll
        for (int m = 0; m < 2 * b; m++)
            row[col + 8 * m] = y[m];
        __syncthreads();
#pragma unroll 4
        for (int k = 0; k < 16; k++)
#pragma unroll
            for (int m = 0; m < 2 * b; m++)
                z[m] -= row[16 * b + k] * sh->a[16 * b + k][col + 8 * m];
        __syncthreads();
#pragma unroll
        for (int m = 0; m < 2 * b; m++)
            row[col + 8 * m] = z[m];
        __syncthreads();
    }
}

/* Scales the columns of T and stores it as fp16 in its own memory: once for U, once negated for
 * W. */
DEVICE void chunk_scale(struct chunk_shared *sh)
{
    const int PER = CHUNK * 8 / CHUNK_THREADS;
    uint32_t w[PER][4], u[PER][4];
#pragma unroll
    for (int i = 0; i < PER; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int at = (int)threadIdx.x + i * CHUNK_THREADS, j = (at & 7) * 8 + 2 * e;
            float x = sh->a[at >> 3][j] * sh->beta[j];
            float y = sh->a[at >> 3][j + 1] * sh->beta[j + 1];
            u[i][e] = pack_half2(x, y);
            w[i][e] = pack_half2(-x * fast_exp2(sh->c[j]), -y * fast_exp2(sh->c[j + 1]));
        }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int at = (int)threadIdx.x + i * CHUNK_THREADS, row = at >> 3, unit = at & 7;
        *(uint4 *)unit_at<ROW_CHUNK>(sh->t.w, row, unit) =
            make_uint4(w[i][0], w[i][1], w[i][2], w[i][3]);
        *(uint4 *)unit_at<ROW_CHUNK>(sh->t.u, row, unit) =
            make_uint4(u[i][0], u[i][1], u[i][2], u[i][3]);
    }
}

/* U^T. A warp has 32 columns of V, 16 at a time. */
DEVICE void chunk_u(struct chunk_shared *sh, struct head_values *to)
{
#pragma unroll 1
    for (int m = 2 * warp_id(); m < 2 * warp_id() + 2; m++) {
        float u[8][4] = {};
#pragma unroll
        for (int s = 0; s < 4; s++) {
            uint32_t v[4], b[4];
            frag_a_trans<ROW_DIM>(v, sh->q, 16 * s, 2 * m);
#pragma unroll
            for (int i = s; i < 4; i++) {
                frag_b<ROW_CHUNK>(b, sh->t.u, 16 * i, 2 * s);
                mma_f16(u[2 * i], v, b[0], b[1]);
                mma_f16(u[2 * i + 1], v, b[2], b[3]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *a = u[2 * i], *b = u[2 * i + 1];
            to->u[m][i][lane_id()] = make_uint4(pack_half2(a[0], a[1]), pack_half2(a[2], a[3]),
                                                pack_half2(b[0], b[1]), pack_half2(b[2], b[3]));
        }
    }
}

/* -W. A warp has 16 rows. Overwrites k after all warps have read it. */
DEVICE void chunk_w(struct chunk_shared *sh)
{
    int w = warp_id(), g = lane_id() >> 2, c = lane_id() & 3;
    float acc[16][4] = {};
#pragma unroll
    for (int s = 0; s < 4; s++)
        if (s <= w) {
            uint32_t t[4], b[4];
            frag_a<ROW_CHUNK>(t, sh->t.w, 16 * w, 2 * s);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                frag_b_trans<ROW_DIM>(b, sh->k, 16 * s, 2 * j);
                mma_f16(acc[2 * j], t, b[0], b[1]);
                mma_f16(acc[2 * j + 1], t, b[2], b[3]);
            }
        }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < 16; t++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            *(uint32_t *)(unit_at<ROW_DIM>(sh->k, 16 * w + g + 8 * half, t) + 4 * c) =
                pack_half2(acc[t][2 * half], acc[t][2 * half + 1]);
}

static __global__ void __launch_bounds__(CHUNK_THREADS)
    delta_chunk_kernel(const __grid_constant__ struct delta_args p, int seqs)
{
    SHARED_BYTES(shared);
    struct chunk_shared *sh = (struct chunk_shared *)shared;
    dependency_wait();
    dependency_trigger();
    int h = (int)blockIdx.x, slot = (int)blockIdx.y, kh = delta_k_head(p, h);
    int i = chunk_owner(p, seqs, slot), seq = p.first_seq + i;
    int row0 = p.step.q_start[seq] + (slot - chunk_slot(p, i)) * CHUNK;
    int n = min(p.step.q_start[seq + 1] - row0, (int)CHUNK);
    if (n <= 0 || p.step.states[p.step.n_seqs + seq] < 0)
        return;
    size_t stride = (size_t)p.channels, keys = (size_t)(p.n_k * DELTA_DIM);
    const float *u = p.uc + (size_t)row0 * stride;
    chunk_load(sh->k, u + keys + (size_t)(kh * DELTA_DIM), stride, n);
    chunk_load(sh->q, u + kh * DELTA_DIM, stride, n);
    if (warp_id() == 0)
        chunk_gates(p, sh, row0, n, h);
    __syncthreads();
    struct head_chunk *out = chunk_head(p, slot, h);
    uint32_t part[8][2];
    chunk_products(sh, part);
    if (delta_first_of(p, h)) {
        chunk_copy(chunk_keys(p, slot, kh)->q, sh->q, CHUNK * ROW_DIM);
        chunk_copy(chunk_keys(p, slot, kh)->k, sh->k, CHUNK * ROW_DIM);
    }
    __syncthreads(); /* A is complete, and Q has been read */
    chunk_put_p(sh->q, part);
    chunk_solve(sh);
    chunk_copy(out->p, sh->q, CHUNK * ROW_CHUNK);
    chunk_copy(out->c, sh->c, CHUNK * 4);
    __syncthreads();
    chunk_load(sh->q, u + 2 * keys + (size_t)(h * DELTA_DIM), stride, n);
    chunk_scale(sh);
    __syncthreads();
    chunk_u(sh, chunk_values(p, slot, h));
    chunk_w(sh);
    __syncthreads();
    chunk_copy(out->w, sh->k, CHUNK * ROW_DIM);
}

/*
 * Walks the chunks of a sequence. Grid: (blocks of 32 columns of S, v heads, sequences). Two
 * consumer warps have 16 columns each and hold S^T in accumulators, 16 x 128, which are also the A
 * fragments of the products with S. Two producer warps load the next chunk.
 */
enum { CARRY_COLS = 32, CARRY_CONSUMERS = CARRY_COLS / 16, CARRY_WARPS = 4 };
struct carry_stage {
    struct key_chunk keys;
    struct head_chunk head;
    uint4 u[CARRY_CONSUMERS][4][32];
};

DEVICE void carry_produce(const struct delta_args &p, struct carry_stage *to, int slot, int h,
                          int kh)
{
    const int THREADS = (CARRY_WARPS - CARRY_CONSUMERS) * 32;
    const uint8_t *keys = (const uint8_t *)chunk_keys(p, slot, kh);
    const uint8_t *head = (const uint8_t *)chunk_head(p, slot, h);
    int id = (int)threadIdx.x - CARRY_CONSUMERS * 32;
    for (int i = id * 16; i < (int)sizeof to->keys; i += THREADS * 16)
        copy_async16((uint8_t *)&to->keys + i, keys + i);
    for (int i = id * 16; i < (int)sizeof to->head; i += THREADS * 16)
        copy_async16((uint8_t *)&to->head + i, head + i);
    const uint4 *u = chunk_values(p, slot, h)->u[blockIdx.x * CARRY_CONSUMERS][0];
    for (int i = id; i < CARRY_CONSUMERS * 4 * 32; i += THREADS)
        copy_async16(&to->u[0][0][i], u + i);
    copy_async_commit();
}

/* A lane's part of S^T: columns g and g + 8 from `at` on, keys 8t + 2c and 8t + 2c + 1. */
DEVICE void carry_load(const float *at, float (&s)[16][4])
{
    const float *from = at + (lane_id() & 3) * (2 * DELTA_DIM) + (lane_id() >> 2);
#pragma unroll
    for (int t = 0; t < 16; t++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[t][e] = from[(8 * t + (e & 1)) * DELTA_DIM + 8 * (e >> 1)];
}
DEVICE void carry_store(float *at, int t, const float (&s)[4])
{
    float *to = at + (lane_id() & 3) * (2 * DELTA_DIM) + (lane_id() >> 2);
#pragma unroll
    for (int e = 0; e < 4; e++)
        to[(8 * t + (e & 1)) * DELTA_DIM + 8 * (e >> 1)] = s[e];
}

/* Two accumulator tiles as an A fragment. */
DEVICE void carry_frag(uint32_t (&a)[4], const float (&x)[4], const float (&y)[4])
{
    a[0] = pack_half2(x[0], x[1]);
    a[1] = pack_half2(x[2], x[3]);
    a[2] = pack_half2(y[0], y[1]);
    a[3] = pack_half2(y[2], y[3]);
}

/* V'^T with each row decayed to the point where c is `end`. Rows from n on become zeros. */
DEVICE void carry_decayed(uint32_t (&a)[4][4], const float (&v)[8][4], const float *c, float end,
                          int n)
{
    float x[8][4];
#pragma unroll
    for (int t = 0; t < 8; t++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int j = 8 * t + 2 * (lane_id() & 3) + e;
            float f = j < n ? fast_exp2(end - c[j]) : 0.0f;
            x[t][e] = v[t][e] * f;
            x[t][2 + e] = v[t][2 + e] * f;
        }
#pragma unroll
    for (int s = 0; s < 4; s++)
        carry_frag(a[s], x[2 * s], x[2 * s + 1]);
}

/* Stores S^T as of the first n rows of the chunk in a state slot. */
DEVICE void carry_save(struct carry_stage *st, const float (&s)[16][4], const float (&v)[8][4],
                       int n, float *to)
{
    const float *c = st->head.c;
    float shrink = fast_exp2(c[n - 1]);
    uint32_t a[4][4], b[4];
    carry_decayed(a, v, c, c[n - 1], n);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float x[2][4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            x[0][e] = s[2 * j][e] * shrink;
            x[1][e] = s[2 * j + 1][e] * shrink;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            frag_b_trans<ROW_DIM>(b, st->keys.k, 16 * i, 2 * j);
            mma_f16(x[0], a[i], b[0], b[1]);
            mma_f16(x[1], a[i], b[2], b[3]);
        }
        carry_store(to, 2 * j, x[0]);
        carry_store(to, 2 * j + 1, x[1]);
    }
}

/* V'^T = U^T - S^T W^T and o^T = exp(c) S^T Q^T + V'^T P^T, for 16 columns. */
DEVICE void carry_outputs(struct carry_stage *st, const float (&s)[16][4], float (&v)[8][4],
                          float (&o)[8][4])
{
#pragma unroll
    for (int k = 0; k < 8; k++) {
        uint32_t a[4], b[4];
        carry_frag(a, s[2 * k], s[2 * k + 1]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            frag_b<ROW_DIM>(b, st->head.w, 16 * j, 2 * k);
            mma_f16(v[2 * j], a, b[0], b[1]);
            mma_f16(v[2 * j + 1], a, b[2], b[3]);
            frag_b<ROW_DIM>(b, st->keys.q, 16 * j, 2 * k);
            mma_f16(o[2 * j], a, b[0], b[1]);
            mma_f16(o[2 * j + 1], a, b[2], b[3]);
        }
    }
#pragma unroll
    for (int t = 0; t < 8; t++) {
        float2 c = *(const float2 *)&st->head.c[8 * t + 2 * (lane_id() & 3)];
        float x = fast_exp2(c.x), y = fast_exp2(c.y);
        o[t][0] *= x, o[t][1] *= y, o[t][2] *= x, o[t][3] *= y;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t a[4], b[4];
        carry_frag(a, v[2 * k], v[2 * k + 1]);
#pragma unroll
        for (int i = k; i < 4; i++) {
            frag_b<ROW_CHUNK>(b, st->head.p, 16 * i, 2 * k);
            mma_f16(o[2 * i], a, b[0], b[1]);
            mma_f16(o[2 * i + 1], a, b[2], b[3]);
        }
    }
}

/* S^T = exp(c_63) S^T + V'^T K, with V' decayed to the end of the chunk. */
DEVICE void carry_state(struct carry_stage *st, float (&s)[16][4], const float (&v)[8][4])
{
    const float *c = st->head.c;
    float end = c[CHUNK - 1], shrink = fast_exp2(end);
    uint32_t a[4][4], b[4];
    carry_decayed(a, v, c, end, CHUNK);
#pragma unroll
    for (int t = 0; t < 16; t++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[t][e] *= shrink;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
            frag_b_trans<ROW_DIM>(b, st->keys.k, 16 * i, 2 * j);
            mma_f16(s[2 * j], a[i], b[0], b[1]);
            mma_f16(s[2 * j + 1], a[i], b[2], b[3]);
        }
}

static __global__ void __launch_bounds__(CARRY_WARPS * 32)
    delta_carry_kernel(const __grid_constant__ struct delta_args p)
{
    SHARED_BYTES(shared);
    struct carry_stage *stages = (struct carry_stage *)shared;
    int i = (int)blockIdx.z, h = (int)blockIdx.y, kh = delta_k_head(p, h), n = p.step.n_seqs;
    int seq = p.first_seq + i, w = warp_id(), lane = lane_id();
    int in = p.step.states[seq], out = p.step.states[n + seq], save = p.step.states[2 * n + seq];
    int first = p.step.q_start[seq], rows = p.step.q_start[seq + 1] - first;
    int slot = chunk_slot(p, i), m = (int)blockIdx.x * CARRY_CONSUMERS + w,
        col = h * DELTA_DIM + m * 16;
    size_t values = (size_t)(p.n_v * DELTA_DIM);
    float s[16][4] = {};
    bool consumer = w < CARRY_CONSUMERS;
    if (consumer && in >= 0 && out >= 0)
        carry_load(delta_state_of(p, in, h) + m * 16, s);
    dependency_wait();
    dependency_trigger();
    if (out < 0) { /* padding */
        for (int t = 0; consumer && t < rows; t++)
            if (lane < 16)
                p.o[(size_t)(first + t) * values + (size_t)(col + lane)] = 0.0f;
        return;
    }
    if (!consumer)
        carry_produce(p, &stages[0], slot, h, kh);
    for (int at = 0, buffer = 0; at < rows; at += CHUNK, buffer ^= 1, slot++) {
        copy_async_wait<0>();
        __syncthreads(); /* this chunk has arrived; the previous one has been read */
        if (!consumer) {
            if (at + CHUNK < rows)
                carry_produce(p, &stages[buffer ^ 1], slot + 1, h, kh);
            continue;
        }
        struct carry_stage *st = &stages[buffer];
        float v[8][4], o[8][4] = {};
#pragma unroll
        for (int t = 0; t < 8; t++) {
            uint2 u = ((const uint2 *)&st->u[w][t >> 1][lane])[t & 1];
            v[t][0] = half_to_float(u.x & 0xffffu);
            v[t][1] = half_to_float(u.x >> 16);
            v[t][2] = half_to_float(u.y & 0xffffu);
            v[t][3] = half_to_float(u.y >> 16);
        }
        carry_outputs(st, s, v, o);
#pragma unroll
        for (int t = 0; t < 8; t++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int row = at + 8 * t + 2 * (lane & 3) + (e & 1);
                if (row < rows)
                    p.o[(size_t)(first + row) * values +
                        (size_t)(col + (lane >> 2) + 8 * (e >> 1))] = o[t][e];
            }
        if (save > at && save <= at + CHUNK)
            carry_save(st, s, v, save - at,
                       delta_state_of(p, p.step.states[3 * n + seq], h) + m * 16);
        carry_state(st, s, v);
    }
    if (consumer)
#pragma unroll
        for (int t = 0; t < 16; t++)
            carry_store(delta_state_of(p, out, h) + m * 16, t, s[t]);
    if (blockIdx.x == 0)
        delta_conv_state_put_all(p, seq, h);
}

/* Host */

static int chunk_slots(int tokens, int seqs)
{
    return tokens / CHUNK + seqs;
}

size_t delta_chunked_bytes(int n_k, int n_v, int tokens, int seqs)
{
    return (size_t)chunk_slots(tokens, seqs) * chunk_bytes(n_k, n_v);
}

bool delta_chunked_fits(const struct cuda_backend *cu, const struct delta_args &p, int rows,
                        int seqs)
{
    return delta_step_fits(p) && 2 * sizeof(struct carry_stage) <= cu->shared_limit &&
           delta_chunked_bytes(p.n_k, p.n_v, rows, seqs) <= p.chunks_bytes;
}

void delta_chunked(struct cuda_backend *cu, const struct delta_args &p, int rows, int seqs)
{
    delta_conv(cu, p, rows);
    cuda_launch(cu, delta_chunk_kernel, dim3((unsigned)p.n_v, (unsigned)chunk_slots(rows, seqs)),
                CHUNK_THREADS, sizeof(struct chunk_shared), LAUNCH_EARLY, p, seqs);
    cuda_launch(cu, delta_carry_kernel,
                dim3(DELTA_DIM / CARRY_COLS, (unsigned)p.n_v, (unsigned)seqs), CARRY_WARPS * 32,
                2 * sizeof(struct carry_stage), LAUNCH_EARLY, p);
    delta_gate(cu, p, rows);
}
