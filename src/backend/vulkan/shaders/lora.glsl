/* Shared by the kernels of adapters: which change a row's use of an adapter makes. */
#include "common.glsl"

layout(push_constant) uniform Push { lora_args p; };
layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer Addresses { uint64_t v[]; };

struct change {
    uint64_t at; /* 0 = none */
    Words of;    /* the expert's head */
    float scale;
};

/* Of use u of row r of the product. */
change change_of(uint r, uint u)
{
    Ints step = Ints(p.step);
    uint at = uint(step.v[p.lists]) + 2 * (u * p.list_rows + r / p.row_div);
    int adapter = step.v[at];
    uint e = p.chosen != 0 ? Words(p.chosen).v[r] - p.expert_first : 0;
    if (adapter < 0 || e >= p.n_own)
        return change(0, Words(p.table), 0);
    uint64_t base = Addresses(p.table).v[uint(adapter) * p.n_weights + p.weight];
    return change(base, Words(base + 4 * uint64_t(LORA_WORDS) * e), intBitsToFloat(step.v[at + 1]));
}
