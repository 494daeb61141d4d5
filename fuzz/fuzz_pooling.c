/* libFuzzer entry: the files of sentence-transformers beside a model. The input is modules.json,
 * 1_Pooling/config.json (2_Dense's, too) and 2_Dense/model.safetensors, with a NUL between them. The result is a
 * kind of pooling within its bounds, or an error of one line. */
#include "base/error.h"
#include "model/families/family.h"
#include "model/pooling.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static void put(const char *dir, const char *name, const void *data, size_t n)
{
    char path[96];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(data, 1, n, f) == n && fclose(f) == 0, "%s", path);
}

static char where[32] = "/tmp/steel-fuzz-XXXXXX";
static struct tensorfile *file;

/* The smallest folder that can be opened. */
static struct tensorfile *folder(void)
{
    static const char config[] = "{\"model_type\": \"bert\"}";
    static const char tensors[] = "\x4c\0\0\0\0\0\0\0"
                                  "{\"classifier.weight\":{\"dtype\":\"F32\",\"shape\":[1,1],"
                                  "\"data_offsets\":[0,4]}}    \0\0\0\0";
    struct error err = {0};
    char path[64];
    CHECK(mkdtemp(where), "no folder");
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", where, i ? "2_Dense" : "1_Pooling");
        CHECK(mkdir(path, 0700) == 0, "%s", path);
    }
    put(where, "config.json", config, sizeof config - 1);
    put(where, "model.safetensors", tensors, sizeof tensors - 1);
    struct tensorfile *f = tensorfile_open(where, &err);
    CHECK(f, "%s", err.msg);
    return f;
}

/* The folder is removed when the fuzzer exits. */
static void remove_folder(void)
{
    static const char *const all[] = {"modules.json",
                                      "1_Pooling/config.json",
                                      "2_Dense/config.json",
                                      "2_Dense/model.safetensors",
                                      "1_Pooling",
                                      "2_Dense",
                                      "config.json",
                                      "model.safetensors",
                                      ""};
    char path[96];
    tensorfile_close(file);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        snprintf(path, sizeof path, "%s/%s", where, all[i]);
        CHECK(remove(path) == 0, "%s", path);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const names[] = {"modules.json", "1_Pooling/config.json",
                                        "2_Dense/model.safetensors"};
    struct config c = {.n_embd = 8, .family = &family_bert};
    if (!file) {
        file = folder();
        atexit(remove_folder);
    }
    for (int i = 0; i < 3; i++) {
        const uint8_t *end = i < 2 ? memchr(data, 0, size) : NULL;
        size_t n = end ? (size_t)(end - data) : size;
        put(where, names[i], data, n);
        if (i == 1)
            put(where, "2_Dense/config.json", data, n);
        data += end ? n + 1 : n;
        size -= end ? n + 1 : n;
    }
    for (int kind = -1; kind <= POOLING_RANK; kind++) {
        struct pooling p;
        struct error err = {0};
        bool ok = pooling_load(file, &c, kind, &p, &err);
        CHECK(ok || (err.msg[0] && !strchr(err.msg, '\n')), "an error of no line, or of several");
        if (ok) {
            CHECK(p.width >= 1 && p.n_dense <= POOLING_MAX_DENSE && p.n_embd == 8, "bounds");
            pooling_clear(&p);
        }
    }
    return 0;
}
