#!/usr/bin/env python3
"""Generates the text that the demo model is trained on, and the prompts that it is tested with.

Standard library only; everything follows from --seed. Documents are plain stories, plain notes about Anvil
Isle, and conversations in ChatML as Qwen3's chat template writes them (chat_template.jinja writes the same):
thinking in <think>...</think>, an empty pair of tags where thinking is off, tools inside the system prompt.
The held-out split shares no operand pair, story skeleton, way of asking a fact, tool name, key set or made-up
word with the training split (split.py).

  corpus.py --docs N [--held-out] [--seed S]     N documents, separated by <|endoftext|>, to stdout
  corpus.py --eval FILE [--seed S]               prompts with checks, for score.py, one JSON object a line
  corpus.py --stats                              vocabulary and kinds of documents
"""
import argparse
import collections
import json
import random
import re
import sys

import skills
import stories
import tools
import world
from split import Split

END = "<|endoftext|>"
TOOLS_HEAD = ("# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
              "function signatures within <tools></tools> XML tags:\n<tools>")
TOOLS_TAIL = ("\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
              "<tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": "
              "<args-json-object>}\n</tool_call><|im_end|>\n")


def dumps(value):
    return json.dumps(value, ensure_ascii=False)


# ---------------------------------------------------------------- writing a conversation down

def render(messages, tool_list=None, generate=False, thinking=True):
    """The same bytes as chat_template.jinja gives for the messages."""
    out = []
    if tool_list:
        out.append("<|im_start|>system\n")
        if messages[0]["role"] == "system":
            out.append(messages[0]["content"] + "\n\n")
        out.append(TOOLS_HEAD + "".join("\n" + dumps(t) for t in tool_list) + TOOLS_TAIL)
    elif messages[0]["role"] == "system":
        out.append("<|im_start|>system\n" + messages[0]["content"] + "<|im_end|>\n")
    last_query = max(i for i, m in enumerate(messages) if m["role"] == "user")
    for i, m in enumerate(messages):
        role, content = m["role"], m.get("content") or ""
        if role == "user":
            out.append(f"<|im_start|>user\n{content}<|im_end|>\n")
        elif role == "assistant":
            out.append("<|im_start|>assistant\n")
            reasoning = m.get("reasoning_content") or ""
            if i > last_query and (i == len(messages) - 1 or reasoning):
                out.append(f"<think>\n{reasoning}\n</think>\n\n")
            out.append(content)
            for k, call in enumerate(m.get("tool_calls") or []):
                if k or content:
                    out.append("\n")
                f = call["function"]
                out.append(f'<tool_call>\n{{"name": "{f["name"]}", "arguments": {dumps(f["arguments"])}}}\n</tool_call>')
            out.append("<|im_end|>\n")
        elif role == "tool":
            if messages[i - 1]["role"] != "tool":
                out.append("<|im_start|>user")
            out.append(f"\n<tool_response>\n{content}\n</tool_response>")
            if i + 1 == len(messages) or messages[i + 1]["role"] != "tool":
                out.append("<|im_end|>\n")
    if generate:
        out.append("<|im_start|>assistant\n" + ("" if thinking else "<think>\n\n</think>\n\n"))
    return "".join(out)


def chat(turns, system=None, thinking=True):
    """Messages for the turns; only the last one carries its reasoning, as in Qwen3's conversations."""
    messages = [{"role": "system", "content": system}] if system else []
    for i, t in enumerate(turns):
        messages.append({"role": "user", "content": t.user})
        a = {"role": "assistant", "content": t.answer}
        if thinking and i == len(turns) - 1:
            a["reasoning_content"] = t.think
        messages.append(a)
    return messages


def neutral(rng):
    return rng.choice(skills.NEUTRAL) if rng.random() < 0.35 else None


# ---------------------------------------------------------------- kinds of documents

def single(skill, most=1):
    def make(rng, split):
        turns = [skill(rng, split) for _ in range(rng.randint(1, most))]
        return render(chat(turns, neutral(rng), rng.random() < 0.5))
    return make


def plain_story(rng, split):
    title, text, _ = stories.story(rng, split)
    return f"{title}\n\n{text}\n" if rng.random() < 0.4 else text + "\n"


def plain_notes(rng, split):
    out = [rng.choice([world.about_person(rng.randrange(30)), world.about_town(rng.randrange(12)), world.ABOUT_ISLE,
                       rng.choice(world.FACTS).answer]) for _ in range(rng.randint(2, 5))]
    return "Notes from Anvil Isle\n\n" + "\n".join(out) + "\n"


def memory_doc(rng, split):
    turns = skills.memory(rng, split, [skills.fact, skills.arithmetic, skills.small_talk, skills.unknown])
    if rng.random() < 0.2:                      # the telling itself is an answer to learn, too
        turns = turns[:rng.choice([i for i, t in enumerate(turns) if t.kind == "tell"]) + 1]
    return render(chat(turns, neutral(rng), rng.random() < 0.5))


def follow_up_doc(rng, split):
    return render(chat(skills.follow_up(rng, split), neutral(rng), rng.random() < 0.5))


def styled_doc(rng, split):
    drawn = skills.draw_style(rng, split)
    n = rng.choice((1, 1, 1, 2, 3))
    if split.held or drawn[0] == "persona":     # one turn: the prompt itself may belong to the other split
        drawn, n = None, 1
    turns = []
    for _ in range(n):
        system, turn = skills.styled(rng, split, drawn)
        turns.append(turn)
    return render(chat(turns, system, rng.random() < 0.5))


def schema_doc(rng, split):
    system, turn = tools.schema_case(rng, split)
    return render(chat([turn], system, rng.random() < 0.5))


MIXED = [(skills.fact, 24), (skills.arithmetic, 24), (skills.small_talk, 18), (skills.unknown, 8), (skills.about, 6),
         (skills.fact_yes_no, 6), (skills.story_request, 6), (skills.repeat, 4), (skills.reading, 4)]
MIXED_SKILLS, MIXED_WEIGHTS = zip(*MIXED)


def mixed_doc(rng, split):
    n = rng.choice((2, 3, 3, 4, 5, 6, 8, 12, 20))
    turns = [s(rng, split) for s in rng.choices(MIXED_SKILLS, MIXED_WEIGHTS, k=n)]
    if rng.random() < 0.3:                      # a name told at the start, asked for at the end
        m = skills.memory(rng, split, [skills.fact])
        turns = m[:1] + turns + m[1:]
    elif rng.random() < 0.2:
        turns += skills.follow_up(rng, split)
    return render(chat(turns, neutral(rng), rng.random() < 0.5))


def tool_message(calls, think):
    m = {"role": "assistant", "content": "",
         "tool_calls": [{"type": "function", "function": {"name": c.name, "arguments": c.args}} for c in calls]}
    if think:
        m["reasoning_content"] = think
    return m


def tool_case(rng, split):
    """(messages up to the user's request, tools, calls): what the tool evaluation asks."""
    calls = [tools.drawn(rng, split)]
    ask = calls[0].ask
    if rng.random() < 0.1:
        c = calls[0].again() if rng.random() < 0.35 else tools.drawn(rng, split)
        if c.name == calls[0].name or c.topic != calls[0].topic:
            calls.append(c)
            ask = ask.rstrip(".!") + rng.choice([". Then: ", ". And: ", " - and then: "]) + c.ask
    if rng.random() < 0.08:
        ask = rng.choice(["Hi! ", "Please: ", "Hello, ", "Hey, "]) + ask
    elif rng.random() < 0.06:
        ask += rng.choice([" Thanks!", " Please be quick.", " Thank you."])
    system = neutral(rng)
    messages = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": ask}]
    return messages, tools.toolbox(rng, split, calls), calls


def tools_doc(rng, split):
    thinking = rng.random() < 0.5
    messages, box, calls = tool_case(rng, split)
    r = rng.random()
    if r < 0.15:                                # tools at hand, but none needed
        t = rng.choice((skills.fact, skills.small_talk, skills.fact_yes_no, skills.story_request))(rng, split)
        if r < 0.04:                            # nor any that could help
            t = rng.choice((skills.unknown, skills.arithmetic))(rng, split)
            box = tools.toolbox(rng, split, [tools.synthetic(rng, split)], tools.synthetic)
        messages[-1] = {"role": "user", "content": t.user}
        messages.append({"role": "assistant", "content": t.answer})
        if thinking:
            messages[-1]["reasoning_content"] = "No tool is needed. " + t.think
        return render(messages, box)
    think = "The user needs a tool. " + " ".join(tools.call_think(rng, c) for c in calls) if thinking else ""
    messages.append(tool_message(calls, think))
    if r < 0.55:
        return render(messages, box)
    if rng.random() < 0.5:                      # clients often drop the reasoning of the call
        messages[-1].pop("reasoning_content", None)
    answers, notes = [], []
    for c in calls:
        obj, answer = tools.result_of(rng, split, c)
        text = dumps(obj)
        messages.append({"role": "tool", "content": text})
        answers.append(answer)
        notes.append(", ".join(f"{k} {tools.say_value(v)}" for k, v in obj.items()))
    messages.append({"role": "assistant", "content": " ".join(answers)})
    if thinking:
        messages[-1]["reasoning_content"] = "The tool says: " + "; ".join(notes) + "."
    r = rng.random()
    if r < 0.15:                                # the same tool once more
        messages[-1].pop("reasoning_content", None)
        c = calls[0].again()
        messages.append({"role": "user", "content": c.ask})
        messages.append(tool_message([c], "The user needs a tool. " + tools.call_think(rng, c) if thinking else ""))
    elif r < 0.3:                               # or talk that needs none
        messages[-1].pop("reasoning_content", None)
        t = rng.choice((skills.fact, skills.small_talk, skills.fact_yes_no))(rng, split)
        messages.append({"role": "user", "content": t.user})
        messages.append({"role": "assistant", "content": t.answer})
        if thinking:
            messages[-1]["reasoning_content"] = "No tool is needed. " + t.think
    return render(messages, box)


KINDS = [
    ("story", plain_story, 7), ("notes", plain_notes, 2), ("story request", single(skills.story_request, 2), 8),
    ("arithmetic", single(skills.arithmetic, 3), 17), ("fact", single(skills.fact, 4), 16),
    ("yes or no", single(skills.fact_yes_no, 4), 10), ("follow-up", follow_up_doc, 6), ("about", single(skills.about, 2), 2),
    ("unknown", single(skills.unknown, 2), 5), ("small talk", single(skills.small_talk, 3), 5),
    ("repeat", single(skills.repeat, 3), 6), ("memory", memory_doc, 6), ("nothing told", single(skills.memory_missing), 1),
    ("reading", single(skills.reading, 2), 4), ("system prompt", styled_doc, 20), ("schema", schema_doc, 12),
    ("tools", tools_doc, 24), ("mixed talk", mixed_doc, 8),
]
KIND_NAMES = [k[0] for k in KINDS]
KIND_MAKERS = [k[1] for k in KINDS]
KIND_WEIGHTS = [k[2] for k in KINDS]


def documents(seed, held=False):
    """An endless stream of documents."""
    rng, split = random.Random(f"{seed}/{held}"), Split(held)
    while True:
        for make in rng.choices(KIND_MAKERS, KIND_WEIGHTS, k=64):
            yield make(rng, split)


# ---------------------------------------------------------------- prompts to be tested with

def eval_case(category, rng, split):
    """One prompt with its check. Thinking on or off by turns of the generator."""
    thinking = rng.random() < 0.5
    system, tool_list = None, None
    if category == "tools":
        messages, tool_list, calls = tool_case(rng, split)
        check = {"type": "tool_calls", "calls": [{"name": c.name, "arguments": c.args} for c in calls]}
    else:
        if category == "arithmetic":
            turns = [rng.choices((lambda r, s: skills.addition(r, s), lambda r, s: skills.subtraction(r, s, False),
                                  skills.comparison, skills.multiplication), (35, 35, 20, 10))[0](rng, split)]
        elif category == "facts":
            r = rng.random()
            turns = [skills.fact(rng, split)] if r < 0.75 else [skills.fact_yes_no(rng, split)] if r < 0.9 else \
                skills.follow_up(rng, split)
        elif category == "system_prompt":
            system, turn = skills.styled(rng, split)
            turns = [turn]
        elif category == "schema":
            system, turn = tools.schema_case(rng, split)
            turns = [turn]
        elif category == "memory":
            turns = skills.memory(rng, split, [skills.fact, skills.arithmetic])
        elif category == "reading":
            turns = [skills.reading(rng, split)]
        elif category == "copying":
            turns = [skills.repeat(rng, split)]
        elif category == "unknown":
            turns = [skills.unknown(rng, split)]
        else:
            turns = [skills.story_request(rng, split)]
            while not turns[0].check:
                turns = [skills.story_request(rng, split)]
        check = turns[-1].check
        messages = chat(turns, system, False)[:-1]
    case = {"category": category, "messages": messages}
    if tool_list:
        case["tools"] = tool_list
    case["enable_thinking"] = thinking
    case["check"] = check
    return case


CATEGORIES = [("arithmetic", 200), ("tools", 200), ("facts", 200), ("system_prompt", 200), ("schema", 200),
              ("memory", 60), ("reading", 60), ("copying", 60), ("unknown", 60), ("story", 40)]


def eval_cases(seed):
    """Held-out prompts, no two alike, the categories by turns so that the first N lines have some of each."""
    split, queues = Split(True), []
    for category, n in CATEGORIES:
        rng, seen, cases = random.Random(f"eval/{seed}/{category}"), set(), []
        while len(cases) < n:
            c = eval_case(category, rng, split)
            key = dumps(c["messages"])
            if key not in seen:
                seen.add(key)
                cases.append(c)
        queues.append(collections.deque(cases))
    while any(queues):
        for q in queues:
            if q:
                yield q.popleft()


def stats(seed, docs=20000):
    """Vocabulary and sizes over some documents."""
    rng, split = random.Random(f"{seed}/stats"), Split(False)
    size, count, vocab = collections.Counter(), collections.Counter(), collections.Counter()
    known = collections.Counter()
    for _ in range(docs):
        i = rng.choices(range(len(KINDS)), KIND_WEIGHTS)[0]
        text = KIND_MAKERS[i](rng, split)
        count[KIND_NAMES[i]] += 1
        size[KIND_NAMES[i]] += len(text)
        found = re.findall(r"[A-Za-z']+", text)
        vocab.update(w.lower() for w in found)
        if KIND_NAMES[i] in ("story", "story request"):
            known.update(w.lower() for w in found)
    often = sum(1 for w, c in vocab.items() if c >= 20)
    return {"documents": docs, "characters": sum(size.values()), "words_used_20_times_or_more": often,
            "words_of_stories": len(known), "distinct_words": len(vocab), "facts": len(world.FACTS),
            "ways_of_asking": sum(len(f.asks) for f in world.FACTS),
            "kinds": {k: {"documents": count[k], "characters": size[k]} for k in KIND_NAMES}}


def main():
    ap = argparse.ArgumentParser(description="text and tests for the demo model")
    ap.add_argument("--docs", type=int, help="print this many documents")
    ap.add_argument("--held-out", action="store_true", help="from the held-out split")
    ap.add_argument("--kind", choices=KIND_NAMES, help="documents of one kind only")
    ap.add_argument("--eval", metavar="FILE", help="write the test prompts")
    ap.add_argument("--stats", action="store_true", help="print statistics as JSON")
    ap.add_argument("--seed", type=int, default=1)
    args = ap.parse_args()
    if args.docs:
        stream = documents(args.seed, args.held_out)
        if args.kind:
            rng, split = random.Random(args.seed), Split(args.held_out)
            make = KIND_MAKERS[KIND_NAMES.index(args.kind)]
            stream = (make(rng, split) for _ in range(args.docs))
        for _ in range(args.docs):
            sys.stdout.write(next(stream) + END + "\n")
    if args.eval:
        with open(args.eval, "w", encoding="utf-8") as f:
            for case in eval_cases(args.seed):
                f.write(dumps(case) + "\n")
    if args.stats:
        print(json.dumps(stats(args.seed), indent=1))
    if not (args.docs or args.eval or args.stats):
        ap.print_usage(sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
