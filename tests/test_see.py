#!/usr/bin/env python3
"""The built-in model that sees: of 50 pictures drawn here, which no training has had, at least nine of ten answers are right
for each kind of question (what, colour, shape, count, digit), with kernels of the CPU; `steel run --image` needs no model."""
import base64
import os
import random
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, "demo/see")
sys.dont_write_bytecode = True
from serverlib import Server  # noqa
import pictures  # noqa
import questions  # noqa

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
STEEL = os.path.abspath(os.path.join(BUILD, "steel"))
SHOWN = int(os.environ.get("PICTURES", "50"))
if subprocess.run([STEEL, "show", "builtin-see", "--brief"], capture_output=True).returncode:
    print("skipped: test_see.py: this build carries no model that sees")
    sys.exit(77)


def ask(s, png, *said):
    """The answers to questions of one conversation."""
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    content, messages, answers = [{"type": "image_url", "image_url": {"url": url}}], [], []
    for question in said:
        messages.append({"role": "user", "content": [*content, {"type": "text", "text": question}]})
        r = s.json("/v1/chat/completions", {"messages": messages, "max_tokens": 20, "temperature": 0})
        answers.append(r["choices"][0]["message"]["content"])
        messages.append({"role": "assistant", "content": answers[-1]})
        content = []
    return answers


def test_scores(s):
    rng, right = random.Random("the pictures of test_see.py"), {}
    for _ in range(SHOWN):
        *picture, what = pictures.draw(rng, 96, 200)
        png = pictures.png(*picture)
        for kind in questions.kinds(what):
            want, got = questions.answer(kind, what), ask(s, png, rng.choice(questions.WAYS[kind]))[0]
            n = right.setdefault(kind, [0, 0])
            n[0] += got == want
            n[1] += 1
            if got != want:
                print(f"  {kind}: {got} is {want}")
    for kind, (good, of) in right.items():
        print(f"{kind}: {good} of {of} right")
    assert all(good >= 0.9 * of for good, of in right.values()) and len(right) == 5, right


def test_conversation(s):
    """A second question is about the picture of the first one; without a picture there is nothing to see."""
    canvas = pictures.Canvas(200, 150, (255, 255, 255))
    canvas.fill(pictures.turn(pictures.outline("circle"), 90, 70, 40, 40, 0), pictures.COLOURS["blue"])
    png = pictures.png(200, 150, bytes(canvas.rgb))
    assert ask(s, png, "What shape is it?", "What colour is it?", "How many are there?") == ["A circle.", "Blue.", "One."]
    r = s.json("/v1/chat/completions", {"messages": [{"role": "user", "content": "What do you see?"}], "temperature": 0})
    assert r["choices"][0]["message"]["content"] == questions.BLIND, r
    return png


def test_run(png):
    """Without a model, with the question as the only argument, and with -p."""
    path = os.path.join(BUILD, "tests", "see.png")
    with open(path, "wb") as f:
        f.write(png)
    for args in (["What is this?"], ["-p", "What is this?"], ["-m", "builtin-see", "What is this?"], ["builtin-see", "What is this?"]):
        r = subprocess.run([STEEL, "run", "-q", "--image", path, "--temp", "0", *args], capture_output=True, text=True,
                           stdin=subprocess.DEVNULL)
        assert (r.returncode, r.stdout) == (0, "A blue circle.\n"), (args, r)
    r = subprocess.run([STEEL, "run", "-q", "What is this?"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert r.returncode and "neither a file nor a model name" in r.stderr, r
    r = subprocess.run([STEEL, "run", "-q", "builtin", "--image", path, "What is this?"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert r.returncode and "this model reads text only" in r.stderr, r


server = Server(BUILD, model="builtin-see")
test_run(test_conversation(server))
test_scores(server)
server.stop()
