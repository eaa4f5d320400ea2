#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Bad input as a user meets it: ndlaunch as a process, its exit code (docs/launch.md) and the words of its sentence. Every case runs in a
folder of its own with a good model, good data and a good configuration, of which one thing is broken. Nothing may be written where a run
is refused."""
import os
import re
import shlex
import shutil
import struct
import time

import steps
from steps import SOURCE, check, test

FLAGS = "--set data.path=text.txt --sequence-length 32 --num-steps 1 --device cpu --set output.dir=out --set output.save_model=false"
OWN = "--set model.config=model.json"
LAUNCH, TRAIN, PLAN = f"ndlaunch {OWN} {FLAGS}", f"ndtrain train {OWN} {FLAGS}", f"ndtrain plan {OWN} {FLAGS}"
CHECK_ON_CUDA = f"ndtrain check {OWN} --data-path text.txt --device cuda --sequence-length"
TWO = "--num-processes 2 --dp-shard-size 2"
MODEL = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1)
NEEDS = "a worker of this job needs about "
VERSION = re.search(r"version: '([^']+)'", (SOURCE / "meson.build").read_text())[1]


def setup(t):
    os.environ["XDG_CACHE_HOME"] = str(t.folder)  # of JSON lines
    t.write("text.txt", 4096 * "a")
    t.model(**MODEL)


def soon_ended(t, words, code=None, **environment):
    begin = time.monotonic()
    t.run(words, code, **environment)
    check(time.monotonic() - begin < steps.PATIENCE_S, words)


def refused(t, code, words, *facts, **environment):
    soon_ended(t, words, code, **environment)
    t.says(facts)
    check(not (t.folder / "out/metrics.jsonl").exists(), f"{words}\nwrote a run")


def small_shared_memory(t, size, words):
    return t.mounted(words, f"-t tmpfs -o size={size} tmpfs", "/dev/shm")


@test
def the_good_run_is_good(t):
    t.run(LAUNCH)


@test
def yaml(t):
    for text, *facts in (("train:\n  stepz: 3\n", "c.yaml:2", "steps"), ("train:\n\tsteps: 3\n", "c.yaml:2", "tab"),
                         ("optimizer:\n  lr: -1\n", "lr", "-1")):
        t.write("c.yaml", text)
        refused(t, 2, f"{LAUNCH} --config-file c.yaml", *facts)
    refused(t, 2, f"{LAUNCH} --config-file missing.yaml", "missing.yaml")


@test
def a_byte_order_mark_is_none(t):
    """As some editors write it."""
    t.write("c.yaml", "\ufefftrain:\n  steps: 1\n")
    t.write("rows.jsonl", '\ufeff{"text": "abcdefghijklmnopqrstuvwxyz0123456789"}\n')
    t.run(f"{LAUNCH} --config-file c.yaml --data-path rows.jsonl")


@test
def flags(t):
    refused(t, 2, f"{LAUNCH} --num-stepz 3", "--num-stepz", "num-steps")
    refused(t, 65, f"{LAUNCH} --resume-from-checkpoint latest", "there is no folder out", "--save-dir")
    refused(t, 2, f"{LAUNCH} --device cuda", "cuda", CUDA_VISIBLE_DEVICES="")


@test
def what_only_gpus_do_is_refused_where_none_is_visible(t):
    for key, flag in (("comm_blocks", "--comm-blocks 2"), ("product_processors", "--product-processors 2"), ("nccl_alone", "--nccl-alone true"),
                      ("cuda_graphs", "--cuda-graphs true")):
        refused(t, 2, f"{TRAIN} --device auto {flag}", f".{key} is ", "this run is on the CPU, as no GPU is visible", CUDA_VISIBLE_DEVICES="")


@test
def flags_of_another_command(t):
    for command in LAUNCH, TRAIN:
        refused(t, 2, f"{command} --rank 0", "--rank; ", "`ndtrain plan`")
    check(t.run(f"{TRAIN} --version").startswith(f"ndtrain {VERSION}\n"), t.out)


@test
def mesh_and_shape(t):
    refused(t, 2, f"{LAUNCH} --num-processes 6 --dp-shard-size 2 --tp-size 2", "4", "6")
    refused(t, 2, f"{LAUNCH} --num-processes 3 --dp-shard-size 1 --tp-size 3", "heads", "3")
    refused(t, 2, f"{LAUNCH} --num-processes 8 --dp-shard-size 1 --cp-size 8 --sequence-length 40", "40", "16")
    refused(t, 2, f"{LAUNCH} --num-processes 2 --dp-shard-size 1 --tp-size 2 --sequence-length 31", "31", "2")
    refused(t, 2, f"{LAUNCH} --sequence-length 129", "129", "128")
    t.run(f"{LAUNCH} --sequence-length 128")


@test
def fp8(t):
    own = f"{LAUNCH} --precision fp8"
    refused(t, 2, f"{own} --fp8-recipe tensorwize", "tensorwize", "it must be tensorwise")
    refused(t, 2, f"{own} --fp8-recipe rowwise --fp8-all-gather", "fp8.all_gather", "delayed")
    refused(t, 2, f"{own} --fp8-filter w1", "w1 matches no linear", "q_proj")
    refused(t, 2, f"{own} --sequence-length 24", "24 tokens", "divisible by 16")
    refused(t, 2, f"{own} --num-processes 2 --dp-shard-size 1 --tp-size 2", "8 x 32", "divisible by 16")
    t.write("c.yaml", "distributed_type: FSDP\nnum_processes: 1\nmixed_precision: fp8\n"
                      "fp8_config:\n  backend: AO\n  amax_history_len: 16\n")
    refused(t, 2, f"{LAUNCH} --config-file c.yaml", "amax_history_len", "backend: TE")


@test
def model_config(t):
    for more, word in (dict(rope_scaling=dict(rope_type="ntk", factor=2)), "ntk"), (dict(attention_dropout=0.1), "attention_dropout"):
        t.model(**MODEL, **more)
        refused(t, 65, LAUNCH, "model.json", word)
    t.model(**MODEL)
    t.change("model.json", "}", ', "hidden_size": 32}')
    refused(t, 65, LAUNCH, "model.json", "hidden_size")
    refused(t, 65, f"{LAUNCH} --set model.config=nowhere.json", "nowhere.json")
    t.model(**MODEL | dict(hidden_size=33))
    refused(t, 65, LAUNCH, "33")


@test
def numbers_that_no_op_supports(t):
    """The readers accept these numbers and ops do not: the sentence has key, value and limit."""
    wide = dict(intermediate_size=2, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=..., max_position_embeddings=1 << 27)
    t.model(**wide, head_dim=2, hidden_size=1048576)
    for command in LAUNCH, TRAIN, PLAN:
        refused(t, 65, command, "hidden_size is 1048576", "at most 262144")
    t.model(**wide, head_dim=1024, hidden_size=64)
    refused(t, 65, f"{CHECK_ON_CUDA} 32", "head_dim is 1024", "at most 256", CUDA_VISIBLE_DEVICES="")
    refused(t, 65, f"{PLAN} --device cuda", "head_dim is 1024", "at most 256")
    refused(t, 2, f"{PLAN} --sequence-length 134217728 --micro-batch-size 65536",
            "train.micro_batch_size 65536 x train.sequence_length 134217728", "= 8796093022208 tokens")
    t.model(vocab_size=1 << 24, hidden_size=262144, intermediate_size=4194304, num_hidden_layers=4096, num_attention_heads=4096,
            num_key_value_heads=..., head_dim=1024, max_position_embeddings=1 << 27)
    refused(t, 1, f"{PLAN} --sequence-length 134217728 --micro-batch-size 15", "4096 layers of 2013265920 tokens", "no host can address")


@test
def every_number_that_is_accepted_can_be_planned(t):
    """Numbers at the ends of what the readers accept, and in between: each is planned, or refused with a documented code. A crash, an
    assertion or an endless loop is none."""
    cases, planned, state = 80, 0, 1

    def pick(*choices):
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        return choices[(state >> 33) % len(choices)]

    for _ in range(cases):
        heads = pick(1, 8, 4096)
        model = dict(tie_word_embeddings=pick(True, False), head_dim=pick(2, 64, 258, 1024), num_key_value_heads=pick(1, heads, heads),
                     num_hidden_layers=pick(1, 5, 4096), intermediate_size=pick(1, 16, 4194304),
                     hidden_size=pick(1, 32, 4096, 262144, 1048576), vocab_size=pick(1, 3, 256, 1 << 24))
        t.model(**model, num_attention_heads=heads, max_position_embeddings=1 << 30)
        flags = (f"--set launch.threads_per_worker={pick(1, 2, 4)} --tp-size {pick(1, 1, 1, 8)} --cp-size {pick(1, 1, 2, 64)} "
                 f"--dp-shard-size {pick(1, 2, 1024)} --dp-replicate-size {pick(1, 1, 4096)} "
                 f"--set parallel.cp_comm={pick('allgather', 'ring', 'ulysses')} "
                 f"--set parallel.recompute={pick('none', 'selective', 'all_but_attention', 'full')} "
                 f"--set fp8.recipe={pick('tensorwise', 'rowwise', 'rowwise_with_gw_hp', 'delayed')} "
                 f"--precision {pick('bf16', 'fp32', 'fp8')} --set train.gradient_accumulation_steps={pick(1, 1000000)} "
                 f"--micro-batch-size {pick(1, 2, 65536)} --sequence-length {pick(1, 64, 4096, 1 << 27)} "
                 f"--device {pick('cpu', 'cpu', 'cuda')}")
        t.run(t.limited("-t 30", f"ndtrain plan {OWN} --set fp8.filter='*' {flags}"), None)
        planned += "\nestimated step" in t.out  # it need not fit
        no = t.code == 1 and ("error: the job does not fit" in t.log or "no host can address" in t.log)
        check(no or t.code in (0, 2, 65, 71), f"exit code {t.code} of {flags}\n{model}\n{t.log}")
    check(planned > cases // 10, f"{planned} of {cases} could be planned")


@test
def a_model_that_no_host_holds(t):
    """Terabytes: refused before a worker starts, and by a worker that is started alone."""
    t.model(hidden_size=65536, intermediate_size=1048576, num_hidden_layers=1, num_attention_heads=512, num_key_value_heads=...,
            max_position_embeddings=...)
    refused(t, 71, f"{LAUNCH} {TWO}", "2 workers with a plan of", "of memory")
    refused(t, 71, TRAIN, "out of host memory", "state")


def save_model(t):
    """A model that generate and eval can use."""
    t.run(f"{TRAIN} --set output.save_model=true --set output.dir=saved --log-level error")
    (t.folder / "saved/model").rename(t.folder / "kept")


def generate(program):
    return f"{program} generate --model kept --prompt aa --max-new-tokens 9 --log-level warning"


def runs_or_names_limit(t, limit, words):
    """The command runs, or ends with 71, the limit's name and one sentence. Whether it runs."""
    t.remove("out")
    soon_ended(t, t.limited(limit, words))
    ends = t.sentences() == 1 and f"(ulimit {limit[:2]})" in t.out + t.log
    check(t.code == 0 and t.sentences() == 0 or t.code == 71 and ends, f"ulimit {limit}; {words}: {t.code}:\n{t.out}{t.log}")
    return t.code == 0


@test
def limits_of_memory(t):
    """Whatever the limit, a job runs or ends with 71 and the limit's name."""
    save_model(t)
    limits = [f"-v {n}" for n in (20000, 70000, 90000, 110000, 125000, 132000, 150000, 400000)]
    limits += [f"-d {n}" for n in (5000, 10000, 30000, 60000, 70000, 90000, 200000)]
    for i, limit in enumerate(limits):
        runs_or_names_limit(t, limit, f"{LAUNCH} {TWO}")
        runs_or_names_limit(t, limit, f"{generate('ndlaunch')} --num-processes 2 --tp-size 2" if i % 2 == 0 else
                            "ndtrain eval --model kept --data text.txt --sequence-length 32 --log-level warning")


@test
def threads_that_no_limit_allows(t):
    """Without a launcher nobody compared the threads with the limits."""
    refused(t, 71, t.limited("-d 600000", f"{TRAIN} --set launch.threads_per_worker=200"), NEEDS, "(ulimit -d)")
    refused(t, 71, t.limited("-v 4000000", f"{TRAIN} --threads-per-worker 8"), NEEDS, "(ulimit -v)", OMP_STACKSIZE="1G")
    refused(t, 71, f"{TRAIN} --threads-per-worker 8", "a worker of 8 threads cannot start more than 1 here",
            "(OMP_STACKSIZE, ulimit -s)", OMP_STACKSIZE="900000G")


def needed(t):
    return int(re.search(f"{NEEDS}([0-9]+)", t.log)[1])


@test
def limits_of_memory_for_many_threads(t):
    """Stacks count once: those of 60 threads have no room where it is said. Where it is, nothing but memory for the ops can be
    missing."""
    save_model(t)
    for words, *beyond in (TRAIN, 16384, 100000, 600000), (generate("ndtrain"), 200000):  # KiB
        words += " --threads-per-worker 60"
        t.remove("out")
        refused(t, 71, t.limited("-v 500000", words), NEEDS, "(ulimit -v)")
        least, runs = needed(t), False
        for more in beyond:
            t.remove("out")
            soon_ended(t, t.limited(f"-v {least + more}", words))
            runs = t.code == 0
            check(t.code in (0, 71) and t.sentences() == (not runs), f"{more}: {t.code}: {t.out}{t.log}")
        check(runs, t.log)


@test
def the_memory_that_is_asked_for_is_enough(t):
    """With what the sentence asks for, and a little more, a run with every thread that serves it ends well: the libraries do not say when
    they have no memory left."""
    refused(t, 71, t.limited("-v 110000", f"{LAUNCH} {TWO}"), NEEDS, "(ulimit -v)")
    least = needed(t)
    for beyond in range(64, 8193, 1024):
        t.remove("out")
        soon_ended(t, t.limited(f"-v {least + beyond}", f"{LAUNCH} {TWO} --checkpoint-frequency 1 --log-with all"), 0)


@test
def a_small_folder_of_shared_memory(t):
    """The room that UCX will need is known before the start."""
    room = "/dev/shm has room for 8.0 MiB, but the shared memory of 2 workers"
    refused(t, 71, small_shared_memory(t, "8m", f"{LAUNCH} {TWO}"), room, "enlarge it")
    # Without a limit the file system says that it has no room, and UCX takes none.
    t.remove("out")
    refused(t, 71, small_shared_memory(t, 0, f"{LAUNCH} {TWO}"), "/dev/shm has room for 0.0 MiB", "enlarge it")
    save_model(t)
    refused(t, 71, small_shared_memory(t, "8m", f"{generate('ndlaunch')} --num-processes 2 --tp-size 2"), room, "enlarge it")
    check(t.sentences() == 1, t.log)


@test
def limits_and_shared_memory_of_ranks_without_ndlaunch(t):
    """Ranks as torchrun starts them, under limits of each: one of them ends with 71, or both with 0."""
    def ranks(threads, wrap, code=71):
        begin = time.monotonic()
        codes = [rank.wait(steps.LIMIT_S) for rank in t.ranks(wrap(f"{TRAIN} {TWO} --threads-per-worker {threads}"))]
        t.out, t.log = "", t.read("log0") + t.read("log1")
        check(code in codes if code else codes == [0, 0], f"{codes}: {t.log}")
        check(not code or time.monotonic() - begin < steps.PATIENCE_S, "a rank waits for one that has left")
        check(not code or not (t.folder / "out/metrics.jsonl").exists(), "they wrote a run")

    ranks(8, lambda words: t.limited("-v 150000", words))
    t.says(("(ulimit -v)", "of memory"))
    ranks(1, lambda words: small_shared_memory(t, "8m", words))
    t.says(("/dev/shm has room for 8.0 MiB, but the shared memory of 2 workers", "enlarge it"))
    ranks(1, t.command, 0)


@test
def text_and_jsonl(t):
    refused(t, 65, f"{LAUNCH} --set data.path=nowhere.txt", "nowhere.txt")
    t.write("empty.txt", "")
    refused(t, 65, f"{LAUNCH} --set data.path=empty.txt", "empty.txt", "empty")
    t.write("rows.jsonl", '{"text": "good"}\n{"text": \n')
    refused(t, 65, f"{LAUNCH} --set data.path=rows.jsonl", "rows.jsonl", "2")
    t.model(**MODEL, vocab_size=300)
    refused(t, 2, LAUNCH, "300", "256")


@test
def missing_files_name_who_asked_for_them(t):
    """The message has what corrects a wrong path: the key, where it was given, and the folder."""
    bare, here = "ndlaunch --device cpu --num-steps 1 --set output.dir=out", str(t.folder)
    t.write("c.yaml", "train: {steps: 1}\ndata:\n  path: nowhere.txt\n")
    refused(t, 65, bare, 'model.config is "configs/model-small.json" (the default)', here)
    refused(t, 65, f"{bare} --model-config=model.json --config-file c.yaml", 'c.yaml:3: data.path is "nowhere.txt"', here)
    refused(t, 65, f"{bare} --model-config=model.json --data none.txt", '--data is "none.txt"', here)
    refused(t, 65, f"{bare} --set model.config=/none.json", 'model.config is "/none.json"', "--model-config")
    refused(t, 65, f"{bare} --model_path none", '--model-path is "none"', here)
    refused(t, 65, f"{LAUNCH} --validation-path none.txt", '--validation-path is "none.txt"',
            "an empty path, --validation-path=, for no validation")
    refused(t, 65, f"{LAUNCH} --data-path none --tokenizer file", '--data-path is "none"', "does not exist")
    refused(t, 65, f"{TRAIN} --data-path none", '--data-path is "none"', here)
    refused(t, 2, f"{bare} --config-file none.yaml", "--config-file none.yaml does not exist", here)


@test
def binary_data(t):
    """JSON lines may be compressed whatever their name: their reader finds that these are damaged."""
    for begin, as_text, as_rows in ((b"\x1f\x8b\x08rest", "gzip", "damaged"), (b"\x28\xb5\x2f\xfdrest", "zstd", "truncated"),
                                    (b"PAR1rest", "Parquet", "Parquet"), (b"PK\x03\x04rest", "zip", "zip"),
                                    (b"\x89PNG\r\n\x1a\n", "PNG", "PNG")):
        for name, word in ("data.txt", as_text), ("data.jsonl", as_rows):
            t.write(name, begin)
            refused(t, 65, f"{LAUNCH} --data-path {name}", word, name)


@test
def llmc(t):
    words = f"{LAUNCH} --set data.path=tokens.bin --set data.format=llmc --set data.tokenizer=file"
    for count, token, number in (129, 3, "129"), (128, 256, "256"):
        t.write("tokens.bin", struct.pack("<256I", 20240801, 7, count, *[0] * 253) + struct.pack("<128I", *[token] * 128))
        t.run(words, 65, ("tokens.bin", number))
        check((t.folder / "out/metrics.jsonl").exists() == (number == "256"), "a run is written where a step has begun")
        t.remove("out")


@test
def megatron(t):
    words = f"{LAUNCH} --set data.path=corpus --set data.format=megatron --set data.tokenizer=file"
    for length in 200, 300:  # of the one sequence that the .idx names; the .bin has 200 tokens
        idx = t.write("corpus.idx", struct.pack("<9sQBQQiQQQ", b"MMIDIDX\0\0", 1, 8, 1, 2, length, 0, 0, 1))
        t.write("corpus.bin", bytes(400))
        if length == 200:
            t.run(words)
            t.remove("out")
    refused(t, 65, words, "corpus")
    t.write("corpus.idx", idx[:40])
    refused(t, 65, words, "corpus.idx")
    (t.folder / "corpus.idx").unlink()
    refused(t, 65, words, "corpus")


@test
def weights(t):
    t.run(f"{LAUNCH} --set output.save_model=true")
    (t.folder / "out/model").rename(t.folder / "good")
    t.remove("out")
    data = (t.folder / "good/model.safetensors").read_bytes()
    own = f"ndlaunch {FLAGS} --model-path"
    t.run(f"{own} good")
    t.remove("out")
    for name, changed, *facts in (("cut", data[:-8], "model.safetensors"),
                                  ("extra", data.replace(b"lm_head.weight", b"lm_hood.weight", 1), "lm_", "extra"),
                                  ("two", data.replace(b"model.norm.weight", b'lm_head.weight","', 1), "two")):
        shutil.copytree(t.folder / "good", t.folder / name)
        check(t.write(f"{name}/model.safetensors", changed) != data, name)
        refused(t, 65, f"{own} {name}", *facts)
    refused(t, 65, f"{own} nowhere", "nowhere")
    refused(t, 65, f"ndlaunch {FLAGS} --model-name some/model-that-is-not-here", "some/model-that-is-not-here")


@test
def output_folder(t):
    t.run(LAUNCH)
    before = t.read("out/metrics.jsonl")
    t.run(LAUNCH, 73, "out")
    check(t.read("out/metrics.jsonl") == before, "the older run is as it was")
    t.remove("out")
    (t.folder / "out/model").mkdir(parents=True)
    refused(t, 73, LAUNCH, "already holds a run", "model")
    t.write("file", "x")
    t.run(f"{LAUNCH} --set output.dir=file/out", 73)


@test
def rendezvous(t):
    t.run("ndlaunch --make-key key")
    check((t.folder / "key").stat().st_mode & 0o777 == 0o600, "others can read the key")
    t.run("ndlaunch --make-key key", 73)


@test
def check_of_a_gpu_job_needs_no_gpu(t):
    """The configuration of a GPU job can be checked on any machine; only a run needs the GPU."""
    words, none = "warning: data.documents is separate, and the plain attention", dict(CUDA_VISIBLE_DEVICES="")
    t.run(f"{CHECK_ON_CUDA} 32", says=("configuration, model and data are good",
                                       "warning: this machine cannot run the job: device cuda "), **none)
    refused(t, 2, f"{CHECK_ON_CUDA} 256", "256", "128", **none)
    t.says(never=words)
    t.run(f"{CHECK_ON_CUDA} 32 --documents separate", says=words, **none)


@test
def check_says_what_is_good(t):
    t.write("valid.txt", 99 * "a")
    t.run(f"ndtrain check {OWN} --data-path text.txt --validation-path valid.txt --sequence-length 32 --device cpu",
          says=("are good: mesh 1 x 1 x 1 x 1 (", "; 0.03 M parameters; ", " 4096 training tokens, 99 for validation\n"))


@test
def an_unknown_command_is_named(t):
    refused(t, 2, "ndtrain frob", 'ndtrain has no command "frob"', "usage: ndtrain train")
    refused(t, 2, "ndtrain 'a\033[31m'", 'no command "a\\x1b[31m"', "usage: ")


@test
def help_of_commands(t):
    for command in "train", "check", "plan", "":
        own = {"plan": "\n  --rank R ", "check": "starts nothing"}.get(command)
        t.run(f"ndtrain {command} --help", says=own or "\n  plan --help ")
        check((7 if own else 24) <= t.out.count("\n") <= 43, f"{command}: {t.out}")
        t.run(f"ndtrain {command} --help mesh", says="(mesh.tp; default 1;", never="train.steps")
        t.run(f"ndtrain {command} --help all", says=("(train.steps;", "Exit codes:"))
        t.run(f"ndtrain {command} --help mash", 2, "did you mean --help mesh?")


@test
def control_characters_of_a_file_are_not_printed(t):
    """Bytes that would move the cursor or begin a line of their own are written as \\x1b and \\n."""
    for text in ('mesh:\n  "tp\\e[31m": 2\n', '"\\e[2J": {tp: 2}\n', 'train:\n  steps: "3\\e]0;x\\a"\n', 'data:\n  path: "a\\e[31m"\n',
                 'train:\n  steps: "3\\nfake: line"\n', 'distributed_type: "FSDP\\e[31m\\u009b1m"\n',
                 'distributed_type: FSDP\nnum_processes: 2\n"debug\\e[31m": true\n'):
        t.write("esc.yaml", text)
        t.run("ndtrain plan --config-file esc.yaml", 2, never="\x9b")
        printed = t.out + t.log
        check(printed.count("\n") == 1 and all(c == "\n" or ord(c) >= 32 for c in printed), f"{text}: {printed!r}")
    t.write("a\033[31m.yaml", text)
    t.run(f"ndtrain plan --config-file {shlex.quote(chr(97) + chr(27) + '[31m.yaml')}", 2,
          "a\\x1b[31m.yaml: the name holds a control character")


steps.main("errors", setup)
