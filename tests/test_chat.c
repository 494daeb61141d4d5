/*
 * Messages to prompts: what is learnt of real templates, that every legal conversation renders through
 * every one of them and shows all that was said, that shapes are normalised as each family expects,
 * and that ordinary requests are passed on unchanged (the golden cases, byte for byte).
 */
#include "base/mem.h"
#include "text/chat/chat.h"
#include "text/literal.h"

#include <dirent.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

#define GOLDEN "../shared/golden/templates/"

/* A golden template by name, or a file by its path. */
static struct chat *load(const char *name)
{
    char path[512];
    struct chat_source s;
    struct error err = {0};
    snprintf(path, sizeof path, "%s%s%s", strchr(name, '/') ? "" : GOLDEN, name,
             strstr(name, ".jinja") ? "" : ".jinja");
    if (!chat_source_open(path, &s, &err)) {
        printf("skipped: %s is not here\n", path);
        skip();
    }
    struct chat *c = chat_new(&s, &err);
    if (!c)
        fail_msg("%s: %s", name, err.msg);
    chat_source_clear(&s);
    return c;
}

static struct chat *inline_chat(const char *template)
{
    struct error err = {0};
    struct chat_source s = {.template = (char *)template,
                            .template_len = strlen(template),
                            .bos = (char *)"<s>",
                            .eos = (char *)"</s>"};
    struct chat *c = chat_new(&s, &err);
    if (!c)
        fail_msg("%s", err.msg);
    return c;
}

static json_t *json(const char *text)
{
    json_error_t e;
    json_t *j = json_loads(text, 0, &e);
    if (!j)
        fail_msg("%s in %s", e.text, text);
    return j;
}

/* The prompt (heap), or fails the test. */
static char *prompt(const struct chat *c, const char *messages, const char *tools,
                    const char *kwargs)
{
    json_t *m = json(messages), *t = tools ? json(tools) : NULL, *k = kwargs ? json(kwargs) : NULL;
    static const struct tm now = {
        .tm_year = 126, .tm_mon = 6, .tm_mday = 26, .tm_hour = 12, .tm_min = 30, .tm_yday = 206};
    struct chat_request r = {.messages = m, .tools = t, .kwargs = k, .now = &now};
    struct buf out = {0};
    struct error err = {0};
    if (!chat_render(c, &r, &out, &err))
        fail_msg("%s\n  %s", messages, err.msg);
    json_decref(m);
    json_decref(t);
    json_decref(k);
    return buf_take(&out);
}

static void expect(const struct chat *c, const char *messages, const char *want)
{
    char *p = prompt(c, messages, NULL, NULL);
    assert_string_equal(p, want);
    mem_free(p);
}

#define TOOLS                                                                                      \
    "[{\"type\":\"function\",\"function\":{\"name\":\"get_weather\",\"description\":\"The "        \
    "weather\",\"parameters\":{\"type\":\"object\",\"properties\":{\"place\":{\"type\":"           \
    "\"string\",\"description\":\"where\"}},\"required\":[\"place\"]}}}]"

/* ------------------------------------------------------------------ Qwen3 */

static void test_qwen3(void **state)
{
    (void)state;
    struct chat *c = load("Qwen-Qwen3-0.6B");
    const struct chat_caps *k = chat_caps(c);
    assert_true(k->system && k->system_later && k->same_role && k->tools && k->calls &&
                k->two_calls && !k->string_args && k->string_content);
    assert_string_equal(k->reasoning_key, "reasoning_content");
    assert_int_equal(chat_reply_format(c, true), CHAT_HERMES);
    expect(c, "[{\"role\":\"user\",\"content\":\"Hi\"}]",
           "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    expect(c,
           "[{\"role\":\"developer\",\"content\":[{\"type\":\"text\",\"text\":\"Be\"},{\"type\":"
           "\"input_text\",\"text\":\"good\"}]},{\"role\":\"user\",\"content\":\"Hi\"}]",
           "<|im_start|>system\nBe\ngood<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
           "<|im_start|>assistant\n");
    char *p =
        prompt(c, "[{\"role\":\"user\",\"content\":\"Hi\"}]", NULL, "{\"enable_thinking\":false}");
    assert_string_equal(p, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n"
                           "</think>\n\n");
    assert_false(chat_opens_reasoning(p, strlen(p)));
    assert_true(chat_opens_reasoning("a<think>\n", 9));
    mem_free(p);
    p = prompt(
        c,
        "[{\"role\":\"user\",\"content\":\"w?\"},{\"role\":\"assistant\",\"content\":null,"
        "\"reasoning_content\":\"hm\",\"tool_calls\":[{\"id\":\"call_1\",\"type\":"
        "\"function\",\"function\":{\"name\":\"get_weather\",\"arguments\":\"{\\\"place\\\": "
        "\\\"Rome\\\"}\"}}]},{\"role\":\"tool\",\"tool_call_id\":\"call_1\",\"content\":"
        "\"sunny\"}]",
        TOOLS, NULL);
    assert_non_null(strstr(p, "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"place\": "
                              "\"Rome\"}}\n</tool_call>"));
    assert_non_null(strstr(p, "<think>\nhm\n</think>"));
    assert_non_null(strstr(p, "<tool_response>\nsunny\n</tool_response>"));
    assert_null(strstr(p, "None"));
    mem_free(p);
    chat_free(c);
}

/* ------------------------------------------------------------------ families */

static void test_families(void **state)
{
    (void)state;
    /* Gemma: no system role, strict alternation. */
    struct chat *c = load("google-gemma-2-2b-it");
    assert_false(chat_caps(c)->system || chat_caps(c)->same_role || chat_caps(c)->tools);
    char *p =
        prompt(c,
               "[{\"role\":\"system\",\"content\":\"S\"},{\"role\":\"user\",\"content\":\"A\"},"
               "{\"role\":\"user\",\"content\":\"B\"},{\"role\":\"assistant\",\"content\":"
               "\"C\"},{\"role\":\"system\",\"content\":\"S2\"},{\"role\":\"user\","
               "\"content\":\"D\"}]",
               NULL, NULL);
    assert_non_null(strstr(p, "<start_of_turn>user\nS\n\nA\n\nB<end_of_turn>"));
    assert_non_null(strstr(p, "<start_of_turn>user\nS2\n\nD<end_of_turn>"));
    mem_free(p);
    p = prompt(c,
               "[{\"role\":\"assistant\",\"content\":\"Hello\"},{\"role\":\"user\",\"content\":"
               "\"Hi\"}]",
               TOOLS, NULL); /* opened by the assistant; tools as text */
    assert_non_null(strstr(p, "get_weather"));
    assert_non_null(strstr(p, "Hello"));
    mem_free(p);
    assert_int_equal(chat_reply_format(c, true), CHAT_HERMES);
    assert_int_equal(chat_reply_format(c, false), CHAT_PLAIN);
    chat_free(c);

    /* Mistral: ids of nine characters. */
    c = load("mistralai-Mistral-Nemo-Instruct-2407");
    assert_true(chat_caps(c)->short_ids && chat_caps(c)->calls);
    p = prompt(c,
               "[{\"role\":\"user\",\"content\":\"w?\"},{\"role\":\"assistant\",\"tool_calls\":[{"
               "\"id\":\"call_abcdefghijkl\",\"type\":\"function\",\"function\":{\"name\":"
               "\"get_weather\",\"arguments\":\"{\\\"place\\\": \\\"Rome\\\"}\"}}]},{\"role\":"
               "\"tool\",\"tool_call_id\":\"call_abcdefghijkl\",\"content\":\"sunny\"}]",
               TOOLS, NULL);
    assert_non_null(strstr(p, "[TOOL_CALLS][{\"name\": \"get_weather\", \"arguments\": {\"place\": "
                              "\"Rome\"}"));
    assert_non_null(strstr(p, "sunny"));
    mem_free(p);
    chat_free(c);

    /* Llama 3.x: one call a message; arguments as objects. */
    c = load("meta-llama-Llama-3.2-3B-Instruct");
    assert_false(chat_caps(c)->two_calls);
    p = prompt(c,
               "[{\"role\":\"user\",\"content\":\"w?\"},{\"role\":\"assistant\",\"content\":null,"
               "\"tool_calls\":[{\"id\":\"a\",\"type\":\"function\",\"function\":{\"name\":\"f1\","
               "\"arguments\":\"{\\\"x\\\": 1}\"}},{\"id\":\"b\",\"type\":\"function\","
               "\"function\":{\"name\":\"f2\",\"arguments\":\"{}\"}}]},{\"role\":\"tool\","
               "\"tool_call_id\":\"a\",\"content\":\"r1\"},{\"role\":\"tool\",\"tool_call_id\":"
               "\"b\",\"content\":\"r2\"}]",
               TOOLS, NULL);
    const char *a = strstr(p, "f1"), *r1 = strstr(p, "r1"), *b = strstr(p, "f2"),
               *r2 = strstr(p, "r2");
    assert_true(a && r1 && b && r2 && a < r1 && r1 < b && b < r2);
    mem_free(p);
    chat_free(c);
}

static void test_inline(void **state)
{
    (void)state;
    /* Content as typed parts only. */
    struct chat *c = inline_chat("{% for m in messages %}<{{ m.role }}>{% for p in m.content %}"
                                 "{{ p.text }}{% endfor %}{% endfor %}");
    assert_true(chat_caps(c)->typed_content && !chat_caps(c)->string_content);
    expect(c, "[{\"role\":\"user\",\"content\":\"Hi\"}]", "<user>Hi");
    chat_free(c);
    /* A template that refuses whatever is not user or assistant text. */
    c = inline_chat(
        "{{ bos_token }}{% for m in messages %}{% if m.role not in ['user', 'assistant'] "
        "or m.tool_calls %}{{ raise_exception('no') }}{% endif %}{% if (m.role == "
        "'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
        "{% endif %}[{{ m.content }}]{% endfor %}{{ eos_token }}");
    expect(c,
           "[{\"role\":\"user\",\"content\":\"q\"},{\"role\":\"assistant\",\"content\":\"\","
           "\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":\"{\\\"a\\\": 1}\"}}]},"
           "{\"role\":\"tool\",\"content\":\"r\"},{\"role\":\"user\",\"content\":\"q2\"}]",
           "<s>[q][<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>]"
           "[<tool_response>\nr\n</tool_response>\n\nq2]</s>");
    chat_free(c);
    /* gpt-oss keeps its thoughts under another name. */
    c = inline_chat("{% for m in messages %}{{ m.thinking }}{{ m.content }}{% endfor %}");
    expect(c,
           "[{\"role\":\"user\",\"content\":\"q\"},{\"role\":\"assistant\",\"reasoning_content\":"
           "\"T\",\"content\":\"a\"}]",
           "qTa");
    chat_free(c);
    /* What is said to the engine about a tool is not shown to the model, nor taken from the caller's. */
    c = inline_chat("{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
                    "{{ m.content }}{% endfor %}");
    json_t *tools = json("[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"strict\":true,"
                         "\"parameters\":{\"strict\":{}}}}]"),
           *m = json("[{\"role\":\"user\",\"content\":\"q\"}]");
    struct chat_request r = {.messages = m, .tools = tools};
    struct buf out = {0};
    struct error err = {0};
    assert_true(chat_render(c, &r, &out, &err));
    buf_addc(&out, 0);
    assert_string_equal(out.p, "[{\"type\": \"function\", \"function\": {\"name\": \"f\", "
                               "\"parameters\": {\"strict\": {}}}}]q");
    assert_true(json_is_true(
        json_object_get(json_object_get(json_array_get(tools, 0), "function"), "strict")));
    buf_clear(&out);
    json_decref(tools);
    json_decref(m);
    chat_free(c);
}

static void refuse(const struct chat *c, const char *messages, const char *part)
{
    json_t *m = json(messages);
    struct chat_request r = {.messages = m};
    struct buf out = {0};
    struct error err = {0};
    assert_false(chat_render(c, &r, &out, &err));
    if (!strstr(err.msg, part))
        fail_msg("want '%s' in '%s'", part, err.msg);
    json_decref(m);
    buf_clear(&out);
}

/* What a template's model wrote, read in the form that was found in the template. */
static void read_answer(const struct chat *c, const char *text, struct chat_message *m)
{
    json_t *tools = json(TOOLS);
    struct chat_parse_options opt = {
        .tools = true, .reasoning = true, .schema = tools, .event = chat_message_event, .arg = m};
    struct chat_parser *p = chat_parser_new(chat_reply_format(c, true), &opt);
    chat_parser_push(p, text, strlen(text));
    chat_parser_finish(p);
    chat_parser_free(p);
    json_decref(tools);
}

/* The published templates of these two are not among the golden ones: templates of our own with their
 * markers, in their order, stand for them. A round through each: the tools are shown, the form of the
 * answer is found, a call is read from it, and the call and its result stand in the next prompt. */
static void test_own_templates(void **state)
{
    (void)state;
    static const struct {
        const char *file;
        enum chat_format format;
        const char *shown, *answer, *next;
    } cases[] = {
        {"tests/data/gpt_oss", CHAT_GPT_OSS,
         "type get_weather = (_: {\n// where\nplace: string,\n}",
         "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.get_weather"
         "<|channel|>commentary json<|message|>{\"place\": \"Rome\"}",
         "<|start|>user<|message|>w?<|end|><|start|>assistant<|channel|>analysis<|message|>Hm."
         "\n\nSo:"
         "<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"
         "\"place\": \"Rome\"}<|call|><|start|>functions.get_weather "
         "to=assistant<|channel|>commentary"
         "<|message|>\"sun\"<|end|><|start|>assistant"},
        {"tests/data/pythonic", CHAT_PYTHONIC, "\"name\": \"get_weather\"",
         "[get_weather(place=\"Rome\")]",
         "<|start_header_id|>user<|end_header_id|>\n\nw?<|eot_id|><|start_header_id|>assistant"
         "<|end_header_id|>\n\n[get_weather(place=\"Rome\")]<|eot_id|><|start_header_id|>ipython"
         "<|end_header_id|>\n\n{\"output\": \"sun\"}<|eot_id|><|start_header_id|>assistant"
         "<|end_header_id|>\n\n"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct chat *c = load(cases[i].file);
        assert_int_equal(chat_reply_format(c, true), cases[i].format);
        assert_int_equal(chat_reply_format(c, false), cases[i].format);
        const struct chat_caps *k = chat_caps(c);
        assert_true(k->system && k->tools && k->calls && !k->string_args);
        assert_true(k->two_calls == (cases[i].format == CHAT_PYTHONIC) &&
                    k->reasoning_or_content == (cases[i].format == CHAT_GPT_OSS));
        char *p = prompt(c, "[{\"role\":\"user\",\"content\":\"w?\"}]", TOOLS, NULL);
        assert_non_null(strstr(p, cases[i].shown));
        mem_free(p);
        struct chat_message m = {0};
        read_answer(c, cases[i].answer, &m);
        assert_int_equal(m.n_calls, 1);
        assert_string_equal(m.calls[0].name, "get_weather");
        json_t *args = json_loadb(m.calls[0].arguments.p, m.calls[0].arguments.len, 0, NULL);
        assert_string_equal(json_string_value(json_object_get(args, "place")), "Rome");
        json_decref(args);
        if (cases[i].format == CHAT_GPT_OSS) /* as a model that says what it is about to do */
            buf_adds(&m.content, "So:");
        json_t *list = json_pack("[{s:s,s:s},o,{s:s,s:s,s:s}]", "role", "user", "content", "w?",
                                 chat_message_json(&m), "role", "tool", "content", "sun",
                                 "tool_call_id", m.calls[0].id);
        char *text = json_dumps(list, 0);
        p = prompt(c, text, TOOLS, NULL);
        size_t n = strlen(p), tail = strlen(cases[i].next);
        if (n < tail || strcmp(p + n - tail, cases[i].next) != 0)
            fail_msg("%s", p);
        mem_free(p);
        free(text);
        json_decref(list);
        chat_message_clear(&m);
        chat_free(c);
    }
}

/* The text behind `mark` in the prompt for an effort, up to a line's end; "" where it is not there. */
static void effort_line(const struct chat *c, const char *word, const char *kwargs,
                        const char *mark, char *line, size_t room)
{
    json_t *k = json(kwargs);
    chat_set_effort(c, word, k);
    char *text = json_dumps(k, 0);
    char *p = prompt(c, "[{\"role\":\"user\",\"content\":\"Hi\"}]", NULL, text);
    const char *at = strstr(p, mark);
    snprintf(line, room, "%.*s", at ? (int)strcspn(at + strlen(mark), "\n.") : 0,
             at ? at + strlen(mark) : "");
    mem_free(p);
    free(text);
    json_decref(k);
}

/* Each word of clients as each template takes it. */
static void test_effort(void **state)
{
    (void)state;
    static const char *const words[7] = {"none", "minimal", "low", "medium",
                                         "high", "xhigh",   "max"};
    static const struct {
        const char *file, *mark, *want[7];
    } cases[] = {
        {"tests/data/gpt_oss",
         "Reasoning: ",
         {"low", "low", "low", "medium", "high", "high", "high"}},
        {"tencent-Hy3",
         "reasoning_effort:",
         {"no_think", "low", "low", "high", "high", "high", "high"}},
        {"Kimi-K3",
         "invoked with `thinking_effort=",
         {"", "low`", "low`", "high`", "high`", "max`", "max`"}},
        {"deepseek-ai-DeepSeek-V4-Flash-0731",
         "Reasoning Effort: ",
         {"", "", "", "", "Absolute maximum with no shortcuts permitted",
          "Beyond maximum \xe2\x80\x94 exhaustive, relentless, and uncompromising",
          "Beyond maximum \xe2\x80\x94 exhaustive, relentless, and uncompromising"}},
        {"Cohere2MoE", "<|START_THINKING|>", {"<|END_THINKING|>", "", "", "", "", "", ""}},
        {"Qwen-Qwen3-0.6B",
         "<|im_start|>assistant\n<think>\n\n",
         {"</think>", "", "", "", "", "", ""}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct chat *c = load(cases[i].file);
        for (int w = 0; w < 7; w++) {
            char line[128];
            effort_line(c, words[w], "{}", cases[i].mark, line, sizeof line);
            const char *want = cases[i].want[w];
            if (*want ? strncmp(line, want, strlen(want)) != 0 : *line != 0)
                fail_msg("%s, %s: '%s' instead of '%s'", cases[i].file, words[w], line, want);
        }
        chat_free(c);
    }
    /* What the request says itself of the template's variables stays. */
    struct chat *c = load("tests/data/gpt_oss");
    char line[128];
    const char *own[8];
    assert_int_equal(chat_own_efforts(c, own, 8), 3);
    assert_string_equal(own[0], "low");
    assert_string_equal(own[2], "high");
    assert_int_equal(chat_own_efforts(c, own, 2), 2);
    effort_line(c, "high", "{\"reasoning_effort\":\"own\"}", "Reasoning: ", line, sizeof line);
    assert_string_equal(line, "own");
    chat_free(c);
    c = inline_chat("{{ messages[0].content }}{{ thinking }}{{ enable_thinking }}");
    assert_int_equal(chat_own_efforts(c, own, 8), 0);
    effort_line(c, "high", "{\"enable_thinking\":false}", "Hi", line, sizeof line);
    assert_string_equal(line, "False");
    effort_line(c, "none", "{\"enable_thinking\":true}", "Hi", line, sizeof line);
    assert_string_equal(line, "False");
    chat_free(c);
    for (int w = 0; w < 7; w++) {
        assert_true(chat_effort_known(words[w]));
        assert_non_null(strstr(chat_efforts, words[w]));
    }
    assert_false(chat_effort_known("ultra") || chat_effort_known("") || chat_effort_known("Low"));
}

static void test_refused(void **state)
{
    (void)state;
    struct chat *c = inline_chat("{% for m in messages %}{{ m.content }}{% endfor %}");
    refuse(c, "{}", "messages: must be an array");
    refuse(c, "[]", "must not be empty");
    refuse(c, "[1]", "messages[0]: must be an object with a role");
    refuse(c, "[{\"content\":\"x\"}]", "messages[0]");
    refuse(c,
           "[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"user\",\"content\":[{\"type\":"
           "\"image_url\",\"image_url\":{}}]}]",
           "messages[1].content[0]: a part of type 'image_url'");
    chat_free(c);
    c = inline_chat("{{ raise_exception('never') }}");
    refuse(c, "[{\"role\":\"user\",\"content\":\"a\"}]", "chat template: line 1: never");
    chat_free(c);
}

/* ------------------------------------------------------------------ every template */

/* Whatever the template, nothing said in a legal conversation may fail or vanish. */
static void test_every_template(void **state)
{
    (void)state;
    static const struct {
        const char *messages;
        const char *words[6];
    } cases[] = {
        {"[{\"role\":\"user\",\"content\":\"Walpha\"}]", {"Walpha"}},
        {"[{\"role\":\"system\",\"content\":\"Wsys\"},{\"role\":\"user\",\"content\":\"Walpha\"}]",
         {"Wsys", "Walpha"}},
        {"[{\"role\":\"developer\",\"content\":\"Wdev\"},{\"role\":\"user\",\"content\":[{\"type\":"
         "\"text\",\"text\":\"Walpha\"}]}]",
         {"Wdev", "Walpha"}},
        {"[{\"role\":\"system\",\"content\":\"Wsys\"},{\"role\":\"system\",\"content\":\"Wsys2\"},{"
         "\"role\":\"user\",\"content\":\"Walpha\"},{\"role\":\"user\",\"content\":\"Wbeta\"}]",
         {"Wsys", "Wsys2", "Walpha", "Wbeta"}},
        {"[{\"role\":\"user\",\"content\":\"Walpha\"},{\"role\":\"assistant\",\"content\":\"Wans\"}"
         ","
         "{\"role\":\"system\",\"content\":\"Wlater\"},{\"role\":\"user\",\"content\":\"Wbeta\"}]",
         {"Walpha", "Wans", "Wlater", "Wbeta"}},
        {"[{\"role\":\"assistant\",\"content\":\"Wans\"},{\"role\":\"user\",\"content\":\"Walpha\"}"
         "]",
         {"Wans", "Walpha"}},
        {"[{\"role\":\"user\",\"content\":\"Walpha\"},{\"role\":\"assistant\",\"content\":null,"
         "\"tool_calls\":[{\"id\":\"call_x1\",\"type\":\"function\",\"function\":{\"name\":"
         "\"get_weather\",\"arguments\":\"{\\\"place\\\": \\\"Wrome\\\"}\"}},{\"id\":\"call_x2\","
         "\"type\":\"function\",\"function\":{\"name\":\"get_weather\",\"arguments\":\"{"
         "\\\"place\\\":"
         " \\\"Woslo\\\"}\"}}]},{\"role\":\"tool\",\"tool_call_id\":\"call_x1\",\"content\":"
         "\"Wsun\"},"
         "{\"role\":\"tool\",\"tool_call_id\":\"call_x2\",\"content\":\"Wsnow\"},{\"role\":"
         "\"user\","
         "\"content\":\"Wbeta\"}]",
         {"Walpha", "Wrome", "Woslo", "Wsun", "Wsnow", "Wbeta"}},
    };
    DIR *d = opendir(GOLDEN);
    if (!d) {
        printf("skipped: no " GOLDEN " here\n");
        skip();
    }
    int n = 0, lost = 0;
    for (struct dirent *e; (e = readdir(d));) {
        if (!strstr(e->d_name, ".jinja"))
            continue;
        struct chat *c = load(e->d_name);
        const struct chat_caps *k = chat_caps(c);
        printf("%-50.50s %-11s%s%s%s%s%s%s%s%s%s%s\n", e->d_name,
               chat_format_name(chat_reply_format(c, true)), k->system ? " system" : "",
               k->system_later ? " later" : "", k->same_role ? "" : " strict",
               k->assistant_first ? "" : " user-first", k->tools ? " tools" : "",
               k->calls ? " calls" : "", k->calls && !k->two_calls ? " single" : "",
               k->calls && k->string_args ? " strings" : "", k->short_ids ? " ids" : "",
               k->null_content ? " null" : "");
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            for (int tools = 0; tools < 2; tools++) {
                char *p = prompt(c, cases[i].messages, tools ? TOOLS : NULL, NULL);
                for (int w = 0; w < 6 && cases[i].words[w]; w++) {
                    if (!strstr(p, cases[i].words[w])) {
                        printf("  %s is lost in case %zu%s\n", cases[i].words[w], i,
                               tools ? " with tools" : "");
                        lost++;
                    }
                }
                mem_free(p);
            }
        }
        chat_free(c);
        n++;
    }
    closedir(d);
    printf("%d templates, %d words lost\n", n, lost);
    assert_true(n > 40);
    assert_int_equal(lost, 0);
}

/* Where the golden renders, the normalised request must give the same bytes. */
static void test_unchanged(void **state)
{
    (void)state;
    FILE *f = fopen(GOLDEN "cases.jsonl", "r");
    if (!f) {
        printf("skipped: no " GOLDEN " here\n");
        skip();
    }
    char *line = NULL, name[256] = "";
    size_t cap = 0;
    struct chat *c = NULL;
    int n_marked = 0, same = 0, other = 0;
    while (getline(&line, &cap, f) > 0) {
        json_t *j = json(line), *ctx = json_object_get(j, "context");
        const char *t = json_string_value(json_object_get(j, "template"));
        const char *want = json_string_value(json_object_get(j, "output"));
        if (strcmp(name, t)) {
            snprintf(name, sizeof name, "%s", t);
            chat_free(c);
            char path[512];
            struct chat_source s;
            struct error err;
            snprintf(path, sizeof path, GOLDEN "%s%s", t, strstr(t, ".jinja") ? "" : ".jinja");
            assert_true(chat_source_open(path, &s, &err));
            mem_free(s.bos);
            mem_free(s.eos);
            s.bos = mem_strdup(json_string_value(json_object_get(ctx, "bos_token")));
            s.eos = mem_strdup(json_string_value(json_object_get(ctx, "eos_token")));
            c = chat_new(&s, &err);
            chat_source_clear(&s);
            assert_non_null(c);
        }
        json_t *kwargs = json_deep_copy(ctx);
        json_object_del(kwargs, "messages");
        json_object_del(kwargs, "tools");
        static const struct tm now = {.tm_year = 126,
                                      .tm_mon = 6,
                                      .tm_mday = 26,
                                      .tm_hour = 12,
                                      .tm_min = 30,
                                      .tm_yday = 206};
        json_t *tools = json_object_get(ctx, "tools");
        struct chat_request r = {.messages = json_object_get(ctx, "messages"),
                                 .tools = json_is_array(tools) ? tools : NULL,
                                 .kwargs = kwargs,
                                 .now = &now};
        struct buf out = {0};
        struct error err = {0};
        bool ok = chat_render(c, &r, &out, &err);
        if (!ok)
            fail_msg("%s / %s: %s", t, json_string_value(json_object_get(j, "case")), err.msg);
        struct buf marked = {
            0}; /* whatever the template does to data, with literal bytes it does the same */
        r.literal = true;
        assert_true(chat_render(c, &r, &marked, &err));
        n_marked += literal_unmark(marked.p, marked.len);
        if (marked.len != out.len || memcmp(marked.p, out.p, out.len) != 0)
            fail_msg("%s / %s: with literal bytes it differs:\n%s\n---\n%s", t,
                     json_string_value(json_object_get(j, "case")), out.p, marked.p);
        buf_clear(&marked);
        if (want && strcmp(want, out.p)) {
            other++;
            printf("%s / %s differs\n", t, json_string_value(json_object_get(j, "case")));
        }
        same += want && !strcmp(want, out.p);
        buf_clear(&out);
        json_decref(kwargs);
        json_decref(j);
    }
    chat_free(c);
    free(line);
    fclose(f);
    printf("%d golden prompts unchanged by normalising, %d changed\n", same, other);
    assert_true(same > 500 && n_marked > 100);
}

/* The marks of each family's thinking are found in its template, and its own switch is used. */
static void test_thoughts(void **state)
{
    (void)state;
    static const char hi[] = "[{\"role\":\"user\",\"content\":\"Hi\"}]";
    static const char seed[] =
        "{%- set open = '<seed:think>' -%}{%- if not thinking_budget is defined -%}"
        "{%- set thinking_budget = -1 -%}{%- endif -%}{{ messages[0].content }} {{ thinking_budget "
        "}}:"
        "{%- if thinking_budget == 0 -%}{{ open + 'none</seed:think>' }}{%- endif -%}";
    static const struct {
        const char *file;
        enum chat_thoughts want;
        enum chat_thinking usual, off;
    } cases[] = {
        {"Qwen-Qwen3-0.6B", CHAT_THOUGHTS_TAGS, CHAT_THINKS_MAYBE, CHAT_THINKS_NOT},
        {"ibm-granite-granite-3.3-2B-Instruct", CHAT_THOUGHTS_ANSWER, CHAT_THINKS_MAYBE,
         CHAT_THINKS_MAYBE},
        {"unsloth-Apriel-1.5", CHAT_THOUGHTS_THINKING, CHAT_THINKS_MAYBE, CHAT_THINKS_MAYBE},
        {"MiniMax-M3", CHAT_THOUGHTS_MINIMAX, CHAT_THINKS_MAYBE, CHAT_THINKS_NOT},
        {"tencent-Hy3", CHAT_THOUGHTS_HUNYUAN, CHAT_THINKS_NOT, CHAT_THINKS_NOT},
        {"Cohere2MoE", CHAT_THOUGHTS_COHERE, CHAT_THINKS_FIRST, CHAT_THINKS_NOT},
        {"CohereForAI-c4ai-command-r7b-12-2024-tool_use", CHAT_THOUGHTS_COHERE, CHAT_THINKS_NOT,
         CHAT_THINKS_NOT},
        {"Apertus-8B-Instruct", CHAT_THOUGHTS_APERTUS, CHAT_THINKS_MAYBE, CHAT_THINKS_MAYBE},
        {"muse-glimmer", CHAT_THOUGHTS_MUSE, CHAT_THINKS_MAYBE, CHAT_THINKS_MAYBE},
        {"google-gemma-4-31B-it-interleaved", CHAT_THOUGHTS_TAGS, CHAT_THINKS_NOT, CHAT_THINKS_NOT},
        {"poolside-Laguna-S-2.1", CHAT_THOUGHTS_TAGS, CHAT_THINKS_FIRST, CHAT_THINKS_NOT},
    };
    struct chat *c = inline_chat(seed);
    assert_int_equal(chat_thoughts(c), CHAT_THOUGHTS_SEED);
    json_t *k = json_object();
    chat_set_budget(c, 512, k);
    chat_set_budget(c, 7, k); /* the request's own value stays */
    char *given = json_dumps(k, 0);
    const char *const rows[][2] = {
        {"{}", "Hi -1:"},
        {given, "Hi 512:"},
        {"{\"enable_thinking\":true}", "Hi -1:"},
        {"{\"enable_thinking\":false}", "Hi 0:<seed:think>none</seed:think>"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *p = prompt(c, hi, NULL, rows[i][0]);
        assert_string_equal(p, rows[i][1]);
        assert_int_equal(chat_thinking_of(p, strlen(p)),
                         i == 3 ? CHAT_THINKS_NOT : CHAT_THINKS_MAYBE);
        mem_free(p);
    }
    free(given);
    json_decref(k);
    chat_free(c);
    c = inline_chat("{{ messages[0].content }}<|begin|>assistant{# <|think|> #}");
    assert_int_equal(chat_thoughts(c), CHAT_THOUGHTS_SOLAR);
    chat_free(c);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        c = load(cases[i].file);
        k = json_object();
        chat_set_effort(c, "none", k);
        char *off = json_dumps(k, 0), *p = prompt(c, hi, NULL, NULL), *q = prompt(c, hi, NULL, off);
        if (chat_thoughts(c) != cases[i].want || chat_thinking_of(p, strlen(p)) != cases[i].usual ||
            chat_thinking_of(q, strlen(q)) != cases[i].off)
            fail_msg("%s: marks %d, thinking %d, %d when off", cases[i].file, (int)chat_thoughts(c),
                     (int)chat_thinking_of(p, strlen(p)), (int)chat_thinking_of(q, strlen(q)));
        mem_free(p);
        mem_free(q);
        free(off);
        json_decref(k);
        chat_free(c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_qwen3),          cmocka_unit_test(test_families),
        cmocka_unit_test(test_effort),         cmocka_unit_test(test_own_templates),
        cmocka_unit_test(test_inline),         cmocka_unit_test(test_refused),
        cmocka_unit_test(test_every_template), cmocka_unit_test(test_unchanged),
        cmocka_unit_test(test_thoughts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
