#!/usr/bin/env python3
"""CUDA calls that fail, in the simulator (tests/gpu/cudasim.h): call k of each kind (allocation, pinned memory, launch, copy,
synchronisation, event, graph, device query), or every call from k on, as on a lost device. k is walked through a run and through a
server's requests: prompts, decodes, states, draft tokens, adapters. A run ends with its whole text, or with code 1 and one line. A
request gets its whole answer or an error in words; /health says 503 once the engine is gone; what fails for lack of memory alone does
not hurt the next request. NCCL's calls fail likewise on one of two ranks. LeakSanitizer is preloaded where it is installed.
usage: test_cuda_faults.py BUILD [all]: without "all" a sample of each walk. `make test-all` builds the simulator and runs this."""
import json, os, random, shutil, signal, struct, subprocess, sys, tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import mtp_toy
from gguf_tools import write_gguf
from faultlib import TEXT, Faults, Tally, ask, cases, walk_run, walk_server
from serverlib import HANG, Server

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
ALL = len(sys.argv) > 2
STEEL = os.path.join(BUILD, "sim/steel")
KINDS = ["alloc", "host", "launch", "copy", "sync", "event", "graph", "device", "nccl", "any"]
WORK = tempfile.mkdtemp(prefix="steel-cuda-faults-")
MPIRUN = os.environ.get("MPIRUN", "mpirun --allow-run-as-root --oversubscribe --bind-to none").split()


def adapter(path, seed):
    draw = random.Random(seed)
    floats = lambda n: b"".join(struct.pack("<f", draw.uniform(-0.6, 0.6)) for _ in range(n))
    tensors = []
    for layer in range(2):
        for name, n_out in (("attn_q", 64), ("attn_v", 32)):
            w = f"blk.{layer}.{name}.weight"
            tensors += [(w + ".lora_a", [64, 8], 0, floats(512)), (w + ".lora_b", [8, n_out], 0, floats(8 * n_out))]
    write_gguf(path, {"general.type": "adapter", "adapter.type": "lora", "general.architecture": "qwen3moe", "adapter.lora.alpha": 8.0}, tensors)
    return path


def walk_adapters(faults, model):
    """Loading one fails: it says so, the engine lives, and the next try succeeds."""
    path = adapter(os.path.join(WORK, "a.gguf"), 3)
    faults.arm("any", 0)
    s = Server(BUILD, "--alias", "toy", "--allow-lora-loading", "--max-lora-rank", "8", model=model, env=faults.env, steel=STEEL)
    load = lambda: s.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path})
    drop = lambda: s.json("/v1/unload_lora_adapter", {"lora_name": "x"})
    body = dict(TEXT, model="x")
    faults.arm("any", 0)
    assert load()[0] == 200, s.log()
    counts = faults.counts()
    good = ask(s, body, False)
    plain = ask(s, TEXT, False)
    assert good != plain
    drop()
    tally = Tally()
    for kind, k, _ in cases(faults, counts, 8, ["alloc", "copy", "sync", "event"]):
        faults.arm(kind, k)
        status, _, text = load()
        hit = faults.disarm()
        where = f"adapter: {kind} {k} failed ({hit}): {status} {text}\n"
        assert hit and status >= 400 and json.loads(text)["error"]["message"], where + s.log()
        s.wait_line("bytes for a LoRA adapter")
        assert s.get("/health")[0] == 200 and ask(s, TEXT, False) == plain, where + s.log()
        assert load()[0] == 200 and ask(s, body, False) == good, where + s.log()
        drop()
        tally.add(kind, status)
    s.proc.send_signal(signal.SIGTERM)
    assert s.proc.wait(HANG) == 0, s.log()
    tally.show("adapters")


def walk_nccl(faults, most):
    """One of two ranks meets the fault: the job ends with words, and never with other logits."""
    if subprocess.run([*MPIRUN, "-n", "2", "true"], capture_output=True).returncode != 0:
        print("skipped: NCCL's faults: mpirun starts nothing here")
        return
    out = os.path.join(WORK, "logits")
    model = "tests/golden/qwen3"
    cmd = [STEEL, "logits", model, "--ids", f"{model}/golden.bin", "--out", out, "--device", "cuda", "-t", "1", "--chunk", "16", "--kv-type", "f32"]
    env = dict(faults.env, SIM_GPUS="2", STEEL_NCCL="1", LD_LIBRARY_PATH=os.path.abspath(os.path.join(BUILD, "sim")))
    env.pop("SIM_FAULTS")
    env.pop("LD_PRELOAD", None)  # MPI itself leaks

    def run(victim):
        each = [["-n", "1", "env", *([f"SIM_FAULTS={faults.path}"] if r == victim else []), *cmd] for r in range(2)]
        p = subprocess.run([*MPIRUN, *each[0], ":", *each[1]], env=env, capture_output=True, timeout=HANG)
        return p.returncode, p.stderr.decode(errors="replace")

    tally = Tally()
    for victim in (0, 1):
        faults.arm("any", 0)
        code, err = run(victim)
        assert code == 0 and err.count("fakenccl") == 2, err
        good = open(out, "rb").read()
        for kind, k, lost in cases(faults, faults.counts(), most, ["nccl", "launch", "sync", "any"]):
            faults.arm(kind, k, lost)
            code, err = run(victim)
            hit = faults.disarm()
            where = f"nccl: rank {victim}: {kind} {k} failed ({hit}): exit {code}\n{err}"
            lines = [l for l in err.splitlines() if l.startswith("steel: ")]
            assert code == 0 or lines, where
            assert code != 0 or open(out, "rb").read() == good, where
            tally.add(kind, "error" if code else "the same" if hit else "not reached")
    tally.show("two ranks")


def main():
    if not os.environ.get("SIM_TESTS") and not ALL:
        print("skipped: CUDA calls that fail: only `make test-all` builds the simulator")
        sys.exit(77)
    os.environ["STEEL_TEST_DEVICE"] = "cuda"
    faults = Faults(BUILD, STEEL, "cuda", KINDS, os.path.join(WORK, "faults"), "SIM_FAULTS", ALL)
    toy, hybrid, drafts = (os.path.join(WORK, n) for n in ("toy.gguf", "hybrid.gguf", "drafts"))
    subprocess.run([os.path.join(BUILD, "tests/toy_gguf"), toy], check=True)
    subprocess.run([os.path.join(BUILD, "tests/toy_gguf"), hybrid, "hybrid"], check=True)
    mtp_toy.main("tests/golden/qwen3_5_moe", drafts, 1)
    scored = dict(TEXT, echo=True, logprobs=2, max_tokens=2)
    walk_run(faults, "run", ["run", hybrid, "-p", "Once", "-n", "4", "--temp", "0"], 6)
    walk_run(faults, "run with an adapter", ["run", toy, "-p", "Once", "-n", "3", "--temp", "0", "--lora", adapter(os.path.join(WORK, "b.gguf"), 4)], 3)
    walk_adapters(faults, toy)
    walk_server(faults, "states", [], hybrid, [(TEXT, False), (dict(TEXT, prompt="A longer one. " * 12), True)], 4)
    walk_server(faults, "log-probabilities", [], toy, [(dict(TEXT, n=2), False), (scored, False)], 4)
    walk_server(faults, "draft tokens", ["--draft", "2"], drafts, [(TEXT, False), (dict(TEXT, temperature=1, repeat_penalty=1.2, seed=3), True)], 4)
    walk_server(faults, "experts on the host", ["--draft", "2", "--cpu-moe"], drafts, [(TEXT, False), (dict(TEXT, prompt="A longer one. " * 12), True)], 4)
    walk_nccl(faults, 4)
    shutil.rmtree(WORK)


main()
