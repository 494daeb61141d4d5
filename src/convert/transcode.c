/*
 * See transcode.h. Work is split into chunks of rows up front. Threads take the next chunk from a
 * counter, so a chunk's result does not depend on the thread. Owns no file. Does not know the
 * meaning of tensors.
 */
#include "convert/transcode.h"
#include "backend/rawweight.h"
#include "quant/quantize.h"
#include "base/mem.h"
#include "base/pool.h"

#include <stdatomic.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { CHUNK_VALUES = 1 << 18 };

struct transcode_chunk {
    uint32_t tensor;
    int32_t mat;
    int64_t row;
    int32_t rows;
};

struct transcode_job {
    const struct transcode *t;
    struct gguf_writer *w;
    struct transcode_chunk *chunks; /* (n_chunks) */
    size_t n_chunks;
    size_t max_values, max_row; /* largest chunk, longest row */
    size_t total;               /* input bytes */
    atomic_size_t next, done;
    atomic_bool stop;
    pthread_mutex_t lock;
    struct error err; /* the first */
};

struct out_tensor *transcode_add(struct transcode *t, const char *name, int n_dims,
                                 const int64_t *dims)
{
    if (t->n == t->cap) {
        t->cap = t->cap ? 2 * t->cap : 64;
        t->tensors = mem_realloc(t->tensors, t->cap, sizeof *t->tensors);
    }
    struct out_tensor *o = &t->tensors[t->n++];
    *o = (struct out_tensor){.type = DT_F32, .n_dims = n_dims, .rows = 1, .n_mats = 1};
    CHECK(strlen(name) < sizeof o->name, "tensor name '%s' is too long", name);
    snprintf(o->name, sizeof o->name, "%s", name);
    for (int d = 0; d < TENSOR_MAX_DIMS; d++)
        o->dims[d] = d < n_dims ? dims[d] : 1;
    return o;
}

void transcode_clear(struct transcode *t)
{
    for (size_t i = 0; i < t->n; i++) {
        mem_free(t->tensors[i].mats);
        mem_free(t->tensors[i].values);
        mem_free(t->tensors[i].scales);
        mem_free(t->tensors[i].order);
        mem_free(t->tensors[i].columns);
        mem_free(t->tensors[i].row_times);
        mem_free(t->tensors[i].merges);
        mem_free(t->tensors[i].merge_rows);
    }
    mem_free(t->tensors);
    *t = (struct transcode){0};
}

int transcode_sources(const struct out_tensor *o)
{
    const struct input_matrix *s = o->mats;
    bool stacked =
        o->n_mats > 1 &&
        (s->layout.kind != LAYOUT_PLAIN ? s->layout.n_stack > 0 : s->data->dims[2] == o->n_mats);
    return stacked ? 1 : o->n_mats;
}

/* The matrix a chunk reads, and its first row there. */
static const struct input_matrix *chunk_source(const struct out_tensor *o,
                                               const struct transcode_chunk *c, int64_t *row)
{
    bool stacked = transcode_sources(o) < o->n_mats;
    int64_t height = o->mats[0].tensor_rows ? o->mats[0].tensor_rows : o->rows;
    *row = stacked ? c->mat * height + c->row : c->row;
    return &o->mats[stacked ? 0 : c->mat];
}

static bool is_plain(const struct input_matrix *s)
{
    return s->layout.kind == LAYOUT_PLAIN && !s->tensor_rows;
}

/* The input row that becomes row r of the output. */
static int64_t interleaved_row(const struct out_tensor *o, int64_t r)
{
    if (!o->heads)
        return r;
    int64_t head_dim = o->rows / o->heads, head = r / head_dim, i = r % head_dim;
    return head * head_dim + i % 2 * (head_dim / 2) + i / 2;
}

static bool is_packed(const struct input_matrix *s)
{
    return s->layout.kind != LAYOUT_PLAIN;
}

/* Reads rows of a packed matrix in the formats of struct raw_seg, then converts them to floats. */
static bool read_packed(const struct transcode *t, const struct input_matrix *s,
                        const struct layout_rows *rows, float *out, struct error *err)
{
    const struct packed_layout *l = &s->layout;
    struct layout_bytes bytes = layout_bytes(l, rows->n);
    uint8_t *mem = mem_alloc(bytes.data + bytes.scale + bytes.zero + bytes.order + 64);
    struct layout_planes to = {.scale = mem};
    to.order = (int32_t *)(mem + (bytes.scale + 3) / 4 * 4);
    to.data = (uint8_t *)to.order + bytes.order;
    to.zero = to.data + bytes.data;
    bool permuted, ok = layout_read(l, t->in->path, rows, &to, &permuted, err);
    const uint8_t *data = to.data, *zero = to.zero;
    const void *scale = to.scale;
    const int32_t *order = to.order;
    struct raw_weight w = {.n_in = l->n_in, .n_out = rows->n, .n_expert = 1, .n_seg = 1};
    w.seg[0] = (struct raw_seg){l->type,
                                rows->n,
                                &data,
                                bytes.scale ? &scale : NULL,
                                bytes.zero ? &zero : NULL,
                                permuted ? &order : NULL,
                                l->group_len};
    for (int i = 0; ok && i < rows->n; i++)
        raw_weight_row(&w, 0, i, out + (size_t)i * (size_t)l->n_in);
    mem_free(mem);
    return ok;
}

/* Whether rows are in order. Otherwise they are read one by one. */
static bool in_order(const struct out_tensor *o)
{
    return !o->heads && !o->order;
}

/* The packed matrix's rows for n output rows from row r (n is 1 if they are out of order). */
static struct layout_rows packed_rows(const struct out_tensor *o, const struct input_matrix *s,
                                      const struct transcode_chunk *c, int64_t r, int n)
{
    int row = o->order ? o->order[r] : s->first + s->step * (int)interleaved_row(o, r);
    return (struct layout_rows){.index = s->layout.n_stack ? c->mat : 0,
                                .first = (int)s->offset + row,
                                .step = s->step,
                                .n = n};
}

/* Unpacks a chunk's rows from a packed matrix. If it is transposed, its rows are our columns. */
static bool unpack_chunk(const struct transcode *t, const struct out_tensor *o,
                         const struct input_matrix *s, const struct transcode_chunk *c, float *out,
                         struct error *err)
{
    size_t n = (size_t)o->dims[0], rows = (size_t)c->rows;
    if (!s->transposed && in_order(o) && !o->columns) {
        struct layout_rows all = packed_rows(o, s, c, c->row, c->rows);
        return read_packed(t, s, &all, out, err);
    }
    float *one = mem_zalloc((size_t)s->layout.n_in, sizeof *one);
    bool ok = true;
    for (size_t i = 0; ok && i < (s->transposed ? n : rows); i++) {
        struct layout_rows row =
            packed_rows(o, s, c, s->transposed ? (int64_t)i : c->row + (int64_t)i, 1);
        ok = read_packed(t, s, &row, one, err);
        for (size_t k = 0; ok && s->transposed && k < rows; k++)
            out[k * n + i] = one[(size_t)c->row + k];
        for (size_t j = 0; ok && !s->transposed && j < n; j++)
            out[i * n + j] = one[o->columns ? (size_t)o->columns[j] : j];
    }
    mem_free(one);
    return ok;
}

bool transcode_copies(const struct out_tensor *o)
{
    if (o->mats[0].transposed || o->row_times)
        return false;
    int64_t len = dtype_table[o->mats[0].layout.type].block_len;
    for (int64_t j = 0; o->columns && j < o->dims[0]; j++)
        if (o->columns[j] % len != j % len || o->columns[j] - j % len != o->columns[j - j % len])
            return false;
    return true;
}

/* Reads row r of the tensor part s. The matrix starts at the tensor's row `base`. */
static void read_part(const struct out_tensor *o, const struct input_matrix *s, int64_t base,
                      int64_t r, size_t n, float *out)
{
    enum dtype type = s->data->type;
    size_t row = o->order ? (size_t)o->order[r] : (size_t)(s->first + s->step * r);
    size_t of = (size_t)s->tensor_rows, each = dtype_bytes(type, 1), skip = (size_t)s->offset;
    if (!s->transposed) {
        const uint8_t *from = s->data->data + ((size_t)base + skip + row) * n * each;
        if (!o->columns)
            quantize_load(type, from, out, n);
        for (size_t j = 0; o->columns && j < n; j++)
            quant_dequantize(type, from + (size_t)o->columns[j] * each, out + j, 1);
        return;
    }
    const uint8_t *from = s->data->data + ((size_t)base * n + skip * of) * each;
    for (size_t j = 0; j < n; j++)
        quant_dequantize(type, from + (j * of + row) * each, out + j, 1);
}

/* Rows [row, row + rows) of one matrix of the output as floats. */
static bool read_rows(const struct transcode *t, const struct out_tensor *o,
                      const struct transcode_chunk *c, float *out, struct error *err)
{
    size_t n = (size_t)o->dims[0];
    if (!o->mats) {
        memcpy(out, o->values + (size_t)c->row * n, n * (size_t)c->rows * sizeof *out);
        return true;
    }
    int64_t base;
    const struct input_matrix *s = chunk_source(o, c, &base);
    base -= c->row;
    if (is_plain(s) && !o->heads) {
        size_t bytes = dtype_bytes(s->data->type, n);
        quantize_load(s->data->type, s->data->data + (size_t)(base + c->row) * bytes, out,
                      n * (size_t)c->rows);
        for (size_t i = 0; o->scales && i < n * (size_t)c->rows; i++)
            out[i] *= o->scales[c->mat];
        return true;
    }
    if (is_packed(s))
        return unpack_chunk(t, o, s, c, out, err);
    for (int32_t i = 0; i < c->rows; i++, out += n) {
        int64_t row = base + interleaved_row(o, c->row + i);
        if (s->tensor_rows) {
            read_part(o, s, base, c->row + i, n, out);
        } else {
            quantize_load(s->data->type,
                          s->data->data + (size_t)row * dtype_bytes(s->data->type, n), out, n);
        }
    }
    return true;
}

/* Adds the adapters' changes to a chunk's rows. */
static void add_merges(const struct out_tensor *o, const struct transcode_chunk *c, float *values)
{
    for (int k = 0; k < o->n_merges; k++)
        for (int32_t i = 0; i < c->rows; i++)
            lora_add_row(o->merges[k].l, c->mat, o->merge_rows[c->row + i], o->merges[k].scale,
                         values + (size_t)i * (size_t)o->dims[0]);
}

/* Releases the pages of a chunk's input. A page shared with a neighbour is read again. */
static void forget_chunk(const struct transcode_job *r, const struct out_tensor *o,
                         const struct transcode_chunk *c)
{
    if (!o->mats)
        return;
    int64_t row;
    const struct input_matrix *s = chunk_source(o, c, &row);
    if (!is_plain(s) || o->heads) {
        bool one = s->tensor_rows || s->layout.n_stack; /* one of several matrices */
        bool last = c->row + c->rows == o->rows && (!one || c->mat == o->n_mats - 1);
        if (last) /* column access: drop the whole tensor at its end */
            tensorfile_forget(r->t->in, s->data);
        return;
    }
    if (r->t->in->shards[s->data->shard].fd < 0)
        return;
    size_t bytes = dtype_bytes(s->data->type, (size_t)o->dims[0]);
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t a = ((uintptr_t)s->data->data + (size_t)row * bytes) / page * page;
    uintptr_t b = ((uintptr_t)s->data->data + (size_t)(row + c->rows) * bytes) / page * page;
    if (a < b)
        madvise((void *)a, b - a, MADV_DONTNEED);
}

static void fail(struct transcode_job *r, const struct error *err)
{
    pthread_mutex_lock(&r->lock);
    if (!r->err.msg[0])
        r->err = *err;
    pthread_mutex_unlock(&r->lock);
    atomic_store(&r->stop, true);
}

/* Types whose values or scales are fp16, with a maximum of 65504. */
static bool needs_half_range(enum dtype t)
{
    return t != DT_F32 && t != DT_BF16 && t != DT_MXFP4;
}

static bool check_range(const struct out_tensor *o, const struct transcode_chunk *c, const float *x,
                        size_t n, struct error *err)
{
    float top = quantize_amax(x, n * (size_t)c->rows);
    if (!isfinite(top)) {
        size_t i = 0;
        while (isfinite(x[i]))
            i++;
        return error_set(err, "tensor '%s', row %" PRId64 ", column %zu: value is not finite",
                         o->name, c->mat * o->rows + c->row + (int64_t)(i / n), i % n);
    }
    if (top > 65504 && needs_half_range(o->type))
        return error_set(err, "tensor '%s': %g does not fit in %s (BF16 and F32 can hold it)",
                         o->name, (double)top, dtype_name(o->type));
    return true;
}

struct buffers {
    float *values, *weights; /* (max_values), (max_row) */
    uint8_t *blocks;         /* (4 max_values) */
};

/* Reorders the blocks of rows by the column order. spare: a buffer of the same size. */
static void move_blocks(const struct out_tensor *o, size_t rows, uint8_t *data, uint8_t *spare)
{
    size_t len = (size_t)dtype_table[o->type].block_len, each = dtype_bytes(o->type, len);
    size_t n = (size_t)o->dims[0] / len;
    memcpy(spare, data, rows * n * each);
    for (size_t i = 0; i < rows * n; i++) {
        size_t from = i / n * n + (size_t)o->columns[i % n * len] / len;
        memcpy(data + i * each, spare + from * each, each);
    }
}

/* Copies rows of a packed matrix in their own type, bit for bit. */
static bool copy_packed(const struct transcode_job *r, const struct out_tensor *o,
                        const struct input_matrix *s, const struct transcode_chunk *c,
                        struct buffers *b, struct error *err)
{
    size_t row_bytes = dtype_bytes(o->type, (size_t)o->dims[0]);
    int step = in_order(o) ? c->rows : 1;
    for (int32_t i = 0; i < c->rows; i += step) {
        float scale; /* of the whole matrix; a separate tensor (folder.c) */
        struct layout_rows rows = packed_rows(o, s, c, c->row + i, step);
        struct layout_planes to = {.data = b->blocks + (size_t)i * row_bytes, .scale = &scale};
        bool permuted;
        if (!layout_read(&s->layout, r->t->in->path, &rows, &to, &permuted, err))
            return false;
    }
    if (o->columns)
        move_blocks(o, (size_t)c->rows, b->blocks, (uint8_t *)b->values);
    return true;
}

static bool do_chunk(struct transcode_job *r, const struct transcode_chunk *c, struct buffers *b,
                     struct error *err)
{
    const struct out_tensor *o = &r->t->tensors[c->tensor];
    size_t n = (size_t)o->dims[0], row_bytes = dtype_bytes(o->type, n);
    size_t bytes = row_bytes * (size_t)c->rows;
    size_t offset = row_bytes * (size_t)(c->mat * o->rows + c->row);
    int64_t row = 0;
    const struct input_matrix *s = o->mats ? chunk_source(o, c, &row) : NULL;
    const void *data = b->blocks;
    if (!s && o->type == DT_I32) {
        data = (const char *)o->values + row_bytes * (size_t)c->row;
    } else if (s && !o->n_merges && !o->row_times && is_plain(s) && !o->heads &&
               s->data->type == o->type) {
        data = s->data->data + (size_t)row * row_bytes;
    } else if (s && !o->n_merges && is_packed(s) && s->layout.type == o->type &&
               transcode_copies(o)) {
        if (!copy_packed(r, o, s, c, b, err))
            return false;
    } else {
        if (!read_rows(r->t, o, c, b->values, err))
            return false;
        add_merges(o, c, b->values);
        for (size_t i = 0; o->row_times && i < n * (size_t)c->rows; i++)
            b->values[i] *= o->row_times[(size_t)c->row + i / n];
        if (!check_range(o, c, b->values, n, err))
            return false;
        bool weighted = o->weighted &&
                        imatrix_weights(r->t->importance, o->name, (size_t)c->mat, n, b->weights);
        quantize_rows(o->type, b->values, b->blocks, (size_t)c->rows, n,
                      weighted ? b->weights : NULL);
    }
    /* the writer keeps its own error for gguf_writer_finish */
    if (!gguf_writer_put(r->w, (int)c->tensor, offset, data, bytes))
        return error_set(err, "cannot write");
    forget_chunk(r, o, c);
    return true;
}

static void worker(void *arg, int ith, int nth)
{
    struct transcode_job *r = arg;
    (void)nth;
    struct buffers b = {mem_aligned(r->max_values * 4), mem_aligned(r->max_row * 4),
                        mem_aligned(r->max_values * 4)};
    struct error err = {0};
    if (!b.values || !b.weights || !b.blocks) {
        error_set(&err, "out of memory");
        fail(r, &err);
    }
    while (!atomic_load(&r->stop)) {
        size_t i = atomic_fetch_add(&r->next, 1);
        if (i >= r->n_chunks)
            break;
        const struct transcode_chunk *c = &r->chunks[i];
        if (!do_chunk(r, c, &b, &err)) {
            fail(r, &err);
            break;
        }
        const struct out_tensor *o = &r->t->tensors[c->tensor];
        size_t values = (size_t)o->dims[0] * (size_t)c->rows;
        size_t done = atomic_fetch_add(&r->done, values) + values;
        if (ith == 0 && r->t->progress)
            r->t->progress(r->t->progress_arg, done, r->total);
    }
    mem_aligned_free(b.values, r->max_values * 4);
    mem_aligned_free(b.weights, r->max_row * 4);
    mem_aligned_free(b.blocks, r->max_values * 4);
}

static void list_chunks(struct transcode_job *r)
{
    size_t cap = 0;
    for (size_t i = 0; i < r->t->n; i++) {
        const struct out_tensor *o = &r->t->tensors[i];
        int64_t n = o->dims[0], step = CHUNK_VALUES / n > 1 ? CHUNK_VALUES / n : 1;
        for (int32_t m = 0; m < o->n_mats; m++)
            for (int64_t row = 0; row < o->rows; row += step) {
                if (r->n_chunks == cap) {
                    cap = cap ? 2 * cap : 256;
                    r->chunks = mem_realloc(r->chunks, cap, sizeof *r->chunks);
                }
                int64_t rows = o->rows - row < step ? o->rows - row : step;
                r->chunks[r->n_chunks++] =
                    (struct transcode_chunk){(uint32_t)i, m, row, (int32_t)rows};
                size_t values = (size_t)(n * rows);
                r->max_values = values > r->max_values ? values : r->max_values;
                r->max_row = (size_t)n > r->max_row ? (size_t)n : r->max_row;
                r->total += values;
            }
    }
}

bool transcode_run(struct transcode *t, struct gguf_writer *w, struct error *err)
{
    for (size_t i = 0; i < t->n; i++) {
        const struct out_tensor *o = &t->tensors[i];
        int at = gguf_add_tensor(w, o->name, o->type, o->n_dims, o->dims);
        CHECK(at == (int)i, "tensors were declared elsewhere too");
    }
    if (!gguf_writer_begin(w, err))
        return false;
    struct transcode_job r = {.t = t, .w = w};
    pthread_mutex_init(&r.lock, NULL);
    list_chunks(&r);
    int threads = t->threads ? t->threads : pool_cpu_count();
    if ((size_t)threads > r.n_chunks)
        threads = r.n_chunks ? (int)r.n_chunks : 1;
    struct pool *pool = pool_new(threads);
    pool_run(pool, worker, &r);
    pool_free(pool);
    if (!r.err.msg[0] && t->progress)
        t->progress(t->progress_arg, r.total, r.total);
    pthread_mutex_destroy(&r.lock);
    mem_free(r.chunks);
    if (!r.err.msg[0])
        return tensorfile_is_whole(t->in, TENSORFILE_ALL, err);
    /* The writer reports a failed write itself. */
    struct error write_err = {0};
    if (gguf_writer_failed(w, &write_err))
        r.err = write_err;
    if (err)
        *err = r.err;
    return false;
}
