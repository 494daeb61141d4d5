#version 460
/*
 * Streams of several parts (layer.h, altup), one workgroup per row. x is part 0; part j is at streams + j planes.
 *   predict: p_j = s_j + sum_k mix[j][k] s_k, x = p_0. mix = kind . predict, kind = tanh(norm(x) . router / width)
 *   correct: s_j = p_j + (1 + kind . correct[j]) (x - p_0), x = s_0
 */
#include "common.glsl"
#include "norms.glsl"

layout(push_constant) uniform Push { streams_args p; };

const uint MOST = 8;

void main()
{
    uint n = p.n;
    for (uint r = group_id(); r < p.rows; r += gl_NumWorkGroups.x * gl_NumWorkGroups.y) {
        Floats x = floats(p.x, uint64_t(r) * p.ldx), mix_of = Floats(p.mix);
        vec2 stats = norm_stats(x, p.width, p.kind, p.eps);
        float kind[MOST];
        for (uint j = 0; j < n; j++) {
            float sum = 0;
            for (uint e = TID; e < p.width; e += THREADS)
                sum += norm_value(x.v[e], stats, e, p.kind, p.gain, p.bias) * Floats(p.router).v[j * p.width + e];
            kind[j] = tanh_of(group_sum(sum) / float(p.width));
        }
        for (uint e = TID; e < p.width; e += THREADS) {
            float old[MOST], base = x.v[e];
            for (uint j = 0; j < n; j++)
                old[j] = j == 0 && p.correct == 0 ? base : floats(p.streams, j * p.plane + uint64_t(r) * p.ldx).v[e];
            for (uint j = 0; j < n; j++) {
                float now = old[j];
                if (p.correct != 0) {
                    float f = 1;
                    for (uint k = 0; k < n; k++)
                        f += kind[k] * mix_of.v[j * n + k];
                    now += f * (base - old[0]);
                } else {
                    for (uint k = 0; k < n; k++) {
                        float f = 0;
                        for (uint i = 0; i < n; i++)
                            f += kind[i] * mix_of.v[(j * n + k) * n + i];
                        now += f * old[k];
                    }
                }
                floats(p.streams, j * p.plane + uint64_t(r) * p.ldx).v[e] = now;
                if (j == 0)
                    x.v[e] = now;
            }
        }
        barrier();
    }
}
