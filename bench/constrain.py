#!/usr/bin/env python3
"""How well `steel constrain` enforces real schemas: MaskBench and the JSON-Schema-Test-Suite.

    bench/constrain.py maskbench [-v]     one table: right, refused, wrong; compile and mask times
    bench/constrain.py suite [-v]         a table by keyword file of the official test suite
    bench/constrain.py eval               the built-in model's tool calls and JSON outputs, with and without constraints

Reads ../shared/golden (STEEL=build/steel names the binary, MODEL the vocabulary). -v lists every
schema that is not entirely right.
"""
import collections
import json
import lzma
import os
import pathlib
import subprocess
import sys

GOLDEN = pathlib.Path(__file__).resolve().parent.parent.parent / "shared" / "golden"
STEEL = os.environ.get("STEEL", "build/steel")
MODEL = os.environ.get("MODEL", str(GOLDEN / "tokenizers" / "ggml-vocab-qwen2.gguf"))


def run(lines, flags=()):
    text = "\n".join(json.dumps(x) for x in lines) + "\n"
    out = subprocess.run([STEEL, "constrain", MODEL, "--jsonl", *flags], input=text,
                         capture_output=True, text=True, check=True).stdout
    return [json.loads(x) for x in out.splitlines()]


def percentile(v, p):
    v = sorted(v)
    return v[min(len(v) - 1, int(len(v) * p))] if v else 0


def maskbench(verbose, flags):
    with lzma.open(GOLDEN / "schemas" / "maskbench.jsonl.xz", "rt") as f:
        cases = [json.loads(x) for x in f]
    answers = run([{"schema": c["schema"], "tests": c["tests"]} for c in cases], flags)
    count = collections.Counter()
    for c, a in zip(cases, answers):
        wrong = [(t["valid"], got) for t, got in zip(c["tests"], a["accepted"]) if t["valid"] != got]
        if a["ok"]:
            kind = "wholly right"
        elif a["error"] and not a["mask_us"]["n"]:
            kind = "refused"
        elif a["error"]:
            kind = "over a limit while masking"
        elif any(not valid for valid, _ in wrong):
            kind = "false accept"
        else:
            kind = "valid instance refused"
        count[kind] += 1
        if verbose and kind != "wholly right":
            print(f"{kind:24} {c['name']:50} {a['error'] or ''}")
    n = len(cases)
    print(f"{n} schemas, {sum(len(c['tests']) for c in cases)} instances")
    for kind, k in count.most_common():
        print(f"| {kind} | {k} | {100 * k / n:.1f} % |")
    good = [a for a in answers if a["mask_us"]["n"]]
    compile_us = [a["compile_us"] for a in good]
    masks = sum(a["mask_us"]["n"] for a in good)
    total = sum(a["mask_us"]["avg"] * a["mask_us"]["n"] for a in good)
    print(f"compile: p50 {percentile(compile_us, .5) / 1e3:.2f} ms, "
          f"p99 {percentile(compile_us, .99) / 1e3:.2f} ms, max {max(compile_us) / 1e3:.1f} ms "
          f"(refused too: max {max(a['compile_us'] for a in answers) / 1e3:.1f} ms)")
    slow = sum(a["mask_us"]["over_500"] for a in good)
    print(f"masks: {masks}, average {total / masks:.1f} us, {100 * slow / masks:.2f} % over 500 us, "
          f"max {max(a['mask_us']['max'] for a in good) / 1e3:.1f} ms; p99 of a schema: median "
          f"{percentile([a['mask_us']['p99'] for a in good], .5):.0f} us")


def suite(verbose, flags):
    folder = GOLDEN / "schemas" / "json-schema-test-suite" / "draft2020-12"
    files = sorted(folder.glob("*.json")) + sorted((folder / "optional").glob("**/*.json"))
    print("| file | groups | right | refused | wrong | false accepts |")
    print("|---|---|---|---|---|---|")
    total = collections.Counter()
    reasons = collections.Counter()
    for path in files:
        groups = json.loads(path.read_text())
        answers = run([{"schema": g["schema"], "tests": g["tests"]} for g in groups], flags)
        c = collections.Counter()
        for g, a in zip(groups, answers):
            c["groups"] += 1
            false = sum(got and not t["valid"] for t, got in zip(g["tests"], a["accepted"]))
            c["false accepts"] += false
            if a["ok"]:
                c["right"] += 1
            elif a["error"]:
                c["refused"] += 1
                reasons[a["error"].split(": ", 1)[-1][:80]] += 1
            else:
                c["wrong"] += 1
            if verbose and not a["ok"]:
                bad = [t["description"] for t, got in zip(g["tests"], a["accepted"]) if t["valid"] != got]
                print(f"    {path.name}: {g['description']}: {a['error'] or bad}")
        total.update(c)
        print("| " + " | ".join([str(path.relative_to(folder).with_suffix(""))] +
                                [str(c[k]) for k in ("groups", "right", "refused", "wrong", "false accepts")]) + " |")
    print("| all | " + " | ".join(str(total[k]) for k in ("groups", "right", "refused", "wrong", "false accepts")) + " |")
    for why, k in reasons.most_common(40):
        print(f"{k:4} {why}")


def evaluate(verbose, flags):
    """Sends demo/eval.jsonl as a client does: tools plain and strict, JSON with and without its schema."""
    import concurrent.futures
    root = pathlib.Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(root / "demo"), str(root / "tests")]
    import score
    from serverlib import Server
    cases = [json.loads(line) for line in open(root / "demo" / "eval.jsonl", encoding="utf-8")]
    server = Server(str(pathlib.Path(STEEL).resolve().parent), "-np", "16", model=str(root / "demo" / "steel-demo.gguf"))

    def ask(case, how):
        body = {"messages": case["messages"], "temperature": 0, "max_tokens": 260, "enable_thinking": case["enable_thinking"]}
        if case.get("tools"):
            more = {"strict": True} if how == "strict" else {}
            body["tools"] = [dict(t, function=dict(t["function"], **more)) for t in case["tools"]]
        if how == "free":
            body["ignore_eos"] = False
            if case.get("tools"):
                body["min_tokens"] = 1  # leaves calls unconstrained
        elif case["check"].get("schema"):
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": case["check"]["schema"]}}
        m = server.json("/v1/chat/completions", body)["choices"][0]["message"]
        calls = [{"name": c["function"]["name"], "arguments": json.loads(c["function"]["arguments"])} for c in m.get("tool_calls", [])]
        return (m["content"] or "") + "".join(f"<tool_call>{json.dumps(c)}</tool_call>" for c in calls)
    try:
        for category, how in [("tools", "free"), ("tools", "plain"), ("tools", "strict"), ("schema", "free"), ("schema", "plain")]:
            mine = [c for c in cases if c["category"] == category]
            with concurrent.futures.ThreadPoolExecutor(16) as pool:
                answers = list(pool.map(lambda c: ask(c, how), mine))
            right = [score.judge(c["check"], a) for c, a in zip(mine, answers)]
            print(f"{category:8} {how:8} {sum(right)} of {len(right)}")
            for c, a, ok in zip(mine, answers, right):
                if verbose and not ok:
                    print("    ", c["check"], a)
    finally:
        server.stop()


if __name__ == "__main__":
    args = [a for a in sys.argv[1:] if not a.startswith("-")]
    flags = [a for a in sys.argv[1:] if a.startswith("--")]
    if not args or args[0] not in ("maskbench", "suite", "eval"):
        sys.exit(__doc__)
    {"maskbench": maskbench, "suite": suite, "eval": evaluate}[args[0]]("-v" in sys.argv, flags)
