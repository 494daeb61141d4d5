/* Base64 decoding. */
#ifndef STEEL_BASE_BASE64_H
#define STEEL_BASE_BASE64_H

#include "base/buf.h"

/* Decodes s and appends the bytes to out. False if s is not valid base64. */
bool base64_decode(const char *s, size_t n, struct buf *out);

#endif
