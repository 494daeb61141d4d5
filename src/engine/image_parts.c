/* Images in JSON: parts of messages in the dialects of OpenAI, Anthropic and Ollama. See images.h. */
#include "base/base64.h"
#include "base/mem.h"
#include "engine/images.h"

#include <stdio.h>
#include <string.h>

static bool is_type(const json_t *part, const char *type)
{
    const char *t = json_string_value(json_object_get(part, "type"));
    return t && !strcmp(t, type);
}

bool image_is_part(const json_t *part)
{
    return is_type(part, "image_url") || is_type(part, "image") || is_type(part, "input_image");
}

static bool add_base64(struct prompt_images *m, const char *s, size_t n, const char *where,
                       struct buf *out, struct error *err)
{
    struct buf bytes = {0};
    bool ok = (s && n && base64_decode(s, n, &bytes) && bytes.len) ||
              error_set(err, "%s: the image is not valid base64", where);
    ok = ok && prompt_images_give(m, &bytes, where, out, err);
    buf_clear(&bytes);
    return ok;
}

bool prompt_images_add_base64(struct prompt_images *m, const json_t *v, const char *where,
                              struct buf *out, struct error *err)
{
    return add_base64(m, json_string_value(v), json_string_length(v), where, out, err);
}

/* data:image/png;base64,... */
static bool add_url(struct prompt_images *m, const json_t *url, const char *where, struct buf *out,
                    struct error *err)
{
    static const char kind[] = ";base64";
    const char *s = json_string_value(url), *comma = s ? strchr(s, ',') : NULL;
    if (!s)
        return error_set(err, "%s: the image has no url", where);
    if (strncmp(s, "data:", 5) != 0)
        return prompt_images_add_url(m, s, where, out, err);
    if (!comma || comma - s < (long)sizeof kind - 1 ||
        strncmp(comma - (sizeof kind - 1), kind, sizeof kind - 1) != 0)
        return error_set(err, "%s: expected data:image/...;base64,...", where);
    comma++;
    return add_base64(m, comma, json_string_length(url) - (size_t)(comma - s), where, out, err);
}

/* `detail`, of the part or beside its url. */
static bool read_detail(struct prompt_images *m, const json_t *part, const char *where,
                        struct error *err)
{
    const json_t *url = json_object_get(part, "image_url"), *v = json_object_get(part, "detail");
    if (!v && json_is_object(url))
        v = json_object_get(url, "detail");
    const char *s = json_string_value(v);
    bool low = s && !strcmp(s, "low");
    if (v && !json_is_null(v) &&
        (!s ||
         (!low && strcmp(s, "high") != 0 && strcmp(s, "auto") != 0 && strcmp(s, "original") != 0)))
        return error_set(err, "%s: detail: expected low, high, original or auto", where);
    prompt_images_set_low(m, low);
    return true;
}

static bool add_part(struct prompt_images *m, const json_t *part, const char *where,
                     struct buf *out, struct error *err)
{
    const json_t *source = json_object_get(part, "source"),
                 *url = json_object_get(part, "image_url");
    const json_t *data = json_object_get(source, "data");
    if (is_type(source, "base64"))
        return add_base64(m, json_string_value(data), json_string_length(data), where, out, err);
    if (json_is_object(url))
        url = json_object_get(url, "url");
    if (source)
        url = json_object_get(source, "url");
    if (!url)
        url = json_object_get(part, json_object_get(part, "image") ? "image" : "url");
    return add_url(m, url, where, out, err);
}

bool prompt_images_add_part(struct prompt_images *m, const json_t *part, const char *where,
                            struct buf *out, struct error *err)
{
    bool ok = read_detail(m, part, where, err) && add_part(m, part, where, out, err);
    prompt_images_set_low(m, false);
    return ok;
}

/* A list of parts while its images are taken out. */
struct taking {
    struct prompt_images *m;
    json_t *out;
    struct buf text; /* an image's mark and the texts beside it */
    bool open;       /* it is not yet part of out */
    bool after_image;
    struct error *err;
};

static void close_text(struct taking *t)
{
    if (t->open)
        json_array_append_new(t->out, json_pack("{s:s,s:s%}", "type", "text", "text",
                                                t->text.p ? t->text.p : "", t->text.len));
    buf_reset(&t->text);
    t->open = t->after_image = false;
}

static json_t *take_parts(struct prompt_images *m, const json_t *parts, const char *where,
                          struct error *err);

static bool take_part(struct taking *t, const json_t *part, const char *where)
{
    const json_t *inner = json_object_get(part, "content"), *s = json_object_get(part, "text");
    bool image = image_is_part(part), plain = is_type(part, "text") && json_is_string(s);
    if (!image && !(plain && t->after_image))
        close_text(t);
    t->after_image = image;
    t->open |= image || plain;
    if (image)
        return prompt_images_add_part(t->m, part, where, &t->text, t->err);
    if (plain) {
        buf_add(&t->text, json_string_value(s), json_string_length(s));
        return true;
    }
    json_t *copy = json_copy((json_t *)part);
    json_array_append_new(t->out, copy);
    if (!is_type(part, "tool_result") || !json_is_array(inner))
        return true;
    char at[IMAGES_WHERE];
    snprintf(at, sizeof at, "%.48s.content", where);
    json_t *list = take_parts(t->m, inner, at, t->err);
    return list && json_object_set_new(copy, "content", list) == 0;
}

static json_t *take_parts(struct prompt_images *m, const json_t *parts, const char *where,
                          struct error *err)
{
    struct taking t = {.m = m, .out = json_array(), .err = err};
    const json_t *part;
    bool ok = true;
    size_t i;
    json_array_foreach((json_t *)parts, i, part)
    {
        char at[IMAGES_WHERE];
        snprintf(at, sizeof at, "%.40s[%zu]", where, i);
        ok = ok && take_part(&t, part, at);
    }
    close_text(&t);
    buf_clear(&t.text);
    if (!ok)
        json_decref(t.out);
    return ok ? t.out : NULL;
}

/* depth: of tool results, which hold no others */
static bool has_image(const json_t *parts, int depth)
{
    size_t i;
    const json_t *part;
    if (json_is_array(parts))
        json_array_foreach((json_t *)parts, i, part)
        {
            if (image_is_part(part) || (!depth && is_type(part, "tool_result") &&
                                        has_image(json_object_get(part, "content"), 1)))
                return true;
        }
    return false;
}

json_t *prompt_images_take(struct prompt_images *m, const json_t *messages, struct error *err)
{
    if (!m || !json_is_array(messages))
        return json_incref((json_t *)messages);
    json_t *out = json_copy((json_t *)messages), *message;
    size_t i;
    json_array_foreach((json_t *)messages, i, message)
    {
        const json_t *content = json_object_get(message, "content");
        char where[IMAGES_WHERE];
        if (!has_image(content, 0))
            continue;
        snprintf(where, sizeof where, "messages[%zu].content", i);
        json_t *fitted = json_copy(message), *parts = take_parts(m, content, where, err);
        json_array_set_new(out, i, fitted);
        if (!parts) {
            json_decref(out);
            return NULL;
        }
        json_object_set_new(fitted, "content", parts);
    }
    return out;
}

/* Puts the marks of object's images before object[key], a text, and removes the list. */
static bool take_list(struct prompt_images *m, json_t *object, const char *key, const char *where,
                      struct error *err)
{
    const json_t *list = json_object_get(object, "images"), *text = json_object_get(object, key);
    struct buf out = {0};
    bool ok = true;
    for (size_t i = 0; ok && i < json_array_size(list); i++) {
        const json_t *image = json_array_get(list, i);
        char at[IMAGES_WHERE];
        snprintf(at, sizeof at, "%.40s[%zu]", where, i);
        ok = add_base64(m, json_string_value(image), json_string_length(image), at, &out, err);
    }
    if (json_is_string(text))
        buf_add(&out, json_string_value(text), json_string_length(text));
    if (ok && (!text || json_is_null(text) || json_is_string(text)))
        json_object_set_new(object, key, json_stringn(out.p ? out.p : "", out.len));
    json_object_del(object, "images");
    buf_clear(&out);
    return ok;
}

json_t *prompt_images_take_lists(struct prompt_images *m, const json_t *body, struct error *err)
{
    if (!m)
        return json_incref((json_t *)body);
    json_t *out = json_copy((json_t *)body), *messages = json_object_get(body, "messages");
    bool ok = true;
    if (json_array_size(json_object_get(body, "images")))
        ok = take_list(m, out, "prompt", "images", err);
    if (json_is_array(messages))
        json_object_set_new(out, "messages", messages = json_copy(messages));
    for (size_t i = 0; ok && i < json_array_size(messages); i++) {
        json_t *message = json_array_get(messages, i);
        char where[IMAGES_WHERE];
        if (!json_array_size(json_object_get(message, "images")))
            continue;
        snprintf(where, sizeof where, "messages[%zu].images", i);
        json_t *copy = json_copy(message);
        ok = take_list(m, copy, "content", where, err);
        json_array_set_new(messages, i, copy);
    }
    if (!ok)
        json_decref(out);
    return ok ? out : NULL;
}
