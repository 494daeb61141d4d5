/* The /commands of the chat terminal and their completions. */
#include "cli/hub/hub.h"
#include "cli/term/terminal_int.h"
#include "base/mem.h"
#include "file/builtin.h"
#include "sample/sampler.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *const think_modes[] = {
    [THINK_ON] = "on", [THINK_OFF] = "off", [THINK_HIDE] = "hide", NULL};

static void cmd_help_text(struct terminal *t, const char *arg);

static void cmd_clear(struct terminal *t, const char *arg)
{
    (void)arg;
    steel_chat_cut(t->chat, 0);
    json_array_clear(t->dropped);
    t->last = (struct steel_event){0};
    terminal_say(t, "the conversation is cleared");
}

static void cmd_system(struct terminal *t, const char *arg)
{
    struct steel_error err = {0};
    if (!*arg)
        terminal_say(t, "%s", t->system ? t->system : "(no system prompt)");
    else if (!terminal_set_system(t, strcmp(arg, "none") ? arg : NULL, &err))
        terminal_say(t, "%s", err.message);
    else
        terminal_say(t, "system prompt %s", t->system ? "set" : "removed");
}

static void cmd_think(struct terminal *t, const char *arg)
{
    for (int i = 0; think_modes[i]; i++)
        if (!strcmp(arg, think_modes[i]))
            t->opt.think = (enum think_mode)i;
    terminal_say(t, "thinking is %s (on, off or hide)", think_modes[t->opt.think]);
}

/* Numeric settings. `used`: the effective value if the setting is not set. */
struct setting {
    const char *name;
    float *f, used_f;
    int *i, used_i;
    double lo, hi;
};
enum { N_NUMBERS = 22 };

static void list_settings(struct terminal *t, struct setting out[N_NUMBERS])
{
    struct steel_request_options *p = &t->opt.request, u = terminal_sampling(t);
    const struct setting all[N_NUMBERS] = {
        {"temp", &p->temperature, u.temperature, NULL, 0, 0, 100},
        {"top_k", NULL, 0, &p->top_k, u.top_k, 0, 1 << 28},
        {"top_p", &p->top_p, u.top_p, NULL, 0, 0, 1},
        {"min_p", &p->min_p, u.min_p, NULL, 0, 0, 1},
        {"repeat_penalty", &p->repeat_penalty, u.repeat_penalty, NULL, 0, 0.01, 100},
        {"presence_penalty", &p->presence_penalty, u.presence_penalty, NULL, 0, -100, 100},
        {"frequency_penalty", &p->frequency_penalty, u.frequency_penalty, NULL, 0, -100, 100},
        {"repeat_last_n", NULL, 0, &p->repeat_last_n, u.repeat_last_n, -1, 1 << 20},
        {"typical_p", &p->typical_p, u.typical_p, NULL, 0, 0, 1},
        {"top_n_sigma", &p->top_n_sigma, u.top_n_sigma, NULL, 0, -1, 100},
        {"xtc_probability", &p->xtc_probability, u.xtc_probability, NULL, 0, 0, 1},
        {"xtc_threshold", &p->xtc_threshold, u.xtc_threshold, NULL, 0, 0, 1},
        {"dynatemp_range", &p->dynatemp_range, u.dynatemp_range, NULL, 0, 0, 100},
        {"dynatemp_exponent", &p->dynatemp_exponent, u.dynatemp_exponent, NULL, 0, 0, 100},
        {"mirostat", NULL, 0, &p->mirostat, u.mirostat, 0, 2},
        {"mirostat_tau", &p->mirostat_tau, u.mirostat_tau, NULL, 0, 0, 100},
        {"mirostat_eta", &p->mirostat_eta, u.mirostat_eta, NULL, 0, 0, 1},
        {"dry_multiplier", &p->dry_multiplier, u.dry_multiplier, NULL, 0, 0, 100},
        {"dry_base", &p->dry_base, u.dry_base, NULL, 0, 1, 100},
        {"dry_allowed_length", NULL, 0, &p->dry_allowed_length, u.dry_allowed_length, 1, 1 << 20},
        {"dry_penalty_last_n", NULL, 0, &p->dry_last_n, u.dry_last_n, -1, 1 << 20},
        {"max_tokens", NULL, 0, &t->opt.n_predict, t->opt.n_predict, -1, 1 << 28},
    };
    memcpy(out, all, sizeof all);
}

/* Settings with named values. The first value is the default. */
struct word_setting {
    const char *name, *words[3];
    size_t at; /* offset of a bool in the options; 0: the overflow mode */
};
static const struct word_setting word_settings[] = {
    {"verbose", {"off", "on", NULL}, offsetof(struct terminal_options, verbose)},
    {"status", {"on", "off", NULL}, offsetof(struct terminal_options, quiet)},
    {"markdown", {"on", "off", NULL}, offsetof(struct terminal_options, plain)},
    {"overflow", {"drop", "error", NULL}, 0},
};
enum { N_WORDS = sizeof word_settings / sizeof *word_settings };

static void set_word(struct terminal *t, const struct word_setting *s, const char *value)
{
    bool *flag = s->at ? (bool *)((char *)&t->opt + s->at) : NULL;
    int now = flag ? *flag : (int)t->opt.overflow;
    for (int i = 0; value && s->words[i]; i++)
        if (!strcmp(value, s->words[i])) {
            now = i;
            value = NULL;
        }
    if (value)
        terminal_say(t, "%s is %s or %s", s->name, s->words[0], s->words[1]);
    if (flag)
        *flag = now;
    else
        t->opt.overflow = (enum overflow_mode)now;
    terminal_say(t, "%s = %s", s->name, s->words[now]);
}

static void set_number(struct terminal *t, struct setting *s, const char *value)
{
    char *end = NULL;
    double v = value ? strtod(value, &end) : 0;
    if (value && (end == value || *end || !(v >= s->lo && v <= s->hi)))
        terminal_say(t, "%s takes a number in %.15g..%.15g", s->name, s->lo, s->hi);
    else if (value && s->f)
        s->used_f = *s->f = (float)v;
    else if (value)
        s->used_i = *s->i = (int)v;
    if (s->f)
        terminal_say(t, "%s = %g", s->name, (double)s->used_f);
    else
        terminal_say(t, "%s = %d", s->name, s->used_i);
}

/* The order of the sampling stages; "default" is the usual one. NULL: shows it. */
static void set_samplers(struct terminal *t, const char *value)
{
    struct error err = {0};
    uint64_t order;
    if (value && strcmp(value, "default") != 0 && !sample_order_parse(value, &order, &err)) {
        terminal_say(t, "%s", err.msg);
    } else if (value) {
        mem_free(t->samplers);
        t->samplers = strcmp(value, "default") ? mem_strdup(value) : NULL;
        t->opt.request.samplers = t->samplers;
    }
    const char *now = t->opt.request.samplers;
    terminal_say(t, "samplers = %s", now ? now : "default");
}

static void cmd_set(struct terminal *t, const char *arg)
{
    struct setting numbers[N_NUMBERS];
    char name[32] = "", value[160] = "", *end;
    int n = sscanf(arg, "%31s %159s", name, value);
    bool found = n < 1;
    if (!strcmp(name, "think") || !strcmp(name, "nothink")) {
        cmd_think(t, n == 2 ? value : name[0] == 't' ? "on" : "off");
        return;
    }
    list_settings(t, numbers);
    for (int i = 0; i < N_NUMBERS; i++)
        if (n < 1 || !strcmp(name, numbers[i].name)) {
            set_number(t, &numbers[i], n == 2 ? value : NULL);
            found = true;
        }
    if (n < 1 || !strcmp(name, "seed")) {
        unsigned long long seed = strtoull(value, &end, 10);
        if (n == 2 && (*end || end == value || *value == '-'))
            terminal_say(t, "seed takes a number");
        else if (n == 2)
            t->opt.request.seed = seed;
        terminal_say(t, "seed = %llu", (unsigned long long)t->opt.request.seed);
        found = true;
    }
    if (n < 1 || !strcmp(name, "samplers")) {
        set_samplers(t, n == 2 ? value : NULL);
        found = true;
    }
    for (int i = 0; i < N_WORDS; i++)
        if (n < 1 || !strcmp(name, word_settings[i].name)) {
            set_word(t, &word_settings[i], n == 2 ? value : NULL);
            found = true;
        }
    if (!found)
        terminal_say(t, "no setting '%s'; /set lists them", name);
}

static void cmd_show_model(struct terminal *t, const char *arg)
{
    (void)arg;
    struct steel_info m;
    char size[16];
    steel_engine_info(t->engine, &m);
    terminal_say(t, "%s: %s, %.2f B parameters (%.2f B active), %s, backend %s", m.path, m.family,
                 (double)m.n_params * 1e-9, (double)m.n_active * 1e-9,
                 cli_bytes((double)m.bytes, size), m.device);
    terminal_say(t, "context %d tokens, %d in use; %d messages%s", steel_engine_context(t->engine),
                 t->last.n_prompt + t->last.n_generated, steel_chat_n_messages(t->chat),
                 json_array_size(t->dropped) ? ", older ones dropped" : "");
    cmd_system(t, "");
}

/* A path as typed by the user: expands ~. */
static char *typed_path(const char *arg)
{
    struct buf b = {0};
    const char *home = getenv("HOME");
    bool tilde = arg[0] == '~' && (arg[1] == '/' || !arg[1]) && home;
    buf_addf(&b, "%s%s", tilde ? home : "", tilde ? arg + 1 : arg);
    while (b.len > 1 && b.p[b.len - 1] == ' ')
        b.p[--b.len] = 0;
    return buf_take(&b);
}

/* Writes to a temporary file and renames it, so that a full disk does not destroy the previous
 * file. */
static bool save_json(const json_t *o, const char *path)
{
    struct stat st;
    if (lstat(path, &st) == 0 && !S_ISREG(st.st_mode))
        return json_dump_file(o, path, JSON_INDENT(2)) == 0;
    struct buf part = {0};
    buf_addf(&part, "%s.part", path);
    bool ok = json_dump_file(o, part.p, JSON_INDENT(2)) == 0 && rename(part.p, path) == 0;
    int why = errno;
    if (!ok)
        unlink(part.p);
    buf_clear(&part);
    errno = why;
    return ok;
}

static void cmd_save(struct terminal *t, const char *arg)
{
    if (!*arg) {
        terminal_say(t, "usage: /save FILE");
        return;
    }
    char *text = terminal_messages(t, 0), *path = typed_path(arg);
    json_t *messages = json_copy(t->dropped), *rest = json_loads(text, 0, NULL);
    json_array_extend(messages, rest);
    json_t *o = json_pack("{s:s?, s:o}", "system", t->system, "messages", messages);
    if (save_json(o, path))
        terminal_say(t, "saved to %s", path);
    else
        terminal_say(t, "%s: cannot write: %s", path, strerror(errno));
    json_decref(rest);
    json_decref(o);
    mem_free(text);
    mem_free(path);
}

static void cmd_load(struct terminal *t, const char *arg)
{
    struct error err = {0};
    if (!*arg) {
        terminal_say(t, "usage: /load FILE");
        return;
    }
    char *path = typed_path(arg);
    json_t *o = json_load_path(path, (size_t)64 << 20, &err);
    if (!o) {
        terminal_say(t, "%s", err.msg);
        mem_free(path);
        return;
    }
    const char *system = json_string_value(json_object_get(o, "system"));
    char *text = json_dumps(json_object_get(o, "messages"), JSON_COMPACT | JSON_ENCODE_ANY);
    struct steel_error e = {0};
    if (!text)
        terminal_say(t, "%s: messages: missing", path);
    else if (!terminal_replace(t, text, &e) || !terminal_set_system(t, system, &e))
        terminal_say(t, "%s: %s", path, e.message);
    else {
        json_array_clear(t->dropped);
        terminal_say(t, "%d messages loaded", steel_chat_n_messages(t->chat));
    }
    free(text);
    json_decref(o);
    mem_free(path);
}

/* Removes the last answer, and with `question` also the user's message. True if there was one. */
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
    terminal_say(t, drop_turn(t, true) ? "the last turn is removed" : "nothing to undo");
}

static void cmd_retry(struct terminal *t, const char *arg)
{
    (void)arg;
    if (!drop_turn(t, false)) {
        terminal_say(t, "nothing to retry");
        return;
    }
    t->opt.request.seed++; /* a different answer, still reproducible */
    terminal_reply(t);
}

static void cmd_tokens(struct terminal *t, const char *arg)
{
    (void)arg;
    if (t->last.n_generated) {
        generation_print(&t->last, stdout);
        printf("\n");
    }
    terminal_say(t, "context %d of %d tokens", t->last.n_prompt + t->last.n_generated,
                 steel_engine_context(t->engine));
}

static void cmd_image(struct terminal *t, const char *arg)
{
    struct steel_error err = {0};
    if (terminal_add_image(t, arg, &err))
        terminal_say(t, "%s is part of your next message", arg);
    else
        terminal_say(t, "%s", err.message);
}

static void cmd_bye(struct terminal *t, const char *arg)
{
    (void)arg;
    t->quit = true;
}

enum argument { ARG_NONE, ARG_FILE, ARG_MODEL, ARG_SETTING, ARG_THINK };

static const struct {
    const char *name, *args, *about; /* without `about`: not listed */
    void (*run)(struct terminal *t, const char *arg);
    enum argument arg;
} commands[] = {
    {"help", "", "list the commands", cmd_help_text, ARG_NONE},
    {"clear", "", "forget the conversation", cmd_clear, ARG_NONE},
    {"system", "[TEXT]", "show or set the system prompt ('none' removes it)", cmd_system, ARG_NONE},
    {"think", "on|off|hide", "show thinking, do not think, or hide it", cmd_think, ARG_THINK},
    {"set", "[NAME VALUE]",
     "show or change settings: temp, top_k, top_p, min_p, seed, status, markdown, ...", cmd_set,
     ARG_SETTING},
    {"model", "[NAME|FILE]", "list models, or switch to another", terminal_model, ARG_MODEL},
    {"show", "", "show the model and the state of the chat", cmd_show_model, ARG_NONE},
    {"save", "FILE", "save the conversation as JSON", cmd_save, ARG_FILE},
    {"load", "FILE", "load a saved conversation", cmd_load, ARG_FILE},
    {"image", "FILE", "add an image to your next message", cmd_image, ARG_FILE},
    {"retry", "", "answer the last message again, differently", cmd_retry, ARG_NONE},
    {"undo", "", "remove the last turn", cmd_undo, ARG_NONE},
    {"tokens", "", "show tokens and speed of the last turn", cmd_tokens, ARG_NONE},
    {"bye", "", "leave (also Ctrl-D)", cmd_bye, ARG_NONE},
    {"exit", "", NULL, cmd_bye, ARG_NONE},
    {"quit", "", NULL, cmd_bye, ARG_NONE},
    {"?", "", NULL, cmd_help_text, ARG_NONE},
};
enum { N_COMMANDS = sizeof commands / sizeof *commands };

static void cmd_help_text(struct terminal *t, const char *arg)
{
    (void)arg;
    struct markdown_options look = terminal_look(t);
    for (int i = 0; i < N_COMMANDS; i++) {
        char left[40];
        if (!commands[i].about)
            continue;
        snprintf(left, sizeof left, "/%s %s", commands[i].name, commands[i].args);
        markdown_wrap(&look, left, 20, commands[i].about);
    }
    markdown_wrap(&look, "", 0,
                  "Ctrl-C stops an answer, Tab completes. To enter a message of several lines, "
                  "paste it, put it "
                  "between \"\"\" and \"\"\", or end each line but the last with a backslash.");
}

void terminal_command(struct terminal *t, const char *line)
{
    char name[16];
    const char *words[N_COMMANDS];
    size_t n = strcspn(line + 1, " \t");
    snprintf(name, sizeof name, "%.*s", (int)n, line + 1);
    const char *arg = line + 1 + n;
    arg += strspn(arg, " \t");
    for (int i = 0; i < N_COMMANDS; i++) {
        words[i] = commands[i].name;
        if (n < sizeof name && !strcmp(name, commands[i].name)) {
            commands[i].run(t, arg);
            return;
        }
    }
    const char *near = args_nearest(name, words, N_COMMANDS);
    terminal_say(t, "no command /%s;%s%s%s /help lists them", name, near ? " did you mean /" : "",
                 near ? near : "", near ? "?" : "");
}

/* Tab */

static void offer_word(struct buf *list, const char *word, const char *start)
{
    if (!strncmp(word, start, strlen(start)))
        buf_addf(list, "%s\n", word);
}

static void offer_model(void *arg, const struct hub_found *f)
{
    struct buf name = {0}, **to = arg;
    buf_addf(&name, "%s%s%s", f->repo, f->quant[0] ? ":" : "", f->quant);
    if (f->whole)
        offer_word(to[0], name.p, to[1]->p);
    buf_clear(&name);
}

/* Appends files whose path starts with `typed`. */
static void offer_files(const char *typed, struct buf *list)
{
    char *path = typed_path(typed), *slash = strrchr(path, '/');
    const char *typed_slash = strrchr(typed, '/'), *start = slash ? slash + 1 : path;
    char *folder = slash ? mem_strndup(path, (size_t)(slash + 1 - path)) : mem_strdup(".");
    struct dirent **found = NULL;
    int n = scandir(folder, &found, NULL, alphasort), shown = 0;
    for (int i = 0; i < n; i++) {
        const char *name = found[i]->d_name;
        struct buf full = {0};
        struct stat st;
        buf_addf(&full, "%s/%s", folder, name);
        bool fits = !strncmp(name, start, strlen(start)) && (name[0] != '.' || start[0] == '.') &&
                    strcmp(name, ".") && strcmp(name, "..") && !strpbrk(name, "\n\r\033");
        if (fits && shown++ < 200)
            buf_addf(list, "%.*s%s%s\n", typed_slash ? (int)(typed_slash + 1 - typed) : 0, typed,
                     name, stat(full.p, &st) == 0 && S_ISDIR(st.st_mode) ? "/" : "");
        buf_clear(&full);
        free(found[i]);
    }
    free(found);
    mem_free(folder);
    mem_free(path);
}

static void offer_setting(struct terminal *t, const char *arg, const char *last, struct buf *list)
{
    struct setting numbers[N_NUMBERS];
    char name[32] = "";
    list_settings(t, numbers);
    if (last == arg) {
        for (int i = 0; i < N_NUMBERS; i++)
            offer_word(list, numbers[i].name, last);
        for (int i = 0; i < N_WORDS; i++)
            offer_word(list, word_settings[i].name, last);
        offer_word(list, "seed", last);
        offer_word(list, "samplers", last);
        offer_word(list, "think", last);
        offer_word(list, "nothink", last);
        return;
    }
    sscanf(arg, "%31s", name);
    for (int i = 0; think_modes[i] && !strcmp(name, "think"); i++)
        offer_word(list, think_modes[i], last);
    for (int i = 0; i < N_WORDS; i++)
        for (int k = 0; k < 2 && !strcmp(name, word_settings[i].name); k++)
            offer_word(list, word_settings[i].words[k], last);
}

size_t terminal_offer(void *arg, const char *before, struct buf *list)
{
    struct terminal *t = arg;
    struct error ignored = {0};
    size_t n = strcspn(before, " \t");
    const char *blank = strrchr(before, ' '), *last = blank ? blank + 1 : before;
    if (before[0] != '/' || (!before[n] && strchr(before + 1, '/'))) {
        if (strchr(last, '/') || last[0] == '~') /* complete paths in messages, too */
            offer_files(last, list);
        return (size_t)(last - before);
    }
    if (!before[n]) {
        for (int i = 0; i < N_COMMANDS; i++)
            if (commands[i].about && !strncmp(commands[i].name, before + 1, n - 1))
                buf_addf(list, "/%s\n", commands[i].name);
        return 0;
    }
    const char *rest = before + n + strspn(before + n, " \t");
    enum argument kind = ARG_NONE;
    for (int i = 0; i < N_COMMANDS; i++)
        if (strlen(commands[i].name) == n - 1 && !strncmp(commands[i].name, before + 1, n - 1))
            kind = commands[i].arg;
    if (kind == ARG_FILE || kind == ARG_MODEL) {
        struct buf typed = {0};
        buf_adds(&typed, rest);
        if (kind == ARG_MODEL) {
            offer_word(list, BUILTIN_NAME, rest);
            offer_word(list, BUILTIN_SEE, rest);
            hub_each(offer_model, (struct buf *[]){list, &typed}, &ignored);
        }
        offer_files(rest, list);
        buf_clear(&typed);
        return (size_t)(rest - before);
    }
    for (int i = 0; kind == ARG_THINK && think_modes[i]; i++)
        offer_word(list, think_modes[i], last);
    if (kind == ARG_SETTING)
        offer_setting(t, rest, last, list);
    return (size_t)(last - before);
}
