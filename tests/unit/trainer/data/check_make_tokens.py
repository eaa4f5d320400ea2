# SPDX-License-Identifier: Apache-2.0
"""scripts/make_tokens.py against the tokenizer itself, read back by our reader: check_make_tokens.py SCRIPT DATASET_TOOL."""
import importlib.util
import json
import os
import subprocess
import sys
import tempfile

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SCRIPT, TOOL = sys.argv[1:3]
TEXT = "".join(f"Line {i} of a text:\twords, {i * 7919 % 1000} numbers, caf\u00e9.\n" + "\n" * (i % 4 == 0)
               for i in range(30000))


def train(path, vocab):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([TEXT[:20000]], trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(path)
    return tokenizer


def run(*arguments, fails=None, environment={}):
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True,
                          env={**os.environ, **environment})
    if fails is None:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode != 0 and fails in done.stderr, done.stderr


def read(path, vocab):
    done = subprocess.run([TOOL, path, str(vocab)], capture_output=True, text=True, check=True)
    words = done.stdout.split()
    return words[0], int(words[1]), [int(w) for w in words[2:]]


def compare(path, vocab, kind, expected):
    found, count, ids = read(path, vocab)
    assert (found, count) == (kind, len(expected)), (found, count, len(expected))
    assert ids == expected[:len(expected) // 2 * 2]


def compare_transformers(here, tokenizer, whole, texts):
    """The same tokenizer as a folder, for transformers' AutoTokenizer."""
    if not importlib.util.find_spec("transformers"):
        print(f"skipped: {sys.executable} has no transformers; set ND_PEER_PYTHON to one that has")
        return
    from transformers import PreTrainedTokenizerFast
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(here("folder"))
    run("--tokenizer", here("folder"), "--output", here("ft"), "--append-eos", here("a.txt"))
    compare(here("ft"), 600, "megatron", whole + [1])
    run("--tokenizer", here("folder"), "--output", here("fj"), "--no-special-tokens", here("a.jsonl"))
    compare(here("fj"), 600, "megatron",
            [i for t in texts for i in tokenizer.encode(t, add_special_tokens=False).ids])
    run("--tokenizer", here("none"), "--output", here("x"), here("a.txt"), fails="no tokenizer " + here("none"))


with tempfile.TemporaryDirectory() as top:
    here = lambda name: os.path.join(top, name)
    tokenizer = train(here("tokenizer.json"), 600)
    with open(here("a.txt"), "w", encoding="utf-8", newline="") as file:
        file.write(TEXT)
    rows = ["first", "", "second \u20ac\n\nrow", "x" * 5000] + [f"row {i}" for i in range(700)]
    with open(here("a.jsonl"), "w", encoding="utf-8") as file:
        file.write("\n".join(json.dumps({"text": r, "n": 1}) for r in rows) + "\n\n")

    # Text in pieces of a megabyte gives the ids of the whole.
    assert len(TEXT) > 1 << 20
    whole = tokenizer.encode(TEXT).ids
    run("--tokenizer", here("tokenizer.json"), "--output", here("t"), "--piece-mb", "1", here("a.txt"))
    compare(here("t"), 600, "megatron", whole)
    run("--tokenizer", here("tokenizer.json"), "--output", here("l"), "--format", "llmc", "--append-eos", here("a.txt"))
    compare(here("l.bin"), 600, "llmc", whole + [1])

    documents = [tokenizer.encode(r).ids for r in rows]
    run("--tokenizer", here("tokenizer.json"), "--output", here("j"), "--append-eos", here("a.jsonl"))
    compare(here("j"), 600, "megatron", [i for d in documents for i in d + [1]])
    bare = [i for r in rows for i in tokenizer.encode(r, add_special_tokens=False).ids]
    run("--tokenizer", here("tokenizer.json"), "--output", here("b"), "--no-special-tokens", here("a.jsonl"))
    compare(here("b"), 600, "megatron", bare)

    compare_transformers(here, tokenizer, whole, rows)

    # Why a package cannot be imported is said, also when it is there.
    os.makedirs(here("broken/transformers"))
    with open(here("broken/transformers/__init__.py"), "w", encoding="utf-8") as file:
        file.write('raise ImportError("a library of it is missing")\n')
    run("--tokenizer", here("none"), "--output", here("x"), here("a.txt"), fails="a library of it is missing",
        environment={"PYTHONPATH": here("broken")})

    # Ids beyond 16 bits: 70,000 added tokens, of which the last is used.
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(70000)])
    tokenizer.save(here("large.json"))
    with open(here("b.txt"), "w", encoding="utf-8") as file:
        file.write("a <extra_69999> b")
    for kind, suffix in (("megatron", ""), ("llmc", ".bin")):
        run("--tokenizer", here("large.json"), "--output", here(kind), "--format", kind, here("b.txt"))
        compare(here(kind + suffix), 70600, kind, tokenizer.encode("a <extra_69999> b").ids)

    # Mistakes leave nothing behind.
    with open(here("p.jsonl"), "w", encoding="utf-8") as file:
        file.write('{"text": "a"}\n{"prompt": "q", "completion": "r"}\n')
    run("--tokenizer", here("tokenizer.json"), "--output", here("p"), here("p.jsonl"), fails="line 2 has no string")
    run("--tokenizer", here("tokenizer.json"), "--output", here("p"), here("none.txt"), fails="is not a file")
    run("--tokenizer", here("p.jsonl"), "--output", here("p"), here("a.txt"), fails="is no tokenizer.json")
    assert not [name for name in os.listdir(top) if name.startswith("p.") and name != "p.jsonl"]
    assert not [name for name in os.listdir(top) if name.endswith(".tmp")]
print("check_make_tokens: every id as the tokenizer gives it")
