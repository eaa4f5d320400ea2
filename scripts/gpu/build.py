# SPDX-License-Identifier: Apache-2.0
"""Items of phase build, and what the machine is."""
import ctypes
import datetime
import os
import pathlib
import platform
import re
import shutil
import subprocess

from place import Failure, output_of, run, say

PROGRAMS = ("ndlaunch", "ndtrain", "nd_bench_kernels", "nd_bench_gpu")
TESTS = ("tests/gpu/test_gpu_ops", "tests/gpu/test_gpu_goldens")


def opened(files):
    """A library from the folders that programs are told to look in, which count for what is started, not for this process."""
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        for file in files:
            if folder and os.path.exists(f"{folder}/{file}"):
                return ctypes.CDLL(f"{folder}/{file}")
    for file in files:
        try:
            return ctypes.CDLL(file)
        except OSError:
            continue
    return None


def library_versions():
    found = {}
    for name, files, function, argument in (("cuBLASLt", ("libcublasLt.so.13", "libcublasLt.so.12"), "cublasLtGetVersion", False),
                                            ("cuDNN", ("libcudnn.so.9",), "cudnnGetVersion", False),
                                            ("NCCL", ("libnccl.so.2",), "ncclGetVersion", True)):
        try:
            library = opened(files)
            call = getattr(library, function)
        except (OSError, AttributeError):
            continue
        number, call.restype = ctypes.c_int(0), ctypes.c_int if argument else ctypes.c_size_t
        found[name] = (call(ctypes.byref(number)), number.value)[1] if argument else call()
        found[f"{name}_file"] = library._name
    nvcc = output_of(["scripts/find_cuda"]) + "/bin/nvcc"
    for name, command in (("nvcc", [nvcc, "--version"]), ("cc", [os.environ.get("CC", "cc"), "--version"])):
        try:
            said = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=30).stdout
        except (OSError, subprocess.TimeoutExpired):
            continue
        number = re.search(r"\bV?(\d+\.\d+\.\d+)", said)
        found[name] = number.group(1) if number else "?"
    return found


def machine(place):
    say({"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"), "gpu": place.gpu or "none",
         "linux": platform.release(), "processors": os.cpu_count(), "commit": place.commit})
    if not place.dry:
        say({"libraries": library_versions()})


def frontend_folder():
    """Of headers of cudnn-frontend that lie elsewhere than in build-deps/."""
    roots = ["/usr/include", "/usr/local/include", output_of(["scripts/find_cuda"]) + "/include"]
    for root in roots:
        for header in pathlib.Path(root).rglob("cudnn_frontend.h"):
            return header.parent
    raise Failure("the headers of cudnn-frontend are not there; scripts/gpu_check.sh --collect gathers them")


def configure(place):
    for tool in ("meson", "ninja", os.environ.get("CC", "cc"), os.environ.get("CXX", "c++"), "pkg-config"):
        if not shutil.which(tool):
            raise Failure(f"{tool} is not there; scripts/gpu_check.sh --collect gathers what a host without a network lacks")
    options = []
    if not os.path.isdir("build-deps/cudnn-frontend/include") and run(["scripts/fetch_cudnn_frontend"]) != 0:
        options = [f"-Dcudnn_frontend={frontend_folder()}"]
    if (place.build / "build.ninja").exists():
        return 0
    shutil.rmtree(place.build, ignore_errors=True)
    # Warnings of a newer compiler are not what is checked here.
    return run(["meson", "setup", place.build, "-Dcuda=enabled", "-Dtests=auto", "-Dcpu=disabled", "-Ducx=disabled",
                "-Dpmix=disabled", "-Dwerror=false",
                f"-Dgpu_architectures={os.environ.get('ND_GPU_ARCHITECTURES') or 'auto'}", *options])


def compile_all(place):
    """What the other phases run; the tests only where Criterion is. A target that fails does not keep the others."""
    rules = (place.build / "build.ninja").read_text()
    tests = [name for name in TESTS if f"\nbuild {name}:" in rules]
    return run(["ninja", "-C", place.build, "-k", "0", *PROGRAMS, *tests])
