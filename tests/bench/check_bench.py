#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""nd_bench_ops with small sizes: its figures fit together. No time is judged.

check_bench.py BUILD
"""
import json
import math
import os
import pathlib
import subprocess
import sys

BUILD = pathlib.Path(sys.argv[1])
PROGRAM = BUILD / "nd_bench_ops"
QUICK = ["--seconds", "0.0001", "--repeats", "2"]
PASSES = ["memory read", "memory copy", "memory triad", "second cache read"]


def check(holds, words):
    if not holds:
        sys.exit(f"check_bench: {words}")


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
                             (["--peak", "--mebibytes", 1 << 20], ["--mebibytes"])):
        done = call(arguments, 71 if "--mebibytes" in arguments else 2)
        check(all(w in done.stderr for w in words) and done.stderr.count("\n") == 1, f"{arguments}: {done.stderr!r}")
        check(not done.stdout, f"{arguments} prints {done.stdout!r}")


def check_peak(isa, threads):
    """The figures of one instruction set; "" is that of the CPU."""
    record = last(call(["--peak", "--mebibytes", "1", "--threads", threads, *QUICK], environment={"ND_CPU_ISA": isa}))
    check(isa in ("", record["isa"]), f"asked for {isa}, got {record['isa']}")
    check(record["threads"] == threads and 1 <= record["cores"] <= min(threads, len(os.sched_getaffinity(0))), f"threads and cores: {record}")
    products = record["products"]
    check(near(record["peak"], max(p["gflops"] for p in products)), f"the peak is not the best product: {record}")
    check(products[-1]["operands"] == "f32" and near(record["f32"], products[-1]["gflops"]), f"F32: {record}")
    check(any(p["instruction"] == record["instruction"] for p in products), f"the peak's instruction: {record}")
    for p in products:
        check(0 < p["median_gflops"] <= p["gflops"] and p["ghz"] > 0, f"{isa}: {p}")
        if p["gflops"] > 1: # what is emulated has too few digits
            check(near(p["share"], p["gflops"] / p["allowed_gflops"]), f"{isa}: the share is not its quotient: {p}")
        a_cycle = p["allowed_gflops"] / p["ghz"] / record["cores"]
        check(near(a_cycle, round(a_cycle)) and round(a_cycle) in (8, 32, 64, 1024), f"{isa}: {a_cycle} FLOP a cycle")
    if isa == "amx_emulated":
        check(products[0]["operands"] == "bf16" and round(products[0]["allowed_gflops"] / products[0]["ghz"] / record["cores"]) == 1024,
              f"the tiles: {products[0]}")
    check(list(record["gb_per_second"]) == PASSES, f"memory: {record['gb_per_second']}")
    check(all(0 < r["median"] <= r["best"] for r in record["gb_per_second"].values()), f"memory: {record['gb_per_second']}")
    return record["isa"]


def check_peaks():
    levels = ["baseline", "avx2", "avx512", "avx512_bf16", "amx"]
    own = check_peak("", 2)
    for isa in levels[: levels.index(own) + 1]:
        check_peak(isa, 1)
    check_peak("amx_emulated", 3)
    record = last(call(["--peak", "--mebibytes", "0", *QUICK]))
    check(record["gb_per_second"] == {} and record["threads"] == len(os.sched_getaffinity(0)), f"without memory: {record}")


def check_attention():
    record = last(call(["--attention", "--sequence", "40", "--heads", "3", "--head-dim", "16", "--head-dim", "24", "--repeats", "2"]))
    check([a["head_dim"] for a in record["attention"]] == [16, 24], f"heads: {record}")
    for a in record["attention"]:
        pairs = 3 * 40 * 41 // 2 # heads, scores that are not masked
        check(a["forward"]["flops"] == 2 * 2 * pairs * a["head_dim"], f"forward's work: {a}")
        check(a["backward"]["flops"] == 5 * 2 * pairs * a["head_dim"], f"backward's work: {a}")
        check(all(0 < a[d]["seconds"] <= a[d]["median_seconds"] for d in ("forward", "backward")), f"times: {a}")


def main():
    check_refusals()
    check_peaks()
    check_attention()
    print("check_bench: the figures of nd_bench_ops fit together")


main()
