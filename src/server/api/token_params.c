/* Parameters that need the vocabulary: words become tokens, and a limit on thinking its text. On the
 * worker, after the prompt is prepared. */
#include "server/api/prepare_int.h"
#include "base/mem.h"
#include "sample/dry_breakers.h"

#include <string.h>

/* Keeps the last tokens of prompts. */
static bool truncate_prompts(struct api_request *req)
{
    int context = engine_context(req->loaded->engine);
    int most = req->p.truncate_prompt;
    for (int i = 0; most && i < req->n_prompts; i++) {
        struct token_list *l = &req->prompts[i];
        size_t keep = (size_t)(most > 0 && most < context ? most : context - 1);
        if (req->p.max_tokens > 0 && most < 0 && keep > (size_t)req->p.max_tokens)
            keep = (size_t)(context - req->p.max_tokens);
        if (l->n <= keep)
            continue;
        memmove(l->ids, l->ids + l->n - keep, keep * sizeof *l->ids);
        l->n = keep;
    }
    return true;
}

/* Ollama's num_ctx. Nothing is cut: a prompt that is too long is refused. */
static bool bound_context(struct api_request *req)
{
    struct gen_params *p = &req->p;
    size_t most = (size_t)p->context;
    if (!p->context || !req->n_prompts)
        return true;
    if (req->prompts[0].n >= most) {
        api_invalid(&req->err, "num_ctx",
                    "num_ctx: the request's maximum context length is %zu tokens. However, its "
                    "prompt resulted in %zu tokens, and the answer must fit, too",
                    most, req->prompts[0].n);
        req->err.code = "context_length_exceeded";
        return false;
    }
    int left = (int)(most - req->prompts[0].n);
    p->max_tokens = p->max_tokens > 0 && p->max_tokens < left ? p->max_tokens : left;
    return true;
}

static void find_breakers(struct api_request *req, const struct tokenizer *t)
{
    struct gen_params *p = &req->p;
    const struct server_options *o = &req->server->opt;
    const char *const *texts = o->dry_breakers ? o->dry_breakers : dry_default_breakers;
    int n = o->dry_breakers ? o->n_dry_breakers : DRY_DEFAULT_BREAKERS;
    struct token_list found = {0};
    if (p->sample.dry_multiplier == 0 || !t || p->sample.dry_breakers)
        return;
    if (p->has_breakers) {
        texts = (const char *const *)p->breakers.v;
        n = p->breakers.n;
    }
    dry_breakers_find(t, texts, n, &found);
    p->sample.dry_breakers = found.ids;
    p->sample.n_dry_breakers = (int)found.n;
}

bool api_request_resolve(struct api_request *req)
{
    struct gen_params *p = &req->p;
    const struct tokenizer *t = engine_tokenizer(req->loaded->engine, NULL);
    struct think_limit limit;
    bool limited = req->chat && req->chat->thinking != CHAT_THINKS_NOT && req->chat->budget >= 0;
    if (p->bad_words.n && !t)
        return api_invalid(&req->err, "bad_words", "bad_words: this model has no vocabulary");
    find_breakers(req, t);
    if (limited)
        limit =
            think_limit_of(chat_marks_of(req->chat->format, req->chat->thoughts, req->chat->tools),
                           req->chat->in_reasoning, req->chat->budget);
    if (limited || p->bad_words.n || p->has_allowed)
        req->rules = token_rules_new(t, p->has_allowed ? &p->allowed : NULL,
                                     (const char *const *)p->bad_words.v, p->bad_words.n,
                                     limited ? &limit : NULL);
    return truncate_prompts(req) && bound_context(req);
}
