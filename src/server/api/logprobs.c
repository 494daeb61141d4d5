/*
 * Log-probabilities, stored as eight-byte entries and encoded as JSON only when the client reads them,
 * so that twenty alternatives per token stay small.
 */
#include "server/api/server_int.h"
#include "base/mem.h"

#include <math.h>

void logprobs_add(struct logprobs *l, const struct engine_event *ev, int n_top)
{
    l->stride = n_top + 1;
    if (l->n == l->cap) {
        l->cap = l->cap ? l->cap * 2 : 16;
        l->v = mem_realloc(l->v, (size_t)l->cap * (size_t)l->stride, sizeof *l->v);
    }
    struct token_prob *row = l->v + (size_t)l->n++ * (size_t)l->stride;
    row[0] = (struct token_prob){ev->token, ev->logprob};
    for (int i = 0; i < n_top; i++)
        row[1 + i] = i < ev->n_top ? ev->top[i] : (struct token_prob){-1, 0};
}

void logprobs_clear(struct logprobs *l)
{
    mem_free(l->v);
    *l = (struct logprobs){0};
}

size_t logprobs_kept(const struct logprobs *l)
{
    return (size_t)(l->n - l->sent) * (size_t)l->stride * sizeof *l->v;
}

/* Removes the first `sent` entries. */
static void forget_sent(struct logprobs *l)
{
    if (l->sent < l->n)
        return;
    l->n = l->sent = 0;
    if (l->cap > 4096) {
        size_t at = l->at;
        logprobs_clear(l);
        l->at = at;
    }
}

/* {"token": "...", "logprob": x, "bytes": [...]} without the closing brace */
static void add_token(struct buf *b, const struct tokenizer *t, const struct token_prob *p)
{
    size_t n = 0;
    const char *piece = t ? tokenizer_piece(t, p->token, &n) : "";
    buf_adds(b, "{\"token\":");
    jsonout_string(b, piece, n);
    buf_adds(b, ",\"logprob\":");
    jsonout_number(b, p->logprob < -9999.0f ? -9999.0 : (double)p->logprob);
    buf_adds(b, ",\"bytes\":[");
    for (size_t i = 0; i < n; i++)
        buf_addf(b, i ? ",%d" : "%d", (unsigned char)piece[i]);
    buf_addc(b, ']');
}

/* An entry in the format of chat. */
static void add_object(struct buf *b, const struct tokenizer *t, const struct token_prob *row,
                       int stride)
{
    add_token(b, t, row);
    buf_adds(b, ",\"top_logprobs\":[");
    for (int i = 1; i < stride && row[i].token >= 0; i++) {
        if (i > 1)
            buf_addc(b, ',');
        add_token(b, t, &row[i]);
        buf_addc(b, '}');
    }
    buf_adds(b, "]}");
}

static void add_tops(struct buf *b, const struct tokenizer *t, const struct token_prob *row,
                     int stride)
{
    if (isnan(row->logprob)) { /* the first token of a prompt has none */
        buf_adds(b, "null");
        return;
    }
    buf_addc(b, '{');
    for (int i = 1; i < stride && row[i].token >= 0; i++) {
        size_t n = 0;
        const char *piece = t ? tokenizer_piece(t, row[i].token, &n) : "";
        if (i > 1)
            buf_addc(b, ',');
        jsonout_string(b, piece, n);
        buf_addc(b, ':');
        jsonout_number(b, (double)row[i].logprob);
    }
    buf_addc(b, '}');
}

static void add_entry(struct logprobs *l, enum logprobs_field field, int i,
                      const struct tokenizer *t, struct buf *b)
{
    const struct token_prob *row = l->v + (size_t)i * (size_t)l->stride;
    size_t n = 0;
    const char *piece = t ? tokenizer_piece(t, row->token, &n) : "";
    switch (field) {
    case LOGPROBS_OBJECTS:
        add_object(b, t, row, l->stride);
        break;
    case LOGPROBS_TOKENS:
        jsonout_string(b, piece, n);
        break;
    case LOGPROBS_VALUES:
        jsonout_number(b, (double)row->logprob);
        break;
    case LOGPROBS_TOPS:
        add_tops(b, t, row, l->stride);
        break;
    case LOGPROBS_OFFSETS:
        buf_addf(b, "%zu", l->at);
        if (t && tokenizer_kind(t, row->token) == TOKEN_CONTROL)
            n = 0; /* not in the text */
        for (size_t k = 0; k < n; k++)
            l->at += (piece[k] & 0xc0) != 0x80; /* counts code points */
        break;
    }
}

void logprobs_list(const struct logprobs *l, int from, const struct tokenizer *t, struct buf *b)
{
    for (int i = from; i < l->n; i++) {
        if (i > from)
            buf_addc(b, ',');
        add_object(b, t, l->v + (size_t)i * (size_t)l->stride, l->stride);
    }
}

bool logprobs_write(struct logprobs *l, bool chat, int upto, const struct tokenizer *t,
                    struct buf *b, size_t room)
{
    /* The first list is the one of chat, the others are those of completions. */
    static const char *const opens[] = {[LOGPROBS_OBJECTS] = "{\"content\":[",
                                        [LOGPROBS_TOKENS] = "{\"tokens\":[",
                                        [LOGPROBS_VALUES] = "],\"token_logprobs\":[",
                                        [LOGPROBS_TOPS] = "],\"top_logprobs\":[",
                                        [LOGPROBS_OFFSETS] = "],\"text_offset\":["};
    int first = chat ? LOGPROBS_OBJECTS : LOGPROBS_TOKENS;
    int end = chat ? LOGPROBS_OBJECTS + 1 : LOGPROBS_OFFSETS + 1;
    for (; first + l->field < end; l->field++, l->entry = l->sent, l->opened = false) {
        if (!l->opened)
            buf_adds(b, opens[first + l->field]);
        l->opened = true;
        for (; l->entry < upto; l->entry++) {
            if (b->len >= room)
                return false;
            if (l->entry > l->sent)
                buf_addc(b, ',');
            add_entry(l, (enum logprobs_field)(first + l->field), l->entry, t, b);
        }
    }
    buf_adds(b, chat ? "],\"refusal\":null}" : "]}");
    l->field = 0;
    l->sent = upto;
    forget_sent(l);
    l->entry = l->sent;
    return true;
}
