#!/usr/bin/env python3
"""Trains the demo model on one GPU within a given number of minutes and writes everything Steel needs of it.

Fresh text is generated, tokenised and packed by data.py in as many processes as there are cores; hidden matrices
learn by Muon (momentum, orthogonalised), the rest by AdamW; the learning rate is flat and then falls to zero with
the clock. At the end the weights are rounded to bfloat16, saved under Hugging Face's names, checked against
transformers' Qwen3MoeForCausalLM in float32, and asked every prompt of eval.jsonl.

  train.py --out DIR [--minutes 8.5] [--resume FOLDER]

DIR gets steel-demo.tar.gz (model.safetensors, config.json, tokenizer.json, ...), fixture.bin (README.md describes it),
report.json, answers.jsonl and eval.jsonl.
"""
import argparse
import json
import math
import os
import queue
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time

START = time.time()

import numpy as np              # noqa: E402
import torch                    # noqa: E402

import corpus                   # noqa: E402
import data                     # noqa: E402
import score                    # noqa: E402
from model import Config, Model, config_json, dense_attention, export, generate, widen  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
PROMPT_WEIGHT = 0.1             # what a predicted token of the prompt counts beside one of the answer


def say(*args):
    print(f"[{time.time() - START:6.1f}]", *args, flush=True)


# ---------------------------------------------------------------- text

class Feed:
    """Rows from the data processes, kept on the device; repeats old ones only if no fresh ones have come."""

    def __init__(self, tokenizer_file, length, processes, seed, device):
        base = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self.dir = tempfile.mkdtemp(prefix="demo-rows-", dir=base)
        self.length, self.device, self.ready = length, device, queue.Queue(maxsize=16)
        env = dict(os.environ, TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
        self.children = [subprocess.Popen(
            [sys.executable, os.path.join(HERE, "data.py"), "--tokenizer", tokenizer_file, "--out", self.dir,
             "--seed", f"{seed}.{i}", "--length", str(length)], env=env) for i in range(processes)]
        self.closing = False
        self.thread = threading.Thread(target=self.collect, daemon=True)
        self.thread.start()
        self.kept, self.current, self.at, self.fresh, self.repeated = [], None, 0, 0, 0
        self.rng = random.Random(seed)

    def collect(self):
        while not self.closing:
            names = sorted(f for f in os.listdir(self.dir) if f.endswith(".bin"))
            for f in names:
                path = os.path.join(self.dir, f)
                rows = np.fromfile(path, np.uint16).reshape(-1, self.length).astype(np.int32)
                os.unlink(path)
                while not self.closing:
                    try:
                        self.ready.put(torch.from_numpy(rows), timeout=0.5)
                        break
                    except queue.Full:
                        pass
            if not names:
                time.sleep(0.01)

    def shard(self):
        try:
            rows = self.ready.get(timeout=None if not self.kept else 0.0005)
            rows = rows.to(self.device)
            self.fresh += 1
            if len(self.kept) < 400:
                self.kept.append(rows)
            return rows
        except queue.Empty:
            self.repeated += 1
            return self.rng.choice(self.kept)

    def batch(self, n):
        out = []
        while n:
            if self.current is None or self.at >= len(self.current):
                self.current, self.at = self.shard(), 0
            part = self.current[self.at:self.at + n]
            self.at += len(part)
            n -= len(part)
            out.append(part)
        return torch.cat(out) if len(out) > 1 else out[0]

    def close(self):
        self.closing = True
        for c in self.children:
            c.kill()
        for c in self.children:
            c.wait()
        self.thread.join()
        shutil.rmtree(self.dir, ignore_errors=True)


def unpack(rows, end):
    """Rows of marked ids -> ids, targets, weights, document number of each position."""
    ids = (rows & 0x3FFF).long()
    mark = rows >> 14
    targets = torch.cat((ids[:, 1:], ids[:, :1]), 1)
    level = torch.cat((mark[:, 1:], torch.zeros_like(mark[:, :1])), 1)
    weights = torch.where(level >= 2, 1.0, torch.where(level == 1, PROMPT_WEIGHT, 0.0))
    ended = (ids == end).int()
    docs = torch.cumsum(ended, 1, dtype=torch.int32) - ended
    return ids, targets, weights.float(), docs


# ---------------------------------------------------------------- attention inside documents

class FlexMask:
    """Block-sparse causal attention inside documents (torch's flex_attention), one mask for the batch in a buffer."""

    def __init__(self, rows, length, device):
        from torch.nn.attention.flex_attention import BlockMask, flex_attention
        self.BlockMask, self.flex = BlockMask, flex_attention
        self.docs = torch.zeros(rows, length, dtype=torch.int32, device=device)
        docs = self.docs

        def allowed(b, h, q, k):
            return (q >= k) & (docs[b, q] == docs[b, k])

        self.allowed, self.block = allowed, 128

    def set(self, docs):
        """docs (rows, length), never falling along a row -> the blocks that need a look."""
        self.docs.copy_(docs)
        B, T = docs.shape
        blocks = docs.view(B, T // self.block, self.block)
        low, high = blocks[:, :, 0], blocks[:, :, -1]
        n = T // self.block
        causal = torch.ones(n, n, dtype=torch.bool, device=docs.device).tril()
        need = causal & (high[:, None, :] >= low[:, :, None])
        count = need.sum(-1, dtype=torch.int32)[:, None]
        index = torch.argsort(need.int(), dim=-1, descending=True, stable=True).int()[:, None]
        return self.BlockMask.from_kv_blocks(count.contiguous(), index.contiguous(), BLOCK_SIZE=self.block,
                                             mask_mod=self.allowed)

    def attend(self, mask):
        def run(layer, q, k, v):
            return self.flex(q, widen(k, q.shape[1]), widen(v, q.shape[1]), block_mask=mask)
        return run


class FullMask:
    """The same under an explicit mask, where flex_attention is not to be had."""

    def set(self, docs):
        T = docs.shape[1]
        causal = torch.ones(T, T, dtype=torch.bool, device=docs.device).tril()
        return (causal & (docs[:, :, None] == docs[:, None, :]))[:, None]

    def attend(self, mask):
        return dense_attention(mask)


# ---------------------------------------------------------------- optimiser

def orthogonal(g, steps=5):
    """Newton-Schulz iteration: every matrix of the stack towards one whose singular values are all near 1."""
    x = g.bfloat16() if g.is_cuda else g
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-1, -2)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.transpose(-1, -2)
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return (x.transpose(-1, -2) if tall else x).float()


class Muon:
    def __init__(self, params, lr, momentum=0.95, decay=0.05):
        self.params, self.lr, self.momentum, self.decay = params, lr, momentum, decay
        self.state = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self, scale):
        lr = self.lr * scale
        for p, m in zip(self.params, self.state):
            m.lerp_(p.grad, 1 - self.momentum)
            u = orthogonal(p.grad.lerp(m, self.momentum))
            p.mul_(1 - lr * self.decay)
            p.add_(u, alpha=-lr * 0.2 * math.sqrt(max(p.shape[-2:])))


def schedule(done, rise=0.01):
    """Learning rate over the share of time that is gone: a short rise, flat, then down to zero."""
    if done < rise:
        return max(done, 0.0005) / rise
    if done < 0.45:
        return 1.0
    return max(0.0, (1 - done) / 0.55)


# ---------------------------------------------------------------- results

def q8_0(t):
    """What is left of a tensor after Q8_0: blocks of 32 along the rows, an f16 scale each."""
    b = t.float().reshape(-1, 32)
    d = b.abs().amax(-1, keepdim=True) / 127
    q = torch.where(d > 0, (b / d).round(), torch.zeros_like(b))
    return (q * d.half().float()).reshape(t.shape)


def rounded(model, how):
    """A float32 copy of the model with every matrix passed through `how` (norms and routers stay)."""
    other = Model(model.c).to(model.embed.device)
    with torch.no_grad():
        for (name, a), b in zip(other.named_parameters(), model.parameters()):
            a.copy_(how(b) if b.dim() > 1 and not name.startswith("norm") and name != "router" else b)
    return other


def ask(model, tok, cases, device, most=260):
    """Greedy answers to the prompts, thinking and tool calls included."""
    stop = tok.token_to_id("<|im_end|>")
    prompts = [tok.encode(corpus.render(c["messages"], c.get("tools"), True, c["enable_thinking"])).ids for c in cases]
    order = sorted(range(len(cases)), key=lambda i: len(prompts[i]))
    answers = [None] * len(cases)
    group = 640
    for at in range(0, len(order), group):
        part = order[at:at + group]
        for i, ids in zip(part, generate(model, [prompts[i] for i in part], stop, most, device)):
            answers[i] = tok.decode(ids, skip_special_tokens=False)
    return answers


def by_thinking(cases, answers):
    out = {}
    for flag, name in ((True, "thinking"), (False, "direct")):
        pick = [i for i, c in enumerate(cases) if c["enable_thinking"] == flag]
        out[name] = score.score([cases[i] for i in pick], [answers[i] for i in pick])
    return out


def write_folder(folder, model, tok, template):
    """The Hugging Face folder; the weights in it are bfloat16."""
    from safetensors.torch import save_file
    os.makedirs(folder, exist_ok=True)
    end, stop = tok.token_to_id("<|endoftext|>"), tok.token_to_id("<|im_end|>")
    tensors = {k: v.to(torch.bfloat16).contiguous().cpu().clone() for k, v in export(model).items()}
    save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    tok.save(os.path.join(folder, "tokenizer.json"))

    def put(name, value):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
            f.write(value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    put("config.json", config_json(model.c, end, stop))
    put("generation_config.json", {"bos_token_id": end, "eos_token_id": [stop, end], "pad_token_id": end,
                                   "do_sample": True, "temperature": 0.5, "top_k": 20, "top_p": 0.95})
    put("tokenizer_config.json", {
        "tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, "add_prefix_space": False, "bos_token": None,
        "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None, "errors": "replace",
        "clean_up_tokenization_spaces": False, "split_special_tokens": False, "model_max_length": model.c.positions,
        "additional_special_tokens": data.SPECIALS[1:data.CONTROL],
        "added_tokens_decoder": {str(tok.token_to_id(s)): {
            "content": s, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": i < data.CONTROL} for i, s in enumerate(data.SPECIALS)},
        "chat_template": template})
    put("chat_template.jinja", template)


def restore(model, folder):
    from safetensors.torch import load_file
    saved = load_file(os.path.join(folder, "model.safetensors"))
    mine = export(model)
    assert saved.keys() == mine.keys()
    with torch.no_grad():
        for name, t in mine.items():        # views of the stacked weights
            t.copy_(saved[name])


def fixture_texts(tok, count=20, longest=96):
    """Held-out documents of several kinds as ids, cut to `longest`."""
    out = []
    kinds = ["story", "tools", "arithmetic", "fact", "system prompt", "schema", "memory", "reading", "mixed talk", "notes"]
    from split import Split
    rng = random.Random("fixture")
    for i in range(count):
        make = corpus.KIND_MAKERS[corpus.KIND_NAMES.index(kinds[i % len(kinds)])]
        out.append(tok.encode(make(rng, Split(True))).ids[:longest])
    return out


def compare_with_transformers(folder, model, texts, device, path, points=6):
    """Loads the folder with transformers in float32, writes the fixture, returns what the comparison found."""
    import transformers
    from transformers import AutoTokenizer, Qwen3MoeForCausalLM
    hf = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    worst, vocab = 0.0, model.c.vocab
    with open(path, "wb") as f, torch.no_grad():
        np.array([len(texts), vocab], "<i4").tofile(f)
        for ids in texts:
            x = torch.tensor([ids], device=device)
            z = hf(x).logits[0].float()
            T = len(ids)
            h, _ = model.hidden(x, torch.arange(T, device=device),
                                dense_attention(torch.ones(T, T, dtype=torch.bool, device=device).tril()))
            worst = max(worst, (model.logits(h)[0] - z).abs().max().item())
            at = sorted({round((T - 1) * (i + 1) / points) for i in range(points)})
            np.array([T, len(at)], "<i4").tofile(f)
            np.array(ids, "<i4").tofile(f)
            np.array(at, "<i4").tofile(f)
            z[at].cpu().numpy().astype("<f4").tofile(f)
    found = {"transformers": transformers.__version__, "texts": len(texts), "largest_difference": worst,
             "rope_theta": (getattr(hf.config, "rope_parameters", None) or {}).get("rope_theta"),
             "parameters": sum(p.numel() for p in hf.parameters())}
    try:
        t = AutoTokenizer.from_pretrained(folder)
        cases = [json.loads(x) for x in open(os.path.join(HERE, "eval.jsonl"), encoding="utf-8")][:200]
        found["template_agrees"] = all(
            t.apply_chat_template(c["messages"], tools=c.get("tools"), tokenize=False, add_generation_prompt=True,
                                  enable_thinking=c["enable_thinking"]) ==
            corpus.render(c["messages"], c.get("tools"), True, c["enable_thinking"]) for c in cases)
        text = corpus.render(cases[1]["messages"], cases[1].get("tools"), True)
        from tokenizers import Tokenizer
        found["tokenizer_agrees"] = t(text)["input_ids"] == \
            Tokenizer.from_file(os.path.join(folder, "tokenizer.json")).encode(text).ids
    except Exception as e:  # a report, not a reason to lose the run
        found["tokenizer_error"] = repr(e)[:400]
    return found


def pack(folder, path):
    with tarfile.open(path + ".tmp", "w:gz", compresslevel=4) as t:
        for name in sorted(os.listdir(folder)):
            t.add(os.path.join(folder, name), "hf/" + name)
    os.replace(path + ".tmp", path)


# ---------------------------------------------------------------- the run

def main():
    ap = argparse.ArgumentParser(description="train the demo model")
    ap.add_argument("--out", required=True)
    ap.add_argument("--minutes", type=float, default=8.5, help="from the start until training ends")
    ap.add_argument("--tokenizer", help="take this tokenizer.json in place of training one")
    ap.add_argument("--resume", metavar="FOLDER", help="go on from the Hugging Face folder of an earlier run")
    ap.add_argument("--vocab", type=int, default=3072)
    ap.add_argument("--rows", type=int, default=64, help="rows a step")
    ap.add_argument("--length", type=int, default=2048, help="tokens a row")
    ap.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    ap.add_argument("--lr", type=float, default=4e-3, help="of Muon; AdamW takes three quarters of it")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--attention", choices=["flex", "full"], default="flex")
    ap.add_argument("--no-compile", action="store_true")
    ap.add_argument("--small", action="store_true", help="a toy size, to try the script without a GPU")
    args = ap.parse_args()
    os.makedirs(args.out, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    with open(os.path.join(HERE, "chat_template.jinja"), encoding="utf-8") as f:
        template = f.read()
    work = tempfile.mkdtemp(prefix="demo-train-")
    deadline = START + args.minutes * 60

    tokenizer_file = os.path.join(work, "tokenizer.json")
    if args.resume and not args.tokenizer:
        args.tokenizer = os.path.join(args.resume, "tokenizer.json")
    if args.tokenizer:
        shutil.copy(args.tokenizer, tokenizer_file)
        from tokenizers import Tokenizer
        tok = Tokenizer.from_file(tokenizer_file)
    else:
        tok = data.train_tokenizer(args.vocab, 2000 if args.small else 50000)
        tok.save(tokenizer_file)
    shutil.copy(tokenizer_file, os.path.join(args.out, "tokenizer.json"))
    vocab = (tok.get_vocab_size() + 31) // 32 * 32
    end = tok.token_to_id("<|endoftext|>")
    say("tokenizer", tok.get_vocab_size(), "tokens; model vocabulary", vocab)
    feed = Feed(tokenizer_file, args.length, args.processes, args.seed, device)
    held = data.rows_of(tok, args.length, args.seed, held=True)
    held_rows = torch.from_numpy(np.stack([next(held) for _ in range(4 if args.small else args.rows)])
                                 .astype(np.int32)).to(device)
    say("held-out rows ready")

    c = Config(vocab=vocab) if not args.small else Config(vocab=vocab, hidden=32, layers=2, heads=2, kv_heads=1,
                                                          head_dim=16, experts=4, top=2, width=32)
    model = Model(c).to(device)
    if args.resume:
        restore(model, args.resume)
    model.compute = torch.bfloat16 if device.type == "cuda" else None
    say("parameters", sum(p.numel() for p in model.parameters()))
    muon = Muon(model.matrices(), args.lr)
    adam = torch.optim.AdamW([{"params": [model.embed, model.router], "weight_decay": 0.01},
                              {"params": model.others()[2:], "weight_decay": 0.0}],
                             lr=args.lr * 0.75, betas=(0.9, 0.95), eps=1e-8, fused=device.type == "cuda") \
        if device.type == "cuda" else torch.optim.AdamW(model.others(), lr=args.lr * 0.75, betas=(0.9, 0.95))
    average = [p.detach().clone() for p in model.parameters()]
    positions = torch.arange(args.length, device=device)

    def build(kind):
        masks = FlexMask(args.rows, args.length, device) if kind == "flex" else FullMask()

        def loss_of(ids, targets, weights, mask):
            with torch.autocast(device_type=device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                return model.loss(ids, targets, weights, positions, masks.attend(mask))
        return masks, loss_of if args.no_compile or device.type == "cpu" else torch.compile(loss_of, dynamic=False)

    def forward(rows):
        ids, targets, weights, docs = unpack(rows, end)
        return loss_of(ids, targets, weights, masks.set(docs))

    kind = args.attention if device.type == "cuda" else "full"
    masks, loss_of = build(kind)
    try:
        loss, _ = forward(feed.batch(args.rows))
        loss.backward()
    except Exception as e:
        if kind != "flex":
            raise
        say("flex attention failed, falling back:", repr(e)[:600])
        kind = "full"
        masks, loss_of = build(kind)
        loss, _ = forward(feed.batch(args.rows))
        loss.backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    say("first step done,", kind, "attention; loss", round(loss.item(), 3))
    for p in model.parameters():
        p.grad = None

    report = {"parameters": sum(p.numel() for p in model.parameters()), "config": vars(c), "attention": kind,
              "tokens_per_step": args.rows * args.length, "curve": [], "held_out_curve": [], "tokenizer": tok.get_vocab_size()}
    begin, step, last, saved = time.time(), 0, time.time(), time.time()
    recent, shares = [], []
    while True:
        done = (time.time() - begin) / max(1e-9, deadline - begin)
        if done >= 1:
            break
        scale = schedule(done, 0.1 if args.resume else 0.01)
        loss, balance = forward(feed.batch(args.rows))
        (loss + 0.01 * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.others(), 1.0)
        for g in adam.param_groups:
            g["lr"] = args.lr * 0.75 * scale
        adam.step()
        muon.step(scale)
        for p in model.parameters():
            p.grad = None
        step += 1
        if done > 0.85:
            for a, p in zip(average, model.parameters()):
                a.lerp_(p.detach(), 0.01)
        elif step % 50 == 0:
            for a, p in zip(average, model.parameters()):
                a.copy_(p.detach())
        recent.append(loss.detach())
        shares.append(balance.detach())
        if step == 100 and kind == "flex":      # the sparse mask must mean what the explicit one means
            ids, targets, weights, docs = unpack(held_rows, end)
            sparse = forward(held_rows)[0].item()
            full = FullMask()
            with torch.no_grad(), torch.autocast(device_type=device.type, dtype=torch.bfloat16):
                dense = model.loss(ids, targets, weights, positions, full.attend(full.set(docs)))[0].item()
            say(f"mask check: {sparse:.5f} sparse, {dense:.5f} explicit")
            report["mask_check"] = [sparse, dense]
            if not abs(sparse - dense) < 0.01:
                say("they differ: explicit masks from here on")
                kind = report["attention"] = "full"
                masks, loss_of = build(kind)
        if step % 25 == 0:
            value = torch.stack(recent).mean().item()       # waits for the device, so that the clock is true
            if not math.isfinite(value):
                raise SystemExit("the loss is not finite")
            report["curve"].append([step, round(time.time() - begin, 2), round(value, 4)])
            rate = 25 * args.rows * args.length / (time.time() - last)
            if step % 250 == 0 or step == 25 or args.small:
                # with gradients on, though none are taken: the compiled function is the same one
                held_loss = forward(held_rows)[0].item() if len(held_rows) == args.rows else value
                report["held_out_curve"].append([step, round(held_loss, 4)])
                say(f"step {step} loss {value:.4f} held-out {held_loss:.4f} balance "
                    f"{torch.stack(shares).mean().item():.3f} {rate / 1e6:.2f} M tokens/s, shards fresh {feed.fresh} "
                    f"repeated {feed.repeated}, lr x {scale:.3f}")
            recent, shares, last = [], [], time.time()
            if time.time() - saved > 120:
                write_folder(os.path.join(work, "steel-demo"), model, tok, template)
                pack(os.path.join(work, "steel-demo"), os.path.join(args.out, "steel-demo.tar.gz"))
                saved = last = time.time()
    seconds = time.time() - begin
    feed.close()
    say(f"trained {step} steps in {seconds:.1f} s")

    same_size = len(held_rows) == args.rows
    final = [p.detach().clone() for p in model.parameters()]
    plain = forward(held_rows)[0].item() if same_size else float("nan")
    with torch.no_grad():
        for p, a in zip(model.parameters(), average):
            p.copy_(a)
    averaged = forward(held_rows)[0].item() if same_size else float("nan")
    with torch.no_grad():
        if not averaged < plain:
            for p, a in zip(model.parameters(), final):
                p.copy_(a)
    model.compute = None
    say(f"held-out loss {plain:.4f}, of the averaged weights {averaged:.4f}")
    report.update(steps=step, seconds=round(seconds, 1), tokens=step * args.rows * args.length, fresh_shards=feed.fresh,
                  repeated_shards=feed.repeated, held_out_loss=plain, held_out_loss_averaged=averaged)

    # from here on the weights are what bfloat16 can hold
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(torch.bfloat16).float())
    folder = os.path.join(work, "steel-demo")
    write_folder(folder, model, tok, template)
    pack(folder, os.path.join(args.out, "steel-demo.tar.gz"))

    def write_report():
        with open(os.path.join(args.out, "report.json"), "w") as f:
            json.dump(report, f, indent=1)

    write_report()
    say("model saved")
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        report["check"] = compare_with_transformers(folder, model, fixture_texts(tok), device,
                                                    os.path.join(args.out, "fixture.bin"))
    except Exception as e:
        report["check"] = {"error": repr(e)[:1500]}
    say("transformers:", report["check"])
    write_report()
    with open(os.path.join(HERE, "eval.jsonl"), encoding="utf-8") as f:
        cases = [json.loads(line) for line in f]
    if args.small:
        cases = cases[:20]
    torch.backends.cuda.matmul.allow_tf32 = True
    report["scores"], names = {}, {"bf16": model, "q8_0": None}
    for name in names:
        m = model if name == "bf16" else rounded(model, q8_0)
        answers = ask(m, tok, cases, device, 20 if args.small else 260)
        report["scores"][name] = score.score(cases, answers)
        report["scores"][name + " by mode"] = by_thinking(cases, answers)
        say(name, {k: f"{r}/{n}" for k, (r, n) in report["scores"][name].items()})
        if name == "bf16":
            with open(os.path.join(args.out, "answers.jsonl"), "w", encoding="utf-8") as f:
                f.writelines(json.dumps(a, ensure_ascii=False) + "\n" for a in answers)
        write_report()
    shutil.copy(os.path.join(HERE, "eval.jsonl"), os.path.join(args.out, "eval.jsonl"))
    shutil.rmtree(work, ignore_errors=True)
    say("done")


if __name__ == "__main__":
    main()
