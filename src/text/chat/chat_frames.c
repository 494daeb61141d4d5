/*
 * Tool calls whose arguments are a JSON object after a framed name: Mistral, DeepSeek, Apertus, and lists in a frame.
 * chat_parse.c begins and ends calls. As in chat_tags.c, a failure before a call begins leaves the text as content.
 */
#include "text/chat/chat_parse_int.h"

#include <string.h>

/* Positions in a call: M_ Mistral, L_ a list of JSON objects, A_ Apertus, D_ DeepSeek. */
enum {
    M_START = CHAT_MODE_JSON + 1,
    M_LIST,
    M_NAME,
    M_ID,
    M_OPEN,
    M_ARGS,
    L_START,
    A_OPEN,
    A_QUOTE,
    A_NAME,
    A_COLON,
    A_VALUE,
    A_ARGS,
    A_END,
    D_NEXT,
    D_NAME,
    D_AFTER,
    D_TITLE,
    D_OPEN,
    D_ARGS,
    D_END
};

enum { MAX_NAME = 256 }; /* longest function name */

/* DeepSeek's tags are single tokens, written with full-width bars. */
#define D_CALLS_BEGIN "<｜tool▁calls▁begin｜>"
#define D_CALLS_END   "<｜tool▁calls▁end｜>"
#define D_CALL_BEGIN  "<｜tool▁call▁begin｜>"
#define D_CALL_END    "<｜tool▁call▁end｜>"
#define D_SEP         "<｜tool▁sep｜>"

static bool mistral_name_char(char c)
{
    return ((c | 32) >= 'a' && (c | 32) <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '-' ||
           c == '.';
}

/* Arguments as a bare JSON object: emitted as they arrive, up to the closing bracket. */
bool chat_step_args(struct chat_parser *p)
{
    struct json_scan *s = &p->js;
    char c = chat_here(p);
    p->pos++;
    chat_call_args(p, &c, 1);
    if (s->in_string) {
        if (s->escape)
            s->escape = false;
        else if (c == '\\')
            s->escape = true;
        else if (c == '"')
            s->in_string = false;
    } else if (c == '"') {
        s->in_string = true;
    } else if (c == '{' || c == '[') {
        s->depth++;
    } else if ((c == '}' || c == ']') && --s->depth <= 0) {
        p->state = S_CONTENT;
        return chat_call_end(p);
    }
    return false;
}

bool chat_step_mistral(struct chat_parser *p)
{
    char c = chat_here(p);
    switch (p->mode) {
    case M_START:
        if (chat_space_here(p)) {
            buf_addc(&p->raw, c);
            p->pos++;
        } else if (c == '[') {
            buf_addc(&p->raw, c);
            p->pos++;
            p->mode = M_LIST;
            p->state = S_BETWEEN;
        } else if (mistral_name_char(c)) {
            p->mode = M_NAME;
        } else {
            chat_reject_call(p);
        }
        return true;
    case M_NAME:
    case M_ID: {
        int a = chat_match(p, "[ARGS]"), i = p->mode == M_NAME ? chat_match(p, "[CALL_ID]") : 0;
        if (a < 0 || i < 0)
            return false;
        if (a || i) {
            buf_adds(&p->raw, a ? "[ARGS]" : "[CALL_ID]");
            p->pos += strlen(a ? "[ARGS]" : "[CALL_ID]");
            p->mode = a ? M_OPEN : M_ID;
        } else if (c == '{') {
            p->mode = M_OPEN;
        } else if (mistral_name_char(c) && p->raw.len < MAX_NAME) {
            buf_addc(&p->raw, c);
            if (p->mode == M_NAME)
                buf_addc(&p->tag, c);
            p->pos++;
        } else {
            chat_reject_call(p);
        }
        return true;
    }
    case M_OPEN:
        if (c == '{') {
            chat_call_begin(p, p->tag.p, p->tag.len);
            p->mode = M_ARGS;
        } else if (chat_space_here(p)) {
            buf_addc(&p->raw, c);
            p->pos++;
        } else {
            chat_reject_call(p);
        }
        return true;
    case M_ARGS:
        chat_step_args(p);
        return true;
    default: /* C_JSON, an object in the list */
        return chat_scan_step(p, json_scan_feed(p, c, true), S_BETWEEN);
    }
}

/* Before the list of calls: [{"tool_name": ..., "parameters": {...}}, ...] of Command A, [{NAME: {...}}, ...] of
 * Apertus. */
static bool step_list_start(struct chat_parser *p)
{
    char c = chat_here(p);
    if (!chat_space_here(p) && c != '[') {
        chat_reject_call(p);
        return true;
    }
    buf_addc(&p->raw, c);
    p->pos++;
    if (c == '[')
        p->state = S_BETWEEN;
    return true;
}

bool chat_step_list(struct chat_parser *p)
{
    if (p->mode == L_START)
        return step_list_start(p);
    return chat_scan_step(p, json_scan_feed(p, chat_here(p), true), S_BETWEEN);
}

void chat_frames_start(struct chat_parser *p, const char *raw)
{
    static const int first[CHAT_N_FORMATS] = {
        [CHAT_MISTRAL] = M_START,    [CHAT_DEEPSEEK_R1] = D_NEXT, [CHAT_COHERE] = L_START,
        [CHAT_APERTUS] = L_START,    [CHAT_NEMOTRON] = L_START,   [CHAT_GRANITE] = L_START,
        [CHAT_TOOL_CALLS] = L_START, [CHAT_LFM2] = L_START};
    chat_start_call(p, first[p->format], raw);
}

void chat_list_next(struct chat_parser *p)
{
    chat_next_call(p, p->format == CHAT_APERTUS ? A_OPEN : CHAT_MODE_JSON);
}

/* Consumes a byte that is not yet known to belong to a call. */
static void consume(struct chat_parser *p)
{
    buf_addc(&p->raw, chat_here(p));
    p->pos++;
}

/* One object of Apertus's list: {"NAME": {...}}. */
bool chat_step_apertus(struct chat_parser *p)
{
    static const char marks[] = {[A_OPEN] = '{', [A_QUOTE] = '"', [A_COLON] = ':', [A_VALUE] = '{'};
    char c = chat_here(p);
    switch (p->mode) {
    case L_START:
        return step_list_start(p);
    case A_NAME:
        if (c == '"' && p->tag.len) {
            p->mode = A_COLON;
        } else if (strchr("\"\\\n", c) || p->tag.len > MAX_NAME) {
            chat_reject_call(p);
            return true;
        } else {
            buf_addc(&p->tag, c);
        }
        consume(p);
        return true;
    case A_ARGS:
        if (chat_step_args(p))
            chat_next_call(p, A_END);
        return true;
    case A_END:
        if (c == '}')
            p->state = S_BETWEEN;
        else if (!chat_space_here(p))
            p->state = S_CONTENT;
        p->pos += p->state != S_CONTENT;
        return true;
    default:
        break;
    }
    if (c != marks[p->mode] && !chat_space_here(p)) {
        chat_reject_call(p);
    } else if (c == '{' && p->mode == A_VALUE) {
        chat_call_begin(p, p->tag.p, p->tag.len);
        p->mode = A_ARGS;
    } else {
        p->mode += !chat_space_here(p);
        consume(p);
    }
    return true;
}

/* Inside DeepSeek's call frame: `function SEP name` with the arguments in a fenced block (R1 and
 * its distillations), or `name SEP arguments`. */
bool chat_step_deepseek(struct chat_parser *p)
{
    char c = chat_here(p);
    int m;
    if (p->mode == D_ARGS) {
        if (chat_step_args(p))
            chat_next_call(p, D_END);
        return true;
    }
    if (p->mode == D_NAME) {
        if ((m = chat_accept(p, D_SEP)) < 0)
            return false;
        if (m) {
            buf_adds(&p->raw, D_SEP);
            p->mode = D_AFTER;
            return true;
        }
    }
    if (p->mode == D_NAME || p->mode == D_TITLE) {
        if (p->mode == D_TITLE && (c == '\n' || c == '{')) {
            p->mode = D_OPEN;
        } else if (c == '\n' || c == '<' || p->tag.len > MAX_NAME) {
            chat_reject_call(p);
        } else {
            buf_addc(&p->tag, c);
            buf_addc(&p->raw, c);
            p->pos++;
        }
        return true;
    }
    if (chat_space_here(p)) {
        if (p->raw.len)
            buf_addc(&p->raw, c);
        p->pos++;
        return true;
    }
    if (p->mode == D_AFTER || p->mode == D_OPEN) {
        if ((m = p->mode == D_OPEN ? chat_match(p, "```json") : 0) < 0)
            return false;
        const char *fence = m > 0 ? "```json" : "```";
        if (c == '{' && p->tag.len) {
            chat_call_begin(p, p->tag.p, p->tag.len);
            p->mode = D_ARGS;
        } else if (p->mode == D_AFTER) {
            buf_reset(&p->tag);
            p->mode = D_TITLE;
        } else if ((m = chat_accept(p, fence)) > 0) {
            buf_adds(&p->raw, fence);
        } else if (m < 0) {
            return false;
        } else {
            chat_reject_call(p);
        }
        return true;
    }
    /* D_NEXT, D_END */
    int begin = chat_match(p, D_CALL_BEGIN), all = chat_match(p, D_CALLS_END),
        end = p->mode == D_END ? chat_match(p, D_CALL_END) : 0,
        fence = p->mode == D_END ? chat_match(p, "```") : 0;
    if (begin < 0 || all < 0 || end < 0 || fence < 0)
        return false;
    if (begin) {
        chat_next_call(p, D_NAME);
        buf_adds(&p->raw, D_CALL_BEGIN);
        p->pos += strlen(D_CALL_BEGIN);
    } else if (end || fence) {
        p->pos += strlen(end ? D_CALL_END : "```");
        p->mode = end ? D_NEXT : D_END;
    } else if (p->raw.len) {
        chat_reject_call(p);
    } else {
        if (all)
            p->pos += strlen(D_CALLS_END);
        p->state = S_CONTENT;
    }
    return true;
}
