"""What strangers may cost a server: bodies that would grow, texts with NUL, company that takes everything."""
import http.client
import json
import os
import re
import sys

sys.path.insert(0, os.path.dirname(__file__))
from serverlib import Server, run_tests, sanitized

BUILD = sys.argv[1]
SANITIZED = sanitized(BUILD)
CHAT, COMP = "/v1/chat/completions", "/v1/completions"


def peak_kb(s):
    with open(f"/proc/{s.proc.pid}/status") as f:
        return int(re.search(r"VmHWM:\s+(\d+)", f.read()).group(1))


def test_json(s):
    """A body of very many values is refused before it is built."""
    before = peak_kb(s)
    for item in (b"{}", b"[]", b'{"":0}', b"0"):
        body = b'{"prompt":"a","x":[' + b",".join([item] * 3000000) + b"]}"
        status, _, text = s.post(COMP, body)
        assert status == 413 and "JSON" in json.loads(text)["error"]["message"], (status, text)
        # what arrived, and its copy for the worker
        assert SANITIZED or peak_kb(s) - before < 4 * len(body) // 1024 + 20000, (item, before, peak_kb(s))
    status, _, text = s.post(COMP, b'{"prompt":' + b"[" * 5000)
    assert status == 413 and "levels" in text, text


def test_nul(s):
    """NUL in text is a character; elsewhere the error names the field."""
    ids = s.json("/tokenize", {"content": "a\0b"})["tokens"]
    assert ids == [97, 0, 98] and s.json("/detokenize", {"tokens": ids})["content"] == "a\0b"
    r = s.json(COMP, {"prompt": "a\0b", "max_tokens": 2, "echo": True})
    assert r["usage"]["prompt_tokens"] == 3 and r["choices"][0]["text"].startswith("a\0b")
    one = s.json("/apply-template", {"messages": [{"role": "user", "content": "x\0y"}]})
    two = s.json("/apply-template", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x\0y"}]}]})
    assert "x\0y" in one["prompt"] and one["prompt"] == two["prompt"] and 0 in one["tokens"]
    assert s.json(CHAT, {"messages": [{"role": "user", "content": "\0"}], "max_tokens": 2})
    assert s.json("/v1/messages", {"messages": [{"role": "user", "content": "\0"}], "max_tokens": 2})
    for body, param in (({"messages": [{"role": "us\0er", "content": "a"}]}, "messages[0].role"),
                        ({"messages": [{"role": "user", "content": "a"}], "stop": "a\0"}, "stop"),
                        ({"messages": [{"role": "user", "content": "a"}], "user": "a\0"}, "user")):
        e = s.json(CHAT, body, 400)["error"]
        assert e["param"] == param and "NUL" in e["message"], e


def test_work(s):
    """Conversations of very many messages: linear, or refused with words of its own."""
    for role in ("system", "user", "assistant"):
        body = {"messages": [{"role": role, "content": "You are x."}] * 64000 + [{"role": "user", "content": "a"}]}
        assert s.json(CHAT, body, 400)["error"]["code"] == "context_length_exceeded"
    # a reply that would be many times its request
    e = s.json("/tokenize", {"content": "a" * 4000000, "with_pieces": True}, 413)["error"]
    assert "MB" in e["message"]


def stream(s, source, body, headers=None):
    """A streamed request from an address of this machine; yields the response when its head is there."""
    c = http.client.HTTPConnection("127.0.0.1", s.port, source_address=(source, 0))
    c.request("POST", COMP, json.dumps(dict(body, stream=True)), headers or {})
    return c


def test_company(_):
    """Four requests of 128 answers each are no reason for somebody else to wait or to be refused."""
    s = Server(BUILD, "-np", "16", "-c", "4096", "--max-queue", "512")
    try:
        company(s)
    finally:
        s.stop()


def company(s):
    many = {"prompt": "abc", "n": 128, "max_tokens": 4000, "ignore_eos": True}
    crowd = []
    for _ in range(4):
        crowd.append(stream(s, "127.0.0.1", many))
    s.wait_metric("steel_requests_waiting", 4 * 128 - 16)
    # the queue holds no more of theirs; another's request is taken, and ends while all of theirs go on
    body = {"prompt": "xyz", "max_tokens": 5, "ignore_eos": True, "n": 2}
    assert s.json(COMP, dict(body, n=20), 429)["error"]["code"] == "queue_full"
    before = s.metrics()["steel_generation_tokens_total"]
    c = stream(s, "127.0.0.2", body)
    r = c.getresponse()
    text = r.read().decode()
    assert r.status == 200 and text.endswith("data: [DONE]\n\n"), text
    c.close()
    # counted, not timed: what the others got meanwhile is some steps' worth, not their whole answers
    assert s.metrics()["steel_generation_tokens_total"] - before < 16 * 400
    for c in crowd:
        c.close()
    s.wait_metric("steel_requests_running", 0)


def test_keys(_):
    """Who has a key has a cache of his own, and turns of his own."""
    flags = ["--api-key", "one", "--api-key", "two", "-np", "2", "-c", "4096"]
    for more, shared in (([], False), (["--share-prefix-cache"], True)):
        s = Server(BUILD, *flags, *more)
        key = lambda k: {"Authorization": "Bearer " + k}
        cached = lambda k: s.json(COMP, {"prompt": "y" * 200, "max_tokens": 1}, headers=key(k))["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached("one") == 0 and cached("one") > 190
        assert (cached("two") > 190) == shared
        assert cached("two") > 190
        assert s.stop() == 0


server = Server(BUILD, "-np", "2", "-c", "8192")
tests = [test_json, test_nul, test_work, test_company, test_keys]
if len(sys.argv) > 2:
    tests = [t for t in tests if any(a in t.__name__ for a in sys.argv[2:])]
try:
    run_tests(tests, server)
finally:
    if server.stop() != 0:
        print(server.log()[-4000:])
        os._exit(1)
