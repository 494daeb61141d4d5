#!/usr/bin/env python3
"""What the demo model gets right, asked through Steel's server: 50 held-out prompts of each kind, greedily.

Measures the shipped Q8_0 file (or one made here from demo/steel-demo, where none is shipped) against the targets in
demo/score.py, and fails if a category misses its own.
"""
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import threading

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
STEEL = os.path.join(ROOT, BUILD, "steel") if not os.path.isabs(BUILD) else os.path.join(BUILD, "steel")
EACH, AT_ONCE = 50, 16
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(ROOT, "demo"))
import corpus  # noqa: E402
import score   # noqa: E402


def chosen():
    """The first prompts of every category that has a target."""
    left, cases = dict.fromkeys(score.TARGETS, EACH), []
    with open(os.path.join(ROOT, "demo", "eval.jsonl"), encoding="utf-8") as f:
        for line in f:
            case = json.loads(line)
            if left.get(case["category"], 0):
                left[case["category"]] -= 1
                cases.append(case)
    assert not any(left.values()), left
    return cases


def ask(port, cases):
    """Answers in the order of the prompts, several requests under way at a time."""
    answers, todo, lock, faults = [None] * len(cases), list(range(len(cases))), threading.Lock(), []

    def work():
        link = http.client.HTTPConnection("127.0.0.1", port)
        while True:
            with lock:
                if not todo or faults:
                    return
                i = todo.pop()
            c = cases[i]
            body = {"prompt": corpus.render(c["messages"], c.get("tools"), True, c["enable_thinking"]),
                    "max_tokens": 260, "temperature": 0}
            try:
                link.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
                reply = link.getresponse()
                text = reply.read()
                if reply.status != 200:
                    raise RuntimeError(f"{reply.status} {text[:300]}")
                answers[i] = json.loads(text)["choices"][0]["text"]
            except Exception as e:  # told by the caller
                faults.append(repr(e))

    threads = [threading.Thread(target=work) for _ in range(AT_ONCE)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not faults, faults[0]
    return answers


def main():
    with tempfile.TemporaryDirectory() as folder:
        model = os.path.join(ROOT, "demo", "steel-demo.gguf")
        if not os.path.exists(model):
            model = os.path.join(folder, "demo-q8_0.gguf")
            subprocess.run([STEEL, "convert", os.path.join(ROOT, "demo", "steel-demo"), model, "--type", "q8_0"], check=True)
        assert os.path.getsize(model) <= 8_000_000, os.path.getsize(model)
        log = os.path.join(folder, "log")
        with open(log, "wb") as sink:
            server = subprocess.Popen([STEEL, "serve", model, "--port", "0", "--device", "cpu"], stderr=sink, stdout=sink)
        try:
            port = None
            while port is None:
                if server.poll() is not None:
                    raise SystemExit("the server ended: " + open(log).read())
                with open(log, encoding="utf-8") as f:
                    text = f.read()
                if " ready " in text:
                    port = int(re.search(r"http://127\.0\.0\.1:(\d+)", text).group(1))
                else:
                    threading.Event().wait(0.05)
            cases = chosen()
            answers = ask(port, cases)
        finally:
            server.terminate()
            server.wait()
    bad = False
    for category, (right, total) in score.score(cases, answers).items():
        miss = right < score.TARGETS[category] * total
        bad |= miss
        print(f"{category:14} {right}/{total}, target {score.TARGETS[category]:.0%}{' MISSED' if miss else ''}")
    for case, answer in zip(cases, answers):
        if not score.judge(case["check"], answer):
            print("wrong:", case["category"], repr(case["messages"][-1]["content"]), "->", repr(answer))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
