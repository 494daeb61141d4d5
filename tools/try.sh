#!/bin/sh
# `make try`: shows the program working on this machine, in under a minute, with no download.
steel=$1
say() { printf '\n\033[1m$ %s\033[0m\n' "$*"; }
[ -t 1 ] || say() { printf '\n$ %s\n' "$*"; }
model=
if ! "$steel" show builtin --brief >/dev/null 2>&1; then
    model=build/tiny.gguf
    python3 tools/tiny_gguf.py $model || exit 1
    echo "no built-in model in this build: a random one will talk nonsense"
fi
say steel show ${model:-builtin} --brief
"$steel" show ${model:-builtin} --brief || exit 1
if [ -z "$model" ]; then
    for prompt in 'Hello! Who are you?' 'What is 17 + 25?' 'Tell me a short story.'; do
        say "steel run -p '$prompt'"
        "$steel" run -p "$prompt" --temp 0 -n 160 || exit 1
    done
else
    say "steel run $model --raw -p 'hello world' -n 24"
    "$steel" run $model --raw -p 'hello world' -n 24 --seed 1 || exit 1
fi
say steel bench ${model:-builtin} -p 128 -n 32 -r 2
"$steel" bench ${model:-builtin} -p 128 -n 32 -r 2
echo
echo "Now: '$steel run' to chat, '$steel serve' for an OpenAI-compatible server, '$steel --help' for the rest."
