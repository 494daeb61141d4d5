/* WebP by libwebp: lossy, lossless, with alpha; of an animation the first frame. */
#include "image/image_int.h"

#include <webp/decode.h>
#include <webp/demux.h>

enum { PIECE = 64 << 10 }; /* bytes between two looks at the stop flag */

static const char *name_of(VP8StatusCode status)
{
    return status == VP8_STATUS_OUT_OF_MEMORY     ? "out of memory"
           : status == VP8_STATUS_SUSPENDED       ? "the file ends too early"
           : status == VP8_STATUS_NOT_ENOUGH_DATA ? "the file ends too early"
                                                  : "broken data";
}

/* Decodes the frame into its place on the canvas. */
static bool read_frame(const struct image_source *s, const WebPIterator *frame, struct raster *out)
{
    WebPDecoderConfig config;
    const WebPData *data = &frame->fragment;
    if (!WebPInitDecoderConfig(&config) ||
        WebPGetFeatures(data->bytes, data->size, &config.input) != VP8_STATUS_OK)
        return error_set(s->err, "broken data");
    int w = config.input.width, h = config.input.height;
    if (frame->x_offset < 0 || frame->y_offset < 0 || w < 1 || h < 1 ||
        w > out->width - frame->x_offset || h > out->height - frame->y_offset)
        return error_set(s->err, "a frame is larger than the picture");
    size_t at = ((size_t)frame->y_offset * (size_t)out->width + (size_t)frame->x_offset) * 4;
    config.output.colorspace = MODE_RGBA;
    config.output.is_external_memory = 1;
    config.output.u.RGBA.rgba = out->rgba + at;
    config.output.u.RGBA.stride = out->width * 4;
    config.output.u.RGBA.size = (size_t)out->width * (size_t)out->height * 4 - at;
    WebPIDecoder *d = WebPIDecode(NULL, 0, &config);
    if (!d)
        return error_set(s->err, "out of memory");
    VP8StatusCode status = VP8_STATUS_SUSPENDED;
    bool stopped = false;
    for (size_t have = 0; status == VP8_STATUS_SUSPENDED && have < data->size && !stopped;) {
        have = data->size - have > PIECE ? have + PIECE : data->size;
        status = WebPIUpdate(d, data->bytes, have);
        stopped = image_check_stop(s);
    }
    WebPIDelete(d);
    return !stopped && (status == VP8_STATUS_OK || error_set(s->err, "%s", name_of(status)));
}

static void read_exif(const WebPDemuxer *d, struct raster *out)
{
    WebPChunkIterator chunk;
    if (!WebPDemuxGetChunk(d, "EXIF", 1, &chunk))
        return;
    const uint8_t *p = chunk.chunk.bytes;
    size_t n = chunk.chunk.size;
    bool named = n > 6 && p[0] == 'E' && p[1] == 'x'; /* some writers keep JPEG's "Exif\0\0" */
    out->orientation = exif_orientation(p + (named ? 6 : 0), n - (named ? 6 : 0));
    WebPDemuxReleaseChunkIterator(&chunk);
}

bool webp_read_raster(const struct image_source *s, struct raster *out)
{
    WebPDemuxState state;
    WebPData data = {s->bytes, s->n};
    WebPDemuxer *d = WebPDemuxPartial(&data, &state);
    WebPIterator frame;
    if (!d || state == WEBP_DEMUX_PARSING_HEADER) {
        WebPDemuxDelete(d);
        return error_set(s->err, "broken header");
    }
    bool ok = raster_new(s, WebPDemuxGetI(d, WEBP_FF_CANVAS_WIDTH),
                         WebPDemuxGetI(d, WEBP_FF_CANVAS_HEIGHT), out);
    if (ok && WebPDemuxGetFrame(d, 1, &frame)) {
        ok = frame.complete ? read_frame(s, &frame, out)
                            : error_set(s->err, "the file ends too early");
        WebPDemuxReleaseIterator(&frame);
    } else if (ok) {
        ok = error_set(s->err, "no frame");
    }
    if (ok)
        read_exif(d, out);
    WebPDemuxDelete(d);
    return ok;
}
