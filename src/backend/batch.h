/* A step's input, and what bounds all steps: the data that the engine hands to a backend (backend.h). */
#ifndef STEEL_BACKEND_BATCH_H
#define STEEL_BACKEND_BATCH_H

#include "backend/layer.h"
#include "backend/lora.h"
#include "quant/quant.h"

#include <stdint.h>

struct batch_canary;
struct kv_layer;

/* One step's input. Prefill, decode and any mix of them differ only in data. Host memory. */
struct batch {
    int n_tokens, n_seqs, n_decode, n_out, max_pages;
    /* (n_tokens) Rows of one sequence are adjacent; sequences with one row come first. -1-r is the token
     * sampled for output row r of the previous step (backend.async). n_vocab + i is embeds[i]. */
    const int32_t *tokens;
    const int32_t *pos; /* (n_tokens) position in the sequence */
    /* (n_tokens, 3) M-RoPE positions: time, height, width; what ropes with a plane rotate by. NULL = pos three
     * times. Masks, windows and the cache always use pos. */
    const int32_t *rope_pos;
    /* (n_embeds) rows (network_embed_width) that replace token embeddings, such as an image's features, or are a
     * tower's patches; at most bounds.max_embeds. With deepstack, E values for each level follow the first E. Not in a step of the MTP block, and not over several processes. */
    const float *const *embeds;
    int n_embeds;
    /* (n_embeds) Of a tower with embed.pixels, if tower_ops.pixels: each patch's pixels. embeds[i] is then its position alone
     * (E). An entry may be NULL: a patch of zeros. NULL = embeds has patches and positions. */
    const uint8_t *const *pixels;
    /* (n_tokens, 2) the first and the end of the keys of the row's span, as positions of its sequence: an image in a
     * prompt, a window or a view in a tower. Equal: none. All keys of a span are in the cache after this step.
     * NULL: no row has a span. Read where attention.span says so. */
    const int32_t *spans;
    const int32_t *slot; /* (n_tokens) page * page_len + offset in the KV pool; -1 = padding row */
    const int32_t *q_start;  /* (n_seqs+1) first row of each sequence; the last entry is n_tokens */
    const int32_t *kv_len;   /* (n_seqs) keys visible to the last row, its own included */
    const int32_t *pages;    /* (n_seqs, max_pages) block table: page numbers in order */
    const int32_t *out_rows; /* (n_out) rows that need logits, ascending */
    const int32_t *types;    /* (n_tokens) for embed.types; NULL = all 0 */
    /* Slots of recurrent states, (n_seqs) each; NULL if no layer has a state. In one step, no slot is written by
     * two sequences, and none is read by one sequence and written by another. */
    const int32_t *state_in; /* the state before the first row; -1 = zeros */
    /* receives the state after the last row; may be state_in; -1 = padding */
    const int32_t *state_out;
    /* a checkpoint is taken after this many rows of the sequence; 0 = none */
    const int32_t *save_rows;
    const int32_t *save_state; /* the slot that receives the checkpoint */
    const struct kv_layer *kv; /* (n_layers) */
    /* The block's next step needs this step's rows: they go through the last layer and draft->keep() follows it, or with
     * taps (layer.h), draft->tap() comes before layers. */
    bool keep;
    /* (n_tokens) For a step of the MTP block (layer.h): the kept row that each row continues. NULL for a step of
     * the main layers. */
    const int32_t *from;
    /* Of such a step: `from` counts output rows of the block's own step before. Only blocks with taps need it. */
    bool continues;
    /* (n_loras) Which rows use which adapters, ascending by adapter, then by row. A row may use several adapters,
     * but none twice. */
    const struct lora_use *loras;
    int n_loras;
    const struct batch_canary *canary; /* canary.h; NULL = off */
};

/* [*first, *last]: the keys that row t of sequence seq sees in attention a. */
static inline void batch_keys(const struct batch *b, const struct attention *a, int seq, int t,
                              int *first, int *last)
{
    int pos = b->pos[t], end = b->kv_len[seq] - 1;
    *first = a->window > 0 && pos - a->window + 1 > 0 ? pos - a->window + 1 : 0;
    if (a->chunked)
        *first = pos - pos % a->window;
    *last = pos;
    if (a->bidirectional)
        *last = a->window > 0 && pos + a->window - 1 < end ? pos + a->window - 1 : end;
    const int32_t *span = a->span && b->spans ? b->spans + 2 * (ptrdiff_t)t : NULL;
    if (!span || span[0] >= span[1])
        return;
    if (a->span == SPAN_ONLY || span[0] < *first)
        *first = span[0];
    if (a->span == SPAN_ONLY || span[1] - 1 > *last)
        *last = span[1] - 1;
}

/* Whether the stream narrows to the output rows in this layer, which is the last of the step. */
static inline bool batch_narrows(const struct batch *b, const struct network *net, int layer)
{
    if (net->has_next_stage || net->n_mergers)
        return false; /* another process has the last layer; mergers read all rows */
    if (net->layers[layer].mixer.block.conv.len || net->layers[layer].mlp.block.conv.len)
        return false; /* a convolution keeps results of all rows */
    if (b->from)
        return layer == net->n_layers - 1;
    return (!b->keep || net->mtp.n_taps) && layer == network_depth(net) - 1;
}

/* Upper bounds of every step and of the cache. Together with the network's sizes they determine the backend's
 * scratch. */
struct bounds {
    int page_len, n_pages;
    /* Types of keys and values: F32, F16, BF16, or quantised as Q8_0, Q4_0, F8_E4M3 (quant/kvblock.h).
     * kv_types_check holds for them. */
    enum dtype k_type, v_type;
    int max_tokens, max_seqs, max_out, max_pages;
    int n_states;   /* slots of recurrent states */
    int max_embeds; /* embedding rows of a step; 0 = none */
    bool canary;    /* steps may have marks of pages (canary.h) */
    bool drafts;    /* steps may verify draft tokens; worth recording */
    int lora_rank; /* largest total rank that adapters add to one weight (lora_rank()); 0 = no adapters */
};

/* One layer's part of the cache. Members that the layer does not use are NULL.
 * Attention: keys (n_pages, K, page_len, Dk) of bounds.k_type and values (n_pages, K, page_len, Dv) of
 * bounds.v_type. Latent attention: keys only, (n_pages, page_len, C + Dr). Index keys: (n_pages, page_len, dim) of
 * bounds.k_type, rows. The order inside a (page, kv head)
 * tile is private to the backend; the engine moves whole pages.
 * Recurrent mixers and convolutions of blocks: states (n_states, layer_state_len) of floats, in the backend's own order. */
struct kv_layer {
    void *k, *v, *index;
    float *state;
};

#endif
