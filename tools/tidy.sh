#!/bin/sh
# clang-tidy (.clang-tidy) over C files, as many at a time as there are cores. usage: tidy.sh [all | BASE]
# By default over what differs from BASE, the newest commit in common with origin/main: each C file, and for each header
# one C file that includes it. Where no such commit is known, or where it is HEAD itself (CI): over all files, with the
# analyzer's paths limited to NODES per function, and in full over what the last RECENT commits changed. all: in full over all.
# Files for one instruction set and those that need generated headers or MPI are left out.
NODES=20000 RECENT=5
base=${1:-$(git merge-base HEAD origin/main 2>/dev/null)}
all=$(find src -name '*.c' | grep -vE '_(avx2|avx512|vnni|amx|neon|dotprod|i8mm|sve)\.c$|/web\.c$|/vulkan/pipeline\.c$|_mpi\.c$' | sort)

changed() { # BASE
    for f in $(git diff --name-only --diff-filter=d "$1" -- src include); do
        case $f in
        *.c) echo "$all" | grep -Fx "$f" ;;
        *.h) grep -lE "#include \"(${f#src/}|${f#include/}|${f##*/})\"" $all | head -n 1 ;;
        esac
    done | sort -u | grep .
}

check() { # FILES [OPTIONS]
    files=$1
    shift
    echo "clang-tidy: $(echo $files | wc -w) files${1:+, $NODES nodes a function}"
    [ -z "$files" ] || echo "$files" | xargs -P "$(nproc)" -n 2 sh -c \
        'options=$1; shift; clang-tidy --quiet $options "$@" -- -std=gnu17 -D_GNU_SOURCE -Isrc -Iinclude 2>/dev/null' tidy "$*"
}

if [ "$base" = all ]; then
    check "$all"
elif [ -z "$base" ] || [ "$(git rev-parse "$base")" = "$(git rev-parse HEAD)" ]; then
    recent=$(git rev-parse -q --verify "HEAD~$RECENT") && full=$(changed "$recent")
    check "$all" --extra-arg=-Xclang --extra-arg=-analyzer-config --extra-arg=-Xclang --extra-arg=max-nodes=$NODES && check "$full"
else
    check "$(changed "$base")"
fi
