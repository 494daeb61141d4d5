"""A tokenizer.json as XLM-RoBERTa's are (Unigram over words behind a mark, <s> and </s> around, special tokens first), over the pieces
of a real vocabulary: ids are those of Hugging Face's tokenizers (its JavaScript implementation, 0.2.0), which tests/data/unigram.json
holds. The vocabulary is llama-spm's, with scores by Zipf's law, since XLM-RoBERTa's own is not here.

  test_unigram.py BUILD
  test_unigram.py --write FOLDER     the tokenizer.json and the texts, to make unigram.json anew"""
import json
import math
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(__file__))
from gguf_tools import Gguf

VOCAB = "../shared/golden/tokenizers/ggml-vocab-llama-spm.gguf"
IDS = os.path.join(os.path.dirname(__file__), "data", "unigram.json")
MORE = ["a special<s> token</s> in a text<mask> or two <pad>", "ﬁne ﬂow ① ｆｕｌｌ width ㎏", "e\u0301 and é, Å and Å", "a\u00a0no-break\u2003em space", "tabs\tand\nlines  and   runs ",
        "Ὀδυσσεύς ᾤχετο", "안녕하세요 세계", "สวัสดีชาวโลก", "🦙🦙 🏳️‍🌈 unknown ones", "supercalifragilisticexpialidocious" * 8, "abcdefghij" * 30, "...!!!???", "1234567890 3.14159"]


def texts():
    parts = open(VOCAB + ".inp", encoding="utf-8").read().split("\n__ggml_vocab_test__\n")
    return [p for p in parts if p] + MORE


def tokenizer():
    pieces = Gguf(VOCAB).meta["tokenizer.ggml.tokens"][259:]
    names = ["<s>", "<pad>", "</s>", "<unk>"] + pieces + ["<mask>"]
    special = lambda i, t: {"id": i, "content": t, "single_word": False, "lstrip": t == "<mask>", "rstrip": False, "normalized": False, "special": True}
    token = lambda t: {"SpecialToken": {"id": t, "type_id": 0}}
    text = lambda t: {"Sequence": {"id": t, "type_id": 0}}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [special(i, names[i]) for i in (0, 1, 2, 3, len(names) - 1)],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}]},
        "post_processor": {"type": "TemplateProcessing", "single": [token("<s>"), text("A"), token("</s>")],
                           "pair": [token("<s>"), text("A"), token("</s>"), token("</s>"), text("B"), token("</s>")],
                           "special_tokens": {t: {"id": t, "ids": [i], "tokens": [t]} for i, t in ((0, "<s>"), (2, "</s>"))}},
        "decoder": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
        "model": {"type": "Unigram", "unk_id": 3, "byte_fallback": False,
                  "vocab": [[t, 0.0 if i < 4 or t == "<mask>" else round(-2.0 - math.log(i), 6)] for i, t in enumerate(names)]}}


def main():
    if not os.path.exists(VOCAB):
        print("skipped: a Unigram of a real vocabulary: " + VOCAB + " is not here")
        sys.exit(77)
    if sys.argv[1:2] == ["--write"]:
        json.dump(tokenizer(), open(sys.argv[2] + "/tokenizer.json", "w"))
        json.dump(texts(), open(sys.argv[2] + "/texts.json", "w"))
        return
    want = json.load(open(IDS))
    assert len(want) == len(texts()), (len(want), len(texts()))
    with tempfile.TemporaryDirectory(prefix="steel-unigram-") as folder:
        json.dump(tokenizer(), open(folder + "/tokenizer.json", "w"))
        lines = "".join(json.dumps({"text": t}) + "\n" for t in texts())
        steel = os.path.join(sys.argv[1] if len(sys.argv) > 1 else "build", "steel")
        r = subprocess.run([steel, "tokenize", folder + "/tokenizer.json", "--bos", "--jsonl"], input=lines, capture_output=True, text=True, timeout=300)
    assert r.returncode == 0, r.stderr
    got = [json.loads(l)["ids"] for l in r.stdout.splitlines()]
    wrong = [(t, g, w) for t, g, w in zip(texts(), got, want) if g != w]
    for t, g, w in wrong:
        print(f"FAIL  {t!r}\n  got  {g}\n  want {w}")
    print(f"{len(want) - len(wrong)} of {len(want)} texts")
    sys.exit(len(wrong) > 0 or len(got) != len(want))


main()
