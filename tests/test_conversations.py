#!/usr/bin/env python3
"""/v1/conversations end to end: items, pages, responses that continue them, owners and bounds."""
import json
import re
import sys

from serverlib import Server, run_tests

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
CONV, RESP = "/v1/conversations", "/v1/responses"
HI = {"input": "hi", "seed": 1, "max_output_tokens": 12}
NEW = {"type": "message", "role": "user", "content": "one"}


def text_of(r):
    return "".join(p["text"] for i in r["output"] if i["type"] == "message" for p in i["content"])


def get(s, path, status=200, **kw):
    got, _, text = s.get(path, **kw)
    assert got == status, (path, got, text)
    return json.loads(text)


def delete(s, path, status=200, **kw):
    got, _, text = s.request("DELETE", path, **kw)
    assert got == status, (path, got, text)
    return json.loads(text)


def items(s, id, query="order=asc&limit=100"):
    return get(s, f"{CONV}/{id}/items?{query}")["data"]


def test_objects(s):
    c = s.json(CONV, {})
    assert set(c) == {"id", "object", "created_at", "metadata"} and c["object"] == "conversation" and c["metadata"] == {}, c
    assert re.fullmatch("conv_[0-9a-f]{32}", c["id"]) and get(s, f"{CONV}/{c['id']}") == c
    changed = s.json(f"{CONV}/{c['id']}", {"metadata": {"topic": "x"}})
    assert changed == dict(c, metadata={"topic": "x"}) == get(s, f"{CONV}/{c['id']}")
    assert s.json(f"{CONV}/{c['id']}", {"metadata": None}) == c
    assert delete(s, f"{CONV}/{c['id']}") == {"id": c["id"], "object": "conversation.deleted", "deleted": True}
    for method, path, body in (("GET", "", None), ("DELETE", "", None), ("POST", "", '{"metadata":{}}'), ("GET", "/items", None), ("POST", "/items", json.dumps({"items": [NEW]})),
                               ("GET", "/items/x", None), ("DELETE", "/items/x", None)):
        status, _, text = s.request(method, f"{CONV}/{c['id']}{path}", body)
        assert status == 404 and c["id"] in json.loads(text)["error"]["message"], (method, path, text)
    # a response is no conversation, and a conversation no response
    c, r = s.json(CONV, {"items": [NEW]}), s.json(RESP, HI)
    for path in ("", "/items"):
        get(s, f"{CONV}/{r['id']}{path}", 404)
    for path in ("", "/input_items", "?stream=true"):
        get(s, f"{RESP}/{c['id']}{path}", 404)
    delete(s, f"{CONV}/{r['id']}", 404), delete(s, f"{RESP}/{c['id']}", 404)
    s.json(f"{CONV}/{r['id']}/items", {"items": [NEW]}, 404)
    s.json(RESP, dict(HI, previous_response_id=c["id"]), 404), s.json(RESP, dict(HI, conversation=r["id"]), 404)


def test_items(s):
    given = [NEW, {"role": "assistant", "content": "two"}, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
             {"type": "function_call_output", "call_id": "c", "output": "three"}]
    c = s.json(CONV, {"items": given, "metadata": {"a": "b"}})
    have = items(s, c["id"])
    assert [i["type"] for i in have] == ["message", "message", "function_call", "function_call_output"]
    assert have[0] == dict(NEW, id=have[0]["id"], content=[{"type": "input_text", "text": "one"}], status="completed"), have[0]
    assert have[1]["content"] == [{"type": "output_text", "text": "two", "annotations": [], "logprobs": []}]
    more = s.json(f"{CONV}/{c['id']}/items", {"items": [dict(NEW, content=f"{n}", id="mine") for n in range(20)]})
    assert more["object"] == "list" and len(more["data"]) == 20 and more["has_more"] is False
    assert more["first_id"] == more["data"][0]["id"] != "mine" and more["last_id"] == more["data"][-1]["id"]
    have = items(s, c["id"])
    ids = [i["id"] for i in have]
    assert have[4:] == more["data"] and len(set(ids)) == 24
    # pages in both orders, to the end
    for order, want in (("asc", ids), ("desc", ids[::-1])):
        seen, after = [], ""
        while True:
            page = get(s, f"{CONV}/{c['id']}/items?limit=7&order={order}{after}")
            seen += [i["id"] for i in page["data"]]
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            if not page["has_more"]:
                break
            after = "&after=" + page["last_id"]
        assert seen == want, order
    default = get(s, f"{CONV}/{c['id']}/items")
    assert [i["id"] for i in default["data"]] == ids[:3:-1] and default["has_more"] is True
    past = get(s, f"{CONV}/{c['id']}/items?order=asc&after={ids[-1]}")
    assert past == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    # one item
    assert get(s, f"{CONV}/{c['id']}/items/{ids[5]}?include[]=message.output_text.logprobs") == have[5]
    assert delete(s, f"{CONV}/{c['id']}/items/{ids[5]}") == c
    assert [i["id"] for i in items(s, c["id"])] == ids[:5] + ids[6:]
    for method in ("GET", "DELETE"):
        status, _, text = s.request(method, f"{CONV}/{c['id']}/items/{ids[5]}")
        assert status == 404 and json.loads(text)["error"]["param"] == "item_id", text
    for query, param in (("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("include=file_search_call.results", "include"),
                         ("include%5B%5D=web_search_call.action.sources", "include"), ("after=" + "x" * 200, "after")):
        assert get(s, f"{CONV}/{c['id']}/items?{query}", 400)["error"]["param"] == param
        assert get(s, f"{RESP}/{s.json(RESP, HI)['id']}/input_items?{query}", 400)["error"]["param"] == param
    assert get(s, f"{CONV}/{c['id']}/items?after={ids[5]}", 404)["error"]["param"] == "item_id"
    # the input items of a response have the same pages
    r = s.json(RESP, dict(HI, input=given))
    asc = get(s, f"{RESP}/{r['id']}/input_items?order=asc")["data"]
    assert [i["type"] for i in asc] == [i["type"] for i in have[:4]] and get(s, f"{RESP}/{r['id']}/input_items")["data"] == asc[::-1]
    page = get(s, f"{RESP}/{r['id']}/input_items?limit=2&after={asc[3]['id']}")
    assert page["data"] == asc[1:3][::-1] and page["has_more"] is True
    assert get(s, f"{RESP}/{r['id']}/input_items?after=none", 404)["error"]["param"] == "after"


def test_responses(s):
    c = s.json(CONV, {"items": [{"role": "system", "content": "Be brief."}]})
    first = s.json(RESP, dict(HI, conversation=c["id"]))
    assert first["conversation"] == {"id": c["id"]} and s.json(RESP, HI)["conversation"] is None
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    same = lambda chat: s.json("/v1/chat/completions", {"messages": chat, "seed": 1, "max_tokens": 12})["choices"][0]["message"]["content"]
    assert text_of(first) == same(chat)
    have = items(s, c["id"])
    assert [i["role"] for i in have] == ["system", "user", "assistant"] and have[2] == first["output"][0]
    second = s.json(RESP, dict(HI, input="more", conversation={"id": c["id"]}, store=False))
    chat += [{"role": "assistant", "content": text_of(first)}, {"role": "user", "content": "more"}]
    assert text_of(second) == same(chat) and len(items(s, c["id"])) == 5
    get(s, f"{RESP}/{second['id']}", 404)
    n = s.json(RESP + "/input_tokens", dict(HI, input="more", conversation=c["id"]))["input_tokens"]
    assert n > second["usage"]["input_tokens"] and len(items(s, c["id"])) == 5
    # streamed, and in the background
    _, _, text = s.post(RESP, dict(HI, input="third", conversation=c["id"], stream=True))
    done = json.loads(text.strip().split("\ndata: ")[-1])["response"]
    assert done["conversation"] == {"id": c["id"]} and items(s, c["id"])[6] == done["output"][0]
    back = s.json(RESP, dict(HI, input="fourth", conversation=c["id"], background=True))
    while get(s, f"{RESP}/{back['id']}")["status"] in ("queued", "in_progress"):
        pass
    assert [i["id"] for i in items(s, c["id"])][8] == get(s, f"{RESP}/{back['id']}")["output"][0]["id"]
    # an item that is deleted is not in the next prompt
    for i in items(s, c["id"])[3:]:
        delete(s, f"{CONV}/{c['id']}/items/{i['id']}")
    assert text_of(s.json(RESP, dict(HI, input="more", conversation=c["id"]))) == text_of(second)
    # a failed request adds nothing
    n = len(items(s, c["id"]))
    s.json(RESP, dict(HI, input="x" * 9000, conversation=c["id"]), 400)
    assert len(items(s, c["id"])) == n
    for body, param, status in ((dict(conversation=5), "conversation", 400), (dict(conversation={}), "conversation", 400), (dict(conversation={"id": 5}), "conversation", 400),
                                (dict(conversation="conv_none"), "conversation", 404), (dict(conversation=c["id"], previous_response_id="resp_x"), "conversation", 400)):
        assert s.json(RESP, dict(HI, **body), status)["error"]["param"] == param


def test_deleted_meanwhile(_):
    """A conversation that is deleted before its response is finished."""
    s = Server(BUILD, "-np", "1", "-c", "8192")
    long = {"input": "hi", "ignore_eos": True, "max_output_tokens": 6000, "background": True}
    ahead = [s.json(RESP, long)["id"] for _ in range(24)]  # seconds of work for the only sequence
    gone = s.json(CONV, {})["id"]
    last = s.json(RESP, dict(HI, background=True, conversation=gone))["id"]
    delete(s, f"{CONV}/{gone}")
    for id in ahead:
        s.json(f"{RESP}/{id}/cancel", {})
    while get(s, f"{RESP}/{last}")["status"] in ("queued", "in_progress"):
        pass
    assert get(s, f"{RESP}/{last}")["output"]
    s.wait_line("a conversation was deleted")
    assert s.stop() == 0


def test_refused(s):
    c = s.json(CONV, {})["id"]
    for path, body, param in (
            (CONV, {"items": 5}, "items"), (CONV, {"items": [NEW] * 21}, "items"), (CONV, {"items": [5]}, "items[0]"), (CONV, {"items": [{"role": "king", "content": "x"}]}, "items[0]"),
            (CONV, {"items": [{"type": "item_reference", "id": "x"}]}, "items"), (CONV, {"items": [{"type": "computer_call"}]}, "items[0]"),
            (CONV, {"metadata": 5}, "metadata"), (CONV, {"metadata": {"a": 5}}, "metadata"), (CONV, {"metadata": {"a": "b" * 513}}, "metadata"),
            (CONV, {"metadata": {str(i): "x" for i in range(17)}}, "metadata"), (CONV, {"metadata": {"k" * 65: "x"}}, "metadata"),
            (f"{CONV}/{c}", {}, "metadata"), (f"{CONV}/{c}", {"metadata": []}, "metadata"), (f"{CONV}/{c}/items", {}, "items"), (f"{CONV}/{c}/items", {"items": None}, "items")):
        assert s.json(path, body, 400)["error"]["param"] == param, (path, body)
    assert s.request("PUT", f"{CONV}/{c}/items")[0] == 405 and s.request("POST", f"{CONV}/{c}/items/x", '{"metadata":{}}')[0] == 404
    assert s.get(f"{CONV}/{c}/x")[0] == s.get(f"{CONV}/{c}/x/items")[0] == s.get(f"{CONV}/{c}/items/x/y")[0] == 404
    # a name of any length and kind is only not found
    for id in ("conv_" + "x" * 500, "%00", "conv_%2e%2e", "conv_" + "%ff" * 80):
        assert s.get(f"{CONV}/{id}")[0] in (400, 404) and s.get(f"{CONV}/{c}/items/{id}")[0] in (400, 404)
    assert s.json(CONV, {})["object"] == "conversation"


def test_owners(_):
    s = Server(BUILD, "--api-key", "one", "--api-key", "two")
    key = lambda k: {"headers": {"Authorization": "Bearer " + k}}
    c = s.json(CONV, {"items": [NEW]}, **key("one"))["id"]
    item = get(s, f"{CONV}/{c}/items", **key("one"))["data"][0]["id"]
    for method, path, body in (("GET", "", None), ("DELETE", "", None), ("POST", "", '{"metadata":{}}'), ("GET", "/items", None), ("POST", "/items", json.dumps({"items": [NEW]})),
                               ("GET", "/items/" + item, None), ("DELETE", "/items/" + item, None)):
        assert s.request(method, f"{CONV}/{c}{path}", body, **key("two"))[0] == 404 and s.request(method, f"{CONV}/{c}{path}", body)[0] == 401, (method, path)
    s.json(RESP, dict(HI, conversation=c), 404, **key("two"))
    assert s.json(RESP, dict(HI, conversation=c), **key("one"))["status"]
    s.stop()


def test_bounds(_):
    """Conversations share the store with responses; nobody pushes out what others have."""
    s = Server(BUILD, "--store-mb", "1", "--api-key", "one", "--api-key", "two", "-c", "8192")
    key = lambda k: {"headers": {"Authorization": "Bearer " + k}}
    large = dict(NEW, content="x" * 30000)
    mine = s.json(CONV, {"items": [large] * 5}, **key("one"))["id"]
    theirs = [s.json(CONV, {"items": [large] * 5}, **key("two"))["id"] for _ in range(16)]
    kept = lambda id, k: s.get(f"{CONV}/{id}", **key(k))[0] == 200
    assert kept(mine, "one") and kept(theirs[-1], "two") and not kept(theirs[0], "two")
    # one that grows takes room from its owner's others, and never grows beyond the store
    grown = 0
    while grown < 100:
        status, _, text = s.post(f"{CONV}/{theirs[-1]}/items", {"items": [large] * 5}, **key("two"))
        if status != 200:
            break
        grown += 1
    assert status in (404, 413) and "--store-mb" in text or "not found" in text, text
    assert kept(mine, "one") and 2 <= grown < 8, grown
    s.json(CONV, {"items": [dict(NEW, content="x" * 300000)] * 5}, 413, **key("one"))
    assert kept(mine, "one")
    s.stop()
    s = Server(BUILD, "--store-mb", "0")
    assert "--store-mb" in s.json(CONV, {}, 501)["error"]["message"]
    s.stop()


def test_many_items(s):
    """Items are looked for one after the other, so a conversation and an input that is kept have a bounded number."""
    id, n = s.json(CONV, {})["id"], 0
    while True:
        status, _, text = s.post(f"{CONV}/{id}/items", {"items": [NEW] * 20})
        if status != 200:
            break
        n += 20
    e = json.loads(text)["error"]
    assert status == 400 and n == 10000 and e["param"] == "items" and "at most 10000 items" in e["message"], (n, e)
    e = s.json(RESP, dict(HI, conversation=id), 400)["error"]
    assert e["param"] == "conversation" and "at most 10000 items" in e["message"], e
    last = items(s, id, "limit=1")[0]["id"]
    delete(s, f"{CONV}/{id}/items/{last}")
    s.json(f"{CONV}/{id}/items", {"items": [NEW]})
    unseen = [{"type": "mcp_list_tools", "server_label": "x", "tools": []}] * 10000
    assert s.json(RESP, dict(HI, input=unseen + [NEW], store=False))["status"] in ("completed", "incomplete")
    e = s.json(RESP, dict(HI, input=unseen + [NEW]), 400)["error"]
    assert e["param"] == "input" and "at most 10000 items" in e["message"], e
    s.json(RESP, dict(HI, input=unseen[1:] + [NEW]))
    delete(s, f"{CONV}/{id}")


server = Server(BUILD, "-c", "8192")
try:
    run_tests([test_objects, test_items, test_responses, test_deleted_meanwhile, test_refused, test_owners, test_bounds, test_many_items], server)
finally:
    server.stop()
