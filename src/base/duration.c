/* See duration.h. */
#include "base/duration.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double MOST_S = 1e9; /* some thirty years */

bool duration_of_seconds(double s, int64_t *ns)
{
    if (isnan(s))
        return false;
    *ns = s < 0 ? -1 : (int64_t)((s > MOST_S ? MOST_S : s) * 1e9);
    return true;
}

bool duration_parse(const char *text, int64_t *ns, bool *unit)
{
    static const struct {
        const char *name;
        double s;
    } units[] = {{"ms", 1e-3}, {"us", 1e-6}, {"ns", 1e-9}, {"h", 3600}, {"m", 60}, {"s", 1}};
    const char *at = text;
    bool minus = *at == '-', any = false;
    double total = 0;
    at += minus;
    while (*at) {
        char *end;
        if (!strchr("0123456789.", *at))
            return false;
        double v = strtod(at, &end), scale = 0;
        if (end == at || !isfinite(v))
            return false;
        at = end;
        if (!*at && !any) { /* a number alone */
            total = v;
            break;
        }
        for (size_t i = 0; !(scale > 0) && i < sizeof units / sizeof *units; i++)
            if (!strncmp(at, units[i].name, strlen(units[i].name))) {
                scale = units[i].s;
                at += strlen(units[i].name);
            }
        if (!(scale > 0))
            return false;
        total += v * scale;
        any = true;
    }
    if (at == text + minus && !any && !*at)
        return false;
    if (unit)
        *unit = any;
    return duration_of_seconds(minus ? -1 : total, ns);
}
