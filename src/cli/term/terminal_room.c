/*
 * A chat that exceeds its context: the oldest turns are dropped from the prompt; the system prompt
 * stays. Dropped messages are kept for /save. Tokens are counted by rendering the prompt.
 */
#include "cli/term/terminal_int.h"
#include "base/error.h"
#include "base/mem.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

char *terminal_messages(const struct terminal *t, int first)
{
    int n = steel_chat_json(t->chat, first, NULL, 0);
    CHECK(n >= 0, "a conversation without JSON");
    char *text = mem_alloc((size_t)n + 1);
    steel_chat_json(t->chat, first, text, n + 1);
    return text;
}

bool terminal_replace(struct terminal *t, const char *json, struct steel_error *err)
{
    char *before = terminal_messages(t, 0);
    steel_chat_cut(t->chat, 0);
    bool ok = steel_chat_add_json(t->chat, json, err);
    if (!ok)
        steel_chat_add_json(t->chat, before, NULL);
    mem_free(before);
    return ok;
}

/* Number of tokens of the next prompt; negative on failure. */
static int count_tokens(const struct terminal *t, struct steel_error *err)
{
    int len = steel_chat_render(t->chat, NULL, 0, err);
    if (len < 0)
        return -1;
    char *text = mem_alloc((size_t)len + 1);
    steel_chat_render(t->chat, text, len + 1, err);
    int n = steel_engine_tokenize(t->engine, text, (size_t)len, STEEL_PARSE_SPECIAL, NULL, 0, err);
    mem_free(text);
    return n;
}

/* The indices where turns start: the user messages, in order. */
static int *turn_starts(const struct terminal *t, int *n)
{
    int all = steel_chat_n_messages(t->chat);
    int *starts = mem_zalloc((size_t)all + 1, sizeof *starts);
    *n = 0;
    for (int i = 0; i < all; i++)
        if (!strcmp(steel_chat_role(t->chat, i), "user"))
            starts[(*n)++] = i;
    return starts;
}

/* Number of tokens of the prompt with the messages of `all` from `first` on. */
static int count_from(struct terminal *t, const json_t *all, int first, struct steel_error *err)
{
    json_t *rest = json_array();
    for (size_t i = (size_t)first; i < json_array_size(all); i++)
        json_array_append(rest, json_array_get(all, i));
    char *text = json_dumps(rest, JSON_COMPACT);
    bool ok = terminal_replace(t, text, err);
    free(text);
    json_decref(rest);
    return ok ? count_tokens(t, err) : -1;
}

/* Drops as few turns as possible so that the rest has at most `limit` tokens. Returns how many;
 * *tokens: the number of tokens left. */
static int drop_turns(struct terminal *t, const json_t *all, const int *starts, int n, int limit,
                      int *tokens, struct steel_error *err)
{
    int lo = 0, hi = n - 1; /* dropping lo turns is too few; hi is the maximum */
    while (hi - lo > 1) {
        int mid = lo + (hi - lo) / 2, count = count_from(t, all, starts[mid], err);
        if (count >= 0 && count <= limit)
            hi = mid;
        else
            lo = mid;
    }
    *tokens = count_from(t, all, starts[hi], err);
    return hi;
}

bool terminal_make_room(struct terminal *t, struct steel_error *err)
{
    int context = steel_engine_context(t->engine), most = t->opt.n_predict;
    int answer = most > 0 && most < context / 4 ? most : context / 4;
    int least = context / 16; /* less room is not worth an answer */
    int tokens = count_tokens(t, err);
    if (tokens < 0)
        return false;
    if (tokens + answer <= context)
        return true;
    if (t->opt.overflow == OVERFLOW_ERROR) {
        if (tokens + least < context)
            return true;
        snprintf(err->message, sizeof err->message,
                 "the conversation has %d tokens with this message, the context %d: /clear, /undo, "
                 "--context-overflow drop, or a larger -c",
                 tokens, context);
        return false;
    }
    int n, turns = 0;
    int *starts = turn_starts(t, &n);
    char *text = terminal_messages(t, 0);
    json_t *all = json_loads(text, 0, NULL);
    if (n > 1)
        turns = drop_turns(t, all, starts, n, context - answer, &tokens, err);
    bool fits = tokens >= 0 && tokens + least < context;
    if (!fits) {
        terminal_replace(t, text, NULL);
        snprintf(err->message, sizeof err->message,
                 "this message is too long: with the system prompt it has %d tokens, but the "
                 "context of %d must also hold the answer; it is discarded",
                 tokens, context);
    } else if (turns) {
        for (int i = 0; i < starts[turns]; i++)
            json_array_append(t->dropped, json_array_get(all, (size_t)i));
        if (turns == 1)
            terminal_aside(t, "(the context is full: the oldest turn is dropped)");
        else
            terminal_aside(t, "(the context is full: the %d oldest turns are dropped)", turns);
    }
    json_decref(all);
    mem_free(text);
    mem_free(starts);
    return fits;
}
