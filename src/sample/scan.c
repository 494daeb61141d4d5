/* See scan.h. */
#include "sample/scan.h"
#include "sample/sampler.h"
#include "base/cpu.h"

#include <math.h>
#include <string.h>

enum { SCAN_MIN_STEP = 64, LANES = 8 };

/* The loops are also compiled for wider vectors where the CPU has them (CPU_WIDE). Sums are always kept in LANES partial
 * sums, so results are bit-identical for every register width. */
#define LOOP static inline __attribute__((always_inline))

LOOP float largest_loop(const float *l, int n)
{
    float most[LANES], max = -INFINITY;
    for (int k = 0; k < LANES; k++)
        most[k] = -INFINITY;
    int whole = n / LANES * LANES;
    for (int i = 0; i < whole; i += LANES)
        for (int k = 0; k < LANES; k++)
            most[k] = l[i + k] > most[k] ? l[i + k] : most[k];
    for (int k = 0; k < LANES; k++)
        max = most[k] > max ? most[k] : max;
    for (int i = whole; i < n; i++)
        max = l[i] > max ? l[i] : max;
    return max;
}

LOOP float blocks_loop(struct scan *sc, const float *logits)
{
    float max = -INFINITY;
    for (int b = 0; b < sc->n_blocks; b++) {
        int from = b * sc->step;
        sc->max_of[b] = largest_loop(logits + from, scan_end(sc, b) - from);
        max = sc->max_of[b] > max ? sc->max_of[b] : max;
    }
    return max;
}
CPU_WIDE(float, blocks, (struct scan * sc, const float *logits), (sc, logits))

void scan_logits(struct scan *sc, const float *logits, int n)
{
    sc->step = (n + SCAN_BLOCKS - 1) / SCAN_BLOCKS;
    sc->step = sc->step > SCAN_MIN_STEP ? (sc->step + LANES - 1) / LANES * LANES : SCAN_MIN_STEP;
    sc->n = n;
    sc->n_blocks = (n + sc->step - 1) / sc->step;
    sc->max = blocks(sc, logits);
}

int32_t scan_first(const struct scan *sc, const float *logits)
{
    for (int b = 0; b < sc->n_blocks && !isnan(logits[0]); b++)
        for (int i = b * sc->step; sc->max_of[b] == sc->max && i < scan_end(sc, b); i++)
            if (logits[i] == sc->max)
                return i;
    return 0;
}

/* Vectors of LANES elements, independent of the register width. */
typedef float floats __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t ints __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef uint32_t uints __attribute__((vector_size(LANES * sizeof(uint32_t))));

/* sum(exp(logits - max)), each term at float precision. NaN propagates. */
LOOP double weights_loop(const float *logits, int n, float max)
{
    enum { SUM_TERMS = 256 }; /* terms per float partial sum */
    double sum = 0;
    for (int at = 0; at < n; at += SUM_TERMS) {
        int end = at + SUM_TERMS < n ? at + SUM_TERMS : n;
        floats part = {0};
        for (int i = at; i < end; i += LANES) {
            floats x, low = (floats){0} - 87.0f;
            if (i + LANES <= n)
                memcpy(&x, logits + i, sizeof x);
            else
                for (int k = 0; k < LANES; k++)
                    x[k] = i + k < n ? logits[i + k] : -INFINITY;
            x -= max;
            ints in = x < low, tiny = (ints)low & in;
            x = (floats)(((ints)x & ~in) | tiny);
            floats near = x * 1.44269504f + 12582912.0f; /* nearest integer, in the low bits */
            uints whole = (uints)near;
            near -= 12582912.0f;
            floats r = x - near * 0.693359375f + near * 2.12194440e-4f;
            floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
            y = y * r + 8.3334519073e-3f;
            y = y * r + 4.1665795894e-2f;
            y = y * r + 1.6666665459e-1f;
            y = y * r + 5.0000001201e-1f;
            y = y * r * r + r + 1.0f;
            part += y * (floats)((whole + 127) << 23); /* 2^whole */
        }
        for (int k = 0; k < LANES; k++)
            sum += (double)part[k];
    }
    return sum;
}
CPU_WIDE(double, weights, (const float *logits, int n, float max), (logits, n, max))

float scan_logprobs(const struct scan *sc, const float *logits, int32_t token,
                    struct token_prob *top, int n)
{
    float norm = sc->max + (float)log(weights(logits, sc->n, sc->max));
    int have = 0;
    for (int b = 0; n > 0 && b < sc->n_blocks; b++) {
        if (have == n && !(sc->max_of[b] > top[n - 1].logprob))
            continue;
        for (int i = b * sc->step; i < scan_end(sc, b); i++) {
            if (isnan(logits[i]) || (have == n && !(logits[i] > top[n - 1].logprob)))
                continue;
            int at = have < n ? have++ : n - 1;
            for (; at > 0 && logits[i] > top[at - 1].logprob; at--)
                top[at] = top[at - 1];
            top[at] = (struct token_prob){i, logits[i]};
        }
    }
    for (int i = 0; i < n; i++) /* with fewer than n numbers the remaining entries are NaN */
        top[i] = i < have ? (struct token_prob){top[i].token, top[i].logprob - norm}
                          : (struct token_prob){token, NAN};
    return logits[token] - norm;
}

float sample_logprobs(const float *logits, int n_vocab, int32_t token, struct token_prob *top,
                      int n)
{
    struct scan scan;
    scan_logits(&scan, logits, n_vocab);
    return scan_logprobs(&scan, logits, token, top, n);
}

int scan_count(const struct scan *sc, const float *logits, float floor)
{
    int n = 0;
    for (int b = 0; b < sc->n_blocks; b++)
        for (int i = b * sc->step; sc->max_of[b] >= floor && i < scan_end(sc, b); i++)
            n += logits[i] >= floor;
    return n;
}

/* Appends the candidates with logits lo .. hi among `from` .. `end`; returns the new number. Mostly few are, so pieces are
 * looked through before they are copied. out has room for all. */
LOOP int collect_loop(const float *logits, int from, int end, float lo, float hi,
                      struct candidate *out, int n)
{
    enum { PIECE = 32 };
    for (; from < end; from += PIECE) {
        int m = end - from < PIECE ? end - from : PIECE, any = m < PIECE;
        const float *l = logits + from;
        for (int i = 0; m == PIECE && i < PIECE; i++)
            any |= (l[i] >= lo) & (l[i] <= hi);
        for (int i = 0; any && i < m; i++) {
            out[n] = (struct candidate){l[i], from + i};
            n += (l[i] >= lo) & (l[i] <= hi);
        }
    }
    return n;
}
CPU_WIDE(int, collect,
         (const float *logits, int from, int end, float lo, float hi, struct candidate *out, int n),
         (logits, from, end, lo, hi, out, n))

int scan_collect(const struct scan *sc, const float *logits, float lo, float hi,
                 struct candidate *out)
{
    int n = 0;
    for (int b = 0; b < sc->n_blocks; b++)
        if (sc->max_of[b] >= lo)
            n = collect(logits, b * sc->step, scan_end(sc, b), lo, hi, out, n);
    return n;
}
