#!/usr/bin/env python3
"""Compares the machine code of CUDA kernels between two trees, so that a move, a rename or a
refactoring can be shown to cost nothing.

  cubin_gate.py OLD_TREE NEW_TREE [old1.cu,old2.cu [new1.cu,new2.cu]] [--rename=OLD=NEW ...]

Files are names in or below src/backend/cuda; without them, all. For every kernel: identical bytes, or how
registers, spills and instructions changed; removed and new kernels. A kernel with a new name and the
same code is found automatically. If both changed, --rename gives the new name (a regular
expression on the mangled name). Exits 1 on a new spill.
Needs nvcc and no GPU. The result of a tree is cached by its sources' hash (in the
temporary folder), so that the old tree is compiled once."""
import concurrent.futures, glob, hashlib, json, os, re, struct, subprocess, sys, tempfile


def kernels(cubin):
    """Kernel name -> machine code, from the ELF's .text.* sections."""
    d = open(cubin, "rb").read()
    at, = struct.unpack_from("<Q", d, 0x28)
    size, n, names_at = struct.unpack_from("<HHH", d, 0x3a)
    table = [struct.unpack_from("<IIQQQQIIQQ", d, at + i * size) for i in range(n)]
    names = d[table[names_at][4]:][:table[names_at][5]]
    name = lambda s: names[s[0]:names.index(b"\0", s[0])].decode()
    return {name(s)[6:]: d[s[4]:s[4] + s[5]] for s in table if name(s).startswith(".text.")}


def build(tree, source, headers):
    """Kernel name -> registers, bytes spilled, instructions, hash of the code."""
    path, = glob.glob(f"{tree}/src/backend/cuda/**/{source}", recursive=True)
    key = hashlib.sha256(headers + open(path, "rb").read() + source.encode()).hexdigest()
    kept = os.path.join(tempfile.gettempdir(), f"cubin_gate.{key}.json")
    if os.path.exists(kept):
        return {k: tuple(v) for k, v in json.load(open(kept)).items()}
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out.cubin")
        r = subprocess.run(["nvcc", f"-I{tree}/src", f"-I{tree}/include", "-D_GNU_SOURCE", "-std=c++17",
                            "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v", "-cubin",
                            "-o", out, path], capture_output=True, text=True)
        if r.returncode:
            sys.exit(f"{tree}: {source}\n{r.stderr[-3000:]}")
        code, facts, cur = kernels(out), {}, None
    for line in r.stderr.splitlines():
        if m := re.search(r"Compiling entry function '(\S+)'", line):
            cur = facts.setdefault(m[1], {})
        elif m := re.search(r"(\d+) bytes spill stores", line):
            cur["spill"] = int(m[1])
        if m := re.search(r"Used (\d+) registers", line):
            cur["registers"] = int(m[1])
    found = {k: (f.get("registers"), f.get("spill", 0), len(code[k]) // 16,
                 hashlib.sha256(code[k]).hexdigest()) for k, f in facts.items() if k in code}
    json.dump(found, open(kept, "w"))
    return found


def build_all(tree, names):
    folder = f"{tree}/src/backend/cuda"
    find = lambda pattern: sorted(glob.glob(f"{folder}/**/{pattern}", recursive=True))
    headers = b"".join(open(f, "rb").read() for f in find("*.h") + find("*.cuh") + sorted(glob.glob(f"{tree}/src/backend/*.h")))
    names = names.split(",") if names else sorted(os.path.basename(f) for f in find("*.cu"))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(lambda f: build(tree, f, headers), names))
    return {k: v for part in parts for k, v in part.items()}


def main():
    args = [a for a in sys.argv[1:] if not a.startswith("--")]
    renames = [a.split("=", 1)[1].split("=") for a in sys.argv[1:] if a.startswith("--rename=")]
    if len(args) < 2:
        sys.exit(__doc__)
    old_files = args[2] if len(args) > 2 else ""
    old = build_all(args[0], old_files)
    new = build_all(args[1], args[3] if len(args) > 3 else old_files)
    same = renamed = worse = 0
    left = {}
    for k, o in sorted(old.items()):
        name = k
        for x, y in renames:
            name = re.sub(x, y, name)
        if name in new and new[name] == o:
            same += 1
            del new[name]
        else:
            left[k] = (name, o)
    for k, (name, o) in left.items():
        twin = next((t for t, n in new.items() if n == o), None) if name not in new else None
        if twin:
            renamed += 1
            del new[twin]
            continue
        n = new.pop(name, None)
        if n is None:
            print("gone    ", k[:90])
        else:
            worse += n[1] > o[1]
            print(f"changed  {name[:90]}  registers {o[0]} -> {n[0]}, spills {o[1]} -> {n[1]}, "
                  f"instructions {o[2]} -> {n[2]}")
    for k in new:
        print("new     ", k[:90])
    print(f"{same + renamed} of {len(old)} kernels identical, {renamed} of them renamed; {worse} spill more")
    sys.exit(worse > 0)


main()
