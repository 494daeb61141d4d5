#!/usr/bin/env python3
"""`steel route` in front of real replicas, some of them killed or stopped, and of servers that answer whatever they
are told to."""
import argparse
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../bench"))
from serverlib import HANG, HEALTHY, Fake, Gateway, Server, http_request, run_tests, sanitized
from load import Load, texts

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
COMP, CHAT, RESP = "/v1/completions", "/v1/chat/completions", "/v1/responses"
QUICK = ("--health-interval", "0.1", "--health-timeout", "10")
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def until(what, why="it never came true"):
    end = time.time() + HANG
    while not what():
        assert time.time() < end, why
        time.sleep(0.01)


MODEL = None


def model():
    """One toy model for all replicas."""
    global MODEL
    if not MODEL:
        MODEL = tempfile.TemporaryDirectory(prefix="steel-test-")
        subprocess.run([os.path.join(BUILD, "tests/toy_gguf"), MODEL.name + "/toy.gguf"], check=True)
    return MODEL.name + "/toy.gguf"


def replica(*flags):
    return Server(BUILD, *flags, model=model())


def value(r, name, **labels):
    """Of a metric, summed over what is not named."""
    total = 0
    for line in r.get("/metrics")[2].splitlines():
        m = re.match(r"([a-zA-Z_:]+)(?:\{(.*)\})? (\S+)$", line)
        if m and m.group(1) == name and all(f'{k}="{v}"' in (m.group(2) or "") for k, v in labels.items()):
            total += float(m.group(3))
    return total


def name_of(server):
    return f"127.0.0.1:{server.port}"


# What one address in front of several is

def test_one_roof():
    a, b = replica("--alias", "left"), replica("--alias", "right")
    r = Gateway(BUILD, [a, f"http://localhost:{b.port}/v1"], *QUICK)
    r.wait_count("replica is in", 2)
    assert json.loads(r.get("/health")[2]) == {"status": "ok", "replicas": 2, "available": 2}
    models = json.loads(r.get("/v1/models")[2])
    assert models["object"] == "list" and [m["id"] for m in models["data"]] == ["left", "right"], models
    assert models["last_id"] == "right"
    assert len(json.loads(r.get("/api/tags")[2])["models"]) == 2
    # A request that names a model goes to who has it; one that names no known one to anybody.
    for _ in range(4):
        assert r.json(COMP, {"model": "right", "prompt": "x", "max_tokens": 1})["model"] == "right"
        assert r.json(COMP, {"model": "left", "prompt": "x", "max_tokens": 1})["model"] == "left"
    got = {r.json(COMP, {"model": "other", "prompt": "x" * i, "max_tokens": 1})["model"] for i in range(1, 5)}
    assert got == {"left", "right"}
    # Metrics: every family once, every sample of a replica with its name.
    text = r.get("/metrics")[2]
    types = re.findall(r"^# TYPE (\S+)", text, re.M)
    assert len(types) == len(set(types)) and "steel_requests_running" in types and "steel_route_up" in types
    seen, now = set(), None
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            now = line.split()[2]
            assert now not in seen
            seen.add(now)
        elif not line.startswith("#"):
            assert line.startswith(now), (now, line)
    for s, name in ((a, name_of(a)), (b, f"localhost:{b.port}")):
        assert value(r, "steel_route_up", upstream=name) == 1
        assert value(r, "steel_generation_tokens_total", upstream=name) == s.metrics()["steel_generation_tokens_total"]
        assert value(r, "steel_time_to_first_token_seconds_count", upstream=name) > 0
    # What else replicas answer comes through as it is: errors, the page, HEAD, streams of other dialects.
    assert r.get("/nowhere")[0] == 404 and "nothing at GET /nowhere" in r.get("/nowhere")[2]
    assert r.json(COMP, {"prompt": 7.5}, status=400)["error"]["param"] == "prompt"
    status, headers, text = r.get("/")
    assert status == 200 and "text/html" in headers["content-type"]
    status, headers, text = r.request("HEAD", "/")
    assert status == 200 and text == "" and int(headers["content-length"]) > 100
    status, headers, _ = r.post(COMP, {"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": "mine-1"})
    assert headers["x-request-id"] == "mine-1" and headers["request-id"] == "mine-1"
    until(lambda: [l for l in a.log().splitlines() + b.log().splitlines() if " completions " in l])
    assert r.stop() == 0 and a.stop() == 0 and b.stop() == 0


def test_climbing():
    """Paths with "/../" reach no replica, however they are written."""
    got = []
    fake = Fake(lambda request, c: got.append(request) or b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    r = Gateway(BUILD, [fake])
    for path in ("/v1/../admin", "/../admin", "/v1/..", "/%2e%2e/admin", "/v1/%2E./admin", "/v1/..%2fadmin", "/v1\\..\\admin", "/v1/./admin", "/v1/x/%2e"):
        out = r.send(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode())
        assert out.startswith(b"HTTP/1.1 400 "), (path, out[:200])
    assert not got, got
    assert r.post("/v1/a..b/...", {})[0] == 200 and len(got) == 1
    r.stop()


def test_starts_without_replicas():
    """It listens and says 503 until one is there; exit code and message where an option is wrong."""
    port = socket.create_server(("127.0.0.1", 0))
    free = port.getsockname()[1]
    port.close()
    r = Gateway(BUILD, [free], *QUICK, wait=False)
    assert "Connection refused" in r.wait_line("replica is not there yet")
    status, headers, text = r.get("/health")
    assert status == 503 and headers["retry-after"] == "2" and "no replica" in text
    assert r.post(COMP, {"prompt": "x"})[0] == 503 and r.get("/v1/models")[0] == 503
    assert "steel_route_up" in r.get("/metrics")[2]
    a = replica("--port", str(free))
    r.wait_line("ready")
    assert r.get("/health")[0] == 200 and r.json(COMP, {"prompt": "x", "max_tokens": 1})
    assert r.stop(signal.SIGINT) == 130 and a.stop() == 0
    for flags, why in (([], "--upstream is missing"), (["--upstream", "gpu:80"], "must begin with http"),
                       (["--upstream", "http://x:1", "--upstream", "http://x:1/"], "given twice"),
                       (["--upstream", "http://x:1", "--health-path", "health"], "--health-path"),
                       (["--upstream", "http://x:1", "--upstream-api-key", "a b"], "--upstream-api-key")):
        p = subprocess.run([BUILD + "/steel", "route", *flags], capture_output=True, text=True)
        assert p.returncode in (1, 2) and why in p.stderr, p.stderr


def test_heads():
    """What a replica is told of the client, and what not; what the client is told of the replica."""
    fake = Fake(lambda head, c: b"HTTP/1.1 200 Fine\r\nContent-Length: 2\r\nX-Own: yes\r\nConnection: x-hop\r\n"
                b"X-Hop: no\r\nKeep-Alive: timeout=5\r\nX-Request-Id: theirs\r\nServer: theirs\r\n\r\nok")
    r = Gateway(BUILD, [fake], *QUICK)
    status, headers, text = r.request("POST", "/v1/x%2Fy/..z?q=%20a&b", b"body", {
        "Authorization": "Bearer secret", "X-Own": "kept", "Connection": "close, X-Mine", "X-Mine": "hop", "TE": "trailers",
        "Upgrade": "h2c", "X-Forwarded-For": "10.1.2.3", "X-Request-Id": "id-7", "Content-Type": "application/json",
        "Origin": "http://localhost:5000", "Proxy-Authorization": "x"})
    assert (status, text) == (200, "ok") and headers["x-own"] == "yes" and headers["x-request-id"] == "id-7"
    assert "x-hop" not in headers and "keep-alive" not in headers and headers["server"] == "steel"
    assert headers["access-control-allow-origin"] == "http://localhost:5000"
    head, body = fake.seen[-1]
    lines = head.decode().split("\r\n")
    got = {l.split(": ")[0].lower(): l.split(": ", 1)[1] for l in lines[1:]}
    assert lines[0] == "POST /v1/x%2Fy/..z?q=%20a&b HTTP/1.1" and body == b"body"
    assert got["authorization"] == "Bearer secret" and got["x-own"] == "kept" and got["content-length"] == "4"
    assert got["host"] == name_of(fake) and got["x-forwarded-for"] == "10.1.2.3, 127.0.0.1" and got["x-request-id"] == "id-7"
    assert got["x-forwarded-proto"] == "http"
    assert not {"x-mine", "te", "upgrade", "origin", "proxy-authorization", "connection", "transfer-encoding"} & set(got), got
    # A chunked body arrives with a length; Expect is answered here.
    s = r.socket()
    s.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n"
              b"Connection: close\r\n\r\n")
    assert s.recv(100).startswith(b"HTTP/1.1 100 ")
    s.sendall(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
    while s.recv(65536):
        pass
    head, body = fake.seen[-1]
    assert body == b"abcde" and b"Content-Length: 5" in head and b"hunked" not in head and b"xpect" not in head
    r.stop()
    # A prefix of the upstream's own.
    deep = Fake(lambda head, c: OK)
    base = Gateway(BUILD, [f"http://127.0.0.1:{deep.port}/base/"], *QUICK, "--health-path", "/", wait=False)
    until(lambda: deep.seen)
    base.wait_line("ready")
    assert base.get("/v1/thing")[2] == "ok"
    assert any(h.startswith(b"GET /base/v1/thing ") for h, _ in deep.seen) and deep.seen[0][0].startswith(b"GET /base/ ")
    base.stop()
    fake.close()
    deep.close()


def test_access():
    """Keys on the head, hosts and other sites' pages; keys passed on or replaced."""
    fake = Fake(lambda head, c: OK)
    r = Gateway(BUILD, [fake], *QUICK, "--api-key", "k1", "--max-body", "1000")
    assert r.get("/health")[0] == 200
    s = r.socket()  # no byte of the body is waited for
    s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\n")
    assert s.recv(1000).startswith(b"HTTP/1.1 401 ")
    s.close()
    key = {"Authorization": "Bearer k1"}
    assert r.get("/v1/models")[0] == 401 and r.get("/metrics")[0] == 401
    assert r.post(COMP, "x" * 1001, headers=key)[0] == 413
    assert r.post(COMP, "{}", headers=dict(key, Host="evil.example"))[0] == 403
    assert r.post(COMP, "{}", headers=dict(key, Origin="http://evil.example"))[0] == 403
    assert r.post(COMP, "{}", headers=dict(key, **{"Content-Type": "multipart/form-data; boundary=x"}))[0] == 415
    assert not fake.seen
    assert r.post(COMP, "{}", headers=key)[0] == 200
    assert b"Authorization: Bearer k1" in fake.seen[-1][0]
    r.stop()
    r = Gateway(BUILD, [fake], *QUICK, "--api-key", "k1", "--upstream-api-key", "inner")
    assert r.post(COMP, "{}", headers={"X-Api-Key": "k1"})[0] == 200
    assert b"Authorization: Bearer inner" in fake.seen[-1][0] and b"k1" not in fake.seen[-1][0]
    r.stop()
    fake.close()
    # Where the gateway has none, the replica's own check counts.
    a = replica("--api-key", "k2")
    r = Gateway(BUILD, [a], *QUICK)
    assert r.post(COMP, {"prompt": "x"})[0] == 401 and r.get("/v1/models")[0] == 401
    assert r.json(COMP, {"prompt": "x", "max_tokens": 1}, headers={"Authorization": "Bearer k2"})
    assert r.get("/v1/models", headers={"Authorization": "Bearer k2"})[0] == 200
    r.stop()
    a.stop()


# The answer's way

def test_bytes():
    """Bodies come through to the byte, however they are framed and cut."""
    rng = random.Random(3)
    payload = bytes(rng.randrange(256) for _ in range(300_000))

    def answer(head, c):
        kind = head.split()[1].decode()
        if kind == "/length":
            return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nContent-Type: a/b\r\n\r\n" % len(payload) + payload
        if kind == "/close":
            return b"HTTP/1.1 200 OK\r\n\r\n" + payload
        if kind == "/chunks":
            at, out = 0, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            while at < len(payload):
                n = random.Random(at).choice((1, 2, 700, 20000))
                out += chunk(payload[at:at + n])
                at += n
            out += b"0\r\nTrailer: x\r\n\r\n"
            for i in range(0, len(out), 7001):
                c.sendall(out[i:i + 7001])
            return b""
        c.sendall(EVENTS)
        for piece in (b": ping\n\n", b"data: {\"a\":", b"1}\n", b"\n", b"data: [DONE]\n\n"):
            c.sendall(chunk(piece))
            time.sleep(0.01)
        return b"0\r\n\r\n"

    fake = Fake(answer)
    r = Gateway(BUILD, [fake], *QUICK)
    for kind in ("/length", "/chunks", "/close"):
        s = r.socket()
        s.sendall(f"GET {kind} HTTP/1.0\r\n\r\n".encode())  # to the end of the connection: no framing to undo
        out = b""
        while piece := s.recv(65536):
            out += piece
        assert out.partition(b"\r\n\r\n")[2] == payload, kind
        s.close()
    status, headers, text = r.get("/events")
    assert headers["content-type"] == "text/event-stream" and text == ': ping\n\ndata: {"a":1}\n\ndata: [DONE]\n\n'
    r.stop()
    fake.close()
    # A real stream, through the gateway and without it: the same but for ids and times.
    a = replica()
    r = Gateway(BUILD, [a], *QUICK)
    body = {"prompt": "Once upon a time", "seed": 5, "max_tokens": 60, "stream": True, "ignore_eos": True}

    def plain(text):
        return re.sub(r'"(id|created)":("[^"]*"|\d+)', "", text)

    assert plain(r.post(COMP, body)[2]) == plain(a.post(COMP, body)[2])
    assert r.post(COMP, body)[2].endswith("data: [DONE]\n\n")
    assert r.stop() == 0 and a.stop() == 0


def test_backpressure():
    """A client that does not read holds the replica back, not memory; one that leaves ends it there."""
    sent, ended = [0], threading.Event()
    most = 400 << 20

    def answer(head, c):
        c.sendall(EVENTS)
        block = chunk(b"data: " + b"x" * 65000 + b"\n\n")
        try:
            while sent[0] < most:
                c.sendall(block)
                sent[0] += len(block)
        except OSError:
            ended.set()
        return b""

    fake = Fake(answer)
    r = Gateway(BUILD, [fake], *QUICK)
    before = r.rss_kb()
    s = r.socket()
    s.sendall(http_request(COMP, {"prompt": "x", "stream": True}))
    s.recv(1000)
    last, still = -1, 0
    while still < 20:  # until it stands
        still = still + 1 if sent[0] == last else 0
        last = sent[0]
        time.sleep(0.02)
    assert last < 64 << 20, f"{last} bytes went into a connection nobody reads"
    if not sanitized(BUILD):
        assert r.rss_kb() < before + 4096, (before, r.rss_kb())
    got = 0
    while got < 100 << 20:  # and it goes on when it is read
        got += len(s.recv(1 << 20))
    s.close()
    assert ended.wait(HANG), "the replica was not told"
    until(lambda: value(r, "steel_route_in_flight") == 0)
    r.stop()
    fake.close()


def test_client_leaves():
    """Wherever its request is: waiting for an answer, or in the middle of one."""
    a = replica("-np", "1", "-c", "4096")
    r = Gateway(BUILD, [a], *QUICK)
    long_one = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    first, second = r.socket(), r.socket()
    first.sendall(http_request(COMP, long_one))
    assert first.recv(100).startswith(b"HTTP/1.1 200")
    second.sendall(http_request(COMP, dict(long_one, stream=False)))
    until(lambda: value(r, "steel_route_in_flight") == 2)
    second.close()
    until(lambda: value(r, "steel_route_in_flight") == 1)
    first.close()
    until(lambda: value(r, "steel_route_in_flight") == 0)
    a.wait_metric("steel_requests_running", 0)
    a.wait_metric("steel_requests_waiting", 0)
    assert value(r, "steel_route_left_total") == 2
    r.stop()
    a.stop()


# The choice

def converse(server, n, turns, at_once):
    """n conversations of some turns, some of them at once; prompt tokens, and those from the cache."""
    count, lock, todo = [0, 0], threading.Lock(), list(range(n))

    def talk(i):
        rng = random.Random(i)
        said = [{"role": "system", "content": "You answer questions about the island."}]
        for turn in range(turns):
            said.append({"role": "user", "content": f"{i}: " + "".join(rng.choice("abcdefgh ") for _ in range(rng.randrange(20, 200)))})
            got = server.json(CHAT, {"messages": said, "max_tokens": 12, "temperature": 0, "ignore_eos": True})
            with lock:
                count[0] += got["usage"]["prompt_tokens"]
                count[1] += got["usage"]["prompt_tokens_details"]["cached_tokens"]
            said.append({"role": "assistant", "content": got["choices"][0]["message"]["content"] or ""})
            if at_once == 1:
                yield

    def client():
        while True:
            with lock:
                if not todo:
                    return
                i = todo.pop()
            for _ in talk(i):
                pass

    if at_once == 1:  # a turn of each in turn
        talks = [talk(i) for i in range(n)]
        while talks:
            talks = [t for t in talks if next(t, talks) is None]
    else:
        clients = [threading.Thread(target=client) for _ in range(at_once)]
        for c in clients:
            c.start()
        for c in clients:
            c.join()
    return count


def test_hit_rate():
    """Multi-turn conversations find their cache: at least 90 % of what one replica alone would have."""
    for at_once, n, turns in ((1, 12, 6), (1, 1, 12), (6, 18, 6)):
        one = replica("-c", "8192", "--kv-tokens", "60000")
        asked, cached = converse(one, n, turns, at_once)
        alone = cached / asked
        one.stop()
        three = [replica("-c", "8192", "--kv-tokens", "60000") for _ in range(3)]
        r = Gateway(BUILD, three, *QUICK)
        r.wait_count("replica is in", 3)
        asked, cached = converse(r, n, turns, at_once)
        rate = cached / asked
        shares = [value(r, "steel_route_requests_total", upstream=name_of(s)) for s in three]
        print(f"      {n} conversations, {at_once} at once: hit rate alone {alone:.3f}, behind the gateway {rate:.3f}; requests {shares}")
        assert alone > 0.5 and rate >= 0.9 * alone, (alone, rate)
        assert n == 1 or min(shares) >= n * turns / 10, shares  # not all on one
        counted = sum(s.metrics()["steel_prefix_cache_hits_total"] for s in three)
        assert counted == cached, (counted, cached)
        r.stop()
        for s in three:
            s.stop()


def test_keys_apart():
    """Another key's prompts say nothing about where this key's are cached."""
    a, b = replica(), replica()
    r = Gateway(BUILD, [a, b], *QUICK)
    r.wait_count("replica is in", 2)
    prompt = "the same long beginning of a prompt " * 8
    for key in ("one", "two", "one", "two"):
        r.json(COMP, {"prompt": prompt, "max_tokens": 1}, headers={"Authorization": "Bearer " + key})
    # First of each key by load, so on both replicas in turn; second of each where its first was.
    assert value(r, "steel_route_choices_total", by="prefix") == 2 and value(r, "steel_route_choices_total", by="load") == 2
    assert [s.metrics()["steel_prefix_cache_hits_total"] for s in (a, b)] == [(len(prompt) - 1) // 16 * 16] * 2
    for s in (r, a, b):
        s.stop()


def test_kept_responses():
    """previous_response_id goes where the response is, also after the gateway has forgotten."""
    three = [replica() for _ in range(3)]
    r = Gateway(BUILD, three, *QUICK)
    r.wait_count("replica is in", 3)
    ids = []
    for i in range(6):
        body = {"input": f"question {i} " * 5, "max_output_tokens": 4}
        if i % 2:
            text = r.post(RESP, dict(body, stream=True))[2]
            ids.append(re.search(r'"id":"(resp_[^"]*)"', text).group(1))
        else:
            ids.append(r.json(RESP, body)["id"])
    for again in range(2):
        for i, rid in enumerate(ids):
            assert r.get(f"/v1/responses/{rid}")[0] == 200
            assert r.get(f"/v1/responses/{rid}/input_items")[0] == 200
            got = r.json(RESP, {"input": "more", "max_output_tokens": 2, "previous_response_id": rid})
            assert got["previous_response_id"] == rid
        if not again:
            assert value(r, "steel_route_choices_total", by="pin") == 18 and value(r, "steel_route_retries_total") == 0
            r.stop()  # a new one knows nothing: it asks around
            r = Gateway(BUILD, three, *QUICK)
            r.wait_count("replica is in", 3)
    assert r.request("DELETE", f"/v1/responses/{ids[0]}")[0] == 200
    assert r.get(f"/v1/responses/{ids[0]}")[0] == 404
    assert r.post(RESP, {"input": "x", "previous_response_id": "resp_nobody"})[0] in (400, 404)
    for s in (r, *three):
        s.stop()


def test_kept_conversations():
    """A conversation lives on one replica: its items and the responses that continue it go there, also after the gateway has forgotten."""
    three = [replica() for _ in range(3)]
    r = Gateway(BUILD, three, *QUICK)
    r.wait_count("replica is in", 3)
    made = [r.json("/v1/conversations", {"items": [{"role": "user", "content": f"question {i} " * 5}]})["id"] for i in range(6)]
    assert len({next(s.port for s in three if s.get(f"/v1/conversations/{id}")[0] == 200) for id in made}) > 1
    size = 1
    for again in range(2):
        for i, id in enumerate(made):
            got = r.json(RESP, {"input": "more", "max_output_tokens": 2, "conversation": id if i % 2 else {"id": id}})
            assert got["conversation"] == {"id": id} and r.get(f"/v1/responses/{got['id']}")[0] == 200
            assert r.json(f"/v1/conversations/{id}/items", {"items": [{"role": "user", "content": "x"}]})["data"]
            items = json.loads(r.get(f"/v1/conversations/{id}/items?order=asc&limit=100")[2])["data"]
            assert len(items) == size + 3, (again, len(items))
            assert r.get(f"/v1/conversations/{id}/items/{items[0]['id']}")[0] == 200
            assert r.json(f"/v1/conversations/{id}", {"metadata": {"a": "b"}})["metadata"] == {"a": "b"}
        size += 3
        if not again:
            assert value(r, "steel_route_choices_total", by="pin") == 36 and value(r, "steel_route_retries_total") == 0
            r.stop()
            r = Gateway(BUILD, three, *QUICK)
            r.wait_count("replica is in", 3)
    # in the background: asked about, cancelled and streamed where it runs
    for _ in range(6):
        id = r.json(RESP, {"input": "x", "background": True, "ignore_eos": True, "max_output_tokens": 40})["id"]
        status, _, text = r.get(f"/v1/responses/{id}")
        assert status == 200 and json.loads(text)["id"] == id
        assert r.post(f"/v1/responses/{id}/cancel", "")[0] == 200
    assert r.request("DELETE", f"/v1/conversations/{made[0]}")[0] == 200
    assert r.get(f"/v1/conversations/{made[0]}")[0] == 404
    for s in (r, *three):
        s.stop()


def test_infill():
    """Infills of one file find the replica that has read it: what comes before the cursor decides, not what is typed."""
    fakes = [Fake(lambda h, c: OK) for _ in range(3)]
    r = Gateway(BUILD, fakes, *QUICK)
    r.wait_count("replica is in", 3)
    for i in range(12):
        before = [len(f.seen) for f in fakes]
        body = lambda typed: {"input_extra": [{"filename": "a.py", "text": f"file {i} " * 60}], "input_prefix": f"lines of {i} " * 60, "prompt": typed, "input_suffix": "rest " * 20}
        for typed in ("a", "other", "zzz"):
            assert r.post("/infill", body(typed))[0] == 200
        assert sorted(len(f.seen) - n for f, n in zip(fakes, before)) == [0, 0, 3], i
    assert all(f.seen for f in fakes)
    r.stop()
    for f in fakes:
        f.close()


def test_full():
    """429 of one replica asks the next; nobody left: what the last said, or 503 with Retry-After."""
    busy = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 7\r\nContent-Length: 4\r\n\r\nbusy"
    full, free = Fake(lambda h, c: busy), Fake(lambda h, c: OK)
    r = Gateway(BUILD, [full, free], *QUICK)
    r.wait_count("replica is in", 2)
    for _ in range(4):
        assert r.post(COMP, "{}")[2] == "ok"
    assert full.seen and len(free.seen) == 4 and value(r, "steel_route_retries_total") == len(full.seen)
    r.stop()
    r = Gateway(BUILD, [full], *QUICK)
    status, headers, text = r.post(COMP, "{}")
    assert (status, text, headers["retry-after"]) == (429, "busy", "7")
    r.stop()
    gate = threading.Event()
    slow = Fake(lambda h, c: gate.wait(HANG) and OK)
    r = Gateway(BUILD, [slow], *QUICK, "--max-per-upstream", "2")
    clients = [threading.Thread(target=r.post, args=(COMP, "{}")) for _ in range(2)]
    for c in clients:
        c.start()
    until(lambda: value(r, "steel_route_in_flight") == 2)
    status, headers, text = r.post(COMP, "{}")
    assert status == 503 and "at their limit" in text and headers["retry-after"]
    gate.set()
    for c in clients:
        c.join()
    assert r.post(COMP, "{}")[0] == 200
    r.stop()
    for f in (full, free, slow):
        f.close()


# What goes wrong

def test_hostile():
    """Whatever a server sends instead of an answer: a clear 502, another replica's answer where there is one, and no
    more requests for who does that again and again."""
    junk = {
        "no http": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        "http 2": b"HTTP/2 200 OK\r\n\r\n",
        "bad status": b"HTTP/1.1 2x0 OK\r\n\r\n",
        "switching": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
        "endless interim": b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
        "endless header": b"HTTP/1.1 200 OK\r\nA: " + b"x" * 200_000,
        "many headers": b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n",
        "header without colon": b"HTTP/1.1 200 OK\r\nhello\r\n\r\n",
        "control character": b"HTTP/1.1 200 OK\r\nA: \x01\r\n\r\n",
        "nul": b"HTTP/1.1 200 OK\r\nA: \0\r\n\r\n",
        "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
        "negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\nok",
        "length and chunks": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "too short": b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nok",
        "bad chunk size": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        "gzip coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nok",
        "half a head": b"HTTP/1.1 200 OK\r\nContent-",
        "nothing": b"",
    }
    now = [b""]
    bad, good = Fake(lambda h, c: now[0]), Fake(lambda h, c: OK)
    alone = Gateway(BUILD, [bad], *QUICK, "--health-fails", "100")
    both = Gateway(BUILD, [bad, good], *QUICK, "--health-fails", "100")
    both.wait_count("replica is in", 2)
    for what, data in junk.items():
        now[0] = data
        status, _, text = alone.post(COMP, "{}")
        error = json.loads(text)["error"]
        assert status == 502 and error["type"] == "upstream_error" and "the replica failed: " in error["message"], (what, text)
        before = len(bad.seen)
        for _ in range(2):  # one of them goes there first
            assert both.post(COMP, "{}")[2] == "ok", what
        assert len(bad.seen) > before, what
    assert alone.get("/health")[0] == 200
    # A request that may have changed something is not sent twice.
    n = len(bad.seen) + len(good.seen)
    for _ in range(2):
        got = both.post("/v1/fine_tuning/jobs", "{}")
        assert got[0] in (200, 502), got
    assert len(bad.seen) + len(good.seen) == n + 2
    # Bytes behind an answer: the answer counts, the connection does not.
    now[0] = OK + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
    for _ in range(4):
        assert alone.post(COMP, "{}")[2] == "ok"
    alone.stop()
    both.stop()
    # Twice in a row: out, for a while, whatever its health says.
    now[0] = junk["no http"]
    r = Gateway(BUILD, [bad, good], *QUICK)
    r.wait_count("replica is in", 2)
    for _ in range(8):
        assert r.post(COMP, "{}")[2] == "ok"
    r.wait_line("replica is out")
    assert value(r, "steel_route_outs_total", upstream=name_of(bad)) >= 1
    until(lambda: "replica is in" in r.log().split("replica is out", 1)[1])  # the sentence is over
    now[0] = OK
    r.stop()
    bad.close()
    good.close()


def test_broken_streams():
    """What breaks off after it has begun ends in an error event between events, and in a reset elsewhere."""
    now = [b""]
    fake = Fake(lambda h, c: now[0])
    r = Gateway(BUILD, [fake], *QUICK, "--health-fails", "100", "--idle-timeout", "1", "--answer-timeout", "1")
    whole = EVENTS + chunk(b"data: {}\n\n")

    def read(path):
        s = r.socket()
        s.sendall(http_request(path, {"stream": True}, "Connection: close\r\n"))
        out, reset = b"", False
        try:
            while piece := s.recv(65536):
                out += piece
        except ConnectionResetError:
            reset = True
        s.close()
        return out, reset

    for data in (whole, whole + b"zz\r\n"):
        now[0] = data
        out, reset = read(COMP)
        assert not reset and out.endswith(b"0\r\n\r\n") and b"data: {}\n\n" in out, out
        event = re.search(rb"data: (\{\"error.*)\n\n", out)
        assert event and json.loads(event.group(1))["error"]["type"] == "upstream_error", out
    out, _ = read("/v1/messages")
    assert b'event: error\ndata: {"type":"error"' in out, out
    out, _ = read(RESP)
    assert b'event: error\ndata: {"type":"error","code":"upstream_error"' in out, out
    now[0] = EVENTS + chunk(b'data: {"half')
    out, reset = read(COMP)
    assert reset or not out.endswith(b"0\r\n\r\n"), out
    now[0] = b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n" + b"x" * 100_000
    out, reset = read(COMP)
    assert reset or len(out.partition(b"\r\n\r\n")[2]) < 200_000
    # Silence: 504 before the answer, an error event in the middle of it.
    hold = threading.Event()

    def silent(head, c):
        if b"/begun" in head:
            c.sendall(EVENTS + chunk(b"data: {}\n\n"))
        elif b"/trickle" in head:
            try:
                for ch in b"HTTP/1.1 200 OK\r\nA: bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb":
                    c.sendall(bytes([ch]))
                    hold.wait(0.1)
            except OSError:
                pass
        hold.wait(HANG)

    fake.answer = silent
    for path in (COMP, "/trickle/completions"):
        status, _, text = r.post(path, "{}")
        assert status == 504 and "no response within 1 s" in text, text
    out, reset = read("/begun/completions")
    assert not reset and b"has stalled for 1 s" in out, out
    hold.set()
    r.stop()
    fake.close()


def test_kept_connections():
    """Connections to a replica are used again; one that has ended there costs nobody an answer."""
    peers = set()

    def answer(head, c):
        peers.add(c.getpeername())
        return OK

    keep = Fake(answer, keep=True)
    r = Gateway(BUILD, [keep], *QUICK)
    for _ in range(20):
        assert r.post(COMP, "{}")[2] == "ok"
    assert len(peers) == 1, peers
    r.stop()
    keep.close()
    # It says keep-alive and closes all the same, at once or on the next request.
    shut = Fake(lambda h, c: OK)
    served = set()

    def one_each(head, c):
        if c.getpeername() in served:
            raise OSError  # ends the connection
        served.add(c.getpeername())
        return OK

    moody = Fake(one_each, keep=True)
    for f in (shut, moody):
        r = Gateway(BUILD, [f], *QUICK)
        for _ in range(20):
            got = r.post(COMP, "{}")
            assert got[2] == "ok", got
        assert r.get("/health")[0] == 200
        r.stop()
        f.close()


class RoutedLoad(Load):
    """Rough company, and answers that may break off once they have begun, while a replica dies."""

    def __init__(self, *args):
        super().__init__(*args)
        self.count["cut"] = 0

    def finished(self, rng, slow=0):
        i = rng.randrange(len(self.specs))
        stream = rng.random() < 0.7
        c = self.dial(rng)
        out = b""
        try:
            c.sendall(http_request("/v1/completions", dict(self.specs[i], stream=stream), "Connection: close\r\n"))
            while piece := c.recv(4096 if slow else 65536):
                out += piece
                time.sleep(slow)
        except ConnectionResetError:
            pass
        c.close()
        head, _, body = out.partition(b"\r\n\r\n")
        assert out, "an answer was lost: not a byte of it came"
        status = int(head.split()[1])
        if status == 429:
            self.add("refused")
            time.sleep(0.05)
            return
        assert status == 200, out[:600]
        if stream:
            data, at = b"", 0
            while at < len(body) and (end := body.find(b"\r\n", at)) > 0:
                n = int(body[at:end], 16)
                data += body[end + 2:end + 2 + n]
                at = end + 4 + n
            if not data.endswith(b"data: [DONE]\n\n"):
                self.add("cut")
                return
            got = [["", None] for _ in range(self.specs[i].get("n", 1))]
            for e in data.decode().split("\n\n")[:-2]:
                for ch in json.loads(e[6:])["choices"] if not e.startswith(":") else ():
                    got[ch["index"]][0] += ch["text"]
                    got[ch["index"]][1] = ch["finish_reason"] or got[ch["index"]][1]
            got = [tuple(g) for g in got]
        else:
            length = int(re.search(rb"(?i)content-length: (\d+)", head).group(1)) if b"ontent-" in head else None
            if length is None or len(body) < length:
                self.add("cut")
                return
            got = texts(json.loads(body)["choices"])
        if got != self.want[i]:
            with self.lock:
                self.wrong.append((i, got, self.want[i]))
        self.add("slow" if slow else "equal")


def test_killed_and_restarted():
    """Rough load on three replicas; one is killed and comes back. No answer is lost that had not begun."""
    flags = ("-np", "8", "-c", "1024", "--kv-tokens", "1300", "--max-queue", "64", "--read-timeout", "2")
    three = [replica(*flags) for _ in range(3)]
    r = Gateway(BUILD, three, *QUICK, "--slow-start", "1", "--read-timeout", "2")
    r.wait_count("replica is in", 3)
    args = argparse.Namespace(clients=int(os.environ.get("STEEL_TEST_CLIENTS", "16")),
                              seconds=float(os.environ.get("STEEL_TEST_SECONDS", "6")), seed=1)
    load = RoutedLoad(r, args)
    began = time.time()

    def murder():
        time.sleep(args.seconds / 4)
        port = three[1].port
        three[1].proc.kill()
        three[1].proc.wait()
        time.sleep(args.seconds / 4)
        three[1] = replica(*flags, "--port", str(port))

    killer = threading.Thread(target=murder)
    killer.start()
    load.run()
    killer.join()
    assert not load.wrong, load.wrong[:3]
    until(lambda: r.log().count("replica is in") >= 4)
    before = value(r, "steel_route_requests_total", upstream=name_of(three[1]))
    load.run()  # with all three again
    assert not load.wrong, load.wrong[:3]
    after = value(r, "steel_route_requests_total", upstream=name_of(three[1]))
    retries, cut = value(r, "steel_route_retries_total"), value(r, "steel_route_cut_total")
    print(f"      {time.time() - began:.0f} s:", ", ".join(f"{v} {k}" for k, v in load.count.items()),
          f"; {retries:.0f} retries, {cut:.0f} cut by the gateway")
    assert load.count["equal"] > 0 and after > before and "replica is out" in r.log()
    until(lambda: value(r, "steel_route_in_flight") == 0)
    for s in three:
        s.wait_metric("steel_requests_running", 0)
        s.wait_metric('steel_kv_pages{state="held"}', 0)
    assert r.stop() == 0, r.log()[-2000:]
    for s in three:
        assert s.stop() == 0


def test_killed_with_a_queue():
    """What waited at a replica that is killed is answered by the other, as if nothing had happened."""
    a, b = replica("-np", "1"), replica("-np", "1")
    r = Gateway(BUILD, [a, b], *QUICK)
    r.wait_count("replica is in", 2)
    bodies = [{"prompt": f"question {i}", "max_tokens": 400, "temperature": 0, "ignore_eos": True} for i in range(8)]
    got = [None] * len(bodies)

    def ask(i):
        got[i] = r.json(COMP, bodies[i])["choices"][0]["text"]

    clients = [threading.Thread(target=ask, args=(i,)) for i in range(len(bodies))]
    for c in clients:
        c.start()
    until(lambda: value(r, "steel_route_requests_total") >= len(bodies))
    waiting = value(r, "steel_route_in_flight", upstream=name_of(a))
    a.proc.kill()
    for c in clients:
        c.join()
    print(f"      {waiting:.0f} were there, {value(r, 'steel_route_retries_total'):.0f} went elsewhere")
    assert waiting >= 1 and value(r, "steel_route_retries_total") >= 1
    for body, text in zip(bodies, got):
        assert text == b.json(COMP, body)["choices"][0]["text"]
    assert value(r, "steel_route_cut_total") == 0 and value(r, "steel_route_replies_total", status="5xx") == 0
    r.stop()
    assert b.stop() == 0


def test_hung():
    """A replica that stands still is taken out, and what waited there is answered by another."""
    a, b = replica(), replica()
    r = Gateway(BUILD, [a, b], "--health-interval", "0.1", "--health-timeout", "3", "--read-timeout", "1")
    r.wait_count("replica is in", 2)
    want = r.json(COMP, {"prompt": "hello", "max_tokens": 8, "temperature": 0})["choices"]
    a.proc.send_signal(signal.SIGSTOP)
    try:
        answers = []

        def ask(stream):
            if stream:
                text = r.post(COMP, {"prompt": "hello", "max_tokens": 8, "temperature": 0, "stream": True})[2]
                answers.append("".join(c["text"] for e in text.split("\n\n") if e.startswith("data: {")
                                       for c in json.loads(e[6:])["choices"]))
            else:
                answers.append(r.json(COMP, {"prompt": "hello", "max_tokens": 8, "temperature": 0})["choices"][0]["text"])

        clients = [threading.Thread(target=ask, args=(i % 2 == 0,)) for i in range(12)]
        for c in clients:
            c.start()
        # What is asked of all leaves it out, though that takes longer than a client has for its request.
        assert len(json.loads(r.get("/v1/models")[2])["data"]) == 1
        for c in clients:
            c.join(HANG)
        assert answers == [want[0]["text"]] * 12, answers
        r.wait_line("replica is out")
        assert value(r, "steel_route_up", upstream=name_of(a)) == 0 and value(r, "steel_route_retries_total") >= 1
        assert json.loads(r.get("/health")[2])["available"] == 1
        assert len(json.loads(r.get("/v1/models")[2])["data"]) == 1
    finally:
        a.proc.send_signal(signal.SIGCONT)
    r.wait_count("replica is in", 3)
    assert value(r, "steel_route_up", upstream=name_of(a)) == 1
    a.wait_metric("steel_requests_running", 0)  # what was given up there was cancelled
    for s in (r, a, b):
        assert s.stop() == 0


def unchunked(answer):
    """The body of an answer in chunks, which end anywhere."""
    rest, body = answer.partition(b"\r\n\r\n")[2], b""
    while (n := int((line := rest.partition(b"\r\n"))[0], 16)) > 0:
        body, rest = body + line[2][:n], line[2][n + 2:]
    return body


def test_draining_replica():
    """One that shuts down gets nothing new, and ends what it has."""
    a, b = replica(), replica()
    r = Gateway(BUILD, [a, b], *QUICK)
    r.wait_count("replica is in", 2)
    streams = [r.socket() for _ in range(2)]
    for s in streams:
        s.sendall(http_request(COMP, {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}, "Connection: close\r\n"))
        assert s.recv(15).startswith(b"HTTP/1.1 200")
    a.proc.send_signal(signal.SIGTERM)
    r.wait_line("replica is out")
    for _ in range(4):
        assert r.json(COMP, {"prompt": "y", "max_tokens": 1})
    for s in streams:
        out = b""
        while piece := s.recv(65536):
            out += piece
        assert unchunked(out).endswith(b"data: [DONE]\n\n"), out[-300:]
        s.close()
    assert a.proc.wait() == 0 and value(r, "steel_route_cut_total") == 0
    r.stop()
    b.stop()


def test_sigterm():
    """Running answers end within the grace time, or are told that it is over."""
    hold = threading.Event()

    def answer(head, c):
        c.sendall(EVENTS + chunk(b"data: {}\n\n"))
        hold.wait(HANG)
        return chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    fake = Fake(answer)
    for grace in (30, 1):
        hold.clear()
        r = Gateway(BUILD, [fake], *QUICK, "--grace", str(grace))
        s = r.socket()
        s.sendall(http_request(COMP, {"stream": True}))
        assert s.recv(15).startswith(b"HTTP/1.1 200")
        r.proc.send_signal(signal.SIGTERM)
        r.wait_line("shutting down")
        try:
            socket.create_connection(("127.0.0.1", r.port)).close()
            assert False, "it still accepts"
        except ConnectionRefusedError:
            pass
        if grace == 30:
            hold.set()
        out = b""
        while piece := s.recv(65536):
            out += piece
        assert (b"[DONE]" in out) == (grace == 30) and (b"shutting down" in out) == (grace == 1), out
        assert r.proc.wait(HANG) == 0
        r.dir.cleanup()
    hold.set()
    fake.close()


def test_tls():
    """https upstreams, whose certificate is checked."""
    d = tempfile.TemporaryDirectory()
    cert, key = d.name + "/cert.pem", d.name + "/key.pem"
    made = subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2",
                           "-subj", "/CN=steel", "-addext", "subjectAltName=IP:127.0.0.1"], capture_output=True)
    assert made.returncode == 0, made.stderr
    a = replica("--ssl-cert-file", cert, "--ssl-key-file", key)
    url = f"https://127.0.0.1:{a.port}"
    r = Gateway(BUILD, [url], *QUICK, "--upstream-ca-file", cert)
    for _ in range(3):
        assert r.json(COMP, {"prompt": "x", "max_tokens": 2})
    assert r.stream(COMP, {"prompt": "x", "max_tokens": 20})[-1] == "[DONE]"
    assert r.stop() == 0
    r = Gateway(BUILD, [url], *QUICK, wait=False)  # not one that the system knows
    assert r.post(COMP, "{}")[0] == 503
    time.sleep(0.5)
    assert r.get("/health")[0] == 503
    r.stop()
    r = Gateway(BUILD, [f"https://localhost:{a.port}"], *QUICK, "--upstream-ca-file", cert, wait=False)  # not its name
    time.sleep(0.5)
    assert r.get("/health")[0] == 503
    r.stop()
    r = Gateway(BUILD, [url], *QUICK, "--upstream-insecure")
    assert r.json(COMP, {"prompt": "x", "max_tokens": 2})
    r.stop()
    a.stop()


TESTS = [test_one_roof, test_climbing, test_starts_without_replicas, test_heads, test_access, test_bytes, test_backpressure, test_client_leaves,
         test_hit_rate, test_keys_apart, test_kept_responses, test_kept_conversations, test_infill, test_full, test_hostile, test_broken_streams,
         test_kept_connections, test_killed_and_restarted, test_killed_with_a_queue, test_hung, test_draining_replica, test_sigterm, test_tls]

if __name__ == "__main__":
    only = sys.argv[2:]
    run_tests([t for t in TESTS if not only or t.__name__ in only])
