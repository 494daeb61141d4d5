#!/bin/sh
# Kernel benchmarks, then the model benchmark if a model is given: MODEL=file make bench
B=${1:-build}
"$B/bench/kernel" || exit 1
"$B/bench/quantize" || exit 1
if [ -n "$MODEL" ]; then
    "$B/steel" bench "$MODEL" -p 128,512 -n 128 --batch 1,4,16 || exit 1
else
    echo "MODEL=file make bench also measures a model" >&2
fi
