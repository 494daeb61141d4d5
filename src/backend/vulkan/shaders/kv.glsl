/*
 * The KV cache: tiles of (page, kv head), of page_len tokens. Plain types: rows of dim values. Quantised: the codes of all
 * tokens, then their scales; a word of Q4_0 has the even ones of eight values in its low half, the odd ones in the
 * high half.
 */

uint64_t kv_tile_bytes(uint type, uint page_len, uint dim)
{
    uint64_t n = uint64_t(page_len) * dim;
    if (type == FORMAT_F32)
        return 4 * n;
    if (type == FORMAT_Q8_0)
        return n / 32 * 34;
    if (type == FORMAT_Q4_0)
        return n / 32 * 18;
    return type == FORMAT_F8_E4M3 ? n : 2 * n;
}

/* A token's row in its tile. */
uint64_t kv_row(uint type, uint64_t tile, uint dim, uint off)
{
    uint bytes = type == FORMAT_F32 ? 4 * dim : type == FORMAT_Q4_0 ? dim / 2
                 : type == FORMAT_F16 || type == FORMAT_BF16 ? 2 * dim : dim;
    return tile + uint64_t(off) * bytes;
}

/* The word with the scale of a block, and the scale's shift in it. */
uint64_t kv_scale_at(uint type, uint64_t tile, uint page_len, uint dim, uint off, uint block,
                     out uint shift)
{
    uint64_t codes = uint64_t(page_len) * (type == FORMAT_Q4_0 ? dim / 2 : dim);
    uint i = off * (dim / 32) + block;
    shift = 16 * (i & 1u);
    return tile + codes + 4 * uint64_t(i / 2);
}

void kv_eight(uint type, uint64_t tile, uint page_len, uint dim, uint off, uint u, out vec4 a, out vec4 b)
{
    uint64_t row = kv_row(type, tile, dim, off);
    Words w = Words(row);
    if (type == FORMAT_F32) {
        a = b = vec4(0);
        for (uint i = 0; i < 8 && 8 * u + i < dim; i++) {
            float f = uintBitsToFloat(w.v[8 * u + i]);
            if (i < 4)
                a[i] = f;
            else
                b[i - 4] = f;
        }
        return;
    }
    if (type == FORMAT_F16 || type == FORMAT_BF16) {
        uvec4 v = uvec4(0);
        if ((dim & 7u) == 0)
            v = Quads(row).v[u];
        else
            for (uint i = 0; i < 4 && 8 * u + 2 * i < dim; i++)
                v[i] = w.v[4 * u + i];
        if (type == FORMAT_F16) {
            a = vec4(unpackHalf2x16(v.x), unpackHalf2x16(v.y));
            b = vec4(unpackHalf2x16(v.z), unpackHalf2x16(v.w));
        } else {
            uvec4 low = v << 16, high = v & 0xffff0000u;
            a = uintBitsToFloat(uvec4(low.x, high.x, low.y, high.y));
            b = uintBitsToFloat(uvec4(low.z, high.z, low.w, high.w));
        }
        return;
    }
    if (type == FORMAT_F8_E4M3) {
        uint x = w.v[2 * u], y = w.v[2 * u + 1];
        a = vec4(f8_value(x & 255u), f8_value(x >> 8 & 255u), f8_value(x >> 16 & 255u), f8_value(x >> 24));
        b = vec4(f8_value(y & 255u), f8_value(y >> 8 & 255u), f8_value(y >> 16 & 255u), f8_value(y >> 24));
        return;
    }
    uint shift;
    Words s = Words(kv_scale_at(type, tile, page_len, dim, off, u / 4, shift));
    float d = half_value(s.v[0] >> shift & 0xffffu);
    if (type == FORMAT_Q8_0) {
        int x = int(w.v[2 * u]), y = int(w.v[2 * u + 1]);
        a = d * vec4(x << 24 >> 24, x << 16 >> 24, x << 8 >> 24, x >> 24);
        b = d * vec4(y << 24 >> 24, y << 16 >> 24, y << 8 >> 24, y >> 24);
        return;
    }
    uint x = w.v[u];
    a = d * vec4(ivec4(x & 15u, x >> 16 & 15u, x >> 4 & 15u, x >> 20 & 15u) - 8);
    b = d * vec4(ivec4(x >> 8 & 15u, x >> 24 & 15u, x >> 12 & 15u, x >> 28) - 8);
}

/* The largest power of two that divides n. */
uint turn_run(uint n)
{
    return n & (~n + 1);
}
