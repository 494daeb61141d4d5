/* What a process may take, from made-up /proc and /sys trees. */
#include "base/sysmem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char root[] = "/tmp/steel-sysmem-XXXXXX";

/* Writes ROOT/path, with the folders it is in. */
static void put(const char *path, const char *text)
{
    char full[512];
    snprintf(full, sizeof full, "%s/%s", root, path);
    for (char *p = full + strlen(root) + 1; (p = strchr(p, '/')); p++) {
        *p = 0;
        mkdir(full, 0700);
        *p = '/';
    }
    FILE *f = fopen(full, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void clear(void)
{
    char cmd[64];
    snprintf(cmd, sizeof cmd, "rm -rf %s/*", root);
    assert_int_equal(system(cmd), 0);
}

static void test_system(void **state)
{
    (void)state;
    clear();
    assert_int_equal(sysmem_available(root), 0); /* nothing is known */
    put("proc/meminfo", "MemTotal:  100 kB\nMemFree: 5 kB\nMemAvailable:    70 kB\nSwap: 1 kB\n");
    assert_int_equal(sysmem_available(root), 70 << 10);
    assert_true(sysmem_available("") > 1 << 20);
}

static void test_v2(void **state)
{
    (void)state;
    clear();
    put("proc/meminfo", "MemAvailable: 1000000 kB\n");
    put("proc/self/cgroup", "0::/a/b\n");
    put("sys/fs/cgroup/a/b/memory.max", "max\n");
    put("sys/fs/cgroup/a/b/memory.current", "1000\n");
    assert_int_equal(sysmem_available(root), 1000000 << 10);
    /* a group above has a limit; its page cache is free */
    put("sys/fs/cgroup/a/memory.max", "50000\n");
    put("sys/fs/cgroup/a/memory.current", "30000\n");
    put("sys/fs/cgroup/a/memory.stat", "anon 10\ninactive_file 4000\nactive_file 1000\nslab 9\n");
    assert_int_equal(sysmem_available(root), 25000);
    /* the tightest of all counts; one that is full leaves next to nothing, not "unknown" */
    put("sys/fs/cgroup/a/b/memory.max", "900\n");
    assert_int_equal(sysmem_available(root), 1);
    /* in a container the path is the host's: only the mount's root is there */
    put("proc/self/cgroup", "0::/somewhere/else\n");
    assert_int_equal(sysmem_available(root), 1000000 << 10);
    put("sys/fs/cgroup/memory.max", "70000\n");
    put("sys/fs/cgroup/memory.current", "10000\n");
    assert_int_equal(sysmem_available(root), 60000);
}

static void test_v1(void **state)
{
    (void)state;
    clear();
    put("proc/meminfo", "MemAvailable: 1000000 kB\n");
    put("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:hugetlb,memory:/box\n0::/\n");
    put("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "80000\n");
    put("sys/fs/cgroup/memory/box/memory.usage_in_bytes", "50000\n");
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    put("sys/fs/cgroup/memory/memory.usage_in_bytes", "60000\n");
    assert_int_equal(sysmem_available(root), 30000);
    put("sys/fs/cgroup/memory/box/memory.stat", "total_inactive_file 20000\n");
    assert_int_equal(sysmem_available(root), 50000);
}

int main(void)
{
    if (!mkdtemp(root))
        return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_system),
        cmocka_unit_test(test_v2),
        cmocka_unit_test(test_v1),
    };
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    clear();
    rmdir(root);
    return rc;
}
