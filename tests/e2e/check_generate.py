#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`ndtrain generate` and `ndtrain eval` as a user runs them: the same text from wherever a model is kept, in any batch and on any mesh;
the loss of the run's own validation; and, with a Python with torch and transformers in ND_PEER_PYTHON, the ids and scores of
transformers."""
import json
import math
import re
import shutil
import signal
import struct
import subprocess
import time

import steps
from steps import SOURCE, check, test

GOLDENS = SOURCE / "tests/unit/trainer/text/goldens"
TRAIN = ("ndlaunch --device cpu --data-path text.txt --validation-path valid.txt --precision fp32 --sequence-length 64 --lr 1e-2 "
         "--set output.dtype=fp32 --set output.save_model=true")
GENERATE = "ndtrain generate --precision fp32 --threads-per-worker 2"
EVAL = "ndtrain eval --precision fp32 --threads-per-worker 2"
LAUNCH = "ndlaunch generate --precision fp32 --threads-per-worker 1"
LAUNCH_EVAL = "ndlaunch eval --precision fp32"


def setup(t):
    t.write("valid.txt", t.text()[:1299])  # blocks of 65: the last one is short
    t.model()


def train(t):
    t.run(f"{TRAIN} --model-config model.json --num-steps 8 --checkpoint-interval 4 --output-dir run")


@test
def has_the_same_text_from_wherever_a_model_is_kept(t):
    train(t)
    ask = "--prompt 'ab cd' --max-new-tokens 40"
    text = t.run(f"{GENERATE} --model run {ask}", says=" new tokens, ")
    check(len(text) > 20, text)
    for model in "run/model", "run/checkpoint-8/":
        check(t.run(f"{GENERATE} --model {model} {ask}") == text, model)
    (t.folder / "run/model").rename(t.folder / "kept")
    check(t.run(f"{GENERATE} --model run {ask}") == text, "the checkpoint of a run without a model")
    shutil.copytree(t.folder / "kept", t.folder / "hub/models--ab--cd/snapshots/0123")
    check(t.run(f"{GENERATE} --model ab/cd {ask}", HF_HUB_CACHE=str(t.folder / "hub")) == text, "a name in the cache")
    shard = next((t.folder / "run/checkpoint-8").glob("state/shard-*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-9] ^= 1
    shard.write_bytes(content)
    t.run(f"{GENERATE} --model run {ask}", 65, "is damaged: bytes ")
    for prompt in "ab cd\n", "ab cd\r\n":
        t.write("prompt", prompt)
        check(t.run(f"{GENERATE} --model kept --prompt-file prompt --max-new-tokens=40") == text, prompt)
    check(t.run(f"{GENERATE} --model kept --max_new_tokens 40", given="ab cd\n") == text, "standard input")
    t.run(f"{GENERATE} --model kept --jsonl --max-new-tokens 40", given='{"prompt": "ab cd", "id": [7]}\n',
          says=('{"index":0,"id":[7],"text":"', '"finish":"length","prompt_tokens":5,"new_tokens":40,"ids":['))
    t.run(f"{GENERATE} --model kept --jsonl {ask}", says='"finish":"length","prompt_tokens":5,"new_tokens":40,"ids":[')


@test
def samples_of_a_run_are_texts_of_its_model(t):
    """The text of the weights in training is that of the model that is saved then, on any mesh, and the run does not know of it: its
    losses and its weights keep their bits."""
    prompts = ["ab cd", '"e', "fgh ij kl"]
    asked = ["--sample-tokens", "12", "--sample-prompt", 'ab cd\\n"e\\nfgh ij kl']
    for mesh in ("--num-processes 1 --micro-batch-size 2", "--num-processes 4 --dp-shard-size 2 --tp-size 2",
                 "--num-processes 4 --dp-replicate-size 2 --cp-size 2"):
        for out in "run", "plain":
            shutil.rmtree(t.folder / out, ignore_errors=True)
        command = t.command(f"{TRAIN} --model-config model.json --num-steps 40 --eval-steps 20 {mesh} --output-dir")
        t.run([*command, "plain"])
        t.run([*command, "run", *asked], says='sample after step 40: "ab cd" goes on "')
        t.same("run/model/model.safetensors", "plain/model/model.safetensors")
        check(t.read("run/metrics.jsonl").count('"event":"sample","step":20,') == 3, "three samples after step 20")
        losses = [[line.split('"step_ms"')[0].split('"wire_bytes"')[0] for line in t.read(f"{out}/metrics.jsonl").splitlines()
                   if '"loss"' in line] for out in ("run", "plain")]
        check(len(losses[0]) == 40 and losses[0] == losses[1], losses)
        t.write("rows", [dict(prompt=prompt) for prompt in prompts])
        t.run(f"{GENERATE} --model run/model --prompt-file rows --jsonl --max-new-tokens 12")
        samples = [json.loads(line) for line in t.read("run/metrics.jsonl").splitlines() if '"sample","step":40,' in line]
        check(len(samples) == 3 and [s["text"] for s in samples] == [r["text"] for r in t.rows()], (samples, t.out))
    t.run("ndtrain report run")
    check('"step":40,"prompt":"ab cd","text":' in t.read("run/report.html"), "the report has the samples")
    t.run(f"{TRAIN} --model-config model.json --sample-prompt x --set data.validation_path=", 2, "give --validation-path")
    t.run(f"{TRAIN} --model-config model.json --sample-prompt {70 * '0'}", 65,
          "train.sequence_length is 64, which leaves no room for a new one; shorten the prompt (")


@test
def samples_end_where_the_saved_model_does(t):
    """The model names no end of text, but the one that is saved has that of the tokenizer; and where turns are trained, their end."""
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    ends = [dict(id=10 + i, content=f"<|{name}|>", single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
            for i, name in enumerate(("endoftext", "im_start", "im_end"))]
    t.write("tokenizer.json", json.dumps(dict(version="1.0", added_tokens=ends, pre_tokenizer=level, decoder=level,
                                              model=dict(type="BPE", vocab=dict(zip("abeinrstuĊ", range(10))), merges=[]))))
    t.model("endless.json", eos_token_id=None)
    turns = [dict(role=role, content=content) for role, content in (("user", "a"), ("assistant", "b"))]
    for row, flags in (dict(text="ab"), ""), (dict(messages=turns), "--chat-format chatml"):
        t.write("ab.jsonl", [row] * 300)
        t.run("ndlaunch --device cpu --data-path ab.jsonl --validation-path ab.jsonl --precision fp32 --sequence-length 64 --lr 1e-2 "
              "--model-config endless.json --num-steps 20 --tokenizer tokenizer.json --sample-prompt a --sample-tokens 8 "
              f"--save-model false {flags}", says='sample after step 20: "a" goes on "b"\n')


def write_rows(t, count):
    t.write("rows.jsonl", [dict(ids=[i % 256] + [97 + (i * 7 + k * k) % 26 for k in range(i % 13)]) for i in range(count)])


@test
def has_the_same_text_in_any_batch_and_on_any_mesh(t):
    """Greedily and drawn: one worker and ranks that share a tensor, each with batches that hold one text, some, and nearly all; replicas
    of such ranks; and ranks that torchrun starts."""
    t.model(num_attention_heads=8)  # of KV heads 2: copies at tp 4
    train(t)
    write_rows(t, 40)
    ask = "--model run/model --prompt-file rows.jsonl --max-new-tokens 16"
    drawn = "--temperature 0.8 --top-p 0.9 --seed"
    check(t.run(f"{GENERATE} {ask} {drawn} 5") != t.run(f"{GENERATE} {ask} {drawn} 6"), "a seed changes nothing")
    for sampling in "", f"{drawn} 5":
        expected = t.run(f"{GENERATE} {ask} {sampling}")
        check(expected.count("\n") == 40, expected)
        calls = [f"{LAUNCH} {ask} --num-processes 4 --tp-size 2 --max-batch 9 {sampling}"]
        for batch in "--max-batch 1", "--max-batch 7 --prefill-chunk 9", "--max-batch 32 --prefill-chunk 100":
            calls += [f"{GENERATE} {ask} {sampling} {batch}"]
            calls += [f"{LAUNCH} {ask} --num-processes {tp} --tp-size {tp} {sampling} {batch}" for tp in (2, 4)]
        for call in calls:
            check(t.run(call) == expected, call)
        for tp in 1, 2:
            t.wait(t.ranks(f"{GENERATE} {ask} --num-processes 2 --threads-per-worker 1 --tp-size {tp} --max-batch 5 {sampling}"), 0)
            check(t.read("out0") == expected and t.read("out1") == "", f"torchrun, tp {tp}")


@test
def ranks_with_other_models_are_refused(t):
    """Models of the same sizes, on two hosts: what one computes would not fit the other's."""
    train(t)
    for r in "01":
        shutil.copytree(t.folder / "run/model", t.folder / r / "m", ignore=shutil.ignore_patterns("SHA256SUMS"))
    for pairs in (("LlamaFor", "MistralFor", '"llama"', '"mistral", "sliding_window": 11'), ("10000.0", "10001.0")):
        t.change("0/m/config.json", *pairs, to="1/m/config.json")
        t.wait(t.ranks(f"{GENERATE} --model m --prompt a --num-processes 2 --threads-per-worker 1", folders="01"), 2)
        t.log = t.read("log1")
        t.says(("the nodes have different configurations: ", "rank 1 ("))
    # The nodes have the same model, and long prompts that differ in their last letter.
    t.wait(t.ranks(["sh", "-c", f'exec {t.build}/{GENERATE} --model 0/m --prompt {1200 * "a"}$RANK --num-processes 2']), 2)
    t.log = t.read("log1")
    t.says(("the nodes have different configurations: argument ", "rank 1 ("))


@test
def stops_before_a_stop_text(t):
    train(t)
    ask = f"{GENERATE} --model run --max-new-tokens 60"
    text = t.run(f"{ask} --prompt x")
    stop = text[12:14]
    check(re.fullmatch("[a-z]{2}", stop), text)  # the model has seen no other characters
    check(t.run(f"{ask} --prompt x --stop '<|no|>' --stop {stop}") == text[:text.index(stop)] + "\n", t.out)
    t.run(f"{ask} --jsonl --stop {stop}", given='{"prompt": "x"}\n', says='"finish":"stop"')


@test
def says_what_is_wrong(t):
    train(t)
    shutil.copytree(t.folder / "run/model", t.folder / "kept")
    a = f"{GENERATE} --model run --prompt a"
    t.write("prompt.jsonl", [dict(prompt=100 * "a", completion="b"), dict(prompt="ab", completion="")])
    for code, command, words in [
            (2, f"{GENERATE} --prompt a", "--model is missing"),
            (65, f"{GENERATE} --model no/such --prompt a", "no/such"),
            (65, f"{GENERATE} --model ./rum --prompt a", "does not exist; did you mean ./run?"),
            (65, f"{GENERATE} --model run/modle --prompt a", "does not exist; did you mean run/model?"),
            (65, f"{GENERATE} --model text.txt --prompt a", "is a file"),
            (65, f"{GENERATE} --model . --prompt a", "is no model"),
            (2, f"{a} --temperature -1", "--temperature is -1"),
            (2, f"{a} --top-p 0", "--top-p is 0"),
            (2, f"{a} --max-new-tokens 0", "--max-new-tokens"),
            (2, f"{a} --stop ''", "--stop is empty"),
            (2, f"{a} --prompt-file b", "--prompt is one text"),
            (2, f"{a} --top-p 0.5", "--top-p has no effect"),
            (2, f"{a} --top-k 3", "--top-k has no effect"),
            (2, f"{a} --min-p 0.1", "--min-p has no effect"),
            (2, f"{EVAL} --model run --data valid.txt --precision fp8 --fp8-recipe delayed", "fp8.recipe is delayed, whose scales"),
            (2, f"{a} --max-new-token 3", "did you mean --max-new-tokens?"),
            (2, f"{a} --precison bf16", "did you mean --precision?"),
            (2, f"{a} --tokenizer no/such", '--tokenizer "no/such" does not exist'),
            (2, f"{EVAL} --model run --date valid.txt", "did you mean --data?"),
            (2, f"{a} --no-such-flag-at-all", "ndtrain generate --help lists those of the command"),
            (2, f"{a} --cp-size 2", "workers"),
            (2, f"{a} --prompt b", "--prompt is given twice"),
            (2, f"{a} --context 9", "--context is the room of --interactive"),
            (2, f"{GENERATE} --model run --interactive --prompt-file b", "--interactive reads prompts"),
            (2, f"{a} --max_tokens=3", "--max_tokens: new tokens are"),
            (2, f"{a} --do-sample", "--do-sample: a --temperature above 0"),
            (2, f"{a} --batch-size 3", "--batch-size: texts of a replica"),
            (2, f"{a} --lr 3", "--lr: it is about training"),
            (65, f"{GENERATE} --model run --prompt ''", "the prompt is empty"),
            (65, f"{a} --max-new-tokens 200", "max_position_embeddings is 128"),
            (65, f"{a} --chat", "no known chat form"),
            (2, f"{EVAL} --model run", "either files of --data"),
            (2, f"{EVAL} --model run --data valid.txt --requests r.jsonl", "either files of --data"),
            (2, f"{EVAL} --model run --data valid.txt --serve-stdin", "either files of --data"),
            (65, f"{EVAL} --model run --data no/such --sequence-length 64", "does not exist"),
            (65, f"{EVAL} --model run --data prompt.jsonl --long-rows drop", 'prompt.jsonl" has no label that counts'),
            (2, f"{EVAL} --model run --data valid.txt --sequence-length 1000", "max_position_embeddings is 128")]:
        t.run(command, code, words)
    t.run([*t.command(f"{GENERATE} --model run --prompt"), "a\udcff"], 65, "byte 2 is 0xff")
    t.write("kept/config.json", t.read("kept/config.json") + "\n")
    t.run(f"{GENERATE} --model kept --prompt a", 65, "config.json")
    (t.folder / "kept/tokenizer.json").unlink(missing_ok=True)
    t.run(f"{GENERATE} --model kept --prompt a --model-verify false", 65, "--tokenizer")
    t.run(f"{GENERATE} --model kept --prompt a --chat --model-verify false", 65, "--chat needs a tokenizer")
    own = f"{EVAL} --model kept --data valid.txt --sequence-length 64 --model-verify false"
    t.run(own, 65, "a text has no tokens")
    t.write("r.jsonl", [dict(context="a", choices=["b"])])
    t.run(f"{EVAL} --model kept --requests r.jsonl --model-verify false", 65, "a text has no tokens; name one with --tokenizer")
    weights = (t.folder / "kept/model.safetensors").read_bytes()
    head = 8 + int.from_bytes(weights[:8], "little")
    t.write("kept/model.safetensors", weights[:head] + (len(weights) - head) * b"\xff")
    t.run(f"{own} --tokenizer bytes", 70, 'the loss on "valid.txt" is nan')
    t.run(f"{GENERATE} --model run --jsonl", 65, "line 1", given='{"prompt": 1}\n')
    t.run(f"{EVAL} --model run --requests r.jsonl", 65, '"gold" must be')
    t.write("none.jsonl", "\n")
    t.run(f"{EVAL} --model run --requests none.jsonl", 65, '"none.jsonl" has no request')
    t.run(f"{GENERATE} --model run --prompt a --tokenizer {GOLDENS}/llama3.json", 65, (
        "the tokenizer has ids up to 429, but the model's vocab_size is 256; ", "token 1 of the prompt is 421"))


@test
def ndlaunch_says_what_is_wrong(t):
    """It is found before a worker starts: one line, and no screen of a failed job."""
    train(t)
    t.write("bad.jsonl", "{}\n")
    ask, data = "generate --model run --prompt a", "eval --model run --data valid.txt"
    for code, command, words in [
            (0, f"ndtrain check {ask}", "are good"),
            (0, f"ndtrain check {data}", "are good"),
            (65, "ndtrain check generate --model run --prompt-file no/such", "no/such"),
            (65, "ndtrain check eval --model run --data no/such", "does not exist"),
            (65, "ndtrain check eval --model run --requests no/such", "no/such"),
            (2, f"ndtrain check {ask} --num-processes 3 --tp-size 3", "num_attention_heads is 4, which mesh.tp 3 does not divide"),
            (2, f"ndlaunch {ask} --tp-size 3", "each tensor-parallel rank holds an equal part; give --tp-size 1, 2 or 4"),
            (2, f"ndlaunch {ask} --cp-size 2", "is split by tp only"),
            (2, f"ndlaunch {data} --tp-size 3", "--tp-size 1, 2 or 4"),
            (2, "ndlaunch eval --model run --serve-stdin --tp-size 3", "--tp-size 1, 2 or 4"),
            (2, "ndlaunch eval --model run --serve-stdin --num-processes 2", "one request at a time"),
            (2, "ndlaunch generate --model run --interactive --num-processes 2", "continues one text at a time"),
            (2, "ndlaunch bench --layer --model-config model.json --sequence-length 64 --tp-size 3", "--tp-size 1, 2 or 4"),
            (65, "ndlaunch generate --model run --prompt-file no/such", "no/such"),
            (65, f"ndlaunch {ask} --chat", "no known chat form"),
            (65, "ndlaunch generate --model run --prompt ''", "the prompt is empty"),
            (65, "ndlaunch eval --model run --data no/such", "does not exist"),
            (65, "ndlaunch eval --model run --requests no/such", "no/such"),
            (65, "ndlaunch eval --model run --requests bad.jsonl", "bad.jsonl"),
            (2, f"ndlaunch {data} --sequence-length 1000", "max_position_embeddings is 128"),
            (2, "ndlaunch generate --prompt a", "--model is missing"),
            (2, "ndlaunch eval --model run", "either files of --data"),
            (65, "ndlaunch generate --model no/such --prompt a --num-processes 2", "no/such"),
            (2, f"ndlaunch {ask} --max-new-tokens x", "--max-new-tokens")]:
        t.run(command, code, words, "failed first")
    weights = t.folder / "run/model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    t.run(f"ndlaunch {data} --sequence-length 64", 65, "model.safetensors", "failed first")
    t.run(f"{GENERATE} --model run --prompt a", 65, "model.safetensors")
    t.run(f"{GENERATE} --model run --prompt a --max-new-tokens 2 --model-verify false")


@test
def computes_in_fp8(t):
    train(t)
    write_rows(t, 5)
    ask = "--model run --prompt-file rows.jsonl --max-new-tokens 20 --precision fp8"
    t.run(f"{GENERATE} {ask}", says='"index":4,')
    t.run(f"ndlaunch generate {ask} --fp8-recipe rowwise --num-processes 2", says='"index":4,')
    t.run(f"{GENERATE} --model run --prompt a --max-new-tokens 9 --precision fp8 --fp8-recipe delayed", 2, "--fp8-recipe rowwise")


@test
def eval_leaves_out_what_cannot_be_scored(t):
    train(t)
    rows = [dict(context="ab", choices=["ef"], gold=0), dict(context="ab", choices=[""], gold=0)]
    t.write("rows.jsonl", rows)
    t.run(f"{EVAL} --model run --requests rows.jsonl --jsonl")
    check(re.search("1 of 2 requests cannot be scored, and are left out.*line 2", t.log), t.log)
    printed = t.rows()
    check("adds no token" in printed[1]["left_out"] and printed[2]["count"] == printed[2]["left_out"] == 1, printed)
    check(printed[2]["acc"] == printed[2]["acc_norm"] == 1, printed)
    t.write("none.jsonl", rows[1:])
    t.run(f"{EVAL} --model run --requests none.jsonl", 65, "no request can be scored")


@test
def replicas_share_the_requests(t):
    """Those of two waves have the scores of one worker, and so has their mean."""
    train(t)
    write_requests(t)
    ask = "--model run --requests many.jsonl"
    scores = t.run(f"{EVAL} {ask} --jsonl")
    *rows, mean = t.rows()
    for key in "acc", "acc_norm":
        check(abs(mean[key] - sum(row[key] for row in rows) / 40) < 1e-12, (key, mean))
    check(mean["acc"] != mean["acc_norm"], mean)
    check(t.run(f"{LAUNCH_EVAL} {ask} --jsonl --num-processes 2 --threads-per-worker 2") == scores and 0 < mean["acc_norm"] < 1, t.out)
    t.run(f"{EVAL} {ask}", says=f"many.jsonl: acc {mean['acc']:.6f}, acc_norm {mean['acc_norm']:.6f}, 40 requests\n")


@test
def results_that_cannot_be_written_end_a_job(t):
    train(t)
    for words in LAUNCH, LAUNCH_EVAL.replace("eval", "eval --data valid.txt"):
        words = f"{words} --model run --num-processes 2 --tp-size 2"
        words += " --prompt ab --max-new-tokens 3" if words.startswith(LAUNCH) else ""
        t.run(t.in_shell('exec "$@" >/dev/full', words), 73, "standard output cannot be written: No space left")


@test
def two_hundred_and_fifty_six_tokens_need_not_be_bytes(t):
    train(t)
    tokenizer = json.loads(t.read("run/model/tokenizer.json"))
    vocab = tokenizer["model"]["vocab"]
    ids = {token: (id * 3 + 1) % 256 for token, id in vocab.items()}
    tokenizer["model"]["vocab"] = ids
    t.write("other/tokenizer.json", json.dumps(tokenizer))
    ask = f"{EVAL} --model run --data valid.txt --sequence-length 32 --set data.cache_dir=cache --append-eod false"
    plain = t.run(ask)
    check(t.run(f"{ask} --tokenizer run/model") == plain, t.out)
    check(t.run(f"{ask} --tokenizer other") != plain, t.out)


@test
def eval_serves_requests(t):
    """Line after line, each answered before the next is written, with the scores of a file; a context that is used again is not computed
    again."""
    train(t)
    rows = t.write("rows.jsonl", '{"context": "ab cd ", "choices": ["ef", "xyzzy"], "gold": 1}\n'
                                 '{"context": "ab cd ", "choices": ["q"], "gold": 0}\n')
    expected = t.run(f"{EVAL} --model run --requests rows.jsonl --jsonl").splitlines()[:2]
    check(t.run(f"{EVAL} --model run --serve-stdin", given=rows).splitlines() == expected, t.out)
    t.run(f"{LAUNCH_EVAL} --model run --serve-stdin --num-processes 2 --tp-size 2", given=rows)
    check(t.out.count("\n") == 2, t.out)
    t.run(f"{EVAL} --model run --serve-stdin", given='{"choices": ["b"]}\n{"context": "a", "choices": ["b"]}\n\n7\n',
          says=('{"error":"a row is an object with ', '(while reading standard input, line 1)"}\n',
                '{"index":0,"log_likelihoods":[-', 'line 3: the line is empty"}\n', '(while reading standard input, line 4)"}\n'))
    # With less room the last tokens are scored.
    scores = []
    for flags, context in ("--context 5", "wxyzab cd"), ("--context 5", "ab cd"), ("", "ab cd"), ("", "zab cd"):
        t.run(f"{EVAL} --model run --serve-stdin {flags}", given=json.dumps(dict(context=context, choices=["e"])))
        scores += [row["log_likelihoods"] for row in t.rows()]
    check(scores[0] == scores[1] == scores[2] != scores[3], scores)


@test
def reads_line_after_line(t):
    """A bad line is reported, and the next one is read; each line draws numbers of its own."""
    train(t)
    expected = "".join(t.run(f"{GENERATE} --model run --prompt '{prompt}' --max-new-tokens 9") for prompt in ("ab cd", "x"))
    lines = f"{GENERATE} --model run --interactive"
    check(t.run(f"{lines} --max-new-tokens 9", given=b"ab cd\n\n\xff\nx", says="byte 1 is 0xff") == expected, t.out)
    t.run(f"{LAUNCH} --model run --interactive --max-new-tokens 9 --num-processes 2 --tp-size 2", given="ab cd\nx\n")
    check(t.out == expected, t.out)
    draw = "--max-new-tokens 9 --jsonl --temperature 2 --seed 3"
    drawn = [row["ids"] for row in map(json.loads, t.run(f"{lines} {draw}", given=2 * '{"prompt": "x"}\n').splitlines())]
    t.run(f"{GENERATE} --model run {draw}", given=2 * '{"prompt": "x"}\n')
    check(drawn[0] != drawn[1] and drawn == [row["ids"] for row in t.rows()], (drawn, t.out))
    # Its threads spin longer than those of one of several workers.
    process = t.start(lines, stdin=subprocess.PIPE)
    with open(f"/proc/{process.pid}/environ", "rb"):
        t.until(lambda: b"GOMP_SPINCOUNT=20000" in open(f"/proc/{process.pid}/environ", "rb").read().split(b"\0"))
    process.stdin.close()
    check(process.wait(steps.LIMIT_S) == 0, t.read("log"))
    # Several that wait for a line end together.
    process = t.start(f"{LAUNCH} --model run --interactive --max-new-tokens 1 --num-processes 2 --tp-size 2", stdin=subprocess.PIPE,
                      stdout=open(t.folder / "text", "wb"))
    process.stdin.write(b"ab cd\n")
    process.stdin.flush()
    t.until(lambda: "\n" in t.read("text"), process)
    process.terminate()
    t.ended(process, 75, "stopped by a signal while it waited for input")
    t.run(f"{lines} --context 20", says="--context is 20; shorten the prompt", given="a\n")
    t.run(f"{lines} --prompt a", 2, "--interactive reads prompts")


@test
def new_tokens_fit_the_model_unless_they_are_asked_for(t):
    """A number of new tokens that nobody asked for is what the model has room for; one that was asked for must fit."""
    train(t)
    t.run(f"{GENERATE} --model run --prompt 'ab cd' --jsonl --ignore-eos",
          says='"finish":"length","prompt_tokens":5,"new_tokens":123,')
    t.run(f"{GENERATE} --model run --prompt 'ab cd' --max-new-tokens 124", 65, "prompt and new tokens need 5 + 124 positions")
    t.run(f"{GENERATE} --model run --jsonl", 65, "need 2 + 127 positions", given='{"prompt": "ab", "max_new_tokens": 127}\n')


@test
def text_comes_while_it_is_made(t):
    """What follows a signal is not printed. Otherwise all 90,000 tokens of this text would stand in the pipe before its reader sends the
    signal."""
    t.model(max_position_embeddings=100000)
    train(t)
    process = t.start(f"{GENERATE} --model run --prompt a --max-new-tokens 90000 --ignore-eos", stdout=subprocess.PIPE)
    seen = process.stdout.read(20)
    process.terminate()
    seen += process.stdout.read()
    check(process.wait(steps.LIMIT_S) != 0 and 20 <= len(seen) < 60000, len(seen))


@test
def a_chat_is_written_in_its_form(t):
    """--chat makes of a prompt the turns of the form, with the control tokens of the tokenizer."""
    tokenizer = (GOLDENS / "qwen2.json").read_text()
    t.write("tok/tokenizer.json", tokenizer.replace("<|begin|>", "<|im_start|>").replace("<|eot|>", "<|im_end|>"))
    t.write("tok/tokenizer_config.json", json.dumps(dict(eos_token="<|im_end|>")))
    t.model(vocab_size=512, initializer_range=0.3)  # each token of a prompt counts
    t.run(f"{TRAIN} --model-config model.json --set data.tokenizer=tok/tokenizer.json --set data.cache_dir=cache --num-steps 2 "
          "--checkpoint-frequency 1 --output-dir run --chat-format chatml --sample-prompt 'hi you' --sample-tokens 9")
    t.run(f"{GENERATE} --model run --jsonl --chat --prompt 'hi you' --max-new-tokens 9")
    check(t.metrics("run", key="text") == [t.rows()[0]["text"]], (t.metrics("run"), t.out))  # a sample of the run
    ask, chat = f"{GENERATE} --model run --jsonl --max-new-tokens 9 --ignore-eos", f"{GENERATE} --model run --chat --prompt 'hi you'"
    t.write("rows.jsonl", [dict(prompt="<|im_start|>user\nhi you<|im_end|>\n<|im_start|>assistant\n")])
    plain = t.run(f"{ask} --prompt-file rows.jsonl")
    check(t.run(f"{ask} --chat --prompt 'hi you'", says="chat form: chatml") == plain, t.out)
    t.write("rows.jsonl", [dict(messages=[dict(role="user", content="hi you")])])
    check(t.run(f"{ask} --prompt-file rows.jsonl", says="chat form: chatml") == plain, t.out)
    check(t.run(f"{ask} --prompt-file rows.jsonl --chat-format chatml", says="chat form: chatml") == plain, t.out)
    later = '{"prompt": "x"}\n{"messages": [{"role": "user", "content": "hi you"}]}\n'
    check(t.run(ask, given=later).splitlines()[1] == plain.replace('"index":0', '"index":1').strip(), t.out)
    t.run(f"{ask} --prompt-file rows.jsonl --chat-format llama3", 65, "has no token <|begin_of_text|>, which this data.chat_format needs")
    for text, says, never in ("<|begin|>a", "begins with the beginning of text twice", "\0"), ("a", (), "twice"):
        t.run(f"{ask} --prompt '{text}' --tokenizer {GOLDENS}/llama3.json", says=says, never=never)
    t.run(f"{ask} --prompt-file rows.jsonl")
    # A later line of a conversation has the earlier ones, and their answers, before it.
    messages = [dict(role="user", content="hi you"), dict(role="assistant", content=t.rows()[0]["text"]), dict(role="user", content="and I")]
    t.write("rows.jsonl", [dict(messages=messages[begin:end]) for begin, end in ((0, 1), (0, 3), (2, 3))])
    t.run(f"{ask} --prompt-file rows.jsonl")
    first, second, alone = (row["text"] for row in t.rows())
    prompt = t.rows()[0]["prompt_tokens"]
    t.run(f"{GENERATE} --model run --chat --interactive --max-new-tokens 9 --ignore-eos", given="hi you\nand I\n")
    check(t.out == f"{first}\n{second}\n" and second != alone, (first, second, alone, t.out))
    # An empty answer is a turn as well.
    messages[1]["content"] = ""
    t.write("rows.jsonl", [dict(messages=messages)])
    cut = f"--stop '{first[0]}'"
    t.run(f"{ask} --prompt-file rows.jsonl {cut}")
    after = t.rows()[0]["text"]
    t.run(f"{GENERATE} --model run --chat --interactive --max-new-tokens 9 --ignore-eos {cut}", given="hi you\nand I\n")
    check(t.out == f"\n{after}\n", (after, t.out))
    # One with no room for another message begins anew.
    t.run(f"{GENERATE} --model run --chat --interactive --max-new-tokens 9 --ignore-eos --context {prompt + 9}",
          given="hi you\nand I\nhi you\n", says="the conversation begins anew")
    check(t.out == f"{first}\n{first}\n", (first, t.out))
    check(re.search('"eos_token_id": [0-9]', t.read("run/model/config.json")), "an end of text")
    (t.folder / "run/model").rename(t.folder / "elsewhere")  # a run that has not ended: its tokenizer is where it was
    t.run(f"{chat} --max-new-tokens 9", says="chat form: chatml")
    (t.folder / "tok").rename(t.folder / "lost")
    t.run(chat, 2, 'the run\'s tokenizer "tok/tokenizer.json" is not found from here')
    t.write("tok/tokenizer.json", t.read("lost/tokenizer.json") + "\n")
    t.run(chat, 65, "is not the tokenizer that the run of this checkpoint had (digest ")
    t.run(f"{chat} --max-new-tokens 9 --tokenizer lost")


@test
def a_checkpoint_has_the_tokenizer_of_its_run(t):
    """Not that of the model that the run began with."""
    tokenizer = json.loads((GOLDENS / "qwen2.json").read_text())
    t.write("base/tokenizer.json", json.dumps(tokenizer))
    t.model("base.json", vocab_size=512, initializer_range=0.3)
    flags = "--set data.cache_dir=cache --num-steps 1 --checkpoint-frequency 1 --append-eod false"
    t.run(f"{TRAIN} --model-config base.json --tokenizer base {flags} --output-dir first")
    (t.folder / "first/model").rename(t.folder / "began")
    tokenizer["model"]["merges"] = []
    t.write("own/tokenizer.json", json.dumps(tokenizer))
    t.run(f"{TRAIN} --model-path began --tokenizer own {flags} --output-dir run")
    ask = f"{GENERATE} --model run --jsonl --prompt 'and the hi you' --max-new-tokens 3"
    saved = t.run(ask)
    other = t.run(f"{ask} --tokenizer began")
    (t.folder / "run/model").rename(t.folder / "elsewhere")
    check(t.run(ask) == saved and saved != other, (saved, other, t.out))
    t.write("own/tokenizer.json", json.dumps(tokenizer) + "\n")
    t.run(ask, 65, "is not the tokenizer that the run of this checkpoint had (digest ")


@test
def a_checkpoint_has_the_tokenizer_of_the_model_that_it_began_with(t):
    """The one beside model.config, in the cache by its name, or in a GGUF file; data.tokenizer is model."""
    flags = "--set data.cache_dir=cache --num-steps 1 --checkpoint-frequency 1 --tokenizer model --save-model"
    tokenizer = json.loads((GOLDENS / "qwen2.json").read_text())
    for token in tokenizer["added_tokens"]:  # as GGUF files have them
        token.update(single_word=False, lstrip=False, rstrip=False, normalized=False)
    t.write("tok/tokenizer.json", json.dumps(tokenizer))
    t.write("tok/tokenizer_config.json", json.dumps(dict(eos_token="<|eot|>")))
    t.model("tok/own.json", vocab_size=512, eos_token_id=0)
    t.run(f"{TRAIN} --model-config tok/own.json {flags} true --output-dir of-config")
    shutil.move(t.folder / "of-config/model", t.folder / "hub/models--ab--cd/snapshots/0123")
    t.run("ndtrain export hub/models--ab--cd/snapshots/0123 --gguf m.gguf")
    places = dict(XDG_CACHE_HOME=str(t.folder), HF_HUB_CACHE=str(t.folder / "hub"))
    t.run(f"{TRAIN} --model-name ab/cd {flags} false --output-dir of-name", **places)
    t.run(f"{TRAIN} --model-path m.gguf {flags} false --output-dir of-file", **places)
    for run in "of-config", "of-name", "of-file":
        ask = f"{GENERATE} --model {run}/checkpoint-1 --prompt 'ab cd' --max-new-tokens 9"
        check(t.run(ask, **places) == t.run(f"{ask} --tokenizer tok"), run)
    shutil.move(t.folder / "tok", t.folder / "lost")
    t.run(f"{GENERATE} --model of-config/checkpoint-1 --prompt a", 2, 'the run\'s tokenizer "tok" is not found from here')


@test
def the_end_of_text_of_a_run_is_that_of_its_model(t):
    """The end of text that a run appends ends what its model generates, unless config.json names one: in the saved model and in the
    checkpoint."""
    t.write("tok/tokenizer.json", (GOLDENS / "qwen2.json").read_text())
    t.write("tok/tokenizer_config.json", json.dumps(dict(eos_token="<|eot|>")))  # 420
    for end, flags, saved in ((2, "", 2), (None, "", 420), (..., "--set data.append_eod=false", 2), (..., "", 420)):
        shutil.rmtree(t.folder / "run", ignore_errors=True)
        t.model("own.json", vocab_size=512, eos_token_id=end)
        t.run(f"{TRAIN} --model-config own.json --set data.tokenizer=tok --set data.cache_dir=cache --num-steps 2 "
              f"--checkpoint-frequency 2 --output-dir run {flags}")
        check(f'"eos_token_id": {saved},' in t.read("run/model/config.json"), (end, flags, saved))
    t.run("ndtrain export run/checkpoint-2 out")
    check('"eos_token_id": 420,' in t.read("out/config.json"), "the exported model")
    t.same("out/model.safetensors", "run/model/model.safetensors")  # in the run's type


@test
def an_end_token_that_comes_first_is_told(t):
    """A text that is empty since the model ended at once is no fault."""
    train(t)
    shutil.copytree(t.folder / "run/model", t.folder / "all")
    t.write("all/generation_config.json", json.dumps(dict(eos_token_id=list(range(256)))))
    t.run(f"{GENERATE} --model all --prompt 'ab cd'", says="1 of 1 texts are empty, as the model's end token came first", never="--chat")
    t.run(f"{GENERATE} --model all --prompt 'ab cd' --jsonl", says='"text":"","finish":"eos","prompt_tokens":5,"new_tokens":1,')
    t.run(f"{GENERATE} --model all --prompt 'ab cd' --ignore-eos --max-new-tokens 2", never="are empty")
    # A checkpoint has the end tokens of the model that its run began with, or of the one that it has saved.
    t.run(f"{TRAIN} --model-path all --num-steps 1 --checkpoint-interval 1 --output-dir two --sample-prompt 'ab cd'",
          says='sample after step 1: "ab cd" goes on ""\n')
    shutil.move(t.folder / "two/model", t.folder / "saved")
    t.run(f"{GENERATE} --model two/checkpoint-1 --prompt 'ab cd'", says="texts are empty")
    shutil.move(t.folder / "all", t.folder / "lost")
    t.run(f"{GENERATE} --model two/checkpoint-1 --prompt 'ab cd'", never="are empty")
    shutil.move(t.folder / "saved", t.folder / "two/model")
    t.run(f"{GENERATE} --model two/checkpoint-1 --prompt 'ab cd'", says="texts are empty")


@test
def ndlaunch_starts_its_workers(t):
    """It passes on the command's own flags, standard input, and a failure's code."""
    train(t)
    text = t.run(f"{GENERATE} --model run --prompt 'ab cd' --max-new-tokens 9")
    t.run("ndlaunch generate --model=run --max_new_tokens 9 --precision fp32 --num-processes 2 --tp-size 2 --max-restarts 1 --save-steps 5",
          given="ab cd\n", says="launch.max_restarts has no effect: generate")
    check(t.out == text, t.out)
    loss = t.run(f"{EVAL} --model run --data valid.txt --sequence-length 64")
    t.run(f"{LAUNCH_EVAL} --model run --data valid.txt --sequence-length 64 --num-processes 2 --dp-shard-size 1 --tp-size 2")
    check(t.out[:20] == loss[:20], t.out)  # "valid.txt: loss 5.54"
    t.run("ndlaunch generate --model run --prompt a --top-p 2 --num-processes 2", 2, "--top-p is 2", "failed first")
    t.run("ndlaunch generate --help", says=("usage: ndtrain generate", "--max-new-tokens N"))


@test
def the_last_line_has_only_what_was_measured(t):
    """The speed of what no call was measured for is not said."""
    train(t)
    t.run(f"{GENERATE} --model run --prompt a --max-new-tokens 4 --ignore-eos",
          says=(": 4 new tokens, ", " a second while no prompt was computed; 1 prompt token; 4 calls\n"))
    t.run(f"{GENERATE} --model run --prompt 'ab cd' --max-new-tokens 1", says=(": 1 new token; 5 prompt tokens, ", " a second; 1 call\n"))
    # What was measured is within the whole: the tokens by their speed take no longer.
    t.run(f"{GENERATE} --model run --prompt '{60 * 'a'}' --max-new-tokens 60 --ignore-eos")
    words = re.search(r"in (\S+) s: 60 new tokens, (\S+) a second .*; 60 prompt tokens, (\S+) a second", t.log)
    whole, new, prompt = map(float, words.groups())
    check(59 / new + 60 / prompt <= whole + 0.006, t.log)


@test
def the_last_line_counts_all_replicas(t):
    """Replicas share the texts, and the last line counts what all have done: what one worker does."""
    train(t)
    write_rows(t, 21)  # with i % 13 + 1 tokens each: 91 + 36
    ask = "--model run/model --prompt-file rows.jsonl --max-new-tokens 5 --ignore-eos"
    counts = ("21 texts in ", ": 105 new tokens, ", "; 127 prompt tokens, ")
    text = t.run(f"{GENERATE} {ask}", says=counts)
    for mesh in "--num-processes 2", "--num-processes 4 --tp-size 2":
        check(t.run(f"{LAUNCH} {ask} --max-batch 2 {mesh}", says=counts) == text, mesh)


@test
def eval_ends_within_a_call_of_the_model(t):
    """A block that takes minutes ends soon after a signal, on one worker and on several."""
    t.write("long.txt", 7 * t.read("text.txt"))
    t.model(max_position_embeddings=200000)
    train(t)
    for program, number in (("ndtrain eval", signal.SIGTERM), ("ndlaunch eval --num-processes 2 --tp-size 2", signal.SIGINT)):
        begin = time.monotonic()
        process = t.start(f"{program} --precision fp32 --model run --data long.txt --sequence-length 131072 --threads-per-worker 1",
                          stdout=subprocess.PIPE)
        t.until(lambda: "blocks of" in t.read("log"), process)
        time.sleep(0.1)
        process.send_signal(number)
        printed = process.communicate(timeout=steps.LIMIT_S)[0]
        check(process.returncode == 75 and not printed and "stopped by a signal" in t.read("log"), t.read("log"))
        check(time.monotonic() - begin < steps.PATIENCE_S, program)


@test
def ends_behind_the_row_that_it_prints(t):
    """The reader takes one byte, sends the signal, and the rest of the long row after the time in which a worker ends: the row is whole,
    since its end is waited for."""
    train(t)
    t.write("long.jsonl", [dict(ids=[97], id=300000 * "x")])
    process = t.start(f"{GENERATE} --model run --jsonl --prompt-file long.jsonl --max-new-tokens 1", stdout=subprocess.PIPE, bufsize=0)
    row = process.stdout.read(1)
    process.terminate()
    time.sleep(1.2)
    while part := process.stdout.read(1 << 20):
        row += part
    check(process.wait(steps.LIMIT_S) == 75 and t.read("log").endswith("stopped by a signal\n"), t.read("log"))
    check(row.count(b"\n") == 1 and len(row) > 300000, len(row))


def handles_term(process):
    caught = re.search("SigCgt:\t([0-9a-f]+)", open(f"/proc/{process.pid}/status", encoding="ascii").read())
    return int(caught[1], 16) >> (signal.SIGTERM - 1) & 1


@test
def a_stop_ends_all_replicas(t):
    """Two replicas as torchrun starts them, to which a signal comes once something holds. Replica 0 has little to do and waits for
    replica 1."""
    t.model(max_position_embeddings=200000)
    train(t)
    own = "--model run --num-processes 2 --threads-per-worker 1"
    t.write("rows.jsonl", [dict(ids=[97], max_new_tokens=1)] * 9 + [dict(ids=[98], max_new_tokens=60000)])
    contexts = [(f"{i}" + 500 * " abcdefg")[:4000] if i % 2 else "ab" for i in range(600)]
    t.write("choices.jsonl", [dict(context=context, choices=["c"], gold=0) for context in contexts])
    for words, holds, more, fact in (
            (f"{GENERATE} {own} --prompt-file rows.jsonl --jsonl --max-batch 1 --ignore-eos",
             lambda ranks: t.read("out0").count("\n") == 8, 0.1,  # the first wave; long is the second one
             "stopped by a signal; 8 of 10 texts are complete"),
            (f"{EVAL} {own} --requests choices.jsonl", lambda ranks: all(map(handles_term, ranks)), 1, "stopped by a signal")):
        ranks = t.ranks(words)
        t.until(lambda: holds(ranks), ranks[0]) # pylint: disable=cell-var-from-loop
        time.sleep(more)
        for rank in ranks:
            rank.terminate()
        t.wait(ranks, 75)
        for log in t.read("log0"), t.read("log1"):
            check(fact in log, log)


def write_ids(t, name):
    """A text as a file of ids: the bytes of its text are those that the tokenizer makes of them."""
    ids = t.read(f"{name}.txt").encode()
    t.write(f"{name}.bin", struct.pack("<256I", 20240801, 7, len(ids), *[0] * 253) + struct.pack(f"<{len(ids)}I", *ids))


@test
def eval_has_the_loss_of_the_validation(t):
    """The same code and the same order of sums."""
    train(t)
    step = [json.loads(line) for line in t.read("run/metrics.jsonl").splitlines() if "validation_loss" in line][-1]
    loss = step["validation_loss"]

    def agrees(bits=True, rows=1, **more):
        for row in t.rows()[:rows]:
            wanted = dict(loss=loss, **more) | (dict(bits_per_byte=loss / math.log(2)) if bits else {})
            for key, value in wanted.items():
                check(abs(row[key] - value) <= 1e-5 * value if key == "perplexity" else abs(row[key] - value) <= 1e-6 * value, (key, row))

    one = f"{EVAL} --model run/model --jsonl --sequence-length 64"
    t.run(f"{one} --data valid.txt --data text.txt", says='"data":"text.txt"')
    agrees(perplexity=math.exp(loss))
    check(t.rows()[0]["tokens"] == step["validation_tokens"], t.out)
    t.run(f"{EVAL} --model run --data valid.txt --jsonl", says="of 64 tokens")
    agrees()
    t.run(f"{LAUNCH_EVAL} --model run/checkpoint-8 --data valid.txt --jsonl", says="as long as those of the model")
    agrees()
    write_ids(t, "valid")
    write_ids(t, "text")
    t.run(f"{one} --data valid.bin")
    agrees()
    # Each rank counts the bytes of its blocks, of which text.bin has more than a rank counts at once.
    t.run(f"{LAUNCH_EVAL} --model run/model --data valid.bin --data valid.txt --data text.bin --sequence-length 64 --num-processes 2 --jsonl",
          says='"data":"valid.txt"')
    for row in t.rows():
        check(abs(row["bits_per_byte"] - row["loss"] / math.log(2)) <= 1e-12 * row["loss"], row)
    # Folders and patterns, as data.path takes them.
    for name, folder in ("valid.txt", "texts"), ("valid.bin", "ids"):
        t.write(f"{folder}/{name}", (t.folder / name).read_bytes())
    t.run(f"{one} --data texts --data ids --data 'ids/*.bin'")
    agrees(rows=3)
    lines = [re.sub('"data":"[^"]*"', "", line) for line in t.out.splitlines()]
    check(len(lines) == 3 and len(set(lines)) == 1, t.out)
    t.run("ndtrain tokenize --tokenizer run/model --input valid.txt --output-prefix pair")
    t.run(f"{EVAL} --model run/model --data pair --tokenizer file --jsonl", never="bits_per_byte")
    agrees(bits=False)
    row = json.loads(t.run(f"{EVAL} --model run/checkpoint-8 --data valid.txt --sequence-length 64 --jsonl"))
    check(t.run(f"{EVAL} --model run/checkpoint-8 --data valid.txt --sequence-length 64") == (
        f"valid.txt: loss {row['loss']:.6f}, perplexity {row['perplexity']:.6g}, {row['bits_per_byte']:.6f} bits per byte, "
        f"{row['tokens']} tokens\n"), (row, t.out))


@test
def bits_per_byte_are_those_of_what_counts(t):
    """Of rows with prompts these are the completions, whose tokens have several bytes. An end of text has none."""
    t.write("tok/tokenizer.json", (GOLDENS / "qwen2.json").read_text())
    t.write("tok/tokenizer_config.json", json.dumps(dict(eos_token="<|eot|>")))
    t.model(vocab_size=512)
    t.run(f"{TRAIN} --model-config model.json --set data.tokenizer=tok --set data.cache_dir=cache --num-steps 2 --output-dir run")
    rows = [dict(prompt=f"what is row {i}?", completion=f" it's the {i * i % 97}th\n") for i in range(50)]
    t.write("rows.jsonl", rows)
    t.run(f"{EVAL} --model run/model --data rows.jsonl --cache-dir cache --jsonl")
    size, row = sum(len(row["completion"]) for row in rows), t.rows()[0]
    check(row["tokens"] < size and abs(row["bits_per_byte"] * size * math.log(2) / row["tokens"] / row["loss"] - 1) < 1e-9, row)


@test
def a_validation_changes_nothing(t):
    """Weights, moments, FP8 histories and the order of the data are those of a run without."""
    for flags in "with --set train.validation_interval=2", "without --validation-path ''":
        t.run(f"{TRAIN} --model-config model.json --precision fp8 --fp8-recipe delayed --num-steps 4 --checkpoint-interval 3 "
              f"--output-dir {flags}")
    check(t.read("with/metrics.jsonl").count("validation_loss") >= 2, "validations")
    losses = [re.findall('"loss":[^,]*', t.read(f"{run}/metrics.jsonl")) for run in ("with", "without")]
    check(len(losses[0]) == 4 and losses[0] == losses[1], losses)
    files = [path.relative_to(t.folder / "with") for part in ("model", "checkpoint-3/state")
             for path in (t.folder / "with" / part).glob("*.safetensors")]
    for name in files:
        t.same(f"with/{name}", f"without/{name}")
    check(len(files) >= 2, files)


def write_requests(t):
    """40 requests of three choices, on contexts of up to 100 letters."""
    return t.write("many.jsonl", [
        dict(context="".join(chr(97 + (i * 5 + k * k // 3) % 26) for k in range(5 + i * 95 // 39)),
             choices=[chr(97 + i % 26), chr(97 + i % 7) + "q", chr(122 - i % 11) + "a"], gold=0) for i in range(40)])


# Three models: grouped heads; tied embeddings and an odd vocabulary; another head size.
MODELS = [dict(rope_theta=10000.0, rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                                     original_max_position_embeddings=64)),
          dict(vocab_size=331, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_key_value_heads=4, tie_word_embeddings=True),
          dict(vocab_size=300, intermediate_size=128, num_key_value_heads=1, head_dim=32)]


@test
def has_the_ids_and_scores_of_transformers(t):
    python = t.python("torch transformers")
    write_rows(t, 50)
    write_requests(t)
    t.write("requests.jsonl", [dict(context="ab cd ", choices=["ef", "xyzzy", "q"], gold=1),
                               dict(context="a", delimiter=" ", choices=["b c", "bb"], gold=0),
                               dict(context="the", choices=["m", "mm", "mmm", "n"], gold=3)])
    t.write("tokens.bin", struct.pack("<4352I", 20240801, 7, 4096, *[0] * 253, *[k * k // 3 % 300 for k in range(4096)]))
    compared = []
    for i, model in enumerate(MODELS):
        t.model(max_position_embeddings=512, **model)
        # Ids of the larger vocabularies come from no text: the weights are fresh.
        fresh = "--data-path tokens.bin --validation-path '' --set data.tokenizer=file" if i else ""
        t.run(f"{TRAIN} --model-config model.json --num-steps {1 if i else 8} --output-dir run{i} {fresh}")
        t.write(f"results{i}.jsonl", t.run(f"{GENERATE} --model run{i}/model --prompt-file rows.jsonl --jsonl --ignore-eos "
                                           "--max-new-tokens 24 --max-batch 16"))
        compared += ["greedy", f"run{i}/model", "rows.jsonl", f"results{i}.jsonl"]
    t.write("scores.jsonl", t.run(f"{EVAL} --model run0/model --requests requests.jsonl --jsonl"))
    t.write("many_scores.jsonl", t.run("ndtrain eval --precision bf16 --threads-per-worker 2 --model run0/model --requests many.jsonl "
                                       "--jsonl"))
    t.run([python, SOURCE / "scripts/check_generate.py", *compared, "choices", "run0/model", "requests.jsonl", "scores.jsonl", "bf16",
           "run0/model", "many.jsonl", "many_scores.jsonl"], OMP_NUM_THREADS="1",
          says=("50 prompts, 1200 ids equal to those of transformers", "3 requests scored as by transformers",
                "120 log-likelihoods in BF16 are off by ", " of the bound of their roundings"))


@test
def has_the_scores_of_lm_eval(t):
    """Its own scores of the same rows, and ours through its interface for models."""
    python = t.python("torch transformers lm_eval")
    train(t)
    t.write("few.jsonl", "".join(write_requests(t).splitlines(keepends=True)[:12]))
    t.write("scores.jsonl", t.run(f"{EVAL} --model run/model --requests few.jsonl --jsonl"))
    t.run([python, SOURCE / "scripts/check_lm_eval.py", "run/model", "few.jsonl", "scores.jsonl", t.build / "ndtrain"],
          OMP_NUM_THREADS="1", says="12 rows have the scores of lm_eval")


steps.main("generate", setup)
