/*
 * linear and ffn over the kernels that pick.c chooses. Threads claim units of weight rows. A unit is whole
 * rows of output, so the split never changes a result. Owns the scratch of all products, and knows
 * nothing about the inside of a kernel.
 */
#include "backend/cpu/gemm.h"
#include "backend/cpu/cpu.h"
#include "backend/cpu/gemm_kernels.h"
#include "backend/cpu/panel.h"
#include "backend/cpu/pick.h"
#include "base/mem.h"

#include <pthread.h>
#include <string.h>

bool gemm_takes_bf16(const struct cpu_backend *cb, const struct gemm_weight *w, int load)
{
    return pick_gemm(&cb->pick, w, &w->seg[0], load)->input == INPUT_BF16;
}

void gemm_count(struct cpu_backend *cb, const struct gemm_weight *w, int load, bool bf16)
{
    for (int i = 0; i < w->n_seg; i++)
        pick_count(&cb->pick, PICK_GEMM,
                   pick_gemm_for(&cb->pick, w, &w->seg[i], load > 1 ? load : 1, bf16));
}

bool gemm_stream(const struct cpu_backend *cb, const struct gemm_weight *w, int rows)
{
    return pick_gemm_for(&cb->pick, w, &w->seg[0], rows, false)->stream;
}

/* A thread's scratch: tiles of GEMM_TILE floats for results, then the kernel's own scratch. */
enum { N_TILES = 4 };

static uint8_t *thread_scratch(const struct cpu_backend *cb, int ith)
{
    return cb->gemm->threads + (size_t)ith * cb->gemm->thread_bytes;
}

float *gemm_tile(const struct cpu_backend *cb, int ith, int i)
{
    return (float *)thread_scratch(cb, ith) + (size_t)i * GEMM_TILE;
}

static void *kernel_scratch(const struct cpu_backend *cb, int ith)
{
    return thread_scratch(cb, ith) + (size_t)N_TILES * GEMM_TILE * sizeof(float);
}

static size_t round64(size_t n)
{
    return (n + 63) & ~(size_t)63;
}

bool gemm_prefetch_few;

static void look_at_cpu(void)
{
#ifdef __x86_64__
    gemm_prefetch_few = !cpu_is_amd();
#endif
}

bool gemm_init(struct cpu_backend *cb, struct error *err)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT; /* other engines may be running */
    pthread_once(&once, look_at_cpu);
    const struct bounds *s = &cb->bounds;
    const struct network_max *max = &cb->max;
    const struct weight *patches = cb->net->embed.patches;
    int n_embd = cb->net->n_embd, widest = n_embd;
    int dims[] = {max->n_ff,
                  max->n_ff_exp,
                  max->n_latent_exp,
                  max->heads,
                  cb->net->embed.layers.width,
                  max->latent,
                  cb->net->mtp.fc ? 2 * n_embd : 0,
                  cb->net->mtp.n_taps * n_embd,
                  max->merged,
                  cb->net->streams.head.w ? cb->net->streams.n * n_embd : 0,
                  patches ? patches->n_in : 0};
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
        widest = dims[i] > widest ? dims[i] : widest;
    struct gemm *m = mem_zalloc(1, sizeof *m);
    cb->gemm = m;
    /* Rows as floats; or, for GPTQ4's permuted inputs, a row of floats and 8 records. */
    size_t kernel = gemm_dequant_scratch(widest);
    size_t permuted = (size_t)widest * sizeof(float) + 8 * input_layout(widest).bytes;
    kernel = kernel > permuted ? kernel : permuted;
#ifdef __x86_64__
    if (isa_has(cb->isa, ISA_AMX) && gemm_int8_scratch_amx(widest) > kernel)
        kernel = gemm_int8_scratch_amx(widest);
#elif defined __aarch64__
    if (isa_has(cb->isa, ISA_I8MM) && gemm_int8_scratch_i8mm(widest) > kernel)
        kernel = gemm_int8_scratch_i8mm(widest);
#endif
    if (isa_has(cb->isa, ISA_AMX) && gemm_bf16_scratch(widest) > kernel)
        kernel = gemm_bf16_scratch(widest);
    if (isa_has(cb->isa, ISA_AMX) && gemm_split_scratch(widest) > kernel)
        kernel = gemm_split_scratch(widest);
    kernel = round64(kernel);
    m->thread_bytes = round64((size_t)N_TILES * GEMM_TILE * sizeof(float) + kernel);
    size_t n_threads = (size_t)pool_size(cb->pool);
    size_t per_row = (size_t)max->n_ff;
    if ((size_t)max->n_ff_exp * (size_t)max->n_expert_used > per_row)
        per_row = (size_t)max->n_ff_exp * (size_t)max->n_expert_used;
    size_t ffn = input_layout(max->n_ff).bytes;
    size_t moe = input_layout(max->n_ff_exp).bytes * (size_t)max->n_expert_used;
    size_t hidden = round64((size_t)s->max_tokens * per_row * sizeof(float));
    size_t hidden_q = (size_t)s->max_tokens * (ffn > moe ? ffn : moe);
    size_t xq = (size_t)s->max_tokens * input_layout(widest).bytes;
    bool ok = (m->threads = cpu_scratch(cb, m->thread_bytes * n_threads, "kernels", err)) &&
              (m->hidden = cpu_scratch(cb, hidden, "hidden units", err)) &&
              (m->hidden_q = cpu_scratch(cb, hidden_q, "hidden units", err)) &&
              (m->xq = cpu_scratch(cb, xq, "quantised inputs", err));
    if (isa_has(cb->isa, ISA_AMX)) {
        size_t tokens = (size_t)s->max_tokens + GEMM_PAD;
        size_t slots = (size_t)s->max_tokens * (size_t)max->n_expert_used + GEMM_PAD;
        /* Twice what most models need. Untouched memory costs nothing. */
        size_t linear = tokens * bf16_stride(2 * widest),
               gathered = slots * bf16_stride(2 * n_embd);
        size_t dense = tokens * bf16_stride(2 * max->n_ff),
               experts = slots * bf16_stride(2 * max->n_ff_exp);
        size_t xh = max->n_expert && gathered > linear ? gathered : linear;
        size_t hidden_h = max->n_expert && experts > dense ? experts : dense;
        ok = ok && (m->xh = cpu_scratch(cb, xh, "bf16 inputs", err)) &&
             (m->hidden_h = cpu_scratch(cb, hidden_h, "bf16 hidden units", err));
    }
    if (!ok)
        return false;
    return moe_init(cb, err);
}

void gemm_clear(struct cpu_backend *cb)
{
    struct gemm *m = cb->gemm;
    if (!m)
        return;
    moe_clear(cb);
    mem_free(m);
    cb->gemm = NULL;
}

/* Computes a packed range that does not start on a panel: whole panels into a tile, then a copy. */
static void call_offset(const struct cpu_backend *cb, int ith, struct gemm_call *c,
                        void (*gemm)(const struct gemm_call *c))
{
    int skip = c->row % GEMM_PANEL, n_rows = c->n_rows;
    float *y = c->y, *tile = gemm_tile(cb, ith, N_TILES - 1);
    size_t stride = c->stride;
    CHECK(c->n <= GEMM_MANY, "unaligned block of %d rows", c->n);
    int at = 0;
    while (at < n_rows) {
        int width = GEMM_UNIT - skip < n_rows - at ? GEMM_UNIT - skip : n_rows - at;
        c->row -= skip;
        c->n_rows = skip + width;
        c->bias = NULL;
        c->y = tile;
        c->stride = GEMM_UNIT;
        gemm(c);
        for (int i = 0; i < c->n; i++)
            memcpy(y + (size_t)i * stride + at, tile + (size_t)i * GEMM_UNIT + skip,
                   (size_t)width * sizeof(float));
        c->row += skip + width;
        at += width;
        skip = 0;
    }
}

/* gemm_block; `prefetch` is memory that is read next (or NULL). */
static void block_prefetching(const struct cpu_backend *cb, int ith, const struct gemm_weight *w,
                              int e, int r0, int r1, const struct gemm_x *x, const int32_t *rows,
                              int n, float *y, size_t stride, const struct gemm_prefetch *prefetch)
{
    CHECK(!x->h || !rows, "bf16 rows are read in order, without a list");
    const float *bias = w->bias ? w->bias + (size_t)e * (size_t)w->n_out : NULL;
    for (int i = 0; i < w->n_seg; i++) {
        const struct gemm_seg *seg = &w->seg[i];
        int a = r0 > seg->first_row ? r0 : seg->first_row;
        int end = seg->first_row + seg->rows, b = r1 < end ? r1 : end;
        if (a >= b || n == 0)
            continue;
        struct gemm_call c = {.w = w,
                              .seg = seg,
                              .expert = w->place ? w->place[e] : e,
                              .row = a - seg->first_row,
                              .n_rows = b - a,
                              .x = x,
                              .rows = rows,
                              .n = n,
                              .y = y + (a - r0),
                              .stride = stride,
                              .bias = bias ? bias + a : NULL,
                              .scratch = kernel_scratch(cb, ith),
                              .prefetch = prefetch};
        void (*gemm)(const struct gemm_call *c) =
            pick_gemm_for(&cb->pick, w, seg, n, x->h != NULL)->gemm;
        if (!seg->packed || c.row % GEMM_PANEL == 0) {
            gemm(&c);
        } else {
            call_offset(cb, ith, &c, gemm);
            for (int t = 0; bias && t < n; t++)
                for (int j = 0; j < b - a; j++)
                    y[(size_t)t * stride + (size_t)(a - r0 + j)] += bias[a + j];
        }
    }
}

void gemm_block(const struct cpu_backend *cb, int ith, const struct gemm_weight *w, int e, int r0,
                int r1, const struct gemm_x *x, const int32_t *rows, int n, float *y, size_t stride)
{
    block_prefetching(cb, ith, w, e, r0, r1, x, rows, n, y, stride, NULL);
}

/* The same, plus what chunks [c0, c1) of adapters add. Row i of x is row row0 + i of the adapters'
 * entries. */
static void block_and_up(const struct cpu_backend *cb, int ith, const struct gemm_weight *w, int e,
                         int r0, int r1, const struct gemm_x *x, const int32_t *rows, int n,
                         float *y, size_t stride, const struct lora_work *lora, int c0, int c1,
                         int row0)
{
    struct gemm_prefetch prefetch = {0};
    cpu_lora_prefetch(lora, c0, c1, r0, r1, &prefetch);
    block_prefetching(cb, ith, w, e, r0, r1, x, rows, n, y, stride, &prefetch);
    cpu_lora_up(cb, lora, c0, c1, row0, n, r0, r1, y, stride);
}

int gemm_width(const struct cpu_backend *cb, const struct gemm_weight *w, int n, bool bf16)
{
    int most = n < GEMM_MANY ? n : GEMM_MANY;
    return bf16 || gemm_stream(cb, w, n) ? GEMM_TILE / most / GEMM_UNIT * GEMM_UNIT : GEMM_UNIT;
}

void gemm_start(struct gemm *m)
{
    m->stamp += m->stamp == ~0u ? 2 : 1;
}

/* Inputs */

/* Quantises columns [first, first + len) of a row for w. */
static void quantize(const struct cpu_backend *cb, const struct gemm_weight *w, const float *x,
                     int first, int len, uint8_t *record)
{
#ifdef __x86_64__
    if (isa_has(cb->isa, ISA_AVX512))
        input_quantize_avx512(x, w->n_in, first, len, w->wants_fine, record);
    else
        input_quantize_avx2(x, w->n_in, first, len, w->wants_fine, record);
#elif defined __aarch64__
    (void)cb;
    input_quantize_neon(x, w->n_in, first, len, w->wants_fine, record);
#else /* no row of the tables leads here */
    (void)cb, (void)w, (void)x, (void)first, (void)len, (void)record;
#endif
}

struct gemm_x gemm_x_at(struct gemm_x x, int row)
{
    if (x.x)
        x.x += (size_t)row * (size_t)x.n_in;
    if (x.q)
        x.q += (size_t)row * input_layout(x.n_in).bytes;
    if (x.h)
        x.h += (size_t)row * gemm_bf16_stride(&x);
    return x;
}

/* Converts columns [first, first + len) of row `row` of x, at `to`, to bf16. */
static void to_bf16(const struct gemm_x *x, uint8_t *to, int row, int first, int len,
                    const float *from)
{
    uint16_t *out = (uint16_t *)(to + (size_t)row * gemm_bf16_stride(x)) + first;
#ifdef __x86_64__
    if (x->split)
        input_split_amx(from, len, out, out + x->n_in);
    else
        input_bf16_amx(from, len, out);
#else /* no row of the tables leads here */
    (void)out, (void)len, (void)from;
#endif
}

/* Columns per piece of quantisation, so that even a single row uses several threads. */
enum { CODE_COLUMNS = 1024 };

struct gemm_source gemm_source(const struct cpu_backend *cb, const struct gemm_weight *w,
                               const float *x, int rows, bool bf16)
{
    struct gemm_source s = {.x = {.n_in = w->n_in, .x = x}, .w = w, .from = x};
    if (bf16) {
        s.x.h = cb->gemm->xh;
        s.x.split = panel_reads_split(w->seg[0].type);
        s.n_pieces = rows;
        return s;
    }
    s.x.stamp = cb->gemm->stamp;
    if (w->wants_q) {
        s.x.q = cb->gemm->xq;
        s.n_pieces = rows * ((w->n_in + CODE_COLUMNS - 1) / CODE_COLUMNS);
    }
    return s;
}

struct gemm_source gemm_source_ordered(const struct cpu_backend *cb, const struct gemm_weight *w,
                                       const float *x, const int32_t *order, int n)
{
    struct gemm_source s = gemm_source(cb, w, x, n, true);
    s.order = order;
    return s;
}

void gemm_convert(const struct cpu_backend *cb, const struct gemm_source *s, int first, int last)
{
    int n_in = s->w->n_in, per_row = (n_in + CODE_COLUMNS - 1) / CODE_COLUMNS;
    if (s->x.h) {
        for (int i = first; i < last; i++)
            to_bf16(&s->x, cb->gemm->xh, i, 0, n_in,
                    s->from + (size_t)(s->order ? s->order[i] : i) * (size_t)n_in);
        return;
    }
    size_t bytes = input_layout(n_in).bytes;
    for (int u = first; u < last; u++) {
        int t = u / per_row, k = u % per_row * CODE_COLUMNS;
        int len = n_in - k < CODE_COLUMNS ? n_in - k : CODE_COLUMNS;
        quantize(cb, s->w, s->from + (size_t)t * (size_t)n_in + k, k, len,
                 cb->gemm->xq + (size_t)t * bytes);
    }
}

struct gemm_x gemm_hidden(const struct cpu_backend *cb, const struct gemm_weight *down, bool bf16)
{
    const struct pick_row *forced = cb->pick.forced[PICK_GEMM];
    bool floats = (down->wants_x && !bf16) || (forced && forced->input == INPUT_FLOATS);
    return (struct gemm_x){.n_in = down->n_in,
                           .x = floats ? cb->gemm->hidden : NULL,
                           .q = down->wants_q && !bf16 ? cb->gemm->hidden_q : NULL,
                           .h = bf16 ? cb->gemm->hidden_h : NULL,
                           .split = bf16 && panel_reads_split(down->seg[0].type),
                           .stamp = cb->gemm->stamp};
}

/* Converts rows of a head into this thread's tiles: bf16 takes three of them; otherwise floats take
 * one and records the next two. */
static struct gemm_x head_rows(const struct cpu_backend *cb, int ith, const struct gemm_weight *w,
                               bool bf16)
{
    uint8_t *first = (uint8_t *)gemm_tile(cb, ith, 0), *next = (uint8_t *)gemm_tile(cb, ith, 1);
    return (struct gemm_x){.n_in = w->n_in,
                           .x = bf16 ? NULL : (float *)first,
                           .q = w->wants_q && !bf16 ? next : NULL,
                           .h = bf16 ? first : NULL,
                           .split = bf16 && panel_reads_split(w->seg[0].type)};
}

int gemm_head_most(const struct cpu_backend *cb, const struct gemm_weight *w, bool bf16)
{
    struct gemm_x x = head_rows(cb, 0, w, bf16);
    size_t room = (size_t)(N_TILES - 1) * GEMM_TILE * sizeof(float);
    int n = bf16 ? (int)(room / gemm_bf16_stride(&x)) - GEMM_PAD : GEMM_TILE / w->n_in;
    int most = gemm_most(&x);
    return n < most ? n : most;
}

void gemm_head(const struct cpu_backend *cb, int ith, const struct gemm_weight *w, int e,
               const float *from, size_t apart, int n, bool bf16, float *y, size_t stride)
{
    struct gemm_x x = head_rows(cb, ith, w, bf16);
    size_t width = (size_t)w->n_in, bytes = input_layout(w->n_in).bytes;
    for (int i = 0; i < n; i++, from += apart) {
        if (x.h)
            to_bf16(&x, (uint8_t *)gemm_tile(cb, ith, 0), i, 0, w->n_in, from);
        if (x.x)
            memcpy(gemm_tile(cb, ith, 0) + (size_t)i * width, from, width * sizeof(float));
        if (x.q)
            quantize(cb, w, from, 0, w->n_in, (uint8_t *)gemm_tile(cb, ith, 1) + (size_t)i * bytes);
    }
    gemm_block(cb, ith, w, e, 0, w->n_out, &x, NULL, n, y, stride);
}

/* Linear */

static int units_of(int rows)
{
    return (rows + GEMM_UNIT - 1) / GEMM_UNIT;
}

/* Multiplies units [first, last) of w by all rows of x, and adds the adapters' changes. */
static void linear_units(const struct cpu_backend *cb, int ith, int first, int last,
                         const struct gemm_weight *w, int e, const struct gemm_x *x,
                         const struct lora_work *lora, float *y, int rows)
{
    int end = last * GEMM_UNIT < w->n_out ? last * GEMM_UNIT : w->n_out;
    /* Few rows read the whole range once. Many rows take two panels at a time, which stay in the
     * cache; bf16 kernels do that themselves. */
    int step = x->h || gemm_stream(cb, w, rows) ? end - first * GEMM_UNIT : GEMM_UNIT;
    for (int t = 0, most = gemm_most(x); t < rows; t += most) {
        struct gemm_x part = gemm_x_at(*x, t);
        int n = rows - t < most ? rows - t : most;
        for (int r0 = first * GEMM_UNIT; r0 < end; r0 += step) {
            int r1 = r0 + step < end ? r0 + step : end;
            float *to = y + (size_t)t * (size_t)w->n_out + r0;
            block_and_up(cb, ith, w, e, r0, r1, &part, NULL, n, to, (size_t)w->n_out, lora, 0,
                         lora->n_chunks, t);
        }
    }
}

/* Runs pieces [first, last) of a phase that converts the input and multiplies it by the adapters'
 * A. */
static void convert_and_low(const struct cpu_backend *cb, const struct gemm_source *in,
                            const struct lora_work *lora, int first, int last)
{
    int n = in->n_pieces;
    if (first < n)
        gemm_convert(cb, in, first, last < n ? last : n);
    if (last > n)
        cpu_lora_low(cb, lora, in->from, in->w->n_in, false, first > n ? first - n : 0, last - n);
}

struct linear_job {
    struct cpu_backend *cb;
    const struct gemm_weight *w;
    int expert;
    struct gemm_source in;
    float *y;
    int rows;
    struct lora_work lora;
};

static struct pool_work linear_input(void *arg)
{
    const struct linear_job *j = arg;
    return (struct pool_work){j->in.n_pieces + j->lora.n_units, POOL_EVEN};
}

static void linear_convert(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct linear_job *j = arg;
    convert_and_low(j->cb, &j->in, &j->lora, first, last);
}

static struct pool_work linear_product(void *arg)
{
    const struct linear_job *j = arg;
    return (struct pool_work){units_of(j->w->n_out), gemm_cut(j->cb, j->w, j->rows)};
}

static void linear_multiply(void *arg, int ith, int first, int last)
{
    const struct linear_job *j = arg;
    linear_units(j->cb, ith, first, last, j->w, j->expert, &j->in.x, &j->lora, j->y, j->rows);
}

static void linear(struct cpu_backend *cb, const struct gemm_weight *w, int e, const float *x,
                   float *y, int rows, struct lora_work lora)
{
    static const struct pool_phase phases[] = {{linear_input, linear_convert},
                                               {linear_product, linear_multiply}};
    if (rows == 0)
        return;
    gemm_start(cb->gemm);
    struct linear_job j = {cb, w,    e,   gemm_source(cb, w, x, rows, gemm_takes_bf16(cb, w, rows)),
                           y,  rows, lora};
    gemm_count(cb, w, rows, j.in.x.h != NULL);
    pool_phases(cb->pool, phases, 2, &j);
}

void gemm_linear(struct cpu_backend *cb, const struct weight *w, const float *x, float *y, int rows)
{
    linear(cb, w->impl, 0, x, y, rows, cpu_lora_work(cb, w, LORA_FIRST));
}

void gemm_linear_of(struct cpu_backend *cb, const struct weight *w, int e, const float *x, float *y,
                    int rows)
{
    linear(cb, w->impl, e, x, y, rows, (struct lora_work){0});
}

/* ffn: units of hidden dimensions, gate and up together; then the down projection */

void gemm_activate(const struct cpu_backend *cb, const struct ffn *f, float *g, const float *u,
                   int n)
{
#ifdef __x86_64__
    if (isa_has(cb->isa, ISA_AVX512))
        input_glu_avx512(f, g, u, n);
    else
        input_glu_avx2(f, g, u, n);
#elif defined __aarch64__
    (void)cb;
    input_glu_neon(f, g, u, n);
#else /* a CPU without kernels for products runs the reference ops */
    (void)cb, (void)f, (void)g, (void)u, (void)n;
#endif
}

void gemm_glu_block(const struct cpu_backend *cb, int ith, const struct ffn *f,
                    const struct gemm_x *hidden, int e, int h0, int h1, const struct gemm_x *x,
                    const int32_t *rows, const float *weights, int n, int slot,
                    const struct lora_work *lora, int c0, int c1)
{
    const struct gemm_weight *gate_up = f->gate_up->impl, *down = f->down->impl;
    int n_ff = down->n_in, width = h1 - h0;
    float *g = gemm_tile(cb, ith, 0), *u = gemm_tile(cb, ith, 1);
    block_and_up(cb, ith, gate_up, e, h0, h1, x, rows, n, g, (size_t)width, lora, c0, c1, slot);
    if (gate_up->n_out > n_ff)
        block_and_up(cb, ith, gate_up, e, n_ff + h0, n_ff + h1, x, rows, n, u, (size_t)width, lora,
                     c0, c1, slot);
    size_t record = input_layout(n_ff).bytes;
    for (int i = 0; i < n; i++) {
        float *out = g + (size_t)i * (size_t)width;
        float *up = u + (size_t)i * (size_t)width;
        for (int k = 0; weights && k < width; k++) {
            out[k] *= weights[slot + i];
            up[k] *= weights[slot + i];
        }
        gemm_activate(cb, f, out, up, width);
        if (hidden->h)
            to_bf16(hidden, cb->gemm->hidden_h, slot + i, h0, width, out);
        if (hidden->q)
            quantize(cb, down, out, h0, width, cb->gemm->hidden_q + (size_t)(slot + i) * record);
        if (hidden->x)
            memcpy(cb->gemm->hidden + (size_t)(slot + i) * (size_t)n_ff + h0, out,
                   (size_t)width * sizeof(float));
    }
}

struct ffn_job {
    struct cpu_backend *cb;
    const struct ffn *f;
    const struct gemm_weight *gate_up, *down; /* of f */
    struct gemm_source in;
    struct gemm_x hidden;
    float *y;
    int rows;
    struct lora_work lora, lora_down;
};

static struct pool_work ffn_input(void *arg)
{
    const struct ffn_job *j = arg;
    return (struct pool_work){j->in.n_pieces + j->lora.n_units, POOL_EVEN};
}

static void ffn_convert(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct ffn_job *j = arg;
    convert_and_low(j->cb, &j->in, &j->lora, first, last);
}

static struct pool_work ffn_hidden(void *arg)
{
    const struct ffn_job *j = arg;
    return (struct pool_work){units_of(j->down->n_in), gemm_cut(j->cb, j->gate_up, j->rows)};
}

static void ffn_glu(void *arg, int ith, int first, int last)
{
    const struct ffn_job *j = arg;
    const struct gemm_x *x = &j->in.x;
    int n_ff = j->down->n_in, step = gemm_width(j->cb, j->gate_up, j->rows, x->h != NULL);
    int end = last * GEMM_UNIT < n_ff ? last * GEMM_UNIT : n_ff;
    for (int t = 0, most = gemm_most(x); t < j->rows; t += most) {
        struct gemm_x part = gemm_x_at(*x, t);
        int n = j->rows - t < most ? j->rows - t : most;
        for (int h0 = first * GEMM_UNIT; h0 < end; h0 += step)
            gemm_glu_block(j->cb, ith, j->f, &j->hidden, 0, h0, h0 + step < end ? h0 + step : end,
                           &part, NULL, NULL, n, t, &j->lora, 0, j->lora.n_chunks);
    }
}

/* With adapters: multiplies the hidden rows by down's A. */
static struct pool_work ffn_between(void *arg)
{
    const struct ffn_job *j = arg;
    return (struct pool_work){j->lora_down.n_units, POOL_EVEN};
}

static void ffn_low(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct ffn_job *j = arg;
    cpu_lora_low(j->cb, &j->lora_down, j->cb->gemm->hidden, j->down->n_in, true, first, last);
}

static struct pool_work ffn_output(void *arg)
{
    const struct ffn_job *j = arg;
    return (struct pool_work){units_of(j->down->n_out), gemm_cut(j->cb, j->down, j->rows)};
}

static void ffn_down(void *arg, int ith, int first, int last)
{
    const struct ffn_job *j = arg;
    linear_units(j->cb, ith, first, last, j->down, 0, &j->hidden, &j->lora_down, j->y, j->rows);
}

void gemm_ffn(struct cpu_backend *cb, const struct ffn *f, const float *x, float *y, int rows)
{
    static const struct pool_phase phases[] = {
        {ffn_input, ffn_convert}, {ffn_hidden, ffn_glu}, {ffn_output, ffn_down}};
    static const struct pool_phase adapted[] = {{ffn_input, ffn_convert},
                                                {ffn_hidden, ffn_glu},
                                                {ffn_between, ffn_low},
                                                {ffn_output, ffn_down}};
    if (rows == 0)
        return;
    const struct gemm_weight *gate_up = f->gate_up->impl, *down = f->down->impl;
    gemm_start(cb->gemm);
    struct ffn_job j = {.cb = cb,
                        .f = f,
                        .gate_up = gate_up,
                        .down = down,
                        .in = gemm_source(cb, gate_up, x, rows, gemm_takes_bf16(cb, gate_up, rows)),
                        .hidden = gemm_hidden(cb, down, gemm_takes_bf16(cb, down, rows)),
                        .y = y,
                        .rows = rows,
                        .lora = cpu_lora_work(cb, f->gate_up, LORA_FIRST),
                        .lora_down = cpu_lora_work(cb, f->down, LORA_SECOND)};
    gemm_count(cb, gate_up, rows, j.in.x.h != NULL);
    gemm_count(cb, down, rows, j.hidden.h != NULL);
    if (j.lora_down.n_chunks) {
        j.hidden.x = cb->gemm->hidden; /* also as floats */
        pool_phases(cb->pool, adapted, 4, &j);
    } else {
        pool_phases(cb->pool, phases, 3, &j);
    }
}
