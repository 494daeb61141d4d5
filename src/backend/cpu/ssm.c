/*
 * Mamba-2's state-space model, Mamba's selective scan and short convolutions between their projections. Also the plain C instance of
 * ssm_kernel.h.
 *
 * A job has up to three phases: the convolution by block of channels; the recurrence by panel of a head's state; gate
 * and norm by row. Each piece of work belongs to one sequence and takes the sequence's rows in order, so decode,
 * prefill and mixed steps differ only in the number of rows.
 *
 * Owns the layout of a state: the W-1 inputs of the convolution before the current row, oldest first, (W-1, C); then,
 * for each head, panels of SSM_PANEL columns, (N, width) each.
 */
#define KERNELS ssm_kernels_c
#include "backend/cpu/ssm_kernel.h"

#include "backend/cpu/cpu.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/pick.h"
#include "base/error.h"
#include "base/mem.h"

#include <math.h>
#include <string.h>

enum { BLOCK = 64 };    /* channels of a piece of a convolution */
enum { DT_HEADS = 16 }; /* heads of a piece of the time steps */

struct ssm_job {
    const struct batch *b;
    const struct ssm *m; /* NULL: a short convolution */
    const struct ssm_kernels *kernels;
    float *states; /* (n_states, len) */
    size_t len;
    int taps;
    const float *conv, *bias; /* (W, C); (C) or NULL */
    float *u;                 /* (n_tokens, width): the convolution's rows, its input and output */
    size_t width;
    int channels;
    bool silu;
    float *in;      /* (n_tokens, w_in->n_out) of the projection */
    const float *z; /* (n_tokens, z_width) gates */
    size_t z_width;
    float *o;   /* (n_tokens, values) */
    float *old; /* (n_threads, old_len): a block's inputs before the step */
    size_t old_len, values;
};

size_t cpu_ssm_scratch(int conv_len)
{
    return (size_t)(conv_len - 1) * BLOCK + SSM_PANEL;
}

void cpu_conv_taps(const float *conv, int channels, int conv_len, float *taps)
{
    for (int c = 0; c < channels; c++)
        for (int i = 0; i < conv_len; i++)
            taps[i * channels + c] = conv[c * conv_len + i];
}

static float *state_of_slot(const struct ssm_job *j, int32_t slot)
{
    return slot < 0 ? NULL : j->states + (size_t)slot * j->len;
}

/* Copies the W-1 rows before row t of n channels. Rows before the step are in `old`. */
static void copy_past_rows(const struct ssm_job *j, const float *old, const float *u, int t, int n,
                           float *to)
{
    int past = j->taps - 1;
    for (int i = 0; i < past; i++) {
        int at = t - past + i;
        memcpy(to + (size_t)i * (size_t)j->channels,
               at < 0 ? old + (size_t)((at + past) * n) : u + (size_t)at * j->width,
               (size_t)n * sizeof(float));
    }
}

static int blocks_of(const struct ssm_job *j)
{
    return (j->channels + BLOCK - 1) / BLOCK;
}

/* Convolves a block of channels of a sequence in place, from the last row back. */
static void conv_block(const struct ssm_job *j, int ith, int seq, int block)
{
    const struct batch *b = j->b;
    int past = j->taps - 1, first = b->q_start[seq], rows = b->q_start[seq + 1] - first;
    int at = block * BLOCK, n = j->channels - at < BLOCK ? j->channels - at : BLOCK;
    float *u = j->u + (size_t)first * j->width + at, *old = j->old + (size_t)ith * j->old_len;
    const float *in = state_of_slot(j, b->state_in[seq]);
    float *out = state_of_slot(j, b->state_out[seq]);
    if (!out) /* padding */
        return;
    memset(old, 0, (size_t)(past * n) * sizeof(float));
    for (int i = 0; in && i < past; i++)
        memcpy(old + (size_t)(i * n), in + (size_t)i * (size_t)j->channels + at,
               (size_t)n * sizeof(float));
    copy_past_rows(j, old, u, rows, n, out + at);
    if (b->save_rows[seq])
        copy_past_rows(j, old, u, b->save_rows[seq], n, state_of_slot(j, b->save_state[seq]) + at);
    for (int t = rows - 1; t >= 0; t--) {
        const float *x[CPU_MAX_TAPS];
        for (int i = 0; i < j->taps; i++) {
            int from = t - past + i;
            x[i] = from < 0 ? old + (size_t)((from + past) * n) : u + (size_t)from * j->width;
        }
        j->kernels->conv(x, j->conv + at, (size_t)j->channels, j->taps,
                         j->bias ? j->bias + at : NULL, j->silu, n, u + (size_t)t * j->width);
    }
}

/* Multiplies a sequence's rows of the projection by the factors of their parts. */
static void scale_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct ssm_job *j = arg;
    for (int t = first; t < last; t++) {
        float *part = j->in + (size_t)t * j->width;
        for (int k = 0; k < SSM_PARTS; part += ssm_part(j->m, k++))
            for (int i = 0; i < ssm_part(j->m, k); i++)
                part[i] *= j->m->in_scale[k];
    }
}

/* dt of a sequence's rows for DT_HEADS heads, which replaces the projection's. */
static void compute_dt(const struct ssm_job *j, int seq, int piece)
{
    const struct ssm *m = j->m;
    CHECK(m, "time steps without a state-space model");
    int from = piece * DT_HEADS, to = from + DT_HEADS < m->n_heads ? from + DT_HEADS : m->n_heads;
    for (int t = j->b->q_start[seq]; t < j->b->q_start[seq + 1]; t++) {
        float *dt = j->u + (size_t)t * j->width + j->channels;
        for (int h = from; h < to; h++) {
            float x = dt[h] + m->dt_bias[h];
            x = x > 20.0f ? x : log1pf(expf(x));
            x = x < m->dt_min ? m->dt_min : x;
            dt[h] = m->dt_max != 0 && x > m->dt_max ? m->dt_max : x;
        }
    }
}

/* Runs all rows of a sequence through one panel of a head's state. */
static void run_panel(const struct ssm_job *j, int seq, int h, int panel)
{
    const struct ssm *m = j->m;
    const struct batch *b = j->b;
    int P = m->head_dim, N = m->state_dim, first = b->q_start[seq];
    int rows = b->q_start[seq + 1] - first, col = panel * SSM_PANEL;
    int width = P - col < SSM_PANEL ? P - col : SSM_PANEL;
    size_t at = (size_t)(m->conv_len - 1) * (size_t)j->channels + (size_t)h * (size_t)(N * P) +
                (size_t)(col * N);
    size_t key = j->values + (size_t)(h * m->n_groups / m->n_heads * N);
    const float *in = state_of_slot(j, b->state_in[seq]);
    float *out = state_of_slot(j, b->state_out[seq]);
    for (int t = 0; t < rows; t++) {
        const float *x = j->u + (size_t)(first + t) * j->width;
        float dt = m->dt_bias ? x[j->channels + h] : 1;
        float *o = j->o + (size_t)(first + t) * j->values + (size_t)(h * P + col);
        if (!out) { /* padding */
            memset(o, 0, (size_t)width * sizeof(float));
            continue;
        }
        j->kernels->step(t    ? out + at
                         : in ? in + at
                              : NULL,
                         out + at, x + key, x + key + (size_t)(m->n_groups * N),
                         x + (size_t)(h * P + col), expf(-m->decay[h] * dt), dt,
                         m->skip ? m->skip[h] : 0, N, width, o);
        if (b->save_rows[seq] == t + 1)
            memcpy(state_of_slot(j, b->save_state[seq]) + at, out + at,
                   (size_t)(N * width) * sizeof(float));
    }
}

static int panels_of(const struct ssm *m)
{
    return (m->head_dim + SSM_PANEL - 1) / SSM_PANEL;
}

static int dt_pieces(const struct ssm_job *j)
{
    return j->m && j->m->dt_bias ? (j->m->n_heads + DT_HEADS - 1) / DT_HEADS : 0;
}

/* The blocks of a sequence's convolution, and the pieces of dt where it is computed. */
static struct pool_work conv_work(void *arg)
{
    const struct ssm_job *j = arg;
    return (struct pool_work){j->b->n_seqs * (blocks_of(j) + dt_pieces(j)), POOL_EVEN};
}

static void conv_run(void *arg, int ith, int first, int last)
{
    const struct ssm_job *j = arg;
    int blocks = blocks_of(j), n = blocks + dt_pieces(j);
    for (int i = first; i < last; i++) {
        if (i % n < blocks)
            conv_block(j, ith, i / n, i % n);
        else
            compute_dt(j, i / n, i % n - blocks);
    }
}

static struct pool_work panels_work(void *arg)
{
    const struct ssm_job *j = arg;
    return (struct pool_work){j->b->n_seqs * j->m->n_heads * panels_of(j->m), POOL_EVEN};
}

static void panels_run(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct ssm_job *j = arg;
    int panels = panels_of(j->m), n = j->m->n_heads * panels;
    for (int i = first; i < last; i++)
        run_panel(j, i / n, i % n / panels, i % panels);
}

static struct pool_work rows_work(void *arg)
{
    const struct ssm_job *j = arg;
    return (struct pool_work){j->b->n_tokens, POOL_EVEN};
}

static void gate_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct ssm_job *j = arg;
    const struct ssm *m = j->m;
    int values = (int)j->values, part = values / (m->n_norms ? m->n_norms : 1);
    for (int t = first; t < last; t++) {
        float *o = j->o + (size_t)t * j->values;
        const float *z = j->z + (size_t)t * j->z_width;
        if (!m->norm_first)
            j->kernels->gate(o, z, m->sigmoid_gate, values);
        for (int i = 0; m->norm.kind != NORM_NONE && i < values; i += part)
            j->kernels->norm(o + i, m->norm.gain ? m->norm.gain + i : NULL, m->norm.eps, part);
        if (m->norm_first)
            j->kernels->gate(o, z, m->sigmoid_gate, values);
    }
}

void cpu_ssm(const struct batch *b, const struct mixer *m, float *states, const float *taps,
             float *in, const float *z, float *o, float *scratch, size_t scratch_len,
             struct pool *pool, enum isa isa)
{
    static const struct pool_phase phases[] = {{rows_work, scale_rows},
                                               {conv_work, conv_run},
                                               {panels_work, panels_run},
                                               {rows_work, gate_rows}};
    const struct ssm *s = &m->ssm;
    int skip = s->in_scale[0] == 0; /* no factors */
    size_t values = (size_t)s->n_heads * (size_t)s->head_dim;
    struct ssm_job j = {.b = b,
                        .m = s,
                        .kernels = ssm_kernels(isa),
                        .states = states,
                        .len = mixer_state_len(m),
                        .taps = s->conv_len,
                        .conv = taps,
                        .bias = s->conv_bias,
                        .u = s->w_z ? in : in + values,
                        .width = (size_t)s->w_in->n_out,
                        .z = s->w_z ? z : in,
                        .z_width = s->w_z ? values : (size_t)s->w_in->n_out,
                        .channels = ssm_channels(s),
                        .silu = true,
                        .in = in,
                        .o = o,
                        .old = scratch,
                        .old_len = scratch_len,
                        .values = values};
    if (pick_single_thread(SMALL_DELTA, (size_t)b->n_tokens * values * (size_t)s->state_dim)) {
        if (!skip)
            scale_rows(&j, 0, 0, b->n_tokens);
        conv_run(&j, 0, 0, conv_work(&j).n);
        panels_run(&j, 0, 0, panels_work(&j).n);
        gate_rows(&j, 0, 0, b->n_tokens);
    } else {
        pool_phases(pool, phases + skip, 4 - skip, &j);
    }
}

/* Selective scans. The projections of the convolved rows are products of their own between two jobs. */
struct scan_job {
    struct ssm_job conv; /* its u: x (n_tokens, I), and o: dt, then the result */
    const struct scan *m;
    const float *decay; /* by panels: (N, width) each, times -log2(e) */
    float *low, *in;    /* (n_tokens, R + 2*N), (n_tokens, 2*I) */
    float *dt;          /* (n_tokens, R) the normed part of low */
    enum isa isa;
};

float *cpu_scan_decay(const struct scan *m)
{
    int I = m->n_channels, N = m->state_dim;
    float *to = mem_zalloc((size_t)I, (size_t)N * sizeof(float));
    for (int i = 0; i < I; i++) {
        int first = i / SSM_PANEL * SSM_PANEL,
            width = I - first < SSM_PANEL ? I - first : SSM_PANEL;
        for (int n = 0; n < N; n++)
            to[first * N + n * width + i - first] = m->decay[i * N + n] * -1.44269504f;
    }
    return to;
}

static void scan_inputs(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct scan_job *j = arg;
    size_t I = j->conv.width;
    for (int t = first; t < last; t++)
        memcpy(j->conv.u + (size_t)t * I, j->in + 2 * (size_t)t * I, I * sizeof(float));
}

static void scan_norms(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct scan_job *j = arg;
    const struct scan *m = j->m;
    int R = m->dt_rank, N = m->state_dim;
    for (int t = first; t < last; t++) {
        float *low = j->low + (size_t)t * (size_t)(R + 2 * N);
        cpu_norm_alone(&m->dt_norm, low, 1, R, j->isa);
        cpu_norm_alone(&m->b_norm, low + R, 1, N, j->isa);
        cpu_norm_alone(&m->c_norm, low + R + N, 1, N, j->isa);
        memcpy(j->dt + (size_t)t * (size_t)R, low, (size_t)R * sizeof *low);
    }
}

/* Runs all rows of a sequence through one panel of channels. */
static void scan_panel(const struct scan_job *s, int seq, int panel)
{
    const struct ssm_job *j = &s->conv;
    const struct batch *b = j->b;
    int I = s->m->n_channels, N = s->m->state_dim, R = s->m->dt_rank, col = panel * SSM_PANEL;
    int width = I - col < SSM_PANEL ? I - col : SSM_PANEL, first = b->q_start[seq];
    size_t at = (size_t)(j->taps - 1) * (size_t)I + (size_t)(col * N);
    const float *in = state_of_slot(j, b->state_in[seq]);
    float *out = state_of_slot(j, b->state_out[seq]);
    for (int t = first; t < b->q_start[seq + 1]; t++) {
        const float *low = s->low + (size_t)t * (size_t)(R + 2 * N);
        float *o = j->o + (size_t)t * (size_t)I + col;
        if (!out) { /* padding */
            memset(o, 0, (size_t)width * sizeof(float));
            continue;
        }
        for (int i = 0; i < width; i++)
            o[i] = o[i] > 20.0f ? o[i] : log1pf(expf(o[i]));
        j->kernels->scan(t > first ? out + at
                         : in      ? in + at
                                   : NULL,
                         out + at, s->decay + col * N, low + R, low + R + N,
                         j->u + (size_t)t * (size_t)I + col, o, s->m->skip + col, N, width, o);
        if (b->save_rows[seq] == t - first + 1)
            memcpy(state_of_slot(j, b->save_state[seq]) + at, out + at,
                   (size_t)(N * width) * sizeof(float));
        j->kernels->gate(o, s->in + (size_t)(2 * t + 1) * (size_t)I + col, false, width);
    }
}

static void scan_panels(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct scan_job *s = arg;
    int n = (s->m->n_channels + SSM_PANEL - 1) / SSM_PANEL;
    for (int i = first; i < last; i++)
        scan_panel(s, i / n, i % n);
}

void cpu_scan(struct cpu_backend *cb, const struct mixer *m, float *states, const float *taps,
              const float *decay, float *in, float *x, float *low, float *o)
{
    const struct scan *s = &m->scan;
    const struct batch *b = &cb->batch;
    struct scan_job j = {.conv = {.b = b,
                                  .kernels = ssm_kernels(cb->isa),
                                  .states = states,
                                  .len = mixer_state_len(m),
                                  .taps = s->conv_len,
                                  .conv = taps,
                                  .bias = s->conv_bias,
                                  .u = x,
                                  .width = (size_t)s->n_channels,
                                  .channels = s->n_channels,
                                  .silu = true,
                                  .o = o,
                                  .old = cb->delta_old,
                                  .old_len = cb->delta_len},
                         .m = s,
                         .decay = decay,
                         .low = low,
                         .in = in,
                         .dt = cb->n,
                         .isa = cb->isa};
    int T = b->n_tokens, panels = (s->n_channels + SSM_PANEL - 1) / SSM_PANEL;
    pool_each(cb->pool, T, POOL_EVEN, scan_inputs, &j);
    pool_each(cb->pool, b->n_seqs * blocks_of(&j.conv), POOL_EVEN, conv_run, &j.conv);
    gemm_linear(cb, s->w_x, x, low, T);
    pool_each(cb->pool, T, POOL_EVEN, scan_norms, &j);
    gemm_linear(cb, s->w_dt, cb->n, o, T);
    pool_each(cb->pool, b->n_seqs * panels, POOL_EVEN, scan_panels, &j);
}

void cpu_conv_rows(struct cpu_backend *cb, float *rows, size_t width, int channels,
                   const float *taps, int conv_len, float *states, size_t state_len)
{
    struct ssm_job j = {.b = &cb->batch,
                        .kernels = ssm_kernels(cb->isa),
                        .states = states,
                        .len = state_len,
                        .taps = conv_len,
                        .conv = taps,
                        .u = rows,
                        .width = width,
                        .channels = channels,
                        .old = cb->delta_old,
                        .old_len = cb->delta_len};
    if (pick_single_thread(SMALL_POST, (size_t)cb->batch.n_tokens * (size_t)channels))
        conv_run(&j, 0, 0, conv_work(&j).n);
    else
        pool_each(cb->pool, conv_work(&j).n, POOL_EVEN, conv_run, &j);
}

static void input_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct ssm_job *j = arg;
    for (int t = first; t < last; t++) {
        const float *in = j->in + (size_t)t * 3 * j->values;
        j->kernels->multiply(j->o + (size_t)t * j->values, in, in + 2 * j->values, (int)j->values);
    }
}

static void output_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct ssm_job *j = arg;
    for (int t = first; t < last; t++) {
        float *o = j->o + (size_t)t * j->values;
        j->kernels->multiply(o, o, j->in + (size_t)t * 3 * j->values + j->values, (int)j->values);
    }
}

void cpu_short_conv(const struct batch *b, const struct mixer *m, float *states, const float *taps,
                    float *in, float *o, float *scratch, size_t scratch_len, struct pool *pool,
                    enum isa isa)
{
    static const struct pool_phase phases[] = {
        {rows_work, input_rows}, {conv_work, conv_run}, {rows_work, output_rows}};
    const struct short_conv *s = &m->short_conv;
    int E = s->w_out->n_in;
    struct ssm_job j = {.b = b,
                        .kernels = ssm_kernels(isa),
                        .states = states,
                        .len = mixer_state_len(m),
                        .taps = s->conv_len,
                        .conv = taps,
                        .bias = s->bias,
                        .u = o,
                        .width = (size_t)E,
                        .channels = E,
                        .in = in,
                        .o = o,
                        .old = scratch,
                        .old_len = scratch_len,
                        .values = (size_t)E};
    if (pick_single_thread(SMALL_POST, (size_t)b->n_tokens * (size_t)E)) {
        input_rows(&j, 0, 0, b->n_tokens);
        conv_run(&j, 0, 0, conv_work(&j).n);
        output_rows(&j, 0, 0, b->n_tokens);
    } else {
        pool_phases(pool, phases, 3, &j);
    }
}
