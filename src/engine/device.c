/* The choice of a device. See device.h. */
#include "engine/device.h"

#include <string.h>

static double gb(size_t bytes)
{
    return (double)bytes * 1e-9;
}

const char *device_choose(const struct device_facts *f, struct error *notice)
{
    *notice = (struct error){0};
    if (!f->asked || strcmp(f->asked, "auto"))
        return f->asked ? f->asked : "cpu";
    if (!f->room || f->isa_forced || f->weights < DEVICE_SMALL_MODEL)
        return "cpu";
    if (f->deterministic || f->no_repack) {
        error_set(notice, "%s: running on the CPU, not on the GPU",
                  f->deterministic ? "--deterministic" : "--no-repack");
        return "cpu";
    }
    size_t need = f->weights + f->kv + f->scratch;
    if (need > f->room) {
        error_set(notice,
                  "the model needs %.1f GB of GPU memory (weights %.1f, KV cache %.1f, working "
                  "memory %.1f), %.1f are free: running on the CPU",
                  gb(need), gb(f->weights), gb(f->kv), gb(f->scratch), gb(f->room));
        return "cpu";
    }
    return "cuda";
}
