#!/usr/bin/env python3
"""Several processes run one model (mpirun): every golden family, cut by heads and hidden units (--tp), by experts (--ep), by
layers (--pp) and mixed, gives what one process gives, whole steps and such in halves (--overlap); the same bytes from run to run. RANKS_FAMILIES=name,... and RANKS_ALL=1 (every
family with every arrangement)."""
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from gguf_tools import max_difference, mean_kl  # noqa: E402
from ranklib import ALL, mpirun, rank_logits, run_rank_tests, said  # noqa: E402

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
STEEL = os.path.join(BUILD, "steel")
GOLDEN = "tests/golden"
WORK = tempfile.mkdtemp(prefix="steel-ranks-")
ARRANGEMENTS = {
    "tp 2": (2, ["--tp", "2"]),
    "tp 3": (3, []),
    "tp 4": (4, []),
    "ep 2": (2, ["--ep"]),
    "ep 3": (3, ["--ep"]),
    "pp 2": (2, ["--pp", "2"]),
    "pp 3": (3, ["--pp", "3", "--chunk", "7"]),
    "tp 2 pp 2": (4, ["--tp", "2", "--pp", "2"]),
    "ep 2 pp 2": (4, ["--ep", "--pp", "2", "--batch", "3"]),
}


def families():
    named = os.environ.get("RANKS_FAMILIES")
    every = sorted(d for d in os.listdir(GOLDEN)
                   if os.path.exists(f"{GOLDEN}/{d}/golden.bin") and os.path.exists(f"{GOLDEN}/{d}/config.json")
                   and not os.path.exists(f"{GOLDEN}/{d}/pooled.bin") and not os.path.exists(f"{GOLDEN}/{d}/adapter"))
    return named.split(",") if named else every


def logits(model, ranks, args, kernels, kv, check=True):
    return rank_logits(BUILD, f"{GOLDEN}/{model}", ranks, args, kernels=kernels, kv=kv, check=check)


def arrangements(i):
    """All, or one, another for each family, so that all are met."""
    names = list(ARRANGEMENTS)
    if ALL:
        return names
    return [names[i % len(names)]]


def halves(args):
    """Where ranks share layers without stages."""
    return [] if "--pp" in args else ["--overlap", "on", "--profile"]


def was_halved(r, args):
    return "in halves)" in r.stderr or "--pp" in args


def cannot_be(r):
    return "which another stage has" in r.stderr or "--pp 3: the model has 2 layers" in r.stderr


def test_families_agree():
    """Reference within 1e-5 of one process, default kernels within a KL of 2e-4 of the golden logits."""
    for i, model in enumerate(families()):
        alone, _ = logits(model, 1, [], "ref", "f32")
        for name in arrangements(i):
            ranks, args = ARRANGEMENTS[name]
            ours, r = logits(model, ranks, args, "ref", "f32", check=False)
            if ours is None and cannot_be(r):
                print(f"{model:16} {name:10} cannot be cut so, and says why")
                continue
            assert ours is not None, f"{model} {name}: {r.stderr[-800:]}"
            top = max(abs(x) for row in alone for x in row)
            diff = max_difference(ours, alone) / top
            if ALL and halves(args):
                ours, r = logits(model, ranks, [*args, *halves(args)], "ref", "f32")
                assert was_halved(r, args), (model, name, r.stderr)
                diff = max(diff, max_difference(ours, alone) / top)
            fast, r = logits(model, ranks, [*args, *halves(args)], None, "f32")
            assert was_halved(r, args), (model, name, r.stderr)
            kl = mean_kl(alone, fast)
            limit = 2e-4
            if kl > limit:
                # prompts are read in halves; where the choice of experts is close, that alone changes it
                chunk = args[args.index("--chunk") + 1] if "--chunk" in args else str(len(alone) // 2)
                limit = 1.2 * mean_kl(alone, logits(model, 1, ["--chunk", chunk], None, "f32")[0])
            print(f"{model:16} {name:10} reference {diff:.1e}, default kernels KL {kl:.1e}")
            # Gemma 4's random weights make ten times as much of the order of a sum; one process is as far from the golden logits
            assert diff < (1e-4 if model.startswith("gemma4") else 1e-5), (model, name, diff)
            assert kl <= limit, (model, name, kl, limit)


def test_same_bytes():
    """--deterministic: from run to run."""
    for ranks, args in ((3, []), (4, ["--pp", "2"])):
        first, _ = logits("qwen3moe", ranks, [*args, "--deterministic"], None, "f16")
        again, _ = logits("qwen3moe", ranks, [*args, "--deterministic"], None, "f16")
        assert first == again, f"{ranks} ranks {args}"


def test_halves():
    """A step in halves gives the bytes of the whole step, where --deterministic says so: of one sequence, and of several."""
    some = {"qwen3moe": "ep 3", "deepseek_v3": "tp 2", "gemma4": "tp 2", "gemma4_moe": "tp 3", "glm4_moe": "ep 2", "gpt_oss": "tp 4",
            "qwen3_next": "tp 2"}
    for model in families() if ALL else some:
        for name in [n for n in ARRANGEMENTS if "pp" not in n] if ALL else [some[model]]:
            ranks, args = ARRANGEMENTS[name]
            for more in ([], ["--batch", "3"]) if ALL or model == "qwen3moe" else ([],):
                both = [logits(model, ranks, [*args, *more, "--deterministic", "--profile", "--overlap", how], None, "f16") for how in ("off", "on")]
                assert "in halves)" not in both[0][1].stderr and "in halves)" in both[1][1].stderr, (model, name, both[1][1].stderr)
                assert both[0][0] == both[1][0], (model, name, more)
            print(f"{model:16} {name:10} in halves: the same bytes")


def test_overlap_refused():
    """Where there is nothing to halve, that is said."""
    for ranks, args, why in ((1, [], "ranks that share layers"), (2, ["--pp", "2"], "ranks that share layers"), (2, ["--overlap", "soon"], "auto, on or off")):
        _, r = logits("qwen3", ranks, ["--overlap", "on", *args], None, "f16", check=False)
        assert r.returncode and why in r.stderr, (ranks, args, r.stderr)


def test_many_value_heads():
    """A file that says more value heads to a key head than runs of rows can be kept of is refused by what it lacks."""
    path = os.path.join(WORK, "qwen3_5.gguf")
    subprocess.run([STEEL, "convert", f"{GOLDEN}/qwen3_5", path], check=True, capture_output=True)
    good = open(path, "rb").read()
    for times in (4, 6, 7, 64):
        bad = good
        for key in (b"time_step_rank", b"inner_size"):
            key = b"qwen35.ssm." + key + b"\x04\0\0\0"
            at = bad.index(key) + len(key)
            bad = bad[:at] + (times * int.from_bytes(bad[at:at + 4], "little")).to_bytes(4, "little") + bad[at + 4:]
        with open(path, "wb") as f:
            f.write(bad)
        r = mpirun(2, STEEL, "logits", path, "--device", "cpu", "--ids", f"{GOLDEN}/qwen3_5/golden.bin", "--out",
                   os.path.join(WORK, "out.bin"))
        assert r.returncode == 1 and "expected [" in "".join(said(r.stderr)), (times, r.returncode, said(r.stderr))


if __name__ == "__main__":
    run_rank_tests(BUILD, globals(), WORK)
