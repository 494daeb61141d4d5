/* Base64. */
#ifndef STEEL_BASE_BASE64_H
#define STEEL_BASE_BASE64_H

#include "base/buf.h"

/* Decodes s and appends the bytes to out. False if s is not valid base64. */
bool base64_decode(const char *s, size_t n, struct buf *out);

/* Appends the text of n bytes, padded. */
void base64_encode(const void *bytes, size_t n, struct buf *out);

#endif
