#!/usr/bin/env python3
"""The demo model's corpus: the same for the same seed, its splits apart, its checks true to its own answers."""
import itertools
import json
import os
import random
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "demo"))
sys.dont_write_bytecode = True
import corpus   # noqa: E402
import score    # noqa: E402
import skills   # noqa: E402
import stories  # noqa: E402
import tools    # noqa: E402
from split import Split, held_out  # noqa: E402


def same_seed_same_text():
    a = list(itertools.islice(corpus.documents(3), 300))
    assert a == list(itertools.islice(corpus.documents(3), 300))
    assert a != list(itertools.islice(corpus.documents(4), 300))
    plain = [stories.story(random.Random(i), Split(False))[1] for i in range(3000)]
    assert len(set(plain)) == len(plain), "two stories are alike"


def splits_are_apart():
    sums = re.compile(r"(?<![\d.])(\d{1,2}) ?([-+]) ?(\d{1,2})(?![\d.])")
    train = Split(False)
    for make in (skills.addition, skills.subtraction, skills.comparison):
        rng = random.Random(7)
        for _ in range(4000):
            for a, _, b in sums.findall(make(rng, train).user):
                a, b = sorted((int(a), int(b)))
                assert b <= 10 or not held_out("pair", a, b), (a, b)
    rng, seen = random.Random(8), set()
    for held in (False, True):
        keys = {stories.story(rng, Split(held))[2] for _ in range(4000)}
        assert not keys & seen
        seen |= keys
    names = [{c.name for c in (tools.synthetic(rng, Split(held)) for _ in range(3000))} for held in (False, True)]
    assert not names[0] & names[1], names[0] & names[1]


def checks_accept_the_taught_answer():
    makers = [skills.arithmetic, skills.fact, skills.fact_yes_no, skills.unknown, skills.repeat, skills.reading,
              skills.story_request, skills.memory_missing]
    for held in (False, True):
        rng, split = random.Random(9), Split(held)
        for _ in range(400):
            turns = [make(rng, split) for make in makers]
            turns += [skills.styled(rng, split)[1], tools.schema_case(rng, split)[1]]
            turns += skills.memory(rng, split, [skills.fact])
            for t in turns:
                if t.check:
                    assert score.judge(t.check, t.answer), (t.user, t.answer, t.check)
                    full = f"<think>\n{t.think}\n</think>\n\n{t.answer}<|im_end|>"
                    assert score.judge(t.check, full), full
                    assert not score.judge(t.check, f"<think>\n{t.think}"), "thinking alone passed"
                    if t.check.get("style") != "lower":     # any small letters are in style
                        assert not score.judge(t.check, "xyzzy"), t.check
            messages, box, calls = corpus.tool_case(rng, split)
            check = {"type": "tool_calls", "calls": [{"name": c.name, "arguments": c.args} for c in calls]}
            messages.append(corpus.tool_message(calls, ""))
            text = corpus.render(messages, box).rsplit("</think>\n\n", 1)[1]
            assert score.judge(check, text), text
            assert not score.judge(check, text.replace('"name": "', '"name": "x', 1))
            assert not score.judge(check, text[:-25])
            as_api = {"content": None, "tool_calls": [
                {"function": {"name": c.name, "arguments": json.dumps(c.args)}} for c in calls]}
            assert score.judge(check, as_api)


def shipped_prompts_are_held_out():
    path = os.path.join(ROOT, "demo", "eval.jsonl")
    with open(path, encoding="utf-8") as f:
        cases = [json.loads(line) for line in f]
    for category in score.TARGETS:
        assert sum(c["category"] == category for c in cases) >= 50, category
    for c in cases:
        if c["category"] == "tools":
            names = [t["function"]["name"] for t in c["tools"]]
            assert len(set(names)) == len(names)
            assert all(w["name"] in names for w in c["check"]["calls"])


for test in (same_seed_same_text, splits_are_apart, checks_accept_the_taught_answer, shipped_prompts_are_held_out):
    test()
    print("ok", test.__name__)
