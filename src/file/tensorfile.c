/*
 * Opens a model: maps its files, runs the parser of the format, then checks what spans files:
 * unique names and keys, the parts of a split GGUF, the index of a sharded folder. Owns the maps,
 * the names and the JSON documents. Knows file formats, not the meaning of tensors.
 */
#include "file/tensorfile.h"
#include "file/builtin.h"
#include "file/filemap.h"
#include "file/parse.h"
#include "base/buf.h"
#include "base/json_guard.h"
#include "base/mem.h"
#include "base/os.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { CONFIG_MAX = 64 << 20, INDEX_MAX = 256 << 20, CHUNK_MIN = 4096, CHUNK_MAX = 1 << 20 };

struct name_chunk {
    struct name_chunk *next;
    size_t used, cap;
    char text[];
};

/* jansson allocates from our heap, so that one handler covers all out-of-memory failures. */
__attribute__((constructor)) static void share_heap(void)
{
    json_set_alloc_funcs(mem_alloc, mem_free);
}

bool name_ok(const char *p, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if ((unsigned char)p[i] < 32 || p[i] == 127)
            return false;
    return true;
}

const char *tensorfile_name(struct tensorfile *f, const char *p, size_t len)
{
    struct name_chunk *c = f->names;
    if (!c || c->cap - c->used < len + 1) {
        size_t cap = c ? 2 * c->cap : CHUNK_MIN;
        if (cap > CHUNK_MAX)
            cap = CHUNK_MAX;
        if (cap < len + 1)
            cap = len + 1;
        c = mem_alloc(sizeof *c + cap);
        *c = (struct name_chunk){f->names, 0, cap};
        f->names = c;
    }
    char *s = c->text + c->used;
    memcpy(s, p, len);
    s[len] = 0;
    c->used += len + 1;
    return s;
}

void tensorfile_add(struct tensorfile *f, const struct tensor *t)
{
    if (f->n_tensors == f->cap_tensors) {
        f->cap_tensors = f->cap_tensors ? 2 * f->cap_tensors : 16;
        f->tensors = mem_realloc(f->tensors, f->cap_tensors, sizeof *f->tensors);
    }
    f->tensors[f->n_tensors++] = *t;
}

static int by_address(const void *a, const void *b)
{
    const struct tensor *x = *(const struct tensor *const *)a;
    const struct tensor *y = *(const struct tensor *const *)b;
    if (x->data != y->data)
        return x->data < y->data ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

const struct tensor **tensorfile_by_address(const struct tensorfile *f, size_t first, size_t *n)
{
    *n = f->n_tensors - first;
    const struct tensor **order = mem_zalloc(*n, sizeof *order);
    for (size_t i = 0; i < *n; i++)
        order[i] = &f->tensors[first + i];
    qsort(order, *n, sizeof *order, by_address);
    return order;
}

/* Adds an empty shard; the path is copied. */
static struct shard *add_shard(struct tensorfile *f, const char *path)
{
    f->shards = mem_realloc(f->shards, (size_t)f->n_shards + 1, sizeof *f->shards);
    struct shard *s = &f->shards[f->n_shards++];
    *s = (struct shard){.path = mem_strdup(path), .fd = -1, .watch = -1};
    return s;
}

static bool map_shard(struct tensorfile *f, const char *path, struct error *err)
{
    struct stat st;
    /* stat before open: opening a pipe would block */
    if (stat(path, &st) != 0)
        return error_set(err, "%s: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode))
        return error_set(err, "%s: not a regular file", path);
    if (st.st_size == 0)
        return error_set(err, "%s: magic number: the file is empty", path);
    struct shard *s = add_shard(f, path);
    s->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (s->fd < 0)
        return error_set(err, "%s: %s", path, strerror(errno));
    /* It doubles the kernel's read-ahead while earlier pieces are packed. */
    os_read_in_order(s->fd);
    void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, s->fd, 0);
    if (p == MAP_FAILED)
        return error_set(err, "%s: cannot map: %s", path, strerror(errno));
    s->map = p;
    s->bytes = (size_t)st.st_size;
    s->watch = filemap_watch(p, s->bytes, s->fd);
    return true;
}

/* Builds the name and key tables. A duplicate name is an error. */
static bool index_names(struct tensorfile *f, struct error *err)
{
    map_init(&f->by_name, f->n_tensors);
    for (size_t i = 0; i < f->n_tensors; i++) {
        const struct tensor *t = &f->tensors[i];
        if (!map_add(&f->by_name, t->name, strlen(t->name), (int64_t)i))
            return error_set(err, "%s: tensor '%.100s' is there twice", f->shards[t->shard].path,
                             t->name);
    }
    map_init(&f->by_key, f->n_meta);
    for (size_t i = 0; i < f->n_meta; i++)
        if (!map_add(&f->by_key, f->meta[i].key, strlen(f->meta[i].key), (int64_t)i))
            return error_set(err, "%s: metadata '%.100s' is there twice", f->shards[0].path,
                             f->meta[i].key);
    return true;
}

/* Integer metadata among entries [from, n_meta), before the key table exists. fallback if
 * absent. */
static int64_t early_int(const struct tensorfile *f, size_t from, const char *key, int64_t fallback)
{
    for (size_t i = from; i < f->n_meta; i++) {
        const struct meta *m = &f->meta[i];
        if (strcmp(m->key, key) != 0)
            continue;
        if (m->type == META_I8 || m->type == META_I16 || m->type == META_I32 || m->type == META_I64)
            return m->v.i;
        if (m->type <= META_U32 || m->type == META_U64)
            return m->v.u > INT64_MAX ? -1 : (int64_t)m->v.u;
        return -1;
    }
    return fallback;
}

/* "X-00002-of-00005.gguf": the length of X, part 2, count 5. False if the name has another form. */
static bool split_name(const char *path, size_t *stem, int *part, int *count)
{
    size_t len = strlen(path), tail = strlen("-00001-of-00002.gguf");
    if (len < tail)
        return false;
    const char *p = path + len - tail;
    for (size_t i = 0; i < tail; i++) {
        char want = "-00000-of-00000.gguf"[i];
        if (want == '0' ? p[i] < '0' || p[i] > '9' : p[i] != want)
            return false;
    }
    *stem = len - tail;
    *part = atoi(p + 1);
    *count = atoi(p + 10);
    return true;
}

/* Checks the split.* keys of the latest part. `from` is its first metadata entry. */
static bool check_part(const struct tensorfile *f, size_t from, int no, int64_t count,
                       int64_t tensors, struct error *err)
{
    const char *path = f->shards[f->n_shards - 1].path;
    int64_t v = early_int(f, from, "split.count", -1);
    if (v != count)
        return error_set(err, "%s: metadata 'split.count' is %lld, expected %lld", path,
                         (long long)v, (long long)count);
    v = early_int(f, from, "split.no", -1);
    if (v != no)
        return error_set(err, "%s: metadata 'split.no' is %lld, expected %d", path, (long long)v,
                         no);
    v = early_int(f, from, "split.tensors.count", -1);
    if (v != tensors)
        return error_set(err, "%s: metadata 'split.tensors.count' is %lld, expected %lld", path,
                         (long long)v, (long long)tensors);
    return true;
}

/* Opens part 1, whichever part was named, then the others. */
static bool open_gguf(struct tensorfile *f, const char *path, struct error *err)
{
    size_t stem = 0;
    int part = 1, of = 1;
    bool named = split_name(path, &stem, &part, &of);
    char *first = mem_strdup(path);
    if (named && of > 1) /* "-00001-of-00001" is an ordinary file */
        snprintf(first + stem, strlen(path) - stem + 1, "-00001-of-%05d.gguf", of);
    bool ok = map_shard(f, first, err) && gguf_parse(f, 0, err);
    mem_free(first);
    if (!ok)
        return false;

    int64_t count = early_int(f, 0, "split.count", 0);
    if (named && of > 1 && count != of)
        return error_set(err, "%s: metadata 'split.count' is %lld, but the name says part of %d",
                         f->shards[0].path, (long long)count, of);
    if (count == 0 || count == 1)
        return true;
    if (!named)
        return error_set(
            err,
            "%s: metadata 'split.count' is %lld: a part of a split model must keep its "
            "name (NAME-00001-of-%05lld.gguf)",
            f->shards[0].path, (long long)count, (long long)count);
    int64_t total = early_int(f, 0, "split.tensors.count", -1);
    if (!check_part(f, 0, 0, count, total, err))
        return false;
    size_t n_meta = f->n_meta;
    for (int i = 1; i < of; i++) {
        struct buf name = {0};
        buf_addf(&name, "%.*s-%05d-of-%05d.gguf", (int)stem, path, i + 1, of);
        ok = map_shard(f, name.p, err) && gguf_parse(f, i, err) &&
             check_part(f, n_meta, i, count, total, err);
        buf_clear(&name);
        if (!ok)
            return false;
        f->n_meta = n_meta; /* drops the part's own split.* entries */
    }
    if (total != (int64_t)f->n_tensors)
        return error_set(err, "%s: metadata 'split.tensors.count' is %lld, but the parts hold %zu",
                         f->shards[0].path, (long long)total, f->n_tensors);
    return true;
}

/* Python writes infinite numbers as Infinity, which JSON does not know: outside strings it becomes 1e308. */
static void replace_infinity(char *text, size_t n)
{
    bool quoted = false;
    for (size_t i = 0; i + 8 <= n; i++) {
        if (quoted && text[i] == '\\')
            i++;
        else if (text[i] == '"')
            quoted = !quoted;
        else if (!quoted && text[i] == 'I' && !memcmp(text + i, "Infinity", 8))
            memcpy(text + i, "1e308   ", 8);
    }
}

json_t *json_load_path(const char *path, size_t max_bytes, struct error *err)
{
    struct stat st;
    if (stat(path, &st) != 0) {
        error_set(err, "%s: %s", path, strerror(errno));
        return NULL;
    }
    if (!S_ISREG(st.st_mode) || (uint64_t)st.st_size > max_bytes) {
        error_set(err, "%s: not a regular file of at most %zu bytes", path, max_bytes);
        return NULL;
    }
    size_t n = (size_t)st.st_size, got = 0;
    char *text = mem_alloc(n);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    while (fd >= 0 && got < n) {
        ssize_t r = read(fd, text + got, n - got);
        if (r < 0 && errno == EINTR)
            continue;
        if (r <= 0)
            break;
        got += (size_t)r;
    }
    json_t *root = NULL;
    json_error_t je;
    if (got == n)
        replace_infinity(text, n);
    if (fd < 0 || got < n)
        error_set(err, "%s: cannot read: %s", path,
                  fd < 0 || errno ? strerror(errno) : "cut short");
    else if (!json_guard(text, n, &json_limits_file, NULL, err))
        error_prefix(err, "%s", path);
    else if (!(root = json_loadb(text, n, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &je)))
        error_set(err, "%s: line %d, column %d: %s", path, je.line, je.column, je.text);
    if (fd >= 0)
        close(fd);
    mem_free(text);
    return root;
}

/* DIR/name as a JSON object, or NULL. optional: a missing file is no error (*ok stays true). */
static json_t *load_object(const char *dir, const char *name, size_t max_bytes, bool optional,
                           bool *ok, struct error *err)
{
    struct buf path = {0};
    buf_addf(&path, "%s/%s", dir, name);
    json_t *root = NULL;
    if (!optional || access(path.p, F_OK) == 0) {
        root = json_load_path(path.p, max_bytes, err);
        if (root && !json_is_object(root)) {
            error_set(err, "%s: not a JSON object", path.p);
            json_decref(root);
            root = NULL;
        }
        *ok = *ok && root;
    }
    buf_clear(&path);
    return root;
}

static bool open_safetensors(struct tensorfile *f, const char *dir, const char *name,
                             struct error *err)
{
    struct buf path = {0};
    buf_addf(&path, "%s/%s", dir, name);
    bool ok = map_shard(f, path.p, err) && safetensors_parse(f, f->n_shards - 1, err);
    buf_clear(&path);
    return ok;
}

/* Opens every file of the index, then checks each entry against the tensors found. */
static bool open_sharded(struct tensorfile *f, const char *dir, json_t *index, struct error *err)
{
    static const char *const index_name = "model.safetensors.index.json";
    json_t *weight_map = json_object_get(index, "weight_map"), *v;
    const char *name;
    if (!json_object_size(weight_map))
        return error_set(err, "%s/%s: weight_map is missing or empty", dir, index_name);
    struct map files; /* file name -> shard */
    map_init(&files, 16);
    bool ok = true;
    json_object_foreach(weight_map, name, v)
    {
        const char *file = json_string_value(v);
        size_t len = json_string_length(v);
        /* Plain names only: the index must not reach outside its folder. */
        if (!file || !len || strlen(file) != len || strchr(file, '/') || !name_ok(file, len) ||
            !strcmp(file, "..") || !strcmp(file, "."))
            ok = error_set(err, "%s/%s: weight_map: tensor '%.100s' names no file in the folder",
                           dir, index_name, name);
        else if (!map_get(&files, file, len, NULL)) {
            ok = open_safetensors(f, dir, file, err);
            map_add(&files, file, len, f->n_shards - 1);
        }
        if (!ok)
            break;
    }
    ok = ok && index_names(f, err);
    if (ok)
        json_object_foreach(weight_map, name, v)
        {
            int64_t shard = -1;
            const struct tensor *t = tensorfile_find(f, name);
            map_get(&files, json_string_value(v), json_string_length(v), &shard);
            if (!t || t->shard != shard) {
                ok = error_set(err, "%s/%s: weight_map: tensor '%.100s' is not in %s", dir,
                               index_name, name, json_string_value(v));
                break;
            }
        }
    map_clear(&files);
    return ok;
}

static bool has_file(const char *dir, const char *name)
{
    struct buf path = {0};
    buf_addf(&path, "%s/%s", dir, name);
    bool there = access(path.p, F_OK) == 0;
    buf_clear(&path);
    return there;
}

static bool open_folder(struct tensorfile *f, const char *dir, struct error *err)
{
    bool ok = true;
    if (!has_file(dir, "config.json") && has_file(dir, "adapter_config.json"))
        return error_set(
            err, "%s: an adapter, not a model: name its base model, and this with --lora", dir);
    f->config = load_object(dir, "config.json", CONFIG_MAX, false, &ok, err);
    if (ok)
        f->tokenizer_config = load_object(dir, "tokenizer_config.json", CONFIG_MAX, true, &ok, err);
    if (ok)
        f->generation_config =
            load_object(dir, "generation_config.json", CONFIG_MAX, true, &ok, err);
    if (ok)
        f->preprocessor_config =
            load_object(dir, "preprocessor_config.json", CONFIG_MAX, true, &ok, err);
    if (!ok)
        return false;
    if (has_file(dir, "model.safetensors"))
        return open_safetensors(f, dir, "model.safetensors", err) && index_names(f, err);
    json_t *index = load_object(dir, "model.safetensors.index.json", INDEX_MAX, true, &ok, err);
    if (!ok)
        return false;
    if (!index)
        return error_set(err, "%s: no model.safetensors and no model.safetensors.index.json here",
                         dir);
    ok = open_sharded(f, dir, index, err);
    json_decref(index);
    return ok;
}

static struct tensorfile *file_new(const char *path, bool is_gguf)
{
    struct tensorfile *f = mem_zalloc(1, sizeof *f);
    f->path = mem_strdup(path);
    f->is_gguf = is_gguf;
    return f;
}

struct tensorfile *tensorfile_open(const char *path, struct error *err)
{
    struct stat st;
    const char *builtin = builtin_name(path);
    if (builtin) {
        size_t n;
        const void *model = builtin_bytes(builtin, &n);
        if (model)
            return tensorfile_open_memory(model, n, builtin, err);
        error_set(err, "this build carries no model; name a GGUF file or a Hugging Face folder");
        return NULL;
    }
    if (stat(path, &st) != 0) {
        error_set(err, "%s: %s", path, strerror(errno));
        return NULL;
    }
    const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path;
    size_t len = strlen(path);
    bool ok, folder = S_ISDIR(st.st_mode), is_config = !strcmp(base, "config.json");
    struct tensorfile *f = file_new(path, !folder && !is_config);
    if (folder || is_config) {
        /* DIR/ and DIR/config.json mean DIR */
        size_t cut = folder ? len : slash ? (size_t)(slash - path) : 0;
        while (cut > 1 && path[cut - 1] == '/')
            cut--;
        char *dir = cut ? mem_strndup(path, cut) : mem_strdup(slash ? "/" : ".");
        ok = open_folder(f, dir, err);
        mem_free(dir);
    } else if (len > 12 && !strcmp(path + len - 12, ".safetensors")) {
        ok = error_set(err, "%s: name the folder that holds it, with its config.json", path);
    } else {
        ok = open_gguf(f, path, err) && index_names(f, err);
    }
    if (!ok) {
        tensorfile_close(f);
        return NULL;
    }
    return f;
}

static bool open_adapter_folder(struct tensorfile *f, const char *dir, struct error *err)
{
    bool ok = true;
    f->config = load_object(dir, "adapter_config.json", CONFIG_MAX, false, &ok, err);
    if (!ok)
        return false;
    if (!has_file(dir, "adapter_model.safetensors") && has_file(dir, "adapter_model.bin"))
        return error_set(
            err, "%s/adapter_model.bin: not supported: save the adapter as safetensors", dir);
    return open_safetensors(f, dir, "adapter_model.safetensors", err) && index_names(f, err);
}

struct tensorfile *tensorfile_open_adapter(const char *path, struct error *err)
{
    struct stat st;
    if (stat(path, &st) != 0) {
        error_set(err, "%s: %s", path, strerror(errno));
        return NULL;
    }
    const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path;
    bool inside =
        !strcmp(base, "adapter_config.json") || !strcmp(base, "adapter_model.safetensors");
    bool folder = S_ISDIR(st.st_mode) || inside;
    struct tensorfile *f = file_new(path, !folder);
    bool ok;
    if (folder) {
        char *dir = !inside ? mem_strdup(path)
                    : slash ? mem_strndup(path, (size_t)(slash - path) + (slash == path))
                            : mem_strdup(".");
        ok = open_adapter_folder(f, dir, err);
        mem_free(dir);
    } else {
        ok = open_gguf(f, path, err) && index_names(f, err);
    }
    if (!ok) {
        tensorfile_close(f);
        return NULL;
    }
    return f;
}

static struct tensorfile *open_memory(const void *data, size_t bytes, const char *name,
                                      bool is_gguf, struct error *err)
{
    struct tensorfile *f = file_new(name, is_gguf);
    struct shard *s = add_shard(f, name);
    s->map = data;
    s->bytes = bytes;
    if (!is_gguf)
        f->config = json_object();
    bool ok = is_gguf ? gguf_parse(f, 0, err) : safetensors_parse(f, 0, err);
    int64_t parts = ok ? early_int(f, 0, "split.count", 0) : 0;
    if (ok && parts != 0 && parts != 1)
        ok = error_set(err, "%s: metadata 'split.count': a split model cannot be read from memory",
                       name);
    if (!ok || !index_names(f, err)) {
        tensorfile_close(f);
        return NULL;
    }
    return f;
}

struct tensorfile *tensorfile_open_memory(const void *data, size_t bytes, const char *name,
                                          struct error *err)
{
    return open_memory(data, bytes, name, true, err);
}

struct tensorfile *tensorfile_open_safetensors_memory(const void *data, size_t bytes,
                                                      const char *name, struct error *err)
{
    return open_memory(data, bytes, name, false, err);
}

void tensorfile_close(struct tensorfile *f)
{
    if (!f)
        return;
    for (int i = 0; i < f->n_shards; i++) {
        struct shard *s = &f->shards[i];
        if (s->fd >= 0) {
            filemap_unwatch(s->watch);
            if (s->map)
                munmap((void *)(uintptr_t)s->map, s->bytes);
            close(s->fd);
        }
        mem_free(s->path);
    }
    for (struct name_chunk *c = f->names, *next; c; c = next) {
        next = c->next;
        mem_free(c);
    }
    json_decref(f->config);
    json_decref(f->tokenizer_config);
    json_decref(f->preprocessor_config);
    json_decref(f->generation_config);
    map_clear(&f->by_name);
    map_clear(&f->by_key);
    mem_free(f->tensors);
    mem_free(f->meta);
    mem_free(f->shards);
    mem_free(f->path);
    mem_free(f);
}

const struct tensor *tensorfile_find(const struct tensorfile *f, const char *name)
{
    int64_t i;
    return map_get(&f->by_name, name, strlen(name), &i) ? &f->tensors[i] : NULL;
}

size_t tensorfile_bytes(const struct tensorfile *f)
{
    size_t sum = 0;
    for (size_t i = 0; i < f->n_tensors; i++)
        sum += f->tensors[i].bytes;
    return sum;
}

bool tensorfile_is_whole(const struct tensorfile *f, unsigned turn, struct error *err)
{
    unsigned which = f->n_shards ? turn % (unsigned)f->n_shards : 0;
    for (int i = 0; i < f->n_shards; i++) {
        const struct shard *s = &f->shards[i];
        struct stat st;
        bool damaged = filemap_is_damaged(s->watch);
        bool look = damaged || turn == TENSORFILE_ALL || which == (unsigned)i;
        if (s->fd < 0 || !look)
            continue;
        if (fstat(s->fd, &st) != 0 || (uint64_t)st.st_size < s->bytes)
            return error_set(err, "%s was truncated while in use", s->path);
        if (damaged)
            return error_set(err, "%s could not be read while in use: it changed or its disk fails",
                             s->path);
    }
    return true;
}

void tensorfile_forget(const struct tensorfile *f, const struct tensor *t)
{
    const struct shard *s = &f->shards[t->shard];
    if (s->fd < 0)
        return;
    /* Only whole pages inside the tensor: neighbouring tensors may still be needed. */
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t a = ((uintptr_t)t->data + page - 1) / page * page;
    uintptr_t b = ((uintptr_t)t->data + t->bytes) / page * page;
    if (a < b)
        madvise((void *)a, b - a, MADV_DONTNEED);
}

void tensorfile_forget_all(const struct tensorfile *f)
{
    for (int i = 0; i < f->n_shards; i++)
        if (f->shards[i].fd >= 0)
            madvise((void *)(uintptr_t)f->shards[i].map, f->shards[i].bytes, MADV_DONTNEED);
}

const uint8_t *tensorfile_read(const struct tensorfile *f, const uint8_t *data, size_t bytes,
                               uint8_t *buf)
{
    const struct shard *s = f->shards, *end = s + f->n_shards;
    while (s < end && (s->fd < 0 || data < s->map || data >= s->map + s->bytes))
        s++;
    if (s == end)
        return data;
    size_t at = (size_t)(data - s->map);
    for (size_t done = 0; done < bytes;) {
        ssize_t n = pread(s->fd, buf + done, bytes - done, (off_t)(at + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return NULL;
        done += (size_t)n;
    }
    return buf;
}

const struct meta *tensorfile_meta(const struct tensorfile *f, const char *key)
{
    int64_t i;
    return map_get(&f->by_key, key, strlen(key), &i) ? &f->meta[i] : NULL;
}

bool meta_get_int(const struct tensorfile *f, const char *key, int64_t *out)
{
    const struct meta *m = tensorfile_meta(f, key);
    if (!m)
        return false;
    switch (m->type) {
    case META_U8:
    case META_U16:
    case META_U32:
    case META_U64:
    case META_BOOL:
        if (m->v.u > INT64_MAX)
            return false;
        *out = (int64_t)m->v.u;
        return true;
    case META_I8:
    case META_I16:
    case META_I32:
    case META_I64:
        *out = m->v.i;
        return true;
    default:
        return false;
    }
}

bool meta_get_float(const struct tensorfile *f, const char *key, double *out)
{
    const struct meta *m = tensorfile_meta(f, key);
    int64_t i;
    if (m && (m->type == META_F32 || m->type == META_F64)) {
        *out = m->v.f;
        return true;
    }
    if (!m || m->type == META_BOOL || !meta_get_int(f, key, &i))
        return false;
    *out = (double)i;
    return true;
}

bool meta_get_bool(const struct tensorfile *f, const char *key, bool *out)
{
    const struct meta *m = tensorfile_meta(f, key);
    if (!m || m->type != META_BOOL)
        return false;
    *out = m->v.u != 0;
    return true;
}

char *meta_get_string(const struct tensorfile *f, const char *key)
{
    const struct meta *m = tensorfile_meta(f, key);
    return m && m->type == META_STRING ? mem_strndup(m->v.s.p, m->v.s.len) : NULL;
}

bool meta_array_number(const struct meta_array *a, size_t i, double *out)
{
    if (i >= a->n)
        return false;
#define ELEMENT(c_type)                                                                            \
    do {                                                                                           \
        c_type v;                                                                                  \
        memcpy(&v, a->data + i * sizeof v, sizeof v);                                              \
        *out = (double)v;                                                                          \
        return true;                                                                               \
    } while (0)
    switch (a->type) {
    case META_U8:
    case META_BOOL:
        ELEMENT(uint8_t);
    case META_I8:
        ELEMENT(int8_t);
    case META_U16:
        ELEMENT(uint16_t);
    case META_I16:
        ELEMENT(int16_t);
    case META_U32:
        ELEMENT(uint32_t);
    case META_I32:
        ELEMENT(int32_t);
    case META_F32:
        ELEMENT(float);
    case META_U64:
        ELEMENT(uint64_t);
    case META_I64:
        ELEMENT(int64_t);
    case META_F64:
        ELEMENT(double);
    case META_STRING:
    case META_ARRAY:
        return false;
    }
#undef ELEMENT
    return false;
}

bool meta_array_string(const struct meta_array *a, size_t *cursor, const char **p, size_t *len)
{
    if (a->type != META_STRING || *cursor >= a->bytes)
        return false;
    uint64_t n;
    memcpy(&n, a->data + *cursor, 8);
    *p = (const char *)a->data + *cursor + 8;
    *len = (size_t)n;
    *cursor += 8 + (size_t)n;
    return true;
}
