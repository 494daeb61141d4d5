/* See generate.h. */
#include "cli/generate.h"
#include "cli/plain.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <unistd.h>

static bool show_progress(void *arg, int percent)
{
    if (*(bool *)arg)
        cli_progress_bar(percent);
    return !cli_interrupted();
}

struct steel_engine *generate_open(const char *path, struct steel_engine_options *opt,
                                   struct steel_error *err)
{
    bool terminal = isatty(STDERR_FILENO);
    opt->progress = show_progress;
    opt->progress_arg = &terminal;
    struct steel_engine *e = steel_engine_open(path, opt, err);
    if (terminal)
        fprintf(stderr, "\r\033[K");
    if (e) {
        struct steel_info info;
        steel_engine_info(e, &info);
        if (*info.notice)
            fprintf(stderr, "steel: %s\n", info.notice);
    }
    return e;
}

void generate_limit(struct steel_request_options *o, int n_predict)
{
    o->max_tokens = n_predict > 0 ? n_predict : 0;
    o->read_only = n_predict == 0;
}

struct steel_request_options generate_unset(void)
{
    struct steel_request_options o = steel_request_options();
    o.temperature = o.top_p = o.min_p = o.repeat_penalty = NAN;
    o.top_k = o.repeat_last_n = INT_MIN;
    return o;
}

void generate_advise(struct steel_request_options *o, const struct steel_engine *engine)
{
    struct steel_request_options a = steel_engine_request_options(engine);
    const struct {
        float *set, advised;
    } floats[] = {{&o->temperature, a.temperature},
                  {&o->top_p, a.top_p},
                  {&o->min_p, a.min_p},
                  {&o->repeat_penalty, a.repeat_penalty}};
    const struct {
        int *set, advised;
    } ints[] = {{&o->top_k, a.top_k}, {&o->repeat_last_n, a.repeat_last_n}};
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++)
        if (isnan(*floats[i].set))
            *floats[i].set = floats[i].advised;
    for (size_t i = 0; i < sizeof ints / sizeof *ints; i++)
        if (*ints[i].set == INT_MIN)
            *ints[i].set = ints[i].advised;
}

bool generate_text(struct steel_engine *engine, const struct steel_request_options *o,
                   struct steel_event *end, struct steel_error *err)
{
    struct steel_request *r = steel_request_submit(engine, o, err);
    struct steel_event ev;
    bool cancelled = false;
    if (!r)
        return false;
    while (!steel_request_done(r)) {
        if ((cli_interrupted() || ferror(stdout)) && !cancelled) {
            steel_request_cancel(r);
            cancelled = true;
        }
        if (!steel_request_next(r, &ev, INTERRUPT_MS))
            continue;
        if (ev.n_text) {
            plain_print(stdout, ev.text, ev.n_text);
            fflush(stdout);
        }
        *end = ev;
    }
    if (end->n_generated)
        fputc('\n', stdout);
    fflush(stdout);
    bool ok = generate_ended(engine, o, end, err);
    end->text = end->error = NULL; /* these pointers are valid until the request is freed */
    steel_request_free(r);
    return ok;
}

bool generate_ended(const struct steel_engine *engine, const struct steel_request_options *o,
                    const struct steel_event *end, struct steel_error *err)
{
    err->kind = STEEL_INVALID;
    if (end->finish == STEEL_FAILED) {
        snprintf(err->message, sizeof err->message, "%s", end->error);
        return false;
    }
    bool all = o->read_only || (o->max_tokens > 0 && end->n_generated >= o->max_tokens);
    if (end->finish != STEEL_LENGTH || all)
        return true;
    snprintf(err->message, sizeof err->message,
             "the context of %d tokens is full (prompt %d, generated %d); see -c",
             steel_engine_context(engine), end->n_prompt, end->n_generated);
    return false;
}

static double rate(int n, double s)
{
    return s > 0 ? n / s : 0;
}

void generation_describe(const struct steel_event *end, struct buf *out)
{
    int n_read = end->n_prompt - end->n_cached;
    double first = end->n_generated ? end->first_token_s : end->total_s;
    buf_addf(out, "prompt %d tokens", end->n_prompt);
    if (end->n_cached)
        buf_addf(out, " (%d read, %d cached)", n_read, end->n_cached);
    buf_addf(out, ", %.1f tok/s", rate(n_read, first - end->queue_s));
    if (end->n_generated)
        buf_addf(out, " | generated %d tokens, %.1f tok/s", end->n_generated,
                 rate(end->n_generated - 1, end->total_s - first));
    if (end->n_drafted)
        buf_addf(out, " | drafted %d, accepted %d", end->n_drafted, end->n_accepted);
}

void generation_print(const struct steel_event *end, FILE *out)
{
    struct buf b = {0};
    generation_describe(end, &b);
    fputs(b.p, out);
    buf_clear(&b);
}
