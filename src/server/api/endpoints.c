/* The table of endpoints and its lookup. See endpoints.h. */
#include "server/api/endpoints.h"
#include "server/api/embeddings.h"
#include "server/api/lora_endpoints.h"
#include "server/api/models_made.h"
#include "server/api/pulls.h"
#include "server/api/prepare_int.h"

#include <stdio.h>
#include <string.h>

#define GET    .method = "GET", .effect = ENDPOINT_READS
#define POST   .method = "POST"
#define DELETE .method = "DELETE"

const struct endpoint endpoints[] = {
    /* the server itself */
    {GET, .paths = {"/", "/index.html"}, .name = "page", .open = true, .respond = get_page},
    {GET, .paths = {"/web/*"}, .name = "page file", .open = true, .respond = get_page_file},
    {GET, .paths = {"/health", "/v1/health", "/ping"}, .name = "health", .open = true,
     .gateway = GATEWAY_RESPONDS, .respond = get_health},
    {GET, .paths = {"/metrics"}, .name = "metrics", .gateway = GATEWAY_MERGES_METRICS,
     .respond = get_metrics},

    {GET, .paths = {"/version"}, .name = "version", .open = true, .respond = get_version},
    {GET, .paths = {"/openapi.json"}, .name = "openapi", .open = true, .respond = get_openapi},

    /* OpenAI */
    {GET, .paths = {"/v1/models", "/models"}, .name = "models", .gateway = GATEWAY_MERGES_LISTS,
     .list = "data", .list_id = "id", .respond = get_models},
    {GET, .paths = {"/v1/models/*"}, .name = "model", .respond = get_model},
    {POST,
     .paths = {"/v1/chat/completions", "/chat/completions",
               "/openai/deployments/*/chat/completions" /* Azure's */},
     .name = "chat", .effect = ENDPOINT_GENERATES, .model = ENDPOINT_TEXT, .prepare = prepare_chat,
     .reply = &reply_chat, .id_prefix = "chatcmpl-", .prompt_field = "messages"},
    {POST, .paths = {"/v1/completions"}, .name = "completions", .effect = ENDPOINT_GENERATES,
     .model = ENDPOINT_TEXT, .prepare = prepare_completions, .reply = &reply_completions,
     .id_prefix = "cmpl-", .prompt_field = "prompt"},
    {POST, .paths = {"/v1/responses", "/responses"}, .name = "responses",
     .effect = ENDPOINT_GENERATES, .model = ENDPOINT_TEXT, .creates_kept = true,
     .prepare = prepare_responses, .reply = &reply_responses, .id_prefix = "resp_",
     .prompt_field = "input"},
    {POST, .paths = {"/v1/responses/input_tokens"}, .name = "responses count",
     .effect = ENDPOINT_COMPUTES, .model = ENDPOINT_TEXT, .prepare = prepare_responses_count,
     .id_prefix = "resp_"},
    {POST, .paths = {"/v1/chat/completions/input_tokens"}, .name = "chat count",
     .effect = ENDPOINT_COMPUTES, .model = ENDPOINT_TEXT, .prepare = prepare_chat_count},
    {GET, .paths = {"/v1/responses/*"}, .name = "response", .names_kept = true,
     .respond = get_response},
    {GET, .paths = {"/v1/responses/*/input_items"}, .name = "response items", .names_kept = true,
     .respond = get_response_items},
    {DELETE, .paths = {"/v1/responses/*"}, .name = "delete response", .effect = ENDPOINT_CHANGES,
     .names_kept = true, .respond = delete_response},
    {POST, .paths = {"/v1/responses/*/cancel"}, .name = "cancel response",
     .effect = ENDPOINT_CHANGES, .names_kept = true, .respond = post_response_cancel},
    {POST, .paths = {"/v1/conversations"}, .name = "conversation", .effect = ENDPOINT_CHANGES,
     .creates_kept = true, .body_optional = true, .prepare = prepare_conversation_new,
     .id_prefix = "conv_"},
    {GET, .paths = {"/v1/conversations/*"}, .name = "get conversation", .names_kept = true,
     .respond = get_conversation},
    {POST, .paths = {"/v1/conversations/*"}, .name = "update conversation", .names_kept = true,
     .effect = ENDPOINT_CHANGES, .prepare = prepare_conversation_update},
    {DELETE, .paths = {"/v1/conversations/*"}, .name = "delete conversation", .names_kept = true,
     .effect = ENDPOINT_CHANGES, .respond = delete_conversation},
    {GET, .paths = {"/v1/conversations/*/items"}, .name = "conversation items", .names_kept = true,
     .respond = get_conversation_items},
    {POST, .paths = {"/v1/conversations/*/items"}, .name = "add conversation items",
     .names_kept = true, .effect = ENDPOINT_CHANGES, .prepare = prepare_conversation_items,
     .id_prefix = "msg_"},
    {GET, .paths = {"/v1/conversations/*/items/*"}, .name = "conversation item", .names_kept = true,
     .respond = get_conversation_item},
    {DELETE, .paths = {"/v1/conversations/*/items/*"}, .name = "delete conversation item",
     .names_kept = true, .effect = ENDPOINT_CHANGES, .respond = delete_conversation_item},
    {POST, .paths = {"/v1/embeddings", "/embeddings", "/openai/deployments/*/embeddings"},
     .name = "embeddings", .effect = ENDPOINT_COMPUTES, .model = ENDPOINT_EMBED,
     .prepare = prepare_embeddings},
    {POST, .paths = {"/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking"},
     .name = "rerank", .effect = ENDPOINT_COMPUTES, .model = ENDPOINT_RERANK,
     .prepare = prepare_rerank, .id_prefix = "rerank-"},

    /* Anthropic */
    {POST, .paths = {"/v1/messages"}, .name = "messages", .dialect = DIALECT_ANTHROPIC,
     .effect = ENDPOINT_GENERATES, .model = ENDPOINT_TEXT, .prepare = prepare_anthropic,
     .reply = &reply_anthropic, .id_prefix = "msg_", .prompt_field = "messages"},
    {POST, .paths = {"/v1/messages/count_tokens"}, .name = "count_tokens",
     .dialect = DIALECT_ANTHROPIC, .effect = ENDPOINT_COMPUTES, .model = ENDPOINT_TEXT,
     .prepare = prepare_count},

    /* Ollama */
    {POST, .paths = {"/api/chat"}, .name = "ollama chat", .dialect = DIALECT_OLLAMA,
     .effect = ENDPOINT_GENERATES, .model = ENDPOINT_TEXT, .prepare = prepare_ollama_chat,
     .reply = &reply_ollama_chat, .prompt_field = "messages"},
    {POST, .paths = {"/api/generate"}, .name = "ollama generate", .dialect = DIALECT_OLLAMA,
     .effect = ENDPOINT_GENERATES, .model = ENDPOINT_TEXT, .prepare = prepare_ollama_generate,
     .reply = &reply_ollama_generate, .prompt_field = "prompt"},
    {POST, .paths = {"/api/embed"}, .name = "ollama embed", .dialect = DIALECT_OLLAMA,
     .effect = ENDPOINT_COMPUTES, .model = ENDPOINT_EMBED, .prepare = prepare_ollama_embed},
    {POST, .paths = {"/api/embeddings"}, /* the older form */
     .name = "ollama embeddings", .dialect = DIALECT_OLLAMA, .effect = ENDPOINT_COMPUTES,
     .model = ENDPOINT_EMBED, .prepare = prepare_ollama_embeddings},
    {POST, .paths = {"/api/show"}, .name = "ollama show", .dialect = DIALECT_OLLAMA,
     .effect = ENDPOINT_COMPUTES, .model = ENDPOINT_TEXT, .prepare = prepare_ollama_show},
    {GET, .paths = {"/api/tags"}, .name = "ollama tags", .dialect = DIALECT_OLLAMA,
     .gateway = GATEWAY_MERGES_LISTS, .list = "models", .list_id = "name",
     .respond = get_ollama_tags},
    {GET, .paths = {"/api/ps"}, .name = "ollama ps", .dialect = DIALECT_OLLAMA,
     .respond = get_ollama_ps},
    {POST, .paths = {"/api/pull"}, .name = "pull", .dialect = DIALECT_OLLAMA,
     .effect = ENDPOINT_CHANGES, .respond = post_pull},
    {POST, .paths = {"/api/create"}, .name = "create", .dialect = DIALECT_OLLAMA,
     .effect = ENDPOINT_CHANGES, .slow = true, .prepare = prepare_create},
    {POST, .paths = {"/api/copy"}, .name = "copy", .dialect = DIALECT_OLLAMA,
     .effect = ENDPOINT_CHANGES, .slow = true, .prepare = prepare_copy},
    {DELETE, .paths = {"/api/delete"}, .name = "delete", .dialect = DIALECT_OLLAMA,
     .effect = ENDPOINT_CHANGES, .slow = true, .prepare = prepare_delete},
    {GET, .paths = {"/api/version"}, .name = "ollama version", .dialect = DIALECT_OLLAMA,
     .open = true, .respond = get_ollama_version},

    /* llama.cpp and vLLM */
    {POST, .paths = {"/completion", "/completions"}, .name = "completion",
     .effect = ENDPOINT_GENERATES, .model = ENDPOINT_TEXT, .prepare = prepare_completion,
     .reply = &reply_llamacpp, .prompt_field = "prompt"},
    {POST, .paths = {"/infill"}, .name = "infill", .effect = ENDPOINT_GENERATES,
     .model = ENDPOINT_TEXT, .prepare = prepare_infill, .reply = &reply_llamacpp,
     .prompt_field = "input_prefix"},
    {POST, .paths = {"/models/load"}, .name = "load model", .effect = ENDPOINT_COMPUTES,
     .model = ENDPOINT_ANY, .prepare = prepare_model_load},
    {POST, .paths = {"/models/unload"}, .name = "unload model", .effect = ENDPOINT_CHANGES,
     .prepare = prepare_model_unload},
    {GET, .paths = {"/props"}, .name = "props", .respond = get_props},
    {GET, .paths = {"/slots"}, .name = "slots", .respond = get_slots},
    {POST, .paths = {"/slots/*"}, .name = "slot action", .body_optional = true, .slow = true,
     .model = ENDPOINT_TEXT, .prepare = prepare_slot_action},
    {POST, .paths = {"/embedding"}, .name = "embedding", .effect = ENDPOINT_COMPUTES,
     .model = ENDPOINT_EMBED, .prepare = prepare_llamacpp_embedding},
    {POST, .paths = {"/tokenize"}, .name = "tokenize", .effect = ENDPOINT_COMPUTES,
     .model = ENDPOINT_TEXT, .prepare = prepare_tokenize},
    {POST, .paths = {"/detokenize"}, .name = "detokenize", .effect = ENDPOINT_COMPUTES,
     .model = ENDPOINT_TEXT, .prepare = prepare_detokenize},
    {POST, .paths = {"/apply-template"}, .name = "template", .effect = ENDPOINT_COMPUTES,
     .model = ENDPOINT_TEXT, .prepare = prepare_template},
    {POST, .paths = {"/v1/load_lora_adapter"}, .name = "load adapter", .effect = ENDPOINT_CHANGES,
     .model = ENDPOINT_TEXT, .slow = true, .prepare = prepare_load_lora},
    {POST, .paths = {"/v1/unload_lora_adapter"}, .name = "unload adapter",
     .effect = ENDPOINT_CHANGES, .model = ENDPOINT_TEXT, .prepare = prepare_unload_lora},
    {GET, .paths = {"/lora-adapters"}, .name = "adapters", .respond = get_lora_adapters},

    /* tools of MCP servers */
    {GET, .paths = {"/mcp/tools"}, .name = "mcp tools", .respond = get_mcp_tools},
    {POST, .paths = {"/mcp/call"}, .name = "mcp call", .effect = ENDPOINT_CHANGES,
     .prepare = prepare_mcp_call},

    /* theirs alone */
    {POST, .paths = {"/score", "/classify"}, .name = "-", .effect = ENDPOINT_COMPUTES},
};
const int n_endpoints = sizeof endpoints / sizeof *endpoints;

static bool path_fits(const char *pattern, const char *path)
{
    const char *star = strchr(pattern, '*');
    if (!star)
        return !strcmp(pattern, path);
    size_t before = (size_t)(star - pattern);
    if (strncmp(pattern, path, before))
        return false;
    for (path += before; *path;) /* a star is not empty */
        if (path_fits(star + 1, ++path))
            return true;
    return false;
}

/* The length of the longest of e's paths that fits, 0 = none. nested: path may begin with a prefix. */
static size_t fit_of(const struct endpoint *e, const char *path, bool nested)
{
    size_t best = 0;
    for (const char *from = path; from; from = nested ? strchr(from + 1, '/') : NULL)
        for (int i = 0; i < ENDPOINT_MAX_PATHS && e->paths[i]; i++) {
            size_t n = strlen(e->paths[i]);
            if (n > best && path_fits(e->paths[i], from))
                best = n;
        }
    return best;
}

static bool is_served(const struct endpoint *e)
{
    return e->respond || e->prepare;
}

static const char *method_of(const struct http_head *h)
{
    return !strcmp(h->method, "HEAD") ? "GET" : h->method;
}

const char *endpoint_path(const struct http_head *h)
{
    static const char azure[] = "/openai"; /* before /v1/ */
    size_t n = sizeof azure - 1;
    return strncmp(h->path, azure, n) || strncmp(h->path + n, "/v1/", 4) ? h->path : h->path + n;
}

const struct endpoint *endpoint_find(const struct http_head *h, char allow[ENDPOINT_ALLOW_SIZE])
{
    const struct endpoint *found = NULL;
    size_t best = 0, n_allow = 0;
    if (allow)
        allow[0] = 0;
    for (int i = 0; i < n_endpoints; i++) {
        const struct endpoint *e = &endpoints[i];
        size_t n = is_served(e) ? fit_of(e, endpoint_path(h), false) : 0;
        if (n > best && !strcmp(e->method, method_of(h))) {
            found = e;
            best = n;
        }
        if (n && allow && !strstr(allow, e->method))
            n_allow += (size_t)snprintf(allow + n_allow, ENDPOINT_ALLOW_SIZE - n_allow, "%s%s",
                                        n_allow ? ", " : "",
                                        strcmp(e->method, "GET") ? e->method : "GET, HEAD");
    }
    return found;
}

const struct endpoint *endpoint_find_forwarded(const struct http_head *h)
{
    const struct endpoint *found = NULL;
    size_t best = 0;
    for (int i = 0; i < n_endpoints; i++) {
        size_t n = fit_of(&endpoints[i], h->path, true);
        if (n > best && !strcmp(endpoints[i].method, method_of(h))) {
            found = &endpoints[i];
            best = n;
        }
    }
    return found;
}

enum dialect endpoint_dialect(const struct http_head *h)
{
    for (int i = 0; h->path && i < n_endpoints; i++)
        if (endpoints[i].dialect != DIALECT_OPENAI && fit_of(&endpoints[i], h->path, true))
            return endpoints[i].dialect;
    if (h->path && !strncmp(h->path, "/api/", 5)) /* an unknown one */
        return DIALECT_OLLAMA;
    return http_header(h, "anthropic-version") ? DIALECT_ANTHROPIC : DIALECT_OPENAI;
}
