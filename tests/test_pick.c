/*
 * The pick tables of the CPU backend: names, formats and their last rows, what STEEL_PICK refuses, and
 * that a forced row is what an op gets, whatever the number of rows. What the kernels compute is
 * checked by tests/ops, which forces every row.
 */
#include "backend/cpu/cpu.h"
#include "backend/cpu/pick.h"
#include "base/mem.h"
#include "isas.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void tables_are_whole(void **state)
{
    (void)state;
    for (enum pick_op op = 0; op < PICK_OPS; op++) {
        int n;
        const struct pick_row *rows = pick_rows(op, &n);
        for (int i = 0; i < n; i++) {
            assert_true(rows[i].rows_from >= 1 && rows[i].rows_from <= rows[i].rows_to);
            assert_true((rows[i].gemm != NULL) == (op == PICK_GEMM));
            assert_true((rows[i].attn != NULL) == (op != PICK_GEMM));
            for (int k = 0; k < i; k++)
                assert_string_not_equal(rows[i].name, rows[k].name);
            /* The text says what the bits say. */
            uint64_t bits = 0;
            char text[200], *save = NULL;
            snprintf(text, sizeof text, "%s", rows[i].formats->names);
            for (char *t = strtok_r(text, " ", &save); t; t = strtok_r(NULL, " ", &save)) {
                int type = DT_F32;
                while (type < DT_COUNT && strcmp(dtype_name((enum dtype)type), t))
                    type++;
                bits |= type < DT_COUNT ? (uint64_t)1 << type : ~(uint64_t)0;
            }
            assert_true(bits == rows[i].formats->bits);
        }
        const struct pick_row *last = &rows[n - 1];
        struct pick_query odd = {.head_dim = 3, .page_len = 7, .deterministic = true};
        assert_true(last->formats->bits == ~(uint64_t)0 && last->rows_from == 1);
        assert_int_equal(last->isa, op == PICK_GEMM ? FIRST_ISA : ISA_REF);
        assert_true(last->fits(&odd));
    }
}

static void expect_error(const char *pick, const char *isa, const char *part)
{
    struct error err = {{0}};
    struct backend_options opt = {.device = "cpu", .threads = 1};
    setenv("STEEL_PICK", pick, 1);
    if (isa)
        setenv("STEEL_ISA", isa, 1);
    assert_null(backend_open_cpu(&opt, &err));
    unsetenv("STEEL_PICK");
    unsetenv("STEEL_ISA");
    if (!strstr(err.msg, part))
        fail_msg("STEEL_PICK=%s: \"%s\" does not say \"%s\"", pick, err.msg, part);
}

static void bad_names_are_errors(void **state)
{
    (void)state;
    expect_error("gemm_nothing", NULL, "STEEL_PICK=gemm_nothing: no such kernel; kernels: gem");
    expect_error("gemm_int8_" SECOND_NAME, FIRST_NAME,
                 "needs " SECOND_NAME ", but " FIRST_NAME " is in use");
    expect_error("attn_decode_c,attn_decode_" FIRST_NAME, NULL,
                 "both attn_decode_c and attn_decode_" FIRST_NAME);
    char longer[300];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    expect_error(longer, NULL, "no such kernel");
    expect_error("-gemm_nothing", NULL, "no such kernel");
    expect_error("-attn_decode_c,-gemm_int8_" FIRST_NAME, NULL, "only one kernel can be left out");
}

/* A row that is left out is picked only where no other row can run. */
static void a_row_can_be_left_out(void **state)
{
    (void)state;
    struct error err = {{0}};
    struct pick p;
    char name[80];
    assert_true(pick_init(&p, isa_best(), false, getenv("STEEL_PICK"), &err));
    const struct pick_row *first = pick_attn(&p, DT_F32, DT_F32, 64, 64, 16, false, 1);
    snprintf(name, sizeof name, "-%s", first->name);
    pick_force(&p, name);
    const struct pick_row *next = pick_attn(&p, DT_F32, DT_F32, 64, 64, 16, false, 1);
    pick_force(&p, NULL);
    assert_ptr_equal(pick_attn(&p, DT_F32, DT_F32, 64, 64, 16, false, 1), first);
    assert_int_equal(next == first, first->isa == ISA_REF);
    assert_true(pick_init(&p, ISA_REF, false, getenv("STEEL_PICK"), &err));
    first = pick_attn(&p, DT_F32, DT_F32, 64, 64, 16, false, 1);
    pick_force(&p, "-attn_decode_c");
    assert_ptr_equal(pick_attn(&p, DT_F32, DT_F32, 64, 64, 16, false, 1), first);
}

/* A weight of `type`, (48, 256), all zeros. */
static struct raw_weight zeros(enum dtype type, const uint8_t **data)
{
    *data = mem_zalloc(dtype_bytes(type, 48 * 256), 1);
    return (struct raw_weight){.n_in = 256,
                               .n_out = 48,
                               .n_expert = 1,
                               .n_seg = 1,
                               .seg = {{.type = type, .rows = 48, .data = data}}};
}

static bool open_and_upload(const char *pick, enum dtype type, bool no_repack, bool prepare,
                            struct error *err)
{
    struct backend_options opt = {.device = "cpu", .threads = 1, .no_repack = no_repack};
    setenv("STEEL_PICK", pick, 1);
    struct backend *be = backend_open_cpu(&opt, err);
    unsetenv("STEEL_PICK");
    assert_non_null(be);
    const uint8_t *data;
    struct raw_weight raw = zeros(type, &data);
    struct weight w = {0};
    bool ok = be->ops->upload(be, &raw, WEIGHT_HEAD, &w, err);
    if (ok && prepare) {
        struct layer layer = {
            .mixer.attention = {.n_heads = 1, .n_kv_heads = 1, .k_dim = 40, .v_dim = 40}};
        struct network net = {.n_layers = 1, .n_embd = 256, .n_vocab = 48, .layers = &layer};
        struct bounds b = {.page_len = 16,
                           .n_pages = 1,
                           .k_type = DT_F32,
                           .v_type = DT_F32,
                           .max_tokens = 8,
                           .max_seqs = 1,
                           .max_out = 1,
                           .max_pages = 1};
        net.head.w = &w;
        ok = be->ops->prepare(be, &net, &b, err);
        const struct cpu_backend *cb = cpu_self(be);
        const struct gemm_weight *own = w.impl;
        const struct pick_row *forced = cb->pick.forced[PICK_GEMM];
        static const int rows[] = {1, 8, 9, 100, 1000};
        for (int i = 0; ok && forced && i < 5; i++)
            assert_ptr_equal(pick_gemm(&cb->pick, own, &own->seg[0], rows[i]), forced);
    }
    if (w.impl)
        be->ops->release(be, &w);
    be->ops->close(be);
    mem_free((void *)data);
    return ok;
}

static void forced_rows_run_or_say_why_not(void **state)
{
    (void)state;
    struct error err = {{0}};
    assert_true(open_and_upload("gemm_int8_" FIRST_NAME, DT_Q4_K, false, true, &err));
    assert_true(open_and_upload("gemv_int8_" FIRST_NAME, DT_Q4_K, false, true, &err));
    assert_true(open_and_upload("gemm_dequant_" FIRST_NAME, DT_Q4_K, false, true, &err));
    assert_true(open_and_upload("gemm_dequant_" FIRST_NAME, DT_Q2_K, true, true, &err));
    assert_true(open_and_upload("attn_decode_c", DT_F32, true, true, &err));
    assert_false(open_and_upload("gemm_int8_" FIRST_NAME, DT_Q4_K, true, true, &err));
    assert_non_null(strstr(err.msg, "cannot run a weight of Q4_K, 48 x 256 that is not repacked"));
    assert_false(open_and_upload("gemm_int8_" FIRST_NAME, DT_F16, false, true, &err));
    assert_non_null(strstr(err.msg, "no weight of this model has a format that it supports"));
    assert_false(open_and_upload("attn_prefill_" FIRST_NAME, DT_F16, false, true, &err));
    assert_non_null(strstr(err.msg, "cannot run layer 0: head_dim 40, cache type F32"));
}

int main(void)
{
    if (!isa_has(isa_best(), FIRST_ISA)) {
        puts(NO_KERNELS);
        return 77;
    }
    unsetenv("STEEL_ISA");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tables_are_whole),
        cmocka_unit_test(bad_names_are_errors),
        cmocka_unit_test(a_row_can_be_left_out),
        cmocka_unit_test(forced_rows_run_or_say_why_not),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
