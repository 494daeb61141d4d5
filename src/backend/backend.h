/*
 * The op table: the one interface between a network (layer.h) and what computes it. Few coarse ops,
 * all mandatory; a fallback lives inside an op. ref.c is the specification of every op; backends
 * are tested against it. Compute ops return void and only enqueue; the backend keeps the first error
 * and end() reports it. No op allocates: prepare() did.
 *
 * The residual stream is the backend's: embed starts it, mixer and mlp read it and add to it, head
 * reads it. No op takes or returns it, so it has whatever form is fast.
 */
#ifndef STEEL_BACKEND_BACKEND_H
#define STEEL_BACKEND_BACKEND_H

#include "backend/layer.h"
#include "backend/lora.h"
#include "backend/rawweight.h"
#include "base/error.h"

#include <stdint.h>
#include <stdio.h>

struct sampler; /* sample/sampler.h */
struct sample_probs;
struct profile; /* backend/profile.h */
struct ranks;   /* base/ranks.h */

/* One step's input. Prefill, decode, and any mix of them differ only in data. Host memory. */
struct batch {
    int n_tokens, n_seqs, n_decode, n_out, max_pages;
    const int32_t *
        tokens; /* (n_tokens) rows of one sequence are adjacent; q_len==1 sequences first. -1-r: the
                    token chosen for out row r of the step before (see backend.ahead) */
    const int32_t *pos;  /* (n_tokens) position in the sequence */
    const int32_t *slot; /* (n_tokens) page * page_len + offset in the KV pool; -1 = padding row */
    const int32_t *q_start;  /* (n_seqs+1) first row of each sequence; the last entry is n_tokens */
    const int32_t *kv_len;   /* (n_seqs) keys visible to the last row, itself included */
    const int32_t *pages;    /* (n_seqs, max_pages) page numbers in order */
    const int32_t *out_rows; /* (n_out) rows that need logits, ascending */
    const int32_t *types;    /* (n_tokens) for embed.types; NULL = all 0 */
    /* Slots of recurrent states, (n_seqs) each; NULL where no layer has one. No slot is written by
     * two sequences of a step, or read by one and written by another. */
    const int32_t *state_in;   /* what the first row goes on from; -1 = zeros */
    const int32_t *state_out;  /* where the last row leaves it; may be state_in; -1 = padding */
    const int32_t *save_rows;  /* after so many rows of the sequence it is also saved; 0 = never */
    const int32_t *save_state; /* ... to this slot */
    const struct kv_layer *kv; /* (n_layers) */
    bool keep;                 /* all rows go through the last layer, and keep() follows it */
    /* (n_tokens) a step of the MTP block (layer.h): the kept row each row goes on from. NULL: a step of
     * the other layers */
    const int32_t *from;
    /* (n_loras) which rows use which adapters, ascending by adapter, then by row. A row may use several,
     * none twice. */
    const struct lora_use *loras;
    int n_loras;
};

/* Whether the stream narrows to the out rows in this layer: in the last of the step. */
static inline bool batch_narrows(const struct batch *b, const struct network *net, int layer)
{
    if (net->has_next_stage)
        return false; /* another rank has the last layer */
    return b->from ? layer == net->n_layers - 1 : !b->keep && layer == network_depth(net) - 1;
}

/* What the engine's steps and its cache keep to, given once: with the network's own sizes, ops size
 * their scratch by it. */
struct bounds {
    int page_len, n_pages;
    /* Of keys and of values: F32 F16 BF16, or Q8_0 Q4_0 F8_E4M3 (quant/kvblock.h), for which
     * kv_types_check holds. */
    enum dtype k_type, v_type;
    int max_tokens, max_seqs, max_out, max_pages;
    int n_states;  /* slots of recurrent states */
    int lora_rank; /* the most that adapters add to one weight (lora_rank()); 0 = there are none */
};

/* One layer's part of the cache; NULL where it has none.
 * Attention: keys (n_pages, K, page_len, Dk) of bounds.k_type and values (n_pages, K, page_len, Dv) of
 * bounds.v_type. Latent attention: keys alone, (n_pages, page_len, C + Dr). The order inside a
 * (page, kv head) tile is the backend's own; others move whole pages.
 * Recurrent mixers: states (n_states, mixer_state_len) of floats, in the backend's own order. */
struct kv_layer {
    void *k, *v;
    float *state;
};

/* What a weight is for, so that a backend can choose its form. */
enum weight_role {
    WEIGHT_LINEAR,
    WEIGHT_EXPERTS,
    WEIGHT_EXPERTS_SHARED, /* with a shared one of the same shape beside them */
    WEIGHT_ROUTER,
    WEIGHT_EMBED, /* rows are looked up */
    WEIGHT_HEADS, /* n_expert matrices, one for each head, all of them used */
    WEIGHT_HEAD,  /* and maybe looked up, too: tied embeddings */
};

/* Whether a sequence's bytes can depend on what else is in the batch or how its prompt was cut. */
enum invariance {
    INVARIANCE_NONE,   /* they can: --deterministic is not offered */
    INVARIANCE_CHOSEN, /* unless `deterministic` is set, which may cost speed */
    INVARIANCE_ALWAYS, /* they never do */
};

struct pick_info;
struct backend {
    const struct backend_ops *ops;
    struct profile *profile; /* NULL = off */
    enum invariance invariance;
    bool deterministic; /* may change between steps */
    /* A step runs beside the host from launch() on, and the next one may be begun meanwhile, with
     * tokens the host does not know yet; two at most are under way. */
    bool ahead;
    struct ranks *ranks; /* those who share the network's layers with this one; NULL = none */
};

/* Whether a cache of these types can hold what this network stores: an error names layer and type. */
bool kv_types_check(const struct network *net, enum dtype k_type, enum dtype v_type,
                    struct error *err);
/* A type of the cache by its name on command lines, as "q8_0"; DT_NONE if there is no such. */
enum dtype kv_type_from_name(const char *name);
const char *kv_type_name(enum dtype t);
#define KV_TYPE_NAMES "f16, bf16, f32, q8_0, fp8 or q4_0"

struct backend_ops {
    const char *name;
    void (*close)(struct backend *be);

    /* Memory. alloc: zeroed, 64-byte aligned backend memory, NULL with err if there is none. */
    void *(*alloc)(struct backend *be, size_t bytes, const char *what, struct error *err);
    void (*free)(struct backend *be, void *p, size_t bytes);
    /* Part of an alloc whose content nobody wants: its memory may go until it is written again.
     * NULL: this backend's memory is taken whole. */
    void (*forget)(struct backend *be, void *p, size_t bytes);
    void (*copy_in)(struct backend *be, void *dst, const void *host, size_t bytes);
    void (*copy_out)(struct backend *be, void *host, const void *src, size_t bytes);
    /* Whether the backend can run such a network: asked before anything is uploaded (weights are
     * sizes only then, gains and biases any pointer), so that nothing aborts later. An error names
     * layer and part. */
    bool (*supports)(struct backend *be, const struct network *net, struct error *err);
    /* Takes a weight over (may repack). release undoes it. */
    bool (*upload)(struct backend *be, const struct raw_weight *src, enum weight_role role,
                   struct weight *w, struct error *err);
    void (*release)(struct backend *be, struct weight *w);
    /* One adapter's change of w in the backend's own form, for w->lora; NULL with err if there is no
     * memory. unadapt frees it. Any thread may call them, also while steps run that use other
     * adapters. NULL: this backend runs no adapters. */
    void *(*adapt)(struct backend *be, const struct weight *w, const struct lora *l,
                   struct error *err);
    void (*unadapt)(struct backend *be, void *change);
    /* Allocates everything ops need for steps of this network, which must stay where it is. Called
     * after the uploads. */
    bool (*prepare)(struct backend *be, const struct network *net, const struct bounds *bounds,
                    struct error *err);

    /* The step. replay(key) runs a step recorded under key and returns true, or returns false and
     * the caller issues the ops, after record(key) where key != 0. Backends without recording
     * return false. launch(): all ops up to head are issued. end() waits for the oldest step under
     * way; writes the sampled token of each of its out rows (-1 without sampler). */
    void (*begin)(struct backend *be, const struct batch *b);
    bool (*replay)(struct backend *be, uint64_t key);
    void (*record)(struct backend *be, uint64_t key);
    void (*launch)(struct backend *be);
    bool (*end)(struct backend *be, int32_t *tokens, struct error *err);

    /* The network. Layers come in order. Rows that need no logits stop in the last one, once their
     * keys, values and states are stored: from there on the stream has the out rows only. */
    void (*embed)(struct backend *be, const struct embed *e);
    void (*mixer)(struct backend *be, const struct mixer *m, int layer);
    void (*mlp)(struct backend *be, const struct mlp *m, int layer);
    void (*head)(struct backend *be, const struct head *h);
    /* Multi-token prediction (layer.h); NULL where PART_MTP is not supported. keep: norm(x) of the
     * stream's rows as they are now stays until the next keep. join starts the stream of a step of the
     * block, in the place of embed. */
    void (*keep)(struct backend *be, const struct norm *norm);
    void (*join)(struct backend *be, const struct mtp *m);
    /* One token per out row of the step begun last, from head's logits: samplers (n_out), NULL = no
     * token wanted; see end(). What they say is read here, so it may come after launch(), when the
     * step before has ended and its tokens are known: where a choice depends on them, the network
     * computes meanwhile. Masks must be there (sampler_prepare). Where steps run ahead, rows behind each
     * other may have one sampler, which draws for each as if the tokens of those before had been taken; -1 is
     * the token of a row behind the first that it could not choose so. */
    void (*sample)(struct backend *be, struct sampler *const *samplers);

    /* Log-probabilities of out row `row` of the step that ended last, where its sampler wants them. */
    void (*probs)(struct backend *be, int row, struct sample_probs *out);
    /* Row `row` of what the last step's head made, after end(): (n_vocab), or as many as head.w has rows
     * where stages of a pipeline share it (model/stages.h), or (n_embd) without head.w. Samplers may have
     * changed it. */
    void (*logits)(struct backend *be, int row, float *host);

    /* For tests and debugging, in a step: sets or reads the stream, its first `rows` rows of
     * n_embd. stream_put makes the stream one of `rows` rows; logits_put stands in for head. */
    void (*stream_put)(struct backend *be, const float *host, int rows);
    void (*stream_get)(struct backend *be, float *host, int rows);
    void (*logits_put)(struct backend *be, const float *host, int rows);

    /* Tables that pick kernels; NULL: there are none. pick: the i-th row; false past the last.
     * pick_force: rows of these names ("a,b"; NULL = none) run wherever their kernels can, whatever
     * was measured. STEEL_PICK does the same from the start. */
    bool (*pick)(struct backend *be, int i, struct pick_info *out);
    void (*pick_force)(struct backend *be, const char *names);
    /* Prints which rows the shapes of the network get, by the number of rows; after prepare(). NULL:
     * this backend does not know. */
    void (*pick_shapes)(struct backend *be, FILE *out);
};

/* A row of a backend's tables that pick kernels (cpu/, cuda/pick.cu), as tests, benchmarks and docs
 * see it. Of the rows of an op the first that suits runs. */
struct pick_info {
    const char *name;       /* what STEEL_PICK forces */
    const char *op;         /* "linear", "moe", ... */
    const char *formats;    /* of weights */
    const char *device;     /* what it must have; "" = nothing */
    int rows_from, rows_to; /* as measured; rows_to 0 = no end */
    bool here;              /* this device has it */
    uint64_t runs;          /* how often it has been picked */
};
/* Prints the tables, and how often each row was picked. False: the backend has none. */
bool backend_print_picks(struct backend *be, FILE *out);

struct backend_options {
    const char *device; /* "cpu", "cuda", "cuda:N"; NULL = "cpu". runtime.h knows "auto" too */
    int threads;        /* 0 = all cores */
    bool deterministic; /* same bytes whatever else is in the batch and however it was cut */
    bool no_repack;     /* compute from the mapped file */
};

/* STEEL_ISA=ref|avx2|avx512|vnni|amx forces the CPU's kernels; refused where the CPU lacks it. So is
 * STEEL_PICK=NAME[,NAME], rows of the pick tables, where a model has something for a row that its kernel
 * cannot run, or nothing. */
struct backend *backend_open(const struct backend_options *opt, struct error *err);
/* What the name of a device asks for; NULL is "cpu". Opens none. */
enum device_kind {
    DEVICE_CPU,
    DEVICE_GPU,
    DEVICE_AUTO,  /* a GPU, or the CPU: engine/device.h decides */
    DEVICE_OTHER, /* no such thing: backend_open says so */
};
enum device_kind backend_device_kind(const char *device);
/* The name to open where a device of this kind (CPU or GPU) was chosen unasked. */
const char *backend_device_name(enum device_kind kind);
struct backend *backend_open_ref(void); /* the scalar specification, ref.c */
/* For tests, of the reference: how close row `row` of the last step came to other experts, the
 * closest of its layers: how far the last chosen one's key is above the next, of itself. */
float backend_ref_gap(struct backend *ref, int row);
struct backend *backend_open_cpu(const struct backend_options *opt, struct error *err);
/* Bytes a CUDA device still has to give when `fraction` of its memory may be in use; 0 where
 * there is no such device, or the build knows none. */
bool backend_has_cuda(void); /* whether there is such a device; opens none */
size_t backend_cuda_room(const struct backend_options *opt, double fraction);
int backend_cuda_count(void); /* how many there are */
/* The line for a machine where CUDA opens no device, and false. Versions of CUDA as it counts them (13.0 is
 * 13000): what the driver is good for (0: there is no driver) and what this build needs. why: what CUDA says. */
bool backend_no_gpu(int driver, int needed, const char *why, struct error *err);
/* Which GPU this backend has, of all that there are anywhere; false: none. */
bool backend_device_id(struct backend *be, unsigned char id[16]);
/* For a benchmark's record; false where the backend is no GPU. Measures, so it takes a moment. */
struct gpu_facts {
    char name[256], driver[32]; /* driver: "" = not known */
    int sm, n_sm;               /* compute capability x 10, multiprocessors */
    int max_sm_mhz;             /* 0 = not known, as the next two */
    int sm_mhz, memory_mhz;     /* now */
    size_t memory_bytes;
    double read_bytes_s; /* measured; 0 = not */
};
bool backend_gpu_facts(struct backend *be, struct gpu_facts *out);
/* Only in builds with nvcc (STEEL_CUDA). device: "cuda", "cuda:N" or NULL = the first. */
struct backend *backend_open_cuda(const struct backend_options *opt, struct error *err);

#endif
