/*
 * Numbers as languages over their decimal spelling: comparisons with a bound, and multiples of a
 * number, as automata over digits. Exact: decimals are compared digit by digit, nothing is rounded.
 * Every term contains all spellings of a value (1, 1.0, 1.00; no exponents), so that complements
 * are correct.
 */
#include "text/grammar/schema_int.h"

#include "base/mem.h"

#include <string.h>

static uint32_t cached_term(struct schema *s, uint32_t *slot, const char *pattern)
{
    if (!*slot)
        *slot = re_parse(s->pool, pattern, strlen(pattern), 0, NULL);
    return *slot;
}

uint32_t num_any(struct schema *s)
{
    return cached_term(s, &s->re_number,
                       "-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][+-]?([0-9]{1,2}|[12][0-9]{2}))?");
}

uint32_t num_plain(struct schema *s)
{
    return cached_term(s, &s->re_plain_number, "-?(0|[1-9][0-9]*)(\\.[0-9]+)?");
}

uint32_t num_integer(struct schema *s)
{
    return cached_term(s, &s->re_integer, "-?(0|[1-9][0-9]*)");
}

uint32_t num_integral(struct schema *s)
{
    static const char p[] = "-?(0|[1-9][0-9]*)(\\.0+)?";
    return re_parse(s->pool, p, sizeof p - 1, 0, NULL);
}

/* The transition table of an automaton under construction. */
struct digit_table {
    uint32_t n;
    uint32_t *next; /* (n, RE_AUTO_SYMBOLS) */
    bool *accepts;
};

static struct digit_table table_new(uint32_t n)
{
    struct digit_table t = {n, mem_alloc((size_t)n * RE_AUTO_SYMBOLS * sizeof(uint32_t)),
                            mem_zalloc(n, sizeof(bool))};
    for (size_t i = 0; i < (size_t)n * RE_AUTO_SYMBOLS; i++)
        t.next[i] = RE_INF;
    return t;
}

static uint32_t table_term(struct schema *s, struct digit_table *t)
{
    uint32_t r = re_auto(s->pool, t->n, t->next, t->accepts);
    mem_free(t->next);
    mem_free(t->accepts);
    return r;
}

/* Outcome of a comparison, given the outcome for the absolute values. */
static int signed_outcome(const struct decimal *b, bool negative, int abs)
{
    if (!negative)
        return b->negative ? CMP_MORE : abs;
    if (!b->negative && b->n)
        return CMP_LESS;
    return abs == CMP_LESS ? CMP_MORE : abs == CMP_MORE ? CMP_LESS : CMP_EQUAL;
}

/*
 * States per sign:
 *   INT(i, st)     i digits of the integer part read, with outcome st so far
 *   BIG            more digits than the bound
 *   SETTLED(st)    after the decimal point, decided
 *   FRAC(j)        j digits of the bound's fraction matched
 */
uint32_t num_compare(struct schema *s, const struct decimal *b, int outcomes)
{
    char whole[400], frac[800];
    int n = 0, m = 0;
    if (b->exp <= 0)
        whole[n++] = '0';
    for (int i = 0; i < b->exp; i++)
        whole[n++] = i < b->n ? b->digit[i] : '0';
    for (int i = b->exp; i < 0 && b->n > 0; i++)
        frac[m++] = '0';
    for (int i = b->exp > 0 ? b->exp : 0; i < b->n; i++)
        frac[m++] = b->digit[i];
    static const int st_of[3] = {CMP_LESS, CMP_EQUAL, CMP_MORE};
    uint32_t per = (uint32_t)(3 * (n + 1) + 1 + 3 + m + 1);
    struct digit_table t = table_new(1 + 2 * per);
    for (int sign = 0; sign < 2; sign++) {
        uint32_t base = 1 + (uint32_t)sign * per, big = base + 3 * (uint32_t)(n + 1);
        uint32_t settled = big + 1, fr = settled + 3;
#define NEXT(q, c)     t.next[(size_t)(q)*RE_AUTO_SYMBOLS + (uint32_t)(c)]
#define ACCEPT(q, abs) t.accepts[q] = (signed_outcome(b, sign, abs) & outcomes) != 0
        for (int i = 0; i <= n; i++) {
            for (int st = 0; st < 3; st++) {
                uint32_t q = base + 3 * (uint32_t)i + (uint32_t)st;
                int end = i < n ? CMP_LESS : st_of[st];
                if (i == n && st == 1 && m)
                    end = CMP_LESS;
                if (i)
                    ACCEPT(q, end);
                for (int c = 0; c < 10; c++) {
                    if (i == n) {
                        NEXT(q, c) = big;
                        continue;
                    }
                    int d = whole[i] - '0', to = st != 1 ? st : c < d ? 0 : c > d ? 2 : 1;
                    NEXT(q, c) = base + 3 * (uint32_t)(i + 1) + (uint32_t)to;
                }
                if (i)
                    NEXT(q, 11) = i < n ? settled : st != 1 ? settled + (uint32_t)st : fr;
            }
        }
        ACCEPT(big, CMP_MORE);
        for (int c = 0; c < 10; c++)
            NEXT(big, c) = big;
        NEXT(big, 11) = settled + 2;
        for (uint32_t st = 0; st < 3; st++) {
            ACCEPT(settled + st, st_of[st]);
            for (int c = 0; c < 10; c++)
                NEXT(settled + st, c) = settled + st;
        }
        for (int j = 0; j <= m; j++) {
            uint32_t q = fr + (uint32_t)j;
            ACCEPT(q, j < m ? CMP_LESS : CMP_EQUAL);
            for (int c = 0; c < 10; c++) {
                int d = j < m ? frac[j] - '0' : 0;
                NEXT(q, c) = c < d ? settled : c > d ? settled + 2 : j < m ? q + 1 : q;
            }
        }
    }
    for (int c = 0; c < 10; c++) /* an empty prefix is "equal so far": st = 1 */
        NEXT(0, c) = NEXT(2, c);
    NEXT(0, 10) = 1 + per + 1;
    return re_and(s->pool, table_term(s, &t), num_plain(s));
}

/* Multiples of M / 10^k: tracks the digits read so far modulo M. k digits of the fraction count;
 * further ones must be zero. */
uint32_t num_multiple(struct schema *s, const struct decimal *of, bool *ok)
{
    enum { STATES_MAX = 60000 };
    uint64_t M = 0;
    int k = of->n - of->exp;
    *ok = of->n > 0 && of->n < 10 && k < 12 && k > -9;
    for (int i = 0; *ok && i < of->n; i++)
        M = M * 10 + (uint64_t)(of->digit[i] - '0');
    for (; *ok && k < 0; k++)
        M *= 10;
    *ok = *ok && M * (uint64_t)(k + 2) < STATES_MAX;
    if (!*ok)
        return RE_NONE;
    /* State 1 + j * M + r: j = 0 in the integer part, 1..k + 1 after the point. State 0 is the
     * start. */
    struct digit_table t = table_new(1 + (uint32_t)M * (uint32_t)(k + 2));
    for (int j = 0; j <= k + 1; j++) {
        uint64_t scale = 1; /* factor from the digits read so far to units of 10^-k */
        for (int i = j ? j - 1 : 0; i < k; i++)
            scale = scale * 10 % (M ? M : 1);
        for (uint32_t r = 0; r < M; r++) {
            uint32_t q = 1 + (uint32_t)j * (uint32_t)M + r;
            t.accepts[q] = r * scale % M == 0;
            for (uint32_t c = 0; c < 10; c++) {
                uint32_t to = (uint32_t)((r * 10ull + c) % M);
                if (j == 0)
                    NEXT(q, c) = 1 + to;
                else if (j <= k)
                    NEXT(q, c) = 1 + (uint32_t)(j + 1) * (uint32_t)M + to;
                else if (c == 0)
                    NEXT(q, c) = q;
            }
            if (j == 0)
                NEXT(q, 11) = 1 + (uint32_t)M + r;
        }
    }
    CHECK(M > 0, "a multiple of nothing");
    for (uint32_t c = 0; c < 10; c++)
        NEXT(0, c) = 1 + (uint32_t)(c % M);
    NEXT(0, 10) = 1;
#undef NEXT
#undef ACCEPT
    return re_and(s->pool, table_term(s, &t), num_plain(s));
}
