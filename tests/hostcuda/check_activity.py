#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""libnd_activity.so and scripts/gpu/activity.py without a GPU: check_activity.py SOURCE LIBRARY FOLDER_OF_CUPTIS_DOUBLE TOOLKIT_LIBRARIES.

The library is loaded as the driver does it, into processes that tell CUPTI's double what ran; one of them is killed. The summary of
made-up records is held to times that were added up by hand.
"""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

SOURCE, LIBRARY, DOUBLE, TOOLKIT = (pathlib.Path(p).resolve() for p in sys.argv[1:5])
sys.path[:0] = [str(SOURCE / "scripts" / "gpu"), str(SOURCE / "tests" / "e2e")]
import activity
from steps import check

# In a process: what the driver does, and then what ran.
PROGRAM = """import ctypes, os, signal, sys
if ctypes.CDLL(sys.argv[1]).InitializeInjection() != 1:
    sys.exit("the first call of CUDA would fail")
cupti = ctypes.CDLL(sys.argv[2])
u64, names = ctypes.c_uint64, {}  # names live as long as the process, as CUPTI's do
def kernel(begin, end, stream, name):
    cupti.nd_double_cupti_kernel(u64(begin), u64(end), stream, names.setdefault(name, name.encode()))
def copy(begin, end, stream, kind, bytes):
    cupti.nd_double_cupti_copy(u64(begin), u64(end), stream, kind, u64(bytes))
def fill(begin, end, stream, bytes):
    cupti.nd_double_cupti_fill(u64(begin), u64(end), stream, u64(bytes))
exec(sys.argv[3])
"""
NORM = "_ZN47_GLOBAL__N__cc3a4e08_14_rmsnorm_fwd_cu_499de64e14forward_kernelIfLi1ELi0ELb0EEEvNS_12forward_argsE"
ADAMW = "_ZN45_GLOBAL__N__f30cd0c9_12_optimizer_cu_781eeae912adamw_kernelEPfi"
PRODUCT, GATHER = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def near(got, want, what):
    check(abs(got - want) < 1e-12, f"{what}: {got}, not {want}")


def run(calls, code=0, cupti=DOUBLE, **variables):
    """What the process writes on stderr."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(cupti), **{k: str(v) for k, v in variables.items()}}
    double = next(DOUBLE.glob("libcupti.so.*[0-9]"))
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(LIBRARY), double.name, calls], env=environment, stderr=subprocess.PIPE,
                          text=True, timeout=60)
    check(done.returncode == code, f"{calls[:80]}: ended with {done.returncode}: {done.stderr}")
    return done.stderr


def what_ran_is_in_the_file(folder):
    path = folder / "once.txt"
    said = run(f"kernel(100, 250, 7, {NORM!r}); kernel(300, 400, 7, {PRODUCT!r}); kernel(400, 410, 13, {NORM!r})\n"
               "copy(420, 430, 7, 8, 4096); fill(440, 445, 7, 64); cupti.nd_double_cupti_lose(3)", ND_ACTIVITY_FILE=path)
    check(said == "", f"said {said}")
    trace = activity.read(path)
    check(trace.lost == 3, f"{trace.lost} lost")
    shape = {"grid": [132, 2, 1], "block": [128, 1, 1], "registers": 64, "shared_bytes": 1536}
    check(trace.events == [(100, 250, 0, 7, "norm", NORM, shape), (300, 400, 0, 7, "products", PRODUCT, shape),
                           (400, 410, 0, 13, "norm", NORM, shape), (420, 430, 0, 7, "copies", "copy, device to device", {"bytes": 4096}),
                           (440, 445, 0, 7, "copies", "fill", {"bytes": 64})], f"{trace.events}")
    check(path.read_text().count(NORM) == 1, "a name is written once")
    out = folder / "perfetto.json"
    done = subprocess.run([sys.executable, SOURCE / "scripts/gpu/activity.py", path, "--perfetto", out], stdout=subprocess.PIPE, text=True)
    check(done.returncode == 0 and "| norm | 0.000 |" in done.stdout and "3 records were lost" in done.stdout, done.stdout)
    rows = json.loads(out.read_text())["traceEvents"]
    slices = [(r["ts"], r["dur"], r["tid"], r["cat"]) for r in rows if r["ph"] == "X"]
    check(slices[:3] == [(0.0, 0.15, 7, "norm"), (0.2, 0.1, 7, "products"), (0.3, 0.01, 13, "norm")], f"{slices}")
    check({r["args"]["name"] for r in rows if r["name"] == "thread_name"} == {"stream 7", "stream 13"}, "a row for each stream")


def a_killed_process_leaves_its_records(folder):
    path, count = folder / "killed.txt", 20000
    run(f"for i in range({count}): kernel(1 + 10 * i, 6 + 10 * i, 7, 'nvjet_%d' % (i % 5))\nos.kill(os.getpid(), signal.SIGKILL)",
        code=-9, ND_ACTIVITY_FILE=path)
    events = activity.read(path).events
    check(count - 1000 < len(events) < count, f"{len(events)} of {count} records")
    check(all(e.begin == 1 + 10 * i and e.name == f"nvjet_{i % 5}" for i, e in enumerate(events)), "records are wrong")
    text = path.read_text()
    path.write_text(text[:-9])  # as where the disk has had no more room, or a copy was made at the moment
    check(len(activity.read(path).events) == len(events) - 1, "a cut line is left out")


def each_process_has_its_file(folder):
    path = folder / "several.txt"
    run("", ND_ACTIVITY_FILE=path)
    check(not path.exists(), "a process that ran nothing left a file")
    for begin in (10, 20, 30):
        run(f"kernel({begin}, {begin + 5}, 7, 'nvjet')", ND_ACTIVITY_FILE=path)
    files = sorted(folder.glob("several.txt*"))
    check(len(files) == 3 and files[0] == path and all(f.name == f"several.txt.{activity.read(f).process}" for f in files[1:]),
          f"{files}")
    check(sorted(activity.read(f).events[0].begin for f in files) == [10, 20, 30], "a process wrote into another's file")


def many_names(folder):
    path = folder / "names.txt"
    run("for i in range(9000): kernel(i + 1, i + 2, 7, 'nvjet_%d' % i)\nfor i in range(9000): kernel(i + 1, i + 2, 8, 'nvjet_%d' % i)",
        ND_ACTIVITY_FILE=path)
    events = activity.read(path).events
    check(len(events) == 18000 and all(e.name == f"nvjet_{e.begin - 1}" for e in events), "names are mixed up")


def what_does_not_work_is_said(folder):
    check("set ND_ACTIVITY_FILE" in run("kernel(1, 2, 7, 'x')"), "no file is named")
    said = run("kernel(1, 2, 7, 'x')", ND_ACTIVITY_FILE=folder / "none" / "x.txt")
    check("x.txt: the file cannot be made; nothing is recorded" in said and said.count("\n") == 1, said)
    said = run("", ND_ACTIVITY_FILE=folder / "fails.txt", ND_DOUBLE_CUPTI_FAILS=1)
    check(re.fullmatch(r"nd_activity: nothing is recorded, since CUPTI does not start: cuptiActivityEnable answers 15\n", said), said)
    if list(TOOLKIT.glob("libcupti.so.*")) and not os.path.exists("/dev/nvidiactl"):
        environment = {**os.environ, "LD_LIBRARY_PATH": str(TOOLKIT), "ND_ACTIVITY_FILE": str(folder / "real.txt")}
        done = subprocess.run([sys.executable, "-c", "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).InitializeInjection())",
                               str(LIBRARY)], env=environment, stderr=subprocess.PIPE, text=True, timeout=60)
        check(done.returncode == 1 and "CUPTI does not start: cuptiActivityEnable answers" in done.stderr,
              f"NVIDIA's own CUPTI without a driver: {done.returncode}, {done.stderr}")
    for name, text, words in (("empty", "", "was not written by"), ("other", "hello\n", "its first line is ['hello']"),
                              ("nothing", "nd_activity 1 130001 5\n", "has no record"),
                              ("bad", "nd_activity 1 130001 5\nk 1 2\n", "line 2 is no record: k 1 2")):
        (folder / name).write_text(text)
        done = subprocess.run([sys.executable, SOURCE / "scripts/gpu/activity.py", folder / name], stderr=subprocess.PIPE, text=True)
        check(done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr, f"{name}: {done.stderr}")


def written(folder, name, rows, names):
    """A file of kernels (begin, end, stream, number of the name)."""
    lines = ["nd_activity 1 130001 42", *(f"n {i} {n}" for i, n in enumerate(names))]
    lines += [f"k {begin} {end} 0 {stream} {number} 1 1 1 32 1 1 8 0" for begin, end, stream, number in rows]
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def times_add_up(folder):
    """Three steps of 1000 ns; the first is not counted. In each: a norm, a product, a gather of which 150 of 200 ns run beside
    the product, and an update of two kernels with a gap of 20 between them."""
    names, rows = [NORM, PRODUCT, GATHER, ADAMW], []
    for step in range(3):
        t = 1000 * (step + 1)
        rows += [(t, t + 100, 7, 0), (t + 100, t + 600, 7, 1), (t + 450, t + 650, 9, 2), (t + 700, t + 800, 7, 3), (t + 820, t + 900, 7, 3)]
    rows[0] = (900, 1100, 7, 0)
    found = activity.summary(written(folder, "steps.txt", rows, names))
    check((found["steps"], found["process"], found["device"]) == (2, 42, 0), f"{found}")
    near(found["seconds"], 2000e-9, "two steps, from the end of one update to that of another")
    for family, seconds, alone, count in (("norm", 200, 200, 2), ("products", 1000, 700, 2), ("collectives", 400, 100, 2),
                                          ("optimizer", 360, 360, 4)):
        f = found["families"][family]
        near(f["seconds"], seconds * 1e-9, f"{family}, seconds")
        near(f["alone_seconds"], alone * 1e-9, f"{family}, alone")
        near(f["share"], seconds / 2000, f"{family}, share")
        check(f["count"] == count, f"{family}: {f}")
    near(found["busy_seconds"], 1660e-9, "busy")
    near(found["gap_seconds"], 340e-9, "gaps")
    near(found["exposed_collective_seconds"], 100e-9, "exposed collectives")
    check([round(g["seconds"] * 1e9) for g in found["longest_gaps"]] == [100, 50, 50, 20, 20], f"{found['longest_gaps']}")
    longest = found["longest_gaps"][0]
    check((longest["after"], longest["before"]) == ("optimizer: adamw_kernel", "rmsnorm_fwd: forward_kernel"), f"{longest}")
    text = activity.table(found)
    check("| products | 0.001 | 50.0 % |" in text and "100 ns" not in text and "(75 %) beside other work" in text, text)
    few = activity.summary(written(folder, "few.txt", rows[:8], names))
    check(few["steps"] == 0, f"one update is no whole step: {few}")
    near(few["seconds"], 1750e-9, "the whole file")
    one = activity.summary(written(folder, "one.txt", rows, names), steps=1)
    near(one["seconds"], 1000e-9, "one step")


def families():
    """Every file of ours with kernels has a family, and nothing else has; names of libraries as they are seen in profiles."""
    ours = {f.stem for f in (SOURCE / "kernels/cuda").glob("*.cu") if re.search(r"__global__|map\.cuh|token_sort\.cuh", f.read_text())}
    check(ours == set(activity.OURS), f"kernels/cuda has kernels in {sorted(ours)}, activity.py knows {sorted(activity.OURS)}")
    for name, family in ((NORM, "norm"), (ADAMW, "optimizer"), (PRODUCT, "products"), (GATHER, "collectives"),
                         ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_31_64x64x64_4x1x1_kernel0_0", "attention"),
                         ("_ZN2nd10map_kernelIN41_GLOBAL__N__5b14dfc8_9_swiglu_cu_c74f9a0010forward_ofIfLi1EEEEEvT_l", "swiglu"),
                         ("_ZN7cutlass13device_kernelIN4gemm6kernel13GemmUniversal", "products"),
                         ("_ZN2at6native55_GLOBAL__N__multi_tensor_apply_kernelINS1_18TensorListMetadataILi4EEENS0_20FusedAdamMathFunctor", "optimizer"),
                         ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", "norm"), ("triton_poi_fused_mul_silu_7", "swiglu"),
                         ("_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctor", "elementwise"), ("who_knows", "other")):
        check(activity.family_of(name) == family, f"{name} is {activity.family_of(name)}, not {family}")


def main():
    families()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for case in (what_ran_is_in_the_file, a_killed_process_leaves_its_records, each_process_has_its_file, many_names,
                     what_does_not_work_is_said, times_add_up):
            case(folder)


if __name__ == "__main__":
    main()
