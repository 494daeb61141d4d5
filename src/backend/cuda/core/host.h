/*
 * The host's side of the CUDA backend, for the files without kernels: what they share beyond
 * cuda.h, such as networks, batches, the op table and its functions.
 */
#ifndef STEEL_BACKEND_CUDA_HOST_H
#define STEEL_BACKEND_CUDA_HOST_H

#include "backend/cuda/core/comm.h"
#include "backend/cuda/lora/lora.h"

extern "C" {
#include "backend/backend.h"
#include "backend/canary.h"
#include "backend/devices.h"
}

/* mtp.cu: multi-token prediction. */
struct cuda_mtp {
    float *kept;   /* (max_tokens, n_embd) rows kept from the last step; NULL: no MTP block */
    float *joined; /* (max_tokens, 2, n_embd) input of a step of the MTP block */
    /* EAGLE-3: (n_taps, max_tokens, n_embd) rows stored by tap; (max_tokens, n_taps, n_embd) those that a step of the
     * block reads; (max_out, n_ids) its logits, before they become rows of n_vocab. */
    float *taps, *to_fc, *few_logits;
    bool continues; /* batch.continues of the step begun last */
    int from; /* step block offset of the kept rows that a step of the MTP block continues from */
    /* A step that reads draft tokens also has its rows as decodes (mtp_rows). These are the step
     * block offsets of their row numbers, of the keys each row sees, and of their pages, `stride`
     * per row (a power of two if possible). stride 0: not such a step. */
    int rows_at, rows_len, rows_pages, stride;
    bool verifies; /* bounds.drafts, or there is an MTP block */
    int narrows;   /* the layer after which rows without logits are dropped; -1: the head */
};

/* vision/tower.cu. Each buffer is allocated only if the network needs it. */
struct cuda_tower {
    int spans;      /* step block offset of batch.spans; -1: the step has none */
    float *patches; /* (max_tokens, patch values) */
    /* of embed.pixels: values of bytes (3, 256), pinned memory for (max_tokens, bytes of a patch), and the step block offset of
     * the patches' addresses, 0: the step's patches are values */
    float *byte_values;
    uint8_t *pixels, *pixels_mapped;
    int pixels_at;
    float *merged[2]; /* rows inside a merger */
    float *features;  /* (rows, network_feature_width) of the last step */
    float *clip_in, *clip_out, *clip_hidden, *clip_act; /* of products with bounds */
};

/* canary.cu. The pinned blocks alternate between the steps in flight: results (max_seqs), expected
 * marks (max_seqs, max_pages), marks to be written (n_pages). */
struct cuda_canary {
    uint8_t *host[2], *mapped[2];
    size_t expected_at, set_at; /* offsets in bytes; results are at 0 */
    int32_t *wrong[2];          /* where the results of a step go; NULL: it has no marks */
    int n_seqs[2];
};

/* moe/offload.cu: experts in host memory. */
struct cuda_offload {
    struct backend *host; /* NULL: nothing is offloaded */
    bool reads;           /* it has tier_ops and expert_memory */
    bool all;             /* it has the device's experts, too */
    struct offload_worker *worker;
};

/* A struct backend of this kind. */
struct cuda_whole {
    struct backend be;
    struct cuda_backend cu;
    struct cuda_loras loras;
    struct cuda_comm comm;
    struct cuda_mtp mtp;
    struct cuda_tower tower;
    struct cuda_canary canary;
    struct cuda_offload offload;
};
static inline struct cuda_backend *cuda_self(struct backend *be)
{
    return &((struct cuda_whole *)be)->cu;
}

/* The communicator of the same backend. */
static inline struct cuda_comm *cuda_comm_of(const struct cuda_backend *cu)
{
    return &((struct cuda_whole *)cu->be)->comm;
}

static inline const struct matrix *cuda_matrix(const struct weight *w)
{
    return &((const struct cuda_weight *)w->impl)->m;
}

/* device.cu */
bool cuda_open_device(struct cuda_backend *cu, int device, bool background, struct error *err);
/* Makes the device current for the calling thread. */
void cuda_enter(const struct cuda_backend *cu);
int cuda_device_number(const char *device);            /* of "cuda:N", "cuda" or NULL */
int cuda_count(void);                                  /* devices */
size_t cuda_room(const char *device, double fraction); /* devices.h */
void cuda_device_id(struct backend *be, unsigned char id[16]);
bool cuda_facts(struct backend *be, struct gpu_facts *out); /* facts.cu */
void cuda_close(struct backend *be);
void *cuda_alloc(struct backend *be, size_t bytes, const char *what, struct error *err);
void cuda_free(struct backend *be, void *p, size_t bytes);
void cuda_copy_in(struct backend *be, void *dst, const void *host, size_t bytes);
void cuda_copy_out(struct backend *be, void *host, const void *src, size_t bytes);
extern const struct host_ops cuda_host_ops; /* device.cu */
struct device_buffer {
    void **p;
    size_t bytes;
};
/* cuda_own: device memory that lives as long as the backend. cuda_pin: pinned host memory, with its
 * device address. */
bool cuda_own(struct cuda_backend *cu, const struct device_buffer *list, int n, struct error *err);
bool cuda_pin(void **host, void **mapped, size_t bytes, struct error *err);
/* Whether host memory is pinned (host_ops), so that devices read it by its address. */
bool cuda_is_pinned(const void *p, size_t bytes);

/* Other processes use the device too, so no kernel may assume that all its blocks are resident. */
void cuda_share_device(struct cuda_backend *cu);

/* weights.cu */
bool cuda_upload(struct backend *be, const struct raw_weight *src, enum weight_role role,
                 struct weight *w, struct error *err);
void cuda_release(struct backend *be, struct weight *w);
size_t cuda_weight_bytes(const struct raw_weight *src, enum weight_role role); /* devices.h */

/* backend.cu: starts a stream of `rows` rows in cu->act.stream */
struct resid *cuda_start_stream(struct cuda_backend *cu, int rows);
/* A case whose input is norm(stream), to be made later; x: where its rows will be described. In a block that reads what
 * the mixer before it read (resid.reads_before), x is the norm of that. */
struct pick_case cuda_case(struct cuda_backend *cu, const struct norm *norm, struct rows *x);
/* A block that keeps its normed input (block.keep): the stream becomes that, and the block reads it as it is. Returns the
 * block without its first norm. */
struct block cuda_keep(struct cuda_backend *cu, const struct block *b);
struct rows cuda_norm_before(struct cuda_backend *cu, const struct norm *norm);

/* The tokens' embeddings (n_tokens, n_embd), summed over comm; timed as part of STAGE_EMBED. */
void cuda_embed(struct cuda_backend *cu, const struct embed *e, float *x);

/* mlp.cu: the op, and conversions from layer.h to what kernels take */
void cuda_mlp(struct backend *be, const struct mlp *m, int layer);
struct gain cuda_gain(const struct cuda_backend *cu, const struct norm *n);
struct resid_epilogue cuda_epilogue(const struct cuda_backend *cu, const struct block *b);
struct gating cuda_gating(const struct ffn *f);
struct experts cuda_experts(const struct mlp *m); /* m has a router */
bool cuda_is_plain(const struct mlp *m);          /* a single pick runs it */

/* apart.cu: mlps as separate products. True if the dense part, or the experts, have what only those can do. */
bool apart_dense(const struct mlp *m);
bool apart_experts(const struct mlp *m);
bool apart_supported(const struct cuda_backend *cu, const struct network *net, int i,
                     struct error *err);
int apart_widest(const struct mlp *m); /* rows that are converted for a product; 0 = none */
bool apart_prepare(struct cuda_backend *cu, const struct network *net, const struct bounds *b,
                   struct error *err);
/* The case's dense part (PICK_FFN, PICK_UNGATED) or experts (PICK_MOE). */
void apart_mlp(struct cuda_backend *cu, enum pick_op op, struct pick_case *c, const struct mlp *m);

/* join.cu: makes a shared expert one of the experts, if shapes and formats match. */
bool join_experts(struct cuda_backend *cu, const struct mlp *m, struct error *err);
bool join_is_done(const struct mlp *m);

/* prepare.cu */
bool cuda_supports(struct backend *be, const struct network *net, struct error *err);
bool cuda_prepare(struct backend *be, const struct network *net, const struct bounds *bounds,
                  struct error *err);

/* canary.cu. begin: once the step block is enqueued. end: once the step has ended. */
bool canary_prepare(struct cuda_backend *cu, const struct bounds *b, struct error *err);
void canary_close(struct cuda_backend *cu);
void canary_begin(struct cuda_backend *cu, const struct batch *b, int turn);
void canary_end(struct cuda_backend *cu, int turn);

/* step.cu */
void cuda_begin(struct backend *be, const struct batch *b);
bool cuda_replay(struct backend *be, uint64_t key);
void cuda_record(struct backend *be, uint64_t key);
bool step_repeats(
    const struct cuda_backend *cu); /* whether steps as the one begun last are recorded */
void cuda_forget_recordings(struct cuda_backend *cu);
void cuda_launch_step(struct backend *be);
bool cuda_end(struct backend *be, int32_t *tokens, struct error *err);
/* pick.cu */
bool pick_info(struct backend *be, int i, struct pick_info *out);
void pick_force(struct backend *be, const char *names);

#endif
