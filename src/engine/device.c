/* Chooses a device: see device.h. */
#include "engine/device.h"

static double gb(size_t bytes)
{
    return (double)bytes * 1e-9;
}

enum device_kind device_choose(const struct device_facts *f, struct error *notice)
{
    *notice = (struct error){0};
    if (f->asked != DEVICE_AUTO)
        return f->asked;
    if (!f->room || f->isa_forced || f->weights < DEVICE_SMALL_MODEL)
        return DEVICE_CPU;
    if (f->deterministic || f->no_repack) {
        error_set(notice, "%s: running on the CPU, not on the GPU",
                  f->deterministic ? "--deterministic" : "--no-repack");
        return DEVICE_CPU;
    }
    size_t need = f->weights + f->kv + f->scratch;
    if (need > f->room) {
        error_set(notice,
                  "the model needs %.1f GB of GPU memory (weights %.1f, KV cache %.1f, working "
                  "memory %.1f), %.1f are free: running on the CPU",
                  gb(need), gb(f->weights), gb(f->kv), gb(f->scratch), gb(f->room));
        return DEVICE_CPU;
    }
    return DEVICE_GPU;
}

bool device_fits(const struct device_facts *f, struct error *err)
{
    size_t need = f->weights + f->kv + f->scratch, beside = f->kv + f->scratch;
    if (!f->room || f->no_repack || need <= f->room)
        return true;
    double bits = f->room > beside && f->n_params > 0
                      ? (double)(f->room - beside) * 8 / (double)f->n_params
                      : 0;
    return error_set(
        err,
        "--device %s: the model needs %.1f GB of GPU memory (weights %.1f, KV cache at "
        "least %.1f, working memory %.1f), %.1f may be used; weights of %.1f bits or "
        "less would fit (it has %.1f), or --device cpu",
        f->name, gb(need), gb(f->weights), gb(f->kv), gb(f->scratch), gb(f->room), bits,
        f->n_params > 0 ? (double)f->weights * 8 / (double)f->n_params : 0);
}

int device_sequences(size_t room, size_t token, size_t state, int context, int most)
{
    int tokens = context > 0 && context < DEVICE_SEQ_TOKENS ? context : DEVICE_SEQ_TOKENS;
    double each = (double)token * tokens + (double)state;
    double n = each > 0 ? (double)room / each : most;
    int least = most < DEVICE_LEAST_SEQS ? most : DEVICE_LEAST_SEQS;
    return n >= most ? most : n <= least ? least : (int)n;
}
