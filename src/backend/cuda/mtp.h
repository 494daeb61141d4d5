/*
 * Multi-token prediction (struct mtp of layer.h) as the host's files see it: what steps keep of their rows,
 * where the block's steps begin, and in which layer a step's rows that need no logits end.
 */
#ifndef STEEL_BACKEND_CUDA_MTP_H
#define STEEL_BACKEND_CUDA_MTP_H

#include "backend/cuda/host.h"

static inline struct cuda_mtp *mtp_of(const struct cuda_backend *cu)
{
    return &((struct cuda_whole *)cu->be)->mtp;
}

bool mtp_supported(const struct network *net, struct error *err);
bool mtp_prepare(struct cuda_backend *cu, const struct network *net, const struct bounds *b,
                 struct error *err);

/* The ops. */
void mtp_keep(struct backend *be, const struct norm *norm);
void mtp_join(struct backend *be, const struct mtp *m);

#endif
