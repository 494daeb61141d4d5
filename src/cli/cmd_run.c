/*
 * steel run: streams the answer to a prompt to stdout and timings to stderr. Without a prompt it
 * opens a chat (terminal.c). Options are passed to the library (steel.h), which does the rest.
 */
#include "cli/term/terminal.h"
#include "cli/hub/hub.h"
#include "cli/plan_fit.h"
#include "cli/sampling.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/os.h"
#include "file/builtin.h"
#include "text/chat/chat_parse.h"
#include "text/grammar/grammar.h"

#include <limits.h>
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct run_flags {
    struct model_flags model;
    /* NAN and INT_MIN: not set, so the model's recommended settings apply */
    struct steel_request_options o;
    const char *model_path, *prompt, *file, *system, *think, *format, *template;
    const char *words; /* the prompt given as positionals, joined; NULL = none */
    int n_predict;
    uint64_t seed; /* UINT64_MAX: random */
    struct opt_list stop, bias, breakers, images;
    const char *schema, *grammar; /* files */
    bool quiet, raw, verbose, plain, hide_thinking;
    const char *overflow, *mmproj;
    char *lora; /* names of all adapters, comma-separated */
};

/* Parses "ID=BIAS", or llama.cpp's "ID+BIAS" and "ID-BIAS". "ID=false" forbids the token. */
static bool parse_bias(const struct usage *u, const struct opt_list *list, struct steel_bias *out)
{
    for (int i = 0; i < list->n; i++) {
        const char *s = list->items[i];
        char *end;
        long id = strtol(s, &end, 10);
        bool ok = end != s && id >= 0 && (*end == '=' || *end == '+' || *end == '-');
        if (ok && *end == '=')
            end++;
        float bias = 0;
        if (ok && !strcmp(end, "false")) {
            bias = -INFINITY;
        } else if (ok) {
            char *stop;
            bias = strtof(end, &stop);
            ok = stop != end && !*stop;
        }
        if (!ok) {
            args_usage_error(u, "--logit-bias %s: use TOKEN=BIAS, as in 198=-1.5 or 198=false", s);
            return false;
        }
        out[i] = (struct steel_bias){(int32_t)id, bias};
    }
    return true;
}

static void print_timings(const struct steel_engine *engine, const struct run_flags *f,
                          const struct steel_event *end, int64_t load_ns)
{
    if (!f->quiet && end->n_prompt) {
        char bytes[16];
        struct steel_info info;
        steel_engine_info(engine, &info);
        fprintf(stderr, "\nload %.2f s: %s, %s of weights, context %d | ", (double)load_ns * 1e-9,
                info.device, cli_bytes((double)info.bytes, bytes), steel_engine_context(engine));
        generation_print(end, stderr);
        fprintf(stderr, " | seed %llu\n", (unsigned long long)f->o.seed);
    }
    char table[8192];
    if (f->model.profile && steel_engine_profile(engine, table, sizeof table) > 0)
        fputs(table, stderr);
}

/* Answers one prompt: through the chat template if the model has one, otherwise as plain text. */
static bool answer(struct steel_engine *engine, struct run_flags *f,
                   const struct terminal_options *chat, const struct buf *text, int64_t load_ns,
                   struct steel_error *err)
{
    struct steel_event end = {0};
    bool raw = f->raw, ok = false;
    if (!raw) {
        ok = terminal_ask(engine, chat, text->p ? text->p : "", &end, err);
        raw = !ok && err->kind == STEEL_NO_CHAT;
    }
    if (raw) {
        struct steel_request_options o = chat->request;
        generate_advise(&o, engine);
        generate_limit(&o, f->n_predict);
        o.text = text->p ? text->p : "";
        o.n_text = text->len;
        ok = generate_text(engine, &o, &end, err);
    }
    print_timings(engine, f, &end, load_ns);
    return ok;
}

enum { PROMPT_MAX = 256 << 20, STDIN_NOTICE_MS = 2000 };

static bool piped_stdin(void)
{
    struct stat st;
    return fstat(STDIN_FILENO, &st) == 0 &&
           (S_ISFIFO(st.st_mode) || S_ISREG(st.st_mode) || S_ISSOCK(st.st_mode));
}

/* Reads the prompt: -p or the positionals, followed by what is piped in; or a file. */
static bool read_prompt(const struct run_flags *f, struct buf *text, struct error *err)
{
    const char *given = f->prompt ? f->prompt : f->words;
    const char *fit_file = f->schema ? f->schema : f->grammar;
    if (f->file)
        return cli_read_file(f->file, PROMPT_MAX, text, err);
    if (given)
        buf_adds(text, given);
    if (!given || !piped_stdin() || (fit_file && !strcmp(fit_file, "-")))
        return true;
    struct buf more = {0};
    struct pollfd in = {.fd = STDIN_FILENO, .events = POLLIN};
    if (poll(&in, 1, STDIN_NOTICE_MS) == 0) /* a pipe was left open: say what steel waits for */
        fprintf(stderr, "steel: reading the rest of the prompt from stdin (</dev/null: none)\n");
    bool ok = cli_read_file("-", PROMPT_MAX, &more, err);
    if (ok && more.len) {
        buf_adds(text, *given ? "\n\n" : "");
        buf_add(text, more.p, more.len);
    }
    buf_clear(&more);
    return ok;
}

/* Checks that the constraint compiles, before the model is loaded. Errors in a file name it. */
static bool check_fit(const struct run_flags *f, const char *file, const struct buf *text,
                      struct error *err)
{
    const char *source = file ? text->p : f->o.regex;
    if (!file && !f->o.regex)
        return true;
    struct grammar_source src = {.kind = f->schema    ? GRAMMAR_SCHEMA
                                         : f->grammar ? GRAMMAR_GBNF
                                                      : GRAMMAR_REGEX,
                                 .flags = GRAMMAR_SCHEMA_ORDER,
                                 .text = source ? source : "",
                                 .len = source ? strlen(source) : 0};
    struct grammar *g = grammar_compile(&src, err);
    bool ok = g || !file || error_prefix(err, "%s", file);
    grammar_free(g);
    return g && ok;
}

static int run(const char *model, struct run_flags *f, struct terminal_options *chat,
               struct steel_engine_options *opt, const struct runtime_options *runtime)
{
    struct steel_error err = {0};
    struct error e = {0};
    struct buf text = {0}, fit = {0};
    const char *fit_file = f->schema ? f->schema : f->grammar;
    if (!read_prompt(f, &text, &e) ||
        (fit_file && !cli_read_file(fit_file, (size_t)1 << 20, &fit, &e))) {
        buf_clear(&text);
        buf_clear(&fit);
        return cli_fail(&e);
    }
    const char *nul = text.len && !f->raw ? memchr(text.p, 0, text.len) : NULL;
    if (nul)
        error_set(&e, "the prompt is not text: byte %zu is NUL", (size_t)(nul - text.p) + 1);
    if (nul || !check_fit(f, fit_file, &fit, &e)) {
        buf_clear(&text);
        buf_clear(&fit);
        return cli_fail(&e);
    }
    if (fit_file)
        *(f->schema ? &f->o.json_schema : &f->o.grammar) = fit.p ? fit.p : "";
    bool talks = !f->prompt && !f->words && !f->file;
    opt->images = talks || f->images.n || f->mmproj;
    opt->mmproj = f->mmproj;
    chat->images = f->images.items;
    chat->n_images = f->images.n;
    int64_t t0 = clock_ns();
    struct steel_engine *engine = generate_open(model, opt, &err);
    int64_t load_ns = clock_ns() - t0;
    bool ok = engine != NULL;
    chat->request = f->o;
    chat->engine = *opt;
    if (ok && talks) {
        ok = terminal_chat(&engine, chat, &err);
        cli_clear_interrupt();
    } else if (ok) {
        ok = answer(engine, f, chat, &text, load_ns, &err);
    }
    buf_clear(&text);
    buf_clear(&fit);
    steel_engine_close(engine);
    if (cli_interrupted())
        return EXIT_INTERRUPTED;
    if (ok)
        return EXIT_OK;
    fprintf(stderr, "steel: %s\n", err.message);
    if (!engine)
        plan_fit_advise(model, runtime);
    return EXIT_FAIL;
}

static bool parse_think(const struct usage *u, const struct run_flags *f, enum think_mode *out)
{
    static const char *const modes[][2] = {[THINK_ON] = {"on", "true"},
                                           [THINK_OFF] = {"off", "false"},
                                           [THINK_HIDE] = {"hide", "hide"}};
    const char *s = f->think;
    *out = f->hide_thinking ? THINK_HIDE : THINK_ON;
    for (int i = 0; s && i < 3; i++)
        if (!strcmp(s, modes[i][0]) || !strcmp(s, modes[i][1])) {
            if (i != THINK_ON)
                *out = (enum think_mode)i;
            return true;
        }
    if (s)
        args_usage_error(u, "--think %s: use on, off or hide", s);
    return !s;
}

static bool parse_overflow(const struct usage *u, const char *s, struct terminal_options *chat)
{
    bool error = s && !strcmp(s, "error");
    if (s && !error && strcmp(s, "drop") != 0) {
        args_usage_error(u, "--context-overflow %s: use drop or error", s);
        return false;
    }
    chat->overflow = error ? OVERFLOW_ERROR : OVERFLOW_DROP;
    return true;
}

/* Engine options from the command line's, and the same as runtime options. One answer is generated at a time. *lora: the
 * names of the adapters, for requests. False after a usage message. */
static bool engine_options(const struct usage *u, const struct model_flags *f,
                           struct steel_engine_options *opt, struct runtime_options *r, char **lora)
{
    *opt = (struct steel_engine_options){.device = f->device,
                                         .threads = f->threads,
                                         .context = f->context,
                                         .max_requests = 1,
                                         .deterministic = f->deterministic,
                                         .no_repack = f->no_repack,
                                         .profile = f->profile,
                                         .kv_type = f->kv_type,
                                         .k_type = f->k_type,
                                         .v_type = f->v_type,
                                         .page_len = f->page_len,
                                         .gpu_memory = f->gpu_memory,
                                         .loras = f->loras.items,
                                         .n_loras = f->loras.n};
    if (!cli_runtime_options(u, f, r))
        return false;
    opt->device = r->backend.device;
    opt->expert_bytes = r->backend.expert_memory;
    opt->gpu_bytes = r->gpu_limit;
    opt->host_layers = r->offload.layers;
    opt->host_tensors = r->offload.tensors;
    opt->gpu_layers = r->gpu_layers;
    opt->draft = r->draft == 0 ? -1 : r->draft == DRAFT_AUTO ? 0 : r->draft;
    opt->draft_from = r->draft_from == 1u << DRAFT_TEXT    ? "text"
                      : r->draft_from == 1u << DRAFT_HEAD  ? "head"
                      : r->draft_from == 1u << DRAFT_MODEL ? "model"
                                                           : NULL;
    opt->draft_model = r->draft_model;
    opt->draft_device = r->draft_device;
    struct buf names = {0};
    struct error err = {0};
    for (int i = 0; i < r->n_loras; i++)
        buf_addf(&names, "%s%s", i ? "," : "", r->loras[i].name);
    bool few = cli_few_adapters(r, &err);
    if (!few)
        args_usage_error(u, "%s", err.msg);
    *lora = r->n_loras && few ? buf_take(&names) : NULL;
    buf_clear(&names);
    if (!few)
        cli_runtime_options_clear(r);
    return few;
}

/* The positionals after the model are the prompt. */
static char *join_words(const char **words, int n)
{
    struct buf b = {0};
    for (int i = 0; i < n; i++)
        buf_addf(&b, "%s%s", i ? " " : "", words[i]);
    return n ? buf_take(&b) : NULL;
}

/* Decides where the prompt comes from. False after a usage message. */
static bool check_prompt(const struct usage *u, struct run_flags *f)
{
    if (f->prompt && !strcmp(f->prompt, "-")) { /* the whole prompt is on stdin */
        f->prompt = NULL;
        if (!f->file)
            f->file = "-";
        else
            args_usage_error(u, "give the prompt with -p or with -f, not both");
        return !strcmp(f->file, "-");
    }
    if (f->words && !strcmp(f->words, "-") && !f->file && !f->prompt) {
        f->words = NULL;
        f->file = "-";
    }
    if (f->words && (f->prompt || f->file)) {
        args_usage_error(u, "unexpected argument '%s': the prompt is given with %s", f->words,
                         f->prompt ? "-p" : "-f");
        return false;
    }
    if (f->raw && f->images.n) {
        args_usage_error(u, "--image needs the chat template: not with --raw");
        return false;
    }
    if (f->prompt && f->file) {
        args_usage_error(u, "give the prompt with -p or with -f, not both");
        return false;
    }
    const char *fit_file = f->schema ? f->schema : f->grammar;
    if (!fit_file || !f->file || strcmp(fit_file, "-") || strcmp(f->file, "-"))
        return true;
    args_usage_error(u, "stdin is read once: as the prompt or as %s",
                     f->schema ? "--schema" : "--grammar");
    return false;
}

static bool is_sentence(const char *model)
{
    return strchr(model, ' ') && access(model, F_OK) != 0;
}

/* Resolves MODEL. A prompt given in its place gets an error of its own. */
static bool find_model(const char **model, struct error *err)
{
    if (*model && is_sentence(*model))
        return error_set(
            err,
            "'%.60s' is neither a file nor a model name; to send it as a prompt to the "
            "built-in model: steel run -p '...'",
            *model);
    return hub_resolve(model, err);
}

static bool check_format(const struct usage *u, const char *name)
{
    enum chat_format format;
    if (!name || chat_format_from_name(name, &format))
        return true;
    struct buf names = {0};
    for (int i = 0; i < CHAT_N_FORMATS; i++)
        buf_addf(&names, "%s%s", i ? ", " : "", chat_format_name((enum chat_format)i));
    args_usage_error(u, "--chat-format %s: unknown; one of %s", name, names.p);
    buf_clear(&names);
    return false;
}

/* Checks what the option table cannot express. `bias` has room for all biases. False after a
 * usage message. */
static bool check_flags(const struct usage *u, struct run_flags *f, struct steel_bias *bias,
                        struct terminal_options *chat, struct steel_engine_options *opt,
                        struct runtime_options *runtime)
{
    if (!!f->schema + !!f->grammar + !!f->o.regex + f->o.json > 1) {
        args_usage_error(u, "use only one of --schema, --json, --regex and --grammar");
        return false;
    }
    if (f->raw && args_given(&f->template)) {
        args_usage_error(u, "--chat-template has no effect with --raw");
        return false;
    }
    uint64_t order;
    if (!sampling_check(u, f->o.samplers, &order, &f->breakers))
        return false;
    for (int i = 0; i < f->stop.n; i++)
        if (!*f->stop.items[i]) {
            args_usage_error(u, "--stop: empty text");
            return false;
        }
    return engine_options(u, &f->model, opt, runtime, &f->lora) && parse_bias(u, &f->bias, bias) &&
           parse_think(u, f, &chat->think) && parse_overflow(u, f->overflow, chat) &&
           check_format(u, f->format);
}

static int run_checked(const struct usage *u, struct run_flags *f)
{
    struct steel_engine_options opt;
    struct runtime_options runtime = {0};
    struct steel_bias *bias = mem_zalloc((size_t)f->bias.n, sizeof *bias);
    struct terminal_options chat = {.system = f->system,
                                    .format = f->format,
                                    .n_predict = f->n_predict,
                                    .verbose = f->verbose,
                                    .quiet = f->quiet,
                                    .plain = f->plain};
    int rc = EXIT_USAGE;
    if (check_flags(u, f, bias, &chat, &opt, &runtime)) {
        const char *model = f->model_path;
        struct error err = {0};
        f->o.bias = bias;
        f->o.n_bias = f->bias.n;
        f->o.lora = f->lora;
        f->o.stop = (const char *const *)f->stop.items;
        f->o.n_stop = f->stop.n;
        if (f->breakers.n)
            f->o.dry_breakers = (const char *const *)f->breakers.items;
        f->o.n_dry_breakers = sampling_n_breakers(&f->breakers);
        f->o.seed = f->seed;
        if (f->seed == UINT64_MAX && os_random(&f->o.seed, 4))
            f->o.seed &= 0xffffffffu;
        cli_catch_interrupt();
        bool found = find_model(&model, &err) && cli_chat_template(&f->template, &err);
        chat.chat_template = f->template;
        if (found)
            rc = run(model, f, &chat, &opt, &runtime);
        else
            rc = cli_interrupted() ? EXIT_INTERRUPTED : cli_fail(&err);
    }
    cli_runtime_options_clear(&runtime);
    mem_free(bias);
    mem_free(f->lora);
    return rc;
}

int cmd_run(int argc, char **argv)
{
    struct run_flags f = {.o = generate_unset(), .n_predict = -1, .seed = UINT64_MAX};
    f.model.draft = DRAFT_AUTO;
    const struct opt opts[] = {
        MODEL_ROW(f.model_path),
        {OPT_STRING, 'p', "prompt", 0, &f.prompt, 0, 0, "TEXT",
         "the prompt; - reads stdin. Piped input is appended"},
        {OPT_STRING, 'f', "file", 0, &f.file, 0, 0, "FILE",
         "read the prompt from a file; - is stdin"},
        {OPT_INT, 'n', "predict", "n-predict", &f.n_predict, -1, 1 << 28, "N",
         "tokens to generate (default: until the answer ends or the context is full)"},
        {OPT_LIST, 0, "stop", 0, &f.stop, 0, 0, "TEXT", "stop at this text (repeatable)"},
        {OPT_FLAG, 0, "ignore-eos", 0, &f.o.ignore_eos, 0, 0, 0, "continue after the end token"},
        {OPT_LIST, 0, "image", 0, &f.images, 0, 0, "FILE",
         "an image for the prompt: PNG, JPEG, WebP, GIF or BMP (repeatable)"},
        {OPT_STRING, 0, "mmproj", 0, &f.mmproj, 0, 0, "FILE",
         "the image tower of a GGUF (default: mmproj*.gguf beside it)"},
        {OPT_FLAG, 0, "raw", 0, &f.raw, 0, 0, 0, "do not apply the chat template to the prompt"},
        {OPT_FLAG, 'q', "quiet", 0, &f.quiet, 0, 0, 0, "print no timings"},
        {OPT_HEADING, 0, "constraints on the answer", 0, 0, 0, 0, 0, 0},
        {OPT_STRING, 0, "schema", "json-schema-file", &f.schema, 0, 0, "FILE",
         "JSON that is valid under a JSON Schema; - is stdin"},
        {OPT_FLAG, 0, "json", 0, &f.o.json, 0, 0, 0, "any JSON object"},
        {OPT_STRING, 0, "regex", 0, &f.o.regex, 0, 0, "RE",
         "text that matches a regular expression"},
        {OPT_STRING, 0, "grammar", "grammar-file", &f.grammar, 0, 0, "FILE",
         "text of a GBNF grammar; - is stdin"},
        {OPT_HEADING, 0, "chat", 0, 0, 0, 0, 0, 0},
        {OPT_STRING, 0, "system", 0, &f.system, 0, 0, "TEXT", "the system prompt"},
        {OPT_STRING, 0, "think", 0, &f.think, 0, 0, "MODE", "on, off or hide (default on)"},
        {OPT_FLAG, 0, "hidethinking", "hide-thinking", &f.hide_thinking, 0, 0, 0,
         "same as --think hide: show only how long the model thinks"},
        {OPT_INT, 0, "reasoning-budget", 0, &f.o.thinking_budget, -1, 1 << 28, "N",
         "most tokens of thinking; 0 = none, -1 = no limit (default -1)"},
        {OPT_STRING, 0, "chat-template", "chat-template-file", &f.template, 0, 0, "FILE|MODEL",
         "a Jinja file, or a model whose template is used instead"},
        {OPT_STRING, 0, "chat-format", "tool-call-parser", &f.format, 0, 0, "NAME",
         "format of thinking and tool calls (default: from the template)"},
        {OPT_STRING, 0, "context-overflow", 0, &f.overflow, 0, 0, "MODE",
         "when a chat exceeds its context: drop its oldest turns, or error (default drop)"},
        {OPT_FLAG, 0, "plain", 0, &f.plain, 0, 0, 0,
         "print the model's text unchanged: no markdown, no wrapping"},
        {OPT_FLAG, 'v', "verbose", 0, &f.verbose, 0, 0, 0,
         "print all counters after each turn of a chat"},
        {OPT_HEADING, 0, "sampling", 0, 0, 0, 0, 0, 0},
        {OPT_FLOAT, 0, "temp", "temperature", &f.o.temperature, 0, 100, "T",
         "temperature; 0 = greedy (default: the model's, or 0.8)"},
        {OPT_INT, 0, "top-k", 0, &f.o.top_k, 0, 1 << 28, "K",
         "sample among the K most likely tokens; 0 = off (default: the model's, or 40)"},
        {OPT_FLOAT, 0, "top-p", 0, &f.o.top_p, 0, 1, "P",
         "sample among the top tokens of total probability P; 1 = off (default: the model's, or "
         "0.95)"},
        {OPT_FLOAT, 0, "min-p", 0, &f.o.min_p, 0, 1, "P",
         "drop tokens less likely than P times the best; 0 = off (default: the model's, or 0.05)"},
        {OPT_FLOAT, 0, "repeat-penalty", 0, &f.o.repeat_penalty, 0.01, 100, "X",
         "make repeated tokens less likely by a factor; 1 = off (default: the model's, or 1)"},
        SAMPLING_ROWS(f.o, f.o.samplers, f.breakers),
        {OPT_U64, 's', "seed", 0, &f.seed, 0, 0, "N",
         "same seed, same text (default: random, as is -1)"},
        {OPT_LIST, 0, "logit-bias", 0, &f.bias, 0, 0, "ID=X",
         "add X to a token's logit; ID=false forbids it (repeatable)"},
        LORA_ROW(f.model),
        DRAFT_ROW(f.model),
        DRAFT_MODEL_ROWS(f.model),
        MODEL_FLAG_ROWS(f.model),
    };
    const struct usage u = {
        .command = "run",
        .synopsis = "[MODEL] [PROMPT] [options]",
        .about =
            "Without a prompt: a chat in the terminal. With one: streams the answer to stdout,\n"
            "timings to stderr. Without MODEL: the built-in model, or with --image the one that "
            "sees.",
        .examples = "  steel run\n"
                    "  steel run model.gguf 'Why is the sky blue?'\n"
                    "  steel run -p 'What is 17 + 25?'\n"
                    "  steel run --image shapes.png 'What is this?'\n"
                    "  git diff | steel run model.gguf 'Write a commit message for this diff.'\n"
                    "  steel run model.gguf --raw -p 'Once upon a time' -n 100\n"
                    "  echo 'The capital of France is' | steel run model.gguf -f - --temp 0\n"
                    "  steel run model.gguf -p 'Name three rivers.' --schema list.json\n",
        .opts = opts,
        .n_opts = sizeof opts / sizeof *opts,
        .min_args = 0,
        .max_args = argc + 1,
    };
    const char **pos = mem_zalloc((size_t)argc + 1, sizeof *pos);
    int n = args_parse(&u, argc, argv, pos);
    /* a lone "-" is stdin, not a model; a question about an image is for the built-in model */
    int others = n == 1 && (!strcmp(pos[0], "-") || (f.images.n && is_sentence(pos[0])));
    if (n >= 0)
        cli_take_model(&u, &f.model_path, pos, &n, others);
    if (!f.model_path && f.images.n)
        f.model_path = BUILTIN_SEE;
    char *words = n > 0 ? join_words(pos, n) : NULL;
    mem_free(pos);
    f.words = words;
    if (n < 0 || !check_prompt(&u, &f)) {
        mem_free(words);
        return n < 0 ? cli_args_exit(n) : EXIT_USAGE;
    }
    int rc = run_checked(&u, &f);
    mem_free(words);
    return rc;
}
