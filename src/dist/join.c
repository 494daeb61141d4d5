/* Joining the ranks of a job: see join.h. */
#include "dist/join.h"
#include "backend/backend.h"
#include "backend/devices.h"
#include "base/cpu.h"
#include "file/tensorfile.h"

#include <stdio.h>
#include <string.h>

struct join_outlook join_outlook(const char *device, int n_gpus)
{
    const struct ranks *r = ranks_world();
    struct join_outlook out = {1, 1, 1};
    if (!r || r->taken)
        return out;
    bool named = device && strchr(device, ':');
    out.processes = r->size;
    out.stages = r->pp_asked > 1 ? r->pp_asked : 1;
    if (n_gpus > 0)
        out.on_gpu = named ? r->n_local : (r->n_local + n_gpus - 1) / n_gpus;
    return out;
}

const char *join_gpu(const char *device, int n_gpus, char *name, size_t size)
{
    const struct ranks *r = ranks_world();
    if (!r || n_gpus < 1 || strchr(device, ':'))
        return device;
    snprintf(name, size, "%s:%d", device, r->local % n_gpus);
    return name;
}

/* A hash of the names, sizes and first bytes of all tensors, so that another file of the same name differs. */
static uint64_t fingerprint(const struct tensorfile *f)
{
    uint64_t h = 14695981039346656037u;
    for (size_t i = 0; i < f->n_tensors; i++) {
        const struct tensor *t = &f->tensors[i];
        size_t n = t->bytes < 64 ? t->bytes : 64;
        for (const char *c = t->name; *c; c++)
            h = (h ^ (uint8_t)*c) * 1099511628211u;
        for (size_t k = 0; k < n; k++)
            h = (h ^ t->data[k]) * 1099511628211u;
        h = (h ^ t->bytes) * 1099511628211u;
        tensorfile_forget(f, t); /* this rank may not need the tensor */
    }
    tensorfile_forget_all(f);
    return h;
}

/* Counts the ranks that share each GPU. */
static bool find_sharers(struct backend *be, struct ranks *r, struct error *err)
{
    unsigned char mine[16] = {0}, all[RANKS_MOST][16];
    bool gpu = device_id(be, mine);
    if (!ranks_allgather(r, mine, all, sizeof mine))
        return ranks_ok(r, err) && false;
    struct comm *c = &r->comm;
    c->n_on_device = 0;
    c->own_devices = gpu;
    for (int i = 0; gpu && i < r->size; i++) {
        c->n_on_device += !memcmp(all[i], mine, sizeof mine);
        for (int k = 0; k < i; k++)
            c->own_devices = c->own_devices && memcmp(all[i], all[k], sizeof mine) != 0;
    }
    return true;
}

/* The file decides which experts a rank has, so it must be the same on all ranks. */
static bool same_stats(struct ranks *r, struct error *err)
{
    char said[64] = "none";
    struct error why = {0};
    struct tensorfile *f = r->expert_stats ? tensorfile_open(r->expert_stats, &why) : NULL;
    if (r->expert_stats)
        snprintf(said, sizeof said, "%016llx", f ? (unsigned long long)fingerprint(f) : 0);
    tensorfile_close(f);
    return ranks_same(r, "the expert statistics", said, err);
}

/* Each rank runs the expert router itself. All must select the same experts, so all need the same arithmetic. A rank's
 * shard also depends on the kind of device (stages.h, split.h). */
static bool same_kernels(struct backend *be, struct ranks *r, struct error *err)
{
    unsigned char id[16];
    enum isa isa = ISA_REF;
    struct error ignored; /* opening the backend has reported it */
    isa_choose(&isa, &ignored);
    bool gpu = device_id(be, id);
    return ranks_same(r, "the devices", gpu ? "a GPU (--device)" : "a CPU (--device)", err) &&
           ranks_same(r, "the kernels (STEEL_ISA)", gpu ? "those of a GPU" : isa_name(isa), err);
}

struct backend *join_open(const struct backend_options *opt, struct error *err)
{
    struct error why = {0};
    struct backend *be = backend_open(opt, &why);
    bool gpu = device_kind(opt->device) == DEVICE_GPU;
    if (!be && gpu)
        error_set(err, "the devices differ: rank 0 has a GPU, this one none that it can use: %s",
                  why.msg);
    else if (!be)
        *err = why;
    return be;
}

bool join_ranks(struct ranks *r, struct join_shape shape, struct backend *be,
                const struct tensorfile *f, struct error *err)
{
    char file[64];
    snprintf(file, sizeof file, "%zu tensors, %.3f GB, %016llx", f->n_tensors,
             (double)tensorfile_bytes(f) * 1e-9, (unsigned long long)fingerprint(f));
    if (!ranks_same(r, "the programs", r->program, err) ||
        !ranks_same(r, "the arguments", r->arguments, err) ||
        !ranks_same(r, "the model files", file, err) || !same_stats(r, err) ||
        !same_kernels(be, r, err) || !ranks_arrange(r, shape.tp, shape.pp, shape.ep, err))
        return false;
    be->comm = ranks_comm(r);
    /* Rank 0 samples, possibly on its device. With stages it samples as logits arrive (engine/executor.c). */
    be->async = shape.pp > 1;
    return find_sharers(be, r, err);
}
