/*
 * libFuzzer entry: any bytes as a GGUF file. Reads directory, config and metadata, dequantises the first
 * and last block of each tensor, and builds the list of tensors that its family would load, or its image tower.
 */
#include "base/mem.h"
#include "file/tensorfile.h"
#include "model/config.h"
#include "model/model.h"
#include "vision/image_plan.h"
#include "vision/positions.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_blocks(const struct tensor *t)
{
    float values[QK_K];
    if (!dtype_is_weight(t->type))
        return;
    size_t n = (size_t)dtype_table[t->type].block_len, bytes = dtype_bytes(t->type, n);
    CHECK(t->bytes % bytes == 0 && n <= QK_K, "no whole blocks");
    for (size_t at = 0; at<t->bytes; at += t->bytes> bytes ? t->bytes - bytes : bytes)
        quant_dequantize(t->type, t->data + at, values, n);
}

/* The networks of an image tower, its positions, and the views of images. */
static void read_tower(const struct tensorfile *f)
{
    static struct config config, part_config;
    static struct tower_config tower, part_tower;
    static struct image_plan plan;
    static const int sizes[][2] = {{1024, 1024}, {640, 47}, {1, 190}, {5000, 26}};
    enum { MOST = 4096 };
    struct error err = {0};
    struct positions positions = {0};
    if (!tower_load(f, &config, &tower, &err)) {
        CHECK(err.msg[0], "failure without a message");
        return;
    }
    bool ok = plan_limit(&tower, MOST, &err);
    CHECK(ok || err.msg[0], "failure without a message");
    for (size_t i = 0; ok && i < sizeof sizes / sizeof *sizes; i++) {
        struct buf text = {0};
        err = (struct error){0};
        if (plan_image(&tower, sizes[i][0], sizes[i][1], &plan, &err)) {
            CHECK(plan_features(&tower, &plan) > 0, "an image without features");
            for (int k = 0; k < plan.n_views; k++)
                CHECK(plan.views[k].rows * plan.views[k].cols <= plan_most_patches(&tower),
                      "a view of %d x %d", plan.views[k].rows, plan.views[k].cols);
            plan_text(&tower, &plan, 0, &text);
            buf_clear(&text);
        } else {
            CHECK(err.msg[0], "failure without a message");
        }
    }
    for (int i = 0; i < tower_n_parts(&tower); i++) {
        struct outline outline = {0};
        err = (struct error){0};
        tower_part(&config, &tower, i, &part_config, &part_tower);
        ok = outline_load(f, &part_config, &outline, &err);
        CHECK(ok || err.msg[0], "failure without a message");
        if (ok)
            outline_free(&outline);
    }
    if (!positions_load(f, &config, &positions, &err))
        CHECK(err.msg[0], "failure without a message");
    positions_free(&positions);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct error err = {0};
    struct tensorfile *f = tensorfile_open_memory(data, size, "fuzz.gguf", &err);
    if (!f) {
        CHECK(err.msg[0], "failure without a message");
        return 0;
    }
    /* Every byte the directory promises must be readable. */
    uint8_t sum = 0;
    for (size_t i = 0; i < f->n_tensors; i++)
        if (f->tensors[i].bytes) {
            sum ^= f->tensors[i].data[0] ^ f->tensors[i].data[f->tensors[i].bytes - 1];
            read_blocks(&f->tensors[i]);
        }
    for (size_t i = 0; i < f->n_meta; i++) {
        const struct meta *m = &f->meta[i];
        double number;
        if (m->type != META_ARRAY) {
            meta_get_float(f, m->key, &number);
            mem_free(meta_get_string(f, m->key));
            continue;
        }
        size_t cursor = 0, len;
        const char *p;
        while (meta_array_string(&m->v.a, &cursor, &p, &len))
            if (len)
                sum ^= (uint8_t)(p[0] ^ p[len - 1]);
        if (m->v.a.n)
            meta_array_number(&m->v.a, m->v.a.n - 1, &number);
    }
    static struct config config;
    struct outline outline = {0};
    bool ok = config_load(f, &config, &err) && outline_load(f, &config, &outline, &err);
    CHECK(ok || err.msg[0], "failure without a message");
    if (ok)
        outline_free(&outline);
    read_tower(f);
    volatile uint8_t keep = sum; /* the reads above must stay */
    (void)keep;
    tensorfile_close(f);
    return 0;
}
