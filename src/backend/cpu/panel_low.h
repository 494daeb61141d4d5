/* Panels of the formats of few bits: see panel_low.c, and panel.h for the layouts. */
#ifndef STEEL_BACKEND_CPU_PANEL_LOW_H
#define STEEL_BACKEND_CPU_PANEL_LOW_H

#include "quant/quant.h"

bool panel_is_low(enum dtype t);
/* How many of the file's blocks a unit has, bytes of its scales, and of a block after them. */
bool panel_low_unit(enum dtype t, int *blocks, size_t *scales, size_t *bytes);
/* Block i of a unit, of one row, into its lane, and back to floats. */
void panel_low_pack(enum dtype t, const uint8_t *src, uint8_t *unit, int i, int lane);
void panel_low_row(enum dtype t, const uint8_t *unit, int i, int lane, float *dst);

#endif
