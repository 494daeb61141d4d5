#!/usr/bin/env python3
"""Trains the tiny model that sees, on a CPU, on pictures drawn here. Needs PyTorch (1.13 or newer) and numpy.

  train.py --steel build/steel --out DIR [--steps N] [--pictures N] [--batch N] [--threads N] [--resume DIR]

A second process draws pictures while the first one trains. A row is a picture and two questions about it. Matrices learn
by Muon, the rest by AdamW; the learning rate falls to zero. Classifiers on the mean of the features help the tower at
the beginning and are thrown away. DIR becomes a Hugging Face folder (SmolVLM), for `steel convert`.
"""
import argparse
import json
import math
import multiprocessing
import os
import random
import struct
import subprocess
import time

import numpy as np
import torch
import torch.nn.functional as F

import pictures
import questions
from model import FEATURES, SIDE, Model, config, export

HERE = os.path.dirname(os.path.abspath(__file__))
DEMO = os.path.join(os.path.dirname(HERE), "steel-demo")
KINDS = list(pictures.SHAPES) + [str(d) for d in range(10)]
HELPS = (len(KINDS), len(pictures.COLOURS), 6)
MARKS = ("<image>", "<fake_token_around_image>", "<global-img>")


# ---------------------------------------------------------------- pictures

def taps(n, out):
    """The matrix (out, n) of Lanczos resizing with antialiasing."""
    scale = n / out
    wide = 3 * max(scale, 1)
    m = np.zeros((out, n))
    for i in range(out):
        middle = (i + .5) * scale
        first, end = max(0, int(middle - wide + .5)), min(n, int(middle + wide + .5))
        x = (np.arange(first, end) - middle + .5) / max(scale, 1)
        m[i, first:end] = np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)
    return m / m.sum(1, keepdims=True)


def resize(a, width, height):
    a = np.einsum("yh,hwc->ywc", taps(a.shape[0], height), a, optimize=True)
    a = np.einsum("xw,ywc->yxc", taps(a.shape[1], width), a, optimize=True)
    return np.clip(np.rint(a), 0, 255)


def prepare(width, height, rgb):
    """As Idefics 3's processor has it: the longer side becomes SIDE pixels, then the picture a square."""
    a = np.frombuffer(rgb, np.uint8).reshape(height, width, 3).astype(np.float64)
    if width >= height:
        w, h = SIDE, int(SIDE / (width / height))
        h += h % 2
    else:
        w, h = int(SIDE * (width / height)), SIDE
        w += w % 2
    return resize(resize(a, w, h), SIDE, SIDE).astype(np.uint8).transpose(2, 0, 1)


def what_is(what):
    kind = str(what["digit"]) if what["kind"] == "digit" else what["kind"]
    return KINDS.index(kind), list(pictures.COLOURS).index(what["colour"]), what["count"]


def paint(seed, pool, labels, count):
    """Fills the pool."""
    rng = random.Random(seed)
    torch.set_num_threads(1)
    for i in range(len(pool)):
        width, height, rgb, what = pictures.draw(rng)
        pool[i] = torch.from_numpy(prepare(width, height, rgb).copy())
        labels[i] = torch.tensor(what_is(what))
        count.value = i + 1


def meaning(label):
    kind, colour, count = (int(x) for x in label)
    name = KINDS[kind]
    what = {"kind": "digit" if name.isdigit() else name, "colour": list(pictures.COLOURS)[colour], "count": count}
    if name.isdigit():
        what["digit"] = int(name)
    return what


# ---------------------------------------------------------------- text

class Words:
    """Token ids of all texts that training needs, by `steel tokenize`."""

    def __init__(self, steel):
        texts = {q for ways in questions.WAYS.values() for q in ways}
        for name in KINDS:
            for colour in pictures.COLOURS:
                for count in range(1, 2 if name.isdigit() else 6):
                    what = {"kind": "digit" if name.isdigit() else name, "colour": colour, "count": count}
                    if name.isdigit():
                        what["digit"] = int(name)
                    texts |= {questions.answer(k, what) for k in questions.kinds(what)}
        texts |= {"user\n", "\n", "assistant\n", questions.BLIND}
        texts = sorted(texts)
        end = "<|endoftext|>"
        got = subprocess.run([steel, "tokenize", "-m", DEMO, "--ids"], input=end.join(texts), capture_output=True,
                             text=True, check=True).stdout.split()
        lists, now = [], []
        for i in [int(x) for x in got] + [3063]:
            if i == 3063:
                lists.append(now)
                now = []
            else:
                now.append(i)
        assert len(lists) == len(texts), (len(lists), len(texts))
        self.ids = dict(zip(texts, lists))
        self.start, self.end, self.image, self.fake, self.whole = 3064, 3065, 3072, 3073, 3074
        self.n = 3104  # a multiple of 32

    def head(self, seen):
        ids = [self.start] + self.ids["user\n"]
        at = len(ids) + 2
        if seen:
            ids += [self.fake, self.whole] + [self.image] * FEATURES + [self.fake]
        return ids, at

    def row(self, rng, what):
        """ids and the places whose next token is learned; what None: without a picture."""
        ids, at = self.head(what is not None)
        learned = []
        for turn in range(2):
            if turn:
                ids += [self.start] + self.ids["user\n"]
            kind = rng.choice(questions.kinds(what) if what else ("what", "colour"))
            if what and turn == 0 and rng.random() < .35:
                kind = "what"
            ids += self.ids[rng.choice(questions.WAYS[kind])] + [self.end] + self.ids["\n"]
            ids += [self.start] + self.ids["assistant\n"]
            said = self.ids[questions.answer(kind, what) if what else questions.BLIND] + [self.end]
            learned += range(len(ids) - 1, len(ids) - 1 + len(said))
            ids += said + self.ids["\n"]
        return ids, learned, at


# ---------------------------------------------------------------- learning

def orthogonal(g):
    """Newton-Schulz iteration: every matrix of the stack towards one whose singular values are all near 1."""
    tall = g.shape[-2] > g.shape[-1]
    x = g.transpose(-1, -2) if tall else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.transpose(-1, -2)
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.transpose(-1, -2) if tall else x


class Muon:
    def __init__(self, params, lr, momentum=0.95, decay=0.02):
        self.lr, self.momentum, self.decay = lr, momentum, decay
        self.groups = [[p for p in params if p.shape == s] for s in dict.fromkeys(p.shape for p in params)]
        self.state = [torch.zeros(len(g), *g[0].shape) for g in self.groups]

    @torch.no_grad()
    def step(self, scale):
        lr = self.lr * scale
        for group, m in zip(self.groups, self.state):
            g = torch.stack([p.grad for p in group])
            m.lerp_(g, 1 - self.momentum)
            for p, u in zip(group, orthogonal(g.lerp(m, self.momentum))):
                p.mul_(1 - lr * self.decay).add_(u, alpha=-lr * 0.2 * math.sqrt(max(p.shape)))


def schedule(done, resumed):
    return min(1, 1 - done if resumed else 1, done / .03, (1 - done) / .5)


def batch_loss(model, words, rng, pool, labels, have, size, seen, help_weight):
    picked = torch.randint(0, have, (size,))
    label = labels[picked]
    rows = [words.row(rng, meaning(x) if seen else None) for x in label]
    longest = max(len(ids) for ids, _, _ in rows)
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _, _ in rows])
    where = torch.tensor([i * longest + k for i, (_, learned, _) in enumerate(rows) for k in learned])
    features = model.see(pool[picked]) if seen else None
    x = model.read(ids, features, rows[0][2]).reshape(size * longest, -1)[where]
    logits = x @ model.embed.T
    loss = F.cross_entropy(logits, ids.reshape(-1)[where + 1])
    if seen and help_weight:
        mean = features.mean(1)
        loss = loss + help_weight * sum(F.cross_entropy(mean @ w.T, label[:, i]) for i, w in enumerate(model.helps))
    return loss


@torch.no_grad()
def check(model, words, pool, labels):
    """The share of right answers by kind, greedily, a question at a time."""
    right = {}
    features = model.see(pool)
    for i, label in enumerate(labels):
        what = meaning(label)
        for kind in questions.kinds(what):
            ids, at = words.head(True)
            ids = ids + words.ids[questions.WAYS[kind][0]] + [words.end] + words.ids["\n"]
            ids += [words.start] + words.ids["assistant\n"]
            want = words.ids[questions.answer(kind, what)] + [words.end]
            x = model.read(torch.tensor([ids + want[:-1]]), features[i:i + 1], at)[0, len(ids) - 1:]
            n = right.setdefault(kind, [0, 0])
            n[0] += (x @ model.embed.T).argmax(-1).tolist() == want
            n[1] += 1
    return {k: round(a / b, 3) for k, (a, b) in right.items()}


# ---------------------------------------------------------------- output

def save_tensors(path, tensors):
    head, at, data = {}, 0, []
    for name, t in tensors.items():
        b = t.detach().contiguous().numpy().astype(np.float32).tobytes()
        head[name] = {"dtype": "F32", "shape": list(t.shape), "data_offsets": [at, at + len(b)]}
        at += len(b)
        data.append(b)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(data))


@torch.no_grad()
def load(model, path):
    with open(os.path.join(path, "model.safetensors"), "rb") as f:
        head = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        data = f.read()
    for name, t in export(model).items():
        first, last = head[name]["data_offsets"]
        t.copy_(torch.from_numpy(np.frombuffer(data[first:last], np.float32).copy()).reshape(t.shape))


def save(model, words, out):
    os.makedirs(out, exist_ok=True)

    def put(name, o):
        with open(os.path.join(out, name), "w") as f:
            json.dump(o, f, indent=1)
    save_tensors(os.path.join(out, "model.safetensors"), export(model))
    put("config.json", dict(config(words.n, words.image), bos_token_id=3063, eos_token_id=words.end))
    put("generation_config.json", {"bos_token_id": 3063, "eos_token_id": [words.end, 3063], "do_sample": False})
    put("preprocessor_config.json", {
        "image_processor_type": "Idefics3ImageProcessor", "do_resize": True, "do_image_splitting": False,
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_pad": True, "do_convert_rgb": True,
        "image_mean": [.5] * 3, "image_std": [.5] * 3, "resample": 1, "size": {"longest_edge": SIDE},
        "max_image_size": {"longest_edge": SIDE}})
    with open(os.path.join(DEMO, "tokenizer.json")) as f:
        tokens = json.load(f)
    like = tokens["added_tokens"][0]
    tokens["added_tokens"] = [dict(like, id=words.image + i, content=m) if i >= 0 else t for t, i, m in
                              [(t, -1, "") for t in tokens["added_tokens"]] +
                              [(None, i, m) for i, m in enumerate(MARKS)]]
    put("tokenizer.json", tokens)
    with open(os.path.join(DEMO, "tokenizer_config.json")) as f:
        settings = json.load(f)
    settings["model_max_length"] = 1024
    with open(os.path.join(HERE, "chat_template.jinja")) as f:
        settings["chat_template"] = f.read()
    for i, m in enumerate(MARKS):
        settings["added_tokens_decoder"][str(words.image + i)] = dict(settings["added_tokens_decoder"]["3063"],
                                                                      content=m)
    put("tokenizer_config.json", settings)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steel", default="build/steel")
    ap.add_argument("--out", required=True)
    ap.add_argument("--steps", type=int, default=1600)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--pictures", type=int, default=16000)
    ap.add_argument("--lr", type=float, default=6e-3, help="of Muon; AdamW takes half of it")
    ap.add_argument("--resume", help="start with the weights of this folder; the learning rate falls from the first step on")
    ap.add_argument("--threads", type=int, default=1)
    ap.add_argument("--seed", type=int, default=1)
    args = ap.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    rng, words = random.Random(args.seed), Words(args.steel)
    pool = torch.zeros(args.pictures, 3, SIDE, SIDE, dtype=torch.uint8).share_memory_()
    labels = torch.zeros(args.pictures, 3, dtype=torch.long).share_memory_()
    count = multiprocessing.Value("l", 0)
    painter = multiprocessing.Process(target=paint, args=(f"train {args.seed}", pool, labels, count), daemon=True)
    painter.start()
    held = random.Random("held out")
    tests = [pictures.draw(held) for _ in range(100)]
    test_pool = torch.from_numpy(np.stack([prepare(*p[:3]) for p in tests]))
    test_labels = torch.tensor([what_is(p[3]) for p in tests])
    model = Model(words.n, HELPS)
    muon = Muon(model.matrices(), args.lr)
    adam = torch.optim.AdamW(model.others(), lr=args.lr / 2, betas=(.9, .98), weight_decay=.01)
    if args.resume:
        load(model, args.resume)
    while count.value < (60 if args.resume else 10) * args.batch:
        time.sleep(.2)
    start, mean = time.time(), None
    for step in range(args.steps):
        done = step / args.steps
        have = min(count.value, args.pictures)
        help_weight = 0 if args.resume else .3 * max(0, 1 - 1.5 * done)
        loss = batch_loss(model, words, rng, pool, labels, have, args.batch, step % 40 != 39, help_weight)
        model.zero_grad()
        loss.backward()
        for g in adam.param_groups:
            g["lr"] = args.lr / 2 * schedule(done, args.resume)
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        adam.step()
        muon.step(schedule(done, args.resume))
        mean = loss.item() if mean is None else .97 * mean + .03 * loss.item()
        if step % 25 == 0 or step == args.steps - 1:
            print(f"{time.time() - start:7.1f} s, {time.process_time():6.1f} CPU s  step {step}  loss {mean:.3f}  "
                  f"{count.value} pictures", flush=True)
        if step % 250 == 249 or step == args.steps - 1:
            print("  held out:", check(model, words, test_pool, test_labels), flush=True)
            save(model, words, args.out)
    painter.terminate()


if __name__ == "__main__":
    main()
