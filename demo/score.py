#!/usr/bin/env python3
"""Judges answers to the prompts of eval.jsonl and prints the share of right ones per category.

Answers are JSON lines in the order of the prompts, each a string (everything the model wrote, thinking and tool
calls included), or an object {"content": text or null, "tool_calls": [...]} as a chat completion returns it.
Standard library only.

  score.py eval.jsonl answers.jsonl [--require]      --require: exit 1 if a category misses its target
"""
import argparse
import collections
import json
import re
import sys

TARGETS = {"arithmetic": 0.95, "tools": 0.97, "facts": 0.97, "system_prompt": 0.90, "schema": 0.97}


def numbers(text):
    return [int(n) for n in re.findall(r"(?<![\w.])-?\d+", text)]


def has(text, words):
    """Whole words or phrases, whatever the case."""
    return [bool(re.search(r"(?<!\w)" + re.escape(w.lower()) + r"(?!\w)", text.lower())) for w in words]


def same(a, b):
    """Equal as JSON: 1 and 1.0 are one number, true is not 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return abs(a - b) < 1e-9
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def split_answer(answer):
    """(text without thinking and calls, calls or None where a call does not parse)."""
    if isinstance(answer, dict):
        calls = []
        for c in answer.get("tool_calls") or []:
            f = c.get("function", c)
            args = f.get("arguments")
            try:
                calls.append({"name": f.get("name"), "arguments": json.loads(args) if isinstance(args, str) else args})
            except ValueError:
                return "", None
        return (answer.get("content") or "").strip(), calls
    text = answer
    for stop in ("<|im_end|>", "<|endoftext|>"):
        text = text.split(stop)[0]
    if "</think>" in text:
        text = text.rsplit("</think>", 1)[1]
    elif "<think>" in text:
        return "", []
    calls = []
    for body in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.S):
        try:
            calls.append(json.loads(body))
        except ValueError:
            return "", None
    text = re.sub(r"<tool_call>.*?</tool_call>", "", text, flags=re.S)
    if "<tool_call>" in text:
        return "", None
    return text.strip(), calls


def style_ok(check, text):
    style, value = check["style"], check.get("value", "")
    letters = [c for c in text if c.isalpha()]
    inner = check.get("inner")
    ok = bool(text)
    if style == "one_word":
        ok = bool(text) and not re.search(r"\s", text)
    elif style == "upper":
        ok = ok and not any(c.islower() for c in letters)
    elif style == "lower":
        ok = ok and not any(c.isupper() for c in letters)
    elif style == "pirate":
        ok = text.startswith("Arr") and "matey" in text
        text = re.sub(r"^Arr\W*", "", text)
    elif style == "robot":
        ok = text.startswith("Beep") and text.rstrip().endswith("Boop!")
        text = re.sub(r"^Beep\W*", "", text)
    elif style == "starts":
        ok = text.startswith(value)
        text = text[len(value):].strip()
    elif style == "ends":
        ok = text.endswith(value)
        text = text[:len(text) - len(value)].strip()
    elif style == "call":
        ok = all(has(text, [value]))
    elif style == "always":
        return text.strip(' ."!') == value
    elif style == "excited":
        ok = text.endswith("!") and "." not in text
    elif style == "number":
        ok = bool(re.fullmatch(r"-?\d+", text))
    elif style == "words":
        return text.lower().rstrip(".!") == value
    elif style == "yes_no":
        ok = text.lower().rstrip(".!") in ("yes", "no")
    elif style == "bullet":
        ok = text.startswith("- ")
        text = text[2:]
    return ok and (inner is None or judge(inner, text))


def judge(check, answer):
    """Is the answer right?"""
    text, calls = split_answer(answer)
    kind = check["type"]
    if calls is None or (calls and kind != "tool_calls"):
        return False
    if kind == "tool_calls":
        return len(calls) == len(check["calls"]) and all(
            isinstance(c, dict) and c.get("name") == w["name"] and same(c.get("arguments"), w["arguments"])
            for c, w in zip(calls, check["calls"]))
    if kind == "number":
        return numbers(text)[-1:] == [check["value"]]
    if kind == "first_number":
        return numbers(text)[:1] == [check["value"]]
    if kind == "starts":
        return text.lower().startswith(check["value"].lower())
    if kind == "exact":
        return text == check["value"]
    if kind == "contains":
        return all(has(text, check["all"])) and not any(has(text, check.get("none", [])))
    if kind == "contains_any":
        return any(w.lower() in text.lower() for w in check["any"])
    if kind == "json":
        try:
            return same(json.loads(text), check["value"])
        except ValueError:
            return False
    if kind == "style":
        return style_ok(check, text)
    raise ValueError("unknown check " + kind)


def score(cases, answers):
    """{category: (right, all)} over the cases that have an answer."""
    right, total = collections.Counter(), collections.Counter()
    for case, answer in zip(cases, answers):
        total[case["category"]] += 1
        right[case["category"]] += judge(case["check"], answer)
    return {c: (right[c], total[c]) for c in total}


def main():
    ap = argparse.ArgumentParser(description="score answers to eval.jsonl")
    ap.add_argument("cases")
    ap.add_argument("answers")
    ap.add_argument("--require", action="store_true", help="fail if a category misses its target")
    ap.add_argument("--wrong", action="store_true", help="print the wrong answers")
    args = ap.parse_args()
    with open(args.cases, encoding="utf-8") as f:
        cases = [json.loads(line) for line in f if line.strip()]
    with open(args.answers, encoding="utf-8") as f:
        answers = [json.loads(line) for line in f if line.strip()]
    bad = False
    for category, (right, total) in score(cases, answers).items():
        target = TARGETS.get(category)
        miss = target is not None and right < target * total
        bad |= miss
        print(f"{category:14} {right:4}/{total:<4} {100 * right / total:6.1f} %"
              + (f"   target {100 * target:.0f} %{'  MISSED' if miss else ''}" if target else ""))
    if args.wrong:
        for case, answer in zip(cases, answers):
            if not judge(case["check"], answer):
                print(json.dumps({"category": case["category"], "user": case["messages"][-1]["content"],
                                  "thinking": case["enable_thinking"], "check": case["check"], "answer": answer},
                                 ensure_ascii=False))
    return 1 if args.require and bad else 0


if __name__ == "__main__":
    sys.exit(main())
