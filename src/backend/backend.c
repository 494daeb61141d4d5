/* Opens the backend a user asked for: the CPU, with the best kernels it has, or on request CUDA. */
#include "backend/backend.h"
#include "base/cpu.h"
#include "quant/kvblock.h"

#include <stdbool.h>
#include <string.h>
#include <strings.h>

#ifdef STEEL_CUDA
size_t cuda_room(const char *device, double fraction); /* cuda/backend.cu */
bool cuda_found(void);
int cuda_count(void);
void cuda_device_id(struct backend *be, unsigned char id[16]);
bool cuda_facts(struct backend *be, struct gpu_facts *out); /* cuda/facts.cu */
#endif

bool backend_has_cuda(void)
{
#ifdef STEEL_CUDA
    return cuda_found();
#else
    return false;
#endif
}

size_t backend_cuda_room(const struct backend_options *opt, double fraction)
{
#ifdef STEEL_CUDA
    return cuda_room(opt->device, fraction);
#else
    (void)opt;
    (void)fraction;
    return 0;
#endif
}

int backend_cuda_count(void)
{
#ifdef STEEL_CUDA
    return cuda_count();
#else
    return 0;
#endif
}

bool backend_device_id(struct backend *be, unsigned char id[16])
{
    memset(id, 0, 16);
#ifdef STEEL_CUDA
    if (!strcmp(be->ops->name, "cuda")) {
        cuda_device_id(be, id);
        return true;
    }
#else
    (void)be;
#endif
    return false;
}

bool backend_gpu_facts(struct backend *be, struct gpu_facts *out)
{
#ifdef STEEL_CUDA
    return !strcmp(be->ops->name, "cuda") && cuda_facts(be, out);
#else
    (void)be;
    (void)out;
    return false;
#endif
}

/* The cache's types, by the names of command lines. */
static const struct {
    const char *name;
    enum dtype type;
} kv_names[] = {{"f16", DT_F16},   {"bf16", DT_BF16},   {"f32", DT_F32},         {"q8_0", DT_Q8_0},
                {"q4_0", DT_Q4_0}, {"fp8", DT_F8_E4M3}, {"fp8_e4m3", DT_F8_E4M3}};

enum dtype kv_type_from_name(const char *name)
{
    for (size_t i = 0; i < sizeof kv_names / sizeof *kv_names; i++)
        if (!strcasecmp(name, kv_names[i].name))
            return kv_names[i].type;
    return DT_NONE;
}

const char *kv_type_name(enum dtype t)
{
    for (size_t i = 0; i < sizeof kv_names / sizeof *kv_names; i++)
        if (kv_names[i].type == t)
            return kv_names[i].name;
    return dtype_name(t);
}

/* Codes come in blocks along a head. */
static bool dim_fits(int layer, const char *what, int dim, enum dtype t, struct error *err)
{
    if (!kv_quantised(t) || dim % KV_BLOCK == 0)
        return true;
    return error_set(err,
                     "layer %d: %s of %d values, no multiple of %d: a cache of %s cannot hold "
                     "them, one of f16 or bf16 can",
                     layer, what, dim, KV_BLOCK, kv_type_name(t));
}

bool kv_types_check(const struct network *net, enum dtype k_type, enum dtype v_type,
                    struct error *err)
{
    for (int i = 0; i < net->n_layers; i++) {
        const struct mixer *m = &net->layers[i].mixer;
        if (m->kind == MIXER_ATTENTION && (!dim_fits(i, "keys", m->attention.k_dim, k_type, err) ||
                                           !dim_fits(i, "values", m->attention.v_dim, v_type, err)))
            return false;
        if (m->kind == MIXER_LATENT &&
            !dim_fits(i, "latents", m->latent.kv_rank + m->latent.rope_dim, k_type, err))
            return false;
    }
    return true;
}

bool backend_print_picks(struct backend *be, FILE *out)
{
    struct pick_info p;
    int op = 2, name = 6; /* widths of columns: at least their titles' */
    if (!be->ops->picks)
        return false;
    for (int i = 0; be->ops->picks->row(be, i, &p); i++) {
        op = (int)strlen(p.op) > op ? (int)strlen(p.op) : op;
        name = (int)strlen(p.name) > name ? (int)strlen(p.name) : name;
    }
    fprintf(out, "%-*s %-*s %-7s %-14s %-19s %s\n", op, "op", name, "kernel", "device", "rows",
            "picked", "formats");
    for (int i = 0; be->ops->picks->row(be, i, &p); i++) {
        char rows[32];
        if (p.rows_to)
            snprintf(rows, sizeof rows, "%d to %d", p.rows_from, p.rows_to);
        else
            snprintf(rows, sizeof rows, "%d and more", p.rows_from);
        char runs[32] = "not on this device";
        if (p.available)
            snprintf(runs, sizeof runs, "%llu", (unsigned long long)p.runs);
        fprintf(out, "%-*s %-*s %-7s %-14s %-19s %s\n", op, p.op, name, p.name, p.device, rows,
                runs, p.formats);
    }
    be->ops->picks->shapes(be, out);
    return true;
}

enum device_kind backend_device_kind(const char *device)
{
    if (!device || !strcmp(device, "cpu"))
        return DEVICE_CPU;
    if (!strcmp(device, "auto"))
        return DEVICE_AUTO;
    return !strncmp(device, "cuda", 4) && (!device[4] || device[4] == ':') ? DEVICE_GPU
                                                                           : DEVICE_OTHER;
}

const char *backend_device_name(enum device_kind kind)
{
    return kind == DEVICE_GPU ? "cuda" : "cpu";
}

struct backend *backend_open(const struct backend_options *opt, struct error *err)
{
    const char *device = opt->device;
    enum device_kind kind = backend_device_kind(device);
    bool cuda = kind == DEVICE_GPU;
    if (cuda && (opt->deterministic || opt->no_repack)) {
        error_set(err, "--device %s: %s is for the CPU alone", device,
                  opt->deterministic ? "--deterministic" : "--no-repack");
        return NULL;
    }
#ifdef STEEL_CUDA
    if (cuda) {
        struct error why = {0};
        struct backend *be = backend_open_cuda(opt, &why);
        if (!be)
            error_set(err, "--device %s: %s", device, why.msg);
        return be;
    }
    const char *built = "cpu, cuda";
#else
    if (cuda) {
        error_set(err,
                  "--device %s: this build has no CUDA (it was made without nvcc): build it where "
                  "nvcc is, or use --device cpu",
                  device);
        return NULL;
    }
    const char *built = "cpu";
#endif
    if (kind != DEVICE_CPU) {
        error_set(err, "--device %s: unknown device (this build has: auto, %s)", device, built);
        return NULL;
    }
    enum isa isa;
    if (!isa_choose(&isa, err))
        return NULL;
    return isa == ISA_REF ? backend_open_ref() : backend_open_cpu(opt, err);
}
