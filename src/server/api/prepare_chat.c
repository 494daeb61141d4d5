/*
 * Conversations to prompts: checks messages and tools, renders them by the chat template, and decides
 * how the output is parsed. Bodies of other dialects are translated first (anthropic.c, ollama.c,
 * responses.c).
 */
#include "server/api/prepare_int.h"
#include "base/mem.h"
#include "server/api/mcp_loop.h"
#include "server/api/ollama.h"
#include "server/api/responses.h"
#include "text/chat/chat_check.h"
#include "text/literal.h"

#include <stdio.h>
#include <string.h>

/* Refuses parts of messages that are not text. The error names the part. */
static bool check_parts(const json_t *messages, struct api_error *err)
{
    size_t i, k;
    const json_t *m, *part;
    json_array_foreach((json_t *)messages, i, m)
    {
        json_array_foreach(json_object_get(m, "content"), k, part)
        {
            const char *type = json_string_value(json_object_get(part, "type"));
            char where[64];
            if (json_is_string(json_object_get(part, strcmp(type, "refusal") ? "text" : type)))
                continue;
            snprintf(where, sizeof where, "messages[%zu].content[%zu]", i, k);
            return api_invalid(err, where,
                               "%s: a part of type '%.40s' is not supported: this model reads text "
                               "only",
                               where, type);
        }
    }
    return true;
}

static bool has_image(const json_t *m)
{
    size_t k;
    const json_t *part;
    const char *role = json_string_value(json_object_get(m, "role"));
    if (role && !strcmp(role, "tool"))
        json_array_foreach(json_object_get(m, "content"), k,
                           part) if (image_is_part(part)) return true;
    return false;
}

/* Images in tool results become a text, so that a picture an agent reads does not end its conversation. Images in
 * other messages are refused later. Returns a new reference. */
static json_t *images_as_text(const json_t *messages)
{
    size_t i, k;
    json_t *m, *part, *out = NULL;
    json_array_foreach((json_t *)messages, i, m)
    {
        if (!has_image(m))
            continue;
        out = out ? out : json_copy((json_t *)messages);
        json_t *content = json_copy(json_object_get(m, "content")), *fitted = json_copy(m);
        json_array_foreach(content, k, part)
        {
            if (image_is_part(part))
                json_array_set_new(content, k,
                                   json_pack("{s:s,s:s}", "type", "text", "text", API_NO_IMAGE));
        }
        json_object_set_new(fitted, "content", content);
        json_array_set_new(out, i, fitted);
    }
    return out ? out : json_incref((json_t *)messages);
}

/* The messages of a body with marks in place of images. A new reference; NULL with an error. */
static json_t *take_images(struct api_request *req, const json_t *body)
{
    struct error e = {0};
    json_t *taken = prompt_images_take(req->images, api_member(body, "messages"), &e);
    if (e.msg[0])
        api_request_refuse(req, "messages", &e);
    return taken;
}

bool check_messages(const json_t *v, struct api_error *err)
{
    char where[CHAT_WHERE];
    struct error e = {0};
    return (chat_check_messages(v, where, &e) || api_invalid(err, where, "%s", e.msg)) &&
           check_parts(v, err);
}

bool check_tools(const json_t *v, struct api_error *err)
{
    char where[CHAT_WHERE];
    struct error e = {0};
    return chat_check_tools(v, where, &e) || api_invalid(err, where, "%s", e.msg);
}

enum tool_mode { TOOLS_AUTO, TOOLS_NONE, TOOLS_REQUIRED };

static bool has_tool(const json_t *tools, const char *name)
{
    size_t i;
    const json_t *t;
    json_array_foreach((json_t *)tools, i, t)
    {
        const char *n = json_string_value(json_object_get(json_object_get(t, "function"), "name"));
        if (n && !strcmp(n, name))
            return true;
    }
    return false;
}

/* "auto", "none", "required", or {"type": one of them}, or {"type": "function", "function": {"name": ...}}. */
static bool read_tool_choice(const json_t *body, const json_t *tools, enum tool_mode *mode,
                             const char **name, struct api_error *err)
{
    static const char where[] = "tool_choice";
    const json_t *v = api_member(body, where);
    *mode = TOOLS_AUTO;
    *name = NULL;
    if (!v)
        return true;
    const json_t *type = json_object_get(v, "type"), *function = json_object_get(v, "function");
    const char *word = json_string_value(type && !function ? type : v);
    if (word && !strcmp(word, "none"))
        *mode = TOOLS_NONE;
    else if (word && !strcmp(word, "required"))
        *mode = TOOLS_REQUIRED;
    else if (json_is_object(v) && !(word && !strcmp(word, "auto"))) {
        *name = json_string_value(json_object_get(function, "name"));
        *mode = TOOLS_REQUIRED;
        if (!*name)
            return api_invalid(err, where, "tool_choice.function.name is missing");
        if (!has_tool(tools, *name))
            return api_invalid(err, where, "tool_choice names '%.100s', which is not in tools",
                               *name);
    } else if (!word || strcmp(word, "auto"))
        return api_invalid(err, where,
                           "tool_choice must be \"auto\", \"none\", \"required\" or a function");
    if (*mode == TOOLS_REQUIRED && !json_array_size(tools))
        return api_invalid(err, where, "tool_choice needs tools");
    return true;
}

/* The beginning of the answer, which the output continues. */
struct prefill {
    struct buf text, reasoning;
};

/* Removes the last assistant message, which the output continues. */
static bool split_prefill(json_t *messages, struct prefill *prefill, struct api_error *err)
{
    static const char *const keys[] = {"reasoning_content", "reasoning", "thinking"};
    size_t n = json_array_size(messages), i;
    json_t *last = json_array_get(messages, n - 1), *part;
    const char *role = json_string_value(json_object_get(last, "role"));
    if (n < 2 || !role || strcmp(role, "assistant"))
        return api_invalid(err, "continue_final_message",
                           "there is no assistant message at the end to continue");
    json_t *content = json_object_get(last, "content");
    if (json_is_string(content))
        buf_add(&prefill->text, json_string_value(content), json_string_length(content));
    json_array_foreach(content, i, part)
    {
        const json_t *text = json_object_get(part, "text");
        if (json_is_string(text))
            buf_add(&prefill->text, json_string_value(text), json_string_length(text));
    }
    for (size_t k = 0; k < sizeof keys / sizeof *keys && !prefill->reasoning.len; k++) {
        const json_t *thought = json_object_get(last, keys[k]);
        if (json_is_string(thought))
            buf_add(&prefill->reasoning, json_string_value(thought), json_string_length(thought));
    }
    json_array_remove(messages, n - 1);
    return true;
}

/* Sets the delimiters of thinking. In gpt-oss it ends where the final channel begins. */
static void set_marks(struct chat_prompt *chat)
{
    const struct chat_marks *marks = chat_marks_of(chat->format, chat->thoughts, chat->tools);
    bool oss = chat->format == CHAT_GPT_OSS;
    chat->think_open = oss ? "<|channel|>analysis" : marks->open;
    chat->think_close = oss ? marks->plain : marks->close;
}

/* The tools as the model sees them: without the Lark grammars of their parameters, which their descriptions
 * have. A new reference. */
static json_t *shown_tools(const json_t *tools)
{
    json_t *out = json_copy((json_t *)tools), *tool, *input;
    size_t i;
    const char *name;
    json_array_foreach(out, i, tool)
    {
        json_t *f = json_object_get(tool, "function");
        json_t *props = json_object_get(json_object_get(f, "parameters"), "properties");
        bool hides = false;
        json_object_foreach(props, name, input) hides |= json_object_get(input, "x-lark") != NULL;
        if (!hides)
            continue;
        tool = json_deep_copy(tool);
        json_array_set_new(out, i, tool);
        props = json_object_get(json_object_get(json_object_get(tool, "function"), "parameters"),
                                "properties");
        json_object_foreach(props, name, input) json_object_del(input, "x-lark");
    }
    return out;
}

static bool render(struct api_request *req, const json_t *messages, const json_t *tools,
                   const json_t *kwargs, bool no_generation, struct buf *prompt)
{
    struct error e = {0};
    json_t *shown = json_array_size(tools) ? shown_tools(tools) : NULL;
    struct chat_request r = {.messages = messages,
                             .tools = shown,
                             .kwargs = kwargs,
                             .no_generation_prompt = no_generation,
                             .budget = &req->budget,
                             .literal = !req->server->opt.allow_special};
    bool ok = chat_render(req->loaded->chat, &r, prompt, &e);
    json_decref(shown);
    return ok || api_request_refuse(req, "messages", &e);
}

/* The text that the output continues. Of the control tokens in it only the marks of thinking count: clients open and
 * close thinking with them. */
static void add_prefill(const struct api_request *req, const char *text, size_t n,
                        struct buf *prompt)
{
    const char *marks[] = {req->chat->think_open, req->chat->think_close};
    size_t begin = prompt->len;
    buf_add(prompt, text, n);
    if (req->server->opt.allow_special)
        return;
    literal_mark(prompt->p + begin, n);
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < 2; k++) {
            size_t len = strlen(marks[k]);
            if (i + len <= n && !memcmp(text + i, marks[k], len))
                memcpy(prompt->p + begin + i, marks[k], len);
        }
}

/* The offset after the last occurrence of the mark, 0 = none. */
static size_t after_last(const struct buf *text, const char *mark)
{
    size_t n = strlen(mark);
    for (size_t end = text->len; text->p && end >= n; end--)
        if (!memcmp(text->p + end - n, mark, n))
            return end;
    return 0;
}

/* Adds the beginning of the answer as the model would have written it: its thinking, the end of thinking, and its
 * text. Text with marks of thinking is added unchanged. */
static void add_beginning(const struct api_request *req, const struct prefill *f,
                          struct buf *prompt)
{
    struct chat_prompt *chat = req->chat;
    const struct chat_marks *marks = chat_marks_of(chat->format, chat->thoughts, false);
    size_t opened = after_last(&f->text, chat->think_open);
    size_t closed = after_last(&f->text, chat->think_close);
    chat->continues = f->text.len || f->reasoning.len;
    if (!chat->continues)
        return;
    if (opened || closed) {
        chat->in_reasoning = opened > closed || (chat->in_reasoning && !closed);
    } else {
        bool thinks = f->reasoning.len && chat->thinking != CHAT_THINKS_NOT;
        if (thinks && !chat->in_reasoning)
            buf_adds(prompt, marks->begin);
        if (thinks)
            add_prefill(req, f->reasoning.p, f->reasoning.len, prompt);
        if (f->text.len && (thinks || chat->in_reasoning))
            buf_adds(prompt, marks->end_at_once);
        else if (f->text.len && marks->plain)
            buf_adds(prompt, marks->plain);
        chat->in_reasoning = !f->text.len && (thinks || chat->in_reasoning);
        chat->thinking = chat->in_reasoning ? CHAT_THINKS_FIRST : CHAT_THINKS_NOT;
    }
    if (f->text.len)
        add_prefill(req, f->text.p, f->text.len, prompt);
}

/* The messages after the model's own system text, if they have none. Takes the reference and returns one. */
static json_t *add_system(const struct api_request *req, json_t *messages)
{
    const char *system = req->loaded->entry->made.system;
    const char *role = json_string_value(json_object_get(json_array_get(messages, 0), "role"));
    if (!system || !*system || (role && (!strcmp(role, "system") || !strcmp(role, "developer"))))
        return messages;
    json_t *out = json_copy(messages);
    json_array_insert_new(out, 0, json_pack("{s:s,s:s}", "role", "system", "content", system));
    json_decref(messages);
    return out;
}

bool prepare_conversation(struct api_request *req, const json_t *body, struct buf *prompt)
{
    struct chat_prompt *chat = mem_zalloc(1, sizeof *chat);
    json_t *taken = take_images(req, body);
    json_t *readable = images_as_text(taken), *messages = readable;
    const json_t *tools = api_member(body, "tools");
    json_t *kwargs = NULL, *shorter = NULL;
    enum tool_mode mode;
    const char *name;
    bool parallel = true, generation = true, go_on = false, ok = false;
    struct prefill prefill = {0};
    req->chat = chat;
    if (!req->loaded->chat) {
        api_fail(&req->err, 501, "not_supported_error",
                 "this model has no usable chat template: %s", req->loaded->chat_error.msg);
        goto out;
    }
    if (req->err.status || !check_messages(messages, &req->err) || !check_tools(tools, &req->err) ||
        !read_tool_choice(body, tools, &mode, &name, &req->err) ||
        !api_bool(body, "parallel_tool_calls", &parallel, &req->err) ||
        !api_bool(body, "add_generation_prompt", &generation, &req->err) ||
        !api_bool(body, "continue_final_message", &go_on, &req->err) ||
        !thinking_read(req->loaded->chat, body, &kwargs, &chat->budget, &req->err))
        goto out;
    messages = readable = add_system(req, readable);
    if (go_on) {
        messages = shorter = json_copy(messages);
        if (!split_prefill(messages, &prefill, &req->err))
            goto out;
    }
    if (mode == TOOLS_NONE)
        tools = NULL;
    if (!render(req, messages, tools, kwargs, !generation && !go_on, prompt))
        goto out;
    chat->tools = json_array_size(tools) > 0;
    chat->format = req->server->opt.chat_format ? req->server->format
                                                : chat_reply_format(req->loaded->chat, chat->tools);
    chat->in_reasoning = chat_opens_reasoning(prompt->p, prompt->len);
    chat->thoughts = chat_thoughts(req->loaded->chat);
    set_marks(chat);
    chat->schema = tools ? json_incref((json_t *)tools) : NULL;
    chat->one_call = !parallel || name;
    chat->thinking = chat_thinking_of(prompt->p, prompt->len);
    chat->required = mode == TOOLS_REQUIRED;
    chat->only = name ? mem_strdup(name) : NULL;
    if (chat->required && !chat_format_calls(chat->format)) {
        api_invalid(
            &req->err, "tool_choice",
            "the format of tool calls in this model's template is unknown: none can be required");
        goto out;
    }
    add_beginning(req, &prefill, prompt);
    ok = true;
out:
    json_decref(kwargs);
    json_decref(shorter);
    json_decref(readable);
    json_decref(taken);
    buf_clear(&prefill.text);
    buf_clear(&prefill.reasoning);
    return ok;
}

void chat_prompt_free(struct chat_prompt *p)
{
    if (!p)
        return;
    json_decref(p->schema);
    mem_free(p->only);
    mem_free(p);
}

/* Refuses output other than text. */
static bool check_modalities(const json_t *body, struct api_error *err)
{
    const json_t *v = api_member(body, "modalities"), *word;
    size_t i;
    if (v && !json_is_array(v))
        return api_invalid(err, "modalities", "modalities must be an array of strings");
    json_array_foreach((json_t *)v, i, word)
    {
        const char *name = json_string_value(word);
        if (!name || strcmp(name, "text") != 0)
            return api_invalid(err, "modalities",
                               "modalities[%zu]: '%.40s' is not supported: this model writes text",
                               i, name ? name : "?");
    }
    if (api_member(body, "audio"))
        return api_invalid(err, "audio", "audio is not supported: this model writes text");
    return true;
}

/* Prepares a chat body that was translated from another API. */
static bool prepare_translated(struct api_request *req, const json_t *body)
{
    struct buf prompt = {0};
    const struct responses_mcp *mcp = req->responses ? req->responses->mcp : NULL;
    size_t history = req->responses ? req->responses->n_history : 0;
    history += mcp ? mcp->items.len : 0;
    req->budget = budget_for(req->n_body + history, &req->cancelled);
    bool ok = prepare_conversation(req, body, &prompt) &&
              api_request_encode_prompt(req, &prompt, api_request_add_prompt(req));
    req->special = true;
    buf_clear(&prompt);
    return ok;
}

static bool fits(const struct api_request *req)
{
    size_t answer = req->p.max_tokens > 0 ? (size_t)req->p.max_tokens : 1;
    return req->prompts[0].n + answer <= (size_t)engine_context(req->loaded->engine);
}

/* Prepares the prompt again without the first k turns. */
static bool prepare_shorter(struct api_request *req, json_t *body, const json_t *messages, int k)
{
    chat_prompt_free(req->chat);
    req->chat = NULL;
    token_list_clear(&req->prompts[0]);
    req->n_prompts = 0;
    json_object_set_new(body, "messages", responses_drop_turns(messages, k));
    return prepare_translated(req, body);
}

/* truncation "auto": drops the fewest oldest turns such that the rest fits (binary search). */
static bool truncate_turns(struct api_request *req, json_t *body)
{
    json_t *messages = json_incref(json_object_get(body, "messages"));
    int lo = 0, hi = responses_n_turns(messages) - 1; /* lo does not fit; hi is the maximum */
    bool ok = true;
    while (ok && hi - lo > 1) {
        int mid = lo + (hi - lo) / 2;
        ok = prepare_shorter(req, body, messages, mid);
        if (ok && fits(req))
            hi = mid;
        else
            lo = mid;
    }
    ok = ok && (hi <= 0 || prepare_shorter(req, body, messages, hi));
    json_decref(messages);
    return ok;
}

bool prepare_chat(struct api_request *req, const json_t *body)
{
    struct buf prompt = {0};
    bool truncate = false, legacy = false;
    json_t *chat = NULL;
    bool ok =
        api_request_params(req, body, PARAMS_CHAT) &&
        (chat = functions_translate(body, &legacy, &req->err)) &&
        check_modalities(chat, &req->err) && responses_truncation(chat, &truncate, &req->err) &&
        prepare_conversation(req, chat, &prompt) &&
        api_request_encode_prompt(req, &prompt, api_request_add_prompt(req)) &&
        (!truncate || fits(req) || truncate_turns(req, chat)) && api_request_constrain(req, chat);
    req->special = true; /* the parser looks for the format's control tokens */
    if (req->chat)
        req->chat->legacy = legacy;
    buf_clear(&prompt);
    json_decref(chat);
    return ok;
}

bool prepare_anthropic_prompt(struct api_request *req, const json_t *body, bool generate)
{
    struct buf prompt = {0};
    const char *thinking = json_string_value(json_object_get(api_member(body, "thinking"), "type"));
    bool shown = thinking && strcmp(thinking, "disabled") != 0;
    json_t *chat = NULL, *messages = take_images(req, body), *taken = json_copy((json_t *)body);
    if (messages)
        json_object_set_new(taken, "messages", messages);
    bool ok = !req->err.status && api_request_params(req, body, PARAMS_MESSAGES) &&
              (chat = anthropic_translate(taken, generate, &req->err)) &&
              prepare_conversation(req, chat, &prompt) &&
              api_request_encode_prompt(req, &prompt, api_request_add_prompt(req)) &&
              api_request_constrain(req, chat);
    req->special = true;
    if (req->chat)
        req->chat->hide_thinking = !shown;
    buf_clear(&prompt);
    json_decref(chat);
    json_decref(taken);
    return ok;
}

bool prepare_anthropic(struct api_request *req, const json_t *body)
{
    return prepare_anthropic_prompt(req, body, true);
}

/* Prepares a translated body. */
static bool prepare_response(struct api_request *req, json_t *chat)
{
    bool ok = prepare_translated(req, chat);
    if (ok && req->responses->truncate && !fits(req))
        ok = truncate_turns(req, chat);
    return ok && api_request_constrain(req, chat);
}

bool prepare_responses_again(struct api_request *req)
{
    const struct responses_mcp *m = req->responses->mcp;
    json_t *chat = responses_continue(&m->chat, &m->items, &req->err);
    const char *choice = json_string_value(json_object_get(chat, "tool_choice"));
    if (m->begun && !(choice && !strcmp(choice, "none")))
        json_object_del(chat, "tool_choice"); /* else it would demand a call in every round */
    bool ok = chat && prepare_response(req, chat);
    json_decref(chat);
    return ok;
}

bool prepare_responses(struct api_request *req, const json_t *body)
{
    struct responses_request *r = mem_zalloc(1, sizeof *r);
    req->responses = r;
    r->servers = req->mcp_list;
    r->images = req->images;
    json_t *chat = responses_translate(body, req->server->store, req->owner,
                                       req->id + strlen("resp_"), req->responses, &req->err);
    bool ok = chat && api_request_params(req, chat, PARAMS_CHAT);
    if (ok && r->mcp)
        jsonout_value(&r->mcp->chat, chat);
    /* Approved calls run before the first prompt. */
    if (!req->endpoint->reply || !json_object_size(r->approved))
        ok = ok && prepare_response(req, chat);
    json_decref(chat);
    return ok;
}

/* A model without a prompt: Ollama's clients load a model this way. */
static bool prepare_ollama(struct api_request *req, const json_t *body, bool generate)
{
    if (ollama_only_loads(req->endpoint, body)) {
        ollama_loaded(req);
        return true;
    }
    bool raw = false;
    struct error e = {0};
    json_t *taken = prompt_images_take_lists(req->images, body, &e);
    if (!taken)
        return api_request_refuse(req, "images", &e);
    json_t *chat = ollama_translate(taken, generate, &raw, &req->err);
    bool ok = chat && (raw ? prepare_completions(req, chat)
                           : api_request_params(req, chat, PARAMS_CHAT) &&
                                 prepare_translated(req, chat) && api_request_constrain(req, chat));
    ok = ok && api_int(chat, "num_ctx", 0, INT32_MAX, &req->p.context, &req->err);
    json_decref(chat);
    json_decref(taken);
    return ok;
}

bool prepare_ollama_chat(struct api_request *req, const json_t *body)
{
    return prepare_ollama(req, body, false);
}

bool prepare_ollama_generate(struct api_request *req, const json_t *body)
{
    return prepare_ollama(req, body, true);
}
