#!/usr/bin/env python3
"""What drafts gain: recorded texts through a model's real steps, with and without drafts by turns.

  draft.py MODEL [--batch 1,4] [--reps 5] [--answer 384] [--texts edit,json] [--device cpu] [--json] [STEEL OPTIONS...]
  draft.py --write FILE --vocab N          the texts alone, for `steel bench MODEL --replay FILE`

The answers' tokens replace the chosen ones (`steel bench --replay`). So the acceptance is the text's own, and the speed is the model's,
although its weights may be random (bench/synth_gguf.py). The texts are this repository's files and generated ones:

  edit    a source file is repeated with changes in places
  quote   paragraphs of a page are quoted
  tools   an agent's next calls, after others like them
  json    records of a schema
  prose   a page of prose, after a question
  random  tokens without any order

A token is a piece of a word, a number, or one other character: about four characters, as with real vocabularies.
"""
import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import zlib

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PIECE = re.compile(r" ?[A-Za-z]{1,6}|[0-9]{1,3}|\s+|.", re.S)
NAMES = "Ada Ben Cleo Dan Eva Finn Gia Hugo Ida Jon Kim Leo Mia Ned Ola Pia Quin Rosa Sam Tom Una Vic Wim Xia Yan Zoe".split()
TOWNS = "Aachen Bergen Cork Delft Essen Fulda Ghent Halle Imola Jena Kiel Lund Mainz Namur Oslo Porto".split()


def ids(text, vocab):
    return [zlib.crc32(p.encode()) % vocab for p in PIECE.findall(text)]


def read(path):
    with open(os.path.join(ROOT, path)) as f:
        return f.read()


def edit(rng):
    """Every 40th line changes a little, some lines are new."""
    lines = read("src/engine/states.c").split("\n")
    out = []
    for i, line in enumerate(lines):
        if i % 40 == 20:
            out.append("    /* " + " ".join(rng.choice(NAMES).lower() for _ in range(6)) + " */")
        out.append(line.replace("slot", "place") if i % 40 < 3 else line)
    return "Use `place` where it is shorter:\n" + "\n".join(lines) + "\n\nThe new file:\n", "\n".join(out)


def quote(rng):
    page = read("docs/memory.md").split("\n\n")
    said = [f"On point {k + 1} the page says:\n\n> {p}\n" for k, p in enumerate(page[2:9])]
    return "\n\n".join(page) + "\n\nWhat does the page say about memory? Quote it.", "\n".join(said)


def tools(rng):
    def turn(k):
        path = f"src/{rng.choice(NAMES).lower()}/{rng.choice(TOWNS).lower()}.c"
        call = {"name": "read_file", "arguments": {"path": path, "offset": 100 * k, "limit": 200, "encoding": "utf-8"}}
        found = "\n".join(f"{100 * k + i}: int {rng.choice(NAMES).lower()}_{rng.choice(TOWNS).lower()} = {rng.randrange(999)};"
                          for i in range(4))
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>\n", f"<tool_response>\n{found}\n</tool_response>\n"

    turns = [turn(k) for k in range(10)]
    return "".join(a + b for a, b in turns[:4]), "".join(a + b for a, b in turns[4:])


def records(rng):
    record = lambda k: {"identifier": k, "full_name": f"{rng.choice(NAMES)} {rng.choice(TOWNS)}", "address": {
        "street_number": rng.randrange(1, 200), "town": rng.choice(TOWNS), "country_code": rng.choice(["DE", "NO", "NL"])},
        "subscribed_to_newsletter": rng.random() < 0.5}
    schema = {"type": "object", "properties": {"identifier": {"type": "integer"}, "full_name": {"type": "string"}, "address": {
        "type": "object", "properties": {"street_number": {"type": "integer"}, "town": {"type": "string"}}},
        "subscribed_to_newsletter": {"type": "boolean"}}}
    return "A list of customers as JSON:\n" + json.dumps(schema, indent=1), json.dumps([record(k) for k in range(30)], indent=1)


def prose(rng):
    return "How does it work inside?\n", read("docs/architecture.md")[2000:]


def texts(vocab, length):
    for make in (edit, quote, tools, records, prose):
        prompt, answer = make(random.Random(7))
        yield {"name": make.__name__.replace("records", "json"), "prompt": ids(prompt, vocab), "answer": ids(answer, vocab)[:length]}
    rng = random.Random(8)
    yield {"name": "random", "prompt": [rng.randrange(vocab) for _ in range(256)], "answer": [rng.randrange(vocab) for _ in range(length)]}


def write(path, vocab, length, names=None):
    with open(path, "w") as f:
        for t in texts(vocab, length):
            if not names or t["name"] in names.split(","):
                f.write(json.dumps(t) + "\n")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", nargs="?")
    p.add_argument("--steel", default=os.environ.get("STEEL", os.path.join(ROOT, "build/steel")))
    p.add_argument("--batch", default="1")
    p.add_argument("--reps", default="5")
    p.add_argument("--answer", type=int, default=384, help="tokens of an answer")
    p.add_argument("--vocab", type=int, default=4096, help="ids are below this")
    p.add_argument("--texts", help="names of the texts (default: all)")
    p.add_argument("--write", metavar="FILE")
    args, more = p.parse_known_args()
    if args.write:
        return write(args.write, args.vocab, args.answer, args.texts)
    if not args.model:
        p.error("wants a model, or --write")
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as f:
        write(f.name, args.vocab, args.answer, args.texts)
        command = [args.steel, "bench", args.model, "--replay", f.name, "--batch", args.batch, "-r", args.reps, *more]
        return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
