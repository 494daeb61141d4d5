/*
 * Shared by the kernels that sample. Logits are compared as keys: integers of the same order, NaN below all. Weights are
 * summed as integers, whose sums do not depend on their order, so no kernel needs doubles.
 */
#include "common.glsl"

layout(push_constant) uniform Push { sample_args p; };
layout(buffer_reference, std430, buffer_reference_align = 4) readonly buffer Samplers { row_sampler v[]; };

const uint NONE = 0xffffffffu;
const int WIDE_UNIT = 44; /* sums of whole rows are in units of 2^-44, those of a list in 2^-53 */
const int LIST_UNIT = 53;

shared uint best_keys[THREADS / 4];
shared uint best_tokens[THREADS / 4];
shared uint64_t sums[THREADS];

Words row_logits(uint r)
{
    return Words(p.logits + 4 * uint64_t(r) * p.n_vocab);
}

Words row_state(uint r)
{
    return Words(p.state + 4 * uint64_t(r) * SAMPLE_ROW);
}

/* The tokens of a part of a row: [x, y). */
uvec2 part_range(uint part)
{
    uint each = (p.n_vocab + SAMPLE_PARTS - 1) / SAMPLE_PARTS;
    return min(uvec2(part * each, part * each + each), uvec2(p.n_vocab));
}

uint key_of(uint bits)
{
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return 0; /* NaN */
    if (bits == 0x80000000u)
        bits = 0; /* -0 */
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

float key_value(uint key)
{
    return uintBitsToFloat((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

bool is_finite(uint key)
{
    return key > 0x007fffffu && key < 0xff800000u;
}

/* The largest key of the workgroup, and of equal ones the lowest token. */
void group_best(inout uint key, inout uint token)
{
    uint top = subgroupMax(key);
    uint first = subgroupMin(key == top ? token : NONE);
    barrier();
    if (subgroupElect()) {
        best_keys[gl_SubgroupID] = top;
        best_tokens[gl_SubgroupID] = first;
    }
    barrier();
    key = best_keys[0];
    token = best_tokens[0];
    for (uint i = 1; i < gl_NumSubgroups; i++)
        if (best_keys[i] > key || (best_keys[i] == key && best_tokens[i] < token)) {
            key = best_keys[i];
            token = best_tokens[i];
        }
}

/* The best of a row, from the best of its parts. */
void row_best(Words state, out uint key, out uint token)
{
    key = 0;
    token = NONE;
    for (uint i = 0; i < SAMPLE_PARTS; i++) {
        uint k = state.v[SAMPLE_BEST + 2 * i];
        if (k > key) {
            key = k;
            token = state.v[SAMPLE_BEST + 2 * i + 1];
        }
    }
}

/* exp(x) for x <= 0, to about one unit of the last place, as the host's sampler computes it. */
float exp_below(float x)
{
    if (!(x > -80))
        return 0;
    precise float near = floor(x * 1.44269504 + 0.5);
    precise float r = x - near * 0.693359375;
    r = r + near * 2.12194440e-4;
    precise float y = r * 1.9875691500e-4 + 1.3981999507e-3;
    y = y * r + 8.3334519073e-3;
    y = y * r + 4.1665795894e-2;
    y = y * r + 1.6666665459e-1;
    y = y * r + 5.0000001201e-1;
    y = y * r * r + r + 1.0;
    return y * uintBitsToFloat(uint(int(near) + 127) << 23);
}

/* a / b with its rounding error taken out: Vulkan allows divisions to be 2.5 units off. */
float divide(float a, float b)
{
    precise float q = a / b;
    precise float rest = fma(-q, b, a);
    return q + rest / b;
}

/* What a candidate weighs, beside the best one's 1. */
float weight_of(float logit, float top, float temp)
{
    return exp_below(divide(logit - top, temp));
}

/* A weight in [0, 1] in units of 2^-unit, rounded down. */
uint64_t fixed_of(float w, int unit)
{
    uint bits = floatBitsToUint(w);
    int shift = int(bits >> 23) - 150 + unit;
    uint64_t m = uint64_t((bits & 0x7fffffu) | 0x800000u);
    if (bits < 0x00800000u || shift < -23)
        return 0;
    return shift >= 0 ? m << shift : m >> -shift;
}

float fixed_value(uint64_t sum, int unit)
{
    return (float(uint(sum >> 32)) * 4294967296.0 + float(uint(sum))) * exp2(float(-unit));
}

/* The sum over the workgroup. The parts stay in sums[]. */
uint64_t group_total(uint64_t x)
{
    uint64_t total = 0;
    barrier();
    sums[TID] = x;
    barrier();
    for (uint i = 0; i < THREADS; i++)
        total += sums[i];
    return total;
}

/* The bucket of a candidate: 0 has the best. */
uint bucket_of(float logit, float top, float log_floor)
{
    float scale = log_floor < 0 ? float(SAMPLE_BUCKETS - 1) / -log_floor : 0;
    return min(uint((top - logit) * scale), uint(SAMPLE_BUCKETS - 1));
}
