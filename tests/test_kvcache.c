/* The memory behind the KV cache: taken page by page as it is written, given back when much of it is
 * free. Its parts by layer, and who has which state. What
 * is stored in it belongs to test_scheduler and test_invariance. */
#include "engine/kvcache.h"
#include "backend/backend.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE_LEN = 16, PAGES = 1 << 14, LAYERS = 48, MB = 1 << 20 };

static struct layer layers[LAYERS];
static const struct network net = {.n_layers = LAYERS, .layers = layers};

static int plain_layers(void **state)
{
    (void)state;
    for (int i = 0; i < LAYERS; i++)
        layers[i].mixer =
            (struct mixer){.attention = {.n_kv_heads = 4, .k_dim = 128, .v_dim = 128}};
    return 0;
}

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
    for (int p = 0; p < kv->n_planes; p++)
        for (int i = 0; i < s->n_pages; i++)
            memset(kv->planes[p].at + (size_t)s->pages[i] * kv->planes[p].page_bytes, 1,
                   kv->planes[p].page_bytes);
}

static void test_memory_follows_use(void **state)
{
    (void)state;
    struct backend *be = backend_open_ref();
    struct error err = {0};
    struct kvcache *kv = kvcache_new(be, &net, DT_F16, DT_F16, PAGE_LEN, PAGES, 0, &err);
    assert_non_null(kv);
    assert_true(kv->pool_bytes > (size_t)20000 * MB);
    assert_int_equal(resident(kv), 0); /* 25 GB, and nothing of it is there */
    long token = (long)kvcache_token_bytes(&net, DT_F16, DT_F16);
    /* of codes: 34 or 18 bytes for 32 values, or one for one; keys and values apart */
    assert_int_equal(kvcache_token_bytes(&net, DT_Q8_0, DT_Q8_0), token * 34 / 64);
    assert_int_equal(kvcache_token_bytes(&net, DT_F8_E4M3, DT_Q4_0), token / 4 + token * 9 / 64);

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
    for (size_t i = 0; i < kv->planes[0].page_bytes; i++)
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

/* Attention with keys and values of different sizes, one that reads another's, a latent, a delta net. */
static struct layer mixed_layers[] = {
    {.mixer.attention = {.n_kv_heads = 2, .k_dim = 24, .v_dim = 8}},
    {.mixer.attention = {.n_kv_heads = 2, .k_dim = 24, .v_dim = 8, .shares_kv = true}},
    {.mixer = {.kind = MIXER_LATENT, .latent = {.kv_rank = 512, .rope_dim = 64}}},
    {.mixer =
         {.kind = MIXER_DELTA_NET,
          .delta_net = {.n_k_heads = 2, .n_v_heads = 4, .k_dim = 8, .v_dim = 4, .conv_len = 4}}},
};
static const struct network mixed = {.n_layers = 4, .layers = mixed_layers};

enum { STATE_LEN = 4 * 8 * 4 + 3 * (2 * 2 * 8 + 4 * 4) };

static void test_layers_store_what_they_need(void **state)
{
    (void)state;
    struct backend *be = backend_open_ref();
    struct error err = {0};
    assert_int_equal(kvcache_token_bytes(&mixed, DT_F16, DT_F16), 2 * (2 * 24 + 2 * 8 + 576));
    assert_int_equal(kvcache_state_bytes(&mixed), 4 * STATE_LEN);
    struct kvcache *kv = kvcache_new(be, &mixed, DT_F16, DT_F16, PAGE_LEN, 10, 3, &err);
    assert_non_null(kv);
    const struct kv_layer *l = kv->layers;
    assert_non_null(l[0].k);
    assert_ptr_equal(l[0].v, (char *)l[0].k + 10 * PAGE_LEN * 2 * 2 * 24);
    assert_null(l[0].state);
    assert_null(l[1].k);
    assert_null(l[1].v);
    assert_ptr_equal(l[2].k, (char *)l[0].v + 10 * PAGE_LEN * 2 * 2 * 8);
    assert_null(l[2].v);
    assert_null(l[3].k);
    assert_non_null(l[3].state);
    assert_int_equal(kv->page_bytes, PAGE_LEN * kvcache_token_bytes(&mixed, DT_F16, DT_F16));
    memset(l[3].state, 0xff, 3 * STATE_LEN * sizeof(float)); /* it is all there */
    kvcache_free(kv);
    be->ops->close(be);
}

/* A sequence of n more tokens, as a step would have it. */
static bool advance(struct kvcache *kv, struct kv_seq *s, int n)
{
    if (!kvcache_grow(kv, s, s->n_tokens + n))
        return false;
    kvcache_advance(kv, s, n);
    return true;
}

/* Sequences hold slots, ends of pages keep some, and who needs one takes the least useful of those. */
static void test_states(void **state)
{
    (void)state;
    struct backend *be = backend_open_ref();
    struct error err = {0};
    struct kvcache *kv = kvcache_new(be, &mixed, DT_F16, DT_F16, PAGE_LEN, 10, 3, &err);
    assert_non_null(kv);
    kv->prefix = prefix_new(10, PAGE_LEN, true);
    uint64_t tokens[2 * PAGE_LEN] = {0};
    struct kv_seq a = {0}, b = {0}, c = {0}, d = {0};
    assert_true(kvcache_can_grow(kv, &a));
    assert_true(advance(kv, &a, 5));
    assert_int_equal(a.state, a.from);
    assert_int_equal(states_available(kv->states), 2);

    /* its first page ends after 16: saved in passing, kept once the page has a name */
    assert_true(kvcache_grow(kv, &a, 20));
    assert_true(kvcache_save(kv, &a, 16) >= 0);
    kvcache_advance(kv, &a, 15);
    uint64_t serial = prefix_add(kv->prefix, 0, tokens, a.pages[0]);
    kvcache_keep(kv, &a, 0, 20, true);
    assert_int_equal(a.saved, 0);
    assert_int_equal(states_n_kept(kv->states), 1);
    kvcache_verify(kv);

    /* a fork reads that and writes its own; while it is about to, nobody takes it away */
    kvcache_attach(kv, &b, a.pages[0], PAGE_LEN);
    assert_false(kvcache_can_grow(kv, &b));
    kvcache_resume(kv, &b);
    assert_true(kvcache_can_grow(kv, &b));
    int32_t kept = b.from;
    assert_true(kvcache_grow(kv, &b, 17));
    assert_int_not_equal(b.state, kept);
    assert_int_equal(states_available(kv->states), 0);
    assert_false(kvcache_grow(kv, &c, 1));
    kvcache_advance(kv, &b, 1);
    assert_int_equal(b.from, b.state);
    assert_true(advance(kv, &c, 1)); /* the checkpoint has served: c has its slot */
    assert_int_equal(c.state, kept);
    assert_int_equal(states_n_kept(kv->states), 0);
    assert_false(kvcache_grow(kv, &d, 1));
    kvcache_verify(kv);

    /* cut, a state is of no use, but from the beginning all is well */
    kvcache_cut(kv, &c, 0);
    assert_true(kvcache_can_grow(kv, &c));
    kvcache_cut(kv, &b, 16);
    assert_false(kvcache_can_grow(kv, &b));
    kvcache_release(kv, &b);

    /* what ended leaves its state to its last page; who goes on from a tail takes it over */
    int32_t own = a.state, tail = a.pages[1];
    prefix_add_tail(kv->prefix, serial, tokens, 4, tail);
    kvcache_retire(kv, &a);
    kvcache_release(kv, &a);
    assert_int_equal(states_of(kv->states, tail) + 1, own);
    kvcache_attach(kv, &d, prefix_find(kv->prefix, 0, tokens), PAGE_LEN);
    kvcache_attach(kv, &d, tail, 4);
    kvcache_resume(kv, &d);
    assert_int_equal(d.state, own);
    assert_true(advance(kv, &d, 1));
    assert_int_equal(states_of(kv->states, tail), -1);
    kvcache_verify(kv);

    /* a page that is given away loses its checkpoint */
    assert_true(kvcache_save(kv, &d, 16) >= 0);
    kvcache_keep(kv, &d, 0, d.n_tokens, true);
    assert_true(states_of(kv->states, d.pages[0]) >= 0);
    kvcache_release(kv, &d);
    assert_int_equal(states_n_kept(kv->states), 1);
    assert_true(advance(kv, &c, 10 * PAGE_LEN));
    assert_int_equal(states_n_kept(kv->states), 0);
    kvcache_verify(kv);
    kvcache_release(kv, &c);
    assert_int_equal(states_available(kv->states), 3);
    kvcache_free(kv);
    be->ops->close(be);
}

/* A path of four checkpoints, at the ends of pages first to first + 3: three within the prompt, one at its end. */
static void keep_path(struct states *s, int32_t first)
{
    static const int at[] = {300, 512, 768, 1000};
    int32_t up = -1;
    for (int i = 0; i < 4; i++) {
        int32_t slot = states_take(s);
        states_keep(s, slot, first + i, at[i], i == 3);
        states_pass(s, slot, up, 1005);
        up = slot;
    }
    states_verify(s);
}

/* Takes a slot by eviction and gives it to a sequence. Returns the page that had it. */
static int32_t evicted(struct states *s, int n_pages)
{
    bool had[16];
    for (int32_t i = 0; i < n_pages; i++)
        had[i] = states_of(s, i) >= 0;
    assert_true(states_take(s) >= 0);
    states_verify(s);
    for (int32_t i = 0; i < n_pages; i++)
        if (had[i] && states_of(s, i) < 0)
            return i;
    return -1;
}

/* The end of a prompt stays longest; of the others those whose neighbours are close go first. */
static void test_eviction(void **state)
{
    (void)state;
    static const int32_t order[] = {1, 2, 0, 3};
    struct states *s = states_new(4, 4);
    keep_path(s, 0);
    for (int i = 0; i < 4; i++)
        assert_int_equal(evicted(s, 4), order[i]);
    assert_int_equal(states_take(s), -1);
    states_free(s);

    /* Of two conversations the idle one gives its checkpoints, all but the end, before the other gives any. */
    s = states_new(8, 8);
    keep_path(s, 0);
    states_tick(s);
    states_tick(s);
    keep_path(s, 4);
    for (int i = 0; i < 3; i++)
        assert_true(evicted(s, 8) < 3);
    assert_true(evicted(s, 8) >= 4);
    assert_true(states_of(s, 3) >= 0 && states_of(s, 7) >= 0);
    states_free(s);

    /* The idle one is used again: its path is as young as the other. A pinned checkpoint stays. */
    s = states_new(8, 8);
    keep_path(s, 0);
    states_tick(s);
    keep_path(s, 4);
    states_tick(s);
    for (int32_t i = 0, up = -1; i < 4; i++) {
        states_pass(s, states_of(s, i), up, 1005);
        up = states_of(s, i);
    }
    states_pin(s, states_of(s, 6));
    assert_int_equal(evicted(s, 8), 5);
    assert_int_equal(evicted(s, 8), 4);
    states_unpin(s, states_of(s, 6));
    states_free(s);
}

/* A step that may not count leaves the state elsewhere: cut, the sequence goes on from before it. */
static void test_fork(void **state)
{
    (void)state;
    struct backend *be = backend_open_ref();
    struct error err = {0};
    struct kvcache *kv = kvcache_new(be, &mixed, DT_F16, DT_F16, PAGE_LEN, 10, 3, &err);
    assert_non_null(kv);
    struct kv_seq a = {0}, b = {0};
    assert_true(advance(kv, &a, PAGE_LEN));
    int32_t first = a.state;
    assert_true(kvcache_grow(kv, &a, PAGE_LEN + 1));
    kvcache_fork(kv, &a);
    assert_int_equal(a.from, first); /* read here, written there */
    assert_int_not_equal(a.state, first);
    assert_int_equal(states_available(kv->states), 1);
    kvcache_advance(kv, &a, 1);
    int32_t second = a.state;
    assert_int_equal(a.from, second);
    kvcache_cut(kv, &a, PAGE_LEN); /* it did not count */
    assert_true(kvcache_can_grow(kv, &a));
    assert_int_equal(a.state, first);
    assert_int_equal(a.from, first);
    assert_int_equal(states_available(kv->states), 2);

    assert_true(kvcache_grow(kv, &a, PAGE_LEN + 1));
    kvcache_fork(kv, &a);
    kvcache_advance(kv, &a, 1);
    kvcache_settle(kv, &a); /* it did */
    assert_int_not_equal(a.state, first);
    assert_int_equal(a.from, a.state);
    assert_int_equal(states_available(kv->states), 2);
    kvcache_cut(kv, &a, PAGE_LEN);
    assert_false(kvcache_can_grow(kv, &a));
    kvcache_release(kv, &a);

    /* one that is cut elsewhere gives both back; without a slot the step writes where it reads */
    assert_true(advance(kv, &a, 5));
    kvcache_fork(kv, &a);
    kvcache_advance(kv, &a, 1);
    kvcache_cut(kv, &a, 3);
    assert_int_equal(states_available(kv->states), 3);
    kvcache_release(kv, &a);
    assert_true(advance(kv, &a, 1) && advance(kv, &b, 1));
    kvcache_fork(kv, &a);
    kvcache_fork(kv, &b);
    assert_int_equal(b.from, b.state);
    assert_int_equal(b.back, 0);
    kvcache_release(kv, &a);
    kvcache_release(kv, &b);
    assert_int_equal(states_available(kv->states), 3);
    kvcache_verify(kv);
    kvcache_free(kv);
    be->ops->close(be);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_memory_follows_use, plain_layers),
        cmocka_unit_test(test_layers_store_what_they_need),
        cmocka_unit_test(test_states),
        cmocka_unit_test(test_eviction),
        cmocka_unit_test(test_fork),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
