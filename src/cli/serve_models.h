/*
 * The models that `steel serve` offers: those of the command line, the files of a folder, the models that `steel list`
 * knows, and the sections [model NAME] of the config file, which also set options of each. Owns the sources' texts;
 * the server keeps them until it ends. Knows names and files; the server decides what is loaded.
 */
#ifndef STEEL_CLI_SERVE_MODELS_H
#define STEEL_CLI_SERVE_MODELS_H

#include "cli/args.h"
#include "cli/config_file.h"
#include "server/api/server.h"

enum { SERVE_MODELS_MOST = 64, SERVE_ALIASES = 8 };

/* What a section says. */
struct model_section {
    const char *name, *model; /* model NULL = the name is that of a known model */
    const char *aliases[SERVE_ALIASES];
    int n_aliases;
    enum model_task task;        /* MODEL_BY_FILE = not said */
    struct model_source options; /* engine, sample, chat_template, keep_s, pinned */
    void *owner;                 /* what `options` points into */
    bool used;
};

struct serve_models {
    struct model_source defaults; /* of models without a section */
    struct model_section *sections;
    int n_sections;
    const struct opt_list *dirs;
    bool hub;
    const char *made_dir;      /* for Modelfiles; NULL = none */
    struct model_source *list; /* (n) for the server's options */
    int n;
    struct owned_texts {
        char **items;
        int n;
    } texts; /* owned */
};

/* The section of a model; NULL = none. */
struct model_section *serve_section(struct serve_models *s, const char *name);
/* Adds MODEL, or NAME=MODEL, of the command line. */
bool serve_add(struct serve_models *s, const char *text, struct model_source with,
               struct error *err);
void serve_add_builtin(struct serve_models *s, struct model_source with);
/* Adds the models that sections name by themselves. */
bool serve_add_sections(struct serve_models *s, struct error *err);
/* Sets made_dir: the first folder of models, or one in the user's data folder, which `make` makes. */
bool serve_made_dir(struct serve_models *s, bool make, struct error *err);
/* For server_options.scan; arg is a struct serve_models. */
void serve_scan(void *arg, void (*found)(void *to, const struct model_source *src), void *to);
void serve_models_clear(struct serve_models *s);

#endif
