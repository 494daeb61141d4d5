#version 460
/* The router: experts of each row and their weights, one workgroup per row. Ties: the lower index. */
#include "common.glsl"

layout(push_constant) uniform Push { route_args p; };

const uint MAX_EXPERTS = 1024, MAX_GROUPS = 64, NONE = 0xffffffffu;
shared float value[MAX_EXPERTS]; /* what weights are made of */
shared float key[MAX_EXPERTS];
shared float group_score[MAX_GROUPS];
shared uint order[MAX_EXPERTS]; /* key as an integer of the same order */
shared uint best[MAX_EXPERTS];  /* experts by falling key */

/* Integers in the order of floats. 0 and -0 are equal. */
uint ordered(float f)
{
    uint u = floatBitsToUint(f + 0.0);
    return (u & 0x80000000u) != 0 ? ~u : u | 0x80000000u;
}

/* An expert's place is the number of experts with a larger key, or an equal one and a lower index. */
void sort_best()
{
    for (uint e = TID; e < p.n_expert; e += THREADS)
        order[e] = ordered(key[e]);
    barrier();
    for (uint e = TID; e < p.n_expert; e += THREADS) {
        uint mine = order[e], before = 0;
        for (uint i = 0; i < p.n_expert; i++)
            before += uint(order[i] > mine || (order[i] == mine && i < e));
        if (before < p.n_used)
            best[before] = e;
    }
    barrier();
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

/* The experts that a list has for the row's token. */
void take_listed(uint r)
{
    Ints step = Ints(p.step);
    uint t = p.narrow != 0 ? uint(step.v[step.v[STEP_OUT_ROWS] + r]) : r;
    int token = step.v[step.v[STEP_TOKENS] + t];
    if (token < 0) /* not known to the host when the step began */
        token = Ints(p.tokens).v[-1 - token];
    token = token < p.n_vocab ? token : 0;
    for (uint k = TID; k < p.n_used; k += THREADS)
        best[k] = uint(floats(p.by_token, uint64_t(token) * p.n_used).v[k]);
    barrier();
}

/* The weight of the k-th best expert. SparseMixer: its share of those that are no better and not far below. */
float weight_of(uint k)
{
    float l = value[best[k]], total = 0;
    if (p.kind != ROUTE_SPARSE_MIXER)
        return l;
    for (uint i = 0; i < p.n_expert; i++) {
        bool before = false;
        for (uint n = 0; n < k; n++)
            before = before || best[n] == i;
        if (!before && l - value[i] <= 2 * p.jitter * max(abs(value[i]), l))
            total += exp(value[i] - l);
    }
    return 1 / total;
}

void main()
{
    for (uint r = group_id(); r < p.rows; r += gl_NumWorkGroups.x * gl_NumWorkGroups.y) {
        Floats l = floats(p.logits, uint64_t(r) * p.ld);
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
            if (p.kind == ROUTE_SOFTPLUS)
                v = sqrt(v > 20 ? v : v > -10 ? log(1 + exp(v)) : exp(v));
            value[e] = v;
            key[e] = p.kind == ROUTE_SOFTMAX && p.choice_bias == 0 && p.n_groups < 2 ? l.v[e] : v;
            if (p.choice_bias != 0)
                key[e] += Floats(p.choice_bias).v[e];
        }
        barrier();
        if (p.n_groups > 1)
            keep_groups();
        sort_best();
        if (p.by_token != 0)
            take_listed(r);
        float most = value[best[0]], kept = 0;
        bool among = p.kind == ROUTE_SOFTMAX_TOP; /* softmax over the chosen */
        for (uint k = 0; k < p.n_used; k++)
            kept += among ? exp(value[best[k]] - most) : weight_of(k);
        for (uint k = TID; k < p.n_used; k += THREADS) {
            float v = among ? exp(value[best[k]] - most) : weight_of(k);
            if (p.renorm != 0 || among)
                v /= kept;
            v *= p.scale;
            if (p.expert_scale != 0)
                v *= Floats(p.expert_scale).v[best[k]];
            Words(p.chosen).v[r * p.n_used + k] = best[k];
            Floats(p.weights).v[r * p.n_used + k] = v;
        }
        barrier();
    }
}
