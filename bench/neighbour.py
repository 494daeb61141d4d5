#!/usr/bin/env python3
"""Speed beside busy programs: each engine alone and beside N endless loops, in interleaved rounds, medians.

    python3 bench/neighbour.py --model moe6.gguf --steel Steel=build/steel [--steel before=OTHER/steel ...]
        [--llama LLAMA_CPP/build/bin] [--loops 2] [-t 2] [--gen 64] [--prompt 0] [--rounds 5] [-o results.jsonl]

Every round runs each program alone, then each beside the loops, in alternating order. A loop is a counting shell of the
same priority that may run on any core. By default there are as many loops as threads. Several --steel compare builds. Prints
medians, and the share of the undisturbed speed. Rounds in the output file count, too, so they can be run one by one.
"""
import argparse
import json
import os
import signal
import statistics
import subprocess
import sys

LOOP = ["sh", "-c", "while :; do :; done"]


def steel(path, args):
    cmd = [path, "bench", args.model, "--device", "cpu", "-t", str(args.threads), "-p", str(args.prompt), "-n", str(args.gen),
           "-r", "1", "--skip-cost", "--json"]
    lines = [json.loads(line) for line in subprocess.run(cmd, check=True, capture_output=True, text=True).stdout.splitlines()]
    return {r["test"]: (r["tok_s"], r.get("logits_hash", "")) for r in lines if "test" in r}


def llama(folder, args):
    cmd = [os.path.join(folder, "llama-bench"), "-m", args.model, "-t", str(args.threads), "-p", str(args.prompt), "-n",
           str(args.gen), "-r", "1", "-o", "jsonl"]
    lines = [json.loads(line) for line in subprocess.run(cmd, check=True, capture_output=True, text=True).stdout.splitlines()]
    return {f"pp{r['n_prompt']}" if r["n_prompt"] else f"tg{r['n_gen']}": (r["avg_ts"], "") for r in lines}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True)
    p.add_argument("--steel", action="append", default=[], metavar="NAME=PATH", help="a steel; may be given several times")
    p.add_argument("--llama", help="folder of llama-bench")
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("--loops", type=int, help="busy loops (default: as many as threads)")
    p.add_argument("--gen", type=int, default=64)
    p.add_argument("--prompt", type=int, default=0)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--only", choices=["alone", "beside"], help="measure one of the two")
    p.add_argument("-o", "--output", help="every single figure, one JSON object a line")
    args = p.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no loop is left behind
    loops = args.threads if args.loops is None else args.loops
    programs = [(name, lambda path=path: steel(path, args)) for name, path in (s.split("=", 1) for s in args.steel)]
    if args.llama:
        programs.append(("llama.cpp", lambda: llama(args.llama, args)))
    lines = []
    if args.output and os.path.exists(args.output):
        with open(args.output) as f:
            lines = [json.loads(line) for line in f]
    first = max((r["round"] for r in lines), default=-1) + 1
    for i in range(first, first + args.rounds):
        for where in ([args.only] if args.only else ["alone", "beside"]):
            for name, run in programs if i % 2 == 0 else programs[::-1]:
                busy = [subprocess.Popen(LOOP) for _ in range(loops)] if where == "beside" else []
                try:
                    tests = run()
                finally:
                    for b in busy:
                        b.kill()
                    for b in busy:
                        b.wait()
                for test, (tok_s, digest) in tests.items():
                    lines.append({"kind": "neighbour", "round": i, "program": name, "test": test, "where": where,
                                  "loops": len(busy), "tok_s": round(tok_s, 2), "hash": digest})
                    if args.output:
                        with open(args.output, "a") as f:
                            f.write(json.dumps(lines[-1]) + "\n")
    found, hashes = {}, {}
    for r in lines:
        found.setdefault((r["program"], r["test"]), {}).setdefault(r["where"], []).append(r["tok_s"])
        if r["hash"]:
            hashes.setdefault((r["program"], r["test"]), set()).add(r["hash"])
    for (name, test), by in found.items():
        text = f"{name}: {test}"
        for where, values in by.items():
            text += f"  {where} {statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
        if len(by) == 2:
            text += f"  left {100 * statistics.median(by['beside']) / statistics.median(by['alone']):.0f} %"
        print(text, " ".join(sorted(hashes.get((name, test), ""))))


if __name__ == "__main__":
    main()
