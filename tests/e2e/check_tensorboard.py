#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tensorboard's own readers open what --log-with tensorboard writes.

A run of ten steps, then one that goes on from its fifth: in both readers, the Python one and the data server where there is one, the
curves must be those of metrics.jsonl, and continuous. A file that is cut at any byte must give all records that are whole. Event files
of other programs in the run's folder stay as they are, and both are shown.
"""
import contextlib
import os
import pathlib
import shutil
import struct
import subprocess
import tempfile
import time

from tensorboard import context
from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader, RawEventFileLoader
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.data import server_ingester
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util import grpc_util

import steps
from steps import check, test

# Each tag, as a number of a line of metrics.jsonl. The text is one source and one set, which have no curves of their own.
STEP_TAGS = {
    "train/loss": lambda r: r["loss"],
    "train/grad_norm": lambda r: r["grad_norm"],
    "train/learning_rate": lambda r: r["lr"],
    "train/num_input_tokens_seen": lambda r: r["tokens_seen"],
    "train/train_tokens_per_second": lambda r: r["tokens_per_second"],
    "train/tflops_per_worker": lambda r: r["tflops_per_worker_causal"],
    "train/step_ms": lambda r: r["step_ms"],
    "train/data_wait_ms": lambda r: r["data_wait_ms"],
    "train/sent_mib": lambda r: sum(r["wire"].values()) / 2**20,
    "train/peak_memory_gib": lambda r: r["peak_memory_bytes"] / 2**30,
    "train/skipped": lambda r: r.get("skipped", False),
}
VALIDATION_TAGS = {
    "eval/loss": lambda r: r["validation_loss"],
    "eval/runtime": lambda r: r["validation_ms"] / 1000,
}

OURS = {"MALLOC_PERTURB_": os.environ.get("ND_PERTURB", "0")}  # for our programs
SECONDS = 120  # a bound on what the data server may take


def setup(t):
    t.model(hidden_size=32, intermediate_size=64)
    t.text()


def run(t, flags):
    t.run("ndlaunch --device cpu --num-processes 2 --sequence-length 64 --num-steps 10 --set model.config=model.json --set data.path=text.txt "
          "--set data.validation_path=text.txt --set train.validation_interval=5 --set train.validation_batches=1 --set output.dir=run "
          f"--checkpoint-frequency 5 {flags}", **OURS)


def steps_of(t, run="run"):
    """The steps that count: those above a resumed event that have later numbers do not."""
    steps, validations = {}, {}
    for record in t.metrics(run):
        if record.get("event") == "resumed":
            for kept in (steps, validations):
                for step in [s for s in kept if s > record["step"]]:
                    del kept[step]
        elif "loss" in record:
            steps[record["step"]] = record
        elif "validation_loss" in record:
            validations[record["step"]] = record
    return steps, validations


def single(value):
    """As a scalar of an event file keeps it."""
    return struct.unpack("f", struct.pack("f", value))[0]


def wait_for(holds, words):
    deadline = time.monotonic() + SECONDS
    while not holds():
        check(time.monotonic() < deadline, f"{words} after {SECONDS} s")
        time.sleep(0.02)


def python_reader(folder):
    """Event files as tensorboard --load_fast=false reads them."""
    multiplexer = plugin_event_multiplexer.EventMultiplexer(tensor_size_guidance={"scalars": 1000})
    multiplexer.AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    return data_provider.MultiplexerDataProvider(multiplexer, str(folder))


def data_server():
    """The program that tensorboard reads event files with by default; None: there is none for this machine."""
    try:
        return server_ingester.get_server_binary().path
    except server_ingester.NoDataServerError:
        return None


@contextlib.contextmanager
def server_reader(program, folder):
    os.environ["no_grpc_proxy"] = "localhost"
    with tempfile.TemporaryDirectory() as name:
        port = pathlib.Path(name) / "port"
        server = subprocess.Popen([program, "--logdir", folder, "--reload", "once", "--port", "0", "--port-file", port,
                                   "--die-after-stdin"], stdin=subprocess.PIPE)
        try:
            wait_for(lambda: server.poll() is not None or (port.exists() and port.read_text().endswith("\n")), "the data server is silent")
            check(server.poll() is None, f"the data server ended with {server.poll()}")
            address = f"localhost:{port.read_text().strip()}"
            yield server_ingester.ExistingServerDataIngester(
                address, channel_creds_type=grpc_util.ChannelCredsType.LOCAL).data_provider
        finally:
            server.kill()
            server.communicate()


def curves_of(reader, run):
    """tag -> [(step, value)]; {}: the reader does not know the run (yet)."""
    found = reader.read_scalars(context.RequestContext(), experiment_id="", plugin_name="scalars", downsample=1000).get(run, {})
    return {tag: [(e.step, e.value) for e in events] for tag, events in found.items()}


def expect_curves(t):
    run_folder, (steps, validations) = t.folder / "run", steps_of(t)
    wanted = {tag: [(s, single(value(r))) for s, r in sorted(steps.items())] for tag, value in STEP_TAGS.items()}
    wanted |= {tag: [(s, single(value(r))) for s, r in sorted(validations.items())] for tag, value in VALIDATION_TAGS.items()}
    check([s for s, _ in wanted["eval/loss"]] == [5, 10], f"validations are at {validations}")

    def expect(name, reader):
        found = curves_of(reader, "tensorboard")
        check(found.keys() == wanted.keys(), f"{name}: the tags are {sorted(found)}, not {sorted(wanted)}")
        for tag, curve in wanted.items():
            check(found[tag] == curve, f"{name}: {tag} is {found[tag]}, metrics.jsonl has {curve}")

    expect("Python", python_reader(run_folder))
    server = data_server()
    if server:
        with server_reader(server, run_folder) as reader:
            wait_for(lambda: len(curves_of(reader, "tensorboard").get("eval/loss", [])) == 2, "the data server has not read the run")
            expect("data server", reader)
    events = EventAccumulator(str(run_folder / "tensorboard"))
    events.Reload()
    return events


def expect_settings(events):
    text = events.Tensors("configuration")[0].tensor_proto.string_val[0].decode()
    check("\n      steps: 10\n" in text and text.startswith("    launch:"), text)


def expect_samples(events, rows):
    """The texts of metrics.jsonl, under the prompt."""
    wanted = {(r["prompt"], r["step"]): r["text"] for r in rows if r.get("event") == "sample"}
    check([step for _, step in wanted] == [5, 5, 10, 10] and {prompt for prompt, _ in wanted} == {"ab", "op q"}, f"samples are {wanted}")
    for (prompt, step), text in wanted.items():
        shown = {e.step: e.tensor_proto.string_val[0].decode() for e in events.Tensors(f"samples/{prompt}")}
        check(shown[step] == "    " + text and text, f"{prompt!r} goes on {text!r}, and TensorBoard shows {shown}")


def expect_marks(run_folder):
    """The second start takes back what the first has written above the step that it goes on from."""
    found = []
    for n, path in enumerate(sorted((run_folder / "tensorboard").iterdir())):
        for event in EventFileLoader(str(path)).Load():
            if event.WhichOneof("what") == "session_log":
                found.append((n, event_pb2.SessionLog.SessionStatus.Name(event.session_log.status), event.step))
    check(set(found) == {(1, "START", 6)}, f"session marks are {found}")


def records(data):
    """Where each record of a file ends."""
    ends, at = [], 0
    while at < len(data):
        at += 16 + struct.unpack_from("<Q", data, at)[0]
        ends.append(at)
    check(ends[-1] == len(data), "the file does not end with a whole record")
    return ends


def expect_whole_records_of_cut_files(path, folder):
    data = path.read_bytes()
    ends = records(data)
    cut = folder / "events.out.tfevents.1.cut"
    for size in range(len(data) + 1):
        cut.write_bytes(data[:size])
        whole = sum(end <= size for end in ends)
        seen = len(list(RawEventFileLoader(str(cut)).Load())) if size else 0
        check(seen == whole, f"{seen} records are read from {size} bytes that hold {whole}")


def write_foreign(folder):
    """Files as other programs leave them: tensorboard's writer, which torch's is too, names and bytes that are none of it."""
    writer = EventFileWriter(str(folder))
    for step in (1, 2, 300):
        value = summary_pb2.Summary.Value(tag="foreign/loss", simple_value=step / 4)
        writer.add_event(event_pb2.Event(wall_time=time.time(), step=step, summary=summary_pb2.Summary(value=[value])))
    writer.close()
    later = folder / "events.out.tfevents.4000000000.zz.1.0" # of a clock that is wrong: ours has a later name
    shutil.copy(next(folder.iterdir()), later)
    later.write_bytes(later.read_bytes()[:100] + b"\0no record") # and what another program does not finish
    (folder / "events.out.tfevents.profile-empty").write_bytes(b"")
    (folder / "plugins").mkdir()


@test
def beside_foreign_files(t):
    events = t.folder / "guest" / "tensorboard"
    events.mkdir(parents=True)
    write_foreign(events)
    before = {path: path.read_bytes() for path in events.iterdir() if path.is_file()}
    run(t, "--log-with tensorboard --set output.dir=guest")
    t.says(never=("warning", "TensorBoard"))
    check(all(path.read_bytes() == data for path, data in before.items()), "a foreign file was written to")
    ours = {path for path in events.iterdir() if path.is_file()} - before.keys()
    check(len(ours) == 1 and ours.pop().name > max(path.name for path in before if "profile" not in path.name), f"our file is {ours}")
    wanted = {"train/loss": [(s, single(r["loss"])) for s, r in sorted(steps_of(t, "guest")[0].items())]}
    wanted["foreign/loss"] = [(step, step / 4) for step in (1, 2, 300)]
    found = curves_of(python_reader(t.folder / "guest"), "tensorboard")
    check({tag: found.get(tag) for tag in wanted} == wanted, f"beside foreign files the curves are {found}")
    t.run("ndtrain report guest", says="finished: all 10 steps", **OURS)
    page = t.read("guest/report.html")
    check("foreign" not in page and "tfevents" not in page, "the report names foreign files")


@test
def curves_of_a_run_that_went_on(t):
    run(t, "--log-with tensorboard --sample-prompt 'ab\\nop q' --sample-tokens 9")
    events = expect_curves(t)
    expect_settings(events)
    expect_samples(events, t.metrics("run"))
    files = sorted((t.folder / "run/tensorboard").iterdir())
    check(len(files) == 1, f"{files}")
    expect_whole_records_of_cut_files(files[0], t.folder)
    # A run that died after step 10 left this: it goes on from step 5, with other values of what is timed.
    t.remove("run/checkpoint-10")
    run(t, "--report-to all --resume-from-checkpoint latest")
    check(len(list((t.folder / "run/tensorboard").iterdir())) == 2, "the second start has no file of its own")
    expect_curves(t)
    expect_marks(t.folder / "run")
    print("event files: curves, settings and cut files are read by tensorboard" +
          ("" if data_server() else "; it has no data server for this machine"))


steps.main("tensorboard", setup)
