/*
 * Short convolutions of rows beside their input (struct row_conv of layer.h): of keys and values before attention makes heads
 * of them, and of the results of blocks. A thread has a channel and all rows of a sequence, in place, with the rows before in
 * registers. So a row's bytes do not depend on how its prompt was cut.
 * Owns the layout of a layer's state: W-1 rows of [k v], then of the mixer's result, then of the mlp's.
 * Limit: for prompts the latency of a chain of loads, ROWS at a time.
 */
#include "backend/cuda/mixers/mixers.h"

extern "C" {
#include "base/mem.h"
}

enum { ROW_CONV_THREADS = 128, ROW_CONV_TAPS = 8 /* most */, ROW_CONV_ROWS = 8 };

struct row_conv_scratch {
    float *rel; /* (max_tokens, widest) queries of relative positions */
};

struct row_conv_args {
    struct step step;
    float *x; /* (n_tokens, stride): the channels' columns */
    int stride, channels, split, n_taps;
    const float *taps[2]; /* (split, W), (channels - split, W) */
    float *states;        /* of slot 0: (W-1, channels) */
    size_t len;           /* of a slot */
};

/* Grid: (blocks of 128 channels, sequences). */
static __global__ void __launch_bounds__(ROW_CONV_THREADS)
    row_conv_kernel(const __grid_constant__ struct row_conv_args p)
{
    dependency_trigger();
    dependency_wait();
    int c = (int)(blockIdx.x * ROW_CONV_THREADS + threadIdx.x), seq = (int)blockIdx.y;
    int n = p.step.n_seqs, past = p.n_taps - 1;
    int in = p.step.states[seq], out = p.step.states[n + seq], save = p.step.states[2 * n + seq];
    if (c >= p.channels || out < 0)
        return;
    const float *from = c < p.split ? p.taps[0] + (size_t)(c * p.n_taps)
                                    : p.taps[1] + (size_t)((c - p.split) * p.n_taps);
    float taps[ROW_CONV_TAPS], v[ROW_CONV_TAPS - 1]; /* v: the rows before, the last one last */
    auto state = [&](int slot, int k) -> float & {
        return p.states[(size_t)slot * p.len + (size_t)k * (size_t)p.channels + (size_t)c];
    };
    /* Aligned to the end of the arrays, so that all indices are constants. */
#pragma unroll
    for (int i = 0; i < ROW_CONV_TAPS; i++) {
        int k = i - (ROW_CONV_TAPS - p.n_taps);
        taps[i] = k >= 0 ? from[k] : 0.0f;
        if (i < ROW_CONV_TAPS - 1)
            v[i] = k >= 0 && in >= 0 ? state(in, k) : 0.0f;
    }
    auto store = [&](int slot) {
#pragma unroll
        for (int i = 0; i < ROW_CONV_TAPS - 1; i++) {
            int k = i - (ROW_CONV_TAPS - 1 - past);
            if (k >= 0)
                state(slot, k) = v[i];
        }
    };
    int first = p.step.q_start[seq], rows = p.step.q_start[seq + 1] - first;
    for (int r0 = 0; r0 < rows; r0 += ROW_CONV_ROWS) {
        float x[ROW_CONV_ROWS];
        float *row = p.x + (size_t)(first + r0) * (size_t)p.stride + (size_t)c;
#pragma unroll
        for (int r = 0; r < ROW_CONV_ROWS; r++)
            x[r] = r0 + r < rows ? row[(size_t)r * (size_t)p.stride] : 0.0f;
#pragma unroll
        for (int r = 0; r < ROW_CONV_ROWS; r++) {
            if (r0 + r >= rows)
                break;
            float sum = x[r] + taps[ROW_CONV_TAPS - 1] * x[r];
#pragma unroll
            for (int i = 0; i < ROW_CONV_TAPS - 1; i++)
                sum += taps[i] * v[i];
#pragma unroll
            for (int i = 0; i + 1 < ROW_CONV_TAPS - 1; i++)
                v[i] = v[i + 1];
            v[ROW_CONV_TAPS - 2] = x[r];
            row[(size_t)r * (size_t)p.stride] = sum;
            if (save == r0 + r + 1)
                store(p.step.states[3 * n + seq]);
        }
    }
    store(out);
}

/* Host */

bool row_conv_supported(const struct network *net, int layer, struct error *err)
{
    const struct layer *l = &net->layers[layer];
    const struct mixer *m = &l->mixer;
    const struct attention *a = &m->attention;
    bool attends = m->kind == MIXER_ATTENTION;
    const struct row_conv *all[] = {&m->block.conv, &l->mlp.block.conv, &a->k_conv, &a->v_conv};
    bool any = false, fits = true;
    for (int i = 0; i < (attends ? 4 : 2); i++) {
        any = any || all[i]->len;
        fits = fits && all[i]->len <= ROW_CONV_TAPS;
    }
    if (attends && a->wrel)
        fits = fits && a->softcap == 0 && !a->index.n_chosen && !a->bidirectional && !a->span &&
               !a->clips && a->rel_len >= 1 && a->rel_dim <= 256;
    if (attends)
        fits = fits && a->k_conv.len == a->v_conv.len &&
               (!a->k_conv.len || !(a->gated || a->k_is_v || a->shares_kv || a->clips));
    if (any)
        fits = fits && attends && !mlp_is_none(&l->mlp) && !net->streams.n && !net->mtp.fc &&
               !m->block.parallel && !l->mlp.block.parallel && !m->block.sum.kind &&
               !l->mlp.block.sum.kind && m->block.out.kind <= NORM_RMS && !l->mlp.experts_late &&
               (!layer || !net->layers[layer - 1].mlp.experts_late) && net->n_embd % 4 == 0;
    return fits ||
           network_refuse(err, layer, "such convolutions or relative positions are", "cuda");
}

bool row_conv_prepare(struct cuda_backend *cu, const struct bounds *b, struct error *err)
{
    struct network_max max;
    network_measure(cu->net, &max);
    if (!max.rel)
        return true;
    struct row_conv_scratch *s = (struct row_conv_scratch *)mem_zalloc(1, sizeof *s);
    cu->convs = s;
    const struct device_buffer list[] = {
        {(void **)&s->rel, (size_t)b->max_tokens * (size_t)max.rel * 4}};
    return cuda_own(cu, list, 1, err);
}

void row_conv_close(struct cuda_backend *cu)
{
    mem_free(cu->convs);
}

float *row_conv_rel(const struct cuda_backend *cu)
{
    return cu->convs->rel;
}

static void launch(struct cuda_backend *cu, struct row_conv_args p, int layer, size_t at)
{
    p.step = cuda_step(cu);
    p.len = layer_state_len(&cu->net->layers[layer]);
    p.states = cu->kv[layer].state + at;
    step_mark(cu);
    cuda_launch(cu, row_conv_kernel,
                dim3((unsigned)ceil_div(p.channels, ROW_CONV_THREADS), (unsigned)p.step.n_seqs),
                ROW_CONV_THREADS, 0, LAUNCH_EARLY, p);
    step_mark_end(cu, STAGE_QKV);
}

void row_conv_kv(struct cuda_backend *cu, const struct attention *a, int layer)
{
    struct row_conv_args p = {};
    if (!a->k_conv.len)
        return;
    p.split = a->n_kv_heads * a->k_dim;
    p.channels = p.split + a->n_kv_heads * a->v_dim;
    p.x = cu->act.qkv + a->n_heads * a->k_dim;
    p.stride = a->wqkv->n_out;
    p.n_taps = a->k_conv.len;
    p.taps[0] = a->k_conv.taps;
    p.taps[1] = a->v_conv.taps;
    launch(cu, p, layer, 0);
}

void row_conv_block(struct cuda_backend *cu, bool of_mlp, int layer,
                    struct resid_epilogue *epilogue)
{
    const struct layer *l = &cu->net->layers[layer];
    const struct block *b = of_mlp ? &l->mlp.block : &l->mixer.block;
    struct resid *r = &cu->resid;
    struct row_conv_args p = {};
    float by;
    if (!b->conv.len || r->add == ADD_NONE)
        return;
    r->epilogue = *epilogue; /* the sum of parts, before the block's own norm and scale */
    r->epilogue.out = gain{};
    r->epilogue.scale = 1.0f;
    r->epilogue.set = epilogue->beside || epilogue->norm.gain;
    const float *d = resid_take(cu, r, NULL, &by);
    p.channels = p.split = p.stride = cu->shape.n_embd;
    p.x = (float *)d;
    p.n_taps = b->conv.len;
    p.taps[0] = b->conv.taps;
    launch(cu, p, layer, layer_conv_at(l, b));
    r->add = ADD_ROWS;
    r->d = d;
    epilogue->beside = epilogue->beside_gate = NULL;
    epilogue->norm = epilogue->beside_norm = gain{};
    epilogue->set = epilogue->out.gain || epilogue->scale != 1.0f;
}
