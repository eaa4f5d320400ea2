# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu/visit pack: makes build-visit/, which works wherever it is copied, without the checkout."""
import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess

import bench
import build
import check
import conformance
from place import Failure, Place
from visit import DATA, TOP, small_runs

TO = pathlib.Path("build-visit")
MOST_BYTES = 48 << 20
GLIBC = (2, 39)  # of the machines that are visited
PROGRAMS = (*build.PROGRAMS, *build.TESTS)
DOUBLES = ("ndlaunch", "ndtrain", "nd_bench_kernels", "nd_bench_gpu", "test_hostcuda_ops")
# Each machine has its own, and what is loaded there may need newer ones than those here.
OF_THE_SYSTEM = re.compile(r"linux-vdso.*|/.*|lib(c|m|dl|rt|pthread|util|resolv|gcc_s|stdc\+\+)\.so.*")
# Old tags, so that the folder also counts for what the libraries need themselves.
LINK = "-Wl,--disable-new-dtags,-rpath,$ORIGIN/../lib"


def run(*command):
    done = subprocess.run([str(c) for c in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise Failure(f"{command[0]} ended with {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout


def make_programs(place):
    """Those for Hopper and those of the doubles, with the same options; what was built."""
    if not (place.build / "build.ninja").exists() and build.configure(place) != 0:
        raise Failure(f"{place.build} could not be configured")
    run("meson", "configure", place.build, "-Dtests=enabled", "-Dgpu_architectures=90a", f"-Dc_link_args={LINK}", f"-Dcpp_link_args={LINK}")
    print("visit: building", flush=True)
    activity = ["tests/gpu/libnd_activity.so"] if "build tests/gpu/libnd_activity.so:" in (place.build / "build.ninja").read_text() else []
    run("ninja", "-C", place.build, *PROGRAMS, *activity, *(f"tests/hostcuda/{name}" for name in DOUBLES))
    return [place.build / name for name in (*PROGRAMS, *activity)]


def needed(program):
    """{name: path} of the libraries of a program that are not the system's own."""
    lines = [line.split() for line in run("ldd", program).splitlines()]
    return {line[0]: line[2] for line in lines if not OF_THE_SYSTEM.fullmatch(line[0])}


def copy_programs(programs):
    """Stripped, with all libraries that they need. The C library may not be newer than that of the machines that are visited."""
    libraries = {name: path for program in programs for name, path in needed(program).items()}
    for folder, files in (("bin", [(p.name, p) for p in programs]), ("lib", libraries.items())):
        (TO / folder).mkdir()
        for name, path in files:
            run("strip", "--strip-unneeded", path, "-o", TO / folder / name)
            versions = re.findall(r"GLIBC_(\d+)\.(\d+)", run("readelf", "--version-info", "--wide", TO / folder / name))
            newest = max((tuple(map(int, v)) for v in versions), default=GLIBC)
            if newest > GLIBC:
                raise Failure(f"{name} needs glibc {newest[0]}.{newest[1]}, and a visited machine has {GLIBC[0]}.{GLIBC[1]}; "
                              "pack on an older system, for instance Debian 12")


def copy_files(commit):
    scripts = [path for path in pathlib.Path("scripts/gpu").glob("*.py") if path.name not in ("pack.py", "results.py")]
    for path in (*scripts, *map(pathlib.Path, ("scripts/run_folder.py", "scripts/find_cuda", *DATA))):
        (TO / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, TO / path)
    shutil.copy("scripts/gpu/visit", TO / "visit")
    shutil.copytree("tests/parity/goldens", TO / "goldens")
    (TO / "COMMIT").write_text(commit + "\n")


@contextlib.contextmanager
def output_to(path):
    """Of this process and what it starts."""
    kept = [os.dup(number) for number in (1, 2)]
    with open(path, "a") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
        try:
            yield
        finally:
            for number, old in zip((1, 2), kept):
                os.dup2(old, number)
                os.close(old)


def short_runs(place):
    for name, options in small_runs():
        yield name, lambda options=options, name=name: conformance.train_small(place, name, *options)
    for precision in ("bf16", "fp8"):
        yield f"quarter-{precision}", lambda precision=precision: bench.train_quarter(place, precision)


def expected_losses(build_folder):
    """Of the short runs of smoke, by the doubles' programs, at the sizes of a GPU and of the rehearsal."""
    found = {}
    for size, dry in (("toy", True), ("real", False)):
        place = Place(dry=dry, out=(build_folder / "losses" / size), build=build_folder, programs=build_folder / "tests" / "hostcuda",
                      tests=build_folder, jobs=2, seconds_per_test=0, gpu="doubles of an H200, 9.0", commit="", peer="", own_library_path="",
                      small_steps=5, small_shape=(256, 1))
        place.make_folders()
        log = place.out / "log"
        found[size] = {}
        for name, train in short_runs(place):
            print(f"visit: losses by the doubles, {size} size: {name}", flush=True)
            with output_to(log):
                made = train()
            found[size][name] = made.losses
    return found


def expect():
    """What smoke compares two layers of the 8B shape with."""
    os.chdir(TOP)
    build_folder = pathlib.Path(os.environ.get("ND_VISIT_BUILD") or "build").resolve()
    place = Place(dry=False, out=build_folder / "two-layers", build=build_folder, programs=build_folder, tests=build_folder, jobs=2,
                  seconds_per_test=0, gpu="CPU 8.9", commit="", peer="", own_library_path="")
    place.make_folders()
    try:
        found = {precision: bench.cpu_two_layers(place, precision) for precision in ("bf16", "fp8")}
    except Failure:
        raise check.WrongUse("the runs on the CPU failed") from None
    pathlib.Path(bench.TWO_LAYERS).write_text(json.dumps(found, indent=1) + "\n")
    return 0


def sums():
    for path in sorted(p for p in TO.rglob("*") if p.is_file()):
        yield f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(TO)}\n"


def pack():
    os.chdir(TOP)
    build_folder = pathlib.Path(os.environ.get("ND_GPU_BUILD") or "build-gpu").resolve()
    place = Place(dry=False, out=TO, build=build_folder, programs=build_folder, tests=build_folder, jobs=2, seconds_per_test=0, gpu="",
                  commit=check.source_version(), peer="", own_library_path="")
    try:
        programs = make_programs(place)
        shutil.rmtree(TO, ignore_errors=True)
        TO.mkdir()
        copy_programs(programs)
        copy_files(place.commit)
        (TO / "expected.json").write_text(json.dumps(expected_losses(build_folder), indent=1) + "\n")
    except Failure as why:
        raise check.WrongUse(f"pack failed: {why}") from None
    (TO / "SHA256SUMS").write_text("".join(sums()))
    size = sum(p.stat().st_size for p in TO.rglob("*") if p.is_file())
    print(f"visit: {TO} of commit {place.commit} has {size / 2**20:.1f} MiB in {sum(1 for _ in TO.rglob('*'))} files")
    if size > MOST_BYTES:
        raise check.WrongUse(f"{TO} may have {MOST_BYTES >> 20} MiB, since so much can be brought along")
    return 0
