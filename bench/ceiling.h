/*
 * The ceilings of this machine: bytes read from memory and multiply-adds from registers, with any
 * number of threads. Loops are assembly, so this header needs no compiler flags and no compiler can change
 * the measurement. Each runs only if the CPU has the instructions.
 */
#ifndef STEEL_BENCH_CEILING_H
#define STEEL_BENCH_CEILING_H

#include "base/clock.h"
#include "base/cpu.h"
#include "base/pool.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum ceiling {
    CEILING_READ, /* bytes per second; the others: operations per second */
    CEILING_FMA_AVX2,
    CEILING_FMA_AVX512,
    CEILING_VNNI,
    CEILING_AMX_BF16,
    CEILING_AMX_INT8,
    N_CEILINGS
};

struct ceiling_info {
    const char *name, *unit;
    enum isa isa;     /* least instruction set */
    double per_round; /* operations of one round of the loop */
};

static const struct ceiling_info ceiling_table[N_CEILINGS] = {
    [CEILING_READ] = {"memory read", "GB/s", ISA_REF, 0},
    [CEILING_FMA_AVX2] = {"float FMA, AVX2", "GFLOP/s", ISA_AVX2, 12 * 8 * 2},
    [CEILING_FMA_AVX512] = {"float FMA, AVX-512", "GFLOP/s", ISA_AVX512, 12 * 16 * 2},
    [CEILING_VNNI] = {"int8 dot, VNNI", "GOP/s", ISA_VNNI, 12 * 64 * 2},
    [CEILING_AMX_BF16] = {"bf16 tile, AMX", "GFLOP/s", ISA_AMX, 4 * 16 * 16 * 32 * 2.0},
    [CEILING_AMX_INT8] = {"int8 tile, AMX", "GOP/s", ISA_AMX, 4 * 16 * 16 * 64 * 2.0},
};

#ifdef __x86_64__
#define CEILING_12(op, reg)                                                                        \
    op " %%" reg "15, %%" reg "15, %%" reg "0\n" op " %%" reg "15, %%" reg "15, %%" reg "1\n" op   \
       " %%" reg "15, %%" reg "15, %%" reg "2\n" op " %%" reg "15, %%" reg "15, %%" reg "3\n" op   \
       " %%" reg "15, %%" reg "15, %%" reg "4\n" op " %%" reg "15, %%" reg "15, %%" reg "5\n" op   \
       " %%" reg "15, %%" reg "15, %%" reg "6\n" op " %%" reg "15, %%" reg "15, %%" reg "7\n" op   \
       " %%" reg "15, %%" reg "15, %%" reg "8\n" op " %%" reg "15, %%" reg "15, %%" reg "9\n" op   \
       " %%" reg "15, %%" reg "15, %%" reg "10\n" op " %%" reg "15, %%" reg "15, %%" reg "11\n"
#define CEILING_LOOP(body)                                                                         \
    __asm__ volatile("vpxor %%xmm15, %%xmm15, %%xmm15\n1:\n" body "dec %0\njnz 1b\nvzeroupper\n"   \
                     : "+r"(rounds)::"xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6",       \
                       "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm15", "cc")

static inline void ceiling_tiles(void)
{
    uint8_t config[64] = {1}; /* palette 1; all tiles 16 rows of 64 bytes */
    for (int i = 0; i < 8; i++) {
        config[16 + 2 * i] = 64;
        config[48 + i] = 16;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
    __asm__ volatile("tilezero %%tmm0\ntilezero %%tmm1\ntilezero %%tmm2\ntilezero %%tmm3\n"
                     "tilezero %%tmm4\ntilezero %%tmm5\ntilezero %%tmm6\ntilezero %%tmm7\n" ::);
}

static inline void ceiling_rounds(enum ceiling c, long rounds)
{
    switch (c) {
    case CEILING_FMA_AVX2:
        CEILING_LOOP(CEILING_12("vfmadd231ps", "ymm"));
        break;
    case CEILING_FMA_AVX512:
        CEILING_LOOP(CEILING_12("vfmadd231ps", "zmm"));
        break;
    case CEILING_VNNI:
        CEILING_LOOP(CEILING_12("vpdpbusd", "zmm"));
        break;
    case CEILING_AMX_BF16:
        ceiling_tiles();
        CEILING_LOOP("tdpbf16ps %%tmm6, %%tmm4, %%tmm0\ntdpbf16ps %%tmm7, %%tmm4, %%tmm1\n"
                     "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\ntdpbf16ps %%tmm7, %%tmm5, %%tmm3\n");
        __asm__ volatile("tilerelease");
        break;
    case CEILING_AMX_INT8:
        ceiling_tiles();
        CEILING_LOOP("tdpbssd %%tmm6, %%tmm4, %%tmm0\ntdpbssd %%tmm7, %%tmm4, %%tmm1\n"
                     "tdpbssd %%tmm6, %%tmm5, %%tmm2\ntdpbssd %%tmm7, %%tmm5, %%tmm3\n");
        __asm__ volatile("tilerelease");
        break;
    default:
        break;
    }
}

/* Reads bytes (a multiple of 512) with 16-byte loads: far faster than memory on any machine. */
static inline void ceiling_read(const char *p, size_t bytes)
{
    const char *end = p + bytes;
    __asm__ volatile("1:\n"
                     "movaps (%0), %%xmm0\nmovaps 16(%0), %%xmm1\n"
                     "movaps 32(%0), %%xmm2\nmovaps 48(%0), %%xmm3\n"
                     "movaps 64(%0), %%xmm4\nmovaps 80(%0), %%xmm5\n"
                     "movaps 96(%0), %%xmm6\nmovaps 112(%0), %%xmm7\n"
                     "prefetcht0 2048(%0)\nprefetcht0 2112(%0)\n"
                     "add $128, %0\ncmp %1, %0\njb 1b\n"
                     : "+r"(p)
                     : "r"(end)
                     : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "cc",
                       "memory");
}
#else
static inline void ceiling_rounds(enum ceiling c, long rounds)
{
    (void)c, (void)rounds;
}
static inline void ceiling_read(const char *p, size_t bytes)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < bytes; i += 8)
        sum += *(const volatile uint64_t *)(p + i);
    (void)sum;
}
#endif

struct ceiling_job {
    enum ceiling what;
    int threads; /* of the pool that take part */
    long rounds;
    const char *memory;
    size_t bytes;
};

static inline void ceiling_run(void *arg, int ith, int nth)
{
    (void)nth;
    const struct ceiling_job *j = arg;
    if (ith >= j->threads)
        return;
    if (j->what == CEILING_READ) {
        size_t part = j->bytes / (size_t)j->threads / 4096 * 4096;
        ceiling_read(j->memory + part * (size_t)ith, part);
    } else {
        ceiling_rounds(j->what, j->rounds);
    }
}

/* Best of `tries` runs with `threads` of the pool. memory: (bytes), already written, for the read test. */
static inline double ceiling_measure(struct pool *pool, enum ceiling what, int threads, int tries,
                                     const char *memory, size_t bytes)
{
    struct ceiling_job j = {what, threads, 1000000, memory, bytes};
    double best = 0;
    for (int i = 0; i < tries; i++) {
        int64_t start = clock_ns();
        pool_run(pool, ceiling_run, &j);
        double s = (double)(clock_ns() - start) / 1e9;
        double work = what == CEILING_READ
                          ? (double)(bytes / (size_t)threads / 4096 * 4096) * threads
                          : (double)j.rounds * ceiling_table[what].per_round * threads;
        best = work / s > best ? work / s : best;
    }
    return best;
}

#endif
