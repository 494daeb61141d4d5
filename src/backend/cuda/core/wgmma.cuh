/*
 * Hopper's warpgroup products (wgmma, sm_90a): four warps, 64 rows of A in registers, B in shared
 * memory, N columns, k = 16. Products run asynchronously: between wgmma_commit and the wgmma_wait
 * that covers it neither d nor a may be touched. On other architectures the bodies are empty;
 * wgmma_compiled tells.
 */
#ifndef STEEL_BACKEND_CUDA_WGMMA_CUH
#define STEEL_BACKEND_CUDA_WGMMA_CUH

#include "backend/cuda/core/gpu.cuh"

#if !defined(STEEL_CUDA_SIM) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define WGMMA_ASM(...) asm volatile(__VA_ARGS__)
#else
#define WGMMA_ASM(...)
#endif

DEVICE bool wgmma_compiled()
{
#if defined(STEEL_CUDA_SIM) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    return true;
#else
    return false;
#endif
}

/* Makes ordinary writes to d and a visible to the products that follow. */
DEVICE void wgmma_fence()
{
    WGMMA_ASM("wgmma.fence.sync.aligned;" ::: "memory");
}
DEVICE void wgmma_commit()
{
    WGMMA_ASM("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Waits until at most LEFT committed groups are in flight. */
template <int LEFT> DEVICE void wgmma_wait()
{
    WGMMA_ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
/* Tells the compiler that a product has changed d. */
template <int N> DEVICE void wgmma_use(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        WGMMA_ASM("" : "+f"(d[i])::"memory");
    (void)d;
}
/* The last instruction that makes a register of a. The compiler must not move it before the
 * preceding wgmma_wait, because products may still read the register. */
DEVICE uint32_t wgmma_fma(uint32_t x, uint32_t y, uint32_t z)
{
    uint32_t r = half2_fma(x, y, z);
    WGMMA_ASM("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(z));
    return r;
}
DEVICE uint32_t wgmma_mul(uint32_t x, uint32_t y)
{
    uint32_t r = half2_mul(x, y);
    WGMMA_ASM("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
    return r;
}
/* Returns x; `zero` is 0, but the compiler must not know, or it would remove the copy. */
DEVICE uint32_t wgmma_move(uint32_t x, uint32_t zero)
{
    uint32_t r = x ^ zero;
    WGMMA_ASM("xor.b32 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(zero));
    return r;
}
/* These two as a policy for format.cuh. */
struct op_wgmma {
    static __device__ __forceinline__ uint32_t fma(uint32_t x, uint32_t y, uint32_t z)
    {
        return wgmma_fma(x, y, z);
    }
    static __device__ __forceinline__ uint32_t mul(uint32_t x, uint32_t y)
    {
        return wgmma_mul(x, y);
    }
    static __device__ __forceinline__ uint32_t move(uint32_t x, uint32_t zero)
    {
        return wgmma_move(x, zero);
    }
};

/* Makes shared memory that this thread wrote or copied visible to products after the next barrier;
 * and what other threads wrote before a barrier, to this thread's products. */
DEVICE void wgmma_publish()
{
    WGMMA_ASM("fence.proxy.async.shared::cta;" ::: "memory");
}

/* mbarriers between producer and consumer warps. A phase ends when `count` threads have arrived and
 * the expected bytes have landed. bar_wait(0) waits for the end of the first phase, bar_wait(1) for
 * the second, and so on alternately. */
DEVICE uint32_t bar_address(const uint64_t *bar)
{
#ifdef STEEL_CUDA_SIM
    return (uint32_t)((const uint8_t *)bar - sim_shared());
#else
    return (uint32_t)__cvta_generic_to_shared(bar);
#endif
}
DEVICE void bar_init(uint64_t *bar, int count) /* one thread; then bar_ready */
{
#ifdef STEEL_CUDA_SIM
    sim_bar_init(bar, count);
#endif
    WGMMA_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar_address(bar)), "r"(count)
              : "memory");
}
DEVICE void bar_ready()
{
    WGMMA_ASM("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void bar_arrive(uint64_t *bar)
{
#ifdef STEEL_CUDA_SIM
    sim_bar_arrive(bar, 0);
#endif
    WGMMA_ASM("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar_address(bar)) : "memory");
}
/* Arrives once this thread's copy_async16s so far have landed. */
DEVICE void bar_arrive_copies(uint64_t *bar)
{
#ifdef STEEL_CUDA_SIM
    sim_copy_commit();
    sim_copy_wait(0);
    sim_bar_arrive(bar, 0);
#endif
    WGMMA_ASM("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar_address(bar))
              : "memory");
}
/* Arrives, and announces `bytes` of bar_copy. */
DEVICE void bar_expect(uint64_t *bar, int bytes)
{
#ifdef STEEL_CUDA_SIM
    sim_bar_arrive(bar, bytes);
#endif
    WGMMA_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar_address(bar)),
              "r"(bytes)
              : "memory");
}
DEVICE void bar_copy(uint64_t *bar, void *smem, const void *gmem, int bytes)
{
#ifdef STEEL_CUDA_SIM
    sim_bar_copy(bar, smem, gmem, bytes);
#else
    WGMMA_ASM("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
              "[%0], [%1], %2, [%3];" ::"r"((uint32_t)__cvta_generic_to_shared(smem)),
              "l"(gmem), "r"(bytes), "r"(bar_address(bar))
              : "memory");
#endif
}
DEVICE void bar_wait(uint64_t *bar, int phase)
{
#ifdef STEEL_CUDA_SIM
    sim_bar_wait(bar, phase & 1);
#endif
    WGMMA_ASM("{\n.reg .pred done;\n"
              "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
              "@!done bra again;\n}" ::"r"(bar_address(bar)),
              "r"(phase & 1)
              : "memory");
}
/* setmaxnreg: registers per thread from here on, a multiple of 8. Called by all warps of a
 * warpgroup. */
template <int N> DEVICE void registers_raise()
{
    WGMMA_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> DEVICE void registers_lower()
{
    WGMMA_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
/* Named barrier of some of a block's warps (id 0 is __syncthreads). */
DEVICE void named_barrier_sync(int id, int threads)
{
#ifdef STEEL_CUDA_SIM
    sim_named_barrier_sync(id, threads);
#endif
    WGMMA_ASM("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/* Arrives without waiting. */
DEVICE void named_barrier_arrive(int id, int threads)
{
#ifdef STEEL_CUDA_SIM
    sim_named_barrier_arrive(id, threads);
#endif
    WGMMA_ASM("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Descriptor of B as rows of 64 fp16 (128 bytes) whose 16-byte pieces are swizzled by the row,
 * aligned to 1,024 bytes. The next 16 columns of k are 32 bytes further. */
DEVICE uint64_t wgmma_desc(const uint8_t *at)
{
#ifdef STEEL_CUDA_SIM
    uint64_t a = (uint64_t)(at - sim_shared());
#else
    uint64_t a = (uint64_t)__cvta_generic_to_shared(at);
#endif
    return (a >> 4 & 0x3fff) | (uint64_t)1 << 16 | (uint64_t)64 << 32 | (uint64_t)1 << 62;
}

/* Descriptor of B transposed: rows of 64 fp16 along n, one for each k, swizzled in the same way.
 * The next 64 along n are `panel` bytes further, the next 16 of k 2,048 bytes. */
DEVICE uint64_t wgmma_desc_transposed(const uint8_t *at, int panel)
{
    return (wgmma_desc(at) & ~((uint64_t)0x3fff << 16)) | (uint64_t)(panel >> 4) << 16;
}

/* d += A B^T. A: fragments as for mma_f16, 16 rows per warp. d[4t..4t+3]: as for mma_f16, columns
 * 8t.. of B. */
#define W_D8(i)                                                                                    \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),    \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define W_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define W_R0    "%0,%1,%2,%3,%4,%5,%6,%7"
#define W_R1    "%8,%9,%10,%11,%12,%13,%14,%15"
#define W_R2    "%16,%17,%18,%19,%20,%21,%22,%23"
#define W_R3    "%24,%25,%26,%27,%28,%29,%30,%31"
#define W_R4    "%32,%33,%34,%35,%36,%37,%38,%39"
#define W_R5    "%40,%41,%42,%43,%44,%45,%46,%47"
#define W_R6    "%48,%49,%50,%51,%52,%53,%54,%55"
#define W_R7    "%56,%57,%58,%59,%60,%61,%62,%63"
#define W_R8    "%64,%65,%66,%67,%68,%69,%70,%71"
#define W_PRODUCT(n, type, regs, a0, a1, a2, a3, b, keep, turn, ...)                               \
    WGMMA_ASM("{.reg .pred p; setp.ne.b32 p, %" #keep ", 0;\n"                                     \
              "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" regs "}, "      \
              "{%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b ", p, 1, 1, %" #turn ";}"              \
              : __VA_ARGS__                                                                        \
              : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc), "n"(FRESH ? 0 : 1),         \
                "n"(TRANSPOSED ? 1 : 0))

/* FRESH: d = A B^T. TRANSPOSED: desc was made by wgmma_desc_transposed. */
template <int N, bool BF16 = false, bool FRESH = false, bool TRANSPOSED = false, int CAP>
DEVICE void wgmma(float (&d)[CAP], const uint32_t (&a)[4], uint64_t desc)
{
    static_assert(N / 2 <= CAP, "d is too small");
#ifdef STEEL_CUDA_SIM
    for (int i = 0; FRESH && i < N / 2; i++)
        d[i] = 0.0f;
    sim_wgmma(d, N, a, desc, BF16, TRANSPOSED);
#else
    if constexpr (N == 16 && !BF16)
        W_PRODUCT(16, "f16", W_R0, 8, 9, 10, 11, 12, 13, 14, W_D8(0));
    else if constexpr (N == 32 && !BF16)
        W_PRODUCT(32, "f16", W_R0 "," W_R1, 16, 17, 18, 19, 20, 21, 22, W_D8(0), W_D8(8));
    else if constexpr (N == 40 && !BF16)
        W_PRODUCT(40, "f16", W_R0 "," W_R1 ",%16,%17,%18,%19", 20, 21, 22, 23, 24, 25, 26, W_D8(0),
                  W_D8(8), W_D4(16));
    else if constexpr (N == 48 && !BF16)
        W_PRODUCT(48, "f16", W_R0 "," W_R1 "," W_R2, 24, 25, 26, 27, 28, 29, 30, W_D8(0), W_D8(8),
                  W_D8(16));
    else if constexpr (N == 64 && !BF16)
        W_PRODUCT(64, "f16", W_R0 "," W_R1 "," W_R2 "," W_R3, 32, 33, 34, 35, 36, 37, 38, W_D8(0),
                  W_D8(8), W_D8(16), W_D8(24));
    else if constexpr (N == 64 && BF16)
        W_PRODUCT(64, "bf16", W_R0 "," W_R1 "," W_R2 "," W_R3, 32, 33, 34, 35, 36, 37, 38, W_D8(0),
                  W_D8(8), W_D8(16), W_D8(24));
    else if constexpr (N == 72 && !BF16)
        W_PRODUCT(72, "f16", W_R0 "," W_R1 "," W_R2 "," W_R3 ",%32,%33,%34,%35", 36, 37, 38, 39, 40,
                  41, 42, W_D8(0), W_D8(8), W_D8(16), W_D8(24), W_D4(32));
    else if constexpr (N == 80 && !BF16)
        W_PRODUCT(80, "f16", W_R0 "," W_R1 "," W_R2 "," W_R3 "," W_R4, 40, 41, 42, 43, 44, 45, 46,
                  W_D8(0), W_D8(8), W_D8(16), W_D8(24), W_D8(32));
    else if constexpr (N == 96 && !BF16)
        W_PRODUCT(96, "f16", W_R0 "," W_R1 "," W_R2 "," W_R3 "," W_R4 "," W_R5, 48, 49, 50, 51, 52,
                  53, 54, W_D8(0), W_D8(8), W_D8(16), W_D8(24), W_D8(32), W_D8(40));
    else if constexpr (N == 112 && !BF16)
        W_PRODUCT(112, "f16", W_R0 "," W_R1 "," W_R2 "," W_R3 "," W_R4 "," W_R5 "," W_R6, 56, 57,
                  58, 59, 60, 61, 62, W_D8(0), W_D8(8), W_D8(16), W_D8(24), W_D8(32), W_D8(40),
                  W_D8(48));
    else if constexpr (N == 128 && !BF16)
        W_PRODUCT(128, "f16", W_R0 "," W_R1 "," W_R2 "," W_R3 "," W_R4 "," W_R5 "," W_R6 "," W_R7,
                  64, 65, 66, 67, 68, 69, 70, W_D8(0), W_D8(8), W_D8(16), W_D8(24), W_D8(32),
                  W_D8(40), W_D8(48), W_D8(56));
    else if constexpr (N == 144 && !BF16)
        W_PRODUCT(144, "f16",
                  W_R0 "," W_R1 "," W_R2 "," W_R3 "," W_R4 "," W_R5 "," W_R6 "," W_R7 "," W_R8, 72,
                  73, 74, 75, 76, 77, 78, W_D8(0), W_D8(8), W_D8(16), W_D8(24), W_D8(32), W_D8(40),
                  W_D8(48), W_D8(56), W_D8(64));
    else if constexpr (N == 128 && BF16)
        W_PRODUCT(128, "bf16", W_R0 "," W_R1 "," W_R2 "," W_R3 "," W_R4 "," W_R5 "," W_R6 "," W_R7,
                  64, 65, 66, 67, 68, 69, 70, W_D8(0), W_D8(8), W_D8(16), W_D8(24), W_D8(32),
                  W_D8(40), W_D8(48), W_D8(56));
    else
        static_assert(N == 0, "no product of this width");
#endif
}

/* d (64 rows, 64 columns) = A B^T (FRESH), or d += A B^T, with A in shared memory too (a
 * wgmma_desc): 64 rows, 16 per warp. */
template <bool FRESH> DEVICE void wgmma_shared(float (&d)[32], uint64_t desc_a, uint64_t desc)
{
#ifdef STEEL_CUDA_SIM
    uint32_t a[4];
    for (int i = 0; i < 4; i++) {
        int row = (warp_id() & 3) * 16 + (lane_id() >> 2) + 8 * (i & 1);
        size_t at = ((size_t)(desc_a & 0x3fff) << 4) + (size_t)row * 128 +
                    (size_t)(4 * (lane_id() & 3) + 16 * (i >> 1));
        a[i] = *(const uint32_t *)(sim_shared() + (at ^ (at >> 7 & 7) << 4));
    }
    wgmma<64, false, FRESH>(d, a, desc);
#else
    WGMMA_ASM("{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
              "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" W_R0 "," W_R1 "," W_R2 "," W_R3
              "}, %32, %33, p, 1, 1, 0, 0;}"
              : W_D8(0), W_D8(8), W_D8(16), W_D8(24)
              : "l"(desc_a), "l"(desc), "n"(FRESH ? 0 : 1));
#endif
}

#endif
