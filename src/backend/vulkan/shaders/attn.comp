#version 460
/*
 * Attention of one row and head per workgroup, over the paged cache: 128 keys at a time, one each invocation, with an
 * online softmax. Then units of eight values of v are summed by groups of invocations. K and V of any type and dim. With
 * splits the keys of a row and head are divided among workgroups, and attn_join.comp joins their sums.
 */
#include "common.glsl"
#include "kv.glsl"

layout(constant_id = 0) const uint K_TYPE = FORMAT_F16;
layout(constant_id = 1) const uint V_TYPE = FORMAT_F16;
layout(push_constant) uniform Push { attn_args p; };
#include "attn_keys.glsl"
#include "attn_out.glsl"

shared float weight[THREADS];
shared vec4 part[2 * THREADS];

/* Whether sparse attention has chosen a key for the row. */
bool is_chosen(uint t, uint kv_head, uint key)
{
    Words c = Words(p.bytes);
    uint unit = key / c.v[0], groups = c.v[1];
    return (Words(p.bytes + 4 * (CHOSEN_WORDS + (uint64_t(t) * groups + (groups > 1 ? kv_head : 0)) * c.v[2])).v[unit / 32] >>
                (unit & 31u) & 1u) != 0;
}

/* Leaves the sum of values in q, and returns the largest score and the sum of weights. The workgroup has the chunks of keys
 * part, part + splits and so on. */
vec2 attend(Ints step, uint t, uint h, uint split)
{
    uint seq = step.v[step.v[STEP_SEQ] + t], kv_head = h * p.n_kv_heads / p.n_heads;
    Ints pages = Ints(p.step + 4 * (step.v[STEP_PAGES] + uint64_t(seq) * step.v[STEP_PAGE_STRIDE]));
    uint64_t k_tile = kv_tile_bytes(K_TYPE, p.page_len, p.k_dim),
             v_tile = kv_tile_bytes(V_TYPE, p.page_len, p.v_dim);
    bool latent = (p.flags & ATTN_LATENT) != 0;
    uint v_row = latent ? p.k_dim : p.v_dim;
    v_tile = latent ? k_tile : v_tile;
    ivec2 keys = keys_of(step, t, seq);
    uint padded = (p.k_dim + 7) / 8 * 8;
    for (uint i = TID; i < padded; i += THREADS)
        q[i] = i < p.k_dim ? floats(p.q, uint64_t(t) * p.ldq + h * p.k_dim).v[i] : 0;
    barrier();
    uint units = (p.v_dim + 7) / 8, groups = THREADS / units, group = TID / units, unit = TID % units;
    vec4 sum_a = vec4(0), sum_b = vec4(0);
    float top = -1.0 / 0.0, total = 0;
    if (p.sinks != 0 && split == 0) {
        top = Floats(p.sinks).v[h];
        total = 1;
    }
    for (int base = keys.x + int(split * THREADS); base <= keys.y; base += int(THREADS * p.splits)) {
        int key = base + int(TID);
        float score = -1.0 / 0.0;
        if (key <= keys.y) {
            uint64_t tile = p.k + (uint64_t(pages.v[key / p.page_len]) * p.n_kv_heads + kv_head) * k_tile;
            float s = 0;
            for (uint u = 0; u < padded / 8; u++) {
                vec4 a, b;
                kv_eight(K_TYPE, tile, p.page_len, p.k_dim, key % p.page_len, u, a, b);
                s += dot(a, vec4(q[8 * u], q[8 * u + 1], q[8 * u + 2], q[8 * u + 3])) +
                     dot(b, vec4(q[8 * u + 4], q[8 * u + 5], q[8 * u + 6], q[8 * u + 7]));
            }
            if ((p.flags & ATTN_CHOSEN) == 0 || is_chosen(t, kv_head, uint(key)))
                score = s * p.scale;
            if (p.softcap != 0 && score > -1.0 / 0.0)
                score = p.softcap * tanh_of(score / p.softcap);
        }
        float now = max(max(top, group_max(score)), -3e38), keep = exp(top - now);
        float e = exp(score - now);
        weight[TID] = e;
        total = total * keep + group_sum(e); /* it has the barriers that `weight` needs */
        sum_a *= keep;
        sum_b *= keep;
        top = now;
        uint n = min(uint(keys.y - base + 1), THREADS);
        for (uint j = group; group < groups && j < n; j += groups) {
            uint at = uint(base) + j;
            uint64_t tile = p.v + (uint64_t(pages.v[at / p.page_len]) * p.n_kv_heads + kv_head) * v_tile;
            vec4 a, b;
            kv_eight(V_TYPE, tile, p.page_len, v_row, at % p.page_len, unit, a, b);
            sum_a += weight[j] * a;
            sum_b += weight[j] * b;
        }
        barrier();
    }
    part[2 * TID] = sum_a;
    part[2 * TID + 1] = sum_b;
    barrier();
    for (uint i = TID; i < p.v_dim; i += THREADS) {
        float s = 0;
        for (uint g = 0; g < groups; g++)
            s += part[2 * (g * units + i / 8) + i / 4 % 2][i % 4];
        q[i] = s;
    }
    barrier();
    return vec2(top, total);
}

void main()
{
    Ints step = Ints(p.step);
    uint h = gl_WorkGroupID.x, split = gl_WorkGroupID.z;
    uint n_rows = uint(step.v[STEP_ROWS]);
    for (uint t = gl_WorkGroupID.y; t < n_rows; t += gl_NumWorkGroups.y) {
        bool padding = step.v[step.v[STEP_SLOT] + t] < 0;
        vec2 end = vec2(0, 1);
        barrier();
        if (!padding)
            end = attend(step, t, h, split);
        if (p.splits == 1) {
            attn_out(t, h, padding, end.y);
            continue;
        }
        Floats to = floats(p.parts, ((uint64_t(t) * p.n_heads + h) * p.splits + split) * (p.v_dim + 2));
        for (uint i = TID; i < p.v_dim && !padding; i += THREADS)
            to.v[i] = q[i];
        if (TID == 0) {
            to.v[p.v_dim] = end.x;
            to.v[p.v_dim + 1] = end.y;
        }
    }
}
