/*
 * Tool calls of MiniMax-M3: each tag follows a special token, an argument's name is its tag, and objects and lists are
 * elements too (<k><a>1</a></k>, <k><item>1</item></k>). Whether an element is a list or text is a string follows from
 * the tool's schema, else from the text. chat_parse.c begins and ends calls.
 */
#include "text/chat/chat_parse_int.h"
#include "base/mem.h"

#include <stdio.h>
#include <string.h>

#define NS "]<]minimax[>["
enum {
    MAX_NAME = 256,
    MAX_DEPTH = 64,
    MAX_HOPS = 8,
    MAX_SCHEMAS = 300 /* looked at for one element */
};

/* Position in a call: p->mode. */
enum {
    E_OPEN = CHAT_MODE_JSON + 1, /* before a call */
    E_FUNCTION,                  /* its name */
    E_INSIDE,                    /* inside the innermost element */
    E_TAG,                       /* an opening tag's name */
    E_CLOSE,                     /* a closing tag's name */
};

/* What an element is. */
enum { K_UNKNOWN, K_TEXT, K_OBJECT, K_LIST };

/* Types of values that a schema allows; 0 = it does not say. */
enum { V_STRING = 1, V_LIST = 2, V_OBJECT = 4, V_OTHER = 8, V_NULL = 16 };

struct chat_level {
    const json_t *schema; /* of the element; NULL = unknown */
    int kind;
    size_t n; /* members or items so far */
};

/* ------------------------------------------------------------------ schemas */

/* Follows references inside the tool's parameters. */
static const json_t *resolve(const json_t *root, const json_t *s)
{
    const char *ref;
    for (int hops = 0; (ref = json_string_value(json_object_get(s, "$ref"))); hops++) {
        if (hops == MAX_HOPS || strncmp(ref, "#/", 2) != 0)
            return NULL;
        s = root;
        for (const char *p = ref + 2; s && *p;) {
            char name[MAX_NAME];
            size_t n = strcspn(p, "/");
            snprintf(name, sizeof name, "%.*s", n < sizeof name ? (int)n : 0, p);
            s = json_object_get(s, name);
            p += n + (p[n] == '/');
        }
    }
    return s;
}

static int type_bit(const char *word)
{
    return !strcmp(word, "string")   ? V_STRING
           : !strcmp(word, "array")  ? V_LIST
           : !strcmp(word, "object") ? V_OBJECT
           : !strcmp(word, "null")   ? V_NULL
                                     : V_OTHER;
}

static int type_of_value(const json_t *v)
{
    return json_is_string(v)   ? V_STRING
           : json_is_array(v)  ? V_LIST
           : json_is_object(v) ? V_OBJECT
           : json_is_null(v)   ? V_NULL
                               : V_OTHER;
}

static const char *const lists[] = {"anyOf", "oneOf", "allOf"};

static int value_types(const json_t *root, const json_t *s, int *budget)
{
    size_t i;
    const json_t *v;
    int types = 0;
    s = resolve(root, s);
    const json_t *type = json_object_get(s, "type"), *values = json_object_get(s, "enum");
    if (json_is_string(type))
        return type_bit(json_string_value(type));
    json_array_foreach((json_t *)type, i, v) if (json_is_string(v)) types |=
        type_bit(json_string_value(v));
    json_array_foreach((json_t *)values, i, v) types |= type_of_value(v);
    if ((v = json_object_get(s, "const")))
        types |= type_of_value(v);
    if (json_object_get(s, "properties"))
        types |= V_OBJECT;
    if (json_object_get(s, "items"))
        types |= V_LIST;
    for (int k = 0; k < 3 && !types; k++) {
        const json_t *list = json_object_get(s, lists[k]);
        for (i = 0; i < json_array_size(list) && --*budget > 0; i++)
            types |= value_types(root, json_array_get(list, i), budget);
    }
    return types;
}

/* The schema of a member, or of item number `at` if name is NULL. */
static const json_t *child_schema(const json_t *root, const json_t *s, const char *name, size_t at,
                                  int *budget)
{
    s = resolve(root, s);
    const json_t *child = name ? json_object_get(json_object_get(s, "properties"), name)
                               : json_array_get(json_object_get(s, "prefixItems"), at);
    if (!child)
        child = json_object_get(s, name ? "additionalProperties" : "items");
    for (int k = 0; k < 3 && !json_is_object(child); k++) {
        const json_t *list = json_object_get(s, lists[k]);
        for (size_t i = 0; i < json_array_size(list) && !json_is_object(child) && --*budget > 0;
             i++)
            child = child_schema(root, json_array_get(list, i), name, at, budget);
    }
    return json_is_object(child) ? child : NULL;
}

/* ------------------------------------------------------------------ elements */

static struct chat_level *top(struct chat_parser *p)
{
    return &p->levels[p->n_levels - 1];
}

static int types_here(struct chat_parser *p)
{
    int budget = MAX_SCHEMAS;
    return value_types(p->levels[0].schema, top(p)->schema, &budget);
}

static void emit(struct chat_parser *p, const char *text)
{
    chat_call_args(p, text, strlen(text));
}

static void push(struct chat_parser *p, const json_t *schema, int kind)
{
    if (!p->levels)
        p->levels = mem_zalloc(MAX_DEPTH, sizeof *p->levels);
    p->levels[p->n_levels++] = (struct chat_level){.schema = schema, .kind = kind};
    buf_reset(&p->js.text);
    p->mode = E_INSIDE;
}

/* The element holds text: what was white space so far is its beginning. */
static void begin_text(struct chat_parser *p)
{
    int types = types_here(p);
    struct buf *space = &p->js.text;
    p->xml_string = types & V_STRING && !(types & V_OTHER);
    if (p->xml_string)
        emit(p, "\"");
    buf_reset(&p->js.args);
    for (size_t i = 0; i < space->len; i++)
        chat_value_char(p, space->p[i]);
    top(p)->kind = K_TEXT;
}

/* The closing tag of the innermost element is complete. */
static void close_element(struct chat_parser *p)
{
    struct chat_level *l = top(p);
    if (l->kind == K_UNKNOWN) {
        int types = types_here(p);
        if (!(types & V_STRING) && types & (V_LIST | V_OBJECT)) {
            emit(p, types & V_LIST ? "[]" : "{}");
            l->kind = -1;
        } else {
            begin_text(p);
        }
    }
    if (l->kind == K_TEXT && p->xml_string)
        emit(p, "\"");
    else if (l->kind == K_TEXT)
        xml_value(p, p->js.args.p ? p->js.args.p : "", p->js.args.len);
    else if (l->kind >= 0)
        emit(p, l->kind == K_LIST ? "]" : "}");
    p->mode = E_INSIDE;
    if (--p->n_levels)
        return;
    p->state = S_CONTENT;
    if (chat_call_end(p))
        chat_next_call(p, E_OPEN);
}

/* An opening tag is complete. */
static void open_element(struct chat_parser *p)
{
    struct chat_level *parent = top(p);
    struct buf key = {0}, *name = &p->js.name;
    const json_t *root = p->levels[0].schema, *schema;
    bool list = parent->kind == K_LIST;
    int budget = MAX_SCHEMAS;
    buf_addc(name, 0);
    name->len--;
    if (p->n_levels == MAX_DEPTH || !name->len || (list && strcmp(name->p, "item") != 0)) {
        chat_call_break(p);
        return;
    }
    schema = child_schema(root, parent->schema, list ? NULL : name->p, parent->n, &budget);
    buf_adds(&key, parent->n++ ? ", " : "");
    if (!list) {
        buf_addc(&key, '"');
        json_escape(&key, name->p, name->len);
        buf_adds(&key, "\": ");
    }
    chat_call_args(p, key.p ? key.p : "", key.len);
    buf_clear(&key);
    push(p, schema, K_UNKNOWN);
}

/* ------------------------------------------------------------------ steps */

static bool step_open(struct chat_parser *p)
{
    int call = chat_match(p, NS "<invoke name=\""), end = chat_match(p, NS "</tool_call>");
    if (chat_space_here(p)) {
        if (p->raw.len)
            buf_addc(&p->raw, chat_here(p));
        p->pos++;
        return true;
    }
    if (call < 0 || end < 0)
        return false;
    if (call) {
        chat_next_call(p, E_FUNCTION);
        buf_adds(&p->raw, NS "<invoke name=\"");
        p->pos += strlen(NS "<invoke name=\"");
    } else if (p->raw.len) {
        chat_reject_call(p);
    } else {
        p->pos += end ? strlen(NS "</tool_call>") : 0;
        p->state = S_CONTENT;
    }
    return true;
}

static bool step_function(struct chat_parser *p)
{
    int m = chat_match(p, "\">");
    char c = chat_here(p);
    if (m < 0)
        return false;
    if (!m && (strchr(" \n<>\"", c) || p->tag.len >= MAX_NAME)) {
        chat_reject_call(p);
    } else if (!m) {
        buf_addc(&p->tag, c);
        buf_addc(&p->raw, c);
        p->pos++;
    } else if (!p->tag.len) {
        chat_reject_call(p);
    } else {
        p->pos += 2;
        buf_addc(&p->tag, 0);
        p->tag.len--;
        chat_call_begin(p, p->tag.p, p->tag.len);
        emit(p, "{");
        p->n_levels = 0;
        push(p, chat_parameters(p, p->tag.p), K_OBJECT);
    }
    return true;
}

static bool step_inside(struct chat_parser *p)
{
    struct chat_level *l = top(p);
    char c = chat_here(p);
    int close = chat_match(p, NS "</"), open = chat_match(p, NS "<");
    if (close < 0 || (open < 0 && l->kind != K_TEXT))
        return false;
    if (close || (open && l->kind != K_TEXT)) {
        if (!close && l->kind == K_UNKNOWN) {
            int item = chat_match(p, NS "<item>"), types = types_here(p);
            if (item < 0)
                return false;
            l->kind = item && (!types || types & V_LIST) ? K_LIST : K_OBJECT;
            emit(p, l->kind == K_LIST ? "[" : "{");
        }
        p->pos += close ? strlen(NS "</") : strlen(NS "<");
        buf_reset(&p->js.name);
        p->mode = close ? E_CLOSE : E_TAG;
    } else if (l->kind == K_TEXT) {
        p->pos++;
        chat_value_char(p, c);
    } else if (chat_space_here(p)) {
        if (l->kind == K_UNKNOWN)
            buf_addc(&p->js.text, c);
        p->pos++;
    } else if (l->kind == K_UNKNOWN) {
        begin_text(p);
    } else {
        chat_call_break(p);
    }
    return true;
}

/* A tag's name, up to '>'. */
static bool step_tag(struct chat_parser *p)
{
    char c = chat_here(p);
    if (strchr(" \n</\"", c) || p->js.name.len > MAX_NAME) {
        chat_call_break(p);
        return true;
    }
    p->pos++;
    if (c != '>')
        buf_addc(&p->js.name, c);
    else if (p->mode == E_TAG)
        open_element(p);
    else
        close_element(p);
    return true;
}

bool chat_step_elements(struct chat_parser *p)
{
    switch (p->mode) {
    case E_FUNCTION:
        return step_function(p);
    case E_INSIDE:
        return step_inside(p);
    case E_TAG:
    case E_CLOSE:
        return step_tag(p);
    default:
        return step_open(p);
    }
}

void chat_elements_start(struct chat_parser *p, const char *raw)
{
    chat_start_call(p, E_OPEN, raw);
}
