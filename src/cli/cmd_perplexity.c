/*
 * steel perplexity: how well a model predicts a text, and how much its predictions differ from
 * another run's (KL divergence, top-1 agreement), which measures the cost of quantisation.
 *
 * The text is cut into windows. The first half of each window is context, the second half is scored
 * (the usual measure). Saved logits are records of i32 T, i32 V, i32 ids[T], f32 logits[T][V], one
 * per window: the format of `steel logits`.
 */
#include "cli/cli.h"
#include "cli/hub/hub.h"
#include "base/mem.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct ppl_flags {
    struct model_flags model;
    const char *kl, *save;
    int window, n_windows;
    bool score_all, json;
};

struct totals {
    int64_t n;              /* scored tokens */
    double nll, nll2;       /* sum and sum of squares of -log p */
    double kl, kl2, kl_max; /* against the base */
    double base_nll;
    int64_t same_top;
};

/* The log of the sum of exponentials; *top: the index of the largest. */
static double log_sum(const float *row, int n, int *top)
{
    int best = 0;
    for (int i = 1; i < n; i++)
        if (row[i] > row[best])
            best = i;
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += exp((double)row[i] - (double)row[best]);
    *top = best;
    return (double)row[best] + log(sum);
}

static void score(struct totals *t, const float *row, const float *base, int n_vocab, int32_t next)
{
    int top, base_top;
    double z = log_sum(row, n_vocab, &top);
    double nll = z - (double)row[next];
    t->n++;
    t->nll += nll;
    t->nll2 += nll * nll;
    if (!base)
        return;
    double zb = log_sum(base, n_vocab, &base_top), kl = 0;
    for (int i = 0; i < n_vocab; i++) {
        double lb = (double)base[i] - zb;
        kl += exp(lb) * (lb - ((double)row[i] - z));
    }
    t->kl += kl;
    t->kl2 += kl * kl;
    t->kl_max = fmax(t->kl_max, kl);
    t->base_nll += zb - (double)base[next];
    t->same_top += top == base_top;
}

/* Reads a record's header and ids. The logits follow, row by row. */
static bool base_begin(FILE *f, const char *path, int n_vocab, const int32_t *ids, int n,
                       struct error *err)
{
    int32_t head[2];
    if (fread(head, 4, 2, f) != 2)
        return error_set(err, "%s: has fewer windows than the text", path);
    if (head[0] != n || head[1] != n_vocab)
        return error_set(err, "%s: window of %d tokens, vocabulary %d; this run has %d and %d",
                         path, head[0], head[1], n, n_vocab);
    for (int i = 0; i < n; i++) {
        int32_t id;
        if (fread(&id, 4, 1, f) != 1)
            return error_set(err, "%s: truncated", path);
        if (id != ids[i])
            return error_set(
                err, "%s: made from another text (token %d is %d in this run, %d in the file)",
                path, i, ids[i], id);
    }
    return true;
}

struct evaluation {
    struct runtime *rt;
    const struct ppl_flags *f;
    FILE *base, *save;
    float *row, *base_row; /* (n_vocab) */
    struct totals t;
};

static bool one_window(struct evaluation *e, const int32_t *ids, int n, struct error *err)
{
    int V = e->rt->model->config.n_vocab, chunk = stepper_limits(e->rt->step)->max_tokens;
    struct lora_pick picks[LORA_MAX_USES];
    int n_picks = cli_all_adapters(e->rt, picks);
    struct kv_seq seq = {0};
    bool ok = true;
    if (e->base)
        ok = base_begin(e->base, e->f->kl, V, ids, n, err);
    if (ok && e->save) {
        int32_t head[2] = {n, V};
        ok = fwrite(head, 4, 2, e->save) == 2 && fwrite(ids, 4, (size_t)n, e->save) == (size_t)n;
        if (!ok)
            error_set(err, "%s: %s", e->f->save, strerror(errno));
    }
    int first_scored = e->f->score_all ? 0 : n / 2;
    for (int at = 0; ok && at < n; at += chunk) {
        int take = n - at < chunk ? n - at : chunk;
        struct step_item item = {.seq = &seq,
                                 .tokens = ids + at,
                                 .n_tokens = take,
                                 .loras = picks,
                                 .n_loras = n_picks,
                                 .want = LOGITS_ALL};
        ok = step_run(e->rt->step, &item, 1, err);
        for (int i = 0; ok && i < take; i++) {
            int t = at + i;
            step_logits(e->rt->step, item.first_row + i, e->row);
            ok = step_ok(e->rt->step, err);
            if (ok && e->save && fwrite(e->row, 4, (size_t)V, e->save) != (size_t)V)
                ok = error_set(err, "%s: %s", e->f->save, strerror(errno));
            if (ok && e->base && fread(e->base_row, 4, (size_t)V, e->base) != (size_t)V)
                ok = error_set(err, "%s: truncated", e->f->kl);
            if (ok && t >= first_scored && t + 1 < n)
                score(&e->t, e->row, e->base ? e->base_row : NULL, V, ids[t + 1]);
        }
    }
    kvcache_release(e->rt->kv, &seq);
    return ok;
}

/* The standard error of the mean, from the sums of n values and of their squares. */
static double mean_error(double sum, double squares, int64_t n)
{
    double mean = sum / (double)n, var = squares / (double)n - mean * mean;
    return n > 1 && var > 0 ? sqrt(var / (double)(n - 1)) : 0;
}

static void print_totals(const struct evaluation *e)
{
    const struct totals *t = &e->t;
    double n = (double)t->n, ppl = exp(t->nll / n);
    double err = ppl * mean_error(t->nll, t->nll2, t->n);
    if (e->f->json) {
        printf("{\"perplexity\": %.6f, \"error\": %.6f, \"tokens\": %lld", ppl, err,
               (long long)t->n);
        if (e->base)
            printf(", \"kl\": %.9f, \"kl_error\": %.9f, \"kl_max\": %.6f, \"top1\": %.6f, "
                   "\"base_perplexity\": %.6f",
                   t->kl / n, mean_error(t->kl, t->kl2, t->n), t->kl_max, (double)t->same_top / n,
                   exp(t->base_nll / n));
        printf("}\n");
        return;
    }
    printf("perplexity      %.4f ± %.4f over %lld tokens\n", ppl, err, (long long)t->n);
    if (!e->base)
        return;
    printf("base perplexity %.4f (ratio %.5f)\n", exp(t->base_nll / n), ppl / exp(t->base_nll / n));
    printf("KL divergence   %.6f ± %.6f, largest %.4f\n", t->kl / n,
           mean_error(t->kl, t->kl2, t->n), t->kl_max);
    printf("same top token  %.2f %%\n", 100.0 * (double)t->same_top / n);
}

static bool evaluate(struct evaluation *e, const struct token_list *ids, struct error *err)
{
    int w = e->f->window, windows = (int)(ids->n / (size_t)w);
    if (e->f->n_windows && windows > e->f->n_windows)
        windows = e->f->n_windows;
    if (windows < 1)
        return error_set(err, "the text has %zu tokens, one window needs %d (see --window)", ids->n,
                         w);
    bool terminal = isatty(STDERR_FILENO);
    for (int i = 0; i < windows; i++) {
        if (!one_window(e, ids->ids + (size_t)i * (size_t)w, w, err))
            return false;
        if (terminal)
            fprintf(stderr, "\r%d/%d windows, perplexity %.4f ", i + 1, windows,
                    exp(e->t.nll / (double)e->t.n));
        if (cli_interrupted())
            return error_set(err, "interrupted");
    }
    if (terminal)
        fprintf(stderr, "\r\033[K");
    return true;
}

static FILE *open_or_fail(const char *path, const char *mode, bool *ok, struct error *err)
{
    FILE *f = path && *ok ? fopen(path, mode) : NULL;
    if (path && *ok && !f)
        *ok = error_set(err, "%s: %s", path, strerror(errno));
    return f;
}

static bool perplexity(const char *model, const char *text_path, const struct ppl_flags *f,
                       struct runtime_options *opt, struct error *err)
{
    struct buf text = {0};
    struct token_list ids = {0};
    struct evaluation e = {.f = f};
    bool ok = cli_read_file(text_path, (size_t)1 << 30, &text, err);
    if (ok) {
        opt->context = f->window;
        opt->max_tokens = opt->max_out = f->window < 256 ? f->window : 256;
        e.rt = cli_open(model, opt, err);
        ok = e.rt != NULL;
    }
    if (ok && !e.rt->tokenizer) {
        *err = e.rt->tokenizer_error;
        ok = false;
    }
    ok = ok && tokenizer_encode(e.rt->tokenizer, text.p ? text.p : "", text.len,
                                TOKENIZE_SPECIAL | TOKENIZE_BOS, &ids, err);
    e.base = open_or_fail(f->kl, "rb", &ok, err);
    e.save = open_or_fail(f->save, "wb", &ok, err);
    if (ok) {
        size_t V = (size_t)e.rt->model->config.n_vocab;
        e.row = mem_zalloc(V, sizeof(float));
        e.base_row = mem_zalloc(V, sizeof(float));
        ok = evaluate(&e, &ids, err);
    }
    if (e.save && fclose(e.save) != 0 && ok)
        ok = error_set(err, "%s: %s", f->save, strerror(errno));
    if (ok)
        print_totals(&e);
    else if (e.save)
        remove(f->save);
    if (e.base)
        fclose(e.base);
    mem_free(e.row);
    mem_free(e.base_row);
    token_list_clear(&ids);
    buf_clear(&text);
    runtime_close(e.rt);
    return ok;
}

int cmd_perplexity(int argc, char **argv)
{
    struct ppl_flags f = {.window = 512};
    const char *model = NULL;
    const struct opt opts[] = {
        MODEL_ROW(model),
        {OPT_STRING, 0, "kl", 0, &f.kl, 0, 0, "BASE.bin",
         "also print KL divergence and top-1 agreement with saved logits"},
        {OPT_STRING, 0, "save", 0, &f.save, 0, 0, "OUT.bin",
         "save the logits of every position, for --kl of other runs"},
        {OPT_INT, 'w', "window", 0, &f.window, 2, 1 << 20, "N", "tokens per window (default 512)"},
        {OPT_INT, 0, "windows", "chunks", &f.n_windows, 1, 1 << 28, "N", "stop after N windows"},
        {OPT_FLAG, 0, "all", 0, &f.score_all, 0, 0, 0, "also score the first half of each window"},
        {OPT_FLAG, 0, "json", 0, &f.json, 0, 0, 0, "print one JSON object"},
        LORA_ROW(f.model),
        MODEL_FLAG_ROWS(f.model),
    };
    const struct usage u = {
        .command = "perplexity",
        .synopsis = "[MODEL] FILE [options]",
        .about = "Measures how well a model predicts a text: exp(mean -log p), lower is better.\n"
                 "With --kl, also how much its predictions differ from another run's.",
        .examples = "  steel perplexity model-f16.gguf text.txt --save base.bin\n"
                    "  steel perplexity model-q4.gguf text.txt --kl base.bin\n",
        .opts = opts,
        .n_opts = sizeof opts / sizeof *opts,
        .min_args = 1,
        .max_args = 2,
    };
    const char *pos[2];
    int n = args_parse(&u, argc, argv, pos);
    if (n < 0)
        return cli_args_exit(n);
    if (!cli_take_model(&u, &model, pos, &n, 1))
        return EXIT_USAGE;
    struct runtime_options opt;
    if (!cli_runtime_options(&u, &f.model, &opt))
        return EXIT_USAGE;
    struct error err = {0};
    cli_catch_interrupt();
    bool ok = cli_few_adapters(&opt, &err) && hub_resolve(&model, &err) &&
              perplexity(model, pos[0], &f, &opt, &err);
    cli_runtime_options_clear(&opt);
    if (ok)
        return EXIT_OK;
    return cli_interrupted() ? EXIT_INTERRUPTED : cli_fail(&err);
}
