/* Why no GPU can be opened, and what to do. A file of its own because the simulator links it, too. */
#include "backend/devices.h"

bool device_none(int driver, int needed, const char *why, struct error *err)
{
    if (!driver)
        return error_set(err, "no NVIDIA driver was found on this machine: install it, or use "
                              "--device cpu");
    if (driver / 1000 < needed / 1000)
        return error_set(err,
                         "the NVIDIA driver is too old: it knows CUDA up to %d.%d, and this build "
                         "needs %d.%d; install a newer driver, or use --device cpu",
                         driver / 1000, driver % 1000 / 10, needed / 1000, needed % 1000 / 10);
    return error_set(err,
                     "an NVIDIA driver is here (for CUDA %d.%d), but no GPU that may be used: %s; "
                     "see nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu",
                     driver / 1000, driver % 1000 / 10, why);
}
