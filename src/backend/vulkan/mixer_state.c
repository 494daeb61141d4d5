/* Mixers with a recurrent state on the Vulkan backend: gated delta nets, state-space models, short convolutions. */
#include "backend/vulkan/vulkan.h"

#include <string.h>

enum { MAX_CONV = 8, MAX_DEPTH = 256, THREADS = 128 };

bool vulkan_state_supported(const struct mixer *m, int i, struct error *err)
{
    int conv = 1, depth = 8;
    if (m->kind == MIXER_DELTA_NET) {
        conv = m->delta_net.conv_len;
        depth = m->delta_net.k_dim;
    } else if (m->kind == MIXER_SSM) {
        conv = m->ssm.conv_len;
        depth = m->ssm.state_dim;
    } else if (m->kind == MIXER_SCAN) {
        conv = m->scan.conv_len;
        depth = m->scan.state_dim;
    } else if (m->kind == MIXER_SHORT_CONV) {
        conv = m->short_conv.conv_len;
    }
    if (conv > MAX_CONV || depth > MAX_DEPTH)
        return error_set(
            err,
            "layer %d: a convolution over %d rows or states of %d are not supported on "
            "vulkan (%d and %d at most)",
            i, conv, depth, MAX_CONV, MAX_DEPTH);
    return true;
}

static void product_of(struct vulkan *v, const struct weight *w, uint64_t x, uint32_t ldx,
                       uint64_t to, uint32_t ld)
{
    vulkan_product(
        v,
        &(struct product){
            .w = w, .x = x, .y = to, .ldx = ldx, .ldy = ld, .rows = (uint32_t)v->rows, .x_div = 1});
}

static void product(struct vulkan *v, const struct weight *w, uint64_t to, uint32_t ld)
{
    product_of(v, w, v->s.n, v->s.ld_x, to, ld);
}

static void convolve(struct vulkan *v, const struct conv_args *a)
{
    vulkan_run(v, KERNEL_CONV, 0, 0, a, sizeof *a, vulkan_wide((int)a->width), a->n_seqs, 1);
}

static void gated_norm(struct vulkan *v, const struct norm *n, uint64_t z, uint32_t ldz, int parts,
                       int width, int gain_stride, bool norm_first, bool plain)
{
    const struct gnorm_args args = {v->s.a,
                                    z,
                                    vulkan_address(n->gain),
                                    vulkan_address(n->bias),
                                    (uint)v->rows,
                                    (uint)parts,
                                    (uint)width,
                                    v->s.ld_heads,
                                    ldz,
                                    (uint)n->kind,
                                    (uint)gain_stride,
                                    norm_first,
                                    n->eps,
                                    plain};
    vulkan_run(v, KERNEL_GNORM, 0, 0, &args, sizeof args, (uint32_t)parts, args.rows, 1);
}

static void mix_delta(struct vulkan *v, const struct delta_net *d, uint64_t state, size_t len)
{
    const struct vulkan_scratch *s = &v->s;
    int width = 2 * d->n_k_heads * d->k_dim + d->n_v_heads * d->v_dim;
    product(v, d->wqkv, s->qkv, s->ld_qkv);
    product(v, d->wba, s->gate, s->ld_gate);
    product(v, d->wz, s->q, s->ld_heads);
    convolve(v, &(struct conv_args){.step = v->s.step,
                                    .u = s->qkv,
                                    .conv = vulkan_address(d->conv),
                                    .state = state,
                                    .ld = s->ld_qkv,
                                    .width = (uint)width,
                                    .conv_len = (uint)d->conv_len,
                                    .state_len = (uint)len,
                                    .n_seqs = (uint)v->batch.n_seqs});
    const struct delta_args args = {.step = v->s.step,
                                    .u = s->qkv,
                                    .ba = s->gate,
                                    .decay = vulkan_address(d->decay),
                                    .dt_bias = vulkan_address(d->dt_bias),
                                    .state =
                                        state + 4 * (uint64_t)(d->conv_len - 1) * (uint64_t)width,
                                    .to = s->a,
                                    .ld = s->ld_qkv,
                                    .ld_ba = s->ld_gate,
                                    .ld_to = s->ld_heads,
                                    .n_k_heads = (uint)d->n_k_heads,
                                    .n_v_heads = (uint)d->n_v_heads,
                                    .k_dim = (uint)d->k_dim,
                                    .v_dim = (uint)d->v_dim,
                                    .state_len = (uint)len,
                                    .tiled = d->tiled,
                                    .beta_scale = d->beta_scale == 0 ? 1 : d->beta_scale};
    vulkan_run(v, KERNEL_DELTA, (uint32_t)(d->k_dim + 7) / 8, 0, &args, sizeof args, args.n_v_heads,
               (uint32_t)v->batch.n_seqs, vulkan_wide(d->v_dim));
    gated_norm(v, &d->norm, s->q, s->ld_heads, d->n_v_heads, d->v_dim, 0, true, false);
}

/* The parts of the projection times their factors, if there are any. */
static void scale_parts(struct vulkan *v, const struct ssm *m)
{
    uint64_t at = v->s.qkv;
    vulkan_apart(v, true);
    for (int i = 0; m->in_scale[0] != 0 && i < SSM_PARTS; at += 4 * (uint64_t)ssm_part(m, i++))
        vulkan_scale(v, &(struct scale_args){.x = at,
                                             .width = (uint)ssm_part(m, i),
                                             .rows = (uint)v->rows,
                                             .ldx = v->s.ld_qkv,
                                             .scale = m->in_scale[i]});
    vulkan_apart(v, false);
}

static void mix_ssm(struct vulkan *v, const struct ssm *m, uint64_t state, size_t len)
{
    const struct vulkan_scratch *s = &v->s;
    int values = m->n_heads * m->head_dim, width = ssm_channels(m);
    int parts = m->n_norms ? m->n_norms : 1;
    uint64_t x = s->qkv + 4 * (uint64_t)values;
    product(v, m->w_in, m->w_z ? x : s->qkv, s->ld_qkv);
    if (m->w_z)
        product(v, m->w_z, s->qkv, s->ld_qkv);
    scale_parts(v, m);
    convolve(v, &(struct conv_args){.step = v->s.step,
                                    .u = x,
                                    .conv = vulkan_address(m->conv),
                                    .bias = vulkan_address(m->conv_bias),
                                    .state = state,
                                    .ld = s->ld_qkv,
                                    .width = (uint)width,
                                    .conv_len = m->conv ? (uint)m->conv_len : 1,
                                    .state_len = (uint)len,
                                    .n_seqs = (uint)v->batch.n_seqs});
    const struct ssm_args args = {.step = v->s.step,
                                  .row = s->qkv,
                                  .decay = vulkan_address(m->decay),
                                  .dt_bias = vulkan_address(m->dt_bias),
                                  .skip = vulkan_address(m->skip),
                                  .state =
                                      state + 4 * (uint64_t)(m->conv_len - 1) * (uint64_t)width,
                                  .to = s->a,
                                  .ld = s->ld_qkv,
                                  .ld_to = s->ld_heads,
                                  .n_heads = (uint)m->n_heads,
                                  .n_groups = (uint)m->n_groups,
                                  .head_dim = (uint)m->head_dim,
                                  .state_dim = (uint)m->state_dim,
                                  .state_len = (uint)len,
                                  .dt_min = m->dt_min,
                                  .dt_max = m->dt_max};
    vulkan_run(v, KERNEL_SSM, (uint32_t)(m->state_dim + 7) / 8, 0, &args, sizeof args, args.n_heads,
               (uint32_t)v->batch.n_seqs, vulkan_wide(m->head_dim));
    gated_norm(v, &m->norm, s->qkv, s->ld_qkv, parts, values / parts, values / parts, m->norm_first,
               m->sigmoid_gate);
}

static void mix_short(struct vulkan *v, const struct short_conv *m, uint64_t state, size_t len)
{
    const struct vulkan_scratch *s = &v->s;
    product(v, m->w_in, s->qkv, s->ld_qkv);
    convolve(v, &(struct conv_args){.step = v->s.step,
                                    .u = s->qkv,
                                    .conv = vulkan_address(m->conv),
                                    .bias = vulkan_address(m->bias),
                                    .state = state,
                                    .to = s->a,
                                    .ld = s->ld_qkv,
                                    .width = (uint)m->w_out->n_in,
                                    .conv_len = (uint)m->conv_len,
                                    .state_len = (uint)len,
                                    .n_seqs = (uint)v->batch.n_seqs,
                                    .ld_to = s->ld_heads,
                                    .is_short = 1});
}

/* [dt b c] of a row go to scratch.q, dt of each channel to where the result goes. */
static void mix_scan(struct vulkan *v, const struct scan *m, uint64_t state, size_t len)
{
    const struct vulkan_scratch *s = &v->s;
    int R = m->dt_rank, N = m->state_dim, I = m->n_channels;
    uint64_t b = s->q + 4 * (uint64_t)R, c = b + 4 * (uint64_t)N;
    product(v, m->w_in, s->qkv, s->ld_qkv);
    convolve(v, &(struct conv_args){.step = v->s.step,
                                    .u = s->qkv,
                                    .conv = vulkan_address(m->conv),
                                    .bias = vulkan_address(m->conv_bias),
                                    .state = state,
                                    .ld = s->ld_qkv,
                                    .width = (uint)I,
                                    .conv_len = (uint)m->conv_len,
                                    .state_len = (uint)len,
                                    .n_seqs = (uint)v->batch.n_seqs});
    product_of(v, m->w_x, s->qkv, s->ld_qkv, s->q, s->ld_heads);
    vulkan_norm(v, &m->dt_norm, s->q, s->ld_heads, s->q, s->ld_heads, R, v->rows);
    vulkan_norm(v, &m->b_norm, b, s->ld_heads, b, s->ld_heads, N, v->rows);
    vulkan_norm(v, &m->c_norm, c, s->ld_heads, c, s->ld_heads, N, v->rows);
    product_of(v, m->w_dt, s->q, s->ld_heads, s->a, s->ld_heads);
    const struct scan_args args = {.step = v->s.step,
                                   .row = s->qkv,
                                   .low = s->q,
                                   .decay = vulkan_address(m->decay),
                                   .skip = vulkan_address(m->skip),
                                   .state = state + 4 * (uint64_t)(m->conv_len - 1) * (uint64_t)I,
                                   .to = s->a,
                                   .ld = s->ld_qkv,
                                   .ld_low = s->ld_heads,
                                   .ld_to = s->ld_heads,
                                   .n_channels = (uint)I,
                                   .state_dim = (uint)N,
                                   .dt_rank = (uint)R,
                                   .state_len = (uint)len};
    vulkan_run(v, KERNEL_SCAN, (uint32_t)(N + 7) / 8, 0, &args, sizeof args, vulkan_wide(I),
               (uint32_t)v->batch.n_seqs, 1);
}

void vulkan_mix_state(struct vulkan *v, const struct mixer *m, int layer)
{
    uint64_t state = vulkan_address(v->batch.kv[layer].state);
    size_t len = mixer_state_len(m);
    vulkan_read_block(v, &m->block);
    if (m->kind == MIXER_DELTA_NET)
        mix_delta(v, &m->delta_net, state, len);
    else if (m->kind == MIXER_SSM)
        mix_ssm(v, &m->ssm, state, len);
    else if (m->kind == MIXER_SCAN)
        mix_scan(v, &m->scan, state, len);
    else
        mix_short(v, &m->short_conv, state, len);
}
