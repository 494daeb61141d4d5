/*
 * Reads one safetensors file: an 8-byte length, a JSON directory, the data. The format's rules are
 * checked: offsets cover the data without holes or overlaps and match shape and dtype. Shapes are
 * reversed into GGUF order (dims[0] contiguous). tensorfile.c joins sharded folders. Knows no
 * model.
 */
#include "file/parse.h"
#include "base/json_guard.h"
#include "base/mem.h"

#include <string.h>

/* The format's own limit on the directory. */
enum { HEADER_MAX = 100000000 };

static const struct {
    const char *name;
    enum dtype type; /* DT_NONE: listed, not computed with */
    int bytes;
} types[] = {
    {"BOOL", DT_NONE, 1},       {"U8", DT_NONE, 1},      {"I8", DT_I8, 1},
    {"F8_E4M3", DT_F8_E4M3, 1}, {"F8_E5M2", DT_NONE, 1}, {"F8_E8M0", DT_NONE, 1},
    {"I16", DT_I16, 2},         {"U16", DT_NONE, 2},     {"F16", DT_F16, 2},
    {"BF16", DT_BF16, 2},       {"I32", DT_I32, 4},      {"U32", DT_NONE, 4},
    {"F32", DT_F32, 4},         {"I64", DT_I64, 8},      {"U64", DT_NONE, 8},
    {"F64", DT_F64, 8},         {"C64", DT_NONE, 8},
};

enum { MAX_SHAPE = 8 };

/* Dimensions beyond TENSOR_MAX_DIMS (image towers) are merged into the outermost one. */
static bool parse_shape(const char *path, const char *name, json_t *shape, struct tensor *t,
                        size_t *count, struct error *err)
{
    size_t n = json_array_size(shape);
    if (!json_is_array(shape) || n > MAX_SHAPE)
        return error_set(err, "%s: tensor '%.100s': shape is not a list of at most %d numbers",
                         path, name, MAX_SHAPE);
    *count = 1;
    for (int d = 0; d < TENSOR_MAX_DIMS; d++)
        t->dims[d] = 1;
    for (size_t i = 0; i < n; i++) {
        json_t *v = json_array_get(shape, i);
        json_int_t dim = json_integer_value(v);
        if (!json_is_integer(v) || dim < 0 || !mul_size(*count, (size_t)dim, count) ||
            *count > INT64_MAX)
            return error_set(err, "%s: tensor '%.100s': shape[%zu] is out of range", path, name, i);
        size_t at = n - 1 - i < TENSOR_MAX_DIMS ? n - 1 - i : TENSOR_MAX_DIMS - 1;
        t->dims[at] *= (int64_t)dim; /* at most *count */
    }
    t->n_dims = n > TENSOR_MAX_DIMS ? TENSOR_MAX_DIMS : n ? (int)n : 1;
    return true;
}

static bool parse_tensor(const struct shard *s, size_t start, const char *name, json_t *entry,
                         struct tensor *t, struct error *err)
{
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    json_t *offsets = json_object_get(entry, "data_offsets");
    if (!dtype)
        return error_set(err, "%s: tensor '%.100s': dtype is missing", s->path, name);
    size_t each = 0;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (!strcmp(types[i].name, dtype)) {
            t->type = types[i].type;
            t->type_name = types[i].name;
            each = (size_t)types[i].bytes;
        }
    if (!each)
        return error_set(err, "%s: tensor '%.100s': unknown dtype '%.40s'", s->path, name, dtype);
    size_t count = 0;
    if (!parse_shape(s->path, name, json_object_get(entry, "shape"), t, &count, err))
        return false;
    if (!mul_size(count, each, &t->bytes))
        return error_set(err, "%s: tensor '%.100s': size overflows", s->path, name);

    json_t *b = json_array_get(offsets, 0), *e = json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(b) || !json_is_integer(e))
        return error_set(err, "%s: tensor '%.100s': data_offsets is not a pair of numbers", s->path,
                         name);
    json_int_t begin = json_integer_value(b), end = json_integer_value(e);
    if (begin < 0 || end < begin || (size_t)end > s->bytes - start)
        return error_set(err,
                         "%s: tensor '%.100s': data_offsets [%lld, %lld] reach past the end of the "
                         "file (truncated?)",
                         s->path, name, (long long)begin, (long long)end);
    if ((size_t)(end - begin) != t->bytes)
        return error_set(err, "%s: tensor '%.100s': data_offsets hold %lld bytes, shape wants %zu",
                         s->path, name, (long long)(end - begin), t->bytes);
    t->data = s->map + start + begin;
    return true;
}

/* The format requires that tensors cover the data exactly: no holes, no overlaps, no trailing
 * bytes. */
static bool check_cover(const struct tensorfile *f, size_t first, const struct shard *s,
                        size_t start, struct error *err)
{
    size_t n;
    const struct tensor **order = tensorfile_by_address(f, first, &n);
    const uint8_t *at = s->map + start;
    bool ok = true;
    for (size_t i = 0; ok && i < n; i++) {
        if (order[i]->data != at)
            ok =
                error_set(err, "%s: tensor '%.100s': data_offsets %s the tensor before it", s->path,
                          order[i]->name, order[i]->data < at ? "overlap" : "leave a hole after");
        at = order[i]->data + order[i]->bytes;
    }
    if (ok && at != s->map + s->bytes)
        ok = error_set(err, "%s: header: %zu bytes at the end belong to no tensor", s->path,
                       (size_t)(s->map + s->bytes - at));
    mem_free(order);
    return ok;
}

bool safetensors_parse(struct tensorfile *f, int shard, struct error *err)
{
    const struct shard *s = &f->shards[shard];
    uint64_t len;
    if (s->bytes < 8)
        return error_set(err, "%s: header length: file of %zu bytes is not a safetensors file",
                         s->path, s->bytes);
    memcpy(&len, s->map, 8);
    if (len > s->bytes - 8 || len > HEADER_MAX)
        return error_set(err, "%s: header length %llu is more than the file has (%zu bytes)",
                         s->path, (unsigned long long)len, s->bytes);
    size_t start = 8 + (size_t)len;

    if (!json_guard((const char *)s->map + 8, (size_t)len, &json_limits_file, NULL, err))
        return error_prefix(err, "%s: header", s->path);
    json_error_t je;
    json_t *root = json_loadb((const char *)s->map + 8, (size_t)len, JSON_REJECT_DUPLICATES, &je);
    if (!root)
        return error_set(err, "%s: header: %s (byte %d)", s->path, je.text, 8 + je.position);
    bool ok = json_is_object(root);
    if (!ok)
        error_set(err, "%s: header is not a JSON object", s->path);

    size_t first = f->n_tensors;
    const char *name;
    json_t *entry;
    if (ok)
        json_object_foreach(root, name, entry)
        {
            if (!strcmp(name, "__metadata__"))
                continue;
            struct tensor t = {.shard = shard};
            if (!name[0] || !name_ok(name, strlen(name)))
                ok = error_set(err, "%s: header: a tensor's name is empty or not text", s->path);
            else
                ok = parse_tensor(s, start, name, entry, &t, err);
            if (!ok)
                break;
            t.name = tensorfile_name(f, name, strlen(name));
            tensorfile_add(f, &t);
        }
    json_decref(root);
    return ok && check_cover(f, first, s, start, err);
}
