/*
 * Sampling where nobody says how: what the model's author advises (generation_config.json, or
 * general.sampling.* in GGUF), and our own defaults for the rest.
 */
#ifndef STEEL_SAMPLE_SAMPLE_ADVICE_H
#define STEEL_SAMPLE_SAMPLE_ADVICE_H

#include "sample/sampler.h"
#include "file/tensorfile.h"

/* Parameters nobody has set yet: what options start from. */
struct sample_params sample_params_unset(void);
/* Gives every parameter still unset its value for this model. */
void sample_params_advise(struct sample_params *p, const struct tensorfile *f);

#endif
