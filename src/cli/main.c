/* steel: finds the command and runs it. Commands are in cmd_NAME.c. */
#include "cli/agents.h"
#include "cli/cli.h"
#include "cli/settings.h"
#include "dist/job.h"
#include "base/version.h"
#include "engine/workers.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

const struct command cli_commands[] = {
    {"run", "[MODEL] [PROMPT]", "chat in the terminal, or answer one prompt", cmd_run},
    {"serve", "[MODEL]", "serve the OpenAI, Anthropic and Ollama APIs and a web page", cmd_serve},
    {"launch", AGENT_NAMES, "run a coding agent with a local model", cmd_launch},
    {"route", "--upstream URL...", "a gateway: one address for several servers", cmd_route},
    {"embed", "MODEL [TEXT...]", "compute embedding vectors of texts", cmd_embed},
    {"rerank", "MODEL -q QUERY", "sort documents by how well they answer a query", cmd_rerank},
    {"pull", "NAME", "download a model: owner/name[:quant]", cmd_pull},
    {"list", "", "list downloaded models", cmd_list},
    {"rm", "NAME", "remove a downloaded model", cmd_rm},
    {"ps", "", "list the models of a running server", cmd_ps},
    {"load", "NAME", "load a model of a running server", cmd_load_model},
    {"stop", "NAME", "unload a model of a running server", cmd_stop_model},
    {"cache", "list | clear [MODEL]", "prefixes that the server keeps on disk", cmd_cache},
    {"show", "[MODEL]", "print size, metadata and tensors of a model", cmd_show},
    {"plan", "[MODEL]", "show whether a model fits, where its bytes would be, its speed", cmd_plan},
    {"bench", "[MODEL] | serve", "measure the engine, or a running server", cmd_bench},
    {"perplexity", "[MODEL] FILE", "measure how well a model predicts a text", cmd_perplexity},
    {"tokenize", "MODEL [TEXT]", "print the tokens of a text", cmd_tokenize},
    {"detokenize", "MODEL [IDS...]", "print the text of token ids", cmd_detokenize},
    {"template", "[MODEL|FILE.jinja]", "render a chat template", cmd_template},
    {"constrain", "[MODEL] --jsonl", "test schemas and grammars on texts", cmd_constrain},
    {"convert", "DIR OUT.gguf", "convert a Hugging Face folder to GGUF", cmd_convert},
    {"quantize", "IN.gguf OUT.gguf TYPE", "quantise a GGUF to a smaller one", cmd_quantize},
    {"logits", "[MODEL] --ids IN --out OUT", "compute the logits of given token ids", cmd_logits},
    {"doctor", "", "check this machine and say what is missing", cmd_doctor},
    {"completion", "bash|zsh|fish", "print a completion script for your shell", cmd_completion},
    {"help", "[COMMAND]", "print this help, or a command's", cmd_help},
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
        args_print_row(out, left, 34, c->about);
    }
    fprintf(out, "\nMODEL is a GGUF file, a Hugging Face folder or a name (owner/name:quant). If "
                 "an optional\n"
                 "MODEL is left out, the built-in model is used. 'steel COMMAND --help' explains a "
                 "command;\n"
                 "'steel --version' prints the version.\n");
}

/* Failing to write the output is a failure even if the command succeeded. */
static int finish(int rc)
{
    args_release();
    if (fflush(stdout) == 0 && !ferror(stdout))
        return rc;
    if (rc == EXIT_OK)
        fprintf(stderr, "steel: the output could not be written\n");
    return rc == EXIT_OK ? EXIT_FAIL : rc;
}

/* Help and completions work whatever the settings are. */
static bool wants_help(int argc, char **argv)
{
    if (!strcmp(argv[1], "help") || !strcmp(argv[1], "completion"))
        return true;
    for (int i = 2; i < argc && strcmp(argv[i], "--"); i++)
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h"))
            return true;
    return false;
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
        if (!strcmp(argv[1], c->name) && !wants_help(argc, argv) && !settings_check(c->name))
            return EXIT_USAGE;
        if (!strcmp(argv[1], c->name))
            return finish(c->run(argc - 1, argv + 1));
        words[n++] = c->name;
    }
    const char *near = args_nearest(argv[1], words, n);
    fprintf(stderr, "steel: unknown command '%s'; %s%s%s'steel --help' lists them\n", argv[1],
            near ? "did you mean '" : "", near ? near : "", near ? "'? " : "");
    return EXIT_USAGE;
}

/* Joins the other processes of a job, if there are any. Returns -1 if this process runs the
 * command, otherwise an exit code. */
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

/* Occupies closed standard streams with /dev/null, so that no file or socket gets their number
 * and with it what is printed. */
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
