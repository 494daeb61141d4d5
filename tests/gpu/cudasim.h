/*
 * A CUDA simulator for tests: compiles src/backend/cuda with a C++ compiler and runs its kernels on
 * the CPU, every thread a fiber. It models what the kernels rely on: barriers, warp shuffles and
 * votes, tensor-core fragments, ldmatrix, asynchronous copies (which land only when waited for),
 * shared memory that starts poisoned, streams that capture graphs. Threads and blocks run in an
 * order drawn from SIM_SEED, so a missing barrier shows. It models neither time nor weak memory
 * ordering between blocks: blocks run one after another.
 */
#ifndef STEEL_TESTS_CUDASIM_H
#define STEEL_TESTS_CUDASIM_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <atomic>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__    __attribute__((noinline))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __restrict__ __restrict
#define __constant__ static
#define __grid_constant__
#define __shared__         static
#define __align__(n)       __attribute__((aligned(n)))
#define SHARED_BYTES(name) uint8_t *name = sim_shared()

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c)
    {
    }
};
struct float2 {
    float x, y;
};
struct __attribute__((aligned(16))) float4 {
    float x, y, z, w;
};
struct int2 {
    int x, y;
};
struct __attribute__((aligned(8))) uint2 {
    uint32_t x, y;
};
struct __attribute__((aligned(16))) uint4 {
    uint32_t x, y, z, w;
};
struct __attribute__((aligned(16))) int4 {
    int x, y, z, w;
};
static inline float2 make_float2(float x, float y)
{
    return {x, y};
}
static inline float4 make_float4(float x, float y, float z, float w)
{
    return {x, y, z, w};
}
static inline uint2 make_uint2(uint32_t x, uint32_t y)
{
    return {x, y};
}
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return {x, y, z, w};
}

/* The running thread */
struct sim_thread_id {
    dim3 thread, block, block_dim, grid_dim;
};
extern sim_thread_id sim_self;
#define threadIdx sim_self.thread
#define blockIdx  sim_self.block
#define blockDim  sim_self.block_dim
#define gridDim   sim_self.grid_dim

uint8_t *sim_shared();
void __syncthreads();
void sim_warp_barrier(uint32_t mask);
static inline void __syncwarp(uint32_t mask = 0xffffffffu)
{
    sim_warp_barrier(mask);
}
static inline void __threadfence()
{
}
uint64_t sim_exchange(uint32_t mask, uint64_t value, int from_lane); /* value of that lane */
uint32_t sim_ballot(uint32_t mask, bool pred);

template <class T> static inline T sim_shfl(uint32_t mask, T v, int from)
{
    uint64_t bits = 0;
    memcpy(&bits, &v, sizeof v);
    bits = sim_exchange(mask, bits, from);
    memcpy(&v, &bits, sizeof v);
    return v;
}
template <class T> static inline T __shfl_sync(uint32_t mask, T v, int from, int = 32)
{
    return sim_shfl(mask, v, from & 31);
}
template <class T> static inline T __shfl_xor_sync(uint32_t mask, T v, int x)
{
    return sim_shfl(mask, v, (int)((threadIdx.x & 31) ^ (unsigned)x));
}
template <class T> static inline T __shfl_up_sync(uint32_t mask, T v, int d)
{
    int lane = (int)(threadIdx.x & 31);
    return sim_shfl(mask, v, lane >= d ? lane - d : lane);
}
template <class T> static inline T __shfl_down_sync(uint32_t mask, T v, int d)
{
    int lane = (int)(threadIdx.x & 31);
    return sim_shfl(mask, v, lane + d < 32 ? lane + d : lane);
}
static inline uint32_t __ballot_sync(uint32_t mask, bool p)
{
    return sim_ballot(mask, p);
}
static inline bool __any_sync(uint32_t mask, bool p)
{
    return sim_ballot(mask, p) != 0;
}
static inline bool __all_sync(uint32_t mask, bool p)
{
    return sim_ballot(mask, !p) == 0;
}
static inline int __popc(uint32_t v)
{
    return __builtin_popcount(v);
}
static inline int __ffs(uint32_t v)
{
    return __builtin_ffs((int)v);
}
static inline int __clz(int v)
{
    return v ? __builtin_clz((unsigned)v) : 32;
}
template <class T, class U> static inline T atomicAdd(T *p, U v)
{
    T old = *p;
    *p = old + (T)v;
    return old;
}
template <class T, class U> static inline T atomicMax(T *p, U v)
{
    T old = *p;
    *p = old > (T)v ? old : (T)v;
    return old;
}
static inline uint32_t atomicOr(uint32_t *p, uint32_t v)
{
    uint32_t old = *p;
    *p = old | v;
    return old;
}
template <class T> static inline T __ldg(const T *p)
{
    return *p;
}
template <class T> static inline T min(T a, T b)
{
    return a < b ? a : b;
}
template <class T> static inline T max(T a, T b)
{
    return a > b ? a : b;
}
static inline float rsqrtf(float x)
{
    return 1.0f / sqrtf(x);
}
static inline float __fdividef(float a, float b)
{
    return a / b;
}
static inline float exp2f_approx(float x)
{
    return exp2f(x);
}

/* The hardware operations gpu.cuh needs */
float sim_half_to_float(uint16_t h);
uint16_t sim_float_to_half(float f);
uint16_t sim_float_to_bf16(float f);
uint32_t sim_half2_fma(uint32_t a, uint32_t b, uint32_t c);
uint32_t sim_byte_perm(uint32_t a, uint32_t b, uint32_t sel);
void sim_mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool bf16);
void sim_mma_u8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void sim_mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void sim_ldmatrix(uint32_t (&r)[4], const void *row, bool trans);
void sim_copy_async(void *dst, const void *src, int bytes);
void sim_copy_commit();
void sim_copy_wait(int groups_left);
/* D (64 x N, accumulators of this warpgroup) += A (registers) B (shared memory, by descriptor). */
void sim_wgmma(float *d, int n, const uint32_t *a, uint64_t desc_b, bool bf16, bool transposed);
void sim_wg_barrier();
/* mbarriers of wgmma.cuh: 8 bytes of shared memory. bytes: added to the transaction count. */
void sim_bar_init(uint64_t *bar, int count);
void sim_bar_arrive(uint64_t *bar, int bytes);
void sim_bar_copy(uint64_t *bar, void *dst, const void *src, int bytes);
void sim_bar_wait(uint64_t *bar, int parity);
void sim_wait_for_host(); /* lets a thread of the host run */
void sim_pause();         /* lets the other threads of the block run */
void sim_named_barrier_sync(int id, int threads);
void sim_named_barrier_arrive(int id, int threads);

/* The runtime */
typedef int cudaError_t;
enum {
    cudaSuccess = 0,
    cudaErrorMemoryAllocation = 2,
    cudaErrorNotReady = 600,
    cudaErrorUnknown = 999
};
struct sim_stream;
struct sim_graph;
typedef sim_stream *cudaStream_t;
typedef sim_graph *cudaGraph_t;
typedef sim_graph *cudaGraphExec_t;
typedef struct sim_event *cudaEvent_t;
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum { cudaStreamNonBlocking = 1 };
enum { cudaHostAllocMapped = 2, cudaHostAllocDefault = 0 };
enum { cudaEventDisableTiming = 2, cudaEventDefault = 0 };
enum { cudaStreamCaptureModeThreadLocal = 1 };
struct cudaDeviceProp {
    char name[256];
    int major, minor, multiProcessorCount, l2CacheSize;
    size_t totalGlobalMem, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
    struct {
        char bytes[16];
    } uuid;
};
enum { CUDART_VERSION = 13000 };
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaGetDeviceCount(int *n);
cudaError_t cudaSetDevice(int d);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int d);
cudaError_t cudaMemGetInfo(size_t *free, size_t *total);
cudaError_t cudaMalloc(void **p, size_t bytes);
cudaError_t cudaFree(void *p);
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void *p);
enum { cudaHostRegisterDefault = 0, cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2 };
cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned flags);
cudaError_t cudaHostUnregister(void *p);
cudaError_t cudaHostGetDevicePointer(void **d, void *h, unsigned flags);
cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, cudaMemcpyKind k, cudaStream_t st);
cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t st);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority);
cudaError_t cudaDeviceGetStreamPriorityRange(int *lowest, int *highest);
cudaError_t cudaStreamDestroy(cudaStream_t s);
cudaError_t cudaStreamSynchronize(cudaStream_t s);
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags);
cudaError_t cudaStreamBeginCapture(cudaStream_t s, int mode);
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long flags = 0);
cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s);
cudaError_t cudaGraphDestroy(cudaGraph_t g);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags);
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s);
cudaError_t cudaEventSynchronize(cudaEvent_t e);
cudaError_t cudaEventQuery(cudaEvent_t e);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b);
cudaError_t cudaEventDestroy(cudaEvent_t e);
cudaError_t cudaGetLastError();
const char *cudaGetErrorString(cudaError_t e);
const char *cudaGetErrorName(cudaError_t e);

cudaError_t cudaFuncGetName(const char **name, const void *fn);
/* SIM_DRY=1: launches do nothing, except those of a single warp, with which the backend queries
 * the device. With STEEL_LAUNCHES this shows what a step of any size would launch. */
bool sim_dry();
cudaError_t sim_launch(cudaStream_t s, dim3 grid, dim3 block, size_t shared,
                       std::function<void()> body);

/* Calls that fail: the file named by SIM_FAULTS is a struct sim_faults that the test shares. Call
 * number `at` (from 1; 0 = none) of the kind `call` fails, and with `lost` every later call of any
 * kind. Counts only go up; the test sets them to 0. */
enum sim_call {
    SIM_ALLOC,
    SIM_HOST, /* pinned memory */
    SIM_LAUNCH,
    SIM_COPY,
    SIM_SYNC,
    SIM_EVENT,
    SIM_GRAPH,
    SIM_DEVICE,
    SIM_NCCL,
    SIM_ANY,
    SIM_CALLS
};
#define SIM_CALL_NAMES                                                                             \
    {                                                                                              \
        "alloc", "host", "launch", "copy", "sync", "event", "graph", "device", "nccl", "any"       \
    }
struct sim_faults {
    std::atomic<int> call, at, lost, n_failed, count[SIM_CALLS];
};
bool sim_call_fails(enum sim_call call);
/* Events never complete from here on: a kernel waits for a process that has ended. */
void sim_get_stuck();

#endif
