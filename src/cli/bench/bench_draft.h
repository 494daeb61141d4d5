/* What drafting tokens ahead costs, for `steel bench --draft`. */
#ifndef STEEL_CLI_BENCH_DRAFT_H
#define STEEL_CLI_BENCH_DRAFT_H

#include "engine/runtime.h"

enum { BENCH_DRAFT_STEPS = 32 };

/* Times steps of n_seqs sequences behind `depth` tokens, alone and with rt->draft drafts each and the block's own
 * steps, and prints both, and how many drafts must be right for them to pay. */
bool bench_draft(struct runtime *rt, int n_seqs, int depth, bool json, struct error *err);

#endif
