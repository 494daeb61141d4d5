/*
 * GPU facts for a benchmark's record: name, clocks and driver (from NVML, if the driver has it),
 * and the measured memory read rate. Touches no model.
 */
#include "backend/cuda/core/host.h"

#include <stdio.h>
#include <string.h>

#ifndef STEEL_CUDA_SIM
#include <dlfcn.h>

enum { READ_THREADS = 512 };

static __global__ void __launch_bounds__(READ_THREADS)
    read_kernel(const uint4 *p, size_t n, uint32_t *out)
{
    uint32_t sum = 0;
    size_t step = (size_t)gridDim.x * READ_THREADS;
#pragma unroll 8
    for (size_t i = (size_t)blockIdx.x * READ_THREADS + threadIdx.x; i < n; i += step) {
        uint4 v = load_l2(p + i);
        sum += v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x12345678u) /* keeps the loads */
        *out = sum;
}

/* Bytes per second: the best of several passes over more than any cache holds; 0 if there is no
 * room. */
static double read_rate(struct cuda_backend *cu)
{
    size_t bytes = (size_t)2 << 30;
    void *p = NULL;
    if (cudaMalloc(&p, bytes) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    cudaEvent_t a, b;
    double best = 0;
    cudaEventCreate(&a);
    cudaEventCreate(&b);
    cudaMemsetAsync(p, 1, bytes, cu->stream);
    for (int i = 0; i < 6; i++) {
        float ms = 0;
        cudaEventRecord(a, cu->stream);
        read_kernel<<<(unsigned)cu->n_sm * 4, READ_THREADS, 0, cu->stream>>>(
            (const uint4 *)p, bytes / 16, (uint32_t *)p);
        cudaEventRecord(b, cu->stream);
        cudaEventSynchronize(b);
        if (cudaEventElapsedTime(&ms, a, b) == cudaSuccess && ms > 0 && bytes / ms * 1e3 > best)
            best = (double)bytes / (double)ms * 1e3;
    }
    cudaEventDestroy(a);
    cudaEventDestroy(b);
    cudaFree(p);
    CUDA_TRY(cu, cudaGetLastError());
    return best;
}

/* NVML's own names and numbers, as its ABI fixes them. */
static void ask_nvml(int device, struct gpu_facts *f)
{
    void *lib = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    char bus[32] = "";
    if (!lib || cudaDeviceGetPCIBusId(bus, sizeof bus, device) != cudaSuccess)
        return;
    int (*init)(void) = (int (*)(void))dlsym(lib, "nvmlInit_v2");
    int (*version)(char *, unsigned) =
        (int (*)(char *, unsigned))dlsym(lib, "nvmlSystemGetDriverVersion");
    int (*find)(const char *, void **) =
        (int (*)(const char *, void **))dlsym(lib, "nvmlDeviceGetHandleByPciBusId_v2");
    int (*clock)(void *, int, unsigned *) =
        (int (*)(void *, int, unsigned *))dlsym(lib, "nvmlDeviceGetClockInfo");
    int (*shutdown)(void) = (int (*)(void))dlsym(lib, "nvmlShutdown");
    void *handle = NULL;
    unsigned mhz = 0;
    if (init && version && find && clock && shutdown && init() == 0) {
        if (version(f->driver, sizeof f->driver))
            f->driver[0] = 0;
        if (find(bus, &handle) == 0) {
            if (clock(handle, 1, &mhz) == 0) /* SM clock */
                f->sm_mhz = (int)mhz;
            if (clock(handle, 2, &mhz) == 0) /* memory clock */
                f->memory_mhz = (int)mhz;
        }
        shutdown();
    }
    dlclose(lib);
}

bool cuda_facts(struct backend *be, struct gpu_facts *out)
{
    struct cuda_backend *cu = cuda_self(be);
    struct gpu_facts f = {};
    cudaDeviceProp prop;
    if (cudaGetDeviceProperties(&prop, cu->device) != cudaSuccess)
        return false;
    snprintf(f.name, sizeof f.name, "%s", prop.name);
    f.sm = cu->sm;
    f.n_sm = cu->n_sm;
    f.memory_bytes = prop.totalGlobalMem;
    cudaDeviceGetAttribute(&f.max_sm_mhz, cudaDevAttrClockRate, cu->device);
    f.max_sm_mhz /= 1000;
    f.read_bytes_s = read_rate(cu);
    ask_nvml(cu->device, &f); /* while the GPU is warm */
    *out = f;
    return true;
}
#else
bool cuda_facts(struct backend *be, struct gpu_facts *out)
{
    (void)be;
    memset(out, 0, sizeof *out);
    return false;
}
#endif
