#!/bin/sh
# The Debian package, where `make deb` made one: installed by dpkg into a bare Debian, used, removed.
# Needs root and debootstrap; a root kept in $STEEL_DEBIAN_ROOT saves the download.
set -u
B=${1:-build}
deb=$(ls dist/steel-llm_"$(cat VERSION)_$(dpkg --print-architecture)".deb 2>/dev/null)
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
dpkg-deb -f "$deb" Recommends | grep -q libcurl4 || fail "libcurl is not recommended"
dpkg-deb -f "$deb" Depends | tr ',' '\n' | grep -qv 'libc6\|libgcc-s1' && fail "depends on $(dpkg-deb -f "$deb" Depends)"
dpkg-deb -c "$deb" >"$tmp/list"
for f in usr/bin/steel usr/lib/systemd/system/steel.service usr/share/man/man1/steel-run.1.gz usr/share/doc/steel/copyright \
    usr/share/bash-completion/completions/steel usr/share/zsh/site-functions/_steel usr/share/fish/vendor_completions.d/steel.fish; do
    grep -q " ./$f\$" "$tmp/list" || fail "no $f in the package"
done
run dpkg -i /steel.deb >"$tmp/log" 2>&1 || fail "dpkg -i: $(tail -3 "$tmp/log")"
run steel --version | grep -q "^steel $(cat VERSION) " || fail "version"
run steel run -p 'Hello' -n 8 >"$tmp/out" 2>&1 || fail "run: $(tail -1 "$tmp/out")"
[ -e "$root/etc/default/steel" ] || fail "no /etc/default/steel"
if [ ! -e "$root"/usr/lib/*/libcurl.so.4 ]; then
    run steel pull owner/name >"$tmp/out" 2>&1 && fail "pull without libcurl"
    grep -q 'libcurl' "$tmp/out" || fail "pull does not say what it needs: $(cat "$tmp/out")"
fi
run steel serve --port 0 --log-level info >"$tmp/out" 2>&1 &
pid=$!
for i in $(seq 100); do grep -q ready "$tmp/out" && break; sleep 0.1; done
kill $pid 2>/dev/null
wait $pid 2>/dev/null
grep -q ready "$tmp/out" || fail "serve: $(tail -1 "$tmp/out")"
run dpkg -r steel-llm >"$tmp/log" 2>&1 || fail "dpkg -r"
[ -e "$root/usr/bin/steel" ] && fail "the binary is still there"
run dpkg -P steel-llm >/dev/null 2>&1
rm -f "$root/steel.deb"
[ $failures = 0 ] && echo "installed, used, removed"
exit $((failures > 0))
