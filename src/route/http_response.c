/* The reader of answers. See the invariants in http_response.h. */
#include "route/http_response.h"

#include <string.h>

enum { MAX_INTERIM = 8 };

static enum http_response_result bad(struct http_response *a, const char **why, const char *text)
{
    *why = a->why = text;
    a->state = RESPONSE_BROKEN;
    return RESPONSE_BAD;
}

/* What follows the head. */
static void choose_framing(struct http_response *a)
{
    const struct http_head *h = &a->head;
    a->left = h->length;
    if (a->to_head || h->status == 204 || h->status == 304)
        a->state = RESPONSE_OVER;
    else if (h->chunked)
        a->state = RESPONSE_CHUNKED;
    else if (h->length >= 0)
        a->state = h->length ? RESPONSE_SIZED : RESPONSE_OVER;
    else
        a->state = RESPONSE_TO_CLOSE;
    if (a->state == RESPONSE_TO_CLOSE)
        a->head.keep_alive = false;
}

static enum http_response_result feed_head(struct http_response *a, const char *p, size_t n,
                                           size_t *used, const char **why)
{
    struct buf *t = &a->text;
    size_t before = t->len, room = HTTP_MAX_HEAD - before, take = n < room ? n : room;
    if (!n)
        return RESPONSE_MORE;
    if (!buf_try_reserve(t, take))
        return bad(a, why, "there is no memory for its head");
    buf_add(t, p, take);
    size_t from = before > 3 ? before - 3 : 0; /* where an empty line may have begun */
    size_t end = http_head_end(t->p + from, t->len - from);
    if (!end) {
        *used = take;
        return take == room ? bad(a, why, "its head is too large") : RESPONSE_MORE;
    }
    end += from;
    *used = end - before;
    bool ok = http_response_parse(t->p, end, &a->head, why);
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
        enum http_response_result res = feed_head(a, p + *used, n - *used, &more, why);
        *used += more;
        return res;
    }
    choose_framing(a);
    return RESPONSE_HEAD;
}

static enum http_response_result feed_chunks(struct http_response *a, const char *p, size_t n,
                                             struct buf *out, size_t *used, const char **why)
{
    size_t before = out->len;
    enum http_chunks_result res = http_chunks_feed(&a->chunks, p, n, SIZE_MAX, out, used);
    if (res == CHUNKS_BAD || res == CHUNKS_TOO_LARGE) {
        const char *text;
        bad(a, &text, "malformed chunks");
        if (out->len > before) { /* what was sent well comes first */
            *used = n;
            return RESPONSE_DATA;
        }
        *why = text;
        return RESPONSE_BAD;
    }
    if (res == CHUNKS_DONE)
        a->state = RESPONSE_OVER; /* the end is told when the data has been */
    if (out->len > before)
        return RESPONSE_DATA;
    return res == CHUNKS_DONE ? RESPONSE_END : RESPONSE_MORE;
}

enum http_response_result http_response_feed(struct http_response *a, const char *p, size_t n,
                                             struct buf *out, size_t *used, const char **why)
{
    *used = 0;
    if (a->state == RESPONSE_BROKEN)
        return bad(a, why, a->why);
    if (a->state == RESPONSE_IN_HEAD)
        return feed_head(a, p, n, used, why);
    if (a->state == RESPONSE_OVER)
        return RESPONSE_END;
    if (!n)
        return RESPONSE_MORE;
    if (!buf_try_reserve(out, n))
        return bad(a, why, "there is no memory for its body");
    if (a->state == RESPONSE_CHUNKED)
        return feed_chunks(a, p, n, out, used, why);
    size_t take = n;
    if (a->state == RESPONSE_SIZED) {
        take = (uint64_t)a->left < n ? (size_t)a->left : n;
        a->left -= (int64_t)take;
        if (!a->left)
            a->state = RESPONSE_OVER;
    }
    buf_add(out, p, take);
    *used = take;
    return RESPONSE_DATA;
}

enum http_response_result http_response_close(struct http_response *a, const char **why)
{
    enum http_response_state state = a->state;
    if (state == RESPONSE_OVER)
        return RESPONSE_END;
    if (state == RESPONSE_BROKEN)
        return bad(a, why, a->why);
    if (state == RESPONSE_TO_CLOSE) {
        a->state = RESPONSE_OVER;
        return RESPONSE_END;
    }
    return bad(a, why,
               state != RESPONSE_IN_HEAD ? "it ended in the middle of the body"
               : a->text.len             ? "it ended in the middle of the head"
                                         : "it closed the connection without an answer");
}

bool http_response_can_go_on(const struct http_response *a)
{
    return a->state == RESPONSE_OVER && a->head.keep_alive;
}

void http_response_clear(struct http_response *a)
{
    http_head_clear(&a->head);
    buf_clear(&a->text);
    memset(a, 0, sizeof *a);
}
