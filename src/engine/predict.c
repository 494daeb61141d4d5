/* Predicts the time of a step of several ranks: see predict.h. Knows no network and no file. */
#include "engine/predict.h"
#include "dist/ranks.h"
#include "dist/pipeline.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { STEP_MESSAGE_BYTES = 4096 }; /* what rank 0 broadcasts before a step */

/* Latencies are of a whole message as a rank sees it, not of the wire. They are published measurements;
 * docs/communication.md has the sources. Both tables end with name NULL. */
static const struct predict_link predict_links[] = {
    {"nvlink", 5e-6, 360e9, "NVLink 4 with NVSwitch: H100, H200"},
    {"pcie5", 8e-6, 40e9, "PCIe 5.0 x16, GPU to GPU"},
    {"pcie4", 8e-6, 20e9, "PCIe 4.0 x16, GPU to GPU"},
    {"400g", 10e-6, 46e9, "400 Gb/s InfiniBand or RoCE"},
    {"100g", 12e-6, 11.5e9, "100 Gb/s RoCE"},
    {"25g", 30e-6, 2.8e9, "25 Gb/s Ethernet, TCP"},
    {NULL, 0, 0, NULL},
};

/* h200 is fitted to measurements of Qwen3-30B-A3B Q4_K_M on one H200. The others are scaled from it by their
 * specifications. */
static const struct predict_device predict_devices[] = {
    {"h200", 139.0 * 1073741824, 2.77e12, 420e12, 13.4e-6, "measured"},
    {"h100", 79.0 * 1073741824, 1.93e12, 420e12, 13.4e-6, "H100 SXM 80 GB, scaled from h200"},
    {"a100", 79.0 * 1073741824, 1.18e12, 132e12, 16e-6, "A100 SXM 80 GB, scaled from h200"},
    {NULL, 0, 0, 0, 0, NULL},
};

const char *const predict_bounds[] = {"memory", "compute", "layers", "latency", "bandwidth"};

/* A unit of a quantity. Tables of units end with name NULL. */
struct unit_name {
    const char *name;
    double times;
};

static bool quantity(const char *text, const struct unit_name *units, double *out, const char **end)
{
    char *at;
    double v = strtod(text, &at);
    if (at == text || !isfinite(v) || v <= 0)
        return false;
    for (; units->name; units++) {
        size_t n = strlen(units->name);
        if (strncmp(at, units->name, n) == 0 && (at[n] == 0 || at[n] == ':')) {
            *out = v * units->times;
            *end = at + n;
            return isfinite(*out) && *out > 0;
        }
    }
    return false;
}

static const struct unit_name times[] = {{"us", 1e-6}, {"ns", 1e-9}, {"ms", 1e-3}, {NULL, 0}};
static const struct unit_name rates[] = {{"GB/s", 1e9}, {"MB/s", 1e6}, {"TB/s", 1e12}, {NULL, 0}};
static const struct unit_name speeds[] = {{"TFLOPS", 1e12}, {"GFLOPS", 1e9}, {NULL, 0}};

bool predict_link_parse(const char *text, struct predict_link *out, struct error *err)
{
    const char *end;
    for (const struct predict_link *l = predict_links; l->name; l++)
        if (!strcmp(l->name, text)) {
            *out = *l;
            return true;
        }
    *out = (struct predict_link){.name = text, .about = "as given"};
    if (quantity(text, times, &out->latency, &end) && *end == ':' &&
        quantity(end + 1, rates, &out->rate, &end) && !*end)
        return true;
    return error_set(
        err, "%.40s: no link: nvlink, pcie5, pcie4, 400g, 100g, 25g, or LATENCY:RATE as in %s",
        text, "12us:3GB/s");
}

bool predict_device_parse(const char *text, struct predict_device *out, struct error *err)
{
    const char *end;
    for (const struct predict_device *d = predict_devices; d->name; d++)
        if (!strcmp(d->name, text)) {
            *out = *d;
            return true;
        }
    *out = (struct predict_device){.name = text, .about = "as given"};
    if (quantity(text, rates, &out->read, &end) && *end == ':' &&
        quantity(end + 1, speeds, &out->flops, &end) &&
        (!*end || (*end == ':' && quantity(end + 1, times, &out->layer, &end) && !*end)))
        return true;
    return error_set(err, "%.40s: no device: h200, h100, a100, or READ:SPEED[:LAYER] as in %s",
                     text, "20GB/s:500GFLOPS:5us");
}

double predict_experts(int n, int used, double m)
{
    return n ? n * (1 - pow(1 - (double)used / n, m)) : 0;
}

double predict_busiest(double total, int tp)
{
    double mean = total / tp, most = mean + sqrt(2 * mean * log(tp));
    return total > 0 ? fmin(most, total) / total : 1.0 / tp;
}

/* Seconds of messages: rounds of latency, and bytes sent one after the other. */
struct message_cost {
    double latency, transfer;
};

static double rounds(int ranks)
{
    return ranks > 1 ? ceil(log2(ranks)) : 0;
}

static struct message_cost sum_cost(const struct predict_link *l, int tp, double bytes)
{
    double latency = rounds(tp) * l->latency;
    if (tp == 1)
        return (struct message_cost){0, 0};
    if (bytes <= RANKS_GATHER_BYTES)
        return (struct message_cost){latency, (tp - 1) * bytes / l->rate};
    return (struct message_cost){2 * latency, 2 * (tp - 1) * bytes / tp / l->rate};
}

double predict_sum(const struct predict_link *link, int tp, double bytes)
{
    struct message_cost c = sum_cost(link, tp, bytes);
    return c.latency + c.transfer;
}

int predict_parts(const struct predict_comm *t, const struct predict_load *load)
{
    return pipeline_parts(t->pp, t->overhead, load->rows, load->seqs, load->outs);
}

static void add_sums(struct predict_traffic *to, int tp, double bytes, double n)
{
    bool whole = bytes <= RANKS_GATHER_BYTES;
    double each = whole ? bytes : ceil(bytes / 4 / tp) * 4;
    to->messages += n * (whole ? 1 : 2);
    to->bytes += n * (whole ? 1 : 2) * (tp - 1) * each;
}

struct predict_traffic predict_traffic(const struct predict_comm *t, int stage, int tp_rank,
                                       const struct predict_load *load)
{
    struct predict_traffic out = {0, 0};
    int parts = predict_parts(t, load);
    bool last = stage == t->pp - 1;
    double row = (double)t->embd * 4;
    double logits = load->outs * (last && t->head_rows ? t->head_rows : t->vocab) * 4;
    if (t->tp > 1) {
        add_sums(&out, t->tp, load->rows / parts * row, (double)parts * t->sums);
        add_sums(&out, t->tp, load->outs / parts * row, (double)parts * t->sums_last);
    }
    if (last && t->collects && tp_rank > 0) {
        out.messages += parts;
        out.bytes += logits / t->tp;
    } else if (last && t->collects) {
        out.messages += (double)parts * (t->tp - 1);
    }
    if (stage > 0)
        out.messages += parts; /* receives rows */
    if (!last) {
        out.messages += parts; /* sends rows */
        out.bytes += load->rows * row;
    }
    if (t->pp > 1 && tp_rank == 0 && (last || stage == 0))
        out.messages +=
            parts * (t->head_rows
                         ? 2
                         : 1); /* logits to rank 0, and output rows for its shard of the head */
    if (t->pp > 1 && tp_rank == 0 && last)
        out.bytes += logits + (t->head_rows ? load->outs * row : 0);
    return out;
}

/* For the busiest rank: the fraction of its experts' bytes that a step reads, and of row-expert pairs it computes. */
static void expert_shares(const struct predict_work *w, const struct predict_comm *t, double m,
                          double *read, double *computed)
{
    int tp = t->ep ? t->tp : 1;
    double met = predict_experts(w->n_expert, w->n_used, m), pairs = m * w->n_used;
    double mine = (double)w->n_expert / tp;
    *read = *computed = 0;
    if (!w->n_expert)
        return;
    *read = tp > 1 ? fmin(met * predict_busiest(met, tp) / mine, 1) : met / mine;
    *computed = pairs * (tp > 1 ? predict_busiest(pairs, tp) : 1) / mine;
}

static enum predict_bound largest(const struct predict_step *s)
{
    const double parts[] = {s->memory, s->compute, s->layers, s->latency, s->transfer};
    enum predict_bound most = BOUND_MEMORY;
    for (int i = 0; i <= BOUND_BANDWIDTH; i++)
        if (parts[i] > parts[most])
            most = (enum predict_bound)i;
    return most;
}

/* One part of a step in one stage, including its messages to the next. */
static struct predict_step stage_part(const struct predict_work *w, const struct predict_comm *t,
                                      const struct predict_device *d,
                                      const struct predict_link *link,
                                      const struct predict_link *between,
                                      const struct predict_load *load, bool last)
{
    struct predict_step s = {0};
    double rows = load->rows, outs = load->outs, row = (double)t->embd * 4, read, computed;
    expert_shares(w, t, rows, &read, &computed);
    double bytes = w->bytes + read * w->expert_bytes + load->seqs * load->context * w->kv_bytes;
    double flops =
        2 * (rows * w->params + computed * w->expert_params) + rows * load->context * w->attn_flops;
    s.memory = bytes / d->read;
    s.compute = (flops + 2 * outs * w->head_params) / d->flops;
    s.layers = w->layers * d->layer;
    struct message_cost all = sum_cost(link, t->tp, rows * row),
                        few = sum_cost(link, t->tp, outs * row);
    s.latency = t->sums * all.latency + t->sums_last * few.latency;
    s.transfer = t->sums * all.transfer + t->sums_last * few.transfer;
    if (t->collects) {
        s.latency += link->latency;
        s.transfer += outs * t->vocab * 4 * (t->tp - 1) / t->tp / link->rate;
    }
    if (t->pp > 1) { /* rows to the next stage, or logits to rank 0 */
        int logits = t->head_rows ? t->head_rows + t->embd : t->vocab;
        s.latency += between->latency * (last && t->head_rows ? 2 : 1);
        s.transfer += (last ? outs * logits * 4 : rows * row) / between->rate;
    }
    s.seconds = fmax(s.memory, s.compute) + s.layers + s.latency + s.transfer;
    return s;
}

static void add_step(struct predict_step *to, const struct predict_step *s, double n)
{
    to->seconds += n * s->seconds;
    to->memory += n * s->memory;
    to->compute += n * s->compute;
    to->layers += n * s->layers;
    to->latency += n * s->latency;
    to->transfer += n * s->transfer;
}

struct predict_step predict_step(const struct predict_work *w, const struct predict_comm *t,
                                 const struct predict_device *d, const struct predict_link *link,
                                 const struct predict_link *between,
                                 const struct predict_load *load)
{
    int parts = predict_parts(t, load);
    struct predict_load part = {load->rows / parts, load->outs / parts, fmax(load->seqs / parts, 1),
                                load->context};
    struct predict_step s = {0}, slowest = {0}, tell = {0};
    for (int i = 0; i < t->pp; i++) {
        bool last = i == t->pp - 1;
        struct predict_step one = stage_part(&w[i], &t[i], d, link, between, &part, last);
        if (one.seconds > slowest.seconds)
            slowest = one;
        if (t->head_rows && i == 0 &&
            !last) { /* its shard of the head runs at the same time as the last stage's */
            struct predict_work less = w[i];
            less.bytes -= less.head_bytes;
            less.head_params = 0;
            one = stage_part(&less, &t[i], d, link, between, &part, last);
        }
        add_step(&s, &one, 1);
    }
    /* s is the time of one part through all stages. Each further part of a prompt adds the time of the slowest
     * stage. Parts of decodes circulate, and add time only if the slowest stage needs longer than one round. */
    double more = parts - 1;
    if (load->rows <= load->seqs && slowest.seconds > 0)
        more = fmax(parts - s.seconds / slowest.seconds, 0);
    add_step(&s, &slowest, more);
    if (t->tp * t->pp > 1) {
        const struct predict_link *far = t->pp > 1 ? between : link;
        tell.latency = rounds(t->tp * t->pp) * far->latency;
        tell.transfer = STEP_MESSAGE_BYTES / far->rate;
        tell.seconds = tell.latency + tell.transfer;
        add_step(&s, &tell, 1);
    }
    s.bound = largest(&s);
    return s;
}
