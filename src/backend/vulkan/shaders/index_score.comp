#version 460
/*
 * Scores of the units that sparse attention chooses among, for one row and group of heads: of keys, sum_h w[h] max(q[h] . k, 0);
 * of blocks of keys, the largest q[group] . k, and infinity for the row's own. One invocation per unit.
 */
#include "common.glsl"
#include "kv.glsl"

layout(constant_id = 0) const uint TYPE = FORMAT_F16;
layout(push_constant) uniform Push { index_args p; };

const uint MAX_DIM = 256;
shared vec4 query[MAX_DIM / 4];

float product(Ints pages, uint key, uint64_t tile_bytes)
{
    float sum = 0;
    for (uint u = 0; u < p.dim / 8; u++) {
        vec4 a, b;
        kv_eight(TYPE, p.k + uint64_t(pages.v[key / p.page_len]) * tile_bytes, p.page_len, p.dim, key % p.page_len, u, a, b);
        sum += dot(a, query[2 * u]) + dot(b, query[2 * u + 1]);
    }
    return sum;
}

void main()
{
    Ints step = Ints(p.step);
    uint t = p.first + gl_WorkGroupID.y, group = gl_WorkGroupID.z, unit = gl_WorkGroupID.x * THREADS + TID;
    uint seq = step.v[step.v[STEP_SEQ] + t], pos = step.v[step.v[STEP_POS] + t], each = max(p.block, 1);
    if (step.v[step.v[STEP_SLOT] + t] < 0)
        return; /* padding */
    Ints pages = Ints(p.step + 4 * (step.v[STEP_PAGES] + uint64_t(seq) * step.v[STEP_PAGE_STRIDE]));
    uint64_t tile_bytes = kv_tile_bytes(TYPE, p.page_len, p.dim);
    float sum = 0;
    for (uint h = p.block != 0 ? group : 0; h < (p.block != 0 ? group + 1 : p.n_heads); h++) {
        barrier();
        for (uint i = TID; i < p.dim / 4; i += THREADS)
            query[i] = Vectors(p.q + 4 * (uint64_t(t) * p.ldq + h * p.dim)).v[i];
        barrier();
        if (unit * each > pos)
            continue;
        if (p.block != 0) {
            sum = -1.0 / 0.0;
            for (uint key = unit * each; key < (unit + 1) * each && key <= pos; key++)
                sum = max(sum, product(pages, key, tile_bytes));
            sum = unit == pos / each ? 1.0 / 0.0 : sum;
        } else {
            sum += floats(p.w, uint64_t(t) * p.n_heads).v[h] * max(product(pages, unit, tile_bytes), 0);
        }
    }
    if (unit * each <= pos)
        floats(p.scores, (uint64_t(gl_WorkGroupID.y) * p.n_groups + group) * p.ld_scores).v[unit] = sum;
}
