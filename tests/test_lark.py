"""Lark grammars against another implementation: tests/data/lark.jsonl has random grammars and texts with the verdicts of Python's
lark (Earley with lexer="dynamic_complete": a text fits if some division into terminals does; lazy quantifiers, with which it tries
one length only, are left out). `test_lark.py --make [SEED]` prints
such lines anew; that alone needs python3-lark. Where lark is installed, fresh random grammars are compared, too."""
import json
import os
import random
import signal
import subprocess
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
ALPHABET = "aaabbBcc(( \n"


def literal(r):
    return json.dumps("".join(r.choice("abc(") for _ in range(r.choice((1, 1, 1, 2))))) + r.choice(("", "", "", "i"))


def regex(r):
    return r.choice(("/[ab]/", "/[^b]/", "/a+/", "/(ab|c)/", "/b{1,2}/", "/a./", "/a./s", "/A|c/i", "/[ac]+/", r"/\w/", r"/\(/", "/ a b # x\n /x", r"/\n+/"))


def body(r, names, depth):
    """A body of alternatives over these names."""
    def atom(d):
        k = r.random()
        if k < 0.35 and names:
            a = r.choice(names)
        elif k < 0.6:
            a = literal(r)
        elif k < 0.75:
            a = regex(r)
        elif k < 0.8:
            a = '"a".."b"'
        elif d and k < 0.93:
            a = "(" + alternatives(d - 1) + ")"
        elif d:
            return "[" + alternatives(d - 1) + "]"
        else:
            a = literal(r)
        return a + r.choice(("", "", "", "", "*", "+", "?", "~2", "~1..2", " ~ 0..2"))

    def alternatives(d):
        return r.choice((" | ", "|", "\n  | ")).join(" ".join(atom(d) for _ in range(r.choice((1, 1, 2, 3)))) for _ in range(r.choice((1, 1, 2, 3))))
    return alternatives(depth)


def grammar(r):
    rules, terminals = [f"r{i}" for i in range(r.randrange(3))], [f"T{i}" for i in range(r.randrange(3))]
    lines = [f"start: {body(r, rules + terminals + ['start'] * (r.random() < 0.3), 2)}"]
    for i, name in enumerate(rules):
        lines.append(f"{r.choice(('', '?', '!'))}{name}{r.choice(('', '', '.2'))}: {body(r, rules + terminals + ['start'], 1)}")
    for i, name in enumerate(terminals):
        lines.append(f"{name}{r.choice(('', '', '.3'))}: {body(r, terminals[:i], 1)}")
    if r.random() < 0.35:
        lines.append(r.choice(('%ignore " "', "%ignore /[ ]/ // blanks", "%import common.WS_INLINE\n%ignore WS_INLINE")))
    if r.random() < 0.3:
        lines[0] += " | X"
        lines.append(r.choice(("%import common.CNAME -> X", "%import common (LF)\nX: LF", "%import common.WORD -> X")))
    head, rest = lines[:1], lines[1:]
    r.shuffle(rest)
    return "\n".join(head + rest if r.random() < 0.5 else rest + head) + "\n"


def lines(seed, n):
    """Lines for `steel constrain`, with lark's verdicts."""
    import lark
    r = random.Random(seed)

    def too_slow(*_):  # the forest of a very ambiguous grammar
        raise TimeoutError
    signal.signal(signal.SIGALRM, too_slow)
    while n:
        text = grammar(r)
        try:
            parser = lark.Lark(text, parser="earley", lexer="dynamic_complete")
        except Exception:  # a terminal that may be empty, rules that are never used, ...: lark refuses
            continue
        tests = []
        for t in {"".join(r.choice(ALPHABET) for _ in range(r.choice((0, 1, 1, 2, 2, 3, 3, 4, 5, 6)))) for _ in range(24)}:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.3)
                parser.parse(t)
                valid = True
            except TimeoutError:
                break
            except lark.exceptions.UnexpectedInput:
                valid = False
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            tests.append({"valid": valid, "text": t})
        if any(t["valid"] for t in tests):
            n -= 1
            yield {"lark": text, "tests": sorted(tests, key=lambda t: (not t["valid"], t["text"]))[:16]}


def check(rows):
    steel = os.path.join(sys.argv[1] if len(sys.argv) > 1 else "build", "steel")
    p = subprocess.run([steel, "constrain", "-m", "builtin", "--jsonl"], input="".join(json.dumps(x) + "\n" for x in rows), capture_output=True, text=True)
    assert p.returncode == 0, p.stderr
    results = [json.loads(x) for x in p.stdout.splitlines()]
    assert len(results) == len(rows), (len(results), p.stderr)
    wrong = limited = 0
    for row, got in zip(rows, results):
        want = [t["valid"] for t in row["tests"]]
        if "takes over 8388608 steps" in (got["error"] or ""):  # a very ambiguous grammar: refused by its cost
            limited += 1
        elif got.get("accepted") != want:
            wrong += 1
            print("differs:", json.dumps({**row, "got": got}))
    assert not wrong, f"{wrong} of {len(rows)} grammars differ"
    assert limited * 20 <= len(rows), f"{limited} of {len(rows)} grammars are over the limit"
    return sum(len(x["tests"]) for x in rows), sum(t["valid"] for x in rows for t in x["tests"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        for row in lines(int(sys.argv[2]) if len(sys.argv) > 2 else 1, 120):
            print(json.dumps(row), flush=True)
        sys.exit()
    kept = [json.loads(x) for x in open(os.path.join(FOLDER, "data", "lark.jsonl"))]
    print("kept: %d texts, %d of them fit" % check(kept))
    try:
        import lark  # noqa: F401
    except ImportError:
        print("skipped: fresh grammars: no python3-lark here")
        sys.exit()
    print("fresh: %d texts, %d of them fit" % check(list(lines(random.randrange(1 << 30), 20))))
