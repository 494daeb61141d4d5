/*
 * Whether and how much a model thinks before it answers, as all APIs say it: switches, efforts and
 * budgets. Settings that the template knows are passed to it. The others are enforced while
 * tokens are generated, by a limit on thinking (engine/token_rules.h).
 */
#include "server/api/prepare_int.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

static const char *const thinking_fields[] = {"enable_thinking",
                                              "thinking",
                                              "reasoning",
                                              "reasoning_effort",
                                              "reasoning_budget",
                                              "thinking_budget",
                                              "thinking_budget_tokens",
                                              "thinking_token_budget",
                                              "chat_template_kwargs",
                                              NULL};

void thinking_copy(const json_t *from, json_t *to)
{
    for (int i = 0; thinking_fields[i]; i++)
        if (api_member(from, thinking_fields[i]) && !json_object_get(to, thinking_fields[i]))
            json_object_set(to, thinking_fields[i], (json_t *)api_member(from, thinking_fields[i]));
}

struct wish {
    bool on, off;
    int budget; /* -1 = none */
    const char *effort;
};

/* A member of an object, with errors that name both. */
static bool read_budget(const json_t *o, const char *outer, const char *name, int *out,
                        struct api_error *err)
{
    bool ok = api_int(o, name, -1, INT_MAX, out, err);
    if (!ok && outer)
        snprintf(err->param, sizeof err->param, "%s.%s", outer, name);
    return ok;
}

static bool read_switches(const json_t *body, struct wish *w, struct api_error *err)
{
    const json_t *thinking = api_member(body, "thinking");
    const json_t *reasoning = api_member(body, "reasoning");
    const char *type = json_string_value(json_object_get(thinking, "type"));
    bool enable = false, enabled = true, exclude = false;
    if (!api_bool(body, "enable_thinking", &enable, err))
        return false;
    w->on = enable;
    w->off = api_member(body, "enable_thinking") && !enable;
    if (thinking && !type)
        return api_invalid(err, "thinking", "thinking must be an object with a type");
    if (type && strcmp(type, "enabled") && strcmp(type, "disabled") && strcmp(type, "adaptive"))
        return api_invalid(err, "thinking.type",
                           "thinking.type must be enabled, disabled or adaptive");
    w->on |= type && !strcmp(type, "enabled");
    w->off |= type && !strcmp(type, "disabled");
    if (reasoning && !json_is_object(reasoning))
        return api_invalid(err, "reasoning", "reasoning must be an object");
    if (!api_bool(reasoning, "enabled", &enabled, err) ||
        !api_bool(reasoning, "exclude", &exclude, err))
        return false;
    if (exclude)
        return api_invalid(err, "reasoning.exclude", "reasoning.exclude is not supported");
    w->on |= api_member(reasoning, "enabled") && enabled;
    w->off |= !enabled;
    return api_effort(body, "reasoning_effort", "reasoning_effort", &w->effort, err) &&
           api_effort(reasoning, "effort", "reasoning.effort", &w->effort, err) &&
           read_budget(body, NULL, "reasoning_budget", &w->budget, err) &&
           read_budget(body, NULL, "thinking_budget", &w->budget, err) &&
           read_budget(body, NULL, "thinking_budget_tokens", &w->budget, err) &&
           read_budget(body, NULL, "thinking_token_budget", &w->budget, err) &&
           read_budget(thinking, "thinking", "budget_tokens", &w->budget, err) &&
           read_budget(reasoning, "reasoning", "max_tokens", &w->budget, err);
}

bool thinking_read(const struct chat *chat, const json_t *body, json_t **kwargs, int *budget,
                   struct api_error *err)
{
    const json_t *given = api_member(body, "chat_template_kwargs");
    struct wish w = {.budget = -1};
    if (given && !json_is_object(given))
        return api_invalid(err, "chat_template_kwargs", "chat_template_kwargs must be an object");
    *kwargs = given ? json_copy((json_t *)given) : json_object();
    if (!read_switches(body, &w, err))
        return false;
    w.off |= w.budget == 0 || (w.effort && !strcmp(w.effort, "none")) ||
             json_is_false(json_object_get(given, "enable_thinking"));
    if (w.on || w.off)
        json_object_set_new(*kwargs, "enable_thinking", json_boolean(!w.off));
    if (w.off || w.effort)
        chat_set_effort(chat, w.off ? "none" : w.effort, *kwargs);
    const json_t *set = json_object_get(*kwargs, "enable_thinking");
    if (set && !json_object_get(*kwargs, "thinking")) /* the name in some templates */
        json_object_set(*kwargs, "thinking", (json_t *)set);
    *budget = w.off ? 0 : w.budget;
    if (*budget > 0)
        chat_set_budget(chat, *budget, *kwargs);
    return true;
}
