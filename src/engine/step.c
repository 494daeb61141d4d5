/* Lays out a step: decodes first, then prompt chunks, the rows of one sequence adjacent. */
#include "engine/step.h"
#include "backend/backend.h"
#include "base/mem.h"
#include "engine/executor.h"

#include <string.h>

enum {
    BLOCK_KEY = 1 << 27, /* offset of the keys of the MTP block's recorded steps */
    NEXT_KEY = 1 << 26,  /* of those that continue the block's own rows */
    BLOCK_ROWS = 16,     /* more rows of a sequence count as a prompt */
};

/* A step in flight. */
struct started_step {
    struct step_item *items;
    int n_items;
    struct batch_canary *canary;
};

struct stepper {
    struct model *m;
    struct kvcache *kv;
    int context;
    struct step_limits limits;
    int max_pages;
    struct batch b;
    int32_t *tokens, *pos, *slot; /* (max_tokens) */
    int32_t *types;               /* (max_tokens), or NULL if the model has no token types */
    const float **embeds;         /* (max_embeds), or NULL */
    int32_t *rope_pos;            /* (max_tokens, 3), or NULL if no RoPE has planes */
    int32_t *spans;               /* (max_tokens, 2), or NULL if no attention reads them */
    int32_t *after;               /* (max_tokens) step_item.after */
    int32_t *q_start, *kv_len;    /* (max_seqs + 1), (max_seqs) */
    int32_t *pages;               /* (max_seqs, max_pages) */
    int32_t *out_rows;            /* (max_out) */
    int32_t *states; /* (4, max_seqs) slot read, slot written, rows before a save, slot saved to */
    struct row_choice *choices;     /* (max_out) */
    int32_t *from;                  /* (max_tokens) for the MTP block's steps, or NULL */
    struct sampler *greedy;         /* for drafts */
    bool drafted;                   /* the step before was the block's */
    struct lora_use *loras;         /* (max_seqs * LORA_MAX_USES), or NULL */
    struct started_step started[2]; /* oldest first */
    int n_started;
    uint32_t *marks;               /* (max_seqs, max_pages) as pages, or NULL */
    struct batch_canary canary[2]; /* of the steps in flight, in turn */
    unsigned turn;
    bool unchecked; /* stepper_check_marks */
    int owed;       /* sequences of the step that still need a slot for their state */
    struct executor *executor;
};

static bool has_planes(const struct network *net)
{
    bool any = false;
    for (int i = 0; i < net->n_ropes; i++)
        any |= net->ropes[i].plane != NULL;
    return any;
}

static bool has_spans(const struct network *net)
{
    bool any = false;
    for (int i = 0; i < net->n_layers; i++)
        any |= net->layers[i].mixer.kind == MIXER_ATTENTION &&
               net->layers[i].mixer.attention.span != SPAN_NONE;
    return any;
}

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
    st->embeds =
        limits->max_embeds ? mem_zalloc((size_t)limits->max_embeds, sizeof *st->embeds) : NULL;
    st->rope_pos = has_planes(&m->net) ? mem_zalloc(3 * tokens, sizeof(int32_t)) : NULL;
    st->spans = has_spans(&m->net) ? mem_zalloc(2 * tokens, sizeof(int32_t)) : NULL;
    st->slot = mem_zalloc(tokens, sizeof(int32_t));
    st->q_start = mem_zalloc(seqs + 1, sizeof(int32_t));
    st->kv_len = mem_zalloc(seqs, sizeof(int32_t));
    st->pages = mem_zalloc(seqs * (size_t)st->max_pages, sizeof(int32_t));
    st->states = mem_zalloc(4 * seqs, sizeof(int32_t));
    st->out_rows = mem_zalloc((size_t)limits->max_out, sizeof(int32_t));
    st->choices = mem_zalloc((size_t)limits->max_out, sizeof *st->choices);
    st->after = mem_zalloc(tokens, sizeof *st->after);
    if (limits->keep) {
        CHECK(m->net.mtp.fc || m->net.has_next_stage, "nothing drafts");
        struct sample_params greedy = sample_params_default();
        greedy.temp = 0;
        greedy.repeat_penalty = 1;
        st->from = mem_zalloc(tokens, sizeof(int32_t));
        st->greedy = sampler_new(&greedy, m->config.n_vocab);
    }
    if (kv->canary)
        st->marks = mem_zalloc(seqs * (size_t)st->max_pages, sizeof *st->marks);
    for (int i = 0; kv->canary && i < 2; i++)
        st->canary[i].wrong = mem_zalloc(seqs, sizeof *st->canary[i].wrong);
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
        .max_embeds = limits->max_embeds,
        .canary = kv->canary != NULL,
        .drafts = limits->drafts && !has_spans(&m->net),
    };
    st->executor = executor_new(m, &bounds, err);
    if (!st->executor) {
        stepper_free(st);
        return NULL;
    }
    return st;
}

void stepper_free(struct stepper *st)
{
    if (!st)
        return;
    executor_free(st->executor);
    sampler_free(st->greedy);
    void *owned[] = {st->tokens,
                     st->types,
                     st->pos,
                     st->slot,
                     st->q_start,
                     st->kv_len,
                     st->pages,
                     st->out_rows,
                     st->choices,
                     st->states,
                     st->loras,
                     st->from,
                     st->after,
                     st->embeds,
                     st->rope_pos,
                     st->spans,
                     st->marks,
                     st->canary[0].wrong,
                     st->canary[1].wrong,
                     st};
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

/* Sets the state slots of sequence i of the batch. A save is optional, and skipped if no slot is free. */
static void add_states(struct stepper *st, struct step_item *it, int i)
{
    int32_t *to = st->states, n = st->limits.max_seqs, saved = -1;
    struct kv_seq *seq = it->seq;
    if (!st->kv->states)
        return;
    if (it->n_draft) { /* save_at is for prompts only */
        to[i] = seq->from - 1;
        to[n + i] = seq->state - 1;
        to[2 * n + i] = it->n_tokens - it->n_draft;
        to[3 * n + i] = seq->back - 1;
        return;
    }
    if (it->save_at && states_available(st->kv->states) > st->owed)
        saved = kvcache_save(st->kv, seq, seq->n_tokens + it->save_at);
    if (it->tokens[0] < 0 && states_available(st->kv->states) > st->owed)
        kvcache_fork(st->kv, seq); /* the sequence may turn out to have ended before this step */
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

/* Adds a row to the current sequence: its token at position p. Returns the row. */
static int add_row(struct stepper *st, const struct kv_seq *seq, int32_t token, int p)
{
    int row = st->b.n_tokens++, len = st->kv->page_len;
    st->tokens[row] = token;
    st->pos[row] = p;
    st->slot[row] = seq->pages[p / len] * len + p % len;
    return row;
}

/* Ends the current sequence after its n rows, the last at position n_kv - 1. */
static void end_seq(struct stepper *st, const struct kv_seq *seq, int n, int n_kv)
{
    struct batch *b = &st->b;
    memcpy(st->pages + (size_t)b->n_seqs * (size_t)st->max_pages, seq->pages,
           (size_t)seq->n_pages * sizeof *seq->pages);
    if (st->marks)
        memcpy(st->marks + (size_t)b->n_seqs * (size_t)st->max_pages, seq->marks,
               (size_t)seq->n_pages * sizeof *seq->marks);
    st->kv_len[b->n_seqs++] = n_kv;
    st->q_start[b->n_seqs] = b->n_tokens;
    b->n_decode += n == 1;
}

/* Sets the embedding and the M-RoPE position of row `row`, which is position p of its sequence. */
static void add_beside(struct stepper *st, const struct prompt_rows *r, int row, int p)
{
    struct batch *b = &st->b;
    bool in_prompt = r && p < r->n;
    if (in_prompt && r->embeds && r->embeds[p]) {
        CHECK(b->n_embeds < st->limits.max_embeds, "%d embedding rows", b->n_embeds);
        st->tokens[row] = st->m->net.n_vocab + b->n_embeds;
        st->embeds[b->n_embeds++] = r->embeds[p];
    }
    for (int k = 0; st->spans && k < 2; k++)
        st->spans[2 * row + k] = in_prompt && r->spans ? r->spans[2 * p + k] : 0;
    for (int k = 0; st->rope_pos && k < 3; k++)
        st->rope_pos[3 * row + k] = in_prompt && r->rope_pos ? r->rope_pos[3 * p + k]
                                    : r && !in_prompt        ? p + r->rope_delta
                                                             : p;
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
    it->number = b->n_seqs;
    it->wrong = 0;
    for (int i = 0; i < it->n_tokens; i++) {
        bool last = i >= it->n_tokens - 1 - it->n_draft;
        CHECK(it->tokens[i] < st->m->config.n_vocab && (it->tokens[i] >= 0 || st->n_started),
              "token %d", it->tokens[i]);
        int row = add_row(st, seq, it->tokens[i], first + i);
        add_beside(st, it->rows, row, first + i);
        if (st->types)
            st->types[row] = it->types ? it->types[i] : 0;
        st->after[row] = it->after;
        if (it->want == LOGITS_ALL || (it->want == LOGITS_LAST && last) ||
            (it->want == LOGITS_FIRST && i == 0))
            st->out_rows[b->n_out++] = row;
    }
    add_states(st, it, b->n_seqs);
    end_seq(st, seq, it->n_tokens, first + it->n_tokens);
}

/* Lists the rows of each adapter. Items have their rows in the order of add_item. */
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

/* Reserves state slots before rows are laid out. Drops drafts for which no slot can keep the state before them. */
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

bool step_follow(struct stepper *st, const struct batch *b, uint64_t key, struct error *err)
{
    return executor_follow(st->executor, b, key, err);
}

void stepper_check_marks(struct stepper *st, bool on)
{
    st->unchecked = !on;
}

/* The marks that the step expects of its pages. */
static struct batch_canary *add_canary(struct stepper *st)
{
    struct batch_canary *c = &st->canary[st->turn++ % 2];
    if (!st->kv->canary || st->unchecked)
        return NULL;
    canary_take(st->kv->canary, c);
    c->expected = st->marks;
    st->b.canary = c;
    return c;
}

bool step_start(struct stepper *st, struct step_item *items, int n_items, struct error *err)
{
    CHECK(st->n_started < (st->m->be->async ? 2 : 1), "%d steps are in flight", st->n_started);
    if (!check_room(st, items, n_items, err))
        return false;
    begin_batch(st, st->limits.keep);
    st->drafted = false;
    st->b.types = st->types;
    st->b.rope_pos = st->rope_pos;
    st->b.spans = st->spans;
    st->b.embeds = st->embeds;
    reserve_states(st, items, n_items);
    for (int pass = 0; pass < 2; pass++) /* decodes first */
        for (int i = 0; i < n_items; i++)
            if ((items[i].n_tokens == 1) == (pass == 0))
                add_item(st, &items[i]);
    if (st->loras)
        add_loras(st, items, n_items);
    /* Steps of decodes and drafts only repeat the same ops, so a backend may record them. */
    int n_draft = 0;
    for (int i = 0; i < n_items; i++)
        n_draft += items[i].n_draft;
    struct batch_canary *canary = add_canary(st);
    bool repeats = st->b.n_tokens == st->b.n_seqs + n_draft && st->b.n_out == st->b.n_tokens;
    executor_start(st->executor, &st->b, st->tokens, st->after,
                   repeats ? (uint64_t)st->b.n_seqs : 0);
    for (int i = 0; i < n_items; i++)
        kvcache_advance(st->kv, items[i].seq, items[i].n_tokens);
    st->started[st->n_started++] = (struct started_step){items, n_items, canary};
    return true;
}

void step_sample(struct stepper *st)
{
    CHECK(st->n_started > 0, "no step is in flight");
    const struct started_step *s = &st->started[st->n_started - 1];
    memset(st->choices, 0, (size_t)st->b.n_out * sizeof *st->choices);
    for (int i = 0; i < s->n_items; i++) {
        const struct step_item *it = &s->items[i];
        int n = it->seq && it->want != LOGITS_NONE ? 1 + (it->chained ? it->n_draft : 0) : 0;
        for (int k = 0; k < n; k++)
            st->choices[step_chosen_row(it) + k] = (struct row_choice){it->sampler, &it->seq};
    }
    executor_sample(st->executor, st->choices);
}

int32_t step_token(const struct stepper *st, int row)
{
    return executor_token(st->executor, row);
}

void step_probs(struct stepper *st, int row, struct sample_probs *out)
{
    executor_probs(st->executor, row, out);
}

bool step_finish(struct stepper *st, struct error *err)
{
    CHECK(st->n_started > 0, "no step is in flight");
    struct step_item *items = st->started[0].items;
    int n_items = st->started[0].n_items;
    const struct batch_canary *canary = st->started[0].canary;
    bool ok = executor_end(st->executor, err);
    st->started[0] = st->started[1];
    st->n_started--;
    for (int i = 0; i < n_items; i++) {
        struct step_item *it = &items[i];
        if (!it->seq)
            continue;
        if (!ok)
            kvcache_cut(st->kv, it->seq, it->seq->n_tokens - it->n_tokens);
        else if (it->want != LOGITS_NONE)
            it->token = step_token(st, step_chosen_row(it));
        it->wrong = ok && canary ? canary->wrong[it->number] : 0;
    }
    return ok;
}

bool step_run(struct stepper *st, struct step_item *items, int n_items, struct error *err)
{
    if (!step_start(st, items, n_items, err))
        return false;
    step_sample(st);
    bool ok = step_finish(st, err);
    for (int i = 0; ok && i < n_items; i++)
        ok = step_item_ok(&items[i], err);
    return ok;
}

bool step_item_ok(const struct step_item *it, struct error *err)
{
    return !it->wrong ||
           error_set(err, "page %d of the sequence in the KV cache belongs to another one",
                     it->wrong - 1);
}

void step_logits(struct stepper *st, int row, float *out)
{
    executor_logits(st->executor, row, out);
}

bool step_ok(const struct stepper *st, struct error *err)
{
    const struct error *failure = st->m->be->failure;
    if (failure && err)
        *err = *failure;
    return !failure;
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
    for (int k = 0; st->kv->states && k < 4; k++) /* the block has no states */
        st->states[k * st->limits.max_seqs + seq] = k == 2 ? 0 : -1;
    end_seq(st, it->seq, it->n, it->first + it->n);
}

bool step_draft(struct stepper *st, struct draft_item *items, int n_items, struct error *err)
{
    CHECK(st->n_started == 0 && st->from, "no step to draft from");
    const struct mtp *m = &st->m->net.mtp;
    begin_batch(st, true);
    st->b.from = st->from;
    st->b.continues = m->n_taps && st->drafted;
    st->drafted = true;
    for (int pass = 0; pass < 2; pass++) /* single rows first */
        for (int i = 0; i < n_items; i++)
            if ((items[i].n == 1) == (pass == 0))
                add_draft(st, &items[i]);
    uint64_t key = BLOCK_KEY | (st->b.continues ? NEXT_KEY : 0) | (uint64_t)st->b.n_seqs;
    for (int i = 0; i < n_items; i++)
        key = items[i].n > BLOCK_ROWS ? 0 : key;
    bool ok = executor_draft(st->executor, &st->b, key, st->greedy, err);
    for (int i = 0; ok && i < n_items; i++)
        items[i].token = items[i].want ? mtp_token(m, step_token(st, items[i].row)) : -1;
    return ok;
}
