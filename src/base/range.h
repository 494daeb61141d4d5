/* Runs of numbered things, and their division among several takers. */
#ifndef STEEL_BASE_RANGE_H
#define STEEL_BASE_RANGE_H

struct range {
    int first, n;
};

/* The range of n things for taker `at` of `of`. Ranges are multiples of `unit` (the last one has the remainder) and as
 * even as they can be; the first takers get more. */
static inline struct range range_share(int n, int unit, int at, int of)
{
    int units = (n + unit - 1) / unit, each = units / of, more = units % of;
    int first = at * each + (at < more ? at : more), last = first + each + (at < more);
    struct range out = {first * unit < n ? first * unit : n, 0};
    out.n = (last * unit < n ? last * unit : n) - out.first;
    return out;
}

/* The taker whose range has thing i. */
static inline int range_owner(int n, int unit, int i, int of)
{
    int units = (n + unit - 1) / unit, each = units / of, more = units % of, u = i / unit;
    return u < more * (each + 1) ? u / (each + 1) : more + (u - more * (each + 1)) / each;
}

#endif
