/*
 * linear and ffn over the kernel table, and the table itself. Work is cut into units of weight rows
 * that threads claim: whole rows of output, so the cut never changes a result. Owns
 * the scratch of all products; knows no kernel's inside.
 */
#include "backend/cpu/matmul.h"
#include "backend/cpu/cpu.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/generic.h"
#include "backend/cpu/panel.h"
#include "base/mem.h"

#include <limits.h>
#include <string.h>

#define PACKED(type, kernel)                                                                       \
    {#kernel, type, true, false, 1, INT_MAX, ISA_VNNI, mm_##kernel##_vnni},                        \
        {#kernel, type, true, false, 1, INT_MAX, ISA_AVX512, mm_##kernel##_avx512},                \
    {                                                                                              \
#kernel, type, true, false, 1, INT_MAX, ISA_AVX2, mm_##kernel##_avx2                       \
    }

#define FPACKED(type, kernel)                                                                      \
    {#kernel, type, true, false, 1, INT_MAX, ISA_AVX512, mm_##kernel##_avx512},                    \
    {                                                                                              \
#kernel, type, true, false, 1, INT_MAX, ISA_AVX2, mm_##kernel##_avx2                       \
    }

/* Input rows from which 8-bit tiles are used, and from which weights are converted to bf16. Measured
 * against VNNI on a Xeon: 16 rows were 7 to 20 % and 18 to 48 % slower, 128 rows of Q4_K 1.6 and 2.6
 * times as fast, of Q6_K 1.03 and 1.3 times. Where between them it turns has not been measured. */
enum { AMX_MIN = 32, HALVES_MIN = 24 };

#define TILED(type, kernel)                                                                        \
    {"gemm16 " #kernel, type, true, true, 1, INT_MAX, ISA_AMX, mm_gemm16_##kernel##_amx},          \
    {                                                                                              \
        "gemm " #kernel, type, true, false, AMX_MIN, INT_MAX, ISA_AMX, mm_gemm_##kernel##_amx      \
    }

static const struct mm_variant variants[] = {
    TILED(DT_Q4_K, q4k),
    TILED(DT_Q5_K, q5k),
    TILED(DT_Q6_K, q6k),
    TILED(DT_IQ4_XS, iq4xs),
    TILED(DT_Q8_0, q8_0),
    TILED(DT_Q4_0, q4_0),
    TILED(DT_IQ4_NL, iq4nl),
    TILED(DT_MXFP4, mxfp4),
    PACKED(DT_Q4_K, q4k),
    PACKED(DT_Q5_K, q5k),
    PACKED(DT_Q6_K, q6k),
    PACKED(DT_IQ4_XS, iq4xs),
    PACKED(DT_Q8_0, q8_0),
    PACKED(DT_Q4_0, q4_0),
    PACKED(DT_IQ4_NL, iq4nl),
    PACKED(DT_MXFP4, mxfp4),
    PACKED(DT_GPTQ4, gptq4),
    FPACKED(DT_F32, f32),
    FPACKED(DT_F16, f16),
    FPACKED(DT_BF16, bf16),
    FPACKED(DT_F8_E4M3, f8),
    {"generic", DT_COUNT, false, false, 1, INT_MAX, ISA_AVX512, mm_generic_avx512},
    {"generic", DT_COUNT, false, false, 1, INT_MAX, ISA_AVX2, mm_generic_avx2},
};

const struct mm_variant *mm_variants(int *n)
{
    *n = (int)(sizeof variants / sizeof *variants);
    return variants;
}

static const struct mm_variant *find(const struct mm_seg *seg, int rows, enum isa isa, bool halves)
{
    int n;
    const struct mm_variant *v = mm_variants(&n);
    for (int i = 0; i < n; i++, v++)
        if ((v->type == seg->type || v->type == DT_COUNT) && v->packed == seg->packed &&
            v->halves == halves && isa >= v->isa && rows >= v->min_rows && rows <= v->max_rows)
            return v;
    return NULL;
}

const struct mm_variant *mm_pick(const struct mm_seg *seg, int rows, enum isa isa, bool halves)
{
    const struct mm_variant *v = find(seg, rows, isa, halves);
    CHECK(v, "no kernel for %s on %s", dtype_name(seg->type), isa_name(isa));
    return v;
}

bool mm_halves(const struct cpu_backend *cb, const struct mm_weight *w, int load)
{
    if (!cb->mm->xh || cb->base.deterministic || load < HALVES_MIN)
        return false;
    for (int i = 0; i < w->n_seg; i++)
        if (!find(&w->seg[i], load, cb->isa, true) || w->seg[i].first_row % MM_PANEL)
            return false;
    return true;
}

/* A thread's scratch: results on their way (tiles of MM_TILE floats), then the kernel's. */
enum { N_TILES = 4 };

static uint8_t *thread_scratch(const struct cpu_backend *cb, int ith)
{
    return cb->mm->threads + (size_t)ith * cb->mm->thread_bytes;
}

float *mm_tile(const struct cpu_backend *cb, int ith, int i)
{
    return (float *)thread_scratch(cb, ith) + (size_t)i * MM_TILE;
}

static void *kernel_scratch(const struct cpu_backend *cb, int ith)
{
    return thread_scratch(cb, ith) + (size_t)N_TILES * MM_TILE * sizeof(float);
}

static size_t round64(size_t n)
{
    return (n + 63) & ~(size_t)63;
}

bool mm_few_ahead;

bool mm_init(struct cpu_backend *cb, struct error *err)
{
#ifdef __x86_64__
    __builtin_cpu_init();
    mm_few_ahead = !__builtin_cpu_is("amd");
#endif
    const struct bounds *s = &cb->bounds;
    const struct network_max *max = &cb->max;
    int n_embd = cb->net->n_embd, widest = n_embd, dims[] = {max->n_ff, max->n_ff_exp, max->heads};
    for (int i = 0; i < 3; i++)
        widest = dims[i] > widest ? dims[i] : widest;
    struct matmul *m = mem_aligned(sizeof *m);
    if (!m)
        mem_die(sizeof *m);
    memset(m, 0, sizeof *m);
    cb->mm = m;
    /* The generic kernel's rows, or GPTQ4's permuted inputs: a row of floats and 8 records. */
    size_t kernel = mm_generic_scratch(widest);
    size_t permuted = (size_t)widest * sizeof(float) + 8 * x_layout(widest).bytes;
    kernel = kernel > permuted ? kernel : permuted;
    if (cb->isa >= ISA_AMX && mm_gemm_scratch_amx(widest) > kernel)
        kernel = mm_gemm_scratch_amx(widest);
    if (cb->isa >= ISA_AMX && gemm16_scratch(widest) > kernel)
        kernel = gemm16_scratch(widest);
    kernel = round64(kernel);
    m->thread_bytes = round64((size_t)N_TILES * MM_TILE * sizeof(float) + kernel);
    size_t n_threads = (size_t)pool_size(cb->pool);
    m->threads = mem_aligned(m->thread_bytes * n_threads);
    size_t per_row = (size_t)max->n_ff;
    if ((size_t)max->n_ff_exp * (size_t)max->n_expert_used > per_row)
        per_row = (size_t)max->n_ff_exp * (size_t)max->n_expert_used;
    m->hidden_bytes = round64((size_t)s->max_tokens * per_row * sizeof(float));
    m->hidden = mem_aligned(m->hidden_bytes);
    size_t ffn = x_layout(max->n_ff).bytes;
    size_t moe = x_layout(max->n_ff_exp).bytes * (size_t)max->n_expert_used;
    m->hidden_q_bytes = (size_t)s->max_tokens * (ffn > moe ? ffn : moe);
    m->hidden_q = mem_aligned(m->hidden_q_bytes);
    m->xq_bytes = (size_t)s->max_tokens * x_layout(widest).bytes;
    m->xq = mem_aligned(m->xq_bytes);
    bool halves = true;
    if (cb->isa >= ISA_AMX) {
        size_t tokens = (size_t)s->max_tokens + MM_PAD;
        size_t slots = (size_t)s->max_tokens * (size_t)max->n_expert_used + MM_PAD;
        size_t linear = tokens * half_stride(widest), gathered = slots * half_stride(n_embd);
        size_t dense = tokens * half_stride(max->n_ff),
               experts = slots * half_stride(max->n_ff_exp);
        m->xh_bytes = max->n_expert && gathered > linear ? gathered : linear;
        m->hidden_h_bytes = max->n_expert && experts > dense ? experts : dense;
        m->xh = mem_aligned(m->xh_bytes);
        m->hidden_h = mem_aligned(m->hidden_h_bytes);
        halves = m->xh && m->hidden_h;
    }
    if (!m->threads || !m->hidden || !m->hidden_q || !m->xq || !halves)
        return error_set(err, "out of memory: %zu bytes of scratch",
                         m->thread_bytes * n_threads + m->hidden_bytes + m->hidden_q_bytes +
                             m->xq_bytes + m->xh_bytes + m->hidden_h_bytes);
    return moe_init(cb, err);
}

void mm_clear(struct cpu_backend *cb)
{
    struct matmul *m = cb->mm;
    if (!m)
        return;
    moe_clear(cb);
    mem_aligned_free(m->threads, m->thread_bytes * (size_t)pool_size(cb->pool));
    mem_aligned_free(m->hidden, m->hidden_bytes);
    mem_aligned_free(m->hidden_q, m->hidden_q_bytes);
    mem_aligned_free(m->xq, m->xq_bytes);
    mem_aligned_free(m->xh, m->xh_bytes);
    mem_aligned_free(m->hidden_h, m->hidden_h_bytes);
    mem_aligned_free(m, sizeof *m);
    cb->mm = NULL;
}

/* A packed range that does not start on a panel goes through a tile: compute whole panels, copy. */
static void call_offset(const struct cpu_backend *cb, int ith, struct mm_call *c)
{
    int skip = c->row % MM_PANEL, n_rows = c->n_rows;
    float *y = c->y, *tile = mm_tile(cb, ith, N_TILES - 1);
    size_t stride = c->stride;
    CHECK(c->n <= MM_MANY, "unaligned block of %d rows", c->n);
    int at = 0;
    while (at < n_rows) {
        int width = MM_UNIT - skip < n_rows - at ? MM_UNIT - skip : n_rows - at;
        c->row -= skip;
        c->n_rows = skip + width;
        c->bias = NULL;
        c->y = tile;
        c->stride = MM_UNIT;
        mm_pick(c->seg, c->n, cb->isa, c->x->h != NULL)->fn(c);
        for (int i = 0; i < c->n; i++)
            memcpy(y + (size_t)i * stride + at, tile + (size_t)i * MM_UNIT + skip,
                   (size_t)width * sizeof(float));
        c->row += skip + width;
        at += width;
        skip = 0;
    }
}

void mm_block(const struct cpu_backend *cb, int ith, const struct mm_weight *w, int e, int r0,
              int r1, const struct mm_x *x, const int32_t *rows, int n, float *y, size_t stride)
{
    CHECK(!x->h || !rows, "halves are in the order they are used in");
    for (int i = 0; i < w->n_seg; i++) {
        const struct mm_seg *seg = &w->seg[i];
        int a = r0 > seg->first_row ? r0 : seg->first_row;
        int end = seg->first_row + seg->rows, b = r1 < end ? r1 : end;
        if (a >= b || n == 0)
            continue;
        struct mm_call c = {.w = w,
                            .seg = seg,
                            .expert = e,
                            .row = a - seg->first_row,
                            .n_rows = b - a,
                            .x = x,
                            .rows = rows,
                            .n = n,
                            .y = y + (a - r0),
                            .stride = stride,
                            .bias = w->bias ? w->bias + a : NULL,
                            .scratch = kernel_scratch(cb, ith)};
        if (!seg->packed || c.row % MM_PANEL == 0) {
            mm_pick(seg, n, cb->isa, x->h != NULL)->fn(&c);
        } else {
            call_offset(cb, ith, &c);
            for (int t = 0; w->bias && t < n; t++)
                for (int j = 0; j < b - a; j++)
                    y[(size_t)t * stride + (size_t)(a - r0 + j)] += w->bias[a + j];
        }
    }
}

int mm_width(int n, bool halves)
{
    int most = n < MM_MANY ? n : MM_MANY;
    return n <= MM_FEW || halves ? MM_TILE / most / MM_UNIT * MM_UNIT : MM_UNIT;
}

void mm_start(struct matmul *m)
{
    m->stamp += m->stamp == ~0u ? 2 : 1;
}

/* Inputs */

/* Columns [first, first + len) of a row, for w to read. */
static void quantize(const struct cpu_backend *cb, const struct mm_weight *w, const float *x,
                     int first, int len, uint8_t *record)
{
    if (cb->isa >= ISA_AVX512)
        x_quantize_avx512(x, w->n_in, first, len, w->wants_fine, record);
    else
        x_quantize_avx2(x, w->n_in, first, len, w->wants_fine, record);
}

struct mm_x mm_x_at(struct mm_x x, int row)
{
    if (x.x)
        x.x += (size_t)row * (size_t)x.n_in;
    if (x.q)
        x.q += (size_t)row * x_layout(x.n_in).bytes;
    if (x.h)
        x.h += (size_t)row * half_stride(x.n_in);
    return x;
}

/* Columns of a piece of quantising, so that one row spreads over the threads too. */
enum { CODE_COLUMNS = 1024 };

struct mm_source mm_source(const struct cpu_backend *cb, const struct mm_weight *w, const float *x,
                           int rows, bool halves)
{
    struct mm_source s = {.x = {.n_in = w->n_in, .x = x}, .w = w, .from = x};
    if (halves) {
        s.x.h = cb->mm->xh;
        s.n_pieces = rows;
        return s;
    }
    s.x.stamp = cb->mm->stamp;
    if (w->wants_q) {
        s.x.q = cb->mm->xq;
        s.n_pieces = rows * ((w->n_in + CODE_COLUMNS - 1) / CODE_COLUMNS);
    }
    return s;
}

struct mm_source mm_source_ordered(const struct cpu_backend *cb, const struct mm_weight *w,
                                   const float *x, const int32_t *order, int n)
{
    struct mm_source s = mm_source(cb, w, x, n, true);
    s.order = order;
    return s;
}

void mm_convert(const struct cpu_backend *cb, const struct mm_source *s, int first, int last)
{
    int n_in = s->w->n_in, per_row = (n_in + CODE_COLUMNS - 1) / CODE_COLUMNS;
    if (s->x.h) {
        for (int i = first; i < last; i++)
            x_halves_amx(s->from + (size_t)(s->order ? s->order[i] : i) * (size_t)n_in, n_in,
                         (uint16_t *)(cb->mm->xh + (size_t)i * half_stride(n_in)));
        return;
    }
    size_t bytes = x_layout(n_in).bytes;
    for (int u = first; u < last; u++) {
        int t = u / per_row, k = u % per_row * CODE_COLUMNS;
        int len = n_in - k < CODE_COLUMNS ? n_in - k : CODE_COLUMNS;
        quantize(cb, s->w, s->from + (size_t)t * (size_t)n_in + k, k, len,
                 cb->mm->xq + (size_t)t * bytes);
    }
}

struct mm_x mm_hidden(const struct cpu_backend *cb, const struct mm_weight *down, bool halves)
{
    return (struct mm_x){down->n_in, down->wants_x ? cb->mm->hidden : NULL,
                         down->wants_q && !halves ? cb->mm->hidden_q : NULL,
                         halves ? cb->mm->hidden_h : NULL, cb->mm->stamp};
}

/* Linear */

static int units_of(int rows)
{
    return (rows + MM_UNIT - 1) / MM_UNIT;
}

/* Units [first, last) of w for all rows of x. */
static void linear_units(const struct cpu_backend *cb, int ith, int first, int last,
                         const struct mm_weight *w, const struct mm_x *x, float *y, int rows)
{
    int end = last * MM_UNIT < w->n_out ? last * MM_UNIT : w->n_out;
    /* Few rows read the whole range once; many go over two panels at a time, in the cache, which
     * kernels for halves do by themselves. */
    int step = rows <= MM_FEW || x->h ? end - first * MM_UNIT : MM_UNIT;
    for (int t = 0, most = mm_most(x); t < rows; t += most) {
        struct mm_x part = mm_x_at(*x, t);
        int n = rows - t < most ? rows - t : most;
        for (int r0 = first * MM_UNIT; r0 < end; r0 += step)
            mm_block(cb, ith, w, 0, r0, r0 + step < end ? r0 + step : end, &part, NULL, n,
                     y + (size_t)t * (size_t)w->n_out + r0, (size_t)w->n_out);
    }
}

struct linear_job {
    struct cpu_backend *cb;
    const struct mm_weight *w;
    struct mm_source in;
    float *y;
    int rows;
};

static struct pool_work linear_input(void *arg)
{
    const struct linear_job *j = arg;
    return (struct pool_work){j->in.n_pieces, POOL_EVEN};
}

static void linear_convert(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct linear_job *j = arg;
    mm_convert(j->cb, &j->in, first, last);
}

static struct pool_work linear_product(void *arg)
{
    const struct linear_job *j = arg;
    return (struct pool_work){units_of(j->w->n_out), mm_cut(j->rows <= MM_FEW)};
}

static void linear_multiply(void *arg, int ith, int first, int last)
{
    const struct linear_job *j = arg;
    linear_units(j->cb, ith, first, last, j->w, &j->in.x, j->y, j->rows);
}

void mm_linear(struct cpu_backend *cb, const struct mm_weight *w, const float *x, float *y,
               int rows)
{
    static const struct pool_phase phases[] = {{linear_input, linear_convert},
                                               {linear_product, linear_multiply}};
    if (rows == 0)
        return;
    mm_start(cb->mm);
    struct linear_job j = {cb, w, mm_source(cb, w, x, rows, mm_halves(cb, w, rows)), y, rows};
    pool_phases(cb->pool, phases, 2, &j);
}

/* ffn: units of hidden dimensions, gate and up together; then the down projection. */

void mm_glu_block(const struct cpu_backend *cb, int ith, const struct mm_weight *gate_up,
                  const struct mm_weight *down, const struct mm_x *hidden, int e, int h0, int h1,
                  const struct mm_x *x, const int32_t *rows, int n, int slot)
{
    int n_ff = gate_up->n_out / 2, width = h1 - h0;
    float *g = mm_tile(cb, ith, 0), *u = mm_tile(cb, ith, 1);
    mm_block(cb, ith, gate_up, e, h0, h1, x, rows, n, g, (size_t)width);
    mm_block(cb, ith, gate_up, e, n_ff + h0, n_ff + h1, x, rows, n, u, (size_t)width);
    size_t record = x_layout(n_ff).bytes;
    for (int i = 0; i < n; i++) {
        float *out = g + (size_t)i * (size_t)width;
        const float *up = u + (size_t)i * (size_t)width;
        if (cb->isa >= ISA_AVX512)
            x_glu_avx512(out, up, width);
        else
            x_glu_avx2(out, up, width);
        if (hidden->h)
            x_halves_amx(out, width,
                         (uint16_t *)(cb->mm->hidden_h + (size_t)(slot + i) * half_stride(n_ff)) +
                             h0);
        if (hidden->q)
            quantize(cb, down, out, h0, width, cb->mm->hidden_q + (size_t)(slot + i) * record);
        if (hidden->x)
            memcpy(cb->mm->hidden + (size_t)(slot + i) * (size_t)n_ff + h0, out,
                   (size_t)width * sizeof(float));
    }
}

struct ffn_job {
    struct cpu_backend *cb;
    const struct mm_weight *gate_up, *down;
    struct mm_source in;
    struct mm_x hidden;
    float *y;
    int rows;
};

static struct pool_work ffn_input(void *arg)
{
    const struct ffn_job *j = arg;
    return (struct pool_work){j->in.n_pieces, POOL_EVEN};
}

static void ffn_convert(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct ffn_job *j = arg;
    mm_convert(j->cb, &j->in, first, last);
}

static struct pool_work ffn_hidden(void *arg)
{
    const struct ffn_job *j = arg;
    return (struct pool_work){units_of(j->gate_up->n_out / 2), mm_cut(j->rows <= MM_FEW)};
}

static void ffn_glu(void *arg, int ith, int first, int last)
{
    const struct ffn_job *j = arg;
    const struct mm_x *x = &j->in.x;
    int n_ff = j->gate_up->n_out / 2, step = mm_width(j->rows, x->h != NULL);
    int end = last * MM_UNIT < n_ff ? last * MM_UNIT : n_ff;
    for (int t = 0, most = mm_most(x); t < j->rows; t += most) {
        struct mm_x part = mm_x_at(*x, t);
        int n = j->rows - t < most ? j->rows - t : most;
        for (int h0 = first * MM_UNIT; h0 < end; h0 += step)
            mm_glu_block(j->cb, ith, j->gate_up, j->down, &j->hidden, 0, h0,
                         h0 + step < end ? h0 + step : end, &part, NULL, n, t);
    }
}

static struct pool_work ffn_output(void *arg)
{
    const struct ffn_job *j = arg;
    return (struct pool_work){units_of(j->down->n_out), mm_cut(j->rows <= MM_FEW)};
}

static void ffn_down(void *arg, int ith, int first, int last)
{
    const struct ffn_job *j = arg;
    linear_units(j->cb, ith, first, last, j->down, &j->hidden, j->y, j->rows);
}

void mm_ffn(struct cpu_backend *cb, const struct mm_weight *gate_up, const struct mm_weight *down,
            const float *x, float *y, int rows)
{
    static const struct pool_phase phases[] = {
        {ffn_input, ffn_convert}, {ffn_hidden, ffn_glu}, {ffn_output, ffn_down}};
    if (rows == 0)
        return;
    mm_start(cb->mm);
    struct ffn_job j = {.cb = cb,
                        .gate_up = gate_up,
                        .down = down,
                        .in = mm_source(cb, gate_up, x, rows, mm_halves(cb, gate_up, rows)),
                        .hidden = mm_hidden(cb, down, mm_halves(cb, down, rows)),
                        .y = y,
                        .rows = rows};
    pool_phases(cb->pool, phases, 3, &j);
}
