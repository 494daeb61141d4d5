/* See keeper.h. This file has the writer, the beginning and the end. */
#include "base/clock.h"
#include "base/mem.h"
#include "base/os.h"
#include "base/siphash.h"
#include "engine/images.h"
#include "engine/keep_folder.h"
#include "engine/keeper_int.h"
#include "engine/prefix_disk.h"
#include "engine/reuse.h"

#include <stdio.h>
#include <string.h>

enum {
    SAVES_MOST = 64, /* waiting; the oldest is forgotten */
    PAUSE_S = 60,    /* after a failure to write */
};
static const double WRITE_RATE = 512e6, FIRST_READ_RATE = 1e9; /* bytes a second */

/* The engines of a process write one at a time. */
static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;

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
        keep_list_pages(p->k, pages, p->from, p->count, p->record, &p->list);
    int32_t slot = kv->states && p->from + p->count == p->k->seg_pages
                       ? states_of(kv->states, pages[p->count - 1])
                       : -1;
    if (slot >= 0 && p->state) {
        keep_list_state(p->k, slot, p->state, &p->list);
        p->has_state = true;
    }
    keep_copy_out(p->k, &p->list);
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
    struct prefix_shape shape = keep_shape(k, parent, kind);
    struct prefix_ids ids = {.content = content, .n_tokens = k->seg_len};
    char name[PREFIX_NAME_MOST];
    uint64_t bytes = 0;
    keep_name(own, kind, name);
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
    struct out_piece p = {.k = k, .content = content, .chain = j->root, .list = keep_list_new(k)};
    char *record = mem_ask(k->seg_bytes), *state = mem_ask(k->shape.state_bytes + 1);
    bool ok = record && state;
    chains[0] = j->chain;
    for (int i = 0; ok && i < n; i++, done++) {
        memcpy(content, j->content + (size_t)i * (size_t)k->seg_len,
               (size_t)k->seg_len * sizeof *content);
        chains[i + 1] = keep_next(k, chains[i], room);
        bool pages = keep_has(k, chains[i + 1], 'k');
        bool states = !k->shape.state_bytes || keep_has(k, chains[i + 1], 's');
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
        keep_touch(k, chains[i]);
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
    mem_free(j->content);
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
    if (!k || n < LEAST_SEGMENTS * k->seg_len)
        return;
    struct save_job *j = mem_zalloc(1, sizeof *j);
    *j = (struct save_job){.n = n,
                           .root = c->seq.root,
                           .chain = keep_root(k, &c->req->spec),
                           .content = mem_alloc((size_t)n * sizeof *j->content)};
    keep_content(&c->seq, 0, n, j->content);
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
    out->disk_times = k->times;
    pthread_mutex_unlock(&k->lock);
}

/* Beginning and end */

/* Images and their rows get content ids that the next process finds again: they depend on the folder's key in place of this
 * process's. */
static void name_images(struct keeper *k)
{
    uint64_t keys[IMAGE_KEYS], row[2];
    for (uint64_t i = 0; i < IMAGE_KEYS + 2; i++) {
        uint64_t about[] = {k->shape.model[0], k->shape.model[1], i};
        *(i < IMAGE_KEYS ? &keys[i] : &row[i - IMAGE_KEYS]) = siphash(k->key, about, sizeof about);
    }
    image_cache_keys(k->e->images, keys);
    prefix_embed_key(k->e->rt->kv->prefix, row);
}

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
    rc = ok && !rc ? pthread_create(&k->reader, NULL, keeper_reader, k) : rc;
    k->has_reader = ok && !rc;
    if (ok && !rc) {
        name_images(k);
        return k;
    }
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
