/*
 * Health of the replicas, from periodic probes of the health path and from the outcome of proxied
 * requests. Logs when a replica leaves or enters the rotation. Keeps the list of models of each replica.
 */
#include "route/gateway_int.h"
#include "base/clock.h"
#include "base/json_guard.h"
#include "base/mem.h"

#include <event2/event.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

enum { MAX_PROBE_BODY = 1 << 20, MODELS_S = 30, MAX_MODELS = 256 };

static const struct upstream_handler handler;

static void set_timer(struct replica *p, int ms)
{
    event_add(p->timer, &(struct timeval){ms / 1000, ms % 1000 * 1000});
}

/* hung: it neither responds nor closes its connections, so requests there would never end. A replica
 * that shuts down refuses connections but completes its requests. */
static void log_out(struct replica *p, const char *why, bool hung)
{
    p->n_outs++;
    log_line(LOG_WARN, "replica is out", LOG_TEXT("upstream", p->url.name), LOG_TEXT("why", why),
             LOG_NUM("left", balancer_n_in(p->gateway->balancer)));
    p->hung = hung;
    if (hung)
        proxy_leave_replica(p->gateway, p->index);
}

/* It refuses connections: its cache is forget_cache, or will be soon. */
static void forget_cache(struct replica *p)
{
    upstream_drop_pool(p->up);
    balancer_forget(p->gateway->balancer, p->index);
}

static void probe_bad(struct replica *p, bool hung, const char *why)
{
    if (balancer_probe_bad(p->gateway->balancer, p->index, !hung))
        log_out(p, why, hung);
    else if (!p->seen)
        log_line(LOG_WARN, "replica is not there yet", LOG_TEXT("upstream", p->url.name),
                 LOG_TEXT("why", why));
    p->seen = true;
}

static void probe_good(struct replica *p)
{
    struct gateway *gw = p->gateway;
    if (!balancer_probe_good(gw->balancer, p->index, clock_ns()))
        return;
    log_line(LOG_INFO, "replica is in", LOG_TEXT("upstream", p->url.name),
             LOG_NUM("replicas", balancer_n_in(gw->balancer)), LOG_NUM("of", gw->n));
    p->seen = true;
    p->models_ns = 0; /* they may have changed */
    p->hung = false;
    for (int i = 0; i < gw->n; i++)
        if (gw->replicas[i].hung)
            proxy_leave_replica(gw, i);
}

static void send_probe(struct replica *p)
{
    const struct gateway_options *o = &p->gateway->opt;
    struct buf head = {0};
    gateway_own_head(p->gateway, p, p->of_models ? "/v1/models" : o->health_path, NULL, &head);
    const struct upstream_request q = {
        .head = head.p,
        .n_head = head.len,
        /* Probes use a new connection: an old one may work where new ones are refused. */
        .fresh = !p->of_models,
        .answer_s = o->health_timeout_s,
    };
    p->probe_status = 0;
    buf_reset(&p->text);
    p->probe = upstream_start(p->up, &q, &handler, p);
    buf_clear(&head);
    if (!p->probe)
        set_timer(p, o->health_ms);
}

/* After a probe: requests the models if that is due, else schedules the next probe. */
static void schedule_next(struct replica *p)
{
    int64_t now = clock_ns();
    bool due = !p->models_ns || now - p->models_ns > MODELS_S * (int64_t)1000000000;
    p->probe = NULL;
    p->of_models = due && !p->of_models && balancer_replica(p->gateway->balancer, p->index)->in;
    if (p->of_models) {
        p->models_ns = now;
        send_probe(p);
    } else {
        set_timer(p, p->gateway->opt.health_ms);
    }
}

static void on_head(void *user, const struct http_head *h)
{
    ((struct replica *)user)->probe_status = h->status;
}

static void on_data(void *user, const char *data, size_t n)
{
    struct replica *p = user;
    if (p->text.len + n <= MAX_PROBE_BODY) {
        buf_add(&p->text, data, n);
        return;
    }
    upstream_cancel(p->probe);
    if (!p->of_models)
        probe_bad(p, false, "its health reply is over 1 MB");
    schedule_next(p);
}

static void on_end(void *user)
{
    struct replica *p = user;
    bool good = p->probe_status >= 200 && p->probe_status < 300;
    char why[64];
    snprintf(why, sizeof why, "its health check returned status %d", p->probe_status);
    if (p->of_models && good)
        replica_learn_models(p, p->text.p ? p->text.p : "", p->text.len);
    else if (!p->of_models && good)
        probe_good(p);
    else if (!p->of_models)
        probe_bad(p, false, why);
    schedule_next(p);
}

static void on_failed(void *user, enum upstream_failure kind, const char *why)
{
    struct replica *p = user;
    if (kind == UPSTREAM_REFUSED)
        forget_cache(p);
    if (!p->of_models && kind != UPSTREAM_NO_SOCKET)
        probe_bad(p, kind != UPSTREAM_REFUSED, why);
    schedule_next(p);
}

static const struct upstream_handler handler = {on_head, on_data, on_end, on_failed};

static void on_timer(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    struct replica *p = arg;
    if (!p->probe)
        send_probe(p);
}

void replica_start(struct replica *p)
{
    p->timer = evtimer_new(p->gateway->base, on_timer, p);
    if (!p->timer)
        mem_die(event_get_struct_event_size());
    send_probe(p);
}

void replica_probe_now(struct replica *p)
{
    if (!p->probe && !p->gateway->draining)
        set_timer(p, 0);
}

static void forget_models(struct replica *p)
{
    for (int i = 0; i < p->n_models; i++)
        mem_free(p->models[i]);
    mem_free(p->models);
    p->models = NULL;
    p->n_models = 0;
}

void replica_stop(struct replica *p)
{
    upstream_cancel(p->probe);
    p->probe = NULL;
    if (p->timer)
        event_free(p->timer);
    p->timer = NULL;
    forget_models(p);
    buf_clear(&p->text);
}

void replica_answered(struct replica *p, int status)
{
    if (status < 500)
        balancer_answer_good(p->gateway->balancer, p->index);
}

void replica_failed(struct replica *p, enum upstream_failure kind, const char *why)
{
    struct balancer *balancer = p->gateway->balancer;
    if (kind == UPSTREAM_NO_SOCKET)
        return;
    p->n_failures++;
    log_line(LOG_WARN, "replica failed", LOG_TEXT("upstream", p->url.name), LOG_TEXT("why", why));
    if (kind == UPSTREAM_REFUSED) {
        forget_cache(p);
        probe_bad(p, false, why);
    } else if (kind != UPSTREAM_SLOW && balancer_answer_bad(balancer, p->index, clock_ns())) {
        log_out(p, why, false);
    }
    replica_probe_now(p); /* is it slow, or down? */
}

uint64_t replicas_with(const struct gateway *gw, const char *model)
{
    uint64_t all = gw->n == 64 ? ~(uint64_t)0 : ((uint64_t)1 << gw->n) - 1, with = 0;
    for (int i = 0; *model && i < gw->n; i++)
        for (int j = 0; j < gw->replicas[i].n_models; j++)
            if (!strcmp(gw->replicas[i].models[j], model))
                with |= (uint64_t)1 << i;
    return with ? with : all;
}

void replica_learn_models(struct replica *p, const char *json, size_t n)
{
    struct error err;
    if (!json_guard(json, n, &json_limits_request, NULL, &err))
        return;
    json_t *v = json_loadb(json, n, 0, NULL), *list = json_object_get(v, "data");
    if (json_is_array(list)) {
        forget_models(p);
        size_t most = json_array_size(list);
        most = most < MAX_MODELS ? most : MAX_MODELS;
        p->models = mem_zalloc(most ? most : 1, sizeof *p->models);
        for (size_t i = 0; i < most; i++) {
            const char *id = json_string_value(json_object_get(json_array_get(list, i), "id"));
            if (id)
                p->models[p->n_models++] = mem_strdup(id);
        }
    }
    json_decref(v);
}
