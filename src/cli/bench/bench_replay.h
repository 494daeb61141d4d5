/* Recorded texts through a model's real steps, for `steel bench --replay`. */
#ifndef STEEL_CLI_BENCH_REPLAY_H
#define STEEL_CLI_BENCH_REPLAY_H

#include "engine/runtime.h"

/* Generates the answers of `file`, a JSON object {"name": ..., "prompt": [ids], "answer": [ids]} a line, with and
 * without drafts by turns, for each number of sequences in batch (n_batch). The answers' tokens replace the chosen ones,
 * so acceptance is the text's own and speed is the model's, also with random weights. Prints medians of reps, and the
 * costs of draft rows that the engine has learned. accept: the share of drafts that are made right, for draft models with random
 * weights; 0 = they stay as they are. */
bool bench_replay(const char *path, const char *file, const struct runtime_options *opt,
                  const int *batch, int n_batch, int reps, float accept, bool json,
                  struct error *err);

#endif
