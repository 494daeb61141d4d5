/* The generation loop of the commands: prefix reuse, sampling, streaming, stopping. */
#include "cli/generate.h"
#include "base/clock.h"

#include <stdio.h>
#include <string.h>

void context_clear(struct context *c)
{
    kvcache_release(c->rt->kv, &c->seq);
    token_list_clear(&c->cached);
}

static void forget_after(struct context *c, int n)
{
    kvcache_cut(c->rt->kv, &c->seq, n);
    c->cached.n = (size_t)n;
}

bool context_read(struct context *c, const int32_t *ids, int n, struct step_item *item, int *n_read,
                  struct error *err)
{
    int same = 0;
    while (same < n && same < (int)c->cached.n && ids[same] == c->cached.ids[same])
        same++;
    if (item && same == n && n > 0) /* logits of the last token are wanted: read it again */
        same--;
    forget_after(c, same);
    if (n_read)
        *n_read = n - same;
    struct step_item none = {0};
    bool ok = runtime_prefill(c->rt, &c->seq, ids + same, n - same, item ? item : &none,
                              cli_interrupted, err);
    /* An interrupted read keeps what it has read. */
    for (int i = same; i < c->seq.n_tokens; i++)
        token_list_add(&c->cached, ids[i]);
    return ok;
}

bool generate(struct generation *g, const int32_t *ids, int n, struct error *err)
{
    struct context *c = g->context;
    struct runtime *rt = c->rt;
    struct sampler *sampler = sampler_new(g->sample, rt->model->config.n_vocab);
    for (int i = 0; i < n; i++)
        sampler_accept(sampler, ids[i], false);
    struct step_item item = {.want = LOGITS_LAST, .sampler = sampler};
    g->n_prompt = n;
    g->n_generated = 0;
    int64_t t0 = clock_ns();
    bool ok = context_read(c, ids, n, &item, &g->n_read, err);
    int64_t t1 = clock_ns();
    struct detok detok = {0};
    struct buf text = {0};
    g->finish = FINISH_INTERRUPTED;
    while (ok && !cli_interrupted()) {
        int32_t token = item.token;
        sampler_accept(sampler, token, true);
        g->n_generated++;
        if (!g->ignore_eos && tokenizer_is_end(rt->tokenizer, token)) {
            g->finish = FINISH_END;
            break;
        }
        buf_reset(&text);
        detok_push(&detok, rt->tokenizer, token, g->special, &text);
        if (text.len && !g->on_text(g->arg, text.p, text.len)) {
            g->finish = FINISH_STOPPED;
            break;
        }
        if (g->n_predict >= 0 && g->n_generated >= g->n_predict) {
            g->finish = FINISH_LENGTH;
            break;
        }
        if (c->seq.n_tokens >= rt->context) {
            ok = error_set(err,
                           "the context of %d tokens is full (%d of the prompt, %d generated); "
                           "see -c",
                           rt->context, n, g->n_generated);
            break;
        }
        item = (struct step_item){.seq = &c->seq,
                                  .tokens = &token,
                                  .n_tokens = 1,
                                  .want = LOGITS_LAST,
                                  .sampler = sampler};
        ok = step_run(rt->step, &item, 1, err);
        if (ok)
            token_list_add(&c->cached, token);
    }
    buf_reset(&text);
    detok_flush(&detok, &text);
    if (text.len && g->finish != FINISH_STOPPED)
        g->on_text(g->arg, text.p, text.len);
    g->prompt_ns = t1 - t0;
    g->generate_ns = clock_ns() - t1;
    buf_clear(&text);
    sampler_free(sampler);
    return ok || cli_interrupted();
}

/* How many bytes at the end of held might be the start of a stop string. */
static size_t maybe_stop(const struct stop_filter *o)
{
    size_t most = 0;
    for (int i = 0; i < o->stop->n; i++) {
        size_t n = strlen(o->stop->items[i]);
        for (size_t k = n - 1 < o->held.len ? n - 1 : o->held.len; k > most; k--)
            if (!memcmp(o->held.p + o->held.len - k, o->stop->items[i], k)) {
                most = k;
                break;
            }
    }
    return most;
}

void stop_filter_flush(struct stop_filter *o, bool final)
{
    size_t cut = o->held.len;
    for (int i = 0; o->held.len && i < o->stop->n; i++) {
        const char *hit =
            memmem(o->held.p, o->held.len, o->stop->items[i], strlen(o->stop->items[i]));
        if (hit && (size_t)(hit - o->held.p) < cut) {
            cut = (size_t)(hit - o->held.p);
            o->stopped = true;
        }
    }
    if (!o->stopped && !final)
        cut = o->held.len - maybe_stop(o);
    if (cut == 0 && !o->stopped)
        return;
    if (cut) {
        fwrite(o->held.p, 1, cut, stdout);
        fflush(stdout);
    }
    size_t rest = o->stopped ? 0 : o->held.len - cut;
    if (rest)
        memmove(o->held.p, o->held.p + cut, rest);
    o->held.len = rest;
}

static double rate(int n, int64_t ns)
{
    return ns > 0 ? n / ((double)ns * 1e-9) : 0;
}

void generation_print(const struct generation *g, FILE *out)
{
    fprintf(out, "prompt %d tokens", g->n_prompt);
    if (g->n_read < g->n_prompt)
        fprintf(out, " (%d read, %d cached)", g->n_read, g->n_prompt - g->n_read);
    fprintf(out, ", %.1f tok/s | generated %d tokens, %.1f tok/s", rate(g->n_read, g->prompt_ns),
            g->n_generated, rate(g->n_generated - 1, g->generate_ns));
}
