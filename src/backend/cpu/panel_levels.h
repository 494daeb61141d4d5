/*
 * Panels of formats whose codes index a table of levels (IQ1 IQ2 IQ3 TQ NVFP4). See panel_levels.c, and
 * panel.h for the layouts.
 */
#ifndef STEEL_BACKEND_CPU_PANEL_LEVELS_H
#define STEEL_BACKEND_CPU_PANEL_LEVELS_H

#include "quant/quant.h"

bool panel_has_levels(enum dtype t);
/* A unit's number of file blocks, the bytes of its scales, and of one block. */
bool panel_levels_unit(enum dtype t, int *blocks, size_t *scales, size_t *bytes);
/* Packs a block of one row into its lane of a unit, or dequantises it. NVFP4: without the tensor's
 * scale. */
void panel_levels_pack(enum dtype t, const uint8_t *src, uint8_t *unit, int lane);
/* The codes of a block of IQ1, IQ2 or IQ3 in panel form, before rows are interleaved. */
struct level_codes {
    uint8_t code[QK_K];
    uint32_t scales[2]; /* a nibble per scale: 8 for IQ3, 16 for the others */
    uint32_t down;      /* IQ1: bit i shifts columns 8i to 8i + 7 */
    uint16_t d;
};
void panel_levels_read(enum dtype t, const uint8_t *src, struct level_codes *out);
void panel_levels_row(enum dtype t, const uint8_t *unit, int lane, float *dst);

#endif
