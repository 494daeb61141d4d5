/* Counts of experts between starts: see uses.h. */
#include "engine/uses.h"
#include "backend/backend.h"
#include "base/mem.h"

#include <inttypes.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A file: head, then the numbers. */
struct uses_head {
    char magic[8];
    uint64_t n;
};
static const char magic[8] = "SXUSES1";

static uint64_t mix(uint64_t h, const void *p, size_t n)
{
    const unsigned char *b = p;
    for (size_t i = 0; i < n; i++)
        h = (h ^ b[i]) * 0x100000001b3u;
    return h;
}

bool uses_place(const char *root, const char *path, size_t n, char *out, size_t size)
{
    const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    char *whole = realpath(path, NULL), folder[512];
    struct stat st;
    int len;
    if (root)
        len = snprintf(folder, sizeof folder, "%s", root);
    else if (xdg && xdg[0] == '/')
        len = snprintf(folder, sizeof folder, "%s/steel/experts", xdg);
    else if (home && home[0] == '/')
        len = snprintf(folder, sizeof folder, "%s/.cache/steel/experts", home);
    else
        len = -1;
    bool ok = whole && !stat(whole, &st) && len > 0 && (size_t)len < sizeof folder;
    if (ok) {
        uint64_t bytes = (uint64_t)st.st_size, count = n;
        uint64_t h = mix(0xcbf29ce484222325u, whole, strlen(whole));
        h = mix(mix(h, &bytes, sizeof bytes), &count, sizeof count);
        len = snprintf(out, size, "%s/%016" PRIx64, folder, h);
        ok = len > 0 && (size_t)len < size;
    }
    free(whole);
    return ok;
}

bool uses_read(const char *file, float *values, size_t n)
{
    struct uses_head head;
    FILE *f = fopen(file, "rb");
    bool ok = f && fread(&head, sizeof head, 1, f) == 1 && !memcmp(head.magic, magic, 8) &&
              head.n == n && fread(values, sizeof *values, n, f) == n && fgetc(f) == EOF;
    for (size_t i = 0; ok && i < n; i++)
        ok = isfinite(values[i]) && values[i] >= 0 && values[i] < 1e15f;
    if (f)
        fclose(f);
    return ok;
}

static void make_folders(const char *file)
{
    char path[600];
    snprintf(path, sizeof path, "%s", file);
    for (char *c = path + 1; (c = strchr(c, '/')) != NULL; c++) {
        *c = 0;
        mkdir(path, 0755);
        *c = '/';
    }
}

bool uses_write(const char *file, const float *values, size_t n)
{
    char temp[640];
    struct uses_head head = {.n = n};
    memcpy(head.magic, magic, sizeof head.magic);
    make_folders(file);
    snprintf(temp, sizeof temp, "%s.%ld", file, (long)getpid());
    FILE *f = fopen(temp, "wb");
    if (!f)
        return false;
    bool ok = fwrite(&head, sizeof head, 1, f) == 1 && fwrite(values, sizeof *values, n, f) == n;
    ok = !fclose(f) && ok;
    if (!ok || rename(temp, file)) {
        unlink(temp);
        return false;
    }
    return true;
}

static size_t count_of(struct backend *be)
{
    return be->ops->tier && be->ops->tier->uses ? be->ops->tier->uses(be, NULL) : 0;
}

void uses_load(struct backend *be, const char *path)
{
    size_t n = count_of(be);
    char file[600];
    if (!n || !uses_place(NULL, path, n, file, sizeof file))
        return;
    float *values = mem_alloc(n * sizeof *values);
    if (uses_read(file, values, n))
        be->ops->tier->place(be, values);
    mem_free(values);
}

void uses_save(struct backend *be, const char *path)
{
    size_t n = count_of(be);
    char file[600];
    if (!n || be->failure || !uses_place(NULL, path, n, file, sizeof file))
        return;
    float *values = mem_alloc(n * sizeof *values), most = 0;
    be->ops->tier->uses(be, values);
    for (size_t i = 0; i < n; i++)
        most = values[i] > most ? values[i] : most;
    if (most > 0)
        uses_write(file, values, n);
    mem_free(values);
}
