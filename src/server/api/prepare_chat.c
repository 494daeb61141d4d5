/*
 * Conversations to prompts: has messages and tools checked, renders them through the chat template, and
 * decides how the answer is to be parsed. Bodies of /v1/messages come here translated (messages.c).
 */
#include "server/api/prepare_int.h"
#include "base/mem.h"
#include "server/api/ollama.h"
#include "server/api/responses.h"
#include "text/chat/chat_check.h"

#include <stdio.h>
#include <string.h>

/* Parts of messages that hold something else than text are refused by their place. */
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
            return api_invalid(
                err, where,
                "%s: a part of type '%.40s' holds no text, and text is all that this "
                "model reads",
                where, type);
        }
    }
    return true;
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

/* "auto", "none", "required", or {"type": "function", "function": {"name": ...}}. */
static bool read_tool_choice(const json_t *body, const json_t *tools, enum tool_mode *mode,
                             const char **name, struct api_error *err)
{
    static const char where[] = "tool_choice";
    const json_t *v = api_member(body, where);
    *mode = TOOLS_AUTO;
    *name = NULL;
    if (!v)
        return true;
    const char *word = json_string_value(v);
    if (word && !strcmp(word, "none"))
        *mode = TOOLS_NONE;
    else if (word && !strcmp(word, "required"))
        *mode = TOOLS_REQUIRED;
    else if (json_is_object(v)) {
        *name = json_string_value(json_object_get(json_object_get(v, "function"), "name"));
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

/* chat_template_kwargs, with the shorthands other servers take at the top level. */
static bool read_kwargs(const struct chat *chat, const json_t *body, json_t **out,
                        struct api_error *err)
{
    const json_t *v = api_member(body, "chat_template_kwargs");
    if (v && !json_is_object(v))
        return api_invalid(err, "chat_template_kwargs", "chat_template_kwargs must be an object");
    *out = v ? json_copy((json_t *)v) : json_object();
    const char *effort = NULL;
    const json_t *thinking = api_member(body, "enable_thinking");
    if (!api_effort(body, "reasoning_effort", "reasoning_effort", &effort, err))
        return false;
    if (thinking && !json_is_boolean(thinking))
        return api_invalid(err, "enable_thinking", "enable_thinking must be a boolean");
    if (thinking)
        json_object_set(*out, "enable_thinking", (json_t *)thinking);
    if (effort)
        chat_set_effort(chat, effort, *out);
    return true;
}

/* The text of a last assistant message that the answer is to continue. */
static bool split_prefill(json_t *messages, struct buf *prefill, struct api_error *err)
{
    size_t n = json_array_size(messages), i;
    json_t *last = json_array_get(messages, n - 1), *part;
    const char *role = json_string_value(json_object_get(last, "role"));
    if (n < 2 || !role || strcmp(role, "assistant"))
        return api_invalid(err, "continue_final_message",
                           "there is no assistant message at the end to continue");
    json_t *content = json_object_get(last, "content");
    if (json_is_string(content))
        buf_add(prefill, json_string_value(content), json_string_length(content));
    json_array_foreach(content, i, part)
    {
        const json_t *text = json_object_get(part, "text");
        if (json_is_string(text))
            buf_add(prefill, json_string_value(text), json_string_length(text));
    }
    json_array_remove(messages, n - 1);
    return true;
}

/* Thinking ends where the answer begins: in gpt-oss that is a channel of its own. */
static void set_marks(struct chat_prompt *chat)
{
    bool oss = chat->format == CHAT_GPT_OSS, mistral = chat->format == CHAT_MISTRAL;
    bool gemma = chat->format == CHAT_GEMMA;
    chat->think_open = oss       ? "<|channel|>analysis"
                       : mistral ? "[THINK]"
                       : gemma   ? "<|channel>thought"
                                 : "<think>";
    chat->think_close = oss       ? "<|channel|>final<|message|>"
                        : mistral ? "[/THINK]"
                        : gemma   ? "<channel|>"
                                  : "</think>";
}

static bool render(struct call *c, const json_t *messages, const json_t *tools,
                   const json_t *kwargs, bool no_generation, struct buf *prompt)
{
    struct error e = {0};
    struct chat_request r = {.messages = messages,
                             .tools = json_array_size(tools) ? tools : NULL,
                             .kwargs = kwargs,
                             .no_generation_prompt = no_generation,
                             .budget = &c->budget};
    if (!chat_render(c->server->chat, &r, prompt, &e))
        return call_refuse(c, "messages", &e);
    return true;
}

bool prepare_conversation(struct call *c, const json_t *body, struct buf *prompt)
{
    struct chat_prompt *chat = mem_zalloc(1, sizeof *chat);
    json_t *messages = (json_t *)api_member(body, "messages");
    const json_t *tools = api_member(body, "tools");
    json_t *kwargs = NULL, *shorter = NULL;
    enum tool_mode mode;
    const char *name;
    bool parallel = true, generation = true, go_on = false, ok = false;
    struct buf prefill = {0};
    c->chat = chat;
    if (!c->server->chat) {
        api_fail(&c->err, 501, "not_supported_error", "this model has no usable chat template: %s",
                 c->server->chat_error.msg);
        return false;
    }
    if (!check_messages(messages, &c->err) || !check_tools(tools, &c->err) ||
        !read_tool_choice(body, tools, &mode, &name, &c->err) ||
        !api_bool(body, "parallel_tool_calls", &parallel, &c->err) ||
        !api_bool(body, "add_generation_prompt", &generation, &c->err) ||
        !api_bool(body, "continue_final_message", &go_on, &c->err) ||
        !read_kwargs(c->server->chat, body, &kwargs, &c->err))
        goto out;
    if (go_on) {
        messages = shorter = json_copy(messages);
        if (!split_prefill(messages, &prefill, &c->err))
            goto out;
    }
    if (mode == TOOLS_NONE)
        tools = NULL;
    if (!render(c, messages, tools, kwargs, !generation && !go_on, prompt))
        goto out;
    chat->tools = json_array_size(tools) > 0;
    chat->format = c->server->opt.chat_format ? c->server->format
                                              : chat_answer_format(c->server->chat, chat->tools);
    chat->in_reasoning = chat_opens_reasoning(prompt->p, prompt->len);
    set_marks(chat);
    chat->schema = tools ? json_incref((json_t *)tools) : NULL;
    chat->one_call = !parallel || name;
    chat->thinking = chat_thinking_of(prompt->p, prompt->len);
    chat->required = mode == TOOLS_REQUIRED;
    chat->only = name ? mem_strdup(name) : NULL;
    if (chat->required && !chat_format_calls(chat->format)) {
        api_invalid(
            &c->err, "tool_choice",
            "this model's template has no form of tool calls that is known: none can be required");
        goto out;
    }
    if (prefill.len)
        buf_add(prompt, prefill.p, prefill.len);
    ok = true;
out:
    json_decref(kwargs);
    json_decref(shorter);
    buf_clear(&prefill);
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

/* Text in, text out: what asks for more is told so by name. */
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

/* A chat body that was made of another API's. */
static bool prepare_translated(struct call *c, const json_t *body)
{
    struct buf prompt = {0};
    size_t history = c->responses ? c->responses->n_history : 0;
    c->budget = budget_for(c->n_body + history, &c->cancelled);
    bool ok = prepare_conversation(c, body, &prompt) &&
              call_encode(c, prompt.p, prompt.len, TOKENIZE_SPECIAL, call_add_prompt(c));
    c->special = true;
    buf_clear(&prompt);
    return ok;
}

static bool fits(const struct call *c)
{
    size_t answer = c->p.max_tokens > 0 ? (size_t)c->p.max_tokens : 1;
    return c->prompts[0].n + answer <= (size_t)engine_context(c->server->engine);
}

/* The prompt without the first k turns. */
static bool prepare_shorter(struct call *c, json_t *body, const json_t *messages, int k)
{
    chat_prompt_free(c->chat);
    c->chat = NULL;
    token_list_clear(&c->prompts[0]);
    c->n_prompts = 0;
    json_object_set_new(body, "messages", responses_drop_turns(messages, k));
    return prepare_translated(c, body);
}

/* truncation "auto": leaves out as few of the oldest turns as makes the rest fit. */
static bool truncate_turns(struct call *c, json_t *body)
{
    json_t *messages = json_incref(json_object_get(body, "messages"));
    int lo = 0, hi = responses_n_turns(messages) - 1; /* lo does not fit; hi is the most */
    bool ok = true;
    while (ok && hi - lo > 1) {
        int mid = lo + (hi - lo) / 2;
        ok = prepare_shorter(c, body, messages, mid);
        if (ok && fits(c))
            hi = mid;
        else
            lo = mid;
    }
    ok = ok && (hi <= 0 || prepare_shorter(c, body, messages, hi));
    json_decref(messages);
    return ok;
}

bool prepare_chat(struct call *c, const json_t *body)
{
    struct buf prompt = {0};
    enum params_api api = c->kind == CALL_CHAT ? PARAMS_CHAT : PARAMS_MESSAGES;
    bool ok = gen_params_read(body, api, &c->server->opt.sample, call_n_vocab(c), &c->p, &c->err);
    json_t *translated = NULL;
    const char *thinking = json_string_value(json_object_get(api_member(body, "thinking"), "type"));
    bool truncate = false, legacy = false, shown = thinking && strcmp(thinking, "disabled") != 0;
    if (ok) {
        translated = api == PARAMS_MESSAGES
                         ? messages_translate(body, c->kind == CALL_MESSAGES, &c->err)
                         : functions_translate(body, &legacy, &c->err);
        body = translated;
        ok = translated &&
             (api == PARAMS_MESSAGES ||
              (check_modalities(body, &c->err) && responses_truncation(body, &truncate, &c->err)));
    }
    ok = ok && prepare_conversation(c, body, &prompt) &&
         call_encode(c, prompt.p, prompt.len, TOKENIZE_SPECIAL, call_add_prompt(c)) &&
         (!truncate || fits(c) || truncate_turns(c, translated)) && call_constrain(c, body);
    c->special = true; /* the parser looks for the format's control tokens */
    if (c->chat) {
        c->chat->legacy = legacy;
        c->chat->hide_thinking = api == PARAMS_MESSAGES && !shown;
    }
    buf_clear(&prompt);
    json_decref(translated);
    return ok;
}

bool prepare_responses(struct call *c, const json_t *body)
{
    c->responses = mem_zalloc(1, sizeof *c->responses);
    json_t *chat = responses_translate(body, c->server->store, c->owner ? c->owner : "",
                                       c->id + strlen("resp_"), c->responses, &c->err);
    bool ok = chat &&
              gen_params_read(chat, PARAMS_CHAT, &c->server->opt.sample, call_n_vocab(c), &c->p,
                              &c->err) &&
              prepare_translated(c, chat);
    if (ok && c->responses->truncate && !fits(c))
        ok = truncate_turns(c, chat);
    ok = ok && call_constrain(c, chat);
    json_decref(chat);
    return ok;
}

/* A model and nothing to say to it: clients have it loaded so, before they ask. */
static bool only_loads(const struct call *c, const json_t *body)
{
    const json_t *prompt = api_member(body, "prompt"), *messages = api_member(body, "messages");
    if (!json_is_string(api_member(body, "model")))
        return false;
    return c->kind == CALL_OLLAMA_GENERATE
               ? !prompt || (json_is_string(prompt) && !json_string_length(prompt))
               : !messages || (json_is_array(messages) && !json_array_size(messages));
}

bool prepare_ollama(struct call *c, const json_t *body)
{
    if (only_loads(c, body)) {
        ollama_loaded(c);
        return true;
    }
    bool raw = false;
    json_t *chat = ollama_translate(body, c->kind == CALL_OLLAMA_GENERATE, &raw, &c->err);
    bool ok = chat && (raw ? prepare_completions(c, chat)
                           : gen_params_read(chat, PARAMS_CHAT, &c->server->opt.sample,
                                             call_n_vocab(c), &c->p, &c->err) &&
                                 prepare_translated(c, chat) && call_constrain(c, chat));
    json_decref(chat);
    return ok;
}

void server_load_chat(struct server *s)
{
    struct chat_source source = {0};
    bool ok = s->opt.chat_template
                  ? chat_source_open(s->opt.chat_template, &source, &s->chat_error)
                  : chat_source_load(server_runtime(s)->file, &source, &s->chat_error);
    if (ok)
        s->chat = chat_new(&source, &s->chat_error);
    chat_source_clear(&source);
}

void server_unload_chat(struct server *s)
{
    chat_free(s->chat);
}
