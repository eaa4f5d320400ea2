# SPDX-License-Identifier: Apache-2.0
"""Builds on a host with GPUs, checks every op and whole runs there, and measures them.

  scripts/gpu_check.sh [--phase build|conformance|bench|torch|several|all] [--only ITEM,...] [--out FOLDER] [--dry-run]
  scripts/gpu_check.sh --collect

  build         configures and compiles for the GPU of this machine
  conformance   every op against the reference; small runs in each precision; then the ops under compute-sanitizer
  bench         kernels, products, and the layers of Llama 3.1 8B: what the table of speeds needs
  torch         one layer as PyTorch computes it; PyTorch on the same shape, and the same number of layers here
  several       on a machine with two and more GPUs: each mesh against one worker, a rank that is killed, 8B over all GPUs
  all           these, the quick and important items of each first

Each call works for at most 9 minutes. Results are kept in FOLDER (gpu_check, or gpu_check-dry-run with --dry-run), and what
is done is not done again; what failed, was skipped or was cut off is tried again by the next call. FOLDER/gpu_check.json and
FOLDER/gpu_check.md hold all results and are written after each item. Remove FOLDER to start over. --only runs the named
items of the phase (shell patterns: 8b-half-*), also those that are done.

Exit codes: 0 all is done; 1 something failed; 2 wrong arguments, or nothing to check here; 3 nothing failed, but something
was skipped, and the report says why; 75 the time is up, so call it again to go on.

The build needs the CUDA Toolkit, NCCL and cuDNN (their Python wheels suffice), the headers of cudnn-frontend (in build-deps/,
or fetched by scripts/fetch_cudnn_frontend), and no oneDNN or UCX. --collect, on a machine with a network, gathers in
build-deps/ what a host without one may lack; copy that folder there. Phase torch needs a Python with torch and transformers.
--dry-run goes through everything at toy sizes on the doubles of build/tests/hostcuda, which need no GPU (scripts/build
--tests --cuda); its report says so.

Environment: ND_PEER_PYTHON, the Python with torch (python3). ND_GPU_LIMIT, seconds of one call (520). ND_GPU_BUILD, the
build folder (build-gpu; build with --dry-run). ND_GPU_COMMIT, the name of the sources where there is no git.
ND_GPU_ARCHITECTURES, the GPUs to build for (those of this machine). OUT, a folder that also receives the report, its JSON,
and gpu_check.tar.gz with the records, logs and metrics.
"""
import argparse
import ctypes
import glob
import os
import pathlib
import platform
import shutil
import signal
import site
import subprocess
import sys
import time

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parent.parent))

import bench
import build
import conformance
import report
import several
from place import Place, output_of
from runner import Item, Runner

STARTED = time.monotonic()
PHASES = ("build", "conformance", "bench", "torch", "several", "all")


class WrongUse(Exception):
    """Exit code 2."""


def parse_arguments():
    p = argparse.ArgumentParser(prog="gpu_check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                usage=argparse.SUPPRESS)
    p.add_argument("--phase", default="all")
    p.add_argument("--only", default="")
    p.add_argument("--out", type=pathlib.Path)
    p.add_argument("--dry-run", action="store_true")
    p.add_argument("--collect", action="store_true")
    a = p.parse_args()
    if a.phase not in PHASES:
        raise WrongUse(f"--phase is {', '.join(PHASES[:-1])} or {PHASES[-1]}, not {a.phase}")
    return a


ASK_DRIVER = """import ctypes, sys
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
print(cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)), count.value)"""


def why_no_gpu():
    """A few words where no GPU can be used, else None. Another process asks, since items are forked, and the driver answers
    nothing in a fork of a process that has started it (CUDA error 3)."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "the NVIDIA driver (libcuda.so.1) is not installed"
    answer = output_of([sys.executable, "-c", ASK_DRIVER]).split()
    if len(answer) != 2:
        return "the driver did not answer"
    error, count = map(int, answer)
    if error or count == 0:
        return f"the driver sees none (CUDA error {error})" if error else "the driver sees none"
    return None


def source_version():
    commit = output_of(["git", "rev-parse", "--short", "HEAD"])
    if not commit:
        return os.environ.get("ND_GPU_COMMIT", "unknown")
    clean = subprocess.run(["git", "diff", "--quiet", "HEAD"], stderr=subprocess.DEVNULL).returncode == 0
    return commit if clean else commit + ", changed"


def visible_gpus():
    names = "name,compute_cap,memory.total,driver_version"
    return output_of(["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"]).split("\n")


def make_place(a):
    dry = a.dry_run
    folder = pathlib.Path(os.environ.get("ND_GPU_BUILD") or ("build" if dry else "build-gpu"))
    programs = folder / "tests" / "hostcuda" if dry else folder
    gpus = ["doubles of an H200"] * 2 if dry else visible_gpus()
    gpu = gpus[0]
    return Place(dry=dry, out=a.out or pathlib.Path("gpu_check-dry-run" if dry else "gpu_check"), build=folder,
                 programs=programs, tests=programs / "test_hostcuda" if dry else folder / "tests" / "gpu" / "test_gpu",
                 jobs=2 if dry else 4 if os.cpu_count() < 16 else 8, seconds_per_test=480 if dry else 120, gpu=gpu,
                 commit=source_version(), peer=os.environ.get("ND_PEER_PYTHON") or "python3",
                 own_library_path=os.environ.get("LD_LIBRARY_PATH", ""), gpus=len(gpus))


def check_use(place, phase):
    no_gpu = None if place.dry or phase == "build" else why_no_gpu()
    if no_gpu:
        raise WrongUse(f"this machine has no GPU to check, as {no_gpu}; --dry-run goes through everything without one")
    launcher = place.programs / "ndlaunch"
    if not os.access(launcher, os.X_OK):
        if place.dry:
            raise WrongUse(f"{launcher} is not there; run scripts/build --tests --cuda first, on a machine with the CUDA Toolkit")
        if phase not in ("build", "all"):
            raise WrongUse(f"{launcher} is not there; run scripts/gpu_check.sh --phase build first")
    mode = place.out / "mode"
    if mode.is_file() and mode.read_text().strip() != place.mode:
        raise WrongUse(f"{place.out} holds results of another mode ({mode.read_text().strip()}); name another folder with "
                       "--out, or remove it")


def add_path(variable, folder):
    os.environ[variable] = ":".join(filter(None, [os.environ.get(variable), str(folder)]))


def wheel_folders(python):
    """Headers and libraries of cuDNN, NCCL and the toolkit as Python wheels have them: those of the Python that has torch, then
    those of this one."""
    roots = output_of([python, "-c", "import nvidia, os; print(*map(os.path.dirname, nvidia.__path__), sep='\\n')"]).split("\n")
    roots = [p for p in roots + sys.path + site.getsitepackages() + [site.getusersitepackages()] if p]
    for part in ("cudnn", "nccl", "cu13", "cublas", "cuda_nvrtc"):
        for root in roots:
            if glob.glob(f"{root}/nvidia/{part}/include/*.h"):
                yield pathlib.Path(root) / "nvidia" / part
                break


def set_paths(place):
    """Libraries of wheels before those of the toolkit, since torch opens these, and its speed is compared with ours; and what
    --collect gathered: tools that this host lacks, and libraries, all of them, where it lacks one."""
    for folder in wheel_folders(place.peer):
        for variable, name in (("LD_LIBRARY_PATH", "lib"), ("LIBRARY_PATH", "lib"), ("C_INCLUDE_PATH", "include"),
                               ("CPLUS_INCLUDE_PATH", "include")):
            add_path(variable, folder / name)
    root = output_of(["scripts/find_cuda"])
    for name in ("lib64", "lib") if root else ():
        add_path("LD_LIBRARY_PATH", f"{root}/{name}")
    gathered = pathlib.Path("build-deps/host").resolve()
    machine = gathered / "machine"
    if machine.is_file() and machine.read_text().strip() == platform.machine():
        for tool in (gathered / "bin").iterdir():
            tool.chmod(0o755)
        add_path("PATH", gathered / "bin")
        modules = ["yaml-0.1", "jansson", "libuv", "hwloc", "openssl >= 3.0", "libxxhash", "zlib", "libzstd",
                   "oniguruma", "libutf8proc", "criterion"]
        if not shutil.which("pkg-config") or subprocess.run(["pkg-config", "--exists", *modules]).returncode != 0:
            os.environ["PKG_CONFIG_PATH"] = str(gathered / "lib" / "pkgconfig")


# ---- The items, in their order: name, phase, seconds they take as a rule, most seconds, function, arguments ------------

def conformance_items(place):
    yield Item("ops", "conformance", 60, 480, conformance.tests_of, "ops", OTHER_OPS)
    yield Item("small-fp32", "conformance", 15, 200, conformance.small, "fp32", "--precision", "fp32")
    yield Item("small-bf16", "conformance", 15, 200, conformance.small, "bf16", "--precision", "bf16")
    recipes = ("tensorwise", "rowwise", "delayed") if place.has_fp8 else ()
    for recipe in recipes:
        yield Item(f"small-{recipe}", "conformance", 15, 200, conformance.small, recipe, "--precision", "fp8", "--set",
                   f"fp8.recipe={recipe}")
    if not recipes:
        yield Item("small-fp8", "conformance", 1, 10, conformance.small, "fp8", "--precision", "fp8")
    yield Item("losses", "conformance", 5, 60, conformance.losses, "bf16", *recipes)
    yield Item("memory", "conformance", 15, 200, conformance.memory_as_planned)
    yield Item("texts", "conformance", 30, 200, conformance.texts_as_on_the_cpu)
    for precision in ("bf16", "fp8"):
        yield Item(f"graphs-{precision}", "conformance", 30, 200, conformance.graphs_as_without, precision)
        yield Item(f"autotune-{precision}", "conformance", 45, 200, conformance.autotune_as_recorded, precision)
        yield Item(f"nccl-alone-{precision}", "conformance", 30, 200, several.nccl_alone, precision)
    yield Item("deterministic", "conformance", 30, 200, conformance.deterministic_twice)
    yield Item("goldens", "conformance", 60, 480, conformance.tests_of, "goldens")


def several_items(place):
    """None on a machine with one GPU."""
    if place.gpus < 2:
        return
    for mesh in several.meshes_on(place.gpus):
        yield Item(several.name_of(mesh), "several", 30, 300, several.as_one_worker, mesh)
    yield Item("killed-rank", "several", 30, 200, several.killed_rank)
    for precision in ("bf16", "fp8"):
        name = f"8b-fsdp-{precision}"
        layers = 3 if place.dry else 32
        yield Item(name, "several", 150, 450, several.eight_b_sharded, name, layers, precision, "selective")
        bounded = f"{name}-blocks"
        yield Item(bounded, "several", 150, 450, several.eight_b_sharded, bounded, layers, precision, "selective", "--comm-blocks", "16")


def sanitizer_items(place):
    """Slow, so they come last."""
    suites = conformance.suites_of_ops(place)
    if not suites:
        yield Item("sanitizer", "conformance", 1, 10, conformance.sanitized, None)
    else:
        report.record_path(place.out, "sanitizer").unlink(missing_ok=True)
    for name in suites:
        yield Item(f"sanitizer-{name}", "conformance", 60, 500, conformance.sanitized, name)


ATTENTION, LAYER_ATTENTION, OTHER_OPS = "attention!(_8b)/*", "attention_8b/*", "!(attention*)/*"  # patterns of Criterion
OPTIONS = (("-graphs", "--cuda-graphs", {"CUDA_MODULE_LOADING": "EAGER"}), ("-autotune", "--autotune", {}))


def first_items(place):
    """What somebody with a GPU for ten minutes wants to know, the most important first: scripts/gpu/visit stops here."""
    layers = 2 if place.dry else 16
    for precision in ("bf16", "fp8"):
        name = f"8b-half-{precision}"
        yield Item(name, "bench", 40, 150, bench.half_8b, name, layers, precision)
    yield Item("torch-same", "torch", 90, 200, bench.torch_same, layers, after="8b-half-bf16")
    yield Item("8b-torch-same", "torch", 5, 100, bench.same_as_torch, "8b-torch-same", after="torch-same")
    for what in ("bf16", "fp8", "torch"):
        yield Item(f"profile-{what}", "bench", 40, 120, bench.profiled, what)
    yield Item("attention-8b", "conformance", 25, 100, conformance.tests_of, "ops", LAYER_ATTENTION)
    yield Item("ops-attention", "conformance", 150, 500, conformance.tests_of, "ops", ATTENTION)
    yield Item("products", "bench", 30, 100, bench.with_tokens_that_fit, place.programs / "nd_bench_gpu", *(["--toy"] if place.dry else []))
    yield Item("documents", "bench", 60, 180, bench.with_tokens_that_fit, place.programs / "nd_bench_gpu", "--documents",
               *(["--toy"] if place.dry else []))
    yield Item("kernels", "bench", 30, 100, bench.with_tokens_that_fit, place.programs / "nd_bench_kernels",
               *(["--repeats", "1"] if place.dry else []))
    for precision in ("fp32", "bf16"):
        yield Item(f"torch-layer-{precision}", "torch", 40, 120, bench.layer_as_torch, precision)
    for suffix, option, environment in OPTIONS:
        for precision in ("bf16", "fp8"):
            name = f"8b-half-{precision}{suffix}"
            yield Item(name, "bench", 40, 150, bench.half_8b, name, layers, precision, option, environment=environment)


def bench_items(place):
    whole = 3 if place.dry else 32

    def eight_b(suffix="", *options, environment=None):
        for precision in ("bf16", "fp8"):
            name = f"8b-all-{precision}{suffix}"
            yield Item(name, "bench", 130, 400, bench.run_8b, name, whole, "full", precision, *options, environment=environment)

    def beside_torch(suffix="", *options, environment=None):
        name = f"8b-torch-bf16{suffix}"
        return Item(name, "torch", 120, 400, bench.beside_torch, name, *options, after="torch-most", environment=environment)

    yield from eight_b()
    for kind in ("products", "layer"):
        yield Item(f"fp8-{kind}", "bench", 40, 200, bench.fp8_beside_bf16, kind)
    yield Item("torch-fit", "torch", 120, 400, bench.peer, "--fit")
    yield Item("torch-most", "torch", 240, 500, bench.torch_most, after="torch-fit")
    yield beside_torch()
    for suffix, option, environment in OPTIONS:
        yield from eight_b(suffix, option, environment=environment)
        yield beside_torch(suffix, option, environment=environment)


def run_items(runner, place, phase):
    def wanted(*phases):
        return phase == "all" or phase in phases

    runner.run(Item("machine", "machine", 5, 60, build.machine))
    if not place.dry and wanted("build"):
        if not (place.build / "build.ninja").exists():
            runner.forget("configure")  # the results came here from another host
        runner.run(Item("configure", "build", 20, 240, build.configure))
        runner.forget("compile")  # Ninja knows what there is to do, and goes on where it was cut off
        runner.run(Item("compile", "build", 20, 500, build.compile_all))
        built = all(os.access(place.programs / name, os.X_OK) for name in ("ndlaunch", "ndtrain"))
        if phase == "all" and (not built or runner.state("compile") == "cut off"):
            return  # the build failed, or goes on with the next call
    for items in (first_items, conformance_items, bench_items, several_items, sanitizer_items):
        for item in items(place) if wanted("conformance", "bench", "torch", "several") else ():
            if wanted(item.phase):
                runner.run(item)


def main():
    a = parse_arguments()
    if a.collect:
        os.execv("scripts/gpu/collect", ["scripts/gpu/collect"])
    place = make_place(a)
    check_use(place, a.phase)
    place.make_folders()
    if not place.dry:
        set_paths(place)
    limit = float(os.environ.get("ND_GPU_LIMIT") or 520)
    only = [pattern for pattern in a.only.split(",") if pattern]
    runner = Runner(place, STARTED + limit, only)
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        signal.signal(number, lambda *_, code=code: sys.exit(code))
    try:
        run_items(runner, place, a.phase)
    finally:
        runner.end_child()
        report.deliver(place.out)
    code = report.summary(place.out)
    if runner.left:
        print("gpu_check: the time of this call is up; call it again to go on", file=sys.stderr)
        return 75
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WrongUse as wrong:
        print(f"gpu_check: {wrong}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # whoever read the output has gone, and what was started has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
