/*
 * The small ops: taking over a step, gathering rows, the greedy token.
 */
#include "backend/cuda/cuda.h"

#include <math.h>

/* Copies the step's ints out of pinned host memory and makes the table of rotations: cos and sin of
 * every row's position, once per step instead of once per layer. */
static __global__ void load_step_kernel(const int32_t *host, int32_t *dev, int n_ints, int pos_at,
                                        int n_tokens, const float *freq, int half, float mscale,
                                        float2 *rope)
{
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x), stride = (int)(gridDim.x * blockDim.x);
    for (int j = i; j < n_ints; j += stride)
        dev[j] = host[j];
    for (int j = i; j < n_tokens * half; j += stride) {
        float angle = (float)host[pos_at + j / half] * freq[j % half], s, c;
        sincosf(angle, &s, &c);
        rope[j] = make_float2(c * mscale, s * mscale);
    }
}

void cuda_load_step(struct cuda_backend *cu, int n_ints)
{
    const struct step_layout *l = &cu->layout;
    int half = cu->shape.n_rot / 2, work = l->n_tokens * half;
    work = work > n_ints ? work : n_ints;
    int blocks = ceil_div(work, 256);
    cuda_launch(cu, load_step_kernel, dim3((unsigned)(blocks < 256 ? blocks : 256)), 256, 0,
                LAUNCH_PLAIN, cu->step_mapped, cu->step_dev, n_ints, l->pos, l->n_tokens,
                cu->rope_freq, half, cu->shape.rope_mscale, cu->rope);
}

static __global__ void gather_kernel(const float *src, const int32_t *rows, float *dst, int width)
{
    dependency_wait();
    dependency_trigger();
    int k = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (k < width)
        dst[(size_t)blockIdx.y * (size_t)width + (size_t)k] =
            src[(size_t)rows[blockIdx.y] * (size_t)width + (size_t)k];
}

void cuda_gather(struct cuda_backend *cu, const struct step *s, const float *src, float *dst,
                 int width)
{
    if (s->n_out)
        cuda_launch(cu, gather_kernel, dim3((unsigned)ceil_div(width, 256), (unsigned)s->n_out),
                    256, 0, LAUNCH_EARLY, src, s->out_rows, dst, width);
}

/* Greedy: the largest logit of each row, ties to the lower index, NaN never. Blocks: x over
 * stretches of a row, y over rows; the last block of a row to finish joins them. */
struct best {
    float value;
    int index;
};

DEVICE struct best better(struct best a, struct best b)
{
    bool take_b = b.value > a.value || (b.value == a.value && b.index < a.index);
    return take_b ? b : a;
}

DEVICE struct best block_best(struct best b, uint8_t *shared)
{
    struct best *part = (struct best *)shared;
    for (int i = 16; i; i >>= 1) {
        struct best o = {__shfl_xor_sync(FULL_WARP, b.value, i),
                         __shfl_xor_sync(FULL_WARP, b.index, i)};
        b = better(b, o);
    }
    __syncthreads();
    if (lane_id() == 0)
        part[warp_id()] = b;
    __syncthreads();
    for (int w = 0; w < (int)(blockDim.x >> 5); w++)
        b = better(b, part[w]);
    return b;
}

static __global__ void __launch_bounds__(256)
    argmax_kernel(const float *logits, int n_vocab, float *value, int32_t *index, int32_t *count,
                  int32_t *tokens)
{
    SHARED_BYTES(shared);
    int *is_last = (int *)(shared + 128);
    dependency_wait();
    dependency_trigger();
    int row = (int)blockIdx.y, blocks = (int)gridDim.x;
    const float *l = logits + (size_t)row * (size_t)n_vocab;
    struct best b = {-INFINITY, n_vocab};
    for (int i = (int)(blockIdx.x * blockDim.x + threadIdx.x); i < n_vocab;
         i += blocks * (int)blockDim.x) {
        struct best o = {l[i], i};
        b = better(b, o);
    }
    b = block_best(b, shared);
    if (threadIdx.x == 0) {
        value[row * blocks + (int)blockIdx.x] = b.value;
        index[row * blocks + (int)blockIdx.x] = b.index;
        __threadfence();
        *is_last = atomicAdd(&count[row], 1) == blocks - 1;
        if (*is_last)
            count[row] = 0;
    }
    __syncthreads();
    if (!*is_last)
        return;
    __threadfence();
    b.value = -INFINITY;
    b.index = n_vocab;
    for (int i = (int)threadIdx.x; i < blocks; i += (int)blockDim.x) {
        struct best o = {load_float_l2(value + row * blocks + i),
                         (int)bits_of(load_float_l2((const float *)index + row * blocks + i))};
        b = better(b, o);
    }
    b = block_best(b, shared);
    if (threadIdx.x == 0)
        tokens[row] = b.index < n_vocab ? b.index : 0;
}

void cuda_argmax(struct cuda_backend *cu, const float *logits, int rows)
{
    if (rows)
        cuda_launch(cu, argmax_kernel, dim3(ARGMAX_BLOCKS, (unsigned)rows), 256, 256, LAUNCH_EARLY,
                    logits, cu->shape.n_vocab, cu->argmax_value, cu->argmax_index, cu->argmax_count,
                    cu->tokens_mapped);
}
