/*
 * steel bench: prompt processing (pp) and text generation (tg) speed in tokens per second, mean and
 * deviation over repetitions; the weight bandwidth in GB/s that implies; and a hash of the logits,
 * so that a speed-up that changes results is noticed.
 *
 * If --deterministic changes what a backend computes, each test is measured both ways, alternating
 * between repetitions; otherwise the report says so. With adapters, the two ways are with and
 * without them; with --kv-canary, with and without the check. With --ceiling, the memory bandwidth is measured between repetitions.
 */
#include "backend/backend.h"
#include "cli/cli.h"
#include "base/clock.h"
#include "base/mem.h"
#include "cli/bench/bench_draft.h"
#include "cli/bench/bench_replay.h"
#include "cli/bench/bench_embed.h"
#include "cli/bench/bench_memory.h"
#include "cli/bench/bench_picks.h"
#include "cli/bench/bench_stages.h"
#include "cli/bench/bench_steps.h"
#include "cli/hub/hub.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_LIST = 32, MAX_REPS = 1000 };

struct bench_options {
    struct model_flags model;
    const char *prompt, *gen, *batch, *depth, *both, *replay;
    float accept;
    int reps, ubatch, texts;
    bool json, kernels, picks, no_warmup, skip_cost, ceiling;
};

struct result {
    char name[48];
    double mean, dev, gb_s;
    double rates[MAX_REPS]; /* (n_rates) rate of each repetition */
    int n_rates;
    /* --ceiling: memory bandwidth, median of the measurements between repetitions */
    double read_gb_s;
    double bytes, ops; /* weight bytes and operations per token, for the roofline */
    double kv_bytes;   /* bytes of the KV cache read per generated token */
    uint64_t hash;
    bool deterministic;
    struct profile before, after; /* --profile: before and after the first repetition */
    double cost; /* share of speed lost to what the modes differ in; 0 if there is one mode */
    int n_loras;
    bool marks; /* --kv-canary: pages were checked */
};

static uint64_t logits_hash(struct runtime *rt)
{
    int V = rt->model->config.n_vocab;
    float *row = mem_zalloc((size_t)V, sizeof *row);
    step_logits(rt->step, 0, row);
    uint64_t h = 0xcbf29ce484222325u;
    for (int i = 0; i < V; i++) {
        uint32_t bits;
        memcpy(&bits, &row[i], 4);
        h = (h ^ bits) * 0x100000001b3u;
    }
    mem_free(row);
    return h;
}

/* Weight bytes that a step of `tokens` tokens reads, with experts chosen uniformly. */
static double step_bytes(const struct model *m, int tokens)
{
    const struct config *c = &m->config;
    if (!c->n_expert)
        return (double)m->active_bytes;
    double share = (double)c->n_expert_used / c->n_expert;
    double experts = 0;
    for (int i = 0; i < network_depth(&m->net); i++) {
        const struct mlp *mlp = &m->net.layers[i].mlp;
        if (mlp->router.w)
            experts += (double)mlp->experts.gate_up->bytes + (double)mlp->experts.down->bytes;
    }
    double dense = (double)m->active_bytes - experts * share;
    return dense + experts * (1 - pow(1 - share, tokens));
}

/* Weight operations per token. The head counts only for rows that need logits. */
static double token_ops(const struct model *m, const struct bench_test *t)
{
    double head = (double)m->config.n_vocab * m->config.n_embd;
    double heads = t->n_gen ? 1 : 1.0 / t->n_prompt;
    return 2 * ((double)m->n_active - head + head * heads);
}

static void mean_dev(const double *v, int n, double *mean, double *dev)
{
    double sum = 0, square = 0;
    for (int i = 0; i < n; i++)
        sum += v[i];
    *mean = sum / n;
    for (int i = 0; i < n; i++)
        square += (v[i] - *mean) * (v[i] - *mean);
    *dev = n > 1 ? sqrt(square / (n - 1)) : 0;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Also sorts v. */
static double median_of(double *v, int n)
{
    qsort(v, (size_t)n, sizeof *v, compare_doubles);
    return n ? (v[n / 2] + v[(n - 1) / 2]) / 2 : 0;
}

static void test_name(const struct bench_test *t, char *name, size_t size)
{
    int n = 0;
    if (t->n_prompt)
        n = snprintf(name, size, "pp%d", t->n_prompt);
    if (t->n_gen)
        n += snprintf(name + n, size - (size_t)n, "%stg%d", n ? "+" : "", t->n_gen);
    if (t->n_seqs > 1)
        n += snprintf(name + n, size - (size_t)n, " x%d", t->n_seqs);
    if (t->depth)
        snprintf(name + n, size - (size_t)n, " @%d", t->depth);
}

static int all_adapters(struct runtime *rt, struct lora_pick *picks)
{
    static struct adapter_info all[LORA_MAX_ADAPTERS];
    int n = adapters_list(rt->adapters, all, LORA_MAX_ADAPTERS);
    for (int i = 0; i < n; i++)
        picks[i] = (struct lora_pick){all[i].number, all[i].scale, all[i].serial, all[i].mark};
    return n;
}

/* Fills r[n_modes]: the selected mode and, if n_modes is 2, the other one: without adapters if
 * there are some, without checks of marks if pages have them, otherwise with determinism inverted. */
static bool run_test(struct runtime *rt, const struct bench_test *t, const struct bench_options *f,
                     struct bench_memory *memory, struct result *r, int n_modes, struct error *err)
{
    int reps = f->reps;
    struct kv_seq *seqs = mem_zalloc((size_t)t->n_seqs, sizeof *seqs);
    static double readings[2 * MAX_REPS];
    int n_readings = 0;
    bool ok = true, asked = rt->be->deterministic, marks = rt->kv->canary != NULL;
    static struct bench_loras loras[2]; /* the second has none */
    if (rt->adapters)
        loras[0].n = all_adapters(rt, loras[0].picks);
    for (int i = f->no_warmup ? 0 : -n_modes; ok && i < reps * n_modes;
         i++) { /* one warm-up per mode */
        /* The selected mode runs last, so that the backend's kernel statistics describe it. */
        int mode = n_modes - 1 - (i + n_modes) % n_modes;
        const struct bench_loras *l = &loras[mode];
        r[mode].n_loras = l->n;
        r[mode].marks = marks && (!mode || rt->adapters);
        stepper_check_marks(rt->step, r[mode].marks);
        r[mode].deterministic = mode && !rt->adapters && !marks ? !asked : asked;
        rt->be->deterministic = r[mode].deterministic;
        ok = bench_fill(rt, l, seqs, t->n_seqs, t->depth, err);
        if (memory && i >= 0)
            readings[n_readings++] = bench_memory_read(memory);
        if (i >= 0 && i < n_modes)
            r[mode].before = rt->profile;
        int64_t t0 = clock_ns();
        ok = ok && (!t->n_prompt || bench_fill(rt, l, seqs, t->n_seqs, t->n_prompt, err)) &&
             (!t->n_gen || bench_decode(rt, l, seqs, t->n_seqs, t->n_gen, err));
        double s = (double)(clock_ns() - t0) * 1e-9;
        if (ok && i >= 0)
            r[mode].rates[r[mode].n_rates++] = t->n_seqs * (t->n_gen ? t->n_gen : t->n_prompt) / s;
        if (ok && i >= 0 && i < n_modes) {
            r[mode].after = rt->profile;
            r[mode].hash = logits_hash(rt);
        }
        for (int k = 0; k < t->n_seqs; k++)
            kvcache_release(rt->kv, &seqs[k]);
    }
    rt->be->deterministic = asked;
    mem_free(seqs);
    if (!ok)
        return false;
    int max = stepper_limits(rt->step)->max_tokens;
    int rows = t->n_gen ? t->n_seqs : t->n_prompt < max ? t->n_prompt : max;
    double seen = t->n_gen ? t->depth + t->n_prompt + t->n_gen / 2.0 : 0;
    for (int m = 0; m < n_modes; m++) {
        test_name(t, r[m].name, sizeof r[m].name);
        mean_dev(r[m].rates, reps, &r[m].mean, &r[m].dev);
        r[m].read_gb_s = median_of(readings, n_readings) * 1e-9;
        r[m].bytes = step_bytes(rt->model, rows) / rows;
        r[m].ops = token_ops(rt->model, t);
        r[m].kv_bytes =
            seen * (double)kvcache_token_bytes(&rt->model->net, rt->kv->k_type, rt->kv->v_type);
        r[m].gb_s = r[m].bytes * r[m].mean * 1e-9;
    }
    if ((rt->adapters || marks) && n_modes > 1)
        r[0].cost = r[1].cost = 1 - r[0].mean / r[1].mean;
    else if (n_modes > 1)
        r[0].cost = r[1].cost = asked ? 1 - r[0].mean / r[1].mean : 1 - r[1].mean / r[0].mean;
    return true;
}

static const char *invariance_name(enum invariance i)
{
    return i == INVARIANCE_ALWAYS ? "always" : i == INVARIANCE_CHOSEN ? "chosen" : "none";
}

/* The GPU's part of a JSON line: the device, and the share of its memory bandwidth reached. The
 * limit of a prompt is arithmetic, so it has none. */
static void print_gpu(const struct gpu_facts *g, const struct bench_test *t, const struct result *r)
{
    printf("\"gpu\": \"%s\", \"gpu_driver\": \"%s\", \"gpu_sms\": %d, \"gpu_sm_mhz\": %d, "
           "\"gpu_max_sm_mhz\": %d, \"gpu_memory_mhz\": %d, \"gpu_memory_bytes\": %zu, "
           "\"gpu_read_gb_s\": %.1f, ",
           g->name, g->driver, g->n_sm, g->sm_mhz, g->max_sm_mhz, g->memory_mhz, g->memory_bytes,
           g->read_bytes_s * 1e-9);
    double limit = t->n_gen && !t->n_prompt ? g->read_bytes_s / (r->bytes + r->kv_bytes) : 0;
    if (limit > 0)
        printf("\"limit_tok_s\": %.1f, \"percent_of_limit\": %.2f, ", limit, 100 * r->mean / limit);
}

/* Weights and KV cache read by the median repetition, as a percentage of the memory bandwidth. */
static double read_percent(const struct result *r)
{
    static double sorted[MAX_REPS];
    memcpy(sorted, r->rates, (size_t)r->n_rates * sizeof *sorted);
    double gb_s = (r->bytes + r->kv_bytes) * median_of(sorted, r->n_rates) * 1e-9;
    return 100 * gb_s / r->read_gb_s;
}

/* Time per stage, for a step of the test's last phase. */
static void print_stages(const struct runtime *rt, const struct bench_test *t,
                         const struct result *r)
{
    int max = stepper_limits(rt->step)->max_tokens;
    int rows = t->n_gen ? t->n_seqs : t->n_prompt < max ? t->n_prompt : max;
    double depth = t->depth + (t->n_gen ? t->n_prompt + t->n_gen / 2.0 : 0);
    struct bench_step s = {.rows = rows, .outs = t->n_gen ? rows : 1, .seen = depth};
    if (!t->n_gen)
        s.seen += t->n_prompt / 2.0;
    s.kv_rows = t->n_gen ? depth * t->n_seqs : depth + t->n_prompt / 2.0;
    printf("\"stages\": ");
    bench_stages_json(rt->model,
                      kvcache_token_bytes(&rt->model->net, rt->kv->k_type, rt->kv->v_type), &s,
                      &r->before, &r->after, t->n_gen != 0, stdout);
    printf(", ");
}

/* The single rates of a JSON line, and with --ceiling the share of memory bandwidth of their
 * median. */
static void print_rates(const struct result *r)
{
    printf("\"rates\": [");
    for (int i = 0; i < r->n_rates; i++)
        printf("%s%.3f", i ? ", " : "", r->rates[i]);
    printf("], ");
    if (r->read_gb_s > 0)
        printf("\"read_gb_s\": %.2f, \"percent_of_read\": %.2f, ", r->read_gb_s, read_percent(r));
}

/* Since the model was opened; memory 0: all experts are in memory. */
static struct tier_stats experts_of(const struct runtime *rt)
{
    struct tier_stats s = {0};
    if (rt->be->ops->tier)
        rt->be->ops->tier->stats(rt->be, &s);
    return s;
}

static void print_result(const struct runtime *rt, const struct bench_test *t,
                         const struct result *r, bool json, int threads,
                         const struct gpu_facts *gpu)
{
    struct tier_stats experts = experts_of(rt);
    if (json) {
        printf("{");
        if (gpu)
            print_gpu(gpu, t, r);
        if (rt->be->profile)
            print_stages(rt, t, r);
        print_rates(r);
        if (experts.memory)
            printf("\"expert_memory\": %zu, \"expert_hits\": %llu, \"expert_misses\": %llu, "
                   "\"experts_ahead\": %llu, \"expert_bytes_read\": %llu, \"expert_wait_s\": "
                   "%.4f, ",
                   experts.memory, (unsigned long long)experts.hits,
                   (unsigned long long)experts.misses, (unsigned long long)experts.ahead,
                   (unsigned long long)experts.bytes, experts.wait);
        if (experts.on_host)
            printf("\"experts_on_device\": %llu, \"experts_on_host\": %llu, \"host_s\": %.4f, ",
                   (unsigned long long)experts.on_device, (unsigned long long)experts.on_host,
                   experts.host_seconds);
        printf("\"test\": \"%s\", \"tok_s\": %.3f, \"stddev\": %.3f, \"gb_s\": %.3f, "
               "\"seqs\": %d, \"depth\": %d, \"backend\": \"%s\", \"threads\": %d, "
               "\"weights_bytes\": %zu, \"params\": %lld, \"load_s\": %.3f, "
               "\"bytes_per_token\": %.0f, \"kv_bytes_per_token\": %.0f, \"ops_per_token\": %.0f, "
               "\"invariance\": \"%s\", \"deterministic\": %s, \"deterministic_cost\": %.4f, "
               "\"adapters\": %d, \"kv_canary\": %s, \"logits_hash\": \"%016llx\"}\n",
               r->name, r->mean, r->dev, r->gb_s, t->n_seqs, t->depth, rt->be->ops->name, threads,
               rt->model->bytes, (long long)rt->model->n_params, (double)rt->load_ns * 1e-9,
               r->bytes, r->kv_bytes, r->ops, invariance_name(rt->be->invariance),
               r->deterministic || rt->be->invariance == INVARIANCE_ALWAYS ? "true" : "false",
               r->cost, r->n_loras, r->marks ? "true" : "false", (unsigned long long)r->hash);
    } else {
        printf("| %-20s | %10.2f ± %-8.2f | %8.2f | %016llx |%s%s%s\n", r->name, r->mean, r->dev,
               r->gb_s, (unsigned long long)r->hash, r->deterministic ? " deterministic" : "",
               r->n_loras ? " adapters" : "", r->marks ? " --kv-canary" : "");
        if (r->read_gb_s > 0)
            printf("| %-20s | %8.2f GB/s, %.0f %% reached | | |\n", "  memory bandwidth",
                   r->read_gb_s, read_percent(r));
        if (experts.memory)
            printf("| %-20s | %.0f %% in memory, %.2f GB read, %.2f s waited | | |\n",
                   "  experts so far",
                   100 * (double)experts.hits / fmax((double)(experts.hits + experts.misses), 1),
                   (double)experts.bytes * 1e-9, experts.wait);
    }
    fflush(stdout);
}

/* Printed after the table: the cost of --deterministic, or why there is none. */
static void print_cost(enum invariance i, double least, double most)
{
    if (i == INVARIANCE_CHOSEN)
        printf("\n--deterministic costs %.1f %% to %.1f %% of the speed\n", least * 100,
               most * 100);
    else if (i == INVARIANCE_ALWAYS)
        printf("\n--deterministic costs nothing: these kernels give the same bytes in any batch\n");
    else
        printf("\n--deterministic is not offered by this backend\n");
}

static void print_head(const struct runtime *rt, const struct gpu_facts *gpu)
{
    char size[16];
    printf("%s: %.2f B parameters (%.2f B active), %s, backend %s, loaded in %.2f s\n\n",
           rt->file->path, (double)rt->model->n_params * 1e-9, (double)rt->model->n_active * 1e-9,
           cli_bytes((double)rt->model->bytes, size), rt->be->ops->name,
           (double)rt->load_ns * 1e-9);
    if (gpu && !gpu->n_sm)
        printf("%s, driver %s\n\n", gpu->name, gpu->driver[0] ? gpu->driver : "unknown");
    else if (gpu)
        printf("%s, %d SMs at up to %d MHz, driver %s; measured memory bandwidth %.2f TB/s\n\n",
               gpu->name, gpu->n_sm, gpu->max_sm_mhz, gpu->driver[0] ? gpu->driver : "unknown",
               gpu->read_bytes_s * 1e-12);
    printf("| test                 |                tok/s |     GB/s | logits           |\n");
    printf("|----------------------|---------------------:|---------:|------------------|\n");
}

static bool measure(struct runtime *rt, const struct bench_options *f,
                    const struct runtime_options *opt, const struct bench_test *tests, int n_tests,
                    struct error *err)
{
    struct gpu_facts facts;
    const struct gpu_facts *gpu = device_facts_of(rt->be, &facts) ? &facts : NULL;
    int threads = f->model.threads ? f->model.threads : -1;
    if (!f->json)
        print_head(rt, gpu);
    bool ok = true;
    int n_modes =
        (rt->be->invariance == INVARIANCE_CHOSEN || rt->adapters || rt->kv->canary) && !f->skip_cost
            ? 2
            : 1;
    double least = 0, most = 0;
    struct bench_memory *memory = NULL;
    if (f->ceiling && gpu)
        ok = error_set(err, "--ceiling measures the CPU's memory; a GPU's is always measured");
    else if (f->ceiling)
        ok = (memory = bench_memory_new(f->model.threads, err)) != NULL;
    for (int i = 0; ok && i < n_tests; i++) {
        static struct result r[2];
        memset(r, 0, sizeof r);
        ok = run_test(rt, &tests[i], f, memory, r, n_modes, err);
        for (int m = 0; ok && m < n_modes; m++)
            print_result(rt, &tests[i], &r[m], f->json, threads, gpu);
        least = !i || r[0].cost < least ? r[0].cost : least;
        most = !i || r[0].cost > most ? r[0].cost : most;
    }
    bench_memory_free(memory);
    if (ok && n_tests && !f->json && !f->skip_cost && rt->adapters)
        printf("\n%d adapters, alternating, cost %.1f %% to %.1f %% of the speed\n", opt->n_loras,
               least * 100, most * 100);
    else if (ok && n_tests && !f->json && !f->skip_cost && rt->kv->canary)
        printf("\n--kv-canary costs %.1f %% to %.1f %% of the speed\n", least * 100, most * 100);
    else if (ok && n_tests && !f->json && !f->skip_cost)
        print_cost(rt->be->invariance, least, most);
    for (int i = 0; ok && opt->draft && i < n_tests; i++)
        if (tests[i].n_gen && !tests[i].n_prompt)
            ok = bench_draft(rt, tests[i].n_seqs, tests[i].depth, f->json, err);
    if (ok && f->model.profile)
        profile_print(&rt->profile, f->json ? stderr : stdout);
    return ok;
}

/* --picks */
static bool audit(struct runtime *rt, const struct bench_options *f, const struct bench_test *tests,
                  int n_tests, struct error *err)
{
    bool ok = true;
    if (!rt->be->ops->picks)
        return error_set(err, "--picks: this device has no kernel tables");
    if (rt->adapters || f->both || getenv("STEEL_PICK"))
        return error_set(err, "--picks cannot be combined with --lora, --pg or STEEL_PICK");
    for (int i = 0; ok && i < n_tests; i++)
        ok = bench_picks(rt, &tests[i], f->reps, f->json, err);
    return ok;
}

static bool bench(const char *path, const struct bench_options *f, struct runtime_options *opt,
                  const struct bench_test *tests, int n_tests, struct error *err)
{
    int need = 1, seqs = 1, tokens = 1;
    for (int i = 0; i < n_tests; i++) {
        int len = tests[i].depth + tests[i].n_prompt + tests[i].n_gen;
        len += f->picks ? BENCH_WARM_STEPS : 0;
        if (opt->draft) /* the steps of bench_draft */
            len += 2 * opt->draft * (BENCH_DRAFT_STEPS + 2) + DRAFT_MOST;
        need = len > need ? len : need;
        seqs = tests[i].n_seqs > seqs ? tests[i].n_seqs : seqs;
        int total = len * tests[i].n_seqs;
        tokens = total > tokens ? total : tokens;
    }
    if (!opt->context)
        opt->context = need;
    opt->max_seqs = seqs;
    opt->max_out = seqs * (1 + opt->draft);
    opt->draft_from =
        opt->draft ? 1u << DRAFT_TEXT | 1u << DRAFT_HEAD : 0; /* without a block, too */
    opt->max_tokens = f->ubatch && f->ubatch < seqs ? seqs : f->ubatch;
    opt->kv_tokens = tokens + seqs * 64;
    struct runtime *rt = cli_open(path, opt, err);
    if (!rt)
        return false;
    bool ok =
        f->picks ? audit(rt, f, tests, n_tests, err) : measure(rt, f, opt, tests, n_tests, err);
    if (ok && f->kernels && !backend_print_picks(rt->be, f->json ? stderr : stdout))
        fprintf(stderr, "steel: --kernels: this device has no kernel tables\n");
    runtime_close(rt);
    return ok;
}

int cmd_bench(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "serve"))
        return cmd_bench_serve(argc - 1, argv + 1);
    struct bench_options f = {.prompt = "512", .gen = "128", .batch = "1", .depth = "0", .reps = 3};
    const char *model = NULL;
    const struct opt opts[] = {
        MODEL_ROW(model),
        {OPT_STRING, 'p', "prompt", "n-prompt", &f.prompt, 0, 0, "N,..",
         "prompt lengths to read (default 512; 0 = none)"},
        {OPT_STRING, 'n', "gen", "n-gen", &f.gen, 0, 0, "N,..",
         "tokens to generate (default 128; 0 = none)"},
        {OPT_STRING, 'b', "batch", 0, &f.batch, 0, 0, "N,..",
         "sequences generated in one batch (default 1)"},
        {OPT_STRING, 'd', "depth", "n-depth", &f.depth, 0, 0, "N,..",
         "tokens already in the context (default 0)"},
        {OPT_STRING, 0, "pg", 0, &f.both, 0, 0, "P,G",
         "read prompts of P tokens, then generate G; the rate counts generated tokens"},
        {OPT_INT, 'r', "reps", "repetitions", &f.reps, 1, MAX_REPS, "N", "repetitions (default 3)"},
        {OPT_INT, 0, "ubatch", "ubatch-size", &f.ubatch, 1, 1 << 20, "N",
         "most rows of one step (default 512, on a GPU 2048)"},
        {OPT_INT, 0, "texts", 0, &f.texts, 1, 1 << 20, "N",
         "embed N texts of 20 to 200 tokens instead (default for encoders: 512)"},
        {OPT_FLAG, 0, "no-warmup", 0, &f.no_warmup, 0, 0, 0, "no warm-up before the measured runs"},
        {OPT_FLAG, 0, "skip-cost", 0, &f.skip_cost, 0, 0, 0,
         "do not measure the cost of --deterministic, --kv-canary or adapters"},
        {OPT_FLAG, 0, "ceiling", 0, &f.ceiling, 0, 0, 0,
         "also measure the memory bandwidth between repetitions (CPU)"},
        {OPT_FLAG, 0, "kernels", 0, &f.kernels, 0, 0, 0,
         "print the kernel tables and how often each kernel ran"},
        {OPT_FLAG, 0, "picks", 0, &f.picks, 0, 0, 0,
         "measure what each row of the kernel tables gains over the next that fits"},
        {OPT_FLAG, 0, "json", 0, &f.json, 0, 0, 0, "print one JSON object per line"},
        {OPT_INT, 0, "draft", 0, &f.model.draft, 0, DRAFT_MOST, "N",
         "also measure the cost of 1 to N draft tokens per step; with --replay: always N at most"},
        {OPT_STRING, 0, "replay", 0, &f.replay, 0, 0, "FILE",
         "generate recorded texts instead, with and without drafts (bench/draft.py writes them)"},
        {OPT_FLOAT, 0, "accept", 0, &f.accept, 0, 1, "X",
         "with --replay: this share of drafts is right, whatever the draft model proposes"},
        DRAFT_MODEL_ROWS(f.model),
        LORA_ROW(f.model),
        MODEL_FLAG_ROWS(f.model),
    };
    const struct usage u = {
        .command = "bench",
        .synopsis = "[MODEL] [options]",
        .about =
            "Measures speed. ppN reads a prompt of N tokens, tgN generates N tokens,\n"
            "tgN xS generates for S sequences at once, @D starts with D tokens in the context.",
        .examples = "  steel bench model.gguf -p 512 -n 128 --batch 1,4,16\n",
        .opts = opts,
        .n_opts = sizeof opts / sizeof *opts,
        .min_args = 0,
        .max_args = 1,
    };
    const char *pos[1];
    int n = args_parse(&u, argc, argv, pos);
    if (n < 0)
        return cli_args_exit(n);
    if (!cli_take_model(&u, &model, pos, &n, 0))
        return EXIT_USAGE;
    int pp[MAX_LIST], tg[MAX_LIST], batch[MAX_LIST], depth[MAX_LIST], n_pp, n_tg, n_batch, n_depth;
    if (!args_int_list(f.prompt, pp, MAX_LIST, &n_pp) ||
        !args_int_list(f.gen, tg, MAX_LIST, &n_tg) ||
        !args_int_list(f.batch, batch, MAX_LIST, &n_batch) ||
        !args_int_list(f.depth, depth, MAX_LIST, &n_depth))
        return cli_args_exit(args_usage_error(&u, "-p, -n, -b and -d take lists like 128,512"));
    int both[2], n_both = 0;
    if (f.both &&
        (!args_int_list(f.both, both, 2, &n_both) || n_both != 2 || both[0] < 1 || both[1] < 1))
        return cli_args_exit(args_usage_error(&u, "--pg takes two numbers, such as 256,128"));
    struct bench_test tests[MAX_LIST * 8];
    int n_tests = 0, room = MAX_LIST * 8;
    for (int d = 0; d < n_depth; d++) {
        for (int i = 0; i < n_pp && n_tests < room; i++)
            if (pp[i])
                tests[n_tests++] = (struct bench_test){pp[i], 0, 1, depth[d]};
        for (int i = 0; i < n_tg; i++)
            for (int k = 0; k < n_batch && n_tests < room; k++)
                if (tg[i] && batch[k] >= 1)
                    tests[n_tests++] = (struct bench_test){0, tg[i], batch[k], depth[d]};
        for (int k = 0; n_both && k < n_batch && n_tests < room; k++)
            if (batch[k] >= 1)
                tests[n_tests++] = (struct bench_test){both[0], both[1], batch[k], depth[d]};
    }
    struct runtime_options opt;
    if (f.accept > 0 && !f.replay)
        return cli_args_exit(args_usage_error(&u, "--accept belongs to --replay"));
    if (!cli_runtime_options(&u, &f.model, &opt))
        return EXIT_USAGE;
    struct error err = {0};
    cli_catch_interrupt();
    bool ok = hub_resolve(&model, &err);
    if (ok && !f.texts && bench_embed_only(model))
        f.texts = 512;
    opt.max_tokens = f.ubatch; /* for bench_embed; bench() sets its own */
    if (ok && f.replay) {
        opt.draft = opt.draft ? opt.draft : DRAFT_AUTO;
        ok = bench_replay(model, f.replay, &opt, batch, n_batch, f.reps, f.accept, f.json, &err);
    } else if (ok && f.texts)
        ok = bench_embed(model, &opt, f.texts, f.reps, f.json, &err);
    else
        ok = ok && bench(model, &f, &opt, tests, n_tests, &err);
    cli_runtime_options_clear(&opt);
    if (ok)
        return EXIT_OK;
    return cli_interrupted() ? EXIT_INTERRUPTED : cli_fail(&err);
}
