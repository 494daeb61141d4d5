/*
 * Strings of the Jinja engine: UTF-8 by code point, Unicode classes and case (utf8proc's tables),
 * and the Python string operations shared by filters, methods and operators. Unchanged parts are
 * returned as views. Knows nothing of method names or arguments.
 */
#include "text/jinja/jinja_int.h"

#include <string.h>
#include <utf8proc.h>

/* ------------------------------------------------------------------ UTF-8 */

int jutf8_next(const char *s, size_t n, size_t *i)
{
    const uint8_t *p = (const uint8_t *)s + *i;
    size_t left = n - *i;
    if (p[0] < 0x80 || literal_is(p[0])) {
        *i += 1;
        return literal_plain(p[0]);
    }
    int len = p[0] >= 0xf0 ? 4 : p[0] >= 0xe0 ? 3 : 2;
    int cp = p[0] & (0xff >> (len + 1));
    if (p[0] < 0xc2 || p[0] > 0xf4 || (size_t)len > left)
        goto bad;
    for (int k = 1; k < len; k++) {
        if ((p[k] & 0xc0) != 0x80)
            goto bad;
        cp = cp << 6 | (p[k] & 0x3f);
    }
    if ((len == 3 && (cp < 0x800 || (cp >= 0xd800 && cp < 0xe000))) ||
        (len == 4 && (cp < 0x10000 || cp > 0x10ffff)))
        goto bad;
    *i += (size_t)len;
    return cp;
bad:
    *i += 1;
    return -1;
}

size_t jutf8_put(int cp, char *out)
{
    if (cp < 0 || cp > 0x10ffff || (cp >= 0xd800 && cp < 0xe000))
        cp = 0xfffd;
    return (size_t)utf8proc_encode_char(cp, (utf8proc_uint8_t *)out);
}

static bool is_ascii(const char *s, size_t n)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t w;
        memcpy(&w, s + i, 8);
        if (w & 0x8080808080808080u)
            return false;
    }
    for (; i < n; i++) {
        if (s[i] & 0x80)
            return false;
    }
    return true;
}

int64_t jstr_len(struct jstate *st, struct jval s)
{
    if (s.flags & STR_ASCII)
        return s.len;
    jcharge_bytes(st, s.len);
    if (is_ascii(s.u.s, s.len))
        return s.len;
    int64_t n = 0;
    for (size_t i = 0; i < s.len; n++)
        jutf8_next(s.u.s, s.len, &i);
    return n;
}

/* Byte offset of code point k, or the length. */
static size_t offset_of(struct jval s, int64_t k)
{
    size_t i = 0;
    while (k-- > 0 && i < s.len)
        jutf8_next(s.u.s, s.len, &i);
    return i;
}

struct jval jstr_sub(struct jstate *st, struct jval s, int64_t from, int64_t to)
{
    if (from >= to)
        return jval_str("", 0);
    struct jval r = s;
    jcharge_bytes(st, s.len);
    if (is_ascii(s.u.s, s.len)) {
        to = to > s.len ? s.len : to;
        from = from > to ? to : from;
        r.u.s += from;
        r.len = (uint32_t)(to - from);
    } else {
        size_t a = offset_of(s, from);
        r.u.s += a;
        r.len -= (uint32_t)a;
        r.len = (uint32_t)offset_of(r, to - from);
    }
    return r;
}

struct jval jstr_slice(struct jstate *st, struct jval s, int64_t start, int64_t step, int64_t n)
{
    if (n <= 0)
        return jval_str("", 0);
    if (step == 1)
        return jstr_sub(st, s, start, start + n);
    struct jlist *l = jval_tolist(st, s);
    char *out = jstr_alloc(st, s.len), *o = out;
    for (int64_t k = 0; k < n; k++) {
        struct jval c = l->v[start + k * step];
        memcpy(o, c.u.s, c.len);
        o += c.len;
    }
    struct jval r = jval_str(out, (size_t)(o - out));
    r.flags = s.flags;
    return r;
}

bool jstr_same(const char *a, const char *b, size_t n)
{
    if (!memcmp(a, b, n))
        return true;
    for (size_t i = 0; i < n; i++)
        if (literal_plain((uint8_t)a[i]) != literal_plain((uint8_t)b[i]))
            return false;
    return true;
}

/* Whether s has a character that may be there as a literal byte, too. */
static bool has_two_forms(const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (literal_is((uint8_t)s[i]) || (s[i] && strchr(LITERAL_CHARS, s[i])))
            return true;
    return false;
}

const char *jstr_find(const char *hay, size_t n, const char *needle, size_t m)
{
    if (m == 0)
        return hay;
    if (!has_two_forms(needle, m))
        return m == 1 ? memchr(hay, needle[0], n) : memmem(hay, n, needle, m);
    uint8_t first = literal_plain((uint8_t)needle[0]);
    for (size_t i = 0; i + m <= n; i++)
        if (literal_plain((uint8_t)hay[i]) == first && jstr_same(hay + i, needle, m))
            return hay + i;
    return NULL;
}

struct jval jstr_concat(struct jstate *st, struct jval a, struct jval b)
{
    if (!b.len)
        return a;
    if (!a.len)
        return b;
    size_t len = (size_t)a.len + b.len;
    jcharge(st, 1 + b.len / 32);
    struct jarena *ar = &st->str;
    if (a.u.s + a.len == ar->p && (size_t)(ar->end - ar->p) >= b.len) {
        /* a was built last, at the end of the arena: extend it in place. Older views of it keep
         * their length and never include the new bytes. */
        memcpy(jstr_alloc(st, b.len), b.u.s, b.len);
    } else {
        if ((size_t)(ar->end - ar->p) < 2 * len && len > 4096) {
            /* Reserve room to grow, so that appending in a loop stays linear. */
            char *room = jstr_alloc(st, 2 * len);
            ar->p = room;
        }
        jcharge_bytes(st, a.len);
        char *p = jstr_alloc(st, len);
        memcpy(p, a.u.s, a.len);
        memcpy(p + a.len, b.u.s, b.len);
        a.u.s = p;
    }
    struct jval r = jval_str(a.u.s, len);
    return r;
}

/* ------------------------------------------------------------------ classes */

static utf8proc_category_t category(int cp)
{
    return cp < 0 ? UTF8PROC_CATEGORY_CN : utf8proc_category(cp);
}

bool jcp_isspace(int cp)
{
    if (cp < 0x80)
        return cp == ' ' || (cp >= 9 && cp <= 13) || (cp >= 0x1c && cp <= 0x1f);
    return cp == 0x85 || cp == 0xa0 || cp == 0x1680 || (cp >= 0x2000 && cp <= 0x200a) ||
           cp == 0x2028 || cp == 0x2029 || cp == 0x202f || cp == 0x205f || cp == 0x3000;
}

static bool is_alpha(int cp)
{
    if (cp < 0x80)
        return (cp | 32) >= 'a' && (cp | 32) <= 'z';
    utf8proc_category_t c = category(cp);
    return c >= UTF8PROC_CATEGORY_LU && c <= UTF8PROC_CATEGORY_LO;
}

static bool is_numeric(int cp)
{
    utf8proc_category_t c = category(cp);
    return c == UTF8PROC_CATEGORY_ND || c == UTF8PROC_CATEGORY_NL || c == UTF8PROC_CATEGORY_NO;
}

static bool is_digit(int cp) /* decimal, superscript, subscript or circled digit */
{
    return category(cp) == UTF8PROC_CATEGORY_ND || cp == 0xb2 || cp == 0xb3 || cp == 0xb9 ||
           cp == 0x2070 || (cp >= 0x2074 && cp <= 0x2079) || (cp >= 0x2080 && cp <= 0x2089) ||
           (cp >= 0x2460 && cp <= 0x2468);
}

bool jcp_isword(int cp)
{
    if (cp < 0x80)
        return is_alpha(cp) || (cp >= '0' && cp <= '9') || cp == '_';
    return is_alpha(cp) || is_numeric(cp);
}

bool jcp_isident_start(int cp)
{
    return cp == '_' || is_alpha(cp) || category(cp) == UTF8PROC_CATEGORY_NL;
}

bool jcp_isprintable(int cp)
{
    if (cp < 0x80)
        return cp >= 32 && cp < 127;
    switch (category(cp)) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS:
        return false;
    default:
        return true;
    }
}

static bool is_lower(int cp)
{
    if (cp < 0x80)
        return cp >= 'a' && cp <= 'z';
    return category(cp) == UTF8PROC_CATEGORY_LL || cp == 0xaa || cp == 0xba ||
           (cp >= 0x24d0 && cp <= 0x24e9);
}

static bool is_upper(int cp)
{
    if (cp < 0x80)
        return cp >= 'A' && cp <= 'Z';
    return category(cp) == UTF8PROC_CATEGORY_LU || (cp >= 0x24b6 && cp <= 0x24cf);
}

static bool is_cased(int cp)
{
    return is_lower(cp) || is_upper(cp) || category(cp) == UTF8PROC_CATEGORY_LT;
}

static bool all_cased(struct jval s, bool (*wanted)(int), bool (*other)(int))
{
    bool any = false;
    for (size_t i = 0; i < s.len;) {
        int cp = jutf8_next(s.u.s, s.len, &i);
        if (other(cp) || category(cp) == UTF8PROC_CATEGORY_LT)
            return false;
        any |= wanted(cp);
    }
    return any;
}

bool jstr_islower(struct jval s)
{
    return all_cased(s, is_lower, is_upper);
}

bool jstr_isupper(struct jval s)
{
    return all_cased(s, is_upper, is_lower);
}

/* str.isX by letter. The empty string gives false, except for 'A' (isascii) and 'p'
 * (isprintable). */
bool jstr_class(struct jval s, char what)
{
    bool cased = false, prev = false;
    if (what == 'l' || what == 'u')
        return what == 'l' ? jstr_islower(s) : jstr_isupper(s);
    if (!s.len)
        return what == 'A' || what == 'p';
    for (size_t i = 0, k = 0; i < s.len; k++) {
        int cp = jutf8_next(s.u.s, s.len, &i);
        bool ok = true;
        switch (what) {
        case 'a':
            ok = is_alpha(cp);
            break;
        case 'n': /* isalnum */
            ok = is_alpha(cp) || is_numeric(cp);
            break;
        case 'd':
            ok = is_digit(cp);
            break;
        case 'D': /* isdecimal */
            ok = category(cp) == UTF8PROC_CATEGORY_ND;
            break;
        case 'N': /* isnumeric */
            ok = is_numeric(cp);
            break;
        case 's':
            ok = jcp_isspace(cp);
            break;
        case 'p':
            ok = jcp_isprintable(cp);
            break;
        case 'A':
            ok = cp >= 0 && cp < 0x80;
            break;
        case 'i': /* isidentifier */
            ok = k ? jcp_isword(cp) : jcp_isident_start(cp);
            break;
        case 't': { /* istitle */
            bool up = is_upper(cp) || category(cp) == UTF8PROC_CATEGORY_LT;
            ok = up ? !prev : is_lower(cp) ? prev : true;
            prev = is_cased(cp);
            cased |= prev;
            break;
        }
        }
        if (!ok)
            return false;
    }
    return what != 't' || cased;
}

/* ------------------------------------------------------------------ case */

/* Upper case of one letter that maps to several. utf8proc maps one to one. */
static const char *wide_upper(int cp, bool title)
{
    switch (cp) {
    case 0xdf:
        return title ? "Ss" : "SS";
    case 0x149:
        return "\xca\xbcN";
    case 0x1f0:
        return "J\xcc\x8c";
    case 0xfb00:
        return title ? "Ff" : "FF";
    case 0xfb01:
        return title ? "Fi" : "FI";
    case 0xfb02:
        return title ? "Fl" : "FL";
    case 0xfb03:
        return title ? "Ffi" : "FFI";
    case 0xfb04:
        return title ? "Ffl" : "FFL";
    case 0xfb05:
    case 0xfb06:
        return title ? "St" : "ST";
    case 0x587:
        return title ? "\xd4\xb5\xd6\x82" : "\xd4\xb5\xd5\x92";
    default:
        return NULL;
    }
}

/* Whether a capital sigma lower-cases to a final sigma: after a letter, and not before one. */
static bool final_sigma(struct jval s, size_t before, size_t after)
{
    size_t i = before;
    while (i > 0 && (s.u.s[--i] & 0xc0) == 0x80)
        ;
    size_t k = i;
    if (before == 0 || !is_cased(jutf8_next(s.u.s, s.len, &k)))
        return false;
    return after >= s.len || !is_cased(jutf8_next(s.u.s, s.len, &after));
}

struct jval jstr_case(struct jstate *st, struct jval s, char how)
{
    jcharge(st, s.len / 8);
    if (is_ascii(s.u.s, s.len)) {
        char *out = jstr_alloc(st, s.len);
        bool start = true;
        for (uint32_t i = 0; i < s.len; i++) {
            char c = s.u.s[i], low = is_upper(c) ? (char)(c | 32) : c,
                 up = is_lower(c) ? (char)(c & ~32) : c;
            out[i] = how == 'u'                 ? up
                     : how == 's'               ? (is_lower(c) ? up : low)
                     : how == 'c' || how == 't' ? (start ? up : low)
                                                : low;
            start = how == 't' ? !is_alpha(c) : false;
        }
        struct jval r = jval_str(out, s.len);
        r.flags = s.flags;
        return r;
    }
    char *out = jstr_alloc(st, (size_t)s.len * 3 + 8), *o = out;
    bool start = true;
    for (size_t i = 0; i < s.len;) {
        size_t from = i;
        int cp = jutf8_next(s.u.s, s.len, &i);
        char want = how;
        if (how == 's')
            want = is_lower(cp) ? 'u' : 'l';
        else if (how == 'c' || how == 't')
            want = start ? 't' : 'l';
        start = how == 't' ? !is_cased(cp) : false;
        const char *wide = want == 'u' || want == 't' ? wide_upper(cp, want == 't') : NULL;
        if (cp < 0 || literal_is((uint8_t)s.u.s[from])) {
            *o++ = s.u.s[from];
        } else if (wide) {
            memcpy(o, wide, strlen(wide));
            o += strlen(wide);
        } else if (want == 'f' && (cp == 0xdf || cp == 0x1e9e)) {
            *o++ = 's';
            *o++ = 's';
        } else if (want == 'l' && cp == 0x130) {
            memcpy(o, "i\xcc\x87", 3);
            o += 3;
        } else if (want == 'l' && cp == 0x3a3 && final_sigma(s, from, i)) {
            o += jutf8_put(0x3c2, o);
        } else if (want == 'f' && cp == 0x3c2) {
            o += jutf8_put(0x3c3, o);
        } else {
            o += jutf8_put(want == 'u'   ? utf8proc_toupper(cp)
                           : want == 't' ? utf8proc_totitle(cp)
                                         : utf8proc_tolower(cp),
                           o);
        }
    }
    struct jval r = jval_str(out, (size_t)(o - out));
    r.flags = s.flags & STR_MARKUP;
    st->str.p = o; /* return the unused part of the worst case */
    return r;
}

/* ------------------------------------------------------------------ strip, replace, lines, pad */

static bool in_set(int cp, struct jval chars)
{
    if (chars.type == JT_NONE)
        return jcp_isspace(cp);
    for (size_t i = 0; i < chars.len;) {
        if (jutf8_next(chars.u.s, chars.len, &i) == cp)
            return true;
    }
    return false;
}

struct jval jstr_strip(struct jstate *st, struct jval s, struct jval chars, int sides)
{
    size_t a = 0, b = s.len, work = 0;
    uint32_t set = chars.type == JT_NONE ? 1 : chars.len + 1;
    for (; sides & STRIP_LEFT && a < b; work += set) {
        size_t i = a;
        if (!in_set(jutf8_next(s.u.s, b, &i), chars))
            break;
        a = i;
    }
    for (; sides & STRIP_RIGHT && b > a; work += set) {
        size_t i = b - 1;
        while (i > a && (s.u.s[i] & 0xc0) == 0x80)
            i--;
        size_t k = i;
        if (!in_set(jutf8_next(s.u.s, b, &k), chars))
            break;
        b = i;
        jcharge(st, set / 4);
    }
    jcharge(st, work / 8);
    s.u.s += a;
    s.len = (uint32_t)(b - a);
    return s;
}

struct jval jstr_replace(struct jstate *st, struct jval s, struct jval old, struct jval with,
                         int64_t count)
{
    size_t mark = st->out->len, i = 0;
    jcharge_bytes(st, s.len);
    if (count < 0)
        count = INT64_MAX;
    if (old.len == 0) { /* inserts between all characters */
        while (count-- > 0) {
            jcharge(st, 1);
            jprint_raw(st, with.u.s, with.len);
            if (i >= s.len)
                return jval_take(st, st->out, mark);
            size_t k = i;
            jutf8_next(s.u.s, s.len, &i);
            jprint_raw(st, s.u.s + k, i - k);
        }
    } else {
        const char *hit;
        if (count <= 0 || !jstr_find(s.u.s, s.len, old.u.s, old.len)) {
            s.flags = 0;
            return s;
        }
        while (count-- > 0 && (hit = jstr_find(s.u.s + i, s.len - i, old.u.s, old.len))) {
            jcharge(st, 1);
            size_t at = (size_t)(hit - s.u.s);
            jprint_raw(st, s.u.s + i, at - i);
            jprint_raw(st, with.u.s, with.len);
            i = at + old.len;
        }
    }
    jprint_raw(st, s.u.s + i, s.len - i);
    return jval_take(st, st->out, mark);
}

static bool is_line_end(int cp)
{
    return (cp >= 10 && cp <= 13) || (cp >= 0x1c && cp <= 0x1e) || cp == 0x85 || cp == 0x2028 ||
           cp == 0x2029;
}

struct jlist *jstr_splitlines(struct jstate *st, struct jval s, bool keep)
{
    struct jlist *l = NULL;
    jcharge(st, s.len / 8);
    for (int pass = 0; pass < 2; pass++) {
        uint32_t n = 0;
        for (size_t i = 0, from = 0; from < s.len; from = i, n++) {
            size_t end = from;
            i = from;
            while (i < s.len) {
                int cp = jutf8_next(s.u.s, s.len, &i);
                if (is_line_end(cp)) {
                    if (cp == '\r' && i < s.len && s.u.s[i] == '\n')
                        i++;
                    break;
                }
                end = i;
            }
            if (l)
                l->v[n] = jval_str(s.u.s + from, (keep ? i : end) - from);
        }
        if (!l)
            l = jval_list(st, JT_LIST, n).u.list;
    }
    return l;
}

/* how: 'l' ljust, 'r' rjust, 'c' center, 'z' zfill. */
struct jval jstr_pad(struct jstate *st, struct jval s, int64_t width, struct jval fill, char how)
{
    int64_t n = jstr_len(st, s);
    if (width <= n)
        return s;
    size_t pad = (size_t)(width - n), left = how == 'l' ? 0 : pad, mark = st->out->len;
    if (how == 'c')
        left = pad / 2 + (pad & (size_t)width & 1);
    if (pad > st->str.limit)
        jinja_fail(st, "a string of %zu characters is too long", pad);
    jcharge(st, pad / 8);
    if (how == 'z' && s.len && (s.u.s[0] == '-' || s.u.s[0] == '+')) {
        jprint_raw(st, s.u.s, 1);
        s.u.s++;
        s.len--;
    }
    for (size_t i = 0; i < left; i++)
        jprint_raw(st, fill.u.s, fill.len);
    jprint_raw(st, s.u.s, s.len);
    for (size_t i = left; i < pad; i++)
        jprint_raw(st, fill.u.s, fill.len);
    return jval_take(st, st->out, mark);
}
