/* libFuzzer entry: a request body through each endpoint. It is accepted with values in the documented ranges, or
 * refused with a status and a message. */
#include "base/mem.h"
#include "server/api/ollama.h"
#include "server/api/prepare_int.h"
#include "server/api/responses.h"
#include "server/api/store.h"

#include <string.h>

static struct chat *chat_template(void)
{
    static struct chat *c;
    static const char text[] =
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for t in m.tool_calls "
        "or "
        "[] %}<tool_call>{{ t.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    if (!c) {
        struct error err = {0};
        char *none = (char *)"";
        struct chat_source source = {(char *)text, sizeof text - 1, none, none};
        c = chat_new(&source, &err);
        CHECK(c, "%s", err.msg);
    }
    return c;
}

/* Messages that pass the checks render, or are refused by name. */
static void conversation(const json_t *body)
{
    struct api_error err = {0};
    struct error e = {0};
    const json_t *messages = api_member(body, "messages"), *tools = api_member(body, "tools");
    bool ok = check_messages(messages, &err) && check_tools(tools, &err);
    CHECK(ok == (err.status == 0), "ok %d, status %d", ok, err.status);
    if (!ok)
        return;
    struct buf prompt = {0};
    struct chat_request r = {.messages = messages, .tools = tools};
    CHECK(chat_render(chat_template(), &r, &prompt, &e) || e.msg[0], "no prompt and no reason");
    buf_clear(&prompt);
}

/* Bodies of other APIs become a chat body, which is checked like any other, or an error with a reason. */
static void translations(const json_t *body)
{
    static struct store *store;
    if (!store) {
        store = store_new(1 << 20, 3600);
        static const char item[] = "{\"id\":\"msg_a_0\",\"type\":\"message\",\"role\":"
                                   "\"assistant\",\"content\":\"x\"}";
        struct kept_items none = {0}, one = {0};
        kept_items_add(&one, "msg_a_0", item, sizeof item - 1);
        struct stored r = {
            .id = "resp_a", .owner = "", .reply = "{}", .input = &none, .output = &one};
        store_put(store, &r);
        kept_items_add(&one, "msg_a_0", item, sizeof item - 1);
        struct stored c = {.id = "conv_a", .owner = "", .reply = "{}", .input = &one};
        store_put(store, &c);
    }
    for (int i = 0; i < 3; i++) {
        struct api_error err = {0};
        struct responses_request *r = mem_zalloc(1, sizeof *r);
        bool raw = false;
        json_t *chat = i == 2 ? responses_translate(body, store, "", "b", r, &err)
                              : ollama_translate(body, i == 1, &raw, &err);
        CHECK((chat != NULL) == (err.status == 0) && (chat || err.msg[0]), "translation %d", i);
        if (chat) {
            conversation(chat);
            json_decref(responses_drop_turns(json_object_get(chat, "messages"), 1));
        }
        json_decref(chat);
        responses_request_free(r);
    }
}

/* Items that can be kept have ids, and are read again as input. */
static void items(const json_t *body)
{
    struct api_error err = {0};
    const json_t *list = api_member(body, "items");
    struct page_query page = {.limit = 100};
    struct kept_items kept = {0};
    struct buf b = {0};
    if (!json_is_array(list) || !responses_check_items(list, "items", &err))
        return;
    responses_keep_items(&kept, list, "b");
    CHECK(kept.n == (int)json_array_size(list), "%d items", kept.n);
    CHECK(kept_items_page(&kept, &page, &b), "no page");
    json_t *again = json_loadb(b.p, b.len, JSON_ALLOW_NUL, NULL);
    const json_t *data = json_object_get(again, "data"), *item;
    size_t i;
    json_array_foreach((json_t *)data, i, item)
        CHECK(json_is_string(json_object_get(item, "id")), "item %zu has no id", i);
    CHECK(again && responses_check_items(data, "items", &err), "%s", err.msg);
    json_decref(again);
    buf_clear(&b);
    kept_items_clear(&kept);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct sample_params defaults = sample_params_default();
    struct api_error err = {0};
    json_t *body = api_parse((const char *)data, size, &err);
    CHECK(body || err.status == 400 || err.status == 413, "no body and no error");
    for (int api = PARAMS_CHAT; body && api <= PARAMS_MESSAGES; api++) {
        struct gen_params p;
        memset(&err, 0, sizeof err);
        bool ok = gen_params_read(body, (enum params_api)api, &defaults, 1000, &p, &err);
        CHECK(ok == (err.status == 0) && (ok || err.msg[0]), "ok %d, status %d", ok, err.status);
        if (ok) {
            const struct sample_params *s = &p.sample;
            CHECK(s->temp >= 0 && s->top_p >= 0 && s->top_p <= 1 && s->top_k >= 0, "ranges");
            CHECK(p.n >= 1 && p.n <= ENGINE_MAX_CHOICES && p.max_tokens >= 0, "counts");
            CHECK(p.n_top >= 0 && p.n_top <= ENGINE_MAX_LOGPROBS, "logprobs");
            for (int i = 0; i < s->n_bias; i++)
                CHECK(s->bias[i].token >= 0 && s->bias[i].token < 1000, "bias");
            for (int i = 0; i < p.n_stop; i++)
                CHECK(p.stop[i][0], "an empty stop string");
        }
        gen_params_clear(&p);
        struct token_list ids = {0};
        const json_t *list = api_member(body, "prompt");
        if (json_is_array(list) && api_tokens(list, "prompt", 1000, &ids, &err))
            for (size_t i = 0; i < ids.n; i++)
                CHECK(ids.ids[i] >= 0 && ids.ids[i] < 1000, "token %d", ids.ids[i]);
        token_list_clear(&ids);
    }
    if (body) {
        conversation(body);
        translations(body);
        items(body);
        memset(&err, 0, sizeof err);
        json_t *translated = anthropic_translate(body, true, &err);
        CHECK((translated != NULL) == (err.status == 0), "translated and refused");
        if (translated)
            conversation(translated);
        json_decref(translated);
    }
    json_decref(body);
    return 0;
}
