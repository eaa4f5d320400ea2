#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What other users, killed processes and odd files leave in a folder: check_file_attacks.py BUILD_FOLDER DISK_LIBRARY.

A link in a shared cache, in a run folder or in a model folder gets nothing written, cut, copied or made readable through it. A FIFO
in the place of a file is refused and waited for by nobody. What kill -9 leaves goes with the next start. A small stack is an error
with a sentence. Control characters do not reach a terminal. A check leaves no folders.
"""
import json
import os
import pathlib
import pty
import re
import shutil
import stat
import subprocess
import sys
import time

from checkpoint_runs import Bench, check

SECRET = b"SECRET: of this user alone"


class Attack(Bench):
    def program(self, *arguments, code=0, program="ndtrain", stack=None, cwd="."):
        command = [str(self.build / program), *arguments]
        if stack:
            command = ["bash", "-c", f'ulimit -s {stack} && exec "$0" "$@"', *command]
        done = subprocess.run(command, cwd=self.folder / cwd, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
        printed = (done.stdout + done.stderr).decode(errors="replace")
        check(done.returncode in (code if isinstance(code, tuple) else (code,)), f"{arguments} ended with {done.returncode}, not {code}:\n{printed}")
        return printed

    def run_flags(self, out, steps=2, model=("--model-config", "model.json"), data="text.txt"):
        return ["train", "--device", "cpu", *model, "--data-path", data, "--validation-path", "", "--sequence-length", "64", "--num-steps",
                str(steps), "--save-dir", out, "--checkpoint-frequency", "2", "--log-level", "info"]

    def secret(self, mode=0o600):
        path = self.folder / "secret"
        path.unlink(missing_ok=True)
        path.write_bytes(SECRET)
        path.chmod(mode)
        return path

    def check_secret(self, where, mode=0o600):
        path = self.folder / "secret"
        check(path.read_bytes() == SECRET, f"{where}: the file that the link leads to was changed: {path.read_bytes()!r}")
        check(stat.S_IMODE(path.stat().st_mode) == mode, f"{where}: its mode is {oct(path.stat().st_mode)} now")


def cache_lock(bench):
    """In a cache that everybody may write to, somebody puts a link under the name of one that is written."""
    (bench.folder / "rows.jsonl").write_text("".join(json.dumps({"text": f"row {i} of the text"}) + "\n" for i in range(200)))
    cache = bench.folder / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    flags = bench.run_flags("cached", data="rows.jsonl") + ["--cache-dir", "cache", "--log-level", "warning"]
    bench.program(*flags)
    made = [path.name for path in cache.iterdir()]
    check(len(made) == 1 and made[0].endswith(".tokens"), f"no cache is made: {made}")
    part = f"{made[0]}.part"
    for kind, plant in (("a link", os.symlink), ("another name", os.link)):
        for path in cache.iterdir():
            path.unlink()
        bench.remove("cached")
        plant(bench.secret(), cache / part)
        printed = bench.program(*flags, code=73)
        check(part in printed and f"it is {kind}" in printed, printed)
        bench.check_secret(f"{kind} as a cache that is written")
    (cache / part).unlink()
    bench.program(*flags)


def own_files(bench):
    """In the place of a file that a run goes on writing, somebody puts a link, or another name of a file."""
    bench.program(*bench.run_flags("linked"))
    for name in ("metrics.jsonl", ".lock"):
        path = bench.folder / "linked" / name
        for kind, plant in (("a link", os.symlink), ("another name", os.link)):
            before = path.read_bytes()
            path.unlink()
            plant(bench.secret(), path)
            printed = bench.program(*bench.run_flags("linked", steps=4), "--resume-from-checkpoint", "auto", code=73)
            check(name in printed and f"it is {kind}" in printed, printed)
            bench.check_secret(f"{name} as {kind}")
            check(not (bench.folder / "linked/checkpoint-4").exists(), "the run went on")
            path.unlink()
            path.write_bytes(before)


def own_folders(bench):
    """What a run makes in its folder goes through no link, which somebody put there before the run began."""
    run, loot = bench.folder / "planted", bench.folder / "loot"
    loot.mkdir()
    stands_in = bench.folder / "tracker"
    stands_in.write_text("#!/usr/bin/env python3\nimport os\n"
                         "held = [os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}')]\n"
                         "open('open', 'w').write('\\n'.join(held))\nopen('said', 'w').close()\n")
    stands_in.chmod(0o755)
    tracker = ["--log-with", "wandb", "--tracker-python", str(stands_in)]
    link = lambda path: path.symlink_to("../loot")
    for name, plant, flags, code in ((".tmp-checkpoint-2-single", link, [], 0), (".del-checkpoint-9", link, [], 0),
                                     ("profile", link, ["--profile-steps", "1-2"], 73), ("tensorboard", link, ["--log-with", "tensorboard"], 73),
                                     ("wandb_sync.log", lambda path: path.symlink_to(bench.secret()), tracker, 73),
                                     ("wandb_sync.log", os.mkfifo, tracker, 73)):
        run.mkdir()
        plant(run / name)
        printed = bench.program(*bench.run_flags("planted"), *flags, code=code)
        check(code == 0 or (name in printed and ("it is a link" in printed or "pipe" in printed)), printed)
        check(list(loot.iterdir()) == [], f"{name}: the run wrote through a link: {list(loot.iterdir())}")
        check(code == 73 or not os.path.lexists(run / name), f"{name} is still there")
        check(code == 73 or stat.S_ISDIR((run / "checkpoint-2").lstat().st_mode), f"{name}: the checkpoint is a link")
        shutil.rmtree(run)
    bench.check_secret("wandb_sync.log")
    bench.program(*bench.run_flags("planted"), *tracker)
    for _ in range(600):
        if (bench.folder / "said").exists():
            break
        time.sleep(0.1)
    held = (bench.folder / "open").read_text().splitlines()
    log = str(run / "wandb_sync.log")
    check(held.count(log) == 2 and not [path for path in held if path.startswith(str(bench.folder)) and path not in (log, str(stands_in))],
          f"the tracker's program holds {held}")
    shutil.rmtree(run)


def side_files(bench):
    """A downloaded model folder must not make a saved model of a user's own files; links of the local cache go on working."""
    model = bench.folder / "linked/model"
    outside = bench.folder / "download"
    shutil.copytree(model, outside)
    (outside / "SHA256SUMS").unlink()
    (outside / "chat_template.jinja").symlink_to(bench.secret())
    (outside / "generation_config.json").write_text("{}")
    (outside / "generation_config.json").chmod(0o600)
    printed = bench.program(*bench.run_flags("copied", model=("--model-path", "download", "--tokenizer", "model", "--append-eod", "false")))
    check("chat_template.jinja" in printed and "leads out of its folder" in printed, printed)
    saved = bench.folder / "copied/model"
    check(not [path for path in saved.iterdir() if SECRET in path.read_bytes()], "a file of the user is in the saved model")
    check(stat.S_IMODE((saved / "generation_config.json").stat().st_mode) == 0o600, "a private file became readable")
    bench.check_secret("a side file")
    snapshot = bench.folder / "hub/models--a--b/snapshots/0123"
    blobs = bench.folder / "hub/models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in model.iterdir():
        shutil.copy(path, blobs / f"blob-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob-{path.name}")
    printed = bench.program(*bench.run_flags("from-hub", model=("--model-path", str(snapshot), "--tokenizer", "model", "--append-eod", "false")))
    check("not copied" not in printed, printed)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        check((bench.folder / "from-hub/model" / name).read_bytes() == (model / name).read_bytes(), f"{name} is not that of the cache")
    # The cache of a download may itself be a link to somewhere.
    blobs.rename(bench.folder / "hub/elsewhere")
    blobs.symlink_to("../elsewhere")
    printed = bench.program(*bench.run_flags("from-link", model=("--model-path", str(snapshot), "--tokenizer", "model", "--append-eod", "false")))
    check("leads out of its folder" in printed, printed)


def fifos(bench):
    """Whoever reads a file refuses a FIFO at once: nobody writes to these."""
    run = bench.folder / "copied"
    for name in ("metrics.jsonl", "run.json", "trace.json"):
        shutil.copytree(run, bench.folder / "fifo")
        (bench.folder / "fifo" / name).unlink(missing_ok=True)
        os.mkfifo(bench.folder / "fifo" / name)
        printed = bench.program("report", "fifo", code=65)
        check(name in printed and "not a file" in printed, printed)
        bench.remove("fifo")
    os.mkfifo(bench.folder / "pipe")
    fifo_model = bench.folder / "fifo-model"
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copytree(bench.folder / "copied/model", fifo_model)
        (fifo_model / name).unlink()
        os.mkfifo(fifo_model / name)
        printed = bench.program("generate", "--model", "fifo-model", "--prompt", "a", "--device", "cpu", code=(2, 65))
        check(name in printed and "not a file" in printed, printed)
        shutil.rmtree(fifo_model)
    for arguments in (["train", "--config-file", "pipe"], bench.run_flags("none", data="pipe"),
                      bench.run_flags("none", model=("--model-config", "pipe")), ["tokenize", "--tokenizer", "pipe", "--input", "text.txt",
                                                                                 "--output-prefix", "x"],
                      ["tokenize", "--tokenizer", "bytes", "--input", "pipe", "--output-prefix", "x"],
                      ["eval", "--model", "copied", "--device", "cpu", "--requests", "pipe"]):
        printed = bench.program(*arguments, code=(2, 65))
        check("pipe" in printed, printed)


def leftovers(bench, library):
    """A process that is killed while it saves the model leaves a temporary folder, which the next start removes; so does prune."""
    flags = bench.run_flags("killed", steps=4)
    environment = dict(os.environ, LD_PRELOAD=library, ND_DISK_FOLDER=str(bench.folder / "killed"), OMP_NUM_THREADS="1")
    log = bench.folder / "calls"
    train = [str(bench.build / "ndtrain"), *flags]
    subprocess.run(train, cwd=bench.folder, env=environment | {"ND_DISK_LOG": str(log)}, capture_output=True, timeout=60, check=True)
    calls = log.read_text().splitlines()
    in_model = [index for index, line in enumerate(calls, 1) if "/model.tmp-" in line]
    in_file = [index for index, line in enumerate(calls, 1) if re.search(r"/run\.json\.tmp-\d+-\w+$", line)]
    check(in_model and in_file, "the run writes under no temporary names")
    left = lambda: sorted(name for name in os.listdir(bench.folder / "killed") if ".tmp-" in name)
    for what, kill in (("model", in_model[len(in_model) // 2]), ("run.json", in_file[-1]), ("model", in_model[-1])):
        for how in ("start", "prune") if what == "model" else ("start",):
            bench.remove("killed")
            done = subprocess.run(train, cwd=bench.folder, env=environment | {"ND_DISK_KILL": str(kill)}, capture_output=True, timeout=60)
            check(done.returncode == -9, f"ended with {done.returncode}")
            check(any(name.startswith(what) for name in left()), f"the kill in {what} left {left()}")
            (bench.folder / "killed/notes.tmp-of-mine").write_text("kept")
            printed = (bench.program(*flags, "--resume-from-checkpoint", "auto") if how == "start"
                       else bench.program("ckpt", "prune", "killed", "--keep-last", "1"))
            check(left() == ["notes.tmp-of-mine"], f"{how} leaves {left()}:\n{printed}")


def small_stack(bench):
    for program, arguments in (("ndtrain", bench.run_flags("none")), ("ndlaunch", bench.run_flags("none")[1:]), ("ndtrain", ["ckpt", "ls", "."]),
                               ("ndtrain", ["--version"]), ("ndtrain", ["report", "copied"])):
        printed = bench.program(*arguments, program=program, stack=64, code=71)
        check("raise ulimit -s" in printed and printed.count("\n") == 1, printed)


def on_terminal(bench, *arguments, program="ndtrain"):
    """All bytes that a terminal gets."""
    master, slave = pty.openpty()
    child = subprocess.Popen([str(bench.build / program), *arguments], cwd=bench.folder, stdin=subprocess.DEVNULL, stdout=slave, stderr=slave)
    os.close(slave)
    got = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError: # the terminal has no writer any more
            part = b""
        if not part:
            break
        got += part
    os.close(master)
    check(child.wait(60) == 0, f"{arguments} ended with {child.returncode}:\n{got!r}")
    return got


def terminal(bench):
    """Names of folders and texts of models hold escape sequences."""
    evil = "evil\x1b[31m\x07\u202e"
    shutil.copytree(bench.folder / "linked", bench.folder / evil)
    for arguments in (["ckpt", "ls", evil], ["ckpt", "verify", evil], ["export", evil, evil + "/out"]):
        got = on_terminal(bench, *arguments)
        check(b"\\x1b[31m\\x07\\u202e" in got, f"{arguments}: {got!r}")
        check(not set(got) & (set(range(32)) - set(b"\r\n\t")) and "\u202e".encode() not in got, f"{arguments}: {got!r}")
    write = ["generate", "--model", "copied", "--prompt", "abc", "--max-new-tokens", "100", "--temperature", "1", "--seed", "7", "--device", "cpu",
             "--ignore-eos"]
    for program, more in (("ndtrain", []), ("ndlaunch", ["--num-processes", "1"])):
        arguments = [*write, *more]
        done = subprocess.run([str(bench.build / program), *arguments], cwd=bench.folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
        check(done.returncode == 0, done.stderr)
        controls = set(range(32)) - set(b"\n\t")
        check(set(done.stdout) & controls, f"{program}: the text has no control characters, so this test says nothing: {done.stdout!r}")
        got = on_terminal(bench, *arguments, program=program)
        check(not set(got.replace(b"\r\n", b"\n")) & controls, f"{program}: {got!r}")
        words = re.findall(rb"[a-zA-Z0-9]{3,}", done.stdout)
        check(words and all(word in got for word in words), f"{program}: words of the text are missing: {got!r}")


def no_folders(bench):
    for flags, folder in ((["--save-dir", "new/deep/er/"], "new"), ([], "runs")):
        arguments = [flag for flag in bench.run_flags("XX") if flag not in ("--save-dir", "XX")][1:]
        bench.program("check", *arguments, *flags)
        check(not (bench.folder / folder).exists(), f"a check left {folder}")
    (bench.folder / "kept").mkdir()
    bench.program("check", *bench.run_flags("kept/new")[1:])
    check(list((bench.folder / "kept").iterdir()) == [], "a check left a folder, or removed one that it has not made")
    bench.program("check", *bench.run_flags("text.txt/new")[1:], code=73)
    before = sorted(bench.folder.iterdir())
    for bad in ("z/../y/x", "z/../text.txt/x", "z/" + "n" * 300, "/proc/nope/x"):
        for command in ("check", "train"):
            bench.program(command, *bench.run_flags(bad)[1:], code=73)
            check(sorted(bench.folder.iterdir()) == before, f"{command} left {set(bench.folder.iterdir()) - set(before)}")


def main():
    with Attack(sys.argv[1], sys.argv[2]) as bench:
        os.environ["XDG_CACHE_HOME"] = str(bench.folder / "home")
        cache_lock(bench)
        own_files(bench)
        own_folders(bench)
        side_files(bench)
        fifos(bench)
        leftovers(bench, str(pathlib.Path(sys.argv[2]).resolve()))
        small_stack(bench)
        terminal(bench)
        no_folders(bench)


if __name__ == "__main__":
    main()
