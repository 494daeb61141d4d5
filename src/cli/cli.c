/* What the commands share. See cli.h. */
#include "cli/cli.h"
#include "cli/listen.h"
#include "backend/devices.h"
#include "cli/hub/hub.h"
#include "dist/job.h"
#include "base/input.h"
#include "base/mem.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

int cli_fail(const struct error *err)
{
    fprintf(stderr, "steel: %s\n", err->msg);
    return EXIT_FAIL;
}

static volatile sig_atomic_t interrupts;

static bool on_terminal;

static void on_interrupt(int sig)
{
    static const char plain[] = "\033[0m\n"; /* resets a style that may be active */
    (void)sig;
    if (++interrupts > 1) {
        if (on_terminal && write(STDOUT_FILENO, plain, sizeof plain - 1) < 0)
            _exit(EXIT_INTERRUPTED);
        _exit(EXIT_INTERRUPTED);
    }
}

void cli_catch_interrupt(void)
{
    struct sigaction sa = {.sa_handler = on_interrupt};
    on_terminal = isatty(STDOUT_FILENO);
    sigaction(SIGINT, &sa, NULL);
}

bool cli_interrupted(void)
{
    return interrupts > 0;
}

void cli_clear_interrupt(void)
{
    interrupts = 0;
}

bool cli_take_model(const struct usage *u, const char **flag, const char **pos, int *n, int others)
{
    if (args_given(flag)) {
        if (*n < u->max_args)
            return true;
        args_usage_error(u, "unexpected argument '%s': -m names the model", pos[*n - 1]);
        return false;
    }
    if (*n <= others)
        return true;
    *flag = pos[0];
    memmove(pos, pos + 1, (size_t)(*n - 1) * sizeof *pos);
    pos[--*n] = NULL;
    return true;
}

bool cli_kv_type(const struct usage *u, const char *flag, const char *name, enum dtype *out)
{
    if (!name)
        return true;
    *out = kv_type_from_name(name);
    if (*out == DT_NONE)
        args_usage_error(u, "--%s %s: use " KV_TYPE_NAMES, flag, name);
    return *out != DT_NONE;
}

bool cli_adapters(const struct usage *u, const char *flag, const struct opt_list *texts,
                  const struct adapter_ref **out, int *n)
{
    struct adapter_ref *refs = texts->n ? mem_zalloc((size_t)texts->n, sizeof *refs) : NULL;
    struct error err = {0};
    *out = refs;
    *n = 0;
    for (int i = 0; i < texts->n; i++) {
        bool ok = adapter_ref_parse(texts->items[i], &refs[i], &err);
        *n += ok;
        for (int k = 0; ok && k < i; k++)
            if (!strcmp(refs[k].name, refs[i].name))
                ok = error_set(&err, "two adapters are called \"%s\": name them, as NAME=PATH",
                               refs[i].name);
        if (!ok) {
            args_usage_error(u, "--%s: %s", flag, err.msg);
            cli_adapters_free(out, n);
            return false;
        }
    }
    return true;
}

void cli_adapters_free(const struct adapter_ref **refs, int *n)
{
    for (int i = 0; i < *n; i++)
        mem_free((*refs)[i].path);
    mem_free((void *)(uintptr_t)*refs);
    *refs = NULL;
    *n = 0;
}

void cli_runtime_options_clear(struct runtime_options *opt)
{
    cli_adapters_free(&opt->loras, &opt->n_loras);
    mem_free((char *)(uintptr_t)opt->draft_model);
    opt->draft_model = NULL;
}

/* --draft-model: a path, or a name on the Hub. */
static bool find_draft_model(const struct usage *u, const struct model_flags *f,
                             struct runtime_options *opt)
{
    struct buf path = {0};
    struct error err = {0};
    if (f->draft_device && !f->draft_model) {
        args_usage_error(u, "--draft-device: there is no --draft-model");
        return false;
    }
    if (!f->draft_model)
        return true;
    if (!hub_open(f->draft_model, &path, &err)) {
        args_usage_error(u, "--draft-model: %s", err.msg);
        return false;
    }
    opt->draft_model = path.len ? buf_take(&path) : mem_strdup(f->draft_model);
    opt->draft_device = f->draft_device;
    buf_clear(&path);
    return true;
}

bool cli_few_adapters(const struct runtime_options *opt, struct error *err)
{
    return opt->n_loras <= LORA_MAX_USES ||
           error_set(err, "--lora: %d adapters at once; %d at most", opt->n_loras, LORA_MAX_USES);
}

int cli_all_adapters(const struct runtime *rt, struct lora_pick *picks)
{
    struct adapter_info all[LORA_MAX_USES];
    int n = rt->adapters ? adapters_list(rt->adapters, all, LORA_MAX_USES) : 0;
    for (int i = 0; i < n; i++)
        picks[i] = (struct lora_pick){all[i].number, all[i].scale, all[i].serial, all[i].mark};
    return n;
}

bool cli_draft(const struct usage *u, const char *how, int *draft, unsigned *from)
{
    static const struct {
        const char *name;
        int draft;
        unsigned from;
    } ways[] = {{"auto", DRAFT_AUTO, 0},
                {"text", DRAFT_AUTO, 1u << DRAFT_TEXT},
                {"head", DRAFT_AUTO, 1u << DRAFT_HEAD},
                {"model", DRAFT_AUTO, 1u << DRAFT_MODEL},
                {"off", 0, 0}};
    for (size_t i = 0; how && i < sizeof ways / sizeof *ways; i++)
        if (!strcmp(how, ways[i].name)) {
            *draft = ways[i].draft;
            *from = ways[i].from;
            return true;
        }
    if (!how)
        return true;
    char *end;
    errno = 0;
    long n = strtol(how, &end, 10);
    if (end == how || *end || errno || n < 0 || n > DRAFT_MOST) {
        args_usage_error(u,
                         "--draft: '%s' is not auto, text, head, model, off or a number up to %d",
                         how, DRAFT_MOST);
        return false;
    }
    *draft = (int)n;
    *from = 0;
    return true;
}

/* What stays in host memory beside a GPU. */
static bool take_offload(const struct usage *u, const struct model_flags *f,
                         struct runtime_options *opt)
{
    if (f->gpu_limit && (!cli_parse_bytes(f->gpu_limit, &opt->gpu_limit) || !opt->gpu_limit)) {
        args_usage_error(u, "--gpu-memory %s: use a size such as 8G or 512M", f->gpu_limit);
        return false;
    }
    opt->offload = (struct offload_wish){f->cpu_moe ? -1 : f->n_cpu_moe, f->override_tensor};
    const char *n = f->gpu_layers;
    if (!n || !strcmp(n, "all") || !strcmp(n, "auto") || !strcmp(n, "-1"))
        return true;
    char *end;
    errno = 0;
    long layers = strtol(n, &end, 10);
    if (end == n || *end || errno || layers < 0 || layers > 1 << 20) {
        args_usage_error(u, "-ngl %s: a number of layers, all or auto", n);
        return false;
    }
    if (!layers && f->device && device_kind(f->device) == DEVICE_GPU) {
        args_usage_error(u, "-ngl 0 is the CPU, and --device is %s", f->device);
        return false;
    }
    if (!layers)
        opt->backend.device = device_default(DEVICE_CPU);
    opt->gpu_layers = (int)layers;
    return true;
}

bool cli_runtime_options(const struct usage *u, const struct model_flags *f,
                         struct runtime_options *opt)
{
    *opt = (struct runtime_options){
        .backend = {.device = f->device ? f->device : "auto",
                    .threads = f->threads,
                    .deterministic = f->deterministic,
                    .no_repack = f->no_repack},
        .context = f->context,
        .page_len = f->page_len,
        .gpu_memory = f->gpu_memory,
        .profile = f->profile,
        .canary = f->kv_canary,
        .draft = f->draft,
    };
    size_t *experts = &opt->backend.expert_memory;
    if (f->expert_memory && (!cli_parse_bytes(f->expert_memory, experts) || !*experts)) {
        args_usage_error(u, "--expert-memory %s: use a size such as 8G or 512M", f->expert_memory);
        return false;
    }
    if (!take_offload(u, f, opt))
        return false;
    struct error why = {0};
    struct job_options job = {f->tp, f->pp, f->ep, f->expert_stats, f->rank_timeout};
    if (!job_arrange(&job, &why)) {
        args_usage_error(u, "%s", why.msg);
        return false;
    }
    return cli_draft(u, f->draft_how, &opt->draft, &opt->draft_from) &&
           cli_kv_type(u, "kv-type", f->kv_type, &opt->k_type) &&
           cli_kv_type(u, "kv-type", f->kv_type, &opt->v_type) &&
           cli_kv_type(u, "cache-type-k", f->k_type, &opt->k_type) &&
           cli_kv_type(u, "cache-type-v", f->v_type, &opt->v_type) &&
           cli_adapters(u, "lora", &f->loras, &opt->loras, &opt->n_loras) &&
           find_draft_model(u, f, opt);
}

int cli_columns(void)
{
    struct winsize ws;
    const char *env = getenv("COLUMNS");
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (ioctl(fd, TIOCGWINSZ, &ws) == 0 && ws.ws_col)
            return ws.ws_col;
    int n = env ? (int)strtol(env, NULL, 10) : 0;
    return n > 0 ? n : 80;
}

void cli_bar(const char *what, int percent, const char *tail)
{
    enum { MOST = 32 };
    char bar[MOST + 1];
    int rest = (int)(strlen(what) + strlen(tail)) + 11, width = cli_columns() - rest;
    width = width > MOST ? MOST : width;
    for (int i = 0; i < width; i++)
        bar[i] = i * 100 < percent * width ? '=' : ' ';
    bar[width > 0 ? width : 0] = 0;
    if (width >= 4)
        fprintf(stderr, "\r%s [%s] %3d %%%s", what, bar, percent, tail);
    else
        fprintf(stderr, "\r%s %d %%", what, percent);
}

void cli_progress_bar(int percent)
{
    cli_bar("loading", percent, "");
}

static bool show_progress(void *arg, size_t done, size_t total)
{
    int *shown = arg;
    int percent = total ? (int)(100.0 * (double)done / (double)total) : 100;
    if (*shown >= 0 && percent != *shown)
        cli_progress_bar(*shown = percent);
    return !cli_interrupted();
}

struct runtime *cli_open(const char *path, struct runtime_options *opt, struct error *err)
{
    bool terminal = isatty(STDERR_FILENO);
    int shown = terminal ? 0 : -1;
    struct progress progress = {show_progress, &shown};
    opt->progress = &progress;
    struct runtime *rt = runtime_open(path, opt, err);
    if (terminal)
        fprintf(stderr, "\r\033[K");
    opt->progress = NULL;
    if (rt && rt->notice.msg[0])
        fprintf(stderr, "steel: %s\n", rt->notice.msg);
    return rt;
}

bool cli_read_file(const char *path, size_t max, struct buf *out, struct error *err)
{
    bool is_stdin = !strcmp(path, "-");
    FILE *f = is_stdin ? stdin : input_open(path, err);
    if (!f)
        return false;
    char chunk[65536];
    size_t n;
    bool ok = true;
    while (ok && (n = fread(chunk, 1, sizeof chunk, f)) > 0) {
        buf_add(out, chunk, n);
        if (out->len > max)
            ok = error_set(err, "%s: larger than %zu bytes", path, max);
    }
    if (ok && ferror(f))
        ok = error_set(err, "%s: %s", path, strerror(errno));
    if (!is_stdin)
        fclose(f);
    return ok;
}

const char *cli_bytes(double bytes, char *buf)
{
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB"};
    int u = 0;
    while (bytes >= 1000 && u < 4) {
        bytes /= 1000;
        u++;
    }
    snprintf(buf, 16, u == 0 ? "%.0f %s" : "%.2f %s", bytes, units[u]);
    return buf;
}

bool cli_make_parents(const char *path, struct error *err)
{
    char *p = mem_strdup(path);
    bool ok = true;
    for (char *c = p + 1; ok && (c = strchr(c, '/')); c++) {
        *c = 0;
        ok = mkdir(p, 0755) == 0 || errno == EEXIST || error_set(err, "%s: %s", p, strerror(errno));
        *c = '/';
    }
    mem_free(p);
    return ok;
}
