/* What the tokenizer tests share: random text, and small tokenizers built on the spot. */
#ifndef STEEL_TESTS_TOKENS_H
#define STEEL_TESTS_TOKENS_H

#include "base/mem.h"
#include "text/tokenizer/tokenizer_impl.h"
#include "text/tokenizer/unicode.h"

#include <jansson.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct rng {
    uint64_t s;
};

static inline uint32_t rng_next(struct rng *r)
{
    r->s = r->s * 6364136223846793005u + 1442695040888963407u;
    uint64_t x = r->s;
    return (uint32_t)((x ^ x >> 29) * 0x9e3779b97f4a7c15u >> 32);
}

static inline uint32_t rng_below(struct rng *r, uint32_t n)
{
    return rng_next(r) % n;
}

/* A character that pre-tokenizers care about, or any at all. */
static inline uint32_t random_char(struct rng *r)
{
    static const uint32_t odd[] = {
        '\'',   '\'',     's',    'S',    't',    'T',    'm',    'd',    'D',     'l',     'L',
        'r',    'v',      'e',    'E',    0x17f,  0x212a, ' ',    ' ',    ' ',     ' ',     '\n',
        '\n',   '\r',     '\t',   '\v',   '\f',   0,      0x85,   0xa0,   0x1680,  0x180e,  0x2003,
        0x2028, 0x2029,   0x202f, 0x205f, 0x3000, 0x200b, 0xfeff, '0',    '1',     '9',     0xb2,
        0xbd,   0x660,    0x2167, 0x300,  0x301,  0x323,  0x93e,  0x9be,  0x1ac0,  0x1161,  0x11a8,
        0xac00, 0xe9,     0x130,  0x131,  0x1c5,  0x2b0,  0x4e00, 0x3042, 0x30a2,  0x20ac,  '/',
        '.',    ',',      '!',    '_',    '-',    '<',    '|',    '>',    0x1f600, 0x1f3fb, 0x200d,
        0xfe0f, 0x10ffff, 0xe000, 0x378,  'A',    'B',    'z',    'Q',    0x410,   0x430,   0x5d0};
    switch (rng_below(r, 8)) {
    case 0:
        return 'a' + rng_below(r, 26);
    case 1: {
        uint32_t cp = rng_below(r, 0x110000);
        return cp >= 0xd800 && cp < 0xe000 ? 0xfffd : cp;
    }
    case 2:
        return rng_below(r, 0x3000);
    default:
        return odd[rng_below(r, sizeof odd / sizeof *odd)];
    }
}

/* Appends up to `max` random characters as valid UTF-8; runs of one character are common. */
static inline void random_text(struct rng *r, uint32_t max, struct buf *out)
{
    uint32_t n = rng_below(r, max + 1);
    while (n) {
        uint32_t times = rng_below(r, 4) ? 1 : 1 + rng_below(r, 6);
        char s[4];
        int len = utf8_encode(random_char(r), s);
        for (; times && n; times--, n--)
            buf_add(out, s, (size_t)len);
    }
    buf_add(out, "", 0);
}

static inline void random_bytes(struct rng *r, uint32_t max, struct buf *out)
{
    static const char parts[] = "a \n\xe4\xbd\xa0\xf0\x9f\x98";
    for (uint32_t n = rng_below(r, max + 1); n; n--) {
        char any = (char)rng_next(r);
        buf_addc(out, rng_below(r, 3) ? any : parts[rng_below(r, sizeof parts - 1)]);
    }
    buf_add(out, "", 0);
}

/* A byte-level BPE model: all bytes, then the given merges ("a b" in GPT-2's alphabet). */
static inline json_t *byte_bpe(const char *const *merges, int n)
{
    json_t *vocab = json_object(), *list = json_array();
    struct buf b = {0};
    for (int i = 0; i < 256; i++) {
        char c = (char)i;
        buf_reset(&b);
        bytelevel_encode(&c, 1, &b);
        buf_add(&b, "", 0);
        b.p[b.len] = 0;
        json_object_set_new(vocab, b.p, json_integer(i));
    }
    for (int i = 0; i < n; i++) {
        const char *space = strchr(merges[i], ' ');
        buf_reset(&b);
        buf_add(&b, merges[i], (size_t)(space - merges[i]));
        buf_adds(&b, space + 1);
        if (!json_object_get(vocab, b.p))
            json_object_set_new(vocab, b.p, json_integer((json_int_t)json_object_size(vocab)));
        json_array_append_new(list, json_string(merges[i]));
    }
    buf_clear(&b);
    return json_pack("{s:s, s:o, s:o}", "type", "BPE", "vocab", vocab, "merges", list);
}

#endif
