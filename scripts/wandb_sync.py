#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Send a run's metrics to Weights & Biases, or to trackio, which keeps them on this machine.

  scripts/wandb_sync.py RUN [--project NAME] [--name NAME] [--entity NAME] [--mode online|offline] [--with wandb|trackio]
                        [--follow] [--patience SECONDS] [--pid PID]

RUN is a run folder. Without --follow what metrics.jsonl holds now is sent. With it the file is followed until the run has made its
last step, has stopped early or by a signal, or has written nothing for --patience seconds (and for ten of its steps; 120 seconds
after a line that says why it failed, since the job may start again); with --pid until that process has ended. A second call goes on where the first one stopped: RUN/wandb_sync.json (of
trackio RUN/trackio_sync.json) keeps the id of the run and how far the file was sent. After a call that was killed the next one reads what the library has kept on this
machine, which is less than it was given, and goes on behind that: wandb's files in offline mode and trackio's database hold every
line once. Each line is sent with sync/offset, the size of the file up to its end, by which it is found again. What a killed call
had sent over a network cannot be read: a few steps may be sent again, or those that wandb held back may be missing.

The trainer itself opens no connection and waits for none: this program only reads its file, and may fail, stop or lag at will.
Names are those of transformers' Trainer (train/loss, train/grad_norm, eval/loss, ...), over train/global_step. Steps that a
resumed run makes again are sent again, under the same train/global_step.

Exit status: 0 all is sent, 1 the service failed, 2 wrong arguments or no such library, 65 no run, or a damaged line.
"""
import argparse
import hashlib
import fcntl
import importlib
import json
import os
import pathlib
import signal
import sys
import time

OFFSET = "sync/offset"
POLL_SECONDS = 1.0
RESTART_SECONDS = 120.0 # by then ndlaunch has started a job again that failed
WRITER_SECONDS = 60.0
PATIENCE_SECONDS = 600.0
TAIL_BYTES = 1 << 16
STEP_KEYS = {"loss": "train/loss", "grad_norm": "train/grad_norm", "lr": "train/learning_rate",
             "tokens_seen": "train/num_input_tokens_seen", "tokens_per_second": "train/train_tokens_per_second",
             "tflops_per_worker_causal": "train/tflops_per_worker", "step_ms": "train/step_ms", "data_wait_ms": "train/data_wait_ms",
             "slowest_ms": "train/slowest_ms", "fastest_ms": "train/fastest_ms", "slowest_rank": "train/slowest_rank",
             "wire_bytes": "train/sent_bytes", "peak_memory_bytes": "train/peak_memory_bytes", "skipped": "train/skipped"}
VALIDATION_KEYS = {"validation_loss": "eval/loss", "validation_ms": "eval/ms"}


class DataError(Exception):
    pass


def parse_arguments(arguments=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("run", type=pathlib.Path)
    p.add_argument("--project", default=os.environ.get("WANDB_PROJECT", "ndtrain"))
    p.add_argument("--name", help="default: the name of the folder")
    p.add_argument("--entity", help="user or team (wandb)")
    p.add_argument("--mode", choices=("online", "offline"), help="of wandb; default: what WANDB_MODE says, else online")
    p.add_argument("--with", dest="library", choices=("wandb", "trackio"), default="wandb")
    p.add_argument("--follow", action="store_true", help="until the run ends")
    p.add_argument("--patience", type=float, default=PATIENCE_SECONDS, metavar="SECONDS",
                   help="--follow: a run that writes nothing for so long has ended; %(default)g")
    p.add_argument("--pid", type=int, help="follow until this process has ended")
    return p.parse_args(arguments)


def opened_below(folder):
    """A process that has a file below the folder open, and the file."""
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            for number in os.listdir(f"/proc/{process}/fd"):
                file = pathlib.Path(os.readlink(f"/proc/{process}/fd/{number}"))
                if folder in file.parents:
                    return process, file
        except OSError: # it has just ended or closed one, or is another user's
            continue
    return None


def wait_for_writers(folder):
    """wandb's own process goes on for a moment when its caller is killed."""
    end = time.monotonic() + WRITER_SECONDS
    while (found := opened_below(folder)):
        if time.monotonic() > end:
            raise DataError(f"process {found[0]} still has {found[1]} open; end it, then call this again")
        time.sleep(0.1)


def wandb_records(module, path):
    """The records of a .wandb file up to where a killed writer left it. Blocks of 32 KiB as LevelDB's log has them, behind 7 bytes."""
    proto = importlib.import_module(module.__name__ + ".proto.wandb_internal_pb2")
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4:at + 6], "little"), data[at + 6]
        if kind not in (1, 2, 3, 4) or at + 7 + length > len(data):
            return
        parts += data[at + 7:at + 7 + length]
        at += 7 + length
        if kind in (1, 4): # whole, or the last part
            yield proto.Record.FromString(parts)
            parts = b""


class Wandb:
    """One run of wandb: steps are a metric of their own, so that a resumed run may go back."""

    @staticmethod
    def is_local(arguments):
        return (arguments.mode or os.environ.get("WANDB_MODE")) == "offline"

    @staticmethod
    def kept(module, arguments, run_id):
        """The greatest sync/offset in the files of offline runs; each call has made one."""
        folder = (arguments.run / "wandb").resolve()
        wait_for_writers(folder)
        for path in sorted(folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"), reverse=True):
            last = None
            for record in wandb_records(module, path):
                for item in record.history.item:
                    if OFFSET in (item.key, *item.nested_key):
                        last = int(float(item.value_json))
            if last is not None:
                return last
        return 0

    def __init__(self, module, arguments, run_id, config):
        self.run = module.init(project=arguments.project, name=arguments.name, entity=arguments.entity, mode=arguments.mode, id=run_id,
                               resume="allow", config=config, dir=str(arguments.run))
        self.run.define_metric("train/global_step")
        self.run.define_metric(OFFSET, hidden=True)
        self.run.define_metric("*", step_metric="train/global_step")

    def log(self, step, values):
        self.run.log({"train/global_step": step, **values})

    def finish(self):
        self.run.finish()


class Trackio:
    @staticmethod
    def is_local(arguments):
        return not (os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL"))

    @staticmethod
    def kept(module, arguments, run_id):
        """The greatest sync/offset in its database."""
        storage = importlib.import_module(module.__name__ + ".sqlite_storage").SQLiteStorage
        rows = storage.get_logs(arguments.project, f"{arguments.name}-{run_id}")
        return max((int(row[OFFSET]) for row in rows if OFFSET in row), default=0)

    def __init__(self, module, arguments, run_id, config):
        self.module = module
        module.init(project=arguments.project, name=f"{arguments.name}-{run_id}", config=config, resume="allow")

    def log(self, step, values):
        self.module.log(values, step=step)

    def finish(self):
        self.module.finish()


def record_of(run, start=1):
    """The record of a start of the run, run.json or run-2.json, ..., or nothing where it is missing."""
    path = run / ("run.json" if start == 1 else f"run-{start}.json")
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}") from None


class Newest:
    """The settings of the newest start: a run that is resumed may have more steps than before."""

    def __init__(self, run):
        self.run, self.start, self.config = run, 1, record_of(run).get("config", {})

    def read(self):
        while (self.run / f"run-{self.start + 1}.json").exists(): # each is written at once, before the start's first line
            self.start += 1
            self.config = record_of(self.run, self.start).get("config", {})
        return self.config


def read_state(path, record):
    try:
        state = json.loads(path.read_text())
        return {"id": str(state["id"]), "offset": int(state["offset"]), "unfinished": bool(state.get("unfinished"))}
    except FileNotFoundError:
        # The id is the same at every call for one run, and another one for each run.
        seed = f"{record.get('start_time')} {record.get('job')} {path.parent.resolve().name}"
        return {"id": hashlib.sha256(seed.encode()).hexdigest()[:12], "offset": 0, "unfinished": False}
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is damaged; remove it to send the whole run again") from None


def write_state(path, state):
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(state) + "\n")
    os.replace(temporary, path)


def values_of(row):
    """What a line of metrics.jsonl is called by the Trainer; null, which is a value that was not finite, becomes NaN."""
    keys = STEP_KEYS if "step_ms" in row else VALIDATION_KEYS if "validation_loss" in row else {}
    values = {name: float("nan") if row[key] is None else float(row[key]) for key, name in keys.items() if key in row}
    for key, prefix in (("source_loss", "train/loss"), ("validation_set_loss", "eval/loss")):
        values |= {f"{prefix}/{name}": float("nan") if loss is None else float(loss) for name, loss in row.get(key, {}).items()}
    if row.get("event") in ("resumed", "checkpoint_failed"):
        values[f"events/{row['event']}"] = 1.0
    return values


def send_new(run, kept_in, state, sink):
    """Sends the whole lines behind the offset; returns their rows."""
    path = run / "metrics.jsonl"
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < state["offset"]:
                raise DataError(f"{path} is shorter than what was sent of it; remove {kept_in} to send the whole run again")
            file.seek(state["offset"])
            data = file.read()
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; give the folder of a run") from None
    rows = []
    for line in data[:data.rfind(b"\n") + 1].splitlines(keepends=True):
        try:
            row = json.loads(line)
            step, values = int(row["step"]), values_of(row)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DataError(f"{path} has a damaged line at byte {state['offset']}") from None
        state["offset"] += len(line)
        if values:
            sink.log(step, values | {OFFSET: state["offset"]})
        rows.append(row)
    if rows and not state["unfinished"]:
        write_state(kept_in, state)
    return rows


class End:
    """Whether the lines so far are those of a run that has ended."""

    def __init__(self, run, offset):
        self.is_over, self.has_failed, self.step, self.step_seconds = False, False, 0, 0.0
        try: # lines that an earlier call has sent
            with open(run / "metrics.jsonl", "rb") as file:
                file.seek(max(0, offset - TAIL_BYTES))
                lines = file.read(min(offset, TAIL_BYTES)).splitlines()[offset > TAIL_BYTES:]
            self.rows = [json.loads(line) for line in lines]
        except (OSError, ValueError):
            self.rows = [] # sending says what is wrong

    def add(self, rows, config):
        """The validation behind the last step is the last line of a run that has one; a later start goes on behind any line."""
        self.rows += rows
        wanted = "validation_loss" if config.get("data.validation_path") else "step_ms"
        for row in self.rows:
            event, step = row.get("event"), row.get("step", 0)
            self.step = step if event == "resumed" else max(self.step, step)
            self.step_seconds = row.get("step_ms", 1e3 * self.step_seconds) / 1e3
            if event is None or event == "resumed":
                self.is_over = False
            self.has_failed = event == "ended" or (self.has_failed and event != "resumed")
            if event == "early_stopped" or (event == "checkpoint" and row.get("reason") == "signal" and step >= self.step):
                self.is_over = True
            if step == config.get("train.steps") and wanted in row:
                self.is_over = True
        self.rows = []


def is_alive(pid):
    try:
        os.kill(pid, 0)
        return True
    except ProcessLookupError:
        return False
    except PermissionError:
        return True


def follow(arguments, state, sink, newest, stopped):
    end, heard = End(arguments.run, state["offset"]), time.monotonic()
    while True:
        alive = arguments.pid is None or is_alive(arguments.pid) # before reading, so that nothing is left behind
        rows = send_new(arguments.run, arguments.state, state, sink)
        end.add(rows, newest.read())
        heard = time.monotonic() if rows else heard
        if not alive or stopped or (arguments.pid is None and end.is_over):
            return
        # ndlaunch may start a job that has failed again, into the same file.
        patience = min(arguments.patience, RESTART_SECONDS) if end.has_failed else max(arguments.patience, 10 * end.step_seconds)
        if arguments.pid is None and time.monotonic() - heard > patience:
            if end.has_failed:
                return
            print(f"wandb_sync: {arguments.run / 'metrics.jsonl'} has no new line for {patience:g} s, so the run is taken as ended; if "
                  "it goes on, call this again", file=sys.stderr)
            return
        time.sleep(POLL_SECONDS)


def lock(arguments, stopped):
    """One at a time sends a run to a library; the one that follows an earlier start of it has only a rest to send."""
    file = open(arguments.state.with_suffix(".lock"), "w") # closed when the process ends
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if arguments.pid is None or stopped:
                raise DataError(f"another wandb_sync sends {arguments.run} to {arguments.library}") from None
            time.sleep(POLL_SECONDS)


def kept(kind, library, arguments, state):
    try:
        return kind.kept(library, arguments, state["id"])
    except (ImportError, AttributeError, TypeError) as error: # another version of the library, which reads by other names
        print(f"wandb_sync: this {arguments.library} cannot be asked what it has of the last call ({error}), so lines from byte "
              f"{state['offset']} on may be there twice", file=sys.stderr)
        return 0


def sync(arguments, library):
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    signal.signal(signal.SIGINT, lambda *_: stopped.append(True))
    if not (arguments.run / "metrics.jsonl").exists() and not arguments.follow:
        raise DataError(f"{arguments.run / 'metrics.jsonl'} does not exist; give the folder of a run")
    begin = time.monotonic()
    while not (arguments.run / "metrics.jsonl").exists(): # a run that is just starting
        late = arguments.pid is None and time.monotonic() - begin > arguments.patience
        if stopped or late or (arguments.pid is not None and not is_alive(arguments.pid)):
            raise DataError(f"{arguments.run} has no metrics.jsonl, and " +
                            (f"none came in {arguments.patience:g} s" if late else "its run has ended"))
        time.sleep(POLL_SECONDS)
    arguments.state = arguments.run / f"{arguments.library}_sync.json"
    held = lock(arguments, stopped) # noqa: F841
    while arguments.pid is not None and is_alive(arguments.pid) and not (arguments.run / "run.json").exists():
        time.sleep(POLL_SECONDS) # it is written before the first step
    record = record_of(arguments.run)
    arguments.name = arguments.name or arguments.run.resolve().name
    state, newest = read_state(arguments.state, record), Newest(arguments.run)
    kind = Wandb if arguments.library == "wandb" else Trackio
    if state["unfinished"]: # the last call was killed, or failed
        state["offset"] = max(state["offset"], kept(kind, library, arguments, state))
    # Where the library keeps it on this machine, what is kept counts in the end, as it is written later than it is sent.
    state["unfinished"] = kind.is_local(arguments)
    write_state(arguments.state, state)
    sink = kind(library, arguments, state["id"], newest.read())
    try:
        if arguments.follow or arguments.pid is not None:
            follow(arguments, state, sink, newest, stopped)
        else:
            send_new(arguments.run, arguments.state, state, sink)
    finally:
        sink.finish()
    state["unfinished"] = False
    write_state(arguments.state, state)


def main():
    arguments = parse_arguments()
    try:
        library = importlib.import_module(arguments.library)
    except ImportError:
        print(f"wandb_sync: this Python ({sys.executable}) has no {arguments.library}; install it with "
              f"pip install {arguments.library}, or run this script with a Python that has it", file=sys.stderr)
        return 2
    try:
        sync(arguments, library)
    except DataError as error:
        print(f"wandb_sync: {error}", file=sys.stderr)
        return 65
    except Exception as error: # whatever the library raises: its own kinds of errors, or those of its network
        print(f"wandb_sync: {arguments.library} failed: {type(error).__name__}: {error}; call it again to go on", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
