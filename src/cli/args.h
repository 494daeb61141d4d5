/*
 * Options as a table: parsing, range checks, --help, man pages and completions come from the same
 * rows. An option's value is, in this order: what the command line says, what the environment says
 * (STEEL_CTX_SIZE for --ctx-size), what the config file says ("ctx-size 8192", one a line; under
 * "[serve]" for that command alone), the default.
 */
#ifndef STEEL_CLI_ARGS_H
#define STEEL_CLI_ARGS_H

#include <stdbool.h>
#include <stddef.h>

/* OPT_SWITCH: means nothing here; on, off and their like may stand behind it. */
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

/* The array is the parser's: args_release() frees it, whatever way the command ended. */
struct opt_list {
    const char **items; /* (n) views into argv */
    int n;
};

struct opt {
    enum opt_kind kind;
    char letter;       /* 0 = none */
    const char *name;  /* without dashes; a heading's text */
    const char *alias; /* another long name, not shown in help; "-np": a short one; NULL = none */
    void *out;         /* bool, int, uint64_t, float, const char *, struct opt_list */
    double lo, hi;     /* of OPT_INT, OPT_FLOAT */
    const char *arg;   /* what help calls the value */
    const char *help;  /* NULL: works, but is not shown */
};

struct usage {
    const char *command;  /* "run" */
    const char *synopsis; /* "[MODEL] -p PROMPT [options]" */
    const char *about;    /* a sentence or two */
    const char *examples; /* lines, or NULL */
    const struct opt *opts;
    int n_opts;
    int min_args, max_args; /* positional */
};

enum { ARGS_HELP = -1, ARGS_BAD = -2 };
/* Fills the options' outputs and positional[] (max_args). Returns how many positionals there are;
 * ARGS_HELP (help went to stdout, exit 0) or ARGS_BAD (a message went to stderr, exit 2). "--" ends
 * options; "-" alone is positional. */
int args_parse(const struct usage *u, int argc, char **argv, const char **positional);
/* Whether the option with this output stood on the command line that was parsed last. */
bool args_given(const void *out);

/* One more item, as if the command line had it. */
void args_list_add(struct opt_list *list, const char *item);

void args_release(void);
int args_usage_error(const struct usage *u, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
/* Whoever wants a command's table instead of its help: while set, --help gives it away. */
void args_on_help(void (*take)(const struct usage *u, void *ctx), void *ctx);
/* The one of `words` that was likely meant by `word`; NULL if none is near. */
const char *args_nearest(const char *word, const char *const *words, int n);
/* Comma-separated positive integers; false if malformed or more than max. */
bool args_int_list(const char *s, int *out, int max, int *n);

#endif
