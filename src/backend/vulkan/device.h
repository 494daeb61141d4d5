/* The entry of the Vulkan backend in the array of devices (backend/devices.c). Only in builds with glslc and Vulkan's
 * headers. */
#ifndef STEEL_BACKEND_VULKAN_DEVICE_H
#define STEEL_BACKEND_VULKAN_DEVICE_H

#include "backend/devices.h"

extern const struct device_type vulkan_device;

#endif
