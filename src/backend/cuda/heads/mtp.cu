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
    const int32_t *from;   /* (rows) row of kept */
    struct gain norm[2];   /* of e, of kept */
    float *y;              /* (rows, 2, width) */
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
    const float *x = half ? p.kept + (size_t)p.from[t] * width : p.e + (size_t)t * width;
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
    for (int k = tid; k < p.width; k += JOIN_THREADS)
        y[k] = g.gain ? x[k] * rms * g.gain[k] : x[k];
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
    if (m->fc && (m->embed_norm.kind == NORM_LAYER || m->hidden_norm.kind == NORM_LAYER))
        return network_refuse(err, -1, "LayerNorm in an MTP block is", "cuda");
    return true;
}

bool mtp_prepare(struct cuda_backend *cu, const struct network *net, const struct bounds *b,
                 struct error *err)
{
    struct cuda_mtp *s = mtp_of(cu);
    size_t bytes = net->mtp.fc ? (size_t)b->max_tokens * (size_t)net->n_embd * sizeof(float) : 0;
    const struct device_buffer list[] = {{(void **)&s->kept, bytes},
                                         {(void **)&s->joined, 2 * bytes}};
    return cuda_own(cu, list, 2, err);
}

void mtp_keep(struct backend *be, const struct norm *norm)
{
    struct cuda_backend *cu = cuda_self(be);
    struct resid *r = &cu->resid;
    struct encoder_norm p = {};
    if (!r->rows)
        return;
    bool adds = r->add == ADD_ROWS && resid_adds(r); /* fused with the norm */
    if (!adds)
        resid_plain(cu, r);
    p.x = r->x;
    if (adds) {
        p.d = r->d;
        p.scale = 1.0f;
        p.x_to = r->x;
        r->add = ADD_NONE;
    }
    p.gain = cuda_gain(cu, norm);
    p.y = mtp_of(cu)->kept;
    p.n = r->rows;
    p.width = cu->shape.n_embd;
    step_mark(cu);
    encoder_norm(cu, p);
    step_mark_end(cu, STAGE_NORM);
}

void mtp_join(struct backend *be, const struct mtp *m)
{
    struct cuda_backend *cu = cuda_self(be);
    const struct embed *embed = &cu->net->embed;
    const struct cuda_mtp *own = mtp_of(cu);
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
    cuda_launch(cu, mtp_join_kernel, dim3((unsigned)s.n_tokens, 2), JOIN_THREADS, 128, LAUNCH_EARLY,
                p);
    struct rows x = rows_of(own->joined, s.n_tokens, 2 * p.width);
    struct pick_case c = {};
    c.rows = s.n_tokens;
    c.w = cuda_matrix(m->fc);
    c.x = &x;
    c.y = r->x;
    pick_run(cu, PICK_LINEAR, &c, N_STAGES);
    step_mark_end(cu, STAGE_EMBED);
}
