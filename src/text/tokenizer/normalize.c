/*
 * The normalizer's steps. Owns their parameters; knows nothing of tokens. Each step either leaves
 * the text in place or writes its output to the other of two buffers.
 */
#include "text/tokenizer/normalize.h"
#include "base/mem.h"
#include "text/tokenizer/vocab.h"

#include <string.h>

enum { WORK_BYTES = 8 }; /* bytes normalised per unit of work */

void norm_scratch_clear(struct norm_scratch *s)
{
    buf_clear(&s->bufs[0]);
    buf_clear(&s->bufs[1]);
}

struct norm_step *normalizer_add(struct normalizer *nz, enum norm_kind kind)
{
    nz->steps = mem_realloc(nz->steps, (size_t)nz->n + 1, sizeof *nz->steps);
    struct norm_step *s = &nz->steps[nz->n++];
    *s = (struct norm_step){.kind = kind};
    return s;
}

void normalizer_clear(struct normalizer *nz)
{
    for (int i = 0; i < nz->n; i++) {
        regex_free(nz->steps[i].re);
        buf_clear(&nz->steps[i].text);
        buf_clear(&nz->steps[i].with);
        mem_free(nz->steps[i].units);
    }
    mem_free(nz->steps);
    *nz = (struct normalizer){0};
}

/* Appends to out, or fails if the result would exceed the limit. */
static bool append_limited(struct buf *out, size_t limit, const char *p, size_t n,
                           struct error *err)
{
    if (out->len > limit || n > limit - out->len)
        return error_set(err, "the text grows beyond %zu bytes", limit);
    buf_add(out, p, n);
    return true;
}

static bool replace(const struct norm_step *s, struct regex_scratch *re, const char *p, size_t n,
                    struct buf *out, size_t limit, struct error *err)
{
    if (!s->re) {
        const char *hit;
        while (s->text.len && (hit = s->text.len == 1 ? memchr(p, s->text.p[0], n)
                                                      : memmem(p, n, s->text.p, s->text.len))) {
            if (!append_limited(out, limit, p, (size_t)(hit - p), err) ||
                !append_limited(out, limit, s->with.p, s->with.len, err))
                return false;
            n -= (size_t)(hit - p) + s->text.len;
            p = hit + s->text.len;
        }
        return append_limited(out, limit, p, n, err);
    }
    struct regex_iter it = regex_iter_start();
    size_t at = 0, start, end;
    enum regex_result r;
    while ((r = regex_next(s->re, re, &it, p, n, &start, &end, err)) == REGEX_FOUND) {
        if (!append_limited(out, limit, p + at, start - at, err) ||
            !append_limited(out, limit, s->with.p, s->with.len, err))
            return false;
        at = end;
    }
    return append_limited(out, limit, p + at, n - at, err) && r != REGEX_ERROR;
}

/* The ideograph blocks BERT surrounds with spaces. 0x2b920 is as in the published tokenizer. */
static bool is_chinese(uint32_t c)
{
    return (c >= 0x4e00 && c <= 0x9fff) || (c >= 0x3400 && c <= 0x4dbf) ||
           (c >= 0x20000 && c <= 0x2a6df) || (c >= 0x2a700 && c <= 0x2b73f) ||
           (c >= 0x2b740 && c <= 0x2b81f) || (c >= 0x2b920 && c <= 0x2ceaf) ||
           (c >= 0xf900 && c <= 0xfaff) || (c >= 0x2f800 && c <= 0x2fa1f);
}

static void lower(const char *p, size_t n, struct buf *out)
{
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        i += (size_t)utf8_next(p + i, &cp);
        unicode_add_lower(cp, out);
    }
}

/* Copies the text without the characters in `set`. */
static void remove_set(const char *p, size_t n, uint32_t set, struct buf *out)
{
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        size_t len = (size_t)utf8_next(p + i, &cp);
        if (!unicode_is(cp, set))
            buf_add(out, p + i, len);
        i += len;
    }
}

static void bert(const struct norm_step *s, const char *p, size_t n, struct buf *out)
{
    struct buf a = {0}, b = {0};
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        size_t len = (size_t)utf8_next(p + i, &cp);
        unsigned cat = unicode_category(cp);
        if (s->clean && UC_SPACE >> cat & 1 && cp != 0x0b && cp != 0x0c && cp != 0x85)
            buf_addc(&a, ' '); /* BERT counts 0x0b, 0x0c and 0x85 as controls and drops them */
        else if (s->clean && (cp == 0 || cp == 0xfffd || UC_OTHER >> cat & 1))
            ;
        else if (s->chinese && is_chinese(cp)) {
            buf_addc(&a, ' ');
            buf_add(&a, p + i, len);
            buf_addc(&a, ' ');
        } else
            buf_add(&a, p + i, len);
        i += len;
    }
    if (s->accents) {
        unicode_normalize(NORMAL_NFD, a.p, a.len, &b);
        buf_reset(&a);
        remove_set(b.p, b.len, UC_SET(UC_MN), &a);
    }
    if (s->lower)
        lower(a.p, a.len, out);
    else
        buf_add(out, a.p, a.len);
    buf_clear(&a);
    buf_clear(&b);
}

static void squeeze(const char *p, size_t n, struct buf *out)
{
    bool gap = false, any = false;
    for (size_t i = 0; i < n; i++) {
        if (p[i] == ' ') {
            gap = true;
            continue;
        }
        if (gap && any)
            buf_addc(out, ' ');
        gap = false;
        any = true;
        buf_addc(out, p[i]);
    }
}

/* ----------------------------------------------------------------------------------- charsmap */

/*
 * A Darts double array. Bits of a unit, from the lowest: label (8), has-leaf (1), extension (1),
 * offset (22). A leaf holds its value instead, with the top bit set.
 */
static inline uint32_t unit_offset(uint32_t u)
{
    return u >> 10 << (u >> 9 & 1) * 8;
}

bool charsmap_load(struct norm_step *step, const uint8_t *data, size_t n, struct error *err)
{
    uint32_t bytes;
    if (n < 4)
        return error_set(err, "precompiled_charsmap: %zu bytes are too few", n);
    memcpy(&bytes, data, 4);
    if (bytes % 4 || bytes > n - 4 || bytes < 4)
        return error_set(err, "precompiled_charsmap: a trie of %u bytes in %zu", bytes, n);
    if (n - 4 > bytes && data[n - 1])
        return error_set(err, "precompiled_charsmap: the last replacement is not terminated");
    step->n_units = bytes / 4;
    step->units = mem_alloc(bytes);
    memcpy(step->units, data + 4, bytes);
    buf_add(&step->text, data + 4 + bytes, n - 4 - bytes);
    if (utf8_valid(step->text.p, step->text.len) != step->text.len)
        return error_set(err, "precompiled_charsmap: a replacement is not valid UTF-8");
    return true;
}

/* Returns the replacement for the longest prefix of p in the table, or NULL. */
static const char *charsmap_find(const struct norm_step *s, const char *p, size_t n, size_t *used)
{
    const char *found = NULL;
    size_t node = unit_offset(s->units[0]);
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)p[i];
        node ^= c;
        if (!c || node >= s->n_units)
            break;
        uint32_t u = s->units[node];
        if ((u & (1u << 31 | 0xff)) != c)
            break;
        node ^= unit_offset(u);
        if (node >= s->n_units)
            break;
        if (u >> 8 & 1) {
            uint32_t at = s->units[node] & 0x7fffffff;
            bool whole = i + 1 == n || ((unsigned char)p[i + 1] & 0xc0) != 0x80;
            if (at < s->text.len && whole) {
                found = s->text.p + at;
                *used = i + 1;
            }
        }
    }
    return found;
}

/* SentencePiece's rule: replace the longest table entry at each position, else copy the
 * character. */
static bool charsmap(const struct norm_step *s, const char *p, size_t n, struct buf *out,
                     size_t limit, struct error *err)
{
    for (size_t i = 0; i < n;) {
        size_t used = (size_t)utf8_len(p[i]);
        const char *with = charsmap_find(s, p + i, n - i, &used);
        if (with ? !append_limited(out, limit, with, strlen(with), err)
                 : !append_limited(out, limit, p + i, used, err))
            return false;
        i += used;
    }
    return true;
}

/* ---------------------------------------------------------------------------------- the chain */

/* Whether the step leaves this text unchanged, so that no copy is needed. */
static bool unchanged(const struct norm_step *s, const char *p, size_t n)
{
    switch (s->kind) {
    case NORM_FORM:
        return unicode_is_normal(s->form, p, n);
    case NORM_REPLACE:
        return !s->re && (!s->text.len || !memmem(p, n, s->text.p, s->text.len));
    default:
        return false;
    }
}

static bool step_run(const struct norm_step *s, struct regex_scratch *re, const char *p, size_t n,
                     struct buf *out, size_t limit, struct error *err)
{
    uint32_t cp;
    buf_reserve(out, n);
    switch (s->kind) {
    case NORM_FORM:
        unicode_normalize(s->form, p, n, out);
        break;
    case NORM_LOWER:
        lower(p, n, out);
        break;
    case NORM_STRIP_ACCENTS:
        remove_set(p, n, UC_MARK, out);
        break;
    case NORM_REPLACE:
        return replace(s, re, p, n, out, limit, err);
    case NORM_PREPEND:
        if (n)
            return append_limited(out, limit, s->text.p, s->text.len, err) &&
                   append_limited(out, limit, p, n, err);
        break;
    case NORM_STRIP:
        while (s->left && n && (utf8_next(p, &cp), unicode_is(cp, UC_SPACE))) {
            n -= (size_t)utf8_len(*p);
            p += utf8_len(*p);
        }
        while (s->right && n && (utf8_next(utf8_prev(p + n), &cp), unicode_is(cp, UC_SPACE)))
            n = (size_t)(utf8_prev(p + n) - p);
        buf_add(out, p, n);
        break;
    case NORM_BERT:
        bert(s, p, n, out);
        break;
    case NORM_BYTELEVEL:
        bytelevel_encode(p, n, out);
        break;
    case NORM_CHARSMAP:
        return charsmap(s, p, n, out, limit, err);
    case NORM_SQUEEZE:
        squeeze(p, n, out);
        break;
    }
    return true;
}

bool normalizer_run(const struct normalizer *nz, struct norm_scratch *s, struct regex_scratch *re,
                    const char *text, size_t n, bool joined, const char **out, size_t *n_out,
                    struct error *err)
{
    int which = 0;
    size_t limit = norm_limit(n);
    for (int i = 0; i < nz->n; i++) {
        if (!budget_spend(s->budget, n / WORK_BYTES))
            return budget_error(s->budget, err);
        if (unchanged(&nz->steps[i], text, n) || (joined && nz->steps[i].kind == NORM_PREPEND))
            continue;
        struct buf *b = &s->bufs[which];
        which = !which;
        buf_reset(b);
        /* NFKC can grow a byte to eleven, so a text that has already grown is refused */
        if (nz->steps[i].kind == NORM_FORM && n > limit / 4 && n > NORM_MAX_BYTES / 12)
            return error_set(err, "normalizer: the text grows beyond %zu bytes", limit);
        bool ok = step_run(&nz->steps[i], re, text, n, b, limit, err);
        if (ok && b->len > limit) /* the remaining steps grow text only by a small factor */
            ok = error_set(err, "the text grows beyond %zu bytes", limit);
        if (!ok)
            return error_prefix(err, "normalizer");
        text = b->p;
        n = b->len;
    }
    *out = text;
    *n_out = n;
    return true;
}
