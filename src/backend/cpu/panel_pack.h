/*
 * Packing whole panels with vector instructions. Each function writes exactly the bytes that the plain
 * C of panel.c writes, which stays the definition (and takes panels of fewer than 16 rows).
 */
#ifndef STEEL_BACKEND_CPU_PANEL_PACK_H
#define STEEL_BACKEND_CPU_PANEL_PACK_H

#include "quant/quant.h"
#include "base/cpu.h"

/* 16 rows of a panel, as they lie in the file. */
struct pack_rows {
    enum dtype type;
    const uint8_t *src; /* (16, row_bytes) */
    size_t row_bytes;
    int n_in;
    int group_len; /* GPTQ4 */
};

/* The codes, and the scales that lie between them, of all columns. Of GPTQ4 the codes alone: its
 * scales are planes of their own. dst: F8_E4M3 after its scales; else the panel. */
void panel_pack_rows_avx2(const struct pack_rows *p, uint8_t *dst);
void panel_pack_rows_avx512(const struct pack_rows *p, uint8_t *dst);

struct raw_weight;
/* Packs rows [16 * panel, ...) of expert e into dst (panel_bytes). rows: where the first of them lies,
 * if not at its place in w (NULL: it does). isa: whose packer; ISA_REF: plain C. */
void panel_pack(const struct raw_weight *w, int seg, int e, int panel, const uint8_t *rows,
                enum isa isa, uint8_t *dst);

#endif
