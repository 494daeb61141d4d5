#version 460
/* Rows as bytes for integer dot products (bytes.glsl), 16 values an invocation. */
#include "common.glsl"
#include "bytes.glsl"

layout(push_constant) uniform Push { half_args p; };

void main()
{
    uint units = p.width / 16, all = units * p.rows;
    for (uint i = group_id() * THREADS + TID; i < all; i += gl_NumWorkGroups.x * gl_NumWorkGroups.y * THREADS) {
        uint r = i / units, u = i % units;
        put_bytes(p.y, uint64_t(r) * (p.ldy / 16) + u, load_sixteen(p.x + 4 * (uint64_t(r) * p.ldx + 16 * u)));
    }
}
