/* Reads a model's recommended sampling parameters. A value out of range is ignored. */
#include "sample/sample_advice.h"

#include <limits.h>
#include <math.h>

struct advice {
    const char *gguf, *folder; /* key in each format */
    bool whole;                /* int, else float */
    void *out;
    double fallback;
    double lo, hi;
};

struct sample_params sample_params_unset(void)
{
    struct sample_params p = sample_params_default();
    p.temp = p.top_p = p.min_p = p.repeat_penalty = NAN;
    p.top_k = p.repeat_last_n = INT_MIN;
    return p;
}

static bool read_advice(const struct tensorfile *f, const struct advice *a, double *v)
{
    if (f->is_gguf)
        return meta_get_float(f, a->gguf, v) && *v >= a->lo && *v <= a->hi;
    const json_t *j = json_object_get(f->generation_config, a->folder);
    *v = json_number_value(j);
    return json_is_number(j) && *v >= a->lo && *v <= a->hi;
}

void sample_params_advise(struct sample_params *p, const struct tensorfile *f)
{
    struct sample_params d = sample_params_default();
    const struct advice list[] = {
        {"general.sampling.temp", "temperature", false, &p->temp, d.temp, 0, 100},
        {"general.sampling.top_k", "top_k", true, &p->top_k, d.top_k, 0, 1 << 28},
        {"general.sampling.top_p", "top_p", false, &p->top_p, d.top_p, 0, 1},
        {"general.sampling.min_p", "min_p", false, &p->min_p, d.min_p, 0, 1},
        {"general.sampling.penalty_repeat", "repetition_penalty", false, &p->repeat_penalty,
         d.repeat_penalty, 0.01, 100},
        {"general.sampling.penalty_last_n", "", true, &p->repeat_last_n, d.repeat_last_n, -1,
         1 << 20},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        const struct advice *a = &list[i];
        if (a->whole ? *(int *)a->out != INT_MIN : !isnan(*(float *)a->out))
            continue;
        double v;
        if (!read_advice(f, a, &v))
            v = a->fallback;
        if (a->whole)
            *(int *)a->out = (int)v;
        else
            *(float *)a->out = (float)v;
    }
}
