/* A step in parts: where it is cut, and what each part has of it (dist/parts.h). */
#include "dist/parts.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

enum { SEQS = 4, ROWS = 2 + 40 + 100, PAGES = 3 };

/* Two decodes, a prompt of 40 rows that begins, one of 100 that goes on; adapters on some rows. */
struct step {
    int32_t tokens[ROWS], pos[ROWS], slot[ROWS], types[ROWS];
    int32_t q_start[SEQS + 1], kv_len[SEQS], pages[SEQS * PAGES], outs[4];
    int32_t in[SEQS], out[SEQS], save_rows[SEQS], save_state[SEQS];
    struct lora_use loras[3];
    struct batch b;
};

static void step_init(struct step *s)
{
    static const int32_t starts[] = {0, 1, 2, 42, ROWS}, before[] = {9, 5, 0, 30};
    *s = (struct step){.outs = {0, 1, 41, ROWS - 1},
                       .loras = {{0, 1, 1, 1.0f}, {0, 42, 100, 0.5f}, {2, 10, 80, 2.0f}}};
    for (int i = 0; i <= SEQS; i++)
        s->q_start[i] = starts[i];
    for (int i = 0; i < SEQS; i++) {
        s->kv_len[i] = before[i] + starts[i + 1] - starts[i];
        s->in[i] = i == 2 ? -1 : 10 + i;
        s->out[i] = 20 + i;
        s->save_rows[i] = i == 3 ? 64 : i == 2 ? 16 : 0;
        s->save_state[i] = i >= 2 ? 30 + i : -1;
        for (int k = 0; k < PAGES; k++)
            s->pages[i * PAGES + k] = 100 * i + k;
        for (int r = starts[i]; r < starts[i + 1]; r++) {
            s->tokens[r] = 1000 + r;
            s->pos[r] = before[i] + r - starts[i];
            s->slot[r] = 5000 + r;
            s->types[r] = r & 1;
        }
    }
    s->b = (struct batch){.n_tokens = ROWS,
                          .n_seqs = SEQS,
                          .n_decode = 2,
                          .n_out = 4,
                          .max_pages = PAGES,
                          .tokens = s->tokens,
                          .pos = s->pos,
                          .slot = s->slot,
                          .q_start = s->q_start,
                          .kv_len = s->kv_len,
                          .pages = s->pages,
                          .out_rows = s->outs,
                          .types = s->types,
                          .state_in = s->in,
                          .state_out = s->out,
                          .save_rows = s->save_rows,
                          .save_state = s->save_state,
                          .loras = s->loras,
                          .n_loras = 3};
}

static void test_where(void **state)
{
    (void)state;
    struct step s;
    step_init(&s);
    assert_int_equal(parts_cut(&s.b, false, 71, 0), 71);      /* inside the long prompt */
    assert_int_equal(parts_cut(&s.b, false, 42 + 15, 0), 42); /* not 15 rows of it */
    assert_int_equal(parts_cut(&s.b, false, 42 + 16, 0), 58); /* 16 */
    assert_int_equal(parts_cut(&s.b, false, ROWS - 15, 0),
                     42);                               /* nor of its end: nothing follows */
    assert_int_equal(parts_cut(&s.b, true, 71, 0), 42); /* rows see those behind them */
    assert_int_equal(parts_cut(&s.b, true, 10, 0), 2);
    assert_int_equal(parts_cut(&s.b, true, 35, 2), 42); /* the next end is nearer */
    s.b.n_seqs = 1;
    s.q_start[1] = s.b.n_tokens = 31;
    assert_int_equal(parts_cut(&s.b, false, 15, 0), 0); /* nowhere */
    s.q_start[1] = s.b.n_tokens = 32;
    assert_int_equal(parts_cut(&s.b, false, 16, 0), 16);
    assert_int_equal(parts_cut(&s.b, true, 16, 0), 0);
}

static void test_parts(void **state)
{
    (void)state;
    struct step s;
    struct batch_part a = {0}, b = {0};
    int32_t outs[4];
    step_init(&s);
    batch_part_init(&a, SEQS);
    batch_part_init(&b, SEQS);
    int at = parts_cut(&s.b, false, ROWS / 2, 0);
    assert_int_equal(at, 71);
    batch_part_take(&a, &s.b, 0, at, outs);
    batch_part_take(&b, &s.b, at, ROWS, outs);
    /* the first: both decodes, the short prompt, 29 rows of the long one */
    assert_int_equal(a.b.n_tokens, 71);
    assert_int_equal(a.b.n_seqs, 4);
    assert_int_equal(a.b.n_decode, 2);
    assert_int_equal(a.b.q_start[3], 42);
    assert_int_equal(a.b.q_start[4], 71);
    assert_int_equal(a.b.kv_len[2], 40);
    assert_int_equal(a.b.kv_len[3], 59);
    assert_int_equal(a.b.n_out, 3);
    assert_int_equal(a.b.out_rows[2], 41);
    assert_int_equal(a.b.state_in[3], 13);
    assert_int_equal(a.b.state_out[3], 23);
    assert_int_equal(a.b.save_rows[2], 16);
    assert_int_equal(a.b.save_rows[3], 0); /* row 64 of it is in the other */
    assert_int_equal(a.b.n_loras, 3);
    assert_int_equal(a.b.loras[1].n, 29);
    /* the second goes on from there */
    assert_int_equal(b.row, 71);
    assert_int_equal(b.out, 3);
    assert_int_equal(b.b.n_tokens, 71);
    assert_int_equal(b.b.n_seqs, 1);
    assert_int_equal(b.b.n_decode, 0);
    assert_int_equal(b.b.tokens[0], 1071);
    assert_int_equal(b.b.pos[0], 30 + 29);
    assert_int_equal(b.b.slot[70], 5000 + ROWS - 1);
    assert_int_equal(b.b.types[0], 1);
    assert_int_equal(b.b.pages[0], 300);
    assert_int_equal(b.b.kv_len[0], 130);
    assert_int_equal(b.b.n_out, 1);
    assert_int_equal(b.b.out_rows[0], 70);
    assert_int_equal(b.b.state_in[0], 23);
    assert_int_equal(b.b.state_out[0], 23);
    assert_int_equal(b.b.save_rows[0], 64 - 29);
    assert_int_equal(b.b.save_state[0], 33);
    assert_int_equal(b.b.n_loras, 2);
    assert_int_equal(b.b.loras[0].first, 0);
    assert_int_equal(b.b.loras[0].n, 71);
    assert_int_equal(b.b.loras[1].n, 90 - 71);
    batch_part_clear(&a);
    batch_part_clear(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_where),
        cmocka_unit_test(test_parts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
