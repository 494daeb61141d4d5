#!/usr/bin/env python3
"""Several models behind one address: loaded at their first request, unloaded for others, kept by requests that use them.
STEEL_TEST_SECONDS=600 runs the random load that long."""
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import models_lib
from letters_model import letters_model
from models_lib import Models
from serverlib import HANG, Server, http_request, run_tests, sanitized

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
SECONDS = float(os.environ.get("STEEL_TEST_SECONDS", "6"))
WORK = tempfile.TemporaryDirectory(prefix="steel-models-")
COMP = "/v1/completions"


def make_toys(n):
    return models_lib.make_toys(BUILD, WORK.name, n)


def ask(s, model, prompt="the quick brown fox", n=8, status=200, **body):
    return s.json(COMP, dict({"model": model, "prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True}, **body), status)


def text(s, model, prompt="the quick brown fox", **body):
    r = ask(s, model, prompt, **body)
    assert r["model"] == model, r
    return r["choices"][0]["text"]


def test_folder():
    """A folder's models by name; the least recently used one leaves when another needs its place."""
    toys = make_toys(4)
    with tempfile.TemporaryDirectory() as d:
        for f in os.listdir(toys):
            shutil.copy(os.path.join(toys, f), d)
        with open(d + "/broken.gguf", "w") as f:
            f.write("hello")
        with open(d + "/mmproj-x.gguf", "w") as f:
            f.write("hello")
        s = Models("--models", d, "--max-models", "2")
        assert "broken" in s.wait_line("not served") and "mmproj" not in s.log()
        listed = s.models()
        assert sorted(listed) == ["toy0", "toy1", "toy2", "toy3"] and s.loaded() == []
        one = listed["toy0"]
        assert one["status"] == {"value": "unloaded", "pinned": False} and one["meta"]["size"] == os.path.getsize(d + "/toy0.gguf"), one
        assert one["capabilities"] == ["completion", "tools"] and one["meta"]["n_ctx_train"] == 8192, one
        answers = [text(s, f"toy{i}") for i in range(3)]
        assert len(set(answers)) == 3, answers
        assert s.loaded() == ["toy1", "toy2"]
        assert text(s, "toy1") == answers[1] and text(s, "toy0") == answers[0]
        assert s.loaded() == ["toy0", "toy1"]
        # the list tells the same of a model in memory and of one that is not
        listed = s.models()
        for key in ("size", "n_vocab", "n_embd", "n_ctx_train"):
            assert abs(listed["toy0"]["meta"][key] - listed["toy3"]["meta"][key]) < 20000, (key, listed)
        assert listed["toy0"]["capabilities"] == listed["toy3"]["capabilities"]
        assert [m["name"] for m in json.loads(s.get("/api/tags")[2])["models"]] == sorted(listed)
        assert sorted(m["name"] for m in json.loads(s.get("/api/ps")[2])["models"]) == ["toy0", "toy1"]
        # several models, and none is named; an unknown one; one that is added while the server runs
        assert ask(s, None, status=400)["error"]["param"] == "model"
        assert ask(s, "toy9", status=404)["error"]["code"] == "model_not_found"
        shutil.copy(d + "/toy2.gguf", d + "/late.gguf")
        start = time.time()
        while s.post(COMP, {"model": "late", "prompt": "x", "max_tokens": 1})[0] != 200:
            assert time.time() - start < HANG
            time.sleep(0.1)
        assert text(s, "late") == answers[2]
        # a file that is gone, and one that is damaged when it is wanted
        with open(d + "/toy3.gguf", "r+b") as f:
            f.truncate(1000)
        e = ask(s, "toy3", status=503)["error"]
        assert "log" in e["message"] and d not in e["message"] and s.states()["toy3"] == "failed", e
        assert text(s, "toy0") == answers[0]
        assert s.stop() == 0


def test_command_line():
    """Several MODELs, the first at once; pins; the older meaning of --keep-alive is refused; one MODEL is as ever."""
    toys = make_toys(4)
    paths = [f"{toys}/toy{i}.gguf" for i in range(3)]
    s = Models(paths[0], paths[1], "other=" + paths[2], "--pin", "toy0", "--max-models", "2")
    assert s.loaded() == ["toy0"] and sorted(s.models()) == ["other", "toy0", "toy1"]
    assert s.models()["toy0"]["status"]["pinned"] is True
    first = text(s, "toy0")
    assert ask(s, None)["choices"][0]["text"] == first  # the first is for requests that name none
    for name in ("toy1", "other", "toy1"):
        text(s, name)
        assert s.loaded() == sorted(["toy0", name])
    assert ask(s, "x", status=404)
    assert s.stop() == 0
    s = Models(paths[0])
    assert ask(s, "any name")["choices"][0]["text"] == first and s.loaded() == ["toy0"]
    assert s.json("/api/generate", {"model": "toy0", "keep_alive": 0})["done_reason"] == "unload"
    assert s.loaded() == ["toy0"]  # a single model stays
    assert s.stop() == 0
    steel = os.path.join(BUILD, "steel")
    for args, want in ((["--keep-alive", "75"], "--idle-timeout"), (["--keep-alive", "x"], "with a unit"), (["--models", "/nowhere"], "not a folder"),
                       (["--model-memory", "x"], "24G"), ([paths[0], paths[0]], "two models"), ([paths[0], "/nowhere.gguf"], "nowhere.gguf")):
        r = subprocess.run([steel, "serve", "--port", "0", *args], capture_output=True, text=True)
        assert r.returncode in (1, 2) and want in r.stderr, (args, r.stderr)


def test_config():
    """Sections of the config file: options of each model, aliases, models by path; what is not a model's is refused by name."""
    toys = make_toys(4)
    config = f"""
ctx-size 2048
[model toy0]
alias first
alias small
ctx-size 512
pin
[model mine]
model {toys}/toy1.gguf
kv-type f32
[serve]
max-models 3
"""
    s = Models("--models", toys, config=config)
    assert text(s, "toy0") == ask(s, "first")["choices"][0]["text"] == ask(s, "small")["choices"][0]["text"]
    text(s, "mine"), text(s, "toy2")
    m = s.models()
    assert m["toy0"]["meta"]["n_ctx"] == 512 and m["toy2"]["meta"]["n_ctx"] == 2048 and m["toy0"]["aliases"] == ["first", "small"], m["toy0"]
    assert m["toy0"]["status"]["pinned"] and not m["mine"]["status"]["pinned"] and "toy1" not in m
    assert s.stop() == 0
    steel, path = os.path.join(BUILD, "steel"), os.path.join(WORK.name, "config")
    for lines, want in (("[model toy0]\nport 80", "'port' is no option of one model"), ("[model toy0]\nctx-size x", "'x' is not a whole number"),
                        ("[model toy0]\ntask x", "text, embed or rerank"), ("[model toy0]\nnonsense 1", "nonsense"), ("[modell x]\na 1", "is not a command")):
        with open(path, "w") as f:
            f.write(lines + "\n")
        r = subprocess.run([steel, "serve", "--port", "0", "--models", toys], capture_output=True, text=True, env=dict(os.environ, STEEL_CONFIG=path))
        assert r.returncode == 2 and want in r.stderr, (lines, r.stderr)


def test_keep_alive():
    """--keep-alive, Ollama's field in its forms, and what it may not be."""
    s = Models("--models", make_toys(4), "--keep-alive", "1s")
    for name in ("toy0", "toy1"):
        text(s, name)
    assert s.json("/api/generate", {"model": "toy1", "prompt": "x", "options": {"num_predict": 1}, "stream": False, "keep_alive": -1})["done"]
    s.until("only toy1 is kept", ["toy1"])
    ps = json.loads(s.get("/api/ps")[2])["models"]
    assert [m["name"] for m in ps] == ["toy1"] and ps[0]["expires_at"] > "2090", ps
    assert s.json("/api/chat", {"model": "toy1", "keep_alive": 0})["done_reason"] == "unload"
    s.until("unloaded", [])
    assert s.json("/api/generate", {"model": "toy2", "keep_alive": "1h30m"})["done_reason"] == "load"
    assert s.loaded() == ["toy2"]
    assert s.json("/api/generate", {"model": "toy2", "prompt": "x", "options": {"num_predict": 1}, "stream": False, "keep_alive": "0"})["done"]
    s.until("unloaded after its request", [])
    for bad in ("x", "5 m", "5x", True, [], {}, "m", "-"):
        e = s.json("/api/generate", {"model": "toy2", "keep_alive": bad}, 400)
        assert "keep_alive" in str(e), (bad, e)
    assert s.stop() == 0


def test_waiting():
    """A model in use is not unloaded: requests for others wait, with a bound in time and in number, then the busy one retires."""
    s = Models("--models", make_toys(4), "--max-models", "1", "--load-timeout", "1", "--max-waiting", "2", "-c", "8192", "-np", "1")
    text(s, "toy0")
    done = threading.Event()
    got = {}

    def long():
        got["long"] = s.json(COMP, {"model": "toy0", "prompt": "x", "max_tokens": 8000, "n": 4, "ignore_eos": True})
        done.set()
    t = threading.Thread(target=long, daemon=True)
    t.start()
    s.wait_metric("steel_requests_running", 1)
    results = []
    threads = [threading.Thread(target=lambda: results.append(s.post(COMP, {"model": "toy1", "prompt": "x", "max_tokens": 1}))) for _ in range(4)]
    for w in threads:
        w.start()
    for w in threads:
        w.join()
    busy = not done.is_set()
    t.join()
    assert got["long"]["usage"]["completion_tokens"] == 4 * 8000
    if busy:
        assert sorted(r[0] for r in results) == [503] * 4, results
        assert all(int(r[1]["retry-after"]) >= 1 for r in results)
        assert sorted("wait for models" in r[2] for r in results) == [False, False, True, True], results
    assert s.stop() == 0
    # with time enough, the busy model gets no new requests until the other one has had its turn
    s = Models("--models", make_toys(4), "--max-models", "1", "-c", "1024")
    stop, errors, count = threading.Event(), [], [0]

    def busy_loop(k):
        while not stop.is_set():
            try:
                text(s, "toy0", prompt=f"fox {k}", n=50)
                count[0] += 1
            except Exception as e:
                errors.append(repr(e))
                return
    threads = [threading.Thread(target=busy_loop, args=(k,), daemon=True) for k in range(3)]
    for w in threads:
        w.start()
    while count[0] < 3 and not errors:
        time.sleep(0.01)
    text(s, "toy1")
    stop.set()
    for w in threads:
        w.join()
    assert not errors, errors
    assert s.stop() == 0


def test_waiting_shares():
    """A client that fills the places of those who wait locks nobody else out."""
    s = Models("--models", make_toys(3), "--max-models", "1", "--max-waiting", "4", "-c", "8192")

    def ask(model, source, tokens, **more):
        c = socket.create_connection(("127.0.0.1", s.port), source_address=(source, 0))
        c.sendall(http_request(COMP, dict(more, model=model, prompt="a", max_tokens=tokens)))
        return c
    busy = ask("toy0", "127.0.0.1", 8000, ignore_eos=True, stream=True, n=8)
    busy.recv(15)
    waiting = [ask("toy1", "127.0.0.2", 1) for _ in range(4)]
    s.wait_metric("steel_models_waiting", 4)
    assert ask("toy1", "127.0.0.2", 1).recv(12) == b"HTTP/1.1 503"
    mine = ask("toy2", "127.0.0.3", 1)
    s.wait_metric("steel_models_waiting", 5)
    assert ask("toy2", "127.0.0.3", 1).recv(12) == b"HTTP/1.1 503"
    busy.close()
    for c in (*waiting, mine):
        assert c.recv(12) == b"HTTP/1.1 200"
    assert s.stop() == 0, s.log()[-2000:]


def test_other_tasks():
    """Embedding and rerank models among the others: by name, or as the only one of their kind; the wrong endpoint says so."""
    with tempfile.TemporaryDirectory() as d:
        for f in os.listdir(make_toys(4)):
            shutil.copy(os.path.join(make_toys(4), f), d)
        letters_model(d, "tiny-bert", "bert"), letters_model(d, "tiny-rank", "bert_rerank")
        s = Models("--models", d, "--max-models", "2")
        caps = {n: m["capabilities"] for n, m in s.models().items()}
        assert caps["tiny-bert"] == ["embedding"] and caps["tiny-rank"] == ["rerank"], caps
        a = s.json("/v1/embeddings", {"model": "tiny-bert", "input": "what is a panda?"})
        assert a["model"] == "tiny-bert" and a == s.json("/v1/embeddings", {"input": "what is a panda?"})
        assert s.json("/api/embed", {"model": "tiny-bert", "input": "a", "keep_alive": "5m"})["embeddings"]
        r = s.json("/v1/rerank", {"model": "tiny-rank", "query": "what", "documents": ["a", "the panda"]})
        assert len(r["results"]) == 2 and s.loaded() == ["tiny-bert", "tiny-rank"]
        text(s, "toy0")
        for path, body, want in (("/v1/embeddings", {"model": "toy0", "input": "a"}, "tiny-bert"), (COMP, {"model": "tiny-bert", "prompt": "a"}, "/v1/embeddings"),
                                 ("/v1/rerank", {"model": "tiny-bert", "query": "a", "documents": ["b"]}, "/v1/embeddings")):
            e = s.json(path, body, 400)["error"]
            assert e["param"] == "model" and want in e["message"], e
        assert s.stop() == 0


def rss_kb(s):
    with open(f"/proc/{s.proc.pid}/status") as f:
        return int(re.search(r"RssAnon:\s+(\d+)", f.read()).group(1))


def test_random():
    """Twenty models, memory for four, 64 clients that ask at random, kill -9 and restart in between: no error but bounded
    waits, memory within its limit, and every answer is that of the model asked for."""
    n, clients = 20, 64 if SECONDS > 6 or not sanitized(BUILD) else 16
    toys = make_toys(n)
    flags = ["--models", toys, "-c", "256", "-np", "8", "--load-timeout", "60"]
    s = Models(*flags)
    text(s, "toy0")
    line = s.wait_line("loaded model=toy0")
    one = sum(float(re.search(what + r"=([\d.]+)", line).group(1)) for what in ("kv_mb", "weights_mb"))
    assert s.stop() == 0
    flags += ["--model-memory", str(int(4.5e6 * one)), "--kv-memory", "1G"]
    s = Models(*flags)
    prompts = [f"the {k} fox" for k in range(3)]
    want = {(i, k): text(s, f"toy{i}", p, n=12) for i in range(n) for k, p in enumerate(prompts)}
    assert len({want[i, 0] for i in range(n)}) == n
    holder, stop, faults, counts = [s], threading.Event(), [], {"ok": 0, "503": 0, "cut": 0}
    lock = threading.Lock()

    def client(seed):
        rng = random.Random(seed)
        while not stop.is_set():
            server, i, k = holder[0], rng.randrange(n), rng.randrange(3)
            try:
                status, headers, body = server.post(COMP, {"model": f"toy{i}", "prompt": prompts[k], "max_tokens": 12, "temperature": 0, "ignore_eos": True})
            except (OSError, AssertionError, ValueError, Exception) as e:
                with lock:
                    counts["cut"] += 1
                    if server is holder[0] and server.proc.poll() is None and not stop.is_set() and not restarting.is_set():
                        faults.append(repr(e))
                time.sleep(0.05)
                continue
            with lock:
                if status == 200 and json.loads(body)["choices"][0]["text"] == want[i, k] and json.loads(body)["model"] == f"toy{i}":
                    counts["ok"] += 1
                elif status == 503 and "retry-after" in headers:
                    counts["503"] += 1
                else:
                    got = json.loads(body)["choices"][0]["text"] if status == 200 else body[:300]
                    faults.append((status, i, k, got, want[i, k], [key for key in want if want[key] == got]))
    restarting = threading.Event()
    threads = [threading.Thread(target=client, args=(k,), daemon=True) for k in range(clients)]
    for t in threads:
        t.start()
    start, most, most_loaded, restarts, switches = time.time(), 0, 0, 0, 0
    unloaded = lambda: sum("unloaded" in l for l in holder[0].lines if l)
    turn = SECONDS / 3 if SECONDS < 60 else 60
    next_kill = start + turn
    while time.time() - start < SECONDS and not faults:
        time.sleep(0.1)
        most = max(most, rss_kb(holder[0]))
        most_loaded = max(most_loaded, len(holder[0].loaded()))
        if time.time() > next_kill:
            restarting.set()
            holder[0].proc.send_signal(signal.SIGKILL)
            holder[0].proc.wait()
            switches += unloaded()
            holder[0] = Models(*flags)
            restarting.clear()
            restarts += 1
            next_kill = time.time() + turn
    stop.set()
    for t in threads:
        t.join()
    assert not faults, faults[:3]
    switches += unloaded()
    print(f"      {counts}, {restarts} times killed, {switches} models unloaded, most {most_loaded} in memory, {most >> 10} MB")
    assert counts["ok"] > n and restarts and switches and 2 <= most_loaded <= 4, (counts, most_loaded)
    assert holder[0].stop() == 0


if __name__ == "__main__":
    tests = [test_folder, test_command_line, test_config, test_keep_alive, test_waiting, test_waiting_shares, test_other_tasks, test_random]
    run_tests([t for t in tests if len(sys.argv) < 3 or t.__name__ in sys.argv[2:]])
