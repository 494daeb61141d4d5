/*
 * Packs whole panels with vector instructions. Each function writes exactly the bytes of the plain C in
 * panel.c, which remains the definition and packs panels of fewer than 16 rows.
 */
#ifndef STEEL_BACKEND_CPU_PANEL_PACK_H
#define STEEL_BACKEND_CPU_PANEL_PACK_H

#include "quant/quant.h"
#include "base/cpu.h"

/* 16 rows of a panel, in the file's layout. */
struct pack_rows {
    enum dtype type;
    const uint8_t *src; /* (16, row_bytes) */
    size_t row_bytes;
    int n_in;
    int group_len; /* GPTQ4 */
};

/* Packs the codes of all columns, and scales that are stored with them. GPTQ4: only the codes,
 * since its scales are separate arrays. dst: the panel; for F8_E4M3 the panel after its scales. */
void panel_pack_rows_avx2(const struct pack_rows *p, uint8_t *dst);
void panel_pack_rows_avx512(const struct pack_rows *p, uint8_t *dst);
void panel_pack_rows_neon(const struct pack_rows *p, uint8_t *dst);

struct raw_weight;
/* Packs rows [16 * panel, ...) of expert e into dst (panel_bytes). rows: the first of these rows,
 * or NULL if they are in w. isa: the packer to use; ISA_REF: plain C. */
void panel_pack(const struct raw_weight *w, int seg, int e, int panel, const uint8_t *rows,
                enum isa isa, uint8_t *dst);

#endif
