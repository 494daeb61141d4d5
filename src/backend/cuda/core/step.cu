/*
 * The life of a step around its ops: begin lays the batch out in the step block and copies it to
 * the device; replay and record keep decode steps as CUDA graphs; end waits and returns tokens.
 * Owns the step block, the recorded graphs and the profile's events. Its kernels load the block
 * with the cos and sin of the step's positions, and gather the rows that need logits.
 */
#include "backend/cuda/mixers/mixers.h"
#include "backend/cuda/moe/offload.h"
#include "backend/cuda/heads/mtp.h"
#include "backend/cuda/vision/tower.h"

extern "C" {
#include "base/mem.h"
}

#include <math.h>
#include <string.h>

/* Copies the step's ints from pinned host memory and computes cos and sin of every row's position,
 * once per step instead of once per layer. Clears the router's sums. */
static __global__ void step_load_kernel(const int32_t *host, int32_t *dev, int n_ints,
                                        int tokens_at, const int32_t *chosen, int pos_at,
                                        int rope_pos_at, int n_tokens,
                                        const __grid_constant__ struct rope_tables ropes,
                                        int max_tokens, const float *freq, const uint8_t *plane,
                                        float2 *rope, uint64_t *sums)
{
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x), stride = (int)(gridDim.x * blockDim.x);
    for (int j = i; j < n_ints; j += stride) {
        int32_t v = host[j];
        if (v < 0 && j >= tokens_at && j < tokens_at + n_tokens)
            v = chosen[-1 - v]; /* not yet known to the host when the step was begun */
        dev[j] = v;
    }
    for (int r = 0; r < ropes.n; r++) {
        int half = ropes.of[r].half, at = ropes.of[r].at;
        float mscale = ropes.of[r].mscale;
        float2 *to = rope + (size_t)max_tokens * (size_t)at;
        for (int j = i; j < n_tokens * half; j += stride) {
            int row = j / half, k = at + j % half;
            int pos = host[ropes.of[r].planes ? rope_pos_at + 3 * row + plane[k] : pos_at + row];
            float angle = (float)pos * freq[k], s, c;
            sincosf(angle, &s, &c);
            to[j] = make_float2(c * mscale, s * mscale);
        }
    }
    for (int j = i; j < SUM_WORDS; j += stride)
        sums[j] = 0;
}

static void step_load(struct cuda_backend *cu, int n_ints)
{
    const struct step_layout *l = &cu->step.layout;
    int work = l->n_tokens * cu->rope.tables.pairs;
    work = work > n_ints ? work : n_ints;
    int blocks = ceil_div(work, 256);
    cuda_log_step(cu);
    cuda_launch(cu, step_load_kernel, dim3((unsigned)(blocks < 256 ? blocks : 256)), 256, 0,
                LAUNCH_PLAIN, cu->step.mapped, cu->step.dev, n_ints, l->tokens, cu->sampling.chosen,
                l->pos, l->rope_pos, l->n_tokens, cu->rope.tables, cu->shape.max_tokens,
                cu->rope.freq, cu->rope.plane, cu->rope.cos_sin, cu->routing.sums);
}

static __global__ void step_gather_kernel(const float *src, const int32_t *rows, float *dst,
                                          int width)
{
    dependency_wait();
    dependency_trigger();
    int k = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (k < width)
        dst[(size_t)blockIdx.y * (size_t)width + (size_t)k] =
            src[(size_t)rows[blockIdx.y] * (size_t)width + (size_t)k];
}

void step_gather(struct cuda_backend *cu, const struct step *s, const float *src, float *dst,
                 int width)
{
    if (s->n_out)
        cuda_launch(cu, step_gather_kernel,
                    dim3((unsigned)ceil_div(width, 256), (unsigned)s->n_out), 256, 0, LAUNCH_EARLY,
                    src, s->out_rows, dst, width);
}

struct step cuda_step(const struct cuda_backend *cu)
{
    const struct step_layout *l = &cu->step.layout;
    const int32_t *d = cu->step.dev;
    struct step s = {d,
                     d + l->tokens,
                     d + l->pos,
                     d + l->slot,
                     d + l->q_start,
                     d + l->kv_len,
                     d + l->seq_of,
                     d + l->out_rows,
                     d + l->pages,
                     NULL,
                     l->n_tokens,
                     l->n_seqs,
                     l->n_decode,
                     l->n_out,
                     d + l->states,
                     d + l->types};
    return s;
}

const float2 *step_rope(const struct cuda_backend *cu, const struct rope *rope)
{
    if (!rope)
        return NULL;
    int at = cu->rope.tables.of[rope - cu->net->ropes].at;
    return cu->rope.cos_sin + (size_t)cu->shape.max_tokens * (size_t)at;
}

static int copy_ints(struct cuda_backend *cu, int *used, const int32_t *src, int n)
{
    int at = *used;
    CHECK((size_t)(at + n) <= cu->step.capacity, "the step block is full");
    memcpy(cu->step.host + at, src, (size_t)n * 4);
    *used = (at + n + 3) & ~3;
    return at;
}

/* The sequence of each row, and the tiles of 64 rows of prompts (encoders: of all sequences). */
static int layout_rows(struct cuda_backend *cu, const struct batch *b, int used)
{
    struct step_layout *l = &cu->step.layout;
    l->seq_of = used;
    for (int i = 0; i < b->n_seqs; i++)
        for (int t = b->q_start[i]; t < b->q_start[i + 1]; t++)
            cu->step.host[l->seq_of + t] = i;
    l->q_tiles = used = (used + b->n_tokens + 3) & ~3;
    for (int i = encoder_bidirectional(cu->net) ? 0 : l->n_decode; i < b->n_seqs; i++)
        for (int t = b->q_start[i]; t < b->q_start[i + 1]; t += 64) {
            cu->step.host[used++] = i;
            cu->step.host[used++] = t;
            l->n_q_tiles++;
        }
    return (used + 3) & ~3;
}

/* The page table, as wide as the longest sequence. */
static int layout_pages(struct cuda_backend *cu, const struct batch *b, int used)
{
    struct step_layout *l = &cu->step.layout;
    int stride = 1;
    l->pages = used;
    for (int i = 0; i < b->n_seqs; i++) {
        l->deep |= (i < l->n_decode || mtp_of(cu)->stride) && pick_deep(b->kv_len[i]);
        l->beyond |= cu->shape.limit && (cu->exact || b->kv_len[i] > cu->shape.limit);
        int n = ceil_div(b->kv_len[i], cu->shape.page_len);
        stride = n > stride ? n : stride;
    }
    stride = mtp_stride(cu, stride, b->max_pages);
    for (int i = 0; i < b->n_seqs; i++)
        memcpy(cu->step.host + used + (size_t)i * (size_t)stride,
               b->pages + (size_t)i * (size_t)b->max_pages, (size_t)stride * 4);
    cu->step.host[STEP_PAGE_STRIDE] = stride;
    return used + b->n_seqs * stride;
}

/* Slots of recurrent states, if a layer has one. */
static int layout_states(struct cuda_backend *cu, const struct batch *b, int used)
{
    const int32_t *list[] = {b->state_in, b->state_out, b->save_rows, b->save_state};
    cu->step.layout.states = used;
    for (int i = 0; i < 4 && b->state_in; i++, used += b->n_seqs)
        memcpy(cu->step.host + used, list[i], (size_t)b->n_seqs * 4);
    return (used + 3) & ~3;
}

/* Token types, if the network embeds them; zeros if the batch has none. */
static int layout_types(struct cuda_backend *cu, const struct batch *b, int used)
{
    cu->step.layout.types = used;
    if (!cu->net->embed.types)
        return used;
    if (b->types)
        memcpy(cu->step.host + used, b->types, (size_t)b->n_tokens * 4);
    else
        memset(cu->step.host + used, 0, (size_t)b->n_tokens * 4);
    return (used + b->n_tokens + 3) & ~3;
}

/* Positions of M-RoPE, if a table has planes, whether or not the batch has them. */
static int layout_rope_pos(struct cuda_backend *cu, const struct batch *b, int used)
{
    cu->step.layout.rope_pos = used;
    if (!cu->rope.tables.planes)
        return used;
    for (int i = 0; i < 3 * b->n_tokens; i++)
        cu->step.host[used + i] = b->rope_pos ? b->rope_pos[i] : b->pos[i / 3];
    return (used + 3 * b->n_tokens + 3) & ~3;
}

int step_put_rows(struct cuda_backend *cu, const void *const *rows, int n, size_t bytes, void *copy,
                  const void *mapped, int used)
{
    for (int i = 0; i < n; i++) {
        const void *row = rows[i];
        if (row && !cuda_is_pinned(row, bytes)) {
            memcpy((uint8_t *)copy + (size_t)i * bytes, row, bytes);
            row = (const uint8_t *)mapped + (size_t)i * bytes;
        }
        memcpy(cu->step.host + used + 2 * i, &row, sizeof row);
    }
    return (used + 2 * n + 3) & ~3;
}

static int layout_embeds(struct cuda_backend *cu, const struct batch *b, int turn, int used)
{
    struct step_layout *l = &cu->step.layout;
    int width = b->pixels ? cu->shape.n_embd : network_embed_width(cu->net);
    l->n_embeds = b->n_embeds;
    l->embeds = used;
    used = step_put_rows(cu, (const void *const *)b->embeds, b->n_embeds,
                         (size_t)width * sizeof(float), cu->step.embeds_hosts[turn],
                         cu->step.embeds_mappeds[turn], used);
    return b->pixels ? tower_put_pixels(cu, b, used) : used;
}

/* Lays the batch out in the step block. Returns the number of ints used. */
static int layout_batch(struct cuda_backend *cu, const struct batch *b, int turn)
{
    struct step_layout *l = &cu->step.layout;
    int used = STEP_HEAD;
    memset(l, 0, sizeof *l);
    l->n_tokens = b->n_tokens;
    l->n_seqs = b->n_seqs;
    l->exact = cu->exact;
    l->decodes = b->n_decode == b->n_seqs;
    l->n_decode = cu->exact ? 0 : b->n_decode;
    l->n_out = b->n_out;
    l->out_is_all = b->n_out == b->n_tokens; /* out_rows is ascending, so it has all rows */
    l->tokens = copy_ints(cu, &used, b->tokens, b->n_tokens);
    l->pos = copy_ints(cu, &used, b->pos, b->n_tokens);
    l->slot = copy_ints(cu, &used, b->slot, b->n_tokens);
    l->q_start = copy_ints(cu, &used, b->q_start, b->n_seqs + 1);
    l->kv_len = copy_ints(cu, &used, b->kv_len, b->n_seqs);
    l->out_rows = copy_ints(cu, &used, b->out_rows, b->n_out);
    used = mtp_put(cu, b, layout_types(cu, b, layout_states(cu, b, used)));
    used = layout_rope_pos(cu, b, lora_put(cu, b, used));
    used = layout_embeds(cu, b, turn, tower_put(cu, b, used));
    used = mtp_put_pages(cu, b, layout_pages(cu, b, layout_rows(cu, b, used)));
    CHECK((size_t)used <= cu->step.capacity, "the step block is full");
    cu->step.host[STEP_INTS] = used;
    return used;
}

void cuda_begin(struct backend *be, const struct batch *b)
{
    struct cuda_backend *cu = cuda_self(be);
    struct profile *profile = be->profile;
    CHECK(b->n_tokens <= cu->shape.max_tokens && b->n_seqs <= cu->shape.max_seqs &&
              b->n_out <= cu->shape.max_out && b->n_embeds <= cu->shape.max_embeds,
          "a step of %d rows, %d sequences, %d outputs, %d embeddings", b->n_tokens, b->n_seqs,
          b->n_out, b->n_embeds);
    cuda_enter(cu);
    CHECK(cu->queue.n_begun - cu->queue.n_ended < 2, "two steps are under way");
    int turn = (int)(cu->queue.n_begun++ % 2);
    offload_begin(cu);
    struct step_flight *f = &cu->queue.steps[turn];
    f->n_out = b->n_out;
    memset(f->chosen, 0, (size_t)b->n_out * sizeof *f->chosen);
    f->launched = false;
    cu->step.host = cu->step.hosts[turn];
    cu->step.mapped = cu->step.mappeds[turn];
    cu->routing.n_summed = 0;
    cu->timing.n = 0;
    if (profile) {
        profile->phase = b->n_decode == b->n_seqs;
        profile->steps[profile->phase]++;
        profile->tokens[profile->phase] += b->n_tokens;
    }
    cu->kv = b->kv;
    cu->exact = be->deterministic;
    memset(&cu->resid, 0, sizeof cu->resid);
    int n_ints = layout_batch(cu, b, turn);
    offload_stream_begin(cu);
    step_load(cu, n_ints);
    canary_begin(cu, b, turn);
}

/* What the launches of a recorded step depend on besides its key. */
struct layout_counts {
    int n[10];
};

static struct layout_counts counts_of(const struct step_layout *l)
{
    return {{l->n_tokens, l->n_seqs, l->n_decode, l->n_out, l->n_q_tiles, l->deep, l->beyond,
             l->n_embeds, l->decodes, l->exact}};
}

static bool same_layout(const struct step_layout *a, const struct step_layout *b)
{
    struct layout_counts x = counts_of(a), y = counts_of(b);
    return memcmp(&x, &y, sizeof x) == 0;
}

static uint64_t layout_hash(uint64_t key, const struct step_layout *l)
{
    struct layout_counts counts = counts_of(l);
    uint64_t hash = recordings_mix(1, key);
    for (int n : counts.n)
        hash = recordings_mix(hash, (uint64_t)n);
    return hash;
}

bool cuda_replay(struct backend *be, uint64_t key)
{
    struct cuda_backend *cu = cuda_self(be);
    if (be->profile) /* stages are timed op by op */
        return false;
    key = mtp_key(cu, lora_key(cu, key));
    int i = recordings_find(&cu->recording.kept, layout_hash(key, &cu->step.layout));
    struct step_graph *g = i >= 0 ? &cu->recording.graphs[i] : NULL;
    if (!g || g->key != key || !same_layout(&g->layout, &cu->step.layout))
        return false;
    cu->resid = g->resid;
    if (!cu->failed)
        CUDA_TRY(cu, cudaGraphLaunch(g->exec, cu->stream));
    return true;
}

/* Whether the launches depend on the step's counts alone. For prompts they depend on lengths
 * too. */
bool step_repeats(const struct cuda_backend *cu)
{
    if (cu->step.layout.n_embeds)
        return false;
    return cu->step.layout.decodes || mtp_of(cu)->stride;
}

void cuda_record(struct backend *be, uint64_t key)
{
    struct cuda_backend *cu = cuda_self(be);
    struct step_recording *r = &cu->recording;
    if (be->profile || cu->failed || !step_repeats(cu))
        return;
    key = mtp_key(cu, lora_key(cu, key));
    r->place =
        recordings_place(&r->kept, layout_hash(key, &cu->step.layout), cu->step.layout.n_seqs);
    if (r->place < 0 || !comm_record(cu))
        return;
    cudaError_t e = cudaStreamBeginCapture(cu->stream, cudaStreamCaptureModeThreadLocal);
    if (e != cudaSuccess)
        cuda_fail(cu, e, "the start of a recording");
    else
        r->key = key;
}

void cuda_forget_recordings(struct cuda_backend *cu)
{
    struct step_recording *r = &cu->recording;
    for (int i = 0; i < r->kept.n; i++)
        cudaGraphExecDestroy(r->graphs[i].exec);
    memset(&r->kept, 0, sizeof r->kept);
}

static void finish_recording(struct cuda_backend *cu)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    struct step_recording *r = &cu->recording;
    struct step_graph *g = &r->graphs[r->place];
    uint64_t key = r->key;
    r->key = 0;
    cudaError_t e = cudaStreamEndCapture(cu->stream, &graph);
    if (e == cudaSuccess && !cu->failed)
        e = cudaGraphInstantiate(&exec, graph, 0);
    if (e != cudaSuccess) {
        cuda_fail(cu, e, "the end of a recording");
    } else if (!cu->failed) {
        if (r->place < r->kept.n) /* it has not run for thousands of steps */
            cudaGraphExecDestroy(g->exec);
        *g = (struct step_graph){key, cu->step.layout, exec, cu->resid};
        recordings_add(&r->kept, r->place, layout_hash(key, &g->layout));
        cu->be->n_recorded++;
        CUDA_TRY(cu, cudaGraphLaunch(g->exec, cu->stream));
    }
    if (graph)
        cudaGraphDestroy(graph);
}

/* Profile: a pair of events around each op, read at the end of the step. */

void step_mark(struct cuda_backend *cu)
{
    if (!cu->be->profile || cu->timing.n == MAX_MARKS)
        return;
    if (cu->timing.n == cu->timing.n_created) {
        CUDA_TRY(cu,
                 cudaEventCreateWithFlags(&cu->timing.events[cu->timing.n].a, cudaEventDefault));
        CUDA_TRY(cu,
                 cudaEventCreateWithFlags(&cu->timing.events[cu->timing.n].b, cudaEventDefault));
        cu->timing.n_created++;
    }
    CUDA_TRY(cu, cudaEventRecord(cu->timing.events[cu->timing.n].a, cu->stream));
}

void step_mark_end(struct cuda_backend *cu, enum stage stage)
{
    if (!cu->be->profile || cu->timing.n == MAX_MARKS)
        return;
    cu->timing.events[cu->timing.n].stage = stage;
    CUDA_TRY(cu, cudaEventRecord(cu->timing.events[cu->timing.n].b, cu->stream));
    cu->timing.n++;
}

static void read_marks(struct cuda_backend *cu)
{
    struct profile *p = cu->be->profile;
    for (int i = 0; p && i < cu->timing.n; i++) {
        float ms = 0;
        CUDA_TRY(cu, cudaEventElapsedTime(&ms, cu->timing.events[i].a, cu->timing.events[i].b));
        p->ns[p->phase][cu->timing.events[i].stage] += (double)ms * 1e6;
    }
    cu->timing.n = 0;
}

void cuda_launch_step(struct backend *be)
{
    struct cuda_backend *cu = cuda_self(be);
    struct step_flight *f = &cu->queue.steps[(cu->queue.n_begun + 1) % 2]; /* the one begun last */
    if (f->launched)
        return;
    if (cu->recording.key)
        finish_recording(cu);
    if (!cu->net->head.w)
        encoder_send(cu, (int)(f - cu->queue.steps), f->n_out);
    CUDA_TRY(cu, cudaEventRecord(f->done, cu->stream));
    f->launched = true;
}

bool cuda_end(struct backend *be, int32_t *tokens, struct error *err)
{
    struct cuda_backend *cu = cuda_self(be);
    int turn = (int)(cu->queue.n_ended % 2);
    struct step_flight *f = &cu->queue.steps[turn];
    if (cu->queue.n_ended + 1 == cu->queue.n_begun)
        cuda_launch_step(be);
    cu->queue.n_ended++;
    comm_wait(cu, f->done);
    offload_end(cu);
    CUDA_TRY(cu, cudaGetLastError());
    read_marks(cu);
    canary_end(cu, turn);
    const int32_t *chosen = sample_tokens_of(cu, turn);
    for (int i = 0; i < f->n_out && tokens; i++)
        tokens[i] = f->chosen[i] && !cu->failed ? chosen[i] : -1;
    if (!comm_has_failed(cu))
        return true;
    if (err)
        *err = cu->error;
    return false;
}
