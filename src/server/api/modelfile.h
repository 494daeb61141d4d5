/*
 * Ollama's Modelfile: a model made of another one, with a system text, parameters, a template or an adapter of its own.
 *
 *     FROM qwen3:8b
 *     PARAMETER temperature 0.2
 *     SYSTEM """You are terse."""
 *     TEMPLATE, ADAPTER, LICENSE
 *
 * A value is a word, the rest of the line, or a text in quotes or in three quotes. Parsing and printing only: models_store.c
 * writes the files, models_load.c gives an entry what one says.
 */
#ifndef STEEL_SERVER_MODELFILE_H
#define STEEL_SERVER_MODELFILE_H

#include "base/buf.h"
#include "base/error.h"

#include <jansson.h>

#define MODELFILE_SUFFIX ".modelfile"
enum { MODELFILE_MOST = 1 << 20 }; /* bytes */

struct modelfile {
    char *from, *system, *template, *adapter; /* owned; NULL = not said */
    json_t *options; /* owned; PARAMETERs as members of Ollama's `options`; NULL = none */
};

/* False, with the line in the error, if the text is not a Modelfile with a FROM, or has an unsupported instruction. *m is zeroed
 * then. */
bool modelfile_parse(const char *text, size_t n, struct modelfile *m, struct error *err);
bool modelfile_read(const char *path, struct modelfile *m, struct error *err);
/* Appends a Modelfile that parses to the same. */
void modelfile_print(const struct modelfile *m, struct buf *out);
/* Copies to m what it lacks from base. Parameters are merged by name. */
void modelfile_inherit(struct modelfile *m, const struct modelfile *base);
void modelfile_clear(struct modelfile *m);
/* Whether a text can be printed in a Modelfile: NUL cannot, nor can three quotes in a text of several lines. */
bool modelfile_holds(const char *text, size_t n);

#endif
