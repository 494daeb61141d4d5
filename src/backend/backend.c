/* Chooses the backend a user asked for, or the best this machine has. */
#include "backend/backend.h"
#include "base/cpu.h"

#include <stddef.h>
#include <string.h>

struct backend *backend_open(const struct backend_options *opt, struct error *err)
{
    const char *device = opt->device ? opt->device : "cpu";
    if (strcmp(device, "cpu")) {
        error_set(err, "--device %s: unknown device (this build has: cpu)", device);
        return NULL;
    }
    enum isa isa;
    if (!isa_choose(&isa, err))
        return NULL;
    return isa == ISA_REF ? backend_open_ref() : backend_open_cpu(opt, err);
}
