#!/usr/bin/env python3
"""What costly requests cost the others: the time between two tokens of an innocent client, alone and beside fifteen
requests of somebody else. All in one run, by turns.

    python3 bench/costly.py --steel build/steel [--steel before=OTHER/steel ...] [--rounds 3] [-t 1]

The model is the tests' toy with a made-up vocabulary of 151,936 tokens (build/tests/toy_gguf), so that masks and draws
are nearly all of a step, or that of --model (bench/synth_gguf.py and bench/add_vocab.py make some). Kinds: `plain` asks for nothing, and is what fifteen rows more cost by themselves; `grammar` is a
small recursive GBNF whose masks take 10 ms and more each; `properties` a schema of 3,900 optional properties; `flat`
samples at temperature 5 with top_p 0.999; `kept` asks for responses that fill and turn over the store, 1 MB each, and reads
them. Prints p50, p99 and the worst of the innocent's times, the p99 as a multiple of that beside `plain`, and how many tokens the others
got. The innocent's text must be the same everywhere.

On a machine that does other work, times say little. So the last columns count CPU time: of the thread that runs the steps, p50 and p99
between two of the innocent's tokens, and the p99 as a multiple of that alone. A client that is woken late sees two tokens
at once, so the p99 is an upper bound.
"""
import argparse
import http.client
import json
import os
import re
import statistics
import string
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "tests"))
from gguf_tools import grow_vocab

VOCAB, GUESTS = 151936, 15
GRAMMAR = "root ::= " + " | ".join(f'[a-zA-Z0-9 ] root "{c}"' for c in "0123") + ' | ""'
NAMES = [f"{a}{b}{c}" for a in string.ascii_lowercase for b in string.ascii_lowercase for c in "pqrstu"][:3900]
SCHEMA = {"type": "object", "additionalProperties": False, "properties": {n: {"type": "integer"} for n in NAMES}}
KINDS = {"alone": None, "plain": {}, "grammar": {"grammar": GRAMMAR}, "properties": {"json_schema": SCHEMA},
         "flat": {"temperature": 5, "top_k": 0, "top_p": 0.999, "min_p": 0}, "kept": {"kept": 1 << 20}}


class Server:
    def __init__(self, steel, model, threads):
        self.proc = subprocess.Popen([steel, "serve", model, "--port", "0", "--device", "cpu", "-t", str(threads), "-c", "4096",
                                      "--max-num-seqs", "24", "--deterministic"], stderr=subprocess.PIPE, text=True)
        for line in self.proc.stderr:
            if m := re.search(r"://[^ \"]*:(\d+)", line):
                self.port = int(m.group(1))
            if "ready" in line:
                break
        threading.Thread(target=self.proc.stderr.read, daemon=True).start()

    def post(self, body, host="127.0.0.1", path="/v1/completions", method="POST"):
        c = http.client.HTTPConnection("127.0.0.1", self.port, source_address=(host, 0))
        c.request(method, path, json.dumps(body) if body else None)
        return c, c.getresponse()

    def engines(self):
        """The scheduler's statistics of the threads that run steps."""
        folder = f"/proc/{self.proc.pid}/task"
        for thread in os.listdir(folder):
            with open(f"{folder}/{thread}/comm") as f:
                if f.read().strip() == "steel-engine":
                    yield open(f"{folder}/{thread}/schedstat")


def innocent(server, n):
    """The times between tokens of one stream, the steps' CPU time between them, and its text."""
    stats = list(server.engines())

    def cpu():
        total = 0
        for f in stats:
            f.seek(0)
            total += int(f.read().split()[0])
        return total * 1e-9
    c, r = server.post({"prompt": "Hello", "max_tokens": n, "seed": 1, "ignore_eos": True, "stream": True})
    assert r.status == 200, r.read()
    times, spent, text = [time.perf_counter()], [cpu()], ""
    for line in r:
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
            spent.append(cpu())
            text += json.loads(line[6:])["choices"][0]["text"]
    c.close()
    for f in stats:
        f.close()
    return [b - a for a, b in zip(times, times[1:])], [b - a for a, b in zip(spent, spent[1:])], text


def keep(server, size, number):
    """One response that the store keeps, and a look at it."""
    body = {"input": [{"role": "user", "content": f"{number}", "junk": "y" * size}], "max_output_tokens": 16}
    c, r = server.post(body, "127.0.0.2", "/v1/responses")
    made = json.loads(r.read()).get("id")
    c.close()
    for path in (made, f"{made}/input_items"):
        c, r = server.post(None, "127.0.0.2", f"/v1/responses/{path}", "GET")
        r.read()
        c.close()


def guest(server, fields, number, stop, counts):
    """Asks again and again, and counts what comes."""
    while not stop.is_set():
        body = {"prompt": f"{number}", "max_tokens": 400, "seed": number, "temperature": 1, "stream": True, **fields}
        if "grammar" not in fields and "json_schema" not in fields:
            body["ignore_eos"] = True
        try:
            if "kept" in fields:
                keep(server, fields["kept"], number)
                counts[number] += 16
                continue
            c, r = server.post(body, "127.0.0.2")
            for line in r:
                counts[number] += line.startswith(b"data: {")
                if stop.is_set():
                    break
            c.close()
        except (OSError, http.client.HTTPException):
            pass


def measure(server, fields, n):
    stop, counts = threading.Event(), [0] * GUESTS
    guests = [] if fields is None else [threading.Thread(target=guest, args=(server, fields, i, stop, counts)) for i in range(GUESTS)]
    for g in guests:
        g.start()
    time.sleep(1.0 if guests else 0)
    times, spent, text = innocent(server, n)
    stop.set()
    for g in guests:
        g.join()
    return times, spent, text, sum(counts)


os.environ.setdefault("STEEL_DRAFT", "off")  # accepted drafts arrive together: no gaps between tokens


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steel", action="append", metavar="[NAME=]PATH", help="may be given several times")
    p.add_argument("--toy", default="build/tests/toy_gguf", help="what writes the model")
    p.add_argument("--model", metavar="GGUF", help="instead of the toy")
    p.add_argument("--kinds", default=",".join(KINDS), help="alone is measured in any case")
    p.add_argument("--tokens", type=int, default=64)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("-t", "--threads", type=int, default=1)
    args = p.parse_args()
    builds = [s.split("=", 1) if "=" in s else (s, s) for s in args.steel or ["build/steel"]]
    kinds = ["alone"] + [k for k in args.kinds.split(",") if k != "alone"]
    with tempfile.TemporaryDirectory() as folder:
        small, model = os.path.join(folder, "small.gguf"), os.path.join(folder, "large.gguf")
        if not args.model:
            subprocess.run([args.toy, small], check=True)
            grow_vocab(small, model, VOCAB)
        servers = [(name, Server(path, args.model or model, args.threads)) for name, path in builds]
        found, texts = {}, set()
        for i in range(args.rounds):
            for kind in kinds:
                for name, server in servers:
                    times, spent, text, n = measure(server, KINDS[kind], args.tokens)
                    texts.add(text)
                    got = found.setdefault((name, kind), ([], [], []))
                    got[0].extend(times[1:])  # without the first token
                    got[1].append(n / sum(times))
                    got[2].extend(spent[1:])
                    print(f"round {i} {name} {kind}: {sum(times):.2f} s", file=sys.stderr)
        for _, server in servers:
            server.proc.terminate()
            server.proc.wait()
    print("| build | beside 15 | p50 ms | p99 ms | worst ms | p99, of alone | of plain | their tok/s | CPU p50 ms | p99 ms | of alone |\n"
          "|---|---|---|---|---|---|---|---|---|---|---|")
    for (name, kind), (times, rate, spent) in found.items():
        def p99(k, i=0):
            t = sorted(found[name, k][i]) if (name, k) in found else [float("nan")]
            return t[min(len(t) - 1, int(len(t) * 0.99))] * 1e3
        print(f"| {name} | {kind} | {statistics.median(times) * 1e3:.2f} | {p99(kind):.2f} | {max(times) * 1e3:.2f} | "
              f"{p99(kind) / p99('alone'):.1f} | {p99(kind) / p99('plain'):.1f} | {statistics.median(rate):.0f} | {statistics.median(spent) * 1e3:.2f} | {p99(kind, 2):.2f} | "
              f"{p99(kind, 2) / p99('alone', 2):.1f} |")
    if len(texts) != 1:
        sys.exit(f"the innocent's text differs: {len(texts)} texts")


if __name__ == "__main__":
    main()
