/*
 * The array of devices, and opening one of them. The only file that knows which backends this build has: STEEL_CUDA
 * and STEEL_VULKAN are defined for it alone.
 */
#include "backend/devices.h"
#include "backend/backend.h"
#include "base/cpu.h"
#ifdef STEEL_CUDA
#include "backend/cuda/device.h"
#endif
#ifdef STEEL_VULKAN
#include "backend/vulkan/device.h"
#endif

#include <stdio.h>
#include <string.h>

static struct backend *open_cpu(const struct backend_options *opt, struct error *err)
{
    enum isa isa;
    if (!isa_choose(&isa, err))
        return NULL;
    return isa == ISA_REF ? backend_open_ref() : backend_open_cpu(opt, err);
}

static const struct device_type cpu_device = {.name = "cpu", .kind = DEVICE_CPU, .open = open_cpu};
#ifndef STEEL_CUDA
static const struct device_type cuda_device = {
    .name = "cuda",
    .kind = DEVICE_GPU,
    .missing = "this build has no CUDA (it was made without nvcc): build it where nvcc is, or use "
               "--device cpu"};
#endif

#ifndef STEEL_VULKAN
static const struct device_type vulkan_device = {
    .name = "vulkan",
    .kind = DEVICE_GPU,
    .missing =
        "this build has no Vulkan (it was made without glslc or Vulkan's headers): `make deps` "
        "installs them"};
#endif

/* "auto" tries them in this order. */
static const struct device_type *const types[] = {&cpu_device, &cuda_device, &vulkan_device};
enum { N_TYPES = (int)(sizeof types / sizeof *types) };

/* The type of "cuda" or "cuda:N"; NULL = unknown, as is NULL. Only GPUs are numbered. */
static const struct device_type *type_of(const char *device)
{
    for (int i = 0; device && i < N_TYPES; i++) {
        size_t n = strlen(types[i]->name);
        if (!strncmp(device, types[i]->name, n) &&
            (!device[n] || (device[n] == ':' && types[i]->kind == DEVICE_GPU)))
            return types[i];
    }
    return NULL;
}

static int count_of(const struct device_type *t)
{
    return t->count ? t->count() : 0;
}

static int count_auto_of(const struct device_type *t)
{
    return t->count_auto ? t->count_auto() : count_of(t);
}

const char *device_default(enum device_kind kind)
{
    const char *first = NULL;
    for (int i = 0; i < N_TYPES; i++) {
        if (types[i]->kind != kind)
            continue;
        if (kind == DEVICE_CPU || count_auto_of(types[i]) > 0)
            return types[i]->name;
        first = first ? first : types[i]->name;
    }
    return first;
}

const char *device_gpu_type(int i, const char **missing)
{
    for (int k = 0; k < N_TYPES; k++)
        if (types[k]->kind == DEVICE_GPU && i-- == 0) {
            *missing = types[k]->missing;
            return types[k]->name;
        }
    return NULL;
}

static const struct device_type *gpu_of(const char *device)
{
    const struct device_type *t =
        type_of(device && strcmp(device, "auto") != 0 ? device : device_default(DEVICE_GPU));
    return t && t->kind == DEVICE_GPU && !t->missing ? t : NULL;
}

enum device_kind device_kind(const char *device)
{
    const struct device_type *t = type_of(device ? device : "cpu");
    if (device && !strcmp(device, "auto"))
        return DEVICE_AUTO;
    return t ? t->kind : DEVICE_OTHER;
}

int device_count(const char *device)
{
    const struct device_type *t = gpu_of(device);
    bool is_auto = device && !strcmp(device, "auto");
    return !t ? 0 : is_auto ? count_auto_of(t) : count_of(t);
}

size_t device_room(const char *device, double fraction)
{
    const struct device_type *t = gpu_of(device);
    return t ? t->room(device, fraction) : 0;
}

bool device_offloads(const char *device)
{
    const struct device_type *t = gpu_of(device);
    return t && t->offloads;
}

size_t device_held(const char *device, bool *counted)
{
    const struct device_type *t = gpu_of(device);
    *counted = t && t->held;
    return *counted ? t->held(device) : 0;
}

size_t device_copy_bytes(const char *device, size_t expert, size_t layer)
{
    const struct device_type *t = gpu_of(device);
    return t && t->copy_bytes ? t->copy_bytes(expert, layer) : 0;
}

size_t device_weight_bytes(const char *device, const struct raw_weight *src, enum weight_role role)
{
    const struct device_type *t = gpu_of(device);
    return t && t->weight_bytes ? t->weight_bytes(src, role) : 0;
}

bool device_id(struct backend *be, unsigned char id[16])
{
    const struct device_type *t = be->own_memory ? type_of(be->ops->name) : NULL;
    memset(id, 0, 16);
    if (t)
        t->id(be, id);
    return t != NULL;
}

bool device_facts_of(struct backend *be, struct gpu_facts *out)
{
    const struct device_type *t = be->own_memory ? type_of(be->ops->name) : NULL;
    return t && t->facts(be, out);
}

static void error_unknown(const char *device, struct error *err)
{
    char names[128] = "auto";
    for (int i = 0; i < N_TYPES; i++)
        if (!types[i]->missing)
            snprintf(names + strlen(names), sizeof names - strlen(names), ", %s", types[i]->name);
    error_set(err, "--device %s: unknown device (this build has: %s)", device, names);
}

struct backend *backend_open(const struct backend_options *opt, struct error *err)
{
    const char *device = opt->device ? opt->device : "cpu";
    const struct device_type *t = type_of(device);
    struct error why = {0};
    if (!t) {
        error_unknown(device, err);
        return NULL;
    }
    if (t->kind == DEVICE_GPU && (opt->no_repack || (opt->expert_memory && !opt->host_experts))) {
        error_set(err, "--device %s: %s is for the CPU alone", device,
                  opt->no_repack ? "--no-repack" : "--expert-memory");
        return NULL;
    }
    if (t->missing) {
        error_set(err, "--device %s: %s", device, t->missing);
        return NULL;
    }
    if (t->kind == DEVICE_GPU && opt->deterministic && (!t->deterministic || opt->host_experts)) {
        error_set(err, "--device %s: --deterministic is not offered by %s%s", device, t->name,
                  opt->host_experts ? " with experts in host memory" : "");
        return NULL;
    }
    struct backend_options with = *opt;
    if (opt->host_experts && t->kind == DEVICE_GPU) {
        with.device = device_default(DEVICE_CPU);
        with.host = open_cpu(&with, err);
        with.device = opt->device;
        if (!with.host)
            return NULL;
    }
    struct backend *be = t->open(&with, &why);
    if (!be && t->kind == DEVICE_CPU && err)
        *err = why;
    else if (!be)
        error_set(err, "--device %s: %s", device, why.msg);
    return be;
}
