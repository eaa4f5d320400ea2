# SPDX-License-Identifier: Apache-2.0
"""Runs items one after the other: each once, in a session of its own, within its time and that of the call."""
import dataclasses
import fnmatch
import os
import re
import signal
import sys
import time
import traceback

import report
from place import SKIPPED, Cut, Failure, Skip, complain, say

GRACE = 15  # seconds between TERM and KILL: ndlaunch gives its workers ten to end
PROGRESS = 20  # seconds between lines of progress
REPEATED = ("machine", "compile")  # every call repeats these, so they do not make others wait when they were short


@dataclasses.dataclass
class Item:
    """The function is called with the place and the arguments. It prints results as JSON objects, one a line."""
    name: str
    phase: str
    usual: float  # seconds
    most: float
    function: object
    arguments: tuple
    after: str  # an item whose results this one needs; empty: none
    environment: dict

    def __init__(self, name, phase, usual, most, function, *arguments, after="", environment=None):
        self.name, self.phase, self.usual, self.most = name, phase, usual, most
        self.function, self.arguments, self.after, self.environment = function, arguments, after, environment or {}

    def again(self, logs):
        """The same with each op waited for, and what the libraries say of themselves."""
        return Item(f"{self.name}-again", self.phase, self.usual, self.most, self.function, *self.arguments, environment={
            **self.environment, "ND_CUDA_SYNC": "1", "CUBLASLT_LOG_LEVEL": "5", "CUBLASLT_LOG_FILE": f"{logs}.cublaslt.log",
            "CUDNN_LOGLEVEL_DBG": "3", "CUDNN_LOGDEST_DBG": f"{logs}.cudnn.log", "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_FILE": f"{logs}.nccl.log"})


LOG_MOST = 200000  # bytes kept of the log of a library
LIBRARY = re.compile(r"/\S*/lib(?:cuda|cublasLt|cudnn|cudnn_graph|nccl|nvrtc|cupti)\.so\S*$", re.MULTILINE)


def keep_ends(paths):
    for path in paths:
        with open(path, "r+b") as f:
            f.seek(0, os.SEEK_END)
            if f.tell() > LOG_MOST:
                f.seek(-LOG_MOST, os.SEEK_END)
                end = f.read()
                f.seek(0)
                f.write(end)
                f.truncate()


def in_child(item, place):
    """The exit code of an item, whose output goes to its two files."""
    def cut(*_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Cut

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, cut)
    try:
        code = item.function(place, *item.arguments)
        return 0 if code is None else code
    except Skip as why:
        say({"skipped": str(why)})
        return SKIPPED
    except Failure as why:
        if str(why):
            complain(why)
        return 1
    except Cut:
        return 124
    except Exception:
        traceback.print_exc()
        return 1


def send(pids, number):
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


class Runner:
    def __init__(self, place, deadline, only):
        self.place, self.deadline, self.only = place, deadline, only
        self.done = set(report.done(place.out))
        self.left = False  # something waits for another call
        self.ran = False  # something was run, so that others may have to wait
        self.child = 0  # the session of the item that runs
        self.opened = {}  # by that item: program -> files of NVIDIA's libraries

    def forget(self, name):
        self.done.discard(name)

    def state(self, name):
        value = report.read_item(report.record_path(self.place.out, name))
        return value["state"] if value else None

    def run(self, item):
        asked = any(fnmatch.fnmatchcase(item.name, pattern) for pattern in self.only)
        if not asked and (self.only or item.name in self.done):
            return
        remains = self.deadline - time.monotonic()
        usual = item.usual / 10 if self.place.dry else item.usual
        # What an item needs is not there yet, but will be: then that item waits too.
        must_wait = item.after and self.state(item.after) in ("waiting", "cut off")
        if must_wait or (self.ran and remains < usual):
            self.left = True
            report.wait(self.place.out, item.name)
            return
        self.run_now(item, min(item.most, remains) if self.ran else item.most)

    def run_again(self, item):
        """An item that failed, once more with what helps to find out why."""
        remains = self.deadline - time.monotonic()
        if self.state(item.name) == "failed" and remains > 0:
            logs = self.place.out / "data" / f"{item.name}-again"
            self.run_now(item.again(logs), min(item.most, remains))
            keep_ends(logs.parent.glob(f"{logs.name}.*.log"))

    def run_now(self, item, bound):
        print(f"{report.NAME}: {item.name}", flush=True)
        begin = time.monotonic()
        report.begin(self.place.out, item.name, self.place.origin)
        self.opened = {}
        self.start(item)
        code = self.wait_for(item, begin, begin + bound)
        if code == 124 and bound < item.most:
            code, self.left = "cut", True
        seconds = int(time.monotonic() - begin)
        state = report.end(self.place.out, item.name, code, seconds, self.place.origin, self.opened)
        report.deliver(self.place.out)
        print(f"{report.NAME}: {item.name} {state} after {seconds} s", flush=True)
        self.ran = self.ran or item.name not in REPEATED or seconds >= 60

    def start(self, item):
        """A session of its own, since Criterion leaves its process group."""
        logs = [report.record_path(self.place.out, item.name).with_suffix(suffix) for suffix in (".out", ".err")]
        sys.stdout.flush()
        sys.stderr.flush()
        self.child = os.fork()
        if self.child:
            return
        code = 1
        try:
            os.setsid()
            for number, path in zip((1, 2), logs):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.environ.update(item.environment)
            code = in_child(item, self.place)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def wait_for(self, item, begin, deadline):
        """The exit code, 124 at the deadline. What the item started ends with it. Meanwhile prints how far the item is."""
        shown, said, pause, code = begin, "", 0.01, None
        while code is None:
            pid, status = os.waitpid(self.child, os.WNOHANG)
            now = time.monotonic()
            if pid:
                code = os.waitstatus_to_exitcode(status)
                code = 128 - code if code < 0 else code
            elif now >= deadline:
                code = 124
            else:
                time.sleep(pause)
                pause = min(2 * pause, 0.25)
                self.note_libraries()
            if now - shown >= PROGRESS:
                shown = now
                line = report.last_line(self.place.out, item.name)
                if line and line != said:
                    said = line
                    print(f"{report.NAME}: {item.name}: {line[:120]} ({now - begin:.0f} s)", flush=True)
        self.end_child()
        return code

    def processes(self):
        """Those of the item's session."""
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open(f"/proc/{name}/stat") as f:
                        state, _, _, session = f.read().rpartition(")")[2].split()[:4]
                except (OSError, ValueError):
                    continue
                if int(session) == self.child and state != "Z":
                    found.append(int(name))
        return found

    def note_libraries(self):
        """Which files the item's programs have really opened, whatever they were told to."""
        for pid in self.processes():
            try:
                with open(f"/proc/{pid}/comm") as name, open(f"/proc/{pid}/maps") as maps:
                    found = set(LIBRARY.findall(maps.read()))
                    if found:
                        program = name.read().strip()
                        self.opened[program] = sorted(found.union(self.opened.get(program, ())))
            except OSError:
                continue  # it has ended

    def end_child(self):
        """Ends what is left of the item: TERM to each process, and KILL after the grace time."""
        if not self.child:
            return
        end, told = time.monotonic() + GRACE, set()
        while time.monotonic() < end:
            there = set(self.processes())
            if not there:
                break
            send(there - told, signal.SIGTERM)
            told |= there
            time.sleep(0.05)
        send(self.processes(), signal.SIGKILL)
        try:
            os.waitpid(self.child, 0)
        except ChildProcessError:
            pass
        self.child = 0
