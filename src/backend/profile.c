/* Prints the time per stage: a line per stage, a group of columns per phase that had steps. */
#include "backend/profile.h"

static const char *const stage_names[N_STAGES] = {
    [STAGE_EMBED] = "embed",         [STAGE_NORM] = "norm",     [STAGE_QKV] = "qkv",
    [STAGE_ATTENTION] = "attention", [STAGE_OUTPUT] = "output", [STAGE_ROUTER] = "router",
    [STAGE_EXPERTS] = "experts",     [STAGE_FFN] = "ffn",       [STAGE_HEAD] = "head",
    [STAGE_SAMPLING] = "sampling",   [STAGE_COMM] = "comm",     [STAGE_OTHER] = "other",
};
static const char *const phase_names[2] = {"prefill", "decode"};

const char *stage_name(enum stage s)
{
    return stage_names[s];
}

static void print_cells(const struct profile *p, int phase, double ns, double total, FILE *out)
{
    double steps = (double)p->steps[phase], tokens = (double)p->tokens[phase];
    fprintf(out, "   %10.3f %10.4f %6.1f%%", ns / 1e6 / steps, ns / 1e6 / (tokens > 0 ? tokens : 1),
            total > 0 ? 100 * ns / total : 0.0);
}

void profile_print(const struct profile *p, FILE *out)
{
    double total[2] = {0};
    for (int phase = 0; phase < 2; phase++)
        for (int s = 0; s < N_STAGES; s++)
            total[phase] += p->ns[phase][s];
    if (p->steps[0] + p->steps[1] == 0) {
        fprintf(out, "profile: no steps were run\n");
        return;
    }
    fprintf(out, "\n%-10s", "");
    for (int phase = 0; phase < 2; phase++)
        if (p->steps[phase]) {
            char title[128];
            snprintf(title, sizeof title, "%s: %lld step%s, %lld tokens", phase_names[phase],
                     (long long)p->steps[phase], p->steps[phase] == 1 ? "" : "s",
                     (long long)p->tokens[phase]);
            fprintf(out, "   %29s", title);
        }
    fprintf(out, "\n%-10s", "stage");
    for (int phase = 0; phase < 2; phase++)
        if (p->steps[phase])
            fprintf(out, "   %10s %10s %7s", "ms/step", "ms/token", "share");
    fputc('\n', out);
    for (int s = 0; s < N_STAGES; s++) {
        if (p->ns[0][s] + p->ns[1][s] <= 0)
            continue;
        fprintf(out, "%-10s", stage_names[s]);
        for (int phase = 0; phase < 2; phase++)
            if (p->steps[phase])
                print_cells(p, phase, p->ns[phase][s], total[phase], out);
        fputc('\n', out);
    }
    fprintf(out, "%-10s", "total");
    for (int phase = 0; phase < 2; phase++)
        if (p->steps[phase])
            print_cells(p, phase, total[phase], total[phase], out);
    fputc('\n', out);
}
