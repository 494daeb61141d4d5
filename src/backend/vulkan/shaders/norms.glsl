/* Norms of a row, by a whole workgroup. */

/* mean and factor of a row of n values */
vec2 norm_stats(Floats x, uint n, uint kind, float eps)
{
    float mean = 0, sum = 0;
    if (kind != KIND_RMS && kind != KIND_LAYER)
        return vec2(0, 1);
    if (kind == KIND_LAYER) {
        for (uint i = TID; i < n; i += THREADS)
            mean += x.v[i];
        mean = group_sum(mean) / float(n);
    }
    for (uint i = TID; i < n; i += THREADS)
        sum += (x.v[i] - mean) * (x.v[i] - mean);
    sum = group_sum(sum);
    return vec2(mean, 1 / sqrt(sum / float(n) + eps));
}

float norm_value(float x, vec2 stats, uint i, uint kind, uint64_t gain, uint64_t bias)
{
    if (kind == KIND_NONE)
        return x;
    float g = gain != 0 ? Floats(gain).v[i] : 1, b = bias != 0 ? Floats(bias).v[i] : 0;
    return kind == KIND_AFFINE ? (x + b) * g : (x - stats.x) * stats.y * g + b;
}
