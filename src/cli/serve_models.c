/* See serve_models.h. */
#include "cli/serve_models.h"
#include "base/buf.h"
#include "base/mem.h"
#include "cli/cli.h"
#include "cli/hub/hub.h"
#include "server/api/modelfile.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NAME_MOST = 256 };

/* A copy that lives as long as s. */
static const char *serve_text(struct serve_models *s, const char *text)
{
    struct owned_texts *l = &s->texts;
    l->items = mem_realloc(l->items, (size_t)l->n + 1, sizeof(char *));
    return l->items[l->n++] = mem_strdup(text);
}

struct model_section *serve_section(struct serve_models *s, const char *name)
{
    for (int i = 0; i < s->n_sections; i++)
        if (!strcmp(s->sections[i].name, name))
            return &s->sections[i];
    return NULL;
}

/* What is served under a name: the section's options, or those of all. */
static struct model_source source_of(struct serve_models *s, const char *name,
                                     const struct model_source *with)
{
    struct model_section *x = serve_section(s, name);
    struct model_source out = *with;
    if (x) {
        out = x->options;
        out.at_start = with->at_start;
        out.found = with->found;
        out.task = x->task != MODEL_BY_FILE ? x->task : with->task;
        out.aliases = x->aliases;
        out.n_aliases = x->n_aliases;
        x->used = true;
    }
    out.name = name;
    return out;
}

static void add(struct serve_models *s, const struct model_source *src)
{
    s->list = mem_realloc(s->list, (size_t)s->n + 1, sizeof *s->list);
    s->list[s->n++] = *src;
}

bool serve_add(struct serve_models *s, const char *text, struct model_source with,
               struct error *err)
{
    const char *equals = strchr(text, '='), *slash = strchr(text, '/'), *model = text;
    char name[NAME_MOST];
    bool named = equals && equals > text && equals[1] && (!slash || slash > equals) &&
                 access(text, F_OK) != 0;
    struct buf path = {0};
    if (named)
        model = equals + 1;
    if (!hub_open(model, &path, err)) {
        buf_clear(&path);
        return false;
    }
    if (named)
        snprintf(name, sizeof name, "%.*s", (int)(equals - text), text);
    else if (path.len)
        snprintf(name, sizeof name, "%s", model); /* the requested name, not the file's */
    else
        server_name_of(model, name, sizeof name);
    const char *own = serve_text(s, name);
    struct model_source src = source_of(s, with.name ? with.name : own, &with);
    src.path = serve_text(s, path.len ? path.p : model);
    add(s, &src);
    buf_clear(&path);
    return true;
}

void serve_add_builtin(struct serve_models *s, struct model_source with)
{
    add(s, &with);
}

bool serve_add_sections(struct serve_models *s, struct error *err)
{
    for (int i = 0; i < s->n_sections; i++) {
        struct model_section *x = &s->sections[i];
        struct buf path = {0};
        bool known = false;
        for (int k = 0; k < s->n; k++)
            known |= s->list[k].name && !strcmp(s->list[k].name, x->name);
        if (!x->model || known)
            continue;
        if (!hub_open(x->model, &path, err)) {
            buf_clear(&path);
            return error_prefix(err, "%s", x->name);
        }
        struct model_source with = s->defaults, src = source_of(s, x->name, &with);
        src.path = serve_text(s, path.len ? path.p : x->model);
        add(s, &src);
        buf_clear(&path);
    }
    return true;
}

/* Scanning */

struct model_scan {
    struct serve_models *s;
    void (*tell)(void *to, const struct model_source *src);
    void *to;
    char repo[HUB_NAME_MAX]; /* of the last model */
};

/* kind: which member of the source gets the path. */
enum found_kind { FOUND_FILE, FOUND_ON_HUB, FOUND_MODELFILE };

static void tell(struct model_scan *f, enum found_kind kind, const char *name, const char *path,
                 const char *const *aliases, int n_aliases)
{
    struct model_source with = f->s->defaults, src = source_of(f->s, name, &with);
    const char *all[2 * SERVE_ALIASES];
    int n = 0;
    for (int i = 0; i < src.n_aliases; i++)
        all[n++] = src.aliases[i];
    for (int i = 0; i < n_aliases; i++)
        all[n++] = aliases[i];
    src.path = kind == FOUND_MODELFILE ? NULL : path;
    src.modelfile = kind == FOUND_MODELFILE ? path : NULL;
    src.on_hub = kind == FOUND_ON_HUB;
    src.found = true;
    src.aliases = all;
    src.n_aliases = n;
    f->tell(f->to, &src);
}

/* A file that may be a model: not an image tower, and of a split one the first part. */
static bool is_first(const char *name)
{
    size_t n = strlen(name);
    const char *of = n > 20 ? strstr(name, "-of-") : NULL;
    if (n < 6 || strcasecmp(name + n - 5, ".gguf") != 0 || !strncasecmp(name, "mmproj", 6))
        return false;
    return !of || of - name < 6 || !strncmp(of - 6, "-00001", 6);
}

/* NAME.modelfile, with % for a slash in NAME. */
static void tell_made(struct model_scan *f, const char *file, const char *path)
{
    char name[NAME_MOST];
    size_t n = strlen(file), n_end = strlen(MODELFILE_SUFFIX);
    if (n <= n_end || n - n_end >= sizeof name || strcmp(file + n - n_end, MODELFILE_SUFFIX) != 0)
        return;
    snprintf(name, sizeof name, "%.*s", (int)(n - n_end), file);
    for (char *c = name; (c = strchr(c, '%'));)
        *c = '/';
    tell(f, FOUND_MODELFILE, name, path, NULL, 0);
}

/* The models of a folder; or only those that Modelfiles make of others. */
static void scan_dir(struct model_scan *f, const char *dir, bool made)
{
    struct dirent **list = NULL;
    int n = scandir(dir, &list, NULL, alphasort);
    for (int i = 0; i < n; i++) {
        struct buf path = {0}, config = {0};
        struct stat st;
        char name[NAME_MOST];
        buf_addf(&path, "%s/%s", dir, list[i]->d_name);
        buf_addf(&config, "%s/config.json", path.p);
        bool there = list[i]->d_name[0] != '.' && stat(path.p, &st) == 0;
        if (there && made)
            tell_made(f, list[i]->d_name, path.p);
        server_name_of(path.p, name, sizeof name);
        if (there && !made &&
            (S_ISDIR(st.st_mode) ? access(config.p, R_OK) == 0
                                 : S_ISREG(st.st_mode) && is_first(list[i]->d_name)))
            tell(f, FOUND_FILE, name, path.p, NULL, 0);
        buf_clear(&path);
        buf_clear(&config);
        free(list[i]);
    }
    free(list);
}

static void on_hub(void *arg, const struct hub_found *h)
{
    struct model_scan *f = arg;
    struct buf name = {0}, path = {0};
    const char *aliases[SERVE_ALIASES], *first = NULL, *brief, *full;
    int n = 0;
    buf_addf(&name, "%s%s%s", h->repo, h->quant[0] ? ":" : "", h->quant);
    for (int i = 0; i < h->n && !first; i++) {
        const char *slash = strrchr(h->files[i], '/');
        first = is_first(slash ? slash + 1 : h->files[i]) ? h->files[i] : NULL;
    }
    buf_adds(&path, h->snapshot);
    if (h->quant[0] && first)
        buf_addf(&path, "/%s", first);
    bool another = !strcmp(f->repo, h->repo);
    if (h->quant[0] && !another)
        aliases[n++] = h->repo;
    for (int i = 0; (full = hub_short(i, &brief)) && n < SERVE_ALIASES; i++)
        if (!strcasecmp(full, name.p) || (!another && !strcasecmp(full, h->repo)))
            aliases[n++] = brief;
    snprintf(f->repo, sizeof f->repo, "%s", h->repo);
    if (h->whole && (first || !h->quant[0]))
        tell(f, FOUND_ON_HUB, name.p, path.p, aliases, n);
    buf_clear(&name);
    buf_clear(&path);
}

void serve_scan(void *arg, void (*found)(void *to, const struct model_source *src), void *to)
{
    struct serve_models *s = arg;
    struct model_scan f = {.s = s, .tell = found, .to = to};
    struct error ignored = {0};
    for (int i = 0; i < s->dirs->n; i++)
        scan_dir(&f, s->dirs->items[i], false);
    if (s->hub)
        hub_each(on_hub, &f, &ignored);
    for (int i = 0; i < s->dirs->n; i++) /* after what they may be made of */
        scan_dir(&f, s->dirs->items[i], true);
    if (s->made_dir && !s->dirs->n)
        scan_dir(&f, s->made_dir, true);
}

bool serve_made_dir(struct serve_models *s, bool make, struct error *err)
{
    const char *data = getenv("XDG_DATA_HOME"), *home = getenv("HOME");
    struct buf path = {0};
    if (s->dirs->n) {
        s->made_dir = s->dirs->items[0];
        return true;
    }
    if (data && *data == '/')
        buf_addf(&path, "%s/steel/models", data);
    else if (home && *home)
        buf_addf(&path, "%s/.local/share/steel/models", home);
    else
        return !make || error_set(err, "--allow-pull: HOME is not set");
    s->made_dir = serve_text(s, path.p);
    buf_adds(&path, "/x");
    bool ok = !make || cli_make_parents(path.p, err);
    buf_clear(&path);
    return ok;
}

void serve_models_clear(struct serve_models *s)
{
    for (int i = 0; i < s->texts.n; i++)
        mem_free(s->texts.items[i]);
    mem_free(s->texts.items);
    mem_free(s->list);
}
