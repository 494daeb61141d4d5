#!/usr/bin/env python3
"""Hours of mixed load, where every answer is compared with what the same request gives alone: prompts and answers of all lengths, seeds,
n > 1, log-probabilities, stop strings, schemas, adapters, conversations that go on, streams, cancels, embeddings, and a KV cache so small
that sequences are preempted, with --kv-canary. In rounds: new requests, each alone; then all of them at once, again and again. Between
rounds nothing runs, no page is held, and memory and descriptors are those of the third round. Nothing is leaked, where LeakSanitizer is
installed.
usage: soak.py BUILD [SECONDS [SEED]]   (make soak: an hour; SECONDS=120 make soak)
DEVICE=cuda: on a GPU, which promises the same bytes to nobody in company. Compared there are lengths and reasons where nothing
but max_tokens may end an answer, and answers with a schema are read by it. How many texts are the same is printed.
MODEL=FILE.gguf: with this model instead of the toy, and adapters of its shape. EMBEDDER: another embedding model. FLAGS: more options of
steel serve."""
import json
import os
import random
import shlex
import struct
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from gguf_tools import Gguf, write_gguf  # noqa: E402
from serverlib import Server, leak_env, sanitized  # noqa: E402

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 3600
SEED = int(sys.argv[3]) if len(sys.argv) > 3 else int(time.time())
DEVICE, MODEL = os.environ.get("DEVICE", ""), os.environ.get("MODEL")
COMP, CHAT, EMBED = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
N_REQUESTS, N_CLIENTS, ROUND_S = 20, 10, 40
GROWTH_KB = (64 if DEVICE else 16) << 10  # what the heap may keep after the third round; caches are full by then, but not a driver's
WORK = tempfile.TemporaryDirectory(prefix="steel-soak-")
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"},
                                           "kind": {"enum": ["one", "two", "three"]}}, "required": ["kind", "n"]}


def adapter(model, name, seed):
    """Of rank 8, for queries and values of two layers."""
    draw, tensors = random.Random(seed), []
    floats = lambda n: struct.pack(f"<{n}f", *(draw.uniform(-0.6, 0.6) for _ in range(n)))
    targets = [w for w in model.tensors if w.endswith(("attn_q.weight", "attn_v.weight"))]
    for w in targets[:4]:
        n_in, n_out = model.tensors[w][0]
        tensors += [(w + ".lora_a", [n_in, 8], 0, floats(8 * n_in)), (w + ".lora_b", [8, n_out], 0, floats(8 * n_out))]
    path = os.path.join(WORK.name, name + ".gguf")
    write_gguf(path, {"general.type": "adapter", "adapter.type": "lora", "general.architecture": model.meta["general.architecture"],
                      "adapter.lora.alpha": 8.0}, tensors)
    return f"{name}={path}"


def words(rng, n):
    return "".join(rng.choice("abcdefgh .,") for _ in range(n))


def request(rng, before):
    """(path, body). before: the text of another request, to share a prefix with."""
    if rng.random() < 0.08:
        return EMBED, {"model": "embedder", "input": [[rng.randrange(3, 140) for _ in range(rng.randrange(1, 60))] for _ in range(rng.randrange(1, 4))]}
    text = before[: rng.randrange(len(before) + 1)] if rng.random() < 0.4 else ""
    text += words(rng, rng.choice((3, 30, 120, 400)))
    body = {"prompt": text, "seed": rng.randrange(1 << 30), "max_tokens": rng.choice((1, 8, 40, 120)), "ignore_eos": rng.random() < 0.5,
            "temperature": rng.choice((0, 0, 0.7, 1.3))}
    if rng.random() < 0.2:
        body["logprobs"] = rng.randrange(4)
    if rng.random() < 0.15:
        body.update(stop=["zz", "ab"], presence_penalty=0.4)
    if rng.random() < 0.15:
        body["n"] = rng.randrange(2, 5)
    if rng.random() < 0.15:
        body.update(top_p=0.9, repetition_penalty=1.2)
    if rng.random() < 0.3:
        body["model"] = rng.choice(("a", "b"))
    if rng.random() < 0.2:
        body.update(ignore_eos=False, max_tokens=80, response_format={"type": "json_schema", "json_schema": {"name": "o", "schema": SCHEMA}})
    if rng.random() < 0.25:
        body.pop("logprobs", None)
        turns = [{"role": "user", "content": body.pop("prompt")}]
        if rng.random() < 0.5:
            turns += [{"role": "assistant", "content": words(rng, 40)}, {"role": "user", "content": words(rng, 20)}]
        return CHAT, dict(body, messages=turns)
    return COMP, body


def answer(s, path, body):
    """Of each choice the index, the reason, the text and the log-probabilities; or of each text its vector."""
    reply = s.json(path, body)
    if path == EMBED:
        return [(d["index"], d["embedding"]) for d in reply["data"]]
    if body["ignore_eos"] and "stop" not in body:
        assert reply["usage"]["completion_tokens"] == body["max_tokens"] * body.get("n", 1), (body, reply)
    return sorted((c["index"], c["finish_reason"], c.get("text") or (c.get("message") or {}).get("content") or "", json.dumps(c.get("logprobs")))
                  for c in reply["choices"])


def streamed(s, path, body):
    """The same, as a stream tells it; only texts and reasons."""
    texts, ends = {}, {}
    for e in s.stream(path, body):
        for c in json.loads(e)["choices"] if e != "[DONE]" else []:
            texts[c["index"]] = texts.get(c["index"], "") + (c.get("text") or (c.get("delta") or {}).get("content") or "")
            ends[c["index"]] = c["finish_reason"] or ends.get(c["index"])
    return sorted((i, ends[i], texts[i]) for i in texts)


def by_schema(text):
    o = json.loads(text)
    assert o["kind"] in ("one", "two", "three") and len(o.get("name", "")) <= 12, text
    assert isinstance(o["n"], int), text


def compare(path, body, got, want):
    """On a CPU all of an answer is compared. A GPU's may end elsewhere, if its text may."""
    if not DEVICE:
        assert got == want, (body, got, want)
        return
    assert len(got) == len(want), (body, got, want)
    for g, w in zip(got, want):
        assert g[0] == w[0], (body, got, want)
        if path == EMBED:
            dot = sum(a * b for a, b in zip(g[1], w[1]))
            assert dot > 0.999, (dot, body)
        elif body["ignore_eos"] and "stop" not in body:
            assert g[1] == "length", (body, got, want)
        elif "response_format" in body and g[1] == "stop":
            by_schema(g[2])


def cancelled(s, rng, path, body):
    """A client that leaves."""
    text = json.dumps(dict(body, stream=path != EMBED)).encode()
    with s.socket() as c:
        c.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n".encode()
                  + text[: len(text) if rng.random() < 0.9 else rng.randrange(len(text))])
        c.settimeout(rng.random())
        try:
            for _ in range(rng.randrange(6)):
                c.recv(4096)
        except (TimeoutError, ConnectionError):
            pass


class Soak:
    def __init__(self):
        path = MODEL or os.path.join(WORK.name, "toy.gguf")
        if not MODEL:
            subprocess.run([os.path.join(BUILD, "tests/toy_gguf"), path], check=True)
        model = Gguf(path)
        flags = ["-np", "6", "-c", "1024", "--kv-tokens", "1300", "--kv-canary", "--embedding", "embedder=" + os.environ.get("EMBEDDER", "tests/golden/qwen3_embedding"),
                 "--lora", adapter(model, "a", 1), "--lora", adapter(model, "b", 2), *shlex.split(os.environ.get("FLAGS", ""))]
        if DEVICE:
            os.environ["STEEL_TEST_DEVICE"] = DEVICE
        leaks = None if DEVICE or sanitized(BUILD) else leak_env()
        if not leaks:
            print("skipped: leaks: LeakSanitizer is not preloaded for a GPU or a sanitizer's build, or is not installed", flush=True)
        self.s, self.failed, self.counts, self.n_same = Server(BUILD, *flags, model=path, env=dict(os.environ, **leaks) if leaks else None), [], {}, 0
        self.lock = threading.Lock()

    def count(self, what, same=False):
        with self.lock:
            self.counts[what] = self.counts.get(what, 0) + 1
            self.n_same += same

    def client(self, seed, pool, alone, until):
        rng = random.Random(seed)
        while time.monotonic() < until and not self.failed:
            i = rng.randrange(len(pool))
            path, body = pool[i]
            body = dict(body, cache_prompt=rng.random() < 0.8) if path != EMBED else body
            how = rng.random()
            try:
                if how < 0.2:
                    cancelled(self.s, rng, path, body)
                    self.count("cancelled")
                elif how < 0.5 and path != EMBED:
                    got, want = streamed(self.s, path, body), [a[:3] for a in alone[i]]
                    compare(path, body, got, want)
                    self.count("streams", got == want)
                else:
                    got = answer(self.s, path, body)
                    compare(path, body, got, alone[i])
                    self.count(path.rsplit("/", 1)[1], got == alone[i])
            except Exception as e:  # noqa: told by the main thread
                self.failed.append(f"{path}: {e!r}")

    def resources(self):
        pid = self.s.proc.pid
        return self.s.rss_kb(), len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))

    def quiet(self):
        """Waits until clients that left are forgotten."""
        self.s.wait_metric("steel_requests_running", 0)
        self.s.wait_metric("steel_requests_waiting", 0)
        self.s.wait_metric('steel_kv_pages{state="held"}', 0)

    def round(self, rng, until):
        pool, before = [], words(rng, 300)
        for _ in range(N_REQUESTS):
            pool.append(request(rng, before))
            before = pool[-1][1].get("prompt") or before
        alone = [answer(self.s, path, dict(body, cache_prompt=False) if path != EMBED else body) for path, body in pool]
        threads = [threading.Thread(target=self.client, args=(rng.random(), pool, alone, until)) for _ in range(N_CLIENTS)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not self.failed, f"seed {SEED}: {self.failed[0]}\n{self.s.log()[-3000:]}"
        self.quiet()

    def run(self):
        rng, end, base, n = random.Random(SEED), time.monotonic() + SECONDS, None, 0
        each = min(ROUND_S, SECONDS / 5)
        while time.monotonic() < end or n < 4:
            self.round(rng, time.monotonic() + each)
            n += 1
            now = self.resources()
            print(f"round {n}: {now[0] / 1024:.0f} MB, {now[1]} descriptors, {now[2]} threads, {self.counts}", flush=True)
            base = now if n == 3 else base
        m = self.s.metrics()
        assert m["steel_kv_wrong_pages_total"] == 0 and m["steel_preemptions_total"] > 0, m
        for _ in range(1000):  # the last connections close
            if self.resources()[1] <= base[1]:
                break
            time.sleep(0.01)
        else:
            raise AssertionError(f"seed {SEED}: {base[1]} descriptors after three rounds, {self.resources()[1]} at the end")
        grown = now[0] - base[0]
        assert sanitized(BUILD) or grown <= GROWTH_KB, f"seed {SEED}: memory has grown by {grown} kB"
        assert self.s.stop() == 0, self.s.log()[-3000:]
        n_read = sum(self.counts.values()) - self.counts.get("cancelled", 0)
        print(f"seed {SEED}: {n_read} answers compared, {self.n_same} the same in every byte, {self.counts.get('cancelled', 0)} clients left, "
              f"{n} rounds, memory {grown:+d} kB, {m['steel_preemptions_total']:.0f} preemptions")


Soak().run()
