/* Writes JSON text into a buf, for replies and log lines. */
#ifndef STEEL_SERVER_JSONOUT_H
#define STEEL_SERVER_JSONOUT_H

#include "base/buf.h"

#include <jansson.h>

/* Writes a quoted string. Invalid UTF-8 becomes U+FFFD. */
void jsonout_string(struct buf *b, const char *s, size_t n);
void jsonout_text(struct buf *b, const char *s); /* NUL-terminated; NULL = null */
void jsonout_value(struct buf *b, const json_t *v);
/* Writes the shortest form that reads back as the same float; null for NaN and infinities. */
void jsonout_number(struct buf *b, double v);

#endif
