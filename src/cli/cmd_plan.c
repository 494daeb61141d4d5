/* steel plan: where every byte of a model would be, whether it fits, and its predicted speed: on this machine
 * (plan_fit.c), or on several ranks. */
#include "base/buf.h"
#include "base/mem.h"
#include "dist/job.h"
#include "base/sysmem.h"
#include "cli/cli.h"
#include "cli/hub/hub.h"
#include "cli/listen.h"
#include "cli/plan_fit.h"
#include "engine/placement.h"
#include "engine/sizing.h"
#include "vision/tower.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MOST_SEQS = 8, COLUMNS = 10, CELL = 40 };

static const double GIVEN_SHARE = 0.9, HOST_SHARE = 0.8; /* the same as in runtime.c and sizing.c */
static const double GIVEN_EXTRA = 512 << 20, HOST_EXTRA = 64 << 20;

struct planner {
    const char *model, *kv, *k, *v, *memory, *link, *gpu, *seqs_text;
    int tp, pp, context, max_seqs, prompt, depth;
    struct buf heads; /* the folder of a Hub model's heads */
    bool ep, json, no_probe;
    bool ranks; /* an arrangement or a machine is given: else this machine, as `run` would use it */
    struct model_flags here;
    struct plan_fit_options fit_options;
    struct plan_fit *fit; /* NULL with ranks */
    struct placement_options opt;
    struct tensorfile *file;
    struct config config;
    struct placement plan;
    int seqs[MOST_SEQS], n_seqs;
    struct predict_link inside, between;
    struct predict_device on;
    /* a rank's memory: all of it, the usable part, and the part for the backend itself */
    double bytes, usable, extra;
    bool told;      /* given on the command line, not measured here */
    char whose[96]; /* where the figure comes from, for the output */
};

static double beside(const struct planner *p, const struct placement_rank *r)
{
    return (double)r->weights + (double)r->scratch + p->extra;
}

/* A rank's checkpoints of recurrent states. */
static int checkpoints(const struct planner *p, const struct placement_rank *r)
{
    double left = p->usable - beside(p, r) - (double)p->max_seqs * (double)r->state_bytes;
    return r->state_bytes
               ? sizing_checkpoints(r->state_bytes, p->max_seqs, p->opt.gpu, (size_t)fmax(left, 0))
               : 0;
}

/* A rank's bytes of states: those of the sequences and checkpoints. */
static double all_states(const struct planner *p, const struct placement_rank *r)
{
    return (double)(p->max_seqs + checkpoints(p, r)) * (double)r->state_bytes;
}

/* A rank's cache bytes for the wanted context and sequences. */
static double cache_bytes(const struct planner *p, const struct placement_rank *r)
{
    return (double)p->max_seqs * (double)p->context * (double)r->token_bytes + all_states(p, r);
}

static bool fits(const struct planner *p, const struct placement_rank *r)
{
    return beside(p, r) + cache_bytes(p, r) <= p->usable;
}

static const struct placement_rank *first_that_does_not_fit(const struct planner *p,
                                                            const struct placement *plan)
{
    for (int i = 0; i < plan->n_ranks; i++)
        if (!fits(p, &plan->ranks[i]))
            return &plan->ranks[i];
    return NULL;
}

/* Tokens that fit the caches of all ranks; 0: not even the weights fit. */
static double room_tokens(const struct planner *p)
{
    double least = INFINITY;
    for (int i = 0; i < p->plan.n_ranks; i++) {
        const struct placement_rank *r = &p->plan.ranks[i];
        double left = p->usable - beside(p, r) - all_states(p, r);
        if (r->token_bytes)
            least = fmin(least, fmax(left, 0) / (double)r->token_bytes);
        else if (left < 0)
            return 0;
    }
    return floor(least);
}

/* The smallest --tp, doubling from the given one, with which the model fits; 0: none up to RANKS_MOST ranks. */
static int tp_that_fits(const struct planner *p)
{
    for (int tp = 2 * p->opt.tp; tp * p->opt.pp <= RANKS_MOST; tp *= 2) {
        struct placement other;
        struct placement_options o = p->opt;
        struct error ignored;
        o.tp = tp;
        if (!placement_make(p->file, &p->config, &o, &other, &ignored))
            return 0;
        bool ok = !first_that_does_not_fit(p, &other);
        placement_clear(&other);
        if (ok)
            return tp;
    }
    return 0;
}

static bool find_memory(const struct usage *u, struct planner *p)
{
    size_t n = 0;
    p->told = p->memory || ((p->gpu || p->link) && p->on.memory > 0);
    p->extra = GIVEN_EXTRA;
    if (p->memory && (!cli_parse_bytes(p->memory, &n) || !n)) {
        args_usage_error(u, "--memory %s: use a size such as 80G", p->memory);
        return false;
    }
    snprintf(p->whose, sizeof p->whose, "%s", p->memory ? "--memory" : "this machine's GPU");
    p->bytes = (double)n;
    if (!p->memory && p->told) {
        p->bytes = p->on.memory;
        snprintf(p->whose, sizeof p->whose, "%s", p->on.name);
    } else if (!p->memory && device_count("auto") > 0) {
        p->bytes = (double)device_room("auto", 1);
    }
    if (p->bytes > 0) {
        p->usable = GIVEN_SHARE * p->bytes;
        return true;
    }
    p->bytes = (double)sysmem_available("") / p->plan.n_ranks;
    p->usable = HOST_SHARE * p->bytes;
    p->extra = HOST_EXTRA;
    snprintf(p->whose, sizeof p->whose,
             p->plan.n_ranks > 1 ? "free here, shared by %d" : "free here", p->plan.n_ranks);
    return true;
}

/* Prediction */

static double more(double a, double b)
{
    return a > b ? a : b;
}

/* The maximum of each figure over a stage's ranks, since a stage takes as long as its slowest rank. */
static void slowest(const struct placement *plan, int stage, struct predict_work *w,
                    struct predict_comm *t)
{
    *w = (struct predict_work){0};
    for (int i = stage * plan->tp; i < (stage + 1) * plan->tp; i++) {
        const struct predict_work *o = &plan->ranks[i].work;
        w->layers = o->layers;
        w->n_expert = o->n_expert;
        w->n_used = o->n_used;
        w->bytes = more(w->bytes, o->bytes);
        w->expert_bytes = more(w->expert_bytes, o->expert_bytes);
        w->params = more(w->params, o->params);
        w->expert_params = more(w->expert_params, o->expert_params);
        w->head_params = more(w->head_params, o->head_params);
        w->head_bytes = more(w->head_bytes, o->head_bytes);
        w->kv_bytes = more(w->kv_bytes, o->kv_bytes);
        w->attn_flops = more(w->attn_flops, o->attn_flops);
        *t = plan->ranks[i].comm;
    }
}

/* A kind of step: a decode of some number of sequences, or a prompt chunk. */
struct plan_load {
    char name[48];
    struct predict_load load;
    double tokens; /* generated or read */
};

static int kinds_of(const struct planner *p, struct plan_load *out)
{
    int n = 0;
    for (; n < p->n_seqs; n++) {
        double s = p->seqs[n];
        out[n] = (struct plan_load){.load = {s, s, s, p->depth}, .tokens = s};
        snprintf(out[n].name, sizeof out[n].name, "%d sequence%s", p->seqs[n],
                 p->seqs[n] == 1 ? "" : "s");
    }
    out[n] = (struct plan_load){.load = {p->prompt, 1, 1, p->prompt / 2.0}, .tokens = p->prompt};
    snprintf(out[n].name, sizeof out[n].name, "prompt of %d", p->prompt);
    return n + 1;
}

static struct predict_step step_of(const struct planner *p, const struct predict_load *load)
{
    struct predict_work w[RANKS_MOST];
    struct predict_comm t[RANKS_MOST];
    for (int i = 0; i < p->plan.pp; i++)
        slowest(&p->plan, i, &w[i], &t[i]);
    return predict_step(w, t, &p->on, &p->inside, &p->between, load);
}

/* The largest number of messages, and of bytes, of any rank. */
static struct predict_traffic traffic_of(const struct planner *p, const struct predict_load *load)
{
    struct predict_traffic most = {0, 0};
    for (int i = 0; i < p->plan.n_ranks; i++) {
        const struct placement_rank *r = &p->plan.ranks[i];
        struct predict_traffic t = predict_traffic(&r->comm, r->stage, r->tp_rank, load);
        most.messages = more(most.messages, t.messages);
        most.bytes = more(most.bytes, t.bytes);
    }
    return most;
}

static struct predict_step step_alone(const struct planner *p, const struct predict_load *load)
{
    const struct placement_rank *one = &p->plan.one;
    return predict_step(&one->work, &one->comm, &p->on, &p->inside, &p->between, load);
}

/* Output as text */

static void span_cell(char *out, struct placement_span s, struct placement_span of)
{
    char mine[24];
    if (!s.most)
        snprintf(out, CELL, "-");
    else {
        if (s.least < s.most)
            snprintf(mine, sizeof mine, "%d-%d", s.least, s.most);
        else
            snprintf(mine, sizeof mine, "%d", s.most);
        if (s.most == of.most && s.least == of.least)
            snprintf(out, CELL, "%s", mine);
        else
            snprintf(out, CELL, "%s of %d", mine, of.most);
    }
}

static void run_cell(char *out, struct range r, int all)
{
    if (!r.n)
        snprintf(out, CELL, "-");
    else if (r.n == all)
        snprintf(out, CELL, "%d", all);
    else
        snprintf(out, CELL, "%d-%d", r.first, r.first + r.n - 1);
}

static void fill_row(const struct planner *p, const struct placement_rank *r, char row[][CELL])
{
    const struct placement_rank *one = &p->plan.one;
    char b[16];
    int n = 0;
    snprintf(row[n++], CELL, "%d", r->rank);
    snprintf(row[n++], CELL, "%d-%d", r->layers.first, r->layers.first + r->layers.n - 1);
    span_cell(row[n++], r->heads, one->heads);
    span_cell(row[n++], r->kv_heads, one->kv_heads);
    span_cell(row[n++], r->ff, one->ff);
    run_cell(row[n++], r->experts, one->experts.n);
    span_cell(row[n++], r->ff_exp, one->ff_exp);
    run_cell(row[n++], r->vocab, one->vocab.n);
    snprintf(row[n++], CELL, "%s", cli_bytes((double)r->weights, b));
    snprintf(row[n++], CELL, "%s", r->whole ? cli_bytes((double)r->whole, b) : "-");
}

static void print_ranks(const struct planner *p)
{
    static const char *const heads[COLUMNS] = {
        "rank",    "layers",       "heads",      "kv heads", "mlp",
        "experts", "expert width", "vocabulary", "weights",  "of them whole"};
    int n = p->plan.n_ranks, width[COLUMNS];
    char(*cells)[COLUMNS][CELL] = mem_zalloc((size_t)n, sizeof *cells);
    bool used[COLUMNS] = {false};
    for (int c = 0; c < COLUMNS; c++)
        width[c] = (int)strlen(heads[c]);
    for (int i = 0; i < n; i++) {
        fill_row(p, &p->plan.ranks[i], cells[i]);
        for (int c = 0; c < COLUMNS; c++) {
            int len = (int)strlen(cells[i][c]);
            width[c] = len > width[c] ? len : width[c];
            used[c] |= strcmp(cells[i][c], "-") != 0;
        }
    }
    for (int i = -1; i < n; i++) {
        for (int c = 0, any = 0; c < COLUMNS; c++)
            if (used[c])
                printf("%s%*s", any++ ? "  " : "", width[c], i < 0 ? heads[c] : cells[i][c]);
        putchar('\n');
    }
    mem_free(cells);
}

static void print_copies(const struct placement *plan)
{
    char b[16];
    if (!plan->n_copies)
        return;
    printf("\nwhole on every rank that shares a layer\n");
    for (int i = 0; i < plan->n_copies; i++) {
        const struct placement_copy *c = &plan->copies[i];
        char part[64];
        snprintf(part, sizeof part, c->layers ? "%s in %d layer%s" : "%s", c->part, c->layers,
                 c->layers == 1 ? "" : "s");
        printf("  %-36s %10s  %s\n", part, c->bytes ? cli_bytes((double)c->bytes, b) : "", c->why);
    }
}

static void print_cache(const struct planner *p)
{
    char a[16], b[16], d[16], e[16];
    const struct placement_rank *most = p->plan.ranks;
    for (int i = 1; i < p->plan.n_ranks; i++)
        if (beside(p, &p->plan.ranks[i]) + cache_bytes(p, &p->plan.ranks[i]) >
            beside(p, most) + cache_bytes(p, most))
            most = &p->plan.ranks[i];
    printf(
        "\ncache           %zu bytes a token on a rank (%zu in one process), %s for %d sequence%s "
        "of %d\n",
        most->token_bytes, p->plan.one.token_bytes, cli_bytes(cache_bytes(p, most), a), p->max_seqs,
        p->max_seqs == 1 ? "" : "s", p->context);
    if (most->state_bytes)
        printf("states          %s a sequence on a rank, and %d checkpoints\n",
               cli_bytes((double)most->state_bytes, b), checkpoints(p, most));
    printf("memory          %s (%s), of which %s may be used; rank %d needs %s\n",
           cli_bytes(p->bytes, a), p->whose, cli_bytes(p->usable, b), most->rank,
           cli_bytes(beside(p, most) + cache_bytes(p, most), d));
    double tokens = room_tokens(p);
    if (tokens < 1)
        printf("fits            no: weights and working memory are %s\n",
               cli_bytes(beside(p, most), e));
    else if (isfinite(tokens))
        printf("fits            %s: there is room for %.0f tokens of cache\n",
               fits(p, most) ? "yes" : "no", tokens);
    else
        printf("fits            %s\n", fits(p, most) ? "yes" : "no");
}

static void print_steps(const struct planner *p)
{
    struct plan_load kinds[MOST_SEQS + 1];
    int n = kinds_of(p, kinds);
    char b[16];
    if (p->plan.n_ranks > 1) {
        printf("\na step          messages  bytes sent   (the most that one rank has)\n");
        for (int i = 0; i < n; i++) {
            struct predict_traffic t = traffic_of(p, &kinds[i].load);
            printf("%-15s %8.0f  %10s\n", kinds[i].name, t.messages, cli_bytes(t.bytes, b));
        }
    }
    if (!p->link)
        return;
    printf("\npredicted on %s (%s), %s of %.3g us and %.3g GB/s%s%s\n", p->on.name, p->on.about,
           p->inside.name, p->inside.latency * 1e6, p->inside.rate * 1e-9,
           p->opt.pp > 1 ? ", between stages " : "", p->opt.pp > 1 ? p->between.name : "");
    printf("%-15s    tok/s   one alone  ms a step  memory  compute  layers  latency  transfer  "
           "bound by\n",
           "");
    bool alone = fits(p, &p->plan.one);
    for (int i = 0; i < n; i++) {
        struct predict_step s = step_of(p, &kinds[i].load), one = step_alone(p, &kinds[i].load);
        char single[24] = "-";
        if (alone)
            snprintf(single, sizeof single, "%.0f", kinds[i].tokens / one.seconds);
        printf("%-15s %8.0f %11s %10.3f %7.3f %8.3f %7.3f %8.3f %9.3f  %s\n", kinds[i].name,
               kinds[i].tokens / s.seconds, single, s.seconds * 1e3, s.memory * 1e3,
               s.compute * 1e3, s.layers * 1e3, s.latency * 1e3, s.transfer * 1e3,
               predict_bounds[s.bound]);
    }
}

static void print_plan(const struct planner *p)
{
    char b[16];
    struct model_size tower;
    int layers;
    const struct placement *plan = &p->plan;
    printf("%s: %s, %d layers, %s of weights\n", p->file->path, p->config.arch_name,
           p->config.n_layers, cli_bytes((double)plan->one.weights, b));
    if (tower_measure(p->file, &layers, &tower))
        printf("its image tower, if it is used (one rank, on the CPU): %s more\n",
               cli_bytes((double)tower.bytes, b));
    printf("%d rank%s on %s: --tp %d --pp %d%s\n\n", plan->n_ranks, plan->n_ranks == 1 ? "" : "s",
           p->opt.gpu ? "GPUs" : "CPUs", plan->tp, plan->pp, plan->ep ? " --ep" : "");
    print_ranks(p);
    print_copies(plan);
    print_cache(p);
    print_steps(p);
}

/* Output as JSON */

static json_t *span_json(struct placement_span s)
{
    return json_pack("[ii]", s.least, s.most);
}

static json_t *run_json(struct range r)
{
    return json_pack("{s:i,s:i}", "first", r.first, "n", r.n);
}

static json_t *rank_json(const struct planner *p, const struct placement_rank *r)
{
    return json_pack(
        "{s:i,s:i,s:i, s:o,s:o,s:o,s:o,s:o,s:o,s:o, s:I,s:I,s:I,s:I,s:i,s:I,s:f,s:f,s:b}", "rank",
        r->rank, "stage", r->stage, "tp_rank", r->tp_rank, "layers", run_json(r->layers), "heads",
        span_json(r->heads), "kv_heads", span_json(r->kv_heads), "mlp", span_json(r->ff),
        "expert_width", span_json(r->ff_exp), "experts", run_json(r->experts), "vocabulary",
        run_json(r->vocab), "weight_bytes", (json_int_t)r->weights, "whole_bytes",
        (json_int_t)r->whole, "cache_token_bytes", (json_int_t)r->token_bytes, "state_bytes",
        (json_int_t)r->state_bytes, "checkpoints", checkpoints(p, r), "working_bytes",
        (json_int_t)r->scratch, "cache_bytes", cache_bytes(p, r), "needed_bytes",
        beside(p, r) + cache_bytes(p, r), "fits", fits(p, r));
}

static json_t *step_json(const struct planner *p, const struct plan_load *k)
{
    struct predict_traffic t = traffic_of(p, &k->load);
    json_t *o = json_pack("{s:s,s:f,s:f,s:f,s:f}", "step", k->name, "rows", k->load.rows,
                          "sequences", k->load.seqs, "messages", t.messages, "bytes", t.bytes);
    if (!p->link || !o)
        return o;
    struct predict_step s = step_of(p, &k->load), one = step_alone(p, &k->load);
    json_object_set_new(o, "prediction",
                        json_pack("{s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:s,s:f}", "tokens_per_second",
                                  k->tokens / s.seconds, "seconds", s.seconds, "memory", s.memory,
                                  "compute", s.compute, "layers", s.layers, "latency", s.latency,
                                  "transfer", s.transfer, "bound", predict_bounds[s.bound],
                                  "alone_tokens_per_second", k->tokens / one.seconds));
    return o;
}

static bool print_json(const struct planner *p)
{
    struct plan_load kinds[MOST_SEQS + 1];
    int n = kinds_of(p, kinds);
    json_t *ranks = json_array(), *copies = json_array(), *steps = json_array();
    for (int i = 0; i < p->plan.n_ranks; i++)
        json_array_append_new(ranks, rank_json(p, &p->plan.ranks[i]));
    for (int i = 0; i < p->plan.n_copies; i++) {
        const struct placement_copy *c = &p->plan.copies[i];
        json_array_append_new(copies,
                              json_pack("{s:s,s:i,s:I,s:s}", "part", c->part, "layers", c->layers,
                                        "bytes", (json_int_t)c->bytes, "why", c->why));
    }
    for (int i = 0; i < n; i++)
        json_array_append_new(steps, step_json(p, &kinds[i]));
    double room = room_tokens(p);
    json_t *o = json_pack(
        "{s:s%,s:s,s:i,s:i,s:b,s:b, s:i,s:i,s:{s:f,s:f,s:s},s:b,s:o, s:o,s:o,s:o,s:o}", "model",
        p->file->path, strlen(p->file->path), "architecture", p->config.arch_name, "tp", p->plan.tp,
        "pp", p->plan.pp, "ep", p->plan.ep, "gpu", p->opt.gpu, "context", p->context, "sequences",
        p->max_seqs, "memory", "bytes", p->bytes, "usable", p->usable, "whose", p->whose, "fits",
        first_that_does_not_fit(p, &p->plan) == NULL, "room_tokens",
        isfinite(room) ? json_real(room) : json_null(), "one", rank_json(p, &p->plan.one), "ranks",
        ranks, "whole", copies, "steps", steps);
    if (o && p->fit)
        json_object_set_new(o, "here", plan_fit_json(&p->fit_options, p->fit));
    bool ok = o && json_dumpf(o, stdout, JSON_INDENT(2)) == 0;
    if (ok)
        putchar('\n');
    json_decref(o);
    return ok;
}

/* Command line */

/* Parses "A" or "A,B": the link inside a stage, and between stages. */
static bool parse_links(const struct usage *u, struct planner *p)
{
    static char first[64];
    struct error err = {0};
    const char *comma = p->link ? strchr(p->link, ',') : NULL;
    size_t n = comma ? (size_t)(comma - p->link) : 0;
    if (!p->link)
        return true;
    if (n >= sizeof first) {
        args_usage_error(u, "--link %.60s...: too long", p->link);
        return false;
    }
    snprintf(first, sizeof first, "%.*s", comma ? (int)n : (int)sizeof first - 1, p->link);
    if (predict_link_parse(first, &p->inside, &err) &&
        predict_link_parse(comma ? comma + 1 : first, &p->between, &err))
        return true;
    args_usage_error(u, "--link %s", err.msg);
    return false;
}

/* The options of this machine, as `run` makes them of its flags. */
static bool finish_here(const struct usage *u, struct planner *p)
{
    struct plan_fit_options *o = &p->fit_options;
    p->here.context = p->context;
    p->here.kv_type = p->kv;
    p->here.k_type = p->k;
    p->here.v_type = p->v;
    p->here.draft = DRAFT_AUTO;
    if (!cli_runtime_options(u, &p->here, &o->runtime))
        return false;
    o->runtime.max_seqs = p->max_seqs;
    o->runtime.images = true;
    o->n_seqs = p->n_seqs;
    memcpy(o->seqs, p->seqs, sizeof o->seqs);
    o->depth = p->depth;
    o->prompt = p->prompt;
    o->no_probe = p->no_probe;
    return true;
}

static bool finish(const struct usage *u, struct planner *p)
{
    struct error err = {0};
    int size = job_size();
    p->ranks = p->tp || p->pp || p->ep || p->link || p->gpu || p->memory || size > 1;
    p->max_seqs = p->max_seqs ? p->max_seqs : 1;
    p->prompt = p->prompt ? p->prompt : p->ranks ? 2048 : 512;
    p->opt = (struct placement_options){.pp = p->pp ? p->pp : 1,
                                        .ep = p->ep,
                                        .k_type = DT_F16,
                                        .v_type = DT_F16,
                                        .max_tokens = p->prompt,
                                        .max_seqs = p->max_seqs};
    p->opt.tp = p->tp ? p->tp : size > p->opt.pp ? size / p->opt.pp : 1;
    if (!cli_kv_type(u, "kv-type", p->kv, &p->opt.k_type) ||
        !cli_kv_type(u, "kv-type", p->kv, &p->opt.v_type) ||
        !cli_kv_type(u, "cache-type-k", p->k, &p->opt.k_type) ||
        !cli_kv_type(u, "cache-type-v", p->v, &p->opt.v_type) || !parse_links(u, p))
        return false;
    if (p->ranks && p->here.draft_model) {
        args_usage_error(u, "--draft-model is planned for one process on this machine");
        return false;
    }
    if (!predict_device_parse(p->gpu ? p->gpu : "h200", &p->on, &err))
        args_usage_error(u, "--gpu %s", err.msg);
    else if (!args_int_list(p->seqs_text, p->seqs, MOST_SEQS, &p->n_seqs))
        args_usage_error(u, "--seqs %s: use up to %d numbers, as 1,64", p->seqs_text, MOST_SEQS);
    else {
        p->opt.gpu = p->gpu || p->link ? p->on.memory > 0 : device_count("auto") > 0;
        return p->ranks || finish_here(u, p);
    }
    return false;
}

/* Opens the model: of one on the Hub that is not in the cache, the heads. */
static bool open_file(struct planner *p, struct error *err)
{
    struct hub_name name;
    struct buf path = {0};
    bool ok = true;
    if (p->model && hub_is_name(p->model)) {
        ok = hub_parse(p->model, &name, err) &&
             (hub_find(&name, &path, err) ||
              (!err->msg[0] && hub_heads(&name, &p->heads, &path, err)));
    }
    p->file = ok ? tensorfile_open(path.len ? path.p : p->model, err) : NULL;
    if (p->file &&
        p->heads.len) { /* messages and the output name the model, not the folder of heads */
        mem_free(p->file->path);
        p->file->path = mem_strdup(p->model);
    }
    buf_clear(&path);
    return p->file != NULL;
}

static int plan_run(const struct usage *u, struct planner *p, struct error *err)
{
    if (!open_file(p, err) || !config_load(p->file, &p->config, err))
        return EXIT_FAIL;
    model_choose(&p->config, MODEL_PLAIN);
    if (!placement_make(p->file, &p->config, &p->opt, &p->plan, err))
        return EXIT_FAIL;
    p->context = p->context ? p->context : p->config.context;
    if (!find_memory(u, p))
        return EXIT_USAGE;
    if (!p->ranks) {
        p->fit = mem_zalloc(1, sizeof *p->fit);
        if (!plan_fit_make(p->file, &p->fit_options, p->fit, err))
            return EXIT_FAIL;
    }
    if (p->fit && !p->json) {
        plan_fit_print(p->file, &p->config, &p->fit_options, p->fit);
    } else if (!p->json) {
        print_plan(p);
    } else if (!print_json(p)) {
        error_set(err, "%s: cannot be written as JSON: a name is not UTF-8, or stdout is closed",
                  p->file->path);
        return EXIT_FAIL;
    }
    if (p->fit && p->fit->plan.fits)
        return EXIT_OK;
    if (p->fit) {
        error_set(err, "%s: does not fit", p->file->path);
        return EXIT_FAIL;
    }
    const struct placement_rank *r = first_that_does_not_fit(p, &p->plan);
    if (!r || !p->told)
        return EXIT_OK;
    char a[16], b[16], hint[64] = "";
    int tp = tp_that_fits(p);
    if (tp)
        snprintf(hint, sizeof hint, "; --tp %d would", tp);
    error_set(err, "%s: does not fit: rank %d needs %s of the %s that may be used%s", p->file->path,
              r->rank, cli_bytes(beside(p, r) + cache_bytes(p, r), a), cli_bytes(p->usable, b),
              hint);
    return EXIT_FAIL;
}

int cmd_plan(int argc, char **argv)
{
    struct planner p = {.depth = 1024, .seqs_text = "1,64"};
    const struct opt opts[] = {
        MODEL_ROW(p.model),
        {OPT_FLAG, 0, "json", 0, &p.json, 0, 0, 0, "for programs"},
        {OPT_HEADING, 0, "this machine", 0, 0, 0, 0, 0, 0},
        {OPT_INT, 't', "threads", 0, &p.here.threads, -1, 1024, "N", "CPU threads (default: all)"},
        {OPT_STRING, 0, "device", 0, &p.here.device, 0, 0, "NAME",
         "auto (default: a GPU if it fits), " DEVICE_NAMES},
        {OPT_FLOAT, 0, "gpu-memory-utilization", 0, &p.here.gpu_memory, 0.05, 1, "X",
         "share of the GPU's memory to use (default 0.9)"},
        OFFLOAD_ROWS(p.here),
        {OPT_STRING, 0, "expert-memory", 0, &p.here.expert_memory, 0, 0, "SIZE",
         "memory for experts, as 8G; the others are read from the file"},
        {OPT_FLAG, 0, "no-repack", 0, &p.here.no_repack, 0, 0, 0, "compute from the mapped file"},
        DRAFT_MODEL_ROWS(p.here),
        {OPT_FLAG, 0, "no-probe", 0, &p.no_probe, 0, 0, 0,
         "measure nothing, and predict no speeds"},
        {OPT_HEADING, 0, "arrangement", 0, 0, 0, 0, 0, 0},
        {OPT_INT, 0, "tp", "tensor-parallel-size", &p.tp, 1, RANKS_MOST, "N",
         "ranks that share each layer (default 1; under mpirun: all)"},
        {OPT_INT, 0, "pp", "pipeline-parallel-size", &p.pp, 1, RANKS_MOST, "N",
         "pieces the layers are cut into (default 1)"},
        {OPT_FLAG, 0, "ep", "enable-expert-parallel", &p.ep, 0, 0, 0,
         "whole experts to each of --tp ranks"},
        {OPT_HEADING, 0, "memory", 0, 0, 0, 0, 0, 0},
        {OPT_STRING, 0, "memory", 0, &p.memory, 0, 0, "SIZE",
         "of one rank, as 80G (default: --gpu's, this machine's GPU's, else what is free here)"},
        {OPT_INT, 'c', "ctx-size", "max-model-len", &p.context, 1, 1 << 28, "N",
         "context in tokens (default: the model's)"},
        {OPT_INT, 0, "max-num-seqs", "-np", &p.max_seqs, 1, 4096, "N",
         "sequences of that length (default 1)"},
        {OPT_STRING, 0, "kv-type", "kv-cache-dtype", &p.kv, 0, 0, "TYPE",
         "KV cache: " KV_TYPE_NAMES " (default f16)"},
        {OPT_STRING, 0, "cache-type-k", "-ctk", &p.k, 0, 0, "TYPE", "keys alone"},
        {OPT_STRING, 0, "cache-type-v", "-ctv", &p.v, 0, 0, "TYPE", "values alone"},
        {OPT_HEADING, 0, "prediction", 0, 0, 0, 0, 0, 0},
        {OPT_STRING, 0, "link", 0, &p.link, 0, 0, "LINK[,LINK]",
         "nvlink, pcie5, pcie4, 400g, 100g, 25g, or LATENCY:RATE; the second between stages"},
        {OPT_STRING, 0, "gpu", 0, &p.gpu, 0, 0, "NAME",
         "h200 (default), h100, a100, or READ:SPEED[:LAYER] as in 20GB/s:500GFLOPS:5us"},
        {OPT_STRING, 0, "seqs", 0, &p.seqs_text, 0, 0, "N,N",
         "sequences that generate at once (default 1,64)"},
        {OPT_INT, 0, "depth", 0, &p.depth, 0, 1 << 28, "N",
         "tokens each of them has already (default 1024)"},
        {OPT_INT, 'b', "batch-size", "max-num-batched-tokens", &p.prompt, 1, 1 << 20, "N",
         "tokens of a prompt (default 512), or of a step of several ranks (2048)"},
    };
    const struct usage u = {
        .command = "plan",
        .synopsis = "[MODEL] [options]",
        .about =
            "Prints where every byte of a model would be, what context and how many sequences "
            "fit,\n"
            "how fast it would be, and flags that would be better. `run` and `serve` decide by "
            "the\n"
            "same code. Speeds are predicted from products that are measured once and kept in\n"
            "~/.cache/steel/speed.json. Exit status 1 if the model does not fit.\n"
            "With --tp, --pp, --ep, --link, --gpu or --memory: how it would be placed on several\n"
            "ranks (mpirun -n N steel ... --tp ...), what cannot be divided and why, whether it "
            "fits,\n"
            "what a step sends to others and, with --link, how fast it would be. Exit status 1 "
            "where\n"
            "--memory, --gpu or --link is given and it does not fit.\n"
            "Reads only the file's headers.",
        .examples =
            "  steel plan model.gguf                              this machine\n"
            "  steel plan model.gguf -c 32768 -np 8 --kv-type q8_0\n"
            "  steel plan model.gguf --tp 4                       four ranks share every layer\n"
            "  steel plan model.gguf --tp 8 --ep --memory 80G -c 32768 -np 16\n"
            "                                                     do 16 contexts of 32k fit?\n"
            "  steel plan model.gguf --tp 8 --pp 2 --link nvlink,400g\n"
            "                                                     two machines of eight H200\n"
            "  steel plan model.gguf --tp 2 --link 12us:3GB/s --gpu 20GB/s:500GFLOPS\n"
            "                                                     your own link and machine\n",
        .opts = opts,
        .n_opts = sizeof opts / sizeof *opts,
        .max_args = 1,
    };
    const char *pos[1];
    struct error err = {0};
    int n = args_parse(&u, argc, argv, pos);
    if (n < 0)
        return cli_args_exit(n);
    if (!cli_take_model(&u, &p.model, pos, &n, 0) || !finish(&u, &p))
        return EXIT_USAGE;
    int rc = plan_run(&u, &p, &err);
    placement_clear(&p.plan);
    cli_runtime_options_clear(&p.fit_options.runtime);
    mem_free(p.fit);
    tensorfile_close(p.file);
    hub_heads_remove(&p.heads);
    return rc == EXIT_FAIL ? cli_fail(&err) : rc;
}
