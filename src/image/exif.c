/* The orientation tag of EXIF data. Everything else in it is ignored, broken data means no orientation. */
#include "image/image_int.h"

static unsigned number(const uint8_t *p, int bytes, bool little)
{
    unsigned v = 0;
    for (int i = 0; i < bytes; i++)
        v = v << 8 | p[little ? bytes - 1 - i : i];
    return v;
}

int exif_orientation(const uint8_t *tiff, size_t n)
{
    enum { ORIENTATION = 0x0112, SHORT = 3, ENTRY = 12 };
    if (n < 8 || tiff[0] != tiff[1] || (tiff[0] != 'I' && tiff[0] != 'M'))
        return 0;
    bool little = tiff[0] == 'I';
    size_t at = number(tiff + 4, 4, little);
    if (number(tiff + 2, 2, little) != 42 || at > n - 2)
        return 0;
    unsigned entries = number(tiff + at, 2, little);
    at += 2;
    for (unsigned i = 0; i < entries && n - at >= ENTRY; i++, at += ENTRY) {
        if (number(tiff + at, 2, little) != ORIENTATION ||
            number(tiff + at + 2, 2, little) != SHORT)
            continue;
        unsigned v = number(tiff + at + 8, 2, little);
        return v >= 1 && v <= 8 ? (int)v : 0;
    }
    return 0;
}
