/*
 * THE forward pass, of every family; prefill, decode and every mix of them. Families differ by the
 * layers they are made of (layer.h). The residual stream is the backend's: no op takes or returns it.
 * Tokens are chosen afterwards (ops->sample): their samplers may still wait for the step before.
 */
#include "model/model.h"
#include "backend/backend.h"

/* The rows that an EAGLE-3 block reads, before layer i. */
static void tap_layer(struct model *m, int i)
{
    const struct mtp *mtp = &m->net.mtp;
    for (int k = 0; k < mtp->n_taps; k++)
        if (mtp->taps[k] == i)
            m->be->ops->draft->tap(m->be, k);
}

static void run_layers(struct model *m, int first, int last, bool taps)
{
    struct backend *be = m->be;
    const struct network *net = &m->net;
    for (int i = first; i < last; i++) {
        if (m->stop && atomic_load_explicit(m->stop, memory_order_relaxed))
            return; /* the result is not wanted any more */
        if (taps)
            tap_layer(m, i);
        be->ops->mixer(be, &net->layers[i].mixer, i); /* what mixes positions */
        be->ops->mlp(be, &net->layers[i].mlp, i);     /* what each position does alone */
        for (int k = 0; k < net->n_mergers; k++)
            if (net->mergers[k].after == i)
                be->ops->tower->merge(be, &net->mergers[k], k); /* an image's features */
        if (be->comm)
            be->comm->progress(be->comm);
        if (m->after_layer && i + 1 < last)
            m->after_layer(m->after_layer_arg);
    }
}

void forward_layers(struct model *m)
{
    run_layers(m, 0, network_depth(&m->net), false);
}

/* A step of the MTP block (batch.from) has another beginning, the layers after those of a step, and another head. */
static void run_ops(struct model *m, const struct batch *b)
{
    struct backend *be = m->be;
    const struct network *net = &m->net;
    const struct head *head = b->from ? &net->mtp.head : &net->head;
    static const struct norm as_is = {.kind = NORM_NONE};
    int depth = network_depth(net);
    bool taps = net->mtp.n_taps > 0;
    if (b->from)
        be->ops->draft->join(be, &net->mtp);
    else
        be->ops->embed(be, &net->embed);
    run_layers(m, b->from ? depth : 0, b->from ? net->n_layers : depth,
               taps && b->keep && !b->from);
    if (b->keep && (!taps || b->from))
        be->ops->draft->keep(be, taps ? &as_is : &head->norm); /* for drafts */
    if (!net->n_mergers)
        be->ops->head(be, head);
}

void forward(struct model *m, const struct batch *b, uint64_t key)
{
    const struct backend_ops *op = m->be->ops;
    op->begin(m->be, b);
    if (!key || !op->replay(m->be, key))
        run_ops(m, b);
    op->launch(m->be);
}
