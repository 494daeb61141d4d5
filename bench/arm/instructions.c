/*
 * A plugin of QEMU that counts the instructions a program executes (bench/arm/count.py). The declarations are the
 * part of QEMU's plugin interface, version 1, that it uses.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

struct qemu_plugin_tb;
typedef void translated(uint64_t id, struct qemu_plugin_tb *tb);
typedef void finished(uint64_t id, void *arg);
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, translated *fn);
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *tb, int op, void *at,
                                              uint64_t n);
void qemu_plugin_register_atexit_cb(uint64_t id, finished *fn, void *arg);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);

#define EXPORT __attribute__((visibility("default")))
EXPORT int qemu_plugin_version = 1;
EXPORT int qemu_plugin_install(uint64_t id, const void *info, int argc, char **argv);

static uint64_t count;

static void count_block(uint64_t id, struct qemu_plugin_tb *tb)
{
    (void)id;
    qemu_plugin_register_vcpu_tb_exec_inline(tb, 0, &count, qemu_plugin_tb_n_insns(tb));
}

static void report(uint64_t id, void *arg)
{
    (void)id, (void)arg;
    FILE *out = fopen(getenv("COUNT_FILE") ? getenv("COUNT_FILE") : "/dev/stderr", "w");
    if (out) {
        fprintf(out, "%" PRIu64 "\n", count);
        fclose(out);
    }
}

int qemu_plugin_install(uint64_t id, const void *info, int argc, char **argv)
{
    (void)info, (void)argc, (void)argv;
    qemu_plugin_register_vcpu_tb_trans_cb(id, count_block);
    qemu_plugin_register_atexit_cb(id, report, NULL);
    return 0;
}
