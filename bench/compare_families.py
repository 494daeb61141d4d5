#!/usr/bin/env python3
"""Steel and llama.cpp by family, side by side in one run. Standard library only.

  compare_families.py --steel build/steel [--llama LLAMA_BIN_DIR] [--device cuda | cpu] [--shapes gpt-oss-20b,... | new]
                      [--layers N] [--rounds 2] [--seconds 300] [--dir /dev/shm/families] -o results.jsonl

For each shape bench/synth_gguf.py writes a file of the real model's size (Q4_K_M; gpt-oss: MXFP4), or of fewer layers. Both engines are
measured on it in interleaved rounds, as in bench/compare_formats.py, while the next file is written. Then the file is removed. Files that
already exist in DIR are used. On a GPU: tg128, pp2048, and 32 sequences after prompts of 256. On a CPU: tg32 and pp512, by default of six
layers. `--shapes new`: hybrids, sparse and compressed attention, some of them cut to a few layers on a GPU, too. Prints a table of medians, and writes JSON lines while it runs.
"""
import argparse
import os
import statistics
import subprocess
import sys
import time

from compare_formats import HERE, Formats

SHAPES = "gpt-oss-20b,qwen3.5-35b-a3b,glm-4.7-flash,gemma-4-26b-a4b"
NEW = "nemotron-3-nano-30b-a3b,granite-4.0-h-small,lfm2-8b-a1b,laguna-xs,glm-5,deepseek-v4-flash"  # --shapes new
FEW = {"glm-5": 6, "deepseek-v4-flash": 6}  # layers on a GPU, of models that do not fit one
CPU_FEW = {"glm-5": 4, "deepseek-v4-flash": 3, "nemotron-3-nano-30b-a3b": 8}  # on a CPU: 3 GB to 11 GB


class Families(Formats):
    """Like Formats, with a family's shape in place of a format."""
    kind = "shape"

    def __init__(self, args):
        super().__init__(args)
        self.prompt = self.prompt if self.gpu else 512

    def write(self, name):
        if os.path.exists(self.path(name)):  # of an earlier run
            return subprocess.Popen(["true"])
        layers = self.a.layers or (FEW.get(name, 0) if self.gpu else CPU_FEW.get(name, 6))
        return subprocess.Popen([sys.executable, os.path.join(HERE, "synth_gguf.py"), self.path(name), "--shape", name,
                                 *(["--layers", str(layers)] if layers else [])], stderr=subprocess.DEVNULL)

    def table(self):
        tests = sorted({t for _, t in self.seen}, key=lambda t: (t[:2] == "pp", len(t)))
        print("| model | " + " | ".join(f"{t}: Steel | llama.cpp | " for t in tests) + "|")
        print("|---" * (1 + 3 * len(tests)) + "|")
        for name in self.a.shapes.split(","):
            cells = []
            for t in tests:
                got = {e: statistics.median(v) for e, v in self.seen.get((name, t), {}).items()}
                s, l = got.get("Steel"), got.get("llama.cpp")
                cells += [f"{s:,.1f}" if s else "-", f"{l:,.1f}" if l else "-", f"{s / l:.1f}x" if s and l else "-"]
            print(f"| {name} | " + " | ".join(cells) + " |")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steel", required=True)
    p.add_argument("--llama", help="folder of llama-bench and llama-batched-bench")
    p.add_argument("--device", default="cuda")
    p.add_argument("--threads", type=int, default=2, help="on a CPU (default 2)")
    p.add_argument("--shapes", default=SHAPES)
    p.add_argument("--layers", type=int, default=0, help="fewer than the real model has")
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--seconds", type=float, default=0, help="begin no model after this many (default: no limit)")
    p.add_argument("--dir", default="/dev/shm/families")
    p.add_argument("-o", "--output", default="families.jsonl")
    args = p.parse_args()
    args.shapes = NEW if args.shapes == "new" else args.shapes
    f = Families(args)
    os.makedirs(f.a.dir, exist_ok=True)
    names = f.a.shapes.split(",")
    writer = f.write(names[0])
    for i, name in enumerate(names):
        if f.a.seconds and time.monotonic() - f.start > f.a.seconds:
            print(f"no time left: {' '.join(names[i:])}", file=sys.stderr)
            writer.wait()
            f.remove(name)
            break
        if writer.wait():
            sys.exit(f"{name}: the model was not written")
        if i + 1 < len(names):
            writer = f.write(names[i + 1])
        f.measure(name)
        print(f"{time.monotonic() - f.start:6.1f} s  {name}", file=sys.stderr, flush=True)
    f.table()


if __name__ == "__main__":
    main()
