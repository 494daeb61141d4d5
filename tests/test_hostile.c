/*
 * Hostile files. A small GGUF and a small Hugging Face folder, made here, are cut at every length and
 * mutated 20,000 times each with a fixed seed; each goes through what every command does with a model
 * (open, config, weights, tokenizer). Each must either load or fail with one line that names the file
 * and a field; nothing may allocate more than the file justifies. Best run under `make asan`.
 *
 * The linker sends malloc and its kin through __wrap_*, which keep the largest request.
 */
#include "backend/backend.h"
#include "base/mem.h"
#include "model/model.h"
#include "text/tokenizer/tokenizer.h"
#include "tiny_model.h"

#include <fcntl.h>
#include <ftw.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

enum { N_MUTATIONS = 20000, ALLOC_BASE = 1 << 20, ALLOC_PER_BYTE = 16 };

static size_t largest;

static void count(size_t n)
{
    if (n > largest)
        largest = n;
}

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t n);
int __real_posix_memalign(void **p, size_t align, size_t n);
void *__real_mmap(void *addr, size_t n, int prot, int flags, int fd, off_t off);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t n);
int __wrap_posix_memalign(void **p, size_t align, size_t n);
void *__wrap_mmap(void *addr, size_t n, int prot, int flags, int fd, off_t off);

void *__wrap_malloc(size_t n)
{
    count(n);
    return __real_malloc(n);
}

void *__wrap_calloc(size_t n, size_t size)
{
    size_t bytes;
    count(mul_size(n, size, &bytes) ? bytes : SIZE_MAX);
    return __real_calloc(n, size);
}

void *__wrap_realloc(void *p, size_t n)
{
    count(n);
    return __real_realloc(p, n);
}

int __wrap_posix_memalign(void **p, size_t align, size_t n)
{
    count(n);
    return __real_posix_memalign(p, align, n);
}

void *__wrap_mmap(void *addr, size_t n, int prot, int flags, int fd, off_t off)
{
    if (fd < 0)
        count(n);
    return __real_mmap(addr, n, prot, flags, fd, off);
}

/* In memory where possible: 60,000 small files are a lot for a busy disk. */
static char dir[64];
static struct backend *be;

static const char *path_of(const char *name)
{
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static void save(const char *name, const void *p, size_t n)
{
    FILE *f = fopen(path_of(name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(p, 1, n, f), n);
    fclose(f);
}

static struct buf slurp(const char *path)
{
    struct buf b = {0};
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    char part[4096];
    for (size_t n; (n = fread(part, 1, sizeof part, f)) > 0;)
        buf_add(&b, part, n);
    fclose(f);
    return b;
}

/* What every command does with MODEL. */
static bool load(const char *path, struct error *err)
{
    struct tensorfile *f = tensorfile_open(path, err);
    if (!f)
        return false;
    struct model *m = model_load(f, be, MODEL_DRAFTING, NULL, NULL, err);
    bool ok = m != NULL;
    model_free(m);
    struct tokenizer *t = ok ? tokenizer_load(f, err) : NULL;
    if (ok && t) {
        struct token_list ids = {0};
        static const char text[] = "abcd efg <s> \xff\xc3\xa9 w31";
        ok = tokenizer_encode(t, text, sizeof text - 1, TOKENIZE_SPECIAL | TOKENIZE_BOS, &ids, err);
        struct buf out = {0};
        tokenizer_decode(t, ids.ids, ids.n, true, &out);
        buf_clear(&out);
        token_list_clear(&ids);
    }
    ok = ok && t;
    tokenizer_free(t);
    tensorfile_close(f);
    return ok;
}

/* One line that names file and field. Says what was done to the file if not. */
static void check_message(const struct error *err, const char *what, size_t i)
{
    const char *msg = err->msg;
    static const char *const fields[] = {
        "magic",  "version",      "metadata",  "tensor",    "header",       "count", "alignment",
        "llama.", "general.",     "tokenizer", "config",    "vocab",        "line ", "heads",
        "rotary", "rope_",        "rms_",      "num_",      "max_position", "_size", "architect",
        "hidden", "feed-forward", "layer",     "embedding",
    };
    bool named = false;
    for (size_t k = 0; k < sizeof fields / sizeof *fields; k++)
        named |= strstr(msg + (strlen(msg) > strlen(dir) ? strlen(dir) : 0), fields[k]) != NULL;
    if (!msg[0] || strchr(msg, '\n') || !strstr(msg, dir) || !named)
        fail_msg("%s %zu: poor message '%s'", what, i, msg);
}

static void check_alloc(size_t file_bytes, const char *what, size_t i)
{
    if (largest > ALLOC_BASE + ALLOC_PER_BYTE * file_bytes)
        fail_msg("%s %zu: allocation of %zu bytes for a file of %zu", what, i, largest, file_bytes);
}

static struct buf base_gguf, base_st;

static void write_folder(void)
{
    mkdir(path_of("hf"), 0700);
    save("hf/config.json", tiny_config_json(), strlen(tiny_config_json()));
    struct buf t = {0};
    tiny_tokenizer_json(&t);
    save("hf/tokenizer.json", t.p, t.len);
    buf_clear(&t);
    save("hf/model.safetensors", base_st.p, base_st.len);
}

static void must_load(const char *name)
{
    struct error err = {0};
    if (!load(path_of(name), &err))
        fail_msg("%s", err.msg);
}

static void truncate_all(const char *file, const char *model, const struct buf *b)
{
    save(file, b->p, b->len);
    must_load(model);
    char path[300];
    snprintf(path, sizeof path, "%s/%s", dir, file);
    int fd = open(path, O_RDWR);
    for (size_t n = b->len; n-- > 0;) {
        struct error err = {0};
        assert_int_equal(ftruncate(fd, (off_t)n), 0);
        largest = 0;
        if (load(path_of(model), &err))
            fail_msg("%s cut to %zu of %zu bytes still loads", file, n, b->len);
        check_message(&err, "cut to", n);
        check_alloc(n, "cut to", n);
    }
    close(fd);
}

/* One to four edits of kinds that parsers dislike. */
static void mutate(struct buf *b, uint64_t *seed, size_t header)
{
    static const uint64_t nasty[] = {0,           1,           0x7f,          0x80,
                                     0xff,        0x7fff,      0xffff,        0x7fffffff,
                                     0x80000000u, 0xffffffffu, UINT64_MAX,    1ull << 63,
                                     1ull << 32,  1ull << 62,  UINT64_MAX - 7};
    int edits = 1 + (int)(tiny_random(seed) % 4);
    while (edits--) {
        /* nine of ten in the header: data bytes are any bytes anyway */
        size_t span = tiny_random(seed) % 10 ? header : b->len;
        size_t at = tiny_random(seed) % (span < b->len ? span : b->len);
        size_t rest = b->len - at, n = 1 + tiny_random(seed) % 32;
        if (n > rest)
            n = rest;
        switch (tiny_random(seed) % 7) {
        case 0:
            b->p[at] ^= (char)(1 << tiny_random(seed) % 8);
            break;
        case 1:
            b->p[at] = (char)tiny_random(seed);
            break;
        case 2: /* a nasty number of 1, 2, 4 or 8 bytes */
            n = (size_t)1 << tiny_random(seed) % 4;
            memcpy(b->p + at, &nasty[tiny_random(seed) % 15], n < rest ? n : rest);
            break;
        case 3: /* remove */
            memmove(b->p + at, b->p + at + n, rest - n);
            b->len -= n;
            break;
        case 4: /* repeat */
            buf_reserve(b, n + 1);
            memmove(b->p + at + n, b->p + at, rest);
            b->len += n;
            break;
        case 5: /* copy from elsewhere */
            memmove(b->p + at, b->p + tiny_random(seed) % (b->len - n + 1), n);
            break;
        case 6: /* a digit or a letter: keeps JSON alive more often */
            b->p[at] = "0123456789-.eE\"[]{}:,atfn\\u"[tiny_random(seed) % 27];
            break;
        }
        if (!b->len)
            buf_addc(b, 0);
    }
}

static void mutate_many(const char *file, const char *model, const struct buf *base, size_t header,
                        int n, uint64_t seed)
{
    int loaded = 0;
    struct buf b = {0};
    for (int i = 0; i < n; i++) {
        buf_reset(&b);
        buf_add(&b, base->p, base->len);
        mutate(&b, &seed, header);
        save(file, b.p, b.len);
        struct error err = {0};
        largest = 0;
        if (load(path_of(model), &err))
            loaded++;
        else
            check_message(&err, "mutation", (size_t)i);
        check_alloc(b.len > base->len ? b.len : base->len, "mutation", (size_t)i);
    }
    buf_clear(&b);
    print_message("%s: %d of %d mutations still load\n", file, loaded, n);
    assert_true(loaded < n);
    save(file, base->p, base->len);
    must_load(model);
}

static void test_gguf_truncated(void **state)
{
    (void)state;
    truncate_all("m.gguf", "m.gguf", &base_gguf);
}

static void test_safetensors_truncated(void **state)
{
    (void)state;
    write_folder();
    truncate_all("hf/model.safetensors", "hf", &base_st);
}

static size_t gguf_header(void)
{
    struct error err = {0};
    struct tensorfile *f = tensorfile_open_memory(base_gguf.p, base_gguf.len, "m", &err);
    assert_non_null(f);
    size_t n = (size_t)(f->tensors[0].data - (const uint8_t *)base_gguf.p);
    tensorfile_close(f);
    return n;
}

static void test_gguf_mutated(void **state)
{
    (void)state;
    mutate_many("m.gguf", "m.gguf", &base_gguf, gguf_header(), N_MUTATIONS, 1);
}

static void test_safetensors_mutated(void **state)
{
    (void)state;
    write_folder();
    uint64_t header;
    memcpy(&header, base_st.p, 8);
    mutate_many("hf/model.safetensors", "hf", &base_st, 8 + (size_t)header, N_MUTATIONS, 2);
}

static void test_json_mutated(void **state)
{
    (void)state;
    write_folder();
    struct buf config = {0}, tokenizer = {0};
    buf_adds(&config, tiny_config_json());
    tiny_tokenizer_json(&tokenizer);
    mutate_many("hf/config.json", "hf", &config, config.len, N_MUTATIONS / 4, 3);
    mutate_many("hf/tokenizer.json", "hf", &tokenizer, tokenizer.len, N_MUTATIONS / 4, 4);
    buf_clear(&config);
    buf_clear(&tokenizer);
}

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *w)
{
    (void)st, (void)flag, (void)w;
    return remove(path);
}

static int setup(void **state)
{
    (void)state;
    struct error err = {0};
    snprintf(dir, sizeof dir, "%s/steel-hostile-XXXXXX",
             access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm");
    if (!mkdtemp(dir) || !tiny_write_gguf(path_of("m.gguf"), "llama", &err)) {
        print_error("%s\n", err.msg);
        return -1;
    }
    base_gguf = slurp(path_of("m.gguf"));
    tiny_safetensors(&base_st, true);
    be = backend_open_ref();
    return be ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    be->ops->close(be);
    buf_clear(&base_gguf);
    buf_clear(&base_st);
    return nftw(dir, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gguf_truncated),        cmocka_unit_test(test_gguf_mutated),
        cmocka_unit_test(test_safetensors_truncated), cmocka_unit_test(test_safetensors_mutated),
        cmocka_unit_test(test_json_mutated),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
