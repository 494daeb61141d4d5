/* Masks of constrained rows, made by a few threads while the device computes the step. */
#ifndef STEEL_ENGINE_MASKS_H
#define STEEL_ENGINE_MASKS_H

#include "base/pool.h"
#include "sample/sampler.h"

/* sampler_prepare for each of samplers (n). *pool is made when first needed; the caller frees it. */
void masks_prepare(struct pool **pool, struct sampler **samplers, int n);

#endif
