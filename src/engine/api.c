/*
 * Implements include/steel.h over the engine: translates structs and owns a request's private queue. Chats are in
 * api_chat.c.
 */
#include "engine/api_int.h"
#include "engine/images.h"
#include "backend/kv_type.h"
#include "backend/backend.h"
#include "base/version.h"
#include "base/mem.h"
#include "sample/dry_breakers.h"
#include "sample/sample_advice.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GRAMMARS_KEPT = 64 };

struct steel_queue {
    struct events *q;
};

struct steel_request {
    struct request *r;
    struct steel_queue *own; /* NULL: a shared queue */
    int n_open;              /* choices not done, as far as the reader has seen */
};

bool lib_fail(struct steel_error *out, enum steel_error_kind kind, const char *msg)
{
    if (out) {
        out->kind = kind;
        snprintf(out->message, sizeof out->message, "%s", msg);
    }
    return false;
}

int lib_put(const char *text, size_t len, char *out, int cap)
{
    if (len > INT32_MAX)
        return -1;
    if (cap > 0) {
        size_t n = len < (size_t)cap ? len : (size_t)cap - 1;
        if (n)
            memcpy(out, text, n);
        out[n] = 0;
    }
    return (int)len;
}

/* Reports progress on the caller's thread, because the engine's thread must not run the caller's code. */
static bool wait_ready(struct engine *e, const struct steel_engine_options *o, struct error *err)
{
    int percent, shown = -1;
    while (o->progress && engine_state(e, &percent, NULL) == ENGINE_LOADING) {
        if (percent != shown && !o->progress(o->progress_arg, percent))
            return error_set(err, "given up by the caller");
        shown = percent;
        engine_wait_ms(e, 20);
    }
    return engine_wait(e, err);
}

static void free_refs(struct adapter_ref *refs, int n)
{
    for (int i = 0; refs && i < n; i++)
        mem_free(refs[i].path);
    mem_free(refs);
}

static bool read_refs(const struct steel_engine_options *o, struct adapter_ref **out,
                      struct error *err)
{
    if (o->n_loras < 0 || o->max_lora_rank < 0 || o->max_lora_rank > LORA_MAX_RANK)
        return error_set(err, "n_loras or max_lora_rank is out of range");
    *out = o->n_loras ? mem_zalloc((size_t)o->n_loras, sizeof **out) : NULL;
    for (int i = 0; i < o->n_loras; i++)
        if (!adapter_ref_parse(o->loras[i], &(*out)[i], err))
            return error_prefix(err, "loras[%d]", i);
    return true;
}

struct steel_engine *steel_engine_open(const char *path, const struct steel_engine_options *options,
                                       struct steel_error *error)
{
    struct steel_engine_options o = {0};
    if (options)
        o = *options;
    const char *k = o.k_type ? o.k_type : o.kv_type, *v = o.v_type ? o.v_type : o.kv_type;
    enum dtype k_type = kv_type_from_name(k ? k : "f16"), v_type = kv_type_from_name(v ? v : "f16");
    if (k_type == DT_NONE || v_type == DT_NONE) {
        const char *field = k_type == DT_NONE ? (o.k_type ? "k_type" : "kv_type")
                            : o.v_type        ? "v_type"
                                              : "kv_type";
        char text[128];
        snprintf(text, sizeof text, "%s must be " KV_TYPE_NAMES, field);
        lib_fail(error, STEEL_INVALID, text);
        return NULL;
    }
    struct error err = {0};
    struct adapter_ref *refs = NULL;
    unsigned draft_from = !o.draft_from                    ? 0
                          : !strcmp(o.draft_from, "text")  ? 1u << DRAFT_TEXT
                          : !strcmp(o.draft_from, "head")  ? 1u << DRAFT_HEAD
                          : !strcmp(o.draft_from, "model") ? 1u << DRAFT_MODEL
                                                           : 1u << N_DRAFT_SOURCES;
    if (draft_from == 1u << N_DRAFT_SOURCES) {
        lib_fail(error, STEEL_INVALID, "draft_from must be text, head or model");
        return NULL;
    }
    if (!read_refs(&o, &refs, &err)) {
        lib_fail(error, STEEL_INVALID, err.msg);
        free_refs(refs, o.n_loras);
        return NULL;
    }
    struct engine_options opt = {
        .runtime = {.backend = {.device = o.device ? o.device : "auto",
                                .threads = o.threads,
                                .deterministic = o.deterministic,
                                .no_repack = o.no_repack,
                                .expert_memory = o.expert_bytes},
                    .context = o.context,
                    .max_seqs = o.max_requests,
                    .kv_bytes = o.kv_bytes,
                    .state_bytes = o.state_bytes,
                    .k_type = k_type,
                    .v_type = v_type,
                    .page_len = o.page_len,
                    .gpu_memory = o.gpu_memory,
                    .gpu_limit = o.gpu_bytes,
                    .offload = {o.host_layers, o.host_tensors},
                    .gpu_layers = o.gpu_layers,
                    .loras = refs,
                    .n_loras = o.n_loras,
                    .lora_rank = o.max_lora_rank,
                    .draft = o.draft == 0  ? DRAFT_AUTO
                             : o.draft < 0 ? 0
                                           : o.draft,
                    .draft_from = draft_from,
                    .draft_model = o.draft_model,
                    .draft_device = o.draft_device,
                    .images = o.images,
                    .mmproj = o.mmproj,
                    .image_features = o.max_image_tokens,
                    .profile = o.profile},
        .max_queue = o.max_queue,
        .max_per_client = o.max_per_client,
        .itl_ms = o.itl_ms,
        .ttft_ms = o.ttft_ms,
        .no_prefix_cache = o.no_prefix_cache,
    };
    struct engine *e = engine_open(path, &opt);
    bool ready = wait_ready(e, &o, &err);
    if (!ready) {
        lib_fail(error, STEEL_INVALID, err.msg);
        engine_close(e);
    }
    free_refs(refs, o.n_loras); /* the engine's thread has copied them, or has ended */
    if (!ready)
        return NULL;
    struct steel_engine *engine = mem_zalloc(1, sizeof *engine);
    engine->e = e;
    engine->grammars = grammar_cache_new(GRAMMARS_KEPT);
    return engine;
}

void steel_engine_close(struct steel_engine *engine)
{
    if (!engine)
        return;
    engine_close(engine->e);
    grammar_cache_free(engine->grammars);
    mem_free(engine);
}

static bool adapter_fail(struct steel_error *out, enum adapter_result res, const struct error *err)
{
    return lib_fail(out, res == ADAPTER_BUSY ? STEEL_FULL : STEEL_INVALID, err->msg);
}

static struct adapters *open_to_adapters(struct steel_engine *engine, struct steel_error *error)
{
    struct adapters *a = engine_adapters(engine->e);
    if (!a)
        lib_fail(error, STEEL_INVALID, "the engine was opened without adapters: max_lora_rank");
    return a;
}

bool steel_engine_load_lora(struct steel_engine *engine, const char *name, const char *path,
                            float scale, struct steel_error *error)
{
    struct error err = {0};
    struct adapters *a = open_to_adapters(engine, error);
    if (!a)
        return false;
    enum adapter_result res = adapters_load(a, name, path, scale, &err);
    return res == ADAPTER_OK || adapter_fail(error, res, &err);
}

bool steel_engine_unload_lora(struct steel_engine *engine, const char *name,
                              struct steel_error *error)
{
    struct error err = {0};
    struct adapters *a = open_to_adapters(engine, error);
    if (!a)
        return false;
    enum adapter_result res = adapters_unload(a, name, &err);
    return res == ADAPTER_OK || adapter_fail(error, res, &err);
}

int steel_engine_context(const struct steel_engine *engine)
{
    return engine_context(engine->e);
}

int steel_engine_n_vocab(const struct steel_engine *engine)
{
    return engine_info(engine->e).n_vocab;
}

void steel_engine_stats(struct steel_engine *engine, struct steel_stats *out)
{
    struct engine_stats s;
    engine_stats(engine->e, &s);
    *out = (struct steel_stats){
        .running = s.n_running,
        .waiting = s.n_waiting,
        .kv_pages = s.pages_total,
        .kv_pages_held = s.pages_held,
        .kv_pages_cached = s.pages_idle,
        .prompt_tokens = s.prompt_tokens,
        .cached_tokens = s.cache_hits,
        .generated_tokens = s.generated_tokens,
        .steps = s.n_steps,
        .preemptions = s.n_preempted,
        .cancellations = s.finished[FINISH_CANCEL],
    };
}

void steel_engine_info(const struct steel_engine *engine, struct steel_info *out)
{
    struct engine_info i = engine_info(engine->e);
    *out = (struct steel_info){
        .path = i.path,
        .family = i.architecture,
        .device = i.device,
        .notice = i.notice,
        .n_params = (uint64_t)i.n_params,
        .n_active = (uint64_t)i.n_active,
        .bytes = i.weight_bytes,
    };
}

int steel_engine_profile(const struct steel_engine *engine, char *text, int cap)
{
    const struct runtime *rt = engine_runtime(engine->e);
    char *table = NULL;
    size_t len = 0;
    FILE *f = rt->be->profile ? open_memstream(&table, &len) : NULL;
    if (f) {
        profile_print(&rt->profile, f);
        fclose(f);
    }
    int n = lib_put(table, len, text, cap);
    free(table);
    return n;
}

const struct tokenizer *lib_tokenizer(const struct steel_engine *engine, struct steel_error *error)
{
    struct error why;
    const struct tokenizer *t = engine_tokenizer(engine->e, &why);
    if (!t)
        lib_fail(error, STEEL_INVALID, why.msg);
    return t;
}

int steel_engine_tokenize(const struct steel_engine *engine, const char *text, size_t len,
                          int flags, int32_t *ids, int cap, struct steel_error *error)
{
    const struct tokenizer *t = lib_tokenizer(engine, error);
    struct token_list list = {0};
    struct error err = {0};
    int how = (flags & STEEL_PARSE_SPECIAL ? TOKENIZE_SPECIAL : 0) |
              (flags & STEEL_ADD_SPECIAL ? TOKENIZE_BOS : 0);
    int n = -1;
    if (t && !tokenizer_encode(t, text, len, how, &list, &err))
        lib_fail(error, STEEL_INVALID, err.msg);
    else if (t && list.n <= INT32_MAX)
        n = (int)list.n;
    for (int i = 0; i < n && i < cap; i++)
        ids[i] = list.ids[i];
    token_list_clear(&list);
    return n;
}

int steel_engine_detokenize(const struct steel_engine *engine, const int32_t *ids, int n,
                            char *text, int cap, struct steel_error *error)
{
    const struct tokenizer *t = lib_tokenizer(engine, error);
    if (!t)
        return -1;
    for (int i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= tokenizer_n_vocab(t)) {
            lib_fail(error, STEEL_INVALID, "a token id outside the vocabulary");
            return -1;
        }
    struct buf out = {0};
    tokenizer_decode(t, ids, (size_t)n, true, &out);
    int len = out.len <= INT32_MAX ? (int)out.len : -1;
    if (cap > 0 && len > 0)
        memcpy(text, out.p, (size_t)(len < cap ? len : cap));
    if (len >= 0 && len < cap)
        text[len] = 0;
    buf_clear(&out);
    return len;
}

static struct steel_request_options options_of(const struct sample_params *p)
{
    return (struct steel_request_options){.temperature = p->temp,
                                          .top_k = p->top_k,
                                          .top_p = p->top_p,
                                          .min_p = p->min_p,
                                          .repeat_penalty = p->repeat_penalty,
                                          .repeat_last_n = p->repeat_last_n,
                                          .typical_p = p->typical_p,
                                          .xtc_threshold = p->xtc_threshold,
                                          .dynatemp_exponent = p->dynatemp_exponent,
                                          .mirostat_tau = p->mirostat_tau,
                                          .mirostat_eta = p->mirostat_eta,
                                          .dry_base = p->dry_base,
                                          .dry_allowed_length = p->dry_allowed_length,
                                          .dry_last_n = p->dry_last_n,
                                          .thinking_budget = -1,
                                          .top_logprobs = -1};
}

struct steel_request_options steel_request_options(void)
{
    struct sample_params p = sample_params_default();
    return options_of(&p);
}

struct steel_request_options steel_engine_request_options(const struct steel_engine *engine)
{
    struct sample_params p = sample_params_unset();
    sample_params_advise(&p, engine_file(engine->e));
    return options_of(&p);
}

static enum steel_error_kind kind_of(enum submit_result res)
{
    static const enum steel_error_kind kinds[] = {[SUBMIT_OK] = STEEL_OK,
                                                  [SUBMIT_INVALID] = STEEL_INVALID,
                                                  [SUBMIT_TOO_LONG] = STEEL_TOO_LONG,
                                                  [SUBMIT_FULL] = STEEL_FULL,
                                                  [SUBMIT_NOT_READY] = STEEL_NOT_READY};
    return kinds[res];
}

_Static_assert(sizeof(struct steel_bias) == sizeof(struct logit_bias) &&
                   offsetof(struct steel_bias, bias) == offsetof(struct logit_bias, bias),
               "the public bias is the sampler's");
_Static_assert(sizeof(struct steel_logprob) == sizeof(struct token_prob) &&
                   offsetof(struct steel_logprob, logprob) == offsetof(struct token_prob, logprob),
               "the public log-probability is the engine's");

int lib_constraint(const struct steel_request_options *o, struct grammar_source *src,
                   struct steel_error *error)
{
    const struct {
        const char *name, *text;
        enum grammar_kind kind;
    } rows[] = {{"json_schema", o->json_schema, GRAMMAR_SCHEMA},
                {"json", o->json ? "" : NULL, GRAMMAR_JSON_OBJECT},
                {"regex", o->regex, GRAMMAR_REGEX},
                {"grammar", o->grammar, GRAMMAR_GBNF},
                {"one_of", o->one_of, GRAMMAR_CHOICE}};
    const char *first = NULL;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct error err = {0};
        if (!rows[i].text)
            continue;
        if (first) {
            error_set(&err, "%s and %s: an answer has one constraint", first, rows[i].name);
            lib_fail(error, STEEL_INVALID, err.msg);
            return -1;
        }
        first = rows[i].name;
        *src = (struct grammar_source){.kind = rows[i].kind,
                                       .flags = GRAMMAR_SCHEMA_ORDER,
                                       .text = rows[i].text,
                                       .len = strlen(rows[i].text)};
    }
    return first != NULL;
}

struct steel_request *steel_request_submit(struct steel_engine *engine,
                                           const struct steel_request_options *o,
                                           struct steel_error *error)
{
    struct grammar_source src;
    struct error err = {0};
    int fits = lib_constraint(o, &src, error);
    struct grammar *g = fits > 0 ? grammar_cache_get(engine->grammars, &src, NULL, &err) : NULL;
    if (fits > 0 && !g)
        lib_fail(error, STEEL_INVALID, err.msg);
    return fits < 0 || (fits && !g) ? NULL : lib_submit(engine, o, g, NULL, NULL, error);
}

/* Encodes the prompt if it is a text. */
static bool encode_prompt(struct steel_engine *engine, const struct steel_request_options *o,
                          struct token_list *out, struct steel_error *error)
{
    struct error err = {0};
    if (!o->text)
        return true;
    const struct tokenizer *t = lib_tokenizer(engine, error);
    if (!t)
        return false;
    size_t len = o->n_text ? o->n_text : strlen(o->text);
    if (!tokenizer_encode(t, o->text, len, TOKENIZE_SPECIAL | TOKENIZE_BOS, out, &err))
        return lib_fail(error, STEEL_INVALID, err.msg);
    if (out->n == 0 && tokenizer_bos(t) >= 0) /* an empty prompt starts with BOS */
        token_list_add(out, tokenizer_bos(t));
    return true;
}

/* The parameters of sampling. `breakers` gets the tokens of DRY's texts. */
static bool read_sampling(struct steel_engine *engine, const struct steel_request_options *o,
                          struct sample_params *p, struct token_list *breakers,
                          struct steel_error *error)
{
    struct error err = {0};
    *p = (struct sample_params){.temp = o->temperature,
                                .top_k = o->top_k,
                                .top_p = o->top_p,
                                .min_p = o->min_p,
                                .repeat_penalty = o->repeat_penalty,
                                .presence_penalty = o->presence_penalty,
                                .frequency_penalty = o->frequency_penalty,
                                .repeat_last_n = o->repeat_last_n,
                                .seed = o->seed,
                                .bias = (const struct logit_bias *)o->bias,
                                .n_bias = o->n_bias,
                                .typical_p = o->typical_p,
                                .top_n_sigma = o->top_n_sigma,
                                .xtc_probability = o->xtc_probability,
                                .xtc_threshold = o->xtc_threshold,
                                .dynatemp_range = o->dynatemp_range,
                                .dynatemp_exponent = o->dynatemp_exponent,
                                .mirostat = o->mirostat,
                                .mirostat_tau = o->mirostat_tau,
                                .mirostat_eta = o->mirostat_eta,
                                .dry_multiplier = o->dry_multiplier,
                                .dry_base = o->dry_base,
                                .dry_allowed_length = o->dry_allowed_length,
                                .dry_last_n = o->dry_last_n};
    if (o->samplers && !sample_order_parse(o->samplers, &p->order, &err))
        return lib_fail(error, STEEL_INVALID, err.msg);
    if (o->dry_multiplier == 0)
        return true;
    const struct tokenizer *t = engine_tokenizer(engine->e, NULL);
    bool own = o->dry_breakers != NULL;
    if (t)
        dry_breakers_find(t, own ? o->dry_breakers : dry_default_breakers,
                          own ? o->n_dry_breakers : DRY_DEFAULT_BREAKERS, breakers);
    p->dry_breakers = breakers->ids;
    p->n_dry_breakers = (int)breakers->n;
    return true;
}

struct steel_request *lib_submit(struct steel_engine *engine, const struct steel_request_options *o,
                                 struct grammar *fit, struct token_rules *rules,
                                 const struct prompt_images *images, struct steel_error *error)
{
    struct token_list prompt = {0}, breakers = {0};
    struct error err = {0};
    struct sample_params sample;
    bool ok = read_sampling(engine, o, &sample, &breakers, error) &&
              encode_prompt(engine, o, &prompt, error);
    struct steel_queue *own = o->queue || !ok ? NULL : steel_queue_new();
    if (ok && !o->queue && !own)
        ok = lib_fail(error, STEEL_NOT_READY, "no file descriptor is left for a queue");
    if (!ok) {
        token_list_clear(&prompt);
        token_list_clear(&breakers);
        grammar_free(fit);
        return NULL;
    }
    struct steel_request *r = mem_zalloc(1, sizeof *r);
    r->own = own;
    struct request_spec spec = {
        .prompt = o->text ? prompt.ids : o->tokens,
        .n_prompt = o->text ? (int)prompt.n : o->n_tokens,
        .n = o->choices,
        .sample = sample,
        .max_tokens = o->max_tokens,
        .min_tokens = o->min_tokens,
        .ignore_eos = o->ignore_eos,
        .special = o->show_special,
        .read_only = o->read_only,
        .logprobs = o->top_logprobs >= 0,
        .n_top = o->top_logprobs > 0 ? o->top_logprobs : 0,
        .stop = o->stop,
        .n_stop = o->n_stop,
        .client = o->client,
        .salt = o->cache_salt,
        .queue = o->queue ? o->queue->q : r->own->q,
        .user = o->user,
        .grammar = fit,
        .rules = rules,
    };
    prompt_images_submit(images, &spec);
    enum submit_result res = SUBMIT_INVALID;
    if (!o->lora ||
        adapters_parse(engine_adapters(engine->e), o->lora, spec.loras, &spec.n_loras, &err))
        res = engine_submit(engine->e, &spec, &r->r, &err);
    token_list_clear(&prompt);
    token_list_clear(&breakers);
    grammar_free(fit);
    r->n_open = o->choices > 0 ? o->choices : 1;
    if (res == SUBMIT_OK)
        return r;
    lib_fail(error, kind_of(res), err.msg);
    steel_queue_free(r->own);
    mem_free(r);
    return NULL;
}

void steel_request_cancel(struct steel_request *request)
{
    request_cancel(request->r);
}

void steel_request_free(struct steel_request *request)
{
    if (!request)
        return;
    struct steel_event ev;
    if (request->own && request->n_open)
        request_cancel(request->r);
    while (request->own && request->n_open)
        steel_request_next(request, &ev, -1);
    request_free(request->r);
    steel_queue_free(request->own);
    mem_free(request);
}

static void translate(const struct engine_event *in, struct steel_event *out)
{
    *out = (struct steel_event){
        .kind = (enum steel_event_kind)in->kind,
        .user = in->user,
        .choice = in->index,
        .token = in->token,
        .text = in->text,
        .n_text = in->n_text,
        .logprob = in->logprob,
        .top = (const struct steel_logprob *)in->top,
        .n_top = in->n_top,
        .finish = (enum steel_finish)in->finish,
        .error = in->error,
        .n_prompt = in->usage.n_prompt,
        .n_cached = in->usage.n_cached,
        .n_generated = in->usage.n_generated,
        .queue_s = (double)in->usage.queue_ns * 1e-9,
        .first_token_s = (double)in->usage.first_ns * 1e-9,
        .total_s = (double)in->usage.total_ns * 1e-9,
    };
    for (int i = 0; i < N_DRAFT_SOURCES; i++) {
        out->n_drafted += in->usage.drafts[i].drafted;
        out->n_accepted += in->usage.drafts[i].accepted;
    }
}
_Static_assert((int)STEEL_STARTED == (int)EVENT_START && (int)STEEL_DONE == (int)EVENT_DONE &&
                   (int)STEEL_FAILED == (int)FINISH_ERROR &&
                   (int)STEEL_CANCELLED == (int)FINISH_CANCEL,
               "public and internal enums agree");

bool steel_queue_next(struct steel_queue *queue, struct steel_event *event, int timeout_ms)
{
    struct engine_event ev;
    if (!events_next(queue->q, &ev, timeout_ms))
        return false;
    translate(&ev, event);
    return true;
}

bool steel_request_next(struct steel_request *request, struct steel_event *event, int timeout_ms)
{
    if (!request->own || !request->n_open || !steel_queue_next(request->own, event, timeout_ms))
        return false;
    request->n_open -= event->kind == STEEL_DONE;
    return true;
}

bool steel_request_done(const struct steel_request *request)
{
    return request->n_open == 0;
}

int steel_request_fd(const struct steel_request *request)
{
    return request->own ? steel_queue_fd(request->own) : -1;
}

struct steel_queue *steel_queue_new(void)
{
    struct events *events = events_new();
    if (!events)
        return NULL;
    struct steel_queue *q = mem_zalloc(1, sizeof *q);
    q->q = events;
    return q;
}

int steel_queue_fd(const struct steel_queue *queue)
{
    return events_fd(queue->q);
}

void steel_queue_free(struct steel_queue *queue)
{
    if (!queue)
        return;
    events_free(queue->q);
    mem_free(queue);
}

const char *steel_version(void)
{
    return version_number();
}
