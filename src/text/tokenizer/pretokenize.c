/*
 * The pre-tokenizer's steps. Owns their parameters and the handling of delimiters; knows nothing of
 * tokens.
 */
#include "text/tokenizer/pretokenize.h"
#include "base/mem.h"
#include "text/tokenizer/normalize.h"
#include "text/tokenizer/unicode.h"
#include "text/tokenizer/vocab.h"

#include <string.h>

void pre_words_clear(struct pre_words *w)
{
    mem_free(w->list);
    mem_free(w->next);
    buf_clear(&w->bufs[0]);
    buf_clear(&w->bufs[1]);
    buf_clear(&w->spelled);
    *w = (struct pre_words){0};
}

struct pre_step *pretokenizer_add(struct pretokenizer *pt, enum pre_kind kind)
{
    pt->steps = mem_realloc(pt->steps, (size_t)pt->n + 1, sizeof *pt->steps);
    struct pre_step *s = &pt->steps[pt->n++];
    *s = (struct pre_step){.kind = kind, .behavior = CUT_ISOLATED, .cp = UINT32_MAX};
    return s;
}

void pretokenizer_finish(struct pretokenizer *pt)
{
    pt->only = SPLIT_NONE;
    if (pt->n < 1 || pt->n > 2 || (pt->n == 2 && pt->steps[1].kind != PRE_BYTES))
        return;
    const struct pre_step *s = &pt->steps[0];
    if (s->kind == PRE_REGEX && s->behavior == CUT_ISOLATED)
        pt->only = s->split;
}

void pretokenizer_clear(struct pretokenizer *pt)
{
    for (int i = 0; i < pt->n; i++) {
        regex_free(pt->steps[i].re);
        buf_clear(&pt->steps[i].text);
    }
    mem_free(pt->steps);
    *pt = (struct pretokenizer){0};
}

/* ---------------------------------------------------------------------------------- one cut */

static void word_add(struct pre_words *w, size_t at, size_t len, bool first, bool joined)
{
    if (!len)
        return;
    if (w->n_next == w->next_cap) {
        w->next_cap = w->next_cap ? w->next_cap * 2 : 64;
        w->next = mem_realloc(w->next, w->next_cap, sizeof *w->next);
    }
    w->next[w->n_next++] = (struct pre_word){at, len, first, joined};
}

/* Collects the segments of one word in order: delimiters and the text between them. */
struct word_cutter {
    struct pre_words *w;
    enum cut_behavior behavior;
    bool invert;
    bool first, joined;    /* flags of the word, passed on to its first segment */
    size_t base;           /* offset of the word in the text */
    size_t from, to;       /* the segment being extended (to == from: none) */
    bool open, open_match; /* a segment is open; it is a delimiter */
    const char *spelled;   /* if set, offsets refer to this spelling of the word, not to the word */
    size_t spelled_at, raw_at;
};

/* Maps an offset in the spelling to one in the raw word. Each byte is spelled as one character. */
static size_t cutter_raw(struct word_cutter *c, size_t at)
{
    if (!c->spelled)
        return at;
    while (c->spelled_at < at) {
        c->spelled_at += (size_t)utf8_len(c->spelled[c->spelled_at]);
        c->raw_at++;
    }
    return c->raw_at;
}

static void cutter_flush(struct word_cutter *c)
{
    if (c->open)
        word_add(c->w, c->base + c->from, c->to - c->from, c->first && c->from == 0,
                 c->joined && c->from == 0);
    c->open = false;
}

static void cutter_put(struct word_cutter *c, size_t from, size_t to, bool match)
{
    match ^= c->invert;
    from = cutter_raw(c, from);
    to = cutter_raw(c, to);
    bool extend = false, drop = false;
    switch (c->behavior) {
    case CUT_REMOVED:
        drop = match;
        break;
    case CUT_ISOLATED:
        break;
    case CUT_MERGED_WITH_PREVIOUS: /* joins the text before, not a delimiter */
        extend = c->open && match && !c->open_match;
        break;
    case CUT_MERGED_WITH_NEXT:
        extend = c->open && !match && c->open_match;
        break;
    case CUT_CONTIGUOUS:
        extend = c->open && match == c->open_match;
        break;
    }
    if (extend) {
        c->to = to;
        c->open_match = match;
        return;
    }
    cutter_flush(c);
    if (drop)
        return;
    c->from = from;
    c->to = to;
    c->open_match = match;
    c->open = true;
}

static bool cut_regex(const struct pre_step *s, struct word_cutter *c, struct regex_scratch *re,
                      const char *p, size_t n, struct error *err)
{
    if (s->split) { /* hand-written splitters match all of the text, word after word */
        for (size_t at = 0; at < n;) {
            size_t len = split_next(s->split, p + at, n - at);
            cutter_put(c, at, at + len, true);
            at += len;
        }
        return true;
    }
    struct regex_iter it = regex_iter_start();
    size_t at = 0, start, end;
    enum regex_result r;
    while ((r = regex_next(s->re, re, &it, p, n, &start, &end, err)) == REGEX_FOUND) {
        if (at != start)
            cutter_put(c, at, start, false);
        cutter_put(c, start, end, true);
        at = end;
    }
    if (at != n)
        cutter_put(c, at, n, false);
    return r != REGEX_ERROR;
}

static inline bool is_ascii_punct(uint32_t cp)
{
    return cp < 128 && (UC_PUNCT | UC_SYMBOL) >> unicode_ascii[cp] & 1;
}

static void cut_chars(const struct pre_step *s, struct word_cutter *c, const char *p, size_t n)
{
    size_t plain = 0;
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        size_t len = (size_t)utf8_next(p + i, &cp);
        if (unicode_is(cp, s->set) || cp == s->cp || (s->ascii_punct && is_ascii_punct(cp))) {
            if (plain != i)
                cutter_put(c, plain, i, false);
            cutter_put(c, i, i + len, true);
            plain = i + len;
        }
        i += len;
    }
    if (plain != n)
        cutter_put(c, plain, n, false);
}

static bool step_cut(const struct pre_step *s, struct pre_words *w, struct regex_scratch *re,
                     bool spelled, struct error *err)
{
    for (size_t i = 0; i < w->n; i++) {
        const char *p = w->text + w->list[i].at;
        size_t n = w->list[i].len;
        struct word_cutter c = {.w = w,
                                .behavior = s->behavior,
                                .invert = s->invert,
                                .first = w->list[i].first,
                                .joined = w->list[i].joined,
                                .base = w->list[i].at};
        if (spelled) {
            buf_reset(&w->spelled);
            bytelevel_encode(p, n, &w->spelled);
            c.spelled = p = w->spelled.p;
            n = w->spelled.len;
        }
        if (s->kind == PRE_CHARS)
            cut_chars(s, &c, p, n);
        else if (!cut_regex(s, &c, re, p, n, err))
            return error_prefix(err, "pre_tokenizer");
        cutter_flush(&c);
    }
    return true;
}

/* ---------------------------------------------------------------------- steps that change text */

static bool step_rewrite(const struct pre_step *s, struct pre_words *w, size_t limit,
                         struct buf *out, struct error *err)
{
    buf_reset(out);
    for (size_t i = 0; i < w->n; i++) {
        const char *p = w->text + w->list[i].at;
        size_t n = w->list[i].len, at = out->len, most;
        /* worst case: every byte is a space and becomes `text` */
        if (!mul_size(n + 1, s->text.len + 2, &most) || at > limit || most > limit - at) {
            size_t spaces = 1;
            for (size_t k = 0; k < n; k++)
                spaces += p[k] == ' ';
            if (!mul_size(spaces, s->text.len, &most) || at > limit || most > limit - at ||
                2 * n > limit - at - most)
                return error_set(err, "pre_tokenizer: the text grows beyond %zu bytes", limit);
        }
        if (s->kind == PRE_PREFIX) {
            if (p[0] != ' ' && !w->list[i].joined)
                buf_addc(out, ' ');
            buf_add(out, p, n);
        } else if (s->kind == PRE_SPELL) {
            bytelevel_encode(p, n, out);
        } else {
            bool has = *p == ' ' || (n >= s->text.len && !memcmp(p, s->text.p, s->text.len));
            if (!has && !w->list[i].joined &&
                (s->scheme == METASPACE_ALWAYS ||
                 (s->scheme == METASPACE_FIRST && w->list[i].first)))
                buf_add(out, s->text.p, s->text.len);
            for (size_t k = 0; k < n; k++) {
                if (p[k] == ' ')
                    buf_add(out, s->text.p, s->text.len);
                else
                    buf_addc(out, p[k]);
            }
        }
        word_add(w, at, out->len - at, w->list[i].first, w->list[i].joined);
    }
    w->text = out->p;
    return true;
}

bool pretokenizer_run(const struct pretokenizer *pt, struct pre_words *w, struct regex_scratch *re,
                      const char *text, size_t n, bool first, bool joined, struct error *err)
{
    w->text = text;
    w->n_next = 0;
    word_add(w, 0, n, first, joined);
    int which = 0;
    size_t limit = norm_limit(n);
    bool spelled = false;
    for (int i = -1; i < pt->n; i++) {
        const struct pre_step *s = i < 0 ? NULL : &pt->steps[i];
        if (s) {
            if (!budget_spend(w->budget, w->n + n / 8))
                return budget_error(w->budget, err);
            w->n_next = 0;
            if (s->kind == PRE_BYTES) {
                spelled = true;
                continue;
            } else if (s->kind == PRE_REGEX || s->kind == PRE_CHARS) {
                if (!step_cut(s, w, re, spelled, err))
                    return false;
            } else {
                if (!step_rewrite(s, w, limit, &w->bufs[which], err))
                    return false;
                which = !which;
            }
        }
        struct pre_word *l = w->list;
        size_t cap = w->cap;
        w->list = w->next;
        w->n = w->n_next;
        w->cap = w->next_cap;
        w->next = l;
        w->next_cap = cap;
    }
    return true;
}
