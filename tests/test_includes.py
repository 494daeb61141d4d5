#!/usr/bin/env python3
"""The tree is the pipeline: a folder of src/ includes only itself and folders before it, a shelf of text/ or server/ only itself and
shelves before it, examples include only
steel.h, and steel run generates through steel.h alone. Also: no file of src/ is without its opening comment."""
import glob
import os
import re
import sys

ORDER = "base quant file text image sample backend model vision dist engine server route convert cli".split()
SHELVES = {"text": "tokenizer jinja grammar chat".split(), "server": "http mcp api web".split()}  # in their order
NOT_IN_RUN = {"engine", "sample", "model", "backend"}  # cmd_run.c, terminal.c, generate.c
RUN = {"src/cli/cmd_run.c", "src/cli/term/terminal.c", "src/cli/generate.c"}
SOURCE = (".c", ".h", ".cu", ".cuh", ".inc")


def includes(text):
    return re.findall(r'^\s*#\s*include\s+["<]([^">]+)[">]', text, re.M)


def faults(path, text):
    """What is wrong with one file."""
    where = path.split("/")
    out = []
    if where[0] == "src" and not text.lstrip().startswith(("/*", "//")):
        out.append(f"{path}: does not say at its top what it is")
    for name in includes(text):
        folder = name.split("/")[0] if "/" in name else None
        shelves = SHELVES.get(folder)
        if shelves and where[:2] == ["src", folder] and len(where) > 3 and name.count("/") == 2:
            if shelves.index(name.split("/")[1]) > shelves.index(where[2]):
                out.append(f"{path}: includes {name}, of a shelf that comes after {where[2]}")
        if where[0] == "src" and folder in ORDER and ORDER.index(folder) > ORDER.index(where[1]):
            out.append(f"{path}: includes {name}, of a folder that comes after {where[1]}")
        if where[0] == "src" and folder in ORDER and not os.path.exists("src/" + name):
            out.append(f"{path}: includes {name}, which is not there")
        if path in RUN and folder in NOT_IN_RUN:
            out.append(f"{path}: includes {name}; generation goes through steel.h")
        if where[0] == "examples" and folder in ORDER:
            out.append(f"{path}: includes {name}; an example sees steel.h alone")
        if where[0] == "include" and name.split("/")[0] not in ("stdbool.h", "stddef.h", "stdint.h"):
            out.append(f"{path}: includes {name}")
        if name.startswith("cuda") and "cuda" not in where:
            out.append(f"{path}: includes {name}; CUDA stays in backend/cuda")
    return out


def main():
    # the check itself: each of these must be found
    bad = [("src/base/x.c", '/* x */\n#include "engine/engine.h"\n'), ("src/model/x.c", "int x;\n"),
           ("src/cli/term/terminal.c", '/* x */\n#  include "engine/engine.h"\n'),
           ("examples/x.c", '#include "base/mem.h"\n'), ("include/steel.h", "#include <jansson.h>\n"),
           ("src/text/x.c", '/* x */\n#include "text/nowhere.h"\n'),
           ("src/text/jinja/x.c", '/* x */\n#include "text/chat/chat.h"\n'),
           ("src/engine/x.c", "/* x */\n#include <cuda_runtime.h>\n")]
    for path, text in bad:
        assert len(faults(path, text)) == 1, (path, faults(path, text))
    folders = sorted(os.path.basename(f) for f in glob.glob("src/*"))
    assert folders == sorted(ORDER), f"folders of src/: {folders}; the order knows {sorted(ORDER)}"
    files = [f for top in ("src", "include", "examples") for f in glob.glob(top + "/**/*", recursive=True)
             if f.endswith(SOURCE)]
    found = [fault for f in sorted(files) for fault in faults(f, open(f).read())]
    print(f"{len(files)} files, {len(found)} faults")
    print("\n".join(found))
    sys.exit(bool(found) or len(files) < 100)


main()
