/* See keeper_int.h. */
#include "base/mem.h"
#include "base/siphash.h"
#include "engine/keeper_int.h"
#include "engine/reuse.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Names */

struct chain keep_root(const struct keeper *k, const struct request_spec *spec)
{
    struct buf b = {0};
    struct chain c;
    buf_add(&b, k->shape.model, sizeof k->shape.model);
    for (int i = 0; i < spec->n_loras; i++) {
        buf_add(&b, &spec->loras[i].mark, sizeof spec->loras[i].mark);
        buf_add(&b, &spec->loras[i].scale, sizeof spec->loras[i].scale);
    }
    if (spec->n_loras) /* differs from every salt, which has no NUL */
        buf_addc(&b, 0);
    buf_addf(&b, "%s%s", spec->salt ? "+" : "-", spec->salt ? spec->salt : "");
    c.h[0] = siphash(k->key, b.p, b.len);
    c.h[1] = siphash(k->key + 2, b.p, b.len);
    buf_clear(&b);
    return c;
}

void keep_content(const struct seq *q, int at, int n, uint64_t *out)
{
    for (int i = 0; i < n; i++)
        out[i] = seq_content(q, at + i);
}

struct chain keep_next(const struct keeper *k, struct chain c, uint64_t *room)
{
    memcpy(room, c.h, sizeof c.h);
    size_t n = (2 + (size_t)k->seg_len) * sizeof *room;
    return (struct chain){{siphash(k->key, room, n), siphash(k->key + 2, room, n)}};
}

void keep_name(struct chain c, char kind, char name[PREFIX_NAME_MOST])
{
    snprintf(name, PREFIX_NAME_MOST, "%016llx%016llx.%c", (unsigned long long)c.h[0],
             (unsigned long long)c.h[1], kind);
}

bool keep_has(const struct keeper *k, struct chain c, char kind)
{
    char name[PREFIX_NAME_MOST];
    struct buf path = {0};
    keep_name(c, kind, name);
    buf_addf(&path, "%s/%s", k->folder, name);
    bool there = access(path.p, R_OK) == 0;
    buf_clear(&path);
    return there;
}

void keep_drop(const struct keeper *k, struct chain c, char kind)
{
    char name[PREFIX_NAME_MOST];
    struct buf path = {0};
    keep_name(c, kind, name);
    buf_addf(&path, "%s/%s", k->folder, name);
    unlink(path.p);
    buf_clear(&path);
}

void keep_touch(const struct keeper *k, struct chain c)
{
    for (int i = 0; i < 2; i++) {
        char name[PREFIX_NAME_MOST];
        struct buf path = {0};
        keep_name(c, "ks"[i], name);
        buf_addf(&path, "%s/%s", k->folder, name);
        utimensat(AT_FDCWD, path.p, NULL, AT_SYMLINK_NOFOLLOW);
        buf_clear(&path);
    }
}

struct prefix_shape keep_shape(const struct keeper *k, struct chain parent, char kind)
{
    struct prefix_shape s = k->shape;
    s.page_len = (uint32_t)k->seg_len;
    s.page_bytes = kind == 'k' ? k->seg_bytes : k->shape.state_bytes;
    s.state_bytes = 0;
    memcpy(s.owner, parent.h, sizeof s.owner);
    return s;
}

/* Copies */

void keep_list_pages(const struct keeper *k, const int32_t *pages, int at, int n, char *record,
                     struct copy_list *l)
{
    const struct kvcache *kv = k->e->rt->kv;
    for (int p = 0; p < kv->n_planes; p++) {
        size_t bytes = kv->planes[p].page_bytes;
        for (int i = 0, run; i < n; i += run) {
            for (run = 1; i + run < n && pages[i + run] == pages[i] + run; run++)
                ;
            CHECK(l->n < l->cap, "%d copies", l->n);
            l->v[l->n++] =
                (struct host_copy){kv->planes[p].at + (size_t)pages[i] * bytes,
                                   record + (size_t)(at + i) * bytes, (size_t)run * bytes};
        }
        record += (size_t)k->seg_pages * bytes;
    }
}

void keep_copy_in(const struct keeper *k, const struct copy_list *l)
{
    struct backend *be = k->e->rt->kv->be;
    if (be->ops->host)
        be->ops->host->copy_in_list(be, l->v, l->n);
    for (int i = 0; !be->ops->host && i < l->n; i++)
        be->ops->copy_in(be, l->v[i].device, l->v[i].host, l->v[i].bytes);
}

void keep_copy_out(const struct keeper *k, const struct copy_list *l)
{
    struct backend *be = k->e->rt->kv->be;
    for (int i = 0; i < l->n; i++)
        be->ops->copy_out(be, l->v[i].host, l->v[i].device, l->v[i].bytes);
}

void keep_list_state(const struct keeper *k, int32_t slot, char *host, struct copy_list *l)
{
    const struct kvcache *kv = k->e->rt->kv;
    const struct network *net = &k->e->rt->model->net;
    for (int i = 0; i < net->n_layers; i++) {
        size_t len = layer_state_len(&net->layers[i]);
        if (len)
            l->v[l->n++] = (struct host_copy){kv->layers[i].state + (size_t)slot * len, host,
                                              len * sizeof(float)};
        host += len * sizeof(float);
    }
}

struct copy_list keep_list_new(const struct keeper *k)
{
    const struct kvcache *kv = k->e->rt->kv;
    int cap = k->seg_pages * kv->n_planes + k->e->rt->model->net.n_layers;
    return (struct copy_list){mem_zalloc((size_t)cap, sizeof(struct host_copy)), 0, cap};
}
