/*
 * libFuzzer entry for the tools of /v1/responses (responses_tools.c): the input is a JSON object with tools, more (an input
 * item's tools) and tool_choice. They are refused with a status and a reason; or each tool is a function with a name of its
 * own, which leads back to the client's name, and what check_tools says of them holds for the whole list.
 */
#include "base/mem.h"
#include "server/api/prepare_int.h"
#include "server/api/responses.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void look_up(const json_t *tools, const json_t *names)
{
    size_t i;
    json_t *t, *seen = json_object();
    json_array_foreach(tools, i, t)
    {
        const char *flat =
            json_string_value(json_object_get(json_object_get(t, "function"), "name"));
        if (!flat)
            continue; /* check_tools refuses it */
        struct responses_tool tool = responses_tool_of(names, flat);
        CHECK(tool.name, "tool %zu, %s, has no name", i, flat);
        json_object_set_new(seen, flat, json_true());
    }
    json_decref(seen);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct api_error err = {0}, choice = {0};
    json_t *body = api_parse((const char *)data, size, &err);
    if (!body)
        return 0;
    memset(&err, 0, sizeof err);
    struct responses_request *r = mem_zalloc(1, sizeof *r);
    json_t *out = json_object();
    const json_t *allowed = NULL;
    r->tool_names = json_object();
    bool chosen =
        responses_tool_choice(out, api_member(body, "tool_choice"), false, &allowed, &choice);
    CHECK(chosen == (choice.status == 0) && (chosen || choice.msg[0]),
          "a choice refused without a word");
    bool ok = responses_add_tools(out, r, api_member(body, "tools"), api_member(body, "more"),
                                  allowed, &err);
    CHECK(ok == (err.status == 0) && (ok || err.msg[0]), "tools refused without a word");
    if (ok) {
        const json_t *tools = json_object_get(out, "tools");
        look_up(tools, r->tool_names);
        bool good = check_tools(tools, &err);
        CHECK(good == (err.status == 0), "checked %d, status %d", good, err.status);
    }
    json_decref(out);
    responses_request_free(r);
    json_decref(body);
    return 0;
}
