#!/usr/bin/env python3
"""The precision of each KV cache type: mean KL of its logits from those of an f32 cache.

  bench/cache_kl.py [BUILD] [MODEL IDS.bin]...     default: the demo model on its fixture's texts, and the goldens

Prompts are computed in chunks of 32, so most keys and values are read back from the cache. STEEL_ISA=ref runs the
reference, STEEL_TEST_DEVICE=cuda a GPU. Prints a table by type; K/V means different types for keys and values.
"""
import math
import array
import os
import struct
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DEVICE = os.environ.get("STEEL_TEST_DEVICE", "cpu")
TYPES = ["f16", "bf16", "q8_0", "fp8", "q8_0/q4_0", "q4_0"]
GOLDENS = ["models/qwen3", "models/qwen3moe", "models/llama3-rope", "models/mistral-window", "families/gpt_oss",
           "families/gemma3", "families/qwen3_next"]


def fixture(path, folder):
    with open(path, "rb") as f:
        data = f.read()
    count, vocab = struct.unpack_from("<2i", data)
    at = 8
    for i in range(count):
        n, points = struct.unpack_from("<2i", data, at)
        out = os.path.join(folder, f"text{i}.bin")
        with open(out, "wb") as f:
            f.write(struct.pack("<2i", n, vocab) + data[at + 8:at + 8 + 4 * n])
        at += 8 + 4 * (n + points) + 4 * points * vocab
        yield out


def logits(steel, model, ids, kind, folder):
    out = os.path.join(folder, "out.bin")
    k, _, v = kind.partition("/")
    subprocess.run([steel, "logits", model, "--ids", ids, "--out", out, "--chunk", "32", "--device", DEVICE,
                    "-ctk", k, "-ctv", v or k], check=True, stderr=subprocess.PIPE)
    with open(out, "rb") as f:
        data = f.read()
    n, vocab = struct.unpack_from("<2i", data)
    rows = array.array("f", data[8 + 4 * n:])
    return [rows[i * vocab:(i + 1) * vocab] for i in range(n)]


def log_softmax(row):
    top = max(row)
    total = math.log(sum(math.exp(x - top) for x in row)) + top
    return [x - total for x in row]


def divergence(want, got):
    a, b = log_softmax(want), log_softmax(got)
    return sum(math.exp(x) * (x - y) for x, y in zip(a, b))


def main():
    args = sys.argv[1:]
    build = args.pop(0) if len(args) % 2 else "build"
    steel = os.path.join(ROOT, build, "steel")
    with tempfile.TemporaryDirectory() as folder:
        if args:
            cases = [(args[i], [args[i + 1]]) for i in range(0, len(args), 2)]
        else:
            texts = list(fixture(os.path.join(ROOT, "demo", "fixture.bin"), folder))
            cases = [(os.path.join(ROOT, "demo", "steel-demo"), texts)]
            golden = os.path.join(os.path.dirname(ROOT), "shared", "golden")
            cases += [(os.path.join(golden, g), [os.path.join(golden, g, "golden.bin")]) for g in GOLDENS
                      if os.path.exists(os.path.join(golden, g, "golden.bin"))]
        print("| model | " + " | ".join(TYPES) + " |\n|---|" + "---|" * len(TYPES))
        for model, texts in cases:
            want = [logits(steel, model, t, "f32", folder) for t in texts]
            line = []
            for kind in TYPES:
                kl = [divergence(w, g) for i, t in enumerate(texts)
                      for w, g in zip(want[i], logits(steel, model, t, kind, folder))]
                line.append(f"{sum(kl) / len(kl):.1e}")
            print(f"| {os.path.basename(model)} | " + " | ".join(line) + " |", flush=True)


main()
