/* See convert_ui.h. */
#include "cli/convert_ui.h"
#include "quant/quantize.h"
#include "base/clock.h"
#include "base/mem.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

void convert_ui_init(struct convert_ui *ui, const char *verb)
{
    *ui = (struct convert_ui){verb, clock_ns(), isatty(STDERR_FILENO) ? 0 : -1};
}

void convert_ui_progress(void *arg, size_t done, size_t total)
{
    struct convert_ui *ui = arg;
    int percent = total ? (int)(100.0 * (double)done / (double)total) : 100;
    if (ui->shown < 0 || (percent == ui->shown && done < total))
        return;
    char tail[32];
    double spent = (double)(clock_ns() - ui->start) * 1e-9;
    double left = done ? spent * (double)(total - done) / (double)done : 0;
    snprintf(tail, sizeof tail, " %4.0f s left ", left);
    cli_bar(ui->verb, percent, tail);
    if (done >= total)
        fprintf(stderr, "\r\033[K");
    ui->shown = percent;
}

void convert_ui_note(void *arg, const char *message)
{
    (void)arg;
    fprintf(stderr, "steel: note: %s\n", message);
}

void convert_ui_plan(void *arg, const struct transcode *t)
{
    (void)arg;
    char size[16];
    for (size_t i = 0; i < t->n; i++) {
        const struct out_tensor *o = &t->tensors[i];
        char shape[96];
        int n = 0;
        for (int d = 0; d < o->n_dims; d++)
            n += snprintf(shape + n, sizeof shape - (size_t)n, "%s%" PRId64, d ? " x " : "",
                          o->dims[d]);
        size_t bytes = dtype_bytes(o->type, (size_t)(o->dims[0] * o->rows * o->n_mats));
        printf("%-40s %-22s %-8s %12s%s\n", o->name, shape, dtype_name(o->type),
               cli_bytes((double)bytes, size), o->weighted ? "  weighted" : "");
    }
}

void convert_ui_done(const struct convert_ui *ui, const char *out,
                     const struct convert_options *opt, const struct convert_result *r)
{
    char a[16], b[16];
    double s = (double)(clock_ns() - ui->start) * 1e-9;
    fprintf(stderr, "%s: %s -> %s, %.2f bits per weight (", opt->dry_run ? "plan" : out,
            cli_bytes((double)r->bytes_in, a), cli_bytes((double)r->bytes_out, b),
            r->n_params ? 8.0 * (double)r->bytes_out / (double)r->n_params : 0);
    const char *comma = "";
    for (int t = 0; t < DT_COUNT; t++)
        if (r->n_by_type[t]) {
            fprintf(stderr, "%s%zu %s", comma, r->n_by_type[t], dtype_name((enum dtype)t));
            comma = ", ";
        }
    fprintf(stderr, " tensors)");
    if (!opt->dry_run)
        fprintf(stderr, " in %.1f s, %.0f MB/s", s, (double)r->bytes_in / 1e6 / s);
    fprintf(stderr, "\n");
}

/* The types a tensor can be converted to, for messages. */
static const char *type_names(char *out, size_t size)
{
    size_t n = 0;
    for (int t = 0; t < DT_COUNT && n < size; t++)
        if (quantize_supported((enum dtype)t))
            n += (size_t)snprintf(out + n, size - n, "%s%s", n ? ", " : "",
                                  dtype_name((enum dtype)t));
    return out;
}

bool convert_ui_overrides(const struct usage *u, const struct opt_list *list,
                          struct convert_options *opt)
{
    struct convert_override *all = mem_zalloc((size_t)list->n + 1, sizeof *all);
    opt->overrides = all;
    char names[256];
    for (int i = 0; i < list->n; i++) {
        const char *equals = strrchr(list->items[i], '=');
        if (!equals || equals == list->items[i]) {
            args_usage_error(u, "--tensor %s: expected PATTERN=TYPE", list->items[i]);
            return false;
        }
        all[i].text = list->items[i];
        all[i].type = dtype_from_name(equals + 1);
        if (!quantize_supported(all[i].type)) {
            args_usage_error(u, "--tensor %s: unknown or unsupported type; use one of %s",
                             list->items[i], type_names(names, sizeof names));
            return false;
        }
        char *pattern = mem_strndup(list->items[i], (size_t)(equals - list->items[i]));
        int rc = regcomp(&all[i].pattern, pattern, REG_EXTENDED | REG_NOSUB);
        char why[128];
        regerror(rc, &all[i].pattern, why, sizeof why);
        mem_free(pattern);
        if (rc) {
            args_usage_error(u, "--tensor %s: %s", list->items[i], why);
            return false;
        }
        opt->n_overrides++;
    }
    return true;
}

void convert_ui_free(struct convert_options *opt)
{
    for (int i = 0; i < opt->n_overrides; i++)
        regfree((regex_t *)(uintptr_t)&opt->overrides[i].pattern);
    mem_free((void *)(uintptr_t)opt->overrides);
    opt->overrides = NULL;
    opt->n_overrides = 0;
}

bool convert_ui_type(const struct usage *u, const char *flag, const char *name, enum dtype *out)
{
    *out = name ? dtype_from_name(name) : DT_NONE;
    if (!name || (*out != DT_NONE && quantize_supported(*out)))
        return true;
    char names[256];
    args_usage_error(u, "--%s %s: unknown or unsupported type; use one of %s", flag, name,
                     type_names(names, sizeof names));
    return false;
}

static bool same_file(const struct stat *a, const char *path)
{
    struct stat b;
    return path && stat(path, &b) == 0 && a->st_dev == b.st_dev && a->st_ino == b.st_ino;
}

/* True if a and b are parts of one split model, such as model-00001-of-00003.gguf and
 * model-00002-of-00003.gguf. */
static bool same_split(const char *a, const char *b)
{
    const char *x = strrchr(a, '/'), *y = strrchr(b, '/');
    x = x ? x + 1 : a;
    y = y ? y + 1 : b;
    size_t n = strlen(x);
    return n == strlen(y) && n > 20 && !strncmp(x + n - 14, "-of-", 4) &&
           !strcmp(x + n - 14, y + n - 14) && !strncmp(x, y, n - 19);
}

/* True if out is inside the source folder and may be part of its model: anything but a GGUF. */
static bool part_of_folder(const char *in, const char *out)
{
    struct stat folder;
    size_t n = strlen(out);
    char *parent = mem_strdup(out), *slash = strrchr(parent, '/');
    if (slash)
        *slash = 0;
    bool inside = stat(in, &folder) == 0 && S_ISDIR(folder.st_mode) &&
                  same_file(&folder, slash ? *parent ? parent : "/" : ".");
    mem_free(parent);
    return inside && !(n > 5 && !strcasecmp(out + n - 5, ".gguf"));
}

bool convert_ui_target(const char *in, const char *out, const struct convert_options *opt,
                       bool force, struct error *err)
{
    struct stat st;
    if (opt->dry_run || stat(out, &st))
        return true;
    if (same_file(&st, in) || same_split(in, out) || part_of_folder(in, out) ||
        same_file(&st, opt->imatrix))
        return error_set(err, "%s is part of the input: name another output file", out);
    if (!S_ISREG(st.st_mode))
        return error_set(err, "%s: exists and is not a regular file", out);
    return force || error_set(err, "%s exists already; --force replaces it", out);
}
