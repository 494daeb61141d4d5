/* A limit on thinking, in the format of every family: the text before it is free, the end is forced once,
 * and the constraint is over after it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

#include "base/buf.h"
#include "engine/token_rules.h"

#include <string.h>

enum { LIMIT = 6 };

/* Generates text: "a b a b ..." where tokens are free, and what is forced. Returns the number of free tokens. */
static int generate(struct sample_constraint *c, const struct tokenizer *t, const char *open,
                    struct buf *out)
{
    struct token_list start = {0}, filler = {0};
    struct error err = {0};
    int n_vocab = tokenizer_n_vocab(t), n_free = 0, words = (n_vocab + 31) / 32;
    uint32_t *bits = calloc((size_t)words, sizeof *bits);
    struct detok d = {0};
    assert_true(tokenizer_encode(t, open, strlen(open), TOKENIZE_SPECIAL, &start, &err));
    assert_true(tokenizer_encode(t, " word", 5, 0, &filler, &err));
    for (size_t i = 0; i < 200; i++) {
        int n = 0;
        int32_t token = i < start.n ? start.ids[i] : filler.ids[0], only = -1;
        assert_true(c->mask(c->state, bits, &err));
        for (int k = 0; k < n_vocab; k++)
            if (bits[k / 32] >> k % 32 & 1) {
                n++;
                only = k;
            }
        assert_true(n > 0);
        if (n == 1)
            token = only;
        n_free += i >= start.n && n > 1;
        detok_push(&d, t, token, true, out);
        assert_true(c->accept(c->state, token, &err));
        if (n > 1 && strstr(out->p, "so I give my answer now"))
            break;
    }
    free(bits);
    token_list_clear(&start);
    token_list_clear(&filler);
    return n_free;
}

static void every_family_ends_its_thinking(void **state)
{
    (void)state;
    static const struct {
        enum chat_format format;
        bool tools, inside;
        const char *open, *end;
        enum chat_thoughts thoughts;
    } cases[] = {
        {CHAT_HERMES, false, false, "<think>", "</think>\n\n", CHAT_THOUGHTS_TAGS},
        {CHAT_HERMES, true, true, "", "</think>\n\n", CHAT_THOUGHTS_TAGS},
        {CHAT_DEEPSEEK_R1, false, true, "", "</think>\n\n", CHAT_THOUGHTS_TAGS},
        {CHAT_MISTRAL, false, false, "[THINK]", "[/THINK]", CHAT_THOUGHTS_TAGS},
        {CHAT_GEMMA, false, false, "<|channel>thought", "<channel|>", CHAT_THOUGHTS_TAGS},
        {CHAT_GPT_OSS, false, false, "<|channel|>analysis<|message|>",
         "<|end|><|start|>assistant<|channel|>final<|message|>", CHAT_THOUGHTS_TAGS},
        {CHAT_GPT_OSS, true, false, "<|channel|>analysis<|message|>",
         "<|end|><|start|>assistant<|channel|>", CHAT_THOUGHTS_TAGS},
        {CHAT_PLAIN, false, false, "<seed:think>", "</seed:think>", CHAT_THOUGHTS_SEED},
        {CHAT_QWEN_XML, true, true, "", "</seed:think>", CHAT_THOUGHTS_SEED},
        {CHAT_PLAIN, false, true, "", "<|END_THINKING|>", CHAT_THOUGHTS_COHERE},
        {CHAT_PLAIN, false, false, "<|inner_prefix|>", "<|inner_suffix|>", CHAT_THOUGHTS_APERTUS},
        {CHAT_MINIMAX, true, true, "", "</mm:think>\n\n", CHAT_THOUGHTS_MINIMAX},
        {CHAT_PLAIN, false, true, "", "</think:opensource>", CHAT_THOUGHTS_HUNYUAN},
        {CHAT_PLAIN, false, false, "<|think|>", "<|end|><|begin|>assistant<|content|>",
         CHAT_THOUGHTS_SOLAR},
        {CHAT_PLAIN, false, false, " to=self<|message|>", "<|eom|><|start|>assistant<|message|>",
         CHAT_THOUGHTS_MUSE},
        {CHAT_PLAIN, false, false, "<|content_thinking|>",
         "<|end_message|><|message_model|><|content_text|>", CHAT_THOUGHTS_INKLING},
        {CHAT_PLAIN, false, false, "<thinking>", "</thinking>\n\n", CHAT_THOUGHTS_THINKING},
        {CHAT_PLAIN, false, false, "<think>", "</think>\n\n", CHAT_THOUGHTS_ANSWER},
    };
    struct error err = {0};
    struct tokenizer *t = tokenizer_open("demo/steel-demo.gguf", &err);
    assert_non_null(t);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct think_limit limit =
            think_limit_of(chat_marks_of(cases[i].format, cases[i].thoughts, cases[i].tools),
                           cases[i].inside, LIMIT);
        struct token_rules *r = token_rules_new(t, NULL, NULL, 0, &limit);
        struct sample_constraint none = {0}, c = token_rules_match(r, none, tokenizer_n_vocab(t));
        struct buf out = {0};
        assert_false(c.done(c.state));
        int n_free = generate(&c, t, cases[i].open, &out);
        assert_int_equal(n_free, LIMIT + 1); /* and one of the answer */
        assert_non_null(strstr(out.p, cases[i].end));
        assert_int_equal(c.done(c.state), cases[i].format != CHAT_GPT_OSS);
        buf_clear(&out);
        c.free(c.state);
        token_rules_free(r);
    }
    tokenizer_free(t);
}

/* A call inside of thinking ends it, where the family makes such calls: nothing is forced into the call. */
static void a_call_ends_thinking(void **state)
{
    (void)state;
    struct error err = {0};
    struct tokenizer *t = tokenizer_open("demo/steel-demo.gguf", &err);
    assert_non_null(t);
    for (int calls = 0; calls < 2; calls++) {
        struct think_limit limit =
            think_limit_of(chat_marks_of(CHAT_APERTUS, CHAT_THOUGHTS_APERTUS, true), true, 60);
        struct token_rules *r = token_rules_new(t, NULL, NULL, 0, &limit);
        struct sample_constraint none = {0}, c = token_rules_match(r, none, tokenizer_n_vocab(t));
        struct buf out = {0};
        generate(&c, t, calls ? "Hm.<|tools_prefix|>" : "Hm.<|tools_suffix|>", &out);
        assert_int_equal(strstr(out.p, "so I give my answer now") == NULL, calls);
        buf_clear(&out);
        c.free(c.state);
        token_rules_free(r);
    }
    tokenizer_free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_family_ends_its_thinking),
                                       cmocka_unit_test(a_call_ends_thinking)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
