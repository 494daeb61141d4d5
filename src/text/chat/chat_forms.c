/*
 * The frames of tool calls as graphs: tags, names, and where the arguments are. One function and one row per
 * format; chat_grammar.c puts them into replies.
 */
#include "text/chat/chat_grammar_int.h"

#define WS    "[ \\t]?(\\r?\\n[ \\t]{0,24})?"
#define COLON WS ":" WS
#define COMMA WS "," WS
/* DeepSeek's tags. */
#define D_CALLS_BEGIN "<｜tool▁calls▁begin｜>"
#define D_CALLS_END   "<｜tool▁calls▁end｜>"
#define D_CALL_BEGIN  "<｜tool▁call▁begin｜>"
#define D_CALL_END    "<｜tool▁call▁end｜>"
#define D_SEP         "<｜tool▁sep｜>"

/* From state `from`: a tool's name between two expressions, then its arguments. Ends in state
 * `to`. */
static void add_calls(struct reply_builder *a, struct call_graph *gr, uint32_t from,
                      const char *before, const char *after, uint32_t to)
{
    for (uint32_t i = 0; i < a->n_tools; i++) {
        uint32_t args = graph_add_state(gr);
        graph_add_name(a, gr, from, before, &a->tools[i], after, args);
        graph_add_edge(gr, args, true, a->tools[i].args, to);
    }
}

/* <tool_call>{"name": ..., "arguments": {...}}</tool_call> */
static void form_hermes(struct reply_builder *a, struct call_graph *gr)
{
    uint32_t begin = graph_add_state(gr), open = graph_add_state(gr), name = graph_add_state(gr),
             close;
    graph_add_tag(a, gr, begin, "<tool_call>", false, open);
    graph_add_pattern(a, gr, open, WS "\\{" WS "\"name\"" COLON, name);
    add_calls(a, gr, name, "\"", "\"" COMMA "\"arguments\"" WS ":", close = graph_add_state(gr));
    uint32_t end = graph_add_state(gr);
    graph_add_pattern(a, gr, close, WS "\\}" WS, end);
    graph_add_tag(a, gr, end, "</tool_call>", false, gr->final = graph_add_state(gr));
}

/* <tool_call><function=NAME><parameter=...>...</function></tool_call> */
static void form_xml(struct reply_builder *a, struct call_graph *gr)
{
    bool seed = a->format == CHAT_SEED;
    const char *shut = seed ? "</seed:tool_call>" : "</tool_call>";
    uint32_t begin = graph_add_state(gr), open = graph_add_state(gr), name = graph_add_state(gr);
    uint32_t close = graph_add_state(gr), end = graph_add_state(gr);
    graph_add_tag(a, gr, begin, seed ? "<seed:tool_call>" : "<tool_call>", false, open);
    graph_add_pattern(a, gr, open, "\\n?<function=", name);
    for (uint32_t i = 0; i < a->n_tools; i++) {
        uint32_t args = graph_add_state(gr);
        graph_add_name(a, gr, name, "", &a->tools[i], "", args);
        graph_add_edge(gr, args, true, a->tools[i].args, close);
    }
    graph_add_pattern(a, gr, close, "\\n", end);
    gr->final = graph_add_state(gr);
    graph_add_tag(a, gr, end, shut, false, gr->final);
    graph_add_tag(a, gr, close, shut, false, gr->final);
}

/* {"name": ..., "parameters": {...}}; several calls are separated by semicolons. */
#define LLAMA_OPEN "\\{" WS "(\"type\"" COLON "\"function\"" COMMA ")?\"name\"" COLON
static void form_llama(struct reply_builder *a, struct call_graph *gr)
{
    uint32_t begin = graph_add_state(gr), open = graph_add_state(gr), name = graph_add_state(gr),
             close;
    graph_add_tag(a, gr, begin, "<|python_tag|>", false, open);
    graph_add_pattern(a, gr, begin, LLAMA_OPEN, name);
    graph_add_pattern(a, gr, open, LLAMA_OPEN, name);
    add_calls(a, gr, name, "\"", "\"" COMMA "\"parameters\"" WS ":", close = graph_add_state(gr));
    graph_add_pattern(a, gr, close, WS "\\}", gr->final = graph_add_state(gr));
    if (!a->one)
        graph_add_pattern(a, gr, gr->final, "; ?", open);
}

/* [f(a=1), g()], in LFM2's frame or alone */
static void form_python(struct reply_builder *a, struct call_graph *gr)
{
    bool framed = a->format == CHAT_LFM2;
    uint32_t begin = graph_add_state(gr), open = graph_add_state(gr), name = graph_add_state(gr);
    uint32_t close = graph_add_state(gr), end = graph_add_state(gr);
    graph_add_tag(a, gr, begin, framed ? "<|tool_call_start|>" : "<|python_start|>", false, open);
    if (!framed)
        graph_add_pattern(a, gr, begin, "\\[", name);
    graph_add_pattern(a, gr, open, "\\[", name);
    for (uint32_t i = 0; i < a->n_tools; i++) {
        uint32_t args = graph_add_state(gr);
        graph_add_name(a, gr, name, "", &a->tools[i], "", args);
        graph_add_edge(gr, args, true, a->tools[i].args, close);
    }
    if (!a->one)
        graph_add_pattern(a, gr, close, ",[ \\n]?", name);
    graph_add_pattern(a, gr, close, "\\]", gr->final = end);
    if (framed)
        graph_add_tag(a, gr, end, "<|tool_call_end|>", false, gr->final = graph_add_state(gr));
}

/* [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]NAME[ARGS]{...} */
static void form_mistral(struct reply_builder *a, struct call_graph *gr)
{
    uint32_t begin = graph_add_state(gr), open = graph_add_state(gr), name = graph_add_state(gr),
             close;
    uint32_t with_id = graph_add_state(gr), next = graph_add_state(gr);
    gr->final = graph_add_state(gr);
    graph_add_tag(a, gr, begin, "[TOOL_CALLS]", false, open);
    graph_add_pattern(a, gr, open, " ?\\[" WS "\\{" WS "\"name\"" COLON, name);
    add_calls(a, gr, name, "\"", "\"" COMMA "\"arguments\"" WS ":", close = graph_add_state(gr));
    graph_add_pattern(a, gr, close, COMMA "\"id\"" COLON "\"[A-Za-z0-9]{9}\"", with_id);
    graph_add_pattern(a, gr, close, WS "\\}", next);
    graph_add_pattern(a, gr, with_id, WS "\\}", next);
    if (!a->one)
        graph_add_pattern(a, gr, next, COMMA "\\{" WS "\"name\"" COLON, name);
    graph_add_pattern(a, gr, next, WS "\\]", gr->final);
    for (uint32_t i = 0; i < a->n_tools; i++) {
        uint32_t after = graph_add_state(gr), id = graph_add_state(gr), mark = graph_add_state(gr);
        uint32_t args = graph_add_state(gr);
        graph_add_name(a, gr, open, "", &a->tools[i], "", after);
        graph_add_tag(a, gr, after, "[CALL_ID]", true, id);
        graph_add_pattern(a, gr, id, "[A-Za-z0-9]{9}", mark);
        graph_add_tag(a, gr, mark, "[ARGS]", false, args);
        graph_add_tag(a, gr, after, "[ARGS]", false, args);
        graph_add_edge(gr, args, true, a->tools[i].args, gr->final);
    }
}

/* `function SEP NAME` with the arguments in a fenced block (R1 and its distillations), or `NAME SEP
 * arguments`. */
static void form_deepseek(struct reply_builder *a, struct call_graph *gr)
{
    uint32_t begin = graph_add_state(gr), first = graph_add_state(gr), open = graph_add_state(gr);
    uint32_t word = graph_add_state(gr), name = graph_add_state(gr), close = graph_add_state(gr);
    uint32_t end = graph_add_state(gr), next = graph_add_state(gr), line = graph_add_state(gr);
    gr->final = graph_add_state(gr);
    graph_add_tag(a, gr, begin, D_CALLS_BEGIN, false, first);
    graph_add_tag(a, gr, first, D_CALL_BEGIN, false, open);
    graph_add_pattern(a, gr, open, "function", word);
    graph_add_tag(a, gr, word, D_SEP, false, name);
    add_calls(a, gr, name, "", "\\n```json\\n", close);
    graph_add_pattern(a, gr, close, "\\n```", end);
    for (uint32_t i = 0; i < a->n_tools; i++) {
        uint32_t sep = graph_add_state(gr), args = graph_add_state(gr);
        graph_add_name(a, gr, open, "", &a->tools[i], "", sep);
        graph_add_tag(a, gr, sep, D_SEP, false, args);
        graph_add_edge(gr, args, true, a->tools[i].args, end);
    }
    graph_add_tag(a, gr, end, D_CALL_END, false, next);
    if (!a->one) {
        graph_add_pattern(a, gr, next, "\\n", line);
        graph_add_tag(a, gr, next, D_CALL_BEGIN, false, open);
        graph_add_tag(a, gr, line, D_CALL_BEGIN, false, open);
    }
    graph_add_tag(a, gr, next, D_CALLS_END, false, gr->final);
}

/* <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>, all calls
 * in one section. */
static void form_kimi(struct reply_builder *a, struct call_graph *gr)
{
    uint32_t begin = graph_add_state(gr), first = graph_add_state(gr), name = graph_add_state(gr);
    uint32_t end = graph_add_state(gr), next = graph_add_state(gr);
    gr->final = graph_add_state(gr);
    graph_add_tag(a, gr, begin, "<|tool_calls_section_begin|>", false, first);
    graph_add_tag(a, gr, first, "<|tool_call_begin|>", false, name);
    for (uint32_t i = 0; i < a->n_tools; i++) {
        uint32_t mark = graph_add_state(gr), args = graph_add_state(gr);
        graph_add_name(a, gr, name, "functions\\.", &a->tools[i], ":[0-9]{1,3}", mark);
        graph_add_tag(a, gr, mark, "<|tool_call_argument_begin|>", false, args);
        graph_add_edge(gr, args, true, a->tools[i].args, end);
    }
    graph_add_tag(a, gr, end, "<|tool_call_end|>", false, next);
    if (!a->one)
        graph_add_tag(a, gr, next, "<|tool_call_begin|>", false, name);
    graph_add_tag(a, gr, next, "<|tool_calls_section_end|>", false, gr->final);
}

/* From the channel to the end:
 * <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}
 * or <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{...} */
static void form_gpt_oss(struct reply_builder *a, struct call_graph *gr)
{
    uint32_t begin = graph_add_state(gr), channel = graph_add_state(gr), name = graph_add_state(gr);
    uint32_t start = graph_add_state(gr), early = graph_add_state(gr);
    gr->final = graph_add_state(gr);
    graph_add_tag(a, gr, begin, "<|channel|>", false, channel);
    graph_add_pattern(a, gr, channel, "(commentary|analysis) to=functions\\.", name);
    graph_add_tag(a, gr, begin, "<|start|>", false, start);
    graph_add_pattern(a, gr, start, "assistant to=functions\\.", early);
    for (uint32_t i = 0; i < a->n_tools; i++) {
        uint32_t to = graph_add_state(gr), late = graph_add_state(gr), word = graph_add_state(gr);
        uint32_t mark = graph_add_state(gr), json = graph_add_state(gr), args = graph_add_state(gr);
        graph_add_name(a, gr, early, "", &a->tools[i], "", late);
        graph_add_tag(a, gr, late, "<|channel|>", false, word);
        graph_add_pattern(a, gr, word, "commentary", to);
        graph_add_name(a, gr, name, "", &a->tools[i], "", to);
        graph_add_pattern(a, gr, to, " ", mark);
        graph_add_tag(a, gr, to, "<|constrain|>", false, json);
        graph_add_tag(a, gr, mark, "<|constrain|>", false, json);
        uint32_t head = graph_add_state(gr);
        graph_add_pattern(a, gr, json, "json", head);
        graph_add_pattern(a, gr, mark, "json", head);
        graph_add_tag(a, gr, to, "<|message|>", false, args);
        graph_add_tag(a, gr, head, "<|message|>", false, args);
        graph_add_edge(gr, args, true, a->tools[i].args, gr->final);
    }
}

/* <tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value></tool_call>, with optional
 * newlines. */
static void form_glm(struct reply_builder *a, struct call_graph *gr)
{
    uint32_t begin = graph_add_state(gr), open = graph_add_state(gr);
    gr->final = graph_add_state(gr);
    graph_add_tag(a, gr, begin, "<tool_call>", false, open);
    for (uint32_t i = 0; i < a->n_tools; i++) {
        uint32_t named = graph_add_state(gr), line = graph_add_state(gr);
        graph_add_name(a, gr, open, "", &a->tools[i], "", named);
        graph_add_pattern(a, gr, named, "\\n", line);
        graph_add_edge(gr, named, true, a->tools[i].args, gr->final);
        graph_add_edge(gr, line, true, a->tools[i].args, gr->final);
    }
}

/* <invoke name="NAME"><parameter name="K">V</parameter></invoke>, all calls in one frame. */
static void form_minimax(struct reply_builder *a, struct call_graph *gr)
{
    uint32_t begin = graph_add_state(gr), first = graph_add_state(gr), name = graph_add_state(gr);
    uint32_t next = graph_add_state(gr), line = graph_add_state(gr);
    gr->final = graph_add_state(gr);
    graph_add_tag(a, gr, begin, "<minimax:tool_call>", false, first);
    graph_add_pattern(a, gr, first, "\\n?<invoke name=\"", name);
    for (uint32_t i = 0; i < a->n_tools; i++) {
        uint32_t args = graph_add_state(gr);
        graph_add_name(a, gr, name, "", &a->tools[i], "", args);
        graph_add_edge(gr, args, true, a->tools[i].args, next);
    }
    if (!a->one)
        graph_add_pattern(a, gr, next, "\\n?<invoke name=\"", name);
    graph_add_pattern(a, gr, next, "\\n", line);
    graph_add_tag(a, gr, next, "</minimax:tool_call>", false, gr->final);
    graph_add_tag(a, gr, line, "</minimax:tool_call>", false, gr->final);
}

/* <|tool_call>call:NAME{k:<|"|>v<|"|>,n:3}<tool_call|> */
static void form_gemma(struct reply_builder *a, struct call_graph *gr)
{
    uint32_t begin = graph_add_state(gr), open = graph_add_state(gr), name = graph_add_state(gr);
    uint32_t end = graph_add_state(gr);
    gr->final = graph_add_state(gr);
    graph_add_tag(a, gr, begin, "<|tool_call>", false, open);
    graph_add_pattern(a, gr, open, "call:", name);
    for (uint32_t i = 0; i < a->n_tools; i++) {
        uint32_t args = graph_add_state(gr);
        graph_add_name(a, gr, name, "", &a->tools[i], "", args);
        graph_add_edge(gr, args, true, a->tools[i].args, end);
    }
    graph_add_tag(a, gr, end, "<tool_call|>", false, gr->final);
}

/* A list of calls in a frame: [{"name": ..., "arguments": {...}}, ...]; Command A has its own names for these. */
static void form_list(struct reply_builder *a, struct call_graph *gr)
{
    static const struct {
        enum chat_format format;
        const char *open, *close; /* close: NULL = none */
    } tags[] = {{CHAT_COHERE, "<|START_ACTION|>", "<|END_ACTION|>"},
                {CHAT_NEMOTRON, "<TOOLCALL>", "</TOOLCALL>"},
                {CHAT_GRANITE, "<|tool_call|>", NULL},
                {CHAT_TOOL_CALLS, "<tool_calls>", "</tool_calls>"}};
    size_t i = 0;
    while (tags[i].format != a->format)
        i++;
    bool cohere = !i;
    uint32_t begin = graph_add_state(gr), open = graph_add_state(gr), first = graph_add_state(gr);
    uint32_t name = graph_add_state(gr), close = graph_add_state(gr), next = graph_add_state(gr);
    uint32_t end = graph_add_state(gr);
    graph_add_tag(a, gr, begin, tags[i].open, false, open);
    graph_add_pattern(a, gr, open, WS "\\[" WS, first);
    graph_add_pattern(a, gr, first,
                      cohere ? "\\{" WS "(\"tool_call_id\"" COLON "\"[0-9]{1,4}\"" COMMA
                               ")?\"tool_name\"" COLON
                             : "\\{" WS "\"name\"" COLON,
                      name);
    add_calls(a, gr, name, "\"",
              cohere ? "\"" COMMA "\"parameters\"" WS ":" : "\"" COMMA "\"arguments\"" WS ":",
              close);
    graph_add_pattern(a, gr, close, WS "\\}", next);
    if (!a->one)
        graph_add_pattern(a, gr, next, COMMA, first);
    graph_add_pattern(a, gr, next, WS "\\]", end);
    gr->final = end;
    if (tags[i].close)
        graph_add_tag(a, gr, end, tags[i].close, false, gr->final = graph_add_state(gr));
}

/* <|tools_prefix|>[{"NAME": {...}}, ...]<|tools_suffix|>; the last tag may be the token that ends a reply. */
static void form_apertus(struct reply_builder *a, struct call_graph *gr)
{
    uint32_t begin = graph_add_state(gr), open = graph_add_state(gr), name = graph_add_state(gr);
    uint32_t close = graph_add_state(gr), next = graph_add_state(gr);
    gr->final = graph_add_state(gr);
    gr->also = graph_add_state(gr);
    graph_add_tag(a, gr, begin, "<|tools_prefix|>", false, open);
    graph_add_pattern(a, gr, open, WS "\\[" WS "\\{" WS, name);
    add_calls(a, gr, name, "\"", "\"" WS ":", close);
    graph_add_pattern(a, gr, close, WS "\\}", next);
    if (!a->one)
        graph_add_pattern(a, gr, next, COMMA "\\{" WS, name);
    graph_add_pattern(a, gr, next, WS "\\]", gr->final);
    graph_add_tag(a, gr, gr->final, "<|tools_suffix|>", false, gr->also);
}

/* <tool_call:opensource>NAME<tool_sep:opensource>, GLM's parameters, </tool_call:opensource>; all calls in one frame. */
static void form_hunyuan(struct reply_builder *a, struct call_graph *gr)
{
    uint32_t begin = graph_add_state(gr), first = graph_add_state(gr), line = graph_add_state(gr);
    uint32_t name = graph_add_state(gr), next = graph_add_state(gr), after = graph_add_state(gr);
    gr->final = graph_add_state(gr);
    graph_add_tag(a, gr, begin, "<tool_calls:opensource>", false, first);
    graph_add_pattern(a, gr, first, "\\n", line);
    graph_add_tag(a, gr, first, "<tool_call:opensource>", false, name);
    graph_add_tag(a, gr, line, "<tool_call:opensource>", false, name);
    for (uint32_t i = 0; i < a->n_tools; i++) {
        uint32_t sep = graph_add_state(gr), args = graph_add_state(gr);
        graph_add_name(a, gr, name, "", &a->tools[i], "", sep);
        graph_add_tag(a, gr, sep, "<tool_sep:opensource>", false, args);
        graph_add_edge(gr, args, true, a->tools[i].args, next);
    }
    graph_add_pattern(a, gr, next, "\\n", after);
    for (int i = 0; i < 2; i++) {
        uint32_t from = i ? after : next;
        if (!a->one)
            graph_add_tag(a, gr, from, "<tool_call:opensource>", false, name);
        graph_add_tag(a, gr, from, "</tool_calls:opensource>", false, gr->final);
    }
}

/* <|tool_calls|><|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{...}<|tool_call:end|>, as a message of
 * its own after thinking. <|calls|> may be the token that ends a reply. */
static void form_solar(struct reply_builder *a, struct call_graph *gr)
{
    uint32_t begin = graph_add_state(gr), role = graph_add_state(gr), word = graph_add_state(gr);
    uint32_t open = graph_add_state(gr), id = graph_add_state(gr), mark = graph_add_state(gr);
    uint32_t name = graph_add_state(gr), end = graph_add_state(gr);
    gr->final = graph_add_state(gr);
    gr->also = graph_add_state(gr);
    graph_add_tag(a, gr, begin, "<|begin|>", false, role);
    graph_add_pattern(a, gr, role, "assistant", word);
    graph_add_tag(a, gr, word, "<|tool_calls|>", false, open);
    graph_add_tag(a, gr, begin, "<|tool_calls|>", false, open);
    graph_add_tag(a, gr, open, "<|tool_call:begin|>", false, id);
    graph_add_pattern(a, gr, id, "[a-z0-9]{1,10}", mark);
    graph_add_tag(a, gr, mark, "<|tool_call:name|>", false, name);
    for (uint32_t i = 0; i < a->n_tools; i++) {
        uint32_t named = graph_add_state(gr), args = graph_add_state(gr);
        graph_add_name(a, gr, name, "", &a->tools[i], "", named);
        graph_add_tag(a, gr, named, "<|tool_call:args|>", false, args);
        graph_add_edge(gr, args, true, a->tools[i].args, end);
    }
    graph_add_tag(a, gr, end, "<|tool_call:end|>", false, gr->final);
    if (!a->one)
        graph_add_tag(a, gr, gr->final, "<|tool_call:begin|>", false, id);
    graph_add_tag(a, gr, gr->final, "<|calls|>", false, gr->also);
}

/* to=NAME<|message|><atem:function_calls><atem:invoke name="NAME">..., each call a message. Free text may have had the
 * recipient already. */
static void form_muse(struct reply_builder *a, struct call_graph *gr)
{
    uint32_t begin = graph_add_state(gr), start = graph_add_state(gr), to = graph_add_state(gr);
    uint32_t open = graph_add_state(gr), any = graph_add_state(gr), next = graph_add_state(gr);
    uint32_t line = graph_add_state(gr), more = graph_add_state(gr);
    static const char frame[] = "<atem:function_calls>", invoke[] = "\\n?<atem:invoke name=\"";
    gr->final = graph_add_state(gr);
    graph_add_pattern(a, gr, begin, " ?to=", to);
    graph_add_tag(a, gr, begin, "<|start|>", false, start);
    graph_add_pattern(a, gr, start, "assistant to=", to);
    graph_add_tag(a, gr, begin, frame, false, open);
    graph_add_pattern(a, gr, open, invoke, any);
    for (uint32_t i = 0; i < a->n_tools; i++) {
        uint32_t head = graph_add_state(gr), body = graph_add_state(gr), own = graph_add_state(gr);
        uint32_t name = graph_add_state(gr), args = graph_add_state(gr);
        graph_add_name(a, gr, to, "", &a->tools[i], "", head);
        graph_add_tag(a, gr, head, "<|message|>", false, body);
        graph_add_tag(a, gr, body, frame, false, own);
        graph_add_pattern(a, gr, own, invoke, name);
        graph_add_name(a, gr, name, "", &a->tools[i], "", args);
        graph_add_name(a, gr, any, "", &a->tools[i], "", args);
        graph_add_edge(gr, args, true, a->tools[i].args, next);
    }
    graph_add_pattern(a, gr, next, "\\n", line);
    graph_add_tag(a, gr, next, "</atem:function_calls>", false, gr->final);
    graph_add_tag(a, gr, line, "</atem:function_calls>", false, gr->final);
    if (a->one)
        return;
    graph_add_tag(a, gr, gr->final, "<|eom|>", false, more);
    graph_add_tag(a, gr, more, "<|start|>", false, start);
}

/* NAME<|content_invoke_tool_json|>{"name": "NAME", "args": {...}}<|end_message|>, each call a message. The prompt has begun
 * the first one; free text may have had its name already. */
static void form_inkling(struct reply_builder *a, struct call_graph *gr)
{
    static const char frame[] = "<|content_invoke_tool_json|>",
                      open[] = WS "\\{" WS "\"name\"" COLON "\"";
    uint32_t begin = graph_add_state(gr), name = graph_add_state(gr), body = graph_add_state(gr);
    uint32_t any = graph_add_state(gr), close = graph_add_state(gr), end = graph_add_state(gr);
    gr->final = graph_add_state(gr);
    graph_add_tag(a, gr, begin, "<|message_model|>", false, name);
    graph_add_tag(a, gr, begin, frame, false, body);
    graph_add_pattern(a, gr, body, open, any);
    for (uint32_t i = 0; i < a->n_tools; i++) {
        uint32_t head = graph_add_state(gr), own = graph_add_state(gr), again = graph_add_state(gr);
        uint32_t args = graph_add_state(gr);
        graph_add_name(a, gr, begin, "", &a->tools[i], "", head);
        graph_add_name(a, gr, name, "", &a->tools[i], "", head);
        graph_add_tag(a, gr, head, frame, false, own);
        graph_add_pattern(a, gr, own, open, again);
        graph_add_name(a, gr, again, "", &a->tools[i], "", args);
        graph_add_name(a, gr, any, "", &a->tools[i], "", args);
        uint32_t value = graph_add_state(gr);
        graph_add_pattern(a, gr, args, "\"" COMMA "\"args\"" WS ":" WS, value);
        graph_add_edge(gr, value, true, a->tools[i].args, close);
    }
    graph_add_pattern(a, gr, close, WS "\\}" WS, end);
    graph_add_tag(a, gr, end, "<|end_message|>", false, gr->final);
    if (!a->one)
        graph_add_tag(a, gr, gr->final, "<|message_model|>", false, name);
}

/* NS<invoke name="NAME"> with elements, NS</invoke>; all calls in NS<tool_call>, NS</tool_call>. */
static void form_minimax_m3(struct reply_builder *a, struct call_graph *gr)
{
    static const char ns[] = "]<]minimax[>[";
    uint32_t begin = graph_add_state(gr), tag = graph_add_state(gr), open = graph_add_state(gr);
    uint32_t line = graph_add_state(gr), first = graph_add_state(gr), name = graph_add_state(gr);
    uint32_t next = graph_add_state(gr), after = graph_add_state(gr), end = graph_add_state(gr);
    gr->final = graph_add_state(gr);
    graph_add_tag(a, gr, begin, ns, false, tag);
    graph_add_tag(a, gr, tag, "<tool_call>", false, open);
    graph_add_pattern(a, gr, open, "\\n", line);
    graph_add_tag(a, gr, open, ns, false, first);
    graph_add_tag(a, gr, line, ns, false, first);
    graph_add_pattern(a, gr, first, "<invoke name=\"", name);
    for (uint32_t i = 0; i < a->n_tools; i++) {
        uint32_t args = graph_add_state(gr);
        graph_add_name(a, gr, name, "", &a->tools[i], "\">", args);
        graph_add_edge(gr, args, true, a->tools[i].args, next);
    }
    graph_add_pattern(a, gr, next, "\\n", after);
    graph_add_tag(a, gr, next, ns, false, end);
    graph_add_tag(a, gr, after, ns, false, end);
    if (!a->one)
        graph_add_pattern(a, gr, end, "<invoke name=\"", name);
    graph_add_tag(a, gr, end, "</tool_call>", false, gr->final);
}

/* <｜DSML｜invoke name="NAME"> with parameters; all calls in one frame. */
static void form_dsml(struct reply_builder *a, struct call_graph *gr, const char *frame)
{
    static const char mark[] = "｜DSML｜", invoke[] = "invoke name=\"";
    uint32_t begin = graph_add_state(gr), open = graph_add_state(gr), named = graph_add_state(gr);
    uint32_t first = graph_add_state(gr), tag = graph_add_state(gr), call = graph_add_state(gr);
    uint32_t name = graph_add_state(gr), next = graph_add_state(gr), last = graph_add_state(gr);
    uint32_t close = graph_add_state(gr);
    gr->final = graph_add_state(gr);
    graph_add_pattern(a, gr, begin, "<", open);
    graph_add_tag(a, gr, open, mark, false, named);
    graph_add_pattern(a, gr, named, frame, first);
    graph_add_pattern(a, gr, first, "\\n?<", tag);
    graph_add_tag(a, gr, tag, mark, false, call);
    graph_add_pattern(a, gr, call, invoke, name);
    for (uint32_t i = 0; i < a->n_tools; i++) {
        uint32_t args = graph_add_state(gr);
        graph_add_name(a, gr, name, "", &a->tools[i], "", args);
        graph_add_edge(gr, args, true, a->tools[i].args, next);
    }
    if (!a->one)
        graph_add_pattern(a, gr, next, "\\n?<", tag);
    graph_add_pattern(a, gr, next, "\\n?</", last);
    graph_add_tag(a, gr, last, mark, false, close);
    graph_add_pattern(a, gr, close, frame, gr->final);
}

static void form_deepseek_v32(struct reply_builder *a, struct call_graph *gr)
{
    form_dsml(a, gr, "function_calls>");
}

static void form_deepseek_v4(struct reply_builder *a, struct call_graph *gr)
{
    form_dsml(a, gr, "tool_calls>");
}

static const struct call_form forms[] = {
    {CHAT_DEEPSEEK_V32,
     SCHEMA_DSML,
     form_deepseek_v32,
     {{.text = "<｜DSML｜function_calls>"}},
     .repeats = false},
    {CHAT_DEEPSEEK_V4,
     SCHEMA_DSML,
     form_deepseek_v4,
     {{.text = "<｜DSML｜tool_calls>"}},
     .repeats = false},
    {CHAT_HERMES, 0, form_hermes, {{.text = "<tool_call>"}}, .repeats = true},
    {CHAT_QWEN_XML, SCHEMA_XML, form_xml, {{.text = "<tool_call>"}}, .repeats = true},
    {CHAT_LLAMA_JSON,
     0,
     form_llama,
     {{.text = "<|python_tag|>"},
      {.at_start = CALL_LEAD LLAMA_OPEN "\"", .again = "{\"name\": \""}},
     .last = true},
    {CHAT_PYTHONIC, SCHEMA_PYTHON, form_python, {{.text = "<|python_start|>"}}, .last = true},
    {CHAT_MISTRAL, 0, form_mistral, {{.text = "[TOOL_CALLS]"}}, .repeats = true},
    {CHAT_DEEPSEEK_R1, 0, form_deepseek, {{.text = D_CALLS_BEGIN}}, .repeats = false},
    {CHAT_KIMI, 0, form_kimi, {{.text = "<|tool_calls_section_begin|>"}}, .repeats = false},
    {CHAT_GLM, SCHEMA_GLM, form_glm, {{.text = "<tool_call>"}}, .repeats = true},
    {CHAT_MINIMAX,
     SCHEMA_MINIMAX,
     form_minimax,
     {{.text = "<minimax:tool_call>"}},
     .repeats = false},
    {CHAT_GEMMA, SCHEMA_GEMMA, form_gemma, {{.text = "<|tool_call>"}}, .repeats = true},
    {CHAT_GPT_OSS,
     0,
     form_gpt_oss,
     {{.text = "<|channel|>commentary to="},
      {.text = "<|channel|>analysis to="},
      {.text = "<|start|>assistant to="}},
     .last = true},
    {CHAT_SEED, SCHEMA_SEED, form_xml, {{.text = "<seed:tool_call>"}}, .repeats = true},
    {CHAT_COHERE, 0, form_list, {{.text = "<|START_ACTION|>"}}, .last = true},
    {CHAT_NEMOTRON, 0, form_list, {{.text = "<TOOLCALL>"}}, .last = true},
    {CHAT_GRANITE, 0, form_list, {{.text = "<|tool_call|>"}}, .last = true},
    {CHAT_TOOL_CALLS, 0, form_list, {{.text = "<tool_calls>"}}, .last = true},
    {CHAT_LFM2, SCHEMA_PYTHON, form_python, {{.text = "<|tool_call_start|>"}}, .last = true},
    {CHAT_APERTUS, 0, form_apertus, {{.text = "<|tools_prefix|>"}}, .last = true},
    {CHAT_HUNYUAN,
     SCHEMA_HUNYUAN,
     form_hunyuan,
     {{.text = "<tool_calls:opensource>"}},
     .last = true},
    {CHAT_SOLAR, 0, form_solar, {{.text = "<|tool_calls|>"}}, .last = true},
    {CHAT_MINIMAX_M3,
     SCHEMA_M3,
     form_minimax_m3,
     {{.text = "]<]minimax[>[<tool_call>"}},
     .last = true},
    {CHAT_INKLING, 0, form_inkling, {{.text = "<|content_invoke_tool_json|>"}}, .last = true},
    {CHAT_MUSE, SCHEMA_MUSE, form_muse, {{.text = "<atem:function_calls>"}}, .last = true},
};

const struct call_form *chat_form_of(enum chat_format f)
{
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
        if (forms[i].format == f)
            return &forms[i];
    return NULL;
}

bool chat_format_calls(enum chat_format f)
{
    return chat_form_of(f) != NULL;
}
