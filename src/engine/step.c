/* Lays out a step: decodes first, then prompt chunks, rows of one sequence adjacent. Then masks, and the
 * choice of tokens. */
#include "engine/step.h"
#include "backend/backend.h"
#include "base/mem.h"
#include "base/pool.h"
#include "dist/ranks.h"
#include "engine/follow.h"
#include "file/tensorfile.h"
#include "dist/pipeline.h"

#include <string.h>

enum {
    BLOCK_KEY = 1 << 27, /* of recorded steps: those of the MTP block */
    BLOCK_ROWS = 16,     /* more rows of a sequence are a prompt's */
};
enum { MASK_THREADS = 4 }; /* a mask takes some 40 us: enough for hundreds of rows beside a step */

struct stepper {
    struct model *m;
    struct kvcache *kv;
    int context;
    struct step_limits limits;
    int max_pages;
    struct batch b;
    int32_t *tokens, *pos, *slot; /* (max_tokens) */
    int32_t *types;               /* (max_tokens), or NULL where the model knows none */
    int32_t *after;            /* (max_tokens) step_item.after, or NULL where there are no stages */
    int32_t *q_start, *kv_len; /* (max_seqs + 1), (max_seqs) */
    int32_t *pages;            /* (max_seqs, max_pages) */
    int32_t *out_rows, *sampled; /* (max_out) */
    int32_t *states;             /* (4, max_seqs) read, written, rows before a save, saved to */
    struct sampler **samplers;   /* (max_out) */
    int32_t *from;               /* (max_tokens) of the MTP block's steps, or NULL */
    struct sampler *greedy;      /* of drafts */
    struct lora_use *loras;      /* (max_seqs * LORA_MAX_USES), or NULL */
    struct flown {
        struct step_item *items;
        int n_items;
        /* Over stages, tokens are chosen as logits come, maybe after the next step has begun: */
        bool sampled;
        struct step_item **owner; /* (max_out) whose sampler chooses from a row; NULL = nobody's */
        uint64_t *draws;          /* (max_out) */
    } flying[2];                  /* started, not finished; the oldest first */
    int n_flying;
    unsigned turn;              /* counts steps */
    int owed;                   /* sequences of the step that have no slot for their state yet */
    struct pool *pool;          /* for masks; NULL until there is one to make */
    struct pipeline *pipeline;  /* the model is cut into stages; NULL: it is not */
    int n_taken;                /* of the oldest step: logits rows that have come over the stages */
    struct sample_probs *probs; /* (max_out) of them */
    struct follow_said *said;   /* what other ranks are told; NULL: there are none */
};

struct stepper *stepper_new(struct model *m, struct kvcache *kv, int context,
                            const struct step_limits *limits, struct error *err)
{
    struct stepper *st = mem_zalloc(1, sizeof *st);
    st->m = m;
    st->kv = kv;
    st->context = context;
    st->limits = *limits;
    st->max_pages = (context + kv->page_len - 1) / kv->page_len;
    size_t tokens = (size_t)limits->max_tokens, seqs = (size_t)limits->max_seqs;
    st->tokens = mem_zalloc(tokens, sizeof(int32_t));
    st->pos = mem_zalloc(tokens, sizeof(int32_t));
    st->types = m->net.embed.types ? mem_zalloc(tokens, sizeof(int32_t)) : NULL;
    st->slot = mem_zalloc(tokens, sizeof(int32_t));
    st->q_start = mem_zalloc(seqs + 1, sizeof(int32_t));
    st->kv_len = mem_zalloc(seqs, sizeof(int32_t));
    st->pages = mem_zalloc(seqs * (size_t)st->max_pages, sizeof(int32_t));
    st->states = mem_zalloc(4 * seqs, sizeof(int32_t));
    st->out_rows = mem_zalloc((size_t)limits->max_out, sizeof(int32_t));
    st->sampled = mem_zalloc((size_t)limits->max_out, sizeof(int32_t));
    st->samplers = mem_zalloc((size_t)limits->max_out, sizeof *st->samplers);
    if (limits->keep) {
        CHECK(m->net.mtp.fc || m->net.has_next_stage, "nothing drafts");
        struct sample_params greedy = sample_params_default();
        greedy.temp = 0;
        greedy.repeat_penalty = 1;
        st->from = mem_zalloc(tokens, sizeof(int32_t));
        st->greedy = sampler_new(&greedy, m->config.n_vocab);
    }
    if (limits->lora_rank)
        st->loras = mem_zalloc(seqs * LORA_MAX_USES, sizeof *st->loras);
    struct bounds bounds = {
        .page_len = kv->page_len,
        .n_pages = kv->n_pages,
        .k_type = kv->k_type,
        .v_type = kv->v_type,
        .max_tokens = limits->max_tokens,
        .max_seqs = limits->max_seqs,
        .max_out = limits->max_out,
        .max_pages = st->max_pages,
        .n_states = kv->n_states,
        .lora_rank = limits->lora_rank,
    };
    if (ranks_from(m->be->comm)) {
        size_t stream = (tokens + (size_t)ranks_from(m->be->comm)->tp) * (size_t)m->net.n_embd,
               logits = (size_t)limits->max_out * (size_t)m->net.n_vocab;
        ranks_reserve(ranks_from(m->be->comm), stream > logits ? stream : logits);
        st->said = follow_said_new(ranks_from(m->be->comm), limits, st->max_pages);
    }
    if (!m->be->ops->prepare(m->be, &m->net, &bounds, err)) {
        stepper_free(st);
        return NULL;
    }
    if (ranks_from(m->be->comm) && ranks_from(m->be->comm)->pp > 1) {
        size_t outs = (size_t)limits->max_out;
        st->after = mem_zalloc(tokens, sizeof *st->after);
        st->pipeline = pipeline_new(m, limits->max_tokens, limits->max_seqs, limits->max_out);
        st->probs = mem_zalloc(outs, sizeof *st->probs);
        for (int i = 0; i < 2; i++) {
            st->flying[i].owner = mem_zalloc(outs, sizeof *st->flying[i].owner);
            st->flying[i].draws = mem_zalloc(outs, sizeof *st->flying[i].draws);
        }
    }
    return st;
}

void stepper_free(struct stepper *st)
{
    if (!st)
        return;
    pool_free(st->pool);
    pipeline_free(st->pipeline);
    follow_said_free(st->said);
    sampler_free(st->greedy);
    for (int i = 0; i < 2; i++) {
        mem_free(st->flying[i].owner);
        mem_free(st->flying[i].draws);
    }
    void *owned[] = {st->tokens,  st->types,    st->pos,    st->slot,
                     st->q_start, st->kv_len,   st->pages,  st->out_rows,
                     st->sampled, st->samplers, st->states, st->loras,
                     st->from,    st->probs,    st->after,  st};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
        mem_free(owned[i]);
}

const struct step_limits *stepper_limits(const struct stepper *st)
{
    return &st->limits;
}

static bool check_room(struct stepper *st, const struct step_item *items, int n_items,
                       struct error *err)
{
    int tokens = 0, outs = 0, pages = 0, states = 0;
    for (int i = 0; i < n_items; i++) {
        const struct step_item *it = &items[i];
        int total = it->seq->n_tokens + it->n_tokens;
        if (total > st->context)
            return error_set(err, "%d tokens do not fit the context of %d", total, st->context);
        tokens += it->n_tokens;
        CHECK(it->n_draft < it->n_tokens && (!it->n_draft || it->want >= LOGITS_LAST),
              "%d drafts of %d tokens", it->n_draft, it->n_tokens);
        outs += it->want == LOGITS_ALL ? it->n_tokens : (it->want == LOGITS_LAST) + it->n_draft;
        pages += (total + st->kv->page_len - 1) / st->kv->page_len - it->seq->n_pages;
        states += st->kv->states && !it->seq->state;
    }
    CHECK(tokens <= st->limits.max_tokens && n_items <= st->limits.max_seqs &&
              outs <= st->limits.max_out,
          "step of %d tokens, %d sequences, %d outputs", tokens, n_items, outs);
    if (pages > kvcache_available(st->kv))
        return error_set(err, "the KV cache is full: %d pages wanted, %d of %d free", pages,
                         kvcache_available(st->kv), st->kv->n_pages);
    if (states && states > states_available(st->kv->states))
        return error_set(err, "no room for %d more sequences: %d at most", states,
                         st->kv->n_states);
    st->owed = states;
    return true;
}

/* The slots of sequence i of the batch. Saving one is no need: it is left where none is free. */
static void add_states(struct stepper *st, struct step_item *it, int i)
{
    int32_t *to = st->states, n = st->limits.max_seqs, saved = -1;
    struct kv_seq *seq = it->seq;
    if (!st->kv->states)
        return;
    if (it->n_draft) { /* save_at is of prompts */
        to[i] = seq->from - 1;
        to[n + i] = seq->state - 1;
        to[2 * n + i] = it->n_tokens - it->n_draft;
        to[3 * n + i] = seq->back - 1;
        return;
    }
    if (it->save_at && states_available(st->kv->states) > st->owed)
        saved = kvcache_save(st->kv, seq, seq->n_tokens + it->save_at);
    if (it->tokens[0] < 0 && states_available(st->kv->states) > st->owed)
        kvcache_fork(st->kv, seq); /* its sequence may have ended with the token not known yet */
    to[i] = seq->n_tokens ? seq->from - 1 : -1;
    to[n + i] = seq->state - 1;
    to[2 * n + i] = saved < 0 ? 0 : it->save_at;
    to[3 * n + i] = saved;
}

static void point_states(struct stepper *st)
{
    if (!st->kv->states)
        return;
    st->b.state_in = st->states;
    st->b.state_out = st->states + st->limits.max_seqs;
    st->b.save_rows = st->states + 2 * (ptrdiff_t)st->limits.max_seqs;
    st->b.save_state = st->states + 3 * (ptrdiff_t)st->limits.max_seqs;
}

/* A batch without rows, whose arrays are the stepper's. */
static void begin_batch(struct stepper *st, bool keep)
{
    st->b = (struct batch){
        .max_pages = st->max_pages,
        .tokens = st->tokens,
        .pos = st->pos,
        .slot = st->slot,
        .q_start = st->q_start,
        .kv_len = st->kv_len,
        .pages = st->pages,
        .out_rows = st->out_rows,
        .kv = st->kv->layers,
        .keep = keep,
    };
    point_states(st);
}

/* One more row of the sequence that is being added: a token of it at position p. Returns which. */
static int add_row(struct stepper *st, const struct kv_seq *seq, int32_t token, int p)
{
    int row = st->b.n_tokens++, len = st->kv->page_len;
    st->tokens[row] = token;
    st->pos[row] = p;
    st->slot[row] = seq->pages[p / len] * len + p % len;
    return row;
}

/* All n rows of a sequence are there, the last at position n_kv - 1. */
static void end_seq(struct stepper *st, const struct kv_seq *seq, int n, int n_kv)
{
    struct batch *b = &st->b;
    memcpy(st->pages + (size_t)b->n_seqs * (size_t)st->max_pages, seq->pages,
           (size_t)seq->n_pages * sizeof *seq->pages);
    st->kv_len[b->n_seqs++] = n_kv;
    st->q_start[b->n_seqs] = b->n_tokens;
    b->n_decode += n == 1;
}

static void add_item(struct stepper *st, struct step_item *it)
{
    struct batch *b = &st->b;
    struct kv_seq *seq = it->seq;
    int first = seq->n_tokens;
    st->owed -= st->kv->states && !seq->state;
    bool grown = kvcache_grow(st->kv, seq, first + it->n_tokens);
    CHECK(grown, "pages were counted");
    it->first_row = it->want == LOGITS_NONE ? -1 : b->n_out;
    it->row = b->n_tokens;
    it->token = -1;
    for (int i = 0; i < it->n_tokens; i++) {
        bool last = i >= it->n_tokens - 1 - it->n_draft;
        CHECK(it->tokens[i] < st->m->config.n_vocab && (it->tokens[i] >= 0 || st->n_flying),
              "token %d", it->tokens[i]);
        int row = add_row(st, seq, it->tokens[i], first + i);
        if (st->types)
            st->types[row] = it->types ? it->types[i] : 0;
        if (st->after)
            st->after[row] = it->after;
        if (it->want == LOGITS_ALL || (it->want == LOGITS_LAST && last) ||
            (it->want == LOGITS_FIRST && i == 0))
            st->out_rows[b->n_out++] = row;
    }
    add_states(st, it, b->n_seqs);
    end_seq(st, seq, it->n_tokens, first + it->n_tokens);
}

/* Which rows use which adapters, by adapter. Items have their rows in the order of add_item. */
static void add_loras(struct stepper *st, const struct step_item *items, int n_items)
{
    bool used[LORA_MAX_ADAPTERS] = {false};
    struct batch *b = &st->b;
    for (int i = 0; i < n_items; i++)
        for (int k = 0; k < items[i].n_loras; k++) {
            CHECK(st->loras && items[i].n_loras <= LORA_MAX_USES, "%d adapters", items[i].n_loras);
            used[items[i].loras[k].adapter] = true;
        }
    b->loras = st->loras;
    for (int a = 0; a < LORA_MAX_ADAPTERS; a++) {
        if (!used[a])
            continue;
        int row = 0;
        for (int pass = 0; pass < 2; pass++)
            for (int i = 0; i < n_items; i++) {
                if ((items[i].n_tokens == 1) != (pass == 0))
                    continue;
                for (int k = 0; k < items[i].n_loras; k++)
                    if (items[i].loras[k].adapter == a)
                        st->loras[b->n_loras++] =
                            (struct lora_use){a, row, items[i].n_tokens, items[i].loras[k].scale};
                row += items[i].n_tokens;
            }
    }
}

/* Before rows are laid out: drafts that a state could not go back from are left out. */
static void reserve_states(struct stepper *st, struct step_item *items, int n_items)
{
    for (int i = 0; st->kv->states && i < n_items; i++) {
        struct step_item *it = &items[i];
        if (!it->n_draft)
            continue;
        int known = it->n_tokens - it->n_draft;
        if (states_available(st->kv->states) > st->owed && kvcache_draft(st->kv, it->seq, known))
            continue;
        it->n_tokens = known;
        it->n_draft = 0;
    }
}

/* Over stages: the next logits of the oldest step, and what is chosen from them. A sequence that has left
 * since has nobody to choose for. */
static void take_logits(struct stepper *st)
{
    const struct flown *f = &st->flying[0];
    struct range outs = pipeline_take(st->pipeline);
    for (int r = outs.first; r < outs.first + outs.n; r++) {
        const struct step_item *it = f->sampled ? f->owner[r] : NULL;
        st->sampled[r] = it && it->seq && it->sampler
                             ? sampler_pick_at(it->sampler, f->draws[r],
                                               pipeline_logits(st->pipeline, r), &st->probs[r])
                             : -1;
    }
    st->n_taken = outs.n ? outs.first + outs.n : st->limits.max_out;
}

/* A step over stages begins. Rows that go on from tokens of the step before wait for those alone. */
static void run_stages(struct stepper *st)
{
    int n = pipeline_begin(st->pipeline, &st->b);
    for (int i = 0; i < n; i++) {
        struct range rows = pipeline_rows(st->pipeline, i);
        for (int r = rows.first; r < rows.first + rows.n; r++) {
            bool known = st->tokens[r] >= 0;
            int from = known ? st->after[r] - 1 : -1 - st->tokens[r];
            while (st->n_flying && st->n_taken <= from)
                take_logits(st);
            /* none: that step has failed, and says so when it is finished */
            if (!known)
                st->tokens[r] = st->sampled[from] > 0 ? st->sampled[from] : 0;
        }
        pipeline_part(st->pipeline, i);
    }
}

bool step_follow(struct stepper *st, const struct batch *b, struct step_way how, struct error *err)
{
    mem_guard_enter();
    if (st->pipeline && b->from) {
        pipeline_draft(st->pipeline, b);
    } else if (st->pipeline) {
        int n = pipeline_begin(st->pipeline, b);
        for (int i = 0; i < n; i++)
            pipeline_part(st->pipeline, i);
        while (ranks_from(st->m->be->comm)->rank == 0 &&
               pipeline_take(st->pipeline).n) /* to nobody */
            continue;
        pipeline_end(st->pipeline);
    } else if (b->from) {
        forward_draft(st->m, b, how.key);
    } else {
        forward(st->m, b, how.key);
    }
    mem_guard_leave();
    st->turn = (st->turn + 1) & INT32_MAX;
    bool ok = st->pipeline || st->m->be->ops->end(st->m->be, NULL, err);
    return ok && (!st->m->reads || tensorfile_is_whole(st->m->reads, st->turn, err));
}

bool step_start(struct stepper *st, struct step_item *items, int n_items, struct error *err)
{
    CHECK(st->n_flying < (st->m->be->async ? 2 : 1), "%d steps are under way", st->n_flying);
    if (!check_room(st, items, n_items, err))
        return false;
    begin_batch(st, st->limits.keep);
    st->b.types = st->types;
    reserve_states(st, items, n_items);
    for (int pass = 0; pass < 2; pass++) /* decodes first */
        for (int i = 0; i < n_items; i++)
            if ((items[i].n_tokens == 1) == (pass == 0))
                add_item(st, &items[i]);
    if (st->loras)
        add_loras(st, items, n_items);
    /* Steps that only decode, or read drafts, repeat the same ops: a backend may record them. */
    int n_draft = 0;
    for (int i = 0; i < n_items; i++)
        n_draft += items[i].n_draft;
    bool repeats = st->b.n_tokens == st->b.n_seqs + n_draft && st->b.n_out == st->b.n_tokens;
    struct step_way how = {.key = repeats ? (uint64_t)st->b.n_seqs : 0,
                           .deterministic = st->m->be->deterministic};
    if (ranks_from(st->m->be->comm))
        follow_tell_step(st->said, &st->b, st->kv->page_len, how);
    mem_guard_enter();
    if (st->pipeline)
        run_stages(st);
    else
        forward(st->m, &st->b, how.key);
    mem_guard_leave();
    for (int i = 0; i < n_items; i++)
        kvcache_advance(st->kv, items[i].seq, items[i].n_tokens);
    struct flown *f = &st->flying[st->n_flying++];
    f->items = items;
    f->n_items = n_items;
    f->sampled = false;
    return true;
}

static void prepare_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    struct sampler **samplers = arg;
    for (int i = first; i < last; i++)
        sampler_prepare(samplers[i]);
}

void step_prepare(struct stepper *st, struct sampler **samplers, int n)
{
    if (n > 1 && !st->pool) {
        int most = pool_cpu_count();
        st->pool = pool_new(most < MASK_THREADS ? most : MASK_THREADS);
    }
    if (n > 1)
        pool_each(st->pool, n, POOL_SINGLE, prepare_rows, samplers);
    else
        prepare_rows(samplers, 0, 0, n);
}

/* Over stages: who will choose, and with which draw. */
static void sample_later(struct stepper *st, struct flown *f)
{
    memset(f->owner, 0, (size_t)st->b.n_out * sizeof(struct step_item *));
    for (int i = 0; i < f->n_items; i++) {
        struct step_item *it = &f->items[i];
        if (!it->seq || it->want == LOGITS_NONE || !it->sampler)
            continue;
        f->owner[step_chosen_row(it)] = it;
        f->draws[step_chosen_row(it)] = sampler_counter(it->sampler);
    }
    f->sampled = true;
}

void step_sample(struct stepper *st)
{
    CHECK(st->n_flying > 0, "no step is under way");
    const struct step_item *items = st->flying[st->n_flying - 1].items;
    int n_items = st->flying[st->n_flying - 1].n_items;
    if (st->pipeline) {
        sample_later(st, &st->flying[st->n_flying - 1]);
        return;
    }
    memset(st->samplers, 0, (size_t)st->b.n_out * sizeof(struct sampler *));
    for (int i = 0; i < n_items; i++) {
        const struct step_item *it = &items[i];
        for (int k = 0; it->seq && it->want != LOGITS_NONE && k <= (it->chained ? it->n_draft : 0);
             k++)
            st->samplers[step_chosen_row(it) + k] = it->sampler;
    }
    mem_guard_enter();
    st->m->be->ops->sample(st->m->be, st->samplers);
    mem_guard_leave();
}

int32_t step_token(const struct stepper *st, int row)
{
    return st->sampled[row];
}

void step_probs(struct stepper *st, int row, struct sample_probs *out)
{
    if (st->pipeline)
        *out = st->probs[row];
    else
        st->m->be->ops->probs(st->m->be, row, out);
}

/* Waits for the oldest step: its tokens are in st->sampled. */
static bool end_oldest(struct stepper *st, struct error *err)
{
    if (!st->pipeline)
        return st->m->be->ops->end(st->m->be, st->sampled, err);
    while (st->n_taken < st->limits.max_out)
        take_logits(st);
    pipeline_end(st->pipeline);
    st->n_taken = 0;
    return true;
}

bool step_finish(struct stepper *st, struct error *err)
{
    CHECK(st->n_flying > 0, "no step is under way");
    struct flown done = st->flying[0];
    struct step_item *items = done.items;
    int n_items = done.n_items;
    mem_guard_enter();
    bool ok = end_oldest(st, err);
    mem_guard_leave();
    st->flying[0] = st->flying[1];
    st->flying[1] = done;
    st->n_flying--;
    st->turn = (st->turn + 1) & INT32_MAX;
    ok = ok && ranks_ok(ranks_from(st->m->be->comm), err);
    ok = ok && (!st->m->reads || tensorfile_is_whole(st->m->reads, st->turn, err));
    for (int i = 0; i < n_items; i++) {
        struct step_item *it = &items[i];
        if (!it->seq)
            continue;
        if (!ok)
            kvcache_cut(st->kv, it->seq, it->seq->n_tokens - it->n_tokens);
        else if (it->want != LOGITS_NONE)
            it->token = st->sampled[step_chosen_row(it)];
    }
    return ok;
}

bool step_run(struct stepper *st, struct step_item *items, int n_items, struct error *err)
{
    if (!step_start(st, items, n_items, err))
        return false;
    step_sample(st);
    return step_finish(st, err);
}

void step_logits(struct stepper *st, int row, float *out)
{
    if (st->pipeline)
        memcpy(out, pipeline_logits(st->pipeline, row),
               (size_t)model_row_width(st->m) * sizeof *out);
    else
        st->m->be->ops->logits(st->m->be, row, out);
}

static void add_draft(struct stepper *st, struct draft_item *it)
{
    struct batch *b = &st->b;
    int len = st->kv->page_len, seq = b->n_seqs;
    CHECK(b->n_tokens + it->n <= st->limits.max_tokens && seq < st->limits.max_seqs,
          "a step of %d rows, %d sequences", b->n_tokens + it->n, seq);
    CHECK(it->first + it->n <= it->seq->n_pages * len, "row %d of %d pages", it->first + it->n - 1,
          it->seq->n_pages);
    for (int i = 0; i < it->n; i++)
        st->from[add_row(st, it->seq, it->tokens[i], it->first + i)] = it->from + i;
    it->row = it->want ? b->n_out : -1;
    if (it->want)
        st->out_rows[b->n_out++] = b->n_tokens - 1;
    for (int k = 0; st->kv->states && k < 4; k++) /* the block has none */
        st->states[k * st->limits.max_seqs + seq] = k == 2 ? 0 : -1;
    end_seq(st, it->seq, it->n, it->first + it->n);
}

bool step_draft(struct stepper *st, struct draft_item *items, int n_items, struct error *err)
{
    CHECK(st->n_flying == 0 && st->from, "no step to draft from");
    begin_batch(st, true);
    st->b.from = st->from;
    for (int pass = 0; pass < 2; pass++) /* single rows first */
        for (int i = 0; i < n_items; i++)
            if ((items[i].n == 1) == (pass == 0))
                add_draft(st, &items[i]);
    for (int i = 0; i < st->b.n_out; i++)
        st->samplers[i] = st->greedy;
    uint64_t key = BLOCK_KEY | (uint64_t)st->b.n_seqs;
    for (int i = 0; i < n_items; i++)
        key = items[i].n > BLOCK_ROWS ? 0 : key;
    struct step_way how = {.key = key, .deterministic = st->m->be->deterministic};
    if (ranks_from(st->m->be->comm))
        follow_tell_step(st->said, &st->b, st->kv->page_len, how);
    mem_guard_enter();
    bool ok = true;
    if (st->pipeline) {
        pipeline_draft(st->pipeline, &st->b);
        for (int i = 0; i < st->b.n_out; i++)
            st->sampled[i] =
                sampler_pick(st->greedy, pipeline_logits(st->pipeline, i), &st->probs[i]);
    } else {
        forward_draft(st->m, &st->b, key);
        st->m->be->ops->sample(st->m->be, st->samplers);
        ok = st->m->be->ops->end(st->m->be, st->sampled, err);
    }
    mem_guard_leave();
    ok = ok && ranks_ok(ranks_from(st->m->be->comm), err);
    for (int i = 0; ok && i < n_items; i++)
        items[i].token = items[i].want ? st->sampled[items[i].row] : -1;
    return ok;
}
