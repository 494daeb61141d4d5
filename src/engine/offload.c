/* Which experts stay in host memory: see offload.h. */
#include "engine/offload.h"
#include "base/buf.h"
#include "base/mem.h"

#include <regex.h>
#include <stdio.h>
#include <string.h>

/* A pattern as POSIX knows it: \d is a digit. */
static void translate(const char *from, size_t n, struct buf *to)
{
    for (size_t i = 0; i < n; i++) {
        if (from[i] == '\\' && i + 1 < n && from[i + 1] == 'd') {
            buf_adds(to, "[0-9]");
            i++;
        } else {
            buf_add(to, from + i, 1);
        }
    }
}

static bool matches(const regex_t *r, int layer)
{
    static const char *const parts[] = {"gate", "up", "down", "gate_up"};
    char name[64];
    bool found = false;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        snprintf(name, sizeof name, "blk.%d.ffn_%s_exps.weight", layer, parts[i]);
        found |= !regexec(r, name, 0, NULL, 0);
    }
    return found;
}

/* One "REGEX=CPU" of n characters. */
static bool take_pattern(const struct expert_layer *layers, const char *text, size_t n,
                         struct offload *out, struct error *err)
{
    const char *equals = memchr(text, '=', n);
    size_t pattern = equals ? (size_t)(equals - text) : n;
    struct buf posix = {0};
    regex_t r;
    int hits = 0;
    if (!pattern || pattern == n || n - pattern != 4 || strncmp(equals, "=CPU", 4))
        return error_set(err, "-ot %.*s: expected REGEX=CPU; experts are on the GPU or the CPU",
                         (int)n, text);
    translate(text, pattern, &posix);
    bool ok = !regcomp(&r, posix.p, REG_EXTENDED | REG_NOSUB);
    buf_clear(&posix);
    if (!ok)
        return error_set(err, "-ot %.*s: not a regular expression", (int)n, text);
    for (int i = 0; i < out->n_layers; i++)
        if (layers[i].n_expert && matches(&r, layers[i].layer)) {
            out->n_host[i] = layers[i].n_expert;
            hits++;
        }
    regfree(&r);
    return hits || error_set(err,
                             "-ot %.*s: matches no experts of this model (as "
                             "blk.0.ffn_up_exps.weight); only experts can be on the CPU alone",
                             (int)n, text);
}

static bool take_wish(const struct expert_layer *layers, const struct offload_wish *wish,
                      struct offload *out, struct error *err)
{
    for (int i = 0; i < out->n_layers; i++)
        if (wish->layers < 0 || layers[i].layer < wish->layers)
            out->n_host[i] = layers[i].n_expert;
    for (const char *at = wish->tensors; at && *at;) {
        size_t n = strcspn(at, ",");
        if (!take_pattern(layers, at, n, out, err))
            return false;
        at += n + (at[n] == ',');
    }
    return true;
}

/* The first layers, as far as needed. */
static void take_rest(const struct expert_layer *layers, size_t all, size_t room,
                      struct offload *out)
{
    for (int i = 0; i < out->n_layers && all > room; i++) {
        size_t each = layers[i].n_expert ? layers[i].bytes / (size_t)layers[i].n_expert : 0;
        if (!each)
            continue;
        size_t n = (all - room + each - 1) / each;
        n = n < (size_t)layers[i].n_expert ? n : (size_t)layers[i].n_expert;
        out->n_host[i] = (int)n;
        all -= n * each < all ? n * each : all;
    }
}

static size_t expert_bytes(const struct expert_layer *l)
{
    return l->n_expert ? l->bytes / (size_t)l->n_expert : 0;
}

/* As many experts of every layer on the device as fit, and one more of the first layers. False: not one. */
static bool take_even(const struct expert_layer *layers, size_t room, struct offload *out)
{
    size_t one = 0;
    int most = 0;
    for (int i = 0; i < out->n_layers; i++) {
        one += expert_bytes(&layers[i]);
        most = layers[i].n_expert > most ? layers[i].n_expert : most;
    }
    size_t each = one ? room / one : 0, left = one ? room % one : 0;
    if (!each || each >= (size_t)most)
        return false;
    for (int i = 0; i < out->n_layers; i++) {
        size_t bytes = expert_bytes(&layers[i]), n = (size_t)layers[i].n_expert;
        size_t here = each < n ? each : n;
        if (here < n && bytes <= left) {
            here++;
            left -= bytes;
        }
        out->n_host[i] = (int)(n - here);
    }
    return true;
}

static size_t all_on_host(const struct expert_layer *layers, int n_layers)
{
    size_t bytes = 0;
    for (int i = 0; i < n_layers; i++)
        bytes += layers[i].host_bytes ? layers[i].host_bytes : layers[i].bytes;
    return bytes;
}

static void count(const struct expert_layer *layers, struct offload *out)
{
    for (int i = 0; i < out->n_layers; i++) {
        const struct expert_layer *l = &layers[i];
        if (!l->n_expert)
            continue;
        size_t n = (size_t)l->n_expert, host = (size_t)out->n_host[i];
        out->of++;
        out->layers += host > 0;
        out->device += l->bytes / n * (n - host);
        if (host)
            out->host += (l->host_bytes ? l->host_bytes : l->bytes) / n * (out->all ? n : host);
    }
}

bool offload_choose(const struct expert_layer *layers, int n_layers,
                    const struct offload_wish *wish, size_t room, size_t host_room,
                    struct offload *out, struct error *err)
{
    size_t all = 0;
    *out = (struct offload){.n_layers = n_layers};
    out->n_host = mem_zalloc((size_t)n_layers + 1, sizeof *out->n_host);
    for (int i = 0; i < n_layers; i++)
        all += layers[i].bytes;
    bool ok = true;
    if (offload_is_wished(wish))
        ok = take_wish(layers, wish, out, err);
    else if (all > room && all_on_host(layers, n_layers) <= host_room &&
             take_even(layers, room, out))
        out->all = true;
    else
        take_rest(layers, all, room, out);
    count(layers, out);
    if (!ok || !out->layers) {
        mem_free(out->n_host);
        out->n_host = NULL;
    }
    return ok;
}

void offload_free(struct offload *o)
{
    mem_free(o->n_host);
    *o = (struct offload){0};
}
