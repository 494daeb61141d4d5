#!/bin/sh
# Drives `steel serve` with real clients: the OpenAI, Agents, Vercel AI, LangChain, Instructor, Anthropic and ollama
# SDKs, and coding agents. Needs node 20 and npm; the packages are pinned in tests/clients/package-lock.json. The web page: test_page.sh.
B=${1:-build}
command -v node >/dev/null && command -v npm >/dev/null || { echo "no node and npm here"; exit 77; }
cd "$(dirname "$0")/clients" || exit 1
sh install.sh || { echo "npm cannot install the pinned packages here"; exit 77; }
# 2.1 GB: make test-all installs them, and where they are installed they are tested.
[ -z "$STEEL_TEST_AGENTS" ] || sh install.sh agents || echo "npm cannot install the pinned agents here"
tests=$(ls ./*.test.mjs | grep -v '^./page-')
# On further emulated CPUs (tests/size.h) only the APIs' own SDKs: the others differ in what they send, not in kernels.
[ "$TEST_SMALL" != kernels ] || tests=$(ls ./openai.* ./anthropic.* ./ollama.* ./embeddings.* ./pictures.*)
STEEL=$B/steel node --test --test-concurrency=1 $tests
