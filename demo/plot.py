#!/usr/bin/env python3
"""Draws loss.svg, the loss curve of the demo model, from report.json. Standard library only.

  plot.py report.json loss.svg
"""
import json
import math
import sys

W, H, LEFT, RIGHT, TOP, BOTTOM = 860, 430, 64, 24, 48, 54
INK, GRID, TRAIN, HELD = "#24292f", "#d0d7de", "#57606a", "#c2410c"
STYLE = "font-family='Helvetica,Arial,sans-serif'"


def points(report):
    """Training and held-out loss over millions of tokens, the runs one after the other, and where runs begin."""
    train, held, starts, base = [], [], [], 0.0
    for run in report["runs"]:
        starts.append(base)
        unit = run["tokens_per_step"] / 1e6
        train += [(base + step * unit, loss) for step, _, loss in run["curve"]]
        held += [(base + step * unit, loss) for step, loss in run["held_out_curve"]]
        base += run["steps"] * unit
        held.append((base, run["held_out_loss"]))
    return train, held, starts, base


def draw(report):
    train, held, starts, end = points(report)
    low, high = 0.2, 8.0

    def x(tokens):
        return LEFT + (W - LEFT - RIGHT) * tokens / end

    def y(loss):
        return TOP + (H - TOP - BOTTOM) * (math.log(high) - math.log(min(max(loss, low), high))) / math.log(high / low)

    def text(px, py, s, size=12, anchor="start", colour=INK, extra=""):
        return f"<text x='{px:.1f}' y='{py:.1f}' font-size='{size}' text-anchor='{anchor}' fill='{colour}' {STYLE}{extra}>{s}</text>"

    def line(pts, colour, width):
        d = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in pts)
        return f"<polyline points='{d}' fill='none' stroke='{colour}' stroke-width='{width}' stroke-linejoin='round'/>"

    out = [f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {W} {H}' role='img' aria-label='Loss of the demo model'>",
           f"<rect width='{W}' height='{H}' fill='white'/>",
           text(LEFT, 26, "Loss of the demo model (nats a token, answers counted in full, prompts a tenth)", 15)]
    for v in (0.2, 0.25, 0.3, 0.5, 1, 2, 4, 8):
        out.append(f"<line x1='{LEFT}' x2='{W - RIGHT}' y1='{y(v):.1f}' y2='{y(v):.1f}' stroke='{GRID}'/>")
        out.append(text(LEFT - 8, y(v) + 4, f"{v:g}", 12, "end"))
    step = 250
    for v in range(0, int(end) + 1, step):
        out.append(f"<line x1='{x(v):.1f}' x2='{x(v):.1f}' y1='{H - BOTTOM}' y2='{H - BOTTOM + 5}' stroke='{INK}'/>")
        out.append(text(x(v), H - BOTTOM + 20, str(v), 12, "middle"))
    out.append(f"<line x1='{LEFT}' x2='{W - RIGHT}' y1='{H - BOTTOM}' y2='{H - BOTTOM}' stroke='{INK}'/>")
    out.append(text((LEFT + W - RIGHT) / 2, H - 12, "million tokens", 12, "middle"))
    for s in starts[1:]:
        out.append(f"<line x1='{x(s):.1f}' x2='{x(s):.1f}' y1='{TOP}' y2='{H - BOTTOM}' stroke='{INK}' stroke-dasharray='3 3'/>")
        out.append(text(x(s) - 6, TOP + 14, "second run", 12, "end"))
    out += [line(train, TRAIN, 1.2), line(held, HELD, 2)]
    lx, ly = W - RIGHT - 250, TOP + 50
    for i, (name, colour, width) in enumerate((("training", TRAIN, 1.2), ("held out", HELD, 2))):
        out.append(f"<line x1='{lx}' x2='{lx + 28}' y1='{ly + 20 * i}' y2='{ly + 20 * i}' stroke='{colour}' stroke-width='{width}'/>")
        out.append(text(lx + 36, ly + 20 * i + 4, f"{name}: {(train if i == 0 else held)[-1][1]:.3f} at the end"))
    out.append("</svg>\n")
    return "\n".join(out)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print("usage: plot.py report.json loss.svg", file=sys.stderr)
        sys.exit(2)
    with open(sys.argv[1], encoding="utf-8") as f:
        picture = draw(json.load(f))
    with open(sys.argv[2], "w", encoding="utf-8") as f:
        f.write(picture)
