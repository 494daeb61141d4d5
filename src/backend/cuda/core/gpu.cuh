/*
 * Every CUDA intrinsic, PTX instruction and runtime call that the kernels use, under our own names.
 * Each has two bodies: PTX for nvcc, and (STEEL_CUDA_SIM) its plain meaning for the simulator in
 * tests/gpu, which runs the same kernels on a CPU. This file knows nothing of models or weights.
 */
#ifndef STEEL_BACKEND_CUDA_GPU_CUH
#define STEEL_BACKEND_CUDA_GPU_CUH

#include <stddef.h>
#include <stdint.h>

#ifdef STEEL_CUDA_SIM
#include "cudasim.h"
#else
#include <cuda_runtime.h>
/* Dynamic shared memory of the block. */
#define SHARED_BYTES(name) extern __shared__ __align__(128) uint8_t name[]
#endif

#define DEVICE    static __device__ __forceinline__
#define FULL_WARP 0xffffffffu

DEVICE int lane_id()
{
    return (int)(threadIdx.x & 31);
}
DEVICE int warp_id()
{
    return (int)(threadIdx.x >> 5);
}

/* The first multiple of `to` (a power of two) at or after base, in dynamic shared memory. */
DEVICE uint8_t *shared_align(uint8_t *base, int to)
{
#ifdef STEEL_CUDA_SIM
    (void)to;
    return base;
#else
    return base + (-(int)__cvta_generic_to_shared(base) & (to - 1));
#endif
}

/* Bits */
DEVICE float float_of(uint32_t u)
{
#ifdef STEEL_CUDA_SIM
    float f;
    memcpy(&f, &u, 4);
    return f;
#else
    return __uint_as_float(u);
#endif
}
DEVICE uint32_t bits_of(float f)
{
#ifdef STEEL_CUDA_SIM
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
#else
    return __float_as_uint(f);
#endif
}

/* fp16, carried as bits: one in the low 16 bits, or a pair with element 0 low. */
DEVICE float half_to_float(uint32_t h)
{
#ifdef STEEL_CUDA_SIM
    return sim_half_to_float((uint16_t)h);
#else
    float f;
    asm("{.reg .b16 t; cvt.u16.u32 t, %1; cvt.f32.f16 %0, t;}" : "=f"(f) : "r"(h));
    return f;
#endif
}
DEVICE float bf16_to_float(uint32_t b)
{
    return float_of(b << 16);
}
/* {lo, hi} rounded to nearest even; values past the range become infinity. */
DEVICE uint32_t pack_half2(float lo, float hi)
{
#ifdef STEEL_CUDA_SIM
    return (uint32_t)sim_float_to_half(lo) | (uint32_t)sim_float_to_half(hi) << 16;
#else
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
#endif
}
DEVICE uint32_t pack_bf162(float lo, float hi)
{
#ifdef STEEL_CUDA_SIM
    return (uint32_t)sim_float_to_bf16(lo) | (uint32_t)sim_float_to_bf16(hi) << 16;
#else
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
#endif
}
DEVICE uint16_t float_to_half(float f)
{
    return (uint16_t)pack_half2(f, 0.0f);
}
DEVICE uint16_t float_to_bf16(float f)
{
    return (uint16_t)pack_bf162(f, 0.0f);
}
DEVICE uint32_t half2_add(uint32_t a, uint32_t b)
{
#ifdef STEEL_CUDA_SIM
    return sim_half2_fma(a, 0x3c003c00u, b);
#else
    uint32_t r;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
#endif
}
DEVICE uint32_t half2_mul(uint32_t a, uint32_t b)
{
#ifdef STEEL_CUDA_SIM
    return sim_half2_fma(a, b, 0x80008000u);
#else
    uint32_t r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
#endif
}
DEVICE uint32_t half2_fma(uint32_t a, uint32_t b, uint32_t c)
{
#ifdef STEEL_CUDA_SIM
    return sim_half2_fma(a, b, c);
#else
    uint32_t r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
#endif
}

/* Byte i of the result is byte (sel >> 4i & 7) of {a: 0..3, b: 4..7}. */
DEVICE uint32_t byte_perm(uint32_t a, uint32_t b, uint32_t sel)
{
#ifdef STEEL_CUDA_SIM
    return sim_byte_perm(a, b, sel);
#else
    return __byte_perm(a, b, sel);
#endif
}
/* (a & b) | c in one LOP3. */
DEVICE uint32_t and_or(uint32_t a, uint32_t b, uint32_t c)
{
#ifdef STEEL_CUDA_SIM
    return (a & b) | c;
#else
    uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
#endif
}

/* Tensor cores: d += A (16x16, row) B (16x8, col). Lane (g = lane/4, c = lane%4) holds
 * a0: row g, k 2c 2c+1; a1: row g+8; a2: row g, k 2c+8..; a3: row g+8, k 2c+8..;
 * b0: k 2c 2c+1, column g; b1: k 2c+8..; d0 d1: row g, columns 2c 2c+1; d2 d3: row g+8. */
DEVICE void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
#ifdef STEEL_CUDA_SIM
    sim_mma(d, a, b0, b1, false);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
/* d = c + A B */
DEVICE void mma_f16_from(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                         const float (&c)[4])
{
#ifdef STEEL_CUDA_SIM
    for (int i = 0; i < 4; i++)
        d[i] = c[i];
    sim_mma(d, a, b0, b1, false);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]),
                   "f"(c[1]), "f"(c[2]), "f"(c[3]));
#endif
}
/* Integer version: d += A (16x32 unsigned bytes) B (32x8 signed bytes). Lane (g, c) holds a0: row
 * g, k 4c..4c+3; a1: row g+8; a2: row g, k 4c+16..; a3: row g+8; b0: k 4c.., column g; b1: k
 * 4c+16.. With k = 16: only a0, a1 and b0. */
DEVICE void mma_u8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
#ifdef STEEL_CUDA_SIM
    sim_mma_u8(d, a, b0, b1);
#else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
DEVICE void mma_u8_half(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0)
{
#ifdef STEEL_CUDA_SIM
    const uint32_t a[4] = {a0, a1, 0, 0};
    sim_mma_u8(d, a, b0, 0);
#else
    asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 "
        "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(b0));
#endif
}
DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
#ifdef STEEL_CUDA_SIM
    sim_mma(d, a, b0, b1, true);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

/* d += A (16x8, row) B (8x8, col), floats whose lower 13 bits are ignored; a0: row g, k c; a1: row
 * g+8, k c; a2: row g, k c+4; a3: row g+8, k c+4; b0: k c, column g; b1: k c+4. */
DEVICE void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
#ifdef STEEL_CUDA_SIM
    sim_mma_tf32(d, a, b0, b1);
#else
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

/* Four 8x8 matrices of 16-bit values: lane i names row i%8 of matrix i/8 (16 bytes in shared
 * memory); lane (g, c) receives elements 2c, 2c+1 of row g of each. */
DEVICE void ldmatrix4(uint32_t (&r)[4], const void *row)
{
#ifdef STEEL_CUDA_SIM
    sim_ldmatrix(r, row, false);
#else
    uint32_t a = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(a)
                 : "memory");
#endif
}
/* Like ldmatrix4, transposed: lane (g, c) receives rows 2c, 2c+1 of column g. */
DEVICE void ldmatrix4_trans(uint32_t (&r)[4], const void *row)
{
#ifdef STEEL_CUDA_SIM
    sim_ldmatrix(r, row, true);
#else
    uint32_t a = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(a)
                 : "memory");
#endif
}

/* Transposes an 8x8 matrix of 16-bit values: lane (g, c) passes elements 2c, 2c+1 of row g and gets
 * elements 2c, 2c+1 of column g. */
DEVICE uint32_t transpose8(uint32_t a)
{
#ifdef STEEL_CUDA_SIM
    int from = (lane_id() & 3) * 8 + (lane_id() >> 3), high = lane_id() >> 2 & 1;
    uint32_t x = __shfl_sync(FULL_WARP, a, from), y = __shfl_sync(FULL_WARP, a, from + 4);
    return sim_byte_perm(x, y, high ? 0x7632 : 0x5410);
#else
    uint32_t r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
    return r;
#endif
}

/* Asynchronous copies of 16 bytes, global to shared. copy_async16_or_zero writes zeros unless
 * `real`. */
DEVICE void copy_async16(void *smem, const void *gmem)
{
#ifdef STEEL_CUDA_SIM
    sim_copy_async(smem, gmem, 16);
#else
    uint32_t a = (uint32_t)__cvta_generic_to_shared(smem);
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(a), "l"(gmem)
                 : "memory");
#endif
}
DEVICE void copy_async16_or_zero(void *smem, const void *gmem, bool real)
{
#ifdef STEEL_CUDA_SIM
    sim_copy_async(smem, gmem, real ? 16 : 0);
#else
    uint32_t a = (uint32_t)__cvta_generic_to_shared(smem);
    int n = real ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(a), "l"(gmem), "r"(n)
                 : "memory");
#endif
}
DEVICE void copy_async_commit()
{
#ifdef STEEL_CUDA_SIM
    sim_copy_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
/* Waits until at most N of this thread's groups are in flight. */
template <int N> DEVICE void copy_async_wait()
{
#ifdef STEEL_CUDA_SIM
    sim_copy_wait(N);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

/* Bulk copies of multiples of 16 bytes (Hopper and later). One thread issues the copy; an mbarrier
 * in shared memory completes when all bytes have landed. Its phase flips with every copy: wait for
 * parity 0 for the first, 1 for the second, 0 for the third. */
#if !defined(STEEL_CUDA_SIM) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define BULK_COPIES 1
DEVICE void bulk_init(uint64_t *bar) /* one thread; then __syncthreads */
{
    uint32_t a = (uint32_t)__cvta_generic_to_shared(bar);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(a) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/* Several copies on one phase: first announce their total bytes. */
DEVICE void bulk_expect(uint64_t *bar, int bytes)
{
    uint32_t a = (uint32_t)__cvta_generic_to_shared(bar);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(a), "r"(bytes)
                 : "memory");
}
DEVICE void bulk_piece(void *smem, const void *gmem, int bytes, uint64_t *bar)
{
    uint32_t to = (uint32_t)__cvta_generic_to_shared(smem);
    uint32_t a = (uint32_t)__cvta_generic_to_shared(bar);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(gmem), "r"(bytes), "r"(a)
                 : "memory");
}
/* For data read once: evict_first in the L2. */
DEVICE void bulk_copy_once(void *smem, const void *gmem, int bytes, uint64_t *bar)
{
    uint32_t to = (uint32_t)__cvta_generic_to_shared(smem);
    uint32_t a = (uint32_t)__cvta_generic_to_shared(bar);
    uint64_t policy;
    bulk_expect(bar, bytes);
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(gmem), "r"(bytes), "r"(a), "l"(policy)
                 : "memory");
}
DEVICE void bulk_copy(void *smem, const void *gmem, int bytes, uint64_t *bar)
{
    bulk_expect(bar, bytes);
    bulk_piece(smem, gmem, bytes, bar);
}
DEVICE void bulk_wait(uint64_t *bar, uint32_t parity)
{
    uint32_t a = (uint32_t)__cvta_generic_to_shared(bar);
    asm volatile("{\n.reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(a),
                 "r"(parity)
                 : "memory");
}
#else
#define BULK_COPIES 0
#endif
/* Orders this thread's earlier accesses to shared memory before the bulk copies it issues next. */
DEVICE void fence_before_copies()
{
#if BULK_COPIES
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/* Programmatic dependent launch. A kernel may start before the preceding one has finished. It may
 * read that one's results, and write anything at all, only after wait. trigger lets the next kernel
 * start once every block of this one has called it. */
DEVICE void dependency_wait()
{
#if !defined(STEEL_CUDA_SIM) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#ifdef STEEL_CUDA_TRACE /* TRACE=1: when the first thread began and ended its wait */
enum { TRACE_EVENTS = 8192, TRACE_BLOCKS = 1 << 18, TRACE_MARKS = 10 };
struct trace_block {
    unsigned long long start;                       /* globaltimer */
    uint32_t tag, sm, block, grid, at[TRACE_MARKS]; /* clocks of this SM */
};
struct trace {
    int n, n_blocks, pad[2];
    struct trace_block b[TRACE_BLOCKS];
    struct {
        unsigned long long before, after;
        int tag, pad;
    } e[TRACE_EVENTS];
};
static __device__ struct trace *trace_to;
DEVICE unsigned long long trace_clock()
{
    unsigned long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}
DEVICE void traced_wait(int tag)
{
    bool first = !(threadIdx.x | blockIdx.x | blockIdx.y | blockIdx.z) && trace_to;
    unsigned long long before = first ? trace_clock() : 0;
    dependency_wait();
    if (first) {
        int i = atomicAdd(&trace_to->n, 1);
        if (i < TRACE_EVENTS) {
            trace_to->e[i].before = before;
            trace_to->e[i].after = trace_clock();
            trace_to->e[i].tag = tag;
        }
    }
}
#define dependency_wait() traced_wait(__FILE__[17] << 16 | __LINE__)
/* Times at which each block of a kernel passed its marks, kept in registers until the block
 * ends. */
struct marks {
    unsigned long long start;
    uint32_t slot, at[TRACE_MARKS];
};
DEVICE void mark(struct marks &m, int i)
{
    asm volatile("mov.u32 %0, %clock;" : "=r"(m.at[i])::"memory");
}
DEVICE void marks_begin(struct marks &m)
{
#pragma unroll
    for (int i = 0; i < TRACE_MARKS; i++)
        m.at[i] = 0;
    mark(m, 0);
    m.start = trace_clock();
    m.slot = threadIdx.x == 0 && trace_to ? (uint32_t)atomicAdd(&trace_to->n_blocks, 1) : ~0u;
}
DEVICE void marks_end(struct marks &m, int tag)
{
    mark(m, TRACE_MARKS - 1);
    if (m.slot >= TRACE_BLOCKS)
        return;
    struct trace_block *b = &trace_to->b[m.slot];
    b->start = m.start;
    b->tag = (uint32_t)tag;
    asm volatile("mov.u32 %0, %smid;" : "=r"(b->sm));
    b->block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    b->grid = gridDim.x * gridDim.y * gridDim.z;
#pragma unroll
    for (int i = 0; i < TRACE_MARKS; i++)
        b->at[i] = m.at[i];
}
#else
struct marks {
};
DEVICE void mark(struct marks &, int)
{
}
DEVICE void marks_begin(struct marks &)
{
}
DEVICE void marks_end(struct marks &, int)
{
}
#endif
DEVICE void dependency_trigger()
{
#if !defined(STEEL_CUDA_SIM) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Thread block clusters (Hopper): blocks of one launch that are resident together, share a barrier
 * and access each other's shared memory. Before sm_90, and in the simulator, a cluster is one
 * block. */
DEVICE int cluster_rank()
{
#if !defined(STEEL_CUDA_SIM) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t r;
    asm("mov.u32 %0, %cluster_ctarank;" : "=r"(r));
    return (int)r;
#else
    return 0;
#endif
}
/* Writes before arrive are visible after wait to every thread of the cluster. */
DEVICE void cluster_arrive()
{
#if !defined(STEEL_CUDA_SIM) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
DEVICE void cluster_wait()
{
#if !defined(STEEL_CUDA_SIM) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}
/* Maps p, in this block's shared memory, to the same address in block `rank` of the cluster. */
DEVICE float *cluster_at(float *p, int rank)
{
#if !defined(STEEL_CUDA_SIM) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint64_t r;
    asm("mapa.u64 %0, %1, %2;" : "=l"(r) : "l"(p), "r"(rank));
    return (float *)r;
#else
    (void)rank;
    return p;
#endif
}

/* Loads that bypass L1: data another block of the same kernel may have written. */
DEVICE uint4 load_l2(const uint4 *p)
{
#ifdef STEEL_CUDA_SIM
    return *p;
#else
    return __ldcg(p);
#endif
}

DEVICE float load_float_l2(const float *p)
{
#ifdef STEEL_CUDA_SIM
    return *p;
#else
    return __ldcg(p);
#endif
}

DEVICE uint64_t load_u64_l2(const uint64_t *p)
{
#ifdef STEEL_CUDA_SIM
    return *p;
#else
    return __ldcg((const unsigned long long *)p);
#endif
}

/* Relaxed accesses of 16 bytes, for words that concurrent blocks exchange. Each is seen whole;
 * there is no order between them. */
DEVICE uint4 load_relaxed(const uint4 *p)
{
#if !defined(STEEL_CUDA_SIM) && defined(__CUDA_ARCH__)
    uint4 r;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(p)
                 : "memory");
    return r;
#else
    return *p;
#endif
}
DEVICE void store_relaxed(uint4 *p, const uint4 &v)
{
#if !defined(STEEL_CUDA_SIM) && defined(__CUDA_ARCH__)
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
#else
    *p = v;
#endif
}

/* A counter in global memory on which the blocks of a launch meet: writes before the add are
 * visible to a thread that reads it with load_acquire. */
DEVICE void add_release(uint32_t *p, uint32_t n)
{
#ifdef STEEL_CUDA_SIM
    *p += n;
#else
    asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(n)
                 : "memory");
#endif
}
DEVICE uint32_t load_acquire(const uint32_t *p)
{
#ifdef STEEL_CUDA_SIM
    return *p;
#else
    uint32_t r;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
    return r;
#endif
}

/* Words in pinned memory through which a kernel and a host thread wait for each other: writes before the store are
 * visible to who loads its value. */
DEVICE uint32_t load_from_host(const uint32_t *p)
{
#ifdef STEEL_CUDA_SIM
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
#else
    uint32_t r;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
    return r;
#endif
}
DEVICE void store_for_host(uint32_t *p, uint32_t v)
{
#ifdef STEEL_CUDA_SIM
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
#else
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
#endif
}
/* Before one block of a kernel tells the host about writes of all of them. */
DEVICE void fence_for_host()
{
#ifndef STEEL_CUDA_SIM
    __threadfence_system();
#endif
}
DEVICE void pause_for_host()
{
#ifdef STEEL_CUDA_SIM
    sim_wait_for_host();
#else
    __nanosleep(100);
#endif
}

/* *p += v in the L2. Integers, so the result does not depend on the order. */
DEVICE void atomic_add_relaxed(uint64_t *p, uint64_t v)
{
#if !defined(STEEL_CUDA_SIM) && defined(__CUDA_ARCH__)
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
#else
    *p += v;
#endif
}

/* Prefetches the 128 bytes at p to the L2. */
DEVICE void prefetch_l2(const void *p)
{
#ifdef STEEL_CUDA_SIM
    (void)p;
#else
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

/* Loads eight bytes of shared memory at this point: the compiler cannot hoist it out of a loop. */
DEVICE uint2 load_shared8(const void *p)
{
#ifdef STEEL_CUDA_SIM
    return *(const uint2 *)p;
#else
    uint2 r;
    uint32_t a = (uint32_t)__cvta_generic_to_shared(p);
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(a));
    return r;
#endif
}

/* Reductions over a warp; every lane gets the result. */
DEVICE float warp_sum(float v)
{
#pragma unroll
    for (int i = 16; i; i >>= 1)
        v += __shfl_xor_sync(FULL_WARP, v, i);
    return v;
}
DEVICE float warp_max(float v)
{
#pragma unroll
    for (int i = 16; i; i >>= 1)
        v = fmaxf(v, __shfl_xor_sync(FULL_WARP, v, i));
    return v;
}
/* Largest unsigned value of all lanes. */
DEVICE uint32_t warp_max_u32(uint32_t v)
{
#ifdef STEEL_CUDA_SIM
    for (int i = 16; i; i >>= 1) {
        uint32_t o = __shfl_xor_sync(FULL_WARP, v, i);
        v = o > v ? o : v;
    }
    return v;
#else
    return __reduce_max_sync(FULL_WARP, v);
#endif
}
/* Maps floats to unsigned integers in the same order; -NaN lowest, +NaN highest. */
DEVICE uint32_t float_order(float f)
{
    uint32_t u = bits_of(f);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
DEVICE float float_unorder(uint32_t u)
{
    return float_of(u & 0x80000000u ? u & 0x7fffffffu : ~u);
}

DEVICE float fast_exp(float x)
{
#ifdef STEEL_CUDA_SIM
    return expf(x);
#else
    return __expf(x);
#endif
}
DEVICE float fast_exp2(float x) /* 0 at -infinity */
{
#ifdef STEEL_CUDA_SIM
    return exp2f(x);
#else
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
#endif
}
DEVICE float fast_divide(float a, float b)
{
#ifdef STEEL_CUDA_SIM
    return a / b;
#else
    return __fdividef(a, b);
#endif
}
DEVICE float silu(float x)
{
    /* __fdividef returns 0 when the divisor exceeds 2^126. That is also silu's limit for such x. */
    return fast_divide(x, 1.0f + fast_exp(-x));
}

#endif
