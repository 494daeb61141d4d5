/*
 * LoRA adapters: reads a PEFT folder or a GGUF adapter and matches it with a model's weights. The
 * result says for each changed weight what is added to its product (backend/lora.h). Every tensor
 * of the file must match a weight of the right shape; otherwise the error names the tensor.
 * Adapters that are not a plain low-rank product (DoRA, biases, fully saved weights) are refused by
 * name.
 */
#ifndef STEEL_MODEL_ADAPTER_H
#define STEEL_MODEL_ADAPTER_H

#include "model/model.h"

struct adapter {
    int n_specs;
    struct lora **changes; /* (n_specs) of each weight; NULL = unchanged */
    int rank;              /* largest rank of any weight: bounds.lora_rank */
    int n_changed;         /* weights that are changed */
    size_t bytes;          /* of tensors */
};

/* specs (n_specs): the model's weights (model.h, struct outline). They are only read. */
struct adapter *adapter_open(const char *path, const struct config *c, bool model_is_gguf,
                             const struct tensor_spec *specs, int n_specs, struct error *err);
/* The same for an open file, for fuzzers. */
struct adapter *adapter_read(const struct tensorfile *f, const struct config *c, bool model_is_gguf,
                             const struct tensor_spec *specs, int n_specs, struct error *err);
void adapter_free(struct adapter *a);
/* A hash of everything that it adds to the weights. */
uint64_t adapter_mark(const struct adapter *a);

/* Lets the model's weights have adapters. Call it before the first step. */
void model_take_adapters(struct model *m);
/* Loads the adapter under this number. Any thread may call it, if no step uses the number. */
bool model_adapt(struct model *m, const struct adapter *a, int number, struct error *err);
void model_unadapt(struct model *m, int number);

/* Parses "[NAME=]PATH[:SCALE]". The default name is the last component of the path without ".gguf".
 * The text after the last colon is a scale if it parses as a number. */
enum { ADAPTER_NAME_MAX = 128 };
struct adapter_ref {
    char name[ADAPTER_NAME_MAX];
    char *path; /* owned */
    float scale;
};
bool adapter_ref_parse(const char *text, struct adapter_ref *out, struct error *err);
bool adapter_name_check(const char *name, struct error *err);

#endif
