/*
 * The tokenizer: runs the pipeline that a loader built, from text to ids and back. Owns the added
 * tokens and the streaming decoder; knows no file format.
 */
#include "text/tokenizer/tokenizer.h"
#include "base/mem.h"
#include "text/literal.h"
#include "text/tokenizer/tokenizer_impl.h"

#include <string.h>

enum { MAX_ADDED_BYTES = 4096 };
enum { TRIE_STEPS = 16 }; /* trie steps per unit of work */

void token_list_add(struct token_list *l, int32_t id)
{
    if (l->n == l->cap) {
        l->cap = l->cap ? l->cap * 2 : 64;
        l->ids = mem_realloc(l->ids, l->cap, sizeof *l->ids);
    }
    l->ids[l->n++] = id;
}

void token_list_clear(struct token_list *l)
{
    mem_free(l->ids);
    *l = (struct token_list){0};
}

/* --------------------------------------------------------------------------------- build time */

struct tokenizer *tokenizer_new(void)
{
    struct tokenizer *t = mem_zalloc(1, sizeof *t);
    t->bos = t->eos = t->unk = -1;
    t->fim = (struct fim_tokens){
        .prefix = -1, .suffix = -1, .middle = -1, .pad = -1, .repo = -1, .file = -1};
    t->bpe.unk = t->unigram.unk = t->wordpiece.unk = -1;
    return t;
}

void tokenizer_free(struct tokenizer *t)
{
    if (!t)
        return;
    bpe_clear(&t->bpe);
    unigram_clear(&t->unigram);
    wordpiece_clear(&t->wordpiece);
    normalizer_clear(&t->normalizer);
    pretokenizer_clear(&t->pretokenizer);
    for (size_t i = 0; i < t->n_added; i++)
        mem_free(t->added[i].text);
    mem_free(t->added);
    trie_clear(&t->trie_raw);
    trie_clear(&t->trie_normalized);
    for (int i = 0; i < t->n_decode; i++) {
        buf_clear(&t->decode[i].text);
        buf_clear(&t->decode[i].with);
    }
    mem_free(t->decode);
    token_list_clear(&t->before);
    token_list_clear(&t->after);
    vocab_clear(&t->vocab);
    mem_free(t);
}

struct decode_step *tokenizer_add_decode(struct tokenizer *t, enum decode_kind kind)
{
    t->decode = mem_realloc(t->decode, (size_t)t->n_decode + 1, sizeof *t->decode);
    struct decode_step *s = &t->decode[t->n_decode++];
    *s = (struct decode_step){.kind = kind};
    return s;
}

static void replace_all(struct buf *b, const char *find, const char *with)
{
    struct buf out = {0};
    const char *p = b->p, *hit;
    if (!b->len || !strstr(p, find))
        return;
    for (; (hit = strstr(p, find)); p = hit + strlen(find)) {
        buf_add(&out, p, (size_t)(hit - p));
        buf_adds(&out, with);
    }
    buf_add(&out, p, (size_t)(b->p + b->len - p));
    buf_clear(b);
    *b = out;
}

/* The English clean-up that the WordPiece decoder does within each token. */
static void wordpiece_cleanup(struct buf *b)
{
    static const char *const pairs[][2] = {{" .", "."},     {" ?", "?"},           {" !", "!"},
                                           {" ,", ","},     {" ' ", "'"},          {" n't", "n't"},
                                           {" 'm", "'m"},   {" do not", " don't"}, {" 's", "'s"},
                                           {" 've", "'ve"}, {" 're", "'re"}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        replace_all(b, pairs[i][0], pairs[i][1]);
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 32;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Value of a byte token's name "<0xXX>", or -1. */
static int byte_name(const char *p, size_t n)
{
    if (n != 6 || memcmp(p, "<0x", 3) || p[5] != '>')
        return -1;
    int a = hex_digit(p[3]), b = hex_digit(p[4]);
    return a < 0 || b < 0 ? -1 : a * 16 + b;
}

/* Applies one decode step to the spelling in b (tmp is work space). False if it exceeds `limit`. */
static bool decode_apply(const struct decode_step *s, struct buf *b, struct buf *tmp, size_t limit)
{
    buf_reset(tmp);
    const char *p = b->p;
    size_t n = b->len;
    switch (s->kind) {
    case DECODE_REPLACE: {
        const char *hit;
        while (s->text.len && (hit = memmem(p, n, s->text.p, s->text.len))) {
            buf_add(tmp, p, (size_t)(hit - p));
            buf_add(tmp, s->with.p, s->with.len);
            if (tmp->len > limit)
                return false;
            n -= (size_t)(hit - p) + s->text.len;
            p = hit + s->text.len;
        }
        buf_add(tmp, p, n);
        break;
    }
    case DECODE_BYTELEVEL:
        if (!bytelevel_decode(p, n, tmp))
            return true;
        break;
    case DECODE_BYTES: {
        int byte = byte_name(p, n);
        if (byte < 0)
            return true;
        buf_addc(tmp, (char)byte);
        break;
    }
    case DECODE_STRIP:
        for (int i = 0; i < s->n && n >= s->text.len && !memcmp(p, s->text.p, s->text.len); i++) {
            p += s->text.len;
            n -= s->text.len;
        }
        for (int i = 0;
             i < s->m && n >= s->text.len && !memcmp(p + n - s->text.len, s->text.p, s->text.len);
             i++)
            n -= s->text.len;
        buf_add(tmp, p, n);
        break;
    case DECODE_WORDPIECE:
        if (s->text.len && n >= s->text.len && !memcmp(p, s->text.p, s->text.len)) {
            buf_add(tmp, p + s->text.len, n - s->text.len);
        } else {
            buf_addc(tmp, ' ');
            buf_add(tmp, p, n);
        }
        if (s->cleanup)
            wordpiece_cleanup(tmp);
        break;
    }
    struct buf swap = *b;
    *b = *tmp;
    *tmp = swap;
    return b->len <= limit;
}

static bool is_name(uint8_t kind)
{
    return kind == TOKEN_CONTROL || kind == TOKEN_USER || kind == TOKEN_UNKNOWN;
}

bool tokenizer_set_vocab(struct tokenizer *t, const struct raw_token *raw, size_t n,
                         const char *field, struct error *err)
{
    struct vocab *v = &t->vocab;
    if (n == 0)
        return error_set(err, "%s: no tokens", field);
    size_t bytes = 0;
    for (size_t i = 0; i < n; i++)
        bytes += raw[i].len;
    if (n > INT32_MAX / 2 || bytes > UINT32_MAX / 8)
        return error_set(err, "%s: too many tokens (%zu, %zu bytes)", field, n, bytes);
    v->n = (int)n;
    v->kind = mem_alloc(n);
    v->flag = mem_alloc(n);
    v->score = mem_alloc(n * sizeof *v->score);
    v->key_at = mem_alloc((n + 1) * sizeof *v->key_at);
    v->piece_at = mem_alloc((n + 1) * sizeof *v->piece_at);
    buf_reserve(&v->keys, bytes + 1);
    buf_reserve(&v->pieces, bytes + 1);
    struct buf one = {0}, tmp = {0};
    size_t limit = norm_limit(bytes);
    bool fits = true;
    for (size_t i = 0; i < n && fits; i++) {
        const struct raw_token *r = &raw[i];
        v->kind[i] = r->kind;
        v->flag[i] = r->flag;
        v->score[i] = r->score;
        v->key_at[i] = (uint32_t)v->keys.len;
        v->piece_at[i] = (uint32_t)v->pieces.len;
        if (!r->text)
            continue;
        if (!(r->flag & VOCAB_ADDED)) {
            if (!t->bpe.byte_level)
                buf_add(&v->keys, r->text, r->len);
            else /* a name outside the alphabet cannot result from merges: no key */
                bytelevel_decode(r->text, r->len, &v->keys);
        }
        bool name = is_name(r->kind) || r->flag & VOCAB_ADDED;
        if (t->n_decode == 1 && t->decode[0].kind == DECODE_BYTELEVEL && t->bpe.byte_level &&
            !name && v->keys.len > v->key_at[i]) { /* decoding gives back the key */
            buf_add(&v->pieces, v->keys.p + v->key_at[i], v->keys.len - v->key_at[i]);
            continue;
        }
        buf_reset(&one);
        buf_add(&one, r->text, r->len);
        for (int k = 0; k < t->n_decode && !name && fits; k++)
            fits = decode_apply(&t->decode[k], &one, &tmp, limit);
        fits = fits && v->pieces.len + one.len <= limit;
        if (fits)
            buf_add(&v->pieces, one.p, one.len);
    }
    v->key_at[n] = (uint32_t)v->keys.len;
    v->piece_at[n] = (uint32_t)v->pieces.len;
    buf_clear(&one);
    buf_clear(&tmp);
    if (!fits)
        return error_set(err, "decoder: the vocabulary grows beyond %zu bytes", limit);
    int32_t dup[2];
    if (!vocab_index(v, dup))
        return error_set(err, "%s: tokens %d and %d are both \"%.*s\"", field, dup[0], dup[1],
                         (int)(raw[dup[0]].len < 60 ? raw[dup[0]].len : 60), raw[dup[0]].text);
    return true;
}

bool tokenizer_add_token(struct tokenizer *t, struct added_token a, const char *text, size_t len,
                         struct error *err)
{
    if (!len)
        return true;
    if (len > MAX_ADDED_BYTES)
        return error_set(err, "added token %d has %zu bytes, at most %d are supported", a.id, len,
                         MAX_ADDED_BYTES);
    if ((t->n_added & (t->n_added - 1)) == 0) /* grows at each power of two */
        t->added = mem_realloc(t->added, t->n_added ? t->n_added * 2 : 1, sizeof *t->added);
    a.text = mem_strndup(text, len);
    a.len = len;
    t->added[t->n_added++] = a;
    return true;
}

void tokenizer_mark_end(struct tokenizer *t, int64_t id)
{
    if (id >= 0 && id < t->vocab.n)
        t->vocab.flag[id] |= VOCAB_END;
}

/*
 * Marks end-of-generation tokens that files often fail to declare. Names in `sure` have no other
 * use. Names in `maybe` are also ordinary strings and count only if the file declares them special.
 */
static void mark_known_ends(struct tokenizer *t)
{
    static const char *const sure[] = {"<|eot_id|>",    "<|im_end|>",
                                       "<|end|>",       "<|return|>",
                                       "<|call|>",      "<|calls|>",
                                       "<|flush|>",     "<|eom_id|>",
                                       "<end_of_turn>", "<end_of_utterance>",
                                       "<|endoftext|>", "<|end_of_text|>",
                                       "<turn|>",       "<｜end▁of▁sentence｜>"};
    static const char *const maybe[] = {"</s>",  "<eos>", "<EOT>", "_<EOT>",
                                        "[EOT]", "[EOS]", "[e~["};
    for (size_t i = 0; i < sizeof sure / sizeof *sure; i++) {
        int32_t id = tokenizer_find(t, sure[i], strlen(sure[i]));
        if (id < 0)
            continue;
        tokenizer_mark_end(t, id);
        if (t->vocab.kind[id] == TOKEN_NORMAL)
            t->vocab.kind[id] = TOKEN_CONTROL;
    }
    for (size_t i = 0; i < sizeof maybe / sizeof *maybe; i++) {
        int32_t id = tokenizer_find(t, maybe[i], strlen(maybe[i]));
        if (id >= 0 && is_name(t->vocab.kind[id]))
            tokenizer_mark_end(t, id);
    }
    /* In vocabularies with separate message and turn ends, <|end|> ends only the message. */
    int32_t end = tokenizer_find(t, "<|end|>", 7);
    bool call = tokenizer_find(t, "<|call|>", 8) >= 0 || tokenizer_find(t, "<|calls|>", 9) >= 0;
    bool turn = tokenizer_find(t, "<|return|>", 10) >= 0 || tokenizer_find(t, "<|flush|>", 9) >= 0;
    if (end >= 0 && end != t->eos && call && turn)
        t->vocab.flag[end] &= (uint8_t)~VOCAB_END;
}

bool tokenizer_finish(struct tokenizer *t, struct error *err)
{
    struct norm_scratch ns = {0};
    struct regex_scratch rs = {0};
    bool ok = true;
    size_t bytes = 0, normalized = 0;
    for (size_t i = 0; i < t->n_added; i++)
        bytes += t->added[i].len;
    for (size_t i = 0; ok && i < t->n_added; i++) {
        const struct added_token *a = &t->added[i];
        const char *text = a->text;
        size_t len = a->len;
        if (a->normalized && utf8_valid(text, len) == len) {
            ok = normalizer_run(&t->normalizer, &ns, &rs, text, len, false, &text, &len, err);
            normalized += ok ? len : 0;
            if (normalized > norm_limit(bytes))
                ok = error_set(err, "normalizer: the added tokens grow beyond %zu bytes",
                               norm_limit(bytes));
            if (ok && len)
                trie_add(&t->trie_normalized, text, len, (int32_t)i);
        } else {
            trie_add(&t->trie_raw, text, len, (int32_t)i);
        }
    }
    norm_scratch_clear(&ns);
    regex_scratch_clear(&rs);
    if (!ok)
        return false;
    pretokenizer_finish(&t->pretokenizer);
    mark_known_ends(t);
    tokenizer_mark_end(t, t->eos);
    tokenizer_find_fim(t);
    return true;
}

/* -------------------------------------------------------------------------------------- queries */

int tokenizer_n_vocab(const struct tokenizer *t)
{
    return t->vocab.n;
}

int32_t tokenizer_bos(const struct tokenizer *t)
{
    return t->bos;
}

int32_t tokenizer_eos(const struct tokenizer *t)
{
    return t->eos;
}

static bool in_range(const struct tokenizer *t, int32_t id)
{
    return id >= 0 && id < t->vocab.n;
}

bool tokenizer_is_end(const struct tokenizer *t, int32_t id)
{
    return in_range(t, id) && t->vocab.flag[id] & VOCAB_END;
}

enum token_kind tokenizer_kind(const struct tokenizer *t, int32_t id)
{
    return in_range(t, id) ? (enum token_kind)t->vocab.kind[id] : TOKEN_UNUSED;
}

int32_t tokenizer_find(const struct tokenizer *t, const char *text, size_t len)
{
    for (size_t i = 0; i < t->n_added; i++)
        if (t->added[i].len == len && !memcmp(t->added[i].text, text, len))
            return t->added[i].id;
    return vocab_find(&t->vocab, text, len);
}

const char *tokenizer_piece(const struct tokenizer *t, int32_t id, size_t *len)
{
    if (!in_range(t, id)) {
        *len = 0;
        return "";
    }
    return vocab_piece(&t->vocab, id, len);
}

/* ------------------------------------------------------------------------------------- encoding */

/* State of one tokenizer_encode call: its arguments and work space. */
struct encode_call {
    const struct tokenizer *t;
    struct token_list *out;
    struct error *err;
    bool special;
    const char *literal; /* (n_text) the text with literal bytes; NULL = it has none */
    const char *text;    /* start of the plain text */
    const char *marks;   /* the chat template, or NULL */
    struct bpe_scratch bpe;
    struct unigram_scratch unigram;
    struct buf tmp;
    struct norm_scratch norm;
    struct regex_scratch regex;
    struct pre_words words;
    struct budget *budget; /* or NULL */
};

static bool spend(struct encode_call *e, uint64_t units)
{
    return budget_spend(e->budget, units) || budget_error(e->budget, e->err);
}

static bool encode_word(struct encode_call *e, const char *p, size_t n)
{
    const struct tokenizer *t = e->t;
    if (!spend(e, 1 + n / 4))
        return false;
    switch (t->model) {
    case MODEL_BPE:
        return bpe_encode(&t->bpe, &e->bpe, p, n, e->out) || spend(e, 0);
    case MODEL_UNIGRAM:
        return unigram_encode(&t->unigram, &e->unigram, p, n, e->budget, e->out) || spend(e, 0);
    case MODEL_WORDPIECE:
        return wordpiece_encode(&t->wordpiece, &e->tmp, p, n, e->budget, e->out) || spend(e, 0);
    }
    return true;
}

/* Encodes normalised text without added tokens. */
static bool encode_words(struct encode_call *e, const char *p, size_t n, bool first, bool joined)
{
    const struct pretokenizer *pt = &e->t->pretokenizer;
    if (pt->only) {
        for (size_t at = 0; at < n;) {
            size_t len = split_next(pt->only, p + at, n - at);
            if (!encode_word(e, p + at, len))
                return false;
            at += len;
        }
        return true;
    }
    if (!pretokenizer_run(pt, &e->words, &e->regex, p, n, first, joined, e->err))
        return false;
    for (size_t i = 0; i < e->words.n; i++)
        if (!encode_word(e, e->words.text + e->words.list[i].at, e->words.list[i].len))
            return false;
    return true;
}

static bool word_char_before(const char *text, const char *p)
{
    if (p == text)
        return false;
    const char *q = p - 1;
    while (q > text && p - q < 4 && ((unsigned char)*q & 0xc0) == 0x80)
        q--;
    uint32_t cp;
    return utf8_decode(q, (size_t)(p - q), &cp) == p - q && unicode_is(cp, UC_WORD);
}

static bool word_char_after(const char *p, const char *end)
{
    uint32_t cp;
    return utf8_decode(p, (size_t)(end - p), &cp) && unicode_is(cp, UC_WORD);
}

/* Whether the added token at text[i, k) is made of data, which must not become a mark. */
static bool is_data(const struct encode_call *e, const struct added_token *a, const char *text,
                    size_t i, size_t k)
{
    bool any = false;
    if (!e->literal)
        return false;
    if (a->normalized) /* no offsets there: special tokens are matched in text without data only */
        return a->special;
    for (const char *p = e->literal + (text - e->text); i < k && !any; i++)
        any = literal_is((unsigned char)p[i]);
    return any && (a->special || (e->marks && memmem(e->marks, strlen(e->marks), a->text, a->len)));
}

/* Finds the first added token in text[from, n): leftmost, then longest. Its range grows by the
 * white space it strips. Also NULL when the budget is exhausted, which the caller's next spend
 * reports. */
static const struct added_token *added_find(struct encode_call *e, const struct trie *trie,
                                            const char *text, size_t n, size_t from, size_t *start,
                                            size_t *end)
{
    const struct tokenizer *t = e->t;
    if (!trie->n_nodes)
        return NULL;
    for (size_t i = from; i < n; i++) {
        uint32_t node = trie->root[(unsigned char)text[i]];
        const struct added_token *best = NULL;
        size_t k = i + 1;
        for (; node; k++) {
            int32_t v = trie->value[node];
            const struct added_token *a = v < 0 ? NULL : &t->added[v];
            if (a && (e->special || !a->special) && !is_data(e, a, text, i, k) &&
                !(a->single_word &&
                  (word_char_before(text, text + i) || word_char_after(text + k, text + n)))) {
                best = a;
                *end = k;
            }
            if (k == n)
                break;
            node = trie_step(trie, node, (unsigned char)text[k]);
        }
        /* many added tokens with a long common prefix make this quadratic */
        if (k - i > TRIE_STEPS && !budget_spend(e->budget, (k - i) / TRIE_STEPS))
            return NULL;
        if (!best)
            continue;
        *start = i;
        uint32_t cp;
        while (best->lstrip && *start > from) {
            size_t back = *start - 1;
            while (back > from && ((unsigned char)text[back] & 0xc0) == 0x80)
                back--;
            if ((size_t)utf8_decode(text + back, *start - back, &cp) != *start - back ||
                !unicode_is(cp, UC_SPACE))
                break;
            *start = back;
        }
        int len;
        while (best->rstrip && (len = utf8_decode(text + *end, n - *end, &cp)) &&
               unicode_is(cp, UC_SPACE))
            *end += (size_t)len;
        return best;
    }
    return NULL;
}

/* Encodes valid UTF-8 between raw added tokens: normalises it, then splits at normalised added
 * tokens. */
static bool encode_text(struct encode_call *e, const char *p, size_t n, bool first, bool joined)
{
    const char *q;
    size_t m;
    if (!spend(e, n / 16))
        return false;
    if (!normalizer_run(&e->t->normalizer, &e->norm, &e->regex, p, n, joined, &q, &m, e->err))
        return false;
    size_t at = 0, start, end;
    const struct added_token *a;
    while ((a = added_find(e, &e->t->trie_normalized, q, m, at, &start, &end))) {
        if (start > at && !encode_words(e, q + at, start - at, first && !at, joined && !at))
            return false;
        token_list_add(e->out, a->id);
        at = end;
        if (!spend(e, 1))
            return false;
    }
    if (!spend(e, 0))
        return false;
    return at >= m || encode_words(e, q + at, m - at, first && !at, joined && !at);
}

/* Encodes bytes that are not valid UTF-8, as byte tokens if the model has them. */
static bool encode_invalid(struct encode_call *e, const char *p, size_t n)
{
    const struct tokenizer *t = e->t;
    if (t->model == MODEL_WORDPIECE)
        return true; /* BERT's normalizer drops U+FFFD, which replaces such bytes */
    bool spelled = false;
    for (int i = 0; i < t->normalizer.n; i++)
        spelled |= t->normalizer.steps[i].kind == NORM_BYTELEVEL;
    for (int i = 0; i < t->pretokenizer.n; i++)
        spelled |= t->pretokenizer.steps[i].kind == PRE_SPELL;
    if (!spelled)
        return encode_word(e, p, n);
    struct buf b = {0};
    bytelevel_encode(p, n, &b);
    bool ok = encode_word(e, b.p, b.len);
    buf_clear(&b);
    return ok;
}

static bool encode_part(struct encode_call *e, const char *p, size_t n, bool first)
{
    for (bool joined = false; n; joined = true) {
        size_t valid = utf8_valid(p, n);
        if (valid && !encode_text(e, p, valid, first, joined))
            return false;
        p += valid;
        n -= valid;
        first = false;
        size_t bad = 0;
        uint32_t cp;
        while (bad < n && !utf8_decode(p + bad, n - bad, &cp))
            bad++;
        if (bad && !encode_invalid(e, p, bad))
            return false;
        p += bad;
        n -= bad;
    }
    return true;
}

static bool starts_with(const int32_t *ids, size_t n, const struct token_list *l)
{
    return n >= l->n && (!l->n || !memcmp(ids, l->ids, l->n * sizeof *ids));
}

static bool encode(const struct tokenizer *t, const char *text, size_t len, int flags,
                   const char *literal, const char *marks, struct budget *budget,
                   struct token_list *out, struct error *err)
{
    if (len >= UINT32_MAX / 4)
        return error_set(err, "a text of %zu bytes is too long to tokenise at once", len);
    struct encode_call e = {.t = t,
                            .out = out,
                            .err = err,
                            .special = (flags & TOKENIZE_SPECIAL) != 0,
                            .literal = literal,
                            .text = text,
                            .marks = marks,
                            .bpe.budget = budget,
                            .norm.budget = budget,
                            .regex.budget = budget,
                            .words.budget = budget,
                            .budget = budget};
    size_t begin = out->n;
    if (flags & TOKENIZE_BOS)
        for (size_t i = 0; i < t->before.n; i++)
            token_list_add(out, t->before.ids[i]);
    size_t body = out->n;

    size_t at = 0, start, end;
    const struct added_token *a;
    bool ok = true;
    while (ok && (a = added_find(&e, &t->trie_raw, text, len, at, &start, &end))) {
        if (start > at)
            ok = encode_part(&e, text + at, start - at, at == 0);
        token_list_add(out, a->id);
        at = end;
        ok = ok && spend(&e, 1);
    }
    ok = ok && spend(&e, 0);
    if (ok && at < len)
        ok = encode_part(&e, text + at, len - at, at == 0);

    if (ok && flags & TOKENIZE_BOS) {
        /* a text that already contains its BOS or EOS gets no second one */
        size_t n = out->n - body;
        if (body > begin && starts_with(out->ids + body, n, &t->before)) {
            memmove(out->ids + begin, out->ids + body, n * sizeof *out->ids);
            out->n = begin + n;
        }
        n = out->n - begin;
        if (n < t->after.n || !t->after.n ||
            memcmp(out->ids + out->n - t->after.n, t->after.ids, t->after.n * sizeof *out->ids))
            for (size_t i = 0; i < t->after.n; i++)
                token_list_add(out, t->after.ids[i]);
    }
    if (!ok)
        out->n = begin;
    bpe_scratch_clear(&e.bpe);
    unigram_scratch_clear(&e.unigram);
    buf_clear(&e.tmp);
    norm_scratch_clear(&e.norm);
    regex_scratch_clear(&e.regex);
    pre_words_clear(&e.words);
    return ok;
}

bool tokenizer_encode(const struct tokenizer *t, const char *text, size_t len, int flags,
                      struct token_list *out, struct error *err)
{
    return tokenizer_encode_within(t, text, len, flags, NULL, out, err);
}

bool tokenizer_encode_within(const struct tokenizer *t, const char *text, size_t len, int flags,
                             struct budget *budget, struct token_list *out, struct error *err)
{
    return encode(t, text, len, flags, NULL, NULL, budget, out, err);
}

bool tokenizer_encode_prompt(const struct tokenizer *t, char *text, size_t len, const char *marks,
                             struct budget *budget, struct token_list *out, struct error *err)
{
    char *literal = len ? mem_alloc(len) : NULL;
    if (len)
        memcpy(literal, text, len);
    bool any = literal_unmark(text, len);
    bool ok = encode(t, text, len, TOKENIZE_SPECIAL, any ? literal : NULL, marks, budget, out, err);
    mem_free(literal);
    return ok;
}

/* ------------------------------------------------------------------------------------- decoding */

/* The text that decoding emits for one token, which may be empty. */
static const char *emitted_piece(const struct tokenizer *t, int32_t id, bool special, bool *started,
                                 size_t *len)
{
    *len = 0;
    if (!in_range(t, id))
        return "";
    uint8_t kind = t->vocab.kind[id];
    if (!special && (kind == TOKEN_CONTROL || kind == TOKEN_UNKNOWN || kind == TOKEN_UNUSED))
        return "";
    const char *p = vocab_piece(&t->vocab, id, len);
    if (!*started && *len) {
        for (int i = 0; i < t->strip_start && *len && *p == ' '; i++) {
            p++;
            --*len;
        }
        *started = true;
    }
    return p;
}

void tokenizer_decode(const struct tokenizer *t, const int32_t *ids, size_t n, bool special,
                      struct buf *out)
{
    bool started = false;
    for (size_t i = 0; i < n; i++) {
        size_t len;
        const char *p = emitted_piece(t, ids[i], special, &started, &len);
        buf_add(out, p, len);
    }
}

/*
 * How the bytes p (n) begin: the length of the next valid character; 0 if more bytes may complete a
 * character; or minus the length of an invalid sequence. That is the longest truncated prefix of a
 * character, as Unicode recommends to replace, or one byte.
 */
static int utf8_certain(const unsigned char *p, size_t n)
{
    uint32_t cp;
    int len = utf8_decode((const char *)p, n, &cp);
    if (len)
        return len;
    if (p[0] < 0xc2 || p[0] > 0xf4)
        return -1;
    unsigned char low = 0x80, high = 0xbf; /* range of the second byte */
    if (p[0] == 0xe0)
        low = 0xa0;
    else if (p[0] == 0xed)
        high = 0x9f;
    else if (p[0] == 0xf0)
        low = 0x90;
    else if (p[0] == 0xf4)
        high = 0x8f;
    int want = utf8_len((char)p[0]);
    for (int i = 1; i < want; i++) {
        if ((size_t)i == n)
            return 0;
        if (p[i] < low || p[i] > high)
            return -i;
        low = 0x80;
        high = 0xbf;
    }
    return -1;
}

void detok_push(struct detok *d, const struct tokenizer *t, int32_t id, bool special,
                struct buf *out)
{
    size_t n;
    const unsigned char *p = (const unsigned char *)emitted_piece(t, id, special, &d->started, &n);
    unsigned char both[sizeof d->pending + 4];
    while (n) {
        const unsigned char *q = p;
        size_t m = n, carried = 0;
        if (d->n_pending) { /* complete the pending character first */
            carried = (size_t)d->n_pending;
            memcpy(both, d->pending, carried);
            m = n < 4 ? n : 4;
            memcpy(both + carried, p, m);
            m += carried;
            q = both;
        }
        int len = utf8_certain(q, m);
        if (len == 0) {
            memcpy(d->pending, q, m);
            d->n_pending = (int)m;
            return;
        }
        if (len > 0)
            buf_add(out, q, (size_t)len);
        else
            buf_adds(out, "\xef\xbf\xbd");
        size_t used = (size_t)(len > 0 ? len : -len);
        CHECK(used >= carried, "%zu pending bytes, %zu used", carried, used);
        p += used - carried;
        n -= used - carried;
        d->n_pending = 0;
    }
}

void detok_flush(struct detok *d, struct buf *out)
{
    if (d->n_pending)
        buf_adds(out, "\xef\xbf\xbd");
    d->n_pending = 0;
}
