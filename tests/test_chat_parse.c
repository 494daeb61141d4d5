/*
 * The chat parser: what each format's text means, that nothing half-finished is ever shown, and the
 * invariant that any split of the stream gives the same message, over 100,000 seeded texts.
 */
#include "chat_check.h"

static void test_plain(void **state)
{
    (void)state;
    check(CHAT_PLAIN, false, "Hello", "Hello", NULL, NULL);
    check(CHAT_PLAIN, false, "", "", NULL, NULL);
    check(CHAT_PLAIN, false, " \n Hi \n", " \n Hi \n", NULL, NULL);
    check(CHAT_PLAIN, false, "a < b <think> c", "a < b <think> c", NULL, NULL);
    check(CHAT_PLAIN, false, "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", NULL, NULL);
    check(CHAT_DEEPSEEK_R1, false, "<think>\nWhy?\n\nSo.\n</think>\n\nIt is.", "It is.",
          "Why?\n\nSo.", NULL);
    check(CHAT_DEEPSEEK_R1, true, "Why?\n</think>\n\nIt is.\n", "It is.\n", "Why?", NULL);
    check(CHAT_DEEPSEEK_R1, true, "<think>\nagain</think>x", "x", "again", NULL);
    check(CHAT_DEEPSEEK_R1, true, "never ends </thin", "", "never ends </thin", NULL);
    check(CHAT_DEEPSEEK_R1, false, "\n<think></think>x<think>y</think>", "x<think>y</think>", NULL,
          NULL);
    check(CHAT_DEEPSEEK_R1, false, "x</think>y", "x</think>y", NULL, NULL);
    check(CHAT_DEEPSEEK_R1, false, "<thin", "<thin", NULL, NULL);
}

static void test_hermes(void **state)
{
    (void)state;
    check(CHAT_HERMES, false,
          "<think>\nhm\n</think>\n\nLook:\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": "
          "[1, \"}\"]}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": "
          "{}}\n</tool_call>",
          "Look:", "hm", "f {\"a\": [1, \"}\"]}|g {}");
    check(CHAT_HERMES, false, "<tool_call>{\"arguments\": {\"x\":1}, \"name\": \"f\"}</tool_call>",
          "", NULL, "f {\"x\":1}");
    check(CHAT_HERMES, false, "<tool_call>{\"name\": \"f\"}</tool_call>done", "done", NULL, "f {}");
    check(CHAT_HERMES, false,
          "<tool_call>{\"name\":\"f\",\"arguments\":\"{\\\"a\\\": 1}\"}</tool_call>", "", NULL,
          "f {\"a\": 1}");
    check(CHAT_HERMES, false, "<tool_call>{\"name\":\"f\",\"arguments\":null}</tool_call>", "",
          NULL, "f {}");
    check(CHAT_HERMES, false,
          "<tool_call>{\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":{}}}"
          "</tool_call>",
          "", NULL, "f {}");
    check(CHAT_HERMES, false, "use <tool_call> tags", "use <tool_call> tags", NULL, NULL);
    check(CHAT_HERMES, false, "a <tool_call>{\"nam", "a <tool_call>{\"nam", NULL, NULL);
    check(CHAT_HERMES, false, "a <tool_", "a <tool_", NULL, NULL);
    check(CHAT_HERMES, false, "<tool_call><tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>",
          "<tool_call>", NULL, "f {}");
    check(
        CHAT_HERMES, false,
        "<tool_call>{\"name\":\"f\",\"arguments\":{}}{\"name\":\"g\",\"arguments\":{}}</tool_call>",
        "", NULL, "f {}|g {}");
    check(CHAT_HERMES, false,
          "<tool_call>{\"name\":\"\\u0066\\u00e9\",\"arguments\":{}}</tool_call>", "", NULL,
          "f\xc3\xa9 {}");
}

static void test_xml(void **state)
{
    (void)state;
    check(CHAT_QWEN_XML, false,
          "Sure.\n<tool_call>\n<function=f>\n<parameter=text>\nline \"1\"\nline 2\n</parameter>\n"
          "<parameter=n>\n42\n</parameter>\n<parameter=other>\n[1, "
          "2]\n</parameter>\n</function>\n</tool_call>",
          "Sure.", NULL, "f {\"text\": \"line \\\"1\\\"\\nline 2\", \"n\": 42, \"other\": [1, 2]}");
    check(CHAT_QWEN_XML, false,
          "<function=f><parameter=text>5</parameter><parameter=free>five</parameter>"
          "<parameter=b>True</parameter></function></tool_call>bye",
          "bye", NULL, "f {\"text\": \"5\", \"free\": \"five\", \"b\": true}");
    check(CHAT_QWEN_XML, false, "<tool_call><function=g></function></tool_call>", "", NULL, "g {}");
    check(CHAT_QWEN_XML, false,
          "<tool_call>\n<function=f>\n<parameter=x>\n1\n<parameter=y>\n2\n</function>", "", NULL,
          "f {\"x\": 1, \"y\": 2}");
    check(CHAT_QWEN_XML, false, "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>",
          "", NULL, "f {}");
    check(CHAT_QWEN_XML, false, "if a <function b", "if a <function b", NULL, NULL);
    check(CHAT_QWEN_XML, false, "<tool_call>\nno", "<tool_call>\nno", NULL, NULL);
}

static void test_llama(void **state)
{
    (void)state;
    check(CHAT_LLAMA_JSON, false, "{\"name\": \"f\", \"parameters\": {\"q\": \"x\"}}", "", NULL,
          "f {\"q\": \"x\"}");
    check(CHAT_LLAMA_JSON, false,
          "<|python_tag|>{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}; {\"name\": "
          "\"g\", \"parameters\": {\"a\": 1}}",
          "", NULL, "f {}|g {\"a\": 1}");
    check(CHAT_LLAMA_JSON, false, "{\"name\": \"Bob\", \"age\": 3}",
          "{\"name\": \"Bob\", \"age\": 3}", NULL, NULL);
    check(CHAT_LLAMA_JSON, false, "{\"a\": 1} is JSON", "{\"a\": 1} is JSON", NULL, NULL);
    check(CHAT_LLAMA_JSON, false, " { not json", " { not json", NULL, NULL);
    check(CHAT_LLAMA_JSON, false, "Hi {\"name\": \"f\", \"parameters\": {}}",
          "Hi {\"name\": \"f\", \"parameters\": {}}", NULL, NULL);
    check(CHAT_PYTHONIC, false, "[f(a=1, b='x \"y\"', c=[True, None, {'k': 1.5}]), g()]", "", NULL,
          "f {\"a\": 1, \"b\": \"x \\\"y\\\"\", \"c\": [true, null, {\"k\": 1.5}]}|g {}");
    check(CHAT_PYTHONIC, false, "<|python_start|>[f(x=\"a)b,\\n\")]", "", NULL,
          "f {\"x\": \"a)b,\\n\"}");
    check(CHAT_PYTHONIC, false, "[link](http://x)", "[link](http://x)", NULL, NULL);
    check(CHAT_PYTHONIC, false, "[1, 2]", "[1, 2]", NULL, NULL);
    check(CHAT_PYTHONIC, false, "[f(1)]", "[f(1)]", NULL, NULL);
    check(CHAT_PYTHONIC, false, "[f(a=foo.bar)]", "", NULL, "f {\"a\": \"foo.bar\"}");
    check(CHAT_PYTHONIC, false, "Text [f(a=1)]", "Text [f(a=1)]", NULL, NULL);
}

static void test_mistral(void **state)
{
    (void)state;
    check(CHAT_MISTRAL, false,
          "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": 1}, \"id\": \"abcdefghi\"}, "
          "{\"name\": \"g\", \"arguments\": {}}]",
          "", NULL, "f {\"a\": 1}|g {}");
    check(CHAT_MISTRAL, false, "Ok.[TOOL_CALLS]f[ARGS]{\"a\": \"}\"}[TOOL_CALLS]g[ARGS]{}", "Ok.",
          NULL, "f {\"a\": \"}\"}|g {}");
    check(CHAT_MISTRAL, false, "[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{\"a\": 1}", "", NULL,
          "f {\"a\": 1}");
    check(CHAT_MISTRAL, false, "[TOOL_CALLS]f{\"a\": [1]} after", "after", NULL, "f {\"a\": [1]}");
    check(CHAT_MISTRAL, false, "[THINK]hm[/THINK]yes", "yes", "hm", NULL);
    check(CHAT_MISTRAL, false, "see [TOOL_CALL", "see [TOOL_CALL", NULL, NULL);
    check(CHAT_MISTRAL, false, "[TOOL_CALLS] what?", "[TOOL_CALLS] what?", NULL, NULL);
    check(CHAT_MISTRAL, false, "[TOOL_CALLS][1]", "[TOOL_CALLS][1]", NULL, NULL);
    check(CHAT_MISTRAL, false, "[TOOL_CALLS][{\"x\": 1}]", "[TOOL_CALLS][{\"x\": 1}]", NULL, NULL);
}

static void test_deepseek(void **state)
{
    (void)state;
    check(
        CHAT_DEEPSEEK_R1, true,
        "hm\n</think>\n\nLook:\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        "f\n```json\n{\"a\": [1, \"}```\"]}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function"
        "<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Look:", "hm", "f {\"a\": [1, \"}```\"]}|g {}");
    check(CHAT_DEEPSEEK_R1, false,
          "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜>"
          "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>done",
          "done", NULL, "f {\"a\": 1}|g {}");
    check(CHAT_DEEPSEEK_R1, false, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{\"a\": 1}", "",
          NULL, "f {\"a\": 1}");
    static const char *const none[] = {"use <｜tool▁calls▁begin｜> tags",
                                       "<｜tool▁calls",
                                       "<｜tool▁call▁begin｜>f\n{}",
                                       "<｜tool▁call▁begin｜>f<｜tool▁sep｜>\n```json\nno",
                                       "<｜tool▁call▁begin｜><｜tool▁sep｜>{}",
                                       "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜>",
                                       NULL};
    for (int i = 0; none[i]; i++)
        check(CHAT_DEEPSEEK_R1, false, none[i], none[i], NULL, NULL);
}

static void test_gpt_oss(void **state)
{
    (void)state;
    check(CHAT_GPT_OSS, false,
          "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>"
          "Answer.<|return|>",
          "Answer.", "Think.", NULL);
    check(CHAT_GPT_OSS, false,
          "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>commentary "
          "to=functions.f <|constrain|>json<|message|>{\"a\": 1}<|call|>",
          "", "A", "f {\"a\": 1}");
    check(CHAT_GPT_OSS, false, " to=functions.f<|channel|>commentary json<|message|>{}", "", NULL,
          "f {}");
    check(CHAT_GPT_OSS, false, "<|channel|>commentary<|message|>Let me see.<|end|>", "Let me see.",
          NULL, NULL);
    check(CHAT_GPT_OSS, false,
          "<|channel|>analysis<|message|>A<|end|><|channel|>analysis<|message|>B", "", "A\nB",
          NULL);
    check(CHAT_GPT_OSS, false, "plain text", "plain text", NULL, NULL);
    check(CHAT_GPT_OSS, false, "<|channel|>final<|message|>cut <|retu", "cut <|retu", NULL, NULL);
    check(CHAT_GPT_OSS, false, "<|channel|>commentary to=functions.f<|message|><|call|>", "", NULL,
          "f {}");
}

static void test_tags(void **state)
{
    (void)state;
    /* as the templates of each family write them */
    check(CHAT_GLM, true,
          "hm</think>\nLook.<tool_call>f<arg_key>text</arg_key><arg_value>5 < 6\n</arg_value>"
          "<arg_key>n</arg_key><arg_value>7</arg_value></tool_call><tool_call>g</tool_call>",
          "Look.", "hm", "f {\"text\": \"5 < 6\\n\", \"n\": 7}|g {}");
    check(CHAT_GLM, false,
          "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>[1, \"x\"]</arg_value>\n"
          "<arg_key>b</arg_key>\n<arg_value>text</arg_value>\n</tool_call>",
          "", NULL, "f {\"a\": [1, \"x\"], \"b\": \"text\"}");
    check(CHAT_GLM, false, "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>x", "x",
          NULL, "f {}");
    check(CHAT_GLM, false, "<tool_call>no call</tool_call>", "<tool_call>no call</tool_call>", NULL,
          NULL);
    check(CHAT_GLM, false, "<tool_call><b>", "<tool_call><b>", NULL, NULL);
    check(CHAT_MINIMAX, false,
          "<think>\nhm\n</think>\n\nSee:\n<minimax:tool_call>\n<invoke name=\"f\">\n<parameter "
          "name=\"text\">a \"b\"</parameter>\n<parameter name=\"n\">3</parameter>\n</invoke>\n"
          "<invoke name=\"g\">\n</invoke>\n</minimax:tool_call>",
          "See:", "hm", "f {\"text\": \"a \\\"b\\\"\", \"n\": 3}|g {}");
    check(CHAT_DEEPSEEK_V4, false,
          "<think>hm</think>See:\n\n<" DSML "tool_calls>\n<" DSML
          "invoke name=\"f\">\n" PARAMETER("text", "true", "a \"b\"") PARAMETER("n", "false", "3")
              PARAMETER("other", "true", "5") "</" DSML "invoke>\n<" DSML
                                              "invoke name=\"g\">\n</" DSML "invoke>\n</" DSML
                                              "tool_calls>",
          "See:", "hm", "f {\"text\": \"a \\\"b\\\"\", \"n\": 3, \"other\": \"5\"}|g {}");
    /* a string by the schema, whatever the call says */
    check(CHAT_DEEPSEEK_V32, false,
          "<" DSML "function_calls>\n<" DSML
          "invoke name=\"f\">\n" PARAMETER("text", "false", "5") "</" DSML "invoke>\n</" DSML
                                                                 "function_calls>",
          "", NULL, "f {\"text\": \"5\"}");
    check(CHAT_DEEPSEEK_V4, false, "<" DSML "tool_calls>\nno", "<" DSML "tool_calls>\nno", NULL,
          NULL);
    check(CHAT_MINIMAX, false, "<minimax:tool_call>\nnothing</minimax:tool_call>",
          "<minimax:tool_call>\nnothing</minimax:tool_call>", NULL, NULL);
    check(CHAT_MINIMAX, false, "<minimax:tool_call><invoke name=\"f g\">",
          "<minimax:tool_call><invoke name=\"f g\">", NULL, NULL);
    check(CHAT_KIMI, false,
          "Ok.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_"
          "begin|>"
          "{\"a\": \"}\"}<|tool_call_end|><|tool_call_begin|>functions.my.g:12"
          "<|tool_call_argument_begin|> {}<|tool_call_end|><|tool_calls_section_end|>",
          "Ok.", NULL, "f {\"a\": \"}\"}|my.g {}");
    check(CHAT_KIMI, false, "<|tool_calls_section_begin|>what", "<|tool_calls_section_begin|>what",
          NULL, NULL);
    check(CHAT_KIMI, false, "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_end|>",
          "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_end|>", NULL, NULL);
    check(CHAT_GEMMA, false,
          "<|channel>thought\nhm\n<channel|>Look.<|tool_call>call:f{n:5,text:<|\"|>say "
          "\"{hi}\"<|\"|>,o:{<|\"|>k<|\"|>:[1,true,<|\"|>x<|\"|>]}}<tool_call|><|tool_call>call:g{}"
          "<tool_call|>",
          "Look.", "hm",
          "f {\"n\":5,\"text\":\"say \\\"{hi}\\\"\",\"o\":{\"k\":[1,true,\"x\"]}}|g {}");
    check(CHAT_GEMMA, false, "<|channel>thought\n<channel|>Hello", "Hello", NULL, NULL);
    check(CHAT_GEMMA, false, "<|tool_call>fall:f{}", "<|tool_call>fall:f{}", NULL, NULL);
    check(CHAT_GEMMA, false, "<|tool_call>call:a b{}", "<|tool_call>call:a b{}", NULL, NULL);
}

/* ------------------------------------------------------------------ broken calls */

/* Malformed, or cut short after the call had begun: all of it is text. */
static void test_broken(void **state)
{
    (void)state;
    static const struct {
        enum chat_format f;
        const char *text;
    } cases[] = {
        {CHAT_HERMES, "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":1"},
        {CHAT_HERMES, "<tool_call>{\"name\":\"f\",\"arguments\":{}, oops}</tool_call>ok"},
        {CHAT_HERMES, "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":]}}</tool_call>"},
        {CHAT_HERMES, "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\": tru}}</tool_call>"},
        {CHAT_HERMES, "<tool_call>{\"arguments\":{\"a\": },\"name\":\"f\"}</tool_call>"},
        {CHAT_HERMES, "Look:\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}"},
        {CHAT_HERMES, "a\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}; }\n</tool_call>\n b "},
        {CHAT_QWEN_XML, "<tool_call>\n<function=f>\n<parameter=text>\ncut"},
        {CHAT_QWEN_XML, "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n"},
        {CHAT_QWEN_XML, "<tool_call>\n<function=f>\nstray <parameter=n>\n1\n</parameter>\n"
                        "</function>\n</tool_call>"},
        {CHAT_QWEN_XML, "<tool_call><function=f><parameter=<n>1</parameter></function>"},
        {CHAT_LLAMA_JSON, "{\"name\": \"f\", \"parameters\": {\"q\": \"x"},
        {CHAT_PYTHONIC, "[f(a=1, b=\"cut"},
        {CHAT_PYTHONIC, "[f(a=1, 2)]"},
        {CHAT_PYTHONIC, "[f(a=1]"},
        {CHAT_MISTRAL, "Ok. [TOOL_CALLS]f[ARGS]{\"a\": "},
        {CHAT_MISTRAL, "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": 1"},
        {CHAT_DEEPSEEK_R1, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": "},
        {CHAT_DEEPSEEK_R1, "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": }<｜tool▁call▁end｜>"},
        {CHAT_GPT_OSS, "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": "},
        {CHAT_GPT_OSS, "<|channel|>commentary to=functions.f<|message|>{\"a\": ]}<|call|>"},
        {CHAT_GPT_OSS, "<|channel|>commentary to=functions.f<|mess"},
        {CHAT_GPT_OSS, "<|channel|>commentary to=functions.f<|message|>"},
        {CHAT_GLM, "<tool_call>f<arg_key>n</arg_key>12"},
        {CHAT_GLM, "<tool_call>f<arg_key>text</arg_key><arg_value>cut"},
        {CHAT_GLM, "Hm. <tool_call>f\n<arg_key>n</arg_key>\n<arg_value>1</arg_value> so"},
        {CHAT_MINIMAX, "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"n\">3"},
        {CHAT_MINIMAX, "<minimax:tool_call>\n<invoke name=\"f\">\nno</invoke>"},
        {CHAT_DEEPSEEK_V4,
         "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"n\" "
         "string=\"maybe\">3"},
        {CHAT_DEEPSEEK_V32, "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\nno"},
        {CHAT_KIMI, "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
                    "<|tool_call_argument_begin|>{\"a\": \"}\""},
        {CHAT_GEMMA, "<|tool_call>call:f{n:5,text:<|\"|>say"},
        {CHAT_GEMMA, "<|tool_call>call:f{n 5}<tool_call|>"},
        {CHAT_SEED, "<seed:tool_call>\n<function=f>\n<parameter=text>a</parameter>\nno"},
        {CHAT_COHERE, "<|START_ACTION|>[{\"tool_name\": \"f\", \"parameters\": {\"a\": "},
        {CHAT_APERTUS, "<|tools_prefix|>[{\"f\": {\"a\": ]}"},
        {CHAT_HUNYUAN, "<tool_calls:opensource><tool_call:opensource>f<tool_sep:opensource>\n<arg_"
                       "key:opensource>n</arg_key:opensource>12"},
        {CHAT_SOLAR,
         "<|tool_calls|><|tool_call:begin|>a<|tool_call:name|>f<|tool_call:args|>{\"a\""},
        {CHAT_MUSE, "to=f<|message|><atem:function_calls>\n<atem:invoke name=\"f\">\nno"},
        {CHAT_INKLING, "f<|content_invoke_tool_json|>{\"name\": \"f\", \"args\": {\"a\": "},
        {CHAT_NEMOTRON, "<TOOLCALL>[{\"name\": \"f\", \"arguments\": {\"a\": "},
        {CHAT_LFM2, "<|tool_call_start|>[f(a=1, b=\"cut"},
        {CHAT_MINIMAX_M3, NS "<tool_call>" NS "<invoke name=\"f\">" NS "<n>1"},
        {CHAT_MINIMAX_M3, NS "<tool_call>" NS "<invoke name=\"f\">no" NS "</invoke>"},
        {CHAT_MINIMAX_M3,
         NS "<tool_call>" NS "<invoke name=\"f\">" NS "<o>" NS "<item>1" NS "</item>" NS "<k>"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check(cases[i].f, false, cases[i].text, cases[i].text, NULL, NULL);
    /* Whole calls before a broken one stay, and one after it is read. */
    check(CHAT_HERMES, false,
          "<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>\n<tool_call>{\"name\":\"g\","
          "\"arguments\":{\"a\"!</tool_call> x <tool_call>{\"name\":\"h\",\"arguments\":{}}"
          "</tool_call>",
          "<tool_call>{\"name\":\"g\",\"arguments\":{\"a\"!</tool_call> x <tool_call>{\"name\":"
          "\"h\",\"arguments\":{}}</tool_call>",
          NULL, "f {}");
    check(CHAT_HERMES, false,
          "<tool_call>{\"name\":\"g\",\"arguments\":{}!</tool_call> x <tool_call>{\"name\":\"h\","
          "\"arguments\":{}}</tool_call>",
          "<tool_call>{\"name\":\"g\",\"arguments\":{}!</tool_call> x", NULL, "h {}");
    check(CHAT_PYTHONIC, false, "[f(a=1), g(b=\"cut", ", g(b=\"cut", NULL, "f {\"a\": 1}");
    /* What is no JSON but what clients cope with passes: a line break in a string. */
    check(CHAT_HERMES, false, "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":\"1\n2\"}}", "",
          NULL, "f {\"a\":\"1\n2\"}");
}

/* What a model was about to write, ended after each byte: the calls that are whole are those of the whole
 * text, and of the one at work every byte is text. */
static void test_cut_short(void **state)
{
    (void)state;
    static const struct {
        enum chat_format f;
        const char *text;
        const char *calls[3]; /* how each begins: from here on it is one */
    } cases[] = {
        {CHAT_HERMES,
         "Ok\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"\\\"}\"}}\n</tool_call>\n"
         "<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>",
         {"<tool_call>\n{\"name\": \"f\", \"arguments\": {", "<tool_call>\n{\"name\": \"g\""}},
        {CHAT_QWEN_XML,
         "<tool_call>\n<function=f>\n<parameter=text>\nx < y\n</parameter>\n<parameter=n>\n7\n"
         "</parameter>\n</function>\n</tool_call>",
         {"<tool_call>\n<function=f>"}},
        {CHAT_LLAMA_JSON,
         "{\"name\": \"f\", \"parameters\": {\"a\": {\"b\": [1]}}}; {\"name\": \"g\", "
         "\"parameters\": {}}",
         {"{\"name\": \"f\", \"parameters\": {", "{\"name\": \"g\", \"parameters\": {"}},
        {CHAT_PYTHONIC, "[f(a='x', b=[1, {'k': None}]), h(z=1.5)]", {"[f(a=", "h(z="}},
        {CHAT_MISTRAL,
         "Hm.[TOOL_CALLS]f[ARGS]{\"a\": 1}[TOOL_CALLS][{\"name\": \"g\", \"arguments\": {\"q\": "
         "\"]\"}}]",
         {"[TOOL_CALLS]f[ARGS]{", "[TOOL_CALLS][{\"name\": \"g\", \"arguments\": {"}},
        {CHAT_DEEPSEEK_R1,
         "Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": "
         "\"}\"}\n```<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{\"b\": "
         "1}<｜tool▁call▁end｜>"
         "<｜tool▁calls▁end｜>",
         {"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{",
          "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{"}},
        {CHAT_GPT_OSS,
         "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": 1}<|call|>",
         {"<|channel|>commentary to=functions.f <|constrain|>json<|message|>"}},
        {CHAT_GLM,
         "A "
         "<tool_call>f<arg_key>text</arg_key><arg_value>x</arg_value><arg_key>n</"
         "arg_key><arg_value>1"
         "</arg_value></tool_call>",
         {"<tool_call>f<arg_key>"}},
        {CHAT_MINIMAX,
         "<minimax:tool_call><invoke name=\"f\"><parameter name=\"text\">x</parameter></invoke>"
         "<invoke name=\"g\"></invoke></minimax:tool_call>",
         {"<minimax:tool_call><invoke name=\"f\">", "<invoke name=\"g\">"}},
        {CHAT_KIMI,
         "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
         "{\"a\": 1}<|tool_call_end|><|tool_calls_section_end|>",
         {"<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
          "{"}},
        {CHAT_GEMMA,
         "A.<|tool_call>call:f{n:1,text:<|\"|>x<|\"|>}<tool_call|>",
         {"<|tool_call>call:f{"}},
        {CHAT_SEED,
         "<seed:tool_call>\n<function=f>\n<parameter=text>x < y</parameter>\n</function>\n"
         "</seed:tool_call>",
         {"<seed:tool_call>\n<function=f>"}},
        {CHAT_COHERE,
         "<|START_ACTION|>[{\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": "
         "{\"a\": \"]\"}}, {\"tool_name\": \"g\", \"parameters\": {}}]<|END_ACTION|>",
         {"<|START_ACTION|>[{\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": {",
          "{\"tool_name\": \"g\", \"parameters\": {"}},
        {CHAT_APERTUS,
         "<|tools_prefix|>[{\"f\": {\"a\": 1}}, {\"g\": {}}]<|tools_suffix|>",
         {"<|tools_prefix|>[{\"f\": {", "{\"g\": {"}},
        {CHAT_HUNYUAN,
         "<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>\n"
         "<arg_key:opensource>n</arg_key:opensource>\n<arg_value:opensource>1"
         "</arg_value:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
         {"<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>"}},
        {CHAT_SOLAR,
         "<|tool_calls|><|tool_call:begin|>a<|tool_call:name|>f<|tool_call:args|>{\"a\": 1}"
         "<|tool_call:end|>",
         {"<|tool_calls|><|tool_call:begin|>a<|tool_call:name|>f<|tool_call:args|>{"}},
        {CHAT_INKLING,
         "f<|content_invoke_tool_json|>{\"name\": \"f\", \"args\": {\"a\": 1}}<|end_message|>"
         "<|message_model|>g<|content_invoke_tool_json|>{\"name\": \"g\", \"args\": {}}"
         "<|end_message|>",
         {"f<|content_invoke_tool_json|>{\"name\": \"f\", \"args\": {",
          "g<|content_invoke_tool_json|>{\"name\": \"g\", \"args\": {"}},
        {CHAT_MUSE,
         "to=f<|message|><atem:function_calls>\n<atem:invoke name=\"f\">\n<atem:parameter "
         "name=\"n\">1</atem:parameter>\n</atem:invoke>\n</atem:function_calls>",
         {"to=f<|message|><atem:function_calls>\n<atem:invoke name=\"f\">"}},
        {CHAT_MINIMAX_M3,
         NS "<tool_call>\n" NS "<invoke name=\"f\">" NS "<o>" NS "<k>1" NS "</k>" NS "</o>" NS
            "</invoke>\n" NS "<invoke name=\"g\">" NS "</invoke>\n" NS "</tool_call>",
         {NS "<tool_call>\n" NS "<invoke name=\"f\">", NS "<invoke name=\"g\">"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *text = cases[i].text;
        json_t *all = parse(cases[i].f, text, strlen(text), WHOLE, false, true);
        const json_t *calls = json_object_get(all, "tool_calls");
        size_t n_cut = 0;
        for (size_t n = 1; n <= strlen(text); n++) {
            json_t *j = parse(cases[i].f, text, n, n % 2 ? WHOLE : BYTES, false, true);
            const json_t *some = json_object_get(j, "tool_calls");
            size_t whole = json_array_size(some);
            for (size_t k = 0; k < whole; k++)
                assert_true(json_equal(json_array_get(some, k), json_array_get(calls, k)));
            const char *next = whole < 3 ? cases[i].calls[whole] : NULL;
            size_t at = next ? (size_t)(strstr(text, next) - text) : n;
            if (next && n >= at + strlen(next)) { /* it had begun */
                const char *content = json_string_value(json_object_get(j, "content"));
                size_t len = content ? strlen(content) : 0;
                if (len < n - at || memcmp(content + len - (n - at), text + at, n - at) != 0)
                    fail_msg("%s, ended at %zu: '%s' of %.*s", chat_format_name(cases[i].f), n,
                             content ? content : "", (int)n, text);
                n_cut++;
            }
            json_decref(j);
        }
        assert_true(n_cut > 2 && cases[i].calls[json_array_size(calls) - 1]);
        json_decref(all);
    }
}

/* ------------------------------------------------------------------ what is shown while it streams */

struct trace {
    struct buf b;
};

static void record(void *arg, const struct chat_event *e)
{
    struct trace *t = arg;
    static const char *const kind[] = {"C", "R", "B", "A", "E", "X"};
    buf_addf(&t->b, "%s<%.*s>", kind[e->type], (int)e->len, e->text);
}

static void check_trace(enum chat_format f, const char *const *pieces, const char *want)
{
    struct trace t = {0};
    struct chat_parse_options opt = {
        .tools = true, .reasoning = true, .event = record, .arg = &t, .schema = the_schema()};
    struct chat_parser *p = chat_parser_new(f, &opt);
    for (; *pieces; pieces++) {
        chat_parser_push(p, *pieces, strlen(*pieces));
        buf_addc(&t.b, '/');
    }
    chat_parser_finish(p);
    chat_parser_free(p);
    assert_string_equal(t.b.p, want);
    buf_clear(&t.b);
}

static void test_streaming(void **state)
{
    (void)state;
    check_trace(CHAT_HERMES,
                (const char *const[]){"Hi <", "b> <tool", "_call>{\"name\":\"f\",\"argu",
                                      "ments\":{\"a\"", ":1}", "}</tool_call>", NULL},
                "C<Hi>/C< <b>>//B<f>A<{\"a\">/A<:1}>/E<>/");
    check_trace(CHAT_DEEPSEEK_R1,
                (const char *const[]){"<th", "ink>a ", "b\n</", "think>", "c", NULL},
                "/R<a>/R< b>//C<c>/");
    check_trace(CHAT_QWEN_XML,
                (const char *const[]){"<tool_call><function=f>", "<parameter=text>\nab", "c\n",
                                      "d\n<", "/parameter></function>", NULL},
                "B<f>/A<{\"text\": \"ab>/A<c>/A<\\nd>/A<\"}>E<>/");
    check_trace(CHAT_MISTRAL,
                (const char *const[]){"x[TOOL_", "CALLS]f[A", "RGS]{\"a\":", "1}", NULL},
                "C<x>//B<f>A<{\"a\":>/A<1}>E<>/");
    /* What was begun is taken back, and comes as text. */
    check_trace(
        CHAT_HERMES,
        (const char *const[]){"Hi <tool_call>{\"name\":\"f\",\"arguments\":{\"a\"", ":1", NULL},
        "C<Hi>B<f>A<{\"a\">/A<:1>/X<>C< <tool_call>{\"name\":\"f\",\"arguments\":{\"a\":1>");
    check_trace(CHAT_HERMES,
                (const char *const[]){"<tool_call>{\"name\":\"f\",\"arguments\":{}", ",x",
                                      "}</tool_call>", NULL},
                "B<f>A<{}>/X<>C<<tool_call>{\"name\":\"f\",\"arguments\":{},x>/C<}</tool_call>>/");
}

static void test_detect(void **state)
{
    (void)state;
    static const struct {
        const char *file;
        enum chat_format want;
    } cases[] = {{"Qwen-Qwen3-0.6B", CHAT_HERMES},
                 {"Qwen-Qwen2.5-7B-Instruct", CHAT_HERMES},
                 {"Qwen3-Coder", CHAT_QWEN_XML},
                 {"NousResearch-Hermes-3-Llama-3.1-8B-tool_use", CHAT_HERMES},
                 {"meta-llama-Llama-3.3-70B-Instruct", CHAT_LLAMA_JSON},
                 {"meta-llama-Llama-3.2-3B-Instruct", CHAT_LLAMA_JSON},
                 {"mistralai-Mistral-Nemo-Instruct-2407", CHAT_MISTRAL},
                 {"unsloth-mistral-Devstral-Small-2507", CHAT_MISTRAL},
                 {"deepseek-ai-DeepSeek-R1-Distill-Llama-8B", CHAT_DEEPSEEK_R1},
                 {"deepseek-ai-DeepSeek-V3.2", CHAT_DEEPSEEK_V32},
                 {"deepseek-ai-DeepSeek-V4-Flash-0731", CHAT_DEEPSEEK_V4},
                 {"GLM-4.7-Flash", CHAT_GLM},
                 {"MiniMax-M2", CHAT_MINIMAX},
                 {"Cohere2MoE", CHAT_COHERE},
                 {"CohereForAI-c4ai-command-r7b-12-2024-tool_use", CHAT_COHERE},
                 {"Apertus-8B-Instruct", CHAT_APERTUS},
                 {"tencent-Hy3", CHAT_HUNYUAN},
                 {"muse-glimmer", CHAT_MUSE},
                 {"MiniMax-M3", CHAT_MINIMAX_M3},
                 {"NVIDIA-Nemotron-Nano-v2", CHAT_NEMOTRON},
                 {"ibm-granite-granite-3.3-2B-Instruct", CHAT_GRANITE},
                 {"ibm-granite-granite-4.0", CHAT_HERMES},
                 {"unsloth-Apriel-1.5", CHAT_TOOL_CALLS},
                 {"LFM2.5-8B-A1B", CHAT_LFM2},
                 {"Kimi-K2-Instruct", CHAT_KIMI},
                 {"google-gemma-4-31B-it-interleaved", CHAT_GEMMA},
                 {"Qwen3.5-4B", CHAT_QWEN_XML},
                 {"google-gemma-2-2b-it", CHAT_PLAIN}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char path[256], text[65536];
        snprintf(path, sizeof path, "../shared/golden/templates/%s.jinja", cases[i].file);
        FILE *f = fopen(path, "r");
        if (!f) {
            printf("skipped: %s is not here\n", path);
            skip();
        }
        size_t n = fread(text, 1, sizeof text, f);
        fclose(f);
        enum chat_format got = chat_format_detect(text, n), again;
        if (got != cases[i].want)
            fail_msg("%s: %s", path, chat_format_name(got));
        assert_true(chat_format_from_name(chat_format_name(got), &again));
        assert_int_equal(again, got);
    }
    /* gpt-oss and the pythonic form, as whole templates: test_chat.c. Llama 4's tag tells as well. */
    const char *py = "{{ '<|python_start|>' }}";
    assert_int_equal(chat_format_detect(py, strlen(py)), CHAT_PYTHONIC);
    const char *seed_oss = "{%- set begin = '<seed:tool_call>' %}<function=f><parameter=p>";
    assert_int_equal(chat_format_detect(seed_oss, strlen(seed_oss)), CHAT_SEED);
    const char *solar = "<|tool_calls|><|tool_call:begin|>id<|tool_call:name|>f<|tool_call:args|>";
    assert_int_equal(chat_format_detect(solar, strlen(solar)), CHAT_SOLAR);
    const char *inkling = "'<|message_model|>' ~ c.name ~ '<|content_invoke_tool_json|>'";
    assert_int_equal(chat_format_detect(inkling, strlen(inkling)), CHAT_INKLING);
}

/* ------------------------------------------------------------------ the invariant */

/* An output of each format. */
static const char *const valid[CHAT_N_FORMATS] = {
    "Just an answer.\n",
    "<think>\nwhy\n</think>\n\nOk\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": "
    "\"\\\"}\"}}\n"
    "</tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>",
    "<tool_call>\n<function=f>\n<parameter=text>\nx < y\n</parameter>\n<parameter=n>\n7\n"
    "</parameter>\n</function>\n</tool_call>",
    "{\"name\": \"f\", \"parameters\": {\"a\": {\"b\": [1]}}}; {\"name\": \"g\", "
    "\"parameters\": {}}",
    "[f(a='x', b=[1, {'k': None}]), g(), h(z=1.5)]",
    "Hm.[TOOL_CALLS]f[ARGS]{\"a\": 1}[TOOL_CALLS][{\"name\": \"g\", \"arguments\": {\"q\": "
    "\"]\"}}]",
    "<think>\nlong\n\nthoughts\n</"
    "think>\n\nOk.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
    "<｜tool▁sep｜>f\n```json\n{\"a\": \"}\"}\n```<｜tool▁call▁end｜><｜tool▁call▁begin｜>g"
    "<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "<|channel|>analysis<|message|>A <b> c<|end|><|start|>assistant<|channel|>commentary "
    "to=functions.f <|constrain|>json<|message|>{\"a\": 1}<|call|>",
    "<think>t</think><tool_call>f<arg_key>text</arg_key><arg_value>x</arg_value>"
    "<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>",
    "<minimax:tool_call><invoke name=\"f\"><parameter name=\"text\">x</parameter></invoke>"
    "<invoke name=\"g\"></invoke></minimax:tool_call>",
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    "{\"a\": 1}<|tool_call_end|><|tool_calls_section_end|>",
    "<|channel>thought\nt<channel|><|tool_call>call:f{n:1,text:<|\"|>x<|\"|>}<tool_call|>",
    "<think>t</think>Ok.<seed:tool_call>\n<function=f>\n<parameter=text>x</parameter>\n</"
    "function>\n"
    "</seed:tool_call>",
    "<|START_ACTION|>[{\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": {\"a\": 1}}, "
    "{\"tool_name\": \"g\", \"parameters\": {}}]<|END_ACTION|>",
    "<think>t</think><|tools_prefix|>[{\"f\": {\"a\": [1]}}, {\"g\": {}}]<|tools_suffix|>",
    "<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>\n<arg_key:opensource>n"
    "</arg_key:opensource>\n<arg_value:opensource>1</arg_value:opensource>\n"
    "</tool_call:opensource>\n</tool_calls:opensource>",
    "<|begin|>assistant<|tool_calls|><|tool_call:begin|>a<|tool_call:name|>f<|tool_call:args|>"
    "{\"a\": 1}<|tool_call:end|><|calls|>",
    "<|content_thinking|>why<|end_message|><|message_model|><|content_text|>Ok<|end_message|>"
    "<|message_model|>f<|content_invoke_tool_json|>{\"name\": \"f\", \"args\": {\"a\": \"\\\"}\"}}"
    "<|end_message|><|message_model|>g<|content_invoke_tool_json|>{\"name\": \"g\", \"args\": "
    "{}}<|end_message|>",
    "to=f<|message|><atem:function_calls>\n<atem:invoke name=\"f\">\n<atem:parameter name=\"n\">1"
    "</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|>",
    NS "<tool_call>\n" NS "<invoke name=\"f\">" NS "<n>1" NS "</n>" NS "<o>" NS "<item>x" NS
       "</item>" NS "<item>" NS "<k>true" NS "</k>" NS "</item>" NS "</o>" NS "</invoke>\n" NS
       "</tool_call>",
    "<TOOLCALL>[{\"name\": \"f\", \"arguments\": {\"a\": 1}}, {\"name\": \"g\", \"arguments\": "
    "{}}]</TOOLCALL>",
    "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"a\": 1}}]",
    "<tool_calls>[{\"name\": \"f\", \"arguments\": {\"a\": 1}, \"id\": \"x\"}]</tool_calls>",
    "<|tool_call_start|>[f(a=1, b='x'), g()]<|tool_call_end|>",
    "<" DSML "function_calls>\n<" DSML
    "invoke name=\"f\">\n" PARAMETER("n", "false", "1") "</" DSML "invoke>\n<" DSML
                                                        "invoke name=\"g\">\n</" DSML
                                                        "invoke>\n</" DSML "function_calls>",
    "<think>t</think><" DSML "tool_calls>\n<" DSML
    "invoke name=\"f\">\n" PARAMETER("text", "true", "x") "</" DSML "invoke>\n</" DSML
                                                          "tool_calls>",
};

static void random_text(enum chat_format f, struct buf *b)
{
    static const char *const pieces[] = {
        "Hello",
        " ",
        "\n",
        "\n\n",
        "world ",
        "<",
        ">",
        "{",
        "}",
        "[",
        "]",
        "\"",
        "\\",
        ",",
        ":",
        "=",
        "(",
        ")",
        "'",
        "a",
        "name",
        "1",
        "-2.5",
        "true",
        "None",
        "\xc3\xa9",
        "\xf0\x9f\x98\x80",
        "\xff",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "</function>",
        "<parameter=text>",
        "<parameter=n>",
        "</parameter>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        "<invoke name=\"f\">",
        "</invoke>",
        "<parameter name=\"text\">",
        "<seed:tool_call>",
        "</seed:tool_call>",
        "<|START_ACTION|>[",
        "]<|END_ACTION|>",
        "{\"tool_name\": \"f\", \"parameters\": {}}",
        "<|tools_prefix|>[",
        "]<|tools_suffix|>",
        "{\"f\": {}}",
        "<tool_calls:opensource>",
        "<tool_call:opensource>f<tool_sep:opensource>",
        "<arg_key:opensource>n</arg_key:opensource>",
        "<arg_value:opensource>",
        "</arg_value:opensource>",
        "</tool_call:opensource>",
        "<|tool_calls|>",
        "<|begin|>assistant",
        "<|tool_call:begin|>a",
        "<|tool_call:name|>f",
        "<|tool_call:args|>{}",
        "<|tool_call:end|>",
        "to=f<|message|>",
        "<|start|>assistant ",
        "<TOOLCALL>[",
        "]</TOOLCALL>",
        "<|tool_call|>[",
        "<tool_calls>[",
        "<|tool_call_start|>[",
        "f(a=1)]<|tool_call_end|>",
        NS,
        NS "<tool_call>",
        NS "<item>",
        NS "<k>",
        NS "</k>",
        NS "</invoke>",
        NS "<invoke name=\"f\">",
        "<|content_invoke_tool_json|>",
        "<|message_model|>",
        "<|end_message|>",
        "<|content_thinking|>",
        "<|content_text|>",
        "<atem:function_calls>",
        "<atem:invoke name=\"f\">",
        "<atem:parameter name=\"n\">",
        "</atem:parameter>",
        "</atem:invoke>",
        "</atem:function_calls>",
        "<|eom|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "functions.f:0",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_call>",
        "call:f{",
        "<|\"|>",
        "<tool_call|>",
        "<|channel>thought",
        "<channel|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "[THINK]",
        "[/THINK]",
        "<|python_tag|>",
        "<|python_start|>",
        "<|channel|>",
        "<|message|>",
        "<|start|>assistant",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "analysis",
        "final",
        "commentary to=functions.f",
        "{\"name\": \"f\", \"arguments\": {\"a\": [1, {\"b\": \"}\"}]}}",
        "{\"name\": \"f\", \"parameters\": {}}",
        "{\"arguments\": {\"x\": 1}, \"name\": \"g\"}",
        "[f(a=1, b='x'), g()]",
        "f(a=1)",
        "\"name\": ",
        "\"arguments\": ",
        "\\u00e9",
        "\\\"",
        "<tool",
        "_call>",
        "<|chan",
        "nel|>",
        "[TOOL",
        "_CALLS]",
        "</thi",
        "nk>",
        ";",
        "to=",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "```json\n",
        "```"};
    uint32_t kind = rnd(10);
    if (kind < 4) { /* valid, perhaps damaged */
        buf_adds(b, valid[f]);
        for (uint32_t n = kind == 0 ? 0 : rnd(4); n && b->len; n--) {
            size_t at = rnd((uint32_t)b->len);
            switch (rnd(4)) {
            case 0:
                b->p[at] = "<>{}[]\"\\,:=( \n"[rnd(14)];
                break;
            case 1:
                b->len = at;
                break;
            case 2:
                memmove(b->p + at, b->p + at + 1, b->len - at - 1);
                b->len--;
                break;
            default:
                buf_adds(b, pieces[rnd(sizeof pieces / sizeof *pieces)]);
            }
        }
    } else if (kind < 9) {
        for (uint32_t n = rnd(30); n; n--)
            buf_adds(b, pieces[rnd(sizeof pieces / sizeof *pieces)]);
    } else {
        for (uint32_t n = rnd(60); n; n--)
            buf_addc(b, rnd(2) ? (char)rnd(256) : "<>{}[]|\"tool_calhnk/"[rnd(20)]);
    }
}

static void test_splits(void **state)
{
    (void)state;
    for (int f = 0; f < CHAT_N_FORMATS; f++)
        check_cuts((enum chat_format)f, false, valid[f]);
    int n_calls = 0, n_reasoning = 0;
    seed = 20260726;
    for (int i = 0; i < 100000; i++) {
        enum chat_format f = (enum chat_format)(i % CHAT_N_FORMATS);
        struct buf b = {0};
        buf_adds(&b, "");
        random_text(f, &b);
        bool in_think = rnd(8) == 0, tools = rnd(8) != 0;
        json_t *whole = parse(f, b.p, b.len, WHOLE, in_think, tools);
        json_t *split = parse(f, b.p, b.len, i % 4 ? RANDOM : BYTES, in_think, tools);
        if (!json_equal(whole, split)) {
            printf("case %d, %s: <%.*s>\n", i, chat_format_name(f), (int)b.len, b.p);
            json_dumpf(whole, stdout, JSON_INDENT(1));
            json_dumpf(split, stdout, JSON_INDENT(1));
            fail();
        }
        n_calls += (int)json_array_size(json_object_get(whole, "tool_calls"));
        n_reasoning += json_object_get(whole, "reasoning_content") != NULL;
        json_decref(whole);
        json_decref(split);
        buf_clear(&b);
    }
    printf("100,000 texts: %d calls, %d with reasoning, no difference\n", n_calls, n_reasoning);
    assert_true(n_calls > 10000 && n_reasoning > 1000);
}

/* The prompt has the beginning of the text: white space is kept, and no thinking begins in the text. */
static void test_continued(void **state)
{
    (void)state;
    static const struct {
        enum chat_format format;
        bool thinks;
        const char *text, *content, *reasoning;
    } cases[] = {
        {CHAT_HERMES, false, " world", " world", NULL},
        {CHAT_HERMES, false, "<think> is a tag", "<think> is a tag", NULL},
        {CHAT_HERMES, true, " so.</think>\n\nYes", "Yes", " so."},
        {CHAT_GPT_OSS, false, " world", " world", NULL},
        {CHAT_GPT_OSS, true, " so.<|end|><|start|>assistant<|channel|>final<|message|>Yes", "Yes",
         " so."},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct chat_message m = {0};
        struct chat_parse_options opt = {.tools = true,
                                         .reasoning = cases[i].thinks,
                                         .in_reasoning = cases[i].thinks,
                                         .continues = true,
                                         .event = chat_message_event,
                                         .arg = &m};
        struct chat_parser *p = chat_parser_new(cases[i].format, &opt);
        for (const char *c = cases[i].text; *c; c++)
            chat_parser_push(p, c, 1);
        chat_parser_finish(p);
        chat_parser_free(p);
        json_t *j = chat_message_json(&m);
        const char *thought = json_string_value(json_object_get(j, "reasoning_content"));
        assert_string_equal(json_string_value(json_object_get(j, "content")), cases[i].content);
        assert_string_equal(thought ? thought : "", cases[i].reasoning ? cases[i].reasoning : "");
        json_decref(j);
        chat_message_clear(&m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain),     cmocka_unit_test(test_hermes),
        cmocka_unit_test(test_xml),       cmocka_unit_test(test_llama),
        cmocka_unit_test(test_mistral),   cmocka_unit_test(test_gpt_oss),
        cmocka_unit_test(test_deepseek),  cmocka_unit_test(test_tags),
        cmocka_unit_test(test_streaming), cmocka_unit_test(test_detect),
        cmocka_unit_test(test_splits),    cmocka_unit_test(test_broken),
        cmocka_unit_test(test_cut_short), cmocka_unit_test(test_continued),
    };
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    json_decref(schema);
    return rc;
}
