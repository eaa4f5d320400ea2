# SPDX-License-Identifier: Apache-2.0
"""Some minutes on one GPU: what is packed on a machine without one answers there whether ndtrain works, is right, how fast it is
beside PyTorch, and where the time goes.

  scripts/gpu/visit pack                      makes build-visit/: programs, libraries, scripts, data; copy it to the GPU's machine
  build-visit/visit smoke [SECONDS]           there: facts of the machine, each form of product, short runs (at most 120 s)
  build-visit/visit full [SECONDS [ITEM...]]  there: speeds beside PyTorch, profiles, attention, kernels (at most 570 s); or, in this
                                              order, items of any phase of gpu_check.sh (shell patterns: '8b-half-*')
  scripts/gpu/visit results visit.json ...    writes docs/gpu_results.md, and the rates that `ndtrain plan --explain` reads
  scripts/gpu/visit expect                    the first step of two 8B layers on this machine's CPUs, into scripts/gpu/two_layers.json,
                                              with the programs of build/ (five minutes for each precision, 16 GB of memory)
  scripts/gpu/visit rehearse                  smoke and full without a GPU, in minimal roots of two releases of Debian

smoke and full begin anew with each call. After each item they leave visit.md, visit.json and visit.tar.gz (records, logs, metrics)
in the folder that OUT names, or else in work/smoke and work/full beside the program, complete also where the machine is
taken away in the middle. smoke runs what failed once more, with ND_CUDA_SYNC=1 and the logs of the libraries.

--dry-run in place of a GPU uses toy sizes and the doubles' programs. ND_PEER_PYTHON is the Python with torch (python3).

Exit codes: 0 all is done; 1 something failed; 2 wrong arguments, or no GPU; 3 nothing failed, but something was skipped; 75 the
time is up.
"""
import fnmatch
import json
import os
import pathlib
import shutil
import signal
import sys
import time

TOP = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(1, str(TOP / "scripts"))

import build
import check
import conformance
import facts
import report
from place import Place
from runner import GRACE, Item, Runner

STARTED = time.monotonic()
MOST = {"smoke": 120, "full": 570}
RECIPES = ("tensorwise", "rowwise", "delayed")
DATA = ("configs/model-small.json", "configs/llama-3.1-8b/config.json", "scripts/gpu/two_layers.json")


def small_runs():
    """(name, options) of the short runs whose losses the doubles have computed too."""
    yield "bf16", ("--precision", "bf16")
    for recipe in RECIPES:
        yield recipe, ("--precision", "fp8", "--set", f"fp8.recipe={recipe}")


def smoke_items(place):
    import bench

    yield Item("machine", "machine", 5, 20, build.machine)
    yield Item("facts", "machine", 5, 20, facts.collect)
    yield Item("probe", "smoke", 10, 30, bench.with_tokens_that_fit, place.programs / "nd_bench_gpu", "--probe",
               *(["--toy"] if place.dry else []))
    for name, options in small_runs():
        yield Item(f"small-{name}", "smoke", 6, 30, conformance.small_as_doubles, name, *options)
    for precision in ("bf16", "fp8"):
        yield Item(f"quarter-{precision}", "smoke", 5, 30, bench.quarter, precision)
    for precision in ("bf16", "fp8"):
        yield Item(f"8b-two-{precision}", "smoke", 12, 40, bench.two_layers, precision)
    yield Item("nccl-alone", "smoke", 5, 30, conformance.tests_of, "ops", "nccl_alone/*")
    yield Item("ops", "smoke", 20, 60, conformance.tests_of, "ops", "!(attention*|nccl*)/*")


def full_items(place):
    yield Item("machine", "machine", 5, 20, build.machine)
    yield from check.first_items(place)


def named_items(place, patterns):
    """Of all phases, in the order of the patterns."""
    known = {item.name: item for items in (smoke_items, full_items, check.conformance_items, check.bench_items) for item in items(place)}
    for pattern in patterns:
        found = fnmatch.filter(known, pattern)
        if not found:
            raise check.WrongUse(f"no item is named {pattern}; there are {' '.join(known)}")
        yield from map(known.get, found)


def make_place(kind, dry):
    expected = json.loads((TOP / "expected.json").read_text())["toy" if dry else "real"]
    return Place(dry=dry, out=TOP / "work" / kind, build=TOP, programs=TOP / "bin", tests=TOP / "bin" / "test_gpu",
                 jobs=2 if dry else 4 if os.cpu_count() < 16 else 8, seconds_per_test=300, gpu="doubles of an H200" if dry else check.visible_gpus()[0],
                 commit=(TOP / "COMMIT").read_text().strip(), peer=os.environ.get("ND_PEER_PYTHON") or "python3",
                 own_library_path=os.environ.get("LD_LIBRARY_PATH", ""), small_steps=5, small_shape=(256, 1), micro_batches=8,
                 expected=expected)


def run(kind, seconds, dry, named):
    """smoke or full, in the packed folder."""
    os.chdir(TOP)
    report.NAME = "visit"
    no_gpu = None if dry else check.why_no_gpu()
    if no_gpu:
        raise check.WrongUse(f"this machine has no GPU, as {no_gpu}")
    place = make_place(kind, dry)
    shutil.rmtree(place.out, ignore_errors=True)
    place.make_folders()
    check.set_paths(place)
    facts.bring_up_loopback()
    for program in place.programs.iterdir():
        program.chmod(0o755)
    os.environ["ND_GOLDENS"] = str(TOP / "goldens")
    runner = Runner(place, STARTED + seconds - GRACE, [])
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        signal.signal(number, lambda *_, code=code: sys.exit(code))
    try:
        items = list(named_items(place, named) if named else smoke_items(place) if kind == "smoke" else full_items(place))
        for item in items:
            item.most *= 10 if dry else 1
            runner.run(item)
        for item in items if kind == "smoke" else ():
            runner.run_again(item)
    finally:
        runner.end_child()
        report.deliver(place.out)
    code = report.summary(place.out)
    return 75 if runner.left and code in (0, 3) else code


def main():
    arguments = [a for a in sys.argv[1:] if a != "--dry-run"]
    dry = len(arguments) < len(sys.argv) - 1
    command = arguments[0] if arguments else "--help"
    if command in ("--help", "-h"):
        print(__doc__)
        return 0
    if command in MOST and (len(arguments) <= 2 or command == "full"):
        if not (TOP / "COMMIT").exists():
            raise check.WrongUse(f"{command} runs in the packed folder; scripts/gpu/visit pack makes build-visit/")
        seconds = arguments[1] if len(arguments) > 1 else str(MOST[command])
        if not seconds.isdigit() or int(seconds) < 30 or (int(seconds) > MOST[command] and not dry):
            raise check.WrongUse(f"SECONDS of {command} is {seconds}; it takes 30 to {MOST[command]}")
        return run(command, int(seconds), dry, arguments[2:])
    if command == "pack" and len(arguments) == 1:
        import pack

        return pack.pack()
    if command == "expect" and len(arguments) == 1:
        import pack

        return pack.expect()
    if command == "results" and len(arguments) > 1:
        import results

        return results.write(arguments[1:])
    if command == "rehearse" and len(arguments) == 1:
        os.execv(TOP / "scripts/gpu/rehearse", ["rehearse"])
    raise check.WrongUse("visit takes pack, smoke [SECONDS], full [SECONDS [ITEM...]], results FILE..., expect or rehearse; --help says more")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except check.WrongUse as wrong:
        print(f"visit: {wrong}", file=sys.stderr)
        sys.exit(2)
