#!/usr/bin/env python3
"""Vulkan calls that fail (tests/vulkan_faults.c): call k of each kind, or every call from k on, as on a lost device, in a run and in
a server's requests. A run ends with its whole text, or with code 1 and one line. A request gets its whole answer or an error in words;
/health says 503 once the device is lost. A device with too little memory refuses a model before it is loaded, with numbers.
usage: vulkan_faults.py BUILD [all]: without "all" a few calls of each walk. tests/test_vulkan.sh runs this."""
import os, re, shutil, subprocess, sys, tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from faultlib import TEXT, Faults, walk_run, walk_server
from serverlib import HANG

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
ALL = len(sys.argv) > 2
KINDS = ["alloc", "submit", "wait", "pipeline", "record", "object", "any"]
STEEL = os.path.join(BUILD, "steel")
SHIM = os.path.join(BUILD, "tests/vulkan_faults")


def real_library():
    """The path of the library that the shim stands before."""
    code = "import ctypes, re; ctypes.CDLL('libvulkan.so.1'); print(re.search(r'\\S*libvulkan\\.so\\S*', open('/proc/self/maps').read())[0])"
    p = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return p.stdout.strip() if p.returncode == 0 else None


def too_little_memory(faults, model):
    env = dict(faults.env, VULKAN_HEAP=str(8 << 20))
    p = subprocess.run([STEEL, "run", model, "-p", "Once", "-n", "2", "--device", "vulkan"], env=env, capture_output=True, text=True, timeout=HANG)
    assert p.returncode == 1 and re.search(r"\d+(\.\d+)? [MG]i?B", p.stderr), (p.returncode, p.stdout, p.stderr)
    assert faults.counts()["alloc"] == 0, "memory was allocated before the refusal: " + p.stderr
    print("too little memory:", p.stderr.strip().splitlines()[-1][:200])


def main():
    real = real_library()
    if not real or not os.path.exists(os.path.join(SHIM, "libvulkan.so.1")):
        print("skipped: Vulkan calls that fail: no libvulkan.so.1, or a build without Vulkan")
        sys.exit(77)
    work = tempfile.mkdtemp(prefix="steel-vulkan-faults-")
    faults = Faults(BUILD, STEEL, "vulkan", KINDS, os.path.join(work, "faults"), "VULKAN_FAULTS", False, leaks=False)
    faults.env.update(VULKAN_REAL=real, LD_LIBRARY_PATH=os.path.abspath(SHIM))
    os.environ["STEEL_TEST_DEVICE"] = "vulkan"
    toy = os.path.join(work, "toy.gguf")
    subprocess.run([os.path.join(BUILD, "tests/toy_gguf"), toy], check=True)
    faults.arm("any", 0)
    too_little_memory(faults, toy)
    walk_run(faults, "run", ["run", toy, "-p", "Once", "-n", "4", "--temp", "0"], 6 if ALL else 1)
    if ALL:
        walk_server(faults, "server", [], toy, [(dict(TEXT, n=2), False), (dict(TEXT, prompt="A longer one. " * 12), True)], 4)
    shutil.rmtree(work)


main()
