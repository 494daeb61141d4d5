/* The plan of one process on this machine: see plan_fit.h. Prints; engine/runtime.c decides, engine/probe.c measures. */
#include "cli/plan_fit.h"
#include "base/buf.h"
#include "base/mem.h"
#include "cli/cli.h"
#include "engine/predict.h"
#include "engine/workers.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { BAR = 64, CPU_LEAST_CONTEXT = 4096 };

/* Prediction */

/* Formats with fewer of a model's values are not measured: they take the speed of the others. */
static const double SMALL_SHARE = 0.02;

static double all_values(const struct fit_weights *w)
{
    double n = 0;
    for (int t = 0; t < DT_COUNT; t++)
        n += w->formats[t].dense + w->formats[t].experts + w->formats[t].head;
    return n;
}

static bool measure(const struct plan_fit_options *o, struct plan_fit *p)
{
    const struct fit_weights *w = &p->plan.weights;
    bool wanted[DT_COUNT] = {false};
    struct buf place = {0};
    if (o->no_probe || p->plan.gpu)
        return error_set(&p->no_speed, "%s",
                         p->plan.gpu ? "not predicted on a GPU without --link" : "--no-probe");
    double least = all_values(w) * SMALL_SHARE;
    for (int t = 0; t < DT_COUNT; t++)
        wanted[t] = w->formats[t].dense + w->formats[t].experts + w->formats[t].head > least;
    const char *path = probe_place(&place) ? place.p : NULL;
    bool ok = probe_run(&o->runtime.backend, wanted, path, &p->probe, &p->no_speed);
    buf_clear(&place);
    return ok;
}

/* Seconds of products with n values of format t; unmeasured formats take the mean of the others by size. */
static double product_seconds(const struct plan_fit *p, enum dtype t, double n, double rows)
{
    double bits = 0, seconds = 0;
    if (p->probe.seconds[t][0] > 0)
        return n * probe_seconds(&p->probe, t, rows);
    for (int i = 0; i < DT_COUNT; i++)
        if (p->probe.seconds[i][0] > 0) {
            bits += (double)dtype_bytes((enum dtype)i, 4096);
            seconds += probe_seconds(&p->probe, (enum dtype)i, rows);
        }
    return bits > 0 ? n * seconds * (double)dtype_bytes(t, 4096) / bits : 0;
}

/* Bytes per second that products with one row read. */
static double read_rate(const struct plan_fit *p)
{
    double best = 0;
    for (int t = 0; t < DT_COUNT; t++)
        if (p->probe.seconds[t][0] > 0)
            best = fmax(best,
                        (double)dtype_bytes((enum dtype)t, 4096) / 4096 / p->probe.seconds[t][0]);
    return best;
}

static double step_seconds(const struct plan_fit *p, const struct predict_load *load)
{
    const struct fit_weights *w = &p->plan.weights;
    double met = predict_experts(w->n_expert, w->n_used, load->rows), seconds = 0;
    double share = w->n_expert ? met / w->n_expert : 0;
    double rows = met > 0 ? load->rows * w->n_used / met : 0; /* of an expert that has any */
    double most = 0;
    for (int t = 0; t < DT_COUNT; t++) {
        const struct fit_format *f = &w->formats[t];
        enum dtype type = (enum dtype)t;
        if (f->dense > 0)
            seconds += product_seconds(p, type, f->dense, load->rows);
        if (f->experts > 0)
            seconds += product_seconds(p, type, f->experts * share, rows);
        if (f->head > 0)
            seconds += product_seconds(p, type, f->head, load->outs);
        if (p->probe.seconds[t][0] > 0)
            most = fmax(most, 2 * 64 / probe_seconds(&p->probe, type, 64));
    }
    seconds += load->seqs * load->context * (double)p->plan.token_bytes / read_rate(p);
    seconds += load->rows * load->context * w->attn_flops / most;
    return seconds + w->n_products * p->probe.product;
}

double plan_fit_generation(const struct plan_fit *p, int m, int depth)
{
    struct predict_load load = {m, m, m, depth};
    return p->has_speed ? m / step_seconds(p, &load) : 0;
}

double plan_fit_prompt(const struct plan_fit *p, int n)
{
    double seconds = 0;
    for (int done = 0; done < n; done += p->plan.max_tokens) {
        int rows = n - done < p->plan.max_tokens ? n - done : p->plan.max_tokens;
        struct predict_load load = {rows, 1, 1, done + rows / 2.0};
        seconds += p->has_speed ? step_seconds(p, &load) : INFINITY;
    }
    return n / seconds;
}

/* Better flags */

static void add_better(struct plan_fit *p, const char *flags, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static void add_better(struct plan_fit *p, const char *flags, const char *format, ...)
{
    va_list args;
    if (p->n_better == (int)(sizeof p->better / sizeof *p->better))
        return;
    struct plan_better *b = &p->better[p->n_better++];
    snprintf(b->flags, sizeof b->flags, "%s", flags);
    va_start(args, format);
    vsnprintf(b->gain, sizeof b->gain, format, args);
    va_end(args);
}

static bool try_plan(struct tensorfile *f, const struct runtime_options *opt,
                     struct runtime_plan *out)
{
    struct error ignored;
    return runtime_plan(f, opt, out, &ignored) && out->fits;
}

/* Finds flags with which the model fits. */
static void find_fitting(struct tensorfile *f, const struct plan_fit_options *o, struct plan_fit *p)
{
    struct runtime_options opt = o->runtime;
    struct runtime_plan *q = mem_zalloc(1, sizeof *q);
    char flags[64];
    int least = p->plan.trained < CPU_LEAST_CONTEXT ? p->plan.trained : CPU_LEAST_CONTEXT;
    if (opt.context > 0) {
        opt.context = 0;
        if (try_plan(f, &opt, q)) {
            snprintf(flags, sizeof flags, "-c %d", q->context);
            add_better(p, flags, "the longest context that fits");
        }
        opt = o->runtime;
    }
    opt.k_type = opt.v_type = DT_Q8_0;
    if (o->runtime.k_type != DT_Q8_0 && try_plan(f, &opt, q))
        add_better(p, "--kv-type q8_0", "a context of %d fits", q->context);
    opt = o->runtime;
    opt.backend.no_repack = true;
    if (!o->runtime.backend.no_repack && !p->plan.gpu) {
        opt.context = opt.context > least ? least : opt.context;
        if (try_plan(f, &opt, q)) {
            snprintf(flags, sizeof flags, opt.context ? "--no-repack -c %d" : "--no-repack",
                     opt.context);
            add_better(p, flags, "weights stay in the file and are read again by every step");
        }
    }
    double beside = (double)(p->plan.step + p->plan.other) + (double)p->plan.state_bytes +
                    (double)p->plan.token_bytes * least;
    double left = (double)p->plan.usable - beside, values = all_values(&p->plan.weights);
    if (values > 0 && left * 8 / values >= 1 && left * 8 / values < 16)
        add_better(p, "a smaller file", "weights of %.1f bits or less would fit (it has %.1f)",
                   left * 8 / values, (double)fit_memory(&p->plan.weights) * 8 / values);
    mem_free(q);
}

static void find_better(struct tensorfile *f, const struct plan_fit_options *o, struct plan_fit *p)
{
    struct runtime_options opt = o->runtime;
    struct runtime_plan *q = mem_zalloc(1, sizeof *q);
    const struct runtime_plan *now = &p->plan;
    opt.k_type = opt.v_type = DT_Q8_0;
    opt.context = 0;
    if (now->context < now->trained && o->runtime.k_type == DT_NONE && try_plan(f, &opt, q) &&
        q->context > now->context)
        add_better(p, "--kv-type q8_0", "a context of %d", q->context);
    int64_t longest = now->room_tokens / (now->max_seqs ? now->max_seqs : 1);
    if (o->runtime.context > 0 && o->runtime.context < now->trained && longest > now->context)
        add_better(p, "no -c", "a context of %lld fits",
                   (long long)(longest < now->trained ? longest : now->trained));
    if (o->runtime.backend.no_repack && !now->gpu) {
        opt = o->runtime;
        opt.backend.no_repack = false;
        if (try_plan(f, &opt, q))
            add_better(p, "no --no-repack", "packed weights fit, too, and are faster");
    }
    mem_free(q);
}

bool plan_fit_make(struct tensorfile *f, const struct plan_fit_options *o, struct plan_fit *out,
                   struct error *err)
{
    *out = (struct plan_fit){0};
    if (!runtime_plan(f, &o->runtime, &out->plan, err))
        return false;
    if (out->plan.fits)
        find_better(f, o, out);
    else
        find_fitting(f, o, out);
    out->has_speed = out->plan.fits && measure(o, out);
    return true;
}

/* Output */

struct row {
    const char *name;
    char mark;
    size_t memory, host, mapped; /* on the device; beside a GPU in host memory; in the file */
};
enum { ROWS = FIT_PARTS + 7 };

static int rows_of(const struct plan_fit *p, struct row *out)
{
    static const char marks[] = "eamMxrhdn";
    const struct runtime_plan *plan = &p->plan;
    int n = 0;
    for (int i = 0; i < FIT_PARTS; i++)
        if (plan->weights.memory[i] + plan->weights.mapped[i] ||
            (i == FIT_EXPERTS && plan->weights.host))
            out[n++] =
                (struct row){fit_parts[i], marks[i], plan->weights.memory[i],
                             i == FIT_EXPERTS ? plan->weights.host : 0, plan->weights.mapped[i]};
    const struct row more[] = {
        {"adapters, image tower", 't', plan->more_weights, 0, 0},
        {"draft model", 'f', plan->small, 0, 0},
        {"KV cache", 'k', plan->kv, 0, 0},
        {"states", 's', plan->states, 0, 0},
        {"working memory", 'w', plan->step, 0, 0},
        {"program", 'p', plan->other, 0, 0},
    };
    for (size_t i = 0; i < sizeof more / sizeof *more; i++)
        if (more[i].memory)
            out[n++] = more[i];
    return n;
}

static size_t total_memory(const struct plan_fit *p)
{
    const struct runtime_plan *q = &p->plan;
    return fit_memory(&q->weights) + q->more_weights + q->small + q->kv + q->states + q->step +
           q->other;
}

/* The bar's full width is the usable memory; or the needed memory, if that is more, or too little to be seen. */
static void print_bar(FILE *to, const struct plan_fit *p, const struct row *rows, int n)
{
    double total = (double)total_memory(p), usable = (double)p->plan.usable, at = 0;
    double of = total < usable / 16 ? total : fmax(total, usable);
    char bar[BAR + 1], b[16];
    int done = 0;
    memset(bar, '.', BAR);
    bar[BAR] = 0;
    for (int i = 0; i < n; i++) {
        at += (double)rows[i].memory;
        for (int end = (int)lround(at / of * BAR); done < end; done++)
            bar[done] = rows[i].mark;
    }
    if (p->plan.free && usable < total)
        bar[(int)(usable / of * (BAR - 1))] = '|';
    fprintf(to, "  [%s]  %s%s\n", bar, cli_bytes(of, b),
            p->plan.free && usable < total ? "; | is what may be used" : "");
}

static void print_memory(FILE *to, const struct plan_fit *p)
{
    struct row rows[ROWS];
    int n = rows_of(p, rows);
    bool mapped = fit_mapped(&p->plan.weights) > 0, host = p->plan.weights.host > 0;
    char a[16], b[16], c[16];
    fprintf(to, "\n%26s  %10s%s%s\n", "", p->plan.gpu ? "GPU" : "RAM", host ? "          RAM" : "",
            mapped ? "         file" : "");
    for (int i = 0; i < n; i++) {
        fprintf(to, "%c %-24s  %10s", rows[i].mark, rows[i].name,
                rows[i].memory ? cli_bytes((double)rows[i].memory, a) : "-");
        if (host)
            fprintf(to, "  %11s", rows[i].host ? cli_bytes((double)rows[i].host, c) : "-");
        if (mapped)
            fprintf(to, "  %11s", rows[i].mapped ? cli_bytes((double)rows[i].mapped, b) : "-");
        fputc('\n', to);
    }
    fprintf(to, "  %-24s  %10s", "together", cli_bytes((double)total_memory(p), a));
    if (host)
        fprintf(to, "  %11s", cli_bytes((double)p->plan.weights.host, c));
    if (mapped)
        fprintf(to, "  %11s", cli_bytes((double)fit_mapped(&p->plan.weights), b));
    fputc('\n', to);
    print_bar(to, p, rows, n);
}

static void print_fit(FILE *to, const struct plan_fit *p)
{
    const struct runtime_plan *q = &p->plan;
    char a[16], b[16];
    if (q->free)
        fprintf(to, "\nmemory      %s are free, %s of it may be used\n",
                cli_bytes((double)q->free, a), cli_bytes((double)q->usable, b));
    else
        fprintf(to, "\nmemory      how much is free is not known\n");
    if (!q->fits) {
        fprintf(to, "fits        no: %s\n", q->why.msg);
        return;
    }
    fprintf(to, "fits        yes: %d sequence%s, context of %d tokens", q->max_seqs,
            q->max_seqs == 1 ? "" : "s", q->context);
    if (q->context < q->trained)
        fprintf(to, " (the model could have %d)", q->trained);
    if (q->token_bytes)
        fprintf(to, "; cache of %lld tokens, %zu bytes each", (long long)q->tokens, q->token_bytes);
    fputc('\n', to);
    if (q->room_tokens > q->tokens)
        fprintf(to, "room        for %lld tokens: %lld sequences of 4096, or %lld of %d\n",
                (long long)q->room_tokens, (long long)(q->room_tokens / 4096),
                (long long)(q->room_tokens / q->trained), q->trained);
    if (q->notice.msg[0])
        fprintf(to, "note        %s\n", q->notice.msg);
}

static void print_speed(const struct plan_fit_options *o, const struct plan_fit *p)
{
    if (!p->has_speed) {
        if (p->no_speed.msg[0])
            printf("speed       %s\n", p->no_speed.msg);
        return;
    }
    printf("speed       prompt of %d: %.0f tokens a second", o->prompt,
           plan_fit_prompt(p, o->prompt));
    for (int i = 0; i < o->n_seqs; i++)
        printf("%s %d sequence%s: %.1f", i ? "," : "; generation,", o->seqs[i],
               o->seqs[i] == 1 ? "" : "s", plan_fit_generation(p, o->seqs[i], o->depth));
    printf("\n            (predicted from products measured %s%s)\n",
           p->probe.cached ? "earlier" : "now",
           fit_mapped(&p->plan.weights) ? "; as if all weights were in memory" : "");
}

static void print_better(FILE *to, const struct plan_fit *p)
{
    for (int i = 0; i < p->n_better; i++)
        fprintf(to, "%s      %-20s %s\n",
                i              ? "      "
                : p->plan.fits ? "better"
                               : "would ",
                p->better[i].flags, p->better[i].gain);
}

void plan_fit_print(const struct tensorfile *f, const struct config *c,
                    const struct plan_fit_options *o, const struct plan_fit *p)
{
    printf("%s: %s, %d layers, on %s", f->path, c->arch_name, c->n_layers, p->plan.device);
    if (!p->plan.gpu)
        printf(" with %d thread%s", p->plan.threads, p->plan.threads == 1 ? "" : "s");
    printf("\n");
    print_memory(stdout, p);
    print_fit(stdout, p);
    print_speed(o, p);
    print_better(stdout, p);
}

void plan_fit_advise(const char *path, const struct runtime_options *opt)
{
    struct plan_fit_options o = {.runtime = *opt, .no_probe = true};
    struct plan_fit *p = mem_zalloc(1, sizeof *p);
    struct error ignored;
    struct tensorfile *f = workers_wait() ? NULL : tensorfile_open(path, &ignored);
    if (f && plan_fit_make(f, &o, p, &ignored) && !p->plan.fits) {
        print_memory(stderr, p);
        print_fit(stderr, p);
        print_better(stderr, p);
    }
    tensorfile_close(f);
    mem_free(p);
}

json_t *plan_fit_json(const struct plan_fit_options *o, const struct plan_fit *p)
{
    const struct runtime_plan *q = &p->plan;
    struct row rows[ROWS];
    int n = rows_of(p, rows);
    json_t *parts = json_array(), *better = json_array(), *speeds = json_null();
    for (int i = 0; i < n; i++)
        json_array_append_new(parts, json_pack("{s:s,s:I,s:I,s:I}", "part", rows[i].name, "memory",
                                               (json_int_t)rows[i].memory, "host",
                                               (json_int_t)rows[i].host, "file",
                                               (json_int_t)rows[i].mapped));
    for (int i = 0; i < p->n_better; i++)
        json_array_append_new(
            better, json_pack("{s:s,s:s}", "flags", p->better[i].flags, "gain", p->better[i].gain));
    if (p->has_speed) {
        json_t *gen = json_array();
        for (int i = 0; i < o->n_seqs; i++)
            json_array_append_new(gen, json_pack("{s:i,s:i,s:f}", "sequences", o->seqs[i], "depth",
                                                 o->depth, "tokens_per_second",
                                                 plan_fit_generation(p, o->seqs[i], o->depth)));
        speeds = json_pack("{s:{s:i,s:f},s:o,s:b}", "prompt", "tokens", o->prompt,
                           "tokens_per_second", plan_fit_prompt(p, o->prompt), "generation", gen,
                           "measured_earlier", p->probe.cached);
    }
    return json_pack("{s:s,s:b,s:b,s:s,s:s, s:I,s:I,s:I,s:o, s:i,s:i,s:i,s:I,s:I, s:o,s:o}",
                     "device", q->device, "gpu", q->gpu, "fits", q->fits, "why", q->why.msg,
                     "notice", q->notice.msg, "free_bytes", (json_int_t)q->free, "usable_bytes",
                     (json_int_t)q->usable, "needed_bytes", (json_int_t)total_memory(p), "parts",
                     parts, "context", q->context, "model_context", q->trained, "sequences",
                     q->max_seqs, "cache_tokens", (json_int_t)q->tokens, "room_tokens",
                     (json_int_t)q->room_tokens, "speed", speeds, "better", better);
}
