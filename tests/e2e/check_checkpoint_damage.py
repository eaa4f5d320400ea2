#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Damaged and foreign checkpoints, as the program meets them: check_checkpoint_damage.py BUILD_FOLDER LIBRARY.

Each fault is one sentence and exit code 65 when the checkpoint was named, and nothing in the run folder changes; with "latest" the
run goes on from the checkpoint before, to the same bytes, and keeps what is damaged. A checkpoint of a newer program is not damaged:
it is left alone, and so is the run.
"""
import errno
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys

from checkpoint_runs import LAST, MODEL, STEPS, Bench, check, each

SHARD = "state/shard-0000{}-model-00001-of-00001.safetensors"
HASHES = "state/shard-0000{}.hashes"


def sha256(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


def sign(folder, change=lambda manifest: None):
    """Changes the manifest and gives it the digest that is right: what an attacker, or a program with a fault, would write."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    del manifest["digest"]
    text = json.dumps(manifest, indent=1, separators=(",", ": "))[:-2]
    path.write_text(text + ',\n "digest": "' + sha256(text.encode()) + '"\n}\n')


def with_hashes(change):
    """A change of the first hash file, which the manifest then knows."""
    def damage(folder):
        path = folder / HASHES.format(1)
        path.write_bytes(change(path.read_bytes()))
        sign(folder, lambda m: m["writers"][0].__setitem__(1, sha256(path.read_bytes())))
    return damage


def with_name(name):
    return lambda data: data[:24] + name.ljust(80, b"\0") + data[104:]


def twice(data):
    """The hash file lists its file two times."""
    return data[:20] + (2).to_bytes(4, "little") + data[24:120] * 2 + data[120:] * 2


def copy_over(source, target):
    return lambda folder: shutil.copy(folder / source, folder / target)


def link(name):
    def damage(folder):
        os.rename(folder / name, folder.parent / "elsewhere")
        os.symlink(folder.parent / "elsewhere", folder / name)
    return damage


def fifo(folder):
    (folder / SHARD.format(2)).unlink()
    os.mkfifo(folder / SHARD.format(2))


def append(name):
    return lambda folder: (folder / name).open("ab").write(b"x")


def flip(seed):
    def damage(folder):
        generator = random.Random(seed)
        path = generator.choice(sorted(p for p in folder.rglob("*") if p.is_file()))
        data = bytearray(path.read_bytes())
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path.write_bytes(data)
    return damage


DAMAGES = {
    "a shard is missing": (lambda f: (f / SHARD.format(2)).unlink(), "No such file"),
    "a hash file is missing": (lambda f: (f / HASHES.format(1)).unlink(), "No such file"),
    "the manifest is missing": (lambda f: (f / "manifest.json").unlink(), "manifest.json"),
    "a hash file stands for two": (copy_over(HASHES.format(1), HASHES.format(2)), "of another checkpoint"),
    "a shard stands for two": (copy_over(SHARD.format(1), SHARD.format(2)), "it was written with"),
    "a shard of another checkpoint": (copy_over("../checkpoint-4/" + SHARD.format(1), SHARD.format(1)), "is damaged"),
    "a manifest of another checkpoint": (copy_over("../checkpoint-4/manifest.json", "manifest.json"), "of another checkpoint"),
    "a shard is longer": (append(SHARD.format(1)), "it was written with"),
    "a hash file is longer": (append(HASHES.format(1)), "it was written with"),
    "a manifest is longer": (append("manifest.json"), "manifest.json"),
    "a shard is a link": (link(SHARD.format(1)), "it is a link"),
    "the state folder is a link": (link("state"), "missing or no folder"),
    "a shard is a pipe": (fifo, "pipe or socket, not a file"),
    "a name leaves the folder": (with_hashes(with_name(b"../../text.txt")), "lists other files"),
    "a name is that of another file": (with_hashes(with_name(b"manifest.json")), "lists other files"),
    "a name is listed twice": (with_hashes(twice), "it was written with"),
    "another mesh": (lambda f: sign(f, lambda m: m["mesh"].update(tp=2)), "one entry for each rank"),
    "an entry leaves the folder": (lambda f: sign(f, lambda m: m["replicated"].update({"../x": 4})), "no name of an entry"),
    **{f"a flipped bit ({seed})": (flip(seed), "checkpoint-6") for seed in range(6)},
}


def files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.parent != folder}


def copy(bench, out):
    shutil.copytree(bench.folder / "whole", bench.folder / out, symlinks=True)
    shutil.rmtree(bench.folder / out / "model")
    return bench.folder / out / "checkpoint-6"


def named(bench, out, words, source="6"):
    before = files(bench.folder / out)
    printed = bench.train(2, out, "--resume-from-checkpoint", source, steps=8, code=65)
    check(words in printed, f"no \"{words}\" in:\n{printed}")
    check(files(bench.folder / out) == before, "files have changed")


def damaged(bench, job):
    number, (what, (damage, words)) = job
    out = f"out-{number}"
    try:
        damage(copy(bench, out))
        named(bench, out, words)
        bad = files(bench.folder / out / "checkpoint-6")
        printed = bench.train(2, out, "--resume-from-checkpoint", "latest")
        check("resumed after step 4" in printed, f"it did not go on from step 4:\n{printed}")
        check(len(re.findall("checkpoint-6.bad", printed)) == 1, f"it is not said once:\n{printed}")
        check(bench.names(out) == sorted([*LAST, "checkpoint-6.bad"]), f"left are {bench.names(out)}")
        check(files(bench.folder / out / "checkpoint-6.bad") == bad, "what is damaged was changed")
        bench.same_result(out)
        bench.remove(out)
    except Exception as error:
        raise AssertionError(f"{what}: {error}") from error


def newer(bench):
    """Another program can use it, so it is neither set aside nor passed over."""
    for source in ("6", "latest", "auto"):
        sign(copy(bench, "newer"), lambda m: m.update(version=3, added={"x": 1}))
        named(bench, "newer", "has format version 3; this program reads up to version 2", source)
        check(bench.names("newer") == LAST, f"{source}: {bench.names('newer')}")
        bench.remove("newer")


def foreign(bench):
    """A file too many does not hinder us, but torch's reader would take it: verify names it."""
    folder = copy(bench, "foreign")
    shutil.copy(folder / SHARD.format(1), folder / "state/shard-00009-model-00001-of-00001.safetensors")
    bench.run("ndtrain ckpt verify foreign/checkpoint-6", 65, "files; the checkpoint has")
    bench.train(2, "foreign", "--resume-from-checkpoint", "latest")
    bench.same("foreign/model/model.safetensors", "whole/model/model.safetensors")
    # Nor does a header without the first quote, where the digests are right.
    data = (folder / SHARD.format(1)).read_bytes()
    data = data[:9] + b" " + data[10:]
    (folder / SHARD.format(1)).write_bytes(data)
    with_hashes(lambda hashes: hashes[:-32] + hashlib.sha256(data).digest())(folder)
    bench.run("ndtrain ckpt verify foreign/checkpoint-6", 65, "has another header")


def in_use(bench):
    """While another process trains there, not even what is damaged gets another name."""
    sign(copy(bench, "in-use"), lambda m: m["mesh"].update(tp=2))
    before = files(bench.folder / "in-use")
    printed = bench.train(2, "in-use", "--resume-from-checkpoint", "latest", code=73, prefix=["flock", "in-use/.lock"])
    check("another process trains" in printed, printed)
    check(files(bench.folder / "in-use") == before, "files have changed")
    bench.remove("in-use")


def appears(bench):
    """Another process saves a checkpoint after the run has looked for the newest one, and before it has locked the folder."""
    newest = copy(bench, "appears")
    hidden = bench.folder / "appears" / "hidden"
    os.rename(newest, hidden)
    printed = bench.train(2, "appears", "--resume-from-checkpoint", "latest", faults=dict(rank=0, move=f"{hidden}:{newest}"))
    check("resumed after step 6" in printed, printed)
    check(bench.names("appears") == LAST, f"left are {bench.names('appears')}")
    bench.remove("appears")


def unconfirmed(bench):
    """Rank 1 finds damage, and rank 0's reading of the same files fails: that is neither damage nor the fault of rank 1's host."""
    def damage():
        path = copy(bench, "unconfirmed") / SHARD.format(2)
        path.write_bytes(path.read_bytes()[:-9] + b"wrong" + path.read_bytes()[-4:])

    damage()
    opened = [path for name, path in bench.calls(2, 0, "unconfirmed", "--resume-from-checkpoint", "latest") if name == "openat"]
    again = opened.index("checkpoint-6/" + SHARD.format(2)) + 1 # rank 0 has no other reason to open it
    bench.remove("unconfirmed")
    damage()
    before = files(bench.folder / "unconfirmed")
    printed = bench.train(2, "unconfirmed", "--resume-from-checkpoint", "latest", code=74,
                          faults=dict(rank=0, fail=f"openat:{errno.EIO}:{again}:1"))
    check("rank 0 failed first" in printed and "cannot read the files again" in printed, printed)
    check("finds damage where rank 0 finds none" not in printed, printed)
    check(files(bench.folder / "unconfirmed") == before, "files have changed")
    bench.remove("unconfirmed")


def other_mesh(bench):
    """Rank 0 reads none of the damaged chunk, and confirms what rank 1 has found in the only writer's file."""
    bench.model("large.json", **MODEL | dict(intermediate_size=1 << 16))
    large = ("--set", "model.config=large.json", "--set", "optimizer.name=sgd")
    bench.train(1, "large", *large, "--gradient-accumulation-steps", "2")
    path = bench.folder / "large" / "checkpoint-6" / SHARD.format(1)
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        name, down = next((k, v) for k, v in json.loads(file.read(size)).items() if "down_proj" in k)
        begin, end = down["data_offsets"]
        check(end - begin == 8 << 20, f"{name} has {end - begin} bytes") # all of rank 1's half of the block, in chunks of 4 MiB
        file.seek(8 + size + (begin + end) // 2)
        file.write(b"wrong")
    printed = bench.train(2, "large", "--resume-from-checkpoint", "latest", *large)
    check("resumed after step 4" in printed, f"it did not go on from step 4:\n{printed}")
    check(bench.names("large") == sorted([*LAST, "checkpoint-6.bad"]), f"left are {bench.names('large')}")
    bench.remove("large")


def killed(bench):
    """A rank that dies while a checkpoint is loaded failed first, whatever the other one loses by it."""
    copy(bench, "killed")
    resume = ("--resume-from-checkpoint", "6")
    for rank in range(2):
        calls = bench.calls(2, rank, "killed", *resume)
        numbers = [number for number, (name, path) in enumerate(calls, 1) if name == "openat" and path.startswith("checkpoint-6/")]
        check(len(numbers) >= 3, f"rank {rank} opens only {[calls[n - 1] for n in numbers]}")
        for number in numbers[-3:]: # manifest, digests and state
            printed = bench.train(2, "killed", *resume, faults=dict(rank=rank, kill=number), code=128 + signal.SIGKILL)
            check(f"rank {rank} failed first" in printed and "signal 9" in printed, printed)
    bench.remove("killed")


def main():
    with Bench(*sys.argv[1:3]) as bench:
        bench.train(2, "whole", "--checkpoint-checksum", "sha256")
        sign(copy(bench, "signed")) # what is signed here counts as whole
        bench.train(2, "signed", "--resume-from-checkpoint", str(STEPS))
        each(enumerate(DAMAGES.items()), lambda job: damaged(bench, job))
        newer(bench)
        foreign(bench)
        in_use(bench)
        appears(bench)
        unconfirmed(bench)
        other_mesh(bench)
        killed(bench)
    print(f"check_checkpoint_damage: {len(DAMAGES)} damages are refused or passed over")


if __name__ == "__main__":
    main()
