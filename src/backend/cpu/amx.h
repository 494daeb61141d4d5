/*
 * AMX tile instructions. With AMX_EMULATE they are plain C, so that kernels built on tiles are tested on
 * machines without AMX. Tile numbers must be constants.
 */
#ifndef STEEL_BACKEND_CPU_AMX_H
#define STEEL_BACKEND_CPU_AMX_H

#include <stdint.h>
#include <string.h>

struct amx_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

#ifdef AMX_EMULATE

static _Thread_local struct {
    struct amx_config config;
    uint8_t tile[8][16][64];
} amx_state;

static inline void amx_configure(const struct amx_config *c)
{
    amx_state.config = *c;
    memset(amx_state.tile, 0, sizeof amx_state.tile);
}

static inline void amx_release(void)
{
    memset(&amx_state, 0xee, sizeof amx_state);
}

static inline void amx_zero(int t)
{
    memset(amx_state.tile[t], 0, sizeof amx_state.tile[t]);
}

static inline void amx_load(int t, const void *p, size_t stride)
{
    memset(amx_state.tile[t], 0, sizeof amx_state.tile[t]);
    for (int r = 0; r < amx_state.config.rows[t]; r++)
        memcpy(amx_state.tile[t][r], (const uint8_t *)p + (size_t)r * stride,
               amx_state.config.row_bytes[t]);
}

static inline void amx_store(int t, void *p, size_t stride)
{
    for (int r = 0; r < amx_state.config.rows[t]; r++)
        memcpy((uint8_t *)p + (size_t)r * stride, amx_state.tile[t][r],
               amx_state.config.row_bytes[t]);
}

/* c[m][n] += sum over k, j of a[m][4k + j] * b[k][4n + j], signed bytes */
static inline void amx_dot(int c, int a, int b)
{
    const struct amx_config *f = &amx_state.config;
    for (int m = 0; m < f->rows[c]; m++)
        for (int n = 0; n < f->row_bytes[c] / 4; n++) {
            int32_t sum;
            memcpy(&sum, &amx_state.tile[c][m][4 * n], 4);
            for (int k = 0; k < f->row_bytes[a] / 4 && k < f->rows[b]; k++)
                for (int j = 0; j < 4; j++)
                    sum += (int8_t)amx_state.tile[a][m][4 * k + j] *
                           (int8_t)amx_state.tile[b][k][4 * n + j];
            memcpy(&amx_state.tile[c][m][4 * n], &sum, 4);
        }
}

/* c[m][n] += sum over k, j of a[m][2k + j] * b[k][2n + j], bf16 to floats */
static inline void amx_dot_bf16(int c, int a, int b)
{
    const struct amx_config *f = &amx_state.config;
    for (int m = 0; m < f->rows[c]; m++)
        for (int n = 0; n < f->row_bytes[c] / 4; n++) {
            float sum;
            memcpy(&sum, &amx_state.tile[c][m][4 * n], 4);
            for (int k = 0; k < f->row_bytes[a] / 4 && k < f->rows[b]; k++)
                for (int j = 0; j < 2; j++) {
                    uint32_t x = 0, y = 0;
                    float fx, fy;
                    memcpy((uint8_t *)&x + 2, &amx_state.tile[a][m][4 * k + 2 * j], 2);
                    memcpy((uint8_t *)&y + 2, &amx_state.tile[b][k][4 * n + 2 * j], 2);
                    memcpy(&fx, &x, 4);
                    memcpy(&fy, &y, 4);
                    sum += fx * fy;
                }
            memcpy(&amx_state.tile[c][m][4 * n], &sum, 4);
        }
}

#else

#include <immintrin.h>

/* GCC's tile loads and stores are not declared to access memory. The barriers order them with other
 * accesses. */
#define AMX_BARRIER() __asm__ volatile("" ::: "memory")

static inline void amx_configure(const struct amx_config *c)
{
    __asm__ volatile("" ::"r"(c) : "memory");
    _tile_loadconfig(c);
}

#define amx_release() _tile_release()
#define amx_zero(t)   _tile_zero(t)
#define amx_load(t, p, stride)                                                                     \
    do {                                                                                           \
        AMX_BARRIER();                                                                             \
        _tile_loadd(t, p, stride);                                                                 \
    } while (0)
#define amx_store(t, p, stride)                                                                    \
    do {                                                                                           \
        _tile_stored(t, p, stride);                                                                \
        AMX_BARRIER();                                                                             \
    } while (0)
#define amx_dot(c, a, b)      _tile_dpbssd(c, a, b)
#define amx_dot_bf16(c, a, b) _tile_dpbf16ps(c, a, b)

#endif
#endif
