#!/usr/bin/env python3
"""Embeddings: Steel and llama.cpp on the same files, side by side in one run. Standard library only.

  compare_embed.py --steel build/steel [--llama LLAMA_BIN_DIR] [--device cpu|cuda] [--shapes bge-base,bge-m3]
                   [--quants f16,q8_0,q4_k_m] [--texts 512] [--rounds 2] [--threads 2] [--batches 512,2048]
                   [--dir /dev/shm/embed] -o results.jsonl

For each shape and format bench/synth_gguf.py writes a file of the real model's size with random weights. Both engines embed the same
number of texts of the same lengths, 20 to 200 tokens, in interleaved rounds:
- Steel by `steel bench --texts`;
- llama.cpp by llama-embedding at each of the given batch sizes, of which the best counts. Its own figure is used: the total after loading
  and warm-up, which includes tokenising and printing (about a hundredth).
First both embed a few texts, and the least cosine between their vectors shows whether both compute the same. With --device cuda llama.cpp has all
layers on the GPU. If its folder has no llama-embedding, llama-bench -embd 1 replaces it (one text of 512 tokens at a time, or one as long as the
batch, for which the file gets 2,048 positions; flash attention off and on, of which the best counts; no vectors to compare). Prints a table of
medians, and writes JSON lines while it runs.
"""
import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def lengths(n):
    """The lengths that `steel bench --texts` draws; the ids drawn in between are skipped."""
    rnd, out = 7, []

    def draw():
        nonlocal rnd
        rnd = (rnd * 1664525 + 1013904223) & 0xffffffff
        return rnd >> 8
    for _ in range(n):
        out.append(20 + draw() % 181)
        for _ in range(out[-1]):
            draw()
    return out


def words(tokens, seed):
    """A text of this many tokens, of which the tokenizer adds two."""
    return " ".join(f"w{(seed * 7919 + i * 104729) % 30000}" for i in range(tokens - 2))


def run(cmd, **kw):
    r = subprocess.run(cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kw)
    if r.returncode:
        sys.exit(f"{' '.join(cmd[:3])} ...: exit {r.returncode}\n{r.stderr.decode(errors='replace')[-2000:]}")
    return r


class Compare:
    def __init__(self, args):
        self.a, self.seen, self.alike = args, {}, {}
        self.embeds = args.llama and os.path.exists(os.path.join(args.llama, "llama-embedding"))
        self.out = open(args.output, "w")
        self.texts = os.path.join(args.dir, "texts.txt")
        with open(self.texts, "w") as f:
            f.write("@".join(words(n, i) for i, n in enumerate(lengths(args.texts))))

    def put(self, **line):
        print(json.dumps(line), file=self.out, flush=True)

    def steel(self, path):
        cmd = [self.a.steel, "bench", path, "--device", self.a.device, "-t", str(self.a.threads), "--texts", str(self.a.texts),
               "-r", "1" if self.a.device == "cpu" else "5", "--json"]
        return json.loads(run(cmd).stdout)["tok_s"]

    def peer(self, path, batch, *more):
        if self.a.device != "cpu":
            more += ("-ngl", "99", "-b", str(batch), "-ub", str(batch))
        return run([os.path.join(self.a.llama, "llama-embedding"), "-m", path, "-c", str(batch), "-t", str(self.a.threads),
                    "--embd-separator", "@", "--embd-output-format", "array", *more])

    def llama_bench(self, path, batch):
        cmd = [os.path.join(self.a.llama, "llama-bench"), "-m", path, "-t", str(self.a.threads), "-embd", "1",
               "-p", f"512,{batch}", "-n", "0",
               "-b", str(batch), "-ub", str(batch), "-fa", "0,1", "-ngl", "0" if self.a.device == "cpu" else "99", "-o", "json"]
        return max(r["avg_ts"] for r in json.loads(run(cmd).stdout))

    def llama(self, path, batch):
        if not self.embeds:
            return self.llama_bench(path, batch)
        log = self.peer(path, batch, "-f", self.texts, "--perf", "-lv", "4").stderr.decode(errors="replace")
        ms, n = re.search(r"total time = *([\d.]+) ms / *(\d+) tokens", log).groups()
        return int(n) / float(ms) * 1e3

    def cosine(self, path):
        texts = [words(n, i) for i, n in enumerate((5, 20, 60, 200))]
        mine = [json.loads(line)["embedding"] for line in run([self.a.steel, "embed", path, "--device", self.a.device, *texts]).stdout.splitlines()]
        theirs = json.loads(self.peer(path, 512, "-p", "@".join(texts)).stdout)
        dot = lambda a, b: sum(x * y for x, y in zip(a, b))
        return min(dot(a, b) / math.sqrt(dot(a, a) * dot(b, b)) for a, b in zip(mine, theirs))

    def note(self, name, engine, rate, **more):
        self.seen.setdefault(name, {}).setdefault(engine, []).append(rate)
        self.put(kind="embed", model=name, engine=engine, tok_s=round(rate, 1), **more)
        print(f"{name:20} {engine:10} {rate:10.1f} tok/s {more or ''}", file=sys.stderr, flush=True)

    def measure(self, shape, quant):
        name, path = f"{shape} {quant}", os.path.join(self.a.dir, f"{shape}-{quant}.gguf")
        if not os.path.exists(path):
            run([sys.executable, os.path.join(HERE, "synth_gguf.py"), path, "--shape", shape, "--quant", quant,
                 *(["--positions", "2048"] if self.a.llama and not self.embeds else [])])
        if self.embeds:
            self.alike[name] = self.cosine(path)
            self.put(kind="cosine", model=name, least=self.alike[name])
        for r in range(self.a.rounds):
            self.note(name, "Steel", self.steel(path), round=r)
            if not self.a.llama:
                continue
            rates = {b: self.llama(path, b) for b in self.a.batches.split(",")}
            best = max(rates, key=rates.get)
            self.note(name, "llama.cpp", rates[best], round=r, batch=int(best))
        if not self.a.keep:
            os.remove(path)

    def table(self):
        print("| model | Steel, tok/s | llama.cpp | | least cosine |\n|---|---|---|---|---|")
        for name, got in self.seen.items():
            s = statistics.median(got["Steel"])
            l = statistics.median(got["llama.cpp"]) if "llama.cpp" in got else None
            alike = f"{self.alike[name]:.6f}" if name in self.alike else "-"
            print(f"| {name} | {s:,.0f} | " + (f"{l:,.0f} | {s / l:.1f}x" if l else "- | -") + f" | {alike} |")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steel", required=True)
    p.add_argument("--llama", help="folder of llama-embedding, or llama-bench")
    p.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    p.add_argument("--shapes", default="bge-base,bge-m3")
    p.add_argument("--quants", default="f16,q8_0,q4_k_m")
    p.add_argument("--texts", type=int, default=512)
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--batches", default="512,2048", help="llama.cpp's batch sizes; its best counts (default 512,2048)")
    p.add_argument("--dir", default="/dev/shm/embed")
    p.add_argument("--keep", action="store_true", help="leave the models there")
    p.add_argument("-o", "--output", default="embed.jsonl")
    a = p.parse_args()
    os.makedirs(a.dir, exist_ok=True)
    c = Compare(a)
    for shape in a.shapes.split(","):
        for quant in a.quants.split(","):
            c.measure(shape, quant)
    c.table()


if __name__ == "__main__":
    main()
