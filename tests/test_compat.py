"""What clients of other servers rely on: prompt log-probabilities, older and newer ways to name tools, headers, CORS, refusals by name."""
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import types

sys.path.insert(0, os.path.dirname(__file__))
from serverlib import Gateway, Server, http_request, run_tests

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
CHAT, COMP, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
HI = {"messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 12}
WEATHER = {"name": "get_weather", "description": "Weather of a city",
           "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
TIME = {"name": "get_time", "description": "Time in a city", "parameters": {"type": "object", "properties": {}}}
ASCII = {str(i): -100 for i in range(128, 288)}  # the toy's tokens are bytes


def test_prompt_logprobs(s):
    """echo with logprobs: what was generated scores the same when it is read, first null, lists of one length."""
    made = s.json(COMP, {"prompt": "abc", "max_tokens": 150, "temperature": 0, "logprobs": 3, "logit_bias": ASCII, "ignore_eos": True})["choices"][0]
    text = "abc" + made["text"]
    ask = {"prompt": text, "echo": True, "logprobs": 3, "max_tokens": 0}
    c = s.json(COMP, ask)
    lp = c["choices"][0]["logprobs"]
    assert c["choices"][0]["text"] == text and c["choices"][0]["finish_reason"] == "length"
    assert c["usage"]["prompt_tokens"] == 153 and c["usage"]["completion_tokens"] == 0
    assert lp["tokens"] == list(text) and lp["text_offset"] == list(range(153))
    assert lp["token_logprobs"][0] is None and lp["top_logprobs"][0] is None
    assert lp["token_logprobs"][3:] == made["logprobs"]["token_logprobs"]
    assert lp["top_logprobs"][3:] == made["logprobs"]["top_logprobs"]
    # a prompt that is in the cache is computed all the same
    assert s.json(COMP, ask)["choices"] == c["choices"]
    # as lm-eval asks: token ids, one token more, the last entry dropped; greedy tokens are the best ones
    r = s.json(COMP, {"prompt": [[ord(x) for x in text], [97, 98, 99]], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234})
    first, second = sorted(r["choices"], key=lambda x: x["index"])
    assert len(first["logprobs"]["token_logprobs"]) == 154 and first["logprobs"]["token_logprobs"][:-1] == lp["token_logprobs"]
    assert len(second["logprobs"]["token_logprobs"]) == 4 and second["logprobs"]["token_logprobs"][:3] == lp["token_logprobs"][:3]
    greedy = [t == max(top.values()) for t, top in zip(first["logprobs"]["token_logprobs"][1:-1], first["logprobs"]["top_logprobs"][1:-1])]
    raw = s.json(COMP, {"prompt": text[:60], "max_tokens": 1, "temperature": 0, "logprobs": 1, "ignore_eos": True})["choices"][0]["logprobs"]["tokens"][0]
    assert greedy[59] == (raw == text[60])
    # streamed, the same lists; one token; no logprobs; no text at all
    events = [json.loads(e)["choices"][0] for e in s.stream(COMP, ask)[:-1]]
    assert "".join(e["text"] for e in events) == text
    assert [v for e in events for v in (e["logprobs"] or {}).get("token_logprobs", [])] == lp["token_logprobs"]
    one = s.json(COMP, {"prompt": "a", "echo": True, "logprobs": 0, "max_tokens": 0})["choices"][0]
    assert one["text"] == "a" and one["logprobs"]["token_logprobs"] == [None]
    assert s.json(COMP, {"prompt": "abc", "echo": True, "max_tokens": 0})["choices"][0]["text"] == "abc"
    assert s.json(COMP, {"prompt": "abc", "max_tokens": 0})["choices"][0]["text"] == ""
    assert s.json(CHAT, dict(HI, max_tokens=0), 400)["error"]["param"] == "max_tokens"


def test_prompt_logprobs_in_company(_):
    """Little room: sequences lose their pages and are read again; each token is told once, with the same number."""
    s = Server(BUILD, "-np", "4", "-c", "1024", "--kv-tokens", "1100")
    prompts = ["".join(chr(97 + (i * i + k * 7) % 26) for i in range(300)) for k in range(4)]
    ask = lambda p: {"prompt": p, "echo": True, "logprobs": 2, "max_tokens": 200, "temperature": 0, "ignore_eos": True, "logit_bias": ASCII}
    alone = [s.json(COMP, ask(p))["choices"][0] for p in prompts]
    before = s.metrics()["steel_preemptions_total"]
    got = s.json(COMP, ask(prompts))["choices"]  # one request: they begin together, however fast the machine is
    for k, choice in enumerate(sorted(got, key=lambda x: x["index"])):
        assert len(choice["logprobs"]["tokens"]) == 500 and dict(choice, index=0) == alone[k]
    assert s.metrics()["steel_preemptions_total"] > before
    assert s.stop() == 0


def test_legacy_functions(s):
    """functions and function_call are tools in other words: the same prompt, the same answer."""
    show = lambda body: s.json("/apply-template", body)["prompt"]
    old = {"messages": HI["messages"], "functions": [WEATHER]}
    new = {"messages": HI["messages"], "tools": [{"type": "function", "function": WEATHER}], "parallel_tool_calls": False}
    assert show(old) == show(new) and "get_weather" in show(old)
    assert show(dict(old, function_call={"name": "get_weather"})) == show(dict(new, tool_choice={"type": "function", "function": {"name": "get_weather"}}))
    assert "get_weather" not in show(dict(old, function_call="none"))
    talk = [{"role": "user", "content": "weather?"}, {"role": "assistant", "content": None, "function_call": {"name": "get_weather", "arguments": '{"city": "Rome"}'}},
            {"role": "function", "name": "get_weather", "content": "sun"}]
    told = [talk[0], {"role": "assistant", "content": None, "tool_calls": [{"id": "call_0", "type": "function", "function": talk[1]["function_call"]}]},
            {"role": "tool", "tool_call_id": "call_0", "name": "get_weather", "content": "sun"}]
    assert show(dict(old, messages=talk)) == show(dict(new, messages=told)) and "Rome" in show(dict(old, messages=talk))
    for bad, param in (({"functions": 3}, "functions"), ({"functions": [{}]}, "functions[0].name"), ({"functions": [WEATHER], "function_call": 3}, "function_call"),
                       ({"functions": [WEATHER], "function_call": {"name": "x"}}, "tool_choice")):
        assert s.json(CHAT, dict(HI, **bad), 400)["error"]["param"] == param


def test_allowed_tools(s):
    tools = [{"type": "function", "function": f} for f in (WEATHER, TIME)]
    choice = lambda mode, *names: {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [{"type": "function", "function": {"name": n}} for n in names]}}
    show = lambda c: s.json("/apply-template", {"messages": HI["messages"], "tools": tools, "tool_choice": c})["prompt"]
    assert "get_time" in show(choice("auto", "get_time")) and "get_weather" not in show(choice("auto", "get_time"))
    for name in ("get_time", "get_weather"):
        m = s.json(CHAT, dict(HI, tools=tools, tool_choice=choice("required", name), max_tokens=100))["choices"][0]["message"]
        assert m["tool_calls"] and {c["function"]["name"] for c in m["tool_calls"]} == {name}, m
    for bad, param in ((choice("auto"), "tools"), (choice("auto", "x"), "tools"), (choice("maybe", "get_time"), "mode")):
        e = s.json(CHAT, dict(HI, tools=tools, tool_choice=bad), 400)["error"]
        assert e["param"] == "tool_choice.allowed_tools." + param, e


def test_modalities(s):
    part = lambda p: dict(HI, messages=[{"role": "user", "content": [{"type": "text", "text": "look"}, p]}])
    for body, param in ((part({"type": "image_url", "image_url": {"url": "data:,"}}), "messages[0].content[1]"),
                        (part({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}), "messages[0].content[1]"),
                        (part({"type": "file", "file": {}}), "messages[0].content[1]"),
                        (dict(HI, modalities=["text", "audio"]), "modalities"), (dict(HI, modalities="audio"), "modalities"),
                        (dict(HI, audio={"voice": "alloy", "format": "wav"}), "audio")):
        e = s.json(CHAT, body, 400)["error"]
        assert e["param"] == param and param in e["message"], e
    assert s.json(CHAT, dict(HI, modalities=["text"]))
    e = s.json(MESSAGES, dict(HI, messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}]), 400)
    assert "messages[0].content[0]" in e["error"]["message"] and "image" in e["error"]["message"]
    e = s.json("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, 400)["error"]
    assert e["param"].startswith("input[0].content") and "input_image" in e["message"]
    assert "images" in s.json("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aaaa"]}]}, 400)["error"]


def test_embeddings(s):
    """Not there, and said so, before a byte of the body is read."""
    for path in ("/api/embed", "/api/embeddings", "/v1/embeddings"):
        got, _, text = s.post(path, {"model": "toy", "input": "x"})
        e = json.loads(text)["error"]
        assert got == 501 and "--embedding" in (e if path.startswith("/api") else e["message"]), text
    assert s.get("/v1/embeddings")[0] == 405


def test_too_long(s):
    """Each dialect has its words for a prompt over the context; agents look for them."""
    long = "x" * 9000
    e = s.json(CHAT, {"messages": [{"role": "user", "content": long}]}, 400)["error"]
    assert e["code"] == "context_length_exceeded" and e["type"] == "invalid_request_error" and e["param"] == "messages" and e["n_ctx"] == 8192
    # agents compact their conversation if the text matches one of their patterns; this one most of them have
    assert re.match(r"This model's maximum context length is 8192 tokens\. However, your prompt resulted in \d+ tokens", e["message"]), e
    e = s.json("/v1/responses", {"input": long}, 400)["error"]
    assert e["code"] == "context_length_exceeded" and "maximum context length is 8192 tokens" in e["message"]
    # Codex looks for it in the stream
    status, _, text = s.post("/v1/responses", {"input": long, "stream": True})
    last = json.loads(text.strip().split("data: ")[-1])
    assert status == 200 and last["type"] == "response.failed" and last["response"]["error"]["code"] == "context_length_exceeded", text
    n = s.json(MESSAGES + "/count_tokens", {"messages": [{"role": "user", "content": long}]})["input_tokens"]
    e = s.json(MESSAGES, {"max_tokens": 5, "messages": [{"role": "user", "content": long}]}, 400)
    assert e["type"] == "error" and e["error"] == {"type": "invalid_request_error", "message": f"prompt is too long: {n} tokens > 8192 maximum (the model's context)"}


def test_other_forms(s):
    """Paths of Azure's clients, and texts that were cut inside an emoji."""
    assert s.json("/openai" + CHAT, HI)["choices"] == s.json(CHAT, HI)["choices"]
    r = s.json("/openai/v1/responses", {"input": "hi", "max_output_tokens": 4})
    assert json.loads(s.get("/openai/v1/responses/" + r["id"])[2])["id"] == r["id"]
    assert json.loads(s.get("/openai/v1/models/toy")[2])["id"] == "toy" and s.get("/openai/v2/models")[0] == 404
    prompt = lambda text: json.loads(s.post("/apply-template", '{"messages":[{"role":"user","content":"%s"}]}' % text)[2])["prompt"]
    for cut in (r"\ud83d", r"\ude00", r"\uD83D", r"\ud83dx", r"\ud83d\n", r"\ud83d\ud83d", r"\\\ud83d", r"\ude00\ud83d"):
        whole = re.sub(r"\\u[dD][89a-fA-F]..", r"\\ufffd", cut)
        assert prompt("a" + cut) == prompt("a" + whole), cut
    assert "\U0001f600" in prompt(r"\ud83d\ude00") and r"\ud83d" in prompt(r"\\ud83d")  # a pair, and no escape at all
    assert s.post(CHAT, '{"messages":"\\ud8')[0] == 400 and s.post(CHAT, r'{"messages":"\ud8zz"}')[0] == 400


def test_request_ids(s):
    seen = set()
    for method, path, body in (("GET", "/health", None), ("GET", "/nothing", None), ("POST", CHAT, HI), ("POST", CHAT, "{"), ("OPTIONS", CHAT, None), ("POST", CHAT, dict(HI, stream=True))):
        h = s.request(method, path, body)[1]
        assert h["x-request-id"] == h["request-id"] and h["request-id"].startswith("req_"), h
        seen.add(h["request-id"])
    assert len(seen) == 6
    own = lambda v: s.get("/health", headers={"X-Request-Id": v})[1]["x-request-id"]
    assert own("my-id_1.2:3") == "my-id_1.2:3" and own("a" * 128) == "a" * 128
    for bad in ("a" * 129, "two words", "a\"b", "<x>", "a;b", "\xe9"):
        assert own(bad).startswith("req_")
    for raw in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"a" * 70000):
        out = s.send(raw)
        assert out.count(b"X-Request-Id: req_") == 1 and out.count(b"\r\nRequest-Id: req_") == 1, out[:300]
    # one connection: each request has its own
    out = s.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: first\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert out.count(b"X-Request-Id: first") == 1 and out.count(b"X-Request-Id: req_") == 1


def test_models(s):
    m = json.loads(s.get("/v1/models")[2])
    assert m["has_more"] is False and m["first_id"] == m["last_id"] == "toy"
    one = m["data"][0]
    assert one["type"] == "model" and one["display_name"] == "toy" and one["object"] == "model" and one["created_at"].endswith("Z") and len(one["created_at"]) == 20
    e = json.loads(s.get("/v1/models/other", headers={"anthropic-version": "2023-06-01"})[2])
    assert e["type"] == "error" and e["error"]["type"] == "not_found_error"


def test_encoding(s):
    """Packed bodies are refused on the head: nobody knows what they would be before it is paid for."""
    for value in ("gzip", "br", "deflate, gzip"):
        got, h, text = s.post(CHAT, HI, headers={"Content-Encoding": value})
        assert got == 415 and h["accept-encoding"] == "identity" and value in json.loads(text)["error"]["message"]
    assert s.post(CHAT, HI, headers={"Content-Encoding": "identity"})[0] == 200


def test_cors(s):
    """Pages of this machine may call; others only where --cors-origin lists them, and then only those."""
    post = lambda server, origin: server.post(CHAT, HI, headers={"Origin": origin, "Content-Type": "application/json"})
    for origin in ("http://localhost:3000", "https://localhost", "http://127.0.0.1:5173", "http://[::1]:8000", "http://app.localhost:1"):
        got, h, _ = post(s, origin)
        assert got == 200 and h["access-control-allow-origin"] == origin and h["vary"] == "Origin", origin
        assert "x-request-id" in h["access-control-expose-headers"].lower()
        got, h, _ = s.request("OPTIONS", CHAT, headers={"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"})
        assert got == 204 and h["access-control-allow-origin"] == origin and h["access-control-allow-headers"] == "authorization"
    for origin in ("http://evil.example", "http://localhost.evil.example", "http://notlocalhost", "null", "file://localhost", "http://127.0.0.1.evil.example", "http://localhost@evil.example"):
        got, h, _ = post(s, origin)
        assert got == 403 and "access-control-allow-origin" not in h, origin
    strict = Server(BUILD, "--cors-origin", "http://ok.example")
    assert post(strict, "http://ok.example")[0] == 200 and post(strict, "http://localhost:3000")[0] == 403
    assert strict.stop() == 0


def test_azure(_):
    s = Server(BUILD, "--api-key", "secret")
    assert s.post(CHAT, HI, headers={"api-key": "wrong"})[0] == 401 and s.post(CHAT, HI, headers={"api-key": "secret"})[0] == 200
    path = "/openai/deployments/toy/chat/completions?api-version=2024-10-21"
    assert s.post(path, HI, headers={"api-key": "secret"})[0] == 200 and s.post(path, HI)[0] == 401
    assert s.stop() == 0


def test_connections_of_one_address(_):
    """One address leaves places for the others; the refused one is told so, and a place that is free again is given."""
    def conn(s, source):
        return socket.create_connection(("127.0.0.1", s.port), source_address=(source, 0))

    def ask(c):
        try:
            c.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return c.recv(4096).split(b"\r\n")[0]
        except OSError:
            return b"refused"
    for flags, most in ((("--max-connections", "16"), 14), (("--max-connections", "16", "--max-connections-per-address", "5"), 5)):
        s = Server(BUILD, *flags)
        held = [conn(s, "127.0.0.2") for _ in range(most)]
        assert all(ask(c) == b"HTTP/1.1 200 OK" for c in held)
        extra = conn(s, "127.0.0.2")
        assert ask(extra) in (b"HTTP/1.1 503 Service Unavailable", b"refused", b"")
        extra.close()
        others = [conn(s, "127.0.0.3") for _ in range(2)]
        assert all(ask(c) == b"HTTP/1.1 200 OK" for c in others)
        held.pop().close()
        while True:
            c = conn(s, "127.0.0.2")
            if ask(c) == b"HTTP/1.1 200 OK":
                break
            c.close()
        for x in held + others + [c]:
            x.close()
        assert s.stop() == 0


def test_trusted_proxy(_):
    """X-Forwarded-For of a proxy that is trusted tells clients apart, with a router between them too; anybody else's does nothing."""
    class Stream:
        """A long answer, asked for from an address."""

        def __init__(self, port, source, forwarded=None):
            self.c = http.client.HTTPConnection("127.0.0.1", port, source_address=(source, 0))
            body = {"prompt": "abc", "max_tokens": 7000, "ignore_eos": True, "stream": True}
            self.c.request("POST", COMP, json.dumps(body), {"X-Forwarded-For": forwarded} if forwarded else {})

        def close(self):
            self.c.close()

    flags = ("-np", "8", "-c", "8192", "--max-parallel-per-client", "1", "--log-level", "debug")
    s = Server(BUILD, *flags, "--trusted-proxy", "127.0.0.9", "--trusted-proxy", "127.0.9.0/24")
    running, waiting = "steel_requests_running", "steel_requests_waiting"
    for source, said, distinct in (("127.0.0.9", ("1.1.1.1", "6.6.6.6, 2.2.2.2"), True),
                                   ("127.0.9.77", ("1.1.1.1:80", "[2001:db8::1]:80"), True),
                                   ("127.0.0.9", ("6.6.6.1, 1.1.1.1", "6.6.6.2, 1.1.1.1"), False),  # what a client sent itself
                                   ("127.0.0.9", ("2001:db8::1", "2001:db8::2"), False),  # one network of IPv6
                                   ("127.0.0.9", ("unknown", "1.1.1.1, x"), False),
                                   ("127.0.0.8", ("1.1.1.1", "2.2.2.2"), False)):
        streams = [Stream(s.port, source, x) for x in said]
        s.wait_metric(running, 2 if distinct else 1)
        s.wait_metric(waiting, 0 if distinct else 1)
        for x in streams:
            x.close()
        s.wait_metric(running, 0)
        s.wait_metric(waiting, 0)
    for client in ("1.1.1.1", "2001:db8::1", "127.0.0.8"):
        s.wait_line("client=" + client)
    assert s.stop() == 0
    # clients of a router are one address, unless it is trusted
    for trust, n in (((), 1), (("--trusted-proxy", "127.0.0.1"), 2)):
        s = Server(BUILD, *flags, *trust)
        r = Gateway(BUILD, [s])
        streams = [Stream(r.port, "127.0.0.2"), Stream(r.port, "127.0.0.3")]
        s.wait_metric(running, n)
        s.wait_metric(waiting, 2 - n)
        for x in streams:
            x.close()
        s.wait_metric(running, 0)
        r.stop()
        assert s.stop() == 0
    # a trusted proxy may have all connections
    s = Server(BUILD, "--max-connections", "16", "--trusted-proxy", "127.0.0.9")
    held = [socket.create_connection(("127.0.0.1", s.port), source_address=("127.0.0.9", 0)) for _ in range(15)]
    for c in held:
        c.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert c.recv(4096).startswith(b"HTTP/1.1 200 OK")
        c.close()
    assert s.stop() == 0
    for bad in ("*", "localhost", "10.0.0.0/33", ""):
        r = subprocess.run([os.path.join(BUILD, "steel"), "serve", "--trusted-proxy", bad], capture_output=True, text=True)
        assert r.returncode == 2 and "--trusted-proxy" in r.stderr, (bad, r.stderr)


def test_open_files(_):
    """The limit of open files is raised as far as it may be; connections beyond it are told so and do not hang."""
    def start(soft, hard, *flags):
        lower = f"ulimit -Sn {soft} && ulimit -Hn {hard} && exec "
        wrapper = os.path.join(work.name, "steel")
        with open(wrapper, "w") as f:
            f.write(f"#!/bin/sh\n{lower}{os.path.abspath(os.path.join(BUILD, 'steel'))} \"$@\"\n")
        os.chmod(wrapper, 0o755)
        return Server(work.name, *flags, model=toy)

    def healthy(c):
        try:
            c.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return c.recv(4096).startswith(b"HTTP/1.1 200 OK")
        except OSError:
            return False

    with tempfile.TemporaryDirectory(prefix="steel-files-") as name:
        work = types.SimpleNamespace(name=name)
        toy = os.path.join(name, "toy.gguf")
        subprocess.run([os.path.join(BUILD, "tests/toy_gguf"), toy], check=True)
        s = start(64, 1000)
        held = [s.socket() for _ in range(300)]
        assert all(healthy(c) for c in held)
        assert "most=872" in s.wait_line("fewer connections than --max-connections")
        for c in held:
            c.close()
        assert s.stop() == 0
        s = start(64, 128, "--max-connections-per-address", "1000")  # three quarters of 128
        held = [s.socket() for _ in range(120)]
        assert [healthy(c) for c in held] == [True] * 96 + [False] * 24
        for c in held:
            c.close()
        s.wait_metric("steel_connections", 1)
        assert s.stop() == 0


def test_cut_calls(s):
    """A call that max_tokens cuts short: its whole text is content. In a stream its beginning has been sent and stays as it was."""
    # arguments that cannot be whole that soon; the special tokens stay possible
    city = {"type": "object", "properties": {"city": {"type": "string", "minLength": 400}}, "required": ["city"], "additionalProperties": False}
    tool = {"name": "get_weather", "strict": True, "parameters": city}
    common = {"temperature": 0, "logit_bias": {str(i): -100 for i in range(128, 256)}}

    def is_text(text):
        name = text.index('"get_weather"')
        assert text.startswith("<tool_call>") and '"city"' in text[name:], text

    body = dict(common, messages=HI["messages"], max_tokens=160, reasoning_effort="none", tools=[{"type": "function", "function": tool}], tool_choice="required")
    c = s.json(CHAT, body)["choices"][0]
    is_text(c["message"]["content"])
    assert "tool_calls" not in c["message"] and c["finish_reason"] == "length"
    deltas = [e["choices"][0] for e in map(json.loads, s.stream(CHAT, body)[:-1])]
    text = "".join(d["delta"].get("content") or "" for d in deltas)
    calls = [t for d in deltas for t in d["delta"].get("tool_calls", [])]
    args = "".join(t["function"]["arguments"] for t in calls)
    is_text(text)
    assert calls[0]["function"]["name"] == "get_weather" and {t["index"] for t in calls} == {0} and text.endswith(args) and args[0] == "{"
    assert deltas[-1]["finish_reason"] == "length" and not any("content" in d["delta"] for d in deltas[:-2] if "tool_calls" in d["delta"])
    # Anthropic's: a block of each
    ask = dict(common, messages=HI["messages"], max_tokens=160, tool_choice={"type": "any"}, thinking={"type": "disabled"},
               tools=[{"name": "get_weather", "strict": True, "input_schema": city}])
    m = s.json(MESSAGES, ask)
    assert [b["type"] for b in m["content"]] == ["text"] and m["stop_reason"] == "max_tokens", m
    is_text(m["content"][0]["text"])
    events = [json.loads(e) for e in re.findall(r"^data: (.*)$", s.post(MESSAGES, dict(ask, stream=True))[2], re.M)]
    starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert starts == ["tool_use", "text"] and sum(e["type"] == "content_block_stop" for e in events) == 2
    is_text("".join(e["delta"]["text"] for e in events if e.get("delta", {}).get("type") == "text_delta"))
    assert [e["delta"]["stop_reason"] for e in events if e["type"] == "message_delta"] == ["max_tokens"]
    # Responses: an unfinished item, which a later response does not go on from
    ask = dict(common, input="hi", max_output_tokens=160, reasoning={"effort": "none"}, tools=[dict(tool, type="function")], tool_choice="required")
    r = s.json("/v1/responses", ask)
    assert [i["type"] for i in r["output"]] == ["message"]
    is_text(r["output"][0]["content"][0]["text"])
    last = json.loads(s.stream("/v1/responses", ask)[-1].split("data: ")[1])["response"]
    assert [(i["type"], i["status"]) for i in last["output"]] == [("function_call", "incomplete"), ("message", "incomplete")]
    is_text(last["output"][1]["content"][0]["text"])
    s.json("/v1/responses", {"input": "and?", "previous_response_id": last["id"], "max_output_tokens": 16})


def test_effort(_):
    """How much a model is to think, in each API's own field, over a template that knows it as gpt-oss's does."""
    s = Server(BUILD, "--chat-template", "tests/data/gpt_oss.jinja")
    hi = HI["messages"]

    def told(body, **more):
        prompt = s.json("/apply-template", dict(body, messages=hi, **more))["prompt"]
        return prompt.split("Reasoning: ")[1].split("\n")[0]

    ladder = dict(none="low", minimal="low", low="low", medium="medium", high="high", xhigh="high", max="high")
    assert told({}) == "medium" == told({"reasoning_effort": None})
    for word, want in ladder.items():
        assert told({"reasoning_effort": word}) == want, word
    assert told({"reasoning_effort": "high"}, chat_template_kwargs={"reasoning_effort": "mine"}) == "mine"
    # the other APIs show no prompt: their prompts are as long as one with that effort is ("low", "medium" and "high" differ)
    long = {w: len(s.json("/tokenize", {"content": "Reasoning: " + w})["tokens"]) for w in ("low", "medium", "high")}
    assert len(set(long.values())) == 3
    ways = {
        "reasoning_effort": (CHAT, lambda w: {"messages": hi, "max_tokens": 1, "reasoning_effort": w}, lambda r: r["usage"]["prompt_tokens"]),
        "reasoning.effort": ("/v1/responses", lambda w: {"input": "hi", "max_output_tokens": 16, "reasoning": {"effort": w}},
                             lambda r: r["usage"]["input_tokens"]),
        "output_config.effort": (MESSAGES + "/count_tokens", lambda w: {"messages": hi, "output_config": {"effort": w}}, lambda r: r["input_tokens"]),
        "think": ("/api/chat", lambda w: {"messages": hi, "think": w, "stream": False, "options": {"num_predict": 1}}, lambda r: r["prompt_eval_count"]),
    }
    for field, (path, body, count) in ways.items():
        base = count(s.json(path, body("medium"))) - long["medium"]
        for word, want in ladder.items():
            assert count(s.json(path, body(word))) - base == long[want], (field, word)
        for bad in ("ultra", "", "Low", 3):
            r = s.json(path, body(bad), status=400)["error"]
            text = r if isinstance(r, str) else r["message"]
            assert field in text and "none, minimal, low, medium, high, xhigh or max" in text, text
            assert path not in (CHAT, "/v1/responses") or r["param"] == field
    for on, want in ((True, "medium"), (False, "low")):  # a switch, which this template does not have: as little as it has
        path, body, count = ways["think"]
        assert count(s.json(path, body(on))) == count(s.json(path, body(want))), (on, [count(s.json(path, body(w))) for w in (on, "none", "low", "medium", "high")])
    s.json(MESSAGES, {"messages": hi, "max_tokens": 1, "output_config": 3}, status=400)
    assert s.stop() == 0


def test_built_in(_):
    """A model that thinks and calls: what of it is shown, and in which words."""
    demo = "demo/steel-demo.gguf"
    if not os.path.exists(demo):
        print("skipped: test_built_in: no", demo)
        return
    s = Server(BUILD, model=demo)
    hello = {"messages": [{"role": "user", "content": "Hello, who are you?"}], "temperature": 0, "max_tokens": 200}
    # thinking blocks only for who asks
    quiet = s.json(MESSAGES, hello)
    loud = s.json(MESSAGES, dict(hello, thinking={"type": "enabled", "budget_tokens": 1024}))
    assert [b["type"] for b in quiet["content"]] == ["text"] and [b["type"] for b in loud["content"]] == ["thinking", "text"]
    assert quiet["content"][0]["text"] == loud["content"][1]["text"] and loud["content"][0]["thinking"]
    assert s.json(MESSAGES, dict(hello, thinking={"type": "adaptive"}))["content"] == loud["content"]
    assert [b["type"] for b in s.json(MESSAGES, dict(hello, thinking={"type": "disabled"}))["content"]] == ["text"]
    for body, want in ((hello, ["text"]), (dict(hello, thinking={"type": "enabled", "budget_tokens": 1024}), ["thinking", "text"])):
        _, _, text = s.post(MESSAGES, dict(body, stream=True))
        events = [json.loads(l[6:]) for l in text.splitlines() if l.startswith("data: ")]
        starts = [(e["index"], e["content_block"]["type"]) for e in events if e["type"] == "content_block_start"]
        assert starts == list(enumerate(want)) and sum(e["type"] == "content_block_stop" for e in events) == len(want)
        assert "".join(e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta") == quiet["content"][0]["text"]
    # cut inside thinking: nothing to show, and the stream is whole all the same
    cut = s.json(MESSAGES, dict(hello, max_tokens=3))
    assert cut["content"] == [] and cut["stop_reason"] == "max_tokens"
    _, _, text = s.post(MESSAGES, dict(hello, max_tokens=3, stream=True))
    names = [l[7:] for l in text.splitlines() if l.startswith("event: ")]
    assert names == ["message_start", "message_delta", "message_stop"]
    # stop strings count in the answer, not in the thinking before it
    m = s.json(CHAT, hello)["choices"][0]["message"]
    inside = next(w for w in m["reasoning_content"].split() if len(w) > 2 and w not in m["content"])
    answered = m["content"].split()[2]
    for thinking in ({}, {"chat_template_kwargs": {"enable_thinking": True}}):
        c = s.json(CHAT, dict(hello, stop=[inside], **thinking))["choices"][0]
        assert c["message"]["content"] == m["content"] and c["finish_reason"] == "stop" and "stop_reason" not in c
    c = s.json(CHAT, dict(hello, stop=[inside, answered]))["choices"][0]
    assert c["message"]["content"] == m["content"][:m["content"].index(answered)] and c["stop_reason"] == answered
    assert c["message"]["reasoning_content"] == m["reasoning_content"]
    # a function call, in the old words, whole and streamed
    ask = {"messages": [{"role": "user", "content": "What is the weather in Paris?"}], "temperature": 0, "max_tokens": 200, "functions": [WEATHER]}
    for extra in ({}, {"function_call": {"name": "get_weather"}}):
        c = s.json(CHAT, dict(ask, **extra))["choices"][0]
        call = c["message"]["function_call"]
        assert c["finish_reason"] == "function_call" and "tool_calls" not in c["message"] and c["message"]["content"] is None
        assert call["name"] == "get_weather" and json.loads(call["arguments"]) == {"city": "Paris"}
        deltas = [json.loads(e)["choices"][0] for e in s.stream(CHAT, dict(ask, **extra))[:-1]]
        parts = [d["delta"]["function_call"] for d in deltas if "function_call" in d["delta"]]
        assert [p["name"] for p in parts if "name" in p] == ["get_weather"] and "".join(p["arguments"] for p in parts) == call["arguments"]
        assert deltas[-1]["finish_reason"] == "function_call" and not any("tool_calls" in d["delta"] for d in deltas)
    done = s.json(CHAT, dict(ask, messages=ask["messages"] + [c["message"], {"role": "function", "name": "get_weather", "content": "{\"sky\": \"sunny\"}"}]))["choices"][0]
    assert done["finish_reason"] == "stop" and done["message"]["content"] and "function_call" not in done["message"]
    assert s.stop() == 0


server = Server(BUILD, "-np", "8", "-c", "8192")
tests = [test_prompt_logprobs, test_prompt_logprobs_in_company, test_legacy_functions, test_allowed_tools, test_modalities, test_embeddings, test_too_long, test_other_forms, test_request_ids,
         test_models, test_encoding, test_cors, test_azure, test_connections_of_one_address, test_trusted_proxy,
         test_open_files, test_effort, test_cut_calls, test_built_in]
if len(sys.argv) > 2:
    tests = [t for t in tests if any(a in t.__name__ for a in sys.argv[2:])]
try:
    run_tests(tests, server)
finally:
    rc = server.stop()
    if rc != 0:
        print(server.log()[-4000:])
        print("the server exited with", rc)
        os._exit(1)
