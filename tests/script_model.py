#!/usr/bin/env python3
"""Makes a GGUF whose answers are scripted, for tests of agents and tool calls.

With tools and no tool result at the end of the conversation, the model thinks, then calls TOOL with ARGS. Otherwise it
says ANSWER. One layer of zeros: token t is followed by the token that the output matrix holds for t, whatever came
before, so that even prompts of 60,000 tokens are cheap. The vocabulary and the template are the demo model's.
usage: script_model.py OUT.gguf TOOL ARGS_JSON [ANSWER]     (from the root of the repository)
With SEES=1 it has an image tower of zeros beside it, mmproj-scripted.gguf: a picture is 1,024 tokens.
"""
import array
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from gguf_tools import Gguf, write_gguf  # noqa

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
THOUGHT = "\nThe user wants me to use a tool. I will call it now, without delay.\n"
ANSWER = "Hello from the **scripted** model. All is done."
# The demo's template opens the reasoning unless thinking is off. Here it does so only where a tool call is due.
THINKS_NOT = "{%- if enable_thinking is defined and enable_thinking is false -%}"
THINKS_AGAIN = "{%- if not tools or (enable_thinking is defined and enable_thinking is false) -%}"  # it never stops calling
THINKS_FIRST = "{%- if not tools or messages[-1].role == 'tool' or (enable_thinking is defined and enable_thinking is false) -%}"


def byte_level(text):
    """The text in GPT-2's alphabet, in which the vocabulary spells bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return "".join(chr(b if b in plain else 256 + rest.index(b)) for b in text.encode())


class Script:
    """A vocabulary that grows by the pieces of the scripted texts, and which token follows which."""

    def __init__(self, tokens, types):
        self.tokens, self.types, self.next = list(tokens), list(types), {}
        self.known = set(self.tokens)

    def id(self, spelling):
        return self.tokens.index(spelling)

    def pieces(self, text, n):
        """Cuts the text into about n characters each, none of which is a token yet."""
        ids, at = [], 0
        while at < len(text):
            k = n if len(text) - at >= n + 4 else len(text) - at
            while byte_level(text[at:at + k]) in self.known:
                k += 1
                assert at + k <= len(text), "no new piece at %r" % text[at:]
            self.tokens.append(byte_level(text[at:at + k]))
            self.types.append(1)
            self.known.add(self.tokens[-1])
            ids.append(len(self.tokens) - 1)
            at += k
        return ids

    def say(self, ids):
        for a, b in zip(ids, ids[1:]):
            assert self.next.setdefault(a, b) == b, (a, b)


def floats(values):
    return array.array("f", values).tobytes()


def matrices(script, end):
    """(width, embedding, output): each scripted token has a column, all others share the last, which ends the answer."""
    spoken = sorted(script.next)
    width = 64 * ((len(spoken) + 65) // 64)
    column = {t: i for i, t in enumerate(spoken)}
    n = len(script.tokens)
    embedding, output = array.array("f", bytes(4 * width * n)), array.array("f", bytes(4 * width * n))
    for t in range(n):
        embedding[t * width + column.get(t, width - 1)] = 1.0
    for t in spoken:
        output[script.next[t] * width + column[t]] = 32.0 / width ** 0.5
    output[end * width + width - 1] = 32.0 / width ** 0.5
    return width, embedding.tobytes(), output.tobytes()


def write_tower(out, width):
    """A tower of one layer (SmolVLM's), 32 x 32 patches and as many features."""
    E, P, n = 32, 4, 32
    v = "clip.vision."
    meta = {"general.architecture": "clip", "clip.has_vision_encoder": True, "clip.projector_type": "idefics3", "clip.use_gelu": True,
            v + "block_count": 1, v + "embedding_length": E, v + "feed_forward_length": E, v + "attention.head_count": 1,
            v + "attention.layer_norm_epsilon": 1e-6, v + "projection_dim": width, v + "patch_size": P, v + "image_size": P * n,
            v + "projector.scale_factor": 1, v + "preproc_image_size": P * n, v + "preproc_split": False,
            v + "image_mean": [0.5] * 3, v + "image_std": [0.5] * 3}
    shapes = [("v.patch_embd.weight", (P, P, 3, E)), ("v.patch_embd.bias", (E,)), ("v.position_embd.weight", (E, n * n)),
              ("v.post_ln.weight", (E,)), ("v.post_ln.bias", (E,)), ("mm.model.fc.weight", (E, width))]
    for part in "ln1", "ln2":
        shapes += [(f"v.blk.0.{part}.weight", (E,)), (f"v.blk.0.{part}.bias", (E,))]
    for part in "attn_q", "attn_k", "attn_v", "attn_out", "ffn_up", "ffn_down":
        shapes += [(f"v.blk.0.{part}.weight", (E, E)), (f"v.blk.0.{part}.bias", (E,))]
    tensors = []
    for name, dims in shapes:
        size = 1
        for d in dims:
            size *= d
        tensors.append((name, dims, 0, bytes(4 * size)))
    write_gguf(out, meta, tensors)


def build(out, tool, args, answer=ANSWER, thought=THOUGHT, thinks=THINKS_FIRST):
    demo = Gguf(os.path.join(ROOT, "demo/steel-demo.gguf")).meta
    s = Script(demo["tokenizer.ggml.tokens"], demo["tokenizer.ggml.token_type"])
    end = s.id("<|im_end|>")
    line, lines = s.id(byte_level("\n")), s.id(byte_level("\n\n"))
    call = '\n{"name": "%s", "arguments": %s}\n' % (tool, args)
    s.say([line, s.id("<think>"), *s.pieces(thought, 7), s.id("</think>"), s.id("<tool_call>"), *s.pieces(call, 9),
           s.id("</tool_call>"), end])
    s.say([lines, *s.pieces(answer, 6), end])
    template = demo["tokenizer.chat_template"]
    assert THINKS_NOT in template
    if os.environ.get("SEES"):
        s.tokens += ["<image>", "<fake_token_around_image>", "<global-img>"]
        s.types += [3] * 3
    width, embedding, output = matrices(s, end)
    key = "qwen3."
    meta = {"general.architecture": "qwen3", "general.name": "scripted", "general.alignment": 32,
            key + "block_count": 1, key + "context_length": 262144, key + "embedding_length": width,
            key + "feed_forward_length": width, key + "attention.head_count": 1, key + "attention.head_count_kv": 1,
            key + "attention.key_length": width, key + "attention.value_length": width,
            key + "attention.layer_norm_rms_epsilon": 1e-6, key + "rope.freq_base": 1e6, key + "vocab_size": len(s.tokens),
            "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": s.tokens,
            "tokenizer.ggml.token_type": s.types, "tokenizer.ggml.merges": demo["tokenizer.ggml.merges"],
            "tokenizer.ggml.bos_token_id": demo["tokenizer.ggml.bos_token_id"], "tokenizer.ggml.eos_token_id": end,
            "tokenizer.ggml.padding_token_id": demo["tokenizer.ggml.padding_token_id"],
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": template.replace(THINKS_NOT, thinks)}
    ones = floats([1.0] * width)
    tensors = [("token_embd.weight", (width, len(s.tokens)), 0, embedding),
               ("output.weight", (width, len(s.tokens)), 0, output), ("output_norm.weight", (width,), 0, ones)]
    tensors += [("blk.0.%s.weight" % n, (width,), 0, ones) for n in ("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm")]
    tensors += [("blk.0.%s.weight" % n, (width, width), 0, bytes(4 * width * width))
                for n in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")]
    write_gguf(out, meta, tensors)
    if os.environ.get("SEES"):
        write_tower(os.path.join(os.path.dirname(out), "mmproj-scripted.gguf"), width)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    build(*sys.argv[1:5])
