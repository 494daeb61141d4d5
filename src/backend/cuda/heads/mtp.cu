/*
 * Multi-token prediction: keeps the normed hidden rows of a step, and builds the input of the MTP
 * block: the embedding of a token and a kept row, each through its norm, side by side. Owns both
 * buffers. The product over them is one of pick.cu's, and the block's layer is an ordinary layer.
 * Nothing passes through the host.
 */
#include "backend/cuda/heads/embed.cuh"
#include "backend/cuda/heads/encoder.h"
#include "backend/cuda/heads/mtp.h"

enum { JOIN_THREADS = 256 };
/* Most rows of a step with drafts, and of a sequence in it: 16 drafts after a known token. More rows are a prompt. Block
 * tables have at least LEAST_STRIDE entries per row, so that short sequences that grow do not change recorded steps. */
enum { DRAFT_ROWS = 64, DRAFT_SEQ_ROWS = 17, LEAST_STRIDE = 128 };

struct join_args {
    const float *e, *kept; /* (rows, width), (., width) */
    const int32_t *from;   /* (rows) row of kept; NULL: the same row */
    struct gain norm[2];   /* of e, of kept */
    float *y;              /* (rows, 2, width) */
    float *x; /* (rows, width) EAGLE-3: the kept rows, normed if residual; may be kept; or NULL */
    bool residual;
    int width;
};

/* Grid: (rows, the two halves: embedding, kept row). */
static __global__ void __launch_bounds__(JOIN_THREADS)
    mtp_join_kernel(const __grid_constant__ struct join_args p)
{
    SHARED_BYTES(shared);
    float *part = (float *)shared; /* sums of squares, per warp */
    int t = (int)blockIdx.x, half = (int)blockIdx.y, tid = (int)threadIdx.x;
    size_t width = (size_t)p.width;
    struct gain g = p.norm[half];
    dependency_wait();
    dependency_trigger();
    size_t row = half && p.from ? (size_t)p.from[t] : (size_t)t;
    const float *x = (half ? p.kept : p.e) + row * width;
    float *copy = half && p.x ? p.x + (size_t)t * width : NULL;
    float *y = p.y + (size_t)(2 * t + half) * width;
    float squares = 0.0f, rms = 1.0f;
    for (int k = tid; k < p.width; k += JOIN_THREADS)
        squares += x[k] * x[k];
    squares = warp_sum(squares);
    if (lane_id() == 0)
        part[warp_id()] = squares;
    __syncthreads();
    squares = warp_sum(lane_id() < JOIN_THREADS / 32 ? part[lane_id()] : 0.0f);
    if (g.gain)
        rms = rsqrtf(squares / (float)p.width + g.eps);
    for (int k = tid; k < p.width; k += JOIN_THREADS) {
        float v = x[k], n = g.gain ? v * rms * g.gain[k] : v;
        y[k] = n;
        if (copy)
            copy[k] = p.residual ? n : v;
    }
}

struct to_fc_args {
    const float *taps;   /* (n, most, width) */
    const int32_t *from; /* (rows) */
    struct gain norm;    /* of a whole row */
    float *y;            /* (rows, n, width) */
    int n, most, width;
};

/* Grid: (rows). The rows of all taps side by side, and their norm. */
static __global__ void __launch_bounds__(JOIN_THREADS)
    mtp_to_fc_kernel(const __grid_constant__ struct to_fc_args p)
{
    SHARED_BYTES(shared);
    float *part = (float *)shared; /* sums of squares, per warp */
    int t = (int)blockIdx.x, tid = (int)threadIdx.x, wide = p.n * p.width;
    dependency_wait();
    dependency_trigger();
    size_t width = (size_t)p.width, plane = (size_t)p.most * width;
    const float *x = p.taps + (size_t)p.from[t] * width;
    float *y = p.y + (size_t)t * (size_t)wide;
    float squares = 0.0f, rms = 1.0f;
    for (int i = 0; i < p.n; i++)
        for (int k = tid; k < p.width; k += JOIN_THREADS) {
            float v = x[(size_t)i * plane + (size_t)k];
            squares += v * v;
            y[i * p.width + k] = v;
        }
    if (!p.norm.gain)
        return;
    squares = warp_sum(squares);
    if (lane_id() == 0)
        part[warp_id()] = squares;
    __syncthreads();
    squares = warp_sum(lane_id() < JOIN_THREADS / 32 ? part[lane_id()] : 0.0f);
    rms = rsqrtf(squares / (float)wide + p.norm.eps);
    for (int i = 0; i < p.n; i++)
        for (int k = i * p.width + tid; k < (i + 1) * p.width; k += JOIN_THREADS)
            y[k] *= rms * p.norm.gain[k]; /* a thread's own columns */
}

/* Grid: (pieces of all rows). y = x, after d is added to x; d may be NULL. n: floats. */
template <int V>
static __global__ void __launch_bounds__(JOIN_THREADS)
    mtp_copy_kernel(float *x, const float *d, float *y, size_t n)
{
    size_t i = ((size_t)blockIdx.x * JOIN_THREADS + threadIdx.x) * V;
    dependency_wait();
    dependency_trigger();
    if (i >= n)
        return;
    float v[V];
#pragma unroll
    for (int k = 0; k < V; k++)
        v[k] = x[i + (size_t)k] + (d ? d[i + (size_t)k] : 0.0f);
#pragma unroll
    for (int k = 0; k < V; k++) {
        y[i + (size_t)k] = v[k];
        if (d)
            x[i + (size_t)k] = v[k];
    }
}

/* Grid: (pieces of a row, rows). Rows of n logits become rows of n_vocab; the others are -inf. */
static __global__ void __launch_bounds__(JOIN_THREADS)
    mtp_widen_kernel(const float *few, int n, int n_vocab, float *logits)
{
    int i = (int)(blockIdx.x * JOIN_THREADS + threadIdx.x);
    size_t row = blockIdx.y;
    dependency_wait();
    dependency_trigger();
    if (i < n_vocab)
        logits[row * (size_t)n_vocab + (size_t)i] =
            i < n ? few[row * (size_t)n + (size_t)i] : -INFINITY;
}

/* True if the rows of a step count as decodes for attention: few rows per sequence, and few in
 * all. */
static bool reads_drafts(const struct cuda_backend *cu, const struct batch *b)
{
    if (!mtp_of(cu)->verifies || cu->exact || b->n_decode == b->n_seqs || b->n_tokens > DRAFT_ROWS)
        return false;
    for (int i = b->n_decode; i < b->n_seqs; i++)
        if (b->q_start[i + 1] - b->q_start[i] > DRAFT_SEQ_ROWS)
            return false;
    return true;
}

int mtp_put(struct cuda_backend *cu, const struct batch *b, int used)
{
    struct cuda_mtp *m = mtp_of(cu);
    int32_t *to = cu->step.host;
    m->narrows = -1;
    m->continues = b->continues;
    for (int i = network_depth(cu->net) - 1; i >= 0 && i < cu->net->n_layers; i++)
        if (batch_narrows(b, cu->net, i))
            m->narrows = i;
    m->from = used;
    for (int i = 0; b->from && i < b->n_tokens; i++)
        to[used++] = b->from[i];
    m->stride = reads_drafts(cu, b) ? LEAST_STRIDE : 0;
    m->rows_at = used;
    for (int i = 0; m->stride && i <= b->n_tokens; i++)
        to[used++] = i;
    m->rows_len = used;
    for (int i = 0; m->stride && i < b->n_tokens; i++)
        to[used++] = b->pos[i] + 1;
    return (used + 3) & ~3;
}

int mtp_stride(struct cuda_backend *cu, int n, int most)
{
    struct cuda_mtp *m = mtp_of(cu);
    if (!m->stride)
        return n < most ? n : most;
    while (m->stride < n)
        m->stride *= 2;
    m->stride = m->stride < most ? m->stride : most;
    return m->stride;
}

int mtp_put_pages(struct cuda_backend *cu, const struct batch *b, int used)
{
    struct cuda_mtp *m = mtp_of(cu);
    m->rows_pages = used;
    for (int i = 0; m->stride && i < b->n_seqs; i++)
        for (int t = b->q_start[i]; t < b->q_start[i + 1]; t++)
            for (int k = 0; k < m->stride; k++)
                cu->step.host[used++] = b->pages[(size_t)i * (size_t)b->max_pages + (size_t)k];
    return used;
}

size_t mtp_step_ints(const struct cuda_backend *cu)
{
    const struct model_shape *s = &cu->shape;
    return mtp_of(cu)->verifies
               ? (size_t)s->max_tokens + DRAFT_ROWS * ((size_t)s->max_pages + 2) + 16
               : 0;
}

struct bounds mtp_bounds(struct cuda_backend *cu, const struct network *net, const struct bounds *b)
{
    struct bounds own = *b;
    mtp_of(cu)->verifies = b->drafts || net->mtp.fc;
    if (mtp_of(cu)->verifies && own.max_seqs < DRAFT_ROWS)
        own.max_seqs = DRAFT_ROWS;
    return own;
}

uint64_t mtp_key(const struct cuda_backend *cu, uint64_t key)
{
    return key | (uint64_t)mtp_of(cu)->stride << 44;
}

struct step mtp_rows(const struct cuda_backend *cu)
{
    const struct cuda_mtp *m = mtp_of(cu);
    struct step s = cuda_step(cu);
    if (!m->stride)
        return s;
    s.q_start = s.seq_of = cu->step.dev + m->rows_at;
    s.kv_len = cu->step.dev + m->rows_len;
    s.pages = cu->step.dev + m->rows_pages;
    s.n_seqs = s.n_decode = s.n_tokens;
    return s;
}

bool mtp_supported(const struct network *net, struct error *err)
{
    const struct mtp *m = &net->mtp;
    if (m->fc && (m->embed_norm.kind == NORM_LAYER || m->hidden_norm.kind == NORM_LAYER ||
                  m->taps_norm.kind == NORM_LAYER))
        return network_refuse(err, -1, "LayerNorm in an MTP block is", "cuda");
    return true;
}

bool mtp_prepare(struct cuda_backend *cu, const struct network *net, const struct bounds *b,
                 struct error *err)
{
    struct cuda_mtp *s = mtp_of(cu);
    const struct mtp *m = &net->mtp;
    size_t bytes = m->fc ? (size_t)b->max_tokens * (size_t)net->n_embd * sizeof(float) : 0;
    size_t taps = (size_t)m->n_taps * bytes, few = mtp_few_outputs(net);
    const struct device_buffer list[] = {
        {(void **)&s->kept, bytes},
        {(void **)&s->joined, 2 * bytes},
        {(void **)&s->taps, taps},
        {(void **)&s->to_fc, taps},
        {(void **)&s->few_logits, (size_t)b->max_out * few * sizeof(float)}};
    return cuda_own(cu, list, (int)(sizeof list / sizeof *list), err);
}

/* y = norm(x) of the stream's rows; without a gain x itself. */
static void keep_rows(struct cuda_backend *cu, struct gain gain, float *y)
{
    struct resid *r = &cu->resid;
    if (!r->rows)
        return;
    bool adds = r->add == ADD_ROWS && resid_adds(r); /* fused with the norm */
    if (!adds)
        resid_plain(cu, r);
    const float *d = adds ? r->d : NULL;
    r->add = ADD_NONE;
    step_mark(cu);
    if (gain.gain) {
        struct encoder_norm p = {};
        p.x = r->x;
        p.d = d;
        p.scale = 1.0f;
        p.x_to = d ? r->x : NULL;
        p.gain = gain;
        p.y = y;
        p.n = r->rows;
        p.width = cu->shape.n_embd;
        encoder_norm(cu, p);
    } else {
        size_t n = (size_t)r->rows * (size_t)cu->shape.n_embd;
        int each = cu->shape.n_embd % 4 ? 1 : 4;
        size_t blocks = (n + (size_t)(each * JOIN_THREADS) - 1) / (size_t)(each * JOIN_THREADS);
        cuda_launch(cu, each == 1 ? mtp_copy_kernel<1> : mtp_copy_kernel<4>, dim3((unsigned)blocks),
                    JOIN_THREADS, 0, LAUNCH_EARLY, r->x, d, y, n);
    }
    step_mark_end(cu, STAGE_NORM);
}

void mtp_keep(struct backend *be, const struct norm *norm)
{
    struct cuda_backend *cu = cuda_self(be);
    keep_rows(cu, cuda_gain(cu, norm), mtp_of(cu)->kept);
}

void mtp_tap(struct backend *be, int k)
{
    struct cuda_backend *cu = cuda_self(be);
    struct gain none = {};
    size_t plane = (size_t)cu->shape.max_tokens * (size_t)cu->shape.n_embd;
    keep_rows(cu, none, mtp_of(cu)->taps + (size_t)k * plane);
}

struct rows mtp_joined(struct cuda_backend *cu)
{
    return rows_of(mtp_of(cu)->joined, cu->resid.rows, 2 * cu->shape.n_embd);
}

size_t mtp_few_outputs(const struct network *net)
{
    const struct weight *w = net->mtp.n_taps ? net->mtp.head.w : NULL;
    return w && w->n_out < net->n_vocab ? (size_t)w->n_out : 0;
}

float *mtp_few_logits(const struct cuda_backend *cu, const struct head *h)
{
    return h->w->n_out < cu->shape.n_vocab && !h->partial ? mtp_of(cu)->few_logits : NULL;
}

void mtp_widen(struct cuda_backend *cu, const struct head *h, int rows)
{
    int n_vocab = cu->shape.n_vocab;
    dim3 grid((unsigned)ceil_div(n_vocab, JOIN_THREADS), (unsigned)rows);
    step_mark(cu);
    cuda_launch(cu, mtp_widen_kernel, grid, JOIN_THREADS, 0, LAUNCH_EARLY,
                (const float *)mtp_of(cu)->few_logits, h->w->n_out, n_vocab, cu->act.logits);
    step_mark_end(cu, STAGE_HEAD);
}

/* x = fc of the rows that the step reads from the taps. */
static void fuse_taps(struct cuda_backend *cu, const struct mtp *m, const int32_t *from, float *x,
                      int rows)
{
    const struct cuda_mtp *own = mtp_of(cu);
    struct to_fc_args p = {};
    p.taps = own->taps;
    p.from = from;
    p.norm = cuda_gain(cu, &m->taps_norm);
    p.y = own->to_fc;
    p.n = m->n_taps;
    p.most = cu->shape.max_tokens;
    p.width = cu->shape.n_embd;
    cuda_launch(cu, mtp_to_fc_kernel, dim3((unsigned)rows), JOIN_THREADS, 128, LAUNCH_EARLY, p);
    struct rows in = rows_of(own->to_fc, rows, m->n_taps * p.width);
    struct pick_case c = {};
    c.rows = rows;
    c.w = cuda_matrix(m->fc);
    c.x = &in;
    c.y = x;
    pick_run(cu, PICK_LINEAR, &c, N_STAGES);
}

void mtp_join(struct backend *be, const struct mtp *m)
{
    struct cuda_backend *cu = cuda_self(be);
    const struct cuda_mtp *own = mtp_of(cu);
    struct embed tokens = {};
    tokens.tokens = m->tokens ? m->tokens : cu->net->embed.tokens;
    const struct embed *embed = m->n_taps ? &tokens : &cu->net->embed;
    struct step s = cuda_step(cu);
    struct resid *r = cuda_start_stream(cu, s.n_tokens);
    if (!s.n_tokens)
        return;
    step_mark(cu);
    cuda_embed(cu, embed, cu->act.norm);
    struct join_args p = {};
    p.e = cu->act.norm;
    p.kept = own->kept;
    p.from = cu->step.dev + own->from;
    p.norm[0] = cuda_gain(cu, &m->embed_norm);
    p.norm[1] = cuda_gain(cu, &m->hidden_norm);
    p.y = own->joined;
    p.width = cu->shape.n_embd;
    p.x = m->n_taps ? r->x : NULL;
    p.residual = m->norm_residual;
    if (m->n_taps && !own->continues) {
        fuse_taps(cu, m, p.from, r->x, s.n_tokens);
        p.kept = r->x;
        p.from = NULL;
        p.x = m->norm_residual ? r->x : NULL;
    }
    cuda_launch(cu, mtp_join_kernel, dim3((unsigned)s.n_tokens, 2), JOIN_THREADS, 128, LAUNCH_EARLY,
                p);
    if (m->n_taps) {
        step_mark_end(cu, STAGE_EMBED);
        return;
    }
    struct rows x = rows_of(own->joined, s.n_tokens, 2 * p.width);
    struct pick_case c = {};
    c.rows = s.n_tokens;
    c.w = cuda_matrix(m->fc);
    c.x = &x;
    c.y = r->x;
    pick_run(cu, PICK_LINEAR, &c, N_STAGES);
    step_mark_end(cu, STAGE_EMBED);
}
