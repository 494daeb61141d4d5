#version 460
/*
 * Attention of one row and GROUP heads that share keys, 128 keys at a time. First an invocation computes the scores of one
 * key for all heads. Then it has a unit of eight values of v and every n-th key of the chunk, with an online softmax of its
 * own, so that nothing but the scores passes between invocations until the end. Keys and values are of one type. Splits as
 * in attn.comp.
 */
#include "common.glsl"
#include "kv.glsl"

layout(constant_id = 0) const uint TYPE = FORMAT_F16;
layout(constant_id = 1) const uint GROUP = 1;
layout(push_constant) uniform Push { attn_args p; };
#include "attn_keys.glsl"
#include "attn_out.glsl"

const uint MAX_QUERIES = 2048; /* values of GROUP queries */
shared vec4 queries[MAX_QUERIES / 4];
shared float scores[GROUP * THREADS];
shared vec4 part[2 * THREADS];
shared vec2 part_top[THREADS]; /* the largest score and the sum of weights */

void score_key(uint64_t tile, uint off, uint key)
{
    float s[GROUP];
    [[unroll]] for (uint g = 0; g < GROUP; g++)
        s[g] = 0;
    for (uint u = 0; u < p.k_dim / 8; u++) {
        vec4 a, b;
        kv_eight(TYPE, tile, p.page_len, p.k_dim, off, u, a, b);
        [[unroll]] for (uint g = 0; g < GROUP; g++) {
            uint at = g * (p.k_dim / 4) + 2 * u;
            s[g] += dot(a, queries[at]) + dot(b, queries[at + 1]);
        }
    }
    [[unroll]] for (uint g = 0; g < GROUP; g++) {
        float v = s[g] * p.scale;
        if (p.softcap != 0)
            v = p.softcap * tanh_of(v / p.softcap);
        scores[g * THREADS + key] = v;
    }
}

/* Joins the heads' sums over the groups of keys; then they are written. */
void write_head(uint t, uint h, uint split, uint units, uint groups, vec2 top, vec4 a, vec4 b, bool padding)
{
    barrier();
    part[2 * TID] = a;
    part[2 * TID + 1] = b;
    part_top[TID] = top;
    barrier();
    float best = -1.0 / 0.0, total = 0;
    for (uint g = 0; g < groups; g++)
        best = max(best, part_top[g * units].x);
    for (uint g = 0; g < groups; g++)
        total += part_top[g * units].y * exp(part_top[g * units].x - best);
    for (uint i = TID; i < p.v_dim; i += THREADS) {
        float s = 0;
        for (uint g = 0; g < groups; g++)
            s += part[2 * (g * units + i / 8) + i / 4 % 2][i % 4] * exp(part_top[g * units].x - best);
        q[i] = s;
    }
    barrier();
    if (p.splits == 1) {
        attn_out(t, h, padding, total);
        return;
    }
    Floats to = floats(p.parts, ((uint64_t(t) * p.n_heads + h) * p.splits + split) * (p.v_dim + 2));
    for (uint i = TID; i < p.v_dim; i += THREADS)
        to.v[i] = q[i];
    if (TID == 0) {
        to.v[p.v_dim] = best;
        to.v[p.v_dim + 1] = total;
    }
}

void attend(Ints step, uint t, uint h0, uint split, bool padding)
{
    uint seq = step.v[step.v[STEP_SEQ] + t], kv_head = h0 * p.n_kv_heads / p.n_heads;
    Ints pages = Ints(p.step + 4 * (step.v[STEP_PAGES] + uint64_t(seq) * step.v[STEP_PAGE_STRIDE]));
    uint64_t k_tile = kv_tile_bytes(TYPE, p.page_len, p.k_dim), v_tile = kv_tile_bytes(TYPE, p.page_len, p.v_dim);
    ivec2 keys = padding ? ivec2(0, -1) : keys_of(step, t, seq);
    for (uint i = TID; i < GROUP * p.k_dim / 4; i += THREADS)
        queries[i] = Vectors(p.q + 4 * (uint64_t(t) * p.ldq + h0 * p.k_dim)).v[i];
    uint units = p.v_dim / 8, groups = THREADS / units, group = TID / units, unit = TID % units;
    float top[GROUP], total[GROUP];
    vec4 a[GROUP], b[GROUP];
    [[unroll]] for (uint g = 0; g < GROUP; g++) {
        bool sink = p.sinks != 0 && split == 0 && group == 0;
        top[g] = sink ? Floats(p.sinks).v[h0 + g] : -3e38;
        total[g] = sink ? 1 : 0;
        a[g] = b[g] = vec4(0);
    }
    for (int base = keys.x + int(split * THREADS); base <= keys.y; base += int(THREADS * p.splits)) {
        uint n = min(uint(keys.y - base + 1), THREADS), mine = uint(base) + TID;
        barrier();
        if (TID < n)
            score_key(p.k + (uint64_t(pages.v[mine / p.page_len]) * p.n_kv_heads + kv_head) * k_tile, mine % p.page_len,
                      TID);
        barrier();
        if (group >= groups || group >= n)
            continue;
        [[unroll]] for (uint g = 0; g < GROUP; g++) {
            float now = top[g];
            for (uint j = group; j < n; j += groups)
                now = max(now, scores[g * THREADS + j]);
            float keep = exp(top[g] - now);
            top[g] = now;
            total[g] *= keep;
            a[g] *= keep;
            b[g] *= keep;
        }
        for (uint j = group; j < n; j += groups) {
            uint at = uint(base) + j;
            vec4 va, vb;
            kv_eight(TYPE, p.v + (uint64_t(pages.v[at / p.page_len]) * p.n_kv_heads + kv_head) * v_tile, p.page_len,
                     p.v_dim, at % p.page_len, unit, va, vb);
            [[unroll]] for (uint g = 0; g < GROUP; g++) {
                float w = exp(scores[g * THREADS + j] - top[g]);
                total[g] += w;
                a[g] += w * va;
                b[g] += w * vb;
            }
        }
    }
    [[unroll]] for (uint g = 0; g < GROUP; g++)
        write_head(t, h0 + g, split, units, groups, vec2(top[g], total[g]), a[g], b[g], padding);
}

void main()
{
    Ints step = Ints(p.step);
    uint n_rows = uint(step.v[STEP_ROWS]);
    for (uint t = gl_WorkGroupID.y; t < n_rows; t += gl_NumWorkGroups.y) {
        bool padding = step.v[step.v[STEP_SLOT] + t] < 0;
        barrier();
        attend(step, t, gl_WorkGroupID.x * GROUP, gl_WorkGroupID.z, padding);
    }
}
