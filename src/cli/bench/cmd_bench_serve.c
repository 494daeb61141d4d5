/*
 * steel bench serve: a load generator for any OpenAI-compatible server. It keeps a number of
 * streams running, or starts them at a rate, and measures time to first token (TTFT), inter-token
 * latency (ITL), end-to-end latency, and goodput: the requests that meet targets. One thread, one libevent
 * loop. Does not depend on steel's own server, with which it shares the machine: a token costs a few thousand
 * instructions here.
 */
#include "cli/cli.h"
#include "base/clock.h"
#include "base/mem.h"
#include "server/http/http_parse.h"
#include "server/http/jsonout.h"

#include <errno.h>
#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/bufferevent_ssl.h>
#include <event2/event.h>
#include <math.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <openssl/ssl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>

enum { CALIBRATION_WORDS = 50, EVENT_BYTES = 64 << 10, ERROR_BYTES = 512 };

struct bench_url {
    bool tls;
    char host[256], port[8], path[256];
    struct addrinfo *addr;
    SSL_CTX *ctx;
};

struct bench_serve_options {
    const char *url, *levels, *model, *key, *endpoint, *extra, *save;
    FILE *saved;           /* of --save; NULL = none */
    float ttft_ms, itl_ms; /* targets; 0 = none */
    char *fields;          /* the members of extra, without the braces; NULL = none */
    int n_prompts, n_in, n_out, shared;
    float rate, words_per_token, temp;
    uint64_t seed;
    bool json, keep_eos;
};

struct samples {
    double *v; /* (n) seconds */
    size_t n, cap;
};

/* A run at one concurrency. */
struct bench_run {
    const struct bench_serve_options *f;
    struct bench_url *to;
    struct event_base *base;
    struct event *clock; /* --rate: timer of the next start */
    double words_per_token;
    uint64_t random;
    int n_started, n_done, n_failed, n_active, concurrency, total;
    int n_good; /* done within the targets */
    int64_t tokens_good;
    size_t text_key;    /* index of the member that had text last */
    struct buf decoded; /* scratch: a piece of a chunked body */
    int64_t tokens_in, tokens_out, tokens_cached, start_ns, end_ns;
    struct samples first, gap, mean_gap, whole; /* mean_gap: of each request (TPOT) */
    char error[256];                            /* the first error */
};

struct stream {
    struct bench_run *run;
    struct bufferevent *bev;
    struct buf line;
    int64_t start_ns, first_ns, last_ns;
    int status, n_tokens, n_asked;
    int64_t n_bytes; /* received */
    bool in_body, chunked, done;
    bool broken;    /* malformed chunks */
    bool said_done; /* [DONE] was received */
    struct http_chunks chunks;
    int n_usage_in, n_usage_out, n_usage_cached;
    struct buf error_body;
};

static void sample(struct samples *s, double v)
{
    if (s->n == s->cap) {
        s->cap = s->cap * 2 + 64;
        s->v = mem_realloc(s->v, s->cap, sizeof *s->v);
    }
    s->v[s->n++] = v;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* The p-th percentile of sorted samples, in milliseconds. */
static double percentile(const struct samples *s, double p)
{
    if (!s->n || !s->v)
        return 0;
    double at = p * (double)(s->n - 1);
    size_t i = (size_t)at;
    double next = s->v[i + 1 < s->n ? i + 1 : i];
    return (s->v[i] + (next - s->v[i]) * (at - (double)i)) * 1e3;
}

static uint64_t next_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Words that are single tokens in most vocabularies. */
static void add_words(struct buf *b, int n, uint64_t *random)
{
    static const char *const words[] = {
        "time", "year",  "people", "way",  "day",   "man",   "thing", "world", "life",  "hand",
        "part", "child", "eye",    "work", "week",  "case",  "point", "home",  "water", "room",
        "area", "money", "story",  "fact", "month", "right", "study", "book",  "word",  "side",
        "kind", "head",  "house",  "line", "power", "hour",  "game",  "end",   "city",  "name"};
    for (int i = 0; i < n; i++)
        buf_addf(b, "%s%s", i ? " " : "",
                 words[next_random(random) % (sizeof words / sizeof *words)]);
}

static void add_body(struct bench_run *r, int n_in, int n_out, struct buf *b)
{
    const struct bench_serve_options *f = r->f;
    bool chat = !strcmp(f->endpoint, "chat");
    struct buf prompt = {0};
    uint64_t same = f->seed + 99;
    int shared = f->shared < n_in ? f->shared : n_in;
    add_words(&prompt, (int)(shared * r->words_per_token), &same);
    buf_addc(&prompt, ' ');
    int own = (int)((n_in - shared) * r->words_per_token);
    add_words(&prompt, own > 0 ? own : 1, &r->random);
    buf_adds(b, "{\"model\":");
    jsonout_text(b, f->model);
    buf_adds(b, chat ? ",\"messages\":[{\"role\":\"user\",\"content\":" : ",\"prompt\":");
    jsonout_string(b, prompt.p, prompt.len);
    buf_addf(b, "%s,\"max_tokens\":%d,\"temperature\":%g,\"stream\":true,", chat ? "}]" : "", n_out,
             (double)f->temp);
    if (!f->keep_eos)
        buf_addf(b, "\"ignore_eos\":true,\"min_tokens\":%d,", n_out);
    if (f->fields)
        buf_addf(b, "%s,", f->fields);
    buf_adds(b, "\"stream_options\":{\"include_usage\":true}}");
    buf_clear(&prompt);
}

static void start_stream(struct bench_run *r, int n_in, int n_out);

/* Starts streams up to the concurrency. Ends the loop when all are done. */
static void start_streams(struct bench_run *r)
{
    while (r->f->rate <= 0 && r->n_active < r->concurrency && r->n_started < r->total &&
           !cli_interrupted())
        start_stream(r, r->f->n_in, r->f->n_out);
    if (r->n_done + r->n_failed >= r->total || (cli_interrupted() && r->n_active == 0))
        event_base_loopbreak(r->base);
}

static void on_clock(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    struct bench_run *r = arg;
    if (r->n_started >= r->total || cli_interrupted()) {
        start_streams(r);
        return;
    }
    if (r->n_active < r->concurrency)
        start_stream(r, r->f->n_in, r->f->n_out);
    double u = (double)(next_random(&r->random) >> 11) * 0x1p-53;
    double wait = -log(1 - u) / (double)r->f->rate; /* Poisson arrivals */
    event_add(r->clock, &(struct timeval){(time_t)wait, (suseconds_t)(fmod(wait, 1) * 1e6)});
}

/* Whether a request that is done met the targets: as others count goodput, by its first token and the mean time between
 * its tokens. */
static void judge(struct stream *s)
{
    struct bench_run *r = s->run;
    double first = (double)(s->first_ns - s->start_ns) * 1e-6, mean = 0;
    if (s->n_tokens > 1) {
        mean = (double)(s->last_ns - s->first_ns) * 1e-6 / (s->n_tokens - 1);
        sample(&r->mean_gap, mean * 1e-3);
    }
    if ((r->f->ttft_ms > 0 && first > (double)r->f->ttft_ms) ||
        (r->f->itl_ms > 0 && mean > (double)r->f->itl_ms))
        return;
    r->n_good++;
    r->tokens_good += s->n_usage_out ? s->n_usage_out : s->n_tokens;
}

static void end_stream(struct stream *s, const char *why)
{
    struct bench_run *r = s->run;
    int64_t now = clock_ns();
    if (!why && s->status != 200)
        why = s->error_body.len ? s->error_body.p : "no response";
    if (!why && !s->n_tokens && !s->n_usage_out && !s->said_done)
        why = "a response without tokens";
    if (why) {
        r->n_failed++;
        if (!r->error[0] && s->status)
            snprintf(r->error, sizeof r->error, "status %d: %.200s", s->status, why);
        else if (!r->error[0])
            snprintf(r->error, sizeof r->error, "%s", why);
    } else {
        r->n_done++;
        r->tokens_out += s->n_usage_out ? s->n_usage_out : s->n_tokens;
        r->tokens_in += s->n_usage_in;
        r->tokens_cached += s->n_usage_cached;
        sample(&r->whole, (double)(now - s->start_ns) * 1e-9);
        judge(s);
    }
    r->end_ns = now;
    r->n_active--;
    bufferevent_free(s->bev);
    buf_clear(&s->line);
    buf_clear(&s->error_body);
    mem_free(s);
    start_streams(r);
}

/* True if an event contains text: "content":"x", "text":"x", "reasoning_content":"x". */
static bool has_text(struct bench_run *r, const char *line)
{
    static const char *const keys[] = {"content\":", "text\":", "reasoning\":", "arguments\":"};
    enum { KEYS = sizeof keys / sizeof *keys };
    for (size_t k = 0; k < KEYS; k++) {
        size_t i = (r->text_key + k) % KEYS; /* usually it is the same for all events */
        for (const char *at = line; (at = strstr(at, keys[i]));) {
            at += strlen(keys[i]);
            at += strspn(at, " ");
            if (at[0] == '"' && at[1] != '"') {
                r->text_key = i;
                return true;
            }
        }
    }
    return false;
}

static void read_usage(struct stream *s, const char *json)
{
    json_t *v = json_loads(json, 0, NULL), *u = json_object_get(v, "usage");
    if (json_is_object(u)) {
        s->n_usage_in = (int)json_integer_value(json_object_get(u, "prompt_tokens"));
        s->n_usage_out = (int)json_integer_value(json_object_get(u, "completion_tokens"));
        s->n_usage_cached = (int)json_integer_value(
            json_object_get(json_object_get(u, "prompt_tokens_details"), "cached_tokens"));
    }
    json_decref(v);
}

static void on_event_line(struct stream *s, const char *line)
{
    if (strncmp(line, "data:", 5))
        return;
    line += 5 + strspn(line + 5, " ");
    if (!strcmp(line, "[DONE]")) {
        s->done = s->said_done = true;
        return;
    }
    const char *usage = strstr(line, "\"usage\":");
    if (usage && usage[8 + strspn(usage + 8, " ")] == '{')
        read_usage(s, line);
    if (!has_text(s->run, line))
        return;
    int64_t now = clock_ns();
    s->first_ns = s->n_tokens ? s->first_ns : now;
    if (s->n_tokens++ == 0)
        sample(&s->run->first, (double)(now - s->start_ns) * 1e-9);
    else
        sample(&s->run->gap, (double)(now - s->last_ns) * 1e-9);
    s->last_ns = now;
}

static void on_body(struct stream *s, const char *p, size_t n)
{
    if (s->status != 200) {
        size_t room = ERROR_BYTES - s->error_body.len;
        buf_add(&s->error_body, p, n < room ? n : room);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        if (p[i] == '\n') {
            while (s->line.len && s->line.p[s->line.len - 1] == '\r')
                s->line.p[--s->line.len] = 0;
            if (s->line.len)
                on_event_line(s, s->line.p);
            buf_reset(&s->line);
            continue;
        }
        const char *end = memchr(p + i, '\n', n - i);
        size_t take = end ? (size_t)(end - p) - i : n - i;
        buf_add(&s->line, p + i, take);
        i += take - 1;
    }
}

/* Removes a line from the input; NULL if none is complete. */
static char *take_line(struct evbuffer *in)
{
    return evbuffer_readln(in, NULL, EVBUFFER_EOL_CRLF);
}

static bool read_head(struct stream *s, struct evbuffer *in)
{
    char *line;
    while (!s->in_body && (line = take_line(in))) {
        if (!strncmp(line, "HTTP/1.", 7) && strlen(line) > 9)
            s->status = atoi(line + 9);
        if (!strncasecmp(line, "Transfer-Encoding:", 18) && strcasestr(line, "chunked"))
            s->chunked = true;
        if (!*line && s->status != 100)
            s->in_body = true;
        free(line);
    }
    return s->in_body;
}

/* Takes what has arrived. False: the response is complete. */
static bool read_body(struct stream *s, struct evbuffer *in)
{
    if (!read_head(s, in))
        return true;
    struct buf *text = &s->run->decoded;
    while (!s->done && !s->broken && evbuffer_get_length(in)) {
        struct evbuffer_iovec v;
        if (evbuffer_peek(in, -1, NULL, &v, 1) < 1)
            break;
        size_t n = v.iov_len;
        if (!s->chunked) {
            on_body(s, v.iov_base, n);
        } else {
            buf_reset(text);
            enum http_chunks_result how =
                http_chunks_feed(&s->chunks, v.iov_base, v.iov_len, SIZE_MAX, text, &n);
            if (text->len)
                on_body(s, text->p, text->len);
            s->done |= how == CHUNKS_DONE;
            s->broken = how == CHUNKS_BAD || how == CHUNKS_TOO_LARGE;
        }
        evbuffer_drain(in, n);
    }
    return !s->done && !s->broken;
}

static void on_read(struct bufferevent *bev, void *arg)
{
    struct stream *s = arg;
    struct evbuffer *in = bufferevent_get_input(bev);
    size_t before = evbuffer_get_length(in);
    bool over = !read_body(s, in);
    s->n_bytes += (int64_t)(before - evbuffer_get_length(in));
    /* A server may send a token in several events, but not without end. */
    if (s->n_tokens > 4 * s->n_asked + 64 ||
        s->n_bytes + (int64_t)evbuffer_get_length(in) > (s->n_asked + 64) * (int64_t)EVENT_BYTES)
        end_stream(s, "the server sends more than it was asked for");
    else if (over)
        end_stream(s, s->broken ? "malformed chunks" : NULL);
}

static void on_close(struct bufferevent *bev, short what, void *arg)
{
    (void)bev;
    struct stream *s = arg;
    if (what & BEV_EVENT_CONNECTED)
        return;
    if (what & BEV_EVENT_EOF)
        end_stream(s, s->status == 200 && !s->done && s->chunked ? "cut off" : NULL);
    else
        end_stream(s, "the connection failed");
}

static void start_stream(struct bench_run *r, int n_in, int n_out)
{
    struct bench_url *t = r->to;
    struct stream *s = mem_zalloc(1, sizeof *s);
    s->run = r;
    s->n_asked = n_out;
    s->bev =
        t->tls
            ? bufferevent_openssl_socket_new(r->base, -1, SSL_new(t->ctx),
                                             BUFFEREVENT_SSL_CONNECTING,
                                             BEV_OPT_CLOSE_ON_FREE | BEV_OPT_DEFER_CALLBACKS)
            : bufferevent_socket_new(r->base, -1, BEV_OPT_CLOSE_ON_FREE | BEV_OPT_DEFER_CALLBACKS);
    if (t->tls)
        bufferevent_openssl_set_allow_dirty_shutdown(s->bev, 1);
    struct buf body = {0}, head = {0};
    add_body(r, n_in, n_out, &body);
    buf_addf(&head,
             "POST %s%s HTTP/1.1\r\nHost: %s:%s\r\nContent-Type: application/json\r\n"
             "Content-Length: %zu\r\nConnection: close\r\n",
             t->path, strcmp(r->f->endpoint, "chat") ? "/completions" : "/chat/completions",
             t->host, t->port, body.len);
    if (r->f->key)
        buf_addf(&head, "Authorization: Bearer %s\r\n", r->f->key);
    buf_adds(&head, "\r\n");
    s->start_ns = clock_ns();
    r->n_started++;
    r->n_active++;
    bufferevent_setcb(s->bev, on_read, NULL, on_close, s);
    bufferevent_enable(s->bev, EV_READ | EV_WRITE);
    bufferevent_write(s->bev, head.p, head.len);
    bufferevent_write(s->bev, body.p, body.len);
    buf_clear(&head);
    buf_clear(&body);
    /* Callbacks are deferred, so a failure calls on_close later, never from here. */
    if (bufferevent_socket_connect(s->bev, t->addr->ai_addr, (int)t->addr->ai_addrlen) < 0)
        end_stream(s, "cannot connect");
}

static bool parse_url(const char *url, struct bench_url *t, struct error *err)
{
    const char *p = url;
    t->tls = !strncmp(p, "https://", 8);
    if (!t->tls && strncmp(p, "http://", 7))
        return error_set(err, "--url %s: must begin with http:// or https://", url);
    p += t->tls ? 8 : 7;
    size_t n = strcspn(p, ":/");
    if (n == 0 || n >= sizeof t->host)
        return error_set(err, "--url %s: no host", url);
    snprintf(t->host, sizeof t->host, "%.*s", (int)n, p);
    p += n;
    snprintf(t->port, sizeof t->port, "%s", t->tls ? "443" : "80");
    if (*p == ':') {
        n = strcspn(++p, "/");
        snprintf(t->port, sizeof t->port, "%.*s", n < 6 ? (int)n : 6, p);
        p += n;
    }
    n = strlen(p);
    while (n && p[n - 1] == '/')
        n--;
    snprintf(t->path, sizeof t->path, "%.*s", (int)n, p);
    if (!*t->path)
        snprintf(t->path, sizeof t->path, "/v1");
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    int rc = getaddrinfo(t->host, t->port, &hints, &t->addr);
    if (rc)
        return error_set(err, "%s: %s", t->host, gai_strerror(rc));
    if (t->tls)
        t->ctx = SSL_CTX_new(TLS_client_method());
    return true;
}

static void run_clear(struct bench_run *r)
{
    if (r->clock)
        event_free(r->clock);
    event_base_free(r->base);
    mem_free(r->first.v);
    mem_free(r->gap.v);
    mem_free(r->mean_gap.v);
    buf_clear(&r->decoded);
    mem_free(r->whole.v);
}

static void run_init(struct bench_run *r, const struct bench_serve_options *f, struct bench_url *t)
{
    *r = (struct bench_run){.f = f, .to = t, .base = event_base_new(), .random = f->seed};
    r->words_per_token = 1;
}

/* Sends one request to learn how many tokens a word has, and whether the server answers at all. */
static bool calibrate(const struct bench_serve_options *f, struct bench_url *t,
                      double *words_per_token, struct error *err)
{
    struct bench_run r;
    run_init(&r, f, t);
    r.concurrency = r.total = 1;
    r.random ^= 0x5bd1e995;
    start_stream(&r, CALIBRATION_WORDS, 1);
    if (r.n_failed == 0)
        event_base_dispatch(r.base);
    bool ok = r.n_done == 1;
    if (!ok)
        error_set(err, "%s: %s", f->url, r.error[0] ? r.error : "no response");
    if (f->words_per_token > 0)
        *words_per_token = (double)f->words_per_token;
    else
        *words_per_token =
            ok && r.tokens_in > 10 ? (double)CALIBRATION_WORDS / (double)r.tokens_in : 0.9;
    run_clear(&r);
    return ok;
}

static bool has_targets(const struct bench_serve_options *f)
{
    return f->ttft_ms > 0 || f->itl_ms > 0;
}

static void print_head(const struct bench_serve_options *f)
{
    const char *const p = "     p50     p90     p99";
    printf("%5s %6s %5s %8s %9s %9s |%24s |%24s |%24s |%24s%s\n", "", "", "", "", "input", "output",
           "TTFT ms", "ITL ms", "TPOT ms", "E2E ms", has_targets(f) ? " | goodput" : "");
    printf("%5s %6s %5s %8s %9s %9s |%s |%s |%s |%s%s\n", "conc", "ok", "err", "req/s", "tok/s",
           "tok/s", p, p, p, p, has_targets(f) ? " |   req/s    %" : "");
}

static void print_times(const struct samples *s, int digits)
{
    for (int i = 0; i < 3; i++)
        printf("%s%7.*f", i ? " " : " |", digits, percentile(s, (double[]){0.5, 0.9, 0.99}[i]));
}

static void print_row(const struct bench_run *r)
{
    double s = (double)(r->end_ns - r->start_ns) * 1e-9;
    s = s > 0 ? s : 1e-9;
    printf("%5d %6d %5d %8.2f %9.1f %9.1f", r->concurrency, r->n_done, r->n_failed, r->n_done / s,
           (double)r->tokens_in / s, (double)r->tokens_out / s);
    print_times(&r->first, 1);
    print_times(&r->gap, 2);
    print_times(&r->mean_gap, 2);
    print_times(&r->whole, 0);
    if (has_targets(r->f))
        printf(" | %7.2f %4.0f", r->n_good / s, r->n_done ? 100.0 * r->n_good / r->n_done : 0.0);
    printf("\n");
    fflush(stdout);
}

static void json_times(FILE *to, const char *name, const struct samples *s)
{
    double sum = 0;
    for (size_t i = 0; s->v && i < s->n; i++)
        sum += s->v[i];
    fprintf(to,
            ",\"%s\":{\"n\":%zu,\"mean\":%.4f,\"p50\":%.4f,\"p90\":%.4f,\"p99\":%.4f,\"max\":%.4f}",
            name, s->n, s->n ? sum / (double)s->n * 1e3 : 0.0, percentile(s, 0.5),
            percentile(s, 0.9), percentile(s, 0.99), percentile(s, 1));
}

static void print_json(const struct bench_run *r, FILE *to)
{
    const struct bench_serve_options *f = r->f;
    double s = (double)(r->end_ns - r->start_ns) * 1e-9;
    fprintf(to,
            "{\"concurrency\":%d,\"input_len\":%d,\"output_len\":%d,\"ok\":%d,\"errors\":%d,"
            "\"seconds\":%.4f,\"input_tokens\":%lld,\"cached_tokens\":%lld,\"output_tokens\":%lld,"
            "\"output_tokens_per_second\":%.2f",
            r->concurrency, f->n_in, f->n_out, r->n_done, r->n_failed, s, (long long)r->tokens_in,
            (long long)r->tokens_cached, (long long)r->tokens_out,
            s > 0 ? (double)r->tokens_out / s : 0.0);
    json_times(to, "ttft_ms", &r->first);
    json_times(to, "itl_ms", &r->gap);
    json_times(to, "tpot_ms", &r->mean_gap);
    json_times(to, "e2e_ms", &r->whole);
    if (has_targets(f))
        fprintf(to,
                ",\"goodput\":{\"ttft_ms\":%g,\"itl_ms\":%g,\"requests\":%d,"
                "\"requests_per_second\":%.4f,\"output_tokens_per_second\":%.2f}",
                (double)f->ttft_ms, (double)f->itl_ms, r->n_good, s > 0 ? r->n_good / s : 0.0,
                s > 0 ? (double)r->tokens_good / s : 0.0);
    fprintf(to, "}\n");
    fflush(to);
}

/* --extra: the object's members as text, to insert into request bodies. */
static bool read_extra(struct bench_serve_options *f)
{
    json_t *v = f->extra ? json_loads(f->extra, 0, NULL) : NULL;
    bool ok = !f->extra || json_is_object(v);
    if (json_object_size(v)) {
        char *text = json_dumps(v, JSON_COMPACT);
        f->fields = mem_strndup(text + 1, strlen(text) - 2);
        free(text);
    }
    json_decref(v);
    return ok;
}

static int measure(const struct bench_serve_options *f, struct bench_url *t, int concurrency,
                   double words_per_token)
{
    struct bench_run r;
    run_init(&r, f, t);
    r.concurrency = concurrency;
    r.total = f->n_prompts > 0 ? f->n_prompts : 4 * concurrency < 16 ? 16 : 4 * concurrency;
    r.words_per_token = words_per_token;
    r.random += (uint64_t)concurrency * 1000003; /* different prompts at every level */
    r.start_ns = r.end_ns = clock_ns();
    if (f->rate > 0) {
        r.clock = evtimer_new(r.base, on_clock, &r);
        on_clock(-1, 0, &r);
    } else {
        start_streams(&r);
    }
    if (r.n_done + r.n_failed < r.total)
        event_base_dispatch(r.base);
    struct samples *all[] = {&r.first, &r.gap, &r.mean_gap, &r.whole};
    for (int i = 0; i < 4; i++)
        if (all[i]->v)
            qsort(all[i]->v, all[i]->n, sizeof(double), ascending);
    if (f->json)
        print_json(&r, stdout);
    else
        print_row(&r);
    if (f->saved)
        print_json(&r, f->saved);
    if (r.n_failed)
        fprintf(stderr, "%d failed; the first: %s\n", r.n_failed, r.error);
    int failed = r.n_failed;
    run_clear(&r);
    return failed;
}

static void clear(struct bench_serve_options *f, struct bench_url *t)
{
    if (t->addr)
        freeaddrinfo(t->addr);
    SSL_CTX_free(t->ctx);
    mem_free(f->fields);
    if (f->saved)
        fclose(f->saved);
}

int cmd_bench_serve(int argc, char **argv)
{
    struct bench_serve_options f = {.url = "http://127.0.0.1:8080",
                                    .levels = "1,4,16,64",
                                    .model = "default",
                                    .endpoint = "completions",
                                    .n_in = 128,
                                    .n_out = 64,
                                    .seed = 1};
    const struct opt opts[] = {
        {OPT_STRING, 0, "url", "base-url", &f.url, 0, 0, "URL",
         "the server (default http://127.0.0.1:8080; /v1 is appended)"},
        {OPT_STRING, 0, "concurrency", "max-concurrency", &f.levels, 0, 0, "N,N",
         "concurrent streams, one row per number (default 1,4,16,64)"},
        {OPT_INT, 0, "num-prompts", 0, &f.n_prompts, 1, 1 << 24, "N",
         "requests per row (default: 4 per stream, at least 16)"},
        {OPT_INT, 0, "input-len", "random-input-len", &f.n_in, 1, 1 << 24, "N",
         "approximate prompt tokens (default 128)"},
        {OPT_INT, 0, "output-len", "random-output-len", &f.n_out, 1, 1 << 24, "N",
         "tokens to generate (default 64)"},
        {OPT_INT, 0, "shared-prefix", 0, &f.shared, 0, 1 << 24, "N",
         "prompt tokens shared by all requests (default 0)"},
        {OPT_FLOAT, 0, "words-per-token", 0, &f.words_per_token, 0, 100, "X",
         "prompt words per token; set it to compare servers (default: measured)"},
        {OPT_FLOAT, 0, "rate", "request-rate", &f.rate, 0, 1e6, "R",
         "start R requests per second, Poisson arrivals (default: as streams end)"},
        {OPT_FLOAT, 0, "temperature", "temp", &f.temp, 0, 100, "T",
         "sampling temperature (default 0)"},
        {OPT_STRING, 0, "extra", 0, &f.extra, 0, 0, "JSON",
         "object whose members are added to every request ('{\"n\": 4}')"},
        {OPT_STRING, 0, "endpoint", 0, &f.endpoint, 0, 0, "NAME",
         "completions or chat (default completions)"},
        {OPT_STRING, 0, "model", 0, &f.model, 0, 0, "NAME", "the model's name on the server"},
        {OPT_STRING, 0, "api-key", 0, &f.key, 0, 0, "KEY", "API key, sent as a bearer token"},
        {OPT_U64, 0, "seed", 0, &f.seed, 0, 0, "N", "seed of the prompts (default 1)"},
        {OPT_FLAG, 0, "keep-eos", 0, &f.keep_eos, 0, 0, 0,
         "allow responses to end before --output-len"},
        {OPT_FLOAT, 0, "ttft-ms", 0, &f.ttft_ms, 0, 1e9, "MS",
         "target of a request's first token, for goodput (default: none)"},
        {OPT_FLOAT, 0, "itl-ms", "tpot-ms", &f.itl_ms, 0, 1e9, "MS",
         "target of a request's mean time between tokens, for goodput (default: none)"},
        {OPT_FLAG, 0, "json", 0, &f.json, 0, 0, 0, "print one JSON object per row"},
        {OPT_STRING, 0, "save", 0, &f.save, 0, 0, "FILE",
         "also append one JSON object per row to FILE"},
    };
    const struct usage u = {
        .command = "bench serve",
        .synopsis = "[--url URL] [options]",
        .about =
            "Measures a running OpenAI-compatible server: tokens per second, time to first\n"
            "token (TTFT), inter-token latency (ITL), its mean per request (TPOT) and end-to-end\n"
            "time (E2E), in milliseconds. Goodput counts the requests that meet --ttft-ms and\n"
            "--itl-ms.",
        .examples =
            "  steel bench serve --concurrency 1,16 --input-len 512 --output-len 128\n"
            "  steel bench serve --input-len 1024 --output-len 1024 \\\n"
            "      --concurrency 128,256,512,1024 --ttft-ms 1000 --itl-ms 50 --save rows.jsonl\n"
            "  steel bench serve --url http://host:8000 --model name --rate 5\n",
        .opts = opts,
        .n_opts = sizeof opts / sizeof *opts,
        .min_args = 0,
        .max_args = 0,
    };
    int levels[32], n_levels, n = args_parse(&u, argc, argv, NULL);
    if (n < 0)
        return cli_args_exit(n);
    if (!args_int_list(f.levels, levels, 32, &n_levels) || !n_levels || levels[0] < 1)
        return cli_args_exit(
            args_usage_error(&u, "--concurrency %s: use a list such as 1,4", f.levels));
    if (strcmp(f.endpoint, "chat") && strcmp(f.endpoint, "completions"))
        return cli_args_exit(
            args_usage_error(&u, "--endpoint %s: use completions or chat", f.endpoint));
    if (!read_extra(&f))
        return cli_args_exit(args_usage_error(&u, "--extra %s: not a JSON object", f.extra));
    struct error err = {0};
    struct bench_url t = {0};
    double words_per_token;
    cli_catch_interrupt();
    f.saved = f.save ? fopen(f.save, "a") : NULL;
    if (f.save && !f.saved) {
        error_set(&err, "--save %s: %s", f.save, strerror(errno));
        clear(&f, &t);
        return cli_fail(&err);
    }
    if (!parse_url(f.url, &t, &err) || !calibrate(&f, &t, &words_per_token, &err)) {
        clear(&f, &t);
        return cli_fail(&err);
    }
    if (!f.json)
        print_head(&f);
    int failed = 0;
    for (int i = 0; i < n_levels && !cli_interrupted(); i++)
        failed += measure(&f, &t, levels[i] > 0 ? levels[i] : 1, words_per_token);
    clear(&f, &t);
    return cli_interrupted() ? EXIT_INTERRUPTED : failed ? EXIT_FAIL : EXIT_OK;
}
