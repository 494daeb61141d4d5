/* Prints a backend's tables of kernels. */
#include "backend/backend.h"

#include <string.h>

bool backend_print_picks(struct backend *be, FILE *out)
{
    struct pick_info p;
    int op = 2, name = 6; /* widths of columns: at least their titles' */
    if (!be->ops->picks)
        return false;
    for (int i = 0; be->ops->picks->row(be, i, &p); i++) {
        op = (int)strlen(p.op) > op ? (int)strlen(p.op) : op;
        name = (int)strlen(p.name) > name ? (int)strlen(p.name) : name;
    }
    fprintf(out, "%-*s %-*s %-7s %-14s %-19s %s\n", op, "op", name, "kernel", "device", "rows",
            "picked", "formats");
    for (int i = 0; be->ops->picks->row(be, i, &p); i++) {
        char rows[32];
        if (p.rows_to)
            snprintf(rows, sizeof rows, "%d to %d", p.rows_from, p.rows_to);
        else
            snprintf(rows, sizeof rows, "%d and more", p.rows_from);
        char runs[32] = "not on this device";
        if (p.available)
            snprintf(runs, sizeof runs, "%llu", (unsigned long long)p.runs);
        fprintf(out, "%-*s %-*s %-7s %-14s %-19s %s\n", op, p.op, name, p.name, p.device, rows,
                runs, p.formats);
    }
    be->ops->picks->shapes(be, out);
    return true;
}
