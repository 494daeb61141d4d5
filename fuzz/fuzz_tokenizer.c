/*
 * libFuzzer entry for tokenizers: the input is a tokenizer.json, or a GGUF if it starts like one. A
 * tokenizer that loads encodes with all flags, then decodes whole and streamed. A text to encode
 * may follow a tokenizer.json after a NUL byte.
 */
#include "text/tokenizer/tokenizer.h"
#include "text/tokenizer/unicode.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void exercise(const struct tokenizer *t, const char *text, size_t len)
{
    for (int flags = 0; flags < 4; flags++) {
        struct token_list l = {0};
        struct error err = {0};
        struct buf whole = {0}, stream = {0};
        buf_adds(&whole, ""); /* never NULL */
        buf_adds(&stream, "");
        if (tokenizer_encode(t, text, len, flags, &l, &err)) {
            struct detok d = {0};
            tokenizer_decode(t, l.ids, l.n, flags & 1, &whole);
            for (size_t i = 0; i < l.n; i++) {
                size_t before = stream.len;
                if (l.ids[i] < 0 || l.ids[i] >= tokenizer_n_vocab(t))
                    abort();
                detok_push(&d, t, l.ids[i], flags & 1, &stream);
                if (utf8_valid(stream.p + before, stream.len - before) != stream.len - before)
                    abort(); /* part of a character */
            }
            detok_flush(&d, &stream);
            if (utf8_valid(whole.p, whole.len) == whole.len &&
                (whole.len != stream.len || (whole.len && memcmp(whole.p, stream.p, whole.len))))
                abort(); /* streaming and decoding differ */
        } else if (!err.msg[0]) {
            abort();
        }
        buf_clear(&whole);
        buf_clear(&stream);
        token_list_clear(&l);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const char text[] = "<s>The Caf\xc3\xa9 abc 123,, \xff <|im_end|>\n\n\xe4\xb8\xad x";
    struct error err = {0};
    struct tokenizer *t;
    const char *with = text;
    size_t len = sizeof text - 1;
    if (n >= 4 && !memcmp(data, "GGUF", 4)) {
        struct tensorfile *f = tensorfile_open_memory(data, n, "fuzz", &err);
        t = f ? tokenizer_load(f, &err) : NULL;
        tensorfile_close(f);
    } else {
        const uint8_t *nul = n ? memchr(data, 0, n) : NULL;
        if (nul) {
            with = (const char *)nul + 1;
            len = (size_t)(data + n - nul) - 1;
            n = (size_t)(nul - data);
        }
        t = tokenizer_load_json((const char *)data, n, "fuzz", NULL, &err);
    }
    if (t)
        exercise(t, with, len);
    else if (!err.msg[0])
        abort();
    tokenizer_free(t);
    return 0;
}
