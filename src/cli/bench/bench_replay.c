/* Recorded texts through a model's real steps: see bench_replay.h. */
#include "cli/bench/bench_replay.h"
#include "base/clock.h"
#include "base/mem.h"
#include "cli/cli.h"
#include "engine/engine.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_TEXTS = 64, MOST_TOKENS = 1 << 20, MOST_REPS = 1000, LEAST_ANSWER = 16 };

struct replay_text {
    char name[32];
    int32_t *prompt, *answer; /* (n_prompt), (n_answer) */
    int n_prompt, n_answer;
};

/* Drafts of the text that is replayed, some of them wrong. */
struct accepting {
    const struct replay_text *text;
    float share; /* of drafts that are right; 0 = the engine's own drafts */
    uint32_t random;
};

struct run {
    double tok_s;
    struct draft_count drafts[N_DRAFT_SOURCES];
};

/* The ids of a field. NULL: it is no list of ids. */
static int32_t *read_ids(const json_t *line, const char *field, int *n)
{
    const json_t *list = json_object_get(line, field);
    size_t len = json_array_size(list);
    if (len < 1 || len > MOST_TOKENS)
        return NULL;
    int32_t *ids = mem_alloc(len * sizeof *ids);
    for (size_t i = 0; i < len; i++) {
        json_int_t id = json_integer_value(json_array_get(list, i));
        if (!json_is_integer(json_array_get(list, i)) || id < 0 || id > INT32_MAX) {
            mem_free(ids);
            return NULL;
        }
        ids[i] = (int32_t)id;
    }
    *n = (int)len;
    return ids;
}

static bool read_text(const char *file, int number, const char *line, struct replay_text *t,
                      struct error *err)
{
    json_t *v = json_loads(line, 0, NULL);
    const char *name = json_string_value(json_object_get(v, "name"));
    snprintf(t->name, sizeof t->name, "%s", name ? name : "");
    t->prompt = read_ids(v, "prompt", &t->n_prompt);
    t->answer = read_ids(v, "answer", &t->n_answer);
    json_decref(v);
    if (!name || !t->prompt || !t->answer || t->n_answer < LEAST_ANSWER)
        return error_set(err,
                         "%s, line %d: wants name, prompt and answer; the last two are lists of "
                         "token ids, an answer has at least %d",
                         file, number, LEAST_ANSWER);
    return true;
}

static int read_texts(const char *file, struct replay_text *texts, struct error *err)
{
    FILE *f = fopen(file, "r");
    char *line = NULL;
    size_t size = 0;
    int n = 0;
    bool ok = f != NULL;
    if (!ok)
        error_set(err, "%s: cannot be read", file);
    while (ok && n < MOST_TEXTS && getline(&line, &size, f) > 0) {
        ok = read_text(file, n + 1, line, &texts[n], err);
        n++;
    }
    if (ok && !n)
        error_set(err, "%s: has no texts", file);
    free(line);
    if (f)
        fclose(f);
    return ok ? n : -1;
}

/* Generates the text in n_seqs sequences, each of a client of its own, so that none knows the others' answers. */
static bool replay(struct engine *e, const struct replay_text *t, int n_seqs, bool drafts,
                   struct run *out, struct error *err)
{
    static uint64_t client;
    struct events *q = events_new();
    struct engine_event ev;
    struct request_spec spec = {.prompt = t->prompt,
                                .n_prompt = t->n_prompt,
                                .max_tokens = t->n_answer,
                                .replay = t->answer,
                                .n_replay = t->n_answer,
                                .ignore_eos = true,
                                .no_draft = !drafts,
                                .queue = q};
    spec.sample = sample_params_default();
    spec.sample.temp = 0; /* random weights have flat distributions, from which draws are slow */
    int64_t start = 0, end = 0;
    int n_begun = 0, n_after = 0, left = 0;
    bool ok = true;
    *out = (struct run){0};
    char *begun = mem_zalloc((size_t)n_seqs, 1);
    for (int i = 0; ok && i < n_seqs; i++) {
        spec.client = ++client;
        spec.user = &begun[i];
        ok = engine_submit(e, &spec, NULL, err) == SUBMIT_OK;
        left += ok;
    }
    while (left > 0 && events_next(q, &ev, -1)) {
        char *seen = ev.user;
        n_after += ev.kind == EVENT_TOKEN && n_begun == n_seqs; /* once all generate */
        if (ev.kind == EVENT_TOKEN && !*seen) {
            *seen = 1;
            n_begun++;
            start = clock_ns();
        }
        if (ev.kind != EVENT_DONE)
            continue;
        left--;
        end = clock_ns();
        if (ev.finish == FINISH_ERROR)
            ok = error_set(err, "%s", ev.error);
        for (int k = 0; k < N_DRAFT_SOURCES; k++) {
            out->drafts[k].drafted += ev.usage.drafts[k].drafted;
            out->drafts[k].accepted += ev.usage.drafts[k].accepted;
        }
    }
    if (ok)
        out->tok_s = n_after / ((double)(end - start) * 1e-9);
    mem_free(begun);
    events_free(q);
    return ok && (!cli_interrupted() || error_set(err, "interrupted"));
}

/* Replaces drafts by the text's next tokens, or by wrong ones. */
static int make_right(void *arg, const int32_t *tokens, int n_tokens, int32_t *drafts, int n,
                      int most)
{
    struct accepting *a = arg;
    int at = n_tokens - a->text->n_prompt;
    (void)tokens;
    for (int k = 0; k < n && k < most && at + k < a->text->n_answer; k++) {
        a->random = a->random * 1664525u + 1013904223u;
        bool right = (float)(a->random >> 8) < a->share * (float)(1 << 24);
        drafts[k] = right ? a->text->answer[at + k] : a->text->answer[at + k] ? 0 : 1;
    }
    return n;
}

static bool check_ids(const char *file, const struct replay_text *t, int n_vocab, struct error *err)
{
    bool ok = true;
    for (int i = 0; i < t->n_prompt; i++)
        ok &= t->prompt[i] < n_vocab;
    for (int i = 0; i < t->n_answer; i++)
        ok &= t->answer[i] < n_vocab;
    return ok || error_set(err, "%s: '%s' has tokens beyond the model's vocabulary of %d", file,
                           t->name, n_vocab);
}

static int by_speed(const void *a, const void *b)
{
    double x = ((const struct run *)a)->tok_s, y = ((const struct run *)b)->tok_s;
    return (x > y) - (x < y);
}

static void print(const struct replay_text *t, int n_seqs, const struct run *plain,
                  const struct run *draft, bool json)
{
    int drafted = 0, accepted = 0;
    for (int k = 0; k < N_DRAFT_SOURCES; k++) {
        drafted += draft->drafts[k].drafted;
        accepted += draft->drafts[k].accepted;
    }
    if (json) {
        printf("{\"text\": \"%s\", \"sequences\": %d, \"plain_tok_s\": %.2f, \"tok_s\": %.2f, "
               "\"ratio\": %.3f, \"generated\": %d, \"drafted\": %d, \"accepted\": %d",
               t->name, n_seqs, plain->tok_s, draft->tok_s, draft->tok_s / plain->tok_s,
               n_seqs * t->n_answer, drafted, accepted);
        for (int k = 0; k < N_DRAFT_SOURCES; k++)
            if (draft->drafts[k].drafted)
                printf(", \"from_%s\": [%d, %d]", draft_source_name(k), draft->drafts[k].drafted,
                       draft->drafts[k].accepted);
        printf("}\n");
    } else {
        printf("| %-16s | %4d | %9.2f | %9.2f | %5.2f | %7d | %8d |\n", t->name, n_seqs,
               plain->tok_s, draft->tok_s, draft->tok_s / plain->tok_s, drafted, accepted);
    }
    fflush(stdout);
}

/* The time of a step of n_seqs sequences by its draft rows, as the engine has learned it. */
static void print_cost(struct engine *e, int n_seqs, bool json)
{
    struct draft_cost c = engine_draft_cost(e);
    const char *next = "";
    if (!draft_cost_known(&c, n_seqs))
        return;
    printf(json ? "{\"sequences\": %d, \"step_ms\": %.4f, \"by_draft_rows\": {"
                : "\n%d at once, learned: a step takes %.4f ms; with draft rows, relative to that "
                  "(measurements): ",
           n_seqs, c.plain_ns[n_seqs] * 1e-6);
    for (int k = 0; k < DRAFT_LEVELS; k++) {
        const struct draft_cell *cell = &c.cells[n_seqs][k];
        if (!cell->n)
            continue;
        printf(json ? "%s\"%d\": [%.3f, %d]" : "%s%d: %.3f (%d)", next, draft_levels[k],
               (double)cell->ratio, cell->n);
        next = ", ";
    }
    printf(json ? "}}\n" : "\n");
    fflush(stdout);
}

static bool measure(struct engine *e, const struct replay_text *t, int n_seqs, int reps, bool json,
                    struct error *err)
{
    struct run *runs[2]; /* without drafts, with */
    bool ok = true;
    for (int k = 0; k < 2; k++)
        runs[k] = mem_zalloc((size_t)reps, sizeof *runs[k]);
    struct run warm;
    ok = replay(e, t, n_seqs, false, &warm, err);
    for (int r = 0; ok && r < reps; r++)
        for (int k = 0; ok && k < 2; k++)
            ok = replay(e, t, n_seqs, (k + r) % 2, &runs[(k + r) % 2][r], err);
    for (int k = 0; k < 2; k++)
        qsort(runs[k], (size_t)reps, sizeof *runs[k], by_speed);
    if (ok)
        print(t, n_seqs, &runs[0][reps / 2], &runs[1][reps / 2], json);
    mem_free(runs[0]);
    mem_free(runs[1]);
    return ok;
}

bool bench_replay(const char *path, const char *file, const struct runtime_options *opt,
                  const int *batch, int n_batch, int reps, float accept, bool json,
                  struct error *err)
{
    struct accepting right = {.share = accept, .random = 5};
    static struct replay_text texts[MOST_TEXTS];
    int n = read_texts(file, texts, err), longest = 0;
    struct engine *e = NULL;
    struct engine_options o = {.runtime = *opt};
    bool ok = n > 0;
    for (int i = 0; i < n; i++) {
        int len = texts[i].n_prompt + texts[i].n_answer + 1;
        longest = len > longest ? len : longest;
    }
    o.runtime.max_seqs = 1;
    if (opt->draft > 0)
        o.runtime.draft_from = ~0u;
    for (int i = 0; i < n_batch; i++)
        o.runtime.max_seqs = batch[i] > o.runtime.max_seqs ? batch[i] : o.runtime.max_seqs;
    o.runtime.context = opt->context ? opt->context : longest;
    o.max_queue = o.runtime.max_seqs;
    if (ok) {
        e = engine_open(path, &o);
        ok = engine_wait(e, err);
    }
    if (ok && accept > 0)
        engine_on_draft(e, false, make_right, &right);
    for (int i = 0; ok && i < n; i++)
        ok = check_ids(file, &texts[i], engine_runtime(e)->model->config.n_vocab, err);
    if (ok && !json)
        printf(
            "| text             | seqs | plain t/s |     tok/s | ratio | drafted | accepted |\n"
            "|------------------|-----:|----------:|----------:|------:|--------:|---------:|\n");
    for (int b = 0; ok && b < n_batch; b++)
        for (int i = 0; ok && i < n; i++) {
            right.text = &texts[i];
            ok = measure(e, &texts[i], batch[b], reps, json, err);
        }
    for (int b = 0; ok && b < n_batch; b++)
        print_cost(e, batch[b], json);
    engine_close(e);
    for (int i = 0; i < MOST_TEXTS; i++) {
        mem_free(texts[i].prompt);
        mem_free(texts[i].answer);
    }
    return ok;
}
