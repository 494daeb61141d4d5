#!/usr/bin/env python3
"""Steel and llama.cpp side by side on one GPU, in one run: interleaved, standard library only.

  compare_gpu.py --steel build/steel [--before OLD_STEEL] --llama LLAMA_BIN_DIR --moe moe.gguf --dense dense.gguf
                 --serve [--rounds 2] [--seconds 240] [--name H200] -o results.jsonl

The models: bench/synth_gguf.py moe.gguf --shape qwen3-30b-a3b, then bench/add_vocab.py (a server wants text), and
--shape llama-3.1-8b: real shapes, random weights; or any other GGUF files of those kinds.

Every round runs each group of tests with each engine, in an order that changes from round to round. llama.cpp has its best settings: all
layers on the GPU, flash attention, micro-batches of 2,048. Each program warms itself up, except llama-batched-bench, whose first line is not
counted. In batched decoding every sequence follows a prompt of 256 tokens of its own.

--serve adds `steel serve` under load (Steel only). The same work is first done without HTTP by `steel bench --pg`, which computes all prompts and
then generates all outputs. --before names an older build of Steel, measured in the same rounds; a table at the end shows both, and whether the
hashes of the logits are equal. An engine or a model that is not given is left out. Writes JSON lines while it runs; bench/report.py makes tables
and pictures of them. --quick: short tests, to see that everything works.
"""
import argparse, json, os, socket, statistics, subprocess, sys, time, urllib.request

from compare import Record

BATCHES = [4, 16, 32, 64, 128]
CLIENTS = [32, 128]
PROMPT, ANSWER, DEPTH = 256, 128, 8192
BEFORE = "Steel before"


class Compare(Record):
    def __init__(self, args):
        super().__init__(args)
        self.gpu = None

    def say(self, what):
        print(f"{time.monotonic() - self.start:6.1f} s  {what}", file=sys.stderr, flush=True)

    def command(self, cmd):
        """The JSON lines of a command, and its wall time; a failure is printed and returns nothing."""
        t0 = time.monotonic()
        try:
            r = subprocess.run(cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
        except OSError as e:
            print(f"{cmd[0]}: {e.strerror}", file=sys.stderr, flush=True)
            return [], 0
        wall = time.monotonic() - t0
        if r.returncode:
            print(f"failed ({r.returncode}): {' '.join(cmd)}\n{r.stderr[-800:]}", file=sys.stderr, flush=True)
            return [], wall
        return [json.loads(l) for l in r.stdout.splitlines() if l.startswith("{")], wall

    # Steel

    def steel(self, path, *flags, exe=None):
        dev = ["--device", self.args.device] if self.args.device else []
        rows, wall = self.command([exe or self.args.steel, "bench", path, "-r", "1", "--json", "--skip-cost", *dev,
                                   *map(str, flags)])
        if rows and not self.gpu:
            self.gpu = rows[0]
            self.put(kind="machine", name=self.args.name or rows[0].get("gpu", "no GPU"), gpu=rows[0].get("gpu"),
                     driver=rows[0].get("gpu_driver"), sms=rows[0].get("gpu_sms"), sm_mhz=rows[0].get("gpu_sm_mhz"),
                     memory_mhz=rows[0].get("gpu_memory_mhz"), date=time.strftime("%Y-%m-%d"))
            if rows[0].get("gpu_read_gb_s"):
                self.put(kind="ceiling", name="memory read", unit="GB/s", value=rows[0]["gpu_read_gb_s"])
            if self.args.tflops:
                self.put(kind="ceiling", name="tensor cores, large bf16 products", unit="GFLOP/s",
                         value=1e3 * self.args.tflops, measured=False)
        keep = ("bytes_per_token", "kv_bytes_per_token", "ops_per_token", "logits_hash", "load_s", "gpu_sm_mhz",
                "percent_of_limit")
        return [(r["test"], r["tok_s"], {k: r[k] for k in keep if k in r}) for r in rows], wall

    # llama.cpp

    def llama(self, exe, path, *flags):
        exe = os.path.join(self.args.llama, exe)
        return self.command([exe, "-m", path, "-ngl", "99", "-ub", "2048", "-b", "2048", *map(str, flags)])

    def llama_bench(self, path, prompt, gen, depths):
        rows, wall = self.llama("llama-bench", path, "-fa", "1", "-p", prompt, "-n", gen, "-d", depths, "-r", "1",
                                "-o", "jsonl")
        out = []
        for r in rows:
            test = f"pp{r['n_prompt']}" if r["n_prompt"] else f"tg{r['n_gen']}"
            out.append((test + (f" @{r['n_depth']}" if r.get("n_depth") else ""), r["avg_ts"], {}))
        return out, wall

    def llama_batched(self, path, gen, batches):
        most = max(batches)
        npl = ",".join(map(str, [batches[0]] + batches))
        rows, wall = self.llama("llama-batched-bench", path, "-fa", "on", "-npp", PROMPT, "-ntg", gen, "-npl", npl,
                                "-c", most * (PROMPT + gen), "--output-format", "jsonl")
        out = []
        for r in rows[1:]:
            out.append((f"tg{r['tg']} x{r['pl']} @{r['pp']}", r["speed_tg"], {}))
            out.append((f"pp{r['pp']}+tg{r['tg']} x{r['pl']}", r["pl"] * r["tg"] / r["t"], {}))
        return out, wall

    # Groups of tests

    def both(self, number, model, steel, llama):
        """steel: flags of `steel bench`, the model first; llama: a function."""
        runs = [("Steel", lambda: self.steel(*steel))] if self.args.steel else []
        runs += [(BEFORE, lambda: self.steel(*steel, exe=self.args.before))] if self.args.before else []
        runs += [("llama.cpp", llama)] if self.args.llama else []
        for engine, run in runs if number % 2 == 0 else runs[::-1]:
            if self.spent():
                return
            rows, wall = run()
            for test, rate, extra in rows:
                self.put(kind="run", round=number, engine=engine, model=model, test=test, tok_s=round(rate, 3), **extra)
            self.say(f"{engine}: " + ", ".join(f"{t} {rate:,.0f}" for t, rate, _ in rows) + f"  ({wall:.0f} s)")

    def rounds(self, number):
        a = self.args
        batches, depth = ([1, 2], 32) if a.quick else (BATCHES, DEPTH)
        prompt, gen = (64, 8) if a.quick else (2048, ANSWER)
        if a.moe:
            name = model_name(a.moe)
            self.both(number, name, (a.moe, "-p", prompt, "-n", gen, "-d", f"0,{depth}"),
                      lambda: self.llama_bench(a.moe, prompt, gen, f"0,{depth}"))
            if number < a.batch_rounds:
                self.both(number, name, (a.moe, "-p", 0, "-n", gen, "-d", PROMPT, "--batch",
                                         ",".join(map(str, batches))),
                          lambda: self.llama_batched(a.moe, gen, batches))
        if a.dense:
            self.both(number, model_name(a.dense), (a.dense, "-p", prompt, "-n", gen),
                      lambda: self.llama_bench(a.dense, prompt, gen, "0"))
        if a.moe:
            self.starts(number)

    def profile(self):
        """The time of each op of a step; events between ops prevent overlap."""
        a = self.args
        for path, batches in ((a.moe, "1,2" if a.quick else "1,32,128"), (a.dense, "1")):
            if not path or not a.steel or self.spent():
                continue
            dev = ["--device", a.device] if a.device else []
            rows, _ = self.command([a.steel, "bench", path, "-r", "1", "--json", "--skip-cost", "--profile", *dev, "-p",
                                    "64" if a.quick else "2048", "-n", "8" if a.quick else "32", "--batch", batches,
                                    "-d", "0" if a.quick else str(PROMPT)])
            for r in rows:
                self.put(kind="profile", model=model_name(path), test=r["test"], stages=r["stages"])

    def starts(self, number):
        """From the start of the program until it has computed one token and ended."""
        a = self.args
        for engine in ("Steel", "llama.cpp") if number % 2 == 0 else ("llama.cpp", "Steel"):
            if self.spent() or not (a.steel if engine == "Steel" else a.llama):
                continue
            if engine == "Steel":
                rows, wall = self.steel(a.moe, "-p", 1, "-n", 0, "--no-warmup")
            else:
                rows, wall = self.llama("llama-bench", a.moe, "-fa", "1", "-p", 1, "-n", 0, "-r", 1, "--no-warmup",
                                        "-o", "jsonl")
            if rows:
                extra = {"load_s": rows[0][2]["load_s"]} if engine == "Steel" else {}
                self.put(kind="start", round=number, engine=engine, model=model_name(a.moe), memory="GPU",
                         seconds=round(wall, 3), **extra)
                self.say(f"{engine}: started and ended in {wall:.1f} s")

    def serve(self):
        """The raw figure and the server's, on the same work: `clients` prompts of 256 tokens, 128 out each."""
        a = self.args
        clients = [1, 2] if a.quick else CLIENTS
        answer = 8 if a.quick else ANSWER
        rows, _ = self.steel(a.moe, "-p", 0, "-n", 0, "--pg", f"{PROMPT},{answer}", "--batch",
                             ",".join(map(str, clients)))
        raw = {}
        for test, rate, extra in rows:
            raw[int(test.split("x")[-1]) if "x" in test else 1] = rate
            self.put(kind="run", round=0, engine="Steel", model=model_name(a.moe), test=test, tok_s=round(rate, 3), **extra)
        port = free_port()
        cmd = [a.steel, "serve", a.moe, "--port", str(port), "-c", "1024", "-np", str(max(clients)), "--log-level", "warn"]
        server = subprocess.Popen(cmd + (["--device", a.device] if a.device else []))
        try:
            if not wait_ready(server, port):
                return
            # Greedy, then sampled: greedy outputs of random weights fall into loops.
            runs = [(n, t) for t in (0, 1) for n in clients] * a.serve_rounds
            for i, (n, temperature) in enumerate(runs):
                if self.spent():
                    break
                load, _ = self.command([a.steel, "bench", "serve", "--url", f"http://127.0.0.1:{port}", "--concurrency",
                                        str(n), "--num-prompts", str(n * a.waves), "--input-len", str(PROMPT),
                                        "--output-len", str(answer), "--seed", str(100 + i), "--temperature",
                                        str(temperature), "--json"])
                for r in load:
                    self.put(kind="serve", round=i // (2 * len(clients)), model=model_name(a.moe), clients=n,
                             temperature=temperature,
                             tok_s=r["output_tokens_per_second"], raw_tok_s=round(raw.get(n, 0), 3), ok=r["ok"],
                             errors=r["errors"], input_tokens=r["input_tokens"], output_tokens=r["output_tokens"],
                             ttft_ms=r["ttft_ms"], itl_ms=r["itl_ms"])
                    self.say(f"serve, {n} clients, temperature {temperature}: {r['output_tokens_per_second']:,.0f} tok/s, raw {raw.get(n, 0):,.0f}")
        finally:
            server.terminate()
            server.wait()


def before_after(lines):
    """One line per test that both builds ran: medians, their ratio, and whether the logits are equal."""
    runs = {}
    for r in lines:
        if r["kind"] == "run" and r["engine"] in ("Steel", BEFORE):
            runs.setdefault((r["model"], r["test"]), {}).setdefault(r["engine"], []).append(r)
    out = []
    for (model, test), by in runs.items():
        if len(by) == 2:
            old, new = (statistics.median(r["tok_s"] for r in by[e]) for e in (BEFORE, "Steel"))
            same = {r.get("logits_hash") for rs in by.values() for r in rs}
            out.append(f"{model:28} {test:18} {old:10,.0f} {new:10,.0f} {100 * (new / old - 1):+6.1f} %  "
                       + ("same logits" if len(same) == 1 else "other logits"))
    return "\n".join(out)


def model_name(path):
    return os.path.splitext(os.path.basename(path))[0]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_ready(server, port):
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").read()
            return True
        except OSError:
            time.sleep(0.1)
    print("the server ended", file=sys.stderr)
    return False


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steel", help="path of steel")
    p.add_argument("--before", help="path of an older steel to compare with")
    p.add_argument("--llama", help="folder of llama-bench and llama-batched-bench")
    p.add_argument("--moe", help="a mixture-of-experts model")
    p.add_argument("--dense", help="a dense model")
    p.add_argument("--serve", action="store_true", help="also measure steel serve (needs a vocabulary in --moe)")
    p.add_argument("--device", default="", help="for Steel (default: its own choice)")
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--batch-rounds", type=int, default=2, help="rounds of the batched tests, which take longest (default 2)")
    p.add_argument("--serve-rounds", type=int, default=2, help="of each number of clients (default 2)")
    p.add_argument("--waves", type=int, default=4, help="requests of each client (default 4)")
    p.add_argument("--seconds", type=float, default=0, help="begin nothing new after this many (default: no limit)")
    p.add_argument("--tflops", type=float, default=790, help="what large bf16 products reach; the limit of prompts (default 790)")
    p.add_argument("--name", default="", help="what the report calls this machine")
    p.add_argument("--quick", action="store_true", help="short tests")
    p.add_argument("-o", "--output", default="results.jsonl")
    args = p.parse_args()
    if not (args.moe or args.dense) or not (args.steel or args.llama):
        p.error("nothing to compare: give --moe or --dense, and --steel or --llama")
    c = Compare(args)
    for i in range(args.rounds):
        c.rounds(i)
        if i == 0:  # a run cut short still has one figure of everything
            if args.serve and args.moe and args.steel:
                c.serve()
            c.profile()
    c.say("end")
    import report
    print(report.text([r for r in c.lines if r.get("engine") != BEFORE]))
    print(before_after(c.lines))


if __name__ == "__main__":
    main()
