"""Small models that answer differently, and `steel serve` with any arguments."""
import json
import os
import random
import subprocess
import sys
import tempfile
import time

from gguf_tools import Gguf, write_gguf
from serverlib import HANG, Server

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"


def make_toys(build, work, n):
    """n small models that answer differently: the rows of the output are in another order in each."""
    folder = os.path.join(work, f"toys{n}")
    if os.path.isdir(folder):
        return folder
    os.mkdir(folder)
    base = os.path.join(work, "base.gguf")
    subprocess.run([os.path.join(build, "tests/toy_gguf"), base], check=True)
    toy = Gguf(base)
    shape, kind, data = toy.tensors["output.weight"]
    row = len(data) // shape[1]
    for i in range(n):
        order = list(range(256))  # the bytes; control tokens stay where they are
        random.Random(i).shuffle(order)
        rows = b"".join(bytes(data[k * row:(k + 1) * row]) for k in order + list(range(256, shape[1])))
        tensors = [(name, *t) if name != "output.weight" else (name, shape, kind, rows) for name, t in toy.tensors.items()]
        write_gguf(os.path.join(folder, f"toy{i}.gguf"), toy.meta, tensors)
    return folder


class Models(Server):
    """`steel serve` with any arguments."""

    def __init__(self, *args, config="", env=None, wait=True):
        self.dir = tempfile.TemporaryDirectory(prefix="steel-test-")
        path = os.path.join(self.dir.name, "config")
        with open(path, "w") as f:
            f.write(config)
        cmd = [os.path.join(BUILD, "steel"), "serve", "--port", "0", "-t", "1", "--deterministic", *args]
        self._start(cmd, dict(os.environ, STEEL_CONFIG=path, **(env or {})), wait)

    def models(self):
        return {m["id"]: m for m in json.loads(self.get("/v1/models")[2])["data"]}

    def states(self):
        return {name: m["status"]["value"] for name, m in self.models().items()}

    def loaded(self):
        return sorted(n for n, s in self.states().items() if s == "loaded")

    def until(self, what, names):
        start = time.time()
        while self.loaded() != names:
            assert time.time() - start < HANG, (what, self.states(), self.log())
            time.sleep(0.02)
