/* Cuts a step into parts: see parts.h. */
#include "dist/parts.h"
#include "base/mem.h"

void batch_part_init(struct batch_part *t, int max_seqs)
{
    size_t seqs = (size_t)max_seqs + 1;
    t->max_seqs = max_seqs;
    t->q_start = mem_zalloc(seqs, sizeof(int32_t));
    t->kv_len = mem_zalloc(seqs, sizeof(int32_t));
    t->states = mem_zalloc(4 * seqs, sizeof(int32_t));
    t->loras = mem_zalloc(seqs * LORA_MAX_USES, sizeof *t->loras);
}

void batch_part_clear(struct batch_part *t)
{
    mem_free(t->q_start);
    mem_free(t->kv_len);
    mem_free(t->states);
    mem_free(t->loras);
    *t = (struct batch_part){0};
}

bool parts_whole_seqs(const struct network *net)
{
    bool whole = false;
    for (int i = 0; i < net->n_layers; i++) {
        const struct mixer *x = &net->layers[i].mixer;
        whole |= x->kind == MIXER_ATTENTION && x->attention.bidirectional;
    }
    return whole;
}

int parts_cut(const struct batch *b, bool whole_seqs, int at, int after)
{
    int i = 0;
    while (i < b->n_seqs - 1 && b->q_start[i + 1] <= at)
        i++;
    int first = b->q_start[i] > after ? b->q_start[i] : after, last = b->q_start[i + 1];
    if (!whole_seqs && at - first >= PARTS_ROWS && last - at >= PARTS_ROWS)
        return at;
    bool up = last < b->n_tokens && (first <= after || last - at < at - first);
    at = up ? last : first;
    return at > after && at < b->n_tokens ? at : 0;
}

/* The adapters of the part's rows. */
static void take_loras(struct batch_part *t, const struct batch *b, int first, int last)
{
    t->b.loras = t->loras;
    t->b.n_loras = 0;
    for (int i = 0; i < b->n_loras; i++) {
        struct lora_use u = b->loras[i];
        int from = u.first > first ? u.first : first,
            to = u.first + u.n < last ? u.first + u.n : last;
        if (from < to)
            t->loras[t->b.n_loras++] =
                (struct lora_use){u.adapter, from - first, to - from, u.scale};
    }
}

/* The part's rows that need logits. */
static void take_outs(struct batch_part *t, const struct batch *b, int first, int last,
                      int32_t *out_rows)
{
    t->out = t->b.n_out = 0;
    while (t->out < b->n_out && b->out_rows[t->out] < first)
        t->out++;
    t->b.out_rows = out_rows + t->out;
    for (int i = t->out; i < b->n_out && b->out_rows[i] < last; i++)
        out_rows[t->out + t->b.n_out++] = b->out_rows[i] - first;
}

void batch_part_take(struct batch_part *t, const struct batch *b, int first, int last,
                     int32_t *out_rows)
{
    size_t n = (size_t)t->max_seqs;
    int32_t *states[4] = {t->states, t->states + n, t->states + 2 * n, t->states + 3 * n};
    t->b = *b;
    t->row = first;
    t->b.tokens += first;
    t->b.pos += first;
    t->b.rope_pos += t->b.rope_pos ? 3 * (size_t)first : 0;
    t->b.slot += first;
    t->b.types += b->types ? first : 0;
    t->b.n_tokens = last - first;
    t->b.n_seqs = t->b.n_decode = 0;
    t->b.q_start = t->q_start;
    t->b.kv_len = t->kv_len;
    t->q_start[0] = 0;
    for (int i = 0; i < b->n_seqs; i++) {
        int from = b->q_start[i] > first ? b->q_start[i] : first;
        int to = b->q_start[i + 1] < last ? b->q_start[i + 1] : last;
        if (from >= to)
            continue;
        int k = t->b.n_seqs++, before = from - b->q_start[i];
        if (k == 0)
            t->b.pages = b->pages + (size_t)i * (size_t)b->max_pages;
        t->q_start[k + 1] = to - first;
        t->kv_len[k] = b->kv_len[i] - (b->q_start[i + 1] - to);
        t->b.n_decode += to - from == 1;
        if (!b->state_in)
            continue;
        int save = b->save_rows[i] - before;
        bool saves = save > 0 && save <= to - from;
        states[0][k] = before ? b->state_out[i] : b->state_in[i];
        states[1][k] = b->state_out[i];
        states[2][k] = saves ? save : 0;
        states[3][k] = saves ? b->save_state[i] : -1;
    }
    take_loras(t, b, first, last);
    take_outs(t, b, first, last, out_rows);
    if (b->state_in) {
        t->b.state_in = states[0];
        t->b.state_out = states[1];
        t->b.save_rows = states[2];
        t->b.save_state = states[3];
    }
}
