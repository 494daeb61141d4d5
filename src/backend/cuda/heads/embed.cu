/*
 * Both ends of a network: embedding rows, embeddings per layer (Gemma 3n), and scale and softcap of
 * the logits. All elementwise. Single elements of a tile are dequantised by format.cuh.
 */
#include "backend/cuda/core/act.cuh"
#include "backend/cuda/heads/embed.cuh"
#include "backend/cuda/core/format.cuh"

#include <math.h>

/* Element (row, k) of a matrix. */
DEVICE float matrix_value(const struct matrix &w, int row, int k)
{
    int i = 0;
    while (i + 1 < w.n_seg && row >= w.seg[i + 1].row0)
        i++;
    const struct seg *s = &w.seg[i];
    int r = row - s->row0, tile = s->tile0 + r / TILE_ROWS;
    return tile_value(s, tile_address(w, s, 0, tile, k / TILE_K), r % TILE_ROWS, k % TILE_K);
}

/* x[t,:] = scale * table[tokens[t],:]. Grid: (pieces of 256 columns, rows). */
static __global__ void embed_kernel(const struct matrix w, const int32_t *tokens, float scale,
                                    float *x)
{
    dependency_wait();
    dependency_trigger();
    int t = (int)blockIdx.y, k = (int)(blockIdx.x * TILE_K + threadIdx.x);
    if (k < w.n_in)
        x[(size_t)t * (size_t)w.n_in + (size_t)k] = scale * matrix_value(w, tokens[t], k);
}

void embed_tokens(struct cuda_backend *cu, const struct matrix *w, const struct step *s,
                  float scale, float *x)
{
    cuda_launch(cu, embed_kernel, dim3((unsigned)w->n_kt, (unsigned)s->n_tokens), TILE_K, 0,
                LAUNCH_EARLY, *w, s->tokens, scale, x);
}

/* The same for a table that starts at token `first`. Tokens outside it give zeros. */
static __global__ void embed_part_kernel(const struct matrix w, const int32_t *tokens, int first,
                                         float scale, float *x)
{
    dependency_wait();
    dependency_trigger();
    int t = (int)blockIdx.y, k = (int)(blockIdx.x * TILE_K + threadIdx.x), row = tokens[t] - first;
    bool here = row >= 0 && row < w.n_out;
    if (k < w.n_in)
        x[(size_t)t * (size_t)w.n_in + (size_t)k] = here ? scale * matrix_value(w, row, k) : 0.0f;
}

void embed_part(struct cuda_backend *cu, const struct matrix *w, const struct step *s, int first,
                float scale, float *x)
{
    cuda_launch(cu, embed_part_kernel, dim3((unsigned)w->n_kt, (unsigned)s->n_tokens), TILE_K, 0,
                LAUNCH_EARLY, *w, s->tokens, first, scale, x);
}

/* x[t,:] = embeds[tokens[t] - n_vocab][:] where that is a row. Grid as above. */
static __global__ void embed_given_kernel(const float *const *embeds, const int32_t *tokens,
                                          int n_vocab, int width, float *x)
{
    dependency_wait();
    dependency_trigger();
    int t = (int)blockIdx.y, k = (int)(blockIdx.x * TILE_K + threadIdx.x), i = tokens[t] - n_vocab;
    if (k < width && i >= 0)
        x[(size_t)t * (size_t)width + (size_t)k] = embeds[i][k];
}

void embed_given(struct cuda_backend *cu, const float *const *embeds, int n_vocab,
                 const struct step *s, float *x)
{
    int width = cu->shape.n_embd;
    cuda_launch(cu, embed_given_kernel,
                dim3((unsigned)ceil_div(width, TILE_K), (unsigned)s->n_tokens), TILE_K, 0,
                LAUNCH_EARLY, embeds, s->tokens, n_vocab, width, x);
}

/* x[t,:] += table[index[t] + offset,:]. Grid as above. */
static __global__ void embed_add_kernel(const struct matrix w, const int32_t *index, int offset,
                                        float *x)
{
    dependency_wait();
    dependency_trigger();
    int t = (int)blockIdx.y, k = (int)(blockIdx.x * TILE_K + threadIdx.x);
    if (k < w.n_in)
        x[(size_t)t * (size_t)w.n_in + (size_t)k] += matrix_value(w, index[t] + offset, k);
}

void embed_add(struct cuda_backend *cu, const struct matrix *w, const int32_t *index, int offset,
               float *x, int rows)
{
    cuda_launch(cu, embed_add_kernel, dim3((unsigned)w->n_kt, (unsigned)rows), TILE_K, 0,
                LAUNCH_EARLY, *w, index, offset, x);
}

/* Grid: (pieces of TILE_K columns). */
static __global__ void embed_row_kernel(const struct matrix w, int row, float *y, int stride)
{
    int k = (int)(blockIdx.x * TILE_K + threadIdx.x);
    if (k < w.n_in)
        y[(size_t)blockIdx.x * (size_t)stride + threadIdx.x] = matrix_value(w, row, k);
}

void embed_row(struct cuda_backend *cu, const struct matrix *w, int row, float *y, int stride)
{
    cuda_launch(cu, embed_row_kernel, dim3((unsigned)w->n_kt), TILE_K, 0, LAUNCH_PLAIN, *w, row, y,
                stride);
}

/* In place, from x Wp^T: e = (norm(project_scale * e) + table_scale * T[token]) * scale, each of
 * P values. Grid: (layers, rows). */
static __global__ void __launch_bounds__(EMBED_THREADS)
    embed_layers_kernel(const __grid_constant__ struct embed_layers_args p)
{
    SHARED_BYTES(shared);
    float *part = (float *)shared; /* sums of squares, per warp */
    int layer = (int)blockIdx.x, tid = (int)threadIdx.x, row = 0;
    float *e = p.e + ((size_t)blockIdx.y * gridDim.x + (size_t)layer) * (size_t)p.width;
    dependency_wait();
    dependency_trigger();
    float squares = 0.0f, rms = 1.0f;
    for (int i = tid; i < p.width; i += EMBED_THREADS)
        squares += e[i] * e[i];
    squares = warp_sum(squares * p.project_scale * p.project_scale);
    if (lane_id() == 0)
        part[warp_id()] = squares;
    __syncthreads();
    squares = warp_sum(lane_id() < EMBED_THREADS / 32 ? part[lane_id()] : 0.0f);
    if (p.norm.gain)
        rms = rsqrtf(squares / (float)p.width + p.norm.eps);
    row = p.tokens[blockIdx.y];
    row = row < p.table.n_out ? row : p.pad;
    for (int i = tid; i < p.width; i += EMBED_THREADS) {
        float v = e[i] * p.project_scale * rms * (p.norm.gain ? p.norm.gain[i] : 1.0f);
        e[i] = (v + p.table_scale * matrix_value(p.table, row, layer * p.width + i)) * p.scale;
    }
}

void embed_layers(struct cuda_backend *cu, const struct embed_layers_args &p, int n_layers,
                  int rows)
{
    cuda_launch(cu, embed_layers_kernel, dim3((unsigned)n_layers, (unsigned)rows), EMBED_THREADS,
                128, LAUNCH_EARLY, p);
}

/* h[t,:] = act(h[t,:], e[row_of(t), layer,:]). Grid: (pieces of columns, rows). */
static __global__ void __launch_bounds__(EMBED_THREADS)
    embed_gate_kernel(const __grid_constant__ struct embed_gate_args p)
{
    int i = (int)(blockIdx.x * EMBED_THREADS + threadIdx.x), t = (int)blockIdx.y;
    dependency_wait();
    dependency_trigger();
    if (i >= p.width)
        return;
    int row = p.row_of ? p.row_of[t] : t;
    float *h = p.h + (size_t)t * (size_t)p.width + (size_t)i;
    *h = gated(
        p.act, *h,
        p.e[((size_t)row * (size_t)p.n_layers + (size_t)p.layer) * (size_t)p.width + (size_t)i]);
}

void embed_gate(struct cuda_backend *cu, const struct embed_gate_args &p, int rows)
{
    cuda_launch(cu, embed_gate_kernel,
                dim3((unsigned)ceil_div(p.width, EMBED_THREADS), (unsigned)rows), EMBED_THREADS, 0,
                LAUNCH_EARLY, p);
}

/* l = cap * tanh(scale * l / cap), or scale * l without a cap. */
static __global__ void __launch_bounds__(EMBED_THREADS)
    embed_logits_kernel(float *l, size_t n, float scale, float cap)
{
    size_t i = (size_t)blockIdx.x * EMBED_THREADS + threadIdx.x;
    dependency_wait();
    dependency_trigger();
    if (i < n)
        l[i] = cap != 0.0f ? cap * tanhf(scale * l[i] / cap) : scale * l[i];
}

void embed_logits(struct cuda_backend *cu, float *logits, size_t n, float scale, float cap)
{
    cuda_launch(cu, embed_logits_kernel, dim3((unsigned)((n + EMBED_THREADS - 1) / EMBED_THREADS)),
                EMBED_THREADS, 0, LAUNCH_EARLY, logits, n, scale, cap);
}
