/* steel: finds the command and runs it. Commands live in cmd_NAME.c. */
#include "cli/cli.h"
#include "dist/job.h"
#include "base/version.h"
#include "engine/workers.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

const struct command cli_commands[] = {
    {"run", "[MODEL] [PROMPT]", "chat, or answer one prompt", cmd_run},
    {"serve", "[MODEL]", "OpenAI's, Anthropic's and Ollama's APIs and a web page", cmd_serve},
    {"route", "--upstream URL...", "one address in front of several servers", cmd_route},
    {"embed", "MODEL [TEXT...]", "vectors of texts", cmd_embed},
    {"rerank", "MODEL -q QUERY", "sort documents by how well they answer", cmd_rerank},
    {"pull", "NAME", "download a model: owner/name[:quant]", cmd_pull},
    {"list", "", "the models that are here", cmd_list},
    {"rm", "NAME", "remove one", cmd_rm},
    {"show", "[MODEL]", "what is in a model file", cmd_show},
    {"plan", "[MODEL] --tp N", "how a model would be placed on several ranks", cmd_plan},
    {"bench", "[MODEL] | serve", "measure the engine, or a running server", cmd_bench},
    {"perplexity", "[MODEL] FILE", "how well a model predicts a text", cmd_perplexity},
    {"tokenize", "MODEL [TEXT]", "the tokens of a text", cmd_tokenize},
    {"detokenize", "MODEL [IDS...]", "the text of token ids", cmd_detokenize},
    {"template", "[MODEL|FILE.jinja]", "render a chat template", cmd_template},
    {"constrain", "[MODEL] --jsonl", "try schemas and grammars on texts", cmd_constrain},
    {"convert", "DIR OUT.gguf", "make a GGUF of a Hugging Face folder", cmd_convert},
    {"quantize", "IN.gguf OUT.gguf TYPE", "make a smaller GGUF", cmd_quantize},
    {"logits", "[MODEL] --ids IN --out OUT", "logits of given token ids, for comparisons",
     cmd_logits},
    {"doctor", "", "what this machine has, and what is missing", cmd_doctor},
    {"completion", "bash|zsh|fish", "completions for your shell", cmd_completion},
    {"help", "[COMMAND]", "this text, or a command's", cmd_help},
    {NULL, NULL, NULL, NULL},
};

void cli_walk(void (*take)(const struct usage *u, void *ctx), void *ctx)
{
    args_on_help(take, ctx);
    for (const struct command *c = cli_commands; c->name; c++) {
        char name[32], serve[] = "serve", help[] = "--help";
        snprintf(name, sizeof name, "%s", c->name);
        c->run(2, (char *[]){name, help, NULL});
        if (c->run == cmd_bench)
            c->run(3, (char *[]){name, serve, help, NULL});
    }
    args_on_help(NULL, NULL);
}

static void help(FILE *out)
{
    fprintf(out, "steel: runs large language models (GGUF files, Hugging Face folders)\n\n"
                 "usage: steel COMMAND [options]\n\n");
    for (const struct command *c = cli_commands; c->name; c++) {
        char left[64];
        snprintf(left, sizeof left, "%s %s", c->name, c->args);
        fprintf(out, "  %-34s %s\n", left, c->about);
    }
    fprintf(out,
            "\nMODEL is a GGUF file, a Hugging Face folder or a name (owner/name:quant); where it "
            "may be\nleft out, the built-in one answers. 'steel COMMAND --help' teaches each "
            "command; 'steel --version' tells the "
            "version.\n");
}

/* Output that did not arrive is a failure, also of a command that went well. */
static int finish(int rc)
{
    args_release();
    if (fflush(stdout) == 0 && !ferror(stdout))
        return rc;
    if (rc == EXIT_OK)
        fprintf(stderr, "steel: the output could not be written\n");
    return rc == EXIT_OK ? EXIT_FAIL : rc;
}

static int run(int argc, char **argv)
{
    if (argc < 2) {
        help(stderr);
        return EXIT_USAGE;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") ||
        (!strcmp(argv[1], "help") && argc == 2)) {
        help(stdout);
        return finish(EXIT_OK);
    }
    if (!strcmp(argv[1], "--version") || !strcmp(argv[1], "-V")) {
        const char *commit = version_commit();
        printf("steel %s (%s%s%s)\n", version_number(), commit, *commit ? ", " : "",
               version_build());
        return finish(EXIT_OK);
    }
    const char *words[64];
    int n = 0;
    for (const struct command *c = cli_commands; c->name; c++) {
        if (!strcmp(argv[1], c->name))
            return finish(c->run(argc - 1, argv + 1));
        words[n++] = c->name;
    }
    const char *near = args_nearest(argv[1], words, n);
    fprintf(stderr, "steel: unknown command '%s'; %s%s%s'steel --help' lists them\n", argv[1],
            near ? "did you mean '" : "", near ? near : "", near ? "'? " : "");
    return EXIT_USAGE;
}

/* Joins the other processes of a job, where there is one. -1: this one runs the command. */
static int join_job(int argc, char **argv)
{
    static char arguments[JOB_ARGUMENTS], program[128];
    struct error say;
    for (int i = 1, n = 0; i < argc && n < (int)sizeof arguments - 1; i++)
        n += snprintf(arguments + n, sizeof arguments - (size_t)n, "%s%s", i > 1 ? " " : "",
                      argv[i]);
    snprintf(program, sizeof program, "steel %s (%s%s)", version_number(), version_commit(),
             version_build());
    enum job_role role = job_join(program, arguments, &say);
    if (say.msg[0])
        fprintf(stderr, "steel: %s\n", say.msg);
    if (role == JOB_FAILED)
        return EXIT_FAIL;
    return role == JOB_WORKER ? workers_run() : -1;
}

/* Streams that were closed stay so, but their numbers are taken: no file or socket gets them, and with
 * them what is printed. */
static void take_closed_streams(void)
{
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF &&
            open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) != fd)
            _exit(EXIT_FAIL);
}

int main(int argc, char **argv)
{
    take_closed_streams();
    int rc = join_job(argc, argv);
    if (rc < 0)
        rc = run(argc, argv);
    job_leave();
    return rc;
}
