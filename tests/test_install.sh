#!/bin/sh
# What `make install` leaves: a program, a library that a C program finds through pkg-config, man pages that man reads
# without a warning, completions that real shells take. `make uninstall` takes all of it away.
set -u
B=${1:-build}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
failures=0
fail() { echo "FAIL: $*"; failures=$((failures + 1)); }

if nm -u "$B/steel" | grep -q '__asan_\|__tsan_'; then
    echo "skipped: install: a build with sanitizers is not installed"
    exit 77
fi
# Where something is missing, plain make says so and installs nothing.
mkdir "$tmp/bare" && ln -s "$(command -v sh)" "$tmp/bare/sh"
for p in sudo apt-get; do
    printf '#!/bin/sh\ntouch %s/called\n' "$tmp" >"$tmp/bare/$p" && chmod +x "$tmp/bare/$p"
done
PATH=$tmp/bare sh tools/deps.sh check >"$tmp/out" 2>&1 && fail "deps.sh check finds gcc where there is none"
grep -q 'missing:.* gcc' "$tmp/out" && grep -q 'make deps' "$tmp/out" || fail "deps.sh check: $(cat "$tmp/out")"
[ -e "$tmp/called" ] && fail "deps.sh check installs packages"
grep -n sudo Makefile | grep -v echo && fail "the Makefile runs sudo"
opts="B=$B"
grep -qs without "$B/cuda" && opts="$opts CUDA=0"
make -s $opts PREFIX="$tmp/usr" LIBDIR="$tmp/usr/lib" install >"$tmp/log" 2>&1 || { cat "$tmp/log"; exit 1; }
bin=$tmp/usr/bin/steel

[ "$("$bin" --version)" = "$("$B/steel" --version)" ] || fail "version of the installed binary"

# A program outside the tree: nothing but the installed files.
if command -v pkg-config >/dev/null; then
    export PKG_CONFIG_PATH="$tmp/usr/lib/pkgconfig"
    mkdir "$tmp/app" && cp examples/complete.c "$tmp/app/"
    cc=${CC:-gcc}
    (cd "$tmp/app" && $cc -o shared complete.c $(pkg-config --cflags --libs steel)) || fail "does not link"
    (cd "$tmp/app" && $cc -o static complete.c $(pkg-config --cflags steel) "$tmp/usr/lib/libsteel.a" \
        $(pkg-config --static --libs steel | sed 's/-lsteel//')) || fail "does not link statically"
    for kind in shared static; do
        LD_LIBRARY_PATH=$tmp/usr/lib "$tmp/app/$kind" builtin "Hello" >"$tmp/out" 2>&1 || fail "$kind program: $(tail -1 "$tmp/out")"
        [ -s "$tmp/out" ] || fail "$kind program says nothing"
    done
    [ "$(pkg-config --modversion steel)" = "$(cat VERSION)" ] || fail "version in steel.pc"
else
    echo "skipped: pkg-config: not installed"
fi
# Only the names of steel.h are visible, with their version.
nm -D --defined-only "$tmp/usr/lib/libsteel.so" | awk '{ print $3 }' | grep -v '^steel_.*@@STEEL_0$' | grep -v '^STEEL_0$' | head -3 >"$tmp/extra"
[ -s "$tmp/extra" ] && fail "other names are visible: $(cat "$tmp/extra")"
for f in $(sed -n 's/^[a-z].*[ *]\(steel_[a-z_]*\)(.*/\1/p' include/steel.h); do
    nm -D --defined-only "$tmp/usr/lib/libsteel.so" | grep -q " $f@@STEEL_0" || fail "$f is not in libsteel.so"
done

if command -v man >/dev/null && command -v groff >/dev/null; then
    n=0
    for page in "$tmp"/usr/share/man/man1/*.1; do
        LC_ALL=C.UTF-8 MANWIDTH=80 man --warnings -E UTF-8 -l "$page" >"$tmp/page" 2>"$tmp/err" || fail "man $page"
        [ -s "$tmp/err" ] && fail "man $(basename "$page"): $(head -1 "$tmp/err")"
        grep -q '^NAME' "$tmp/page" || fail "$(basename "$page") has no NAME"
        n=$((n + 1))
    done
    [ $n -ge 15 ] || fail "only $n man pages"
    grep -q -e '--temp' "$tmp/usr/share/man/man1/steel-run.1" && fail "dashes are not escaped"
else
    echo "skipped: man pages: man or groff is not installed"
fi

# Completions, asked as the shells ask.
bash -c '. "$1"; COMP_WORDS=(steel run --te); COMP_CWORD=2; _steel; echo "${COMPREPLY[@]}"
         COMP_WORDS=(steel se); COMP_CWORD=1; _steel; echo "${COMPREPLY[@]}"
         COMP_WORDS=(steel bench serve --conc); COMP_CWORD=3; _steel; echo "${COMPREPLY[@]}"' - \
    "$tmp/usr/share/bash-completion/completions/steel" >"$tmp/out" 2>&1
[ "$(cat "$tmp/out")" = "--temp
serve
--concurrency" ] || fail "bash: $(cat "$tmp/out")"
if command -v fish >/dev/null; then
    HOME=$tmp fish -c "source $tmp/usr/share/fish/vendor_completions.d/steel.fish; complete -C 'steel run --te'; complete -C 'steel se'" >"$tmp/out" 2>&1
    grep -q '^--temp' "$tmp/out" && grep -q '^serve' "$tmp/out" || fail "fish: $(head -3 "$tmp/out")"
else
    echo "skipped: fish: not installed"
fi
if command -v zsh >/dev/null; then
    HOME=$tmp zsh -fc "fpath=($tmp/usr/share/zsh/site-functions \$fpath); autoload -Uz compinit && compinit -u -d $tmp/dump
        [ \"\$_comps[steel]\" = _steel ] && autoload +X _steel && echo found" >"$tmp/out" 2>&1
    grep -q found "$tmp/out" || fail "zsh: $(head -3 "$tmp/out")"
    zsh -n "$tmp/usr/share/zsh/site-functions/_steel" || fail "zsh: syntax"
else
    echo "skipped: zsh: not installed"
fi
grep -q "ExecStart=$tmp/usr/bin/steel serve" "$tmp/usr/lib/systemd/system/steel.service" || fail "systemd unit"
if command -v systemd-analyze >/dev/null && systemd-analyze security --help 2>/dev/null | grep -q offline; then
    systemd-analyze verify "$tmp/usr/lib/systemd/system/steel.service" 2>&1 | grep steel.service | grep -v "Command 'man" && fail "the unit has errors"
    systemd-analyze security --offline=yes --threshold=25 "$tmp/usr/lib/systemd/system/steel.service" >"$tmp/out" 2>&1 ||
        fail "the unit is exposed: $(tail -1 "$tmp/out")"
else
    echo "skipped: systemd unit: no systemd-analyze that works offline"
fi

make -s $opts PREFIX="$tmp/usr" LIBDIR="$tmp/usr/lib" uninstall >/dev/null 2>&1
left=$(find "$tmp/usr" -type f -o -type l)
[ -z "$left" ] || fail "uninstall leaves $left"
[ $failures = 0 ] && echo "installed, used, removed"
exit $((failures > 0))
