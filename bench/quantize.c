/*
 * Quantiser benchmark: for each type, the mean squared error over a Gaussian 4096 x 4096 matrix and the
 * speed of one core, as values and as megabytes of F16 input. With two files,
 *   quantize REFERENCE.gguf OTHER.gguf
 * it prints the error of each tensor of the second against the first, to compare files of other tools.
 */
#include "quant/quantize.h"
#include "base/mem.h"
#include "file/tensorfile.h"

#include <math.h>
#include <stdio.h>
#include <time.h>

enum { SIDE = 4096 };

/* CPU time of this thread: other programs on the machine do not count. */
static int64_t cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static double uniform(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return ((double)(z >> 11) + 0.5) * 0x1p-53;
}

static void gaussian(float *x, size_t n)
{
    uint64_t state = 42;
    for (size_t i = 0; i < n; i += 2) {
        double r = sqrt(-2 * log(uniform(&state))), a = 6.283185307179586 * uniform(&state);
        x[i] = (float)(r * cos(a));
        x[i + 1] = (float)(r * sin(a));
    }
}

static double squared_error(const float *a, const float *b, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        double e = (double)a[i] - (double)b[i];
        sum += e * e;
    }
    return sum;
}

static void bench_types(void)
{
    size_t n = (size_t)SIDE * SIDE;
    float *x = mem_alloc(n * sizeof *x), *y = mem_alloc(SIDE * sizeof *y);
    uint8_t *blocks = mem_alloc(n * sizeof *x);
    uint16_t *half = mem_alloc(n * sizeof *half);
    gaussian(x, n);
    quantize_rows(DT_F16, x, half, SIDE, SIDE, NULL);
    printf("%-8s %12s %12s %14s\n", "type", "mse", "Mvalues/s", "MB/s of F16");
    for (int t = DT_F32 + 1; t < DT_COUNT; t++) {
        if (!quantize_supported((enum dtype)t))
            continue;
        size_t row = dtype_bytes((enum dtype)t, SIDE);
        int64_t best = INT64_MAX;
        /* like the commands: fp16 in, blocks out, a few rows at a time */
        float *rows = mem_alloc(16 * SIDE * sizeof *rows);
        for (int repeat = 0; repeat < 2; repeat++) {
            int64_t start = cpu_ns();
            for (size_t r = 0; r < SIDE; r += 16) {
                quantize_load(DT_F16, half + r * SIDE, rows, 16 * SIDE);
                quantize_rows((enum dtype)t, rows, blocks + r * row, 16, SIDE, NULL);
            }
            int64_t took = cpu_ns() - start;
            best = took < best ? took : best;
        }
        mem_free(rows);
        quantize_rows((enum dtype)t, x, blocks, SIDE, SIDE, NULL);
        double sum = 0;
        for (size_t r = 0; r < SIDE; r++) {
            quant_dequantize((enum dtype)t, blocks + r * row, y, SIDE);
            sum += squared_error(x + r * SIDE, y, SIDE);
        }
        double rate = (double)n / (double)best * 1e3;
        printf("%-8s %12.4e %12.0f %14.0f\n", dtype_name((enum dtype)t), sum / (double)n, rate,
               2 * rate);
    }
    mem_free(x);
    mem_free(y);
    mem_free(half);
    mem_free(blocks);
}

static bool compare(const char *reference, const char *other, struct error *err)
{
    struct tensorfile *a = tensorfile_open(reference, err);
    struct tensorfile *b = a ? tensorfile_open(other, err) : NULL;
    for (size_t i = 0; b && i < a->n_tensors; i++) {
        const struct tensor *s = &a->tensors[i], *t = tensorfile_find(b, s->name);
        if (!t || s->n_dims < 2 || s->dims[0] != t->dims[0] || s->dims[1] != t->dims[1])
            continue;
        size_t n = (size_t)s->dims[0], rows = (size_t)(s->dims[1] * s->dims[2]);
        float *x = mem_alloc(n * sizeof *x), *y = mem_alloc(n * sizeof *y);
        double sum = 0;
        for (size_t r = 0; r < rows; r++) {
            quant_dequantize(s->type, s->data + r * dtype_bytes(s->type, n), x, n);
            quant_dequantize(t->type, t->data + r * dtype_bytes(t->type, n), y, n);
            sum += squared_error(x, y, n);
        }
        printf("%-40s %-8s %12.4e\n", s->name, t->type_name, sum / (double)(n * rows));
        mem_free(x);
        mem_free(y);
    }
    bool ok = b != NULL;
    tensorfile_close(a);
    tensorfile_close(b);
    return ok;
}

int main(int argc, char **argv)
{
    struct error err = {0};
    if (argc == 3 && !compare(argv[1], argv[2], &err)) {
        fprintf(stderr, "quantize: %s\n", err.msg);
        return 1;
    }
    if (argc != 3)
        bench_types();
    return 0;
}
