#!/usr/bin/env python3
"""What `steel plan` predicts of this machine's CPU, against what `steel bench` then measures: synthetic models of real shapes.

  fit.py BUILD [--threads N] [--rounds N]    prints a table; ratios are predicted / measured

The machine should be idle. The plan measures anew in every round. Dense models have weights of zeros (synth_gguf.py --empty), which are as fast as others;
routers need random ones. Standard library only."""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
MODELS = [("qwen3-0.6b", "q4_k_m", 28), ("qwen3-0.6b", "q8_0", 28), ("qwen3-4b", "q4_k_m", 12), ("llama-3.1-8b", "q4_k_m", 8),
          ("llama-3.1-8b", "iq3_s", 8), ("qwen3-4b", "bf16", 8), ("qwen3-8b", "q5_k_m", 8), ("qwen3-30b-a3b", "q4_k_m", 4),
          ("gpt-oss-20b", "mxfp4", 4), ("qwen3.5-35b-a3b", "q4_k_m", 4)]


def run(*command, **env):
    r = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, **env))
    if r.returncode:
        sys.exit(f"{' '.join(command)}: {r.stderr}")
    return r.stdout


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("build")
    ap.add_argument("--threads", type=int, default=0)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--only", default="", help="models whose names contain this")
    a = ap.parse_args()
    steel, cpu = os.path.join(a.build, "steel"), ["--device", "cpu"] + (["-t", str(a.threads)] if a.threads else [])
    print("| model | tg1, predicted / measured | ratio | tg8 | ratio | pp512 | ratio |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="steel-fit-") as folder:
        for shape, quant, layers in MODELS:
            if a.only not in shape:
                continue
            path = os.path.join(folder, "m.gguf")
            synth = [sys.executable, os.path.join(HERE, "synth_gguf.py"), path, "--shape", shape, "--layers", str(layers), "--quant", quant]
            experts = any(x in shape for x in ("a3b", "oss"))
            if subprocess.run(synth if experts else synth + ["--empty"], capture_output=True).returncode:
                print(f"skipped: {shape} {quant}: synth_gguf.py has no such file", file=sys.stderr)
                continue
            said, got = [], []
            for _ in range(a.rounds):
                for f in os.listdir(folder):
                    if f == "steel":
                        os.unlink(os.path.join(folder, f, "speed.json"))
                p = json.loads(run(steel, "plan", path, "--json", "--seqs", "1,8", "--depth", "48", *cpu, XDG_CACHE_HOME=folder))["here"]["speed"]
                said.append([g["tokens_per_second"] for g in p["generation"]] + [p["prompt"]["tokens_per_second"]])
                rates = {}
                for line in run(steel, "bench", path, "--json", "--skip-cost", "-r", "1", "-p", "512", "-n", "32", "-b", "1,8", "-d", "32", *cpu).splitlines():
                    o = json.loads(line)
                    if "test" in o:
                        rates[o["test"]] = o["tok_s"]
                got.append(rates)
            median = [statistics.median(s[i] for s in said) for i in range(3)]
            cells = []
            for i, want in enumerate(("tg32", "tg32 x8", "pp512")):
                found = [next((v for k, v in g.items() if k.replace(" @32", "") == want), None) for g in got]
                found = statistics.median(v for v in found if v) if any(found) else float("nan")
                cells += [f"{median[i]:,.1f} / {found:,.1f}", f"{median[i] / found:.2f}"]
            print(f"| {shape} {quant}, {layers} layers | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
