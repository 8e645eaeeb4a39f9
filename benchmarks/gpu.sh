#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU: `benchmarks/gpu.sh FOLDER [MODEL …]`.
#
# Runs the tests of the kernels, the lossless suite, both again under
# compute-sanitizer where it is installed, and the measurements of `steps`.
# Logs go to FOLDER. Needs a driver, and NVRTC on LD_LIBRARY_PATH. BINARIES may
# name a folder with the test binaries `unit`, `lossless` and `steps`, built
# elsewhere; then nothing is compiled here.
set -uo pipefail
out=${1:?a folder for the logs}
shift
cd "$(dirname "$0")/.."
mkdir -p "$out"
if [ -z "${BINARIES:-}" ]; then
    BINARIES=target/gpu
    mkdir -p "$BINARIES"
    executable() { # executable NAME ARGUMENTS…: builds, and copies to NAME
        local name=$1
        shift
        cp "$(cargo "$@" --message-format json | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -1)" "$BINARIES/$name"
    }
    executable unit test --release -p cuda --lib --no-run
    executable lossless test --release -p suites --test lossless --no-run
    executable steps build --release -p suites --example steps
fi
failed=0
check() { # check NAME COMMAND…: runs it, its output in NAME.log
    local name=$1
    shift
    if timeout 900 "$@" >"$out/$name.log" 2>&1; then echo "$name: ok"; else
        echo "$name: FAILED, see $out/$name.log"
        failed=1
    fi
}
nvidia-smi >"$out/machine.log" 2>&1
check kernels "$BINARIES/unit" gpu_ --nocapture
check lossless "$BINARIES/lossless" gpu --nocapture
if command -v compute-sanitizer >/dev/null; then
    check memcheck compute-sanitizer --tool memcheck --error-exitcode 9 "$BINARIES/unit" gpu_small --nocapture
    # One test at a time, which takes minutes, with kernels whose order the tool can see (mbarrier.cuh).
    checked=$(mktemp -d)
    cp crates/cuda/kernels/* "$checked"
    sed -i '1i #define CHECK_RACES' "$checked/common.cuh"
    for test in $("$BINARIES/unit" gpu_small --list 2>/dev/null | sed -n 's/: test$//p'); do
        CUDA_KERNELS="$checked" check "racecheck-${test##*::}" \
            compute-sanitizer --tool racecheck --error-exitcode 9 "$BINARIES/unit" --exact "$test" --nocapture
    done
    rm -rf "$checked"
else
    echo "memcheck, racecheck: SKIPPED, there is no compute-sanitizer"
fi
holes=$(mktemp -d)
check steps "$BINARIES/steps" "$holes" "$@"
rm -rf "$holes"
exit "$failed"
