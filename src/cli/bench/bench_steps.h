/* Prompts and decodes of random tokens, for `steel bench`. */
#ifndef STEEL_CLI_BENCH_STEPS_H
#define STEEL_CLI_BENCH_STEPS_H

#include "engine/runtime.h"

struct bench_test {
    int n_prompt, n_gen; /* if both are set, prompts are read, then answers generated */
    int n_seqs, depth;
};

/* The adapters of a test. Sequence s uses adapter s % n; n 0: none. */
struct bench_loras {
    struct lora_pick picks[LORA_MAX_ADAPTERS];
    int n;
};

/* Feeds n random tokens to each sequence. Steps are filled up to max_tokens, across sequences. */
bool bench_fill(struct runtime *rt, const struct bench_loras *loras, struct kv_seq *seqs,
                int n_seqs, int n, struct error *err);
/* Decodes n tokens per sequence. Like the engine, it starts the next step while one runs if the
 * backend can. Tokens are random, so that sequences do not converge to the same text and share
 * experts. With pipeline stages a step waits for the logits of the previous one, as if its
 * tokens were sampled from them. */
bool bench_decode(struct runtime *rt, const struct bench_loras *loras, struct kv_seq *seqs,
                  int n_seqs, int n, struct error *err);

#endif
