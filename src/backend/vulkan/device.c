/*
 * Opening a Vulkan device, and what the array of devices asks of it. A device must have pointers to memory (buffer device
 * addresses) and 64-bit integers; everything else is a limit that is read.
 */
#include "backend/vulkan/device.h"
#include "backend/vulkan/vulkan.h"
#include "base/mem.h"
#include "quant/quant.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool vulkan_try(struct vulkan *v, VkResult r, const char *what)
{
    if (r >= VK_SUCCESS)
        return true;
    if (!v->failed) {
        v->failed = true;
        error_set(&v->error, "Vulkan: %s (%d) in %s", vulkan_error(r), (int)r, what);
        v->be.failure = &v->error;
    }
    return false;
}

static void vulkan_forget(struct backend *be, void *p, size_t bytes)
{
    (void)be, (void)p, (void)bytes; /* device memory stays */
}

static void vulkan_close(struct backend *be)
{
    struct vulkan *v = vulkan_self(be);
    if (v->device) {
        vk.DeviceWaitIdle(v->device);
        vulkan_unprepare(v);
        vulkan_timing_close(v);
        vulkan_pipelines_close(v);
        vulkan_memory_close(v);
        vk.DestroyDevice(v->device, NULL);
    }
    pthread_mutex_destroy(&v->lock);
    mem_free(v->forced);
    mem_free(v);
}

static const struct backend_ops vulkan_ops = {
    .name = "vulkan",
    .close = vulkan_close,
    .alloc = vulkan_alloc,
    .free = vulkan_free,
    .forget = vulkan_forget,
    .copy_in = vulkan_copy_in,
    .copy_out = vulkan_copy_out,
    .supports = vulkan_supports,
    .upload = vulkan_upload,
    .release = vulkan_release,
    .prepare = vulkan_prepare,
    .begin = vulkan_begin,
    .replay = vulkan_replay,
    .launch = vulkan_launch,
    .end = vulkan_end,
    .embed = vulkan_embed,
    .mixer = vulkan_mixer,
    .mlp = vulkan_mlp,
    .head = vulkan_head,
    .sample = vulkan_sample,
    .probs = vulkan_probs,
    .logits = vulkan_logits,
    .adapters = &vulkan_adapters,
    .draft = &vulkan_draft,
    .tower = &vulkan_tower,
    .stream = &vulkan_stream,
    .picks = &vulkan_picks,
};

/* A queue family with compute; one without graphics is less busy. -1 = none. */
static int compute_family(VkPhysicalDevice d)
{
    VkQueueFamilyProperties f[16];
    uint32_t n = 16;
    int found = -1;
    vk.GetPhysicalDeviceQueueFamilyProperties(d, &n, f);
    for (uint32_t i = 0; i < n; i++)
        if ((f[i].queueFlags & VK_QUEUE_COMPUTE_BIT) &&
            (found < 0 || !(f[i].queueFlags & VK_QUEUE_GRAPHICS_BIT)))
            found = (int)i;
    return found;
}

struct device_features {
    VkPhysicalDeviceFeatures2 all;
    VkPhysicalDeviceVulkan12Features v12;
    VkPhysicalDeviceSubgroupSizeControlFeatures control;
    VkPhysicalDeviceCooperativeMatrixFeaturesKHR coop;
    VkPhysicalDeviceShaderIntegerDotProductFeatures dot;
};

/* Extensions that are used where a device has them. */
struct extras {
    bool control, coop, dot;
};

/* has: the extensions whose features are in the chain. */
static void features_chain(struct device_features *f, const struct extras *has)
{
    memset(f, 0, sizeof *f);
    f->all.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2;
    f->v12.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES;
    f->control.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_FEATURES;
    f->coop.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_COOPERATIVE_MATRIX_FEATURES_KHR;
    f->dot.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_INTEGER_DOT_PRODUCT_FEATURES;
    f->all.pNext = &f->v12;
    if (has->control) {
        f->control.pNext = f->v12.pNext;
        f->v12.pNext = &f->control;
    }
    if (has->coop) {
        f->coop.pNext = f->v12.pNext;
        f->v12.pNext = &f->coop;
    }
    if (has->dot) {
        f->dot.pNext = f->v12.pNext;
        f->v12.pNext = &f->dot;
    }
}

static bool has_extension(VkPhysicalDevice d, const char *name)
{
    uint32_t n = 0;
    vk.EnumerateDeviceExtensionProperties(d, NULL, &n, NULL);
    VkExtensionProperties *all = mem_zalloc(n + 1, sizeof *all);
    bool found = false;
    if (vk.EnumerateDeviceExtensionProperties(d, NULL, &n, all) >= VK_SUCCESS)
        for (uint32_t i = 0; i < n; i++)
            found |= !strcmp(all[i].extensionName, name);
    mem_free(all);
    return found;
}

/* What the kernels cannot do without. */
static bool is_able(VkPhysicalDevice d, const char *name, struct error *err)
{
    struct device_features f;
    VkPhysicalDeviceVulkan11Properties v11 = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_PROPERTIES};
    VkPhysicalDeviceProperties2 p = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2,
                                     .pNext = &v11};
    const VkSubgroupFeatureFlags ops =
        VK_SUBGROUP_FEATURE_BASIC_BIT | VK_SUBGROUP_FEATURE_ARITHMETIC_BIT;
    features_chain(&f, &(struct extras){0});
    vk.GetPhysicalDeviceProperties2(d, &p);
    if (p.properties.apiVersion < VK_API_VERSION_1_2)
        return error_set(err, "%s: its driver has Vulkan %u.%u, 1.2 is needed", name,
                         VK_API_VERSION_MAJOR(p.properties.apiVersion),
                         VK_API_VERSION_MINOR(p.properties.apiVersion));
    vk.GetPhysicalDeviceFeatures2(d, &f.all);
    const char *lacks = !f.v12.bufferDeviceAddress                       ? "bufferDeviceAddress"
                        : !f.all.features.shaderInt64                    ? "shaderInt64"
                        : (v11.subgroupSupportedOperations & ops) != ops ? "subgroup arithmetic"
                        : !(v11.subgroupSupportedStages & VK_SHADER_STAGE_COMPUTE_BIT)
                            ? "subgroups in compute shaders"
                        : v11.subgroupSize < 4  ? "subgroups of 4 or more"
                        : compute_family(d) < 0 ? "a queue for compute"
                                                : NULL;
    return !lacks || error_set(err, "%s lacks %s", name, lacks);
}

static bool has_timestamps(const struct vulkan *v)
{
    VkQueueFamilyProperties f[16];
    uint32_t n = 16;
    vk.GetPhysicalDeviceQueueFamilyProperties(v->physical, &n, f);
    return v->family < n && f[v->family].timestampValidBits == 64;
}

/* Whether gemm_coop's products run: matrices of 16 x 16 x 16 by subgroups of 32, and what its shader declares. */
static bool has_coop(const struct vulkan *v, const struct device_features *f, uint32_t shared)
{
    enum { FP16 = 0, FLOAT = 1, SUBGROUP = 3, THREADS = 256 };
    VkCooperativeMatrixPropertiesKHR list[64];
    uint32_t n = 64;
    if (!f->coop.cooperativeMatrix || !f->v12.shaderFloat16 || !f->v12.vulkanMemoryModel ||
        !v->full_subgroups || v->subgroup != 32 || shared < 32768 || v->wide < THREADS ||
        !vk.GetPhysicalDeviceCooperativeMatrixPropertiesKHR)
        return false;
    for (uint32_t i = 0; i < n; i++)
        list[i] = (VkCooperativeMatrixPropertiesKHR){
            .sType = VK_STRUCTURE_TYPE_COOPERATIVE_MATRIX_PROPERTIES_KHR};
    if (vk.GetPhysicalDeviceCooperativeMatrixPropertiesKHR(v->physical, &n, list) < VK_SUCCESS)
        return false;
    for (uint32_t i = 0; i < n; i++) {
        const VkCooperativeMatrixPropertiesKHR *p = &list[i];
        if (p->MSize == 16 && p->NSize == 16 && p->KSize == 16 && p->scope == SUBGROUP &&
            p->AType == FP16 && p->BType == FP16 && p->CType == FLOAT && p->ResultType == FLOAT)
            return true;
    }
    return false;
}

static bool make_device(struct vulkan *v, struct error *err)
{
    const float priority = 1;
    VkPhysicalDeviceVulkan11Properties v11 = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_PROPERTIES};
    VkPhysicalDeviceProperties2 p = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2,
                                     .pNext = &v11};
    VkPhysicalDeviceMemoryProperties2 memory = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_PROPERTIES_2};
    struct device_features f;
    const char *control = VK_EXT_SUBGROUP_SIZE_CONTROL_EXTENSION_NAME;
    const char *coop = VK_KHR_COOPERATIVE_MATRIX_EXTENSION_NAME, *extensions[3];
    const char *dot = VK_KHR_SHADER_INTEGER_DOT_PRODUCT_EXTENSION_NAME;
    struct extras has = {has_extension(v->physical, control), has_extension(v->physical, coop),
                         has_extension(v->physical, dot)};
    uint32_t n_extensions = 0;
    vk.GetPhysicalDeviceProperties2(v->physical, &p);
    vk.GetPhysicalDeviceMemoryProperties2(v->physical, &memory);
    v->subgroup = v11.subgroupSize;
    v->shared = p.properties.limits.maxComputeSharedMemorySize;
    v->wide = p.properties.limits.maxComputeWorkGroupInvocations >= 256 &&
                      p.properties.limits.maxComputeWorkGroupSize[0] >= 256
                  ? 256
                  : 128;
    v->shuffle = v11.subgroupSupportedOperations & VK_SUBGROUP_FEATURE_SHUFFLE_BIT;
    features_chain(&f, &has);
    vk.GetPhysicalDeviceFeatures2(v->physical, &f.all);
    v->full_subgroups = has.control && f.control.computeFullSubgroups;
    v->dot = has.dot = has.dot && f.dot.shaderIntegerDotProduct;
    v->coop = has_coop(v, &f, p.properties.limits.maxComputeSharedMemorySize);
    has.coop = v->coop;
    features_chain(&f, &has);
    f.all.features.shaderInt64 = true;
    f.v12.bufferDeviceAddress = true;
    f.v12.shaderFloat16 = f.v12.vulkanMemoryModel = f.coop.cooperativeMatrix = v->coop;
    f.control.computeFullSubgroups = v->full_subgroups;
    f.dot.shaderIntegerDotProduct = v->dot;
    if (has.control)
        extensions[n_extensions++] = control;
    if (v->coop)
        extensions[n_extensions++] = coop;
    if (v->dot)
        extensions[n_extensions++] = dot;
    v->family = (uint32_t)compute_family(v->physical);
    const VkDeviceQueueCreateInfo queue = {.sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO,
                                           .queueFamilyIndex = v->family,
                                           .queueCount = 1,
                                           .pQueuePriorities = &priority};
    const VkDeviceCreateInfo info = {.sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO,
                                     .pNext = &f.all,
                                     .queueCreateInfoCount = 1,
                                     .pQueueCreateInfos = &queue,
                                     .enabledExtensionCount = n_extensions,
                                     .ppEnabledExtensionNames = extensions};
    VkResult r = vk.CreateDevice(v->physical, &info, NULL, &v->device);
    if (r != VK_SUCCESS)
        return error_set(err, "%s could not be opened: %s", p.properties.deviceName,
                         vulkan_error(r));
    vk.GetDeviceQueue(v->device, v->family, 0, &v->queue);
    v->memory_types = memory.memoryProperties;
    v->max_allocation = v11.maxMemoryAllocationSize;
    v->tick_ns = has_timestamps(v) ? p.properties.limits.timestampPeriod : 0;
    memcpy(v->max_groups, p.properties.limits.maxComputeWorkGroupCount, sizeof v->max_groups);
    return true;
}

/* The points of the IQ formats, as kernels read them: two words each. */
static bool put_grids(struct vulkan *v, struct error *err)
{
    size_t bytes = QUANT_GRID_POINTS * sizeof(uint64_t);
    void *p = vulkan_alloc(&v->be, bytes, "tables", err);
    v->grid = vulkan_address(p);
    if (p)
        vulkan_copy_in(&v->be, p, quant_grid_values(DT_IQ3_S), bytes);
    return p != NULL;
}

static int device_number(const char *device)
{
    const char *colon = device ? strchr(device, ':') : NULL;
    int n = colon ? atoi(colon + 1) : 0;
    return n < 0 ? 0 : n;
}

static struct backend *vulkan_open(const struct backend_options *opt, struct error *err)
{
    VkPhysicalDevice list[VULKAN_MAX_DEVICES];
    int at = device_number(opt->device);
    if (!vulkan_instance(err))
        return NULL;
    int n = vulkan_devices(list);
    if (at >= n) {
        if (n)
            error_set(err, "no Vulkan device %d: this machine has %d", at, n);
        else
            error_set(err, "Vulkan finds no device on this machine: install its driver");
        return NULL;
    }
    VkPhysicalDeviceProperties2 p = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2};
    vk.GetPhysicalDeviceProperties2(list[at], &p);
    const char *names = getenv("STEEL_PICK");
    if (!is_able(list[at], p.properties.deviceName, err) || !vulkan_picks_exist(names, err))
        return NULL;
    struct vulkan *v = mem_zalloc(1, sizeof *v);
    v->be.ops = &vulkan_ops;
    v->be.invariance = INVARIANCE_NONE;
    v->be.records = v->be.own_memory = v->be.async = true;
    v->physical = list[at];
    pthread_mutex_init(&v->lock, NULL);
    vulkan_picks.force(&v->be, names);
    if (make_device(v, err) && vulkan_memory_open(v, err) && vulkan_pipelines_open(v, err) &&
        vulkan_timing_open(v) && put_grids(v, err))
        return &v->be;
    vulkan_close(&v->be);
    return NULL;
}

static int vulkan_count(void)
{
    VkPhysicalDevice list[VULKAN_MAX_DEVICES];
    return vulkan_devices(list);
}

/* Discrete GPUs alone: others share the CPU's memory, and were not measured to be faster than it. Asking Vulkan takes
 * some 100 ms, so a machine without a GPU's device file is not asked. */
static int vulkan_count_auto(void)
{
    static const char *const files[] = {"/dev/dri", "/dev/nvidiactl", "/dev/dxg"};
    VkPhysicalDevice list[VULKAN_MAX_DEVICES];
    bool any = false;
    int n = 0;
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        any |= access(files[i], F_OK) == 0;
    for (int i = 0, all = any ? vulkan_devices(list) : 0; i < all; i++) {
        VkPhysicalDeviceProperties2 p = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2};
        vk.GetPhysicalDeviceProperties2(list[i], &p);
        if (p.properties.deviceType == VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU &&
            is_able(list[i], "", NULL) && n == i)
            n++; /* the first ones of the list, which "vulkan" opens */
    }
    return n;
}

static size_t vulkan_room(const char *device, double fraction)
{
    VkPhysicalDevice list[VULKAN_MAX_DEVICES];
    int n = vulkan_devices(list), at = device_number(device);
    if (at >= n || !is_able(list[at], "", NULL))
        return 0;
    size_t used, all = vulkan_heap(list[at], &used), allowed = (size_t)((double)all * fraction);
    return allowed > used ? allowed - used : 0;
}

static void vulkan_id(struct backend *be, unsigned char id[16])
{
    VkPhysicalDeviceVulkan11Properties v11 = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_PROPERTIES};
    VkPhysicalDeviceProperties2 p = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2,
                                     .pNext = &v11};
    vk.GetPhysicalDeviceProperties2(vulkan_self(be)->physical, &p);
    memcpy(id, v11.deviceUUID, 16);
}

static bool vulkan_facts(struct backend *be, struct gpu_facts *out)
{
    const struct vulkan *v = vulkan_self(be);
    VkPhysicalDeviceVulkan12Properties v12 = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_PROPERTIES};
    VkPhysicalDeviceProperties2 p = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2,
                                     .pNext = &v12};
    size_t used;
    vk.GetPhysicalDeviceProperties2(v->physical, &p);
    *out = (struct gpu_facts){.memory_bytes = vulkan_heap(v->physical, &used),
                              .software = vulkan_is_software(v->physical)};
    snprintf(out->name, sizeof out->name, "%.200s", p.properties.deviceName);
    snprintf(out->driver, sizeof out->driver, "%.31s", v12.driverInfo);
    return true;
}

const struct device_type vulkan_device = {.name = "vulkan",
                                          .kind = DEVICE_GPU,
                                          .open = vulkan_open,
                                          .count = vulkan_count,
                                          .count_auto = vulkan_count_auto,
                                          .room = vulkan_room,
                                          .id = vulkan_id,
                                          .facts = vulkan_facts};
