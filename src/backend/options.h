/* The options a backend is opened with. */
#ifndef STEEL_BACKEND_OPTIONS_H
#define STEEL_BACKEND_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>

struct backend;

struct backend_options {
    /* "cpu", "cuda", "cuda:N" (devices.h); NULL = "cpu". The engine also takes "auto". */
    const char *device;
    int threads; /* 0 = all cores */
    /* its work yields to that of other backends on this device. On a CPU the threads' priority decides (os_background) */
    bool background;
    /* same bytes whatever else is in the batch and however the prompt was split */
    bool deterministic;
    bool no_repack; /* compute from the mapped file */
    /* Bytes of memory for experts. Steps read the others from the model's file (backend.h: tier_ops). 0 = all experts
     * are in memory. */
    size_t expert_memory;
    /* Experts that weights leave in host memory (rawweight.h: n_host) are computed there. Only for a backend with own_memory
     * and tier_ops. backend_open then opens the CPU as `host`, with threads and expert_memory. The device owns it. */
    bool host_experts;
    /* The host keeps all experts of such a weight, also those on the device. They are exchanged by use. */
    bool host_all;
    struct backend *host;
};

#endif
