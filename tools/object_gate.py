#!/usr/bin/env python3
"""Compares the machine code of C files between two trees, so that a rename or a rewritten comment can be shown to
change nothing else.

  object_gate.py OLD_TREE NEW_TREE [FOLDER_OR_FILE ...]

Compiles every src/**/*.c of the new tree (or those below the given paths) and its file of the same name in the old
tree, with __LINE__ and __FILE__ fixed, and compares the bytes of the code and of the constants. Strings are compared
separately, because a message may change on purpose. A renamed file is given as OLD=NEW. Exits 1 if code differs."""
import concurrent.futures, glob, hashlib, os, struct, subprocess, sys, tempfile

FLAGS = ("-std=gnu17 -O2 -g0 -w -fno-math-errno -ffp-contract=off -pthread -fPIC -Isrc -Iinclude -D_GNU_SOURCE "
         "-D__LINE__=0 -D__FILE__=\"\" -mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512vl -mavx512dq "
         "-mavx512vnni -mavx512vbmi -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16").split()


def sections(path):
    """(hash of code and constants, hash of strings) of an object file."""
    d = open(path, "rb").read()
    at, = struct.unpack_from("<Q", d, 0x28)
    size, n, names_at = struct.unpack_from("<HHH", d, 0x3a)
    table = [struct.unpack_from("<IIQQQQIIQQ", d, at + i * size) for i in range(n)]
    names = d[table[names_at][4]:][:table[names_at][5]]
    code, strings = [], []
    for s in table:
        name = names[s[0]:names.index(b"\0", s[0])].decode()
        if s[1] == 1 and name.startswith((".text", ".rodata", ".data")):
            (strings if ".str" in name else code).append(d[s[4]:s[4] + s[5]])
    return tuple(hashlib.sha256(b"|".join(sorted(x))).hexdigest() for x in (code, strings))


def build(tree, path):
    with tempfile.TemporaryDirectory() as folder:
        out = folder + "/x.o"
        r = subprocess.run([*os.environ.get("CC", "gcc").split(), *FLAGS, "-c", "-o", out, path], cwd=tree, capture_output=True, text=True)
        return sections(out) if r.returncode == 0 else ("does not compile: " + r.stderr[:300], "")


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    old, new, *where = sys.argv[1:]
    renames = dict(reversed(w.split("=")) for w in where if "=" in w)
    where = [w for w in where if "=" not in w] or ["src"]
    files = sorted({f for w in where for f in ([w] if w.endswith(".c") else
                    [os.path.relpath(p, new) for p in glob.glob(f"{new}/{w}/**/*.c", recursive=True)])}
                   - {"src/file/builtin.c", "src/server/web/web.c", "src/dist/ranks_mpi.c"})
    found = {os.path.basename(p): os.path.relpath(p, old) for p in glob.glob(f"{old}/src/**/*.c", recursive=True)}

    def compare(f):
        before = renames.get(f, f) if os.path.exists(f"{old}/{renames.get(f, f)}") else found.get(os.path.basename(f))
        return (f, before and build(old, before), build(new, f))

    same = worse = 0
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for f, a, b in pool.map(compare, files):
            if a == b:
                same += 1
            elif a is None:
                print("new      ", f)
            elif a[0] == b[0]:
                print("messages ", f)
                same += 1
            else:
                worse += 1
                print("changed  ", f, b[0] if " " in b[0] else "")
    print(f"{same} of {len(files)} files with the same code")
    sys.exit(worse > 0)


main()
