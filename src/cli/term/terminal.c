/*
 * The chat terminal: a conversation of the library (steel.h) on a screen. Shows thinking, text and
 * tool calls as they are generated, runs the /commands (terminal_commands.c), and calls
 * steel_chat_settle after each answer, so that the next turn reads only what is new in it.
 */
#include "cli/term/drop.h"
#include "cli/term/terminal_int.h"
#include "cli/plain.h"
#include "base/clock.h"
#include "base/mem.h"

#include <langinfo.h>
#include <locale.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char DIM[] = "\033[2m", PLAIN[] = "\033[0m";

static bool use_color(void)
{
    const char *none = getenv("NO_COLOR"), *term = getenv("TERM");
    return isatty(STDOUT_FILENO) && !(none && *none) && term && strcmp(term, "dumb") != 0;
}

/* Whether the terminal takes hyperlinks (OSC 8). Terminals cannot be asked, so known ones are
 * recognised by their variables. FORCE_HYPERLINK (0 or 1) decides for others. */
static bool takes_links(void)
{
    static const char *const programs[] = {"iTerm.app", "WezTerm", "ghostty", "vscode", "Hyper"};
    static const char *const terms[] = {"xterm-kitty", "alacritty", "foot", "xterm-ghostty"};
    static const struct {
        const char *variable;
        double least;
    } versions[] = {{"VTE_VERSION", 5000}, {"KONSOLE_VERSION", 201200}};
    const char *forced = getenv("FORCE_HYPERLINK"), *program = getenv("TERM_PROGRAM");
    const char *version = getenv("TERM_PROGRAM_VERSION"), *term = getenv("TERM");
    if (forced && *forced)
        return strcmp(forced, "0") != 0;
    if (getenv("STY")) /* GNU screen */
        return false;
    if (program && !strcmp(program, "tmux"))
        return version && strtod(version, NULL) >= 3.4;
    for (size_t i = 0; program && i < sizeof programs / sizeof *programs; i++)
        if (!strcmp(program, programs[i]))
            return true;
    for (size_t i = 0; term && i < sizeof terms / sizeof *terms; i++)
        if (!strcmp(term, terms[i]))
            return true;
    for (size_t i = 0; i < sizeof versions / sizeof *versions; i++) {
        const char *v = getenv(versions[i].variable);
        if (v && strtod(v, NULL) >= versions[i].least)
            return true;
    }
    return getenv("WT_SESSION") != NULL; /* Windows Terminal */
}

/* True if box characters can be shown. Without a locale, a modern terminal is assumed. */
static bool is_utf8(void)
{
    const char *vars[] = {getenv("LC_ALL"), getenv("LC_CTYPE"), getenv("LANG")};
    setlocale(LC_CTYPE, "");
    bool utf8 = strcmp(nl_langinfo(CODESET), "UTF-8") == 0, said = false;
    for (int i = 0; i < 3; i++)
        said = said || (vars[i] && *vars[i]);
    if (!utf8)
        setlocale(LC_CTYPE, "C.UTF-8"); /* models generate UTF-8 in any locale */
    return utf8 || !said;
}

static void to_file(void *arg, const char *p, size_t n)
{
    fwrite(p, 1, n, arg);
}

struct markdown_options terminal_look(const struct terminal *t)
{
    return (struct markdown_options){.columns = t->screen ? cli_columns() : 1 << 20,
                                     .styles = t->color,
                                     .links = t->links,
                                     .unicode = t->unicode,
                                     .write = to_file,
                                     .arg = stdout};
}

static void say(const struct terminal *t, bool dim, const char *fmt, va_list ap)
{
    struct markdown_options look = terminal_look(t);
    va_list again;
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, again);
    va_end(again);
    char *p = mem_alloc((size_t)n + 1);
    vsnprintf(p, (size_t)n + 1, fmt, ap);
    look.dim = dim;
    for (char *line = p, *next; line; line = next) {
        next = strchr(line, '\n');
        if (next)
            *next++ = 0;
        markdown_wrap(&look, "", (int)strspn(line, " "), line + strspn(line, " "));
    }
    mem_free(p);
    fflush(stdout);
}

void terminal_say(const struct terminal *t, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    say(t, false, fmt, ap);
    va_end(ap);
}

void terminal_aside(const struct terminal *t, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    say(t, true, fmt, ap);
    va_end(ap);
}

struct steel_request_options terminal_sampling(const struct terminal *t)
{
    struct steel_request_options o = t->opt.request;
    generate_advise(&o, t->engine);
    generate_limit(&o, t->opt.n_predict);
    return o;
}

/* Display of an answer */

struct answer_view {
    struct terminal *t;
    FILE *thoughts;                  /* stream for thinking */
    struct markdown *text, *thought; /* NULL: unchanged text */
    bool live;                       /* thoughts is a terminal: say how long thinking takes */
    bool thinking;
    int64_t since; /* when thinking began */
    int shown_s;   /* the seconds in the line that tells them */
};

static void write_text(struct markdown *m, FILE *out, const char *p, size_t n)
{
    if (m) {
        markdown_columns(m, cli_columns());
        markdown_feed(m, p, n);
    } else
        plain_print(out, p, n);
    fflush(out);
}

static void end_text(struct markdown *m, FILE *out)
{
    if (m)
        markdown_end(m);
    fflush(out);
}

static void print_dim(const struct answer_view *a, const char *text)
{
    fprintf(a->thoughts, "%s%s%s", a->t->color ? DIM : "", text, a->t->color ? PLAIN : "");
}

/* While thinking is hidden, its line shows the seconds. */
static void show_waiting(struct answer_view *a)
{
    char line[64];
    int s = (int)((clock_ns() - a->since) / 1000000000);
    if (!a->live || !a->thinking || a->t->opt.think != THINK_HIDE || !a->t->color ||
        s == a->shown_s || cli_columns() < 24)
        return;
    a->shown_s = s;
    snprintf(line, sizeof line, "Thinking... %d s", s);
    fputs("\r\033[K", a->thoughts);
    print_dim(a, line);
    fflush(a->thoughts);
}

static void begin_thinking(struct answer_view *a)
{
    bool hidden = a->t->opt.think == THINK_HIDE;
    a->thinking = true;
    a->since = clock_ns();
    a->shown_s = 0;
    if (a->live) {
        print_dim(a, "Thinking...");
        fputs(hidden && a->t->color ? "" : "\n", a->thoughts);
    } else if (!hidden)
        fputs("<think>\n", a->thoughts);
    if (a->live && !hidden && !a->thought && a->t->color)
        fputs(DIM, a->thoughts);
}

static void end_thinking(struct answer_view *a)
{
    char line[64];
    bool hidden = a->t->opt.think == THINK_HIDE;
    if (!a->thinking)
        return;
    a->thinking = false;
    end_text(hidden ? NULL : a->thought, a->thoughts);
    snprintf(line, sizeof line, "Thought for %.1f s", (double)(clock_ns() - a->since) * 1e-9);
    if (a->live) {
        fputs(!hidden ? "\n" : a->t->color ? "\r\033[K" : "", a->thoughts);
        print_dim(a, line);
        fputs("\n\n", a->thoughts);
    } else if (!hidden)
        fputs("\n</think>\n\n", a->thoughts);
    fflush(a->thoughts);
}

static void show_thought(struct answer_view *a, const char *text, size_t len)
{
    if (!a->thinking)
        begin_thinking(a);
    if (a->t->opt.think != THINK_HIDE)
        write_text(a->thought, a->thoughts, text, len);
    fflush(a->thoughts);
}

static void show(struct answer_view *a, const struct steel_chat_event *e)
{
    if (e->kind == STEEL_CHAT_THINKING) {
        show_thought(a, e->text, e->n_text);
        return;
    }
    if (e->kind != STEEL_CHAT_STARTED)
        end_thinking(a);
    if (e->kind == STEEL_CHAT_CALL) {
        end_text(a->text, stdout);
        fputs("[tool call] ", stdout);
        plain_print(stdout, e->text, e->n_text);
        fputc('(', stdout);
    } else if (e->kind == STEEL_CHAT_CALL_END)
        printf(")\n");
    else if (e->kind == STEEL_CHAT_CALL_BROKEN)
        printf("... no call, as the model wrote it:\n");
    else if (e->kind == STEEL_CHAT_TEXT)
        write_text(a->text, stdout, e->text, e->n_text);
    else if (e->n_text)
        plain_print(stdout, e->text, e->n_text);
    if (e->kind == STEEL_CHAT_DONE)
        end_text(a->text, stdout);
    fflush(stdout);
}

/* Renders text as markdown and thinking as plain wrapped text, each only on a terminal. */
static void open_renderers(struct answer_view *a)
{
    struct terminal *t = a->t;
    struct markdown_options look = terminal_look(t);
    a->live = t->screen && isatty(fileno(a->thoughts));
    if (t->opt.plain || !t->screen)
        return;
    a->text = markdown_new(&look);
    look.plain = look.dim = true;
    look.arg = a->thoughts;
    if (a->live)
        a->thought = markdown_new(&look);
}

/* Generates and shows the answer, which is appended to the conversation. */
static bool answer(struct terminal *t, FILE *thoughts, struct steel_error *err)
{
    struct steel_request_options o = terminal_sampling(t);
    struct steel_answer *stream = steel_chat_answer(t->chat, &o, err);
    if (!stream)
        return false;
    struct answer_view a = {.t = t, .thoughts = thoughts};
    struct steel_chat_event e = {0};
    bool cancelled = false;
    open_renderers(&a);
    while (e.kind != STEEL_CHAT_DONE) {
        /* If the output fails, the rest is useless; main reports the failure. */
        if ((cli_interrupted() || ferror(stdout)) && !cancelled) {
            steel_answer_cancel(stream);
            cancelled = true;
        }
        if (steel_answer_next(stream, &e, INTERRUPT_MS))
            show(&a, &e);
        show_waiting(&a);
    }
    bool ok = generate_ended(t->engine, &o, &e.end, err);
    t->last = e.end;
    t->last.error = NULL; /* valid until the answer is freed */
    steel_answer_free(stream);
    markdown_free(a.text);
    markdown_free(a.thought);
    return ok;
}

bool terminal_set_system(struct terminal *t, const char *text, struct steel_error *err)
{
    if (!steel_chat_set_system(t->chat, text, err))
        return false;
    char *copy = text ? mem_strdup(text) : NULL;
    mem_free(t->system);
    t->system = copy;
    return true;
}

/* Prints speed and remaining context in one dim line. */
static void show_status(const struct terminal *t)
{
    const struct steel_event *e = &t->last;
    int left = steel_engine_context(t->engine) - e->n_prompt - e->n_generated;
    double s = e->total_s - e->first_token_s;
    if (t->opt.verbose) {
        struct buf b = {0};
        generation_describe(e, &b);
        terminal_aside(t, "%s", b.p);
        buf_clear(&b);
    } else if (t->screen && !t->opt.quiet && e->n_generated > 1 && s > 0)
        terminal_aside(t, "%.*f tok/s, %d tokens left",
                       (e->n_generated - 1) / s<10, (e->n_generated - 1) / s, left> 0 ? left : 0);
}

void terminal_reply(struct terminal *t)
{
    struct steel_error err = {0};
    int n = steel_chat_n_messages(t->chat);
    steel_chat_set_thinking(t->chat, t->opt.think == THINK_OFF ? STEEL_THINK_OFF : STEEL_THINK_ON);
    cli_clear_interrupt();
    t->last = (struct steel_event){0};
    bool ok = terminal_make_room(t, &err);
    if (ok)
        ok = answer(t, t->screen ? stdout : stderr, &err);
    if (!ok && !t->last.n_prompt && n) { /* the answer never started: drop the message */
        steel_chat_cut(t->chat, steel_chat_n_messages(t->chat) - 1);
        terminal_say(t, "steel: %s", err.message);
        printf("\n");
        fflush(stdout);
        return;
    }
    printf("%s\n", t->color ? PLAIN : "");
    if (cli_interrupted())
        terminal_aside(t, "(stopped)");
    cli_clear_interrupt();
    if (!ok)
        terminal_say(t, "steel: %s", err.message);
    else
        show_status(t);
    printf("\n");
    fflush(stdout);
    steel_chat_settle(t->chat);
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
    *t = (struct terminal){.engine = engine,
                           .opt = *opt,
                           .color = use_color(),
                           .links = use_color() && takes_links(),
                           .screen = isatty(STDOUT_FILENO),
                           .unicode = is_utf8(),
                           .dropped = json_array()};
    t->chat = steel_chat_new(engine, opt->chat_template, err);
    return t->chat && steel_chat_set_format(t->chat, opt->format, err) &&
           terminal_set_system(t, opt->system, err);
}

static void terminal_clear(struct terminal *t)
{
    steel_chat_free(t->chat);
    json_decref(t->dropped);
    mem_free(t->system);
    mem_free(t->samplers);
}

/* Takes the pictures that were dropped on a line out of it: they belong to its message, or to the next one if nothing else
 * is left. False: one cannot be read. */
static bool take_pictures(struct terminal *t, struct buf *line)
{
    struct buf path = {0}, rest = {0};
    struct steel_error err = {0};
    bool ok = true, after_space = true;
    int n = 0;
    for (const char *at = line->p; ok && *at;) {
        size_t len = after_space ? drop_path(at, &path) : 0;
        if (len) {
            ok = terminal_add_image(t, path.p, &err);
            n++;
            at += len + (at[len] == ' ');
            continue;
        }
        after_space = *at == ' ';
        buf_addc(&rest, *at++);
    }
    while (n && rest.len && rest.p[rest.len - 1] == ' ')
        rest.p[--rest.len] = 0;
    if (!ok)
        terminal_say(t, "%s", err.message);
    else if (n && !rest.len)
        terminal_say(t,
                     n > 1 ? "%d pictures are part of your next message"
                           : "the picture is part of your next message",
                     n);
    if (n) {
        buf_clear(line);
        *line = rest;
        rest = (struct buf){0};
    }
    buf_clear(&rest);
    buf_clear(&path);
    return ok;
}

/* Reads messages and commands until /bye or the end of input. */
static void talk(struct terminal *t)
{
    struct buf line = {0};
    while (!t->quit) {
        enum line_result r = lineedit_read(t->input, ">>> ", "... ", &line);
        if (r == LINE_END)
            break;
        if (r == LINE_INTERRUPTED || !line.len)
            continue;
        lineedit_remember(t->input, line.p);
        struct buf path = {0};
        bool one_line = !strchr(line.p, '\n');
        bool command = line.p[0] == '/' && one_line && !drop_path(line.p, &path);
        buf_clear(&path);
        if (command) {
            terminal_command(t, line.p);
            continue;
        }
        if (one_line && (!take_pictures(t, &line) || !line.len))
            continue;
        struct steel_error e = {0};
        struct steel_message m = {.role = "user", .content = line.p};
        if (steel_chat_add(t->chat, &m, &e))
            terminal_reply(t);
        else
            terminal_say(t, "%s", e.message);
    }
    buf_clear(&line);
}

bool terminal_add_image(struct terminal *t, const char *path, struct steel_error *err)
{
    enum { MAX_FILE = 64 << 20 };
    struct buf bytes = {0};
    struct error e = {0};
    bool ok = cli_read_file(path, MAX_FILE, &bytes, &e);
    if (!ok)
        snprintf(err->message, sizeof err->message, "%s", e.msg);
    ok = ok && steel_chat_add_image(t->chat, bytes.p, bytes.len, err);
    buf_clear(&bytes);
    return ok;
}

/* The images of the options belong to the first message. */
static bool add_images(struct terminal *t, struct steel_error *err)
{
    for (int i = 0; i < t->opt.n_images; i++)
        if (!terminal_add_image(t, t->opt.images[i], err))
            return false;
    return true;
}

bool terminal_chat(struct steel_engine **engine, const struct terminal_options *opt,
                   struct steel_error *err)
{
    struct terminal t;
    if (!terminal_init(&t, *engine, opt, err) || !add_images(&t, err)) {
        terminal_clear(&t);
        return false;
    }
    char *history = history_path();
    t.input = lineedit_open(history);
    lineedit_complete(t.input, terminal_offer, &t);
    struct steel_info info;
    steel_engine_info(*engine, &info);
    if (isatty(STDIN_FILENO)) {
        terminal_say(&t, "%s. /help lists commands, Ctrl-D leaves.", info.path);
        printf("\n");
    }
    talk(&t);
    if (isatty(STDIN_FILENO) && !t.quit)
        printf("\n");
    lineedit_close(t.input);
    mem_free(history);
    terminal_clear(&t);
    *engine = t.engine;
    return true;
}

bool terminal_ask(struct steel_engine *engine, const struct terminal_options *opt,
                  const char *prompt, struct steel_event *end, struct steel_error *err)
{
    struct terminal t;
    struct steel_message m = {.role = "user", .content = prompt};
    bool ok = terminal_init(&t, engine, opt, err) && add_images(&t, err) &&
              steel_chat_add(t.chat, &m, err);
    if (ok) {
        steel_chat_set_thinking(t.chat, opt->think == THINK_OFF ? STEEL_THINK_OFF : STEEL_THINK_ON);
        ok = answer(&t, stderr, err);
        if (ok || t.last.n_generated)
            fputc('\n', stdout);
        fflush(stdout);
        *end = t.last;
    }
    terminal_clear(&t);
    return ok;
}
