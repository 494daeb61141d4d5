/*
 * steel completion bash|zsh|fish: prints a completion script for that shell, generated from the
 * commands' option tables. After a command it completes options and files; after an option with a
 * value, files.
 */
#include "cli/cli.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

/* The name of a shell function: "bench serve" -> bench_serve. */
static const char *identifier(const char *command, char *out, size_t size)
{
    snprintf(out, size, "%s", command);
    for (char *c = out; *c; c++)
        if (!isalnum((unsigned char)*c))
            *c = '_';
    return out;
}

/* Prints s in single quotes. Characters in `also` are escaped by a backslash (zsh: brackets and
 * colons). */
static void quoted(const char *s, const char *also)
{
    putchar('\'');
    for (; *s; s++) {
        if (*s == '\'')
            fputs("'\\''", stdout);
        else if (strchr(also, *s))
            printf("\\%c", *s);
        else
            putchar(*s);
    }
    putchar('\'');
}

static bool shown(const struct opt *o)
{
    return o->kind != OPT_HEADING && o->help;
}

static void bash_options(const struct usage *u, void *ctx)
{
    (void)ctx;
    char id[64];
    printf("_steel_%s() { echo '", identifier(u->command, id, sizeof id));
    for (int i = 0; i < u->n_opts; i++)
        if (shown(&u->opts[i]))
            printf("--%s ", u->opts[i].name);
    printf("--help'; }\n");
}

static void bash_values(const struct usage *u, void *ctx)
{
    (void)ctx;
    char id[64];
    printf("_steel_%s_values() { case $1 in ''", identifier(u->command, id, sizeof id));
    for (int i = 0; i < u->n_opts; i++) {
        const struct opt *o = &u->opts[i];
        if (!shown(o) || o->kind == OPT_FLAG)
            continue;
        printf("|--%s", o->name);
        if (o->letter)
            printf("|-%c", o->letter);
    }
    printf(") return 0;; esac; return 1; }\n");
}

static void bash(void)
{
    printf("# bash completion for steel; source it, or put it where bash-completion looks\n");
    cli_walk(bash_options, NULL);
    cli_walk(bash_values, NULL);
    printf("_steel() {\n"
           "    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} cmd\n"
           "    if [ \"$COMP_CWORD\" = 1 ]; then\n        COMPREPLY=($(compgen -W '");
    for (const struct command *c = cli_commands; c->name; c++)
        printf("%s ", c->name);
    printf("--help --version' -- \"$cur\"))\n        return\n    fi\n"
           "    cmd=${COMP_WORDS[1]//-/_}\n"
           "    [ \"$cmd ${COMP_WORDS[2]}\" = 'bench serve' ] && cmd=bench_serve\n"
           "    case $cmd in\n");
    printf("    help) COMPREPLY=($(compgen -W '");
    for (const struct command *c = cli_commands; c->name; c++)
        printf("%s ", c->name);
    printf("' -- \"$cur\")); return ;;\n"
           "    completion) COMPREPLY=($(compgen -W 'bash zsh fish' -- \"$cur\")); return ;;\n"
           "    esac\n"
           "    declare -F \"_steel_$cmd\" >/dev/null || return\n"
           "    if [[ $cur == -* ]] && ! \"_steel_${cmd}_values\" \"$prev\"; then\n"
           "        COMPREPLY=($(compgen -W \"$(\"_steel_$cmd\")\" -- \"$cur\"))\n"
           "    else\n"
           "        compopt -o filenames 2>/dev/null\n"
           "        COMPREPLY=($(compgen -f -- \"$cur\"))\n"
           "    fi\n}\ncomplete -F _steel steel\n");
}

static void zsh_command(const struct usage *u, void *ctx)
{
    (void)ctx;
    char id[64];
    printf("_steel_%s() {\n    _arguments -s \\\n", identifier(u->command, id, sizeof id));
    for (int i = 0; i < u->n_opts; i++) {
        const struct opt *o = &u->opts[i];
        if (!shown(o))
            continue;
        char text[600];
        const char *many = o->kind == OPT_LIST ? "*" : "";
        snprintf(text, sizeof text, "[%.500s]", o->help);
        for (char *c = text + 1; c[1]; c++) /* brackets and colons are special in zsh */
            if (strchr("[]:", *c))
                *c = ' ';
        if (o->letter) {
            printf("        '%s-%c'", many, o->letter);
            quoted(text, "");
            printf("%s \\\n", o->kind == OPT_FLAG ? "" : "':value:_files'");
        }
        printf("        '%s--%s'", many, o->name);
        quoted(text, "");
        printf("%s \\\n", o->kind == OPT_FLAG ? "" : "':value:_files'");
    }
    printf("        '--help[print the help]' '*:file:_files'\n}\n");
}

static void zsh(void)
{
    printf(
        "#compdef steel\n# zsh completion for steel: put it into a folder of $fpath as _steel\n");
    cli_walk(zsh_command, NULL);
    printf("_steel() {\n    local -a cmds\n    cmds=(\n");
    for (const struct command *c = cli_commands; c->name; c++) {
        char line[200];
        snprintf(line, sizeof line, "%s:%s", c->name, c->about);
        printf("        ");
        quoted(line, "");
        putchar('\n');
    }
    printf(
        "    )\n    if (( CURRENT == 2 )); then\n        _describe command cmds\n        return\n"
        "    fi\n    local cmd=${words[2]//-/_}\n    shift words; (( CURRENT-- ))\n"
        "    if [[ $cmd == bench && ${words[2]} == serve ]]; then\n"
        "        cmd=bench_serve; shift words; (( CURRENT-- ))\n    fi\n"
        "    case $cmd in\n"
        "    help) _describe command cmds ;;\n"
        "    completion) compadd bash zsh fish ;;\n"
        "    *) (( $+functions[_steel_$cmd] )) && _steel_$cmd ;;\n"
        "    esac\n}\n"
        "if [ \"$funcstack[1]\" = _steel ]; then _steel \"$@\"; else compdef _steel steel; fi\n");
}

static void fish_command(const struct usage *u, void *ctx)
{
    (void)ctx;
    const char *sub = strchr(u->command, ' '); /* bench serve */
    for (int i = 0; i < u->n_opts; i++) {
        const struct opt *o = &u->opts[i];
        if (!shown(o))
            continue;
        printf("complete -c steel -n '__fish_seen_subcommand_from %s%s' -l %s",
               sub ? "bench; and __fish_seen_subcommand_from " : "", sub ? sub + 1 : u->command,
               o->name);
        if (o->letter)
            printf(" -s %c", o->letter);
        if (o->kind != OPT_FLAG)
            printf(" -r");
        printf(" -d ");
        quoted(o->help, "");
        putchar('\n');
    }
}

static void fish(void)
{
    printf("# fish completion for steel: put it into ~/.config/fish/completions/steel.fish\n");
    for (const struct command *c = cli_commands; c->name; c++) {
        printf("complete -c steel -f -n __fish_use_subcommand -a %s -d ", c->name);
        quoted(c->about, "");
        putchar('\n');
    }
    cli_walk(fish_command, NULL);
    printf("complete -c steel -f -n '__fish_seen_subcommand_from completion' -a 'bash zsh fish'\n"
           "complete -c steel -f -n '__fish_seen_subcommand_from help' -a '");
    for (const struct command *c = cli_commands; c->name; c++)
        printf("%s ", c->name);
    printf("'\n");
}

int cmd_completion(int argc, char **argv)
{
    struct usage u = {
        .command = "completion",
        .synopsis = "bash|zsh|fish",
        .about = "Prints a script that lets the shell complete commands and options.",
        .examples = "  source <(steel completion bash)\n"
                    "  steel completion zsh > ~/.zfunc/_steel\n"
                    "  steel completion fish > ~/.config/fish/completions/steel.fish\n",
        .min_args = 1,
        .max_args = 1,
    };
    const char *shell;
    int n = args_parse(&u, argc, argv, &shell);
    if (n < 0)
        return cli_args_exit(n);
    if (!strcmp(shell, "bash"))
        bash();
    else if (!strcmp(shell, "zsh"))
        zsh();
    else if (!strcmp(shell, "fish"))
        fish();
    else
        return args_usage_error(&u, "'%s' is not bash, zsh or fish", shell), EXIT_USAGE;
    return EXIT_OK;
}
