#!/usr/bin/env python3
"""Whole experts on several processes (mpirun --ep): placed by how often they are used (--expert-stats), and with so many rows
that these go from rank to rank one by one, they compute what one process computes; the same bytes from run to run."""
import os
import random
import struct
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from gguf_tools import max_difference, mean_kl, read_logits, write_gguf  # noqa: E402
from ranklib import rank_logits, run_rank_tests  # noqa: E402

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
GOLDEN = "tests/golden"
WORK = tempfile.mkdtemp(prefix="steel-ranks-")
EXPERTS = {"qwen3moe": 6, "deepseek_v3": 16, "gpt_oss": 6, "glm4_moe": 8}
LONG = 400  # rows of a prompt, more than RANKS_GATHER_BYTES in every model here


def stats(model, n=None):
    """An importance matrix of which only the counts matter: the first experts do the work."""
    path, n = os.path.join(WORK, f"{model}-{n}.gguf"), n or EXPERTS[model]
    tensors = []
    for layer in range(4):
        name = f"blk.{layer}.ffn_gate_exps.weight"
        counts = [1000.0 / (i + 1) + layer for i in range(n)]
        tensors += [(name + ".in_sum2", [32, n], 0, struct.pack("<f", 1) * (32 * n)),
                    (name + ".counts", [1, n], 0, struct.pack(f"<{n}f", *counts))]
    write_gguf(path, {"general.type": "imatrix"}, tensors)
    return path


def ids():
    path = os.path.join(WORK, "ids.bin")
    rnd = random.Random(5)
    with open(path, "wb") as f:
        f.write(struct.pack(f"<ii{LONG}i", LONG, 144, *(rnd.randrange(144) for _ in range(LONG))))
        f.write(bytes(4 * LONG * 144))
    return path


def logits(model, ranks, *args, kernels=None, what=None, check=True):
    rows, r = rank_logits(BUILD, f"{GOLDEN}/{model}", ranks, [*args, *(["--ep"] if ranks > 1 else [])], ids=what, kernels=kernels, check=check)
    return rows if check else r


def test_by_load():
    """Experts that have changed places: within 1e-5 of one process."""
    for model, ranks in (("qwen3moe", 2), ("qwen3moe", 3), ("deepseek_v3", 2), ("gpt_oss", 2), ("glm4_moe", 3)):
        alone = logits(model, 1, kernels="ref")
        top = max(abs(x) for row in alone for x in row)
        ours = logits(model, ranks, "--expert-stats", stats(model), kernels="ref")
        diff = max_difference(ours, alone) / top
        kl = mean_kl(alone, logits(model, ranks, "--expert-stats", stats(model)))
        print(f"{model:12} {ranks} ranks: reference {diff:.1e}, default kernels KL {kl:.1e}")
        assert diff < 1e-5 and kl <= 2e-4, (model, ranks, diff, kl)


def test_adapters_move_along():
    lora = ["--lora", f"{GOLDEN}/qwen3moe-lora"]
    what = f"{GOLDEN}/qwen3moe-lora/golden.bin"
    golden = read_logits(what)
    kl = mean_kl(golden, logits("qwen3moe", 2, *lora, "--expert-stats", stats("qwen3moe"), what=what))
    assert kl <= 2e-4, kl


def test_many_rows():
    """Rows go only between ranks that have their experts; with --deterministic in the same bytes each time."""
    for model, ranks in (("qwen3moe", 2), ("qwen3moe", 3), ("deepseek_v3", 4)):
        alone = logits(model, 1, what=ids())
        for args in ([], ["--expert-stats", stats(model)]):
            kl = mean_kl(alone, logits(model, ranks, *args, what=ids()))
            print(f"{model:12} {ranks} ranks {' '.join(args[:1]):14} KL {kl:.1e}")
            assert kl <= 2e-4, (model, ranks, args, kl)
    args = ["--expert-stats", stats("qwen3moe"), "--deterministic"]
    assert logits("qwen3moe", 3, *args, what=ids()) == logits("qwen3moe", 3, *args, what=ids())


def test_refusals():
    r = logits("qwen3moe", 2, "--expert-stats", stats("qwen3moe", 5), check=False)
    assert r.returncode != 0 and "blk.0.ffn_gate_exps.weight.counts: not the counts of 6 experts" in r.stderr, r.stderr
    r = logits("qwen3moe", 1, "--expert-stats", stats("qwen3moe", 6), check=False)
    assert r.returncode == 2 and "--expert-stats places experts on processes" in r.stderr, r.stderr
    r = logits("qwen3moe", 2, "--expert-stats", os.path.join(WORK, "none.gguf"), check=False)
    assert r.returncode != 0 and "none.gguf" in r.stderr, r.stderr


if __name__ == "__main__":
    run_rank_tests(BUILD, globals(), WORK)
