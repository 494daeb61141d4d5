/*
 * Importance matrix files: see imatrix.h. Owns the map. A GGUF has pairs of tensors NAME.in_sum2
 * (n, n_mats) and NAME.counts (1, n_mats). A .dat has a count, then per entry a name, the number of
 * calls and n * n_mats sums. Both are fully checked at open.
 */
#include "convert/imatrix.h"
#include "base/map.h"
#include "base/mem.h"
#include "file/tensorfile.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct imatrix_entry {
    char *name;
    const uint8_t *sums;   /* (n_sums) floats, unaligned */
    const uint8_t *counts; /* (n_counts) floats, or NULL: equal counts */
    size_t n_sums, n_counts;
};

struct imatrix {
    struct tensorfile *gguf; /* or */
    uint8_t *map;            /* (bytes) of a .dat */
    size_t bytes;
    struct imatrix_entry *entries; /* (n) */
    size_t n, cap;
    struct map by_name;
};

static struct imatrix_entry *add_entry(struct imatrix *m, const char *name, size_t len)
{
    if (m->n == m->cap) {
        m->cap = m->cap ? 2 * m->cap : 64;
        m->entries = mem_realloc(m->entries, m->cap, sizeof *m->entries);
    }
    struct imatrix_entry *e = &m->entries[m->n++];
    *e = (struct imatrix_entry){.name = mem_strndup(name, len)};
    return e;
}

static float get(const uint8_t *p, size_t i)
{
    float f;
    memcpy(&f, p + 4 * i, 4);
    return f;
}

static bool check_values(const char *path, const struct imatrix_entry *e, struct error *err)
{
    for (size_t i = 0; i < e->n_sums; i++)
        if (!isfinite(get(e->sums, i)) || get(e->sums, i) < 0)
            return error_set(err, "%s: '%.100s': value %zu is negative or not finite", path,
                             e->name, i);
    for (size_t i = 0; e->counts && i < e->n_counts; i++)
        if (!isfinite(get(e->counts, i)) || get(e->counts, i) < 0)
            return error_set(err, "%s: '%.100s': count %zu is negative or not finite", path,
                             e->name, i);
    return true;
}

static bool read_gguf(struct imatrix *m, const char *path, struct error *err)
{
    for (size_t i = 0; i < m->gguf->n_tensors; i++) {
        const struct tensor *t = &m->gguf->tensors[i];
        size_t len = strlen(t->name), tail = strlen(".in_sum2");
        if (len <= tail || strcmp(t->name + len - tail, ".in_sum2") != 0)
            continue;
        struct imatrix_entry *e = add_entry(m, t->name, len - tail);
        char counts_name[1200];
        snprintf(counts_name, sizeof counts_name, "%s.counts", e->name);
        const struct tensor *c = tensorfile_find(m->gguf, counts_name);
        if (!c)
            return error_set(err, "%s: tensor '%.100s' is missing", path, counts_name);
        if (t->type != DT_F32 || c->type != DT_F32 || t->dims[2] != 1 || t->dims[3] != 1 ||
            c->bytes / 4 != (size_t)t->dims[1])
            return error_set(err, "%s: tensor '%.100s': type or shape does not fit its counts",
                             path, t->name);
        e->sums = t->data;
        e->n_sums = t->bytes / 4;
        e->counts = c->data;
        e->n_counts = c->bytes / 4;
        if (!check_values(path, e, err))
            return false;
    }
    return m->n ? true
                : error_set(err, "%s: no tensor NAME.in_sum2: not an importance matrix", path);
}

/* A 32-bit count, checked against the remaining bytes. */
static bool take_count(const struct imatrix *m, size_t *pos, size_t each, int32_t *out)
{
    if (!m->map || m->bytes - *pos < 4)
        return false;
    memcpy(out, m->map + *pos, 4);
    *pos += 4;
    return *out >= 0 && (size_t)*out <= (m->bytes - *pos) / each;
}

static bool read_dat(struct imatrix *m, const char *path, struct error *err)
{
    size_t pos = 0;
    int32_t n, len, calls, values;
    if (!take_count(m, &pos, 12, &n) || n < 1)
        return error_set(err, "%s: number of entries: not an importance matrix", path);
    for (int32_t i = 0; i < n; i++) {
        if (!take_count(m, &pos, 1, &len) || len < 1)
            return error_set(err, "%s: entry %d: bad name", path, i);
        struct imatrix_entry *e = add_entry(m, (const char *)m->map + pos, (size_t)len);
        pos += (size_t)len;
        if (m->bytes - pos < 4)
            return error_set(err, "%s: '%.100s': file ends early", path, e->name);
        memcpy(&calls, m->map + pos, 4); /* a common factor, which cancels */
        pos += 4;
        if (!take_count(m, &pos, 4, &values) || values < 1)
            return error_set(err, "%s: '%.100s': bad number of values", path, e->name);
        e->sums = m->map + pos;
        e->n_sums = (size_t)values;
        pos += 4 * (size_t)values;
        if (!check_values(path, e, err))
            return false;
    }
    return true;
}

static bool map_dat(struct imatrix *m, const char *path, bool *is_gguf, struct error *err)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return error_set(err, "%s: %s", path, strerror(errno));
    bool ok = fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size >= 8;
    if (ok) {
        m->bytes = (size_t)st.st_size;
        m->map = mmap(NULL, m->bytes, PROT_READ, MAP_PRIVATE, fd, 0);
        if (m->map == MAP_FAILED) {
            m->map = NULL;
            ok = false;
        }
    }
    close(fd);
    if (!ok)
        return error_set(err, "%s: number of entries: not an importance matrix", path);
    *is_gguf = !memcmp(m->map, "GGUF", 4);
    return true;
}

struct imatrix *imatrix_open(const char *path, struct error *err)
{
    struct imatrix *m = mem_zalloc(1, sizeof *m);
    bool is_gguf = false, ok = map_dat(m, path, &is_gguf, err);
    if (ok && is_gguf) {
        m->gguf = tensorfile_open(path, err);
        ok = m->gguf && read_gguf(m, path, err);
    } else if (ok) {
        ok = read_dat(m, path, err);
    }
    map_init(&m->by_name, m->n);
    for (size_t i = 0; ok && i < m->n; i++)
        if (!map_add(&m->by_name, m->entries[i].name, strlen(m->entries[i].name), (int64_t)i))
            ok = error_set(err, "%s: '%.100s' is there twice", path, m->entries[i].name);
    if (!ok) {
        imatrix_close(m);
        return NULL;
    }
    return m;
}

void imatrix_close(struct imatrix *m)
{
    if (!m)
        return;
    tensorfile_close(m->gguf);
    if (m->map)
        munmap(m->map, m->bytes);
    for (size_t i = 0; i < m->n; i++)
        mem_free(m->entries[i].name);
    mem_free(m->entries);
    map_clear(&m->by_name);
    mem_free(m);
}

size_t imatrix_count(const struct imatrix *m)
{
    return m->n;
}

static const struct imatrix_entry *find(const struct imatrix *m, const char *name)
{
    int64_t i;
    return map_get(&m->by_name, name, strlen(name), &i) ? &m->entries[i] : NULL;
}

enum imatrix_fit imatrix_check(const struct imatrix *m, const char *name, size_t n, size_t n_mats)
{
    const struct imatrix_entry *e = find(m, name);
    if (!e)
        return IMATRIX_NONE;
    bool fits = e->n_sums == n * n_mats && (!e->counts || e->n_counts == n_mats);
    return fits ? IMATRIX_FITS : IMATRIX_MISFIT;
}

bool imatrix_weights(const struct imatrix *m, const char *name, size_t i, size_t n, float *out)
{
    const struct imatrix_entry *e = find(m, name);
    CHECK(e && (i + 1) * n <= e->n_sums, "importance of '%s' was not checked", name);
    double sum = 0;
    for (size_t k = 0; k < n; k++)
        sum += (double)get(e->sums, i * n + k);
    if (!(sum > 0)) /* the expert was never selected */
        return false;
    double scale = (double)n / sum;
    for (size_t k = 0; k < n; k++) {
        float w = (float)((double)get(e->sums, i * n + k) * scale);
        out[k] = w > 1e-4f ? w : 1e-4f;
    }
    return true;
}
