/* Entry points of quantisation: selects the compiled variant once and checks arguments. */
#include "quant/quantize.h"
#include "quant/quantize_isa.h"
#include "base/cpu.h"
#include "base/error.h"

#include <pthread.h>
#include <string.h>

static const struct quantize_isa *isa;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void choose(void)
{
    enum isa best = ISA_REF;
    struct error err = {0};
    if (!isa_choose(&best, &err)) /* opening a backend reports a bad STEEL_ISA */
        best = isa_best();
    isa = &quantize_base;
#ifdef __x86_64__
    if (isa_has(best, ISA_AVX2))
        isa = isa_has(best, ISA_AVX512) ? &quantize_avx512 : &quantize_avx2;
#elif defined __aarch64__
    if (isa_has(best, ISA_NEON))
        isa = &quantize_neon;
#endif
}

static const struct quantize_isa *table(void)
{
    pthread_once(&once, choose);
    return isa;
}

bool quantize_supported(enum dtype t)
{
    return t < DT_COUNT && quantize_base.rows[t];
}

void quantize_rows(enum dtype t, const float *src, void *dst, size_t rows, size_t n,
                   const float *importance)
{
    CHECK(quantize_supported(t), "cannot quantise to %s", dtype_name(t));
    CHECK(n % (size_t)dtype_table[t].block_len == 0, "row of %zu for %s", n, dtype_name(t));
    table()->rows[t](src, dst, rows, n, importance);
}

void quantize_load(enum dtype t, const void *src, float *dst, size_t n)
{
    size_t whole = t == DT_F16 || t == DT_BF16 ? n / 16 * 16 : 0;
    if (t == DT_F16)
        table()->load_f16(src, dst, whole);
    else if (t == DT_BF16)
        table()->load_bf16(src, dst, whole);
    if (whole < n)
        quant_dequantize(t, (const uint8_t *)src + dtype_bytes(t, whole), dst + whole, n - whole);
}

float quantize_amax(const float *x, size_t n)
{
    size_t whole = n / 16 * 16;
    float m = table()->amax(x, whole);
    for (size_t i = whole; i < n; i++) {
        float a = x[i] < 0 ? -x[i] : x[i];
        if (m == m && !(a <= m)) /* NaN stays */
            m = a;
    }
    return m;
}
