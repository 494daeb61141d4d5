#!/bin/sh
# The load of bench/load.py, short and small, alone and beside hostile clients.
exec python3 bench/load.py "${1:-build}" --clients 16 --seconds 5 --seqs 8 --kv-tokens 1300 --hostile 3
