/*
 * The devices that a model can run on. Every kind of device is one struct device_type, registered in the array of
 * devices.c. To add a backend, add its entry there: nothing above src/backend names a kind of device.
 */
#ifndef STEEL_BACKEND_DEVICES_H
#define STEEL_BACKEND_DEVICES_H

#include "backend/layer.h"
#include "backend/options.h"
#include "backend/rawweight.h"
#include "base/error.h"

#include <stddef.h>

struct backend;

enum device_kind {
    DEVICE_CPU,
    DEVICE_GPU,
    DEVICE_AUTO,  /* "auto": engine/device.h chooses between CPU and GPU */
    DEVICE_OTHER, /* an unknown name, which backend_open refuses */
};

/* Facts of a GPU for a benchmark's record. */
struct gpu_facts {
    char name[256], driver[32]; /* driver: "" = unknown */
    bool software;              /* it computes on the CPU; "auto" never chooses it */
    int sm, n_sm;               /* compute capability x 10, multiprocessors; 0 = unknown */
    int max_sm_mhz;             /* 0 = unknown, as the next two */
    int sm_mhz, memory_mhz;     /* current clocks */
    size_t memory_bytes;
    double read_bytes_s; /* measured; 0 = not measured */
};

struct device_type {
    const char *name; /* "cuda"; on the command line also "cuda:N", the Nth of several */
    enum device_kind kind;
    /* NULL, or why this build lacks the device. Then all members below are NULL. */
    const char *missing;
    struct backend *(*open)(const struct backend_options *opt, struct error *err);
    /* GPUs only, else NULL. */
    int (*count)(void);
    /* Devices that "auto" may choose, the first ones of all; NULL = count. */
    int (*count_auto)(void);
    /* Bytes still available on a device of this type if `fraction` of its memory may be in use; 0 = no such device. */
    size_t (*room)(const char *device, double fraction);
    /* Bytes of the device that this process has allocated; NULL: not counted. */
    size_t (*held)(const char *device);
    bool offloads; /* host_experts are understood */
    /* With offloads: bytes of the device that copies of experts take in prompts. expert, layer: the most bytes of one
     * expert, and of all experts of a layer. */
    size_t (*copy_bytes)(size_t expert, size_t layer);
    /* Bytes of the form that upload() makes of src, whose data is NULL. NULL: about the file's. */
    size_t (*weight_bytes)(const struct raw_weight *src, enum weight_role role);
    void (*id)(struct backend *be, unsigned char id[16]); /* globally unique */
    bool (*facts)(struct backend *be, struct gpu_facts *out);
    bool deterministic; /* backend_options.deterministic is obeyed */
};

/* The names for --help. */
#define DEVICE_NAMES "cpu, cuda, cuda:N, vulkan or vulkan:N"

/* A device by its name; NULL is "cpu", unknown names are DEVICE_OTHER. Opens nothing. */
enum device_kind device_kind(const char *device);
/* The device to open after "auto" chose this kind (CPU or GPU). For GPU: the first type that is present. */
const char *device_default(enum device_kind kind);
/* The name of the i-th type of GPU; NULL past the last. *missing: why this build lacks it, or NULL. */
const char *device_gpu_type(int i, const char **missing);
/* Number of GPUs of the named device's type; of "auto", of the default GPU's type. Opens nothing. */
int device_count(const char *device);
/* See device_type.room; "auto" is the default GPU. */
size_t device_room(const char *device, double fraction);
/* The next two likewise. weight_bytes 0: not known. */
bool device_offloads(const char *device);
size_t device_held(const char *device, bool *counted);
size_t device_copy_bytes(const char *device, size_t expert, size_t layer);
size_t device_weight_bytes(const char *device, const struct raw_weight *src, enum weight_role role);

/* Of an open backend; false if it is no GPU. device_facts_of measures, so it takes a moment. */
bool device_id(struct backend *be, unsigned char id[16]);
bool device_facts_of(struct backend *be, struct gpu_facts *out);

/* The message for a machine where CUDA finds no usable GPU; returns false. Versions are CUDA's own numbers (13.0 is
 * 13000): the one the driver supports (0 = no driver) and the one this build needs. why: CUDA's error text. */
bool device_none(int driver, int needed, const char *why, struct error *err);

#endif
