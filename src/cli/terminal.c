/*
 * The chat terminal: a conversation of the library (steel.h) on a screen. Shows thinking, text and tool
 * calls as they come, runs the /commands, and has the conversation settled while the person reads
 * and types, so that a turn reads only what is new in it.
 */
#include "cli/terminal.h"
#include "cli/lineedit.h"
#include "base/mem.h"
#include "file/tensorfile.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct terminal {
    struct steel_engine *engine;
    struct steel_chat *chat;
    struct terminal_options opt;
    char *system;            /* NULL = none */
    struct steel_event last; /* the last turn's counters */
    struct lineedit *input;
    bool color;
    bool quit;
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

/* The answer on its way to the screen. */

struct answer {
    struct terminal *t;
    FILE *thoughts; /* stdout in a chat, stderr for one question */
    bool thinking, folded;
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

static void show(struct answer *a, const struct steel_chat_event *e)
{
    if (e->kind == STEEL_CHAT_THINKING) {
        show_thought(a, e->text, e->n_text);
        return;
    }
    if (e->kind != STEEL_CHAT_STARTED)
        end_thinking(a);
    if (e->kind == STEEL_CHAT_CALL)
        printf("[tool call] %.*s(", (int)e->n_text, e->text);
    else if (e->kind == STEEL_CHAT_CALL_END)
        printf(")\n");
    else if (e->n_text)
        fwrite(e->text, 1, e->n_text, stdout);
    fflush(stdout);
}

/* Generates the answer to the conversation as it stands, which it joins. */
static bool answer(struct terminal *t, FILE *thoughts, struct steel_error *err)
{
    struct steel_request_options o = t->opt.request;
    generate_limit(&o, t->opt.n_predict);
    steel_chat_set_thinking(t->chat, t->opt.think == THINK_OFF ? STEEL_THINK_OFF : STEEL_THINK_ON);
    struct steel_answer *stream = steel_chat_answer(t->chat, &o, err);
    if (!stream)
        return false;
    struct answer a = {.t = t, .thoughts = thoughts};
    struct steel_chat_event e = {0};
    bool cancelled = false;
    while (e.kind != STEEL_CHAT_DONE) {
        if (cli_interrupted() && !cancelled) {
            steel_answer_cancel(stream);
            cancelled = true;
        }
        if (steel_answer_next(stream, &e, INTERRUPT_MS))
            show(&a, &e);
    }
    bool ok = generate_ended(t->engine, &o, &e.end, err);
    t->last = e.end;
    t->last.error = NULL; /* it dies with the answer */
    steel_answer_free(stream);
    return ok;
}

/* Commands */

static void cmd_help_text(struct terminal *t, const char *arg);

static void cmd_clear(struct terminal *t, const char *arg)
{
    (void)arg;
    steel_chat_cut(t->chat, 0);
    t->last = (struct steel_event){0};
    printf("the conversation is empty again\n");
}

static bool set_system(struct terminal *t, const char *text, struct steel_error *err)
{
    if (!steel_chat_set_system(t->chat, text, err))
        return false;
    char *copy = text ? mem_strdup(text) : NULL;
    mem_free(t->system);
    t->system = copy;
    return true;
}

static void cmd_system(struct terminal *t, const char *arg)
{
    if (!*arg) {
        printf("%s\n", t->system ? t->system : "(no system prompt)");
        return;
    }
    struct steel_error err = {0};
    if (!set_system(t, strcmp(arg, "none") ? arg : NULL, &err))
        printf("%s\n", err.message);
    else
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
    struct steel_request_options *p = &t->opt.request;
    const struct {
        const char *name;
        float *f;
        int *i;
        double lo, hi;
    } params[] = {
        {"temp", &p->temperature, NULL, 0, 100},
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
    struct steel_info m;
    steel_engine_info(t->engine, &m);
    char size[16];
    printf("%s: %s, %.2f B parameters (%.2f B active), %s, backend %s\n", m.path, m.family,
           (double)m.n_params * 1e-9, (double)m.n_active * 1e-9, cli_bytes((double)m.bytes, size),
           m.device);
    printf("context %d tokens, %d in use; %d messages\n", steel_engine_context(t->engine),
           t->last.n_prompt + t->last.n_generated, steel_chat_n_messages(t->chat));
    cmd_system(t, "");
}

/* The messages as JSON; heap. */
static char *messages_text(const struct terminal *t)
{
    int n = steel_chat_json(t->chat, 0, NULL, 0);
    CHECK(n >= 0, "a conversation without JSON");
    char *text = mem_alloc((size_t)n + 1);
    steel_chat_json(t->chat, 0, text, n + 1);
    return text;
}

static void cmd_save(struct terminal *t, const char *arg)
{
    if (!*arg) {
        printf("usage: /save FILE\n");
        return;
    }
    char *text = messages_text(t);
    json_t *o =
        json_pack("{s:s?, s:o}", "system", t->system, "messages", json_loads(text, 0, NULL));
    if (json_dump_file(o, arg, JSON_INDENT(2)) == 0)
        printf("saved to %s\n", arg);
    else
        printf("%s: cannot write: %s\n", arg, strerror(errno));
    json_decref(o);
    mem_free(text);
}

/* The messages in place of those there are; none or all. */
static bool replace_messages(struct terminal *t, const char *json, struct steel_error *err)
{
    char *before = messages_text(t);
    steel_chat_cut(t->chat, 0);
    bool ok = steel_chat_add_json(t->chat, json, err);
    if (!ok)
        steel_chat_add_json(t->chat, before, NULL);
    mem_free(before);
    return ok;
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
    const char *system = json_string_value(json_object_get(o, "system"));
    char *text = json_dumps(json_object_get(o, "messages"), JSON_COMPACT | JSON_ENCODE_ANY);
    struct steel_error e = {0};
    if (!text)
        printf("%s: messages: missing\n", arg);
    else if (!replace_messages(t, text, &e) || !set_system(t, system, &e))
        printf("%s: %s\n", arg, e.message);
    else
        printf("%d messages loaded\n", steel_chat_n_messages(t->chat));
    free(text);
    json_decref(o);
}

/* Removes the last answer, and with `question` what it answered. True if there was one. */
static bool drop_turn(struct terminal *t, bool question)
{
    int n = steel_chat_n_messages(t->chat);
    if (!n)
        return false;
    while (n && strcmp(steel_chat_role(t->chat, n - 1), "user"))
        n--;
    steel_chat_cut(t->chat, question && n ? n - 1 : n);
    return question || n > 0;
}

static void cmd_undo(struct terminal *t, const char *arg)
{
    (void)arg;
    printf(drop_turn(t, true) ? "the last turn is gone\n" : "nothing to undo\n");
}

static void reply(struct terminal *t)
{
    struct steel_error err = {0};
    cli_clear_interrupt();
    bool ok = answer(t, isatty(STDOUT_FILENO) ? stdout : stderr, &err);
    style(t, PLAIN);
    printf("\n");
    if (cli_interrupted())
        printf("%s(stopped)%s\n", t->color ? DIM : "", t->color ? PLAIN : "");
    cli_clear_interrupt();
    if (!ok)
        printf("steel: %s\n", err.message);
    else if (t->opt.verbose) {
        style(t, DIM);
        generation_print(&t->last, stdout);
        style(t, PLAIN);
        printf("\n");
    }
    printf("\n");
    fflush(stdout);
    steel_chat_settle(t->chat);
}

static void cmd_retry(struct terminal *t, const char *arg)
{
    (void)arg;
    if (!drop_turn(t, false)) {
        printf("nothing to retry\n");
        return;
    }
    t->opt.request.seed++; /* another answer, still reproducible */
    reply(t);
}

static void cmd_tokens(struct terminal *t, const char *arg)
{
    (void)arg;
    if (t->last.n_generated) {
        generation_print(&t->last, stdout);
        printf("\n");
    }
    printf("context %d of %d tokens\n", t->last.n_prompt + t->last.n_generated,
           steel_engine_context(t->engine));
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

static bool terminal_init(struct terminal *t, struct steel_engine *engine,
                          const struct terminal_options *opt, struct steel_error *err)
{
    *t = (struct terminal){.engine = engine, .opt = *opt, .color = use_color()};
    t->chat = steel_chat_new(engine, NULL, err);
    return t->chat && set_system(t, opt->system, err);
}

static void terminal_clear(struct terminal *t)
{
    steel_chat_free(t->chat);
    mem_free(t->system);
}

bool terminal_chat(struct steel_engine *engine, const struct terminal_options *opt,
                   struct steel_error *err)
{
    struct terminal t;
    if (!terminal_init(&t, engine, opt, err)) {
        terminal_clear(&t);
        return false;
    }
    char *history = history_path();
    t.input = lineedit_open(history);
    struct steel_info info;
    steel_engine_info(engine, &info);
    if (isatty(STDIN_FILENO))
        printf("%s. /help lists commands, Ctrl-D leaves.\n\n", info.path);
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
        struct steel_error e = {0};
        struct steel_message m = {.role = "user", .content = line.p};
        if (steel_chat_add(t.chat, &m, &e))
            reply(&t);
        else
            printf("%s\n", e.message);
    }
    if (isatty(STDIN_FILENO) && !t.quit)
        printf("\n");
    buf_clear(&line);
    lineedit_close(t.input);
    mem_free(history);
    terminal_clear(&t);
    return true;
}

bool terminal_ask(struct steel_engine *engine, const struct terminal_options *opt,
                  const char *prompt, struct steel_event *end, struct steel_error *err)
{
    struct terminal t;
    struct steel_message m = {.role = "user", .content = prompt};
    bool ok = terminal_init(&t, engine, opt, err) && steel_chat_add(t.chat, &m, err);
    if (ok) {
        ok = answer(&t, stderr, err);
        fputc('\n', stdout);
        fflush(stdout);
        *end = t.last;
    }
    terminal_clear(&t);
    return ok;
}
