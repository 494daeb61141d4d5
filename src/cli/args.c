/* The option parser. Knows no option by name. */
#include "cli/args.h"
#include "base/mem.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void print_help(const struct usage *u)
{
    printf("usage: steel %s %s\n\n%s\n", u->command, u->synopsis, u->about);
    if (!u->n_opts || u->opts[0].kind != OPT_HEADING)
        printf("\noptions:\n");
    for (int i = 0; i < u->n_opts; i++) {
        const struct opt *o = &u->opts[i];
        if (o->kind == OPT_HEADING) {
            printf("\n%s:\n", o->name);
            continue;
        }
        if (!o->help) /* another spelling of an option above */
            continue;
        char left[64];
        int n = o->letter ? snprintf(left, sizeof left, "-%c, ", o->letter)
                          : snprintf(left, sizeof left, "    ");
        snprintf(left + n, sizeof left - (size_t)n, "--%s%s%s", o->name, o->arg ? " " : "",
                 o->arg ? o->arg : "");
        printf("  %-28s %s\n", left, o->help);
    }
    printf("  %-28s %s\n", "-h, --help", "this text");
    if (u->examples)
        printf("\nexamples:\n%s", u->examples);
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
        /* Aliases that other programs spell with one dash: -np */
        if (o->alias && o->alias[0] == '-' && strlen(o->alias) == len &&
            !strncmp(arg, o->alias, len))
            return o;
    }
    return NULL;
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
        if (*end || end == v || errno || *v == '-')
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
    case OPT_LIST: {
        struct opt_list *l = o->out;
        l->items = mem_realloc(l->items, (size_t)l->n + 1, sizeof *l->items);
        l->items[l->n++] = v;
        return true;
    }
    default:
        *(const char **)o->out = v;
        return true;
    }
}

int args_parse(const struct usage *u, int argc, char **argv, const char **positional)
{
    int n = 0;
    bool options = true;
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
            print_help(u);
            return ARGS_HELP;
        }
        const char *eq = a[1] == '-' ? strchr(a, '=') : NULL;
        const struct opt *o = find(u, a, eq ? (size_t)(eq - a) : strlen(a));
        if (!o)
            return args_usage_error(u, "unknown option '%s'", a);
        if (o->kind == OPT_FLAG) {
            if (eq)
                return args_usage_error(u, "--%s takes no value", o->name);
            *(bool *)o->out = true;
            continue;
        }
        if (!eq && i + 1 == argc)
            return args_usage_error(u, "%s needs a value (%s)", a, o->arg);
        const char *v = eq ? eq + 1 : argv[++i];
        if (store(o, v))
            continue;
        if (o->kind == OPT_INT || o->kind == OPT_FLOAT)
            return args_usage_error(u, "--%s: '%s' is not a number in %g..%g", o->name, v, o->lo,
                                    o->hi);
        return args_usage_error(u, "--%s: '%s' is not a number", o->name, v);
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
