#!/usr/bin/env python3
"""The tree is the pipeline: a folder of src/ includes only itself and folders before it, a shelf of text/ or server/ only itself and
shelves before it, examples include only
steel.h, and steel run generates through steel.h alone. Also: no file of src/ is without its opening comment, what only
Linux has is in base/, vector instructions and assembly are in base/ and in kernels, and each kernel file for AVX2 has one for NEON."""
import glob
import os
import re
import sys

ORDER = "base quant file text image sample backend model vision dist engine server route convert cli".split()
SHELVES = {"text": "tokenizer jinja grammar chat".split(), "server": "http mcp api web".split()}  # in their order
NOT_IN_RUN = {"engine", "sample", "model", "backend"}  # cmd_run.c, terminal.c, generate.c
RUN = {"src/cli/cmd_run.c", "src/cli/term/terminal.c", "src/cli/generate.c"}
SOURCE = (".c", ".h", ".cu", ".cuh", ".inc")
# What Linux alone has, and what macOS lacks of POSIX and GNU's library (base/os.h).
LINUX = re.compile(r'"/(?:proc|sys)/|\b(?:eventfd|epoll_\w+|inotify\w*|signalfd|timerfd\w*|memfd_create|prctl|getrandom|syscall|'
                   r'SYS_\w+|FUTEX_\w+|sched_[gs]etaffinity|pthread_setname_np|getauxval|mallopt|malloc_trim|fallocate|'
                   r'sendfile|splice|mremap|gettid|__linux__)\b|<linux/')
NOT_MACOS = re.compile(r'\b(?:accept4|pipe2|SOCK_(?:CLOEXEC|NONBLOCK)|MSG_NOSIGNAL|TCP_KEEPIDLE|posix_fadvise|POSIX_FADV_\w+|'
                       r'posix_fallocate|memrchr|pthread_condattr_setclock|clock_nanosleep|ppoll|st_mtim|qsort_r|sincosf?|'
                       r'strchrnul|fdatasync|sigtimedwait|malloc_usable_size)\b')
# Instructions of one architecture, and questions about the CPU.
VECTORS = re.compile(r"\b(?:_mm\d*_\w+|__m(?:128|256|512)\w*|immintrin\.h|arm_neon\.h|v[a-z]+q?_n?_?[suf](?:8|16|32))\b")
ASSEMBLY = re.compile(r"\b(?:__asm__|__asm|asm)\b(?=[\s(]*(?:volatile|goto|\())")
CPUID = re.compile(r"\b(?:cpuid\.h|__get_cpuid\w*|__cpuid\w*|__builtin_cpu_\w+|__builtin_ia32_\w+)\b")
# Kernels are named after their set; these headers give all of them the same vectors.
KERNELS = re.compile(r"src/(?:backend/cpu|quant)/\w+_(?:avx2|avx512|vnni|amx|neon|dotprod|i8mm)\.[ch]$")
SHARED = {"src/backend/cpu/" + f for f in ("vec.h", "attn_int8.h", "attn_kernel.h", "panel_pack_kernel.h", "amx.h")}
SHARED.add("src/quant/simd16.h")
# Kernels for AVX2 that have no NEON file: why.
NO_NEON = {"attn_madd": "whole dot products of bytes need SDOT: attn_dotprod.c; without it NEON's attention converts to floats"}


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
    if where[0] == "src" and where[1] != "base":
        code = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
        for found in LINUX.findall(code):
            out.append(f"{path}: {found}: only Linux has it; base/os.h")
        if "cuda" not in where:
            for found in NOT_MACOS.findall(code):
                out.append(f"{path}: {found}: macOS lacks it; base/os.h")
            for found in CPUID.findall(code):
                out.append(f"{path}: {found}: base/cpu.h knows the CPU")
            if not KERNELS.match(path) and path not in SHARED:
                for found in VECTORS.findall(code) + ASSEMBLY.findall(code):
                    out.append(f"{path}: {found}: not a kernel for one instruction set")
    return out


def without_neon(files):
    """Kernel files for AVX2 that have no other one for NEON, and no reason."""
    of = lambda isa: {m.group(1) for m in (re.match(rf".*/(\w+)_{isa}\.c$", f) for f in files) if m}
    return sorted(of("avx2") - of("neon") - set(NO_NEON))


def main():
    # the check itself: each of these must be found
    bad = [("src/base/x.c", '/* x */\n#include "engine/engine.h"\n'), ("src/model/x.c", "int x;\n"),
           ("src/cli/term/terminal.c", '/* x */\n#  include "engine/engine.h"\n'),
           ("examples/x.c", '#include "base/mem.h"\n'), ("include/steel.h", "#include <jansson.h>\n"),
           ("src/text/x.c", '/* x */\n#include "text/nowhere.h"\n'),
           ("src/text/jinja/x.c", '/* x */\n#include "text/chat/chat.h"\n'),
           ("src/engine/x.c", "/* x */\n#include <cuda_runtime.h>\n"),
           ("src/server/x.c", "/* x */\nint f = eventfd(0, 0);\n"),
           ("src/cli/x.c", '/* x */\nFILE *f = fopen("/proc/cpuinfo", "r");\n'),
           ("src/engine/x.c", "/* x */\nbool b = __builtin_cpu_supports(\"avx2\");\n"),
           ("src/dist/x.c", "/* x */\nint s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);\n"),
           ("src/sample/x.c", "/* x */\n__m256 x;\n"), ("src/backend/cpu/moe.c", "/* x */\n#include <immintrin.h>\n"),
           ("src/text/x.c", "/* x */\nx = vaddq_f32(x, y);\n"),
           ("src/file/x.c", "/* x */\n__asm__(\"nop\");\n"), ("src/server/x.c", "/* x */\n__asm__ volatile(\"\");\n")]
    assert without_neon(["src/quant/x_avx2.c", "src/quant/y_avx2.c", "src/quant/y_neon.c"]) == ["x"]
    fine = [("src/base/x.c", "/* x */\nint f = eventfd(0, 0);\n"), ("src/quant/x_avx2.c", "/* x */\n__m256 x;\n"),
            ("src/cli/x.c", "/* /proc/ and eventfd */\n")]
    for path, text in fine:
        assert not faults(path, text), (path, faults(path, text))
    for path, text in bad:
        assert len(faults(path, text)) == 1, (path, faults(path, text))
    folders = sorted(os.path.basename(f) for f in glob.glob("src/*"))
    assert folders == sorted(ORDER), f"folders of src/: {folders}; the order knows {sorted(ORDER)}"
    files = [f for top in ("src", "include", "examples") for f in glob.glob(top + "/**/*", recursive=True)
             if f.endswith(SOURCE)]
    found = [fault for f in sorted(files) for fault in faults(f, open(f).read())]
    found += [f"{name}_avx2.c has no {name}_neon.c" for name in without_neon(files)]
    print(f"{len(files)} files, {len(found)} faults")
    print("\n".join(found))
    sys.exit(bool(found) or len(files) < 100)


main()
