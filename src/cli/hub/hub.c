/* Names, locations, and the files a model needs. See hub.h. */
#include "cli/hub/hub.h"
#include "base/json_guard.h"
#include "base/mem.h"
#include "cli/cli.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

/* True for letters, digits, '-', '_', '.', and slashes if allowed, without ".." or a leading
 * dot. */
static bool is_word(const char *s, size_t n, bool slashes)
{
    if (!n || n >= HUB_NAME_MAX || *s == '.' || *s == '-' || memmem(s, n, "..", 2))
        return false;
    for (size_t i = 0; i < n; i++)
        if (!((s[i] | 32) >= 'a' && (s[i] | 32) <= 'z') && !(s[i] >= '0' && s[i] <= '9') &&
            !strchr(slashes ? "-_./" : "-_.", s[i]))
            return false;
    return s[n - 1] != '/' && !memmem(s, n, "//", 2);
}

static const char *without_scheme(const char *text)
{
    const char *end = hub_endpoint();
    size_t n = strlen(end);
    if (!strncasecmp(text, "hf://", 5))
        return text + 5;
    if (!strncmp(text, end, n) && text[n] == '/')
        return text + n + 1;
    if (!strncmp(text, "https://huggingface.co/", 23))
        return text + 23;
    return text;
}

bool hub_is_name(const char *text)
{
    struct stat st;
    struct hub_name name;
    struct error ignored = {0};
    if (!text || stat(text, &st) == 0)
        return false;
    if (hub_full(text) != text || without_scheme(text) != text)
        return true;
    size_t n = strlen(text);
    if (*text == '/' || *text == '.' || (n > 5 && !strcasecmp(text + n - 5, ".gguf")))
        return false;
    return hub_parse(text, &name, &ignored);
}

bool hub_parse(const char *text, struct hub_name *out, struct error *err)
{
    const char *s = without_scheme(hub_full(text)), *file = NULL;
    size_t n = strcspn(s, "@:?#");
    *out = (struct hub_name){.revision = "main"};
    /* https://.../owner/name/resolve/REV/FILE, or tree, or blob, as copied from a browser */
    const char *slash = memchr(s, '/', n), *second = NULL;
    if (slash)
        second = memchr(slash + 1, '/', n - (size_t)(slash + 1 - s));
    size_t len = second ? (size_t)(second - s) : n;
    if (!slash || !is_word(s, (size_t)(slash - s), false) ||
        !is_word(slash + 1, len - (size_t)(slash + 1 - s), false))
        return error_set(err,
                         "'%.100s' is not a model name: use owner/name[:quant], such as "
                         "Qwen/Qwen3-8B-GGUF:Q4_K_M",
                         text);
    memcpy(out->repo, s, len);
    if (second) {
        static const char *const kinds[] = {"/resolve/", "/blob/", "/tree/"};
        const char *rev = NULL;
        for (int i = 0; i < 3; i++)
            if (!strncmp(second, kinds[i], strlen(kinds[i])))
                rev = second + strlen(kinds[i]);
        size_t n_rev = rev ? strcspn(rev, "/?#") : 0;
        if (!rev || !is_word(rev, n_rev, false))
            return error_set(err, "'%.200s' is not the address of a model or of one of its files",
                             text);
        snprintf(out->revision, sizeof out->revision, "%.*s", (int)n_rev, rev);
        out->has_revision = true;
        if (rev[n_rev] == '/')
            file = rev + n_rev + 1;
        n = (size_t)(rev + n_rev - s);
        if (file) {
            size_t n_file = strcspn(file, "?#");
            if (n_file >= sizeof out->quant || !is_word(file, n_file, true))
                return error_set(err, "'%.200s': invalid file name", file);
            snprintf(out->quant, sizeof out->quant, "%.*s", (int)n_file, file);
        }
        return true;
    }
    if (s[n] == '@') {
        size_t n_rev = strcspn(s + n + 1, ":");
        if (!is_word(s + n + 1, n_rev, true))
            return error_set(err, "'%.100s': invalid revision after @", text);
        snprintf(out->revision, sizeof out->revision, "%.*s", (int)n_rev, s + n + 1);
        out->has_revision = true;
        n += 1 + n_rev;
    }
    if (s[n] == ':') {
        size_t n_quant = strlen(s + n + 1);
        if (n_quant >= sizeof out->quant || !is_word(s + n + 1, n_quant, true))
            return error_set(err,
                             "'%.100s': the text after the colon is not a quantisation such as "
                             "Q4_K_M",
                             text);
        memcpy(out->quant, s + n + 1, n_quant);
    }
    return true;
}

void hub_print(const struct hub_name *n, struct buf *out)
{
    buf_adds(out, n->repo);
    if (strcmp(n->revision, "main") != 0)
        buf_addf(out, "@%s", n->revision);
    if (n->quant[0])
        buf_addf(out, ":%s", n->quant);
}

/* Locations */

const char *hub_endpoint(void)
{
    static char text[512];
    const char *v = getenv("HF_ENDPOINT");
    snprintf(text, sizeof text, "%s", v && *v ? v : "https://huggingface.co");
    for (size_t n = strlen(text); n && text[n - 1] == '/'; n--)
        text[n - 1] = 0;
    return text;
}

/* The home folder of the Hub's tools. */
static bool hub_home(struct buf *out)
{
    const char *v = getenv("HF_HOME"), *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (v && *v)
        buf_adds(out, v);
    else if (xdg && *xdg)
        buf_addf(out, "%s/huggingface", xdg);
    else if (home && *home)
        buf_addf(out, "%s/.cache/huggingface", home);
    return out->len > 0;
}

bool hub_cache(struct buf *out, struct error *err)
{
    const char *v = getenv("HF_HUB_CACHE");
    if (v && *v) {
        buf_adds(out, v);
        return true;
    }
    if (!hub_home(out))
        return error_set(err, "there is no folder for models: set HF_HOME or HOME");
    buf_adds(out, "/hub");
    return true;
}

bool hub_repo_folder(const char *repo, struct buf *out, struct error *err)
{
    if (!hub_cache(out, err))
        return false;
    const char *slash = strchr(repo, '/');
    buf_addf(out, "/models--%.*s--%s", (int)(slash - repo), repo, slash + 1);
    return true;
}

bool hub_token(struct buf *out)
{
    const char *v = getenv("HF_TOKEN"), *path = getenv("HF_TOKEN_PATH");
    struct buf file = {0};
    struct error ignored = {0};
    if (v && *v)
        buf_adds(out, v);
    else if (path && *path)
        buf_adds(&file, path);
    else if (hub_home(&file))
        buf_adds(&file, "/token");
    if (file.len && access(file.p, R_OK) == 0 && !cli_read_file(file.p, 4096, out, &ignored))
        buf_reset(out);
    buf_clear(&file);
    if (out->len)
        out->p[out->len = strcspn(out->p, " \t\r\n")] = 0;
    return out->len > 0;
}

/* The Hub's list of a repository */

void hub_repo_clear(struct hub_repo *r)
{
    for (int i = 0; i < r->n; i++)
        mem_free(r->files[i].path);
    mem_free(r->files);
    *r = (struct hub_repo){0};
}

static bool is_hex(const char *s, size_t n)
{
    return s && strlen(s) == n && strspn(s, "0123456789abcdef") == n;
}

/* True for a relative path that cannot leave its folder: no "..", no control characters. */
static bool path_is_safe(const char *p)
{
    if (!p || !*p || *p == '/' || strlen(p) > 512)
        return false;
    for (const char *c = p; *c; c++)
        if ((unsigned char)*c < 32 || *c == 127 || *c == '\\')
            return false;
    for (const char *part = p; part; part = strchr(part, '/')) {
        part += *part == '/';
        size_t n = strcspn(part, "/");
        if (!n || n > 255 || (n == 1 && *part == '.') || (n == 2 && !strncmp(part, "..", 2)))
            return false;
    }
    return true;
}

/* The largest file that a repository may list. */
static const int64_t FILE_MOST = (int64_t)1 << 60;

static bool read_file_entry(const json_t *v, struct hub_file *out)
{
    const char *path = json_string_value(json_object_get(v, "rfilename"));
    const json_t *lfs = json_object_get(v, "lfs");
    const char *sum = json_string_value(json_object_get(lfs, "sha256"));
    const char *blob = json_string_value(json_object_get(v, "blobId"));
    sum = sum ? sum : json_string_value(json_object_get(lfs, "oid"));
    out->size = json_integer_value(json_object_get(lfs ? lfs : v, "size"));
    if (lfs && !out->size)
        out->size = json_integer_value(json_object_get(v, "size"));
    out->large = json_is_object(lfs);
    const char *id = out->large ? sum : blob;
    if (!path_is_safe(path) || out->size < 0 || out->size > FILE_MOST ||
        !is_hex(id, out->large ? 64 : 40))
        return false;
    snprintf(out->id, sizeof out->id, "%s", id);
    out->path = mem_strdup(path);
    return true;
}

bool hub_repo_read(const char *text, size_t n, struct hub_repo *out, struct error *err)
{
    struct error why = {0};
    *out = (struct hub_repo){0};
    if (!json_guard(text, n, &json_limits_request, NULL, &why))
        return error_set(err, "the Hub's file list has %s", why.msg);
    json_t *v = json_loadb(text, n, 0, NULL);
    const json_t *list = json_object_get(v, "siblings"), *item;
    const char *sha = json_string_value(json_object_get(v, "sha"));
    bool ok = json_is_array(list) && is_hex(sha, 40);
    if (ok) {
        size_t i;
        snprintf(out->sha, sizeof out->sha, "%s", sha);
        out->files = mem_zalloc(json_array_size(list), sizeof *out->files);
        json_array_foreach((json_t *)list, i, item)
        {
            out->n += read_file_entry(item, &out->files[out->n]); /* invalid entries are skipped */
        }
    }
    json_decref(v);
    return ok || error_set(err, "the Hub's response is not a list of files");
}

/* Selection of files */

static const char *base_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static bool ends_in(const char *s, const char *tail)
{
    size_t n = strlen(s), t = strlen(tail);
    return n >= t && !strcasecmp(s + n - t, tail);
}

static bool is_gguf(const char *path)
{
    return ends_in(path, ".gguf") && strncasecmp(base_of(path), "mmproj", 6) != 0 &&
           !strcasestr(base_of(path), "imatrix");
}

/* Parses i and n of "x-00001-of-00003.gguf". False for a single file. */
static bool part_of(const char *path, int *i, int *n)
{
    size_t len = strlen(path);
    int used = 0;
    return len > 20 && sscanf(path + len - 20, "-%5d-of-%5d.gguf%n", i, n, &used) == 2 &&
           used == 20;
}

/* The quantisation in a file name: the last word that looks like one, or "". */
static void quant_of(const char *path, char out[64])
{
    static const char *const begins[] = {"Q", "IQ", "F16", "F32", "BF16", "FP16", "MXFP4", "TQ"};
    char name[600];
    int i, n;
    snprintf(name, sizeof name, "%s", base_of(path));
    size_t len = strlen(name);
    name[part_of(path, &i, &n) ? len - 20 : len - 5] = 0;
    out[0] = 0;
    for (char *word = name; word; word = strpbrk(word, "-.")) {
        word += *word == '-' || *word == '.';
        size_t w = strcspn(word, "-.");
        for (size_t k = 0; k < sizeof begins / sizeof *begins; k++) {
            size_t b = strlen(begins[k]);
            bool number = k > 1 && k < 7; /* whole words; the others need a digit next */
            if (w >= b && w < 64 && !strncasecmp(word, begins[k], b) &&
                (number ? w == b || word[b] == '_' : word[b] >= '0' && word[b] <= '9'))
                snprintf(out, 64, "%.*s", (int)w, word);
        }
    }
    for (char *c = out; *c; c++)
        if (*c >= 'a' && *c <= 'z')
            *c -= 32;
}

bool hub_quant(const char *path, char quant[64])
{
    if (!is_gguf(path))
        return false;
    quant_of(path, quant);
    if (!quant[0])
        snprintf(quant, 64, "%.63s", path);
    return true;
}

/* Marks the files of one quantisation with all its parts. */
static bool choose_quant(const struct hub_file *files, int n, const char *quant, bool *wanted,
                         int *first, struct error *err)
{
    int have = 0, parts = 0;
    *first = -1;
    for (int i = 0; i < n; i++) {
        char q[64] = "";
        int k, of;
        if (!is_gguf(files[i].path))
            continue;
        quant_of(files[i].path, q);
        bool same = !strcasecmp(q, quant) || !strcasecmp(files[i].path, quant);
        if (same && *first >= 0 && !part_of(files[i].path, &k, &of))
            continue; /* a second file of the same quantisation is ignored */
        if (!same)
            continue;
        bool split = part_of(files[i].path, &k, &of);
        wanted[i] = true;
        have++;
        if (*first < 0 || (split && k == 1))
            *first = i;
        parts = split ? of : 1;
    }
    if (have && have < parts)
        return error_set(err, "%s: only %d of %d parts are available", quant, have, parts);
    return true;
}

static bool choose_gguf(const struct hub_file *files, int n, char quant[64], bool *wanted,
                        int *first, struct error *err)
{
    static const char *const best[] = {"Q4_K_M", "Q4_K_S", "Q4_0",   "Q5_K_M",
                                       "Q6_K",   "Q8_0",   "Q3_K_M", "MXFP4"};
    char found[64] = "";
    for (size_t b = 0; !quant[0] && b < sizeof best / sizeof *best; b++)
        for (int i = 0; i < n; i++) {
            quant_of(files[i].path, found);
            if (is_gguf(files[i].path) && !strcasecmp(found, best[b]) && !quant[0])
                snprintf(quant, 64, "%s", best[b]);
        }
    for (int i = 0; !quant[0] && i < n; i++)
        if (is_gguf(files[i].path))
            snprintf(quant, 64, "%.63s", files[i].path);
    if (!choose_quant(files, n, quant, wanted, first, err))
        return false;
    if (*first >= 0)
        return true;
    struct buf list = {0};
    for (int i = 0; i < n; i++) {
        if (!is_gguf(files[i].path))
            continue;
        quant_of(files[i].path, found);
        const char *word = found[0] ? found : base_of(files[i].path);
        if (!list.len || !strstr(list.p, word))
            buf_addf(&list, "%s%s", list.len ? ", " : "", word);
    }
    error_set(err, "no quantisation %s; available: %.300s", quant, list.len ? list.p : "none");
    buf_clear(&list);
    return false;
}

/* True for weights, configuration and tokenizer; not for other formats of the weights, images or
 * pages. */
static bool folder_needs(const char *path)
{
    static const char *const tails[] = {".safetensors", ".safetensors.index.json", ".jinja"};
    static const char *const names[] = {"config.json",          "generation_config.json",
                                        "tokenizer.json",       "tokenizer_config.json",
                                        "tokenizer.model",      "special_tokens_map.json",
                                        "added_tokens.json",    "vocab.json",
                                        "merges.txt",           "chat_template.json",
                                        "quantize_config.json", "vocab.txt"};
    if (strchr(path, '/'))
        return false;
    for (size_t i = 0; i < sizeof tails / sizeof *tails; i++)
        if (ends_in(path, tails[i]))
            return strcmp(path, "consolidated.safetensors") != 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(path, names[i]))
            return true;
    return false;
}

bool hub_choose(const struct hub_file *files, int n, char quant[64], bool *wanted, int *first,
                struct error *err)
{
    bool any_gguf = false, weights = false, config = false;
    memset(wanted, 0, (size_t)n * sizeof *wanted);
    *first = -1;
    for (int i = 0; i < n; i++)
        any_gguf |= is_gguf(files[i].path);
    if (any_gguf)
        return choose_gguf(files, n, quant, wanted, first, err);
    for (int i = 0; i < n; i++) {
        wanted[i] = folder_needs(files[i].path);
        weights |= wanted[i] && ends_in(files[i].path, ".safetensors");
        config |= !strcmp(files[i].path, "config.json");
    }
    if (quant[0])
        return error_set(err, "the repository has no GGUF file, so no %s", quant);
    return (weights && config) ||
           error_set(err, "the repository has neither a GGUF file nor a model in safetensors");
}
