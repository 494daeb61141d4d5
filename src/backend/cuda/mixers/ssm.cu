/*
 * Mamba-2's state-space models, also as lightning attention (no convolution, fixed decays, a gate apart), Mamba's selective scans and short convolutions between their projections. A step takes up to
 * four kernels: the
 * convolution of every row (conv_rows), the convolution's new state (conv_states), the recurrence with a head's state in
 * shared memory over all rows of a sequence (ssm_scan), and gate and norm (ssm_gate). Rows of a sequence are processed
 * in order, so decodes, prompts and mixed steps differ only in the number of rows.
 *
 * Owns the scratch of these layers and the layout of a state: the last W-1 rows before the convolution, oldest first,
 * (W-1, C); then S of each head, (N, P).
 */
#include "backend/cuda/core/cuda.h"
#include "backend/cuda/mixers/mixers.h"

extern "C" {
#include "base/mem.h"
}

enum { SSM_THREADS = 256, SSM_MAX_TAPS = 8 };

struct ssm_args {
    struct step step;
    const float *in; /* (n_tokens, width) of the projection */
    int width;
    bool gated; /* a short convolution of b * x, multiplied by c, with in = [b c x] */
    int first;  /* else: column of in where the convolution's channels begin */
    const float *conv, *conv_bias; /* (C, W) or NULL: the row itself; (C) or NULL */
    int taps, channels;
    const float *z; /* gates: z_width floats a row */
    int z_width;
    bool sigmoid_gate;
    float *states; /* (n_states, len) */
    size_t len;
    float *uc;                           /* (n_tokens, C) after the convolution */
    float *dt;                           /* (n_tokens, H) */
    float *o;                            /* (n_tokens, H*P), or E of a short convolution */
    const float *decay, *dt_bias, *skip; /* (H); without dt_bias dt is 1; skip may be NULL */
    float dt_min, dt_max;
    int n_heads, n_groups, head_dim, state_dim;
    const float *gain; /* (H*P) or NULL */
    float eps;
    int n_norms; /* 0 = no norm */
    bool norm_first;
};

/* A selective scan: s.uc is x, s.dt the product before the softplus (n_tokens, I), s.n_heads 0. */
enum {
    SCAN_CHANNELS = 128,
    SCAN_ROWS = 8,
    SCAN_REGISTERS = 16 /* values of a channel in registers */
};
struct scan_args {
    struct ssm_args s;
    float *low, *low_dt;
    int rank, state_dim;
    struct gain norm[3]; /* of t, b and c */
};

DEVICE float *ssm_state(const struct ssm_args &p, int slot)
{
    return p.states + (size_t)slot * p.len;
}

/* Channel c of row t before the convolution. */
DEVICE float conv_input(const struct ssm_args &p, int t, int c)
{
    const float *row = p.in + (size_t)t * (size_t)p.width;
    return p.gated ? row[c] * row[2 * p.channels + c] : row[p.first + c];
}

struct ssm_factors {
    int end[SSM_PARTS]; /* column after part i */
    float by[SSM_PARTS];
};

/* Grid: (blocks of 256 columns, rows). The parts of a projection, each times a factor. */
static __global__ void __launch_bounds__(256)
    ssm_factors_kernel(float *in, int width, const __grid_constant__ struct ssm_factors f)
{
    dependency_wait();
    dependency_trigger();
    int c = (int)(blockIdx.x * 256 + threadIdx.x);
    if (c >= width)
        return;
    float by = f.by[SSM_PARTS - 1];
#pragma unroll
    for (int i = SSM_PARTS - 2; i >= 0; i--)
        by = c < f.end[i] ? f.by[i] : by;
    in[(size_t)blockIdx.y * (size_t)width + (size_t)c] *= by;
}

/* Grid: (blocks of 128 columns, rows). A thread has a channel, or after the channels a head's dt. */
static __global__ void __launch_bounds__(128) conv_rows(const __grid_constant__ struct ssm_args p)
{
    dependency_wait();
    dependency_trigger();
    int c = (int)(blockIdx.x * 128 + threadIdx.x), t = (int)blockIdx.y, C = p.channels;
    int seq = p.step.seq_of[t], in = p.step.states[seq], first = p.step.q_start[seq];
    bool padding = p.step.states[p.step.n_seqs + seq] < 0;
    if (c >= C) {
        int h = c - C;
        if (p.gated || h >= p.n_heads)
            return;
        float x = 1.0f;
        if (p.dt_bias) {
            x = p.in[(size_t)t * (size_t)p.width + (size_t)(p.first + C + h)] + p.dt_bias[h];
            x = x > 20.0f ? x : log1pf(expf(x));
        }
        x = fmaxf(x, p.dt_min);
        p.dt[(size_t)t * (size_t)p.n_heads + (size_t)h] = p.dt_max != 0.0f ? fminf(x, p.dt_max) : x;
        return;
    }
    float sum = p.conv_bias ? p.conv_bias[c] : 0.0f;
    int past = p.taps - 1;
    for (int k = 0; k < p.taps && !padding; k++) {
        int at = t - past + k;
        float x = at >= first ? conv_input(p, at, c)
                  : in >= 0 ? ssm_state(p, in)[(size_t)(at - first + past) * (size_t)C + (size_t)c]
                            : 0.0f;
        sum += (p.conv ? p.conv[(size_t)c * (size_t)p.taps + (size_t)k] : 1.0f) * x;
    }
    if (p.gated)
        p.o[(size_t)t * (size_t)C + (size_t)c] =
            padding ? 0.0f : sum * p.in[(size_t)t * (size_t)p.width + (size_t)(C + c)];
    else
        p.uc[(size_t)t * (size_t)C + (size_t)c] = silu(sum);
}

/* The rows of channel c before row `rows` of a sequence go to a slot, which may be the one read. */
DEVICE void conv_put(const struct ssm_args &p, int seq, int c, int rows, int slot)
{
    int in = p.step.states[seq], past = p.taps - 1, first = p.step.q_start[seq];
    float v[SSM_MAX_TAPS];
#pragma unroll
    for (int k = 0; k < SSM_MAX_TAPS - 1; k++) {
        int at = rows - past + k;
        if (k < past)
            v[k] = at >= 0 ? conv_input(p, first + at, c)
                   : in >= 0
                       ? ssm_state(p, in)[(size_t)(at + past) * (size_t)p.channels + (size_t)c]
                       : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < SSM_MAX_TAPS - 1; k++)
        if (k < past)
            ssm_state(p, slot)[(size_t)k * (size_t)p.channels + (size_t)c] = v[k];
}

/* Grid: (blocks of 128 channels, sequences). The saved copy goes first: the final slot may be the one read. */
static __global__ void __launch_bounds__(128) conv_states(const __grid_constant__ struct ssm_args p)
{
    dependency_wait();
    dependency_trigger();
    int c = (int)(blockIdx.x * 128 + threadIdx.x), seq = (int)blockIdx.y, n = p.step.n_seqs;
    int out = p.step.states[n + seq], save = p.step.states[2 * n + seq];
    if (c >= p.channels || out < 0)
        return;
    if (save)
        conv_put(p, seq, c, save, p.step.states[3 * n + seq]);
    conv_put(p, seq, c, p.step.q_start[seq + 1] - p.step.q_start[seq], out);
}

/*
 * Grid: (heads, sequences). S is in shared memory. The threads form parts of P: a thread has one column p and every
 * `parts`th row of S.
 */
static __global__ void __launch_bounds__(SSM_THREADS)
    ssm_scan(const __grid_constant__ struct ssm_args p)
{
    SHARED_BYTES(shared);
    dependency_wait();
    dependency_trigger();
    int h = (int)blockIdx.x, seq = (int)blockIdx.y, n = p.step.n_seqs, tid = (int)threadIdx.x;
    int P = p.head_dim, N = p.state_dim, values = p.n_heads * P, group = h * p.n_groups / p.n_heads;
    int parts = SSM_THREADS / P, col = tid % P, part = tid / P;
    int in = p.step.states[seq], out = p.step.states[n + seq], save = p.step.states[2 * n + seq];
    int first = p.step.q_start[seq], rows = p.step.q_start[seq + 1] - first;
    size_t at = (size_t)(p.taps - 1) * (size_t)p.channels + (size_t)h * (size_t)(N * P);
    float *S = (float *)shared, *b = S + N * P, *c = b + N, *sums = c + N; /* sums: (parts, P) */
    for (int i = tid; out >= 0 && i < N * P; i += SSM_THREADS)
        S[i] = in < 0 ? 0.0f : ssm_state(p, in)[at + (size_t)i];
    for (int t = first; t < first + rows; t++) {
        const float *u = p.uc + (size_t)t * (size_t)p.channels;
        float *o = p.o + (size_t)t * (size_t)values + (size_t)(h * P);
        if (out < 0) { /* padding */
            for (int i = tid; i < P; i += SSM_THREADS)
                o[i] = 0.0f;
            continue;
        }
        for (int i = tid; i < N; i += SSM_THREADS) {
            b[i] = u[values + group * N + i];
            c[i] = u[values + (p.n_groups + group) * N + i];
        }
        __syncthreads();
        if (part < parts) {
            float dt = p.dt[(size_t)t * (size_t)p.n_heads + (size_t)h];
            float decay = expf(-p.decay[h] * dt), x = dt * u[h * P + col], sum = 0.0f;
            for (int i = part; i < N; i += parts) {
                float s = S[i * P + col] * decay + b[i] * x;
                S[i * P + col] = s;
                sum += s * c[i];
            }
            sums[part * P + col] = sum;
        }
        __syncthreads();
        for (int i = tid; i < P; i += SSM_THREADS) {
            float sum = p.skip ? p.skip[h] * u[h * P + i] : 0.0f;
            for (int k = 0; k < parts; k++)
                sum += sums[k * P + i];
            o[i] = sum;
        }
        if (save == t - first + 1)
            for (int i = tid; i < N * P; i += SSM_THREADS)
                ssm_state(p, p.step.states[3 * n + seq])[at + (size_t)i] = S[i];
        __syncthreads(); /* the next row overwrites b, c and sums */
    }
    for (int i = tid; out >= 0 && i < N * P; i += SSM_THREADS)
        ssm_state(p, out)[at + (size_t)i] = S[i];
}

DEVICE float ssm_gate_of(const struct ssm_args &p, float z)
{
    return p.sigmoid_gate ? fast_divide(1.0f, 1.0f + fast_exp(-z)) : silu(z);
}

/* Grid: (parts of the norm, rows). o *= silu(z), or sigmoid(z), before or after the norm of a part. */
static __global__ void __launch_bounds__(SSM_THREADS)
    ssm_gate(const __grid_constant__ struct ssm_args p)
{
    __shared__ float squares[SSM_THREADS / 32];
    dependency_wait();
    dependency_trigger();
    int t = (int)blockIdx.y, values = p.n_heads * p.head_dim, n = values / (int)gridDim.x;
    int from = (int)blockIdx.x * n, tid = (int)threadIdx.x;
    const float *z = p.z + (size_t)t * (size_t)p.z_width + (size_t)from;
    float *o = p.o + (size_t)t * (size_t)values + (size_t)from, sum = 0.0f;
    for (int i = tid; i < n; i += SSM_THREADS) {
        float y = p.norm_first ? o[i] : o[i] * ssm_gate_of(p, z[i]);
        o[i] = y;
        sum += y * y;
    }
    if (!p.n_norms && !p.norm_first)
        return;
    sum = warp_sum(sum);
    if (lane_id() == 0)
        squares[warp_id()] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int i = 0; i < SSM_THREADS / 32; i++)
        sum += squares[i];
    float scale = p.n_norms ? rsqrtf(sum / (float)n + p.eps) : 1.0f;
    for (int i = tid; i < n; i += SSM_THREADS)
        o[i] *= scale * (p.gain ? p.gain[from + i] : 1.0f) *
                (p.norm_first ? ssm_gate_of(p, z[i]) : 1.0f);
}

/* Grid: (rows). [t b c] = low, each normed; t goes to `low_dt` as the rows of a product. Three warps, one part each. */
static __global__ void __launch_bounds__(96) scan_norms(const __grid_constant__ struct scan_args p)
{
    dependency_wait();
    dependency_trigger();
    int part = warp_id(), n = part ? p.state_dim : p.rank, lane = lane_id();
    int at = part == 0 ? 0 : p.rank + (part - 1) * p.state_dim;
    float *row = p.low + (size_t)blockIdx.x * (size_t)(p.rank + 2 * p.state_dim) + (size_t)at;
    float *to = part ? row : p.low_dt + (size_t)blockIdx.x * (size_t)p.rank, sum = 0.0f;
    for (int i = lane; i < n; i += 32)
        sum += row[i] * row[i];
    float by = p.norm[part].gain ? rsqrtf(warp_sum(sum) / (float)n + p.norm[part].eps) : 1.0f;
    for (int i = lane; i < n; i += 32)
        to[i] = row[i] * by * (p.norm[part].gain ? p.norm[part].gain[i] : 1.0f);
}

DEVICE float scan_softplus(float x)
{
    return x > 20.0f ? x : log1pf(expf(x));
}

/*
 * The recurrence. Grid: (blocks of SCAN_CHANNELS channels, sequences). A thread has a channel and its N values of S and of
 * decay: in registers, or with N 0 in shared memory. SCAN_ROWS rows' inputs are loaded at once.
 */
template <int N>
static __global__ void __launch_bounds__(SCAN_CHANNELS)
    scan_kernel(const __grid_constant__ struct scan_args p)
{
    SHARED_BYTES(shared);
    dependency_wait();
    dependency_trigger();
    int tid = (int)threadIdx.x, c = (int)blockIdx.x * SCAN_CHANNELS + tid, seq = (int)blockIdx.y;
    int n_seqs = p.s.step.n_seqs, I = p.s.channels, D = N ? N : p.state_dim;
    int in = p.s.step.states[seq], out = p.s.step.states[n_seqs + seq];
    int save = p.s.step.states[2 * n_seqs + seq], first = p.s.step.q_start[seq];
    int rows = p.s.step.q_start[seq + 1] - first;
    bool mine = c < I;
    size_t at = (size_t)(p.s.taps - 1) * (size_t)I + (size_t)c * (size_t)D;
    float *bc = (float *)shared,
          *own = bc + SCAN_ROWS * 2 * D; /* (SCAN_ROWS, 2 D); (D, SCAN_CHANNELS) */
    float S[N ? N : 1], decay[N ? N : 1];
    auto value = [&](int i) -> float & { return N ? S[N ? i : 0] : own[i * SCAN_CHANNELS + tid]; };
    auto store = [&](int slot) {
        for (int i = 0; i < D && mine; i++)
            ssm_state(p.s, slot)[at + (size_t)i] = value(i);
    };
    if (out < 0) { /* padding */
        for (int t = first; t < first + rows && mine; t++)
            p.s.o[(size_t)t * (size_t)I + (size_t)c] = 0.0f;
        return;
    }
#pragma unroll
    for (int i = 0; i < D; i++) {
        value(i) = mine && in >= 0 ? ssm_state(p.s, in)[at + (size_t)i] : 0.0f;
        if (N)
            decay[N ? i : 0] = mine ? p.s.decay[(size_t)c * (size_t)D + (size_t)i] : 0.0f;
    }
    float skip = mine ? p.s.skip[c] : 0.0f;
    for (int r0 = 0; r0 < rows; r0 += SCAN_ROWS) {
        int n = min((int)SCAN_ROWS, rows - r0);
        float x[SCAN_ROWS], z[SCAN_ROWS], dt[SCAN_ROWS];
#pragma unroll
        for (int r = 0; r < SCAN_ROWS; r++) {
            size_t t = (size_t)(first + r0 + min(r, n - 1));
            x[r] = mine ? p.s.uc[t * (size_t)I + (size_t)c] : 0.0f;
            z[r] = mine ? p.s.in[t * (size_t)p.s.width + (size_t)(I + c)] : 0.0f;
            dt[r] = mine ? p.s.dt[t * (size_t)I + (size_t)c] : 0.0f;
        }
        __syncthreads(); /* the rows before have been read */
        for (int i = tid; i < n * 2 * D; i += SCAN_CHANNELS)
            bc[i] = p.low[(size_t)(first + r0 + i / (2 * D)) * (size_t)(p.rank + 2 * D) +
                          (size_t)(p.rank + i % (2 * D))];
        __syncthreads();
#pragma unroll
        for (int r = 0; r < SCAN_ROWS; r++) {
            if (r >= n)
                break;
            float step = scan_softplus(dt[r]), v = step * x[r], sum = 0.0f;
            const float *b = bc + r * 2 * D;
#pragma unroll
            for (int i = 0; i < D; i++) {
                float slow =
                    N ? decay[N ? i : 0] : p.s.decay[(size_t)min(c, I - 1) * (size_t)D + (size_t)i];
                float s = value(i) * expf(-slow * step) + b[i] * v;
                value(i) = s;
                sum += s * b[D + i];
            }
            if (mine)
                p.s.o[(size_t)(first + r0 + r) * (size_t)I + (size_t)c] =
                    (sum + skip * x[r]) * silu(z[r]);
            if (save == r0 + r + 1)
                store(p.s.step.states[3 * n_seqs + seq]);
        }
    }
    store(out);
}

/* Host */

struct ssm_scratch {
    float *in, *z, *uc, *dt, *o; /* z: of a gate with a matrix of its own */
    float *low, *low_dt;         /* of scans: (max_tokens, R + 2 N), (max_tokens, R) */
};

static size_t scan_shared(const struct ssm *m)
{
    size_t P = (size_t)m->head_dim, N = (size_t)m->state_dim;
    return (N * P + 2 * N + SSM_THREADS / P * P) * sizeof(float);
}

static size_t scan_kernel_shared(const struct scan *m)
{
    size_t N = (size_t)m->state_dim;
    return (SCAN_ROWS * 2 * N + (N == SCAN_REGISTERS ? 0 : N * SCAN_CHANNELS)) * sizeof(float);
}

bool ssm_supported(const struct cuda_backend *cu, const struct mixer *m, int layer,
                   struct error *err)
{
    int taps = m->kind == MIXER_SSM    ? m->ssm.conv_len
               : m->kind == MIXER_SCAN ? m->scan.conv_len
                                       : m->short_conv.conv_len;
    if (taps > SSM_MAX_TAPS)
        return error_set(err, "layer %d: a convolution of %d is not supported on cuda (%d at most)",
                         layer, taps, SSM_MAX_TAPS);
    if (m->kind == MIXER_SCAN) {
        const struct scan *d = &m->scan;
        if (scan_kernel_shared(d) > cu->shared_limit)
            return error_set(err, "layer %d: a scan of %d values is not supported on cuda", layer,
                             d->state_dim);
        if (d->dt_norm.kind > NORM_RMS || d->b_norm.kind > NORM_RMS || d->c_norm.kind > NORM_RMS)
            return network_refuse(err, layer, "such a norm of a selective scan is", "cuda");
    }
    if (m->kind != MIXER_SSM)
        return true;
    if (m->ssm.head_dim > SSM_THREADS || scan_shared(&m->ssm) > cu->shared_limit)
        return error_set(err, "layer %d: state-space heads of %d x %d are not supported on cuda",
                         layer, m->ssm.state_dim, m->ssm.head_dim);
    if (m->ssm.norm.kind == NORM_LAYER)
        return network_refuse(err, layer, "LayerNorm of a state-space model is", "cuda");
    if (m->ssm.w_z && m->ssm.in_scale[0] != 0)
        return network_refuse(err, layer, "factors beside a gate with its own matrix are", "cuda");
    return true;
}

bool ssm_prepare(struct cuda_backend *cu, const struct bounds *b, struct error *err)
{
    size_t in = 0, channels = 0, heads = 0, values = 0, tokens = (size_t)b->max_tokens;
    size_t low = 0, rank = 0, gates = 0;
    for (int i = 0; i < cu->net->n_layers; i++) {
        const struct mixer *m = &cu->net->layers[i].mixer;
        bool is_ssm = m->kind == MIXER_SSM;
        if (m->kind == MIXER_SCAN) {
            const struct scan *d = &m->scan;
            size_t I = (size_t)d->n_channels, R = (size_t)d->dt_rank;
            in = 2 * I > in ? 2 * I : in;
            channels = I > channels ? I : channels;
            heads = I > heads ? I : heads;
            values = I > values ? I : values;
            low = (size_t)d->w_x->n_out > low ? (size_t)d->w_x->n_out : low;
            rank = R > rank ? R : rank;
        }
        if (!is_ssm && m->kind != MIXER_SHORT_CONV)
            continue;
        size_t n = (size_t)(is_ssm ? m->ssm.w_in : m->short_conv.w_in)->n_out;
        size_t c = is_ssm ? (size_t)ssm_channels(&m->ssm) : 0;
        size_t h = is_ssm ? (size_t)m->ssm.n_heads : 0, v = (size_t)mixer_out(m)->n_in;
        size_t z = is_ssm && m->ssm.w_z ? (size_t)m->ssm.w_z->n_out : 0;
        in = n > in ? n : in;
        gates = z > gates ? z : gates;
        channels = c > channels ? c : channels;
        heads = h > heads ? h : heads;
        values = v > values ? v : values;
    }
    if (!in)
        return true;
    struct ssm_scratch *s = (struct ssm_scratch *)mem_zalloc(1, sizeof *s);
    cu->ssm = s;
    const struct device_buffer list[] = {
        {(void **)&s->z, tokens * gates * 4},     {(void **)&s->in, tokens * in * 4},
        {(void **)&s->uc, tokens * channels * 4}, {(void **)&s->dt, tokens * heads * 4},
        {(void **)&s->o, tokens * values * 4},    {(void **)&s->low, tokens * low * 4},
        {(void **)&s->low_dt, tokens * rank * 4}};
    return cuda_own(cu, list, (int)(sizeof list / sizeof *list), err);
}

void ssm_close(struct cuda_backend *cu)
{
    mem_free(cu->ssm);
}

static struct ssm_args args_of(struct cuda_backend *cu, const struct mixer *m, int layer,
                               const struct step *s)
{
    const struct ssm_scratch *b = cu->ssm;
    struct ssm_args p = {};
    p.step = *s;
    p.in = b->in;
    p.states = cu->kv[layer].state;
    p.len = mixer_state_len(m);
    p.uc = b->uc;
    p.dt = b->dt;
    p.o = b->o;
    if (m->kind == MIXER_SHORT_CONV) {
        const struct short_conv *c = &m->short_conv;
        p.width = c->w_in->n_out;
        p.gated = true;
        p.conv = c->conv;
        p.conv_bias = c->bias;
        p.taps = c->conv_len;
        p.channels = c->w_out->n_in;
        return p;
    }
    if (m->kind == MIXER_SCAN) {
        const struct scan *c = &m->scan;
        p.width = c->w_in->n_out;
        p.conv = c->conv;
        p.conv_bias = c->conv_bias;
        p.taps = c->conv_len;
        p.channels = c->n_channels;
        p.decay = c->decay;
        p.skip = c->skip;
        return p;
    }
    const struct ssm *d = &m->ssm;
    p.width = d->w_in->n_out;
    p.first = d->w_z ? 0 : d->n_heads * d->head_dim;
    p.z = d->w_z ? b->z : b->in;
    p.z_width = d->w_z ? d->w_z->n_out : p.width;
    p.sigmoid_gate = d->sigmoid_gate;
    p.conv = d->conv;
    p.conv_bias = d->conv_bias;
    p.taps = d->conv_len;
    p.channels = ssm_channels(d);
    p.decay = d->decay;
    p.dt_bias = d->dt_bias;
    p.skip = d->skip;
    p.dt_min = d->dt_min;
    p.dt_max = d->dt_max;
    p.n_heads = d->n_heads;
    p.n_groups = d->n_groups;
    p.head_dim = d->head_dim;
    p.state_dim = d->state_dim;
    p.gain = d->norm.gain;
    p.eps = d->norm.eps;
    p.n_norms = d->norm.kind == NORM_NONE ? 0 : d->n_norms > 1 ? d->n_norms : 1;
    p.norm_first = d->norm_first;
    return p;
}

/* y = x W^T */
static void scan_product(struct cuda_backend *cu, const struct weight *w, float *x, int rows,
                         float *y)
{
    struct rows in = rows_of(x, rows, w->n_in);
    struct pick_case c = {};
    c.rows = rows;
    c.w = cuda_matrix(w);
    c.x = &in;
    c.y = y;
    pick_run(cu, PICK_LINEAR, &c, N_STAGES);
}

static void launch_conv(struct cuda_backend *cu, const struct ssm_args &p)
{
    int columns = p.channels + p.n_heads;
    cuda_launch(cu, conv_rows, dim3((unsigned)ceil_div(columns, 128), (unsigned)p.step.n_tokens),
                128, 0, LAUNCH_EARLY, p);
    if (p.taps > 1)
        cuda_launch(cu, conv_states,
                    dim3((unsigned)ceil_div(p.channels, 128), (unsigned)p.step.n_seqs), 128, 0,
                    LAUNCH_EARLY, p);
}

static struct rows scan_mix(struct cuda_backend *cu, const struct mixer *m, int layer)
{
    const struct ssm_scratch *b = cu->ssm;
    const struct scan *d = &m->scan;
    struct step s = cuda_step(cu);
    const struct mixer_product product = {cuda_matrix(d->w_in), b->in};
    mixer_products(cu, &m->block.in, &product, 1);
    struct scan_args p = {};
    p.s = args_of(cu, m, layer, &s);
    p.low = b->low;
    p.low_dt = b->low_dt;
    p.rank = d->dt_rank;
    p.state_dim = d->state_dim;
    const struct norm *norms[] = {&d->dt_norm, &d->b_norm, &d->c_norm};
    for (int i = 0; i < 3; i++)
        p.norm[i] = cuda_gain(cu, norms[i]);
    step_mark(cu);
    launch_conv(cu, p.s);
    scan_product(cu, d->w_x, b->uc, s.n_tokens, b->low);
    cuda_launch(cu, scan_norms, dim3((unsigned)s.n_tokens), 96, 0, LAUNCH_EARLY, p);
    scan_product(cu, d->w_dt, b->low_dt, s.n_tokens, b->dt);
    auto kernel = d->state_dim == SCAN_REGISTERS ? scan_kernel<SCAN_REGISTERS> : scan_kernel<0>;
    cuda_launch(cu, kernel,
                dim3((unsigned)ceil_div(d->n_channels, SCAN_CHANNELS), (unsigned)s.n_seqs),
                SCAN_CHANNELS, scan_kernel_shared(d), LAUNCH_EARLY, p);
    step_mark_end(cu, STAGE_ATTENTION);
    return rows_of(b->o, s.n_tokens, d->n_channels);
}

static void scale_parts(struct cuda_backend *cu, const struct ssm *d, float *in, int rows)
{
    struct ssm_factors f = {};
    int width = d->w_in->n_out;
    for (int i = 0, end = 0; i < SSM_PARTS; i++) {
        f.end[i] = end += ssm_part(d, i);
        f.by[i] = d->in_scale[i];
    }
    cuda_launch(cu, ssm_factors_kernel, dim3((unsigned)ceil_div(width, 256), (unsigned)rows), 256,
                0, LAUNCH_EARLY, in, width, f);
}

struct rows ssm_mix(struct cuda_backend *cu, const struct mixer *m, int layer)
{
    if (m->kind == MIXER_SCAN)
        return scan_mix(cu, m, layer);
    const struct ssm_scratch *b = cu->ssm;
    bool is_ssm = m->kind == MIXER_SSM;
    struct step s = cuda_step(cu);
    struct mixer_product products[2] = {
        {cuda_matrix(is_ssm ? m->ssm.w_in : m->short_conv.w_in), b->in}, {NULL, NULL}};
    bool apart = is_ssm && m->ssm.w_z;
    if (apart)
        products[1] = mixer_product{cuda_matrix(m->ssm.w_z), b->z};
    mixer_products(cu, &m->block.in, products, apart ? 2 : 1);
    if (is_ssm && m->ssm.in_scale[0] != 0)
        scale_parts(cu, &m->ssm, b->in, s.n_tokens);
    struct ssm_args p = args_of(cu, m, layer, &s);
    unsigned rows = (unsigned)s.n_tokens, seqs = (unsigned)s.n_seqs;
    step_mark(cu);
    launch_conv(cu, p);
    if (is_ssm) {
        cuda_launch(cu, ssm_scan, dim3((unsigned)p.n_heads, seqs), SSM_THREADS,
                    scan_shared(&m->ssm), LAUNCH_EARLY, p);
        cuda_launch(cu, ssm_gate, dim3((unsigned)(p.n_norms ? p.n_norms : 1), rows), SSM_THREADS, 0,
                    LAUNCH_EARLY, p);
    }
    step_mark_end(cu, STAGE_ATTENTION);
    return rows_of(b->o, s.n_tokens, mixer_out(m)->n_in);
}
