/*
 * /v1/conversations: items kept under one id, which /v1/responses continues and adds to. They live in the
 * store (store.h). GET and DELETE run on the loop and never wait; bodies are prepared on a worker.
 */
#include "base/mem.h"
#include "server/api/prepare_int.h"
#include "server/api/query.h"
#include "server/api/responses.h"
#include "server/api/store.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

enum { ITEMS_MOST = 20, METADATA_MOST = 16, KEY_MOST = 64, VALUE_MOST = 512 };
enum { NAME_SIZE = 128 };

/* Reads a path of n parts after /v1/conversations/: an id, "items" and an item. The id is "" if there are more. */
static void read_path(const char *path, int n, char id[NAME_SIZE], char item[NAME_SIZE])
{
    static const char before[] = "/v1/conversations/";
    const char *at = path + strlen(before), *last = strrchr(path, '/');
    int parts = 1;
    for (const char *p = at; *p; p++)
        parts += *p == '/';
    snprintf(id, NAME_SIZE, "%.*s", parts == n ? (int)strcspn(at, "/") : 0, at);
    snprintf(item, NAME_SIZE, "%s", last + 1);
}

static bool is_missing(struct api_error *err, enum store_result r, const char *id, const char *item)
{
    const char *param = r == STORE_NO_ENTRY ? "conversation_id" : "item_id";
    if (r == STORE_OK)
        return false;
    if (r == STORE_NO_ROOM) {
        api_fail(err, 413, "invalid_request_error",
                 "the conversation is larger than the store (--store-mb)");
        return true;
    }
    if (r == STORE_TOO_MANY)
        return !api_invalid(err, "items", "a conversation has at most %d items", STORE_ITEMS_MOST);
    api_fail(err, 404, "invalid_request_error",
             r == STORE_NO_ENTRY ? "Conversation with id '%.*s' not found."
                                 : "Item with id '%.*s' not found.",
             NAME_SIZE, r == STORE_NO_ENTRY ? id : item);
    snprintf(err->param, sizeof err->param, "%s", param);
    return true;
}

/* GET and DELETE */

enum action { GET_OBJECT, GET_ITEMS, GET_ITEM, DELETE_OBJECT, DELETE_ITEM };

static enum store_result act(struct server *s, enum action what, const char *id, const char *item,
                             const char *owner, const struct page_query *page, struct buf *out)
{
    enum store_result r = STORE_NO_ENTRY;
    if (strncmp(id, "conv_", 5)) /* responses are in the store, too */
        return r;
    switch (what) {
    case GET_OBJECT:
        return store_get(s->store, id, owner, STORE_REPLY, out) ? STORE_OK : r;
    case GET_ITEMS:
        return store_page(s->store, id, owner, page, out);
    case GET_ITEM:
        return store_item(s->store, id, owner, item, out);
    case DELETE_ITEM:
        r = store_remove_item(s->store, id, owner, item);
        if (r == STORE_OK && !store_get(s->store, id, owner, STORE_REPLY, out))
            r = STORE_NO_ENTRY;
        return r;
    case DELETE_OBJECT:
        if (!store_delete(s->store, id, owner))
            return r;
        buf_adds(out, "{\"id\":");
        jsonout_text(out, id);
        buf_adds(out, ",\"object\":\"conversation.deleted\",\"deleted\":true}");
        return STORE_OK;
    }
    return r;
}

static void respond(struct server *s, struct http_exchange *x, enum action what)
{
    const struct http_head *h = http_request(x);
    char id[NAME_SIZE], item[NAME_SIZE];
    char *owner = access_owner(&s->opt.access, x);
    struct page_query page;
    struct api_error err;
    struct buf b = {0};
    read_path(endpoint_path(h),
              what == GET_ITEMS                         ? 2
              : what == GET_ITEM || what == DELETE_ITEM ? 3
                                                        : 1,
              id, item);
    if (!query_page(h->query, &page, &err) ||
        is_missing(&err, act(s, what, id, item, owner, &page, &b), id,
                   what == GET_ITEMS ? page.after : item))
        reply_error(x, s, &err, DIALECT_OPENAI);
    else
        reply_json(x, s, 200, &b);
    mem_free(owner);
    buf_clear(&b);
}

void get_conversation(struct server *s, struct http_exchange *x)
{
    respond(s, x, GET_OBJECT);
}

void get_conversation_items(struct server *s, struct http_exchange *x)
{
    respond(s, x, GET_ITEMS);
}

void get_conversation_item(struct server *s, struct http_exchange *x)
{
    respond(s, x, GET_ITEM);
}

void delete_conversation(struct server *s, struct http_exchange *x)
{
    respond(s, x, DELETE_OBJECT);
}

void delete_conversation_item(struct server *s, struct http_exchange *x)
{
    respond(s, x, DELETE_ITEM);
}

/* POST */

static bool check_metadata(const json_t *v, struct api_error *err)
{
    static const char name[] = "metadata";
    const char *key;
    json_t *value;
    if (v && !json_is_object(v))
        return api_invalid(err, name, "metadata must be an object");
    if (json_object_size(v) > METADATA_MOST)
        return api_invalid(err, name, "metadata must have at most %d members", METADATA_MOST);
    json_object_foreach((json_t *)v, key, value)
    {
        if (!json_is_string(value))
            return api_invalid(err, name, "metadata.%.64s must be a string", key);
        if (strlen(key) > KEY_MOST || json_string_length(value) > VALUE_MOST)
            return api_invalid(err, name,
                               "metadata has names of at most %d and values of at most %d bytes",
                               KEY_MOST, VALUE_MOST);
    }
    return true;
}

static void write_object(const char *id, json_int_t created, const json_t *metadata, struct buf *b)
{
    buf_addf(b, "{\"id\":\"%s\",\"object\":\"conversation\",\"created_at\":%lld,\"metadata\":", id,
             (long long)created);
    if (metadata)
        jsonout_value(b, metadata);
    else
        buf_adds(b, "{}");
    buf_addc(b, '}');
}

/* Reads `items` with new ids. */
static bool read_items(struct api_request *req, const json_t *body, struct kept_items *out)
{
    const json_t *list = api_member(body, "items"), *item;
    const char *hex = strchr(req->id, '_') + 1;
    size_t i;
    if (!list)
        return true;
    if (!json_is_array(list) || json_array_size(list) > ITEMS_MOST)
        return api_invalid(&req->err, "items", "items must be an array of at most %d items",
                           ITEMS_MOST);
    if (!responses_check_items(list, "items", &req->err))
        return false;
    json_t *copies = json_array();
    json_array_foreach((json_t *)list, i, item)
    {
        json_t *copy = json_copy((json_t *)item);
        json_object_del(copy, "id");
        json_array_append_new(copies, copy);
    }
    responses_keep_items(out, copies, hex);
    json_decref(copies);
    return true;
}

bool prepare_conversation_new(struct api_request *req, const json_t *body)
{
    const json_t *metadata = api_member(body, "metadata");
    struct kept_items items = {0}, kept = {0};
    if (!store_max_bytes(req->server->store))
        return api_fail(&req->err, 501, "not_supported_error",
                        "this server keeps no conversations (--store-mb 0)");
    bool ok = check_metadata(metadata, &req->err) && read_items(req, body, &items);
    if (ok) {
        write_object(req->id, req->created, metadata, &req->reply);
        struct stored r = {
            .id = req->id, .owner = req->owner, .reply = req->reply.p, .input = &kept};
        struct mem_job *job = mem_job_suspend(); /* it outlives this request */
        kept_items_copy(&kept, &items);
        ok = store_put(req->server->store, &r);
        kept_items_clear(&kept);
        mem_job_resume(job);
        if (!ok)
            is_missing(&req->err, STORE_NO_ROOM, req->id, NULL);
    }
    kept_items_clear(&items);
    return ok;
}

bool prepare_conversation_update(struct api_request *req, const json_t *body)
{
    const json_t *metadata = json_object_get(body, "metadata");
    struct store *store = req->server->store;
    char id[NAME_SIZE], unused[NAME_SIZE];
    struct buf old = {0};
    read_path(req->path, 1, id, unused);
    if (!metadata)
        return api_invalid(&req->err, "metadata", "metadata is missing");
    metadata = api_member(body, "metadata"); /* null: none */
    if (!check_metadata(metadata, &req->err))
        return false;
    struct mem_job *job = mem_job_suspend(); /* act allocates under the store's lock */
    enum store_result r = act(req->server, GET_OBJECT, id, NULL, req->owner, NULL, &old);
    if (r == STORE_OK) {
        json_t *object = json_loadb(old.p, old.len, JSON_ALLOW_NUL, NULL);
        write_object(id, json_integer_value(json_object_get(object, "created_at")), metadata,
                     &req->reply);
        json_decref(object);
        r = store_set_reply(store, id, req->owner, req->reply.p);
    }
    buf_clear(&old);
    mem_job_resume(job);
    return !is_missing(&req->err, r, id, NULL);
}

bool prepare_conversation_items(struct api_request *req, const json_t *body)
{
    struct page_query all = {.limit = INT_MAX}, given;
    struct kept_items items = {0}, kept = {0};
    char id[NAME_SIZE], unused[NAME_SIZE];
    read_path(req->path, 2, id, unused);
    if (!api_member(body, "items"))
        return api_invalid(&req->err, "items", "items is missing");
    bool ok = query_page(req->query, &given, &req->err) && read_items(req, body, &items);
    if (ok) {
        kept_items_page(&items, &all, &req->reply);
        struct mem_job *job = mem_job_suspend();
        kept_items_copy(&kept, &items);
        enum store_result r = strncmp(id, "conv_", 5)
                                  ? STORE_NO_ENTRY
                                  : store_append(req->server->store, id, req->owner, &kept);
        kept_items_clear(&kept);
        mem_job_resume(job);
        ok = !is_missing(&req->err, r, id, NULL);
    }
    kept_items_clear(&items);
    return ok;
}
