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

static struct step_item step_of(struct context *c, const int32_t *token, struct sampler *sampler)
{
    return (struct step_item){
        .seq = &c->seq, .tokens = token, .n_tokens = 1, .want = LOGITS_LAST, .sampler = sampler};
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
    /* Where a backend runs ahead, the next step is started with the token one chooses before the host
     * has seen it; if that one ends the answer, what the next computed is forgotten. */
    bool ahead = rt->be->ahead && !rt->be->profile && !sampler_has_memory(sampler);
    struct step_item flying[2];
    int n_flying = 0, turn = 0;
    int32_t token = item.token, chosen_before = -1; /* row 0 of the step before */
    while (ok && !cli_interrupted()) {
        sampler_accept(sampler, token, true);
        g->n_generated++;
        if (!g->ignore_eos && tokenizer_is_end(rt->tokenizer, token)) {
            g->finish = FINISH_END;
            break;
        }
        bool last = g->n_predict >= 0 && g->n_generated >= g->n_predict;
        buf_reset(&text);
        detok_push(&detok, rt->tokenizer, token, g->special, &text);
        if (!ahead && text.len && !g->on_text(g->arg, text.p, text.len)) {
            g->finish = FINISH_STOPPED;
            break;
        }
        if (!last && n_flying == 0 && c->seq.n_tokens < rt->context) {
            flying[turn] = step_of(c, &token, sampler);
            ok = step_start(rt->step, &flying[turn], 1, err);
            n_flying += ok;
        }
        bool more = g->n_predict < 0 || g->n_predict - g->n_generated > 1;
        if (ok && ahead && more && n_flying == 1 && c->seq.n_tokens < rt->context) {
            sampler_expect(sampler);
            flying[!turn] = step_of(c, &chosen_before, sampler);
            ok = step_start(rt->step, &flying[!turn], 1, err);
            n_flying += ok;
        }
        if (n_flying)
            token_list_add(&c->cached, token);
        if (ahead && text.len && !g->on_text(g->arg, text.p, text.len)) {
            g->finish = FINISH_STOPPED;
            break;
        }
        if (last) {
            g->finish = FINISH_LENGTH;
            break;
        }
        if (ok && n_flying == 0) {
            ok = error_set(err,
                           "the context of %d tokens is full (%d of the prompt, %d generated); "
                           "see -c",
                           rt->context, n, g->n_generated);
            break;
        }
        if (!ok)
            break;
        ok = step_finish(rt->step, err);
        n_flying--;
        token = flying[turn].token;
        turn = !turn;
    }
    while (n_flying > 0) { /* of no use any more */
        struct error unseen = {0};
        ok = step_finish(rt->step, ok ? err : &unseen) && ok;
        n_flying--;
    }
    if ((int)c->cached.n < c->seq.n_tokens)
        kvcache_cut(rt->kv, &c->seq, (int)c->cached.n);
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
