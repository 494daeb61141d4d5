"""Rough load for the server: many streams at once, 30 % of them aborted at random moments, slow
readers, half-open sockets and malformed requests, with a KV cache too small for all. Afterwards every page
must be free, memory flat, and every finished output byte-equal to the same request alone.

    python3 bench/load.py BUILD [--clients 64] [--seconds 120] [--seqs 16] [--kv-tokens 2400] [--seed 1] [--model GGUF]

With --ranks N and --flags "--tp 2" several ranks (docs/ranks.md) compute the outputs, which are compared with those of one process.

With --hostile N the load runs twice: alone, then beside N hostile clients from another address (bench/hostile.py). Prints
the others' TTFT in both runs, and the server's memory.
"""
import argparse
import json
import multiprocessing
import os
import random
import socket
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../tests"))
from ranklib import Ranks
from serverlib import Server, http_request
import hostile

COMP = "/v1/completions"
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"},
                                           "kind": {"enum": ["one", "two", "three"]}}, "required": ["kind", "n"]}


def specs(n):
    """Requests of many kinds; every third one has the prefix of the one before it."""
    rng = random.Random(7)
    out = []
    for i in range(n):
        shared = "s" * 100 if i % 3 == 0 else out[-1]["prompt"][: rng.randrange(40, 160)]
        prompt = shared + "".join(rng.choice("abcdefgh ") for _ in range(rng.randrange(5, 300)))
        s = {"prompt": prompt, "seed": i, "max_tokens": rng.randrange(20, 160), "ignore_eos": i % 2 == 0}
        if i % 4 == 1:
            s.update(temperature=0)
        if i % 5 == 2:
            s.update(logprobs=2)
        if i % 7 == 3:
            s.update(stop=["zz", "ab"], presence_penalty=0.4)
        if i % 11 == 4:
            s.update(n=3)
        if i % 9 == 5:
            s.update(ignore_eos=False, response_format={"type": "json_schema", "json_schema": {"name": "o", "schema": SCHEMA}})
        out.append(s)
    return out


def texts(choices):
    return [(c["text"], c["finish_reason"]) for c in choices]


class Load:
    def __init__(self, server, args, alone=None):
        """alone: the server that computes the expected outputs, if it is not this one."""
        self.s, self.args = server, args
        alone = alone or server
        self.specs = specs(40)
        self.want = [texts(alone.json(COMP, dict(x, cache_prompt=False))["choices"]) for x in self.specs]
        self.stop, self.lock = time.time() + args.seconds, threading.Lock()
        self.count = {"equal": 0, "aborted": 0, "slow": 0, "half open": 0, "malformed": 0, "refused": 0}
        self.wrong, self.first = [], []  # first: seconds to the first token of streams read to their end

    def dial(self, rng):
        """Each client has an address of its own."""
        return socket.create_connection(("127.0.0.1", self.s.port), source_address=(rng.address, 0))

    def add(self, what):
        with self.lock:
            self.count[what] += 1

    def read_all(self, c, slow=0, start=None):
        out, first = b"", None
        while True:
            piece = c.recv(4096 if slow else 65536)
            if not piece:
                break
            out += piece
            if start and not first and b"data: " in out:
                first = time.time() - start
            if slow:
                time.sleep(slow)
        if first:
            with self.lock:
                self.first.append(first)
        return out

    def finished(self, rng, slow=0):
        i = rng.randrange(len(self.specs))
        stream = rng.random() < 0.7
        c = self.dial(rng)
        if slow:
            c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        start = time.time()
        c.sendall(http_request(COMP, dict(self.specs[i], stream=stream), "Connection: close\r\n"))
        head, _, body = self.read_all(c, slow, None if slow else start).partition(b"\r\n\r\n")
        c.close()
        status = int(head.split()[1])
        if status == 429:
            self.add("refused")
            time.sleep(0.05)
            return
        assert status == 200, head
        if stream:
            data, at = b"", 0
            while at < len(body):  # chunks
                end = body.index(b"\r\n", at)
                n = int(body[at:end], 16)
                data += body[end + 2:end + 2 + n]
                at = end + 4 + n
            n = self.specs[i].get("n", 1)
            got, events = [["", None] for _ in range(n)], data.decode().split("\n\n")
            assert events[-2] == "data: [DONE]", events[-3:]
            for e in events[:-2]:
                if e.startswith(":"):
                    continue
                for ch in json.loads(e[6:])["choices"]:
                    got[ch["index"]][0] += ch["text"]
                    got[ch["index"]][1] = ch["finish_reason"] or got[ch["index"]][1]
            got = [tuple(g) for g in got]
        else:
            got = texts(json.loads(body)["choices"])
        if got != self.want[i]:
            with self.lock:
                self.wrong.append((i, got, self.want[i]))
        self.add("slow" if slow else "equal")

    def aborted(self, rng):
        c = self.dial(rng)
        c.sendall(http_request(COMP, dict(rng.choice(self.specs), stream=rng.random() < 0.7, max_tokens=400, ignore_eos=True)))
        kind = rng.randrange(3)
        if kind == 0:
            time.sleep(rng.random() * 0.02)
        elif kind == 1:
            c.recv(rng.randrange(1, 3000))
        if rng.random() < 0.5:
            c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        c.close()
        self.add("aborted")

    def half_open(self, rng, keep):
        c = self.dial(rng)
        whole = http_request(COMP, rng.choice(self.specs))
        c.sendall(whole[: rng.randrange(len(whole))])
        keep.append(c)
        if len(keep) > 3:
            keep.pop(0).close()
        self.add("half open")

    def malformed(self, rng):
        c = self.dial(rng)
        whole = bytearray(http_request(COMP, rng.choice(self.specs), "Connection: close\r\n"))
        for _ in range(rng.randrange(1, 8)):
            whole[rng.randrange(len(whole))] = rng.randrange(256)
        c.sendall(bytes(whole))
        c.shutdown(socket.SHUT_WR)
        self.read_all(c)
        c.close()
        self.add("malformed")

    def client(self, number):
        rng, keep = random.Random(self.args.seed * 1000 + number), []
        rng.address = f"127.1.{number // 250}.{number % 250 + 1}"
        while time.time() < self.stop and not self.wrong:
            x = rng.random()
            try:
                if x < 0.55:
                    self.finished(rng)
                elif x < 0.85:
                    self.aborted(rng)
                elif x < 0.90:
                    self.finished(rng, slow=0.001)
                elif x < 0.95:
                    self.half_open(rng, keep)
                else:
                    self.malformed(rng)
            except (ConnectionResetError, BrokenPipeError):
                pass  # a malformed request may be cut off; a finished one would have failed its assert
            except Exception as e:
                with self.lock:
                    self.wrong.append(repr(e))
        for c in keep:
            c.close()

    def run(self):
        self.stop = time.time() + self.args.seconds
        threads = [threading.Thread(target=self.client, args=(i,)) for i in range(self.args.clients)]
        for t in threads:
            t.start()
        rss, start = [], time.time()
        while any(t.is_alive() for t in threads):
            time.sleep(min(1, self.args.seconds / 10))
            rss.append((time.time() - start, self.s.rss_kb()))
        for t in threads:
            t.join()
        return rss


def percentile(values, p):
    values = sorted(values)
    return values[min(len(values) - 1, int(len(values) * p))] * 1e3 if values else float("nan")


def compare(s, load, args):
    """The load alone, then beside hostile clients."""
    idle(s)
    alone, small = load.first, s.rss_kb()
    load.first = []
    with multiprocessing.get_context("fork").Manager() as m:
        counts = m.dict()
        guests = multiprocessing.get_context("fork").Process(target=hostile.main, args=(s.port, args.hostile, args.seconds, args.seed, counts))
        guests.start()
        load.run()
        guests.join()
        print("hostile:", ", ".join(f"{v} {k}" for k, v in sorted(counts.items())))
    idle(s)
    time.sleep(3)
    end = s.rss_kb()
    p99 = percentile(load.first, 0.99) / percentile(alone, 0.99)
    for what, v in (("alone", alone), ("beside hostile clients", load.first)):
        print(f"first token {what}: p50 {percentile(v, 0.5):.1f} ms, p99 {percentile(v, 0.99):.1f} ms, of {len(v)}")
    print(f"p99 is {p99:.2f} times as long; memory {small} kB before them, {end} kB after")
    if args.seconds >= 20 and not args.sanitized:
        assert end < small * 1.1 + 2048, "memory did not come back"


def idle(s):
    s.wait_metric("steel_requests_running", 0)
    s.wait_metric("steel_requests_waiting", 0)
    s.wait_metric('steel_kv_pages{state="held"}', 0)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("build")
    p.add_argument("--clients", type=int, default=64)
    p.add_argument("--seconds", type=float, default=120)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--seqs", type=int, default=16)
    p.add_argument("--kv-tokens", type=int, default=2400)
    p.add_argument("--sanitized", action="store_true", help="memory may grow: freed blocks are kept aside")
    p.add_argument("--hostile", type=int, default=0, metavar="N", help="afterwards the same beside N hostile clients")
    p.add_argument("--model", help="a GGUF with a vocabulary (default: the tests' toy)")
    p.add_argument("--ranks", type=int, default=1)
    p.add_argument("--flags", default="", help="more of serve's, as one argument")
    args = p.parse_args()
    flags = ["-np", str(args.seqs), "-c", "1024", "--kv-tokens", str(args.kv_tokens), "--max-queue", "64", "--read-timeout", "2"]
    alone = Server(args.build, *flags, model=args.model)
    s = Ranks(args.build, args.ranks, *flags, *args.flags.split(), model=args.model) if args.ranks > 1 else alone
    load = Load(s, args, alone)
    if s is not alone:
        alone.stop()
    rss = load.run()
    if args.hostile:
        compare(s, load, args)
    idle(s)
    m = s.metrics()
    print(f"{args.clients} clients, {args.ranks} rank{'s' if args.ranks > 1 else ''}:", ", ".join(f"{v} {k}" for k, v in load.count.items()))
    print(f"{m['steel_generation_tokens_total']:.0f} tokens, {m['steel_preemptions_total']:.0f} preemptions, "
          f"{m['steel_cancellations_total']:.0f} cancellations, {m['steel_prefix_cache_hits_total']:.0f} cached of "
          f"{m['steel_prefix_cache_queries_total']:.0f} prompt tokens")
    done = [l for l in s.log().splitlines() if " completions " in l and " status=200 " in l]
    print(f"answers that finished: {len(done)}, of them preempted {sum(' preempted=0 ' not in l for l in done)}, "
          f"with a cached beginning {sum(' cached=0 ' not in l for l in done)}")
    half = [kb for t, kb in rss if t > args.seconds / 2] or [rss[-1][1]]
    print("RSS in kB, by tenths of the time:", *[rss[i * (len(rss) - 1) // 10][1] for i in range(11)])
    assert not load.wrong, load.wrong[:3]
    assert load.count["equal"] > 0 and m["steel_preemptions_total"] > 0 and m["steel_prefix_cache_hits_total"] > 0
    assert m["steel_cancellations_total"] > 0
    if args.seconds >= 20 and not args.sanitized:  # long enough to have reached its working size
        assert rss[-1][1] < half[0] * 1.05 + 2048, "memory grows"
    rc = s.stop()
    assert rc == 0, s.log()[-3000:]


if __name__ == "__main__":
    main()
