/* GGUF metadata of embedding models: pooling and the classification head. */
#ifndef STEEL_CONVERT_ENCODER_H
#define STEEL_CONVERT_ENCODER_H

#include "convert/transcode.h"
#include "model/config.h"
#include "model/pooling.h"

/* Whether the folder specifies pooling: encoders do, and decoders with a modules.json. */
bool encoder_pools(const struct tensorfile *f, const struct config *c);
/* Reads the folder's pooling into *p and adds the tensors of its head, if it has one. */
bool encoder_head(struct transcode *t, const struct tensorfile *f, const struct config *c,
                  struct pooling *p, struct error *err);
/* Writes an encoder's keys, which replace some of a decoder's. */
bool encoder_metadata(struct gguf_writer *w, const char *arch, const struct tensorfile *f,
                      const struct config *c, const struct pooling *p, struct error *err);

#endif
