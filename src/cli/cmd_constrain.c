/*
 * steel constrain: tests constraints without a model's weights. Each input line has a schema,
 * grammar or regular expression, and test texts. Their tokens are checked against the masks as in
 * generation. The output line says which texts were accepted, and how long compilation and masks
 * took.
 */
#include "base/mem.h"
#include "cli/cli.h"
#include "cli/hub/hub.h"
#include "text/grammar/grammar.h"
#include "text/grammar/schema_json.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct walker {
    const struct tokenizer *tok;
    const struct grammar_vocab *vocab;
    uint32_t *bits;
    double *us; /* (n_us) time of each mask of this line */
    size_t n_us, cap_us;
    int flags;
};

/* CPU microseconds of this thread, so that other load on the machine does not count. */
static double cpu_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static int double_cmp(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void keep_time(struct walker *w, double us)
{
    if (w->n_us == w->cap_us) {
        w->cap_us = w->cap_us ? 2 * w->cap_us : 1024;
        w->us = mem_realloc(w->us, w->cap_us, sizeof *w->us);
    }
    w->us[w->n_us++] = us;
}

/* The tokens of a text. If the tokenizer would change the text (NFC normalisation), its single
 * bytes are used instead, so that the text itself is judged. */
static bool text_tokens(struct walker *w, const char *text, size_t len, struct token_list *ids,
                        struct error *err)
{
    struct buf back = {0};
    if (!tokenizer_encode(w->tok, text, len, 0, ids, err))
        return false;
    for (size_t i = 0; i < ids->n; i++) {
        size_t n;
        const char *p = tokenizer_piece(w->tok, ids->ids[i], &n);
        buf_add(&back, p, n);
    }
    bool same = back.len == len && (!len || !memcmp(back.p, text, len)), bytes = true;
    int32_t of_byte[256];
    memset(of_byte, -1, sizeof of_byte);
    for (int32_t id = 0; !same && id < tokenizer_n_vocab(w->tok); id++) {
        size_t n;
        const char *p = tokenizer_piece(w->tok, id, &n);
        enum token_kind kind = tokenizer_kind(w->tok, id);
        if (n == 1 && (kind == TOKEN_NORMAL || kind == TOKEN_BYTE))
            of_byte[(unsigned char)*p] = id;
    }
    for (size_t i = 0; i < len; i++)
        bytes &= of_byte[(unsigned char)text[i]] >= 0;
    if (!same && bytes) {
        ids->n = 0;
        for (size_t i = 0; i < len; i++)
            token_list_add(ids, of_byte[(unsigned char)text[i]]);
    }
    buf_clear(&back);
    return true;
}

/* Sets *fits if the text is a complete answer: the mask allows each of its tokens, and the end
 * after them. */
static bool walk_text(struct walker *w, struct grammar *g, const char *text, size_t len, bool *fits,
                      struct error *err)
{
    struct token_list ids = {0};
    if (!text_tokens(w, text, len, &ids, err))
        return false;
    struct grammar_matcher *m = grammar_matcher_new(g, w->vocab);
    bool ok = true;
    *fits = true;
    for (size_t i = 0; ok && *fits && i <= ids.n; i++) {
        double t = cpu_us();
        ok = grammar_mask(m, w->bits, err);
        keep_time(w, cpu_us() - t);
        if (!ok)
            break;
        if (i == ids.n) {
            *fits = grammar_is_accepting(m);
            break;
        }
        int32_t id = ids.ids[i];
        *fits = w->bits[id / 32] >> id % 32 & 1;
        if (*fits)
            ok = grammar_accept(m, id, err);
    }
    grammar_matcher_free(m);
    token_list_clear(&ids);
    return ok;
}

/* Runs one test. A value is printed in two forms. A valid value must be accepted in both; an
 * invalid one must be refused in both. */
static bool walk_test(struct walker *w, struct grammar *g, const struct jvalue *test,
                      bool *accepted, bool *right, struct error *err)
{
    const struct jvalue *valid = jvalue_get(test, "valid"), *data = jvalue_get(test, "data"),
                        *text = jvalue_get(test, "text");
    bool want = valid && valid->kind == J_TRUE, ok = true;
    if (!data && (!text || text->kind != J_STRING))
        return error_set(err, "a test has neither \"data\" nor \"text\"");
    *accepted = want || !valid;
    for (int form = 0; ok && form < (data ? 2 : 1); form++) {
        struct buf out = {0};
        bool fits = false;
        if (data)
            jvalue_print(data, form ? ", " : ",", form ? ": " : ":", &out);
        else
            buf_add(&out, text->text, text->len);
        ok = walk_text(w, g, out.p ? out.p : "", out.len, &fits, err);
        *accepted = want || !valid ? *accepted && fits : *accepted || fits;
        buf_clear(&out);
    }
    *right = !valid || *accepted == want;
    return ok;
}

static bool line_source(const struct jvalue *v, struct grammar_source *src, struct error *err)
{
    const struct jvalue *k;
    if ((k = jvalue_get(v, "schema"))) {
        *src = (struct grammar_source){GRAMMAR_SCHEMA, src->flags, k->raw, k->raw_len};
        return true;
    }
    if ((k = jvalue_get(v, "choice")) && k->kind == J_ARRAY) {
        *src = (struct grammar_source){GRAMMAR_CHOICE, src->flags, k->raw, k->raw_len};
        return true;
    }
    static const struct {
        const char *name;
        enum grammar_kind kind;
    } texts[] = {{"regex", GRAMMAR_REGEX}, {"grammar", GRAMMAR_GBNF}, {"lark", GRAMMAR_LARK}};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        k = jvalue_get(v, texts[i].name);
        if (!k || k->kind != J_STRING)
            continue;
        *src = (struct grammar_source){texts[i].kind, src->flags, k->text, k->len};
        return true;
    }
    return error_set(err, "no \"schema\", \"grammar\", \"regex\", \"lark\" or \"choice\"");
}

static void print_string(const char *s)
{
    putchar('"');
    for (; *s; s++) {
        unsigned char c = (unsigned char)*s;
        if (c == '"' || c == '\\')
            printf("\\%c", c);
        else if (c < 0x20)
            printf("\\u%04x", c);
        else
            putchar(c);
    }
    putchar('"');
}

static void walk_line(struct walker *w, const char *line, size_t len)
{
    struct error err = {0};
    struct jdoc *doc = jdoc_parse(line, len, &err);
    struct grammar_source src = {.flags = w->flags};
    struct grammar *g = NULL;
    struct buf accepted = {0};
    double compile_us = 0, sum = 0;
    bool ok = doc && line_source(jdoc_root(doc), &src, &err), right = true;
    w->n_us = 0;
    if (ok) {
        double t = cpu_us();
        g = grammar_compile(&src, &err);
        compile_us = cpu_us() - t;
        ok = g != NULL;
    }
    const struct jvalue *tests = ok ? jvalue_get(jdoc_root(doc), "tests") : NULL;
    for (const struct jvalue *c = tests ? tests->first : NULL; c && ok; c = c->next) {
        bool a = false, r = false;
        ok = walk_test(w, g, c, &a, &r, &err);
        right = right && r;
        if (ok)
            buf_addf(&accepted, "%s%s", accepted.len ? ", " : "", a ? "true" : "false");
    }
    printf("{\"ok\": %s, \"error\": ", ok && right ? "true" : "false");
    if (ok)
        printf("null");
    else
        print_string(err.msg);
    if (w->n_us)
        qsort(w->us, w->n_us, sizeof *w->us, double_cmp);
    size_t slow = 0;
    for (size_t i = 0; i < w->n_us; i++) {
        sum += w->us[i];
        slow += w->us[i] > 500;
    }
    double p99 = w->n_us ? w->us[(w->n_us * 99 + 99) / 100 - 1] : 0;
    printf(", \"compile_us\": %.1f, \"mask_us\": {\"avg\": %.2f, \"p99\": %.2f, \"max\": %.2f, "
           "\"n\": %zu, \"over_500\": %zu}, \"accepted\": [%s]}\n",
           compile_us, w->n_us ? sum / (double)w->n_us : 0, p99, w->n_us ? w->us[w->n_us - 1] : 0,
           w->n_us, slow, accepted.p ? accepted.p : "");
    buf_clear(&accepted);
    grammar_free(g);
    jdoc_free(doc);
}

int cmd_constrain(int argc, char **argv)
{
    bool jsonl = false, schema_order = false;
    const char *model = NULL;
    const struct opt opts[] = {
        MODEL_ROW(model),
        {OPT_FLAG, 0, "jsonl", 0, &jsonl, 0, 0, 0, "read and write lines of JSON (required)"},
        {OPT_FLAG, 0, "schema-order", 0, &schema_order, 0, 0, 0,
         "properties of objects come in the schema's order"},
    };
    const struct usage u = {
        .command = "constrain",
        .synopsis = "[MODEL] [FILE.jsonl] --jsonl [options]",
        .about =
            "Tests constraints on texts, with a model's vocabulary but without its weights.\n"
            "Reads lines {\"schema\": ..., \"tests\": [{\"valid\": bool, \"data\": ...}]} (or "
            "\"grammar\" or\n\"regex\", and \"text\" in the tests), checks each text's tokens "
            "against the masks, compact\nand with spaces after commas and colons, and prints for "
            "each line which were accepted.",
        .examples = "  steel constrain model.gguf --jsonl < schemas.jsonl\n",
        .opts = opts,
        .n_opts = sizeof opts / sizeof *opts,
        .max_args = 2,
    };
    const char *pos[2] = {NULL, NULL};
    int n = args_parse(&u, argc, argv, pos);
    if (n < 0)
        return cli_args_exit(n);
    size_t tail = n == 1 ? strlen(pos[0]) : 0;
    int files = tail > 6 && !strcmp(pos[0] + tail - 6, ".jsonl"); /* no model, only a file */
    if (!cli_take_model(&u, &model, pos, &n, files))
        return EXIT_USAGE;
    struct error err = {0};
    FILE *in = stdin;
    if (pos[0] && strcmp(pos[0], "-") && !(in = fopen(pos[0], "r"))) {
        error_set(&err, "%s: %s", pos[0], strerror(errno));
        return cli_fail(&err);
    }
    struct tokenizer *t = hub_resolve(&model, &err) ? tokenizer_open(model, &err) : NULL;
    if (!t) {
        if (in != stdin)
            fclose(in);
        return cli_fail(&err);
    }
    struct grammar_vocab *v = grammar_vocab_new(t);
    struct walker w = {.tok = t, .vocab = v, .flags = schema_order ? GRAMMAR_SCHEMA_ORDER : 0};
    w.bits = mem_zalloc(grammar_mask_words(tokenizer_n_vocab(t)), sizeof *w.bits);
    char *line = NULL;
    size_t cap = 0;
    ssize_t len;
    cli_catch_interrupt();
    while (!cli_interrupted() && (len = getline(&line, &cap, in)) >= 0)
        if (strspn(line, " \t\r\n") != (size_t)len)
            walk_line(&w, line, (size_t)len);
    free(line);
    if (in != stdin)
        fclose(in);
    mem_free(w.bits);
    mem_free(w.us);
    grammar_vocab_free(v);
    tokenizer_free(t);
    return cli_interrupted() ? EXIT_INTERRUPTED : EXIT_OK;
}
