#!/bin/sh
# clang-tidy (.clang-tidy) over C files, as many at a time as there are cores. usage: tidy.sh [all | BASE]
# By default over what differs from BASE, the newest commit in common with origin/main: each C file, and for each header
# one C file that includes it. Over all files where no such commit is known, or where it is HEAD itself.
# Files for one instruction set and those that need generated headers or MPI are left out.
base=${1:-$(git merge-base HEAD origin/main 2>/dev/null)}
all=$(find src -name '*.c' | grep -vE '_(avx2|avx512|vnni|amx)\.c$|/web\.c$|_mpi\.c$' | sort)
files=
if [ "$base" = all ] || [ -z "$base" ] || [ "$(git rev-parse "$base")" = "$(git rev-parse HEAD)" ]; then
    files=$all
else
    for f in $(git diff --name-only --diff-filter=d "$base" -- src include); do
        case $f in
        *.c) files="$files$(echo "$all" | grep -Fx "$f")
" ;;
        *.h) files="$files$(grep -lE "#include \"(${f#src/}|${f#include/}|${f##*/})\"" $all | head -n 1)
" ;;
        esac
    done
    files=$(echo "$files" | sort -u | grep .)
fi
echo "clang-tidy: $(echo $files | wc -w) files"
[ -z "$files" ] || echo "$files" | xargs -P "$(nproc)" -n 2 sh -c \
    'clang-tidy --quiet "$@" -- -std=gnu17 -D_GNU_SOURCE -Isrc -Iinclude 2>/dev/null' tidy
