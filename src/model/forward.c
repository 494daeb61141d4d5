/*
 * THE forward pass, of every family; prefill, decode and every mix of them. Families differ by the
 * layers they are made of (layer.h). The residual stream is the backend's: no op takes or returns it.
 * Tokens are chosen afterwards (ops->sample): their samplers may still wait for the step before.
 */
#include "model/model.h"

static void run_ops(struct model *m)
{
    struct backend *be = m->be;
    const struct network *net = &m->net;
    be->ops->embed(be, &net->embed);
    for (int i = 0; i < net->n_layers; i++) {
        be->ops->mixer(be, &net->layers[i].mixer, i); /* what mixes positions */
        be->ops->mlp(be, &net->layers[i].mlp, i);     /* what each position does alone */
    }
    be->ops->head(be, &net->head);
}

void forward(struct model *m, const struct batch *b, uint64_t key)
{
    const struct backend_ops *op = m->be->ops;
    op->begin(m->be, b);
    if (!key || !op->replay(m->be, key)) {
        if (key)
            op->record(m->be, key);
        run_ops(m);
    }
    op->launch(m->be);
}
