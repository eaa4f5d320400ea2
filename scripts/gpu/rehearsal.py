# SPDX-License-Identifier: Apache-2.0
"""What scripts/gpu/rehearse runs in a root without a GPU: /visit/carried is build-visit/, /visit/doubles the same with the doubles'
programs. A line "ok WHAT" or "not ok WHAT: WHY" for each check. With the argument `short` it leaves out what no C library changes:
a full visit, and visits that fail, hang or are killed."""
import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time

CARRIED, DOUBLES = pathlib.Path("/visit/carried"), pathlib.Path("/visit/doubles")
MOST_BYTES, FILE_MOST, FILES_MOST, COMMAND_MOST = 48 << 20, 16 << 20, 8, 2000
DRY_SECONDS = 570  # the doubles take long where others use the processors
NAME = re.compile(r"[A-Za-z0-9._-]+")
# The commands that one types on a visited machine.
COMMANDS = ("build-visit/visit smoke 120", "build-visit/visit full 570")
NEEDS_A_GPU = {"nd_bench_gpu": [], "nd_bench_kernels": [], "test_gpu_ops": ["--filter=matmul/*"], "ndlaunch": [
    "--device", "cuda", "--workers", "1", "--set", "model.config=configs/model-small.json", "--set", "data.path=COMMIT", "--set",
    "data.tokenizer=bytes", "--sequence-length", "4", "--set", "output.dir=/tmp/none"]}
# Items of which a dry run skips some: there is no torch in the roots, and nothing records what a GPU does.
SKIPPED = re.compile(r"torch-.*|8b-torch-same|profile-.*")


class Wrong(Exception):
    """What a check found."""


def expect(holds, words):
    if not holds:
        raise Wrong(words)


def said_by(command, code=None, **options):
    done = subprocess.run([str(c) for c in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          **{"cwd": CARRIED, "timeout": 300, **options})
    expect(code is None or done.returncode == code, f"{command[0]} ended with {done.returncode}, not {code}: {done.stdout[-1500:]}")
    return done.stdout


def files_of(folder):
    return [p for p in folder.rglob("*") if p.is_file()]


def the_folder():
    """Its size, names and sums."""
    files = files_of(CARRIED)
    size = sum(p.stat().st_size for p in files)
    expect(size <= MOST_BYTES, f"it has {size} bytes")
    bad = [p for p in CARRIED.rglob("*") if not NAME.fullmatch(p.name) or p.is_symlink()]
    expect(not bad, f"names or links: {bad}")
    sums = dict(reversed(line.split("  ")) for line in (CARRIED / "SHA256SUMS").read_text().splitlines())
    found = {str(p.relative_to(CARRIED)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files if p.name != "SHA256SUMS"}
    expect(sums == found, f"sums that differ: {set(sums.items()) ^ set(found.items())}")
    expect(all(len(command) <= COMMAND_MOST for command in COMMANDS), "a command is too long")


def libraries_are_there():
    for folder in (CARRIED, DOUBLES):
        for program in (folder / "bin").iterdir():
            said = said_by(["ldd", program], env={"PATH": os.environ["PATH"]})
            expect("not found" not in said and "=>" in said, f"{program}: {said}")


def they_start():
    for name in ("ndlaunch", "ndtrain"):
        expect(re.search(r"\d+\.\d+\.\d+", said_by([CARRIED / "bin" / name, "--version"], 0)), f"{name} says no version")
    for name in ("test_gpu_ops", "test_gpu_goldens"):
        expect(re.search(r"^[a-z0-9_]+: [1-9]", said_by([CARRIED / "bin" / name, "--list"], 0), re.MULTILINE), f"{name} lists no test")


def plan_works():
    said = said_by([CARRIED / "bin" / "ndtrain", "plan", "--explain", "--device", "cuda", "--workers", "1", "--set",
                    "model.config=configs/llama-3.1-8b/config.json", "--set", "data.path=COMMIT", "--sequence-length", "8192"], 1)  # it does not fit
    expect(re.search(r"total +[\d.]+ GiB", said) and "H200" in said, said[-1500:])


def no_driver_is_a_sentence():
    for name, arguments in NEEDS_A_GPU.items():
        done = subprocess.run([CARRIED / "bin" / name, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, cwd=CARRIED, timeout=60)
        lines = [line for line in done.stdout.splitlines() if "driver" in line]
        expect(done.returncode != 0 and lines, f"{name} ended with {done.returncode}: {done.stdout[-1500:]}")
    for kind in ("smoke", "full"):
        said = said_by([CARRIED / "visit", kind], 2)
        expect(said.startswith("visit: this machine has no GPU, as the NVIDIA driver") and said.count("\n") == 1, said)


def wheels_come_first():
    said = said_by([sys.executable, "-B", "-c", """import os, sys, types
sys.path[:0] = ["scripts/gpu", "scripts"]
import build, check, json
check.set_paths(types.SimpleNamespace(peer="python3"))
print(json.dumps(build.library_versions()))"""], 0)
    found = json.loads(said)
    for name in ("cuBLASLt", "cuDNN", "NCCL"):
        expect("-packages/nvidia/" in found.get(f"{name}_file", "") and found[name] > 20000, f"{found}")


def facts_of_a_device():
    """By a driver that only answers, built here: 1000 and the number of each attribute."""
    source = pathlib.Path("/tmp/driver/libcuda.c")
    source.parent.mkdir()
    source.write_text("""#include <stddef.h>
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strcpy(name, "a GPU"); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)140 << 30; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : attribute == 76 ? 0 : 1000 + attribute; return 0; }
""")
    said_by(["gcc", "-shared", "-fPIC", "-o", source.parent / "libcuda.so.1", source], 0)
    said = said_by([sys.executable, "-B", "-c", """import sys
sys.path[:0] = ["scripts/gpu", "scripts"]
import facts, json
print(json.dumps(facts.device_properties()))"""], 0, env={**os.environ, "LD_LIBRARY_PATH": str(source.parent)})
    found, attributes = json.loads(said)
    expect(found["deviceVer"] == 900 and found["totalGlobalMem"] == 140 << 30 and found["maxGridSize"] == [1005, 1006, 1007] and
           found["multiProcessorCount"] == 1016 and len(found) == 23 and len(attributes) > 100, f"{found}")


def report_in(out, needed=None):
    """The items, all of which, or those named, are also in the archive and the page."""
    names = {p.name for p in out.iterdir() if not p.name.endswith(".new")}
    expect(names == {"visit.md", "visit.json", "visit.tar.gz"}, f"OUT holds {names}")
    files = files_of(out)
    expect(len(files) <= FILES_MOST and all(p.stat().st_size <= FILE_MOST and NAME.fullmatch(p.name) for p in files), f"{files}")
    items = json.loads((out / "visit.json").read_text())["items"]
    with tarfile.open(out / "visit.tar.gz") as tar:
        packed = {pathlib.Path(name).name for name in tar.getnames()}
    items = {item["item"]: item for item in items}
    text = (out / "visit.md").read_text()
    missing = [name for name in (items if needed is None else needed)
               if name not in items or f"{name}.json" not in packed or f"| {name} | {items[name]['state']} |" not in text]
    expect(not missing, f"not in visit.tar.gz or visit.md: {missing}")
    return items


def goes_through(kind):
    """With the doubles' programs, in a folder of its own."""
    folder, out = pathlib.Path(f"/tmp/{kind}"), pathlib.Path(f"/tmp/out-{kind}")
    shutil.copytree(DOUBLES, folder)
    out.mkdir()
    begin = time.monotonic()
    said = said_by([folder / "visit", kind, str(DRY_SECONDS), "--dry-run"], cwd="/", env={**os.environ, "OUT": str(out)}, timeout=DRY_SECONDS + 60)
    items = report_in(out)
    states = {name: item["state"] for name, item in items.items()}
    bad = {name: (state, items[name]["said"]) for name, state in states.items()
           if state != "done" and not (state == "skipped" and SKIPPED.fullmatch(name))}
    changed = [value["changed_files"] for item in items.values() for value in item["results"] if "changed_files" in value]
    expect(changed == ([[]] if kind == "smoke" else []), f"files that are not as they were packed: {changed}")
    expect(not bad and len(states) > 8, f"{bad}, {len(states)} items: {said[-3000:]}")
    print(f"{kind}: {len(states)} items in {time.monotonic() - begin:.0f} s", flush=True)


def what_fails_runs_again():
    """A program that fails: the item runs once more with the logs of libraries, of which the end is kept."""
    folder, out = pathlib.Path("/tmp/again"), pathlib.Path("/tmp/out-again")
    shutil.copytree(DOUBLES, folder)
    out.mkdir()
    for name in ("ndlaunch", "test_gpu_ops", "nd_bench_gpu"):
        program = folder / "bin" / name
        program.write_text('#!/bin/sh\n[ -z "$CUBLASLT_LOG_FILE" ] || { echo start; head -c 300000 /dev/zero; echo "sync $ND_CUDA_SYNC"; } '
                           '>"$CUBLASLT_LOG_FILE"\nexit 1\n')
    said_by([folder / "visit", "smoke", str(DRY_SECONDS), "--dry-run"], 1, cwd="/", env={**os.environ, "OUT": str(out)})
    items = report_in(out)
    again = items.get("probe-again", {})
    expect(again.get("state") == "failed" and items["small-bf16-again"]["state"] == "failed", f"{items.keys()}")
    with tarfile.open(out / "visit.tar.gz") as tar:
        log = tar.extractfile("visit/data/probe-again.cublaslt.log").read()
    expect(len(log) == 200000 and log.endswith(b"sync 1\n"), f"{len(log)} bytes of log, the last {log[-20:]}")


def the_time_is_kept():
    """A program that hangs ends with the call, which says that the time is up."""
    folder, out = pathlib.Path("/tmp/hangs"), pathlib.Path("/tmp/out-hangs")
    shutil.copytree(DOUBLES, folder)
    out.mkdir()
    (folder / "bin" / "ndlaunch").write_text("#!/bin/sh\nexec sleep 600\n")
    (folder / "bin" / "nd_bench_gpu").write_text("#!/bin/sh\ntrap '' TERM\nwhile :; do sleep 1; done\n")
    begin = time.monotonic()
    said_by([folder / "visit", "smoke", "30", "--dry-run"], cwd="/", env={**os.environ, "OUT": str(out)})
    seconds = time.monotonic() - begin
    expect(seconds <= 31, f"30 seconds were given, and it took {seconds:.1f}")
    expect(report_in(out)["probe"]["state"] == "cut off", "what hangs is cut off")


def killed(moment):
    """All that runs is killed after so many items have begun; what was done is in OUT."""
    folder, out = pathlib.Path(f"/tmp/killed-{moment}"), pathlib.Path(f"/tmp/out-killed-{moment}")
    shutil.copytree(DOUBLES, folder)
    out.mkdir()
    begun = []
    with subprocess.Popen([folder / "visit", "smoke", "--dry-run"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, cwd="/",
                          env={**os.environ, "OUT": str(out)}) as started:
        for line in started.stdout:
            begun += re.findall(r"^visit: (\S+)$", line)
            if len(begun) > moment:
                break
        time.sleep(0.1 * moment)
        started.send_signal(signal.SIGKILL)
        here = str(folder)
        for pid in filter(str.isdigit, os.listdir("/proc")):  # what it started is taken away with the machine
            try:
                if here in pathlib.Path(f"/proc/{pid}/cmdline").read_text() and int(pid) != os.getpid():
                    os.kill(int(pid), signal.SIGKILL)
            except OSError:
                continue
    items = report_in(out, begun[:moment])
    states = [items[name]["state"] for name in begun[:moment]]
    expect(states == ["done"] * moment, f"{begun}: {states}")


def outcome(what, check, *arguments):
    try:
        check(*arguments)
        return f"ok {what}"
    except (Wrong, OSError, ValueError, KeyError, subprocess.TimeoutExpired, tarfile.TarError) as why:
        return f"not ok {what}: {why!r}"


def main():
    checks = [("smoke", goes_through, "smoke"), ("full", goes_through, "full"),
              ("size, names and sums of the folder", the_folder), ("ldd of each program is complete", libraries_are_there),
              ("programs start", they_start), ("plan", plan_works), ("facts of a device", facts_of_a_device), ("no driver is one sentence", no_driver_is_a_sentence),
              ("wheels are opened before the toolkit", wheels_come_first)]
    if sys.argv[1:] == ["short"]:
        checks.remove(("full", goes_through, "full"))
    else:
        checks += [("what fails runs again", what_fails_runs_again), ("the time is kept", the_time_is_kept),
                   *((f"killed in item {moment + 1}", killed, moment) for moment in range(1, 6))]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for line in pool.map(lambda parts: outcome(*parts), checks):
            print(line, flush=True)


if __name__ == "__main__":
    main()
