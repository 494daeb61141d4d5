/* See models_probe.h. */
#include "server/api/models_probe.h"
#include "base/buf.h"
#include "base/mem.h"
#include "model/config.h"
#include "model/pooling.h"
#include "text/chat/chat.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

static bool is_weights(const char *name)
{
    size_t n = strlen(name);
    return (n > 5 && !strcasecmp(name + n - 5, ".gguf")) ||
           (n > 12 && !strcmp(name + n - 12, ".safetensors"));
}

/* Bytes of the folder's files of weights that begin with `stem`. */
static size_t folder_bytes(const char *folder, const char *stem)
{
    size_t all = 0;
    DIR *d = opendir(folder);
    for (const struct dirent *f; d && (f = readdir(d));) {
        struct stat st;
        if (is_weights(f->d_name) && !strncmp(f->d_name, stem, strlen(stem)) &&
            !fstatat(dirfd(d), f->d_name, &st, 0) && S_ISREG(st.st_mode))
            all += (size_t)st.st_size;
    }
    if (d)
        closedir(d);
    return all;
}

size_t model_file_bytes(const char *path)
{
    struct stat st;
    if (!path || stat(path, &st))
        return 0;
    if (S_ISDIR(st.st_mode))
        return folder_bytes(path, "");
    const char *slash = strrchr(path, '/'), *part = strstr(slash ? slash : path, "-00001-of-");
    if (!part)
        return (size_t)st.st_size;
    struct buf folder = {0}, stem = {0};
    const char *name = slash ? slash + 1 : path;
    buf_add(&folder, slash ? path : ".", slash ? (size_t)(slash - path) : 1);
    buf_add(&stem, name, (size_t)(part - name) + 1);
    buf_addc(&folder, 0);
    buf_addc(&stem, 0);
    size_t all = folder_bytes(folder.p, stem.p);
    buf_clear(&folder);
    buf_clear(&stem);
    return all;
}

bool model_template(const struct model_source *src, const struct tensorfile *f,
                    struct chat_source *out, struct error *err)
{
    struct error ignored = {0};
    if (src->chat_template)
        return chat_source_open(src->chat_template, out, err);
    bool own = chat_source_load(f, out, src->template_text ? &ignored : err);
    if (src->template_text)
        chat_source_set(out, src->template_text);
    return own || src->template_text;
}

static void probe_template(const struct model_source *src, const struct tensorfile *f,
                           struct model_facts *out)
{
    struct chat_source source = {0};
    struct error ignored = {0};
    bool ok = model_template(src, f, &source, &ignored);
    struct chat *chat = ok ? chat_new(&source, &ignored) : NULL;
    if (chat) {
        out->tools = chat_caps(chat)->tools;
        out->thinking = chat_caps(chat)->reasoning_key || chat_thoughts(chat) != CHAT_THOUGHTS_TAGS;
    }
    chat_free(chat);
    chat_source_clear(&source);
}

static void probe_file(const struct model_source *src, const struct tensorfile *f,
                       struct model_facts *out)
{
    struct config *c = mem_zalloc(1, sizeof *c);
    out->known = config_load(f, c, &out->error);
    if (out->known) {
        int kind = pooling_declared(f, c);
        out->task = kind == POOLING_RANK ? MODEL_RERANK : kind >= 0 ? MODEL_EMBED : MODEL_TEXT;
        out->vision = c->tower && src->engine.runtime.images;
        out->context = c->context;
        out->n_embd = c->n_embd;
        out->n_layers = c->n_layers;
        out->n_vocab = c->n_vocab;
        out->is_gguf = f->is_gguf;
        snprintf(out->architecture, sizeof out->architecture, "%s", c->arch_name);
    }
    mem_free(c);
    if (out->known && (src->task == MODEL_BY_FILE ? out->task : src->task) == MODEL_TEXT)
        probe_template(src, f, out);
}

void model_probe(const struct model_source *src, struct model_facts *out)
{
    *out = (struct model_facts){.file_bytes = model_file_bytes(src->path)};
    struct tensorfile *f = tensorfile_open(src->path, &out->error);
    if (f)
        probe_file(src, f, out);
    tensorfile_close(f);
    if (src->task != MODEL_BY_FILE)
        out->task = src->task;
}
