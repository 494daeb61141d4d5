/* Panels of the formats with few bits. See panel_low.c, and panel.h for the layouts. */
#ifndef STEEL_BACKEND_CPU_PANEL_LOW_H
#define STEEL_BACKEND_CPU_PANEL_LOW_H

#include "quant/quant.h"

bool panel_is_low(enum dtype t);
/* A unit's number of file blocks, the bytes of its scales, and of one block. */
bool panel_low_unit(enum dtype t, int *blocks, size_t *scales, size_t *bytes);
/* Packs block i of a unit, of one row, into its lane, or dequantises it. */
void panel_low_pack(enum dtype t, const uint8_t *src, uint8_t *unit, int i, int lane);
void panel_low_row(enum dtype t, const uint8_t *unit, int i, int lane, float *dst);

#endif
