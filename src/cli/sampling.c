/* See sampling.h. */
#include "cli/sampling.h"
#include "sample/sampler.h"

#include <string.h>

bool sampling_check(const struct usage *u, const char *samplers, uint64_t *order,
                    const struct opt_list *breakers)
{
    struct error err = {0};
    *order = 0;
    if (samplers && !sample_order_parse(samplers, order, &err)) {
        args_usage_error(u, "--%s", err.msg);
        return false;
    }
    for (int i = 0; i < breakers->n; i++)
        if (!*breakers->items[i]) {
            args_usage_error(u, "--dry-sequence-breaker: empty text");
            return false;
        }
    return true;
}

int sampling_n_breakers(const struct opt_list *breakers)
{
    return breakers->n == 1 && !strcmp(breakers->items[0], "none") ? 0 : breakers->n;
}
