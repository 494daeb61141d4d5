/* Messages from rank 0 to the others: see follow.h. */
#include "dist/follow.h"
#include "base/mem.h"

#include <string.h>

enum message_kind { MESSAGE_END, MESSAGE_OPEN, MESSAGE_STEP, MESSAGE_ALIVE };

enum { SHORT_INTS = 1000 }; /* a step with few rows fits one message */
enum { LORA_INTS = sizeof(struct lora_use) / sizeof(int32_t) };

/* The header of a message. A step's arrays follow it. */
struct message_head {
    int32_t kind;
    int32_t n_tokens, n_seqs, n_decode, n_out, n_pages; /* n_pages: of all sequences */
    int32_t n_loras;
    int32_t has_types, has_states, has_from, keep, deterministic;
    int32_t page_len;
    int32_t n_ints; /* in its arrays; MESSAGE_OPEN: bytes */
    uint64_t key;
};

struct message {
    struct message_head head;
    int32_t ints[SHORT_INTS];
};

static size_t bytes_of(size_t ints)
{
    return ints * sizeof(int32_t);
}

/* A message is kept until all ranks have received it, which may be after the next one was started. */
struct follow_sender {
    struct ranks *r;
    int page_len;
    struct follow_message {
        struct message m;
        int32_t *ints; /* arrays of a step with many rows */
        struct ranks_wait *head, *rest;
    } last[2];
    unsigned turn;
};

struct follow_sender *follow_sender_new(struct ranks *r, const struct bounds *bounds)
{
    if (r->rank > 0)
        return NULL;
    struct follow_sender *s = mem_zalloc(1, sizeof *s);
    size_t tokens = (size_t)bounds->max_tokens, seqs = (size_t)bounds->max_seqs;
    size_t ints = 5 * tokens + seqs * (6 + (size_t)bounds->max_pages + LORA_MAX_USES * LORA_INTS) +
                  1 + (size_t)bounds->max_out;
    s->r = r;
    s->page_len = bounds->page_len;
    for (int i = 0; i < 2; i++)
        s->last[i].ints = mem_zalloc(ints, sizeof(int32_t));
    return s;
}

void follow_sender_free(struct follow_sender *s)
{
    for (int i = 0; s && i < 2; i++) {
        ranks_wait_end(s->r, &s->last[i].head);
        ranks_wait_end(s->r, &s->last[i].rest);
        mem_free(s->last[i].ints);
    }
    mem_free(s);
}

bool follow_send_open(struct ranks *r, void *what, size_t bytes)
{
    struct message m = {.head = {.kind = MESSAGE_OPEN, .n_ints = (int32_t)bytes}};
    return ranks_broadcast(r, &m, sizeof m, false) && ranks_broadcast(r, what, bytes, false);
}

void follow_send_end(struct ranks *r)
{
    struct message m = {.head.kind = MESSAGE_END};
    if (!r || r->rank > 0)
        return;
    ranks_broadcast(r, &m, sizeof m, false);
    r->following = false;
}

void follow_send_alive(struct ranks *r)
{
    struct message m = {.head.kind = MESSAGE_ALIVE};
    if (ranks_broadcast(r, &m, sizeof m, false))
        ranks_barrier(r);
}

static int pages_of(const struct batch *b, int seq, int page_len)
{
    return (b->kv_len[seq] + page_len - 1) / page_len;
}

/* Packs and unpacks the arrays of a batch, back to back. */
struct packer {
    int32_t *at;
};

static void put(struct packer *p, const int32_t *from, int n)
{
    memcpy(p->at, from, bytes_of((size_t)n));
    p->at += n;
}

static const int32_t *take(struct packer *p, int n)
{
    p->at += n;
    return p->at - n;
}

void follow_send_step(struct follow_sender *s, const struct batch *b, struct follow_step how)
{
    int page_len = s->page_len;
    struct follow_message *now = &s->last[s->turn++ % 2];
    ranks_wait_end(s->r, &now->head);
    ranks_wait_end(s->r, &now->rest);
    struct message_head *h = &now->m.head;
    *h = (struct message_head){.kind = MESSAGE_STEP,
                               .n_tokens = b->n_tokens,
                               .n_seqs = b->n_seqs,
                               .n_decode = b->n_decode,
                               .n_out = b->n_out,
                               .n_loras = b->n_loras,
                               .has_types = b->types != NULL,
                               .has_states = b->state_in != NULL,
                               .has_from = b->from != NULL,
                               .keep = b->keep,
                               .deterministic = how.deterministic,
                               .page_len = page_len,
                               .key = how.key};
    for (int i = 0; i < b->n_seqs; i++)
        h->n_pages += pages_of(b, i, page_len);
    h->n_ints = (3 + h->has_types + h->has_from) * b->n_tokens +
                (2 + 4 * h->has_states) * b->n_seqs + 1 + b->n_out + h->n_pages +
                LORA_INTS * b->n_loras;
    bool is_short = h->n_ints <= SHORT_INTS;
    int32_t *ints = is_short ? now->m.ints : now->ints;
    struct packer p = {ints};
    put(&p, b->tokens, b->n_tokens);
    put(&p, b->pos, b->n_tokens);
    put(&p, b->slot, b->n_tokens);
    put(&p, b->q_start, b->n_seqs + 1);
    put(&p, b->kv_len, b->n_seqs);
    put(&p, b->out_rows, b->n_out);
    if (b->types)
        put(&p, b->types, b->n_tokens);
    if (b->from)
        put(&p, b->from, b->n_tokens);
    if (b->state_in) {
        put(&p, b->state_in, b->n_seqs);
        put(&p, b->state_out, b->n_seqs);
        put(&p, b->save_rows, b->n_seqs);
        put(&p, b->save_state, b->n_seqs);
    }
    if (b->n_loras) {
        memcpy(p.at, b->loras, bytes_of(LORA_INTS * (size_t)b->n_loras));
        take(&p, LORA_INTS * b->n_loras);
    }
    for (int i = 0; i < b->n_seqs; i++)
        put(&p, b->pages + (size_t)i * (size_t)b->max_pages, pages_of(b, i, page_len));
    now->head = ranks_broadcast_begin(s->r, &now->m, sizeof now->m);
    if (!is_short)
        now->rest = ranks_broadcast_begin(s->r, ints, bytes_of((size_t)h->n_ints));
}

/* The followers' side */

struct follower {
    struct ranks *r;
    const struct follow_ops *ops;
    void *opened; /* NULL: nothing opened yet */
    struct message m;
    int32_t *ints, *pages;
    struct lora_use *loras;
    size_t n_ints, n_pages, n_loras;
};

static int32_t *grow(int32_t **a, size_t *have, size_t n)
{
    if (*have < n) {
        *a = mem_realloc(*a, n, sizeof **a);
        *have = n;
    }
    return *a;
}

static void take_loras(struct follower *f, struct packer *p, struct batch *b)
{
    size_t n = (size_t)b->n_loras;
    if (f->n_loras < n) {
        f->loras = mem_realloc(f->loras, n, sizeof *f->loras);
        f->n_loras = n;
    }
    if (n)
        memcpy(f->loras, take(p, LORA_INTS * b->n_loras), n * sizeof *f->loras);
    b->loras = f->loras;
}

/* A step as rank 0 laid it out. */
static void run_step(struct follower *f)
{
    const struct message_head *h = &f->m.head;
    int page_len = h->page_len, max_pages = 1;
    int32_t *ints = f->m.ints;
    if (h->n_ints > SHORT_INTS) {
        ints = grow(&f->ints, &f->n_ints, (size_t)h->n_ints);
        if (!ranks_broadcast(f->r, ints, bytes_of((size_t)h->n_ints), false))
            return;
    }
    struct packer p = {ints};
    struct batch b = {.n_tokens = h->n_tokens,
                      .n_seqs = h->n_seqs,
                      .n_decode = h->n_decode,
                      .n_out = h->n_out,
                      .n_loras = h->n_loras,
                      .keep = h->keep};
    b.tokens = take(&p, b.n_tokens);
    b.pos = take(&p, b.n_tokens);
    b.slot = take(&p, b.n_tokens);
    b.q_start = take(&p, b.n_seqs + 1);
    b.kv_len = take(&p, b.n_seqs);
    b.out_rows = take(&p, b.n_out);
    b.types = h->has_types ? take(&p, b.n_tokens) : NULL;
    b.from = h->has_from ? take(&p, b.n_tokens) : NULL;
    if (h->has_states) {
        b.state_in = take(&p, b.n_seqs);
        b.state_out = take(&p, b.n_seqs);
        b.save_rows = take(&p, b.n_seqs);
        b.save_state = take(&p, b.n_seqs);
    }
    take_loras(f, &p, &b);
    for (int i = 0; i < b.n_seqs; i++) {
        int n = pages_of(&b, i, page_len);
        max_pages = n > max_pages ? n : max_pages;
    }
    /* max_pages must be the step's on every rank: a backend may size by it. */
    size_t n_pages = (size_t)b.n_seqs * (size_t)max_pages;
    int32_t *pages = grow(&f->pages, &f->n_pages, n_pages);
    memset(pages, 0, bytes_of(n_pages));
    for (int i = 0; i < b.n_seqs; i++) {
        int n = pages_of(&b, i, page_len);
        memcpy(pages + (size_t)i * (size_t)max_pages, take(&p, n), bytes_of((size_t)n));
    }
    b.pages = pages;
    b.max_pages = max_pages;
    struct error err = {0};
    if (!f->ops->step(f->opened, &b, (struct follow_step){h->key, h->deterministic}, &err))
        ranks_fail(f->r, err.msg);
}

static bool open(struct follower *f)
{
    size_t bytes = (size_t)f->m.head.n_ints;
    void *what = mem_zalloc(1, bytes);
    if (ranks_broadcast(f->r, what, bytes, false))
        f->opened = f->ops->open(f->r, what, bytes);
    mem_free(what);
    return f->opened != NULL;
}

int follow(struct ranks *r, const struct follow_ops *ops)
{
    struct follower f = {.r = r, .ops = ops};
    bool ok = true;
    while (ok && ranks_broadcast(r, &f.m, sizeof f.m, true) && f.m.head.kind != MESSAGE_END) {
        if (f.m.head.kind == MESSAGE_OPEN)
            ok = !f.opened && open(&f);
        else if (f.m.head.kind == MESSAGE_ALIVE)
            ranks_barrier(r);
        else if (f.opened)
            run_step(&f);
        ok = ok && ranks_ok(r, NULL);
    }
    mem_free(f.ints);
    mem_free(f.pages);
    mem_free(f.loras);
    ops->close(f.opened);
    return ok && ranks_ok(r, NULL) ? 0 : 1;
}
