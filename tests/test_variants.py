#!/usr/bin/env python3
"""Families and file variants against oracle.py: RoPE scalings, windows, mixed dense and sparse layers,
top-k with and without renormalisation, GPTQ in all its forms, old and new config names."""
import array, math, os, random, struct, subprocess, sys, tempfile

sys.path.insert(0, os.path.dirname(__file__))
import oracle

STEEL = os.path.join(sys.argv[1] if len(sys.argv) > 1 else "build", "steel")
BASE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "intermediate_size": 96, "vocab_size": 48, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256, "rope_theta": 10000.0, "tie_word_embeddings": False}
MOE = {**BASE, "model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2,
       "moe_intermediate_size": 32, "norm_topk_prob": True}


def write_ids(path, ids, vocab):
    with open(path, "wb") as f:
        f.write(struct.pack(f"<ii{len(ids)}i", len(ids), vocab, *ids))


def run(folder, ids, isa, args=()):
    ids_path, out = os.path.join(folder, "ids.bin"), os.path.join(folder, "out.bin")
    write_ids(ids_path, ids, 0)
    env = dict(os.environ)
    if isa:
        env["STEEL_ISA"] = isa
    subprocess.run([STEEL, "logits", folder, "--ids", ids_path, "--out", out, *args], env=env, check=True)
    raw = open(out, "rb").read()
    T, V = struct.unpack_from("<ii", raw)
    rows = array.array("f", raw[8 + 4 * T:])
    return [rows[t * V:(t + 1) * V] for t in range(T)]


def max_diff(a, b):
    return max(abs(x - y) for r, s in zip(a, b) for x, y in zip(r, s))


def kl(a, b):
    total = 0
    for r, s in zip(a, b):
        p, q = oracle.softmax(list(r)), oracle.softmax(list(s))
        total += sum(x * math.log(x / max(y, 1e-30)) for x, y in zip(p, q) if x > 0)
    return total / len(a)


def check(name, cfg, tmp, weights=None, extra=None, length=40, stored=None):
    """weights: what the model computes with; stored: what the file holds of them (default: all)."""
    weights = weights or oracle.make_weights(cfg, name)
    folder = os.path.join(tmp, name)
    oracle.write_folder(folder, cfg, weights if stored is None else stored, extra)
    rnd = random.Random(name)
    ids = [rnd.randrange(cfg["vocab_size"]) for _ in range(length)]
    want = oracle.forward(cfg, weights, ids)
    diff = max_diff(want, run(folder, ids, "ref", ["--kv-type", "f32"]))
    cut = max_diff(want, run(folder, ids, "ref", ["--kv-type", "f32", "--chunk", "7", "--batch", "3"]))
    fast = kl(want, run(folder, ids, None))
    print(f"{name:28} reference {diff:.2g}, in chunks {cut:.2g}; default kernels KL {fast:.2g}")
    assert diff <= 2e-3 and cut <= 2e-3, (name, diff, cut)
    assert fast <= 2e-4, (name, fast)


def gptq(name, tmp, group, act_order, sym, v2):
    cfg = {**MOE, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": group,
                                          "desc_act": act_order, "sym": sym,
                                          "checkpoint_format": "gptq_v2" if v2 else "gptq"}}
    weights = oracle.make_weights(cfg, name)
    rnd = random.Random(name)
    stored, extra = {}, {}
    for key, rows in list(weights.items()):
        if not key.endswith("_proj.weight"):
            stored[key] = rows
            continue
        packed, weights[key] = oracle.gptq_pack(rows, rnd, group, act_order, sym, v2)
        extra.update({key[:-len("weight")] + s: t for s, t in packed.items()})
    check(name, cfg, tmp, weights, extra, length=12, stored=stored)


def main():
    with tempfile.TemporaryDirectory() as tmp:
        llama = {**BASE, "model_type": "llama"}
        check("llama-linear", {**llama, "rope_scaling": {"type": "linear", "factor": 4.0}}, tmp)
        check("llama3-old-names", {**llama, "rope_theta": 500000.0, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}}, tmp)
        check("qwen3-yarn", {**BASE, "model_type": "qwen3", "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}, tmp)
        check("llama-yarn-new-names", {**llama, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 20000.0, "factor": 8.0, "attention_factor": 1.25,
            "original_max_position_embeddings": 32}}, tmp)
        check("mistral-window", {**BASE, "model_type": "mistral", "sliding_window": 9}, tmp)
        check("qwen2-window-layers", {**BASE, "model_type": "qwen2", "use_sliding_window": True,
                                      "sliding_window": 8, "max_window_layers": 1}, tmp)
        check("qwen3-tied", {**BASE, "model_type": "qwen3", "tie_word_embeddings": True}, tmp)
        check("moe-norm", MOE, tmp)
        check("moe-nonorm", {**MOE, "norm_topk_prob": False}, tmp)
        check("moe-new-names", {**MOE, "num_local_experts": 5, "rope_parameters": {
            "rope_theta": 5000.0, "rope_type": "default"}}, tmp)
        check("moe-mlp-only", {**MOE, "mlp_only_layers": [0]}, tmp)
        check("moe-sparse-step", {**MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2}, tmp, length=16)
        gptq("gptq-g32", tmp, 32, False, True, False)
        gptq("gptq-row-asym", tmp, -1, False, False, False)
        gptq("gptq-act-order", tmp, 16, True, False, False)
        gptq("gptq-v2", tmp, 32, True, False, True)


main()
