/*
 * Parts of encoders: LayerNorm (fused with the residual add), activations without a gate, RoPE of
 * fp16 queries and keys, the result of a network without an LM head, and their scratch. A step of
 * an encoder contains whole texts, so attention (attn_encode.cu) reads keys and values from the
 * rows of the projection, not from the KV cache.
 */
#include "backend/cuda/heads/encoder.h"
#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/mixers/mixers.h"

extern "C" {
#include "base/mem.h"
}

#include <string.h>

struct norm_args {
    struct encoder_norm n;
    uint16_t *out; /* (n, padded) fp16 in the order of fragment_slot, or NULL */
    float *out_scale;
    int padded;
};

/* V adjacent columns, for vectorised loads and stores. */
template <int V> struct alignas(4 * V) columns {
    float v[V];
};
template <int V> DEVICE struct columns<V> &columns_at(const float *p, int k) {
    return *(struct columns<V> *)(p + k);
}

/* One warp per row, which is kept in shared memory. V: columns per load of a lane. */
template <int V>
static __global__ void __launch_bounds__(128)
    encoder_norm_kernel(const __grid_constant__ struct norm_args p)
{
    SHARED_BYTES(shared);
    typedef struct columns<V> piece;
    const struct encoder_norm &a = p.n;
    int warps = (int)blockDim.x >> 5, lane = lane_id(), width = a.width;
    int t = (int)blockIdx.x * warps + warp_id();
    float *row = (float *)shared + warp_id() * p.padded;
    dependency_wait();
    dependency_trigger();
    if (t >= a.n)
        return;
    size_t at = (size_t)t * (size_t)width;
    float sum = 0.0f, squares = 0.0f, top = 0.0f, mean = 0.0f;
#pragma unroll 4
    for (int k = lane * V; k < width; k += 32 * V) {
        piece x = columns_at<V>(a.x + at, k);
        if (a.d) {
            piece d = columns_at<V>(a.d + at, k);
#pragma unroll
            for (int i = 0; i < V; i++)
                x.v[i] += a.scale * d.v[i];
        }
        if (a.x_to)
            columns_at<V>(a.x_to + at, k) = x;
        columns_at<V>(row, k) = x;
#pragma unroll
        for (int i = 0; i < V; i++)
            sum += x.v[i];
    }
    if (a.gain.layer)
        mean = warp_sum(sum) / (float)width;
    for (int k = lane * V; k < width; k += 32 * V) { /* each lane reads back its own columns */
        piece x = columns_at<V>(row, k);
#pragma unroll
        for (int i = 0; i < V; i++)
            squares += (x.v[i] - mean) * (x.v[i] - mean);
    }
    float by = rsqrtf(warp_sum(squares) / (float)width + a.gain.eps);
    for (int k = lane * V; k < width; k += 32 * V) {
        piece x = columns_at<V>(row, k), g, b = {};
#pragma unroll
        for (int i = 0; i < V; i++)
            g.v[i] = 1.0f;
        if (a.gain.gain)
            g = columns_at<V>(a.gain.gain, k);
        if (a.gain.bias)
            b = columns_at<V>(a.gain.bias, k);
#pragma unroll
        for (int i = 0; i < V; i++) {
            x.v[i] = (x.v[i] - mean) * by * g.v[i] + b.v[i];
            top = fmaxf(top, fabsf(x.v[i]));
        }
        columns_at<V>(row, k) = x;
        if (a.y)
            columns_at<V>(a.y + at, k) = x;
    }
    if (!p.out)
        return;
    /* Scaled by a power of two so that the largest value is about 1024, as in residual.cu. */
    uint32_t e = warp_max_u32(bits_of(top)) >> 23;
    e = e < 16 ? 16 : e;
    float f = float_of((264 - e) << 23);
    uint16_t *out = p.out + (size_t)t * (size_t)p.padded;
    __syncwarp();
    for (int k = lane * 4; k < p.padded; k += 128) {
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i] = k + i < width ? row[k + i] * f : 0.0f;
        *(uint32_t *)(out + fragment_slot(k)) = pack_half2(v[0], v[1]);
        *(uint32_t *)(out + fragment_slot(k + 2)) = pack_half2(v[2], v[3]);
    }
    if (lane == 0)
        p.out_scale[t] = float_of((e - 10) << 23);
}

void encoder_norm(struct cuda_backend *cu, const struct encoder_norm &n)
{
    struct norm_args p = {};
    p.n = n;
    p.out = n.fp16 ? cu->forms.fp16 : NULL;
    p.out_scale = cu->forms.scale;
    p.padded = ceil_div(n.width, TILE_K) * TILE_K;
    int warps = 4; /* rows per block, limited by shared memory */
    while (warps > 1 && (size_t)(warps * p.padded) * 4 > cu->shared_limit)
        warps /= 2;
    auto kernel = n.width % 4 ? encoder_norm_kernel<1> : encoder_norm_kernel<4>;
    cuda_launch(cu, kernel, dim3((unsigned)ceil_div(n.n, warps)), warps * 32,
                (size_t)(warps * p.padded) * 4, LAUNCH_EARLY, p);
}

static __global__ void __launch_bounds__(256)
    encoder_act_kernel(const struct gating act, float *h, size_t n)
{
    size_t i = (size_t)blockIdx.x * 256 + threadIdx.x;
    dependency_wait();
    dependency_trigger();
    if (i < n)
        h[i] = gated(act, h[i], 1.0f);
}

void encoder_act(struct cuda_backend *cu, const struct gating &act, float *h, int rows, int width)
{
    size_t n = (size_t)rows * (size_t)width;
    cuda_launch(cu, encoder_act_kernel, dim3((unsigned)((n + 255) / 256)), 256, 0, LAUNCH_EARLY,
                act, h, n);
}

struct heads_args {
    const float *from;             /* (rows, width), or NULL: in place */
    uint16_t *to;                  /* (rows, width) */
    const float2 *rope;            /* (rows, half) */
    int width, dim, half, rotated; /* rotated: columns of the heads that get RoPE */
};

/* One block per row: RoPE on pairs of columns, conversion to fp16 of the others if the input is
 * floats. */
static __global__ void __launch_bounds__(256)
    encoder_heads_kernel(const __grid_constant__ struct heads_args p)
{
    size_t at = (size_t)blockIdx.x * (size_t)p.width;
    uint16_t *to = p.to + at;
    dependency_wait();
    dependency_trigger();
    auto get = [&](int k) {
        return p.from ? clamp_half(p.from[at + (size_t)k] * HIDDEN_SCALE) : half_to_float(to[k]);
    };
    const float2 *cos_sin = p.rope + (size_t)blockIdx.x * (size_t)p.half;
    int heads = p.half ? p.rotated / p.dim : 0;
    for (int i = (int)threadIdx.x; i < heads * p.half; i += 256) {
        int h = i / p.half, e = i - h * p.half, k = h * p.dim + e;
        float a = get(k), b = get(k + p.half);
        float2 cs = cos_sin[e];
        to[k] = float_to_half(clamp_half(a * cs.x - b * cs.y));
        to[k + p.half] = float_to_half(clamp_half(b * cs.x + a * cs.y));
    }
    for (int k = (int)threadIdx.x; k < p.width && p.from; k += 256)
        if (k >= heads * p.dim || k % p.dim >= 2 * p.half)
            to[k] = float_to_half(get(k));
}

void encoder_heads(struct cuda_backend *cu, const struct attn_layer *l, const struct step *s,
                   const float *qkv)
{
    struct heads_args p = {};
    if (l->norm[ATTN_Q].on || l->norm[ATTN_K].on || l->norm[ATTN_V].on) {
        attn_heads_packed(cu, l, s, qkv, cu->encoder->qkv);
        return;
    }
    p.from = qkv;
    p.to = cu->encoder->qkv;
    p.rope = l->rope;
    p.width = l->wqkv->n_out;
    p.dim = l->k_dim;
    p.half = l->rope ? l->n_rot / 2 : 0;
    p.rotated = (l->n_heads + l->n_kv) * l->k_dim;
    if (qkv || p.half)
        cuda_launch(cu, encoder_heads_kernel, dim3((unsigned)s->n_tokens), 256, 0, LAUNCH_EARLY, p);
}

/* The network's parts */

bool encoder_bidirectional(const struct network *net)
{
    return net->n_layers && net->layers[0].mixer.kind == MIXER_ATTENTION &&
           net->layers[0].mixer.attention.bidirectional;
}

bool encoder_supported(const struct network *net, struct error *err)
{
    for (int i = 0; i < net->n_layers; i++) {
        const struct mixer *m = &net->layers[i].mixer;
        const struct mlp *p = &net->layers[i].mlp;
        bool bidirectional = m->kind == MIXER_ATTENTION && m->attention.bidirectional;
        if (bidirectional != encoder_bidirectional(net))
            return network_refuse(err, i, "bidirectional attention in only some of the layers is",
                                  "cuda");
        bool norms = p->experts_in.kind || p->router.norm.kind;
        if (p->router.w && (p->experts_in.kind == NORM_LAYER || p->router.norm.kind == NORM_LAYER ||
                            (norms && (p->block.parallel || p->block.in.kind == NORM_LAYER))))
            return network_refuse(err, i, "this norm in a layer with experts is", "cuda");
        if (p->dense_out.kind == NORM_LAYER || p->experts_out.kind == NORM_LAYER ||
            p->embed.norm.kind == NORM_LAYER || m->block.out.kind == NORM_LAYER ||
            p->block.out.kind == NORM_LAYER)
            return network_refuse(err, i, "LayerNorm of a block's output is", "cuda");
    }
    return net->embed.layers.norm.kind != NORM_LAYER ||
           network_refuse(err, -1, "LayerNorm of embeddings per layer is", "cuda");
}

bool encoder_prepare(struct cuda_backend *cu, const struct bounds *b, struct error *err)
{
    const struct network *net = cu->net;
    struct network_max max;
    bool ungated = false;
    network_measure(net, &max);
    for (int i = 0; i < net->n_layers; i++)
        ungated |=
            net->layers[i].mlp.dense.gate_up && !activation_is_gated(net->layers[i].mlp.dense.act);
    struct encoder_scratch *s = (struct encoder_scratch *)mem_zalloc(1, sizeof *s);
    cu->encoder = s;
    size_t tokens = (size_t)b->max_tokens;
    struct device_buffer list[] = {
        {(void **)&s->qkv, encoder_bidirectional(net) ? tokens * (size_t)max.qkv * 2 : 0},
        {(void **)&s->hidden, ungated ? tokens * (size_t)max.n_ff * 4 : 0},
    };
    size_t out = (size_t)(b->max_out + 1) * (size_t)net->n_embd * sizeof(float);
    return cuda_own(cu, list, 2, err) &&
           (net->head.w || (cuda_pin((void **)&s->rows[0], NULL, out, err) &&
                            cuda_pin((void **)&s->rows[1], NULL, out, err)));
}

void encoder_close(struct cuda_backend *cu)
{
    for (int i = 0; cu->encoder && i < 2; i++)
        if (cu->encoder->rows[i])
            cudaFreeHost(cu->encoder->rows[i]);
    mem_free(cu->encoder);
}

struct rows encoder_mix(struct cuda_backend *cu, const struct norm *norm,
                        const struct attn_layer *l)
{
    struct step s = cuda_step(cu);
    struct rows n = {}, a = rows_of(cu->act.attn, s.n_tokens, l->n_heads * l->v_dim);
    struct pick_case c = cuda_case(cu, norm, &n);
    c.w = l->wqkv;
    c.attn.layer = l;
    c.step = &s;
    c.attn.out = &a;
    pick_run(cu, PICK_ENCODE, &c, N_STAGES); /* marks its stages itself */
    return a;
}

struct rows encoder_attend(struct cuda_backend *cu, const struct attn_layer *l)
{
    struct step s = cuda_step(cu);
    struct rows a = rows_of(cu->act.attn, s.n_tokens, l->n_heads * l->v_dim);
    step_mark(cu);
    if (attn_encode_fits(l)) {
        encoder_heads(cu, l, &s, cu->act.qkv);
        attn_encode(cu, l, &s, &a);
    } else {
        a = attn_bidirectional(cu, l, &s);
    }
    step_mark_end(cu, STAGE_ATTENTION);
    return a;
}

void encoder_head(struct cuda_backend *cu, const struct norm *norm)
{
    struct gain gain = cuda_gain(cu, norm);
    struct rows x = resid_plain(cu, &cu->resid);
    step_mark(cu);
    if (gain.gain) {
        rows_norm(cu, x.floats, gain, cu->act.logits, x.n, x.width);
    } else {
        size_t bytes = (size_t)x.n * (size_t)x.width * sizeof(float);
        CUDA_TRY(cu, cudaMemcpyAsync(cu->act.logits, x.floats, bytes, cudaMemcpyDeviceToDevice,
                                     cu->stream));
    }
    step_mark_end(cu, STAGE_HEAD);
}

void encoder_send(struct cuda_backend *cu, int buffer, int rows)
{
    size_t bytes = (size_t)rows * (size_t)cu->shape.n_embd * sizeof(float);
    if (rows)
        CUDA_TRY(cu, cudaMemcpyAsync(cu->encoder->rows[buffer], cu->act.logits, bytes,
                                     cudaMemcpyDeviceToHost, cu->stream));
}

void encoder_row(const struct cuda_backend *cu, int row, float *host)
{
    size_t n = (size_t)cu->shape.n_embd;
    const float *rows = cu->encoder->rows[(cu->queue.n_ended + 1) % 2];
    memcpy(host, rows + (size_t)row * n, n * sizeof(float));
}

void encoder_rows_put(struct cuda_backend *cu, const float *host, size_t bytes)
{
    for (int i = 0; i < 2; i++)
        memcpy(cu->encoder->rows[i], host, bytes);
}
