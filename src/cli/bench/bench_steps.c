/* Steps of random tokens, the same for every engine and every run. */
#include "backend/backend.h"
#include "cli/bench/bench_steps.h"
#include "base/mem.h"
#include "cli/cli.h"

static int32_t random_id(uint32_t *state, int n_vocab)
{
    *state = *state * 1664525u + 1013904223u;
    return (int32_t)((*state >> 8) % (uint32_t)n_vocab);
}

static void use_adapter(const struct bench_loras *l, int s, struct step_item *it)
{
    if (!l->n)
        return;
    it->loras = &l->picks[s % l->n];
    it->n_loras = 1;
}

bool bench_fill(struct runtime *rt, const struct bench_loras *loras, struct kv_seq *seqs,
                int n_seqs, int n, struct error *err)
{
    const struct step_limits *lim = stepper_limits(rt->step);
    int V = rt->model->config.n_vocab;
    size_t total = (size_t)n_seqs * (size_t)n;
    int32_t *ids = mem_zalloc(total + 1, sizeof *ids);
    struct step_item *items = mem_zalloc((size_t)n_seqs, sizeof *items);
    for (int s = 0; s < n_seqs; s++) {
        uint32_t rnd = 7u + (uint32_t)s;
        for (int i = 0; i < n; i++)
            ids[(size_t)s * (size_t)n + (size_t)i] = random_id(&rnd, V);
    }
    bool ok = true;
    for (size_t at = 0; ok && at < total;) {
        int n_items = 0;
        for (int room = lim->max_tokens; room > 0 && at < total;) {
            int s = (int)(at / (size_t)n), left = n - (int)(at % (size_t)n);
            int take = left < room ? left : room;
            items[n_items++] = (struct step_item){.seq = &seqs[s],
                                                  .tokens = ids + at,
                                                  .n_tokens = take,
                                                  .want = take == left ? LOGITS_LAST : LOGITS_NONE};
            use_adapter(loras, s, &items[n_items - 1]);
            at += (size_t)take;
            room -= take;
        }
        ok = step_run(rt->step, items, n_items, err);
        if (ok && cli_interrupted())
            ok = error_set(err, "interrupted");
    }
    mem_free(ids);
    mem_free(items);
    return ok;
}

bool bench_decode(struct runtime *rt, const struct bench_loras *loras, struct kv_seq *seqs,
                  int n_seqs, int n, struct error *err)
{
    bool ahead = rt->be->async && !rt->be->profile;
    struct step_item *items[2];
    int32_t *ids = mem_zalloc((size_t)n_seqs, sizeof *ids);
    uint32_t rnd = 99;
    bool ok = true;
    int started = 0, finished = 0;
    for (int i = 0; i < 2; i++)
        items[i] = mem_zalloc((size_t)n_seqs, sizeof *items[i]);
    while (finished < n && ok) {
        struct step_item *now = items[started % 2];
        for (int s = 0; s < n_seqs && started < n; s++) {
            ids[s] = random_id(&rnd, rt->model->config.n_vocab);
            now[s] = (struct step_item){
                .seq = &seqs[s], .tokens = &ids[s], .n_tokens = 1, .want = LOGITS_LAST};
            now[s].after = started ? items[(started + 1) % 2][s].first_row + 1 : 0;
            use_adapter(loras, s, &now[s]);
        }
        if (started < n) {
            ok = step_start(rt->step, now, n_seqs, err);
            if (ok)
                step_sample(rt->step);
            started += ok;
        }
        if (ok && cli_interrupted())
            ok = error_set(err, "interrupted");
        if (started > finished + (ahead && started < n)) {
            struct error *first = ok ? err : &(struct error){0};
            ok = step_finish(rt->step, first) && ok;
            for (int s = 0; ok && s < n_seqs; s++)
                ok = step_item_ok(&items[finished % 2][s], err);
            finished++;
        }
    }
    while (finished < started) { /* steps in flight when something failed */
        step_finish(rt->step, &(struct error){0});
        finished++;
    }
    mem_free(items[0]);
    mem_free(items[1]);
    mem_free(ids);
    return ok;
}
