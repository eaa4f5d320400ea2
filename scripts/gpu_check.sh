#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds on a host with GPUs, checks every op and whole runs there, and measures them.
#
#   scripts/gpu_check.sh [--phase build|conformance|bench|all] [--out FOLDER] [--dry-run]
#
# Each call works for at most 9 minutes and finishes what it began. What is done is kept in FOLDER (gpu_check, or
# gpu_check-dry-run with --dry-run) and not done again; what failed, was skipped or was cut off is tried again by the next
# call. FOLDER/gpu_check.json and FOLDER/gpu_check.md hold all results. Remove FOLDER to start over.
#
# Exit codes: 0 all is done; 1 something failed; 2 wrong arguments, or nothing to check here; 3 nothing failed, but something
# was skipped, and it is said what and why; 75 the time is up: call it again to go on.
#
# The build needs the CUDA Toolkit, NCCL and cuDNN (their Python wheels suffice), the headers of cudnn-frontend (build-deps/,
# or fetched: scripts/setup --cuda), and no oneDNN or UCX. The comparison needs ND_PEER_PYTHON (a Python with torch and
# transformers; python3 unless told). --dry-run goes through everything at toy sizes on the doubles of build/tests/hostcuda
# (scripts/build), which need no GPU; its report says so.
#
# ND_GPU_LIMIT: seconds of one call (520). ND_GPU_BUILD: the build folder (build-gpu; build with --dry-run).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

phase=all out= dry=
while [ $# -gt 0 ]; do
    case "$1" in
    --phase) phase=${2:-}; shift ;;
    --out) out=${2:-}; shift ;;
    --dry-run) dry=1 ;;
    --help | -h) sed -n '3,20s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "gpu_check: unknown argument $1; --help shows those there are" >&2; exit 2 ;;
    esac
    shift
done
case "$phase" in build | conformance | bench | all) ;; *) echo "gpu_check: --phase is build, conformance, bench or all" >&2; exit 2 ;; esac

limit=${ND_GPU_LIMIT:-520} build=${ND_GPU_BUILD:-build-gpu} peer=${ND_PEER_PYTHON:-python3}
programs=$build tests=$build/tests/gpu/test_gpu mode='on a GPU'
if [ -n "$dry" ]; then
    build=${ND_GPU_BUILD:-build}
    programs=$build/tests/hostcuda tests=$build/tests/hostcuda/test_hostcuda mode='dry run on doubles'
fi
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
if ! command -v python3 >/dev/null; then
    echo "gpu_check: python3 is needed for the report and is not there" >&2
    exit 2
fi
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
mkdir -p "$out/items" "$out/data" "$out/runs" && echo "$mode" >"$out/mode" || exit 73
out=$(cd "$out" && pwd)
# The lock is held by everything that this call starts: what outlives a killed call must not share the GPU with the next one.
exec 9>"$out/lock"
if ! flock -n 9; then
    echo "gpu_check: another call still works in $out, or something that it started does; wait for it or end it" >&2
    exit 2
fi

gpu=$([ -n "$dry" ] && echo 'doubles of an H200' || nvidia-smi --query-gpu=name,compute_cap,memory.total,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
origin="commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)$(git diff --quiet HEAD 2>/dev/null || echo ', changed'), ${gpu:-no nvidia-smi}"
left=0 ran=0 child=
declare -A is_done=()
while read -r name; do is_done[$name]=1; done < <(python3 scripts/gpu_report.py done "$out")

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
trap 'exit 141' PIPE # who read the output has gone: what was started ends too

# item NAME LIMIT COMMAND...: runs the command once; its lines that are JSON objects are the result. Exit code 77: it was
# skipped, and {"skipped": "why"} is among them. One that needs more time than is left waits for the next call, but the first
# of a call.
item() {
    local name=$1 most=$2 begin=$SECONDS code=0 state
    shift 2
    [ -z "${is_done[$name]:-}" ] || return 0
    if [ $((limit - SECONDS)) -lt "$most" ] && [ "$ran" != 0 ]; then
        left=1
        python3 scripts/gpu_report.py wait "$out" "$name"
        return 0
    fi
    echo "gpu_check: $name"
    python3 scripts/gpu_report.py begin "$out" "$name" "$origin" || exit 74
    setsid timeout -k 15 "$most" bash -c '"$@"' "$name" "$@" >"$out/items/$name.out" 2>"$out/items/$name.err" </dev/null &
    child=$!
    wait "$child" || code=$?
    end_child
    state=$(python3 scripts/gpu_report.py end "$out" "$name" "$code" $((SECONDS - begin)) "$origin") || exit 74
    [ "$state" = done ] || echo "gpu_check: $name $state" >&2
    # Items that every call repeats do not make the others wait, when they were short.
    case $name in machine | compile) [ $((SECONDS - begin)) -lt 60 ] || ran=1 ;; *) ran=1 ;; esac
}
# Whether what an item builds on is not there yet, but will be: then that item waits too.
must_wait() { # item, the one it builds on
    [ -z "${is_done[$1]:-}" ] && grep -qs '"state": "\(waiting\|cut off\)"' "$out/items/$2.json" || return 1
    left=1
    python3 scripts/gpu_report.py wait "$out" "$1"
}
value() { python3 scripts/gpu_report.py field "$out" "$1" "$2"; } # of a done item's results
skip() { # why
    printf '{"skipped": "%s"}\n' "$1"
    return 77
}

# Headers and libraries of cuDNN and NCCL where only their Python wheels have them.
wheels() {
    python3 - <<'PY'
import glob, site, sys
roots = [p for p in sys.path + site.getsitepackages() + [site.getusersitepackages()] if p]
for part in ("cudnn", "nccl"):
    for root in roots:
        if glob.glob(f"{root}/nvidia/{part}/include/*.h"):
            print(f"{root}/nvidia/{part}")
            break
PY
}
if [ -z "$dry" ]; then
    for folder in $(wheels); do
        export CPATH="${CPATH:+$CPATH:}$folder/include" LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder/lib"
    done
    root=$(scripts/find_cuda || true)
    [ -z "$root" ] || export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$root/lib64:$root/lib"
fi

configure() {
    local frontend=
    if [ ! -d build-deps/cudnn-frontend/include ] && ! scripts/setup --cuda; then
        frontend=$(dirname "$(find /usr/include /usr/local/include "$(scripts/find_cuda)/include" -name cudnn_frontend.h 2>/dev/null | head -n 1)" 2>/dev/null)
        [ -f "$frontend/cudnn_frontend.h" ] || return 1
    fi
    if [ ! -f "$build/build.ninja" ]; then
        rm -rf "$build"
        meson setup "$build" -Dcuda=enabled -Dcpu=disabled -Ducx=disabled -Dgpu_architectures=auto ${frontend:+-Dcudnn_frontend="$frontend"}
    fi
}
compile() { # what the other phases run; tests only where Criterion is
    local targets=(ndlaunch ndtrain nd_bench_kernels nd_bench_gpu) name
    for name in tests/gpu/test_gpu_ops tests/gpu/test_gpu_goldens; do
        ! grep -q "^build $name:" "$build/build.ninja" || targets+=("$name")
    done
    ninja -C "$build" "${targets[@]}"
}
machine() { # what this host is, as JSON
    printf '{"date": "%s", "gpu": "%s", "linux": "%s", "commit": "%s"}\n' "$(date -u +%Y-%m-%dT%H:%MZ)" "${gpu:-none}" "$(uname -r)" \
        "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
}
suite() { # a test program and its arguments; one that ran no test has failed
    local log=$out/data/suite.log code=0
    "$@" >"$log" 2>&1 || code=$?
    cat "$log"
    grep -qE 'Synthesis: Tested: *[1-9]' "$log" || { echo "gpu_check: no test ran" >&2; return 1; }
    return "$code"
}
tests_of() { # ops or goldens
    [ -x "${tests}_$1" ] || { skip "${tests}_$1 was not built"; return; }
    suite "${tests}_$1" --timeout 480 --jobs 1
}
sanitized() { # a suite of the ops' tests
    local tool=${ND_GPU_SANITIZER:-$(command -v compute-sanitizer || echo "$(scripts/find_cuda)/bin/compute-sanitizer")} code=0
    [ -z "$dry" ] || [ -n "${ND_GPU_SANITIZER:-}" ] || { skip "compute-sanitizer needs a GPU"; return; }
    [ -x "$tool" ] || { skip "compute-sanitizer is not there (part of the CUDA Toolkit)"; return; }
    [ -x "${tests}_ops" ] || { skip "${tests}_ops was not built"; return; }
    suite "$tool" --error-exitcode 9 --target-processes all "${tests}_ops" --jobs 1 --timeout 480 --filter "$1/*" || code=$?
    if [ "$code" != 0 ] && grep -q 'Device not supported' "$out/data/suite.log"; then
        skip "compute-sanitizer does not support this device"
        return
    fi
    return "$code"
}
# A short run of a small model: run_small NAME options...; prints the losses and what was planned and used.
run_small() {
    local name=$1 steps=20 sequence=512 batch=4
    shift
    [ -z "$dry" ] || { steps=3 sequence=64 batch=1; }
    rm -rf "$out/runs/$name"
    awk 'BEGIN { for (i = 0; i < 400000; i++) printf "%c", 97 + (i * i / 3 + i / 7) % 26 }' >"$out/data/text.txt"
    "$programs/ndlaunch" --device cuda --workers 1 --set "model.config=configs/model-small.json" --set "data.path=$out/data/text.txt" \
        --set data.tokenizer=bytes --sequence-length $sequence --micro-batch-size $batch --num-steps $steps \
        --set output.save_model=false --set "output.dir=$out/runs/$name" "$@" || return 1
    python3 scripts/gpu_report.py run "$name" "$out/runs/$name" "$gpu" 4
}
deterministic_twice() {
    run_small again1 --precision bf16 --set train.deterministic=true >/dev/null && run_small again2 --precision bf16 --set train.deterministic=true >/dev/null || return 1
    python3 scripts/gpu_report.py same "$out/runs/again1" "$out/runs/again2"
}
in_use() { # bytes of the first GPU that the driver has given away
    [ -z "$dry" ] || { echo 0; return; }
    nvidia-smi --id=0 --query-gpu=memory.used --format=csv,noheader,nounits 2>/dev/null | awk 'NR == 1 && /^[0-9]+$/ { printf "%.0f\n", $1 * 1048576; found = 1 } END { exit !found }'
}
memory_as_planned() {
    local idle
    idle=$(in_use) || { skip "nvidia-smi is not there to say what is in use"; return; }
    run_small memory --precision bf16 >/dev/null || return 1
    python3 scripts/gpu_report.py memory "$out/runs/memory" "$idle"
}
# NAME layers recompute precision options...: the 8B shape at S 8192, with fewer layers where so many do not fit the GPU.
run_8b() {
    local name=$1 asked=$2 recompute=$3 precision=$4 layers=$2 code=71 sequence=8192 accumulation=16 steps=5 model=configs/llama-3.1-8b/config.json
    shift 4
    if [ -n "$dry" ]; then
        sequence=64 accumulation=2 model=configs/model-small.json
    fi
    if [ "$precision" = fp8 ] && [ -z "$dry" ] && ! awk -F', *' '{ exit !($2 >= 8.9) }' <<<"$gpu"; then
        skip "FP8 needs compute capability 8.9: $gpu"
        return
    fi
    for (( ; layers >= 1; layers -= layers > 4 ? 2 : 1)); do
        python3 scripts/gpu_report.py inputs "$model" "$layers" "$out/data" $((sequence * accumulation * (steps + 2))) || return 1
        rm -rf "$out/runs/$name"
        code=0
        "$programs/ndlaunch" --device cuda --workers 1 --set "model.config=$out/data/layers-$layers.json" --set "data.path=$out/data/tokens-$layers.bin" \
            --set data.format=llmc --set data.tokenizer=file --sequence-length $sequence --gradient-accumulation-steps $accumulation --precision "$precision" \
            --set "parallel.recompute=$recompute" --num-steps $steps --set output.save_model=false --set "output.dir=$out/runs/$name" "$@" || code=$?
        rm -f "$out/data/tokens-$layers.bin"
        [ "$code" = 71 ] || break # 71: the plan does not fit
    done
    [ "$code" = 0 ] || return 1
    python3 scripts/gpu_report.py run "$name" "$out/runs/$name" "$gpu" "$asked"
}
# PyTorch on the same shape: mode arguments...; as many micro-batches a step as above.
peer_8b() {
    local model=configs/llama-3.1-8b/config.json sequence=8192 accumulation=16
    if [ -n "$dry" ]; then
        model=configs/model-small.json sequence=64 accumulation=2
    fi
    command -v "$peer" >/dev/null || { skip "$peer is not there; ND_PEER_PYTHON names a Python with torch and transformers"; return; }
    "$peer" scripts/gpu_peer.py --model "$model" --sequence-length $sequence --accumulation $accumulation --steps 3 ${dry:+--device cpu} "$@"
}
torch_most() { # the most layers that fit, compiled, with checkpointing
    local layers
    layers=$(value torch-fit fit_layers) || { skip "it is not known how many layers PyTorch fits (item torch-fit)"; return; }
    peer_8b --layers "$layers" --fewer --checkpoint --compile
}
beside_torch() { # the same number of layers here
    local layers
    layers=$(value torch-most layers) || { skip "PyTorch was not measured (item torch-most)"; return; }
    run_8b 8b-torch-bf16 "$layers" full bf16
}
bench() { # program, arguments; with fewer tokens where 8192 do not fit the GPU
    local tokens=8192 code=71
    [ -z "$dry" ] || tokens=16
    for (( ; tokens >= 16 && code == 71; tokens /= 2)); do
        code=0
        "$@" --tokens $tokens || code=$?
    done
    return "$code"
}

# Items run under timeout, in a shell of their own.
export out dry build programs tests peer gpu
export -f configure compile machine suite tests_of sanitized run_small deterministic_twice in_use memory_as_planned run_8b peer_8b torch_most beside_torch bench value skip

item machine 60 machine
if [ -z "$dry" ] && { [ "$phase" = build ] || [ "$phase" = all ]; }; then
    item configure 240 configure
    # Not kept as done: Ninja knows what there is to do, and goes on where it was cut off.
    unset 'is_done[compile]'
    item compile 500 compile
fi
if [ "$phase" = all ] && [ ! -x "$programs/ndlaunch" ]; then
    phase=none # the build failed, or goes on with the next call
fi
if [ "$phase" = conformance ] || [ "$phase" = all ]; then
    recipes=
    item ops 500 tests_of ops
    item goldens 500 tests_of goldens
    item small-fp32 200 run_small fp32 --precision fp32
    item small-bf16 200 run_small bf16 --precision bf16
    if [ -n "$dry" ] || awk -F', *' '{ exit !($2 >= 8.9) }' <<<"$gpu"; then
        recipes='tensorwise rowwise delayed'
        for recipe in $recipes; do
            item "small-$recipe" 200 run_small "$recipe" --precision fp8 --set "fp8.recipe=$recipe"
        done
    else
        item small-fp8 10 skip "FP8 needs compute capability 8.9: $gpu"
    fi
    item losses 60 python3 scripts/gpu_report.py losses "$out/runs" bf16 $recipes
    item deterministic 300 deterministic_twice
    item memory 200 memory_as_planned
    suites=$("${tests}_ops" --list 2>/dev/null | sed -n 's/^\([a-z0-9_]*\): [0-9].*/\1/p')
    if [ -z "$suites" ]; then
        item sanitizer 10 skip "${tests}_ops has no list of its tests"
    else
        rm -f "$out/items/sanitizer.json"
    fi
    for name in $suites; do
        item "sanitizer-$name" 400 sanitized "$name"
    done
fi
if [ "$phase" = bench ] || [ "$phase" = all ]; then
    layers_half=16 layers_all=32
    [ -z "$dry" ] || { layers_half=2; layers_all=3; }
    item kernels 300 bench "$programs/nd_bench_kernels" ${dry:+--repeats 1}
    item products 300 bench "$programs/nd_bench_gpu" ${dry:+--toy}
    for precision in bf16 fp8; do
        item "8b-half-$precision" 400 run_8b "8b-half-$precision" $layers_half none $precision
        item "8b-all-$precision" 480 run_8b "8b-all-$precision" $layers_all full $precision
        item "8b-half-$precision-autotune" 460 run_8b "8b-half-$precision-autotune" $layers_half none $precision --autotune
    done
    item torch-fit 480 peer_8b --fit
    must_wait torch-most torch-fit || item torch-most 500 torch_most
    must_wait 8b-torch-bf16 torch-most || item 8b-torch-bf16 400 beside_torch
fi
python3 scripts/gpu_report.py report "$out"
code=$?
if [ "$left" = 1 ]; then
    echo "gpu_check: the time of this call is up; call it again to go on" >&2
    exit 75
fi
exit "$code"
