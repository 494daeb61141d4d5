/*
 * The reference and the backend under test side by side, for test_ops.c: both backends, networks of
 * the same parts in both, arrays and weights that lie in both memories, batches with their pages, and
 * the comparison of what came out.
 */
#ifndef STEEL_TESTS_OPS_DUO_H
#define STEEL_TESTS_OPS_DUO_H

#include "backend/backend.h"
#include "quant/kvblock.h"
#include "random_weight.h"

#ifdef STEEL_CUDA_SIM
enum { SIM = 1 };
#else
enum { SIM = 0 };
#endif

extern const char *backend_name; /* "cpu" or "cuda" */
extern int
    light; /* fewer and smaller cases: 1 a simulator, 2 a part of make test, 3 small for the CPU */
extern bool small; /* a few cases for each row of the tables of kernels: picks.c */
/* Products round the activations: to halves on a GPU (2^-12 of each, at most, and the weights
 * likewise), to 8 bits on a CPU. */
extern double product_tol;
extern bool host_is_exact; /* in the simulator, the host of experts is the reference, not the CPU */

extern int n_checks, n_failed;
extern double worst; /* error of the group so far */
extern uint64_t rng;
extern const char *filter;

enum { REF, DEV, SIDES };
#define EACH(side) for (int side = 0; side < SIDES; side++)

/* Sizes of a test's network and bounds of its steps. */
struct dims {
    int n_embd, n_heads, n_kv_heads, head_dim, n_rot, n_vocab;
    int n_ff, n_expert, n_expert_used, n_ff_exp;
    int alike;   /* experts whose rows of the router repeat: random_spec; 0: none */
    float nudge; /* each repeat by how much larger than the one before */
    bool norm_topk;
    float expert_scale;
    bool other; /* mlps with biases, a clamped SwiGLU, sigmoid routing, biases of the choice, and a
                   shared expert with a gate */
    bool fused; /* gate and up of mlps are one segment */
    int first_own, n_own; /* of all experts only these are here; n_own 0: all */
    int n_host;           /* the last experts, which the host computes for the device */
    int n_levels;         /* of deepstack in given rows */
    unsigned heads;       /* what attention_case adds to plain heads: HEADS_ */
    struct bounds b;
};

enum {
    HEADS_SINKS = 1 << 0,
    HEADS_SOFTCAP = 1 << 1,
    HEADS_GATE = 1 << 2,
    HEADS_WHOLE = 1 << 3,  /* QK-norm over the projection */
    HEADS_V_NORM = 1 << 4, /* without a gain */
    HEADS_K_IS_V = 1 << 5,
    HEADS_TEMP = 1 << 6,   /* attention temperature */
    HEADS_PLANES = 1 << 7, /* M-RoPE, with three positions a row */
};

enum { MAX_LAYERS = 4 };

/* A network of n_layers layers of attention without weights, until a test gives them some. */
struct duo {
    struct backend *be[SIDES];
    struct dims s;
    int rows; /* of its steps, about: what it pays to prepare for */
    struct network net[SIDES];
    struct layer layers[SIDES][MAX_LAYERS];
    struct kv_layer kv[SIDES][MAX_LAYERS];
    struct rope ropes[2]; /* of n_rot, and of half of it with another scale */
    float freq[256];
    uint8_t plane[256];    /* of the first, where HEADS_PLANES */
    struct weight no_head; /* sizes only */
};

/* The same array in both memories. */
struct array {
    float *on[SIDES];
    size_t n;
};

struct duo_weight {
    struct weight on[SIDES];
};

/* A batch over sequences of given (already cached, new) lengths, decodes first. */
struct plan {
    struct batch b;
    int32_t tokens[512], pos[512], slot[512], q_start[130], kv_len[130], out_rows[512];
    int32_t *pages;
    int32_t rope_pos[3 * 512];
    const float *embeds[512];
    float *embed_rows; /* what plan_embeds points to; mem_free */
};

void fail_if(bool bad, const char *what);
struct dims base_dims(void);
void duo_open(struct duo *d, const struct dims *s, int n_layers);
/* Whether the backend under test runs the network; says so if not. */
bool duo_runs(struct duo *d, const char *group);
/* Whether the backend can leave experts to the host (options.h); says so if not. */
bool has_host_experts(const char *group);
void duo_prepare(struct duo *d); /* once the weights are there */
void duo_close(struct duo *d);
struct array array_random(struct duo *d, size_t n, float scale);
void array_free(struct duo *d, struct array *a);
double distance(const float *got, const float *want, size_t n);
void check_close(const char *what, const float *got, const float *want, size_t n, double tol);
void weight_new(struct duo *d, struct duo_weight *w, enum weight_role role,
                const struct random_spec *spec);
void weight_free(struct duo *d, struct duo_weight *w);
float *random_floats(size_t n, float scale); /* host; mem_free */

/* Gate, up and down of a dense mlp (n_expert 1), or of experts with their router, as layer's mlp. */
struct duo_mlp {
    struct duo_weight router, gate_up, down;
    struct duo_weight shared_up, shared_down, gate; /* where dims.other, beside experts */
    struct array choice, scale;                     /* (n_expert) where dims.other */
    bool experts, other;
};
void mlp_new(struct duo *d, int layer, struct duo_mlp *m, int n_expert, int n_ff,
             enum dtype up_type, enum dtype down_type, enum dtype router_type);
void mlp_free(struct duo *d, struct duo_mlp *m);

/* Caches of random contents, the same in both memories, for layer. */
void kv_new(struct duo *d, int layer);
void kv_free(struct duo *d, int layer);
/* Whether quantised rows of latents lie in tiles, too, as heads do; and such rows (n_pages, page_len, width). */
bool tiled_rows(const struct duo *d);
void tiled_rows_put(const struct duo *d, const float *values, int width, uint8_t *plane);
void kv_check(struct duo *d, int layer, const char *what);
void kv_copy_back(struct duo *d, int layer); /* the reference's becomes the other's */

void plan_make(struct plan *p, const struct dims *s, const int (*seqs)[2], int n, bool pad);
void plan_rows(struct plan *p, const struct dims *s, int rows); /* rows of a prompt, all out rows */
/* Random positions of three planes; rows of random embeddings in place of every `every`-th token. */
void plan_planes(struct plan *p);
void plan_embeds(struct plan *p, const struct dims *s, int every);
void begin(struct duo *d, struct plan *p);
void end(struct duo *d, int32_t *ref_tokens, int32_t *dev_tokens);
void stream_put(struct duo *d, const float *x, int rows);
/* What the ops since stream_put added to x (rows, n_embd); x NULL: the stream itself. A row to which the
 * reference adds nothing must get nothing; n_untouched counts these. */
extern int n_untouched;
void stream_check(struct duo *d, const char *what, const float *x, int rows, double tol);
void logits_poison(struct duo *d, int rows);
void logits_check(struct duo *d, const char *what, int rows, double tol);
void logits_get(struct duo *d, int side, int rows, float *out); /* (rows, n_vocab) */

bool wanted(const char *group);
extern int64_t report_from; /* when the group began: clock_ns */
void report(const char *group, int before);

/* Rows of the pick tables that every backend opened from now on is to use (NULL: none), and how often
 * row i of the table has been picked by those closed so far. */
extern const char *forced;
extern uint64_t picked[128];

/* Cases that several groups are made of. test_ops.c: a network of a head alone, of n_in columns and
 * n_out rows, for up to 400 rows; a product of random rows, named `what` and its sizes; attention
 * over sequences of given lengths; one mlp over `rows` rows. */
void head_open(struct duo *d, int n_in, int n_out);
void check_linear(struct duo *d, const struct random_spec *spec, int rows, const char *what);
void attention_case(const struct dims *s, bool norms, int window, const int (*seqs)[2], int n_seqs,
                    bool pad, const char *what);
struct mlp_net {
    struct duo d;
    struct dims s;
    struct duo_mlp m;
    struct duo_weight head;
    struct array gain;
    int n_expert;
    char what[90];
};
void mlp_open(struct mlp_net *n, const struct dims *s, int n_expert, int n_ff, enum dtype up,
              enum dtype down, enum dtype router, int rows);
void mlp_check(struct mlp_net *n, int rows, float scale);
void mlp_close(struct mlp_net *n);
void mlp_case(const struct dims *s, int n_expert, int n_ff, enum dtype up, enum dtype down,
              enum dtype router, int rows, float scale);

/* invariant.c. bytes_only: set while the cases of other groups, once their network is prepared, call invariant_cuts
 * in place of comparing with the reference. It runs the network's layers over sequences that are cut and mixed in
 * several ways, and compares bytes. tokens: from tokens to logits, else from rows of the stream to rows. */
extern bool bytes_only;
void invariant_cuts(struct duo *d, const char *what, bool tokens);
void test_invariant(int part, int parts);
void cut_delta(void); /* mixers.c */
void cut_mixers(void);
void cut_latent(void);
void cut_parts(void);    /* parts.c */
void cut_model(void);    /* steps.c */
void cut_encoders(void); /* encoders.c */

void test_heads(void);
void test_cache_types(int part, int parts); /* heads.c; cases part, part + parts and so on */
void test_delta_net(void);                  /* mixers.c */
void test_ssm(void);
void test_short_conv(void);
void test_row_conv(void);
void test_latent(void);
void test_sparse(void);
void test_scan(void);
void test_compressed(void);
void force_compressed(void); /* for rows of the kernel tables */
void force_delta_net(void);
void force_latent(bool (*takes)(const char *formats, enum dtype t), const char *formats);
void test_encoders(void); /* encoders.c */
void force_encoders(bool (*takes)(const char *formats, enum dtype t), const char *formats);
void force_towers(void); /* heads that encoders do not have */
void test_towers(void);  /* towers.c */
void test_forward(void); /* steps.c */
void test_drafts(void);
void test_routed(void);
void routed_case(const struct dims *s, const enum dtype *types, float size, int layers, bool look);
void test_lora(int part, int parts); /* lora.c */
void test_parts(void);               /* parts.c */
void test_ties(void);                /* picks.c */
void test_spread(void);
void test_given_experts(void);
void test_host_experts(void);
void test_host_forward(void);
void test_picks(int part, int parts);

#endif
