/* Text of an answer, stop strings, log-probabilities. */
#include "engine/output.h"

#include <math.h>
#include <string.h>

/* How many bytes at the end of held might be the start of a stop string. */
static size_t undecided(const struct output *o)
{
    size_t most = 0;
    for (int i = 0; i < o->n_stop; i++) {
        size_t n = strlen(o->stop[i]) - 1;
        for (size_t k = n < o->held.len ? n : o->held.len; k > most; k--)
            if (!memcmp(o->held.p + o->held.len - k, o->stop[i], k))
                most = k;
    }
    return most;
}

/* Shows what is decided. The stop string that begins first ends the answer. */
static int show(struct output *o, bool final, struct buf *out)
{
    size_t cut = o->held.len;
    int hit = -1;
    if (!cut)
        return hit;
    for (int i = 0; i < o->n_stop; i++) {
        const char *at = memmem(o->held.p, o->held.len, o->stop[i], strlen(o->stop[i]));
        if (at && (size_t)(at - o->held.p) < cut) {
            cut = (size_t)(at - o->held.p);
            hit = i;
        }
    }
    if (hit < 0 && !final)
        cut -= undecided(o);
    buf_add(out, o->held.p, cut);
    size_t rest = hit < 0 ? o->held.len - cut : 0;
    memmove(o->held.p, o->held.p + cut, rest);
    o->held.len = rest;
    return hit;
}

int output_push(struct output *o, const struct tokenizer *t, int32_t token, struct buf *out)
{
    if (!t)
        return -1;
    if (!o->n_stop) {
        detok_push(&o->detok, t, token, o->special, out);
        return -1;
    }
    detok_push(&o->detok, t, token, o->special, &o->held);
    return show(o, false, out);
}

int output_finish(struct output *o, struct buf *out)
{
    detok_flush(&o->detok, &o->held);
    return show(o, true, out);
}

void output_clear(struct output *o)
{
    buf_clear(&o->held);
}

float output_logprobs(const float *logits, int n_vocab, int32_t token, struct token_prob *top,
                      int n)
{
    float max = -INFINITY;
    for (int i = 0; i < n_vocab; i++)
        max = logits[i] > max ? logits[i] : max;
    double sum = 0;
    for (int i = 0; i < n_vocab; i++)
        sum += (double)expf(logits[i] - max);
    float norm = max + (float)log(sum);
    int have = 0;
    for (int i = 0; n > 0 && i < n_vocab; i++) {
        if (have == n && !(logits[i] > top[n - 1].logprob))
            continue;
        int at = have < n ? have++ : n - 1;
        for (; at > 0 && logits[i] > top[at - 1].logprob; at--)
            top[at] = top[at - 1];
        top[at] = (struct token_prob){i, logits[i]};
    }
    for (int i = 0; i < have; i++)
        top[i].logprob -= norm;
    return logits[token] - norm;
}
