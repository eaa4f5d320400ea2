#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Dockerfile and ndtrain.def name only what exists, and pin it: check_packaging.py SOURCE. scripts/try_images builds them.

Files that they copy, steps, arguments and options of the scripts that they call, options of Meson in scripts/package, and, where apt
knows packages, the names of those that packaging/container installs.
"""
import fnmatch
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from steps import call, check

SOURCE = pathlib.Path(sys.argv[1])
DOCKERFILE, DEF, CONTAINER, PACKAGE = ((SOURCE / name).read_text() for name in (
    "packaging/Dockerfile", "packaging/ndtrain.def", "packaging/container", "scripts/package"))


def instructions(text):
    """[(name, rest)] of a Dockerfile."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [tuple(line.split(None, 1)) for line in "\n".join(lines).replace("\\\n", " ").splitlines()]


def defaults(lines):
    return dict(line.split("=", 1) for line in lines)


def is_copied(path, ignored):
    return not any(fnmatch.fnmatch(path, pattern) or path.startswith(pattern + "/") or fnmatch.fnmatch(path.split("/")[0], pattern)
                   for pattern in ignored)


def check_dockerfile():
    """What it says, and the values of its arguments."""
    steps = instructions(DOCKERFILE)
    check({name for name, _ in steps} <= {"ARG", "FROM", "COPY", "RUN", "WORKDIR", "ENTRYPOINT"}, f"unknown instructions in {steps}")
    arguments = defaults(rest for name, rest in steps if name == "ARG")
    froms = [rest for name, rest in steps if name == "FROM"]
    check(froms == ["${BASE} AS build", "${RUNTIME}"], f"its stages are {froms}")
    for name in re.findall(r"\$\{(\w+)\}", DOCKERFILE):
        check(name in arguments, f"Dockerfile has no argument {name}")
    check(all(re.fullmatch(r"[a-z/]+:\d+\.\d+[a-z0-9.-]*", arguments[name]) for name in ("BASE", "RUNTIME")), f"no exact release: {arguments}")
    check(re.fullmatch(r"\d{8}T\d{6}Z", arguments["SNAPSHOT"]), f"the day of the packages is {arguments['SNAPSHOT']}")
    copies = [rest.split() for name, rest in steps if name == "COPY"]
    check(copies == [[".", "/source"], ["--from=build", "/image", "/image"]], f"it copies {copies}")
    ignored = [line for line in (SOURCE / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    for part in ("meson.build", "meson_options.txt", "LICENSE", "configs", "docs", "kernels", "launcher", "packaging/container", "runtime",
                 "scripts/setup", "scripts/package", "scripts/make_manual.py", "trainer"):
        check((SOURCE / part).exists() and is_copied(part, ignored), f"{part} is not copied into the image")
    check(not is_copied("build-asan", ignored) and not is_copied(".git", ignored), "build folders or .git are copied into the image")
    return arguments, [rest for name, rest in steps if name == "RUN"]


def check_def(arguments):
    """The same base, day and steps as the Dockerfile."""
    stages = re.split(r"^(?=Bootstrap: )", DEF, flags=re.MULTILINE)[1:]
    check(len(stages) == 2, f"{len(stages)} stages")
    runs = []
    for stage in stages:
        own = defaults(line.strip() for line in re.search(r"%arguments\n(.*?)\n\n", stage, re.DOTALL)[1].splitlines())
        for name, value in own.items():
            check(arguments.get(name) == value, f"{name} is {value} in ndtrain.def, {arguments.get(name)} in Dockerfile")
        for name in re.findall(r"\{\{ (\w+) \}\}", stage):
            check(name in own, f"a stage of ndtrain.def uses {name}, which it does not declare")
        runs += [re.sub(r"\{\{ (\w+) \}\}", r"${\1}", line.strip()) for line in re.search(r"%post\n(.*?)(\n\n|$)", stage, re.DOTALL)[1].splitlines()]
    check("%files\n    . /source" in stages[0] and "%files from build\n    /image /image" in stages[1], "files of ndtrain.def")
    return runs


def check_steps(runs, place):
    """packaging/container is called with steps that it has."""
    for line in runs:
        words = [word for word in line.split() if "=" not in word]
        check(words[0] == f"/{'source/packaging' if words[1] == 'build' else 'image'}/container", f"{place} runs {words[0]}")
        check(f"{words[1]}:" in CONTAINER, f"{place} calls the step {words[1]}, which packaging/container has not")
    check([[word for word in line.split() if "=" not in word][1] for line in runs] == ["build", "install"], f"{place} runs {runs}")


def run_container(*arguments, os_release="ID=debian\nVERSION_CODENAME=bookworm\n", **environment):
    """The script with stand-ins for apt and for the scripts of a source folder; what it called, and the sources it left."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for part in ("bin", "source/scripts", "source/packaging", "etc/apt/apt.conf.d", "etc/apt/sources.list.d", "var/lib/apt/lists"):
            (folder / part).mkdir(parents=True)
        (folder / "etc/os-release").write_text(os_release)
        text = CONTAINER
        for path in ("/etc/", "/source", "/image", "/var/lib/"):
            text = re.sub(rf"(?<![\w.$}}]){re.escape(path)}", str(folder) + path, text)
        (folder / "source/packaging/container").write_text(text)
        called = folder / "called"
        for program, more in (("bin/apt-get", ""), ("source/scripts/setup", ""),
                              ("source/scripts/package", "mkdir -p build-package; : >build-package/ndtrain_1_amd64.deb\n")):
            (folder / program).write_text(f'#!/bin/sh\necho "{program.split("/")[-1]} $*" >>{called}\n{more}')
            (folder / program).chmod(0o755)
        done = subprocess.run(["sh", folder / "source/packaging/container", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              env={**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", **environment}, timeout=60)
        files = [*sorted((folder / "etc/apt").glob("*.d/*"))]
        return (done.returncode, called.read_text().replace(str(folder), "").splitlines() if called.exists() else [],
                "".join(file.read_text() for file in files), done.stderr)


def check_container():
    """What it calls, with options that the called scripts have."""
    status, called, sources, said = run_container("build")
    check(status == 0 and called == ["apt-get -q update", "setup ", "apt-get -q install -y --no-install-recommends dpkg-dev", "package "] and not sources,
          f"build: {status} {called} {sources} {said}")
    status, called, _, said = run_container("build", "--cuda")
    check(status == 0 and "setup --cuda" in called and "package --cuda" in called, f"build --cuda: {status} {called} {said}")
    status, called, _, said = run_container("install")
    check(status == 0 and "/image/ndtrain.deb libpmix2" in called[1], f"install: {status} {called} {said}")
    check(run_container("frobnicate")[0] == 2, "a wrong step")
    day = "20250905T000000Z"
    sources = run_container("install", SNAPSHOT=day)[2]
    check(f"http://snapshot.debian.org/archive/debian-security/{day} bookworm-security main" in sources and sources.count(day) == 3,
          f"the sources are {sources}")
    sources = run_container("install", SNAPSHOT=day, os_release="ID=ubuntu\n")[2]
    check(sources == f'APT::Snapshot "{day}";\n', f"on Ubuntu the sources are {sources}")
    for script in ("setup", "package"):
        check("--cuda" in call([SOURCE / "scripts" / script, "--help"]), f"scripts/{script} has no --cuda")


def check_meson():
    known = set(re.findall(r"option\('(\w+)'", (SOURCE / "meson_options.txt").read_text()))
    for name in re.findall(r"-D(\w+)=", PACKAGE):
        check(name in known, f"scripts/package sets {name}, which meson_options.txt has not")


def check_packages():
    """The names that apt is asked for, where it knows some."""
    if not shutil.which("apt-cache"):
        return
    names = ["dpkg-dev", "libpmix2"] + call([SOURCE / "scripts/setup", "--list"]).split()
    known = call(["apt-cache", "pkgnames"]).split()
    if "gcc" in known and "bookworm" in pathlib.Path("/etc/os-release").read_text(): # the release of the base
        check(set(names) <= set(known), f"apt knows no {set(names) - set(known)}")


arguments, runs = check_dockerfile()
check_steps(runs, "Dockerfile")
check_steps(check_def(arguments), "ndtrain.def")
check_container()
check_meson()
check_packages()
print("check_packaging: Dockerfile and ndtrain.def name what is there")
