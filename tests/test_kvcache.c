/* The memory behind the KV cache: taken page by page as it is written, given back when much of it is
 * free. What is stored in it belongs to test_scheduler and test_invariance. */
#include "engine/kvcache.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE_LEN = 16, PAGES = 1 << 14, LAYERS = 48, MB = 1 << 20 };

static const struct config config = {.n_layers = LAYERS, .n_kv_heads = 4, .head_dim = 128};

/* Bytes of the pool that take memory. */
static long resident(const struct kvcache *kv)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), from = (uintptr_t)kv->pool / page * page;
    size_t n = ((uintptr_t)kv->pool + kv->pool_bytes - from + page - 1) / page;
    unsigned char *in = malloc(n);
    long count = 0;
    assert_non_null(in);
    assert_int_equal(mincore((void *)from, n * page, in), 0);
    for (size_t i = 0; i < n; i++)
        count += in[i] & 1;
    free(in);
    return count * (long)page;
}

/* Writes every byte of a sequence's pages, as a step would. */
static void fill(struct kvcache *kv, const struct kv_seq *s)
{
    for (int l = 0; l < LAYERS; l++)
        for (int i = 0; i < s->n_pages; i++) {
            size_t at = (size_t)s->pages[i] * kv->page_bytes;
            memset((char *)kv->layers[l].k + at, 1, kv->page_bytes);
            memset((char *)kv->layers[l].v + at, 1, kv->page_bytes);
        }
}

static void test_memory_follows_use(void **state)
{
    (void)state;
    struct backend *be = backend_open_ref();
    struct error err = {0};
    struct kvcache *kv = kvcache_new(be, &config, DT_F16, PAGE_LEN, PAGES, &err);
    assert_non_null(kv);
    assert_true(kv->pool_bytes > (size_t)20000 * MB);
    assert_int_equal(resident(kv), 0); /* 25 GB, and nothing of it is there */
    long token = (long)kvcache_token_bytes(&config, DT_F16);

    /* one page: no huge pages in each of 96 planes for it */
    struct kv_seq a = {0}, b = {0};
    assert_true(kvcache_grow(kv, &a, PAGE_LEN));
    fill(kv, &a);
    assert_true(resident(kv) < 16 * MB);

    /* 2,000 tokens are 196 MB; what is used is there, and not much more */
    assert_true(kvcache_grow(kv, &b, 2000));
    fill(kv, &b);
    assert_true(resident(kv) >= 2000 * token);
    assert_true(resident(kv) < 2000 * token + 64 * MB);
    kvcache_verify(kv);

    /* free pages keep their memory for the next sequence, until somebody tidies up */
    kvcache_release(kv, &b);
    assert_true(resident(kv) >= 2000 * token);
    assert_int_equal(kvcache_trim(kv), 2000 * token);
    assert_true(resident(kv) < 32 * MB);
    assert_int_equal(kvcache_trim(kv), 0); /* nothing more to give */
    kvcache_verify(kv);
    const char *k = kv->layers[0].k;
    for (size_t i = 0; i < kv->page_bytes; i++)
        assert_int_equal(k[i], 1); /* a's page is as it was */

    /* the same pages serve again, lowest first; few of them are not worth the trouble */
    assert_true(kvcache_grow(kv, &b, 160));
    for (int i = 0; i < b.n_pages; i++)
        assert_int_equal(b.pages[i], 1 + i);
    fill(kv, &b);
    kvcache_verify(kv);
    kvcache_release(kv, &b);
    assert_int_equal(kvcache_trim(kv), 0);
    kvcache_release(kv, &a);
    kvcache_verify(kv);
    assert_int_equal(kv->n_free, PAGES);
    assert_true(kvcache_grow(kv, &a, PAGES * PAGE_LEN)); /* every page, once */
    kvcache_verify(kv);
    kvcache_release(kv, &a);
    kvcache_free(kv);
    be->ops->close(be);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_memory_follows_use)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
