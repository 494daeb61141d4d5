/*
 * Parses the fields of a SentencePiece model (a protocol-buffers message) that GGUF needs. Wire
 * format: a varint key (field number * 8 + wire type), then a varint, 8 bytes, a length and bytes,
 * or 4 bytes. Unknown fields are skipped. Every length is checked against the remaining bytes.
 */
#include "convert/sentencepiece.h"
#include "base/mem.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { WIRE_VARINT = 0, WIRE_64 = 1, WIRE_BYTES = 2, WIRE_32 = 5 };
enum { MODEL_UNIGRAM = 1, MODEL_BPE = 2, MAX_PIECES = 1 << 24 };

struct wire_reader {
    const uint8_t *p, *end;
};

struct field {
    uint32_t number;
    int wire;
    uint64_t value;          /* varint; the bits of 32- and 64-bit fields */
    struct wire_reader body; /* of WIRE_BYTES */
};

static bool varint(struct wire_reader *r, uint64_t *out)
{
    *out = 0;
    for (int shift = 0; shift < 64 && r->p < r->end; shift += 7) {
        uint8_t b = *r->p++;
        *out |= (uint64_t)(b & 127) << shift;
        if (b < 128)
            return true;
    }
    return false;
}

/* Next field. False at the end, or on damage, when p is not at the end. */
static bool next(struct wire_reader *r, struct field *f)
{
    uint64_t key, len;
    const uint8_t *start = r->p;
    if (r->p == r->end)
        return false;
    bool ok = varint(r, &key);
    f->number = (uint32_t)(key >> 3);
    f->wire = (int)(key & 7);
    f->value = 0;
    size_t fixed = f->wire == WIRE_64 ? 8 : f->wire == WIRE_32 ? 4 : 0;
    if (ok && f->wire == WIRE_VARINT) {
        ok = varint(r, &f->value);
    } else if (ok && fixed) {
        ok = (size_t)(r->end - r->p) >= fixed;
        if (ok) {
            memcpy(&f->value, r->p, fixed);
            r->p += fixed;
        }
    } else if (ok && f->wire == WIRE_BYTES) {
        ok = varint(r, &len) && len <= (uint64_t)(r->end - r->p);
        if (ok) {
            f->body = (struct wire_reader){r->p, r->p + len};
            r->p += len;
        }
    } else {
        ok = false;
    }
    if (!ok)
        r->p = start;
    return ok;
}

static bool read_piece(struct wire_reader r, struct piece *out)
{
    struct field f;
    *out = (struct piece){.text = "", .kind = 1};
    while (next(&r, &f)) {
        if (f.number == 1 && f.wire == WIRE_BYTES) {
            out->text = (const char *)f.body.p;
            out->len = (size_t)(f.body.end - f.body.p);
        } else if (f.number == 2 && f.wire == WIRE_32) {
            uint32_t bits = (uint32_t)f.value;
            memcpy(&out->score, &bits, 4);
        } else if (f.number == 3 && f.wire == WIRE_VARINT) {
            out->kind = f.value >= 1 && f.value <= 6 ? (int)f.value : 0;
        }
    }
    return r.p == r.end && out->kind && isfinite(out->score);
}

/* A varint field of a nested message, or `fallback`. */
static uint64_t nested(struct wire_reader r, uint32_t number, uint64_t fallback)
{
    struct field f;
    while (next(&r, &f))
        if (f.number == number && f.wire == WIRE_VARINT)
            fallback = f.value;
    return fallback;
}

static bool parse(struct sentencepiece *s, const char *path, struct error *err)
{
    struct wire_reader r = {s->map, s->map + s->bytes};
    struct field f;
    uint64_t type = MODEL_UNIGRAM;
    int cap = 0;
    s->add_space = true;
    while (next(&r, &f)) {
        if (f.wire != WIRE_BYTES)
            continue;
        if (f.number == 1) {
            if (s->n == cap) {
                cap = cap ? 2 * cap : 1024;
                s->pieces = mem_realloc(s->pieces, (size_t)cap, sizeof *s->pieces);
            }
            if (s->n >= MAX_PIECES || !read_piece(f.body, &s->pieces[s->n]))
                return error_set(err, "%s: piece %d is damaged", path, s->n);
            s->n++;
        } else if (f.number == 2) {
            type = nested(f.body, 3, type);
        } else if (f.number == 3) {
            s->add_space = nested(f.body, 3, 1) != 0;
        }
    }
    if (r.p != r.end || !s->n)
        return error_set(err, "%s: byte %zu: not a SentencePiece model", path,
                         (size_t)(r.p - s->map));
    if (type != MODEL_BPE)
        return error_set(err, "%s: model_type %llu is not supported (2, BPE, is)", path,
                         (unsigned long long)type);
    return true;
}

struct sentencepiece *sentencepiece_open(const char *path, struct error *err)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        error_set(err, "%s: %s", path, strerror(errno));
        return NULL;
    }
    struct sentencepiece *s = mem_zalloc(1, sizeof *s);
    bool ok = fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size > 0;
    if (ok) {
        s->bytes = (size_t)st.st_size;
        s->map = mmap(NULL, s->bytes, PROT_READ, MAP_PRIVATE, fd, 0);
        if (s->map == MAP_FAILED)
            s->map = NULL;
    }
    close(fd);
    if (!s->map)
        error_set(err, "%s: cannot map", path);
    if (!s->map || !parse(s, path, err)) {
        sentencepiece_close(s);
        return NULL;
    }
    return s;
}

void sentencepiece_close(struct sentencepiece *s)
{
    if (!s)
        return;
    if (s->map)
        munmap(s->map, s->bytes);
    mem_free(s->pieces);
    mem_free(s);
}
