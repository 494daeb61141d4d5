/*
 * The residual stream (struct resid): adds what is pending, and computes its norm in the forms that
 * products read (floats, fp16, records, panels) and the sum of a row's experts. Also converts rows
 * between forms (struct rows).
 * Mapping: one block per row, which passes through shared memory. Limit: latency for few rows;
 * bytes for many (H200, 30B-A3B, 2,048 rows: norm, sum of experts, router and routing take 95 of a
 * layer's 700 us; the sum of experts reads 110 MB).
 */
#include "backend/cuda/heads/encoder.h"
#include "backend/cuda/core/comm.h"
#include "backend/cuda/core/rows.cuh"

#include <math.h>

struct resid_args {
    float *x;              /* (rows, width) */
    const float *d, *gain; /* (rows, width) or NULL; (width) or NULL: x as it is */
    float *n;              /* (rows, width): norm(x + d) * gain, if there is a gain */
    uint16_t *out;         /* (rows, padded) fp16, in the order of fragment_slot */
    uint8_t *records;      /* the same as records (rows.cuh), or NULL */
    uint8_t *panels;       /* the same as panels (gemm_cluster.cu), panel_rows per tile, or NULL */
    int panel_rows;
    float *scale; /* (rows) inverse of a row's scale */
    int width, padded;
    float eps;
    struct expert_sum sum;             /* SUM: replaces d */
    struct resid_epilogue epilogue;    /* EPILOGUE */
    struct norm_more more[MORE_NORMS]; /* EPILOGUE; y NULL: none */
};

/* Columns k..k+3 of row t: the weighted sum of its experts' outputs. SOME: skips experts of weight
 * 0, whose outputs do not exist. */
template <bool SOME = false> DEVICE float4 expert_columns(const struct expert_sum &s, int t, int k)
{
    float v[4] = {};
#pragma unroll 8
    for (int i = 0; i < s.used; i++) {
        float w = s.weight[t * s.used + i] * (1.0f / HIDDEN_SCALE);
        if (SOME && w == 0.0f)
            continue;
        uint2 h =
            *(const uint2 *)(s.out + ((size_t)t * (size_t)s.used + (size_t)i) * (size_t)s.width +
                             (size_t)k);
        v[0] += w * half_to_float(h.x & 0xffff);
        v[1] += w * half_to_float(h.x >> 16);
        v[2] += w * half_to_float(h.y & 0xffff);
        v[3] += w * half_to_float(h.y >> 16);
    }
    return make_float4(v[0], v[1], v[2], v[3]);
}

/* Sums two numbers over the threads of a block; every thread gets both sums. part: (2, 32) */
DEVICE float2 block_sums(float a, float b, float *part)
{
    int warps = (int)blockDim.x >> 5;
    a = warp_sum(a);
    b = warp_sum(b);
    __syncthreads(); /* part is free */
    if (lane_id() == 0) {
        part[warp_id()] = a;
        part[32 + warp_id()] = b;
    }
    __syncthreads();
    return make_float2(warp_sum(lane_id() < warps ? part[lane_id()] : 0.0f),
                       warp_sum(lane_id() < warps ? part[32 + lane_id()] : 0.0f));
}

DEVICE float4 four(const float *p, int k)
{
    return *(const float4 *)(p + k);
}
DEVICE float squares_of(const float4 &v)
{
    return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
}
/* v * s * gain, or v if there is no gain */
DEVICE float4 normed(const float4 &v, float s, const struct gain &g, int k)
{
    if (!g.gain)
        return v;
    float4 f = four(g.gain, k);
    return make_float4(v.x * s * f.x, v.y * s * f.y, v.z * s * f.z, v.w * s * f.w);
}

/* Computes x of struct resid_epilogue, stores it to the stream, and its product with the gain to
 * `row`. Returns a thread's part of the sum of squares and the largest product. row, aside: (width)
 * in shared memory. */
template <bool SUM>
DEVICE void resid_epilogue_columns(const struct resid_args &p, float *part, float *row,
                                   float *aside, float *squares, float *top)
{
    const struct resid_epilogue &c = p.epilogue;
    int t = (int)blockIdx.x, first = (int)threadIdx.x * 4, step = (int)blockDim.x * 4;
    size_t at = (size_t)t * (size_t)p.width;
    float gate = 1.0f, a = 0.0f, b = 0.0f, inv = 1.0f / (float)p.width;
    if (c.beside_gate)
        gate = fast_divide(1.0f, 1.0f + fast_exp(-c.beside_gate[t]));
    for (int k = first; k < p.width; k += step) {
        float4 y = SUM ? expert_columns(p.sum, t, k) : four(p.d + at, k);
        a += squares_of(y);
        *(float4 *)(row + k) = y;
        if (c.beside) {
            float4 z = four(c.beside + at, k);
            z = make_float4(z.x * gate, z.y * gate, z.z * gate, z.w * gate);
            b += squares_of(z);
            *(float4 *)(aside + k) = z;
        }
    }
    float2 sums = make_float2(0.0f, 0.0f);
    if (c.norm.gain || c.beside_norm.gain)
        sums = block_sums(a, b, part);
    float ra = rsqrtf(sums.x * inv + c.norm.eps), rb = rsqrtf(sums.y * inv + c.beside_norm.eps);
    a = 0.0f;
    for (int k = first; k < p.width; k += step) { /* a thread's own columns */
        float4 y = normed(four(row, k), ra, c.norm, k);
        if (c.beside) {
            float4 z = normed(four(aside, k), rb, c.beside_norm, k);
            y = make_float4(y.x + z.x, y.y + z.y, y.z + z.z, y.w + z.w);
        }
        a += squares_of(y);
        *(float4 *)(row + k) = y;
    }
    if (c.out.gain)
        sums = block_sums(a, 0.0f, part);
    float ro = rsqrtf(sums.x * inv + c.out.eps), m = c.stream_scale;
    for (int k = first; k < p.width; k += step) {
        float4 y = normed(four(row, k), ro, c.out, k), x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (!c.alone)
            x = four(p.x + at, k);
        if (c.after) {
            float4 a = four(c.after + at, k);
            x = make_float4(x.x + a.x, x.y + a.y, x.z + a.z, x.w + a.w);
        }
        x = make_float4((x.x + c.scale * y.x) * m, (x.y + c.scale * y.y) * m,
                        (x.z + c.scale * y.z) * m, (x.w + c.scale * y.w) * m);
        *(float4 *)(p.x + at + (size_t)k) = x;
        *squares += squares_of(x);
        struct gain g = {p.gain, 0.0f};
        float4 v = normed(x, 1.0f, g, k);
        *top = fmaxf(fmaxf(*top, fmaxf(fabsf(v.x), fabsf(v.y))), fmaxf(fabsf(v.z), fabsf(v.w)));
        *(float4 *)(row + k) = v;
    }
    __syncthreads(); /* part is reused */
}

/* Converts rows to fp16, with zeros past width, each scaled by a power of two that maps its largest
 * magnitude to about 1024; scale[row] is the inverse. With a gain: x += d, and norm(x) is
 * converted. One block per row. VEC: width is a multiple of four. SUM: d is the sum of the row's
 * experts, still to be weighted. EPILOGUE: struct resid_epilogue is applied first; requires VEC;
 * without `out` that is all. */
template <bool VEC, bool SUM = false, bool EPILOGUE = false>
static __global__ void __launch_bounds__(512)
    resid_fp16_kernel(const __grid_constant__ struct resid_args p)
{
    SHARED_BYTES(shared);
    float *part = (float *)shared, *row = part + 64; /* (2, 32): sums, largest; (width) */
    int tid = (int)threadIdx.x, threads = (int)blockDim.x;
    size_t at = (size_t)blockIdx.x * (size_t)p.width;
    enum { V = VEC ? 4 : 1 };
    dependency_trigger();
    dependency_wait();
    float sum = 0.0f, top = 0.0f;
    if (EPILOGUE) {
        resid_epilogue_columns<SUM>(p, part, row, row + p.padded, &sum, &top);
        if (!p.out)
            return;
    }
#pragma unroll 2
    for (int k = tid * V; k < p.width && !EPILOGUE; k += threads * V) {
        float v[V], d[V] = {}, g[V];
        if (VEC) {
            float4 a = *(const float4 *)(p.x + at + (size_t)k);
            float4 b = make_float4(0.0f, 0.0f, 0.0f, 0.0f), c = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
            if (p.gain) {
                c = *(const float4 *)(p.gain + k);
                if (SUM)
                    b = expert_columns(p.sum, (int)blockIdx.x, k);
                else if (p.d)
                    b = *(const float4 *)(p.d + at + (size_t)k);
            }
            v[0] = a.x, v[V > 1] = a.y, v[V > 2 ? 2 : 0] = a.z, v[V > 2 ? 3 : 0] = a.w;
            d[0] = b.x, d[V > 1] = b.y, d[V > 2 ? 2 : 0] = b.z, d[V > 2 ? 3 : 0] = b.w;
            g[0] = c.x, g[V > 1] = c.y, g[V > 2 ? 2 : 0] = c.z, g[V > 2 ? 3 : 0] = c.w;
        } else {
            v[0] = p.x[at + (size_t)k];
            d[0] = p.gain && p.d ? p.d[at + (size_t)k] : 0.0f;
            g[0] = p.gain ? p.gain[k] : 1.0f;
        }
#pragma unroll
        for (int i = 0; i < V; i++) {
            v[i] += d[i];
            if (p.gain && p.d && !VEC)
                p.x[at + (size_t)(k + i)] = v[i];
            sum += v[i] * v[i];
            d[i] = v[i] * g[i];
            top = fmaxf(top, fabsf(d[i]));
            row[k + i] = d[i];
        }
        if (VEC && (SUM || (p.gain && p.d)))
            *(float4 *)(p.x + at + (size_t)k) =
                make_float4(v[0], v[V > 1], v[V > 2 ? 2 : 0], v[V > 2 ? 3 : 0]);
    }
    sum = warp_sum(sum);
    uint32_t most = warp_max_u32(bits_of(top));
    if (lane_id() == 0) {
        part[warp_id()] = sum;
        part[32 + warp_id()] = float_of(most);
    }
    __syncthreads();
    sum = warp_sum(lane_id() < threads >> 5 ? part[lane_id()] : 0.0f);
    most = warp_max_u32(lane_id() < threads >> 5 ? bits_of(part[32 + lane_id()]) : 0);
    float rms = p.gain ? rsqrtf(sum / (float)p.width + p.eps) : 1.0f;
    uint32_t e = bits_of(float_of(most) * rms) >> 23;
    e = e < 16 ? 16 : e;
    float f = float_of((264 - e) << 23);
    uint16_t *out = p.out + (size_t)blockIdx.x * (size_t)p.padded;
    uint8_t *panel = NULL; /* this row in the tile's first panel */
    if (p.panels) {
        int tile = (int)blockIdx.x / p.panel_rows, r = (int)blockIdx.x - tile * p.panel_rows;
        panel =
            p.panels + ((size_t)(tile * p.panel_rows) * (size_t)p.padded + (size_t)(r * 64)) * 2;
    }
#pragma unroll 2
    for (int k = tid * 4; k < p.padded; k += threads * 4) {
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] = k + i < p.width ? row[k + i] * rms : 0.0f;
            if (!VEC && p.gain && k + i < p.width)
                p.n[at + (size_t)(k + i)] = v[i];
        }
        if (VEC && p.gain && p.n && k < p.width)
            *(float4 *)(p.n + at + (size_t)k) = make_float4(v[0], v[1], v[2], v[3]);
        if (EPILOGUE && k < p.width)
#pragma unroll
            for (int i = 0; i < MORE_NORMS; i++) /* every thread reads only columns it wrote */
                if (p.more[i].y)
                    *(float4 *)(p.more[i].y + at + (size_t)k) =
                        normed(four(p.x + at, k), rsqrtf(sum / (float)p.width + p.more[i].gain.eps),
                               p.more[i].gain, k);
        uint2 h = make_uint2(pack_half2(v[0] * f, v[1] * f), pack_half2(v[2] * f, v[3] * f));
        *(uint32_t *)(out + fragment_slot(k)) = h.x;
        *(uint32_t *)(out + fragment_slot(k + 2)) = h.y;
        if (panel) {
            int at = fragment_slot(k), piece = at >> 3 & 7, turn = (int)blockIdx.x & 7;
            uint8_t *to = panel + (k >> 6) * p.panel_rows * 128 + (at & 7) * 2;
            *(uint32_t *)(to + ((piece ^ turn) << 4)) = h.x;
            *(uint32_t *)(to + (((piece + 1) ^ turn) << 4)) = h.y;
        }
        if (p.records) {
            uint8_t *record = p.records + ((size_t)blockIdx.x * (size_t)(p.padded / TILE_K) +
                                           (size_t)(k / TILE_K)) *
                                              (size_t)RECORD;
            float total = half_to_float(h.x & 0xffff) + half_to_float(h.x >> 16) +
                          half_to_float(h.y & 0xffff) + half_to_float(h.y >> 16);
            total += __shfl_xor_sync(FULL_WARP, total, 1);
            total += __shfl_xor_sync(FULL_WARP, total, 2);
            *(uint2 *)(record + record_at(k)) = h;
            if (!(k & 15)) {
                uint32_t s = split_half(total);
                *(uint16_t *)(record + record_sum_at(k)) = (uint16_t)s;
                *(uint16_t *)(record + record_sum_at(k) + 8) = (uint16_t)(s >> 16);
            }
        }
    }
    if (tid == 0)
        p.scale[blockIdx.x] = float_of((e - 10) << 23);
}

static int resid_threads(int width)
{
    return width >= 2048 ? 512 : 256;
}

static void resid_launch_epilogue(struct cuda_backend *cu, const struct resid_args &p, int rows)
{
    auto kernel =
        p.sum.out ? resid_fp16_kernel<true, true, true> : resid_fp16_kernel<true, false, true>;
    cuda_launch(cu, kernel, dim3((unsigned)rows), resid_threads(p.width),
                (size_t)(64 + 2 * p.padded) * 4, LAUNCH_EARLY, p);
}

/* Makes every form for which there is a buffer. */
static void resid_launch(struct cuda_backend *cu, struct resid_args p, struct rows *to)
{
    int rows = to->n;
    p.width = to->width;
    p.padded = ceil_div(p.width, TILE_K) * TILE_K;
    p.out = cu->forms.fp16;
    p.records = rows * (p.padded / TILE_K) <= cu->forms.n_records ? cu->forms.records : NULL;
    p.panels = gemm_cluster_fits(cu, rows, p.padded) ? cu->forms.panels : NULL;
    p.panel_rows = gemm_cluster_width(rows);
    p.scale = cu->forms.scale;
    to->fp16 = true;
    to->records = p.records != NULL;
    to->panels = p.panels != NULL;
    int threads = resid_threads(p.width);
    size_t shared = (size_t)(64 + p.padded) * 4;
    if (p.epilogue.set)
        resid_launch_epilogue(cu, p, rows);
    else if (p.sum.out)
        cuda_launch(cu, resid_fp16_kernel<true, true>, dim3((unsigned)rows), threads, shared,
                    LAUNCH_EARLY, p);
    else if (p.width % 4 == 0)
        cuda_launch(cu, resid_fp16_kernel<true>, dim3((unsigned)rows), threads, shared,
                    LAUNCH_EARLY, p);
    else
        cuda_launch(cu, resid_fp16_kernel<false>, dim3((unsigned)rows), threads, shared,
                    LAUNCH_EARLY, p);
}

/* Grid: (rows), each of `width` floats. */
static __global__ void __launch_bounds__(256)
    resid_floats_kernel(const uint16_t *fp16, const float *scale, int first, int width, float *x)
{
    dependency_wait();
    dependency_trigger();
    size_t row = (size_t)first + blockIdx.x;
    const uint16_t *from = fp16 + row * (size_t)((width + TILE_K - 1) / TILE_K * TILE_K);
    for (int k = (int)threadIdx.x; k < width; k += 256)
        x[row * (size_t)width + (size_t)k] = half_to_float(from[fragment_slot(k)]) * scale[row];
}

struct rows rows_of(float *floats, int n, int width)
{
    struct rows x = {floats, n, width, n, false, false, false};
    return x;
}

void rows_to_floats(struct cuda_backend *cu, struct rows *x)
{
    if (x->n_floats < x->n)
        cuda_launch(cu, resid_floats_kernel, dim3((unsigned)(x->n - x->n_floats)), 256, 0,
                    LAUNCH_EARLY, (const uint16_t *)cu->forms.fp16, (const float *)cu->forms.scale,
                    x->n_floats, x->width, x->floats);
    x->n_floats = x->n;
}

void rows_to_fp16(struct cuda_backend *cu, struct rows *x)
{
    struct resid_args p = {};
    p.x = x->floats;
    if (!x->fp16)
        resid_launch(cu, p, x);
}

void rows_join_fp16(struct cuda_backend *cu, const struct rows *x, int n)
{
    struct rows first = rows_of(x->floats, n, x->width);
    rows_to_fp16(cu, &first);
}

/* y = norm(x) * gain; one block per row. */
static __global__ void __launch_bounds__(256)
    rows_norm_kernel(const float *x, struct gain gain, int width, float *y)
{
    SHARED_BYTES(shared);
    size_t at = (size_t)blockIdx.x * (size_t)width;
    float squares = 0.0f;
    dependency_wait();
    dependency_trigger();
    for (int k = (int)threadIdx.x; k < width; k += 256)
        squares += x[at + (size_t)k] * x[at + (size_t)k];
    float s = rsqrtf(block_sums(squares, 0.0f, (float *)shared).x / (float)width + gain.eps);
    for (int k = (int)threadIdx.x; k < width; k += 256)
        y[at + (size_t)k] = x[at + (size_t)k] * s * gain.gain[k];
}

void rows_norm(struct cuda_backend *cu, const float *x, struct gain gain, float *y, int rows,
               int width)
{
    if (gain.layer) {
        struct encoder_norm p = {x, NULL, 0.0f, gain, NULL, y, false, rows, width};
        encoder_norm(cu, p);
        return;
    }
    cuda_launch(cu, rows_norm_kernel, dim3((unsigned)rows), 256, 256, LAUNCH_EARLY, x, gain, width,
                y);
}

/* y[t,:] = sum_k weight[t,k] * out[t,k,:]; one thread per column. SOME: see expert_columns. */
template <bool SOME>
static __global__ void resid_sum_kernel(const float *out, const float *weight, int used, int width,
                                        float *y, bool adds)
{
    dependency_wait();
    dependency_trigger();
    int k = (int)(blockIdx.x * blockDim.x + threadIdx.x), t = (int)blockIdx.y;
    if (k >= width)
        return;
    float v = adds ? y[(size_t)t * (size_t)width + (size_t)k] : 0.0f;
    for (int i = 0; i < used; i++)
        if (!SOME || weight[t * used + i] != 0.0f)
            v += weight[t * used + i] *
                 out[((size_t)t * (size_t)used + (size_t)i) * (size_t)width + (size_t)k];
    y[(size_t)t * (size_t)width + (size_t)k] = v;
}

/* Like resid_sum_kernel, for fp16 scaled by HIDDEN_SCALE; one thread per 4 columns. */
template <bool SOME>
static __global__ void __launch_bounds__(256)
    resid_sum_fp16_kernel(const __grid_constant__ struct expert_sum s)
{
    dependency_wait();
    dependency_trigger();
    int k = (int)(blockIdx.x * blockDim.x + threadIdx.x) * 4, t = (int)blockIdx.y;
    if (k >= s.width)
        return;
    float4 *y = (float4 *)(s.y + (size_t)t * (size_t)s.width + (size_t)k);
    float4 v = expert_columns<SOME>(s, t, k);
    if (s.adds) {
        float4 a = *y;
        v = make_float4(v.x + a.x, v.y + a.y, v.z + a.z, v.w + a.w);
    }
    *y = v;
}

void resid_sum_floats(struct cuda_backend *cu, float *y, int rows, int used, int width, bool some,
                      bool adds)
{
    cuda_launch(cu, some ? resid_sum_kernel<true> : resid_sum_kernel<false>,
                dim3((unsigned)ceil_div(width, 256), (unsigned)rows), 256, 0, LAUNCH_EARLY,
                cu->mlp.expert_out, cu->routing.weight, used, width, y, adds);
}

static void sum_fp16(struct cuda_backend *cu, const struct expert_sum &s, bool some)
{
    cuda_launch(cu, some ? resid_sum_fp16_kernel<true> : resid_sum_fp16_kernel<false>,
                dim3((unsigned)ceil_div(s.width, 1024), (unsigned)s.rows), 256, 0, LAUNCH_EARLY, s);
}

void resid_sum_some(struct cuda_backend *cu, const struct expert_sum &s)
{
    sum_fp16(cu, s, true);
}

/* x += d, n floats. */
static __global__ void __launch_bounds__(256) resid_add_kernel(float *x, const float *d, size_t n)
{
    dependency_wait();
    dependency_trigger();
    size_t i = (size_t)blockIdx.x * 256 + threadIdx.x;
    if (i < n)
        x[i] += d[i];
}

void resid_add_rows(struct cuda_backend *cu, struct resid *r)
{
    if (r->add == ADD_PRODUCT) {
        struct pick_case c = {};
        c.rows = r->rows;
        c.w = r->w;
        c.x = &r->a;
        c.y = cu->act.block;
        pick_run(cu, PICK_LINEAR, &c, STAGE_OUTPUT);
    } else if (r->add == ADD_EXPERTS) {
        sum_fp16(cu, r->experts, false);
    } else {
        return;
    }
    r->add = ADD_ROWS;
    r->d = cu->act.block;
}

/* y = x, n floats: a multiple of four. */
static __global__ void __launch_bounds__(256) resid_copy_kernel(const float *x, float *y, size_t n)
{
    dependency_wait();
    dependency_trigger();
    size_t i = ((size_t)blockIdx.x * 256 + threadIdx.x) * 4;
    if (i < n)
        *(float4 *)(y + i) = *(const float4 *)(x + i);
}

void resid_keep(struct cuda_backend *cu, struct resid *r)
{
    struct rows x = resid_plain(cu, r);
    size_t n = (size_t)x.n * (size_t)x.width;
    cuda_launch(cu, resid_copy_kernel, dim3((unsigned)((n + 1023) / 1024)), 256, 0, LAUNCH_EARLY,
                (const float *)x.floats, cu->act.before, n);
    r->before = cu->act.before;
}

bool resid_adds(const struct resid *r)
{
    return r->add == ADD_NONE || !r->epilogue.set;
}

/* Moves pending ROWS or EXPERTS to the kernel's arguments. */
static void resid_pending(struct resid *r, struct resid_args *p)
{
    p->x = r->x;
    p->d = r->add == ADD_ROWS ? r->d : NULL;
    if (r->add == ADD_EXPERTS)
        p->sum = r->experts;
    if (!resid_adds(r))
        p->epilogue = r->epilogue;
    r->add = ADD_NONE;
    r->epilogue = resid_epilogue{};
}

/* LayerNorm before a block, with x += d fused in. Few rows are converted to other forms later. */
static struct rows resid_layer_norm(struct cuda_backend *cu, struct resid *r, struct gain gain,
                                    bool floats)
{
    struct rows n = rows_of(cu->act.norm, r->rows, cu->shape.n_embd);
    struct encoder_norm p = {};
    if (!resid_adds(r))
        resid_plain(cu, r);
    resid_add_rows(cu, r);
    n.fp16 = pick_fp16_only(cu, r->rows);
    floats = floats || !n.fp16;
    n.n_floats = floats ? n.n : 0;
    p.x = r->x;
    p.gain = gain;
    if (r->add == ADD_ROWS) {
        p.d = r->d;
        p.scale = 1.0f;
        p.x_to = r->x;
    }
    p.y = floats ? n.floats : NULL;
    p.fp16 = n.fp16;
    p.n = n.n;
    p.width = n.width;
    r->add = ADD_NONE;
    step_mark(cu);
    encoder_norm(cu, p);
    step_mark_end(cu, STAGE_NORM);
    return n;
}

/* Post-norm: the stream becomes the norm of the block's sum. */
static struct rows resid_sum_norm(struct cuda_backend *cu, struct resid *r)
{
    struct rows x = rows_of(r->x, r->rows, cu->shape.n_embd);
    struct encoder_norm p = {};
    resid_add_rows(cu, r);
    x.fp16 = pick_fp16_only(cu, r->rows);
    p.x = p.y = r->x;
    p.d = r->d;
    p.scale = r->epilogue.scale;
    p.gain = r->epilogue.sum;
    p.fp16 = x.fp16;
    p.n = x.n;
    p.width = x.width;
    r->add = ADD_NONE;
    r->epilogue = resid_epilogue{};
    step_mark(cu);
    encoder_norm(cu, p);
    step_mark_end(cu, STAGE_NORM);
    return x;
}

struct rows resid_norm(struct cuda_backend *cu, struct resid *r, struct gain gain, bool floats)
{
    if (gain.layer)
        return resid_layer_norm(cu, r, gain, floats);
    return resid_norms(cu, r, gain, floats, NULL, 0);
}

struct rows resid_norms(struct cuda_backend *cu, struct resid *r, struct gain gain, bool floats,
                        const struct norm_more *more, int count)
{
    struct rows n = rows_of(cu->act.norm, r->rows, cu->shape.n_embd);
    struct resid_args p = {};
    floats = floats || !pick_fp16_only(cu, r->rows) || n.width % 4;
    if (r->add == ADD_PRODUCT)
        resid_add_rows(cu, r);
    if (!resid_adds(r) && r->epilogue.sum.gain)
        resid_sum_norm(cu, r);
    /* Fused, squares add in another order than in steps that keep or tap the sum. */
    if (cu->exact && !resid_adds(r))
        resid_plain(cu, r);
    resid_pending(r, &p);
    p.gain = gain.gain;
    p.eps = gain.eps;
    p.n = floats ? n.floats : NULL;
    n.n_floats = floats ? n.n : 0;
    for (int i = 0; i < count && p.epilogue.set; i++)
        p.more[i] = more[i];
    step_mark(cu);
    resid_launch(cu, p, &n);
    for (int i = 0; i < count && !p.epilogue.set; i++)
        rows_norm(cu, r->x, more[i].gain, more[i].y, r->rows, n.width);
    step_mark_end(cu, STAGE_NORM);
    return n;
}

struct norm_in resid_norm_in(struct cuda_backend *cu, struct resid *r, struct gain gain)
{
    struct norm_in in = {};
    resid_add_rows(cu, r);
    in.x = r->x;
    in.gain = gain.gain;
    in.eps = gain.eps;
    if (r->add == ADD_NONE) /* x itself does not change */
        return in;
    in.d = r->d;
    in.x_out = r->other;
    r->other = r->x;
    r->x = in.x_out;
    r->add = ADD_NONE;
    return in;
}

const float *resid_take(struct cuda_backend *cu, struct resid *r, const float **beside, float *by)
{
    const struct resid_epilogue *e = &r->epilogue;
    bool normed = e->norm.gain || e->beside_norm.gain || e->out.gain;
    bool plain = !normed && !e->beside_gate && !e->after && e->stream_scale == 1.0f &&
                 (beside || !e->beside);
    if (beside)
        *beside = NULL;
    *by = 1.0f;
    if (r->add == ADD_NONE)
        return NULL;
    if (resid_adds(r) || plain) {
        if (beside)
            *beside = r->epilogue.set ? e->beside : NULL;
        *by = r->epilogue.set ? e->scale : 1.0f;
        resid_add_rows(cu, r);
        r->add = ADD_NONE;
        r->epilogue = resid_epilogue{};
        return r->d;
    }
    struct resid_args p = {};
    resid_pending(r, &p);
    p.x = cu->act.block;
    p.epilogue.alone = true;
    p.width = cu->shape.n_embd;
    p.padded = ceil_div(p.width, TILE_K) * TILE_K;
    step_mark(cu);
    resid_launch_epilogue(cu, p, r->rows);
    step_mark_end(cu, STAGE_NORM);
    return p.x;
}

struct rows resid_plain(struct cuda_backend *cu, struct resid *r)
{
    size_t n = (size_t)r->rows * (size_t)cu->shape.n_embd;
    if (!resid_adds(r) && r->epilogue.sum.gain)
        return resid_sum_norm(cu, r);
    if (!resid_adds(r)) {
        struct resid_args p = {};
        resid_pending(r, &p);
        p.width = cu->shape.n_embd;
        p.padded = ceil_div(p.width, TILE_K) * TILE_K;
        resid_launch_epilogue(cu, p, r->rows);
        return rows_of(r->x, r->rows, p.width);
    }
    resid_add_rows(cu, r);
    if (r->add == ADD_ROWS)
        cuda_launch(cu, resid_add_kernel, dim3((unsigned)((n + 255) / 256)), 256, 0, LAUNCH_EARLY,
                    r->x, r->d, n);
    r->add = ADD_NONE;
    return rows_of(r->x, r->rows, cu->shape.n_embd);
}
