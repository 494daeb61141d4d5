/*
 * Experts that do not fit in memory: each weight has a number of places for packed experts, and reads the others from the
 * model's file when a step needs them. Threads of its own read and pack, so that a step computes one round of experts
 * while the next is read. An expert that has to go is the one used least, of late.
 *
 *  1. w->place[e] is the place of expert e, or -1. Kernels read it only between tier_wait and tier_release, when it does not
 *     change.
 *  2. A step computes the same bytes as with all experts in memory: experts are added in the same order, and packed by the
 *     same code.
 *  3. After a failed read nothing is computed from that place: tier_wait returns false from then on.
 */
#ifndef STEEL_BACKEND_CPU_TIER_H
#define STEEL_BACKEND_CPU_TIER_H

#include "backend/backend.h"
#include "backend/cpu/gemm.h"

struct cpu_tier;

struct cpu_tier *tier_new(size_t bytes, int n_threads);
void tier_free(struct cpu_tier *t); /* after its weights */
/* Whether src's experts can be read later: they are in the file as they are, and have a packed layout. */
bool tier_takes(const struct raw_weight *src, enum weight_role role);
/* A weight without memory; tier_settle gives it places. */
struct gemm_weight *tier_weight_new(struct cpu_tier *t, const struct raw_weight *src);
void tier_weight_free(struct cpu_tier *t, struct gemm_weight *w); /* ends the reading of all */
bool tier_settle(struct cpu_tier *t, struct error *err);
void tier_stats(struct cpu_tier *t, struct tier_stats *out);

/* Most experts that one round of w may have. */
int tier_round(const struct gemm_weight *w);
/* Starts reading the experts (n) of w that are not in memory, and keeps all of them there until tier_release. */
void tier_request(struct cpu_tier *t, const struct gemm_weight *w, const int32_t *experts, int n);
/* Waits until these experts, which were requested, are in memory. False: a read failed. */
bool tier_wait(struct cpu_tier *t, const struct gemm_weight *w, const int32_t *experts, int n);
void tier_release(struct cpu_tier *t, const struct gemm_weight *w, const int32_t *experts, int n);
/* Reads experts that will probably be needed, if no request waits, and as long as at least half of such guesses turn out
 * right. */
void tier_ahead(struct cpu_tier *t, const struct gemm_weight *w, const int32_t *experts, int n);

#endif
