#!/usr/bin/env python3
"""Measures what prefixes on disk and models on demand save: the time to the first token

  - of a request for a model that is not in memory,
  - of a long prompt that is computed, and of the same prompt after its model was unloaded, and after a restart,
  - of A, B, A: another model has its turn in between. The load of A is told apart from the prompt.

  keep.py STEEL MODEL.gguf --tokens 4000 [--other OTHER.gguf] [--device cuda] [--rounds 3] [--cache DIR]

Where a prompt comes from disk, the parts of its time follow: reading (all), the wait for files, calls of the engine's thread,
and in these the copies and the pinning of memory. Prompts are token ids. MODEL's file is read once before, so that it is in the page cache. Prints one line a figure, then JSON."""
import argparse
import atexit
import http.client
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import tempfile
import threading
import time


class Server:
    def __init__(self, steel, flags):
        self.proc = subprocess.Popen([steel, "serve", "--port", "0", *flags], stderr=subprocess.PIPE, text=True, env=dict(os.environ, STEEL_CONFIG=""))
        atexit.register(self.proc.kill)
        self.lines = []
        for line in self.proc.stderr:
            self.lines.append(line)
            m = re.search(r"listening url=\S+:(\d+)", line)
            if m:
                self.port = int(m.group(1))
            if "ready" in line and hasattr(self, "port") or "listening" in line and any("ready" in l for l in self.lines):
                break
        threading.Thread(target=lambda: self.lines.extend(self.proc.stderr), daemon=True).start()

    def post(self, path, body):
        c = http.client.HTTPConnection("127.0.0.1", self.port)
        start = time.time()
        c.request("POST", path, json.dumps(body))
        r = c.getresponse()
        text = r.read().decode()
        took = time.time() - start
        assert r.status == 200, (r.status, text[:500], self.lines[-5:])
        return took, json.loads(text)

    def metric(self, name):
        c = http.client.HTTPConnection("127.0.0.1", self.port)
        c.request("GET", "/metrics")
        return float(re.search(r"^%s(?:\{.*\})? (\S+)$" % name, c.getresponse().read().decode(), re.M).group(1))

    def parts(self):
        """Seconds of reads from disk by part, and prompt tokens computed."""
        c = http.client.HTTPConnection("127.0.0.1", self.port)
        c.request("GET", "/metrics")
        text = c.getresponse().read().decode()
        found = dict(re.findall(r'^steel_prefix_disk_read_seconds_total\{model_name="A",part="(\w+)"\} (\S+)$', text, re.M))
        found["computed"] = (re.findall(r'^steel_prompt_tokens_computed_total\{model_name="A"\} (\S+)$', text, re.M) or [0])[0]
        return {k: float(v) for k, v in found.items()}

    def first(self, model, prompt):
        """(seconds to the first token, usage)"""
        took, r = self.post("/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True})
        return took, r["usage"]

    def kept(self, model, prompt):
        """(seconds to the first token of a prompt from disk, its parts in words)"""
        before = self.parts()
        took, usage = self.first(model, prompt)
        part = {k: v - before.get(k, 0) for k, v in self.parts().items()}
        ms = ", ".join(f"{k} {part[k] * 1e3:.0f}" for k in ("all", "wait", "call", "copy", "pin") if k in part)
        details = usage["prompt_tokens_details"]
        return took, f"{details.get('disk_tokens', 0)} tokens from disk, {part['computed']:.0f} computed; ms: {ms}"

    def unload(self, model):
        self.post("/api/generate", {"model": model, "keep_alive": 0})
        while "loaded" in self.state(model):
            time.sleep(0.02)

    def state(self, model):
        c = http.client.HTTPConnection("127.0.0.1", self.port)
        c.request("GET", "/v1/models")
        for m in json.loads(c.getresponse().read())["data"]:
            if m["id"] == model:
                return [m["status"]["value"]]
        return []

    def written(self):
        """Waits until nothing more is written."""
        before, same = -1, 0
        while same < 6:
            now = self.metric("steel_prefix_disk_written_bytes_total")
            same = same + 1 if now == before else 0
            before = now
            time.sleep(0.25)

    def stop(self):
        self.proc.terminate()
        self.proc.wait()


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("steel")
    ap.add_argument("model")
    ap.add_argument("--other")
    ap.add_argument("--tokens", type=int, default=4000)
    ap.add_argument("--context", type=int, default=0)
    ap.add_argument("--device", default="auto")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--cache")
    ap.add_argument("--flags", default="")
    a = ap.parse_args()
    work = tempfile.mkdtemp(prefix="steel-keep-")
    cache = a.cache or os.path.join(work, "cache")
    models = os.path.join(work, "models")
    os.mkdir(models)
    os.symlink(os.path.realpath(a.model), models + "/A.gguf")
    if a.other:
        os.symlink(os.path.realpath(a.other), models + "/B.gguf")
    with open(a.model, "rb") as f:
        while f.read(1 << 24):
            pass
    flags = ["--models", models, "--cache-dir", cache, "--cache-disk", "60G", "--max-models", "1", "-np", "4", "-c", str(a.context or a.tokens + 1024), "--device", a.device, *a.flags.split()]
    out = {"tokens": a.tokens, "load": [], "computed": [], "unloaded": [], "restarted": [], "swap": [], "swapped": []}

    def prompt(seed):
        rng = random.Random(seed)
        return [rng.randrange(1000, 4000) for _ in range(a.tokens)]
    short = [1, 2, 3, 4]
    s = Server(a.steel, flags)
    took, _ = s.first("A", short)
    out["load"].append(took)
    print(f"request for a model that is not in memory, to its first token: {took:.2f} s", flush=True)
    s.first("A", [5] * min(a.tokens, 2048))  # kernels and costs are known
    for i in range(a.rounds):
        took, usage = s.first("A", prompt(i))
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0, usage
        out["computed"].append(took)
        print(f"{a.tokens} tokens computed: {took:.3f} s", flush=True)
    s.written()
    for i in range(a.rounds):
        s.unload("A")
        took, _ = s.first("A", short)
        out["load"].append(took)
        took, parts = s.kept("A", prompt(i))
        out["unloaded"].append(took)
        print(f"loaded again in {out['load'][-1]:.2f} s; the prompt from disk: {took:.3f} s ({parts})", flush=True)
    s.stop()
    s = Server(a.steel, flags)
    s.first("A", short)
    for i in range(a.rounds):
        took, parts = s.kept("A", prompt(i))
        out["restarted"].append(took)
        print(f"after a restart: {took:.3f} s ({parts})", flush=True)
    if a.other:
        for i in range(a.rounds):
            s.first("B", short)
            took, _ = s.first("A", short)
            out["swap"].append(took)
            took, parts = s.kept("A", prompt(i))
            out["swapped"].append(took)
            print(f"A after B: loaded in {out['swap'][-1]:.2f} s, then the prompt: {took:.3f} s ({parts})", flush=True)
    s.stop()
    for line in s.lines[-20:]:
        if "warn" in line or "error" in line or "steel:" in line:
            print(line, end="")
    mid = {k: statistics.median(v) for k, v in out.items() if isinstance(v, list) and v}
    print(f"median: computed {mid['computed']:.3f} s, from disk {mid['restarted']:.3f} s: {mid['computed'] / mid['restarted']:.1f}x sooner; load {mid['load']:.2f} s")
    if a.other:
        print(f"median of A after B: load {mid['swap']:.2f} s, prompt {mid['swapped']:.3f} s ({mid['computed'] / mid['swapped']:.1f}x sooner than computed)")
    print(json.dumps(out))
    shutil.rmtree(work)


main()
