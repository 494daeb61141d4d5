/*
 * One answer: reads the part of a prompt that the KV cache does not hold yet, then generates,
 * handing text over as it becomes whole characters. Shared by `run -p` and the chat terminal.
 */
#ifndef STEEL_CLI_GENERATE_H
#define STEEL_CLI_GENERATE_H

#include "cli/cli.h"

/* A conversation's tokens and their KV: cached.n == seq.n_tokens always. */
struct context {
    struct runtime *rt;
    struct kv_seq seq;
    struct token_list cached; /* ids whose keys and values are in seq */
};

void context_clear(struct context *c); /* gives the pages back; usable again */
/* Makes the cache hold exactly a prefix of ids and reads the rest. With `item`, the last token's
 * logits go to its sampler and n_read tells how many tokens had to be read (at least one). */
bool context_read(struct context *c, const int32_t *ids, int n, struct step_item *item, int *n_read,
                  struct error *err);

enum finish { FINISH_END, FINISH_LENGTH, FINISH_STOPPED, FINISH_INTERRUPTED };

struct generation {
    struct context *context;
    const struct sample_params *sample;
    int n_predict; /* -1 = until the end */
    bool ignore_eos;
    bool special; /* hand over the text of control tokens too (tool calls, thinking) */
    /* Text as it comes; false ends the generation. */
    bool (*on_text)(void *arg, const char *text, size_t len);
    void *arg;
    /* results */
    enum finish finish;
    int n_prompt, n_read, n_generated;
    int64_t prompt_ns, generate_ns;
};

bool generate(struct generation *g, const int32_t *ids, int n, struct error *err);

/* Text on its way to stdout; a tail that could begin a stop string waits, so that nothing is shown and
 * then withdrawn. */
struct stop_filter {
    struct buf held;
    const struct opt_list *stop;
    bool stopped;
};
/* Writes what is safe to show; all of it when `final`. Sets `stopped` at a stop string. */
void stop_filter_flush(struct stop_filter *f, bool final);

/* "prompt 12 tokens, 340.1 tok/s | generated 40 tokens, 88.0 tok/s" */
void generation_print(const struct generation *g, FILE *out);

#endif
