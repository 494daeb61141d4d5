/*
 * Kernels of the Vulkan backend: SPIR-V modules that are part of the binary, pipelines made from them when first needed,
 * and their dispatch. The shaders are in shaders/, one file per kernel.
 */
#include "backend/vulkan/coop.h"
#include "backend/vulkan/vulkan.h"
#include "base/mem.h"

#include <stdio.h>
#include <string.h>

#include "modules.h" /* written by the build: NAME_words of every shader */

static const struct {
    const char *name;
    const uint32_t *words;
    size_t bytes;
} modules[N_KERNELS] = {
#define X(upper, name) [KERNEL_##upper] = {#name, name##_words, sizeof name##_words},
    VULKAN_KERNELS(X)
#undef X
};

enum { PUSH_BYTES = 128 };

bool vulkan_pipelines_open(struct vulkan *v, struct error *err)
{
    const VkPushConstantRange range = {VK_SHADER_STAGE_COMPUTE_BIT, 0, PUSH_BYTES};
    const VkPipelineLayoutCreateInfo info = {.sType = VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO,
                                             .pushConstantRangeCount = 1,
                                             .pPushConstantRanges = &range};
    bool ok =
        vulkan_try(v, vk.CreatePipelineLayout(v->device, &info, NULL, &v->layout), "a layout");
    if (!ok && err)
        *err = v->error;
    return ok;
}

void vulkan_pipelines_close(struct vulkan *v)
{
    VkPipeline *all = &v->pipelines[0][0][0];
    for (size_t i = 0; i < sizeof v->pipelines / sizeof *all; i++)
        if (all[i])
            vk.DestroyPipeline(v->device, all[i], NULL);
    if (v->layout)
        vk.DestroyPipelineLayout(v->device, v->layout, NULL);
}

bool vulkan_has_constants(enum vulkan_kernel k)
{
    return k == KERNEL_EMBED || k == KERNEL_ATTN || k == KERNEL_ATTN_GROUP ||
           k == KERNEL_ATTN_COOP || k == KERNEL_DELTA || k == KERNEL_SSM ||
           k == KERNEL_INDEX_SCORE || k == KERNEL_SCAN || k == KERNEL_GEMV ||
           k == KERNEL_GEMV_DOT || k == KERNEL_GEMM || k == KERNEL_GEMM_COOP ||
           k == KERNEL_GEMM_COOP_FEW;
}

static bool uses_coop(enum vulkan_kernel k)
{
    return k == KERNEL_GEMM_COOP || k == KERNEL_GEMM_COOP_FEW || k == KERNEL_ATTN_COOP;
}

VkPipeline vulkan_pipeline(struct vulkan *v, enum vulkan_kernel k, uint32_t a, uint32_t b)
{
    CHECK(a < VULKAN_FIRST && b < VULKAN_SECOND, "constants %u and %u of a kernel", a, b);
    VkPipeline *p = &v->pipelines[k][a][b];
    if (*p || v->failed)
        return *p;
    const uint32_t constants[] = {a, b, v->wide};
    const VkSpecializationMapEntry entries[] = {{0, 0, 4}, {1, 4, 4}, {2, 8, 4}};
    const VkSpecializationInfo special = {3, entries, sizeof constants, constants};
    VkShaderModuleCreateInfo module = {.sType = VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO,
                                       .codeSize = modules[k].bytes,
                                       .pCode = modules[k].words};
    VkComputePipelineCreateInfo info = {
        .sType = VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO,
        .stage = {.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO,
                  .flags = v->full_subgroups
                               ? VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT
                               : 0,
                  .stage = VK_SHADER_STAGE_COMPUTE_BIT,
                  .pName = "main",
                  .pSpecializationInfo = &special},
        .layout = v->layout};
    uint32_t *rewritten = NULL;
    if (uses_coop(k)) {
        module.pCode = rewritten =
            vulkan_coop_words(module.pCode, module.codeSize / 4, &module.codeSize);
        module.codeSize *= 4;
        CHECK(rewritten, "the words of %s", modules[k].name);
    }
    if (!vulkan_try(v, vk.CreateShaderModule(v->device, &module, NULL, &info.stage.module),
                    modules[k].name)) {
        mem_free(rewritten);
        return NULL;
    }
    mem_free(rewritten);
    vulkan_try(v, vk.CreateComputePipelines(v->device, VK_NULL_HANDLE, 1, &info, NULL, p),
               modules[k].name);
    vk.DestroyShaderModule(v->device, info.stage.module, NULL);
    return *p;
}

/* What was dispatched before is done, and its results are visible. */
static void wait_for_writes(struct vulkan *v, VkCommandBuffer cmd)
{
    const VkMemoryBarrier barrier = {.sType = VK_STRUCTURE_TYPE_MEMORY_BARRIER,
                                     .srcAccessMask = VK_ACCESS_SHADER_WRITE_BIT,
                                     .dstAccessMask =
                                         VK_ACCESS_SHADER_READ_BIT | VK_ACCESS_SHADER_WRITE_BIT};
    vk.CmdPipelineBarrier(cmd, VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT,
                          VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, 0, 1, &barrier, 0, NULL, 0, NULL);
    v->dirty = false;
}

void vulkan_apart(struct vulkan *v, bool on)
{
    VkCommandBuffer cmd = on ? vulkan_cmd(v) : NULL;
    if (cmd && v->dirty)
        wait_for_writes(v, cmd);
    v->apart = on;
}

/* Whether a kernel leaves the inputs of products and their bytes as they are. */
static bool keeps_inputs(enum vulkan_kernel k)
{
    return k == KERNEL_GEMV || k == KERNEL_GEMV_DOT || k == KERNEL_GEMM || k == KERNEL_GEMM_COOP ||
           k == KERNEL_GEMM_COOP_FEW || k == KERNEL_ROUTE || k == KERNEL_GROUP;
}

void vulkan_run(struct vulkan *v, enum vulkan_kernel k, uint32_t a, uint32_t b, const void *args,
                size_t bytes, uint32_t x, uint32_t y, uint32_t z)
{
    VkPipeline p = vulkan_pipeline(v, k, a, b);
    VkCommandBuffer cmd = vulkan_cmd(v);
    if (!cmd || !p || !x || !y || !z)
        return;
    CHECK(bytes <= PUSH_BYTES, "%zu bytes of push constants", bytes);
    if (v->dirty && !v->apart)
        wait_for_writes(v, cmd);
    vk.CmdBindPipeline(cmd, VK_PIPELINE_BIND_POINT_COMPUTE, p);
    vk.CmdPushConstants(cmd, v->layout, VK_SHADER_STAGE_COMPUTE_BIT, 0, (uint32_t)bytes, args);
    /* Kernels step through rows that the grid does not cover. */
    vk.CmdDispatch(cmd, x, y < v->max_groups[1] ? y : v->max_groups[1],
                   z < v->max_groups[2] ? z : v->max_groups[2]);
    v->dirty = true;
    if (!keeps_inputs(k))
        v->bytes_of = 0;
}

void vulkan_run_flat(struct vulkan *v, enum vulkan_kernel k, uint32_t a, uint32_t b,
                     const void *args, size_t bytes, uint32_t n)
{
    uint32_t x = n < v->max_groups[0] ? n : v->max_groups[0];
    vulkan_run(v, k, a, b, args, bytes, x, x ? (n + x - 1) / x : 0, 1);
}
