/*
 * steel help COMMAND: prints a command's help; with --man a man page (roff), as installed by `make
 * install`. Both come from the command's option table.
 */
#include "base/version.h"
#include "cli/cli.h"
#include "cli/config_file.h"

#include <stdio.h>
#include <string.h>

/* Prints text as roff: lines must not begin with a dot or a quote, and dashes are escaped. */
static void roff(const char *s)
{
    for (bool start = true; *s; s++) {
        if (start && (*s == '.' || *s == '\''))
            fputs("\\&", stdout);
        if (*s == '-' || *s == '\\')
            fputs(*s == '-' ? "\\-" : "\\e", stdout);
        else
            putchar(*s);
        start = *s == '\n';
    }
}

static void header(const char *page, const char *about)
{
    printf(".TH \"");
    roff(page);
    printf("\" 1 \"\" \"steel %s\" \"Steel\"\n.SH NAME\n", version_number());
    roff(page);
    printf(" \\- ");
    roff(about);
    putchar('\n');
}

static const char *about_of(const char *command)
{
    for (const struct command *c = cli_commands; c->name; c++)
        if (!strcmp(c->name, command))
            return c->about;
    return "measure a running server"; /* bench serve */
}

/* The page of "bench serve" is steel-bench-serve. */
static void page_name(const char *command, char *out, size_t size)
{
    snprintf(out, size, "steel-%s", command);
    for (char *c = out; *c; c++)
        if (*c == ' ')
            *c = '-';
}

static void man_page(const struct usage *u, void *ctx)
{
    (void)ctx;
    char page[64];
    page_name(u->command, page, sizeof page);
    header(page, about_of(u->command));
    printf(".SH SYNOPSIS\n.B steel %s\n", u->command);
    roff(u->synopsis);
    printf("\n.SH DESCRIPTION\n");
    roff(u->about);
    printf("\n.SH OPTIONS\n");
    for (int i = 0; i < u->n_opts; i++) {
        const struct opt *o = &u->opts[i];
        if (o->kind == OPT_HEADING) {
            printf(".SS ");
            roff(o->name);
            putchar('\n');
            continue;
        }
        if (!o->help)
            continue;
        printf(".TP\n");
        if (o->letter)
            printf("\\fB\\-%c\\fR, ", o->letter);
        else if (o->alias && o->alias[0] == '-')
            printf("\\fB\\-%s\\fR, ", o->alias + 1);
        printf("\\fB\\-\\-");
        roff(o->name);
        printf("\\fR");
        if (o->arg) {
            printf(" \\fI");
            roff(o->arg);
            printf("\\fR");
        }
        putchar('\n');
        roff(o->help);
        putchar('\n');
    }
    printf(".TP\n\\fB\\-h\\fR, \\fB\\-\\-help\\fR\nprint the help\n");
    if (u->examples) {
        printf(".SH EXAMPLES\n.nf\n");
        roff(u->examples);
        printf(".fi\n");
    }
    printf(
        ".SH FILES\n%s: options of every command, one per line, without dashes; those after a line "
        "[%s] are for this command only.\n.SH ENVIRONMENT\nSTEEL_ and the name of an option, as in "
        "STEEL_CTX_SIZE. The command line overrides the environment, which overrides the "
        "file.\n.SH SEE ALSO\n.BR steel (1)\n",
        CONFIG_FILE_PLACE, u->command);
}

static void name_page(const struct usage *u, void *ctx)
{
    (void)ctx;
    char page[64];
    page_name(u->command, page, sizeof page);
    printf("%s\n", page);
}

static void list_command(const struct usage *u, void *ctx)
{
    (void)ctx;
    printf(".TP\n.BR steel\\-%s (1)\n%s\n", u->command, about_of(u->command));
}

static void overview(void)
{
    header("steel", "run large language models");
    printf(".SH SYNOPSIS\n.B steel\n.I COMMAND\n[options]\n.SH DESCRIPTION\nRuns models from GGUF "
           "files and Hugging Face folders: in a terminal, as a server with the APIs of "
           "OpenAI, Anthropic and Ollama, or as a C library. If an optional MODEL is left out, the "
           "built-in model is used.\n.SH COMMANDS\n");
    cli_walk(list_command, NULL);
}

int cmd_help(int argc, char **argv)
{
    bool man = false, pages = false;
    struct opt opts[] = {
        {OPT_FLAG, 0, "man", 0, &man, 0, 0, 0, "print a man page, for man -l"},
        {OPT_FLAG, 0, "pages", 0, &pages, 0, 0, 0, "print the names of all man pages"},
    };
    struct usage u = {
        .command = "help",
        .synopsis = "[COMMAND [SUBCOMMAND]]",
        .about = "Prints the help of a command.",
        .examples = "  steel help run\n  steel help --man serve | man -l -\n",
        .opts = opts,
        .n_opts = sizeof opts / sizeof *opts,
        .max_args = 2,
    };
    const char *name[2];
    int n = args_parse(&u, argc, argv, name);
    if (n < 0)
        return cli_args_exit(n);
    if (pages) {
        printf("steel\n");
        cli_walk(name_page, NULL);
        return EXIT_OK;
    }
    if (!n && man) {
        overview();
        return EXIT_OK;
    }
    for (const struct command *c = cli_commands; c->name; c++) {
        if (!n || strcmp(c->name, name[0]))
            continue;
        char first[32], second[32] = "--help", help[] = "--help";
        snprintf(first, sizeof first, "%s", name[0]);
        if (n == 2)
            snprintf(second, sizeof second, "%s", name[1]);
        if (man)
            args_on_help(man_page, NULL);
        int rc = c->run(n + 1, (char *[]){first, second, help, NULL});
        args_on_help(NULL, NULL);
        return rc;
    }
    args_usage_error(&u, "there is no command '%s'", n ? name[0] : "");
    return EXIT_USAGE;
}
