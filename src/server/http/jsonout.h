/* JSON text written piece by piece into a buf: what replies and log lines are made of. */
#ifndef STEEL_SERVER_JSONOUT_H
#define STEEL_SERVER_JSONOUT_H

#include "base/buf.h"

#include <jansson.h>

/* A string in quotes. Bytes that are not UTF-8 become U+FFFD. */
void jsonout_string(struct buf *b, const char *s, size_t n);
void jsonout_text(struct buf *b, const char *s); /* NUL-terminated; NULL = null */
void jsonout_value(struct buf *b, const json_t *v);
/* The shortest form that keeps a float; null where JSON has no number for it. */
void jsonout_number(struct buf *b, double v);

#endif
