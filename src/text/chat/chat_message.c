/*
 * Helpers of the chat parser: the formats' names, detection of a template's format, and collecting
 * events into a message.
 */
#include "text/chat/chat_parse.h"
#include "base/error.h"
#include "base/mem.h"

#include <string.h>

static const char *const names[CHAT_N_FORMATS] = {[CHAT_PLAIN] = "none",
                                                  [CHAT_HERMES] = "hermes",
                                                  [CHAT_QWEN_XML] = "qwen3_coder",
                                                  [CHAT_LLAMA_JSON] = "llama3_json",
                                                  [CHAT_PYTHONIC] = "pythonic",
                                                  [CHAT_MISTRAL] = "mistral",
                                                  [CHAT_DEEPSEEK_R1] = "deepseek_r1",
                                                  [CHAT_GPT_OSS] = "gpt_oss",
                                                  [CHAT_GLM] = "glm45",
                                                  [CHAT_MINIMAX] = "minimax_m2",
                                                  [CHAT_KIMI] = "kimi_k2",
                                                  [CHAT_GEMMA] = "gemma4",
                                                  [CHAT_SEED] = "seed_oss",
                                                  [CHAT_COHERE] = "command_a",
                                                  [CHAT_APERTUS] = "apertus",
                                                  [CHAT_HUNYUAN] = "hunyuan3",
                                                  [CHAT_SOLAR] = "solar_open",
                                                  [CHAT_INKLING] = "inkling",
                                                  [CHAT_MUSE] = "muse",
                                                  [CHAT_MINIMAX_M3] = "minimax_m3",
                                                  [CHAT_NEMOTRON] = "nemotron_nano",
                                                  [CHAT_GRANITE] = "granite3",
                                                  [CHAT_TOOL_CALLS] = "tool_calls",
                                                  [CHAT_LFM2] = "lfm2",
                                                  [CHAT_DEEPSEEK_V32] = "deepseek_v32",
                                                  [CHAT_DEEPSEEK_V4] = "deepseek_v4"};

const char *chat_format_name(enum chat_format f)
{
    return names[f];
}

bool chat_format_from_name(const char *name, enum chat_format *out)
{
    for (int i = 0; i < CHAT_N_FORMATS; i++)
        if (!strcmp(name, names[i])) {
            *out = (enum chat_format)i;
            return true;
        }
    return false;
}

/* Texts of which all are in a template of this format; the first row that fits counts. */
static const struct {
    enum chat_format format;
    const char *has[2];
} signs[] = {
    {CHAT_DEEPSEEK_V32, {"｜DSML｜", "function_calls>"}},
    {CHAT_DEEPSEEK_V4, {"｜DSML｜", "tool_calls>"}},
    {CHAT_GPT_OSS, {"<|channel|>", ""}},
    {CHAT_MINIMAX, {"<minimax:tool_call>", ""}},
    {CHAT_MINIMAX_M3, {"]<]minimax[>[", "<tool_call>"}},
    {CHAT_KIMI, {"<|tool_calls_section_begin|>", ""}},
    {CHAT_GEMMA, {"<|tool_call>call:", ""}},
    {CHAT_SEED, {"<seed:tool_call>", ""}},
    {CHAT_COHERE, {"<|START_ACTION|>", "\"tool_name\""}},
    {CHAT_APERTUS, {"<|tools_prefix|>", ""}},
    {CHAT_HUNYUAN, {"<tool_sep{}>", "':opensource'"}},
    {CHAT_HUNYUAN, {"<tool_sep:opensource>", ""}},
    {CHAT_SOLAR, {"<|tool_call:begin|>", "<|tool_call:args|>"}},
    {CHAT_MUSE, {"<atem:function_calls>", "<|message|>"}},
    {CHAT_INKLING, {"<|content_invoke_tool_json|>", "<|message_model|>"}},
    {CHAT_NEMOTRON, {"<TOOLCALL>[", "</TOOLCALL>"}},
    {CHAT_GRANITE, {"<|tool_call|>", "Granite"}},
    {CHAT_TOOL_CALLS, {"<tool_calls>[", "</tool_calls>"}},
    {CHAT_LFM2, {"<|tool_call_start|>", ""}},
    {CHAT_GLM, {"<arg_key>", "<arg_value>"}},
    {CHAT_QWEN_XML, {"<function=", "<parameter="}},
    {CHAT_MISTRAL, {"[TOOL_CALLS]", ""}},
    {CHAT_HERMES, {"<tool_call>", ""}},
    {CHAT_PYTHONIC, {"[func_name1(", ""}},
    {CHAT_PYTHONIC, {"<|python_start|>", ""}},
    {CHAT_LLAMA_JSON, {"<|python_tag|>", ""}},
    {CHAT_LLAMA_JSON, {"\"parameters\": ", "<|eot_id|>"}},
    {CHAT_DEEPSEEK_R1, {"<think>", ""}},
    {CHAT_DEEPSEEK_R1, {"</think>", ""}},
};

enum chat_format chat_format_detect(const char *t, size_t len)
{
    for (size_t i = 0; i < sizeof signs / sizeof *signs; i++) {
        const char *const *has = signs[i].has;
        if (memmem(t, len, has[0], strlen(has[0])) && memmem(t, len, has[1], strlen(has[1])))
            return signs[i].format;
    }
    return CHAT_PLAIN;
}

static void call_clear(struct chat_call *c)
{
    mem_free(c->id);
    mem_free(c->name);
    buf_clear(&c->arguments);
}

void chat_message_event(void *arg, const struct chat_event *e)
{
    struct chat_message *m = arg;
    struct chat_call *c;
    switch (e->type) {
    case CHAT_CONTENT:
        buf_add(&m->content, e->text, e->len);
        break;
    case CHAT_REASONING:
        buf_add(&m->reasoning, e->text, e->len);
        break;
    case CHAT_TOOL_BEGIN:
        if (m->n_calls == m->cap_calls) {
            m->cap_calls = m->cap_calls ? m->cap_calls * 2 : 4;
            m->calls = mem_realloc(m->calls, (size_t)m->cap_calls, sizeof *m->calls);
        }
        c = &m->calls[m->n_calls++];
        *c = (struct chat_call){.id = mem_strdup(e->id), .name = mem_strndup(e->text, e->len)};
        break;
    case CHAT_TOOL_ARGS:
        CHECK(m->n_calls > 0, "arguments without a call");
        buf_add(&m->calls[m->n_calls - 1].arguments, e->text, e->len);
        break;
    case CHAT_TOOL_END:
        break;
    case CHAT_TOOL_BROKEN:
        CHECK(m->n_calls > 0, "no call to take back");
        call_clear(&m->calls[--m->n_calls]);
        break;
    }
}

void chat_message_clear(struct chat_message *m)
{
    for (int i = 0; i < m->n_calls; i++)
        call_clear(&m->calls[i]);
    mem_free(m->calls);
    buf_clear(&m->content);
    buf_clear(&m->reasoning);
    *m = (struct chat_message){0};
}

/* Length of the UTF-8 character at s, 0 if invalid. */
static size_t utf8_char(const unsigned char *s, size_t n)
{
    if (!s || !n)
        return 0;
    size_t len = s[0] < 0x80 ? 1 : s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    if (len == 1)
        return 1;
    if (s[0] < 0xc2 || s[0] > 0xf4 || len > n)
        return 0;
    for (size_t i = 1; i < len; i++)
        if ((s[i] & 0xc0) != 0x80)
            return 0;
    if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f) ||
        (s[0] == 0xf0 && s[1] < 0x90) || (s[0] == 0xf4 && s[1] > 0x8f))
        return 0;
    return len;
}

static json_t *to_json(const char *s, size_t n)
{
    json_t *j = json_stringn(s ? s : "", n);
    if (j)
        return j;
    struct buf b = {0};
    for (size_t i = 0; i < n;) {
        size_t k = utf8_char((const unsigned char *)s + i, n - i);
        if (k)
            buf_add(&b, s + i, k);
        else
            buf_adds(&b, "\xef\xbf\xbd");
        i += k ? k : 1;
    }
    j = json_stringn(b.p, b.len);
    buf_clear(&b);
    return j;
}

json_t *chat_message_json(const struct chat_message *m)
{
    json_t *j = json_pack("{s:s}", "role", "assistant");
    json_object_set_new(j, "content",
                        m->content.len || !m->n_calls ? to_json(m->content.p, m->content.len)
                                                      : json_null());
    if (m->reasoning.len)
        json_object_set_new(j, "reasoning_content", to_json(m->reasoning.p, m->reasoning.len));
    if (m->n_calls) {
        json_t *calls = json_array();
        for (int i = 0; i < m->n_calls; i++) {
            const struct chat_call *c = &m->calls[i];
            json_array_append_new(calls, json_pack("{s:s,s:s,s:{s:o,s:o}}", "id", c->id, "type",
                                                   "function", "function", "name",
                                                   to_json(c->name, strlen(c->name)), "arguments",
                                                   to_json(c->arguments.p, c->arguments.len)));
        }
        json_object_set_new(j, "tool_calls", calls);
    }
    return j;
}
