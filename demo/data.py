#!/usr/bin/env python3
"""Turns the corpus into rows of token ids for training; train.py starts many of these beside the GPU.

A row holds whole documents, each closed by <|endoftext|>, padded with it; none is cut. Every id is a uint16 whose
two high bits say how much its prediction counts: 0 not at all, 1 a little (what the user and the system say), 2 in
full (what the assistant says, and plain text). What Qwen3's template supplies is never counted: the empty <think>
pair where thinking is off, and the choice not to think in turns gone by. Shards appear under their final name
only when complete. Needs numpy and tokenizers; knows nothing of torch.
"""
import argparse
import itertools
import os
import time

import numpy as np

import corpus

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>",
            "</tool_response>", "<think>", "</think>"]
CONTROL = 3  # the first three are control tokens, the others ordinary added tokens, as in Qwen3
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(vocab_size, docs=50000, seed=77):
    """Byte-level BPE with Qwen's pre-tokenizer. Made-up words are left out of its training, so that they are split
    into the short pieces that copying is learned on, and the vocabulary goes to real words."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    import words
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - len(SPECIALS), show_progress=False, min_frequency=2,
                                  special_tokens=[], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    real = words.made_up
    words.made_up = lambda rng, split, low=1, high=3: rng.choice(words.THINGS + words.KINDS)
    try:
        sample = list(itertools.islice(corpus.documents(seed), docs))
    finally:
        words.made_up = real
    for s in SPECIALS:
        sample = [t.replace(s, "\n") for t in sample]
    tok.train_from_iterator(sample, trainer)
    tok.add_tokens([AddedToken(s, special=i < CONTROL, normalized=False) for i, s in enumerate(SPECIALS)])
    return tok


class Marker:
    """Knows the ids that matter for how much a prediction counts."""

    def __init__(self, tok):
        self.end, self.start, self.stop = (tok.token_to_id(s) for s in SPECIALS[:3])
        self.think = tok.token_to_id("<think>")
        head = tok.encode("<|im_start|>assistant\n").ids
        assert len(head) == 3 and head[0] == self.start, head
        self.assistant = head[1]
        empty = tok.encode("<think>\n\n</think>\n\n").ids
        assert len(empty) == 4, empty
        self.blank = empty[1]

    def mark(self, ids):
        """ids of whole documents, each ending in <|endoftext|> -> how much each id counts (0, 1, 2)."""
        n = len(ids)
        at = np.arange(n)
        first = np.zeros(n, bool)                       # first id of a document
        first[0] = True
        first[1:] = ids[:-1] == self.end
        doc = np.maximum.accumulate(np.where(first, at, 0))
        opened = np.maximum.accumulate(np.where(ids == self.start, at, -1))
        closed = np.maximum.accumulate(np.where(np.concatenate(([False], ids[:-1] == self.stop)), at, -1))
        plain = ids[doc] != self.start
        turn = (opened >= doc) & (closed <= opened)     # inside a turn, <|im_end|> included
        role = ids[np.minimum(np.maximum(opened, 0) + 1, n - 1)]
        said = turn & (role == self.assistant) & (at > opened + 2)
        weight = np.where(plain | said, 2, 1).astype(np.uint16)
        weight[turn & (role == self.assistant) & (at == opened + 3) & (ids != self.think)] = 0
        blank = np.flatnonzero((ids[1:] == self.blank) & (ids[:-1] == self.think)) + 1
        for k in range(3):
            weight[np.minimum(blank + k, n - 1)] = 0
        weight[first] = 0
        return weight


class Packer:
    """Whole documents into rows of one length, several rows open at a time."""

    def __init__(self, length, pad, rows=12):
        self.length, self.pad, self.open, self.rows = length, pad, [], rows

    def add(self, piece):
        """Takes one document; returns a finished row or None."""
        n = len(piece)
        if n > self.length:
            return None
        for row in self.open:
            if row[0] + n <= self.length:
                row[0] += n
                row[1].append(piece)
                return None
        done = None
        if len(self.open) == self.rows:
            full = max(range(self.rows), key=lambda i: self.open[i][0])
            used, pieces = self.open.pop(full)
            done = np.concatenate(pieces + [np.full(self.length - used, self.pad, np.uint16)])
        self.open.append([n, [piece]])
        return done


def rows_of(tok, length, seed, held=False, batch=512):
    """An endless stream of rows."""
    marker = Marker(tok)
    packer = Packer(length, marker.end)
    stream = corpus.documents(seed, held)
    while True:
        texts = [t + corpus.END for t in itertools.islice(stream, batch)]
        lists = [e.ids for e in tok.encode_batch(texts)]
        ids = np.fromiter(itertools.chain.from_iterable(lists), np.uint16)
        marked = ids | (marker.mark(ids) << 14)
        at = 0
        for piece in lists:
            row = packer.add(marked[at:at + len(piece)])
            at += len(piece)
            if row is not None:
                yield row


def main():
    ap = argparse.ArgumentParser(description="write training rows as shards")
    ap.add_argument("--tokenizer", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--seed", required=True)
    ap.add_argument("--length", type=int, default=2048)
    ap.add_argument("--rows", type=int, default=256)
    ap.add_argument("--waiting", type=int, default=6, help="shards of ours that may wait to be taken")
    args = ap.parse_args()
    from tokenizers import Tokenizer
    parent = os.getppid()
    stream = rows_of(Tokenizer.from_file(args.tokenizer), args.length, args.seed)
    for n in itertools.count():
        shard = np.stack(list(itertools.islice(stream, args.rows)))
        name = os.path.join(args.out, f"{args.seed}-{n}")
        shard.tofile(name + ".tmp")
        os.rename(name + ".tmp", name + ".bin")
        while sum(f.startswith(f"{args.seed}-") for f in os.listdir(args.out)) >= args.waiting:
            if os.getppid() != parent:
                return
            time.sleep(0.02)
        if os.getppid() != parent:
            return


if __name__ == "__main__":
    main()
