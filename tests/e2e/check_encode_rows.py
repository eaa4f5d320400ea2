# SPDX-License-Identifier: Apache-2.0
"""scripts/encode_rows.py and the writer of token files: check_encode_rows.py SCRIPTS NDTRAIN DATASET_TOOL.

Files are read back by the program's own reader, and compared byte for byte with those that ndtrain tokenize writes of the
same rows. What this Python lacks a package for is skipped. Run through check_encode_rows.sh.
"""
import argparse
import contextlib
import gzip
import hashlib
import importlib.util
import io
import json
import os
import struct
import subprocess
import sys
import tempfile

SCRIPTS, NDTRAIN, TOOL = sys.argv[1:4]
sys.dont_write_bytecode = True
sys.path.insert(0, SCRIPTS)
import encode_rows  # noqa: E402
from token_files import MegatronWriter  # noqa: E402

SUFFIXES = (".bin", ".idx", ".mask")
CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
GENERATION = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
              "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}"
              "{{ '\n' }}{% endfor %}")  # a newline behind a tag would be trimmed
# As templates of thinking models do: an earlier turn loses its first word.
FORGETFUL = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if loop.last %}{{ m['content'] }}{% else %}"
             "{{ m['content'].split(' ')[-1] }}{% endif %}<|im_end|>\n{% endfor %}"
             "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
CHATS = [[{"role": "system", "content": "be good"}, {"role": "user", "content": "2+2?"},
          {"role": "assistant", "content": "it's 4, caf\u00e9"}, {"role": "user", "content": "thanks"},
          {"role": "assistant", "content": "no words"}],
         [{"role": "user", "content": "a question of many words"}, {"role": "assistant", "content": " with blanks "}],
         [{"role": "user", "content": "nobody answers"}]]
PAIRS = [("what is it?", " it is this"), ("", "no prompt"), ("a prompt", ""), ("caf\u00e9", "\u20ac"), ("</s> is text", "<s>")]


def has(package):
    return importlib.util.find_spec(package) is not None


def contents(prefix):
    return [open(prefix + suffix, "rb").read() if os.path.exists(prefix + suffix) else None for suffix in SUFFIXES]


def counted_of(prefix, tokens):
    """The mask as docs/formats.md has it: whether each token counts."""
    data, index = contents(prefix)[2], contents(prefix)[1]
    counts = [True] * tokens
    magic, version, zero, found, spans, ignored = struct.unpack_from("<8sIIQQQ", data)
    assert (magic, version, zero, found) == (b"NDMASK\0\0", 1, 0, tokens), (magic, version, zero, found, tokens)
    assert data[40:104] == hashlib.sha256(index).hexdigest().encode()
    assert len(data) == 104 + 16 * spans + 64 and data[-64:] == hashlib.sha256(data[:-64]).hexdigest().encode()
    for begin, end in struct.iter_unpack("<QQ", data[104:-64]):
        counts[begin:end] = [False] * (end - begin)
    assert counts.count(False) == ignored
    return counts


def read(prefix, vocab=70000):
    """Ids, and labels of every second token, as a run reads them."""
    done = subprocess.run([TOOL, prefix, str(vocab)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    return int(words[1]), [int(w) for w in words[2::2]], [int(w) for w in words[3::2]]


def expect(prefix, ids, counts):
    tokens, inputs, labels = read(prefix)
    assert tokens == len(ids), (tokens, len(ids))
    assert counted_of(prefix, tokens) == counts
    assert inputs == ids[0:len(labels) * 2:2], (inputs, ids)
    assert labels == [i if c else -100 for i, c in zip(ids[1::2], counts[1::2])]


def check_writer(here):
    """Without any package: what the writer makes, and when it leaves nothing."""
    with MegatronWriter(here("w"), 100) as out:
        out.add([1, 2, 3], [False, True, False])
        out.add([4, 5, 6, 7], [False, False, True, True])
        out.commit()
    expect(here("w"), [1, 2, 3, 4, 5, 6, 7], [False, True, False, False, False, True, True])
    assert struct.unpack_from("<Q", contents(here("w"))[2], 24) == (2,)  # adjacent spans are one
    with MegatronWriter(here("w"), 70000) as out:  # wider ids, no mask: the old one goes
        out.add([69999, 2])
        out.commit()
    assert contents(here("w"))[2] is None and read(here("w")) == (2, [69999], [2])
    before = contents(here("w"))
    try:
        with MegatronWriter(here("w"), 100) as out:
            out.add([1, 2], [False, False])
            out.commit()
        raise AssertionError("a mask by which nothing counts was written")
    except ValueError as error:
        assert "none of the 2 tokens counts" in str(error)
    assert contents(here("w")) == before


class Bytes:
    """A tokenizer that needs no package."""

    chats, eos, vocab = False, 256, 257

    def encode(self, text, special):
        return list(text.encode())


def check_cut(here):
    """A row that is cut keeps the mask of what is left, whether the border is in its prompt or behind it."""
    rows = write_rows(here("r.jsonl"), [{"prompt": "abc", "completion": "defg"}, {"prompt": "a", "completion": "b"},
                                        {"prompt": "abcdefgh", "completion": "x"}, {"text": "abcdefgh"}])
    encoder = encode_rows.Encoder(Bytes(), argparse.Namespace(
        inputs=[rows], max_tokens=5, messages_key="messages", text_key="text", no_special_tokens=True, append_eos=True))
    with MegatronWriter(here("r"), Bytes.vocab) as out:
        for ids, counts in encoder.documents():
            out.add(ids, counts)
        out.commit()
    counts = [False] * 3 + [True] * 2 + [False] + [True] * 2 + [False] * 5 + [True] * 5
    expect(here("r"), list(b"abcdeab") + [256] + list(b"abcdeabcde"), counts)
    assert (encoder.cut, encoder.uncounted, out.lengths.tolist()) == (3, 1, [5, 3, 5, 5])


def train(path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = [m["content"] for chat in CHATS for m in chat] + [word for pair in PAIRS for word in pair]
    tokenizer.train_from_iterator(text * 3, trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(path)
    return tokenizer


def run(*arguments, fails=None):
    """The script in this process, which imports transformers once; what it prints."""
    printed = io.StringIO()
    sys.argv = ["encode_rows", *arguments]
    try:
        with contextlib.redirect_stdout(printed):
            encode_rows.main()
        assert fails is None, f"it did not fail: {printed.getvalue()}"
    except SystemExit as error:
        assert fails is not None and fails in str(error.code), error.code
    return printed.getvalue()


def launch(*arguments):
    """The script as a user starts it."""
    done = subprocess.run([sys.executable, os.path.join(SCRIPTS, "encode_rows.py"), *arguments], capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def native(here, rows, *arguments):
    subprocess.run([NDTRAIN, "tokenize", "--tokenizer", here("tokenizer.json"), "--input", rows, "--output-prefix",
                    here("native"), "--overwrite", *arguments], check=True, stdout=subprocess.DEVNULL)
    return contents(here("native"))


def write_rows(path, rows, opened=open):
    with opened(path, "wt", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    return path


def check_texts(here, tokenizer):
    """Pairs and texts, with the package tokenizers alone."""
    pairs = write_rows(here("p.jsonl.gz"), [{"prompt": p, "completion": c, "n": 1} for p, c in PAIRS], gzip.open)
    printed = launch("--tokenizer", here("tokenizer.json"), "--output", here("p"), pairs)
    assert "tokens that count in the loss" in printed and "p.bin, .mask and .idx" in printed, printed
    ids, counts = [], []
    tokenizer.encode_special_tokens = True
    for prompt, completion in PAIRS:
        first = [0] + tokenizer.encode(prompt, add_special_tokens=False).ids
        second = tokenizer.encode(completion, add_special_tokens=False).ids
        ids += first + second
        counts += [False] * len(first) + [True] * len(second)
    tokenizer.encode_special_tokens = False
    expect(here("p"), ids, counts)
    assert contents(here("p")) == native(here, pairs)
    if has("transformers"):  # the same tokenizer as a folder
        from transformers import PreTrainedTokenizerFast
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(here("folder"))
        run("--tokenizer", here("folder"), "--output", here("f"), pairs)
        assert contents(here("f")) == contents(here("p"))
    # A text counts whole, so there is no mask, and that of other files goes.
    rows = write_rows(here("t.jsonl"), [{"body": c} for _, c in PAIRS if c] + [{"body": ""}])
    run("--tokenizer", here("tokenizer.json"), "--output", here("p"), "--text-key", "body", rows)
    assert contents(here("p")) == native(here, rows, "--json-key", "body") and contents(here("p"))[2] is None
    # Mistakes leave nothing behind.
    bad = write_rows(here("b.jsonl"), [{"text": "a"}, {"prompt": "a"}])
    run("--tokenizer", here("tokenizer.json"), "--output", here("x"), bad, fails='b.jsonl line 2: "completion" is missing')
    none = write_rows(here("n.jsonl"), [{"prompt": "a", "completion": ""}])
    run("--tokenizer", here("tokenizer.json"), "--output", here("x"), none, fails="counts in the loss")
    chat = write_rows(here("c.jsonl"), [{"messages": CHATS[0]}])
    run("--tokenizer", here("tokenizer.json"), "--output", here("x"), chat, fails="needs a chat template")
    with open(pairs, "rb") as file, open(here("cut.jsonl.gz"), "wb") as cut:
        cut.write(file.read()[:-12])
    run("--tokenizer", here("tokenizer.json"), "--output", here("x"), here("cut.jsonl.gz"), fails="cannot be read")
    assert not [name for name in os.listdir(here("")) if name.startswith("x.") or name.endswith(".tmp")]


def check_chats(here, tokenizer):
    from transformers import PreTrainedTokenizerFast
    for name, template in (("chatml", CHATML), ("generation", GENERATION), ("forgetful", FORGETFUL)):
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>",
                                chat_template=template).save_pretrained(here(name))
    rows = write_rows(here("c.jsonl"), [{"messages": chat, "id": 7} for chat in CHATS])
    printed = run("--tokenizer", here("chatml"), "--output", here("c"), rows)
    assert "rows without a token that counts" in printed, printed
    ids, counts = [], []
    for chat in CHATS:
        for message in chat:
            answers = message["role"] == "assistant"
            for text, counted in ((f"<|im_start|>{message['role']}\n", False), (message["content"] + "<|im_end|>", answers),
                                  ("\n", False)):
                part = tokenizer.encode(text, add_special_tokens=False).ids
                ids += part
                counts += [counted] * len(part)
    expect(here("c"), ids, counts)
    assert contents(here("c")) == native(here, rows, "--chat-format", "chatml")
    # The same turns, found by the template's own marks.
    run("--tokenizer", here("generation"), "--output", here("g"), rows)
    assert contents(here("g")) == contents(here("c"))
    run("--tokenizer", here("forgetful"), "--output", here("x"), rows,
        fails="c.jsonl line 1: the chat template does not write message 3 alike")
    # A row that is cut keeps the mask of what is left: here up to the first two tokens of the answer in row 2.
    lengths = struct.unpack_from("<3i", contents(here("g"))[1], 34)
    begins = [sum(lengths[:i]) for i in range(3)]
    most = counts.index(True, begins[1]) - begins[1] + 2
    assert lengths[0] > most
    printed = run("--tokenizer", here("chatml"), "--output", here("m"), "--max-tokens", str(most), rows)
    assert "rows that were cut" in printed, printed
    kept = [place for begin, length in zip(begins, lengths) for place in range(begin, begin + min(length, most))]
    expect(here("m"), [ids[place] for place in kept], [counts[place] for place in kept])
    if not has("pyarrow"):
        print(f"skipped: {sys.executable} has no pyarrow; set ND_PEER_PYTHON to one that has")
        return
    import pyarrow
    import pyarrow.parquet
    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2, 3], "messages": CHATS}), here("c.parquet"))
    run("--tokenizer", here("chatml"), "--output", here("q"), here("c.parquet"))
    assert contents(here("q")) == contents(here("c"))
    with open(here("c.parquet"), "rb") as file, open(here("cut.parquet"), "wb") as cut:
        cut.write(file.read()[:-100])
    run("--tokenizer", here("chatml"), "--output", here("x"), here("cut.parquet"), fails="cannot be read as Parquet")
    assert not [name for name in os.listdir(here("")) if name.startswith("x.") or name.endswith(".tmp")]


def main():
    with tempfile.TemporaryDirectory() as top:
        here = lambda name: os.path.join(top, name)
        check_writer(here)
        check_cut(here)
        if not has("tokenizers"):
            print(f"skipped: {sys.executable} has no tokenizers; set ND_PEER_PYTHON to one that has")
            return
        tokenizer = train(here("tokenizer.json"))
        check_texts(here, tokenizer)
        if not has("transformers"):
            print(f"skipped: {sys.executable} has no transformers; set ND_PEER_PYTHON to one that has")
            return
        check_chats(here, tokenizer)
    print("check_encode_rows: every id and mask as expected")


main()
