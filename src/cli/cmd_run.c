/*
 * steel run: a prompt in, a streamed answer out, timings on stderr; without a prompt a chat
 * (terminal.c). Flags become options of the library (steel.h), which does the rest.
 */
#include "cli/terminal.h"
#include "cli/hub.h"
#include "base/clock.h"
#include "base/mem.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

struct run_flags {
    struct model_flags model;
    struct steel_request_options o; /* NAN and INT_MIN: not set, so the model's author decides */
    const char *prompt, *file, *system, *think;
    int n_predict;
    struct opt_list stop, bias;
    const char *schema, *grammar; /* files */
    bool quiet, raw, verbose;
};

/* "ID=BIAS", or llama.cpp's "ID+BIAS" and "ID-BIAS"; "ID=false" bans. */
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
        fprintf(stderr, "\nload %.2f s | ", (double)load_ns * 1e-9);
        generation_print(end, stderr);
        fprintf(stderr, " | seed %llu\n", (unsigned long long)f->o.seed);
    }
    char table[8192];
    if (f->model.profile && steel_engine_profile(engine, table, sizeof table) > 0)
        fputs(table, stderr);
}

/* What no flag has set is as the model's author advises. */
static void advise(struct steel_request_options *o, const struct steel_engine *engine)
{
    struct steel_request_options a = steel_engine_request_options(engine);
    const struct {
        float *set, advised;
    } floats[] = {{&o->temperature, a.temperature},
                  {&o->top_p, a.top_p},
                  {&o->min_p, a.min_p},
                  {&o->repeat_penalty, a.repeat_penalty}};
    const struct {
        int *set, advised;
    } ints[] = {{&o->top_k, a.top_k}, {&o->repeat_last_n, a.repeat_last_n}};
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++)
        if (isnan(*floats[i].set))
            *floats[i].set = floats[i].advised;
    for (size_t i = 0; i < sizeof ints / sizeof *ints; i++)
        if (*ints[i].set == INT_MIN)
            *ints[i].set = ints[i].advised;
}

/* One prompt, one answer: through the chat template where the model has one, else as it is. */
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
        o.text = text->p ? text->p : "";
        o.n_text = text->len;
        ok = generate_text(engine, &o, &end, err);
    }
    print_timings(engine, f, &end, load_ns);
    return ok;
}

static int run(const char *model, struct run_flags *f, struct terminal_options *chat,
               struct steel_engine_options *opt)
{
    struct steel_error err = {0};
    struct error e = {0};
    struct buf text = {0}, fit = {0};
    const char *fit_file = f->schema ? f->schema : f->grammar;
    if ((f->file && !cli_read_file(f->file, (size_t)256 << 20, &text, &e)) ||
        (fit_file && !cli_read_file(fit_file, (size_t)1 << 20, &fit, &e))) {
        buf_clear(&text);
        buf_clear(&fit);
        return cli_fail(&e);
    }
    if (fit_file)
        *(f->schema ? &f->o.json_schema : &f->o.grammar) = fit.p ? fit.p : "";
    if (f->prompt)
        buf_adds(&text, f->prompt);
    int64_t t0 = clock_ns();
    struct steel_engine *engine = generate_open(model, opt, &err);
    int64_t load_ns = clock_ns() - t0;
    bool ok = engine != NULL;
    if (ok) {
        advise(&f->o, engine);
        generate_limit(&f->o, f->n_predict);
        chat->request = f->o;
    }
    if (ok && !f->prompt && !f->file) {
        ok = terminal_chat(engine, chat, &err);
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
    return EXIT_FAIL;
}

static bool parse_think(const struct usage *u, const char *s, enum think_mode *out)
{
    static const char *const modes[] = {
        [THINK_ON] = "on", [THINK_OFF] = "off", [THINK_HIDE] = "hide"};
    for (int i = 0; s && i < 3; i++)
        if (!strcmp(s, modes[i])) {
            *out = (enum think_mode)i;
            return true;
        }
    if (s)
        args_usage_error(u, "--think %s: use on, off or hide", s);
    return !s;
}

/* Checked as for every command; false after a usage message. One answer at a time is generated. */
static bool engine_options(const struct usage *u, const struct model_flags *f,
                           struct steel_engine_options *opt)
{
    struct runtime_options r;
    *opt = (struct steel_engine_options){.device = f->device,
                                         .threads = f->threads,
                                         .context = f->context,
                                         .max_requests = 1,
                                         .deterministic = f->deterministic,
                                         .no_repack = f->no_repack,
                                         .profile = f->profile,
                                         .kv_type = f->kv_type,
                                         .page_len = f->page_len,
                                         .gpu_memory = f->gpu_memory};
    return cli_runtime_options(u, f, &r);
}

int cmd_run(int argc, char **argv)
{
    struct run_flags f = {.o = steel_request_options(), .n_predict = -1};
    f.o.temperature = f.o.top_p = f.o.min_p = f.o.repeat_penalty = NAN;
    f.o.top_k = f.o.repeat_last_n = INT_MIN;
    uint64_t seed = UINT64_MAX;
    const struct opt opts[] = {
        {OPT_STRING, 'p', "prompt", 0, &f.prompt, 0, 0, "TEXT", "the prompt"},
        {OPT_STRING, 'f', "file", 0, &f.file, 0, 0, "FILE",
         "read the prompt from a file; - is stdin"},
        {OPT_INT, 'n', "predict", "n-predict", &f.n_predict, -1, 1 << 28, "N",
         "tokens to generate (default: until the end or the context)"},
        {OPT_LIST, 0, "stop", 0, &f.stop, 0, 0, "TEXT", "stop at this text (repeatable)"},
        {OPT_FLAG, 0, "ignore-eos", 0, &f.o.ignore_eos, 0, 0, 0, "go on past the end token"},
        {OPT_FLAG, 0, "raw", 0, &f.raw, 0, 0, 0, "the prompt as it is, without the chat template"},
        {OPT_FLAG, 'q', "quiet", 0, &f.quiet, 0, 0, 0, "no timings"},
        {OPT_HEADING, 0, "what the answer fits", 0, 0, 0, 0, 0, 0},
        {OPT_STRING, 0, "schema", "json-schema-file", &f.schema, 0, 0, "FILE",
         "JSON that fits a JSON Schema; - is stdin"},
        {OPT_FLAG, 0, "json", 0, &f.o.json, 0, 0, 0, "any JSON object"},
        {OPT_STRING, 0, "regex", 0, &f.o.regex, 0, 0, "RE",
         "a text that the regular expression matches"},
        {OPT_STRING, 0, "grammar", "grammar-file", &f.grammar, 0, 0, "FILE",
         "a text of the GBNF grammar; - is stdin"},
        {OPT_HEADING, 0, "chat", 0, 0, 0, 0, 0, 0},
        {OPT_STRING, 0, "system", 0, &f.system, 0, 0, "TEXT", "the system prompt"},
        {OPT_STRING, 0, "think", 0, &f.think, 0, 0, "MODE", "on, off or hide (default on)"},
        {OPT_FLAG, 'v', "verbose", 0, &f.verbose, 0, 0, 0, "speed after every turn of a chat"},
        {OPT_HEADING, 0, "sampling", 0, 0, 0, 0, 0, 0},
        {OPT_FLOAT, 0, "temp", "temperature", &f.o.temperature, 0, 100, "T",
         "temperature; 0 = greedy (default: the model's, or 0.8)"},
        {OPT_INT, 0, "top-k", 0, &f.o.top_k, 0, 1 << 28, "K",
         "0 = off (default: the model's, or 40)"},
        {OPT_FLOAT, 0, "top-p", 0, &f.o.top_p, 0, 1, "P",
         "1 = off (default: the model's, or 0.95)"},
        {OPT_FLOAT, 0, "min-p", 0, &f.o.min_p, 0, 1, "P",
         "0 = off (default: the model's, or 0.05)"},
        {OPT_FLOAT, 0, "repeat-penalty", 0, &f.o.repeat_penalty, 0.01, 100, "X",
         "1 = off (default: the model's, or 1)"},
        {OPT_INT, 0, "repeat-last-n", 0, &f.o.repeat_last_n, -1, 1 << 20, "N",
         "tokens it looks back on (default 64, -1 = all)"},
        {OPT_FLOAT, 0, "presence-penalty", 0, &f.o.presence_penalty, -100, 100, "X",
         "0 = off (default 0)"},
        {OPT_FLOAT, 0, "frequency-penalty", 0, &f.o.frequency_penalty, -100, 100, "X",
         "0 = off (default 0)"},
        {OPT_U64, 's', "seed", 0, &seed, 0, 0, "N", "same seed, same text (default: random)"},
        {OPT_LIST, 0, "logit-bias", 0, &f.bias, 0, 0, "ID=X",
         "add X to a token's logit; ID=false bans it (repeatable)"},
        MODEL_FLAG_ROWS(f.model),
    };
    const struct usage u = {
        .command = "run",
        .synopsis = "[MODEL] [-p PROMPT] [options]",
        .about =
            "Without a prompt: a chat in the terminal. With one: streams the answer to stdout,\n"
            "timings to stderr. Without MODEL: the built-in model.",
        .examples = "  steel run\n"
                    "  steel run model.gguf -p 'Why is the sky blue?'\n"
                    "  steel run model.gguf --raw -p 'Once upon a time' -n 100\n"
                    "  echo 'The capital of France is' | steel run model.gguf -f - --temp 0\n"
                    "  steel run model.gguf -p 'Name three rivers.' --schema list.json\n",
        .opts = opts,
        .n_opts = sizeof opts / sizeof *opts,
        .min_args = 0,
        .max_args = 2,
    };
    const char *pos[2];
    int n = args_parse(&u, argc, argv, pos);
    if (n < 0)
        return cli_args_exit(n);
    /* A lone "-" in place of a prompt is stdin. */
    if (n && !strcmp(pos[n - 1], "-") && !f.file) {
        f.file = "-";
        n--;
    }
    if (n == 2)
        return cli_args_exit(args_usage_error(&u, "unexpected argument '%s'", pos[1]));
    if (f.prompt && f.file)
        return cli_args_exit(args_usage_error(&u, "give the prompt with -p or with -f, not both"));
    if (!!f.schema + !!f.grammar + !!f.o.regex + f.o.json > 1)
        return cli_args_exit(
            args_usage_error(&u, "an answer fits one of --schema, --json, --regex and --grammar"));
    const char *fit_file = f.schema ? f.schema : f.grammar;
    if (fit_file && f.file && !strcmp(fit_file, "-") && !strcmp(f.file, "-"))
        return cli_args_exit(args_usage_error(&u, "stdin is read once: as the prompt or as %s",
                                              f.schema ? "--schema" : "--grammar"));
    for (int i = 0; i < f.stop.n; i++)
        if (!*f.stop.items[i])
            return cli_args_exit(args_usage_error(&u, "--stop: empty text"));
    struct steel_engine_options opt;
    struct steel_bias *bias = mem_zalloc((size_t)f.bias.n, sizeof *bias);
    struct terminal_options chat = {
        .system = f.system, .n_predict = f.n_predict, .verbose = f.verbose};
    bool usable = engine_options(&u, &f.model, &opt) && parse_bias(&u, &f.bias, bias) &&
                  parse_think(&u, f.think, &chat.think);
    f.o.bias = bias;
    f.o.n_bias = f.bias.n;
    f.o.stop = (const char *const *)f.stop.items;
    f.o.n_stop = f.stop.n;
    f.o.seed = seed;
    if (seed == UINT64_MAX && getrandom(&f.o.seed, 4, 0) == 4)
        f.o.seed &= 0xffffffffu;
    int rc = EXIT_USAGE;
    if (usable) {
        const char *model = n ? pos[0] : NULL;
        struct error err = {0};
        cli_catch_interrupt();
        if (hub_resolve(&model, &err))
            rc = run(model, &f, &chat, &opt);
        else
            rc = cli_interrupted() ? EXIT_INTERRUPTED : cli_fail(&err);
    }
    mem_free(bias);
    mem_free(f.stop.items);
    mem_free(f.bias.items);
    return rc;
}
