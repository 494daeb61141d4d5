/*
 * Vulkan's functions, from libvulkan.so.1, which is loaded at run time: Steel does not link it. One instance per
 * process. The functions of `vk` work for every device.
 */
#ifndef STEEL_BACKEND_VULKAN_LOADER_H
#define STEEL_BACKEND_VULKAN_LOADER_H

#define VK_NO_PROTOTYPES
#include "base/error.h"

#include <vulkan/vulkan_core.h>

/* clang-format off */
#define VULKAN_FUNCTIONS(X)                                                                        \
    X(EnumeratePhysicalDevices) X(GetPhysicalDeviceProperties2) X(GetPhysicalDeviceFeatures2)      \
    X(GetPhysicalDeviceMemoryProperties2) X(GetPhysicalDeviceQueueFamilyProperties)                \
    X(EnumerateDeviceExtensionProperties) X(CreateDevice) X(DestroyDevice) X(GetDeviceQueue)       \
    X(DeviceWaitIdle) X(AllocateMemory) X(FreeMemory) X(MapMemory) X(CreateBuffer)                 \
    X(DestroyBuffer) X(GetBufferMemoryRequirements) X(BindBufferMemory)                            \
    X(GetBufferDeviceAddress) X(CreateShaderModule) X(DestroyShaderModule)                         \
    X(CreatePipelineLayout) X(DestroyPipelineLayout) X(CreateComputePipelines)                     \
    X(DestroyPipeline) X(CreateCommandPool) X(DestroyCommandPool) X(AllocateCommandBuffers)        \
    X(BeginCommandBuffer) X(EndCommandBuffer) X(CmdBindPipeline) X(CmdPushConstants)               \
    X(CmdDispatch) X(CmdPipelineBarrier) X(CmdCopyBuffer) X(CmdFillBuffer) X(CreateFence)          \
    X(DestroyFence) X(WaitForFences) X(ResetFences) X(QueueSubmit) X(CreateQueryPool)              \
    X(DestroyQueryPool) X(CmdResetQueryPool) X(CmdWriteTimestamp) X(GetQueryPoolResults)
/* Of extensions: NULL where no driver has them. */
#define VULKAN_EXTRAS(X) X(GetPhysicalDeviceCooperativeMatrixPropertiesNV)
/* clang-format on */

struct vulkan_functions {
#define X(name) PFN_vk##name name;
    VULKAN_FUNCTIONS(X)
    VULKAN_EXTRAS(X)
#undef X
};

extern struct vulkan_functions vk;

/* Loads the library and makes the instance, once. NULL with err if there is none. */
VkInstance vulkan_instance(struct error *err);
const char *vulkan_error(VkResult r);

enum { VULKAN_MAX_DEVICES = 16 };
/* The physical devices that run compute shaders, real GPUs first; software rasterisers last. */
int vulkan_devices(VkPhysicalDevice *out);
bool vulkan_is_software(VkPhysicalDevice d);

#endif
