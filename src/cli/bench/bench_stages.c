/* Bytes and operations of a step by stage, next to the measured time. */
#include "cli/bench/bench_stages.h"

#include <math.h>

struct stage_work {
    double bytes, ops; /* per step */
};

/* Multiplications and additions of `rows` rows times one of the weight's matrices. */
static double ops_of(const struct weight *w, double rows)
{
    return 2.0 * w->n_in * w->n_out * rows;
}

static void add(struct stage_work *to, const struct weight *w, double share, double rows)
{
    to->bytes += (double)w->bytes * share;
    to->ops += ops_of(w, rows);
}

/* The layer's mixer; of kinds other than these two nothing is counted. Returns its output projection or NULL. */
static const struct weight *mixer_work(const struct mixer *x, const struct bench_step *s,
                                       struct stage_work *work)
{
    const struct attention *a = &x->attention;
    const struct delta_net *d = &x->delta_net;
    if (x->kind == MIXER_ATTENTION) {
        add(&work[STAGE_QKV], a->wqkv, 1, s->rows);
        work[STAGE_ATTENTION].ops += 2.0 * a->n_heads * (a->k_dim + a->v_dim) * s->seen * s->rows;
        return a->wo;
    }
    if (x->kind == MIXER_DELTA_NET) {
        add(&work[STAGE_QKV], d->wqkv, 1, s->rows);
        add(&work[STAGE_QKV], d->wz, 1, s->rows);
        add(&work[STAGE_QKV], d->wba, 1, s->rows);
        return d->wo;
    }
    return NULL;
}

static void step_work(const struct model *m, size_t kv_token_bytes, const struct bench_step *s,
                      struct stage_work *work)
{
    const struct network *net = &m->net;
    int depth = network_depth(net);
    for (int i = 0; i < depth; i++) {
        const struct weight *wo = mixer_work(&net->layers[i].mixer, s, work);
        const struct mlp *mlp = &net->layers[i].mlp;
        double rows = i == depth - 1 ? s->outs : s->rows; /* after the last attention */
        if (wo)
            add(&work[STAGE_OUTPUT], wo, 1, rows);
        if (mlp->router.w) {
            int n_used = mlp->router.n_used;
            double used = (double)n_used / mlp->router.w->n_out;
            double hit = 1 - pow(1 - used, rows);
            add(&work[STAGE_EXPERTS], mlp->router.w, 1, rows);
            add(&work[STAGE_EXPERTS], mlp->experts.gate_up, hit, rows * n_used);
            add(&work[STAGE_EXPERTS], mlp->experts.down, hit, rows * n_used);
        }
        if (mlp->dense.gate_up) {
            add(&work[STAGE_FFN], mlp->dense.gate_up, 1, rows);
            add(&work[STAGE_FFN], mlp->dense.down, 1, rows);
        }
    }
    work[STAGE_ATTENTION].bytes = s->kv_rows * (double)kv_token_bytes;
    add(&work[STAGE_HEAD], net->head.w, 1, s->outs);
}

void bench_stages_json(const struct model *m, size_t kv_token_bytes, const struct bench_step *s,
                       const struct profile *before, const struct profile *after, int phase,
                       FILE *out)
{
    struct stage_work work[N_STAGES] = {0};
    double steps = (double)(after->steps[phase] - before->steps[phase]);
    const char *comma = "";
    step_work(m, kv_token_bytes, s, work);
    fputc('{', out);
    for (int i = 0; i < N_STAGES && steps > 0; i++) {
        double us = (after->ns[phase][i] - before->ns[phase][i]) * 1e-3 / steps;
        if (us <= 0)
            continue;
        fprintf(out, "%s\"%s\": {\"us\": %.2f, \"bytes\": %.0f, \"ops\": %.0f}", comma,
                stage_name((enum stage)i), us, work[i].bytes, work[i].ops);
        comma = ", ";
    }
    fputc('}', out);
}
