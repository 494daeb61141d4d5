/*
 * Attention: rotation and storage of new keys, the choice of a kernel for softmax(q K^T) V over the
 * paged cache, and the kernel for what no other takes (float caches, odd head sizes): a warp per
 * (row, head), plain floats.
 */
#include "backend/cuda/attn.cuh"

#include <math.h>

/* One warp: norm (gain may be NULL) and rotation of a head of D floats, in place in shared memory.
 */
DEVICE void prepare_head(float *head, int D, const float *gain, float eps, const float2 *rope,
                         int n_rot)
{
    int lane = lane_id(), half = n_rot >> 1;
    __syncwarp();
    if (gain) {
        float sum = 0.0f;
        for (int i = lane; i < D; i += 32)
            sum += head[i] * head[i];
        float rms = rsqrtf(warp_sum(sum) / (float)D + eps);
        for (int i = lane; i < D; i += 32)
            head[i] = head[i] * rms * gain[i];
        __syncwarp();
    }
    for (int i = lane; i < half; i += 32) {
        float2 cs = rope[i];
        float a = head[i], b = head[i + half];
        head[i] = a * cs.x - b * cs.y;
        head[i + half] = b * cs.x + a * cs.y;
    }
    __syncwarp();
}

DEVICE size_t kv_index(const struct kv_view &kv, int slot, int head)
{
    int page = slot / kv.page_len, off = slot - page * kv.page_len;
    return (((size_t)page * (size_t)kv.n_kv + (size_t)head) * (size_t)kv.page_len + (size_t)off) *
           (size_t)kv.head_dim;
}

DEVICE void kv_put(const uint8_t *base, int type, size_t at, float v)
{
    if (type == DT_F32)
        ((float *)base)[at] = v;
    else
        ((uint16_t *)base)[at] = type == DT_F16 ? float_to_half(v) : float_to_bf16(v);
}

DEVICE float kv_get(const uint8_t *base, int type, size_t at)
{
    if (type == DT_F32)
        return ((const float *)base)[at];
    uint32_t h = ((const uint16_t *)base)[at];
    return type == DT_F16 ? half_to_float(h) : bf16_to_float(h);
}

/* q, k, v of every row from their raw projections. Blocks: x over heads, 4 a block; y over rows. */
static __global__ void __launch_bounds__(128)
    attn_rotate_kernel(const __grid_constant__ struct attn_args p, const float *raw, float *q)
{
    SHARED_BYTES(shared);
    dependency_wait();
    dependency_trigger();
    int D = p.kv.head_dim, H = p.n_heads, K = p.kv.n_kv, t = (int)blockIdx.y;
    int h = (int)blockIdx.x * 4 + warp_id();
    if (h >= H + 2 * K)
        return;
    float *head = (float *)shared + warp_id() * D;
    const float *from = raw + ((size_t)t * (size_t)(H + 2 * K) + (size_t)h) * (size_t)D;
    for (int i = lane_id(); i < D; i += 32)
        head[i] = from[i];
    if (h < H + K)
        prepare_head(head, D, h < H ? p.q_norm : p.k_norm, p.eps,
                     p.step.rope + (size_t)t * (size_t)(p.n_rot >> 1), p.n_rot);
    else
        __syncwarp();
    int slot = p.step.slot[t];
    if (h < H) {
        for (int i = lane_id(); i < D; i += 32)
            q[((size_t)t * (size_t)H + (size_t)h) * (size_t)D + (size_t)i] = head[i];
    } else if (slot >= 0) {
        bool is_k = h < H + K;
        size_t at = kv_index(p.kv, slot, h - H - (is_k ? 0 : K));
        for (int i = lane_id(); i < D; i += 32)
            kv_put(is_k ? p.kv.k : p.kv.v, p.kv.type, at + (size_t)i, head[i]);
    }
}

/* The plain kernel: a warp per (row, head) for rows [first, n_tokens). */
static __global__ void __launch_bounds__(128)
    attn_any_kernel(const __grid_constant__ struct attn_args p, int first)
{
    SHARED_BYTES(shared);
    dependency_wait();
    dependency_trigger();
    int D = p.kv.head_dim, H = p.n_heads, lane = lane_id(), w = warp_id();
    int h = (int)blockIdx.x * 4 + w, t = first + (int)blockIdx.y;
    if (h >= H)
        return;
    float *q = (float *)shared + w * (2 * D + 32), *acc = q + D, *prob = acc + D;
    size_t at = ((size_t)t * (size_t)H + (size_t)h) * (size_t)D;
    int seq = p.step.seq_of[t], last = p.step.pos[t], kv_head = h * p.kv.n_kv / H;
    const int32_t *pages = p.step.pages + (size_t)seq * (size_t)p.step.head[STEP_PAGE_STRIDE];
    for (int i = lane; i < D; i += 32) {
        q[i] = p.q[at + (size_t)i] * p.scale;
        acc[i] = 0.0f;
    }
    __syncwarp();
    float top = -INFINITY, total = 0.0f;
    int from = p.window && last - p.window + 1 > 0 ? last - p.window + 1 : 0;
    if (p.step.slot[t] < 0)
        from = last + 1;
    for (int base = from; base <= last; base += 32) {
        int key = base + lane;
        float s = -INFINITY;
        if (key <= last) {
            size_t k = kv_index(
                p.kv, pages[key / p.kv.page_len] * p.kv.page_len + key % p.kv.page_len, kv_head);
            s = 0.0f;
            for (int i = 0; i < D; i++)
                s += q[i] * kv_get(p.kv.k, p.kv.type, k + (size_t)i);
        }
        float m = fmaxf(top, warp_max(s)), shrink = expf(top - m);
        prob[lane] = expf(s - m);
        total = total * shrink + warp_sum(prob[lane]);
        top = m;
        __syncwarp();
        int n = min(32, last - base + 1);
        for (int i = lane; i < D; i += 32) {
            float v = acc[i] * shrink;
            for (int j = 0; j < n; j++) {
                int key2 = base + j;
                size_t k = kv_index(
                    p.kv, pages[key2 / p.kv.page_len] * p.kv.page_len + key2 % p.kv.page_len,
                    kv_head);
                v += prob[j] * kv_get(p.kv.v, p.kv.type, k + (size_t)i);
            }
            acc[i] = v;
        }
        __syncwarp();
    }
    for (int i = lane; i < D; i += 32)
        p.a[at + (size_t)i] = total > 0.0f ? acc[i] / total : 0.0f;
}

/* Host */

static struct attn_args attn_args_of(struct cuda_backend *cu, const struct attn_layer *l,
                                     const struct step *s)
{
    const struct shape *sh = &cu->shape;
    struct attn_args p = {};
    p.kv.k = (const uint8_t *)l->k;
    p.kv.v = (const uint8_t *)l->v;
    p.kv.n_kv = sh->n_kv_heads;
    p.kv.page_len = sh->page_len;
    p.kv.head_dim = sh->head_dim;
    p.kv.type = sh->kv_type;
    while (2 << p.kv.page_shift <= sh->page_len)
        p.kv.page_shift++;
    p.step = *s;
    p.q_norm = l->q_norm;
    p.k_norm = l->k_norm;
    p.n_heads = sh->n_heads;
    p.n_rot = sh->n_rot;
    p.window = l->window;
    p.eps = sh->norm_eps;
    p.scale = sh->attn_scale;
    p.split_acc = cu->split_acc;
    p.split_ml = cu->split_ml;
    p.split_count = cu->split_count;
    return p;
}

void attn_any(struct cuda_backend *cu, const struct attn_args &p, int first, int rows)
{
    size_t shared = (size_t)(4 * (2 * p.kv.head_dim + 32)) * 4;
    cuda_launch(cu, attn_any_kernel, dim3((unsigned)ceil_div(p.n_heads, 4), (unsigned)rows), 128,
                shared, LAUNCH_EARLY, p, first);
}

bool attn_tensor(const struct cuda_backend *cu)
{
    const struct shape *s = &cu->shape;
    return s->kv_type != DT_F32 && (s->head_dim == 64 || s->head_dim == 128) && s->page_len >= 16 &&
           (s->page_len & (s->page_len - 1)) == 0 && s->n_heads % s->n_kv_heads == 0;
}

void attn_rotate(struct cuda_backend *cu, const struct attn_layer *l, const struct step *s,
                 const float *qkv, float *q)
{
    struct attn_args p = attn_args_of(cu, l, s);
    int heads = p.n_heads + 2 * p.kv.n_kv;
    cuda_launch(cu, attn_rotate_kernel, dim3((unsigned)ceil_div(heads, 4), (unsigned)s->n_tokens),
                128, (size_t)(4 * p.kv.head_dim) * 4, LAUNCH_EARLY, p, qkv, q);
}

struct rows attn_attend(struct cuda_backend *cu, const struct attn_layer *l, const struct step *s,
                        bool raw)
{
    struct attn_args p = attn_args_of(cu, l, s);
    struct rows a = rows_of(cu->a, s->n_tokens, p.n_heads * p.kv.head_dim);
    p.q = raw ? cu->qkv : cu->q;
    p.a = a.floats;
    struct pick_case c = {};
    c.raw = raw;
    c.layer = l;
    c.step = s;
    c.attn = &p;
    c.out = &a;
    if ((c.rows = s->n_tokens - s->n_decode))
        pick_run(cu, PICK_PROMPT, &c, N_STAGES);
    if ((c.rows = s->n_decode))
        pick_run(cu, PICK_DECODE, &c, N_STAGES);
    if (a.halves && s->n_decode)
        rows_join_halves(cu, &a, s->n_decode);
    return a;
}
