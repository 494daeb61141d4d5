/*
 * The boundary between a network (layer.h) and the backend that computes it: a table of a few coarse ops.
 *
 *  1. Every op of struct backend_ops is mandatory. A fallback lives inside the op.
 *  2. Optional features are sub-tables (adapters, draft, tower, stream, picks, plan, tier, experts). A backend has a sub-table
 *     whole or its pointer is NULL. supports() refuses a network that needs a missing one.
 *  3. ref.c is the specification of every op; other backends are tested against it (tests/ops).
 *  4. Compute ops return void and only enqueue. The backend keeps the first error and end() reports it.
 *  5. No op allocates during a step: prepare() did.
 *  6. The residual stream belongs to the backend, in whatever form is fast. embed starts it, mixer and mlp read it
 *     and add to it, head reads it. No op takes or returns it.
 */
#ifndef STEEL_BACKEND_BACKEND_H
#define STEEL_BACKEND_BACKEND_H

#include "backend/batch.h"
#include "backend/comm.h"
#include "backend/layer.h"
#include "backend/lora.h"
#include "backend/options.h"
#include "backend/rawweight.h"
#include "base/error.h"

#include <stdint.h>
#include <stdio.h>

struct sampler; /* sample/sampler.h */
struct sample_probs;
struct profile; /* backend/profile.h */

/* Whether a sequence's logits, bit for bit, depend on the rest of the batch or on how its prompt was split. */
enum invariance {
    INVARIANCE_NONE,   /* they do: --deterministic is not offered */
    INVARIANCE_CHOSEN, /* only unless `deterministic` is set, which may cost speed */
    INVARIANCE_ALWAYS, /* they never do */
};

struct backend {
    const struct backend_ops *ops;
    struct profile *profile; /* NULL = off */
    /* The device's first failure; NULL = none. Nothing it computes afterwards means anything. end() returns it;
     * whoever reads logits after end() checks it. */
    const struct error *failure;
    enum invariance invariance;
    bool deterministic; /* may change between steps */
    /* Steps run beside the host from launch() on. The next step may begin before the current one ends, with
     * tokens the host does not know yet. At most two steps are in flight. */
    bool async;
    /* replay() may record steps and replay them, so equal shapes are worth padding for */
    bool records;
    uint64_t n_recorded; /* steps recorded so far, which take longer than their replays */
    /* alloc() takes memory of a device, such as VRAM. Else it is host memory, which is
     * committed when first touched. */
    bool own_memory;
    /* with the processes that share the network's layers; NULL = only this process */
    struct comm *comm;
};

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
    /* Stores the stream's current rows as part k of what the block reads, until the next tap of that part. NULL:
     * supports() refuses blocks with taps. */
    void (*tap)(struct backend *be, int k);
    /* Starts the stream of a step of the MTP block, in place of embed. */
    void (*join)(struct backend *be, const struct mtp *m);
};

/* Image towers (layer.h). */
struct tower_ops {
    /* Computes the features of merger number `i` of the network from the stream's rows. */
    void (*merge)(struct backend *be, const struct merger *m, int i);
    /* After end(): host (rows, network_feature_width) = the first features. */
    void (*features)(struct backend *be, int rows, float *host);
    bool pixels; /* embed reads batch.pixels */
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

/* Copies between host memory and a device, for much data at once. */
struct host_copy {
    void *device, *host;
    size_t bytes;
};
struct host_ops {
    void (*copy_in_list)(struct backend *be, const struct host_copy *list, int n);
    /* Makes copies of this host memory faster, if it can be done. Steps may then read batch.embeds in it until they end.
     * unpin: be may be NULL, after its backend has closed. */
    void (*pin)(struct backend *be, void *host, size_t bytes);
    void (*unpin)(struct backend *be, void *host);
};

/* What a network would take of the device's memory. Called before any upload: weights have only sizes, and vectors
 * are arbitrary pointers. */
struct plan_ops {
    /* Bytes of the form that upload() would make of src, whose data is NULL. *mapped: bytes of src that steps would
     * read where they are, in the mapped file. */
    size_t (*weight_bytes)(struct backend *be, const struct raw_weight *src, enum weight_role role,
                           size_t *mapped);
    /* Bytes that prepare() would allocate. */
    size_t (*step_bytes)(struct backend *be, const struct network *net,
                         const struct bounds *bounds);
};

/* Experts that are not all in the memory that is fastest: read from the model's file when steps need them (options.h:
 * expert_memory), or computed in host memory (host_experts). */
struct tier_stats {
    uint64_t hits, misses; /* experts of layers that steps needed: found in memory, or read */
    uint64_t ahead;        /* read before a step needed them, and then needed */
    uint64_t bytes;        /* read */
    double wait;           /* seconds that steps waited */
    size_t memory;         /* bytes for experts in memory */
    /* Of host_experts: uses of an expert by a row, computed on the device and by the host; seconds that the host computed. */
    uint64_t on_device, on_host;
    double host_seconds;
};
struct tier_ops {
    /* Divides expert_memory among the weights uploaded so far, and frees what only uploads need. Called once, after the uploads
     * and before prepare(): always with own_memory, else with expert_memory. False if the experts of one row do not fit. */
    bool (*settle)(struct backend *be, struct error *err);
    void (*stats)(struct backend *be, struct tier_stats *out); /* memory 0: no expert_memory */
    /* Of host_all: how often each expert was used of late, in order of layers. Returns their number; 0: none are placed by use. out
     * NULL: the number alone. Between steps. NULL: always 0. */
    size_t (*uses)(struct backend *be, float *out);
    /* Before the first step: as if experts had been used so often, all exchanges of which are made at once. */
    void (*place)(struct backend *be, const float *uses);
};

/* A segment of a weight of experts as the host has it: panels of 16 rows (cpu/panel.h). A unit has scales, then blocks of 32
 * columns. */
struct expert_panels {
    enum dtype type;
    const uint8_t *data; /* (n_expert, n_panels, panel_bytes) */
    int n_panels;        /* of an expert */
    size_t panel_bytes;
    int columns, scales,
        block;          /* of a unit: its columns, bytes of its scales, bytes of 32 columns */
    uint8_t flip;       /* Q8_0: what codes + 128 are xored with */
    const void *memory; /* the allocation that has all segments */
    size_t memory_bytes;
};

/* Experts computed for another backend (options.h: host), whose router has chosen. prepare() got the network they are in. */
struct expert_ops {
    /* y (rows, down's rows) = the sum over k < used of weights[row, k] * expert chosen[row, k] of x (rows, gate_up's columns);
     * chosen -1: none. No step is begun. A failure is be->failure. */
    void (*run)(struct backend *be, const struct mlp *m, const int32_t *chosen,
                const float *weights, int used, const float *x, float *y, int rows);
    /* Where segment `seg` of w is, for a device that copies experts. False: it has another form, or is partly in the file. NULL:
     * always false. */
    bool (*panels)(struct backend *be, const struct weight *w, int seg, struct expert_panels *out);
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
    const struct tower_ops *tower;      /* NULL: no PART_TOWER */
    const struct stream_ops *stream;    /* NULL: no pipeline stages */
    const struct pick_ops *picks;       /* NULL: no kernel tables */
    const struct host_ops *host;        /* NULL: copy_in is as good */
    const struct plan_ops *plan;        /* NULL: the file's sizes are the best estimate */
    const struct tier_ops *tier;        /* NULL: no expert_memory, no host_experts */
    const struct expert_ops *experts;   /* NULL: cannot be options.host */
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

/* Opens the device that opt names (devices.h). STEEL_ISA=ref|avx2|avx512|vnni|amx forces the CPU's kernels; an
 * error if the CPU lacks them. STEEL_PICK=NAME[,NAME] forces rows of the pick tables; an error if a model has a
 * weight or cache of a row's formats that its kernel cannot run, or none of them. */
struct backend *backend_open(const struct backend_options *opt, struct error *err);
struct backend *backend_open_ref(void); /* the scalar specification, ref.c */
struct backend *backend_open_cpu(const struct backend_options *opt, struct error *err);
/* For tests, of the reference: the smallest relative margin over all layers, for row `row` of the last step, between
 * the router key of the last expert chosen and that of the next one. */
float backend_ref_gap(struct backend *ref, int row);

#endif
