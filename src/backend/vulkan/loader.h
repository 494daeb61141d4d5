/*
 * Vulkan's functions, from libvulkan.so.1, which is loaded at run time: Steel does not link it. One instance per
 * process. The functions of `vk` work for every device.
 */
#ifndef STEEL_BACKEND_VULKAN_LOADER_H
#define STEEL_BACKEND_VULKAN_LOADER_H

#define VK_NO_PROTOTYPES
#include "base/error.h"

#include <vulkan/vulkan_core.h>

/* VK_KHR_cooperative_matrix, which Debian 12's headers do not have. */
#ifndef VK_KHR_cooperative_matrix
#define VK_KHR_COOPERATIVE_MATRIX_EXTENSION_NAME "VK_KHR_cooperative_matrix"
#define VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_COOPERATIVE_MATRIX_FEATURES_KHR                          \
    ((VkStructureType)1000506000)
#define VK_STRUCTURE_TYPE_COOPERATIVE_MATRIX_PROPERTIES_KHR ((VkStructureType)1000506001)
typedef struct VkPhysicalDeviceCooperativeMatrixFeaturesKHR {
    VkStructureType sType;
    void *pNext;
    VkBool32 cooperativeMatrix, cooperativeMatrixRobustBufferAccess;
} VkPhysicalDeviceCooperativeMatrixFeaturesKHR;
typedef struct VkCooperativeMatrixPropertiesKHR {
    VkStructureType sType;
    void *pNext;
    uint32_t MSize, NSize, KSize;
    uint32_t AType, BType, CType, ResultType; /* 0: fp16, 1: float */
    VkBool32 saturatingAccumulation;
    uint32_t scope; /* 3: a subgroup */
} VkCooperativeMatrixPropertiesKHR;
typedef VkResult(VKAPI_PTR *PFN_vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR)(
    VkPhysicalDevice, uint32_t *, VkCooperativeMatrixPropertiesKHR *);
#endif

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
#define VULKAN_EXTRAS(X) X(GetPhysicalDeviceCooperativeMatrixPropertiesKHR)
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
