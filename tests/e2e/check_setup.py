#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/setup and scripts/build, as far as nothing is installed or built."""
import os
import re

import steps
from steps import SOURCE, check, test


def packages(t, flags=""):
    return t.run(f"{SOURCE}/scripts/setup --list {flags}").split()


@test
def the_programs_need_no_tools_of_the_tests(t):
    """A user installs what the two programs need, which is what meson.build asks for, and no Slurm, clang or Criterion."""
    programs, tests = packages(t), packages(t, "--tests")
    check(set(programs) < set(tests), f"{programs} is not a part of {tests}")
    for name in ("libcriterion-dev", "slurm-wlm", "clang", "clang-format", "strace", "g++"):
        check(name in tests, f"{name} is not among the packages of the tests")
        check(name not in programs or name == "g++", f"{name} is not needed by the programs")
    wanted = re.findall(r"dependency\('([a-z0-9.-]+)'", (SOURCE / "meson.build").read_text())
    known = {"yaml-0.1": "libyaml-dev", "jansson": "libjansson-dev", "libuv": "libuv1-dev", "hwloc": "libhwloc-dev",
             "openssl": "libssl-dev", "libxxhash": "libxxhash-dev", "ucx": "libucx-dev", "pmix": "libpmix-dev",
             "zlib": "zlib1g-dev", "libzstd": "libzstd-dev", "oniguruma": "libonig-dev", "libutf8proc": "libutf8proc-dev"}
    for name in wanted:
        if name not in ("threads", "openmp", "criterion"):
            check(known.get(name) in programs, f"scripts/setup does not install {name}, which meson.build asks for")


@test
def the_cuda_part_needs_a_cxx_compiler(t):
    check("g++" in packages(t, "--cuda"), "the CUDA part needs g++")
    check(len(packages(t, "--cuda --tests")) == len(set(packages(t, "--cuda --tests"))), "a package is listed twice")


def with_fakes(t, installed, known, code=0):
    """The calls of apt-get that scripts/setup --tests makes where apt and dpkg say that these packages are installed, or can be. An
    apt-get update lets apt know a package that begins with "later:"."""
    t.write("known", "".join(name + "\n" for name in known if not name.startswith("later:")))
    t.write("later", "".join(name[6:] + "\n" for name in known if name.startswith("later:")))
    t.write("installed", "".join(f"installed {name}\n" for name in installed))
    t.write("calls", "")
    for name, text in {"dpkg-query": f"cat {t.folder}/installed",
                       "apt-cache": f'if grep -qx "$2" {t.folder}/known; then echo "$2:"; echo "  Candidate: 1.0"; fi',
                       "apt-get": f'echo "$*" >>{t.folder}/calls; case "$*" in *update) cat {t.folder}/later >>{t.folder}/known;; esac',
                       "id": "echo 0"}.items():
        t.write(name, f"#!/bin/sh\n{text}\n")
        (t.folder / name).chmod(0o755)
    t.run(f"{SOURCE}/scripts/setup --tests", code, PATH=f"{t.folder}:{os.environ['PATH']}")
    return t.read("calls").splitlines()


@test
def what_is_missing_is_installed_and_nothing_else(t):
    names = packages(t, "--tests")
    calls = with_fakes(t, names, [])
    check(not calls and not t.out + t.log, f"nothing is missing: {calls} {t.out}{t.log}")
    calls = with_fakes(t, names[3:], names)
    check(len(calls) == 1 and calls[0].split()[-3:] == names[:3], f"three are missing: {calls}")
    calls = with_fakes(t, names[1:], ["later:" + names[0]])
    check(len(calls) == 2 and "update" in calls[0] and calls[1].endswith(" " + names[0]), f"one is known after an update: {calls}")
    calls = with_fakes(t, [name for name in names if name != "libclang-rt-dev"], [])
    check(not calls, f"clang has its own runtimes before Debian 12: {calls}")


@test
def a_browser_is_no_condition(t):
    """One test alone needs it, and not every release has it as a package."""
    names = packages(t, "--tests --no-browser")
    check(set(packages(t, "--tests")) - set(names) == {"chromium"}, "the browser is not the one package that --no-browser leaves out")
    calls = with_fakes(t, names, names)
    t.says("no chromium")
    check(not any("install" in call for call in calls), f"no browser: {calls}")
    calls = with_fakes(t, names, [*names, "chromium"])
    check(calls and calls[-1].endswith(" chromium"), f"a browser is missing: {calls}")


@test
def a_package_that_no_source_has_is_named(t):
    names = packages(t, "--tests")
    calls = with_fakes(t, names[2:], names[:1], 2)
    check(not any("install" in call for call in calls), f"one of two is known: {calls}")
    t.says((f": {names[1]}\n", "universe", "nothing was installed"))


@test
def wrong_arguments_do_nothing(t):
    t.run(f"{SOURCE}/scripts/build --without-cuda --cuda", 2, "contradict")
    for name in "setup", "build":
        t.run(f"{SOURCE}/scripts/{name} --frobnicate", 2, "--frobnicate")
        t.run(f"{SOURCE}/scripts/{name} --help", says="--cuda")


steps.main("setup")
