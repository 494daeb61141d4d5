/*
 * BMP without a library: Debian has no small one that is made for hostile files. Palettes; 16, 24 and 32 bits, with the
 * header's masks if there are any. Run lengths (RLE4, RLE8) are refused.
 */
#include "image/image_int.h"

enum { FILE_HEADER = 14, CORE_HEADER = 12, INFO_HEADER = 40, MASKS = FILE_HEADER + INFO_HEADER };
enum { PLAIN = 0, BITFIELDS = 3, ALPHA_BITFIELDS = 6 };

struct bmp {
    const uint8_t *p; /* (n) the file */
    size_t n;
    int64_t width, height;
    bool top_down;
    uint32_t header, bits, compression, n_colours;
    size_t colour_bytes, palette, pixels; /* palette, pixels: where they begin */
    uint32_t mask[4];                     /* red, green, blue, alpha */
};

static uint32_t number(const struct bmp *b, size_t at, int bytes)
{
    uint32_t v = 0;
    for (int i = 0; i < bytes; i++)
        v |= (uint32_t)b->p[at + (size_t)i] << 8 * i;
    return v;
}

static bool read_masks(struct bmp *b, struct error *err)
{
    static const uint32_t plain[2][4] = {{0x7c00, 0x3e0, 0x1f, 0}, {0xff0000, 0xff00, 0xff, 0}};
    bool own = b->compression == BITFIELDS || b->compression == ALPHA_BITFIELDS;
    bool alpha = b->header >= 56 || b->compression == ALPHA_BITFIELDS;
    if (own && b->n < MASKS + 16)
        return error_set(err, "the file ends too early");
    for (int i = 0; i < 4; i++)
        b->mask[i] = !own               ? plain[b->bits == 32][i]
                     : i == 3 && !alpha ? 0
                                        : number(b, MASKS + 4 * (size_t)i, 4);
    return true;
}

static bool read_header(struct bmp *b, struct error *err)
{
    if (b->n < FILE_HEADER + CORE_HEADER)
        return error_set(err, "the file ends too early");
    b->pixels = number(b, 10, 4);
    b->header = number(b, 14, 4);
    bool core = b->header == CORE_HEADER;
    if (!core && (b->header < INFO_HEADER || b->header > 1024 || b->n < FILE_HEADER + b->header))
        return error_set(err, "a header of %u bytes", b->header);
    int32_t height = core ? (int32_t)number(b, 20, 2) : (int32_t)number(b, 22, 4);
    b->width = core ? (int32_t)number(b, 18, 2) : (int32_t)number(b, 18, 4);
    b->height = height < 0 ? -(int64_t)height : height;
    b->top_down = height < 0;
    b->bits = number(b, core ? 24 : 28, 2);
    b->compression = core ? PLAIN : number(b, 30, 4);
    b->n_colours = core ? 0 : number(b, 46, 4);
    b->colour_bytes = core ? 3 : 4;
    b->palette = FILE_HEADER + b->header;
    bool wide = b->bits == 16 || b->bits == 32;
    if (b->compression != PLAIN &&
        !(wide && (b->compression == BITFIELDS || b->compression == ALPHA_BITFIELDS)))
        return error_set(err, "compression %u of %u bits is not supported", b->compression,
                         b->bits);
    if (b->bits != 1 && b->bits != 4 && b->bits != 8 && b->bits != 24 && !wide)
        return error_set(err, "%u bits a pixel", b->bits);
    if (b->bits <= 8 && (b->n_colours == 0 || b->n_colours > 1u << b->bits))
        b->n_colours = 1u << b->bits;
    return !wide || read_masks(b, err);
}

/* The bits of v that mask selects, scaled to 0 to 255. */
static uint8_t channel(uint32_t v, uint32_t mask, uint8_t absent)
{
    if (!mask)
        return absent;
    int shift = __builtin_ctz(mask);
    uint64_t most = mask >> shift;
    return (uint8_t)(((v & mask) >> shift) * (uint64_t)255 / most);
}

static void read_row(const struct bmp *b, const uint8_t *from, uint8_t *to)
{
    size_t bytes = b->bits / 8;
    for (int64_t x = 0; x < b->width; x++, to += 4) {
        if (b->bits <= 8) {
            size_t bit = (size_t)x * b->bits;
            unsigned index = from[bit / 8] >> (8 - b->bits - bit % 8) & ((1u << b->bits) - 1);
            const uint8_t *c = b->p + b->palette + index * b->colour_bytes;
            bool known = index < b->n_colours;
            for (int i = 0; i < 3; i++)
                to[i] = known ? c[2 - i] : 0;
            to[3] = 255;
            continue;
        }
        const uint8_t *p = from + (size_t)x * bytes;
        uint32_t v = 0;
        for (size_t i = 0; i < bytes; i++)
            v |= (uint32_t)p[i] << 8 * i;
        for (int i = 0; i < 4; i++)
            to[i] = b->bits == 24 ? (i == 3 ? 255 : p[2 - i])
                                  : channel(v, b->mask[i], i == 3 ? 255 : 0);
    }
}

bool bmp_read_raster(const struct image_source *s, struct raster *out)
{
    struct bmp b = {.p = s->bytes, .n = s->n};
    if (!read_header(&b, s->err) || !raster_new(s, b.width, b.height, out))
        return false;
    size_t stride = ((size_t)b.width * b.bits + 31) / 32 * 4, rows = (size_t)b.height;
    bool has_palette =
        b.bits > 8 || (b.palette <= b.n && b.n_colours * b.colour_bytes <= b.n - b.palette);
    if (!has_palette || b.pixels > b.n || stride * rows > b.n - b.pixels)
        return error_set(s->err, "the file ends too early");
    for (size_t y = 0; y < rows; y++) {
        if (image_check_stop(s))
            return false;
        read_row(&b, b.p + b.pixels + y * stride,
                 raster_row(out, (int)(b.top_down ? y : rows - 1 - y)));
    }
    return true;
}
