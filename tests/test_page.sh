#!/bin/sh
# The web page in a real Chromium (tests/clients/page-*.test.mjs): conversations, rendering, hostile text, accessibility.
# Needs Chromium, node 20 and npm (`make deps`); the packages are pinned in tests/clients/package-lock.json.
# STEEL_SCREENSHOTS=1 takes the pictures of docs/img anew.
B=${1:-build}
for tool in node npm; do
    command -v $tool >/dev/null || { echo "skipped: page: no $tool here"; exit 77; }
done
[ -x /usr/bin/chromium ] || [ -x /usr/bin/google-chrome ] || { echo "skipped: page: no Chromium here"; exit 77; }
cd "$(dirname "$0")/clients" || exit 1
sh install.sh || { echo "skipped: page: npm cannot install the pinned packages here"; exit 77; }
STEEL=$B/steel node --test --test-concurrency=1 --test-reporter=spec ./page-*.test.mjs
