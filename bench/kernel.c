/*
 * Kernel benchmark: one op at a time, with every kernel of its pick table that this machine can run, and
 * the measured ceilings of the machine. Times are the best and the median of many runs. Memory is
 * cold where it would be cold in a model (the KV caches of many layers are used in turn).
 */
#include "ceiling.h"

#include "backend/cpu/cpu.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/rowops.h"
#include "backend/cpu/gemm.h"
#include "quant/quantize.h"
#include "base/mem.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_RUNS = 400 };

struct options {
    const char *op, *only; /* only: cases whose name contains it */
    enum dtype dtype;      /* DT_NONE = the op's own list */
    enum isa isa;          /* the one to run, or -1: all */
    int threads, heads, kv_heads, dim;
    double seconds;
};

static struct pool *pool;
static double ceilings[N_CEILINGS]; /* with all threads of the pool */

static const char usage[] =
    "usage: kernel [OP] [--dtype TYPE] [--isa ISA] [-t THREADS] [--seconds S]\n"
    "              [--heads H] [--kv-heads K] [--dim D] [--case SUBSTRING]\n"
    "OP: all (default), ceilings, linear, moe, attention, attn_in, norm\n";

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

struct timing {
    double best, median; /* seconds */
    int runs;
};

/* Calls fn(arg, i) until `seconds` have passed, at least 5 times. */
static struct timing measure(void (*fn)(void *arg, int run), void *arg, double seconds)
{
    static double times[MAX_RUNS];
    fn(arg, 0);
    int n = 0;
    int64_t begin = clock_ns();
    while (n < MAX_RUNS && (n < 5 || (double)(clock_ns() - begin) < seconds * 1e9)) {
        int64_t start = clock_ns();
        fn(arg, n + 1);
        times[n++] = (double)(clock_ns() - start) / 1e9;
    }
    qsort(times, (size_t)n, sizeof *times, by_value);
    return (struct timing){times[0], times[n / 2], n};
}

static void run_ceilings(const struct options *o)
{
    size_t bytes = (size_t)512 << 20;
    char *memory = mem_aligned(bytes);
    if (!memory) {
        fprintf(stderr, "kernel: no memory for the read test\n");
        exit(1);
    }
    memset(memory, 1, bytes);
    printf("%-22s", "ceiling");
    for (int t = 1; t <= o->threads; t = t < o->threads && 2 * t > o->threads ? o->threads : 2 * t)
        printf("   %3d thread%s", t, t == 1 ? " " : "s");
    printf("\n");
    for (enum ceiling c = 0; c < N_CEILINGS; c++) {
        const struct ceiling_info *info = &ceiling_table[c];
        if (!isa_has(isa_best(), info->isa))
            continue;
        printf("%-22s", info->name);
        for (int t = 1; t <= o->threads;
             t = t < o->threads && 2 * t > o->threads ? o->threads : 2 * t) {
            ceilings[c] = ceiling_measure(pool, c, t, 15, memory, bytes);
            printf("   %11.1f", ceilings[c] / 1e9);
        }
        printf("  %s\n", info->unit);
    }
    mem_aligned_free(memory, bytes);
}

/* The peak of the instructions that a variant of this instruction set uses. AMX spends three tile
 * products on one of floats, so that a third is its limit. */
static double float_peak(enum isa isa)
{
    if (isa == ISA_AMX)
        return ceilings[CEILING_AMX_BF16];
    return ceilings[isa_has(isa, ISA_AVX512) ? CEILING_FMA_AVX512 : CEILING_FMA_AVX2];
}

struct attention_case {
    const char *name;
    int seqs, tokens, depth; /* each sequence: `tokens` rows after `depth` keys */
};

struct attention_run {
    struct bounds s;
    struct batch b;
    struct attention l;
    struct kv_layer *layers; /* (n_layers) */
    int n_layers;
    enum isa isa;
    float *q, *a, *qkv, *rope;
    void *scratch;
};

static void attention_once(void *arg, int run)
{
    struct attention_run *r = arg;
    cpu_attention(&r->s, &r->b, &r->l, &r->layers[run % r->n_layers], NULL, r->q, r->a, r->scratch,
                  pool, &(struct pick){.isa = r->isa});
}

static void post_once(void *arg, int run)
{
    struct attention_run *r = arg;
    cpu_attn_post(&r->s, &r->b, &r->l, &r->layers[run % r->n_layers], r->rope, r->qkv, r->q, pool,
                  r->isa);
}

static uint32_t random_next(uint32_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 17;
    return *state ^= *state << 5;
}

static void *floats(size_t n, uint32_t *seed)
{
    float *p = mem_aligned(n * sizeof(float) + 64);
    if (!p) {
        fprintf(stderr, "kernel: out of memory\n");
        exit(1);
    }
    for (size_t i = 0; i < n; i++)
        p[i] = (float)(int32_t)random_next(seed) * 0x1p-31f;
    return p;
}

static void attention_case(const struct options *o, const struct attention_case *c, enum dtype kv,
                           bool post)
{
    if (o->only && !strstr(c->name, o->only))
        return;
    int len = c->depth + c->tokens, page_len = 16, pages = (len + page_len - 1) / page_len;
    int n = c->seqs * c->tokens, width = (o->heads + 2 * o->kv_heads) * o->dim;
    struct attention_run r = {.s = {.page_len = page_len,
                                    .n_pages = pages * c->seqs,
                                    .k_type = kv,
                                    .v_type = kv,
                                    .max_tokens = n,
                                    .max_seqs = c->seqs,
                                    .max_pages = pages}};
    uint32_t seed = 1;
    size_t n_kv = (size_t)r.s.n_pages * (size_t)(o->kv_heads * page_len * o->dim);
    size_t kv_bytes = dtype_bytes(kv, n_kv);
    /* Enough layers to exceed the caches, as in a model. */
    r.n_layers = 1 + (int)(((size_t)256 << 20) / (2 * kv_bytes));
    r.n_layers = r.n_layers > 48 ? 48 : r.n_layers;
    r.layers = mem_zalloc((size_t)r.n_layers, sizeof *r.layers);
    float *gain = floats((size_t)o->dim, &seed), *freq = floats((size_t)o->dim, &seed);
    struct rope rope = {.n_rot = o->dim, .freq = freq, .mscale = 1};
    r.l = (struct attention){.n_heads = o->heads,
                             .n_kv_heads = o->kv_heads,
                             .k_dim = o->dim,
                             .v_dim = o->dim,
                             .q_norm = {NORM_RMS, gain, NULL, 1e-6f},
                             .k_norm = {NORM_RMS, gain, NULL, 1e-6f},
                             .rope = &rope,
                             .scale = 0.1f};
    for (int i = 0; i < r.n_layers; i++) {
        r.layers[i].k = mem_aligned(kv_bytes);
        r.layers[i].v = mem_aligned(kv_bytes);
        if (!r.layers[i].k || !r.layers[i].v) {
            fprintf(stderr, "kernel: no memory for %zu bytes of KV\n", kv_bytes);
            exit(1);
        }
        /* one tile, repeated */
        float *head = floats((size_t)o->dim, &seed);
        size_t tile = dtype_bytes(kv, (size_t)(page_len * o->dim));
        for (int v = 0; v < 2; v++) {
            char *p = v ? r.layers[i].v : r.layers[i].k;
            for (int t = 0; t < page_len; t++)
                row_kernels(ISA_REF)->store_head(kv, head, o->dim, p, !v, page_len, t);
            for (size_t at = tile; at < kv_bytes; at += tile)
                memcpy(p + at, p, tile);
        }
        mem_aligned_free(head, (size_t)o->dim * 4 + 64);
    }
    int32_t *pos = mem_zalloc((size_t)n, sizeof *pos), *slot = mem_zalloc((size_t)n, sizeof *slot);
    int32_t *q_start = mem_zalloc((size_t)c->seqs + 1, sizeof *q_start);
    int32_t *kv_len = mem_zalloc((size_t)c->seqs, sizeof *kv_len);
    int32_t *table = mem_zalloc((size_t)r.s.n_pages, sizeof *table);
    for (int i = 0; i < r.s.n_pages; i++) { /* pages of the sequences alternate, as they grow */
        table[i / c->seqs + i % c->seqs * pages] = i;
    }
    for (int i = 0, t = 0; i < c->seqs; i++) {
        q_start[i] = t;
        kv_len[i] = len;
        for (int p = c->depth; p < len; p++, t++) {
            pos[t] = p;
            slot[t] = table[i * pages + p / page_len] * page_len + p % page_len;
        }
        q_start[i + 1] = t;
    }
    r.b = (struct batch){.n_tokens = n,
                         .n_seqs = c->seqs,
                         .max_pages = pages,
                         .pos = pos,
                         .slot = slot,
                         .q_start = q_start,
                         .kv_len = kv_len,
                         .pages = table};
    r.q = floats((size_t)n * (size_t)(o->heads * o->dim), &seed);
    r.a = floats((size_t)n * (size_t)(o->heads * o->dim), &seed);
    r.qkv = floats((size_t)n * (size_t)width, &seed);
    r.rope = floats((size_t)(n * o->dim), &seed);
    size_t scratch_bytes = cpu_attention_scratch(&r.s, &r.l, o->threads);
    r.scratch = mem_aligned(scratch_bytes);
    if (!r.scratch) {
        fprintf(stderr, "kernel: out of memory\n");
        exit(1);
    }
    double keys = 0;
    for (int t = 0; t < n; t++)
        keys += pos[t] + 1;
    enum isa isa;
    for (int set = 0; isa_at(set, &isa); set++) {
        if ((int)o->isa >= 0 && isa != o->isa)
            continue;
        if (((isa == ISA_VNNI && kv != DT_Q8_0 && kv != DT_Q4_0) || isa == ISA_REF) &&
            isa != o->isa)
            continue; /* no kernels of its own; plain C is not measured */
        if (isa == ISA_AMX &&
            (post || kv == DT_F32 ||
             (kv != DT_Q4_0 && kv != DT_F8_E4M3 && c->tokens * o->heads / o->kv_heads < 32)))
            continue; /* AVX-512 runs instead */
        r.isa = isa;
        struct timing t = measure(post ? post_once : attention_once, &r, o->seconds);
        printf("%-18s %-5s %-7s %9.1f %9.1f", c->name, dtype_name(kv), isa_name(isa), t.best * 1e6,
               t.median * 1e6);
        if (post) {
            double bytes = (double)n * ((double)width + (double)(o->heads * o->dim)) * 4;
            printf("  %8.1f GB/s of rows\n", bytes / t.best / 1e9);
        } else {
            double bytes =
                (double)c->seqs * len * 2 * dtype_bytes(kv, (size_t)(o->kv_heads * o->dim));
            double flops = 4.0 * o->dim * o->heads * keys;
            printf("  %8.1f %4.0f%%  %8.1f %4.0f%%\n", bytes / t.best / 1e9,
                   100 * bytes / t.best / ceilings[CEILING_READ], flops / t.best / 1e9,
                   100 * flops / t.best / float_peak(isa));
        }
        fflush(stdout);
    }
    for (int i = 0; i < r.n_layers; i++) {
        mem_aligned_free(r.layers[i].k, kv_bytes);
        mem_aligned_free(r.layers[i].v, kv_bytes);
    }
    mem_aligned_free(gain, (size_t)o->dim * 4 + 64);
    mem_aligned_free(freq, (size_t)o->dim * 4 + 64);
    mem_aligned_free(r.q, (size_t)n * (size_t)(o->heads * o->dim) * 4 + 64);
    mem_aligned_free(r.a, (size_t)n * (size_t)(o->heads * o->dim) * 4 + 64);
    mem_aligned_free(r.qkv, (size_t)n * (size_t)width * 4 + 64);
    mem_aligned_free(r.rope, (size_t)(n * o->dim) * 4 + 64);
    mem_aligned_free(r.scratch, scratch_bytes);
    void *owned[] = {pos, slot, q_start, kv_len, table, r.layers};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
        mem_free(owned[i]);
}

static void run_attention(const struct options *o)
{
    static const struct attention_case cases[] = {
        {"decode at 512", 1, 1, 512},
        {"decode at 8192", 1, 1, 8192},
        {"decode at 32768", 1, 1, 32768},
        {"decode 16 at 1024", 16, 1, 1024},
        {"decode 128 at 512", 128, 1, 512},
        {"verify 4 at 2048", 1, 4, 2048},
        {"prefill 128", 1, 128, 0},
        {"prefill 512", 1, 512, 0},
        {"prefill 512 at 4096", 1, 512, 4096},
        {"prefill 4 x 256", 4, 256, 0},
    };
    printf("\nattention, %d heads, %d kv heads, dim %d, one layer\n", o->heads, o->kv_heads,
           o->dim);
    printf("%-18s %-5s %-7s %9s %9s  %8s %5s  %8s %5s\n", "case", "kv", "isa", "best us",
           "median us", "KV GB/s", "", "GFLOP/s", "");
    static const enum dtype types[] = {DT_F16, DT_Q8_0, DT_F8_E4M3, DT_Q4_0, DT_BF16, DT_F32};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int t = 0; t < 6; t++)
            if (o->dtype == types[t] || (o->dtype == DT_NONE && t < 4))
                attention_case(o, &cases[i], types[t], false);
}

static void run_attn_in(const struct options *o)
{
    static const struct attention_case cases[] = {
        {"1 token", 1, 1, 512}, {"16 tokens", 16, 1, 512}, {"512 tokens", 1, 512, 0}};
    printf("\nattn_in after the projection (norm, RoPE, KV append), one layer\n");
    printf("%-18s %-5s %-7s %9s %9s\n", "case", "kv", "isa", "best us", "median us");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        attention_case(o, &cases[i], o->dtype == DT_NONE ? DT_F16 : o->dtype, true);
}

/* linear and moe go through the backend's own functions, opened once per instruction set, so that what
 * is measured is what a model gets: quantising the input, splitting the work and the kernel. */
enum {
    MATMUL_IN = 2048,
    MATMUL_OUT = 4096,
    EXPERTS = 128,
    EXPERTS_USED = 8,
    EXPERT_FF = 768,
    MAX_TOKENS = 512
};

struct matmul_run {
    struct backend *be;
    struct weight *w; /* (n) linear: matrices used in turn; moe: router, gate and up, down */
    struct mlp moe;
    int n, rows;
    float *x, *y;
};

static void linear_once(void *arg, int run)
{
    struct matmul_run *r = arg;
    gemm_linear(cpu_self(r->be), &r->w[run % r->n], r->x, r->y, r->rows);
}

static void moe_once(void *arg, int run)
{
    struct matmul_run *r = arg;
    /* Different rows each time, or the chosen experts would be in the cache. */
    const float *x = r->x + (size_t)(run * 61 % (MAX_TOKENS + 1 - r->rows)) * MATMUL_IN;
    moe_run(cpu_self(r->be), &r->moe, x, x, r->y, r->rows);
}

/* n_expert matrices of roughly normal values. One band of rows is quantised and repeated. */
static void upload(struct backend *be, enum dtype type, int n_in, int n_out, int n_expert,
                   struct weight *w, uint32_t *seed)
{
    int band = type == DT_F32 ? n_out : 16; /* a router's rows must differ */
    size_t row = dtype_bytes(type, (size_t)n_in);
    float *values = mem_zalloc((size_t)band * (size_t)n_in, sizeof(float));
    for (size_t i = 0; i < (size_t)band * (size_t)n_in; i++)
        values[i] = (float)(int32_t)random_next(seed) * 0x1p-31f +
                    (float)(int32_t)random_next(seed) * 0x1p-31f;
    uint8_t *data = mem_alloc(row * (size_t)n_out);
    quantize_rows(type, values, data, (size_t)band, (size_t)n_in, NULL);
    for (int i = band; i < n_out; i++)
        memcpy(data + (size_t)i * row, data + (size_t)(i % band) * row, row);
    const uint8_t **expert = mem_zalloc((size_t)n_expert, sizeof *expert);
    for (int i = 0; i < n_expert; i++)
        expert[i] = data;
    struct raw_weight raw = {.n_in = n_in,
                             .n_out = n_out,
                             .n_expert = n_expert,
                             .n_seg = 1,
                             .seg = {{.type = type, .rows = n_out, .data = expert}},
                             .transient = true};
    struct error err;
    if (!be->ops->upload(be, &raw, n_expert > 1 ? WEIGHT_EXPERTS : WEIGHT_LINEAR, w, &err)) {
        fprintf(stderr, "kernel: %s\n", err.msg);
        exit(1);
    }
    mem_free(expert);
    mem_free(data);
    mem_free(values);
}

/* A CPU backend with one instruction set. */
static struct backend *open_backend(const struct options *o, enum isa isa)
{
    setenv("STEEL_ISA", isa_name(isa), 1);
    struct backend_options opt = {.device = "cpu", .threads = o->threads};
    struct error err;
    struct backend *be = backend_open_cpu(&opt, &err);
    if (!be) {
        fprintf(stderr, "kernel: %s\n", err.msg);
        exit(1);
    }
    return be;
}

/* The integer or the float peak, depending on the kernels of the type. */
static double matmul_peak(enum dtype type, enum isa isa)
{
    bool floats_only = type == DT_F32 || type == DT_F16 || type == DT_BF16;
    if (isa == ISA_AMX)
        return ceilings[floats_only ? CEILING_AMX_BF16 : CEILING_AMX_INT8];
    return isa == ISA_VNNI && !floats_only ? ceilings[CEILING_VNNI] : float_peak(isa);
}

static void matmul_case(const struct options *o, bool moe, enum dtype type, enum isa isa)
{
    static const int rows[] = {1, 4, 16, 128, 512};
    struct matmul_run r = {.be = open_backend(o, isa)};
    uint32_t seed = 1;
    size_t one = dtype_bytes(type, (size_t)MATMUL_IN * MATMUL_OUT);
    r.n = moe ? 3 : 1 + (int)(((size_t)256 << 20) / one); /* exceeds the caches */
    r.w = mem_zalloc((size_t)r.n, sizeof *r.w);
    if (moe) {
        upload(r.be, DT_F32, MATMUL_IN, EXPERTS, 1, &r.w[0], &seed);
        upload(r.be, type, MATMUL_IN, 2 * EXPERT_FF, EXPERTS, &r.w[1], &seed);
        upload(r.be, type, EXPERT_FF, MATMUL_IN, EXPERTS, &r.w[2], &seed);
    } else {
        for (int i = 0; i < r.n; i++)
            upload(r.be, type, MATMUL_IN, MATMUL_OUT, 1, &r.w[i], &seed);
    }
    /* Scratch for both. */
    struct weight router = {.n_in = MATMUL_IN, .n_out = EXPERTS, .n_expert = 1};
    struct weight gate_up = {.n_in = MATMUL_IN, .n_out = 2 * EXPERT_FF, .n_expert = EXPERTS};
    struct weight down = {.n_in = EXPERT_FF, .n_out = MATMUL_IN, .n_expert = EXPERTS};
    struct layer layer = {
        .mixer.attention = {.n_heads = 1, .n_kv_heads = 1, .k_dim = 64, .v_dim = 64},
        .mlp = {.router = {.w = moe ? &r.w[0] : &router, .n_used = EXPERTS_USED, .renorm = true},
                .experts = {.gate_up = moe ? &r.w[1] : &gate_up, .down = moe ? &r.w[2] : &down}}};
    struct network net = {.n_layers = 1, .n_embd = MATMUL_IN, .n_vocab = 1, .layers = &layer};
    struct bounds bounds = {.page_len = 16,
                            .n_pages = 1,
                            .k_type = DT_F16,
                            .v_type = DT_F16,
                            .max_tokens = MAX_TOKENS,
                            .max_seqs = 1,
                            .max_out = 1,
                            .max_pages = 1};
    struct error err;
    r.moe = layer.mlp;
    if (!r.be->ops->prepare(r.be, &net, &bounds, &err)) {
        fprintf(stderr, "kernel: %s\n", err.msg);
        exit(1);
    }
    r.x = floats((size_t)MAX_TOKENS * MATMUL_IN, &seed);
    r.y = floats((size_t)MAX_TOKENS * MATMUL_OUT, &seed);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        r.rows = rows[i];
        struct batch b = {.n_tokens = 0};
        r.be->ops->begin(r.be, &b);
        struct timing t = measure(moe ? moe_once : linear_once, &r, o->seconds);
        r.be->ops->end(r.be, NULL, NULL);
        double macs =
            moe ? (double)EXPERTS_USED * 3 * MATMUL_IN * EXPERT_FF : (double)MATMUL_IN * MATMUL_OUT;
        double ops = 2 * macs * rows[i];
        printf("%-7s %-7s %5d %10.1f %10.1f", dtype_name(type), isa_name(isa), rows[i],
               t.best * 1e6, t.median * 1e6);
        /* One row reads its n_used experts. For several rows the number depends on the router. */
        double bytes = moe ? (double)(r.w[1].bytes + r.w[2].bytes) * EXPERTS_USED / EXPERTS
                           : (double)r.w[0].bytes;
        if (!moe || rows[i] == 1)
            printf("  %8.1f %4.0f%%", bytes / t.best / 1e9,
                   100 * bytes / t.best / ceilings[CEILING_READ]);
        else
            printf("  %8s %5s", "", "");
        printf("  %8.1f %4.0f%%\n", ops / t.best / 1e9,
               100 * ops / t.best / matmul_peak(type, isa));
        fflush(stdout);
    }
    for (int i = 0; i < r.n; i++)
        r.be->ops->release(r.be, &r.w[i]);
    r.be->ops->close(r.be);
    mem_free(r.w);
    mem_aligned_free(r.x, (size_t)MAX_TOKENS * MATMUL_IN * 4 + 64);
    mem_aligned_free(r.y, (size_t)MAX_TOKENS * MATMUL_OUT * 4 + 64);
}

/* Some types, or the one asked for, on every instruction set of which the table has a kernel for it. */
static void matmul_walk(const struct options *o, bool moe)
{
    int n;
    const struct pick_row *rows = pick_rows(PICK_GEMM, &n);
    printf("%-7s %-7s %5s %10s %10s  %8s %5s  %8s\n", "type", "isa", "rows", "best us", "median us",
           "GB/s", "", "GOP/s");
    static const enum dtype usual[] = {DT_Q4_K, DT_Q6_K, DT_Q8_0, DT_BF16};
    for (size_t i = 0; i < sizeof usual / sizeof *usual; i++) {
        enum dtype type = o->dtype == DT_NONE ? usual[i] : o->dtype;
        enum isa isa;
        for (int set = 1; isa_at(set, &isa); set++) {
            bool own = false;
            for (int j = 0; j < n; j++)
                own |= rows[j].isa == isa && (rows[j].formats->bits >> type & 1);
            if (own && ((int)o->isa < 0 || o->isa == isa) && quantize_supported(type))
                matmul_case(o, moe, type, isa);
        }
        if (o->dtype != DT_NONE)
            break;
    }
}

static void run_linear(const struct options *o)
{
    printf("\nlinear, %d to %d, matrices from memory\n", MATMUL_IN, MATMUL_OUT);
    matmul_walk(o, false);
}

static void run_moe(const struct options *o)
{
    printf("\nmoe, %d experts, %d used, %d to %d\n", EXPERTS, EXPERTS_USED, MATMUL_IN, EXPERT_FF);
    matmul_walk(o, true);
}

struct norm_run {
    float *x, *d, *gain, *n;
    int rows, width;
    enum isa isa;
};

static void norm_once(void *arg, int run)
{
    (void)run;
    struct norm_run *r = arg;
    const struct norm norm = {.kind = NORM_RMS, .gain = r->gain, .eps = 1e-6f};
    cpu_add_norm(r->x, r->d, &norm, r->n, r->rows, r->width, pool, r->isa);
}

static void run_norm(const struct options *o)
{
    static const int rows[] = {1, 16, 512};
    enum { WIDTH = 2048 };
    printf("\nadd_norm, width %d\n%-18s %-5s %-7s %9s %9s\n", WIDTH, "case", "", "isa", "best us",
           "median us");
    enum isa isa;
    for (int i = 0; i < 3; i++)
        for (int set = 1; isa_at(set, &isa) && isa_has(ISA_AVX512, isa); set++) {
            uint32_t seed = 1;
            size_t n = (size_t)rows[i] * WIDTH;
            struct norm_run r = {.rows = rows[i], .width = WIDTH, .isa = isa};
            r.x = floats(n, &seed);
            r.d = floats(n, &seed);
            r.n = floats(n, &seed);
            r.gain = floats(WIDTH, &seed);
            memset(r.d, 0, n * sizeof(float)); /* x must not grow from run to run */
            struct timing t = measure(norm_once, &r, o->seconds);
            printf("%-4d rows%9s %-5s %-7s %9.1f %9.1f  %8.1f GB/s of rows\n", rows[i], "", "f32",
                   isa_name(isa), t.best * 1e6, t.median * 1e6, 16.0 * (double)n / t.best / 1e9);
            mem_aligned_free(r.x, n * 4 + 64);
            mem_aligned_free(r.d, n * 4 + 64);
            mem_aligned_free(r.n, n * 4 + 64);
            mem_aligned_free(r.gain, WIDTH * 4 + 64);
        }
}

static const struct {
    const char *name;
    void (*run)(const struct options *o);
} ops[] = {{"linear", run_linear},
           {"moe", run_moe},
           {"attention", run_attention},
           {"attn_in", run_attn_in},
           {"norm", run_norm}};
enum { N_OPS = sizeof ops / sizeof *ops };

static _Noreturn void bad_usage(const char *what)
{
    fprintf(stderr, "kernel: %s\n%s", what, usage);
    exit(2);
}

static int number(const char *text)
{
    char *end;
    long n = strtol(text, &end, 10);
    if (*end || n < 1 || n > 1 << 20)
        bad_usage("a number is out of range");
    return (int)n;
}

int main(int argc, char **argv)
{
    struct options o = {.op = "all",
                        .isa = (enum isa) - 1,
                        .threads = pool_cpu_count(),
                        .heads = 32,
                        .kv_heads = 4,
                        .dim = 128,
                        .seconds = 0.5};
    static const struct option longs[] = {{"dtype", 1, NULL, 'd'},   {"isa", 1, NULL, 'i'},
                                          {"threads", 1, NULL, 't'}, {"seconds", 1, NULL, 's'},
                                          {"heads", 1, NULL, 'H'},   {"kv-heads", 1, NULL, 'K'},
                                          {"dim", 1, NULL, 'D'},     {"case", 1, NULL, 'c'},
                                          {"help", 0, NULL, 'h'},    {0}};
    int c;
    while ((c = getopt_long(argc, argv, "t:h", longs, NULL)) != -1)
        switch (c) {
        case 'd':
            if ((o.dtype = dtype_from_name(optarg)) == DT_NONE)
                bad_usage("no such dtype");
            break;
        case 'i': {
            enum isa isa;
            for (int set = 0; isa_at(set, &isa); set++)
                if (!strcmp(optarg, isa_name(isa)))
                    o.isa = isa;
            if ((int)o.isa < 0)
                bad_usage("no such instruction set here");
            break;
        }
        case 't':
            o.threads = number(optarg);
            break;
        case 's':
            o.seconds = atof(optarg);
            break;
        case 'H':
            o.heads = number(optarg);
            break;
        case 'K':
            o.kv_heads = number(optarg);
            break;
        case 'D':
            o.dim = number(optarg);
            break;
        case 'c':
            o.only = optarg;
            break;
        case 'h':
            fputs(usage, stdout);
            return 0;
        default:
            bad_usage("bad option");
        }
    if (optind < argc)
        o.op = argv[optind];
    bool all = !strcmp(o.op, "all"), known = all || !strcmp(o.op, "ceilings");
    for (int i = 0; i < N_OPS; i++)
        known |= !strcmp(o.op, ops[i].name);
    if (!known)
        bad_usage("no such op");
    pool = pool_new(o.threads);
    printf("best instruction set: %s; threads: %d of %d\n", isa_name(isa_best()), o.threads,
           pool_cpu_count());
    run_ceilings(&o);
    for (int i = 0; i < N_OPS; i++)
        if (all || !strcmp(o.op, ops[i].name))
            ops[i].run(&o);
    pool_free(pool);
    return 0;
}
