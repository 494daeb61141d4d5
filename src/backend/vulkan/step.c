/*
 * The life of a step around its ops: begin lays the batch out in the step block; replay finds a recorded command buffer;
 * launch submits; end waits. Sampling reads the logits on the host.
 */
#include "backend/profile.h"
#include "backend/vulkan/vulkan.h"
#include "sample/sampler.h"

#include <string.h>

static void mix(uint64_t *hash, uint64_t x)
{
    *hash = (*hash ^ x) * 0x9e3779b97f4a7c15u;
    *hash ^= *hash >> 29;
}

/* A hash of all that a command buffer depends on beside the network. */
static uint64_t shape_of(const struct vulkan *v, const struct batch *b)
{
    uint64_t h = 1;
    mix(&h, (uint64_t)b->n_tokens);
    mix(&h, (uint64_t)b->n_seqs);
    mix(&h, (uint64_t)b->n_out);
    mix(&h, (uint64_t)(b->keep * 2 + (b->n_embeds > 0)));
    for (int i = 0; b->kv && i < v->net->n_layers; i++) {
        mix(&h, vulkan_address(b->kv[i].k));
        mix(&h, vulkan_address(b->kv[i].v));
        mix(&h, vulkan_address(b->kv[i].state));
    }
    return h;
}

static int put(struct vulkan *v, int *used, int word, const int32_t *from, int n)
{
    int32_t *to = v->step.host;
    int at = *used;
    CHECK((size_t)(at + n) * 4 <= v->step.size, "the step block is full");
    memcpy(to + at, from, (size_t)n * 4);
    to[word] = at;
    *used = at + n;
    return at;
}

/* Arrays begin at the same place in all steps of a shape. */
static void lay_out(struct vulkan *v, const struct batch *b)
{
    int32_t *to = v->step.host;
    int used = STEP_WORDS;
    put(v, &used, STEP_TOKENS, b->tokens, b->n_tokens);
    put(v, &used, STEP_POS, b->pos, b->n_tokens);
    put(v, &used, STEP_SLOT, b->slot, b->n_tokens);
    put(v, &used, STEP_KV_LEN, b->kv_len, b->n_seqs);
    put(v, &used, STEP_OUT_ROWS, b->out_rows, b->n_out);
    put(v, &used, STEP_Q_START, b->q_start, b->n_seqs + 1);
    if (b->state_in) {
        put(v, &used, STEP_STATE_IN, b->state_in, b->n_seqs);
        put(v, &used, STEP_STATE_OUT, b->state_out, b->n_seqs);
        put(v, &used, STEP_SAVE_ROWS, b->save_rows, b->n_seqs);
        put(v, &used, STEP_SAVE_STATE, b->save_state, b->n_seqs);
    }
    to[STEP_SEQ] = used;
    for (int i = 0; i < b->n_seqs; i++)
        for (int t = b->q_start[i]; t < b->q_start[i + 1]; t++)
            to[used + t] = i;
    used += b->n_tokens;
    to[STEP_TYPES] = used;
    for (int t = 0; t < b->n_tokens; t++)
        to[used + t] = b->types ? b->types[t] : 0;
    used += b->n_tokens;
    to[STEP_HAS_ROPE_POS] = b->rope_pos != NULL;
    if (b->rope_pos)
        put(v, &used, STEP_ROPE_POS, b->rope_pos, 3 * b->n_tokens);
    to[STEP_HAS_SPANS] = b->spans != NULL;
    if (b->spans)
        put(v, &used, STEP_SPANS, b->spans, 2 * b->n_tokens);
    to[STEP_ROWS] = b->n_tokens;
    to[STEP_PAGE_STRIDE] = v->bounds.max_pages;
    to[STEP_PAGES] = used;
    for (int i = 0; i < b->n_seqs; i++) { /* as far as the sequence goes */
        int n = (b->kv_len[i] + v->bounds.page_len - 1) / v->bounds.page_len;
        memcpy(to + used + (size_t)i * (size_t)v->bounds.max_pages,
               b->pages + (size_t)i * (size_t)b->max_pages, (size_t)n * 4);
    }
}

void vulkan_begin(struct backend *be, const struct batch *b)
{
    struct vulkan *v = vulkan_self(be);
    struct profile *p = be->profile;
    CHECK(!v->begun, "two steps are in flight");
    CHECK(b->n_tokens <= v->bounds.max_tokens && b->n_seqs <= v->bounds.max_seqs &&
              b->n_out <= v->bounds.max_out && b->n_embeds <= v->bounds.max_embeds,
          "a step of %d rows, %d sequences, %d outputs, %d embeddings", b->n_tokens, b->n_seqs,
          b->n_out, b->n_embeds);
    v->begun = true;
    v->batch = *b;
    v->replayed = v->narrow = v->angles = false;
    v->pending = NULL;
    v->rows = b->n_tokens;
    v->shape = shape_of(v, b);
    lay_out(v, b);
    size_t width = (size_t)network_embed_width(v->net);
    for (int i = 0; i < b->n_embeds; i++)
        memcpy((float *)v->embeds.host + (size_t)i * width, b->embeds[i], width * sizeof(float));
    for (int i = 0; i < b->n_out; i++)
        v->sampled[i] = -1;
    if (!p)
        return;
    p->phase = b->n_decode == b->n_seqs;
    p->steps[p->phase]++;
    p->tokens[p->phase] += b->n_tokens;
}

static bool cmd_begin(struct vulkan *v, VkCommandBuffer cmd)
{
    const VkCommandBufferBeginInfo info = {.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO};
    /* What copies, the host and the step before wrote. */
    const VkMemoryBarrier barrier = {
        .sType = VK_STRUCTURE_TYPE_MEMORY_BARRIER,
        .srcAccessMask =
            VK_ACCESS_TRANSFER_WRITE_BIT | VK_ACCESS_SHADER_WRITE_BIT | VK_ACCESS_HOST_WRITE_BIT,
        .dstAccessMask = VK_ACCESS_SHADER_READ_BIT | VK_ACCESS_SHADER_WRITE_BIT};
    if (!vulkan_try(v, vk.BeginCommandBuffer(cmd, &info), "a step"))
        return false;
    vk.CmdPipelineBarrier(cmd,
                          VK_PIPELINE_STAGE_TRANSFER_BIT | VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT |
                              VK_PIPELINE_STAGE_HOST_BIT,
                          VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, 0, 1, &barrier, 0, NULL, 0, NULL);
    v->cmd = cmd;
    v->dirty = false;
    vulkan_timing_begin(v, cmd);
    return true;
}

VkCommandBuffer vulkan_cmd(struct vulkan *v)
{
    if (v->failed)
        return NULL;
    if (!v->cmd)
        cmd_begin(v, v->step_cmd);
    return v->cmd;
}

void vulkan_forget_recordings(struct vulkan *v)
{
    for (int i = 0; i < VULKAN_RECORDINGS; i++)
        v->recordings[i].key = 0;
    v->keep = NULL;
}

/* The slot that the next recording takes: one of the same key, or the oldest. */
static struct vulkan_recording *recording_slot(struct vulkan *v, uint64_t key)
{
    for (int i = 0; i < VULKAN_RECORDINGS; i++)
        if (v->recordings[i].key == key)
            return &v->recordings[i];
    return &v->recordings[v->next_recording++ % VULKAN_RECORDINGS];
}

bool vulkan_replay(struct backend *be, uint64_t key)
{
    struct vulkan *v = vulkan_self(be);
    struct vulkan_recording *r = recording_slot(v, key);
    if (v->failed || be->profile)
        return false; /* a profile's steps differ in their timestamps */
    if (v->cmd)
        vulkan_flush(v);
    if (r->key == key && r->shape == v->shape) {
        v->cmd = r->cmd;
        v->replayed = true;
        return true;
    }
    const VkCommandBufferAllocateInfo info = {.sType =
                                                  VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO,
                                              .commandPool = v->pool,
                                              .level = VK_COMMAND_BUFFER_LEVEL_PRIMARY,
                                              .commandBufferCount = 1};
    if (!r->cmd &&
        !vulkan_try(v, vk.AllocateCommandBuffers(v->device, &info, &r->cmd), "a command buffer"))
        return false;
    r->key = 0;
    if (cmd_begin(v, r->cmd)) {
        r->shape = v->shape;
        v->keep = r;
        v->keep->key = key;
    }
    return false;
}

static void submit(struct vulkan *v)
{
    const VkMemoryBarrier barrier = {.sType = VK_STRUCTURE_TYPE_MEMORY_BARRIER,
                                     .srcAccessMask =
                                         VK_ACCESS_SHADER_WRITE_BIT | VK_ACCESS_TRANSFER_WRITE_BIT,
                                     .dstAccessMask = VK_ACCESS_HOST_READ_BIT};
    if (!v->replayed)
        vulkan_settle(v);
    if (!v->cmd || v->failed)
        return;
    if (!v->replayed) {
        vulkan_stage(v, STAGE_OTHER);
        vk.CmdPipelineBarrier(v->cmd,
                              VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT | VK_PIPELINE_STAGE_TRANSFER_BIT,
                              VK_PIPELINE_STAGE_HOST_BIT, 0, 1, &barrier, 0, NULL, 0, NULL);
        vulkan_try(v, vk.EndCommandBuffer(v->cmd), "a step");
    }
    const VkSubmitInfo info = {.sType = VK_STRUCTURE_TYPE_SUBMIT_INFO,
                               .commandBufferCount = 1,
                               .pCommandBuffers = &v->cmd};
    if (!v->failed) {
        pthread_mutex_lock(&v->lock);
        v->in_flight = vulkan_try(v, vk.QueueSubmit(v->queue, 1, &info, v->fence), "a step");
        pthread_mutex_unlock(&v->lock);
    }
    v->cmd = NULL;
    v->keep = NULL;
    v->dirty = false;
}

static void wait(struct vulkan *v)
{
    if (v->in_flight &&
        vulkan_try(v, vk.WaitForFences(v->device, 1, &v->fence, true, UINT64_MAX), "a step"))
        vulkan_try(v, vk.ResetFences(v->device, 1, &v->fence), "a step");
    v->in_flight = false;
}

void vulkan_flush(struct vulkan *v)
{
    if (v->keep)
        v->keep->key = 0; /* it would be half a step */
    submit(v);
    wait(v);
}

void vulkan_launch(struct backend *be)
{
    submit(vulkan_self(be));
}

bool vulkan_end(struct backend *be, int32_t *tokens, struct error *err)
{
    struct vulkan *v = vulkan_self(be);
    submit(v);
    wait(v);
    vulkan_timing_end(v);
    v->begun = false;
    if (v->failed) {
        vulkan_forget_recordings(v);
        if (err)
            *err = v->error;
    }
    if (tokens)
        memcpy(tokens, v->sampled, (size_t)v->batch.n_out * sizeof *tokens);
    return !v->failed;
}

static float *logits_row(struct vulkan *v, int row)
{
    return (float *)v->logits.host + (size_t)row * (size_t)vulkan_logits_width(v);
}

void vulkan_sample(struct backend *be, struct sampler *const *samplers)
{
    struct vulkan *v = vulkan_self(be);
    submit(v);
    wait(v);
    for (int i = 0; i < v->batch.n_out && !v->failed; i++)
        if (samplers[i])
            v->sampled[i] = sampler_pick(samplers[i], logits_row(v, i), &v->told[i]);
}

void vulkan_probs(struct backend *be, int row, struct sample_probs *out)
{
    *out = vulkan_self(be)->told[row];
}

void vulkan_logits(struct backend *be, int row, float *host)
{
    struct vulkan *v = vulkan_self(be);
    memcpy(host, logits_row(v, row), (size_t)vulkan_logits_width(v) * sizeof *host);
}

static void stream_put(struct backend *be, const float *host, int rows)
{
    struct vulkan *v = vulkan_self(be);
    size_t width = (size_t)v->net->n_embd;
    CHECK(rows <= v->bounds.max_tokens, "%d rows", rows);
    vulkan_flush(v);
    v->pending = NULL;
    for (int i = 0; i < rows; i++)
        vulkan_copy_in(be, (void *)(uintptr_t)(v->s.x + 4 * (uint64_t)i * v->s.ld_x),
                       host + (size_t)i * width, width * sizeof(float));
    v->rows = rows;
    v->narrow = false;
}

static void stream_get(struct backend *be, float *host, int rows)
{
    struct vulkan *v = vulkan_self(be);
    size_t width = (size_t)v->net->n_embd;
    vulkan_flush(v);
    for (int i = 0; i < rows; i++)
        vulkan_copy_out(be, host + (size_t)i * width,
                        (void *)(uintptr_t)(v->s.x + 4 * (uint64_t)i * v->s.ld_x),
                        width * sizeof(float));
}

static void put_logits(struct backend *be, const float *host, int rows)
{
    struct vulkan *v = vulkan_self(be);
    memcpy(v->logits.host, host, (size_t)rows * (size_t)vulkan_logits_width(v) * sizeof *host);
}

const struct stream_ops vulkan_stream = {
    .put = stream_put, .get = stream_get, .put_logits = put_logits};
