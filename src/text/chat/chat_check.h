/*
 * The shapes that OpenAI's API allows for messages and tools. They are checked before rendering, so
 * that templates never see any other shape. Depends only on the JSON; shared by the server and the
 * library.
 */
#ifndef STEEL_TEXT_CHAT_CHECK_H
#define STEEL_TEXT_CHAT_CHECK_H

#include "base/error.h"

#include <jansson.h>

enum { CHAT_WHERE = 64 };

/* On failure `where` (CHAT_WHERE bytes) names the invalid field, such as messages[3].content, and
 * so does the message. tools may be NULL. */
bool chat_check_messages(const json_t *messages, char *where, struct error *err);
bool chat_check_tools(const json_t *tools, char *where, struct error *err);

#endif
