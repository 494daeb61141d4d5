#!/usr/bin/env python3
"""Several ranks with simulated GPUs (make test-sim): golden families with tensor parallel (--tp), expert parallel (--ep) and pipeline
parallel (--pp) weights, and mixtures, match one process on the same GPU, as prompts and as decodes.
`ranks_sim.py BUILD DEVICE STEEL` does the same with another program and on a real GPU (DEVICE cuda, STEEL build/steel).
MPIRUN: the launcher. RANKS_FAMILIES=name,... and RANKS_ALL=1: as in test_ranks.py. RANKS_ONLY=text: only arrangements whose name
contains the text."""
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from gguf_tools import mean_kl, read_logits  # noqa: E402

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
DEVICE = sys.argv[2] if len(sys.argv) > 2 else "cuda"
STEEL = sys.argv[3] if len(sys.argv) > 3 else os.path.join(BUILD, "sim", "steel")
GOLDEN = "tests/golden"
MPIRUN = os.environ.get("MPIRUN", "mpirun --allow-run-as-root --oversubscribe --bind-to none").split()
# Each family runs one of these in turn; with RANKS_ALL=1 all of them.
ARRANGEMENTS = {
    "tp 2": (2, []),
    "ep 2": (2, ["--ep"]),
    "pp 2": (2, ["--pp", "2"]),
    "tp 4": (4, []),
    "ep 3": (3, ["--ep"]),
    "tp 2, decodes": (2, ["--chunk", "1"]),
    "tp 2 pp 2": (4, ["--tp", "2", "--pp", "2"]),
    # one GPU per rank, with fakenccl as libnccl.so.2
    "nccl 1": (1, ["--chunk", "1"]),
    "nccl 2": (2, []),
    "nccl 4, decodes": (4, ["--chunk", "1"]),
    "nccl 2 pp 2": (4, ["--tp", "2", "--pp", "2"]),
    "nccl ep 3, decodes": (3, ["--ep", "--chunk", "1"]),
    "nccl ep 4": (4, ["--ep"]),
}
# The order of one process's rounding error: products have fp16 inputs.
LIMIT = 2e-4


def families():
    named = os.environ.get("RANKS_FAMILIES")
    return named.split(",") if named else ["qwen3moe", "gpt_oss", "qwen3_5_moe", "deepseek_v3", "gemma4", "glm4_moe", "phi3",
                                           "gemma4_moe", "minimax_m2", "mixtral", "qwen3", "qwen3moe-lora"]


def logits(model, ranks, args, nccl=False):
    env = dict(os.environ, STEEL_CONFIG="")
    if nccl:
        env.update(SIM_GPUS=str(ranks), STEEL_NCCL="1", LD_LIBRARY_PATH=os.path.abspath(os.path.dirname(STEEL)))
    with tempfile.NamedTemporaryFile() as out:
        base = model.removesuffix("-lora")
        adapter = ["--lora", f"{GOLDEN}/{model}"] if base != model else []
        cmd = [STEEL, "logits", f"{GOLDEN}/{base}", "--device", DEVICE, "-t", "1", "--kv-type", "f32",
               "--ids", f"{GOLDEN}/{model}/golden.bin", "--out", out.name, *adapter, *args]
        r = subprocess.run([*MPIRUN, "-n", str(ranks), *cmd] if ranks > 1 else cmd, env=env, capture_output=True, text=True, timeout=600)
        return (read_logits(out.name) if r.returncode == 0 else None), r.stderr


def mixed():
    """Rank 0 has a GPU, rank 1 has none: must be refused, in one line that names both. Returns True if it is."""
    cmd = [STEEL, "logits", f"{GOLDEN}/qwen3", "--device", DEVICE, "--ids", f"{GOLDEN}/qwen3/golden.bin", "--out", os.devnull]
    r = subprocess.run([*MPIRUN, "-n", "1", *cmd, ":", "-n", "1", "env", "SIM_GPUS=0", "CUDA_VISIBLE_DEVICES=", *cmd], env=dict(os.environ, STEEL_CONFIG=""),
                       capture_output=True, text=True, timeout=600)
    lines = [line for line in r.stderr.splitlines() if line.startswith("steel: ")]
    ok = r.returncode != 0 and len(lines) == 1 and "rank 1: the devices differ: rank 0 has a GPU, this one none" in lines[0]
    print("a rank without a GPU: " + ("refused" if ok else "FAILED: " + r.stderr[-400:]))
    return ok


def without_nccl():
    """Two GPUs and an NCCL that cannot be loaded: rank 0 must warn once that reductions are slow. Returns True if it does."""
    with tempfile.TemporaryDirectory() as empty:
        open(os.path.join(empty, "libnccl.so.2"), "w").close()
        cmd = [STEEL, "logits", f"{GOLDEN}/qwen3", "--device", DEVICE, "--ids", f"{GOLDEN}/qwen3/golden.bin", "--out", os.devnull]
        r = subprocess.run([*MPIRUN, "-n", "2", *cmd], env=dict(os.environ, STEEL_CONFIG="", SIM_GPUS="2", LD_LIBRARY_PATH=empty),
                           capture_output=True, text=True, timeout=600)
    ok = r.returncode == 0 and r.stderr.count("libnccl.so.2: ") == 1 and r.stderr.count("add up through the host") == 1
    print("GPUs without NCCL: " + ("told" if ok else "FAILED: " + r.stderr[-400:]))
    return ok


def main():
    if subprocess.run([*MPIRUN, "-n", "2", "true"], capture_output=True).returncode != 0:
        print("skipped: ranks with a GPU: mpirun starts nothing here")
        return 0
    failed = int(not mixed())
    if STEEL.endswith("sim/steel"):  # a real machine may have only one GPU
        failed += not without_nccl()
    names = [name for name in ARRANGEMENTS if os.environ.get("RANKS_ONLY", "") in name]
    for i, model in enumerate(families()):
        golden = read_logits(f"{GOLDEN}/{model}/golden.bin")
        for name in names if os.environ.get("RANKS_ALL") else [names[i % len(names)]]:
            ranks, args = ARRANGEMENTS[name]
            ours, said = logits(model, ranks, args, name.startswith("nccl"))
            if ours is None:
                cannot = "which another stage has" in said
                print(f"{model:14} {name:18} {'cannot be cut so' if cannot else 'FAILED: ' + said.strip()[-400:]}", flush=True)
                failed += not cannot
                continue
            if name.startswith("nccl") and said.count("fakenccl") != ranks:
                print(f"{model:14} {name:18} FAILED: {ranks} ranks, of NCCL {said.count('fakenccl')}")
                failed += 1
            kl = mean_kl(golden, ours)
            line = f"{model:14} {name:18} KL {kl:.1e}"
            if kl > LIMIT:  # allowed if one process alone is as far off
                alone = mean_kl(golden, logits(model, 1, [a for a in args if a == "--chunk" or a.isdigit() and "--chunk" in args])[0])
                line += f" (alone {alone:.1e})"
                if kl > 2 * alone:
                    failed += 1
                    line += " FAILED"
            print(line, flush=True)
    print(f"ranks with a GPU: {failed} failed")
    return 1 if failed else 0


sys.exit(main())
