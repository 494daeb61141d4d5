/*
 * steel doctor: what this machine has for running models, and what slows them down. Exits with 1 if
 * something is broken; advice alone is not a failure.
 */
#include "backend/backend.h"
#include "base/cpu.h"
#include "base/topology.h"
#include "base/os.h"
#include "base/sysmem.h"
#include "base/version.h"
#include "cli/cli.h"
#include "cli/config_file.h"
#include "file/builtin.h"

#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

static int problems;

static void good(const char *what, const char *text)
{
    printf("  ok    %-10s %s\n", what, text);
}

static void advise(const char *what, const char *text)
{
    printf("  note  %-10s %s\n", what, text);
}

static void wrong(const char *what, const char *text)
{
    printf("  BAD   %-10s %s\n", what, text);
    problems++;
}

static void check_cpu(void)
{
    char model[200], text[600];
    os_cpu_model(model, sizeof model);
    int n = os_cpus(), quota = cpu_quota("");
    snprintf(text, sizeof text, "%s; %d CPUs%s", model, n, quota ? " allowed" : "");
    good("CPU", text);
    struct cpu_list allowed;
    struct topology cores;
    bool known = os_cpu_set(allowed.bits, sizeof allowed.bits / sizeof *allowed.bits);
    if (topology_read("", known ? &allowed : NULL, &cores)) {
        topology_describe(&cores, text, sizeof text);
        good("cores", text);
    }
    if (quota && quota < n) {
        snprintf(text, sizeof text,
                 "the control group limits steel to %d of them: it runs %d threads", quota, quota);
        advise("CPU", text);
    }
    struct error err = {0};
    enum isa isa;
    if (!isa_choose(&isa, &err))
        wrong("kernels", err.msg);
    else if (isa == ISA_REF)
        wrong("kernels",
              "plain C only: this CPU lacks AVX2, FMA or F16C; expect a tenth of the speed");
    else {
        snprintf(text, sizeof text, "%s%s", isa_name(isa),
                 isa != isa_best() ? " (chosen by STEEL_ISA; the CPU supports more)" : "");
        good("kernels", text);
    }
}

static void check_memory(void)
{
    char a[16], text[600];
    size_t room = sysmem_available("");
    snprintf(text, sizeof text, "%s free for models and KV caches", cli_bytes((double)room, a));
    if (!room)
        advise("memory", "the amount of free memory is unknown");
    else if (room < 1000u * 1000 * 1000)
        advise("memory", text);
    else
        good("memory", text);
    struct rlimit files;
    if (!getrlimit(RLIMIT_NOFILE, &files) && files.rlim_cur < 256) {
        snprintf(text, sizeof text,
                 "only %ld files and sockets may be open; a server needs more (ulimit -n)",
                 (long)files.rlim_cur);
        advise("limits", text);
    }
}

/* Opens a GPU, and says what it is. */
static void check_device(const char *device, const char *what)
{
    char a[16], b[16], sm[24] = "", rate[40] = "", text[700];
    struct backend_options opt = {.device = device};
    struct error err = {0};
    struct gpu_facts g;
    struct backend *be = backend_open(&opt, &err);
    if (!be) {
        wrong(what, err.msg);
        return;
    }
    if (device_facts_of(be, &g)) {
        if (g.sm)
            snprintf(sm, sizeof sm, ", sm_%d", g.sm);
        if (g.read_bytes_s > 0)
            snprintf(rate, sizeof rate, "; reads %.0f GB/s", g.read_bytes_s * 1e-9);
        snprintf(text, sizeof text, "%s%s, driver %s; %s, of which %s are free%s%s", g.name, sm,
                 *g.driver ? g.driver : "unknown", cli_bytes((double)g.memory_bytes, a),
                 cli_bytes((double)device_room(device, 1.0), b), rate,
                 g.software ? "; computes on the CPU, so models run on it only with --device" : "");
        good(what, text);
    }
    be->ops->close(be);
}

static void check_gpu(void)
{
    bool driver = access("/dev/nvidiactl", F_OK) == 0 || access("/dev/dxg", F_OK) == 0;
    bool built = strstr(version_build(), "CUDA");
    if (!device_count("auto") && !(driver && built)) {
        if (!driver)
            advise("GPU", "no NVIDIA driver was found; models run on the CPU");
        else
            wrong("GPU",
                  "there is an NVIDIA GPU, but this binary was built without CUDA: install nvcc "
                  "and build again");
        return;
    }
    check_device(device_default(DEVICE_GPU), "GPU");
}

/* The other kinds of GPUs, which run models only if they are named. */
static void check_others(void)
{
    const char *missing, *name, *first = device_default(DEVICE_GPU);
    for (int i = 0; (name = device_gpu_type(i, &missing)) != NULL; i++) {
        char device[64];
        if (strcmp(name, first) == 0 && (missing || device_count("auto") > 0))
            continue; /* check_gpu has looked at it */
        if (missing)
            advise(name, missing);
        for (int k = 0, n = device_count(name); k < n; k++) {
            snprintf(device, sizeof device, "%s:%d", name, k);
            check_device(device, device);
        }
    }
}

static void check_files(void)
{
    size_t n = 0;
    char a[16], text[700];
    if (builtin_bytes(BUILTIN_NAME, &n)) {
        snprintf(text, sizeof text, "built in, %s: `steel run` answers without a file",
                 cli_bytes((double)n, a));
        good("model", text);
    } else
        advise("model", "none built in: commands need a MODEL");
    const struct config_file *c = config_file_get();
    if (c->error)
        wrong("config", c->error);
    else {
        snprintf(text, sizeof text, "%s: %d options", *c->path ? c->path : CONFIG_FILE_PLACE, c->n);
        good("config", text);
    }
}

int cmd_doctor(int argc, char **argv)
{
    struct usage u = {
        .command = "doctor",
        .synopsis = "",
        .about = "Checks this machine (CPU, memory, GPU, driver, config) and says what is missing.",
        .examples = "  steel doctor\n",
    };
    int n = args_parse(&u, argc, argv, NULL);
    if (n < 0)
        return cli_args_exit(n);
    const char *commit = version_commit();
    printf("steel %s (%s%s%s)\n", version_number(), commit, *commit ? ", " : "", version_build());
    problems = 0;
    check_cpu();
    check_memory();
    check_gpu();
    check_others();
    check_files();
    if (problems)
        printf("%d problem%s\n", problems, problems == 1 ? "" : "s");
    return problems ? EXIT_FAIL : EXIT_OK;
}
