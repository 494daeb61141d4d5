/*
 * Cooperative matrices in SPIR-V: glslc writes instructions of SPV_NV_cooperative_matrix, devices have those of
 * SPV_KHR_cooperative_matrix. They differ in three things:
 * 1. A KHR type says how a matrix is used. The shaders mark right factors by the scope of a queue family, and sums are of
 *    floats (shaders/coop.glsl).
 * 2. Loads and stores name a layout, a number, where NV has a boolean, and before the stride, not after it.
 * 3. Opcodes, the capability and the extension have other numbers and names.
 */
#include "backend/vulkan/coop.h"
#include "base/error.h"
#include "base/mem.h"

#include <stdbool.h>
#include <string.h>

enum {
    OP_EXTENSION = 10,
    OP_CAPABILITY = 17,
    OP_TYPE_INT = 21,
    OP_TYPE_FLOAT = 22,
    OP_TRUE = 41,
    OP_CONSTANT = 43,
    NV_TYPE = 5358,
    NV_LOAD,
    NV_STORE,
    NV_MUL_ADD,
    NV_LENGTH,
    NV_CAPABILITY = 5357,
    KHR_TYPE = 4456,
    KHR_LOAD,
    KHR_STORE,
    KHR_MUL_ADD,
    KHR_LENGTH,
    KHR_CAPABILITY = 6022,
    HEADER = 5, /* words before the first instruction; word 3: the bound of ids */
    BOUND = 3
};
enum { USE_LEFT, USE_RIGHT, USE_SUM, SCOPE_SUBGROUP, N_CONSTANTS };
enum { SCOPE_QUEUE_FAMILY = 5 };

/* What the ids of a module are, as far as matrices need it. */
struct id {
    uint32_t bits;  /* of a float type */
    uint32_t value; /* of an integer constant; 1 for true */
};

struct rewrite {
    struct id *ids;
    uint32_t bound, uint_type, constants; /* constants: the first id of those of 0, 1, 2 and 3 */
    uint32_t *to;
    size_t n;
};

static void emit(struct rewrite *r, uint32_t op, const uint32_t *operands, size_t n)
{
    r->to[r->n++] = (uint32_t)(n + 1) << 16 | op;
    for (size_t i = 0; i < n; i++)
        r->to[r->n++] = operands[i];
}

static void learn(struct rewrite *r, uint32_t op, const uint32_t *w)
{
    if (op == OP_TYPE_INT && w[2] == 32 && w[3] == 0)
        r->uint_type = w[1];
    if (op == OP_TYPE_FLOAT)
        r->ids[w[1]].bits = w[2];
    if (op == OP_CONSTANT)
        r->ids[w[2]].value = w[3];
    if (op == OP_TRUE)
        r->ids[w[2]].value = 1;
}

/* w: result, component, scope, rows, columns */
static void put_type(struct rewrite *r, const uint32_t *w)
{
    if (!r->constants) {
        r->constants = r->bound;
        r->bound += N_CONSTANTS;
        for (uint32_t i = 0; i < N_CONSTANTS; i++)
            emit(r, OP_CONSTANT, (const uint32_t[]){r->uint_type, r->constants + i, i}, 3);
    }
    uint32_t use = r->ids[w[2]].bits == 32                    ? USE_SUM
                   : r->ids[w[3]].value == SCOPE_QUEUE_FAMILY ? USE_RIGHT
                                                              : USE_LEFT;
    const uint32_t operands[] = {w[1], w[2], r->constants + SCOPE_SUBGROUP,
                                 w[4], w[5], r->constants + use};
    emit(r, KHR_TYPE, operands, 6);
}

/* Operands of a load or store: the stride and whether columns are adjacent are the last two of `before`. */
static void put_access(struct rewrite *r, uint32_t op, const uint32_t *w, size_t n, size_t before)
{
    uint32_t operands[16];
    memcpy(operands, w + 1, (n - 1) * sizeof *operands);
    operands[before - 2] = r->constants + r->ids[w[before]].value;
    operands[before - 1] = w[before - 1];
    emit(r, op, operands, n - 1);
}

static bool put_one(struct rewrite *r, const uint32_t *w, size_t n, uint32_t op)
{
    static const char name[] = "SPV_KHR_cooperative_matrix";
    uint32_t words[sizeof name / 4 + 1] = {0};
    if (op == OP_CAPABILITY && w[1] == NV_CAPABILITY) {
        emit(r, op, (const uint32_t[]){KHR_CAPABILITY}, 1);
    } else if (op == OP_EXTENSION && !strcmp((const char *)(w + 1), "SPV_NV_cooperative_matrix")) {
        memcpy(words, name, sizeof name);
        emit(r, op, words, (sizeof name + 3) / 4);
    } else if (op == NV_TYPE) {
        put_type(r, w);
    } else if (op == NV_LOAD && n <= 16) {
        put_access(r, KHR_LOAD, w, n, 5);
    } else if (op == NV_STORE && n <= 16) {
        put_access(r, KHR_STORE, w, n, 4);
    } else if (op == NV_MUL_ADD || op == NV_LENGTH) {
        emit(r, op - NV_MUL_ADD + KHR_MUL_ADD, w + 1, n - 1);
    } else if (op == NV_LOAD || op == NV_STORE) {
        return false;
    } else {
        memcpy(r->to + r->n, w, n * sizeof *w);
        r->n += n;
    }
    return true;
}

uint32_t *vulkan_coop_words(const uint32_t *words, size_t n, size_t *n_out)
{
    if (n < HEADER)
        return NULL;
    struct rewrite r = {.bound = words[BOUND]};
    r.ids = mem_zalloc(words[BOUND] + 1, sizeof *r.ids);
    /* types grow by a word, and four constants are added */
    r.to = mem_zalloc(2 * n + (size_t)(4 * N_CONSTANTS), sizeof *r.to);
    memcpy(r.to, words, HEADER * sizeof *words);
    r.n = HEADER;
    bool ok = true;
    for (size_t at = HEADER; ok && at < n;) {
        uint32_t len = words[at] >> 16, op = words[at] & 0xffffu;
        ok = len && at + len <= n;
        if (!ok)
            break;
        learn(&r, op, words + at);
        ok = put_one(&r, words + at, len, op);
        at += len;
    }
    r.to[BOUND] = r.bound;
    *n_out = r.n;
    mem_free(r.ids);
    if (ok)
        return r.to;
    mem_free(r.to);
    return NULL;
}
