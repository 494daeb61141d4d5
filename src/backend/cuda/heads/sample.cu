/*
 * Sampling on the device: log-probabilities of the raw logits, masks and edits, then argmax or a
 * draw, with the arithmetic of sample/draw.c. Sampler settings are written to pinned host
 * memory, which the kernels read once. The launches are not part of a recorded step, because
 * settings may be written while the step's network already runs. A row that uses a setting no
 * kernel implements is sampled by the host.
 */
#include "backend/cuda/core/host.h"

extern "C" {
#include "base/mem.h"
#include "sample/sampler.h"
}

#include <math.h>

/* Greedy: the largest logit of each row; ties go to the lower index; NaN never wins. Grid:
 * (parts of a row, rows). The last block of a row to finish combines the parts. */
struct best {
    float value;
    int index;
};

DEVICE struct best better(struct best a, struct best b)
{
    bool take_b = b.value > a.value || (b.value == a.value && b.index < a.index);
    return take_b ? b : a;
}

DEVICE struct best block_best(struct best b, uint8_t *shared)
{
    struct best *part = (struct best *)shared;
    for (int i = 16; i; i >>= 1) {
        struct best o = {__shfl_xor_sync(FULL_WARP, b.value, i),
                         __shfl_xor_sync(FULL_WARP, b.index, i)};
        b = better(b, o);
    }
    __syncthreads();
    if (lane_id() == 0)
        part[warp_id()] = b;
    __syncthreads();
    for (int w = 0; w < (int)(blockDim.x >> 5); w++)
        b = better(b, part[w]);
    return b;
}

/*
 * Draws a token, in the block that combined a row. The list of candidates that sample/draw.c
 * builds is here a list in shared memory, in the same order, so that a seed gives the same token.
 * If there are more than DRAW_LIST candidates (a flat distribution and no small top-k), no list is
 * built: bisection finds a threshold, then a walk in vocabulary order finds the token.
 */
enum { DRAW_LIST = 1024, DRAW_THREADS = 256 };

struct draw_shared {
    double part[DRAW_THREADS / 32];
    int counts[DRAW_THREADS / 32];
    int n, token, pad[2];
    struct best list[DRAW_LIST]; /* sorted by logit; later `value` is the weight */
};

struct draw {
    const float *l; /* (n) */
    int n;
    float top, temp;
    struct draw_shared *sh;
};

DEVICE float weight_of(const struct draw *d, float logit)
{
    return expf((logit - d->top) / d->temp);
}

/* Calls f(logit, token) for the whole row, with all threads of the block at once, so f may use
 * warp votes. Several loads are in flight. Past the end f gets NaN. */
template <class F> DEVICE void for_each_logit(const struct draw *d, F f)
{
    const int batch = 4;
    const uint32_t none = 0x7fc00000u;
    if (d->n % 4 == 0) { /* every row is aligned to 16 bytes */
        int n = d->n / 4;
        for (int i0 = 0; i0 < n; i0 += batch * DRAW_THREADS) {
            uint4 v[batch];
#pragma unroll
            for (int u = 0; u < batch; u++) {
                int i = i0 + u * DRAW_THREADS + (int)threadIdx.x;
                v[u] =
                    i < n ? load_l2((const uint4 *)d->l + i) : make_uint4(none, none, none, none);
            }
#pragma unroll
            for (int u = 0; u < batch; u++) {
                int i = 4 * (i0 + u * DRAW_THREADS + (int)threadIdx.x);
                f(float_of(v[u].x), i);
                f(float_of(v[u].y), i + 1);
                f(float_of(v[u].z), i + 2);
                f(float_of(v[u].w), i + 3);
            }
        }
        return;
    }
    for (int i0 = 0; i0 < d->n; i0 += DRAW_THREADS) {
        int i = i0 + (int)threadIdx.x;
        f(i < d->n ? load_float_l2(d->l + i) : float_of(none), i);
    }
}

/* Counts the logits whose key is at least `key`, and sums their weights if `weigh`. */
DEVICE void tally(const struct draw *d, uint32_t key, bool weigh, int *count, double *mass)
{
    int c = 0;
    double m = 0;
    for_each_logit(d, [&](float v, int) {
        bool in = v == v && float_order(v) >= key;
        c += in;
        if (in && weigh)
            m += (double)weight_of(d, v);
    });
    for (int i = 16; i; i >>= 1) {
        c += __shfl_xor_sync(FULL_WARP, c, i);
        m += __shfl_xor_sync(FULL_WARP, m, i);
    }
    __syncthreads();
    if (lane_id() == 0) {
        d->sh->part[warp_id()] = m;
        d->sh->counts[warp_id()] = c;
    }
    __syncthreads();
    *count = 0;
    *mass = 0;
    for (int w = 0; w < DRAW_THREADS / 32; w++) {
        *count += d->sh->counts[w];
        *mass += d->sh->part[w];
    }
}

/* Collects tokens whose key is at least `key` in the list, as far as it has room. Returns how
 * many there are. */
DEVICE int collect(const struct draw *d, uint32_t key)
{
    struct draw_shared *sh = d->sh;
    __syncthreads();
    if (threadIdx.x == 0)
        sh->n = 0;
    __syncthreads();
    for_each_logit(d, [&](float v, int token) {
        bool in = v == v && float_order(v) >= key;
        uint32_t who = __ballot_sync(FULL_WARP, in);
        if (!who)
            return;
        int at = lane_id() == 0 ? atomicAdd(&sh->n, __popc(who)) : 0;
        at = __shfl_sync(FULL_WARP, at, 0) + __popc(who & ((1u << lane_id()) - 1));
        if (in && at < DRAW_LIST) {
            sh->list[at].value = v;
            sh->list[at].index = token;
        }
    });
    __syncthreads();
    return sh->n;
}

/* The largest key that at least `want` tokens reach, or (want 0) tokens of total weight `mass`.
 * With `want`, any key that leaves no more than DRAW_LIST tokens will do. */
DEVICE uint32_t raise_threshold(const struct draw *d, uint32_t key, int want, double mass)
{
    uint32_t end = float_order(d->top) +
                   1; /* bisection over [key, end): enough tokens reach key, too few reach end */
    while (end - key > 1) {
        uint32_t mid = key + (end - key) / 2;
        int count;
        double m;
        tally(d, mid, want == 0, &count, &m);
        if (want ? count >= want : m >= mass) {
            key = mid;
            if (want && count <= DRAW_LIST)
                break;
        } else {
            end = mid;
        }
    }
    return key;
}

/* Order: larger logits first (ties: the lower token), or by_index: lower tokens first. */
DEVICE bool ordered_before(struct best a, struct best b, bool by_index)
{
    if (by_index || a.value == b.value)
        return a.index < b.index;
    return a.value > b.value;
}

DEVICE void sort_list(struct draw_shared *sh, int n, bool by_index)
{
    int size = 1;
    while (size < n)
        size *= 2;
    for (int i = n + (int)threadIdx.x; i < size; i += DRAW_THREADS) {
        sh->list[i].value = -INFINITY;
        sh->list[i].index = 0x7fffffff;
    }
    for (int run = 2; run <= size; run *= 2)
        for (int gap = run / 2; gap; gap /= 2) {
            __syncthreads();
            for (int i = (int)threadIdx.x; i < size; i += DRAW_THREADS) {
                int o = i ^ gap;
                if (o < i) /* handled by the thread of o */
                    continue;
                struct best a = sh->list[i], b = sh->list[o];
                if (ordered_before(b, a, by_index) != ((i & run) == 0))
                    continue;
                sh->list[i] = b;
                sh->list[o] = a;
            }
        }
    __syncthreads();
}

/* Draws from the list: top-k, then top-p, then the draw. One thread sums in list order, as the
 * host does. */
DEVICE int draw_listed(const struct draw *d, const struct row_sampler *r, int n)
{
    struct draw_shared *sh = d->sh;
    bool cut = r->top_k > 0 && r->top_k < n;
    sort_list(sh, n, !cut && r->top_p >= 1.0f);
    n = cut ? r->top_k : n;
    for (int i = (int)threadIdx.x; i < n; i += DRAW_THREADS)
        sh->list[i].value = weight_of(d, sh->list[i].value);
    __syncthreads();
    if (threadIdx.x == 0) {
        double total = 0, sum = 0;
        for (int i = 0; i < n; i++)
            total += (double)sh->list[i].value;
        if (r->top_p < 1.0f) {
            int keep = 0;
            while (keep < n && sum < (double)r->top_p * total)
                sum += (double)sh->list[keep++].value;
            n = keep ? keep : 1;
            total = 0;
            for (int i = 0; i < n; i++)
                total += (double)sh->list[i].value;
        }
        double target = (double)r->uniform * total;
        int at = 0;
        for (sum = (double)sh->list[0].value; at < n - 1 && !(target < sum); at++)
            sum += (double)sh->list[at + 1].value;
        sh->token = sh->list[at].index;
    }
    __syncthreads();
    return sh->token;
}

/* Draws from all tokens whose key is at least `key`, in vocabulary order. Each warp sums the
 * weights of a part of the row; the warp in whose part the draw falls walks through it. */
DEVICE int draw_walking(const struct draw *d, uint32_t key, float uniform)
{
    const int warps = DRAW_THREADS / 32;
    struct draw_shared *sh = d->sh;
    int each = (d->n + warps * 32 - 1) / (warps * 32) * 32;
    int from = warp_id() * each, to = from + each < d->n ? from + each : d->n;
    double m = 0;
    for (int i = from + lane_id(); i < to; i += 32) {
        float v = load_float_l2(d->l + i);
        m += float_order(v) >= key && v == v ? (double)weight_of(d, v) : 0.0;
    }
    for (int i = 16; i; i >>= 1)
        m += __shfl_xor_sync(FULL_WARP, m, i);
    __syncthreads();
    if (lane_id() == 0)
        sh->part[warp_id()] = m;
    if (threadIdx.x == 0)
        sh->token = -1;
    __syncthreads();
    double total = 0;
    for (int w = 0; w < warps; w++)
        total += sh->part[w];
    double left = (double)uniform * total;
    int mine = 0, last = 0;
    for (int w = 0; w < warps; w++)
        last = sh->part[w] > 0 ? w : last;
    while (mine < last && left >= sh->part[mine])
        left -= sh->part[mine++];
    if (warp_id() == mine) {
        int found = -1, fallback = from;
        for (int i = from; i < to && found < 0; i += 32) {
            float v = i + lane_id() < to ? load_float_l2(d->l + i + lane_id()) : -INFINITY;
            bool in = i + lane_id() < to && float_order(v) >= key && v == v;
            double sum = in ? (double)weight_of(d, v) : 0.0;
            for (int k = 1; k < 32; k *= 2) {
                double o = __shfl_up_sync(FULL_WARP, sum, k);
                sum += lane_id() >= k ? o : 0.0;
            }
            uint32_t over = __ballot_sync(FULL_WARP, in && left < sum);
            uint32_t any = __ballot_sync(FULL_WARP, in);
            if (over)
                found = i + __ffs(over) - 1;
            fallback = any ? i + 31 - __clz((int)any) : fallback;
            left -= __shfl_sync(FULL_WARP, sum, 31);
        }
        if (lane_id() == 0) /* fallback: the two sums may differ in their last bits */
            sh->token = found >= 0 ? found : fallback;
    }
    __syncthreads();
    return sh->token;
}

DEVICE int draw_token(const float *l, int n, struct best top, const struct row_sampler *r,
                      struct draw_shared *sh)
{
    struct draw d = {l, n, top.value, r->temp, sh};
    if (!(top.value > -INFINITY && top.value < INFINITY))
        return top.index;
    uint32_t key = float_order(top.value + r->temp * logf(r->min_p > 1e-9f ? r->min_p : 1e-9f));
    int have = collect(&d, key);
    if (have > DRAW_LIST && r->top_k > 0 && r->top_k < have) {
        key = raise_threshold(&d, key, r->top_k, 0);
        have = collect(&d, key);
    }
    if (have <= DRAW_LIST)
        return draw_listed(&d, r, have);
    if (r->top_p < 1.0f) {
        double mass;
        tally(&d, key, true, &have, &mass);
        key = raise_threshold(&d, key, 0, (double)r->top_p * mass);
    }
    return draw_walking(&d, key, r->uniform);
}

/* Log-probabilities, for rows that request them: one block per row. Each thread holds the best
 * of its tokens; when that is output, the block searches its owner's next best. */
enum { ROW_THREADS = 1024, EDITS_A_ROW = 1024 /* average capacity */ };

DEVICE double block_sum(double v, double *part)
{
    for (int i = 16; i; i >>= 1)
        v += __shfl_xor_sync(FULL_WARP, v, i);
    __syncthreads();
    if (lane_id() == 0)
        part[warp_id()] = v;
    __syncthreads();
    double sum = 0;
    for (int w = 0; w < (int)(blockDim.x >> 5); w++)
        sum += part[w];
    return sum;
}

static __global__ void __launch_bounds__(ROW_THREADS)
    sample_probs_kernel(const float *logits, int n_vocab, const struct row_sampler *rows,
                        float *norms, struct sample_probs *probs)
{
    SHARED_BYTES(shared);
    int row = (int)blockIdx.x, threads = (int)blockDim.x, n_top = rows[row].n_top, have = 0;
    if (n_top < 0)
        return;
    const float *l = logits + (size_t)row * (size_t)n_vocab;
    struct best mine = {-INFINITY, n_vocab};
    for (int i = (int)threadIdx.x; i < n_vocab; i += threads) {
        struct best o = {load_float_l2(l + i), i};
        mine = better(mine, o);
    }
    struct best top = block_best(mine, shared);
    double sum = 0;
    for (int i = (int)threadIdx.x; i < n_vocab; i += threads)
        sum += (double)expf(load_float_l2(l + i) - top.value);
    float norm = top.value + (float)log(block_sum(sum, (double *)(shared + 256)));
    for (; have < n_top && top.index < n_vocab; have++) {
        if (threadIdx.x == 0) {
            probs[row].top[have].token = top.index;
            probs[row].top[have].logprob = top.value - norm;
        }
        int owner = top.index % threads;
        struct best next = {-INFINITY, n_vocab};
        for (int i = owner + threads * (int)threadIdx.x; i < n_vocab; i += threads * threads) {
            struct best o = {load_float_l2(l + i), i};
            if (o.value < top.value || (o.value == top.value && i > top.index))
                next = better(next, o);
        }
        next = block_best(next, shared);
        if ((int)threadIdx.x == owner)
            mine = next;
        top = block_best(mine, shared);
    }
    if (threadIdx.x == 0) {
        norms[row] = norm;
        probs[row].n_top = have;
    }
}

/* Sets the logits outside a row's mask to -inf, then applies its edits. One block per row. */
static __global__ void __launch_bounds__(ROW_THREADS)
    sample_edit_kernel(float *logits, int n_vocab, const struct row_sampler *rows,
                       const struct logit_edit *all_edits, const uint32_t *masks, int mask_words,
                       float *all_raw)
{
    SHARED_BYTES(shared);
    uint32_t *words = (uint32_t *)shared; /* (blockDim.x) */
    int row = (int)blockIdx.x, threads = (int)blockDim.x;
    struct row_sampler r = rows[row];
    float *l = logits + (size_t)row * (size_t)n_vocab, *raw = all_raw + r.edits_at;
    const struct logit_edit *edits = all_edits + r.edits_at;
    for (int i = (int)threadIdx.x; i < r.n_edits; i += threads)
        raw[i] = l[edits[i].token];
    const uint32_t *mask = masks + (size_t)row * (size_t)mask_words;
    for (int at = 0; r.masked && at < mask_words; at += threads) {
        int mine = at + (int)threadIdx.x;
        __syncthreads();
        words[threadIdx.x] = mine < mask_words ? mask[mine] : 0;
        __syncthreads();
        int first = at * 32, last = first + threads * 32 < n_vocab ? first + threads * 32 : n_vocab;
        for (int i = first + (int)threadIdx.x; i < last; i += threads)
            if (!(words[(i - first) / 32] >> (i & 31) & 1))
                l[i] = -INFINITY;
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < r.n_edits; i += threads) {
        struct logit_edit e = edits[i];
        float v = l[e.token] + e.bias;
        l[e.token] = (v > 0 ? v / e.repeat : v * e.repeat) - e.less;
    }
}

/* Grid: (parts of a row, rows). The last block of a row combines the parts and draws. */
static __global__ void __launch_bounds__(DRAW_THREADS)
    sample_kernel(const float *logits, int n_vocab, float *value, int32_t *index, int32_t *count,
                  int32_t *tokens, int32_t *chosen, const struct row_sampler *samplers,
                  const struct logit_edit *edits, const float *raw, const float *norms,
                  struct sample_probs *probs)
{
    SHARED_BYTES(shared);
    int *is_last = (int *)(shared + 128);
    int row = (int)blockIdx.y, blocks = (int)gridDim.x;
    const float *l = logits + (size_t)row * (size_t)n_vocab;
    struct best b = {-INFINITY, n_vocab};
    for (int i = (int)(blockIdx.x * blockDim.x + threadIdx.x); i < n_vocab;
         i += blocks * (int)blockDim.x) {
        struct best o = {l[i], i};
        b = better(b, o);
    }
    b = block_best(b, shared);
    if (threadIdx.x == 0) {
        value[row * blocks + (int)blockIdx.x] = b.value;
        index[row * blocks + (int)blockIdx.x] = b.index;
        __threadfence();
        *is_last = atomicAdd(&count[row], 1) == blocks - 1;
        if (*is_last)
            count[row] = 0;
    }
    __syncthreads();
    if (!*is_last)
        return;
    __threadfence();
    b.value = -INFINITY;
    b.index = n_vocab;
    for (int i = (int)threadIdx.x; i < blocks; i += (int)blockDim.x) {
        struct best o = {load_float_l2(value + row * blocks + i),
                         (int)bits_of(load_float_l2((const float *)index + row * blocks + i))};
        b = better(b, o);
    }
    b = block_best(b, shared);
    int token = b.index < n_vocab ? b.index : 0;
    struct row_sampler r = samplers[row];
    if (r.draws) {
        b.index = token;
        token = draw_token(l, n_vocab, b, &r, (struct draw_shared *)(shared + 256));
    }
    if (threadIdx.x == 0)
        tokens[row] = chosen[row] = token;
    if (r.n_top < 0)
        return;
    float *found = (float *)(shared + 256); /* the token's raw logit */
    __syncthreads();
    if (threadIdx.x == 0)
        *found = load_float_l2(l + token);
    __syncthreads();
    for (int i = (int)threadIdx.x; i < r.n_edits; i += (int)blockDim.x)
        if (edits[r.edits_at + i].token == token)
            *found = raw[r.edits_at + i];
    __syncthreads();
    if (threadIdx.x == 0)
        probs[row].logprob = *found - norms[row];
}

/* Whether the kernels above implement a sampler field; all fields, in the order of
 * SAMPLE_FIELDS. */
static const bool device_fields[] = {
    true,  /* temp */
    true,  /* top_k */
    true,  /* top_p */
    true,  /* min_p */
    true,  /* repeat_penalty: sampler_edits, also the next three */
    true,  /* presence_penalty */
    true,  /* frequency_penalty */
    true,  /* repeat_last_n */
    true,  /* seed: sampler_uniform */
    true,  /* bias: sampler_edits */
    true,  /* n_bias */
    false, /* typical_p: sample_chain.h, also the next fifteen */
    false, /* top_n_sigma */
    false, /* xtc_probability */
    false, /* xtc_threshold */
    false, /* dynatemp_range */
    false, /* dynatemp_exponent */
    false, /* mirostat */
    false, /* mirostat_tau */
    false, /* mirostat_eta */
    false, /* dry_multiplier */
    false, /* dry_base */
    false, /* dry_allowed_length */
    false, /* dry_last_n */
    false, /* dry_breakers */
    false, /* n_dry_breakers */
    false, /* order */
    true,  /* logprobs */
    true,  /* n_top */
    true,  /* the constraint: sampler_mask */
};
static_assert(sizeof device_fields / sizeof *device_fields == N_SAMPLE_FIELDS,
              "every field of a sampler has an answer");

static bool device_implements(const struct sampler *s)
{
    uint32_t uses = sampler_uses(s);
    for (int f = 0; f < N_SAMPLE_FIELDS; f++)
        if ((uses >> f & 1) && !device_fields[f])
            return false;
    return true;
}

bool sample_prepare(struct cuda_backend *cu, struct error *err)
{
    struct sampling *sm = &cu->sampling;
    size_t out = (size_t)cu->shape.max_out + 1, vocab = (size_t)cu->shape.n_vocab;
    sm->mask_words = ceil_div(cu->shape.n_vocab, 32);
    sm->max_edits = cu->net->head.w ? EDITS_A_ROW * cu->shape.max_out + cu->shape.n_vocab : 1;
    sm->edits_at = align_up(out * sizeof(struct row_sampler), 64);
    sm->masks_at = align_up(sm->edits_at + (size_t)sm->max_edits * sizeof(struct logit_edit), 64);
    sm->tokens_at = align_up(sm->masks_at + out * (size_t)sm->mask_words * 4, 64);
    sm->probs_at = align_up(sm->tokens_at + out * 4, 64);
    size_t bytes = sm->probs_at + out * sizeof(struct sample_probs);
    for (int i = 0; i < 2; i++)
        if (!cuda_pin((void **)&sm->host[i], (void **)&sm->mapped[i], bytes, err))
            return false;
    struct device_buffer list[] = {{(void **)&sm->raw, (size_t)sm->max_edits * sizeof(float)},
                                   {(void **)&sm->norm, out * sizeof(float)}};
    return cuda_own(cu, list, 2, err) &&
           cuda_pin((void **)&sm->logits_row, NULL, vocab * sizeof(float), err);
}

void sample_close(struct cuda_backend *cu)
{
    struct sampling *sm = &cu->sampling;
    void *host[] = {sm->host[0], sm->host[1], sm->logits_row};
    for (int i = 0; i < 3; i++)
        if (host[i])
            cudaFreeHost(host[i]);
}

const int32_t *sample_tokens_of(const struct cuda_backend *cu, int buffer)
{
    return (const int32_t *)(cu->sampling.host[buffer] + cu->sampling.tokens_at);
}

const struct sample_probs *sample_probs_of(const struct cuda_backend *cu, int buffer)
{
    return (const struct sample_probs *)(cu->sampling.host[buffer] + cu->sampling.probs_at);
}

/* Writes row i's sampler settings for the device. earlier: how many preceding rows of the step
 * use the same sampler. */
static void put_row(struct cuda_backend *cu, uint8_t *host, struct sampler *s, int i, int earlier,
                    int *n_edits)
{
    const struct sampling *sm = &cu->sampling;
    struct row_sampler r = {};
    r.n_top = -1;
    r.edits_at = *n_edits;
    struct row_sampler *row = (struct row_sampler *)host + i;
    *row = r;
    if (!s)
        return;
    struct logit_edit *edits = (struct logit_edit *)(host + sm->edits_at) + *n_edits;
    const struct sample_params *p = sampler_params(s);
    r.n_edits = device_implements(s) ? sampler_edits(s, edits, sm->max_edits - *n_edits) : -1;
    row->by_host = r.n_edits < 0;
    if (row->by_host)
        return;
    const uint32_t *mask = sampler_mask(s);
    if (mask)
        memcpy((uint32_t *)(host + sm->masks_at) + (size_t)i * (size_t)sm->mask_words, mask,
               (size_t)sm->mask_words * 4);
    *n_edits += r.n_edits;
    r.masked = mask != NULL;
    r.draws = p->temp > 0;
    r.top_k = p->top_k;
    r.temp = p->temp;
    r.top_p = p->top_p;
    r.min_p = p->min_p;
    r.uniform = sampler_uniform(p->seed, sampler_counter(s) + (uint64_t)earlier);
    int n_top = p->n_top < SAMPLE_MAX_TOP ? p->n_top : SAMPLE_MAX_TOP;
    r.n_top = !p->logprobs ? -1 : n_top < cu->shape.n_vocab ? n_top : cu->shape.n_vocab;
    *row = r;
}

/* Samples row i on the host: waits for the step and copies the token to the device. again: the
 * preceding row uses the same sampler and is not accepted yet, so the token is left open (-1). */
static void sample_on_host(struct cuda_backend *cu, uint8_t *host, struct sampler *s, int i,
                           bool again)
{
    const struct sampling *sm = &cu->sampling;
    size_t n = (size_t)cu->shape.n_vocab;
    int32_t *token = (int32_t *)(host + sm->tokens_at) + i;
    CUDA_TRY(cu, cudaMemcpyAsync(sm->logits_row, cu->act.logits + (size_t)i * n, n * sizeof(float),
                                 cudaMemcpyDeviceToHost, cu->stream));
    CUDA_TRY(cu, cudaStreamSynchronize(cu->stream));
    if (again || cu->failed) {
        *token = -1;
        return;
    }
    *token = sampler_pick(s, sm->logits_row, (struct sample_probs *)(host + sm->probs_at) + i);
    CUDA_TRY(cu, cudaMemcpyAsync(cu->sampling.chosen + i, token, sizeof *token,
                                 cudaMemcpyHostToDevice, cu->stream));
}

void sample_tokens(struct cuda_backend *cu, struct sampler *const *samplers, int rows)
{
    const struct sampling *sm = &cu->sampling;
    int buffer = (int)((cu->queue.n_begun + 1) % 2), n_vocab = cu->shape.n_vocab;
    uint8_t *host = sm->host[buffer], *mapped = sm->mapped[buffer];
    int n_edits = 0, again = 0;
    bool edited = false, wants_probs = false;
    if (!rows)
        return;
    for (int i = 0; i < rows; i++) {
        again = i && samplers[i] == samplers[i - 1] ? again + 1 : 0;
        put_row(cu, host, samplers[i], i, again, &n_edits);
        const struct row_sampler *r = (const struct row_sampler *)host + i;
        edited |= r->n_edits > 0 || r->masked;
        wants_probs |= r->n_top >= 0;
    }
    const struct row_sampler *samples = (const struct row_sampler *)mapped;
    const struct logit_edit *edits = (const struct logit_edit *)(mapped + sm->edits_at);
    struct sample_probs *probs = (struct sample_probs *)(mapped + sm->probs_at);
    if (wants_probs)
        cuda_launch(cu, sample_probs_kernel, dim3((unsigned)rows), ROW_THREADS, 512, LAUNCH_PLAIN,
                    (const float *)cu->act.logits, n_vocab, samples, sm->norm, probs);
    if (edited)
        cuda_launch(cu, sample_edit_kernel, dim3((unsigned)rows), ROW_THREADS, ROW_THREADS * 4,
                    LAUNCH_PLAIN, cu->act.logits, n_vocab, samples, edits,
                    (const uint32_t *)(mapped + sm->masks_at), sm->mask_words, sm->raw);
    cuda_launch(cu, sample_kernel, dim3(ARGMAX_BLOCKS, (unsigned)rows), DRAW_THREADS,
                256 + sizeof(struct draw_shared), LAUNCH_PLAIN, (const float *)cu->act.logits,
                n_vocab, cu->sampling.argmax_value, cu->sampling.argmax_index,
                cu->sampling.argmax_count, (int32_t *)(mapped + sm->tokens_at), cu->sampling.chosen,
                samples, edits, (const float *)sm->raw, (const float *)sm->norm, probs);
    for (int i = 0; i < rows; i++)
        if (((const struct row_sampler *)host)[i].by_host)
            sample_on_host(cu, host, samplers[i], i, i && samplers[i] == samplers[i - 1]);
}
