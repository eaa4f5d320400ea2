#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`ndtrain ckpt` and `ndtrain export` as a user runs them: what they print, their exit codes, and that bad input changes nothing. The run
folder "run" has checkpoints 10 (dp_shard 2 x tp 2), 20 (dp_replicate 2) and 30 (one rank) of the same weights and moments."""
import calendar
import filecmp
import hashlib
import os
import re
import shutil
import time

import steps
from steps import check, test

CKPT, EXPORT = "ndtrain ckpt", "ndtrain export"


def make(t, step, kind, mesh):
    t.run(f"checkpoint_tool write run {step} {kind} {mesh}")


def setup(t):
    (t.folder / "run").mkdir()
    for step, mesh in (10, "1 2 1 2"), (20, "2 1 1 1"), (30, "1 1 1 1"):
        make(t, step, "untied", mesh)


def ends(t, code, words, *facts):
    """The command ends with this code and says the facts, in one line when it fails."""
    t.run(words, code, facts)
    if code in (2, 73):
        check((t.out + t.log).count("\n") == 1, t.out + t.log)


def snapshot(t):
    """Every name below the folder, with what is in it."""
    def content(path):
        return os.readlink(path) if path.is_symlink() else None if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
    return {path.relative_to(t.folder): content(path) for path in t.folder.rglob("*")}


def refused(t, code, words, *facts):
    """The same, and no file below the folder has come, gone or changed."""
    before = snapshot(t)
    ends(t, code, words, *facts)
    check(snapshot(t) == before, f"{words} changed something")


def damage(t, step):
    """Flips a byte of the data of a checkpoint that one rank wrote."""
    with open(t.folder / f"run/checkpoint-{step}/state/shard-00001-model-00001-of-00001.safetensors", "r+b") as file:
        file.seek(40001)
        file.write(b"x")


def copy(t, a, b):
    (shutil.copytree if (t.folder / a).is_dir() else shutil.copy)(t.folder / a, t.folder / b)


def move(t, a, b):
    (t.folder / a).rename(t.folder / b)


def remove_hashes(t, step):
    for path in (t.folder / f"run/checkpoint-{step}/state").glob("*.hashes"):
        path.unlink()


def same_folders(t, a, b):
    names = sorted(os.listdir(t.folder / a))
    check(names == sorted(os.listdir(t.folder / b)), f"{a} and {b}")
    check(filecmp.cmpfiles(t.folder / a, t.folder / b, names, shallow=False)[0] == names, f"{a} and {b}")


def listed(t, folder="run"):
    return sorted(name for name in os.listdir(t.folder / folder) if name[0] != ".")


@test
def ls(t):
    copy(t, "run/checkpoint-10", "run/checkpoint-10.bad")
    for name in ".tmp-checkpoint-40-id", "checkpoint-50":
        (t.folder / "run" / name).mkdir()
    remove_hashes(t, 30)
    t.run(f"{CKPT} ls run", says=(
        "run:\n", "checkpoint-10         good ", "checkpoint-10.bad     .bad ", "2026-01-31T12:00:00Z", "dp_shard 2, tp 2 ", "interval ",
        "            1000\n", ".tmp-checkpoint-40-id temporary ", "checkpoint-50         no manifest ", "checkpoint-30         incomplete ",
        "shard-00001.hashes"))
    for seconds, age in (100, r"1\d\d s"), (7000, "11[67] min"), (100000, "27 h"), (300000, "3 d"), (-9000, "0 s"):
        os.utime(t.folder / "run/checkpoint-50", (time.time() - seconds,) * 2)
        t.run(f"{CKPT} ls run")
        check(re.search(rf" no manifest .*Z +{age} ", t.out), f"{seconds} s ago: {t.out}")
    t.run(f"{CKPT} ls run/checkpoint-20/", says="checkpoint-20      good ", never="checkpoint-10")
    (t.folder / "runs/a-2").mkdir(parents=True)
    t.write("runs/notes.txt", "")
    move(t, "run", "runs/a-1")
    t.run(f"{CKPT} ls", says="runs/a-1:\n", never="a-2")
    t.run(f"{CKPT} ls runs/a-2", says="runs/a-2: no checkpoints\n")
    (t.folder / "runs/a-1/empty").mkdir()
    t.folder /= "runs/a-1"
    t.run(f"{CKPT} ls", says=(".:\n", "checkpoint-10         good "))
    t.folder /= "empty"
    ends(t, 65, f"{CKPT} ls", "there are no checkpoints")


@test
def ls_prints_json_lines(t):
    (t.folder / "run/checkpoint-50").mkdir()
    lines = t.run(f"{CKPT} ls run --json").splitlines(keepends=True)
    check(len(lines) == 4, t.out)
    check(lines[0].startswith('{"run":"run","folder":"checkpoint-10","step":10,"state":"good","why":null,"bytes":'), lines[0])
    check(lines[0].endswith('"mesh":{"pp":1,"dp_replicate":1,"dp_shard":2,"cp":1,"tp":2},"reason":"interval","tokens_seen":1000,'
                            '"samples_seen":80,"has_model":false}\n'), lines[0])
    row = t.rows()[0]
    size = sum(path.stat().st_size for path in (t.folder / "run/checkpoint-10").rglob("*") if path.is_file())
    age = time.time() - calendar.timegm(time.strptime(row["time"], "%Y-%m-%dT%H:%M:%SZ"))
    check(row["bytes"] == size and row["time"] == "2026-01-31T12:00:00Z" and 0 <= age - row["age_seconds"] < steps.PATIENCE_S, row)
    check('"folder":"checkpoint-50","step":50,"state":"no manifest"' in lines[3] and '"mesh":null' in lines[3], lines[3])


@test
def verify(t):
    t.run(f"{CKPT} verify run/checkpoint-10", says=("run/checkpoint-10: good, ", " kB in ", " GB/s)\n"))
    damage(t, 20)
    refused(t, 65, f"{CKPT} verify run", "run/checkpoint-10: good, ", "run/checkpoint-20: bad: ",
            'shard-00001-model-00001-of-00001.safetensors" is damaged: bytes 0 to ', "run/checkpoint-30: good, ")
    remove_hashes(t, 10)
    refused(t, 65, f"{CKPT} verify run/checkpoint-10", "shard-00001.hashes")
    move(t, "run/checkpoint-20", "b")
    (t.folder / "run/checkpoint-40").symlink_to("../b")
    t.run(f"{CKPT} verify run/checkpoint-30")
    refused(t, 65, f"{CKPT} verify run", "run/checkpoint-40: bad: ")


@test
def verify_includes_the_model_beside_the_state(t):
    t.run(f"{EXPORT} run/checkpoint-30 model")
    for name in listed(t, "model"):
        move(t, f"model/{name}", f"run/checkpoint-30/{name}")
    t.run(f"{CKPT} verify run/checkpoint-30", says=", with the model beside it\n")
    t.write("run/checkpoint-30/config.json", t.read("run/checkpoint-30/config.json") + "\n")
    refused(t, 65, f"{CKPT} verify run/checkpoint-30", 'config.json" is not the file that SHA256SUMS',
            "run/checkpoint-30: its state is good, but the model beside it is bad: ")


@test
def export(t):
    t.run(f"{EXPORT} run/checkpoint-10 a", says="a: the bf16 model of run/checkpoint-10, step 10: 42.9 kB in ")
    t.run(f"{EXPORT} run/checkpoint-20/ b/")
    t.run(f"{EXPORT} run c", says="c: the bf16 model of run/checkpoint-30, step 30")
    same_folders(t, "a", "b")
    same_folders(t, "a", "c")
    check(listed(t, "a") == ["SHA256SUMS", "config.json", "model.safetensors"], listed(t, "a"))
    (t.folder / "empty").mkdir()
    t.run(f"{EXPORT} run empty --dtype fp32")
    t.run(f"{EXPORT} --dtype=fp32 run d")
    same_folders(t, "empty", "d")
    t.run(["sh", "-c", "cd d && sha256sum -c SHA256SUMS"])
    refused(t, 73, f"{EXPORT} run a", '"a" exists already and is not overwritten')
    (t.folder / "e").symlink_to("d")
    refused(t, 73, f"{EXPORT} run e", '"e" exists already')
    refused(t, 73, f"{EXPORT} run /proc/model", '"/proc"')
    refused(t, 73, t.limited("-f 8", f"{EXPORT} run f --dtype fp32"), "cannot reserve ")
    refused(t, 2, f"{CKPT} diff run run --dtype fp16", '--dtype is "fp16"')
    refused(t, 2, f"{EXPORT} run f --dtype fp16", "--dtype fp16 is for GGUF files (--gguf FILE)")
    refused(t, 2, f"{EXPORT} run f --dtype fp8", "it must be one of bf16|fp16|fp32|q8_0")
    refused(t, 2, f"{EXPORT} run", "give either OUT, the folder that is made, or --gguf FILE")
    refused(t, 2, f"{EXPORT} run f --gguf g", "give either OUT")


@test
def export_of_a_damaged_checkpoint(t):
    damage(t, 30)
    refused(t, 65, f"{EXPORT} run a", "is damaged: bytes 0 to ")
    t.run(f"{EXPORT} run a --no-verify")
    check("model.safetensors" in listed(t, "a"), listed(t, "a"))


@test
def export_takes_the_side_files(t):
    t.write("side/tokenizer.json", "1\n")
    t.write("side/other", "2\n")
    t.run(f"{EXPORT} run a --side-files side")
    t.same("side/tokenizer.json", "a/tokenizer.json")
    check("other" not in listed(t, "a"), listed(t, "a"))
    refused(t, 65, f"{EXPORT} run b --side-files nowhere", "nowhere")
    # A model beside the state has them.
    for name in listed(t, "a"):
        move(t, f"a/{name}", f"run/checkpoint-30/{name}")
    t.run(f"{EXPORT} run b --dtype fp32")
    t.same("b/tokenizer.json", "side/tokenizer.json")


@test
def diff(t):
    make(t, 36, "untied", "1 3 1 1")
    (t.folder / "run/x").mkdir()
    move(t, "run/checkpoint-36", "run/x/checkpoint-36")
    ends(t, 1, f"{CKPT} diff run/checkpoint-30 run/x/checkpoint-36",
         "step: 30 in A, 36 in B\nsteps skipped: 5 in A, 6 in B\nlabels seen: 3000 in A, 3600 in B\nsamples seen: 240 in A, 288 in B\n",
         "B: run/x/checkpoint-36 (step 36, dp_shard 3)\n", "have the same bits, but the position differs\n")
    copy(t, "run/checkpoint-30", "same")
    t.run(f"{CKPT} diff run same", says="equal: all 58543 elements of 91 arrays have the same bits\n")
    t.run(f"{EXPORT} run m --dtype fp32")
    t.run(f"{CKPT} diff m run/checkpoint-20", says=("A: m (a Hugging Face model: weights only)\n",
                                                   "equal: all 19512 elements of 30 arrays have the same bits\n"))
    t.run(f"{EXPORT} run m16")
    t.run(f"{CKPT} diff --dtype bf16 run m16")
    ends(t, 1, f"{CKPT} diff run m16", "model.norm.weight: 24 of 24 elements differ, at most by ")
    ends(t, 0, f"{CKPT} diff run m16 --tolerance 0.01", "are within the tolerance\n")  # BF16 rounds by 2^-9
    damage(t, 30)
    refused(t, 65, f"{CKPT} diff run same", "is damaged")
    ends(t, 1, f"{CKPT} diff run same --no-verify", "1 of ", "different: 1 of 91 arrays, 1 of 58543 elements\n")
    make(t, 40, "tied", "1 1 1 1")
    refused(t, 65, f"{CKPT} diff run/checkpoint-40 run/checkpoint-30", 'the models differ: "run/checkpoint-40" has ')


@test
def prune(t):
    refused(t, 0, f"{CKPT} prune run --keep-last 1 --dry-run", "would delete 2 checkpoints, 574",
            "would delete run/checkpoint-10 (306.0 kB)\nwould delete run/checkpoint-20 (") # the oldest first
    t.write("run/.lock", "")
    refused(t, 73, ["flock", "run/.lock", *t.command(f"{CKPT} prune run --keep-last 1")], "another process")
    ends(t, 0, f"{CKPT} prune run --keep-last=1 --keep-every=20", "deleted run/checkpoint-10 (306.0 kB)",
         "deleted 1 checkpoint, 306.0 kB\n")
    check(listed(t) == ["checkpoint-20", "checkpoint-30"], listed(t))
    remove_hashes(t, 30)
    refused(t, 0, f"{CKPT} prune run --keep-last 1", "deleted 0 checkpoints, 0 B\n")


@test
def prune_deletes_what_was_set_aside_when_asked(t):
    move(t, "run/checkpoint-10", "run/checkpoint-10.old")
    copy(t, "run/checkpoint-20", "run/checkpoint-20.bad")
    t.write("run/checkpoint-20.bad/manifest.json", "x\n")
    t.write("run/checkpoint-5.old/optimizer.pt", "")
    t.write("run/.lock", "")
    refused(t, 0, f"{CKPT} prune run --keep-last 2", "2 that were set aside (.old, .bad) stay; ")
    refused(t, 0, f"{CKPT} prune run --set-aside --dry-run", "would delete run/checkpoint-20.bad (", "would delete 2 checkpoints, ")
    refused(t, 2, f"{CKPT} prune run --set-aside --keep-every 20", "--keep-last K is missing")
    ends(t, 0, f"{CKPT} prune run --set-aside", "deleted run/checkpoint-10.old (306.0 kB)")
    kept = ["checkpoint-20", "checkpoint-30", "checkpoint-5.old"]
    check(listed(t) == kept, listed(t))
    # Models of earlier ends, beside a later one alone.
    for name in "model.old-2", "model.old-mine", "model.older":
        (t.folder / "run" / name).mkdir()
    t.write("run/model.old/config.json", "1\n")
    refused(t, 0, f"{CKPT} prune run --set-aside", "run/model.old stays, since there is no run/model\n")
    t.write("run/model/config.json", "1\n")
    refused(t, 0, f"{CKPT} prune run --set-aside --dry-run", "would delete run/model.old-2 (")
    ends(t, 0, f"{CKPT} prune run --set-aside", "deleted run/model.old (2 B)", "deleted 0 checkpoints, 0 B\n")
    check(listed(t) == [*kept, "model", "model.old-mine", "model.older"], listed(t))
    move(t, "run/checkpoint-20", "run/checkpoint-20.old")
    remove_hashes(t, 30)
    refused(t, 65, f"{CKPT} prune run --set-aside --keep-last 1", "has no good checkpoint, so those")


@test
def prune_needs_good_flags(t):
    for flags, fact in (("", "--keep-last K is missing"), (" --keep-last 0", '--keep-last is "0"; it must be a whole number'),
                        (" --keep-last -1", '--keep-last is "-1"'), (" --keep-last 1 --keep-every 2x", '--keep-every is "2x"'),
                        (" --keep-last", "--keep-last needs a value: --keep-last K"),
                        (" --keep-last 1 --keep-last 2", "--keep-last is given twice"),
                        (" --keep-last 1 --dry-run=yes", "--dry-run takes no value"),
                        (" --keep-lats 1", "did you mean --keep-last?"),
                        (" other --keep-last 1", '"other" is one argument too many')):
        refused(t, 2, f"{CKPT} prune run{flags}", fact)
    refused(t, 2, f"{CKPT} prune --keep-last 1", "a folder is missing; usage: ndtrain ckpt prune RUN")
    refused(t, 65, f"{CKPT} prune run/checkpoint-10 --keep-last 1", "is no run folder")
    refused(t, 65, f"{CKPT} prune nowhere --keep-last 1", '"nowhere": No such file')


@test
def help_and_wrong_verbs(t):
    verbs = "ls", "verify", "diff", "prune"
    text = t.run(f"{CKPT} --help", says=verbs)
    for words in "-h", "help":
        check(t.run(f"{CKPT} {words}") == text, words)
    check(t.run("ndtrain --version") == t.run(f"{CKPT} --version"), t.out)
    for verb in verbs:
        t.run(f"{CKPT} {verb} run --wrong --help", says=(f"usage: ndtrain ckpt {verb} ", "Exit codes: 0 done, 2 "))
    t.run(f"{EXPORT} run --wrong --help", says=("usage: ndtrain export ", "Exit codes: 0 done, 2 "), never="diff")
    for words, fact in (("", "a verb is missing"), ("verfiy run", "did you mean verify"), ("list", 'has no verb "list"; '),
                        ("export run out", "ndtrain export writes models"),
                        ("ls run --josn", "did you mean --json?"), ("verify", "a folder is missing"), ("diff run", "a folder is missing")):
        ends(t, 2, f"{CKPT} {words}", fact)
    ends(t, 73, t.in_shell('exec "$@" >/dev/full', f"{CKPT} ls run"), "standard output")


@test
def folders_that_are_no_checkpoints(t):
    def linked(name, part):
        copy(t, "run/checkpoint-10", name)
        move(t, f"{name}/{part}", f"{name}-{part}")
        (t.folder / name / part).symlink_to(f"../{name}-{part}")

    def changed(name, old, new):
        copy(t, "run/checkpoint-10", name)
        t.change(f"{name}/manifest.json", old, new)

    t.write("file", "\n")
    (t.folder / "empty").mkdir()
    t.write("new/model/config.json", "")
    (t.folder / "half/state").mkdir(parents=True)
    linked("l2", "manifest.json")
    linked("l3", "state")
    copy(t, "run/checkpoint-10", "cut")
    os.truncate(t.folder / "cut/manifest.json", 900)
    changed("version", '"version": 1,', '"version": 3,')
    changed("flip", '"step": 10,', '"step": 11,')
    # It takes any model, so it says what is none.
    of_export = dict(nowhere='error: the model "nowhere" does not exist', file='"file": it is a file', empty='"empty" is no model',
                     new="new/model/config.json:1:", half='"half" is no model')
    for name, fact in (("nowhere", '"nowhere": No such file'), ("file", '"file": Not a directory'), ("empty", '"empty" is no run folder'),
                       ("new", '"new" has no checkpoint; its model is new/model'), ("half", '"half" has no manifest.json'),
                       ("l2", 'manifest.json" is a link'), ("l3", 'l3/state" is '), ("cut", 'cut/manifest.json"'),
                       ("version", "has format version 3; this program reads up to version 2"), ("flip", "is damaged: its digest")):
        if name != "l2":  # which is read as by every command that uses it
            refused(t, 65, f"{EXPORT} {name} out", of_export.get(name, fact))
        for verb in f"verify {name}", f"diff {name} run", f"diff run {name}":
            refused(t, 65, f"{CKPT} {verb}", fact)


@test
def control_characters_are_escaped(t):
    """Names on the disk and texts of a manifest do not reach the terminal as they are."""
    (t.folder / "run/.tmp-checkpoint-7-\033[2J").mkdir()
    t.run(f"{CKPT} ls run", says="\\x1b[2J", never="\033")


def write_inputs(t):
    t.text(100 * 65)
    t.model(hidden_size=32, intermediate_size=64)


def train(t, flags):
    """A run of its own: 6 steps, checkpoints 3 and 6, its model in real/model."""
    t.run("ndlaunch --device cpu --data-path text.txt --validation-path '' --sequence-length 64 --num-steps 6 --checkpoint-frequency 3 "
          f"--save-dir real {flags}")


@test
def export_is_what_the_run_saved(t):
    write_inputs(t)
    train(t, "--model-config model.json --num-processes 4 --dp-shard-size 2 --tp-size 2")
    t.run(f"{EXPORT} real a")
    same_folders(t, "a", "real/model")
    t.run(f"{EXPORT} real/checkpoint-3 b")
    check((t.folder / "a/model.safetensors").read_bytes() != (t.folder / "b/model.safetensors").read_bytes(), "step 3 is step 6")
    check("tokenizer.json" in listed(t, "a"), listed(t, "a"))
    t.run(f"{EXPORT} real/checkpoint-6 c --dtype fp32")
    t.run(f"{CKPT} diff real c")
    t.run(f"{CKPT} verify real")
    ends(t, 1, f"{CKPT} diff real/checkpoint-3 real", "step: 3 in A, 6 in B\n", "model.layers.1.mlp.up_proj.weight: ",
         "optimizer.state.model.norm.weight.exp_avg: ")
    t.run(f"{CKPT} ls real", says="       6  checkpoint-6       good ")


@test
def export_finds_the_tokenizer_of_the_first_model(t):
    """The run goes on from a model with a tokenizer; the checkpoint says from which."""
    write_inputs(t)
    train(t, "--model-config model.json --save-model true")
    move(t, "real/model", "first")
    shutil.rmtree(t.folder / "real")
    t.write("first/tokenizer.json", "other\n")
    t.write("first/generation_config.json", "{}\n")
    t.run(["sh", "-c", "cd first && sha256sum *.json *.safetensors >SHA256SUMS"])
    train(t, "--model-path first")
    t.run(f"{EXPORT} real a")
    same_folders(t, "a", "real/model")
    check("generation_config.json" in listed(t, "a"), listed(t, "a"))
    move(t, "first", "second")
    move(t, "real/model", "kept")
    t.run(f"{EXPORT} real b", says=("warning: ", 'the run began with the model "first", which is not found from here'))
    t.same("a/model.safetensors", "b/model.safetensors")
    t.run(f"{EXPORT} real c --side-files second")
    same_folders(t, "a", "c")


@test
def a_checkpoint_with_a_model_is_a_model(t):
    write_inputs(t)
    train(t, "--model-config model.json --checkpoint-export-model true --num-processes 2 --dp-shard-size 2")
    for name in listed(t, "real/model"):
        t.same(f"real/model/{name}", f"real/checkpoint-6/{name}")
    t.run(f"{CKPT} verify real")
    t.run(f"{CKPT} ls real", says="with model\n")
    t.run("ndtrain check --device cpu --data-path text.txt --sequence-length 64 --num-steps 1 --model-path real/checkpoint-6")
    t.run([t.python("torch transformers"), "-c", "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
           "m = M.from_pretrained('real/checkpoint-6'); t = T.from_pretrained('real/checkpoint-6'); "
           "print(sum(p.numel() for p in m.parameters()), t('ab').input_ids)"], says=" [97, 98]")


steps.main("ckpt", setup)
