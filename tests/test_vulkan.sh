# The Vulkan backend, on whatever device Vulkan finds: a small part of the op suite and some golden models, with the
# validation layer where it is installed. `test_vulkan.sh BUILD all` runs all of both (make test-all).
B=${1:-build}
ops=$B/tests/ops/test_ops
out=$B/tests/vulkan.out
if ! "$B/steel" doctor | grep -q '^  ok    vulkan:0'; then
    echo "skipped: vulkan: $("$B/steel" run --device vulkan -p x 2>&1 | head -n 1)"
    exit 77
fi
fails=0 all=${2:-}
check() { # COMMAND...: it succeeds, and the layer has no message
    if ! "$@" >"$out" 2>&1; then
        echo "failed: $*"
        fails=1
    elif grep -qE 'Validation|VUID|UNASSIGNED' "$out"; then
        echo "failed: $*: messages of the validation layer"
        fails=1
    fi
    grep -E "FAIL|Validation|VUID|UNASSIGNED${all:+|^skipped: }" "$out" | cut -c1-400 | head -n 40
}
if [ -e /usr/share/vulkan/explicit_layer.d/VkLayer_khronos_validation.json ]; then
    export VK_INSTANCE_LAYERS=VK_LAYER_KHRONOS_validation
else
    echo "skipped: vulkan: the validation layer is not installed"
fi
export STEEL_TEST_DEVICE=vulkan
if [ "$2" = all ]; then
    check "$ops" --backend vulkan --jobs "$(nproc)"
    check "$B/tests/test_golden"
    check python3 tests/vulkan_faults.py "$B" all
else
    check "$ops" --backend vulkan --small norm
    check "$ops" --backend vulkan --small sampling
    check "$B/tests/test_golden" qwen3 qwen3moe gpt_oss_mxfp4 nemotron
    # A token at a time from recorded steps gives what the CPU gives.
    for d in cpu vulkan; do
        "$B/steel" run --device $d -q --temp 0 -n 24 -p 'Hello' >"$out.$d" 2>&1 || fails=1
    done
    cmp "$out.cpu" "$out.vulkan" || fails=1
    check "$B/steel" doctor
    check python3 tests/vulkan_faults.py "$B"
fi
exit $fails
