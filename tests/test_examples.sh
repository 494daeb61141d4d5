#!/bin/sh
# The example programs run, and their answers are those of `steel run`.
B=${1:-build}
M=$(mktemp /tmp/steel-toy-XXXXXX.gguf)
trap 'rm -f "$M"' EXIT
"$B/tests/toy_gguf" "$M" || exit 1
out=$("$B/examples/complete" "$M" hello 'and so on' hello) || exit 1
[ "$(echo "$out" | wc -l)" -ge 3 ] || exit 1
want=hello$("$B/steel" run "$M" --raw -p hello -n 40 --temp 0 -q) || exit 1
echo "$out" | grep -qxF "$want" || { echo "wanted: $want"; echo "got: $out"; exit 1; }
"$B/examples/complete" /nonexistent x && exit 1
"$B/examples/complete" && exit 1
exit 0
