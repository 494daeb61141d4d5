/* The option parser. Does not know any option by name. */
#include "cli/args.h"
#include "cli/cli.h"
#include "cli/config_file.h"
#include "base/mem.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The arrays of all list options, for args_release. A command has few, and each model of the config file. */
static const char **arrays[256];

void args_list_add(struct opt_list *list, const char *item)
{
    int slot = 0, last = (int)(sizeof arrays / sizeof *arrays) - 1;
    while (slot < last && arrays[slot] != list->items)
        slot++;
    list->items = mem_realloc(list->items, (size_t)list->n + 1, sizeof *list->items);
    list->items[list->n++] = item;
    arrays[slot] = list->items;
}

void args_release(void)
{
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        mem_free(arrays[i]);
        arrays[i] = NULL;
    }
}

void args_print_row(FILE *out, const char *left, int width, const char *text)
{
    enum { WIDEST = 110 };
    int used = fprintf(out, "  %-*s", width, left) + 1, start = width + 3;
    int room = isatty(fileno(out)) ? cli_columns() : 0;
    room = room > WIDEST ? WIDEST - start : room - start;
    fprintf(out, "%s%*s", used > start ? "\n" : "", used > start ? start : 1, "");
    while (room > 20 && (int)strlen(text) > room) {
        int n = room;
        while (n > 0 && text[n] != ' ')
            n--;
        if (!n)
            break;
        fprintf(out, "%.*s\n%*s", n, text, start, "");
        text += n + 1;
    }
    fprintf(out, "%s\n", text);
}

static void print_help(const struct usage *u)
{
    enum { WIDTH = 28 };
    printf("usage: steel %s %s\n\n%s\n", u->command, u->synopsis, u->about);
    if (!u->n_opts || u->opts[0].kind != OPT_HEADING)
        printf("\noptions:\n");
    for (int i = 0; i < u->n_opts; i++) {
        const struct opt *o = &u->opts[i];
        if (o->kind == OPT_HEADING) {
            printf("\n%s:\n", o->name);
            continue;
        }
        if (!o->help) /* an alternative spelling */
            continue;
        char left[64];
        bool brief = o->alias && o->alias[0] == '-'; /* -np, as in llama.cpp */
        int n = o->letter ? snprintf(left, sizeof left, "-%c, ", o->letter)
                : brief   ? snprintf(left, sizeof left, "%s, ", o->alias)
                          : snprintf(left, sizeof left, "    ");
        snprintf(left + n, sizeof left - (size_t)n, "--%s%s%s", o->name, o->arg ? " " : "",
                 o->arg ? o->arg : "");
        args_print_row(stdout, left, WIDTH, o->help);
    }
    args_print_row(stdout, "-h, --help", WIDTH, "print this help");
    if (u->n_opts)
        printf("\nAny option can also be set in %s, one per line without dashes, or in the\n"
               "environment as STEEL_ and its name: STEEL_CTX_SIZE=8192.\n",
               CONFIG_FILE_PLACE);
    if (u->examples)
        printf("\nexamples:\n%s", u->examples);
}

static struct {
    void (*take)(const struct usage *u, void *ctx);
    void *ctx;
} on_help;

void args_on_help(void (*take)(const struct usage *u, void *ctx), void *ctx)
{
    on_help.take = take;
    on_help.ctx = ctx;
}

/* Edit distance between two words, at most 3. Words whose lengths differ by more than 2 count as
 * 3. */
static int distance(const char *a, const char *b)
{
    enum { MAX = 40 };
    size_t na = strlen(a), nb = strlen(b);
    if (na > MAX || nb > MAX || na > nb + 2 || nb > na + 2)
        return 3;
    int row[MAX + 1];
    for (size_t j = 0; j <= nb; j++)
        row[j] = (int)j;
    for (size_t i = 1; i <= na; i++) {
        int diagonal = row[0];
        row[0] = (int)i;
        for (size_t j = 1; j <= nb; j++) {
            int d = diagonal + (a[i - 1] != b[j - 1]);
            if (row[j] + 1 < d)
                d = row[j] + 1;
            if (row[j - 1] + 1 < d)
                d = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = d;
        }
    }
    return row[nb];
}

const char *args_nearest(const char *word, const char *const *words, int n)
{
    const char *best = NULL;
    int nearest = 3;
    size_t len = strlen(word);
    for (int i = 0; i < n; i++) {
        int d = distance(word, words[i]);
        if (len >= 3 && !strncmp(words[i], word, len)) /* a prefix of a word is close to it */
            d = 1;
        if (d < nearest && d < (int)len) {
            nearest = d;
            best = words[i];
        }
    }
    return best;
}

int args_usage_error(const struct usage *u, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "steel %s: ", u->command);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fprintf(stderr, "\ntry 'steel %s --help'\n", u->command);
    return ARGS_BAD;
}

static const struct opt *find(const struct usage *u, const char *arg, size_t len)
{
    for (int i = 0; i < u->n_opts; i++) {
        const struct opt *o = &u->opts[i];
        if (o->kind == OPT_HEADING)
            continue;
        if (len == 2 && arg[0] == '-' && arg[1] == o->letter && o->letter)
            return o;
        if (len > 2 && arg[0] == '-' && arg[1] == '-' &&
            ((strlen(o->name) == len - 2 && !strncmp(arg + 2, o->name, len - 2)) ||
             (o->alias && strlen(o->alias) == len - 2 && !strncmp(arg + 2, o->alias, len - 2))))
            return o;
        /* aliases with one dash, such as -np */
        if (o->alias && o->alias[0] == '-' && strlen(o->alias) == len &&
            !strncmp(arg, o->alias, len))
            return o;
    }
    return NULL;
}

/* The optional word after an OPT_SWITCH. */
static bool is_word(const char *s)
{
    static const char *const words[] = {"on", "off", "auto", "0", "1", "true", "false"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (!strcmp(s, words[i]))
            return true;
    return false;
}

static bool store(const struct opt *o, const char *v)
{
    char *end;
    errno = 0;
    switch (o->kind) {
    case OPT_INT: {
        long n = strtol(v, &end, 10);
        if (*end || end == v || errno || (double)n < o->lo || (double)n > o->hi)
            return false;
        *(int *)o->out = (int)n;
        return true;
    }
    case OPT_U64: {
        unsigned long long n = strtoull(v, &end, 10);
        bool any =
            !strcmp(v, "-1"); /* the largest value: other programs use -1 for a random seed */
        if (*end || end == v || errno || (*v == '-' && !any))
            return false;
        *(uint64_t *)o->out = n;
        return true;
    }
    case OPT_FLOAT: {
        double f = strtod(v, &end);
        if (*end || end == v || !(f >= o->lo && f <= o->hi))
            return false;
        *(float *)o->out = (float)f;
        return true;
    }
    case OPT_LIST:
        args_list_add(o->out, v);
        return true;
    case OPT_SWITCH:
        return is_word(v);
    default:
        *(const char **)o->out = v;
        return true;
    }
}

static int bad_value(const struct usage *u, const char *where, const struct opt *o, const char *v)
{
    if (o->kind == OPT_INT || o->kind == OPT_FLOAT)
        return args_usage_error(u, "%s%s: '%s' is not a %snumber in %.15g..%.15g", where, o->name,
                                v, o->kind == OPT_INT ? "whole " : "", o->lo, o->hi);
    return args_usage_error(u, "%s%s: '%s' is not %s", where, o->name, v,
                            o->kind == OPT_SWITCH ? "on, off or auto" : "a whole number");
}

/* Stores a value from the environment or the config file, where flags have values, too. */
static bool store_word(const struct opt *o, const char *v)
{
    if (o->kind != OPT_FLAG)
        return store(o, v);
    bool on = !*v || !strcmp(v, "1") || !strcmp(v, "true") || !strcmp(v, "yes") || !strcmp(v, "on");
    bool off = !strcmp(v, "0") || !strcmp(v, "false") || !strcmp(v, "no") || !strcmp(v, "off");
    if (on || off)
        *(bool *)o->out = on;
    return on || off;
}

bool args_set(const struct usage *u, const struct config_line *l)
{
    const struct config_file *f = config_file_get();
    char dashed[80], where[300];
    snprintf(dashed, sizeof dashed, "--%s", l->name);
    const struct opt *o = find(u, dashed, strlen(dashed));
    if (!o)
        return args_usage_error(u, "%s:%d: unknown option '%s'", f->path, l->line, l->name), false;
    snprintf(where, sizeof where, "%s:%d: ", f->path, l->line);
    return store_word(o, l->value) || (bad_value(u, where, o, l->value), false);
}

static bool from_config(const struct usage *u)
{
    const struct config_file *f = config_file_get();
    if (f->error)
        return args_usage_error(u, "%s", f->error), false;
    for (int i = 0; i < f->n; i++) {
        const struct config_line *l = &f->lines[i];
        if (l->section && strcmp(l->section, u->command))
            continue;
        char dashed[80];
        snprintf(dashed, sizeof dashed, "--%s", l->name);
        const struct opt *o = find(u, dashed, strlen(dashed));
        if (!o && l->section) /* without a section it may belong to another command */
            return args_usage_error(u, "%s:%d: unknown option '%s'", f->path, l->line, l->name),
                   false;
        if (o && !args_set(u, l))
            return false;
    }
    return true;
}

static bool from_environment(const struct usage *u)
{
    for (int i = 0; i < u->n_opts; i++) {
        const struct opt *o = &u->opts[i];
        if (o->kind == OPT_HEADING || !o->help)
            continue;
        char name[80] = "STEEL_";
        size_t n = strlen(name);
        for (const char *c = o->name; *c && n + 1 < sizeof name; c++)
            name[n++] = *c == '-' ? '_' : (char)toupper((unsigned char)*c);
        name[n] = 0;
        const char *v = getenv(name);
        if (v && !store_word(o, v)) {
            name[n] = 0;
            fprintf(stderr, "steel %s: %s='%s' is not a valid value of --%s\n", u->command, name, v,
                    o->name);
            return false;
        }
    }
    return true;
}

/* Options of other programs that people try, and the advice to give. */
static const struct {
    const char *name, *here;
} foreign[] = {
    {"--no-mmap", "not needed, leave it out"},
    {"--mlock", "not needed, leave it out"},
    {"--trust-remote-code", "not needed, leave it out: model code is never run"},
    {"--dtype", "weights keep the file's types; 'steel quantize' and 'steel convert' change them"},
};

static int unknown_option(const struct usage *u, const char *arg)
{
    const char *words[256];
    int n = 0;
    for (int i = 0; i < u->n_opts && n < 256; i++)
        if (u->opts[i].kind != OPT_HEADING && u->opts[i].help)
            words[n++] = u->opts[i].name;
    const char *near = arg[1] == '-' ? args_nearest(arg + 2, words, n) : NULL;
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++)
        if (!strncmp(arg, foreign[i].name, strcspn(arg, "=")) &&
            strlen(foreign[i].name) == strcspn(arg, "="))
            return args_usage_error(u, "unknown option '%s': %s", arg, foreign[i].here);
    if (near)
        return args_usage_error(u, "unknown option '%s'; did you mean --%s?", arg, near);
    return args_usage_error(u, "unknown option '%s'", arg);
}

static bool asks_for_help(int argc, char **argv)
{
    for (int i = 1; i < argc && strcmp(argv[i], "--"); i++)
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h"))
            return true;
    return false;
}

/* Outputs of the options on the command line. Options beyond the array are not recorded. */
static const void *given[128];
static int n_given;

bool args_given(const void *out)
{
    for (int i = 0; i < n_given; i++)
        if (given[i] == out)
            return true;
    return false;
}

int args_parse(const struct usage *u, int argc, char **argv, const char **positional)
{
    int n = 0;
    bool options = true;
    n_given = 0;
    /* A bad config file must not prevent --help. */
    if (!asks_for_help(argc, argv) && (!from_config(u) || !from_environment(u)))
        return ARGS_BAD;
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i];
        if (options && !strcmp(a, "--")) {
            options = false;
            continue;
        }
        if (!options || a[0] != '-' || !a[1]) {
            if (n == u->max_args)
                return args_usage_error(u, "unexpected argument '%s'", a);
            positional[n++] = a;
            continue;
        }
        if (!strcmp(a, "--help") || !strcmp(a, "-h")) {
            if (on_help.take)
                on_help.take(u, on_help.ctx);
            else
                print_help(u);
            return ARGS_HELP;
        }
        const char *eq = strchr(a, '=');
        const struct opt *o = find(u, a, eq ? (size_t)(eq - a) : strlen(a));
        if (!o)
            return unknown_option(u, a);
        if (!args_given(o->out) && n_given < (int)(sizeof given / sizeof *given))
            given[n_given++] = o->out;
        if (o->kind == OPT_FLAG) {
            if (eq)
                return args_usage_error(u, "--%s takes no value", o->name);
            *(bool *)o->out = true;
            continue;
        }
        if (o->kind == OPT_SWITCH && !eq) {
            i += i + 1 < argc && is_word(argv[i + 1]);
            continue;
        }
        if (!eq && i + 1 == argc)
            return args_usage_error(u, "%s needs a value (%s)", a, o->arg);
        const char *v = eq ? eq + 1 : argv[++i];
        if (!store(o, v))
            return bad_value(u, "--", o, v);
    }
    if (n < u->min_args)
        return args_usage_error(u, "missing argument; usage: steel %s %s", u->command, u->synopsis);
    return n;
}

bool args_int_list(const char *s, int *out, int max, int *n)
{
    *n = 0;
    for (;;) {
        char *end;
        long v = strtol(s, &end, 10);
        if (end == s || v < 0 || v > INT32_MAX || *n == max)
            return false;
        out[(*n)++] = (int)v;
        if (!*end)
            return true;
        if (*end != ',')
            return false;
        s = end + 1;
    }
}
