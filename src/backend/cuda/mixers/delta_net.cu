/*
 * The gated delta net between its projections. For each v head, with state S (Dk, Dv), decay g_t
 * and gate beta_t:
 *    S <- g_t S,  S <- S + k_t beta_t (v_t - S^T k_t)^T,  o_t = S^T q_t
 * Decodes are one kernel (delta_step) that reads and writes each state once; reading and writing it
 * is their limit. Prompts take several kernels: convolution, norms and gates per row (delta_conv);
 * the recurrence, by chunks of rows on tensor cores (delta_chunked.cu), or row by row with columns
 * of S in registers over all rows of a sequence (delta_scan; delta_any for other head sizes);
 * output norm and gate (delta_gate). Rows of a sequence are processed in order, so decodes, prompts
 * and mixed steps differ only in the number of rows.
 *
 * Owns the scratch of these layers and the layout of a state (delta_net.cuh).
 */
#include "backend/cuda/mixers/delta_net.cuh"
#include "backend/cuda/mixers/mixers.h"

extern "C" {
#include "base/mem.h"
}

#include <math.h>

/* One warp: `dim` channels from c on of row t after convolution and silu. Lane l holds channels
 * l, l + 32, .. Returns the sum of their squares. */
DEVICE float delta_convolve(const struct delta_args &p, int t, int first, const float *old, int c,
                            int dim, float (&y)[DELTA_MAX_DIM / 32])
{
    float squares = 0.0f;
    int past = p.taps - 1;
#pragma unroll
    for (int i = 0; i < DELTA_MAX_DIM / 32; i++) {
        int at = lane_id() + 32 * i;
        float sum = 0.0f;
        if (at < dim) {
            const float *taps = p.conv + (size_t)(c + at) * (size_t)p.taps;
            for (int k = 0; k < p.taps; k++) {
                int row = t - past + k;
                float x =
                    row >= first ? p.u[(size_t)row * (size_t)p.channels + (size_t)(c + at)]
                    : old
                        ? old[(size_t)(row - first + past) * (size_t)p.channels + (size_t)(c + at)]
                        : 0.0f;
                sum += taps[k] * x;
            }
        }
        y[i] = sum * delta_sigmoid(sum);
        squares += y[i] * y[i];
    }
    return warp_sum(squares);
}

DEVICE void delta_put(float *to, int dim, const float (&y)[DELTA_MAX_DIM / 32], float scale)
{
#pragma unroll
    for (int i = 0; i < DELTA_MAX_DIM / 32; i++)
        if (lane_id() + 32 * i < dim)
            to[lane_id() + 32 * i] = y[i] * scale;
}

/* Grid: (heads / 4, rows). A warp has the normed q and k of a k head, or a v head and its gates. */
static __global__ void __launch_bounds__(128)
    delta_conv_kernel(const __grid_constant__ struct delta_args p)
{
    dependency_wait();
    dependency_trigger();
    int t = p.first_row + (int)blockIdx.y, head = (int)blockIdx.x * 4 + warp_id();
    int seq = p.step.seq_of[t], in = p.step.states[seq], first = p.step.q_start[seq];
    if (head >= p.n_k + p.n_v || p.step.states[p.step.n_seqs + seq] < 0)
        return;
    const float *old = in < 0 ? NULL : delta_conv_state_of(p, in);
    float *uc = p.uc + (size_t)t * (size_t)p.channels;
    int keys = p.n_k * p.k_dim;
    float y[DELTA_MAX_DIM / 32];
    if (head < p.n_k) {
        float k[DELTA_MAX_DIM / 32], kq = 0.0f;
        int c = head * p.k_dim;
        float sq = delta_convolve(p, t, first, old, c, p.k_dim, y);
        float sk = delta_convolve(p, t, first, old, keys + c, p.k_dim, k);
        float rq = 1.0f / (sqrtf(sq + 1e-6f) * sqrtf((float)p.k_dim)),
              rk = 1.0f / sqrtf(sk + 1e-6f);
#pragma unroll
        for (int i = 0; i < DELTA_MAX_DIM / 32; i++)
            kq += k[i] * rk * (y[i] * rq);
        kq = warp_sum(kq);
        delta_put(uc + c, p.k_dim, y, rq);
        delta_put(uc + keys + c, p.k_dim, k, rk);
        if (lane_id() == 0)
            p.kq[t * p.n_k + head] = kq;
        return;
    }
    int h = head - p.n_k, c = 2 * keys + h * p.v_dim;
    delta_convolve(p, t, first, old, c, p.v_dim, y);
    delta_put(uc + c, p.v_dim, y, 1.0f);
    if (lane_id() == 0) {
        float *b = p.ba + (size_t)t * (size_t)(2 * p.n_v) + (size_t)h, *a = b + p.n_v;
        *b = delta_sigmoid(*b);
        *a = delta_decay(p, h, *a);
    }
}

/*
 * The same for heads of 128 and four taps, all in registers: a warp has one head in CONV_ROWS
 * consecutive rows; a lane has four channels and their last rows. Grid: (heads / 4, strips of
 * rows).
 */
enum { CONV_ROWS = 8, CONV_TAPS = 4 };

/* Four channels of one head of q, k or v: their taps, and the previous rows that the next output
 * needs. */
struct conv_lane {
    float4 taps[CONV_TAPS]; /* by channel */
    float4 past[CONV_TAPS - 1];
};

DEVICE float four_get(const float4 &a, int i)
{
    return i == 0 ? a.x : i == 1 ? a.y : i == 2 ? a.z : a.w;
}

DEVICE float4 conv_at(const struct delta_args &p, int row, int first, const float *old, int c)
{
    if (row >= first)
        return *(const float4 *)(p.u + (size_t)row * (size_t)p.channels + (size_t)c);
    if (old)
        return *(const float4 *)(old + (size_t)(row - first + CONV_TAPS - 1) * (size_t)p.channels +
                                 (size_t)c);
    return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

/* Loads the rows before row t of channels c... */
DEVICE void conv_past(const struct delta_args &p, struct conv_lane &l, int t, int first,
                      const float *old, int c)
{
#pragma unroll
    for (int k = 0; k < CONV_TAPS - 1; k++)
        l.past[k] = conv_at(p, t - CONV_TAPS + 1 + k, first, old, c);
}
/* Convolution and silu of the next row. Shifts it into the past. */
DEVICE float4 conv_row(struct conv_lane &l, const float4 &now)
{
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float4 &w = l.taps[i];
        y[i] = silu(w.x * four_get(l.past[0], i) + w.y * four_get(l.past[1], i) +
                    w.z * four_get(l.past[2], i) + w.w * four_get(now, i));
    }
    l.past[0] = l.past[1], l.past[1] = l.past[2], l.past[2] = now;
    return make_float4(y[0], y[1], y[2], y[3]);
}

DEVICE float four_dot(const float4 &a, const float4 &b)
{
    return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}
DEVICE float4 four_scaled(const float4 &a, float f)
{
    return make_float4(a.x * f, a.y * f, a.z * f, a.w * f);
}

static __global__ void __launch_bounds__(128)
    delta_strip_kernel(const __grid_constant__ struct delta_args p, int rows)
{
    int head = (int)blockIdx.x * 4 + warp_id(), lane = lane_id();
    if (head >= p.n_k + p.n_v)
        return;
    bool keys = head < p.n_k;
    int at = (int)blockIdx.y * CONV_ROWS, end = min(at + (int)CONV_ROWS, rows), before = -1;
    int n = p.n_k * DELTA_DIM, h = head - p.n_k;
    int c0 = (keys ? head * DELTA_DIM : 2 * n + h * DELTA_DIM) + lane * 4;
    struct conv_lane a, b; /* q or v; k */
#pragma unroll
    for (int i = 0; i < CONV_TAPS; i++) {
        a.taps[i] = *(const float4 *)(p.conv + (size_t)(c0 + i) * CONV_TAPS);
        b.taps[i] = *(const float4 *)(p.conv + (size_t)(c0 + (keys ? n : 0) + i) * CONV_TAPS);
    }
    dependency_wait();
    dependency_trigger();
    int seqs[CONV_ROWS];
    float4 now[CONV_ROWS], now_k[CONV_ROWS]; /* all loads issued at once */
#pragma unroll
    for (int i = 0; i < CONV_ROWS; i++) {
        int t = p.first_row + min(at + i, end - 1);
        const float *u = p.u + (size_t)t * (size_t)p.channels + (size_t)c0;
        seqs[i] = p.step.seq_of[t];
        now[i] = *(const float4 *)u;
        now_k[i] = keys ? *(const float4 *)(u + n) : now[i];
    }
    if (!keys && at + lane < end && lane < CONV_ROWS) { /* gates: one lane per row */
        float *beta = p.ba + (size_t)(p.first_row + at + lane) * (size_t)(2 * p.n_v) + (size_t)h;
        beta[0] = delta_sigmoid(beta[0]);
        beta[p.n_v] = delta_decay(p, h, beta[p.n_v]);
    }
    bool padding = false;
#pragma unroll
    for (int i = 0; i < CONV_ROWS; i++) {
        int t = p.first_row + at + i, seq = seqs[i];
        if (at + i >= end)
            break;
        if (seq != before) {
            int in = p.step.states[seq], first = p.step.q_start[seq];
            const float *old = in < 0 ? NULL : delta_conv_state_of(p, in);
            before = seq;
            padding = p.step.states[p.step.n_seqs + seq] < 0;
            if (!padding) {
                conv_past(p, a, t, first, old, c0);
                if (keys)
                    conv_past(p, b, t, first, old, c0 + n);
            }
        }
        if (padding)
            continue;
        float *to = p.uc + (size_t)t * (size_t)p.channels + (size_t)c0;
        float4 x = conv_row(a, now[i]);
        if (keys) {
            float4 y = conv_row(b, now_k[i]);
            float sq = warp_sum(four_dot(x, x)), sk = warp_sum(four_dot(y, y));
            float rq = rsqrtf(sq + 1e-6f) * rsqrtf((float)DELTA_DIM), rk = rsqrtf(sk + 1e-6f);
            float kq = warp_sum(four_dot(x, y)) * rq * rk;
            *(float4 *)to = four_scaled(x, rq);
            *(float4 *)(to + n) = four_scaled(y, rk);
            if (lane == 0)
                p.kq[t * p.n_k + head] = kq;
        } else {
            *(float4 *)to = x;
        }
    }
}

/* Grid: (v heads / 4, rows). A warp: o = norm(o) * silu(z). */
static __global__ void __launch_bounds__(128)
    delta_gate_kernel(const __grid_constant__ struct delta_args p)
{
    dependency_wait();
    dependency_trigger();
    int t = p.first_row + (int)blockIdx.y, h = (int)blockIdx.x * 4 + warp_id();
    if (h >= p.n_v)
        return;
    size_t at = ((size_t)t * (size_t)p.n_v + (size_t)h) * (size_t)p.v_dim;
    if (p.v_dim == DELTA_DIM) {
        size_t mine = at + (size_t)(lane_id() * 4);
        float4 v = *(const float4 *)(p.o + mine), z = *(const float4 *)(p.z + mine);
        float4 g = p.gain ? *(const float4 *)(p.gain + lane_id() * 4)
                          : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
        float f = rsqrtf(warp_sum(four_dot(v, v)) / (float)DELTA_DIM + p.eps);
        *(float4 *)(p.o + mine) = make_float4(v.x * f * g.x * silu(z.x), v.y * f * g.y * silu(z.y),
                                              v.z * f * g.z * silu(z.z), v.w * f * g.w * silu(z.w));
        return;
    }
    float y[DELTA_MAX_DIM / 32], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < DELTA_MAX_DIM / 32; i++) {
        int j = lane_id() + 32 * i;
        y[i] = j < p.v_dim ? p.o[at + (size_t)j] : 0.0f;
        sum += y[i] * y[i];
    }
    float rms = rsqrtf(warp_sum(sum) / (float)p.v_dim + p.eps);
#pragma unroll
    for (int i = 0; i < DELTA_MAX_DIM / 32; i++) {
        int j = lane_id() + 32 * i;
        if (j < p.v_dim)
            p.o[at + (size_t)j] =
                y[i] * rms * (p.gain ? p.gain[j] : 1.0f) * silu(p.z[at + (size_t)j]);
    }
}

/* Heads of any size. Grid: (v heads, sequences). S is in shared memory; threads own columns of
 * it. */
static __global__ void __launch_bounds__(128)
    delta_any_kernel(const __grid_constant__ struct delta_args p)
{
    SHARED_BYTES(shared);
    dependency_wait();
    dependency_trigger();
    int h = (int)blockIdx.x, seq = p.first_seq + (int)blockIdx.y, n = p.step.n_seqs;
    int Dk = p.k_dim, Dv = p.v_dim, kh = delta_k_head(p, h), tid = (int)threadIdx.x;
    int in = p.step.states[seq], out = p.step.states[n + seq], save = p.step.states[2 * n + seq];
    int first = p.step.q_start[seq], rows = p.step.q_start[seq + 1] - first;
    float *S = (float *)shared, *q = S + Dk * Dv, *k = q + Dk, *v = k + Dk;
    size_t values = (size_t)(p.n_v * Dv), keys = (size_t)(p.n_k * Dk);
    for (int i = tid; out >= 0 && i < Dk * Dv; i += 128)
        S[i] = in < 0 ? 0.0f : delta_state_of(p, in, h)[i];
    for (int t = 0; t < rows; t++) {
        size_t row = (size_t)(first + t);
        const float *u = p.uc + row * (size_t)p.channels;
        float *o = p.o + row * values + (size_t)(h * Dv);
        float beta = p.ba[row * (size_t)(2 * p.n_v) + (size_t)h];
        float decay = p.ba[row * (size_t)(2 * p.n_v) + (size_t)(p.n_v + h)];
        if (out < 0) { /* padding */
            for (int i = tid; i < Dv; i += 128)
                o[i] = 0.0f;
            continue;
        }
        __syncthreads();
        for (int i = tid; i < Dk; i += 128) {
            q[i] = u[kh * Dk + i];
            k[i] = u[keys + (size_t)(kh * Dk + i)];
        }
        for (int i = tid; i < Dv; i += 128)
            v[i] = u[2 * keys + (size_t)(h * Dv + i)];
        __syncthreads();
        for (int j = tid; j < Dv; j += 128) {
            float seen = 0.0f, sum = 0.0f;
            for (int i = 0; i < Dk; i++)
                seen += S[i * Dv + j] * k[i];
            float delta = beta * (v[j] - decay * seen);
            for (int i = 0; i < Dk; i++) {
                float s = S[i * Dv + j] * decay + k[i] * delta;
                S[i * Dv + j] = s;
                sum += s * q[i];
            }
            o[j] = sum;
        }
        if (save == t + 1) {
            __syncthreads();
            for (int i = tid; i < Dk * Dv; i += 128)
                delta_state_of(p, p.step.states[3 * n + seq], h)[i] = S[i];
        }
    }
    __syncthreads();
    for (int i = tid; out >= 0 && i < Dk * Dv; i += 128)
        delta_state_of(p, out, h)[i] = S[i];
    if (out >= 0)
        delta_conv_state_put_all(p, seq, h);
}

/*
 * Prompts, heads of 128 x 128. Grid: (blocks of 32 columns, v heads, sequences). A warp has 8
 * columns of S: lane (r, c) rows 4r.. of every 32 and columns 2c, 2c + 1, in registers over all
 * rows of the sequence. Keys and queries pass through shared memory, SCAN_ROWS at a time,
 * double-buffered.
 *
 * S is kept as G S'. Decays multiply the scalar G only, so a row costs three multiply-adds per
 * element of S': with k, with q, and the rank-1 update. When G gets small it is multiplied into S'.
 */
enum { SCAN_ROWS = 16, SCAN_COLS = 32, SCAN_WARPS = 4 };
struct scan_stage {
    float k[SCAN_ROWS][DELTA_DIM], q[SCAN_ROWS][DELTA_DIM], v[SCAN_ROWS][SCAN_COLS];
    float decay[SCAN_ROWS], beta[SCAN_ROWS], kq[SCAN_ROWS], pad[SCAN_ROWS];
};

DEVICE void scan_fetch(const struct delta_args &p, struct scan_stage *to, int h, int kh, int row0,
                       int rows, int col0)
{
    size_t keys = (size_t)(p.n_k * DELTA_DIM);
    for (int i = (int)threadIdx.x; i < SCAN_ROWS * (2 * DELTA_DIM + SCAN_COLS) / 4;
         i += SCAN_WARPS * 32) {
        const int PER = (2 * DELTA_DIM + SCAN_COLS) / 4;
        int r = i / PER, at = i % PER * 4;
        if (r >= rows)
            break;
        const float *u = p.uc + (size_t)(row0 + r) * (size_t)p.channels;
        if (at < DELTA_DIM)
            copy_async16(&to->k[r][at], u + keys + (size_t)(kh * DELTA_DIM + at));
        else if (at < 2 * DELTA_DIM)
            copy_async16(&to->q[r][at - DELTA_DIM], u + kh * DELTA_DIM + at - DELTA_DIM);
        else
            copy_async16(&to->v[r][at - 2 * DELTA_DIM],
                         u + 2 * keys + (size_t)(h * DELTA_DIM + col0 + at - 2 * DELTA_DIM));
    }
    copy_async_commit();
}

/* The gates of those rows, one thread per row: loaded into registers, then stored in the stage. */
DEVICE float4 scan_gates(const struct delta_args &p, int h, int kh, int row0, int rows)
{
    int r = (int)threadIdx.x;
    if (r >= rows || r >= SCAN_ROWS)
        return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float *ba = p.ba + (size_t)(row0 + r) * (size_t)(2 * p.n_v) + (size_t)h;
    return make_float4(ba[0], ba[p.n_v], p.kq[(row0 + r) * p.n_k + kh], 0.0f);
}
DEVICE void scan_put_gates(struct scan_stage *to, const float4 &g)
{
    int r = (int)threadIdx.x;
    if (r < SCAN_ROWS) {
        to->beta[r] = g.x;
        to->decay[r] = g.y;
        to->kq[r] = g.z;
    }
}

/* S = scale * s, and s = S. `to`, `from`: the first of a warp's columns; lane (r, c) has its
 * part of them. */
DEVICE void scan_store(float *to, const float (&s)[16][2], float scale)
{
    int r = lane_id() >> 2, c = lane_id() & 3;
#pragma unroll
    for (int i = 0; i < 16; i++)
        *(float2 *)(to + ((i >> 2) * 32 + r * 4 + (i & 3)) * DELTA_DIM + 2 * c) =
            make_float2(s[i][0] * scale, s[i][1] * scale);
}
DEVICE void scan_load(const float *from, float (&s)[16][2])
{
    int r = lane_id() >> 2, c = lane_id() & 3;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float2 v = *(const float2 *)(from + ((i >> 2) * 32 + r * 4 + (i & 3)) * DELTA_DIM + 2 * c);
        s[i][0] = v.x;
        s[i][1] = v.y;
    }
}

/* A lane's inputs for row t of a stage, read one row ahead. col: the lane's first column. */
struct scan_in {
    float4 k[4], q[4];
    float2 v;
    float decay, beta, kq;
};
DEVICE void scan_read(const struct scan_stage *st, int t, int col, struct scan_in &in)
{
    int r = lane_id() >> 2;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        in.k[j] = *(const float4 *)&st->k[t][j * 32 + r * 4];
        in.q[j] = *(const float4 *)&st->q[t][j * 32 + r * 4];
    }
    in.v = *(const float2 *)&st->v[t][col];
    in.decay = st->decay[t];
    in.beta = st->beta[t];
    in.kq = st->kq[t];
}

/* Processes one row: updates G and S' and returns the lane's two columns of o. */
DEVICE float2 scan_row(const struct scan_in &in, float (&s)[16][2], float &G)
{
    G *= in.decay;
    if (G < 0x1p-40f) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            s[i][0] *= G;
            s[i][1] *= G;
        }
        G = 1.0f;
    }
    float back = fast_divide(1.0f, G),
          sum[2][4] = {}; /* two partial sums shorten the dependency chains */
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float k = four_get(in.k[i >> 2], i & 3), q = four_get(in.q[i >> 2], i & 3);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            sum[i & 1][j] += s[i][j] * k;
            sum[i & 1][2 + j] += s[i][j] * q;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        sum[0][i] += sum[1][i];
#pragma unroll
    for (int d = 4; d < 32; d <<= 1)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sum[0][i] += __shfl_xor_sync(FULL_WARP, sum[0][i], d);
    float delta[2] = {in.beta * (in.v.x - G * sum[0][0]), in.beta * (in.v.y - G * sum[0][1])};
    float add[2] = {delta[0] * back, delta[1] * back};
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float k = four_get(in.k[i >> 2], i & 3);
        s[i][0] += k * add[0];
        s[i][1] += k * add[1];
    }
    return make_float2(G * sum[0][2] + delta[0] * in.kq, G * sum[0][3] + delta[1] * in.kq);
}

static __global__ void __launch_bounds__(SCAN_WARPS * 32)
    delta_scan_kernel(const __grid_constant__ struct delta_args p)
{
    SHARED_BYTES(shared);
    struct scan_stage *stages = (struct scan_stage *)shared;
    int h = (int)blockIdx.y, seq = p.first_seq + (int)blockIdx.z, n = p.step.n_seqs;
    int kh = delta_k_head(p, h), col0 = (int)blockIdx.x * SCAN_COLS, w = warp_id(),
        lane = lane_id();
    int in = p.step.states[seq], out = p.step.states[n + seq], save = p.step.states[2 * n + seq];
    int first = p.step.q_start[seq], rows = p.step.q_start[seq + 1] - first;
    size_t values = (size_t)(p.n_v * DELTA_DIM);
    float *o = p.o + (size_t)first * values + (size_t)(h * DELTA_DIM + col0 + w * 8);
    float s[16][2] = {}, G = 1.0f;
    if (in >= 0 && out >= 0)
        scan_load(delta_state_of(p, in, h) + col0 + w * 8, s);
    dependency_wait();
    dependency_trigger();
    if (out < 0) { /* padding */
        for (int t = 0; t < rows; t++)
            if (lane < 8)
                o[(size_t)t * values + (size_t)lane] = 0.0f;
        return;
    }
    scan_fetch(p, &stages[0], h, kh, first, rows, col0);
    scan_put_gates(&stages[0], scan_gates(p, h, kh, first, rows));
    int col = w * 8 + 2 * (lane & 3);
    for (int base = 0, buffer = 0; base < rows; base += SCAN_ROWS, buffer ^= 1) {
        copy_async_wait<0>();
        __syncthreads(); /* this stage has arrived; the other has been read */
        int next = base + SCAN_ROWS, end = min((int)SCAN_ROWS, rows - base);
        if (next < rows)
            scan_fetch(p, &stages[buffer ^ 1], h, kh, first + next, rows - next, col0);
        float4 gates = scan_gates(p, h, kh, first + next, rows - next);
        struct scan_in in[2];
        scan_read(&stages[buffer], 0, col, in[0]);
#pragma unroll 1
        for (int t0 = 0; t0 < end; t0 += 2)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int t = t0 + i;
                if (t >= end)
                    break;
                scan_read(&stages[buffer], min(t + 1, SCAN_ROWS - 1), col, in[i ^ 1]);
                float2 v = scan_row(in[i], s, G);
                if (lane < 4)
                    *(float2 *)(o + (size_t)(base + t) * values + (size_t)(2 * lane)) = v;
                if (save == base + t + 1)
                    scan_store(delta_state_of(p, p.step.states[3 * n + seq], h) + col0 + w * 8, s,
                               G);
            }
        scan_put_gates(&stages[buffer ^ 1], gates);
    }
    scan_store(delta_state_of(p, out, h) + col0 + w * 8, s, G);
    if (blockIdx.x == 0)
        delta_conv_state_put_all(p, seq, h);
}

/*
 * One row per sequence, heads of 128 x 128, from the projections to the input of the output
 * projection in one kernel. Grid: (v heads, sequences). State loads into registers are issued
 * before dependency_wait: warp w has rows 8w.., lane l columns 4l... S^T k and S^T q are summed
 * over the warps in shared memory; o = S^T q of the updated S follows from both.
 *
 * Blocks that share a k head all read its convolution rows. An atomic count finds the last block to
 * have done so, and that block writes the new rows. MANY: sequences of a few rows, from first_seq
 * on; rows are processed one after the other with the state in registers.
 */
enum { STEP_WARPS = 16, STEP_ROWS = DELTA_DIM / STEP_WARPS };
struct step_shared {
    float qkv[3][DELTA_DIM];
    float part[STEP_WARPS][2][DELTA_DIM], sum[2][DELTA_DIM];
    float squares[3][4];
    int last;
};

/* A channel of q, k or v and its convolution state. */
struct step_channel {
    int c;
    float past[DELTA_MAX_TAPS - 1], now;
};

DEVICE void step_conv_state_put(const struct delta_args &p, const struct step_channel &x, int slot)
{
    float *to = delta_conv_state_of(p, slot) + x.c;
#pragma unroll
    for (int k = 0; k < DELTA_MAX_TAPS - 1; k++)
        if (k < p.taps - 1)
            to[(size_t)k * (size_t)p.channels] =
                k + 1 < p.taps - 1 ? x.past[k + 1 < DELTA_MAX_TAPS - 1 ? k + 1 : k] : x.now;
}

/* Shifts the current row into the past. */
DEVICE void step_shift(const struct delta_args &p, struct step_channel *x)
{
#pragma unroll
    for (int k = 0; k < DELTA_MAX_TAPS - 1; k++)
        if (k < p.taps - 1)
            x->past[k] =
                k + 1 < p.taps - 1 ? x->past[k + 1 < DELTA_MAX_TAPS - 1 ? k + 1 : k] : x->now;
}

template <bool MANY>
static __global__ void __launch_bounds__(STEP_WARPS * 32)
    delta_step_kernel(const __grid_constant__ struct delta_args p)
{
    SHARED_BYTES(shared);
    struct step_shared *sh = (struct step_shared *)shared;
    int tid = (int)threadIdx.x, w = warp_id(), lane = lane_id(), n = p.step.n_seqs;
    int h = (int)blockIdx.x, seq = (int)blockIdx.y + (MANY ? p.first_seq : 0);
    int kh = delta_k_head(p, h), which = tid >> 7;
    int in = p.step.states[seq], out = p.step.states[n + seq];
    int save_at = p.step.states[2 * n + seq], save = save_at ? p.step.states[3 * n + seq] : -1;
    size_t row = (size_t)p.step.q_start[seq], values = (size_t)(p.n_v * DELTA_DIM);
    int rows = MANY ? p.step.q_start[seq + 1] - (int)row : 1;
    float *o = p.o + row * values + (size_t)(h * DELTA_DIM);
    float4 s[STEP_ROWS];
#pragma unroll
    for (int i = 0; i < STEP_ROWS; i++)
        s[i] = in < 0 || out < 0 ? make_float4(0.0f, 0.0f, 0.0f, 0.0f)
                                 : *(const float4 *)(delta_state_of(p, in, h) +
                                                     (w * STEP_ROWS + i) * DELTA_DIM + lane * 4);
    struct step_channel x = {};
    float taps[DELTA_MAX_TAPS] = {};
    if (which < 3) {
        x.c = which * p.n_k * DELTA_DIM + (which < 2 ? kh : h) * DELTA_DIM + (tid & 127);
#pragma unroll
        for (int k = 0; k < DELTA_MAX_TAPS; k++) {
            if (k < p.taps)
                taps[k] = p.conv[(size_t)x.c * (size_t)p.taps + (size_t)k];
            if (k < p.taps - 1 && in >= 0 && out >= 0)
                x.past[k < DELTA_MAX_TAPS - 1 ? k : 0] =
                    delta_conv_state_of(p, in)[(size_t)k * (size_t)p.channels + (size_t)x.c];
        }
    }
    dependency_wait();
    dependency_trigger();
    if (out < 0) { /* padding */
        for (int r = 0; r < rows && tid < DELTA_DIM; r++)
            o[(size_t)r * values + (size_t)tid] = 0.0f;
        return;
    }
    for (int r = 0; r < rows; r++, row++, o += values) {
        bool ends = r == rows - 1, saves = save >= 0 && (!MANY || r + 1 == save_at);
        const float *ba = p.ba + row * (size_t)(2 * p.n_v) + (size_t)h;
        float beta = delta_sigmoid(ba[0]), decay = delta_decay(p, h, ba[p.n_v]);
        float z = tid < DELTA_DIM ? p.z[row * values + (size_t)(h * DELTA_DIM + tid)] : 0.0f;
        if (which < 3) {
            x.now = p.u[row * (size_t)p.channels + (size_t)x.c];
            float sum = 0.0f;
#pragma unroll
            for (int k = 0; k < DELTA_MAX_TAPS; k++)
                if (k < p.taps)
                    sum +=
                        taps[k] * (k < p.taps - 1 ? x.past[k < DELTA_MAX_TAPS - 1 ? k : 0] : x.now);
            float y = sum * delta_sigmoid(sum), squares = warp_sum(y * y);
            sh->qkv[which][tid & 127] = y;
            if (lane == 0)
                sh->squares[which][w & 3] = squares;
        }
        /* Reads of the convolution rows must precede the count that lets another block overwrite them. */
        __threadfence();
        __syncthreads();
        if (tid == 0 && r == 0) {
            int32_t *count = p.count + seq * p.n_k + kh;
            sh->last = atomicAdd(count, 1) == p.n_v / p.n_k - 1;
            if (sh->last)
                *count = 0;
        }
        const float *qs = sh->squares[0], *ks = sh->squares[1];
        float rq = 1.0f / (sqrtf(qs[0] + qs[1] + qs[2] + qs[3] + 1e-6f) * sqrtf((float)DELTA_DIM));
        float rk = 1.0f / sqrtf(ks[0] + ks[1] + ks[2] + ks[3] + 1e-6f), kq = 0.0f, k[STEP_ROWS];
#pragma unroll
        for (int i = 0; i < 4; i++)
            kq += sh->qkv[0][lane + 32 * i] * sh->qkv[1][lane + 32 * i];
        kq = warp_sum(kq) * rq * rk;
        float a[2][4] = {};
#pragma unroll
        for (int i = 0; i < STEP_ROWS; i++) {
            float q = sh->qkv[0][w * STEP_ROWS + i] * rq;
            k[i] = sh->qkv[1][w * STEP_ROWS + i] * rk;
            const float e[4] = {s[i].x, s[i].y, s[i].z, s[i].w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                a[0][j] += e[j] * k[i];
                a[1][j] += e[j] * q;
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            *(float4 *)&sh->part[w][i][lane * 4] = make_float4(a[i][0], a[i][1], a[i][2], a[i][3]);
        __syncthreads();
        if (tid < 2 * DELTA_DIM) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < STEP_WARPS; i++)
                sum += sh->part[i][tid >> 7][tid & 127];
            sh->sum[tid >> 7][tid & 127] = sum * decay;
        }
        __syncthreads();
        float delta[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            delta[j] = beta * (sh->qkv[2][lane * 4 + j] - sh->sum[0][lane * 4 + j]);
#pragma unroll
        for (int i = 0; i < STEP_ROWS; i++) {
            float4 v =
                make_float4(s[i].x * decay + k[i] * delta[0], s[i].y * decay + k[i] * delta[1],
                            s[i].z * decay + k[i] * delta[2], s[i].w * decay + k[i] * delta[3]);
            int at = (w * STEP_ROWS + i) * DELTA_DIM + lane * 4;
            if (ends)
                *(float4 *)(delta_state_of(p, out, h) + at) = v;
            if (saves)
                *(float4 *)(delta_state_of(p, save, h) + at) = v;
            s[i] = v;
        }
        if (which == 2 || (which < 2 && sh->last)) {
            if (ends)
                step_conv_state_put(p, x, out);
            if (saves)
                step_conv_state_put(p, x, save);
        }
        float y = 0.0f;
        if (tid < DELTA_DIM) {
            y = sh->sum[1][tid] + kq * beta * (sh->qkv[2][tid] - sh->sum[0][tid]);
            float squares = warp_sum(y * y);
            if (lane == 0)
                sh->squares[2][w] = squares;
        }
        __syncthreads();
        if (tid < DELTA_DIM) {
            const float *os = sh->squares[2];
            float rms = rsqrtf((os[0] + os[1] + os[2] + os[3]) / (float)DELTA_DIM + p.eps);
            o[tid] = y * rms * (p.gain ? p.gain[tid] : 1.0f) * silu(z);
        }
        if (!MANY)
            break;
        step_shift(p, &x);
        __syncthreads(); /* the next row overwrites shared memory */
    }
}

/* Host */

struct delta_scratch {
    float *u, *uc, *z, *ba, *kq, *o;
    int32_t *count;
    uint8_t *chunks;
    size_t chunks_bytes;
    float *split_in;  /* (2 * split_rows, n_embd) or NULL */
    float *split_out; /* (2 * split_rows, widest) or NULL */
    int split_rows;
};

static size_t delta_any_shared(const struct delta_net *d)
{
    return ((size_t)d->k_dim * (size_t)d->v_dim + 2 * (size_t)d->k_dim + (size_t)d->v_dim) * 4;
}

bool delta_net_supported(const struct cuda_backend *cu, const struct delta_net *d, int layer,
                         struct error *err)
{
    if (d->k_dim > DELTA_MAX_DIM || d->v_dim > DELTA_MAX_DIM ||
        delta_any_shared(d) > cu->shared_limit)
        return error_set(err, "layer %d: a delta net of %d x %d is not supported on cuda", layer,
                         d->k_dim, d->v_dim);
    if (d->n_v_heads % d->n_k_heads)
        return error_set(err, "layer %d: %d k heads for %d v heads are not supported on cuda",
                         layer, d->n_k_heads, d->n_v_heads);
    if (d->conv_len > DELTA_MAX_TAPS)
        return error_set(err, "layer %d: a convolution of %d is not supported on cuda (%d at most)",
                         layer, d->conv_len, DELTA_MAX_TAPS);
    if (d->norm.kind != NORM_RMS)
        return network_refuse(err, layer, "a delta net without its norm is", "cuda");
    return true;
}

static bool delta_is_fp16(const struct delta_net *d)
{
    const struct weight *all[] = {d->wqkv, d->wz, d->wba};
    for (int i = 0; i < 3; i++) {
        const struct matrix *w = cuda_matrix(all[i]);
        for (int j = 0; j < w->n_seg; j++)
            if (w->seg[j].kind != TILE_F16)
                return false;
    }
    return true;
}

bool delta_net_prepare(struct cuda_backend *cu, const struct bounds *b, struct error *err)
{
    bool fp16 = false;
    size_t channels = 0, values = 0, n_k = 0, n_v = 0, tokens = (size_t)b->max_tokens;
    for (int i = 0; i < cu->net->n_layers; i++) {
        const struct mixer *m = &cu->net->layers[i].mixer;
        const struct delta_net *d = &m->delta_net;
        if (m->kind != MIXER_DELTA_NET)
            continue;
        size_t c = (size_t)d->wqkv->n_out, v = (size_t)(d->n_v_heads * d->v_dim);
        channels = c > channels ? c : channels;
        values = v > values ? v : values;
        n_k = (size_t)d->n_k_heads > n_k ? (size_t)d->n_k_heads : n_k;
        n_v = (size_t)d->n_v_heads > n_v ? (size_t)d->n_v_heads : n_v;
        fp16 = fp16 || delta_is_fp16(d);
    }
    if (!values)
        return true;
    struct delta_scratch *s = (struct delta_scratch *)mem_zalloc(1, sizeof *s);
    cu->delta = s;
    s->chunks_bytes = delta_chunked_bytes((int)n_k, (int)n_v, b->max_tokens,
                                          b->max_seqs < CHUNKED_SEQS ? b->max_seqs : CHUNKED_SEQS);
    int room = b->max_tokens / 2; /* each row takes two rows of the product's fp16 input */
    s->split_rows = !fp16 ? 0 : room < DELTA_SPLIT_ROWS ? room : DELTA_SPLIT_ROWS;
    size_t twice = 2 * (size_t)s->split_rows, widest = channels > 2 * n_v ? channels : 2 * n_v;
    const struct device_buffer list[] = {
        {(void **)&s->u, tokens * channels * 4},
        {(void **)&s->uc, tokens * channels * 4},
        {(void **)&s->z, tokens * values * 4},
        {(void **)&s->ba, tokens * 2 * n_v * 4},
        {(void **)&s->kq, tokens * n_k * 4},
        {(void **)&s->o, tokens * values * 4},
        {(void **)&s->count, (size_t)b->max_seqs * n_k * 4},
        {(void **)&s->chunks, s->chunks_bytes},
        {(void **)&s->split_in, twice * (size_t)cu->shape.n_embd * 4},
        {(void **)&s->split_out, twice * widest * 4}};
    return cuda_own(cu, list, (int)(sizeof list / sizeof *list), err);
}

void delta_net_close(struct cuda_backend *cu)
{
    mem_free(cu->delta);
}

bool delta_step_fits(const struct delta_args &p)
{
    return p.k_dim == DELTA_DIM && p.v_dim == DELTA_DIM;
}

/* Grid: (rows, blocks of 128 heads). beta *= scale, as delta_conv left it. */
static __global__ void __launch_bounds__(128)
    delta_beta_kernel(const __grid_constant__ struct delta_args p)
{
    dependency_wait();
    dependency_trigger();
    int t = p.first_row + (int)blockIdx.x, h = (int)(blockIdx.y * 128 + threadIdx.x);
    if (h < p.n_v)
        p.ba[(size_t)t * (size_t)(2 * p.n_v) + (size_t)h] *= p.beta_scale;
}

void delta_step(struct cuda_backend *cu, const struct delta_args &p, int seqs)
{
    cuda_launch(cu, delta_step_kernel<false>, dim3((unsigned)p.n_v, (unsigned)seqs),
                STEP_WARPS * 32, sizeof(struct step_shared), LAUNCH_EARLY, p);
}

void delta_step_rows(struct cuda_backend *cu, const struct delta_args &p, int seqs)
{
    cuda_launch(cu, delta_step_kernel<true>, dim3((unsigned)p.n_v, (unsigned)seqs), STEP_WARPS * 32,
                sizeof(struct step_shared), LAUNCH_EARLY, p);
}

static void delta_conv_rows(struct cuda_backend *cu, const struct delta_args &p, int rows)
{
    if (delta_step_fits(p) && p.taps == CONV_TAPS) {
        cuda_launch(cu, delta_strip_kernel,
                    dim3((unsigned)ceil_div(p.n_k + p.n_v, 4), (unsigned)ceil_div(rows, CONV_ROWS)),
                    128, 0, LAUNCH_EARLY, p, rows);
        return;
    }
    cuda_launch(cu, delta_conv_kernel, dim3((unsigned)ceil_div(p.n_k + p.n_v, 4), (unsigned)rows),
                128, 0, LAUNCH_EARLY, p);
}

void delta_conv(struct cuda_backend *cu, const struct delta_args &p, int rows)
{
    delta_conv_rows(cu, p, rows);
    if (p.beta_scale != 0)
        cuda_launch(cu, delta_beta_kernel, dim3((unsigned)rows, (unsigned)ceil_div(p.n_v, 128)),
                    128, 0, LAUNCH_EARLY, p);
}

void delta_gate(struct cuda_backend *cu, const struct delta_args &p, int rows)
{
    cuda_launch(cu, delta_gate_kernel, dim3((unsigned)ceil_div(p.n_v, 4), (unsigned)rows), 128, 0,
                LAUNCH_EARLY, p);
}

void delta_scan(struct cuda_backend *cu, const struct delta_args &p, int rows, int seqs)
{
    delta_conv(cu, p, rows);
    cuda_launch(cu, delta_scan_kernel, dim3(DELTA_DIM / SCAN_COLS, (unsigned)p.n_v, (unsigned)seqs),
                SCAN_WARPS * 32, 2 * sizeof(struct scan_stage), LAUNCH_EARLY, p);
    delta_gate(cu, p, rows);
}

void delta_any(struct cuda_backend *cu, const struct delta_args &p, int rows, int seqs)
{
    size_t shared = (size_t)(p.k_dim * p.v_dim + 2 * p.k_dim + p.v_dim) * 4;
    delta_conv(cu, p, rows);
    cuda_launch(cu, delta_any_kernel, dim3((unsigned)p.n_v, (unsigned)seqs), 128, shared,
                LAUNCH_EARLY, p);
    delta_gate(cu, p, rows);
}

static struct delta_args delta_args_of(struct cuda_backend *cu, const struct mixer *m, int layer,
                                       const struct step *s)
{
    const struct delta_net *d = &m->delta_net;
    const struct delta_scratch *b = cu->delta;
    struct delta_args p = {};
    p.step = *s;
    p.u = b->u;
    p.z = b->z;
    p.ba = b->ba;
    p.conv = d->conv;
    p.decay = d->decay;
    p.dt_bias = d->dt_bias;
    p.gain = d->norm.gain;
    p.eps = d->norm.eps;
    p.states = cu->kv[layer].state;
    p.len = mixer_state_len(m);
    p.uc = b->uc;
    p.kq = b->kq;
    p.o = b->o;
    p.count = b->count;
    p.chunks = b->chunks;
    p.chunks_bytes = b->chunks_bytes;
    p.n_k = d->n_k_heads;
    p.n_v = d->n_v_heads;
    p.k_dim = d->k_dim;
    p.v_dim = d->v_dim;
    p.taps = d->conv_len;
    p.channels = d->wqkv->n_out;
    p.tiled = d->tiled;
    p.beta_scale = d->beta_scale == 1 ? 0 : d->beta_scale;
    return p;
}

/* Grid: (rows). Row r of x becomes row r of y (rounded to fp16's mantissa) and row rows + r (the
 * residue). */
static __global__ void __launch_bounds__(256)
    delta_split_kernel(const float *x, float *y, int width)
{
    dependency_wait();
    dependency_trigger();
    size_t at = (size_t)blockIdx.x * (size_t)width, rest = (size_t)gridDim.x * (size_t)width;
    for (int i = (int)threadIdx.x; i < width; i += 256) {
        float v = x[at + (size_t)i];
        uint32_t u = bits_of(v);
        float high = float_of((u + 0xfffu + (u >> 13 & 1)) & ~0x1fffu);
        y[at + (size_t)i] = high;
        y[rest + at + (size_t)i] = v - high;
    }
}

/* Grid: (blocks of 256 columns, rows). Row r of y = row r + row rows + r of x. */
static __global__ void __launch_bounds__(256) delta_sum_kernel(const float *x, float *y, int width)
{
    dependency_wait();
    dependency_trigger();
    int i = (int)(blockIdx.x * 256 + threadIdx.x);
    size_t at = (size_t)blockIdx.y * (size_t)width + (size_t)i;
    if (i < width)
        y[at] = x[at] + x[at + (size_t)gridDim.y * (size_t)width];
}

/* Products with fp16 weights whose inputs are split into a high and a low part. Rounding the
 * inputs of q, k and v is most of the error that reaches the expert router after this mixer.
 * With few rows the product is limited by reading weights, and both parts share one read. */
static void delta_split_products(struct cuda_backend *cu, const struct norm *norm,
                                 const struct mixer_product *list, int n)
{
    const struct delta_scratch *b = cu->delta;
    struct rows x = resid_norm(cu, &cu->resid, cuda_gain(cu, norm), true);
    for (int at = 0; at < x.n; at += b->split_rows) {
        int rows = x.n - at < b->split_rows ? x.n - at : b->split_rows;
        struct rows both = rows_of(b->split_in, 2 * rows, x.width);
        step_mark(cu);
        cuda_launch(cu, delta_split_kernel, dim3((unsigned)rows), 256, 0, LAUNCH_EARLY,
                    (const float *)x.floats + (size_t)at * (size_t)x.width, b->split_in, x.width);
        step_mark_end(cu, STAGE_NORM);
        for (int i = 0; i < n; i++) {
            struct pick_case c = {};
            int width = list[i].w->n_out;
            c.rows = both.n;
            c.w = list[i].w;
            c.x = &both;
            c.y = b->split_out;
            pick_run(cu, PICK_LINEAR, &c, STAGE_QKV);
            step_mark(cu);
            cuda_launch(cu, delta_sum_kernel, dim3((unsigned)ceil_div(width, 256), (unsigned)rows),
                        256, 0, LAUNCH_EARLY, (const float *)b->split_out,
                        list[i].y + (size_t)at * (size_t)width, width);
            step_mark_end(cu, STAGE_QKV);
        }
    }
}

static void delta_products(struct cuda_backend *cu, const struct mixer *m, const struct step *s,
                           const struct mixer_product *list, int n)
{
    const struct delta_net *d = &m->delta_net;
    bool adapted = d->wqkv->lora || d->wz->lora || d->wba->lora;
    if (cu->delta->split_rows && !cu->exact && !adapted && !m->block.parallel && delta_is_fp16(d) &&
        pick_delta_split(s->n_tokens, s->n_decode))
        delta_split_products(cu, &m->block.in, list, n);
    else
        mixer_products(cu, &m->block.in, list, n);
}

struct rows delta_net_mix(struct cuda_backend *cu, const struct mixer *m, int layer)
{
    const struct delta_net *d = &m->delta_net;
    const struct delta_scratch *b = cu->delta;
    struct step s = cuda_step(cu);
    const struct mixer_product products[] = {
        {cuda_matrix(d->wqkv), b->u}, {cuda_matrix(d->wz), b->z}, {cuda_matrix(d->wba), b->ba}};
    delta_products(cu, m, &s, products, 3);
    struct delta_args p = delta_args_of(cu, m, layer, &s);
    struct pick_case c = {};
    c.step = &s;
    c.delta = &p;
    step_mark(cu);
    if ((c.rows = s.n_decode))
        pick_run(cu, PICK_DELTA_DECODE, &c, N_STAGES);
    p.first_row = p.first_seq = s.n_decode;
    if ((c.rows = s.n_tokens - s.n_decode))
        pick_run(cu, PICK_DELTA_PROMPT, &c, N_STAGES);
    step_mark_end(cu, STAGE_ATTENTION);
    return rows_of(b->o, s.n_tokens, d->n_v_heads * d->v_dim);
}
