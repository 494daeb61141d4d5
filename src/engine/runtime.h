/*
 * Everything behind one model file, opened and sized together: file, tokenizer, backend, model, KV
 * cache, stepper. The commands and the engine start from here.
 */
#ifndef STEEL_ENGINE_RUNTIME_H
#define STEEL_ENGINE_RUNTIME_H

#include "backend/options.h"
#include "backend/profile.h"
#include "engine/adapters.h"
#include "engine/step.h"
#include "text/tokenizer/tokenizer.h"

/* DRAFT_SEQS: where more sequences run, drafts would cost more than they save. */
enum { DRAFT_AUTO = -1, DRAFT_MOST = 8, DRAFT_SEQS = 4 };

struct runtime_options {
    struct backend_options backend;
    int context;        /* tokens per sequence; 0 = what the model was trained for, or fits */
    int kv_tokens;      /* tokens in the whole pool; 0 = max_seqs x context */
    size_t kv_bytes;    /* ... but no more than this; 0 = no bound */
    size_t state_bytes; /* for checkpoints of recurrent states; 0 = automatic */
    bool kv_bytes_host; /* that bound is about the host's memory: a GPU's own takes its place */
    float gpu_memory;   /* share of a GPU's memory that may be in use; 0 = 0.9 */
    enum dtype k_type, v_type; /* of the cache; DT_NONE = F16 */
    int page_len;              /* 0 = 16 */
    int max_seqs;              /* 0 = 1 */
    int max_seqs_gpu;   /* ... on a GPU: as many as its cache holds, at most this; 0 = max_seqs */
    int max_tokens;     /* rows of one step; 0 = 512, on a GPU 2048 */
    int max_tokens_gpu; /* ... on a GPU, if that is more */
    int read_rows; /* of which so many, at least, are left for prompts beside max_seqs decodes */
    int max_out;   /* logits rows of one step; 0 = max_seqs; embed: all rows may be wanted */
    int min_out;   /* ... but at least so many */
    /* Tokens that an MTP block drafts for a sequence each step; 0 = none, DRAFT_AUTO = one, where the
     * model has a block and the device runs it. */
    int draft;
    bool embeds; /* prompts may have rows of embeddings (engine.h) */
    bool embed;  /* vectors are wanted, not text: the head stays on disk; encoders need it */
    bool profile;
    const struct adapter_ref *loras; /* (n_loras) adapters to begin with */
    int n_loras;
    int lora_rank; /* more may come later, of up to this rank; 0 = none may */
    const struct progress *progress;
};

struct runtime {
    struct tensorfile *file;
    struct tokenizer *tokenizer; /* NULL: the file has no vocabulary; tokenizer_error says why */
    struct error tokenizer_error;
    struct error notice; /* what the user should know; empty = nothing */
    struct backend *be;
    struct model *model;
    struct kvcache *kv;
    struct stepper *step;
    struct adapters *adapters; /* NULL: there are none, and none can come */
    struct profile profile;
    int context;
    int draft;    /* as options have it, 0 where nothing drafts */
    char gpu[32]; /* the device's name, where processes of this machine take its GPUs in turn */
    struct model_shard shard; /* the part of the network that this process has; cut NULL = all */
    int64_t load_ns;
    struct grammar_vocab *grammar_vocab; /* made when first needed */
};

/* path NULL: the built-in model. */
struct runtime *runtime_open(const char *path, const struct runtime_options *opt,
                             struct error *err);
void runtime_close(struct runtime *rt);
/* The vocabulary, ready for constraints; the model has a tokenizer. Any thread may ask. */
const struct grammar_vocab *runtime_grammar_vocab(struct runtime *rt);

#endif
