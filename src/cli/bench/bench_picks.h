/* The gain of each row of the kernel tables, for `steel bench --picks`. */
#ifndef STEEL_CLI_BENCH_PICKS_H
#define STEEL_CLI_BENCH_PICKS_H

#include "cli/bench/bench_steps.h"

enum { BENCH_WARM_STEPS = 3 }; /* before each measurement of decodes */

/* Runs the test in turn with all rows and without one row, for each row that the test picks, twice `rounds` times. A
 * row's gain is the speed with it over the speed without it, minus 1. */
bool bench_picks(struct runtime *rt, const struct bench_test *t, int rounds, bool json,
                 struct error *err);

#endif
