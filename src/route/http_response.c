/* See the invariants in http_response.h. */
#include "route/http_response.h"

#include <string.h>

enum { MAX_INTERIM = 8 };

static enum http_response_result bad(struct http_response *r, const char **why, const char *text)
{
    *why = r->why = text;
    r->state = RESPONSE_BROKEN;
    return RESPONSE_BAD;
}

/* How the body is framed. */
static void choose_framing(struct http_response *r)
{
    const struct http_head *h = &r->head;
    r->left = h->length;
    if (r->head_request || h->status == 204 || h->status == 304)
        r->state = RESPONSE_OVER;
    else if (h->chunked)
        r->state = RESPONSE_CHUNKED;
    else if (h->length >= 0)
        r->state = h->length ? RESPONSE_SIZED : RESPONSE_OVER;
    else
        r->state = RESPONSE_TO_CLOSE;
    if (r->state == RESPONSE_TO_CLOSE)
        r->head.keep_alive = false;
}

static enum http_response_result feed_head(struct http_response *r, const char *p, size_t n,
                                           size_t *used, const char **why)
{
    struct buf *t = &r->text;
    size_t before = t->len, room = HTTP_MAX_HEAD - before, take = n < room ? n : room;
    if (!n)
        return RESPONSE_MORE;
    if (!buf_try_reserve(t, take))
        return bad(r, why, "there is no memory for its head");
    buf_add(t, p, take);
    size_t from = before > 3 ? before - 3 : 0; /* an empty line may begin in the bytes before */
    size_t end = http_head_end(t->p + from, t->len - from);
    if (!end) {
        *used = take;
        return take == room ? bad(r, why, "its head is too large") : RESPONSE_MORE;
    }
    end += from;
    *used = end - before;
    bool ok = http_response_parse(t->p, end, &r->head, why);
    buf_clear(t);
    if (!ok)
        return bad(r, why, *why);
    if (r->head.status == 101)
        return bad(r, why, "it switches protocols, unasked");
    if (r->head.status < 200) {
        http_head_clear(&r->head);
        if (++r->n_interim > MAX_INTERIM)
            return bad(r, why, "too many interim responses");
        size_t more = 0;
        enum http_response_result res = feed_head(r, p + *used, n - *used, &more, why);
        *used += more;
        return res;
    }
    choose_framing(r);
    return RESPONSE_HEAD;
}

static enum http_response_result feed_chunks(struct http_response *r, const char *p, size_t n,
                                             struct buf *out, size_t *used, const char **why)
{
    size_t before = out->len;
    enum http_chunks_result res = http_chunks_feed(&r->chunks, p, n, SIZE_MAX, out, used);
    if (res == CHUNKS_BAD || res == CHUNKS_TOO_LARGE) {
        const char *text;
        bad(r, &text, "malformed chunks");
        if (out->len > before) { /* deliver the valid part first */
            *used = n;
            return RESPONSE_DATA;
        }
        *why = text;
        return RESPONSE_BAD;
    }
    if (res == CHUNKS_DONE)
        r->state = RESPONSE_OVER; /* RESPONSE_END follows after the data */
    if (out->len > before)
        return RESPONSE_DATA;
    return res == CHUNKS_DONE ? RESPONSE_END : RESPONSE_MORE;
}

enum http_response_result http_response_feed(struct http_response *r, const char *p, size_t n,
                                             struct buf *out, size_t *used, const char **why)
{
    *used = 0;
    if (r->state == RESPONSE_BROKEN)
        return bad(r, why, r->why);
    if (r->state == RESPONSE_IN_HEAD)
        return feed_head(r, p, n, used, why);
    if (r->state == RESPONSE_OVER)
        return RESPONSE_END;
    if (!n)
        return RESPONSE_MORE;
    if (!buf_try_reserve(out, n))
        return bad(r, why, "there is no memory for its body");
    if (r->state == RESPONSE_CHUNKED)
        return feed_chunks(r, p, n, out, used, why);
    size_t take = n;
    if (r->state == RESPONSE_SIZED) {
        take = (uint64_t)r->left < n ? (size_t)r->left : n;
        r->left -= (int64_t)take;
        if (!r->left)
            r->state = RESPONSE_OVER;
    }
    buf_add(out, p, take);
    *used = take;
    return RESPONSE_DATA;
}

enum http_response_result http_response_close(struct http_response *r, const char **why)
{
    enum http_response_state state = r->state;
    if (state == RESPONSE_OVER)
        return RESPONSE_END;
    if (state == RESPONSE_BROKEN)
        return bad(r, why, r->why);
    if (state == RESPONSE_TO_CLOSE) {
        r->state = RESPONSE_OVER;
        return RESPONSE_END;
    }
    return bad(r, why,
               state != RESPONSE_IN_HEAD ? "it ended in the middle of the body"
               : r->text.len             ? "it ended in the middle of the head"
                                         : "it closed the connection without a response");
}

bool http_response_keeps_alive(const struct http_response *r)
{
    return r->state == RESPONSE_OVER && r->head.keep_alive;
}

void http_response_clear(struct http_response *r)
{
    http_head_clear(&r->head);
    buf_clear(&r->text);
    memset(r, 0, sizeof *r);
}
