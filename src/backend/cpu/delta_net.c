/*
 * The gated delta net between its projections, and the output gate of gated attention. Also the plain C
 * instance of delta_net_kernel.h.
 *
 * A job has three phases: convolution, norms and gates by head; the recurrence by panel of a head's
 * state; norm and gate of the outputs by row. Each piece of work belongs to one sequence and takes the
 * sequence's rows in order, so decode, prefill and mixed steps differ only in the number of rows.
 *
 * Owns the layout of a state: the W-1 inputs of the convolution before the current row, oldest first,
 * (W-1, C); then, for each v head, panels of DELTA_PANEL columns, (Dk, width) each.
 */
#define KERNELS delta_kernels_c
#include "backend/cpu/delta_net_kernel.h"

#include "backend/cpu/ops.h"
#include "backend/cpu/pick.h"
#include "base/error.h"

struct delta_job {
    const struct batch *b;
    const struct delta_net *d;
    const struct delta_kernels *kernels;
    float *states; /* (n_states, len) */
    size_t len, channels, values;
    const float *conv; /* (W, C) */
    float *u, *ba;     /* (n_tokens, C), (n_tokens, 2*Hv) */
    const float *z;    /* (n_tokens, Hv*Dv) */
    float *o;          /* (n_tokens, Hv*Dv) */
    float *old;        /* (n_threads, old_len) a head's convolution inputs before the step */
    size_t old_len;
};

size_t cpu_delta_scratch(const struct delta_net *d)
{
    int dim = d->k_dim > d->v_dim ? d->k_dim : d->v_dim;
    return (size_t)(d->conv_len - 1) * (size_t)dim + DELTA_PANEL;
}

static float *state_of_slot(const struct delta_job *j, int32_t slot)
{
    return slot < 0 ? NULL : j->states + (size_t)slot * j->len;
}

/* Copies the W-1 rows before row t of a head's channels. Rows before the step are in `old`. */
static void copy_past_rows(const struct delta_job *j, const float *old, const float *u, int t,
                           int dim, float *to)
{
    int past = j->d->conv_len - 1;
    for (int i = 0; i < past; i++) {
        int at = t - past + i;
        memcpy(to + (size_t)i * j->channels,
               at < 0 ? old + (size_t)(at + past) * (size_t)dim : u + (size_t)at * j->channels,
               (size_t)dim * sizeof(float));
    }
}

/* Replaces b and a of a v head's rows by beta and decay. */
static void compute_gates(const struct delta_job *j, int first, int rows, int h)
{
    int Hv = j->d->n_v_heads;
    for (int t = first; t < first + rows; t++) {
        float *b = j->ba + (size_t)t * (size_t)(2 * Hv) + h, *a = b + Hv;
        float x = *a + j->d->dt_bias[h];
        float soft = x > 20.0f ? x : log1pf(expf(x));
        *b = sigmoid_one(*b) * (j->d->beta_scale != 0 ? j->d->beta_scale : 1);
        *a = expf(-j->d->decay[h] * soft);
    }
}

/* Convolves one head of q, k or v of a sequence in place, from the last row back. */
static void conv_head(const struct delta_job *j, int ith, int seq, int head)
{
    const struct delta_net *d = j->d;
    const struct batch *b = j->b;
    int Hk = d->n_k_heads, taps = d->conv_len, past = taps - 1, first = b->q_start[seq];
    int rows = b->q_start[seq + 1] - first, dim = head < 2 * Hk ? d->k_dim : d->v_dim;
    size_t at = head < 2 * Hk ? (size_t)head * (size_t)d->k_dim
                              : (size_t)(2 * Hk * d->k_dim + (head - 2 * Hk) * d->v_dim);
    float *u = j->u + (size_t)first * j->channels + at, *old = j->old + (size_t)ith * j->old_len;
    const float *in = state_of_slot(j, b->state_in[seq]);
    float *out = state_of_slot(j, b->state_out[seq]);
    if (!out)
        return;
    memset(old, 0, (size_t)(past * dim) * sizeof(float));
    for (int i = 0; in && i < past; i++)
        memcpy(old + (size_t)(i * dim), in + (size_t)i * j->channels + at,
               (size_t)dim * sizeof(float));
    copy_past_rows(j, old, u, rows, dim, out + at);
    if (b->save_rows[seq])
        copy_past_rows(j, old, u, b->save_rows[seq], dim,
                       state_of_slot(j, b->save_state[seq]) + at);
    for (int t = rows - 1; t >= 0; t--) {
        const float *x[CPU_MAX_TAPS];
        float *y = u + (size_t)t * j->channels;
        for (int i = 0; i < taps; i++) {
            int from = t - past + i;
            x[i] = from < 0 ? old + (size_t)((from + past) * dim) : u + (size_t)from * j->channels;
        }
        j->kernels->conv(x, j->conv + at, j->channels, taps, dim, y);
        if (head < 2 * Hk)
            j->kernels->unit(y, dim, head < Hk ? 1.0f / sqrtf((float)dim) : 1.0f);
    }
    if (head >= 2 * Hk)
        compute_gates(j, first, rows, head - 2 * Hk);
}

/* Runs all rows of a sequence through one panel of a head's state. */
static void run_panel(const struct delta_job *j, int seq, int h, int panel)
{
    const struct delta_net *d = j->d;
    const struct batch *b = j->b;
    int Dk = d->k_dim, Dv = d->v_dim, Hv = d->n_v_heads, first = b->q_start[seq];
    int rows = b->q_start[seq + 1] - first, col = panel * DELTA_PANEL;
    int width = Dv - col < DELTA_PANEL ? Dv - col : DELTA_PANEL, of = delta_net_k_head(d, h);
    size_t at = (size_t)(d->conv_len - 1) * j->channels + (size_t)h * (size_t)(Dk * Dv) +
                (size_t)(col * Dk);
    const float *in = state_of_slot(j, b->state_in[seq]);
    float *out = state_of_slot(j, b->state_out[seq]);
    size_t keys = (size_t)(d->n_k_heads * Dk);
    for (int t = 0; t < rows; t++) {
        size_t row = (size_t)(first + t);
        const float *u = j->u + row * j->channels, *gates = j->ba + row * (size_t)(2 * Hv);
        float *o = j->o + row * j->values + (size_t)(h * Dv + col);
        if (!out) { /* padding */
            memset(o, 0, (size_t)width * sizeof(float));
            continue;
        }
        j->kernels->step(t    ? out + at
                         : in ? in + at
                              : NULL,
                         out + at, u + (size_t)(of * Dk), u + keys + (size_t)(of * Dk),
                         u + 2 * keys + (size_t)(h * Dv + col), gates[Hv + h], gates[h], Dk, width,
                         o);
        if (b->save_rows[seq] == t + 1)
            memcpy(state_of_slot(j, b->save_state[seq]) + at, out + at,
                   (size_t)(Dk * width) * sizeof(float));
    }
}

static int panels_of(const struct delta_net *d)
{
    return (d->v_dim + DELTA_PANEL - 1) / DELTA_PANEL;
}

static struct pool_work heads_work(void *arg)
{
    const struct delta_job *j = arg;
    return (struct pool_work){j->b->n_seqs * (2 * j->d->n_k_heads + j->d->n_v_heads), POOL_EVEN};
}

static void heads_run(void *arg, int ith, int first, int last)
{
    const struct delta_job *j = arg;
    int n = 2 * j->d->n_k_heads + j->d->n_v_heads;
    for (int i = first; i < last; i++)
        conv_head(j, ith, i / n, i % n);
}

static struct pool_work panels_work(void *arg)
{
    const struct delta_job *j = arg;
    return (struct pool_work){j->b->n_seqs * j->d->n_v_heads * panels_of(j->d), POOL_EVEN};
}

static void panels_run(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct delta_job *j = arg;
    int panels = panels_of(j->d), n = j->d->n_v_heads * panels;
    for (int i = first; i < last; i++)
        run_panel(j, i / n, i % n / panels, i % panels);
}

static struct pool_work rows_work(void *arg)
{
    const struct delta_job *j = arg;
    return (struct pool_work){j->b->n_tokens * j->d->n_v_heads, POOL_EVEN};
}

static void rows_run(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct delta_job *j = arg;
    size_t Dv = (size_t)j->d->v_dim;
    for (int i = first; i < last; i++)
        j->kernels->gate(j->o + (size_t)i * Dv, j->z + (size_t)i * Dv, j->d->norm.gain,
                         j->d->norm.eps, j->d->v_dim);
}

void cpu_delta_net(const struct batch *b, const struct mixer *m, float *states, const float *taps,
                   float *u, const float *z, float *ba, float *o, float *scratch,
                   size_t scratch_len, struct pool *pool, enum isa isa)
{
    static const struct pool_phase phases[] = {
        {heads_work, heads_run}, {panels_work, panels_run}, {rows_work, rows_run}};
    const struct delta_net *d = &m->delta_net;
    struct delta_job j = {.b = b,
                          .d = d,
                          .kernels = delta_kernels(isa),
                          .states = states,
                          .len = mixer_state_len(m),
                          .values = (size_t)d->n_v_heads * (size_t)d->v_dim,
                          .conv = taps,
                          .u = u,
                          .ba = ba,
                          .z = z,
                          .o = o,
                          .old = scratch,
                          .old_len = scratch_len};
    j.channels = 2 * (size_t)d->n_k_heads * (size_t)d->k_dim + j.values;
    CHECK(d->conv_len <= CPU_MAX_TAPS, "a convolution of %d taps", d->conv_len);
    if (pick_single_thread(SMALL_DELTA, (size_t)b->n_tokens * j.values * (size_t)d->k_dim)) {
        heads_run(&j, 0, 0, heads_work(&j).n);
        panels_run(&j, 0, 0, panels_work(&j).n);
        rows_run(&j, 0, 0, rows_work(&j).n);
    } else {
        pool_phases(pool, phases, 3, &j);
    }
}

struct attn_gate_job {
    const struct attention *l;
    const struct delta_kernels *kernels;
    const float *qkv; /* (n_tokens, width) */
    size_t width;
    float *a; /* (n_tokens, H*Dv) */
};

static void gate_run(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct attn_gate_job *j = arg;
    int H = j->l->n_heads;
    size_t Dk = (size_t)j->l->k_dim, Dv = (size_t)j->l->v_dim;
    for (int t = first; t < last; t++)
        for (int h = 0; h < H; h++)
            j->kernels->sigmoid(j->a + ((size_t)t * (size_t)H + (size_t)h) * Dv,
                                j->qkv + (size_t)t * j->width + (size_t)h * (Dk + Dv) + Dk,
                                j->l->v_dim);
}

/* Gates of a matrix of their own: one per value or per head. */
static void own_gate_run(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct attn_gate_job *j = arg;
    int values = j->l->n_heads * j->l->v_dim, n = (int)j->width, each = values / n;
    for (int t = first; t < last; t++) {
        float *a = j->a + (size_t)t * (size_t)values;
        const float *g = j->qkv + (size_t)t * j->width;
        if (each == 1 && !j->l->softplus) {
            j->kernels->sigmoid(a, g, n);
            continue;
        }
        for (int i = 0; i < n; i++) {
            float gate = j->l->softplus ? g[i] > 20.0f ? g[i] : log1pf(expf(g[i]))
                                        : 1.0f / (1.0f + expf(-g[i]));
            for (int k = 0; k < each; k++)
                a[i * each + k] *= gate;
        }
    }
}

void cpu_attn_own_gate(const struct batch *b, const struct attention *l, const float *g, float *a,
                       struct pool *pool, enum isa isa)
{
    struct attn_gate_job j = {l, delta_kernels(isa), g, (size_t)l->wgate->n_out, a};
    if (pick_single_thread(SMALL_POST, (size_t)b->n_tokens * (size_t)(l->n_heads * l->v_dim)))
        own_gate_run(&j, 0, 0, b->n_tokens);
    else
        pool_each(pool, b->n_tokens, POOL_EVEN, own_gate_run, &j);
}

void cpu_attn_gate(const struct batch *b, const struct attention *l, const float *qkv, int width,
                   float *a, struct pool *pool, enum isa isa)
{
    struct attn_gate_job j = {l, delta_kernels(isa), qkv, (size_t)width, a};
    if (pick_single_thread(SMALL_POST, (size_t)b->n_tokens * (size_t)(l->n_heads * l->v_dim)))
        gate_run(&j, 0, 0, b->n_tokens);
    else
        pool_each(pool, b->n_tokens, POOL_EVEN, gate_run, &j);
}
