/*
 * A runtime over several processes (ranks). Rank 0 opens the model, and has the scheduler and the server; the others are
 * workers, which open what rank 0 tells them and run its steps. All of this does nothing where a process is alone.
 */
#ifndef STEEL_ENGINE_WORKERS_H
#define STEEL_ENGINE_WORKERS_H

#include "base/error.h"

#include <stdbool.h>
#include <stdint.h>

struct runtime;
struct opening;

/* On a worker: until rank 0 tells the end. Returns what the process should exit with. */
int workers_run(void);

/* On rank 0: whether workers wait for a model. */
bool workers_wait(void);
/* On rank 0: all open the model; rt has its file and its device. */
bool workers_open(struct runtime *rt, const char *path, const struct opening *o, struct error *err);
/* On rank 0, once: the workers of this runtime end. */
void workers_close(struct runtime *rt);
/* On rank 0: workers must hear from it within this time (ns); 0 = whenever it has something to tell. */
int64_t workers_patience_ns(const struct runtime *rt);
void workers_keep_alive(struct runtime *rt);

#endif
