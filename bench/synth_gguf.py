#!/usr/bin/env python3
"""Writes a GGUF with a real model's exact shapes and random weights.

Speed does not depend on the values of weights, so a benchmark needs no download. The file has the tensor names,
types and sizes of the real one. The same arguments give the same bytes. Standard library only.

  synth_gguf.py OUT.gguf --shape qwen3-30b-a3b [--layers N] [--quant q4_k_m|q8_0|mxfp4|...] [--seed S]
  synth_gguf.py mmproj.gguf --shape qwen3-vl-8b-mmproj    the image tower of --shape qwen3-vl-8b, by default of f16
  synth_gguf.py OUT.gguf --shape deepseek-v3 --empty     a hole for the weights: for `steel plan` and `steel show`

Every engine that reads GGUF can load the result. The vocabulary is declared absent (tokenizer.ggml.model =
"no_vocab"): run it with token ids, or add one with bench/add_vocab.py. Encoders (bge-base, bge-m3) have a synthetic vocabulary
of words w0, w1, w2 and so on, one token each.
"""
import argparse
import array
import functools
import random
import statistics
import struct
import sys

import synth_hybrids
import synth_towers

F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 = 0, 1, 2, 3, 6, 7, 8
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ3_S, IQ4_XS, BF16, MXFP4 = 10, 11, 12, 13, 14, 20, 21, 23, 30, 39
IQ2_XXS, IQ2_XS, IQ3_XXS, IQ1_S, IQ2_S, IQ1_M = 16, 17, 18, 19, 22, 29
# values of a block, its bytes
BLOCK = {F32: (1, 4), F16: (1, 2), BF16: (1, 2), Q4_0: (32, 18), Q4_1: (32, 20), Q5_0: (32, 22), Q5_1: (32, 24),
         Q8_0: (32, 34), Q2_K: (256, 84), Q3_K: (256, 110), Q4_K: (256, 144), Q5_K: (256, 176), Q6_K: (256, 210),
         IQ4_NL: (32, 18), IQ4_XS: (256, 136), IQ3_S: (256, 110), MXFP4: (32, 17), IQ2_XXS: (256, 66), IQ2_XS: (256, 74),
         IQ3_XXS: (256, 98), IQ1_S: (256, 50), IQ2_S: (256, 82), IQ1_M: (256, 56)}
# --quant: the type of most tensors, of those that keep more bits, of the head, general.file_type
QUANTS = {"q2_k": (Q2_K, Q3_K, Q6_K, 10), "q3_k_m": (Q3_K, Q4_K, Q6_K, 12), "q4_k_m": (Q4_K, Q6_K, Q6_K, 15),
          "q5_k_m": (Q5_K, Q6_K, Q6_K, 17), "q4_0": (Q4_0, Q6_K, Q6_K, 2), "q4_1": (Q4_1, Q6_K, Q6_K, 3),
          "q5_0": (Q5_0, Q6_K, Q6_K, 8), "q5_1": (Q5_1, Q6_K, Q6_K, 9), "q8_0": (Q8_0, Q8_0, Q8_0, 7),
          "iq4_nl": (IQ4_NL, Q6_K, Q6_K, 25), "iq4_xs": (IQ4_XS, Q6_K, Q6_K, 30), "iq3_s": (IQ3_S, Q4_K, Q6_K, 26),
          "iq3_xxs": (IQ3_XXS, IQ3_S, Q5_K, 23), "iq2_xxs": (IQ2_XXS, Q2_K, Q5_K, 19), "iq2_xs": (IQ2_XS, Q2_K, Q5_K, 20),
          "iq2_s": (IQ2_S, IQ3_S, Q5_K, 28), "iq1_s": (IQ1_S, Q2_K, Q5_K, 24), "iq1_m": (IQ1_M, Q2_K, Q5_K, 31),
          "mxfp4": (MXFP4, Q8_0, Q8_0, 38), "f16": (F16, F16, F16, 1), "bf16": (BF16, BF16, BF16, 32),
          "f32": (F32, F32, F32, 0)}

# Families whose layers are all alike:
# arch, layers, embd, heads, kv heads, head dim, ff, vocab, experts, used, expert ff, rope base, eps
SHAPES = {
    "qwen3-30b-a3b":   ("qwen3moe", 48, 2048, 32, 4, 128, 6144, 151936, 128, 8, 768, 1e6, 1e-6),
    "qwen3-235b-a22b": ("qwen3moe", 94, 4096, 64, 4, 128, 12288, 151936, 128, 8, 1536, 1e6, 1e-6),
    "qwen3-0.6b":      ("qwen3", 28, 1024, 16, 8, 128, 3072, 151936, 0, 0, 0, 1e6, 1e-6),
    "qwen3-4b":        ("qwen3", 36, 2560, 32, 8, 128, 9728, 151936, 0, 0, 0, 1e6, 1e-6),
    "qwen3-8b":        ("qwen3", 36, 4096, 32, 8, 128, 12288, 151936, 0, 0, 0, 1e6, 1e-6),
    "llama-3.1-8b":    ("llama", 32, 4096, 32, 8, 128, 14336, 128256, 0, 0, 0, 5e5, 1e-5),
    "tiny-moe":        ("qwen3moe", 4, 512, 8, 2, 64, 1024, 4096, 16, 4, 256, 1e6, 1e-6),
}


def fitting(dims, kind):
    """The type, or the one that llama.cpp takes for rows of no whole blocks."""
    return {Q4_K: Q5_0, Q5_K: Q5_1, Q6_K: Q8_0}.get(kind, Q8_0) if dims[0] % BLOCK[kind][0] else kind


class Model:
    """Metadata and tensors in file order: (key, value) and (name, dims, type)."""

    def __init__(self, arch, layers, vocab, main, high):
        self.arch, self.layers, self.vocab, self.main, self.high = arch, layers, vocab, main, high
        self.meta, self.tensors = [], []
        self.vocabulary = [("tokenizer.ggml.model", "no_vocab")]

    def set(self, **values):
        """Keys below the architecture's name; __ is a dot."""
        self.meta += [(f"{self.arch}.{key.replace('__', '.')}", v) for key, v in values.items()]

    def ends(self, embd, main, high):
        """The tensors outside the layers."""
        self.add("token_embd.weight", [embd, self.vocab], main)
        self.add("output_norm.weight", [embd], F32)
        self.add("output.weight", [embd, self.vocab], high)

    def add(self, name, dims, kind):
        self.tensors.append((name, dims, fitting(dims, kind)))

    def retype(self, name, kind):
        self.tensors = [(n, dims, fitting(dims, kind) if n == name else k) for n, dims, k in self.tensors]

    def layer(self, i, *tensors):
        for name, dims, kind in tensors:
            self.add(f"blk.{i}.{name}", dims, kind)

    def more_bits(self, i):
        """The type of attn_v and ffn_down: higher in some layers, as in Q4_K_M."""
        n = self.layers
        return self.high if i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2 else self.main


def add_mtp(m, embd):
    """An MTP block. Its layer is like the last one with attention."""
    n = m.layers
    like = max(i for i in range(n) if any(name.startswith(f"blk.{i}.attn_output") for name, _, _ in m.tensors))
    for name, dims, kind in [t for t in m.tensors if t[0].startswith(f"blk.{like}.")]:
        m.add(f"blk.{n}." + name.split(".", 2)[2], dims, kind)
    m.layer(n, ("nextn.eh_proj.weight", [2 * embd, embd], m.main), ("nextn.enorm.weight", [embd], F32),
            ("nextn.hnorm.weight", [embd], F32), ("nextn.shared_head_norm.weight", [embd], F32))
    m.meta = [(k, n + 1 if k.endswith(".block_count") else v) for k, v in m.meta]
    m.set(nextn_predict_layers=1)


def usual(shape, layers, vocab, main, high):
    """Llama, Qwen3 and Qwen3-MoE."""
    arch, n, embd, heads, kv_heads, dim, ff, n_vocab, experts, used, expert_ff, base, eps = SHAPES[shape]
    m = Model(arch, layers or n, vocab or n_vocab, main, high)
    m.set(context_length=40960, embedding_length=embd, block_count=m.layers, feed_forward_length=ff,
          attention__head_count=heads, attention__head_count_kv=kv_heads, attention__key_length=dim,
          attention__value_length=dim, attention__layer_norm_rms_epsilon=eps, rope__freq_base=base,
          rope__dimension_count=dim, vocab_size=m.vocab)
    if experts:
        m.set(expert_count=experts, expert_used_count=used, expert_feed_forward_length=expert_ff)
    m.ends(embd, main, high)
    for i in range(m.layers):
        more = m.more_bits(i)
        m.layer(i, ("attn_norm.weight", [embd], F32), ("attn_q.weight", [embd, heads * dim], main),
                ("attn_k.weight", [embd, kv_heads * dim], main), ("attn_v.weight", [embd, kv_heads * dim], more),
                ("attn_output.weight", [heads * dim, embd], main), ("ffn_norm.weight", [embd], F32))
        if arch.startswith("qwen3"):
            m.layer(i, ("attn_q_norm.weight", [dim], F32), ("attn_k_norm.weight", [dim], F32))
        if experts:
            m.layer(i, ("ffn_gate_inp.weight", [embd, experts], F32),
                    ("ffn_gate_exps.weight", [embd, expert_ff, experts], main),
                    ("ffn_up_exps.weight", [embd, expert_ff, experts], main),
                    ("ffn_down_exps.weight", [expert_ff, embd, experts], more))
        else:
            m.layer(i, ("ffn_gate.weight", [embd, ff], main), ("ffn_up.weight", [embd, ff], main),
                    ("ffn_down.weight", [ff, embd], more))
    return m


def gpt_oss_20b(layers, vocab, main, high):
    E, H, K, D, X, F = 2880, 64, 8, 64, 32, 2880
    m = Model("gpt-oss", layers or 24, vocab or 201088, main, high)
    m.set(context_length=131072, embedding_length=E, block_count=m.layers, feed_forward_length=F,
          attention__head_count=H, attention__head_count_kv=K, attention__key_length=D, attention__value_length=D,
          attention__layer_norm_rms_epsilon=1e-5, attention__sliding_window=128, rope__freq_base=150000.0,
          rope__dimension_count=D, rope__scaling__type="yarn", rope__scaling__factor=32.0,
          rope__scaling__original_context_length=4096, expert_count=X, expert_used_count=4,
          expert_feed_forward_length=F, vocab_size=m.vocab)
    m.ends(E, Q8_0, Q8_0)
    for i in range(m.layers):
        m.layer(i, ("attn_norm.weight", [E], F32), ("attn_q.weight", [E, H * D], Q8_0),
                ("attn_k.weight", [E, K * D], Q8_0), ("attn_v.weight", [E, K * D], Q8_0), ("attn_q.bias", [H * D], F32),
                ("attn_k.bias", [K * D], F32), ("attn_v.bias", [K * D], F32), ("attn_output.weight", [H * D, E], Q8_0),
                ("attn_output.bias", [E], F32), ("attn_sinks.weight", [H], F32),
                ("post_attention_norm.weight", [E], F32), ("ffn_gate_inp.weight", [E, X], F32),
                ("ffn_gate_inp.bias", [X], F32), ("ffn_gate_exps.weight", [E, F, X], MXFP4),
                ("ffn_up_exps.weight", [E, F, X], MXFP4), ("ffn_down_exps.weight", [F, E, X], MXFP4),
                ("ffn_gate_exps.bias", [F, X], F32), ("ffn_up_exps.bias", [F, X], F32),
                ("ffn_down_exps.bias", [E, X], F32))
    return m


def qwen35_35b_a3b(layers, vocab, main, high):
    E, H, K, D, X, F = 2048, 16, 2, 256, 256, 512
    keys, values, n_values = 16 * 128, 32 * 128, 32
    m = Model("qwen35moe", layers or 40, vocab or 248320, main, high)
    m.set(context_length=262144, embedding_length=E, block_count=m.layers, attention__head_count=H,
          attention__head_count_kv=K, attention__key_length=D, attention__value_length=D,
          attention__layer_norm_rms_epsilon=1e-6, rope__freq_base=1e7, rope__dimension_count=64,
          rope__dimension_sections=[11, 11, 10, 0], expert_count=X, expert_used_count=8, expert_feed_forward_length=F,
          expert_shared_feed_forward_length=F, ssm__conv_kernel=4, ssm__inner_size=values, ssm__state_size=128,
          ssm__time_step_rank=n_values, ssm__group_count=16, full_attention_interval=4, vocab_size=m.vocab)
    m.ends(E, main, high)
    for i in range(m.layers):
        more = m.more_bits(i)
        m.layer(i, ("attn_norm.weight", [E], F32), ("post_attention_norm.weight", [E], F32))
        if (i + 1) % 4 == 0:
            m.layer(i, ("attn_q.weight", [E, 2 * H * D], main), ("attn_k.weight", [E, K * D], main),
                    ("attn_v.weight", [E, K * D], more), ("attn_output.weight", [H * D, E], main),
                    ("attn_q_norm.weight", [D], F32), ("attn_k_norm.weight", [D], F32))
        else:
            m.layer(i, ("attn_qkv.weight", [E, 2 * keys + values], main), ("attn_gate.weight", [E, values], main),
                    ("ssm_conv1d.weight", [4, 2 * keys + values], F32), ("ssm_dt.bias", [n_values], F32),
                    ("ssm_a", [n_values], F32), ("ssm_beta.weight", [E, n_values], Q8_0),
                    ("ssm_alpha.weight", [E, n_values], Q8_0), ("ssm_norm.weight", [128], F32),
                    ("ssm_out.weight", [values, E], main))
        m.layer(i, ("ffn_gate_inp.weight", [E, X], F32), ("ffn_gate_exps.weight", [E, F, X], main),
                ("ffn_up_exps.weight", [E, F, X], main), ("ffn_down_exps.weight", [F, E, X], more),
                ("ffn_gate_inp_shexp.weight", [E], F32), ("ffn_gate_shexp.weight", [E, F], main),
                ("ffn_up_shexp.weight", [E, F], main), ("ffn_down_shexp.weight", [F, E], more))
    return m


def glm_47_flash(layers, vocab, main, high):
    m = Model("deepseek2", layers or 47, vocab or 154880, main, high)
    return latent(m, (2048, 20, 64, 1536, 10240), (768, 512, 64, 192, 256), n_dense=1, context_length=202752,
                  attention__layer_norm_rms_epsilon=1e-5, rope__freq_base=1e6, expert_used_count=4, expert_weights_scale=1.8,
                  expert_group_count=1, expert_group_used_count=1)


def deepseek_v3(layers, vocab, main, high):
    m = Model("deepseek2", layers or 61, vocab or 129280, main, high)
    return latent(m, (7168, 128, 256, 2048, 18432), (1536, 512, 64, 128, 128), n_dense=3, context_length=163840,
                  attention__layer_norm_rms_epsilon=1e-6, rope__freq_base=1e4, expert_used_count=8, expert_weights_scale=2.5,
                  expert_group_count=8, expert_group_used_count=4)


def latent(m, widths, dims, n_dense, **more_meta):
    E, H, X, F, dense = widths
    q_rank, kv_rank, rope, nope, value = dims
    main, high = m.main, m.high
    m.set(embedding_length=E, block_count=m.layers, feed_forward_length=dense, **more_meta,
          attention__head_count=H, attention__head_count_kv=1, attention__key_length=kv_rank + rope,
          attention__value_length=kv_rank, attention__key_length_mla=nope + rope, attention__value_length_mla=value,
          attention__q_lora_rank=q_rank, attention__kv_lora_rank=kv_rank, rope__dimension_count=rope,
          leading_dense_block_count=n_dense, expert_count=X, expert_shared_count=1, expert_feed_forward_length=F,
          expert_weights_norm=True, expert_gating_func=2, vocab_size=m.vocab)
    m.ends(E, main, high)
    for i in range(m.layers):
        more = m.more_bits(i)
        m.layer(i, ("attn_norm.weight", [E], F32), ("attn_q_a.weight", [E, q_rank], main),
                ("attn_q_a_norm.weight", [q_rank], F32), ("attn_q_b.weight", [q_rank, H * (nope + rope)], main),
                ("attn_kv_a_mqa.weight", [E, kv_rank + rope], main), ("attn_kv_a_norm.weight", [kv_rank], F32),
                ("attn_k_b.weight", [nope, kv_rank, H], Q8_0), ("attn_v_b.weight", [kv_rank, value, H], Q8_0),
                ("attn_output.weight", [H * value, E], main), ("ffn_norm.weight", [E], F32))
        if i < n_dense:
            m.layer(i, ("ffn_gate.weight", [E, dense], main), ("ffn_up.weight", [E, dense], main),
                    ("ffn_down.weight", [dense, E], more))
        else:
            m.layer(i, ("ffn_gate_inp.weight", [E, X], F32), ("exp_probs_b.bias", [X], F32),
                    ("ffn_gate_exps.weight", [E, F, X], main), ("ffn_up_exps.weight", [E, F, X], main),
                    ("ffn_down_exps.weight", [F, E, X], more), ("ffn_gate_shexp.weight", [E, F], main),
                    ("ffn_up_shexp.weight", [E, F], main), ("ffn_down_shexp.weight", [F, E], more))
    return m


def gemma_4_26b_a4b(layers, vocab, main, high):
    E, H, X, F, dense = 2816, 16, 128, 704, 2112
    m = Model("gemma4", layers or 30, vocab or 262144, main, high)
    slides = [(i + 1) % 6 != 0 for i in range(m.layers)]
    m.set(context_length=262144, embedding_length=E, block_count=m.layers, feed_forward_length=dense,
          attention__head_count=H, attention__head_count_kv=[8 if s else 2 for s in slides], attention__key_length=512,
          attention__value_length=512, attention__key_length_swa=256, attention__value_length_swa=256,
          attention__layer_norm_rms_epsilon=1e-6, attention__sliding_window=1024, attention__sliding_window_pattern=slides,
          attention__shared_kv_layers=0, embedding_length_per_layer_input=0, rope__freq_base=1e6,
          rope__freq_base_swa=1e4, rope__dimension_count=512, rope__dimension_count_swa=256, expert_count=X,
          expert_used_count=8, expert_feed_forward_length=F, final_logit_softcapping=30.0, vocab_size=m.vocab)
    m.add("token_embd.weight", [E, m.vocab], high)
    m.add("output_norm.weight", [E], F32)
    m.add("rope_freqs.weight", [256], F32)
    short = lambda kind: {Q4_K: Q5_0, Q6_K: Q8_0}.get(kind, kind)  # of rows that are no whole blocks of 256
    for i in range(m.layers):
        more, D, K = m.more_bits(i), 256 if slides[i] else 512, 8 if slides[i] else 2
        m.layer(i, ("attn_norm.weight", [E], F32), ("attn_q.weight", [E, H * D], main),
                ("attn_k.weight", [E, K * D], main), ("attn_output.weight", [H * D, E], main),
                ("attn_q_norm.weight", [D], F32), ("attn_k_norm.weight", [D], F32),
                ("post_attention_norm.weight", [E], F32), ("ffn_norm.weight", [E], F32),
                ("ffn_gate.weight", [E, dense], main), ("ffn_up.weight", [E, dense], main),
                ("ffn_down.weight", [dense, E], short(more)), ("ffn_gate_inp.weight", [E, X], F32),
                ("ffn_gate_inp.scale", [E], F32), ("ffn_down_exps.scale", [X], F32),
                ("ffn_gate_up_exps.weight", [E, 2 * F, X], main), ("ffn_down_exps.weight", [F, E, X], short(more)),
                ("post_ffw_norm_1.weight", [E], F32), ("pre_ffw_norm_2.weight", [E], F32),
                ("post_ffw_norm_2.weight", [E], F32), ("post_ffw_norm.weight", [E], F32),
                ("layer_output_scale.weight", [1], F32))
        if slides[i]:
            m.layer(i, ("attn_v.weight", [E, K * D], more))
    return m


# layers, embd, heads, ff, vocab, positions, kinds of tokens, pooling (1 mean, 2 cls), eps
ENCODERS = {
    "bge-base": (12, 768, 12, 3072, 30522, 512, 2, 2, 1e-12),
    "bge-m3":   (24, 1024, 16, 4096, 250002, 8192, 1, 2, 1e-5),
}


def encoder(shape, layers, vocab, main, high, positions=None):
    n, E, H, F, n_vocab, its, types, pooling, eps = ENCODERS[shape]
    positions = positions or its
    m = Model("bert", layers or n, vocab or n_vocab, main, high)
    m.set(context_length=positions, embedding_length=E, block_count=m.layers, feed_forward_length=F,
          attention__head_count=H, attention__layer_norm_epsilon=eps, attention__causal=False, pooling_type=pooling)
    both = lambda name, width: ((f"{name}.weight", [width], F32), (f"{name}.bias", [width], F32))
    product = lambda name, n_in, n_out: ((f"{name}.weight", [n_in, n_out], main), (f"{name}.bias", [n_out], F32))
    m.add("token_embd.weight", [E, m.vocab], main)
    m.add("position_embd.weight", [E, positions], F32)
    m.add("token_types.weight", [E, types], F32)
    for t in both("token_embd_norm", E):
        m.add(*t)
    for i in range(m.layers):
        m.layer(i, *product("attn_q", E, E), *product("attn_k", E, E), *product("attn_v", E, E),
                *product("attn_output", E, E), *both("attn_output_norm", E), *product("ffn_up", E, F),
                *product("ffn_down", F, E), *both("layer_output_norm", E))
    m.vocabulary = words(m.vocab, types, types == 1)
    return m


def words(n, types, unigram):
    """Metadata of a vocabulary of special tokens, then words: WordPiece, or unigram as in XLM-RoBERTa."""
    special = ["<s>", "<pad>", "</s>", "<unk>"] if unigram else ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    ids = dict(bos=0, eos=2, unknown=3, seperator=2, padding=1, cls=0) if unigram else \
        dict(bos=2, eos=3, unknown=1, seperator=3, padding=0, cls=2, mask=4)
    names = special + [f"\u2581w{i}" for i in range(n - len(special))]
    kinds = [2 if name in ("<unk>", "[UNK]") else 3 if i < len(special) else 1 for i, name in enumerate(names)]
    meta = [("model", "t5" if unigram else "bert"), ("pre", "default"), ("tokens", names), ("token_type", kinds),
            ("token_type_count", types), *((f"{key}_token_id", i) for key, i in ids.items()),
            ("add_bos_token", True), ("add_eos_token", True)]
    if unigram:
        meta += [("scores", [-10.0] * n), ("add_space_prefix", True), ("remove_extra_whitespaces", True)]
    return [(f"tokenizer.ggml.{key}", value) for key, value in meta]


OTHERS = {"gpt-oss-20b": gpt_oss_20b, "qwen3.5-35b-a3b": qwen35_35b_a3b, "glm-4.7-flash": glm_47_flash,
          "deepseek-v3": deepseek_v3,
          "gemma-4-26b-a4b": gemma_4_26b_a4b,
          "nemotron-3-nano-30b-a3b": functools.partial(synth_hybrids.nemotron_3_nano, Model),
          "granite-4.0-h-small": functools.partial(synth_hybrids.granite_4_h_small, Model),
          "lfm2-8b-a1b": functools.partial(synth_hybrids.lfm2_8b_a1b, Model),
          "glm-5": functools.partial(synth_hybrids.glm_5, latent, Model),
          "laguna-xs": functools.partial(synth_hybrids.laguna_xs, Model),
          "deepseek-v4-flash": lambda *rest: synth_hybrids.deepseek_v4_flash(Model, *rest, MXFP4),
          **{name: functools.partial(encoder, name) for name in ENCODERS},
          **{name: functools.partial(lambda shape, *rest: synth_towers.text(Model, shape, *rest, F32), name)
             for name in synth_towers.SEEING},
          **{f"{name}-mmproj": functools.partial(lambda shape, layers, vocab, main, high:
                                                 synth_towers.tower(Model, shape, layers, main, F32, F16), name)
             for name in synth_towers.SEEING}}


def half(x):
    return struct.pack("<e", x)


def block(kind, rnd):
    """A random block with values of roughly N(0, 0.02)."""
    if kind == F32:
        return struct.pack("<f", rnd.gauss(0, 0.02))
    if kind == F16:
        return half(rnd.gauss(0, 0.02))
    if kind == BF16:
        return struct.pack("<f", rnd.gauss(0, 0.02))[2:]
    # If the middle code is zero, the lowest code is not used. Otherwise the mean would not be zero, all rows would share
    # its direction, and all sequences would choose the same experts.
    if kind == Q4_0:
        return half(4e-3) + bytes(rnd.randrange(1, 16) | rnd.randrange(1, 16) << 4 for _ in range(16))
    if kind == Q4_1:
        return half(4e-3) + half(-30e-3) + rnd.randbytes(16)
    if kind == Q5_0:
        q = [rnd.randrange(1, 32) for _ in range(32)]
        high = sum(c >> 4 << i for i, c in enumerate(q))
        return half(2e-3) + struct.pack("<I", high) + bytes(q[i] & 15 | (q[i + 16] & 15) << 4 for i in range(16))
    if kind == Q5_1:
        return half(2e-3) + half(-31e-3) + rnd.randbytes(4 + 16)
    if kind == IQ4_NL:
        return half(3e-4) + rnd.randbytes(16)
    if kind == Q2_K:
        return rnd.randbytes(16 + 64) + half(2e-3) + half(3e-3)
    if kind == Q3_K:
        return rnd.randbytes(32 + 64 + 12) + half(5e-4)
    if kind == IQ3_S:
        return half(1.2e-4) + rnd.randbytes(64 + 8 + 32 + 4)
    if kind in (IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ1_S):
        d = {IQ2_XXS: 2e-4, IQ2_XS: 2e-4, IQ2_S: 2e-4, IQ3_XXS: 1.2e-4, IQ1_S: 2e-3}[kind]
        return half(d) + rnd.randbytes(BLOCK[kind][1] - 2)
    if kind == IQ1_M:  # a nibble of d on top of each two bytes of scales
        d = struct.unpack("<H", half(2e-3))[0]
        return rnd.randbytes(48) + struct.pack("<4H", *(rnd.getrandbits(12) | (d >> 4 * i & 15) << 12 for i in range(4)))
    if kind == MXFP4:
        return bytes([rnd.choice((119, 120))]) + rnd.randbytes(16)
    if kind == IQ4_XS:
        return half(1e-5) + rnd.randbytes(2 + 4) + rnd.randbytes(128)
    if kind == Q5_K:
        d = rnd.uniform(0.4e-4, 0.6e-4)
        return half(d) + half(15.5 * d) + rnd.randbytes(12) + rnd.randbytes(32 + 128)
    if kind == Q8_0:
        return half(3e-4) + rnd.randbytes(32)
    if kind == Q4_K:
        d = rnd.uniform(0.8e-4, 1.2e-4)
        return half(d) + half(7.5 * d) + rnd.randbytes(12) + rnd.randbytes(128)
    codes = rnd.randbytes(128) + rnd.randbytes(64)  # Q6_K
    return codes + bytes(rnd.randrange(-64, 64) & 255 for _ in range(16)) + half(3e-5)


def gguf_str(s):
    b = s.encode()
    return struct.pack("<Q", len(b)) + b


def gguf_kv(key, value):
    k = gguf_str(key)
    if isinstance(value, str):
        return k + struct.pack("<I", 8) + gguf_str(value)
    if isinstance(value, bool):
        return k + struct.pack("<I?", 7, value)
    if isinstance(value, list) and isinstance(value[0], bool):
        return k + struct.pack(f"<IIQ{len(value)}?", 9, 7, len(value), *value)
    if isinstance(value, list) and isinstance(value[0], str):
        return k + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(gguf_str, value))
    if isinstance(value, list) and isinstance(value[0], float):
        return k + struct.pack(f"<IIQ{len(value)}f", 9, 6, len(value), *value)
    if isinstance(value, list):
        return k + struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    if isinstance(value, float):
        return k + struct.pack("<If", 6, value)
    return k + struct.pack("<II", 4, value)


def n_bytes(dims, kind):
    n = 1
    for d in dims:
        n *= d
    per, size = BLOCK[kind]
    assert dims[0] % per == 0, (dims, kind)
    return n // per * size


def header(meta, tensors):
    """Everything before the data, and the data's length."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(meta)) + b"".join(gguf_kv(*m) for m in meta)
    at = 0
    for name, dims, kind in tensors:
        head += gguf_str(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
        head += struct.pack("<IQ", kind, at)
        at += (n_bytes(dims, kind) + 31) // 32 * 32
    return head + b"\0" * (-len(head) % 32), at


def skewed(n, used, exponent, rnd):
    """Factors for the rows of a router, in random order, so that experts are chosen as often as Zipf's law says: expert of rank r in
    proportion to r^-exponent, at most by 45 % of tokens. The logits of random rows are normal. A row that is chosen with
    probability p has the factor with which that part of its logits is above a common threshold."""
    share = lambda c: [min(0.45, c * (r + 1) ** -exponent) for r in range(n)]
    low, high = 0.0, float(n)
    for _ in range(100):
        c = (low + high) / 2
        low, high = (c, high) if sum(share(c)) < used else (low, c)
    factors = [1 / statistics.NormalDist().inv_cdf(1 - p) for p in share(low)]
    most = max(factors)
    factors = [x / most for x in factors]
    rnd.shuffle(factors)
    return factors


def write_router(f, dims, bank, factors, rnd):
    cut, row = rnd.randrange(1, len(bank) // 4), dims[0]
    values = array.array("f", (bank[cut * 4:] + bank[:cut * 4]) * (row * dims[1] * 4 // len(bank) + 1))
    for e, x in enumerate(factors):
        array.array("f", (v * x for v in values[e * row:(e + 1) * row])).tofile(f)
    f.write(b"\0" * (-(row * dims[1] * 4) % 32))


def write_tensor(f, name, dims, kind, banks, rnd):
    floats = lambda draw: f.write(b"".join(struct.pack("<f", draw()) for _ in range(n_bytes(dims, kind) // 4)))
    left = n_bytes(dims, kind)
    pad = b"\0" * (-left % 32)
    if name.endswith("ssm_a"):  # decays: -exp(A)
        floats(lambda: -rnd.uniform(0.02, 1))
    elif kind == F32 and len(dims) == 1 and name.endswith((".bias", "sinks.weight")):
        floats(lambda: rnd.gauss(0, 0.1))
    elif kind == F32 and (len(dims) == 1 or name.endswith(("ssm_d", "ssm_norm.weight"))):  # norms near one
        floats(lambda: 1 + rnd.gauss(0, 0.02))
    else:  # the bank from a random block on, again and again
        b, size = banks[kind], BLOCK[kind][1]
        cut = rnd.randrange(1, len(b) // size) * size
        b = b[cut:] + b[:cut]
        b = b * max(1, (1 << 25) // len(b))
        while left > 0:
            f.write(b[:left] if left < len(b) else b)
            left -= len(b)
    f.write(pad)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out")
    ap.add_argument("--shape", choices=[*SHAPES, *OTHERS], default="qwen3-30b-a3b")
    ap.add_argument("--layers", type=int, help="fewer than the real model has")
    ap.add_argument("--vocab", type=int, help="a smaller vocabulary")
    ap.add_argument("--quant", choices=QUANTS, help="q4_k_m, and f16 for a tower")
    ap.add_argument("--mtp", action="store_true", help="with a block that drafts tokens ahead (qwen3.5, glm-4.7-flash)")
    ap.add_argument("--positions", type=int, help="of an encoder, other than the real model has")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--skew", type=float, help="routers choose experts as Zipf's law says, with this exponent (0.8 to 1.2 as trained ones), "
                    "in another order in each layer; default: all alike")
    ap.add_argument("--empty", action="store_true", help="names and shapes, with a hole in the place of the weights")
    a = ap.parse_args()
    rnd = random.Random(a.seed)
    a.quant = a.quant or ("f16" if a.shape.endswith("-mmproj") else "q4_k_m")
    main_type, high_type, head_type, file_type = QUANTS[a.quant]
    if a.positions and a.shape not in ENCODERS:
        ap.error("--positions is for encoders")
    rest = (a.layers, a.vocab, main_type, high_type, *([a.positions] if a.positions else []))
    m = OTHERS[a.shape](*rest) if a.shape in OTHERS else usual(a.shape, *rest)
    if a.mtp:
        add_mtp(m, next(dims[0] for name, dims, _ in m.tensors if name == "token_embd.weight"))
    meta = [("general.architecture", m.arch), ("general.name", f"synthetic {a.shape}"),
            ("general.file_type", file_type), *m.meta, *(m.vocabulary if m.vocab else [])]
    if a.shape != "gpt-oss-20b":
        m.retype("output.weight", head_type)
    head, total = header(meta, m.tensors)
    if a.empty:
        with open(a.out, "wb") as f:
            f.write(head)
            f.truncate(len(head) + total)
        print(f"{a.out}: {len(m.tensors)} tensors, {total / 1e9:.2f} GB, empty", file=sys.stderr)
        return
    # The bank of floats is larger than any router, so no two experts of a layer are alike.
    experts = any("exps" in name for name, _, _ in m.tensors)
    n_blocks = lambda kind: 1 << 19 if kind == F32 and experts else 1 << 14
    kinds = sorted({kind for _, _, kind in m.tensors})
    banks = {kind: b"".join(block(kind, rnd) for _ in range(n_blocks(kind))) for kind in kinds}
    with open(a.out, "wb") as f:
        f.write(head)
        for name, dims, kind in m.tensors:
            if a.skew and name.endswith("ffn_gate_inp.weight"):
                used = next(v for k, v in m.meta if k.endswith("expert_used_count"))
                write_router(f, dims, banks[kind], skewed(dims[1], used, a.skew, rnd), rnd)
            else:
                write_tensor(f, name, dims, kind, banks, rnd)
    print(f"{a.out}: {len(m.tensors)} tensors, {total / 1e9:.2f} GB", file=sys.stderr)


if __name__ == "__main__":
    main()
