/* The reader of answers. See the invariants in answer.h. */
#include "route/answer.h"

#include <string.h>

enum { MAX_INTERIM = 8 };

static enum answer_result bad(struct answer *a, const char **why, const char *text)
{
    *why = a->why = text;
    a->state = ANSWER_BROKEN;
    return ANSWER_BAD;
}

/* What follows the head. */
static void choose_framing(struct answer *a)
{
    const struct http_head *h = &a->head;
    a->left = h->length;
    if (a->to_head || h->status == 204 || h->status == 304)
        a->state = ANSWER_OVER;
    else if (h->chunked)
        a->state = ANSWER_CHUNKED;
    else if (h->length >= 0)
        a->state = h->length ? ANSWER_SIZED : ANSWER_OVER;
    else
        a->state = ANSWER_TO_CLOSE;
    if (a->state == ANSWER_TO_CLOSE)
        a->head.keep_alive = false;
}

static enum answer_result feed_head(struct answer *a, const char *p, size_t n, size_t *used,
                                    const char **why)
{
    struct buf *t = &a->text;
    size_t before = t->len, room = HTTP_MAX_HEAD - before, take = n < room ? n : room;
    if (!n)
        return ANSWER_MORE;
    if (!buf_try_reserve(t, take))
        return bad(a, why, "there is no memory for its head");
    buf_add(t, p, take);
    size_t from = before > 3 ? before - 3 : 0; /* where an empty line may have begun */
    size_t end = http_head_end(t->p + from, t->len - from);
    if (!end) {
        *used = take;
        return take == room ? bad(a, why, "its head is too large") : ANSWER_MORE;
    }
    end += from;
    *used = end - before;
    bool ok = http_answer_parse(t->p, end, &a->head, why);
    buf_clear(t);
    if (!ok)
        return bad(a, why, *why);
    if (a->head.status == 101)
        return bad(a, why, "it switches protocols, unasked");
    if (a->head.status < 200) {
        http_head_clear(&a->head);
        if (++a->n_interim > MAX_INTERIM)
            return bad(a, why, "too many interim answers");
        size_t more = 0;
        enum answer_result res = feed_head(a, p + *used, n - *used, &more, why);
        *used += more;
        return res;
    }
    choose_framing(a);
    return ANSWER_HEAD;
}

static enum answer_result feed_chunks(struct answer *a, const char *p, size_t n, struct buf *out,
                                      size_t *used, const char **why)
{
    size_t before = out->len;
    enum http_chunks_result res = http_chunks_feed(&a->chunks, p, n, SIZE_MAX, out, used);
    if (res == CHUNKS_BAD || res == CHUNKS_TOO_LARGE) {
        const char *text;
        bad(a, &text, "malformed chunks");
        if (out->len > before) { /* what was sent well comes first */
            *used = n;
            return ANSWER_DATA;
        }
        *why = text;
        return ANSWER_BAD;
    }
    if (res == CHUNKS_DONE)
        a->state = ANSWER_OVER; /* the end is told when the data has been */
    if (out->len > before)
        return ANSWER_DATA;
    return res == CHUNKS_DONE ? ANSWER_END : ANSWER_MORE;
}

enum answer_result answer_feed(struct answer *a, const char *p, size_t n, struct buf *out,
                               size_t *used, const char **why)
{
    *used = 0;
    if (a->state == ANSWER_BROKEN)
        return bad(a, why, a->why);
    if (a->state == ANSWER_IN_HEAD)
        return feed_head(a, p, n, used, why);
    if (a->state == ANSWER_OVER)
        return ANSWER_END;
    if (!n)
        return ANSWER_MORE;
    if (!buf_try_reserve(out, n))
        return bad(a, why, "there is no memory for its body");
    if (a->state == ANSWER_CHUNKED)
        return feed_chunks(a, p, n, out, used, why);
    size_t take = n;
    if (a->state == ANSWER_SIZED) {
        take = (uint64_t)a->left < n ? (size_t)a->left : n;
        a->left -= (int64_t)take;
        if (!a->left)
            a->state = ANSWER_OVER;
    }
    buf_add(out, p, take);
    *used = take;
    return ANSWER_DATA;
}

enum answer_result answer_close(struct answer *a, const char **why)
{
    enum answer_state state = a->state;
    if (state == ANSWER_OVER)
        return ANSWER_END;
    if (state == ANSWER_BROKEN)
        return bad(a, why, a->why);
    if (state == ANSWER_TO_CLOSE) {
        a->state = ANSWER_OVER;
        return ANSWER_END;
    }
    return bad(a, why,
               state != ANSWER_IN_HEAD ? "it ended in the middle of the body"
               : a->text.len           ? "it ended in the middle of the head"
                                       : "it closed the connection without an answer");
}

bool answer_can_go_on(const struct answer *a)
{
    return a->state == ANSWER_OVER && a->head.keep_alive;
}

void answer_clear(struct answer *a)
{
    http_head_clear(&a->head);
    buf_clear(&a->text);
    memset(a, 0, sizeof *a);
}
