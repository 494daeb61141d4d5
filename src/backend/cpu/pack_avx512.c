/* Packing, 16 rows at a time. */
#include "backend/cpu/pack_kernel.h"

void pack_rows_avx512(const struct pack_rows *p, uint8_t *dst)
{
    pack_rows(p, dst);
}
