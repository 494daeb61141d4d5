/*
 * Options as a table. Parsing, range checks, --help, man pages and completions all come from the
 * same rows. The value of an option is taken from the first of: the command line; the environment
 * (STEEL_CTX_SIZE for --ctx-size); the config file ("ctx-size 8192", one per line, under "[serve]"
 * for that command only); the default.
 */
#ifndef STEEL_CLI_ARGS_H
#define STEEL_CLI_ARGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

/* OPT_SWITCH: accepted for compatibility and ignored; an optional word (on, off, auto, ..) may
 * follow. */
enum opt_kind {
    OPT_HEADING,
    OPT_FLAG,
    OPT_INT,
    OPT_U64,
    OPT_FLOAT,
    OPT_STRING,
    OPT_LIST,
    OPT_SWITCH
};

/* The values of a repeatable option. The parser owns the array; args_release() frees it. */
struct opt_list {
    const char **items; /* (n) views into argv */
    int n;
};

struct opt {
    enum opt_kind kind;
    char letter;      /* 0 = no short form */
    const char *name; /* without dashes; for a heading, its text */
    /* another long name, not shown in help; or a short one such as "-np"; NULL = none */
    const char *alias;
    void *out;        /* bool, int, uint64_t, float, const char *, struct opt_list */
    double lo, hi;    /* range of OPT_INT and OPT_FLOAT */
    const char *arg;  /* the value's name in help */
    const char *help; /* NULL: accepted, but not shown */
};

struct usage {
    const char *command;  /* "run" */
    const char *synopsis; /* "[MODEL] -p PROMPT [options]" */
    const char *about;    /* one or two sentences */
    const char *examples; /* command lines, or NULL */
    const struct opt *opts;
    int n_opts;
    int min_args, max_args; /* positional arguments */
};

enum { ARGS_HELP = -1, ARGS_BAD = -2 };
/* Fills the options' outputs and positional[] (max_args). Returns the number of positionals,
 * ARGS_HELP (help was printed to stdout: exit 0) or ARGS_BAD (an error was printed to stderr:
 * exit 2). "--" ends the options; "-" alone is a positional. */
int args_parse(const struct usage *u, int argc, char **argv, const char **positional);
/* True if the option with this output was on the command line parsed last. */
bool args_given(const void *out);

struct config_line;
/* Sets the option that a line of the config file names. False after a usage message. */
bool args_set(const struct usage *u, const struct config_line *l);

/* One row of a help text: two columns, the first of `width`, or on a line of its own. On a terminal the text is wrapped. */
void args_print_row(FILE *out, const char *left, int width, const char *text);
/* Appends an item, as if it were on the command line. */
void args_list_add(struct opt_list *list, const char *item);

void args_release(void);
int args_usage_error(const struct usage *u, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
/* While set, --help passes the command's table to `take` instead of printing it. */
void args_on_help(void (*take)(const struct usage *u, void *ctx), void *ctx);
/* The word of `words` most similar to `word`, for "did you mean"; NULL if none is similar. */
const char *args_nearest(const char *word, const char *const *words, int n);
/* Comma-separated positive integers; false if malformed or more than max. */
bool args_int_list(const char *s, int *out, int max, int *n);

#endif
