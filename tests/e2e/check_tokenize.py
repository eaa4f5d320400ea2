#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Text as a user trains on it: a run from JSON lines with a tokenizer gives the numbers, to the last bit, of a run from the files that
`ndtrain tokenize` writes, on several meshes. So does one from prompts with completions, whose loss mask lies beside these files."""
import gzip
import json
import os
import re
import shutil

import steps
from steps import SOURCE, check, test

TOKENIZE = "ndtrain tokenize --tokenizer tok"
CHECK = "ndtrain check --device cpu --num-processes 1"
OWN = f"{CHECK} --model-config tok/config.json"


def setup(t):
    t.write("tok/tokenizer.json", (SOURCE / "tests/unit/trainer/text/goldens/llama3.json").read_bytes())
    t.write("tok/tokenizer_config.json", '{"eos_token": "<|eot|>"}')
    t.model("tok/config.json", vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=1, max_position_embeddings=8192)
    t.write("a.jsonl", [dict(prompt=f"what is row {i}?", completion=f" the {i * i % 97}th\n") if i % 3 == 1 else
                        dict(text=f"row {i} of a text, it's the {i * i % 97}th\n") for i in range(300)])


def train(t, out, data, tokenizer, flags):
    t.run(["ndlaunch", "--device", "cpu", "--set", "model.config=tok/config.json", "--precision", "fp32", "--data-path", data,
           "--tokenizer", tokenizer, *"--cache-dir cache --sequence-length 32 --num-steps 3".split(), "--set", f"output.dir={out}",
           *flags.split()])


def counted_tokens(t):
    """(those that count, all): what the start of the run says of its training data."""
    found = re.search("training data: ([0-9]+) of ([0-9]+) tokens count in the loss", t.out + t.log)
    check(found, t.log)
    return int(found[1]), int(found[2])


def same_steps(t, *runs):
    lines = [[line.split('"step_ms')[0] for line in t.read(f"{run}/metrics.jsonl").splitlines()] for run in runs]
    check(lines[0] == lines[1] and any("loss" in line for line in lines[0]), lines)


def left(t, *names):
    """Files whose names begin so."""
    return [name for name in os.listdir(t.folder) if name.startswith(names) or "tmp" in name]


@test
def a_run_from_text_is_the_run_from_its_token_files(t):
    t.run(f"{TOKENIZE} --input a.jsonl --output-prefix pair --append-eod --threads 2",
          says=("documents                                 300", "tokens that count in loss", "pair.bin, .mask and .idx"))
    for i, mesh in enumerate(("--num-processes 1 --set output.save_model=true", "--num-processes 2 --dp-shard-size 2",
                              "--num-processes 4 --tp-size 2 --cp-size 2")):
        train(t, "text", "a.jsonl", "model", mesh)
        check(("encoding " in t.out + t.log) == (i == 0), t.log)
        counted, every = counted_tokens(t)  # also where the cache was there
        train(t, "pair_run", "pair", "file", mesh)
        check(counted < every and counted_tokens(t) == (counted, every), t.log)
        same_steps(t, "text", "pair_run")
        for name in ("tokenizer.json", "tokenizer_config.json") if i == 0 else ():
            t.same(f"tok/{name}", f"text/model/{name}")
        for run in "text", "pair_run":
            shutil.rmtree(t.folder / run)
    check(len(list((t.folder / "cache").glob("*.tokens"))) == 1, "one cache")


@test
def a_run_says_how_many_tokens_count(t):
    """Of JSON lines that are read as bytes, and of sources that are told apart."""
    prompts = sum(len(f"what is row {i}?") for i in range(1, 300, 3))
    rows = t.read("a.jsonl").splitlines(keepends=True)
    t.change("tok/config.json", "512", "256", to="bytes.json")
    t.write("b.jsonl", "".join(rows[:30]))
    t.write("c.jsonl", "".join(row for row in rows if "text" in row))
    own = "--num-processes 1 --set model.config=bytes.json"
    train(t, "bytes_run", "a.jsonl", "bytes", f"{own} --validation-path b.jsonl")
    counted, every = counted_tokens(t)
    check(counted + prompts == every, t.log)
    t.says("validation data: ")
    train(t, "blend_run", "0.5 a.jsonl 0.5 c.jsonl", "bytes", own)
    t.says(("source a: ", "source c: all tokens count in the loss"))


@test
def the_command(t):
    """The output does not depend on the threads, and what fails leaves no file."""
    t.write("a.jsonl.gz", gzip.compress((t.folder / "a.jsonl").read_bytes()))
    t.run(f"{TOKENIZE} --input a.jsonl.gz --output-prefix one --threads 1")
    t.run(f"{TOKENIZE} --input a.jsonl --output-prefix two --threads 4")
    for end in "bin", "idx", "mask":
        t.same(f"one.{end}", f"two.{end}")
    t.write("bad.jsonl", '{"text": "a"}\n{"text": 1}\n')
    t.write("empty.jsonl", [dict(text="")])
    t.write("m.gguf", "")
    for code, words, fact in (
            (73, f"{TOKENIZE} --input a.jsonl --output-prefix one", "is there already"),
            (65, f"{TOKENIZE} --input none --output-prefix x", ""),
            (2, "ndtrain tokenize --tokenizer none --input a.jsonl --output-prefix x", ""),
            (2, f"{TOKENIZE} --inputs a.jsonl --output-prefix x", "did you mean --input?"),
            (2, f"{TOKENIZE} --input a.jsonl", "--output-prefix is missing: writes PREFIX"),
            (2, f"{TOKENIZE} --input a.jsonl --output-prefix tok/", '"tok/" is a folder'),
            (2, f"{TOKENIZE} --input --output-prefix x", "--input needs a value"),
            (2, f"{TOKENIZE} --input a.jsonl --output-prefix x --document-separator=", "--document-separator is empty"),
            (2, "ndtrain tokenize --tokenizer bytes --input a.jsonl --output-prefix x --append-eod", "leave --append-eod out"),
            (2, "ndtrain tokenize --tokenizer m.gguf --input a.jsonl --output-prefix x", '"m.gguf" is a GGUF file'),
            (65, f"{TOKENIZE} --input empty.jsonl --output-prefix x", "the input has no document with text in it"),
            (65, f"{TOKENIZE} --input bad.jsonl --output-prefix x", 'bad.jsonl" line 2: "text" is not a string'),
            (73, f"{TOKENIZE} --input a.jsonl --output-prefix /proc/x", "")):
        t.run(words, code, fact)
    check(not left(t, "x"), left(t, "x"))
    for end in "bin", "idx", "mask":
        t.write(f"y.{end}", "")
        t.run(f"{TOKENIZE} --input a.jsonl --output-prefix y", 73, f'"y.{end}" is there already')
        (t.folder / f"y.{end}").unlink()
    t.run(f"{TOKENIZE} --input bad.jsonl --output-prefix x --skip-bad=1")


@test
def rows_with_prompts_and_messages_have_a_mask(t):
    """What does not count in the loss is in the mask, and only there; damage of it stops a run."""
    looks = f"{OWN} --sequence-length 32 --tokenizer file --data-path"
    mask = t.folder / "t.mask"
    t.write("text.jsonl", "".join(row for row in t.read("a.jsonl").splitlines(keepends=True) if "text" in row))
    t.run(f"{TOKENIZE} --input text.jsonl --output-prefix t")
    check(not mask.exists(), "all of it counts")
    mask.touch()
    t.run(f"{looks} t", 65, 't.mask" has 0 bytes')
    t.run(f"{TOKENIZE} --input a.jsonl --output-prefix t", 73)
    t.run(f"{TOKENIZE} --input text.jsonl --output-prefix t --overwrite")
    check(not mask.exists(), "the mask of before is gone")
    t.run(f"{TOKENIZE} --input a.jsonl --output-prefix a")
    t.run(f"{looks} a")
    shutil.copy(t.folder / "a.mask", mask)
    t.run(f"{looks} t", 65, "belongs to other token files")
    # A key of one's own is the only one; its absence is told as before.
    t.run(f"{TOKENIZE} --input a.jsonl --output-prefix k --json-key text", 65, 'line 2: "text" is missing')
    t.write("p.jsonl", [dict(prompt="a", completion="")])
    t.run(f"{TOKENIZE} --input p.jsonl --output-prefix p", 65, "counts in the loss")
    t.write("m.jsonl", [dict(messages=[dict(role="user", content="a")])])
    t.run(f"{TOKENIZE} --input m.jsonl --output-prefix p", 65, "(--chat-format)")
    check(left(t, "p", "k") == ["p.jsonl"], left(t, "p", "k"))


def write_chat(t):
    """A tokenizer with the tokens of turns, and rows of messages."""
    t.write("chat/tokenizer_config.json", '{"eos_token": "<|im_end|>"}')
    t.change("tok/tokenizer.json", "<|begin|>", "<|im_start|>", "<|eot|>", "<|im_end|>", to="chat/tokenizer.json")
    t.write("m.jsonl", [dict(messages=[dict(role="user", content=f"what is {i}?"), dict(role="assistant", content=f"a number, {i}")])
                        for i in range(1, 61)])


@test
def a_run_from_messages_is_the_run_from_its_token_files(t):
    """Rows of messages, as a run encodes them."""
    write_chat(t)
    command = "ndtrain tokenize --tokenizer chat --input m.jsonl --output-prefix"
    t.run(f"{command} m --chat-format chatml", never="which nothing reads")
    t.write("s.jsonl", [dict(messages=[dict(role=role, content="a", mood="b") for role in ("user", "assistant")])])
    t.run("ndtrain tokenize --tokenizer chat --input s.jsonl --output-prefix s --chat-format chatml",
          says='  messages have the key "mood", which nothing reads\n')
    check((t.folder / "m.mask").stat().st_size > 0, "a mask")
    t.run(f"{command} n --chat-format model", 65, "is model, but there is no chat template beside")
    for out, data, tokenizer, flags in ("text", "m.jsonl", "chat", " --chat-format chatml"), ("pair_run", "m", "file", ""):
        train(t, out, data, tokenizer, f"--num-processes 1{flags}")
        t.says("tokens count in the loss (")
    same_steps(t, "text", "pair_run")


@test
def a_checkpoint_of_messages_has_the_files_of_the_run(t):
    """A model that is made of a checkpoint names the end of a turn, as that of the run does."""
    write_chat(t)
    t.write("chat/tokenizer_config.json", '{"eos_token": "[word]"}')
    train(t, "run", "m.jsonl", "chat", "--num-processes 1 --chat-format chatml --save-model true --checkpoint-frequency 1000 "
                                       "--set checkpoint.export_model=true")
    check("eos_token_id" in t.read("run/model/generation_config.json"), "the end of a turn")
    last = next((t.folder / "run").glob("checkpoint-*")).relative_to(t.folder)
    t.run(f"ndtrain export {last} copy")
    names = os.listdir(t.folder / "copy")
    check(sorted(names) == sorted(os.listdir(t.folder / "run/model")), names)
    for name in names:
        t.same(f"copy/{name}", f"run/model/{name}")
        t.same(f"copy/{name}", f"{last}/{name}")


@test
def flags_of_the_command(t):
    t.write("t.txt", "one <|eot|>%%two")
    t.run(f"{TOKENIZE} --input t.txt --output-prefix t --document-separator %% --special-in-text parse --append-eod",
          says=("documents                                   2", "became tokens"))
    t.write("b.jsonl", '{"body": "a"}\n')
    t.run(f"{TOKENIZE} --input b.jsonl --output-prefix b --json-key body", says="documents                                   1")
    t.run(f"{TOKENIZE} --input t.txt --output-prefix u --special-in-text refuse", 65, 'special token "<|eot|>"')


AGAIN = f"{TOKENIZE} --overwrite --output-prefix f --input"


@test
def more_flags_of_the_command(t):
    """Flags and names of flags that no other test gives; messages name those that help."""
    t.change("tok/tokenizer.json", '"truncation":null', '"truncation":{"max_length": 4}', to="cut.json")
    t.run("ndtrain tokenize --tokenizer cut.json --output-prefix g --input a.jsonl", says='"truncation", which is ignored')
    t.write("bad.txt", b"a\xffb")
    t.run(f"{AGAIN} bad.txt --invalid-utf8 replace")
    t.run(f"{AGAIN} bad.txt --invalid-utf8 refuse", 65, "--invalid-utf8 replace (data.invalid_utf8)")
    t.run(f"{AGAIN} bad.txt --invalid-utf8 drop", 2)
    t.write("s.txt", "<|eot|>")
    t.run(f"{AGAIN} s.txt --special-in-text refuse", 65, "data.special_in_text (--special-in-text)")
    t.write("b.json", '{"b": "x"}\n')
    t.run(f"{AGAIN} b.json --format jsonl", 65, "--json-key")
    sizes = []
    for flags in "--format jsonl --json-keys b --workers 2", "--data-format=jsonl --json-keys=b --no-special-tokens --drop-unknown":
        t.run(f"{AGAIN} b.json {flags}")
        sizes.append((t.folder / "f.bin").stat().st_size)
    check(sizes[1] < sizes[0], sizes)
    t.write("d.txt", "a\n\nb\tc")
    t.run([*t.command(AGAIN), "d.txt", "--document-separator", "\\n\\n"])
    check((t.folder / "f.idx").stat().st_size == 82, "two documents")
    t.run([*t.command(AGAIN), "d.txt", "--document-separator=\\t"], says="documents                                   2")


@test
def keys_of_a_run_that_reads_rows(t):
    """In a run, as in the command before it: one bad row, a text under another key, a broken byte."""
    t.write("rows.jsonl", 20 * b'{"body": "some words", "prompt": 1}\n' + b'{"body": 1}\n{"body": "a\xffb"}\n')
    looks = f"{OWN} --sequence-length 8 --cache-dir keys --tokenizer tok --data-path rows.jsonl"
    t.run(looks, 65, 'rows.jsonl" line 1: ')
    t.run(f"{looks} --json-key body", 65, 'rows.jsonl" line 21: "body" is not a string')
    t.run(f"{looks} --json-key body --skip-bad 1 --log-level info", says="1 bad rows were left out")
    # The cache of that run is not the one of a run that is stricter.
    t.run(f"{looks} --json-key body --skip-bad 0", 65)
    t.run(f"{looks} --json-key body --skip-bad 1 --invalid-utf8 refuse", 65, ("line 22: ", "leaving out 1 other bad row"))
    t.write("rows.yaml", "data: {json_key: body, skip_bad: 2, invalid_utf8: refuse}\n")
    t.run(f"{looks} --config-file rows.yaml --log-level info", says="2 bad rows were left out")
    t.write("s.txt", 40 * "<|eot|>")
    for how, fact in ("parse", " 41 training tokens"), ("text", " 242 training tokens"), ("refuse", "(--special-in-text)"):
        t.run(f"{looks} --data-path s.txt --special-in-text {how}", 65 if how == "refuse" else 0, fact)
    # The tokens are those of the command.
    t.run(f"{AGAIN} rows.jsonl --json-key body --skip-bad 2 --invalid-utf8 refuse", says="bad lines                                   2")


@test
def separators_in_a_run(t):
    """Documents of a text file, in a run as in the command; another separator is another cache."""
    keys = "--sequence-length 8 --cache-dir keys --log-level info"
    t.write("d.txt", 20 * "some words\tmore\n\n")

    def looks(flags, says=(), never=(), separator=None, code=0):
        more = ["--document-separator", separator] if separator else []
        t.run([*t.command(f"{OWN} {keys} --data-path d.txt {flags}"), *more], code, says, never)

    looks("--tokenizer tok", 'encoded "d.txt": 20 documents', separator="\\n\\n")
    looks("--tokenizer tok", 'encoded "d.txt": 21 documents', "data.document_separator", separator="\\t")
    looks("--tokenizer tok", 'encoded "d.txt": 1 document')
    looks("--tokenizer tok", "data.document_separator separates nothing", separator="%%")
    looks("--tokenizer tok --data-path a.jsonl", "data.document_separator has no effect", separator="\\t")
    t.write("text.yaml", "data: {document_separator: \\n\\n}")
    looks("--tokenizer tok --config-file text.yaml", never="encoded")
    looks("--tokenizer bytes", '"d.txt" is read as bytes, in which no document ends', separator="\\n\\n", code=2)
    # A compressed text gives the bytes of the text, alone and in a folder.
    t.change("tok/config.json", "512", "256", to="bytes.json")
    t.write("z/d.txt.gz", gzip.compress((t.folder / "d.txt").read_bytes()))
    looks("--model-config bytes.json --tokenizer bytes --data-path z/d.txt.gz", 'encoded "z/d.txt.gz": 1 document')
    looks("--model-config bytes.json --tokenizer bytes --data-path z")


@test
def a_folder_that_is_read_in_part(t):
    """What a run does not read, it says; ids and text in one place are two sources."""
    looks, partly = f"{OWN} --sequence-length 32 --cache-dir cache --data-path", "1 files of other kinds and 1 folders in it are not read"
    (t.folder / "in/deeper").mkdir(parents=True)
    shutil.copy(t.folder / "a.jsonl", t.folder / "in")
    t.write("in/notes.md", "")
    t.run(f"{looks} in --tokenizer tok", says=partly)
    t.run(f"{TOKENIZE} --input in --output-prefix in/pair", says="folders within")
    t.run(f"{looks} in --tokenizer tok", 65, '"in/pair.bin", and others, as "in/a.jsonl"')
    t.run(f"{looks} 'in/*' --tokenizer file", 65, "has token files")
    t.run(f"{looks} 'in/pair*' --tokenizer file")
    (t.folder / "in/a.jsonl").rename(t.folder / "in/rows.json")
    rows = (t.folder / "in/rows.json").rename(t.folder / "rows.json")
    t.run(f"{looks} in --tokenizer file", says=partly)
    t.change("tok/config.json", "512", "256", to="bytes.json")
    for path in (t.folder / "in").glob("pair.*"):
        path.rename(t.folder / path.name)
    rows.rename(t.folder / "in/rows.json")
    t.run(f"{looks} in/rows.json --model-config bytes.json", 65, "begins as JSON does")
    t.run(f"{looks} in/rows.json --model-config bytes.json --set data.format=jsonl")


@test
def prepare_data_from_a_file(t):
    """A text of one's own, also with the line ends of Windows."""
    (t.folder / "own/scripts").mkdir(parents=True)
    shutil.copy(SOURCE / "scripts/prepare_data", t.folder / "own/scripts")
    t.write("t.txt", "".join(f"line {i}\r\nmore\r\n\r\n" for i in range(1, 41)))
    t.run("own/scripts/prepare_data --from t.txt")
    valid = t.read("own/data/valid.txt")
    check(t.read("own/data/train.txt").count("line") == 38 and valid.count("line") == 2 and "line 20\n" in valid, valid)
    t.run("own/scripts/prepare_data --from a.jsonl", says="ndtrain generate --model runs/own", never="--chat-format")
    check(t.read("own/data/valid.jsonl").count("\n") == 15, "every twentieth row")
    t.write("m.jsonl", [dict(messages=[])] * 20)
    t.run("own/scripts/prepare_data --force --from m.jsonl", says="data/valid.jsonl --chat-format model")
    (t.folder / "texts").mkdir()
    t.run("own/scripts/prepare_data --from texts", 2, "'texts' is a folder")
    t.write("m.parquet", "PAR1")
    t.run("own/scripts/prepare_data --from m.parquet", 2, "scripts/encode_rows.py")


@test
def errors_of_a_run(t):
    """What a configuration asks for and cannot have."""
    looks = f"{CHECK} --data-path a.jsonl --cache-dir cache --sequence-length 32 --model-config"
    t.change("tok/config.json", "512", "256", to="alone/config.json")
    t.run(f"{looks} tok/config.json --tokenizer none", 2, 'data.tokenizer is "none"')
    t.run(f"{looks} alone/config.json --tokenizer model", 2, "has no tokenizer.json")
    t.run(f"{looks} alone/config.json --tokenizer tok", 2, "vocab_size is 256")
    t.write("a.jsonl", t.read("a.jsonl") + json.dumps(dict(text=5)) + "\n")
    t.run(f"{looks} tok/config.json --tokenizer model", 65, 'a.jsonl" line 301')


steps.main("tokenize", setup)
