/*
 * Mixers beside attention: the gated delta net (delta_net.cu) and latent attention (latent.cu,
 * latent_attn.cu), and attention of encoders with what else those have (encoder.cu), as backend.cu and
 * prepare.cu see them. Each has scratch of its own, which exists
 * where the network has such a layer. They read the stream through its norm and leave rows for the
 * output projection.
 */
#ifndef STEEL_BACKEND_CUDA_MIXERS_H
#define STEEL_BACKEND_CUDA_MIXERS_H

#include "backend/cuda/core/host.h"

/* y (rows, n_out) = norm(stream) W^T, for several weights of one norm. */
struct mixer_product {
    const struct matrix *w;
    float *y;
};
void mixer_products(struct cuda_backend *cu, const struct norm *norm,
                    const struct mixer_product *list, int n);

/* delta_net.cu */
bool delta_net_supported(const struct cuda_backend *cu, const struct delta_net *d, int layer,
                         struct error *err);
bool delta_net_prepare(struct cuda_backend *cu, const struct bounds *b, struct error *err);
struct rows delta_net_mix(struct cuda_backend *cu, const struct mixer *m, int layer);
void delta_net_close(struct cuda_backend *cu);

/* latent.cu */
bool latent_supported(const struct cuda_backend *cu, const struct latent *l, int layer,
                      struct error *err);
bool latent_prepare(struct cuda_backend *cu, const struct bounds *b, struct error *err);
struct rows latent_mix(struct cuda_backend *cu, const struct mixer *m, int layer);
void latent_close(struct cuda_backend *cu);

/* encoder.cu */
struct attn_layer;
bool encoder_both_ways(const struct network *net); /* rows see each other both ways */
bool encoder_supported(const struct network *net, struct error *err);
bool encoder_prepare(struct cuda_backend *cu, const struct bounds *b, struct error *err);
struct rows encoder_mix(struct cuda_backend *cu, const struct norm *norm,
                        const struct attn_layer *l);
/* Of a network without a head: norm(stream) is the result. encoder_send, behind what is recorded of a
 * step: to the host, for encoder_row of the step that ended last. */
void encoder_head(struct cuda_backend *cu, const struct norm *norm);
void encoder_send(struct cuda_backend *cu, int turn, int rows);
void encoder_row(const struct cuda_backend *cu, int row, float *host);
void encoder_rows_put(struct cuda_backend *cu, const float *host, size_t bytes); /* in its place */
void encoder_close(struct cuda_backend *cu);

#endif
