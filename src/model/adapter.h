/*
 * Adapters (LoRA): a PEFT folder or a GGUF adapter, read and matched with the weights of a model. What
 * comes out says, for each weight that is changed, what is added to its product (backend/lora.h). Every
 * tensor of the file must find its weight, with the shape that fits: one that does not is an error that
 * names it. What no low-rank product expresses (DoRA, biases, whole weights saved beside) is refused by
 * name.
 */
#ifndef STEEL_MODEL_ADAPTER_H
#define STEEL_MODEL_ADAPTER_H

#include "model/model.h"

struct adapter {
    int n_specs;
    struct lora **changes; /* (n_wants) of the weights of the model; NULL = none */
    int rank;              /* the most that is added to one weight: bounds.lora_rank */
    int n_changed;         /* weights */
    size_t bytes;          /* of tensors */
};

/* wants (n_wants): the weights of the model (model.h, struct outline), read from a GGUF or from a
 * folder. Frees nothing of them. */
struct adapter *adapter_open(const char *path, const struct config *c, bool model_is_gguf,
                             const struct tensor_spec *specs, int n_specs, struct error *err);
/* The same of a file that is open: for fuzzers. */
struct adapter *adapter_read(const struct tensorfile *f, const struct config *c, bool model_is_gguf,
                             const struct tensor_spec *specs, int n_specs, struct error *err);
void adapter_free(struct adapter *a);

/* Lets a model's weights have adapters: before the first step. */
void model_take_adapters(struct model *m);
/* Gives the adapter this number. Any thread may, unless a step uses the number. */
bool model_adapt(struct model *m, const struct adapter *a, int number, struct error *err);
void model_unadapt(struct model *m, int number);

/* NAME, PATH and SCALE of "[NAME=]PATH[:SCALE]". Name: the last part of the path where none is given,
 * without ".gguf"; what follows the last colon is a scale if it reads as a number. */
enum { ADAPTER_NAME_MAX = 128 };
struct adapter_ref {
    char name[ADAPTER_NAME_MAX];
    char *path; /* owned */
    float scale;
};
bool adapter_ref_parse(const char *text, struct adapter_ref *out, struct error *err);
bool adapter_name_check(const char *name, struct error *err);

#endif
