#!/bin/sh
# Installs the pinned packages, once: two tests that need them may run at the same time.
cd "$(dirname "$0")" || exit 1
exec 9<package-lock.json
flock 9 2>/dev/null
whole=node_modules/.package-lock.json # written last
[ -e $whole ] && [ ! package-lock.json -nt $whole ] && exit 0
npm ci --no-audit --no-fund >/dev/null 2>&1 9<&- # else what it leaves behind keeps the lock
