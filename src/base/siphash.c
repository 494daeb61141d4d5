/* See siphash.h. */
#include "base/siphash.h"

#include <string.h>

static uint64_t rotl(uint64_t x, int n)
{
    return x << n | x >> (64 - n);
}

uint64_t siphash(const uint64_t key[2], const void *data, size_t len)
{
    const unsigned char *in = data;
    uint64_t v0 = key[0] ^ 0x736f6d6570736575u, v1 = key[1] ^ 0x646f72616e646f6du;
    uint64_t v2 = key[0] ^ 0x6c7967656e657261u, v3 = key[1] ^ 0x7465646279746573u;
    for (size_t at = 0, done = 0; !done; at += 8) {
        uint64_t m = 0;
        size_t n = len - at < 8 ? len - at : 8;
        if (n)
            memcpy(&m, in + at, n);
        if (n < 8) {
            m |= (uint64_t)(len & 0xff) << 56;
            done = 1;
        }
        v3 ^= m;
        for (int i = 0; i < (done ? 2 + 4 : 2); i++) {
            if (i == 2) {
                v0 ^= m;
                v2 ^= 0xff;
            }
            v0 += v1;
            v1 = rotl(v1, 13) ^ v0;
            v0 = rotl(v0, 32);
            v2 += v3;
            v3 = rotl(v3, 16) ^ v2;
            v0 += v3;
            v3 = rotl(v3, 21) ^ v0;
            v2 += v1;
            v1 = rotl(v1, 17) ^ v2;
            v2 = rotl(v2, 32);
        }
        if (!done)
            v0 ^= m;
    }
    return v0 ^ v1 ^ v2 ^ v3;
}
