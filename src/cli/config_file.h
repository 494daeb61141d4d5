/*
 * The user's config file, read once. Lines are "name value" or "name = value"; "#" starts a
 * comment; "[command]" starts a section for that command only. STEEL_CONFIG names another file (""
 * = none). Does not know any option; args.c looks them up.
 */
#ifndef STEEL_CLI_CONFIG_FILE_H
#define STEEL_CLI_CONFIG_FILE_H

#define CONFIG_FILE_PLACE "~/.config/steel/config"

struct config_line {
    const char
        *section; /* NULL = for every command that has the option; "model NAME": serve_models.h */
    const char *name, *value;
    int line;
};

struct config_file {
    const char *path;
    const char *error; /* why the file cannot be used; NULL = it is fine, or there is none */
    struct config_line *lines;
    int n;
};

const struct config_file *config_file_get(void);
/* Cuts a text into lines, which point into it, with to->lines allocated by mem. Returns the number of the line that is
 * none, or 0. */
int config_file_parse(char *text, struct config_file *to);

#endif
