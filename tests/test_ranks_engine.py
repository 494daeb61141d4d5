#!/usr/bin/env python3
"""What an engine does, done by several processes (mpirun): adapters are cut like the weights they change, drafts (--draft),
constrained answers, shared prefixes and preemption give what one process gives, also while parts of two steps are under way
between stages."""
import json
import os
import subprocess
import sys
import tempfile
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import mtp_toy  # noqa: E402
from gguf_tools import max_difference, mean_kl, read_logits  # noqa: E402
from ranklib import Ranks, listeners, rank_logits, run_rank_tests  # noqa: E402
from serverlib import bodies  # noqa: E402

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
GOLDEN = "tests/golden"
WORK = tempfile.mkdtemp(prefix="steel-ranks-")
ALONE = (1, [])
TP, PP, BOTH = (2, ["--tp", "2"]), (2, ["--pp", "2"]), (4, ["--tp", "2", "--pp", "2"])


def serve(arrangement, model, *flags):
    ranks, args = arrangement
    return Ranks(BUILD, ranks, *args, *flags, model=model)


def toy(name, mtp=False):
    """A model of four layers or so, that speaks."""
    path = os.path.join(WORK, name)
    if mtp and not os.path.exists(path):
        mtp_toy.main(f"{GOLDEN}/{name}", path, 1)
    elif not os.path.exists(path):
        subprocess.run([os.path.join(BUILD, "tests/toy_gguf"), path], check=True)
    return path


def logits(model, arrangement, kernels, lora):
    """The logits of an adapter's golden ids."""
    ranks, args = arrangement
    adapter = ["--lora", f"{GOLDEN}/{model}-lora"] if lora else []
    return rank_logits(BUILD, f"{GOLDEN}/{model}", ranks, [*args, *adapter], ids=f"{GOLDEN}/{model}-lora/golden.bin", kernels=kernels)[0]


def test_adapters():
    """Cut like their weights: within 1e-5 of one process, default kernels within a KL of 2e-4 of the golden logits."""
    for model in ("qwen3", "qwen3moe"):
        golden = read_logits(f"{GOLDEN}/{model}-lora/golden.bin")
        alone, base = logits(model, ALONE, "ref", True), logits(model, ALONE, "ref", False)
        assert mean_kl(golden, base) > 1e-2, "the adapter changes nothing"
        top = max(abs(x) for row in alone for x in row)
        for arrangement in (TP, (3, []), PP, (2, ["--ep"]), BOTH):
            diff = max_difference(logits(model, arrangement, "ref", True), alone) / top
            kl = mean_kl(golden, logits(model, arrangement, None, True))
            print(f"{model:10} {' '.join(arrangement[1]) or '--tp 3':14} reference {diff:.1e}, default kernels KL {kl:.1e}")
            assert diff < 1e-5, (model, arrangement, diff)
            assert kl <= 2e-4, (model, arrangement, kl)


def test_adapters_later():
    """Adapters that come later would be rank 0's alone: that is said. What rows use which is told to all."""
    with serve(TP, f"{GOLDEN}/qwen3", "--lora", f"style={GOLDEN}/qwen3-lora", "--allow-lora-loading") as s:
        status, _, text = s.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": f"{GOLDEN}/qwen3-lora"})
        assert status == 400 and '"lora_path"' in text, (status, text)
        s.wait_line("--lora x=")


def answer(s, body):
    return [(c["text"], c["finish_reason"], c.get("logprobs")) for c in s.json("/v1/completions", body)["choices"]]


def crowd(s, requests):
    """All at once."""
    out = {}
    threads = [threading.Thread(target=lambda i=i, b=b: out.update({i: answer(s, b)})) for i, b in enumerate(requests)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return [out.get(i) for i in range(len(threads))]


def test_stages_answer_alike():
    """Stages change no bit of a row: one by one and in company, the answers are those of one process, drawn ones too."""
    with serve(ALONE, toy("toy.gguf")) as s:
        want = [answer(s, b) for b in bodies(10, 4)]
    with serve(PP, toy("toy.gguf")) as s:
        assert [answer(s, b) for b in bodies(10, 4)] == want
        assert crowd(s, bodies(10, 4)) == want
        assert s.metrics()["steel_steps_ahead_total"] > 0
    with serve(BOTH, toy("toy.gguf")) as s:
        want = [answer(s, b) for b in bodies(10, 4)]
        assert crowd(s, bodies(10, 4)) == want


def test_drafts():
    """--draft: the answers of the same ranks without. The block drafts over ranks as it does in one process."""
    right = "steel_draft_tokens_accepted_total"
    for name, arrangements in (("qwen3_5_moe", (TP, PP)), ("glm4_moe", ((2, ["--ep"]), BOTH))):
        model, asked = toy(name, mtp=True), list(bodies(10, 4))[:5]
        with serve(ALONE, model, "--draft", "2") as s:
            for b in asked:
                answer(s, b)
            alone = s.metrics()
        for arrangement in arrangements:
            with serve(arrangement, model, "--draft", "0") as s:
                want = crowd(s, asked)
            with serve(arrangement, model, "--draft", "2") as s:
                assert [answer(s, b) for b in asked] == want, (name, arrangement)
                ours = s.metrics()
                assert ours["steel_draft_tokens_total"] > 0
                assert abs(ours[right] - alone[right]) <= (0 if arrangement == PP else 0.1 * alone[right]), (name, arrangement)
                assert crowd(s, asked) == want, (name, arrangement)
            with serve(arrangement, model, "--draft", "3", "--draft-model", model) as s:  # rank 0 has it alone
                assert crowd(s, asked) == want, (name, arrangement)
                assert s.metrics()['steel_draft_tokens_accepted_by_source_total{source="model"}'] > 0
        assert name != "qwen3_5_moe" or alone[right] > 0


def test_constraints():
    """Masks are rank 0's business, and the tokens they force reach everyone."""
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
              "required": ["name", "age"], "additionalProperties": False}
    asked = [{"prompt": "go %d" % i, "max_tokens": 80, "temperature": 1, "seed": i, "json_schema": schema} for i in range(6)]
    with serve(ALONE, toy("toy.gguf")) as s:
        want = [answer(s, b) for b in asked]
    for arrangement in (TP, PP, BOTH):
        with serve(arrangement, toy("toy.gguf")) as s:
            got = crowd(s, asked)
            for text, why, _ in (c for one in got for c in one):
                assert why == "stop" and set(json.loads(text)) == {"name", "age"}, (arrangement, text)
            assert arrangement != PP or got == want


def test_listens_nowhere():
    """Ranks on one machine open no port to the network, whatever transports mpirun would choose."""
    with Ranks(BUILD, 2, "--tp", "2", bare=True) as s:
        assert s.json("/v1/completions", {"prompt": "x", "max_tokens": 2})["usage"]["completion_tokens"] == 2
        open_to = [a for pid in s.pids for a in listeners(pid)]
        assert open_to and all(a.startswith("0100007F:") for a in open_to), open_to  # the server itself: 127.0.0.1


def test_prefixes():
    """The second time a prompt is not read again, and the answer is the same."""
    body = {"prompt": "a long beginning that many share, " * 12, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    states = toy("qwen3_5_moe", mtp=True)  # has recurrent layers
    for arrangement, model in ((TP, toy("toy.gguf")), (PP, toy("toy.gguf")), (BOTH, states)):
        with serve(arrangement, model, "-c", "1024", "--draft", "0") as s:
            first = answer(s, body)
            before = s.metrics()["steel_prefix_cache_hits_total"]
            assert answer(s, body) == first, arrangement
            assert s.metrics()["steel_prefix_cache_hits_total"] >= before + 100, (arrangement, s.metrics())


def test_preemption():
    """Too few pages for all: some are put back, read themselves again, and answer as with room."""
    asked = [{"prompt": "tell me a story %d " % i * 4, "max_tokens": 100, "seed": i, "temperature": 0.8, "ignore_eos": True}
             for i in range(6)]
    for arrangement in (TP, PP, BOTH):
        with serve(arrangement, toy("toy.gguf"), "-c", "512") as s:
            want = crowd(s, asked)
            assert s.metrics()["steel_preemptions_total"] == 0
        with serve(arrangement, toy("toy.gguf"), "-c", "256", "--kv-tokens", "320") as s:
            assert crowd(s, asked) == want, arrangement
            assert s.metrics()["steel_preemptions_total"] > 0, arrangement


if __name__ == "__main__":
    run_rank_tests(BUILD, globals(), WORK)
