/* See lora.h. Owns the lists of rows that use adapters, and the low-rank values t. */
#include "backend/cpu/cpu.h"
#include "base/mem.h"
#include "quant/quant.h"

#include <math.h>
#include <string.h>

#define KERNEL c
#include "backend/cpu/lora_kernel.h"

/* Part of B: rows [first, first + n) of the weight, which multiply t[at..at + rank). Panels begin
 * at multiples of LORA_PANEL of the weight's rows. */
struct cpu_lora_part {
    int first, n, at, rank;
    float scale; /* power of two that the fp16 values were divided by */
    uint16_t *b; /* (panels, rank, LORA_PANEL) */
};

struct cpu_lora_matrix {
    int rank, n_panels; /* of a */
    float scale;
    uint16_t *a; /* (n_panels, n_in, LORA_PANEL) */
    int n_parts;
    struct cpu_lora_part parts[LORA_MAX_PARTS];
};

struct cpu_lora {
    int n_expert;
    struct cpu_lora_matrix *of; /* (n_expert) */
    uint16_t *mem;              /* (bytes) all panels */
    size_t bytes;
};

struct cpu_lora_state {
    size_t t_len;               /* floats of t per entry */
    float *t;                   /* (entries, or slots' entries of experts, t_len) */
    int n_entries;              /* entries of the stream's rows, sorted by adapter */
    struct lora_entry *entries; /* (max_tokens * LORA_MAX_USES) */
    struct lora_entry *slots;   /* (max_tokens * used * LORA_MAX_USES) entries of experts' slots */
    int32_t *out_row;           /* (max_tokens) the output row of a row; -1 = none */
    struct lora_chunk *chunks[LORA_PLACES];
    bool uses[LORA_MAX_ADAPTERS]; /* adapters that the step uses */
};

/* Packing */

static int panels_of(int first, int n)
{
    return n ? (first + n - 1) / LORA_PANEL - first / LORA_PANEL + 1 : 0;
}

/* The power of two that scales the largest of n values to near 1, for the best fp16 precision. */
static float fp16_scale(const float *v, size_t n)
{
    float most = 0;
    int e = 0;
    for (size_t i = 0; i < n; i++)
        most = fabsf(v[i]) > most ? fabsf(v[i]) : most;
    if (most > 0)
        frexpf(most, &e);
    return ldexpf(1, e);
}

static size_t matrix_values(const struct lora *l, const struct lora_matrix *m)
{
    size_t n = (size_t)panels_of(0, m->rank) * (size_t)l->n_in;
    for (int i = 0; i < m->n_parts; i++)
        n += (size_t)panels_of(m->parts[i].first, m->parts[i].n) * (size_t)m->parts[i].rank;
    return n * LORA_PANEL;
}

static uint16_t *pack_matrix(const struct lora *l, const struct lora_matrix *m,
                             struct cpu_lora_matrix *out, uint16_t *to)
{
    size_t n_in = (size_t)l->n_in;
    *out = (struct cpu_lora_matrix){.rank = m->rank,
                                    .n_panels = panels_of(0, m->rank),
                                    .scale = fp16_scale(m->a, (size_t)m->rank * n_in),
                                    .a = to,
                                    .n_parts = m->n_parts};
    for (int p = 0; p < out->n_panels; p++)
        for (size_t k = 0; k < n_in; k++)
            for (int j = 0; j < LORA_PANEL; j++, to++) {
                int r = p * LORA_PANEL + j;
                if (r < m->rank)
                    *to = f32_to_f16(m->a[(size_t)r * n_in + k] / out->scale);
            }
    for (int i = 0; i < m->n_parts; i++) {
        const struct lora_part *from = &m->parts[i];
        struct cpu_lora_part *part = &out->parts[i];
        *part = (struct cpu_lora_part){from->first, from->n, from->at, from->rank, 1, to};
        part->scale = fp16_scale(from->b, (size_t)from->n * (size_t)from->rank);
        int begin = from->first / LORA_PANEL * LORA_PANEL;
        for (int p = 0; p < panels_of(from->first, from->n); p++)
            for (int k = 0; k < from->rank; k++)
                for (int j = 0; j < LORA_PANEL; j++, to++) {
                    int r = begin + p * LORA_PANEL + j - from->first;
                    if (r >= 0 && r < from->n)
                        *to = f32_to_f16(from->b[(size_t)r * (size_t)from->rank + (size_t)k] /
                                         part->scale);
                }
    }
    return to;
}

void *cpu_lora_adapt(struct backend *be, const struct weight *w, const struct lora *l,
                     struct error *err)
{
    (void)be, (void)w;
    struct cpu_lora *c = mem_zalloc(1, sizeof *c);
    size_t n_values = 0;
    for (int e = 0; e < l->n_expert; e++)
        n_values += matrix_values(l, &l->of[e]);
    c->n_expert = l->n_expert;
    c->bytes = n_values * sizeof(uint16_t);
    c->mem = mem_aligned(c->bytes ? c->bytes : 1);
    if (!c->mem) {
        error_set(err, "out of memory: %zu bytes for an adapter", c->bytes);
        mem_free(c);
        return NULL;
    }
    c->of = mem_zalloc((size_t)l->n_expert, sizeof *c->of);
    uint16_t *to = c->mem;
    for (int e = 0; e < l->n_expert; e++)
        if (l->of[e].rank)
            to = pack_matrix(l, &l->of[e], &c->of[e], to);
    return c;
}

void cpu_lora_unadapt(struct backend *be, void *change)
{
    (void)be;
    struct cpu_lora *c = change;
    mem_aligned_free(c->mem, c->bytes ? c->bytes : 1);
    mem_free(c->of);
    mem_free(c);
}

/* Rows of a step */

bool cpu_lora_init(struct cpu_backend *cb, struct error *err)
{
    if (!cb->bounds.lora_rank)
        return true;
    struct cpu_lora_state *s = cb->lora = mem_zalloc(1, sizeof *s);
    size_t tokens = (size_t)cb->bounds.max_tokens, used = (size_t)cb->max.n_expert_used;
    size_t entries = tokens * LORA_MAX_USES, slots = entries * (used ? used : 1);
    s->t_len = (size_t)panels_of(0, cb->bounds.lora_rank) * LORA_PANEL;
    /* virtual memory; pages are used as they are touched */
    s->t = cpu_scratch(cb, slots * s->t_len * sizeof(float), "adapters", err);
    if (!s->t)
        return false;
    s->entries = mem_zalloc(entries, sizeof *s->entries);
    s->slots = mem_zalloc(slots, sizeof *s->slots);
    s->out_row = mem_zalloc(tokens, sizeof *s->out_row);
    for (int i = 0; i < LORA_PLACES; i++)
        s->chunks[i] = mem_zalloc(slots, sizeof *s->chunks[i]);
    return true;
}

void cpu_lora_clear(struct cpu_backend *cb)
{
    struct cpu_lora_state *s = cb->lora;
    if (!s)
        return;
    mem_free(s->entries);
    mem_free(s->slots);
    mem_free(s->out_row);
    for (int i = 0; i < LORA_PLACES; i++)
        mem_free(s->chunks[i]);
    mem_free(s);
    cb->lora = NULL;
}

void cpu_lora_begin(struct cpu_backend *cb)
{
    struct cpu_lora_state *s = cb->lora;
    const struct batch *b = &cb->batch;
    if (!s)
        return;
    s->n_entries = 0;
    if (!b->n_loras)
        return;
    memset(s->uses, 0, sizeof s->uses);
    for (int i = 0; i < b->n_loras; i++) {
        const struct lora_use *u = &b->loras[i];
        s->uses[u->adapter] = true;
        for (int r = u->first; r < u->first + u->n; r++)
            s->entries[s->n_entries++] = (struct lora_entry){r, r, u->adapter, u->scale};
    }
}

void cpu_lora_narrow(struct cpu_backend *cb)
{
    struct cpu_lora_state *s = cb->lora;
    const struct batch *b = &cb->batch;
    int n = 0;
    if (!s || !s->n_entries)
        return;
    memset(s->out_row, -1, (size_t)b->n_tokens * sizeof *s->out_row);
    for (int i = 0; i < b->n_out; i++)
        s->out_row[b->out_rows[i]] = i;
    for (int i = 0; i < s->n_entries; i++) {
        struct lora_entry e = s->entries[i];
        e.row = e.from = s->out_row[e.row];
        if (e.row >= 0)
            s->entries[n++] = e;
    }
    s->n_entries = n;
}

/* Adapter work of a product */

/* Adds chunks for entries [first, last), all of one matrix. */
static void add_chunks(struct lora_work *l, const struct cpu_lora_matrix *m, int first, int last)
{
    for (; m->rank && first < last; first += LORA_ROWS) {
        int n = last - first < LORA_ROWS ? last - first : LORA_ROWS;
        l->chunks[l->n_chunks++] = (struct lora_chunk){first, n, m, l->n_units};
        l->n_units += m->n_panels;
    }
}

bool cpu_lora_changes(const struct cpu_backend *cb, const struct weight *w)
{
    const struct cpu_lora_state *s = cb->lora;
    if (!s || !s->n_entries || !w->lora)
        return false;
    for (int a = 0; a < LORA_MAX_ADAPTERS; a++)
        if (s->uses[a] && w->lora[a])
            return true;
    return false;
}

struct lora_work cpu_lora_work(struct cpu_backend *cb, const struct weight *w,
                               enum lora_place place)
{
    const struct cpu_lora_state *s = cb->lora;
    if (!cpu_lora_changes(cb, w))
        return (struct lora_work){0};
    struct lora_work l = {.entries = s->entries, .chunks = s->chunks[place]};
    for (int i = 0, end; i < s->n_entries; i = end) {
        const struct cpu_lora *c = w->lora[s->entries[i].adapter];
        for (end = i + 1; end < s->n_entries && s->entries[end].adapter == s->entries[i].adapter;)
            end++;
        if (c)
            add_chunks(&l, &c->of[0], i, end);
    }
    return l;
}

struct lora_work cpu_lora_experts(struct cpu_backend *cb, const struct weight *w,
                                  enum lora_place place, const int32_t *start, const int32_t *token,
                                  int32_t *first)
{
    const struct cpu_lora_state *s = cb->lora;
    if (!cpu_lora_changes(cb, w))
        return (struct lora_work){0};
    struct lora_work l = {.entries = s->slots, .chunks = s->chunks[place]};
    int n = 0;
    for (int e = 0; e < w->n_expert; e++) {
        first[e] = l.n_chunks;
        for (int i = 0, end; start[e] < start[e + 1] && i < s->n_entries; i = end) {
            const struct lora_entry *group = &s->entries[i];
            const struct cpu_lora *c = w->lora[group->adapter];
            for (end = i + 1; end < s->n_entries && s->entries[end].adapter == group->adapter;)
                end++;
            int from = n, at = i;
            /* slots and entries are both in order of rows */
            for (int slot = start[e]; slot < start[e + 1]; slot++) {
                while (at < end && s->entries[at].row < token[slot])
                    at++;
                if (at < end && s->entries[at].row == token[slot])
                    s->slots[n++] = (struct lora_entry){slot, token[slot], group->adapter,
                                                        s->entries[at].scale};
            }
            if (c)
                add_chunks(&l, &c->of[e], from, n);
        }
    }
    first[w->n_expert] = l.n_chunks;
    return l;
}

static lora_low_fn *low_kernel(const struct cpu_backend *cb)
{
#ifdef __x86_64__
    if (isa_has(cb->isa, ISA_AVX2))
        return isa_has(cb->isa, ISA_AVX512) ? lora_low_avx512 : lora_low_avx2;
#elif defined __aarch64__
    if (isa_has(cb->isa, ISA_NEON))
        return lora_low_neon;
#endif
    (void)cb;
    return lora_low_c;
}

static lora_up_fn *up_kernel(const struct cpu_backend *cb)
{
#ifdef __x86_64__
    if (isa_has(cb->isa, ISA_AVX2))
        return isa_has(cb->isa, ISA_AVX512) ? lora_up_avx512 : lora_up_avx2;
#elif defined __aarch64__
    if (isa_has(cb->isa, ISA_NEON))
        return lora_up_neon;
#endif
    (void)cb;
    return lora_up_c;
}

void cpu_lora_low(const struct cpu_backend *cb, const struct lora_work *l, const float *x, int n_in,
                  bool by_row, int first, int last)
{
    const struct cpu_lora_state *s = cb->lora;
    lora_low_fn *times = low_kernel(cb);
    int c = 0;
    for (int u = first; u < last; u++) {
        while (c + 1 < l->n_chunks && l->chunks[c + 1].unit <= u)
            c++;
        const struct lora_chunk *k = &l->chunks[c];
        int panel = u - k->unit;
        const float *rows[LORA_ROWS];
        float out[LORA_ROWS][LORA_PANEL];
        for (int i = 0; i < k->n; i++) {
            const struct lora_entry *e = &l->entries[k->first + i];
            rows[i] = x + (size_t)(by_row ? e->row : e->from) * (size_t)n_in;
        }
        times(k->m->a + (size_t)panel * (size_t)n_in * LORA_PANEL, n_in, rows, k->n, out);
        for (int i = 0; i < k->n; i++) {
            float *t = s->t + (size_t)(k->first + i) * s->t_len + (size_t)panel * LORA_PANEL;
            float scale = k->m->scale * l->entries[k->first + i].scale;
            for (int j = 0; j < LORA_PANEL; j++)
                t[j] = out[i][j] * scale;
        }
    }
}

/* Adds outputs [at, end) of a panel, part of which lies outside the range. Goes through a copy of
 * the panel, so that these outputs have the same bytes as in a whole one. */
static void add_partial(lora_up_fn *add, const uint16_t *m, const struct cpu_lora_part *p,
                        const float *const *t, float *const *y, int n, int at, int end)
{
    float whole[LORA_ROWS][LORA_PANEL] = {0}, *rows[LORA_ROWS];
    size_t bytes = (size_t)(end - at) * sizeof(float);
    for (int i = 0; i < n; i++) {
        rows[i] = whole[i];
        memcpy(whole[i] + at, y[i], bytes);
    }
    add(m, p->rank, 1, t, n, p->scale, rows);
    for (int i = 0; i < n; i++)
        memcpy(y[i], whole[i] + at, bytes);
}

/* Adds one part of a matrix to rows of one chunk: weight rows [r0, r1). */
static void add_part(const struct cpu_backend *cb, const struct cpu_lora_part *p,
                     const float *const *t, float *const *y, int n, int r0, int r1)
{
    int a = r0 > p->first ? r0 : p->first, b = r1 < p->first + p->n ? r1 : p->first + p->n;
    lora_up_fn *add = up_kernel(cb);
    const float *low[LORA_ROWS];
    float *to[LORA_ROWS];
    for (int i = 0; i < n; i++)
        low[i] = t[i] + p->at;
    for (int at = a, end; at < b; at = end) {
        int panel = at / LORA_PANEL - p->first / LORA_PANEL, skip = at % LORA_PANEL;
        const uint16_t *m = p->b + (size_t)panel * (size_t)p->rank * LORA_PANEL;
        int whole = skip ? 0 : (b - at) / LORA_PANEL;
        for (int i = 0; i < n; i++)
            to[i] = y[i] + (at - r0);
        if (whole) {
            end = at + whole * LORA_PANEL;
            add(m, p->rank, whole, low, n, p->scale, to);
        } else {
            end = at - skip + LORA_PANEL < b ? at - skip + LORA_PANEL : b;
            add_partial(add, m, p, low, to, n, skip, skip + end - at);
        }
    }
}

void cpu_lora_prefetch(const struct lora_work *l, int c0, int c1, int r0, int r1,
                       struct gemm_prefetch *prefetch)
{
    int room = (int)(sizeof prefetch->at / sizeof *prefetch->at);
    for (int c = c0; c < c1; c++) {
        const struct cpu_lora_matrix *m = l->chunks[c].m;
        for (int i = 0; i < m->n_parts && (c == c0 || m != l->chunks[c - 1].m); i++) {
            const struct cpu_lora_part *p = &m->parts[i];
            int a = r0 > p->first ? r0 : p->first, b = r1 < p->first + p->n ? r1 : p->first + p->n;
            if (a >= b || prefetch->n == room)
                continue;
            size_t panel = (size_t)p->rank * LORA_PANEL;
            prefetch->at[prefetch->n] =
                (const char *)(p->b + panel * (size_t)(a / LORA_PANEL - p->first / LORA_PANEL));
            prefetch->bytes[prefetch->n++] = panel * (size_t)panels_of(a, b - a) * sizeof(uint16_t);
        }
    }
}

void cpu_lora_up(const struct cpu_backend *cb, const struct lora_work *l, int c0, int c1, int row0,
                 int n, int r0, int r1, float *y, size_t stride)
{
    const struct cpu_lora_state *s = cb->lora;
    for (int c = c0; c < c1; c++) {
        const struct lora_chunk *k = &l->chunks[c];
        const float *t[LORA_ROWS];
        float *to[LORA_ROWS];
        int rows = 0;
        for (int i = 0; i < k->n; i++) {
            int row = l->entries[k->first + i].row - row0;
            if (row < 0 || row >= n)
                continue;
            t[rows] = s->t + (size_t)(k->first + i) * s->t_len;
            to[rows++] = y + (size_t)row * stride;
        }
        for (int i = 0; rows && i < k->m->n_parts; i++)
            add_part(cb, &k->m->parts[i], t, to, rows, r0, r1);
    }
}
