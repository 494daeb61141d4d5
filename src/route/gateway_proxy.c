/*
 * Forwards a request to one replica: chooses it, retries on another where that is allowed, and relays
 * the response as fast as the client reads. See the invariants in gateway_int.h.
 */
#include "route/gateway_int.h"
#include "base/clock.h"
#include "base/mem.h"
#include "server/http/jsonout.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

enum {
    BUFFER_MAX = 64 << 10, /* shorter responses are sent when they are complete */
    ID_WITHIN = 4 << 10,   /* the id of a kept response is searched in these bytes of the body */
    UNSENT_MAX = 64 << 10  /* unsent bytes at which reading from the replica pauses */
};

struct proxied_request {
    struct proxied_request *prev, *next;
    struct gateway *gateway;
    struct http_exchange *x;
    char id[132];
    struct upstream_exchange *up; /* NULL: not sent to a replica */
    int replica;                  /* the replica of `up` */
    enum endpoint_effect effect;
    struct upstream_body *body;
    struct prefix_hashes *hashes; /* owned; NULL = no prompt */
    uint64_t seed;                /* of hashes, different for each API key */
    char model[128];              /* "" = not given */
    uint64_t tried;
    int n_tries;
    int pinned;     /* the only replica that can respond; -1 = any */
    bool searching; /* the pinned replica is unknown: after a 404 the next one is tried */
    bool of_responses;
    bool wants_id; /* the id of a kept response or conversation was not found yet */
    bool begun;
    const char *by; /* why its replica was chosen, for the log */
    int64_t start_ns, first_ns;
    /* the response, until it has begun */
    int status;
    int64_t length;     /* -1 = unknown */
    char *type;         /* owned; NULL = none */
    struct buf headers; /* name NUL value NUL ... */
    bool buffered;      /* sent when it is complete */
    struct buf text;    /* the buffered body, or the part searched for an id */
    /* the response, once it has begun */
    bool events;  /* server-sent events */
    char last[2]; /* the last two bytes sent */
    uint64_t n_sent;
};

static const struct upstream_handler handler;

static void forget_response(struct proxied_request *p)
{
    mem_free(p->type);
    p->type = NULL;
    buf_clear(&p->headers);
    buf_clear(&p->text);
    p->status = 0;
    p->buffered = false;
}

/* The exchange with the replica is over. */
static void leave(struct proxied_request *p)
{
    if (p->replica >= 0)
        balancer_end(p->gateway->balancer, p->replica);
    p->replica = -1;
    p->up = NULL;
}

static void proxy_free(struct proxied_request *p)
{
    struct gateway *gw = p->gateway;
    *(p->prev ? &p->prev->next : &gw->proxied) = p->next;
    if (p->next)
        p->next->prev = p->prev;
    gw->n_proxied--;
    forget_response(p);
    upstream_body_release(p->body);
    mem_free(p->hashes);
    mem_free(p);
}

static void log_proxied(const struct proxied_request *p, int status, const char *how)
{
    const struct gateway *gw = p->gateway;
    double ms = (double)(clock_ns() - p->start_ns) * 1e-6;
    log_line(LOG_INFO, "passed", LOG_TEXT("id", p->id),
             LOG_TEXT("upstream", p->replica >= 0 ? gw->replicas[p->replica].url.name : "-"),
             LOG_TEXT("by", p->by ? p->by : "-"), LOG_NUM("tries", p->n_tries),
             LOG_NUM("status", status),
             LOG_NUM("first_ms", p->first_ns ? (double)(p->first_ns - p->start_ns) * 1e-6 : ms),
             LOG_NUM("ms", ms), LOG_NUM("bytes", p->n_sent), LOG_TEXT("end", how));
}

/* Ends a request that has not begun with an error. */
static void refuse(struct proxied_request *p, int status, const char *type, const char *why)
{
    struct http_exchange *x = p->x;
    struct gateway *gw = p->gateway;
    log_proxied(p, status, why);
    leave(p);
    proxy_free(p);
    gateway_fail(gw, x, status, type, "%s", why);
}

/* The response breaks off after it has begun. The client gets an error event if the stream is between
 * two events, else a reset connection. */
static void cut(struct proxied_request *p, const char *why)
{
    struct http_exchange *x = p->x;
    struct api_error err;
    enum dialect dialect = endpoint_dialect(http_request(x));
    p->gateway->n_cut++;
    log_proxied(p, p->status, why);
    bool place = p->events && p->last[0] == '\n' && p->last[1] == '\n';
    if (place) {
        struct buf b = {0};
        api_fail(&err, 502, "upstream_error", "the response broke off: %s", why);
        bool named = dialect == DIALECT_ANTHROPIC || p->of_responses;
        buf_adds(&b, named ? "event: error\ndata: " : "data: ");
        if (p->of_responses) { /* the error event of /v1/responses */
            buf_adds(&b,
                     "{\"type\":\"error\",\"code\":\"upstream_error\",\"param\":null,\"message\":");
            jsonout_text(&b, err.msg);
            buf_addc(&b, '}');
        } else {
            api_error_json(&b, &err, dialect);
        }
        buf_adds(&b, "\n\n");
        http_stream(x, b.p, b.len);
        buf_clear(&b);
    }
    leave(p);
    proxy_free(p);
    if (place)
        http_stream_end(x);
    else
        http_abort(x);
}

/* Choosing and sending */

static uint64_t candidates(const struct proxied_request *p)
{
    return replicas_with(p->gateway, p->model) & ~p->tried;
}

/* Whether it may be retried, and another replica is available. */
static bool may_retry(const struct proxied_request *p)
{
    const struct gateway *gw = p->gateway;
    enum balancer_reason why;
    uint64_t among = candidates(p);
    if (p->pinned >= 0 || p->n_tries > (p->searching ? gw->n : gw->opt.retries))
        return false;
    if (p->replica >= 0)
        among &= ~((uint64_t)1 << p->replica);
    return balancer_choose(gw->balancer, NULL, among, clock_ns(), &why) >= 0;
}

static int choose(struct proxied_request *p, enum balancer_reason *why)
{
    struct gateway *gw = p->gateway;
    int i;
    if (p->pinned >= 0) {
        i = balancer_choose(gw->balancer, NULL, (uint64_t)1 << p->pinned, clock_ns(), why);
        gw->n_by_pin += i >= 0;
        p->by = "pin";
        return i;
    }
    i = balancer_choose(gw->balancer, p->hashes, candidates(p), clock_ns(), why);
    if (i >= 0 && *why == BALANCER_BY_PREFIX)
        gw->n_by_prefix++;
    else if (i >= 0)
        gw->n_by_load++;
    p->by = *why == BALANCER_BY_PREFIX ? "prefix" : "load";
    return i;
}

static void no_replica(struct proxied_request *p, enum balancer_reason why)
{
    if (why == BALANCER_ALL_FULL)
        refuse(p, 503, "unavailable_error", "all replicas are at their limit; try again later");
    else if (p->pinned >= 0)
        refuse(p, 503, "unavailable_error", "the replica that keeps this is not available");
    else
        refuse(p, 503, "unavailable_error", "no replica is available");
}

static void send_to(struct proxied_request *p, int i, bool fresh)
{
    struct gateway *gw = p->gateway;
    struct replica *to = &gw->replicas[i];
    struct buf head = {0};
    const char *method = http_request(p->x)->method;
    gateway_request_head(gw, to, p->x, p->body ? p->body->n : 0, &head);
    const struct upstream_request q = {
        .head = head.p,
        .n_head = head.len,
        .body = p->body,
        .head_request = !strcmp(method, "HEAD"),
        /* An idle connection may be closed while the request is sent. Whether it was read is unknown. */
        .fresh = fresh || p->effect == ENDPOINT_CHANGES,
        .answer_s = gw->opt.answer_s,
    };
    p->replica = i;
    balancer_begin(gw->balancer, i, p->hashes);
    to->n_requests++;
    p->up = upstream_start(to->up, &q, &handler, p);
    buf_clear(&head);
    if (!p->up)
        refuse(p, 503, "unavailable_error", "there is no connection left to a replica");
}

static void try_one(struct proxied_request *p)
{
    enum balancer_reason why;
    int i = choose(p, &why);
    if (i < 0) {
        no_replica(p, why);
        return;
    }
    p->n_tries++;
    send_to(p, i, false);
}

/* Its replica failed or declined: tries the next one. */
static void try_next(struct proxied_request *p)
{
    p->gateway->n_retries++;
    p->tried |= (uint64_t)1 << p->replica;
    forget_response(p);
    leave(p);
    try_one(p);
}

/* The response */

static void save_headers(struct proxied_request *p, const struct http_head *h)
{
    const char *type = http_header(h, "Content-Type");
    p->status = h->status;
    p->length = h->length;
    p->type = type && strlen(type) < 200 ? mem_strdup(type) : NULL;
    p->events = type && !strncasecmp(type, "text/event-stream", 17);
    for (int i = 0; i < h->n_headers; i++) {
        if (!gateway_forwards_header(h, h->headers[i].name))
            continue;
        buf_add(&p->headers, h->headers[i].name, strlen(h->headers[i].name) + 1);
        buf_add(&p->headers, h->headers[i].value, strlen(h->headers[i].value) + 1);
    }
}

static void add_headers(struct proxied_request *p)
{
    const char *s = p->headers.p, *end = s + p->headers.len;
    while (s < end) {
        const char *value = s + strlen(s) + 1;
        http_add_header(p->x, s, value);
        s = value + strlen(value) + 1;
    }
    p->gateway->n_http[p->status / 100]++;
}

/* Sends the first byte. From here on there are no retries. */
static void begin(struct proxied_request *p)
{
    p->begun = true;
    upstream_body_release(p->body);
    p->body = NULL;
    mem_free(p->hashes);
    p->hashes = NULL;
    http_body_done(p->x);
    add_headers(p);
    buf_clear(&p->headers);
    if (p->length >= 0)
        http_stream_start_sized(p->x, p->status, p->type, p->length);
    else
        http_stream_start(p->x, p->status, p->type);
}

/* Finds the id of a kept response or conversation and pins it to this replica. */
static void look_for_id(struct proxied_request *p, const char *text, size_t n)
{
    static const char mark[] = "\"id\":";
    const char *end = text + n;
    for (const char *at = text; (at = memmem(at, (size_t)(end - at), mark, sizeof mark - 1));) {
        at += sizeof mark - 1;
        while (at < end && *at == ' ')
            at++;
        if (end - at < 6 || (memcmp(at, "\"resp_", 6) && memcmp(at, "\"conv_", 6)))
            continue;
        at++;
        const char *quote = memchr(at, '"', (size_t)(end - at));
        if (quote && quote - at < 128) {
            balancer_pin(p->gateway->balancer, prefix_hash(p->seed, at, (size_t)(quote - at)),
                         p->replica);
            p->wants_id = false; /* a body has one */
        }
        return;
    }
}

/* The replica is busy, or does not have the kept response: it did nothing. */
static bool is_declined(const struct proxied_request *p, int status)
{
    if (status == 429 || status == 503)
        return true;
    return p->searching &&
           (status == 404 || (status == 400 && !strcmp(http_request(p->x)->method, "POST")));
}

static void on_head(void *user, const struct http_head *h)
{
    struct proxied_request *p = user;
    struct replica *from = &p->gateway->replicas[p->replica];
    if (h->status == 503)
        replica_probe_now(from);
    if (is_declined(p, h->status) && may_retry(p)) {
        upstream_cancel(p->up);
        try_next(p);
        return;
    }
    save_headers(p, h);
    p->buffered = h->length >= 0 && h->length <= BUFFER_MAX;
}

static void on_data(void *user, const char *data, size_t n)
{
    struct proxied_request *p = user;
    p->first_ns = p->first_ns ? p->first_ns : clock_ns();
    if (p->wants_id && !p->buffered && p->text.len < ID_WITHIN) {
        buf_add(&p->text, data, n < ID_WITHIN ? n : ID_WITHIN);
        look_for_id(p, p->text.p, p->text.len);
    }
    if (p->buffered) {
        buf_add(&p->text, data, n);
        return;
    }
    if (!p->begun)
        begin(p);
    http_stream(p->x, data, n);
    p->n_sent += n;
    if (n > 1)
        memcpy(p->last, data + n - 2, 2);
    else {
        p->last[0] = p->last[1];
        p->last[1] = data[0];
    }
    if (http_unsent(p->x) > UNSENT_MAX)
        upstream_pause(p->up);
}

static void on_end(void *user)
{
    struct proxied_request *p = user;
    struct http_exchange *x = p->x;
    replica_answered(&p->gateway->replicas[p->replica], p->status);
    bool head = !strcmp(http_request(x)->method, "HEAD"), begun = p->begun;
    bool bare = p->status == 204 || p->status == 304;
    if (p->wants_id && p->buffered && p->text.len)
        look_for_id(p, p->text.p, p->text.len < ID_WITHIN ? p->text.len : ID_WITHIN);
    bool whole = !begun && (bare || (p->buffered && !head));
    p->n_sent += p->buffered ? p->text.len : 0;
    if (whole)
        add_headers(p);
    else if (!begun)
        begin(p);
    log_proxied(p, p->status, "done");
    int status = p->status;
    char *type = p->type;
    struct buf text = p->text;
    p->type = NULL;
    p->text = (struct buf){0};
    leave(p);
    proxy_free(p);
    if (whole)
        http_reply(x, status, type, text.p ? text.p : "", text.len);
    else
        http_stream_end(x);
    mem_free(type);
    buf_clear(&text);
}

static void on_failed(void *user, enum upstream_failure kind, const char *why)
{
    struct proxied_request *p = user;
    struct replica *from = &p->gateway->replicas[p->replica];
    p->up = NULL;
    if (kind == UPSTREAM_STALE) { /* send it again over a new connection */
        int i = p->replica;
        leave(p);
        send_to(p, i, true);
        return;
    }
    replica_failed(from, kind, why);
    if (kind == UPSTREAM_NO_SOCKET) {
        refuse(p, 503, "unavailable_error", "there is no connection left to a replica");
        return;
    }
    bool never = kind == UPSTREAM_REFUSED || kind == UPSTREAM_UNREACHABLE;
    char text[400];
    snprintf(text, sizeof text, "the replica %s",
             kind == UPSTREAM_SLOW ? "is too slow: " : "failed: ");
    snprintf(text + strlen(text), sizeof text - strlen(text), "%.300s", why);
    if (p->begun)
        cut(p, text);
    else if ((never || (p->effect != ENDPOINT_CHANGES && kind != UPSTREAM_SLOW)) && may_retry(p))
        try_next(p);
    else if (never && balancer_n_in(p->gateway->balancer) == 0)
        refuse(p, 503, "unavailable_error", "no replica is available");
    else
        refuse(p, kind == UPSTREAM_SLOW ? 504 : 502, "upstream_error", text);
}

static const struct upstream_handler handler = {on_head, on_data, on_end, on_failed};

/* The client */

static void on_left(void *user)
{
    struct proxied_request *p = user;
    p->x = NULL;
    p->gateway->n_left++;
    log_proxied(p, 499, "client left");
    upstream_cancel(p->up);
    leave(p);
    proxy_free(p);
}

static void on_drained(void *user)
{
    struct proxied_request *p = user;
    if (p->up)
        upstream_resume(p->up);
}

static void pin(struct proxied_request *p, const char *id, size_t n)
{
    p->pinned = balancer_pinned(p->gateway->balancer, prefix_hash(p->seed, id, n));
    p->searching = p->pinned < 0;
}

/* The id of a kept response or conversation in a path; NULL = none. */
static const char *kept_id(const char *path)
{
    static const char *const before[] = {"/responses/", "/conversations/"};
    for (size_t i = 0; i < sizeof before / sizeof *before; i++) {
        const char *at = strstr(path, before[i]);
        if (at)
            return at + strlen(before[i]);
    }
    return NULL;
}

/* Reads from path and body what the choice of a replica depends on. */
static void read_request(struct proxied_request *p)
{
    const struct http_head *h = http_request(p->x);
    const struct endpoint *e = endpoint_find_forwarded(h);
    bool looks = !strcmp(h->method, "GET") || !strcmp(h->method, "HEAD");
    p->effect = e ? e->effect : looks ? ENDPOINT_READS : ENDPOINT_CHANGES;
    if (e && e->names_kept) {
        const char *id = kept_id(h->path);
        pin(p, id, strcspn(id, "/"));
    }
    p->wants_id = e && e->creates_kept;
    if (!p->body || (p->effect != ENDPOINT_GENERATES && p->effect != ENDPOINT_COMPUTES))
        return;
    struct body_fields f;
    char id[160];
    body_fields_find(p->body->p, p->body->n, &f);
    body_span_text(&f.model, p->model, sizeof p->model);
    p->of_responses = p->wants_id;
    if (p->of_responses &&
        (body_span_text(&f.previous, id, sizeof id) || body_conversation_id(&f, id, sizeof id)))
        pin(p, id, strlen(id));
    if (f.background.n == 4 && !memcmp(f.background.p, "true", 4))
        p->effect = ENDPOINT_CHANGES; /* it continues after its response */
    if (p->effect == ENDPOINT_GENERATES) {
        p->hashes = mem_alloc(sizeof *p->hashes);
        prefix_hashes_make(&f, p->seed, p->hashes);
    }
}

void proxy_start(struct gateway *gw, struct http_exchange *x)
{
    struct proxied_request *p = mem_zalloc(1, sizeof *p);
    const char *key = access_bearer(x);
    size_t n;
    char *body = http_take_body(x, &n);
    p->gateway = gw;
    p->x = x;
    snprintf(p->id, sizeof p->id, "%s", http_id(x));
    p->replica = p->pinned = -1;
    p->start_ns = clock_ns();
    /* Replicas separate their caches by the key they receive. */
    const char *seen = gw->opt.upstream_key ? gw->opt.upstream_key : key ? key : "";
    p->seed = prefix_hash(gw->secret, seen, strlen(seen));
    p->body = upstream_body_new(body, n);
    p->next = gw->proxied;
    if (p->next)
        p->next->prev = p;
    gw->proxied = p;
    gw->n_proxied++;
    http_watch(x, p, on_left, on_drained);
    read_request(p);
    try_one(p);
}

void proxy_leave_replica(struct gateway *gw, int replica)
{
    for (struct proxied_request *p = gw->proxied, *next; p; p = next) {
        next = p->next;
        if (p->replica != replica || !p->up || p->begun || p->effect == ENDPOINT_CHANGES ||
            !may_retry(p))
            continue;
        upstream_cancel(p->up);
        try_next(p);
    }
}

void proxy_cut_all(struct gateway *gw)
{
    while (gw->proxied) {
        struct proxied_request *p = gw->proxied;
        upstream_cancel(p->up);
        p->up = NULL;
        if (p->begun)
            cut(p, "the gateway is shutting down");
        else
            refuse(p, 503, "unavailable_error", "the gateway is shutting down");
    }
}
