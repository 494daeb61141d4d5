/* GIF by giflib: the first frame on its canvas. The canvas around the frame is transparent. */
#include "image/image_int.h"

#include <gif_lib.h>
#include <string.h>

struct gif_reader {
    const struct image_source *s;
    size_t at;
    int transparent; /* colour index; NO_TRANSPARENT_COLOR */
};

static int read_bytes(GifFileType *gif, GifByteType *to, int n)
{
    struct gif_reader *r = gif->UserData;
    size_t left = r->s->n - r->at;
    int take = n < 0 ? 0 : (size_t)n < left ? n : (int)left;
    memcpy(to, r->s->bytes + r->at, (size_t)take);
    r->at += (size_t)take;
    return take;
}

static bool fail(const struct gif_reader *r, int code)
{
    const char *text = GifErrorString(code);
    return error_set(r->s->err, "%s", text ? text : "broken data");
}

/* Reads the extension blocks before the frame. Only the transparent colour is used. */
static bool read_extension(struct gif_reader *r, GifFileType *gif)
{
    int code;
    GifByteType *block; /* its length, then its bytes */
    if (DGifGetExtension(gif, &code, &block) == GIF_ERROR)
        return fail(r, gif->Error);
    while (block) {
        GraphicsControlBlock control;
        if (code == GRAPHICS_EXT_FUNC_CODE && block[0] == 4 &&
            DGifExtensionToGCB(4, block + 1, &control) == GIF_OK)
            r->transparent = control.TransparentColor;
        if (DGifGetExtensionNext(gif, &block) == GIF_ERROR)
            return fail(r, gif->Error);
    }
    return true;
}

/* One line of colour indices, in the pixels' own row: its last quarter. */
static void colour_line(const struct gif_reader *r, const ColorMapObject *map, const uint8_t *from,
                        uint8_t *to, int n)
{
    for (int x = 0; x < n; x++, to += 4) {
        int index = from[x];
        if (index == r->transparent || index >= map->ColorCount)
            continue;
        to[0] = map->Colors[index].Red;
        to[1] = map->Colors[index].Green;
        to[2] = map->Colors[index].Blue;
        to[3] = 255;
    }
}

static bool read_frame(struct gif_reader *r, GifFileType *gif, struct raster *out)
{
    static const int first[] = {0, 4, 2, 1}, step[] = {8, 8, 4, 2}; /* of interlaced lines */
    uint8_t line[IMAGE_MAX_SIDE];
    if (DGifGetImageDesc(gif) == GIF_ERROR)
        return fail(r, gif->Error);
    const GifImageDesc *d = &gif->Image;
    const ColorMapObject *map = d->ColorMap ? d->ColorMap : gif->SColorMap;
    if (!map)
        return error_set(r->s->err, "no colours");
    if (d->Left < 0 || d->Top < 0 || d->Width < 1 || d->Height < 1 ||
        d->Width > out->width - d->Left || d->Height > out->height - d->Top)
        return error_set(r->s->err, "a frame is larger than the picture");
    for (int pass = 0; pass < (d->Interlace ? 4 : 1); pass++)
        for (int y = d->Interlace ? first[pass] : 0; y < d->Height;
             y += d->Interlace ? step[pass] : 1) {
            if (image_check_stop(r->s))
                return false;
            if (DGifGetLine(gif, line, d->Width) == GIF_ERROR)
                return fail(r, gif->Error);
            colour_line(r, map, line, raster_row(out, d->Top + y) + 4 * (size_t)d->Left, d->Width);
        }
    return true;
}

static bool read_all(struct gif_reader *r, GifFileType *gif, struct raster *out)
{
    GifRecordType type;
    if (!raster_new(r->s, gif->SWidth, gif->SHeight, out))
        return false;
    for (;;) {
        if (DGifGetRecordType(gif, &type) == GIF_ERROR)
            return fail(r, gif->Error);
        if (type == IMAGE_DESC_RECORD_TYPE)
            return read_frame(r, gif, out);
        if (type == TERMINATE_RECORD_TYPE)
            return error_set(r->s->err, "no frame");
        if (type == EXTENSION_RECORD_TYPE && !read_extension(r, gif))
            return false;
    }
}

bool gif_read_raster(const struct image_source *s, struct raster *out)
{
    struct gif_reader r = {s, 0, NO_TRANSPARENT_COLOR};
    int code = 0;
    GifFileType *gif = DGifOpen(&r, read_bytes, &code);
    if (!gif)
        return fail(&r, code);
    bool ok = read_all(&r, gif, out);
    DGifCloseFile(gif, NULL);
    return ok;
}
