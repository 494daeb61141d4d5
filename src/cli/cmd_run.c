/*
 * steel run: a prompt in, a streamed completion out, timings on stderr. Holds back text that may
 * become a stop string, so that nothing is shown and then withdrawn.
 */
#include "cli/terminal.h"
#include "base/mem.h"
#include "sample/sample_advice.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

struct run_flags {
    struct model_flags model;
    struct sample_params sample;
    const char *prompt, *file, *system, *think;
    int n_predict;
    struct opt_list stop, bias;
    bool ignore_eos, quiet, raw, verbose;
};

static bool on_text(void *arg, const char *text, size_t len)
{
    struct stop_filter *o = arg;
    buf_add(&o->held, text, len);
    stop_filter_flush(o, false);
    return !o->stopped;
}

/* "ID=BIAS", or llama.cpp's "ID+BIAS" and "ID-BIAS"; "ID=false" bans. */
static bool parse_bias(const struct usage *u, const struct opt_list *list, struct logit_bias *out)
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
        out[i] = (struct logit_bias){(int32_t)id, bias};
    }
    return true;
}

static void print_timings(const struct runtime *rt, const struct run_flags *f,
                          const struct generation *g)
{
    if (!f->quiet && g->n_generated) {
        fprintf(stderr, "\nload %.2f s | ", (double)rt->load_ns * 1e-9);
        generation_print(g, stderr);
        fprintf(stderr, " | seed %llu\n", (unsigned long long)f->sample.seed);
    }
    if (f->model.profile)
        profile_print(&rt->profile, stderr);
}

/* The prompt as it is. */
static bool complete(struct runtime *rt, const struct run_flags *f, const struct buf *text,
                     struct error *err)
{
    struct context context = {.rt = rt};
    struct stop_filter out = {.stop = &f->stop};
    struct token_list prompt = {0};
    struct generation g = {.context = &context,
                           .sample = &f->sample,
                           .n_predict = f->n_predict,
                           .ignore_eos = f->ignore_eos,
                           .on_text = on_text,
                           .arg = &out};
    bool ok = tokenizer_encode(rt->tokenizer, text->p ? text->p : "", text->len,
                               TOKENIZE_SPECIAL | TOKENIZE_BOS, &prompt, err);
    if (ok && prompt.n == 0 && tokenizer_bos(rt->tokenizer) >= 0)
        token_list_add(&prompt, tokenizer_bos(rt->tokenizer));
    if (ok && prompt.n == 0)
        ok = error_set(err, "the prompt is empty");
    ok = ok && generate(&g, prompt.ids, (int)prompt.n, err);
    if (!out.stopped)
        stop_filter_flush(&out, true);
    if (g.n_generated)
        fputc('\n', stdout);
    fflush(stdout);
    print_timings(rt, f, &g);
    context_clear(&context);
    token_list_clear(&prompt);
    buf_clear(&out.held);
    return ok;
}

static int run(const char *model, struct run_flags *f, struct terminal_options *chat,
               struct runtime_options *opt)
{
    struct error err = {0};
    struct buf text = {0};
    struct runtime *rt = NULL;
    bool ok = true, talk = !f->prompt && !f->file;
    if (f->file)
        ok = cli_read_file(f->file, (size_t)256 << 20, &text, &err);
    else if (f->prompt)
        buf_adds(&text, f->prompt);
    if (ok) {
        rt = cli_open(model, opt, &err);
        ok = rt != NULL;
    }
    if (ok && !rt->tokenizer) {
        err = rt->tokenizer_error;
        ok = false;
    }
    if (ok) {
        sample_params_advise(&f->sample, rt->file);
        chat->sample = f->sample;
    }
    int rc = EXIT_OK;
    if (ok && talk) {
        rc = terminal_chat(rt, chat);
        cli_clear_interrupt();
    } else if (ok && !f->raw && terminal_can_chat(rt)) {
        struct generation g = {0};
        ok = terminal_ask(rt, chat, text.p ? text.p : "", &g, &err) == EXIT_OK;
        print_timings(rt, f, &g);
    } else if (ok) {
        ok = complete(rt, f, &text, &err);
    }
    buf_clear(&text);
    runtime_close(rt);
    if (cli_interrupted())
        return EXIT_INTERRUPTED;
    return ok ? rc : cli_fail(&err);
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

int cmd_run(int argc, char **argv)
{
    struct run_flags f = {.sample = sample_params_unset(), .n_predict = -1};
    uint64_t seed = UINT64_MAX;
    const struct opt opts[] = {
        {OPT_STRING, 'p', "prompt", 0, &f.prompt, 0, 0, "TEXT", "the prompt"},
        {OPT_STRING, 'f', "file", 0, &f.file, 0, 0, "FILE",
         "read the prompt from a file; - is stdin"},
        {OPT_INT, 'n', "predict", "n-predict", &f.n_predict, -1, 1 << 28, "N",
         "tokens to generate (default: until the end or the context)"},
        {OPT_LIST, 0, "stop", 0, &f.stop, 0, 0, "TEXT", "stop at this text (repeatable)"},
        {OPT_FLAG, 0, "ignore-eos", 0, &f.ignore_eos, 0, 0, 0, "go on past the end token"},
        {OPT_FLAG, 0, "raw", 0, &f.raw, 0, 0, 0, "the prompt as it is, without the chat template"},
        {OPT_FLAG, 'q', "quiet", 0, &f.quiet, 0, 0, 0, "no timings"},
        {OPT_HEADING, 0, "chat", 0, 0, 0, 0, 0, 0},
        {OPT_STRING, 0, "system", 0, &f.system, 0, 0, "TEXT", "the system prompt"},
        {OPT_STRING, 0, "think", 0, &f.think, 0, 0, "MODE", "on, off or hide (default on)"},
        {OPT_FLAG, 'v', "verbose", 0, &f.verbose, 0, 0, 0, "speed after every turn of a chat"},
        {OPT_HEADING, 0, "sampling", 0, 0, 0, 0, 0, 0},
        {OPT_FLOAT, 0, "temp", "temperature", &f.sample.temp, 0, 100, "T",
         "temperature; 0 = greedy (default: the model's, or 0.8)"},
        {OPT_INT, 0, "top-k", 0, &f.sample.top_k, 0, 1 << 28, "K",
         "0 = off (default: the model's, or 40)"},
        {OPT_FLOAT, 0, "top-p", 0, &f.sample.top_p, 0, 1, "P",
         "1 = off (default: the model's, or 0.95)"},
        {OPT_FLOAT, 0, "min-p", 0, &f.sample.min_p, 0, 1, "P",
         "0 = off (default: the model's, or 0.05)"},
        {OPT_FLOAT, 0, "repeat-penalty", 0, &f.sample.repeat_penalty, 0.01, 100, "X",
         "1 = off (default: the model's, or 1)"},
        {OPT_INT, 0, "repeat-last-n", 0, &f.sample.repeat_last_n, -1, 1 << 20, "N",
         "tokens it looks back on (default 64, -1 = all)"},
        {OPT_FLOAT, 0, "presence-penalty", 0, &f.sample.presence_penalty, -100, 100, "X",
         "0 = off (default 0)"},
        {OPT_FLOAT, 0, "frequency-penalty", 0, &f.sample.frequency_penalty, -100, 100, "X",
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
                    "  echo 'The capital of France is' | steel run model.gguf -f - --temp 0\n",
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
    for (int i = 0; i < f.stop.n; i++)
        if (!*f.stop.items[i])
            return cli_args_exit(args_usage_error(&u, "--stop: empty text"));
    struct runtime_options opt;
    struct logit_bias *bias = mem_zalloc((size_t)f.bias.n, sizeof *bias);
    struct terminal_options chat = {
        .stop = &f.stop, .system = f.system, .n_predict = f.n_predict, .verbose = f.verbose};
    bool usable = cli_runtime_options(&u, &f.model, &opt) && parse_bias(&u, &f.bias, bias) &&
                  parse_think(&u, f.think, &chat.think);
    f.sample.bias = bias;
    f.sample.n_bias = f.bias.n;
    f.sample.seed = seed;
    if (seed == UINT64_MAX && getrandom(&f.sample.seed, 4, 0) == 4)
        f.sample.seed &= 0xffffffffu;
    int rc = EXIT_USAGE;
    if (usable) {
        cli_catch_interrupt();
        rc = run(n ? pos[0] : NULL, &f, &chat, &opt);
    }
    mem_free(bias);
    mem_free(f.stop.items);
    mem_free(f.bias.items);
    return rc;
}
