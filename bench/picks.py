#!/usr/bin/env python3
"""What each row of the kernel tables gains over the next one that fits, over several models (`steel bench --picks`).

  picks.py --steel build/steel -o picks.jsonl [--seconds S] [--rounds 2] MODEL[:OPTION...] ...
  picks.py --summary picks.jsonl

A model's options are those of `steel bench`, separated by spaces: "m.gguf:--kv-type q8_0 -d 64". Each model is loaded once; after S
seconds the next one is measured. The summary has a line for each row: its largest gain, and where. A row that gains less than
2 % everywhere is a candidate for deletion. Standard library only.
"""
import argparse
import json
import os
import subprocess
import sys

TESTS = ["-p", "300,2048", "-n", "16", "--batch", "1,2,4,8,16,32,64,128", "-d", "64,2048"]


def measure(a):
    failed = []
    with open(a.output, "a") as out:
        for model in a.models:
            path, _, options = model.partition(":")
            cmd = [a.steel, "bench", path, "--picks", "--json", "-r", str(a.rounds), *TESTS, *options.split()]
            kv = options.partition("--kv-type ")[2].split(" ")[0]
            name = os.path.basename(path.rstrip("/")) + (f" (cache of {kv})" if kv else "")
            with subprocess.Popen(cmd, stdout=subprocess.PIPE, text=True) as p:
                try:
                    text, _ = p.communicate(timeout=a.seconds)
                except subprocess.TimeoutExpired:
                    p.kill()
                    text, _ = p.communicate()
                    print(f"{name}: stopped after {a.seconds:.0f} s", file=sys.stderr)
            lines = [json.loads(x) for x in text.splitlines() if x.endswith("}")]
            for line in lines:
                print(json.dumps({"model": name, **line}), file=out, flush=True)
            if p.returncode > 0 or not lines:
                failed.append(name)
    if failed:
        sys.exit("failed: " + ", ".join(failed))


def summary(path):
    best = {}
    with open(path) as f:
        lines = [json.loads(x) for x in f]
    for x in lines:
        key = (x["op"], x["row"])
        best.setdefault(key, []).append(x)
    for (op, row), all_of in best.items():
        top = max(all_of, key=lambda x: x["gain"])
        low = min(all_of, key=lambda x: x["gain"])
        where = "{model}, {test} {rows} @{depth}, over {instead}"
        print(f"{op:14} {row:30} {100 * top['gain']:+7.1f} %  {where.format(**top)};  least {100 * low['gain']:+.1f} % "
              f"({low['model']}, {low['test']} {low['rows']} @{low['depth']}); {len(all_of)} tests")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("models", nargs="*")
    p.add_argument("--steel", default="build/steel")
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--seconds", type=float, default=600)
    p.add_argument("--summary", metavar="FILE")
    p.add_argument("-o", "--output", default="picks.jsonl")
    a = p.parse_args()
    measure(a)
    if a.summary or a.models:
        summary(a.summary or a.output)


if __name__ == "__main__":
    main()
