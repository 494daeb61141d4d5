"""The cost of the server per token: CPU time of each of its threads while many streams run.

    python3 bench/overhead.py BUILD [--model FILE] [--streams 64] [--input 32] [--output 256] [--rounds 3]

The load generator is `steel bench serve`, a process of its own. CPU times come from /proc, the model's time in steps from
/metrics. Exits 1 if the server's part exceeds --limit (microseconds a token).
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../tests"))
from serverlib import Server


def cpu_by_thread(pid):
    """{name: seconds}; the event loop is the process' first thread."""
    out = {}
    for tid in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{tid}/schedstat") as f:
            ns = int(f.read().split()[0])
        with open(f"/proc/{pid}/task/{tid}/comm") as f:
            name = "loop" if int(tid) == pid else f.read().strip()
        out[name] = out.get(name, 0) + ns * 1e-9
    return out


def main():
    p = argparse.ArgumentParser()
    p.add_argument("build")
    p.add_argument("--model", default="demo/steel-demo.gguf")
    p.add_argument("--streams", type=int, default=64)
    p.add_argument("--input", type=int, default=32)
    p.add_argument("--output", type=int, default=256)
    p.add_argument("--endpoint", default="chat")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--limit", type=float, default=100)
    args = p.parse_args()
    s = Server(args.build, "-np", str(args.streams), model=args.model)
    rows = []
    for r in range(args.rounds):
        m0, c0, t0 = s.metrics(), cpu_by_thread(s.proc.pid), time.perf_counter()
        out = subprocess.run([os.path.join(args.build, "steel"), "bench", "serve", "--url", f"http://127.0.0.1:{s.port}",
                              "--concurrency", str(args.streams), "--num-prompts", str(4 * args.streams), "--input-len", str(args.input),
                              "--output-len", str(args.output), "--endpoint", args.endpoint, "--seed", str(r), "--json"],
                             capture_output=True, text=True, check=True).stdout
        wall = time.perf_counter() - t0
        m1, c1 = s.metrics(), cpu_by_thread(s.proc.pid)
        n = m1["steel_generation_tokens_total"] - m0["steel_generation_tokens_total"]
        step = sum(m1[k] - m0[k] for k in m1 if k.startswith("steel_step_seconds_total"))
        us = {k: (c1[k] - c0.get(k, 0)) / n * 1e6 for k in c1}
        us["step"], us["served"] = step / n * 1e6, wall / n * 1e6
        us["beside"] = us["steel-engine"] - us["step"]
        us["server"] = us["loop"] + us["steel-worker"] + max(us["beside"], 0)
        rows.append(us)
        print(f"{n:.0f} tokens, {json.loads(out)['output_tokens_per_second']:.0f} tok/s")
    mid = {k: statistics.median(row[k] for row in rows) for k in rows[0]}
    print(f"{args.streams} streams, microseconds a token (median of {args.rounds} rounds):")
    for k, what in (("loop", "HTTP, JSON, SSE (the loop)"), ("steel-worker", "bodies, templates, tokens (workers)"),
                    ("beside", "the engine's thread beside its steps"), ("server", "the server, all told"),
                    ("step", "the model (time in steps)"), ("served", "wall clock")):
        print(f"  {mid[k]:8.2f}  {what}")
    assert s.stop() == 0
    sys.exit(mid["server"] > args.limit)


main()
