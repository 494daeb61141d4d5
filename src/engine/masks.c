/* Masks of constrained rows: see masks.h. */
#include "engine/masks.h"

enum { MASK_THREADS = 4 }; /* a mask takes some 40 us: enough for hundreds of rows beside a step */

static void prepare_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    struct sampler **samplers = arg;
    for (int i = first; i < last; i++)
        sampler_prepare(samplers[i]);
}

void masks_prepare(struct pool **pool, struct sampler **samplers, int n)
{
    if (n > 1 && !*pool) {
        int most = pool_cpu_count();
        *pool = pool_new(most < MASK_THREADS ? most : MASK_THREADS);
    }
    if (n > 1)
        pool_each(*pool, n, POOL_SINGLE, prepare_rows, samplers);
    else
        prepare_rows(samplers, 0, 0, n);
}
