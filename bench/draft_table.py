#!/usr/bin/env python3
"""Tables of what drafts gain and what they cost, over models, texts and numbers of sequences.

  draft_table.py sweep [--device cuda] [--batch 1,2,4,8,16,32] [--texts ...] [--models ...] [--layers N] [--least 0.97]
      four models x six texts x six numbers of sequences: speed with drafts, relative to without. A case below --least fails.
  draft_table.py goals [--device cuda] [--models ...] [--batch 1,4,32] [--layers N]
      the cases with a number to reach: edits, quotations, JSON, prose and random tokens of Qwen3-30B-A3B and gpt-oss-20b;
      Qwen3-8B with a draft model of 0.6B, and with an EAGLE-3 head, 70 % of whose drafts are right

Models are real shapes with random weights (synth_gguf.py), made once in --folder (about 60 GB). `draft.py` has the texts. Every case
is measured in turns without and with drafts, on a machine that should do nothing else: ratios are of medians of --reps runs.
"""
import argparse
import json
import os
import random
import struct
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SWEEP = {"qwen3-30b-a3b": ["--quant", "q4_k_m"], "gpt-oss-20b": ["--quant", "mxfp4"], "qwen3-8b": ["--quant", "q4_k_m"],
         "qwen3.5-35b-a3b": ["--quant", "q4_k_m", "--mtp"]}
TEXTS = "edit,quote,tools,json,prose,random"
HEAD = dict(hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
# model, its options, sequences, texts and the ratios to reach
GOALS = [("qwen3-30b-a3b", [], "1", {"edit": 2.2, "quote": 2.0, "tools": None, "json": 1.7, "prose": 0.98, "random": 0.98}),
         ("qwen3-30b-a3b", [], "4", {"edit": 1.6}), ("qwen3-30b-a3b", [], "32", {"edit": 0.98}),
         ("gpt-oss-20b", [], "1", {"edit": None, "tools": None, "json": None, "prose": 0.98}), ("gpt-oss-20b", [], "4", {"edit": None}),
         ("qwen3-8b", ["--draft-model", "@qwen3-0.6b", "--accept", "0.7"], "1", {"prose": 1.7}),
         ("qwen3-8b", ["--draft-model", "@head", "--accept", "0.7"], "1", {"prose": None})]


def write_head(path, vocab, layers):
    """An EAGLE-3 head for Qwen3-8B: its sizes, random weights."""
    outputs = min(32000, vocab)
    E, F, Q, K = HEAD["hidden_size"], HEAD["intermediate_size"], 32 * 128, 8 * 128
    shapes = {"fc.weight": [E, 3 * E], "midlayer.self_attn.q_proj.weight": [Q, 2 * E],
              "midlayer.self_attn.k_proj.weight": [K, 2 * E], "midlayer.self_attn.v_proj.weight": [K, 2 * E],
              "midlayer.self_attn.o_proj.weight": [E, Q], "midlayer.mlp.gate_proj.weight": [F, E],
              "midlayer.mlp.up_proj.weight": [F, E], "midlayer.mlp.down_proj.weight": [E, F], "lm_head.weight": [outputs, E],
              "midlayer.input_layernorm.weight": [E], "midlayer.hidden_norm.weight": [E],
              "midlayer.post_attention_layernorm.weight": [E], "norm.weight": [E]}
    os.makedirs(path, exist_ok=True)
    taps = [min(2, layers - 1), layers // 2, max(0, layers - 3)]
    config = dict(HEAD, architectures=["LlamaForCausalLMEagle3"], model_type="llama", num_hidden_layers=1, vocab_size=vocab,
                  draft_vocab_size=outputs, eagle_aux_hidden_state_layer_ids=taps, rms_norm_eps=1e-6, rope_theta=1e6,
                  max_position_embeddings=40960,
                  hidden_act="silu", tie_word_embeddings=False)
    with open(os.path.join(path, "config.json"), "w") as f:
        json.dump(config, f)
    header, at = {}, 0
    for name, shape in shapes.items():
        n = shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + 2 * n]}
        at += 2 * n
    header["d2t"] = {"dtype": "I64", "shape": [outputs], "data_offsets": [at, at + 8 * outputs]}
    rng = random.Random(1)
    block = b"".join(bytes((rng.randrange(256), rng.choice((0x3C, 0xBC)))) for _ in range(1 << 19)) # +-0.008 to 0.03
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(path, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        while at > 0:
            f.write(block[:at])
            at -= len(block)
        f.write(bytes(8 * outputs)) # output i is token i


def make(args, shape, options):
    """The model's file, made if it is not there."""
    name = shape + "".join(o.replace("--", "-") for o in options) + (f"-{args.layers}" if args.layers else "") + ".gguf"
    path = os.path.join(args.folder, name)
    if not os.path.exists(path):
        layers = ["--layers", str(args.layers)] if args.layers else []
        vocab = ["--vocab", str(args.vocab)] if args.vocab else []
        subprocess.run([sys.executable, os.path.join(ROOT, "bench/synth_gguf.py"), path + ".part", "--shape", shape, *options,
                        *layers, *vocab], check=True, stdout=subprocess.DEVNULL)
        os.rename(path + ".part", path)
    return path


def measure(args, model, texts, batch, more):
    """The lines that `steel bench --replay` prints for each case."""
    command = [sys.executable, os.path.join(ROOT, "bench/draft.py"), model, "--batch", batch, "--reps", str(args.reps),
               "--texts", texts, "--answer", str(args.answer), "--json", "--device", args.device, *more]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [c for c in map(json.loads, out.splitlines()) if "text" in c]


def sweep(args):
    failed = 0
    for shape, options in SWEEP.items():
        if args.models and shape not in args.models.split(","):
            continue
        cases = {(c["text"], c["sequences"]): c for c in measure(args, make(args, shape, options), args.texts, args.batch, [])}
        counts = sorted({n for _, n in cases})
        print(f"\n{shape}, with drafts relative to without\n\n| text | " + " | ".join(map(str, counts)) + " |")
        print("|---" + "|--:" * len(counts) + "|")
        for text in args.texts.split(","):
            row = [cases[text, n]["ratio"] for n in counts]
            failed += sum(r < args.least for r in row)
            print(f"| {text} | " + " | ".join(f"{r:.2f}" + ("" if r >= args.least else " (!)") for r in row) + " |", flush=True)
    print(f"\n{failed} cases below {args.least}")
    return failed > 0


def goals(args):
    failed = 0
    print("| model | sequences | text | plain, tok/s | with drafts | ratio | goal | accepted of drafted |")
    print("|---|--:|---|--:|--:|--:|--:|---|")
    for shape, options, n, texts in GOALS:
        if n not in args.batch.split(",") or (args.models and shape not in args.models.split(",")):
            continue
        model, more, name = make(args, shape, SWEEP[shape]), [], shape
        for o in options:
            if o == "@head":
                head = os.path.join(args.folder, f"qwen3-8b-eagle3-{args.layers or 36}-{args.vocab or 151936}")
                if not os.path.exists(os.path.join(head, "model.safetensors")):
                    write_head(head, args.vocab or 151936, args.layers or 36)
                o, name = head, name + " + EAGLE-3"
            elif o[0] == "@":
                o, name = make(args, o[1:], ["--quant", "q8_0"]), name + " + " + o[1:]
            more.append(o)
        for c in measure(args, model, ",".join(texts), n, more):
            goal = texts[c["text"]]
            failed += goal is not None and c["ratio"] < goal
            print(f"| {name} | {n} | {c['text']} | {c['plain_tok_s']:.0f} | {c['tok_s']:.0f} | {c['ratio']:.2f} | {goal or ''} | "
                  f"{c['accepted']} of {c['drafted']} |", flush=True)
    return failed > 0


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["sweep", "goals"])
    p.add_argument("--folder", default="/tmp/steel-draft-models")
    p.add_argument("--device", default="cuda")
    p.add_argument("--models", help="names of shapes (default: all)")
    p.add_argument("--layers", type=int, help="fewer than the real models have")
    p.add_argument("--vocab", type=int, help="a smaller vocabulary")
    p.add_argument("--batch", default="1,2,4,8,16,32")
    p.add_argument("--texts", default=TEXTS)
    p.add_argument("--answer", type=int, default=384)
    p.add_argument("--reps", type=int, default=3)
    p.add_argument("--least", type=float, default=0.97)
    args = p.parse_args()
    os.makedirs(args.folder, exist_ok=True)
    return {"sweep": sweep, "goals": goals}[args.what](args)


if __name__ == "__main__":
    sys.exit(main())
