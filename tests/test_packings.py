#!/usr/bin/env python3
"""Folders whose matrices are packed the way each tool does it: the small golden models, rewritten by packings.py, give the
logits of the same values as plain floats, with the reference kernels, with the default ones, and converted to GGUF. What
is not read is refused in one line that names the field or the tensor."""
import array
import json
import os
import random
import re
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
        config["quantization_config"] = quant
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
    gguf = os.path.join(TMP, "out.gguf")
    ok("convert", a, gguf, "--force")
    c = mean_kl(want, logits(gguf, ids))
    ok("plan", a)
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


for part in (stacked_experts, experts_apart, by_head, no_numbers):
    part()
