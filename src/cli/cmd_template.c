/*
 * steel template: renders chat templates. Either one template, with the context on stdin; or with
 * --jsonl a stream of {"template", "context"} lines, each answered by a line {"output"} or
 * {"error"}.
 */
#include "cli/cli.h"
#include "cli/hub/hub.h"
#include "base/mem.h"
#include "text/chat/chat.h"
#include "text/jinja/jinja.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct loaded_template {
    char *name;      /* as in the request line; NULL for the command line's template */
    struct jinja *t; /* NULL: see err */
    char *bos, *eos; /* defaults of the context's bos_token and eos_token */
    struct error err;
};

struct templates {
    struct loaded_template *v; /* (n) */
    size_t n, cap;
    const char *dir; /* directory of named templates, or NULL */
};

static bool load(struct templates *ts, const char *name, struct loaded_template *l)
{
    struct chat_source s = {0};
    struct buf path = {0};
    bool found = false;
    if (access(name, R_OK) == 0 || !ts->dir) {
        buf_adds(&path, name);
        found = true;
    }
    static const char *const suffixes[] = {"", ".jinja", ".j2"};
    for (size_t i = 0; !found && i < sizeof suffixes / sizeof *suffixes; i++) {
        buf_reset(&path);
        buf_addf(&path, "%s/%s%s", ts->dir, name, suffixes[i]);
        found = access(path.p, R_OK) == 0;
    }
    bool ok = found ? chat_source_open(path.p, &s, &l->err)
                    : error_set(&l->err, "no template '%s' in %s", name, ts->dir);
    if (ok) {
        l->t = jinja_compile(s.template, s.template_len, &l->err);
        if (!l->t)
            error_prefix(&l->err, "%s", path.p);
        l->bos = mem_strdup(s.bos);
        l->eos = mem_strdup(s.eos);
        chat_source_clear(&s);
    }
    buf_clear(&path);
    return l->t != NULL;
}

/* The template of that name. Compiles it on first use. */
static struct loaded_template *find(struct templates *ts, const char *name)
{
    for (size_t i = 0; i < ts->n; i++)
        if (!strcmp(ts->v[i].name, name))
            return &ts->v[i];
    if (ts->n == ts->cap) {
        ts->cap = ts->cap ? ts->cap * 2 : 16;
        ts->v = mem_realloc(ts->v, ts->cap, sizeof *ts->v);
    }
    struct loaded_template *l = &ts->v[ts->n++];
    *l = (struct loaded_template){.name = mem_strdup(name)};
    load(ts, name, l);
    return l;
}

static bool parse_now(const char *text, struct tm *now)
{
    memset(now, 0, sizeof *now);
    now->tm_isdst = -1;
    const char *end = strptime(text, "%Y-%m-%d", now);
    if (end && *end)
        end = strptime(end, *end == 'T' ? "T%H:%M:%S" : " %H:%M:%S", now);
    if (!end || *end)
        return false;
    mktime(now);
    return true;
}

static bool render(const struct loaded_template *l, json_t *context,
                   const struct jinja_options *opt, struct buf *out, struct error *err)
{
    if (!l->t) {
        *err = l->err;
        return false;
    }
    if (!json_object_get(context, "bos_token") && l->bos[0])
        json_object_set_new(context, "bos_token", json_string(l->bos));
    if (!json_object_get(context, "eos_token") && l->eos[0])
        json_object_set_new(context, "eos_token", json_string(l->eos));
    return jinja_render(l->t, context, opt, out, err);
}

static void render_line(struct templates *ts, const char *fallback, const char *line, size_t len,
                        struct jinja_options opt, struct buf *out)
{
    struct error err = {0};
    json_error_t je;
    struct tm now;
    struct buf text = {0};
    bool ok = false;
    json_t *in = json_loadb(line, len, 0, &je), *context = NULL, *answer = json_object();
    const char *name = json_string_value(json_object_get(in, "template"));
    const char *clock = json_string_value(json_object_get(in, "now"));
    if (!name)
        name = fallback;
    if (!in)
        error_set(&err, "not JSON: %s", je.text);
    else if (!name)
        error_set(&err, "\"template\" is missing");
    else if (clock && !parse_now(clock, &now))
        error_set(&err, "\"now\": not a date and time");
    else {
        if (clock)
            opt.now = &now;
        context = json_object_get(in, "context");
        context = json_is_object(context) ? json_incref(context) : json_object();
        ok = render(find(ts, name), context, &opt, &text, &err);
    }
    json_t *value = ok ? json_stringn(text.p, text.len) : NULL;
    if (ok && !value)
        error_set(&err, "the output is not valid UTF-8");
    if (value)
        json_object_set_new(answer, "output", value);
    else
        json_object_set_new(answer, "error", json_string(err.msg));
    char *dumped = json_dumps(answer, 0);
    buf_adds(out, dumped ? dumped : "{\"error\": \"cannot be written as JSON\"}");
    buf_addc(out, '\n');
    free(dumped);
    buf_clear(&text);
    json_decref(context);
    json_decref(answer);
    json_decref(in);
}

static int run_jsonl(struct templates *ts, const char *fallback, const struct jinja_options *opt)
{
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    struct buf out = {0};
    while ((n = getline(&line, &cap, stdin)) > 0) {
        if (strspn(line, " \t\r\n") == (size_t)n)
            continue;
        buf_reset(&out);
        render_line(ts, fallback, line, (size_t)n, *opt, &out);
        fwrite(out.p, 1, out.len, stdout);
        fflush(stdout);
    }
    free(line);
    buf_clear(&out);
    return ferror(stdout) ? EXIT_FAIL : EXIT_OK;
}

static int run_one(struct templates *ts, const char *path, const char *prompt,
                   const struct jinja_options *opt)
{
    struct error err = {0};
    struct buf in = {0}, out = {0};
    json_t *context;
    int rc = EXIT_OK;
    if (prompt) {
        context = json_pack("{s:[{s:s,s:s}],s:b}", "messages", "role", "user", "content", prompt,
                            "add_generation_prompt", 1);
        if (!context)
            error_set(&err, "the prompt is not valid UTF-8");
    } else {
        json_error_t je;
        if (!cli_read_file("-", 256u << 20, &in, &err))
            return cli_fail(&err);
        context = json_loadb(in.len ? in.p : "{}", in.len ? in.len : 2, 0, &je);
        if (context && !json_is_object(context)) {
            json_decref(context);
            context = NULL;
            error_set(&err, "the context on stdin must be a JSON object");
        } else if (!context) {
            error_set(&err, "the context on stdin is not JSON: line %d: %s", je.line, je.text);
        }
    }
    if (context && render(find(ts, path), context, opt, &out, &err))
        fwrite(out.p, 1, out.len, stdout);
    else
        rc = cli_fail(&err);
    json_decref(context);
    buf_clear(&in);
    buf_clear(&out);
    return rc;
}

static int run_print(const char *path)
{
    struct error err = {0};
    struct chat_source s;
    if (!chat_source_open(path, &s, &err))
        return cli_fail(&err);
    fwrite(s.template, 1, s.template_len, stdout);
    chat_source_clear(&s);
    return EXIT_OK;
}

bool cli_chat_template(const char **path, struct error *err)
{
    static struct buf file; /* kept for the rest of the process */
    struct chat_source source = {0};
    struct chat *chat = NULL;
    if (!*path)
        return true;
    buf_reset(&file);
    if (!hub_open(*path, &file, err))
        return error_prefix(err, "--chat-template");
    if (file.len)
        *path = file.p;
    if (chat_source_open(*path, &source, err))
        chat = chat_new(&source, err);
    bool ok = chat || error_prefix(err, "--chat-template");
    chat_free(chat);
    chat_source_clear(&source);
    return ok;
}

int cmd_template(int argc, char **argv)
{
    bool jsonl = false, print = false;
    const char *dir = NULL, *clock = NULL, *prompt = NULL, *model = NULL;
    const struct opt opts[] = {
        MODEL_ROW(model),
        {OPT_STRING, 'p', "prompt", 0, &prompt, 0, 0, "TEXT", "render one user message"},
        {OPT_FLAG, 0, "print", 0, &print, 0, 0, 0, "print the template itself"},
        {OPT_FLAG, 0, "jsonl", 0, &jsonl, 0, 0, 0, "one request per line on stdin"},
        {OPT_STRING, 0, "templates", 0, &dir, 0, 0, "DIR",
         "directory of the templates named in requests"},
        {OPT_STRING, 0, "now", 0, &clock, 0, 0, "TIME",
         "current time for templates: \"2026-07-26 12:30:00\""},
    };
    const struct usage u = {
        .command = "template",
        .synopsis = "[MODEL|FILE.jinja] [options]",
        .about = "Renders a chat template with a context (a JSON object) read from stdin.\n"
                 "With --jsonl, each line {\"template\": NAME, \"context\": {...}} is answered by\n"
                 "{\"output\": TEXT} or {\"error\": MESSAGE}; a line may set \"now\".",
        .examples = "  steel template model.gguf -p 'Why is the sky blue?'\n"
                    "  steel template chat.jinja < context.json\n"
                    "  steel template --jsonl --templates DIR < requests.jsonl\n",
        .opts = opts,
        .n_opts = sizeof opts / sizeof *opts,
        .max_args = 1,
    };
    const char *pos[1] = {NULL};
    int n = args_parse(&u, argc, argv, pos);
    if (n < 0)
        return cli_args_exit(n);
    if (!cli_take_model(&u, &model, pos, &n, 0))
        return EXIT_USAGE;
    if (!model && !jsonl)
        return cli_args_exit(args_usage_error(&u, "name a model or a template, or give --jsonl"));
    struct tm now;
    if (clock && !parse_now(clock, &now))
        return cli_args_exit(args_usage_error(&u, "--now %s: use YYYY-MM-DD HH:MM:SS", clock));
    struct error err = {0};
    if (!hub_resolve(&model, &err))
        return cli_fail(&err);
    if (print && model)
        return run_print(model);
    struct jinja_options opt = {.now = clock ? &now : NULL};
    struct templates ts = {.dir = dir};
    int rc = jsonl || !model ? run_jsonl(&ts, model, &opt) : run_one(&ts, model, prompt, &opt);
    for (size_t i = 0; i < ts.n; i++) {
        mem_free(ts.v[i].name);
        mem_free(ts.v[i].bos);
        mem_free(ts.v[i].eos);
        jinja_free(ts.v[i].t);
    }
    mem_free(ts.v);
    return rc;
}
