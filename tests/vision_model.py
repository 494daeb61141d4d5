"""A folder with a small model that reads images: a golden of tests/golden_images with a vocabulary of bytes and marks, and a
chat template. It speaks nonsense that depends on its images."""
import json
import os
import shutil

from gguf_tools import read_safetensors, write_safetensors

MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
TEMPLATE = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def byte_names():
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return [chr(b if b in plain else 256 + rest.index(b)) for b in range(256)]


def make(folder, golden="tests/golden_images/qwen3_vl", marks=()):
    marks = [*MARKS, *marks]
    n = 256 + len(marks)
    os.makedirs(folder, exist_ok=True)
    config = json.load(open(f"{golden}/config.json"))
    config["text_config"].update(vocab_size=n, bos_token_id=None, eos_token_id=258, pad_token_id=256)
    json.dump(config, open(f"{folder}/config.json", "w"))
    tensors = read_safetensors(f"{golden}/model.safetensors")
    for name in [t for t in tensors if t.endswith(("embed_tokens.weight", "lm_head.weight"))]:
        kind, (rows, width), data = tensors[name]
        size, out = len(data) // rows, data
        for i in range(rows, n):
            row, at = data[i % rows * size:(i % rows + 1) * size], 2 * (i // rows * 7)
            out += row[at:] + row[:at]
        tensors[name] = (kind, [n, width], out)
    write_safetensors(f"{folder}/model.safetensors", tensors)
    shutil.copy(f"{golden}/preprocessor_config.json", folder)
    added = [{"id": 256 + i, "content": m, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
             for i, m in enumerate(marks)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    json.dump({"version": "1.0", "added_tokens": added, "normalizer": None, "pre_tokenizer": level, "post_processor": level, "decoder": level,
               "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(byte_names())}, "merges": []}}, open(f"{folder}/tokenizer.json", "w"))
    json.dump({"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "tokenizer_class": "Qwen2Tokenizer"},
              open(f"{folder}/tokenizer_config.json", "w"))
    return folder
