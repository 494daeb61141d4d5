/*
 * A runtime over several processes (ranks). Rank 0 opens the model, and has the scheduler and the server. The others
 * are workers: they open what rank 0 sends them, and run its steps. In a single process these functions do nothing.
 */
#ifndef STEEL_ENGINE_WORKERS_H
#define STEEL_ENGINE_WORKERS_H

#include "base/error.h"

#include <stdbool.h>
#include <stdint.h>

struct runtime;
struct opening;

/* On a worker: runs until rank 0 sends the end. Returns the exit status of the process. */
int workers_run(void);

/* On rank 0: whether workers wait for a model. */
bool workers_wait(void);
/* On rank 0: opens the model on all processes; rt has its file and its device. */
bool workers_open(struct runtime *rt, const char *path, const struct opening *o, struct error *err);
/* On rank 0, once: ends the workers of this runtime. */
void workers_close(struct runtime *rt);
/* On rank 0: workers expect a message within this time (ns); 0 = no limit. */
int64_t workers_patience_ns(const struct runtime *rt);
void workers_keep_alive(struct runtime *rt);

#endif
