/*
 * Code points. Owns the lazily filled page tables.
 *
 * Why categories come from PCRE2: pre-tokenizers exist both as regular expressions run by PCRE2 and
 * as hand-written splitters. With one table for both, they agree on every code point whatever
 * Unicode version is installed.
 */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "text/tokenizer/unicode.h"
#include "base/error.h"
#include "base/mem.h"
#include "text/tokenizer/regex.h"

#include <pcre2.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

/* -------------------------------------------------------------------------------------- UTF-8 */

int utf8_decode(const char *s, size_t n, uint32_t *cp)
{
    const unsigned char *p = (const unsigned char *)s;
    if (!n)
        return 0;
    if (p[0] < 0x80) {
        *cp = p[0];
        return 1;
    }
    if (p[0] < 0xc2 || p[0] > 0xf4)
        return 0;
    int len = utf8_len(s[0]);
    if ((size_t)len > n)
        return 0;
    for (int i = 1; i < len; i++)
        if ((p[i] & 0xc0) != 0x80)
            return 0;
    utf8_next(s, cp);
    static const uint32_t least[5] = {0, 0, 0x80, 0x800, 0x10000};
    if (*cp < least[len] || *cp > 0x10ffff || (*cp >= 0xd800 && *cp < 0xe000))
        return 0;
    return len;
}

int utf8_encode(uint32_t cp, char out[4])
{
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    if (cp < 0x800) {
        out[0] = (char)(0xc0 | cp >> 6);
        out[1] = (char)(0x80 | (cp & 63));
        return 2;
    }
    if (cp < 0x10000) {
        out[0] = (char)(0xe0 | cp >> 12);
        out[1] = (char)(0x80 | (cp >> 6 & 63));
        out[2] = (char)(0x80 | (cp & 63));
        return 3;
    }
    out[0] = (char)(0xf0 | cp >> 18);
    out[1] = (char)(0x80 | (cp >> 12 & 63));
    out[2] = (char)(0x80 | (cp >> 6 & 63));
    out[3] = (char)(0x80 | (cp & 63));
    return 4;
}

size_t utf8_valid(const char *p, size_t n)
{
    size_t i = 0;
    while (i < n) {
        uint64_t w;
        if (n - i >= 8 && (memcpy(&w, p + i, 8), !(w & 0x8080808080808080u))) {
            i += 8;
            continue;
        }
        uint32_t cp;
        int len = utf8_decode(p + i, n - i, &cp);
        if (!len)
            break;
        i += (size_t)len;
    }
    return i;
}

/* --------------------------------------------------------------------------------- categories */

#define CC UC_CC
#define SC UC_SPACE_CTRL
const uint8_t unicode_ascii[128] = {
    CC,    CC,    CC,    CC,    CC,    CC,    CC,    CC,    CC,    SC,    SC,    SC,    SC,
    SC,    CC,    CC,    CC,    CC,    CC,    CC,    CC,    CC,    CC,    CC,    CC,    CC,
    CC,    CC,    CC,    CC,    CC,    CC,    UC_ZS, UC_PO, UC_PO, UC_PO, UC_SC, UC_PO, UC_PO,
    UC_PO, UC_PS, UC_PE, UC_PO, UC_SM, UC_PO, UC_PD, UC_PO, UC_PO, UC_ND, UC_ND, UC_ND, UC_ND,
    UC_ND, UC_ND, UC_ND, UC_ND, UC_ND, UC_ND, UC_PO, UC_PO, UC_SM, UC_SM, UC_SM, UC_PO, UC_PO,
    UC_LU, UC_LU, UC_LU, UC_LU, UC_LU, UC_LU, UC_LU, UC_LU, UC_LU, UC_LU, UC_LU, UC_LU, UC_LU,
    UC_LU, UC_LU, UC_LU, UC_LU, UC_LU, UC_LU, UC_LU, UC_LU, UC_LU, UC_LU, UC_LU, UC_LU, UC_LU,
    UC_PS, UC_PO, UC_PE, UC_SK, UC_PC, UC_SK, UC_LL, UC_LL, UC_LL, UC_LL, UC_LL, UC_LL, UC_LL,
    UC_LL, UC_LL, UC_LL, UC_LL, UC_LL, UC_LL, UC_LL, UC_LL, UC_LL, UC_LL, UC_LL, UC_LL, UC_LL,
    UC_LL, UC_LL, UC_LL, UC_LL, UC_LL, UC_LL, UC_PS, UC_SM, UC_PE, UC_SM, CC};
#undef CC
#undef SC

enum { N_PAGES = 0x1100 };
static _Atomic(uint8_t *) pages[N_PAGES]; /* (256) each, filled on first use, never freed */

/* One alternative per category, in enum order: the group that matched gives the category. */
static const char category_regex[] =
    "(\\p{Lu}+)|(\\p{Ll}+)|(\\p{Lt}+)|(\\p{Lm}+)|(\\p{Lo}+)|(\\p{Mn}+)|(\\p{Mc}+)|(\\p{Me}+)|"
    "(\\p{Nd}+)|(\\p{Nl}+)|(\\p{No}+)|(\\p{Pc}+)|(\\p{Pd}+)|(\\p{Ps}+)|(\\p{Pe}+)|(\\p{Pi}+)|"
    "(\\p{Pf}+)|(\\p{Po}+)|(\\p{Sm}+)|(\\p{Sc}+)|(\\p{Sk}+)|(\\p{So}+)|(\\p{Zs}+)|(\\p{Zl}+)|"
    "(\\p{Zp}+)|(\\p{Cc}+)|(\\p{Cf}+)|(\\p{Cs}+)|(\\p{Co}+)";
static pcre2_code *category_code;
static pthread_once_t category_once = PTHREAD_ONCE_INIT;

static void category_compile(void)
{
    int code;
    PCRE2_SIZE at;
    pcre2_compile_context *ctx = pcre2_compile_context_create(regex_heap());
    category_code = pcre2_compile((PCRE2_SPTR)category_regex, PCRE2_ZERO_TERMINATED, PCRE2_UTF,
                                  &code, &at, ctx);
    pcre2_compile_context_free(ctx);
    CHECK(category_code, "PCRE2 was built without Unicode support (error %d)", code);
}

static uint8_t *page_fill(uint32_t page)
{
    pthread_once(&category_once, category_compile);
    char text[256 * 4];
    uint8_t *cat = mem_zalloc(256, 1);
    size_t n = 0;
    if (page >= 0xd8 && page < 0xe0) {
        memset(cat, UC_CS, 256);
        return cat;
    }
    for (uint32_t i = 0; i < 256; i++)
        n += (size_t)utf8_encode(page << 8 | i, text + n);
    pcre2_match_data *md = pcre2_match_data_create(UC_COUNT, regex_heap());
    size_t at = 0;
    while (at < n) {
        int rc = pcre2_match(category_code, (PCRE2_SPTR)text, n, at, PCRE2_NO_UTF_CHECK, md, NULL);
        if (rc < 1) /* the rest of the page is unassigned */
            break;
        const PCRE2_SIZE *o = pcre2_get_ovector_pointer(md);
        for (size_t k = o[0]; k < o[1]; k += (size_t)utf8_len(text[k])) {
            uint32_t cp;
            utf8_next(text + k, &cp);
            cat[cp & 255] = (uint8_t)(rc - 1);
        }
        at = o[1];
    }
    pcre2_match_data_free(md);
    if (page == 0) {
        memcpy(cat, unicode_ascii, 128);
        cat[0x85] = UC_SPACE_CTRL;
    }
    return cat;
}

const uint8_t *unicode_page(uint32_t page)
{
    uint8_t *p = atomic_load_explicit(&pages[page], memory_order_acquire);
    if (__builtin_expect(p != NULL, 1))
        return p;
    struct mem_job *job = mem_job_suspend(); /* the page outlives the job that caused it */
    uint8_t *fresh = page_fill(page), *none = NULL;
    if (!atomic_compare_exchange_strong(&pages[page], &none, fresh)) {
        mem_free(fresh); /* another thread was first */
        fresh = none;
    }
    mem_job_resume(job);
    return fresh;
}

void unicode_add_lower(uint32_t cp, struct buf *out)
{
    if (cp < 0x80) {
        buf_addc(out, (char)(cp >= 'A' && cp <= 'Z' ? cp + 32 : cp));
        return;
    }
    if (cp == 0x130) {
        buf_adds(out, "i\xcc\x87");
        return;
    }
    char s[4];
    int n = utf8_encode((uint32_t)utf8proc_tolower((int32_t)cp), s);
    buf_add(out, s, (size_t)n);
}

/* ------------------------------------------------------------------------------- normal forms */

/*
 * Marks and compositions added after Unicode 12.1. The tokenizers library, used in training,
 * normalises with that version's tables and treats these as plain characters.
 */
static bool is_after_unicode12(uint32_t cp)
{
    static const uint32_t ranges[][2] = {
        {0x898, 0x89f},     {0x8ca, 0x8d2},     {0xc3c, 0xc3c},     {0x1715, 0x1715},
        {0x1abf, 0x1ace},   {0x1dfa, 0x1dfa},   {0xa82c, 0xa82c},   {0x10eab, 0x10eac},
        {0x10efd, 0x10eff}, {0x10f82, 0x10f85}, {0x11070, 0x11070}, {0x11938, 0x11938},
        {0x1193d, 0x1193e}, {0x11943, 0x11943}, {0x11f41, 0x11f42}, {0x16ff0, 0x16ff1},
        {0x1e08f, 0x1e08f}, {0x1e2ae, 0x1e2ae}, {0x1e4ec, 0x1e4ef}};
    if (cp < 0x898 || (cp > 0x1dfa && cp < 0xa82c) || (cp > 0xa82c && cp < 0x10eab))
        return false;
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
        if (cp >= ranges[i][0] && cp <= ranges[i][1])
            return true;
    return false;
}

/*
 * Inert under NFC: a starter that is its own normal form and never composes with the character
 * before it. A text of inert characters is in NFC, and normalisation never crosses one. Marks and
 * characters known to be second in a composition count as not inert without further checks.
 */
static bool nfc_inert(uint32_t cp)
{
    if (cp < 0x300)
        return true;
    if (is_after_unicode12(cp))
        return true;
    if (cp >= 0x1160 && cp < 0x1200)
        return false;
    if (cp >= 0xac00 && cp < 0xd7a4)
        return true;
    if (unicode_is(cp, UC_MARK))
        return false;
    const utf8proc_property_t *p = utf8proc_get_property((int32_t)cp);
    return p->combining_class == 0 && (p->decomp_seqindex == UINT16_MAX || p->decomp_type != 0);
}

/* Under the other forms only ASCII is cheap to recognise. All other text is normalised. */
static bool inert(enum normal_form form, uint32_t cp)
{
    return form == NORMAL_NFC ? nfc_inert(cp) : cp < 0x80 || is_after_unicode12(cp);
}

static size_t skip_inert(enum normal_form form, const char *p, size_t n)
{
    /* The lead byte of U+0300 is 0xcc. Lower bytes are inert under NFC; ASCII is inert in every
     * form. */
    unsigned char limit = form == NORMAL_NFC ? 0xcc : 0x80;
    size_t i = 0;
    while (i < n) {
        if ((unsigned char)p[i] < limit) {
            i++;
            continue;
        }
        uint32_t cp;
        int len = utf8_next(p + i, &cp);
        if (!inert(form, cp))
            break;
        i += (size_t)len;
    }
    return i;
}

bool unicode_is_normal(enum normal_form form, const char *p, size_t n)
{
    return skip_inert(form, p, n) == n;
}

static int combining(int32_t cp)
{
    int c = utf8proc_get_property(cp)->combining_class;
    return c && is_after_unicode12((uint32_t)cp) ? 0 : c;
}

struct mark {
    int32_t cp;
    uint32_t at;
    int class;
};

static int mark_compare(const void *a, const void *b)
{
    const struct mark *x = a, *y = b;
    if (x->class != y->class)
        return x->class < y->class ? -1 : 1;
    return x->at < y->at ? -1 : x->at > y->at;
}

/* Canonical ordering of cp (n): each run of marks is sorted by class, stably. */
static void order_marks(int32_t *cp, size_t n)
{
    for (size_t i = 0; i < n;) {
        if (!combining(cp[i])) {
            i++;
            continue;
        }
        size_t end = i;
        bool sorted = true;
        int last = 0;
        while (end < n) {
            int c = combining(cp[end]);
            if (!c)
                break;
            sorted &= c >= last;
            last = c;
            end++;
        }
        if (!sorted) {
            /* utf8proc's ordering is quadratic in the run, whose length hostile text can choose. */
            struct mark *m = mem_alloc((end - i) * sizeof *m);
            for (size_t k = i; k < end; k++)
                m[k - i] = (struct mark){cp[k], (uint32_t)(k - i), combining(cp[k])};
            qsort(m, end - i, sizeof *m, mark_compare);
            for (size_t k = i; k < end; k++)
                cp[k] = m[k - i].cp;
            mem_free(m);
        }
        i = end;
    }
}

struct codepoints {
    int32_t *p; /* (cap) */
    size_t n, cap;
};

static void codepoints_reserve(struct codepoints *c, size_t extra)
{
    if (c->n + extra <= c->cap)
        return;
    c->cap = (c->n + extra) * 2;
    c->p = mem_realloc(c->p, c->cap, sizeof *c->p);
}

static void normalize_run(enum normal_form form, const char *p, size_t n, struct codepoints *c,
                          struct buf *out)
{
    bool compat = form == NORMAL_NFKC || form == NORMAL_NFKD;
    int flags = UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | (compat ? UTF8PROC_COMPAT : 0);
    c->n = 0;
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        i += (size_t)utf8_next(p + i, &cp);
        codepoints_reserve(c, 32);
        if (is_after_unicode12(cp)) {
            c->p[c->n++] = (int32_t)cp;
            continue;
        }
        for (;;) {
            int boundary = 0;
            ptrdiff_t k =
                utf8proc_decompose_char((int32_t)cp, c->p + c->n, (ptrdiff_t)(c->cap - c->n),
                                        (utf8proc_option_t)flags, &boundary);
            CHECK(k >= 0, "utf8proc refuses U+%04X", cp);
            if ((size_t)k <= c->cap - c->n) {
                c->n += (size_t)k;
                break;
            }
            codepoints_reserve(c, (size_t)k);
        }
    }
    CHECK(c->p, "an empty run");
    order_marks(c->p, c->n);
    ptrdiff_t len = (ptrdiff_t)c->n;
    if (form == NORMAL_NFC || form == NORMAL_NFKC)
        len = utf8proc_normalize_utf32(c->p, len, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    CHECK(len >= 0, "utf8proc_normalize_utf32: %zd", len);
    buf_reserve(out, (size_t)len * 4);
    for (ptrdiff_t i = 0; i < len; i++)
        out->len += (size_t)utf8_encode((uint32_t)c->p[i], out->p + out->len);
}

void unicode_normalize(enum normal_form form, const char *p, size_t n, struct buf *out)
{
    struct codepoints c = {0};
    buf_reserve(out, n);
    while (n) {
        size_t same = skip_inert(form, p, n);
        if (same == n) {
            buf_add(out, p, n);
            break;
        }
        /* The preceding character may compose with the marks that follow, so it is part of the
         * run. */
        if (same)
            same = (size_t)(utf8_prev(p + same) - p);
        size_t end = same + (size_t)utf8_len(p[same]);
        while (end < n) {
            uint32_t cp;
            int len = utf8_next(p + end, &cp);
            if (inert(form, cp))
                break;
            end += (size_t)len;
        }
        buf_add(out, p, same);
        normalize_run(form, p + same, end - same, &c, out);
        p += end;
        n -= end;
    }
    buf_add(out, "", 0);
    mem_free(c.p);
}
