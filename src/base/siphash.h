/* SipHash-2-4, a keyed hash. With a secret key, clients cannot construct collisions. */
#ifndef STEEL_BASE_SIPHASH_H
#define STEEL_BASE_SIPHASH_H

#include <stddef.h>
#include <stdint.h>

uint64_t siphash(const uint64_t key[2], const void *data, size_t len);

#endif
