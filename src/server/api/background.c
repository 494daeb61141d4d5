/* See background.h. Runs on the loop. */
#include "server/api/background.h"
#include "base/clock.h"
#include "base/mem.h"
#include "server/api/query.h"
#include "server/api/responses.h"
#include "server/api/store.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A client that reads the events. */
struct event_reader {
    struct event_reader *next, *prev;
    struct background *bg;
    struct http_exchange *x;
    size_t at; /* bytes of all events before the next one to send */
    int64_t last_write_ns;
};

struct background {
    struct background *next, *prev; /* in server->backgrounds */
    struct server *server;
    struct api_request *req; /* NULL: it has ended */
    struct buf events;       /* empty if they are in the store */
    size_t n_dropped;        /* bytes of events that were dropped before */
    /* Of its response in the store; owner NULL = it runs, or is not kept. */
    char id[RESPONSE_ID_SIZE], *owner;
    struct event_reader *readers;
};

static const char EVENT_END[] = "\n\n";

/* The sequence number of the event at `text`, -1 = none. */
static int number_of(const char *text)
{
    static const char mark[] = "\"sequence_number\":";
    const char *at = text ? strstr(text, mark) : NULL;
    return at ? atoi(at + sizeof mark - 1) : -1;
}

static struct background *new_background(struct server *s)
{
    struct background *bg = mem_zalloc(1, sizeof *bg);
    bg->server = s;
    bg->next = s->backgrounds;
    if (bg->next)
        bg->next->prev = bg;
    s->backgrounds = bg;
    return bg;
}

static void free_unused(struct background *bg)
{
    if (bg->req || bg->readers)
        return;
    *(bg->prev ? &bg->prev->next : &bg->server->backgrounds) = bg->next;
    if (bg->next)
        bg->next->prev = bg->prev;
    buf_clear(&bg->events);
    mem_free(bg->owner);
    mem_free(bg);
}

/* Its events are read from the store from now on, so that readers who are slow cost nothing. */
static void use_store(struct background *bg, const char *id, const char *owner)
{
    snprintf(bg->id, sizeof bg->id, "%s", id);
    bg->owner = mem_strdup(owner);
    buf_clear(&bg->events);
}

/* Readers */

static void remove_reader(struct event_reader *r)
{
    *(r->prev ? &r->prev->next : &r->bg->readers) = r->next;
    if (r->next)
        r->next->prev = r->prev;
    mem_free(r);
}

/* Sends what the reader can take. The reader is freed at the end of the events. */
static void send_events(struct event_reader *r)
{
    struct background *bg = r->bg;
    struct buf piece = {0};
    size_t unsent = http_unsent(r->x), room = unsent >= UNSENT_LIMIT ? 0 : UNSENT_LIMIT - unsent;
    size_t at = r->at - bg->n_dropped, all = bg->events.len;
    bool lost = r->at < bg->n_dropped; /* too slow */
    if (!lost && bg->owner)
        lost = !store_events(bg->server->store, bg->id, bg->owner, at, room, &piece, &all);
    if (lost) {
        struct http_exchange *x = r->x;
        http_watch(x, NULL, NULL, NULL);
        remove_reader(r);
        http_abort(x);
        return;
    }
    size_t left = all - at, n = room < left ? room : left;
    if (n) {
        r->last_write_ns = clock_ns();
        http_stream(r->x, bg->owner ? piece.p : bg->events.p + at, n);
        r->at += n;
    }
    buf_clear(&piece);
    if (n < left || bg->req)
        return;
    struct http_exchange *x = r->x;
    http_watch(x, NULL, NULL, NULL);
    remove_reader(r);
    http_stream_end(x);
}

static void send_all(struct background *bg)
{
    for (struct event_reader *r = bg->readers, *next; r; r = next) {
        next = r->next;
        send_events(r);
    }
}

static void on_reader_left(void *user)
{
    struct background *bg = ((struct event_reader *)user)->bg;
    remove_reader(user);
    free_unused(bg);
}

static void on_reader_drained(void *user)
{
    struct background *bg = ((struct event_reader *)user)->bg;
    send_events(user);
    free_unused(bg);
}

/* Makes a client a reader from byte `at` of the kept events on. */
static void add_reader(struct background *bg, struct http_exchange *x, size_t at)
{
    struct event_reader *r = mem_zalloc(1, sizeof *r);
    *r = (struct event_reader){.bg = bg,
                               .x = x,
                               .at = bg->n_dropped + at,
                               .last_write_ns = clock_ns(),
                               .next = bg->readers};
    if (r->next)
        r->next->prev = r;
    bg->readers = r;
    http_add_header(x, "Cache-Control", "no-cache");
    http_add_header(x, "X-Accel-Buffering", "no");
    bg->server->n_http[2]++;
    http_watch(x, r, on_reader_left, on_reader_drained);
    http_stream_start(x, 200, "text/event-stream; charset=utf-8");
    send_events(r);
}

/* Running */

bool background_admit(struct api_request *req)
{
    int n = 0;
    for (const struct background *bg = req->server->backgrounds; bg; bg = bg->next)
        n += bg->req && !strcmp(bg->req->owner, req->owner);
    if (n < BACKGROUND_EACH)
        return true;
    api_fail(
        &req->err, 429, "rate_limit_error",
        "%d background responses are queued or in progress, and that is the limit; cancel one, or "
        "try again later",
        n);
    snprintf(req->err.param, sizeof req->err.param, "background");
    return false;
}

void background_begin(struct api_request *req)
{
    struct http_exchange *x = req->x;
    struct background *bg = new_background(req->server);
    struct buf b = {0};
    bg->req = req;
    req->background = bg;
    http_watch(x, NULL, NULL, NULL);
    req->x = NULL;
    if (req->streaming) {
        reply_responses.stream_open(req, &b);
        background_write(bg, &b);
        add_reader(bg, x, 0);
    } else {
        responses_add_now(req, &b);
        reply_json(x, req->server, 200, &b);
    }
    buf_clear(&b);
}

/* Drops the first events if that frees half of the bound: the last event stays, and events that a reader lacks stay
 * unless they are `far` behind. */
static void drop_oldest(struct background *bg, size_t far)
{
    struct buf *e = &bg->events;
    size_t least = BACKGROUND_EVENTS_MOST / 2, most = e->len - least;
    for (const struct event_reader *r = bg->readers; r && e->len <= far; r = r->next)
        if (r->at - bg->n_dropped < most)
            most = r->at - bg->n_dropped;
    size_t cut = most; /* back to the end of an event */
    while (cut >= least && memcmp(e->p + cut - 2, EVENT_END, 2) != 0)
        cut--;
    if (cut < least)
        return;
    memmove(e->p, e->p + cut, e->len - cut + 1);
    e->len -= cut;
    bg->n_dropped += cut;
}

void background_write(struct background *bg, const struct buf *events)
{
    size_t before = bg->events.len;
    if (before > BACKGROUND_EVENTS_MOST) /* the last event repeats the response: not counted */
        drop_oldest(bg, bg->server->opt.max_unsent / 2);
    if (events->len)
        buf_add(&bg->events, events->p, events->len);
    send_all(bg);
    api_request_keep(bg->req, before, bg->events.len);
}

const struct buf *background_events(const struct background *bg)
{
    return &bg->events;
}

void background_end(struct api_request *req)
{
    struct background *bg = req->background;
    size_t n;
    api_request_keep(req, bg->events.len, 0);
    bg->req = NULL;
    req->background = NULL;
    req->over = true;
    if (bg->readers && bg->events.len &&
        store_events(req->server->store, req->id, req->owner, 0, 0, NULL, &n) &&
        n == bg->events.len)
        use_store(bg, req->id, req->owner);
    send_all(bg);
    free_unused(bg);
}

void background_tick(struct server *s, int64_t now_ns)
{
    int64_t most = (int64_t)s->opt.ping_s * 1000000000;
    for (struct background *bg = s->backgrounds; bg; bg = bg->next)
        for (struct event_reader *r = bg->readers; r; r = r->next)
            if (now_ns - r->last_write_ns >= most && http_unsent(r->x) == 0 &&
                r->at == bg->n_dropped + bg->events.len) { /* at the end of an event */
                r->last_write_ns = now_ns;
                http_stream(r->x, reply_responses.ping, strlen(reply_responses.ping));
            }
}

void background_drain(struct server *s)
{
    for (struct background *bg = s->backgrounds, *next; bg; bg = next) {
        next = bg->next;
        if (bg->req && !bg->readers)
            background_cancel(bg->req, false);
    }
}

/* Endpoints */

struct api_request *background_find(struct server *s, struct http_exchange *x, const char *id)
{
    struct api_request *found = NULL;
    char *owner = access_owner(&s->opt.access, x);
    for (struct background *bg = s->backgrounds; bg && !found; bg = bg->next)
        if (bg->req && !strcmp(bg->req->id, id) && !strcmp(bg->req->owner, owner))
            found = bg->req;
    mem_free(owner);
    return found;
}

void background_cancel(struct api_request *req, bool keep)
{
    struct buf b = {0};
    if (req->streaming) {
        responses_add_cancelled(req, &b);
        background_write(req->background, &b);
    }
    buf_clear(&b);
    if (keep)
        responses_keep_failed(req, "cancelled", NULL);
    api_request_stop(req, 499, "cancelled");
    background_end(req);
    api_request_release(req);
}

/* The place in the events after the one numbered `after`. False: that place is no longer kept. */
static bool place_after(const struct buf *events, int after, size_t *at)
{
    int first = number_of(events->p);
    const char *p = events->p;
    *at = 0;
    if (first < 0) /* there are none yet */
        return after < 0;
    if (after + 1 < first)
        return false;
    for (int n = first; n <= after && p; n++)
        if ((p = memmem(p, events->len - (size_t)(p - events->p), EVENT_END, 2)))
            p += 2;
    *at = p ? (size_t)(p - events->p) : events->len;
    return true;
}

static void refuse_stream(struct server *s, struct http_exchange *x, const char *param,
                          const char *why)
{
    struct api_error err;
    api_invalid(&err, param, "%s: %s", param, why);
    reply_error(x, s, &err, DIALECT_OPENAI);
}

void background_stream(struct server *s, struct http_exchange *x, const char *id)
{
    struct api_error err;
    int after = -1;
    size_t at;
    struct buf kept = {0};
    if (!query_int(http_request(x)->query, "starting_after", 0, INT_MAX - 1, &after, &err)) {
        reply_error(x, s, &err, DIALECT_OPENAI);
        return;
    }
    struct api_request *req = background_find(s, x, id);
    char *owner = access_owner(&s->opt.access, x);
    bool found = req || (!strncmp(id, "resp_", 5) &&
                         store_events(s->store, id, owner, 0, SIZE_MAX, &kept, NULL));
    const struct buf *events = req ? &req->background->events : &kept;
    if (!found) {
        response_missing(s, x, id);
    } else if (!events->len) {
        refuse_stream(s, x, "stream",
                      "only a response made with background and stream has kept events");
    } else if (!place_after(events, after, &at)) {
        refuse_stream(s, x, "starting_after", "the events after this one are no longer kept");
    } else if (req) {
        add_reader(req->background, x, at);
    } else {
        struct background *bg = new_background(s);
        use_store(bg, id, owner);
        add_reader(bg, x, at);
        free_unused(bg);
    }
    mem_free(owner);
    buf_clear(&kept);
}

void post_response_cancel(struct server *s, struct http_exchange *x)
{
    char id[RESPONSE_ID_SIZE];
    struct buf b = {0};
    response_path_id(x, id);
    struct api_request *req = background_find(s, x, id);
    if (req)
        background_cancel(req, true);
    bool found = response_look_up(s, x, id, STORE_BACKGROUND, &b), background = b.len > 0;
    buf_reset(&b);
    if (background && response_look_up(s, x, id, STORE_REPLY, &b)) {
        reply_json(x, s, 200, &b);
    } else if (found) {
        struct api_error err;
        api_invalid(&err, "response_id", "only a background response can be cancelled");
        reply_error(x, s, &err, DIALECT_OPENAI);
    } else {
        response_missing(s, x, id);
    }
    buf_clear(&b);
}
