/*
 * Tokens of one answer on their way to text. Text that may turn out to be the start of a stop string
 * waits until it is decided, so nothing is shown and then withdrawn; half characters wait too. Stop
 * strings count in the answer alone: not in the thinking before it.
 */
#ifndef STEEL_ENGINE_OUTPUT_H
#define STEEL_ENGINE_OUTPUT_H

#include "text/tokenizer/tokenizer.h"

/* Where the text is: at its start, where thinking may be opened; inside it; in the answer. */
enum output_zone { OUTPUT_ANSWER, OUTPUT_START, OUTPUT_THINKING };

struct output {
    const char *const *stop; /* (n_stop), none empty; not owned */
    int n_stop;
    const char *think_open, *think_close; /* not owned; read only outside OUTPUT_ANSWER */
    enum output_zone zone;
    bool special; /* show control tokens */
    struct detok detok;
    struct buf held;
};

/* Adds a token; what may be shown is appended to `out`. Returns the stop string that ended the
 * answer (its text is not shown), or -1. t NULL: no vocabulary, no text. */
int output_push(struct output *o, const struct tokenizer *t, int32_t token, struct buf *out);
/* The answer ends: whatever still waits is shown. Returns as output_push. */
int output_finish(struct output *o, struct buf *out);
void output_clear(struct output *o);

#endif
