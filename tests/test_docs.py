#!/usr/bin/env python3
"""Docs name what is there: every path of the tree and every link in the pages exists, every `steel COMMAND` in them is
a command, and every option shown with one is an option of it. The pages about the code (GUIDES) name its files without
their folders, too, and its functions and tables: those are there as well. docs/gpu.md stays a guide: 150 lines."""
import glob
import os
import re
import subprocess
import sys

STEEL = os.path.join(sys.argv[1] if len(sys.argv) > 1 else "build", "steel")
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "demo/README.md", *sorted(glob.glob("docs/*.md") + glob.glob("bench/notes/*.md"))]
TOPS = "src|include|tests|bench|fuzz|tools|docs|demo|examples"
GUIDES = ["docs/architecture.md", "docs/gpu.md", "docs/speculation.md", "docs/ranks.md"]
CODE = [f for top in ("src", "include", "tests", "bench", "tools", "fuzz") for f in glob.glob(top + "/**/*", recursive=True)
        if f.endswith((".c", ".h", ".cu", ".cuh", ".cpp", ".py", ".sh"))]
PATH = re.compile(rf"(?<![\w/.-])((?:{TOPS})/[\w./*{{}},-]*[\w*}}])")


def braces(path):
    """a{b,c} as ab and ac."""
    m = re.search(r"\{([^{}]*)\}", path)
    return [p for x in m.group(1).split(",") for p in braces(path[:m.start()] + x + path[m.end():])] if m else [path]


def missing_paths(page, text):
    out = []
    for m in PATH.finditer(text):
        for p in braces(m.group(1)):
            if not glob.glob(p) and not glob.glob(p + ".*") and not glob.glob(p + "*"):
                out.append(f"{page}: {p} is not there")
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
        if "://" not in target and not os.path.exists(os.path.join(os.path.dirname(page), target)):
            out.append(f"{page}: link to {target}, which is not there")
    return out


def missing_names(page, text, files, words):
    """Files named without a folder, and `names_like_this`, that no file of the code has."""
    out = []
    for name in sorted(set(re.findall(r"(?<![\w/*.-])(\w+\.(?:cuh|cu|c|h))\b", text))):
        if name not in files:
            out.append(f"{page}: {name} is not there")
    for name in sorted(set(re.findall(r"`([a-z]\w*_\w+)`", text))):
        if name not in words and not (name.endswith("_") and any(w.startswith(name) for w in words)):
            out.append(f"{page}: {name} is in no file")
    return out


def helps():
    """command: its help."""
    text = subprocess.run([STEEL, "--help"], capture_output=True, text=True, check=True).stdout
    names = re.findall(r"^  ([a-z]+) ", text, re.M)
    return {n: subprocess.run([STEEL, n, "--help"], capture_output=True, text=True).stdout for n in names}


def bad_commands(page, text, known):
    out = []
    for line in re.findall(r"^(?:\$ )?(?:build/)?steel ([a-z]+[^\n]*)", text, re.M):
        name = line.split()[0]
        if name not in known:
            out.append(f"{page}: steel {name} is no command")
            continue
        command = line.split("  ")[0].split("#")[0]
        for option in re.findall(r"(?<=\s)--[a-z][a-z-]+", command):
            if not re.search(rf"{option}\b", known[name]):
                out.append(f"{page}: steel {name} has no {option}")
    return out


def main():
    assert len(missing_paths("README.md", "see src/base/nowhere.c and [x](docs/nowhere.md)")) == 3
    assert not missing_paths("README.md", "src/base/mem.{c,h}, src/backend/cpu/*_avx2.c, docs/server.md")
    known = helps()
    assert len(known) > 8, known.keys()
    assert len(bad_commands("x", "steel run --frobnicate\nsteel dance\n$ steel run --temp 0", known)) == 2
    files = {os.path.basename(f) for f in CODE}
    words = {w for f in CODE for w in re.findall(r"\w+", open(f, errors="replace").read())} | {f.split(".")[0] for f in files}
    assert len(missing_names("x", "see mem.c, nowhere.cu and `no_such_" "thing`, `mem_alloc`", files, words)) == 2
    found = []
    for page in PAGES:
        text = open(page).read()
        found += missing_paths(page, text) + bad_commands(page, text, known)
        if page in GUIDES:
            found += missing_names(page, text, files, words)
    if open("docs/gpu.md").read().count("\n") > 150:
        found.append("docs/gpu.md: more than 150 lines")
    print(f"{len(PAGES)} pages, {len(found)} faults")
    print("\n".join(found))
    sys.exit(bool(found))


main()
