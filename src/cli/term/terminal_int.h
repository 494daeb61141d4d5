/* What the parts of the chat terminal share: its state, and the words it says to people. */
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
    json_t *dropped;         /* array: messages that the context had no room for, oldest first */
    struct steel_event last; /* the last turn's counters */
    struct lineedit *input;
    bool color;   /* escape sequences may be written */
    bool screen;  /* stdout is a terminal: words are wrapped, markdown is drawn */
    bool unicode; /* lines may be drawn */
    bool quit;
};

/* terminal.c */
void terminal_reply(struct terminal *t); /* answers the conversation as it stands */
bool terminal_set_system(struct terminal *t, const char *text, struct steel_error *err);
/* A line to the person, wrapped where there is a screen; dim ones are asides. */
void terminal_say(const struct terminal *t, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
void terminal_aside(const struct terminal *t, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
struct markdown_options terminal_look(const struct terminal *t);
/* Sampling as flags, /set and the model's author say. */
struct steel_request_options terminal_sampling(const struct terminal *t);

/* terminal_room.c */
/* Makes the conversation fit its context, leaving room for an answer: drops the oldest turns, if that
 * is allowed, and says so. False: the last message can never fit; nothing was dropped. */
bool terminal_make_room(struct terminal *t, struct steel_error *err);
/* The messages from `first` on as JSON; heap. */
char *terminal_messages(const struct terminal *t, int first);
/* The messages in place of those there are; none or all. */
bool terminal_replace(struct terminal *t, const char *json, struct steel_error *err);

/* terminal_commands.c */
void terminal_command(struct terminal *t, const char *line);
size_t terminal_offer(void *arg, const char *before, struct buf *list); /* a lineedit_offer */

/* terminal_model.c */
void terminal_model(struct terminal *t, const char *name);

#endif
