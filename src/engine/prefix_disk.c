/* See prefix_disk.h. */
#include "engine/prefix_disk.h"
#include "backend/backend.h"
#include "base/cpu.h"
#include "base/mem.h"
#include "base/os.h"
#include "engine/engine_int.h"
#include "engine/prefix_file.h"
#include "model/eagle.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#define GIGABYTE ((uint64_t)1 << 30)

/* A piece of work on the engine's thread. */
struct disk_piece {
    struct engine *e;
    uint64_t root;
    struct prefix_ids ids; /* of the prompt */
    int from, count;       /* pages */
    int at;                /* tokens before a state, or before the end */
    char *bytes;           /* (count, page_bytes); at an end: the tail page, then the state */
    bool ok;               /* false: the pages are not in the cache, or there is no room for them */
};

/* Copies */

enum direction { COPY_OUT, COPY_IN };

static void copy(struct kvcache *kv, enum direction way, void *at, char *host, size_t bytes)
{
    if (way == COPY_OUT)
        kv->be->ops->copy_out(kv->be, host, at, bytes);
    else
        kv->be->ops->copy_in(kv->be, at, host, bytes);
}

static void copy_page(struct kvcache *kv, enum direction way, int32_t page, char *host)
{
    for (int i = 0; i < kv->n_planes; i++) {
        size_t bytes = kv->planes[i].page_bytes;
        copy(kv, way, kv->planes[i].at + (size_t)page * bytes, host, bytes);
        host += bytes;
    }
}

static void copy_state(struct engine *e, enum direction way, int32_t slot, char *host)
{
    struct kvcache *kv = e->rt->kv;
    const struct network *net = &e->rt->model->net;
    for (int i = 0; i < net->n_layers; i++) {
        size_t len = layer_state_len(&net->layers[i]);
        if (len)
            copy(kv, way, kv->layers[i].state + (size_t)slot * len, host, len * sizeof(float));
        host += len * sizeof(float);
    }
}

/* Saving */

static void add_place(struct prefix_ids *ids, int at)
{
    if (ids->n_states == PREFIX_STATES_MOST) /* keeps the last ones */
        memmove(ids->places, ids->places + 1, (size_t)--ids->n_states * sizeof *ids->places);
    ids->places[ids->n_states++] = (uint64_t)at;
}

/* Shortens the prompt to its longest cached prefix. For a model with states that prefix ends at a kept state. */
static void measure(void *arg)
{
    struct disk_piece *p = arg;
    const struct kvcache *kv = p->e->rt->kv;
    struct prefix_ids *ids = &p->ids;
    uint64_t chain = p->root;
    int at = 0, best = 0, n_tail, len = kv->page_len;
    for (;; at += len) {
        int left = ids->n_tokens - at;
        const uint64_t *content = ids->content + at;
        int32_t tail = prefix_find_tail(kv->prefix, chain, content, left, &n_tail);
        int32_t page = left >= len ? prefix_find(kv->prefix, chain, content) : -1;
        if (page < 0) {
            if (tail >= 0 && (!kv->states || states_of(kv->states, tail) >= 0)) {
                best = at + n_tail;
                add_place(ids, best);
            }
            break;
        }
        chain = prefix_serial(kv->prefix, page);
        if (!kv->states || states_of(kv->states, page) >= 0) {
            best = at + len;
            add_place(ids, best);
        }
    }
    if (!kv->states)
        ids->n_states = 0;
    ids->n_tokens = best;
    p->ok = true;
}

/* The chain after the first n_pages pages of the prompt. */
static bool find_chain(const struct disk_piece *p, int n_pages, uint64_t *chain)
{
    const struct kvcache *kv = p->e->rt->kv;
    *chain = p->root;
    for (int i = 0; i < n_pages; i++) {
        int32_t page =
            prefix_find(kv->prefix, *chain, p->ids.content + (size_t)i * (size_t)kv->page_len);
        if (page < 0)
            return false;
        *chain = prefix_serial(kv->prefix, page);
    }
    return true;
}

static void read_pages(void *arg)
{
    struct disk_piece *p = arg;
    struct kvcache *kv = p->e->rt->kv;
    uint64_t chain;
    p->ok = find_chain(p, p->from, &chain);
    for (int i = 0; p->ok && i < p->count; i++) {
        int32_t page = prefix_find(kv->prefix, chain,
                                   p->ids.content + (size_t)(p->from + i) * (size_t)kv->page_len);
        p->ok = page >= 0;
        if (!p->ok)
            return;
        copy_page(kv, COPY_OUT, page, p->bytes + (size_t)i * kv->page_bytes);
        chain = prefix_serial(kv->prefix, page);
    }
}

/* The last page if it is not full, and the state after it. */
static void read_end(void *arg)
{
    struct disk_piece *p = arg;
    struct kvcache *kv = p->e->rt->kv;
    int len = kv->page_len, rest = p->at % len, n_tail = 0, full = p->at / len;
    const uint64_t *content = p->ids.content + p->at - rest;
    uint64_t chain;
    char *to = p->bytes;
    p->ok = find_chain(p, rest ? full : full - 1, &chain);
    if (!p->ok)
        return;
    int32_t page = rest ? prefix_find_tail(kv->prefix, chain, content, rest, &n_tail)
                        : prefix_find(kv->prefix, chain, content - len);
    p->ok = page >= 0 && n_tail == rest && (!kv->states || states_of(kv->states, page) >= 0);
    if (!p->ok)
        return;
    if (rest) {
        copy_page(kv, COPY_OUT, page, to);
        to += kv->page_bytes;
    }
    if (kv->states)
        copy_state(p->e, COPY_OUT, states_of(kv->states, page), to);
}

/* Restoring */

/* Attaches the pages that are restored already, so that they stay in order of use and are found. */
static bool attach(const struct disk_piece *p, int n_pages, struct kv_seq *s, uint64_t *chain)
{
    struct kvcache *kv = p->e->rt->kv;
    *chain = p->root;
    for (int i = 0; i < n_pages; i++) {
        int32_t page =
            prefix_find(kv->prefix, *chain, p->ids.content + (size_t)i * (size_t)kv->page_len);
        if (page < 0)
            return false;
        kvcache_attach(kv, s, page, kv->page_len);
        *chain = prefix_serial(kv->prefix, page);
    }
    if (!kv->states)
        return true;
    s->state = s->from = states_take(kv->states) + 1; /* its content comes with the last piece */
    return s->state > 0;
}

static void write_pages(void *arg)
{
    struct disk_piece *p = arg;
    struct kvcache *kv = p->e->rt->kv;
    int len = kv->page_len;
    struct kv_seq s = {0};
    uint64_t chain;
    p->ok = attach(p, p->from, &s, &chain) && kvcache_grow(kv, &s, (p->from + p->count) * len);
    if (p->ok)
        kvcache_advance(kv, &s, p->count * len);
    for (int i = p->from; p->ok && i < p->from + p->count; i++) {
        const uint64_t *content = p->ids.content + (size_t)i * (size_t)len;
        int32_t known = prefix_find(kv->prefix, chain, content);
        if (known >= 0) {
            kvcache_replace(kv, &s, i, known);
            chain = prefix_serial(kv->prefix, known);
        } else {
            copy_page(kv, COPY_IN, s.pages[i], p->bytes + (size_t)(i - p->from) * kv->page_bytes);
            chain = prefix_add(kv->prefix, chain, content, s.pages[i]);
        }
    }
    kvcache_release(kv, &s);
}

static void write_end(void *arg)
{
    struct disk_piece *p = arg;
    struct kvcache *kv = p->e->rt->kv;
    int len = kv->page_len, rest = p->at % len, full = p->at / len;
    struct kv_seq s = {0};
    uint64_t chain;
    char *from = p->bytes;
    p->ok = attach(p, full, &s, &chain) && (!rest || kvcache_grow(kv, &s, p->at));
    if (p->ok && rest) {
        copy_page(kv, COPY_IN, s.pages[full], from);
        from += kv->page_bytes;
        kvcache_advance(kv, &s, rest);
        prefix_add_tail(kv->prefix, chain, p->ids.content + p->at - rest, rest, s.pages[full]);
    }
    if (p->ok && kv->states) {
        copy_state(p->e, COPY_IN, s.state - 1, from);
        kvcache_retire(kv, &s);
    }
    kvcache_release(kv, &s);
}

/* Files */

static uint64_t hash_tensor(uint64_t h, const struct tensorfile *f, const struct tensor *t)
{
    enum { SAMPLES = 4, SAMPLE = 64 };
    uint8_t b[SAMPLE];
    h = prefix_checksum(h, t->name, strlen(t->name));
    h = prefix_checksum(h, &t->type, sizeof t->type);
    h = prefix_checksum(h, t->dims, sizeof t->dims);
    for (size_t i = 0; t->data && i < SAMPLES; i++) {
        size_t n = t->bytes < SAMPLE ? t->bytes : SAMPLE;
        const uint8_t *p = tensorfile_read(f, t->data + (t->bytes - n) / (SAMPLES - 1) * i, n, b);
        h = p ? prefix_checksum(h, p, n) : h;
    }
    return h;
}

static uint64_t hash_file(uint64_t h, const struct tensorfile *f)
{
    for (int i = 0; f && i < f->n_shards; i++) {
        struct stat st;
        bool dated = f->shards[i].fd >= 0 && !fstat(f->shards[i].fd, &st);
        struct timespec time = dated ? os_file_time(&st) : (struct timespec){0};
        int64_t date[2] = {time.tv_sec, time.tv_nsec};
        h = prefix_checksum(h, &f->shards[i].bytes, sizeof f->shards[i].bytes);
        h = prefix_checksum(h, date, sizeof date);
    }
    for (size_t i = 0; f && i < f->n_tensors; i++)
        h = hash_tensor(h, f, &f->tensors[i]);
    return h;
}

/* Everything that determines a page's content: the files (sizes, dates, samples of all tensors), the device, the layers,
 * their rotation, the cache's types and the limit of images. */
static void fill_shape(const struct engine *e, const char *salt, struct prefix_shape *out)
{
    const struct kvcache *kv = e->rt->kv;
    const struct network *net = &e->rt->model->net;
    memset(out, 0, sizeof *out);
    uint64_t h = prefix_checksum(0, kv->be->ops->name, strlen(kv->be->ops->name));
    h = hash_file(h, e->rt->file);
    h = hash_file(h, e->rt->mmproj); /* rows of images */
    h = hash_file(h, e->rt->eagle ? e->rt->eagle->file : NULL);
    enum isa isa;
    int facts[] = {kv->k_type,
                   kv->v_type,
                   kv->page_len,
                   kv->n_planes,
                   net->n_layers,
                   kv->be->deterministic,
                   e->opt.runtime.image_features,
                   isa_choose(&isa, NULL) ? (int)isa : -1};
    h = prefix_checksum(h, facts, sizeof facts);
    for (int i = 0; i < kv->n_planes; i++)
        h = prefix_checksum(h, &kv->planes[i].page_bytes, sizeof kv->planes[i].page_bytes);
    for (int i = 0; i < net->n_ropes; i++) {
        const struct rope *r = &net->ropes[i];
        h = prefix_checksum(h, r->freq, (size_t)(r->n_rot / 2) * sizeof *r->freq);
        h = prefix_checksum(h, &r->mscale, sizeof r->mscale);
    }
    out->model[0] = h;
    out->model[1] = prefix_checksum(~h, &h, sizeof h);
    out->page_bytes = kv->page_bytes;
    out->page_len = (uint32_t)kv->page_len;
    out->state_bytes = kv->states ? kvcache_state_bytes(net) : 0;
    for (uint64_t i = 0; salt && i < 2; i++)
        out->owner[i] = prefix_checksum(i + 1, salt, strlen(salt));
}

void prefix_disk_shape(const struct engine *e, struct prefix_shape *out)
{
    fill_shape(e, NULL, out);
}

const char *prefix_disk_refuses(const struct engine *e)
{
    if (e->rt->shard.cut || e->rt->be->comm)
        return "the model is spread over several processes";
    return e->opt.no_prefix_cache ? "there is no prefix cache (--no-prefix-cache)" : NULL;
}

/* Runs a piece of work between steps. */
static bool run(struct disk_piece *p, void (*fn)(void *arg), const char *why, struct error *err)
{
    p->ok = false;
    if (!engine_call(p->e, fn, p))
        return error_set(err, "the engine is closing or has failed");
    return p->ok || error_set(err, "%s", why);
}

static int pages_a_piece(const struct kvcache *kv)
{
    size_t n = PREFIX_DISK_PIECE / kv->page_bytes;
    return n > 0 ? (int)n : 1;
}

/* Memory for a piece, or for the end; NULL with an error. */
static char *piece_memory(const struct prefix_shape *shape, int pages, struct error *err)
{
    size_t bytes = (size_t)shape->page_bytes * (size_t)pages;
    size_t end = (size_t)(shape->page_bytes + shape->state_bytes);
    char *p = mem_ask(bytes > end ? bytes : end);
    if (!p)
        error_set(err, "out of memory");
    return p;
}

/* Where the ends are: the states, or the last page if it is not full. Returns their number. */
static int find_ends(const struct prefix_ids *ids, int page_len, int ends[PREFIX_STATES_MOST])
{
    for (int i = 0; i < ids->n_states; i++)
        ends[i] = (int)ids->places[i];
    ends[0] = ids->n_states ? ends[0] : ids->n_tokens;
    return ids->n_states ? ids->n_states : ids->n_tokens % page_len != 0;
}

static bool save_records(struct disk_piece *p, const struct prefix_shape *shape,
                         struct prefix_writer *w, struct error *err)
{
    static const char gone[] = "the pages have left the cache meanwhile";
    const struct kvcache *kv = p->e->rt->kv;
    int most = pages_a_piece(kv), full = p->ids.n_tokens / kv->page_len,
        ends[PREFIX_STATES_MOST] = {0};
    int n_ends = find_ends(&p->ids, kv->page_len, ends);
    bool ok = true;
    for (p->from = 0; ok && p->from < full; p->from += p->count) {
        p->count = full - p->from < most ? full - p->from : most;
        ok = run(p, read_pages, gone, err);
        for (int i = 0; ok && i < p->count; i++)
            ok = prefix_writer_add(w, p->bytes + (size_t)i * kv->page_bytes, err);
    }
    bool tail = p->ids.n_tokens % kv->page_len;
    p->at = p->ids.n_tokens;
    ok = ok && (!tail || (run(p, read_end, gone, err) && prefix_writer_add(w, p->bytes, err)));
    for (int i = 0; ok && shape->state_bytes && i < n_ends; i++) {
        p->at = ends[i];
        ok = run(p, read_end, gone, err) &&
             prefix_writer_add(w, p->bytes + (p->at % kv->page_len ? kv->page_bytes : 0), err);
    }
    return ok;
}

/* Clients may not fill the disk: 1 GB of it stays free, or a tenth of a small one. */
static bool has_disk(const struct disk_piece *p, const struct prefix_disk *d,
                     const struct prefix_shape *shape, struct error *err)
{
    const struct kvcache *kv = p->e->rt->kv;
    struct statvfs st;
    uint64_t pages = (uint64_t)(p->ids.n_tokens / kv->page_len) + 1 + PREFIX_STATES_MOST;
    uint64_t need = pages * kv->page_bytes + PREFIX_STATES_MOST * shape->state_bytes;
    if (statvfs(d->dir, &st))
        return error_set(err, "%s: %s", d->dir, strerror(errno));
    uint64_t left = (uint64_t)st.f_bavail * st.f_frsize;
    uint64_t keep = (uint64_t)st.f_blocks * st.f_frsize / 10;
    keep = keep < GIGABYTE ? keep : GIGABYTE;
    return (left >= keep && need <= left - keep) ||
           error_set(err,
                     "it takes %llu MB, the disk has %llu MB left, and %llu MB of it stay free",
                     (unsigned long long)(need >> 20), (unsigned long long)(left >> 20),
                     (unsigned long long)(keep >> 20));
}

bool prefix_disk_save(struct engine *e, const struct prefix_disk *d, const int32_t *tokens, int n,
                      int *n_saved, uint64_t *bytes, struct error *err)
{
    struct prefix_shape shape;
    struct disk_piece p = {.e = e, .ids = {.n_tokens = n}};
    fill_shape(e, d->salt, &shape);
    p.root = prefix_root(e->rt->kv->prefix, d->salt, d->salt ? strlen(d->salt) : 0);
    uint64_t *content = mem_ask(((size_t)n + 1) * sizeof *content);
    p.bytes = piece_memory(&shape, pages_a_piece(e->rt->kv), err);
    bool ok = p.bytes && content;
    if (!content)
        error_set(err, "out of memory");
    for (int i = 0; ok && i < n; i++)
        content[i] = prefix_text(tokens[i], 0);
    p.ids.content = content;
    ok = ok && run(&p, measure, "", err);
    if (ok && !p.ids.n_tokens)
        ok = error_set(err, "nothing of its prompt is in the cache");
    ok = ok && has_disk(&p, d, &shape, err);
    struct prefix_writer *w = ok ? prefix_writer_open(d->dir, d->name, &shape, &p.ids, err) : NULL;
    ok = w && save_records(&p, &shape, w, err) && prefix_writer_finish(w, bytes, err);
    *n_saved = p.ids.n_tokens;
    prefix_writer_free(w);
    mem_free(content);
    mem_free(p.bytes);
    return ok;
}

static bool restore_records(struct disk_piece *p, struct prefix_reader *r, struct error *err)
{
    static const char no_room[] = "the cache has no room for the saved pages";
    const struct kvcache *kv = p->e->rt->kv;
    int most = pages_a_piece(kv), full = p->ids.n_tokens / kv->page_len,
        ends[PREFIX_STATES_MOST] = {0};
    int n_ends = find_ends(&p->ids, kv->page_len, ends);
    int states = full + (p->ids.n_tokens % kv->page_len != 0); /* record of the first state */
    bool ok = true;
    for (p->from = 0; ok && p->from < full; p->from += p->count) {
        p->count = full - p->from < most ? full - p->from : most;
        for (int i = 0; ok && i < p->count; i++)
            ok = prefix_reader_record(r, p->from + i, p->bytes + (size_t)i * kv->page_bytes, err);
        ok = ok && run(p, write_pages, no_room, err);
    }
    for (int i = 0; ok && i < n_ends; i++) {
        bool tail = ends[i] % kv->page_len;
        p->at = ends[i];
        ok = (!tail || prefix_reader_record(r, full, p->bytes, err)) &&
             (!kv->states ||
              prefix_reader_record(r, states + i, p->bytes + (tail ? kv->page_bytes : 0), err)) &&
             run(p, write_end, no_room, err);
    }
    return ok;
}

bool prefix_disk_restore(struct engine *e, const struct prefix_disk *d, int32_t **tokens, int *n,
                         uint64_t *bytes, struct error *err)
{
    struct prefix_shape shape;
    struct disk_piece p = {.e = e};
    int n_vocab = e->rt->model->config.n_vocab;
    fill_shape(e, d->salt, &shape);
    struct prefix_reader *r = prefix_reader_open(d->dir, d->name, &shape, e->context, err);
    if (!r)
        return false;
    p.root = prefix_root(e->rt->kv->prefix, d->salt, d->salt ? strlen(d->salt) : 0);
    p.ids = *prefix_reader_ids(r);
    p.bytes = piece_memory(&shape, pages_a_piece(e->rt->kv), err);
    *n = p.ids.n_tokens;
    *bytes = prefix_reader_bytes(r);
    *tokens = mem_ask((size_t)*n * sizeof **tokens);
    bool ok = p.bytes && *tokens;
    if (!*tokens)
        error_set(err, "out of memory");
    for (int i = 0; ok && i < *n; i++) {
        if (p.ids.content[i] >= (uint64_t)n_vocab)
            ok = error_set(err, "token %d of the file is not in the vocabulary", i);
        else
            (*tokens)[i] = (int32_t)p.ids.content[i];
    }
    ok = ok && restore_records(&p, r, err);
    if (!ok) {
        mem_free(*tokens);
        *tokens = NULL;
    }
    prefix_reader_free(r);
    mem_free(p.bytes);
    return ok;
}
