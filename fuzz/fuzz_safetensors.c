/* libFuzzer entry: any bytes as a safetensors file, and its first tensors as compressed matrices. */
#include "file/tensorfile.h"
#include "base/mem.h"
#include "model/layout.h"

#include <string.h>

/* The tensor whose name ends with the suffix, because the fuzzer chooses the names. */
static const struct tensor *find(void *arg, const char *suffix)
{
    const struct tensorfile *f = arg;
    for (size_t i = 0; i < f->n_tensors; i++) {
        size_t n = strlen(f->tensors[i].name), m = strlen(suffix);
        if (n >= m && !strcmp(f->tensors[i].name + n - m, suffix))
            return &f->tensors[i];
    }
    return NULL;
}

/* For a few shapes: the layout of the tensors is found and read, or refused in one line. */
static void try_layouts(struct tensorfile *f)
{
    static const int shapes[][3] = {{64, 16, 0}, {128, 8, 0}, {64, 8, 2}, {32, 3, 0}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int awq = 0; awq < 2; awq++) {
            struct layout_config config = {
                .awq = awq, .group_len = 32, .mixed = !awq, .block = {4, 128}};
            struct layout_ask ask = {"fuzz",       find,         f,  &config, shapes[i][0],
                                     shapes[i][1], shapes[i][2], awq};
            struct packed_layout l;
            struct error err = {0};
            bool ok = layout_find(&ask, &l, &err);
            if (ok && l.kind != LAYOUT_PLAIN) {
                struct layout_rows rows = {.index = shapes[i][2] ? 1 : 0,
                                           .first = 1,
                                           .step = 2,
                                           .n = shapes[i][1] / 2 - 1,
                                           .run_length = awq};
                struct layout_bytes b = layout_bytes(&l, rows.n);
                struct layout_planes to = {mem_zalloc(b.data + 1, 1), mem_zalloc(b.scale + 1, 1),
                                           mem_zalloc(b.zero + 1, 1), mem_zalloc(b.order + 1, 1)};
                bool permuted;
                if (rows.n > 0)
                    ok = layout_read(&l, "fuzz", &rows, &to, &permuted, &err);
                mem_free(to.data);
                mem_free(to.scale);
                mem_free(to.zero);
                mem_free(to.order);
            }
            CHECK(ok || (err.msg[0] && !strchr(err.msg, '\n')), "failure without one line");
        }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct error err = {0};
    struct tensorfile *f = tensorfile_open_safetensors_memory(data, size, "fuzz.st", &err);
    if (!f) {
        CHECK(err.msg[0], "failure without a message");
        return 0;
    }
    uint8_t sum = 0;
    for (size_t i = 0; i < f->n_tensors; i++) {
        const struct tensor *t = &f->tensors[i];
        if (t->bytes)
            sum ^= t->data[0] ^ t->data[t->bytes - 1];
        CHECK(tensorfile_find(f, t->name) == t, "tensor not found by name");
    }
    volatile uint8_t keep = sum; /* the reads above must stay */
    (void)keep;
    try_layouts(f);
    tensorfile_close(f);
    return 0;
}
