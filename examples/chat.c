/*
 * A question that may need a tool call, answered through the library:
 *
 *   chat MODEL.gguf 'What is the weather in Paris?'      ("" = the built-in model)
 *
 * The conversation is rendered with the model's own template, and the answer is parsed into
 * thinking (to stderr), text (to stdout) and tool calls. get_weather() below answers the calls, and
 * the model continues with the result. Build: make examples
 */
#include <steel.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char tools[] =
    "[{\"type\": \"function\", \"function\": {"
    "\"name\": \"get_weather\", \"description\": \"Get the current weather in a city.\","
    "\"parameters\": {\"type\": \"object\","
    "\"properties\": {\"city\": {\"type\": \"string\", \"description\": \"The city\"}},"
    "\"required\": [\"city\"]}}}]";

/* A real program would use a JSON library; this one looks for "city": "...". */
static void get_weather(const char *arguments, char *result, size_t cap)
{
    char city[64] = "";
    const char *at = strstr(arguments, "\"city\"");
    if (!at || sscanf(at, "\"city\" : \"%63[^\"]\"", city) != 1)
        snprintf(result, cap, "{\"error\": \"which city?\"}");
    else
        snprintf(result, cap, "{\"temperature\": 21, \"condition\": \"sunny\"}");
}

struct call {
    char id[64], name[64], arguments[1024];
};

static void add(char *to, size_t cap, const struct steel_chat_event *e)
{
    size_t len = strlen(to), room = cap - 1 - len, n = e->n_text < room ? e->n_text : room;
    memcpy(to + len, e->text, n);
    to[len + n] = 0;
}

/* Generates one answer. Returns the number of tool calls in it, -1 on failure. */
static int answer(struct steel_chat *chat, const struct steel_request_options *o,
                  struct call *calls, int max_calls)
{
    struct steel_error error = {0};
    struct steel_answer *a = steel_chat_answer(chat, o, &error);
    if (!a) {
        fprintf(stderr, "%s\n", error.message);
        return -1;
    }
    int n = 0;
    struct steel_chat_event e;
    while (steel_answer_next(a, &e, -1)) {
        struct call *c = e.call < max_calls ? &calls[e.call] : NULL;
        switch (e.kind) {
        case STEEL_CHAT_STARTED:
            break;
        case STEEL_CHAT_THINKING:
            fwrite(e.text, 1, e.n_text, stderr);
            break;
        case STEEL_CHAT_TEXT:
            fwrite(e.text, 1, e.n_text, stdout);
            fflush(stdout);
            break;
        case STEEL_CHAT_CALL:
            if (!c)
                break;
            memset(c, 0, sizeof *c);
            snprintf(c->id, sizeof c->id, "%s", e.call_id);
            add(c->name, sizeof c->name, &e);
            n = e.call + 1;
            break;
        case STEEL_CHAT_ARGUMENTS:
            if (c)
                add(c->arguments, sizeof c->arguments, &e);
            break;
        case STEEL_CHAT_CALL_END:
            if (c)
                printf("[%s %s]\n", c->name, c->arguments);
            break;
        case STEEL_CHAT_CALL_BROKEN: /* its text follows as STEEL_CHAT_TEXT */
            n = e.call < n ? e.call : n;
            break;
        case STEEL_CHAT_DONE:
            fprintf(stderr, "\n  %d prompt tokens (%d cached), %d generated\n", e.end.n_prompt,
                    e.end.n_cached, e.end.n_generated);
            if (e.end.finish == STEEL_FAILED) {
                fprintf(stderr, "  failed: %s\n", e.end.error);
                n = -1;
            }
            break;
        }
    }
    steel_answer_free(a);
    return n;
}

static int talk(struct steel_engine *engine, const char *question)
{
    struct steel_error error = {0};
    struct steel_chat *chat = steel_chat_new(engine, NULL, &error);
    struct steel_message m = {.role = "user", .content = question};
    if (!chat || !steel_chat_set_tools(chat, tools, &error) || !steel_chat_add(chat, &m, &error)) {
        fprintf(stderr, "%s\n", error.message);
        steel_chat_free(chat);
        return 1;
    }
    struct steel_request_options o = steel_engine_request_options(engine);
    o.temperature = 0;
    o.max_tokens = 300;
    struct call calls[4];
    int n = 0;
    for (int round = 0; round < 4; round++) {
        n = answer(chat, &o, calls, 4);
        for (int i = 0; i < n; i++) {
            char result[256];
            if (!strcmp(calls[i].name, "get_weather"))
                get_weather(calls[i].arguments, result, sizeof result);
            else
                snprintf(result, sizeof result, "{\"error\": \"no such tool\"}");
            struct steel_message r = {.role = "tool", .content = result, .call_id = calls[i].id};
            steel_chat_add(chat, &r, NULL);
        }
        if (n <= 0)
            break;
    }
    printf("\n");
    steel_chat_free(chat);
    return n < 0;
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: %s MODEL QUESTION\n", argv[0]);
        return 2;
    }
    struct steel_error error = {0};
    struct steel_engine_options options = {.max_requests = 1};
    struct steel_engine *engine = steel_engine_open(*argv[1] ? argv[1] : NULL, &options, &error);
    if (!engine) {
        fprintf(stderr, "%s\n", error.message);
        return 1;
    }
    int rc = talk(engine, argv[2]);
    steel_engine_close(engine);
    return rc;
}
