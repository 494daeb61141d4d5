/*
 * Arguments of the kernels: push constants, the same text for C and GLSL. Addresses are of device memory, 0 = none.
 * Members of 8 bytes come first, so that both languages lay a struct out alike. At most 128 bytes, which every device
 * has.
 */
#ifdef GL_core_profile
#define ADDRESS uint64_t
#else
#include <stdint.h>
typedef uint32_t uint;
#define ADDRESS uint64_t
#endif

/* Weight formats, and types of the KV cache. */
#define FORMAT_F32     0
#define FORMAT_F16     1
#define FORMAT_BF16    2
#define FORMAT_Q4_0    3
#define FORMAT_Q4_1    4
#define FORMAT_Q5_0    5
#define FORMAT_Q5_1    6
#define FORMAT_Q8_0    7
#define FORMAT_Q2_K    8
#define FORMAT_Q3_K    9
#define FORMAT_Q4_K    10
#define FORMAT_Q5_K    11
#define FORMAT_Q6_K    12
#define FORMAT_IQ4_NL  13
#define FORMAT_IQ4_XS  14
#define FORMAT_MXFP4   15
#define FORMAT_IQ3_S   16
#define FORMAT_IQ1_S   17
#define FORMAT_IQ1_M   18
#define FORMAT_IQ2_XXS 19
#define FORMAT_IQ2_XS  20
#define FORMAT_IQ2_S   21
#define FORMAT_IQ3_XXS 22
#define FORMAT_TQ1_0   23
#define FORMAT_TQ2_0   24
#define FORMAT_NVFP4   25
#define FORMAT_Q1_0    26
#define FORMAT_Q2_0    27
#define FORMAT_F8_E4M3 28
#define FORMAT_GPTQ4   29
#define FORMAT_NF4     30
#define FORMAT_FP4     31
#define N_FORMATS      32

/* Words of the step block: where its arrays begin, in words, and the step's sizes. */
#define STEP_TOKENS       0
#define STEP_POS          1
#define STEP_SLOT         2
#define STEP_SEQ          3 /* the sequence of each row */
#define STEP_KV_LEN       4
#define STEP_PAGES        5
#define STEP_OUT_ROWS     6
#define STEP_ROPE_POS     7
#define STEP_SPANS        8
#define STEP_TYPES        9
#define STEP_PAGE_STRIDE  10 /* words between the page tables of two sequences */
#define STEP_HAS_ROPE_POS 11
#define STEP_HAS_SPANS    12
#define STEP_ROWS         15 /* rows of the step */
#define STEP_Q_START      16
#define STEP_STATE_IN     17
#define STEP_STATE_OUT    18
#define STEP_SAVE_ROWS    19
#define STEP_SAVE_STATE   20
#define STEP_FROM         21 /* of a step of the MTP block: kept rows */
#define STEP_LORAS        22 /* adapters of the rows (lora.c) */
#define STEP_OUT_LORAS    23 /* of the output rows */
#define STEP_WORDS        24

/* Kinds of norms: enum norm_kind. */
#define KIND_NONE   0
#define KIND_RMS    1
#define KIND_LAYER  2
#define KIND_AFFINE 3

/* y[r][first + o] = x[r / x_div] . w[o] + bias. With `chosen` row r uses expert chosen[r] - expert_first, with `cycle`
 * matrix r % cycle. Grouped kernels: `chosen` is the table of tiles. */
struct product_args {
    ADDRESS w, x, y, bias, perm, chosen, grid, scale; /* scale: of rows of fp16 */
    uint n_in, n_out, row_words, tail, rows, ldx, ldy, first;
    uint group_len, x_div, n_own, expert_first, n_all_out, cycle;
};

/* gemv_dot: as a product, of inputs as bytes (bytes.glsl). Pairs: y[r][o] = act(w[o] . x, pair[o] . x), once more as bytes;
 * first: an expert's rows in the segment. Combined: y[t] = sum over k of weights[t][k] * (x[t][k] . w of expert
 * chosen[t][k]); x_div: the experts of a token. */
struct dot_args {
    ADDRESS w, pair, x, y, bias, chosen, weights, bytes;
    uint n_in, n_out, row_words, tail, rows, ldx, ldy, first;
    uint x_div, n_own, expert_first, n_all_out, act;
    float alpha, limit, beta;
};

/* x[r] = scale * row of the table, or a given row, or zeros; add: x[r] += row `index`[r] + offset. */
struct embed_args {
    ADDRESS w, x, perm, grid, step, embeds, chosen; /* chosen: the tokens of the step before */
    uint n_in, row_words, tail, rows, ldx, group_len, index, n_table;
    int first, n_vocab, offset, add;
    float scale;
    uint embed_width;
    int pad; /* the row of tokens that the table has not, and of given rows; -1 = none */
};

/* y[r] = norm(x[r]) */
struct norm_args {
    ADDRESS x, y, gain, bias;
    uint kind, width, rows, ldx, ldy;
    float eps;
};

/* x[r] = sum(x[r] + scale * out(y[r])); n[r] = in(x[r]), if n is not 0. bytes: n once more, for integer dot products; 0 = not. */
struct add_args {
    ADDRESS x, y, out_gain, out_bias, sum_gain, sum_bias, n, in_gain, in_bias, bytes;
    uint width, rows, ldx, ldy, out_kind, sum_kind;
    float out_eps, sum_eps, scale, in_eps;
    uint in_kind, ldn;
};

/* to[row * half + i] = cos and sin of row's position times freq[i], times mscale */
struct rope_args {
    ADDRESS step, freq, plane, to;
    uint rows, half_rot;
    float mscale;
};

/* Heads of a projection: norm, RoPE, temperature, rotation for the cache; q to a buffer, k and v to the cache. */
struct heads_args {
    ADDRESS step, in_rows, to, rope, gain, bias;
    uint rows, n_heads, dim, ld_in, first, stride, ld_to, page_len;
    uint kind, half_rot, flags,
        store; /* store: FORMAT_ of the cache + 1; 0 = `to` is a buffer of floats */
    float eps, temp_beta;
    int temp_len, temp_offset;
    uint norm_dim, rope_at; /* the first values are normed, those from rope_at on rotated */
};
#define HEADS_LATE        1 /* norm after RoPE */
#define HEADS_TURN        2 /* rotated for the quantised cache */
#define HEADS_INTERLEAVED 4 /* pairs lie side by side: they move apart */

struct attn_args {
    ADDRESS step, q, k, v, a, sinks, gate, parts,
        bytes; /* parts: sums of splits; bytes: a once more, for integer dot products */
    uint n_heads, n_kv_heads, k_dim, v_dim, page_len, ldq, lda, window;
    uint flags, ld_gate, gate_stride, splits;
    float scale, softcap;
};
#define ATTN_CHUNKED       1
#define ATTN_BIDIRECTIONAL 2
#define ATTN_SPAN_ONLY     4
#define ATTN_SPAN_ALSO     8
#define ATTN_TURN          16
#define ATTN_LATENT        32 /* v is the first v_dim values of k */
#define ATTN_CHOSEN        64 /* `bytes` has the bits of the keys that rows see (index_choose.comp) */

/* a[r][i] *= sigmoid or softplus of g[r][i / each] */
struct gate_args {
    ADDRESS a, g;
    uint width, rows, lda, ldg, each, softplus;
};

/* Activations, as layer.h names them. From PLAIN_RELU2 on they have no factor u. */
#define KERNEL_ACT_SILU             0
#define KERNEL_ACT_GELU_TANH        1
#define KERNEL_ACT_GELU             2
#define KERNEL_ACT_SWIGLU_CLAMP     3
#define KERNEL_ACT_SILU_CLAMP       4
#define KERNEL_ACT_SILU_LIMIT       5
#define KERNEL_ACT_RELU2            6
#define KERNEL_ACT_PLAIN_RELU2      7
#define KERNEL_ACT_PLAIN_XIELU      8
#define KERNEL_ACT_PLAIN_GELU       9
#define KERNEL_ACT_PLAIN_GELU_TANH  10
#define KERNEL_ACT_PLAIN_QUICK_GELU 11

/* Kinds of routers: enum router_kind. */
#define ROUTE_SOFTMAX      0
#define ROUTE_SIGMOID      1
#define ROUTE_SOFTMAX_TOP  2
#define ROUTE_SPARSE_MIXER 3
#define ROUTE_SOFTPLUS     4

/* h[r][i] = act(h[r][i], h[r][width + i]) */
struct act_args {
    ADDRESS h, bytes; /* bytes: the result once more, for integer dot products */
    uint width, rows, ldh, act;
    float alpha, limit, beta;
};

/* Chooses experts of each row from its logits. by_token: (n_vocab, n_used) experts as floats, 0 = none; tokens: those chosen last.
 * narrow: the rows are the step's output rows. */
struct route_args {
    ADDRESS logits, chosen, weights, choice_bias, expert_scale, step, by_token, tokens;
    uint n_expert, rows, ld, n_used, kind, n_groups, n_groups_used, renorm;
    float scale, jitter;
    int n_vocab;
    uint narrow;
};

/* y[r] = sum_k weights[r][k] * part[r * n_used + k] over the experts of this process; those from n_real on have no weights and
 * return their input x[r]. */
struct combine_args {
    ADDRESS part, chosen, weights, y, x;
    uint width, rows, n_used, ldp, ldy, n_own, expert_first, weigh, n_real, ldx;
};

/* to[r] = from[index[r]]; index: a word of the step block, 0 = r */
struct gather_args {
    ADDRESS from, to, step;
    uint width, rows, ld_from, ld_to, index;
};

/* x[r] = scale * x[r]; softcap; gate: x[r] *= sigmoid(gate[r]); add: x[r] += y[r] */
struct scale_args {
    ADDRESS x, y, gate;
    uint width, rows, ldx, ldy;
    float scale, softcap;
};

/* x[r] += the values of a given row from `at` on (deepstack) */
struct given_args {
    ADDRESS x, step, embeds;
    uint width, rows, ldx, embed_width, at, narrow;
    int n_vocab;
};

/* The convolution of recurrent mixers, in place or to `to`. */
struct conv_args {
    ADDRESS step, u, conv, bias, state, to;
    uint ld, width, conv_len, state_len, n_seqs, ld_to, is_short;
};

struct delta_args {
    ADDRESS step, u, ba, decay, dt_bias, state, to;
    uint ld, ld_ba, ld_to, n_k_heads, n_v_heads, k_dim, v_dim, state_len, tiled;
    float beta_scale;
};

struct ssm_args {
    ADDRESS step, row, decay, dt_bias, skip, state, to;
    uint ld, ld_to, n_heads, n_groups, head_dim, state_dim, state_len;
    float dt_min, dt_max;
};

/* o = norm(o) * silu(z), or norm(o * silu(z)), in parts of a row */
struct gnorm_args {
    ADDRESS o, z, gain, bias;
    uint rows, parts, width, ldo, ldz, kind, gain_stride,
        first; /* first: the norm before the gate */
    float eps;
    uint plain_gate; /* sigmoid(z) in place of silu(z) */
};

/* The choice of keys: scores of rows from `first` on; bits of all rows, after CHOSEN_WORDS words (keys of a bit, groups, words of a
 * list). */
struct index_args {
    ADDRESS step, q, w, k, scores, bits;
    uint dim, n_heads, block, n_groups, n_chosen, page_len, ldq, ld_scores, ld_bits, first;
};
#define CHOSEN_WORDS 4

/* Streams of several parts. plane: values between two parts. */
struct streams_args {
    ADDRESS x, streams, gain, bias, router, mix, plane;
    uint width, rows, ldx, n, kind, correct;
    float eps;
};

struct level_args {
    ADDRESS x, y, sum;
    uint width, rows, ld;
};

struct top_args {
    ADDRESS g;
    uint width, rows, ld;
    float sparsity;
};

struct scan_args {
    ADDRESS step, row, low, decay, skip, state, to;
    uint ld, ld_low, ld_to, n_channels, state_dim, dt_rank, state_len;
};

/* y[r] = fp16 of x[r] / scale[r] */
struct half_args {
    ADDRESS x, y, scale;
    uint width, rows, ldx, ldy;
};

struct group_args {
    ADDRESS chosen, to;
    uint rows, n_own, expert_first, list_at, tile; /* tile: most rows of one */
};

struct spread_args {
    ADDRESS x, weights, to;
    uint width, rows, n_used, ld;
};

/* Sampling. Words of what the kernels share of a row: the best logit of each part of the row (key, token), the weight of
 * each part's candidates (two words), candidates by bucket of logits, the number of all candidates, and the list of the
 * best ones (key, token) with its length. */
#define SAMPLE_PARTS   32
#define SAMPLE_BUCKETS 1024
#define SAMPLE_LIST    1024
#define SAMPLE_BEST    0
#define SAMPLE_MASS    64
#define SAMPLE_HIST    128
#define SAMPLE_ALL     1152
#define SAMPLE_LISTED  1153
#define SAMPLE_TOKENS  1154
#define SAMPLE_ROW     3202

/* The sampler settings of a row. Fractions are in units of 2^-32. */
struct row_sampler {
    uint draws, top_k, random, top_p; /* top_k, top_p: 0 = off */
    float temp, log_floor;            /* candidates: logits from the largest + log_floor on */
    int n_top;                        /* -1 = no log-probabilities */
    uint n_edits, edits_at, masked, by_host; /* by_host: nothing is done for the row */
};

/* struct logit_edit and struct sample_probs as words: token, bias, repeat, less; logprob, n_top, (token, logprob)... */
#define EDIT_WORDS  4
#define PROBS_WORDS 42

struct sample_args {
    ADDRESS logits, samplers, edits, masks, raw, norms, state, tokens, chosen, probs;
    uint n_vocab, rows, mask_words;
};

/* Adapters: of row r / row_div of the step, use u: (adapter or -1, bits of the scale) at lists[2 * (u * list_rows + row)].
 * The table has the address of a change for each adapter and weight. A change begins with LORA_WORDS words per expert:
 * rank, parts, offset of A, then first, n, at, rank, offset of B for each part; offsets in words. */
#define LORA_WORDS 20
struct lora_args {
    ADDRESS step, table, x, y, t, chosen;
    uint lists, n_weights, weight, n_uses, rows, row_div, list_rows, n_in, n_out;
    uint ldx, ldy, ldt, x_div, n_own, expert_first;
};

/* Image towers (tower.c). */
struct patch_args {
    ADDRESS step, embeds, patches, x;
    uint rows, width, embed_width, ldp, ldx;
    int n_vocab;
};

struct clip_args {
    ADDRESS from, to;
    uint rows, width, ld_from, ld_to;
    float least, most;
};

struct join_args {
    ADDRESS x, y;
    uint rows, each, width, mean;
};
