/*
 * Metadata to struct config. Finds the file's family and lets it read its values; checks that hold
 * for every family are made here. Does not look at tensors.
 */
#include "model/config.h"
#include "base/mem.h"
#include "model/eagle.h"
#include "model/families/family.h"
#include "model/reader.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* what: the key that holds the name. */
static bool unknown(const struct meta_reader *in, const char *what, const char *name)
{
    enum { LISTED = 12 };
    char list[LISTED * 34] = "";
    int n = 0;
    for (size_t at = 0; families[n]; n++)
        if (n < LISTED)
            at += (size_t)snprintf(list + at, sizeof list - at, "%s%.31s", n ? ", " : "",
                                   families[n]->name);
    return error_set(in->err,
                     "%s: %s \"%.40s\" is not supported; Steel runs %s and %d more "
                     "(docs/families.md)",
                     in->f->path, what, name, list, n - LISTED);
}

static bool find_gguf(const struct meta_reader *in)
{
    char *name = meta_get_string(in->f, "general.architecture");
    if (!name)
        return error_set(in->err, "%s: general.architecture: missing", in->f->path);
    for (int i = 0; families[i]; i++)
        if (!strcmp(name, families[i]->name))
            in->c->family = families[i];
    if (in->c->family)
        snprintf(in->c->arch_name, sizeof in->c->arch_name, "%s", name);
    else
        unknown(in, "architecture", name);
    mem_free(name);
    return in->c->family != NULL;
}

/* Prefixes of the text model's tensors, and its head: alone, without a head, or inside a multimodal model. */
static const struct {
    const char *model, *head;
} roots[] = {
    {"model.", "lm_head"},
    {"model.language_model.", "lm_head"},
    {"language_model.model.", "language_model.lm_head"},
    {"", "lm_head"},
    {"bert.", "lm_head"},
    {"roberta.", "lm_head"},
    {"backbone.", "lm_head"},
    {"model.text_model.", "lm_head"},
    {"gpt_neox.", "embed_out"},
    {"transformer.", "lm_head"},
    {"model.llm.", "model.llm.unembed"}}; /* the last: Inkling, whose embedding has another name */
enum { N_ROOTS = sizeof roots / sizeof *roots };

size_t config_root_len(const char *tensor)
{
    size_t longest = 0;
    for (int i = 0; i < N_ROOTS; i++) {
        size_t n = strlen(roots[i].model);
        if (n > longest && !strncmp(tensor, roots[i].model, n))
            longest = n;
    }
    return longest;
}

bool config_is_head(const char *tensor)
{
    for (int i = 0; i < N_ROOTS; i++)
        if (!strcmp(tensor, roots[i].head))
            return true;
    return false;
}

static void find_names(const struct meta_reader *in)
{
    struct config *c = in->c;
    const char *embed = c->family->hf_embed ? c->family->hf_embed : "embed_tokens";
    int found = 0;
    for (int i = 0; i < N_ROOTS; i++) {
        char name[96];
        snprintf(name, sizeof name, "%s%s.weight", roots[i].model,
                 i == N_ROOTS - 1 ? "embed" : embed);
        if (!tensorfile_find(in->f, name))
            continue;
        found = i;
        break;
    }
    c->hf_model = roots[found].model;
    c->hf_head = roots[found].head;
}

int config_net_layers(const struct config *c)
{
    return c->n_layers * (c->family->parts ? c->family->parts : 1);
}

bool config_is_mtp(const struct config *c, const char *tensor)
{
    size_t head = c->hf_model ? strlen(c->hf_model) : 0;
    if (!strncmp(tensor, "mtp.", 4))
        return true;
    if (!c->hf_model)
        return !strncmp(tensor, "blk.", 4) && atoi(tensor + 4) >= c->n_layers;
    return !strncmp(tensor, c->hf_model, head) && !strncmp(tensor + head, "layers.", 7) &&
           atoi(tensor + head + 7) >= c->n_layers;
}

bool config_is_text(const struct config *c, const char *tensor)
{
    if (!strncmp(tensor, "mtp.", 4))
        return c->n_mtp > 0;
    if (!c->hf_model || !strcmp(c->hf_model, "model."))
        return true;
    return !strncmp(tensor, c->hf_model, strlen(c->hf_model)) ||
           !strncmp(tensor, c->hf_head, strlen(c->hf_head));
}

static bool is_kind(const struct model_family *f, const json_t *config)
{
    return !f->is_kind || f->is_kind(config);
}

/* "NAME", or "NAME_text" as text models call themselves inside a larger one. */
static bool is_type(const struct model_family *f, const char *type)
{
    size_t n = strlen(f->hf);
    return type && !strncmp(type, f->hf, n) && (!type[n] || !strcmp(type + n, "_text"));
}

static bool find_hf(struct meta_reader *in)
{
    const json_t *o = in->f->config, *text = json_object_get(o, "text_config");
    const char *inner = json_string_value(json_object_get(text, "model_type"));
    const char *type = json_string_value(json_object_get(o, "model_type"));
    const char *class = json_string_value(json_array_get(json_object_get(o, "architectures"), 0));
    if (!type && !class)
        return error_set(in->err, "%s: config.json: model_type: missing", in->f->path);
    for (int i = 0; families[i] && !in->c->family; i++)
        if (is_type(families[i], inner) && is_kind(families[i], text))
            in->c->family = families[i];
    for (int i = 0; families[i] && !in->c->family; i++)
        if ((type ? !strcmp(type, families[i]->hf) : !strcmp(class, families[i]->hf_class)) &&
            is_kind(families[i], json_is_object(text) ? text : o))
            in->c->family = families[i];
    if (!in->c->family)
        return type ? unknown(in, "config.json: model_type", inner ? inner : type)
                    : unknown(in, "config.json: architectures:", class);
    snprintf(in->c->arch_name, sizeof in->c->arch_name, "%s", in->c->family->hf);
    if (json_is_object(text))
        in->hf = text;
    find_names(in);
    return true;
}

bool config_check(const struct meta_reader *in)
{
    const struct config *c = in->c;
    const char *path = in->f->path;
    if (c->n_heads % c->n_kv_heads)
        return error_set(in->err, "%s: %d heads do not divide by %d KV heads", path, c->n_heads,
                         c->n_kv_heads);
    if (c->head_dim < 1)
        return error_set(in->err, "%s: head dimension 0 (embedding %d, %d heads)", path, c->n_embd,
                         c->n_heads);
    if (c->n_rot % 2 || c->n_rot > c->head_dim)
        return error_set(in->err, "%s: %d rotary dimensions of a head of %d", path, c->n_rot,
                         c->head_dim);
    if ((int64_t)c->n_heads * c->head_dim > 1 << 24)
        return error_set(in->err, "%s: %d heads of %d are too many", path, c->n_heads, c->head_dim);
    for (int i = 0; i < c->n_layers + c->n_mtp; i++) {
        int dim = c->layer_head_dim[i], heads = c->layer_kv_heads[i];
        int n = c->layer_heads[i] ? c->layer_heads[i] : c->n_heads;
        if (n % (heads ? heads : c->n_kv_heads) || (int64_t)n * (dim ? dim : c->head_dim) > 1 << 24)
            return error_set(in->err, "%s: layer %d: %d heads of %d with %d KV heads", path, i, n,
                             dim ? dim : c->head_dim, heads ? heads : c->n_kv_heads);
        if (c->layer_experts_used[i] > c->n_expert_used)
            return error_set(in->err, "%s: layer %d: %d of %d experts used", path, i,
                             c->layer_experts_used[i], c->n_expert);
    }
    if (c->n_groups > 1 && (c->n_groups > c->n_expert || c->n_expert % c->n_groups ||
                            c->n_groups_used < 1 || c->n_groups_used > c->n_groups ||
                            c->n_expert / c->n_groups * c->n_groups_used < c->n_expert_used))
        return error_set(in->err, "%s: %d experts of %d, from %d of %d groups", path,
                         c->n_expert_used, c->n_expert, c->n_groups_used, c->n_groups);
    if (c->n_rot_window % 2)
        return error_set(in->err, "%s: %d rotary dimensions", path, c->n_rot_window);
    bool dense = false, sparse = false;
    for (int i = 0; i < c->n_layers + c->n_mtp; i++)
        *(c->is_moe[i] ? &sparse : &dense) = true;
    if (dense && c->n_ff < 1)
        return error_set(in->err, "%s: feed-forward length: missing", path);
    if (sparse && (c->n_expert_used < 1 || c->n_expert_used > c->n_expert + c->n_same))
        return error_set(in->err, "%s: %d of %d experts used", path, c->n_expert_used,
                         c->n_expert + c->n_same);
    if (sparse && c->n_ff_exp < 1)
        return error_set(in->err, "%s: expert feed-forward length: missing", path);
    return true;
}

bool config_load(const struct tensorfile *f, struct config *c, struct error *err)
{
    *c = (struct config){0};
    struct meta_reader in = {f, c, err, f->config};
    if (eagle_is(f))
        return error_set(err, "%s: an EAGLE-3 head, which drafts for another model: --draft-model",
                         f->path);
    return (f->is_gguf ? find_gguf(&in) : find_hf(&in)) && c->family->read(&in) &&
           (f->is_gguf || layout_read_config(&in, &c->layout)) && config_check(&in);
}
