#!/usr/bin/env python3
"""Changing the models of a running server: Ollama's pull, create, copy and delete, Modelfiles in a folder, llama.cpp's load and
unload, and steel ps, load and stop."""
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time

from hub_server import Hub
from models_lib import Models, make_toys
from serverlib import HANG, http_request, run_tests

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
STEEL = os.path.join(BUILD, "steel")
WORK = tempfile.TemporaryDirectory(prefix="steel-models-api-")
COMP = "/v1/completions"
SAID = {"prompt": "the quick brown fox", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def folder(n=2):
    d = tempfile.mkdtemp(dir=WORK.name)
    for i in range(n):
        shutil.copy(os.path.join(make_toys(BUILD, WORK.name, 2), f"toy{i}.gguf"), d)
    return d


def text(s, model, **body):
    return s.json(COMP, dict(SAID, model=model, **body))["choices"][0]["text"]


def prompt(s, model, messages=None):
    return s.json("/apply-template", {"model": model, "messages": messages or [{"role": "user", "content": "hi"}]})["prompt"]


def names(s):
    return sorted(m["name"] for m in json.loads(s.get("/api/tags")[2])["models"])


def change(s, what, body, status=200):
    method = "DELETE" if what == "delete" else "POST"
    got, _, reply = s.request(method, "/api/" + what, body)
    assert got == status, (what, body, got, reply)
    return json.loads(reply.strip().splitlines()[-1]) if reply else None


def test_not_allowed():
    """Without --allow-pull nothing can be changed; on an open address it needs a key; with a key nobody else may."""
    d = folder()
    s = Models("--models", d)
    for what, body in (("pull", {"model": "some/Toy"}), ("create", {"model": "x", "from": "toy0"}), ("copy", {"source": "toy0", "destination": "x"}), ("delete", {"model": "toy0"})):
        assert "--allow-pull" in change(s, what, body, 403)["error"]
    assert names(s) == ["toy0", "toy1"] and s.stop() == 0
    r = subprocess.run([STEEL, "serve", "--models", d, "--port", "0", "--host", "0.0.0.0", "--allow-pull"], capture_output=True, text=True)
    assert r.returncode == 1 and "--api-key" in r.stderr, r
    s = Models("--models", d, "--allow-pull", "--api-key", "k")
    change(s, "delete", {"model": "toy0"}, 401)
    assert s.stop() == 0 and sorted(os.listdir(d)) == ["toy0.gguf", "toy1.gguf"]


def test_create():
    """FROM, PARAMETER, SYSTEM, TEMPLATE, ADAPTER in both forms of the API; they are there after a restart, and show tells them."""
    d = folder()
    s = Models("--models", d, "--allow-pull")
    plain = text(s, "toy0")
    stop = plain[4:6]
    assert change(s, "create", {"model": "terse", "from": "toy0", "system": "Say \"little\".\nBe kind.", "parameters": {"stop": [stop], "num_ctx": 256, "temperature": 0.25}}) == {"status": "success"}
    assert text(s, "terse") == plain[:plain.index(stop)] and text(s, "terse", stop=["never"]) == plain
    assert "Say \"little\".\nBe kind." in prompt(s, "terse") and "little" not in prompt(s, "toy0")
    own = [{"role": "system", "content": "MINE"}, {"role": "user", "content": "hi"}]
    assert "MINE" in prompt(s, "terse", own) and "little" not in prompt(s, "terse", own)
    m = s.models()["terse"]
    assert m["meta"]["n_ctx"] == 256 and m["default_sampling"]["temperature"] == 0.25, m
    # the system text in the other APIs: the same prompt tokens
    want = s.json("/v1/chat/completions", {"model": "terse", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})["usage"]["prompt_tokens"]
    assert want > s.json("/v1/chat/completions", {"model": "toy0", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})["usage"]["prompt_tokens"]
    assert s.json("/v1/messages/count_tokens", {"model": "terse", "messages": [{"role": "user", "content": "hi"}]})["input_tokens"] == want
    assert s.json("/api/chat", {"model": "terse", "messages": [{"role": "user", "content": "hi"}], "stream": False, "options": {"num_predict": 1}})["prompt_eval_count"] == want
    # a Modelfile, from the model that was made: what it does not say is inherited
    change(s, "create", {"name": "more:latest", "modelfile": f'# a comment\nFROM terse\nPARAMETER seed 7\nPARAMETER num_predict 3\nTEMPLATE """{{% for m in messages %}}<{{{{ m.role }}}}: {{{{ m.content }}}}>{{% endfor %}}"""\n'})
    want = '<system: Say "little".\nBe kind.><user: hi>'
    assert prompt(s, "more") == want
    assert text(s, "more", max_tokens=None)
    chat = s.json("/v1/chat/completions", {"model": "more", "messages": [{"role": "user", "content": "hi"}], "temperature": 2, "ignore_eos": True, "stop": ["never"]})
    assert chat["usage"]["completion_tokens"] == 3
    assert chat["choices"][0]["message"] == s.json("/v1/chat/completions", {"model": "more", "messages": [{"role": "user", "content": "hi"}], "temperature": 2, "ignore_eos": True, "stop": ["never"]})["choices"][0]["message"]
    shown = s.json("/api/show", {"model": "more"})
    assert "FROM " in shown["modelfile"] and "seed 7" in shown["parameters"] and shown["system"].startswith("Say") and shown["template"].startswith("{% for")
    # a second one of the name takes its place
    change(s, "create", {"model": "terse", "from": "toy1"})
    assert text(s, "terse") == text(s, "toy1") != plain and prompt(s, "terse") == prompt(s, "toy1")
    assert s.stop() == 0
    s = Models("--models", d)
    assert sorted(s.models()) == ["more", "terse", "toy0", "toy1"]
    want = '<system: Say "little".\nBe kind.><user: hi>'
    assert prompt(s, "more") == want
    assert text(s, "terse") == text(s, "toy1")
    assert s.stop() == 0


def test_adapter():
    """ADAPTER is used by every request of the model, and by no other."""
    d = tempfile.mkdtemp(dir=WORK.name)
    shutil.copytree("tests/golden/qwen3", d + "/qwen3")
    s = Models("--models", d, "--allow-pull")
    change(s, "create", {"model": "tuned", "from": "qwen3", "adapter": os.path.abspath("tests/golden/qwen3-lora")})
    ids = dict(prompt=[1, 2, 3, 4, 5], logprobs=1)
    ask = lambda m: s.json(COMP, dict(SAID, model=m, **ids))["choices"][0]["logprobs"]["token_logprobs"]
    plain, tuned = ask("qwen3"), ask("tuned")
    assert plain != tuned and ask("qwen3") == plain and s.stop() == 0
    s = Models("tests/golden/qwen3", "--lora", "a=tests/golden/qwen3-lora")
    assert s.json(COMP, dict(SAID, lora="a", **ids))["choices"][0]["logprobs"]["token_logprobs"] == tuned
    assert s.stop() == 0


def test_refused():
    """What a Modelfile says that Steel cannot do is refused by name, and nothing is written."""
    d = folder()
    s = Models("--models", d, "--allow-pull")
    make = lambda **b: {"model": "x", "from": "toy0", **b}
    for body, want in ((make(template="{{ .System }} {{ .Prompt }}"), "Go"), (make(template="{% if %}"), "TEMPLATE"), (make(parameters={"tfs_z": 0.5}), "tfs_z"),
                       (make(parameters={"nonsense": 1}), "nonsense"), (make(parameters={"temperature": "hot"}), "temperature"), (make(parameters={"stop": [""]}), "stop"),
                       (make(parameters={"num_ctx": -1}), "num_ctx"), (make(messages=[{"role": "user", "content": "a"}]), "messages"), (make(files={"a": "b"}), "files"),
                       (make(quantize="q4_0"), "quantize"), (make(adapter="/nowhere"), "ADAPTER"), ({"model": "x"}, "from"), (make(system='a\n"""b'), "quotes"),
                       ({"from": "toy0"}, "model"), ({"model": "../x", "from": "toy0"}, "letters"), ({"model": ".x", "from": "toy0"}, "letters"), (make(system=1), "system"),
                       ({"model": "x", "modelfile": "FROM toy0\nMESSAGE user hi"}, "MESSAGE"), ({"model": "x", "modelfile": "FROM toy0\nWHAT 1"}, "line 2"),
                       ({"model": "x", "modelfile": 'FROM toy0\nSYSTEM """a'}, "closing"), ({"model": "x", "modelfile": "PARAMETER seed 1"}, "FROM"),
                       ({"model": "x", "from": "nothing"}, "no such model"), ({"model": "x", "from": "/etc/passwd"}, "no such model"), ({"model": "x", "from": "/etc/nothing"}, "no such model")):
        e = change(s, "create", body, 400)["error"]
        assert want in e and "/etc" not in e, (body, e)
    # a client does not learn which files there are
    secret = os.path.join(d, "..", "secret-file")
    with open(secret, "w") as f:
        f.write("x")
    said = {change(s, "create", make(adapter=path), 400)["error"] for path in (secret, secret + "-not", d, os.path.join(d, "toy1.gguf"), "/proc/self/mem", "/dev/zero")}
    assert said == {"ADAPTER: there is no adapter of this model here"}, said
    assert "not made" in change(s, "create", {"model": "toy1", "from": "toy0"}, 409)["error"]
    change(s, "copy", {"source": "nothing", "destination": "x"}, 404)
    change(s, "copy", {"source": "/etc/passwd", "destination": "x"}, 404)
    change(s, "delete", {"model": "nothing"}, 404)
    assert names(s) == ["toy0", "toy1"] and sorted(os.listdir(d)) == ["toy0.gguf", "toy1.gguf"]
    # Modelfiles that somebody has put there: a good one, one of a missing model, one that is none
    for name, what in (("good", "FROM ./toy1.gguf\nSYSTEM hi"), ("a%b", "FROM toy0"), ("lost", "FROM nothing"), ("none", "hello"), ("loop", "FROM loop")):
        with open(f"{d}/{name}.modelfile", "w") as f:
            f.write(what)
    assert s.stop() == 0
    s = Models("--models", d)
    assert names(s) == ["a/b", "good", "toy0", "toy1"] and text(s, "good") == text(s, "toy1") and text(s, "a/b") == text(s, "toy0")
    for name in ("lost", "none", "loop"):
        assert "not served" in s.wait_line(f"model={name}"), s.log()
    assert s.stop() == 0


def test_copy_and_delete():
    d = folder()
    s = Models("--models", d, "--allow-pull", "--pin", "toy1", "--max-models", "3")
    a = text(s, "toy0")
    change(s, "copy", {"source": "toy0", "destination": "u/b:v1"})
    assert text(s, "u/b:v1") == a and os.path.exists(d + "/u%b:v1.modelfile")
    assert "u/b:v1" in change(s, "delete", {"model": "toy0"}, 409)["error"]
    assert "pinned" in change(s, "delete", {"model": "toy1"}, 409)["error"]
    # a request that runs ends with the model that it began with
    c = socket.create_connection(("127.0.0.1", s.port))
    c.sendall(http_request(COMP, dict(SAID, model="u/b:v1", max_tokens=1500, stream=True)))
    c.recv(15)
    change(s, "delete", {"model": "u/b:v1"})
    assert "u/b:v1" not in names(s) and s.post(COMP, dict(SAID, model="u/b:v1"))[0] == 404
    got = b""
    while b"[DONE]" not in got:
        got += c.recv(65536) or b"[DONE] missing"
    assert b"missing" not in got
    change(s, "delete", {"name": "toy0"})
    assert names(s) == ["toy1"] and sorted(os.listdir(d)) == ["toy1.gguf"]
    s.until("what was deleted is unloaded", [n for n in s.loaded() if n == "toy1"])
    assert s.stop() == 0


def test_at_once():
    """Clients that make, use, copy and delete the same names at once: every answer is one of the models that had the name, or a refusal."""
    d = folder()
    s = Models("--models", d, "--allow-pull", "--max-models", "3")
    fine = {text(s, "toy0"), text(s, "toy1")}
    faults = []

    def client(k):
        rng = random.Random(k)
        try:
            for _ in range(12):
                name, what = f"x{rng.randrange(3)}", rng.randrange(4)
                if what == 0:
                    got = s.request("POST", "/api/create", {"model": name, "from": f"toy{rng.randrange(2)}", "system": "hi"})
                elif what == 1:
                    got = s.request("DELETE", "/api/delete", {"model": name})
                elif what == 2:
                    got = s.request("POST", "/api/copy", {"source": f"toy{rng.randrange(2)}", "destination": name})
                else:
                    got = s.post(COMP, dict(SAID, model=name))
                    if got[0] == 200 and json.loads(got[2])["choices"][0]["text"] not in fine:
                        faults.append(got)
                if got[0] not in (200, 404, 503):
                    faults.append((what, got))
        except Exception as e:
            faults.append(repr(e))
    threads = [threading.Thread(target=client, args=(k,), daemon=True) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(HANG)
    assert not faults, faults[:2]
    shown = [n for n in names(s) if n.startswith("x")]
    assert len(shown) == len(set(shown)) and sorted(shown) == sorted(f[:-len(".modelfile")] for f in os.listdir(d) if f.endswith(".modelfile")), (shown, os.listdir(d))
    assert not [f for f in os.listdir(d) if f.endswith(".part")] and s.stop() == 0


def test_pull():
    """Progress, the model by its name, a pull that fails, one that its client leaves, one at a time, and delete."""
    toys = make_toys(BUILD, WORK.name, 2)
    hub, home = Hub(), tempfile.mkdtemp(dir=WORK.name)
    data = open(toys + "/toy0.gguf", "rb").read()
    hub.add("some/Toy-GGUF", {"Toy-Q4_K_M.gguf": data, "Toy-Q8_0.gguf": data + bytes(1)})
    env = {"HOME": home, "HF_HOME": home, "HF_ENDPOINT": hub.url}
    s = Models("--allow-pull", env=env)
    assert names(s) == ["steel-demo"]
    lines = [json.loads(l) for l in s.post("/api/pull", {"model": "some/Toy-GGUF"})[2].splitlines()]
    assert lines[0]["status"] == "pulling manifest" and lines[-1] == {"status": "success"} and all("error" not in l for l in lines), lines
    assert names(s) == ["some/Toy-GGUF:Q4_K_M", "steel-demo"]
    assert text(s, "some/Toy-GGUF")  # an alias, while one quantisation is there
    assert s.json("/api/pull", {"name": "some/Toy-GGUF", "stream": False}) == {"status": "success"}
    # refused, missing, not a name
    assert "404" in json.loads(s.post("/api/pull", {"model": "some/Nothing"})[2].splitlines()[-1])["error"]
    assert s.post("/api/pull", {"model": "some/Nothing", "stream": False})[0] == 502
    for body in ({}, {"model": 1}, {"model": "a b"}, {"model": "some/Toy", "insecure": True}, {"model": "x" * 300}):
        assert s.post("/api/pull", body)[0] == 400, body
    # a client that leaves ends its pull; meanwhile there is no second one
    hub.plan["store"] = ["stall"]
    c = socket.create_connection(("127.0.0.1", s.port))
    c.sendall(http_request("/api/pull", {"model": "some/Toy-GGUF:Q8_0"}))
    assert hub.stalled.wait(HANG)
    assert s.post("/api/pull", {"model": "some/Toy-GGUF:Q8_0"})[0] == 429
    assert text(s, "some/Toy-GGUF:Q4_K_M")
    c.close()
    s.wait_line("interrupted")
    hub.go_on.set()
    hub.plan["store"] = []
    start = time.time()
    while s.post("/api/pull", {"model": "some/Toy-GGUF:Q8_0", "stream": False})[0] != 200:
        assert time.time() - start < HANG, s.log()
        time.sleep(0.1)
    assert len(names(s)) == 3
    change(s, "copy", {"source": "some/Toy-GGUF:Q4_K_M", "destination": "mine"})
    assert os.path.exists(home + "/.local/share/steel/models/mine.modelfile") and text(s, "mine") == text(s, "some/Toy-GGUF:Q4_K_M")
    change(s, "delete", {"model": "mine"})
    change(s, "delete", {"model": "some/Toy-GGUF:Q8_0"})
    assert names(s) == ["some/Toy-GGUF:Q4_K_M", "steel-demo"]
    change(s, "delete", {"model": "steel-demo"}, 409)
    # a server that ends does not wait for a download
    hub.plan["store"], hub.stalled, hub.go_on = ["stall"], type(hub.stalled)(), type(hub.go_on)()
    c = socket.create_connection(("127.0.0.1", s.port))
    c.sendall(http_request("/api/pull", {"model": "some/Toy-GGUF:Q8_0"}))
    assert hub.stalled.wait(HANG)
    assert s.stop() == 0
    hub.go_on.set()


def test_load_and_unload():
    """llama.cpp's endpoints, Ollama's empty requests for any kind of model, and the commands."""
    d = folder()
    s = Models("--models", d, "--pin", "toy1")
    assert s.json("/models/load", {"model": "toy0"}) == {"success": True} and s.loaded() == ["toy0"]
    assert s.json("/models/unload", {"model": "toy0"}) == {"success": True}
    s.until("unloaded", [])
    s.json("/models/unload", {"model": "toy0"}, 400)
    for path in ("/models/load", "/models/unload"):
        s.json(path, {"model": "nothing"}, 404), s.json(path, {}, 400)
    at = ["--port", str(s.port)]
    run = lambda *a: subprocess.run([STEEL, *a, *at], capture_output=True, text=True)
    r = run("ps")
    assert r.returncode == 0 and r.stdout == "" and "no model" in r.stderr, r
    assert run("load", "toy1").returncode == 0 and s.loaded() == ["toy1"]
    assert [l.split()[:2] for l in run("ps").stdout.splitlines()[1:]] == [["toy1", "loaded"]]
    assert [l.split()[:2] for l in run("ps", "--all").stdout.splitlines()[1:]] == [["toy0", "unloaded"], ["toy1", "loaded"]]
    r = run("stop", "toy1")
    assert r.returncode == 1 and "pinned" in r.stderr, r
    assert run("load", "toy0").returncode == 0 and run("stop", "toy0").returncode == 0
    s.until("stopped", ["toy1"])
    r = run("load", "nothing")
    assert r.returncode == 1 and "does not exist" in r.stderr, r
    assert s.stop() == 0
    r = run("ps")
    assert r.returncode == 1 and "no server" in r.stderr, r
    s = Models("--models", d, "--api-key", "k")
    at = ["--port", str(s.port)]
    r = run("ps")
    assert r.returncode == 1 and "--api-key" in r.stderr, r
    assert run("load", "toy0", "--api-key", "k").returncode == 0 and s.stop() == 0


if __name__ == "__main__":
    tests = [test_not_allowed, test_create, test_adapter, test_refused, test_copy_and_delete, test_at_once, test_pull, test_load_and_unload]
    run_tests([t for t in tests if len(sys.argv) < 3 or t.__name__ in sys.argv[2:]])
