/* libFuzzer entry: any bytes as a picture, through every decoder, with small bounds; and its resizing. */
#include "image/resize.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct image_limits limits = {.max_pixels = 1 << 16};
    struct image m, small;
    struct error err = {0};
    if (!image_decode(data, size, &limits, &m, &err)) {
        CHECK(err.msg[0], "failure without a message");
        return 0;
    }
    CHECK(m.width > 0 && m.height > 0 && (int64_t)m.width * m.height <= limits.max_pixels,
          "%d x %d", m.width, m.height);
    unsigned sum = 0;
    for (size_t i = 0; i < (size_t)m.width * (size_t)m.height * 3; i++)
        sum += m.rgb[i];
    volatile unsigned keep = sum; /* the pixels must be read */
    (void)keep;
    CHECK(image_resize(&m, 1 + size % 40, 1 + size % 23, size % 3, NULL, &small, &err), "%s",
          err.msg);
    image_free(&small);
    image_free(&m);
    return 0;
}
