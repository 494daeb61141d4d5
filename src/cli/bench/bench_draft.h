/* The cost of speculative decoding, for `steel bench --draft`. */
#ifndef STEEL_CLI_BENCH_DRAFT_H
#define STEEL_CLI_BENCH_DRAFT_H

#include "engine/runtime.h"

enum { BENCH_DRAFT_STEPS = 32 };

/* Times steps of n_seqs sequences at context `depth`, without drafts and with 1 to rt->draft_fixed
 * draft tokens each (including the MTP block's own steps). Prints both times for each number, and
 * the acceptance rate above which drafting pays. */
bool bench_draft(struct runtime *rt, int n_seqs, int depth, bool json, struct error *err);

#endif
