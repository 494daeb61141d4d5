#!/usr/bin/env python3
"""The gain of each row of the pick tables over the next row: tok/s with it and without it (STEEL_PICK=-name).

  picks.py --steel build/steel MODEL [--rows 1,2,4,8,16,32,64] [--prompts 300,2048] [--only name,...] [--rounds 2]
           [--seconds S] [-o results.jsonl]

For each row that a model's steps picked, runs the tests whose number of rows is in its range, in turn with and without it. The figure is
the geometric mean over the rounds. A row that gains less than 2 % everywhere is a candidate for deletion. Standard library only.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time


def bench(a, tests, left_out=None):
    """{rows: tok/s} and the tables as --kernels prints them."""
    env = dict(os.environ)
    if left_out:
        env["STEEL_PICK"] = "-" + left_out
    speeds, table = {}, ""
    rows = [t for t in tests if t in a.rows]
    prompts = [t for t in tests if t in a.prompts]
    for cmd in ((["-p", "0", "-n", "48", "-d", "64", "--batch", ",".join(map(str, rows))] if rows else None),
                (["-n", "0", "-p", ",".join(map(str, prompts))] if prompts else None)):
        if not cmd:
            continue
        r = subprocess.run([a.steel, "bench", a.model, *cmd, "-r", "2", "--json", "--skip-cost", "--kernels"], env=env,
                           capture_output=True, text=True)
        if r.returncode:
            sys.exit(r.stderr[-500:])
        for line in r.stdout.splitlines():
            j = json.loads(line)
            speeds[j["seqs"] if j["test"].startswith("tg") else int(j["test"][2:])] = j["tok_s"]
        table += r.stderr
    return speeds, table


def picked(table):
    """Rows of the tables that ran: name -> (fewest, most) input rows."""
    out = {}
    for line in table.splitlines():
        m = re.match(r"(\w+)\s+(\w+)\s+(?:wgmma\s+|alone\s+)?(\d+) (?:to (\d+)|and more)\s+(\d+)\b", line)
        if m and int(m[5]):
            least, most = int(m[3]), int(m[4] or 1 << 30)
            old = out.get(m[2], (1 << 30, 0))
            out[m[2]] = (min(least, old[0]), max(most, old[1]))
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--steel", required=True)
    p.add_argument("--rows", default="1,2,4,8,16,32,64")
    p.add_argument("--prompts", default="300,2048")
    p.add_argument("--only")
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--seconds", type=float, default=1e9, help="begin no row after this many")
    p.add_argument("-o", "--output", default="picks.jsonl")
    a = p.parse_args()
    a.rows, a.prompts = [int(x) for x in a.rows.split(",") if x], [int(x) for x in a.prompts.split(",") if x]
    start, tests = time.monotonic(), a.rows + a.prompts
    _, table = bench(a, tests)
    for name, (least, most) in picked(table).items():
        mine = [t for t in tests if least <= t <= most]
        if (a.only and name not in a.only.split(",")) or not mine or time.monotonic() - start > a.seconds:
            continue
        rates = {False: {}, True: {}}
        for out in ((False, True, True, False) * a.rounds)[:2 * a.rounds]:
            for t, v in bench(a, mine, name if out else None)[0].items():
                rates[out].setdefault(t, []).append(v)
        mean = statistics.geometric_mean
        gains = {t: mean(rates[False][t]) / mean(rates[True][t]) - 1 for t in mine}
        print(f"{name:26}", "  ".join(f"{t}: {100 * g:+.1f} %" for t, g in gains.items()), flush=True)
        with open(a.output, "a") as f:
            print(json.dumps({"kind": "pick", "model": os.path.basename(a.model), "row": name,
                              "gain": {str(t): round(g, 4) for t, g in gains.items()}}), file=f)


if __name__ == "__main__":
    main()
