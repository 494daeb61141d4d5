/*
 * The shapes OpenAI's API allows for messages and tools, checked before anything renders them, so that
 * a template never sees another. Needs nothing but the JSON; the server and the library share it.
 */
#ifndef STEEL_TEXT_CHAT_CHECK_H
#define STEEL_TEXT_CHAT_CHECK_H

#include "base/error.h"

#include <jansson.h>

enum { CHAT_WHERE = 64 };

/* False: `where` (CHAT_WHERE bytes) is the place of the fault, as messages[3].content, and the message
 * names it too. tools may be NULL. */
bool chat_check_messages(const json_t *messages, char *where, struct error *err);
bool chat_check_tools(const json_t *tools, char *where, struct error *err);

#endif
