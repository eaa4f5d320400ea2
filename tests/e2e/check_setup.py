#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/setup and scripts/build, as far as nothing is installed or built: check_setup.py SOURCE."""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from steps import call, check

SOURCE = pathlib.Path(sys.argv[1])


def script(name, *arguments, code=0):
    return call([SOURCE / "scripts" / name, *arguments], code)


def packages(*arguments):
    return script("setup", "--list", *arguments).split()


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
             "zlib": "zlib1g-dev", "libzstd": "libzstd-dev", "oniguruma": "libonig-dev", "libutf8proc": "libutf8proc-dev"}
    for name in wanted:
        if name not in ("threads", "openmp", "criterion"):
            check(known.get(name) in programs, f"scripts/setup does not install {name}, which meson.build asks for")


def the_cuda_part_needs_a_cxx_compiler():
    check("g++" in packages("--cuda"), "the CUDA part needs g++")
    check(len(packages("--cuda", "--tests")) == len(set(packages("--cuda", "--tests"))), "a package is listed twice")


def with_fakes(installed, known):
    """The end of scripts/setup --tests where apt and dpkg say that these packages are installed, or can be, and which calls of
    apt-get it made. An apt-get update lets apt know a package that begins with "later:"."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "known").write_text("".join(name + "\n" for name in known if not name.startswith("later:")))
        (folder / "later").write_text("".join(name[6:] + "\n" for name in known if name.startswith("later:")))
        (folder / "installed").write_text("".join(f"installed {name}\n" for name in installed))
        fakes = {"dpkg-query": f"cat {folder}/installed",
                 "apt-cache": f'if grep -qx "$2" {folder}/known; then echo "$2:"; echo "  Candidate: 1.0"; fi',
                 "apt-get": f'echo "$*" >>{folder}/calls; case "$*" in *update) cat {folder}/later >>{folder}/known;; esac',
                 "id": "echo 0"}
        for name, text in fakes.items():
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)
        done = subprocess.run([SOURCE / "scripts" / "setup", "--tests"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=60,
                              env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"})
        calls = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
        return done.returncode, done.stdout, calls


def what_is_missing_is_installed_and_nothing_else():
    names = packages("--tests")
    code, said, calls = with_fakes(names, [])
    check(code == 0 and not calls and not said, f"nothing is missing: {code} {said} {calls}")
    code, said, calls = with_fakes(names[3:], names)
    check(code == 0 and len(calls) == 1 and calls[0].split()[-3:] == names[:3], f"three are missing: {code} {said} {calls}")
    code, said, calls = with_fakes(names[1:], ["later:" + names[0]])
    check(code == 0 and len(calls) == 2 and "update" in calls[0] and calls[1].endswith(" " + names[0]),
          f"one is known after an update: {code} {said} {calls}")
    code, said, calls = with_fakes([name for name in names if name != "libclang-rt-dev"], [])
    check(code == 0 and not calls, f"clang has its own runtimes before Debian 12: {code} {said} {calls}")


def a_browser_is_no_condition():
    """One test alone needs it, and not every release has it as a package."""
    names = packages("--tests", "--no-browser")
    check(set(packages("--tests")) - set(names) == {"chromium"}, "the browser is not the one package that --no-browser leaves out")
    code, said, calls = with_fakes(names, names)
    check(code == 0 and "no chromium" in said and not any("install" in call for call in calls), f"no browser: {code} {said} {calls}")
    code, said, calls = with_fakes(names, [*names, "chromium"])
    check(code == 0 and calls and calls[-1].endswith(" chromium"), f"a browser is missing: {code} {said} {calls}")


def a_package_that_no_source_has_is_named():
    names = packages("--tests")
    code, said, calls = with_fakes(names[2:], names[:1])
    check(code == 2 and not any("install" in call for call in calls), f"one of two is known: {code} {calls}")
    check(f": {names[1]}\n" in said and "universe" in said and "nothing was installed" in said, said)


def wrong_arguments_do_nothing():
    check("contradict" in script("build", "--without-cuda", "--cuda", code=2), "two options that contradict each other")
    for name in ("setup", "build"):
        check("--frobnicate" in script(name, "--frobnicate", code=2), "the argument is not named")
        check("--cuda" in script(name, "--help"), f"{name} --help does not name --cuda")


the_programs_need_no_tools_of_the_tests()
the_cuda_part_needs_a_cxx_compiler()
what_is_missing_is_installed_and_nothing_else()
a_browser_is_no_condition()
a_package_that_no_source_has_is_named()
wrong_arguments_do_nothing()
print("check_setup: setup and build name and refuse what they should")
