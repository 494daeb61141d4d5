/* libFuzzer entry: adapters for a small model with experts (tests/golden/qwen3moe; run it from the project's root). The
 * input is a GGUF, or adapter_config.json, a NUL and a safetensors file. The result is changes that fit the
 * model's weights, or an error of one line. */
#include "base/error.h"
#include "model/adapter.h"
#include "model/build.h"
#include "model/config.h"

#include <jansson.h>
#include <string.h>

static struct tensorfile *open_input(const uint8_t *data, size_t size, struct error *err)
{
    if (size >= 4 && !memcmp(data, "GGUF", 4))
        return tensorfile_open_memory(data, size, "fuzz.gguf", err);
    const uint8_t *end = memchr(data, 0, size);
    size_t n = end ? (size_t)(end - data) : size;
    json_t *config = json_loadb((const char *)data, n, 0, NULL);
    struct tensorfile *f = NULL;
    if (json_is_object(config) && end)
        f = tensorfile_open_safetensors_memory(end + 1, size - n - 1, "fuzz", err);
    else
        error_set(err, "no config");
    json_decref(f ? f->config : config);
    if (f)
        f->config = config;
    return f;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct tensorfile *base;
    static struct config c;
    static struct outline model;
    struct error err = {0};
    if (!base) {
        base = tensorfile_open("tests/golden/qwen3moe", &err);
        CHECK(base && config_load(base, &c, &err) && outline_load(base, &c, &model, &err), "%s",
              err.msg);
    }
    struct tensorfile *f = open_input(data, size, &err);
    if (!f) {
        CHECK(err.msg[0], "failure without a message");
        return 0;
    }
    struct adapter *a = adapter_read(f, &c, false, model.specs, model.n_specs, &err);
    CHECK(a || (err.msg[0] && !strchr(err.msg, '\n')), "an error of no line, or of several");
    CHECK(!a || (a->n_changed > 0 && a->n_specs == model.n_specs), "an adapter of nothing");
    if (a)
        adapter_free(a);
    tensorfile_close(f);
    return 0;
}
