#version 460
/* The router: experts of each row and their weights, one workgroup per row. Ties: the lower index. */
#include "common.glsl"

layout(push_constant) uniform Push { route_args p; };

const uint MAX_EXPERTS = 1024, MAX_GROUPS = 64, NONE = 0xffffffffu;
shared float value[MAX_EXPERTS]; /* what weights are made of */
shared float key[MAX_EXPERTS];
shared float best_part[THREADS / 4];
shared uint index_part[THREADS / 4];
shared float group_score[MAX_GROUPS];
shared uint taken[MAX_EXPERTS / 32];

bool is_taken(uint e)
{
    return (taken[e / 32] >> (e & 31u) & 1u) != 0;
}

/* Index of the largest key not taken yet, the first of equal ones. */
uint best_key()
{
    float best = -1.0 / 0.0;
    uint at = NONE;
    for (uint i = TID; i < p.n_expert; i += THREADS)
        if (!is_taken(i) && (at == NONE || key[i] > best)) {
            best = key[i];
            at = i;
        }
    float top = subgroupMax(at == NONE ? -1.0 / 0.0 : best);
    uint first = subgroupMin(at != NONE && best == top ? at : NONE);
    barrier();
    if (subgroupElect()) {
        best_part[gl_SubgroupID] = top;
        index_part[gl_SubgroupID] = first;
    }
    barrier();
    best = best_part[0];
    at = index_part[0];
    for (uint i = 1; i < gl_NumSubgroups; i++)
        if (index_part[i] != NONE &&
            (at == NONE || best_part[i] > best || (best_part[i] == best && index_part[i] < at))) {
            best = best_part[i];
            at = index_part[i];
        }
    return at;
}

/* Experts outside the best groups get a key of -inf. */
void keep_groups()
{
    uint each = p.n_expert / p.n_groups;
    barrier();
    for (uint g = TID; g < p.n_groups; g += THREADS) {
        float a = -1.0 / 0.0, b = a; /* the two largest */
        for (uint i = 0; i < each; i++) {
            float k = key[g * each + i];
            b = k > a ? a : max(b, k);
            a = max(a, k);
        }
        group_score[g] = each > 1 ? a + b : a;
    }
    barrier();
    for (uint e = TID; e < p.n_expert; e += THREADS) {
        uint g = e / each, before = 0;
        for (uint i = 0; i < p.n_groups; i++)
            before += uint(group_score[i] > group_score[g] ||
                           (group_score[i] == group_score[g] && i < g));
        if (before >= p.n_groups_used)
            key[e] = -1.0 / 0.0;
    }
    barrier();
}

void main()
{
    for (uint r = group_id(); r < p.rows; r += gl_NumWorkGroups.x * gl_NumWorkGroups.y) {
        Floats l = floats(p.logits, uint64_t(r) * p.ld);
        for (uint i = TID; i < MAX_EXPERTS / 32; i += THREADS)
            taken[i] = 0;
        float top = -1.0 / 0.0, total = 0;
        for (uint e = TID; e < p.n_expert; e += THREADS)
            top = max(top, l.v[e]);
        top = group_max(top);
        for (uint e = TID; e < p.n_expert; e += THREADS)
            total += exp(l.v[e] - top);
        total = group_sum(total);
        for (uint e = TID; e < p.n_expert; e += THREADS) {
            float v = l.v[e];
            if (p.kind == ROUTE_SOFTMAX) /* softmax */
                v = exp(v - top) / total;
            if (p.kind == ROUTE_SIGMOID)
                v = sigmoid(v);
            value[e] = v;
            key[e] = p.kind == ROUTE_SOFTMAX && p.choice_bias == 0 && p.n_groups < 2 ? l.v[e] : v;
            if (p.choice_bias != 0)
                key[e] += Floats(p.choice_bias).v[e];
        }
        barrier();
        if (p.n_groups > 1)
            keep_groups();
        float kept = 0, most = 0;
        for (uint k = 0; k < p.n_used; k++) {
            uint e = best_key();
            barrier();
            float v = value[e];
            if (k == 0)
                most = v;
            if (p.kind == ROUTE_SOFTMAX_TOP) /* softmax over the chosen */
                v = exp(v - most);
            kept += v;
            if (TID == 0) {
                Words(p.chosen).v[r * p.n_used + k] = e;
                Floats(p.weights).v[r * p.n_used + k] = v;
                taken[e / 32] |= 1u << (e & 31u);
            }
            barrier();
        }
        if (TID == 0)
            for (uint k = 0; k < p.n_used; k++) {
                float v = Floats(p.weights).v[r * p.n_used + k];
                if (p.renorm != 0 || p.kind == ROUTE_SOFTMAX_TOP)
                    v /= kept;
                v *= p.scale;
                if (p.expert_scale != 0)
                    v *= Floats(p.expert_scale).v[Words(p.chosen).v[r * p.n_used + k]];
                Floats(p.weights).v[r * p.n_used + k] = v;
            }
        barrier();
    }
}
