/* Compressed attention (layer.h). Private to the files of the CPU backend. */
#ifndef STEEL_BACKEND_CPU_COMPRESSED_H
#define STEEL_BACKEND_CPU_COMPRESSED_H

#include "backend/cpu/cpu.h"

bool cpu_compressed_supported(const struct network *net, int layer);
bool cpu_compressed_prepare(struct cpu_backend *cb, const struct network *net, struct error *err);
/* Bytes of cb->attn_scratch that the layer needs. */
size_t cpu_compressed_scratch(const struct bounds *s, const struct mixer *m, int n_threads);
/* The mixer for n (n_tokens, E), up to the input of wob, in cb->a. */
void cpu_mix_compressed(struct cpu_backend *cb, const struct mixer *m, int layer, const float *n);

#endif
