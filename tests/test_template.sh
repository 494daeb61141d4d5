#!/bin/sh
# steel template: one render, --jsonl with names, clock, errors, a Hugging Face folder, usage.
steel=$1/steel
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
fail() { echo "FAIL: $*"; exit 1; }
same() { [ "$2" = "$3" ] || fail "$1: want <$2> got <$3>"; }

printf '%s' '{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ bos_token }}{{ "é" }}' >"$tmp/a.jinja"
same 'stdin context' '<user>hié' "$(echo '{"messages":[{"role":"user","content":"hi"}]}' | "$steel" template "$tmp/a.jinja")"
same '-p' '<user>yoé' "$("$steel" template "$tmp/a.jinja" -p yo)"
same '--print' "$(cat "$tmp/a.jinja")" "$("$steel" template "$tmp/a.jinja" --print)"

printf '%s' '{{ strftime_now("%Y %H:%M") }}' >"$tmp/clock.jinja"
same '--now' '2026 12:30' "$("$steel" template "$tmp/clock.jinja" --now '2026-07-26 12:30:00' </dev/null)"

printf '%s\n' '{"template":"a","context":{"messages":[{"role":"x","content":"\"1\n"}]}}' \
    '{"template":"clock.jinja","context":{},"now":"2001-02-03 04:05:06"}' \
    '{"template":"nope","context":{}}' '' 'not json' '{"context":{}}' \
    "{\"template\":\"$tmp/a.jinja\",\"context\":{\"messages\":3}}" >"$tmp/in.jsonl"
"$steel" template --jsonl --templates "$tmp" <"$tmp/in.jsonl" >"$tmp/out.jsonl" || fail 'jsonl exit code'
same 'lines' 6 "$(wc -l <"$tmp/out.jsonl" | tr -d ' ')"
same 'line 1' '{"output": "<x>\"1\né"}' "$(sed -n 1p "$tmp/out.jsonl")"
same 'line 2' '{"output": "2001 04:05"}' "$(sed -n 2p "$tmp/out.jsonl")"
for n in 3 4 5 6; do
    sed -n ${n}p "$tmp/out.jsonl" | grep -q '^{"error": ".' || fail "line $n is not an error"
done
sed -n 6p "$tmp/out.jsonl" | grep -q 'line 1: .*not iterable' || fail 'the error names the line'

mkdir "$tmp/hf"
echo '{"chat_template":[{"name":"tool_use","template":"T"},{"name":"default","template":"{{ bos_token }}D{{ eos_token }}"}],"bos_token":{"content":"<s>"},"eos_token":"</s>"}' >"$tmp/hf/tokenizer_config.json"
same 'HF folder' '<s>D</s>' "$("$steel" template "$tmp/hf" </dev/null)"
printf 'J' >"$tmp/hf/chat_template.jinja"
same 'chat_template.jinja wins' 'J' "$("$steel" template "$tmp/hf" </dev/null)"

echo '{{ x.y }}' >"$tmp/bad.jinja"
"$steel" template "$tmp/bad.jinja" </dev/null 2>"$tmp/err" && fail 'a failing render exits 0'
grep -q "line 1: 'x' is undefined" "$tmp/err" || fail "message: $(cat "$tmp/err")"
echo '[]' | "$steel" template "$tmp/a.jinja" 2>/dev/null && fail 'context that is no object'
"$steel" template "$tmp/none.jinja" </dev/null 2>/dev/null && fail 'missing file'
"$steel" template </dev/null 2>/dev/null
[ $? = 2 ] || fail 'usage exit code'
echo ok
