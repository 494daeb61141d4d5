/* steel tokenize and steel detokenize: text to token ids and back, one text or many JSON lines. */
#include "base/mem.h"
#include "cli/cli.h"
#include "cli/hub/hub.h"
#include "cli/plain.h"
#include "text/tokenizer/tokenizer.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TEXT_MAX = 1 << 30 };

/* Prints a token's text in quotes. Control characters and bytes that are not valid UTF-8 are
 * escaped. */
static void print_piece(const char *p, size_t n)
{
    putchar('"');
    for (size_t i = 0; i < n;) {
        unsigned char c = (unsigned char)p[i];
        int len = c < 0x80 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
        bool whole = c < 0x80 || (c >= 0xc2 && c <= 0xf4 && (size_t)len <= n - i);
        for (int k = 1; whole && k < len; k++)
            whole = ((unsigned char)p[i + (size_t)k] & 0xc0) == 0x80;
        if (c == '\n')
            printf("\\n");
        else if (c == '\t')
            printf("\\t");
        else if (c == '\r')
            printf("\\r");
        else if (c == '"' || c == '\\')
            printf("\\%c", c);
        else if (c < 0x20 || c == 0x7f || !whole)
            printf("\\x%02x", c);
        else
            fwrite(p + i, 1, (size_t)len, stdout);
        i += whole ? (size_t)len : 1;
    }
    putchar('"');
}

static const char *kind_note(enum token_kind k)
{
    switch (k) {
    case TOKEN_CONTROL:
        return "  control";
    case TOKEN_USER:
        return "  added";
    case TOKEN_UNKNOWN:
        return "  unknown";
    case TOKEN_UNUSED:
        return "  unused";
    case TOKEN_BYTE:
        return "  byte";
    default:
        return "";
    }
}

static void print_ids(const struct token_list *l)
{
    for (size_t i = 0; i < l->n; i++)
        printf("%s%d", i ? " " : "", l->ids[i]);
    putchar('\n');
}

static void print_tokens(const struct tokenizer *t, const struct token_list *l)
{
    for (size_t i = 0; i < l->n; i++) {
        size_t n;
        const char *p = tokenizer_piece(t, l->ids[i], &n);
        printf("%8d  ", l->ids[i]);
        print_piece(p, n);
        puts(kind_note(tokenizer_kind(t, l->ids[i])));
    }
}

/* Calls f for every non-blank line of stdin. Errors name the line. */
static bool each_json_line(const struct tokenizer *t, int flags, struct error *err,
                           bool (*f)(const struct tokenizer *, const json_t *, int, struct error *))
{
    char *line = NULL;
    size_t cap = 0, number = 0;
    ssize_t n;
    bool ok = true;
    while (ok && !cli_interrupted() && (n = getline(&line, &cap, stdin)) >= 0) {
        number++;
        if (strspn(line, " \t\r\n") == (size_t)n)
            continue;
        json_error_t je;
        json_t *v = json_loadb(line, (size_t)n, JSON_ALLOW_NUL, &je);
        if (!v)
            ok = error_set(err, "column %d: %s", je.column, je.text);
        else
            ok = f(t, v, flags, err);
        json_decref(v);
        if (!ok)
            error_prefix(err, "standard input, line %zu", number);
    }
    free(line);
    return ok;
}

static bool line_encode(const struct tokenizer *t, const json_t *v, int flags, struct error *err)
{
    const json_t *text = json_object_get(v, "text");
    if (!json_is_string(text))
        return error_set(err, "\"text\" is not a string");
    struct token_list l = {0};
    bool ok =
        tokenizer_encode(t, json_string_value(text), json_string_length(text), flags, &l, err);
    if (ok) {
        printf("{\"ids\": [");
        for (size_t i = 0; i < l.n; i++)
            printf("%s%d", i ? ", " : "", l.ids[i]);
        puts("]}");
    }
    token_list_clear(&l);
    return ok;
}

static bool check_id(const struct tokenizer *t, long long id, struct error *err)
{
    if (id >= 0 && id < tokenizer_n_vocab(t))
        return true;
    return error_set(err, "id %lld is not in the vocabulary of %d tokens", id,
                     tokenizer_n_vocab(t));
}

static bool line_decode(const struct tokenizer *t, const json_t *v, int special, struct error *err)
{
    const json_t *ids = json_object_get(v, "ids");
    if (!json_is_array(ids))
        return error_set(err, "\"ids\" is not a list");
    struct buf out = {0};
    struct detok d = {0};
    bool ok = true;
    for (size_t i = 0; ok && i < json_array_size(ids); i++) {
        const json_t *id = json_array_get(ids, i);
        ok = json_is_integer(id) ? check_id(t, json_integer_value(id), err)
                                 : error_set(err, "ids[%zu] is not an integer", i);
        if (ok)
            detok_push(&d, t, (int32_t)json_integer_value(id), special, &out);
    }
    detok_flush(&d, &out);
    if (ok) { /* JSON cannot hold invalid UTF-8; incomplete characters were replaced by U+FFFD */
        json_t *o = json_pack("{s:o}", "text", json_stringn(out.p ? out.p : "", out.len));
        char *s = json_dumps(o, 0);
        puts(s ? s : "{}");
        free(s);
        json_decref(o);
    }
    buf_clear(&out);
    return ok;
}

int cmd_tokenize(int argc, char **argv)
{
    bool jsonl = false, no_special = false, ids_only = false, bos = false;
    const char *model = NULL;
    const struct opt opts[] = {
        MODEL_ROW(model),
        {OPT_FLAG, 0, "ids", 0, &ids_only, 0, 0, 0, "print only the ids, on one line"},
        {OPT_FLAG, 0, "bos", 0, &bos, 0, 0, 0, "add BOS and EOS as the model expects them"},
        {OPT_FLAG, 0, "no-special", 0, &no_special, 0, 0, 0,
         "treat special tokens in the text as plain text"},
        {OPT_FLAG, 0, "jsonl", 0, &jsonl, 0, 0, 0,
         "read lines {\"text\": ...}, write lines {\"ids\": [...]}"},
    };
    const struct usage u = {
        .command = "tokenize",
        .synopsis = "MODEL [TEXT] [options]",
        .about = "Prints the tokens of a text, read from standard input if none is given.\n"
                 "MODEL is a .gguf, a Hugging Face folder or a tokenizer.json.",
        .examples = "  steel tokenize model.gguf 'Hello, world'\n"
                    "  steel tokenize model.gguf --ids < book.txt | wc -w\n",
        .opts = opts,
        .n_opts = sizeof opts / sizeof *opts,
        .max_args = 2,
    };
    const char *pos[2];
    int n = args_parse(&u, argc, argv, pos);
    if (n < 0)
        return cli_args_exit(n);
    if (!cli_take_model(&u, &model, pos, &n, 0))
        return EXIT_USAGE;
    if (!model)
        return cli_args_exit(args_usage_error(&u, "name the model whose tokenizer to use"));
    if (jsonl && n)
        return cli_args_exit(args_usage_error(&u, "--jsonl reads standard input, not TEXT"));
    struct error err = {0};
    struct tokenizer *t = hub_resolve(&model, &err) ? tokenizer_open(model, &err) : NULL;
    if (!t)
        return cli_fail(&err);
    int flags = (no_special ? 0 : TOKENIZE_SPECIAL) | (bos ? TOKENIZE_BOS : 0);
    bool ok = true;
    cli_catch_interrupt();
    if (jsonl) {
        ok = each_json_line(t, flags, &err, line_encode);
    } else {
        struct buf text = {0};
        struct token_list l = {0};
        if (n && strcmp(pos[0], "-"))
            buf_adds(&text, pos[0]);
        else
            ok = cli_read_file("-", TEXT_MAX, &text, &err);
        ok = ok && tokenizer_encode(t, text.p ? text.p : "", text.len, flags, &l, &err);
        if (ok && ids_only)
            print_ids(&l);
        else if (ok)
            print_tokens(t, &l);
        token_list_clear(&l);
        buf_clear(&text);
    }
    tokenizer_free(t);
    if (cli_interrupted())
        return EXIT_INTERRUPTED;
    return ok ? EXIT_OK : cli_fail(&err);
}

/* Adds the token ids in s (separated by spaces, commas or brackets) to l. */
static bool parse_ids(const struct tokenizer *t, const char *s, struct token_list *l,
                      struct error *err)
{
    for (;;) {
        s += strspn(s, " \t\r\n,[]");
        if (!*s)
            return true;
        char *end;
        errno = 0;
        long long id = strtoll(s, &end, 10);
        if (end == s || errno || !strchr(" \t\r\n,[]", *end))
            return error_set(err, "\"%.30s\" is not a token id", s);
        if (!check_id(t, id, err))
            return false;
        token_list_add(l, (int32_t)id);
        s = end;
    }
}

int cmd_detokenize(int argc, char **argv)
{
    bool jsonl = false, no_special = false;
    const char *model = NULL;
    const struct opt opts[] = {
        MODEL_ROW(model),
        {OPT_FLAG, 0, "no-special", 0, &no_special, 0, 0, 0, "leave special tokens out"},
        {OPT_FLAG, 0, "jsonl", 0, &jsonl, 0, 0, 0,
         "read lines {\"ids\": [...]}, write lines {\"text\": ...}"},
    };
    const struct usage u = {
        .command = "detokenize",
        .synopsis = "MODEL [IDS...] [options]",
        .about = "Prints the text of token ids, read from standard input if none are given.\n"
                 "MODEL is a .gguf, a Hugging Face folder or a tokenizer.json.",
        .examples = "  steel detokenize model.gguf 9707 11 1879\n"
                    "  steel tokenize model.gguf --ids < book.txt | steel detokenize model.gguf\n",
        .opts = opts,
        .n_opts = sizeof opts / sizeof *opts,
        .max_args = argc,
    };
    const char **pos = mem_zalloc((size_t)argc + 1, sizeof *pos);
    int n = args_parse(&u, argc, argv, pos);
    struct error err = {0};
    struct tokenizer *t = NULL;
    int code = EXIT_OK;
    if (n < 0)
        code = cli_args_exit(n);
    else if (!cli_take_model(&u, &model, pos, &n, 0))
        code = EXIT_USAGE;
    else if (!model)
        code = cli_args_exit(args_usage_error(&u, "name the model whose tokenizer to use"));
    else if (jsonl && n)
        code = cli_args_exit(args_usage_error(&u, "--jsonl reads standard input, not IDS"));
    else if (!hub_resolve(&model, &err) || !(t = tokenizer_open(model, &err)))
        code = cli_fail(&err);
    if (t) {
        bool ok = true;
        cli_catch_interrupt();
        if (jsonl) {
            ok = each_json_line(t, !no_special, &err, line_decode);
        } else {
            struct buf text = {0};
            struct token_list l = {0};
            for (int i = 0; ok && i < n; i++)
                ok = parse_ids(t, pos[i], &l, &err);
            if (!n)
                ok = cli_read_file("-", TEXT_MAX, &text, &err) &&
                     (!text.p || parse_ids(t, text.p, &l, &err));
            buf_reset(&text);
            if (ok) {
                tokenizer_decode(t, l.ids, l.n, !no_special, &text);
                plain_print(stdout, text.p ? text.p : "", text.len);
                if (isatty(STDOUT_FILENO))
                    putchar('\n');
            }
            token_list_clear(&l);
            buf_clear(&text);
        }
        if (cli_interrupted())
            code = EXIT_INTERRUPTED;
        else if (!ok)
            code = cli_fail(&err);
    }
    tokenizer_free(t);
    mem_free(pos);
    return code;
}
