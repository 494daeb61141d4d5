/*
 * How fast this machine multiplies with weights of a format, measured with the backend's own ops on weights of zeros:
 * what `steel plan` predicts speeds from. A measurement takes about a second a format, and is kept in the user's cache
 * folder for the next time.
 */
#ifndef STEEL_ENGINE_PROBE_H
#define STEEL_ENGINE_PROBE_H

#include "backend/options.h"
#include "base/error.h"
#include "quant/quant.h"

enum { PROBE_POINTS = 4 };
extern const int probe_rows[PROBE_POINTS]; /* numbers of input rows that are measured, ascending */

struct probe {
    /* Seconds per value of a matrix of this format, with probe_rows[i] input rows; 0 = not measured. */
    double seconds[DT_COUNT][PROBE_POINTS];
    double product; /* seconds of a product that is too small to matter */
    bool cached;    /* nothing had to be measured */
};

/* Measures the formats that are marked, on the CPU. path: the file of earlier measurements; NULL = none. */
bool probe_run(const struct backend_options *opt, const bool wanted[DT_COUNT], const char *path,
               struct probe *out, struct error *err);
/* Seconds per value with `rows` input rows. */
double probe_seconds(const struct probe *p, enum dtype t, double rows);
/* Appends the default place, in the user's cache folder. False: there is none. */
struct buf;
bool probe_place(struct buf *out);

#endif
