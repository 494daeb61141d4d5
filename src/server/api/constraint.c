/*
 * The constraint on the output: OpenAI's response_format, vLLM's guided_* and structured_outputs,
 * llama.cpp's grammar and json_schema, and the tools that may or must be called. Compiled on the worker
 * that prepares the request, or taken from the cache. A constraint that cannot be enforced is refused.
 */
#include "base/mem.h"
#include "server/api/prepare_int.h"
#include "text/chat/chat_grammar.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The constraint of a request: its field, and the input of grammar_compile. */
struct found {
    const char *field; /* NULL = none */
    enum grammar_kind kind;
    char *text; /* mem_free */
};

static bool set(struct found *f, const char *field, enum grammar_kind kind, const json_t *v,
                struct api_error *err)
{
    if (f->field)
        return api_invalid(err, field, "%s and %s: only one constraint is allowed", f->field,
                           field);
    f->field = field;
    f->kind = kind;
    if (kind == GRAMMAR_JSON_OBJECT)
        return true;
    /* Schemas and choices are JSON or a string of JSON; the others are strings. */
    bool json = kind == GRAMMAR_SCHEMA || kind == GRAMMAR_CHOICE;
    if (json && !json_is_string(v))
        f->text = json_dumps(v, JSON_COMPACT | JSON_ENCODE_ANY);
    else if (json_is_string(v))
        f->text = mem_strndup(json_string_value(v), json_string_length(v));
    else
        return api_invalid(err, field, "%s must be a string", field);
    if (!f->text)
        return api_fail(err, 503, "unavailable_error", "out of memory");
    return true;
}

static bool read_format(const json_t *body, struct found *f, struct api_error *err)
{
    static const char field[] = "response_format";
    const json_t *v = api_member(body, field), *inner;
    const char *type = NULL;
    if (!v)
        return true;
    if (!json_is_object(v))
        return api_invalid(err, field, "response_format must be an object");
    if (!api_string(v, "type", &type, err))
        return false;
    if (!type)
        return api_invalid(err, "response_format.type", "response_format.type is missing");
    if (!strcmp(type, "text"))
        return true;
    if (!strcmp(type, "json_object")) /* llama.cpp allows a schema here */
        return api_member(v, "schema") ? set(f, field, GRAMMAR_SCHEMA, api_member(v, "schema"), err)
                                       : set(f, field, GRAMMAR_JSON_OBJECT, NULL, err);
    if (strcmp(type, "json_schema"))
        return api_invalid(err, "response_format.type",
                           "response_format.type must be text, json_object or json_schema");
    inner = api_member(v, "json_schema");
    const json_t *schema = api_member(inner ? inner : v, "schema");
    if (!json_is_object(schema) && !json_is_boolean(schema))
        return api_invalid(err, "response_format.json_schema.schema",
                           "response_format.json_schema.schema must be a JSON schema");
    return set(f, "response_format.json_schema.schema", GRAMMAR_SCHEMA, schema, err);
}

static bool read_fields(const json_t *body, struct found *f, struct api_error *err)
{
    static const struct {
        const char *outer, *name;
        enum grammar_kind kind;
    } fields[] = {
        {NULL, "guided_json", GRAMMAR_SCHEMA},
        {NULL, "guided_regex", GRAMMAR_REGEX},
        {NULL, "guided_choice", GRAMMAR_CHOICE},
        {NULL, "guided_grammar", GRAMMAR_GBNF},
        {NULL, "json_schema", GRAMMAR_SCHEMA},
        {NULL, "grammar", GRAMMAR_GBNF},
        {"structured_outputs", "json", GRAMMAR_SCHEMA},
        {"structured_outputs", "regex", GRAMMAR_REGEX},
        {"structured_outputs", "choice", GRAMMAR_CHOICE},
        {"structured_outputs", "grammar", GRAMMAR_GBNF},
    };
    bool object = false;
    const json_t *outer = api_member(body, "structured_outputs");
    if (outer && !json_is_object(outer))
        return api_invalid(err, "structured_outputs", "structured_outputs must be an object");
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        const json_t *v = api_member(fields[i].outer ? outer : body, fields[i].name);
        if (v && json_is_string(v) && !json_string_length(v) && fields[i].kind == GRAMMAR_GBNF)
            continue; /* llama.cpp's front ends send "" for no grammar */
        if (v &&
            !set(f, fields[i].outer ? fields[i].outer : fields[i].name, fields[i].kind, v, err))
            return false;
    }
    if (!api_bool(outer, "json_object", &object, err))
        return false;
    return !object || set(f, "structured_outputs", GRAMMAR_JSON_OBJECT, NULL, err);
}

/* One grammar covers thinking, tool calls and the constraint on the text. */
static struct grammar *compile_answer(struct api_request *req,
                                      const struct grammar_source *response, struct error *why)
{
    struct chat_prompt *chat = req->chat;
    struct chat_constraint fit = {.format = chat->format,
                                  .thoughts = chat->thoughts,
                                  .thinking = chat->thinking,
                                  .tools = chat->schema,
                                  .only = chat->only,
                                  .required = chat->required,
                                  .one_call = chat->one_call,
                                  .response = response};
    if (!chat_format_calls(chat->format))
        fit.tools = NULL;
    char *text = chat_constraint_text(&fit);
    struct grammar_source src = {.kind = GRAMMAR_REPLY,
                                 .flags = response ? response->flags : 0,
                                 .text = text,
                                 .len = strlen(text)};
    struct grammar *g = grammar_cache_get(req->server->grammars, &src, NULL, why);
    mem_free(text);
    return g;
}

static bool has_bans(const struct sample_params *p)
{
    for (int i = 0; i < p->n_bias; i++)
        if (p->bias[i].bias == -INFINITY)
            return true;
    return false;
}

bool api_request_constrain(struct api_request *req, const json_t *body)
{
    struct engine *e = req->loaded->engine;
    struct found f = {0};
    struct error why = {0};
    bool ok = read_format(body, &f, &req->err) && read_fields(body, &f, &req->err);
    bool tools = req->chat && req->chat->tools && chat_format_calls(req->chat->format);
    const struct sample_params *sample = &req->p.sample;
    bool banned = ok && has_bans(sample), endless = banned && !engine_may_end(e, sample);
    if (!f.field && tools && !req->chat->required &&
        (req->p.ignore_eos || req->p.min_tokens > 0 || endless))
        tools = false; /* the end of the output is already determined */
    struct grammar_source src = {.kind = f.kind,
                                 .flags = GRAMMAR_SCHEMA_ORDER,
                                 .text = f.text ? f.text : "",
                                 .len = f.text ? strlen(f.text) : 0};
    if (ok && req->chat && (f.field || tools))
        req->grammar = compile_answer(req, f.field ? &src : NULL, &why);
    else if (ok && f.field)
        req->grammar = grammar_cache_get(req->server->grammars, &src, NULL, &why);
    const char *field = f.field ? f.field : "tools";
    ok = ok && (req->grammar || !(f.field || tools) ||
                api_invalid(&req->err, field, "%s: %s", field, why.msg));
    if (ok && req->grammar && banned && !engine_may_fit(e, sample, req->grammar, &why))
        ok = api_invalid(&req->err, "logit_bias", "%s: %s", field, why.msg);
    mem_free(f.text);
    return ok;
}
