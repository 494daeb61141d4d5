#!/usr/bin/env python3
"""Mixtures larger than the GPU beside llama.cpp: the GPU limited to 4, 8, 12 and 16 GB, generation, prompts, eight sequences.

  offload.py BUILD LLAMA_BENCH [--batched LLAMA_BATCHED_BENCH] [--limits 4,8,12,16] [--layers N] [--skew S] [--rounds N] [--kl]

A synthetic Qwen3-30B-A3B Q4_K_M with random weights (synth_gguf.py; --skew S: routers that choose by Zipf's law) is run by both programs in turn, each row
of the table in the same rounds. Steel has --gpu-memory LIMIT
and decides by itself. llama.cpp has the least --n-cpu-moe that would fit such a card: the file's sizes say how many layers of experts fit beside the rest (--beside
GB is set aside for its cache and buffers). The limit counts what Steel allocates, without the driver's own some 500 MB.
With --skew also Steel's static split (--n-cpu-moe): the placement by use learns from 600 tokens before it is measured.
--kl: also the KL of `steel logits` at each limit to the same model wholly on the GPU.

On an H200: python3 bench/offload.py build llama.cpp/build/bin/llama-bench --batched llama.cpp/build/bin/llama-batched-bench --kl
and again with --skew 1. Set -t to the physical cores for both (--threads). Standard library only."""
import argparse
import json
import os
import re
import statistics
import struct
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "tests"))
from gguf_tools import mean_kl, read_logits  # noqa: E402


CACHE = tempfile.TemporaryDirectory(prefix="steel-uses-")


def run(*command, check=True):
    r = subprocess.run(command, env=dict(os.environ, XDG_CACHE_HOME=CACHE.name), capture_output=True, text=True)
    if check and r.returncode:
        sys.exit(f"{' '.join(command)}: {r.stderr[-2000:]}")
    return r


def steel_rates(steel, path, args):
    out = run(steel, "bench", path, "--device", "cuda", "--json", "--skip-cost", "-r", "1", "-p", "2048", "-n", "48", "-b", "1,8", *args).stdout
    tests = [json.loads(line) for line in out.splitlines() if '"test"' in line]
    names = {"pp2048": "pp2048", "tg48": "tg48", "tg48 x8": "x8"}
    return {names[t["test"]]: t["tok_s"] for t in tests if t["test"] in names}


def llama_rates(bench, batched, path, layers, threads):
    more = ["-t", str(threads)] if threads else []
    out = run(bench, "-m", path, "-ngl", "99", "-ncmoe", str(layers), "-p", "2048", "-n", "48", "-ub", "2048", "-fa", "1", "-r", "1", "-o", "json", *more, check=False)
    if out.returncode:
        return None
    rates = {("pp2048" if t["n_prompt"] else "tg48"): t["avg_ts"] for t in json.loads(out.stdout)}
    if batched:
        text = run(batched, "-m", path, "-ngl", "99", "-ncmoe", str(layers), "-npp", "64", "-ntg", "48", "-npl", "8", "-c", "2048", "-fa", "1", *more, check=False).stdout
        row = re.search(r"^\|\s*64\s*\|\s*48\s*\|\s*8\s*\|(.*)$", text, re.M)
        if row:
            rates["x8"] = float(row.group(1).split("|")[4])
    return rates


def logits(steel, path, folder, args):
    ids, out = os.path.join(folder, "ids"), os.path.join(folder, "logits")
    with open(ids, "wb") as f:
        f.write(struct.pack("<2i256i", 256, 0, *((i * 7919 + 13) % 8000 for i in range(256))))
    run(steel, "logits", path, "--device", "cuda", "--ids", ids, "-o", out, *args)
    return read_logits(out)


def median(rounds, test):
    values = [r[test] for r in rounds if r and test in r]
    return statistics.median(values) if values else 0


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("build")
    ap.add_argument("llama_bench")
    ap.add_argument("--batched", help="llama-batched-bench, for eight sequences")
    ap.add_argument("--limits", default="4,8,12,16")
    ap.add_argument("--layers", type=int, default=48)
    ap.add_argument("--skew", type=float, default=0)
    ap.add_argument("--beside", type=float, default=1.0, help="GB of llama.cpp's cache and buffers")
    ap.add_argument("--threads", type=int, default=0)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--model", help="a GGUF in place of the synthetic one")
    ap.add_argument("--kl", action="store_true")
    a = ap.parse_args()
    steel = os.path.join(a.build, "steel")
    threads = ["-t", str(a.threads)] if a.threads else []
    with tempfile.TemporaryDirectory(prefix="steel-offload-", dir=os.environ.get("TMPDIR", "/var/tmp")) as folder:
        path = a.model or os.path.join(folder, "m.gguf")
        if not a.model:
            run(sys.executable, os.path.join(HERE, "synth_gguf.py"), path, "--shape", "qwen3-30b-a3b", "--layers", str(a.layers), *(["--skew", str(a.skew)] if a.skew else []))
        parts = json.loads(run(steel, "plan", path, "--json", "--no-probe", "--device", "cpu").stdout)["here"]["parts"]
        experts = next(p["memory"] for p in parts if p["part"] == "experts")
        rest = os.path.getsize(path) - experts
        layers = a.layers
        whole = logits(steel, path, folder, []) if a.kl else None
        print("| GPU | test | llama.cpp | --n-cpu-moe | steel | ratio |\n|---|---|---|---|---|---|")
        for limit in [float(x) for x in a.limits.split(",")]:
            fit = max(0.0, limit * 2**30 - rest - a.beside * 1e9) / (experts / layers)
            few = max(0, layers - int(fit))
            mine, theirs, static = [], [], []
            args = ["--gpu-memory", f"{limit}G", *threads]
            if a.skew:
                run(steel, "bench", path, "--device", "cuda", "--skip-cost", "--no-warmup", "-r", "1", "-p", "0", "-n", "600", *args)
            for _ in range(a.rounds):
                mine.append(steel_rates(steel, path, args))
                if a.skew:
                    static.append(steel_rates(steel, path, [*args, "--n-cpu-moe", str(few)]))
                theirs.append(llama_rates(a.llama_bench, a.batched, path, few, a.threads))
            for test in ("tg48", "pp2048", "x8"):
                peer, own = median(theirs, test), median(mine, test)
                print(f"| {limit:g} GB | {test} | {peer:.1f} | {few} | {own:.1f} | {own / peer:.2f} |" if peer else f"| {limit:g} GB | {test} | - | - | {own:.1f} | - |", flush=True)
                if static:
                    print(f"| {limit:g} GB | {test}, static split | | {few} | {median(static, test):.1f} | {own / median(static, test):.2f} by use |", flush=True)
            if a.kl:
                print(f"| {limit:g} GB | KL to all on the GPU | | | {mean_kl(whole, logits(steel, path, folder, args)):.2e} | |", flush=True)


main()
