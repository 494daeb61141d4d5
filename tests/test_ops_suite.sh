# The op suite (tests/ops) on the CPU backend; `make test-gpu` and `make test-sim` run it for CUDA. Attention also
# runs with STEEL_ISA=ref, which checks the suite's own copies of the cache against the reference's order.
set -e
ops="${1:-build}/tests/ops/test_ops"
STEEL_ISA=ref "$ops" --backend cpu --jobs "$(nproc)" attention
exec "$ops" --backend cpu --jobs "$(nproc)"
