#!/usr/bin/env python3
"""LoRA adapters as others write them: PEFT folders (patterns, rsLoRA, experts by name and fused) and GGUF adapters against
weights that are merged here; broken ones, which end in one line that names the tensor or the field; and the server: choosing
by model, by name and by list, the cache, loading and unloading."""
import json
import math
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from gguf_tools import max_difference, mean_kl, read_logits, read_safetensors, write_gguf, write_safetensors  # noqa: E402
from serverlib import HANG, Server, run_tests  # noqa: E402

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
STEEL = os.path.join(BUILD, "steel")
WORK = tempfile.mkdtemp(prefix="steel-lora-")
RANK, ALPHA = 3, 6


def floats(n, draw, size=0.15):
    return [draw.uniform(-size, size) for _ in range(n)]


def pack(v):
    return struct.pack("<%df" % len(v), *v)


def unpack(dtype, data):
    if dtype == "F32":
        return list(struct.unpack("<%df" % (len(data) // 4), data))
    assert dtype == "BF16", dtype
    return [struct.unpack("<f", b"\0\0" + data[i:i + 2])[0] for i in range(0, len(data), 2)]


def product(b, a, n_out, rank, n_in, scale):
    """scale * B A, rows of n_in: B (n_out, rank), A (rank, n_in)."""
    out = []
    for o in range(n_out):
        row = [0.0] * n_in
        for k in range(rank):
            f = scale * b[o * rank + k]
            for i in range(n_in):
                row[i] += f * a[k * n_in + i]
        out += row
    return out


class Base:
    """A small model of tests/golden and its plain logits."""

    def __init__(self, name):
        self.path = os.path.join("tests/golden", name)
        self.tensors = read_safetensors(self.path + "/model.safetensors")
        self.ids = self.path + "/golden.bin"

    def shape(self, name):
        return self.tensors[name][1]

    def merged(self, deltas):
        """The logits of the model with these added to its weights: name -> list of floats."""
        folder = tempfile.mkdtemp(dir=WORK)
        shutil.copy(self.path + "/config.json", folder)
        out = {}
        for name, (dtype, shape, data) in self.tensors.items():
            if dtype == "I64":  # tables of numbers
                out[name] = (dtype, shape, data)
                continue
            v = unpack(dtype, data)
            if name in deltas:
                v = [x + d for x, d in zip(v, deltas[name])]
            out[name] = ("F32", shape, pack(v))
        write_safetensors(folder + "/model.safetensors", out)
        return self.logits(folder)

    def logits(self, model=None, adapters=(), isa="ref"):
        out = os.path.join(WORK, "out.bin")
        env = dict(os.environ, STEEL_ISA=isa) if isa else os.environ
        flags = [x for a in adapters for x in ("--lora", a)]
        subprocess.run([STEEL, "logits", model or self.path, "--ids", self.ids, "--out", out, "-t", "2", "--device", "cpu",
                        "--kv-type", "f32", *flags], check=True, env=env)
        return read_logits(out)


def write_peft(folder, pairs, **config):
    """pairs: module -> (A shape, A, B shape, B)."""
    os.makedirs(folder, exist_ok=True)
    tensors = {}
    for module, (sa, a, sb, b) in pairs.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = ("F32", sa, pack(a))
        tensors[f"base_model.model.{module}.lora_B.weight"] = ("F32", sb, pack(b))
    write_safetensors(folder + "/adapter_model.safetensors", tensors)
    full = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "target_modules": ["x"]}
    full.update(config)
    json.dump(full, open(folder + "/adapter_config.json", "w"))
    return folder


def plain_pairs(base, modules, draw, rank=RANK, turned=False):
    pairs = {}
    for m in modules:
        n_out, n_in = base.shape(m + ".weight")[::-1 if turned else 1]
        r = rank(m) if callable(rank) else rank
        pairs[m] = ([r, n_in], floats(r * n_in, draw), [n_out, r], floats(n_out * r, draw))
    return pairs


def deltas_of(pairs, scale):
    out = {}
    for m, (sa, a, sb, b) in pairs.items():
        s = scale(m, sa[0]) if callable(scale) else scale
        out[m + ".weight"] = product(b, a, sb[0], sa[0], sa[1], s)
    return out


def agree(base, deltas, adapters, bound=2e-3):
    want = base.merged(deltas)
    got = base.logits(adapters=adapters)
    assert max_difference(want, base.logits()) > 0.05, "the adapter changes nothing"
    assert max_difference(want, got) <= bound, max_difference(want, got)
    kl = mean_kl(want, base.logits(adapters=adapters, isa=None))
    assert kl <= 2e-4, kl


LINEAR = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def layers(names, n=2):
    return [f"model.layers.{i}.{m}" for i in range(n) for m in names]


def test_peft(_):
    """Every module of a dense model; several adapters at once; a scale; names of other wrappings."""
    base, draw = Base("qwen3"), random.Random(1)
    pairs = plain_pairs(base, layers(LINEAR), draw)
    one = write_peft(WORK + "/one", pairs)
    deltas = deltas_of(pairs, ALPHA / RANK)
    agree(base, deltas, [one])
    half = {k: [x * 0.5 for x in v] for k, v in deltas.items()}
    agree(base, half, [f"h={one}:0.5"])
    other = plain_pairs(base, layers(LINEAR[:2]), draw)
    two = write_peft(WORK + "/two", other)
    both = dict(half)
    for k, v in deltas_of(other, ALPHA / RANK).items():
        both[k] = [x + y for x, y in zip(both[k], v)]
    agree(base, both, [f"h={one}:0.5", two + "/adapter_config.json"])
    wrapped = {m.replace("model.", "model.language_model.", 1): v for m, v in pairs.items()}
    agree(base, deltas, [write_peft(WORK + "/wrapped", wrapped)])


def test_head(_):
    """lm_head of its own, and of a model whose head is its embedding: the lookup stays as it is."""
    draw = random.Random(2)
    base = Base("qwen3moe")
    pairs = plain_pairs(base, ["lm_head"], draw)
    agree(base, deltas_of(pairs, ALPHA / RANK), [write_peft(WORK + "/head", pairs)])
    tied = Base("qwen3")
    assert "lm_head.weight" not in tied.tensors
    n_out, n_in = tied.shape("model.embed_tokens.weight")
    pairs = {"lm_head": ([RANK, n_in], floats(RANK * n_in, draw), [n_out, RANK], floats(n_out * RANK, draw))}
    tied.logits(adapters=[write_peft(WORK + "/tied", pairs)])  # the logits differ from row to row; it runs
    assert max_difference(tied.logits(), tied.logits(adapters=[WORK + "/tied"])) > 0.05


def test_patterns(_):
    """rank_pattern and alpha_pattern are expressions over the ends of names; rsLoRA divides by the root."""
    base, draw = Base("qwen3"), random.Random(3)
    modules = layers(LINEAR)

    def rank(m):
        return 5 if m.endswith("q_proj") else 2 if "layers.1.mlp.up" in m else RANK

    def scale(m, r):
        alpha = 10 if m.endswith("k_proj") or "layers.0.mlp" in m else ALPHA
        return alpha / math.sqrt(r)

    pairs = plain_pairs(base, modules, draw, rank)
    folder = write_peft(WORK + "/patterns", pairs, use_rslora=True, rank_pattern={"q_proj": 5, r"layers\.1\.mlp\.up_proj": 2},
                        alpha_pattern={"k_proj": 10, r"model\.layers\.0\.mlp\..*": 10})
    agree(base, deltas_of(pairs, scale), [folder])


def test_experts(_):
    """Experts by name, routers, and PEFT's one module for all of them, in both orders of in and out."""
    base, draw = Base("qwen3moe"), random.Random(4)
    n_expert = base.shape("model.layers.0.mlp.gate.weight")[0]
    names = [f"mlp.experts.{e}.{p}_proj" for e in range(n_expert) for p in ("gate", "up", "down")]
    pairs = plain_pairs(base, layers(["mlp.gate", "self_attn.q_proj"] + names), draw)
    agree(base, deltas_of(pairs, ALPHA / RANK), [write_peft(WORK + "/experts", pairs)])

    for turned in (False, True):
        fused, deltas = {}, {}
        for layer in range(2):
            stem = f"model.layers.{layer}.mlp.experts"
            F, E = base.shape(stem + ".0.gate_proj.weight")
            for module, n_in, n_out in ((stem + ".base_layer", E, 2 * F), (stem, F, E)):
                i, o = (n_out, n_in) if turned else (n_in, n_out)
                a, b = floats(n_expert * RANK * i, draw), floats(o * RANK * n_expert, draw)
                fused[module] = ([n_expert * RANK, i], a, [o, RANK * n_expert], b)
                for e in range(n_expert):
                    # delta[x][y] = sum_k b[x, k, e] * a[e, k, y], the other way round where in and out are
                    ae = a[e * RANK * i:(e + 1) * RANK * i]
                    be = [b[x * RANK * n_expert + k * n_expert + e] for x in range(o) for k in range(RANK)]
                    d = product(be, ae, o, RANK, i, ALPHA / RANK)  # (o, i)
                    if turned:
                        d = [d[y * i + x] for x in range(i) for y in range(o)]
                    parts = [("gate", 0), ("up", F)] if module != stem else [("down", 0)]
                    for p, first in parts:
                        rows = F if module != stem else E
                        deltas[f"{stem}.{e}.{p}_proj.weight"] = d[first * n_in:(first + rows) * n_in]
        agree(base, deltas, [write_peft(WORK + f"/fused{turned}", fused)])


# families whose mixers, experts and names others do not have
FAMILIES = ["inkling", "minimax", "longcat_flash", "jamba", "falcon_h1", "olmo_hybrid", "lfm2", "phimoe", "mamba2", "nemotron_h",
            "granitemoehybrid", "deepseek_v4", "gemma3n", "minimax_m3", "llama4", "gpt_neox", "gpt2"]
APART = "kv_b_proj|wo_a|altup|laurel|per_layer|vision"  # a matrix per head, and what adapters of others leave alone


def test_families(_):
    """Every matrix of a layer. GPT-2 stores its matrices transposed; adapters are as of others."""
    for family in FAMILIES:
        base, draw = Base(family), random.Random(9)
        names = [name.removesuffix(".weight") for name, (_, shape, _) in base.tensors.items() if len(shape) == 2 and
                 re.search(r"(layers|\bh)\.\d+\..*\.weight$", name) and not re.search(APART, name)]
        turned = family == "gpt2"
        pairs = plain_pairs(base, names, draw, turned=turned)
        deltas = deltas_of(pairs, ALPHA / RANK)
        for m in pairs if turned else ():
            n_in, n_out = base.shape(m + ".weight")
            deltas[m + ".weight"] = [deltas[m + ".weight"][o * n_in + i] for i in range(n_in) for o in range(n_out)]
        agree(base, deltas, [write_peft(WORK + "/" + family, pairs)])


def test_fused_model(_):
    """Experts that the model stores as one tensor, gate and up rows interleaved, transposed."""
    base, draw = Base("gpt_oss"), random.Random(5)
    fused, deltas = {}, {}
    for layer in range(2):
        stem = f"model.layers.{layer}.mlp.experts"
        for module, tensor in ((stem, ".gate_up_proj"), (stem + ".base_layer", ".down_proj")):
            n_expert, n_in, n_out = base.shape(stem + tensor)
            a, b = floats(n_expert * RANK * n_in, draw), floats(n_out * RANK * n_expert, draw)
            fused[module] = ([n_expert * RANK, n_in], a, [n_out, RANK * n_expert], b)
            out = []
            for e in range(n_expert):
                be = [b[x * RANK * n_expert + k * n_expert + e] for x in range(n_out) for k in range(RANK)]
                d = product(be, a[e * RANK * n_in:(e + 1) * RANK * n_in], n_out, RANK, n_in, ALPHA / RANK)
                out += [d[o * n_in + i] for i in range(n_in) for o in range(n_out)]
            deltas[stem + tensor] = out
    agree(base, deltas, [write_peft(WORK + "/gpt_oss", fused)])


GGUF = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
META = {"general.type": "adapter", "general.architecture": "qwen3", "adapter.type": "lora", "adapter.lora.alpha": float(ALPHA)}


def gguf_tensors(pairs, weave=lambda m, b, n_out, r: b):
    out = []
    for m, (sa, a, sb, b) in pairs.items():
        _, _, layer, rest = m.split(".", 3)
        name = f"blk.{layer}.{GGUF[rest]}.weight"
        out.append((name + ".lora_a", [sa[1], sa[0]], 0, pack(a)))
        out.append((name + ".lora_b", [sb[1], sb[0]], 0, pack(weave(rest, b, sb[0], sb[1]))))
    return out


def test_gguf(_):
    """llama.cpp's files; those of llama have the rows of q and k interleaved; without an alpha the scale is 1."""
    base, draw = Base("qwen3"), random.Random(6)
    pairs = plain_pairs(base, layers(LINEAR), draw)
    path = WORK + "/a.gguf"
    write_gguf(path, META, gguf_tensors(pairs))
    agree(base, deltas_of(pairs, ALPHA / RANK), [path])
    meta = dict(META)
    del meta["adapter.lora.alpha"]
    write_gguf(path, meta, gguf_tensors(pairs))
    agree(base, deltas_of(pairs, 1), [path])

    llama = Base("llama3-rope")
    D = 16

    def weave(m, b, n_out, r):
        if m not in ("self_attn.q_proj", "self_attn.k_proj"):
            return b
        out = []
        for row in range(n_out):  # row 2i + j of a head is row j * D/2 + i of the model
            head, i = row // D, row % D
            at = head * D + i % 2 * (D // 2) + i // 2
            out += b[at * r:(at + 1) * r]
        return out

    pairs = plain_pairs(llama, layers(LINEAR), draw)
    write_gguf(path, dict(META, **{"general.architecture": "llama"}), gguf_tensors(pairs, weave))
    agree(llama, deltas_of(pairs, ALPHA / RANK), [path])


# Broken ones

def refused(adapter, *parts, model="tests/golden/qwen3"):
    r = subprocess.run([STEEL, "logits", model, "--ids", "tests/golden/qwen3/golden.bin", "--out", WORK + "/none.bin", "--device", "cpu",
                        "-t", "1", "--lora", adapter], capture_output=True, timeout=HANG)
    lines = r.stderr.decode(errors="replace").splitlines()
    assert r.returncode in (1, 2), (adapter, parts, r.returncode, lines[:4])
    assert len(lines) == 1 or r.returncode == 2, (adapter, lines[:4])
    for p in parts:
        assert p in lines[0], (parts, lines[0])


def test_broken_peft(_):
    base, draw = Base("qwen3"), random.Random(7)
    q = "model.layers.0.self_attn.q_proj"
    good = plain_pairs(base, [q, "model.layers.1.mlp.down_proj"], draw)
    n = 0

    def broken(pairs, *parts, **config):
        nonlocal n
        n += 1
        refused(write_peft(f"{WORK}/broken{n}", pairs, **config), *parts)

    subprocess.run([STEEL, "logits", base.path, "--ids", base.ids, "--out", WORK + "/ok.bin", "--device", "cpu", "--lora",
                    write_peft(WORK + "/good", good)], check=True)
    broken(good, "use_dora", "DoRA", use_dora=True)
    broken(good, "peft_type", "IA3", peft_type="IA3")
    broken(good, "peft_type", peft_type=7)
    broken(good, "bias", bias="all")
    broken(good, "modules_to_save", modules_to_save=["embed_tokens"])
    broken(good, "fan_in_fan_out", fan_in_fan_out=True)
    broken(good, "lora_bias", lora_bias=True)
    broken(good, "init_lora_weights", init_lora_weights="pissa_niter_4")
    broken(good, "alora_invocation_tokens", alora_invocation_tokens=[1, 2])
    broken(good, "adapter_config.json: r:", r=0)
    broken(good, "adapter_config.json: r:", r=-3)
    broken(good, "adapter_config.json: r:", r=1 << 40)
    broken(good, "adapter_config.json: r:", r="8")
    broken(good, q, "rank 3", "says 4", r=4)
    broken(good, "lora_alpha", lora_alpha=None)
    broken(good, "lora_alpha", lora_alpha=1e300)
    broken(good, "rank_pattern", rank_pattern=[1])
    broken(good, "rank_pattern", "q_proj", rank_pattern={"q_proj": 0})
    broken(good, "rank_pattern", rank_pattern={"(": 3})
    broken(good, "alpha_pattern", alpha_pattern={"(a+)+$": "x"})
    broken(good, "alpha_pattern", "2048", alpha_pattern={f"m{i}": 1 for i in range(2049)})
    broken({}, "no tensors")
    unknown = dict(good)
    unknown["model.layers.0.self_attn.w_proj"] = good[q]
    broken(unknown, "w_proj", "no such weight")
    broken({"model.layers.7.self_attn.q_proj": good[q]}, "layers.7", "no such weight")
    broken({"model.layers.0.self_attn.q_proj.lora_A": good[q]}, "q_proj.lora_A", "no such weight")
    broken({"model.embed_tokens": good[q]}, "embed_tokens", "embeddings")
    twice = dict(good)
    twice[q.replace("model.", "model.language_model.", 1)] = good[q]
    broken(twice, "q_proj", "same weight")
    sa, a, sb, b = good[q]
    broken({q: ([RANK, sa[1] // 2], a[:RANK * sa[1] // 2], sb, b)}, "lora_A", "shape")
    broken({q: (sa, a, [sb[0] // 2, RANK], b[:sb[0] * RANK // 2])}, "lora_B", "shape")
    broken({q: (sa, a, [sb[0], 1], b[:sb[0]])}, "lora_B", "shape")
    broken({q: ([0, sa[1]], [], [sb[0], 0], [])}, "q_proj")
    broken({q: (sa, [float("nan")] + a[1:], sb, b)}, "lora_A", "not finite")
    broken({q: (sa, a, sb, b[:-1] + [float("inf")])}, "lora_B", "not finite")
    huge = 2048
    broken({q: ([huge, sa[1]], [0.0] * huge * sa[1], [sb[0], huge], [0.0] * huge * sb[0])}, "lora_A", "rank 2048", r=1024)

    def raw(edit, *parts):
        nonlocal n
        n += 1
        folder = f"{WORK}/broken{n}"
        write_peft(folder, good)
        edit(folder)
        refused(folder, *parts)

    def only(folder, ending):
        t = read_safetensors(folder + "/adapter_model.safetensors")
        write_safetensors(folder + "/adapter_model.safetensors", {k: v for k, v in t.items() if not k.endswith(ending)})

    def extra(folder, name):
        t = read_safetensors(folder + "/adapter_model.safetensors")
        t[name] = ("F32", [4], pack([1.0] * 4))
        write_safetensors(folder + "/adapter_model.safetensors", t)

    raw(lambda f: only(f, "q_proj.lora_B.weight"), "q_proj.lora_B.weight", "missing")
    raw(lambda f: only(f, "q_proj.lora_A.weight"), "q_proj.lora_A.weight", "missing")
    raw(lambda f: extra(f, f"base_model.model.{q}.lora_magnitude_vector"), "lora_magnitude_vector", "DoRA")
    raw(lambda f: extra(f, "base_model.model.model.embed_tokens.lora_embedding_A"), "lora_embedding_A", "embeddings")
    raw(lambda f: extra(f, f"base_model.model.{q}.bias"), f"{q}.bias")
    raw(lambda f: os.remove(f + "/adapter_config.json"), "adapter_config.json")
    raw(lambda f: os.remove(f + "/adapter_model.safetensors"), "adapter_model.safetensors")
    raw(lambda f: os.rename(f + "/adapter_model.safetensors", f + "/adapter_model.bin"), "adapter_model.bin", "safetensors")
    raw(lambda f: open(f + "/adapter_config.json", "w").write("[1, 2"), "adapter_config.json")
    raw(lambda f: open(f + "/adapter_config.json", "w").write("[1]"), "adapter_config.json")
    raw(lambda f: open(f + "/adapter_config.json", "w").write('{"peft_type": "LORA", "r": 3, "lora_alpha": NaN}'), "adapter_config.json")
    for cut in (0, 4, 9, 200, 3000):
        raw(lambda f: os.truncate(f + "/adapter_model.safetensors", cut), "adapter_model.safetensors")
    refused(WORK + "/nowhere", "nowhere")
    raw(lambda f: os.truncate(f + "/adapter_model.safetensors", 1 << 42), "4398.11 GB of weights", "are free")  # its memory counts before it is read
    refused("tests/golden/qwen3", "adapter_config.json")
    refused(write_peft(WORK + "/moe", good), "down_proj", model="tests/golden/gpt_oss")
    r = subprocess.run([STEEL, "run", WORK + "/good", "-p", "x"], capture_output=True, text=True)
    assert r.returncode == 1 and "--lora" in r.stderr, r.stderr


def test_broken_gguf(_):
    base, draw = Base("qwen3"), random.Random(8)
    pairs = plain_pairs(base, ["model.layers.0.self_attn.q_proj"], draw)
    tensors = gguf_tensors(pairs)
    path = WORK + "/broken.gguf"

    def broken(meta, tensors, *parts):
        write_gguf(path, meta, tensors)
        refused(path, "broken.gguf", *parts)

    def but(**kw):
        meta = dict(META)
        for k, v in kw.items():
            k = k.replace("_", ".")
            if v is None:
                del meta[k]
            else:
                meta[k] = v
        return meta

    broken(but(general_type="model"), tensors, "general.type")
    broken(but(general_type=None), tensors, "general.type")
    broken(but(adapter_type="control_vector"), tensors, "adapter.type")
    broken(but(general_architecture="gemma3"), tensors, "general.architecture", "gemma3")
    broken(but(adapter_lora_alpha=float("nan")), tensors, "adapter.lora.alpha")
    broken(but(adapter_lora_alpha=float("inf")), tensors, "adapter.lora.alpha")
    broken(but(adapter_lora_alpha="x"), tensors, "adapter.lora.alpha")
    broken(META, tensors[:1], "lora_b", "missing")
    broken(META, tensors[1:], "lora_b", "missing")
    broken(META, [], "no tensors")
    a, b = tensors
    broken(META, [("blk.0.attn_x.weight.lora_a", *a[1:]), ("blk.0.attn_x.weight.lora_b", *b[1:])], "attn_x")
    broken(META, [("token_embd.weight.lora_a", *a[1:]), ("token_embd.weight.lora_b", *b[1:])], "token_embd")
    broken(META, tensors + [("blk.0.attn_norm.weight", [4], 0, bytes(16))], "attn_norm")
    again = "blk.0.attn_q.weight.lora_a.weight"
    broken(META, [(again + ".lora_a", *a[1:]), (again + ".lora_b", *b[1:])], "lora_a.weight.lora_a", "no such weight")
    broken(META, [(a[0], [a[1][1], a[1][0]], 0, a[3]), b], "lora_a")
    broken(META, [(a[0], [a[1][0], 2048], 0, bytes(a[1][0] * 2048 * 4)), (b[0], [2048, b[1][1]], 0, bytes(2048 * b[1][1] * 4))], "rank 2048")
    write_gguf(path, META, tensors)
    whole = open(path, "rb").read()
    draw = random.Random(9)
    for _ in range(30):  # cuts and flips: refused, or read, never worse
        data = bytearray(whole[:draw.randrange(len(whole))] if draw.random() < 0.5 else whole)
        for _ in range(draw.randrange(1, 6)):
            if data:
                data[draw.randrange(min(len(data), 700))] ^= 1 << draw.randrange(8)
        open(path, "wb").write(data)
        r = subprocess.run([STEEL, "logits", base.path, "--ids", base.ids, "--out", WORK + "/none.bin", "--device", "cpu", "-t", "1",
                            "--lora", path], capture_output=True, timeout=HANG)
        assert r.returncode in (0, 1), (r.returncode, r.stderr[-300:])
        assert r.returncode == 0 or len(r.stderr.splitlines()) == 1, r.stderr[-500:]


# Files

def convert(*args, code=0):
    r = subprocess.run([STEEL, "convert", "-t", "2", *args], capture_output=True, text=True)
    assert r.returncode == code, (args, r.stderr[-500:])
    return r.stderr


def toy_logits(model, *flags, isa="ref"):
    ids, out = os.path.join(WORK, "ids.bin"), os.path.join(WORK, "toy.bin")
    n = 24
    open(ids, "wb").write(struct.pack("<%di" % (2 + n), n, 288, *range(40, 40 + n)) + bytes(4 * n * 288))
    subprocess.run([STEEL, "logits", model, "--ids", ids, "--out", out, "-t", "2", "--device", "cpu", "--kv-type", "f32", *flags], check=True,
                   env=dict(os.environ, STEEL_ISA=isa))
    return read_logits(out)


def test_merge(_):
    """A GGUF with adapters merged computes what it computes beside them, and so does a folder that becomes one."""
    toy, out = WORK + "/toy.gguf", WORK + "/merged.gguf"
    subprocess.run([os.path.join(BUILD, "tests/toy_gguf"), toy], check=True)
    small = [toy_adapter(f"{WORK}/small{i}.gguf", 40 + i, size=0.1) for i in range(2)]
    convert(toy, out, "--merge-lora", small[0], "--merge-lora", f"x={small[1]}:-0.5")
    want = toy_logits(toy, "--lora", small[0], "--lora", f"x={small[1]}:-0.5")
    assert max_difference(want, toy_logits(toy)) > 0.05
    kl, beside = mean_kl(want, toy_logits(out)), mean_kl(want, toy_logits(toy))
    assert kl < beside / 20, (kl, beside)  # the sum is rounded to the weights' own type
    assert "DoRA" in convert(toy, out, "--merge-lora", write_peft(WORK + "/dora", {}, use_dora=True), "--force", code=1)
    assert "--merge-lora" in convert(WORK + "/dora", out, "--force", code=1)
    assert "--type, --tensor and the like do not apply" in convert(toy, out, "--merge-lora", small[0], "--type", "f16", "--force", code=1)


def test_encoder(_):
    """An adapter for an encoder, each tensor of which fits one of its weights, is refused by name: beside it, merged, converted."""
    base = Base("bert")
    modules = [f"encoder.layer.{i}.{m}" for i in range(2) for m in ("attention.self.query", "intermediate.dense", "output.dense")]
    folder = write_peft(WORK + "/bert", plain_pairs(base, modules, random.Random(12)))
    why = "adapters of encoders are not supported, and the model is one (bert)"
    r = subprocess.run([STEEL, "bench", base.path, "--texts", "2", "-r", "1", "--device", "cpu", "--lora", folder], capture_output=True, text=True)
    assert r.returncode == 1 and why in r.stderr and len(r.stderr.splitlines()) == 1, (r.returncode, r.stderr)
    assert why in convert(base.path, WORK + "/bert.gguf", "--merge-lora", folder, code=1)
    assert why in convert(folder, WORK + "/bert.gguf", "--base", base.path, code=1)
    assert not os.path.exists(WORK + "/bert.gguf")


def test_convert(_):
    """PEFT to GGUF and back into the same model: the same logits; rows of a llama are interleaved as llama.cpp has them."""
    for name in ("qwen3", "llama3-rope", "qwen3moe"):
        base, draw = Base(name), random.Random(11)
        modules = layers(LINEAR if name != "qwen3moe" else LINEAR[:4] + ["mlp.gate"] + [f"mlp.experts.{e}.up_proj" for e in (0, 2, 5)])
        pairs = plain_pairs(base, modules, draw, lambda m: 4 if m.endswith("q_proj") else RANK)
        folder = write_peft(f"{WORK}/conv-{name}", pairs, rank_pattern={"q_proj": 4}, use_rslora=True)
        out = f"{WORK}/conv-{name}.gguf"
        convert(folder, out, "--base", base.path)
        assert max_difference(base.logits(adapters=[folder]), base.logits(adapters=[out])) < 2e-4
        convert(folder, out, "--base", base.path, "--type", "f16", "--force")
        assert mean_kl(base.logits(adapters=[folder]), base.logits(adapters=[out])) < 1e-5
    assert "exists already" in convert(folder, out, "--base", base.path, code=1)
    assert "f32, f16 or bf16" in convert(folder, out, "--base", base.path, "--type", "q4_k_m", "--force", code=1)


# The server

TOY = {"attn_q": (64, 64), "attn_k": (64, 32), "attn_v": (64, 32), "attn_output": (64, 64)}


def toy_adapter(path, seed, rank=8, size=0.6):
    draw, tensors = random.Random(seed), []
    for layer in range(2):
        for name, (n_in, n_out) in TOY.items():
            w = f"blk.{layer}.{name}.weight"
            tensors.append((w + ".lora_a", [n_in, rank], 0, pack(floats(n_in * rank, draw, size))))
            tensors.append((w + ".lora_b", [rank, n_out], 0, pack(floats(n_out * rank, draw, size))))
        for name, n_in, n_out in (("ffn_up_exps", 64, 32), ("ffn_down_exps", 32, 64)):
            w = f"blk.{layer}.{name}.weight"
            tensors.append((w + ".lora_a", [n_in, rank, 4], 0, pack(floats(n_in * rank * 4, draw, size))))
            tensors.append((w + ".lora_b", [rank, n_out, 4], 0, pack(floats(n_out * rank * 4, draw, size))))
    write_gguf(path, dict(META, **{"general.architecture": "qwen3moe", "adapter.lora.alpha": float(rank)}), tensors)
    return path


ADAPTERS = [toy_adapter(f"{WORK}/toy{i}.gguf", 20 + i) for i in range(8)]
PROMPT = "The quick brown fox jumps over the lazy dog, again and again and again."


def ask(s, prompt=PROMPT, status=200, **fields):
    return s.json("/v1/completions", dict({"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}, **fields), status)


def text(s, **fields):
    return ask(s, **fields)["choices"][0]["text"]


def test_choosing(_):
    s = Server(BUILD, "--lora", f"a={ADAPTERS[0]}", "--lora", f"b={ADAPTERS[1]}:0.5", "--alias", "toy")
    plain, a, b = text(s), text(s, model="a"), text(s, model="b")
    assert len({plain, a, b}) == 3
    assert text(s, model="toy") == plain and text(s, model="gpt-4") == plain and text(s, model="toy:latest") == plain
    assert text(s, model="toy:a") == a and text(s, lora="a") == a and text(s, lora=[{"id": 0, "scale": 1.0}]) == a
    assert text(s, lora=[{"id": 1, "scale": 0.5}]) == b and text(s, lora=[{"name": "b"}]) == b
    assert text(s, lora=[]) == plain and text(s, lora=[{"id": 0, "scale": 0}]) == plain and text(s, lora=None) == plain
    assert text(s, model="b", lora="a") == a
    both = text(s, lora=[{"id": 0, "scale": 1}, {"id": 1, "scale": 0.5}])
    assert both not in (plain, a, b)
    assert ask(s, model="a")["model"] == "a" and ask(s, model="toy:a")["model"] == "toy:a" and ask(s)["model"] == "toy"
    e = ask(s, model="toy:c", status=404)["error"]
    assert e["code"] == "model_not_found" and e["param"] == "model", e
    for bad in ("c", 3, {"id": 0}, [0], [{}], [{"id": 9}], [{"id": -1}], [{"id": "0"}], [{"id": 0, "scale": "x"}], [{"id": 0}, {"id": 0}],
                [{"name": "c"}], [{"id": 1 << 60}]):
        e = ask(s, lora=bad, status=400)["error"]
        assert e["param"] == "lora" and "lora" in e["message"] or "adapter" in e["message"], e
    models = json.loads(s.get("/v1/models")[2])["data"]
    assert [m["id"] for m in models] == ["toy", "a", "b"]
    assert models[1]["parent"] == "toy" and models[1]["root"] == ADAPTERS[0] and models[2]["lora"] == {"id": 1, "scale": 0.5}
    assert json.loads(s.get("/v1/models/a")[2])["id"] == "a" and json.loads(s.get("/v1/models/toy:b")[2])["id"] == "b"
    assert s.get("/v1/models/c")[0] == 404
    listed = json.loads(s.get("/lora-adapters")[2])
    assert [(x["id"], x["name"], x["scale"]) for x in listed] == [(0, "a", 1), (1, "b", 0.5)]
    # every way to ask knows it
    message = [{"role": "user", "content": "Hello"}]
    chat = lambda **f: s.json("/v1/chat/completions", dict({"messages": message, "max_tokens": 16, "temperature": 0}, **f))
    assert chat()["choices"][0]["message"] != chat(model="a")["choices"][0]["message"] and chat(model="a")["model"] == "a"
    streamed = [json.loads(x) for x in s.stream("/v1/chat/completions", {"messages": message, "max_tokens": 4, "model": "a"}) if x != "[DONE]"]
    assert all(x["model"] == "a" for x in streamed)
    m = lambda **f: s.json("/v1/messages", dict({"messages": message, "max_tokens": 16, "temperature": 0}, **f))
    assert m(model="x")["content"] != m(model="toy:a")["content"] and m(model="toy:a")["model"] == "toy:a"
    r = lambda **f: s.json("/v1/responses", dict({"input": "Hello", "max_output_tokens": 16, "temperature": 0}, **f))
    assert r()["output"][0].get("content") != r(model="a")["output"][0].get("content") and r(model="a")["model"] == "a"
    o = lambda name: s.json("/api/generate", {"model": name, "prompt": "Hello", "stream": False, "raw": True, "options": {"num_predict": 16, "temperature": 0}})
    assert o("toy")["response"] != o("toy:a")["response"] and o("toy:a")["model"] == "toy:a"
    assert s.stop() == 0


def test_mixed(_):
    """Requests of eight adapters and of none at once get what they get alone."""
    flags = [x for i, p in enumerate(ADAPTERS) for x in ("--lora", f"a{i}={p}")]
    s = Server(BUILD, *flags, "--max-num-seqs", "18")
    who = [f"a{i}" for i in range(8)] + ["base"]
    alone = {w: text(s, model=w, cache_prompt=False) for w in who}
    assert len(set(alone.values())) == 9
    got, threads = {}, []
    for k in range(2):
        for w in who:
            def one(w=w, k=k):
                got[w, k] = text(s, model=w, cache_prompt=False)
            threads.append(threading.Thread(target=one))
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(got[w, k] == alone[w] for w in who for k in range(2))
    assert s.stop() == 0


def test_cache(_):
    """Prompts are cached for each adapter apart."""
    s = Server(BUILD, "--lora", f"a={ADAPTERS[0]}")
    cached = lambda **f: ask(s, **f)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached() == 0 and cached() > 0
    assert cached(model="a") == 0 and cached(model="a") > 0
    assert cached(lora=[{"id": 0, "scale": 0.25}]) == 0
    assert cached() > 0
    assert s.stop() == 0


def test_loading(_):
    s = Server(BUILD, "--alias", "toy")
    assert s.json("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": ADAPTERS[0]}, 403)["error"]["type"] == "permission_error"
    assert "--allow-lora-loading" in s.json("/v1/unload_lora_adapter", {"lora_name": "x"}, 403)["error"]["message"]
    assert json.loads(s.get("/lora-adapters")[2]) == []
    assert ask(s, lora="x", status=400)["error"]["param"] == "lora"
    assert s.stop() == 0

    s = Server(BUILD, "--alias", "toy", "--allow-lora-loading", "--max-lora-rank", "8", "--api-key", "k", "--lora", f"first={ADAPTERS[0]}")
    key = {"Authorization": "Bearer k"}
    load = lambda status=200, **f: s.json("/v1/load_lora_adapter", f, status, headers=key)
    unload = lambda status=200, **f: s.json("/v1/unload_lora_adapter", f, status, headers=key)
    go = lambda **f: s.json("/v1/completions", dict({"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}, **f), headers=key)
    say = lambda **f: go(**f)["choices"][0]["text"]
    assert s.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": ADAPTERS[1]})[0] == 401
    plain, first = say(), say(model="first")
    assert plain != first and say(model="x") == plain  # a name that nobody knows is the model
    assert "added" in load(lora_name="x", lora_path=ADAPTERS[1])["message"]
    x = say(model="x")
    assert x not in (plain, first)
    assert [m["id"] for m in json.loads(s.get("/v1/models", headers=key)[2])["data"]] == ["toy", "first", "x"]
    assert "already" in load(400, lora_name="x", lora_path=ADAPTERS[2])["error"]["message"]
    for bad, param in (({"lora_path": "p"}, "lora_name"), ({"lora_name": "y"}, "lora_path"), ({"lora_name": 1, "lora_path": "p"}, "lora_name"),
                       ({"lora_name": "y", "lora_path": "/nowhere"}, "lora_path"), ({"lora_name": "a b", "lora_path": ADAPTERS[0]}, "lora_path"),
                       ({"lora_name": "toy", "lora_path": ADAPTERS[0]}, "lora_name"), ({"lora_name": "y", "lora_path": BUILD}, "lora_path")):
        assert load(400, **bad)["error"]["param"] == param, bad
    big = toy_adapter(WORK + "/big.gguf", 1, rank=40)
    # replies do not tell which paths exist, the log does
    open(WORK + "/text.gguf", "w").write("no adapter")
    os.makedirs(WORK + "/locked", exist_ok=True)
    said = {load(400, lora_name="y", lora_path=p)["error"]["message"] for p in (big, "/nowhere", BUILD, WORK + "/text.gguf", WORK + "/locked", "/dev/null")}
    assert len(said) == 1 and "log" in said.pop(), said
    s.wait_line("--max-lora-rank")
    s.wait_line("/nowhere: No such file")
    assert unload(404, lora_name="y")["error"]["type"] == "not_found_error"
    # one that answers with it holds it
    sock = s.socket()
    body = json.dumps({"prompt": PROMPT, "max_tokens": 8000, "model": "x", "ignore_eos": True, "stream": True}).encode()
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer k\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert b"data:" in sock.recv(65536) + sock.recv(65536)
    e = unload(409, lora_name="x")["error"]
    assert "in use" in e["message"] and e["param"] == "lora_name", e
    sock.close()
    while True:  # until the server has seen that the client left
        status, _, reply = s.post("/v1/unload_lora_adapter", {"lora_name": "x"}, headers=key)
        if status == 200:
            break
        assert status == 409, reply
    assert say(model="x") == plain
    load(lora_name="x", lora_path=ADAPTERS[2], scale=0.5)
    other = go(model="x")
    assert other["choices"][0]["text"] not in (plain, first, x)
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # nothing of the one before
    # loaded and unloaded while others answer
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(say(model="first", cache_prompt=False))) for _ in range(6)]
    for t in threads:
        t.start()
    for i in range(12):
        load(lora_name=f"t{i}", lora_path=ADAPTERS[i % 8])
        unload(lora_name=f"t{i}")
    for t in threads:
        t.join()
    assert answers == [first] * 6
    assert s.stop() == 0


try:
    run_tests([v for k, v in sorted(globals().items()) if k.startswith("test_")], None)
finally:
    shutil.rmtree(WORK)
