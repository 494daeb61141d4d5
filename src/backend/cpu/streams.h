/* Streams of several parts (layer.h, altup), low-rank residuals, and Gaussian top-k. Private to cpu.c and streams.c. */
#ifndef STEEL_BACKEND_CPU_STREAMS_H
#define STEEL_BACKEND_CPU_STREAMS_H

#include "backend/cpu/cpu.h"

bool cpu_streams_prepare(struct cpu_backend *cb, const struct network *net, int max_tokens,
                         struct error *err);
/* After embed: the stream has only been embedded. The others settle the stream first. */
void cpu_streams_begin(struct cpu_backend *cb);
void cpu_streams_predict(struct cpu_backend *cb, const struct altup *a);
void cpu_streams_correct(struct cpu_backend *cb, const struct altup *a);
void cpu_streams_end(struct cpu_backend *cb);
/* scale * x_0, in cb->n: (rows, E) */
const float *cpu_streams_scaled(struct cpu_backend *cb, const struct altup *a);
/* All parts but x_0 += stream.d */
void cpu_streams_add(struct cpu_backend *cb);

/* Keeps n + norm((n Wl^T) Wr^T) of all rows; the second adds it to the stream, once the mixer's result is there. */
void cpu_laurel(struct cpu_backend *cb, const struct laurel *l, const float *n);
void cpu_laurel_add(struct cpu_backend *cb);

/* g = max(g - cut, 0), cut = mean(g) + sparsity * std(g) */
void cpu_keep_top(float sparsity, float *g, int n);

#endif
