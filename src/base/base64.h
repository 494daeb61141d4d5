/* Base64 to bytes. */
#ifndef STEEL_BASE_BASE64_H
#define STEEL_BASE_BASE64_H

#include "base/buf.h"

/* Adds the bytes that s stands for; false where it is no base64. */
bool base64_decode(const char *s, size_t n, struct buf *out);

#endif
