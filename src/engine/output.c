/* The text of an answer and its stop strings. */
#include "engine/output.h"

#include <string.h>

/* The number of bytes at the end of `held` that may be the start of `s`. */
static size_t begun(const struct output *o, const char *s)
{
    size_t n = strlen(s) - 1;
    for (size_t k = n < o->held.len ? n : o->held.len; k > 0; k--)
        if (!memcmp(o->held.p + o->held.len - k, s, k))
            return k;
    return 0;
}

/* The same for all stop strings: these bytes cannot be shown yet. */
static size_t undecided(const struct output *o)
{
    size_t most = 0;
    for (int i = 0; i < o->n_stop; i++) {
        size_t n = begun(o, o->stop[i]);
        most = n > most ? n : most;
    }
    return most;
}

static void release(struct output *o, size_t n, struct buf *out)
{
    if (!n)
        return;
    buf_add(out, o->held.p, n);
    o->held.len -= n;
    memmove(o->held.p, o->held.p + n, o->held.len);
}

/* Shows the text before the answer, to which stop strings do not apply. False: the answer has not started. */
static bool skip_thinking(struct output *o, struct buf *out)
{
    if (o->zone == OUTPUT_START) {
        size_t n = strlen(o->think_open), i = 0;
        while (i < o->held.len && strchr(" \t\r\n", o->held.p[i]) && o->held.p[i])
            i++;
        size_t have = o->held.len - i < n ? o->held.len - i : n;
        bool same = !memcmp(o->held.p + i, o->think_open, have);
        if (same && have < n)
            return false;
        o->zone = same ? OUTPUT_THINKING : OUTPUT_ANSWER;
        if (same)
            release(o, i + n, out);
    }
    if (o->zone == OUTPUT_THINKING) {
        const char *at =
            o->held.len ? memmem(o->held.p, o->held.len, o->think_close, strlen(o->think_close))
                        : NULL;
        if (!at) {
            release(o, o->held.len - begun(o, o->think_close), out);
            return false;
        }
        release(o, (size_t)(at - o->held.p) + strlen(o->think_close), out);
        o->zone = OUTPUT_ANSWER;
    }
    return true;
}

/* Shows the decided bytes. The stop string that starts first ends the answer. */
static int show(struct output *o, bool final, struct buf *out)
{
    int hit = -1;
    if (!o->held.len)
        return hit;
    if (o->zone != OUTPUT_ANSWER && !skip_thinking(o, out) &&
        (!final || o->zone == OUTPUT_THINKING)) {
        if (final)
            release(o, o->held.len, out);
        return hit;
    }
    size_t cut = o->held.len;
    if (!cut)
        return hit;
    for (int i = 0; i < o->n_stop; i++) {
        const char *at = memmem(o->held.p, o->held.len, o->stop[i], strlen(o->stop[i]));
        if (at && (size_t)(at - o->held.p) < cut) {
            cut = (size_t)(at - o->held.p);
            hit = i;
        }
    }
    if (hit >= 0 && o->include_stop)
        cut += strlen(o->stop[hit]);
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
