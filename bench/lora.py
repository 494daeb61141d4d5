#!/usr/bin/env python3
"""The cost of adapters: tokens a second of many sequences with different adapters and without, in interleaved rounds.

  lora.py MODEL.gguf [--adapters 8] [--rank 16] [--batch 32] [--gen 32] [--threads 2] [--targets attention|linear] [--steel BIN]

Writes random GGUF adapters for the model's attention (and, with linear, its dense or expert) weights into a temporary
folder and runs `steel bench --lora`. Prints medians of --reps repetitions, and half the distance of their extremes. Exits 1 if
less than --least percent of the speed is left. Standard library only."""
import argparse
import json
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output")
LINEAR = ("ffn_gate", "ffn_up", "ffn_down", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


class Header:
    """The architecture of a GGUF and the shapes of its tensors."""

    def __init__(self, path):
        self.f = open(path, "rb")
        if self.f.read(4) != b"GGUF":
            sys.exit(f"{path}: not a GGUF")
        _, n_tensors, n_meta = self.take("IQQ")
        self.arch, self.tensors = None, {}
        for _ in range(n_meta):
            key, value = self.text(), self.value(self.take("I")[0])
            if key == "general.architecture":
                self.arch = value
        for _ in range(n_tensors):
            name = self.text()
            self.tensors[name] = self.take("Q" * self.take("I")[0])
            self.take("IQ")

    def take(self, fmt):
        return struct.unpack("<" + fmt, self.f.read(struct.calcsize("<" + fmt)))

    def text(self):
        return self.f.read(self.take("Q")[0]).decode("utf-8", "replace")

    def value(self, kind):
        if kind == 8:
            return self.text()
        if kind != 9:
            return self.f.read(SIZES[kind])
        kind, n = self.take("IQ")
        if kind != 8:
            return self.f.read(SIZES[kind] * n)
        return [self.text() for _ in range(n)]


def pack_text(s):
    return struct.pack("<Q", len(s)) + s.encode()


def write_adapter(path, model, targets, rank, draw):
    """F16, small random values."""
    block = struct.pack("<8192e", *(draw.uniform(-0.02, 0.02) for _ in range(8192)))
    tensors = []
    for name, dims in model.tensors.items():
        parts = name.split(".")
        if len(parts) == 4 and parts[0] == "blk" and parts[2] in targets and parts[3] == "weight":
            more = list(dims[2:])
            tensors.append((name + ".lora_a", [dims[0], rank] + more))
            tensors.append((name + ".lora_b", [rank, dims[1]] + more))
    meta = {"general.type": "adapter", "general.architecture": model.arch, "adapter.type": "lora"}
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(meta) + 1))
    for key, v in meta.items():
        out += pack_text(key) + struct.pack("<I", 8) + pack_text(v)
    out += pack_text("adapter.lora.alpha") + struct.pack("<If", 6, float(rank))
    offset, sizes = 0, []
    for name, dims in tensors:
        n = 2
        for d in dims:
            n *= d
        out += pack_text(name) + struct.pack("<I%dQIQ" % len(dims), len(dims), *dims, 1, offset)
        offset += -(-n // 32) * 32
        sizes.append(n)
    out += bytes(-len(out) % 32)
    with open(path, "wb") as f:
        f.write(out)
        for n in sizes:
            f.write(block * (n // len(block)) + block[:n % len(block)] + bytes(-n % 32))
    return sum(sizes)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    for name, default in (("adapters", 8), ("rank", 16), ("batch", 32), ("gen", 32), ("threads", 2), ("reps", 5)):
        p.add_argument("--" + name, type=int, default=default)
    p.add_argument("--targets", choices=("attention", "linear"), default="attention")
    p.add_argument("--least", type=float, default=0, help="percent of the speed that must be left")
    p.add_argument("--steel", default="build/steel")
    p.add_argument("--device", default="cpu")
    a = p.parse_args()
    model = Header(a.model)
    targets = ATTENTION + (LINEAR if a.targets == "linear" else ())
    with tempfile.TemporaryDirectory(prefix="steel-lora-") as folder:
        flags = []
        for i in range(a.adapters):
            path = os.path.join(folder, f"a{i}.gguf")
            size = write_adapter(path, model, targets, a.rank, random.Random(i))
            flags += ["--lora", path]
        r = subprocess.run([a.steel, "bench", a.model, "-p", "0", "-n", str(a.gen), "-b", str(a.batch), "-r", str(a.reps), "-t",
                            str(a.threads), "--device", a.device, "--json", *flags], stdout=subprocess.PIPE, text=True)
    if r.returncode:
        sys.exit(r.returncode)
    rows = [json.loads(line) for line in r.stdout.splitlines()]
    with_, without = (next(x for x in rows if bool(x["adapters"]) == k) for k in (True, False))
    median = statistics.median(with_["rates"]), statistics.median(without["rates"])
    spread = [100 * (max(x["rates"]) - min(x["rates"])) / 2 / m for x, m in zip((with_, without), median)]
    left = 100 * median[0] / median[1]
    print(f"{os.path.basename(a.model)}, {a.batch} sequences over {a.adapters} adapters of rank {a.rank} ({a.targets}, "
          f"{size / 1e6:.1f} MB each): {median[0]:.1f} ± {spread[0]:.0f} % tok/s, without {median[1]:.1f} ± {spread[1]:.0f} %: "
          f"{left:.1f} %")
    sys.exit(left < a.least)


main()
