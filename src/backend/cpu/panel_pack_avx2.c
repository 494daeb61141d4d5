/* Packs panels 8 rows at a time. */
#include "backend/cpu/panel_pack_kernel.h"

void panel_pack_rows_avx2(const struct pack_rows *p, uint8_t *dst)
{
    pack_rows(p, dst);
}
