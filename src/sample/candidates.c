/* See candidates.h. */
#include "sample/candidates.h"

#include <stdbool.h>
#include <stdlib.h>

static bool before(struct candidate a, struct candidate b)
{
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

int candidates_compare(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    return before(*x, *y) ? -1 : 1;
}

void candidates_select(struct candidate *c, int n, int k)
{
    int lo = 0, hi = n;
    while (k < n && hi - lo > 1) {
        struct candidate pivot = c[lo + (hi - lo) / 2];
        int i = lo, j = hi - 1;
        while (i <= j) {
            while (before(c[i], pivot))
                i++;
            while (before(pivot, c[j]))
                j--;
            if (i <= j) {
                struct candidate t = c[i];
                c[i++] = c[j];
                c[j--] = t;
            }
        }
        if (k <= j + 1)
            hi = j + 1;
        else if (k >= i)
            lo = i;
        else
            break;
    }
    qsort(c, (size_t)(k < n ? k : n), sizeof *c, candidates_compare);
}
