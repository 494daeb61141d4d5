/*
 * The user's config file, read once: "name value" or "name = value", one a line; "#" begins a
 * comment, "[command]" a part for that command alone. STEEL_CONFIG names another file ("" = none).
 * Knows no option; args.c looks them up.
 */
#ifndef STEEL_CLI_CONFIG_FILE_H
#define STEEL_CLI_CONFIG_FILE_H

#define CONFIG_FILE_PLACE "~/.config/steel/config"

struct config_line {
    const char *section; /* NULL = every command that has the option */
    const char *name, *value;
    int line;
};

struct config_file {
    const char *path;
    const char *error; /* why it cannot be used; NULL: it can, or there is none */
    struct config_line *lines;
    int n;
};

const struct config_file *config_file_get(void);

#endif
