/* What the tests of AMX products share: random numbers, and packed weights of random blocks. */
#ifndef STEEL_TESTS_AMX_WEIGHT_H
#define STEEL_TESTS_AMX_WEIGHT_H

#include "backend/cpu/panel.h"
#include "base/mem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

static uint64_t rng_state = 7;

static inline uint32_t rnd(void)
{
    rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(rng_state >> 33);
}

static inline float random_input(void)
{
    return (float)((int)(rnd() % 2001) - 1000) * 0.01f;
}

struct amx_weight {
    struct gemm_weight *w;
    uint8_t *blocks;
    struct pool *pool;
};

static inline struct amx_weight amx_weight_new(enum dtype type, int n_in, int n_rows)
{
    size_t bytes = dtype_bytes(type, (size_t)n_in) * (size_t)n_rows;
    struct amx_weight a = {.blocks = mem_alloc(bytes), .pool = pool_new(1)};
    /* Any bytes will do but for halves that are infinite: keep exponents small. */
    for (size_t k = 0; k < bytes; k++)
        a.blocks[k] = (uint8_t)(rnd() & 0x3b);
    const uint8_t *data[1] = {a.blocks};
    struct raw_weight raw = {.n_in = n_in, .n_out = n_rows, .n_expert = 1, .n_seg = 1};
    raw.seg[0] = (struct raw_seg){.type = type, .rows = n_rows, .data = data};
    /* GPTQ4: groups of 96, the last cut short */
    size_t groups = (size_t)((n_in + 95) / 96) * (size_t)n_rows;
    uint16_t *scales = mem_alloc(groups * sizeof *scales);
    uint8_t *zeros = mem_alloc(groups);
    for (size_t k = 0; k < groups; k++) {
        scales[k] = (uint16_t)(rnd() & 0x3bff);
        zeros[k] = (uint8_t)(rnd() % 17);
    }
    const void *scale[1] = {scales};
    const uint8_t *zero[1] = {zeros};
    if (type == DT_GPTQ4) {
        raw.seg[0].scale = scale;
        raw.seg[0].zero = zero;
        raw.seg[0].group_len = 96;
    }
    struct error err = {{0}};
    a.w = gemm_weight_new(&raw, true, a.pool, &err);
    assert_non_null(a.w);
    mem_free(scales);
    mem_free(zeros);
    return a;
}

static inline void amx_weight_free(struct amx_weight *a)
{
    mem_free(a->blocks);
    gemm_weight_free(a->w);
    pool_free(a->pool);
}

#endif
