/* See logits_images.h. Binary files are records: little-endian i32 n, i32 dims[n], f32 values. */
#include "cli/logits_images.h"
#include "base/buf.h"
#include "base/mem.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

enum { MAX_INPUT = 64 << 20, MAX_FILE = 256 << 20, MAX_DIMS = 5 };

bool image_input_read(struct image_input *in, const char *path, struct error *err)
{
    in->path = path;
    in->json = json_load_path(path, MAX_INPUT, err);
    if (!in->json)
        return false;
    const json_t *ids = json_object_get(in->json, "ids"), *v;
    size_t i, n = json_array_size(ids);
    if (!n || n > 1 << 24)
        return error_set(err, "%s: ids: expected a list of token ids", path);
    in->n = (int32_t)n;
    in->ids = mem_zalloc(n, sizeof *in->ids);
    json_array_foreach((json_t *)ids, i, v)
    {
        json_int_t id = json_is_integer(v) ? json_integer_value(v) : -1;
        if (id < 0 || id > INT32_MAX)
            return error_set(err, "%s: ids[%zu]: not a token id", path, i);
        in->ids[i] = (int32_t)id;
    }
    return true;
}

/* Reads a whole file. NULL with err. */
static uint8_t *read_file(const char *path, size_t *n, struct error *err)
{
    FILE *f = fopen(path, "rb");
    uint8_t *p = NULL;
    long size = -1;
    if (f && fseek(f, 0, SEEK_END) == 0)
        size = ftell(f);
    if (size >= 0 && size <= MAX_FILE && fseek(f, 0, SEEK_SET) == 0) {
        p = mem_alloc((size_t)size + 1);
        *n = fread(p, 1, (size_t)size, f);
    }
    if (!p)
        error_set(err, "%s: %s", path, size > MAX_FILE ? "too large" : strerror(errno));
    if (f)
        fclose(f);
    return p;
}

/* A picture beside input.json. */
static bool read_picture(const struct image_input *in, const char *name,
                         const struct tower_config *t, struct patches *out, struct error *err)
{
    struct buf path = {0};
    struct image m;
    struct image_limits limits = {0};
    const char *slash = strrchr(in->path, '/');
    size_t n = 0;
    buf_add(&path, in->path, slash ? (size_t)(slash - in->path) + 1 : 0);
    buf_adds(&path, name);
    uint8_t *bytes = read_file(path.p, &n, err);
    bool ok =
        bytes && (image_decode(bytes, n, &limits, &m, err) || error_prefix(err, "%s", path.p));
    if (ok) {
        ok = patches_make(t, &m, NULL, out, err) || error_prefix(err, "%s", path.p);
        image_free(&m);
    }
    mem_free(bytes);
    buf_clear(&path);
    return ok;
}

/* A record of up to 5 dims; the values are the caller's. */
static float *read_record(const char *path, struct pixel_record *r, struct error *err)
{
    size_t n = 0, at = 4, values = 1;
    int32_t dims = 0;
    uint8_t *bytes = read_file(path, &n, err);
    if (!bytes)
        return NULL;
    if (n >= at)
        memcpy(&dims, bytes, at);
    bool ok = dims >= 2 && dims <= MAX_DIMS && n >= at + 4 * (size_t)dims;
    for (int i = 0; ok && i < dims; i++, at += 4) {
        memcpy(&r->dims[i], bytes + at, 4);
        ok = r->dims[i] > 0 && (size_t)r->dims[i] <= MAX_FILE / values;
        values *= ok ? (size_t)r->dims[i] : 1;
    }
    if (!ok || (n - at) / sizeof(float) != values) {
        error_set(err, "%s: expected a record of values", path);
        mem_free(bytes);
        return NULL;
    }
    r->n_dims = dims;
    memmove(bytes, bytes + at, n - at);
    r->values = (float *)(void *)bytes;
    return (float *)(void *)bytes;
}

/* The patches of image i from pixels made by another program; its size is in input.json. */
static bool take_pixels(const struct image_input *in, int i, const struct tower_config *t,
                        struct pixel_record *r, struct patches *out, struct error *err)
{
    const json_t *size = json_array_get(json_object_get(in->json, "image_sizes_wh"), (size_t)i);
    json_int_t width = json_integer_value(json_array_get(size, 0)),
               height = json_integer_value(json_array_get(size, 1));
    struct image_plan plan;
    if (width < 1 || height < 1 || width > IMAGE_MAX_SIDE || height > IMAGE_MAX_SIDE)
        return error_set(err, "%s: image_sizes_wh[%d]: not a size", in->path, i);
    return plan_image(t, (int)width, (int)height, &plan, err) &&
           (patches_take(t, &plan, r, out) ||
            error_set(err, "%s: these are not the pixels of image %d", in->pixels, i));
}

static bool write_record(FILE *f, const struct features *m, int width)
{
    int32_t head[3] = {2, m->n, width};
    bool ok = fwrite(head, 4, 3, f) == 3;
    for (int i = 0; ok && i < m->n; i++)
        ok = fwrite(m->values + (size_t)i * (size_t)m->width, sizeof(float), (size_t)width, f) ==
             (size_t)width;
    return ok;
}

/* The next runs of placeholders must be those of image i. */
static bool place(struct image_input *in, int i, const struct tower_config *t, bool two_way,
                  int *at, int32_t token, struct error *err)
{
    const struct features *m = &in->features[i];
    const float *row = m->values;
    const struct view *v = &m->plan.views[0];
    bool grid = tower_has_grid_positions(t);
    for (int k = 0; k < plan_n_runs(t, &m->plan); k++) {
        int most = plan_run_length(t, &m->plan, k), n = 0;
        while (*at < in->n && in->ids[*at] != token)
            ++*at;
        while (*at + n < in->n && in->ids[*at + n] == token && n < most)
            n++;
        if (n < most)
            return error_set(err, "%s: image %d has %d features and %d placeholders", in->path, i,
                             most, n);
        in->spans[in->n_spans++] =
            (struct image_span){*at, grid ? v->rows / t->merge : 1, grid ? v->cols / t->merge : n};
        for (int j = *at; j < *at + n; j++, row += m->width) {
            in->embeds[j] = row;
            if (two_way) {
                in->see[2 * j] = *at;
                in->see[2 * j + 1] = *at + n;
            }
        }
        *at += n;
    }
    return true;
}

static bool encode_all(struct image_input *in, const struct runtime *rt, FILE *out,
                       struct error *err)
{
    const struct tower_config *t = encoder_config(rt->encoder);
    const json_t *names = json_object_get(in->json, "images");
    int32_t token = (int32_t)json_integer_value(json_object_get(in->json, "image_token_id"));
    struct pixel_record record = {0};
    float *all = in->pixels ? read_record(in->pixels, &record, err) : NULL;
    bool ok = !in->pixels || all;
    int at = 0;
    for (int i = 0; ok && i < in->n_images; i++) {
        struct patches p = {0};
        const char *name = json_string_value(json_array_get(names, (size_t)i));
        ok = name ? true : error_set(err, "%s: images[%d]: not a file name", in->path, i);
        ok = ok &&
             (all ? take_pixels(in, i, t, &record, &p, err) : read_picture(in, name, t, &p, err));
        ok = ok && encoder_run(rt->encoder, &p, NULL, &in->features[i], err);
        if (ok && out && !write_record(out, &in->features[i], t->n_out))
            ok = error_set(err, "cannot write features: %s", strerror(errno));
        ok = ok && place(in, i, t, rt->model->config.sees_both_ways, &at, token, err);
        patches_free(&p);
    }
    mem_free(all);
    return ok;
}

bool image_input_encode(struct image_input *in, const struct runtime *rt, const char *features,
                        struct error *err)
{
    if (!rt->encoder)
        return error_set(err, "%s: no image tower that can run here%s%s", rt->file->path,
                         rt->notice.msg[0] ? ": " : "", rt->notice.msg);
    size_t n = json_array_size(json_object_get(in->json, "images"));
    if (!n || n > 4096)
        return error_set(err, "%s: images: expected a list of files", in->path);
    in->n_images = (int)n;
    in->spans = mem_zalloc((size_t)in->n, sizeof *in->spans);
    in->see = mem_zalloc((size_t)in->n, 2 * sizeof *in->see);
    in->features = mem_zalloc(n, sizeof *in->features);
    in->embeds = mem_zalloc((size_t)in->n, sizeof *in->embeds);
    in->pos = mem_zalloc((size_t)in->n, 3 * sizeof *in->pos);
    FILE *out = features ? fopen(features, "wb") : NULL;
    if (features && !out)
        return error_set(err, "%s: %s", features, strerror(errno));
    bool ok = encode_all(in, rt, out, err);
    if (out && fclose(out) != 0 && ok)
        ok = error_set(err, "%s: %s", features, strerror(errno));
    if (!ok)
        return false;
    const struct tower_config *t = encoder_config(rt->encoder);
    in->rows = (struct prompt_rows){.n = in->n, .embeds = in->embeds};
    if (tower_has_grid_positions(t)) {
        image_positions(in->spans, in->n_spans, in->n, in->pos);
        in->rows.rope_pos = in->pos;
    }
    if (rt->model->config.sees_both_ways)
        in->rows.spans = in->see;
    return true;
}

void image_input_clear(struct image_input *in)
{
    for (int i = 0; i < in->n_images && in->features; i++)
        features_free(&in->features[i]);
    mem_free(in->features);
    mem_free(in->spans);
    mem_free(in->see);
    mem_free((void *)(uintptr_t)in->embeds);
    mem_free(in->pos);
    mem_free(in->ids);
    json_decref(in->json);
}
