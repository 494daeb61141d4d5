/*
 * add_norm and gather of the CPU backend. Rows are split over the threads. One thread computes a whole
 * row, so its bytes do not depend on other rows. Also the plain C instance of rowops_kernel.h.
 */
#define KERNELS     row_kernels_c
#define KERNELS_ISA ISA_REF
#include "backend/cpu/rowops_kernel.h"

#include "backend/cpu/ops.h"
#include "backend/cpu/pick.h"

struct norm_job {
    float *x, *n;   /* (rows, width) */
    const float *d; /* (rows, width) or NULL */
    const struct norm *norm;
    int rows, width;
    const struct row_kernels *kernels;
};

static void norm_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct norm_job *j = arg;
    for (int r = first; r < last; r++) {
        size_t at = (size_t)r * (size_t)j->width;
        j->kernels->add_norm(j->x + at, j->d ? j->d + at : NULL, j->norm, j->n + at, j->width);
    }
}

void cpu_add_norm(float *x, const float *d, const struct norm *norm, float *n, int rows, int width,
                  struct pool *pool, enum isa isa)
{
    struct norm_job j = {x, n, d, norm, rows, width, row_kernels(isa)};
    if (rows < 2 || pick_single_thread(SMALL_NORM, (size_t)rows * (size_t)width))
        norm_rows(&j, 0, 0, rows);
    else
        pool_each(pool, rows, POOL_EVEN, norm_rows, &j);
}

void cpu_norm_alone(const struct norm *norm, float *x, int rows, int width, enum isa isa)
{
    const struct row_kernels *kn = row_kernels(isa);
    for (int r = 0; norm->kind != NORM_NONE && r < rows; r++, x += width)
        kn->add_norm(x, NULL, norm, x, width);
}

struct scale_job {
    float *x;       /* (rows, width) */
    const float *d; /* (rows, width) or NULL */
    float scale;
    int width;
};

static void scale_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct scale_job *j = arg;
    size_t at = (size_t)first * (size_t)j->width, end = (size_t)last * (size_t)j->width;
    for (; j->d && at < end; at++)
        j->x[at] = (j->x[at] + j->d[at]) * j->scale;
    for (; at < end; at++)
        j->x[at] *= j->scale;
}

void cpu_add_scale(float *x, const float *d, float scale, int rows, int width, struct pool *pool)
{
    struct scale_job j = {x, d, scale, width};
    if (rows < 2 || pick_single_thread(SMALL_NORM, (size_t)rows * (size_t)width))
        scale_rows(&j, 0, 0, rows);
    else
        pool_each(pool, rows, POOL_EVEN, scale_rows, &j);
}

struct gather_job {
    const float *src;
    const int32_t *index;
    float *dst;
    int n, width;
};

static void gather_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct gather_job *j = arg;
    size_t width = (size_t)j->width;
    for (int i = first; i < last; i++)
        memcpy(j->dst + (size_t)i * width, j->src + (size_t)j->index[i] * width,
               width * sizeof(float));
}

void cpu_gather(const float *src, const int32_t *index, int n, int width, float *dst,
                struct pool *pool)
{
    struct gather_job j = {src, index, dst, n, width};
    if (n < 2 || pick_single_thread(SMALL_GATHER, (size_t)n * (size_t)width))
        gather_rows(&j, 0, 0, n);
    else
        pool_each(pool, n, POOL_EVEN, gather_rows, &j);
}
