/* Packs panels 4 rows at a time. */
#include "backend/cpu/panel_pack_kernel.h"

void panel_pack_rows_neon(const struct pack_rows *p, uint8_t *dst)
{
    pack_rows(p, dst);
}
