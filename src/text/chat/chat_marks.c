/* The table of the marks of thinking; see the header. */
#include "text/chat/chat_marks.h"

#include <string.h>

/* Marks that belong to a format come after those that a template tells. */
enum { MISTRAL = CHAT_N_THOUGHTS, GEMMA, GPT_OSS, GPT_OSS_TOOLS, N_ROWS };

#define WHY "\n\nThe budget for thinking is used up, so I give my answer now."
/* Thoughts between two tags on lines of their own. */
#define TAGS(o, c)                                                                                 \
    .open = o, .close = c, .begin = o "\n", .end = WHY "\n" c "\n\n", .end_at_once = "\n" c "\n\n"
/* Thoughts between two tokens, without lines. */
#define TOKENS(o, c) .open = o, .close = c, .begin = o, .end = WHY c, .end_at_once = c
#define OSS_NEXT     "<|end|><|start|>assistant<|channel|>"
#define OSS_FINAL    "<|channel|>final<|message|>"
#define SOLAR_NEXT   "<|end|><|begin|>assistant<|content|>"
#define INKLING_NEXT "<|end_message|><|message_model|><|content_text|>"
#define MUSE_NEXT    "<|eom|><|start|>assistant<|message|>"

static const struct chat_marks rows[N_ROWS] = {
    [CHAT_THOUGHTS_TAGS] = {"", TAGS("<think>", "</think>")},
    [CHAT_THOUGHTS_ANSWER] = {"answer", TAGS("<think>", "</think>"),
                              .answer = {"<response>", "<answer>"},
                              .answer_end = {"</response>", "</answer>"}},
    [CHAT_THOUGHTS_THINKING] = {"thinking", TAGS("<thinking>", "</thinking>")},
    [CHAT_THOUGHTS_SEED] = {"seed", TOKENS("<seed:think>", "</seed:think>")},
    /* a reply without thinking begins with the closing mark */
    [CHAT_THOUGHTS_MINIMAX] = {"minimax", TAGS("<mm:think>", "</mm:think>"),
                               .answer = {"</mm:think>"}},
    [CHAT_THOUGHTS_HUNYUAN] = {"hunyuan", TOKENS("<think:opensource>", "</think:opensource>")},
    [CHAT_THOUGHTS_COHERE] = {"cohere", TOKENS("<|START_THINKING|>", "<|END_THINKING|>"),
                              .answer = {"<|START_RESPONSE|>", "<|START_TEXT|>"},
                              .answer_end = {"<|END_RESPONSE|>", "<|END_TEXT|>"},
                              .call = "<|START_ACTION|>"},
    [CHAT_THOUGHTS_APERTUS] = {"apertus", TOKENS("<|inner_prefix|>", "<|inner_suffix|>"),
                               .call = "<|tools_prefix|>"},
    [CHAT_THOUGHTS_SOLAR] = {"solar", .open = "<|think|>", .close = "<|end|>", .begin = "<|think|>",
                             .end = WHY SOLAR_NEXT, .end_at_once = SOLAR_NEXT,
                             .plain = "<|content|>", .closed = "<|think|><|end|><|begin|>assistant",
                             .answer = {"<|begin|>assistant<|content|>", "<|content|>"},
                             .answer_end = {"<|end|>"}},
    [CHAT_THOUGHTS_MUSE] = {"muse", .open = "to=self<|message|>", .close = "<|eom|>",
                            .begin = " to=self<|message|>", .end = WHY MUSE_NEXT,
                            .end_at_once = MUSE_NEXT, .plain = "<|message|>", .closed = MUSE_NEXT,
                            .answer = {"<|start|>assistant<|message|>", "<|message|>",
                                       "<|start|>assistant to=user<|message|>",
                                       "to=user<|message|>"},
                            .answer_end = {"<|eot|>", "<|eom|>"}},
    [CHAT_THOUGHTS_INKLING] = {"inkling", .open = "<|content_thinking|>",
                               .close = "<|end_message|>", .begin = "<|content_thinking|>",
                               .end = WHY INKLING_NEXT, .end_at_once = INKLING_NEXT,
                               .plain = "<|content_text|>", .closed = INKLING_NEXT,
                               .answer = {"<|message_model|><|content_text|>", "<|content_text|>"},
                               .answer_end = {"<|end_message|>"}},
    [MISTRAL] = {"", TOKENS("[THINK]", "[/THINK]")},
    [GEMMA] = {"", .open = "<|channel>thought", .close = "<channel|>",
               .begin = "<|channel>thought\n", .end = WHY "\n<channel|>",
               .end_at_once = "\n<channel|>"},
    [GPT_OSS] = {"", .open = "<|channel|>analysis<|message|>", .close = "<|end|>",
                 .begin = "<|channel|>analysis<|message|>", .end = WHY OSS_NEXT "final<|message|>",
                 .end_at_once = OSS_NEXT "final<|message|>", .reopens = true, .plain = OSS_FINAL},
    /* a call or the answer, but no further thinking */
    [GPT_OSS_TOOLS] = {"", .open = "<|channel|>analysis<|message|>", .close = "<|end|>",
                       .begin = "<|channel|>analysis<|message|>", .end = WHY OSS_NEXT,
                       .end_at_once = OSS_NEXT, .not_after = "analysis", .reopens = true,
                       .plain = OSS_FINAL},
};

/* Texts of which all are in a template with these marks; the first row that fits counts. */
static const struct {
    enum chat_thoughts thoughts;
    const char *has[2];
} signs[] = {
    {CHAT_THOUGHTS_SEED, {"<seed:think>", ""}},
    {CHAT_THOUGHTS_MINIMAX, {"<mm:think>", ""}},
    {CHAT_THOUGHTS_HUNYUAN, {"<think{}>", "':opensource'"}},
    {CHAT_THOUGHTS_HUNYUAN, {"<think:opensource>", ""}},
    {CHAT_THOUGHTS_COHERE, {"<|START_THINKING|>", ""}},
    {CHAT_THOUGHTS_APERTUS, {"<|inner_prefix|>", ""}},
    {CHAT_THOUGHTS_SOLAR, {"<|think|>", "<|begin|>assistant"}},
    {CHAT_THOUGHTS_MUSE, {"assistant to=self<|message|>", ""}},
    {CHAT_THOUGHTS_INKLING, {"<|content_thinking|>", "<|message_model|>"}},
    {CHAT_THOUGHTS_INKLING, {"Thinking effort level", "<|message_model|>"}},
    {CHAT_THOUGHTS_ANSWER, {"<think>", "<response>"}},
    {CHAT_THOUGHTS_ANSWER, {"<think>", "<answer>"}},
    {CHAT_THOUGHTS_THINKING, {"<thinking>", "</thinking>"}},
};

enum chat_thoughts chat_thoughts_detect(const char *t, size_t len)
{
    for (size_t i = 0; i < sizeof signs / sizeof *signs; i++) {
        const char *const *has = signs[i].has;
        if (memmem(t, len, has[0], strlen(has[0])) && memmem(t, len, has[1], strlen(has[1])))
            return signs[i].thoughts;
    }
    return CHAT_THOUGHTS_TAGS;
}

const char *chat_thoughts_name(enum chat_thoughts t)
{
    return rows[t].name;
}

const struct chat_marks *chat_marks_of(enum chat_format f, enum chat_thoughts thoughts, bool tools)
{
    return f == CHAT_GPT_OSS   ? &rows[tools ? GPT_OSS_TOOLS : GPT_OSS]
           : f == CHAT_MISTRAL ? &rows[MISTRAL]
           : f == CHAT_GEMMA   ? &rows[GEMMA]
                               : &rows[thoughts];
}

/* The prompt's length without white space at its end. */
static size_t trimmed(const char *prompt, size_t len)
{
    while (len && prompt[len - 1] && strchr(" \n\t\r", prompt[len - 1]))
        len--;
    return len;
}

static bool ends_with(const char *prompt, size_t len, const char *mark)
{
    size_t n = strlen(mark);
    return len >= n && !memcmp(prompt + len - n, mark, n);
}

bool chat_opens_reasoning(const char *prompt, size_t len)
{
    len = trimmed(prompt, len);
    for (int i = 0; i < GPT_OSS; i++)
        if (ends_with(prompt, len, rows[i].open))
            return true;
    return false;
}

enum chat_thinking chat_thinking_of(const char *prompt, size_t len)
{
    if (chat_opens_reasoning(prompt, len))
        return CHAT_THINKS_FIRST;
    len = trimmed(prompt, len);
    for (int i = 0; i < GPT_OSS; i++)
        if (ends_with(prompt, len, rows[i].closed ? rows[i].closed : rows[i].close))
            return CHAT_THINKS_NOT; /* the template has closed the reasoning */
    return CHAT_THINKS_MAYBE;
}
