#!/bin/sh
# The load of bench/load.py, short and small.
exec python3 bench/load.py "${1:-build}" --clients 16 --seconds 6 --seqs 8 --kv-tokens 1300
