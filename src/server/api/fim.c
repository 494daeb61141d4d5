/* Builds fill-in-the-middle prompts from the model's own tokens. Special tokens spelled in the texts are
 * ordinary text. */
#include "server/api/fim.h"
#include "server/api/prepare_int.h"

#include <stdio.h>
#include <string.h>

enum { MAX_EXTRA = 256 };

static bool encode(struct api_request *req, const json_t *text, struct token_list *out)
{
    return !text ||
           api_request_encode(req, json_string_value(text), json_string_length(text), 0, out);
}

static bool encode_text(struct api_request *req, const char *text, struct token_list *out)
{
    return api_request_encode(req, text, strlen(text), 0, out);
}

/* The line that begins a file: its name after the model's token for files, or between dashes. */
static bool add_file_name(struct api_request *req, const struct fim_tokens *f, const char *name,
                          struct token_list *out)
{
    struct buf line = {0};
    if (f->file >= 0)
        token_list_add(out, f->file);
    buf_addf(&line, f->file >= 0 ? "%s\n" : "\n\n--- %s ---\n\n", name);
    bool ok = api_request_encode(req, line.p, line.len, 0, out);
    buf_clear(&line);
    return ok;
}

static bool add_extra(struct api_request *req, const struct fim_tokens *f, const json_t *extra,
                      struct token_list *out)
{
    size_t i;
    const json_t *item;
    char param[64];
    if (!extra)
        return true;
    if (!json_is_array(extra) || json_array_size(extra) > MAX_EXTRA)
        return api_invalid(&req->err, "input_extra",
                           "input_extra must be an array of at most %d objects", MAX_EXTRA);
    if (json_array_size(extra) && f->repo >= 0) {
        token_list_add(out, f->repo);
        if (!encode_text(req, "project\n", out))
            return false;
    }
    json_array_foreach((json_t *)extra, i, item)
    {
        const json_t *text = api_member(item, "text"), *name = api_member(item, "filename");
        snprintf(param, sizeof param, "input_extra[%zu]", i);
        if (!json_is_object(item) || !json_is_string(text) || (name && !json_is_string(name)))
            return api_invalid(&req->err, param, "%s needs text and filename (strings)", param);
        if (!add_file_name(req, f, name ? json_string_value(name) : "file", out) ||
            !encode(req, text, out))
            return false;
    }
    return !json_array_size(extra) || f->file < 0 || add_file_name(req, f, "current", out);
}

static void add_range(struct token_list *out, const struct token_list *in, size_t from, size_t to)
{
    for (size_t i = from; i < to; i++)
        token_list_add(out, in->ids[i]);
}

/* Joins the parts. Beyond `room`, other files are cut first, from their beginning; then three quarters of
 * the room are for the text before the cursor. */
static void join(const struct fim_tokens *f, struct fim_source *src, const struct token_list *extra,
                 const struct token_list *prefix, const struct token_list *suffix,
                 struct token_list *out)
{
    size_t fixed = out->n + 3, n_prefix = prefix->n, n_suffix = suffix->n, n_extra = extra->n;
    size_t total = fixed + n_prefix + n_suffix + n_extra, room = (size_t)src->room;
    if (room && total > room) {
        src->cut = true;
        n_extra = total - room < n_extra ? n_extra - (total - room) : 0;
        size_t left = room > fixed ? room - fixed : 0;
        if (n_prefix + n_suffix > left) {
            n_suffix = n_suffix < left / 4 ? n_suffix : left / 4;
            n_prefix = n_prefix < left - n_suffix ? n_prefix : left - n_suffix;
            n_suffix = suffix->n < left - n_prefix ? suffix->n : left - n_prefix;
        }
    }
    add_range(out, extra, extra->n - n_extra, extra->n);
    for (int part = 0; part < 2; part++)
        if ((part == 0) == f->suffix_first) {
            token_list_add(out, f->suffix);
            add_range(out, suffix, 0, n_suffix);
        } else {
            token_list_add(out, f->prefix);
            add_range(out, prefix, prefix->n - n_prefix, prefix->n);
        }
    if (f->middle >= 0)
        token_list_add(out, f->middle);
}

bool fim_add_prompt(struct api_request *req, struct fim_source *src, int status, const char *param)
{
    const struct tokenizer *t = engine_tokenizer(req->loaded->engine, NULL);
    const struct fim_tokens *f = t ? tokenizer_fim(t) : NULL;
    struct token_list extra = {0}, prefix = {0}, suffix = {0};
    if (!f) {
        api_fail(&req->err, status, status == 501 ? "not_supported_error" : "invalid_request_error",
                 "%s: this model has no fill-in-the-middle tokens", param);
        snprintf(req->err.param, sizeof req->err.param, "%s", param);
        return false;
    }
    struct token_list *out = api_request_add_prompt(req);
    bool ok = api_request_encode(req, "", 0, TOKENIZE_BOS, out) &&
              encode(req, src->prefix, &prefix) && encode(req, src->prompt, &prefix) &&
              encode(req, src->suffix, &suffix) && add_extra(req, f, src->extra, &extra);
    if (ok)
        join(f, src, &extra, &prefix, &suffix, out);
    token_list_clear(&extra);
    token_list_clear(&prefix);
    token_list_clear(&suffix);
    return ok;
}
