/* The entry of the CUDA backend in the array of devices (backend/devices.c). Only in builds with nvcc. */
#ifndef STEEL_BACKEND_CUDA_DEVICE_H
#define STEEL_BACKEND_CUDA_DEVICE_H

#include "backend/devices.h"

extern const struct device_type cuda_device;
size_t cuda_held(const char *device); /* device_type.held */

#endif
