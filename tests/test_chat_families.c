/*
 * The chat parser: calls and thinking as the templates of each family write them.
 */
#include "chat_check.h"

/* The schema says what an element of MiniMax-M3 is, also through references, unions and enums. */
static void test_elements(void **state)
{
    (void)state;
    json_t *old = schema;
    schema = json_loads("[{\"function\":{\"name\":\"f\",\"parameters\":{\"$defs\":{\"P\":{\"type\":"
                        "\"object\",\"properties\":"
                        "{\"item\":{\"type\":\"string\"},\"next\":{\"$ref\":\"#/$defs/"
                        "P\"}}},\"L\":{\"$ref\":\"#/$defs/L\"}},"
                        "\"properties\":{\"p\":{\"$ref\":\"#/$defs/"
                        "P\"},\"l\":{\"anyOf\":[{\"type\":\"array\",\"items\":{\"type\":"
                        "\"string\"}},{\"type\":\"null\"}]},\"e\":{\"enum\":[\"1\",\"2\"]},\"u\":{"
                        "\"type\":[\"string\",\"null\"]},"
                        "\"n\":{\"type\":[\"string\",\"integer\"]},\"o\":{\"type\":\"object\","
                        "\"additionalProperties\":{\"type\":"
                        "\"string\"}},\"x\":{\"$ref\":\"#/$defs/"
                        "L\"},\"y\":{\"anyOf\":[{\"$ref\":\"#/properties/y\"},{\"$ref\":"
                        "\"#/properties/y\"}]}}}}}]",
                        0, NULL);
    assert_non_null(schema);
    static const struct {
        const char *text, *args;
    } cases[] = {
        {NS "<p>" NS "<item>5" NS "</item>" NS "<next>" NS "<item>6" NS "</item>" NS "</next>" NS
            "</p>",
         "{\"p\": {\"item\": \"5\", \"next\": {\"item\": \"6\"}}}"},
        {NS "<l>" NS "<item>7" NS "</item>" NS "</l>", "{\"l\": [\"7\"]}"},
        {NS "<l>" NS "</l>" NS "<p>" NS "</p>", "{\"l\": [], \"p\": {}}"},
        {NS "<l>null" NS "</l>", "{\"l\": null}"},
        {NS "<e>1" NS "</e>" NS "<u>null" NS "</u>", "{\"e\": \"1\", \"u\": \"null\"}"},
        {NS "<n>1" NS "</n>" NS "<n>one" NS "</n>", "{\"n\": 1, \"n\": \"one\"}"},
        {NS "<o>" NS "<k>1" NS "</k>" NS "</o>", "{\"o\": {\"k\": \"1\"}}"},
        {NS "<x>1" NS "</x>" NS "<y>1" NS "</y>",
         "{\"x\": 1, \"y\": 1}"}, /* references without an end */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[1024], want[1024];
        snprintf(text, sizeof text,
                 NS "<tool_call>" NS "<invoke name=\"f\">%s" NS "</invoke>" NS "</tool_call>",
                 cases[i].text);
        snprintf(want, sizeof want, "f %s", cases[i].args);
        check(CHAT_MINIMAX_M3, false, text, "", NULL, want);
    }
    struct buf deep = {0};
    buf_adds(&deep, NS "<tool_call>" NS "<invoke name=\"f\">");
    for (int i = 0; i < 100; i++)
        buf_adds(&deep, NS "<k>");
    buf_addc(&deep, 0);
    json_t *j = parse(CHAT_MINIMAX_M3, deep.p, deep.len - 1, BYTES, false, true);
    assert_string_equal(json_string_value(json_object_get(j, "content")), deep.p);
    json_decref(j);
    buf_clear(&deep);
    json_decref(schema);
    schema = old;
}

/* As the templates of each family write a call after thinking, and text that is no call. */
static void test_families(void **state)
{
    (void)state;
    static const char args[] = "f {\"text\": \"a \\\"b\\\"\", \"n\": 3}|g {}";
    thoughts = CHAT_THOUGHTS_SEED;
    check(CHAT_SEED, false,
          "<seed:think>Hm <seed:tool_call>.</seed:think>\nSee:\n<seed:tool_call>\n<function=f>\n"
          "<parameter=text>a \"b\"</parameter>\n<parameter=n>3</parameter>\n</function>\n"
          "</seed:tool_call>\n<seed:tool_call>\n<function=g>\n</function>\n</seed:tool_call>",
          "See:", "Hm <seed:tool_call>.", args);
    check(CHAT_SEED, false,
          "<seed:tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n</function>\n"
          "</seed:tool_call>",
          "", NULL, "f {\"text\": \"\\na\\n\"}"); /* lines belong to the value */
    check(CHAT_SEED, false, "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>",
          "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>", NULL, NULL);
    check(CHAT_SEED, false, "<seed:tool_call>\nno</seed:tool_call>",
          "<seed:tool_call>\nno</seed:tool_call>", NULL, NULL);
    thoughts = CHAT_THOUGHTS_COHERE;
    static const char action[] =
        "<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": "
        "{\"text\": \"]}\"}},\n    {\"tool_call_id\": \"1\", \"tool_name\": \"g\", \"parameters\": "
        "{}}"
        "\n]<|END_ACTION|>";
    char text[512];
    for (int closed = 0; closed < 2; closed++) {
        snprintf(text, sizeof text, "Hm [.%s%s", closed ? "<|END_THINKING|>" : "", action);
        check(CHAT_COHERE, true, text, "", "Hm [.", "f {\"text\": \"]}\"}|g {}");
    }
    check(CHAT_COHERE, true,
          "Hm.<|END_THINKING|><|START_ACTION|>[{\"tool_name\": \"f\", \"parameters\": {\"n\": 1}}]"
          "<|END_ACTION|>",
          "", "Hm.", "f {\"n\": 1}");
    check(CHAT_COHERE, false, action, "", NULL, "f {\"text\": \"]}\"}|g {}");
    check(CHAT_COHERE, false, "<|START_TEXT|>It is.<|END_TEXT|>", "It is.", NULL, NULL);
    check(CHAT_COHERE, false, "<|START_ACTION|>[]<|END_ACTION|>",
          "<|START_ACTION|>[]<|END_ACTION|>", NULL, NULL);
    check(CHAT_COHERE, false, "<|START_ACTION|>f", "<|START_ACTION|>f", NULL, NULL);
    thoughts = CHAT_THOUGHTS_TAGS;
    check(CHAT_NEMOTRON, false,
          "<think>\nHm.\n</think>\nSee:\n<TOOLCALL>[{\"name\": \"f\", \"arguments\": {\"n\": 1}}, "
          "{\"name\": "
          "\"g\", \"arguments\": {}}]</TOOLCALL>",
          "See:", "Hm.", "f {\"n\": 1}|g {}");
    check(CHAT_GRANITE, false,
          "<think>Hm.</think><|tool_call|>[{\"name\": \"f\", \"arguments\": {\"n\": 1}}]", "",
          "Hm.", "f {\"n\": 1}");
    check(CHAT_TOOL_CALLS, false,
          "<tool_calls>[{\"name\": \"f\", \"arguments\": {\"n\": 1}, \"id\": \"7\"}]</tool_calls>",
          "", NULL, "f {\"n\": 1}");
    check(CHAT_LFM2, false, "Ok.<|tool_call_start|>[f(text='a', n=1), g()]<|tool_call_end|>", "Ok.",
          NULL, "f {\"text\": \"a\", \"n\": 1}|g {}");
    check(CHAT_LFM2, false, "<|tool_call_start|>[no]<|tool_call_end|>",
          "<|tool_call_start|>[no]<|tool_call_end|>", NULL, NULL);
    check(CHAT_NEMOTRON, false, "<TOOLCALL>no</TOOLCALL>", "<TOOLCALL>no</TOOLCALL>", NULL, NULL);
    thoughts = CHAT_THOUGHTS_APERTUS;
    static const char tools[] = "<|tools_prefix|>[{\"f\": {\"text\": \"]}\"}}, {\"g\": {}}]"
                                "<|tools_suffix|>";
    for (int closed = 0; closed < 2; closed++) {
        snprintf(text, sizeof text, "<|inner_prefix|>Hm [{.%s%s", closed ? "<|inner_suffix|>" : "",
                 tools);
        check(CHAT_APERTUS, false, text, "", "Hm [{.", "f {\"text\": \"]}\"}|g {}");
    }
    check(CHAT_APERTUS, false, "See: <|tools_prefix|>[ { \"f\" : {\"n\": 1} } ]", "See:", NULL,
          "f {\"n\": 1}");
    check(CHAT_APERTUS, false, "<|tools_prefix|>[{\"\": {}}]", "<|tools_prefix|>[{\"\": {}}]", NULL,
          NULL);
    check(CHAT_APERTUS, false, "<|tools_prefix|>[{\"f\": 5}]<|tools_suffix|>",
          "<|tools_prefix|>[{\"f\": 5}]<|tools_suffix|>", NULL, NULL);
    check(CHAT_APERTUS, false, "<|tools_prefix|>[f]", "<|tools_prefix|>[f]", NULL, NULL);
    thoughts = CHAT_THOUGHTS_HUNYUAN;
    check(CHAT_HUNYUAN, true,
          "Hm <tool_calls:opensource>.</think:opensource>See:<tool_calls:opensource>\n"
          "<tool_call:opensource>f<tool_sep:opensource>\n<arg_key:opensource>text"
          "</arg_key:opensource>\n<arg_value:opensource>a \"b\"</arg_value:opensource>\n"
          "<arg_key:opensource>n</arg_key:opensource>\n<arg_value:opensource>3"
          "</arg_value:opensource>\n</tool_call:opensource>\n<tool_call:opensource>g"
          "<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
          "See:", "Hm <tool_calls:opensource>.", args);
    check(CHAT_HUNYUAN, false, "<tool_calls:opensource>\nno", "<tool_calls:opensource>\nno", NULL,
          NULL);
    check(CHAT_HUNYUAN, false, "<tool_calls:opensource><tool_call:opensource>f",
          "<tool_calls:opensource><tool_call:opensource>f", NULL, NULL);
    thoughts = CHAT_THOUGHTS_SOLAR;
    static const char solar[] =
        "<|think|>Hm <|tool_calls|>.<|end|>%s<|begin|>assistant<|tool_calls|><|tool_call:begin|>a1"
        "<|tool_call:name|>f<|tool_call:args|>{\"n\": 1}<|tool_call:end|><|tool_call:begin|>b2"
        "<|tool_call:name|>g<|tool_call:args|>{}<|tool_call:end|>";
    snprintf(text, sizeof text, solar, "");
    check(CHAT_SOLAR, false, text, "", "Hm <|tool_calls|>.", "f {\"n\": 1}|g {}");
    snprintf(text, sizeof text, solar, "<|begin|>assistant<|content|>See:<|end|>");
    check(CHAT_SOLAR, false, text, "See:", "Hm <|tool_calls|>.", "f {\"n\": 1}|g {}");
    check(CHAT_SOLAR, false,
          "<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>f<|tool_call:args|>{\"n\": 1}"
          "<|tool_call:end|><|calls|>",
          "", NULL, "f {\"n\": 1}");
    check(CHAT_SOLAR, false, "<|content|>It is.<|end|>", "It is.", NULL, NULL);
    check(CHAT_SOLAR, false, "<|tool_calls|>no", "<|tool_calls|>no", NULL, NULL);
    check(CHAT_SOLAR, false, "<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>f<|tool_call:ar",
          "<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>f<|tool_call:ar", NULL, NULL);
    thoughts = CHAT_THOUGHTS_MUSE;
    check(CHAT_MUSE, false,
          " to=self<|message|>Hm <atem:function_calls>.<|eom|><|start|>assistant to=f<|message|>"
          "<atem:function_calls>\n<atem:invoke name=\"f\">\n<atem:parameter name=\"text\">a \"b\""
          "</atem:parameter>\n<atem:parameter name=\"n\">3</atem:parameter>\n</atem:invoke>\n"
          "</atem:function_calls><|eom|><|start|>assistant to=g<|message|><atem:function_calls>\n"
          "<atem:invoke name=\"g\">\n</atem:invoke>\n</atem:function_calls>",
          "", "Hm <atem:function_calls>.", args);
    check(CHAT_MUSE, false,
          " to=f<|message|><atem:function_calls>\n<atem:invoke name=\"f\">\n</atem:invoke>\n"
          "</atem:function_calls><|eot|>",
          "", NULL, "f {}");
    check(CHAT_MUSE, false, " to=user<|message|>It is.<|eot|>", "It is.", NULL, NULL);
    check(CHAT_MUSE, false,
          " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>It is.", "It is.",
          "Hm.", NULL);
    check(CHAT_MUSE, false, "to=nobody", "to=nobody", NULL, NULL);
    check(CHAT_MUSE, false, "to=f<|message|>no", "to=f<|message|>no", NULL, NULL);
    check(CHAT_MUSE, false, "to=f<|message|><atem:function_calls>no",
          "to=f<|message|><atem:function_calls>no", NULL, NULL);
    thoughts = CHAT_THOUGHTS_INKLING;
    check(CHAT_INKLING, false,
          "<|content_thinking|>Hm f<|content_invoke_tool_json|>.<|end_message|><|message_model|>"
          "f<|content_invoke_tool_json|>{\"name\":\"f\",\"args\":{\"n\": 1}}<|end_message|>"
          "<|message_model|>g<|content_invoke_tool_json|>{\"name\": \"g\", \"args\": {}}"
          "<|end_message|>",
          "", "Hm f<|content_invoke_tool_json|>.", "f {\"n\": 1}|g {}");
    check(CHAT_INKLING, false,
          "<|content_text|>See [1]:<|end_message|><|message_model|>f<|content_invoke_tool_json|>"
          "{\"name\":\"f\",\"args\":{\"n\": 1}}<|end_message|>",
          "See [1]:", NULL, "f {\"n\": 1}");
    check(CHAT_INKLING, false,
          "f<|content_invoke_tool_json|>{\"name\":\"f\",\"args\":{\"n\": 1}}<|end_message|>", "",
          NULL, "f {\"n\": 1}");
    check(CHAT_INKLING, false, "<|content_text|>It is.<|end_message|>", "It is.", NULL, NULL);
    check(CHAT_INKLING, false, "Bare", "Bare", NULL, NULL);
    check(CHAT_INKLING, false, "f<|content_invoke_tool_json|>no", "f<|content_invoke_tool_json|>no",
          NULL, NULL);
    thoughts = CHAT_THOUGHTS_MINIMAX;
    check(CHAT_MINIMAX_M3, false, "</mm:think>It is.", "It is.", NULL, NULL);
    check(CHAT_MINIMAX_M3, true,
          "Hm " NS "<tool_call>.</mm:think>See:" NS "<tool_call>\n" NS "<invoke name=\"f\">" NS
          "<text>a \"b\"" NS "</text>" NS "<n>3" NS "</n>" NS "</invoke>\n" NS
          "<invoke name=\"g\">" NS "</invoke>\n" NS "</tool_call>",
          "See:", "Hm " NS "<tool_call>.", args);
    /* a text is a string by the schema, else by its form; a list has items */
    check(CHAT_MINIMAX_M3, false,
          NS "<tool_call>" NS "<invoke name=\"f\">" NS "<text> 5\n" NS "</text>" NS "<o>" NS
             "<a>" NS "<item>5" NS "</item>\n" NS "<item>" NS "<b> <i>x</i> ]<" NS "</b>" NS
             "</item>" NS "</a>" NS "<c>" NS "</c>" NS "</o>" NS "</invoke>" NS "</tool_call>",
          "", NULL,
          "f {\"text\": \" 5\\n\", \"o\": {\"a\": [5, {\"b\": \" <i>x</i> ]<\"}], \"c\": \"\"}}");
    check(CHAT_MINIMAX_M3, false, NS "<tool_call>\nno", NS "<tool_call>\nno", NULL, NULL);
    check(CHAT_MINIMAX_M3, false, NS "<tool_call>" NS "<invoke name=\"f g\">",
          NS "<tool_call>" NS "<invoke name=\"f g\">", NULL, NULL);
    thoughts = CHAT_THOUGHTS_TAGS;
}

static void check_thoughts(enum chat_thoughts t, enum chat_format f, bool in_think,
                           const char *text, const char *content, const char *reasoning)
{
    thoughts = t;
    check(f, in_think, text, content, reasoning, NULL);
    thoughts = CHAT_THOUGHTS_TAGS;
}

/* As the templates of each family write thinking. The marks of one family are text in another's answers. */
static void test_thoughts(void **state)
{
    (void)state;
    check_thoughts(CHAT_THOUGHTS_SEED, CHAT_PLAIN, false,
                   "<seed:think>\nWhy?\n<seed:cot_budget_reflect>Used 9.</seed:cot_budget_reflect>"
                   "So.</seed:think>\nIt is.",
                   "It is.", "Why?\n<seed:cot_budget_reflect>Used 9.</seed:cot_budget_reflect>So.");
    check_thoughts(CHAT_THOUGHTS_SEED, CHAT_QWEN_XML, true, "Why </think> so?</seed:think>It is.",
                   "It is.", "Why </think> so?");
    check_thoughts(CHAT_THOUGHTS_SEED, CHAT_PLAIN, false, "<seed:thin", "<seed:thin", NULL);
    check_thoughts(CHAT_THOUGHTS_SEED, CHAT_PLAIN, false, "<think>a</think>b", "<think>a</think>b",
                   NULL);
    check_thoughts(CHAT_THOUGHTS_TAGS, CHAT_PLAIN, false, "<seed:think>a</seed:think>b",
                   "<seed:think>a</seed:think>b", NULL);
    check_thoughts(CHAT_THOUGHTS_COHERE, CHAT_PLAIN, false,
                   "<|START_THINKING|>Why?<|END_THINKING|><|START_RESPONSE|>It is.<|END_RESPONSE|>",
                   "It is.", "Why?");
    check_thoughts(CHAT_THOUGHTS_COHERE, CHAT_PLAIN, true,
                   "Why?<|END_THINKING|><|START_TEXT|>It < is.<|END_TEXT|>", "It < is.", "Why?");
    check_thoughts(CHAT_THOUGHTS_COHERE, CHAT_PLAIN, true, "Why?<|END_THINKING|>It is.", "It is.",
                   "Why?");
    check_thoughts(CHAT_THOUGHTS_COHERE, CHAT_PLAIN, false, "<|START_TEXT|>It is.<|END_TEXT",
                   "It is.<|END_TEXT", NULL);
    check_thoughts(CHAT_THOUGHTS_COHERE, CHAT_PLAIN, false, "It <|END_TEXT|> is",
                   "It <|END_TEXT|> is", NULL);
    check_thoughts(CHAT_THOUGHTS_APERTUS, CHAT_PLAIN, false,
                   "<|inner_prefix|>Why?<|inner_suffix|>It is.", "It is.", "Why?");
    check_thoughts(CHAT_THOUGHTS_MINIMAX, CHAT_MINIMAX, true, "Why?\n</mm:think>\n\nIt is.",
                   "It is.", "Why?");
    check_thoughts(CHAT_THOUGHTS_HUNYUAN, CHAT_PLAIN, true, "Why?</think:opensource>It is.",
                   "It is.", "Why?");
    check_thoughts(CHAT_THOUGHTS_THINKING, CHAT_PLAIN, false, "<thinking>Why?</thinking>It is.",
                   "It is.", "Why?");
    check_thoughts(CHAT_THOUGHTS_ANSWER, CHAT_PLAIN, false,
                   "<think>Why?</think>\n<response>It is.</response>", "It is.", "Why?");
    check_thoughts(CHAT_THOUGHTS_ANSWER, CHAT_PLAIN, true,
                   "Why?\n</think>\n<answer>\nIt is.\n</answer>", "It is.", "Why?");
    check_thoughts(CHAT_THOUGHTS_SOLAR, CHAT_PLAIN, false,
                   "<|think|>Why?<|end|><|begin|>assistant<|content|>It is.<|end|>", "It is.",
                   "Why?");
    check_thoughts(CHAT_THOUGHTS_SOLAR, CHAT_PLAIN, false, "<|content|>It is.", "It is.", NULL);
    check_thoughts(CHAT_THOUGHTS_MUSE, CHAT_PLAIN, false,
                   " to=self<|message|>Why?<|eom|><|start|>assistant<|message|>It is.", "It is.",
                   "Why?");
    check_thoughts(CHAT_THOUGHTS_MUSE, CHAT_PLAIN, false, "<|message|>to=self", "to=self", NULL);
    check_thoughts(CHAT_THOUGHTS_INKLING, CHAT_PLAIN, false,
                   "<|content_thinking|>Why?<|end_message|><|message_model|><|content_text|>It is."
                   "<|end_message|>",
                   "It is.", "Why?");
    check_thoughts(CHAT_THOUGHTS_INKLING, CHAT_PLAIN, false, "<|content_text|>It.<|end_message|>",
                   "It.", NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_elements),
        cmocka_unit_test(test_families),
        cmocka_unit_test(test_thoughts),
    };
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    json_decref(schema);
    return rc;
}
