/*
 * The reference and the GPU side by side, for test_ops.c: both backends, arrays and weights that lie in
 * both memories, batches with their pages, and the comparison of what came out.
 */
#ifndef STEEL_TESTS_GPU_DUO_H
#define STEEL_TESTS_GPU_DUO_H

#include "backend/backend.h"
#include "random_weight.h"

#ifdef STEEL_CUDA_SIM
enum { SIM = 1 };
#else
enum { SIM = 0 };
#endif

/* Products round the activations to halves: 2^-12 of each, at most, and the weights likewise. */
#define TOL 1e-3

extern int n_checks, n_failed;
extern double worst; /* error of the group so far */
extern uint64_t rng;
extern const char *filter;

struct duo {
    struct backend *ref, *gpu;
    struct shape s;
    float freq[256];
};

/* The same array in both memories. */
struct array {
    float *ref, *gpu;
    size_t n;
};

struct duo_weight {
    struct random_weight host;
    struct weight ref, gpu;
};

/* A batch over sequences of given (already cached, new) lengths, decodes first. */
struct plan {
    struct batch b;
    int32_t tokens[512], pos[512], slot[512], q_start[130], kv_len[130], out_rows[512];
    int32_t *pages;
};

void fail_if(bool bad, const char *what);
struct shape base_shape(void);
void duo_open(struct duo *d, const struct shape *s);
void duo_close(struct duo *d);
struct array array_new(struct duo *d, size_t n);
void array_free(struct duo *d, struct array *a);
void array_set(struct duo *d, struct array *a, const float *host);
struct array array_random(struct duo *d, size_t n, float scale);
void poison(struct duo *d, struct array *a);
double distance(const float *got, const float *want, size_t n);
void check_close(const char *what, const float *got, const float *want, size_t n, double tol);
void array_check(struct duo *d, const char *what, struct array *a, size_t n, double tol);
void weight_new(struct duo *d, struct duo_weight *w, const struct random_spec *spec);
void weight_free(struct duo *d, struct duo_weight *w);
size_t kv_bytes(const struct shape *s);
void kv_new(struct duo *d, struct kv_layer *ref, struct kv_layer *gpu);
void kv_free(struct duo *d, struct kv_layer *ref, struct kv_layer *gpu);
void plan_make(struct plan *p, const struct shape *s, const int (*seqs)[2], int n, bool pad);
void begin(struct duo *d, const struct batch *b);
void end(struct duo *d, int32_t *ref_tokens, int32_t *gpu_tokens);
bool wanted(const char *group);
void report(const char *group, int before);

void test_forward(void); /* steps.c */
void test_routed(void);

#endif
