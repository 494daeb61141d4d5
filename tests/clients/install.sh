#!/bin/sh
# install.sh [FOLDER]: installs the pinned packages of FOLDER (default: this one), once: two tests that need them may run at the same time. Without a registry that
# answers it fails within seconds, where npm would retry for minutes.
cd "$(dirname "$0")/${1:-.}" || exit 1
pins=package-lock.json
exec 9<$pins
flock 9 2>/dev/null
whole=node_modules/.package-lock.json # npm writes it last
[ -e $whole ] && [ ! $pins -nt $whole ] && exit 0
how=ci
[ "${1:-.}" = agents ] && how="install --no-save" # npm ci wants the optional packages of all systems
install() { npm $how --no-audit --no-fund "$@" >/dev/null 2>&1 9<&-; } # a process npm leaves running must not hold the lock
install --offline && exit 0 # npm's cache may have every package
timeout -k 1 20 npm view zod version --fetch-retries=0 --fetch-timeout=10000 >/dev/null 2>&1 9<&- || exit 1
install --prefer-offline
