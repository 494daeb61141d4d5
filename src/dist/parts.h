/*
 * A step's batch in parts, each a batch of its own rows, for pipeline stages that work at the same time
 * (pipeline.h). A sequence that is cut continues in the next part where the previous one ends, so parts run
 * in order. Does not know who runs them.
 */
#ifndef STEEL_DIST_PARTS_H
#define STEEL_DIST_PARTS_H

#include "backend/batch.h"

enum { PARTS_ROWS = 16 }; /* no piece of a prompt has fewer rows */

struct batch_part {
    struct batch b; /* its arrays are the members below, or the step's starting at row `row` */
    int row, out;   /* its first row and its first output row within the step */
    int32_t *q_start, *kv_len;
    int32_t *states; /* (4, max_seqs) */
    int max_seqs;
    struct lora_use *loras;
};

void batch_part_init(struct batch_part *t, int max_seqs);
void batch_part_clear(struct batch_part *t);
/* Takes rows [first, last) of b, whose arrays stay. out_rows (b->n_out) is shared by all parts; each has its own range. */
void batch_part_take(struct batch_part *t, const struct batch *b, int first, int last,
                     int32_t *out_rows);

/* Whether rows attend to later rows (not causal). Then sequences must not be cut. */
bool parts_whole_seqs(const struct network *net);
/* Where to cut near row `at` and after row `after`: inside a long prompt, or else at the end of a sequence. 0 = nowhere. */
int parts_cut(const struct batch *b, bool whole_seqs, int at, int after);

#endif
