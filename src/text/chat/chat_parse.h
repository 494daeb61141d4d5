/*
 * The model's text back to a message: content, reasoning and tool calls, while streaming. One
 * parser handles all formats. Text that may still become part of a tag is held back. Arguments of a
 * call stream as soon as its name is known. A call that breaks off, or whose arguments are not
 * JSON, is retracted with CHAT_TOOL_BROKEN, and its text follows as content. A client that has
 * already forwarded the call's start cannot undo that, but no text is lost.
 *
 * Invariant: the concatenated events depend only on the whole text, not on how it was split.
 *
 * The text must contain the format's special tokens ([TOOL_CALLS], <|channel|>...) in text form,
 * without the token that ended the generation. Knows nothing of tokens, templates or HTTP.
 */
#ifndef STEEL_TEXT_CHAT_PARSE_H
#define STEEL_TEXT_CHAT_PARSE_H

#include "base/buf.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum chat_format {
    CHAT_PLAIN,      /* content and reasoning */
    CHAT_HERMES,     /* <tool_call>{"name", "arguments"}</tool_call>: Hermes, Qwen2.5, Qwen3 */
    CHAT_QWEN_XML,   /* <tool_call><function=F><parameter=P>...: Qwen3-Coder, Qwen3.5 */
    CHAT_LLAMA_JSON, /* the reply is {"name", "parameters"}: Llama 3.x */
    CHAT_PYTHONIC,   /* the reply is [f(a=1), g()]: Llama 3.2, Llama 4 */
    CHAT_MISTRAL,    /* [TOOL_CALLS][{...}] and [TOOL_CALLS]name[ARGS]{...} */
    CHAT_DEEPSEEK_R1, /* <think> reasoning, often opened by the prompt; <｜tool▁calls▁begin｜>... */
    CHAT_GPT_OSS, /* <|channel|>analysis|commentary|final */
    CHAT_GLM,     /* <tool_call>F<arg_key>K</arg_key><arg_value>V</arg_value></tool_call> */
    CHAT_MINIMAX, /* <minimax:tool_call><invoke name="F"><parameter name="P">V</parameter>... */
    CHAT_KIMI,    /* <|tool_call_begin|>functions.F:0<|tool_call_argument_begin|>{...} */
    CHAT_GEMMA,   /* <|tool_call>call:F{k:<|"|>v<|"|>}<tool_call|>, <|channel>thought */
    CHAT_SEED,    /* <seed:tool_call> around Qwen's XML */
    CHAT_COHERE,  /* <|START_ACTION|>[{"tool_call_id", "tool_name", "parameters"}]<|END_ACTION|> */
    CHAT_APERTUS, /* <|tools_prefix|>[{F: {...}}]<|tools_suffix|>, also inside thinking */
    CHAT_HUNYUAN, /* GLM's tags with ":opensource", all calls in one frame: Hunyuan 3 */
    CHAT_SOLAR,   /* <|tool_call:begin|>ID<|tool_call:name|>F<|tool_call:args|>{...} */
    CHAT_INKLING, /* F<|content_invoke_tool_json|>{"name", "args"}<|end_message|> */
    CHAT_MUSE,    /* to=F<|message|><atem:function_calls><atem:invoke name="F">... */
    CHAT_MINIMAX_M3, /* NS<invoke name="F">NS<P>V, or elements NS</P>NS</invoke>; NS: ]<]minimax[>[ */
    CHAT_NEMOTRON,   /* <TOOLCALL>[{"name", "arguments"}]</TOOLCALL>: Nemotron Nano 2 */
    CHAT_GRANITE,    /* <|tool_call|>[{"name", "arguments"}]: Granite 3 */
    CHAT_TOOL_CALLS,   /* <tool_calls>[{"name", "arguments"}]</tool_calls>: Apriel */
    CHAT_LFM2,         /* <|tool_call_start|>[f(a=1), g()]<|tool_call_end|> */
    CHAT_DEEPSEEK_V32, /* <｜DSML｜function_calls><｜DSML｜invoke name="F"><｜DSML｜parameter name="P" string="true">V... */
    CHAT_DEEPSEEK_V4,  /* the same in <｜DSML｜tool_calls> */
    CHAT_N_FORMATS
};

/* The marks of thinking that a template mentions (chat_marks.h). */
enum chat_thoughts {
    CHAT_THOUGHTS_TAGS,     /* <think> */
    CHAT_THOUGHTS_ANSWER,   /* <think>, then <response> (Granite 3) or <answer> (Hunyuan) */
    CHAT_THOUGHTS_THINKING, /* <thinking> */
    CHAT_THOUGHTS_SEED,     /* <seed:think> */
    CHAT_THOUGHTS_MINIMAX,  /* <mm:think>: MiniMax-M3 */
    CHAT_THOUGHTS_HUNYUAN,  /* <think:opensource>: Hunyuan 3 */
    CHAT_THOUGHTS_COHERE,   /* <|START_THINKING|> */
    CHAT_THOUGHTS_APERTUS,  /* <|inner_prefix|> */
    CHAT_THOUGHTS_SOLAR,    /* <|think|> */
    CHAT_THOUGHTS_MUSE,     /* to=self<|message|> */
    CHAT_THOUGHTS_INKLING,  /* <|content_thinking|> */
    CHAT_N_THOUGHTS
};

const char *chat_format_name(enum chat_format f);
bool chat_format_from_name(const char *name, enum chat_format *out); /* "hermes", "mistral"... */
/* Detects the model's reply format from its template. */
enum chat_format chat_format_detect(const char *template, size_t len);

enum chat_event_type {
    CHAT_CONTENT,    /* text */
    CHAT_REASONING,  /* text */
    CHAT_TOOL_BEGIN, /* text is the function's name, id the call's id */
    CHAT_TOOL_ARGS,  /* text is the next part of the arguments' JSON */
    CHAT_TOOL_END,
    CHAT_TOOL_BROKEN, /* not a valid call; its whole text follows as content */
};

struct chat_event {
    enum chat_event_type type;
    int index;        /* of the tool call, from 0 */
    const char *text; /* (len) valid during the callback */
    size_t len;
    const char *id;
};

struct chat_parse_options {
    enum chat_thoughts thoughts; /* the marks of reasoning; some formats have their own */
    bool tools;                  /* recognise tool calls, else their text is content */
    bool reasoning;              /* recognise reasoning, else its text is content */
    bool in_reasoning;           /* the prompt opened the reasoning (it ends in <think>) */
    bool continues;       /* the prompt has the beginning of this text: its white space counts */
    uint64_t id_seed;     /* seed of the call ids */
    const json_t *schema; /* the request's tools, for the types of XML parameters; or NULL */
    void (*event)(void *arg, const struct chat_event *e);
    void *arg;
};

struct chat_parser;
struct chat_parser *chat_parser_new(enum chat_format f, const struct chat_parse_options *opt);
void chat_parser_push(struct chat_parser *p, const char *text, size_t len);
void chat_parser_finish(struct chat_parser *p);     /* resolves held-back text; call once */
int chat_parser_calls(const struct chat_parser *p); /* tool calls begun and not broken */
void chat_parser_free(struct chat_parser *p);

/* Collects events into a message. */
struct chat_call {
    char *id, *name;
    struct buf arguments;
};
struct chat_message {
    struct buf content, reasoning;
    struct chat_call *calls; /* (n_calls) */
    int n_calls, cap_calls;
};
void chat_message_event(void *message, const struct chat_event *e); /* fits options.event */
void chat_message_clear(struct chat_message *m);
/* {"role", "content", "reasoning_content"?, "tool_calls"?}. Invalid UTF-8 becomes U+FFFD. */
json_t *chat_message_json(const struct chat_message *m);

#endif
