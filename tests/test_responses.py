"""/v1/responses and Ollama's API, end to end: shapes, order of events, kept responses, refusals."""
import http.client
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(__file__))
import script_model
from serverlib import Server, run_tests, sanitized

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
RESP = "/v1/responses"
HI = {"input": "hi", "seed": 1, "max_output_tokens": 12}
TOOL = {"type": "function", "name": "get_weather", "description": "Weather of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}}
QUESTION = "What is the weather in Emberton?"


def events_of(s, body, path=RESP):
    """[(name, data)] of a stream; names and types agree, numbers count from 0."""
    status, headers, text = s.post(path, dict(body, stream=True))
    assert status == 200 and headers["content-type"].startswith("text/event-stream"), text
    out = []
    for block in text.strip().split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        assert name.startswith("event: ") and data.startswith("data: ")
        d = json.loads(data[6:])
        assert d["type"] == name[7:] and d["sequence_number"] == len(out), block
        out.append((d["type"], d))
    return out


def text_of(r):
    return "".join(p["text"] for i in r["output"] if i["type"] == "message" for p in i["content"])


def test_whole(s):
    r = s.json(RESP, HI)
    assert r["object"] == "response" and r["id"].startswith("resp_") and r["model"] == "toy" and r["error"] is None
    assert r["status"] in ("completed", "incomplete") and r["store"] is True and r["tools"] == [] and r["tool_choice"] == "auto"
    assert (r["status"] == "incomplete") == (r["incomplete_details"] == {"reason": "max_output_tokens"})
    item = r["output"][0]
    assert item["type"] == "message" and item["role"] == "assistant" and item["id"].startswith("msg_")
    assert item["content"][0]["type"] == "output_text" and item["content"][0]["annotations"] == []
    u = r["usage"]
    assert u["total_tokens"] == u["input_tokens"] + u["output_tokens"] and u["output_tokens"] <= 12
    # the same as a chat
    chat = s.json("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 12})
    assert text_of(r) == chat["choices"][0]["message"]["content"]
    with_system = s.json("/v1/chat/completions", {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 12})
    for body in ({"instructions": "Be brief."}, {"input": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]}):
        assert text_of(s.json(RESP, dict(HI, **body))) == with_system["choices"][0]["message"]["content"]
    r = s.json(RESP, dict(HI, include=["message.output_text.logprobs"], top_logprobs=2))
    probs = r["output"][0]["content"][0]["logprobs"]
    assert len(probs) == r["usage"]["output_tokens"] and len(probs[0]["top_logprobs"]) == 2
    r = s.json(RESP, dict(HI, metadata={"a": "b"}, instructions="x", temperature=0.5, user="me"))
    assert r["metadata"] == {"a": "b"} and r["instructions"] == "x" and r["temperature"] == 0.5 and r["user"] == "me"


def test_stream(s):
    whole = s.json(RESP, HI)
    ev = events_of(s, HI)
    names = [n for n, _ in ev]
    assert names[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    assert names[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert names[-1] == "response." + whole["status"] and set(names[4:-4]) == {"response.output_text.delta"}
    text = "".join(d["delta"] for n, d in ev if n.endswith("delta"))
    assert text == text_of(whole) == ev[-4][1]["text"] == text_of(ev[-1][1]["response"])
    assert ev[0][1]["response"]["status"] == "in_progress" and ev[0][1]["response"]["output"] == []
    ids = {d["item_id"] for _, d in ev if "item_id" in d}
    assert ids == {ev[-1][1]["response"]["output"][0]["id"]}
    assert {d["response"]["id"] for _, d in ev if "response" in d} == {ev[0][1]["response"]["id"]}
    ev = events_of(s, dict(HI, include=["message.output_text.logprobs"], top_logprobs=1))
    deltas = sum(len(d["logprobs"]) for n, d in ev if n == "response.output_text.delta")
    assert deltas == len(ev[-1][1]["response"]["output"][0]["content"][0]["logprobs"]) > 0


def test_kept(s):
    first = s.json(RESP, dict(HI, instructions="Not kept."))
    got = json.loads(s.get(f"{RESP}/{first['id']}")[2])
    assert got == first
    items = json.loads(s.get(f"{RESP}/{first['id']}/input_items")[2])
    assert items["object"] == "list" and items["data"][0]["content"] == [{"type": "input_text", "text": "hi"}]
    assert items["first_id"] == items["last_id"] == items["data"][0]["id"] and items["has_more"] is False
    # going on: history without the earlier instructions
    second = s.json(RESP, dict(HI, input="more", previous_response_id=first["id"]))
    said = text_of(first)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    same = s.json("/v1/chat/completions", {"messages": chat, "seed": 1, "max_tokens": 12})
    assert second["previous_response_id"] == first["id"] and text_of(second) == same["choices"][0]["message"]["content"]
    third = s.json(RESP, dict(HI, input=[{"role": "user", "content": "hi"}, {"type": "item_reference", "id": first["output"][0]["id"]},
                                         {"role": "user", "content": "more"}]))
    assert text_of(third) == text_of(second)
    streamed = [d for n, d in events_of(s, HI)][-1]["response"]
    assert json.loads(s.get(f"{RESP}/{streamed['id']}")[2]) == streamed
    status, _, text = s.request("DELETE", f"{RESP}/{first['id']}")
    assert status == 200 and json.loads(text) == {"id": first["id"], "object": "response", "deleted": True}
    assert s.get(f"{RESP}/{first['id']}")[0] == 404 and s.request("DELETE", f"{RESP}/{first['id']}")[0] == 404
    e = s.json(RESP, dict(HI, previous_response_id=second["id"]), 404)["error"]
    assert e["code"] == "previous_response_not_found" and e["param"] == "previous_response_id" and first["id"] in e["message"]
    s.json(RESP, dict(HI, input=[{"type": "item_reference", "id": first["output"][0]["id"]}]), 404)
    lost = s.json(RESP, dict(HI, store=False))
    assert s.get(f"{RESP}/{lost['id']}")[0] == 404
    s.json(RESP, dict(HI, previous_response_id="resp_nothing"), 404)


def test_refused(s):
    for body, param in [
            ({}, "input"), ({"input": 5}, "input"), ({"input": []}, "input"), ({"input": [5]}, "input[0]"),
            ({"input": [{"role": "king", "content": "x"}]}, "input[0]"),
            ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
            ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
            ({"input": [{"type": "computer_call"}]}, "input[0]"),
            ({"input": "x", "tools": [{"type": "telepathy"}]}, "tools[0]"), ({"input": "x", "tools": 1}, "tools"),
            ({"input": "x", "tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
            ({"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools[0].tools[0]"),
            ({"input": "x", "tools": [TOOL, TOOL]}, "tools[1]"), ({"input": [{"type": "additional_tools", "tools": 5}]}, "input[0]"),
            ({"input": "x", "tools": [{"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "ebnf", "definition": "x"}}]}, "tools[0]"),
            ({"input": "x", "tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
            ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input[0]"),
            ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0]"), ({"input": [{"type": "function_call_output", "call_id": 5, "name": "f", "output": "x"}]}, "input[0]"),
            ({"input": [{"type": "function_call_output", "name": "", "output": "x"}]}, "input[0]"), ({"input": [{"type": "function_call_output", "name": "f", "namespace": 5, "output": "x"}]}, "input[0]"),
            ({"input": [{"type": "function_call_output", "name": "f", "output": 5}]}, "input[0].output"), ({"input": [{"type": "local_shell_call", "action": {}}]}, "input[0]"),
            ({"input": [{"type": "local_shell_call", "call_id": "c"}]}, "input[0]"), ({"input": [{"type": "agent_message", "content": "x"}]}, "input[0]"),
            ({"input": [{"type": "agent_message", "author": "a", "content": 5}]}, "input[0].content"), ({"input": [{"type": "tool_search_output", "tools": 5}]}, "input[0]"),
            ({"input": [{"role": "user", "content": [{"type": "input_audio", "audio_url": "x"}]}]}, "input[0].content"),
            ({"input": "x", "tool_choice": {"type": "x"}}, "tool_choice"), ({"input": "x", "background": "y"}, "background"),
            ({"input": "x", "truncation": "maybe"}, "truncation"), ({"input": "x", "instructions": 5}, "instructions"),
            ({"input": "x", "conversation": 5}, "conversation"), ({"input": "x", "reasoning": 1}, "reasoning"),
            ({"input": "x", "temperature": "hot"}, "temperature"), ({"input": "x", "text": 5}, "text"),
            ({"input": "x", "previous_response_id": 5}, "previous_response_id"), ({"input": "x", "store": "no"}, "store"),
            ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"), ({"input": "x", "max_output_tokens": "9"}, "max_output_tokens")]:
        e = s.json(RESP, body, 400)["error"]
        assert e["param"] == param, (body, e)
    assert s.json(RESP, dict(HI, input="x" * 9000), 400)["error"]["code"] == "context_length_exceeded"
    assert s.request("DELETE", RESP)[0] == 405 and s.request("PUT", f"{RESP}/resp_x")[0] == 405


def test_truncation(s):
    turns = []
    for i in range(40):
        turns += [{"role": "user", "content": f"{i} " + "x" * 400}, {"role": "assistant", "content": "ok"}]
    body = dict(HI, instructions="Keep this.", input=turns + [{"role": "user", "content": "last"}])
    assert s.json(RESP, body, 400)["error"]["code"] == "context_length_exceeded"
    r = s.json(RESP, dict(body, truncation="auto"))
    assert 7000 < r["usage"]["input_tokens"] <= 8192 - 12, r["usage"]
    # chat completions take it too, and say 400 without it
    chat = {"messages": [{"role": "system", "content": "Keep this."}, *turns, {"role": "user", "content": "last"}], "max_tokens": 12}
    for other in ({}, {"truncation": "disabled"}):
        assert s.json("/v1/chat/completions", dict(chat, **other), 400)["error"]["code"] == "context_length_exceeded"
    r = s.json("/v1/chat/completions", dict(chat, truncation="auto"))
    assert 7000 < r["usage"]["prompt_tokens"] <= 8192 - 12, r["usage"]
    assert s.json("/v1/chat/completions", dict(chat, truncation="some"), 400)["error"]["param"] == "truncation"
    # one message that can never fit is refused all the same
    assert s.json(RESP, dict(HI, input="x" * 9000, truncation="auto"), 400)["error"]["code"] == "context_length_exceeded"


def ended(s, id, **kw):
    """The response once it is over."""
    while True:
        r = json.loads(s.get(f"{RESP}/{id}", **kw)[2])
        if r["status"] not in ("queued", "in_progress"):
            return r
        time.sleep(0.02)


def parsed(text):
    """[(sequence number, data)] of a stream's text."""
    return [(d["sequence_number"], d) for d in (json.loads(b.split("\ndata: ")[1]) for b in text.strip().split("\n\n") if b and not b.startswith(":"))]


LONG = {"input": "hi", "seed": 1, "ignore_eos": True, "max_output_tokens": 6000, "background": True}
SHORT = dict(HI, background=True)


def test_background(_):
    s = Server(BUILD, "-np", "1", "-c", "8192")
    many = [s.json(RESP, LONG) for _ in range(24)]  # one sequence runs at a time: the last ones wait for seconds
    long = many[-1]
    assert long["status"] == "queued" and long["background"] is True and long["output"] == [] and long["usage"] is None
    short = s.json(RESP, SHORT)
    assert short["status"] == "queued" and json.loads(s.get(f"{RESP}/{short['id']}")[2]) == short
    seen = set()
    while not seen & {"in_progress", "incomplete"}:
        seen.add(json.loads(s.get(f"{RESP}/{many[0]['id']}")[2])["status"])
    items = json.loads(s.get(f"{RESP}/{long['id']}/input_items")[2])
    assert items["data"][0]["content"][0]["text"] == "hi"
    # cancelled, and again
    status, _, text = s.post(f"{RESP}/{long['id']}/cancel", "")
    cancelled = json.loads(text)
    assert status == 200 and cancelled["status"] == "cancelled" and cancelled["id"] == long["id"], text
    assert json.loads(s.post(f"{RESP}/{long['id']}/cancel", "")[2]) == cancelled == json.loads(s.get(f"{RESP}/{long['id']}")[2])
    for r in many:
        s.post(f"{RESP}/{r['id']}/cancel", "")
    done = ended(s, short["id"])
    same = s.json(RESP, HI)
    assert done["status"] == same["status"] and text_of(done) == text_of(same) and done["usage"]["output_tokens"] == same["usage"]["output_tokens"]
    assert json.loads(s.post(f"{RESP}/{short['id']}/cancel", "{}")[2]) == done  # it is over: nothing changes
    e = json.loads(s.post(f"{RESP}/{same['id']}/cancel", "")[2])["error"]
    assert "background" in e["message"] and e["param"] == "response_id", e
    assert s.post(f"{RESP}/resp_none/cancel", "")[0] == 404
    s.wait_line("end=cancelled")
    # it continues a kept response, and is continued
    on = ended(s, s.json(RESP, dict(SHORT, input="more", previous_response_id=done["id"]))["id"])
    assert text_of(on) == text_of(s.json(RESP, dict(HI, input="more", previous_response_id=same["id"])))
    # deleted while it runs: nothing is left, and the next one runs
    long = s.json(RESP, LONG)
    assert json.loads(s.request("DELETE", f"{RESP}/{long['id']}")[2])["deleted"] is True
    assert s.get(f"{RESP}/{long['id']}")[0] == 404 and s.post(f"{RESP}/{long['id']}/cancel", "")[0] == 404
    assert ended(s, s.json(RESP, SHORT)["id"])["status"] == done["status"]
    for body in (dict(SHORT, store=False), dict(SHORT, background="yes"), dict(SHORT, background=1)):
        assert s.json(RESP, body, 400)["error"]["param"] == "background"
    # errors of the request are told at once
    assert s.json(RESP, dict(SHORT, input="x" * 9000), 400)["error"]["code"] == "context_length_exceeded"
    assert s.json(RESP, dict(SHORT, input="x" * 9000, stream=True), 400)["error"]["code"] == "context_length_exceeded"
    s.wait_metric("steel_requests_running", 0)
    assert s.stop() == 0
    s = Server(BUILD, "--store-mb", "0")
    assert "--store-mb" in s.json(RESP, SHORT, 400)["error"]["message"]
    s.stop()


def test_background_bounds(_):
    """A client has a bounded number of them, which others do not fill; nobody else's are seen."""
    s = Server(BUILD, "-np", "1", "-c", "8192", "--api-key", "one", "--api-key", "two")
    key = lambda k: {"headers": {"Authorization": "Bearer " + k}}
    ids = []
    while True:  # they come in faster than they end
        status, _, text = s.post(RESP, LONG, **key("one"))
        if status != 200:
            break
        ids.append(json.loads(text)["id"])
    e = json.loads(text)["error"]
    assert status == 429 and len(ids) >= 32, (status, len(ids))
    assert e["param"] == "background" and "32" in e["message"], e
    assert ended(s, s.json(RESP, SHORT, **key("two"))["id"], **key("two"))["status"] in ("completed", "incomplete")
    for path in (f"{RESP}/{ids[1]}", f"{RESP}/{ids[1]}?stream=true", f"{RESP}/{ids[1]}/input_items"):
        assert s.get(path, **key("two"))[0] == 404
    assert s.post(f"{RESP}/{ids[1]}/cancel", "", **key("two"))[0] == 404 and s.request("DELETE", f"{RESP}/{ids[1]}", **key("two"))[0] == 404
    assert json.loads(s.get(f"{RESP}/{ids[-1]}", **key("one"))[2])["status"] == "queued"
    for i in ids:
        assert json.loads(s.post(f"{RESP}/{i}/cancel", "", **key("one"))[2])["status"] in ("cancelled", "incomplete")
    assert ended(s, s.json(RESP, SHORT, **key("one"))["id"], **key("one"))["status"] in ("completed", "incomplete")
    # a page of another site cannot cancel
    assert s.post(f"{RESP}/{ids[1]}/cancel", "", headers={"Authorization": "Bearer one", "Origin": "http://evil.example"})[0] == 403
    # at the end nobody waits for those without a reader
    s.json(RESP, LONG, **key("one"))
    assert s.stop() == 0


def test_background_stream(_):
    s = Server(BUILD, "-np", "1", "-c", "8192")
    ev = events_of(s, SHORT)
    names = [n for n, _ in ev]
    assert names[:3] == ["response.created", "response.queued", "response.in_progress"], names
    plain = events_of(s, HI)
    assert names[3:] == [n for n, _ in plain][2:] and ev[0][1]["response"]["status"] == "queued"
    final = ev[-1][1]["response"]
    assert json.loads(s.get(f"{RESP}/{final['id']}")[2]) == final and text_of(final) == text_of(plain[-1][1]["response"])
    # the events of one that is over, from any number on
    whole = [(n, d) for n, (_, d) in enumerate(ev)]
    for after in (None, 0, 5, len(ev) - 2, len(ev) - 1, 10**6):
        query = "" if after is None else f"&starting_after={after}"
        status, headers, text = s.get(f"{RESP}/{final['id']}?stream=true{query}")
        assert status == 200 and headers["content-type"].startswith("text/event-stream")
        assert parsed(text) == whole[0 if after is None else after + 1:], (after, text[:300])
    for bad, param in (("stream=maybe", "stream"), ("stream=true&starting_after=-1", "starting_after"), ("stream=true&starting_after=x", "starting_after")):
        assert json.loads(s.get(f"{RESP}/{final['id']}?{bad}")[2])["error"]["param"] == param
    for id in (plain[-1][1]["response"]["id"], ended(s, s.json(RESP, SHORT)["id"])["id"]):
        status, _, text = s.get(f"{RESP}/{id}?stream=true")
        assert status == 400 and json.loads(text)["error"]["param"] == "stream"
    # readers of one that is over cost no copy of its events each, and are not told that they have all if it is deleted
    long = events_of(s, LONG)[-1][1]["response"]
    get = f"GET {RESP}/{long['id']}?stream=true HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    whole, before, readers = s.send(get), s.rss_kb(), []
    for _ in range(60):
        r = socket.socket()
        r.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        r.connect(("127.0.0.1", s.port))
        r.sendall(get)
        assert r.recv(15) == b"HTTP/1.1 200 OK"
        readers.append(r)
    grown = (s.rss_kb() - before) << 10
    assert len(whole) > 1 << 20 and (sanitized(BUILD) or grown < 60 * len(whole) / 3), (len(whole), grown)
    first = readers[0].recv(100)
    while piece := readers[0].recv(1 << 20):
        first += piece
    assert first.endswith(whole[-1000:]) and first.count(b"data: ") == whole.count(b"data: ")
    assert s.request("DELETE", f"{RESP}/{long['id']}")[0] == 200
    try:
        while piece := readers[1].recv(1 << 20):
            pass
        raise AssertionError("a cut stream ended well")
    except ConnectionResetError:
        pass
    for r in readers:
        r.close()
    # the client leaves in the middle; another goes on where it was
    c = http.client.HTTPConnection("127.0.0.1", s.port)
    c.request("POST", RESP, json.dumps(dict(LONG, stream=True, max_output_tokens=1500)))
    r = c.getresponse()
    seen = b""
    while seen.count(b"output_text.delta") < 10:
        seen += r.read1(4096)
    r.close()
    c.close()
    head = parsed(seen[:seen.rindex(b"\n\n")].decode())
    id, last = head[0][1]["response"]["id"], head[-1][0]
    tail = parsed(s.get(f"{RESP}/{id}?stream=true&starting_after={last}")[2])  # to its end
    assert [n for n, _ in head + tail] == list(range(len(head) + len(tail)))
    assert tail[-1][1]["type"] == "response.incomplete" and tail[-1][1]["response"]["usage"]["output_tokens"] == 1500
    assert "".join(d["delta"] for _, d in head + tail if d["type"].endswith("text.delta")) == text_of(tail[-1][1]["response"])
    # a cancel ends the streams of its readers
    ahead = [s.json(RESP, LONG)["id"] for _ in range(24)]
    c.request("POST", RESP, json.dumps(dict(LONG, stream=True)))
    r = c.getresponse()
    seen = b""
    while b"response.queued" not in seen or not seen.endswith(b"\n\n"):
        seen += r.read1(4096)
    id = parsed(seen[:seen.index(b"\n\n")].decode())[0][1]["response"]["id"]
    assert json.loads(s.post(f"{RESP}/{id}/cancel", "")[2])["status"] == "cancelled"
    last = parsed((seen + r.read()).decode())[-1][1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "cancelled"
    assert parsed(s.get(f"{RESP}/{id}?stream=true")[2])[-1][1] == last
    for other in ahead:
        s.post(f"{RESP}/{other}/cancel", "")
    # the kept events are bounded: the first ones go
    many = dict(LONG, stream=True, max_output_tokens=7000, include=["message.output_text.logprobs"], top_logprobs=20)
    status, _, text = s.post(RESP, many)
    ev = parsed(text)
    assert len(text) > 5 << 20 and [n for n, _ in ev] == list(range(len(ev)))
    id = ev[0][1]["response"]["id"]
    e = json.loads(s.get(f"{RESP}/{id}?stream=true")[2])["error"]
    assert e["param"] == "starting_after" and "no longer kept" in e["message"], e
    assert parsed(s.get(f"{RESP}/{id}?stream=true&starting_after={len(ev) - 100}")[2]) == ev[-99:]
    # at a shutdown one that is read ends in its own time
    c.request("POST", RESP, json.dumps(dict(LONG, stream=True, max_output_tokens=1000)))
    r = c.getresponse()
    seen = r.read1(1)
    s.proc.send_signal(signal.SIGTERM)
    assert parsed((seen + r.read()).decode())[-1][1]["type"] == "response.incomplete"
    assert s.proc.wait() == 0


def test_keys(_):
    s = Server(BUILD, "--api-key", "one", "--api-key", "two")
    key = lambda k: {"headers": {"Authorization": "Bearer " + k}}
    r = s.json(RESP, HI, **key("one"))
    assert s.get(f"{RESP}/{r['id']}", **key("one"))[0] == 200
    assert s.get(f"{RESP}/{r['id']}", **key("two"))[0] == 404 and s.get(f"{RESP}/{r['id']}")[0] == 401
    s.json(RESP, dict(HI, previous_response_id=r["id"]), 404, **key("two"))
    s.stop()


def test_bounded(_):
    """Kept responses never take more than they may."""
    s = Server(BUILD, "--store-mb", "1")
    ids = [s.json(RESP, dict(HI, input="x" * 4000, metadata={"a": "y" * 100000}))["id"] for _ in range(16)]
    kept = [s.get(f"{RESP}/{i}")[0] == 200 for i in ids]
    assert kept[-1] and not kept[0] and 2 < sum(kept) < 10, kept
    s.stop()
    s = Server(BUILD, "--store-mb", "0")
    assert s.get(f"{RESP}/{s.json(RESP, HI)['id']}")[0] == 404
    s.stop()


def test_ids(s):
    """Ids cannot be guessed from others: 128 random bits."""
    ids = [s.json(RESP, HI)["id"] for _ in range(20)]
    assert all(re.fullmatch("resp_[0-9a-f]{32}", i) for i in ids), ids
    for at in range(5, 37):  # a digit that never changes in 20 random ids has a chance of 16^-19
        assert len({i[at] for i in ids}) > 1, (at, ids)
    assert re.fullmatch("chatcmpl-[0-9a-f]{32}", s.json("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})["id"])


def test_owners(s):
    """Without keys, a response belongs to the address that made it."""
    def from_address(address, method, path, body=None):
        c = http.client.HTTPConnection("127.0.0.1", s.port, source_address=(address, 0))
        c.request(method, path, body)
        r = c.getresponse()
        status = r.status, json.loads(r.read())
        c.close()
        return status
    mine = s.json(RESP, HI)["id"]
    for address, status in (("127.0.0.2", 404), ("127.0.0.1", 200)):
        assert from_address(address, "GET", f"{RESP}/{mine}")[0] == status
        assert from_address(address, "POST", RESP, json.dumps(dict(HI, previous_response_id=mine)))[0] == status
        assert from_address(address, "GET", f"{RESP}/{mine}/input_items")[0] == status
        assert from_address(address, "DELETE", f"{RESP}/{mine}")[0] == status


def test_shares(_):
    """One key does not push the responses of others out of the store."""
    s = Server(BUILD, "--store-mb", "1", "--api-key", "one", "--api-key", "two")
    key = lambda k: {"headers": {"Authorization": "Bearer " + k}}
    large = dict(HI, input="x" * 4000, metadata={"a": "y" * 100000})
    mine = [s.json(RESP, large, **key("one"))["id"] for _ in range(2)]
    theirs = [s.json(RESP, large, **key("two"))["id"] for _ in range(16)]
    kept = lambda ids, k: [s.get(f"{RESP}/{i}", **key(k))[0] == 200 for i in ids]
    assert all(kept(mine, "one")) and kept(theirs, "two")[-1] and not kept(theirs, "two")[0]
    mine += [s.json(RESP, large, **key("one"))["id"] for _ in range(16)]
    assert 1 < sum(kept(theirs, "two")) and 1 < sum(kept(mine, "one"))
    s.stop()


def test_kept_costs(_):
    """What is brought back is counted before it is parsed, all of it together, as a body is."""
    s = Server(BUILD, "-c", "8192")
    parts = [{"role": "user", "content": [{"type": "input_text", "text": ""}] * 60000}]
    last, n = {}, 0
    while n < 8:
        status, _, text = s.post(RESP, dict(HI, input=parts, **last))
        if status != 200:
            break
        last, n = {"previous_response_id": json.loads(text)["id"]}, n + 1
    e = json.loads(text)["error"]
    assert status == 413 and n == 4 and e["param"] == "previous_response_id" and "1000000 JSON values" in e["message"], (n, text)
    # references: several items of one response are one parse, many large responses are too much
    ids = []
    for _ in range(8):
        r = s.json(RESP, dict(HI, input=[{"role": "user", "content": "x", "junk": "y" * 5000000}]))
        ids.append(json.loads(s.get(f"{RESP}/{r['id']}/input_items")[2])["first_id"])
    refer = lambda *names: dict(HI, input=[{"type": "item_reference", "id": i} for i in names])
    assert s.json(RESP, refer(*[ids[0]] * 50))["status"]
    e = s.json(RESP, refer(*ids), 400)["error"]
    assert e["param"] == "input[6]" and "32 MB" in e["message"], e
    assert s.json(RESP, refer(ids[0]))["status"] and s.stop() == 0


def test_built_in(_):
    """Tools and thinking, with a model that has both."""
    s = Server(BUILD, model="demo/steel-demo.gguf")
    body = {"input": QUESTION, "tools": [TOOL], "temperature": 0, "max_output_tokens": 300}
    r = s.json(RESP, body)
    calls = [i for i in r["output"] if i["type"] == "function_call"]
    assert r["status"] == "completed" and calls[0]["name"] == "get_weather", r["output"]
    assert json.loads(calls[0]["arguments"])["town"] == "Emberton" and calls[0]["call_id"] and calls[0]["id"].startswith("fc_")
    ev = events_of(s, body)
    done = [d for n, d in ev if n == "response.function_call_arguments.done"][0]
    assert done["arguments"] == calls[0]["arguments"] == "".join(d["delta"] for n, d in ev if n == "response.function_call_arguments.delta")
    assert [dict(i, id=0, call_id=0) for i in ev[-1][1]["response"]["output"]] == [dict(i, id=0, call_id=0) for i in r["output"]]
    result = {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": '{"weather": "sunny", "degrees": 21}'}
    on = s.json(RESP, dict(body, input=[result], previous_response_id=r["id"]))
    flat = s.json(RESP, dict(body, input=[{"role": "user", "content": QUESTION}] + r["output"] + [result]))
    assert text_of(on) == text_of(flat) and ("sunny" in text_of(on) or "21" in text_of(on)), text_of(on)
    named = s.json(RESP, dict(body, input="Hello!", tool_choice={"type": "function", "name": "get_weather"}))
    assert [i["type"] for i in named["output"]].count("function_call") == 1
    hidden = s.json(RESP, dict(body, tool_choice={"type": "allowed_tools", "mode": "auto", "tools": []}))
    assert not [i for i in hidden["output"] if i["type"] == "function_call"]
    # thinking: as content, or as a summary where one is asked for
    sum_body = {"input": "What is 17 + 25?", "temperature": 0, "max_output_tokens": 400}
    r = s.json(RESP, sum_body)
    think = r["output"][0]
    assert think["type"] == "reasoning" and think["summary"] == [] and "carry" in think["content"][0]["text"]
    assert r["usage"]["output_tokens_details"]["reasoning_tokens"] > 0 and "42" in text_of(r)
    r = s.json(RESP, dict(sum_body, reasoning={"summary": "auto"}))
    assert "carry" in r["output"][0]["summary"][0]["text"]
    names = [n for n, _ in events_of(s, dict(sum_body, reasoning={"summary": "auto"}))]
    at = [names.index("response.reasoning_summary_" + n) for n in ("part.added", "text.delta", "text.done", "part.done")]
    assert at == sorted(at)
    names = [n for n, _ in events_of(s, sum_body)]
    assert "response.reasoning_text.delta" in names and names.index("response.reasoning_text.done") < names.index("response.output_text.delta")
    ollama_built_in(s)
    s.stop()


def test_agents_tools(_):
    """Namespaces, custom tools, hosted tools and the items of agents, with a model that calls what it is told to."""
    close = {"type": "function", "name": "close", "description": "Closes it.", "strict": False, "parameters": {"type": "object", "properties": {"id": {"type": "string"}}}}
    space = {"type": "namespace", "name": "agents", "description": "Works with agents.", "tools": [close, dict(close, name="open")]}
    text = {"type": "custom", "name": "patch", "description": "Applies a patch.", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /[^x]+/"}}
    word = {"type": "custom", "name": "word", "format": {"type": "grammar", "syntax": "regex", "definition": "[a-c]{2}|x"}}
    hosted = [{"type": "web_search"}, {"type": "local_shell"}, {"type": "mcp", "server_label": "x"}]
    with tempfile.TemporaryDirectory() as d:
        script_model.build(d + "/space.gguf", "agents__close", '{"id":"seven"}')
        script_model.build(d + "/custom.gguf", "patch", json.dumps({"input": 'a "b"\nc'}))
        s = Server(BUILD, "-c", "8192", model=d + "/space.gguf")
        body = {"input": "go", "tools": [*hosted, TOOL, space, text], "tool_choice": {"type": "auto"}}
        r = s.json(RESP, body)
        call = r["output"][-1]
        assert (call["type"], call["namespace"], call["name"]) == ("function_call", "agents", "close"), r["output"]
        assert json.loads(call["arguments"]) == {"id": "seven"} and r["tools"] == body["tools"]
        ev = events_of(s, body)
        same = lambda items: [dict(i, id=0, call_id=0) for i in items]
        assert same(ev[-1][1]["response"]["output"]) == same(r["output"])
        assert [d["name"] for n, d in ev if n == "response.function_call_arguments.done"] == ["close"]
        s.wait_line("web_search")  # left out, and the log says so
        n = s.json(RESP, dict(body, tools=[TOOL, space, text]))["usage"]["input_tokens"]
        assert n == r["usage"]["input_tokens"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": [{"type": "input_text", "text": "done"}, {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}
        on = s.json(RESP, dict(body, input=[result], previous_response_id=r["id"]))
        flat = s.json(RESP, dict(body, input=[{"role": "user", "content": "go"}] + r["output"] + [result]))
        assert "All is done" in text_of(on) == text_of(flat) and on["usage"]["input_tokens"] == flat["usage"]["input_tokens"]
        in_text = dict(result, output="done[image: this model reads text only]")
        assert s.json(RESP, dict(body, input=[in_text], previous_response_id=r["id"]))["usage"]["input_tokens"] == on["usage"]["input_tokens"]
        named = s.json(RESP, dict(body, tool_choice={"type": "function", "namespace": "agents", "name": "close"}))
        assert named["output"][-1]["name"] == "close" and s.json(RESP, dict(body, tools=hosted, tool_choice={"type": "none"}))["status"] == "completed"
        # tools that come with an item, and items that hold nothing for this model
        extra = [{"type": "additional_tools", "role": "developer", "tools": [space]}, {"type": "compaction", "encrypted_content": "x"},
                 {"type": "web_search_call", "id": "ws_1", "status": "completed"}, {"role": "user", "content": "go"}]
        assert s.json(RESP, {"input": extra})["output"][-1]["namespace"] == "agents"
        s.wait_line("compaction")
        # a handshake for a websocket is refused in a form that makes clients fall back to posts
        head = b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        with s.socket() as c:
            c.sendall(head)
            assert c.recv(4096).startswith(b"HTTP/1.1 405 ")
        s.stop()
        s = Server(BUILD, "-c", "8192", model=d + "/custom.gguf")
        body = {"input": "go", "tools": [text, word]}
        r = s.json(RESP, body)
        call = r["output"][-1]
        assert call["type"] == "custom_tool_call" and call["name"] == "patch" and call["input"] == 'a "b"\nc' and call["id"].startswith("ctc_"), call
        ev = events_of(s, body)
        assert [d["input"] for n, d in ev if n == "response.custom_tool_call_input.done"] == [call["input"]]
        assert "".join(d["delta"] for n, d in ev if n == "response.custom_tool_call_input.delta") == call["input"]
        on = s.json(RESP, dict(body, input=[{"role": "user", "content": "go"}, *r["output"], {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"}]))
        assert "All is done" in text_of(on)
        # the Lark grammar of a tool holds, also a recursive one; the model is shown it once
        nest = dict(text, name="nest", format={"type": "grammar", "syntax": "lark", "definition": 'start: "(" start? ")" | /[a-c\\n]/\n'})
        r = s.json(RESP, dict(body, tools=[nest], tool_choice={"type": "custom", "name": "nest"}, temperature=2, seed=3, max_output_tokens=200))
        assert re.fullmatch(r"\(*[a-c\n]?\)*", r["output"][-1]["input"]) and r["output"][-1]["input"].count("(") == r["output"][-1]["input"].count(")"), r["output"]
        plain = dict(nest, description=text["description"] + "\n\nThe input follows this Lark grammar:\n" + nest["format"]["definition"], format={"type": "text"})
        n = [s.json("/v1/responses/input_tokens", {"input": "go", "tools": [t]})["input_tokens"] for t in (nest, plain)]
        assert n[0] == n[1], n
        status, _, reply = s.post(RESP, dict(body, tools=[dict(nest, format={"type": "grammar", "syntax": "lark", "definition": "start: a\n"})]))
        assert status == 400 and "line 1: there is no rule" in reply and "nest" in reply, reply
        # the regular expression of a tool holds
        r = s.json(RESP, dict(body, tool_choice={"type": "custom", "name": "word"}, temperature=2, seed=3))
        assert re.fullmatch("[a-c]{2}|x", r["output"][-1]["input"]), r["output"]
        s.stop()


def test_codex_items(_):
    """Items that Codex sends beside calls and their results: each prompt is that of the same history in plain items."""
    s = Server(BUILD, model="demo/steel-demo.gguf")
    user = {"role": "user", "content": "Go on."}
    call = lambda id, name, arguments: {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}
    result = lambda id, output: {"type": "function_call_output", "call_id": id, "output": output}
    prompt = lambda items, tools=(TOOL,): s.json(RESP, {"input": [user, *items], "tools": list(tools), "temperature": 0, "max_output_tokens": 1})["usage"]["input_tokens"]
    same = lambda items, plain, tools=(TOOL,), plain_tools=(TOOL,): (prompt(items, tools), prompt(plain, plain_tools))
    first = [call("c1", "get_weather", '{"town": "Emberton"}'), result("c1", "sunny")]
    # a result that the client adds by itself, with and without a namespace; call_id may be null
    for item, name in [({"name": "goal_objective", "namespace": "agent"}, "agent__goal_objective"), ({"name": "notes", "call_id": None}, "notes")]:
        item = {"type": "function_call_output", "output": "Win the game.", **item}
        a, b = same([*first, item], [*first, call("x", name, "{}"), result("x", "Win the game.")])
        assert a == b > prompt(first), (item, a, b)
    # its text reaches the model, and it may follow another response
    r = s.json(RESP, {"input": [user], "tools": [TOOL], "temperature": 0, "max_output_tokens": 1})
    one, two = (s.json(RESP, {"previous_response_id": r["id"], "input": [{"type": "function_call_output", "name": "n", "output": text}], "max_output_tokens": 1})["usage"]["input_tokens"]
                for text in ("Win.", "Win the game that we began yesterday, with the red stones."))
    assert two > one + 8, (one, two)
    # the shell of another server, named by `id` where an old client has no call_id
    action = {"type": "exec", "command": ["ls"]}
    for ids in ({"call_id": "c1", "id": "lsh_1"}, {"call_id": None, "id": "c1"}):
        shell = {"type": "local_shell_call", "status": "completed", "action": action, **ids}
        a, b = same([shell, result("c1", "a.txt")], [call("c1", "local_shell", json.dumps(action, separators=(",", ":"))), result("c1", "a.txt")])
        assert a == b, (a, b)
    # a search for tools: what it found can be called, once however often it is found
    other = dict(TOOL, name="get_time", defer_loading=True)
    found = [{"type": "tool_search_call", "call_id": None, "execution": "server", "arguments": {"paths": ["x"]}}, {"type": "tool_search_output", "call_id": None, "status": "completed", "execution": "server", "tools": [other]}]
    a, b = same([*found, *found[1:]], [], plain_tools=(TOOL, dict(TOOL, name="get_time")))
    assert a == b > prompt([]), (a, b)
    named = s.json(RESP, {"input": [user, *found], "tool_choice": {"type": "function", "name": "get_time"}, "max_output_tokens": 60})
    assert named["output"][-1]["name"] == "get_time", named["output"]
    # a message of another agent, and parts that no model here can read
    message = {"type": "agent_message", "author": "/root/worker", "recipient": "/root", "content": [{"type": "input_text", "text": "It is done."}, {"type": "encrypted_content", "encrypted_content": "gAAA"}]}
    a, b = same([*first, message], [*first, {"role": "user", "content": "Message from the agent /root/worker:\nIt is done.[encrypted]"}])
    assert a == b, (a, b)
    parts = [{"type": "input_text", "text": "heard: "}, {"type": "input_audio", "audio_url": "data:audio/wav;base64,AA"}, {"type": "encrypted_content", "encrypted_content": "x"}]
    a, b = same([first[0], result("c1", parts)], [first[0], result("c1", "heard: [audio: this model cannot hear it][encrypted]")])
    assert a == b, (a, b)
    for kind in ("ghost_snapshot", "context_compaction", "compaction", "image_generation_call"):
        assert prompt([{"type": kind}]) == prompt([]), kind
    s.stop()


def lines_of(s, path, body):
    status, headers, text = s.post(path, body)
    assert status == 200 and headers["content-type"] == "application/x-ndjson", (status, text)
    return [json.loads(l) for l in text.splitlines()]


def test_ollama(s):
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "options": {"seed": 1, "num_predict": 12}}
    chat = s.json("/v1/chat/completions", {"messages": body["messages"], "seed": 1, "max_tokens": 12})
    lines = lines_of(s, "/api/chat", body)  # streams unless told not to
    assert all(not l["done"] for l in lines[:-1]) and lines[-1]["done"] and lines[-1]["done_reason"] in ("stop", "length")
    assert "".join(l["message"]["content"] for l in lines) == chat["choices"][0]["message"]["content"]
    assert lines[-1]["eval_count"] == chat["usage"]["completion_tokens"] and lines[-1]["prompt_eval_count"] == chat["usage"]["prompt_tokens"]
    assert lines[-1]["total_duration"] >= lines[-1]["eval_duration"] > 0
    whole = s.json("/api/chat", dict(body, stream=False))
    assert whole["done"] and whole["message"] == {"role": "assistant", "content": chat["choices"][0]["message"]["content"]}
    gen = {"prompt": "hi", "options": {"seed": 1, "num_predict": 12}, "stream": False}
    assert s.json("/api/generate", gen)["response"] == whole["message"]["content"]
    comp = s.json("/v1/completions", {"prompt": "hi", "seed": 1, "max_tokens": 12})["choices"][0]["text"]
    assert s.json("/api/generate", dict(gen, raw=True))["response"] == comp
    assert "".join(l["response"] for l in lines_of(s, "/api/generate", dict(gen, raw=True, stream=True))) == comp
    tags = json.loads(s.get("/api/tags")[2])["models"]
    assert tags[0]["name"] == "toy" and tags[0]["details"]["format"] == "gguf" and tags[0]["size"] > 0
    assert json.loads(s.get("/api/version")[2])["version"]
    show = s.json("/api/show", {"model": "toy"})
    assert "completion" in show["capabilities"] and show["model_info"]["general.architecture"] and show["details"]
    ps = json.loads(s.get("/api/ps")[2])["models"][0]
    assert ps["context_length"] == 8192 and ps["size_vram"] == 0, ps
    # a model and nothing to say: clients have it loaded so
    for ask in ({"model": "toy"}, {"model": "toy", "messages": [], "keep_alive": "5m"}):
        r = s.json("/api/chat", ask)
        assert r["done"] and r["done_reason"] == "load" and r["message"] == {"role": "assistant", "content": ""}, r
    for ask in ({"model": "toy"}, {"model": "toy", "prompt": "", "stream": False}):
        r = s.json("/api/generate", ask)
        assert r["done"] and r["done_reason"] == "load" and r["response"] == "", r
    for path, bad in [("/api/chat", {}), ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["a"]}]}),
                      ("/api/generate", {}), ("/api/generate", {"prompt": "x", "suffix": "y"}), ("/api/chat", dict(body, options=5)),
                      ("/api/chat", dict(body, think=5)), ("/api/chat", dict(body, format="xml"))]:
        assert isinstance(s.json(path, bad, 400)["error"], str)
    assert isinstance(json.loads(s.get("/api/nothing")[2])["error"], str)


def test_reference_has_no_vram(_):
    """The reference overlaps steps like a GPU, but its memory is the host's."""
    s = Server(BUILD, env=dict(os.environ, STEEL_ISA="ref"))
    ps = json.loads(s.get("/api/ps")[2])["models"][0]
    s.stop()
    assert ps["size"] > 0 and ps["size_vram"] == 0, ps


def ollama_built_in(s):
    tool = {"type": "function", "function": {k: TOOL[k] for k in ("name", "description", "parameters")}}
    body = {"model": "x", "messages": [{"role": "user", "content": QUESTION}], "tools": [tool], "options": {"temperature": 0}}
    r = s.json("/api/chat", dict(body, stream=False))
    f = r["message"]["tool_calls"][0]["function"]
    assert f == {"name": "get_weather", "arguments": {"town": "Emberton"}}
    calls = [c for l in lines_of(s, "/api/chat", body) for c in l["message"].get("tool_calls", [])]
    assert [c["function"] for c in calls] == [f]
    more = body["messages"] + [r["message"], {"role": "tool", "tool_name": "get_weather", "content": '{"weather": "sunny", "degrees": 21}'}]
    said = s.json("/api/chat", dict(body, messages=more, stream=False))["message"]["content"]
    assert "sunny" in said or "21" in said, said
    r = s.json("/api/chat", {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "stream": False, "options": {"temperature": 0}})
    assert "carry" in r["message"]["thinking"] and "42" in r["message"]["content"]
    r = s.json("/api/chat", {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "stream": False, "think": False, "options": {"temperature": 0}})
    assert "thinking" not in r["message"]


server = Server(BUILD, "-np", "8", "-c", "8192")
try:
    run_tests([test_whole, test_stream, test_background, test_background_bounds, test_background_stream, test_kept, test_refused, test_truncation, test_ollama, test_keys, test_ids, test_owners, test_shares, test_bounded, test_kept_costs,
               test_built_in, test_agents_tools, test_codex_items, test_reference_has_no_vram], server)
finally:
    server.stop()
