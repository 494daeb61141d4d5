/* Which keys a row of attention sees. */

/* [x, y]: the keys that the row sees */
ivec2 keys_of(Ints step, uint t, uint seq)
{
    int pos = step.v[step.v[STEP_POS] + t], end = step.v[step.v[STEP_KV_LEN] + seq] - 1;
    int window = int(p.window), first = window > 0 ? max(pos - window + 1, 0) : 0, last = pos;
    if ((p.flags & ATTN_CHUNKED) != 0)
        first = pos - pos % window;
    if ((p.flags & ATTN_BIDIRECTIONAL) != 0)
        last = window > 0 ? min(pos + window - 1, end) : end;
    bool only = (p.flags & ATTN_SPAN_ONLY) != 0;
    if ((only || (p.flags & ATTN_SPAN_ALSO) != 0) && step.v[STEP_HAS_SPANS] != 0) {
        int from = step.v[step.v[STEP_SPANS] + 2 * t], to = step.v[step.v[STEP_SPANS] + 2 * t + 1];
        if (from < to) {
            first = only ? from : min(from, first);
            last = only ? to - 1 : max(to - 1, last);
        }
    }
    return ivec2(first, last);
}
