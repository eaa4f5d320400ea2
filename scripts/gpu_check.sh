#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds on a host with GPUs, checks every op and whole runs there, and measures them.
#
#   scripts/gpu_check.sh [--phase build|conformance|bench|all] [--out FOLDER] [--dry-run]
#
# Each call works for at most 9 minutes, finishes what it began, and ends with exit code 75 when something is left: call it
# again to go on. What is done is kept in FOLDER (gpu_check, or gpu_check-dry-run with --dry-run); remove it to start over.
# FOLDER/gpu_check.json and FOLDER/gpu_check.md hold all results. The build needs the CUDA Toolkit, NCCL and cuDNN, and no
# oneDNN, UCX or Criterion; the conformance of ops needs Criterion, the comparison ND_PEER_PYTHON (a Python with torch and
# transformers; python3 unless told). --dry-run goes through everything at toy sizes on the doubles of build/tests/hostcuda
# (scripts/build), which need no GPU; its report says so.
#
# ND_GPU_LIMIT: seconds of one call (520). ND_GPU_BUILD: the build folder (build-gpu).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

phase=all out= dry=
while [ $# -gt 0 ]; do
    case "$1" in
    --phase) phase=${2:-}; shift ;;
    --out) out=${2:-}; shift ;;
    --dry-run) dry=1 ;;
    --help | -h) sed -n '3,15s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "gpu_check: unknown argument $1; --help shows those there are" >&2; exit 2 ;;
    esac
    shift
done
case "$phase" in build | conformance | bench | all) ;; *) echo "gpu_check: --phase is build, conformance, bench or all" >&2; exit 2 ;; esac

limit=${ND_GPU_LIMIT:-520} build=${ND_GPU_BUILD:-build-gpu} peer=${ND_PEER_PYTHON:-python3}
programs=$build tests=$build/tests/gpu/test_gpu_ops
if [ -n "$dry" ]; then
    build=build programs=build/tests/hostcuda tests=build/tests/hostcuda/test_hostcuda_ops
fi
mode='on a GPU'
[ -z "$dry" ] || mode='dry run on doubles'
out=${out:-gpu_check${dry:+-dry-run}}

no_gpu() { # why none can be used, in a few words; fails where one can be
    python3 - <<'PY'
import ctypes, sys
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    print("the NVIDIA driver (libcuda.so.1) is not installed")
    sys.exit()
count = ctypes.c_int(0)
error = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
if error or count.value == 0:
    print(f"the driver sees none (CUDA error {error})" if error else "the driver sees none")
    sys.exit()
sys.exit(1)
PY
}
if [ -z "$dry" ] && why=$(no_gpu); then
    echo "gpu_check: this machine has no GPU to check, as $why; --dry-run goes through everything without one" >&2
    exit 2
fi
if [ -n "$dry" ] && [ ! -x "$programs/ndlaunch" ]; then
    echo "gpu_check: $programs/ndlaunch is not there; run scripts/build first, on a machine with the CUDA Toolkit" >&2
    exit 2
elif [ "$phase" != build ] && [ "$phase" != all ] && [ ! -x "$programs/ndlaunch" ]; then
    echo "gpu_check: $programs/ndlaunch is not there; run scripts/gpu_check.sh --phase build first" >&2
    exit 2
fi
if [ -f "$out/mode" ] && [ "$(cat "$out/mode")" != "$mode" ]; then
    echo "gpu_check: $out holds results of another mode ($(cat "$out/mode")); name another folder with --out, or remove it" >&2
    exit 2
fi
mkdir -p "$out/items" && echo "$mode" >"$out/mode" || exit 73
out=$(cd "$out" && pwd)
left=0 failed=0 child=

# An item is a session of its own, as Criterion leaves its process group; ndlaunch gives its workers ten seconds to end.
of_child() { # the processes of the item
    cat /proc/[0-9]*/stat 2>/dev/null | awk -v session="$child" '{ pid = $1; sub(/^.*\) /, ""); if ($4 == session && $1 != "Z") print pid }'
}
end_child() {
    local tenths all
    for ((tenths = 0; tenths < 150; tenths++)); do
        all=$([ -z "$child" ] || of_child)
        [ -n "$all" ] || break
        [ "$tenths" != 0 ] || kill -TERM $all 2>/dev/null
        sleep 0.1
    done
    [ -z "$all" ] || kill -KILL $all 2>/dev/null
    child=
}
trap end_child EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

# item NAME LIMIT COMMAND...: runs the command once; its lines that are JSON objects are the result. A command that fails is
# tried again by the next call; one that needs more time than is left waits for it.
item() {
    local name=$1 most=$2 begin=$SECONDS code=0
    shift 2
    if [ -f "$out/items/$name.done" ]; then
        return 0
    fi
    if [ $((limit - SECONDS)) -lt "$most" ] && [ "$SECONDS" -gt 5 ]; then
        left=1
        return 0
    fi
    echo "gpu_check: $name"
    setsid timeout -k 15 "$most" bash -c '"$@"' "$name" "$@" >"$out/items/$name.out" 2>"$out/items/$name.err" </dev/null &
    child=$!
    wait "$child" || code=$?
    end_child
    printf '{"item": "%s", "exit_code": %d, "seconds": %d}\n' "$name" "$code" $((SECONDS - begin)) >"$out/items/$name.status"
    if [ "$code" = 0 ] || [ "$code" = 77 ]; then
        touch "$out/items/$name.done"
        [ "$code" = 0 ] || echo "gpu_check: $name was skipped"
    else
        failed=1
        echo "gpu_check: $name ended with $code; the last lines:" >&2
        tail -n 5 "$out/items/$name.err" "$out/items/$name.out" >&2
    fi
}

configure() {
    scripts/setup --cuda || return 1
    if [ ! -f "$build/build.ninja" ]; then
        rm -rf "$build"
        meson setup "$build" -Dcuda=enabled -Dgpu_architectures=auto || return 1
    fi
}
machine() { # what this host is, as JSON
    local gpus driver
    gpus=$(nvidia-smi --query-gpu=name,compute_cap,memory.total,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
    driver=$(uname -r)
    printf '{"date": "%s", "gpu": "%s", "linux": "%s", "commit": "%s"}\n' "$(date -u +%Y-%m-%dT%H:%MZ)" "${gpus:-none}" "$driver" \
        "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
}

conformance_ops() {
    if [ ! -x "$tests" ]; then
        echo '{"skipped": "built without Criterion"}'
        return 77
    fi
    "$tests" --timeout 400 --jobs 1
}
sanitized_ops() {
    local tool
    tool=$(command -v compute-sanitizer || echo "$(scripts/find_cuda)/bin/compute-sanitizer")
    if [ ! -x "$tool" ] || [ ! -x "$tests" ]; then
        echo '{"skipped": "no compute-sanitizer or no Criterion"}'
        return 77
    fi
    "$tool" --error-exitcode 9 --target-processes all "$tests" --jobs 1 --timeout 400 --filter "${1:-*}"
}
# A short run of a small model: run_small NAME options...; prints the losses and what was planned and used.
run_small() {
    local name=$1 steps=20
    shift
    [ -z "$dry" ] || steps=3
    rm -rf "$out/runs/$name"
    mkdir -p "$out/runs"
    [ -s "$out/text.txt" ] || awk 'BEGIN { for (i = 0; i < 400000; i++) printf "%c", 97 + (i * i / 3 + i / 7) % 26 }' >"$out/text.txt"
    "$programs/ndlaunch" --device cuda --workers 1 --set "model.config=configs/model-small.json" --set "data.path=$out/text.txt" \
        --set data.tokenizer=bytes --sequence-length $([ -n "$dry" ] && echo 64 || echo 512) --micro-batch-size $([ -n "$dry" ] && echo 1 || echo 4) \
        --num-steps $steps --set output.save_model=false --set "output.dir=$out/runs/$name" "$@" || return 1
    python3 scripts/gpu_report.py run "$name" "$out/runs/$name"
}
deterministic_twice() {
    run_small again1 --precision bf16 --set train.deterministic=true >/dev/null && run_small again2 --precision bf16 --set train.deterministic=true >/dev/null || return 1
    python3 scripts/gpu_report.py same "$out/runs/again1" "$out/runs/again2"
}
# layers recompute precision: the 8B shape with that many layers at S 8192.
run_8b() {
    local layers=$1 recompute=$2 precision=$3 name="8b-$1-$2-$3" sequence=8192 accumulation=16 steps=5 model=configs/llama-3.1-8b/config.json
    if [ -n "$dry" ]; then
        sequence=64 accumulation=2 model=configs/model-small.json
    fi
    mkdir -p "$out/runs" "$out/data"
    python3 scripts/gpu_report.py inputs "$model" "$layers" "$out/data" $((sequence * accumulation * (steps + 2))) || return 1
    rm -rf "$out/runs/$name"
    "$programs/ndlaunch" --device cuda --workers 1 --set "model.config=$out/data/layers-$layers.json" --set "data.path=$out/data/tokens-$layers.bin" \
        --set data.format=llmc --set data.tokenizer=file --sequence-length $sequence --gradient-accumulation-steps $accumulation --precision "$precision" \
        --set "parallel.recompute=$recompute" --num-steps $steps --set output.save_model=false --set "output.dir=$out/runs/$name" || return 1
    python3 scripts/gpu_report.py run "$name" "$out/runs/$name"
}
peer_8b() { # layers options...
    local layers=$1 model=configs/llama-3.1-8b/config.json sequence=8192
    shift
    if [ -n "$dry" ]; then
        model=configs/model-small.json sequence=64
    fi
    "$peer" scripts/gpu_peer.py --model "$model" --layers "$layers" --sequence-length $sequence --accumulation 4 --steps 3 "$@" || return 77
}

# Items run under timeout, in a shell of their own.
export out dry build programs tests peer
export -f configure machine conformance_ops sanitized_ops run_small deterministic_twice run_8b peer_8b

if [ "$phase" = build ] || [ "$phase" = all ]; then
    item machine 60 machine
    if [ -z "$dry" ]; then
        item configure 240 configure
        # Ninja keeps what it has compiled: a build that is cut off goes on with the next call.
        item compile 500 ninja -C "$build"
    fi
fi
if [ "$phase" = all ] && [ ! -x "$programs/ndlaunch" ]; then
    phase=none # the build failed, or goes on with the next call
fi
if [ "$phase" = conformance ] || [ "$phase" = all ]; then
    item ops 500 conformance_ops
    item small-fp32 200 run_small fp32 --precision fp32
    item small-bf16 200 run_small bf16 --precision bf16
    item small-fp8 200 run_small fp8 --precision fp8
    item small-rowwise 200 run_small rowwise --precision fp8 --set fp8.recipe=rowwise
    item small-delayed 200 run_small delayed --precision fp8 --set fp8.recipe=delayed
    item deterministic 300 deterministic_twice
    item losses 60 python3 scripts/gpu_report.py losses "$out/runs"
    for suite in elementwise norm embedding rope swiglu cross_entropy attention fp8 matmul optimizer; do
        [ -n "$dry" ] || item "sanitizer-$suite" 400 sanitized_ops "$suite/*"
    done
fi
if [ "$phase" = bench ] || [ "$phase" = all ]; then
    if [ -z "$dry" ]; then
        item kernels 300 "$programs/nd_bench_gpu"
    fi
    layers_few=8 layers_half=16 layers_all=32
    [ -z "$dry" ] || { layers_few=1; layers_half=2; layers_all=3; }
    for precision in bf16 fp8; do
        item "8b-half-$precision" 300 run_8b $layers_half none $precision
        item "8b-few-$precision" 240 run_8b $layers_few full $precision
        item "8b-all-$precision" 400 run_8b $layers_all full $precision
    done
    for layers in $layers_few $layers_half; do
        item "torch-$layers-checkpoint" 300 peer_8b "$layers" --checkpoint
        item "torch-$layers-compile-checkpoint" 400 peer_8b "$layers" --checkpoint --compile
        item "torch-$layers-compile" 400 peer_8b "$layers" --compile
    done
fi
python3 scripts/gpu_report.py report "$out" || failed=1
if [ "$left" = 1 ]; then
    echo "gpu_check: the time of this call is up; call it again to go on" >&2
    exit 75
fi
exit "$failed"
