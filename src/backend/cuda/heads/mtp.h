/*
 * Multi-token prediction (struct mtp of layer.h) as the host's files see it: what steps keep of their rows,
 * where the block's steps begin, and in which layer a step's rows that need no logits end.
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

/* Lays out what a step has of it; and behind the page table the pages of its rows. mtp_stride: how many pages
 * of a sequence the table has, where `n` are needed. */
int mtp_put(struct cuda_backend *cu, const struct batch *b, int used);
int mtp_put_pages(struct cuda_backend *cu, const struct batch *b, int used);
int mtp_stride(struct cuda_backend *cu, int n, int most);
size_t mtp_step_ints(const struct cuda_backend *cu); /* the most of them */
/* The bounds of a network that may read drafts: as many sequences as rows of such a step. */
struct bounds mtp_bounds(const struct network *net, const struct bounds *b);
/* Steps that differ in this are recorded apart. */
uint64_t mtp_key(const struct cuda_backend *cu, uint64_t key);
/* The step for attention, once its keys are stored: a sequence that reads drafts has a few rows, each of which
 * is like a decode that sees the rows in front of it. Kernels for decodes share out the keys of a long context,
 * those for prompts share out rows. */
struct step mtp_rows(const struct cuda_backend *cu);

/* The ops. */
void mtp_keep(struct backend *be, const struct norm *norm);
void mtp_join(struct backend *be, const struct mtp *m);

#endif
