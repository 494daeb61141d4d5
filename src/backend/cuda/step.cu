/*
 * Taking over a step: its tables to the device, tokens that the step before chose, the turns of its
 * positions; and gathering the rows whose logits are wanted.
 */
#include "backend/cuda/cuda.h"

#include <math.h>

/* Copies the step's ints out of pinned host memory and makes the table of rotations: cos and sin of
 * every row's position, once per step instead of once per layer. Sums of a router begin at zero. */
static __global__ void step_load_kernel(const int32_t *host, int32_t *dev, int n_ints,
                                        int tokens_at, const int32_t *chosen, int pos_at,
                                        int n_tokens, const float *freq, int half, float mscale,
                                        float2 *rope, uint64_t *sums)
{
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x), stride = (int)(gridDim.x * blockDim.x);
    for (int j = i; j < n_ints; j += stride) {
        int32_t v = host[j];
        if (v < 0 && j >= tokens_at && j < tokens_at + n_tokens)
            v = chosen[-1 - v]; /* not known to the host when the step was begun */
        dev[j] = v;
    }
    for (int j = i; j < n_tokens * half; j += stride) {
        float angle = (float)host[pos_at + j / half] * freq[j % half], s, c;
        sincosf(angle, &s, &c);
        rope[j] = make_float2(c * mscale, s * mscale);
    }
    for (int j = i; j < SUM_WORDS; j += stride)
        sums[j] = 0;
}

void step_load(struct cuda_backend *cu, int n_ints)
{
    const struct step_layout *l = &cu->layout;
    int half = cu->shape.n_rot / 2, work = l->n_tokens * half;
    work = work > n_ints ? work : n_ints;
    int blocks = ceil_div(work, 256);
    cuda_log_step(cu);
    cuda_launch(cu, step_load_kernel, dim3((unsigned)(blocks < 256 ? blocks : 256)), 256, 0,
                LAUNCH_PLAIN, cu->step_mapped, cu->step_dev, n_ints, l->tokens, cu->chosen, l->pos,
                l->n_tokens, cu->rope_freq, half, cu->shape.rope_mscale, cu->rope, cu->route_sums);
}

static __global__ void step_gather_kernel(const float *src, const int32_t *rows, float *dst,
                                          int width)
{
    dependency_wait();
    dependency_trigger();
    int k = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (k < width)
        dst[(size_t)blockIdx.y * (size_t)width + (size_t)k] =
            src[(size_t)rows[blockIdx.y] * (size_t)width + (size_t)k];
}

void step_gather(struct cuda_backend *cu, const struct step *s, const float *src, float *dst,
                 int width)
{
    if (s->n_out)
        cuda_launch(cu, step_gather_kernel,
                    dim3((unsigned)ceil_div(width, 256), (unsigned)s->n_out), 256, 0, LAUNCH_EARLY,
                    src, s->out_rows, dst, width);
}
