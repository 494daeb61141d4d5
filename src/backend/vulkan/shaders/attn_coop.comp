#version 460
/*
 * Attention of many rows on cooperative matrices, for a cache of fp16. A workgroup has one head and up to 64 rows of one
 * sequence, a subgroup 16 of them; all go through the keys that any of the rows sees, 32 at a time.
 *   scores = q k^T; weights = exp(score - top of the row); sums += weights v
 * Elements of a matrix have no known place in registers, so scores and weights pass through shared memory. `top` follows
 * the largest score of a row only when that is far above it, and only then the sums pass through shared memory, too.
 */
#extension GL_KHR_shader_subgroup_shuffle : require
#include "common.glsl"
#include "kv.glsl"
#include "coop.glsl"

layout(constant_id = 0) const uint K_PARTS = 8; /* of 16 values of a key */
layout(constant_id = 1) const uint V_PARTS = 8;
layout(push_constant) uniform Push { attn_args p; };
#include "attn_keys.glsl"

const uint ROWS = 64, KEYS = 32, MINE = 16; /* MINE: a subgroup's rows */
const uint LD = 2 * (K_PARTS > V_PARTS ? K_PARTS : V_PARTS) + 1; /* uvec4 of a key; one more: keys begin in other banks */
const uint LDS = KEYS / 4 + 1; /* uvec4 of a row of scores */
const uint LDP = KEYS / 8 + 1; /* of a row of weights */
const float FAR = 8, LOWEST = -1e30;
shared uvec4 kv[2 * KEYS * LD]; /* keys, then values; first the queries */
shared uvec4 scores[ROWS * LDS];
shared uvec4 weights[ROWS * LDP];

struct tile {
    uint seq, first, n; /* n: rows, 0 = there is no such tile */
};

tile tile_of(Ints step, uint i, uint n_seqs)
{
    uint at = step.v[STEP_Q_START];
    for (uint s = 0; s < n_seqs; s++) {
        uint from = step.v[at + s], rows = step.v[at + s + 1] - from, tiles = (rows + ROWS - 1) / ROWS;
        if (i < tiles)
            return tile(s, from + i * ROWS, min(ROWS, rows - i * ROWS));
        i -= tiles;
    }
    return tile(0, 0, 0);
}

uvec4 eight_halves(uint64_t at)
{
    Vectors v = Vectors(at);
    return uvec4(packHalf2x16(v.v[0].xy), packHalf2x16(v.v[0].zw), packHalf2x16(v.v[1].xy), packHalf2x16(v.v[1].zw));
}

/* KEYS keys and values from `base` on; zeros after `last`. */
void copy_keys(Ints pages, uint kv_head, int base, int last)
{
    uint64_t k_tile = kv_tile_bytes(FORMAT_F16, p.page_len, p.k_dim), v_tile = kv_tile_bytes(FORMAT_F16, p.page_len, p.v_dim);
    const uint EACH = 2 * (K_PARTS + V_PARTS);
    for (uint i = TID; i < KEYS * EACH; i += THREADS) {
        uint key = i / EACH, u = i % EACH, at = uint(base) + key;
        bool is_k = u < 2 * K_PARTS;
        uvec4 x = uvec4(0);
        if (int(at) <= last) {
            uint64_t page = uint64_t(pages.v[at / p.page_len]) * p.n_kv_heads + kv_head;
            uint64_t row = is_k ? kv_row(FORMAT_F16, p.k + page * k_tile, p.k_dim, at % p.page_len)
                                : kv_row(FORMAT_F16, p.v + page * v_tile, p.v_dim, at % p.page_len);
            x = Quads(row).v[is_k ? u : u - 2 * K_PARTS];
        }
        kv[is_k ? key * LD + u : (KEYS + key) * LD + u - 2 * K_PARTS] = x;
    }
}

void main()
{
    Ints step = Ints(p.step);
    uint h = gl_WorkGroupID.x, kv_head = h * p.n_kv_heads / p.n_heads;
    tile t = tile_of(step, gl_WorkGroupID.y, p.splits); /* splits: sequences */
    if (t.n == 0)
        return;
    Ints pages = Ints(p.step + 4 * (step.v[STEP_PAGES] + uint64_t(t.seq) * step.v[STEP_PAGE_STRIDE]));
    uint lane = gl_SubgroupInvocationID, mine = gl_SubgroupID * MINE; /* two invocations have a row */
    uint row = mine + lane / 2, side = lane % 2;
    /* rows that the tile has not got see no key */
    ivec2 keys = ivec2(0x7fffffff, -1);
    bool padding = row >= t.n || step.v[step.v[STEP_SLOT] + t.first + min(row, t.n - 1)] < 0;
    if (!padding)
        keys = keys_of(step, t.first + row, t.seq);
    int first = int(-group_max(-float(min(keys.x, 1 << 24)))), last = int(group_max(float(keys.y)));
    for (uint i = TID; i < ROWS * 2 * K_PARTS; i += THREADS) {
        uint r = i / (2 * K_PARTS), u = i % (2 * K_PARTS);
        kv[r * LD + u] = eight_halves(p.q + 4 * (uint64_t(t.first + min(r, t.n - 1)) * p.ldq + h * p.k_dim + 8 * u));
    }
    barrier();
    LEFT q[K_PARTS];
    [[unroll]] for (uint i = 0; i < K_PARTS; i++)
        coopMatLoadNV(q[i], kv, mine * LD + 2 * i, LD, false);
    SUM sum[V_PARTS];
    [[unroll]] for (uint i = 0; i < V_PARTS; i++)
        sum[i] = SUM(0.0);
    float top = LOWEST, total = 0;
    if (p.sinks != 0) {
        top = Floats(p.sinks).v[h];
        total = 1;
    }
    for (int base = first; base <= last; base += int(KEYS)) {
        barrier();
        copy_keys(pages, kv_head, base, last);
        barrier();
        [[unroll]] for (uint j = 0; j < KEYS / 16; j++) {
            SUM s = SUM(0.0);
            [[unroll]] for (uint i = 0; i < K_PARTS; i++) {
                RIGHT k;
                coopMatLoadNV(k, kv, 16 * j * LD + 2 * i, LD, true);
                s = coopMatMulAddNV(q[i], k, s);
            }
            coopMatStoreNV(s, scores, mine * LDS + 4 * j, LDS, false);
        }
        subgroupMemoryBarrierShared();
        subgroupBarrier();
        float s[KEYS / 2];
        float most = LOWEST;
        [[unroll]] for (uint i = 0; i < KEYS / 2; i++) {
            int key = base + int(side * (KEYS / 2) + i);
            s[i] = uintBitsToFloat(scores[row * LDS + side * (KEYS / 8) + i / 4][i % 4]) * p.scale;
            if (p.softcap != 0)
                s[i] = p.softcap * tanh_of(s[i] / p.softcap);
            s[i] = key >= keys.x && key <= keys.y ? s[i] : 2 * LOWEST;
            most = max(most, s[i]);
        }
        most = max(most, subgroupShuffleXor(most, 1));
        if (subgroupMax(most - top) > FAR) {
            float now = max(top, most), keep = exp(top - now);
            total *= keep;
            top = now;
            [[unroll]] for (uint i = 0; i < V_PARTS; i++) {
                subgroupBarrier();
                coopMatStoreNV(sum[i], scores, mine * LDS, LDS, false);
                subgroupMemoryBarrierShared();
                subgroupBarrier();
                for (uint k = 2 * side; k < 2 * side + 2; k++)
                    scores[row * LDS + k] = floatBitsToUint(keep * uintBitsToFloat(scores[row * LDS + k]));
                subgroupMemoryBarrierShared();
                subgroupBarrier();
                coopMatLoadNV(sum[i], scores, mine * LDS, LDS, false);
            }
        }
        [[unroll]] for (uint i = 0; i < KEYS / 2; i++) {
            s[i] = exp(s[i] - top);
            total += s[i];
        }
        [[unroll]] for (uint i = 0; i < KEYS / 16; i++)
            weights[row * LDP + side * (KEYS / 16) + i] =
                uvec4(packHalf2x16(vec2(s[8 * i], s[8 * i + 1])), packHalf2x16(vec2(s[8 * i + 2], s[8 * i + 3])),
                      packHalf2x16(vec2(s[8 * i + 4], s[8 * i + 5])), packHalf2x16(vec2(s[8 * i + 6], s[8 * i + 7])));
        subgroupMemoryBarrierShared();
        subgroupBarrier();
        [[unroll]] for (uint j = 0; j < KEYS / 16; j++) {
            LEFT w;
            coopMatLoadNV(w, weights, mine * LDP + 2 * j, LDP, false);
            [[unroll]] for (uint i = 0; i < V_PARTS; i++) {
                RIGHT v;
                coopMatLoadNV(v, kv, (KEYS + 16 * j) * LD + 2 * i, LD, false);
                sum[i] = coopMatMulAddNV(w, v, sum[i]);
            }
        }
    }
    /* an invocation's weights were of its side's keys; the first has the sink's */
    if (p.sinks != 0 && side == 1)
        total -= exp(Floats(p.sinks).v[h] - top);
    total += subgroupShuffleXor(total, 1);
    uint r = t.first + min(row, t.n - 1);
    [[unroll]] for (uint i = 0; i < V_PARTS; i++) {
        subgroupBarrier();
        coopMatStoreNV(sum[i], scores, mine * LDS, LDS, false);
        subgroupMemoryBarrierShared();
        subgroupBarrier();
        for (uint k = 2 * side; k < 2 * side + 2 && row < t.n; k++) {
            vec4 v = padding ? vec4(0) : uintBitsToFloat(scores[row * LDS + k]) / total;
            Floats to = floats(p.a, uint64_t(r) * p.lda + h * p.v_dim + 16 * i + 4 * k);
            for (uint n = 0; n < 4; n++) {
                if (p.gate != 0)
                    v[n] *= sigmoid(floats(p.gate, uint64_t(r) * p.ld_gate + h * p.gate_stride).v[16 * i + 4 * k + n]);
                to.v[n] = v[n];
            }
        }
    }
}
