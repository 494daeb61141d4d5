/*
 * Mixers other than attention, as backend.cu and prepare.cu see them: the gated delta net
 * (delta_net.cu), state-space models (ssm.cu), MLA (latent.cu, latent_attn.cu), and the layers of encoders (encoder.cu). Each
 * has scratch of its own, allocated if the network has such a layer. A mixer reads the residual
 * stream through its norm and returns rows for the output projection.
 */
#ifndef STEEL_BACKEND_CUDA_MIXERS_H
#define STEEL_BACKEND_CUDA_MIXERS_H

#include "backend/cuda/core/host.h"

/* y (rows, n_out) = norm(stream) W^T for several weights that share a norm. */
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

/* ssm.cu: state-space models and short convolutions */
bool ssm_supported(const struct cuda_backend *cu, const struct mixer *m, int layer,
                   struct error *err);
bool ssm_prepare(struct cuda_backend *cu, const struct bounds *b, struct error *err);
struct rows ssm_mix(struct cuda_backend *cu, const struct mixer *m, int layer);
void ssm_close(struct cuda_backend *cu);

/* latent.cu */
bool latent_supported(const struct cuda_backend *cu, const struct latent *l, int layer,
                      struct error *err);
bool latent_prepare(struct cuda_backend *cu, const struct bounds *b, struct error *err);
struct rows latent_mix(struct cuda_backend *cu, const struct mixer *m, int layer);
void latent_close(struct cuda_backend *cu);

/* compressed.cu */
bool compressed_supported(const struct cuda_backend *cu, const struct mixer *m, int layer,
                          struct error *err);
bool compressed_prepare(struct cuda_backend *cu, const struct bounds *b, struct error *err);
struct rows compressed_mix(struct cuda_backend *cu, const struct mixer *m, int layer);
void compressed_close(struct cuda_backend *cu);

/* row_conv.cu: convolutions of keys and values in cu->act.qkv, and of what a block leaves pending, whose parts are added
 * up before; and room for the queries of relative positions. */
bool row_conv_supported(const struct network *net, int layer, struct error *err);
bool row_conv_prepare(struct cuda_backend *cu, const struct bounds *b, struct error *err);
void row_conv_close(struct cuda_backend *cu);
void row_conv_kv(struct cuda_backend *cu, const struct attention *a, int layer);
void row_conv_block(struct cuda_backend *cu, bool of_mlp, int layer,
                    struct resid_epilogue *epilogue);
float *row_conv_rel(const struct cuda_backend *cu); /* (n_tokens, H*R) */

/* encoder.cu */
struct attn_layer;
bool encoder_bidirectional(const struct network *net); /* attention has no causal mask */
bool encoder_supported(const struct network *net, struct error *err);
bool encoder_prepare(struct cuda_backend *cu, const struct bounds *b, struct error *err);
struct rows encoder_mix(struct cuda_backend *cu, const struct norm *norm,
                        const struct attn_layer *l);
/* The attention alone, of the raw projections in cu->act.qkv. */
struct rows encoder_attend(struct cuda_backend *cu, const struct attn_layer *l);
/* For a network without an LM head the result is norm(stream). encoder_send records the copy of
 * the result to the host at the end of a step; encoder_row reads a row of the last finished
 * step. */
void encoder_head(struct cuda_backend *cu, const struct norm *norm);
void encoder_send(struct cuda_backend *cu, int buffer, int rows);
void encoder_row(const struct cuda_backend *cu, int row, float *host);
void encoder_rows_put(struct cuda_backend *cu, const float *host,
                      size_t bytes); /* overwrites the rows of the last step */
void encoder_close(struct cuda_backend *cu);

#endif
