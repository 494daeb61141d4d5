/* The output that `convert` and `quantize` share: progress bar, notes, summary. */
#ifndef STEEL_CLI_CONVERT_UI_H
#define STEEL_CLI_CONVERT_UI_H

#include "cli/cli.h"
#include "convert/convert.h"

struct convert_ui {
    const char *verb; /* "quantising" */
    int64_t start;    /* ns */
    int shown;        /* per cent on the bar; -1 = no terminal */
};

void convert_ui_init(struct convert_ui *ui, const char *verb);
/* Callbacks for struct convert_options. arg: the convert_ui. */
void convert_ui_progress(void *arg, size_t done, size_t total);
void convert_ui_note(void *arg, const char *message);
void convert_ui_plan(void *arg, const struct transcode *t); /* prints a table to stdout */
void convert_ui_done(const struct convert_ui *ui, const char *out,
                     const struct convert_options *opt, const struct convert_result *r);
/* Parses the type name given to an option. False after a usage message. */
bool convert_ui_type(const struct usage *u, const char *flag, const char *name, enum dtype *out);
/* Parses the --tensor PATTERN=TYPE options. False after a usage message. convert_ui_free frees
 * them. */
bool convert_ui_overrides(const struct usage *u, const struct opt_list *list,
                          struct convert_options *opt);
void convert_ui_free(struct convert_options *opt);

/* True if OUT may be written: never over a source file; over any other file only with --force. */
bool convert_ui_target(const char *in, const char *out, const struct convert_options *opt,
                       bool force, struct error *err);

#endif
