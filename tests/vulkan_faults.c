/*
 * A Vulkan loader in front of the real one, in which calls fail on purpose (tests/test_vulkan_faults.py). Steel finds all
 * functions through vkGetInstanceProcAddr, so the library needs no other symbol.
 *
 * VULKAN_REAL: the real library. VULKAN_FAULTS: a file that is a struct faults, which the test shares: call number `at`
 * (from 1; 0 = none) of the kind `call` fails, and with `lost` every later call of any kind does, as on a lost device.
 * VULKAN_HEAP: bytes of the device's memory.
 */
#define VK_NO_PROTOTYPES
#include <vulkan/vulkan_core.h>

#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum kind {
    CALL_ALLOC,
    CALL_SUBMIT,
    CALL_WAIT,
    CALL_PIPELINE,
    CALL_RECORD,
    CALL_OBJECT,
    CALL_ANY,
    CALLS
};
struct faults {
    atomic_int call, at, lost, n_failed, count[CALLS];
};

static struct faults *shared_faults(void)
{
    static struct faults *f;
    const char *path = getenv("VULKAN_FAULTS");
    int fd = f || !path ? -1 : open(path, O_RDWR);
    if (fd < 0)
        return f;
    void *p = mmap(NULL, sizeof *f, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return f = p == MAP_FAILED ? NULL : p;
}

static atomic_bool device_lost;

static VkResult called(enum kind kind, VkResult error)
{
    struct faults *f = shared_faults();
    if (!f)
        return VK_SUCCESS;
    int n = atomic_fetch_add(&f->count[kind], 1) + 1,
        all = atomic_fetch_add(&f->count[CALL_ANY], 1) + 1;
    bool now = f->at && (f->call == CALL_ANY ? all == f->at : f->call == (int)kind && n == f->at);
    if (now)
        atomic_fetch_add(&f->n_failed, 1);
    if (now && f->lost)
        device_lost = true;
    return device_lost ? VK_ERROR_DEVICE_LOST : now ? error : VK_SUCCESS;
}

/* Functions that may fail: name, kind, error, parameters, arguments. */
#define WRAPPED(X)                                                                                 \
    X(AllocateMemory, ALLOC, OUT_OF_DEVICE_MEMORY,                                                 \
      (VkDevice d, const VkMemoryAllocateInfo *i, const VkAllocationCallbacks *c,                  \
       VkDeviceMemory *m),                                                                         \
      (d, i, c, m))                                                                                \
    X(CreateBuffer, OBJECT, OUT_OF_HOST_MEMORY,                                                    \
      (VkDevice d, const VkBufferCreateInfo *i, const VkAllocationCallbacks *c, VkBuffer *b),      \
      (d, i, c, b))                                                                                \
    X(QueueSubmit, SUBMIT, DEVICE_LOST, (VkQueue q, uint32_t n, const VkSubmitInfo *i, VkFence f), \
      (q, n, i, f))                                                                                \
    X(WaitForFences, WAIT, DEVICE_LOST,                                                            \
      (VkDevice d, uint32_t n, const VkFence *f, VkBool32 all, uint64_t ns), (d, n, f, all, ns))   \
    X(CreateComputePipelines, PIPELINE, OUT_OF_DEVICE_MEMORY,                                      \
      (VkDevice d, VkPipelineCache p, uint32_t n, const VkComputePipelineCreateInfo *i,            \
       const VkAllocationCallbacks *c, VkPipeline *to),                                            \
      (d, p, n, i, c, to))                                                                         \
    X(BeginCommandBuffer, RECORD, OUT_OF_HOST_MEMORY,                                              \
      (VkCommandBuffer b, const VkCommandBufferBeginInfo *i), (b, i))                              \
    X(EndCommandBuffer, RECORD, OUT_OF_DEVICE_MEMORY, (VkCommandBuffer b), (b))                    \
    X(AllocateCommandBuffers, OBJECT, OUT_OF_HOST_MEMORY,                                          \
      (VkDevice d, const VkCommandBufferAllocateInfo *i, VkCommandBuffer *b), (d, i, b))           \
    X(CreateFence, OBJECT, OUT_OF_HOST_MEMORY,                                                     \
      (VkDevice d, const VkFenceCreateInfo *i, const VkAllocationCallbacks *c, VkFence *f),        \
      (d, i, c, f))                                                                                \
    X(CreateCommandPool, OBJECT, OUT_OF_HOST_MEMORY,                                               \
      (VkDevice d, const VkCommandPoolCreateInfo *i, const VkAllocationCallbacks *c,               \
       VkCommandPool *p),                                                                          \
      (d, i, c, p))                                                                                \
    X(CreateDevice, OBJECT, INITIALIZATION_FAILED,                                                 \
      (VkPhysicalDevice p, const VkDeviceCreateInfo *i, const VkAllocationCallbacks *c,            \
       VkDevice *d),                                                                               \
      (p, i, c, d))

#define X(name, kind, error, parameters, arguments)                                                \
    static PFN_vk##name real_##name;                                                               \
    static VKAPI_ATTR VkResult VKAPI_CALL wrapped_##name parameters                                \
    {                                                                                              \
        VkResult r = called(CALL_##kind, VK_ERROR_##error);                                        \
        return r == VK_SUCCESS ? real_##name arguments : r;                                        \
    }
WRAPPED(X)
#undef X

static PFN_vkGetPhysicalDeviceMemoryProperties2 real_memory;

static VKAPI_ATTR void VKAPI_CALL wrapped_memory(VkPhysicalDevice d,
                                                 VkPhysicalDeviceMemoryProperties2 *p)
{
    const char *bytes = getenv("VULKAN_HEAP");
    real_memory(d, p);
    for (uint32_t i = 0; bytes && i < p->memoryProperties.memoryHeapCount; i++)
        p->memoryProperties.memoryHeaps[i].size = strtoull(bytes, NULL, 10);
    VkPhysicalDeviceMemoryBudgetPropertiesEXT *b = p->pNext;
    if (bytes && b && b->sType == VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT) {
        memset(b->heapBudget, 0, sizeof b->heapBudget);
        memset(b->heapUsage, 0, sizeof b->heapUsage);
    }
}

__attribute__((visibility("default"))) PFN_vkVoidFunction vkGetInstanceProcAddr(VkInstance instance,
                                                                                const char *name)
{
    static PFN_vkGetInstanceProcAddr get;
    if (!get) {
        const char *path = getenv("VULKAN_REAL");
        void *lib = dlopen(path ? path : "", RTLD_NOW | RTLD_LOCAL);
        void *symbol = lib ? dlsym(lib, "vkGetInstanceProcAddr") : NULL;
        memcpy(&get, &symbol, sizeof get);
    }
    PFN_vkVoidFunction real = get ? get(instance, name) : NULL;
    if (!real)
        return NULL;
#define X(call, kind, error, parameters, arguments)                                                \
    if (!strcmp(name, "vk" #call)) {                                                               \
        real_##call = (PFN_vk##call)real;                                                          \
        return (PFN_vkVoidFunction)wrapped_##call;                                                 \
    }
    WRAPPED(X)
#undef X
    if (!strcmp(name, "vkGetPhysicalDeviceMemoryProperties2")) {
        real_memory = (PFN_vkGetPhysicalDeviceMemoryProperties2)real;
        return (PFN_vkVoidFunction)wrapped_memory;
    }
    return real;
}
