/* Packing, 8 rows at a time. */
#include "backend/cpu/pack_kernel.h"

void pack_rows_avx2(const struct pack_rows *p, uint8_t *dst)
{
    pack_rows(p, dst);
}
