/* Reads a model's sampling advice. Advice out of range is passed over: the model runs without it. */
#include "engine/sample_advice.h"

#include <limits.h>
#include <math.h>

struct advice {
    const char *gguf, *folder; /* its key there */
    float *value;              /* one of the two */
    int *count;
    float fallback;
    double lo, hi;
};

struct sample_params sample_params_unset(void)
{
    return (struct sample_params){.temp = NAN,
                                  .top_k = INT_MIN,
                                  .top_p = NAN,
                                  .min_p = NAN,
                                  .repeat_penalty = NAN,
                                  .repeat_last_n = INT_MIN};
}

static bool advised(const struct tensorfile *f, const struct advice *a, double *v)
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
        {"general.sampling.temp", "temperature", &p->temp, NULL, d.temp, 0, 100},
        {"general.sampling.top_k", "top_k", NULL, &p->top_k, (float)d.top_k, 0, 1 << 28},
        {"general.sampling.top_p", "top_p", &p->top_p, NULL, d.top_p, 0, 1},
        {"general.sampling.min_p", "min_p", &p->min_p, NULL, d.min_p, 0, 1},
        {"general.sampling.penalty_repeat", "repetition_penalty", &p->repeat_penalty, NULL,
         d.repeat_penalty, 0.01, 100},
        {"general.sampling.penalty_last_n", "", NULL, &p->repeat_last_n, (float)d.repeat_last_n, -1,
         1 << 20},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        const struct advice *a = &list[i];
        double v;
        if (a->value ? !isnan(*a->value) : *a->count != INT_MIN)
            continue;
        if (!advised(f, a, &v))
            v = (double)a->fallback;
        if (a->value)
            *a->value = (float)v;
        else
            *a->count = (int)v;
    }
}
