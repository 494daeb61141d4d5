/*
 * Decoding pictures. Files of every kind are written here by the libraries' encoders or by hand, and must decode to the
 * pixels that they were made of; cut or over-large ones fail in words. Resizing has known values.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "base/mem.h"
#include "image/resize.h"

#include <gif_lib.h>
#include <jpeglib.h>
#include <png.h>
#include <webp/encode.h>

enum { W = 13, H = 7, CAP = 1 << 16 };

struct file {
    uint8_t p[CAP];
    size_t n;
};

static void put(struct file *f, const void *p, size_t n)
{
    assert_true(n <= CAP - f->n);
    memcpy(f->p + f->n, p, n);
    f->n += n;
}

static void put_le(struct file *f, uint64_t v, int bytes)
{
    for (int i = 0; i < bytes; i++)
        put(f, &(uint8_t){(uint8_t)(v >> 8 * i)}, 1);
}

/* The test picture: neighbours differ, no symmetry. */
static void pixel(int x, int y, uint8_t *rgb)
{
    rgb[0] = (uint8_t)(x * 255 / (W - 1));
    rgb[1] = (uint8_t)(y * 255 / (H - 1));
    rgb[2] = (uint8_t)((x * 37 + y * 101) % 256);
}

static void expect_error(const struct file *f, const char *words)
{
    struct image_limits limits = {0};
    struct image m;
    struct error err = {0};
    assert_false(image_decode(f->p, f->n, &limits, &m, &err));
    if (!strstr(err.msg, words))
        fail_msg("\"%s\" does not say \"%s\"", err.msg, words);
    assert_null(m.rgb);
}

static struct image decode(const struct file *f)
{
    struct image_limits limits = {0};
    struct image m;
    struct error err = {0};
    if (!image_decode(f->p, f->n, &limits, &m, &err))
        fail_msg("%s", err.msg);
    return m;
}

/* want: the colour of (x, y); off: the largest difference that is allowed. */
static void expect_pixels(const struct file *f, void (*want)(int x, int y, uint8_t *rgb), int off)
{
    struct image m = decode(f);
    assert_int_equal(m.width, W);
    assert_int_equal(m.height, H);
    for (int y = 0; y < H; y++)
        for (int x = 0; x < W; x++) {
            uint8_t rgb[3];
            want(x, y, rgb);
            for (int c = 0; c < 3; c++) {
                int is = m.rgb[(y * W + x) * 3 + c];
                if (abs(is - rgb[c]) > off)
                    fail_msg("(%d, %d) channel %d: %d, expected %d", x, y, c, is, rgb[c]);
            }
        }
    image_free(&m);
}

/* A file that is cut anywhere is refused or, where only the end marks are gone, whole; and never too large. */
static void expect_cuts(const struct file *whole, size_t may_lack)
{
    static struct file f;
    struct image_limits limits = {.max_pixels = W * H}, small = {.max_pixels = W * H - 1};
    struct image m;
    struct error err;
    for (size_t n = 0; n < whole->n; n++) {
        f = *whole;
        memset(f.p + n, 0xa5, CAP - n); /* what follows must not be read */
        err = (struct error){0};
        if (image_decode(f.p, n, &limits, &m, &err)) {
            if (n + may_lack < whole->n)
                fail_msg("%zu of %zu bytes decode", n, whole->n);
            image_free(&m);
        } else {
            assert_true(err.msg[0]);
        }
    }
    err = (struct error){0};
    assert_false(image_decode(whole->p, whole->n, &small, &m, &err));
    assert_non_null(strstr(err.msg, "13 x 7 pixels; at most 90"));
    atomic_bool stop = true;
    limits.stop = &stop;
    assert_false(image_decode(whole->p, whole->n, &limits, &m, &err));
    assert_non_null(strstr(err.msg, "cancelled"));
}

/* PNG */

static void png_out(png_structp png, png_bytep p, size_t n)
{
    put(png_get_io_ptr(png), p, n);
}

static void png_flush_nothing(png_structp png)
{
    (void)png;
}

/* One sample of the test picture in `depth` bits: what it holds of the 8 bits. */
static unsigned sample_of(uint8_t v, int depth)
{
    return depth == 16 ? v * 257u : (unsigned)v >> (8 - depth);
}

struct png_kind {
    int colour, depth;
    bool interlaced, exif, key; /* key: a transparent colour, (0, 0)'s */
};

static void png_make(struct file *f, const struct png_kind *k)
{
    png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, NULL, NULL, NULL);
    png_infop info = png_create_info_struct(png);
    static uint8_t rows[H][W * 8];
    png_bytep at[H];
    f->n = 0;
    memset(rows, 0, sizeof rows);
    png_set_write_fn(png, f, png_out, png_flush_nothing);
    png_set_IHDR(png, info, W, H, k->depth, k->colour,
                 k->interlaced ? PNG_INTERLACE_ADAM7 : PNG_INTERLACE_NONE,
                 PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
    int channels = png_get_channels(png, info);
    png_color palette[256];
    for (int i = 0; i < 256; i++)
        palette[i] = (png_color){(png_byte)i, (png_byte)(255 - i), (png_byte)(i * 7)};
    if (k->colour == PNG_COLOR_TYPE_PALETTE)
        png_set_PLTE(png, info, palette, 1 << k->depth);
    if (k->key)
        png_set_tRNS(png, info, &(png_byte){0}, 1, &(png_color_16){0});
    uint8_t exif[] = "II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0"; /* 6 */
    if (k->exif)
        png_set_eXIf_1(png, info, sizeof exif - 1, exif);
    for (int y = 0; y < H; y++) {
        at[y] = rows[y];
        for (int i = 0; i < W * channels; i++) {
            uint8_t rgb[3];
            pixel(i / channels, y, rgb);
            int c = i % channels;
            uint8_t value = c < 3 && !(channels == 2 && c == 1) ? rgb[c] : 128;
            unsigned v = sample_of(value, k->depth);
            if (k->depth == 16) {
                rows[y][2 * i] = (uint8_t)(v >> 8);
                rows[y][2 * i + 1] = (uint8_t)v;
            } else {
                rows[y][i * k->depth / 8] |= (uint8_t)(v << (8 - k->depth - i * k->depth % 8));
            }
        }
    }
    png_set_rows(png, info, at);
    png_write_png(png, info, 0, NULL);
    png_destroy_write_struct(&png, &info);
}

static struct png_kind kind; /* of the file that `png_want` describes */

static uint8_t shown(uint8_t v, bool alpha)
{
    v = (uint8_t)(sample_of(v, kind.depth) * 255 / ((1u << kind.depth) - 1));
    return alpha ? (uint8_t)((v * 128 + 255 * 127 + 127) / 255) : v;
}

static void png_want(int x, int y, uint8_t *rgb)
{
    uint8_t p[3];
    pixel(x, y, p);
    bool alpha = kind.colour & PNG_COLOR_MASK_ALPHA;
    if (kind.colour == PNG_COLOR_TYPE_PALETTE) {
        unsigned i = sample_of(p[0], kind.depth);
        rgb[0] = (uint8_t)i;
        rgb[1] = (uint8_t)(255 - i);
        rgb[2] = (uint8_t)(i * 7);
        if (kind.key && i == 0)
            memset(rgb, 255, 3);
        return;
    }
    bool grey = !(kind.colour & PNG_COLOR_MASK_COLOR);
    for (int c = 0; c < 3; c++)
        rgb[c] = shown(p[grey ? 0 : c], alpha);
    if (kind.key && sample_of(p[0], kind.depth) == 0 &&
        (grey || (!sample_of(p[1], kind.depth) && !sample_of(p[2], kind.depth))))
        memset(rgb, 255, 3);
}

static void test_png(void **state)
{
    (void)state;
    static const struct png_kind kinds[] = {
        {PNG_COLOR_TYPE_RGB, 8, 0, 0, 0},        {PNG_COLOR_TYPE_RGB, 16, 0, 0, 0},
        {PNG_COLOR_TYPE_RGB, 8, 1, 0, 1},        {PNG_COLOR_TYPE_RGB_ALPHA, 8, 0, 0, 0},
        {PNG_COLOR_TYPE_RGB_ALPHA, 16, 1, 0, 0}, {PNG_COLOR_TYPE_GRAY, 1, 0, 0, 0},
        {PNG_COLOR_TYPE_GRAY, 2, 1, 0, 0},       {PNG_COLOR_TYPE_GRAY, 4, 0, 0, 1},
        {PNG_COLOR_TYPE_GRAY, 8, 0, 0, 1},       {PNG_COLOR_TYPE_GRAY, 16, 0, 0, 0},
        {PNG_COLOR_TYPE_GRAY_ALPHA, 8, 0, 0, 0}, {PNG_COLOR_TYPE_GRAY_ALPHA, 16, 1, 0, 0},
        {PNG_COLOR_TYPE_PALETTE, 1, 0, 0, 0},    {PNG_COLOR_TYPE_PALETTE, 2, 0, 0, 1},
        {PNG_COLOR_TYPE_PALETTE, 4, 1, 0, 0},    {PNG_COLOR_TYPE_PALETTE, 8, 0, 0, 1}};
    static struct file f;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        kind = kinds[i];
        png_make(&f, &kind);
        expect_pixels(&f, png_want, 1);
        expect_cuts(&f, 0);
    }
    f.p[60] ^= 1;
    expect_error(&f, "PNG: ");
}

/* Orientation 6: the file's left column is the top row, from right to left. */
static void test_orientation(void **state)
{
    (void)state;
    static struct file f;
    kind = (struct png_kind){PNG_COLOR_TYPE_RGB, 8, false, true, false};
    png_make(&f, &kind);
    struct image m = decode(&f);
    assert_int_equal(m.width, H);
    assert_int_equal(m.height, W);
    for (int y = 0; y < W; y++)
        for (int x = 0; x < H; x++) {
            uint8_t rgb[3];
            pixel(y, H - 1 - x, rgb);
            assert_memory_equal(m.rgb + (y * H + x) * 3, rgb, 3);
        }
    image_free(&m);
}

/* JPEG */

struct jpeg_kind {
    J_COLOR_SPACE in, space;
    bool progressive, adobe;
    int orientation;
};

static void jpeg_make(struct file *f, const struct jpeg_kind *k)
{
    struct jpeg_compress_struct j;
    struct jpeg_error_mgr errors;
    unsigned char *out = NULL;
    unsigned long n = 0;
    j.err = jpeg_std_error(&errors);
    jpeg_create_compress(&j);
    jpeg_mem_dest(&j, &out, &n);
    j.image_width = W;
    j.image_height = H;
    j.input_components = k->in == JCS_GRAYSCALE ? 1 : k->in == JCS_CMYK ? 4 : 3;
    j.in_color_space = k->in;
    jpeg_set_defaults(&j);
    jpeg_set_colorspace(&j, k->space);
    jpeg_set_quality(&j, 100, TRUE);
    j.comp_info[0].h_samp_factor = j.comp_info[0].v_samp_factor = 1;
    if (k->space == JCS_YCCK)
        j.comp_info[3].h_samp_factor = j.comp_info[3].v_samp_factor = 1;
    if (k->space == JCS_CMYK)
        j.write_Adobe_marker = k->adobe;
    if (k->progressive)
        jpeg_simple_progression(&j);
    jpeg_start_compress(&j, TRUE);
    uint8_t exif[] = "Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\0\0\0\0\0\0\0";
    exif[25] = (uint8_t)k->orientation;
    if (k->orientation)
        jpeg_write_marker(&j, JPEG_APP0 + 1, exif, sizeof exif - 1);
    for (int y = 0; y < H; y++) {
        uint8_t row[W * 4], rgb[3], *p = row;
        for (int x = 0; x < W; x++) {
            pixel(x, y, rgb);
            rgb[2] = (uint8_t)(255 - rgb[0]); /* smooth: JPEG keeps it */
            for (int c = 0; c < (k->in == JCS_GRAYSCALE ? 1 : 3); c++)
                *p++ = k->in == JCS_CMYK && !k->adobe ? (uint8_t)(255 - rgb[c]) : rgb[c];
            if (k->in == JCS_CMYK)
                *p++ = k->adobe ? 255 : 0; /* no black */
        }
        jpeg_write_scanlines(&j, &(JSAMPROW){row}, 1);
    }
    jpeg_finish_compress(&j);
    f->n = 0;
    put(f, out, n);
    free(out);
    jpeg_destroy_compress(&j);
}

static void jpeg_want(int x, int y, uint8_t *rgb)
{
    pixel(x, y, rgb);
    rgb[2] = (uint8_t)(255 - rgb[0]);
}

static void grey_want(int x, int y, uint8_t *rgb)
{
    pixel(x, y, rgb);
    rgb[1] = rgb[2] = rgb[0];
}

static void test_jpeg(void **state)
{
    (void)state;
    static const struct jpeg_kind kinds[] = {
        {JCS_RGB, JCS_YCbCr, false, false, 0}, {JCS_RGB, JCS_YCbCr, true, false, 1},
        {JCS_RGB, JCS_RGB, false, false, 0},   {JCS_GRAYSCALE, JCS_GRAYSCALE, false, false, 0},
        {JCS_CMYK, JCS_CMYK, false, true, 0},  {JCS_CMYK, JCS_CMYK, false, false, 0},
        {JCS_CMYK, JCS_YCCK, true, true, 0}};
    static struct file f;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        jpeg_make(&f, &kinds[i]);
        expect_pixels(&f, kinds[i].in == JCS_GRAYSCALE ? grey_want : jpeg_want, 6);
        expect_cuts(&f, 16); /* the last block may be whole without its last bits */
    }
}

/* All eight orientations show the same corner. */
static void test_jpeg_orientation(void **state)
{
    (void)state;
    static const int corner[9][2] = {{0, 0}, {0, 0}, {1, 0}, {1, 1}, {0, 1},
                                     {0, 0}, {1, 0}, {1, 1}, {0, 1}};
    static struct file f;
    for (int o = 1; o <= 8; o++) {
        jpeg_make(&f, &(struct jpeg_kind){JCS_GRAYSCALE, JCS_GRAYSCALE, false, false, o});
        struct image m = decode(&f);
        assert_int_equal(m.width, o >= 5 ? H : W);
        /* the stored (0, 0) and (W - 1, 0) */
        int x = corner[o][0] * (m.width - 1), y = corner[o][1] * (m.height - 1);
        int along = o >= 5 ? 0 : 1, far_x = along ? m.width - 1 - x : x;
        int far_y = along ? y : m.height - 1 - y;
        assert_true(m.rgb[(y * m.width + x) * 3] < 8);
        assert_true(m.rgb[(far_y * m.width + far_x) * 3] > 247);
        image_free(&m);
    }
}

/* WebP */

static void alpha_want(int x, int y, uint8_t *rgb)
{
    pixel(x, y, rgb);
    for (int c = 0; c < 3; c++)
        rgb[c] = (uint8_t)((rgb[c] * 64 + 255 * 191 + 127) / 255);
}

static void webp_make(struct file *f, bool alpha)
{
    uint8_t rgba[H][W][4], *out = NULL;
    for (int y = 0; y < H; y++)
        for (int x = 0; x < W; x++) {
            pixel(x, y, rgba[y][x]);
            rgba[y][x][3] = alpha ? 64 : 255;
        }
    size_t n = WebPEncodeLosslessRGBA(&rgba[0][0][0], W, H, W * 4, &out);
    f->n = 0;
    put(f, out, n);
    WebPFree(out);
}

static void put_chunk(struct file *f, const char *name, const struct file *body)
{
    put(f, name, 4);
    put_le(f, (uint32_t)body->n, 4);
    put(f, body->p, body->n);
    if (body->n % 2)
        put_le(f, 0, 1);
}

/* An animation on a canvas of W x H: one frame of the whole picture. */
static void webp_animate(struct file *f, const struct file *still)
{
    static struct file all, frame, body;
    all.n = frame.n = body.n = f->n = 0;
    put(&all, "WEBP", 4);
    put_le(&body, 0x12, 4); /* animation, alpha */
    put_le(&body, W - 1, 3);
    put_le(&body, H - 1, 3);
    put_chunk(&all, "VP8X", &body);
    body.n = 0;
    put_le(&body, 0, 6);
    put_chunk(&all, "ANIM", &body);
    put_le(&frame, 0, 6); /* at 0, 0 */
    put_le(&frame, W - 1, 3);
    put_le(&frame, H - 1, 3);
    put_le(&frame, 100, 4);
    put(&frame, still->p + 12, still->n - 12);
    put_chunk(&all, "ANMF", &frame);
    put_chunk(f, "RIFF", &all);
}

static void test_webp(void **state)
{
    (void)state;
    static struct file f, moving;
    for (int alpha = 0; alpha < 2; alpha++) {
        webp_make(&f, alpha);
        expect_pixels(&f, alpha ? alpha_want : pixel, 1);
        expect_cuts(&f, 0);
        webp_animate(&moving, &f);
        expect_pixels(&moving, alpha ? alpha_want : pixel, 1);
        expect_cuts(&moving, 1);
    }
    uint8_t grey[64 * 64 * 3], *out = NULL;
    memset(grey, 90, sizeof grey);
    f.n = 0;
    size_t n = WebPEncodeRGB(grey, 64, 64, 64 * 3, 90, &out);
    put(&f, out, n);
    WebPFree(out);
    struct image m = decode(&f);
    assert_int_equal(m.width, 64);
    assert_true(abs(m.rgb[64 * 32 * 3] - 90) < 4);
    image_free(&m);
}

/* GIF */

static int gif_out(GifFileType *gif, const GifByteType *p, int n)
{
    put(gif->UserData, p, (size_t)n);
    return n;
}

/* A frame of W - 2 columns from column 2 on. Colour 3 is transparent if `transparent`. */
static void gif_make(struct file *f, bool interlaced, bool transparent)
{
    static const int first[] = {0, 4, 2, 1}, step[] = {8, 8, 4, 2};
    GifColorType colours[8];
    for (int i = 0; i < 8; i++)
        colours[i] = (GifColorType){(GifByteType)(i * 30), (GifByteType)(200 - i), (GifByteType)i};
    f->n = 0;
    GifFileType *gif = EGifOpen(f, gif_out, NULL);
    ColorMapObject *map = GifMakeMapObject(8, colours);
    EGifSetGifVersion(gif, true);
    EGifPutScreenDesc(gif, W, H, 8, 0, map);
    if (transparent)
        EGifPutExtension(gif, GRAPHICS_EXT_FUNC_CODE, 4, "\x01\0\0\x03");
    EGifPutImageDesc(gif, 2, 0, W - 2, H, interlaced, NULL);
    for (int pass = 0; pass < (interlaced ? 4 : 1); pass++)
        for (int y = interlaced ? first[pass] : 0; y < H; y += interlaced ? step[pass] : 1) {
            GifByteType line[W];
            for (int x = 2; x < W; x++)
                line[x - 2] = (GifByteType)((x + y) % 8);
            EGifPutLine(gif, line, W - 2);
        }
    GifFreeMapObject(map);
    EGifCloseFile(gif, NULL);
}

static bool gif_holes;

static void gif_want(int x, int y, uint8_t *rgb)
{
    int i = (x + y) % 8;
    memset(rgb, 255, 3);
    if (x < 2 || (gif_holes && i == 3))
        return;
    rgb[0] = (uint8_t)(i * 30);
    rgb[1] = (uint8_t)(200 - i);
    rgb[2] = (uint8_t)i;
}

static void test_gif(void **state)
{
    (void)state;
    static struct file f;
    for (int i = 0; i < 4; i++) {
        gif_holes = i & 2;
        gif_make(&f, i & 1, gif_holes);
        expect_pixels(&f, gif_want, 0);
        expect_cuts(&f, 6); /* the end of the last block, and of the file */
    }
}

/* BMP */

struct bmp_kind {
    int bits;
    bool core, top_down, masks;
};

static void bmp_make(struct file *f, const struct bmp_kind *k)
{
    int colours = k->bits <= 8 ? 1 << k->bits : 0;
    uint32_t header = k->core ? 12 : k->masks ? 56 : 40;
    uint32_t start = 14 + header + (uint32_t)colours * (k->core ? 3 : 4);
    f->n = 0;
    put(f, "BM", 2);
    put_le(f, 0, 4);
    put_le(f, 0, 4);
    put_le(f, start, 4);
    put_le(f, header, 4);
    put_le(f, W, k->core ? 2 : 4);
    put_le(f, k->top_down ? (uint32_t)-H : H, k->core ? 2 : 4);
    put_le(f, 1, 2);
    put_le(f, (uint32_t)k->bits, 2);
    if (!k->core) {
        put_le(f, k->masks ? 3 : 0, 4);
        for (int i = 0; i < 5; i++)
            put_le(f, 0, 4);
    }
    for (int i = 0; k->masks && i < 4; i++) /* alpha, red, green, blue from the low byte on */
        put_le(f, 0xffu << 8 * ((i + 1) % 4), 4);
    for (int i = 0; i < colours; i++)
        put_le(f, (uint32_t)(i << 16 | (255 - i) << 8 | (i * 7 & 255)), k->core ? 3 : 4);
    for (int line = 0; line < H; line++) {
        int y = k->top_down ? line : H - 1 - line;
        uint8_t row[W * 4 + 4] = {0}, rgb[3];
        for (int x = 0; x < W; x++) {
            pixel(x, y, rgb);
            if (k->bits <= 8)
                row[x * k->bits / 8] |=
                    (uint8_t)(sample_of(rgb[0], k->bits) << (8 - k->bits - x * k->bits % 8));
            else if (k->bits == 16)
                memcpy(row + 2 * x,
                       &(uint16_t){(uint16_t)(rgb[0] >> 3 << 10 | rgb[1] >> 3 << 5 | rgb[2] >> 3)},
                       2);
            else
                for (int c = 0; c < 3; c++)
                    row[x * k->bits / 8 + (k->masks ? c + 1 : 2 - c)] = rgb[c];
            if (k->masks)
                row[4 * x] = 64;
        }
        put(f, row, (size_t)(W * k->bits + 31) / 32 * 4);
    }
}

static struct bmp_kind bmp;

static void bmp_want(int x, int y, uint8_t *rgb)
{
    uint8_t p[3];
    pixel(x, y, p);
    int i = (int)sample_of(p[0], bmp.bits > 8 ? 8 : bmp.bits);
    if (bmp.masks)
        alpha_want(x, y, rgb);
    else if (bmp.bits > 8)
        for (int c = 0; c < 3; c++)
            rgb[c] = bmp.bits == 16 ? (uint8_t)((p[c] >> 3) * 255 / 31) : p[c];
    else
        memcpy(rgb, (uint8_t[]){(uint8_t)i, (uint8_t)(255 - i), (uint8_t)(i * 7)}, 3);
}

static void test_bmp(void **state)
{
    (void)state;
    static const struct bmp_kind kinds[] = {{1, 0, 0, 0},  {4, 0, 1, 0},  {8, 0, 0, 0},
                                            {8, 1, 0, 0},  {16, 0, 0, 0}, {24, 0, 0, 0},
                                            {24, 1, 0, 0}, {32, 0, 1, 0}, {32, 0, 0, 1}};
    static struct file f;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        bmp = kinds[i];
        bmp_make(&f, &bmp);
        expect_pixels(&f, bmp_want, 1);
        expect_cuts(&f, 0);
    }
    bmp = kinds[2];
    bmp_make(&f, &bmp);
    f.p[30] = 1;
    expect_error(&f, "BMP: compression 1 of 8 bits is not supported");
    f.p[30] = 0;
    f.p[46] = 2; /* of 256 colours two are there: other indices are black */
    struct image m = decode(&f);
    assert_memory_equal(m.rgb + (W - 1) * 3, ((uint8_t[]){0, 0, 0}), 3);
    image_free(&m);
}

static void test_others(void **state)
{
    (void)state;
    static struct file f;
    expect_error(&f, "neither PNG, JPEG, WebP, GIF nor BMP");
    put(&f, "\x89PNG\r\n\x1a\n", 8);
    expect_error(&f, "PNG: the file ends too early");
}

/* Resizing */

static void test_resize(void **state)
{
    (void)state;
    uint8_t in[4 * 4 * 3], flat[9 * 5 * 3];
    struct error err = {0};
    struct image out;
    for (int i = 0; i < 16; i++)
        in[3 * i] = in[3 * i + 1] = in[3 * i + 2] = (uint8_t)(i % 4 < 2 ? 0 : 240);
    struct image m = {4, 4, in};
    /* an edge by half: Pillow's values */
    assert_true(image_resize(&m, 2, 2, IMAGE_BILINEAR, NULL, &out, &err));
    assert_int_equal(out.rgb[0], 34);
    assert_int_equal(out.rgb[3], 206);
    image_free(&out);
    /* twice as wide: the cubic overshoots and is clamped */
    assert_true(image_resize(&m, 8, 4, IMAGE_BICUBIC, NULL, &out, &err));
    static const uint8_t wide[8] = {0, 0, 0, 49, 191, 248, 242, 240};
    for (int x = 0; x < 8; x++)
        if (abs(out.rgb[3 * x] - wide[x]) > 9)
            fail_msg("column %d: %d", x, out.rgb[3 * x]);
    image_free(&out);
    /* one colour stays, to any size, by any filter */
    memset(flat, 77, sizeof flat);
    m = (struct image){9, 5, flat};
    for (int i = 1; i < 24; i++) {
        assert_true(image_resize(&m, i, 25 - i, (enum image_filter)(i % 3), NULL, &out, &err));
        for (int k = 0; k < i * (25 - i) * 3; k++)
            assert_int_equal(out.rgb[k], 77);
        image_free(&out);
    }
    atomic_bool stop = true;
    assert_false(image_resize(&m, 3, 3, IMAGE_BICUBIC, &stop, &out, &err));
    assert_string_equal(err.msg, "cancelled");
    assert_null(out.rgb);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_png),    cmocka_unit_test(test_orientation),
        cmocka_unit_test(test_jpeg),   cmocka_unit_test(test_jpeg_orientation),
        cmocka_unit_test(test_webp),   cmocka_unit_test(test_gif),
        cmocka_unit_test(test_bmp),    cmocka_unit_test(test_others),
        cmocka_unit_test(test_resize),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
