/*
 * The chat terminal. Keeps a conversation as messages; every turn renders them with the model's own
 * template and reads only the tokens the KV cache does not hold. Templates rewrite history (Qwen3
 * drops earlier thinking), so after an answer the cache is brought to the form the next turn will
 * begin with, while the person reads and types: a turn then reads only what is new in it.
 */
#include "cli/terminal.h"
#include "cli/lineedit.h"
#include "base/mem.h"
#include "text/chat.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct terminal {
    struct runtime *rt;
    struct chat *chat;
    struct terminal_options opt;
    char *system;     /* NULL = none */
    json_t *messages; /* array, without the system message */
    struct context context;
    struct generation last; /* the last turn's counters */
    struct lineedit *input;
    bool color;
    bool quit;
    pthread_t settler; /* reads the settled history while input is awaited */
    bool settling;
    struct token_list settled; /* what it reads */
};

static const char DIM[] = "\033[2m", PLAIN[] = "\033[0m", BOLD[] = "\033[1m";

static void style(const struct terminal *t, const char *code)
{
    if (t->color)
        fputs(code, stdout);
}

static bool use_color(void)
{
    const char *none = getenv("NO_COLOR"), *term = getenv("TERM");
    return isatty(STDOUT_FILENO) && !(none && *none) && term && strcmp(term, "dumb") != 0;
}

/* The conversation as the template wants it, with one more user message where `extra` is given. */
static bool render(struct terminal *t, const char *extra, bool ask, struct buf *out,
                   struct error *err)
{
    json_t *all = json_array();
    if (t->system)
        json_array_append_new(all, json_pack("{s:s, s:s}", "role", "system", "content", t->system));
    json_array_extend(all, t->messages);
    if (extra)
        json_array_append_new(all, json_pack("{s:s, s:s}", "role", "user", "content", extra));
    json_t *kwargs = json_pack("{s:b}", "enable_thinking", t->opt.think != THINK_OFF);
    struct chat_request req = {.messages = all, .kwargs = kwargs, .no_generation_prompt = !ask};
    bool ok = chat_render(t->chat, &req, out, err);
    json_decref(kwargs);
    json_decref(all);
    return ok;
}

static bool encode(struct terminal *t, const struct buf *text, struct token_list *ids,
                   struct error *err)
{
    return tokenizer_encode(t->rt->tokenizer, text->p ? text->p : "", text->len,
                            TOKENIZE_SPECIAL | TOKENIZE_BOS, ids, err);
}

/* Settling: what any next turn will begin with is the part that two different next messages share. */

static void *settle_main(void *arg)
{
    struct terminal *t = arg;
    struct error ignored = {0};
    context_read(&t->context, t->settled.ids, (int)t->settled.n, NULL, NULL, &ignored);
    return NULL;
}

static void settle_start(struct terminal *t)
{
    struct buf a = {0}, b = {0};
    struct error ignored = {0};
    token_list_clear(&t->settled);
    if (render(t, "a", true, &a, &ignored) && render(t, "b", true, &b, &ignored)) {
        size_t same = 0;
        while (same < a.len && same < b.len && a.p[same] == b.p[same])
            same++;
        a.len = same;
        if (encode(t, &a, &t->settled, &ignored) && t->settled.n &&
            (int)t->settled.n < t->rt->context)
            t->settling = pthread_create(&t->settler, NULL, settle_main, t) == 0;
    }
    buf_clear(&a);
    buf_clear(&b);
}

static void settle_finish(struct terminal *t)
{
    if (t->settling)
        pthread_join(t->settler, NULL);
    t->settling = false;
}

/* The answer on its way to the screen. */

struct answer {
    struct terminal *t;
    FILE *thoughts; /* stdout in a chat, stderr for one question */
    bool thinking, folded;
    struct stop_filter shown;
    struct chat_message message;
    struct chat_parser *parser;
};

static void end_thinking(struct answer *a)
{
    if (!a->thinking)
        return;
    a->thinking = false;
    if (a->folded) {
        if (a->t->color)
            fputs("\r\033[K", a->thoughts);
    } else {
        fputs(a->t->color ? "\033[0m\n\n" : "\n</think>\n\n", a->thoughts);
    }
    a->folded = false;
    fflush(a->thoughts);
}

static void show_thought(struct answer *a, const char *text, size_t len)
{
    if (a->t->opt.think == THINK_HIDE) {
        if (!a->thinking && a->t->color) {
            fprintf(a->thoughts, "%sthinking...%s", DIM, PLAIN);
            fflush(a->thoughts);
        }
        a->thinking = a->folded = true;
        return;
    }
    if (!a->thinking)
        fputs(a->t->color ? DIM : "<think>\n", a->thoughts);
    a->thinking = true;
    fwrite(text, 1, len, a->thoughts);
    fflush(a->thoughts);
}

static void on_event(void *arg, const struct chat_event *e)
{
    struct answer *a = arg;
    chat_message_event(&a->message, e);
    switch (e->type) {
    case CHAT_REASONING:
        show_thought(a, e->text, e->len);
        break;
    case CHAT_CONTENT:
        end_thinking(a);
        buf_add(&a->shown.held, e->text, e->len);
        stop_filter_flush(&a->shown, false);
        break;
    case CHAT_TOOL_BEGIN:
        end_thinking(a);
        printf("[tool call] %.*s(", (int)e->len, e->text);
        break;
    case CHAT_TOOL_ARGS:
        fwrite(e->text, 1, e->len, stdout);
        break;
    case CHAT_TOOL_END:
        printf(")\n");
        break;
    }
}

static bool on_text(void *arg, const char *text, size_t len)
{
    struct answer *a = arg;
    chat_parser_push(a->parser, text, len);
    return !a->shown.stopped;
}

/* Generates the answer to the conversation as it stands; appends it as a message. */
static bool answer(struct terminal *t, FILE *thoughts, struct error *err)
{
    struct buf prompt = {0};
    struct token_list ids = {0};
    settle_finish(t);
    bool ok = render(t, NULL, true, &prompt, err) && encode(t, &prompt, &ids, err);
    struct answer a = {.t = t, .thoughts = thoughts, .shown = {.stop = t->opt.stop}};
    if (ok) {
        struct chat_parse_options parse = {.reasoning = true,
                                           .in_reasoning =
                                               chat_opens_reasoning(prompt.p, prompt.len),
                                           .event = on_event,
                                           .arg = &a};
        a.parser = chat_parser_new(chat_answer_format(t->chat, false), &parse);
        t->last = (struct generation){.context = &t->context,
                                      .sample = &t->opt.sample,
                                      .n_predict = t->opt.n_predict,
                                      .special = true,
                                      .on_text = on_text,
                                      .arg = &a};
        ok = generate(&t->last, ids.ids, (int)ids.n, err);
        chat_parser_finish(a.parser);
        if (!a.shown.stopped)
            stop_filter_flush(&a.shown, true);
        end_thinking(&a);
        if (ok && t->last.n_generated)
            json_array_append_new(t->messages, chat_message_json(&a.message));
        chat_parser_free(a.parser);
        buf_clear(&a.shown.held);
        chat_message_clear(&a.message);
    }
    token_list_clear(&ids);
    buf_clear(&prompt);
    return ok;
}

/* Commands */

static void cmd_help_text(struct terminal *t, const char *arg);

static void cmd_clear(struct terminal *t, const char *arg)
{
    (void)arg;
    json_array_clear(t->messages);
    context_clear(&t->context);
    printf("the conversation is empty again\n");
}

static void cmd_system(struct terminal *t, const char *arg)
{
    if (!*arg) {
        printf("%s\n", t->system ? t->system : "(no system prompt)");
        return;
    }
    mem_free(t->system);
    t->system = strcmp(arg, "none") ? mem_strdup(arg) : NULL;
    printf("system prompt %s\n", t->system ? "set" : "removed");
}

static void cmd_think(struct terminal *t, const char *arg)
{
    static const char *const modes[] = {
        [THINK_ON] = "on", [THINK_OFF] = "off", [THINK_HIDE] = "hide"};
    for (int i = 0; i < 3; i++)
        if (!strcmp(arg, modes[i]))
            t->opt.think = (enum think_mode)i;
    printf("thinking is %s (on, off or hide)\n", modes[t->opt.think]);
}

static void cmd_set(struct terminal *t, const char *arg)
{
    struct sample_params *p = &t->opt.sample;
    const struct {
        const char *name;
        float *f;
        int *i;
        double lo, hi;
    } params[] = {
        {"temp", &p->temp, NULL, 0, 100},
        {"top_k", NULL, &p->top_k, 0, 1 << 28},
        {"top_p", &p->top_p, NULL, 0, 1},
        {"min_p", &p->min_p, NULL, 0, 1},
        {"repeat_penalty", &p->repeat_penalty, NULL, 0.01, 100},
        {"presence_penalty", &p->presence_penalty, NULL, -100, 100},
        {"frequency_penalty", &p->frequency_penalty, NULL, -100, 100},
        {"max_tokens", NULL, &t->opt.n_predict, -1, 1 << 28},
    };
    char name[32] = "", value[64] = "";
    int n = sscanf(arg, "%31s %63s", name, value);
    if (n == 2 && !strcmp(name, "seed")) {
        p->seed = strtoull(value, NULL, 10);
        printf("seed = %llu\n", (unsigned long long)p->seed);
        return;
    }
    if (n == 2 && !strcmp(name, "verbose")) {
        t->opt.verbose = !strcmp(value, "on");
        printf("verbose = %s\n", t->opt.verbose ? "on" : "off");
        return;
    }
    bool found = false;
    for (size_t i = 0; i < sizeof params / sizeof *params; i++) {
        if (n >= 1 && strcmp(name, params[i].name))
            continue;
        found = true;
        char *end = value;
        double v = n == 2 ? strtod(value, &end) : 0;
        if (n == 2 && (end == value || *end || v < params[i].lo || v > params[i].hi))
            printf("%s takes a number in %g..%g\n", name, params[i].lo, params[i].hi);
        else if (n == 2 && params[i].f)
            *params[i].f = (float)v;
        else if (n == 2 && params[i].i)
            *params[i].i = (int)v;
        printf("%s = %g\n", params[i].name,
               params[i].f   ? (double)*params[i].f
               : params[i].i ? (double)*params[i].i
                             : 0);
    }
    if (n < 1)
        printf("seed = %llu\nverbose = %s\n", (unsigned long long)p->seed,
               t->opt.verbose ? "on" : "off");
    else if (!found)
        printf("no setting '%s'; /set lists them\n", name);
}

static void cmd_show_model(struct terminal *t, const char *arg)
{
    (void)arg;
    const struct config *c = &t->rt->model->config;
    char size[16];
    printf("%s: %s, %.2f B parameters (%.2f B active), %s, backend %s\n", t->rt->file->path,
           c->arch_name, (double)t->rt->model->n_params * 1e-9,
           (double)t->rt->model->n_active * 1e-9, cli_bytes((double)t->rt->model->bytes, size),
           t->rt->be->ops->name);
    printf("context %d tokens, %d in use; %zu messages\n", t->rt->context, t->context.seq.n_tokens,
           json_array_size(t->messages));
    cmd_system(t, "");
}

static void cmd_save(struct terminal *t, const char *arg)
{
    if (!*arg) {
        printf("usage: /save FILE\n");
        return;
    }
    json_t *o = json_pack("{s:s?, s:O}", "system", t->system, "messages", t->messages);
    if (json_dump_file(o, arg, JSON_INDENT(2)) == 0)
        printf("saved to %s\n", arg);
    else
        printf("%s: cannot write: %s\n", arg, strerror(errno));
    json_decref(o);
}

static void cmd_load(struct terminal *t, const char *arg)
{
    struct error err = {0};
    json_t *o = *arg ? json_load_path(arg, (size_t)64 << 20, &err) : NULL;
    if (!*arg)
        printf("usage: /load FILE\n");
    if (!o) {
        if (*arg)
            printf("%s\n", err.msg);
        return;
    }
    json_t *messages = json_object_get(o, "messages");
    const char *system = json_string_value(json_object_get(o, "system"));
    bool ok = json_is_array(messages);
    for (size_t i = 0; ok && i < json_array_size(messages); i++)
        ok = json_is_string(json_object_get(json_array_get(messages, i), "role"));
    if (ok) {
        json_decref(t->messages);
        t->messages = json_incref(messages);
        mem_free(t->system);
        t->system = system ? mem_strdup(system) : NULL;
        printf("%zu messages loaded\n", json_array_size(t->messages));
    } else {
        printf("%s: messages: not an array of messages with roles\n", arg);
    }
    json_decref(o);
}

/* Removes the last answer, and with `question` what it answered. True if there was one. */
static bool drop_turn(struct terminal *t, bool question)
{
    size_t n = json_array_size(t->messages);
    if (!n)
        return false;
    while (n &&
           strcmp(json_string_value(json_object_get(json_array_get(t->messages, n - 1), "role")),
                  "user"))
        json_array_remove(t->messages, --n);
    if (question && n)
        json_array_remove(t->messages, n - 1);
    return question || n > 0;
}

static void cmd_undo(struct terminal *t, const char *arg)
{
    (void)arg;
    printf(drop_turn(t, true) ? "the last turn is gone\n" : "nothing to undo\n");
}

static void reply(struct terminal *t)
{
    struct error err = {0};
    cli_clear_interrupt();
    bool ok = answer(t, stdout, &err);
    style(t, PLAIN);
    printf("\n");
    if (cli_interrupted())
        printf("%s(stopped)%s\n", t->color ? DIM : "", t->color ? PLAIN : "");
    cli_clear_interrupt();
    if (!ok)
        printf("steel: %s\n", err.msg);
    else if (t->opt.verbose) {
        style(t, DIM);
        generation_print(&t->last, stdout);
        style(t, PLAIN);
        printf("\n");
    }
    printf("\n");
    fflush(stdout);
    settle_start(t);
}

static void cmd_retry(struct terminal *t, const char *arg)
{
    (void)arg;
    if (!drop_turn(t, false)) {
        printf("nothing to retry\n");
        return;
    }
    t->opt.sample.seed++; /* another answer, still reproducible */
    reply(t);
}

static void cmd_tokens(struct terminal *t, const char *arg)
{
    (void)arg;
    if (t->last.n_generated) {
        generation_print(&t->last, stdout);
        printf("\n");
    }
    printf("context %d of %d tokens\n", t->context.seq.n_tokens, t->rt->context);
}

static void cmd_bye(struct terminal *t, const char *arg)
{
    (void)arg;
    t->quit = true;
}

static const struct {
    const char *name, *args, *about;
    void (*run)(struct terminal *t, const char *arg);
} commands[] = {
    {"help", "", "this list", cmd_help_text},
    {"clear", "", "forget the conversation", cmd_clear},
    {"system", "[TEXT]", "show or set the system prompt ('none' removes it)", cmd_system},
    {"think", "on|off|hide", "think aloud, not at all, or unseen", cmd_think},
    {"set", "[NAME VALUE]",
     "show or change sampling: temp, top_k, top_p, min_p, seed, verbose, ...", cmd_set},
    {"show", "", "the model and the state of the chat", cmd_show_model},
    {"save", "FILE", "keep the conversation as JSON", cmd_save},
    {"load", "FILE", "take up a saved conversation", cmd_load},
    {"retry", "", "answer the last message again, differently", cmd_retry},
    {"undo", "", "take back the last turn", cmd_undo},
    {"tokens", "", "tokens and speed of the last turn", cmd_tokens},
    {"bye", "", "leave (also Ctrl-D)", cmd_bye},
};

static void cmd_help_text(struct terminal *t, const char *arg)
{
    (void)arg;
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        char left[40];
        snprintf(left, sizeof left, "/%s %s", commands[i].name, commands[i].args);
        style(t, BOLD);
        printf("  %-20s", left);
        style(t, PLAIN);
        printf(" %s\n", commands[i].about);
    }
    printf(
        "  Ctrl-C stops an answer. A message of several lines stands between \"\"\" and \"\"\",\n"
        "  or ends each line but the last in a backslash.\n");
}

static void run_command(struct terminal *t, const char *line)
{
    char name[16];
    size_t n = strcspn(line + 1, " \t");
    snprintf(name, sizeof name, "%.*s", (int)n, line + 1);
    const char *arg = line + 1 + n;
    arg += strspn(arg, " \t");
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (!strcmp(name, commands[i].name)) {
            settle_finish(t);
            commands[i].run(t, arg);
            return;
        }
    printf("no command /%s; /help lists them\n", name);
}

static char *history_path(void)
{
    const char *home = getenv("HOME");
    if (!home || !*home)
        return NULL;
    struct buf b = {0};
    buf_addf(&b, "%s/.steel_history", home);
    return buf_take(&b);
}

static bool terminal_init(struct terminal *t, struct runtime *rt,
                          const struct terminal_options *opt, struct error *err)
{
    *t = (struct terminal){.rt = rt, .opt = *opt, .context = {.rt = rt}, .color = use_color()};
    struct chat_source source = {0};
    if (!chat_source_load(rt->file, &source, err))
        return false;
    t->chat = chat_new(&source, err);
    chat_source_clear(&source);
    if (!t->chat)
        return false;
    t->messages = json_array();
    t->system = opt->system ? mem_strdup(opt->system) : NULL;
    return true;
}

static void terminal_clear(struct terminal *t)
{
    settle_finish(t);
    context_clear(&t->context);
    token_list_clear(&t->settled);
    chat_free(t->chat);
    json_decref(t->messages);
    mem_free(t->system);
}

bool terminal_can_chat(const struct runtime *rt)
{
    struct chat_source source = {0};
    struct error ignored = {0};
    bool ok = chat_source_load(rt->file, &source, &ignored);
    chat_source_clear(&source);
    return ok;
}

int terminal_chat(struct runtime *rt, const struct terminal_options *opt)
{
    struct terminal t;
    struct error err = {0};
    if (!terminal_init(&t, rt, opt, &err)) {
        fprintf(stderr, "steel: %s\n", err.msg);
        return EXIT_FAIL;
    }
    char *history = history_path();
    t.input = lineedit_open(history);
    if (isatty(STDIN_FILENO))
        printf("%s. /help lists commands, Ctrl-D leaves.\n\n", rt->file->path);
    struct buf line = {0};
    while (!t.quit) {
        enum line_result r = lineedit_read(t.input, ">>> ", "... ", &line);
        if (r == LINE_END)
            break;
        if (r == LINE_INTERRUPTED || !line.len)
            continue;
        lineedit_remember(t.input, line.p);
        if (line.p[0] == '/') {
            run_command(&t, line.p);
            continue;
        }
        json_t *content = json_stringn(line.p, line.len);
        if (!content) {
            printf("that is not valid UTF-8\n");
            continue;
        }
        settle_finish(&t);
        json_array_append_new(t.messages,
                              json_pack("{s:s, s:o}", "role", "user", "content", content));
        reply(&t);
    }
    if (isatty(STDIN_FILENO) && !t.quit)
        printf("\n");
    buf_clear(&line);
    lineedit_close(t.input);
    mem_free(history);
    terminal_clear(&t);
    return EXIT_OK;
}

int terminal_ask(struct runtime *rt, const struct terminal_options *opt, const char *prompt,
                 struct generation *g, struct error *err)
{
    struct terminal t;
    if (!terminal_init(&t, rt, opt, err))
        return EXIT_FAIL;
    json_t *content = json_string(prompt);
    bool ok = content != NULL;
    if (!ok)
        error_set(err, "the prompt is not valid UTF-8");
    if (ok) {
        json_array_append_new(t.messages,
                              json_pack("{s:s, s:o}", "role", "user", "content", content));
        ok = answer(&t, stderr, err);
        fputc('\n', stdout);
        fflush(stdout);
        *g = t.last;
    }
    terminal_clear(&t);
    return ok ? EXIT_OK : EXIT_FAIL;
}
