/* The kernels of image towers (tower_kernels.cu), all of them elementwise, as tower.cu calls them. */
#ifndef STEEL_BACKEND_CUDA_TOWER_CUH
#define STEEL_BACKEND_CUDA_TOWER_CUH

#include "backend/cuda/core/cuda.h"

/* The rows that a step's tokens name, in host memory: the first `width` values go to `patches` (n, width), the next n_embd to
 * x (n, n_embd). */
struct tower_rows_args {
    const float *const *from;
    const int32_t *tokens; /* (n) index of the row, from `first` on */
    float *patches, *x;
    int first, n, width, n_embd;
    /* With pixels (struct pixel_form): those bytes become the patches, and rows have n_embd values. */
    const uint8_t *const *pixels;
    const float *values; /* (3, 256) */
    int side, frames;
    bool channels_last;
};
void tower_rows(struct cuda_backend *cu, const struct tower_rows_args &p);

/* x[i,:] += from[tokens[row_of(i)] - first][at..] where that is a row. row_of NULL: i itself. */
struct tower_add_args {
    const float *const *from;
    const int32_t *tokens, *row_of;
    float *x; /* (n, n_embd) */
    int first, n, at, n_embd;
};
void tower_add(struct cuda_backend *cu, const struct tower_add_args &p);

/* x = (x + bias) * gain; NULL = zeros, ones */
void tower_affine(struct cuda_backend *cu, float *x, const float *gain, const float *bias, int rows,
                  int width);

/* Of `each` adjacent rows of x (n * each, width) one row of y: interleaved (n, width * each), or their
 * mean (n, width). */
void tower_join(struct cuda_backend *cu, const float *x, float *y, int n, int each, int width,
                bool mean);

/* to[r, 0..width) = from[r, 0..width), bounded; rows of from_stride and to_stride. */
struct tower_clip_args {
    const float *from;
    float *to;
    float min, max;
    int rows, width, from_stride, to_stride;
};
void tower_clip(struct cuda_backend *cu, const struct tower_clip_args &p);

/* to[r, 0..width) = from[r, 0..width); rows of `stride` values in `to` */
void tower_place(struct cuda_backend *cu, const float *from, float *to, int rows, int width,
                 int stride);

/* h (rows, width) = act(g, u) of gu (rows, 2 width); kinds without a gate: of g (rows, width) */
void tower_act(struct cuda_backend *cu, const struct gating &act, const float *gu, float *h,
               int rows, int width);

#endif
