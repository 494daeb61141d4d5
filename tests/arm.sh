#!/bin/sh
# arm.sh [CPU...]: builds for aarch64 with Debian's cross compiler and runs tests under qemu-user, once for each CPU that it
# emulates (by default one for each set of kernels: max has i8mm, neoverse-n1 dotprod, cortex-a53 neon). On the first CPU run
# KERNELS and ONCE, on the others KERNELS. Tests run with fewer shapes (tests/size.h); WHOLE=1 runs them whole.
# PACKAGES=1: `make dist` and `make deb`, too (default without NAMES). NAMES="..." chooses tests by name, for every CPU;
# NAMES=logits the comparison of the sets' logits; NAMES=none only builds. ALL=1: every test that this can emulate, not only
# the usual lists. SMALL=1: what CI has time for, tests of kernels, and no more is built. JOBS: tests at a time, one per
# core by default.
# A program is run through a script of its name in build-aarch64-linux-gnu/CPU, which is the build folder for tests/run.sh:
# nothing has to be registered with the kernel. So a program cannot start itself: tests of that are in NOT_HERE.
CROSS=aarch64-linux-gnu
B=build-$CROSS
CPUS=${*:-max neoverse-n1 cortex-a53}
# What the set of kernels changes: products, attention, mixers, packing and quantisers; whole models against golden logits;
# images, adapters and drafts; the server and its clients.
KERNELS="test_ops test_ops_suite test_attention test_golden test_invariance test_pick test_quant test_pack test_quantize
    test_lora test_vision test_embed test_mtp test_demo_logits test_server test_clients"
# What plain C computes, the same on all of them: the reference, engine and cache, text, files, protocols, commands.
ONCE="test_ref test_draft test_draft_model test_together test_pool test_mem test_sampler test_kvcache test_tensorfile test_layout test_image
    test_tokenizer_parts test_grammar test_hostile test_canary test_scheduler test_api test_endpoints test_http
    test_completions test_responses test_template test_tokenize test_variants test_sampling_flags test_unigram"
# Start themselves again, compile for or install on this machine, read files of Steel's own process, use MPI or a GPU, measure,
# or run no program of Steel's.
NOT_HERE="test_launch test_pull test_install test_examples test_deb test_docker test_ranks.* test_cuda_faults test_faults.* test_bench
    test_costs test_memory test_load test_page test_terminal test_docs test_includes test_corpus test_editors test_sysmem"

for tool in $CROSS-gcc qemu-aarch64; do
    command -v $tool >/dev/null || { echo "skipped: arm: no $tool here (sh tools/deps.sh dev installs it)"; exit 0; }
done
sysroot=$(sh tools/sysroot.sh $CROSS) || { echo "skipped: arm: $sysroot"; exit 0; }
# CC=ccache: the compiler behind ccache. WHOLE=1: as released, with -O3.
make="nice -n ${NICE:-10} make -s CROSS=$CROSS $([ -n "$WHOLE" ] || echo OPT=-O2) ${sysroot:+SYSROOT=$sysroot}"
if [ -n "$SMALL" ]; then
    B=$B-kernels
    NAMES="test_pack test_quantize"
    $make B=$B PARTS=kernels OPT=-O1 $(for t in $NAMES; do echo "$B/tests/$t"; done) || exit 1
else
    $make $B/steel test-build || exit 1
fi

# Scripts that run the programs of the build folder as on CPU.
scripts() { # CPU
    rm -rf "${B:?}/$1"
    for p in $B/steel $B/tests/* $B/tests/ops/* $B/examples/*; do
        case $p in *.o | *.d | *.so | *.log | *.result | *.times) continue ;; esac
        [ -f "$p" ] && [ -x "$p" ] || continue
        to=$B/$1${p#"$B"}
        mkdir -p "$(dirname "$to")"
        printf '#!/bin/sh\nexec qemu-aarch64 -cpu %s -0 "$0"%s %s "$@"\n' "$1" "${sysroot:+ -L $PWD/$sysroot}" "$PWD/$p" >"$to"
        chmod +x "$to"
    done
}

# The names of the tests for a CPU, without what NOT_HERE has.
names() { # CPU
    [ -n "$NAMES" ] && echo $NAMES && return
    [ -z "$ALL" ] && echo $KERNELS $([ "$1" != "${CPUS%% *}" ] || echo $ONCE) && return
    for t in tests/test_*.sh tests/test_*.py $B/tests/test_*; do
        t=$(basename "$t")
        echo "${t%.*}"
    done | sort -u | grep -vxE "$(echo $NOT_HERE | tr ' ' '|')"
}

for cpu in $([ "$NAMES" = none ] || echo $CPUS); do
    scripts "$cpu"
    [ "$NAMES" = logits ] && continue
    echo "== aarch64, $cpu"
    size=$([ "$cpu" = "${CPUS%% *}" ] && echo 1 || echo kernels)
    NAMES=$(names "$cpu") JOBS=${JOBS:-$(nproc)} TEST_SMALL=$([ -n "$WHOLE" ] || echo $size) \
        nice -n ${NICE:-10} sh tests/run.sh "$B/$cpu" || failed=1
done
# Every set of kernels gives the same logits, to the bit: 96 tokens of the demo model in formats of one and two input codes.
same_logits() {
    out=$B/logits
    rm -rf "$out" && mkdir -p "$out"
    python3 -c "import struct, sys
d = open('demo/fixture.bin', 'rb').read()
n, vocab = struct.unpack_from('<i', d, 8)[0], struct.unpack_from('<i', d, 4)[0]
sys.stdout.buffer.write(struct.pack('<2i', n, vocab) + d[16:16 + 4 * n])" >"$out/ids"
    first=$B/${CPUS%% *}/steel
    export STEEL_CONFIG=
    $first convert demo/steel-demo "$out/bf16.gguf" --type bf16 >"$out/log" 2>&1 || { cat "$out/log"; return 1; }
    for type in Q8_0 Q4_K Q6_K; do
        rm -f "$out"/*.logits
        $first quantize "$out/bf16.gguf" "$out/$type.gguf" $type >"$out/log" 2>&1 || { cat "$out/log"; return 1; }
        for cpu in $CPUS; do
            "$B/$cpu/steel" logits "$out/$type.gguf" --ids "$out/ids" --out "$out/$cpu.logits" --device cpu >"$out/log" 2>&1 ||
                { cat "$out/log"; return 1; }
            cmp "$out/${CPUS%% *}.logits" "$out/$cpu.logits" || return
        done
    done
}
if [ -z "$NAMES" ] || [ "$NAMES" = logits ]; then
    same_logits && echo "ok    the same logits on $CPUS" || { echo "FAIL  the same logits on $CPUS"; failed=1; }
fi
# The binary and the package for other machines, which hold their libraries: run with nothing but libc.
packages() {
    arm="qemu-aarch64${sysroot:+ -L $sysroot}" out=$B/package deb=dist/steel-llm_$(cat VERSION)_arm64.deb
    $make dist || return
    $make deb || return
    rm -rf "$out" && dpkg-deb -x "$deb" "$out" || return
    [ "$(dpkg-deb -f "$deb" Architecture)" = arm64 ] || { echo "$deb is for $(dpkg-deb -f "$deb" Architecture)"; return 1; }
    for program in dist/steel-aarch64 $out/usr/bin/steel; do
        $CROSS-readelf -d $program | grep NEEDED | grep -vE '\[(libc|libm|ld-linux-aarch64|libgcc_s|libdl)\.so\.[0-9]+\]' &&
            { echo "$program needs more than libc"; return 1; }
        STEEL_CONFIG= $arm $program --version | grep -q "^steel $(cat VERSION) " || { echo "$program --version fails"; return 1; }
        STEEL_CONFIG= $arm $program run -p Hello -n 8 --temp 0 >"$out/said" 2>"$out/log" && [ -s "$out/said" ] ||
            { echo "$program does not run"; cat "$out/log"; return 1; }
    done
    ls $out/usr/share/man/man1/steel-run.1.gz >/dev/null
}
if [ -z "$NAMES" ] || [ -n "$PACKAGES" ]; then
    packages && echo "ok    make dist, make deb" || { echo "FAIL  make dist, make deb"; failed=1; }
fi
[ -z "$failed" ]
