/*
 * Sampling on the device (shaders/sample_*.comp), with the arithmetic of sample/sampler.c. The settings of a step's
 * samplers lie in its flight, where the kernels read them. A row whose sampler uses a setting that no kernel implements is
 * sampled by the host.
 */
#include "backend/vulkan/vulkan.h"
#include "base/mem.h"
#include "sample/sampler.h"

#include <math.h>
#include <string.h>

_Static_assert(sizeof(struct logit_edit) == EDIT_WORDS * 4 &&
                   sizeof(struct sample_probs) == PROBS_WORDS * 4,
               "what the kernels read and write");

/* Edits that there is room for, of an average row. */
enum { EDITS_A_ROW = 1024 };

/* Whether the kernels implement a field. No default case: a field without a case does not compile. */
static bool is_implemented(enum sample_field f)
{
    switch (f) {
    case SAMPLE_TEMP:
    case SAMPLE_TOP_K:
    case SAMPLE_TOP_P:
    case SAMPLE_MIN_P:
    case SAMPLE_REPEAT_PENALTY: /* sampler_edits, also the next three */
    case SAMPLE_PRESENCE_PENALTY:
    case SAMPLE_FREQUENCY_PENALTY:
    case SAMPLE_REPEAT_LAST_N:
    case SAMPLE_SEED:
    case SAMPLE_BIAS: /* sampler_edits */
    case SAMPLE_N_BIAS:
    case SAMPLE_LOGPROBS:
    case SAMPLE_N_TOP:
    case SAMPLE_CONSTRAINT: /* sampler_mask */
        return true;
    case SAMPLE_TYPICAL_P: /* sample_chain.h, also the others */
    case SAMPLE_TOP_N_SIGMA:
    case SAMPLE_XTC_PROBABILITY:
    case SAMPLE_XTC_THRESHOLD:
    case SAMPLE_DYNATEMP_RANGE:
    case SAMPLE_DYNATEMP_EXPONENT:
    case SAMPLE_MIROSTAT:
    case SAMPLE_MIROSTAT_TAU:
    case SAMPLE_MIROSTAT_ETA:
    case SAMPLE_DRY_MULTIPLIER:
    case SAMPLE_DRY_BASE:
    case SAMPLE_DRY_ALLOWED_LENGTH:
    case SAMPLE_DRY_LAST_N:
    case SAMPLE_DRY_BREAKERS:
    case SAMPLE_N_DRY_BREAKERS:
    case SAMPLE_ORDER:
    case N_SAMPLE_FIELDS:
        break;
    }
    return false;
}

static bool device_samples(const struct sampler *s)
{
    uint32_t uses = sampler_uses(s);
    for (int f = 0; f < N_SAMPLE_FIELDS; f++)
        if ((uses >> f & 1) && !is_implemented((enum sample_field)f))
            return false;
    return true;
}

bool vulkan_sample_prepare(struct vulkan *v, struct error *err)
{
    struct sampling_layout *l = &v->sampling;
    size_t out = (size_t)v->bounds.max_out + 1, vocab = (size_t)vulkan_logits_width(v);
    bool samples = v->net->head.w;
    l->mask_words = (int)((vocab + 31) / 32);
    l->max_edits = samples ? EDITS_A_ROW * v->bounds.max_out + (int)vocab : 1;
    l->edits_at = out * sizeof(struct row_sampler);
    l->masks_at = l->edits_at + (size_t)l->max_edits * sizeof(struct logit_edit);
    l->probs_at = out * sizeof(int32_t);
    size_t settings = l->masks_at + (samples ? out : 1) * (size_t)l->mask_words * 4;
    size_t results = l->probs_at + out * sizeof(struct sample_probs);
    v->logits_row = mem_alloc(vocab * sizeof *v->logits_row);
    for (int i = 0; i < 2; i++)
        if (!vulkan_share(v, &v->flights[i].settings, settings, false, err) ||
            !vulkan_share(v, &v->flights[i].results, results, false, err))
            return false;
    return vulkan_own(v, &v->s.tokens, out * 4, err) && vulkan_own(v, &v->s.norms, out * 4, err) &&
           vulkan_own(v, &v->s.edited, (size_t)l->max_edits * 4, err) &&
           vulkan_own(v, &v->s.sampling, (samples ? out : 1) * SAMPLE_ROW * 4, err);
}

/* A probability in units of 2^-32, at least one of them. */
static uint32_t fraction(float p)
{
    double n = (double)p * 4294967296.0;
    return n < 1 ? 1 : n >= 4294967295.0 ? UINT32_MAX : (uint32_t)n;
}

/* Writes row i's settings. earlier: how many preceding rows of the step use the same sampler. False: the host samples it. */
static bool put_row(struct vulkan *v, struct vulkan_flight *f, const struct sampler *s, int i,
                    int earlier, int *n_edits)
{
    const struct sampling_layout *l = &v->sampling;
    char *host = f->settings.host;
    struct row_sampler *row = (struct row_sampler *)host + i, r = {.n_top = -1};
    struct logit_edit *edits = (struct logit_edit *)(host + l->edits_at) + *n_edits;
    *row = r;
    if (!s)
        return true;
    const struct sample_params *p = sampler_params(s);
    int n = device_samples(s) ? sampler_edits(s, edits, l->max_edits - *n_edits) : -1;
    row->by_host = n < 0;
    if (n < 0)
        return false;
    const uint32_t *mask = sampler_mask(s);
    size_t words = (size_t)l->mask_words;
    if (mask)
        memcpy(host + l->masks_at + (size_t)i * words * 4, mask, words * 4);
    r.n_edits = (uint32_t)n;
    r.edits_at = (uint32_t)*n_edits;
    r.masked = mask != NULL;
    r.draws = p->temp > 0;
    r.top_k = p->top_k > 0 ? (uint32_t)p->top_k : 0;
    r.temp = p->temp;
    r.top_p = p->top_p < 1 ? fraction(p->top_p) : 0;
    r.log_floor = p->temp * logf(p->min_p > 1e-9f ? p->min_p : 1e-9f);
    float random = sampler_uniform(p->seed, sampler_counter(s) + (uint64_t)earlier);
    r.random = (uint32_t)((double)random * 4294967296.0);
    int n_top = p->n_top < SAMPLE_MAX_TOP ? p->n_top : SAMPLE_MAX_TOP;
    int vocab = vulkan_logits_width(v);
    r.n_top = !p->logprobs ? -1 : n_top < vocab ? n_top : vocab;
    *row = r;
    *n_edits += n;
    return true;
}

static int32_t *tokens_of(const struct vulkan_flight *f)
{
    return f->results.host;
}

static struct sample_probs *probs_of(const struct vulkan *v, const struct vulkan_flight *f)
{
    return (struct sample_probs *)((char *)f->results.host + v->sampling.probs_at);
}

/* Samples row i on the host, once the network is done. again: the preceding row uses the same sampler and is not accepted
 * yet, so the token is left open. */
static void sample_on_host(struct vulkan *v, struct vulkan_flight *f, struct sampler *s, int i,
                           bool again)
{
    size_t n = (size_t)vulkan_logits_width(v);
    int32_t *token = tokens_of(f) + i;
    vulkan_copy_out(&v->be, v->logits_row, (void *)(uintptr_t)(v->s.logits + 4 * (uint64_t)i * n),
                    n * sizeof(float));
    *token = -1;
    if (again || v->failed)
        return;
    *token = sampler_pick(s, v->logits_row, probs_of(v, f) + i);
    vulkan_copy_in(&v->be, (void *)(uintptr_t)(v->s.tokens + 4 * (uint64_t)i), token,
                   sizeof *token);
}

/* What the rows of a step need beside the largest logit. */
struct sample_needs {
    bool probs, masks, edits, draws;
};

static void enqueue(struct vulkan *v, const struct vulkan_flight *f, int rows,
                    const struct sample_needs *needs)
{
    const struct sampling_layout *l = &v->sampling;
    const struct sample_args args = {.logits = v->s.logits,
                                     .samplers = f->settings.at,
                                     .edits = f->settings.at + l->edits_at,
                                     .masks = f->settings.at + l->masks_at,
                                     .raw = v->s.edited,
                                     .norms = v->s.norms,
                                     .state = v->s.sampling,
                                     .tokens = f->results.at,
                                     .chosen = v->s.tokens,
                                     .probs = f->results.at + l->probs_at,
                                     .n_vocab = (uint)vulkan_logits_width(v),
                                     .rows = (uint)rows,
                                     .mask_words = (uint)l->mask_words};
    const struct {
        bool wanted, parts;
        enum vulkan_kernel kernel;
    } list[] = {
        {needs->probs, false, KERNEL_SAMPLE_PROBS}, {needs->masks, true, KERNEL_SAMPLE_MASK},
        {needs->edits, false, KERNEL_SAMPLE_EDIT},  {true, true, KERNEL_SAMPLE_BEST},
        {needs->draws, true, KERNEL_SAMPLE_WEIGH},  {needs->draws, true, KERNEL_SAMPLE_COLLECT},
        {true, false, KERNEL_SAMPLE_DRAW}};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        if (list[i].wanted && list[i].parts)
            vulkan_run(v, list[i].kernel, 0, 0, &args, sizeof args, SAMPLE_PARTS, args.rows, 1);
        else if (list[i].wanted)
            vulkan_run_flat(v, list[i].kernel, 0, 0, &args, sizeof args, args.rows);
    }
}

void vulkan_sample(struct backend *be, struct sampler *const *samplers)
{
    struct vulkan *v = vulkan_self(be);
    struct vulkan_flight *f = vulkan_flight(v);
    struct sample_needs needs = {0};
    int rows = f->n_out, n_edits = 0, again = 0, n_host = 0;
    bool any = false;
    for (int i = 0; i < rows; i++) {
        again = i && samplers[i] == samplers[i - 1] ? again + 1 : 0;
        n_host += !put_row(v, f, samplers[i], i, again, &n_edits);
        const struct row_sampler *r = (const struct row_sampler *)f->settings.host + i;
        f->sampled[i] = samplers[i] != NULL;
        any |= f->sampled[i];
        needs.probs |= r->n_top >= 0;
        needs.masks |= r->masked;
        needs.edits |= r->n_edits > 0;
        needs.draws |= r->draws;
    }
    if (!any || !vulkan_tail_begin(v))
        return;
    enqueue(v, f, rows, &needs);
    vulkan_tail_submit(v);
    for (int i = 0; n_host && i < rows && !v->failed; i++)
        if (((const struct row_sampler *)f->settings.host)[i].by_host)
            sample_on_host(v, f, samplers[i], i, i && samplers[i] == samplers[i - 1]);
}

void vulkan_probs(struct backend *be, int row, struct sample_probs *out)
{
    const struct vulkan *v = vulkan_self(be);
    *out = probs_of(v, &v->flights[(v->n_ended + 1) % 2])[row];
}

int32_t vulkan_token(const struct vulkan_flight *f, int row)
{
    return f->sampled[row] ? tokens_of(f)[row] : -1;
}
