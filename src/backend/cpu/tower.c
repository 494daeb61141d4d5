/* Image towers (layer.h): their mergers, and what the decoder takes from inner layers of one. */
#include "backend/cpu/cpu.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/ops.h"

#include <string.h>

/* x += the features of a level, of rows that have them */
void cpu_deepstack(struct cpu_backend *cb, int level)
{
    struct cpu_stream *x = &cb->stream;
    const struct batch *b = &cb->batch;
    size_t E = (size_t)cb->net->n_embd;
    if (!b->n_embeds)
        return;
    cpu_settle(cb);
    for (int i = 0; i < x->rows; i++) {
        int given = b->tokens[x->narrow ? b->out_rows[i] : i] - cb->net->n_vocab;
        const float *from = given >= 0 ? b->embeds[given] + (size_t)level * E : NULL;
        for (size_t k = 0; from && k < E; k++)
            x->x[(size_t)i * E + k] += from[k];
    }
}

void cpu_merge(struct backend *be, const struct merger *m, int i)
{
    struct cpu_backend *cb = cpu_self(be);
    const struct cpu_stream *x = &cb->stream;
    int E = cb->net->n_embd, groups = x->rows / m->rows;
    cpu_settle(cb);
    cpu_stage_begin(cb);
    cpu_add_norm(x->x, NULL, &m->norm, cb->merged, m->wide ? groups : x->rows,
                 m->wide ? m->rows * E : E, cb->pool, cb->isa);
    gemm_ffn(cb, &m->ffn, cb->merged, cb->features[i], groups);
    cpu_stage_end(cb, STAGE_HEAD);
}

void cpu_features(struct backend *be, int rows, float *host)
{
    const struct cpu_backend *cb = cpu_self(be);
    size_t width = (size_t)network_feature_width(cb->net);
    for (int i = 0; i < cb->net->n_mergers; i++) {
        const struct merger *m = &cb->net->mergers[i];
        size_t n = (size_t)m->ffn.down->n_out;
        for (size_t row = 0; row < (size_t)rows; row++)
            memcpy(host + row * width + (size_t)m->at, cb->features[i] + row * n, n * sizeof *host);
    }
}
