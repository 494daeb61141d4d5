"""Inter-token latency of decoding requests while a long prompt is computed.

    python3 bench/gap.py BUILD [--model FILE] [--answers 8] [--prompt 4000] [--step-ms 0] [--rounds 5]

Prints the latency with and without the prompt. --step-ms 0 uses the server's own budget, as /metrics reports it. Exits 1 if
the p99 with the prompt is twice the budget or more.
"""
import argparse
import os
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../tests"))
from serverlib import Server, http_request


def percentile(v, p):
    v = sorted(v)
    return v[min(len(v) - 1, int(p * len(v)))] * 1e3 if v else float("nan")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("build")
    p.add_argument("--model")
    p.add_argument("--answers", type=int, default=8)
    p.add_argument("--prompt", type=int, default=4000)
    p.add_argument("--step-ms", type=float, default=0)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--flags", default="")
    args = p.parse_args()
    s = Server(args.build, "-np", str(args.answers + 1), "-c", str(args.prompt + 512 if args.model else 8192),
               "--step-ms", str(args.step_ms), "-t", str(args.threads), *args.flags.split(), model=args.model)
    stop, times = threading.Event(), [[] for _ in range(args.answers)]

    def answer(i):
        seed = i
        while not stop.is_set():
            c = s.socket()
            c.sendall(http_request("/v1/completions", {"prompt": [40 + i] * 8, "max_tokens": 400, "ignore_eos": True,
                                                       "seed": seed, "stream": True}, "Connection: close\r\n"))
            seed += 100
            first = True
            while not stop.is_set() and (piece := c.recv(65536)):
                now = time.perf_counter()
                if b'"text":"' in piece:
                    times[i].append((now, first))
                    first = False
            c.close()
    threads = [threading.Thread(target=answer, args=(i,)) for i in range(args.answers)]
    for t in threads:
        t.start()
    while any(len(t) < 10 for t in times):
        time.sleep(0.1)
    spans, budgets = [], []
    for r in range(args.rounds):
        budgets.append(s.metrics()["steel_step_budget_seconds"] * 1e3)
        t0 = time.perf_counter()
        prompt = [33 + (i * i + r * 7 + i // 50) % 90 for i in range(args.prompt)]
        s.json("/v1/completions", {"prompt": prompt, "max_tokens": 1, "cache_prompt": False})
        spans.append((t0, time.perf_counter()))
        time.sleep(0.5)
    stop.set()
    for t in threads:
        t.join()
    during, quiet = [], []
    for one in times:
        for (a, _), (b, first) in zip(one, one[1:]):
            if not first:
                inside = any(b > t0 and a < t1 for t0, t1 in spans)
                (during if inside else quiet).append(b - a)
    read = sum(t1 - t0 for t0, t1 in spans) / len(spans)
    budget = min(budgets)
    print(f"step budget {budget:.1f} ms, {args.answers} answers, prompt of {args.prompt} tokens read in {read:.2f} s")
    for name, v in (("while it is read", during), ("otherwise", quiet)):
        print(f"gap between tokens {name:17}: p50 {percentile(v, .5):7.2f}  p90 {percentile(v, .9):7.2f}  "
              f"p99 {percentile(v, .99):7.2f}  max {percentile(v, 1):7.2f} ms  ({len(v)})")
    ok = percentile(during, .99) < 2 * budget
    print("p99 while it is read", "under" if ok else "OVER", "twice the budget")
    s.stop()
    sys.exit(not ok)


main()
