/*
 * Every form of calls: as its family writes them, and what its grammar must refuse.
 */
#ifndef STEEL_TESTS_REPLY_FORMS_H
#define STEEL_TESTS_REPLY_FORMS_H

#include "text/chat/chat_parse.h"

#define K_FRAME(calls) "<|tool_calls_section_begin|>" calls "<|tool_calls_section_end|>"
#define K_CALL(name, args)                                                                         \
    "<|tool_call_begin|>" name "<|tool_call_argument_begin|>" args "<|tool_call_end|>"
#define D_FRAME(inner)     "<｜tool▁calls▁begin｜>" inner "<｜tool▁calls▁end｜>"
#define D_CALL(inner)      "<｜tool▁call▁begin｜>" inner "<｜tool▁call▁end｜>"
#define D_SEP              "<｜tool▁sep｜>"
#define G_CALL(name, args) "<tool_call>" name args "</tool_call>"
#define G_ARG(k, v)        "<arg_key>" k "</arg_key><arg_value>" v "</arg_value>"
#define G_LINES(k, v)      "<arg_key>" k "</arg_key>\n<arg_value>" v "</arg_value>\n"
#define V                  "｜DSML｜"
#define V_FRAME(c)         "<" V "tool_calls>\n" c "</" V "tool_calls>"
#define V_CALL(f, a)       "<" V "invoke name=\"" f "\">\n" a "</" V "invoke>\n"
#define V_ARG(k, s, v)     "<" V "parameter name=\"" k "\" string=\"" s "\">" v "</" V "parameter>\n"
#define M_FRAME(calls)     "<minimax:tool_call>\n" calls "</minimax:tool_call>"
#define M_CALL(name, args) "<invoke name=\"" name "\">\n" args "</invoke>\n"
#define M_ARG(k, v)        "<parameter name=\"" k "\">" v "</parameter>\n"
#define E_CALL(name, args) "<|tool_call>call:" name "{" args "}<tool_call|>"
#define E_TEXT(t)          "<|\"|>" t "<|\"|>"
#define S_CALL(name, args)                                                                         \
    "<seed:tool_call>\n<function=" name ">\n" args "</function>\n</seed:tool_call>"
#define S_ARG(k, v)    "<parameter=" k ">" v "</parameter>\n"
#define C_FRAME(calls) "<|START_ACTION|>[\n    " calls "\n]<|END_ACTION|>"
#define C_CALL(n, f, a)                                                                            \
    "{\"tool_call_id\": \"" n "\", \"tool_name\": \"" f "\", \"parameters\": " a "}"
#define L_CALL(f, a)    "{\"name\": \"" f "\", \"arguments\": " a "}"
#define A_FRAME(calls)  "<|tools_prefix|>[" calls "]<|tools_suffix|>"
#define A_CALL(f, args) "{\"" f "\": " args "}"
#define H_FRAME(calls)  "<tool_calls:opensource>\n" calls "</tool_calls:opensource>"
#define H_CALL(f, args)                                                                            \
    "<tool_call:opensource>" f "<tool_sep:opensource>\n" args "</tool_call:opensource>\n"
#define H_ARG(k, v)                                                                                \
    "<arg_key:opensource>" k "</arg_key:opensource>\n<arg_value:opensource>" v                     \
    "</arg_value:opensource>\n"
#define O_FRAME(calls) "<|tool_calls|>" calls "<|calls|>"
#define O_CALL(id, f, args)                                                                        \
    "<|tool_call:begin|>" id "<|tool_call:name|>" f "<|tool_call:args|>" args "<|tool_call:end|>"
#define U_CALL(f, args)                                                                            \
    "to=" f "<|message|><atem:function_calls>\n<atem:invoke name=\"" f "\">\n" args                \
    "</atem:invoke>\n</atem:function_calls>"
#define I_NEXT "<|message_model|>"
#define I_CALL(f, args)                                                                            \
    f "<|content_invoke_tool_json|>{\"name\":\"" f "\",\"args\":" args "}<|end_message|>"
#define U_ARG(k, v)     "<atem:parameter name=\"" k "\">" v "</atem:parameter>\n"
#define N               "]<]minimax[>["
#define N_FRAME(calls)  N "<tool_call>\n" calls N "</tool_call>"
#define N_CALL(f, args) N "<invoke name=\"" f "\">" args N "</invoke>\n"
#define N_ARG(k, v)     N "<" k ">" v N "</" k ">"
#define U_NEXT          "<|eom|><|start|>assistant "
#define WEATHER         "{\"town\": \"Prague\", \"days\": 3}"
#define SEND            "{\"to\": [\"a\"], \"loud\": true}"
#define PING            "ping{}"
#define PRAGUE          "get_weather{\"town\":\"Prague\",\"days\":3}"

/* Every form: calls as the family writes them, and what must not come through. */
static const struct form_case {
    enum chat_format format;
    const char *one, *calls; /* one call of get_weather, as the parser reads it */
    const char *two, *both;  /* two calls; NULL = the form has one only */
    const char *wrong[8];    /* not names, not arguments */
    const char *text[4];     /* free text that is no call */
} cases[] = {
    {CHAT_HERMES,
     "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"town\": \"Prague\", \"days\": "
     "3}}\n"
     "</tool_call>",
     PRAGUE,
     "<tool_call>\n{\"name\": \"ping\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"name\": "
     "\"send\", \"arguments\": {\"to\": [\"a\"], \"loud\": true}}\n</tool_call>",
     PING " send{\"to\":[\"a\"],\"loud\":true}",
     {"<tool_call>\n{\"name\": \"weather\", \"arguments\": {}}\n</tool_call>",
      "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"town\": "
      "\"Prague\"}}\n</tool_call>",
      "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"town\": 5, \"days\": 3}}\n"
      "</tool_call>",
      "<tool_call>\n{\"name\": \"ping\", \"arguments\": []}\n</tool_call>",
      "<tool_call>\n{\"name\": \"ping\"}\n</tool_call>", "<tool_call>Hello</tool_call>",
      "<tool_call>\n{\"name\": \"ping\", \"arguments\": {}}\n"},
     {"Hello <tool> {\"name\": \"x\"} </tool_call", "<", "a < b <tool_cal"}},
    {CHAT_QWEN_XML,
     "<tool_call>\n<function=get_weather>\n<parameter=town>\nPrague\n</parameter>\n<parameter=days>"
     "\n3\n</parameter>\n</function>\n</tool_call>",
     PRAGUE,
     "<tool_call>\n<function=ping>\n</function>\n</tool_call>\n<tool_call>\n<function=send>\n"
     "<parameter=to>\n[\"a\"]\n</parameter>\n<parameter=loud>\ntrue\n</parameter>\n</function>\n"
     "</tool_call>",
     PING " send{\"to\":[\"a\"],\"loud\":true}",
     {"<tool_call>\n<function=weather>\n</function>\n</tool_call>",
      "<tool_call>\n<function=get_weather>\n</function>\n</tool_call>",
      "<tool_call>\n<function=get_weather>\n<parameter=town>\nPrague\n</parameter>\n</function>\n"
      "</tool_call>",
      "<tool_call>\n<function=get_weather>\n<parameter=town>\nPrague\n</"
      "parameter>\n<parameter=days>"
      "\n12\n</parameter>\n</function>\n</tool_call>",
      "<tool_call>\n<function=get_weather>\n<parameter=town>\nPrague Prague Prague\n</parameter>\n"
      "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
      "<tool_call>\n<function=send>\n<parameter=what>\n3\n</parameter>\n</function>\n</tool_call>",
      "<tool_call>\n<function=ping>\n</function>"},
     {"Hello <function", "if (a<b)"}},
    {CHAT_LLAMA_JSON,
     "{\"name\": \"get_weather\", \"parameters\": {\"town\": \"Prague\", \"days\": 3}}",
     PRAGUE,
     "{\"name\": \"ping\", \"parameters\": {}}; {\"name\": \"send\", \"parameters\": {\"to\": "
     "[\"a\"], \"loud\": true}}",
     PING " send{\"to\":[\"a\"],\"loud\":true}",
     {"{\"name\": \"weather\", \"parameters\": {}}",
      "{\"name\": \"get_weather\", \"parameters\": {\"town\": \"Prague\"}}",
      "\n{\"type\": \"function\", \"name\": \"get_weather\", \"parameters\": {}}",
      "{\"name\": \"ping\", \"parameters\": \"\"}",
      "<|python_tag|>{\"name\": \"pong\", \"parameters\": {}}", "<|python_tag|>print(5)",
      "{\"name\": \"ping\", \"parameters\": {}"},
     {"{\"answer\": 5}", "{\"name\": 5}", "Hello {\"name\": \"x\"}"}},
    {CHAT_PYTHONIC,
     "[get_weather(town=\"Prague\", days=3)]",
     PRAGUE,
     "[ping(), send(to=[\"a\"], loud=True)]",
     PING " send{\"to\":[\"a\"],\"loud\":true}",
     {"[get_weather(town=\"Prague\")]", "[get_weather(town=Prague, days=3)]",
      "[get_weather(days=\"3\")]", "[send(to=[\"a\"], loud=true)]", "[send(to=[\"a\"], other=1)]",
      "[ping(), pong()]", "[ping()"},
     {"[1, 2]", "[not a call]", "see [ping()]", "[pong()]"}},
    {CHAT_MISTRAL,
     "[TOOL_CALLS][{\"name\": \"get_weather\", \"arguments\": {\"town\": \"Prague\", \"days\": "
     "3}}]",
     PRAGUE,
     "[TOOL_CALLS] [{\"name\": \"ping\", \"arguments\": {}, \"id\": \"abcDEF123\"}, {\"name\": "
     "\"send\", \"arguments\": {\"to\": [\"a\"], \"loud\": true}}]",
     PING " send{\"to\":[\"a\"],\"loud\":true}",
     {"[TOOL_CALLS][{\"name\": \"weather\", \"arguments\": {}}]",
      "[TOOL_CALLS][{\"name\": \"get_weather\", \"arguments\": {\"days\": 3}}]",
      "[TOOL_CALLS]weather[ARGS]{}", "[TOOL_CALLS]get_weather[ARGS]{}", "[TOOL_CALLS]Hello",
      "[TOOL_CALLS][{\"name\": \"ping\", \"arguments\": {}}"},
     {"[TOOL_CAL", "a[0]"}},
    {CHAT_MISTRAL,
     "[TOOL_CALLS]get_weather[ARGS]{\"town\": \"Prague\", \"days\": 3}",
     PRAGUE,
     "[TOOL_CALLS]ping[ARGS]{}[TOOL_CALLS]send[ARGS]{\"to\": [\"a\"], \"loud\": true}",
     PING " send{\"to\":[\"a\"],\"loud\":true}",
     {"[TOOL_CALLS]ping{}"},
     {"Hello"}},
    {CHAT_DEEPSEEK_R1,
     D_FRAME(
         D_CALL("function" D_SEP "get_weather\n```json\n{\"town\": \"Prague\", \"days\": 3}\n```")),
     PRAGUE,
     D_FRAME(D_CALL("function" D_SEP "ping\n```json\n{}\n```") "\n" D_CALL(
         "function" D_SEP "send\n```json\n{\"to\": [\"a\"], \"loud\": true}\n```")),
     PING " send{\"to\":[\"a\"],\"loud\":true}",
     {D_FRAME(D_CALL("function" D_SEP "weather\n```json\n{}\n```")),
      D_FRAME(D_CALL("function" D_SEP "get_weather\n```json\n{}\n```")), D_FRAME(""),
      D_FRAME(D_CALL("code" D_SEP "ping\n```json\n{}\n```"))},
     {"<｜tool", "Hello"}},
    {CHAT_DEEPSEEK_R1,
     D_FRAME(D_CALL("get_weather" D_SEP "{\"town\": \"Prague\", \"days\": 3}")),
     PRAGUE,
     NULL,
     NULL,
     {D_FRAME(D_CALL("get_weather" D_SEP "{}"))},
     {"<｜tool▁calls▁begi"}},
    {CHAT_KIMI,
     K_FRAME(K_CALL("functions.get_weather:0", "{\"town\": \"Prague\", \"days\": 3}")),
     PRAGUE,
     K_FRAME(K_CALL("functions.ping:0", "{}")
                 K_CALL("functions.send:1", "{\"to\": [\"a\"], \"loud\": true}")),
     PING " send{\"to\":[\"a\"],\"loud\":true}",
     {K_FRAME(K_CALL("functions.weather:0", "{}")),
      K_FRAME(K_CALL("functions.get_weather:0", "{}")), K_FRAME(K_CALL("ping", "{}")), K_FRAME("")},
     {"<|tool_calls", "Hello"}},
    {CHAT_GLM,
     G_CALL("get_weather", G_ARG("town", "Prague") G_ARG("days", "3")),
     PRAGUE,
     G_CALL("ping", "") "\n" G_CALL("send", G_ARG("to", "[\"a\"]") G_ARG("loud", "true")),
     PING " send{\"to\":[\"a\"],\"loud\":true}",
     {G_CALL("weather", ""), G_CALL("get_weather", ""),
      G_CALL("get_weather", G_ARG("town", "Prague") G_ARG("days", "12")),
      G_CALL("get_weather", G_ARG("town", "Prague Prague Prague") G_ARG("days", "3")),
      G_CALL("send", G_ARG("to", "a")), G_CALL("send", G_ARG("to", "[\"a\"]") G_ARG("other", "1")),
      "<tool_call>ping", "<tool_call>Hello"},
     {"Hello <arg_key", "if (a<b)"}},
    {CHAT_GLM,
     G_CALL("get_weather\n", G_LINES("town", "Prague") G_LINES("days", "3")),
     PRAGUE,
     G_CALL("ping\n", "") G_CALL("send\n", G_LINES("to", "[\"a\"]") G_LINES("loud", "true")),
     PING " send{\"to\":[\"a\"],\"loud\":true}",
     {G_CALL("get_weather", G_LINES("days", "3")),
      G_CALL("get_weather", G_ARG("town", "Pra<arg_key>") G_ARG("days", "3"))},
     {"<tool_cal"}},
    {CHAT_MINIMAX,
     M_FRAME(M_CALL("get_weather", M_ARG("town", "Prague") M_ARG("days", "3"))),
     PRAGUE,
     M_FRAME(M_CALL("ping", "") M_CALL("send", M_ARG("to", "[\"a\"]") M_ARG("loud", "true"))),
     PING " send{\"to\":[\"a\"],\"loud\":true}",
     {M_FRAME(M_CALL("weather", "")), M_FRAME(M_CALL("get_weather", "")),
      M_FRAME(M_CALL("get_weather", M_ARG("town", "Prague") M_ARG("days", "three"))),
      M_FRAME(M_CALL("get_weather", M_ARG("town", "Prague Prague Prague") M_ARG("days", "3"))),
      M_FRAME(M_CALL("send", M_ARG("to", "[]"))), M_FRAME(""),
      "<minimax:tool_call>\n" M_CALL("ping", ""), "<minimax:tool_call>Hello"},
     {"<minimax:tool", "<invoke name=\"pong\">"}},
    {CHAT_GEMMA,
     E_CALL("get_weather", "town:" E_TEXT("Prague") ",days:3"),
     PRAGUE,
     E_CALL("ping", "") E_CALL("send", "to:[" E_TEXT("a") "],loud:true"),
     PING " send{\"to\":[\"a\"],\"loud\":true}",
     {E_CALL("weather", ""), E_CALL("get_weather", "town:" E_TEXT("Prague")),
      E_CALL("get_weather", "town:Prague,days:3"), E_CALL("get_weather", "town:\"Prague\",days:3"),
      E_CALL("get_weather", "town:" E_TEXT("Prague Prague Prague") ",days:3"),
      E_CALL("send", "to:[]"), E_CALL("send", "to:[" E_TEXT("a") "],other:1"),
      "<|tool_call>call:ping{}"},
     {"<|tool", "call:ping{}"}},
    {CHAT_GPT_OSS,
     "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{\"town\": "
     "\"Prague\", \"days\": 3}",
     PRAGUE,
     NULL,
     NULL,
     {"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{}",
      "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{}",
      "<|channel|>commentary to=browser.search<|message|>{}",
      "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{}"},
     {"<|channel|>final<|message|>Hello", "<|channel|>analysis<|message|>to=functions.x"}},
    {CHAT_SEED,
     S_CALL("get_weather", S_ARG("town", "Prague") S_ARG("days", "3")),
     PRAGUE,
     S_CALL("ping", "") "\n" S_CALL("send", S_ARG("to", "[\"a\"]") S_ARG("loud", "true")),
     PING " send{\"to\":[\"a\"],\"loud\":true}",
     {S_CALL("weather", ""), S_CALL("get_weather", ""),
      S_CALL("get_weather", S_ARG("town", "Prague") S_ARG("days", "12")),
      S_CALL("get_weather", S_ARG("town", "Prague Prague Prague") S_ARG("days", "3")),
      S_CALL("send", S_ARG("what", "3")), "<seed:tool_call>\n<function=ping>\n</function>",
      "<seed:tool_call>Hello"},
     {"Hello <function", "<tool_call>{}</tool_call>", "<seed:tool_cal"}},
    {CHAT_COHERE,
     C_FRAME(C_CALL("0", "get_weather", WEATHER)),
     PRAGUE,
     C_FRAME(C_CALL("0", "ping", "{}") ",\n    " C_CALL("1", "send", SEND)),
     PING " send{\"to\":[\"a\"],\"loud\":true}",
     {C_FRAME(C_CALL("0", "weather", "{}")), C_FRAME(C_CALL("0", "get_weather", "{}")),
      C_FRAME(C_CALL("0", "get_weather", "{\"town\": 5, \"days\": 3}")), C_FRAME(""),
      "<|START_ACTION|>[" C_CALL("0", "ping", "{}") "]", "<|START_ACTION|>Hello",
      C_FRAME("{\"name\": \"ping\", \"parameters\": {}}"), C_FRAME(C_CALL("a", "ping", "{}"))},
     {"<|START_ACT", "[{\"tool_name\": \"x\"}]"}},
    {CHAT_APERTUS,
     A_FRAME(A_CALL("get_weather", WEATHER)),
     PRAGUE,
     A_FRAME(A_CALL("ping", "{}") ", " A_CALL("send", SEND)),
     PING " send{\"to\":[\"a\"],\"loud\":true}",
     {A_FRAME(A_CALL("weather", "{}")), A_FRAME(A_CALL("get_weather", "{}")),
      A_FRAME(A_CALL("get_weather", "{\"town\": 5, \"days\": 3}")), A_FRAME(""),
      "<|tools_prefix|>[" A_CALL("ping", "{}"), "<|tools_prefix|>Hello",
      A_FRAME("{\"name\": \"ping\", \"arguments\": {}}"), A_FRAME(A_CALL("ping", "[]"))},
     {"<|tools_pre", "[{\"ping\": {}}]"}},
    {CHAT_NEMOTRON,
     "<TOOLCALL>[" L_CALL("get_weather", WEATHER) "]</TOOLCALL>",
     PRAGUE,
     "<TOOLCALL>[" L_CALL("ping", "{}") ", " L_CALL("send", SEND) "]</TOOLCALL>",
     PING " send{\"to\":[\"a\"],\"loud\":true}",
     {"<TOOLCALL>[" L_CALL("weather", "{}") "]</TOOLCALL>",
      "<TOOLCALL>[" L_CALL("get_weather", "{}") "]</TOOLCALL>",
      "<TOOLCALL>[" L_CALL("get_weather", "{\"town\": 5, \"days\": 3}") "]</TOOLCALL>",
      "<TOOLCALL>["
      ""
      "]</TOOLCALL>",
      "<TOOLCALL>Hello", "<TOOLCALL>[" L_CALL("ping", "{}")},
     {"<TOOLCAL", "[{\"name\": \"x\"}]"}},
    {CHAT_GRANITE,
     "<|tool_call|>[" L_CALL("get_weather", WEATHER) "]",
     PRAGUE,
     "<|tool_call|>[" L_CALL("ping", "{}") ", " L_CALL("send", SEND) "]",
     PING " send{\"to\":[\"a\"],\"loud\":true}",
     {"<|tool_call|>[" L_CALL("weather", "{}") "]",
      "<|tool_call|>[" L_CALL("get_weather", "{}") "]",
      "<|tool_call|>[" L_CALL("get_weather", "{\"town\": 5, \"days\": 3}") "]",
      "<|tool_call|>["
      ""
      "]",
      "<|tool_call|>Hello", "<|tool_call|>[" L_CALL("ping", "{}")},
     {"<|tool_call", "[{\"name\": \"x\"}]"}},
    {CHAT_TOOL_CALLS,
     "<tool_calls>[" L_CALL("get_weather", WEATHER) "]</tool_calls>",
     PRAGUE,
     "<tool_calls>[" L_CALL("ping", "{}") ", " L_CALL("send", SEND) "]</tool_calls>",
     PING " send{\"to\":[\"a\"],\"loud\":true}",
     {"<tool_calls>[" L_CALL("weather", "{}") "]</tool_calls>",
      "<tool_calls>[" L_CALL("get_weather", "{}") "]</tool_calls>",
      "<tool_calls>[" L_CALL("get_weather", "{\"town\": 5, \"days\": 3}") "]</tool_calls>",
      "<tool_calls>["
      ""
      "]</tool_calls>",
      "<tool_calls>Hello", "<tool_calls>[" L_CALL("ping", "{}")},
     {"<tool_call", "[{\"name\": \"x\"}]"}},
    {CHAT_LFM2,
     "<|tool_call_start|>[get_weather(town=\"Prague\", days=3)]<|tool_call_end|>",
     PRAGUE,
     "<|tool_call_start|>[ping(), send(to=[\"a\"], loud=True)]<|tool_call_end|>",
     PING " send{\"to\":[\"a\"],\"loud\":true}",
     {"<|tool_call_start|>[get_weather(town=\"Prague\")]<|tool_call_end|>",
      "<|tool_call_start|>[get_weather(town=Prague, days=3)]<|tool_call_end|>",
      "<|tool_call_start|>[send(to=[\"a\"], other=1)]<|tool_call_end|>",
      "<|tool_call_start|>[ping(), pong()]<|tool_call_end|>",
      "<|tool_call_start|>[]<|tool_call_end|>", "<|tool_call_start|>[ping()]",
      "<|tool_call_start|>Hello"},
     {"<|tool_call_sta", "[ping()]"}},
    {CHAT_APERTUS, /* the last tag ended the reply */
     "<|tools_prefix|>[" A_CALL("get_weather", WEATHER) "]",
     PRAGUE,
     NULL,
     NULL,
     {"<|tools_prefix|>[]"},
     {"Hello"}},
    {CHAT_HUNYUAN,
     H_FRAME(H_CALL("get_weather", H_ARG("town", "Prague") H_ARG("days", "3"))),
     PRAGUE,
     H_FRAME(H_CALL("ping", "") H_CALL("send", H_ARG("to", "[\"a\"]") H_ARG("loud", "true"))),
     PING " send{\"to\":[\"a\"],\"loud\":true}",
     {H_FRAME(H_CALL("weather", "")), H_FRAME(H_CALL("get_weather", "")),
      H_FRAME(H_CALL("get_weather", H_ARG("town", "Prague") H_ARG("days", "12"))),
      H_FRAME(H_CALL("get_weather", H_ARG("town", "Prague Prague Prague") H_ARG("days", "3"))),
      H_FRAME(H_CALL("send", H_ARG("other", "1"))), H_FRAME(""),
      "<tool_calls:opensource>\n" H_CALL("ping", ""), "<tool_calls:opensource>Hello"},
     {"<tool_calls:open", "<tool_call>{}</tool_call>"}},
    {CHAT_SOLAR,
     O_FRAME(O_CALL("a1b2c3d4e5", "get_weather", WEATHER)),
     PRAGUE,
     "<|begin|>assistant<|tool_calls|>" O_CALL("a1b2c3d4e5", "ping", "{}")
         O_CALL("b1b2c3d4e5", "send", SEND),
     PING " send{\"to\":[\"a\"],\"loud\":true}",
     {O_FRAME(O_CALL("a1", "weather", "{}")), O_FRAME(O_CALL("a1", "get_weather", "{}")),
      O_FRAME(O_CALL("A!", "ping", "{}")), O_FRAME(O_CALL("", "ping", "{}")), O_FRAME(""),
      "<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>ping<|tool_call:args|>{}",
      "<|tool_calls|>Hello"},
     {"<|tool_cal", "<|content|>Hello"}},
    {CHAT_DEEPSEEK_V4,
     V_FRAME(V_CALL("get_weather", V_ARG("town", "true", "Prague") V_ARG("days", "false", "3"))),
     PRAGUE,
     V_FRAME(V_CALL("ping", "")
                 V_CALL("send", V_ARG("to", "false", "[\"a\"]") V_ARG("loud", "false", "true"))),
     PING " send{\"to\":[\"a\"],\"loud\":true}",
     {V_FRAME(V_CALL("weather", "")), V_FRAME(V_CALL("get_weather", "")),
      V_FRAME(V_CALL("get_weather", V_ARG("town", "true", "Prague") V_ARG("days", "false", "12"))),
      V_FRAME(V_CALL("get_weather", V_ARG("town", "maybe", "Prague") V_ARG("days", "false", "3"))),
      V_FRAME("")},
     {"<" V "tool", "<tool_calls>"}},
    {CHAT_MINIMAX_M3,
     N_FRAME(N_CALL("get_weather", N_ARG("town", "Prague") N_ARG("days", "3"))),
     PRAGUE,
     N_FRAME(N_CALL("ping", "")
                 N_CALL("send", N_ARG("to", N_ARG("item", "a")) N_ARG("loud", "true"))),
     PING " send{\"to\":[\"a\"],\"loud\":true}",
     {N_FRAME(N_CALL("weather", "")), N_FRAME(N_CALL("get_weather", "")),
      N_FRAME(N_CALL("get_weather", N_ARG("town", "Prague") N_ARG("days", "12"))),
      N_FRAME(N_CALL("get_weather", N_ARG("town", "Prague Prague Prague") N_ARG("days", "3"))),
      N_FRAME(N_CALL("send", N_ARG("to", ""))), N_FRAME(N_CALL("send", N_ARG("to", "[\"a\"]"))),
      N_FRAME(N_CALL("get_weather", N "<town>Prague" N "</days>" N_ARG("days", "3"))), N_FRAME("")},
     {N "<tool", "<invoke name=\"pong\">"}},
    {CHAT_INKLING,
     I_CALL("get_weather", WEATHER),
     PRAGUE,
     I_NEXT I_CALL("ping", "{}") I_NEXT I_CALL("send", SEND),
     PING " send{\"to\":[\"a\"],\"loud\":true}",
     {I_CALL("weather", "{}"), I_CALL("get_weather", "{}"), I_CALL("send", "{\"other\": 1}"),
      I_CALL("get_weather", "{\"town\": \"Prague\", \"days\": 12}"),
      "ping<|content_invoke_tool_json|>{\"name\":\"send\",\"args\":{}}<|end_message|>",
      "ping<|content_invoke_tool_json|>{\"name\":\"ping\",\"args\":{}}",
      "<|content_invoke_tool_json|>Hello"},
     {"<|content_text|>Hello", "<|content_invoke", "pong"}},
    {CHAT_MUSE,
     " " U_CALL("get_weather", U_ARG("town", "Prague") U_ARG("days", "3")),
     PRAGUE,
     "<|start|>assistant " U_CALL("ping", "")
         U_NEXT U_CALL("send", U_ARG("to", "[\"a\"]") U_ARG("loud", "true")),
     PING " send{\"to\":[\"a\"],\"loud\":true}",
     {U_CALL("weather", ""), U_CALL("get_weather", ""),
      U_CALL("get_weather", U_ARG("town", "Prague") U_ARG("days", "12")),
      U_CALL("get_weather", U_ARG("town", "Prague Prague Prague") U_ARG("days", "3")),
      U_CALL("send", U_ARG("other", "1")),
      "to=ping<|message|><atem:function_calls>\n</atem:function_calls>",
      "<atem:function_calls>\n<atem:invoke name=\"ping\">\n</atem:invoke>\n",
      "<atem:function_calls>Hello"},
     {" to=user<|message|>Hello", "<atem:invoke name=\"pong\">", "to=nobody"}},
};

#endif
