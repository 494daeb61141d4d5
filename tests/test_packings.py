#!/usr/bin/env python3
"""Folders whose matrices are packed the way each tool does it: the small golden models, rewritten by packings.py, give the
logits of the same values as plain floats, with the reference kernels, with the default ones, and converted to GGUF. What
is not read is refused in one line that names the field or the tensor."""
import array
import atexit
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

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import packings as pk  # noqa
from gguf_tools import max_difference, mean_kl, read_logits, read_safetensors, write_safetensors  # noqa

STEEL = os.path.join(sys.argv[1] if len(sys.argv) > 1 else "build", "steel")
ONLY = sys.argv[2] if len(sys.argv) > 2 else ""
MICRO = "tests/golden"
TMP = tempfile.mkdtemp(prefix="steel-packings-")
atexit.register(shutil.rmtree, TMP, ignore_errors=True)


def steel(*args, **env):
    return subprocess.run([STEEL, *map(str, args)], capture_output=True, text=True, errors="replace",
                          env={**os.environ, **env})


def ok(*args, **env):
    r = steel(*args, **env)
    assert r.returncode == 0, (args, r.stderr)
    return r


def rows_of(tensor):
    """The matrices of a BF16 tensor, as rows of floats."""
    kind, shape, raw = tensor
    assert kind == "BF16", kind
    x = array.array("f", array.array("I", [h << 16 for h in array.array("H", raw)]).tobytes())
    n, m = shape[-2:]
    return [[list(x[(k * n + i) * m:(k * n + i + 1) * m]) for i in range(n)] for k in range(len(x) // (n * m))]


def turned(rows):
    return [list(c) for c in zip(*rows)]


def plain(matrices, shape):
    return ("F32", shape, array.array("f", [x for rows in matrices for r in rows for x in r]).tobytes())


def write(name, model, tensors, quant):
    folder = os.path.join(TMP, name)
    os.makedirs(folder, exist_ok=True)
    config = json.load(open(f"{MICRO}/{model}/config.json"))
    if quant:
        where = config["text_config"] if name.startswith("text_config") else config
        where["quantization_config"] = quant
        if "quant_method" not in quant and "bits" in quant:
            config["quantization"] = quant  # as MLX does
    json.dump(config, open(folder + "/config.json", "w"))
    write_safetensors(folder + "/model.safetensors", tensors)
    return folder


def logits(model, ids, isa="ref"):
    out = os.path.join(TMP, "logits.bin")
    ok("logits", model, "--ids", ids, "--out", out, "--kv-type", "f32", **({"STEEL_ISA": isa} if isa else {}))
    return read_logits(out)


def short_ids(model, n=24):
    """The first ids of the golden text."""
    raw = open(f"{MICRO}/{model}/golden.bin", "rb").read()
    t = min(n, struct.unpack_from("<i", raw)[0])
    path = os.path.join(TMP, "ids.bin")
    open(path, "wb").write(struct.pack("<ii", t, 0) + raw[8:8 + 4 * t])
    return path


def plans(folder):
    """Its memory is counted, of one rank and of two."""
    ok("plan", folder)
    ok("plan", folder, "--tp", "2")


def same(name, model, packed, values, quant, bound=2e-4, loose=5e-2):
    """Packed tensors beside the values they stand for, written plainly: one model. loose: mean KL of the default
    kernels and of what a GGUF rounds to halves, which with random weights may choose other experts."""
    if ONLY and ONLY not in name:
        return
    ids = short_ids(model)
    a = write(name, model, packed, quant)
    want = logits(write("plain", model, values, None), ids)
    d = max_difference(logits(a, ids), want)
    kl = mean_kl(want, logits(a, ids, None))
    plans(a)
    gguf = os.path.join(TMP, "out.gguf")
    ok("convert", a, gguf, "--force")
    c = mean_kl(want, logits(gguf, ids))
    print(f"{name:44} {d:.1e}, default kernels KL {kl:.1e}, converted {c:.1e}")
    assert d < bound and kl < loose and c < loose, (name, d, kl, c)


def rewritten(name, model, pattern, pack, quant, **kw):
    """Every matrix whose name fits becomes what pack(rows) makes of it."""
    packed, values = {}, {}
    for key, t in read_safetensors(f"{MICRO}/{model}/model.safetensors").items():
        if not re.search(pattern, key):
            packed[key] = values[key] = t
            continue
        tensors, out = pack(rows_of(t)[0])
        base = key[:-len("weight")]
        packed.update({base + suffix: x for suffix, x in tensors.items()})
        values[key] = plain([out], t[1])
    same(name, model, packed, values, quant, **kw)


def join(name, suffix):
    """A tensor beside a stack of experts, as ModelOpt calls it; the stack itself has no suffix."""
    return name if suffix == "weight" else name + "_" + suffix


def stacked_experts():
    """Experts in one tensor each, packed."""
    # Qwen3.5's: rows are outputs. Its small model has them apart.
    t = read_safetensors(f"{MICRO}/qwen3_5_moe/model.safetensors")
    fused = {}
    for key in [k for k in t if "experts.0.gate_proj" in k]:
        base = key[:key.index("experts.") + 8]
        get = lambda e, p: rows_of(t.pop(f"{base}{e}.{p}_proj.weight"))[0]  # noqa
        n = sum(k.startswith(base) and k.endswith("gate_proj.weight") for k in t)
        fused[base + "gate_up_proj"] = [get(e, "gate") + get(e, "up") for e in range(n)]
        fused[base + "down_proj"] = [get(e, "down") for e in range(n)]

    def qwen(name, quant, pack, names=lambda s: s, only=None, stacking=pk.stack):
        packed, values = dict(t), dict(t)
        for key, matrices in fused.items():
            done = [pack(m) for m in matrices]
            shape = [len(matrices), len(matrices[0]), len(matrices[0][0])]
            if only and only not in key:
                packed[key] = values[key] = plain(matrices, shape)
                continue
            values[key] = plain([out for _, out in done], shape)
            for suffix, x in stacking([tensors for tensors, _ in done]).items():
                packed[join(key, names(suffix))] = x
        same(name, "qwen3_5_moe", packed, values, quant)

    modelopt = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    qwen("stacked nvfp4, modelopt", modelopt, pk.nvfp4, only="gate_up")  # rows of down are 32 long
    qwen("stacked nvfp4, short names", modelopt, pk.nvfp4, lambda s: s.replace("weight_", ""), only="gate_up")

    def one_number(parts):
        out = pk.stack(parts)
        out["weight_scale_2"] = parts[0]["weight_scale_2"]
        return out
    qwen("stacked nvfp4, one number for all", modelopt, lambda m: pk.nvfp4(m, glob=1e-4), only="gate_up", stacking=one_number)
    qwen("stacked nvfp4, compressed-tensors", {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
         lambda m: pk.nvfp4(m, False), only="gate_up")
    blocks = {"quant_method": "fp8", "weight_block_size": [16, 128]}
    qwen("stacked fp8, blocks", blocks, lambda m: pk.fp8(m, (16, 128)), lambda s: s.replace("weight_", ""))
    qwen("stacked fp8, channels", {"quant_method": "modelopt", "quant_algo": "FP8"},
         lambda m: pk.fp8(m, (1, 0), "weight_scale"))
    qwen("stacked fp8, one of gate and one of up", {"quant_method": "fp8"},
         lambda m: pk.fp8(m, (32, 0)), lambda s: s.replace("weight_", ""), only="gate_up")
    qwen("stacked int4", {"quant_method": "compressed-tensors", "format": "pack-quantized"}, pk.ct_int)
    qwen("stacked int4, zero points", {"quant_method": "compressed-tensors", "format": "pack-quantized"},
         lambda m: pk.ct_int(m, symmetric=False))
    qwen("stacked mxfp4", {"quant_method": "modelopt"}, lambda m: pk.mxfp4(m, "weight"))

    # gpt-oss's: columns are outputs, and stay so where ModelOpt packs them.
    t = read_safetensors(f"{MICRO}/gpt_oss/model.safetensors")

    def oss(name, quant, pack, across):
        packed, values = dict(t), dict(t)
        for key in [k for k in t if re.search(r"experts\.(gate_up|down)_proj$", k)]:
            done = [pack(turned(m)) for m in rows_of(packed.pop(key))]
            values[key] = plain([turned(out) for _, out in done], t[key][1])
            for suffix, x in pk.stack([tensors for tensors, _ in done], across).items():
                if suffix in ("weight_scale_2", "input_scale") or not x[1][1:]:
                    x = (x[0], [], x[2][:4])
                packed[join(key, suffix)] = x
        same(name, "gpt_oss", packed, values, quant, bound=1e-3)
    oss("transposed nvfp4", modelopt, lambda m: pk.nvfp4(m, glob=1e-4), ("weight", "weight_scale"))
    one = {"quant_method": "modelopt", "quant_algo": "FP8"}
    oss("transposed fp8, channels", one, lambda m: pk.fp8(m, (1, 0), "weight_scale", flat=True), ("weight",))


def experts_apart():
    """Gemma 4's experts, which tools that pack them write one by one."""
    t = read_safetensors(f"{MICRO}/gemma4_moe/model.safetensors")
    for kind, pack in (("fp8", lambda m: pk.fp8(m, (1, 0), "weight_scale")), ("nvfp4", lambda m: pk.nvfp4(m, False))):
        packed, values = dict(t), dict(t)
        for key in [k for k in t if re.search(r"experts\.(gate_up|down)_proj$", k)]:
            base, matrices, out = key[:key.index("experts.") + 8], rows_of(packed.pop(key)), []
            for e, m in enumerate(matrices):
                half, line = len(m) // 2, []
                for proj, part in (("gate", m[:half]), ("up", m[half:])) if "gate_up" in key else (("down", m),):
                    short = len(part[0]) % 64 != 0 and kind == "nvfp4"
                    tensors, x = ({"weight": plain([part], [len(part), len(part[0])])}, part) if short else pack(part)
                    packed.update({f"{base}{e}.{proj}_proj.{s}": v for s, v in tensors.items()})
                    line += x
                out.append(line)
            values[key] = plain(out, t[key][1])
        same(f"gemma4 experts apart, {kind}", "gemma4_moe", packed, values, {"quant_method": "compressed-tensors"})


    # gpt-oss's, gate and up apart, one by one and stacked
    t = read_safetensors(f"{MICRO}/gpt_oss/model.safetensors")
    for each in (True, False):
        packed = dict(t)
        for key in [k for k in t if re.search(r"experts\.(gate_up|down)_proj$", k)]:
            base, (_, (n, wide), bias) = key.rsplit(".", 1)[0], packed.pop(key + "_bias")
            matrices = [turned(m) for m in rows_of(packed.pop(key))]
            rows_bias = rows_of(("BF16", [n, wide], bias))[0]
            for first, proj in ((0, "gate"), (1, "up")) if "gate_up" in key else ((0, "down"),):
                step = 2 if "gate_up" in key else 1
                part = [m[first::step] for m in matrices]
                side = [r[first::step] for r in rows_bias]
                for e in range(n) if each else ():
                    packed[f"{base}.{e}.{proj}_proj.weight"] = plain([part[e]], [len(part[e]), len(part[e][0])])
                    packed[f"{base}.{e}.{proj}_proj.bias"] = plain([[side[e]]], [len(side[e])])
                if not each:
                    packed[f"{base}.{proj}_proj.weight"] = plain(part, [n, len(part[0]), len(part[0][0])])
                    packed[f"{base}.{proj}_proj.bias"] = plain([side], [n, len(side[0])])
        same(f"gpt-oss gate and up apart, {'each' if each else 'stacked'}", "gpt_oss", packed, t, None)
    # MLX stacks experts
    t = read_safetensors(f"{MICRO}/qwen3moe/model.safetensors")
    packed, values = dict(t), dict(t)
    for key in [k for k in t if "experts.0." in k]:
        base, proj = key.split("experts.0.")
        all_of = []
        for e in range(sum(k.startswith(base + "experts.") and k.endswith("." + proj) for k in t)):
            name = f"{base}experts.{e}.{proj}"
            tensors, x = pk.mlx(rows_of(packed.pop(name))[0])
            values[name] = plain([x], t[name][1])
            all_of.append(tensors)
        for s, (kind, shape, _) in all_of[0].items():
            packed[f"{base}switch_mlp.{proj[:-len('weight')]}{s}"] = (kind, [len(all_of), *shape], b"".join(a[s][2] for a in all_of))
    same("mlx, stacked experts", "qwen3moe", packed, values, {"group_size": 32, "bits": 4})
    # gpt-oss's, gate and up rows in turn, as Quark writes them
    t = read_safetensors(f"{MICRO}/gpt_oss/model.safetensors")
    packed, values = dict(t), dict(t)
    for key in [k for k in t if re.search(r"experts\.(gate_up|down)_proj$", k)]:
        base, proj = key.rsplit(".", 1)
        bias = packed.pop(key + "_bias")
        wide = len(bias[2]) // bias[1][0]
        out = []
        for e, m in enumerate(rows_of(packed.pop(key))):
            tensors, x = pk.mxfp4(turned(m), "weight")
            packed.update({f"{base}.{e}.{proj}.{s}": v for s, v in tensors.items()})
            packed[f"{base}.{e}.{proj}.bias"] = ("BF16", bias[1][1:], bias[2][e * wide:(e + 1) * wide])
            out.append(turned(x))
        values[key] = plain(out, t[key][1])
    same("gpt-oss experts apart, mxfp4", "gpt_oss", packed, values, {"quant_method": "quark"}, bound=1e-3)


def by_head():
    """Qwen3-Next's projections, whose rows lie by head."""
    rnd = random.Random(1)
    ct = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    for name, quant, pack in (
            ("fp8, blocks", {"quant_method": "fp8", "weight_block_size": [32, 128]}, lambda m: pk.fp8(m, (32, 128))),
            ("fp8, channels", {"quant_method": "modelopt"}, lambda m: pk.fp8(m, (1, 0), "weight_scale")),
            ("nvfp4", {"quant_method": "modelopt"}, pk.nvfp4),
            ("mxfp4", {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}, pk.mxfp4),
            ("int4", ct, lambda m: pk.ct_int(m, symmetric=False)),
            ("int4, ordered", ct, lambda m: pk.ct_int(m, order=True, rnd=rnd)),
            ("gptq", gptq, pk.gptq), ("gptq, ordered", gptq, lambda m: pk.gptq(m, order=True, rnd=rnd)),
            ("awq", {"quant_method": "awq", "bits": 4, "group_size": 32}, pk.awq)):
        rewritten("by head, " + name, "qwen3_next", r"in_proj_(qkvz|ba)\.weight", pack, quant)


MATRICES = r"layers\.\d+\..*(q|k|v|o|gate|up|down)_proj\.weight$"


def every_tool():
    """Every matrix of the layers, in each tool's packing; the config as published folders have it."""
    rnd = random.Random(2)
    moe = "qwen3moe"

    def ct(fmt, **weights):
        return {"quant_method": "compressed-tensors", "format": fmt, "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"], "kv_cache_scheme": None}

    def case(name, quant, pack, pattern=MATRICES, model=moe, **kw):
        rewritten(name, model, pattern, pack, quant, **kw)
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    case("gptq, no g_idx", gptq, lambda m: pk.gptq(m, order=None))
    case("gptq, asymmetric", {**gptq, "sym": False}, lambda m: pk.gptq(m, symmetric=False))
    case("gptq, desc_act", {**gptq, "desc_act": True}, lambda m: pk.gptq(m, order=True, rnd=rnd))
    case("gptq v2", {**gptq, "checkpoint_format": "gptq_v2"}, lambda m: pk.gptq(m, v2=True))
    case("gptq, other groups by module", {**gptq, "dynamic": {"+:.*": {"group_size": 16}}},
         lambda m: pk.gptq(m, length=16 if len(m) > 64 else 32))
    case("gptq, 8 bits", {**gptq, "bits": 8}, lambda m: pk.gptq(m, 8))
    case("gptq, 8 bits by row", {**gptq, "bits": 8, "group_size": -1}, lambda m: pk.gptq(m, 8, -1, order=None))
    case("gptq, the head too", {**gptq, "lm_head": True}, pk.gptq, r"(_proj|lm_head)\.weight$")
    case("auto-round", {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32,
                        "sym": True, "extra_config": {"model.layers.0.self_attn.q_proj": {"bits": 16}}},
         pk.gptq, r"layers\.\d+\..*(k|v|o|gate|up|down)_proj\.weight$")
    case("auto-round, awq", {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4,
                             "group_size": 32}, pk.awq)
    case("awq", {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, pk.awq)
    for length in (32, 64):
        case(f"int4, groups of {length}", ct("pack-quantized", num_bits=4, type="int", group_size=length),
             lambda m: pk.ct_int(m, length=min(length, len(m[0]))))
    case("int4, channels", ct("pack-quantized", num_bits=4, type="int", strategy="channel"),
         lambda m: pk.ct_int(m, length=-1))
    case("int4, asymmetric", ct("pack-quantized", num_bits=4, symmetric=False), lambda m: pk.ct_int(m, symmetric=False))
    case("int4, actorder", ct("pack-quantized", num_bits=4, actorder="group"), lambda m: pk.ct_int(m, order=True, rnd=rnd))
    case("int8, packed", ct("pack-quantized", num_bits=8), lambda m: pk.ct_int(m, 8))
    case("int8, channels", ct("int-quantized", num_bits=8, strategy="channel"), pk.int8)
    case("int8, bitsandbytes", {"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb8)
    bnb = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    case("nf4, bitsandbytes", bnb, bnb4)
    case("nf4, bitsandbytes, plain scales", bnb, lambda m: bnb4(m, nested=False))
    case("fp4, bitsandbytes", bnb, lambda m: bnb4(m, "fp4"))
    case("nf4, the head too, by head", bnb, bnb4, r"(in_proj_qkvz|lm_head)\.weight$", "qwen3_next")
    case("fp8, dynamic", ct("float-quantized", num_bits=8, type="float", strategy="channel"),
         lambda m: pk.fp8(m, (1, 0), "weight_scale", "BF16"))
    case("fp8, static", ct("float-quantized", num_bits=8, type="float", strategy="tensor"), fp8_static)
    case("fp8, blocks, compressed-tensors", ct("float-quantized", num_bits=8, strategy="block", block_structure=[16, 128]),
         lambda m: pk.fp8(m, (16, 128), "weight_scale"))
    case("fp8, deepseek", {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
         lambda m: pk.fp8(m, (128, 128)))
    case("fp8, modelopt", {"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_static)
    case("fp8, modelopt, blocks", {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, fp8_apart)
    case("fp8, fbgemm", {"quant_method": "fbgemm_fp8"}, lambda m: pk.fp8(m, (1, 0), "weight_scale"))
    case("fp8, quark", {"quant_method": "quark"}, fp8_static)
    # adjacent rotary pairs of half a head: rows and their scales change places
    case("awq, glm4", {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, pk.awq, model="glm4")
    case("fp8, dynamic, glm4", ct("float-quantized", num_bits=8, type="float", strategy="channel"),
         lambda m: pk.fp8(m, (1, 0), "weight_scale", "BF16"), model="glm4")
    case("nf4, glm4", bnb, bnb4, model="glm4")
    case("int8, channels, ernie", ct("int-quantized", num_bits=8, strategy="channel"), pk.int8, model="ernie4_5")
    wide = r"layers\.\d+\..*(q|k|v|o|gate|up)_proj\.weight$"  # rows of 64 and more
    case("nvfp4a16", ct("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16), lambda m: pk.nvfp4(m, False), wide)
    case("nvfp4, the head too", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, pk.nvfp4, wide[:-2].replace(
        "layers", "(lm_head|layers", 1).replace("\\.weight", "") + r")\.weight$")
    case("mxfp4", ct("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32), pk.mxfp4)
    case("mxfp4, quark", {"quant_method": "quark"}, lambda m: pk.mxfp4(m, "weight"))
    case("awq, gemv", {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv", "zero_point": True}, pk.awq_gemv)
    case("awq, gemv_fast", {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv_fast", "zero_point": True},
         pk.awq_gemv_fast, r"(q|o|gate|up)_proj\.weight$")
    quant = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 32, "axis": 1}}}
    for bits in (1, 2, 3, 4):
        case(f"hqq, {bits} bits", quant, lambda m: pk.hqq(m, bits), r"layers\.\d+\..*_proj\.weight$")
    case("hqq, 8 bits", quant, halves(lambda m: pk.hqq(m, 8, least=float)))
    case("hqq, groups across rows", quant, halves(lambda m: pk.hqq(m, 4, 32, 0, "F32", float)))
    case("hqq, glm4", quant, lambda m: pk.hqq(m, 4, 64, kind="BF16"), model="glm4")
    ao = lambda kind: {"quant_method": "torchao", "quant_type": {"default": {"_type": kind}}}  # noqa
    case("torchao, int4", ao("Int4WeightOnlyConfig"), pk.ao_int4)
    case("torchao, int8", ao("Int8WeightOnlyConfig"), pk.ao_int8)
    case("torchao, int4 in bytes", ao("Int8DynamicActivationIntxWeightConfig"), lambda m: pk.ao_int8(m, 32, 4, False))
    case("torchao, fp8", ao("Float8WeightOnlyConfig"), pk.ao_fp8)
    case("torchao, fp8, one scale", ao("Float8WeightOnlyConfig"), lambda m: pk.ao_fp8(m, (len(m), 0)))
    for bits in (2, 3, 4, 5):
        case(f"mlx, {bits} bits, the ends too", {"group_size": 32, "bits": bits}, lambda m: pk.mlx(m, bits),
             r"(_proj|lm_head|embed_tokens)\.weight$")
    for bits in (6, 8):
        case(f"mlx, {bits} bits", {"group_size": 32, "bits": bits, "mode": "affine"}, halves(lambda m: pk.mlx(m, bits)))
    case("mlx, glm4", {"group_size": 32, "bits": 4}, lambda m: pk.mlx(m, kind="F16"), model="glm4")
    case("mlx, mxfp4", {"group_size": 32, "bits": 4, "mode": "mxfp4"}, pk.mlx_mxfp4)
    case("mlx, mxfp8", {"group_size": 32, "bits": 8, "mode": "mxfp8"}, pk.mlx_mxfp8)
    case("mlx, nvfp4", {"group_size": 16, "bits": 4, "mode": "nvfp4"}, pk.mlx_nvfp4, wide)
    case("mxfp8", ct("mxfp8-quantized", num_bits=8, type="float", group_size=32), pk.mxfp8)
    case("mxfp8, modelopt", {"quant_method": "modelopt", "quant_algo": "MXFP8"}, lambda m: pk.mxfp8(m, "F8_E8M0"))
    v4 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    case("fp4 and fp8, deepseek v4", v4, lambda m: (pk.deepseek_fp4 if len(m) == 24 else pk.deepseek_fp8)(m),
         r"(experts\.\d+\.w[13]|wq_a|wq_b|wkv|wo_a|wo_b)\.weight$", model="deepseek_v4")
    case("bitnet", {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}, pk.ternary,
         model="bitnet")
    case("bitnet, a scale that divides", {"quant_method": "bitnet", "linear_class": "bitlinear"}, lambda m: pk.ternary(m, True),
         model="bitnet")


def around():
    """Where the config is, what else is packed, and what is beside it that counts for others alone."""
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    rewritten("text_config has it", "qwen3_5_moe", MATRICES, pk.gptq, gptq)
    ct = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    rewritten("one row, and four", "qwen3_5_moe", r"(shared_expert_gate|in_proj_a)\.weight$",
              lambda m: pk.ct_int(m, symmetric=False), ct)
    rewritten("the embedding", "qwen3moe", r"embed_tokens\.weight$", pk.nvfp4, {"quant_method": "modelopt"})
    one = ("F32", [], struct.pack("<f", 0.5))
    beside = {s: one for s in ("k_scale", "v_scale", "output_scale", "input_scale_ub", "k_zero_point")}
    rewritten("scales of caches", "qwen3moe", r"(k|v)_proj\.weight$",
              lambda m: ({**fp8_static(m)[0], **beside}, fp8_static(m)[1]), None)


def halves(pack):
    """Values that are kept as fp16."""
    def do(m):
        tensors, out = pack(m)
        return tensors, [[pk.f16(x) for x in r] for r in out]
    return do


def bnb4(m, *args, **kw):
    """Rows of whole blocks keep their values, others keep them as fp16."""
    tensors, out = pk.bnb4(m, *args, **kw)
    return tensors, out if len(m[0]) % 64 == 0 else [[pk.f16(x) for x in r] for r in out]


def bnb8(m):
    tensors, _ = pk.int8(m)
    scb, scales = pk.floats("F32", [len(m)], [pk.amax([r]) for r in m])
    codes = array.array("b", [round(127 * x / s) for r, s in zip(m, scales) for x in r])
    n = len(m[0])
    out = [[c * pk.f16(s / 127) for c in codes[i * n:(i + 1) * n]] for i, s in enumerate(scales)]  # scales are kept as halves
    return {"weight": ("I8", [len(m), n], codes.tobytes()), "SCB": scb, "weight_format": ("U8", [], b"\0")}, out


def fp8_static(m):
    tensors, out = pk.fp8(m, None, "weight_scale")
    one = ("F32", [], struct.pack("<f", 0.5))
    return {**tensors, "input_scale": one}, out


def fp8_apart(m):
    tensors, out = pk.fp8(m, (128, 128), "weight_scale")
    kind, (a, b), raw = tensors["weight_scale"]
    return {**tensors, "weight_scale": (kind, [a, 1, b, 1], raw)}, out


def refused(what, folder, command="logits", **env):
    """One line that has `what` in it, nothing else."""
    args = {"logits": ["logits", folder, "--ids", os.path.join(TMP, "ids.bin"), "--out", os.path.join(TMP, "logits.bin")],
            "convert": ["convert", folder, os.path.join(TMP, "out.gguf"), "--force"]}[command]
    r = steel(*args, **env)
    lines = [line for line in r.stderr.splitlines() if not line.startswith("steel: note:")]
    assert r.returncode == 1 and len(lines) == 1 and what in lines[0], (folder, r.returncode, r.stderr)


def no_numbers():
    """FP8 has codes that are no numbers: a file with one is refused, whatever computes."""
    t = read_safetensors(f"{MICRO}/qwen3_next/model.safetensors")
    short_ids("qwen3_next")
    for part in ("lm_head.weight", "layers.0.mlp.experts.3.up_proj.weight", "layers.0.linear_attn.in_proj_qkvz.weight"):
        key = next(k for k in t if k.endswith(part))
        for code, at in ((0x7F, 5), (0xFF, -1)):
            packed = dict(t)
            for k in t:  # experts are packed alike
                if k == key or ("experts." in part and re.search(r"layers.0.mlp.experts.\d+.up_proj", k)):
                    tensors = pk.fp8(rows_of(t[k])[0], (1, 0), "weight_scale")[0]
                    packed.update({k[:-len("weight")] + s: x for s, x in tensors.items()})
            raw = bytearray(packed[key][2])
            raw[at] = code
            packed[key] = (*packed[key][:2], bytes(raw))
            folder = write("nan", "qwen3_next", packed, {"quant_method": "modelopt"})
            what = f"tensor {key}: entry {at % len(raw)}: FP8 code 0x{code:02x} is not a number"
            refused(what, folder)
            refused(what, folder, STEEL_ISA="ref")
            refused("is not finite", folder, "convert")


def not_read():
    """One line that names the field, or the tensor."""
    t = read_safetensors(f"{MICRO}/qwen3moe/model.safetensors")
    short_ids("qwen3moe")

    def case(what, quant, pack=None):
        packed = dict(t)
        for key in [k for k in t if re.search(MATRICES, k)] if pack else ():
            del packed[key]
            packed.update({key[:-len("weight")] + s: x for s, x in pack(rows_of(t[key])[0]).items()})
        folder = write("not-read", "qwen3moe", packed, quant)
        refused(what, folder)
        refused(what, folder, "convert")
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    ct = {"quant_method": "compressed-tensors"}
    for bits in (2, 3):
        case(f"GPTQ with {bits} bits", {**gptq, "bits": bits})
    case("AWQ with 8 bits", {**gptq, "quant_method": "awq", "bits": 8})
    case('version "marlin"', {**gptq, "quant_method": "awq", "version": "marlin"})
    case('checkpoint_format "marlin"', {**gptq, "checkpoint_format": "marlin"})
    case("qzeros: entry", {**gptq, "bits": 8}, lambda m: pk.gptq(m, 8, symmetric=False)[0])
    case("g_idx: 8 bits", {**gptq, "bits": 8}, lambda m: pk.gptq(m, 8, order=True, rnd=random.Random(3))[0])
    case('packing_format "auto_round:exllamav2"', {**gptq, "quant_method": "auto-round",
                                                   "packing_format": "auto_round:exllamav2"})
    case('format "marlin-24"', {**ct, "format": "marlin-24"})
    case('sparsity_config.format "sparse-24-bitmask"', {**ct, "sparsity_config": {"format": "sparse-24-bitmask"}})
    case('transform_config "u"', {**ct, "transform_config": {"config_groups": {"u": {}}}})
    case("weight_zero_point: 8 bits", {**ct, "format": "pack-quantized"}, lambda m: pk.ct_int(m, 8, symmetric=False)[0])
    case("pre_quant_scale: scaled", {"quant_method": "modelopt"},
         lambda m: {**fp8_static(m)[0], "pre_quant_scale": pk.floats("F32", [len(m[0])], [1] * len(m[0]))[0]})
    def but(pack, suffix, tensor):
        def do(m):
            return {**pack(m)[0], suffix: tensor(m) if callable(tensor) else tensor}
        return do
    hqq = {"quant_method": "hqq", "quant_config": {}}
    case("quant_scale is set", hqq, but(pk.hqq, "quant_scale", ("U8", [], b"\1")))
    case("nbits 6", hqq, but(pk.hqq, "nbits", ("I32", [], struct.pack("<i", 6))))
    case('packing "4bit_32"', hqq, but(pk.hqq, "packing", ("U8", [7], b"4bit_32")))
    case("groups of 16", hqq, lambda m: pk.hqq(m, 4, 16)[0])
    case("bytes, expected", hqq, but(pk.hqq, "W_q", ("U8", [4], bytes(4))))
    case("entries for", hqq, but(pk.hqq, "zero", ("F16", [1], bytes(2))))
    case("is not a valid scale", hqq, but(pk.hqq, "scale", lambda m: ("F32", [len(m) * len(m[0]) // 32, 1], struct.pack("<f", math.inf) * (len(m) * len(m[0]) // 32))))
    ao = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}
    case("only torchao's Int4Tensor (plain packing)", ao, lambda m: ({"_weight_qdata": ("I32", [1, 1, 32, 4], bytes(512)), "_weight_scale_and_zero": ("BF16", [1], bytes(2))}))
    case("scaled or split inputs", ao, but(pk.ao_int4, "_weight_act_pre_scale", ("F32", [1], bytes(4))))
    case("its _weight_zero_point is missing", ao, lambda m: {k: v for k, v in pk.ao_int4(m)[0].items() if "point" not in k})
    case("more than 8 bits", ao, but(lambda m: pk.ao_int8(m, 32, 8, False), "_weight_zero_point",
                                     lambda m: ("I8", [len(m), len(m[0]) // 32], b"\x80" * (len(m) * len(m[0]) // 32))))
    for method in ("aqlm", "higgs", "eetq", "nvfp4"):
        case(f'quant_method "{method}"', {"quant_method": method})
    case("quant_method: missing", {"group_size": 64})
    mlx = {"group_size": 32, "bits": 4}
    case('quantization.mode "mxfp2"', {**mlx, "mode": "mxfp2"})
    case("its biases is missing", mlx, lambda m: {k: v for k, v in pk.mlx(m)[0].items() if k != "biases"})
    case("bits in groups of", mlx, lambda m: pk.mlx(m, length=16)[0])
    case('linear_class "x"', {"quant_method": "bitnet", "linear_class": "x"})
    case('quantization_mode "online"', {"quant_method": "bitnet", "quantization_mode": "online"})
    case("no ternary weight", {"quant_method": "bitnet"}, lambda m: {
        **pk.ternary(m)[0], "weight": ("U8", [len(m) // 4, len(m[0])], b"\xff" * (len(m) // 4 * len(m[0])))})
    case("is not a valid scale", {"quant_method": "modelopt"}, lambda m: {
        **pk.mxfp8(m)[0], "weight_scale": ("U8", [len(m), len(m[0]) // 32], b"\xff" * (len(m) * len(m[0]) // 32))})


for part in (stacked_experts, experts_apart, by_head, every_tool, around, not_read, no_numbers):
    part()
