/*
 * The state of a head of a recurrent mixer: (DEPTH, width) values, of which an invocation keeps one column in registers
 * over the rows of a step.
 */
layout(constant_id = 0) const uint DEPTH8 = 16;
const uint DEPTH = 8 * DEPTH8; /* the state's rows, rounded up */

float column[DEPTH];

/* at: the slot's part of this head; depth: the state's rows; negative slots are zeros. */
void state_load(uint64_t state, int slot, uint64_t slot_len, uint depth, uint width, uint j)
{
    Floats s = floats(state, uint64_t(max(slot, 0)) * slot_len);
    for (uint i = 0; i < DEPTH; i++)
        column[i] = slot >= 0 && i < depth && j < width ? s.v[i * width + j] : 0;
}

void state_store(uint64_t state, int slot, uint64_t slot_len, uint depth, uint width, uint j)
{
    Floats s = floats(state, uint64_t(slot) * slot_len);
    for (uint i = 0; i < DEPTH; i++)
        if (i < depth && j < width)
            s.v[i * width + j] = column[i];
}

float softplus(float x)
{
    return x > 20 ? x : x > -10 ? log(1 + exp(x)) : exp(x);
}
