/* What a model's file says about it, without loading it: for lists, and to know which endpoint it is for. */
#ifndef STEEL_SERVER_MODELS_PROBE_H
#define STEEL_SERVER_MODELS_PROBE_H

#include "server/api/server.h"
#include "text/chat/chat_source.h"

struct model_facts {
    bool known; /* the file could be read; else `error` says why not */
    struct error error;
    enum model_task task;
    bool tools, thinking, vision;
    bool is_gguf;
    int context; /* trained */
    int n_embd, n_layers, n_vocab;
    char architecture[32];
    size_t file_bytes; /* of its weights */
};

/* Reads the headers of src's file. Its template is that of src, if it names one. */
void model_probe(const struct model_source *src, struct model_facts *out);
/* The template of a model whose file is f. */
bool model_template(const struct model_source *src, const struct tensorfile *f,
                    struct chat_source *out, struct error *err);
/* Bytes of a model's files; 0 = unknown. */
size_t model_file_bytes(const char *path);

#endif
