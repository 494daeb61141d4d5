/* The profile of the Vulkan backend: timestamps between the stages of a step. */
#include "backend/profile.h"
#include "backend/vulkan/vulkan.h"

bool vulkan_timing_open(struct vulkan *v)
{
    const VkQueryPoolCreateInfo info = {.sType = VK_STRUCTURE_TYPE_QUERY_POOL_CREATE_INFO,
                                        .queryType = VK_QUERY_TYPE_TIMESTAMP,
                                        .queryCount = VULKAN_STAMPS};
    return v->tick_ns <= 0 ||
           vulkan_try(v, vk.CreateQueryPool(v->device, &info, NULL, &v->stamps), "timestamps");
}

void vulkan_timing_close(struct vulkan *v)
{
    if (v->stamps)
        vk.DestroyQueryPool(v->device, v->stamps, NULL);
}

void vulkan_timing_begin(struct vulkan *v, VkCommandBuffer cmd)
{
    v->n_stamps = 0;
    if (v->be.profile && v->stamps)
        vk.CmdResetQueryPool(cmd, v->stamps, 0, VULKAN_STAMPS);
}

void vulkan_stage(struct vulkan *v, int stage)
{
    VkCommandBuffer cmd = v->be.profile && v->stamps ? vulkan_cmd(v) : NULL;
    if (!cmd || v->n_stamps == VULKAN_STAMPS)
        return;
    v->stages[v->n_stamps] = (uint8_t)stage;
    vk.CmdWriteTimestamp(cmd, VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT, v->stamps,
                         (uint32_t)v->n_stamps++);
}

void vulkan_timing_end(struct vulkan *v)
{
    struct profile *p = v->be.profile;
    uint64_t at[VULKAN_STAMPS];
    if (!p || v->n_stamps < 2 || v->failed ||
        vk.GetQueryPoolResults(v->device, v->stamps, 0, (uint32_t)v->n_stamps, sizeof at, at,
                               sizeof *at, VK_QUERY_RESULT_64_BIT) != VK_SUCCESS)
        return;
    for (int i = 0; i + 1 < v->n_stamps; i++)
        p->ns[p->phase][v->stages[i]] += (double)(at[i + 1] - at[i]) * (double)v->tick_ns;
    v->n_stamps = 0;
}
