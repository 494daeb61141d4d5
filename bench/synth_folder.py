#!/usr/bin/env python3
"""Writes a Hugging Face folder with a real model's exact shapes and random weights, compressed as quantisation tools do it.

  synth_folder.py OUT_DIR --quant gptq|awq|fp8|nvfp4|mxfp4|bf16 [--shape qwen3-30b-a3b] [--layers N] [--seed S]

Like synth_gguf.py for GGUF: names, types and sizes of the real files, values of a usual size. Embedding, head, norms and
routers are BF16, as these tools leave them. There is no tokenizer, so run it with token ids. Standard library only.
"""
import argparse
import json
import os
import random
import struct
import sys

from synth_gguf import SHAPES

BANK = 1 << 20  # bytes; repeated from a random place on


def bank(rnd, draw, size):
    """BANK bytes of items of `size` bytes, cycling through 1,021 random ones; no row length is a multiple of that."""
    items = [draw(rnd) for _ in range(1021)]
    data = b"".join(items) * (BANK // (1021 * size) + 1)
    return data[:BANK // size * size]


def bf16(x):
    return struct.pack("<f", x)[2:]


def fp8(rnd):
    """A signed value of a usual size: 0.25 to 3.75."""
    return bytes([rnd.randrange(0x28, 0x47) | rnd.choice((0, 0x80))])


DRAWS = {  # of one item: bytes of it, draw
    "weight": (2, lambda r: bf16(r.gauss(0, 0.02))),
    "norm": (2, lambda r: bf16(1 + r.gauss(0, 0.02))),
    "codes": (4, lambda r: r.randbytes(4)),
    "int4": (4, lambda r: bytes(r.randrange(1, 16) | r.randrange(1, 16) << 4 for _ in range(4))),  # zero is 8: no mean
    "zeros_gptq": (4, lambda r: b"\x77" * 4),
    "zeros_awq": (4, lambda r: b"\x88" * 4),
    "scale_half": (2, lambda r: struct.pack("<e", r.uniform(3e-3, 5e-3))),
    "fp8": (1, fp8),
    "scale_bf16": (2, lambda r: bf16(r.uniform(0.008, 0.012))),
    "scale_fp8": (1, lambda r: bytes([r.randrange(0x30, 0x40)])),
    "scale_one": (4, lambda r: struct.pack("<f", 6e-3)),
    "scale_power": (1, lambda r: bytes([r.choice((119, 120))])),
}
BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "U8": 1, "F8_E4M3": 1}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

CONFIGS = {
    "bf16": None,
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": ["gate"]},
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "mxfp4": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
}


def matrix(quant, name, n_in, n_out):
    """The tensors of one compressed matrix: name, type, shape, bank."""
    groups, blocks = n_in // 128, ((n_out + 127) // 128, (n_in + 127) // 128)
    if quant == "gptq":
        return [(f"{name}.qweight", "I32", (n_in // 8, n_out), "int4"),
                (f"{name}.qzeros", "I32", (groups, n_out // 8), "zeros_gptq"),
                (f"{name}.scales", "F16", (groups, n_out), "scale_half")]
    if quant == "awq":
        return [(f"{name}.qweight", "I32", (n_in, n_out // 8), "int4"),
                (f"{name}.qzeros", "I32", (groups, n_out // 8), "zeros_awq"),
                (f"{name}.scales", "F16", (groups, n_out), "scale_half")]
    if quant == "fp8":
        return [(f"{name}.weight", "F8_E4M3", (n_out, n_in), "fp8"),
                (f"{name}.weight_scale_inv", "BF16", blocks, "scale_bf16")]
    if quant == "nvfp4":
        return [(f"{name}.weight", "U8", (n_out, n_in // 2), "codes"),
                (f"{name}.weight_scale", "F8_E4M3", (n_out, n_in // 16), "scale_fp8"),
                (f"{name}.weight_scale_2", "F32", (1,), "scale_one")]
    if quant == "mxfp4":
        return [(f"{name}.weight_packed", "U8", (n_out, n_in // 2), "codes"),
                (f"{name}.weight_scale", "U8", (n_out, n_in // 32), "scale_power")]
    return [(f"{name}.weight", "BF16", (n_out, n_in), "weight")]


def tensors_of(quant, shape, layers):
    arch, n, embd, heads, kv_heads, dim, ff, vocab, experts, _, expert_ff, _, _ = SHAPES[shape]
    out = [("model.embed_tokens.weight", "BF16", (vocab, embd), "weight"), ("model.norm.weight", "BF16", (embd,), "norm"),
           ("lm_head.weight", "BF16", (vocab, embd), "weight")]
    for i in range(layers or n):
        at = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out.append((f"{at}.{norm}.weight", "BF16", (embd,), "norm"))
        for norm in ("q_norm", "k_norm") if arch.startswith("qwen3") else ():
            out.append((f"{at}.self_attn.{norm}.weight", "BF16", (dim,), "norm"))
        for name, n_in, n_out in zip(ATTENTION, (embd, embd, embd, heads * dim),
                                     (heads * dim, kv_heads * dim, kv_heads * dim, embd)):
            out += matrix(quant, f"{at}.self_attn.{name}", n_in, n_out)
        if experts:
            out.append((f"{at}.mlp.gate.weight", "BF16", (experts, embd), "weight"))
        mlps = [(f"{at}.mlp.experts.{e}", expert_ff) for e in range(experts)] if experts else [(f"{at}.mlp", ff)]
        for mlp, width in mlps:
            out += matrix(quant, f"{mlp}.gate_proj", embd, width)
            out += matrix(quant, f"{mlp}.up_proj", embd, width)
            out += matrix(quant, f"{mlp}.down_proj", width, embd)
    return out


def config_of(quant, shape, layers):
    arch, n, embd, heads, kv_heads, dim, ff, vocab, experts, used, expert_ff, base, eps = SHAPES[shape]
    kinds = {"qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"), "qwen3": ("Qwen3ForCausalLM", "qwen3"),
             "llama": ("LlamaForCausalLM", "llama")}
    c = {"architectures": [kinds[arch][0]], "model_type": kinds[arch][1], "hidden_size": embd, "head_dim": dim,
         "num_hidden_layers": layers or n, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
         "intermediate_size": ff, "vocab_size": vocab, "rope_theta": base, "rms_norm_eps": eps, "hidden_act": "silu",
         "max_position_embeddings": 40960, "tie_word_embeddings": False, "attention_bias": False}
    if experts:
        c.update(num_experts=experts, num_experts_per_tok=used, moe_intermediate_size=expert_ff, norm_topk_prob=True,
                 decoder_sparse_step=1, mlp_only_layers=[])
    if CONFIGS[quant]:
        c["quantization_config"] = CONFIGS[quant]
    return c


def n_bytes(kind, dims):
    n = BYTES[kind]
    for d in dims:
        n *= d
    return n


def write(path, tensors, rnd):
    banks = {name: (bank(rnd, draw, size), size) for name, (size, draw) in DRAWS.items()}
    # the bank is larger than any router, so no two experts are alike
    banks["router"] = (b"".join(bf16(rnd.gauss(0, 0.02)) for _ in range(1 << 19)), 2)
    head, at = {}, 0
    for name, kind, dims, _ in tensors:
        size = n_bytes(kind, dims)
        head[name] = {"dtype": kind, "shape": list(dims), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name, kind, dims, which in tensors:
            data, item = banks["router" if name.endswith("mlp.gate.weight") else which]
            left, cut = n_bytes(kind, dims), rnd.randrange(len(data) // item) * item
            while left > 0:
                piece = data[cut:cut + left]
                f.write(piece)
                left, cut = left - len(piece), 0
    return at


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out")
    ap.add_argument("--quant", choices=CONFIGS, required=True)
    ap.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    ap.add_argument("--layers", type=int, help="fewer than the real model has")
    ap.add_argument("--seed", type=int, default=1)
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)
    with open(os.path.join(a.out, "config.json"), "w") as f:
        json.dump(config_of(a.quant, a.shape, a.layers), f, indent=1)
    tensors = tensors_of(a.quant, a.shape, a.layers)
    total = write(os.path.join(a.out, "model.safetensors"), tensors, random.Random(a.seed))
    print(f"{a.out}: {len(tensors)} tensors, {total / 1e9:.2f} GB", file=sys.stderr)


if __name__ == "__main__":
    main()
