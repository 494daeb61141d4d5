#!/bin/sh
# The example programs run, and their answers are those of `steel run`.
B=${1:-build}
M=$(mktemp /tmp/steel-toy-XXXXXX.gguf)
trap 'rm -f "$M" "$M.err"' EXIT
"$B/tests/toy_gguf" "$M" || exit 1
out=$("$B/examples/complete" "$M" hello 'and so on' hello) || exit 1
[ "$(echo "$out" | wc -l)" -ge 3 ] || exit 1
want=hello$("$B/steel" run "$M" --raw -p hello -n 40 --temp 0 -q) || exit 1
echo "$out" | grep -qxF "$want" || { echo "wanted: $want"; echo "got: $out"; exit 1; }
"$B/examples/complete" /nonexistent x && exit 1
"$B/examples/complete" && exit 1
# A question, the tool it needs, the answer; and one that needs none.
out=$("$B/examples/chat" demo/steel-demo.gguf 'What is the weather in Paris?' 2>"$M.err") || exit 1
want='[get_weather {"city": "Paris"}]
The weather in Paris: 21 degrees, sunny.'
[ "$out" = "$want" ] || { echo "wanted: $want"; echo "got: $out"; exit 1; }
grep -q 'get_weather' "$M.err" || { echo "no thinking on stderr"; exit 1; }
out=$("$B/examples/chat" "" 'Hello!' 2>/dev/null) || exit 1
case $out in *get_weather*) echo "a tool for a greeting: $out"; exit 1 ;; esac
"$B/examples/chat" "$M" && exit 1
"$B/examples/chat" /nonexistent x && exit 1
exit 0
