#!/usr/bin/env python3
"""Draws a terminal's screen, the output of `tmux capture-pane -p -e`, as SVG. Standard library only.

  tmux capture-pane -p -e | term_svg.py [TITLE] > OUT.svg
"""
import html, re, sys, unicodedata

CELL, LINE, PAD, BAR = 8.4, 19, 18, 34
INK, PAPER, DIM = "#d7dce2", "#161a1f", "#7d8793"
COLORS = {30: "#3b4048", 31: "#e06c75", 32: "#98c379", 33: "#e5c07b", 34: "#61afef", 35: "#c678dd", 36: "#56b6c2", 37: INK}


def width(c):
    return 0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1


def runs(line, style):
    """(column, text, style) of the pieces of a line, wide characters apart, and the style at its end. A style is a set
    of SGR codes."""
    out, column = [], 0
    for part in re.split(r"(\033\[[0-9;]*m)", line):
        if part.startswith("\033["):
            for code in (int(c or 0) for c in part[2:-1].split(";")):
                if code == 0:
                    style = set()
                elif code == 22:
                    style -= {1, 2}
                elif code in (23, 24, 29):
                    style -= {code - 20}
                elif code == 39:
                    style = {c for c in style if c not in COLORS}
                elif code != 49:
                    style = {c for c in style if not (code in COLORS and c in COLORS)} | {code}
        else:
            for piece in re.findall(r"[\u1100-\uffef\U0001f000-\U0003ffff]+|[^\u1100-\uffef\U0001f000-\U0003ffff]+", part):
                out.append((column, piece, frozenset(style)))
                column += sum(map(width, piece))
    return out, style


def attributes(style):
    a = [f'fill="{next((COLORS[c] for c in style if c in COLORS), DIM if 2 in style else INK)}"']
    for code, text in ((1, 'font-weight="700"'), (3, 'font-style="italic"'), (9, 'text-decoration="line-through"')):
        if code in style:
            a.append(text)
    return " ".join(a)


def draw(screen, title="steel"):
    lines = screen.rstrip().split("\n")
    plain = [re.sub(r"\033\[[0-9;]*m", "", l) for l in lines]
    w = int(max(sum(map(width, l)) for l in plain) * CELL + 2 * PAD)
    h = BAR + LINE * len(lines) + PAD
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" font-size="14" '
           'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, \'DejaVu Sans Mono\', monospace">',
           f'<rect width="{w}" height="{h}" rx="10" fill="{PAPER}"/>']
    out += [f'<circle cx="{PAD + 18 * i}" cy="17" r="6" fill="{c}"/>' for i, c in enumerate(("#ff5f57", "#febc2e", "#28c840"))]
    out.append(f'<text x="{w / 2}" y="21" text-anchor="middle" fill="{DIM}">{html.escape(title)}</text>')
    style = set()
    for i, line in enumerate(lines):
        pieces, style = runs(line, style)
        y = BAR + LINE * i + 14
        for column, text, look in pieces:
            if text.strip():
                n = round(sum(map(width, text)) * CELL, 1)
                out.append(f'<text xml:space="preserve" x="{round(PAD + column * CELL, 1)}" y="{y}" textLength="{n}" '
                           f'lengthAdjust="spacingAndGlyphs" {attributes(look)}>{html.escape(text)}</text>')
    out.append("</svg>\n")
    return "\n".join(out)


if __name__ == "__main__":
    sys.stdout.write(draw(sys.stdin.read(), *sys.argv[1:2]))
