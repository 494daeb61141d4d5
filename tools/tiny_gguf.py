#!/usr/bin/env python3
"""Writes a complete, tiny Qwen3-MoE GGUF with random weights and a byte-level vocabulary.

Its text is noise, which is enough for tests and demonstrations. Standard library only.
  tiny_gguf.py OUT.gguf [--seed N]
"""
import argparse, random, struct

U32, F32, STR, ARR, I32 = 4, 6, 8, 9, 5
LAYERS, EMBD, HEADS, KV, DIM, EXPERTS, USED, WIDE = 2, 64, 4, 2, 16, 4, 2, 32


def byte_letters():
    """GPT-2's printable stand-ins for the 256 bytes."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {}, 0
    for b in range(256):
        if b in keep:
            table[b] = chr(b)
        else:
            table[b] = chr(256 + extra)
            extra += 1
    return table


def s(text):
    b = text.encode()
    return struct.pack("<Q", len(b)) + b


def kv(key, kind, value):
    head = s(key) + struct.pack("<I", kind)
    if kind == STR:
        return head + s(value)
    if kind == ARR:
        elem, items = value
        body = b"".join(s(i) for i in items) if elem == STR else struct.pack(f"<{len(items)}i", *items)
        return head + struct.pack("<IQ", elem, len(items)) + body
    return head + struct.pack("<f" if kind == F32 else "<I", value)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out")
    ap.add_argument("--seed", type=int, default=1)
    a = ap.parse_args()
    rnd = random.Random(a.seed)
    letters = byte_letters()
    tokens = [letters[b] for b in range(256)]
    merges = []
    for word in ("he", "ll", "hell", "hello", letters[32] + "w", "or", "ld", letters[32] + "wor", letters[32] + "world"):
        for cut in range(1, len(word)):
            if word[:cut] in tokens and word[cut:] in tokens and word not in tokens:
                merges.append(word[:cut] + " " + word[cut:])
                tokens.append(word)
                break
    tokens += ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    V = len(tokens)
    arch = "qwen3moe"
    meta = [kv("general.architecture", STR, arch), kv("general.name", STR, "tiny random"),
            kv(f"{arch}.context_length", U32, 256), kv(f"{arch}.embedding_length", U32, EMBD),
            kv(f"{arch}.block_count", U32, LAYERS), kv(f"{arch}.feed_forward_length", U32, 96),
            kv(f"{arch}.attention.head_count", U32, HEADS), kv(f"{arch}.attention.head_count_kv", U32, KV),
            kv(f"{arch}.attention.key_length", U32, DIM), kv(f"{arch}.attention.value_length", U32, DIM),
            kv(f"{arch}.attention.layer_norm_rms_epsilon", F32, 1e-6), kv(f"{arch}.rope.freq_base", F32, 10000.0),
            kv(f"{arch}.expert_count", U32, EXPERTS), kv(f"{arch}.expert_used_count", U32, USED),
            kv(f"{arch}.expert_feed_forward_length", U32, WIDE),
            kv("tokenizer.ggml.model", STR, "gpt2"), kv("tokenizer.ggml.pre", STR, "qwen2"),
            kv("tokenizer.ggml.tokens", ARR, (STR, tokens)),
            kv("tokenizer.ggml.token_type", ARR, (I32, [1] * (V - 3) + [3] * 3)),
            kv("tokenizer.ggml.merges", ARR, (STR, merges)), kv("tokenizer.ggml.eos_token_id", U32, V - 1)]
    T = [("token_embd.weight", [EMBD, V]), ("output_norm.weight", [EMBD])]
    for i in range(LAYERS):
        p = f"blk.{i}."
        T += [(p + "attn_norm.weight", [EMBD]), (p + "ffn_norm.weight", [EMBD]),
              (p + "attn_q.weight", [EMBD, HEADS * DIM]), (p + "attn_k.weight", [EMBD, KV * DIM]),
              (p + "attn_v.weight", [EMBD, KV * DIM]), (p + "attn_output.weight", [HEADS * DIM, EMBD]),
              (p + "attn_q_norm.weight", [DIM]), (p + "attn_k_norm.weight", [DIM]),
              (p + "ffn_gate_inp.weight", [EMBD, EXPERTS]),
              (p + "ffn_gate_exps.weight", [EMBD, WIDE, EXPERTS]), (p + "ffn_up_exps.weight", [EMBD, WIDE, EXPERTS]),
              (p + "ffn_down_exps.weight", [WIDE, EMBD, EXPERTS])]
    head, data = b"GGUF" + struct.pack("<IQQ", 3, len(T), len(meta)) + b"".join(meta), b""
    for name, dims in T:
        n = 1
        for d in dims:
            n *= d
        head += s(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
        head += struct.pack("<IQ", 0, len(data))
        values = [1 + rnd.gauss(0, 0.1) for _ in range(n)] if len(dims) == 1 else [rnd.gauss(0, 0.2) for _ in range(n)]
        data += struct.pack(f"<{n}f", *values) + b"\0" * (-4 * n % 32)
    head += b"\0" * (-len(head) % 32)
    with open(a.out, "wb") as f:
        f.write(head + data)


if __name__ == "__main__":
    main()
