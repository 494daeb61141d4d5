#!/bin/sh
# The commands as a user meets them: exit codes, what goes to stdout and what to stderr, errors that
# name file and field. Uses a model of a few kilobytes made by tools/tiny_gguf.py.
set -u
B=${1:-build}
steel=$B/steel
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
failures=0
export STEEL_CONFIG= # not the config of whoever runs this

# expect CODE PATTERN COMMAND...: the exit code, and a grep pattern over stdout+stderr
expect() {
    code=$1 pattern=$2
    shift 2
    "$@" >"$tmp/out" 2>"$tmp/err" </dev/null
    rc=$?
    if [ $rc != "$code" ] || ! cat "$tmp/out" "$tmp/err" | grep -q -e "$pattern"; then
        echo "FAIL: $* -> exit $rc (wanted $code, pattern '$pattern')"
        sed 's/^/    /' "$tmp/out" "$tmp/err" | head -10
        failures=$((failures + 1))
    fi
}
one_line_error() { # the last expect printed exactly one line on stderr and nothing on stdout
    if [ "$(wc -l <"$tmp/err")" != 1 ] || [ -s "$tmp/out" ]; then
        echo "FAIL: not one line of error:"; cat "$tmp/err" "$tmp/out" | head -5
        failures=$((failures + 1))
    fi
}

python3 tools/tiny_gguf.py "$tmp/tiny.gguf" || exit 1
head -c 3000 "$tmp/tiny.gguf" >"$tmp/cut.gguf"
printf 'GGUF' >"$tmp/short.gguf"
mkdir "$tmp/empty"

expect 0 'usage: steel' "$steel" --help
expect 2 'usage: steel' "$steel"
expect 2 "unknown command 'frobnicate'" "$steel" frobnicate
expect 0 "^steel $(cat VERSION) (" "$steel" --version
expect 2 "did you mean 'serve'" "$steel" serv
expect 2 'did you mean --temp?' "$steel" run --tmep 1
expect 0 'usage: steel run' "$steel" help run
expect 0 'usage: steel bench serve' "$steel" help bench serve
expect 2 "no command 'frob'" "$steel" help frob
expect 0 'kernels' "$steel" doctor
# a GPU that is asked for and not there: what is so and what to do, by all who open one
if [ ! -e /dev/nvidiactl ] && [ ! -e /dev/dxg ]; then
    case $("$steel" --version) in
    *CUDA*) no_gpu='no NVIDIA driver was found on this machine: install it, or use --device cpu' ;;
    *) no_gpu='this build has no CUDA .* or use --device cpu' ;;
    esac
    for c in 'run -p x' 'bench -p 8 -n 1 -r 1' 'serve --port 0'; do
        expect 1 "$no_gpu" "$steel" $c --device cuda
    done
    expect 0 'no NVIDIA driver was found; models run on the CPU' "$steel" doctor
fi

# as people type it who come from elsewhere
expect 0 '' "$steel" run "$tmp/tiny.gguf" --raw -p x -n 1 --seed -1 -c 0 -t -1
expect 2 "'-2' is not a whole number" "$steel" run --seed -2 -p x
expect 2 "-ngl many: a number of layers, all or auto" "$steel" run "$tmp/tiny.gguf" -ngl many -p x
expect 2 "-ngl 0 is the CPU, and --device is cuda" "$steel" run "$tmp/tiny.gguf" -ngl 0 --device cuda -p x
expect 2 "--gpu-memory x: use a size" "$steel" run "$tmp/tiny.gguf" --gpu-memory x -p x
expect 2 "'--no-mmap': not needed" "$steel" serve --no-mmap
expect 2 "'x' is not on, off or auto" "$steel" serve --flash-attn=x
expect 2 "'70000' is not a whole number" "$steel" serve --flash-attn --port 70000
expect 2 "'70000' is not a whole number" "$steel" serve -fa on --port 70000
# what an answer must fit is looked at before a model is loaded, and named; nothing goes to stdout
printf '{"type": ' >"$tmp/bad.json"
expect 1 "^steel: $tmp/bad.json: not valid JSON" "$steel" run "$tmp/none.gguf" -p x --schema "$tmp/bad.json" && one_line_error
expect 1 'without ) at character 1' "$steel" run -p x --regex '(' && one_line_error
expect 1 'the context holds 1' "$steel" run -p x -c 1 && one_line_error
# a key that is none, a template that is not there: refused, not left out
expect 2 'api-key: the key is empty' "$steel" serve --api-key '' --port 0
expect 1 "^steel: --chat-template: $tmp/none.jinja: No such file" "$steel" serve --chat-template "$tmp/none.jinja" --port 0 && one_line_error
expect 1 "^steel: $tmp/none.pem: No such file" "$steel" serve --ssl-cert-file "$tmp/none.pem" --ssl-key-file "$tmp/none.pem" --port 0 && one_line_error

# a template of one's own, and of another model
printf '%s' '{%- for m in messages %}<|im_start|>user
What is 3 + 4?<|im_end|>
{% endfor %}<|im_start|>assistant
' >"$tmp/sum.jinja"
expect 1 "^steel: --chat-template: $tmp/none.jinja: No such file" "$steel" run "$tmp/none.gguf" -p x --chat-template "$tmp/none.jinja" && one_line_error
expect 1 "^steel: --chat-template: .*none.gguf" "$steel" run -p x --chat-template "$tmp/none.gguf" && one_line_error
expect 2 'no effect with --raw' "$steel" run --raw -p x --chat-template builtin
if "$steel" show builtin --brief >/dev/null 2>&1; then
    expect 0 '3 + 4 = 7' "$steel" run -q --temp 0 -p 'What is 9 + 20?' --chat-template "$tmp/sum.jinja" </dev/null
    expect 0 '9 + 20 = 29' "$steel" run -q --temp 0 -p 'What is 9 + 20?' --chat-template builtin </dev/null
fi
# a prompt that is no text is not cut short
printf 'ab\0cd' >"$tmp/nul"
expect 1 'the prompt is not text: byte 3 is NUL' "$steel" run -f "$tmp/nul" && one_line_error
expect 1 'the prompt is not text: byte 12 is NUL' sh -c "$steel run -p 'what is' <$tmp/nul" && one_line_error
# a conversation is saved whole or not at all: what stood there stays (no file may grow: the disk is full)
printf 'mine\n' >"$tmp/chat.json"
printf 'Hello\n/save %s\n/bye\n' "$tmp/chat.json" | sh -c "trap '' XFSZ; ulimit -f 0; exec $steel run" 2>&1 | cat >"$tmp/full"
if ! grep -q 'chat.json: cannot write' "$tmp/full" || [ "$(cat "$tmp/chat.json")" != mine ] || [ -e "$tmp/chat.json.part" ]; then
    echo "FAIL: /save on a full disk:"; cat "$tmp/full"; cat "$tmp/chat.json"
    failures=$((failures + 1))
fi
# streams that are closed: nothing else gets their numbers
sh -c "exec $steel route --upstream http://127.0.0.1:1 --port 0 <&- >&- 2>&-" &
pid=$!
for i in $(seq 100); do [ -e /proc/$pid/fd/5 ] || sleep 0.1; done
for fd in 0 1 2; do
    is=$(readlink /proc/$pid/fd/$fd)
    [ "$is" = /dev/null ] || { echo "FAIL: closed stream $fd is $is"; failures=$((failures + 1)); }
done
kill $pid

# options from the environment and from the config file; the command line goes first
printf '# mine\nkv-type q3\n[serve]\nport 81\n' >"$tmp/config"
expect 2 'kv-type q3' env STEEL_CONFIG="$tmp/config" "$steel" run "$tmp/tiny.gguf" -p x
expect 0 'usage: steel run' env STEEL_CONFIG="$tmp/config" "$steel" run --help
expect 0 '' env STEEL_CONFIG="$tmp/config" "$steel" run "$tmp/tiny.gguf" --raw -p x -n 1 --kv-type f16
expect 0 '' env STEEL_CONFIG="$tmp/config" STEEL_KV_TYPE=bf16 "$steel" run "$tmp/tiny.gguf" --raw -p x -n 1
printf 'temp warm\n' >"$tmp/config"
expect 2 "config:1: temp: 'warm' is not a number" env STEEL_CONFIG="$tmp/config" "$steel" run "$tmp/tiny.gguf" -p x
printf '[run]\n\nfrob = 1\n' >"$tmp/config"
expect 2 "config:3: unknown option 'frob'" env STEEL_CONFIG="$tmp/config" "$steel" run "$tmp/tiny.gguf" -p x
expect 0 '' env STEEL_CONFIG="$tmp/config" "$steel" show "$tmp/tiny.gguf"
# names that are no option of any command: an error in the file, a warning in the environment
for line in 'api_key secret' 'api-keys secret' 'apikey=secret' '[sevre]
port 1'; do
    printf '# mine\nport 9000\n%s\n' "$line" >"$tmp/config"
    expect 2 "config:[34]: .*did you mean" env STEEL_CONFIG="$tmp/config" "$steel" show "$tmp/tiny.gguf"
    expect 2 "config:[34]: .*did you mean" env STEEL_CONFIG="$tmp/config" "$steel" serve "$tmp/tiny.gguf"
    expect 0 'usage: steel serve' env STEEL_CONFIG="$tmp/config" "$steel" serve --help
done
printf 'max-model-len 64\napi-key x\n[bench serve]\nrequests 1\n' >"$tmp/config"
expect 0 '' env STEEL_CONFIG="$tmp/config" "$steel" show "$tmp/tiny.gguf"
expect 0 'STEEL_API_KEYS is not an option; did you mean api-key?' env STEEL_API_KEYS=secret "$steel" show "$tmp/tiny.gguf"
expect 0 '' env STEEL_API_KEY=secret STEEL_ISA=avx2 "$steel" pull --names
[ -s "$tmp/err" ] && echo "FAIL: a known variable is warned of" && failures=$((failures + 1))
# named pipes are refused, not waited for; a pipe of the shell is read
mkfifo "$tmp/pipe.jinja"
expect 2 "pipe.jinja: it is a named pipe" env STEEL_CONFIG="$tmp/pipe.jinja" "$steel" show "$tmp/tiny.gguf"
expect 1 "pipe.jinja: it is a named pipe" "$steel" serve "$tmp/tiny.gguf" --port 0 --api-key-file "$tmp/pipe.jinja"
expect 1 "pipe.jinja: it is a named pipe" "$steel" serve "$tmp/tiny.gguf" --port 0 --chat-template "$tmp/pipe.jinja"
expect 1 "pipe.jinja: it is a named pipe" "$steel" template "$tmp/pipe.jinja"
expect 1 "pipe.jinja: it is a named pipe" "$steel" run "$tmp/tiny.gguf" -f "$tmp/pipe.jinja"
expect 0 'generated 1 tokens' sh -c "printf x | $steel run $tmp/tiny.gguf --raw -n 1 -f /dev/stdin"
expect 2 "STEEL_THREADS='many'" env STEEL_THREADS=many "$steel" run "$tmp/tiny.gguf" -p x
expect 2 "STEEL_QUIET='perhaps'" env STEEL_QUIET=perhaps "$steel" run "$tmp/tiny.gguf" -p x
for c in run show plan bench logits perplexity tokenize detokenize; do
    expect 0 "usage: steel $c" "$steel" $c --help
    [ -s "$tmp/err" ] && echo "FAIL: $c --help wrote to stderr" && failures=$((failures + 1))
done
expect 2 "unknown option '--frob'" "$steel" run --frob
expect 2 'is not a number in 0..100$' "$steel" run "$tmp/tiny.gguf" -p x --temp hot
expect 2 "ctx-size: '-1' is not a whole number in 0..268435456$" "$steel" run "$tmp/tiny.gguf" -p x --ctx-size -1
expect 2 "predict: '1.5' is not a whole number in -1..268435456" "$steel" run "$tmp/tiny.gguf" -p x -n=1.5
# a value may stand behind = of a short option, too; -ctk is in the help
expect 0 '(q8_0, values q4_0)' "$steel" show tests/golden/qwen3moe --brief -ctk=q8_0 -ctv=q4_0
expect 0 'generated 1 tokens' "$steel" run "$tmp/tiny.gguf" --raw -p=x -n=1 -c=16
expect 2 'quiet takes no value' "$steel" run "$tmp/tiny.gguf" -q=1
expect 2 "unknown option '-x=1'" "$steel" run "$tmp/tiny.gguf" -x=1
for part in "nemotron squared ReLU" "bitnet squared ReGLU" "apertus xIELU" "gpt2 GELU" "phimoe sparse mixer"; do
    expect 0 "^parts .*${part#* }" "$steel" show "tests/golden/${part%% *}" --brief
done
for c in run serve bench show; do
    expect 0 '^  -ctk, --cache-type-k TYPE ' "$steel" $c --help
    expect 0 '^  -ctv, --cache-type-v TYPE ' "$steel" $c --help
done
expect 0 "^  -np, --max-num-seqs N " "$steel" serve --help
expect 2 'chat-format klingon: unknown; one of none, hermes, ' "$steel" run "$tmp/tiny.gguf" -p x --chat-format klingon
for f in hermes gpt_oss; do # of the two, one knows <think>
    "$steel" run demo/steel-demo.gguf 'Hello, who are you?' --temp 0 -q --chat-format $f >"$tmp/$f" 2>/dev/null </dev/null
done
if grep -q '<think>' "$tmp/hermes" || ! grep -q '<think>' "$tmp/gpt_oss"; then
    echo "FAIL: run --chat-format"; failures=$((failures + 1))
fi
# what a folder's model_type says counts, not its class; the message names it
mkdir "$tmp/mamba" && cp tests/golden/qwen3/*.safetensors "$tmp/mamba/"
sed 's/"model_type": "qwen3"/"model_type": "rwkv7"/' tests/golden/qwen3/config.json >"$tmp/mamba/config.json"
expect 1 'model_type "rwkv7" is not supported; Steel runs .*qwen3' "$steel" run "$tmp/mamba" -p x && one_line_error
expect 2 'kv-type q4: use f16, bf16, f32, q8_0, fp8 or q4_0' "$steel" run "$tmp/tiny.gguf" -p x --kv-type q4
expect 2 'cache-type-v q9' "$steel" bench "$tmp/tiny.gguf" -ctk q8_0 -ctv q9
expect 1 'layer 0: keys of 16 values, no multiple of 32: a cache of q8_0' "$steel" run "$tmp/tiny.gguf" -p x -ctk q8_0
expect 1 'layer 0: values of 16 values, no multiple of 32: a cache of fp8' "$steel" run "$tmp/tiny.gguf" -p x -ctv fp8
for t in q8_0 fp8 q4_0; do
    expect 0 '' "$steel" run demo/steel-demo.gguf --raw -p x -n 4 --kv-type $t
    expect 0 "(f16, values $t)" "$steel" show tests/golden/qwen3moe --brief -ctv $t
done
# answers that fit: a model of random weights writes them all the same
printf '{"type":"object","properties":{"n":{"type":"integer","maximum":99}},"required":["n"],"additionalProperties":false}' >"$tmp/s.json"
printf 'root ::= "x" [0-9]+ "y"' >"$tmp/g.gbnf"
expect 0 '"n"' "$steel" run "$tmp/tiny.gguf" -p x -q -n 60 --raw --schema "$tmp/s.json"
expect 0 '^x[0-9]*y$' "$steel" run "$tmp/tiny.gguf" -p x -q -n 60 --raw --grammar "$tmp/g.gbnf"
expect 0 '^ab\{3\}$' "$steel" run "$tmp/tiny.gguf" -p x -q -n 60 --raw --regex 'ab{3}'
expect 0 '^[[:space:]]*{' "$steel" run "$tmp/tiny.gguf" -p x -q -n 60 --raw --json
expect 0 '^ab$' sh -c "printf 'root ::= \"ab\"' | $steel run $tmp/tiny.gguf -p x -q --raw --grammar -"
expect 2 'one of --schema' "$steel" run "$tmp/tiny.gguf" -p x --json --regex a
expect 2 'stdin is read once' "$steel" run "$tmp/tiny.gguf" -f - --schema -
expect 1 'without )' "$steel" run "$tmp/tiny.gguf" -p x --raw --regex '('
expect 1 'nothere' "$steel" run "$tmp/tiny.gguf" -p x --raw --schema "$tmp/nothere"
expect 2 'logit-bias' "$steel" run "$tmp/tiny.gguf" -p x --logit-bias foo

# a prompt: behind the model, with -p, from stdin, and piped text behind any of these
fails() { echo "FAIL: $*"; failures=$((failures + 1)); }
ask() { "$steel" run "$@" --temp 0 --think off -q 2>"$tmp/err"; }
four='2 + 2 = 4.'
[ "$(ask builtin 'What is 2 + 2?' </dev/null)" = "$four" ] || fails "run MODEL PROMPT: $(cat "$tmp/err")"
[ "$(ask builtin What is 2 + '2?' </dev/null)" = "$four" ] || fails "run MODEL WORDS...: $(cat "$tmp/err")"
[ "$(ask -m builtin 'What is 2 + 2?' </dev/null)" = "$four" ] || fails "run -m MODEL PROMPT: $(cat "$tmp/err")"
[ "$(echo 'What is 2 + 2?' | ask -p -)" = "$four" ] || fails "-p -"
[ "$(echo 'What is 2 + 2?' | ask -)" = "$four" ] || fails "run -"
count() { "$steel" run "$tmp/tiny.gguf" --raw -n 0 "$@" 2>&1 | sed -n 's/.*prompt \([0-9]*\) tokens.*/\1/p'; }
alone=$(count -p 'hello world' </dev/null)
both=$(printf 'hello' | count -p 'hello world')
whole=$(printf 'hello world\n\nhello' | count -p -)
[ "$both" = "$whole" ] && [ "$both" -gt "$alone" ] || fails "stdin behind -p: $alone, $both, $whole tokens"
[ "$(: | count -p 'hello world')" = "$alone" ] || fails "an empty pipe changes the prompt"
(sleep 4 | "$steel" run "$tmp/tiny.gguf" --raw -n 0 -p hello) >"$tmp/out" 2>"$tmp/err" || fails "a pipe that says nothing"
grep -q 'from stdin' "$tmp/err" || fails "nobody is told what is waited for"
expect 2 "unexpected argument 'b': the prompt is given with -p" "$steel" run "$tmp/tiny.gguf" -p a b
expect 2 'not both' "$steel" run "$tmp/tiny.gguf" -p a -f x
expect 1 'steel run -p' "$steel" run 'What is this?'
# -m wherever there is a model, and STEEL_MODEL; what stands on the command line goes first
expect 0 'active per token' "$steel" show -m "$tmp/tiny.gguf"
expect 0 'active per token' env STEEL_MODEL="$tmp/nowhere.gguf" "$steel" show "$tmp/tiny.gguf"
expect 1 'nowhere.gguf' env STEEL_MODEL="$tmp/nowhere.gguf" "$steel" show
expect 2 "unexpected argument 'x': -m names the model" "$steel" show -m "$tmp/tiny.gguf" x
expect 2 "unexpected argument 'x': -m names the model" "$steel" serve -m "$tmp/tiny.gguf" x
expect 0 '^[0-9 ]*$' "$steel" tokenize -m "$tmp/tiny.gguf" --ids hello
expect 0 'hello' "$steel" detokenize -m "$tmp/tiny.gguf" $("$steel" tokenize "$tmp/tiny.gguf" --ids hello)
expect 2 'name the model' "$steel" tokenize
expect 0 'tg2' "$steel" bench -m "$tmp/tiny.gguf" -p 0 -n 2 -r 1
expect 0 'hello' "$steel" template -m builtin -p hello
expect 0 accepted sh -c "echo '{\"schema\": {}, \"tests\": []}' | $steel constrain -m builtin --jsonl"
for c in run serve show plan bench perplexity tokenize detokenize template constrain logits; do
    "$steel" $c --help | grep -q -e '-m, --model' || fails "$c has no -m"
done

# nothing is overwritten: the source never, other files with --force alone
cp demo/steel-demo.gguf "$tmp/in.gguf"
cp "$tmp/in.gguf" "$tmp/other.gguf"
ln -s in.gguf "$tmp/link.gguf"
q="--allow-requantize -t 2"
expect 1 'is part of the input' "$steel" quantize "$tmp/in.gguf" "$tmp/in.gguf" Q8_0 $q --force && one_line_error
expect 1 'is part of the input' "$steel" quantize "$tmp/in.gguf" "$tmp/link.gguf" Q8_0 $q --force
expect 1 'exists already; --force' "$steel" quantize "$tmp/in.gguf" "$tmp/other.gguf" Q8_0 $q && one_line_error
expect 1 'not a regular file' "$steel" quantize "$tmp/in.gguf" "$tmp" Q8_0 $q --force
expect 1 'not a regular file' "$steel" quantize "$tmp/in.gguf" /dev/null Q8_0 $q --force
cmp -s "$tmp/in.gguf" demo/steel-demo.gguf && cmp -s "$tmp/other.gguf" demo/steel-demo.gguf || fails "a file was overwritten"
expect 0 'other.gguf' "$steel" quantize "$tmp/in.gguf" "$tmp/other.gguf" Q8_0 $q --force
cmp -s "$tmp/other.gguf" demo/steel-demo.gguf && fails "--force does not replace"
mkdir "$tmp/folder" && cp demo/steel-demo/* "$tmp/folder/"
expect 1 'is part of the input' "$steel" convert "$tmp/folder" "$tmp/folder/model.safetensors" --force
expect 1 'exists already; --force' "$steel" convert "$tmp/folder" "$tmp/other.gguf"
expect 0 '' "$steel" convert "$tmp/folder" "$tmp/folder/model.gguf"
cmp -s "$tmp/folder/model.safetensors" demo/steel-demo/model.safetensors || fails "a source was overwritten"

# thinking does not mix with an answer that goes elsewhere
printf 'What is 17 + 25?\n/bye\n' | "$steel" run --temp 0 >"$tmp/out" 2>"$tmp/err"
[ "$(grep -c . "$tmp/out")" = 1 ] && grep -q '42' "$tmp/out" && grep -q 'carry' "$tmp/err" || fails "thinking in a piped chat is on stdout: $(cat "$tmp/out")"

# output that does not arrive is a failure, whatever the command
for c in '--help' '--version' 'help run' 'completion bash' 'doctor' 'pull --names' 'help --man run'; do
    expect 1 'output could not be written' sh -c "$steel $c >/dev/full"
done
expect 1 'output could not be written' sh -c "$steel tokenize $tmp/tiny.gguf hello >/dev/full"
expect 1 'output could not be written' sh -c "$steel bench $tmp/tiny.gguf -p 8 -n 2 -r 1 >/dev/full"
expect 1 'output could not be written' sh -c "printf 'Hello\n' | $steel run >/dev/full"
expect 1 'output could not be written' sh -c "$steel show $tmp/tiny.gguf >/dev/full" && one_line_error
expect 1 'output could not be written' sh -c "$steel plan $tmp/tiny.gguf --tp 2 >/dev/full" && one_line_error
expect 1 'output could not be written' sh -c "$steel plan $tmp/tiny.gguf --tp 2 --json >/dev/full" && one_line_error
expect 1 'output could not be written' sh -c "$steel run $tmp/tiny.gguf -p x -n 2 --raw >/dev/full"

expect 1 'nowhere.gguf' "$steel" run "$tmp/nowhere.gguf" -p x && one_line_error
expect 1 'short.gguf' "$steel" show "$tmp/short.gguf" && one_line_error
expect 1 'short.gguf' "$steel" plan "$tmp/short.gguf" --tp 2 && one_line_error
expect 1 'cut.gguf' "$steel" run "$tmp/cut.gguf" -p x && one_line_error
expect 1 'config.json' "$steel" run "$tmp/empty" -p x && one_line_error

expect 0 'active per token' "$steel" show "$tmp/tiny.gguf"
expect 0 'blk.0.attn_q.weight' "$steel" show "$tmp/tiny.gguf"
# the parts that a family's files have, as folder and as GGUF
while read -r family parts; do
    expect 0 "^parts .*$parts" "$steel" show --brief "tests/golden/$family"
    expect 0 '' "$steel" convert "tests/golden/$family" "$tmp/$family.gguf"
    case $family in llama3-rope | gemma4) parts="RoPE factors by dimension" ;; esac # all that a GGUF says of it
    expect 0 "^parts .*$parts" "$steel" show --brief "$tmp/$family.gguf"
done <<'EOF'
llama3-rope llama3 RoPE scaling x8 beyond 64 tokens$
gpt_oss biases, YaRN x32 beyond 64 tokens, clamped SwiGLU
phi3 RoPE of 12 dims, long RoPE beyond 64 tokens$
ministral3 YaRN x16 beyond 64 tokens$
deepseek_v3 YaRN x40 beyond 64 tokens, mscale of scores 1.36889, .*, biases of the choice, shared expert 32 wide, 1 dense layer$
gemma3 linear RoPE scaling x8, RoPE base 1e+06 (10000 in windows), GeGLU
gemma4 proportional RoPE, RoPE base 1e+06 (10000 in windows)
gemma4_moe dense beside experts$
qwen3_5_moe shared expert 32 wide with a gate$
qwen3_next shared expert 32 wide with a gate$
glm4_moe biases of the choice, shared expert 32 wide, 1 dense layer$
EOF
# a plan for ranks needs no mpirun; what it says is checked in test_plan.c and test_plan.py
expect 0 '2 ranks on [CG]PUs: --tp 2 --pp 1' "$steel" plan "$tmp/tiny.gguf" --tp 2
expect 0 'bound by' "$steel" plan "$tmp/tiny.gguf" --tp 2 --link 12us:3GB/s
expect 1 '--pp 3: the model has 2 layers' "$steel" plan "$tmp/tiny.gguf" --pp 3 && one_line_error
expect 1 'are 4096 ranks; 64 is the most' "$steel" plan "$tmp/tiny.gguf" --tp 64 --pp 64 && one_line_error
expect 1 'does not fit: rank 0 needs' "$steel" plan "$tmp/tiny.gguf" --memory 1M
expect 2 'wifi: no link: nvlink, pcie5' "$steel" plan "$tmp/tiny.gguf" --link wifi
expect 2 'no link' "$steel" plan "$tmp/tiny.gguf" --link nvlink,
expect 2 'no device: h200' "$steel" plan "$tmp/tiny.gguf" --gpu tpu
expect 2 'use a size such as 80G' "$steel" plan "$tmp/tiny.gguf" --memory lots
expect 2 'seqs 1,x' "$steel" plan "$tmp/tiny.gguf" --seqs 1,x
expect 0 'tok/s' "$steel" run "$tmp/tiny.gguf" --raw -p 'hello world' -n 8 --seed 1
cp "$tmp/out" "$tmp/first"
expect 0 'tok/s' "$steel" run "$tmp/tiny.gguf" --raw -p 'hello world' -n 8 --seed 1 -t 1
cmp -s "$tmp/out" "$tmp/first" || { echo "FAIL: same seed, another text"; failures=$((failures + 1)); }
expect 0 '' "$steel" run "$tmp/tiny.gguf" --raw -p 'hello world' -n 8 --seed 2 -q
[ -s "$tmp/err" ] && echo "FAIL: -q is not quiet" && failures=$((failures + 1))
echo 'hello world' | "$steel" run "$tmp/tiny.gguf" --raw - -n 4 --temp 0 -q >"$tmp/a" || failures=$((failures + 1))
echo 'hello world' >"$tmp/prompt.txt"
"$steel" run "$tmp/tiny.gguf" --raw -f "$tmp/prompt.txt" -n 4 --temp 0 -q >"$tmp/b" || failures=$((failures + 1))
cmp -s "$tmp/a" "$tmp/b" || { echo "FAIL: stdin and file differ"; failures=$((failures + 1)); }
expect 1 'context' "$steel" run "$tmp/tiny.gguf" --raw -p 'hello hello hello hello hello' -c 3 -n 4
one_line_error
# the whole context, then an error that says so; -n 0 reads the prompt and says nothing
expect 1 'the context of 64 tokens is full (prompt 2, generated 62); see -c' \
    "$steel" run --raw -p hello -c 64 --ignore-eos --temp 0
expect 0 'prompt 2 tokens' "$steel" run --raw -p hello -n 0
[ -s "$tmp/out" ] && echo "FAIL: -n 0 generates" && failures=$((failures + 1))
# a stop text ends the answer and does not show
whole=$("$steel" run -p 'What is 2 + 2?' --think off --temp 0 -q)
[ "$whole" = '2 + 2 = 4.' ] && [ "$("$steel" run -p 'What is 2 + 2?' --think off --temp 0 -q --stop ' =')" = '2 + 2' ] ||
    { echo "FAIL: --stop: '$whole'"; failures=$((failures + 1)); }

expect 0 '"test": "pp16"' "$steel" bench "$tmp/tiny.gguf" -p 16 -n 4 --batch 1,3 -r 1 --json
grep -q '"test": "tg4 x3"' "$tmp/out" || { echo "FAIL: no batched bench"; failures=$((failures + 1)); }
# What --deterministic costs: measured both ways where it changes anything (attention on AMX tiles),
# else one line, and the logits are those of a run with the flag.
if grep -q amx_int8 /proc/cpuinfo && [ -z "${STEEL_ISA:-}" ] && ! grep -q '"invariance": "always"' "$tmp/out"; then
    invariance=chosen line='deterministic costs -*[0-9.]* % to'
else
    invariance=always line='deterministic costs nothing'
fi
expect 0 "\"invariance\": \"$invariance\".*\"deterministic_cost\"" "$steel" bench "$tmp/tiny.gguf" -p 16 -n 4 -r 1 --json
grep '"deterministic": true' "$tmp/out" | grep -o 'test[^,]*\|hash.*' >"$tmp/plain"
expect 0 "$line" "$steel" bench "$tmp/tiny.gguf" -p 16 -n 4 -r 2
expect 0 '"deterministic": true' "$steel" bench "$tmp/tiny.gguf" -p 16 -n 4 -r 1 --json --deterministic
grep '"deterministic": true' "$tmp/out" | grep -o 'test[^,]*\|hash.*' | cmp -s - "$tmp/plain" && [ -s "$tmp/plain" ] ||
    { echo "FAIL: --deterministic changes what was called deterministic"; failures=$((failures + 1)); }
[ "$(STEEL_ISA=ref "$steel" bench "$tmp/tiny.gguf" -p 16 -n 4 -r 1 | grep -c 'deterministic costs nothing')" = 1 ] ||
    { echo "FAIL: the reference backend is deterministic"; failures=$((failures + 1)); }
expect 0 'experts' "$steel" bench "$tmp/tiny.gguf" -p 16 -n 4 -r 1 --profile

# sampling as the model's author advises it, in a folder and in a GGUF file, unless a flag says more
advice() { # MODEL FLAGS... -> the values a chat starts with
    echo /set | "$steel" run "$@" 2>/dev/null | head -4 | tr '\n' ' '
}
for m in demo/steel-demo demo/steel-demo.gguf; do
    [ "$(advice $m)" = 'temp = 0.5 top_k = 20 top_p = 0.95 min_p = 0.05 ' ] &&
        [ "$(advice $m --temp 0 --top-k 7)" = 'temp = 0 top_k = 7 top_p = 0.95 min_p = 0.05 ' ] ||
        { echo "FAIL: $m: sampling is $(advice $m)"; failures=$((failures + 1)); }
done

# advice that makes no sense is passed over
mkdir "$tmp/odd"
for f in demo/steel-demo/*; do ln -s "$PWD/$f" "$tmp/odd/"; done
rm "$tmp/odd/generation_config.json"
echo '{"temperature": -1, "top_k": "many", "top_p": 7, "min_p": null}' >"$tmp/odd/generation_config.json"
[ "$(advice "$tmp/odd")" = 'temp = 0.8 top_k = 40 top_p = 0.95 min_p = 0.05 ' ] ||
    { echo "FAIL: odd advice gives $(advice "$tmp/odd")"; failures=$((failures + 1)); }
expect 1 'cuda: --no-repack is for the CPU' "$steel" run --device cuda --no-repack -p hi
expect 1 'vulkan: \(--deterministic is not offered\|this build has no Vulkan\)' "$steel" run --device vulkan --deterministic -p hi
expect 1 'unknown device' "$steel" run --device gpu -p hi
expect 2 'gpu-memory-utilization' "$steel" run --gpu-memory-utilization 7 -p hi

# Ctrl-C ends with 130 and whole lines
"$steel" run "$tmp/tiny.gguf" --raw -p 'hello' -n 100000 -c 200000 --ignore-eos >"$tmp/out" 2>"$tmp/err" &
pid=$!
sleep 1
kill -INT $pid
wait $pid
rc=$?
[ $rc = 130 ] || { echo "FAIL: Ctrl-C gave exit $rc"; failures=$((failures + 1)); }

[ $failures = 0 ] && echo "all good"
exit $((failures > 0))
