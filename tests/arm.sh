#!/bin/sh
# `make test-arm`: builds for aarch64 with Debian's cross compiler and runs the tests named here under qemu-user.
# A small set: emulation is slow. Needs gcc-aarch64-linux-gnu, qemu-user
# and arm64 in dpkg's architectures. Libraries that are not installed for arm64 (not all -dev packages can be, beside the
# host's own) are unpacked from their packages into build-aarch64-linux-gnu/sysroot.
CROSS=aarch64-linux-gnu
B=build-$CROSS
TESTS="api chat chat_ids chat_parse device embeds endpoints grammar hostile http http_faults jinja jobs kvcache layout
    markdown mem pack pick pool quant quantize ref sampler scheduler tensorfile tokenizer_parts"
FAMILIES="qwen3moe gpt_oss_mxfp4 qwen3_5 deepseek_v3 gemma4"
PACKAGES="libjansson-dev libjansson4 libpcre2-dev libpcre2-8-0 libutf8proc-dev libutf8proc2 libedit-dev libedit2 libtinfo6
    libbsd0 libmd0 libssl-dev libssl3 libevent-dev libevent-2.1-7 libevent-core-2.1-7 libevent-openssl-2.1-7 libcmocka-dev
    libcmocka0 libjpeg62-turbo-dev libjpeg62-turbo libpng-dev libpng16-16 zlib1g-dev zlib1g libwebp-dev libwebp7 libwebpdemux2
    libgif-dev libgif7 libcurl4-openssl-dev libpng-dev libpng16-16 libjpeg62-turbo-dev libjpeg62-turbo libwebp-dev libwebp7
    libwebpdemux2 libgif-dev libgif7 zlib1g-dev zlib1g libc6 libgcc-s1"

for tool in $CROSS-gcc qemu-aarch64; do
    command -v $tool >/dev/null || { echo "skipped: arm: no $tool here"; exit 0; }
done
sysroot=
if [ ! -e /lib/ld-linux-aarch64.so.1 ] || ! echo 'int main(void) { return 0; }' | $CROSS-gcc -x c -o /dev/null - -ljansson -lpcre2-8 -lutf8proc -ledit \
    -levent_openssl -levent -lssl -lcmocka -lwebpdemux -lgif -ljpeg -lpng16 2>/dev/null; then
    sysroot=$B/sysroot
    mkdir -p $sysroot/packages
    for p in $PACKAGES; do
        [ -n "$(find $sysroot/packages -name "${p}_*")" ] && continue
        (cd $sysroot/packages && apt-get download -qq $p:arm64 2>/dev/null) ||
            { echo "skipped: arm: no $p:arm64 to be downloaded (dpkg --add-architecture arm64; apt-get update)"; exit 0; }
    done
    for p in $sysroot/packages/*.deb; do
        dpkg-deb -x "$p" $sysroot
    done
fi
make -s CROSS=$CROSS OPT=-O2 ${sysroot:+SYSROOT=$sysroot} $B/steel test-build || exit 1
arm="qemu-aarch64${sysroot:+ -L $sysroot}" # the cross compiler's own libc hangs under it

echo $TESTS | tr ' ' '\n' | arm=$arm B=$B xargs -P "$(nproc)" -n 1 sh -c '
    log=$B/tests/test_$0.log
    $arm $B/tests/test_$0 >"$log" 2>&1 </dev/null && echo "ok    test_$0" && exit
    echo "FAIL  test_$0"
    tail -20 "$log" | sed "s/^/    | /"
    exit 1' || failed=1
for f in $FAMILIES; do
    $arm $B/steel logits tests/golden/$f --kv-type f32 --ids tests/golden/$f/golden.bin --out $B/logits.bin 2>$B/logits.log &&
        python3 -c "import sys; sys.path.insert(0, 'tests'); from gguf_tools import max_difference, read_logits
off = max_difference(*map(read_logits, sys.argv[1:])); print(f'{off:.1e} from the golden logits:', end=' '); sys.exit(not off < 1e-3)" \
            $B/logits.bin tests/golden/$f/golden.bin && echo "ok    $f" || { echo "FAIL  $f"; cat $B/logits.log; failed=1; }
done
[ -z "$failed" ]
