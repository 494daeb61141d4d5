/*
 * The mixers' rows of the kernel table (pick.cu): attention with its projections, delta nets,
 * latent attention and its per-head matrices. As there, every threshold is in `pays` or in a row's
 * range, and what a kernel can do at all is in `fits`.
 */
#include "backend/cuda/attn/attn.cuh"
#include "backend/cuda/mixers/delta_net.cuh"
#include "backend/cuda/heads/encoder.h"
#include "backend/cuda/mixers/compressed.cuh"
#include "backend/cuda/mixers/latent.cuh"
#include "backend/cuda/core/pick.cuh"
#include "backend/cuda/core/rows.cuh"
#include "backend/cuda/core/host.h"

/*
 * qkv: the projection to q, k, v; q is kept, k and v are written to the cache
 */
static bool qkv_heads_fit(const struct cuda_backend *cu, const struct pick_case *c)
{
    /* A block of gemm_wgmma.cu computes whole heads of one kind: see struct gemm_heads. */
    const struct matrix *w = c->w;
    const struct attn_layer *l = c->attn.layer;
    bool fits = gemm_wgmma_suits(cu, w, false) && l->k_dim == 128 && l->v_dim == 128 &&
                l->n_rot == 128 && attn_heads_plain(l) &&
                (cu->shape.kv_type == DT_F16 || cu->shape.kv_type == DT_BF16);
    for (int i = 0; i < w->n_seg; i++)
        fits = fits && w->seg[i].tile0 % 8 == 0 && w->seg[i].rows % 128 == 0;
    return fits;
}
static bool qkv_heads_pay(const struct cuda_backend *cu, const struct pick_case *c)
{
    (void)cu;
    return !c->attn.raw; /* attention rotates decodes itself */
}
static void qkv_heads(struct cuda_backend *cu, const struct pick_case *c)
{
    const struct model_shape *s = &cu->shape;
    const struct attn_layer *l = c->attn.layer;
    rows_to_fp16(cu, c->x);
    struct gemm_args p = pick_args(cu, c->w, c->rows);
    p.ldy = c->w->n_out;
    p.heads.set = true;
    p.heads.bf16 = s->kv_type == DT_BF16;
    p.heads.q = c->y;
    p.heads.k = (uint16_t *)l->k;
    p.heads.v = (uint16_t *)l->v;
    p.heads.q_norm = l->norm[ATTN_Q].gain;
    p.heads.k_norm = l->norm[ATTN_K].gain;
    p.heads.rope = l->rope;
    p.heads.slot = c->step->slot;
    p.heads.n_heads = l->n_heads;
    p.heads.n_kv = l->n_kv;
    p.heads.page_len = s->page_len;
    p.heads.eps = l->norm[l->norm[ATTN_Q].on ? ATTN_Q : ATTN_K].eps;
    gemm_wgmma(cu, p, false, ceil_div(c->rows, WGMMA_ROWS));
}

/*
 * output: x += a Wo^T. A single row before experts is left to their kernel, which accumulates the
 * router's logits on the way.
 */
static bool output_experts_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    const struct experts *e = c->moe.experts;
    return e && c->rows == 1 && c->w->n_in % 8 == 0 && e->down->n_in % 8 == 0 &&
           moe_gemv_routed_fits(cu, c->w, e);
}
static bool output_experts_pays(const struct cuda_backend *cu, const struct pick_case *c)
{
    (void)c;
    /* attn_decode_split.cu lets the next kernel start late; after it a separate router was faster.
     * A profile also separates the two. */
    return !cu->step.layout.deep && !cu->be->profile;
}
static void output_experts(struct cuda_backend *cu, const struct pick_case *c)
{
    (void)cu;
    c->stream->add = ADD_PRODUCT;
    c->stream->w = c->w;
    c->stream->a = *c->x;
}

/*
 * decode, prompt: attention of sequences of one row; of longer ones
 */
static bool tensor_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return attn_mma_suits(cu, c->attn.layer) && (!c->attn.raw || attn_heads_plain(c->attn.layer));
}
static bool decode_batch_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return c->attn.raw && tensor_fits(cu, c) && attn_decode_batch_fits(cu);
}
static int decode_units(const struct pick_case *c)
{
    const struct attn_layer *l = c->attn.layer;
    return c->rows * l->n_kv * ceil_div(l->n_heads / l->n_kv, 8);
}
/* A decode has many keys. */
static bool decode_deep(const struct cuda_backend *cu, const struct pick_case *c)
{
    return cu->step.layout.deep && (!c->attn.layer->window || pick_deep(c->attn.layer->window));
}
static bool decode_batch_pays(const struct cuda_backend *cu, const struct pick_case *c)
{
    /* For short contexts one block reads a context faster than several can combine. */
    return decode_units(c) >= (decode_deep(cu, c) ? cu->n_sm * 3 / 4 : cu->n_sm / 5);
}
/* Warps of a block: eight with one block per SM. With more blocks, three share an SM, or five if
 * three would need a second round. */
static int decode_batch_warps(const struct cuda_backend *cu, const struct pick_case *c)
{
    int units = decode_units(c);
    return units <= cu->n_sm ? 8 : units <= 3 * cu->n_sm ? 4 : 2;
}
/* Arguments that also leave the results as panels where the output projection reads them
 * (gemm_cluster). */
static struct attn_args decode_args(struct cuda_backend *cu, const struct pick_case *c)
{
    struct attn_args p = *c->attn.args;
    if (c->attn.raw && !c->attn.layer->floats && c->rows >= 9 && !pick_fp16_only(cu, c->rows) &&
        attn_decode_batch_panels_fit(cu, c->attn.layer, c->rows)) {
        p.panels = cu->forms.panels;
        p.panel_rows = gemm_cluster_width(c->rows);
        p.scale_of = cu->forms.scale;
        c->attn.out->panels = true;
    }
    return p;
}
static void decode_batch(struct cuda_backend *cu, const struct pick_case *c)
{
    attn_decode_batch(cu, decode_args(cu, c), decode_batch_warps(cu, c));
}
static bool decode_split_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return c->attn.raw && tensor_fits(cu, c) && decode_units(c) <= cu->n_sm &&
           attn_decode_split_fits(cu, c->attn.layer);
}
static bool decode_split_pays(const struct cuda_backend *cu, const struct pick_case *c)
{
    return decode_deep(cu, c);
}
static void decode_split(struct cuda_backend *cu, const struct pick_case *c)
{
    attn_decode_split(cu, *c->attn.args);
}
static void decode_plain(struct cuda_backend *cu, const struct pick_case *c)
{
    attn_decode(cu, *c->attn.args, c->attn.raw);
}
static bool decode_wide_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return attn_decode_wide_fits(cu, c->attn.layer) && !(c->attn.raw && c->attn.layer->norm_whole);
}
static void decode_wide(struct cuda_backend *cu, const struct pick_case *c)
{
    attn_decode_wide(cu, *c->attn.args);
}
static bool decode_split_quant_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return c->attn.raw && decode_units(c) <= cu->n_sm &&
           attn_decode_split_quant_fits(cu, c->attn.layer);
}
static void decode_split_quant(struct cuda_backend *cu, const struct pick_case *c)
{
    attn_decode_split_quant(cu, *c->attn.args);
}
static bool decode_batch_quant_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return c->attn.raw && attn_decode_batch_quant_fits(cu, c->attn.layer);
}
static void decode_batch_quant(struct cuda_backend *cu, const struct pick_case *c)
{
    attn_decode_batch_quant(cu, decode_args(cu, c));
}
static bool decode_quant_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return attn_decode_quant_fits(cu, c->attn.layer) && !(c->attn.raw && c->attn.layer->norm_whole);
}
static void decode_quant(struct cuda_backend *cu, const struct pick_case *c)
{
    attn_decode_quant(cu, decode_args(cu, c));
}
static bool decode_any_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    (void)cu;
    return !c->attn.raw; /* such cases are taken by the rows above */
}
static void decode_any(struct cuda_backend *cu, const struct pick_case *c)
{
    attn_any(cu, *c->attn.args, 0, c->rows);
}
static bool prompt_mma_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return attn_mma_suits(cu, c->attn.layer) && !c->attn.layer->sinks;
}
static bool prompt_wgmma_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return prompt_mma_fits(cu, c) && attn_prefill_suits(cu, c->attn.layer);
}
/* Rows of prompts are left in fp16 alone where the output projection reads nothing else. */
static bool prompt_leaves_fp16(const struct cuda_backend *cu, const struct pick_case *c)
{
    bool fp16 = pick_fp16_only(cu, c->step->n_tokens) && !c->attn.layer->floats;
    if (fp16) {
        c->attn.out->fp16 = true;
        c->attn.out->n_floats = c->step->n_decode;
    }
    return fp16;
}
static void prompt_wgmma(struct cuda_backend *cu, const struct pick_case *c)
{
    attn_prefill(cu, *c->attn.args, cu->shape.kv_type == DT_F16 && prompt_leaves_fp16(cu, c));
}
static void prompt_mma(struct cuda_backend *cu, const struct pick_case *c)
{
    attn_prefill_mma(cu, *c->attn.args, (const int2 *)(cu->step.dev + cu->step.layout.q_tiles),
                     cu->step.layout.n_q_tiles);
}
static bool prompt_quant_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return attn_prefill_quant_suits(cu, c->attn.layer);
}
static void prompt_quant(struct cuda_backend *cu, const struct pick_case *c)
{
    /* Values outside fp16's range are lost, as in an fp16 cache. */
    attn_prefill_quant(cu, *c->attn.args, prompt_leaves_fp16(cu, c));
}
static bool prompt_wide_quant_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return attn_prefill_wide_quant_fits(cu, c->attn.layer);
}
static bool prompt_wide_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return attn_prefill_wide_fits(cu, c->attn.layer);
}
static void prompt_wide(struct cuda_backend *cu, const struct pick_case *c)
{
    attn_prefill_wide(cu, *c->attn.args);
}
static void prompt_any(struct cuda_backend *cu, const struct pick_case *c)
{
    attn_any(cu, *c->attn.args, c->step->n_decode, c->rows);
}

/*
 * delta: the recurrence of a gated delta net
 */
static bool delta_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    (void)cu;
    return delta_step_fits(*c->delta);
}
/* delta_step computes beta itself, without a scale. */
static bool delta_step_suits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return delta_fits(cu, c) && c->delta->beta_scale == 0;
}
static void delta_decode(struct cuda_backend *cu, const struct pick_case *c)
{
    delta_step(cu, *c->delta, c->rows);
}
/* For decodes it would cost more in launches than it gains, and products of many rows are limited
 * by arithmetic. */
bool pick_delta_split(int rows, int decodes)
{
    return decodes < rows && rows > 4 && rows <= DELTA_SPLIT_ROWS;
}
static int delta_prompts(const struct pick_case *c)
{
    return c->step->n_seqs - c->step->n_decode;
}
static bool delta_step_rows_pays(const struct cuda_backend *cu, const struct pick_case *c)
{
    (void)cu; /* steps with draft tokens: replaces three kernels */
    return c->rows <= 4 * delta_prompts(c);
}
static void delta_prompt_step(struct cuda_backend *cu, const struct pick_case *c)
{
    delta_step_rows(cu, *c->delta, delta_prompts(c));
}
static bool delta_chunked_pays(const struct cuda_backend *cu, const struct pick_case *c)
{
    (void)cu;
    return c->rows >= 24 * delta_prompts(c);
}
static bool delta_chunked_suits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return delta_chunked_fits(cu, *c->delta, c->rows, delta_prompts(c));
}
static void delta_prompt_chunked(struct cuda_backend *cu, const struct pick_case *c)
{
    delta_chunked(cu, *c->delta, c->rows, delta_prompts(c));
}
static void delta_prompt(struct cuda_backend *cu, const struct pick_case *c)
{
    delta_scan(cu, *c->delta, c->rows, delta_prompts(c));
}
static void delta_decode_any(struct cuda_backend *cu, const struct pick_case *c)
{
    delta_any(cu, *c->delta, c->rows, c->rows);
}
static void delta_prompt_any(struct cuda_backend *cu, const struct pick_case *c)
{
    delta_any(cu, *c->delta, c->rows, delta_prompts(c));
}

/*
 * listed: attention over a window and the entries of a compressor, or over latents that an indexer chose
 */
static bool list_mma_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return c->compressed ? compressed_attn_fits(cu, *c->compressed)
                         : latent_list_fits(cu, *c->latent);
}
static void list_mma(struct cuda_backend *cu, const struct pick_case *c)
{
    if (c->compressed)
        compressed_attn(cu, *c->compressed);
    else
        latent_list_attn(cu, *c->latent);
}
static void list_any(struct cuda_backend *cu, const struct pick_case *c)
{
    if (c->compressed)
        compressed_attn_any(cu, *c->compressed);
    else
        index_attend_latent(cu, *c->latent, *c->latent->choice);
}

/*
 * heads: y (rows, H, n_out) = x_h W_h^T, one matrix per head. The kernels treat a head as an
 * expert.
 */
static struct gemm_args heads_args(struct cuda_backend *cu, const struct pick_case *c, int width)
{
    struct gemm_args p = pick_args(cu, c->w, c->rows);
    struct latent_heads *h = c->heads;
    latent_heads_list(cu, h, c->rows, width);
    p.x = h->x;
    p.x_scale = NULL;
    p.y = c->y;
    p.ldy = c->w->n_out;
    p.moe = p.sorted_in = true;
    p.used = h->n_heads;
    p.route = h->list;
    return p;
}
static int heads_tiles(const struct pick_case *c, int width)
{
    return c->heads->n_heads * ceil_div(c->rows, width);
}
static bool heads_wgmma_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return gemm_wgmma_suits(cu, c->w, false);
}
static void heads_wgmma(struct cuda_backend *cu, const struct pick_case *c)
{
    gemm_wgmma(cu, heads_args(cu, c, WGMMA_ROWS), false, heads_tiles(c, WGMMA_ROWS));
}
static bool heads_mma_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return gemm_mma_fits(cu, c->w);
}
static void heads_mma(struct cuda_backend *cu, const struct pick_case *c)
{
    gemm_mma(cu, heads_args(cu, c, 64), false, 64, heads_tiles(c, 64));
}
/* Or splitk: few rows, or formats that stream does not read. */
static void heads_stream(struct cuda_backend *cu, const struct pick_case *c)
{
    struct gemm_args p = pick_args(cu, c->w, c->rows);
    p.moe = true;
    bool stream = (c->forced || cu->exact || c->rows > 8) && gemm_stream_fits(cu, p, false, 16);
    p = heads_args(cu, c, 16);
    if (stream)
        gemm_stream(cu, p, false, 16, heads_tiles(c, 16));
    else
        gemm_splitk(cu, p, false, 16, heads_tiles(c, 16));
}
static bool heads_gemv_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return latent_heads_gemv_fits(cu, c->w, c->heads, c->step);
}
static void heads_gemv(struct cuda_backend *cu, const struct pick_case *c)
{
    latent_heads_gemv(cu, c->w, c->heads, c->y, c->rows);
}
/*
 * latent: attention over latents
 */
static bool latent_mma_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return latent_attn_fits(cu, *c->latent);
}
static void latent_decode(struct cuda_backend *cu, const struct pick_case *c)
{
    latent_attn_decode(cu, *c->latent, c->rows);
}
static void latent_prompt(struct cuda_backend *cu, const struct pick_case *c)
{
    latent_attn_prompt(cu, *c->latent, (const int2 *)(cu->step.dev + cu->step.layout.q_tiles),
                       cu->step.layout.n_q_tiles);
}
static bool latent_expanded_suits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return latent_expanded_fits(cu, *c->latent);
}
/* Keys and values of the whole context are computed for the rows that read them. */
static bool latent_expanded_pays(const struct cuda_backend *cu, const struct pick_case *c)
{
    return c->rows >= 128 * (cu->step.layout.n_seqs - cu->step.layout.n_decode);
}
static void latent_prompt_expanded(struct cuda_backend *cu, const struct pick_case *c)
{
    latent_expanded(cu, *c->latent, (const int2 *)(cu->step.dev + cu->step.layout.q_tiles),
                    cu->step.layout.n_q_tiles);
}
static void latent_decode_any(struct cuda_backend *cu, const struct pick_case *c)
{
    latent_attn_any(cu, *c->latent, 0, c->rows);
}
static void latent_prompt_any(struct cuda_backend *cu, const struct pick_case *c)
{
    latent_attn_any(cu, *c->latent, c->step->n_decode, c->rows);
}

/*
 * encode: q, k and v, and bidirectional attention
 */
static bool encode_mma_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    (void)cu;
    return attn_encode_fits(c->attn.layer);
}
static bool encode_wgmma_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    const struct attn_layer *l = c->attn.layer;
    bool norms = l->norm[ATTN_Q].on || l->norm[ATTN_K].on || l->norm[ATTN_V].on; /* of floats */
    bool fits = encode_mma_fits(cu, c) && !norms && gemm_wgmma_suits(cu, c->w, false) &&
                !lora_changes(cu, c->w);  /* adapters add to floats */
    for (int i = 0; i < c->w->n_seg; i++) /* results are laid out as without tiles */
        fits = fits && c->w->seg[i].rows % TILE_ROWS == 0;
    return fits;
}
static void encode_linear(struct cuda_backend *cu, const struct pick_case *c)
{
    struct pick_case qkv = {};
    qkv.rows = c->rows;
    qkv.w = c->w;
    qkv.x = c->x;
    qkv.y = cu->act.qkv;
    pick_run(cu, PICK_LINEAR, &qkv, STAGE_QKV);
}
typedef void encode_kernel(struct cuda_backend *cu, const struct attn_layer *l,
                           const struct step *s, struct rows *a);
static void encode_attend(struct cuda_backend *cu, const struct pick_case *c, const float *qkv,
                          encode_kernel *kernel)
{
    step_mark(cu);
    encoder_heads(cu, c->attn.layer, c->step, qkv);
    kernel(cu, c->attn.layer, c->step, c->attn.out);
    step_mark_end(cu, STAGE_ATTENTION);
}
/* Arguments of the projection to fp16. */
static struct gemm_args encode_args(struct cuda_backend *cu, const struct pick_case *c)
{
    rows_to_fp16(cu, c->x);
    struct gemm_args p = pick_args(cu, c->w, c->rows);
    p.y = (float *)cu->encoder->qkv;
    p.ldy = c->w->n_out;
    p.narrow = true;
    return p;
}
static void encode_wgmma_with(struct cuda_backend *cu, const struct pick_case *c,
                              encode_kernel *kernel)
{
    step_mark(cu);
    pick_wgmma(cu, encode_args(cu, c));
    step_mark_end(cu, STAGE_QKV);
    encode_attend(cu, c, NULL, kernel);
}
static void encode_wgmma(struct cuda_backend *cu, const struct pick_case *c)
{
    encode_wgmma_with(cu, c, attn_encode);
}
static void encode_mma(struct cuda_backend *cu, const struct pick_case *c)
{
    encode_linear(cu, c);
    encode_attend(cu, c, cu->act.qkv, attn_encode);
}
static bool encode_long_fits(const struct cuda_backend *cu, const struct pick_case *c)
{
    return attn_encode_long_fits(cu, c->attn.layer);
}
/* Sequences whose keys are several tiles. */
static bool encode_long_pays(const struct cuda_backend *cu, const struct pick_case *c)
{
    (void)cu;
    return c->step->n_tokens >= 512 * c->step->n_seqs;
}
static void encode_long(struct cuda_backend *cu, const struct pick_case *c)
{
    if (encode_wgmma_fits(cu, c)) {
        encode_wgmma_with(cu, c, attn_encode_long);
    } else {
        encode_linear(cu, c);
        encode_attend(cu, c, cu->act.qkv, attn_encode_long);
    }
}
static void encode_any(struct cuda_backend *cu, const struct pick_case *c)
{
    encode_linear(cu, c);
    step_mark(cu);
    *c->attn.out = attn_bidirectional(cu, c->attn.layer, c->step);
    step_mark_end(cu, STAGE_ATTENTION);
}

/* name, op, formats, rows from, to (0: no end), needs, takes, pays, fits, run */
static const struct cuda_pick rows[] = {
    {"qkv_wgmma", PICK_QKV, FAST, 257, 0, NEEDS_WGMMA, TAKES_ROWS, qkv_heads_pay, qkv_heads_fit,
     qkv_heads},
    {"qkv_linear",
     PICK_QKV,
     ANY,
     1,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     NULL,
     NULL,
     NULL,
     {CLASS_OWN, 1, 0}}, /* linear, then attn_heads */

    {"output_experts", PICK_OUTPUT, ANY, 1, 1, NEEDS_NOTHING, TAKES_ROWS, output_experts_pays,
     output_experts_fits, output_experts},
    {"output_linear",
     PICK_OUTPUT,
     ANY,
     1,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     NULL,
     NULL,
     NULL,
     {CLASS_OWN, 1, 0}}, /* linear */

    {"attn_decode_batch", PICK_DECODE, 0, 1, 0, NEEDS_NOTHING, TAKES_ROWS, decode_batch_pays,
     decode_batch_fits, decode_batch},
    {"attn_decode_split", PICK_DECODE, 0, 1, 0, NEEDS_GRID_BARRIER, TAKES_ROWS, decode_split_pays,
     decode_split_fits, decode_split},
    {"attn_decode", PICK_DECODE, 0, 1, 0, NEEDS_NOTHING, TAKES_ROWS, NULL, tensor_fits,
     decode_plain},
    {"attn_decode_wide", PICK_DECODE, 0, 1, 0, NEEDS_NOTHING, TAKES_ROWS, NULL, decode_wide_fits,
     decode_wide},
    {"attn_decode_batch_quant", PICK_DECODE, 0, 1, 0, NEEDS_NOTHING, TAKES_ROWS, decode_batch_pays,
     decode_batch_quant_fits, decode_batch_quant},
    {"attn_decode_split_quant", PICK_DECODE, 0, 1, 0, NEEDS_GRID_BARRIER, TAKES_ROWS, NULL,
     decode_split_quant_fits, decode_split_quant},
    {"attn_decode_quant", PICK_DECODE, 0, 1, 0, NEEDS_NOTHING, TAKES_ROWS, NULL, decode_quant_fits,
     decode_quant},
    {"attn_any", PICK_DECODE, 0, 1, 0, NEEDS_NOTHING, TAKES_ROWS, NULL, decode_any_fits,
     decode_any},

    {"attn_prefill",
     PICK_PROMPT,
     0,
     1,
     0,
     NEEDS_WGMMA,
     TAKES_ROWS,
     NULL,
     prompt_wgmma_fits,
     prompt_wgmma,
     {CLASS_OWN, 1, 0}},
    {"attn_prefill_mma",
     PICK_PROMPT,
     0,
     1,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     NULL,
     prompt_mma_fits,
     prompt_mma,
     {CLASS_OWN, 1, 0}},
    {"attn_prefill_wide",
     PICK_PROMPT,
     0,
     1,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     NULL,
     prompt_wide_fits,
     prompt_wide,
     {CLASS_OWN, 1, 0}},
    {"attn_prefill_quant", PICK_PROMPT, 0, 1, 0, NEEDS_WGMMA, TAKES_ROWS, NULL, prompt_quant_fits,
     prompt_quant},
    {"attn_prefill_wide_quant",
     PICK_PROMPT,
     0,
     1,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     NULL,
     prompt_wide_quant_fits,
     prompt_wide,
     {CLASS_OWN, 1, 0}},
    {"attn_any",
     PICK_PROMPT,
     0,
     1,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     NULL,
     NULL,
     prompt_any,
     {CLASS_OWN, 1, 0}},

    {"delta_step", PICK_DELTA_DECODE, 0, 1, 0, NEEDS_NOTHING, TAKES_ROWS, NULL, delta_step_suits,
     delta_decode},
    {"delta_any", PICK_DELTA_DECODE, 0, 1, 0, NEEDS_NOTHING, TAKES_ROWS, NULL, NULL,
     delta_decode_any},
    {"delta_step_rows",
     PICK_DELTA_PROMPT,
     0,
     1,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     delta_step_rows_pays,
     delta_step_suits,
     delta_prompt_step,
     {CLASS_OWN, 1, 0}},
    {"delta_chunked", PICK_DELTA_PROMPT, 0, 1, 0, NEEDS_NOTHING, TAKES_ROWS, delta_chunked_pays,
     delta_chunked_suits, delta_prompt_chunked},
    {"delta_scan", PICK_DELTA_PROMPT, 0, 1, 0, NEEDS_NOTHING, TAKES_ROWS, NULL, delta_fits,
     delta_prompt},
    {"delta_any",
     PICK_DELTA_PROMPT,
     0,
     1,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     NULL,
     NULL,
     delta_prompt_any,
     {CLASS_OWN, 1, 0}},

    {"heads_gemv", PICK_HEADS, ANY, 1, 8, NEEDS_NOTHING, TAKES_NORM, NULL, heads_gemv_fits,
     heads_gemv}, /* also the ops around the product: latent_heads.cu */
    {"heads_wgmma",
     PICK_HEADS,
     FAST,
     65,
     0,
     NEEDS_WGMMA,
     TAKES_ROWS,
     NULL,
     heads_wgmma_fits,
     heads_wgmma,
     {CLASS_WGMMA, 1, 0}},
    {"heads_mma",
     PICK_HEADS,
     ANY,
     65,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     NULL,
     heads_mma_fits,
     heads_mma,
     {CLASS_CHUNKS, 1, 0}},
    {"heads_stream",
     PICK_HEADS,
     ANY,
     1,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     NULL,
     NULL,
     heads_stream,
     {CLASS_SPLITK, 1, 0}},

    {"latent_decode", PICK_LATENT_DECODE, 0, 1, 0, NEEDS_NOTHING, TAKES_ROWS, NULL, latent_mma_fits,
     latent_decode},
    {"latent_any", PICK_LATENT_DECODE, 0, 1, 0, NEEDS_NOTHING, TAKES_ROWS, NULL, NULL,
     latent_decode_any},
    {"latent_expanded", PICK_LATENT_PROMPT, 0, 1, 0, NEEDS_WGMMA, TAKES_NORM, latent_expanded_pays,
     latent_expanded_suits, latent_prompt_expanded}, /* also the ops around it */
    {"latent_prefill",
     PICK_LATENT_PROMPT,
     0,
     1,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     NULL,
     latent_mma_fits,
     latent_prompt,
     {CLASS_OWN, 1, 0}},
    {"latent_any",
     PICK_LATENT_PROMPT,
     0,
     1,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     NULL,
     NULL,
     latent_prompt_any,
     {CLASS_OWN, 1, 0}},

    {"list_mma",
     PICK_COMPRESSED,
     0,
     1,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     NULL,
     list_mma_fits,
     list_mma,
     {CLASS_OWN, 1, 0}},
    {"list_any",
     PICK_COMPRESSED,
     0,
     1,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     NULL,
     NULL,
     list_any,
     {CLASS_OWN, 1, 0}},

    {"encode_long", PICK_ENCODE, ANY, 512, 0, NEEDS_WGMMA, TAKES_ROWS, encode_long_pays,
     encode_long_fits, encode_long},
    {"encode_wgmma", PICK_ENCODE, FAST, 33, 0, NEEDS_WGMMA, TAKES_ROWS, NULL, encode_wgmma_fits,
     encode_wgmma},
    {"encode_mma",
     PICK_ENCODE,
     ANY,
     1,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     NULL,
     encode_mma_fits,
     encode_mma,
     {CLASS_OWN, 1, 0}},
    {"encode_any",
     PICK_ENCODE,
     ANY,
     1,
     0,
     NEEDS_NOTHING,
     TAKES_ROWS,
     NULL,
     NULL,
     encode_any,
     {CLASS_OWN, 1, 0}},
};

const struct pick_table pick_mixers = {rows, (int)(sizeof rows / sizeof *rows)};
