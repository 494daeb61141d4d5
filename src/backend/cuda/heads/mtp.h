/*
 * Multi-token prediction (MTP, struct mtp of layer.h) as the host's files see it: the rows that
 * steps keep, the inputs of the MTP block's steps, and the layer after which a step drops the rows
 * that need no logits.
 */
#ifndef STEEL_BACKEND_CUDA_MTP_H
#define STEEL_BACKEND_CUDA_MTP_H

#include "backend/cuda/core/host.h"

static inline struct cuda_mtp *mtp_of(const struct cuda_backend *cu)
{
    return &((struct cuda_whole *)cu->be)->mtp;
}

bool mtp_supported(const struct network *net, struct error *err);
bool mtp_prepare(struct cuda_backend *cu, const struct network *net, const struct bounds *b,
                 struct error *err);

/* mtp_put writes the step's MTP data to the step block; mtp_put_pages appends a block table per
 * draft row after the step's own. Both return where they end. mtp_stride: entries per row of the
 * block table if `n` are needed. */
int mtp_put(struct cuda_backend *cu, const struct batch *b, int used);
int mtp_put_pages(struct cuda_backend *cu, const struct batch *b, int used);
int mtp_stride(struct cuda_backend *cu, int n, int most);
size_t mtp_step_ints(const struct cuda_backend *cu); /* upper bound */
/* The bounds of steps that may verify draft tokens: each row of such a step counts as a sequence.
 * Before the other calls. */
struct bounds mtp_bounds(struct cuda_backend *cu, const struct network *net,
                         const struct bounds *b);
/* Adds what distinguishes recorded steps (CUDA graphs) to their key. */
uint64_t mtp_key(const struct cuda_backend *cu, uint64_t key);
/* The step as attention sees it once its keys are stored. A sequence that verifies draft tokens
 * has a few rows, each of which counts as a decode that sees the rows before it. Decode kernels
 * divide the keys of a long context among blocks; prompt kernels divide rows. */
struct step mtp_rows(const struct cuda_backend *cu);

/* The ops. */
void mtp_keep(struct backend *be, const struct norm *norm);
void mtp_tap(struct backend *be, int k);
void mtp_join(struct backend *be, const struct mtp *m);
/* EAGLE-3. The rows that its mixer reads (block.joined), made by mtp_join. */
struct rows mtp_joined(struct cuda_backend *cu);
/* Outputs of its head, if fewer than n_vocab; else 0. Their logits go to mtp_few_logits (NULL: the head has all), from
 * where mtp_widen copies them to rows of n_vocab. */
size_t mtp_few_outputs(const struct network *net);
float *mtp_few_logits(const struct cuda_backend *cu, const struct head *h);
void mtp_widen(struct cuda_backend *cu, const struct head *h, int rows);

#endif
