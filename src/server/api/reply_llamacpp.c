/* Replies of llama.cpp's /completion and /infill. The last event of a stream has the members of a whole
 * reply; there is no [DONE]. */
#include "server/api/server_int.h"

#include <math.h>
#include <string.h>

static const struct tokenizer *tokenizer_of(const struct api_request *req)
{
    return engine_tokenizer(req->loaded->engine, NULL);
}

static void add_bool(struct buf *b, const char *name, bool v)
{
    buf_addf(b, ",\"%s\":%s", name, v ? "true" : "false");
}

static void add_number(struct buf *b, const char *name, double v)
{
    buf_addf(b, ",\"%s\":", name);
    jsonout_number(b, v);
}

static void add_ids(struct buf *b, const int32_t *ids, size_t n)
{
    buf_addc(b, '[');
    for (size_t i = 0; i < n; i++)
        buf_addf(b, i ? ",%d" : "%d", ids[i]);
    buf_addc(b, ']');
}

void llamacpp_add_settings(const struct gen_params *p, const struct completion_options *o,
                           struct buf *b)
{
    const struct sample_params *s = &p->sample;
    int most = p->max_tokens || p->no_answer ? p->max_tokens : -1;
    buf_addf(b, "{\"n_predict\":%d,\"max_tokens\":%d,\"seed\":%lld", most, most,
             (long long)s->seed);
    add_number(b, "temperature", (double)s->temp);
    buf_addf(b, ",\"top_k\":%d", s->top_k);
    add_number(b, "top_p", (double)s->top_p);
    add_number(b, "min_p", (double)s->min_p);
    buf_addf(b, ",\"repeat_last_n\":%d", s->repeat_last_n);
    add_number(b, "repeat_penalty", (double)s->repeat_penalty);
    add_number(b, "presence_penalty", (double)s->presence_penalty);
    add_number(b, "frequency_penalty", (double)s->frequency_penalty);
    add_number(b, "typical_p", (double)s->typical_p);
    add_number(b, "top_n_sigma", (double)s->top_n_sigma);
    add_number(b, "xtc_probability", (double)s->xtc_probability);
    add_number(b, "xtc_threshold", (double)s->xtc_threshold);
    add_number(b, "dynatemp_range", (double)s->dynatemp_range);
    add_number(b, "dynatemp_exponent", (double)s->dynatemp_exponent);
    buf_addf(b, ",\"mirostat\":%d", s->mirostat);
    add_number(b, "mirostat_tau", (double)s->mirostat_tau);
    add_number(b, "mirostat_eta", (double)s->mirostat_eta);
    add_number(b, "dry_multiplier", (double)s->dry_multiplier);
    add_number(b, "dry_base", (double)s->dry_base);
    buf_addf(b, ",\"dry_allowed_length\":%d,\"dry_penalty_last_n\":%d", s->dry_allowed_length,
             s->dry_last_n);
    buf_adds(b, ",\"stop\":[");
    for (int i = 0; i < p->n_stop; i++) {
        buf_adds(b, i ? "," : "");
        jsonout_text(b, p->stop[i]);
    }
    buf_addf(b, "],\"n_probs\":%d,\"n_indent\":%d,\"t_max_prompt_ms\":%d,\"t_max_predict_ms\":%d",
             p->logprobs ? p->n_top : 0, o->n_indent, o->max_prompt_ms, o->max_predict_ms);
    add_bool(b, "ignore_eos", p->ignore_eos);
    add_bool(b, "stream", p->stream);
    add_bool(b, "timings_per_token", o->timings_per_token);
    buf_addc(b, '}');
}

static void add_timings(const struct usage_count *u, struct buf *b)
{
    double queue = (double)u->queue_ns * 1e-6, first = (double)u->first_ns * 1e-6;
    double total = (double)u->total_ns * 1e-6;
    double read = first > queue ? first - queue : 0;
    double write = first > 0 && total > first ? total - first : 0;
    int n = u->n_prompt - u->n_cached;
    buf_addf(b, ",\"timings\":{\"cache_n\":%d,\"prompt_n\":%d", u->n_cached, n);
    if (u->n_disk)
        buf_addf(b, ",\"disk_n\":%d", u->n_disk);
    add_number(b, "prompt_ms", read);
    add_number(b, "prompt_per_token_ms", n ? read / n : 0);
    add_number(b, "prompt_per_second", read > 0 ? n / read * 1e3 : 0);
    struct draft_count drafts = {0};
    for (int i = 0; i < N_DRAFT_SOURCES; i++) {
        drafts.drafted += u->drafts[i].drafted;
        drafts.accepted += u->drafts[i].accepted;
    }
    buf_addf(b, ",\"predicted_n\":%d", u->n_generated);
    if (drafts.drafted)
        buf_addf(b, ",\"draft_n\":%d,\"draft_n_accepted\":%d", drafts.drafted, drafts.accepted);
    add_number(b, "predicted_ms", write);
    add_number(b, "predicted_per_token_ms", u->n_generated ? write / u->n_generated : 0);
    add_number(b, "predicted_per_second", write > 0 ? u->n_generated / write * 1e3 : 0);
    buf_addc(b, '}');
}

static void add_token(struct buf *b, const struct tokenizer *t, const struct token_prob *p)
{
    size_t n = 0;
    const char *piece = t ? tokenizer_piece(t, p->token, &n) : "";
    buf_addf(b, "{\"id\":%d,\"token\":", p->token);
    jsonout_string(b, piece, n);
    buf_adds(b, ",\"bytes\":[");
    for (size_t i = 0; i < n; i++)
        buf_addf(b, i ? ",%d" : "%d", (unsigned char)piece[i]);
    buf_addc(b, ']');
    add_number(b, "logprob", p->logprob < -9999.0f ? -9999.0 : (double)p->logprob);
}

/* Writes the unsent log-probabilities and forgets them. */
static void add_probs(const struct api_request *req, struct logprobs *l, struct buf *b)
{
    const struct tokenizer *t = tokenizer_of(req);
    buf_adds(b, ",\"completion_probabilities\":[");
    for (int i = 0; i < l->n; i++) {
        const struct token_prob *row = l->v + (size_t)i * (size_t)l->stride;
        buf_adds(b, i ? "," : "");
        add_token(b, t, row);
        buf_adds(b, ",\"top_logprobs\":[");
        for (int k = 1; k < l->stride && row[k].token >= 0; k++) {
            buf_adds(b, k > 1 ? "," : "");
            add_token(b, t, &row[k]);
            buf_addc(b, '}');
        }
        buf_adds(b, "]}");
    }
    buf_addc(b, ']');
    l->n = 0;
}

static const char *stop_type(const struct api_choice *o)
{
    if (o->limited || o->finish == FINISH_LENGTH)
        return "limit";
    return o->stop >= 0 ? "word" : "eos";
}

/* Whether the reply has this member. */
static bool is_wanted(const struct api_request *req, const char *name)
{
    size_t i, n = strlen(name);
    const json_t *v;
    if (!req->completion.fields)
        return true;
    json_array_foreach(req->completion.fields, i, v)
    {
        const char *s = json_string_value(v);
        if (!strncmp(s, name, n) && (!s[n] || s[n] == '/'))
            return true;
    }
    return false;
}

/* The members of the end of an output, after "tokens". */
static void add_end(struct api_request *req, int i, struct buf *b)
{
    struct api_choice *o = &req->choices[i];
    const struct token_list *prompt = &req->prompts[i / req->p.n];
    const struct usage_count *u = &o->usage;
    buf_addf(b, ",\"id_slot\":%d,\"stop\":true,\"model\":", o->slot);
    jsonout_text(b, api_request_model(req));
    buf_addf(b, ",\"tokens_predicted\":%d,\"tokens_evaluated\":%d,\"generation_settings\":",
             u->n_generated, u->n_prompt);
    llamacpp_add_settings(&req->p, &req->completion, b);
    if (is_wanted(req, "prompt")) {
        struct buf text = {0};
        if (tokenizer_of(req))
            tokenizer_decode(tokenizer_of(req), prompt->ids, prompt->n, true, &text);
        buf_adds(b, ",\"prompt\":");
        jsonout_string(b, text.p ? text.p : "", text.len);
        buf_clear(&text);
    }
    add_bool(b, "has_new_line", o->new_line);
    add_bool(b, "truncated", req->completion.truncated);
    buf_addf(b, ",\"stop_type\":\"%s\",\"stopping_word\":", stop_type(o));
    jsonout_text(b, o->stop >= 0 && o->stop < req->p.n_stop ? req->p.stop[o->stop] : "");
    buf_addf(b, ",\"tokens_cached\":%d", u->n_prompt + u->n_generated);
    add_timings(u, b);
    if (req->p.logprobs)
        add_probs(req, &o->logprobs, b);
}

/* Keeps the members that response_fields names. A path is the name of its value, slashes included,
 * as editors read it. */
static void select_fields(const struct api_request *req, struct buf *all, struct buf *b)
{
    json_t *from = json_loadb(all->p, all->len, JSON_ALLOW_NUL, NULL), *to = json_object();
    size_t i;
    const json_t *v;
    json_array_foreach(req->completion.fields, i, v)
    {
        const char *name = json_string_value(v), *path = name, *slash;
        json_t *at = from;
        for (; at && (slash = strchr(path, '/')); path = slash + 1)
            at = json_object_getn(at, path, (size_t)(slash - path));
        if (json_object_get(at, path))
            json_object_set(to, name, json_object_get(at, path));
    }
    jsonout_value(b, to);
    json_decref(from);
    json_decref(to);
}

static void add_object(struct api_request *req, int i, const struct buf *content, struct buf *b)
{
    struct api_choice *o = &req->choices[i];
    struct buf all = {0}, *out = req->completion.fields ? &all : b;
    buf_addf(out, "{\"index\":%d,\"content\":", i);
    jsonout_string(out, content->p ? content->p : "", content->len);
    buf_adds(out, ",\"tokens\":");
    add_ids(out, o->tokens.ids, o->tokens.n);
    o->tokens.n = 0;
    add_end(req, i, out);
    buf_addc(out, '}');
    if (req->completion.fields)
        select_fields(req, &all, b);
    buf_clear(&all);
}

static void stream_open(struct api_request *req, struct buf *b)
{
    (void)req, (void)b;
}

static void add_piece(struct api_request *req, int i, struct segment *g, size_t n, struct buf *b)
{
    struct api_choice *o = &req->choices[i];
    buf_addf(b, "data: {\"index\":%d,\"content\":", i);
    jsonout_string(b, g->text.p + g->sent, n);
    buf_adds(b, ",\"tokens\":");
    add_ids(b, o->tokens.ids, o->tokens.n);
    o->tokens.n = 0;
    buf_addf(b, ",\"stop\":false,\"id_slot\":%d,\"tokens_predicted\":%d,\"tokens_evaluated\":%d",
             o->slot, o->usage.n_generated, o->usage.n_prompt);
    if (req->completion.timings_per_token)
        add_timings(&o->usage, b);
    if (req->p.logprobs)
        add_probs(req, &o->logprobs, b);
    buf_adds(b, "}\n\n");
    api_choice_sent(o, g, n);
}

static bool stream_flush(struct api_request *req, int i, struct buf *b, size_t room)
{
    struct api_choice *o = &req->choices[i];
    for (; o->flushed < o->n_segments; o->flushed++) {
        struct segment *g = &o->segments[o->flushed];
        for (size_t n; (n = segment_next(g)) > 0;) {
            if (b->len >= room)
                return false;
            add_piece(req, i, g, n, b);
        }
        if (o->flushed == o->n_segments - 1)
            break; /* it may grow */
    }
    return true;
}

static void stream_finish(struct api_request *req, int i, struct buf *b)
{
    static const struct buf nothing = {0};
    buf_adds(b, "data: ");
    add_object(req, i, &nothing, b);
    buf_adds(b, "\n\n");
}

static void stream_close(struct api_request *req, struct buf *b)
{
    (void)req, (void)b;
}

static void stream_error(struct api_request *req, const struct api_error *err, struct buf *b)
{
    (void)req;
    buf_adds(b, "data: ");
    api_error_json(b, err, DIALECT_OPENAI);
    buf_adds(b, "\n\n");
}

static bool whole(struct api_request *req, struct buf *b, size_t room)
{
    bool many = req->n_choices > 1;
    if (!req->whole.opened)
        buf_adds(b, many ? "[" : "");
    req->whole.opened = true;
    for (; req->whole.choice < req->n_choices; req->whole.choice++) {
        struct api_choice *o = &req->choices[req->whole.choice];
        struct buf text = {0};
        if (!o->done || b->len >= room)
            return false;
        for (int i = 0; i < o->n_segments; i++)
            buf_add(&text, o->segments[i].text.p, o->segments[i].text.len);
        buf_adds(b, req->whole.choice ? "," : "");
        add_object(req, req->whole.choice, &text, b);
        buf_clear(&text);
        api_choice_forget(o);
    }
    buf_adds(b, many ? "]" : "");
    return true;
}

const struct reply_style reply_llamacpp = {.stream_open = stream_open,
                                           .stream_flush = stream_flush,
                                           .stream_finish = stream_finish,
                                           .stream_close = stream_close,
                                           .stream_error = stream_error,
                                           .whole = whole,
                                           .ping = ":\n\n"};
