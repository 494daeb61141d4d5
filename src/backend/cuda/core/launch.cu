/*
 * Everything around a launch (cuda_launch in cuda.h): kernel attributes and logs.
 * STEEL_LAUNCHES=file appends a line for every launch (kernel, grid, threads, bytes of shared
 * memory, launch attributes) and one for every step, so that two versions of the backend can be
 * compared by diff. A recorded step is logged when it is recorded, not when it is replayed.
 */
#include "backend/cuda/core/host.h"

extern "C" {
#include "base/mem.h"
}

#include <stdio.h>
#include <stdlib.h>

#ifndef STEEL_CUDA_SIM
void cuda_set_attributes(struct cuda_backend *cu, const void *fn)
{
    size_t at = (size_t)fn / 16 % MAX_KERNELS;
    for (int i = 0; i < MAX_KERNELS; i++, at = (at + 1) % MAX_KERNELS) {
        if (cu->launch.known[at] == fn)
            return;
        if (cu->launch.known[at])
            continue;
        cu->launch.known[at] = fn;
        cudaFuncAttributes its = {};
        CUDA_TRY(cu, cudaFuncGetAttributes(&its, fn)); /* a kernel may have static shared memory */
        CUDA_TRY(cu, cudaFuncSetAttribute(fn, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          (int)(cu->shared_limit - its.sharedSizeBytes)));
        CUDA_TRY(cu, cudaFuncSetAttribute(fn, cudaFuncAttributePreferredSharedMemoryCarveout,
                                          cudaSharedmemCarveoutMaxShared));
        return;
    }
    CHECK(false, "more than %d kernels", MAX_KERNELS);
}
#endif

bool cuda_blocks_concurrent(void)
{
#ifdef STEEL_CUDA_SIM
    return sim_dry();
#else
    return true;
#endif
}

void cuda_log_open(struct cuda_backend *cu)
{
    const char *name = getenv("STEEL_LAUNCHES");
    if (name && *name && !(cu->launch.log = fopen(name, "a")))
        fprintf(stderr, "steel: STEEL_LAUNCHES=%s cannot be written\n", name);
}

void cuda_log_close(struct cuda_backend *cu)
{
    if (cu->launch.log)
        fclose(cu->launch.log);
    cu->launch.log = NULL;
}

void cuda_log_step(struct cuda_backend *cu)
{
    const struct step_layout *l = &cu->step.layout;
    if (cu->launch.log)
        fprintf(cu->launch.log, "step of %d rows, %d sequences, %d decodes%s, %d outputs\n",
                l->n_tokens, l->n_seqs, l->n_decode, l->deep ? " (deep)" : "", l->n_out);
}

void cuda_log_launch(struct cuda_backend *cu, const void *fn, dim3 grid, int block, size_t shared,
                     int mode)
{
    const char *name = NULL;
    if (cudaFuncGetName(&name, fn) != cudaSuccess)
        cudaGetLastError();
    fprintf(cu->launch.log, "%s grid %u,%u,%u threads %d shared %zu mode %d\n", name ? name : "?",
            grid.x, grid.y, grid.z, block, shared, mode);
}

#ifdef STEEL_CUDA_TRACE
/* For bench_gpu: when each kernel of the steps since the last call began and ended its wait. */
extern "C" void cuda_trace_dump(struct backend *be, FILE *out)
{
    struct cuda_backend *cu = cuda_self(be);
    struct trace *t = (struct trace *)mem_alloc(sizeof *t);
    cudaStreamSynchronize(cu->stream);
    cudaMemcpy(t, cu->launch.trace, sizeof *t, cudaMemcpyDeviceToHost);
    for (int i = 0; out && i < t->n && i < TRACE_EVENTS; i++)
        fprintf(out, "%c%d %llu %llu\n", (char)(t->e[i].tag >> 16), t->e[i].tag & 0xffff,
                (unsigned long long)(t->e[i].before - t->e[0].before),
                (unsigned long long)(t->e[i].after - t->e[0].before));
    for (int i = 0; out && i < t->n_blocks && i < TRACE_BLOCKS; i++) {
        const struct trace_block *b = &t->b[i];
        fprintf(out, "B %u %u %u %u %llu", b->tag, b->sm, b->block, b->grid, b->start);
        for (int j = 0; j < TRACE_MARKS; j++)
            fprintf(out, " %u", b->at[j]);
        fprintf(out, "\n");
    }
    cudaMemset(cu->launch.trace, 0, 16);
    mem_free(t);
}
#endif
