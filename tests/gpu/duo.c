/* The reference and the GPU side by side. See duo.h. */
#include "duo.h"

#include "base/mem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int n_checks, n_failed;
double worst;
uint64_t rng = 42;
const char *filter;

void fail_if(bool bad, const char *what)
{
    if (bad) {
        fprintf(stderr, "test_ops: %s\n", what);
        exit(1);
    }
}

struct shape base_shape(void)
{
    return (struct shape){
        .n_layers = 1,
        .n_embd = 256,
        .n_heads = 8,
        .n_kv_heads = 2,
        .head_dim = 64,
        .n_vocab = 600,
        .n_ff = 512,
        .n_expert = 16,
        .n_expert_used = 4,
        .n_ff_exp = 256,
        .norm_topk = true,
        .expert_scale = 1.0f,
        .norm_eps = 1e-6f,
        .attn_scale = 0.125f,
        .n_rot = 64,
        .rope_mscale = 1.0f,
        .page_len = 16,
        .n_pages = 64,
        .kv_type = DT_F16,
        .max_tokens = 320,
        .max_seqs = 80,
        .max_out = 320,
        .max_pages = 40,
    };
}

void duo_open(struct duo *d, const struct shape *s)
{
    struct error err = {0};
    struct backend_options opt = {.device = "cuda"};
    d->s = *s;
    for (int i = 0; i < s->n_rot / 2; i++)
        d->freq[i] = powf(10000.0f, -2.0f * (float)i / (float)s->n_rot);
    d->s.rope_freq = d->freq;
    d->ref = backend_open_ref();
    d->gpu = backend_open_cuda(&opt, &err);
    fail_if(!d->gpu, err.msg);
    fail_if(!d->ref->ops->prepare(d->ref, &d->s, &err), err.msg);
    fail_if(!d->gpu->ops->prepare(d->gpu, &d->s, &err), err.msg);
}

void duo_close(struct duo *d)
{
    d->ref->ops->close(d->ref);
    d->gpu->ops->close(d->gpu);
}

struct array array_new(struct duo *d, size_t n)
{
    struct error err = {0};
    struct array a = {.n = n};
    a.ref = d->ref->ops->alloc(d->ref, n * sizeof(float), "a test", &err);
    a.gpu = d->gpu->ops->alloc(d->gpu, n * sizeof(float), "a test", &err);
    fail_if(!a.ref || !a.gpu, err.msg);
    return a;
}

void array_free(struct duo *d, struct array *a)
{
    d->ref->ops->free(d->ref, a->ref, a->n * sizeof(float));
    d->gpu->ops->free(d->gpu, a->gpu, a->n * sizeof(float));
}

void array_set(struct duo *d, struct array *a, const float *host)
{
    memcpy(a->ref, host, a->n * sizeof(float));
    d->gpu->ops->copy_in(d->gpu, a->gpu, host, a->n * sizeof(float));
}

struct array array_random(struct duo *d, size_t n, float scale)
{
    struct array a = array_new(d, n);
    float *h = mem_alloc(n * sizeof(float));
    for (size_t i = 0; i < n; i++)
        h[i] = scale * random_float(&rng);
    array_set(d, &a, h);
    mem_free(h);
    return a;
}

void poison(struct duo *d, struct array *a)
{
    float *h = mem_alloc(a->n * sizeof(float));
    for (size_t i = 0; i < a->n; i++)
        h[i] = NAN;
    array_set(d, a, h);
    mem_free(h);
}

double distance(const float *got, const float *want, size_t n)
{
    double diff = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        diff += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        norm += (double)want[i] * want[i];
    }
    return norm > 0 ? sqrt(diff / norm) : sqrt(diff);
}

void check_close(const char *what, const float *got, const float *want, size_t n, double tol)
{
    double e = distance(got, want, n);
    n_checks++;
    if (e > worst)
        worst = e;
    if (!(e <= tol)) {
        n_failed++;
        size_t bad = 0;
        double most = -1;
        for (size_t i = 0; i < n; i++) {
            double di = fabs((double)got[i] - want[i]);
            if (!(di <= most)) {
                most = di;
                bad = i;
                if (isnan(di))
                    break;
            }
        }
        printf("FAIL  %s: error %.3g (allowed %.3g); element %zu of %zu is %g, not %g\n", what, e,
               tol, bad, n, (double)got[bad], (double)want[bad]);
    }
}

void array_check(struct duo *d, const char *what, struct array *a, size_t n, double tol)
{
    float *h = mem_alloc(n * sizeof(float));
    d->gpu->ops->copy_out(d->gpu, h, a->gpu, n * sizeof(float));
    check_close(what, h, a->ref, n, tol);
    mem_free(h);
}

void weight_new(struct duo *d, struct duo_weight *w, const struct random_spec *spec)
{
    struct error err = {0};
    random_weight_make(&w->host, spec, &rng);
    fail_if(!d->ref->ops->upload(d->ref, &w->host.raw, &w->ref, &err), err.msg);
    fail_if(!d->gpu->ops->upload(d->gpu, &w->host.raw, &w->gpu, &err), err.msg);
    random_weight_free(&w->host); /* transient: both must have copied */
}

void weight_free(struct duo *d, struct duo_weight *w)
{
    d->ref->ops->release(d->ref, &w->ref);
    d->gpu->ops->release(d->gpu, &w->gpu);
}

void plan_make(struct plan *p, const struct shape *s, const int (*seqs)[2], int n, bool pad)
{
    memset(p, 0, sizeof *p);
    p->pages = mem_zalloc((size_t)(n * s->max_pages), sizeof(int32_t));
    int32_t *free_pages = mem_zalloc((size_t)s->n_pages, sizeof(int32_t));
    for (int i = 0; i < s->n_pages; i++)
        free_pages[i] = i;
    for (int i = s->n_pages; i > 1; i--) {
        int j = (int)(random_u64(&rng) % (uint64_t)i);
        int32_t t = free_pages[i - 1];
        free_pages[i - 1] = free_pages[j];
        free_pages[j] = t;
    }
    int used = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < n; i++) {
            if ((seqs[i][1] == 1) != (pass == 0))
                continue;
            int seq = p->b.n_seqs++, len = seqs[i][0] + seqs[i][1];
            int32_t *table = p->pages + (size_t)seq * (size_t)s->max_pages;
            for (int j = 0; j * s->page_len < len; j++) {
                fail_if(used == s->n_pages || j == s->max_pages, "the plan needs more pages");
                table[j] = free_pages[used++];
            }
            bool hidden = pad && i == n - 1;
            for (int j = 0; j < seqs[i][1]; j++) {
                int t = p->b.n_tokens++, at = seqs[i][0] + j;
                p->tokens[t] = (int32_t)(random_u64(&rng) % (uint64_t)s->n_vocab);
                p->pos[t] = at;
                p->slot[t] = hidden ? -1 : table[at / s->page_len] * s->page_len + at % s->page_len;
                if (j == seqs[i][1] - 1)
                    p->out_rows[p->b.n_out++] = t;
            }
            p->kv_len[seq] = len;
            p->q_start[seq + 1] = p->b.n_tokens;
            p->b.n_decode += seqs[i][1] == 1;
        }
    mem_free(free_pages);
    p->b.max_pages = s->max_pages;
    p->b.tokens = p->tokens;
    p->b.pos = p->pos;
    p->b.slot = p->slot;
    p->b.q_start = p->q_start;
    p->b.kv_len = p->kv_len;
    p->b.pages = p->pages;
    p->b.out_rows = p->out_rows;
}

void begin(struct duo *d, const struct batch *b)
{
    d->ref->ops->begin(d->ref, b);
    d->gpu->ops->begin(d->gpu, b);
}

void end(struct duo *d, int32_t *ref_tokens, int32_t *gpu_tokens)
{
    struct error err = {0};
    fail_if(!d->ref->ops->end(d->ref, ref_tokens, &err), err.msg);
    fail_if(!d->gpu->ops->end(d->gpu, gpu_tokens, &err), err.msg);
}

bool wanted(const char *group)
{
    if (filter && !strstr(group, filter))
        return false;
    worst = 0;
    return true;
}

void report(const char *group, int before)
{
    printf("%-5s %-28s worst error %.2e, %d checks\n", n_failed ? "FAIL" : "ok", group, worst,
           n_checks - before);
    fflush(stdout);
}

size_t kv_bytes(const struct shape *s)
{
    return (size_t)s->n_pages * (size_t)s->page_len * (size_t)(s->n_kv_heads * s->head_dim) *
           (s->kv_type == DT_F32 ? 4 : 2);
}

/* A cache with random contents everywhere, the same in both memories. */
void kv_new(struct duo *d, struct kv_layer *ref, struct kv_layer *gpu)
{
    struct error err = {0};
    size_t bytes = kv_bytes(&d->s), n = bytes / (d->s.kv_type == DT_F32 ? 4 : 2);
    void **planes[2][2] = {{&ref->k, &gpu->k}, {&ref->v, &gpu->v}};
    for (int i = 0; i < 2; i++) {
        *planes[i][0] = d->ref->ops->alloc(d->ref, bytes, "kv", &err);
        *planes[i][1] = d->gpu->ops->alloc(d->gpu, bytes, "kv", &err);
        fail_if(!*planes[i][0] || !*planes[i][1], err.msg);
        for (size_t j = 0; j < n; j++) {
            float v = random_float(&rng);
            if (d->s.kv_type == DT_F32)
                ((float *)*planes[i][0])[j] = v;
            else
                ((uint16_t *)*planes[i][0])[j] =
                    d->s.kv_type == DT_F16 ? f32_to_f16(v) : f32_to_bf16(v);
        }
        d->gpu->ops->copy_in(d->gpu, *planes[i][1], *planes[i][0], bytes);
    }
}

void kv_free(struct duo *d, struct kv_layer *ref, struct kv_layer *gpu)
{
    size_t bytes = kv_bytes(&d->s);
    d->ref->ops->free(d->ref, ref->k, bytes);
    d->ref->ops->free(d->ref, ref->v, bytes);
    d->gpu->ops->free(d->gpu, gpu->k, bytes);
    d->gpu->ops->free(d->gpu, gpu->v, bytes);
}
