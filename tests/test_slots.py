#!/usr/bin/env python3
"""llama.cpp's slots: which they are, and how the pages of their prompts go to files and come back."""
import json
import os
import random
import shutil
import stat
import sys
import tempfile
import threading

from serverlib import Server, http_request, run_tests

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
LONG = [97 + i * i % 26 for i in range(700)]


def answer(s, prompt, n=8, **body):
    return s.json("/completion", dict({"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True, "return_tokens": True, "response_fields": []}, **body))


def full(s, prompt, **kw):
    r = s.json("/completion", dict({"prompt": prompt, "n_predict": 8, "temperature": 0, "ignore_eos": True, "return_tokens": True, "n_probs": 3}, **kw))
    return r["tokens"], [p["logprob"] for p in r["completion_probabilities"]], r["timings"]["cache_n"], r["id_slot"]


def act(s, slot, action, filename=None, status=200, **kw):
    body = None if filename is None else dict({"filename": filename}, **kw.pop("extra", {}))
    got, _, text = s.post(f"/slots/{slot}?action={action}", body, **kw)
    assert got == status, (action, filename, got, text)
    return json.loads(text)


def slots(s, **kw):
    return json.loads(s.get("/slots", **kw)[2])


def test_ids():
    s = Server(BUILD, "-np", "3", "-c", "8192")
    assert slots(s) == [{"id": i, "n_ctx": 8192, "speculative": True, "is_processing": False} for i in range(3)]
    assert [full(s, [97 + i] * 50)[3] for i in range(4)] == [0, 1, 2, 0]
    assert full(s, [120] * 50, id_slot=1)[3] == 1
    e = s.json("/completion", {"prompt": "x", "id_slot": 3}, 400)["error"]
    assert e["param"] == "id_slot", e
    for action in ("save", "restore", "erase", "x"):
        e = act(s, 0, action, "a", 501)["error"]
        assert e["type"] == "not_supported_error" and "--slot-save-path" in e["message"], e
    s.json("/v1/responses", {"input": "secret", "background": True, "ignore_eos": True, "max_output_tokens": 8000})
    while not any(x["is_processing"] for x in slots(s)):
        pass
    busy = [x for x in slots(s) if x["is_processing"]]
    if busy:  # it may have ended between two looks
        assert busy[0]["params"]["max_tokens"] == 8000 and busy[0]["next_token"]["n_remain"] <= 8000 and busy[0]["n_prompt_tokens"] > 0
    assert s.get("/slots?fail_on_no_slot=1")[0] == 200 and s.get("/slots?fail_on_no_slot=x")[0] == 400
    s.stop()


def round_trip(name, *flags, model=None, again=None):
    """Saved by one server, restored by the next: the same answer, and nothing computed again but the end."""
    with tempfile.TemporaryDirectory() as d:
        if model:
            model = shutil.copytree(model, d + "/model") if os.path.isdir(model) else shutil.copy(model, d)
        else:
            s = Server(BUILD)
            model = shutil.copy(os.path.join(s.dir.name, "toy.gguf"), d)
            s.stop()
        os.mkdir(d + "/slots")
        flags = ["--slot-save-path", d + "/slots", "-c", "1024", *flags]
        prompt = [t % 200 + 10 for t in LONG]
        s = Server(BUILD, *flags, model=model)
        want = full(s, prompt)
        warm = full(s, prompt)  # what the cache of one process gives
        saved = act(s, warm[3], "save", "a.bin")
        assert saved["filename"] == "a.bin" and saved["id_slot"] == warm[3] and saved["n_saved"] > 690 and saved["timings"]["save_ms"] > 0, saved
        path = d + "/slots/a.bin"
        assert os.listdir(d + "/slots") == ["a.bin"] and stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert os.path.getsize(path) == saved["n_written"]
        assert s.stop() == 0
        s = Server(BUILD, *flags, *(again or []), model=model)
        if again:
            e = act(s, 0, "restore", "a.bin", 400)["error"]
            assert e["param"] == "filename" and "another model or another cache" in e["message"], e
            assert full(s, prompt)[2] == 0 and s.stop() == 0
            return
        restored = act(s, 1, "restore", "a.bin")
        assert restored["n_restored"] == saved["n_saved"] and restored["n_read"] == saved["n_written"] and restored["id_slot"] == 1, restored
        got = full(s, prompt)
        assert got[:2] == want[:2] and got[2] >= warm[2] > 650 and got[3] == 1, (name, got, warm)
        usage = s.json("/v1/completions", {"prompt": prompt, "max_tokens": 1})["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 650, usage
        # restored where it is already, and saved again from there
        assert act(s, 0, "restore", "a.bin")["n_restored"] == saved["n_saved"]
        assert full(s, prompt)[:2] == want[:2]
        assert act(s, 0, "save", "b.bin")["n_saved"] >= saved["n_saved"]
        m = s.metrics()
        assert act(s, 0, "erase")["n_erased"] > 690
        e = act(s, 0, "save", "c.bin", 400)["error"]
        assert e["param"] == "id_slot", e
        assert s.stop() == 0


def test_attention():
    round_trip("toy")


def test_quantised():
    round_trip("q8_0", "-ctk", "q8_0", "-ctv", "q8_0", model="tests/golden/gpt_oss")


def test_states():
    round_trip("qwen3_5", model="tests/golden/qwen3_5")


def test_window():
    round_trip("gpt_oss", model="tests/golden/gpt_oss")


def test_other_cache():
    round_trip("types", "-ctk", "f32", "-ctv", "f32", again=["-ctk", "f16", "-ctv", "f16"])


def test_refused():
    with tempfile.TemporaryDirectory() as d:
        s = Server(BUILD, "--slot-save-path", d, "-np", "2", "-c", "1024")
        full(s, LONG)
        good = act(s, 0, "save", "good")
        whole = open(d + "/good", "rb").read()
        for name in ("", ".", "..", "../x", "a/b", "/etc/passwd", ".x", "a b", "x" * 128, "\u00e4", 5, None, ["a"]):
            for action in ("save", "restore"):
                status, _, text = s.post(f"/slots/0?action={action}", {"filename": name})
                assert status == 400 and json.loads(text)["error"]["param"] == "filename", (name, text)
        assert os.listdir(d) == ["good"]
        for path, param in (("/slots/2?action=save", "id_slot"), ("/slots/-1?action=save", "id_slot"), ("/slots/x?action=save", "id_slot"), ("/slots/0?action=", "action"), ("/slots/0", "action"),
                            ("/slots/0/1?action=save", "id_slot"), ("/slots/99999999999999999999?action=save", "id_slot"), ("/slots/1?action=save", "id_slot"), ("/slots/1?action=erase", "id_slot")):
            assert s.json(path, {"filename": "a"}, 400)["error"]["param"] == param, path
        # damaged, cut, longer, of another version, no file at all: refused with the reason, and the cache stays as it is
        rng = random.Random(1)
        bad = {"none": None, "empty": b"", "text": b"hello", "cut": whole[:-1], "half": whole[:len(whole) // 2], "longer": whole + b"x",
               "version": whole[:8] + b"\x02" + whole[9:], "zero": bytes(len(whole))}
        for i in range(40):
            at = rng.randrange(len(whole))
            bad[f"flip{i}"] = whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1:]
        before = s.metrics()["steel_kv_cache_usage_perc"] if "steel_kv_cache_usage_perc" in s.metrics() else None
        for name, data in bad.items():
            if data is not None:
                open(f"{d}/{name}", "wb").write(data)
            e = act(s, 1, "restore", name, 400)["error"]
            assert e["param"] == "filename" and "cannot be restored" in e["message"] and d not in e["message"], e
        assert "version 2" in act(s, 1, "restore", "version", 400)["error"]["message"] and "cut" not in bad["cut"].hex()
        os.symlink("good", d + "/link")
        os.mkfifo(d + "/pipe")
        for name in ("link", "pipe"):
            act(s, 1, "restore", name, 400)
        assert act(s, 1, "restore", "good")["n_restored"] == good["n_saved"]
        # no room on the disk, and no folder any more
        assert s.stop() == 0
    assert "not a folder" in __import__("subprocess").run([os.path.join(BUILD, "steel"), "serve", "x.gguf", "--slot-save-path", "/nonexistent"], capture_output=True, text=True).stderr


def test_clients():
    """With several keys a client has slots and files of its own, and its pages are its own."""
    with tempfile.TemporaryDirectory() as d:
        s = Server(BUILD, "--slot-save-path", d, "-np", "2", "-c", "1024", "--api-key", "one", "--api-key", "two")
        key = lambda k: {"headers": {"Authorization": "Bearer " + k}}
        mine = lambda k, **kw: s.json("/completion", dict({"prompt": LONG, "n_predict": 4, "temperature": 0, "ignore_eos": True}, **kw), **key(k))
        assert mine("one")["id_slot"] == 0
        act(s, 0, "save", "a", 400, **key("two"))
        act(s, 0, "erase", None, 400, **key("two"))
        assert act(s, 0, "save", "a", **key("one"))["n_saved"] > 690
        act(s, 1, "restore", "a", 400, **key("two"))
        assert mine("two")["id_slot"] == 1
        assert act(s, 1, "save", "a", **key("two"))["n_saved"] > 690 and len(os.listdir(d)) == 2
        files = [f"{d}/{f}" for f in os.listdir(d)]
        # one's file under two's name
        datas = [open(f, "rb").read() for f in files]
        open(files[0], "wb").write(datas[1]), open(files[1], "wb").write(datas[0])
        for k in ("one", "two"):
            assert "another client" in act(s, 0, "restore", "a", 400, **key(k))["error"]["message"]
        open(files[0], "wb").write(datas[0]), open(files[1], "wb").write(datas[1])
        # a salt is part of what must fit
        salted = mine("one", cache_salt="x")
        act(s, salted["id_slot"], "save", "salted", **key("one"))
        assert "cache_salt" in act(s, 0, "restore", "salted", 400, **key("one"))["error"]["message"]
        assert act(s, 0, "restore", "salted", extra={"cache_salt": "x"}, **key("one"))["n_restored"] > 690
        for f in files:
            assert "one" not in f and "two" not in f and b"one\n" not in open(f, "rb").read()
        assert s.get("/slots", **key("one"))[0] == 200 and s.get("/slots")[0] == 401
        # a slot that is answering somebody else
        c = s.socket()
        c.sendall(http_request("/completion", {"prompt": "x", "n_predict": 1000, "ignore_eos": True, "stream": True, "id_slot": 0},
                               "Authorization: Bearer two\r\nConnection: close\r\n"))
        c.recv(15)
        restored = act(s, 0, "restore", "a", **key("one"))["n_restored"]
        while c.recv(65536):
            pass
        assert act(s, 0, "erase", None, **key("one"))["n_erased"] == restored  # and nothing of the answer to the other
        # what a request does is shown to its own client
        r = s.json("/v1/responses", {"input": "hi", "background": True, "ignore_eos": True, "max_output_tokens": 900, "stop": ["secret"]}, **key("one"))
        assert "secret" not in s.get("/slots", **key("two"))[2] and r["status"]
        assert s.stop() == 0


def test_beside():
    """Others go on while slots are saved and restored, and their answers are what they are alone."""
    with tempfile.TemporaryDirectory() as d:
        s = Server(BUILD, "--slot-save-path", d, "-np", "4", "-c", "1024", "--kv-tokens", "4096")
        prompts = [[97 + (i * j) % 26 for i in range(300 + j)] for j in range(1, 5)]
        want = [full(s, p)[0] for p in prompts]
        full(s, LONG)
        slot = full(s, LONG)[3]
        workers = lambda: sum(open(f"/proc/{s.proc.pid}/task/{t}/comm").read() == "steel-worker\n" for t in os.listdir(f"/proc/{s.proc.pid}/task"))
        before = workers()
        act(s, slot, "save", "a")
        assert workers() > before  # who waits for the disk keeps none of the usual workers busy
        done, failures = threading.Event(), []

        def client(j):
            while not done.is_set():
                got = full(s, prompts[j])[0]
                if got != want[j]:
                    failures.append(j)

        threads = [threading.Thread(target=client, args=(j,)) for j in range(4)]
        for t in threads:
            t.start()
        for i in range(30):
            status, _, text = s.post(f"/slots/{i % 4}?action=restore", {"filename": "a"})
            assert status == 200 or "no room" in text, text
            got = full(s, LONG, id_slot=i % 4)
            status, _, text = s.post(f"/slots/{got[3]}?action=save", {"filename": f"b{i % 3}"})
            assert status == 200 or "left the cache" in text or "being saved" in text or status == 400, text
        done.set()
        for t in threads:
            t.join()
        assert not failures, failures
        alone = full(s, LONG)
        assert not [f for f in os.listdir(d) if f.endswith(".tmp")] and alone[0]
        assert s.stop() == 0


def test_no_cache():
    with tempfile.TemporaryDirectory() as d:
        s = Server(BUILD, "--slot-save-path", d, "--no-prefix-cache")
        full(s, LONG)
        e = act(s, 0, "save", "a", 501)["error"]
        assert "--no-prefix-cache" in e["message"], e
        s.stop()


run_tests([test_ids, test_attention, test_quantised, test_states, test_window, test_other_cache, test_refused, test_clients, test_beside, test_no_cache])
