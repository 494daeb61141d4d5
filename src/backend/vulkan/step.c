/*
 * The life of a step around its ops: begin lays the batch out in the step block of its flight; replay finds a recorded
 * command buffer; launch submits; end waits for the oldest flight.
 */
#include "backend/profile.h"
#include "backend/vulkan/vulkan.h"

#include <string.h>

static void mix(uint64_t *hash, uint64_t x)
{
    *hash = (*hash ^ x) * 0x9e3779b97f4a7c15u;
    *hash ^= *hash >> 29;
}

/* A bound of all sequences' lengths: a power of two, so that a recording serves many steps. */
static int reach_of(const struct batch *b)
{
    int reach = 128;
    for (int i = 0; i < b->n_seqs; i++)
        while (reach < b->kv_len[i] && reach < 1 << 30)
            reach *= 2;
    return reach;
}

/* A hash of all that a command buffer depends on beside the network. */
static uint64_t shape_of(const struct vulkan *v, const struct batch *b)
{
    uint64_t h = 1;
    mix(&h, (uint64_t)b->n_tokens);
    mix(&h, (uint64_t)b->n_seqs);
    mix(&h, (uint64_t)b->n_out);
    mix(&h, (uint64_t)v->reach);
    mix(&h, (uint64_t)(b->keep * 4 + (b->from != NULL) * 2 + (b->n_embeds > 0)));
    mix(&h, (uint64_t)v->loras.n_uses);
    mix(&h, v->loras.n_uses ? v->loras.epoch : 0);
    for (int i = 0; b->kv && i < v->net->n_layers; i++) {
        mix(&h, vulkan_address(b->kv[i].k));
        mix(&h, vulkan_address(b->kv[i].v));
        mix(&h, vulkan_address(b->kv[i].state));
    }
    return h;
}

struct vulkan_flight *vulkan_flight(struct vulkan *v)
{
    return &v->flights[(v->n_begun + 1) % 2];
}

static int put(const struct vulkan_flight *f, int *used, int word, const int32_t *from, int n)
{
    int32_t *to = f->step.host;
    int at = *used;
    CHECK((size_t)(at + n) * 4 <= f->step.size, "the step block is full");
    memcpy(to + at, from, (size_t)n * 4);
    to[word] = at;
    *used = at + n;
    return at;
}

/* Arrays begin at the same place in all steps of a shape. */
static void lay_out(struct vulkan *v, struct vulkan_flight *f, const struct batch *b)
{
    int32_t *to = f->step.host;
    int used = STEP_WORDS;
    put(f, &used, STEP_TOKENS, b->tokens, b->n_tokens);
    put(f, &used, STEP_POS, b->pos, b->n_tokens);
    put(f, &used, STEP_SLOT, b->slot, b->n_tokens);
    put(f, &used, STEP_KV_LEN, b->kv_len, b->n_seqs);
    put(f, &used, STEP_OUT_ROWS, b->out_rows, b->n_out);
    put(f, &used, STEP_Q_START, b->q_start, b->n_seqs + 1);
    if (b->state_in) {
        put(f, &used, STEP_STATE_IN, b->state_in, b->n_seqs);
        put(f, &used, STEP_STATE_OUT, b->state_out, b->n_seqs);
        put(f, &used, STEP_SAVE_ROWS, b->save_rows, b->n_seqs);
        put(f, &used, STEP_SAVE_STATE, b->save_state, b->n_seqs);
    }
    if (b->from)
        put(f, &used, STEP_FROM, b->from, b->n_tokens);
    vulkan_lora_put(v, to, &used);
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
        put(f, &used, STEP_ROPE_POS, b->rope_pos, 3 * b->n_tokens);
    to[STEP_HAS_SPANS] = b->spans != NULL;
    if (b->spans)
        put(f, &used, STEP_SPANS, b->spans, 2 * b->n_tokens);
    to[STEP_ROWS] = b->n_tokens;
    to[STEP_PAGE_STRIDE] = v->bounds.max_pages;
    to[STEP_PAGES] = used;
    for (int i = 0; i < b->n_seqs; i++) { /* as far as the sequence goes */
        int n = (b->kv_len[i] + v->bounds.page_len - 1) / v->bounds.page_len;
        memcpy(to + used + (size_t)i * (size_t)v->bounds.max_pages,
               b->pages + (size_t)i * (size_t)b->max_pages, (size_t)n * 4);
    }
    f->words = (size_t)used + (size_t)b->n_seqs * (size_t)v->bounds.max_pages;
    CHECK(f->words * 4 <= f->step.size, "the step block is full");
}

static void submit(struct vulkan *v);

/* The fence of a step that has none yet is signalled after all that is submitted now. */
static void close_flight(struct vulkan *v, struct vulkan_flight *f)
{
    if (f->fenced || v->failed)
        return;
    pthread_mutex_lock(&v->lock);
    f->fenced = vulkan_try(v, vk.QueueSubmit(v->queue, 0, NULL, f->fence), "a step");
    pthread_mutex_unlock(&v->lock);
}

static void wait_for(struct vulkan *v, VkFence fence)
{
    if (vulkan_try(v, vk.WaitForFences(v->device, 1, &fence, true, UINT64_MAX), "a step"))
        vulkan_try(v, vk.ResetFences(v->device, 1, &fence), "a step");
}

void vulkan_begin(struct backend *be, const struct batch *b)
{
    struct vulkan *v = vulkan_self(be);
    struct profile *p = be->profile;
    CHECK(v->n_begun - v->n_ended < 2, "three steps are in flight");
    CHECK(b->n_tokens <= v->bounds.max_tokens && b->n_seqs <= v->bounds.max_seqs &&
              b->n_out <= v->bounds.max_out && b->n_embeds <= v->bounds.max_embeds,
          "a step of %d rows, %d sequences, %d outputs, %d embeddings", b->n_tokens, b->n_seqs,
          b->n_out, b->n_embeds);
    if (v->n_begun != v->n_ended) {
        submit(v);
        close_flight(v, vulkan_flight(v));
    }
    v->n_begun++;
    struct vulkan_flight *f = vulkan_flight(v);
    v->batch = *b;
    v->replayed = v->narrow = v->angles = false;
    v->pending = NULL;
    v->bytes_at = v->bytes_of = 0;
    v->reach = reach_of(b);
    v->rows = b->n_tokens;
    vulkan_lora_begin(v);
    v->shape = shape_of(v, b);
    f->loaded = f->fenced = false;
    f->used = NULL;
    f->n_out = b->n_out;
    f->n_embeds = (size_t)b->n_embeds;
    lay_out(v, f, b);
    size_t width = (size_t)network_embed_width(v->net);
    for (int i = 0; i < b->n_embeds; i++)
        memcpy((float *)f->embeds.host + (size_t)i * width, b->embeds[i], width * sizeof(float));
    memset(f->sampled, 0, (size_t)b->n_out * sizeof *f->sampled);
    if (!p)
        return;
    p->phase = b->n_decode == b->n_seqs;
    p->steps[p->phase]++;
    p->tokens[p->phase] += b->n_tokens;
}

/* again: it may be submitted while it is in flight. */
static bool cmd_begin(struct vulkan *v, VkCommandBuffer cmd, bool again)
{
    const VkCommandBufferBeginInfo info = {
        .sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO,
        .flags = again ? VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT : 0};
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
    return true;
}

/* Waits for all that is submitted. */
static void idle(struct vulkan *v)
{
    if (v->failed)
        return;
    pthread_mutex_lock(&v->lock);
    bool ok = vulkan_try(v, vk.QueueSubmit(v->queue, 0, NULL, v->fence), "a step");
    pthread_mutex_unlock(&v->lock);
    if (ok)
        wait_for(v, v->fence);
}

VkCommandBuffer vulkan_cmd(struct vulkan *v)
{
    if (v->failed)
        return NULL;
    if (!v->cmd) {
        VkCommandBuffer cmd = vulkan_flight(v)->step_cmd;
        if (cmd_begin(v, cmd, false))
            vulkan_timing_begin(v, cmd);
    }
    return v->cmd;
}

void vulkan_forget_recordings(struct vulkan *v)
{
    for (int i = 0; i < VULKAN_RECORDINGS; i++)
        v->recordings[i].key = 0;
    v->keep = NULL;
}

/* The recording of this key and shape, or the slot that the next one takes: the oldest. */
static struct vulkan_recording *recording_slot(struct vulkan *v, uint64_t key)
{
    for (int i = 0; i < VULKAN_RECORDINGS; i++)
        if (v->recordings[i].key == key && v->recordings[i].shape == v->shape)
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
    struct vulkan_flight *f = vulkan_flight(v);
    if (r->key == key && r->shape == v->shape) {
        v->cmd = r->cmd;
        f->used = r;
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
    if (v->n_begun - v->n_ended == 2 && v->flights[v->n_ended % 2].used == r)
        idle(v); /* the step before replays it */
    if (cmd_begin(v, r->cmd, true)) {
        f->used = r;
        be->n_recorded++;
        r->shape = v->shape;
        v->keep = r;
        v->keep->key = key;
    }
    return false;
}

/* The commands that copy a step's block to the device, before its network's. */
static VkCommandBuffer load(struct vulkan *v, struct vulkan_flight *f)
{
    const VkCommandBufferBeginInfo info = {.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO};
    const VkMemoryBarrier barrier = {
        .sType = VK_STRUCTURE_TYPE_MEMORY_BARRIER,
        .srcAccessMask = VK_ACCESS_HOST_WRITE_BIT | VK_ACCESS_TRANSFER_WRITE_BIT,
        .dstAccessMask = VK_ACCESS_TRANSFER_READ_BIT | VK_ACCESS_TRANSFER_WRITE_BIT};
    size_t given = f->n_embeds * (size_t)network_embed_width(v->net) * sizeof(float);
    if (!vulkan_try(v, vk.BeginCommandBuffer(f->load_cmd, &info), "a step"))
        return NULL;
    vk.CmdPipelineBarrier(f->load_cmd,
                          VK_PIPELINE_STAGE_HOST_BIT | VK_PIPELINE_STAGE_TRANSFER_BIT |
                              VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT,
                          VK_PIPELINE_STAGE_TRANSFER_BIT, 0, 1, &barrier, 0, NULL, 0, NULL);
    vulkan_copy_from(v, f->load_cmd, &f->step, v->s.step, f->words * 4);
    if (given)
        vulkan_copy_from(v, f->load_cmd, &f->embeds, v->s.embeds, given);
    return vulkan_try(v, vk.EndCommandBuffer(f->load_cmd), "a step") ? f->load_cmd : NULL;
}

/* Ends a command buffer whose results the host reads. */
static void cmd_end(struct vulkan *v, VkCommandBuffer cmd)
{
    const VkMemoryBarrier barrier = {.sType = VK_STRUCTURE_TYPE_MEMORY_BARRIER,
                                     .srcAccessMask =
                                         VK_ACCESS_SHADER_WRITE_BIT | VK_ACCESS_TRANSFER_WRITE_BIT,
                                     .dstAccessMask = VK_ACCESS_HOST_READ_BIT};
    vk.CmdPipelineBarrier(cmd,
                          VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT | VK_PIPELINE_STAGE_TRANSFER_BIT,
                          VK_PIPELINE_STAGE_HOST_BIT, 0, 1, &barrier, 0, NULL, 0, NULL);
    vulkan_try(v, vk.EndCommandBuffer(cmd), "a step");
}

static bool send(struct vulkan *v, const VkCommandBuffer *list, uint32_t n, VkFence fence)
{
    const VkSubmitInfo info = {
        .sType = VK_STRUCTURE_TYPE_SUBMIT_INFO, .commandBufferCount = n, .pCommandBuffers = list};
    if (v->failed)
        return false;
    pthread_mutex_lock(&v->lock);
    bool ok = vulkan_try(v, vk.QueueSubmit(v->queue, 1, &info, fence), "a step");
    pthread_mutex_unlock(&v->lock);
    return ok;
}

/* Submits what is recorded of the step begun last. */
static void submit(struct vulkan *v)
{
    if (!v->replayed)
        vulkan_settle(v);
    VkCommandBuffer cmd = v->cmd, list[2];
    if (!cmd || v->failed)
        return;
    struct vulkan_flight *f = vulkan_flight(v);
    uint32_t n = 0;
    if (!v->replayed) {
        vulkan_stage(v, STAGE_OTHER);
        cmd_end(v, cmd);
    }
    if (!f->loaded)
        list[n++] = load(v, f);
    list[n++] = cmd;
    f->loaded = send(v, list, n, VK_NULL_HANDLE);
    v->cmd = NULL;
    v->keep = NULL;
    v->dirty = false;
}

void vulkan_flush(struct vulkan *v)
{
    if (v->keep)
        v->keep->key = 0; /* it would be half a step */
    submit(v);
    idle(v);
}

bool vulkan_tail_begin(struct vulkan *v)
{
    submit(v);
    return !v->failed && cmd_begin(v, vulkan_flight(v)->tail_cmd, false);
}

void vulkan_tail_submit(struct vulkan *v)
{
    struct vulkan_flight *f = vulkan_flight(v);
    VkCommandBuffer cmd = v->cmd;
    v->cmd = NULL;
    v->dirty = false;
    cmd_end(v, cmd);
    f->fenced = send(v, &cmd, 1, f->fence);
}

/* A network without head.w ends in vectors, which the host reads while the next step runs. */
static void copy_vectors(struct vulkan *v)
{
    struct vulkan_flight *f = vulkan_flight(v);
    size_t bytes = (size_t)f->n_out * (size_t)vulkan_logits_width(v) * sizeof(float);
    if (!f->vectors.size || !bytes || f->fenced || v->net->n_mergers || !vulkan_tail_begin(v))
        return;
    vulkan_copy_to(v, v->cmd, v->s.logits, &f->vectors, bytes);
    vulkan_tail_submit(v);
}

void vulkan_launch(struct backend *be)
{
    struct vulkan *v = vulkan_self(be);
    submit(v);
    copy_vectors(v);
}

bool vulkan_end(struct backend *be, int32_t *tokens, struct error *err)
{
    struct vulkan *v = vulkan_self(be);
    CHECK(v->n_begun != v->n_ended, "no step is in flight");
    struct vulkan_flight *f = &v->flights[v->n_ended % 2];
    if (v->n_ended + 1 == v->n_begun)
        vulkan_launch(be);
    close_flight(v, f);
    if (f->fenced)
        wait_for(v, f->fence);
    v->n_ended++;
    vulkan_timing_end(v);
    if (v->failed) {
        vulkan_forget_recordings(v);
        if (err)
            *err = v->error;
    }
    for (int i = 0; tokens && i < f->n_out; i++)
        tokens[i] = v->failed ? -1 : vulkan_token(f, i);
    return !v->failed;
}

void vulkan_logits(struct backend *be, int row, float *host)
{
    struct vulkan *v = vulkan_self(be);
    size_t width = (size_t)vulkan_logits_width(v);
    const struct vulkan_flight *f = &v->flights[(v->n_ended + 1) % 2];
    if (f->vectors.size)
        memcpy(host, (const float *)f->vectors.host + (size_t)row * width, width * sizeof *host);
    else
        vulkan_copy_out(be, host, (void *)(uintptr_t)(v->s.logits + 4 * (uint64_t)row * width),
                        width * sizeof *host);
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
    vulkan_copy_in(be, (void *)(uintptr_t)v->s.logits, host,
                   (size_t)rows * (size_t)vulkan_logits_width(v) * sizeof *host);
}

const struct stream_ops vulkan_stream = {
    .put = stream_put, .get = stream_get, .put_logits = put_logits};
