#!/usr/bin/env python3
"""Steel and llama.cpp by weight format, side by side in one run. Standard library only.

  compare_formats.py --steel build/steel [--llama LLAMA_BIN_DIR] [--device cuda | cpu] [--formats q4_0,q5_k_m,...]
                     [--layers 12] [--rounds 2] [--seconds 300] [--dir /dev/shm/formats] -o results.jsonl
  compare_formats.py --picture OUT.svg --title TITLE --test tg32 results.jsonl     medians of one test as bars, both engines

For each format bench/synth_gguf.py writes a file with a real model's shapes (formats of folders: bench/synth_folder.py, Steel only). Both engines
are measured on it in interleaved rounds of changing order. Then the file is removed; on a GPU the next one is written meanwhile. On a GPU: tg128,
pp2048, and 32 sequences after prompts of 256. On a CPU: tg32 and pp256. llama.cpp has its best settings (all layers on the GPU, flash attention,
micro-batches of 2,048). Prints a table of medians, and the share of the memory-bound limit that generation reached (experts drawn evenly), also
relative to Q4_K_M (4-bit formats) or Q8_0 if those were measured. Writes JSON lines while it runs.
"""
import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
FORMATS = "q2_k,q3_k_m,iq3_s,iq4_xs,mxfp4,q4_0,q4_k_m,q5_k_m,q8_0,bf16"
FOLDERS = {"gptq": "q4_k_m", "awq": "q4_k_m", "nvfp4": "q4_k_m", "fp8": "q8_0"}  # and whose share of bandwidth they should reach


def run(cmd):
    """The JSON lines of a command; a failure is printed and returns none."""
    r = subprocess.run(cmd, capture_output=True, text=True)
    if r.returncode:
        print(f"{cmd[0]}: {r.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return []
    return [json.loads(l) for l in r.stdout.splitlines() if l.startswith("{")]


class Formats:
    kind = "format"

    def __init__(self, args):
        self.a, self.gpu = args, args.device != "cpu"
        self.prompt, self.gen = (2048, 128) if self.gpu else (256, 32)
        self.start, self.seen, self.shares = time.monotonic(), {}, {}

    def steel(self, path):
        flags = ["--device", self.a.device, "--json", "--skip-cost", "-r", "2"]
        flags += [] if self.gpu else ["-t", str(self.a.threads)]
        rows = run([self.a.steel, "bench", path, "-p", str(self.prompt), "-n", str(self.gen), *flags])
        if self.gpu:
            rows += run([self.a.steel, "bench", path, "-p", "0", "-n", "128", "-d", "256", "--batch", "32", *flags])
        for r in rows:
            if "percent_of_limit" in r:
                self.shares.setdefault((os.path.basename(path), r["test"]), []).append(r["percent_of_limit"])
        return [(r["test"], r["tok_s"], r.get("logits_hash")) for r in rows]

    def llama(self, path):
        if self.gpu:
            common = ["-m", path, "-ngl", "99", "-ub", "2048", "-b", "2048"]
        else:
            common = ["-m", path, "-t", str(self.a.threads)]
        rows = run([os.path.join(self.a.llama, "llama-bench"), *common, "-fa", "1", "-p", str(self.prompt), "-n", str(self.gen),
                    "-r", "2", "-o", "jsonl"])
        out = [((f"pp{r['n_prompt']}" if r["n_prompt"] else f"tg{r['n_gen']}"), r["avg_ts"], None) for r in rows]
        if self.gpu:  # the first line warms up
            rows = run([os.path.join(self.a.llama, "llama-batched-bench"), *common, "-fa", "on", "-npp", "256", "-ntg", "128",
                        "-npl", "32,32", "-c", str(32 * 384), "--output-format", "jsonl"])
            out += [(f"tg{r['tg']} x{r['pl']} @{r['pp']}", r["speed_tg"], None) for r in rows[1:]]
        return out

    def path(self, name):
        return os.path.join(self.a.dir, name)

    def write(self, name):
        """Starts writing the model; the caller waits for it later."""
        tool = "synth_folder.py" if name in FOLDERS else "synth_gguf.py"
        return subprocess.Popen([sys.executable, os.path.join(HERE, tool), self.path(name), "--layers", str(self.a.layers),
                                 "--quant", name], stderr=subprocess.DEVNULL)

    def remove(self, name):
        shutil.rmtree(self.path(name)) if name in FOLDERS else os.remove(self.path(name))

    def measure(self, name):
        path = self.path(name)
        engines = [("Steel", self.steel)] + ([("llama.cpp", self.llama)] if self.a.llama and name not in FOLDERS else [])
        try:
            for number in range(self.a.rounds):
                for engine, measure in engines if number % 2 == 0 else engines[::-1]:
                    for test, rate, digest in measure(path):
                        self.seen.setdefault((name, test), {}).setdefault(engine, []).append(rate)
                        with open(self.a.output, "a") as f:
                            print(json.dumps({"kind": self.kind, self.kind: name, "engine": engine, "round": number, "test": test,
                                              "tok_s": round(rate, 2), "logits_hash": digest}), file=f)
        finally:
            self.remove(name)

    def table(self):
        tests = sorted({t for _, t in self.seen}, key=lambda t: (t[:2] == "pp", len(t)))
        print("| format | " + " | ".join(f"{t}: Steel | llama.cpp | " for t in tests) + "|")
        print("|---" * (1 + 3 * len(tests)) + "|")
        for name in self.a.formats.split(","):
            cells = []
            for t in tests:
                got = {e: statistics.median(v) for e, v in self.seen.get((name, t), {}).items()}
                s, l = got.get("Steel"), got.get("llama.cpp")
                cells += [f"{s:,.0f}" if s else "-", f"{l:,.0f}" if l else "-", f"{s / l:.1f}x" if s and l else "-"]
            print(f"| {name.upper()} | " + " | ".join(cells) + " |")
        self.shares_table()

    def shares_table(self):
        share = {key: statistics.median(v) for key, v in self.shares.items()}
        tests = sorted({t for _, t in share}, key=len)
        if not tests:
            return
        print("\n| format | " + " | ".join(f"{t}: % of memory's speed | against" for t in tests) + " |")
        print("|---" * (1 + 2 * len(tests)) + "|")
        for name in self.a.formats.split(","):
            cells = []
            for t in tests:
                s, of = share.get((name, t)), share.get((FOLDERS.get(name), t))
                cells += [f"{s:.1f}" if s else "-", f"{100 * s / of:.0f} % of {FOLDERS[name].upper()}'s" if s and of else ""]
            print(f"| {name.upper()} | " + " | ".join(cells) + " |")


def picture(args):
    """The formats that both engines ran, by speed."""
    sys.path.insert(0, os.path.join(os.path.dirname(HERE), "tools"))
    import plot
    seen = {}
    with open(args.results) as f:
        for r in map(json.loads, f):
            if r.get("test") == args.test and r["kind"] == "format":
                seen.setdefault(r["format"], {}).setdefault(r["engine"], []).append(r["tok_s"])
    groups = [{"name": name.upper(), "bars": {e: statistics.median(v[e]) for e in ("Steel", "llama.cpp")}}
              for name, v in seen.items() if len(v) == 2]
    groups.sort(key=lambda g: -g["bars"]["Steel"])
    with open(args.picture, "w") as f:
        f.write(plot.chart({"title": args.title, "unit": "tok/s", "groups": groups}))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("results", nargs="?", help="of an earlier run, for --picture")
    p.add_argument("--picture", metavar="OUT.svg")
    p.add_argument("--title", default="")
    p.add_argument("--test", default="tg32")
    p.add_argument("--steel")
    p.add_argument("--llama", help="folder of llama-bench and llama-batched-bench")
    p.add_argument("--device", default="cuda")
    p.add_argument("--threads", type=int, default=2, help="on a CPU (default 2)")
    p.add_argument("--formats", default=FORMATS)
    p.add_argument("--layers", type=int, default=12)
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--seconds", type=float, default=0, help="begin no format after this many (default: no limit)")
    p.add_argument("--dir", default="/dev/shm/formats")
    p.add_argument("-o", "--output", default="formats.jsonl")
    args = p.parse_args()
    if args.picture:
        if not args.results:
            p.error("--picture needs results")
        return picture(args)
    if not args.steel:
        p.error("--steel is needed")
    f = Formats(args)
    os.makedirs(f.a.dir, exist_ok=True)
    names = f.a.formats.split(",")
    writer = f.write(names[0])
    for i, name in enumerate(names):
        if f.a.seconds and time.monotonic() - f.start > f.a.seconds:
            print(f"no time left: {' '.join(names[i:])}", file=sys.stderr)
            writer.wait()
            f.remove(name)
            break
        if writer.wait():
            sys.exit(f"{name}: the model was not written")
        more = i + 1 < len(names)
        if more and f.gpu:
            writer = f.write(names[i + 1])
        f.measure(name)
        if more and not f.gpu:  # not beside a measurement on the same cores
            writer = f.write(names[i + 1])
        print(f"{time.monotonic() - f.start:6.1f} s  {name}", file=sys.stderr, flush=True)
    f.table()


if __name__ == "__main__":
    main()
