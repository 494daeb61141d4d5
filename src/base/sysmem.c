/* Reads the kernel's memory figures. Page cache counts as free, because it is reclaimable. */
#include "base/sysmem.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum { PATH_CAP = 4096 };

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* The number in DIR/NAME. False for "max" and other text. */
static bool read_number(const char *dir, const char *name, uint64_t *out)
{
    char path[PATH_CAP];
    if (snprintf(path, sizeof path, "%s/%s", dir, name) >= (int)sizeof path)
        return false;
    FILE *f = fopen(path, "re");
    unsigned long long v;
    bool ok = f && fscanf(f, "%llu", &v) == 1;
    if (f)
        fclose(f);
    if (ok)
        *out = v;
    return ok;
}

/* The sum of the named fields of a file of "field number" lines. */
static bool read_fields(const char *path, const char *const *fields, int n, uint64_t *sum)
{
    FILE *f = fopen(path, "re");
    if (!f)
        return false;
    char line[256], field[128];
    unsigned long long v;
    int found = 0;
    *sum = 0;
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, "%127s %llu", field, &v) != 2)
            continue;
        for (int i = 0; i < n; i++)
            if (!strcmp(field, fields[i])) {
                *sum += v;
                found++;
            }
    }
    fclose(f);
    return found > 0;
}

/* Memory left to the cgroup at `dir` and its ancestors up to `top` characters of the path. */
static uint64_t group_room(char *dir, size_t top, bool v2)
{
    static const char *const cache_v1[] = {"total_inactive_file", "total_active_file"};
    static const char *const cache_v2[] = {"inactive_file", "active_file"};
    uint64_t room = UINT64_MAX;
    for (;;) {
        uint64_t limit, used, cache = 0;
        char stat[PATH_CAP];
        if (read_number(dir, v2 ? "memory.max" : "memory.limit_in_bytes", &limit) &&
            read_number(dir, v2 ? "memory.current" : "memory.usage_in_bytes", &used)) {
            if (snprintf(stat, sizeof stat, "%s/memory.stat", dir) < (int)sizeof stat)
                read_fields(stat, v2 ? cache_v2 : cache_v1, 2, &cache);
            used -= smaller(used, cache);
            room = smaller(room, limit > used ? limit - used : 1);
        }
        char *slash = strlen(dir) > top ? strrchr(dir, '/') : NULL;
        if (!slash)
            return room;
        *slash = 0;
    }
}

/* A line of /proc/self/cgroup is "id:controllers:path"; v2 has empty controllers. */
static uint64_t groups_room(const char *root)
{
    char path[PATH_CAP], line[PATH_CAP], dir[2 * PATH_CAP];
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *f = fopen(path, "re");
    uint64_t room = UINT64_MAX;
    while (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        char *names = strchr(line, ':'), *group = names ? strchr(names + 1, ':') : NULL;
        if (!group)
            continue;
        *names++ = *group++ = 0;
        bool v2 = !*names, memory = false;
        for (char *save, *c = strtok_r(names, ",", &save); c; c = strtok_r(NULL, ",", &save))
            memory |= !strcmp(c, "memory");
        if (!v2 && !memory)
            continue;
        int top = snprintf(dir, sizeof dir, "%s/sys/fs/cgroup%s", root, v2 ? "" : "/memory");
        snprintf(dir + top, sizeof dir - (size_t)top, "%s", strcmp(group, "/") ? group : "");
        room = smaller(room, group_room(dir, (size_t)top, v2));
    }
    if (f)
        fclose(f);
    return room;
}

static uint64_t address_room(void)
{
    struct rlimit limit;
    unsigned long long pages = 0;
    if (getrlimit(RLIMIT_AS, &limit) || limit.rlim_cur == RLIM_INFINITY)
        return UINT64_MAX;
    FILE *f = fopen("/proc/self/statm", "re");
    if (f && fscanf(f, "%llu", &pages) != 1)
        pages = 0;
    if (f)
        fclose(f);
    uint64_t used = pages * (uint64_t)sysconf(_SC_PAGESIZE);
    return limit.rlim_cur > used ? limit.rlim_cur - used : 1;
}

size_t sysmem_available(const char *root)
{
    static const char *const available[] = {"MemAvailable:"};
    char path[PATH_CAP];
    uint64_t kb, room = UINT64_MAX;
    snprintf(path, sizeof path, "%s/proc/meminfo", root);
    if (read_fields(path, available, 1, &kb))
        room = kb * 1024;
    room = smaller(room, groups_room(root));
    if (!*root)
        room = smaller(room, address_room());
    return room == UINT64_MAX ? 0 : (size_t)room;
}
