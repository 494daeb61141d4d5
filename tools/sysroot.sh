#!/bin/sh
# sysroot.sh TRIPLET: the libraries for a cross build. Prints the folder to give make as SYSROOT and qemu-user as -L; nothing
# where the cross compiler finds the libraries itself. Debian's packages of the other architecture are unpacked, not
# installed: not all of their -dev packages can be beside the host's own. Exit code 77: they cannot be had; why is printed.
CROSS=${1:?TRIPLET}
arch=$(case $CROSS in aarch64-*) echo arm64 ;; *) echo "${CROSS%%-*}" ;; esac)
to=build-$CROSS/sysroot
# -dev packages that the build and the tests need, static ones of `make dist`, and what a program loads at run time.
packages="libjansson-dev libpcre2-dev libutf8proc-dev libedit-dev libncurses-dev libbsd-dev libmd-dev libssl-dev libevent-dev
    libcmocka-dev libcurl4-openssl-dev libpng-dev libjpeg-dev libwebp-dev libgif-dev libc6 libgcc-s1"

none() {
    echo "$*"
    exit 77
}
[ -e "$to/complete" ] && echo "$to" && exit
command -v "$CROSS-gcc" >/dev/null || none "no $CROSS-gcc here (\`sh tools/deps.sh dev\` installs it)"
if [ -e /lib/ld-linux-aarch64.so.1 ] && echo 'int main(void) { return 0; }' | "$CROSS-gcc" -x c -o /dev/null - -ljansson -lpcre2-8 \
    -lutf8proc -ledit -levent_openssl -levent -lssl -lcmocka -lwebpdemux -lgif -ljpeg -lpng16 2>/dev/null; then
    exit
fi
command -v apt-cache >/dev/null || none "no apt-cache here to find $arch packages"
dpkg --print-foreign-architectures | grep -qx "$arch" ||
    none "$arch is none of dpkg's architectures (dpkg --add-architecture $arch; apt-get update)"
# All that these depend on, but the C library's own -dev packages, which the cross compiler has.
all=$(for p in $packages; do echo "$p:$arch"; done |
    xargs apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances 2>/dev/null |
    grep -E "^[a-z0-9].*:$arch\$" | grep -vE '^(lib(c6|crypt|nsl|tirpc)-dev|libc-dev-bin|linux-libc-dev|.*-bin|rpcsvc-proto):' | sort -u)
mkdir -p "$to/packages"
missing=
for p in $all; do
    [ -n "$(find "$to/packages" -name "${p%:*}_*")" ] || missing="$missing $p"
done
[ -n "$all" ] || none "no $arch packages are known (apt-get update)"
[ -z "$missing" ] || (cd "$to/packages" && apt-get download -qq $missing >/dev/null 2>&1) ||
    none "packages cannot be downloaded:$missing"
for p in "$to"/packages/*.deb; do
    dpkg-deb -x "$p" "$to" || exit 1
done
touch "$to/complete"
echo "$to"
