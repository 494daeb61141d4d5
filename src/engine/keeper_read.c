/* The keeper's reader: decides what is worth reading, reads files ahead with several threads, and copies their records into
 * the cache in order. */
#include "base/clock.h"
#include "base/mem.h"
#include "base/os.h"
#include "engine/keeper_int.h"
#include "engine/reuse.h"

#include <string.h>
#include <sys/stat.h>

enum {
    READ_THREADS = 4, /* at least: they wait for the disk */
    READ_THREADS_MOST = 8,
    RING = READ_THREADS_MOST + 2,
    RING_BYTES = 256 << 20, /* most memory while segments are read */
};

/* The number of tokens of c's prompt after which it can continue from memory. */
static int in_memory(const struct keeper *k, const struct choice *c, uint64_t *content)
{
    const struct kvcache *kv = k->e->rt->kv;
    int at = 0, best = 0, len = kv->page_len;
    uint64_t chain = c->seq.root;
    while (at + len < c->seq.n_tokens) {
        keep_content(&c->seq, at, len, content);
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
    struct chain at = keep_root(k, &c->req->spec);
    int n = (c->seq.n_tokens - 1) / k->seg_len, best = 0;
    for (int i = 0; i < n; i++) {
        keep_content(&c->seq, i * k->seg_len, k->seg_len, room + 2);
        at = keep_next(k, at, room);
        if (i >= first && !keep_has(k, at, 'k'))
            break;
        if (!k->shape.state_bytes || (i >= first && keep_has(k, at, 's')))
            best = i + 1;
    }
    return best;
}

bool keeper_take(struct keeper *k, struct choice *c)
{
    const struct seq *q = &c->seq;
    if (!k || q->no_cache || q->n_tokens - 1 < LEAST_SEGMENTS * k->seg_len)
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
struct read_ring {
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
        bool ok, pinned;
    } slots[RING];
};

/* Reads one file and compares it with the prompt. */
static bool read_file(const struct read_ring *r, int i, char kind, char *record, struct error *err)
{
    struct keeper *k = r->k;
    struct prefix_shape shape = keep_shape(k, r->chains[i], kind);
    const struct seq *q = &r->job->choice->seq;
    char name[PREFIX_NAME_MOST];
    keep_name(r->chains[i + 1], kind, name);
    struct prefix_reader *f = prefix_reader_open_lazily(k->folder, name, &shape, k->seg_len, err);
    bool ok = f != NULL;
    const struct prefix_ids *ids = ok ? prefix_reader_ids(f) : NULL;
    ok = ok && (ids->n_tokens == k->seg_len || error_set(err, "%d tokens", ids->n_tokens));
    for (int t = 0; ok && t < k->seg_len; t++)
        ok =
            ids->content[t] == seq_content(q, i * k->seg_len + t) || error_set(err, "other tokens");
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
        keep_drop(k, r->chains[i + 1], kind);
        pthread_mutex_lock(&k->lock);
        k->n_damaged++;
        pthread_mutex_unlock(&k->lock);
    }
    return false;
}

static void *read_ahead(void *arg)
{
    struct read_ring *r = arg;
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
    struct slot *slot;
    char *state;
    uint64_t *content; /* (seg_len) */
    bool ok;
    struct copy_list list;
    struct engine_disk_times times;
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
        keep_content(&p->job->choice->seq, i * kv->page_len, kv->page_len, p->content);
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

/* Copies the list from a slot. Its memory is pinned late: by now the reading thread has touched its pages. */
static void copy_slot(struct in_piece *p)
{
    struct backend *be = p->k->e->rt->kv->be;
    int64_t start = clock_ns();
    if (be->ops->host && !p->slot->pinned)
        be->ops->host->pin(be, p->slot->record, p->k->seg_bytes);
    p->slot->pinned = be->ops->host != NULL;
    int64_t pinned = clock_ns();
    keep_copy_in(p->k, &p->list);
    p->times.pin += (double)(pinned - start) * 1e-9;
    p->times.copy += (double)(clock_ns() - pinned) * 1e-9;
}

/* Copies a segment into pages and indexes the new ones. */
static void put_segment(void *arg)
{
    struct in_piece *p = arg;
    struct keeper *k = p->k;
    struct kvcache *kv = k->e->rt->kv;
    struct kv_seq *s = &k->seq;
    int len = kv->page_len, from = p->segment * k->seg_pages;
    const struct seq *q = &p->job->choice->seq;
    uint64_t chain = from ? prefix_serial(kv->prefix, s->pages[from - 1]) : q->root;
    p->ok = kvcache_grow(kv, s, (from + k->seg_pages) * len);
    if (!p->ok)
        return;
    kvcache_advance(kv, s, k->seg_len);
    p->list.n = 0;
    keep_list_pages(k, s->pages + from, 0, k->seg_pages, p->slot->record, &p->list);
    copy_slot(p); /* also into pages whose content turns out to be cached; these are freed */
    for (int i = from; i < from + k->seg_pages; i++) {
        keep_content(q, i * len, len, p->content);
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
        keep_list_state(k, k->seq.state - 1, p->state, &p->list);
        keep_copy_in(k, &p->list);
        kvcache_retire(kv, &k->seq);
    }
    kvcache_release(kv, &k->seq);
    p->ok = true;
}

/* Waits for segment i. NULL: it could not be read. */
static struct slot *await_segment(struct read_ring *r, int i)
{
    struct slot *s = &r->slots[i % r->n_slots];
    pthread_mutex_lock(&r->lock);
    while (s->ready != i + 1)
        pthread_cond_wait(&r->changed, &r->lock);
    bool ok = s->ok;
    pthread_mutex_unlock(&r->lock);
    return ok ? s : NULL;
}

static void pass_on(struct read_ring *r)
{
    pthread_mutex_lock(&r->lock);
    r->taken++;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->lock);
}

static double seconds_since(int64_t *at)
{
    int64_t now = clock_ns();
    double s = (double)(now - *at) * 1e-9;
    *at = now;
    return s;
}

/* Copies the segments into the cache in order. Returns the end of those that were copied. */
static int take_segments(struct read_ring *r, struct in_piece *p)
{
    struct keeper *k = r->k;
    bool ok = engine_call(k->e, begin_reading, p) && p->ok;
    int i = r->job->first;
    int64_t at = clock_ns();
    for (; ok && i < r->job->end; i++) {
        if (atomic_load(&r->job->choice->req->cancelled))
            break;
        p->segment = i;
        p->slot = await_segment(r, i);
        p->times.wait += seconds_since(&at);
        if (!p->slot || !engine_call(k->e, put_segment, p) || !p->ok)
            break;
        p->times.call += seconds_since(&at);
        pass_on(r);
    }
    return i;
}

static bool ring_init(struct read_ring *r, struct keeper *k, const struct read_job *j)
{
    int n = j->end - j->first, slots = n < RING ? n : RING;
    if ((size_t)slots * k->seg_bytes > RING_BYTES)
        slots = (int)(RING_BYTES / k->seg_bytes) > 1 ? (int)(RING_BYTES / k->seg_bytes) : 1;
    *r =
        (struct read_ring){.k = k, .job = j, .next = j->first, .taken = j->first, .n_slots = slots};
    uint64_t *room = mem_zalloc(2 + (size_t)k->seg_len, sizeof *room);
    r->chains = mem_zalloc((size_t)j->end + 1, sizeof *r->chains);
    r->chains[0] = keep_root(k, &j->choice->req->spec);
    for (int i = 0; i < j->end; i++) {
        keep_content(&j->choice->seq, i * k->seg_len, k->seg_len, room + 2);
        r->chains[i + 1] = keep_next(k, r->chains[i], room);
    }
    mem_free(room);
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->changed, NULL);
    bool memory = true;
    for (int i = 0; i < slots; i++)
        memory &= (r->slots[i].record = mem_aligned(k->seg_bytes)) != NULL;
    return memory;
}

struct unpinning {
    struct backend *be;
    char *record;
};

static void unpin_record(void *arg)
{
    const struct unpinning *u = arg;
    u->be->ops->host->unpin(u->be, u->record);
}

static void ring_clear(struct read_ring *r)
{
    for (int i = 0; i < r->n_slots; i++) {
        struct unpinning u = {r->k->e->rt->kv->be, r->slots[i].record};
        if (r->slots[i].pinned && !engine_call(r->k->e, unpin_record, &u)) /* between steps */
            unpin_record(&u);                                              /* the engine closes */
        mem_aligned_free(r->slots[i].record, r->k->seg_bytes);
    }
    pthread_mutex_destroy(&r->lock);
    pthread_cond_destroy(&r->changed);
    mem_free(r->chains);
}

/* Reads ahead with several threads, and copies. Returns the end of the segments that were copied. */
static int read_ring(struct read_ring *r, struct in_piece *p)
{
    pthread_t threads[READ_THREADS_MOST];
    int n = 0, most = os_cpus() < READ_THREADS_MOST ? os_cpus() : READ_THREADS_MOST;
    most = most > READ_THREADS ? most : READ_THREADS;
    while (n < most && n < r->n_slots && !pthread_create(&threads[n], NULL, read_ahead, r))
        n++;
    int end = n ? take_segments(r, p) : r->job->first;
    pthread_mutex_lock(&r->lock);
    r->stop = true;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->lock);
    while (n)
        pthread_join(threads[--n], NULL);
    return end;
}

/* Adds a job's numbers to the totals. */
static void count_read(struct keeper *k, const struct read_job *j, int end,
                       const struct engine_disk_times *t)
{
    double bytes = (double)(end - j->first) * (double)k->seg_bytes;
    pthread_mutex_lock(&k->lock);
    k->n_read += (uint64_t)bytes;
    k->restored += (uint64_t)j->restored;
    k->times.all += t->all;
    k->times.wait += t->wait;
    k->times.call += t->call;
    k->times.pin += t->pin;
    k->times.copy += t->copy;
    if (end > j->first)
        k->read_rate = (k->read_rate + bytes / t->all) / 2;
    pthread_mutex_unlock(&k->lock);
}

/* The choice can be scheduled. */
static void finish_read(struct keeper *k, struct read_job *j)
{
    pthread_mutex_lock(&k->lock);
    j->next = k->done;
    k->done = j;
    pthread_mutex_unlock(&k->lock);
    engine_wake(k->e);
}

static void read_segments(struct keeper *k, struct read_job *j)
{
    int64_t start = clock_ns();
    struct read_ring r;
    struct in_piece p = {.k = k, .job = j, .list = keep_list_new(k)};
    p.content = mem_zalloc((size_t)k->seg_len, sizeof *p.content);
    int end = ring_init(&r, k, j) ? read_ring(&r, &p) : j->first;
    /* A model with states cannot use the segments without the state at their end. */
    struct error err = {0};
    char *state = k->shape.state_bytes && end == j->end && end > j->first
                      ? mem_ask(k->shape.state_bytes)
                      : NULL;
    p.state = state && read_file(&r, end - 1, 's', state, &err) ? state : NULL;
    engine_call(k->e, end_reading, &p);
    j->restored = k->shape.state_bytes && !p.state ? 0 : (end - j->first) * k->seg_len;
    p.times.all = seconds_since(&start);
    count_read(k, j, end, &p.times);
    finish_read(k, j); /* it is gone */
    for (int i = end; i > 0; i--)
        keep_touch(k, r.chains[i]);
    ring_clear(&r);
    mem_free(p.list.v);
    mem_free(p.content);
    mem_free(state);
}

void *keeper_reader(void *arg)
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
    }
    pthread_mutex_unlock(&k->lock);
    return NULL;
}
