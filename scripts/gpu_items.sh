# SPDX-License-Identifier: Apache-2.0
# What the items of scripts/gpu_check.sh do: read by the shell of each item, which has that script's variables in its
# environment. A function prints its results as JSON objects, one a line; 77 means skipped.

value() { "$python" scripts/gpu_report.py field "$out" "$1" "$2"; } # of a done item's results
skip() { # why
    printf '{"skipped": "%s"}\n' "$1"
    return 77
}
has_fp8() { [ -n "$dry" ] || awk -F', *' '{ exit !($2 >= 8.9) }' <<<"$gpu"; }
needs_fp8() { # precision
    [ "$1" != fp8 ] || has_fp8 || skip "FP8 needs compute capability 8.9: $gpu"
}

# build

configure() {
    local frontend= tool
    for tool in meson ninja "${CC:-cc}" "${CXX:-c++}" pkg-config; do
        command -v "$tool" >/dev/null || { echo "$tool is not there; scripts/gpu_check.sh --collect gathers what a host without a network lacks" >&2; return 1; }
    done
    if [ ! -d build-deps/cudnn-frontend/include ] && ! scripts/fetch_cudnn_frontend; then
        frontend=$(dirname "$(find /usr/include /usr/local/include "$(scripts/find_cuda)/include" -name cudnn_frontend.h 2>/dev/null | head -n 1)" 2>/dev/null)
        [ -f "$frontend/cudnn_frontend.h" ] || return 1
    fi
    if [ ! -f "$build/build.ninja" ]; then
        rm -rf "$build"
        # A newer compiler's warnings are not what is checked here.
        meson setup "$build" -Dcuda=enabled -Dtests=auto -Dcpu=disabled -Ducx=disabled -Dpmix=disabled -Dwerror=false -Dgpu_architectures="${ND_GPU_ARCHITECTURES:-auto}" \
            ${frontend:+-Dcudnn_frontend="$frontend"}
    fi
}
compile() { # what the other phases run; tests only where Criterion is
    local targets=(ndlaunch ndtrain nd_bench_kernels nd_bench_gpu) name
    for name in tests/gpu/test_gpu_ops tests/gpu/test_gpu_goldens; do
        ! grep -q "^build $name:" "$build/build.ninja" || targets+=("$name")
    done
    ninja -C "$build" -k 0 "${targets[@]}" # one that fails does not keep the others
}
machine() { # what this host is, as JSON
    printf '{"date": "%s", "gpu": "%s", "linux": "%s", "processors": %d, "commit": "%s"}\n' "$(date -u +%Y-%m-%dT%H:%MZ)" \
        "${gpu:-none}" "$(uname -r)" "$(nproc)" "$commit"
    [ -n "$dry" ] || ND_NVCC=$(scripts/find_cuda)/bin/nvcc "$python" scripts/gpu_report.py versions
}

# conformance

suite() { # a test program and its arguments; one that ran no test has failed
    local log=$out/data/suite.log code
    "$@" 2>&1 | tee "$log"
    code=${PIPESTATUS[0]}
    grep -qE 'Synthesis: Tested: *[1-9]' "$log" || { echo "gpu_check: no test ran" >&2; return 1; }
    return "$code"
}
tests_of() { # ops or goldens
    [ -x "${tests}_$1" ] || { skip "${tests}_$1 was not built"; return; }
    suite "${tests}_$1" --timeout "$per_test" --jobs "$jobs"
}
# What CUDA's calls answer is no finding: the program checks each answer, and libraries ask for what is not there, or whether
# the GPU is done.
sanitized() { # a suite of the ops' tests
    local tool=${ND_GPU_SANITIZER:-$(command -v compute-sanitizer || echo "$(scripts/find_cuda)/bin/compute-sanitizer")} code=0
    [ -z "$dry" ] || [ -n "${ND_GPU_SANITIZER:-}" ] || { skip "compute-sanitizer needs a GPU"; return; }
    [ -x "$tool" ] || { skip "compute-sanitizer is not there (part of the CUDA Toolkit)"; return; }
    [ -x "${tests}_ops" ] || { skip "${tests}_ops was not built"; return; }
    suite "$tool" --error-exitcode 9 --report-api-errors no --launch-timeout 60 --target-processes all "${tests}_ops" --jobs "$jobs" --timeout 300 --filter "$1/*" || code=$?
    if [ "$code" != 0 ] && grep -q 'Device not supported' "$out/data/suite.log"; then
        skip "compute-sanitizer does not support this device"
        return
    elif [ "$code" = 0 ] && ! grep -q 'ERROR SUMMARY' "$out/data/suite.log"; then
        echo "gpu_check: compute-sanitizer has watched no process" >&2
        return 1
    fi
    return "$code"
}
# A short run of a small model: run_small NAME options...; prints the losses and what was planned and used.
run_small() {
    local name=$1 steps=20 sequence=512 batch=4
    shift
    [ -z "$dry" ] || { steps=${dry_steps:-3} sequence=32 batch=1; }
    rm -rf "$out/runs/$name"
    awk 'BEGIN { for (i = 0; i < 400000; i++) printf "%c", 97 + (i * i / 3 + i / 7) % 26 }' >"$out/data/text.txt"
    "$programs/ndlaunch" --device cuda --workers 1 --set "model.config=configs/model-small.json" --set "data.path=$out/data/text.txt" \
        --set data.tokenizer=bytes --sequence-length $sequence --micro-batch-size $batch --num-steps $steps \
        --set output.save_model=false --set "output.dir=$out/runs/$name" "$@" || return 1
    "$python" scripts/gpu_report.py run "$name" "$out/runs/$name" "$gpu" 4
}
deterministic_twice() {
    run_small again1 --precision bf16 --set train.deterministic=true >/dev/null && run_small again2 --precision bf16 --set train.deterministic=true >/dev/null || return 1
    "$python" scripts/gpu_report.py same "$out/runs/again1" "$out/runs/again2"
}
# With and without CUDA graphs, validation and (in FP8) steps of the health log between.
graphs_as_without() { # precision
    local precision=$1 dry_steps=4 graphs
    needs_fp8 "$precision" || return
    head -c 20000 "$out/data/text.txt" >"$out/data/validation.txt" 2>/dev/null || awk 'BEGIN { while (i++ < 20000) printf "%c", 97 + i * i % 26 }' >"$out/data/validation.txt"
    for graphs in false true; do
        run_small "graphs-$precision-$graphs" --precision "$precision" --deterministic --set kernels.cuda_graphs=$graphs --gradient-accumulation-steps 2 \
            --set "data.validation_path=$out/data/validation.txt" --validation-interval 2 --set train.validation_batches=1 --set fp8.health_interval=$([ -n "$dry" ] && echo 0 || echo 4) || return 1
    done
    "$python" scripts/gpu_report.py same "$out/runs/graphs-$precision-false" "$out/runs/graphs-$precision-true"
}
# Choices of autotune, then two runs that take them from its record.
autotune_as_recorded() { # precision
    local precision=$1 again
    needs_fp8 "$precision" || return
    run_small "tuned-$precision" --precision "$precision" --autotune || return 1
    for again in 1 2; do
        run_small "tuned-$precision-$again" --precision "$precision" --deterministic --autotune-from "$out/runs/tuned-$precision/run.json" || return 1
    done
    "$python" scripts/gpu_report.py replayed "$out/runs/tuned-$precision" "$out/runs/tuned-$precision-1" "$out/runs/tuned-$precision-2"
}
in_use() { # bytes of the first GPU that the driver has given away
    [ -z "$dry" ] || { echo 0; return; }
    timeout 30 nvidia-smi --id=0 --query-gpu=memory.used --format=csv,noheader,nounits 2>/dev/null |
        awk 'NR == 1 && /^[0-9]+$/ { printf "%.0f\n", $1 * 1048576; found = 1 } END { exit !found }'
}
memory_as_planned() {
    local idle
    idle=$(in_use) || { skip "nvidia-smi is not there to say what is in use"; return; }
    run_small memory --precision bf16 >/dev/null || return 1
    "$python" scripts/gpu_report.py memory "$out/runs/memory" "$idle"
}

# bench

# A run of the 8B shape: launch_8b NAME LAYERS PRECISION SEQUENCE ACCUMULATION STEPS options...; a command before it is in `under`.
# In FP8 with weights as codes, as accelerate has it: those of all 32 layers fit an H200, and are made once a step.
launch_8b() {
    local name=$1 layers=$2 precision=$3 sequence=$4 accumulation=$5 steps=$6 model=configs/llama-3.1-8b/config.json code=0
    shift 6
    [ "$precision" != fp8 ] || set -- --set fp8.all_gather=true "$@"
    [ -z "$dry" ] || model=configs/model-small.json
    "$python" scripts/gpu_report.py inputs "$model" "$layers" "$out/data" $((sequence * accumulation * (steps + 2))) || return 1
    rm -rf "$out/runs/$name"
    "${under[@]}" "$programs/ndlaunch" --device cuda --workers 1 --set "model.config=$out/data/layers-$layers.json" --set "data.path=$out/data/tokens-$layers.bin" \
        --set data.format=llmc --set data.tokenizer=file --sequence-length "$sequence" --gradient-accumulation-steps "$accumulation" --precision "$precision" \
        --num-steps "$steps" --set output.save_model=false --set "output.dir=$out/runs/$name" "$@" || code=$?
    rm -f "$out/data/tokens-$layers.bin"
    return "$code"
}
# NAME layers recompute precision options...: the 8B shape at S 8192, with fewer layers where so many do not fit the GPU.
run_8b() {
    local name=$1 asked=$2 layers=$2 recompute=$3 precision=$4 code=71 sequence=8192 accumulation=16 steps=4 under=()
    shift 4
    needs_fp8 "$precision" || return
    [ -z "$dry" ] || { sequence=64 accumulation=2 steps=3; }
    for (( ; layers >= 1; layers -= layers > 4 ? 2 : 1)); do
        code=0
        launch_8b "$name" "$layers" "$precision" $sequence $accumulation $steps --set "parallel.recompute=$recompute" "$@" || code=$?
        [ "$code" = 71 ] || break # 71: the plan does not fit
    done
    [ "$code" = 0 ] || return 1
    "$python" scripts/gpu_report.py run "$name" "$out/runs/$name" "$gpu" "$asked"
}
# Where a step's time goes: every kernel of two steps of two layers, each timed alone by Nsight Compute.
profiled() { # precision
    local precision=$1 sequence=8192 log=$out/data/profile-$1.csv tool code=0 under
    tool=${ND_GPU_NCU:-$(command -v ncu || echo "$(scripts/find_cuda)/bin/ncu")}
    [ -z "$dry" ] || [ -n "${ND_GPU_NCU:-}" ] || { skip "Nsight Compute (ncu) needs a GPU"; return; }
    [ -x "$tool" ] || { skip "Nsight Compute (ncu) is not there"; return; }
    needs_fp8 "$precision" || return
    [ -z "$dry" ] || sequence=64
    under=("$tool" --target-processes all --clock-control none --metrics gpu__time_duration.sum --print-units base --csv --page raw --log-file "$log")
    rm -f "$log"
    launch_8b "profile-$precision" 2 "$precision" $sequence 1 2 || code=$?
    "$python" scripts/gpu_report.py profile "$precision" "$log" && return
    tail -n 5 "$log" >&2
    skip "ncu gave no times of kernels (exit code $code)"
}
# PyTorch on the same shape: mode arguments...; as many micro-batches a step as above. It finds its own libraries.
peer_8b() {
    local model=configs/llama-3.1-8b/config.json sequence=8192 accumulation=16
    if [ -n "$dry" ]; then
        model=configs/model-small.json sequence=64 accumulation=2
    fi
    command -v "$peer" >/dev/null || { skip "$peer is not there; ND_PEER_PYTHON names a Python with torch and transformers"; return; }
    LD_LIBRARY_PATH=$own_library_path "$peer" scripts/gpu_peer.py --model "$model" --sequence-length $sequence --accumulation $accumulation --steps 2 --warm-up 1 \
        ${dry:+--device cpu} "$@"
}
torch_most() { # the most layers that fit, compiled, with checkpointing
    local layers
    layers=$(value torch-fit fit_layers) || { skip "it is not known how many layers PyTorch fits (item torch-fit)"; return; }
    peer_8b --layers "$layers" --fewer --checkpoint --compile
}
beside_torch() { # NAME options...: the same number of layers here
    local layers name=$1
    shift
    layers=$(value torch-most layers) || { skip "PyTorch was not measured (item torch-most)"; return; }
    run_8b "$name" "$layers" full bf16 "$@"
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
