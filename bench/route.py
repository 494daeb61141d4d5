"""The cost of `steel route`: the same load on a server directly and through a gateway, in interleaved rounds.

    python3 bench/route.py BUILD [--rounds 3] [--levels 1,16,64] [--input 128] [--output 16]

Prints requests a second and TTFT of both (medians of the rounds), and the gateway's CPU time per request and per forwarded token.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../tests"))
from serverlib import Gateway, Server


def cpu_s(pid):
    with open(f"/proc/{pid}/stat") as f:
        fields = f.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(build, port, level, args):
    out = subprocess.run([build + "/steel", "bench", "serve", "--url", f"http://127.0.0.1:{port}", "--concurrency", str(level),
                          "--num-prompts", str(max(200, level * 20)), "--input-len", str(args.input), "--output-len", str(args.output),
                          "--json"], check=True, capture_output=True, text=True).stdout
    got = json.loads(out)
    assert got["errors"] == 0, got
    return got


def main():
    p = argparse.ArgumentParser()
    p.add_argument("build")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--levels", default="1,16,64")
    p.add_argument("--input", type=int, default=128)
    p.add_argument("--output", type=int, default=16)
    args = p.parse_args()
    server = Server(args.build, "-np", "64", "-c", "1024")
    gateway = Gateway(args.build, [server])
    print(f"{'streams':>7} | {'req/s':>8} {'TTFT p50':>9} {'p99':>7} | {'req/s':>8} {'TTFT p50':>9} {'p99':>7} | CPU us: request, token")
    for level in (int(x) for x in args.levels.split(",")):
        rows = {server.port: [], gateway.port: []}
        cpu = n_requests = n_tokens = 0
        for _ in range(args.rounds):
            for port in rows:
                before = cpu_s(gateway.proc.pid)
                got = measure(args.build, port, level, args)
                rows[port].append((got["ok"] / got["seconds"], got["ttft_ms"]["p50"], got["ttft_ms"]["p99"]))
                if port == gateway.port:
                    cpu += cpu_s(gateway.proc.pid) - before
                    n_requests += got["ok"]
                    n_tokens += got["output_tokens"]
        medians = [statistics.median(r[i] for r in rows[port]) for port in rows for i in range(3)]
        print(f"{level:7} | {medians[0]:8.1f} {medians[1]:9.2f} {medians[2]:7.2f} | {medians[3]:8.1f} {medians[4]:9.2f} {medians[5]:7.2f} | "
              f"{cpu / n_requests * 1e6:.0f}, {cpu / n_tokens * 1e6:.1f}", flush=True)
    gateway.stop()
    server.stop()


main()
