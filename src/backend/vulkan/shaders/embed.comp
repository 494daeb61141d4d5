#version 460
/* Rows of a table: the tokens' embeddings, positions or types. One workgroup per row. */
#include "common.glsl"
#include "formats.glsl"

layout(push_constant) uniform Push { embed_args p; };

void main()
{
    for (uint t = group_id(); t < p.rows; t += gl_NumWorkGroups.x * gl_NumWorkGroups.y) {
        Ints step = Ints(p.step);
        Floats x = floats(p.x, uint64_t(t) * p.ldx);
        int token = step.v[step.v[p.index] + t];
        if (p.index == STEP_TOKENS && token < 0) /* not known to the host when the step began */
            token = Ints(p.chosen).v[-1 - token];
        if (p.pad >= 0 && token >= int(p.n_table))
            token = p.pad;
        if (p.index == STEP_TOKENS && p.pad < 0 && token >= p.n_vocab) { /* a given row */
            Floats from = floats(p.embeds, uint64_t(token - p.n_vocab) * p.embed_width);
            for (uint i = TID; i < p.n_in; i += THREADS)
                x.v[i] = from.v[i];
            continue;
        }
        int row = token + p.offset - p.first;
        if (row < 0 || row >= p.n_table) {
            for (uint i = TID; i < p.n_in && p.add == 0; i += THREADS)
                x.v[i] = 0;
            continue;
        }
        row_layout l = row_layout(p.tail, p.group_len, p.n_in, p.grid);
        Words w = Words(p.w + 4 * uint64_t(row) * p.row_words);
        for (uint u = TID; u < (p.n_in + 7) / 8; u += THREADS) {
            eight v = decode(w, u, l);
            for (uint i = 0; i < 8 && 8 * u + i < p.n_in; i++) {
                uint at = 8 * u + i;
                if (FORMAT == FORMAT_GPTQ4 && p.perm != 0)
                    at = Words(p.perm).v[at];
                float f = p.scale * (i < 4 ? v.a[i] : v.b[i - 4]);
                x.v[at] = p.add != 0 ? x.v[at] + f : f;
            }
        }
    }
}
