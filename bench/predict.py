#!/usr/bin/env python3
"""Predictions of `steel plan --link` for large models on 1 to 16 GPUs: the tables and the picture of docs/communication.md.

  predict.py BUILD                              prints the tables
  predict.py BUILD --doc docs/communication.md  replaces the text between <!-- predictions --> and <!-- /predictions -->
                                                there, and draws img/predictions.svg beside it

The model files have only names and shapes (synth_gguf.py --empty). Nothing is measured. Standard library only."""
import argparse
import html
import json
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
MODELS = {"qwen3-30b-a3b": "Qwen3-30B-A3B", "qwen3-235b-a22b": "Qwen3-235B-A22B", "deepseek-v3": "DeepSeek V3"}
# GPUs, arrangement, links: NVLink inside a machine of eight, 400 Gb/s between machines
ARRANGEMENTS = [(1, "", "nvlink"), (2, "--tp 2", "nvlink"), (4, "--tp 4", "nvlink"), (4, "--tp 4 --ep", "nvlink"),
                (8, "--tp 8", "nvlink"), (8, "--tp 8 --ep", "nvlink"), (8, "--tp 4 --pp 2", "nvlink"),
                (16, "--tp 8 --pp 2", "nvlink,400g"), (16, "--tp 16", "400g")]
LINKS = ["nvlink", "pcie5", "pcie4", "400g", "100g", "25g"]
PARTS = {"memory": "#35618f", "compute": "#6a9a6a", "layers": "#b9c4d0", "latency": "#c98b3a", "transfer": "#a33"}


class Planner:
    def __init__(self, build, folder):
        self.steel, self.folder = os.path.join(build, "steel"), folder

    def plan(self, model, arrangement, link, *more):
        path = os.path.join(self.folder, model + ".gguf")
        if not os.path.exists(path):
            subprocess.run([sys.executable, os.path.join(HERE, "synth_gguf.py"), path, "--shape", model, "--empty"], check=True,
                           stderr=subprocess.DEVNULL)
        r = subprocess.run([self.steel, "plan", path, "--json", "--link", link, "-c", "8192", "-np", "64", *arrangement.split(), *more],
                           capture_output=True, text=True)
        if not r.stdout:
            sys.exit(r.stderr)
        return json.loads(r.stdout)


def cell(step):
    p = step["prediction"]
    return f"{p['tokens_per_second']:,.0f} ({p['bound']})"


def fit(p):
    if p["fits"]:
        return "yes"
    return f"{p['room_tokens'] / 1024:,.0f}k tokens" if p["room_tokens"] >= 1 else "no"


def model_table(planner, model):
    rows = ["| GPUs | arrangement | weights a GPU | 64 x 8k fit | tg, 1 sequence | tg, 64 | prompt of 2,048 |", "|---|---|---|---|---|---|---|"]
    for n, arrangement, link in ARRANGEMENTS:
        p = planner.plan(model, arrangement, link)
        name = f"`{arrangement}`" + (f" over {link.replace(',', ', ')}" if n == 16 else "") if arrangement else "one"
        weights = max(r["weight_bytes"] for r in p["ranks"]) * 1e-9
        if p["room_tokens"] < 1:
            rows.append(f"| {n} | {name} | {weights:,.1f} GB | no (capacity) | - | - | - |")
        else:
            rows.append(f"| {n} | {name} | {weights:,.1f} GB | {fit(p)} | " + " | ".join(cell(s) for s in p["steps"]) + " |")
    return rows


def link_table(planner):
    rows = ["| 8 GPUs, `--tp 8` | " + " | ".join(LINKS) + " |", "|---|" + "---|" * len(LINKS)]
    for model, name in MODELS.items():
        plans = [planner.plan(model, "--tp 8", link) for link in LINKS]
        for i, what in enumerate(("tg, 1 sequence", "tg, 64", "prompt of 2,048")):
            rows.append(f"| {name}, {what} | " + " | ".join(cell(p["steps"][i]) for p in plans) + " |")
    return rows


def traffic_table(planner):
    rows = ["| `--tp 8` | step | messages | bytes sent by a rank |", "|---|---|---|---|"]
    for model, name in MODELS.items():
        for s in planner.plan(model, "--tp 8", "nvlink")["steps"]:
            rows.append(f"| {name} | {s['step']} | {s['messages']:,.0f} | {s['bytes'] * 1e-6:,.1f} MB |")
    return rows


def picture(planner):
    """The parts of a decode's time: one bar per arrangement, for one sequence and 64."""
    bar, left, width, y = 20, 300, 980, 62
    out = []
    for model, name in MODELS.items():
        for i, what in enumerate(("1 sequence", "64 sequences")):
            bars = []
            for n, arrangement, link in ARRANGEMENTS:
                p = planner.plan(model, arrangement, link)
                if p["room_tokens"] >= 1:
                    q = p["steps"][i]["prediction"]
                    parts = {k: q[k] for k in PARTS}
                    parts["memory" if q["memory"] < q["compute"] else "compute"] = 0  # the longer one counts
                    bars.append((f"{n} GPU{'s' if n > 1 else ''} {arrangement}", parts, q["seconds"], q["tokens_per_second"]))
            most = max(b[2] for b in bars)
            out.append(f'<text x="16" y="{y + 14}" font-weight="600">{html.escape(name)}, {what}</text>')
            y += 22
            for label, parts, seconds, rate in bars:
                out.append(f'<text x="{left - 10}" y="{y + 14}" text-anchor="end">{html.escape(label)}</text>')
                x = float(left)
                for k, v in parts.items():
                    w = v / most * (width - left - 190)
                    if w > 0.3:
                        out.append(f'<rect x="{x:.1f}" y="{y + 2}" width="{w:.1f}" height="{bar - 4}" fill="{PARTS[k]}"/>')
                    x += w
                out.append(f'<text x="{x + 6:.1f}" y="{y + 14}">{seconds * 1e3:.2f} ms, {rate:,.0f} tok/s</text>')
                y += bar
            y += 14
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" font-family="system-ui, sans-serif" font-size="13">',
            f'<rect width="{width}" height="{y}" fill="#fff"/>',
            '<text x="16" y="24" font-size="16" font-weight="600">A step of generation on H200s, as predicted</text>']
    x = 16
    for k, color in PARTS.items():
        head.append(f'<rect x="{x}" y="36" width="12" height="12" fill="{color}"/><text x="{x + 17}" y="47">{k}</text>')
        x += 40 + 8 * len(k)
    return "\n".join(head + out + ["</svg>\n"])


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("build")
    ap.add_argument("--doc")
    a = ap.parse_args()
    with tempfile.TemporaryDirectory(prefix="steel-predict-") as folder:
        planner = Planner(a.build, folder)
        parts = []
        for model, name in MODELS.items():
            parts.append(f"**{name}, Q4_K_M, tokens per second**\n\n" + "\n".join(model_table(planner, model)))
        parts.append("**By link**\n\n" + "\n".join(link_table(planner)))
        parts.append("**Messages of a step**\n\n" + "\n".join(traffic_table(planner)))
        text = "\n\n".join(parts)
        if not a.doc:
            print(text)
            return
        folder = os.path.join(os.path.dirname(a.doc), "img")
        with open(os.path.join(folder, "predictions.svg"), "w") as f:
            f.write(picture(planner))
    with open(a.doc) as f:
        page = f.read()
    begin, end = "<!-- predictions -->", "<!-- /predictions -->"
    if begin not in page or end not in page:
        sys.exit(f"{a.doc}: no {begin} ... {end}")
    first, rest = page.split(begin, 1)
    with open(a.doc, "w") as f:
        f.write(first + begin + "\n" + text + "\n\n![A step of generation on H200s](img/predictions.svg)\n" + end + rest.split(end, 1)[1])


if __name__ == "__main__":
    main()
