/*
 * Default sampling parameters: the model author's recommendation (generation_config.json, or
 * general.sampling.* in GGUF), else Steel's own defaults.
 */
#ifndef STEEL_SAMPLE_SAMPLE_ADVICE_H
#define STEEL_SAMPLE_SAMPLE_ADVICE_H

#include "sample/sampler.h"
#include "file/tensorfile.h"

/* Parameters with every field marked as unset. */
struct sample_params sample_params_unset(void);
/* Fills every unset parameter with its default for this model. */
void sample_params_advise(struct sample_params *p, const struct tensorfile *f);

#endif
