/*
 * Memory of the Vulkan backend: one allocator for weights, cache and scratch, and copies. A pointer is a device address.
 * Small allocations share blocks; a large one has a block of its own.
 */
#include "backend/vulkan/vulkan.h"
#include "base/mem.h"

#include <string.h>

enum { SMALL = 1 << 20, BLOCK = 32 << 20, STAGING = 16 << 20, ALIGN = 256 };

static double gib(size_t bytes)
{
    return (double)bytes / (double)(1 << 30);
}

/* The first memory type of those allowed that has all of `want` and none of `avoid`; -1 = none. */
static int memory_type(const struct vulkan *v, uint32_t allowed, VkMemoryPropertyFlags want,
                       VkMemoryPropertyFlags avoid)
{
    for (uint32_t i = 0; i < v->memory_types.memoryTypeCount; i++) {
        VkMemoryPropertyFlags has = v->memory_types.memoryTypes[i].propertyFlags;
        if ((allowed >> i & 1) && (has & want) == want && !(has & avoid))
            return (int)i;
    }
    return -1;
}

/* A buffer with memory of the first of `types` (flags, ending with 0) that can be had, mapped if the host sees it. */
static VkResult buffer_new(struct vulkan *v, size_t bytes, const VkMemoryPropertyFlags *types,
                           struct vulkan_shared *out)
{
    const VkBufferCreateInfo info = {
        .sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO,
        .size = bytes,
        .usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | VK_BUFFER_USAGE_TRANSFER_SRC_BIT |
                 VK_BUFFER_USAGE_TRANSFER_DST_BIT | VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT};
    VkMemoryRequirements need;
    memset(out, 0, sizeof *out);
    VkResult r = vk.CreateBuffer(v->device, &info, NULL, &out->buffer);
    if (r != VK_SUCCESS)
        return r;
    vk.GetBufferMemoryRequirements(v->device, out->buffer, &need);
    r = VK_ERROR_OUT_OF_DEVICE_MEMORY;
    VkMemoryPropertyFlags has = 0;
    for (; *types && r != VK_SUCCESS; types++) {
        int t = memory_type(v, need.memoryTypeBits, *types, 0);
        if (t < 0)
            continue;
        const VkMemoryAllocateFlagsInfo flags = {.sType =
                                                     VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_FLAGS_INFO,
                                                 .flags = VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT};
        const VkMemoryAllocateInfo memory = {.sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO,
                                             .pNext = &flags,
                                             .allocationSize = need.size,
                                             .memoryTypeIndex = (uint32_t)t};
        r = vk.AllocateMemory(v->device, &memory, NULL, &out->memory);
        has = v->memory_types.memoryTypes[t].propertyFlags;
    }
    if (r == VK_SUCCESS)
        r = vk.BindBufferMemory(v->device, out->buffer, out->memory, 0);
    const VkMemoryPropertyFlags mapped =
        VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
    if (r == VK_SUCCESS && (has & mapped) == mapped)
        r = vk.MapMemory(v->device, out->memory, 0, VK_WHOLE_SIZE, 0, &out->host);
    if (r != VK_SUCCESS) {
        vulkan_unshare(v, out);
        return r;
    }
    const VkBufferDeviceAddressInfo address = {
        .sType = VK_STRUCTURE_TYPE_BUFFER_DEVICE_ADDRESS_INFO, .buffer = out->buffer};
    out->at = vk.GetBufferDeviceAddress(v->device, &address);
    out->size = bytes;
    return VK_SUCCESS;
}

bool vulkan_share(struct vulkan *v, struct vulkan_shared *s, size_t bytes, bool fast,
                  struct error *err)
{
    const VkMemoryPropertyFlags host =
        VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
    const VkMemoryPropertyFlags types[] = {
        host | (fast ? VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT : VK_MEMORY_PROPERTY_HOST_CACHED_BIT),
        host, 0};
    VkResult r = buffer_new(v, bytes ? bytes : 4, types, s);
    if (r != VK_SUCCESS)
        return error_set(err, "Vulkan: no host memory for the device (%zu bytes): %s", bytes,
                         vulkan_error(r));
    memset(s->host, 0, s->size);
    return true;
}

void vulkan_unshare(struct vulkan *v, struct vulkan_shared *s)
{
    if (s->buffer)
        vk.DestroyBuffer(v->device, s->buffer, NULL);
    if (s->memory)
        vk.FreeMemory(v->device, s->memory, NULL);
    memset(s, 0, sizeof *s);
}

size_t vulkan_heap(VkPhysicalDevice d, size_t *used)
{
    VkPhysicalDeviceMemoryBudgetPropertiesEXT budget = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT};
    VkPhysicalDeviceMemoryProperties2 p = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_PROPERTIES_2, .pNext = &budget};
    vk.GetPhysicalDeviceMemoryProperties2(d, &p);
    size_t most = 0;
    *used = 0;
    for (uint32_t i = 0; i < p.memoryProperties.memoryHeapCount; i++) {
        const VkMemoryHeap *h = &p.memoryProperties.memoryHeaps[i];
        if (!(h->flags & VK_MEMORY_HEAP_DEVICE_LOCAL_BIT) || h->size <= most)
            continue;
        most = h->size;
        /* The budget is what this process may use; without the extension it is 0. */
        *used = budget.heapBudget[i] && budget.heapBudget[i] < h->size
                    ? h->size - budget.heapBudget[i] + budget.heapUsage[i]
                    : budget.heapUsage[i];
    }
    return most;
}

/* Commands between these two run at once, after everything submitted before. */
static VkCommandBuffer now_begin(struct vulkan *v)
{
    const VkCommandBufferBeginInfo info = {.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO,
                                           .flags = VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT};
    const VkMemoryBarrier barrier = {
        .sType = VK_STRUCTURE_TYPE_MEMORY_BARRIER,
        .srcAccessMask = VK_ACCESS_SHADER_WRITE_BIT | VK_ACCESS_TRANSFER_WRITE_BIT,
        .dstAccessMask = VK_ACCESS_TRANSFER_READ_BIT | VK_ACCESS_TRANSFER_WRITE_BIT};
    if (v->failed || !vulkan_try(v, vk.BeginCommandBuffer(v->copy_cmd, &info), "a copy"))
        return NULL;
    vk.CmdPipelineBarrier(v->copy_cmd,
                          VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT | VK_PIPELINE_STAGE_TRANSFER_BIT,
                          VK_PIPELINE_STAGE_TRANSFER_BIT, 0, 1, &barrier, 0, NULL, 0, NULL);
    return v->copy_cmd;
}

static void now_end(struct vulkan *v)
{
    const VkMemoryBarrier barrier = {.sType = VK_STRUCTURE_TYPE_MEMORY_BARRIER,
                                     .srcAccessMask = VK_ACCESS_TRANSFER_WRITE_BIT,
                                     .dstAccessMask = VK_ACCESS_SHADER_READ_BIT |
                                                      VK_ACCESS_SHADER_WRITE_BIT |
                                                      VK_ACCESS_HOST_READ_BIT};
    const VkSubmitInfo submit = {.sType = VK_STRUCTURE_TYPE_SUBMIT_INFO,
                                 .commandBufferCount = 1,
                                 .pCommandBuffers = &v->copy_cmd};
    vk.CmdPipelineBarrier(v->copy_cmd, VK_PIPELINE_STAGE_TRANSFER_BIT,
                          VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT | VK_PIPELINE_STAGE_HOST_BIT, 0, 1,
                          &barrier, 0, NULL, 0, NULL);
    bool ok =
        vulkan_try(v, vk.EndCommandBuffer(v->copy_cmd), "a copy") &&
        vulkan_try(v, vk.QueueSubmit(v->queue, 1, &submit, v->copy_fence), "a copy") &&
        vulkan_try(v, vk.WaitForFences(v->device, 1, &v->copy_fence, true, UINT64_MAX), "a copy");
    if (ok)
        vk.ResetFences(v->device, 1, &v->copy_fence);
}

static void fill_zero(struct vulkan *v, const struct vulkan_block *b, size_t at, size_t bytes)
{
    VkCommandBuffer c = now_begin(v);
    if (!c)
        return;
    vk.CmdFillBuffer(c, b->buffer, at, bytes, 0);
    now_end(v);
}

/* A block with room for `bytes`, or a new one. NULL: no memory. */
static struct vulkan_block *block_for(struct vulkan *v, size_t bytes)
{
    struct vulkan_block *unused = NULL;
    for (int i = 0; i < v->n_blocks; i++) {
        struct vulkan_block *b = &v->blocks[i];
        if (!b->buffer)
            unused = b;
        else if (b->size == BLOCK && bytes <= SMALL && b->used + bytes <= b->size)
            return b;
    }
    /* On a device without memory of its own the host sees all of it, and copies need no staging. */
    const VkMemoryPropertyFlags types[] = {
        VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT,
        VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT, 0};
    struct vulkan_shared s;
    if (bytes > v->max_allocation ||
        buffer_new(v, bytes <= SMALL ? BLOCK : bytes, types, &s) != VK_SUCCESS)
        return NULL;
    if (!unused) {
        v->blocks = mem_realloc(v->blocks, (size_t)v->n_blocks + 1, sizeof *v->blocks);
        unused = &v->blocks[v->n_blocks++];
    }
    *unused = (struct vulkan_block){s.memory, s.buffer, s.at, s.size, 0, s.host, 0};
    v->allocated += s.size;
    return unused;
}

static struct vulkan_block *block_of(struct vulkan *v, uint64_t at)
{
    for (int i = 0; i < v->n_blocks; i++)
        if (v->blocks[i].buffer && at >= v->blocks[i].at &&
            at < v->blocks[i].at + v->blocks[i].size)
            return &v->blocks[i];
    CHECK(false, "an address outside the device's memory");
}

static void block_free(struct vulkan *v, struct vulkan_block *b)
{
    vk.DestroyBuffer(v->device, b->buffer, NULL);
    vk.FreeMemory(v->device, b->memory, NULL);
    v->allocated -= b->size;
    memset(b, 0, sizeof *b);
}

void *vulkan_alloc(struct backend *be, size_t bytes, const char *what, struct error *err)
{
    struct vulkan *v = vulkan_self(be);
    size_t rounded = ((bytes ? bytes : 1) + ALIGN - 1) / ALIGN * ALIGN;
    uint64_t at = 0;
    pthread_mutex_lock(&v->lock);
    struct vulkan_block *b = block_for(v, rounded);
    if (b) {
        at = b->at + b->used;
        fill_zero(v, b, b->used, rounded);
        b->used += rounded;
        b->n_live++;
    }
    pthread_mutex_unlock(&v->lock);
    if (v->failed) {
        if (err)
            *err = v->error;
        return NULL;
    }
    if (!at) {
        size_t used, all = vulkan_heap(v->physical, &used);
        error_set(err,
                  "out of GPU memory: %.2f GiB for %s, but %.2f of %.2f GiB are free and this "
                  "process holds %.2f; one allocation has at most %.2f",
                  gib(rounded), what, gib(all > used ? all - used : 0), gib(all), gib(v->allocated),
                  gib(v->max_allocation));
    }
    return (void *)(uintptr_t)at;
}

void vulkan_free(struct backend *be, void *p, size_t bytes)
{
    struct vulkan *v = vulkan_self(be);
    (void)bytes;
    if (!p)
        return;
    pthread_mutex_lock(&v->lock);
    vk.DeviceWaitIdle(v->device);
    struct vulkan_block *b = block_of(v, vulkan_address(p));
    if (--b->n_live == 0) {
        b->used = 0;
        if (b->size != BLOCK)
            block_free(v, b);
    }
    pthread_mutex_unlock(&v->lock);
}

/* Copies between a block and the host in pieces of the staging buffer. */
static void copy_staged(struct vulkan *v, const struct vulkan_block *b, size_t at, void *out,
                        const void *in, size_t bytes)
{
    for (size_t done = 0; done < bytes && !v->failed;) {
        size_t n = bytes - done < STAGING ? bytes - done : STAGING;
        if (in)
            memcpy(v->staging.host, (const char *)in + done, n);
        VkCommandBuffer c = now_begin(v);
        if (!c)
            return;
        const VkBufferCopy region = {in ? 0 : at + done, in ? at + done : 0, n};
        vk.CmdCopyBuffer(c, in ? v->staging.buffer : b->buffer, in ? b->buffer : v->staging.buffer,
                         1, &region);
        now_end(v);
        if (out)
            memcpy((char *)out + done, v->staging.host, n);
        done += n;
    }
}

void vulkan_copy_in(struct backend *be, void *dst, const void *host, size_t bytes)
{
    struct vulkan *v = vulkan_self(be);
    if (!bytes)
        return;
    pthread_mutex_lock(&v->lock);
    const struct vulkan_block *b = block_of(v, vulkan_address(dst));
    size_t at = vulkan_address(dst) - b->at;
    if (b->host) {
        vk.DeviceWaitIdle(v->device);
        memcpy(b->host + at, host, bytes);
    } else {
        copy_staged(v, b, at, NULL, host, bytes);
    }
    pthread_mutex_unlock(&v->lock);
}

void vulkan_copy_out(struct backend *be, void *host, const void *src, size_t bytes)
{
    struct vulkan *v = vulkan_self(be);
    if (!bytes)
        return;
    pthread_mutex_lock(&v->lock);
    const struct vulkan_block *b = block_of(v, vulkan_address(src));
    size_t at = vulkan_address(src) - b->at;
    if (b->host) {
        vk.DeviceWaitIdle(v->device);
        memcpy(host, b->host + at, bytes);
    } else {
        copy_staged(v, b, at, host, NULL, bytes);
    }
    if (v->failed)
        memset(host, 0, bytes);
    pthread_mutex_unlock(&v->lock);
}

void vulkan_copy_to(struct vulkan *v, VkCommandBuffer cmd, uint64_t from,
                    const struct vulkan_shared *to, size_t bytes)
{
    const struct vulkan_block *b = block_of(v, from);
    const VkMemoryBarrier barrier = {.sType = VK_STRUCTURE_TYPE_MEMORY_BARRIER,
                                     .srcAccessMask = VK_ACCESS_SHADER_WRITE_BIT,
                                     .dstAccessMask = VK_ACCESS_TRANSFER_READ_BIT};
    const VkBufferCopy region = {from - b->at, 0, bytes};
    vk.CmdPipelineBarrier(cmd, VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, VK_PIPELINE_STAGE_TRANSFER_BIT,
                          0, 1, &barrier, 0, NULL, 0, NULL);
    vk.CmdCopyBuffer(cmd, b->buffer, to->buffer, 1, &region);
}

void vulkan_copy_from(struct vulkan *v, VkCommandBuffer cmd, const struct vulkan_shared *from,
                      uint64_t to, size_t bytes)
{
    const struct vulkan_block *b = block_of(v, to);
    const VkBufferCopy region = {0, to - b->at, bytes};
    vk.CmdCopyBuffer(cmd, from->buffer, b->buffer, 1, &region);
}

bool vulkan_memory_open(struct vulkan *v, struct error *err)
{
    const VkFenceCreateInfo fence = {.sType = VK_STRUCTURE_TYPE_FENCE_CREATE_INFO};
    const VkCommandPoolCreateInfo pool = {.sType = VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO,
                                          .flags = VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT,
                                          .queueFamilyIndex = v->family};
    bool ok = vulkan_try(v, vk.CreateFence(v->device, &fence, NULL, &v->copy_fence), "a fence") &&
              vulkan_try(v, vk.CreateFence(v->device, &fence, NULL, &v->fence), "a fence") &&
              vulkan_try(v, vk.CreateCommandPool(v->device, &pool, NULL, &v->pool), "a pool");
    VkCommandBuffer all[7] = {0};
    const VkCommandBufferAllocateInfo info = {.sType =
                                                  VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO,
                                              .commandPool = v->pool,
                                              .level = VK_COMMAND_BUFFER_LEVEL_PRIMARY,
                                              .commandBufferCount = 7};
    ok = ok && vulkan_try(v, vk.AllocateCommandBuffers(v->device, &info, all), "command buffers");
    v->copy_cmd = all[0];
    for (int i = 0; i < 2; i++) {
        struct vulkan_flight *f = &v->flights[i];
        f->load_cmd = all[1 + i];
        f->step_cmd = all[3 + i];
        f->tail_cmd = all[5 + i];
        ok = ok && vulkan_try(v, vk.CreateFence(v->device, &fence, NULL, &f->fence), "a fence");
    }
    if (!ok && err)
        *err = v->error;
    return ok && vulkan_share(v, &v->staging, STAGING, false, err);
}

void vulkan_memory_close(struct vulkan *v)
{
    vulkan_unshare(v, &v->staging);
    for (int i = 0; i < v->n_blocks; i++)
        if (v->blocks[i].buffer)
            block_free(v, &v->blocks[i]);
    mem_free(v->blocks);
    if (v->pool)
        vk.DestroyCommandPool(v->device, v->pool, NULL);
    if (v->copy_fence)
        vk.DestroyFence(v->device, v->copy_fence, NULL);
    if (v->fence)
        vk.DestroyFence(v->device, v->fence, NULL);
    for (int i = 0; i < 2; i++)
        if (v->flights[i].fence)
            vk.DestroyFence(v->device, v->flights[i].fence, NULL);
}
