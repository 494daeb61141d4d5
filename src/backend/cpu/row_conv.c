/*
 * Convolutions of keys, values and results of blocks over the rows of a sequence, and what attention with relative positions
 * reads. Owns the form in which the kernels read both: taps (W, channels) with the row itself added to the last, and tables
 * whose last entry is that of distance 0. Owns the layout of a layer's state: W-1 rows of [k v], then of the mixer's result,
 * then of the mlp's. The arithmetic is in ssm.c and attn_kernel.h.
 */
#include "backend/cpu/cpu.h"
#include "backend/cpu/ops.h"
#include "base/mem.h"

#include <string.h>

/* Of a layer; NULL where it has no such part. */
struct row_convs {
    float *kv, *mixer, *mlp; /* (W, channels) */
    float *rel;              /* (R, cpu_relative_stride) */
};

bool cpu_convs_supported(const struct network *net, int layer)
{
    const struct layer *l = &net->layers[layer];
    const struct mixer *m = &l->mixer;
    const struct attention *a = &m->attention;
    bool attends = m->kind == MIXER_ATTENTION;
    const struct row_conv *all[] = {&m->block.conv, &l->mlp.block.conv, &a->k_conv, &a->v_conv};
    bool any = false;
    for (int i = 0; i < (attends ? 4 : 2); i++) {
        any |= all[i]->len != 0;
        if (all[i]->len > CPU_MAX_TAPS)
            return false;
    }
    if (attends && a->wrel &&
        (a->softcap != 0 || a->index.n_chosen || a->bidirectional || a->span || a->rel_len < 1))
        return false;
    if (attends && (a->k_conv.len != a->v_conv.len ||
                    (a->k_conv.len && (a->gated || a->k_is_v || a->shares_kv || a->clips))))
        return false;
    /* All rows of a step go through the block, and its state follows that of attention. */
    return !any || (attends && !mlp_is_none(&l->mlp) && !net->streams.n && !net->mtp.fc);
}

/* taps (W, channels) of n runs of channels, with the row itself. */
static float *taps_with_row(int n, const struct row_conv *const *convs, const int *channels)
{
    int width = 0, W = convs[0]->len;
    for (int i = 0; i < n; i++)
        width += channels[i];
    float *taps = mem_zalloc((size_t)width * (size_t)W, sizeof *taps);
    for (int i = 0, at = 0; i < n; at += channels[i++])
        for (int c = 0; c < channels[i]; c++)
            for (int k = 0; k < W; k++)
                taps[k * width + at + c] = convs[i]->taps[c * W + k] + (k == W - 1);
    return taps;
}

/* The table of relative positions from the farthest on, after zeros that make a row whole vectors. */
static float *reversed(const struct attention *a)
{
    size_t stride = cpu_relative_stride(a), n = (size_t)a->rel_len;
    float *rel = mem_zalloc((size_t)a->rel_dim * stride, sizeof *rel);
    for (size_t k = 0; k < (size_t)a->rel_dim; k++)
        for (size_t i = 0; i < n; i++)
            rel[(k + 1) * stride - 1 - i] = a->rel[k * n + i];
    return rel;
}

static struct row_convs convs_of(const struct layer *l, int n_embd)
{
    const struct attention *a = &l->mixer.attention;
    struct row_convs c = {0};
    if (l->mixer.kind == MIXER_ATTENTION && a->k_conv.len)
        c.kv = taps_with_row(2, (const struct row_conv *[]){&a->k_conv, &a->v_conv},
                             (int[]){a->n_kv_heads * a->k_dim, a->n_kv_heads * a->v_dim});
    if (l->mixer.kind == MIXER_ATTENTION && a->wrel)
        c.rel = reversed(a);
    if (l->mixer.block.conv.len)
        c.mixer = taps_with_row(1, (const struct row_conv *[]){&l->mixer.block.conv}, &n_embd);
    if (l->mlp.block.conv.len)
        c.mlp = taps_with_row(1, (const struct row_conv *[]){&l->mlp.block.conv}, &n_embd);
    return c;
}

bool cpu_convs_prepare(struct cpu_backend *cb, const struct network *net, int T, struct error *err)
{
    cb->rel = NULL;
    cb->convs = NULL;
    if (!cb->max.conv_len && !cb->max.rel)
        return true;
    cb->convs = mem_zalloc((size_t)net->n_layers, sizeof *cb->convs);
    for (int i = 0; i < net->n_layers && !cb->measured; i++)
        cb->convs[i] = convs_of(&net->layers[i], net->n_embd);
    return !cb->max.rel || (cb->rel = cpu_rows(cb, T, cb->max.rel, "relative positions", err));
}

void cpu_convs_clear(struct cpu_backend *cb)
{
    for (int i = 0; cb->convs && i < cb->n_taps; i++) {
        mem_free(cb->convs[i].kv);
        mem_free(cb->convs[i].mixer);
        mem_free(cb->convs[i].mlp);
        mem_free(cb->convs[i].rel);
    }
    mem_free(cb->convs);
    cb->convs = NULL;
}

void cpu_conv_kv(struct cpu_backend *cb, const struct attention *l, int layer)
{
    const struct layer *of = &cb->net->layers[layer];
    int q = l->n_heads * l->k_dim, n = l->n_kv_heads * (l->k_dim + l->v_dim);
    cpu_conv_rows(cb, cb->qkv + q, (size_t)(q + n), n, cb->convs[layer].kv, l->k_conv.len,
                  cb->batch.kv[layer].state, layer_state_len(of));
}

void cpu_conv_block(struct cpu_backend *cb, const struct block *b, int layer)
{
    const struct layer *of = &cb->net->layers[layer];
    if (!b->conv.len)
        return;
    const struct row_convs *c = &cb->convs[layer];
    cpu_conv_rows(cb, cb->stream.d, (size_t)cb->net->n_embd, cb->net->n_embd,
                  b == &of->mixer.block ? c->mixer : c->mlp, b->conv.len,
                  cb->batch.kv[layer].state + layer_conv_at(of, b), layer_state_len(of));
}

struct relative cpu_relative(const struct cpu_backend *cb, const struct attention *l, int layer)
{
    if (!l->wrel)
        return (struct relative){0};
    return (struct relative){cb->convs[layer].rel, cpu_relative_stride(l), cb->rel};
}
