/* Files of saved prefixes: what is written is read, and nothing else is. */
#include "engine/prefix_file.h"
#include "base/mem.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

enum { PAGE_LEN = 4, N_TOKENS = 10, PAGE = 40, STATE = 24, RECORDS = 5 };

static char dir[64];
static const struct prefix_shape shape = {.model = {1, 2},
                                          .owner = {3, 4},
                                          .page_bytes = PAGE,
                                          .state_bytes = STATE,
                                          .page_len = PAGE_LEN};

static void record(int i, char out[PAGE])
{
    for (int k = 0; k < PAGE; k++)
        out[k] = (char)(i * 50 + k);
}

static bool save(const char *name, const struct prefix_shape *s, struct error *err)
{
    uint64_t content[N_TOKENS], bytes = 0;
    struct prefix_ids ids = {.content = content, .n_tokens = N_TOKENS, .places = {4, N_TOKENS}};
    ids.n_states = s->state_bytes ? 2 : 0;
    for (int i = 0; i < N_TOKENS; i++)
        content[i] = (uint64_t)i * 7;
    struct prefix_writer *w = prefix_writer_open(dir, name, s, &ids, err);
    bool ok = w != NULL;
    for (int i = 0; ok && i < (s->state_bytes ? RECORDS : RECORDS - 2); i++) {
        char b[PAGE];
        record(i, b);
        ok = prefix_writer_add(w, b, err);
    }
    ok = ok && prefix_writer_finish(w, &bytes, err);
    prefix_writer_free(w);
    return ok;
}

static bool is_right(struct prefix_reader *r)
{
    const struct prefix_ids *ids = prefix_reader_ids(r);
    int n = ids->n_tokens;
    struct error err;
    bool ok = n == N_TOKENS && ids->n_states == 2 && ids->places[0] == 4;
    for (int i = 0; ok && i < n; i++)
        ok = ids->content[i] == (uint64_t)i * 7;
    for (int i = 0; ok && i < RECORDS; i++) {
        char want[PAGE], b[PAGE] = {0};
        record(i, want);
        ok = prefix_reader_record(r, i, b, &err) && !memcmp(b, want, i < 3 ? PAGE : STATE);
    }
    return ok;
}

static char *path_of(const char *name)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static size_t load(const char *name, char out[4096])
{
    int fd = open(path_of(name), O_RDONLY);
    assert_true(fd >= 0);
    ssize_t n = read(fd, out, 4096);
    close(fd);
    assert_true(n > 0 && n < 4096);
    return (size_t)n;
}

static void put(const char *name, const char *p, size_t n)
{
    int fd = open(path_of(name), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0 && write(fd, p, n) == (ssize_t)n);
    close(fd);
}

static int n_files(void)
{
    int n = 0;
    DIR *d = opendir(dir);
    while (readdir(d))
        n++;
    closedir(d);
    return n - 2;
}

static void must_refuse(const char *name, const struct prefix_shape *want, int most,
                        const char *why)
{
    struct error err = {0};
    struct prefix_reader *r = prefix_reader_open(dir, name, want, most, &err);
    if (r || !strstr(err.msg, why))
        fail_msg("%s: '%s', wanted '%s'", name, r ? "accepted" : err.msg, why);
}

static void test_round(void **state)
{
    (void)state;
    struct error err = {0};
    struct stat st;
    assert_true(save("a", &shape, &err));
    assert_int_equal(n_files(), 1);
    assert_true(!stat(path_of("a"), &st) && (st.st_mode & 0777) == 0600);
    struct prefix_reader *r = prefix_reader_open(dir, "a", &shape, N_TOKENS, &err);
    assert_true(r && is_right(r) && prefix_reader_bytes(r) == (uint64_t)st.st_size);
    assert_true(save("a", &shape, &err)); /* over itself: a reader keeps what it opened */
    assert_true(is_right(r));
    prefix_reader_free(r);
}

static void test_foreign(void **state)
{
    (void)state;
    struct error err = {0};
    assert_true(save("a", &shape, &err));
    struct prefix_shape s = shape;
    s.model[1] ^= 1;
    must_refuse("a", &s, N_TOKENS, "another model");
    s = shape, s.owner[0] ^= 1;
    must_refuse("a", &s, N_TOKENS, "another client");
    s = shape, s.page_bytes++;
    must_refuse("a", &s, N_TOKENS, "another model");
    s = shape, s.state_bytes = 0;
    must_refuse("a", &s, N_TOKENS, "another model");
    s = shape, s.page_len = 8;
    must_refuse("a", &s, N_TOKENS, "another model");
    must_refuse("a", &shape, N_TOKENS - 1, "10 tokens");
    must_refuse("none", &shape, N_TOKENS, "No such file");
}

/* Every single byte of a file matters. */
static void test_flips(void **state)
{
    (void)state;
    struct error err = {0};
    char whole[4096], b[4096];
    assert_true(save("a", &shape, &err));
    size_t n = load("a", whole);
    for (size_t i = 0; i < n; i++)
        for (int bit = 0; bit < 8; bit += 3) {
            memcpy(b, whole, n);
            b[i] = (char)(b[i] ^ 1 << bit);
            put("b", b, n);
            must_refuse("b", &shape, N_TOKENS, "");
        }
    for (size_t i = 0; i < n; i++) {
        put("b", whole, i);
        must_refuse("b", &shape, N_TOKENS, "");
    }
    memcpy(b, whole, n);
    b[n] = 0;
    put("b", b, n + 1);
    must_refuse("b", &shape, N_TOKENS, "bytes instead of");
    /* two records that have changed places */
    size_t from = n - 2 * (STATE + 8) - 3 * (PAGE + 8);
    memcpy(b, whole, n);
    memcpy(b + from, whole + from + PAGE + 8, PAGE + 8);
    memcpy(b + from + PAGE + 8, whole + from, PAGE + 8);
    put("b", b, n);
    must_refuse("b", &shape, N_TOKENS, "record 0 of the file is damaged");
    put("b", whole, n);
    struct prefix_reader *r = prefix_reader_open(dir, "b", &shape, N_TOKENS, &err);
    assert_true(r && is_right(r));
    /* it changes after it was checked */
    b[0] = 0;
    int fd = open(path_of("b"), O_WRONLY);
    assert_true(pwrite(fd, "x", 1, (off_t)from + 5) == 1);
    close(fd);
    assert_false(prefix_reader_record(r, 0, b, &err));
    prefix_reader_free(r);
    unlink(path_of("b"));
}

static void test_names(void **state)
{
    (void)state;
    static const char *const bad[] = {"",   ".",   "..",  ".a",   "a/b",      "../a",
                                      "/a", "a b", "a\n", "a\\b", "\xc3\xa4", "a:b"};
    struct error err = {0};
    char longest[PREFIX_NAME_MOST + 1];
    memset(longest, 'x', sizeof longest);
    longest[PREFIX_NAME_MOST] = 0;
    assert_false(prefix_name_is_valid(longest));
    longest[PREFIX_NAME_MOST - 1] = 0;
    assert_true(prefix_name_is_valid(longest) && prefix_name_is_valid("A-b_9.bin"));
    int n = n_files();
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_false(prefix_name_is_valid(bad[i]) || save(bad[i], &shape, &err));
        must_refuse(bad[i], &shape, N_TOKENS, "no name");
    }
    assert_int_equal(n_files(), n);
}

/* States are where they can be: after whole pages, and at the end. */
static void test_places(void **state)
{
    (void)state;
    static const uint64_t bad[][3] = {{2, 3, N_TOKENS},        {2, 4, 4}, {2, 0, N_TOKENS},
                                      {2, N_TOKENS, N_TOKENS}, {1, 8, 0}, {2, 8, 12},
                                      {2, 12, N_TOKENS}};
    const uint64_t content[N_TOKENS] = {0};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct error err = {0};
        uint64_t bytes;
        char b[PAGE] = {0};
        struct prefix_ids ids = {
            .content = content, .n_tokens = N_TOKENS, .places = {bad[i][1], bad[i][2]}};
        ids.n_states = (int)bad[i][0];
        struct prefix_writer *w = prefix_writer_open(dir, "g", &shape, &ids, &err);
        for (int k = 0; k < 3 + ids.n_states; k++)
            assert_true(prefix_writer_add(w, b, &err));
        assert_true(prefix_writer_finish(w, &bytes, &err));
        prefix_writer_free(w);
        must_refuse("g", &shape, N_TOKENS, "tokens are damaged");
    }
    unlink(path_of("g"));
}

/* Links, pipes and folders are not read, and links are not written through. */
static void test_kinds(void **state)
{
    (void)state;
    struct error err = {0};
    assert_true(save("a", &shape, &err));
    assert_int_equal(symlink("a", path_of("link")), 0);
    assert_int_equal(mkfifo(path_of("pipe"), 0600), 0);
    assert_int_equal(mkdir(path_of("folder"), 0700), 0);
    must_refuse("link", &shape, N_TOKENS, "cannot open");
    must_refuse("pipe", &shape, N_TOKENS, "no regular file");
    must_refuse("folder", &shape, N_TOKENS, "no regular file");
    put("victim", "precious", 8);
    assert_int_equal(symlink("victim", path_of(".c.tmp")), 0);
    assert_false(save("c", &shape, &err));
    char b[4096];
    assert_int_equal(load("victim", b), 8);
    assert_false(save("folder", &shape, &err));
    assert_true(save("link", &shape, &err)); /* the link itself is replaced */
    assert_int_equal(load("victim", b), 8);
    for (const char *const *p = (const char *const[]){"link", "pipe", "victim", ".c.tmp", NULL}; *p;
         p++)
        unlink(path_of(*p));
    rmdir(path_of("folder"));
}

/* A writer that was killed, or is stopped by an error, leaves no file of that name; two do not mix. */
static void test_aborted(void **state)
{
    (void)state;
    struct error err = {0};
    const uint64_t content[N_TOKENS] = {0};
    const struct prefix_ids ids = {
        .content = content, .n_tokens = N_TOKENS, .places = {4, N_TOKENS}, .n_states = 2};
    char b[PAGE] = {0};
    int n = n_files();
    struct prefix_writer *w = prefix_writer_open(dir, "d", &shape, &ids, &err);
    assert_true(w && prefix_writer_add(w, b, &err));
    must_refuse("d", &shape, N_TOKENS, "No such file");
    assert_false(save("d", &shape, &err));
    assert_non_null(strstr(err.msg, "being saved"));
    prefix_writer_free(w);
    assert_int_equal(n_files(), n);
    put(".d.tmp", "left by a killed process, and longer than what follows? no matter", 60);
    assert_true(save("d", &shape, &err));
    struct prefix_reader *r = prefix_reader_open(dir, "d", &shape, N_TOKENS, &err);
    assert_true(r && is_right(r));
    prefix_reader_free(r);
    assert_int_equal(n_files(), n + 1);
    assert_null(prefix_writer_open("/nonexistent", "d", &shape, &ids, &err));
    /* a full disk: the limit of a file's size stands for it */
    struct rlimit old, small;
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &old);
    small = (struct rlimit){300, old.rlim_max};
    setrlimit(RLIMIT_FSIZE, &small);
    assert_false(save("f", &shape, &err));
    setrlimit(RLIMIT_FSIZE, &old);
    assert_non_null(strstr(err.msg, "cannot write"));
    assert_int_equal(n_files(), n + 1);
}

static void test_stateless(void **state)
{
    (void)state;
    struct error err = {0};
    struct prefix_shape s = shape;
    s.state_bytes = 0;
    assert_true(save("e", &s, &err));
    struct prefix_reader *r = prefix_reader_open(dir, "e", &s, N_TOKENS, &err);
    assert_non_null(r);
    prefix_reader_free(r);
    must_refuse("e", &shape, N_TOKENS, "another model");
}

static int teardown(void **state)
{
    (void)state;
    char cmd[128];
    snprintf(cmd, sizeof cmd, "rm -rf %s", dir);
    return system(cmd);
}

static int setup(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/steel-prefix-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round),   cmocka_unit_test(test_foreign),
        cmocka_unit_test(test_flips),   cmocka_unit_test(test_places),
        cmocka_unit_test(test_names),   cmocka_unit_test(test_kinds),
        cmocka_unit_test(test_aborted), cmocka_unit_test(test_stateless),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
