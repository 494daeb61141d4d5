#!/usr/bin/env python3
"""Pictures: time to first token beside llama.cpp's server, and what they do to other clients' answers.

  see.py MODEL.gguf MMPROJ.gguf [--steel BINARY] [--llama FOLDER] [--side 1024] [--at-once 1,16] [--rounds 3]
         [--stutter SECONDS] [--steel-args "..."] [--llama-args "..."] [--json FILE]

Every request has a picture of its own, so nobody's cache helps. The servers take turns, one round each. Models:
`synth_gguf.py m.gguf --shape qwen3-vl-8b` and `synth_gguf.py mmproj.gguf --shape qwen3-vl-8b-mmproj`.
The CPU seconds of each server are given, too: on a busy machine compare those, with one thread each (--steel-args "-t 1",
--llama-args "-t 1 -tb 1").
For Steel the parts of a picture's time follow, in ms of each picture: decoding, patches (resizing, normalising), rows,
waiting for the tower, steps of the tower, fetching and copying its features; then read, the engine's steps with prompts.
--stutter: twelve clients read text; the gaps between their tokens are measured without and with four clients that send
pictures, SECONDS each. Standard library only.
"""
import argparse
import base64
import http.client
import json
import os
import random
import re
import shlex
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
import zlib

NOISE = random.Random(7).randbytes(1 << 17)


def png(side, seed):
    """A picture of bands of noise and of even colour; seeds give different ones."""
    rnd, rows = random.Random(seed), bytearray()
    for y in range(side):
        rows.append(0)
        if y // 16 % 2:
            at = rnd.randrange(len(NOISE) - 3 * side)
            rows += NOISE[at:at + 3 * side]
        else:
            rows += bytes([y & 255, seed * 37 & 255, seed >> 3 & 255]) * side
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(rows), 1)) + chunk(b"IEND", b"")


def picture_body(side, seed, n):
    url = "data:image/png;base64," + base64.b64encode(png(side, seed)).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    return body(content, n)


def body(content, n):
    return json.dumps({"model": "m", "stream": True, "max_tokens": n, "temperature": 0.7, "seed": 1,
                       "messages": [{"role": "user", "content": content}]}).encode()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    def __init__(self, name, command, env=None):
        self.name, self.port = name, free_port()
        self.log = open(f"{name}.log", "w")
        self.process = subprocess.Popen([*command, "--port", str(self.port)], stdout=self.log, stderr=self.log,
                                        env={**os.environ, **(env or {})})
        until = time.time() + 400
        while time.time() < until and self.process.poll() is None:
            try:
                c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                c.request("GET", "/health")
                if c.getresponse().status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.3)
        sys.exit(f"{name} does not start: see {name}.log")

    def cpu(self):
        """Seconds that all threads have computed."""
        with open(f"/proc/{self.process.pid}/stat") as f:
            fields = f.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def parts(self):
        """Seconds of images by part, and of steps that read prompts; only of Steel."""
        c = http.client.HTTPConnection("127.0.0.1", self.port)
        c.request("GET", "/metrics")
        text = c.getresponse().read().decode()
        found = re.findall(r'^steel_image_seconds_total\{.*part="(\w+)"\} (\S+)$', text, re.M)
        found += re.findall(r'^steel_step_seconds_total\{.*kind="(read)"\} (\S+)$', text, re.M)
        found += [({"steps": "tower_steps"}.get(name, name), v)
                  for name, v in re.findall(r'^steel_image_(\w+)_total\{model_name="[^"]*"\} (\S+)$', text, re.M)]
        return {name: float(v) for name, v in found}

    def close(self):
        self.process.terminate()
        self.process.wait()

    def stream(self, data, stop=None):
        """Times of the request and of each token."""
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1200)
        times = [time.perf_counter()]
        c.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json"})
        r = c.getresponse()
        if r.status != 200:
            raise RuntimeError(f"{self.name}: {r.status} {r.read()[:300]}")
        for line in r:
            if not line.startswith(b"data: {"):
                continue
            choice = (json.loads(line[6:]).get("choices") or [{}])[0]
            if choice.get("delta", {}).get("content"):
                times.append(time.perf_counter())
            if stop and stop.is_set():
                break
        c.close()
        return times


def first_tokens(server, bodies):
    """Seconds to the first token of each request, all sent at once."""
    out, start = [None] * len(bodies), threading.Barrier(len(bodies))

    def one(i):
        start.wait()
        times = server.stream(bodies[i])
        out[i] = (times[1] if len(times) > 1 else time.perf_counter()) - times[0]
    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(bodies))]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return out


def gaps(server, seconds, side, n_pictures, seeds):
    """Gaps between the tokens of twelve text clients, and times to first token of the pictures beside them."""
    stop, found, seen = threading.Event(), [], []

    def reader(k):
        i = 0
        while not stop.is_set():
            times = server.stream(body(f"Client {k}, question {i}: tell a long story of {k * 31 + i} sheep.", 200), stop)
            found.extend(b - a for a, b in zip(times[1:], times[2:]))
            i += 1

    def sender(pool):
        for data in pool:
            if stop.is_set():
                return
            times = server.stream(data, stop)
            if len(times) > 1:
                seen.append(times[1] - times[0])
    pools = [[picture_body(side, next(seeds), 8) for _ in range(max(2, int(seconds)))] for _ in range(n_pictures)]
    threads = [threading.Thread(target=reader, args=(k,)) for k in range(12)]
    threads += [threading.Thread(target=sender, args=(pool,)) for pool in pools]
    [t.start() for t in threads]
    time.sleep(seconds)
    stop.set()
    [t.join() for t in threads]
    return sorted(found), seen


def at(sorted_list, share):
    return sorted_list[min(len(sorted_list) - 1, int(share * len(sorted_list)))]


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model")
    ap.add_argument("mmproj")
    ap.add_argument("--steel", default="build/steel")
    ap.add_argument("--llama", help="folder of llama.cpp's binaries")
    ap.add_argument("--side", type=int, default=1024)
    ap.add_argument("--at-once", default="1,16")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--stutter", type=float, default=0)
    ap.add_argument("--steel-args", default="")
    ap.add_argument("--llama-args", default="")
    ap.add_argument("--json")
    a = ap.parse_args()
    counts = [int(n) for n in a.at_once.split(",") if n]
    most = max([*counts, 16 if a.stutter else 1])
    seeds = iter(range(1, 1 << 20))
    servers = [Server("steel", [a.steel, "serve", a.model, "--mmproj", a.mmproj, *shlex.split(a.steel_args)])]
    if a.llama:
        servers.append(Server("llama", [f"{a.llama}/llama-server", "-m", a.model, "--mmproj", a.mmproj, "--parallel",
                                        str(most), *shlex.split(a.llama_args)],
                              {"LD_LIBRARY_PATH": a.llama + ":" + os.environ.get("LD_LIBRARY_PATH", "")}))
    result, work, marks = {}, {}, {}
    for server in servers:  # the first of each is not measured
        server.stream(picture_body(a.side, next(seeds), 2))
    for n in counts:
        for _ in range(a.rounds):
            for server in servers:
                bodies, before = [picture_body(a.side, next(seeds), 2) for _ in range(n)], server.cpu()
                parts = server.parts() if server.name == "steel" else {}
                times = first_tokens(server, bodies)
                work.setdefault((n, server.name), []).append((server.cpu() - before) / n)
                after = server.parts() if parts else {}
                for name in parts:
                    marks.setdefault((n, name), []).append((after[name] - parts[name]) / n)
                result.setdefault(f"ttft {n}", {}).setdefault(server.name, []).append(statistics.mean(times))
        for name, times in result[f"ttft {n}"].items():
            print(f"{name:6} {n:3} of {a.side} x {a.side} at once: {statistics.median(times) * 1e3:9.1f} ms to the first token "
                  f"({' '.join(f'{t * 1e3:.0f}' for t in times)}), {statistics.median(work[n, name]):.2f} CPU s each", flush=True)
        each = {name: statistics.median(v) for (k, name), v in marks.items() if k == n}
        print("       parts, ms of each picture: " +
              ", ".join(f"{name} {v * 1e3:.1f}" for name, v in each.items() if name not in ("views", "tower_steps")) +
              f"; {each['views'] * n:.0f} views in {each['tower_steps'] * n:.0f} steps", flush=True)
        if len(servers) > 1:
            ratio = [statistics.median(result[f"ttft {n}"][s.name]) for s in servers]
            print(f"       {ratio[1] / ratio[0]:.2f} times llama.cpp's speed")
    for server in servers if a.stutter else []:
        quiet, _ = gaps(server, a.stutter, a.side, 0, seeds)
        busy, seen = gaps(server, a.stutter, a.side, 4, seeds)
        row = {"p50": (at(quiet, .5), at(busy, .5)), "p99": (at(quiet, .99), at(busy, .99)), "max": (quiet[-1], busy[-1])}
        result.setdefault("gaps", {})[server.name] = row
        print(f"{server.name:6} gaps of twelve text clients, alone and beside four with pictures: " +
              ", ".join(f"{k} {x * 1e3:.1f} and {y * 1e3:.1f} ms ({y / x:.2f}x)" for k, (x, y) in row.items()))
        if seen:
            print(f"{server.name:6} {len(seen)} pictures beside text: {statistics.median(seen) * 1e3:.0f} ms to the first token",
                  flush=True)
    for server in servers:
        server.close()
    if a.json:
        json.dump(result, open(a.json, "w"), indent=1)


if __name__ == "__main__":
    main()
