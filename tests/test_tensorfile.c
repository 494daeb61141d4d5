/*
 * Opening models: GGUF and safetensors written by the test itself, split and sharded ones, and the
 * particular errors a user meets (a missing part, a wrong index, a file cut short). The golden models
 * are opened as well where they are there.
 */
#include "base/buf.h"
#include "base/mem.h"
#include "file/tensorfile.h"

#include <ftw.h>
#include <glob.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

static char dir[] = "/tmp/steel-test-XXXXXX";

static void put32(struct buf *b, uint32_t v)
{
    buf_add(b, &v, 4);
}

static void put64(struct buf *b, uint64_t v)
{
    buf_add(b, &v, 8);
}

static void put_str(struct buf *b, const char *s)
{
    put64(b, strlen(s));
    buf_adds(b, s);
}

static void put_u32_meta(struct buf *b, const char *key, uint32_t v)
{
    put_str(b, key);
    put32(b, META_U32);
    put32(b, v);
}

static void put_tensor(struct buf *b, const char *name, uint64_t rows, uint64_t cols, uint32_t type,
                       uint64_t offset)
{
    put_str(b, name);
    put32(b, 2);
    put64(b, cols);
    put64(b, rows);
    put32(b, type);
    put64(b, offset);
}

static const char *path_of(const char *name)
{
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static void save(const char *name, const struct buf *b)
{
    FILE *f = fopen(path_of(name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(b->p, 1, b->len, f), b->len);
    fclose(f);
}

static void save_text(const char *name, const char *text)
{
    struct buf b = {0};
    buf_adds(&b, text);
    save(name, &b);
    buf_clear(&b);
}

/* One part of a split: its own tensor "t<no>" (2 rows of 32 F32), metadata as llama-gguf-split. */
static void save_part(const char *name, int no, int count, int total, int alignment)
{
    struct buf b = {0};
    buf_adds(&b, "GGUF");
    put32(&b, 3);
    put64(&b, 1);
    put64(&b, alignment ? 5 : 4);
    put_u32_meta(&b, "split.no", (uint32_t)no);
    put_u32_meta(&b, "split.count", (uint32_t)count);
    put_u32_meta(&b, "split.tensors.count", (uint32_t)total);
    put_u32_meta(&b, "extra", 7);
    if (alignment)
        put_u32_meta(&b, "general.alignment", (uint32_t)alignment);
    char t[16];
    snprintf(t, sizeof t, "t%d", no);
    put_tensor(&b, t, 2, 32, 0, 0);
    while (b.len % (size_t)(alignment ? alignment : 32))
        buf_addc(&b, 0);
    for (int i = 0; i < 64; i++) {
        float v = (float)(no * 100 + i);
        buf_add(&b, &v, 4);
    }
    save(name, &b);
    buf_clear(&b);
}

static void expect_error(const char *name, const char *what)
{
    struct error err = {0};
    struct tensorfile *f = tensorfile_open(path_of(name), &err);
    if (f)
        fail_msg("%s opened, expected an error about %s", name, what);
    if (!strstr(err.msg, what))
        fail_msg("%s: message '%s' lacks '%s'", name, err.msg, what);
}

static struct tensorfile *must_open(const char *path)
{
    struct error err = {0};
    struct tensorfile *f = tensorfile_open(path, &err);
    if (!f)
        fail_msg("%s", err.msg);
    return f;
}

static void test_gguf_meta(void **state)
{
    (void)state;
    struct buf b = {0};
    buf_adds(&b, "GGUF");
    put32(&b, 2);
    put64(&b, 0);
    put64(&b, 8);
    put_u32_meta(&b, "u", 4000000000u);
    put_str(&b, "i");
    put32(&b, META_I16);
    buf_add(&b, &(int16_t){-5}, 2);
    put_str(&b, "f");
    put32(&b, META_F32);
    buf_add(&b, &(float){0.5f}, 4);
    put_str(&b, "b");
    put32(&b, META_BOOL);
    buf_addc(&b, 1);
    put_str(&b, "s");
    put32(&b, META_STRING);
    put_str(&b, "text");
    put_str(&b, "words");
    put32(&b, META_ARRAY);
    put32(&b, META_STRING);
    put64(&b, 3);
    put_str(&b, "one");
    put_str(&b, "");
    put_str(&b, "three");
    put_str(&b, "numbers");
    put32(&b, META_ARRAY);
    put32(&b, META_I32);
    put64(&b, 2);
    put32(&b, 1);
    put32(&b, (uint32_t)-2);
    put_str(&b, "big");
    put32(&b, META_U64);
    put64(&b, UINT64_MAX);

    struct error err = {0};
    struct tensorfile *f = tensorfile_open_memory(b.p, b.len, "mem", &err);
    if (!f)
        fail_msg("%s", err.msg);
    int64_t i;
    double d;
    bool flag;
    assert_true(meta_get_int(f, "u", &i) && i == 4000000000);
    assert_true(meta_get_int(f, "i", &i) && i == -5);
    assert_true(meta_get_int(f, "b", &i) && i == 1);
    assert_false(meta_get_int(f, "f", &i));
    assert_false(meta_get_int(f, "big", &i));
    assert_false(meta_get_int(f, "absent", &i));
    assert_true(meta_get_float(f, "f", &d) && d == 0.5);
    assert_true(meta_get_float(f, "i", &d) && d == -5);
    assert_false(meta_get_float(f, "s", &d));
    assert_true(meta_get_bool(f, "b", &flag) && flag);
    assert_false(meta_get_bool(f, "u", &flag));
    char *s = meta_get_string(f, "s");
    assert_string_equal(s, "text");
    mem_free(s);
    assert_null(meta_get_string(f, "u"));

    const struct meta_array *a = &tensorfile_meta(f, "words")->v.a;
    size_t cursor = 0, len, n = 0;
    const char *p, *want[] = {"one", "", "three"};
    while (meta_array_string(a, &cursor, &p, &len)) {
        assert_true(n < 3 && len == strlen(want[n]) && !memcmp(p, want[n], len));
        n++;
    }
    assert_int_equal(n, 3);
    assert_false(meta_array_number(a, 0, &d));
    a = &tensorfile_meta(f, "numbers")->v.a;
    assert_true(meta_array_number(a, 1, &d) && d == -2);
    assert_false(meta_array_number(a, 2, &d));
    tensorfile_close(f);
    buf_clear(&b);
}

static void test_split(void **state)
{
    (void)state;
    save_part("m-00001-of-00003.gguf", 0, 3, 3, 64);
    save_part("m-00002-of-00003.gguf", 1, 3, 3, 0);
    expect_error("m-00002-of-00003.gguf", "m-00003-of-00003.gguf: No such file");
    save_part("m-00003-of-00003.gguf", 2, 3, 3, 0);
    for (int named = 1; named <= 3; named++) {
        char name[32];
        snprintf(name, sizeof name, "m-%05d-of-00003.gguf", named);
        struct tensorfile *f = must_open(path_of(name));
        assert_int_equal(f->n_tensors, 3);
        assert_int_equal(f->n_shards, 3);
        for (int i = 0; i < 3; i++) {
            char t[16];
            snprintf(t, sizeof t, "t%d", i);
            const struct tensor *x = tensorfile_find(f, t);
            assert_non_null(x);
            assert_int_equal(x->shard, i);
            assert_true(x->dims[0] == 32 && x->dims[1] == 2 && x->bytes == 256);
            float v;
            memcpy(&v, x->data + 4, 4);
            assert_true(v == (float)(100 * i + 1));
            tensorfile_forget(f, x);
        }
        assert_int_equal(tensorfile_bytes(f), 768);
        tensorfile_close(f);
    }
    save_part("m-00003-of-00003.gguf", 1, 3, 3, 0);
    expect_error("m-00001-of-00003.gguf", "'split.no' is 1, expected 2");
    save_part("m-00003-of-00003.gguf", 2, 4, 3, 0);
    expect_error("m-00001-of-00003.gguf", "'split.count' is 4, expected 3");
    save_part("m-00003-of-00003.gguf", 2, 3, 4, 0);
    expect_error("m-00001-of-00003.gguf", "'split.tensors.count' is 4, expected 3");
    save_part("m-00001-of-00003.gguf", 0, 3, 9, 0);
    save_part("m-00002-of-00003.gguf", 1, 3, 9, 0);
    save_part("m-00003-of-00003.gguf", 2, 3, 9, 0);
    expect_error("m-00001-of-00003.gguf", "'split.tensors.count' is 9, but the parts hold 3");
    save_part("renamed.gguf", 0, 3, 3, 0);
    expect_error("renamed.gguf", "must keep its name");
    save_part("x-00001-of-00002.gguf", 0, 3, 3, 0);
    expect_error("x-00001-of-00002.gguf", "the name says part of 2");
}

static void put_safetensors(struct buf *b, const char *header, size_t data)
{
    put64(b, strlen(header));
    buf_adds(b, header);
    for (size_t i = 0; i < data; i++)
        buf_addc(b, (char)i);
}

static void save_safetensors(const char *name, const char *header, size_t data)
{
    struct buf b = {0};
    put_safetensors(&b, header, data);
    save(name, &b);
    buf_clear(&b);
}

static void test_folder(void **state)
{
    (void)state;
    char sub[256];
    snprintf(sub, sizeof sub, "%s/hf", dir);
    mkdir(sub, 0700);
    expect_error("hf", "hf/config.json: No such file");
    save_text("hf/config.json", "[1]");
    expect_error("hf", "hf/config.json: not a JSON object");
    save_text("hf/config.json", "{\"a\": 1, \"a\": 2}");
    expect_error("hf", "hf/config.json: line 1, column");
    save_text("hf/config.json", "{\"model_type\": \"x\"}");
    expect_error("hf", "no model.safetensors and no");

    save_text("hf/model.safetensors.index.json", "{\"weight_map\": {\"a\": \"../up\"}}");
    expect_error("hf", "weight_map: tensor 'a' names no file");
    save_text("hf/model.safetensors.index.json",
              "{\"weight_map\": {\"a\": \"1.safetensors\", \"b\": \"2.safetensors\"}}");
    save_safetensors("hf/1.safetensors",
                     "{\"a\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[0,12]},"
                     "\"__metadata__\":{\"format\":\"pt\"}}",
                     12);
    expect_error("hf", "hf/2.safetensors: No such file");
    save_safetensors("hf/2.safetensors",
                     "{\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}", 1);
    expect_error("hf", "hf/2.safetensors: tensor 'a' is there twice");
    save_safetensors("hf/2.safetensors",
                     "{\"c\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}", 1);
    expect_error("hf", "tensor 'b' is not in 2.safetensors");
    save_safetensors("hf/2.safetensors",
                     "{\"b\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[12,13]},"
                     "\"c\":{\"dtype\":\"I8\",\"shape\":[2,3,1,1,2],\"data_offsets\":[0,12]}}",
                     13);
    const char *spelt[] = {"hf", "hf/", "hf/config.json"};
    for (int i = 0; i < 3; i++) {
        struct tensorfile *f = must_open(path_of(spelt[i]));
        const struct tensor *a = tensorfile_find(f, "a");
        assert_true(!f->is_gguf && f->n_shards == 2 && f->n_tensors == 3);
        assert_true(a->type == DT_BF16 && a->n_dims == 2 && a->dims[0] == 3 && a->dims[1] == 2);
        const struct tensor *b = tensorfile_find(f, "b");
        assert_true(b->type == DT_NONE && !strcmp(b->type_name, "U8") && b->data[0] == 12);
        const struct tensor *c =
            tensorfile_find(f, "c"); /* five dimensions: the outer ones as one */
        assert_true(c->n_dims == 4 && c->dims[0] == 2 && c->dims[1] == 1 && c->dims[3] == 6);
        assert_true(f->config && !f->tokenizer_config && !f->generation_config);
        tensorfile_close(f);
    }
    expect_error("hf/1.safetensors", "name the folder");
    save_text("hf/tokenizer_config.json", "{");
    expect_error("hf", "hf/tokenizer_config.json: line 1");
}

static void test_safetensors_errors(void **state)
{
    (void)state;
    static const struct {
        const char *header;
        size_t data;
        const char *what;
    } cases[] = {
        {"[]", 0, "header is not a JSON object"},
        {"{\"a\":1}", 0, "tensor 'a': dtype is missing"},
        {"{\"a\":{\"dtype\":\"X9\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
         "unknown dtype 'X9'"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,1]}}", 1, "shape[0]"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1.0],\"data_offsets\":[0,1]}}", 1, "shape[0]"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,1]}}", 1,
         "shape[1]"},
        {"{\"a\":{\"dtype\":\"F64\",\"shape\":[4611686018427387904],\"data_offsets\":[0,1]}}", 1,
         "size overflows"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 1,
         "shape"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "data_offsets is not a pair"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,0]}}", 1, "data_offsets"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", 1, "past the end"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,1]}}", 1, "shape wants 2"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}", 2, "leave a hole"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
         "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}",
         3, "tensor 'b': data_offsets overlap"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 2,
         "1 bytes at the end"},
        {"{\"a\\nb\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "not text"},
        {"{\"a\":{},\"a\":{}}", 0, "duplicate"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct buf b = {0};
        put_safetensors(&b, cases[i].header, cases[i].data);
        struct error err = {0};
        struct tensorfile *f = tensorfile_open_safetensors_memory(b.p, b.len, "mem.st", &err);
        if (f)
            fail_msg("case %zu opened: %s", i, cases[i].header);
        if (!strstr(err.msg, "mem.st: ") || !strstr(err.msg, cases[i].what))
            fail_msg("case %zu: '%s' lacks '%s'", i, err.msg, cases[i].what);
        buf_clear(&b);
    }
}

/* A GGUF of one tensor with one thing wrong. */
static void expect_bad_tensor(uint32_t n_dims, uint64_t dim0, uint64_t dim1, uint32_t type,
                              uint64_t offset, const char *what)
{
    struct buf b = {0};
    buf_adds(&b, "GGUF");
    put32(&b, 3);
    put64(&b, 1);
    put64(&b, 0);
    put_str(&b, "w");
    put32(&b, n_dims);
    put64(&b, dim0);
    put64(&b, dim1);
    put32(&b, type);
    put64(&b, offset);
    while (b.len < 256)
        buf_addc(&b, 0);
    struct error err = {0};
    struct tensorfile *f = tensorfile_open_memory(b.p, b.len, "mem.gguf", &err);
    if (what) {
        if (f)
            fail_msg("opened, expected '%s'", what);
        if (!strstr(err.msg, "mem.gguf: tensor 'w'") || !strstr(err.msg, what))
            fail_msg("'%s' lacks '%s'", err.msg, what);
    } else if (!f) {
        fail_msg("%s", err.msg);
    }
    tensorfile_close(f);
    buf_clear(&b);
}

static void test_gguf_errors(void **state)
{
    (void)state;
    expect_bad_tensor(2, 32, 1, 0, 0, NULL);
    expect_bad_tensor(2, 32, 1, 16, 0, "not whole blocks of IQ2_XXS");
    expect_bad_tensor(5, 32, 1, 0, 0, "5 dimensions");
    expect_bad_tensor(0, 32, 1, 0, 0, "0 dimensions");
    expect_bad_tensor(2, 0, 1, 0, 0, "dimension 0 is 0");
    expect_bad_tensor(2, 1ull << 40, 1ull << 40, 0, 0, "dimension 1 is");
    expect_bad_tensor(2, 1ull << 62, 1, 28, 0, "size overflows");
    expect_bad_tensor(2, 32, 1, 4, 0, "unknown type number 4");
    expect_bad_tensor(2, 33, 1, 8, 0, "not whole blocks of Q8_0");
    expect_bad_tensor(2, 32, 1, 0, 8, "not a multiple of 32");
    expect_bad_tensor(2, 32, 1, 0, 64, "past the end");
    expect_bad_tensor(2, 32, 1, 0, UINT64_MAX - 31, "past the end");
    expect_bad_tensor(2, 320, 1, 0, 0, "past the end");

    save_text("not.gguf", "hello, I am no model");
    expect_error("not.gguf", "not.gguf: not a GGUF file");
    save_text("empty.gguf", "");
    expect_error("empty.gguf", "empty.gguf: magic number");
    save_text("v1.gguf", "GGUF\1");
    expect_error("v1.gguf", "file ends inside the version");
    expect_error("absent.gguf", "No such file");
    mkfifo(path_of("pipe.gguf"), 0600);
    expect_error("pipe.gguf", "not a regular file");

    struct buf b = {0};
    buf_adds(&b, "GGUF");
    put32(&b, 3);
    put64(&b, 0);
    put64(&b, 2);
    put_u32_meta(&b, "k", 1);
    put_u32_meta(&b, "k", 2);
    save("twice.gguf", &b);
    expect_error("twice.gguf", "metadata 'k' is there twice");
    buf_reset(&b);
    buf_adds(&b, "GGUF");
    put32(&b, 3);
    put64(&b, 2);
    put64(&b, 0);
    put_tensor(&b, "one", 2, 32, 0, 0);
    put_tensor(&b, "two", 1, 32, 0, 128);
    while (b.len < 512)
        buf_addc(&b, 0);
    save("overlap.gguf", &b);
    expect_error("overlap.gguf", "tensor 'two': offset lies inside tensor 'one'");
    buf_clear(&b);
}

static void open_all(const glob_t *g)
{
    for (size_t i = 0; i < g->gl_pathc; i++) {
        struct tensorfile *f = must_open(g->gl_pathv[i]);
        print_message("%-60s %4zu tensors %4zu keys\n", f->path, f->n_tensors, f->n_meta);
        tensorfile_close(f);
    }
}

/* Folders of the families that run; the rest opens when its family does (test_golden). */
static void test_micro(void **state)
{
    (void)state;
    glob_t g = {0};
    glob("tests/golden/{llama3-rope,mistral-window,qwen2,qwen3,qwen3moe}", GLOB_BRACE, NULL, &g);
    assert_int_equal(g.gl_pathc, 5);
    open_all(&g);
    globfree(&g);
}

static void test_golden(void **state)
{
    (void)state;
    glob_t g = {0};
    glob("../shared/golden/models/*", 0, NULL, &g);
    glob("../shared/golden/models/*/*.gguf", GLOB_APPEND, NULL, &g);
    glob("../shared/golden/models/*/*/*.gguf", GLOB_APPEND, NULL, &g);
    glob("../shared/golden/tokenizers/*.gguf", GLOB_APPEND, NULL, &g);
    if (!g.gl_pathc) {
        print_message("skipped: no ../shared/golden here\n");
        skip();
    }
    open_all(&g);
    globfree(&g);
}

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *w)
{
    (void)st, (void)flag, (void)w;
    return remove(path);
}

static int setup(void **state)
{
    (void)state;
    return mkdtemp(dir) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    return nftw(dir, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gguf_meta),
        cmocka_unit_test(test_gguf_errors),
        cmocka_unit_test(test_split),
        cmocka_unit_test(test_folder),
        cmocka_unit_test(test_safetensors_errors),
        cmocka_unit_test(test_micro),
        cmocka_unit_test(test_golden),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
