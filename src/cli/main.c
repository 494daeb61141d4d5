/* steel: finds the command and runs it. Commands live in cmd_NAME.c. */
#include "cli/cli.h"

#include <stdio.h>
#include <string.h>

#define STEEL_VERSION "0.1"

static const struct {
    const char *name, *args, *about;
    int (*run)(int argc, char **argv);
} commands[] = {
    {"run", "[MODEL] [-p PROMPT]", "chat, or answer one prompt", cmd_run},
    {"serve", "[MODEL]", "an OpenAI-compatible server and a web page", cmd_serve},
    {"show", "[MODEL]", "what is in a model file", cmd_show},
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
};

static void help(FILE *out)
{
    fprintf(out, "steel: runs large language models (GGUF files, Hugging Face folders)\n\n"
                 "usage: steel COMMAND [options]\n\n");
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        char left[64];
        snprintf(left, sizeof left, "%s %s", commands[i].name, commands[i].args);
        fprintf(out, "  %-34s %s\n", left, commands[i].about);
    }
    fprintf(out,
            "\nMODEL is a GGUF file or a Hugging Face folder; where it may be left out, the "
            "built-in one\n"
            "answers. 'steel COMMAND --help' teaches each command; 'steel --version' tells the "
            "version.\n");
}

/* Output that did not arrive is a failure, also of a command that went well. */
static int finish(int rc)
{
    if (fflush(stdout) == 0 && !ferror(stdout))
        return rc;
    if (rc == EXIT_OK)
        fprintf(stderr, "steel: the output could not be written\n");
    return rc == EXIT_OK ? EXIT_FAIL : rc;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        help(stderr);
        return EXIT_USAGE;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help")) {
        help(stdout);
        return finish(EXIT_OK);
    }
    if (!strcmp(argv[1], "--version")) {
        printf("steel %s\n", STEEL_VERSION);
        return finish(EXIT_OK);
    }
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (!strcmp(argv[1], commands[i].name))
            return finish(commands[i].run(argc - 1, argv + 1));
    fprintf(stderr, "steel: unknown command '%s'; 'steel --help' lists them\n", argv[1]);
    return EXIT_USAGE;
}
