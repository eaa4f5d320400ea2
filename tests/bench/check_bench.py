#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""nd_bench_ops, scripts/bench_cpu and scripts/bench_load with small sizes: their figures fit together. No time is judged.

check_bench.py SOURCE BUILD
"""
import importlib.machinery
import importlib.util
import json
import math
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

SOURCE, BUILD = map(pathlib.Path, sys.argv[1:])
sys.path.insert(0, str(SOURCE / "tests" / "e2e"))
from steps import check
PROGRAM = BUILD / "nd_bench_ops"
QUICK = ["--seconds", "0.0001", "--repeats", "2"]
CPUS = len(os.sched_getaffinity(0))
PASSES = ["memory read", "memory copy", "memory triad", "second cache read"]
# A stand-in for a Python with torch: each peer's last line, for 3 steps, or 3 calls for two sizes of heads.
PEER = """#!/bin/sh
case "$*" in
*bench_attention_peer.py*) echo '{"seconds": [[2, 4, 3], [5, 7, 6]]}' ;;
*bench_peer.py*) echo '{"step_seconds": [9, 9, 8], "tokens_per_step": TOKENS}' ;;
esac
"""
# A run of three steps of 1,024 tokens: the third takes 400 ms in the first round, 500 ms in the second; 900 ms beside busy
# loops.
LAUNCH = """#!/bin/sh
for a; do case "$a" in output.dir=*) folder=${a#output.dir=} ;; esac; done
case "$folder" in *-beside-*) ms=900 rate=1138 ;; *-0) ms=400 rate=2560 ;; *) ms=500 rate=2048 ;; esac
mkdir -p "$folder"
for step in 1 2 3; do
    echo "{\\"step\\": $step, \\"step_ms\\": $ms, \\"tokens_per_second\\": $rate}"
done >"$folder/metrics.jsonl"
echo '{"first_step": 3, "steps": 1, "head_ms": 100, "gemm_ms": 200, "resident_bytes": 3000000}' >"$folder/trace.json"
echo '{"model": {"planned_bytes": 2000000}}' >"$folder/run.json"
"""
# The program with small sizes, but for the products of a step.
OPS = """#!/bin/sh
case "$*" in *--ceiling*) echo '{"step_seconds": 0.25}' && exit ;; esac
case "$*" in *--peak*) set -- "$@" --seconds 0.0001 ;; esac
exec PROGRAM "$@"
"""


def near(a, b):
    return math.isclose(a, b, rel_tol=1e-3) # figures are printed with four decimals and more


def call(arguments, status=0, environment=None, program=PROGRAM):
    done = subprocess.run([str(a) for a in [program, *arguments]], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=250,
                          env={**os.environ, **(environment or {})})
    check(done.returncode == status, f"{arguments} ended with {done.returncode}, not {status}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done


def last(done):
    return json.loads(done.stdout.splitlines()[-1])


def check_refusals():
    for arguments, words in (([["--frobnicate"], ["there is no option --frobnicate", "--peak"]]), (["--threads", "0"], ["--threads", '"0"', "1 to"]),
                             (["--repeats"], ["--repeats", "whole number"]), (["--seconds", "-1"], ["--seconds", "above 0"]),
                             (["--head-dim", "8"] * 9, ["--head-dim", "8 times"]),
                             (["--peak", "--threads", CPUS + 1], [f"--threads is {CPUS + 1}", f"at most {CPUS}"]),
                             (["--attention", "--peak"], ["--attention and --peak are two measurements"]),
                             (["--ceiling", "--threads", "1", "--peak"], ["--ceiling and --peak are two"]),
                             (["--stand-in", "--peak"], ["--stand-in goes with", "not with --peak"]),
                             (["--mebibytes", "3", "--attention"], ["--mebibytes goes with --peak, not with --attention"]),
                             (["--sequence", "64"], ["--sequence goes with --attention, not with products"]),
                             (["--ceiling", "--heads", "1"], ["--heads goes with --attention, not with --ceiling"]),
                             (["--ceiling", "--head-dim", "8"], ["--head-dim goes with --attention, not with --ceiling"]),
                             (["--attention", "--seconds", "1"], ["--seconds goes with --peak, not with --attention"])):
        done = call(arguments, 2)
        check(all(w in done.stderr for w in words) and done.stderr.count("\n") == 1, f"{arguments}: {done.stderr!r}")
        check(not done.stdout, f"{arguments} prints {done.stdout!r}")
    done = call(["--peak", "--mebibytes", 1 << 20], 71)
    check("--mebibytes" in done.stderr and done.stderr.count("\n") == 1 and not done.stdout, f"no room: {done.stderr!r} {done.stdout!r}")


def check_spin():
    """libgomp waits as in a worker, unless the user says how."""
    for variable, count in (({}, "2000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "passive"}, "0")):
        unset = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
        done = subprocess.run([PROGRAM, "--help"], env={**unset, **variable, "OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True)
        counts = re.findall("GOMP_SPINCOUNT = '(.*)'", done.stderr) # one for each time that the program is executed
        check(counts[-1:] == [count], f"{variable}: libgomp has GOMP_SPINCOUNT {counts}")


def check_peak(isa, threads):
    """The figures of one instruction set; "" is that of the CPU."""
    record = last(call(["--peak", "--mebibytes", "1", "--threads", threads, *QUICK], environment={"ND_CPU_ISA": isa}))
    check(isa in ("", record["isa"]), f"asked for {isa}, got {record['isa']}")
    check(record["threads"] == threads and 1 <= record["cores"] <= threads, f"threads and cores: {record}")
    products = record["products"]
    check(near(record["peak"], max(p["gflops"] for p in products)), f"the peak is not the best product: {record}")
    check(products[-1]["operands"] == "f32" and near(record["f32"], products[-1]["gflops"]), f"F32: {record}")
    check(any(p["instruction"] == record["instruction"] for p in products), f"the peak's instruction: {record}")
    for p in products:
        check(0 < p["median_gflops"] <= p["gflops"] and p["ghz"] > 0, f"{isa}: {p}")
        if p["allowed_gflops"] is None: # there is no such instruction
            check(p["instruction"] == "TDPBF16PS in C" and p["share"] == 0, f"{isa}: nothing allowed: {p}")
            continue
        if p["share"] > 0.01: # what is emulated has too few digits
            check(near(p["share"], p["gflops"] / p["allowed_gflops"]), f"{isa}: the share is not its quotient: {p}")
        a_cycle = p["allowed_gflops"] / p["ghz"] / record["cores"]
        check(near(a_cycle, round(a_cycle)) and round(a_cycle) in (8, 32, 64, 1024), f"{isa}: {a_cycle} FLOP a cycle")
    if isa == "amx_emulated":
        check(products[0]["operands"] == "bf16" and products[0]["allowed_gflops"] is None, f"the tiles: {products[0]}")
    check(list(record["gb_per_second"]) == PASSES, f"memory: {record['gb_per_second']}")
    check(all(0 < r["median"] <= r["best"] for r in record["gb_per_second"].values()), f"memory: {record['gb_per_second']}")
    return record["isa"]


def check_peaks():
    levels = ["baseline", "avx2", "avx512", "avx512_bf16", "amx"]
    own = check_peak("", min(2, CPUS))
    for isa in levels[: levels.index(own) + 1]:
        check_peak(isa, 1)
    check_peak("amx_emulated", CPUS)
    record = last(call(["--peak", "--mebibytes", "0", *QUICK]))
    check(record["gb_per_second"] == {} and record["threads"] == CPUS, f"without memory: {record}")


def check_attention():
    record = last(call(["--attention", "--sequence", "40", "--heads", "3", "--head-dim", "16", "--head-dim", "24", "--repeats", "2"]))
    check([a["head_dim"] for a in record["attention"]] == [16, 24], f"heads: {record}")
    windowed = last(call(["--attention", "--sequence", "40", "--heads", "3", "--head-dim", "16", "--window", "5", "--repeats", "1"]))
    check(windowed["attention"][0]["forward"]["flops"] == 4 * 16 * 3 * (40 * 5 - 10), f"scores in a window: {windowed}")
    alone = last(call(["--attention", "--sequence", "40", "--heads", "3", "--head-dim", "16", "--documents", "1", "--repeats", "1"]))
    scores = alone["attention"][0]["forward"]["flops"] / (4 * 16 * 3)
    check(40 <= scores < 200, f"scores of short documents: {alone}")
    for a in record["attention"]:
        pairs = 3 * 40 * 41 // 2 # heads, scores that are not masked
        check(a["forward"]["flops"] == 2 * 2 * pairs * a["head_dim"], f"forward's work: {a}")
        check(a["backward"]["flops"] == 5 * 2 * pairs * a["head_dim"], f"backward's work: {a}")
        check(all(0 < a[d]["seconds"] <= a[d]["median_seconds"] for d in ("forward", "backward")), f"times: {a}")


def check_stand_in():
    """Attention and a product with AVX-512 in place of tiles: a tile product takes at least a part of its 16 cycles."""
    arguments = ["--stand-in", "--attention", "--sequence", 256, "--head-dim", 32, "--threads", 1, "--repeats", 2]
    if "avx512f" not in pathlib.Path("/proc/cpuinfo").read_text().split():
        check("made of AVX-512" in call(arguments, 2).stderr, "the refusal of --stand-in")
        return
    done = call(arguments)
    check(done.stdout.startswith("stand-in for AMX: nothing is computed"), f"the first line: {done.stdout}")
    record = last(done)
    check(record["isa"] == "amx_stand_in", f"the stand-in's name: {record}")
    for direction in ("forward", "backward"):
        d = record["attention"][0][direction]
        check(0 < d["flops"] / d["seconds"] < 1024 * 8e9, f"{direction} above what a core's tiles can do: {d}")


def load_script():
    sys.path.insert(0, str(SOURCE / "scripts"))
    sys.dont_write_bytecode = True
    loader = importlib.machinery.SourceFileLoader("bench_cpu", str(SOURCE / "scripts" / "bench_cpu"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("bench_cpu", loader))
    loader.exec_module(module)
    return module


def check_arithmetic(bench):
    model = dict(hidden_size=4, num_attention_heads=2, num_key_value_heads=1, intermediate_size=3, num_hidden_layers=2, vocab_size=5)
    # q 4x4, k and v 2x4, o 4x4, three of 4x3, two norms of 4; twice, with the last norm and a head of 5x4
    parameters = 2 * (16 + 8 + 8 + 16 + 36 + 8) + 4 + 20
    check(bench.step_flops(model, 7, 10) == 7 * 6 * parameters + 7 * 2 * 3 * (2 * 10 * 4), "the arithmetic of a step")
    turns = []
    bench.in_turns(2, lambda: turns.append("peer"), lambda: turns.append("ours"))
    check(turns == ["peer", "ours", "peer", "ours", "peer"], f"turns: {turns}")
    check(bench.ratios([4, 6, 10], [2, 4]) == [2.5, 2], "ratios of rounds")
    check([bench.most_of_fp8(isa) for isa in ("amx", "avx512_bf16", "avx2")] == [1, 1.25, 1.25], "the bound of FP8")
    peak = bench.Peak(None)
    peak.records = [dict(peak=100, cores=2, isa="avx2"), dict(peak=120, cores=2, isa="avx2"), dict(peak=90, cores=2, isa="avx2")]
    check([peak.gflops(n) for n in (1, 2, 8)] == [60, 120, 120], "the peak of some cores")


def make_programs(folder):
    """Stand-ins for a Python with torch and for the programs of a build folder."""
    peer, build = folder / "python", folder / "build"
    build.mkdir()
    for path, text in ((peer, PEER.replace("TOKENS", "1024")), (build / "ndlaunch", LAUNCH), (build / "ndtrain", ""),
                       (build / "nd_bench_ops", OPS.replace("PROGRAM", str(PROGRAM.resolve())))):
        path.write_text(text)
        path.chmod(0o755)
    return peer, build


def check_load(build, folder):
    script, out = SOURCE / "scripts" / "bench_load", folder / "load.json"
    done = call(["--rows", "single", "--build", build, "--rounds", 2, "--steps", 3, "--json", out], program=script)
    record = json.loads(out.read_text())["single"]
    check(record["alone"] == [[400], [500], [500]] and record["beside"] == [[900], [900]], f"alone and beside: {record}")
    check(all(map(near, record["ratios"], [2, 1.8])), f"beside over the mean of those around: {record}")
    check("1.90 (1.80 to 2.00)" in done.stdout, f"the row's ratio:\n{done.stdout}")
    done = call(["--build", folder], 1, program=script)
    check(f"{folder / 'ndlaunch'} is missing" in done.stderr and done.stderr.count("\n") == 1, f"missing: {done.stderr}")


def check_more(build, folder):
    """The FP8 step, the step with micro-batches and the long step of bench_cpu."""
    script, out = SOURCE / "scripts" / "bench_cpu", folder / "more.json"
    done = call(["--rows", "--fp8", "--micros", "--long", "--build", build, "--rounds", 2, "--steps", 3, "--json", out], program=script)
    record = json.loads(out.read_text())
    outside = {k: [sum(t.values()) - t["head"] for t in record["fp8"][k]] for k in ("bf16", "fp8")}
    check(outside == {"bf16": [300, 400, 400], "fp8": [300, 400]}, f"steps without the head: {outside}")
    ratios = [300 / 350, 1]
    check(all(map(near, record["fp8"]["ratios"], ratios)), f"FP8 over the mean of those around: {record['fp8']['ratios']}")
    most = 1 if record["isa"] == "amx" else 1.25
    check(f"{statistics.median(ratios):.2f} (at most {most:.2f})" in done.stdout, f"FP8's bound:\n{done.stdout}")
    micros = record["micros"]
    check(micros["kept"]["ours"] == [400, 500] and micros["anew"]["ours"] == [400, 500, 500], f"micro-batches: {micros}")
    check(all(map(near, micros["ratios"], [450 / 400, 1])), f"anew over kept: {micros['ratios']}")
    check(f"{statistics.median([450 / 400, 1]):.3f} times as fast" in done.stdout, f"micro-batches:\n{done.stdout}")
    for r in (*record["fp8"]["steps"].values(), micros["kept"], micros["anew"], record["long"]):
        check(r["share"] > 0 and near(r["share"], r["gflop"] / statistics.median(r["ours"]) * 1e3 / r["peak_gflops"]), f"share: {r}")
    if record["isa"] != "amx":
        for words in ("needs AMX: FP8 step", "needs AMX: a step of 128,000 tokens, at most 300 s, goal 120 s"):
            check(words in done.stdout, f"no line of {words}:\n{done.stdout}")
    check("at most 300, goal 120" in done.stdout and "+50.0%" in done.stdout, f"the long step:\n{done.stdout}")


def check_script(bench, peer, build, folder):
    script = SOURCE / "scripts" / "bench_cpu"
    out = folder / "figures.json"
    arguments = ["--build", build, "--rounds", 2, "--steps", 3, "--sequence", 64, "--json", out]
    done = call(["--rows", "single", "attention", *arguments], program=script, environment={"ND_PEER_PYTHON": str(peer)})
    record = json.loads(out.read_text())
    check(sum(bool(r["gb_per_second"]) for r in record["peak"]) == 1, f"memory is measured once: {record['peak']}")
    best = max(r["peak"] for r in record["peak"])
    (row,) = record["rows"]
    check(row["ours"] == [400, 500] and row["peer"] == [8000] * 3 and row["products"] == [250] * 3, f"samples: {row}")
    check(row["ratios"] == [20, 16] and row["product_shares"] == [0.625, 0.5], f"ratios: {row}")
    model = json.loads((SOURCE / "configs" / "bench" / "llama-56m.json").read_text())
    check(row["tokens"] == 1024 and near(row["gflop"], bench.step_flops(model, 1024, 1024) / 1e9), f"work: {row}")
    rows = [row, *record["attention"]]
    for r in rows:
        middle = sum(sorted(r["ours"])) / 2 # of two
        check(near(r["gflops"], r["gflop"] / middle * 1e3), f"rate: {r}")
        cores = record["peak"][0]["cores"]
        check(near(r["peak_gflops"], best * min(r["threads"], cores) / cores), f"peak: {r}")
        check(r["share"] > 0 and near(r["share"], r["gflops"] / r["peak_gflops"]), f"share: {r}")
    check([a["head_dim"] for a in record["attention"]] == [64, 128], "heads")
    check(record["attention"][0]["peer"] == [2000, 4000, 3000] * 3 and record["attention"][1]["peer_medians"] == [6000] * 3, "torch's attention")
    for isa, name in bench.MISSING.items():
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"needs {name}: ")]
        # of the row single, a step's share, products alone, attention and its share; those of AVX512_BF16 have no shares
        wanted = 0 if bench.LEVELS.index(record["isa"]) >= bench.LEVELS.index(isa) else {"amx": 5, "avx512_bf16": 2}[isa]
        check(len(lines) == wanted, f"{wanted} bounds need {name}:\n{done.stdout}")
    line = next(line for line in done.stdout.splitlines() if line.startswith("1 worker"))
    check(line.split()[4:10] == ["8,000.0", "8,000.0", "400.0", "450.0", "16.00", "18.00"], f"least and median: {line}")
    for words in ("share of the peak", "products alone", "attention, heads of 128, forward", *PASSES):
        check(words in done.stdout, f"no line of {words}:\n{done.stdout}")
    peer.write_text(PEER.replace("TOKENS", "2048"))
    done = call(["--rows", "single", *arguments, "--rounds", 1], 1, {"ND_PEER_PYTHON": str(peer)}, script)
    check("1024, 2048" in done.stderr.splitlines()[-1], f"other tokens: {done.stderr}")
    done = call(["--build", folder], 1, program=script)
    check(f"{folder / 'nd_bench_ops'} is missing; run scripts/build" in done.stderr and done.stderr.count("\n") == 1, f"missing: {done.stderr}")
    done = call(["--build", build], 1, {"ND_PEER_PYTHON": "/nonexistent/python"}, script)
    check("ND_PEER_PYTHON is /nonexistent/python" in done.stderr and done.stderr.count("\n") == 1, f"no Python: {done.stderr}")


def check_terminated(folder):
    """A benchmark that is ended leaves no program behind."""
    pid_file = folder / "pid"
    command = ["sh", "-c", f"echo $$ > {pid_file}.part && mv {pid_file}.part {pid_file} && exec sleep 300"]
    bench = subprocess.Popen([sys.executable, "-c", f"import bench_run; bench_run.run({command!r}, 300)"], cwd=SOURCE / "scripts")
    for _ in range(600):
        if pid_file.exists():
            break
        time.sleep(0.1)
    bench.terminate()
    check(bench.wait(60) == 128 + signal.SIGTERM, f"ended with {bench.returncode}")
    left = pathlib.Path(f"/proc/{pid_file.read_text().strip()}/stat")
    for _ in range(600):
        if not left.exists() or left.read_text().rsplit(")", 1)[1].split()[0] == "Z":  # nobody may wait for it
            return
        time.sleep(0.1)
    check(False, f"still there: {left.read_text()}")


def main():
    check_refusals()
    check_spin()
    check_peaks()
    check_attention()
    check_stand_in()
    bench = load_script()
    check_arithmetic(bench)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        peer, build = make_programs(folder)
        check_terminated(folder)
        check_load(build, folder)
        check_more(build, folder)
        check_script(bench, peer, build, folder)
    print("check_bench: the figures of nd_bench_ops, bench_cpu and bench_load fit together")


main()
