/*
 * Kernels of image towers: patches and pixels from pinned host memory, norms and bounds of features, rows joined to
 * features, and features added to a decoder's stream. All are elementwise and limited by bytes; the
 * products between them are those of every network.
 */
#include "backend/cuda/vision/tower.cuh"
#include "backend/cuda/core/act.cuh"

enum { THREADS = 256 };

static dim3 grid_of(int width, int rows)
{
    return dim3((unsigned)ceil_div(width, THREADS), (unsigned)rows);
}

DEVICE int column()
{
    return (int)(blockIdx.x * THREADS + threadIdx.x);
}
DEVICE size_t element(int row, int width, int k)
{
    return (size_t)row * (size_t)width + (size_t)k;
}

/* Grid: (pieces of columns, rows). */
static __global__ void __launch_bounds__(THREADS)
    tower_rows_kernel(const __grid_constant__ struct tower_rows_args p)
{
    int k = column(), t = (int)blockIdx.y;
    dependency_wait();
    dependency_trigger();
    if (k >= p.width + p.n_embd)
        return;
    float v = p.from[p.tokens[t] - p.first][k];
    if (k < p.width)
        p.patches[element(t, p.width, k)] = v;
    else
        p.x[element(t, p.n_embd, k - p.width)] = v;
}

/* Grid: (rows). The bytes of a patch pass through shared memory, so that host memory is read once and in order. */
static __global__ void __launch_bounds__(THREADS)
    tower_pixels_kernel(const __grid_constant__ struct tower_rows_args p)
{
    SHARED_BYTES(bytes);
    int t = (int)blockIdx.x, area = p.side * p.side, n = 3 * area;
    dependency_wait();
    dependency_trigger();
    int row = p.tokens[t] - p.first;
    const uint8_t *pixels = p.pixels[row];
    const float *position = p.from[row];
    for (int i = (int)threadIdx.x; pixels && n % 4 == 0 && i < n / 4; i += THREADS)
        ((uint32_t *)bytes)[i] = ((const uint32_t *)pixels)[i];
    for (int i = (int)threadIdx.x; pixels && n % 4 && i < n; i += THREADS)
        bytes[i] = pixels[i];
    for (int k = (int)threadIdx.x; k < p.n_embd; k += THREADS)
        p.x[element(t, p.n_embd, k)] = position[k];
    __syncthreads();
    for (int k = (int)threadIdx.x; k < p.width; k += THREADS) {
        int channel = p.channels_last ? k % 3 : k / (p.frames * area);
        int at = p.channels_last ? k : k % area * 3 + channel;
        p.patches[element(t, p.width, k)] = pixels ? p.values[channel * 256 + bytes[at]] : 0.0f;
    }
}

void tower_rows(struct cuda_backend *cu, const struct tower_rows_args &p)
{
    if (p.pixels)
        cuda_launch(cu, tower_pixels_kernel, dim3((unsigned)p.n), THREADS,
                    align_up((size_t)(3 * p.side * p.side), 16), LAUNCH_EARLY, p);
    else
        cuda_launch(cu, tower_rows_kernel, grid_of(p.width + p.n_embd, p.n), THREADS, 0,
                    LAUNCH_EARLY, p);
}

static __global__ void __launch_bounds__(THREADS)
    tower_add_kernel(const __grid_constant__ struct tower_add_args p)
{
    int k = column(), i = (int)blockIdx.y;
    dependency_wait();
    dependency_trigger();
    int row = p.tokens[p.row_of ? p.row_of[i] : i] - p.first;
    if (k < p.n_embd && row >= 0)
        p.x[element(i, p.n_embd, k)] += p.from[row][p.at + k];
}

void tower_add(struct cuda_backend *cu, const struct tower_add_args &p)
{
    cuda_launch(cu, tower_add_kernel, grid_of(p.n_embd, p.n), THREADS, 0, LAUNCH_EARLY, p);
}

static __global__ void __launch_bounds__(THREADS)
    tower_affine_kernel(float *x, const float *gain, const float *bias, int width)
{
    int k = column();
    dependency_wait();
    dependency_trigger();
    if (k >= width)
        return;
    size_t at = element((int)blockIdx.y, width, k);
    x[at] = (x[at] + (bias ? bias[k] : 0.0f)) * (gain ? gain[k] : 1.0f);
}

void tower_affine(struct cuda_backend *cu, float *x, const float *gain, const float *bias, int rows,
                  int width)
{
    cuda_launch(cu, tower_affine_kernel, grid_of(width, rows), THREADS, 0, LAUNCH_EARLY, x, gain,
                bias, width);
}

static __global__ void __launch_bounds__(THREADS)
    tower_join_kernel(const float *x, float *y, int each, int width, bool mean)
{
    int e = column(), r = (int)blockIdx.y;
    dependency_wait();
    dependency_trigger();
    if (e >= width)
        return;
    float sum = 0.0f;
    for (int i = 0; i < each; i++) {
        float v = x[element(r * each + i, width, e)];
        sum += v;
        if (!mean)
            y[element(r, width * each, e * each + i)] = v;
    }
    if (mean)
        y[element(r, width, e)] = sum / (float)each;
}

void tower_join(struct cuda_backend *cu, const float *x, float *y, int n, int each, int width,
                bool mean)
{
    cuda_launch(cu, tower_join_kernel, grid_of(width, n), THREADS, 0, LAUNCH_EARLY, x, y, each,
                width, mean);
}

static __global__ void __launch_bounds__(THREADS)
    tower_clip_kernel(const __grid_constant__ struct tower_clip_args p)
{
    int k = column(), r = (int)blockIdx.y;
    dependency_wait();
    dependency_trigger();
    if (k < p.width)
        p.to[element(r, p.to_stride, k)] =
            fminf(fmaxf(p.from[element(r, p.from_stride, k)], p.min), p.max);
}

void tower_clip(struct cuda_backend *cu, const struct tower_clip_args &p)
{
    cuda_launch(cu, tower_clip_kernel, grid_of(p.width, p.rows), THREADS, 0, LAUNCH_EARLY, p);
}

static __global__ void __launch_bounds__(THREADS)
    tower_place_kernel(const float *from, float *to, int width, int stride)
{
    int k = column(), r = (int)blockIdx.y;
    dependency_wait();
    dependency_trigger();
    if (k < width)
        to[element(r, stride, k)] = from[element(r, width, k)];
}

void tower_place(struct cuda_backend *cu, const float *from, float *to, int rows, int width,
                 int stride)
{
    cuda_launch(cu, tower_place_kernel, grid_of(width, rows), THREADS, 0, LAUNCH_EARLY, from, to,
                width, stride);
}

static __global__ void __launch_bounds__(THREADS)
    tower_act_kernel(const struct gating act, const float *gu, float *h, int width)
{
    int k = column(), r = (int)blockIdx.y, from = act.ungated ? width : 2 * width;
    dependency_wait();
    dependency_trigger();
    if (k < width)
        h[element(r, width, k)] = gated(act, gu[element(r, from, k)],
                                        act.ungated ? 1.0f : gu[element(r, from, width + k)]);
}

void tower_act(struct cuda_backend *cu, const struct gating &act, const float *gu, float *h,
               int rows, int width)
{
    cuda_launch(cu, tower_act_kernel, grid_of(width, rows), THREADS, 0, LAUNCH_EARLY, act, gu, h,
                width);
}
