#version 460
/* Lists the rows of each expert, and cuts them into tiles (tiles.glsl). One workgroup. */
#include "common.glsl"

layout(push_constant) uniform Push { group_args p; };

const uint MAX_EXPERTS = 1024;
shared uint count[MAX_EXPERTS];
shared uint first[MAX_EXPERTS];

void main()
{
    Words chosen = Words(p.chosen), to = Words(p.to);
    for (uint e = TID; e < p.n_own; e += THREADS)
        count[e] = 0;
    barrier();
    for (uint i = TID; i < p.rows; i += THREADS) {
        uint e = chosen.v[i] - p.expert_first;
        if (e < p.n_own)
            atomicAdd(count[e], 1);
    }
    barrier();
    if (TID == 0) {
        uint at = 0, tiles = 0;
        for (uint e = 0; e < p.n_own; e++) {
            first[e] = at;
            for (uint i = 0; i < count[e]; i += p.tile) {
                to.v[4 + 3 * tiles] = e;
                to.v[5 + 3 * tiles] = at + i;
                to.v[6 + 3 * tiles++] = min(p.tile, count[e] - i);
            }
            at += count[e];
        }
        to.v[0] = tiles;
        to.v[1] = p.list_at;
    }
    barrier();
    for (uint i = TID; i < p.rows; i += THREADS) {
        uint e = chosen.v[i] - p.expert_first;
        if (e < p.n_own)
            to.v[p.list_at + atomicAdd(first[e], 1)] = i;
    }
}
