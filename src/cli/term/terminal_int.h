/* The chat terminal's state and messages, shared by its files. */
#ifndef STEEL_CLI_TERMINAL_INT_H
#define STEEL_CLI_TERMINAL_INT_H

#include "cli/term/lineedit.h"
#include "cli/term/markdown.h"
#include "cli/term/terminal.h"

#include <jansson.h>

struct terminal {
    struct steel_engine *engine;
    struct steel_chat *chat;
    struct terminal_options opt;
    char *system;            /* NULL = none */
    char *samplers;          /* set by /set; NULL = the options' */
    json_t *dropped;         /* array of messages dropped from the context, oldest first */
    struct steel_event last; /* counters of the last turn */
    struct lineedit *input;
    bool color;   /* use escape sequences */
    bool links;   /* the terminal takes hyperlinks */
    bool screen;  /* stdout is a terminal: wrap words, render markdown */
    bool unicode; /* use box characters */
    bool quit;
};

/* terminal.c */
void terminal_reply(struct terminal *t); /* generates the next answer */
bool terminal_set_system(struct terminal *t, const char *text, struct steel_error *err);
/* Prints a line to the user, wrapped on a terminal. Asides are dim. */
void terminal_say(const struct terminal *t, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
void terminal_aside(const struct terminal *t, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
struct markdown_options terminal_look(const struct terminal *t);
/* Sampling settings from options, /set and the model's recommendations. */
struct steel_request_options terminal_sampling(const struct terminal *t);

/* terminal_room.c */
/* Makes the conversation fit its context with room for an answer: drops the oldest turns if that
 * is allowed, and says so. False if the last message alone is too long; then nothing is dropped. */
bool terminal_make_room(struct terminal *t, struct steel_error *err);
/* The messages from `first` on as JSON. The caller frees it. */
char *terminal_messages(const struct terminal *t, int first);
/* Replaces all messages, or none on failure. */
bool terminal_replace(struct terminal *t, const char *json, struct steel_error *err);

/* terminal_commands.c */
void terminal_command(struct terminal *t, const char *line);
size_t terminal_offer(void *arg, const char *before,
                      struct buf *list); /* completions; a lineedit_offer */

/* terminal_model.c */
void terminal_model(struct terminal *t, const char *name);

/* An image file for the next message. */
bool terminal_add_image(struct terminal *t, const char *path, struct steel_error *err);

#endif
