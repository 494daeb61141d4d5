#!/usr/bin/env python3
"""steel run --image: the answer is the server's for the same prompt and image, and another one without it; what is no image, not
there, or for a model without eyes is refused in words."""
import base64
import os
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from serverlib import Server  # noqa
from vision_model import make  # noqa

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
FOLDER = make(os.path.join(BUILD, "tests/vision-model-run"))
A, B = (f"tests/golden_images/qwen3_vl/{x}.png" for x in "ab")


def run(*args, model=FOLDER):
    r = subprocess.run([f"{BUILD}/steel", "run", model, *args, "-n", "12", "--temp", "0", "-t", "1", "-q"], capture_output=True,
                       stdin=subprocess.DEVNULL)
    return r.returncode, r.stdout.decode("utf-8", "replace"), r.stderr.decode("utf-8", "replace")


def ask(s, files):
    parts = [{"type": "image_url", "image_url": {"url": "data:;base64," + base64.b64encode(open(f, "rb").read()).decode()}} for f in files]
    r = s.json("/v1/chat/completions", {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}],
                                        "max_tokens": 12, "temperature": 0})
    return r["choices"][0]["message"]["content"]


def refused(words, *args, **kw):
    rc, _, err = run(*args, **kw)
    assert rc and words in err, (rc, err)


s = Server(BUILD, model=FOLDER)
texts = set()
for files in [], [A], [B], [A, B], [B, A]:
    rc, out, err = run("-p", "What?", *[x for f in files for x in ("--image", f)])
    assert rc == 0, err
    assert out.split() == ask(s, files).split(), (files, out, ask(s, files))
    texts.add(out)
assert len(texts) == 5, texts
s.stop()
refused("messages[0].content[0]: neither PNG, JPEG, WebP, GIF nor BMP", "-p", "x", "--image", "README.md")
refused("nothere.png: No such file or directory", "-p", "x", "--image", "nothere.png")
refused("--image needs the chat template", "-p", "x", "--image", A, "--raw")
toy = os.path.join(BUILD, "tests/vision-run-toy.gguf")
subprocess.run([f"{BUILD}/tests/toy_gguf", toy], check=True)
refused("this model reads text only", "-p", "x", "--image", A, model=toy)
