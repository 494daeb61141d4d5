/*
 * The device behind the CUDA backend: opening and closing it, its memory, copies, its first error.
 * Owns the stream and every block that cuda_own hands out. Knows nothing of networks or steps.
 */
#include "backend/cuda/attn/attn_layer.h"
#include "backend/cuda/attn/index.h"
#include "backend/cuda/core/streams.h"
#include "backend/cuda/mixers/mixers.h"
#include "backend/cuda/moe/offload.h"
#include "backend/cuda/vision/tower.h"

extern "C" {
#include "backend/cuda/device.h"
#include "base/mem.h"
const uint16_t *quant_grids(void);
}

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

void cuda_fail(struct cuda_backend *cu, cudaError_t e, const char *what)
{
    if (cu->failed)
        return;
    cu->failed = true;
    error_set(&cu->error, "CUDA: %s (%s) in %.100s", cudaGetErrorString(e), cudaGetErrorName(e),
              what);
    cu->be->failure = &cu->error;
}

void cuda_enter(const struct cuda_backend *cu)
{
    if (cu->device)
        cudaSetDevice(cu->device); /* a thread's first call sets its device */
}

/* Memory */

static double gib(size_t bytes)
{
    return (double)bytes / (double)(1 << 30);
}

/* Of all backends of this process. */
enum { MAX_DEVICES = 64 };
static size_t held_bytes[MAX_DEVICES];

static void hold(const struct cuda_backend *cu, size_t bytes)
{
    if (cu->device < MAX_DEVICES)
        __atomic_add_fetch(&held_bytes[cu->device], bytes, __ATOMIC_RELAXED);
}

size_t cuda_held(const char *device)
{
    int at = cuda_device_number(device);
    return at < MAX_DEVICES ? __atomic_load_n(&held_bytes[at], __ATOMIC_RELAXED) : 0;
}

void *cuda_alloc(struct backend *be, size_t bytes, const char *what, struct error *err)
{
    struct cuda_backend *cu = cuda_self(be);
    void *p = NULL;
    cuda_enter(cu);
    size_t rounded = align_up(bytes ? bytes : 1, 256);
    cudaError_t e = cudaMalloc(&p, rounded);
    if (e != cudaSuccess) {
        size_t free_bytes = 0, total = 0;
        cudaGetLastError();
        cudaMemGetInfo(&free_bytes, &total);
        error_set(err,
                  "out of GPU memory: %.2f GiB for %s, but %.2f of %.2f GiB are free and this "
                  "process holds %.2f",
                  gib(rounded), what, gib(free_bytes), gib(total), gib(cu->memory.bytes));
        return NULL;
    }
    cu->memory.bytes += rounded;
    hold(cu, rounded);
    CUDA_TRY(cu, cudaMemsetAsync(p, 0, rounded, cu->stream));
    if (!cu->failed)
        return p;
    cuda_free(be, p, bytes);
    if (err)
        *err = cu->error;
    return NULL;
}

void cuda_free(struct backend *be, void *p, size_t bytes)
{
    struct cuda_backend *cu = cuda_self(be);
    if (!p)
        return;
    cuda_enter(cu);
    cudaStreamSynchronize(cu->stream);
    cudaFree(p);
    cu->memory.bytes -= align_up(bytes ? bytes : 1, 256);
    hold(cu, -align_up(bytes ? bytes : 1, 256));
}

void cuda_copy_in(struct backend *be, void *dst, const void *host, size_t bytes)
{
    struct cuda_backend *cu = cuda_self(be);
    cuda_enter(cu);
    CUDA_TRY(cu, cudaMemcpyAsync(dst, host, bytes, cudaMemcpyHostToDevice, cu->stream));
    CUDA_TRY(cu, cudaStreamSynchronize(cu->stream));
}

static void copy_in_list(struct backend *be, const struct host_copy *list, int n)
{
    struct cuda_backend *cu = cuda_self(be);
    cuda_enter(cu);
    for (int i = 0; i < n; i++)
        CUDA_TRY(cu, cudaMemcpyAsync(list[i].device, list[i].host, list[i].bytes,
                                     cudaMemcpyHostToDevice, cu->stream));
    CUDA_TRY(cu, cudaStreamSynchronize(cu->stream));
}

/* Pinned ranges of host memory. Devices read them by the host's addresses, so a step need not copy from them. Steps look ranges
 * up without a lock: whoever gives a step memory keeps it until the step has ended. */
enum { MAX_PINNED = 64 };
static struct pinned_range {
    uintptr_t begin, end; /* 0 = free */
    int device;
} pinned[MAX_PINNED];
static pthread_mutex_t pinned_lock = PTHREAD_MUTEX_INITIALIZER;

static void pin_host(struct backend *be, void *host, size_t bytes)
{
    struct cuda_backend *cu = cuda_self(be);
    uintptr_t begin = (uintptr_t)host;
    cuda_enter(cu);
    if (cudaHostRegister(host, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped) !=
        cudaSuccess) {
        cudaGetLastError(); /* copies are slower */
        return;
    }
    void *mapped = NULL;
    if (cudaHostGetDevicePointer(&mapped, host, 0) != cudaSuccess || mapped != host) {
        cudaGetLastError(); /* the device has another address */
        return;
    }
    pthread_mutex_lock(&pinned_lock);
    for (struct pinned_range &r : pinned)
        if (!r.begin) {
            r.device = cu->device;
            __atomic_store_n(&r.end, begin + bytes, __ATOMIC_RELAXED);
            __atomic_store_n(&r.begin, begin, __ATOMIC_RELEASE);
            break;
        }
    pthread_mutex_unlock(&pinned_lock);
}

static void unpin_host(struct backend *be, void *host)
{
    int device = be ? cuda_self(be)->device : -1;
    pthread_mutex_lock(&pinned_lock);
    for (struct pinned_range &r : pinned)
        if (r.begin == (uintptr_t)host) {
            device = r.device;
            __atomic_store_n(&r.begin, 0, __ATOMIC_RELEASE);
        }
    pthread_mutex_unlock(&pinned_lock);
    if (device < 0)
        return;
    if (device)
        cudaSetDevice(device);
    if (cudaHostUnregister(host) != cudaSuccess)
        cudaGetLastError(); /* it was not pinned */
}

bool cuda_is_pinned(const void *p, size_t bytes)
{
    static thread_local int last; /* rows follow each other */
    uintptr_t at = (uintptr_t)p;
    for (int i = 0; i < MAX_PINNED; i++) {
        struct pinned_range *r = &pinned[(last + i) % MAX_PINNED];
        uintptr_t begin = __atomic_load_n(&r->begin, __ATOMIC_ACQUIRE);
        if (begin && at >= begin && at + bytes <= __atomic_load_n(&r->end, __ATOMIC_RELAXED)) {
            last = (last + i) % MAX_PINNED;
            return true;
        }
    }
    return false;
}

const struct host_ops cuda_host_ops = {copy_in_list, pin_host, unpin_host};

void cuda_copy_out(struct backend *be, void *host, const void *src, size_t bytes)
{
    struct cuda_backend *cu = cuda_self(be);
    cuda_enter(cu);
    CUDA_TRY(cu, cudaMemcpyAsync(host, src, bytes, cudaMemcpyDeviceToHost, cu->stream));
    CUDA_TRY(cu, cudaStreamSynchronize(cu->stream));
    if (cu->failed)
        memset(host, 0, bytes);
}

bool cuda_own(struct cuda_backend *cu, const struct device_buffer *list, int n, struct error *err)
{
    for (int i = 0; i < n; i++) {
        *list[i].p = cuda_alloc(cu->be, list[i].bytes, "working memory", err);
        if (!*list[i].p)
            return false;
        size_t count = (size_t)cu->memory.n_owned + 1;
        cu->memory.owned =
            (struct owned_block *)mem_realloc(cu->memory.owned, count, sizeof *cu->memory.owned);
        cu->memory.owned[cu->memory.n_owned++] = {*list[i].p, list[i].bytes};
    }
    return true;
}

bool cuda_pin(void **host, void **mapped, size_t bytes, struct error *err)
{
    if (cudaHostAlloc(host, bytes, cudaHostAllocMapped) != cudaSuccess)
        return error_set(err, "no pinned host memory (%zu bytes)", bytes);
    if (mapped && cudaHostGetDevicePointer(mapped, *host, 0) != cudaSuccess)
        return error_set(err, "pinned host memory cannot be mapped");
    return true;
}

/* Blocks that wait for each other must all be resident, and two such kernels side by side could
 * block each other. So of all backends on a device only the first may launch them. */
static bool grid_barrier_claimed[MAX_DEVICES];

static bool claim_grid_barrier(int device)
{
    return device < MAX_DEVICES &&
           !__atomic_exchange_n(&grid_barrier_claimed[device], true, __ATOMIC_ACQ_REL);
}

static void release_grid_barrier(struct cuda_backend *cu)
{
    if (cu->can.grid_barrier)
        __atomic_store_n(&grid_barrier_claimed[cu->device], false, __ATOMIC_RELEASE);
    cu->can.grid_barrier = false;
}

void cuda_share_device(struct cuda_backend *cu)
{
    release_grid_barrier(cu);
}

void cuda_close(struct backend *be)
{
    struct cuda_backend *cu = cuda_self(be);
    if (cu->failed)
        comm_close(cu); /* kernels in flight may be waiting for other processes in vain */
    offload_close(cu);  /* likewise for the host */
    if (cu->stream)
        cudaStreamSynchronize(cu->stream);
    cuda_ring_free(cu);
    cuda_forget_recordings(cu);
    comm_close(cu); /* NCCL waits for the end of recorded steps that use it */
    for (int i = 0; i < cu->timing.n_created; i++) {
        cudaEventDestroy(cu->timing.events[i].a);
        cudaEventDestroy(cu->timing.events[i].b);
    }
    for (int i = 0; i < cu->memory.n_owned; i++)
        cuda_free(be, cu->memory.owned[i].p, cu->memory.owned[i].bytes);
    mem_free(cu->memory.owned);
    sample_close(cu);
    canary_close(cu);
    delta_net_close(cu);
    ssm_close(cu);
    latent_close(cu);
    index_close(cu);
    compressed_close(cu);
    row_conv_close(cu);
    streams_close(cu);
    encoder_close(cu);
    tower_close(cu);
    lora_close(cu);
    void *host[] = {
        cu->step.hosts[0], cu->step.hosts[1], cu->step.embeds_hosts[0],
        cu->step.embeds_hosts[1] == cu->step.embeds_hosts[0] ? NULL : cu->step.embeds_hosts[1]};
    for (int i = 0; i < 4; i++)
        if (host[i])
            cudaFreeHost(host[i]);
    for (int i = 0; i < 2; i++) {
        if (cu->queue.steps[i].done)
            cudaEventDestroy(cu->queue.steps[i].done);
        mem_free(cu->queue.steps[i].chosen);
    }
    if (cu->stream)
        cudaStreamDestroy(cu->stream);
    release_grid_barrier(cu);
    cuda_log_close(cu);
    mem_free(cu->picks.forced);
    mem_free(be);
}

/* Checks that every name of "a,-b" is a row of the table. */
static bool picks_exist(struct cuda_backend *cu, const char *names, struct error *err)
{
    for (const char *at = names; *at;) {
        at += *at == '-';
        int n = (int)strcspn(at, ",");
        struct pick_info p;
        bool found = !n;
        for (int i = 0; !found && pick_info(cu->be, i, &p); i++)
            found = (int)strlen(p.name) == n && !strncmp(p.name, at, (size_t)n);
        if (!found)
            return error_set(err, "STEEL_PICK: no kernel is called %.*s (steel bench --kernels)", n,
                             at);
        at += n + (at[n] == ',');
    }
    return true;
}

/* When a block ends, its place goes to the waiting kernel of the highest priority. Recorded steps keep it. */
static cudaError_t make_stream(struct cuda_backend *cu, bool background)
{
    int lowest = 0, highest = 0;
    cudaError_t e = cudaDeviceGetStreamPriorityRange(&lowest, &highest);
    return e != cudaSuccess ? e
                            : cudaStreamCreateWithPriority(&cu->stream, cudaStreamNonBlocking,
                                                           background ? lowest : highest);
}

bool cuda_open_device(struct cuda_backend *cu, int device, bool background, struct error *err)
{
    cudaDeviceProp prop;
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess || n == 0) {
        int driver = 0;
        cudaGetLastError();
        cudaDriverGetVersion(&driver);
        return device_none(driver, CUDART_VERSION,
                           e != cudaSuccess ? cudaGetErrorString(e) : "none found", err);
    }
    if (device >= n)
        return error_set(err, "no CUDA device %d: this machine has %d", device, n);
    if ((e = cudaSetDevice(device)) != cudaSuccess ||
        (e = cudaGetDeviceProperties(&prop, device)) != cudaSuccess)
        return error_set(err, "CUDA device %d: %s", device, cudaGetErrorString(e));
    cuda_log_open(cu);
    const char *names = getenv("STEEL_PICK");
    if (names && !picks_exist(cu, names, err))
        return false;
    pick_force(cu->be, names);
    cu->device = device;
    cu->sm = prop.major * 10 + prop.minor;
    cu->n_sm = prop.multiProcessorCount;
    const char *sms = getenv("STEEL_SMS"); /* tests play a smaller GPU */
    if (sms && atoi(sms) > 0 && atoi(sms) < cu->n_sm)
        cu->n_sm = atoi(sms);
    cu->shared_limit = prop.sharedMemPerBlockOptin;
    cu->shared_per_sm = prop.sharedMemPerMultiprocessor;
    if (cu->sm < 80)
        return error_set(err, "CUDA device %d (%s): compute capability %d.%d, 8.0 is needed",
                         device, prop.name, prop.major, prop.minor);
    if ((e = make_stream(cu, background)) != cudaSuccess)
        return error_set(err, "CUDA device %d: %s", device, cudaGetErrorString(e));
#ifdef STEEL_CUDA_TRACE
    cudaMalloc(&cu->launch.trace, sizeof(struct trace));
    cudaMemset(cu->launch.trace, 0, sizeof(struct trace));
#endif
    struct device_buffer grid = {(void **)&cu->grids, QUANT_GRID_POINTS * sizeof(uint16_t)};
    if (!cuda_own(cu, &grid, 1, err))
        return false;
    cu->can.wgmma = gemm_wgmma_available(cu, (int *)cu->grids);
    cu->can.cluster_attention = attn_clusters(cu);
    gemm_cluster_prepare(cu);
    cu->can.grid_barrier = cuda_blocks_concurrent() && claim_grid_barrier(device);
    cuda_copy_in(cu->be, cu->grids, quant_grids(), QUANT_GRID_POINTS * sizeof(uint16_t));
    if (cu->failed && err)
        *err = cu->error;
    return !cu->failed;
}

int cuda_device_number(const char *device)
{
    int n = device && !strncmp(device, "cuda:", 5) ? atoi(device + 5) : 0;
    return n < 0 ? 0 : n;
}

void cuda_device_id(struct backend *be, unsigned char id[16])
{
    struct cuda_backend *cu = cuda_self(be);
    cudaDeviceProp prop;
    memset(&prop, 0, sizeof prop);
    CUDA_TRY(cu, cudaGetDeviceProperties(&prop, cu->device));
    memcpy(id, &prop.uuid, 16);
}

int cuda_count(void)
{
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    cudaGetLastError();
    return e == cudaSuccess ? n : 0;
}

size_t cuda_room(const char *device, double fraction)
{
    int n = 0, at = cuda_device_number(device);
    size_t free_bytes = 0, total = 0;
    cudaDeviceProp prop;
    if (cudaGetDeviceCount(&n) != cudaSuccess || at >= n || cudaSetDevice(at) != cudaSuccess ||
        cudaGetDeviceProperties(&prop, at) != cudaSuccess || prop.major < 8 ||
        cudaMemGetInfo(&free_bytes, &total) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    size_t used = total - free_bytes, allowed = (size_t)((double)total * fraction);
    return allowed > used ? allowed - used : 0;
}
