#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds on a host with GPUs, checks every op and whole runs there, and measures them.
#
#   scripts/gpu_check.sh [--phase build|conformance|bench|all] [--only ITEM,...] [--out FOLDER] [--dry-run]
#   scripts/gpu_check.sh --collect
#
# Each call works for at most 9 minutes. What is done is kept in FOLDER (gpu_check, or gpu_check-dry-run with --dry-run) and not
# done again; what failed, was skipped or was cut off is tried again by the next call. FOLDER/gpu_check.json and
# FOLDER/gpu_check.md hold all results, after each item. Remove FOLDER to start over. --only runs the named items of the phase
# (patterns of the shell: 8b-half-*), also those that are done.
#
# Exit codes: 0 all is done; 1 something failed; 2 wrong arguments, or nothing to check here; 3 nothing failed, but something
# was skipped, and it is said what and why; 75 the time is up: call it again to go on.
#
# The build needs the CUDA Toolkit, NCCL and cuDNN (their Python wheels suffice), the headers of cudnn-frontend (build-deps/,
# or fetched: scripts/fetch_cudnn_frontend), and no oneDNN or UCX. --collect, on a machine with a network, gathers in build-deps/ what a
# host without one may lack: copy that folder there. The comparison needs ND_PEER_PYTHON (a Python with torch and transformers;
# python3 unless told). --dry-run goes through everything at toy sizes on the doubles of build/tests/hostcuda (scripts/build --tests --cuda),
# which need no GPU; its report says so.
#
# ND_GPU_LIMIT: seconds of one call (520). ND_GPU_BUILD: the build folder (build-gpu; build with --dry-run). ND_GPU_COMMIT: what
# the report calls the sources where there is no git. ND_GPU_ARCHITECTURES: for which GPUs to build (those of this machine).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

phase=all only= out= dry=
while [ $# -gt 0 ]; do
    case "$1" in
    --phase) phase=${2:-}; shift ;;
    --only) only=${2:-}; shift ;;
    --out) out=${2:-}; shift ;;
    --dry-run) dry=1 ;;
    --collect) exec scripts/gpu_collect ;;
    --help | -h) sed -n '3,24s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "gpu_check: unknown argument $1; --help shows those there are" >&2; exit 2 ;;
    esac
    shift
done
case "$phase" in build | conformance | bench | all) ;; *) echo "gpu_check: --phase is build, conformance, bench or all" >&2; exit 2 ;; esac

limit=${ND_GPU_LIMIT:-520} jobs=$(($(nproc) < 16 ? 4 : 8)) per_test=120 build=${ND_GPU_BUILD:-build-gpu} peer=${ND_PEER_PYTHON:-python3}
programs=$build tests=$build/tests/gpu/test_gpu mode='on a GPU'
if [ -n "$dry" ]; then
    build=${ND_GPU_BUILD:-build} jobs=2 per_test=480
    programs=$build/tests/hostcuda tests=$build/tests/hostcuda/test_hostcuda mode='dry run on doubles'
fi
out=${out:-gpu_check${dry:+-dry-run}}

# A launcher in front of it would cost more than what it does here.
if ! python=$(python3 -c 'import sys; print(sys.executable)'); then
    echo "gpu_check: python3 is needed for the report and is not there" >&2
    exit 2
fi
no_gpu() { # why none can be used, in a few words; fails where one can be
    "$python" - <<'PY'
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
if [ -z "$dry" ] && [ "$phase" != build ] && why=$(no_gpu); then
    echo "gpu_check: this machine has no GPU to check, as $why; --dry-run goes through everything without one" >&2
    exit 2
fi
if [ -n "$dry" ] && [ ! -x "$programs/ndlaunch" ]; then
    echo "gpu_check: $programs/ndlaunch is not there; run scripts/build --tests --cuda first, on a machine with the CUDA Toolkit" >&2
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

gpu=$([ -n "$dry" ] && echo 'doubles of an H200' ||
    timeout 30 nvidia-smi --query-gpu=name,compute_cap,memory.total,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
if commit=$(git rev-parse --short HEAD 2>/dev/null); then
    git diff --quiet HEAD 2>/dev/null || commit+=', changed'
else
    commit=${ND_GPU_COMMIT:-unknown}
fi
origin="commit $commit, ${gpu:-no nvidia-smi}"
left=0 ran=0 child=
declare -A is_done=()
while read -r name; do is_done[$name]=1; done < <("$python" scripts/gpu_report.py done "$out")
is_asked() { # item; one that was named runs again
    local glob globs
    IFS=, read -ra globs <<<"$only"
    for glob in "${globs[@]}"; do
        [[ $1 != $glob ]] || { unset "is_done[$1]"; return 0; }
    done
    [ -z "$only" ]
}

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

# item NAME USUAL LIMIT COMMAND...: runs the command once; its lines that are JSON objects are the result. Exit code 77: it was
# skipped, and {"skipped": "why"} is among them. It waits for the next call where less is left of this one than the seconds it
# takes as a rule, unless it is the first. It ends after LIMIT, or with the call, and then is cut off and runs again.
item() {
    local name=$1 usual=$2 most=$3 begin=$SECONDS code=0 state remains=$((limit - SECONDS)) bound
    shift 3
    is_asked "$name" && [ -z "${is_done[$name]:-}" ] || return 0
    [ -z "$dry" ] || usual=$((usual / 10))
    if [ "$remains" -lt "$usual" ] && [ "$ran" != 0 ]; then
        left=1
        "$python" scripts/gpu_report.py wait "$out" "$name"
        return 0
    fi
    echo "gpu_check: $name"
    bound=$([ "$ran" != 0 ] && [ "$remains" -lt "$most" ] && echo "$remains" || echo "$most")
    "$python" scripts/gpu_report.py begin "$out" "$name" "$origin" || exit 74
    setsid timeout -k 15 "$bound" bash -c '. scripts/gpu_items.sh; "$@"' "$name" "$@" >"$out/items/$name.out" 2>"$out/items/$name.err" </dev/null &
    child=$!
    wait "$child" || code=$?
    end_child
    if [ "$bound" -lt "$most" ]; then
        case $code in 124 | 137) code=cut left=1 ;; esac
    fi
    state=$("$python" scripts/gpu_report.py end "$out" "$name" "$code" $((SECONDS - begin)) "$origin") || exit 74
    echo "gpu_check: $name $state after $((SECONDS - begin)) s"
    # Items that every call repeats do not make the others wait, when they were short.
    case $name in machine | compile) [ $((SECONDS - begin)) -lt 60 ] || ran=1 ;; *) ran=1 ;; esac
}
# Whether what an item builds on is not there yet, but will be: then that item waits too.
must_wait() { # item, the one it builds on
    is_asked "$1" && [ -z "${is_done[$1]:-}" ] && grep -qs '"state": "\(waiting\|cut off\)"' "$out/items/$2.json" || return 1
    left=1
    "$python" scripts/gpu_report.py wait "$out" "$1"
}

# Folders with headers and libraries of cuDNN, NCCL and the toolkit as Python wheels have them.
wheels() {
    "$python" - <<'PY'
import glob, site, sys
roots = [p for p in sys.path + site.getsitepackages() + [site.getusersitepackages()] if p]
for part in ("cudnn", "nccl", "cu13", "cublas", "cuda_nvrtc"):
    for root in roots:
        if glob.glob(f"{root}/nvidia/{part}/include/*.h"):
            print(f"{root}/nvidia/{part}")
            break
PY
}
add() { # variable, folder: at the end of a path
    export "$1=${!1:+${!1}:}$2"
}
own_library_path=${LD_LIBRARY_PATH:-}
if [ -z "$dry" ]; then
    root=$(scripts/find_cuda || true)
    if [ -n "$root" ]; then
        add LD_LIBRARY_PATH "$root/lib64"
        add LD_LIBRARY_PATH "$root/lib"
    fi
    for folder in $(wheels); do # what is not in the toolkit's own folders
        add LD_LIBRARY_PATH "$folder/lib"
        add LIBRARY_PATH "$folder/lib"
        add C_INCLUDE_PATH "$folder/include"
        add CPLUS_INCLUDE_PATH "$folder/include"
    done
    # What --collect gathered: tools that this host lacks; libraries, all of them, where it lacks one.
    gathered=$PWD/build-deps/host
    if [ "$(cat "$gathered/machine" 2>/dev/null)" = "$(uname -m)" ]; then
        chmod +x "$gathered/bin/"*
        add PATH "$gathered/bin"
        pkg-config --exists yaml-0.1 jansson libuv hwloc 'openssl >= 3.0' criterion || export PKG_CONFIG_PATH=$gathered/lib/pkgconfig
    fi
fi
export out dry build programs tests peer gpu python jobs per_test commit own_library_path

. scripts/gpu_items.sh
build_items() {
    [ -f "$build/build.ninja" ] || unset "is_done[configure]" # results came here from another host
    item configure 20 240 configure
    # Not kept as done: Ninja knows what there is to do, and goes on where it was cut off.
    unset "is_done[compile]"
    item compile 20 500 compile
}
conformance_items() {
    local recipes= precision recipe
    item ops 60 480 tests_of ops
    item small-fp32 15 200 run_small fp32 --precision fp32
    item small-bf16 15 200 run_small bf16 --precision bf16
    if has_fp8; then
        recipes='tensorwise rowwise delayed'
        for recipe in $recipes; do
            item "small-$recipe" 15 200 run_small "$recipe" --precision fp8 --set "fp8.recipe=$recipe"
        done
    else
        item small-fp8 1 10 skip "FP8 needs compute capability 8.9: $gpu"
    fi
    item losses 5 60 "$python" scripts/gpu_report.py losses "$out/runs" bf16 $recipes
    item memory 15 200 memory_as_planned
    for precision in bf16 fp8; do
        item "graphs-$precision" 30 200 graphs_as_without $precision
        item "autotune-$precision" 45 200 autotune_as_recorded $precision
    done
    item deterministic 30 200 deterministic_twice
    item goldens 60 480 tests_of goldens
}
sanitizer_items() { # slow, so they come last
    local suites name
    suites=$("${tests}_ops" --list 2>/dev/null | sed -n 's/^\([a-z0-9_]*\): [0-9].*/\1/p')
    if [ -z "$suites" ]; then
        item sanitizer 1 10 skip "${tests}_ops has no list of its tests"
    else
        rm -f "$out/items/sanitizer.json"
    fi
    for name in $suites; do
        item "sanitizer-$name" 60 500 sanitized "$name"
    done
}
option_of() { [ "$1" = graphs ] && echo --cuda-graphs || echo --autotune; }
bench_items() {
    local half=16 all=32 precision kind
    [ -z "$dry" ] || { half=2; all=3; }
    item kernels 30 200 bench "$programs/nd_bench_kernels" ${dry:+--repeats 1}
    item products 40 200 bench "$programs/nd_bench_gpu" ${dry:+--toy}
    for precision in bf16 fp8; do
        item "8b-half-$precision" 80 300 run_8b "8b-half-$precision" $half none $precision
    done
    for precision in bf16 fp8; do
        item "8b-all-$precision" 130 400 run_8b "8b-all-$precision" $all full $precision
    done
    item torch-fit 120 400 peer_8b --fit
    must_wait torch-most torch-fit || item torch-most 240 500 torch_most
    must_wait 8b-torch-bf16 torch-most || item 8b-torch-bf16 120 400 beside_torch 8b-torch-bf16
    for kind in graphs autotune; do
        for precision in bf16 fp8; do
            item "8b-half-$precision-$kind" 80 300 run_8b "8b-half-$precision-$kind" $half none $precision "$(option_of $kind)"
        done
    done
    item profile-bf16 60 200 profiled bf16
    item profile-fp8 60 200 profiled fp8
    for kind in graphs autotune; do
        for precision in bf16 fp8; do
            item "8b-all-$precision-$kind" 130 400 run_8b "8b-all-$precision-$kind" $all full $precision "$(option_of $kind)"
        done
        must_wait "8b-torch-bf16-$kind" torch-most || item "8b-torch-bf16-$kind" 120 400 beside_torch "8b-torch-bf16-$kind" "$(option_of $kind)"
    done
}

item machine 5 60 machine
if [ -z "$dry" ] && { [ "$phase" = build ] || [ "$phase" = all ]; }; then
    build_items
fi
if [ "$phase" = all ] && { [ ! -x "$programs/ndlaunch" ] || [ ! -x "$programs/ndtrain" ] || grep -qs '"state": "cut off"' "$out/items/compile.json"; }; then
    phase=none # the build failed, or goes on with the next call
fi
case "$phase" in conformance | all) conformance_items ;; esac
case "$phase" in bench | all) bench_items ;; esac
case "$phase" in conformance | all) sanitizer_items ;; esac
"$python" scripts/gpu_report.py report "$out"
code=$?
if [ "$left" = 1 ]; then
    echo "gpu_check: the time of this call is up; call it again to go on" >&2
    exit 75
fi
exit "$code"
