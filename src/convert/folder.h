/* Inside `convert`: the tensors of a folder as those of a GGUF. folder.c plans the text model, tower.c its image tower. */
#ifndef STEEL_CONVERT_FOLDER_H
#define STEEL_CONVERT_FOLDER_H

#include "convert/convert.h"
#include "model/build.h"
#include "model/pooling.h"

struct folder_plan {
    const struct tensorfile *f;
    const struct config *c;
    struct transcode *t;
    bool *used; /* (f->n_tensors) */
    struct error *err;
    struct pooling pooling; /* of an embedding model */
};

/* A tensor of the folder, marked as used. NULL: there is none. */
const struct tensor *folder_find(struct folder_plan *p, const char *name);
/* The weight or vector of a spec, under its GGUF name. */
bool folder_add_spec(struct folder_plan *p, const struct tensor_spec *spec);
/* All values of a tensor, n of them. NULL with an error. */
float *folder_values(struct folder_plan *p, const struct tensor *t, int64_t n);
/* The type of the folder's matrices. t: one of them, or NULL. */
const struct mix *folder_mix(const struct tensorfile *f, const struct tensor *t);

#endif
