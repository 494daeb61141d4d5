/* What a GGUF says of models that make vectors: how rows become one, and by which head they are scored. */
#ifndef STEEL_CONVERT_ENCODER_H
#define STEEL_CONVERT_ENCODER_H

#include "convert/transcode.h"
#include "model/config.h"
#include "model/pooling.h"

/* Whether the folder says how it pools: encoders do, and decoders with a modules.json. */
bool encoder_pools(const struct tensorfile *f, const struct config *c);
/* Reads the folder's pooling into *p and adds the tensors of its head, if it has one. */
bool encoder_head(struct transcode *t, const struct tensorfile *f, const struct config *c,
                  struct pooling *p, struct error *err);
/* The keys that such a model has instead of a decoder's, and beside them. */
bool encoder_metadata(struct gguf_writer *w, const char *arch, const struct tensorfile *f,
                      const struct config *c, const struct pooling *p, struct error *err);

#endif
