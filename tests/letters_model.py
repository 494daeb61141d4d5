"""A small BERT of tests/golden whose words are letters."""
import json
import os
import shutil

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,?!"


def letters_model(work, name, model):
    """A small model of tests/golden with a tokenizer of WordPiece."""
    path = os.path.join(work, name)
    os.mkdir(path)
    for f in ("config.json", "model.safetensors"):
        shutil.copy(os.path.join("tests/golden", model, f), path)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + list(LETTERS) + ["##" + c for c in LETTERS] + ["what", "is", "panda"]
    vocab = {w: i for i, w in enumerate(words)}
    special = [{"id": i, "content": words[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True} for i in range(5)]
    one = lambda t, i: {t: {"id": i, "type_id": 0}}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "TemplateProcessing",
                           "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "[SEP]", "type_id": 0}}],
                           "pair": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
                                    {"Sequence": {"id": "B", "type_id": 1}}, {"SpecialToken": {"id": "[SEP]", "type_id": 1}}],
                           "special_tokens": {t: {"id": t, "ids": [vocab[t]], "tokens": [t]} for t in ("[CLS]", "[SEP]")}},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "vocab": vocab}}
    json.dump(tokenizer, open(os.path.join(path, "tokenizer.json"), "w"))
    json.dump({"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}, open(os.path.join(path, "tokenizer_config.json"), "w"))
    return path
