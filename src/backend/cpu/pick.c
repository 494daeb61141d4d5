/*
 * The pick tables of the CPU backend and all of its thresholds. A row says what a kernel can run (formats,
 * instruction set, fits) and for which range of rows it is the best of the kernels that can. This file
 * knows kernels only by name.
 */
#include "backend/cpu/pick.h"
#include "backend/backend.h"
#include "backend/cpu/attn.h"
#include "backend/cpu/attn_decode_amx.h"
#include "backend/cpu/gemm_kernels.h"

#include <limits.h>
#include <string.h>

/* Up to this many input rows, kernels read a range of weight rows in one pass. */
enum { ONE_PASS_ROWS = 8 };
/* Input rows from which 8-bit tiles are used, and from which weights are converted to bf16.
 * Measured against VNNI on a Xeon: 16 rows were 7 to 20 % and 18 to 48 % slower; 128 rows were 1.6
 * and 2.6 times as fast for Q4_K, 1.03 and 1.3 times for Q6_K. The break-even point between them
 * was not measured. */
enum { INT8_TILES_FROM = 32, BF16_TILES_FROM = 24 };
/* The same for floats and GPTQ4, which take two or three tile products. BF16 on a Xeon, against
 * AVX-512: 9 rows were 1.4 times as fast, 16 rows 2.5 times, 24 rows 2.1 times. Up to 8 rows are
 * read in one pass. */
enum { SPLIT_TILES_FROM = ONE_PASS_ROWS + 1 };
/* Input rows from which SMMLA is used: the break-even points, counted in instructions, of formats that read one
 * code per input and of those that read two. */
enum { MATRICES_FROM = 5, MATRICES_FINE_FROM = 3 };
/* Query rows from which attention runs on AMX tiles, and from which K and V are converted first. */
enum { ATTN_TILES_FROM = 32, ATTN_PACK_FROM = 64 };
/* Query rows that decode on AMX tiles if the cache is Q4_0 or FP8. Against AVX-512, one row is no
 * slower, and eight rows are 1.3 and 1.5 times as fast. */
enum { ATTN_DECODE_TILES_FROM = 1, ATTN_DECODE_TILES_TO = ATTN_TILES_FROM - 1 };

#define BIT(t) ((uint64_t)1 << (t))
/* Formats with 8-bit tile kernels of their own, and formats without (panel_low.c,
 * panel_levels.c). */
#define TILE_BITS                                                                                  \
    (BIT(DT_Q4_K) | BIT(DT_Q5_K) | BIT(DT_Q6_K) | BIT(DT_IQ4_XS) | BIT(DT_Q8_0) | BIT(DT_Q4_0) |   \
     BIT(DT_IQ4_NL) | BIT(DT_MXFP4))
#define TILE_NAMES "Q4_0 Q8_0 Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4"
#define LOW_BITS                                                                                   \
    (BIT(DT_Q2_K) | BIT(DT_Q3_K) | BIT(DT_Q4_1) | BIT(DT_Q5_0) | BIT(DT_Q5_1) | LEVEL_BITS)
#define LEVEL_BITS                                                                                 \
    (BIT(DT_IQ1_S) | BIT(DT_IQ1_M) | BIT(DT_IQ2_XXS) | BIT(DT_IQ2_XS) | BIT(DT_IQ2_S) |            \
     BIT(DT_IQ3_XXS) | BIT(DT_IQ3_S) | BIT(DT_TQ1_0) | BIT(DT_TQ2_0) | BIT(DT_NVFP4))
#define FLOAT_BITS                                                                                 \
    (BIT(DT_F32) | BIT(DT_F16) | BIT(DT_BF16) | BIT(DT_F8_E4M3) | BIT(DT_NF4) | BIT(DT_FP4))
#define FINE_BITS (BIT(DT_Q8_0) | BIT(DT_MXFP4) | BIT(DT_GPTQ4) | BIT(DT_NVFP4))
#define LOW_NAMES                                                                                  \
    "Q2_K Q3_K Q4_1 Q5_0 Q5_1 IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S TQ1_0 TQ2_0 NVFP4"
/* Not every architecture has kernels for all of them. */
static const struct pick_formats __attribute__((unused))
/* formats that are converted to bf16 */
tiled = {TILE_BITS | LOW_BITS, TILE_NAMES " " LOW_NAMES},
    tiles8 = {TILE_BITS | BIT(DT_GPTQ4), TILE_NAMES " GPTQ4"},
    quantised = {TILE_BITS | LOW_BITS | BIT(DT_GPTQ4), TILE_NAMES " GPTQ4 " LOW_NAMES},
    floats = {FLOAT_BITS, "F32 F16 BF16 F8_E4M3 NF4 FP4"},
    split = {FLOAT_BITS | BIT(DT_GPTQ4), "F32 F16 BF16 F8_E4M3 NF4 FP4 GPTQ4"},
    /* Without formats whose sums gemm_int8_i8mm.c cannot add in the order of the other kernels. */
    matrices = {(TILE_BITS | LOW_BITS) & ~(FINE_BITS | BIT(DT_Q2_K) | BIT(DT_Q5_0)),
                "Q4_0 Q4_K Q5_K Q6_K IQ4_NL IQ4_XS Q3_K Q4_1 Q5_1 IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S "
                "IQ3_XXS IQ3_S TQ1_0 TQ2_0"},
    matrices_fine = {FINE_BITS & ~BIT(DT_NVFP4), "Q8_0 MXFP4 GPTQ4"},
    fp16_bf16 = {BIT(DT_F16) | BIT(DT_BF16), "F16 BF16"},
    q8_q4 = {BIT(DT_Q8_0) | BIT(DT_Q4_0), "Q8_0 Q4_0"}, q4 = {BIT(DT_Q4_0), "Q4_0"},
    fp8 = {BIT(DT_F8_E4M3), "F8_E4M3"},
    /* formats of attention's AMX tiles, which are not emulated */
    at_most_16 = {BIT(DT_F16) | BIT(DT_BF16) | BIT(DT_Q8_0) | BIT(DT_Q4_0) | BIT(DT_F8_E4M3),
                  "F16 BF16 Q8_0 Q4_0 F8_E4M3"},
    any = {~(uint64_t)0, "any"};

__attribute__((unused)) static bool is_packed(const struct pick_query *a)
{
    return a->seg->packed;
}

/* Whether inputs are read in the order of the columns, which tiles need to share their packing. */
__attribute__((unused)) static bool is_ordered(const struct pick_query *a)
{
    return a->seg->packed && !a->seg->perm;
}

#ifdef __x86_64__
/* Whether all segments can read bf16 inputs. bf16 rounds more than other inputs, and sums in
 * another order. */
static bool is_tiled(const struct pick_query *a)
{
    for (int i = 0; i < a->w->n_seg; i++) {
        const struct gemm_seg *s = &a->w->seg[i];
        if (!s->packed || !(tiled.bits & BIT(s->type)) || s->first_row % GEMM_PANEL)
            return false;
    }
    return !a->deterministic;
}

/* As is_tiled, for gemm_split_amx: needs whole tiles of columns, and all segments in its
 * formats. */
static bool is_split(const struct pick_query *a)
{
    for (int i = 0; i < a->w->n_seg; i++) {
        const struct gemm_seg *s = &a->w->seg[i];
        if (!s->packed || !(split.bits & BIT(s->type)) || s->perm || s->first_row % GEMM_PANEL)
            return false;
    }
    return a->w->n_in % 32 == 0 && !a->deterministic;
}
#endif

static bool always(const struct pick_query *a)
{
    (void)a;
    return true;
}

#define GEMM(from, to, isa, fits, formats, input, run)                                             \
    GEMM_AS(#run, from, to, isa, fits, formats, input, run)
/* A second row of the same kernel has a name of its own. */
#define GEMM_AS(name, from, to, isa, fits, formats, input, run)                                    \
    {                                                                                              \
        name, &formats, from, to, isa, fits, run, NULL, input, false, false                        \
    }
/* The same kernel, for few rows: reads a range of weight rows in one pass. */
#define GEMV(isa, fits, formats, input, technique)                                                 \
    {                                                                                              \
        "gemv_" #technique, &formats, 1, ONE_PASS_ROWS, isa, fits, gemm_##technique, NULL, input,  \
            true, false                                                                            \
    }
#define MANY INT_MAX

static const struct pick_row gemm_rows[] = {
#ifdef __x86_64__
    GEMM(BF16_TILES_FROM, MANY, ISA_AMX, is_tiled, tiled, INPUT_BF16, gemm_bf16_amx),
    GEMM(SPLIT_TILES_FROM, MANY, ISA_AMX, is_split, split, INPUT_BF16, gemm_split_amx),
    GEMM(INT8_TILES_FROM, MANY, ISA_AMX, is_ordered, tiles8, INPUT_INT8, gemm_int8_amx),
    GEMV(ISA_VNNI, is_packed, quantised, INPUT_INT8, int8_vnni),
    GEMM(1, MANY, ISA_VNNI, is_packed, quantised, INPUT_INT8, gemm_int8_vnni),
    GEMV(ISA_AVX512, is_packed, quantised, INPUT_INT8, int8_avx512),
    GEMM(1, MANY, ISA_AVX512, is_packed, quantised, INPUT_INT8, gemm_int8_avx512),
    GEMV(ISA_AVX2, is_packed, quantised, INPUT_INT8, int8_avx2),
    GEMM(1, MANY, ISA_AVX2, is_packed, quantised, INPUT_INT8, gemm_int8_avx2),
    GEMV(ISA_AVX512, is_packed, floats, INPUT_FLOATS, float_avx512),
    GEMM(1, MANY, ISA_AVX512, is_packed, floats, INPUT_FLOATS, gemm_float_avx512),
    GEMV(ISA_AVX2, is_packed, floats, INPUT_FLOATS, float_avx2),
    GEMM(1, MANY, ISA_AVX2, is_packed, floats, INPUT_FLOATS, gemm_float_avx2),
    GEMV(ISA_AVX512, always, any, INPUT_FLOATS, dequant_avx512),
    GEMM(1, MANY, ISA_AVX512, always, any, INPUT_FLOATS, gemm_dequant_avx512),
    GEMV(ISA_AVX2, always, any, INPUT_FLOATS, dequant_avx2),
    GEMM(1, MANY, ISA_AVX2, always, any, INPUT_FLOATS, gemm_dequant_avx2),
#endif
#ifdef __aarch64__
    GEMM(MATRICES_FROM, MANY, ISA_I8MM, is_ordered, matrices, INPUT_INT8, gemm_int8_i8mm),
    GEMM_AS("gemm_int8_i8mm_fine", MATRICES_FINE_FROM, MANY, ISA_I8MM, is_ordered, matrices_fine,
            INPUT_INT8, gemm_int8_i8mm),
    GEMV(ISA_DOTPROD, is_packed, quantised, INPUT_INT8, int8_dotprod),
    GEMM(1, MANY, ISA_DOTPROD, is_packed, quantised, INPUT_INT8, gemm_int8_dotprod),
    GEMV(ISA_NEON, is_packed, quantised, INPUT_INT8, int8_neon),
    GEMM(1, MANY, ISA_NEON, is_packed, quantised, INPUT_INT8, gemm_int8_neon),
    GEMV(ISA_NEON, is_packed, floats, INPUT_FLOATS, float_neon),
    GEMM(1, MANY, ISA_NEON, is_packed, floats, INPUT_FLOATS, gemm_float_neon),
    GEMV(ISA_NEON, always, any, INPUT_FLOATS, dequant_neon),
    GEMM(1, MANY, ISA_NEON, always, any, INPUT_FLOATS, gemm_dequant_neon),
#endif
};

/* Whether heads, pages, types or rows are made of whole vectors for the kernels of an isa. */
#define FITS(isa)                                                                                  \
    static bool heads_##isa(const struct pick_query *a)                                            \
    {                                                                                              \
        return a->head_dim % attn_kernels_##isa.unit == 0 &&                                       \
               a->v_dim % attn_kernels_##isa.unit == 0;                                            \
    }                                                                                              \
    static bool pages_##isa(const struct pick_query *a)                                            \
    {                                                                                              \
        return heads_##isa(a) && a->page_len % attn_kernels_##isa.width == 0;                      \
    }                                                                                              \
    __attribute__((unused)) static bool same_type_##isa(const struct pick_query *a)                \
    {                                                                                              \
        return pages_##isa(a) && a->v_type == a->type;                                             \
    }                                                                                              \
    __attribute__((unused)) static bool rows_##isa(const struct pick_query *a)                     \
    {                                                                                              \
        return heads_##isa(a);                                                                     \
    }
FITS(c)
#ifdef __aarch64__
FITS(neon)
FITS(dotprod)
#endif
#ifdef __x86_64__
FITS(avx2)
FITS(avx512)
FITS(vnni)
FITS(madd_avx2)
FITS(madd_avx512)
FITS(amx_q4)
FITS(amx_fp8)

/* Sums in another order than the other kernels. */
static bool decode_amx_q4(const struct pick_query *a)
{
    return same_type_amx_q4(a) && a->v_dim == a->head_dim && !a->deterministic && !a->relative;
}

/* A vector's tiles of keys have room for 256 components. */
static bool decode_amx_fp8(const struct pick_query *a)
{
    return same_type_amx_fp8(a) && a->v_dim == a->head_dim && a->head_dim <= 256 &&
           !a->deterministic && !a->relative;
}
#ifndef AMX_EMULATE
FITS(amx)

/* A row's bytes depend on the number of rows next to it. */
static bool tiles_amx(const struct pick_query *a)
{
    return pages_amx(a) && a->v_dim == a->head_dim && a->v_type != DT_F32 && !a->deterministic &&
           !a->relative;
}

static bool latents_amx(const struct pick_query *a)
{
    return rows_amx(a) && !a->deterministic;
}
#endif
#endif

/* Attention that packs K and V of a block first, or reads them from their pages. */
#define PREFILL(from, isa, fits, formats, kernels)                                                 \
    {                                                                                              \
        "attn_prefill_" #kernels, &formats, from, MANY, isa, fits, NULL, &attn_kernels_##kernels,  \
            INPUT_FLOATS, false, true                                                              \
    }
#define DECODE(isa, fits, formats, kernels)                                                        \
    {                                                                                              \
        "attn_decode_" #kernels, &formats, 1, MANY, isa, fits, NULL, &attn_kernels_##kernels,      \
            INPUT_FLOATS, false, false                                                             \
    }
#define DECODE_TILES(fits, formats, kernels)                                                       \
    {                                                                                              \
        "attn_decode_" #kernels, &formats, ATTN_DECODE_TILES_FROM, ATTN_DECODE_TILES_TO, ISA_AMX,  \
            fits, NULL, &attn_kernels_##kernels, INPUT_FLOATS, false, false                        \
    }

static const struct pick_row attn_rows[] = {
#ifdef __aarch64__
    DECODE(ISA_DOTPROD, pages_dotprod, q8_q4, dotprod),
    PREFILL(ATTN_PACK_FROM, ISA_NEON, same_type_neon, fp16_bf16, neon),
    DECODE(ISA_NEON, heads_neon, any, neon),
#endif
#ifdef __x86_64__
#ifndef AMX_EMULATE
    PREFILL(ATTN_TILES_FROM, ISA_AMX, tiles_amx, at_most_16, amx),
#endif
    DECODE_TILES(decode_amx_q4, q4, amx_q4),
    DECODE_TILES(decode_amx_fp8, fp8, amx_fp8),
    DECODE(ISA_VNNI, pages_vnni, q8_q4, vnni),
    DECODE(ISA_AVX512, pages_madd_avx512, q8_q4, madd_avx512),
    PREFILL(ATTN_PACK_FROM, ISA_AVX512, same_type_avx512, fp16_bf16, avx512),
    DECODE(ISA_AVX512, heads_avx512, any, avx512),
    DECODE(ISA_AVX2, pages_madd_avx2, q8_q4, madd_avx2),
    PREFILL(ATTN_PACK_FROM, ISA_AVX2, same_type_avx2, fp16_bf16, avx2),
    DECODE(ISA_AVX2, heads_avx2, any, avx2),
#endif
    PREFILL(ATTN_PACK_FROM, ISA_REF, same_type_c, fp16_bf16, c),
    DECODE(ISA_REF, always, any, c),
};

#define LATENT(name, from, isa, fits, formats, kernels)                                            \
    {                                                                                              \
        "latent_" #name, &formats, from, MANY, isa, fits, NULL, &attn_kernels_##kernels,           \
            INPUT_FLOATS, false, true                                                              \
    }

static const struct pick_row latent_rows[] = {
#ifdef __aarch64__
    LATENT(neon, 1, ISA_NEON, rows_neon, any, neon),
#endif
#ifdef __x86_64__
#ifndef AMX_EMULATE
    LATENT(tiles_amx, ATTN_TILES_FROM, ISA_AMX, latents_amx, at_most_16, amx),
#endif
    LATENT(avx512, 1, ISA_AVX512, rows_avx512, any, avx512),
    LATENT(avx2, 1, ISA_AVX2, rows_avx2, any, avx2),
#endif
    LATENT(c, 1, ISA_REF, always, any, c),
};

static const struct {
    const char *name;
    const struct pick_row *rows;
    int n;
} tables[PICK_OPS] = {
    [PICK_GEMM] = {"gemm", gemm_rows, (int)(sizeof gemm_rows / sizeof *gemm_rows)},
    [PICK_ATTN] = {"attention", attn_rows, (int)(sizeof attn_rows / sizeof *attn_rows)},
    [PICK_LATENT] = {"latent", latent_rows, (int)(sizeof latent_rows / sizeof *latent_rows)},
};

const struct pick_row *pick_rows(enum pick_op op, int *n)
{
    *n = tables[op].n;
    return tables[op].rows;
}

_Static_assert(sizeof gemm_rows / sizeof *gemm_rows <= PICK_MAX_ROWS, "a counter for each row");

bool pick_describe(const struct pick *p, int i, struct pick_info *out)
{
    int op = 0;
    while (op < PICK_OPS && i >= tables[op].n)
        i -= tables[op++].n;
    if (op == PICK_OPS)
        return false;
    const struct pick_row *r = &tables[op].rows[i];
    *out = (struct pick_info){.name = r->name,
                              .op = tables[op].name,
                              .formats = r->formats->names,
                              .device = r->isa == ISA_REF ? "" : isa_name(r->isa),
                              .rows_from = r->rows_from,
                              .rows_to = r->rows_to == MANY ? 0 : r->rows_to,
                              .available = isa_has(p->isa, r->isa),
                              .runs = p->runs[op][i]};
    return true;
}

void pick_count(struct pick *p, enum pick_op op, const struct pick_row *row)
{
    p->runs[op][row - tables[op].rows]++;
}

static bool can_run(const struct pick *p, const struct pick_row *r, const struct pick_query *a)
{
    return (r->formats->bits & BIT(a->type)) && isa_has(p->isa, r->isa) && r->fits(a);
}

/* The first row that fits and whose input form is in the bit set `inputs`. */
static const struct pick_row *find(const struct pick *p, enum pick_op op, struct pick_query *a,
                                   unsigned inputs)
{
    a->deterministic = p->deterministic;
    const struct pick_row *forced = p->forced[op];
    if (forced && (inputs >> forced->input & 1) && can_run(p, forced, a))
        return forced;
    const struct pick_row *left_out = NULL; /* used if no other row suits */
    for (int i = 0; i < tables[op].n; i++) {
        const struct pick_row *r = &tables[op].rows[i];
        if (!(inputs >> r->input & 1) || a->rows < r->rows_from || a->rows > r->rows_to ||
            !can_run(p, r, a))
            continue;
        if (r != p->left_out)
            return r;
        left_out = r;
    }
    return left_out;
}

enum { ANY_INPUT = 1 << INPUT_FLOATS | 1 << INPUT_INT8 | 1 << INPUT_BF16 };

const struct pick_row *pick_gemm(const struct pick *p, const struct gemm_weight *w,
                                 const struct gemm_seg *seg, int rows)
{
    struct pick_query a = {.type = seg->type, .rows = rows > 1 ? rows : 1, .w = w, .seg = seg};
    const struct pick_row *r = find(p, PICK_GEMM, &a, ANY_INPUT);
    CHECK(r, "no kernel for %s on %s", dtype_name(seg->type), isa_name(p->isa));
    return r;
}

const struct pick_row *pick_gemm_for(const struct pick *p, const struct gemm_weight *w,
                                     const struct gemm_seg *seg, int rows, bool bf16)
{
    /* bf16 was chosen for the whole op, some pieces of which may have few rows. */
    struct pick_query a = {.type = seg->type, .rows = bf16 ? INT_MAX : rows, .w = w, .seg = seg};
    const struct pick_row *r =
        find(p, PICK_GEMM, &a, bf16 ? 1 << INPUT_BF16 : ANY_INPUT & ~(1 << INPUT_BF16));
    CHECK(r, "no kernel for %s on %s", dtype_name(seg->type), isa_name(p->isa));
    return r;
}

const struct pick_row *pick_attn(const struct pick *p, enum dtype k_type, enum dtype v_type,
                                 int head_dim, int v_dim, int page_len, bool relative, int rows)
{
    struct pick_query a = {.type = k_type,
                           .v_type = v_type,
                           .rows = rows,
                           .head_dim = head_dim,
                           .v_dim = v_dim,
                           .page_len = page_len,
                           .relative = relative};
    const struct pick_row *r = find(p, PICK_ATTN, &a, ANY_INPUT);
    CHECK(r, "no attention kernel for head_dim %d", head_dim);
    return r;
}

const struct pick_row *pick_latent(const struct pick *p, enum dtype type, int dim, int v_dim,
                                   int rows)
{
    struct pick_query a = {.type = type, .rows = rows, .head_dim = dim, .v_dim = v_dim};
    const struct pick_row *r = find(p, PICK_LATENT, &a, ANY_INPUT);
    CHECK(r, "no attention kernel for latent rows of %d", dim);
    return r;
}

bool pick_single_thread(enum pick_small what, size_t work)
{
    static const size_t least[] = {
        [SMALL_EMBED] = 5,    /* rows */
        [SMALL_ROPE] = 512,   /* angles */
        [SMALL_POST] = 65536, /* floats of q, k and v */
        [SMALL_NORM] = 16384,    [SMALL_GATHER] = 65536,
        [SMALL_ATTN] = 1 << 17,  /* (query row, key) pairs times head_dim */
        [SMALL_DELTA] = 1 << 15, /* floats of states */
    };
    return work < least[what];
}

/* STEEL_PICK */

static bool unknown(const char *name, struct error *err)
{
    char list[1024] = "";
    size_t len = 0;
    for (int op = 0; op < PICK_OPS; op++)
        for (int i = 0; i < tables[op].n && len < sizeof list; i++)
            len += (size_t)snprintf(list + len, sizeof list - len, " %s", tables[op].rows[i].name);
    return error_set(err, "STEEL_PICK=%s: no such kernel; kernels:%s", name, list);
}

static bool force(struct pick *p, const char *name, struct error *err)
{
    bool out = *name == '-';
    for (int op = 0; op < PICK_OPS; op++)
        for (int i = 0; i < tables[op].n; i++) {
            const struct pick_row *r = &tables[op].rows[i];
            if (strcmp(r->name, name + out))
                continue;
            if (out) {
                if (p->left_out)
                    return error_set(err, "STEEL_PICK: only one kernel can be left out");
                p->left_out = r;
                return true;
            }
            if (!isa_has(p->isa, r->isa))
                return error_set(err, "STEEL_PICK=%s: needs %s, but %s is in use", name,
                                 isa_name(r->isa), isa_name(p->isa));
            if (p->forced[op])
                return error_set(err, "STEEL_PICK: both %s and %s are kernels for %s",
                                 p->forced[op]->name, name, tables[op].name);
            p->forced[op] = r;
            return true;
        }
    return unknown(name, err);
}

static bool force_all(struct pick *p, const char *names, struct error *err)
{
    memset(p->forced, 0, sizeof p->forced);
    p->left_out = NULL;
    while (names && *names) {
        size_t n = strcspn(names, ",");
        char name[64];
        snprintf(name, sizeof name, "%.*s", n < sizeof name ? (int)n : 63, names);
        if (!force(p, name, err))
            return false;
        names += n + (names[n] == ',');
    }
    return true;
}

bool pick_init(struct pick *p, enum isa isa, bool deterministic, const char *names,
               struct error *err)
{
    *p = (struct pick){.isa = isa, .deterministic = deterministic, .strict = true};
    return force_all(p, names, err);
}

void pick_force(struct pick *p, const char *names)
{
    struct error err;
    p->strict = false;
    force_all(p, names, &err);
}

bool pick_check_weight(struct pick *p, const struct gemm_weight *w, struct error *err)
{
    const struct pick_row *r = p->forced[PICK_GEMM];
    for (int i = 0; r && p->strict && i < w->n_seg; i++) {
        struct pick_query a = {
            .type = w->seg[i].type, .w = w, .seg = &w->seg[i], .deterministic = p->deterministic};
        if (!(r->formats->bits & BIT(a.type)))
            continue;
        if (!can_run(p, r, &a))
            return error_set(err, "STEEL_PICK=%s cannot run a weight of %s, %d x %d%s%s", r->name,
                             dtype_name(a.type), w->n_out, w->n_in,
                             a.seg->packed ? "" : " that is not repacked",
                             p->deterministic ? " (--deterministic)" : "");
        p->used = true;
    }
    return true;
}

bool pick_check_network(const struct pick *p, const struct network *net, const struct bounds *b,
                        struct error *err)
{
    const struct pick_row *r = p->forced[PICK_GEMM];
    if (!p->strict)
        return true;
    if (r && !p->used)
        return error_set(
            err, "STEEL_PICK=%s: no weight of this model has a format that it supports", r->name);
    r = p->forced[PICK_LATENT];
    for (int i = 0; r && i < net->n_layers; i++) {
        const struct latent *l = &net->layers[i].mixer.latent;
        struct pick_query a = {.type = b->k_type,
                               .deterministic = p->deterministic,
                               .head_dim = l->kv_rank + l->rope_dim,
                               .v_dim = l->kv_rank};
        if (net->layers[i].mixer.kind == MIXER_LATENT && !can_run(p, r, &a))
            return error_set(
                err, "STEEL_PICK=%s cannot run layer %d: latent rows of %d + %d, cache type %s%s",
                r->name, i, l->kv_rank, l->rope_dim, dtype_name(b->k_type),
                p->deterministic ? " (--deterministic)" : "");
    }
    r = p->forced[PICK_ATTN];
    for (int i = 0; r && i < net->n_layers; i++) {
        if (net->layers[i].mixer.kind != MIXER_ATTENTION)
            continue;
        const struct attention *l = &net->layers[i].mixer.attention;
        struct pick_query a = {.type = b->k_type,
                               .v_type = b->v_type,
                               .deterministic = p->deterministic,
                               .head_dim = l->k_dim,
                               .v_dim = l->v_dim,
                               .page_len = b->page_len};
        if (!can_run(p, r, &a))
            return error_set(err,
                             "STEEL_PICK=%s cannot run layer %d: head_dim %d, cache type %s, "
                             "page length %d%s",
                             r->name, i, l->k_dim, dtype_name(b->k_type), b->page_len,
                             p->deterministic ? " (--deterministic)" : "");
    }
    return true;
}

/* Printing */

static const int shown_rows[] = {1, 4, 16, 64, 512};
enum { N_SHOWN = sizeof shown_rows / sizeof *shown_rows };

/* Prints one line: a weight's segment, and its kernel for several numbers of rows. */
static void print_seg(const struct pick *p, const char *what, const struct weight *w, int seg,
                      double share, FILE *out)
{
    const struct gemm_weight *own = w->impl;
    char name[64];
    snprintf(name, sizeof name, "%s %d x %d %s", what, own->seg[seg].rows, w->n_in,
             dtype_name(own->seg[seg].type));
    fprintf(out, "%-32s", name);
    for (int i = 0; i < N_SHOWN; i++) {
        int rows = (int)(shown_rows[i] * share);
        fprintf(out, " %-19s", pick_gemm(p, own, &own->seg[seg], rows > 1 ? rows : 1)->name);
    }
    fputc('\n', out);
}

/* The shapes printed so far: layers repeat them. */
struct pick_seen {
    int n;
    struct {
        const char *what;
        int n_in, n_out;
        enum dtype type;
    } of[64];
};

static void print_weight(const struct pick *p, struct pick_seen *seen, const char *what,
                         const struct weight *w, double share, FILE *out)
{
    const struct gemm_weight *own = w ? w->impl : NULL;
    for (int i = 0; own && i < own->n_seg; i++) {
        bool known = false;
        for (int k = 0; k < seen->n; k++)
            known |= seen->of[k].what == what && seen->of[k].n_in == w->n_in &&
                     seen->of[k].n_out == own->seg[i].rows && seen->of[k].type == own->seg[i].type;
        if (known || seen->n == (int)(sizeof seen->of / sizeof *seen->of))
            continue;
        seen->of[seen->n].what = what;
        seen->of[seen->n].n_in = w->n_in;
        seen->of[seen->n].n_out = own->seg[i].rows;
        seen->of[seen->n++].type = own->seg[i].type;
        print_seg(p, what, w, i, share, out);
    }
}

void pick_print_shapes(const struct pick *p, const struct network *net, const struct bounds *b,
                       FILE *out)
{
    struct pick_seen seen = {0};
    fprintf(out, "\n%-32s", "this model, rows of a step");
    for (int i = 0; i < N_SHOWN; i++)
        fprintf(out, " %-19d", shown_rows[i]);
    fputc('\n', out);
    for (int i = 0; i < net->n_layers; i++) {
        const struct layer *l = &net->layers[i];
        if (l->mixer.kind == MIXER_ATTENTION) {
            print_weight(p, &seen, "qkv", l->mixer.attention.wqkv, 1, out);
            print_weight(p, &seen, "output", l->mixer.attention.wo, 1, out);
        }
        const struct mlp *m = &l->mlp;
        print_weight(p, &seen, "gate, up", m->dense.gate_up, 1, out);
        print_weight(p, &seen, "down", m->dense.down, 1, out);
        if (!m->router.w)
            continue;
        /* average rows per expert in a step, which decides on bf16 */
        double share = (double)m->router.n_used / m->router.w->n_out;
        print_weight(p, &seen, "router", m->router.w, 1, out);
        print_weight(p, &seen, "experts' gate, up", m->experts.gate_up, share, out);
        print_weight(p, &seen, "experts' down", m->experts.down, share, out);
    }
    print_weight(p, &seen, "head", net->head.w, 1, out);
    for (int i = 0; i < net->n_layers; i++) {
        const struct attention *l = &net->layers[i].mixer.attention;
        if (net->layers[i].mixer.kind != MIXER_ATTENTION)
            continue;
        fprintf(out, "%-32s", "attention, query rows together");
        for (int k = 0; k < N_SHOWN; k++)
            fprintf(out, " %-19s",
                    pick_attn(p, b->k_type, b->v_type, l->k_dim, l->v_dim, b->page_len, l->wrel,
                              shown_rows[k])
                        ->name);
        fputc('\n', out);
        break;
    }
}
