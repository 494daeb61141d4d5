#!/usr/bin/env python3
"""Prefixes on disk: found after a restart, a swap and by a second process; nothing damaged, foreign or half-written is believed."""
import base64
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time

from serverlib import HANG, Server, run_tests
import vision_model
from models_lib import Models, make_toys

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
STEEL = os.path.join(BUILD, "steel")
COMP = "/v1/completions"
WORK = tempfile.TemporaryDirectory(prefix="steel-keep-")


def tokens(n, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(40, 140) for _ in range(n)]


def ask(s, prompt, model=None, n=8, lora=None, **kw):
    """(answer with its log-probabilities, cached tokens, those from disk)"""
    r = s.json(COMP, {"model": model, "lora": lora, "prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True, "logprobs": 1}, **kw)
    d = r["usage"]["prompt_tokens_details"]
    return (r["choices"][0]["text"], r["choices"][0]["logprobs"]["token_logprobs"]), d["cached_tokens"], d.get("disk_tokens", 0)


def toy(kind=""):
    path = os.path.join(WORK.name, f"toy{kind}.gguf")
    if not os.path.exists(path):
        subprocess.run([os.path.join(BUILD, "tests/toy_gguf"), path, *([kind] if kind else [])], check=True)
    return path


def files(d, kinds="ks"):
    return sorted(os.path.join(root, f) for root, _, names in os.walk(d) for f in names if f[-2:] in [f".{k}" for k in kinds])


def filled(model, *flags, n=1000):
    """A folder with the segments of one prompt, and what its answer is."""
    d = tempfile.mkdtemp(dir=WORK.name)
    s = Server(BUILD, "--cache-dir", d, *flags, model=model)
    want = ask(s, tokens(n))[0]
    assert s.stop() == 0
    assert files(d), os.listdir(d)
    return d, want


def test_restart():
    """The same answer byte for byte, after a restart, for every kind of cache; permissions; the list and its end."""
    for model, flags in ((toy(), ()), (toy("hybrid"), ("--kv-canary",)), ("tests/golden/qwen3_5", ()), ("tests/golden/gpt_oss", ("--kv-type", "q8_0")), (toy(), ("--page-len", "32"))):
        flags = ("-c", "1024", *flags)
        d, want = filled(model, *flags)
        for root, dirs, names in os.walk(d):
            assert all(stat.S_IMODE(os.stat(os.path.join(root, f)).st_mode) == 0o600 for f in names), names
            assert all(stat.S_IMODE(os.stat(os.path.join(root, f)).st_mode) == 0o700 for f in dirs), dirs
        s = Server(BUILD, "--cache-dir", d, *flags, model=model)
        got, cached, disk = ask(s, tokens(1000))
        assert got == want and cached == disk == 768, (model, cached, disk)
        m = s.metrics()
        assert m["steel_prefix_disk_tokens_total"] == 768 and m["steel_prefix_disk_damaged_total"] == 0
        assert ask(s, tokens(1000))[1:] >= (976, 0), "now from memory"
        # another prompt with the same beginning, and one without
        other = tokens(600) + tokens(300, 1)
        assert ask(s, other)[1] >= 512 and ask(s, tokens(900, 2))[1:] == (0, 0)
        assert s.stop() == 0
        r = subprocess.run([STEEL, "cache", "list", "--cache-dir", d], capture_output=True, text=True)
        assert r.returncode == 0 and len(r.stdout.splitlines()) == 2, r
        name = r.stdout.splitlines()[1].split()[0]
        assert subprocess.run([STEEL, "cache", "clear", "nothing", "--cache-dir", d]).returncode == 0 and files(d)
        assert subprocess.run([STEEL, "cache", "clear", name, "--cache-dir", d]).returncode == 0 and not files(d)


def test_foreign():
    """Another model, cache type, client or salt finds nothing; no cache is no cache."""
    d, want = filled(toy(), "-c", "1024")
    n = len(files(d))
    for model, flags in ((toy("hybrid"), ()), (toy(), ("--kv-type", "bf16")), (toy(), ("--page-len", "8"))):
        s = Server(BUILD, "--cache-dir", d, "-c", "1024", *flags, model=model)
        assert ask(s, tokens(1000))[1:] == (0, 0)
        assert s.stop() == 0
    keys = ("--api-key", "a", "--api-key", "b")
    s = Server(BUILD, "--cache-dir", d, "-c", "1024", *keys, model=toy())
    for key in "ab":
        assert ask(s, tokens(1000), headers={"Authorization": "Bearer " + key})[2] == 0
    assert s.stop() == 0
    s = Server(BUILD, "--cache-dir", d, "-c", "1024", *keys, model=toy())
    got, cached, disk = ask(s, tokens(1000), headers={"Authorization": "Bearer b"})
    assert got == want and disk == 768
    assert s.stop() == 0
    for flags in (("--cache-disk", "0"), ("--no-prefix-cache",)):
        s = Server(BUILD, "--cache-dir", d, "-c", "1024", *flags, model=toy())
        assert ask(s, tokens(1000))[1:] == (0, 0)
        assert s.stop() == 0
    # a model of another date is another model
    path = shutil.copy(toy(), os.path.join(WORK.name, "dated.gguf"))
    e, _ = filled(path, "-c", "1024")
    os.utime(path, (1, 1))
    s = Server(BUILD, "--cache-dir", e, "-c", "1024", model=path)
    assert ask(s, tokens(1000))[1:] == (0, 0)
    assert s.stop() == 0
    assert len(files(d)) > n


def test_adapters():
    """A prefix with an adapter is found with that adapter and that scale alone, whatever its name."""
    base, tuned = "tests/golden/qwen3", "tests/golden/qwen3-lora"
    d = tempfile.mkdtemp(dir=WORK.name)
    flags = ("--cache-dir", d, "-c", "1024")
    s = Server(BUILD, *flags, "--lora", "a=" + tuned, model=base)
    want = ask(s, tokens(1000), lora="a")
    plain = ask(s, tokens(1000))
    assert want[1:] == plain[1:] == (0, 0) and want[0] != plain[0]
    assert s.stop() == 0
    s = Server(BUILD, *flags, "--lora", "other=" + tuned, model=base)
    assert ask(s, tokens(1000), lora=[{"name": "other", "scale": 0.5}])[1:] == (0, 0)
    assert ask(s, tokens(1000), lora="other") == (want[0], 768, 768)
    assert ask(s, tokens(1000)) == (plain[0], 768, 768)
    assert s.stop() == 0
    # the same folder with other weights
    changed = shutil.copytree(tuned, os.path.join(WORK.name, "changed-lora"))
    with open(changed + "/adapter_model.safetensors", "r+b") as f:
        f.seek(-4, 2)
        f.write(b"\0\0\0\0")
    s = Server(BUILD, *flags, "--lora", "a=" + changed, model=base)
    assert ask(s, tokens(1000), lora="a")[1:] == (0, 0)
    assert s.stop() == 0


def test_images():
    """A prefix with pictures is found with those pictures, that client and that limit of tokens alone."""
    folder = vision_model.make(os.path.join(WORK.name, "sees"))
    d = tempfile.mkdtemp(dir=WORK.name)
    a, b = (base64.b64encode(open(f"tests/golden_images/qwen3_vl/{n}.png", "rb").read()).decode() for n in "ab")

    def see(s, first, key="k", question="What is it?"):
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + first}}
        content = [{"type": "text", "text": "Look at this. " * 8}, image, {"type": "text", "text": "It has a shape. " * 60 + question}]
        r = s.json("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": True},
                   headers={"Authorization": "Bearer " + key})
        c, u = r["choices"][0], r["usage"]["prompt_tokens_details"]
        return (c["message"]["content"], [t["logprob"] for t in c["logprobs"]["content"]]), u["cached_tokens"], u.get("disk_tokens", 0)
    s = Server(BUILD, "--cache-dir", d, model=folder)
    want, cached, _ = see(s, b)
    assert not cached
    assert s.stop() == 0
    s = Server(BUILD, "--cache-dir", d, model=folder)
    other = see(s, a)
    assert other[1:] == (0, 0) and other[0] != want, other
    assert see(s, b, key="another")[1:] == (0, 0)
    got, cached, disk = see(s, b)
    assert got == want and cached == disk >= 512, (cached, disk)
    assert s.metrics()["steel_prefix_disk_damaged_total"] == 0
    assert s.stop() == 0
    s = Server(BUILD, "--cache-dir", d, "--max-image-tokens", "64", model=folder)
    assert see(s, b)[1:] == (0, 0)
    assert s.stop() == 0


def test_damaged():
    """Flipped bytes everywhere, cut, longer, swapped, empty files, links and folders in their place: the same answer, and the file goes."""
    d, want = filled(toy(), "-c", "1024")
    whole = {f: open(f, "rb").read() for f in files(d)}
    names = sorted(whole)
    rng = random.Random(1)

    def check(what, most=768):
        s = Server(BUILD, "--cache-dir", d, "-c", "1024", model=toy())
        got, cached, disk = ask(s, tokens(1000))
        damaged = s.metrics()["steel_prefix_disk_damaged_total"]
        assert got == want and disk <= most, (what, cached, disk)
        assert s.stop() == 0
        return disk, damaged

    def restore():
        for f, data in whole.items():
            if os.path.isdir(f) and not os.path.islink(f):
                os.rmdir(f)
            elif os.path.lexists(f):
                os.unlink(f)
            with open(f, "wb") as out:
                out.write(data)
    head, rounds = 8 + 8 + 5 * 16, 12
    for i in range(rounds):  # a byte of the head, of the ids, of the record, of its sum; each in every file
        for f in names:
            data = bytearray(whole[f])
            at = [rng.randrange(head), head + rng.randrange(2048), rng.randrange(len(data)), len(data) - 1 - rng.randrange(8)][i % 4]
            data[at] ^= 1 << rng.randrange(8)
            with open(f, "wb") as out:
                out.write(data)
        disk, damaged = check(("flip", i), 0)
        assert disk == 0 and 1 <= damaged <= 3, (i, damaged)
        restore()
    for what, change in (("cut", lambda b: b[:-1]), ("half", lambda b: b[:len(b) // 2]), ("longer", lambda b: b + b"x"), ("empty", lambda b: b""), ("zeros", lambda b: bytes(len(b))),
                         ("version", lambda b: b[:8] + b"\x07" + b[9:])):
        for f in names:
            with open(f, "wb") as out:
                out.write(change(whole[f]))
        assert check(what, 0)[0] == 0
        restore()
    for a, b in zip(names, names[1:] + names[:1]):  # each under the name of another one
        with open(a, "wb") as out:
            out.write(whole[b])
    assert check("swapped", 0)[0] == 0
    restore()
    for f in names:
        os.unlink(f)
        os.symlink("/dev/zero", f)
    assert check("links", 0)[0] == 0
    for f in names:
        if os.path.lexists(f):
            os.unlink(f)
        os.mkdir(f)
    assert check("folders", 0)[0] == 0
    restore()
    # the key: damaged or gone, all is foreign
    with open(d + "/key", "r+b") as f:
        f.write(b"x")
    assert check("key", 0)[0] == 0
    os.unlink(d + "/key")
    assert check("no key", 0)[0] == 0


def test_kill():
    """kill -9 while segments are written, again and again: the next one reads only whole files, and the answer is the same."""
    d, want = filled(toy(), "-c", "4096", n=4000)
    subprocess.run([STEEL, "cache", "clear", "--cache-dir", d], check=True)
    found = 0
    for i in range(6):
        s = Server(BUILD, "--cache-dir", d, "-c", "4096", model=toy())
        got, cached, disk = ask(s, tokens(4000))
        assert got == want, (i, cached, disk)
        found = max(found, disk)
        time.sleep(0.003 * i)
        s.proc.send_signal(signal.SIGKILL)
        s.proc.wait()
    s = Server(BUILD, "--cache-dir", d, "-c", "4096", model=toy())
    got, cached, disk = ask(s, tokens(4000))
    assert got == want and s.metrics()["steel_prefix_disk_damaged_total"] == 0
    assert s.stop() == 0
    s = Server(BUILD, "--cache-dir", d, "-c", "4096", model=toy())
    assert ask(s, tokens(4000))[::2] == (want, 3840)
    assert s.stop() == 0


def test_full():
    """A folder with a limit keeps what was used last; one that cannot be written to is said once, and nothing else happens."""
    d, _ = filled(toy(), "-c", "1024")
    size = sum(os.path.getsize(f) for f in files(d))
    s = Server(BUILD, "--cache-dir", d, "-c", "1024", "--cache-disk", str(3 * size), model=toy())
    answers = [ask(s, tokens(1000, k))[0] for k in range(8)]
    start = time.time()
    while s.metrics()["steel_prefix_disk_written_bytes_total"] < 7 * size:
        assert time.time() - start < HANG, s.metrics()
        time.sleep(0.02)
    assert s.stop() == 0
    assert sum(os.path.getsize(f) for f in files(d)) <= 3 * size
    s = Server(BUILD, "--cache-dir", d, "-c", "1024", "--cache-disk", str(3 * size), model=toy())
    got, _, disk = ask(s, tokens(1000, 7))
    assert got == answers[7] and disk == 768
    assert ask(s, tokens(1000, 0))[2] == 0
    assert s.stop() == 0
    # a file of its size limit: writes fail in the middle
    d = tempfile.mkdtemp(dir=WORK.name)
    steel = os.path.join(WORK.name, "limited")
    with open(steel, "w") as f:
        f.write(f"#!/bin/sh\nulimit -f 40\ntrap '' XFSZ\nexec {os.path.abspath(STEEL)} \"$@\"\n")
    os.chmod(steel, 0o755)
    s = Server(BUILD, "--cache-dir", d, "-c", "1024", model=toy(), steel=steel)
    assert [ask(s, tokens(1000, k))[0] for k in range(3)] == answers[:3]
    s.wait_line("not written")
    assert s.stop() == 0 and not files(d)
    # nowhere to write at all
    with open(os.path.join(WORK.name, "plain"), "w") as f:
        f.write("")
    s = Server(BUILD, "--cache-dir", os.path.join(WORK.name, "plain", "x"), "-c", "1024", model=toy())
    s.wait_line("not kept on disk")
    assert ask(s, tokens(1000, 1))[0] == answers[1]
    assert s.stop() == 0


def test_two_processes():
    """Two servers on one folder, at once: each finds what the other has written, and all answers are right."""
    d = tempfile.mkdtemp(dir=WORK.name)
    s = Server(BUILD, "-c", "1024", "--cache-disk", "0", model=toy())
    want = [ask(s, tokens(900, k))[0] for k in range(6)]
    assert s.stop() == 0
    pair = [Server(BUILD, "--cache-dir", d, "-c", "1024", "--kv-tokens", "2048", model=toy()) for _ in range(2)]
    faults, disk = [], [0]

    def client(seed):
        rng = random.Random(seed)
        try:
            for _ in range(25):
                k = rng.randrange(6)
                got, _, n = ask(pair[rng.randrange(2)], tokens(900, k))
                disk[0] += n
                if got != want[k]:
                    faults.append((k, got, want[k]))
        except Exception as e:
            faults.append(repr(e))
    threads = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(HANG)
    assert not faults, faults[:2]
    assert disk[0] > 0
    for s in pair:
        assert s.metrics()["steel_prefix_disk_damaged_total"] == 0
        assert s.stop() == 0


def test_swap():
    """A, B, A with room for one: the second A has the prompt of the first, from disk."""
    d = tempfile.mkdtemp(dir=WORK.name)
    s = Models("--models", make_toys(BUILD, WORK.name, 2), "--max-models", "1", "--cache-dir", d, "-c", "1024")
    first = ask(s, tokens(1000), "toy0")
    assert first[1:] == (0, 0) and ask(s, tokens(1000), "toy1")[1:] == (0, 0)
    again = ask(s, tokens(1000), "toy0")
    assert again == (first[0], 768, 768), again[1:]
    r = s.json("/v1/responses", {"model": "toy1", "input": "a b c d e f " * 60, "max_output_tokens": 16, "store": False})
    ask(s, tokens(600), "toy0")
    r = s.json("/v1/responses", {"model": "toy1", "input": "a b c d e f " * 60, "max_output_tokens": 16, "store": False})
    assert r["usage"]["input_tokens_details"]["disk_tokens"] == r["usage"]["input_tokens"] // 256 * 256, r["usage"]
    assert s.stop() == 0


def test_leaving():
    """Clients that leave while segments are read, and a server that ends meanwhile."""
    d, want = filled(toy(), "-c", "8192", n=8000)
    for i in range(4):
        s = Server(BUILD, "--cache-dir", d, "-c", "8192", model=toy())
        body = json.dumps({"prompt": tokens(8000), "max_tokens": 8, "temperature": 0, "ignore_eos": True}).encode()
        for _ in range(4):
            c = s.socket()
            c.sendall(f"POST {COMP} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            time.sleep(0.002 * i)
            c.close()
        if i % 2:
            assert ask(s, tokens(8000))[0] == want
        assert s.stop() == 0


if __name__ == "__main__":
    tests = [test_restart, test_foreign, test_adapters, test_images, test_damaged, test_kill, test_full, test_two_processes, test_swap, test_leaving]
    run_tests([t for t in tests if len(sys.argv) < 3 or t.__name__ in sys.argv[2:]])
