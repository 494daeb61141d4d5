/* PNG by libpng: every colour type becomes RGBA of 8 bits, or RGB without alpha. Text, profiles and other data beside the pixels are skipped. */
#include "image/image_int.h"

#include <png.h>
#include <string.h>

struct png_reader {
    const struct image_source *s;
    size_t at;
    struct raster *out;
};

_Noreturn static void on_error(png_structp png, const char *message)
{
    const struct png_reader *r = png_get_error_ptr(png);
    if (!r->s->err->msg[0])
        error_set(r->s->err, "%.200s", message);
    png_longjmp(png, 1);
}

static void on_warning(png_structp png, const char *message)
{
    (void)png, (void)message;
}

static void read_bytes(png_structp png, png_bytep to, size_t n)
{
    struct png_reader *r = png_get_io_ptr(png);
    if (n > r->s->n - r->at)
        png_error(png, "the file ends too early");
    memcpy(to, r->s->bytes + r->at, n);
    r->at += n;
}

/* Bounds libpng's memory and skips chunks that are not needed. */
static void set_bounds(png_structp png)
{
    static const uint8_t skipped[] = "iCCP\0zTXt\0iTXt\0tEXt\0sPLT\0hIST\0pCAL\0sCAL";
    png_set_user_limits(png, IMAGE_MAX_SIDE, IMAGE_MAX_SIDE);
    png_set_chunk_cache_max(png, 64);
    png_set_chunk_malloc_max(png, 1 << 20);
    png_set_keep_unknown_chunks(png, PNG_HANDLE_CHUNK_NEVER, skipped, sizeof skipped / 5);
}

static void read_exif(png_structp png, png_infop info, struct raster *out)
{
    png_uint_32 n = 0;
    png_bytep exif = NULL;
    if (png_get_eXIf_1(png, info, &n, &exif) && exif)
        out->orientation = exif_orientation(exif, n);
}

static void read_rows(png_structp png, png_infop info, struct png_reader *r)
{
    struct raster *out = r->out;
    bool alpha = png_get_color_type(png, info) & PNG_COLOR_MASK_ALPHA ||
                 png_get_valid(png, info, PNG_INFO_tRNS);
    out->channels = alpha ? 4 : 3;
    png_set_expand(png); /* palettes, few bits, a transparent colour */
    png_set_scale_16(png);
    png_set_gray_to_rgb(png);
    if (alpha)
        png_set_add_alpha(png, 0xff, PNG_FILLER_AFTER);
    int passes = png_set_interlace_handling(png);
    png_read_update_info(png, info);
    if (png_get_rowbytes(png, info) != (size_t)out->width * (size_t)out->channels)
        png_error(png, "unexpected rows");
    for (int pass = 0; pass < passes; pass++)
        for (int y = 0; y < out->height; y++) {
            if (image_check_stop(r->s))
                png_error(png, "cancelled");
            png_read_row(png, raster_row(out, y), NULL);
        }
    png_read_end(png, info);
}

static bool read_all(png_structp png, png_infop info, struct png_reader *r)
{
    if (setjmp(png_jmpbuf(png)))
        return false;
    set_bounds(png);
    png_set_read_fn(png, r, read_bytes);
    png_read_info(png, info);
    if (!raster_new(r->s, png_get_image_width(png, info), png_get_image_height(png, info), r->out))
        return false;
    read_rows(png, info, r);
    read_exif(png, info, r->out);
    return true;
}

bool png_read_raster(const struct image_source *s, struct raster *out)
{
    struct png_reader r = {s, 0, out};
    png_structp png = png_create_read_struct(PNG_LIBPNG_VER_STRING, &r, on_error, on_warning);
    png_infop info = png ? png_create_info_struct(png) : NULL;
    bool ok = info ? read_all(png, info, &r) : error_set(s->err, "out of memory");
    png_destroy_read_struct(&png, &info, NULL);
    return ok;
}
