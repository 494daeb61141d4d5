/*
 * Chats of include/steel.h. Messages are kept as JSON and rendered by a template (text/chat/chat.h). A request of the
 * public API generates the answer, and the parser of the model's format (text/chat/chat_parse.h) turns its text into
 * events. Owns the conversation and the parsed events that were not read yet. Knows nothing of steps and pages.
 */
#include "base/base64.h"
#include "base/clock.h"
#include "base/mem.h"
#include "engine/api_int.h"
#include "engine/images.h"
#include "text/literal.h"
#include "text/chat/chat.h"
#include "text/chat/chat_check.h"
#include "text/chat/chat_grammar.h"

#include <stdlib.h>
#include <string.h>

struct steel_chat {
    struct steel_engine *engine;
    struct chat *chat;
    json_t *messages;  /* array, without the system message */
    json_t *images;    /* parts for the next message of the user, or NULL */
    json_t *tools;     /* array or NULL */
    json_t *variables; /* object or NULL */
    json_t *system;    /* string or NULL */
    enum steel_thinking thinking;
    enum chat_format format;
    bool has_format;               /* set by the caller; false: from the template */
    struct steel_answer *answer;   /* in progress, or NULL */
    struct steel_request *settler; /* reads the conversation into the prefix cache, or NULL */
    struct token_list settled;     /* the tokens it reads */
};

/* A parsed event that was not read yet. Its text and id are in the answer's buffer. */
struct news {
    enum steel_chat_event_kind kind;
    int call;
    size_t at, n, id_at;
};

struct steel_answer {
    struct steel_chat *chat;
    struct steel_request *request;
    struct chat_parser *parser;
    json_t *tools; /* the chat's tools at the start of the answer; used by the parser */
    struct chat_message message;
    struct news *news; /* (n_news), unread from next_news */
    int n_news, next_news, cap_news;
    struct buf text;
    struct steel_event end; /* once the request is done */
};

/* ------------------------------------------------------------------ conversations */

struct steel_chat *steel_chat_new(struct steel_engine *engine, const char *template_path,
                                  struct steel_error *error)
{
    struct chat_source source = {0};
    struct error err = {0};
    if (!lib_tokenizer(engine, error))
        return NULL;
    enum steel_error_kind kind = template_path ? STEEL_INVALID : STEEL_NO_CHAT;
    bool ok = template_path ? chat_source_open(template_path, &source, &err)
                            : chat_source_load(engine_file(engine->e), &source, &err);
    struct chat *chat = ok ? chat_new(&source, &err) : NULL;
    chat_source_clear(&source);
    if (!chat) {
        lib_fail(error, ok ? STEEL_INVALID : kind, err.msg);
        return NULL;
    }
    struct steel_chat *c = mem_zalloc(1, sizeof *c);
    c->engine = engine;
    c->chat = chat;
    c->messages = json_array();
    return c;
}

static void end_settling(struct steel_chat *c)
{
    steel_request_free(c->settler);
    c->settler = NULL;
    token_list_clear(&c->settled);
}

/* Called before an answer to `ids`. If only one request runs at a time, the answer waits for the settling and finds the
 * conversation in the cache, so a useful settling continues. If several run, both would read the same tokens, so the
 * settling ends. */
static void settle_or_end(struct steel_chat *c, const struct token_list *ids)
{
    const struct step_limits *lim = stepper_limits(engine_runtime(c->engine->e)->step);
    size_t n = c->settled.n;
    if (lim->max_seqs > 1 || n > ids->n ||
        (n && memcmp(c->settled.ids, ids->ids, n * sizeof *ids->ids)))
        end_settling(c);
}

void steel_chat_free(struct steel_chat *chat)
{
    if (!chat)
        return;
    CHECK(!chat->answer, "a chat is freed before its answer");
    end_settling(chat);
    chat_free(chat->chat);
    json_decref(chat->messages);
    json_decref(chat->images);
    json_decref(chat->tools);
    json_decref(chat->variables);
    json_decref(chat->system);
    mem_free(chat);
}

/* Parses JSON. `what` names the value in errors. */
static json_t *parse_json(const char *text, const char *what, struct steel_error *error)
{
    json_error_t e;
    json_t *j = json_loads(text, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_ANY, &e);
    struct error err = {0};
    if (!j) {
        error_set(&err, "%s: not JSON: %s (line %d, column %d)", what, e.text, e.line, e.column);
        lib_fail(error, STEEL_INVALID, err.msg);
    }
    return j;
}

bool steel_chat_set_system(struct steel_chat *chat, const char *text, struct steel_error *error)
{
    json_t *j = text && *text ? json_string(text) : NULL;
    if (text && *text && !j)
        return lib_fail(error, STEEL_INVALID, "the system text is not valid UTF-8");
    json_decref(chat->system);
    chat->system = j;
    return true;
}

bool steel_chat_set_tools(struct steel_chat *chat, const char *json, struct steel_error *error)
{
    json_t *j = json ? parse_json(json, "tools", error) : NULL;
    if (json && !j)
        return false;
    char where[CHAT_WHERE];
    struct error err = {0};
    if (!chat_check_tools(j, where, &err)) {
        json_decref(j);
        return lib_fail(error, STEEL_INVALID, err.msg);
    }
    json_decref(chat->tools);
    chat->tools = j;
    return true;
}

bool steel_chat_set_variables(struct steel_chat *chat, const char *json, struct steel_error *error)
{
    json_t *j = json ? parse_json(json, "variables", error) : NULL;
    if (json && !j)
        return false;
    if (j && !json_is_object(j)) {
        json_decref(j);
        return lib_fail(error, STEEL_INVALID, "variables must be a JSON object");
    }
    json_decref(chat->variables);
    chat->variables = j;
    return true;
}

bool steel_chat_set_format(struct steel_chat *chat, const char *name, struct steel_error *error)
{
    struct error err = {0};
    if (name && !chat_format_from_name(name, &chat->format)) {
        error_set(&err, "format: no format '%.64s'", name);
        return lib_fail(error, STEEL_INVALID, err.msg);
    }
    chat->has_format = name != NULL;
    return true;
}

void steel_chat_set_thinking(struct steel_chat *chat, enum steel_thinking thinking)
{
    chat->thinking = thinking;
}

/* Appends an array of messages, all or none. Takes the reference. */
static bool add_messages(struct steel_chat *chat, json_t *list, struct steel_error *error)
{
    char where[CHAT_WHERE];
    struct error err = {0};
    bool none = json_is_array(list) && !json_array_size(list);
    bool ok = none || chat_check_messages(list, where, &err);
    if (ok)
        json_array_extend(chat->messages, list);
    else
        lib_fail(error, STEEL_INVALID, err.msg);
    json_decref(list);
    return ok;
}

static bool set_text(json_t *m, const char *key, const char *text, struct steel_error *error)
{
    json_t *j = text ? json_string(text) : NULL;
    struct error err = {0};
    if (text && !j) {
        error_set(&err, "the message's %s is not valid UTF-8", key);
        return lib_fail(error, STEEL_INVALID, err.msg);
    }
    if (j)
        json_object_set_new(m, key, j);
    return true;
}

bool steel_chat_add_image(struct steel_chat *chat, const void *bytes, size_t n,
                          struct steel_error *error)
{
    struct buf url = {0};
    if (!engine_encoder(chat->engine->e))
        return lib_fail(error, STEEL_INVALID, "this model reads text only");
    buf_adds(&url, "data:;base64,");
    base64_encode(bytes, n, &url);
    if (!chat->images)
        chat->images = json_array();
    json_array_append_new(chat->images, json_pack("{s:s, s:{s:s%}}", "type", "image_url",
                                                  "image_url", "url", url.p, url.len));
    buf_clear(&url);
    return true;
}

/* Puts the images that wait before the text of a message. */
static void attach_images(struct steel_chat *chat, json_t *m)
{
    json_t *text = json_object_get(m, "content");
    if (json_is_string(text))
        json_array_append_new(chat->images, json_pack("{s:s, s:O}", "type", "text", "text", text));
    json_object_set_new(m, "content", chat->images);
    chat->images = NULL;
}

bool steel_chat_add(struct steel_chat *chat, const struct steel_message *message,
                    struct steel_error *error)
{
    json_t *m = json_object(), *calls = NULL;
    bool ok = set_text(m, "role", message->role, error) &&
              set_text(m, "content", message->content, error) &&
              set_text(m, "reasoning_content", message->thinking, error) &&
              set_text(m, "tool_call_id", message->call_id, error);
    if (ok && message->tool_calls) {
        calls = parse_json(message->tool_calls, "tool_calls", error);
        ok = calls && json_object_set_new(m, "tool_calls", calls) == 0;
    }
    if (ok && message->tool_calls && !message->content)
        json_object_set_new(m, "content", json_null());
    if (!ok) {
        json_decref(m);
        return false;
    }
    if (chat->images && message->role && !strcmp(message->role, "user"))
        attach_images(chat, m);
    json_t *list = json_array();
    json_array_append_new(list, m);
    return add_messages(chat, list, error);
}

bool steel_chat_add_json(struct steel_chat *chat, const char *json, struct steel_error *error)
{
    json_t *j = parse_json(json, "messages", error);
    if (!j)
        return false;
    if (json_is_object(j)) {
        json_t *list = json_array();
        json_array_append_new(list, j);
        j = list;
    }
    return add_messages(chat, j, error);
}

int steel_chat_n_messages(const struct steel_chat *chat)
{
    return (int)json_array_size(chat->messages);
}

const char *steel_chat_role(const struct steel_chat *chat, int i)
{
    const char *role =
        i < 0
            ? NULL
            : json_string_value(json_object_get(json_array_get(chat->messages, (size_t)i), "role"));
    return role ? role : "";
}

void steel_chat_cut(struct steel_chat *chat, int n)
{
    for (size_t i = json_array_size(chat->messages); n >= 0 && i > (size_t)n; i--)
        json_array_remove(chat->messages, i - 1);
}

int steel_chat_json(const struct steel_chat *chat, int first, char *text, int cap)
{
    json_t *list = json_array();
    for (size_t i = first > 0 ? (size_t)first : 0; i < json_array_size(chat->messages); i++)
        json_array_append(list, json_array_get(chat->messages, i));
    char *s = json_dumps(list, JSON_COMPACT);
    int n = s ? lib_put(s, strlen(s), text, cap) : -1;
    free(s);
    json_decref(list);
    return n;
}

/* Renders the prompt, with one more user message if `extra` is not NULL. *images: those of the conversation; NULL = the
 * model reads text. */
static bool render(const struct steel_chat *c, const json_t *tools, const char *extra,
                   struct buf *out, struct prompt_images **images, struct error *err)
{
    *images = prompt_images_new(c->engine->e, &(struct image_rules){0});
    json_t *all = json_array();
    if (c->system)
        json_array_append_new(all, json_pack("{s:s, s:O}", "role", "system", "content", c->system));
    json_array_extend(all, c->messages);
    if (extra)
        json_array_append_new(all, json_pack("{s:s, s:s}", "role", "user", "content", extra));
    json_t *taken = prompt_images_take(*images, all, err);
    json_t *kwargs = c->variables ? json_copy(c->variables) : json_object();
    if (c->thinking != STEEL_THINK_AUTO)
        json_object_set_new(kwargs, "enable_thinking", json_boolean(c->thinking == STEEL_THINK_ON));
    struct chat_request req = {.messages = taken,
                               .tools = json_array_size(tools) ? tools : NULL,
                               .kwargs = kwargs,
                               .literal = true};
    bool ok = taken && (json_array_size(all) ? chat_render(c->chat, &req, out, err)
                                             : error_set(err, "the conversation is empty"));
    if (ok)
        ok = prompt_images_show(*images, out, err);
    json_decref(kwargs);
    json_decref(taken);
    json_decref(all);
    return ok;
}

int steel_chat_render(const struct steel_chat *chat, char *text, int cap, struct steel_error *error)
{
    struct buf prompt = {0};
    struct prompt_images *images;
    struct error err = {0};
    int n = -1;
    if (render(chat, chat->tools, NULL, &prompt, &images, &err)) {
        literal_unmark(prompt.p, prompt.len);
        n = lib_put(prompt.p, prompt.len, text, cap);
    } else
        lib_fail(error, STEEL_INVALID, err.msg);
    prompt_images_free(images);
    buf_clear(&prompt);
    return n;
}

/* ------------------------------------------------------------------ answers */

static struct news *add_news(struct steel_answer *a, enum steel_chat_event_kind kind)
{
    if (a->n_news == a->cap_news) {
        a->cap_news = a->cap_news ? 2 * a->cap_news : 8;
        a->news = mem_realloc(a->news, (size_t)a->cap_news, sizeof *a->news);
    }
    struct news *n = &a->news[a->n_news++];
    *n = (struct news){.kind = kind, .at = a->text.len};
    return n;
}

static void on_event(void *arg, const struct chat_event *e)
{
    static const enum steel_chat_event_kind kinds[] = {
        [CHAT_CONTENT] = STEEL_CHAT_TEXT,      [CHAT_REASONING] = STEEL_CHAT_THINKING,
        [CHAT_TOOL_BEGIN] = STEEL_CHAT_CALL,   [CHAT_TOOL_ARGS] = STEEL_CHAT_ARGUMENTS,
        [CHAT_TOOL_END] = STEEL_CHAT_CALL_END, [CHAT_TOOL_BROKEN] = STEEL_CHAT_CALL_BROKEN,
    };
    struct steel_answer *a = arg;
    chat_message_event(&a->message, e);
    struct news *n = add_news(a, kinds[e->type]);
    /* Numbers of tool calls that were taken back are used again. */
    int calls = a->message.n_calls;
    n->call = e->type == CHAT_TOOL_BROKEN ? calls : calls > 0 ? calls - 1 : 0;
    n->n = e->len;
    buf_add(&a->text, e->text, n->n);
    n->id_at = a->text.len;
    if (e->type == CHAT_TOOL_BEGIN)
        buf_add(&a->text, e->id, strlen(e->id) + 1);
}

static bool has_tool(const json_t *tools, const char *name)
{
    for (size_t i = 0; i < json_array_size(tools); i++) {
        const json_t *f = json_object_get(json_array_get(tools, i), "function");
        const char *n = json_string_value(json_object_get(f, "name"));
        if (n && !strcmp(n, name))
            return true;
    }
    return false;
}

/* Which tools an answer may call. *choice is NULL, "required" or a tool's name. */
static bool read_choice(const struct steel_chat *c, const struct steel_request_options *o,
                        const json_t **tools, const char **choice, struct steel_error *error)
{
    struct error err = {0};
    const char *word = o->tool_choice;
    *tools = json_array_size(c->tools) ? c->tools : NULL;
    *choice = NULL;
    if (!word || !strcmp(word, "auto"))
        return true;
    if (!strcmp(word, "none")) {
        *tools = NULL;
        return true;
    }
    *choice = word;
    if (*tools && (!strcmp(word, "required") || has_tool(*tools, word)))
        return true;
    error_set(&err, "tool_choice: '%.100s' is not among the chat's tools", word);
    return lib_fail(error, STEEL_INVALID, err.msg);
}

/* The grammar of the answer: thinking first, then tool calls or text. 0: no grammar, -1: an error. */
static int answer_grammar(struct steel_chat *c, const struct steel_request_options *o,
                          const struct buf *prompt, const json_t *tools, const char *choice,
                          enum chat_format format, struct grammar **out, struct steel_error *error)
{
    struct grammar_source response, src;
    struct error err = {0};
    int fits = lib_constraint(o, &response, error);
    bool calls =
        tools && chat_format_calls(format) && (choice || (!o->ignore_eos && o->min_tokens <= 0));
    *out = NULL;
    if (fits < 0 || (!fits && !calls && !choice))
        return fits;
    if (choice && !calls) {
        lib_fail(error, STEEL_INVALID,
                 "tool_choice: this model's template has no form of tool calls that is known");
        return -1;
    }
    struct chat_constraint fit = {.format = format,
                                  .thoughts = chat_thoughts(c->chat),
                                  .thinking = chat_thinking_of(prompt->p, prompt->len),
                                  .tools = calls ? tools : NULL,
                                  .only = choice && strcmp(choice, "required") ? choice : NULL,
                                  .required = choice != NULL,
                                  .one_call = o->one_call,
                                  .response = fits ? &response : NULL};
    char *text = chat_constraint_text(&fit);
    src = (struct grammar_source){GRAMMAR_REPLY, GRAMMAR_SCHEMA_ORDER, text, strlen(text)};
    *out = grammar_cache_get(c->engine->grammars, &src, NULL, &err);
    mem_free(text);
    if (!*out)
        lib_fail(error, STEEL_INVALID, err.msg);
    return *out ? 1 : -1;
}

struct steel_answer *steel_chat_answer(struct steel_chat *chat,
                                       const struct steel_request_options *options,
                                       struct steel_error *error)
{
    struct steel_request_options o =
        options ? *options : steel_engine_request_options(chat->engine);
    struct buf prompt = {0};
    struct token_list ids = {0};
    struct error err = {0};
    if (chat->answer) {
        lib_fail(error, STEEL_INVALID, "the chat's last answer is still under way");
        return NULL;
    }
    const json_t *tools;
    const char *choice;
    struct grammar *fit = NULL;
    struct prompt_images *images = NULL;
    if (!read_choice(chat, &o, &tools, &choice, error))
        return NULL;
    struct steel_answer *a = mem_zalloc(1, sizeof *a);
    a->chat = chat;
    const struct tokenizer *t = lib_tokenizer(chat->engine, error);
    enum chat_format format =
        chat->has_format ? chat->format : chat_reply_format(chat->chat, tools != NULL);
    if (!render(chat, tools, NULL, &prompt, &images, &err) ||
        !tokenizer_encode_prompt(t, prompt.p, prompt.len, chat_template_text(chat->chat), NULL,
                                 &ids, &err) ||
        !prompt_images_expand(images, &ids, &err) || !prompt_images_encode(images, &err)) {
        lib_fail(error, STEEL_INVALID, err.msg);
    } else if (answer_grammar(chat, &o, &prompt, tools, choice, format, &fit, error) >= 0) {
        settle_or_end(chat, &ids);
        o.text = NULL;
        o.tokens = ids.ids;
        o.n_tokens = (int)ids.n;
        o.choices = 1;
        o.queue = NULL;
        o.show_special = true; /* the parser looks for the format's control tokens */
        struct token_rules *rules = NULL;
        enum chat_thoughts thoughts = chat_thoughts(chat->chat);
        int most = chat->thinking == STEEL_THINK_OFF ? 0 : o.thinking_budget;
        if (most >= 0 && chat_thinking_of(prompt.p, prompt.len) != CHAT_THINKS_NOT) {
            struct think_limit limit =
                think_limit_of(chat_marks_of(format, thoughts, tools != NULL),
                               chat_opens_reasoning(prompt.p, prompt.len), most);
            rules = token_rules_new(t, NULL, NULL, 0, &limit);
        }
        a->request = lib_submit(chat->engine, &o, fit, rules, images, error);
        token_rules_free(rules);
    }
    if (a->request) {
        a->tools = tools ? json_incref((json_t *)tools) : NULL;
        struct chat_parse_options parse = {.thoughts = chat_thoughts(chat->chat),
                                           .tools = tools != NULL,
                                           .reasoning = true,
                                           .in_reasoning =
                                               chat_opens_reasoning(prompt.p, prompt.len),
                                           .id_seed = (uint64_t)clock_ns() ^ o.seed,
                                           .schema = a->tools,
                                           .event = on_event,
                                           .arg = a};
        a->parser = chat_parser_new(format, &parse);
        chat->answer = a;
    }
    prompt_images_free(images);
    token_list_clear(&ids);
    buf_clear(&prompt);
    if (a->request)
        return a;
    mem_free(a);
    return NULL;
}

void steel_answer_cancel(struct steel_answer *answer)
{
    steel_request_cancel(answer->request);
}

void steel_answer_free(struct steel_answer *answer)
{
    if (!answer)
        return;
    if (answer->chat->answer == answer)
        answer->chat->answer = NULL;
    steel_request_free(answer->request);
    chat_parser_free(answer->parser);
    json_decref(answer->tools);
    chat_message_clear(&answer->message);
    mem_free(answer->news);
    buf_clear(&answer->text);
    mem_free(answer);
}

/* Parses the text of an engine event into events of the answer. The last event ends the answer. */
static void take_event(struct steel_answer *a, const struct steel_event *ev)
{
    a->n_news = a->next_news = 0;
    buf_reset(&a->text);
    if (ev->kind == STEEL_STARTED)
        add_news(a, STEEL_CHAT_STARTED);
    if (ev->n_text)
        chat_parser_push(a->parser, ev->text, ev->n_text);
    if (ev->kind != STEEL_DONE)
        return;
    chat_parser_finish(a->parser);
    add_news(a, STEEL_CHAT_DONE);
    a->end = *ev;
    a->end.text = NULL;
    a->end.n_text = 0;
    a->chat->answer = NULL;
    if (ev->n_generated > 0 && ev->finish != STEEL_FAILED)
        json_array_append_new(a->chat->messages, chat_message_json(&a->message));
}

bool steel_answer_next(struct steel_answer *answer, struct steel_chat_event *event, int timeout_ms)
{
    int64_t end = clock_ns() + (int64_t)timeout_ms * 1000000;
    while (answer->next_news == answer->n_news) {
        struct steel_event ev;
        int64_t left = timeout_ms > 0 ? (end - clock_ns() + 999999) / 1000000 : timeout_ms;
        if (!steel_request_next(answer->request, &ev, left < 0 && timeout_ms > 0 ? 0 : (int)left))
            return false;
        take_event(answer, &ev);
    }
    const struct news *n = &answer->news[answer->next_news++];
    *event = (struct steel_chat_event){
        .kind = n->kind,
        .text = answer->text.p ? answer->text.p + n->at : "",
        .n_text = n->n,
        .call = n->call,
        .call_id = n->kind == STEEL_CHAT_CALL ? answer->text.p + n->id_at : NULL};
    if (n->kind == STEEL_CHAT_DONE)
        event->end = answer->end;
    return true;
}

int steel_answer_fd(const struct steel_answer *answer)
{
    return steel_request_fd(answer->request);
}

/* Reads the prefix that any next prompt will share: the common prefix of the prompts for two different next messages. */
void steel_chat_settle(struct steel_chat *chat)
{
    const struct tokenizer *t = lib_tokenizer(chat->engine, NULL);
    struct buf a = {0}, b = {0};
    struct prompt_images *in_a = NULL, *in_b = NULL;
    struct error ignored = {0};
    end_settling(chat);
    /* With images there is nothing to gain that the answer's own pages do not have. */
    if (render(chat, chat->tools, "a", &a, &in_a, &ignored) && !prompt_images_count(in_a) &&
        render(chat, chat->tools, "b", &b, &in_b, &ignored)) {
        size_t same = 0;
        while (same < a.len && same < b.len && a.p[same] == b.p[same])
            same++;
        struct steel_request_options o = steel_request_options();
        o.read_only = true;
        if (tokenizer_encode_prompt(t, a.p, same, chat_template_text(chat->chat), NULL,
                                    &chat->settled, &ignored) &&
            chat->settled.n) {
            o.tokens = chat->settled.ids;
            o.n_tokens = (int)chat->settled.n;
            chat->settler = steel_request_submit(chat->engine, &o, NULL);
        }
    }
    prompt_images_free(in_a);
    prompt_images_free(in_b);
    buf_clear(&a);
    buf_clear(&b);
}
