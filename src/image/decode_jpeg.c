/* JPEG by libjpeg-turbo: baseline, progressive and arithmetic; grey, YCbCr, RGB, CMYK and YCCK. */
#include "image/image_int.h"

#include <setjmp.h>
#include <stdio.h>
#include <string.h>

#include <jerror.h>
#include <jpeglib.h>

/* A file of many empty scans would take long to decode. Encoders write about ten. */
enum { MAX_SCANS = 128 };

struct jpeg_reader {
    struct jpeg_decompress_struct jpeg; /* first, so that callbacks find the rest */
    struct jpeg_error_mgr errors;
    struct jpeg_progress_mgr progress;
    jmp_buf escape;
    const struct image_source *s;
    struct raster *out;
};

_Noreturn static void give_up(struct jpeg_reader *r)
{
    longjmp(r->escape, 1);
}

_Noreturn static void on_error(j_common_ptr jpeg)
{
    struct jpeg_reader *r = (struct jpeg_reader *)jpeg;
    char text[JMSG_LENGTH_MAX];
    jpeg->err->format_message(jpeg, text);
    if (!r->s->err->msg[0])
        error_set(r->s->err, "%s", text);
    give_up(r);
}

/* For a truncated file the library would fill the rest with grey and only warn. Other warnings are harmless. */
static void on_message(j_common_ptr jpeg, int level)
{
    if (level < 0 &&
        (jpeg->err->msg_code == JWRN_JPEG_EOF || jpeg->err->msg_code == JWRN_HIT_MARKER))
        on_error(jpeg);
}

static void on_output(j_common_ptr jpeg)
{
    (void)jpeg;
}

static void on_progress(j_common_ptr jpeg)
{
    struct jpeg_reader *r = (struct jpeg_reader *)jpeg;
    if (image_check_stop(r->s))
        give_up(r);
    if (r->jpeg.input_scan_number > MAX_SCANS) {
        error_set(r->s->err, "more than %d scans", MAX_SCANS);
        give_up(r);
    }
}

static void read_exif(struct jpeg_reader *r)
{
    for (jpeg_saved_marker_ptr m = r->jpeg.marker_list; m; m = m->next)
        if (m->marker == JPEG_APP0 + 1 && m->data_length > 6 && !memcmp(m->data, "Exif\0", 6))
            r->out->orientation = exif_orientation(m->data + 6, m->data_length - 6);
}

/* Inks to RGB, in place. Adobe's files store them inverted. */
static void from_cmyk(const struct jpeg_reader *r, uint8_t *row)
{
    bool inverted = r->jpeg.saw_Adobe_marker;
    for (int x = 0; x < r->out->width; x++, row += 4) {
        int light = inverted ? row[3] : 255 - row[3];
        for (int c = 0; c < 3; c++)
            row[c] = (uint8_t)(((inverted ? row[c] : 255 - row[c]) * light + 127) / 255);
        row[3] = 255;
    }
}

static bool read_all(struct jpeg_reader *r)
{
    struct jpeg_decompress_struct *j = &r->jpeg;
    if (setjmp(r->escape))
        return false;
    jpeg_create_decompress(j);
    j->progress = &r->progress;
    jpeg_mem_src(j, r->s->bytes, r->s->n);
    jpeg_save_markers(j, JPEG_APP0 + 1, 0xffff);
    jpeg_read_header(j, TRUE);
    if (!raster_new(r->s, j->image_width, j->image_height, r->out))
        return false;
    read_exif(r);
    bool inks = j->jpeg_color_space == JCS_CMYK || j->jpeg_color_space == JCS_YCCK;
    j->out_color_space = inks ? JCS_CMYK : JCS_EXT_RGB;
    r->out->channels = inks ? 4 : 3;
    jpeg_start_decompress(j);
    while (j->output_scanline < j->output_height) {
        JSAMPROW row = raster_row(r->out, (int)j->output_scanline);
        if (image_check_stop(r->s))
            return false;
        if (jpeg_read_scanlines(j, &row, 1) && inks)
            from_cmyk(r, row);
    }
    jpeg_finish_decompress(j);
    return true;
}

bool jpeg_read_raster(const struct image_source *s, struct raster *out)
{
    struct jpeg_reader r = {.s = s, .out = out};
    r.jpeg.err = jpeg_std_error(&r.errors);
    r.errors.error_exit = on_error;
    r.errors.emit_message = on_message;
    r.errors.output_message = on_output;
    r.progress.progress_monitor = on_progress;
    bool ok = read_all(&r);
    jpeg_destroy_decompress(&r.jpeg);
    return ok;
}
