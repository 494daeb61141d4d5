/* Hyper-connections (layer.h). Private to the files of the CPU backend. */
#ifndef STEEL_BACKEND_CPU_HYPER_H
#define STEEL_BACKEND_CPU_HYPER_H

#include "backend/cpu/cpu.h"

bool cpu_hyper_prepare(struct cpu_backend *cb, const struct network *net, struct error *err);
/* After embed. */
void cpu_hyper_begin(struct cpu_backend *cb);
/* Before a block, or the head: the stream becomes what it reads. */
void cpu_hyper_read(struct cpu_backend *cb, const struct hyper *h);
/* After a block, whose result is d. */
void cpu_hyper_write(struct cpu_backend *cb);
/* The stream becomes its output rows. */
void cpu_hyper_narrow(struct cpu_backend *cb);

#endif
