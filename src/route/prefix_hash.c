/* See prefix_hash.h. */
#include "route/prefix_hash.h"

#include <string.h>

/* Scanning JSON text */

static const char *skip_blank(const char *p, const char *end)
{
    while (p < end && (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t'))
        p++;
    return p;
}

/* p is at the opening quote. Returns the byte after the closing quote, or NULL. */
static const char *skip_string(const char *p, const char *end)
{
    for (p++; p < end && (p = memchr(p, '"', (size_t)(end - p))); p++) {
        const char *back = p;
        while (back[-1] == '\\')
            back--;
        if ((p - back) % 2 == 0)
            return p + 1;
    }
    return NULL;
}

/* Returns the byte after a value, or NULL if the text ends inside it. Brackets are only counted. */
static const char *skip_value(const char *p, const char *end)
{
    if (p < end && *p == '"')
        return skip_string(p, end);
    if (p < end && *p != '{' && *p != '[') {
        while (p < end && !strchr(",]} \n\r\t", *p))
            p++;
        return p;
    }
    for (long depth = 0; p < end;) {
        if (*p == '"') {
            if (!(p = skip_string(p, end)))
                return NULL;
            continue;
        }
        if (*p == '{' || *p == '[')
            depth++;
        else if ((*p == '}' || *p == ']') && --depth == 0)
            return p + 1;
        p++;
    }
    return NULL;
}

struct field_place {
    const char *name;
    struct body_span *to;
};

/* Finds members of the object that the text begins with. */
static void find_fields(const char *body, size_t n, const struct field_place *known, size_t n_known)
{
    const char *end = body + n, *p = skip_blank(body, end);
    if (p >= end || *p != '{')
        return;
    for (p = skip_blank(p + 1, end); p < end && *p == '"';) {
        const char *name = p + 1, *after = skip_string(p, end);
        if (!after)
            return;
        size_t n_name = (size_t)(after - 1 - name);
        p = skip_blank(after, end);
        if (p >= end || *p != ':')
            return;
        const char *value = skip_blank(p + 1, end);
        if (value >= end || !(p = skip_value(value, end)))
            return;
        for (size_t i = 0; i < n_known; i++)
            if (n_name == strlen(known[i].name) && !memcmp(name, known[i].name, n_name))
                *known[i].to = (struct body_span){value, (size_t)(p - value)};
        p = skip_blank(p, end);
        if (p >= end || *p != ',')
            return;
        p = skip_blank(p + 1, end);
    }
}

void body_fields_find(const char *body, size_t n, struct body_fields *out)
{
    memset(out, 0, sizeof *out);
    const struct field_place known[] = {
        {"model", &out->model},
        {"tools", &out->tools},
        {"functions", &out->functions},
        {"system", &out->system},
        {"instructions", &out->instructions},
        {"prompt", &out->prompt},
        {"messages", &out->messages},
        {"input", &out->input},
        {"input_prefix", &out->input_prefix},
        {"input_extra", &out->input_extra},
        {"previous_response_id", &out->previous},
        {"conversation", &out->conversation},
        {"background", &out->background},
    };
    find_fields(body, n, known, sizeof known / sizeof *known);
}

bool body_conversation_id(const struct body_fields *f, char *out, size_t size)
{
    struct body_span id = {0};
    if (f->conversation.p && f->conversation.p[0] == '{')
        find_fields(f->conversation.p, f->conversation.n, &(struct field_place){"id", &id}, 1);
    return body_span_text(id.p ? &id : &f->conversation, out, size);
}

bool body_span_text(const struct body_span *s, char *out, size_t size)
{
    if (!s->p || s->n < 2 || s->p[0] != '"' || s->n - 2 >= size || memchr(s->p, '\\', s->n))
        return false;
    memcpy(out, s->p + 1, s->n - 2);
    out[s->n - 2] = 0;
    return true;
}

/* Hashes */

static uint64_t mix(uint64_t h)
{
    h = (h ^ h >> 32) * 0xd6e8feb86659fd93u;
    h = (h ^ h >> 32) * 0xd6e8feb86659fd93u;
    return h ^ h >> 32;
}

uint64_t prefix_hash(uint64_t seed, const void *p, size_t n)
{
    const unsigned char *c = p;
    uint64_t h = seed ^ 0xcbf29ce484222325u;
    for (size_t i = 0; i < n; i++)
        h = (h ^ c[i]) * 0x100000001b3u;
    return mix(h ^ n);
}

struct prefix_hasher {
    struct prefix_hashes *out;
    uint64_t h;
    uint32_t at, last; /* bytes hashed; `at` of the last hash stored */
};

static void store_hash(struct prefix_hasher *m)
{
    struct prefix_hashes *o = m->out;
    if (o->n == HASHES_MAX)
        return;
    o->hash[o->n] = mix(m->h);
    o->at[o->n++] = m->at;
    m->last = m->at;
}

/* The distance from one hash to the next: HASH_STEP at first, then about a sixteenth of `at`. */
static uint32_t hash_step(uint32_t at)
{
    uint32_t s = HASH_STEP;
    while (s < at / 32)
        s *= 2;
    return s;
}

static void add_byte(struct prefix_hasher *m, char c)
{
    m->h = (m->h ^ (unsigned char)c) * 0x100000001b3u;
    m->at++;
    if (m->at - m->last >= hash_step(m->last))
        store_hash(m);
}

/* Hashes a value's text without blanks between tokens. Stores a hash after each element of a list. */
static void add_value(struct prefix_hasher *m, const struct body_span *s)
{
    const char *p = s->p, *end = p + s->n;
    bool quoted = false;
    int depth = 0;
    for (; p < end && m->at < HASH_BYTES_MAX; p++) {
        if (quoted) {
            add_byte(m, *p);
            if (*p == '\\' && p + 1 < end)
                add_byte(m, *++p);
            else if (*p == '"')
                quoted = false;
            continue;
        }
        if (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t')
            continue;
        depth += (*p == '{' || *p == '[') - (*p == '}' || *p == ']');
        if (depth == 0 && *p == ']')
            break; /* the next turn may append to this list */
        quoted = *p == '"';
        add_byte(m, *p);
        if (depth == 1 && *p == '}' && m->at - m->last >= HASH_STEP / 4)
            store_hash(m);
    }
}

void prefix_hashes_make(const struct body_fields *f, uint64_t seed, struct prefix_hashes *out)
{
    out->n = 0;
    out->length = 0;
    const struct body_span *prompt = f->messages.p       ? &f->messages
                                     : f->input_prefix.p ? &f->input_prefix /* of /infill */
                                     : f->prompt.p       ? &f->prompt
                                                         : &f->input;
    if (!prompt->p)
        return;
    struct prefix_hasher m = {.out = out, .h = seed};
    /* In the order in which templates render them before the conversation. */
    const struct body_span *before[] = {&f->tools, &f->functions, &f->system, &f->instructions,
                                        &f->input_extra};
    m.h = prefix_hash(m.h, f->model.p ? f->model.p : "", f->model.n);
    for (size_t i = 0; i < sizeof before / sizeof *before; i++) {
        if (before[i]->p)
            add_value(&m, before[i]);
        m.h = mix(m.h + i + 1); /* separates the fields */
    }
    add_value(&m, prompt);
    out->length = m.at;
}
