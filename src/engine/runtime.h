/*
 * A loaded model with everything that runs it, opened and sized together: file, tokenizer, backend, model, KV cache,
 * stepper. Commands and the engine start from here.
 */
#ifndef STEEL_ENGINE_RUNTIME_H
#define STEEL_ENGINE_RUNTIME_H

#include "backend/options.h"
#include "backend/profile.h"
#include "engine/adapters.h"
#include "engine/draft_count.h"
#include "engine/draft_vocab.h"
#include "engine/fit.h"
#include "engine/offload.h"
#include "engine/step.h"
#include "text/tokenizer/tokenizer.h"
#include "vision/encoder.h"

enum { DRAFT_AUTO = -1, DRAFT_MOST = 8 };

struct runtime_options {
    struct backend_options backend;
    int context;                 /* tokens per sequence; 0 = the model's own, or as many as fit */
    int kv_tokens;               /* tokens in the whole pool; 0 = max_seqs x context */
    size_t kv_bytes;             /* ... but no more than this; 0 = no bound */
    size_t state_bytes;          /* for checkpoints of recurrent states; 0 = automatic */
    bool kv_bytes_host;          /* kv_bytes bounds the host's memory only; a GPU uses its own */
    float gpu_memory;            /* fraction of a GPU's memory that may be used; 0 = 0.9 */
    size_t gpu_limit;            /* bytes of it that may be used at most; 0 = no limit */
    struct offload_wish offload; /* experts that stay in host memory beside a GPU */
    int gpu_layers; /* llama.cpp's -ngl: all of the model's layers, or an error; 0 = not given */
    enum dtype k_type, v_type; /* of the cache; DT_NONE = F16 */
    int page_len;              /* 0 = KVCACHE_PAGE */
    int max_seqs;              /* 0 = 1 */
    int max_seqs_gpu;   /* ... on a GPU: as many as its cache holds, at most this; 0 = max_seqs */
    int max_tokens;     /* rows of one step; 0 = 512, on a GPU 2048 */
    int max_tokens_gpu; /* ... on a GPU, if that is more */
    int read_rows;      /* at least this many rows are left for prompts besides max_seqs decodes */
    int max_out;        /* logits rows of one step; 0 = max_seqs; embed: at least max_tokens */
    int min_out;        /* ... but at least this */
    /* Draft tokens per sequence and step: 0 = none, DRAFT_AUTO = as many as pay (draft.h), else always that number. */
    int draft;
    unsigned
        draft_from; /* 1 << draft_source of those that may draft; 0 = all, or with a number the draft model or the block */
    const char *draft_model;  /* a small model, or an EAGLE-3 head, that drafts; NULL = none */
    const char *draft_device; /* its device; NULL = the model's */
    bool embeds;              /* prompts may have rows of embeddings (engine.h) */
    bool images; /* the file's image tower is loaded, if there is one that the device can run */
    const char *mmproj; /* a GGUF's tower; NULL = one beside it, if it fits */
    int image_features; /* most features, which are prompt tokens, of an image; 0 = automatic */
    bool embed;         /* for embeddings: the head is not loaded; required for encoders */
    bool profile;
    bool canary; /* pages of the cache have marks, which every step checks (canary.h) */
    const struct adapter_ref *loras; /* (n_loras) adapters loaded at the start */
    int n_loras;
    int lora_rank; /* adapters up to this rank may be loaded later; 0 = none */
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
    struct adapters *adapters; /* NULL: no adapters, and none can be loaded */
    struct encoder *encoder;   /* of images; NULL = the model reads text only */
    struct eagle *eagle;       /* the head of draft_model; NULL = it is none */
    struct tensorfile *mmproj; /* the tower's file, if it is another one */
    bool sees;                 /* the encoder is to be opened */
    struct runtime *small;     /* the draft model; NULL = none */
    struct draft_vocab small_vocab;
    struct profile profile;
    int context;
    int draft;           /* draft tokens of the MTP block in use; 0 = none */
    unsigned draft_from; /* 1 << draft_source of those in use */
    int draft_fixed;     /* draft tokens per step and sequence; 0 = as many as pay */
    char gpu[32];        /* the device's name, if this machine's processes take its GPUs in turn */
    size_t gpu_before;   /* the GPU's free memory before this model was opened */
    struct model_shard
        shard; /* this process's shard of the network; cut NULL = the whole network */
    int64_t load_ns;
    size_t
        weight_memory; /* of the host: what weights take, without experts that stay in the file */
    struct grammar_vocab *grammar_vocab; /* made on first use */
};

/* path NULL: the built-in model. */
struct runtime *runtime_open(const char *path, const struct runtime_options *opt,
                             struct error *err);
void runtime_close(struct runtime *rt);

/* What runtime_open would do with these options: all decisions, by the same code, but nothing is loaded. */
struct runtime_plan {
    char device[32];
    bool gpu;
    bool fits;
    struct error why;    /* why it does not fit */
    struct error notice; /* as runtime.notice */
    struct fit_weights weights;
    size_t more_weights;             /* of adapters and the image tower, in the file's formats */
    size_t small;                    /* the draft model: weights, cache and working memory */
    size_t step;                     /* working memory of the backend */
    size_t other;                    /* allowance for everything else */
    size_t kv, states;               /* bytes of the cache; states include checkpoints */
    size_t token_bytes, state_bytes; /* of one token; of one sequence's states */
    size_t free, usable;             /* memory of the device; free 0 = unknown */
    int64_t tokens;                  /* in the cache */
    int64_t room_tokens;             /* that would fit; -1 = unknown */
    int context, trained;            /* tokens of a sequence; what the model has */
    int max_seqs, max_tokens, n_states;
    int threads; /* of the CPU */
};
/* False: the file or an option is wrong. A model that does not fit is no error: out->fits. */
bool runtime_plan(struct tensorfile *f, const struct runtime_options *opt, struct runtime_plan *out,
                  struct error *err);
/* The vocabulary, prepared for constraints. The model must have a tokenizer. Any thread may call it. */
const struct grammar_vocab *runtime_grammar_vocab(struct runtime *rt);

#endif
