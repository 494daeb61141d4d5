#!/bin/sh
# pack.sh [OUT.tar.xz]: the programs of the GPU's tests and the library that they need beside libc and a driver, for a machine
# without a compiler or Steel's packages. There, in a checkout:
#   tar xJf OUT.tar.xz && sh tests/gpu/all.sh build-gpu
# The programs have the same CUDA code in them, which xz stores once if its window is larger than a program.
set -e
out=${1:-build-gpu/gpu.tar.xz} B=build-gpu
programs="steel tests/ops/test_ops tests/toy_gguf tests/test_golden tests/test_invariance tests/test_vision tests/test_embed tests/test_speculate tests/test_draft_text tests/test_draft_model tests/test_eagle tests/test_canary"
make STATIC=1 B=$B MPICC= CUDA_ARCHS="${CUDA_ARCHS:-90a}" $(for p in $programs; do echo $B/$p; done)
mkdir -p $B/lib "$(dirname "$out")"
cp -L "$(ldd $B/tests/test_golden | sed -n 's/.*=> \(.*libcmocka[^ ]*\).*/\1/p')" $B/lib/
for p in $programs; do strip -o $B/stripped $B/$p && cat $B/stripped >$B/$p; done # keeps the mode
rm -f $B/stripped
tar c $(for p in $programs; do echo $B/$p; done) $B/lib | nice xz -T1 --lzma2=preset=6,dict=384MiB >"$out"
ls -l "$out"
