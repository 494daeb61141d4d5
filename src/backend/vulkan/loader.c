/* Loads Vulkan and lists its devices. See loader.h. */
#include "backend/vulkan/loader.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

struct vulkan_functions vk;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static VkInstance instance;
static struct error why;

static void load(void)
{
    void *lib = dlopen("libvulkan.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!lib) {
        error_set(&why, "no Vulkan loader (libvulkan.so.1) was found on this machine");
        return;
    }
    PFN_vkGetInstanceProcAddr get =
        (PFN_vkGetInstanceProcAddr)(uintptr_t)dlsym(lib, "vkGetInstanceProcAddr");
    PFN_vkCreateInstance create = get ? (PFN_vkCreateInstance)get(NULL, "vkCreateInstance") : NULL;
    if (!create) {
        error_set(&why, "libvulkan.so.1 is no Vulkan loader");
        return;
    }
    const VkApplicationInfo app = {.sType = VK_STRUCTURE_TYPE_APPLICATION_INFO,
                                   .pApplicationName = "steel",
                                   .apiVersion = VK_API_VERSION_1_2};
    const VkInstanceCreateInfo info = {.sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO,
                                       .pApplicationInfo = &app};
    VkInstance made = NULL;
    VkResult r = create(&info, NULL, &made);
    if (r != VK_SUCCESS) {
        error_set(&why, "Vulkan has no driver that works here (%s)", vulkan_error(r));
        return;
    }
    bool all = true;
#define X(name) all = (vk.name = (PFN_vk##name)get(made, "vk" #name)) != NULL && all;
    VULKAN_FUNCTIONS(X)
#undef X
#define X(name) vk.name = (PFN_vk##name)get(made, "vk" #name);
    VULKAN_EXTRAS(X)
#undef X
    if (all)
        instance = made;
    else
        error_set(&why, "this Vulkan loader is older than Vulkan 1.2");
}

VkInstance vulkan_instance(struct error *err)
{
    pthread_once(&once, load);
    if (!instance && err)
        *err = why;
    return instance;
}

const char *vulkan_error(VkResult r)
{
    switch (r) {
    case VK_ERROR_OUT_OF_HOST_MEMORY:
        return "out of host memory";
    case VK_ERROR_OUT_OF_DEVICE_MEMORY:
        return "out of device memory";
    case VK_ERROR_DEVICE_LOST:
        return "the device was lost";
    case VK_ERROR_INITIALIZATION_FAILED:
        return "initialisation failed";
    case VK_ERROR_INCOMPATIBLE_DRIVER:
        return "incompatible driver";
    default:
        return "an error of the driver";
    }
}

bool vulkan_is_software(VkPhysicalDevice d)
{
    VkPhysicalDeviceProperties2 p = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2};
    vk.GetPhysicalDeviceProperties2(d, &p);
    return p.properties.deviceType == VK_PHYSICAL_DEVICE_TYPE_CPU;
}

int vulkan_devices(VkPhysicalDevice *out)
{
    VkPhysicalDevice all[VULKAN_MAX_DEVICES];
    uint32_t found = VULKAN_MAX_DEVICES;
    int n = 0;
    if (!vulkan_instance(NULL))
        return 0;
    VkResult r = vk.EnumeratePhysicalDevices(instance, &found, all);
    if (r != VK_SUCCESS && r != VK_INCOMPLETE)
        return 0;
    for (int software = 0; software < 2; software++)
        for (uint32_t i = 0; i < found; i++)
            if (vulkan_is_software(all[i]) == software)
                out[n++] = all[i];
    return n;
}
