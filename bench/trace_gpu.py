#!/usr/bin/env python3
"""Tables from the trace of a bench_gpu built with TRACE=1 (trace_ROWS_DEPTH.txt): for every kernel of a step, the time
of its blocks from one mark to the next (see struct marks in src/backend/cuda/core/gpu.cuh).

    trace_gpu.py FILE [GHZ]

Times are differences of one SM's clock, so they are exact. Clocks of different SMs are never compared. GHZ converts clocks to
microseconds (default 1.98)."""
import sys
from collections import defaultdict

KERNELS = {1: "norm + product", 2: "gate, up", 3: "product", 4: "router", 5: "experts' gate, up", 6: "experts' down",
           7: "attention, last of its heads", 8: "attention", 9: "few rows: experts",
           11: "few rows: product"}
LABELS = {0: "start", 1: "asked", 2: "waits", 3: "released", 4: "row ready", 5: "first tile", 6: "products",
          7: "met", 8: "joined", 9: "end"}
ATTENTION = {1: "counted", 4: "asked for q", 5: "q ready", 6: "keys", 7: "warps met", 8: "blocks met"}


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    ghz = float(sys.argv[2]) if len(sys.argv) == 3 else 1.98
    kernels = defaultdict(list)  # (tag, blocks of a launch) -> [clocks at each mark]
    for line in open(sys.argv[1]):
        if line.startswith("B "):
            tag, _, _, grid, _, *marks = map(int, line.split()[1:])
            if tag:  # 0: a block that had nothing to do
                kernels[tag, grid].append(marks)
    for (tag, grid), blocks in sorted(kernels.items()):
        used = [i for i in range(len(blocks[0])) if all(b[i] for b in blocks)]
        since = {i: sorted((b[i] - b[0]) % 2**32 for b in blocks)[len(blocks) // 2] for i in used}
        used.sort(key=since.get)
        print(f"{KERNELS.get(tag, tag)}, {grid} blocks ({len(blocks)} in all); microseconds: median, 95 %, most")
        for a, b in zip(used, used[1:]):
            took = sorted((m[b] - m[a]) % 2**32 / ghz / 1000 for m in blocks)
            name = (ATTENTION if tag in (7, 8) else {}).get(b) or LABELS[b]
            print(f"  to {name:12} {took[len(took) // 2]:8.2f} {took[len(took) * 95 // 100]:8.2f} {took[-1]:8.2f}")


if __name__ == "__main__":
    main()
