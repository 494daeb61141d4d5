#!/bin/sh
# The Debian package, where `make deb` made one: installed by dpkg into a bare Debian, used, removed.
# Needs root and debootstrap; a root kept in $STEEL_DEBIAN_ROOT saves the download.
set -u
B=${1:-build}
deb=$(ls dist/steel-llm_"$(cat VERSION)"_*.deb 2>/dev/null | head -1)
skip() { echo "skipped: package: $*"; exit 77; }
[ -n "$deb" ] || skip "no package here (make deb)"
[ "$(id -u)" = 0 ] || skip "only root can change into another root"
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
root=${STEEL_DEBIAN_ROOT:-$tmp/root}
if [ ! -d "$root/usr" ]; then
    command -v debootstrap >/dev/null || skip "debootstrap is not installed"
    debootstrap --variant=minbase stable "$root" >"$tmp/log" 2>&1 || skip "debootstrap: $(tail -1 "$tmp/log")"
fi
cp "$deb" "$root/steel.deb"
run() { chroot "$root" "$@"; }
failures=0
fail() { echo "FAIL: $*"; failures=$((failures + 1)); }
run dpkg -i /steel.deb >"$tmp/log" 2>&1 || fail "dpkg -i: $(tail -3 "$tmp/log")"
run steel --version | grep -q "^steel $(cat VERSION) " || fail "version"
run steel run -p 'Hello' -n 8 >"$tmp/out" 2>&1 || fail "run: $(tail -1 "$tmp/out")"
[ -e "$root/etc/default/steel" ] || fail "no /etc/default/steel"
run dpkg -r steel-llm >"$tmp/log" 2>&1 || fail "dpkg -r"
[ -e "$root/usr/bin/steel" ] && fail "the binary is still there"
run dpkg -P steel-llm >/dev/null 2>&1
rm -f "$root/steel.deb"
[ $failures = 0 ] && echo "installed, used, removed"
exit $((failures > 0))
