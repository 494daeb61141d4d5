/*
 * From a choice's tokens to text. Text that may be the beginning of a stop string is held until that is decided, so
 * nothing is shown and withdrawn. Incomplete characters are held, too. Stop strings do not apply to thinking.
 */
#ifndef STEEL_ENGINE_OUTPUT_H
#define STEEL_ENGINE_OUTPUT_H

#include "text/tokenizer/tokenizer.h"

/* The current position: in the answer; at the start, where thinking may begin; inside thinking. */
enum output_zone { OUTPUT_ANSWER, OUTPUT_START, OUTPUT_THINKING };

struct output {
    const char *const *stop; /* (n_stop), none empty; not owned */
    int n_stop;
    const char *think_open, *think_close; /* not owned; read only outside OUTPUT_ANSWER */
    enum output_zone zone;
    bool special;      /* show control tokens */
    bool include_stop; /* show the stop string */
    struct detok detok;
    struct buf held;
};

/* Adds a token and appends text that may be shown to `out`. Returns the stop string that was completed (its text is not
 * shown), or -1. t NULL: no vocabulary, no text. */
int output_push(struct output *o, const struct tokenizer *t, int32_t token, struct buf *out);
/* Ends the text and shows the held bytes. Returns like output_push. */
int output_finish(struct output *o, struct buf *out);
void output_clear(struct output *o);

#endif
