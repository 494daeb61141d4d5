/* See keeper.h. */
#include "engine/keeper.h"
#include "backend/backend.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/os.h"
#include "base/siphash.h"
#include "engine/engine_int.h"
#include "engine/keep_folder.h"
#include "engine/prefix_disk.h"
#include "engine/prefix_file.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    SEGMENT_TOKENS = 256,
    LEAST_SEGMENTS = 2, /* computing a shorter prefix is fast enough */
    SAVES_MOST = 64,    /* waiting; the oldest is forgotten */
    READ_THREADS = 4,
    RING = READ_THREADS + 2,
    RING_BYTES = 256 << 20, /* most memory while segments are read */
    PAUSE_S = 60,           /* after a failure to write */
};
static const double WRITE_RATE = 512e6, FIRST_READ_RATE = 1e9; /* bytes a second */

/* The name of the prefix that ends with a segment. */
struct chain {
    uint64_t h[2];
};

struct save_job {
    struct save_job *next;
    int32_t *tokens; /* (n) owned */
    int n;
    uint64_t root;      /* in the memory's index */
    struct chain chain; /* on disk */
};

struct read_job {
    struct read_job *next;
    struct choice *choice; /* the scheduler does not have it */
    int first, end;        /* segments to read */
    int restored;          /* tokens */
};

struct keeper {
    struct engine *e;
    char *dir, *folder;
    uint64_t key[4];
    uint64_t most;
    struct prefix_shape shape; /* of pages; owner is set for each file */
    int seg_len, seg_pages;
    size_t seg_bytes;
    pthread_t writer, reader;
    bool has_writer, has_reader;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* under lock */
    bool quit, writing;
    struct save_job *saves, **saves_end;
    int n_saves;
    struct read_job *reads, **reads_end, *done;
    double read_rate; /* measured, bytes a second */
    uint64_t n_written, n_read, n_damaged, restored;
    /* the writer's */
    uint64_t folder_bytes;
    int64_t pause_until;
    /* on the engine's thread, in the reader's calls */
    struct kv_seq seq; /* holds what is being restored */
};

/* The engines of a process write one at a time. */
static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;

/* Names */

/* The empty prefix of a request's model, adapters and client. */
static struct chain chain_root(const struct keeper *k, const struct request_spec *spec)
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

static void content_of(const int32_t *tokens, int n, uint64_t *out)
{
    for (int i = 0; i < n; i++)
        out[i] = prefix_text(tokens[i], 0);
}

/* The chain after the next segment, whose content ids are `content` (seg_len) after room for the chain. */
static struct chain chain_next(const struct keeper *k, struct chain c, uint64_t *room)
{
    memcpy(room, c.h, sizeof c.h);
    size_t n = (2 + (size_t)k->seg_len) * sizeof *room;
    return (struct chain){{siphash(k->key, room, n), siphash(k->key + 2, room, n)}};
}

static void segment_name(struct chain c, char kind, char name[PREFIX_NAME_MOST])
{
    snprintf(name, PREFIX_NAME_MOST, "%016llx%016llx.%c", (unsigned long long)c.h[0],
             (unsigned long long)c.h[1], kind);
}

static bool has_segment(const struct keeper *k, struct chain c, char kind)
{
    char name[PREFIX_NAME_MOST];
    struct buf path = {0};
    segment_name(c, kind, name);
    buf_addf(&path, "%s/%s", k->folder, name);
    bool there = access(path.p, R_OK) == 0;
    buf_clear(&path);
    return there;
}

static void drop_segment(const struct keeper *k, struct chain c, char kind)
{
    char name[PREFIX_NAME_MOST];
    struct buf path = {0};
    segment_name(c, kind, name);
    buf_addf(&path, "%s/%s", k->folder, name);
    unlink(path.p);
    buf_clear(&path);
}

/* Marks it as used now. */
static void touch_segment(const struct keeper *k, struct chain c)
{
    for (int i = 0; i < 2; i++) {
        char name[PREFIX_NAME_MOST];
        struct buf path = {0};
        segment_name(c, "ks"[i], name);
        buf_addf(&path, "%s/%s", k->folder, name);
        utimensat(AT_FDCWD, path.p, NULL, AT_SYMLINK_NOFOLLOW);
        buf_clear(&path);
    }
}

/* The file of a segment's pages ('k') or of the state at its end ('s'), after `parent`: one record. */
static struct prefix_shape shape_of(const struct keeper *k, struct chain parent, char kind)
{
    struct prefix_shape s = k->shape;
    s.page_len = (uint32_t)k->seg_len;
    s.page_bytes = kind == 'k' ? k->seg_bytes : k->shape.state_bytes;
    s.state_bytes = 0;
    memcpy(s.owner, parent.h, sizeof s.owner);
    return s;
}

/* Copies */

struct copy_list {
    struct host_copy *v; /* (n of cap) */
    int n, cap;
};

/* The parts of a segment's record that are pages [at, at + n) of the segment: plane by plane, adjacent pages together. */
static void list_pages(const struct keeper *k, const int32_t *pages, int at, int n, char *record,
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

static void copy_in(const struct keeper *k, const struct copy_list *l)
{
    struct backend *be = k->e->rt->kv->be;
    if (be->ops->host)
        be->ops->host->copy_in_list(be, l->v, l->n);
    for (int i = 0; !be->ops->host && i < l->n; i++)
        be->ops->copy_in(be, l->v[i].device, l->v[i].host, l->v[i].bytes);
}

static void copy_out(const struct keeper *k, const struct copy_list *l)
{
    struct backend *be = k->e->rt->kv->be;
    for (int i = 0; i < l->n; i++)
        be->ops->copy_out(be, l->v[i].host, l->v[i].device, l->v[i].bytes);
}

static void list_state(const struct keeper *k, int32_t slot, char *host, struct copy_list *l)
{
    const struct kvcache *kv = k->e->rt->kv;
    const struct network *net = &k->e->rt->model->net;
    for (int i = 0; i < net->n_layers; i++) {
        size_t len = mixer_state_len(&net->layers[i].mixer);
        if (len)
            l->v[l->n++] = (struct host_copy){kv->layers[i].state + (size_t)slot * len, host,
                                              len * sizeof(float)};
        host += len * sizeof(float);
    }
}

static struct copy_list list_new(const struct keeper *k)
{
    const struct kvcache *kv = k->e->rt->kv;
    int cap = k->seg_pages * kv->n_planes + k->e->rt->model->net.n_layers;
    return (struct copy_list){mem_zalloc((size_t)cap, sizeof(struct host_copy)), 0, cap};
}

/* Writing */

struct out_piece {
    struct keeper *k;
    const uint64_t *content; /* of the segment */
    uint64_t chain;          /* serial of the page before, in the memory's index */
    int from, count;         /* pages of the segment */
    char *record, *state;    /* record NULL: the pages are only passed */
    bool ok, has_state;
    struct copy_list list;
};

static void pass_pages(void *arg)
{
    struct out_piece *p = arg;
    struct kvcache *kv = p->k->e->rt->kv;
    int32_t pages[SEGMENT_TOKENS];
    p->list.n = 0;
    p->ok = p->has_state = false;
    for (int i = 0; i < p->count; i++) {
        pages[i] = prefix_find(kv->prefix, p->chain,
                               p->content + (size_t)(p->from + i) * (size_t)kv->page_len);
        if (pages[i] < 0)
            return;
        p->chain = prefix_serial(kv->prefix, pages[i]);
    }
    if (p->record)
        list_pages(p->k, pages, p->from, p->count, p->record, &p->list);
    int32_t slot = kv->states && p->from + p->count == p->k->seg_pages
                       ? states_of(kv->states, pages[p->count - 1])
                       : -1;
    if (slot >= 0 && p->state) {
        list_state(p->k, slot, p->state, &p->list);
        p->has_state = true;
    }
    copy_out(p->k, &p->list);
    p->ok = !kv->be->failure;
}

/* Passes the pages of a segment, and copies them if record is not NULL. */
static bool pass_segment(struct out_piece *p)
{
    const struct keeper *k = p->k;
    int most = k->seg_pages;
    size_t page = k->e->rt->kv->page_bytes;
    if (p->record && k->seg_bytes > PREFIX_DISK_PIECE)
        most = (int)(PREFIX_DISK_PIECE / page) > 0 ? (int)(PREFIX_DISK_PIECE / page) : 1;
    for (p->from = 0; p->from < k->seg_pages; p->from += p->count) {
        p->count = k->seg_pages - p->from < most ? k->seg_pages - p->from : most;
        if (!engine_call(k->e, pass_pages, p) || !p->ok)
            return false;
    }
    return true;
}

static bool write_file(struct keeper *k, struct chain parent, struct chain own, char kind,
                       const uint64_t *content, const void *record, struct error *err)
{
    struct prefix_shape shape = shape_of(k, parent, kind);
    struct prefix_ids ids = {.content = content, .n_tokens = k->seg_len};
    char name[PREFIX_NAME_MOST];
    uint64_t bytes = 0;
    segment_name(own, kind, name);
    struct prefix_writer *w = prefix_writer_open(k->folder, name, &shape, &ids, err);
    bool ok = w && prefix_writer_add(w, record, err) && prefix_writer_name(w, &bytes, err);
    prefix_writer_free(w);
    pthread_mutex_lock(&k->lock);
    k->n_written += bytes;
    pthread_mutex_unlock(&k->lock);
    k->folder_bytes += bytes;
    return ok;
}

/* Waits as long as writing `bytes` takes at WRITE_RATE. False: the keeper ends. */
static bool pace(struct keeper *k, uint64_t bytes)
{
    int64_t until = clock_ns() + (int64_t)((double)bytes / WRITE_RATE * 1e9);
    struct timespec end = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};
    pthread_mutex_lock(&k->lock);
    while (!k->quit && pthread_cond_clockwait(&k->changed, &k->lock, CLOCK_MONOTONIC, &end) == 0)
        ;
    bool quit = k->quit;
    pthread_mutex_unlock(&k->lock);
    return !quit;
}

/* Writes those segments of a job that are not on disk yet, as long as their pages are in memory. */
static bool save(struct keeper *k, const struct save_job *j, struct error *err)
{
    int n = j->n / k->seg_len, done = 0;
    struct chain *chains = mem_zalloc((size_t)n + 1, sizeof *chains);
    uint64_t *room = mem_zalloc(2 + (size_t)k->seg_len, sizeof *room), *content = room + 2;
    struct out_piece p = {.k = k, .content = content, .chain = j->root, .list = list_new(k)};
    char *record = mem_ask(k->seg_bytes), *state = mem_ask(k->shape.state_bytes + 1);
    bool ok = record && state;
    chains[0] = j->chain;
    for (int i = 0; ok && i < n; i++, done++) {
        content_of(j->tokens + (size_t)i * (size_t)k->seg_len, k->seg_len, content);
        chains[i + 1] = chain_next(k, chains[i], room);
        bool pages = has_segment(k, chains[i + 1], 'k');
        bool states = !k->shape.state_bytes || has_segment(k, chains[i + 1], 's');
        p.record = pages ? NULL : record;
        p.state = states ? NULL : state;
        if (!pass_segment(&p))
            break;
        if (!pages)
            ok = write_file(k, chains[i], chains[i + 1], 'k', content, record, err) &&
                 pace(k, k->seg_bytes);
        if (ok && p.has_state)
            ok = write_file(k, chains[i], chains[i + 1], 's', content, state, err) &&
                 pace(k, k->shape.state_bytes);
    }
    for (int i = done; i > 0; i--) /* touched from the end, so that the beginning is evicted last */
        touch_segment(k, chains[i]);
    mem_free(chains);
    mem_free(room);
    mem_free(record);
    mem_free(state);
    mem_free(p.list.v);
    return ok || !err->msg[0];
}

static void save_free(struct save_job *j)
{
    if (!j)
        return;
    mem_free(j->tokens);
    mem_free(j);
}

static void run_save(struct keeper *k, const struct save_job *j)
{
    struct error err = {0};
    if (clock_ns() < k->pause_until)
        return;
    pthread_mutex_lock(&writing);
    bool ok = save(k, j, &err);
    if (!ok || k->folder_bytes > k->most)
        k->folder_bytes = keep_folder_trim(k->dir, k->most - k->most / 8);
    pthread_mutex_unlock(&writing);
    if (!ok) {
        k->pause_until = clock_ns() + (int64_t)PAUSE_S * 1000000000;
        fprintf(stderr, "steel: prefixes are not written to %s for %d s: %s\n", k->dir, PAUSE_S,
                err.msg);
    }
}

static void *writer_main(void *arg)
{
    struct keeper *k = arg;
    os_name_thread("steel-keep-out");
    pthread_mutex_lock(&writing);
    k->folder_bytes = keep_folder_trim(k->dir, k->most);
    pthread_mutex_unlock(&writing);
    pthread_mutex_lock(&k->lock);
    while (!k->quit) {
        struct save_job *j = k->saves;
        if (!j) {
            pthread_cond_wait(&k->changed, &k->lock);
            continue;
        }
        k->saves = j->next;
        if (!k->saves)
            k->saves_end = &k->saves;
        k->n_saves--;
        k->writing = true;
        pthread_mutex_unlock(&k->lock);
        run_save(k, j);
        save_free(j);
        pthread_mutex_lock(&k->lock);
        k->writing = false;
        pthread_cond_broadcast(&k->changed);
    }
    pthread_mutex_unlock(&k->lock);
    return NULL;
}

void keeper_save(struct keeper *k, const struct choice *c, int n)
{
    if (!k || n < LEAST_SEGMENTS * k->seg_len || c->seq.rows)
        return;
    struct save_job *j = mem_zalloc(1, sizeof *j);
    *j = (struct save_job){.n = n,
                           .root = c->seq.root,
                           .chain = chain_root(k, &c->req->spec),
                           .tokens = mem_alloc((size_t)n * sizeof *j->tokens)};
    memcpy(j->tokens, c->seq.tokens, (size_t)n * sizeof *j->tokens);
    struct save_job *old = NULL;
    pthread_mutex_lock(&k->lock);
    *k->saves_end = j;
    k->saves_end = &j->next;
    if (++k->n_saves > SAVES_MOST) {
        old = k->saves;
        k->saves = old->next;
        k->n_saves--;
    }
    pthread_cond_broadcast(&k->changed);
    pthread_mutex_unlock(&k->lock);
    save_free(old);
}

void keeper_flush(struct keeper *k, int ms)
{
    if (!k)
        return;
    int64_t until = clock_ns() + (int64_t)ms * 1000000;
    struct timespec end = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};
    pthread_mutex_lock(&k->lock);
    while ((k->saves || k->writing) && !k->quit &&
           pthread_cond_clockwait(&k->changed, &k->lock, CLOCK_MONOTONIC, &end) == 0)
        ;
    pthread_mutex_unlock(&k->lock);
}

/* Reading */

/* The number of tokens of c's prompt after which it can continue from memory. */
static int in_memory(const struct keeper *k, const struct choice *c, uint64_t *content)
{
    const struct kvcache *kv = k->e->rt->kv;
    int at = 0, best = 0, len = kv->page_len;
    uint64_t chain = c->seq.root;
    while (at + len < c->seq.n_tokens) {
        content_of(c->seq.tokens + at, len, content);
        int32_t page = prefix_find(kv->prefix, chain, content);
        if (page < 0)
            break;
        chain = prefix_serial(kv->prefix, page);
        at += len;
        if (!kv->states || states_of(kv->states, page) >= 0)
            best = at;
    }
    return best;
}

/* The number of segments on disk from `first` on after which c can start. */
static int on_disk(const struct keeper *k, const struct choice *c, int first, uint64_t *room)
{
    struct chain at = chain_root(k, &c->req->spec);
    int n = (c->seq.n_tokens - 1) / k->seg_len, best = 0;
    for (int i = 0; i < n; i++) {
        content_of(c->seq.tokens + (size_t)i * (size_t)k->seg_len, k->seg_len, room + 2);
        at = chain_next(k, at, room);
        if (i >= first && !has_segment(k, at, 'k'))
            break;
        if (!k->shape.state_bytes || (i >= first && has_segment(k, at, 's')))
            best = i + 1;
    }
    return best;
}

bool keeper_take(struct keeper *k, struct choice *c)
{
    const struct seq *q = &c->seq;
    if (!k || q->rows || q->no_cache || q->n_tokens - 1 < LEAST_SEGMENTS * k->seg_len)
        return false;
    uint64_t *room = mem_zalloc(2 + (size_t)k->seg_len, sizeof *room);
    int known = in_memory(k, c, room + 2), first = known / k->seg_len;
    int end = (q->n_tokens - 1) / k->seg_len > first ? on_disk(k, c, first, room) : 0;
    mem_free(room);
    int gain = end * k->seg_len - known;
    if (end - first < 1 || gain < k->seg_len ||
        (end - first) * k->seg_pages > kvcache_available(k->e->rt->kv))
        return false;
    pthread_mutex_lock(&k->lock);
    double read_ns = (double)(end - first) * (double)k->seg_bytes / k->read_rate * 1e9;
    double compute_ns = (double)gain * k->e->sched.cost.read_ns; /* 0 = not known yet */
    bool worth = !k->quit && !(compute_ns > 0 && read_ns > compute_ns);
    if (worth) {
        struct read_job *j = mem_zalloc(1, sizeof *j);
        *j = (struct read_job){.choice = c, .first = first, .end = end};
        *k->reads_end = j;
        k->reads_end = &j->next;
        pthread_cond_broadcast(&k->changed);
    }
    pthread_mutex_unlock(&k->lock);
    return worth;
}

/* A job's segments, in a ring: threads read ahead, one takes them in order. */
struct ring {
    struct keeper *k;
    const struct read_job *job;
    struct chain *chains; /* (end + 1) */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int next, taken; /* segments: to be read next, copied into the cache */
    int n_slots;
    bool stop;
    struct slot {
        char *record; /* (seg_bytes) */
        int ready;    /* the segment + 1 that it holds; 0 = none */
        bool ok;
    } slots[RING];
};

/* Reads one file and compares it with the prompt. */
static bool read_file(const struct ring *r, int i, char kind, char *record, struct error *err)
{
    struct keeper *k = r->k;
    struct prefix_shape shape = shape_of(k, r->chains[i], kind);
    const int32_t *tokens = r->job->choice->seq.tokens + (size_t)i * (size_t)k->seg_len;
    char name[PREFIX_NAME_MOST];
    segment_name(r->chains[i + 1], kind, name);
    struct prefix_reader *f = prefix_reader_open_lazily(k->folder, name, &shape, k->seg_len, err);
    bool ok = f != NULL;
    const struct prefix_ids *ids = ok ? prefix_reader_ids(f) : NULL;
    ok = ok && (ids->n_tokens == k->seg_len || error_set(err, "%d tokens", ids->n_tokens));
    for (int t = 0; ok && t < k->seg_len; t++)
        ok = ids->content[t] == prefix_text(tokens[t], 0) || error_set(err, "other tokens");
    ok = ok && prefix_reader_record(f, 0, record, err);
    prefix_reader_free(f);
    if (ok)
        return true;
    struct stat st;
    struct buf path = {0};
    buf_addf(&path, "%s/%s", k->folder, name);
    bool there = stat(path.p, &st) == 0; /* it may have been evicted meanwhile */
    buf_clear(&path);
    if (there) {
        drop_segment(k, r->chains[i + 1], kind);
        pthread_mutex_lock(&k->lock);
        k->n_damaged++;
        pthread_mutex_unlock(&k->lock);
    }
    return false;
}

static void *read_ahead(void *arg)
{
    struct ring *r = arg;
    pthread_mutex_lock(&r->lock);
    while (!r->stop && r->next < r->job->end) {
        if (r->next >= r->taken + r->n_slots) {
            pthread_cond_wait(&r->changed, &r->lock);
            continue;
        }
        int i = r->next++;
        struct slot *s = &r->slots[i % r->n_slots];
        struct error err = {0};
        pthread_mutex_unlock(&r->lock);
        bool ok = read_file(r, i, 'k', s->record, &err);
        pthread_mutex_lock(&r->lock);
        s->ok = ok;
        s->ready = i + 1;
        pthread_cond_broadcast(&r->changed);
    }
    pthread_mutex_unlock(&r->lock);
    return NULL;
}

struct in_piece {
    struct keeper *k;
    const struct read_job *job;
    int segment;
    char *record, *state;
    uint64_t *content; /* (seg_len) */
    bool ok;
    struct copy_list list;
};

/* Holds the pages before the first segment. */
static void begin_reading(void *arg)
{
    struct in_piece *p = arg;
    struct keeper *k = p->k;
    struct kvcache *kv = k->e->rt->kv;
    uint64_t chain = p->job->choice->seq.root;
    p->ok = true;
    for (int i = 0; i < p->job->first * k->seg_pages; i++) {
        content_of(p->job->choice->seq.tokens + (size_t)i * (size_t)kv->page_len, kv->page_len,
                   p->content);
        int32_t page = prefix_find(kv->prefix, chain, p->content);
        p->ok = page >= 0;
        if (!p->ok)
            return;
        kvcache_attach(kv, &k->seq, page, kv->page_len);
        chain = prefix_serial(kv->prefix, page);
    }
    if (kv->states && k->seq.n_pages) {
        k->seq.state = k->seq.from = states_take(kv->states) + 1;
        p->ok = k->seq.state > 0;
    }
}

/* Copies a segment into pages and indexes the new ones. */
static void put_segment(void *arg)
{
    struct in_piece *p = arg;
    struct keeper *k = p->k;
    struct kvcache *kv = k->e->rt->kv;
    struct kv_seq *s = &k->seq;
    int len = kv->page_len, from = p->segment * k->seg_pages;
    const int32_t *tokens = p->job->choice->seq.tokens;
    uint64_t chain =
        from ? prefix_serial(kv->prefix, s->pages[from - 1]) : p->job->choice->seq.root;
    p->ok = kvcache_grow(kv, s, (from + k->seg_pages) * len);
    if (!p->ok)
        return;
    kvcache_advance(kv, s, k->seg_len);
    p->list.n = 0;
    list_pages(k, s->pages + from, 0, k->seg_pages, p->record, &p->list);
    copy_in(k,
            &p->list); /* also into pages whose content turns out to be cached; these are freed */
    for (int i = from; i < from + k->seg_pages; i++) {
        content_of(tokens + (size_t)i * (size_t)len, len, p->content);
        int32_t page = prefix_find(kv->prefix, chain, p->content);
        if (page >= 0) {
            kvcache_replace(kv, s, i, page);
        } else {
            prefix_add(kv->prefix, chain, p->content, s->pages[i]);
            kvcache_named(kv, s, i);
        }
        chain = prefix_serial(kv->prefix, s->pages[i]);
    }
    p->ok = !kv->be->failure;
}

/* Saves the state as the last page's checkpoint, then releases the pages, which stay indexed. */
static void end_reading(void *arg)
{
    struct in_piece *p = arg;
    struct keeper *k = p->k;
    struct kvcache *kv = k->e->rt->kv;
    p->list.n = 0;
    if (p->state && k->seq.state) {
        list_state(k, k->seq.state - 1, p->state, &p->list);
        copy_in(k, &p->list);
        kvcache_retire(kv, &k->seq);
    }
    kvcache_release(kv, &k->seq);
    p->ok = true;
}

struct pinning {
    struct backend *be;
    struct ring *r;
    size_t bytes;
    bool pin;
};

static void pin_slots(void *arg)
{
    struct pinning *p = arg;
    for (int i = 0; i < p->r->n_slots; i++)
        if (p->pin)
            p->be->ops->host->pin(p->be, p->r->slots[i].record, p->bytes);
        else
            p->be->ops->host->unpin(p->be, p->r->slots[i].record);
}

/* Waits for segment i. NULL: it could not be read. */
static char *await_segment(struct ring *r, int i)
{
    struct slot *s = &r->slots[i % r->n_slots];
    pthread_mutex_lock(&r->lock);
    while (s->ready != i + 1)
        pthread_cond_wait(&r->changed, &r->lock);
    bool ok = s->ok;
    pthread_mutex_unlock(&r->lock);
    return ok ? s->record : NULL;
}

static void pass_on(struct ring *r)
{
    pthread_mutex_lock(&r->lock);
    r->taken++;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->lock);
}

/* Copies the segments into the cache in order. Returns how many were copied. */
static int take_segments(struct ring *r, struct in_piece *p)
{
    struct keeper *k = r->k;
    bool ok = engine_call(k->e, begin_reading, p) && p->ok;
    int i = r->job->first;
    for (; ok && i < r->job->end; i++) {
        if (atomic_load(&r->job->choice->req->cancelled))
            break;
        p->segment = i;
        p->record = await_segment(r, i);
        if (!p->record || !engine_call(k->e, put_segment, p) || !p->ok)
            break;
        pass_on(r);
    }
    return i;
}

static void read_segments(struct keeper *k, struct read_job *j)
{
    int64_t start = clock_ns();
    int n = j->end - j->first, slots = n < RING ? n : RING;
    if ((size_t)slots * k->seg_bytes > RING_BYTES)
        slots = (int)(RING_BYTES / k->seg_bytes) > 1 ? (int)(RING_BYTES / k->seg_bytes) : 1;
    struct ring r = {.k = k, .job = j, .next = j->first, .taken = j->first, .n_slots = slots};
    struct in_piece p = {.k = k, .job = j, .list = list_new(k)};
    struct backend *be = k->e->rt->kv->be;
    uint64_t *room = mem_zalloc(2 + (size_t)k->seg_len, sizeof *room);
    p.content = mem_zalloc((size_t)k->seg_len, sizeof *p.content);
    r.chains = mem_zalloc((size_t)j->end + 1, sizeof *r.chains);
    r.chains[0] = chain_root(k, &j->choice->req->spec);
    for (int i = 0; i < j->end; i++) {
        content_of(j->choice->seq.tokens + (size_t)i * (size_t)k->seg_len, k->seg_len, room + 2);
        r.chains[i + 1] = chain_next(k, r.chains[i], room);
    }
    pthread_mutex_init(&r.lock, NULL);
    pthread_cond_init(&r.changed, NULL);
    bool memory = true;
    for (int i = 0; i < slots; i++)
        memory &= (r.slots[i].record = mem_ask(k->seg_bytes)) != NULL;
    struct pinning pinning = {be, &r, k->seg_bytes, true};
    bool pinned = memory && be->ops->host && engine_call(k->e, pin_slots, &pinning);
    pthread_t threads[READ_THREADS];
    int n_threads = 0;
    while (memory && n_threads < READ_THREADS && n_threads < slots &&
           !pthread_create(&threads[n_threads], NULL, read_ahead, &r))
        n_threads++;
    int end = n_threads ? take_segments(&r, &p) : j->first;
    pthread_mutex_lock(&r.lock);
    r.stop = true;
    pthread_cond_broadcast(&r.changed);
    pthread_mutex_unlock(&r.lock);
    for (int i = 0; i < n_threads; i++)
        pthread_join(threads[i], NULL);
    /* A model with states cannot use the segments without the state at their end. */
    struct error err = {0};
    char *state = k->shape.state_bytes && end == j->end && end > j->first
                      ? mem_ask(k->shape.state_bytes)
                      : NULL;
    p.state = state && read_file(&r, end - 1, 's', state, &err) ? state : NULL;
    engine_call(k->e, end_reading, &p);
    for (int i = end; i > 0; i--)
        touch_segment(k, r.chains[i]);
    j->restored = k->shape.state_bytes && !p.state ? 0 : (end - j->first) * k->seg_len;
    pinning.pin = false;
    if (pinned && !engine_call(k->e, pin_slots, &pinning))
        pin_slots(&pinning); /* the engine closes */
    pthread_mutex_lock(&k->lock);
    double bytes = (double)(end - j->first) * (double)k->seg_bytes;
    k->n_read += (uint64_t)bytes;
    k->restored += (uint64_t)j->restored;
    if (end > j->first)
        k->read_rate = (k->read_rate + bytes / ((double)(clock_ns() - start) * 1e-9)) / 2;
    pthread_mutex_unlock(&k->lock);
    for (int i = 0; i < slots; i++)
        mem_free(r.slots[i].record);
    pthread_mutex_destroy(&r.lock);
    pthread_cond_destroy(&r.changed);
    mem_free(r.chains);
    mem_free(p.list.v);
    mem_free(p.content);
    mem_free(state);
    mem_free(room);
}

static void *reader_main(void *arg)
{
    struct keeper *k = arg;
    os_name_thread("steel-keep-in");
    pthread_mutex_lock(&k->lock);
    while (!k->quit) {
        struct read_job *j = k->reads;
        if (!j) {
            pthread_cond_wait(&k->changed, &k->lock);
            continue;
        }
        k->reads = j->next;
        if (!k->reads)
            k->reads_end = &k->reads;
        pthread_mutex_unlock(&k->lock);
        read_segments(k, j);
        pthread_mutex_lock(&k->lock);
        j->next = k->done;
        k->done = j;
        pthread_mutex_unlock(&k->lock);
        engine_wake(k->e);
        pthread_mutex_lock(&k->lock);
    }
    pthread_mutex_unlock(&k->lock);
    return NULL;
}

struct choice *keeper_done(struct keeper *k)
{
    if (!k)
        return NULL;
    pthread_mutex_lock(&k->lock);
    struct read_job *j = k->done;
    if (j)
        k->done = j->next;
    pthread_mutex_unlock(&k->lock);
    struct choice *c = j ? j->choice : NULL;
    if (c)
        c->n_disk = j->restored;
    mem_free(j);
    return c;
}

void keeper_stats(struct keeper *k, struct engine_stats *out)
{
    if (!k)
        return;
    pthread_mutex_lock(&k->lock);
    out->disk_written = k->n_written;
    out->disk_read = k->n_read;
    out->disk_tokens = k->restored;
    out->disk_damaged = k->n_damaged;
    pthread_mutex_unlock(&k->lock);
}

/* Beginning and end */

struct keeper *keeper_new(struct engine *e, const struct keep_options *opt, struct error *err)
{
    const struct kvcache *kv = e->rt->kv;
    const char *why = prefix_disk_refuses(e);
    if (why) {
        error_set(err, "%s", why);
        return NULL;
    }
    struct keeper *k = mem_zalloc(1, sizeof *k);
    char hash[17];
    k->e = e;
    k->dir = mem_strdup(opt->dir);
    k->most = opt->most_bytes;
    k->read_rate = FIRST_READ_RATE;
    k->saves_end = &k->saves;
    k->reads_end = &k->reads;
    prefix_disk_shape(e, &k->shape);
    k->seg_pages = (SEGMENT_TOKENS + kv->page_len - 1) / kv->page_len;
    k->seg_len = k->seg_pages * kv->page_len;
    k->seg_bytes = (size_t)k->seg_pages * kv->page_bytes;
    snprintf(hash, sizeof hash, "%016llx", (unsigned long long)k->shape.model[0]);
    struct buf folder = {0};
    buf_addf(&folder, "%s/%s", opt->dir, hash);
    k->folder = buf_take(&folder);
    pthread_mutex_init(&k->lock, NULL);
    pthread_cond_init(&k->changed, NULL);
    bool ok = (k->seg_bytes > 0 || error_set(err, "the model has no pages")) &&
              (k->seg_pages <= SEGMENT_TOKENS || error_set(err, "the pages are too short")) &&
              keep_folder_open(opt->dir, k->key, err) &&
              keep_folder_model(opt->dir, hash, opt->name ? opt->name : "?", err);
    int rc = ok ? pthread_create(&k->writer, NULL, writer_main, k) : 0;
    k->has_writer = ok && !rc;
    rc = ok && !rc ? pthread_create(&k->reader, NULL, reader_main, k) : rc;
    k->has_reader = ok && !rc;
    if (ok && !rc)
        return k;
    if (rc)
        error_set(err, "cannot start a thread: %s", strerror(rc));
    keeper_stop(k);
    keeper_free(k);
    return NULL;
}

void keeper_stop(struct keeper *k)
{
    if (!k)
        return;
    pthread_mutex_lock(&k->lock);
    k->quit = true;
    pthread_cond_broadcast(&k->changed);
    pthread_mutex_unlock(&k->lock);
    if (k->has_writer)
        pthread_join(k->writer, NULL);
    if (k->has_reader)
        pthread_join(k->reader, NULL);
    k->has_writer = k->has_reader = false;
    kvcache_release(k->e->rt->kv, &k->seq);
    while (k->reads) { /* not started: as if nothing were on disk */
        struct read_job *j = k->reads;
        k->reads = j->next;
        j->next = k->done;
        k->done = j;
    }
    k->reads_end = &k->reads;
}

void keeper_free(struct keeper *k)
{
    if (!k)
        return;
    for (struct save_job *j = k->saves, *next; j; j = next) {
        next = j->next;
        save_free(j);
    }
    pthread_mutex_destroy(&k->lock);
    pthread_cond_destroy(&k->changed);
    mem_free(k->dir);
    mem_free(k->folder);
    mem_free(k);
}
