#!/usr/bin/env python3
"""Steel and llama.cpp side by side on this machine: one command, interleaved, standard library only.

  compare.py --steel build/steel --kernel build/bench/kernel --llama LLAMA_BIN_DIR
             --moe moe6.gguf --dense dense8.gguf [-t 2] [--rounds 5] [--seconds N] -o results.jsonl

Every round runs each test once with each engine, in an order that changes from round to round. Each program warms itself
up. A run during which other programs (or the hypervisor) took more than --disturbed percent of the CPUs is repeated; with
--strict it never counts. An engine or a model that is not given is left out. Writes JSON lines while it runs: the machine, its
measured ceilings, then every figure. Prints medians at the end. bench/report.py makes tables and pictures of them.

The models: bench/synth_gguf.py moe6.gguf --shape qwen3-30b-a3b --layers 6;  dense8.gguf --shape qwen3-4b --layers 8
(real shapes, random weights), or any other GGUF files of those kinds.
"""
import argparse, json, mmap, os, re, shlex, subprocess, sys, time

PROMPTS = {"moe": "512,128", "dense": "512"}
BATCHES = {"moe": "4,16", "dense": ""}


class Record:
    """Writes JSON lines at once, and knows the time limit."""

    def __init__(self, args):
        self.args, self.start = args, time.monotonic()
        self.out = open(args.output, "w")
        self.lines = []

    def put(self, **record):
        self.lines.append(record)
        self.out.write(json.dumps(record) + "\n")
        self.out.flush()

    def spent(self):
        return self.args.seconds and time.monotonic() - self.start > self.args.seconds


class Bench(Record):
    def __init__(self, args):
        super().__init__(args)
        self.prefix = shlex.split(args.prefix)

    def command(self, cmd):
        """Stdout of a command and its wall time; a failure is printed and returns nothing."""
        t0 = time.monotonic()
        busy, own = machine_busy(), children_busy()
        r = subprocess.run(self.prefix + cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        wall = time.monotonic() - t0
        others = machine_busy() - busy - (children_busy() - own)
        self.others = max(0, others) / (wall * os.cpu_count())
        if r.returncode:
            print(f"failed ({r.returncode}): {' '.join(cmd)}\n{r.stderr[-500:]}", file=sys.stderr)
            return "", wall
        return r.stdout, wall

    def json_lines(self, cmd):
        text, _ = self.command(cmd)
        return [json.loads(re.sub(r"-?nan\b", "null", l)) for l in text.splitlines() if l.startswith("{")]

    def undisturbed(self, run):
        """The result of run() without disturbance; after some tries the last one, or nothing."""
        for _ in range(self.args.tries):
            self.others = 0
            out = run()
            if self.others <= self.args.disturbed / 100:
                return out
            print(f"other programs took {100 * self.others:.0f} % of the machine", file=sys.stderr)
            if self.spent():
                break
        return [] if self.args.strict else out

    def llama(self, name):
        path = os.path.join(self.args.llama, name) if self.args.llama else ""
        return path if os.path.exists(path) else None

    def machine(self):
        cpu = "unknown"
        with open("/proc/cpuinfo") as f:
            names = [l.split(":", 1)[1].strip() for l in f if l.startswith("model name")]
            cpu = names[0] if names else cpu
        self.put(kind="machine", cpu=cpu, cpus=len(os.sched_getaffinity(0)), threads=self.args.threads,
                 date=time.strftime("%Y-%m-%d"), name=self.args.name)

    def ceilings(self):
        if not self.args.kernel:
            return
        text, _ = self.command([self.args.kernel, "ceilings", "-t", str(self.args.threads)])
        for line in text.splitlines():
            m = re.match(r"(.+?)\s{2,}([\d.\s]+?)\s+(G\S+/s)$", line)
            if m:
                self.put(kind="ceiling", name=m[1], unit=m[3], value=max(float(v) for v in m[2].split()))

    # One figure each: a list of (test, tokens per second, extra fields)

    def steel_run(self, path, prompts, gen, batches):
        cmd = [self.args.steel, "bench", path, "-t", str(self.args.threads), "-r", "1", "--json", "--skip-cost"]
        rows = self.json_lines(cmd + ["-p", prompts or "0", "-n", gen or "0", "--batch", batches or "1"])
        return [(r["test"], r["tok_s"], {k: r[k] for k in ("bytes_per_token", "ops_per_token", "logits_hash")})
                for r in rows]

    def llama_run(self, path, prompts, gen, batches):
        t = ["-t", str(self.args.threads)]
        if not batches:
            exe = self.llama("llama-bench")
            rows = self.json_lines([exe, "-m", path, *t, "-p", prompts or "0", "-n", gen or "0", "-r", "1", "-o",
                                    "jsonl"]) if exe else []
            return [(f"pp{r['n_prompt']}" if r["n_prompt"] else f"tg{r['n_gen']}", r["avg_ts"], {}) for r in rows]
        exe = self.llama("llama-batched-bench")
        if not exe:
            return []
        most = max(int(b) for b in batches.split(","))
        # It has no warm-up, so the largest batch runs once first and is not counted.
        rows = self.json_lines([exe, "-m", path, *t, "-tb", t[1], "-npp", "0", "-ntg", gen, "-npl",
                                f"{most},{batches}", "-c", str(most * int(gen) + 512), "--output-format", "jsonl"])
        return [(f"tg{r['tg']} x{r['pl']}", r["speed_tg"], {}) for r in rows[1:]]

    def runs(self, round_no, model, path, prompts, gen, batches):
        engines = [("Steel", self.steel_run)] if self.args.steel else []
        if self.args.llama:
            engines.append(("llama.cpp", self.llama_run))
        for engine, run in engines if round_no % 2 == 0 else engines[::-1]:
            rows = self.undisturbed(lambda: run(path, prompts, gen, batches))
            for test, rate, extra in rows:
                self.put(kind="run", round=round_no, engine=engine, model=model, test=test, tok_s=round(rate, 3),
                         **extra)

    # From the start of the program until it has computed one token and ended.

    def starts(self, round_no, model, path):
        t = str(self.args.threads)
        commands = []
        if self.args.steel:
            steel = [self.args.steel, "bench", path, "-t", t, "-p", "1", "-n", "0", "-r", "1", "--no-warmup", "--json",
                     "--skip-cost"]
            commands += [("Steel", steel), ("Steel --no-repack", steel + ["--no-repack"])]
        if self.llama("llama-bench"):
            commands.append(("llama.cpp", [self.llama("llama-bench"), "-m", path, "-t", t, "-p", "1", "-n", "0", "-r",
                                           "1", "--no-warmup", "-o", "jsonl"]))
        for memory in ("present", "as found"):
            for engine, cmd in commands:
                def run(cmd=cmd, memory=memory):
                    if memory == "present":
                        touch(os.path.getsize(path) * 5 // 4)
                    return self.command(cmd)

                text, wall = self.undisturbed(run) or ("", 0)
                if not text:
                    continue
                extra = {"load_s": json.loads(text.splitlines()[0])["load_s"]} if "Steel" in engine else {}
                self.put(kind="start", round=round_no, engine=engine, model=model, memory=memory,
                         seconds=round(wall, 3), **extra)


def machine_busy():
    """CPU seconds used on this machine since its start by all programs, including time stolen by the hypervisor."""
    with open("/proc/stat") as f:
        v = [int(x) for x in f.readline().split()[1:]]
    return (sum(v[:3]) + sum(v[5:8])) / os.sysconf("SC_CLK_TCK")


def children_busy():
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


def touch(size):
    """A virtual machine may have to ask its host for memory, which is slow: touches as much as a load needs and frees
    it, so that a load which follows at once finds it present."""
    m = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        m.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, size, 4096):
        m[at] = 1
    m.close()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steel", help="path of steel")
    p.add_argument("--kernel", help="path of bench/kernel, which measures the ceilings")
    p.add_argument("--llama", help="folder of llama-bench and llama-batched-bench")
    p.add_argument("--moe", help="a mixture-of-experts model")
    p.add_argument("--dense", help="a dense model")
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--first", type=int, default=0, help="number of the first round, where rounds are run one by one")
    p.add_argument("--seconds", type=float, default=0, help="begin nothing new after this many (default: no limit)")
    p.add_argument("--gen", default="128", help="tokens of a generation test (default 128)")
    p.add_argument("--batch-gen", default="32", help="tokens per sequence of the batched ones (default 32)")
    p.add_argument("--strict", action="store_true", help="count no disturbed run, even if none was better")
    p.add_argument("--disturbed", type=float, default=3, help="percent of the machine others may take (default 3)")
    p.add_argument("--tries", type=int, default=3, help="of a disturbed run (default 3)")
    p.add_argument("--tests", default="speed,batch,start", help="which (default speed,batch,start)")
    p.add_argument("--prefix", default="", help="put before every command, e.g. 'taskset -c 0,1'")
    p.add_argument("--name", default="", help="what the report calls this machine")
    p.add_argument("-o", "--output", default="results.jsonl")
    args = p.parse_args()
    models = [(os.path.splitext(os.path.basename(path))[0], path, kind)
              for kind, path in (("moe", args.moe), ("dense", args.dense)) if path]
    if not models or not (args.steel or args.llama):
        p.error("nothing to compare: give --moe or --dense, and --steel or --llama")
    b = Bench(args)
    b.machine()
    for i in range(args.first, args.first + args.rounds):
        if not b.spent():
            b.ceilings()
        for name, path, kind in models:
            for what, prompts, gen, batches in (("speed", PROMPTS[kind], args.gen, ""),
                                                ("batch", "", args.batch_gen, BATCHES[kind])):
                if what in args.tests.split(",") and (prompts or batches) and not b.spent():
                    b.runs(i, name, path, prompts, gen, batches)
        if "start" in args.tests.split(",") and not b.spent():
            b.starts(i, *models[0][:2])
        print(f"round {i + 1} of {args.first + args.rounds}: {time.monotonic() - b.start:.0f} s", file=sys.stderr)
    import report
    print(report.text(b.lines))


if __name__ == "__main__":
    main()
