#!/usr/bin/env python3
"""steel convert and steel quantize, end to end through the binary: golden models keep their logits,
vocabularies arrive as GGUF wants them, quantised files hold the usual types, bad input leaves nothing
behind. The parts that need ../shared/golden are skipped, saying so, where it is absent."""
import glob
import json
import lzma
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from gguf_tools import (Gguf, max_difference, mean_kl, pack_text, read_logits, read_safetensors,  # noqa
                        write_gguf, write_safetensors)
import mtp_toy  # noqa

STEEL = os.path.join(sys.argv[1] if len(sys.argv) > 1 else "build", "steel")
MICRO = "tests/golden"
GOLDEN = "../shared/golden"
HAVE_GOLDEN = os.path.isdir(GOLDEN)
TMP = tempfile.mkdtemp(prefix="steel-convert-")


def path(name):
    return os.path.join(TMP, name)


def steel(*args, env=None, limit=None):
    def restrict():
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if args[0] in ("convert", "quantize"):
        args += ("--force",)  # names are used again; test_cli.sh has what is not overwritten
    return subprocess.run([STEEL, *map(str, args)], capture_output=True, text=True, errors="replace",
                          env={**os.environ, **(env or {})}, preexec_fn=restrict)


def ok(*args, **kw):
    r = steel(*args, **kw)
    assert r.returncode == 0, (args, r.stderr)
    return r


def fails(what, out, *args, **kw):
    """Exit 1, one line that says `what`, nothing under the output's name or beside it."""
    r = steel(*args, **kw)
    assert r.returncode == 1, (args, r.returncode, r.stderr)
    lines = [l for l in r.stderr.splitlines() if not l.startswith("steel: note:")]
    assert len(lines) == 1 and what in lines[0], (what, r.stderr)
    assert not glob.glob(glob.escape(out) + "*"), glob.glob(out + "*")


def logits(model, ids, **env):
    out = path("logits.bin")
    ok("logits", model, "--ids", ids, "--out", out, "--kv-type", "f32", env={"STEEL_ISA": "ref", **env})
    return read_logits(out)


def converted_models(root, models):
    """Converted folders give the folder's logits; what golden GGUFs exist are matched byte for byte."""
    for m, kind in models:
        folder, out = f"{root}/{m}", path(m + ".gguf")
        ok("convert", folder, out, *(["--type", kind] if kind else []))
        d = max_difference(logits(out, folder + "/golden.bin"), read_logits(folder + "/golden.bin"))
        print(f"  {m}: {d:.1e}")
        assert d < 2e-3, (m, d)
        theirs = folder + "/model-bf16.gguf"
        if os.path.exists(theirs):
            a, b = Gguf(theirs), Gguf(out)
            assert a.tensors.keys() == b.tensors.keys()
            for name in a.tensors:
                assert a.tensors[name] == b.tensors[name], name
            for key in a.meta:
                assert a.meta[key] == b.meta[key] or key == "general.name", key


def micro_models():
    converted_models(MICRO, [(m, None) for m in ("jamba", "olmo_hybrid", "deepseek_v32", "glm_moe_dsa", "minimax_m3")])
    converted_models(MICRO, [("falcon_h1", "f32")])  # its weights are multiplied by factors
    converted_models(MICRO, [(m, None) for m in (
        "qwen3moe", "qwen3", "qwen2", "llama3-rope", "mistral-window", "mixtral", "phi3", "ministral3", "minimax_m2",
        "gpt_oss", "gpt_oss_mxfp4", "gemma3", "gemma4", "gemma4_moe", "glm4_moe",
        "qwen3_5", "qwen3_5_moe", "qwen3_next", "deepseek_v3", "glm4_moe_lite",
        "dots1", "exaone4", "exaone_moe", "gemma2", "granite", "granitemoe", "hy_v3", "mellum", "olmo2", "olmo3",
        "olmoe", "qwen2_moe", "seed_oss", "smollm3", "solar_open",
        "ernie4_5", "ernie4_5_moe", "glm4", "granitemoehybrid", "mamba2", "lfm2", "lfm2_moe", "nemotron_h", "arcee", "nemotron", "starcoder2", "stablelm", "cohere2", "cohere2_moe", "flex_olmo", "mistral4", "axk1", "afmoe", "muse_glimmer", "laguna", "step3p7", "llama4", "hunyuan_v1_dense", "hunyuan_v1_moe", "apertus", "bitnet",
        "gpt_neox", "gpt2", "phimoe", "mimo_v2_flash",
        "gemma3n", "longcat_flash", "minimax", "deepseek_v4", "inkling")])
    for m in ("qwen3_5", "qwen3_5_moe", "qwen3_next", "lfm2", "jamba", "olmo_hybrid"):  # taps that other readers take as floats only
        types = {t[1] for name, t in Gguf(path(m + ".gguf")).tensors.items() if "conv" in name and "proj" not in name}
        assert types == {0}, (m, types)
    meta = Gguf(path("deepseek_v3.gguf")).meta  # readers know the factor by the multiplier; both would count twice
    assert "deepseek2.rope.scaling.yarn_log_multiplier" in meta and "deepseek2.rope.scaling.attn_factor" not in meta


def inkling_release():
    """The names of Inkling's release: gate and up rows alternate, the head has no padding, the text model is inside another."""
    source, folder, out = f"{MICRO}/inkling", path("inkling-release"), path("inkling-release.gguf")
    config = json.load(open(source + "/config.json"))
    rename = {r"^lm_head": "model.llm.unembed", r"^model\.": "model.llm.", "embed_tokens": "embed", "input_layernorm": "attn_norm",
              "post_attention_layernorm": "mlp_norm", "self_attn": "attn", r"q_proj\b": "wq_du", r"k_proj\b": "wk_dv", r"v_proj\b": "wv_dv",
              r"r_proj\b": "wr_du", r"o_proj\b": "wo_ud", "sconv.conv1d": "sconv", "gate.e_score_correction_bias": "gate.bias",
              "mlp.down_proj": "mlp.w2_md", r"\.experts.down_proj": ".experts.w2_weight",
              "shared_experts.down_proj": "shared_experts.shared_w2_weight"}
    old, tensors = read_safetensors(source + "/model.safetensors"), {}

    def alternate(gate, up, E):
        a, b = (struct.unpack(f"<{len(x) // 2}H", x) for x in (gate, up))
        rows = [row for i in range(0, len(a), E) for row in (a[i:i + E], b[i:i + E])]
        return struct.pack(f"<{2 * len(a)}H", *[v for row in rows for v in row])

    for name, (kind, shape, data) in old.items():
        new = name
        for a, b in rename.items():
            new = re.sub(a, b, new) if new != "lm_head.weight" or a.startswith("^lm") else new
        if name == "lm_head.weight":
            rows = config["unpadded_vocab_size"]
            new, shape, data = "model.llm.unembed.weight", [rows, shape[1]], data[:rows * shape[1] * 2]
        if "up_proj" in name and "gate_up" not in name:
            continue
        if "gate_proj" in name:  # also of shared experts
            up, E = old[name.replace("gate_proj", "up_proj")][2], shape[-1]
            each = len(data) // (shape[0] if len(shape) == 3 else 1)
            data = b"".join(alternate(data[i:i + each], up[i:i + each], E) for i in range(0, len(data), each))
            shape = [*shape[:-2], 2 * shape[-2], E]
            new = new.replace("gate_proj.weight", "w13_dn.weight").replace("gate_proj", "shared_w13_weight")
        if "gate_up_proj" in name:
            E, each = shape[2], len(data) // shape[0]
            data = b"".join(alternate(data[i:i + each // 2], data[i + each // 2:i + each], E) for i in range(0, len(data), each))
            new = new.replace("gate_up_proj", "w13_weight")
        tensors[new] = (kind, shape, data)
    tensors["model.mtp.layers.0.input_proj.weight"] = ("BF16", [1, 1], b"\0\0")
    text = {k: v for k, v in config.items() if k not in ("layer_types", "mlp_layer_types", "intermediate_size", "moe_intermediate_size",
                                                         "conv_kernel_size", "architectures")}
    text.update(local_layer_ids=[0, 2], dense_mlp_idx=1, dense_intermediate_size=config["intermediate_size"],
                intermediate_size=config["moe_intermediate_size"], sconv_kernel_size=config["conv_kernel_size"])
    os.makedirs(folder)
    json.dump({"model_type": "inkling_mm_model", "architectures": ["InklingForConditionalGeneration"], "text_config": text},
              open(folder + "/config.json", "w"))
    write_safetensors(folder + "/model.safetensors", tensors)
    golden = source + "/golden.bin"
    assert max_difference(logits(folder, golden), read_logits(golden)) < 2e-4
    ok("convert", folder, out)
    assert max_difference(logits(out, golden), read_logits(golden)) < 2e-4
    for key, value in (("shared_expert_sink", False), ("q_bias", True), ("gate_activation", "softmax")):
        json.dump({"model_type": "inkling_mm_model", "text_config": {**text, key: value}}, open(folder + "/config.json", "w"))
        r = steel("logits", folder, "--ids", golden, "--out", path("none.bin"))
        assert r.returncode == 1 and key in r.stderr, r.stderr


def no_attention():
    """A Granite 4 whose layers are all state-space models: its GGUF says so by KV heads of 0."""
    source, folder, out = f"{MICRO}/granitemoehybrid", path("no-attention"), path("no-attention.gguf")
    config = json.load(open(source + "/config.json"))
    kept = [i for i, kind in enumerate(config["layer_types"]) if kind == "mamba"]
    tensors = {}
    for name, t in read_safetensors(source + "/model.safetensors").items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer and int(layer[1]) not in kept:
            continue
        tensors[name if not layer else f"model.layers.{kept.index(int(layer[1]))}." + name[layer.end():]] = t
    os.makedirs(folder)
    json.dump({**config, "layer_types": ["mamba"] * len(kept), "num_hidden_layers": len(kept)}, open(folder + "/config.json", "w"))
    write_safetensors(folder + "/model.safetensors", tensors)
    ok("convert", folder, out)
    ids = source + "/golden.bin"
    assert max_difference(logits(out, ids), logits(folder, ids)) < 1e-4


def rounded_yarn():
    """Whether YaRN's bounds are rounded GGUF cannot say: a note tells where its readers take them otherwise."""
    for m, usual in (("gpt_oss", False), ("ministral3", True)):
        config = json.load(open(f"{MICRO}/{m}/config.json"))
        rope = config.get("rope_parameters") or config["rope_scaling"]
        assert rope["rope_type"] == "yarn" and rope.get("truncate", True) == usual
        assert "truncate" not in ok("convert", f"{MICRO}/{m}", path("yarn.gguf")).stderr
        folder = path("yarn-" + m)
        shutil.copytree(f"{MICRO}/{m}", folder)
        rope["truncate"] = not usual
        json.dump(config, open(folder + "/config.json", "w"))
        want = "will be rounded" if usual else "will not be rounded"
        r = ok("convert", folder, path("yarn.gguf"))
        assert "config.json: truncate: GGUF has no key for it" in r.stderr and want in r.stderr, r.stderr


def layers_without_a_place():
    """A file whose layers are dense where the family has experts, or the other way round, is refused by the layer."""
    oss, phi, out = path("gpt_oss.gguf"), path("phi3.gguf"), path("odd.gguf")

    def refused(model, what):
        for args in (["logits", model, "--ids", MICRO + "/phi3/golden.bin", "--out", path("x.bin")], ["plan", model]):
            r = steel(*args)
            assert r.returncode == 1 and len(r.stderr.splitlines()) == 1 and what in r.stderr, (args, r)

    g = Gguf(oss)
    rewrite(out, g.data, {k: v for k, v in g.tensors.items() if k not in ("blk.1.ffn_gate_inp.weight", "blk.2.ffn_gate_inp.weight")})
    refused(out, "layer 1: a gpt-oss layer has a router and experts")
    folder = path("oss-dense")
    shutil.copytree(MICRO + "/gpt_oss", folder)
    config = json.load(open(folder + "/config.json"))
    json.dump({**config, "mlp_only_layers": [2]}, open(folder + "/config.json", "w"))
    refused(folder, "layer 2: a gpt-oss layer has a router and experts")
    g = Gguf(phi)
    n = g.meta["phi3.embedding_length"]
    write_gguf(out, {**{k: v for k, v in g.meta.items() if not isinstance(v, list)}, "phi3.expert_count": 4, "phi3.expert_used_count": 2},
               [(k, *v) for k, v in g.tensors.items()] + [("blk.0.ffn_gate_inp.weight", (n, 4), 0, floats(4 * n))])
    refused(out, "layer 0: a phi3 layer has no experts")


def guessing_models():
    """The block that drafts tokens ahead comes along, under the names readers of GGUF know, and changes nothing
    else: the logits are the golden ones, from the folder and from its GGUF, and every other tensor is the same."""
    for m in ("qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe", "deepseek_v3", "glm4_moe_lite"):
        folder, out, golden = path(m + "-mtp"), path(m + "-mtp.gguf"), f"{MICRO}/{m}/golden.bin"
        mtp_toy.main(f"{MICRO}/{m}", folder, 1)
        ok("convert", folder, out)
        for model in (folder, out):
            d = max_difference(logits(model, golden), read_logits(golden))
            assert d < 2e-3, (model, d)
            assert "multi-token prediction" in ok("show", "--brief", model).stdout
        plain, gguf = Gguf(path(m + ".gguf")), Gguf(out)
        arch = gguf.meta["general.architecture"]
        n = plain.meta[f"{arch}.block_count"]
        assert gguf.meta[f"{arch}.block_count"] == n + 1 and gguf.meta[f"{arch}.nextn_predict_layers"] == 1
        more = {name.removeprefix(f"blk.{n}.") for name in gguf.tensors.keys() - plain.tensors.keys()}
        assert all(gguf.tensors[name] == plain.tensors[name] for name in plain.tensors), m
        own = {f"nextn.{x}.weight" for x in ("eh_proj", "enorm", "hnorm", "shared_head_norm")}
        like = {name.removeprefix(f"blk.{n - 1}.") for name in plain.tensors if name.startswith(f"blk.{n - 1}.")}
        assert more == own | like, (m, more ^ (own | like))
        source = read_safetensors(folder + "/model.safetensors")
        fc = source["mtp.fc.weight" if "qwen" in m else f"model.layers.{n}.eh_proj.weight"]
        assert gguf.tensors[f"blk.{n}.nextn.eh_proj.weight"][2] == fc[2], m
        ok("quantize", out, path("q.gguf"), "Q8_0")
        assert f"blk.{n}.nextn.eh_proj.weight" in Gguf(path("q.gguf")).tensors


def rows_of(model, ids, *flags):
    """What `steel embed` writes for the ids: rows of numbers."""
    out = path("rows.bin")
    ok("embed", model, "--ids", ids, "--out", out, "--kv-type", "f32", *flags, env={"STEEL_ISA": "ref"})
    raw = open(out, "rb").read()
    n, width = struct.unpack("<ii", raw[:8])
    return struct.unpack(f"<{n * width}f", raw[-4 * n * width:])


def encoders():
    """Converted encoders give the folder's rows and scores; pooling, head and windows stand where readers look."""
    for m in ("bert", "xlm_roberta", "modernbert", "bert_rerank", "xlm_roberta_rerank"):
        folder, out = f"{MICRO}/{m}", path(m + ".gguf")
        ids = folder + "/golden.bin"
        ok("convert", folder, out)
        want = read_logits(ids)
        flat = [x for row in want for x in row]
        got = rows_of(out, ids, "--pooling", "none")
        d = max(abs(a - b) for a, b in zip(flat, got))
        print(f"  {m}: {d:.1e}")
        assert len(got) == len(flat) and d < 2e-3, (m, d)
        meta, tensors = Gguf(out).meta, Gguf(out).tensors
        arch = "modern-bert" if m == "modernbert" else "bert"
        assert meta["general.architecture"] == arch and meta[f"{arch}.attention.causal"] is False
        assert f"{arch}.attention.layer_norm_epsilon" in meta
        assert meta[f"{arch}.pooling_type"] == (4 if "rerank" in m else 1)
        for name in ("position_embd.weight", "token_types.weight"):  # which other readers take as floats only
            assert arch != "bert" or tensors[name][1] == 0, (m, name)
        if "rerank" in m:
            score = struct.unpack("<iif", open(folder + "/pooled.bin", "rb").read())[2]
            assert abs(rows_of(out, ids, "--pooling", "rank")[0] - score) < 1e-4 * abs(score), m
            assert {"cls.weight", "cls.output.weight"} <= tensors.keys() and meta["bert.classifier.output_labels"]
    # positions before the first are left out, and a window is told as the number of positions it spans
    config = json.load(open(f"{MICRO}/xlm_roberta/config.json"))
    context = config["max_position_embeddings"] - config["pad_token_id"] - 1
    gguf = Gguf(path("xlm_roberta.gguf"))
    assert gguf.meta["bert.context_length"] == context == gguf.tensors["position_embd.weight"][0][1]
    config = json.load(open(f"{MICRO}/modernbert/config.json"))
    meta = Gguf(path("modernbert.gguf")).meta
    assert meta["modern-bert.attention.sliding_window"] == config["local_attention"]
    assert meta["modern-bert.attention.sliding_window_pattern"] == 3 and "modern-bert.rope.freq_base_swa" in meta
    # pooling by modules.json; a layer behind it has no place
    folder = path("pooled")
    shutil.copytree(f"{MICRO}/bert", folder)
    os.makedirs(folder + "/1_Pooling")
    json.dump({"pooling_mode_cls_token": True}, open(folder + "/1_Pooling/config.json", "w"))
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""},
               {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    json.dump(modules, open(folder + "/modules.json", "w"))
    ok("convert", folder, path("pooled.gguf"))
    assert Gguf(path("pooled.gguf")).meta["bert.pooling_type"] == 2
    os.makedirs(folder + "/2_Dense")
    json.dump({"activation_function": "torch.nn.modules.linear.Identity"}, open(folder + "/2_Dense/config.json", "w"))
    width = json.load(open(folder + "/config.json"))["hidden_size"]
    write_safetensors(folder + "/2_Dense/model.safetensors", {"linear.weight": ("F32", [4, width], floats(4 * width))})
    json.dump(modules + [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}], open(folder + "/modules.json", "w"))
    fails("a Dense layer has no place in a GGUF", path("dense.gguf"), "convert", folder, path("dense.gguf"))
    # a window in layers that are no period
    folder = path("uneven")
    shutil.copytree(f"{MICRO}/modernbert", folder)
    config = json.load(open(folder + "/config.json"))
    config["layer_types"] = ["sliding_attention"] + ["full_attention"] * (config["num_hidden_layers"] - 1)
    json.dump(config, open(folder + "/config.json", "w"))
    fails("layer_types", path("uneven.gguf"), "convert", folder, path("uneven.gguf"))


def encoder_vocabularies():
    """WordPiece and Unigram arrive: texts have the same ids in the folder and in the GGUF."""
    texts = ["Un caf\u00e9, unaffable!", "the  quick\tfox", "xyz \U0001f600 fox", "[SEP] the", ""]
    special = lambda *names: [{"id": i, "content": t, "special": True, "normalized": False, "single_word": False,
                               "lstrip": False, "rstrip": False} for i, t in enumerate(names)]
    around = lambda a, b: {"type": "TemplateProcessing",
                           "single": [{"SpecialToken": {"id": a[0], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                                      {"SpecialToken": {"id": b[0], "type_id": 0}}], "pair": [],
                           "special_tokens": {t: {"id": t, "ids": [i], "tokens": [t]} for t, i in (a, b)}}
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "fox", "un", "##aff", "##able", "caf", "##e", "##\u00e9",
             ",", "!", "cafe", "Un", "[", "]", "sep"]
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "\u2581", "\u2581the", "\u2581quick", "\u2581fox", "un", "aff", "able", "caf\u00e9",
              "\u2581Un", ",", "!", "c", "a", "f", "e", "sep", "[", "]"]
    word = lambda lower: {
        "added_tokens": special(*names[:5]),
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
                       "lowercase": lower},
        "pre_tokenizer": {"type": "BertPreTokenizer"}, "post_processor": around(("[CLS]", 2), ("[SEP]", 3)),
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
                  "vocab": {t: i for i, t in enumerate(names)}}}
    unigram = {
        "added_tokens": special(*pieces[:4]),
        "normalizer": {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
        "post_processor": around(("<s>", 0), ("</s>", 2)),
        "model": {"type": "Unigram", "unk_id": 3, "vocab": [[t, 0.0 if i < 4 else -2.0 - i / 8] for i, t in enumerate(pieces)]}}
    ends = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    ends_xlm = {"cls_token": "<s>", "sep_token": "</s>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    for name, base, tokenizer, config in (("lower", "bert", word(True), ends), ("cased", "bert", word(False), ends),
                                          ("unigram", "xlm_roberta", unigram, ends_xlm)):
        folder, out = path(name), path(name + ".gguf")
        shutil.copytree(f"{MICRO}/{base}", folder)
        json.dump(tokenizer, open(folder + "/tokenizer.json", "w"))
        json.dump(config, open(folder + "/tokenizer_config.json", "w"))
        ok("convert", folder, out)
        meta = Gguf(out).meta
        assert meta["tokenizer.ggml.model"] == ("t5" if name == "unigram" else "bert")
        for key in ("bos", "eos", "cls", "seperator", "unknown"):
            assert f"tokenizer.ggml.{key}_token_id" in meta, (name, key)
        for text in texts:
            a, b = (ok("tokenize", m, "--ids", "--bos", text).stdout for m in (folder, out))
            assert a == b, (name, text, a, b)
    assert meta["tokenizer.ggml.tokens"][4] == "\u2581"
    tokens = Gguf(path("lower.gguf")).meta["tokenizer.ggml.tokens"]
    assert tokens[2] == "[CLS]" and tokens[5] == "\u2581the" and tokens[9] == "aff"
    tokenizer = word(True)
    tokenizer["normalizer"] = {"type": "Lowercase"}
    json.dump(tokenizer, open(path("lower") + "/tokenizer.json", "w"))
    fails("a WordPiece that is not BERT's", path("wordpiece.gguf"), "convert", path("lower"), path("wordpiece.gguf"))


def golden_models():
    converted_models(GOLDEN + "/models", [
        ("qwen3moe", None), ("qwen3moe-tied-nonorm", None), ("qwen3", None), ("qwen2", None),
        ("llama3-rope", None), ("mistral-window", None), ("qwen3moe-gptq", "f32"), ("qwen3moe-fp8", "f32")])


def golden_quantized():
    """Every mix loads and runs; types are the usual ones; no worse than the files given."""
    source, ids = path("qwen3moe.gguf"), f"{GOLDEN}/models/qwen3moe/golden.bin"
    exact = read_logits(ids)
    given = {"Q8_0": "Q8_0", "Q4_K_M": "Q4_K_M", "IQ4_XS": "IQ4_XS", "MXFP4": "MXFP4_MOE"}
    for mix in "Q8_0 Q6_K Q5_K_M Q5_1 Q5_0 Q4_K_M Q4_1 Q4_0 IQ4_XS MXFP4 Q3_K_M IQ3_S Q2_K F16".split():
        out = path(f"q-{mix}.gguf")
        ok("quantize", source, out, mix)
        kl = mean_kl(exact, logits(out, ids))
        note = ""
        if mix in given:
            stem = f"{GOLDEN}/models/qwen3moe/quant/{given[mix]}"
            theirs = mean_kl(exact, read_logits(stem + ".exact.bin"))
            note = f" (given file: {theirs:.2e})"
            assert kl < 1.15 * theirs + 1e-6, (mix, kl, theirs)
            a, b = Gguf(stem + ".gguf"), Gguf(out)
            assert {k: v[:2] for k, v in a.tensors.items()} == {k: v[:2] for k, v in b.tensors.items()}
            assert a.meta["general.file_type"] == b.meta["general.file_type"]
        print(f"  {mix}: KL {kl:.2e}{note}")
        assert kl < 1, mix
    a, b = path("t1.gguf"), path("t2.gguf")
    ok("quantize", source, a, "q4_k_m", "-t", 1)
    ok("quantize", source, b, "Q4_K_M", "-t", 3, env={"STEEL_ISA": "ref"})
    assert open(a, "rb").read() == open(b, "rb").read(), "threads or ISA change the result"
    fails("--allow-requantize", path("r.gguf"), "quantize", a, path("r.gguf"), "Q8_0")
    ok("quantize", a, path("r.gguf"), "Q8_0", "--allow-requantize")
    r = ok("quantize", source, path("dry.gguf"), "Q4_K_M", "--dry-run")
    assert "output.weight" in r.stdout and "Q6_K" in r.stdout and not os.path.exists(path("dry.gguf"))


TYPES = {0: "F32", 1: "F16", 30: "BF16", 2: "Q4_0", 6: "Q5_0", 8: "Q8_0", 12: "Q4_K", 14: "Q6_K", 39: "MXFP4", 40: "NVFP4"}


def types_of(gguf, part):
    """The types of the tensors with `part` in their names."""
    found = {TYPES[t[1]] for name, t in Gguf(gguf).tensors.items() if part in name}
    assert found, part
    return found


def overrides():
    """--tensor: types that do not fit, whatever the mix is, over what would be kept; patterns that say nothing."""
    folder, source, out = MICRO + "/qwen3moe", path("o.gguf"), path("o-out.gguf")
    ok("convert", folder, source)
    rows = json.load(open(folder + "/config.json"))["moe_intermediate_size"]
    assert rows % 256 and rows % 32 == 0
    r = ok("quantize", source, out, "Q4_K_M", "--tensor", "ffn_down_exps=Q6_K")
    assert types_of(out, "ffn_down_exps.") == {"Q8_0"} and "get Q8_0 instead of Q6_K" in r.stderr, r.stderr
    assert "blocks of 256" in r.stderr and types_of(out, "attn_q.") == {"Q5_0"}, r.stderr
    r = ok("quantize", source, out, "Q4_K_M", "--pure")
    assert types_of(out, "_exps.") == types_of(out, "output.weight") == {"Q5_0"} and "Q5_0 instead of Q4_K" in r.stderr, r.stderr
    r = ok("quantize", source, out, "Q8_0", "--pure")
    assert types_of(out, "_exps.") == types_of(out, "token_embd") == {"Q8_0"} and "instead" not in r.stderr, r.stderr
    ok("quantize", source, out, "F32", "--tensor", "attn_q=Q8_0", "--token-embedding-type", "q4_0")
    assert types_of(out, "attn_q.") == {"Q8_0"} and types_of(out, "attn_k.") == types_of(out, "norm") == {"F32"}
    assert types_of(out, "token_embd") == {"Q4_0"} and types_of(out, "output.weight") == {"F32"}
    ok("quantize", source, out, "Q8_0", "--tensor", "attn_q=F32")
    assert types_of(out, "attn_q.") == {"F32"} and types_of(out, "attn_k.") == {"Q8_0"}
    tied = path("tied.gguf")  # a head of its own is not there: the embedding is it
    tiny_folder(path("tied"), "llama", 48)
    ok("convert", path("tied"), tied)
    ok("quantize", tied, out, "Q8_0", "--output-tensor-type", "F16")
    assert types_of(out, "token_embd") == {"F16"} and types_of(out, "attn_q.") == {"Q8_0"}

    oss = MICRO + "/gpt_oss_mxfp4"  # without --type codes are kept, but where a type is named
    r = ok("convert", oss, out, "--tensor", "ffn_.*_exps=Q8_0", "--tensor", "ffn_up_exps=F16")
    assert types_of(out, "ffn_down_exps.w") == types_of(out, "ffn_gate_exps.w") == {"Q8_0"}, r.stderr
    assert types_of(out, "ffn_up_exps.w") == {"F16"} and "12 tensors of MXFP4 change: 4 to F16, 8 to Q8_0" in r.stderr, r.stderr
    r = ok("convert", oss, out, "--tensor", "ffn_up_exps=Q8_0")
    assert "8 tensors of MXFP4 stay as they are, bit for bit" in r.stderr and "4 tensors of MXFP4 change: 4 to Q8_0" in r.stderr
    os.remove(out)

    for command in (["quantize", source, out, "Q8_0"], ["quantize", source, out, "F32"], ["convert", folder, out],
                    ["convert", folder, out, "--dry-run"]):
        fails("--tensor ffn_dwon=Q6_K: ", out, *command, "--tensor", "ffn_up=Q8_0", "--tensor", "ffn_dwon=Q6_K")
        fails("--tensor _norm=Q8_0: fits '", out, *command, "--tensor", "_norm=Q8_0")
        fails("ffn_gate_inp.weight' and its like alone", out, *command, "--tensor", "gate_inp=F16")
    r = steel("quantize", source, out, "Q8_0", "--tensor", "attn_q=Q7")
    assert r.returncode == 2 and "--tensor attn_q=Q7: unknown or unsupported type; use one of F32, F16" in r.stderr, r.stderr
    assert "IQ3_S" in r.stderr and "NVFP4" not in r.stderr
    r = steel("quantize", source, out, "Q8_0", "--output-tensor-type", "Q7")
    assert r.returncode == 2 and "--output-tensor-type Q7: unknown or unsupported type; use one of F32" in r.stderr, r.stderr
    fails("an adapter has one type", out, "convert", MICRO + "/qwen3-lora", out, "--base", MICRO + "/qwen3",
          "--tensor", "attn_q=F16")
    fails("merging into a GGUF keeps its types", out, "convert", source, out, "--merge-lora", MICRO + "/qwen3moe-lora",
          "--tensor", "attn_q=F16")


def golden_overrides():
    """--tensor: by pattern, the last one that fits; nothing else changes."""
    source, plain, other = path("qwen3moe.gguf"), path("o1.gguf"), path("o2.gguf")
    ok("quantize", source, plain, "Q4_K_M")
    ok("quantize", source, other, "Q4_K_M", "--tensor", "ffn_down_exps=Q6_K", "--tensor",
       r"blk\.0\.(attn_q|attn_k)\.=Q8_0", "--tensor", r"blk\.0\.attn_k\.=F16")
    a, b = Gguf(plain).tensors, Gguf(other).tensors
    types = {k: (a[k], b[k]) for k in a if a[k][:2] != b[k][:2]}
    assert types and all("ffn_down_exps" in k or "blk.0.attn_" in k for k in types), types
    r = ok("quantize", source, path("o3.gguf"), "Q4_K_M", "--dry-run", "--tensor", "ffn_down_exps=Q6_K")
    assert all("Q6_K" in l for l in r.stdout.splitlines() if "ffn_down_exps" in l)
    for bad in ("ffn", "=Q6_K", "ffn=Q9", "f(=Q6_K", "ffn=IQ2_S"):
        r = steel("quantize", source, path("o4.gguf"), "Q4_K_M", "--tensor", bad)
        assert r.returncode == 2 and "--tensor " in r.stderr, (bad, r.stderr)
        assert not os.path.exists(path("o4.gguf"))


def golden_packed():
    """Folders packed by other tools become GGUFs of the same logits; what changes is said."""
    for name, kind in (("awq", "AWQ"), ("ct-int4", "Int4"), ("ct-fp8", "FP8"), ("ct-nvfp4", "NVFP4"), ("modelopt-nvfp4", "NVFP4")):
        folder, out = f"{GOLDEN}/families/qwen3moe-{name}", path(f"packed-{name}.gguf")
        r = ok("convert", folder, out, "--type", "f32")
        assert f"14 tensors of {kind} change: 14 to F32" in r.stderr, r.stderr
        kl = mean_kl(read_logits(folder + "/golden.bin"), logits(out, folder + "/golden.bin"))
        print(f"  {name}: KL {kl:.2e}")
        assert kl < 2e-4, (name, kl)
        r = ok("convert", folder, out)
        says = "NVFP4 stay as they are" if kind == "NVFP4" else f"{kind} change: 14 to F16"
        assert says in r.stderr and types_of(out, "token_embd") == {"BF16"}, r.stderr
        assert types_of(out, "attn_q.w") == types_of(out, "_exps.w") == {"NVFP4" if kind == "NVFP4" else "F16"}
        if kind == "NVFP4":
            assert os.path.getsize(out) < 1.05 * os.path.getsize(folder + "/model.safetensors")
            assert logits(out, folder + "/golden.bin") == logits(folder, folder + "/golden.bin"), name


def golden_fp8():
    """FP8 and its scales as other types: halves hold them best, but every type can be asked for."""
    folder, out = GOLDEN + "/models/qwen3moe-fp8", path("fp8.gguf")
    kls = []
    for kind in (["--type", "f32"], [], ["--type", "bf16"], ["--type", "q8_0"]):
        ok("convert", folder, out, *kind)
        kls.append(mean_kl(read_logits(folder + "/golden.bin"), logits(out, folder + "/golden.bin")))
        assert types_of(out, "attn_q.w") == {kind[1].upper() if kind else "F16"}
    print("  f32, f16, bf16, q8_0: " + ", ".join(f"{x:.1e}" for x in kls))
    assert kls[0] < 1e-9 and kls[0] < kls[1] < 1e-6 and kls[1] < kls[2] / 10 and kls[3] < 1e-2, kls


def nvfp4(rows, n, seed):
    """A random matrix as its tools pack it (codes, scales of 16), as GGUF does (blocks of each row), and its values."""
    r = random.Random(seed)
    level = [0, .5, 1, 1.5, 2, 3, 4, 6]
    codes, scales, blocks, values = b"", b"", [], []
    for _ in range(rows):
        c = [r.randrange(16) for _ in range(n)]
        s = [r.randrange(1, 0x7f) for _ in range(n // 16)]
        s[r.randrange(len(s))] = 0
        codes += bytes(c[i] | c[i + 1] << 4 for i in range(0, n, 2))
        scales += bytes(s)
        blocks.append(b"".join(bytes(s[i // 16:i // 16 + 4]) + b"".join(
            bytes(c[g + k] | c[g + 8 + k] << 4 for k in range(8)) for g in range(i, i + 64, 16)) for i in range(0, n, 64)))
        f8 = [(x & 7) / 512 if x < 8 else (1 + (x & 7) / 8) * 2.0 ** ((x >> 3) - 7) for x in s]
        values += [f8[i // 16] * level[x & 7] * (-1 if x & 8 else 1) for i, x in enumerate(c)]
    return codes, scales, blocks, values


def nvfp4_folder(folder, experts, modelopt, spoil=None):
    """A random model whose projections are NVFP4; returns what GGUF should have of each: (blocks of rows, global scale)."""
    want = {}

    def change(config, tensors):
        if experts:
            config.update(architectures=["Qwen3MoeForCausalLM"], num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=64,
                          norm_topk_prob=True, head_dim=16, decoder_sparse_step=1, mlp_only_layers=[])
            p = "model.layers.0."
            for x in ("gate", "up", "down"):
                del tensors[p + f"mlp.{x}_proj.weight"]
                for e in range(experts):
                    tensors[p + f"mlp.experts.{e}.{x}_proj.weight"] = ("F32", [64, 64], b"")
            tensors[p + "mlp.gate.weight"] = ("F32", [experts, 64], floats(64 * experts))
            for x in "qk":
                tensors[p + f"self_attn.{x}_norm.weight"] = ("F32", [16], floats(16, 5))
        config["quantization_config"] = ({"quant_method": "modelopt", "quant_algo": "NVFP4"} if modelopt else
                                         {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"})
        for i, name in enumerate([x for x in tensors if "_proj.weight" in x]):
            _, (rows, n), _ = tensors.pop(name)
            codes, scales, blocks, _ = nvfp4(rows, n, i)
            scale = 2.0 ** -9 * (1 + i / 64)  # its reciprocal is not exact
            stem = name.removesuffix("weight")
            tensors[name if modelopt else name + "_packed"] = ("U8", [rows, n // 2], codes)
            tensors[name + "_scale"] = ("F8_E4M3", [rows, n // 16], scales)
            tensors[name + ("_scale_2" if modelopt else "_global_scale")] = (
                ("F32", [], struct.pack("<f", scale)) if modelopt else ("F32", [1], struct.pack("<f", 1 / scale)))
            tensors[stem + ("input_scale" if modelopt else "input_global_scale")] = ("F32", [1], struct.pack("<f", 0.5))
            if not modelopt:
                r, = struct.unpack("<f", struct.pack("<f", 1 / scale))
                scale, = struct.unpack("<f", struct.pack("<f", 1 / r))
            want[name] = blocks, scale
        if spoil:
            spoil(config, tensors)

    tiny_folder(folder, "qwen3_moe" if experts else "llama", 48, hidden=64, heads=4, kv_heads=2, ff=128, change=change)
    return want


def kept_nvfp4():
    """Codes and block scales stay bit for bit, the tensor's number is NAME.scale, one for each expert."""
    ids = path("ids.bin")
    open(ids, "wb").write(struct.pack("<ii9i", 9, 48, *range(3, 12)))
    for experts in (0, 4):
        for modelopt in (False, True):
            folder, out = path("nvfp4"), path(f"nvfp4-{experts}.gguf")
            want = nvfp4_folder(folder, experts, modelopt)
            r = ok("convert", folder, out)
            assert "7 tensors of NVFP4 stay as they are, bit for bit" in r.stderr and "change" not in r.stderr, r.stderr
            g = Gguf(out)
            assert g.meta["general.file_type"] == 39 and types_of(out, "token_embd") == {"F32"}
            for x, y in (("attn_q", "self_attn.q"), ("attn_k", "self_attn.k"), ("attn_v", "self_attn.v"), ("attn_output", "self_attn.o"),
                         ("ffn_gate", "mlp.gate"), ("ffn_up", "mlp.up"), ("ffn_down", "mlp.down")):
                moe = experts and x.startswith("ffn")
                y = y.replace("mlp.", "mlp.experts.%d.") if moe else y
                parts = [want[f"model.layers.0.{y % e if moe else y}_proj.weight"] for e in range(experts if moe else 1)]
                rows = parts[0][0]
                if not experts and x in ("attn_q", "attn_k"):  # llama's are interleaved
                    parts = [([rows[16 * (i // 16) + i % 2 * 8 + i % 16 // 2] for i in range(len(rows))], parts[0][1])]
                name = f"blk.0.{x}{'_exps' if moe else ''}."
                dims, kind, data = g.tensors[name + "weight"]
                assert kind == 40 and data == b"".join(b"".join(p[0]) for p in parts), name
                assert g.tensors[name + "scale"] == ((len(parts),), 0, struct.pack(f"<{len(parts)}f", *(p[1] for p in parts))), name
            for isa in ("ref", ""):
                assert logits(out, ids, STEEL_ISA=isa) == logits(folder, ids, STEEL_ISA=isa), (experts, modelopt, isa)
            exact = logits(out, ids)
            fails("--allow-requantize", path("nv.gguf"), "quantize", out, path("nv.gguf"), "F32")
            ok("quantize", out, path("nv.gguf"), "F32", "--allow-requantize")  # the number goes into the values
            assert not [x for x in Gguf(path("nv.gguf")).tensors if x.endswith(".scale")]
            assert max_difference(logits(path("nv.gguf"), ids), exact) < 1e-4
            os.remove(path("nv.gguf"))
            r = ok("convert", folder, path("nv.gguf"), "--type", "q8_0")
            assert "7 tensors of NVFP4 change: 7 to Q8_0" in r.stderr and types_of(path("nv.gguf"), "attn_q.") == {"Q8_0"}
            os.remove(path("nv.gguf"))
    hostile_nvfp4(ids)
    router_nvfp4()


def fp8(rows, n, seed):
    """Random codes; none of them is NaN."""
    r = random.Random(seed)
    return bytes(r.choice((0, 128)) | r.randrange(0x20, 0x58) for _ in range(rows * n))


def packed_folder(base, folder, pattern, kind, change=None):
    """The golden model with matrices of random FP8 or NVFP4 in place of those whose names have the pattern."""
    shutil.copytree(base, folder)
    config = json.load(open(base + "/config.json"))
    tensors = read_safetensors(base + "/model.safetensors")
    if change:
        change(config.get("text_config", config), tensors)
    config["quantization_config"] = {"quant_method": "fp8" if kind == "fp8" else "modelopt"}
    packed = [x for x in tensors if re.search(pattern, x)]
    assert packed
    for i, name in enumerate(packed):
        _, (rows, n), _ = tensors.pop(name)
        if kind == "fp8":
            tensors[name] = ("F8_E4M3", [rows, n], fp8(rows, n, i))
            tensors[name + "_scale_inv"] = ("F32", [1], struct.pack("<f", 0.031))
        else:
            codes, scales, _, _ = nvfp4(rows, n, i)
            tensors[name] = ("U8", [rows, n // 2], codes)
            tensors[name + "_scale"] = ("F8_E4M3", [rows, n // 16], scales)
            tensors[name + "_scale_2"] = ("F32", [1], struct.pack("<f", 0.0021))
    json.dump(config, open(folder + "/config.json", "w"))
    write_safetensors(folder + "/model.safetensors", tensors)
    return len(packed)


def wide_heads(config, tensors):
    """Heads of 64 values in Qwen3.5's delta net, so that a block of NVFP4 is within one."""
    config["linear_value_head_dim"] = config["linear_key_head_dim"] = 64
    heads, keys = config["linear_num_value_heads"], 2 * 64 * config["linear_num_key_heads"]
    for name, (_, shape, _) in list(tensors.items()):
        end = name.rsplit("linear_attn.")[-1]
        new = {"in_proj_qkv.weight": [keys + 64 * heads, shape[-1]], "in_proj_z.weight": [64 * heads, shape[-1]],
               "out_proj.weight": [shape[0], 64 * heads], "norm.weight": [64],
               "conv1d.weight": [keys + 64 * heads, 1, shape[-1]]}.get(end)
        if new and end != name:
            n = new[0] * (new[-1] if len(new) > 1 else 1)
            tensors[name] = ("F32", new, floats(n, n))


def dense_latents():
    """Youtu-LLM has DeepSeek V3's attention and dense layers alone: its folder and its GGUF give the logits of such a DeepSeek V3."""
    base, rows = f"{MICRO}/deepseek_v3", []
    for name in ("deepseek_v3", "youtu"):
        folder = path(name)
        shutil.copytree(base, folder)
        config, tensors = json.load(open(base + "/config.json")), read_safetensors(base + "/model.safetensors")
        layers = config["num_hidden_layers"]
        tensors = {n: t for n, t in tensors.items() if ".mlp." not in n or "layers.0." in n}
        for n, t in list(tensors.items()):
            for i in range(1, layers) if ".mlp." in n else ():
                tensors[n.replace("layers.0.", f"layers.{i}.")] = t
        config.update(first_k_dense_replace=layers, num_nextn_predict_layers=0)
        if name == "youtu":
            config.update(model_type=name, architectures=["YoutuForCausalLM"])
            for key in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "n_group", "topk_group",
                        "first_k_dense_replace", "routed_scaling_factor", "norm_topk_prob", "scoring_func"):
                config.pop(key, None)
        json.dump(config, open(folder + "/config.json", "w"))
        write_safetensors(folder + "/model.safetensors", {n: t for n, t in tensors.items() if f"layers.{layers}." not in n})
        rows.append(logits(folder, base + "/golden.bin"))
        out = path(name + ".gguf")
        ok("convert", folder, out)
        rows.append(logits(out, base + "/golden.bin"))
        shutil.rmtree(folder)
    assert Gguf(out).meta["general.architecture"] == "deepseek2"
    assert max(max_difference(rows[0], r) for r in rows[1:]) < 1e-5 and max_difference(rows[0][:1], rows[0][1:2]) > 1e-2


def few_bits():
    """A GGUF with random blocks of Q1_0 and Q2_0 gives the logits of the values they stand for, and can be quantised."""
    base, out, r = f"{MICRO}/gpt_neox", path("bits.gguf"), random.Random(5)
    ok("convert", base, out, "--type", "f32")
    g, raw = Gguf(out), open(out, "rb").read()
    blocks, values, kinds = dict(g.tensors), dict(g.tensors), set()
    for name, (dims, kind, _) in g.tensors.items():
        if len(dims) != 2 or dims[0] % 64:
            continue
        kind, length = (41, 128) if dims[0] % 128 == 0 else (42, 64)
        data, floats_ = b"", []
        for _ in range(dims[0] * dims[1] // length):
            d = r.randrange(1, 64) / 512
            codes = [r.randrange(2 if kind == 41 else 4) for _ in range(length)]
            width = 1 if kind == 41 else 2
            data += struct.pack("<e", d) + sum(c << width * i for i, c in enumerate(codes)).to_bytes(length * width // 8, "little")
            floats_ += [(2 * c - 1 if kind == 41 else c - 1) * d for c in codes]
        kinds.add(kind)
        blocks[name], values[name] = (dims, kind, data), (dims, 0, struct.pack(f"<{len(floats_)}f", *floats_))
    assert kinds == {41, 42}
    rows = []
    for tensors in (values, blocks):
        rewrite(out, raw, tensors)
        rows.append(logits(out, base + "/golden.bin"))
    assert max_difference(*rows) < 1e-5 and max_difference(rows[0][:1], rows[0][1:2]) > 1e-2, max_difference(*rows)
    ok("quantize", out, path("more.gguf"), "F32", "--allow-requantize")
    assert max_difference(rows[0], logits(path("more.gguf"), base + "/golden.bin")) < 1e-5
    print(f"  {max_difference(*rows):.1e}, default kernels KL {mean_kl(rows[0], logits(out, base + '/golden.bin', STEEL_ISA='')):.1e}")


def packed_heads():
    """Packed matrices whose rows or columns GGUF has in another order, or cuts by head."""
    delta = r"linear_attn\.(in_proj_(qkv|z|a|b)|out_proj)\.weight"
    f32, out32 = ["--type", "f32"], ["--tensor", "ssm_out=F32"]
    # latent heads are halves when a folder is read, too
    for m, pattern, kind, flags, change, kept in (
            ("deepseek_v3", r"kv_b_proj\.weight", "fp8", [], None, 0), ("qwen3_5", delta, "fp8", f32, None, 0),
            ("qwen3_5", delta, "nvfp4", f32, wide_heads, 0), ("qwen3_5", delta, "nvfp4", out32, None, 4),
            ("qwen3_5", delta, "nvfp4", [], wide_heads, 5)):
        folder, out, ids = path("heads"), path("heads.gguf"), f"{MICRO}/{m}/golden.bin"
        n = packed_folder(f"{MICRO}/{m}", folder, pattern, kind, change)
        r = ok("convert", folder, out, *flags)
        exact = logits(folder, ids)
        d, spread = max_difference(logits(out, ids), exact), max_difference(exact[:1], exact[1:2])
        print(f"  {m}: {n} of {kind} {' '.join(flags)}: {d:.1e}")
        assert d < 1e-4 and spread > 1, (m, kind, flags, d, spread)
        assert not kept or f"{n * kept // 5} tensors of NVFP4 stay as they are, bit for bit" in r.stderr, r.stderr
        shutil.rmtree(folder)


def hostile_nvfp4(ids):
    out = path("bad-nvfp4.gguf")
    name = "blk.0.ffn_up_exps.scale"
    g = Gguf(path("nvfp4-4.gguf"))

    def refused(dims, kind, data, what):
        items = [(k, *v) for k, v in g.tensors.items() if k != name] + [(name, dims, kind, data)]
        write_gguf(out, g.meta, items)
        for args in (["logits", out, "--ids", ids, "--out", path("x.bin")],
                     ["quantize", out, path("x.gguf"), "F16", "--allow-requantize"]):
            r = steel(*args)
            assert r.returncode == 1 and len(r.stderr.splitlines()) == 1 and name in r.stderr and what in r.stderr, r
            assert not glob.glob(path("x.gguf*"))

    refused((4,), 0, struct.pack("<4f", 1, 1, float("nan"), 1), "entry 2: nan is not a valid scale")
    refused((4,), 0, struct.pack("<4f", 1, 1, 1, float("inf")), "entry 3: inf is not a valid scale")
    refused((3,), 0, bytes(12), "expected")
    refused((2, 2), 0, bytes(16), "expected")
    refused((32, 4), 8, bytes(34 * 4), "expected")
    os.remove(out)
    for modelopt in (False, True):
        stem = "model.layers.0.mlp.experts.2.up_proj.weight"
        last = stem + ("_scale_2" if modelopt else "_global_scale")
        for spoil, what in (
                (lambda c, t: t.update({last: ("F32", [1], struct.pack("<f", float("nan")))}), last + ": entry 0: nan is not a valid scale"),
                (lambda c, t: t.update({last: ("F32", [1], bytes(4))}), last + ": entry 0: 0 is not a valid scale"),
                (lambda c, t: t.update({last: ("F32", [2], bytes(8))}), last + ": 8 bytes where one number is expected"),
                (lambda c, t: t.pop(last), "its global scale is missing"),
                (lambda c, t: t.update({stem + "_scale": ("F8_E4M3", [64, 4], bytes(200) + b"\x7f" + bytes(55))}),
                 stem + "_scale: entry 200: nan is not a valid scale"),
                (lambda c, t: t.update({stem + "_scale": ("F8_E4M3", [64, 5], bytes(320))}), stem + "_scale: shape"),
                (lambda c, t: t.pop(stem + "_scale"), "its weight_scale is missing")):
            nvfp4_folder(path("nvfp4"), 4, modelopt, spoil)
            fails(what, out, "convert", path("nvfp4"), out)
    # one expert that its tool left alone: nothing can be kept of all, so all change

    def plain(config, tensors):
        for end in ("", "_scale", "_scale_2"):
            tensors.pop(stem + end)
        tensors.pop(stem.replace("weight", "input_scale"))
        tensors[stem] = ("F32", [64, 64], floats(4096))
    nvfp4_folder(path("nvfp4"), 4, True, plain)
    ok("convert", path("nvfp4"), out)
    assert types_of(out, "ffn_up_exps.") == {"F32"} and types_of(out, "ffn_gate_exps.w") == {"NVFP4"}


def router_nvfp4():
    """Gemma 4's router has a number for each expert, under the name of NVFP4's: it counts once."""
    base, folder, out = MICRO + "/gemma4_moe", path("gemma-nvfp4"), path("gemma-nvfp4.gguf")
    shutil.copytree(base, folder)
    config = json.load(open(base + "/config.json"))
    text = config.get("text_config", config)
    text["moe_intermediate_size"] = 64
    n, width = text["num_experts"], text["hidden_size"]
    json.dump(config, open(folder + "/config.json", "w"))
    tensors = read_safetensors(base + "/model.safetensors")
    for name in [x for x in tensors if x.endswith("experts.gate_up_proj")]:
        tensors[name] = ("F32", [n, 128, width], floats(n * 128 * width, 1))
        tensors[name.replace("gate_up", "down")] = ("F32", [n, width, 64], floats(n * width * 64, 2))
    write_safetensors(folder + "/model.safetensors", tensors)
    ok("convert", folder, out, "--type", "f32")
    g = Gguf(out)
    as_floats, as_blocks = dict(g.tensors), dict(g.tensors)
    layers = [x for x in g.tensors if x.endswith("ffn_down_exps.weight")]
    assert layers
    own = [2.0 ** -7 * (1 + e / 4) for e in range(n)]  # exact, so that both files mean the same values
    for name in layers:
        mats = [nvfp4(width, 64, e) for e in range(n)]
        dims, _, _ = g.tensors[name]
        scale = name.replace("weight", "scale")
        router = struct.unpack(f"<{n}f", g.tensors[scale][2])
        as_floats[name] = (dims, 0, b"".join(struct.pack(f"<{width * 64}f", *(v * own[e] for v in m[3])) for e, m in enumerate(mats)))
        as_blocks[name] = (dims, 40, b"".join(b"".join(m[2]) for m in mats))
        as_blocks[scale] = ((n,), 0, struct.pack(f"<{n}f", *(a * b for a, b in zip(router, own))))
    raw = open(out, "rb").read()
    both = []
    for tensors in (as_floats, as_blocks):
        rewrite(out, raw, tensors)
        both.append(logits(out, base + "/golden.bin"))
    assert max_difference(*both) < 1e-4, max_difference(*both)
    ok("quantize", out, path("gemma-f32.gguf"), "F32", "--allow-requantize")
    assert max_difference(both[0], logits(path("gemma-f32.gguf"), base + "/golden.bin")) < 1e-4
    shutil.rmtree(folder)


def rewrite(out, raw, tensors):
    """The GGUF `raw` with other tensors of the same names; its metadata stays, byte for byte."""
    g = Gguf.__new__(Gguf)
    g.data, g.at = raw, 8
    n_tensors, n_meta = g.take("QQ")
    for _ in range(n_meta):
        g.text()
        g.value(g.take("I")[0])
    head, offset = raw[:g.at], 0
    head = head[:8] + struct.pack("<Q", len(tensors)) + head[16:]
    for name, (dims, kind, data) in tensors.items():
        head += pack_text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        offset += -(-len(data) // 32) * 32
    head += bytes(-len(head) % 32)
    open(out, "wb").write(head + b"".join(t[2] + bytes(-len(t[2]) % 32) for t in tensors.values()))


def kept_mxfp4():
    """gpt-oss's experts stay bit for bit."""
    folder, out = "tests/golden/gpt_oss_mxfp4", path("oss.gguf")
    r = ok("convert", folder, out)
    assert "MXFP4 stay as they are" in r.stderr, r.stderr
    kl = mean_kl(read_logits(folder + "/golden.bin"), logits(out, folder + "/golden.bin"))
    print(f"  MXFP4: KL {kl:.2e}")
    assert kl < 2e-4, kl


def golden_vocabulary():
    """Qwen's tokenizer.json gives the lists of the GGUF vocabulary; a SentencePiece file likewise."""
    want = Gguf(f"{GOLDEN}/tokenizers/ggml-vocab-qwen2.gguf").meta
    n, folder = len(want["tokenizer.ggml.tokens"]), path("vocab")
    tiny_folder(folder, "qwen2", n, hidden=4, heads=1)
    with lzma.open(f"{GOLDEN}/tokenizers/qwen2-hf/tokenizer.json.xz") as f:
        open(folder + "/tokenizer.json", "wb").write(f.read())
    json.dump({"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"},
               "add_bos_token": False, "bos_token": None}, open(folder + "/tokenizer_config.json", "w"))
    open(folder + "/chat_template.jinja", "w").write("{{ messages }}\u00e9")
    ok("convert", folder, path("vocab.gguf"))
    got = Gguf(path("vocab.gguf")).meta
    for key in ("model", "pre", "tokens", "token_type", "merges", "eos_token_id", "padding_token_id",
                "add_bos_token"):
        key = "tokenizer.ggml." + key
        if key.endswith("token_type"):  # we count <|fim_prefix|> and its kind as control tokens
            for text, a, b in zip(want["tokenizer.ggml.tokens"], got[key], want[key]):
                assert a == b or (a, b, text[:2]) == (3, 4, "<|"), text
            continue
        assert got[key] == want[key], key
    assert got["tokenizer.chat_template"] == "{{ messages }}\u00e9"
    assert "tokenizer.ggml.bos_token_id" not in got
    os.remove(path("vocab.gguf"))

    want = Gguf(f"{GOLDEN}/tokenizers/ggml-vocab-llama-spm.gguf").meta
    n, folder = len(want["tokenizer.ggml.tokens"]), path("spm")
    tiny_folder(folder, "llama", n, hidden=4, heads=1)
    model = bytearray()
    for text, score, kind in zip(want["tokenizer.ggml.tokens"], want["tokenizer.ggml.scores"],
                                 want["tokenizer.ggml.token_type"]):
        b = text.encode()
        piece = b"\x0a" + varint(len(b)) + b + b"\x15" + struct.pack("<f", score) + b"\x18" + varint(kind)
        model += b"\x0a" + varint(len(piece)) + piece
    model += b"\x12\x02\x18\x02"  # trainer_spec.model_type = BPE
    model += b"\x1a\x02\x18\x01"  # normalizer_spec.add_dummy_prefix
    open(folder + "/tokenizer.model", "wb").write(model)
    json.dump({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
              open(folder + "/tokenizer_config.json", "w"))
    ok("convert", folder, path("spm.gguf"))
    got = Gguf(path("spm.gguf")).meta
    for key in want:
        if key.startswith("tokenizer."):
            assert got[key] == want[key], key
    assert got["tokenizer.ggml.add_space_prefix"] is True
    for cut in range(1, len(model), len(model) // 40):
        open(folder + "/tokenizer.model", "wb").write(model[:cut])
        r = steel("convert", folder, path("cut.gguf"))
        assert r.returncode in (0, 1) and (r.returncode == 0 or "tokenizer.model" in r.stderr), r.stderr
    for f in glob.glob(path("cut.gguf*")):
        os.remove(f)


def varint(n):
    out = b""
    while n > 127:
        out += bytes([n & 127 | 128])
        n >>= 7
    return out + bytes([n])


def floats(n, seed=1):
    r = random.Random(seed)
    return struct.pack("<%df" % n, *(r.gauss(0, 0.1) for _ in range(n)))


def tiny_tensors(family, vocab, hidden, ff, layers, kv_rows):
    t = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    for i in range(layers):
        p = f"model.layers.{i}."
        t.update({p + "input_layernorm.weight": [hidden], p + "post_attention_layernorm.weight": [hidden],
                  p + "self_attn.q_proj.weight": [hidden, hidden],
                  p + "self_attn.k_proj.weight": [kv_rows, hidden],
                  p + "self_attn.v_proj.weight": [kv_rows, hidden],
                  p + "self_attn.o_proj.weight": [hidden, hidden],
                  p + "mlp.gate_proj.weight": [ff, hidden], p + "mlp.up_proj.weight": [ff, hidden],
                  p + "mlp.down_proj.weight": [hidden, ff]})
        if family == "qwen2":
            for x, rows in (("q", hidden), ("k", kv_rows), ("v", kv_rows)):
                t[p + f"self_attn.{x}_proj.bias"] = [rows]
    return t


def tiny_folder(folder, family, vocab, hidden=32, heads=4, kv_heads=None, layers=1, ff=64, shards=1,
                change=None):
    """A random model. `change(config, tensors)` may spoil it before it is written."""
    os.makedirs(folder, exist_ok=True)
    for f in glob.glob(folder + "/*"):
        os.remove(f)
    kv_heads = kv_heads or heads
    config = {"model_type": family, "architectures": [family.capitalize() + "ForCausalLM"],
              "hidden_size": hidden, "intermediate_size": ff, "num_hidden_layers": layers,
              "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
              "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
              "tie_word_embeddings": True}
    tensors = {}
    for i, (name, shape) in enumerate(tiny_tensors(family, vocab, hidden, ff, layers,
                                                   hidden // heads * kv_heads).items()):
        n = shape[0] * (shape[1] if len(shape) > 1 else 1)
        tensors[name] = ("F32", shape, floats(n, i) if n < 100000 else bytes(4 * n))
    if change:
        change(config, tensors)
    json.dump(config, open(folder + "/config.json", "w"))
    if shards == 1:
        write_safetensors(folder + "/model.safetensors", tensors)
        return
    names, where = list(tensors), {}
    for s in range(shards):
        file = f"model-{s + 1:05}-of-{shards:05}.safetensors"
        part = {n: tensors[n] for n in names[s::shards]}
        where.update({n: file for n in part})
        write_safetensors(f"{folder}/{file}", part)
    json.dump({"weight_map": where}, open(folder + "/model.safetensors.index.json", "w"))


def bad_folders():
    folder, out = path("bad"), path("bad.gguf")

    def spoil(change, what, *flags):
        tiny_folder(folder, "llama", 48, change=change)
        fails(what, out, "convert", folder, out, *flags)

    spoil(lambda c, t: c.update(model_type="mamba", architectures=["MambaForCausalLM"]), 'model_type "mamba" is not supported')
    spoil(lambda c, t: t.pop("model.norm.weight"), "tensor model.norm.weight: missing")
    spoil(lambda c, t: t.update({"model.norm.weight": ("F32", [16], bytes(64))}),
          "tensor model.norm.weight: shape [1, 16], expected [1, 32]")
    spoil(lambda c, t: t.update({"model.layers.0.mlp.up_proj.weight": ("F32", [32, 64], bytes(8192))}),
          "tensor model.layers.0.mlp.up_proj.weight: shape [32, 64], expected [64, 32]")
    spoil(lambda c, t: t.update({"model.layers.0.adapter.weight": ("F32", [1], bytes(4))}),
          "tensor model.layers.0.adapter.weight: no place for it")
    spoil(lambda c, t: t.update({"model.norm.weight": ("I64", [32], bytes(256))}), "type I64 where")
    name = "model.layers.0.mlp.down_proj.weight"
    spoil(lambda c, t: t.update({name: ("BF16", [32, 64], b"\x00\x00" * 2000 + b"\x80\x7f" * 48)}),
          "blk.0.ffn_down.weight', row 31, column 16: value is not finite", "--type", "f16")
    spoil(lambda c, t: c.update(vocab_size=20), "model.embed_tokens.weight: shape")
    tiny_folder(folder, "llama", 48, shards=3)
    ok("convert", folder, out)
    os.remove(out)
    os.remove(folder + "/model-00002-of-00003.safetensors")
    fails("model-00002-of-00003.safetensors: No such file", out, "convert", folder, out)
    tiny_folder(folder, "llama", 48)
    os.truncate(folder + "/model.safetensors", os.path.getsize(folder + "/model.safetensors") - 1)
    fails("model.safetensors: tensor", out, "convert", folder, out)
    tiny_folder(folder, "llama", 48)
    open(folder + "/tokenizer.json", "w").write('{"model": {"type": "WordPiece"}}')
    fails("model.type 'WordPiece'", out, "convert", folder, out)
    big = ('{"model": {"type": "BPE", "vocab": {"a": 0, "b": 99}, "merges": []}, "pre_tokenizer": '
           '{"type": "ByteLevel", "use_regex": true}}')
    open(folder + "/tokenizer.json", "w").write(big)
    fails("token 'b': id 99 is outside the vocabulary of 48", out, "convert", folder, out)
    open(folder + "/tokenizer.json", "w").write(big.replace("99", "1").replace("ByteLevel", "Odd"))
    fails("pre_tokenizer: GGUF has no name", out, "convert", folder, out)
    ok("convert", folder, out, "--pre", "gpt-2")
    assert Gguf(out).meta["tokenizer.ggml.pre"] == "gpt-2"
    os.remove(out)
    # pre-tokenizers as the families spell them
    shape = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    o200k = (shape % ("*", "+") + shape % ("+", "*") +
             r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    cl100k = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
              r"\s*[\r\n]+|\s+(?!\S)|\s+")
    for pattern, kind, want in ((o200k, "llama", "gpt-4o"), (cl100k, "llama", "llama-bpe"), (cl100k, "glm4_moe", "glm4")):
        if kind == "llama":
            tiny_folder(folder, "llama", 48)
        else:
            for f in ("config.json", "model.safetensors"):
                shutil.copy(f"{MICRO}/{kind}/{f}", f"{folder}/{f}")
        json.dump({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}, "pre_tokenizer": {
            "type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False}]}},
                  open(folder + "/tokenizer.json", "w"))
        ok("convert", folder, out)
        assert Gguf(out).meta["tokenizer.ggml.pre"] == want, want
        os.remove(out)
    tiny_folder(folder, "llama", 48)
    fails("a GGUF already", out, "convert", make_gguf(path("one.gguf")), out)
    fails("`steel convert` makes a GGUF of it", out, "quantize", folder, out, "Q8_0")


def make_gguf(name, n=256, rows=64, extra=()):
    meta = {"general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 64,
            "llama.embedding_length": n, "llama.feed_forward_length": rows,
            "llama.attention.head_count": 4, "llama.attention.layer_norm_rms_epsilon": 1e-5}
    write_gguf(name, meta, [("token_embd.weight", (n, 32), 0, floats(32 * n)),
                            ("blk.0.ffn_up.weight", (n, rows), 0, floats(rows * n, 3)),
                            ("blk.0.attn_norm.weight", (n,), 0, floats(n)), *extra])
    return name


def weaving():
    """Llama's q and k rows come out pairwise, biases too; Mistral is a llama to GGUF."""
    folder, out = path("weave"), path("weave.gguf")

    def change(config, tensors):
        for x, rows in (("q", 32), ("k", 16)):
            tensors[f"model.layers.0.self_attn.{x}_proj.weight"] = (
                "F32", [rows, 32], b"".join(struct.pack("<f", r) * 32 for r in range(rows)))
        tensors["model.layers.0.self_attn.q_proj.bias"] = ("F32", [32], struct.pack("<32f", *range(32)))
        config["sliding_window"] = 16

    tiny_folder(folder, "mistral", 48, heads=4, kv_heads=2, change=change)
    ok("convert", folder, out)
    g = Gguf(out)
    assert g.meta["general.architecture"] == "llama" and g.meta["llama.attention.sliding_window"] == 16
    order = [8 * h + i % 2 * 4 + i // 2 for h in range(4) for i in range(8)]
    rows = struct.unpack("<1024f", g.tensors["blk.0.attn_q.weight"][2])[::32]
    assert list(map(int, rows)) == order, rows
    rows = struct.unpack("<512f", g.tensors["blk.0.attn_k.weight"][2])[::32]
    assert list(map(int, rows)) == order[:16], rows
    assert list(map(int, struct.unpack("<32f", g.tensors["blk.0.attn_q.bias"][2]))) == order
    assert g.tensors["blk.0.attn_norm.weight"][1] == 0


def chat_and_specials():
    """Token kinds, special ids and templates of a small byte-level tokenizer."""
    folder, out = path("chat"), path("chat.gguf")
    tiny_folder(folder, "qwen2", 48)
    added = [{"id": 10, "content": "<|im_end|>", "special": True},
             {"id": 11, "content": "<think>", "special": False},
             {"id": 12, "content": "<|odd|>", "special": False}]
    post = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "b"}}, {"Sequence": {"id": "A"}}]}
    json.dump({"model": {"type": "BPE", "vocab": {c: i for i, c in enumerate("abcdefghij")},
                         "merges": [["a", "b"], ["c d", "e"], "f g"]},
               "added_tokens": added, "post_processor": post,
               "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                   {"type": "Digits", "individual_digits": True},
                   {"type": "ByteLevel", "use_regex": True}]}}, open(folder + "/tokenizer.json", "w"))
    json.dump({"bos_token": "b", "eos_token": {"content": "a"}, "chat_template": [
        {"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]},
        open(folder + "/tokenizer_config.json", "w"))
    ok("convert", folder, out)
    m = {k[10:]: v for k, v in Gguf(out).meta.items() if k.startswith("tokenizer.")}
    assert m["ggml.pre"] == "smollm" and m["ggml.model"] == "gpt2"
    assert m["ggml.tokens"][9:14] == ["j", "<|im_end|>", "<think>", "<|odd|>", "[PAD13]"]
    assert m["ggml.token_type"][9:14] == [1, 3, 4, 3, 5]
    assert m["ggml.merges"] == ["a b", "c\u0120d e", "f g"]
    assert (m["ggml.bos_token_id"], m["ggml.eos_token_id"], m["ggml.eot_token_id"]) == (1, 0, 10)
    assert m["ggml.add_bos_token"] is True and m["ggml.add_eos_token"] is False
    assert (m["chat_template"], m["chat_template.tool_use"], m["chat_templates"]) == ("D", "T", ["tool_use"])


def importance():
    """Both importance formats change the result alike; misfits and damage are errors."""
    source, out = make_gguf(path("im.gguf")), path("im-q.gguf")
    draw = random.Random(5)
    weights = [draw.expovariate(1) for _ in range(256)]
    name = "blk.0.ffn_up.weight"
    sums = struct.pack("<256f", *(40 * w for w in weights))
    write_gguf(path("imatrix.gguf"), {"general.type": "imatrix"},
               [(name + ".in_sum2", (256, 1), 0, sums), (name + ".counts", (1, 1), 0, struct.pack("<f", 40))])
    dat = struct.pack("<ii", 1, len(name)) + name.encode() + struct.pack("<ii", 7, 256) + sums
    open(path("imatrix.dat"), "wb").write(dat + struct.pack("<ii", 1, 3) + b"abc")
    results = []
    for extra in ([], ["--imatrix", path("imatrix.gguf")], ["--imatrix", path("imatrix.dat")]):
        ok("quantize", source, out, "Q4_K_S", *extra)
        results.append(Gguf(out).tensors[name][2])
        os.remove(out)
    assert results[0] != results[1] and results[1] == results[2]
    fails("'blk.0.ffn_up.weight': number of values", out, "quantize", make_gguf(path("other.gguf"), 512), out,
          "Q4_K_S", "--imatrix", path("imatrix.dat"))
    for cut in (4, 20, 30, 40, 1000):
        open(path("cut.dat"), "wb").write(dat[:cut])
        fails("cut.dat: ", out, "quantize", source, out, "Q4_K_S", "--imatrix", path("cut.dat"))
    bad = dat[:-4] + struct.pack("<f", float("nan"))
    open(path("cut.dat"), "wb").write(bad)
    fails("value 255 is negative or not finite", out, "quantize", source, out, "Q4_K_S", "--imatrix",
          path("cut.dat"))
    for file in ("imatrix.dat", "imatrix.gguf"):
        good, draw = open(path(file), "rb").read(), random.Random(3)
        for _ in range(40):
            bad = bytearray(good)
            for _ in range(draw.randint(1, 3)):
                bad[draw.randrange(min(len(bad), 200))] = draw.choice([0, 127, 128, 255])
            open(path("bad.imatrix"), "wb").write(bad)
            r = steel("quantize", source, out, "Q4_K_S", "--imatrix", path("bad.imatrix"))
            assert r.returncode == 0 or (r.returncode == 1 and "bad.imatrix: " in r.stderr), r
    os.remove(out) if os.path.exists(out) else None
    fails("no.dat: No such file", out, "quantize", source, out, "Q4_K_S", "--imatrix", path("no.dat"))


def split_input():
    """A split GGUF becomes one file, the same as from an unsplit one."""
    whole, out = make_gguf(path("whole.gguf")), path("from-split.gguf")
    ok("quantize", whole, path("from-whole.gguf"), "Q5_0")
    g = Gguf(whole)
    items = [(k, *v) for k, v in g.tensors.items()]
    for i in range(3):
        split = {"split.no": i, "split.count": 3, "split.tensors.count": 3}
        write_gguf(path(f"w-{i + 1:05}-of-00003.gguf"), {**(g.meta if i == 0 else {}), **split},
                   [items[i]])
    ok("quantize", path("w-00002-of-00003.gguf"), out, "Q5_0")
    assert open(out, "rb").read() == open(path("from-whole.gguf"), "rb").read()
    os.remove(out)
    os.remove(path("w-00003-of-00003.gguf"))
    fails("w-00003-of-00003.gguf: No such file", out, "quantize", path("w-00001-of-00003.gguf"), out, "Q5_0")


def nothing_left_behind():
    """A full disk, a refused name, a signal: no file under the output's name or beside it."""
    source, out = make_gguf(path("n.gguf"), rows=4096), path("n-out.gguf")
    fails("n-out.gguf: ", out, "quantize", source, out, "Q8_0", limit=100000)
    fails("nowhere", path("nowhere"), "quantize", source, path("nowhere/x.gguf"), "Q8_0")
    os.mkdir(path("folder"))
    r = steel("quantize", source, path("folder"), "Q8_0")
    assert r.returncode == 1 and "not a regular file" in r.stderr and not glob.glob(path("folder.tmp*"))
    open(out, "w").write("old")
    r = steel("quantize", source, out, "Q8_0", limit=100000)
    assert r.returncode == 1 and open(out).read() == "old", "a failure must leave the old file alone"
    ok("quantize", source, out, "Q8_0")
    assert Gguf(out).tensors["blk.0.ffn_up.weight"][1] == 8
    os.remove(out)
    assert steel("quantize", source, out, "Q9_Q").returncode == 2

    # a large sparse file, so that there is time to interrupt
    rows = 1 << 20
    big = path("big.gguf")
    make_gguf(big, rows=1)
    head = open(big, "rb").read()
    at = head.index(b"blk.0.ffn_up.weight") + 19 + 4 + 8
    norm = head.index(b"blk.0.attn_norm.weight") + 22 + 4 + 8 + 4
    patched = bytearray(head)
    struct.pack_into("<Q", patched, at, rows)
    struct.pack_into("<Q", patched, norm, struct.unpack_from("<Q", head, at + 12)[0] + rows * 1024)
    open(big, "wb").write(patched)
    os.truncate(big, len(head) + rows * 1024)
    for sig in (signal.SIGINT, signal.SIGTERM):
        # a job in the background may have been started with SIGINT ignored, and its children too
        p = subprocess.Popen([STEEL, "quantize", big, out, "Q2_K", "-t", "1"], stderr=subprocess.PIPE,
                             preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        until = time.time() + 60
        while not glob.glob(out + ".tmp-*") and p.poll() is None and time.time() < until:
            time.sleep(0.005)
        p.send_signal(sig)
        p.communicate()
        assert p.returncode == -sig, (sig, p.returncode)
        assert not glob.glob(out + "*"), glob.glob(out + "*")
    # kill -9 leaves the file to the next run; those of living processes and other names stay
    p = subprocess.Popen([STEEL, "quantize", big, out, "Q2_K", "-t", "1"], stderr=subprocess.PIPE)
    while not glob.glob(out + ".tmp-*") and p.poll() is None:
        time.sleep(0.005)
    p.kill()
    p.communicate()
    left, theirs = glob.glob(out + ".tmp-*"), [f"{out}.tmp-{os.getpid()}", out + ".tmp-x", out + ".tmp-"]
    for f in theirs:
        open(f, "w").close()
    assert len(left) == 1 and steel("quantize", source, out, "Q8_0").returncode == 0
    assert sorted(glob.glob(out + "*")) == sorted([out, *theirs]), glob.glob(out + "*")
    for f in (out, *theirs):
        os.remove(f)


def main():
    parts = [bad_folders, weaving, chat_and_specials, importance, split_input, nothing_left_behind, micro_models,
             inkling_release, no_attention, rounded_yarn, layers_without_a_place, guessing_models, encoders, encoder_vocabularies, kept_mxfp4, kept_nvfp4, packed_heads, dense_latents, few_bits,
             overrides]
    more = [golden_models, golden_quantized, golden_overrides, golden_packed, golden_fp8, golden_vocabulary]
    if HAVE_GOLDEN:
        parts += more
    else:
        for part in more:
            print(f"skipped: {part.__name__}: no {GOLDEN} here")
    try:
        for part in parts:
            start = time.time()
            print(part.__name__, flush=True)
            part()
            print(f"  {time.time() - start:.1f} s", flush=True)
    finally:
        subprocess.run(["rm", "-rf", TMP])


main()
