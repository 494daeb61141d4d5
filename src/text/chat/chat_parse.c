/*
 * The streaming chat parser: tags, white space, reasoning, and the frames of calls. The bytes of a
 * call go through the scanners of chat_calls.c. Each step consumes bytes only if its decision holds
 * for every continuation, and waits otherwise. This makes the result independent of how the text is
 * split.
 */
#include "text/chat/chat_parse_int.h"
#include "base/mem.h"

#include <stdlib.h>
#include <string.h>

/* Positions inside S_CALL: C_ a JSON call, X_ Qwen's XML. */
enum { C_JSON = CHAT_MODE_JSON, X_OPEN, X_FUNCTION, X_BODY, X_PARAM, X_FIRST, X_VALUE };

#define MAX_NAME 256 /* longest function or parameter name */

/* ------------------------------------------------------------------ output */

static void flush(struct chat_parser *p)
{
    if (!p->out.len)
        return;
    struct chat_event e = {.type = p->out_kind,
                           .index = p->n_calls ? p->n_calls - 1 : 0,
                           .text = p->out.p,
                           .len = p->out.len};
    p->opt.event(p->opt.arg, &e);
    buf_reset(&p->out);
}

static void put(struct chat_parser *p, enum chat_event_type kind, const char *s, size_t n)
{
    if (!n)
        return;
    if (p->out_kind != kind)
        flush(p);
    p->out_kind = kind;
    buf_add(&p->out, s, n);
    if (kind == CHAT_TOOL_ARGS)
        buf_add(&p->args, s, n);
}

/* Emits text, holding back white space until other text follows. */
static void chat_put(struct chat_parser *p, enum chat_event_type kind, const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (s[i] == ' ' || s[i] == '\n' || s[i] == '\t' || s[i] == '\r') {
            if (!p->trim)
                buf_addc(&p->space, s[i]);
            continue;
        }
        put(p, kind, p->space.p, p->space.len);
        buf_reset(&p->space);
        p->trim = false;
        p->wrote |= kind == CHAT_CONTENT;
        put(p, kind, s + i, 1);
    }
}

/* Drops held white space and all white space up to the next text. */
static void trim(struct chat_parser *p)
{
    buf_reset(&p->space);
    p->trim = true;
}

static void enter_content(struct chat_parser *p)
{
    p->state = S_CONTENT;
}

void chat_call_begin(struct chat_parser *p, const char *name, size_t len)
{
    char id[32] = "call_";
    uint64_t x = p->opt.id_seed + (uint64_t)(p->n_calls + 1) * 0x9e3779b97f4a7c15u;
    for (int i = 0; i < 24; i++) {
        if (i % 8 == 0) {
            x ^= x >> 30;
            x *= 0xbf58476d1ce4e5b9u;
            x ^= x >> 27;
            x *= 0x94d049bb133111ebu;
            x ^= x >> 31;
        }
        id[5 + i] = "0123456789abcdefghijklmnopqrstuv"[x >> (i % 8 * 5) & 31];
    }
    flush(p);
    struct buf space = p->lead;
    p->lead = p->space;
    p->space = space;
    buf_reset(&p->space);
    buf_reset(&p->raw);
    buf_reset(&p->args);
    p->n_calls++;
    p->call_open = true;
    struct chat_event e = {
        .type = CHAT_TOOL_BEGIN, .index = p->n_calls - 1, .text = name, .len = len, .id = id};
    p->opt.event(p->opt.arg, &e);
}

void chat_call_args(struct chat_parser *p, const char *s, size_t n)
{
    put(p, CHAT_TOOL_ARGS, s, n);
}

void chat_value_char(struct chat_parser *p, char c)
{
    if (p->xml_string) {
        struct buf b = {0};
        json_escape(&b, &c, 1);
        chat_call_args(p, b.p, b.len);
        buf_clear(&b);
    } else {
        buf_addc(&p->js.args, c);
    }
}

static void end_call(struct chat_parser *p, enum chat_event_type type)
{
    flush(p);
    p->call_open = false;
    struct chat_event e = {.type = type, .index = p->n_calls - 1, .text = ""};
    p->opt.event(p->opt.arg, &e);
}

/* Whether the arguments are JSON. Raw line breaks in strings and invalid UTF-8 are tolerated, since
 * clients cope with both. */
static bool args_are_json(const struct chat_parser *p)
{
    struct buf text = {0};
    for (size_t i = 0; i < p->args.len; i++) {
        unsigned char c = (unsigned char)p->args.p[i];
        buf_addc(&text, c < 0x20 ? ' ' : c >= 0x80 ? '?' : (char)c);
    }
    json_t *j = json_loadb(text.p ? text.p : "", text.len,
                           JSON_DECODE_ANY | JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL, NULL);
    bool ok = j != NULL;
    json_decref(j);
    buf_clear(&text);
    return ok;
}

bool chat_call_end(struct chat_parser *p)
{
    if (!args_are_json(p)) {
        chat_call_break(p);
        return false;
    }
    end_call(p, CHAT_TOOL_END);
    p->ended = true;
    trim(p);
    return true;
}

void chat_call_break(struct chat_parser *p)
{
    end_call(p, CHAT_TOOL_BROKEN);
    p->n_broken++;
    buf_reset(&p->space); /* white space of the arguments */
    buf_add(&p->whole, p->in.p + p->step_at, p->pos - p->step_at);
    p->step_at = p->pos;
    chat_put(p, CHAT_CONTENT, p->lead.p, p->lead.len);
    chat_put(p, CHAT_CONTENT, p->whole.p, p->whole.len);
    buf_reset(&p->whole);
    enter_content(p);
}

/* ------------------------------------------------------------------ input */

/* The text is not a call after all: emit it as content and continue from here. */
void chat_reject_call(struct chat_parser *p)
{
    chat_put(p, CHAT_CONTENT, p->raw.p, p->raw.len);
    buf_reset(&p->raw);
    enter_content(p);
}

/* Starts the next call, after undecided text (raw) or another call. */
void chat_next_call(struct chat_parser *p, int mode)
{
    p->state = S_CALL;
    p->mode = mode;
    buf_reset(&p->tag);
    json_scan_reset(&p->js);
    py_scan_reset(&p->py);
}

void chat_start_call(struct chat_parser *p, int mode, const char *raw)
{
    buf_reset(&p->raw);
    buf_adds(&p->raw, raw);
    chat_next_call(p, mode);
}

/* ------------------------------------------------------------------ start, content, reasoning */

/* Drops one of these marks if it is here. Returns chat_match()'s result. */
static int accept_any(struct chat_parser *p, const char *const *marks)
{
    int wait = 0;
    for (int i = 0; marks[i]; i++) {
        int m = chat_accept(p, marks[i]);
        if (m > 0)
            return 1;
        wait |= m < 0;
    }
    return wait ? -1 : 0;
}

static void start_json(struct chat_parser *p, const char *raw)
{
    chat_start_call(p, C_JSON, raw);
}

static void start_xml(struct chat_parser *p, const char *raw)
{
    chat_start_call(p, X_OPEN, raw);
}

/* A further prompt: the reply begins again. */
static void start_again(struct chat_parser *p, const char *raw)
{
    (void)raw;
    trim(p);
    p->opt.reasoning = false;
    p->state = S_START;
}

/* What calls begin with, anywhere in the content. `bare`: a call without its frame, which is not consumed. */
static const struct {
    const char *frame[2], *bare;
    void (*start)(struct chat_parser *p, const char *raw);
} frames[CHAT_N_FORMATS] = {
    [CHAT_HERMES] = {{"<tool_call>"}, .start = start_json},
    [CHAT_QWEN_XML] = {{"<tool_call>"}, "<function=", start_xml},
    [CHAT_SEED] = {{"<seed:tool_call>"}, "<function=", start_xml},
    [CHAT_LLAMA_JSON] = {{"<|python_tag|>"}, .start = start_again},
    [CHAT_MISTRAL] = {{"[TOOL_CALLS]"}, .start = chat_frames_start},
    [CHAT_DEEPSEEK_R1] = {{"<｜tool▁calls▁begin｜>"}, "<｜tool▁call▁begin｜>", chat_frames_start},
    [CHAT_COHERE] = {{"<|START_ACTION|>"}, .start = chat_frames_start},
    [CHAT_APERTUS] = {{"<|tools_prefix|>"}, .start = chat_frames_start},
    [CHAT_NEMOTRON] = {{"<TOOLCALL>"}, .start = chat_frames_start},
    [CHAT_GRANITE] = {{"<|tool_call|>"}, .start = chat_frames_start},
    [CHAT_TOOL_CALLS] = {{"<tool_calls>"}, .start = chat_frames_start},
    [CHAT_LFM2] = {{"<|tool_call_start|>"}, .start = chat_frames_start},
    [CHAT_GLM] = {{"<tool_call>"}, .start = chat_tags_start},
    [CHAT_MINIMAX] = {{"<minimax:tool_call>"}, .start = chat_tags_start},
    [CHAT_KIMI] = {{"<|tool_calls_section_begin|>"}, .start = chat_tags_start},
    [CHAT_GEMMA] = {{"<|tool_call>"}, .start = chat_tags_start},
    [CHAT_HUNYUAN] = {{"<tool_calls:opensource>"}, .start = chat_tags_start},
    [CHAT_SOLAR] = {{"<|tool_calls|>", "<|begin|>assistant<|tool_calls|>"},
                    .start = chat_tags_start},
    [CHAT_INKLING] = {{"<|content_invoke_tool_json|>"}, .start = start_json},
    [CHAT_MUSE] = {{"<atem:function_calls>"}, .start = chat_tags_start},
    [CHAT_DEEPSEEK_V32] = {{"<｜DSML｜function_calls>"}, .start = chat_tags_start},
    [CHAT_DEEPSEEK_V4] = {{"<｜DSML｜tool_calls>"}, .start = chat_tags_start},
    [CHAT_MINIMAX_M3] = {{"]<]minimax[>[<tool_call>"}, .start = chat_elements_start},
};

/* Muse names the recipient before a call: to=NAME<|message|>, in later messages after <|start|>assistant. Returns
 * chat_match()'s result for this header with the frame after it; *n is its length. */
static int match_recipient(const struct chat_parser *p, size_t *n)
{
    static const char start[] = "<|start|>assistant ", to[] = "to=", message[] = "<|message|>";
    const char *frame = frames[CHAT_MUSE].frame[0];
    size_t at = 0, name;
    int m = chat_match(p, start);
    if (m < 0)
        return m;
    at += m ? sizeof start - 1 : 0;
    if ((m = chat_match_at(p, at, to)) <= 0)
        return m;
    at += sizeof to - 1;
    for (name = at; at < p->in.len - p->pos && at - name <= MAX_NAME; at++)
        if (strchr(" <\n", p->in.p[p->pos + at]))
            break;
    if (at - name > MAX_NAME || (m = chat_match_at(p, at, message)) <= 0)
        return at - name > MAX_NAME ? 0 : m;
    at += sizeof message - 1;
    *n = at + strlen(frame);
    return chat_match_at(p, at, frame);
}

/* Inkling names the tool before a call: NAME<|content_invoke_tool_json|>, in later messages after <|message_model|>.
 * Returns chat_match()'s result for this header; *n is its length. */
static int match_header(const struct chat_parser *p, size_t *n)
{
    static const char start[] = "<|message_model|>";
    const char *frame = frames[CHAT_INKLING].frame[0];
    size_t at = 0, name, have = p->in.len - p->pos;
    int m = chat_match(p, start);
    if (m < 0)
        return m;
    if (!m && p->state != S_START && chat_here(p) != '<')
        return 0; /* in the middle of a message */
    at += m ? sizeof start - 1 : 0;
    for (name = at; at < have && at - name <= MAX_NAME; at++)
        if (strchr("< \n", p->in.p[p->pos + at]))
            break;
    *n = at + strlen(frame);
    return at - name > MAX_NAME ? 0 : chat_match_at(p, at, frame);
}

/* Starts the call that begins here. Returns chat_match()'s result. */
static int begin_call(struct chat_parser *p)
{
    struct buf raw = {0};
    size_t n = 0;
    int wait = 0, m = 0;
    if (p->format == CHAT_MUSE || p->format == CHAT_INKLING)
        m = (p->format == CHAT_MUSE ? match_recipient : match_header)(p, &n);
    for (int i = 0; !m && i < 2 && frames[p->format].frame[i]; i++) {
        const char *frame = frames[p->format].frame[i];
        n = strlen(frame);
        m = chat_match(p, frame);
        wait |= m < 0;
        m = m > 0;
    }
    if (!m && !wait && frames[p->format].bare) {
        n = 0;
        m = chat_match(p, frames[p->format].bare);
    }
    if (m <= 0)
        return wait ? -1 : m;
    buf_add(&raw, p->in.p + p->pos, n);
    buf_addc(&raw, 0);
    p->pos += n;
    /* a mark ends each message */
    p->framed |= p->format == CHAT_MUSE || p->format == CHAT_INKLING;
    frames[p->format].start(p, raw.p);
    buf_clear(&raw);
    return 1;
}

/* Handles tags that may only precede content. False: wait for more text. */
static bool step_start(struct chat_parser *p)
{
    int m;
    if (chat_space_here(p)) {
        if (!p->trim)
            buf_addc(&p->space, chat_here(p));
        p->pos++;
        return true;
    }
    if (p->format == CHAT_GPT_OSS) {
        int c = chat_match(p, "<|channel|>"), s = chat_match(p, "<|start|>"),
            t = chat_match(p, "to=");
        if (c < 0 || s < 0 || t < 0)
            return false;
        if (c || s || t)
            trim(p);
        p->state = c || s || t ? S_HEADER : S_CONTENT;
        return true;
    }
    if (p->opt.reasoning) {
        m = chat_accept(p, p->marks->open);
        if (m < 0)
            return false;
        if (m) {
            trim(p);
            p->state = S_REASONING;
            return true;
        }
    }
    if (!p->framed && p->marks->answer[0]) {
        m = accept_any(p, p->marks->answer);
        if (m < 0)
            return false;
        if (m) {
            trim(p);
            p->framed = true;
            p->opt.reasoning = false;
            return true;
        }
    }
    if (p->opt.tools && (p->format == CHAT_LLAMA_JSON || p->format == CHAT_PYTHONIC)) {
        const char *tag = p->format == CHAT_LLAMA_JSON ? "<|python_tag|>" : "<|python_start|>";
        m = chat_accept(p, tag);
        if (m < 0)
            return false;
        if (m)
            return true;
        if (p->format == CHAT_LLAMA_JSON && chat_here(p) == '{') {
            chat_start_call(p, C_JSON, "");
            return true;
        }
        if (p->format == CHAT_PYTHONIC && chat_here(p) == '[') {
            p->pos++;
            chat_start_call(p, C_JSON, "[");
            return true;
        }
    }
    if (p->opt.tools && (p->format == CHAT_MUSE || p->format == CHAT_INKLING) &&
        (m = begin_call(p)))
        return m > 0;
    enter_content(p);
    return true;
}

static bool step_content(struct chat_parser *p)
{
    static const char *const gpt[] = {"<|channel|>", "<|start|>", "<|end|>",
                                      "<|return|>",  "<|call|>",  NULL};
    char c = chat_here(p);
    int m = 0;
    if (p->format == CHAT_GPT_OSS && c == '<') {
        for (int i = 0; gpt[i]; i++) {
            m = chat_match(p, gpt[i]);
            if (m < 0)
                return false;
            if (!m)
                continue;
            if (i < 2)
                p->state = S_HEADER;
            else
                p->pos += strlen(gpt[i]);
            trim(p);
            return true;
        }
    }
    if (p->opt.tools && strchr("<[]", c) && (m = begin_call(p)))
        return m > 0;
    if (p->framed && c == '<' && (m = accept_any(p, p->marks->answer_end))) {
        if (m > 0)
            trim(p);
        return m > 0;
    }
    chat_put(p, CHAT_CONTENT, &c, 1);
    p->pos++;
    return true;
}

static bool step_reasoning(struct chat_parser *p)
{
    int m = 0;
    char c = chat_here(p);
    if (c == p->marks->close[0]) {
        m = chat_accept(p, p->marks->close);
        if (m > 0) {
            trim(p);
            p->opt.reasoning = false; /* only one block of reasoning, at the start */
            p->state = S_START;
        }
    }
    if (m == 0 && p->opt.tools && p->marks->call && c == p->marks->call[0] &&
        (m = chat_match(p, p->marks->call)) > 0) {
        trim(p);
        p->opt.reasoning = false;
        enter_content(p);
    }
    if (m == 0 && p->trim && c == p->marks->open[0])
        m = chat_accept(p, p->marks->open); /* repeated although the prompt opened it */
    if (m)
        return m > 0;
    chat_put(p, CHAT_REASONING, &c, 1);
    p->pos++;
    return true;
}

/* ------------------------------------------------------------------ calls */

static const char *call_close(const struct chat_parser *p)
{
    switch (p->format) {
    case CHAT_HERMES:
    case CHAT_QWEN_XML:
    case CHAT_GLM:
        return "</tool_call>";
    case CHAT_SEED:
        return "</seed:tool_call>";
    case CHAT_COHERE:
        return "<|END_ACTION|>";
    case CHAT_APERTUS:
        return "<|tools_suffix|>";
    case CHAT_NEMOTRON:
        return "</TOOLCALL>";
    case CHAT_TOOL_CALLS:
        return "</tool_calls>";
    case CHAT_LFM2:
        return "<|tool_call_end|>";
    case CHAT_INKLING:
        return "<|end_message|>";
    default:
        return "";
    }
}

bool chat_scan_step(struct chat_parser *p, enum scan_result r, enum parse_state done)
{
    if (r != SCAN_BAD) {
        if (r == SCAN_DONE)
            p->state = done;
        else if (!p->call_open)
            buf_addc(&p->raw, chat_here(p));
        p->pos++;
        return true;
    }
    if (p->call_open)
        chat_call_break(p);
    else
        chat_reject_call(p);
    return true;
}

static void xml_end(struct chat_parser *p)
{
    if (p->xml_any)
        chat_call_args(p, "}", 1);
    else
        chat_call_args(p, "{}", 2);
    if (chat_call_end(p))
        p->state = S_CLOSE;
}

static void xml_param_end(struct chat_parser *p)
{
    if (p->xml_string)
        chat_call_args(p, "\"", 1);
    else
        xml_value(p, p->js.args.p ? p->js.args.p : "", p->js.args.len);
    p->mode = X_BODY;
}

/* Reads a name up to '>'. Returns 1 when complete, 0 for more, -1 if it is not a name. */
static int xml_name(struct chat_parser *p, struct buf *name)
{
    char c = chat_here(p);
    if (c == '<' || c == '\n' || name->len > MAX_NAME || (c == '>' && !name->len))
        return -1;
    p->pos++;
    buf_addc(&p->raw, c);
    if (c == '>')
        return 1;
    buf_addc(name, c);
    return 0;
}

static bool step_xml(struct chat_parser *p)
{
    int m;
    char c = chat_here(p);
    switch (p->mode) {
    case X_OPEN:
        if ((m = chat_accept(p, "<function=")) < 0)
            return false;
        if (m) {
            buf_adds(&p->raw, "<function=");
            p->mode = X_FUNCTION;
        } else if (chat_space_here(p)) {
            buf_addc(&p->raw, c);
            p->pos++;
        } else if (c == '{') {
            p->mode = C_JSON; /* these models also write calls as JSON */
        } else {
            chat_reject_call(p);
        }
        return true;
    case X_FUNCTION:
        m = xml_name(p, &p->tag);
        if (m < 0)
            chat_reject_call(p);
        if (m > 0) {
            chat_call_begin(p, p->tag.p, p->tag.len);
            p->xml_any = false;
            p->mode = X_BODY;
        }
        return true;
    case X_BODY:
        if (c == '<') {
            int a = chat_match(p, "<parameter="), b = chat_match(p, "</function>"),
                d = chat_match(p, call_close(p)), e = chat_match(p, "</parameter>");
            if (a < 0 || b < 0 || d < 0 || e < 0)
                return false;
            if (e) { /* superfluous closing tag */
                p->pos += strlen("</parameter>");
                return true;
            }
            if (a) {
                p->pos += strlen("<parameter=");
                buf_reset(&p->js.name);
                p->mode = X_PARAM;
                return true;
            }
            if (b || d) {
                if (b)
                    p->pos += strlen("</function>");
                xml_end(p);
                return true;
            }
        }
        if (chat_space_here(p))
            p->pos++;
        else
            chat_call_break(p);
        return true;
    case X_PARAM:
        m = xml_name(p, &p->js.name);
        if (m < 0)
            chat_call_break(p);
        if (m > 0) {
            struct buf key = {0};
            buf_adds(&key, p->xml_any ? ", \"" : "{\"");
            json_escape(&key, p->js.name.p, p->js.name.len);
            buf_adds(&key, "\": ");
            p->xml_string = xml_is_string(p, p->tag.p, p->js.name.p);
            p->xml_any = true;
            if (p->xml_string)
                buf_addc(&key, '"');
            chat_call_args(p, key.p, key.len);
            buf_clear(&key);
            buf_reset(&p->js.args);
            p->mode = X_FIRST;
        }
        return true;
    case X_FIRST: /* Qwen's newline after the tag is not part of the value */
        p->pos += c == '\n' && p->format == CHAT_QWEN_XML;
        p->mode = X_VALUE;
        return true;
    default:
        break;
    }
    /* X_VALUE. A missing closing tag is detected when the next tag starts a line. */
    if (c == '<' || c == '\n') {
        int a = chat_match(p, "</parameter>"),
            b = p->format == CHAT_QWEN_XML ? chat_match(p, "\n</parameter>") : 0,
            f = chat_match(p, "\n</function>"), d = chat_match(p, "\n<parameter=");
        if (a < 0 || b < 0 || f < 0 || d < 0)
            return false;
        if (a || b || f || d) {
            p->pos += a ? strlen("</parameter>") : b ? strlen("\n</parameter>") : 0;
            xml_param_end(p);
            return true;
        }
    }
    p->pos++;
    chat_value_char(p, c);
    return true;
}

static bool step_call(struct chat_parser *p)
{
    switch (p->format) {
    case CHAT_DEEPSEEK_R1:
        return chat_step_deepseek(p);
    case CHAT_MISTRAL:
        return chat_step_mistral(p);
    case CHAT_LFM2:
        if (p->mode == C_JSON)
            return chat_scan_step(p, py_scan_feed(p, chat_here(p)), S_BETWEEN);
        /* fall through */
    case CHAT_COHERE:
    case CHAT_NEMOTRON:
    case CHAT_GRANITE:
    case CHAT_TOOL_CALLS:
        return chat_step_list(p);
    case CHAT_APERTUS:
        return chat_step_apertus(p);
    case CHAT_GLM:
        if (p->mode == C_JSON)
            return chat_scan_step(p, json_scan_feed(p, chat_here(p), true), S_CLOSE);
        return chat_tags_step(p);
    case CHAT_MINIMAX:
    case CHAT_KIMI:
    case CHAT_GEMMA:
    case CHAT_HUNYUAN:
    case CHAT_SOLAR:
    case CHAT_MUSE:
    case CHAT_DEEPSEEK_V32:
    case CHAT_DEEPSEEK_V4:
        return chat_tags_step(p);
    case CHAT_MINIMAX_M3:
        return chat_step_elements(p);
    case CHAT_QWEN_XML:
    case CHAT_SEED:
        if (p->mode != C_JSON)
            return step_xml(p);
        /* fall through */
    case CHAT_HERMES:
    case CHAT_INKLING:
        return chat_scan_step(p, json_scan_feed(p, chat_here(p), true), S_CLOSE);
    case CHAT_PYTHONIC:
        return chat_scan_step(p, py_scan_feed(p, chat_here(p)), S_BETWEEN);
    default:
        return chat_scan_step(p, json_scan_feed(p, chat_here(p), false), S_BETWEEN);
    }
}

/* All calls are one list in a frame. */
static bool is_framed_list(enum chat_format f)
{
    return f == CHAT_COHERE || f == CHAT_APERTUS || f == CHAT_NEMOTRON || f == CHAT_GRANITE ||
           f == CHAT_TOOL_CALLS || f == CHAT_LFM2;
}

/* Between the calls in a list. */
static bool step_between(struct chat_parser *p)
{
    char c = chat_here(p);
    bool framed = is_framed_list(p->format);
    bool python = p->format == CHAT_PYTHONIC || p->format == CHAT_LFM2;
    bool list = framed || p->format == CHAT_MISTRAL || p->format == CHAT_PYTHONIC;
    if (chat_space_here(p) || c == ',' || (c == ';' && !list)) {
        if (p->raw.len)
            buf_addc(&p->raw, c);
        p->pos++;
    } else if (python ? ((c | 32) >= 'a' && (c | 32) <= 'z') || c == '_' : c == '{') {
        if (framed)
            chat_list_next(p);
        else
            chat_next_call(p, C_JSON);
    } else if (p->raw.len) {
        chat_reject_call(p);
    } else {
        p->pos += list && c == ']';
        p->state = framed && c == ']' ? S_CLOSE : S_CONTENT;
    }
    return true;
}

/* After a complete call: its closing tag, or another call in the same frame. */
static bool step_close(struct chat_parser *p)
{
    if (chat_space_here(p)) {
        p->pos++;
        return true;
    }
    int m = chat_accept(p, call_close(p));
    if (m < 0)
        return false;
    if (!m && chat_here(p) == '{' && !is_framed_list(p->format))
        chat_next_call(p, C_JSON);
    else
        enter_content(p);
    return true;
}

/* ------------------------------------------------------------------ gpt-oss */

enum { G_REASONING, G_CONTENT, G_TOOL };

static bool has_word(const struct buf *b, const char *word)
{
    return b->len && memmem(b->p, b->len, word, strlen(word));
}

/* Handles a complete header: the recipient and the kind of text that follows. */
static void open_message(struct chat_parser *p)
{
    struct buf *h = &p->tag;
    const char *to = h->len ? memmem(h->p, h->len, "to=", 3) : NULL, *end = h->p + h->len;
    trim(p);
    p->state = S_BODY;
    if (to && p->opt.tools && !has_word(h, "to=user") && !has_word(h, "to=assistant")) {
        const char *name = to + 3, *q = name;
        while (q < end && *q != ' ' && *q != '<' && *q != '\n')
            q++;
        if (q - name > 10 && !memcmp(name, "functions.", 10))
            name += 10;
        if (q > name) {
            p->mode = G_TOOL;
            chat_call_begin(p, name, (size_t)(q - name));
            trim(p);
            return;
        }
    }
    p->mode = has_word(h, "analysis") && p->opt.reasoning ? G_REASONING : G_CONTENT;
    if (p->mode == G_REASONING ? p->reasoned : p->wrote)
        buf_addc(&p->space, '\n'); /* start a second message of the same kind on a new line */
    p->reasoned |= p->mode == G_REASONING;
}

static bool step_header(struct chat_parser *p)
{
    int m = chat_accept(p, "<|message|>");
    if (m < 0)
        return false;
    if (m) {
        open_message(p);
        buf_reset(&p->tag);
        return true;
    }
    if (p->tag.len < 1024) /* longer headers are truncated */
        buf_addc(&p->tag, chat_here(p));
    p->pos++;
    return true;
}

static bool step_body(struct chat_parser *p)
{
    static const char *const ends[] = {"<|end|>",   "<|return|>",  "<|call|>",
                                       "<|start|>", "<|channel|>", NULL};
    char c = chat_here(p);
    for (int i = 0; c == '<' && ends[i]; i++) {
        int m = chat_match(p, ends[i]);
        if (m < 0)
            return false;
        if (!m)
            continue;
        if (i < 3)
            p->pos += strlen(ends[i]);
        if (p->mode == G_TOOL) {
            if (!p->wrote_args)
                chat_call_args(p, "{}", 2);
            p->wrote_args = false;
            if (!chat_call_end(p))
                return true;
        }
        trim(p);
        p->state = i < 3 ? S_CONTENT : S_HEADER;
        return true;
    }
    if (p->mode == G_TOOL && !chat_space_here(p))
        p->wrote_args = true;
    chat_put(p,
             p->mode == G_TOOL        ? CHAT_TOOL_ARGS
             : p->mode == G_REASONING ? CHAT_REASONING
                                      : CHAT_CONTENT,
             &c, 1);
    p->pos++;
    return true;
}

/* ------------------------------------------------------------------ the parser */

/* Saves the bytes this step consumed if they belong to a call or a possible call. */
static void save_call_text(struct chat_parser *p)
{
    bool in_call =
        p->call_open || p->state == S_CALL || p->state == S_BETWEEN || p->state == S_HEADER;
    if (p->ended || !in_call)
        buf_reset(&p->whole);
    else
        buf_add(&p->whole, p->in.p + p->step_at, p->pos - p->step_at);
    p->ended = false;
}

static void run(struct chat_parser *p)
{
    bool more = true;
    while (more && p->pos < p->in.len) {
        p->step_at = p->pos;
        switch (p->state) {
        case S_START:
            more = step_start(p);
            break;
        case S_CONTENT:
            more = step_content(p);
            break;
        case S_REASONING:
            more = step_reasoning(p);
            break;
        case S_CALL:
            more = step_call(p);
            break;
        case S_CLOSE:
            more = step_close(p);
            break;
        case S_BETWEEN:
            more = step_between(p);
            break;
        case S_HEADER:
            more = step_header(p);
            break;
        case S_BODY:
            more = step_body(p);
            break;
        }
        save_call_text(p);
    }
    if (p->pos) {
        p->in.len -= p->pos;
        memmove(p->in.p, p->in.p + p->pos, p->in.len);
        p->pos = 0;
    }
    p->step_at = 0;
}

struct chat_parser *chat_parser_new(enum chat_format f, const struct chat_parse_options *opt)
{
    struct chat_parser *p = mem_zalloc(1, sizeof *p);
    p->format = f;
    p->opt = *opt;
    p->state = S_START;
    p->marks = chat_marks_of(f, opt->thoughts, opt->tools);
    p->framed = opt->continues && !opt->in_reasoning;
    bool reasons = opt->in_reasoning && opt->reasoning;
    if (reasons && f != CHAT_GPT_OSS) {
        p->state = S_REASONING;
        p->trim = !opt->continues;
    } else if (reasons && opt->continues) {
        p->state = S_BODY;
        p->mode = G_REASONING;
    }
    return p;
}

void chat_parser_push(struct chat_parser *p, const char *text, size_t len)
{
    if (!len)
        return;
    buf_add(&p->in, text, len);
    run(p);
    flush(p);
}

void chat_parser_finish(struct chat_parser *p)
{
    p->final = true;
    run(p);
    if (p->call_open && p->state == S_BODY && p->wrote_args) {
        chat_call_end(p); /* the end-of-call token ended the generation */
    } else if (p->call_open) {
        chat_call_break(p);
    } else if ((p->state == S_CALL || p->state == S_BETWEEN) && p->raw.len) {
        chat_reject_call(p);
    } else if (p->state == S_HEADER && p->opt.tools && has_word(&p->tag, "to=")) {
        chat_put(p, CHAT_CONTENT, p->whole.p, p->whole.len);
        enter_content(p);
    }
    if (p->state == S_CONTENT || p->state == S_START)
        put(p, CHAT_CONTENT, p->space.p, p->space.len);
    flush(p);
}

int chat_parser_calls(const struct chat_parser *p)
{
    return p->n_calls - p->n_broken;
}

void chat_parser_free(struct chat_parser *p)
{
    if (!p)
        return;
    struct buf *bufs[] = {&p->in,      &p->out,      &p->space, &p->raw,     &p->tag,
                          &p->js.text, &p->js.name,  &p->js.id, &p->js.args, &p->py.name,
                          &p->py.key,  &p->py.value, &p->whole, &p->lead,    &p->args};
    for (size_t i = 0; i < sizeof bufs / sizeof *bufs; i++)
        buf_clear(bufs[i]);
    mem_free(p->levels);
    mem_free(p);
}
