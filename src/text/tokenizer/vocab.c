/* The vocabulary's index and GPT-2's byte alphabet. */
#include "text/tokenizer/vocab.h"
#include "base/mem.h"
#include "text/tokenizer/unicode.h"

#include <string.h>

void vocab_clear(struct vocab *v)
{
    mem_free(v->kind);
    mem_free(v->flag);
    mem_free(v->score);
    buf_clear(&v->keys);
    buf_clear(&v->pieces);
    mem_free(v->key_at);
    mem_free(v->piece_at);
    mem_free(v->slots);
    *v = (struct vocab){0};
}

static inline uint64_t load_bytes(const char *p, size_t n)
{
    uint64_t w = 0;
    if (n >= 8) {
        memcpy(&w, p, 8);
    } else if (n >= 4) {
        uint32_t a, b;
        memcpy(&a, p, 4);
        memcpy(&b, p + n - 4, 4);
        w = a | (uint64_t)b << 32;
    } else if (n) {
        w = (unsigned char)p[0] | (uint64_t)(unsigned char)p[n / 2] << 8 |
            (uint64_t)(unsigned char)p[n - 1] << 16;
    }
    return w;
}

static inline uint64_t mix(uint64_t a, uint64_t b)
{
    __uint128_t m = (__uint128_t)a * b;
    return (uint64_t)m ^ (uint64_t)(m >> 64);
}

static uint64_t hash_key(const char *p, size_t n)
{
    uint64_t h = 0x9e3779b97f4a7c15u ^ n;
    while (n > 16) {
        h = mix(h ^ load_bytes(p, 8), 0xa0761d6478bd642fu);
        p += 8;
        n -= 8;
    }
    uint64_t a = load_bytes(p, n), b = n > 8 ? load_bytes(p + n - 8, 8) : 0;
    return mix(h ^ a, b ^ 0xe7037ed1a0b428dbu);
}

bool vocab_index(struct vocab *v, int32_t dup[2])
{
    v->cap = 16;
    while (v->cap < (size_t)v->n * 3 / 2)
        v->cap *= 2;
    v->slots = mem_zalloc(v->cap, sizeof *v->slots);
    for (int32_t id = 0; id < v->n; id++) {
        size_t len;
        const char *key = vocab_key(v, id, &len);
        if (!len)
            continue;
        if (len > v->max_key)
            v->max_key = len;
        uint64_t h = hash_key(key, len);
        size_t i = h & (v->cap - 1);
        for (; v->slots[i].id; i = (i + 1) & (v->cap - 1)) {
            if (v->slots[i].hash != (uint32_t)(h >> 32))
                continue;
            size_t other_len;
            const char *other = vocab_key(v, v->slots[i].id - 1, &other_len);
            if (other_len == len && !memcmp(other, key, len)) {
                dup[0] = v->slots[i].id - 1;
                dup[1] = id;
                return false;
            }
        }
        v->slots[i] = (struct vocab_slot){(uint32_t)(h >> 32), id + 1};
    }
    return true;
}

int32_t vocab_find(const struct vocab *v, const char *key, size_t len)
{
    if (!len || len > v->max_key)
        return -1;
    uint64_t h = hash_key(key, len);
    for (size_t i = h & (v->cap - 1); v->slots[i].id; i = (i + 1) & (v->cap - 1)) {
        if (v->slots[i].hash != (uint32_t)(h >> 32))
            continue;
        size_t n;
        const char *p = vocab_key(v, v->slots[i].id - 1, &n);
        if (n == len && !memcmp(p, key, len))
            return v->slots[i].id - 1;
    }
    return -1;
}

/*
 * GPT-2 spells the printable Latin-1 bytes as themselves and the other 68, in order, from U+0100,
 * so that every byte string is printable text.
 */
static inline bool printable(unsigned b)
{
    return (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
}

static inline uint32_t byte_spelling(unsigned char b)
{
    if (printable(b))
        return b;
    if (b <= 0x20)
        return 0x100u + b;
    if (b < 0xa1)
        return 0x100u + 33 + (b - 0x7fu);
    return 0x100u + 67; /* 0xad */
}

static inline int spelling_byte(uint32_t cp)
{
    if (cp < 0x100)
        return printable(cp) ? (int)cp : -1;
    cp -= 0x100;
    if (cp <= 0x20)
        return (int)cp;
    if (cp < 67)
        return (int)(cp - 33 + 0x7f);
    return cp == 67 ? 0xad : -1;
}

bool bytelevel_decode(const char *s, size_t n, struct buf *out)
{
    size_t start = out->len;
    buf_reserve(out, n);
    for (size_t i = 0; i < n;) {
        uint32_t cp = (unsigned char)s[i];
        if (cp > 0x20 && cp < 0x7f) {
            out->p[out->len++] = s[i++];
            continue;
        }
        int len = utf8_decode(s + i, n - i, &cp);
        int b = len ? spelling_byte(cp) : -1;
        if (b < 0) {
            out->len = start;
            return false;
        }
        out->p[out->len++] = (char)b;
        i += (size_t)len;
    }
    return true;
}

void bytelevel_encode(const char *s, size_t n, struct buf *out)
{
    buf_reserve(out, n * 2);
    for (size_t i = 0; i < n; i++)
        out->len += (size_t)utf8_encode(byte_spelling((unsigned char)s[i]), out->p + out->len);
}
