/* Nodes of a schema's grammar that no value satisfies: found, and removed with what requires them. */
#include "text/grammar/schema_int.h"

static bool array_productive(struct array_node *a, const uint8_t *ok)
{
    uint32_t fit = 0, places = a->min;
    if (a->min > a->max)
        return false;
    for (uint32_t i = 0; i < a->n_prefix && i < places; i++)
        if (!ok[a->prefix[i]])
            return false;
    if (places > a->n_prefix && !ok[a->items])
        return false;
    if (!a->n_contains)
        return true;
    for (uint32_t i = 0; i < a->n_prefix && i < a->max; i++)
        fit += ok[a->both[i]];
    return fit >= a->n_contains || (ok[a->both[a->n_prefix]] && ok[a->items]);
}

static bool object_productive(const struct object_node *o, const uint8_t *ok)
{
    uint32_t names = 0, required = 0;
    bool others = false;
    for (uint32_t i = 0; i < o->n_props; i++) {
        const struct object_prop *p = &o->prop[i];
        bool can = p->node != NO_LIMIT && ok[p->node];
        names += can;
        required += p->required;
        if (p->required && !can)
            return false;
        for (uint32_t k = 0; p->required && k < p->n_needs; k++) {
            const struct object_prop *q = &o->prop[o->needs[p->needs + k]];
            required += !q->required; /* may count one twice, which is only stricter */
            if (q->node == NO_LIMIT || !ok[q->node])
                return false;
        }
    }
    for (uint32_t k = 0; k < o->n_others; k++)
        others |= o->others[k] != NO_LIMIT && ok[o->others[k]];
    return required <= o->max && o->min <= o->max && (others || names >= o->min);
}

static bool node_productive(const struct grammar *g, uint32_t n, const uint8_t *ok)
{
    const struct gnode *x = &g->nodes[n];
    if (x->kind == NODE_ARRAY)
        return array_productive(x->array, ok);
    if (x->kind == NODE_OBJECT)
        return object_productive(x->object, ok);
    if (g->state_final[x->start])
        return true;
    for (uint32_t e = g->state_at[x->start]; e < g->state_at[x->start + 1]; e++)
        if (!g->edges[e].call || ok[g->edges[e].target])
            return true;
    return false;
}

void schema_productive(const struct grammar *g, uint8_t *ok)
{
    /* Callers mostly precede the nodes they call, so going backwards takes few rounds. */
    for (bool changed = true; changed;) {
        changed = false;
        for (uint32_t n = g->n_nodes; n-- > 0;)
            if (!ok[n] && node_productive(g, n, ok))
                ok[n] = changed = true;
    }
}

bool schema_is_dead(const uint8_t *ok, uint32_t node)
{
    return node == NO_LIMIT || !ok[node];
}

/* Removes impossible items and properties from arrays and objects. */
static void prune_nodes(struct grammar *g, const uint8_t *ok)
{
    for (uint32_t n = 0; n < g->n_nodes; n++) {
        struct array_node *a = g->nodes[n].array;
        struct object_node *o = g->nodes[n].object;
        if (a) {
            for (uint32_t i = 0; i < a->n_prefix; i++)
                if (!ok[a->prefix[i]] && a->max > i)
                    a->max = i;
            if (!ok[a->items] && a->max > a->n_prefix)
                a->max = a->n_prefix;
            for (uint32_t i = 0; a->n_contains && i <= a->n_prefix; i++)
                if (!ok[a->both[i]])
                    a->both[i] = NO_LIMIT;
        }
        for (uint32_t i = 0; o && i < o->n_props; i++)
            if (schema_is_dead(ok, o->prop[i].node))
                o->prop[i].node = NO_LIMIT;
        for (uint32_t i = 0; o && i < o->n_props; i++)
            for (uint32_t k = 0; k < o->prop[i].n_needs; k++)
                if (o->prop[o->needs[o->prop[i].needs + k]].node == NO_LIMIT)
                    o->prop[i].node = NO_LIMIT;
    }
}

/* Removes calls of nodes without a value from the graphs. */
static void prune_edges(struct grammar *g, const uint8_t *ok)
{
    uint32_t k = 0;
    for (uint32_t st = 0; st < g->n_states; st++) {
        uint32_t from = g->state_at[st], to = g->state_at[st + 1];
        g->state_at[st] = k;
        for (uint32_t e = from; e < to; e++)
            if (!g->edges[e].call || ok[g->edges[e].target])
                g->edges[k++] = g->edges[e];
    }
    g->state_at[g->n_states] = k;
    g->n_edges = k;
}

void schema_prune(struct grammar *g, const uint8_t *ok)
{
    prune_nodes(g, ok);
    prune_edges(g, ok);
}
