# The op suite (tests/ops) on the CPU backend; `make test-gpu` and `make test-sim` run it for CUDA.
exec "${1:-build}/tests/ops/test_ops" --backend cpu --jobs "$(nproc)"
