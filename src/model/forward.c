/*
 * THE forward pass, of every family; prefill, decode and every mix of them. Families differ by the
 * layers they are made of (layer.h). The residual stream is the backend's: no op takes or returns it.
 * Tokens are chosen afterwards (ops->sample): their samplers may still wait for the step before.
 */
#include "model/model.h"
#include "backend/backend.h"

void forward_layers(struct model *m)
{
    struct backend *be = m->be;
    const struct network *net = &m->net;
    int n = network_depth(net);
    for (int i = 0; i < n; i++) {
        be->ops->mixer(be, &net->layers[i].mixer, i); /* what mixes positions */
        be->ops->mlp(be, &net->layers[i].mlp, i);     /* what each position does alone */
        if (be->comm)
            be->comm->progress(be->comm);
    }
}

static void run_ops(struct model *m, bool keep)
{
    struct backend *be = m->be;
    const struct network *net = &m->net;
    be->ops->embed(be, &net->embed);
    forward_layers(m);
    if (keep)
        be->ops->draft->keep(be, &net->head.norm); /* for drafts */
    be->ops->head(be, &net->head);
}

static void run_draft_ops(struct model *m, bool keep)
{
    const struct backend_ops *op = m->be->ops;
    const struct network *net = &m->net;
    int last = net->n_layers - 1;
    op->draft->join(m->be, &net->mtp);
    op->mixer(m->be, &net->layers[last].mixer, last);
    op->mlp(m->be, &net->layers[last].mlp, last);
    if (keep)
        op->draft->keep(m->be, &net->mtp.head.norm);
    op->head(m->be, &net->mtp.head);
}

/* What was recorded under the key, or the ops, recorded under it. */
static void run(struct model *m, const struct batch *b, uint64_t key,
                void (*ops)(struct model *m, bool keep))
{
    const struct backend_ops *op = m->be->ops;
    op->begin(m->be, b);
    if (!key || !op->replay(m->be, key))
        ops(m, b->keep);
    op->launch(m->be);
}

void forward(struct model *m, const struct batch *b, uint64_t key)
{
    run(m, b, key, run_ops);
}

void forward_draft(struct model *m, const struct batch *b, uint64_t key)
{
    run(m, b, key, run_draft_ops);
}
