# The op suite (tests/ops) on the CPU backend; `make test-gpu` and `make test-sim` run it for CUDA. Attention also
# runs with STEEL_ISA=ref, which checks the suite's own copies of the cache against the reference's order.
# TEST_SMALL: as tests/size.h says. With "kernels" only groups of ops that have kernels of their own.
set -e
ops="${1:-build}/tests/ops/test_ops"
run="--backend cpu --jobs $(nproc)${TEST_SMALL:+ --small}"
if [ "$TEST_SMALL" = kernels ]; then
    for group in picks attention heads "delta net" ssm "short convolution" scan encoders "norm, out rows"; do
        "$ops" $run "$group"
    done
    exit
fi
# Plain C: with TEST_SMALL left to the other machine.
[ -n "$TEST_SMALL" ] || STEEL_ISA=ref "$ops" $run attention
exec "$ops" $run
