#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/setup and scripts/build, as far as nothing is installed or built: check_setup.py SOURCE."""
import pathlib
import re
import subprocess
import sys

SOURCE = pathlib.Path(sys.argv[1])


def check(holds, words):
    if not holds:
        sys.exit(f"check_setup: {words}")


def call(status, script, *arguments):
    done = subprocess.run([SOURCE / "scripts" / script, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=60)
    check(done.returncode == status, f"{script} {' '.join(arguments)} ended with {done.returncode}, not {status}:\n{done.stdout}")
    return done.stdout


def packages(*arguments):
    return call(0, "setup", "--list", *arguments).split()


def the_programs_need_no_tools_of_the_tests():
    """A user installs what the two programs need, which is what meson.build asks for, and no Slurm, clang or Criterion."""
    programs, tests = packages(), packages("--tests")
    check(set(programs) < set(tests), f"{programs} is not a part of {tests}")
    for name in ("libcriterion-dev", "slurm-wlm", "clang", "clang-format", "strace", "g++"):
        check(name in tests, f"{name} is not among the packages of the tests")
        check(name not in programs or name == "g++", f"{name} is not needed by the programs")
    wanted = re.findall(r"dependency\('([a-z0-9.-]+)'", (SOURCE / "meson.build").read_text())
    known = {"yaml-0.1": "libyaml-dev", "jansson": "libjansson-dev", "libuv": "libuv1-dev", "hwloc": "libhwloc-dev",
             "openssl": "libssl-dev", "libxxhash": "libxxhash-dev", "ucx": "libucx-dev", "pmix": "libpmix-dev",
             "zlib": "zlib1g-dev", "libzstd": "libzstd-dev", "libutf8proc": "libutf8proc-dev"}
    for name in wanted:
        if name not in ("threads", "openmp", "criterion"):
            check(known.get(name) in programs, f"scripts/setup does not install {name}, which meson.build asks for")


def the_cuda_part_needs_a_cxx_compiler():
    check("g++" in packages("--cuda"), "the CUDA part needs g++")
    check(len(packages("--cuda", "--tests")) == len(set(packages("--cuda", "--tests"))), "a package is listed twice")


def wrong_arguments_do_nothing():
    check("--frobnicate" in call(2, "setup", "--frobnicate"), "the argument is not named")
    check("--frobnicate" in call(2, "build", "--frobnicate"), "the argument is not named")
    check("contradict" in call(2, "build", "--without-cuda", "--cuda"), "two options that contradict each other")
    for script in ("setup", "build"):
        check("--cuda" in call(0, script, "--help"), f"{script} --help does not name --cuda")


the_programs_need_no_tools_of_the_tests()
the_cuda_part_needs_a_cxx_compiler()
wrong_arguments_do_nothing()
print("check_setup: setup and build name and refuse what they should")
