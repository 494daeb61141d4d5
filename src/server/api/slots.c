/* See slots.h. */
#include "server/api/slots.h"
#include "base/clock.h"
#include "base/mem.h"
#include "engine/prefix_disk.h"
#include "engine/prefix_file.h"
#include "server/api/prepare_int.h"
#include "server/api/query.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct slot {
    struct api_request *req;   /* running; the loop's own; NULL = none */
    struct api_choice *choice; /* of req */
    struct token_list tokens;  /* prompt and output, if they are kept */
    char *owner, *salt;        /* of the last sequence; owned; NULL = none */
    bool adapted;              /* it used an adapter */
    bool open;                 /* the tokens of the running sequence are added */
    uint64_t used;             /* turn of its last start */
    uint64_t task;             /* number of the sequence */
};

struct slots {
    pthread_mutex_t lock; /* all but req and choice */
    int n;
    bool keep;
    uint64_t turn;
    struct slot v[];
};

struct slots *slots_new(int n, bool keep_tokens)
{
    struct slots *s = mem_zalloc(1, sizeof *s + (size_t)n * sizeof *s->v);
    pthread_mutex_init(&s->lock, NULL);
    s->n = n;
    s->keep = keep_tokens;
    return s;
}

static void clear(struct slot *l)
{
    token_list_clear(&l->tokens);
    mem_free(l->owner);
    mem_free(l->salt);
    l->owner = l->salt = NULL;
    l->adapted = false;
}

void slots_free(struct slots *s)
{
    if (!s)
        return;
    for (int i = 0; i < s->n; i++)
        clear(&s->v[i]);
    pthread_mutex_destroy(&s->lock);
    mem_free(s);
}

/* The number of a slot's tokens that the prompt begins with; 0 = too few to count. */
static size_t common(const struct slot *l, const struct api_request *req,
                     const struct token_list *prompt)
{
    size_t n = 0, most = l->tokens.n < prompt->n ? l->tokens.n : prompt->n;
    if (!l->owner || strcmp(l->owner, req->owner))
        return 0;
    while (n < most && l->tokens.ids[n] == prompt->ids[n])
        n++;
    return n >= l->tokens.n / 2 ? n : 0;
}

static int choose(const struct slots *s, const struct api_request *req,
                  const struct token_list *prompt)
{
    int best = -1;
    size_t most = 0;
    if (req->completion.id_slot >= 0)
        return req->completion.id_slot < s->n ? req->completion.id_slot : -1;
    for (int i = 0; i < s->n; i++) {
        const struct slot *l = &s->v[i];
        size_t n = l->req ? 0 : common(l, req, prompt);
        if (!l->req && (best < 0 || n > most || (n == most && l->used < s->v[best].used))) {
            best = i;
            most = n;
        }
    }
    return best;
}

void slots_start(struct slots *s, struct api_request *req, struct api_choice *o)
{
    const struct token_list *prompt = &req->prompts[(int)(o - req->choices) / req->p.n];
    pthread_mutex_lock(&s->lock);
    int i = choose(s, req, prompt);
    if (i >= 0) {
        struct slot *l = &s->v[i];
        if (l->choice)
            l->choice->slot = -1;
        clear(l);
        l->req = req;
        l->choice = o;
        l->open = true;
        l->owner = mem_strdup(req->owner);
        l->salt = api_request_salt(req, req->p.salt);
        l->adapted = req->n_loras > 0;
        l->used = l->task = ++s->turn;
        for (size_t k = 0; s->keep && k < prompt->n; k++)
            token_list_add(&l->tokens, prompt->ids[k]);
    }
    o->slot = i;
    pthread_mutex_unlock(&s->lock);
}

void slots_token(struct slots *s, const struct api_choice *o, int32_t token)
{
    if (o->slot < 0 || !s->keep)
        return;
    pthread_mutex_lock(&s->lock);
    if (s->v[o->slot].open)
        token_list_add(&s->v[o->slot].tokens, token);
    pthread_mutex_unlock(&s->lock);
}

void slots_end(struct slots *s, struct api_choice *o)
{
    if (o->slot < 0)
        return;
    s->v[o->slot].req = NULL;
    s->v[o->slot].choice = NULL;
}

char *api_request_salt(const struct api_request *req, const char *cache_salt)
{
    struct buf b = {0};
    if (!req->key && !cache_salt)
        return NULL;
    buf_addf(&b, "%s\n%s", req->key ? req->key : "", cache_salt ? cache_salt : "");
    return buf_take(&b);
}

/* GET /slots. What a request does is shown to its own client. */

static void add_running(const struct slot *l, struct buf *b)
{
    const struct api_request *req = l->req;
    const struct api_choice *o = l->choice;
    int most = req->p.max_tokens ? req->p.max_tokens - o->usage.n_generated : -1;
    buf_addf(b, ",\"id_task\":%llu,\"n_prompt_tokens\":%d,\"params\":", (unsigned long long)l->task,
             o->usage.n_prompt);
    llamacpp_add_settings(&req->p, &req->completion, b);
    buf_addf(b,
             ",\"next_token\":{\"has_next_token\":true,\"has_new_line\":%s,\"n_remain\":%d,"
             "\"n_decoded\":%d}",
             o->new_line ? "true" : "false", most, o->usage.n_generated);
}

void get_slots(struct server *s, struct http_exchange *x)
{
    struct buf b = {0};
    struct api_error err;
    bool wants_free = false, is_free = false;
    const struct loaded *m = models_shown_or_reply(s, x);
    if (!m)
        return;
    if (!query_bool(http_request(x)->query, "fail_on_no_slot", &wants_free, &err)) {
        reply_error(x, s, &err, DIALECT_OPENAI);
        return;
    }
    char *owner = access_owner(&s->opt.access, x);
    int context = engine_context(m->engine);
    bool drafts = engine_runtime(m->engine)->draft_from != 0;
    buf_addc(&b, '[');
    for (int i = 0; i < m->slots->n; i++) {
        const struct slot *l = &m->slots->v[i];
        is_free |= !l->req;
        buf_addf(&b, "%s{\"id\":%d,\"n_ctx\":%d,\"speculative\":%s,\"is_processing\":%s",
                 i ? "," : "", i, context, drafts ? "true" : "false", l->req ? "true" : "false");
        if (l->req && !strcmp(l->req->owner, owner))
            add_running(l, &b);
        buf_addc(&b, '}');
    }
    buf_addc(&b, ']');
    mem_free(owner);
    if (wants_free && !is_free) {
        api_fail(&err, 503, "unavailable_error", "no slot available");
        reply_error(x, s, &err, DIALECT_OPENAI);
    } else {
        reply_json(x, s, 200, &b);
    }
    buf_clear(&b);
}

/* POST /slots/ID?action=... */

struct slot_action {
    struct api_request *req;
    struct slots *slots;
    int id;
    char name[PREFIX_NAME_MOST];
    char *salt; /* owned */
    int64_t start_ns;
};

static double ms_since(int64_t start_ns)
{
    return (double)(clock_ns() - start_ns) * 1e-6;
}

/* Copies the tokens of the slot, if this client has used it last. */
static bool take_tokens(const struct slot_action *a, struct token_list *out, char **salt)
{
    struct slots *s = a->slots;
    const struct slot *l = &s->v[a->id];
    pthread_mutex_lock(&s->lock);
    bool mine = l->owner && !strcmp(l->owner, a->req->owner), adapted = l->adapted;
    for (size_t i = 0; mine && i < l->tokens.n; i++)
        token_list_add(out, l->tokens.ids[i]);
    *salt = mine && l->salt ? mem_strdup(l->salt) : NULL;
    pthread_mutex_unlock(&s->lock);
    if (!mine || !out->n)
        return api_invalid(&a->req->err, "id_slot", "slot %d has no prompt of this client", a->id);
    return !adapted ||
           api_invalid(&a->req->err, "id_slot",
                       "slot %d has a prompt with an adapter, which is not saved", a->id);
}

static bool save(struct slot_action *a)
{
    struct api_request *req = a->req;
    struct server *s = req->server;
    struct token_list tokens = {0};
    struct error err = {0};
    int n_saved = 0;
    uint64_t bytes = 0;
    bool ok = take_tokens(a, &tokens, &a->salt);
    if (ok) {
        struct prefix_disk d = {.dir = s->opt.slot_save_path, .name = a->name, .salt = a->salt};
        int n = tokens.n > INT32_MAX ? INT32_MAX : (int)tokens.n;
        ok = prefix_disk_save(req->loaded->engine, &d, tokens.ids, n, &n_saved, &bytes, &err) ||
             api_fail(&req->err, 500, "server_error", "the slot cannot be saved: %s", err.msg);
    }
    if (ok)
        buf_addf(&req->reply, "\"n_saved\":%d,\"n_written\":%llu,\"timings\":{\"save_ms\":%.3f}}",
                 n_saved, (unsigned long long)bytes, ms_since(a->start_ns));
    token_list_clear(&tokens);
    return ok;
}

static bool restore(struct slot_action *a, const json_t *body)
{
    struct api_request *req = a->req;
    struct server *s = req->server;
    struct error err = {0};
    struct token_list tokens = {0};
    const char *cache_salt = NULL;
    int32_t *ids = NULL;
    int n = 0;
    uint64_t bytes = 0;
    if (!api_string(body, "cache_salt", &cache_salt, &req->err))
        return false;
    a->salt = api_request_salt(req, cache_salt);
    struct prefix_disk d = {.dir = s->opt.slot_save_path, .name = a->name, .salt = a->salt};
    if (!prefix_disk_restore(req->loaded->engine, &d, &ids, &n, &bytes, &err))
        return api_invalid(&req->err, "filename", "the slot cannot be restored: %s", err.msg);
    for (int i = 0; i < n; i++)
        token_list_add(&tokens, ids[i]);
    mem_free(ids);
    pthread_mutex_lock(&a->slots->lock);
    struct slot *l = &a->slots->v[a->id];
    l->open = false;
    clear(l);
    l->tokens = tokens;
    l->owner = mem_strdup(req->owner);
    l->salt = a->salt;
    a->salt = NULL;
    l->used = ++a->slots->turn;
    pthread_mutex_unlock(&a->slots->lock);
    buf_addf(&req->reply, "\"n_restored\":%d,\"n_read\":%llu,\"timings\":{\"restore_ms\":%.3f}}", n,
             (unsigned long long)bytes, ms_since(a->start_ns));
    return true;
}

static bool erase(const struct slot_action *a)
{
    struct token_list tokens = {0};
    char *salt = NULL;
    bool ok = take_tokens(a, &tokens, &salt);
    if (ok) {
        pthread_mutex_lock(&a->slots->lock);
        clear(&a->slots->v[a->id]);
        a->slots->v[a->id].open = false;
        pthread_mutex_unlock(&a->slots->lock);
        buf_addf(&a->req->reply, "\"n_erased\":%zu}", tokens.n);
    }
    token_list_clear(&tokens);
    mem_free(salt);
    return ok;
}

/* The name of a client's file. With several API keys each has files of its own. */
static bool read_name(struct slot_action *a, const json_t *body)
{
    static const char name[] = "filename";
    struct api_request *req = a->req;
    const char *text = NULL;
    if (!api_string(body, name, &text, &req->err))
        return false;
    if (!text || !prefix_name_is_valid(text))
        return api_invalid(&req->err, name,
                           "filename must be a name of letters, digits, '.', '_' and '-' that does "
                           "not begin with a dot");
    int n =
        req->server->opt.access.n_keys > 1
            ? snprintf(a->name, sizeof a->name, "%016llx-%s",
                       (unsigned long long)prefix_checksum(3, req->owner, strlen(req->owner)), text)
            : snprintf(a->name, sizeof a->name, "%s", text);
    return n < (int)sizeof a->name || api_invalid(&req->err, name, "filename is too long");
}

static bool run_action(struct slot_action *a, const char *action, const json_t *body)
{
    if (strcmp(action, "erase") && !read_name(a, body))
        return false;
    struct mem_job *job = mem_job_suspend(); /* files and slots outlive this job */
    buf_addf(&a->req->reply, "{\"id_slot\":%d,", a->id);
    if (a->name[0]) {
        buf_adds(&a->req->reply, "\"filename\":");
        jsonout_text(&a->req->reply, json_string_value(json_object_get(body, "filename")));
        buf_addc(&a->req->reply, ',');
    }
    bool ok = !strcmp(action, "save")      ? save(a)
              : !strcmp(action, "restore") ? restore(a, body)
                                           : erase(a);
    mem_free(a->salt);
    mem_job_resume(job);
    return ok;
}

bool prepare_slot_action(struct api_request *req, const json_t *body)
{
    struct server *s = req->server;
    char action[QUERY_TEXT_MAX], *end;
    struct slot_action a = {.req = req, .slots = req->loaded->slots, .start_ns = clock_ns()};
    if (!s->opt.slot_save_path)
        return api_fail(&req->err, 501, "not_supported_error",
                        "this server has no actions of slots; start it with --slot-save-path DIR");
    const char *why = prefix_disk_refuses(req->loaded->engine), *id = req->path + strlen("/slots/");
    if (why)
        return api_fail(&req->err, 501, "not_supported_error", "slots cannot be saved: %s", why);
    long v = strtol(id, &end, 10);
    if (*id < '0' || *id > '9' || *end || v >= a.slots->n)
        return api_invalid(&req->err, "id_slot", "the slot's id must be a number below %d",
                           a.slots->n);
    a.id = (int)v;
    if (!query_text(req->query, "action", action, &req->err))
        return false;
    if (strcmp(action, "save") && strcmp(action, "restore") && strcmp(action, "erase"))
        return api_invalid(&req->err, "action", "action must be save, restore or erase");
    return run_action(&a, action, body);
}
