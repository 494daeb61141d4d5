/*
 * Requests to all replicas at once, merged into one reply: lists of models, and metrics with a label
 * that names the replica. A replica that does not respond in time is left out.
 */
#include "route/gateway_int.h"
#include "base/json_guard.h"
#include "base/map.h"
#include "base/mem.h"
#include "server/http/jsonout.h"

#include <stdio.h>
#include <string.h>

enum { MAX_PART = 4 << 20, MAX_FAMILIES = 4096, MAX_GATHERS = 64 };

struct gather;
struct gather_part {
    struct gather *g;
    struct replica *from;
    struct upstream_exchange *exchange; /* NULL: done */
    int status;                         /* 0: no response */
    struct buf text;
};

struct gather {
    struct gather *prev, *next;
    struct gateway *gateway;
    struct http_exchange *x;
    const struct endpoint *endpoint;
    int n_left;
    int n;
    struct gather_part parts[]; /* (n) */
};

static void gather_free(struct gather *g)
{
    *(g->prev ? &g->prev->next : &g->gateway->gathers) = g->next;
    if (g->next)
        g->next->prev = g->prev;
    for (int i = 0; i < g->n; i++) {
        upstream_cancel(g->parts[i].exchange);
        buf_clear(&g->parts[i].text);
    }
    g->gateway->n_gathers--;
    mem_free(g);
}

/* Lists of models */

/* Concatenates the lists and drops repeated ids. Other members are those of the first replica. */
static void merge_lists(struct gather *g)
{
    struct gateway *gw = g->gateway;
    struct http_exchange *x = g->x;
    json_t *whole = NULL, *all = NULL, *seen = json_object();
    const struct gather_part *first = NULL;
    for (int i = 0; i < g->n; i++) {
        const struct gather_part *p = &g->parts[i];
        struct error err;
        if (p->status && (!first || first->status != 200))
            first = p;
        if (p->status != 200 || !p->text.len ||
            !json_guard(p->text.p, p->text.len, &json_limits_request, NULL, &err))
            continue;
        json_t *v = json_loadb(p->text.p, p->text.len, 0, NULL);
        json_t *list = json_object_get(v, g->endpoint->list), *member;
        size_t j;
        if (json_is_array(list) && !strcmp(g->endpoint->list, "data"))
            replica_learn_models(p->from, p->text.p, p->text.len);
        if (json_is_array(list) && !whole) {
            whole = json_incref(v);
            all = json_array();
        }
        json_array_foreach(list, j, member)
        {
            const char *id = json_string_value(json_object_get(member, g->endpoint->list_id));
            if (!id || json_object_get(seen, id))
                continue;
            json_object_set_new(seen, id, json_true());
            json_array_append(all, member);
        }
        json_decref(v);
    }
    if (whole) {
        size_t n = json_array_size(all);
        if (n && json_object_get(whole, "last_id")) /* Anthropic's */
            json_object_set(whole, "last_id", json_object_get(json_array_get(all, n - 1), "id"));
        json_object_set(whole, g->endpoint->list, all);
        struct buf b = {0};
        jsonout_value(&b, whole);
        gather_free(g);
        gateway_reply(gw, x, 200, "application/json", &b);
        buf_clear(&b);
    } else if (first && first->status >= 400) { /* forwarded as it is: most likely a wrong key */
        struct buf b = first->text;
        int status = first->status;
        ((struct gather_part *)first)->text = (struct buf){0};
        gather_free(g);
        gateway_reply(gw, x, status, "application/json", &b);
        buf_clear(&b);
    } else {
        gather_free(g);
        gateway_fail(gw, x, first ? 502 : 503, "unavailable_error",
                     first ? "no replica gave a list of models" : "no replica is available");
    }
    json_decref(all);
    json_decref(whole);
    json_decref(seen);
}

/* Metrics */

/* The Prometheus format wants all samples of a name together, after one HELP and one TYPE line. */
struct metric_family {
    struct buf head, samples;
    const struct gather_part *described; /* the replica whose HELP and TYPE are used */
};
struct metric_families {
    struct metric_family *list; /* (n) */
    struct map by_name;         /* names are views into the parts' texts */
    int n;
};

static struct metric_family *family_of(struct metric_families *f, const char *name, size_t n)
{
    int64_t at;
    if (map_get(&f->by_name, name, n, &at))
        return &f->list[at];
    if (f->n == MAX_FAMILIES)
        return NULL;
    map_add(&f->by_name, name, n, f->n);
    f->list = mem_realloc(f->list, (size_t)f->n + 1, sizeof *f->list);
    f->list[f->n] = (struct metric_family){0};
    return &f->list[f->n++];
}

/* Appends the sample NAME{labels} VALUE with an `upstream` label. */
static void add_sample(struct buf *b, const char *line, size_t n, const char *upstream)
{
    size_t name = 0;
    while (name < n && !strchr("{ \t", line[name]))
        name++;
    buf_add(b, line, name);
    buf_addf(b, "{upstream=\"%s\"", upstream);
    const char *rest = line + name;
    size_t left = n - name;
    if (left && *rest == '{') {
        rest++;
        left--;
        buf_adds(b, left && *rest == '}' ? "" : ",");
    } else {
        buf_addc(b, '}');
    }
    buf_add(b, rest, left);
    buf_addc(b, '\n');
}

static void add_metrics(struct metric_families *f, const struct gather_part *p)
{
    struct metric_family *now = NULL;
    const char *name = "", *end = p->text.p + p->text.len;
    size_t n_name = 0;
    for (const char *line = p->text.p, *next; line < end; line = next) {
        const char *eol = memchr(line, '\n', (size_t)(end - line));
        next = eol ? eol + 1 : end;
        size_t n = (size_t)((eol ? eol : end) - line);
        if (n && line[n - 1] == '\r')
            n--;
        if (!n || memchr(line, 0, n))
            continue;
        if (n > 7 && (!memcmp(line, "# HELP ", 7) || !memcmp(line, "# TYPE ", 7))) {
            name = line + 7;
            n_name = 0;
            while (n_name < n - 7 && name[n_name] != ' ')
                n_name++;
            now = family_of(f, name, n_name);
            if (now && !now->described)
                now->described = p; /* one description is enough */
            if (now && now->described == p) {
                buf_add(&now->head, line, n);
                buf_addc(&now->head, '\n');
            }
            continue;
        }
        if (*line == '#')
            continue;
        /* Names of a histogram's samples begin with its name. */
        if (!now || n < n_name || memcmp(line, name, n_name)) {
            n_name = 0;
            name = line;
            while (n_name < n && !strchr("{ \t", name[n_name]))
                n_name++;
            now = family_of(f, name, n_name);
        }
        if (now)
            add_sample(&now->samples, line, n, p->from->url.name);
    }
}

static void own_metrics(const struct gateway *gw, struct buf *b)
{
    const struct {
        const char *name, *help, *label;
        double value;
    } all[] = {
        {"choices_total", "Requests by the reason their replica was chosen.", "by=\"prefix\"",
         (double)gw->n_by_prefix},
        {"choices_total", "", "by=\"load\"", (double)gw->n_by_load},
        {"choices_total", "", "by=\"pin\"", (double)gw->n_by_pin},
        {"retries_total", "Requests retried on another replica after one failed or declined.", NULL,
         (double)gw->n_retries},
        {"cut_total", "Responses that broke off after they had begun.", NULL, (double)gw->n_cut},
        {"left_total", "Clients that disconnected before the end of their response.", NULL,
         (double)gw->n_left},
        {"replies_total", "Replies to clients, by status class.", "status=\"2xx\"",
         (double)gw->n_http[2]},
        {"replies_total", "", "status=\"3xx\"", (double)gw->n_http[3]},
        {"replies_total", "", "status=\"4xx\"", (double)gw->n_http[4]},
        {"replies_total", "", "status=\"5xx\"", (double)gw->n_http[5]},
        {"client_connections", "Open client connections.", NULL, http_n_conns(gw->http)},
        {"body_bytes", "Bytes of request bodies that are buffered.", NULL,
         (double)http_buffered(gw->http)},
    };
    const char *before = "";
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (strcmp(before, all[i].name))
            buf_addf(b, "# HELP steel_route_%s %s\n# TYPE steel_route_%s %s\n", all[i].name,
                     all[i].help, all[i].name, strstr(all[i].name, "_total") ? "counter" : "gauge");
        before = all[i].name;
        buf_addf(b, "steel_route_%s", all[i].name);
        if (all[i].label)
            buf_addf(b, "{%s}", all[i].label);
        buf_addf(b, " %.17g\n", all[i].value);
    }
    static const struct {
        const char *name, *kind, *help;
    } each[] = {
        {"up", "gauge", "Whether the replica is in rotation."},
        {"in_flight", "gauge", "Requests in flight."},
        {"connections", "gauge", "Open connections to the replica."},
        {"requests_total", "counter", "Requests sent to the replica."},
        {"failures_total", "counter", "Requests the replica failed."},
        {"outs_total", "counter", "Times the replica left the rotation."},
    };
    for (int k = 0; k < (int)(sizeof each / sizeof *each); k++) {
        buf_addf(b, "# HELP steel_route_%s %s\n# TYPE steel_route_%s %s\n", each[k].name,
                 each[k].help, each[k].name, each[k].kind);
        for (int i = 0; i < gw->n; i++) {
            const struct replica *p = &gw->replicas[i];
            const struct balancer_replica *s = balancer_replica(gw->balancer, i);
            double v[] = {s->in,
                          s->load,
                          upstream_n_conns(p->up),
                          (double)p->n_requests,
                          (double)p->n_failures,
                          (double)p->n_outs};
            buf_addf(b, "steel_route_%s{upstream=\"%s\"} %.17g\n", each[k].name, p->url.name, v[k]);
        }
    }
}

static void merge_metrics(struct gather *g)
{
    struct gateway *gw = g->gateway;
    struct http_exchange *x = g->x;
    struct metric_families f = {0};
    struct buf b = {0};
    map_init(&f.by_name, 256);
    own_metrics(gw, &b);
    for (int i = 0; i < g->n; i++)
        if (g->parts[i].status == 200 && g->parts[i].text.len)
            add_metrics(&f, &g->parts[i]);
    for (int i = 0; i < f.n; i++) {
        buf_add(&b, f.list[i].head.p, f.list[i].head.len);
        buf_add(&b, f.list[i].samples.p, f.list[i].samples.len);
        buf_clear(&f.list[i].head);
        buf_clear(&f.list[i].samples);
    }
    mem_free(f.list);
    map_clear(&f.by_name);
    gather_free(g);
    gateway_reply(gw, x, 200, "text/plain; version=0.0.4; charset=utf-8", &b);
    buf_clear(&b);
}

/* Sending */

static void end_part(struct gather_part *p)
{
    struct gather *g = p->g;
    p->exchange = NULL;
    if (--g->n_left)
        return;
    if (g->endpoint->gateway == GATEWAY_MERGES_LISTS)
        merge_lists(g);
    else
        merge_metrics(g);
}

static void on_head(void *user, const struct http_head *h)
{
    ((struct gather_part *)user)->status = h->status;
}

static void on_data(void *user, const char *data, size_t n)
{
    struct gather_part *p = user;
    if (p->text.len + n <= MAX_PART) {
        buf_add(&p->text, data, n);
        return;
    }
    upstream_cancel(p->exchange);
    p->status = 0;
    end_part(p);
}

static void on_end(void *user)
{
    end_part(user);
}

static void on_failed(void *user, enum upstream_failure kind, const char *why)
{
    struct gather_part *p = user;
    if (kind != UPSTREAM_STALE)
        replica_probe_now(p->from);
    log_line(LOG_DEBUG, "not gathered", LOG_TEXT("upstream", p->from->url.name),
             LOG_TEXT("why", why));
    p->status = 0;
    end_part(p);
}

static const struct upstream_handler handler = {on_head, on_data, on_end, on_failed};

static void on_left(void *user)
{
    gather_free(user);
}

void gather_start(struct gateway *gw, struct http_exchange *x, const struct endpoint *e)
{
    if (gw->n_gathers == MAX_GATHERS) { /* each opens a connection to every replica */
        gateway_fail(gw, x, 503, "unavailable_error",
                     "too many requests for all replicas at once; try again later");
        return;
    }
    struct gather *g = mem_zalloc(1, sizeof *g + (size_t)gw->n * sizeof *g->parts);
    g->gateway = gw;
    g->x = x;
    g->endpoint = e;
    g->next = gw->gathers;
    if (g->next)
        g->next->prev = g;
    gw->gathers = g;
    gw->n_gathers++;
    http_watch(x, g, on_left, NULL);
    g->n_left = 1; /* until all are sent */
    for (int i = 0; i < gw->n; i++) {
        struct buf head = {0};
        if (!balancer_replica(gw->balancer, i)->in)
            continue;
        struct gather_part *p = &g->parts[g->n++];
        p->g = g;
        p->from = &gw->replicas[i];
        gateway_own_head(gw, p->from, e->paths[0], x, &head);
        const struct upstream_request q = {.head = head.p,
                                           .n_head = head.len,
                                           .fresh = true,
                                           .answer_s = gw->opt.health_timeout_s};
        p->exchange = upstream_start(p->from->up, &q, &handler, p);
        g->n_left += p->exchange != NULL;
        buf_clear(&head);
    }
    end_part(&(struct gather_part){.g = g});
}

void gather_stop_all(struct gateway *gw)
{
    while (gw->gathers) {
        struct gather *g = gw->gathers;
        struct http_exchange *x = g->x;
        gather_free(g);
        gateway_fail(gw, x, 503, "unavailable_error", "the gateway is shutting down");
    }
}
