/* Finds the tokenizer of a model on disk: inside a GGUF, or next to a Hugging Face config.json. */
#include "base/mem.h"
#include "file/builtin.h"
#include "text/tokenizer/tokenizer_impl.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { CONFIG_MAX = 64 << 20 };
#define TOKENIZER_MAX ((size_t)512 << 20)

/* Parses dir/name as JSON. NULL if the file does not exist; any other failure clears *ok. */
static json_t *load_optional(const char *dir, const char *name, bool *ok, struct error *err)
{
    struct buf path = {0};
    buf_addf(&path, "%s/%s", dir, name);
    json_t *v = NULL;
    if (access(path.p, F_OK) == 0) {
        v = json_load_path(path.p, CONFIG_MAX, err);
        *ok = *ok && v;
    }
    buf_clear(&path);
    return v;
}

static struct tokenizer *open_json(const char *path, const json_t *config, const json_t *generation,
                                   const json_t *model, struct error *err)
{
    json_t *root = json_load_path(path, TOKENIZER_MAX, err);
    if (!root)
        return NULL;
    struct tokenizer *t = tokenizer_from_json(root, path, config, generation, model, err);
    json_decref(root);
    return t;
}

struct tokenizer *tokenizer_load(const struct tensorfile *f, struct error *err)
{
    if (f->is_gguf)
        return tokenizer_from_gguf(f, err);
    struct buf path = {0};
    struct stat st;
    const char *slash = strrchr(f->path, '/');
    if (stat(f->path, &st) == 0 && S_ISDIR(st.st_mode))
        buf_adds(&path, f->path);
    else if (slash) /* path of the folder's config.json */
        buf_add(&path, f->path, (size_t)(slash - f->path));
    else
        buf_addc(&path, '.');
    buf_adds(&path, "/tokenizer.json");
    struct tokenizer *t = NULL;
    if (access(path.p, F_OK) != 0)
        error_set(err, "%s: missing: the model has no vocabulary", path.p);
    else
        t = open_json(path.p, f->tokenizer_config, f->generation_config, f->config, err);
    buf_clear(&path);
    return t;
}

struct tokenizer *tokenizer_open(const char *path, struct error *err)
{
    struct stat st = {0};
    bool builtin = !path || builtin_named(path);
    if (!builtin && stat(path, &st) != 0) {
        error_set(err, "%s: %s", path, strerror(errno));
        return NULL;
    }
    size_t n = builtin ? 0 : strlen(path);
    bool folder = S_ISDIR(st.st_mode);
    if (builtin || (!folder && !(n > 5 && !strcmp(path + n - 5, ".json")))) {
        struct tensorfile *f = tensorfile_open(path, err);
        struct tokenizer *t = f ? tokenizer_load(f, err) : NULL;
        tensorfile_close(f);
        return t;
    }
    /* Only the small files are read: weights may be missing or still downloading. */
    struct buf dir = {0}, file = {0};
    const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path;
    if (folder)
        buf_add(&dir, path, n);
    else if (slash)
        buf_add(&dir, path, (size_t)(slash - path));
    else
        buf_addc(&dir, '.');
    if (folder || !strcmp(base, "config.json"))
        buf_addf(&file, "%s/tokenizer.json", dir.p);
    else
        buf_adds(&file, path);
    bool ok = true;
    json_t *config = load_optional(dir.p, "tokenizer_config.json", &ok, err);
    json_t *generation = load_optional(dir.p, "generation_config.json", &ok, err);
    json_t *model = load_optional(dir.p, "config.json", &ok, err);
    struct tokenizer *t = ok ? open_json(file.p, config, generation, model, err) : NULL;
    json_decref(config);
    json_decref(generation);
    json_decref(model);
    buf_clear(&dir);
    buf_clear(&file);
    return t;
}
