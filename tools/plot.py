#!/usr/bin/env python3
"""Draws the bar charts of docs/: one SVG from a small JSON file. Standard library only.

  plot.py IN.json OUT.svg

IN.json: {"title": ..., "unit": "tok/s", "groups": [{"name": "pp512", "bars": {"Steel": 900, "llama.cpp": 250},
          "limit": 1390}, ...]}   ("limit" draws a line: the machine's bound; it may be absent)
Each group has its own scale. The first bar is labelled with its ratio to the last one ("less": true: with how many times
faster it is) and its share of the limit.
"""
import html, json, sys

COLORS = ["#35618f", "#b9c4d0", "#c98b3a", "#6a9a6a"]


def number(v):
    return f"{v:,.0f}" if v >= 100 else f"{v:.1f}" if v >= 10 else f"{v:.2f}"


def chart(data):
    groups = data["groups"]
    names = list(dict.fromkeys(n for g in groups for n in g["bars"]))
    bar, gap, left, right, top = 20, 18, 130, 230, 64
    width = 820
    height = top + sum(len(g["bars"]) * bar + gap for g in groups) + 10
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" font-size="13">',
           f'<rect width="{width}" height="{height}" fill="#fff"/>',
           f'<text x="16" y="24" font-size="16" font-weight="600">{html.escape(data["title"])}</text>']
    x = 16
    for i, n in enumerate(names):
        out.append(f'<rect x="{x}" y="36" width="12" height="12" fill="{COLORS[i % 4]}"/><text x="{x + 17}" y="47">{html.escape(n)}</text>')
        x += 34 + 8 * len(n)
    if any("limit" in g for g in groups):
        out.append(f'<line x1="{x}" y1="36" x2="{x}" y2="49" stroke="#a33" stroke-width="2"/><text x="{x + 8}" y="47">limit</text>')
    y = top
    for g in groups:  # each group has its own scale: the figures differ by orders of magnitude
        most = max([*g["bars"].values(), g.get("limit", 0)]) or 1
        scale = (width - left - right) / most
        n_bars, labels = len(g["bars"]), []
        out.append(f'<text x="{left - 10}" y="{y + n_bars * bar / 2 + 4}" text-anchor="end">{html.escape(g["name"])}</text>')
        base = list(g["bars"].values())[-1]
        for i, (n, v) in enumerate(g["bars"].items()):
            notes = []
            if i == 0 and n_bars > 1 and base and v:
                notes.append(f"{base / v if data.get('less') else v / base:.2f}x")
            if i == 0 and g.get("limit"):
                notes.append(f"{100 * v / g['limit']:.0f} % of the limit")
            label = f"{number(v)} {data['unit']}" + (f" ({', '.join(notes)})" if notes else "")
            out.append(f'<rect x="{left}" y="{y + i * bar + 2}" width="{v * scale:.1f}" height="{bar - 4}" rx="2" fill="{COLORS[names.index(n) % 4]}"/>')
            labels.append((left + v * scale + 6, y + i * bar + 15, label))
        if "limit" in g:
            lx = left + g["limit"] * scale
            out.append(f'<line x1="{lx:.1f}" y1="{y}" x2="{lx:.1f}" y2="{y + n_bars * bar}" stroke="#a33" stroke-width="2"/>')
        # Labels are drawn over the limit's line, with a background where they cross it.
        for lx, ly, label in labels:
            out.append(f'<text x="{lx:.1f}" y="{ly}" stroke="#fff" stroke-width="4" paint-order="stroke">{html.escape(label)}</text>')
        y += n_bars * bar + gap
    return "\n".join(out + ["</svg>\n"])


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with open(sys.argv[1]) as f:
        data = json.load(f)
    with open(sys.argv[2], "w") as f:
        f.write(chart(data))


if __name__ == "__main__":
    main()
