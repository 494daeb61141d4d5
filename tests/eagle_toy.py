#!/usr/bin/env python3
"""EAGLE-3 heads for tests, with an answer of their own for what they draft: plain Python from the published equation,
no code shared with Steel.

usage: eagle_toy.py equation DIR           a model in DIR/model; heads of every kind in DIR/KIND and DIR/KIND.gguf, with
                                           DIR/KIND.bin: what each drafts
       eagle_toy.py random MODEL OUT       a head with random weights for the model of a folder
       eagle_toy.py right DIR              DIR/model and DIR/head, which drafts what the model says next
"""
import json
import math
import os
import random
import struct
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from gguf_tools import write_gguf  # noqa
from mtp_toy import write_tokenizer  # noqa
import oracle  # noqa

N_IDS, DEPTH = 18, 4

# names: what the layer's tensors begin with; taps: as the file numbers them, and the layers whose input they are
KINDS = {
    "midlayer": dict(names="midlayer.", n_out=40, taps=[2, 3, 5], inputs=[2, 3, 5]),
    "numbered": dict(names="layers.0.", n_out=40, taps=[1, 2, 4], inputs=[2, 3, 5], bias=True,
                     rope={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                           "original_max_position_embeddings": 16}, embed=True),
    "speculator": dict(names="layers.0.", n_out=40, taps=[2, 3, 5], inputs=[2, 3, 5], embed=True, residual=True, nested=True),
    "normed": dict(names="model.midlayer.", n_out=96, taps=[0, 5], inputs=[0, 5], norm_fc=True, own_head=False),
    "usual": dict(names="midlayer.", n_out=96, taps=None, inputs=[2, 4, 5]),
}


def target_config(layers, vocab):
    return dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=32, intermediate_size=48,
                num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=layers, vocab_size=vocab,
                rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=2048, hidden_act="silu",
                tie_word_embeddings=False, eos_token_id=vocab - 1)


def head_config(width, vocab, kind):
    c = dict(architectures=["LlamaForCausalLMEagle3"], model_type="llama", hidden_size=width, intermediate_size=40,
             num_attention_heads=6, num_key_value_heads=3, head_dim=16, num_hidden_layers=1, vocab_size=vocab,
             rms_norm_eps=1e-5, rope_theta=5000.0, max_position_embeddings=2048, hidden_act="silu", tie_word_embeddings=False)
    if kind.get("rope"):
        c["rope_scaling"] = kind["rope"]
    return c


def head_weights(rnd, c, kind):
    """By the names of midlayer heads, without their prefix."""
    E, H, K, D, F = (c[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
                                    "intermediate_size"))
    n = len(kind["inputs"])
    near_one = lambda k: [oracle.bf16(1 + rnd.gauss(0, 0.2)) for _ in range(k)]
    w = {"fc.weight": oracle.matrix(rnd, E, n * E, (n * E) ** -0.5), "norm.weight": near_one(E)}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        w[f"L.{name}.weight"] = near_one(E)
    for name, rows in (("q", H * D), ("k", K * D), ("v", K * D)):
        w[f"L.self_attn.{name}_proj.weight"] = oracle.matrix(rnd, rows, 2 * E)
        if kind.get("bias"):
            w[f"L.self_attn.{name}_proj.bias"] = [oracle.bf16(rnd.gauss(0, 0.3)) for _ in range(rows)]
    w["L.self_attn.o_proj.weight"] = oracle.matrix(rnd, E, H * D)
    w["L.mlp.gate_proj.weight"] = oracle.matrix(rnd, F, E)
    w["L.mlp.up_proj.weight"] = oracle.matrix(rnd, F, E)
    w["L.mlp.down_proj.weight"] = oracle.matrix(rnd, E, F)
    if kind.get("own_head", True):
        w["lm_head.weight"] = oracle.matrix(rnd, kind["n_out"], E)
    if kind.get("embed"):
        w["embed_tokens.weight"] = oracle.matrix(rnd, c["vocab_size"], E, 1.0)
    if kind.get("norm_fc"):
        w["input_norm.weight"] = near_one(n * E)
    return w


class Head:
    """The equation: a row at position p has the token at p + 1."""

    def __init__(self, c, w, kind, target, ids):
        self.c, self.w, self.kind, self.target, self.ids = c, w, kind, target, ids
        self.keys, self.values = [], []
        self.freq, _ = oracle.rope_frequencies(c, c["head_dim"])

    def features(self, taps):
        x = [v for t in taps for v in t]
        if self.kind.get("norm_fc"):
            x = oracle.rms(x, self.w["input_norm.weight"], self.c["rms_norm_eps"])
        return oracle.matvec(self.w["fc.weight"], x)

    def rotate(self, head, pos):
        half, out = len(head) // 2, head[:]
        for i, f in enumerate(self.freq):
            c, s = math.cos(pos * f), math.sin(pos * f)
            out[i], out[i + half] = head[i] * c - head[i + half] * s, head[i + half] * c + head[i] * s
        return out

    def row(self, token, g):
        """The logits of the draft, and the next g. The row's position is the number of rows before it."""
        c, w, eps = self.c, self.w, self.c["rms_norm_eps"]
        H, K, D, pos = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"], len(self.keys)
        e = w.get("embed_tokens.weight", self.target["model.embed_tokens.weight"])[token]
        h = oracle.rms(g, w["L.hidden_norm.weight"], eps)
        n = oracle.rms(e, w["L.input_layernorm.weight"], eps) + h
        q, k, v = (oracle.matvec(w[f"L.self_attn.{x}_proj.weight"], n, w.get(f"L.self_attn.{x}_proj.bias")) for x in "qkv")
        split = lambda z: [z[i:i + D] for i in range(0, len(z), D)]
        self.keys.append([self.rotate(x, pos) for x in split(k)])
        self.values.append(split(v))
        a = []
        for i, x in enumerate(self.rotate(x, pos) for x in split(q)):
            s = oracle.softmax([sum(p * r for p, r in zip(x, key[i * K // H])) / math.sqrt(D) for key in self.keys])
            a += [sum(p * value[i * K // H][d] for p, value in zip(s, self.values)) for d in range(D)]
        x = [p + r for p, r in zip(h if self.kind.get("residual") else g, oracle.matvec(w["L.self_attn.o_proj.weight"], a))]
        m = oracle.rms(x, w["L.post_attention_layernorm.weight"], eps)
        x = [p + r for p, r in zip(x, oracle.glu(w, "L.mlp.", m))]
        out = w.get("lm_head.weight", self.target["lm_head.weight"])
        return oracle.matvec(out, oracle.rms(x, w["norm.weight"], eps)), x

    def token(self, logits):
        return self.ids[max(range(len(logits)), key=lambda i: logits[i])]


def write_head(out, c, w, kind, ids):
    """As published."""
    config = dict(c)
    more = {"draft_vocab_size": kind["n_out"]}
    if kind["taps"]:
        more["eagle_aux_hidden_state_layer_ids"] = kind["taps"]
    if kind.get("residual"):
        more["norm_before_residual"] = True
    if kind.get("norm_fc"):
        more["norm_before_fc"] = True
    if kind.get("nested"):
        config = dict(architectures=["Eagle3Speculator"], speculators_model_type="eagle3", transformer_layer_config=config)
    config.update(more)
    root = kind["names"][:-len("midlayer.")] if kind["names"].endswith("midlayer.") else ""
    named = {}
    for name, values in w.items():
        named[kind["names"] + name[2:] if name[:2] == "L." else name if name[:7] == "lm_head" else root + name] = values
    extra = {}
    if ids != list(range(c["vocab_size"])):
        extra["d2t"] = ("I64", [len(ids)], struct.pack(f"<{len(ids)}q", *[t - i for i, t in enumerate(ids)]))
        extra["t2d"] = ("BOOL", [c["vocab_size"]], bytes(t in ids for t in range(c["vocab_size"])))
    oracle.write_folder(out, config, named, extra)


def write_head_gguf(path, c, w, kind, ids):
    """As llama.cpp's converter writes it: rotary pairs side by side, d2t the tokens themselves."""
    D, E = c["head_dim"], c["hidden_size"]
    meta = {"general.architecture": "eagle3", "eagle3.block_count": 1, "eagle3.embedding_length": E,
            "eagle3.feed_forward_length": c["intermediate_size"], "eagle3.context_length": c["max_position_embeddings"],
            "eagle3.attention.head_count": c["num_attention_heads"],
            "eagle3.attention.head_count_kv": c["num_key_value_heads"], "eagle3.attention.key_length": D,
            "eagle3.attention.value_length": D, "eagle3.rope.dimension_count": D,
            "eagle3.rope.freq_base": float(c["rope_theta"]),
            "eagle3.attention.layer_norm_rms_epsilon": c["rms_norm_eps"], "eagle3.vocab_size": c["vocab_size"],
            "eagle3.target_layers": kind["taps"] or kind["inputs"], "eagle3.target_hidden_size": E,
            "eagle3.norm_before_residual": bool(kind.get("residual")), "eagle3.norm_before_fc": bool(kind.get("norm_fc"))}
    names = {"fc": "fc", "norm": "output_norm", "lm_head": "output", "embed_tokens": "token_embd",
             "input_norm": "enc.output_norm", "L.input_layernorm": "blk.0.attn_norm", "L.hidden_norm": "blk.0.attn_norm_2",
             "L.post_attention_layernorm": "blk.0.ffn_norm", "L.self_attn.q_proj": "blk.0.attn_q",
             "L.self_attn.k_proj": "blk.0.attn_k", "L.self_attn.v_proj": "blk.0.attn_v",
             "L.self_attn.o_proj": "blk.0.attn_output", "L.mlp.gate_proj": "blk.0.ffn_gate",
             "L.mlp.up_proj": "blk.0.ffn_up", "L.mlp.down_proj": "blk.0.ffn_down"}
    tensors = []
    for name, rows in w.items():
        base, suffix = name.rsplit(".", 1)
        if base.endswith(("q_proj", "k_proj")):
            rows = [rows[h + s * D // 2 + p] for h in range(0, len(rows), D) for p in range(D // 2) for s in range(2)]
        flat = [v for r in rows for v in r] if isinstance(rows[0], list) else rows
        dims = [len(rows[0]), len(rows)] if isinstance(rows[0], list) else [len(rows)]
        tensors.append((f"{names[base]}.{suffix}", dims, 0, struct.pack(f"<{len(flat)}f", *flat)))
    if kind.get("rope"):
        plain, _ = oracle.rope_frequencies({**c, "rope_scaling": None}, D)
        scaled, _ = oracle.rope_frequencies(c, D)
        factors = [a / b for a, b in zip(plain, scaled)]
        tensors.append(("rope_freqs.weight", [D // 2], 0, struct.pack(f"<{D // 2}f", *factors)))
    if ids != list(range(c["vocab_size"])):
        tensors.append(("d2t", [len(ids)], 27, struct.pack(f"<{len(ids)}q", *ids)))
    write_gguf(path, meta, tensors)


def equation(out):
    cfg = target_config(8, 96)
    target, rnd = oracle.make_weights(cfg, 3), random.Random(4)
    oracle.write_folder(os.path.join(out, "model"), cfg, target)
    tokens = [rnd.randrange(96) for _ in range(N_IDS)]
    inputs = []
    oracle.forward(cfg, target, tokens, inputs)
    for name, kind in KINDS.items():
        c = head_config(32, 96, kind)
        w = head_weights(rnd, c, kind)
        ids = sorted(rnd.sample(range(96), kind["n_out"]))
        head = Head(c, w, kind, target, ids)
        write_head(os.path.join(out, name), c, w, kind, ids)
        write_head_gguf(os.path.join(out, name + ".gguf"), c, w, kind, ids)
        rows = []
        for p in range(N_IDS - 1):
            logits, x = head.row(tokens[p + 1], head.features([inputs[i][p] for i in kind["inputs"]]))
            rows.append(logits)
        chain = [head.token(logits)]
        for _ in range(DEPTH - 1):
            logits, x = head.row(chain[-1], x)
            rows.append(logits)
            chain.append(head.token(logits))
        with open(os.path.join(out, name + ".bin"), "wb") as f:
            f.write(struct.pack("<iii", N_IDS, kind["n_out"], DEPTH))
            f.write(struct.pack(f"<{N_IDS}i", *tokens) + struct.pack(f"<{DEPTH}i", *chain))
            f.write(struct.pack(f"<{kind['n_out']}i", *ids))
            for row in rows:
                f.write(struct.pack(f"<{len(row)}f", *row))


def any_head(model, out):
    config = json.load(open(os.path.join(model, "config.json")))
    text = config.get("text_config", config)
    layers, rnd = text["num_hidden_layers"], random.Random(text["hidden_size"])
    kind = dict(names="midlayer.", n_out=text["vocab_size"] // 2, taps=[0, layers // 2, layers - 1], inputs=[0, 0, 0])
    c = head_config(text["hidden_size"], text["vocab_size"], kind)
    c["head_dim"] = 32 # what quantised caches can hold
    write_head(out, c, head_weights(rnd, c, kind), kind, sorted(rnd.sample(range(text["vocab_size"]), kind["n_out"])))


def right(out):
    """The model's blocks add nothing: what follows a token depends on that token alone. The head's attention sees its own
    row alone, whose value is the token's embedding, and its stream begins with nothing."""
    cfg = target_config(6, 144)
    target, rnd = oracle.make_weights(cfg, 7), random.Random(8)
    E, D, H = cfg["hidden_size"], 16, 2
    zeros = lambda rows, cols: [[0.0] * cols for _ in range(rows)]
    for name, m in target.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            target[name] = zeros(len(m), len(m[0]))
    order = list(range(144)) # after a token comes the next of a circle
    rnd.shuffle(order)
    target["model.norm.weight"] = [1.0] * E
    for a, b in zip(order, order[1:] + order[:1]):
        target["lm_head.weight"][b] = oracle.rms(target["model.embed_tokens.weight"][a], [1.0] * E, 1e-5)
    oracle.write_folder(os.path.join(out, "model"), cfg, target)
    write_tokenizer(os.path.join(out, "model"), cfg["vocab_size"])
    kind = dict(names="midlayer.", n_out=144, taps=[2, 3, 4], inputs=[2, 3, 4], residual=True, bias=True)
    c = head_config(E, 144, kind)
    c.update(num_attention_heads=H, num_key_value_heads=H, head_dim=D)
    w = head_weights(rnd, c, kind)
    one = lambda i: [1.0 if k == i else 0.0 for k in range(2 * E)]
    for x in "qk": # the same for every row: the rotation alone tells rows apart
        w[f"L.self_attn.{x}_proj.weight"] = zeros(H * D, 2 * E)
        w[f"L.self_attn.{x}_proj.bias"] = [20.0] * (H * D)
    w["L.self_attn.v_proj.weight"] = [one(i) for i in range(E)]
    w["L.self_attn.v_proj.bias"] = [0.0] * (H * D)
    w["L.self_attn.o_proj.weight"] = [one(i)[:E] for i in range(E)]
    w["L.mlp.down_proj.weight"] = zeros(E, c["intermediate_size"])
    w["L.hidden_norm.weight"] = [0.0] * E
    w["L.input_layernorm.weight"] = [1.0] * E
    w["norm.weight"] = target["model.norm.weight"]
    w["lm_head.weight"] = target["lm_head.weight"]
    ids = list(range(144))
    rnd.shuffle(ids) # a vocabulary in another order
    w["lm_head.weight"] = [target["lm_head.weight"][t] for t in ids]
    write_head(os.path.join(out, "head"), c, w, kind, ids)


if __name__ == "__main__":
    command, *paths = sys.argv[1:]
    {"equation": equation, "random": any_head, "right": right}[command](*paths)
