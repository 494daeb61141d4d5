/* See images.h. */
#include "engine/images.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/os.h"
#include "base/siphash.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum {
    MAX_IMAGES = 256,
    NONCE = 32, /* characters */
    INDEX = 4,
    PIXELS_A_UNIT = 4, /* of the budget */
    CACHE_ENTRIES = 64,
    CACHE_BYTES = 256 << 20,
    PIXEL_BYTES = 256 << 20, /* decoded images that wait for the tower, of all prompts */
    ID_WORDS = IMAGE_KEYS / 2,
};
#define MARK                                                                                       \
    "image" /* then the nonce and the index, all letters and digits: no template changes them */
enum { MARK_LEN = sizeof MARK - 1 + NONCE + INDEX };

/* Features that the cache, prompts and requests share. */
struct seen {
    uint8_t id[32];
    struct features features;
    atomic_int refs;
    uint64_t used; /* time of the last use, under the cache's lock */
};

struct image_cache {
    pthread_mutex_t lock;
    struct seen *entries[CACHE_ENTRIES]; /* NULL = free */
    uint64_t now;
    size_t bytes;
    uint64_t keys[ID_WORDS][2]; /* secrets of the content ids */
    size_t pixel_bytes;
    struct image_times times;
};

struct image_item {
    char *bytes; /* (n) the file */
    size_t n;
    bool low; /* few details are wanted */
    char where[IMAGES_WHERE];
    struct image_plan *plan; /* NULL = not known yet */
    struct image pixels;     /* kept for the tower; rgb NULL = decode it again */
    uint8_t id[32];          /* if named */
    bool named;
    struct seen *seen;
};

struct prompt_images {
    struct engine *engine;
    struct image_cache *cache;
    struct image_rules rules;
    struct image_item items[MAX_IMAGES];
    int n;
    char mark[MARK_LEN + 1]; /* without the index */
    int order[MAX_IMAGES];   /* (n_shown) the item of each image of the prompt */
    int n_shown;
    /* Runs of features in the prompt, and the image and the first feature of each. */
    struct image_run {
        struct image_span span;
        int shown, first;
    } * runs; /* (n_runs) */
    int n_runs;
    struct prompt_embeds *embeds; /* (n_runs) */
    int32_t *pos;                 /* (n_tokens, 3) */
    int n_tokens;
    bool low;   /* of images that are added: few details are wanted */
    bool ready; /* the features are computed */
};

static void random_bytes(void *to, size_t n)
{
    CHECK(os_random(to, n), "the kernel has no random bytes");
}

/* The cache */

struct image_cache *image_cache_new(void)
{
    struct image_cache *c = mem_zalloc(1, sizeof *c);
    pthread_mutex_init(&c->lock, NULL);
    random_bytes(c->keys, sizeof c->keys);
    return c;
}

void image_cache_keys(struct image_cache *c, const uint64_t keys[IMAGE_KEYS])
{
    pthread_mutex_lock(&c->lock);
    memcpy(c->keys, keys, sizeof c->keys);
    pthread_mutex_unlock(&c->lock);
}

static size_t seen_bytes(const struct seen *s)
{
    return (size_t)s->features.n * (size_t)s->features.width * sizeof(float);
}

static void seen_hold(void *arg)
{
    struct seen *s = arg;
    atomic_fetch_add(&s->refs, 1);
}

static void seen_release(void *arg)
{
    struct seen *s = arg;
    if (atomic_fetch_sub(&s->refs, 1) > 1)
        return;
    features_free(&s->features);
    mem_free(s);
}

void image_cache_free(struct image_cache *c)
{
    if (!c)
        return;
    for (int i = 0; i < CACHE_ENTRIES; i++)
        if (c->entries[i])
            seen_release(c->entries[i]);
    pthread_mutex_destroy(&c->lock);
    mem_free(c);
}

static struct seen *cache_find(struct image_cache *c, const uint8_t *id)
{
    struct seen *found = NULL;
    pthread_mutex_lock(&c->lock);
    for (int i = 0; i < CACHE_ENTRIES && !found; i++)
        if (c->entries[i] && !memcmp(c->entries[i]->id, id, sizeof c->entries[i]->id))
            found = c->entries[i];
    if (found) {
        seen_hold(found);
        found->used = ++c->now;
    }
    pthread_mutex_unlock(&c->lock);
    return found;
}

/* The entry that was unused longest; -1 = all are in use. Under the lock. */
static int cache_oldest(const struct image_cache *c)
{
    int best = -1;
    for (int i = 0; i < CACHE_ENTRIES; i++) {
        const struct seen *s = c->entries[i];
        if (s && atomic_load(&s->refs) == 1 && (best < 0 || s->used < c->entries[best]->used))
            best = i;
    }
    return best;
}

static int cache_slot(const struct image_cache *c)
{
    for (int i = 0; i < CACHE_ENTRIES; i++)
        if (!c->entries[i])
            return i;
    return -1;
}

/* Makes room and adds s, which has one user. Without room, the features belong to their prompt alone. */
static void cache_add(struct image_cache *c, struct seen *s)
{
    size_t bytes = seen_bytes(s);
    pthread_mutex_lock(&c->lock);
    s->used = ++c->now;
    while (c->bytes + bytes > CACHE_BYTES || cache_slot(c) < 0) {
        int at = cache_oldest(c);
        if (at < 0)
            break;
        c->bytes -= seen_bytes(c->entries[at]);
        seen_release(c->entries[at]);
        c->entries[at] = NULL;
    }
    int slot = cache_slot(c);
    if (slot >= 0 && c->bytes + bytes <= CACHE_BYTES) {
        c->entries[slot] = s;
        seen_hold(s);
        c->bytes += bytes;
    }
    pthread_mutex_unlock(&c->lock);
}

static size_t pixel_bytes(const struct image *m)
{
    return m->rgb ? (size_t)m->width * (size_t)m->height * 3 : 0;
}

/* Whether the pixels may be kept until the tower takes them. */
static bool pixels_fit(struct image_cache *c, const struct image *m)
{
    pthread_mutex_lock(&c->lock);
    bool fits = c->pixel_bytes + pixel_bytes(m) <= PIXEL_BYTES;
    c->pixel_bytes += fits ? pixel_bytes(m) : 0;
    pthread_mutex_unlock(&c->lock);
    return fits;
}

/* The pixels are not kept any more. */
static void pixels_leave(struct image_cache *c, const struct image *m)
{
    pthread_mutex_lock(&c->lock);
    c->pixel_bytes -= pixel_bytes(m);
    pthread_mutex_unlock(&c->lock);
}

static double seconds_since(int64_t start)
{
    return (double)(clock_ns() - start) * 1e-9;
}

static void add_time(struct image_cache *c, double *part, int64_t start)
{
    pthread_mutex_lock(&c->lock);
    *part += seconds_since(start);
    pthread_mutex_unlock(&c->lock);
}

void image_cache_times(struct image_cache *c, struct image_times *out)
{
    pthread_mutex_lock(&c->lock);
    *out = c->times;
    pthread_mutex_unlock(&c->lock);
}

/* Images to marks */

struct prompt_images *prompt_images_new(struct engine *e, const struct image_rules *rules)
{
    uint8_t random[NONCE / 2];
    if (!engine_encoder(e))
        return NULL;
    struct mem_job *job = mem_job_suspend(); /* it holds references to features */
    struct prompt_images *m = mem_zalloc(1, sizeof *m);
    mem_job_resume(job);
    m->engine = e;
    m->cache = engine_image_cache(e);
    m->rules = *rules;
    random_bytes(random, sizeof random);
    char *at = stpcpy(m->mark, MARK);
    for (size_t i = 0; i < sizeof random; i++)
        at += snprintf(at, 3, "%02x", random[i]);
    return m;
}

void prompt_images_free(struct prompt_images *m)
{
    if (!m)
        return;
    for (int i = 0; i < m->n; i++) {
        mem_free(m->items[i].bytes);
        mem_free(m->items[i].plan);
        pixels_leave(m->cache, &m->items[i].pixels);
        image_free(&m->items[i].pixels);
        if (m->items[i].seen)
            seen_release(m->items[i].seen);
    }
    mem_free(m->pos);
    mem_free(m->runs);
    mem_free(m->embeds);
    mem_free(m);
}

void prompt_images_abandon(struct prompt_images *m)
{
    for (int i = 0; m && i < m->n; i++) {
        m->items[i].bytes = NULL;
        m->items[i].plan = NULL;
        pixels_leave(m->cache, &m->items[i].pixels);
        m->items[i].pixels = (struct image){0};
    }
    if (m) {
        m->pos = NULL;
        m->runs = NULL;
        m->embeds = NULL;
    }
    prompt_images_free(m);
}

void prompt_images_encode_abandon(struct prompt_images *m)
{
    m->embeds = NULL;
    m->ready = false;
}

void prompt_images_set_low(struct prompt_images *m, bool low)
{
    m->low = low;
}

int prompt_images_count(const struct prompt_images *m)
{
    return m ? m->n : 0;
}

bool prompt_images_give(struct prompt_images *m, struct buf *bytes, const char *where,
                        struct buf *out, struct error *err)
{
    if (m->n == MAX_IMAGES)
        return error_set(err, "%s: more than %d images", where, MAX_IMAGES);
    struct image_item *item = &m->items[m->n];
    *item = (struct image_item){.n = bytes->len, .low = m->low};
    item->bytes = buf_take(bytes);
    snprintf(item->where, sizeof item->where, "%s", where);
    buf_addf(out, "%s%04d", m->mark, m->n++);
    return true;
}

bool prompt_images_add(struct prompt_images *m, const void *bytes, size_t n, const char *where,
                       struct buf *out, struct error *err)
{
    struct buf copy = {0};
    if (!buf_try_reserve(&copy, n))
        return error_set(err, "%s: out of memory for the image", where);
    buf_add(&copy, bytes, n);
    bool ok = prompt_images_give(m, &copy, where, out, err);
    buf_clear(&copy);
    return ok;
}

bool prompt_images_add_url(struct prompt_images *m, const char *url, const char *where,
                           struct buf *out, struct error *err)
{
    struct buf bytes = {0};
    if (!m->rules.fetch)
        return error_set(err,
                         "%s: images are not fetched from other servers: send a data: URL, or "
                         "allow the origin (--allow-image-origins)",
                         where);
    if (!m->rules.fetch(m->rules.fetch_arg, url, m->rules.stop, &bytes, err))
        return error_prefix(err, "%s", where);
    bool ok =
        prompt_images_add(m, bytes.p, bytes.len, where, out, err); /* its memory is of no job */
    buf_clear(&bytes);
    return ok;
}

bool prompt_images_has_mark(const struct prompt_images *m, const char *text, size_t n)
{
    const char *mark = plan_mark(encoder_config(engine_encoder(m->engine)));
    return memmem(text, n, mark, strlen(mark)) != NULL;
}

/* Into the prompt */

static bool fail(const struct image_item *item, struct error *err)
{
    return error_prefix(err, "%s", item->where);
}

static struct image_limits limits_of(const struct prompt_images *m)
{
    return (struct image_limits){.max_pixels = m->rules.max_pixels, .stop = m->rules.stop};
}

static const struct tower_config *config_of(const struct prompt_images *m,
                                            const struct image_item *item)
{
    const struct encoder *e = engine_encoder(m->engine);
    return item->low ? encoder_low_config(e) : encoder_config(e);
}

/* Names the image by its content, for this salt and these details. */
static const uint8_t *name_item(const struct prompt_images *m, struct image_item *item)
{
    size_t salt = m->rules.salt ? strlen(m->rules.salt) : 0;
    struct buf all = {0};
    if (item->named)
        return item->id;
    uint64_t content[2] = {siphash(m->cache->keys[0], item->bytes, item->n),
                           siphash(m->cache->keys[1], item->bytes, item->n)};
    buf_add(&all, (const char *)&salt, sizeof salt);
    buf_add(&all, m->rules.salt ? m->rules.salt : "", salt);
    buf_addc(&all, item->low ? 'l' : 'h');
    buf_add(&all, content, sizeof content);
    uint64_t h[2] = {siphash(m->cache->keys[0], all.p, all.len),
                     siphash(m->cache->keys[1], all.p, all.len)};
    memcpy(item->id, h, sizeof h);
    for (int i = 2; i < ID_WORDS; i++) { /* the hashes of the content, hashed */
        uint64_t more = siphash(m->cache->keys[i], h, sizeof h);
        memcpy(item->id + 8 * i, &more, sizeof more);
    }
    buf_clear(&all);
    item->named = true;
    return item->id;
}

static bool decode(struct prompt_images *m, const struct image_item *item, struct image *out,
                   struct error *err)
{
    struct image_limits limits = limits_of(m);
    int64_t start = clock_ns();
    if (!image_decode(item->bytes, item->n, &limits, out, err))
        return false;
    add_time(m->cache, &m->cache->times.decode, start);
    return true;
}

/* Decodes the image; its views and marks follow from its size. The pixels are kept for the tower if there is room. */
static bool read_image(struct prompt_images *m, struct image_item *item, struct error *err)
{
    struct image image;
    struct image_plan plan;
    if (!decode(m, item, &image, err))
        return false;
    uint64_t pixels = (uint64_t)image.width * (uint64_t)image.height;
    bool ok = plan_image(config_of(m, item), image.width, image.height, &plan, err);
    if (ok && !budget_spend(m->rules.budget, pixels / PIXELS_A_UNIT))
        ok = budget_error(m->rules.budget, err);
    if (!ok || !pixels_fit(m->cache, &image))
        image_free(&image);
    if (!ok)
        return false;
    item->pixels = image;
    item->plan = mem_alloc(sizeof plan);
    *item->plan = plan;
    return true;
}

/* Sets item->plan. An image whose features are cached is not decoded. */
static bool measure(struct prompt_images *m, struct image_item *item, struct error *err)
{
    if (item->plan)
        return true;
    item->seen = item->seen ? item->seen : cache_find(m->cache, name_item(m, item));
    if (!item->seen)
        return read_image(m, item, err) || fail(item, err);
    item->plan = mem_alloc(sizeof *item->plan);
    *item->plan = item->seen->features.plan;
    return true;
}

/* The runs of the image shown at number `shown`, at places of a prompt that are set later. */
static void add_runs(struct prompt_images *m, int shown)
{
    const struct tower_config *t = encoder_config(engine_encoder(m->engine));
    const struct image_plan *p = m->items[m->order[shown]].plan;
    int n = plan_n_runs(t, p), first = 0;
    m->runs = mem_realloc(m->runs, (size_t)(m->n_runs + n), sizeof *m->runs);
    for (int i = 0; i < n; i++) {
        struct image_span span = {.rows = 1, .cols = plan_run_length(t, p, i)};
        if (tower_has_grid_positions(t)) {
            span.rows = p->views[0].rows / t->merge;
            span.cols = p->views[0].cols / t->merge;
        }
        m->runs[m->n_runs++] = (struct image_run){span, shown, first};
        first += span.rows * span.cols;
    }
}

bool prompt_images_show(struct prompt_images *m, struct buf *prompt, struct error *err)
{
    struct buf out = {0};
    if (!m || !m->n)
        return true;
    const struct tower_config *t = encoder_config(engine_encoder(m->engine));
    const char *at = prompt->p, *end = at + prompt->len, *next;
    size_t len = MARK_LEN - INDEX;
    bool ok = true;
    m->n_shown = m->n_runs = 0;
    while (ok && (next = memmem(at, (size_t)(end - at), m->mark, len)) && end - next >= MARK_LEN) {
        int index = 0;
        for (int i = 0; i < INDEX; i++)
            index = index * 10 + (next[len + (size_t)i] - '0');
        if (index < 0 || index >= m->n || m->n_shown == MAX_IMAGES)
            break; /* only if the template changed the text */
        ok = measure(m, &m->items[index], err);
        buf_add(&out, at, (size_t)(next - at));
        m->order[m->n_shown] = index;
        if (ok) {
            plan_text(t, m->items[index].plan, m->n_shown, &out);
            add_runs(m, m->n_shown++);
        }
        at = next + MARK_LEN;
    }
    buf_add(&out, at, (size_t)(end - at));
    buf_clear(prompt);
    *prompt = out;
    return ok;
}

bool prompt_images_expand(struct prompt_images *m, struct token_list *ids, struct error *err)
{
    struct token_list out = {0};
    int k = 0;
    if (!m || !m->n_shown)
        return true;
    const struct tower_config *t = encoder_config(engine_encoder(m->engine));
    const char *word = plan_mark(t);
    int32_t token = tokenizer_find(engine_tokenizer(m->engine, NULL), word, strlen(word));
    for (size_t i = 0; i < ids->n; i++) {
        if (ids->ids[i] != token || k == m->n_runs) {
            token_list_add(&out, ids->ids[i]);
            continue;
        }
        struct image_span *span = &m->runs[k++].span;
        span->at = (int)out.n;
        for (int n = 0; n < span->rows * span->cols; n++)
            token_list_add(&out, token);
    }
    token_list_clear(ids);
    *ids = out;
    if (k < m->n_runs)
        return error_set(err, "the model's vocabulary has no token %s", word);
    m->n_tokens = (int)out.n;
    mem_free(m->pos);
    m->pos = NULL;
    if (!tower_has_grid_positions(t))
        return true;
    struct image_span *spans = mem_alloc((size_t)m->n_runs * sizeof *spans);
    for (int i = 0; i < m->n_runs; i++)
        spans[i] = m->runs[i].span;
    m->pos = mem_alloc(out.n * 3 * sizeof *m->pos);
    image_positions(spans, m->n_runs, m->n_tokens, m->pos);
    mem_free(spans);
    return true;
}

static bool encode(struct prompt_images *m, struct image_item *item, struct features *out,
                   struct error *err)
{
    struct image image = item->pixels;
    struct patches patches = {0};
    pixels_leave(m->cache, &image);
    item->pixels = (struct image){0};
    bool ok = image.rgb || decode(m, item, &image, err);
    int64_t start = clock_ns();
    ok = ok && patches_make(config_of(m, item), &image, m->rules.stop, &patches, err);
    image_free(&image);
    if (ok) {
        add_time(m->cache, &m->cache->times.patches, start);
        struct mem_job *job = mem_job_suspend(); /* for features that outlive it */
        ok = encoder_run(engine_encoder(m->engine), &patches, m->rules.stop, out, err);
        mem_job_resume(job);
    }
    patches_free(&patches);
    return ok;
}

/* Sets item->seen. */
static bool find_features(struct prompt_images *m, struct image_item *item, struct error *err)
{
    struct features features = {0};
    if (item->seen)
        return true;
    const uint8_t *id = name_item(m, item);
    item->seen = cache_find(m->cache, id);
    if (item->seen)
        return true;
    if (!encode(m, item, &features, err))
        return fail(item, err);
    struct mem_job *job = mem_job_suspend();
    item->seen = mem_zalloc(1, sizeof *item->seen);
    *item->seen = (struct seen){.features = features, .refs = 1};
    memcpy(item->seen->id, id, sizeof item->seen->id);
    cache_add(m->cache, item->seen);
    mem_job_resume(job);
    return true;
}

bool prompt_images_encode(struct prompt_images *m, struct error *err)
{
    if (!m || !m->n_shown || m->n_tokens > engine_context(m->engine))
        return true;
    m->embeds = mem_realloc(m->embeds, (size_t)m->n_runs, sizeof *m->embeds);
    for (int i = 0; i < m->n_runs; i++) {
        const struct image_run *r = &m->runs[i];
        struct image_item *item = &m->items[m->order[r->shown]];
        if (!find_features(m, item, err))
            return false;
        const struct features *f = &item->seen->features;
        m->embeds[i] =
            (struct prompt_embeds){.at = r->span.at,
                                   .n = r->span.rows * r->span.cols,
                                   .first = r->first,
                                   .rows = f->values + (size_t)r->first * (size_t)f->width,
                                   .two_way = engine_two_way(m->engine),
                                   .owner = item->seen,
                                   .hold = seen_hold,
                                   .release = seen_release};
        memcpy(m->embeds[i].id, item->seen->id, sizeof m->embeds[i].id);
    }
    m->ready = true;
    return true;
}

void prompt_images_submit(const struct prompt_images *m, struct request_spec *spec)
{
    if (!m || !m->ready || spec->n_prompt != m->n_tokens)
        return;
    spec->embeds = m->embeds;
    spec->n_embeds = m->n_runs;
    spec->rope_pos = m->pos;
}

void prompt_images_rest(struct prompt_images *m)
{
    for (int i = 0; m && i < m->n; i++)
        if (m->items[i].seen) {
            seen_release(m->items[i].seen);
            m->items[i].seen = NULL;
        }
    if (m)
        m->ready = false;
}
