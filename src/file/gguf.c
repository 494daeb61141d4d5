/*
 * Reads one GGUF file (v2, v3, little-endian): header, metadata, tensor directory. Every length is
 * checked against the remaining bytes before use, every product for overflow, and no table grows
 * beyond what the file's size allows. tensorfile.c joins split files; this file reads one part.
 * Knows no model and no metadata key but general.alignment.
 */
#include "file/parse.h"
#include "base/mem.h"

#include <stdio.h>
#include <string.h>

enum { KEY_MAX = 65535, NAME_MAX_BYTES = 1024, DEFAULT_ALIGNMENT = 32 };

/* Types whose size is known but that Steel cannot compute with. */
static const struct {
    uint32_t id;
    const char *name;
    int block_len, block_bytes;
} listed_types[] = {
    {9, "Q8_1", 32, 36},
    {15, "Q8_K", 256, 292},
    {41, "Q1_0", 128, 18},
    {42, "Q2_0", 64, 18},
};

static const uint8_t meta_sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

/* A position in the mapped file. `field` names what is being read, for messages. */
struct cursor {
    const char *path;
    const uint8_t *p;
    size_t pos, end;
    struct error *err;
};

static size_t left(const struct cursor *c)
{
    return c->end - c->pos;
}

/* Copies n little-endian bytes to out (the host is little-endian, as all we run on are). */
static bool take(struct cursor *c, void *out, size_t n, const char *field)
{
    if (left(c) < n) {
        error_set(c->err, "%s: file ends inside %s (byte %zu of %zu)", c->path, field, c->pos,
                  c->end);
        return false;
    }
    memcpy(out, c->p + c->pos, n);
    c->pos += n;
    return true;
}

/* A length-prefixed string; *p points into the map. */
static bool take_string(struct cursor *c, const char **p, size_t *len, const char *field)
{
    uint64_t n;
    if (!take(c, &n, 8, field))
        return false;
    if (n > left(c)) {
        error_set(c->err, "%s: %s: string of %llu bytes, but %zu are left", c->path, field,
                  (unsigned long long)n, left(c));
        return false;
    }
    *p = (const char *)c->p + c->pos;
    *len = (size_t)n;
    c->pos += (size_t)n;
    return true;
}

static bool take_array(struct cursor *c, struct meta_array *a, const char *field)
{
    uint32_t type;
    uint64_t n;
    if (!take(c, &type, 4, field) || !take(c, &n, 8, field))
        return false;
    if (type > META_F64)
        return error_set(c->err, "%s: %s: unknown array type %u", c->path, field, type);
    if (type == META_ARRAY)
        return error_set(c->err, "%s: %s: arrays of arrays are not supported", c->path, field);
    a->type = (enum meta_type)type;
    a->data = c->p + c->pos;
    size_t each = type == META_STRING ? 8 : meta_sizes[type], bytes;
    if (n > SIZE_MAX || !mul_size((size_t)n, each, &bytes) || bytes > left(c))
        return error_set(c->err,
                         "%s: %s: array of %llu elements does not fit in the %zu bytes left",
                         c->path, field, (unsigned long long)n, left(c));
    a->n = (size_t)n;
    if (type == META_STRING) {
        const char *p;
        size_t len;
        for (size_t i = 0; i < a->n; i++)
            if (!take_string(c, &p, &len, field))
                return false;
    } else {
        if (type == META_BOOL)
            for (size_t i = 0; i < bytes; i++)
                if (a->data[i] > 1)
                    return error_set(c->err, "%s: %s: element %zu is not a bool (%d)", c->path,
                                     field, i, a->data[i]);
        c->pos += bytes;
    }
    a->bytes = (size_t)(c->p + c->pos - a->data);
    return true;
}

static bool take_value(struct cursor *c, struct meta *m, const char *field)
{
    union {
        uint8_t u8;
        int8_t i8;
        uint16_t u16;
        int16_t i16;
        uint32_t u32;
        int32_t i32;
        uint64_t u64;
        int64_t i64;
        float f32;
        double f64;
    } v;
    if (m->type == META_STRING)
        return take_string(c, &m->v.s.p, &m->v.s.len, field);
    if (m->type == META_ARRAY)
        return take_array(c, &m->v.a, field);
    if (!take(c, &v, meta_sizes[m->type], field))
        return false;
    switch (m->type) {
    case META_BOOL:
        if (v.u8 > 1)
            return error_set(c->err, "%s: %s: a bool of %d", c->path, field, v.u8);
        m->v.u = v.u8;
        break;
    case META_U8:
        m->v.u = v.u8;
        break;
    case META_U16:
        m->v.u = v.u16;
        break;
    case META_U32:
        m->v.u = v.u32;
        break;
    case META_U64:
        m->v.u = v.u64;
        break;
    case META_I8:
        m->v.i = v.i8;
        break;
    case META_I16:
        m->v.i = v.i16;
        break;
    case META_I32:
        m->v.i = v.i32;
        break;
    case META_I64:
        m->v.i = v.i64;
        break;
    case META_F32:
        m->v.f = (double)v.f32;
        break;
    case META_F64:
        m->v.f = v.f64;
        break;
    case META_STRING:
    case META_ARRAY:
        break;
    }
    return true;
}

/* Reads one key and value into *m. `i` of `n`, for messages about the key itself. */
static bool take_meta(struct cursor *c, struct tensorfile *f, uint64_t i, struct meta *m)
{
    char field[128];
    snprintf(field, sizeof field, "metadata key %llu", (unsigned long long)i);
    const char *key;
    size_t len;
    uint32_t type;
    if (!take_string(c, &key, &len, field))
        return false;
    if (len == 0 || len > KEY_MAX || !name_ok(key, len))
        return error_set(c->err, "%s: %s is empty, too long or not text", c->path, field);
    snprintf(field, sizeof field, "metadata '%.*s'", (int)(len < 100 ? len : 100), key);
    if (!take(c, &type, 4, field))
        return false;
    if (type > META_F64)
        return error_set(c->err, "%s: %s: unknown value type %u", c->path, field, type);
    m->key = tensorfile_name(f, key, len);
    m->type = (enum meta_type)type;
    return take_value(c, m, field);
}

/* Type number -> dtype, printed name and block size. False if the size is unknown. */
static bool type_lookup(uint32_t id, struct tensor *t, int *block_len, int *block_bytes)
{
    t->type = dtype_from_ggml(id);
    if (t->type != DT_NONE) {
        t->type_name = dtype_name(t->type);
        *block_len = dtype_table[t->type].block_len;
        *block_bytes = dtype_table[t->type].block_bytes;
        return true;
    }
    for (size_t i = 0; i < sizeof listed_types / sizeof *listed_types; i++)
        if (listed_types[i].id == id) {
            t->type_name = listed_types[i].name;
            *block_len = listed_types[i].block_len;
            *block_bytes = listed_types[i].block_bytes;
            return true;
        }
    return false;
}

/* Reads one directory entry. t->data is not set yet; *offset is relative to the data section. */
static bool take_tensor(struct cursor *c, struct tensorfile *f, uint64_t i, struct tensor *t,
                        uint64_t *offset)
{
    char field[128];
    snprintf(field, sizeof field, "name of tensor %llu", (unsigned long long)i);
    const char *name;
    size_t len;
    uint32_t n_dims, type;
    if (!take_string(c, &name, &len, field))
        return false;
    if (len == 0 || len > NAME_MAX_BYTES || !name_ok(name, len))
        return error_set(c->err, "%s: %s is empty, too long or not text", c->path, field);
    snprintf(field, sizeof field, "tensor '%.*s'", (int)(len < 100 ? len : 100), name);
    if (!take(c, &n_dims, 4, field))
        return false;
    if (n_dims == 0 || n_dims > TENSOR_MAX_DIMS)
        return error_set(c->err, "%s: %s: %u dimensions (1 to %d are possible)", c->path, field,
                         n_dims, TENSOR_MAX_DIMS);
    size_t count = 1;
    for (int d = 0; d < TENSOR_MAX_DIMS; d++) {
        t->dims[d] = 1;
        if ((uint32_t)d >= n_dims)
            continue;
        uint64_t dim;
        if (!take(c, &dim, 8, field))
            return false;
        if (dim == 0 || dim > INT64_MAX || !mul_size(count, (size_t)dim, &count) ||
            count > INT64_MAX)
            return error_set(c->err, "%s: %s: dimension %d is %llu", c->path, field, d,
                             (unsigned long long)dim);
        t->dims[d] = (int64_t)dim;
    }
    t->n_dims = (int)n_dims;
    if (!take(c, &type, 4, field) || !take(c, offset, 8, field))
        return false;
    int block_len, block_bytes;
    if (!type_lookup(type, t, &block_len, &block_bytes))
        return error_set(c->err, "%s: %s: unknown type number %u", c->path, field, type);
    if (t->dims[0] % block_len)
        return error_set(c->err, "%s: %s: rows of %lld values are not whole blocks of %s (%d)",
                         c->path, field, (long long)t->dims[0], t->type_name, block_len);
    if (!mul_size(count / (size_t)block_len, (size_t)block_bytes, &t->bytes))
        return error_set(c->err, "%s: %s: size overflows", c->path, field);
    t->name = tensorfile_name(f, name, len);
    return true;
}

static bool parse_header(struct cursor *c, uint64_t *n_tensors, uint64_t *n_meta)
{
    char magic[4];
    uint32_t version;
    if (!take(c, magic, 4, "the magic number"))
        return false;
    if (memcmp(magic, "GGUF", 4) != 0)
        return error_set(c->err, "%s: not a GGUF file (magic number)", c->path);
    if (!take(c, &version, 4, "the version"))
        return false;
    if (version == 0x02000000 || version == 0x03000000)
        return error_set(c->err, "%s: version: big-endian GGUF is not supported", c->path);
    if (version != 2 && version != 3)
        return error_set(c->err, "%s: version: GGUF %u is not supported (2 and 3 are)", c->path,
                         version);
    if (!take(c, n_tensors, 8, "the tensor count") || !take(c, n_meta, 8, "the metadata count"))
        return false;
    /* The smallest possible entries: a bool with a 1-byte key; a tensor with a 1-byte name, 1
     * dimension. */
    if (*n_meta > left(c) / 14)
        return error_set(c->err, "%s: metadata count %llu is more than %zu bytes can hold", c->path,
                         (unsigned long long)*n_meta, left(c));
    if (*n_tensors > left(c) / 33)
        return error_set(c->err, "%s: tensor count %llu is more than %zu bytes can hold", c->path,
                         (unsigned long long)*n_tensors, left(c));
    return true;
}

static bool parse_meta(struct cursor *c, struct tensorfile *f, uint64_t n, int shard,
                       size_t *alignment)
{
    size_t cap = 0, count = 0;
    struct meta *list = NULL;
    bool ok = true;
    *alignment = DEFAULT_ALIGNMENT;
    for (uint64_t i = 0; ok && i < n; i++) {
        if (count == cap) {
            cap = cap ? 2 * cap : 16;
            list = mem_realloc(list, cap, sizeof *list);
        }
        struct meta *m = &list[count];
        ok = take_meta(c, f, i, m);
        if (!ok)
            break;
        count++;
        if (!strcmp(m->key, "general.alignment")) {
            uint64_t a = m->type == META_U32 || m->type == META_U64 ? m->v.u : 0;
            if (a == 0 || (a & (a - 1)) || a > 1u << 30)
                ok = error_set(c->err, "%s: metadata 'general.alignment' is not a power of two",
                               c->path);
            else
                *alignment = (size_t)a;
        }
    }
    if (!ok || (shard > 0 && count == 0)) {
        mem_free(list);
        return ok;
    }
    if (shard == 0) {
        f->meta = list;
        f->n_meta = count;
        return true;
    }
    /* Later parts have only split.* keys, which tensorfile.c checks. */
    for (size_t i = 0; i < count; i++)
        if (!strncmp(list[i].key, "split.", 6)) {
            f->meta = mem_realloc(f->meta, f->n_meta + 1, sizeof *f->meta);
            f->meta[f->n_meta++] = list[i];
        }
    mem_free(list);
    return true;
}

/* Tensors must not overlap. */
static bool check_overlap(const struct tensorfile *f, size_t first, const char *path,
                          struct error *err)
{
    size_t n;
    const struct tensor **order = tensorfile_by_address(f, first, &n);
    bool ok = true;
    for (size_t i = 1; ok && i < n; i++)
        if (order[i]->data < order[i - 1]->data + order[i - 1]->bytes)
            ok = error_set(err, "%s: tensor '%.100s': offset lies inside tensor '%.100s'", path,
                           order[i]->name, order[i - 1]->name);
    mem_free(order);
    return ok;
}

bool gguf_parse(struct tensorfile *f, int shard, struct error *err)
{
    const struct shard *s = &f->shards[shard];
    struct cursor c = {s->path, s->map, 0, s->bytes, err};
    uint64_t n_tensors = 0, n_meta = 0;
    size_t alignment;
    if (!parse_header(&c, &n_tensors, &n_meta) || !parse_meta(&c, f, n_meta, shard, &alignment))
        return false;

    size_t first = f->n_tensors;
    uint64_t *offsets = NULL;
    size_t cap = 0;
    bool ok = true;
    for (uint64_t i = 0; ok && i < n_tensors; i++) {
        struct tensor t = {.shard = shard};
        if (i == cap) {
            cap = cap ? 2 * cap : 16;
            offsets = mem_realloc(offsets, cap, sizeof *offsets);
        }
        ok = take_tensor(&c, f, i, &t, &offsets[i]);
        if (ok)
            tensorfile_add(f, &t);
    }

    /* The data section starts at the next multiple of the alignment. */
    size_t start;
    if (ok && !add_size(c.pos, alignment - 1, &start))
        ok = error_set(err, "%s: general.alignment: header too long", s->path);
    start = ok ? start / alignment * alignment : 0;
    for (size_t i = 0; ok && i < n_tensors; i++) {
        struct tensor *t = &f->tensors[first + i];
        if (offsets[i] % alignment)
            ok = error_set(err, "%s: tensor '%.100s': offset %llu is not a multiple of %zu",
                           s->path, t->name, (unsigned long long)offsets[i], alignment);
        else if (start > s->bytes || offsets[i] > s->bytes - start ||
                 t->bytes > s->bytes - start - offsets[i])
            ok =
                error_set(err,
                          "%s: tensor '%.100s': %zu bytes at offset %llu reach past the end of the "
                          "file (truncated?)",
                          s->path, t->name, t->bytes, (unsigned long long)offsets[i]);
        else
            t->data = s->map + start + offsets[i];
    }
    mem_free(offsets);
    return ok && check_overlap(f, first, s->path, err);
}
