#!/usr/bin/env python3
"""Steel's logits of the demo model against those transformers gave in float32 when it was trained.

Twenty held-out texts, from the safetensors folder and from the BF16 GGUF that `steel convert` makes of it: no logit
may differ by more than 2e-3. demo/README.md describes fixture.bin.
"""
import array
import os
import struct
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
STEEL = os.path.join(ROOT, BUILD, "steel") if not os.path.isabs(BUILD) else os.path.join(BUILD, "steel")
LIMIT = 2e-3


def texts(path):
    with open(path, "rb") as f:
        data = f.read()
    count, vocab = struct.unpack_from("<2i", data)
    at = 8
    for _ in range(count):
        n, points = struct.unpack_from("<2i", data, at)
        at += 8
        ids = struct.unpack_from(f"<{n}i", data, at)
        where = struct.unpack_from(f"<{points}i", data, at + 4 * n)
        at += 4 * (n + points)
        rows = array.array("f", data[at:at + 4 * points * vocab])
        at += 4 * points * vocab
        yield ids, {p: rows[i * vocab:(i + 1) * vocab] for i, p in enumerate(where)}, vocab
    assert at == len(data), "fixture.bin has bytes left over"


def difference(model, folder):
    worst, compared = 0.0, 0
    for ids, want, vocab in texts(os.path.join(ROOT, "demo", "fixture.bin")):
        source, out = os.path.join(folder, "ids.bin"), os.path.join(folder, "out.bin")
        with open(source, "wb") as f:
            f.write(struct.pack(f"<{len(ids) + 2}i", len(ids), vocab, *ids))
        subprocess.run([STEEL, "logits", model, "--ids", source, "--out", out, "--kv-type", "f32", "--device", "cpu"],
                       check=True, stderr=subprocess.PIPE)
        with open(out, "rb") as f:
            got = f.read()
        head = 8 + 4 * len(ids)
        assert len(got) == head + 4 * len(ids) * vocab
        for p, row in want.items():
            mine = array.array("f", got[head + 4 * p * vocab:head + 4 * (p + 1) * vocab])
            worst = max(worst, max(abs(a - b) for a, b in zip(mine, row)))
            compared += 1
    return worst, compared


def main():
    with tempfile.TemporaryDirectory() as folder:
        hf, gguf = os.path.join(ROOT, "demo", "steel-demo"), os.path.join(folder, "demo-bf16.gguf")
        subprocess.run([STEEL, "convert", hf, gguf, "--type", "bf16"], check=True, stderr=subprocess.PIPE)
        bad = False
        for name, model in (("safetensors", hf), ("BF16 GGUF", gguf)):
            worst, compared = difference(model, folder)
            print(f"{name}: largest difference {worst:.2e} over {compared} rows")
            bad |= not worst <= LIMIT or compared < 100
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
