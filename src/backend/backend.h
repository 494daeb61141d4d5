/*
 * The boundary between a network (layer.h) and the backend that computes it: a table of a few coarse ops.
 *
 *  1. Every op of struct backend_ops is mandatory. A fallback lives inside the op.
 *  2. Optional features are sub-tables (adapters, draft, stream, picks). A backend has a sub-table whole or
 *     its pointer is NULL. supports() refuses a network that needs a missing one.
 *  3. ref.c is the specification of every op; other backends are tested against it (tests/ops).
 *  4. Compute ops return void and only enqueue. The backend keeps the first error and end() reports it.
 *  5. No op allocates during a step: prepare() did.
 *  6. The residual stream belongs to the backend, in whatever form is fast. embed starts it, mixer and mlp read it
 *     and add to it, head reads it. No op takes or returns it.
 */
#ifndef STEEL_BACKEND_BACKEND_H
#define STEEL_BACKEND_BACKEND_H

#include "backend/comm.h"
#include "backend/layer.h"
#include "backend/lora.h"
#include "backend/rawweight.h"
#include "base/error.h"

#include <stdint.h>
#include <stdio.h>

struct sampler; /* sample/sampler.h */
struct sample_probs;
struct profile; /* backend/profile.h */

/* One step's input. Prefill, decode and any mix of them differ only in data. Host memory. */
struct batch {
    int n_tokens, n_seqs, n_decode, n_out, max_pages;
    /* (n_tokens) Rows of one sequence are adjacent; sequences with one row come first. -1-r stands for the token
     * sampled for output row r of the previous step (backend.async). */
    const int32_t *tokens;
    const int32_t *pos;  /* (n_tokens) position in the sequence */
    const int32_t *slot; /* (n_tokens) page * page_len + offset in the KV pool; -1 = padding row */
    const int32_t *q_start;  /* (n_seqs+1) first row of each sequence; the last entry is n_tokens */
    const int32_t *kv_len;   /* (n_seqs) keys visible to the last row, its own included */
    const int32_t *pages;    /* (n_seqs, max_pages) block table: page numbers in order */
    const int32_t *out_rows; /* (n_out) rows that need logits, ascending */
    const int32_t *types;    /* (n_tokens) for embed.types; NULL = all 0 */
    /* Slots of recurrent states, (n_seqs) each; NULL if no layer has a state. In one step, no slot is written by
     * two sequences, and none is read by one sequence and written by another. */
    const int32_t *state_in; /* the state before the first row; -1 = zeros */
    const int32_t
        *state_out; /* receives the state after the last row; may be state_in; -1 = padding */
    const int32_t
        *save_rows; /* a checkpoint is taken after this many rows of the sequence; 0 = none */
    const int32_t *save_state; /* the slot that receives the checkpoint */
    const struct kv_layer *kv; /* (n_layers) */
    bool keep; /* all rows go through the last layer, and draft->keep() follows it */
    /* (n_tokens) For a step of the MTP block (layer.h): the kept row that each row continues. NULL for a step of
     * the main layers. */
    const int32_t *from;
    /* (n_loras) Which rows use which adapters, ascending by adapter, then by row. A row may use several adapters,
     * but none twice. */
    const struct lora_use *loras;
    int n_loras;
};

/* Whether the stream narrows to the output rows in this layer, which is the last of the step. */
static inline bool batch_narrows(const struct batch *b, const struct network *net, int layer)
{
    if (net->has_next_stage)
        return false; /* another rank has the last layer */
    return b->from ? layer == net->n_layers - 1 : !b->keep && layer == network_depth(net) - 1;
}

/* Upper bounds of every step and of the cache. Together with the network's sizes they determine the backend's
 * scratch. */
struct bounds {
    int page_len, n_pages;
    /* Types of keys and values: F32, F16, BF16, or quantised as Q8_0, Q4_0, F8_E4M3 (quant/kvblock.h).
     * kv_types_check holds for them. */
    enum dtype k_type, v_type;
    int max_tokens, max_seqs, max_out, max_pages;
    int n_states; /* slots of recurrent states */
    int lora_rank; /* largest total rank that adapters add to one weight (lora_rank()); 0 = no adapters */
};

/* One layer's part of the cache. Members that the layer does not use are NULL.
 * Attention: keys (n_pages, K, page_len, Dk) of bounds.k_type and values (n_pages, K, page_len, Dv) of
 * bounds.v_type. Latent attention: keys only, (n_pages, page_len, C + Dr). The order inside a (page, kv head)
 * tile is private to the backend; the engine moves whole pages.
 * Recurrent mixers: states (n_states, mixer_state_len) of floats, in the backend's own order. */
struct kv_layer {
    void *k, *v;
    float *state;
};

/* The use of a weight, from which a backend chooses its packed form. */
enum weight_role {
    WEIGHT_LINEAR,
    WEIGHT_EXPERTS,
    WEIGHT_EXPERTS_SHARED, /* experts beside a shared expert of the same shape */
    WEIGHT_ROUTER,
    WEIGHT_EMBED, /* rows are looked up */
    WEIGHT_HEADS, /* one matrix per attention head (n_expert of them), all used by every row */
    WEIGHT_HEAD,  /* the output head; with tied embeddings, rows are also looked up */
};

/* Whether a sequence's logits, bit for bit, depend on the rest of the batch or on how its prompt was split. */
enum invariance {
    INVARIANCE_NONE,   /* they do: --deterministic is not offered */
    INVARIANCE_CHOSEN, /* only unless `deterministic` is set, which may cost speed */
    INVARIANCE_ALWAYS, /* they never do */
};

struct backend {
    const struct backend_ops *ops;
    struct profile *profile; /* NULL = off */
    enum invariance invariance;
    bool deterministic; /* may change between steps */
    /* Steps run beside the host from launch() on. The next step may begin before the current one ends, with
     * tokens the host does not know yet. At most two steps are in flight. */
    bool async;
    bool
        records; /* replay() may record steps and replay them, so equal shapes are worth padding for */
    bool
        own_memory; /* alloc() takes memory of a device, such as VRAM. Else it is host memory, which is
                            committed when first touched. */
    struct comm
        *comm; /* with the processes that share the network's layers; NULL = only this process */
};

/* Whether a cache of these types can store what this network's layers need. The error names layer and type. */
bool kv_types_check(const struct network *net, enum dtype k_type, enum dtype v_type,
                    struct error *err);
/* The cache type of a name on the command line, such as "q8_0"; DT_NONE if unknown. */
enum dtype kv_type_from_name(const char *name);
const char *kv_type_name(enum dtype t);
#define KV_TYPE_NAMES "f16, bf16, f32, q8_0, fp8 or q4_0"

struct adapter_ops {
    /* Converts the change that one adapter makes to w into the backend's form, for w->lora. NULL with err if
     * memory runs out. unadapt frees it. Both are safe from any thread, also while steps with other adapters run. */
    void *(*adapt)(struct backend *be, const struct weight *w, const struct lora *l,
                   struct error *err);
    void (*unadapt)(struct backend *be, void *change);
};

/* Multi-token prediction (layer.h). */
struct draft_ops {
    /* Stores norm(x) of the stream's current rows until the next keep. */
    void (*keep)(struct backend *be, const struct norm *norm);
    /* Starts the stream of a step of the MTP block, in place of embed. */
    void (*join)(struct backend *be, const struct mtp *m);
};

/* Access to the stream inside a step, for pipeline stages and tests. Rows are of n_embd. */
struct stream_ops {
    void (*put)(struct backend *be, const float *host,
                int rows);                                  /* the stream becomes these rows */
    void (*get)(struct backend *be, float *host, int rows); /* its first `rows` rows */
    void (*put_logits)(struct backend *be, const float *host,
                       int rows); /* replaces head, for tests */
};

/* Access to the tables that pick kernels. */
struct pick_info;
struct pick_ops {
    bool (*row)(struct backend *be, int i, struct pick_info *out); /* false past the last row */
    /* Rows of these names ("a,b"; NULL = none) run wherever their kernels can, whatever was measured.
     * STEEL_PICK does the same from the start. */
    void (*force)(struct backend *be, const char *names);
    /* After prepare(): prints which rows the network's shapes get, by number of input rows. Prints nothing if
     * the choice depends on more than that. */
    void (*shapes)(struct backend *be, FILE *out);
};

struct backend_ops {
    const char *name;
    void (*close)(struct backend *be);

    /* Memory. alloc returns zeroed, 64-byte aligned backend memory, or NULL with err. */
    void *(*alloc)(struct backend *be, size_t bytes, const char *what, struct error *err);
    void (*free)(struct backend *be, void *p, size_t bytes);
    /* The content of a part of an alloc is no longer needed. Its memory may go back to the system until it is
     * written again. Does nothing with own_memory. */
    void (*forget)(struct backend *be, void *p, size_t bytes);
    void (*copy_in)(struct backend *be, void *dst, const void *host, size_t bytes);
    void (*copy_out)(struct backend *be, void *host, const void *src, size_t bytes);
    /* Whether the backend can run the network. Called before any upload: weights have only sizes, and gains and
     * biases are arbitrary pointers. The error names layer and part. */
    bool (*supports)(struct backend *be, const struct network *net, struct error *err);
    /* Makes the backend's form of a weight, which may be a packed copy. release frees it. */
    bool (*upload)(struct backend *be, const struct raw_weight *src, enum weight_role role,
                   struct weight *w, struct error *err);
    void (*release)(struct backend *be, struct weight *w);
    /* Allocates everything that steps of this network need. Called after the uploads. The network must not move
     * afterwards. */
    bool (*prepare)(struct backend *be, const struct network *net, const struct bounds *bounds,
                    struct error *err);

    /* The step: begin, the network's ops or a replay of them, launch, sample, end.
     * replay runs the step recorded under key and returns true. Otherwise it returns false, and a backend that
     * records stores the ops from here to launch() under key.
     * launch: all ops up to head are issued.
     * end waits for the oldest step in flight and writes the sampled token of each of its output rows (-1 without
     * sampler). */
    void (*begin)(struct backend *be, const struct batch *b);
    bool (*replay)(struct backend *be, uint64_t key);
    void (*launch)(struct backend *be);
    bool (*end)(struct backend *be, int32_t *tokens, struct error *err);

    /* The network. Layers come in order. In the last layer, rows that need no logits stop once their keys, values
     * and states are stored. From there on the stream has the output rows only. */
    void (*embed)(struct backend *be, const struct embed *e);
    void (*mixer)(struct backend *be, const struct mixer *m, int layer);
    void (*mlp)(struct backend *be, const struct mlp *m, int layer);
    void (*head)(struct backend *be, const struct head *h);
    /* Samples one token per output row of the step begun last, from head's logits. samplers (n_out): NULL = this
     * row needs no token. It may be called after launch(), once the previous step has ended and its tokens are known:
     * the network computes while samplers wait for them. Grammar masks must be ready (sampler_prepare).
     * With async, several rows may share one sampler. It samples each row as if the tokens of the rows before had
     * been accepted. -1 is returned for later rows for which that is not possible. */
    void (*sample)(struct backend *be, struct sampler *const *samplers);

    /* Log-probabilities of output row `row` of the step that ended last, if its sampler asked for them. */
    void (*probs)(struct backend *be, int row, struct sample_probs *out);
    /* Row `row` of the last head's result, after end(). Its width is n_vocab; or the rows of head.w if pipeline
     * stages share the head (dist/stages.h); or n_embd without head.w. Samplers may have changed the values. */
    void (*logits)(struct backend *be, int row, float *host);

    const struct adapter_ops *adapters; /* NULL: no LoRA */
    const struct draft_ops *draft;      /* NULL: no PART_MTP */
    const struct stream_ops *stream;    /* NULL: no pipeline stages */
    const struct pick_ops *picks;       /* NULL: no kernel tables */
};

/* One row of the tables that pick kernels, for tests, benchmarks and docs. Of an op's rows, the first that fits
 * runs. */
struct pick_info {
    const char *name;       /* what STEEL_PICK forces */
    const char *op;         /* "linear", "moe", ... */
    const char *formats;    /* of weights */
    const char *device;     /* what the device must have; "" = nothing */
    int rows_from, rows_to; /* the range of input rows it is picked for; rows_to 0 = no end */
    bool available;         /* on this device */
    uint64_t runs;          /* how often it was picked */
};
/* Prints the tables and how often each row was picked. False: the backend has none. */
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
