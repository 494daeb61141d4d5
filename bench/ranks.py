#!/usr/bin/env python3
"""Several ranks of one thread, compared with one process of as many threads on one machine: interleaved rounds, medians, a Markdown table.

  ranks.py BUILD MODEL [--ranks 2] [--rounds 5] [--arrangements '--tp 2;--tp 2 --ep;--pp 2'] [--prompts 512,2048] [--batch 1,16] [--gen 32]
                       [--quiet 'chrt -r 1']

A round's figure is a median of three. --quiet runs every process under a command that keeps other programs away. Standard library only."""
import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys

MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "pml", "ob1", "--mca", "btl", "self,vader"]


def rates(command):
    """Tokens a second by test name."""
    r = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if r.returncode:
        sys.exit(f"{shlex.join(command)}\n{r.stderr}")
    out = {}
    for line in r.stdout.splitlines():
        row = json.loads(line) if line.startswith("{") else {}
        if "test" in row and "tok_s" in row:
            out[row["test"]] = row["tok_s"]
    return out


def main():
    p = argparse.ArgumentParser()
    p.add_argument("build")
    p.add_argument("model")
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--arrangements", default="--tp 2;--tp 2 --ep;--pp 2")
    p.add_argument("--prompts", default="512,2048")
    p.add_argument("--batch", default="1,16")
    p.add_argument("--gen", default="32")
    p.add_argument("--quiet", default="")
    a = p.parse_args()
    bench = [*shlex.split(a.quiet), os.path.join(a.build, "steel"), "bench", a.model, "--device", "cpu", "-p", a.prompts, "-n", a.gen,
             "--batch", a.batch, "--skip-cost", "--json"]
    commands = {f"one process, {a.ranks} threads": [*bench, "-t", str(a.ranks)]}
    for arrangement in a.arrangements.split(";"):
        commands[f"`{arrangement}`"] = [*MPIRUN, "-n", str(a.ranks), *bench, "-t", "1", *arrangement.split()]
    rounds = {name: [] for name in commands}
    for i in range(a.rounds):
        for name, command in commands.items():
            rounds[name].append(rates(command))
            print(f"round {i + 1}: {name}: {rounds[name][-1]}", file=sys.stderr, flush=True)
    tests = list(next(iter(rounds.values()))[0])
    whole = {}
    print("| | " + " | ".join(tests) + " |\n" + "|---" * (len(tests) + 1) + "|")
    for name, got in rounds.items():
        cells = []
        for t in tests:
            v = sorted(r[t] for r in got)
            m = statistics.median(v)
            share = f" ({100 * m / whole[t]:.0f} %; {v[0]:.4g} to {v[-1]:.4g})" if t in whole else f" ({v[0]:.4g} to {v[-1]:.4g})"
            whole.setdefault(t, m)
            cells.append(f"{m:,.4g}{share}")
        print(f"| {name} | " + " | ".join(cells) + " |")


main()
