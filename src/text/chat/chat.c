/* Messages to prompt: probes a template and adapts requests to it. See the header. */
#include "text/chat/chat.h"
#include "base/json_guard.h"
#include "base/mem.h"

#include <stdlib.h>
#include <string.h>

enum { N_EFFORTS = 7 };

struct chat {
    struct jinja *t;
    char *source; /* the template */
    char *bos, *eos;
    struct chat_caps caps;
    enum chat_format format;
    enum chat_thoughts thoughts;
    bool empty_tools;              /* pass [] instead of null when there are no tools */
    const char *effort_key;        /* the template's variable for the effort; NULL = none */
    const char *effort[N_EFFORTS]; /* value to pass for each word of chat_efforts; NULL = none */
};

/* ------------------------------------------------------------------ rendering */

static bool has_budget(const struct chat *c)
{
    return jinja_uses(c->t, "thinking_budget");
}

void chat_set_budget(const struct chat *c, int tokens, json_t *kwargs)
{
    if (has_budget(c) && !json_object_get(kwargs, "thinking_budget"))
        json_object_set_new(kwargs, "thinking_budget", json_integer(tokens));
}

/* Variables that only some model families read. */
static void add_extras(const struct chat *c, json_t *ctx, const json_t *tools, const struct tm *now)
{
    if (jinja_uses(c->t, "functions") && !json_object_get(ctx, "functions")) {
        json_t *list = json_array();
        for (size_t i = 0; i < json_array_size(tools); i++) {
            json_t *t = json_array_get(tools, i), *f = json_object_get(t, "function");
            json_array_append(list, f ? f : t);
        }
        char *text = json_dumps(list, JSON_INDENT(4));
        json_object_set_new(ctx, "functions", json_string(text ? text : "[]"));
        mem_free(text);
        json_decref(list);
    }
    if (jinja_uses(c->t, "datetime") && !json_object_get(ctx, "datetime")) {
        char text[64];
        struct tm local;
        if (!now) {
            time_t t = time(NULL);
            now = localtime_r(&t, &local);
        }
        strftime(text, sizeof text, "%b %d %Y %H:%M:%S", now);
        json_object_set_new(ctx, "datetime", json_string(text));
    }
    /* Some templates call enable_thinking "thinking", MiniMax-M3's has a word, and Seed-OSS's only a budget. */
    json_t *thinking = json_object_get(ctx, "enable_thinking");
    if (!thinking || jinja_uses(c->t, "enable_thinking"))
        return;
    bool off = json_is_false(thinking);
    if (!json_object_get(ctx, "thinking"))
        json_object_set(ctx, "thinking", thinking);
    if (jinja_uses(c->t, "thinking_mode") && !json_object_get(ctx, "thinking_mode"))
        json_object_set_new(ctx, "thinking_mode", json_string(off ? "disabled" : "enabled"));
    if (off && has_budget(c) && !json_object_get(ctx, "thinking_budget"))
        json_object_set_new(ctx, "thinking_budget", json_integer(0));
}

static bool render(const struct chat *c, const json_t *messages, const json_t *tools,
                   const json_t *kwargs, bool generation, const struct tm *now,
                   struct budget *budget, bool literal, struct buf *out, struct error *err)
{
    json_t *ctx = json_object();
    const char *key;
    json_t *v;
    json_object_set_new(ctx, "documents", json_null());
    json_object_set_new(ctx, "add_generation_prompt", json_boolean(generation));
    if (kwargs)
        json_object_foreach((json_t *)kwargs, key, v) json_object_set(ctx, key, v);
    json_object_set(ctx, "messages", (json_t *)messages);
    json_object_set_new(ctx, "tools",
                        json_array_size(tools) ? json_incref((json_t *)tools)
                        : c->empty_tools       ? json_array()
                                               : json_null());
    add_extras(c, ctx, tools, now);
    json_t *own = json_pack("{s:s,s:s}", "bos_token", c->bos, "eos_token", c->eos);
    struct jinja_options opt = {.now = now, .budget = budget, .literal = literal, .own = own};
    bool ok = jinja_render(c->t, ctx, &opt, out, err);
    json_decref(own);
    json_decref(ctx);
    return ok;
}

/* ------------------------------------------------------------------ probing */

#define SYS    "Qsystem1"
#define USER   "Quser1"
#define USER2  "Quser2"
#define ANSWER "Qanswer1"
#define FUNC   "qfunc1"
#define FUNC2  "qfunc2"
#define KEY    "qkey"
#define VAL    "qvalue"
#define RES    "Qresult1"

/* Renders canned messages, taking ownership. NULL if the template refuses them. */
static char *probe_with(const struct chat *c, json_t *messages, const json_t *tools,
                        const json_t *kwargs)
{
    struct buf out = {0};
    struct error err;
    bool ok = messages && render(c, messages, tools, kwargs, true, NULL, NULL, false, &out, &err);
    json_decref(messages);
    if (ok)
        return buf_take(&out);
    buf_clear(&out);
    return NULL;
}

static char *probe(const struct chat *c, json_t *messages, const json_t *tools)
{
    return probe_with(c, messages, tools, NULL);
}

/* Whether the canned messages render and the output contains every word (NULL-terminated list). */
static bool shows(const struct chat *c, json_t *messages, const json_t *tools,
                  const char *const *words)
{
    char *text = probe(c, messages, tools);
    bool all = text != NULL;
    for (; all && *words; words++)
        all = strstr(text, *words) != NULL;
    mem_free(text);
    return all;
}
#define SHOWS(c, messages, tools, ...)                                                             \
    shows(c, messages, tools, (const char *const[]){__VA_ARGS__, NULL})

static json_t *msg(const char *role, const char *content)
{
    return json_pack("{s:s,s:s}", "role", role, "content", content);
}

static json_t *canned_call(const char *id, const char *name, bool string_args)
{
    json_t *args =
        string_args ? json_string("{\"" KEY "\": \"" VAL "\"}") : json_pack("{s:s}", KEY, VAL);
    return json_pack("{s:s,s:s,s:{s:s,s:o}}", "id", id, "type", "function", "function", "name",
                     name, "arguments", args);
}

static json_t *canned_result(const char *id, const char *name, const char *text)
{
    return json_pack("{s:s,s:s,s:s,s:s}", "role", "tool", "tool_call_id", id, "name", name,
                     "content", text);
}

/* A conversation with one or two tool calls and their results. */
static json_t *call_round(bool null_content, bool string_args, bool short_ids, bool two)
{
    const char *id = short_ids ? "abcdefgh1" : "call_00000001";
    const char *id2 = short_ids ? "abcdefgh2" : "call_00000002";
    json_t *calls = json_pack("[o]", canned_call(id, FUNC, string_args));
    if (two)
        json_array_append_new(calls, canned_call(id2, FUNC2, string_args));
    json_t *m = json_pack("[o,{s:s,s:o,s:o},o]", msg("user", USER), "role", "assistant", "content",
                          null_content ? json_null() : json_string(""), "tool_calls", calls,
                          canned_result(id, FUNC, RES));
    if (two)
        json_array_append_new(m, canned_result(id2, FUNC2, "Qresult2"));
    return m;
}

/* Whether arguments render correctly: not as a string inside a string, and not in Python syntax. */
static bool round_is_good(const struct chat *c, bool null_content, bool string_args, bool short_ids)
{
    char *text = probe(c, call_round(null_content, string_args, short_ids, false), NULL);
    bool good = text && strstr(text, FUNC) && strstr(text, KEY) && strstr(text, VAL) &&
                strstr(text, RES) && !strstr(text, "\\\"" KEY) && !strstr(text, "'" KEY "'") &&
                !strstr(text, "None");
    mem_free(text);
    return good;
}

static void probe_calls(struct chat *c)
{
    struct chat_caps *k = &c->caps;
    for (int i = 0; i < 8 && !k->calls; i++) {
        /* Preferred combinations first: any id, arguments as an object, content null. */
        bool short_ids = i & 4, strings = i & 2, empty = i & 1;
        if (round_is_good(c, !empty, strings, short_ids)) {
            k->calls = true;
            k->null_content = !empty;
            k->string_args = strings;
            k->short_ids = short_ids;
        }
    }
    if (k->calls && k->reasoning_key) {
        json_t *round = call_round(false, k->string_args, k->short_ids, false);
        json_object_set_new(json_array_get(round, 1), "content", json_string(ANSWER));
        json_object_set_new(json_array_get(round, 1), k->reasoning_key, json_string("Qthought1"));
        k->reasoning_or_content = !SHOWS(c, round, NULL, FUNC, RES);
    }
    k->two_calls =
        k->calls && SHOWS(c, call_round(k->null_content, k->string_args, k->short_ids, true), NULL,
                          FUNC, FUNC2, RES, "Qresult2");
}

/* ------------------------------------------------------------------ effort */

static const char *const efforts[N_EFFORTS] = {"none", "minimal", "low", "medium",
                                               "high", "xhigh",   "max"};
enum { EFFORT_NONE, EFFORT_MINIMAL, EFFORT_LOW, EFFORT_MEDIUM, EFFORT_HIGH };
const char chat_efforts[] = "none, minimal, low, medium, high, xhigh or max";

static int effort_index(const char *word)
{
    int i = 0;
    while (i < N_EFFORTS && strcmp(efforts[i], word) != 0)
        i++;
    return i;
}

bool chat_effort_known(const char *word)
{
    return effort_index(word) < N_EFFORTS;
}

/* Renders a prompt with thinking on and this effort, or NULL if the template refuses it. */
static char *render_effort(const struct chat *c, const char *word)
{
    json_t *kwargs = json_pack("{s:b,s:s}", "enable_thinking", 1, c->effort_key, word);
    char *text = probe_with(c, json_pack("[o]", msg("user", USER)), NULL, kwargs);
    json_decref(kwargs);
    return text;
}

/* How the template treats a word, compared with its output for an unknown word. */
enum effort_kind { EFFORT_REFUSED, EFFORT_IGNORED, EFFORT_MEANT };

static enum effort_kind probe_effort(const struct chat *c, const char *word, const char *other)
{
    char *text = render_effort(c, word);
    enum effort_kind kind = !text                           ? EFFORT_REFUSED
                            : other && !strcmp(text, other) ? EFFORT_IGNORED
                                                            : EFFORT_MEANT;
    mem_free(text);
    return kind;
}

/* The nearest word of at least this kind; of two at the same distance, the one with more effort.
 * NULL if there is none. */
static const char *nearest_effort(const enum effort_kind *kinds, int i, enum effort_kind least)
{
    int more = i, less = i - 1;
    while (more < N_EFFORTS && kinds[more] < least)
        more++;
    while (less > EFFORT_NONE && kinds[less] < least)
        less--;
    if (less <= EFFORT_NONE || (more < N_EFFORTS && more - i <= i - less))
        return more < N_EFFORTS ? efforts[more] : NULL;
    return efforts[less];
}

/* Finds out which effort words the template accepts. A template that copies any word into the
 * prompt does not show which words its model knows; gpt-oss's are assumed. An ignored word means
 * the default effort, so it is used only if no word of less effort has a meaning. */
static void probe_efforts(struct chat *c)
{
    static const char unknown[] = "qeffort", *const nones[] = {"none", "no_think"};
    c->effort_key = jinja_uses(c->t, "reasoning_effort")  ? "reasoning_effort"
                    : jinja_uses(c->t, "thinking_effort") ? "thinking_effort"
                                                          : NULL;
    if (!c->effort_key)
        return;
    char *other = render_effort(c, unknown);
    bool any = other && strstr(other, unknown), meant = false;
    enum effort_kind kinds[N_EFFORTS] = {EFFORT_REFUSED};
    for (int i = EFFORT_MINIMAL; i < N_EFFORTS; i++)
        kinds[i] = !any                                  ? probe_effort(c, efforts[i], other)
                   : i >= EFFORT_LOW && i <= EFFORT_HIGH ? EFFORT_MEANT
                                                         : EFFORT_REFUSED;
    for (int i = EFFORT_NONE; i < N_EFFORTS; i++) {
        c->effort[i] = nearest_effort(kinds, i, meant ? EFFORT_MEANT : EFFORT_IGNORED);
        meant |= kinds[i] == EFFORT_MEANT;
    }
    for (int i = 0; i < 2 && !any; i++) {
        if (probe_effort(c, nones[i], other) == EFFORT_MEANT) {
            c->effort[EFFORT_NONE] = nones[i];
            break;
        }
    }
    mem_free(other);
}

int chat_own_efforts(const struct chat *c, const char **out, int most_out)
{
    int n = 0;
    for (int i = EFFORT_MINIMAL; i < N_EFFORTS && n < most_out; i++)
        if (c->effort_key && c->effort[i] && !strcmp(c->effort[i], efforts[i]))
            out[n++] = efforts[i];
    return n;
}

void chat_set_effort(const struct chat *c, const char *word, json_t *kwargs)
{
    int i = effort_index(word);
    CHECK(i < N_EFFORTS, "an effort that was not checked: %s", word);
    if (i == EFFORT_NONE || !json_object_get(kwargs, "enable_thinking"))
        json_object_set_new(kwargs, "enable_thinking", json_boolean(i != EFFORT_NONE));
    if (c->effort_key && c->effort[i] && !json_object_get(kwargs, c->effort_key))
        json_object_set_new(kwargs, c->effort_key, json_string(c->effort[i]));
}

/* ------------------------------------------------------------------ all of it */

static void probe_all(struct chat *c, const char *source, size_t len)
{
    struct chat_caps *k = &c->caps;
    char *base = probe(c, json_pack("[o]", msg("user", USER)), NULL);
    if (!base) {
        c->empty_tools = true;
        char *again = probe(c, json_pack("[o]", msg("user", USER)), NULL);
        c->empty_tools = again != NULL;
        base = again;
    }
    k->string_content = base && strstr(base, USER);
    mem_free(base);
    char *typed = probe(
        c,
        json_pack("[{s:s,s:[{s:s,s:s}]}]", "role", "user", "content", "type", "text", "text", USER),
        NULL);
    k->typed_content =
        typed && strstr(typed, USER) && !strstr(typed, "'text'") && !strstr(typed, "\"text\"");
    mem_free(typed);
    k->system =
        SHOWS(c, json_pack("[o,o]", msg("system", SYS), msg("user", USER)), NULL, SYS, USER);
    k->developer =
        SHOWS(c, json_pack("[o,o]", msg("developer", SYS), msg("user", USER)), NULL, SYS, USER);
    k->system_later = SHOWS(c,
                            json_pack("[o,o,o,o]", msg("user", USER), msg("assistant", ANSWER),
                                      msg("system", SYS), msg("user", USER2)),
                            NULL, USER, ANSWER, SYS, USER2);
    k->same_role =
        SHOWS(c, json_pack("[o,o]", msg("user", USER), msg("user", USER2)), NULL, USER, USER2);
    k->assistant_first = SHOWS(c, json_pack("[o,o]", msg("assistant", ANSWER), msg("user", USER)),
                               NULL, ANSWER, USER);
    json_t *tools =
        json_pack("[{s:s,s:{s:s,s:s,s:{s:s,s:{s:{s:s,s:s}},s:[s]}}}]", "type", "function",
                  "function", "name", FUNC, "description", "about", "parameters", "type", "object",
                  "properties", KEY, "type", "string", "description", "about", "required", KEY);
    k->tools = SHOWS(c, json_pack("[o]", msg("user", USER)), tools, USER, FUNC, KEY);
    json_decref(tools);
#define MENTIONS(s) (memmem(source, len, s, strlen(s)) != NULL)
    k->reasoning_key =
        MENTIONS("reasoning_content") ? "reasoning_content"
        : MENTIONS(".thinking") || MENTIONS("['thinking']") || MENTIONS("\"thinking\"") ? "thinking"
        : MENTIONS(".reasoning") || MENTIONS("['reasoning']") ? "reasoning"
                                                              : NULL;
#undef MENTIONS
    probe_calls(c);
    probe_efforts(c);
}

struct chat *chat_new(const struct chat_source *s, struct error *err)
{
    struct jinja *t = jinja_compile(s->template, s->template_len, err);
    if (!t) {
        error_prefix(err, "chat template");
        return NULL;
    }
    struct chat *c = mem_zalloc(1, sizeof *c);
    c->t = t;
    c->source = mem_strndup(s->template, s->template_len);
    c->bos = mem_strdup(s->bos ? s->bos : "");
    c->eos = mem_strdup(s->eos ? s->eos : "");
    c->format = chat_format_detect(s->template, s->template_len);
    c->thoughts = chat_thoughts_detect(s->template, s->template_len);
    probe_all(c, s->template, s->template_len);
    return c;
}

void chat_free(struct chat *c)
{
    if (!c)
        return;
    jinja_free(c->t);
    mem_free(c->source);
    mem_free(c->bos);
    mem_free(c->eos);
    mem_free(c);
}

const struct chat_caps *chat_caps(const struct chat *c)
{
    return &c->caps;
}

enum chat_format chat_reply_format(const struct chat *c, bool with_tools)
{
    /* A template without tool support gets the tools as text, which asks for the Hermes format. */
    return with_tools && !c->caps.tools ? CHAT_HERMES : c->format;
}

enum chat_thoughts chat_thoughts(const struct chat *c)
{
    return c->thoughts;
}

/* ------------------------------------------------------------------ one message */

static const char *role_of(const json_t *m)
{
    return json_string_value(json_object_get(m, "role"));
}

static bool has_role(const json_t *m, const char *role)
{
    const char *r = role_of(m);
    return r && !strcmp(r, role);
}

/* Converts content of any shape to text. */
static bool content_text(const json_t *content, size_t index, struct buf *out, struct error *err)
{
    if (!content || json_is_null(content))
        return true;
    if (json_is_string(content)) {
        buf_add(out, json_string_value(content), json_string_length(content));
        return true;
    }
    if (!json_is_array(content)) {
        char *text = json_dumps(content, JSON_ENCODE_ANY);
        buf_adds(out, text ? text : "");
        mem_free(text);
        return true;
    }
    bool any = false;
    for (size_t i = 0; i < json_array_size(content); i++) {
        const json_t *part = json_array_get(content, i), *text = json_object_get(part, "text");
        const char *type = json_string_value(json_object_get(part, "type"));
        if (json_is_string(part))
            text = part;
        if (!json_is_string(text)) {
            if (type && !strcmp(type, "refusal"))
                text = json_object_get(part, "refusal");
            if (!json_is_string(text))
                return error_set(err,
                                 "messages[%zu].content[%zu]: a part of type '%s' is not "
                                 "supported by this model",
                                 index, i, type ? type : "?");
        }
        if (any)
            buf_addc(out, '\n');
        buf_add(out, json_string_value(text), json_string_length(text));
        any = true;
    }
    return true;
}

static void set_text(json_t *m, const char *s, size_t n)
{
    json_object_set_new(m, "content", json_stringn(s ? s : "", n));
}

/* Derives nine letters or digits from any id; equal ids give equal results. */
static json_t *short_id(const char *id)
{
    char out[10];
    uint64_t h = 1469598103934665603u;
    bool fits = strlen(id) == 9;
    for (const char *p = id; *p; p++) {
        h = (h ^ (uint8_t)*p) * 1099511628211u;
        fits &= (*p >= '0' && *p <= '9') || ((*p | 32) >= 'a' && (*p | 32) <= 'z');
    }
    if (fits)
        return json_string(id);
    for (int i = 0; i < 9; i++, h = h >> 5 | h << 59)
        out[i] = "0123456789abcdefghijklmnopqrstuv"[h & 31];
    out[9] = 0;
    return json_string(out);
}

/* A conversation being converted to the template's shape. */
struct conversation {
    const struct chat *c;
    bool plain;                /* only user and assistant messages */
    json_t *out;               /* array */
    json_t *names;             /* call id -> function name */
    struct buf pending;        /* system text that waits for the next user message */
    struct buf joined;         /* text of out's last message after joining others */
    bool is_joining;           /* joined is not yet written to that message */
    struct json_counts counts; /* limits of the parsed arguments, over the whole request */
    struct budget *budget;
};

/* Parses JSON inside a string. NULL if it is invalid or exceeds a request's limits. */
static json_t *parse_args(struct conversation *s, const json_t *args)
{
    const char *text = json_string_value(args);
    size_t n = json_string_length(args);
    if (!json_guard(text, n, &json_limits_request, &s->counts, NULL))
        return NULL;
    return json_loadb(text, n, JSON_ALLOW_NUL, NULL);
}

/* Arguments in the shape the template expects. */
static json_t *convert_args(struct conversation *s, json_t *args)
{
    const struct chat_caps *k = &s->c->caps;
    if (!args)
        return k->string_args ? json_string("{}") : json_object();
    if (json_is_string(args) && !k->string_args) {
        json_t *j = parse_args(s, args);
        return j ? j : json_string_length(args) ? json_incref(args) : json_object();
    }
    if (!json_is_string(args) && k->string_args) {
        char *text = json_dumps(args, JSON_ENCODE_ANY);
        json_t *j = json_string(text ? text : "{}");
        mem_free(text);
        return j;
    }
    return json_incref(args);
}

static json_t *convert_call(struct conversation *s, const json_t *call, size_t n)
{
    json_t *f = json_object_get(call, "function"), *out = json_object(), *fn = json_object();
    if (!f)
        f = (json_t *)call;
    const char *id = json_string_value(json_object_get(call, "id"));
    char made[32];
    snprintf(made, sizeof made, "call_%zu", n);
    if (!id)
        id = made;
    json_object_set_new(out, "id", s->c->caps.short_ids ? short_id(id) : json_string(id));
    json_object_set_new(out, "type", json_string("function"));
    json_t *name = json_object_get(f, "name");
    json_object_set_new(fn, "name", json_is_string(name) ? json_incref(name) : json_string(""));
    json_object_set_new(fn, "arguments", convert_args(s, json_object_get(f, "arguments")));
    json_object_set_new(out, "function", fn);
    return out;
}

/* Appends a call as <tool_call> text, for templates without tool calls. */
static void append_call_text(struct conversation *s, const json_t *call, struct buf *out)
{
    const json_t *f = json_object_get(call, "function");
    json_t *args = json_object_get(f, "arguments"), *j = json_object();
    json_t *parsed = json_is_string(args) ? parse_args(s, args) : NULL;
    json_object_set(j, "name", json_object_get(f, "name"));
    json_object_set(j, "arguments", parsed ? parsed : args);
    char *text = json_dumps(j, 0);
    buf_addf(out, "%s<tool_call>\n%s\n</tool_call>", out->len ? "\n" : "", text ? text : "{}");
    mem_free(text);
    json_decref(parsed);
    json_decref(j);
}

/* ------------------------------------------------------------------ the conversation */

static json_t *last(const json_t *array)
{
    size_t n = json_array_size(array);
    return n ? json_array_get(array, n - 1) : NULL;
}

static void add_before(json_t *m, const struct buf *text)
{
    const json_t *old = json_object_get(m, "content");
    struct buf b = {0};
    buf_add(&b, text->p, text->len);
    if (json_string_length(old)) {
        buf_adds(&b, "\n\n");
        buf_add(&b, json_string_value(old), json_string_length(old));
    }
    set_text(m, b.p, b.len);
    buf_clear(&b);
}

/* Writes the joined text to the last message, once for any number of joins. */
static void flush_joined(struct conversation *s)
{
    if (!s->is_joining)
        return;
    set_text(last(s->out), s->joined.p, s->joined.len);
    buf_reset(&s->joined);
    s->is_joining = false;
}

static void push(struct conversation *s, json_t *m)
{
    flush_joined(s);
    json_array_append_new(s->out, m);
}

/* Joins text to the last message. */
static void join_last(struct conversation *s, const json_t *text)
{
    if (!s->is_joining) {
        const json_t *old = json_object_get(last(s->out), "content");
        buf_add(&s->joined, json_string_value(old), json_string_length(old));
        s->is_joining = true;
    }
    if (s->joined.len && json_string_length(text))
        buf_adds(&s->joined, "\n\n");
    buf_add(&s->joined, json_string_value(text), json_string_length(text));
}

/* Appends m, or joins it to the last message if the template requires alternating roles. Takes
 * ownership of m. */
static void append(struct conversation *s, json_t *m)
{
    json_t *prev = last(s->out);
    bool strict = s->plain || !s->c->caps.same_role;
    if (strict && prev && !strcmp(role_of(prev), role_of(m)) && !has_role(m, "tool") &&
        !json_object_get(prev, "tool_calls") && !json_object_get(m, "tool_calls")) {
        join_last(s, json_object_get(m, "content"));
        json_decref(m);
        return;
    }
    if (!prev && has_role(m, "assistant") && (s->plain || !s->c->caps.assistant_first))
        push(s, msg("user", ""));
    push(s, m);
}

static void flush_pending(struct conversation *s)
{
    if (!s->pending.len)
        return;
    json_t *m = msg("user", "");
    set_text(m, s->pending.p, s->pending.len);
    buf_reset(&s->pending);
    append(s, m);
}

static void add_system(struct conversation *s, json_t *m)
{
    const struct chat_caps *k = &s->c->caps;
    const json_t *text = json_object_get(m, "content");
    json_t *prev = last(s->out);
    bool leading = !prev || (json_array_size(s->out) == 1 && has_role(prev, "system"));
    if (!s->plain && k->system && leading && prev) {
        join_last(s, text);
        json_decref(m);
    } else if (!s->plain && (leading ? k->system && !s->pending.len : k->system_later)) {
        push(s, m);
    } else { /* prepend it to the next user message */
        if (s->pending.len)
            buf_adds(&s->pending, "\n\n");
        buf_add(&s->pending, json_string_value(text), json_string_length(text));
        json_decref(m);
    }
}

static void add_user(struct conversation *s, json_t *m)
{
    if (s->pending.len) {
        add_before(m, &s->pending);
        buf_reset(&s->pending);
    }
    append(s, m);
}

static void add_tool_result(struct conversation *s, json_t *m)
{
    const json_t *text = json_object_get(m, "content");
    const char *id = json_string_value(json_object_get(m, "tool_call_id"));
    if (s->plain || !s->c->caps.calls) {
        struct buf b = {0};
        buf_adds(&b, "<tool_response>\n");
        buf_add(&b, json_string_value(text), json_string_length(text));
        buf_adds(&b, "\n</tool_response>");
        json_t *u = msg("user", "");
        set_text(u, b.p, b.len);
        buf_clear(&b);
        json_decref(m);
        append(s, u);
        return;
    }
    if (id) {
        json_t *name = json_object_get(s->names, id);
        if (name && !json_object_get(m, "name"))
            json_object_set(m, "name", name);
        if (s->c->caps.short_ids)
            json_object_set_new(m, "tool_call_id", short_id(id));
    }
    push(s, m);
}

/* Moves the text before a call to the end of the reasoning, for templates that accept only one of
 * them. */
static void move_text_to_reasoning(json_t *m, const char *key)
{
    const json_t *thoughts = json_object_get(m, key), *text = json_object_get(m, "content");
    if (!json_string_length(thoughts) || !json_string_length(text))
        return;
    struct buf b = {0};
    buf_add(&b, json_string_value(thoughts), json_string_length(thoughts));
    buf_adds(&b, "\n\n");
    buf_add(&b, json_string_value(text), json_string_length(text));
    json_object_set_new(m, key, json_stringn(b.p, b.len));
    set_text(m, "", 0);
    buf_clear(&b);
}

static void add_assistant(struct conversation *s, json_t *m, const json_t *calls)
{
    const struct chat_caps *k = &s->c->caps;
    flush_pending(s);
    if (!json_array_size(calls)) {
        append(s, m);
        return;
    }
    json_t *fitted = json_array();
    for (size_t i = 0; i < json_array_size(calls); i++) {
        const json_t *call = json_array_get(calls, i);
        json_t *f = convert_call(s, call, i);
        const char *id = json_string_value(json_object_get(call, "id"));
        if (id)
            json_object_set(s->names, id, json_object_get(json_object_get(f, "function"), "name"));
        json_array_append_new(fitted, f);
    }
    if (s->plain || !k->calls) {
        struct buf b = {0};
        const json_t *text = json_object_get(m, "content");
        buf_add(&b, json_string_value(text), json_string_length(text));
        for (size_t i = 0; i < json_array_size(fitted); i++)
            append_call_text(s, json_array_get(fitted, i), &b);
        set_text(m, b.p, b.len);
        buf_clear(&b);
        json_decref(fitted);
        append(s, m);
        return;
    }
    if (k->reasoning_or_content)
        move_text_to_reasoning(m, k->reasoning_key);
    if (!json_string_length(json_object_get(m, "content")) && k->null_content)
        json_object_set_new(m, "content", json_null());
    if (json_array_size(fitted) > 1 && !k->two_calls) {
        /* One message per call. split_results then moves each result to its call. */
        for (size_t i = 0; i < json_array_size(fitted); i++) {
            json_t *one = i ? json_pack("{s:s,s:o}", "role", "assistant", "content",
                                        k->null_content ? json_null() : json_string(""))
                            : json_copy(m);
            json_object_set_new(one, "tool_calls", json_pack("[O]", json_array_get(fitted, i)));
            push(s, one);
        }
        json_decref(fitted);
        json_decref(m);
        return;
    }
    json_object_set_new(m, "tool_calls", fitted);
    if (!last(s->out) && !k->assistant_first)
        push(s, msg("user", ""));
    push(s, m);
}

/* Moves each tool result directly after the message with its call: the first later result with the
 * call's id that no other call has claimed. */
static json_t *split_results(json_t *out)
{
    size_t n = json_array_size(out);
    json_t *first = json_object(), *sorted = json_array(); /* call id -> next result */
    json_int_t *next = mem_zalloc(n, sizeof *next);        /* (n) next with the same id */
    bool *moved = mem_zalloc(n, sizeof *moved);            /* (n) */
    for (size_t i = n; i-- > 0;) {
        const json_t *m = json_array_get(out, i);
        const char *id = json_string_value(json_object_get(m, "tool_call_id"));
        if (!has_role(m, "tool") || !id)
            continue;
        const json_t *later = json_object_get(first, id);
        next[i] = later ? json_integer_value(later) : (json_int_t)n;
        json_object_set_new(first, id, json_integer((json_int_t)i));
    }
    for (size_t i = 0; i < n; i++) {
        if (moved[i])
            continue;
        json_t *m = json_array_get(out, i);
        const json_t *call = json_array_get(json_object_get(m, "tool_calls"), 0);
        const char *id = json_string_value(json_object_get(call, "id"));
        json_t *at = id ? json_object_get(first, id) : NULL;
        json_array_append(sorted, m);
        size_t r = at ? (size_t)json_integer_value(at) : n;
        while (r < i)
            r = (size_t)next[r];
        if (r < n) {
            json_array_append(sorted, json_array_get(out, r));
            moved[r] = true;
            json_integer_set(at, next[r]);
        } else if (at) {
            json_integer_set(at, (json_int_t)n);
        }
    }
    json_decref(first);
    mem_free(next);
    mem_free(moved);
    json_decref(out);
    return sorted;
}

enum { MESSAGE_WORK = 32 }; /* work units per message, in addition to its text */

/* Adds one message of the request to the conversation. */
static bool add_message(struct conversation *s, const json_t *in, size_t index, struct error *err)
{
    const char *role = role_of(in);
    const struct chat_caps *k = &s->c->caps;
    if (!json_is_object(in) || !role)
        return error_set(err, "messages[%zu]: must be an object with a role", index);
    if (!budget_spend(s->budget, MESSAGE_WORK))
        return budget_error(s->budget, err);
    if (!strcmp(role, "developer") && (!k->developer || s->plain))
        role = "system";
    if (!strcmp(role, "function"))
        role = "tool";
    struct buf text = {0};
    if (!content_text(json_object_get(in, "content"), index, &text, err)) {
        buf_clear(&text);
        return false;
    }
    if (!budget_spend(s->budget, text.len / 16)) {
        buf_clear(&text);
        return budget_error(s->budget, err);
    }
    json_t *m = json_copy((json_t *)in);
    json_object_set_new(m, "role", json_string(role));
    json_object_del(m, "tool_calls");
    json_t *content = json_stringn(text.p ? text.p : "", text.len);
    buf_clear(&text);
    if (!content) {
        json_decref(m);
        return error_set(err, "messages[%zu].content: not valid UTF-8", index);
    }
    json_object_set_new(m, "content", content);
    static const char *const keys[] = {"reasoning_content", "reasoning", "thinking"};
    json_t *thoughts = NULL;
    for (size_t i = 0; i < 3 && !thoughts; i++) {
        json_t *v = json_object_get(in, keys[i]);
        thoughts = json_is_string(v) ? v : NULL;
    }
    if (thoughts && k->reasoning_key && !s->plain)
        json_object_set(m, k->reasoning_key, thoughts);
    if (!strcmp(role, "system") || !strcmp(role, "developer"))
        add_system(s, m);
    else if (!strcmp(role, "tool"))
        add_tool_result(s, m);
    else if (!strcmp(role, "assistant"))
        add_assistant(s, m, json_object_get(in, "tool_calls"));
    else
        add_user(s, m);
    return true;
}

/* Tool definitions as text, for templates without tool support. */
static json_t *tools_message(const json_t *tools)
{
    struct buf b = {0};
    buf_adds(&b, "You can call these functions, given as JSON schemas:\n<tools>\n");
    for (size_t i = 0; i < json_array_size(tools); i++) {
        char *t = json_dumps(json_array_get(tools, i), 0);
        buf_addf(&b, "%s\n", t ? t : "{}");
        mem_free(t);
    }
    buf_adds(&b,
             "</tools>\nTo call one, answer with its name and arguments as JSON, in this form:\n"
             "<tool_call>\n{\"name\": \"NAME\", \"arguments\": {\"PARAMETER\": VALUE}}\n"
             "</tool_call>");
    json_t *m = msg("system", "");
    set_text(m, b.p, b.len);
    buf_clear(&b);
    return m;
}

static json_t *normalize(const struct chat *c, const struct chat_request *r, bool plain,
                         struct error *err)
{
    struct conversation s = {
        .c = c, .plain = plain, .out = json_array(), .names = json_object(), .budget = r->budget};
    bool ok = true;
    for (size_t i = 0; ok && i < json_array_size(r->messages); i++)
        ok = add_message(&s, json_array_get(r->messages, i), i, err);
    if (ok)
        flush_pending(&s);
    flush_joined(&s);
    if (ok && json_array_size(r->tools) && (plain || !c->caps.tools)) {
        json_t *t = tools_message(r->tools), *first = json_array_get(s.out, 0);
        const json_t *text = json_object_get(t, "content");
        struct buf b = {0};
        buf_add(&b, json_string_value(text), json_string_length(text));
        if (first && has_role(first, "system")) {
            const json_t *old = json_object_get(first, "content");
            struct buf all = {0};
            buf_add(&all, json_string_value(old), json_string_length(old));
            if (all.len)
                buf_adds(&all, "\n\n");
            buf_add(&all, b.p, b.len);
            set_text(first, all.p, all.len);
            buf_clear(&all);
        } else if (!plain && c->caps.system) {
            json_array_insert(s.out, 0, t);
        } else if (first && has_role(first, "user")) {
            add_before(first, &b);
        } else {
            json_object_set_new(t, "role", json_string("user"));
            json_array_insert(s.out, 0, t);
        }
        buf_clear(&b);
        json_decref(t);
    }
    if (ok && c->caps.calls && !c->caps.two_calls && !plain)
        s.out = split_results(s.out);
    if (ok && !c->caps.string_content && c->caps.typed_content) {
        for (size_t i = 0; i < json_array_size(s.out); i++) {
            json_t *m = json_array_get(s.out, i), *text = json_object_get(m, "content");
            if (json_is_string(text))
                json_object_set_new(m, "content",
                                    json_pack("[{s:s,s:O}]", "type", "text", "text", text));
        }
    }
    json_decref(s.names);
    buf_clear(&s.pending);
    buf_clear(&s.joined);
    if (!ok) {
        json_decref(s.out);
        return NULL;
    }
    return s.out;
}

/* The tool definitions shown to the model, without `strict`: that flag is for the engine, and
 * models not trained on it respond worse. NULL if there are no tools. */
static json_t *shown_tools(const json_t *tools)
{
    if (!json_is_array(tools))
        return json_incref((json_t *)tools);
    json_t *out = json_array();
    for (size_t i = 0; i < json_array_size(tools); i++) {
        json_t *t = json_array_get(tools, i), *f = json_object_get(t, "function");
        if (!json_object_get(f, "strict")) {
            json_array_append(out, t);
            continue;
        }
        json_t *tool = json_copy(t), *function = json_copy(f);
        json_object_del(function, "strict");
        json_object_set_new(tool, "function", function);
        json_array_append_new(out, tool);
    }
    return out;
}

static bool render_request(const struct chat *c, const struct chat_request *r, struct buf *out,
                           struct error *err)
{
    if (!json_is_array(r->messages))
        return error_set(err, "messages: must be an array");
    if (!json_array_size(r->messages))
        return error_set(err, "messages: must not be empty");
    if (r->kwargs && !json_is_object(r->kwargs))
        return error_set(err, "chat_template_kwargs: must be an object");
    struct error first = {0}, second = {0};
    for (int plain = 0; plain < 2; plain++) {
        json_t *m = normalize(c, r, plain, plain ? &second : &first);
        if (!m) { /* the request is invalid */
            *err = plain ? second : first;
            return false;
        }
        bool ok = render(c, m, c->caps.tools && !plain ? r->tools : NULL, r->kwargs,
                         !r->no_generation_prompt, r->now, r->budget, r->literal, out,
                         plain ? &second : &first);
        json_decref(m);
        if (ok)
            return true;
        if (!budget_spend(r->budget, 0))
            break;
    }
    *err = first;
    return error_prefix(err, "chat template");
}

const char *chat_template_text(const struct chat *c)
{
    return c->source;
}

bool chat_render(const struct chat *c, const struct chat_request *r, struct buf *out,
                 struct error *err)
{
    struct chat_request shown = *r;
    json_t *tools = shown_tools(r->tools);
    shown.tools = tools;
    bool ok = render_request(c, &shown, out, err);
    json_decref(tools);
    return ok;
}
