/* Finds a model's chat template and its bos and eos texts; see the header. */
#include "text/chat/chat_source.h"
#include "file/builtin.h"
#include "base/buf.h"
#include "base/input.h"
#include "base/mem.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#define MAX_TEMPLATE (4u << 20)

void chat_source_clear(struct chat_source *s)
{
    mem_free(s->template);
    mem_free(s->bos);
    mem_free(s->eos);
    *s = (struct chat_source){0};
}

static bool read_text(const char *path, struct chat_source *s, struct error *err)
{
    FILE *f = input_open(path, err);
    if (!f)
        return false;
    struct buf b = {0};
    char chunk[16384];
    size_t n;
    while ((n = fread(chunk, 1, sizeof chunk, f)) > 0 && b.len <= MAX_TEMPLATE)
        buf_add(&b, chunk, n);
    bool ok = !ferror(f) && b.len <= MAX_TEMPLATE;
    fclose(f);
    if (!ok) {
        buf_clear(&b);
        return error_set(err, "%s: cannot be read as a template", path);
    }
    s->template_len = b.len;
    s->template = buf_take(&b);
    return true;
}

static void set_text(char **out, const char *text)
{
    mem_free(*out);
    *out = mem_strdup(text ? text : "");
}

void chat_source_set(struct chat_source *s, const char *template)
{
    set_text(&s->template, template);
    s->template_len = strlen(template);
    if (!s->bos)
        set_text(&s->bos, "");
    if (!s->eos)
        set_text(&s->eos, "");
}

/* A token is a string, or an object with "content". */
static const char *token_text(const json_t *config, const char *key)
{
    const json_t *v = json_object_get(config, key);
    return json_string_value(json_is_object(v) ? json_object_get(v, "content") : v);
}

/* A template is a string, or a list of {name, template} of which "default" is meant. */
static bool template_from_json(const json_t *v, struct chat_source *s)
{
    if (json_is_array(v)) {
        const json_t *pick = NULL;
        for (size_t i = 0; i < json_array_size(v); i++) {
            const json_t *e = json_array_get(v, i);
            const char *name = json_string_value(json_object_get(e, "name"));
            if (!pick || (name && !strcmp(name, "default")))
                pick = e;
        }
        v = json_object_get(pick, "template");
    }
    if (!json_is_string(v))
        return false;
    mem_free(s->template);
    s->template_len = json_string_length(v);
    s->template = mem_strndup(json_string_value(v), s->template_len);
    return true;
}

/* Reads the files of a folder. Later files win, as in transformers. */
static bool load_folder(const char *dir, const json_t *config, struct chat_source *s)
{
    struct buf path = {0};
    struct error ignored;
    bool found = template_from_json(json_object_get(config, "chat_template"), s);
    set_text(&s->bos, token_text(config, "bos_token"));
    set_text(&s->eos, token_text(config, "eos_token"));
    buf_addf(&path, "%s/chat_template.json", dir);
    struct stat st;
    if (!stat(path.p, &st)) {
        json_t *j = json_load_path(path.p, MAX_TEMPLATE, &ignored);
        found |= template_from_json(json_object_get(j, "chat_template"), s);
        json_decref(j);
    }
    buf_reset(&path);
    buf_addf(&path, "%s/chat_template.jinja", dir);
    if (!stat(path.p, &st)) {
        char *old = s->template;
        s->template = NULL;
        if (read_text(path.p, s, &ignored)) {
            mem_free(old);
            found = true;
        } else {
            s->template = old;
        }
    }
    buf_clear(&path);
    return found;
}

/* Text of the token whose id is stored under key. */
static void load_gguf_token(const struct tensorfile *f, const char *key, char **out)
{
    int64_t id;
    const struct meta *tokens = tensorfile_meta(f, "tokenizer.ggml.tokens");
    set_text(out, "");
    if (!meta_get_int(f, key, &id) || !tokens || tokens->type != META_ARRAY)
        return;
    size_t cursor = 0, len;
    const char *p;
    while (meta_array_string(&tokens->v.a, &cursor, &p, &len)) {
        if (id-- == 0) {
            mem_free(*out);
            *out = mem_strndup(p, len);
            return;
        }
    }
}

static char *folder_of(const char *path)
{
    struct stat st;
    const char *slash = strrchr(path, '/');
    if (!stat(path, &st) && S_ISDIR(st.st_mode))
        return mem_strdup(path);
    return slash ? mem_strndup(path, (size_t)(slash - path)) : mem_strdup(".");
}

bool chat_source_load(const struct tensorfile *f, struct chat_source *s, struct error *err)
{
    *s = (struct chat_source){0};
    bool found;
    if (f->is_gguf) {
        const struct meta *m = tensorfile_meta(f, "tokenizer.chat_template");
        found = m && m->type == META_STRING;
        if (found) {
            s->template_len = m->v.s.len;
            s->template = mem_strndup(m->v.s.p, m->v.s.len);
        }
        load_gguf_token(f, "tokenizer.ggml.bos_token_id", &s->bos);
        load_gguf_token(f, "tokenizer.ggml.eos_token_id", &s->eos);
    } else {
        char *dir = folder_of(f->path);
        found = load_folder(dir, f->tokenizer_config, s);
        mem_free(dir);
    }
    if (!found) {
        chat_source_clear(s);
        return error_set(err, "%s: the model has no chat template", f->path);
    }
    return true;
}

bool chat_source_open(const char *path, struct chat_source *s, struct error *err)
{
    *s = (struct chat_source){0};
    struct stat st = {0};
    bool gguf = builtin_named(path);
    if (!gguf && stat(path, &st))
        return error_set(err, "%s: %s", path, strerror(errno));
    if (S_ISDIR(st.st_mode)) {
        struct buf name = {0};
        buf_addf(&name, "%s/tokenizer_config.json", path);
        json_t *config = stat(name.p, &st) ? json_object() : json_load_path(name.p, 64u << 20, err);
        buf_clear(&name);
        if (!config)
            return false;
        bool found = load_folder(path, config, s);
        json_decref(config);
        if (!found) {
            chat_source_clear(s);
            return error_set(err,
                             "%s: no chat template (tokenizer_config.json, "
                             "chat_template.jinja)",
                             path);
        }
        return true;
    }
    char magic[4] = "";
    struct error ignored = {0};
    FILE *f = gguf || !S_ISREG(st.st_mode) ? NULL : input_open(path, &ignored);
    gguf = gguf || (f && fread(magic, 1, 4, f) == 4 && !memcmp(magic, "GGUF", 4));
    if (f)
        fclose(f);
    if (gguf) {
        struct tensorfile *t = tensorfile_open(path, err);
        bool ok = t && chat_source_load(t, s, err);
        tensorfile_close(t);
        return ok;
    }
    set_text(&s->bos, "");
    set_text(&s->eos, "");
    if (!read_text(path, s, err)) {
        chat_source_clear(s);
        return false;
    }
    return true;
}
