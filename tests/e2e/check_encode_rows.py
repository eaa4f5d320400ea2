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
# Marks with every way to trim white space, and with what a template does around them.
MARKS = (GENERATION, GENERATION.replace("{% generation %}", "{%- generation -%}\n ").replace("<|im_end|>{% endg", "<|im_end|>\n\n{%- endg"),
         GENERATION.replace("{% generation %}", "\n  {% generation %}\n").replace("{% endgeneration %}", "\n{% endgeneration -%}\n"),
         GENERATION.replace("{% generation %}", "{%+ generation+%}\n").replace("{% endgeneration %}", " {%-endgeneration%}\n"),
         GENERATION.replace("{% generation %}", "{% set end = '<|im_end|>' %}{% generation %}"
                            "{% for word in m['content'].split(' ') %}").replace(
             "{{ m['content'] }}<|im_end|>{% endg", "{{ word }} {% endfor %}{{ end }}{% endg", 1))
# As templates of thinking models do: an earlier turn loses its first word.
FORGETFUL = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if loop.last %}{{ m['content'] }}{% else %}"
             "{{ m['content'].split(' ')[-1] }}{% endif %}<|im_end|>\n{% endfor %}"
             "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
CHATS = [[{"role": "system", "content": "be good"}, {"role": "user", "content": "2+2?"},
          {"role": "assistant", "content": "it's 4, caf\u00e9"}, {"role": "user", "content": "thanks"},
          {"role": "assistant", "content": "no words"}],
         [{"role": "user", "content": "a question of many words"}, {"role": "assistant", "content": " with blanks "}],
         [{"role": "user", "content": "nobody answers"}]]
# In the splitter, as in that of Llama 3, newlines are one piece also before a word; that of GPT-2 leaves the last one alone.
NEWLINES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NEWLINE_CHATS = [[{"role": "user", "content": "\n\nwell?"}, {"role": "assistant", "content": "\nyes"},
                  {"role": "user", "content": "\nsure?"}, {"role": "assistant", "content": "\n\nyes"}],
                 [{"role": "user", "content": "well?\n\n"}, {"role": "assistant", "content": ""},
                  {"role": "user", "content": ""}, {"role": "assistant", "content": "\n\n"}],
                 [{"role": "user", "content": "   well?"}, {"role": "assistant", "content": "   yes"},
                  {"role": "user", "content": "well?"}, {"role": "assistant", "content": "yes\n"}]]
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
    assert (magic, version, zero, found) == (b"NDMASK\0\0", 2, 0, tokens), (magic, version, zero, found, tokens)
    assert data[40:104] == hashlib.sha256(index).hexdigest().encode()
    assert data[104:168] == hashlib.sha256(contents(prefix)[0]).hexdigest().encode()
    assert len(data) == 168 + 16 * spans + 64 and data[-64:] == hashlib.sha256(data[:-64]).hexdigest().encode()
    for begin, end in struct.iter_unpack("<QQ", data[168:-64]):
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
    with MegatronWriter(here("v"), 70000) as out:  # a large .bin, of which the mask names pieces: the run finds the same
        for number in range(430):
            out.add([number] * 10000, [True] * 9999 + [False])
        out.commit()
    assert os.path.getsize(here("v.bin")) > 1 << 24 and read(here("v"))[0] == 4300000
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


def check_mark():
    """A token counts when it has a character of a span, and one that was trimmed with the last of its characters."""
    for offsets, spans, counts in (
            ([(0, 9), (9, 10), (10, 13), (13, 14), (14, 15)], [(10, 14)], [False, False, True, True, False]),
            ([(0, 9), (9, 11), (11, 14), (14, 15)], [(10, 14)], [False, True, True, False]),
            ([(0, 9), (11, 11), (11, 14), (15, 15)], [(10, 14)], [False, True, True, False]),
            ([(0, 9), (10, 10), (10, 14)], [(10, 14)], [False, False, True]),
            ([(0, 2), (2, 8), (8, 9)], [(1, 3), (6, 7)], [True, True, False]),
            ([(0, 2), (2, 3), (2, 3), (3, 4)], [(2, 3)], [False, True, True, False]),
            ([(0, 2), (2, 4), (4, 6)], [(3, 3), (5, 6)], [False, False, True]),
            ([(0, 2), (2, 2)], [], [False, False])):
        assert encode_rows.mark(offsets, spans) == counts, (offsets, spans, encode_rows.mark(offsets, spans))


def train(path, chats, newlines=False, trims=False):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if newlines:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(NEWLINES), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    text = [m["role"] + "\n" + m["content"] if newlines else m["content"] for chat in chats for m in chat]
    text += [word for pair in PAIRS for word in pair]
    tokenizer.train_from_iterator(text * 3, trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    if trims:  # the blanks at the ends of a token are none of its characters then
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), tokenizer.post_processor])
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


def native(here, rows, *arguments, tokenizer="tokenizer.json"):
    subprocess.run([NDTRAIN, "tokenize", "--tokenizer", here(tokenizer), "--input", rows, "--output-prefix",
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


def check_zstd(here):
    """Frames one behind another are read; a file that is damaged or cut is refused by its name, and nothing is written."""
    if not has("zstandard"):
        print(f"skipped: {sys.executable} has no zstandard for .zst files; set ND_PEER_PYTHON to one that has")
        return
    import zstandard
    rows = [{"text": f"row {n} caf\u00e9"} for n in range(2000)]
    run("--tokenizer", here("tokenizer.json"), "--output", here("plain"), write_rows(here("z.jsonl"), rows))
    with open(here("z.jsonl"), "rb") as file:
        data = file.read()
    middle = data.index(b"\n", len(data) // 2) + 1
    packer = zstandard.ZstdCompressor(write_checksum=True)
    first, second = packer.compress(data[:middle]), packer.compress(data[middle:])
    cut_in_row = packer.compress(data[:middle - 5])  # a row goes on in the next frame
    skipped = struct.pack("<II", 0x184D2A50, 4) + b"skip"
    stream = packer.compressobj()
    whole_lines = stream.compress(data[:middle]) + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)  # the frame does not end
    damaged = bytearray(first + second)
    damaged[len(first) // 2] ^= 0x5A

    def check(name, packed, fails=None):
        with open(here(name), "wb") as file:
            file.write(packed)
        run("--tokenizer", here("tokenizer.json"), "--output", here("x" if fails else "z"), here(name), fails=fails)
        assert fails or contents(here("z")) == contents(here("plain"))

    check("one.jsonl.zst", packer.compress(data))
    check("two.jsonl.zst", skipped + first + skipped + second + skipped)
    check("row.jsonl.zst", cut_in_row + packer.compress(data[middle - 5:]))
    check("damaged.jsonl.zst", damaged, fails="damaged.jsonl.zst cannot be read: zstd")
    check("noise.jsonl.zst", first + b"no frame of zstd", fails="noise.jsonl.zst cannot be read: zstd")
    for name, packed in (("end", first + second[:-1]), ("body", first[:len(first) // 2]), ("header", first + second[:3]),
                         ("skip", first + second + skipped[:-2]), ("lines", whole_lines)):
        check(name + ".jsonl.zst", packed, fails=name + ".jsonl.zst cannot be read: it ends in the middle of a zstd frame")
    done = subprocess.run([sys.executable, os.path.join(SCRIPTS, "encode_rows.py"), "--tokenizer", here("tokenizer.json"),
                           "--output", here("x"), here("damaged.jsonl.zst")], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert not [name for name in os.listdir(here("")) if name.startswith("x.") or name.endswith(".tmp")]


def check_parquet(here):
    """Columns give the tokens of the same rows as JSON; a cut file is refused, and nothing is written."""
    if not has("pyarrow"):
        print(f"skipped: {sys.executable} has no pyarrow; set ND_PEER_PYTHON to one that has")
        return
    import pyarrow
    import pyarrow.parquet
    pairs = [{"prompt": p, "completion": c} for p, c in PAIRS]
    pyarrow.parquet.write_table(pyarrow.table({"n": range(len(pairs)), **{k: [pair[k] for pair in pairs] for k in pairs[0]}}),
                                here("pairs.parquet"), row_group_size=2)
    run("--tokenizer", here("tokenizer.json"), "--output", here("pq"), here("pairs.parquet"))
    assert contents(here("pq")) == native(here, write_rows(here("pairs.jsonl"), pairs)) and contents(here("pq"))[2]
    pyarrow.parquet.write_table(pyarrow.table({"body": [c for _, c in PAIRS]}), here("texts.parquet"))
    run("--tokenizer", here("tokenizer.json"), "--output", here("pq"), "--text-key", "body", here("texts.parquet"))
    texts = write_rows(here("texts.jsonl"), [{"body": c} for _, c in PAIRS])
    assert contents(here("pq")) == native(here, texts, "--json-key", "body")
    with open(here("pairs.parquet"), "rb") as file, open(here("cut.parquet"), "wb") as cut:
        cut.write(file.read()[:-100])
    run("--tokenizer", here("tokenizer.json"), "--output", here("x"), here("cut.parquet"), fails="cannot be read as Parquet")
    assert not [name for name in os.listdir(here("")) if name.startswith("x.") or name.endswith(".tmp")]


def check_newlines(here):
    """A token that joins the newline of the header with those that an answer begins with counts, as it does in ndtrain."""
    from transformers import PreTrainedTokenizerFast
    rows = write_rows(here("l.jsonl"), [{"messages": chat} for chat in NEWLINE_CHATS])
    for trims in (False, True):
        tokenizer = train(here("newlines.json"), NEWLINE_CHATS, newlines=True, trims=trims)
        for name, template in (("chatml", CHATML), ("generation", GENERATION)):
            PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>",
                                    chat_template=template).save_pretrained(here("newlines_" + name))
        places = tokenizer.encode("<|im_start|>assistant\n   yes", add_special_tokens=False).offsets
        assert ((24, 24) in places) == trims and (25 if trims else 24, 28) in places, places
        run("--tokenizer", here("newlines_chatml"), "--output", here("l"), rows)
        assert contents(here("l")) == native(here, rows, "--chat-format", "chatml", tokenizer="newlines.json")
        ids, counts = [], []
        for message in (message for chat in NEWLINE_CHATS for message in chat):
            body = message["role"] + "\n" + message["content"]
            pieces = tokenizer.encode(f"<|im_start|>{body}<|im_end|>\n", add_special_tokens=False).ids
            words = [tokenizer.decode([i], skip_special_tokens=False) for i in pieces]
            ends = [len("".join(words[:place + 1])) - len("<|im_start|>") for place in range(len(words))]
            assert "".join(words[1:-2]) == body and words[-2:] == ["<|im_end|>", "\n"], words
            joined = "\n" * (1 + len(message["content"]) - len(message["content"].lstrip("\n")))
            assert joined in words[1:-2], (joined, words)  # the piece that this check is about
            ids += pieces
            counts += [message["role"] == "assistant" and len(message["role"]) + 1 < end <= len(body + "<|im_end|>")
                       for end in ends]
        expect(here("l"), ids, counts)
        run("--tokenizer", here("newlines_generation"), "--output", here("g"), rows)
        assert contents(here("g")) == contents(here("l"))


def check_marks(here):
    """Where a tokenizer trims no blanks, transformers finds the same answers between the marks of a template."""
    from transformers import PreTrainedTokenizerFast
    tokenizer = train(here("marks.json"), CHATS)
    for number, template in enumerate(MARKS):
        made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>", chat_template=template)
        made.save_pretrained(here("marks"))
        ours = encode_rows.FolderTokenizer(here("marks"), None)
        for chat in CHATS + NEWLINE_CHATS:
            theirs = made.apply_chat_template(chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            ids, counts = ours.encode_chat(chat, {})
            assert ids == theirs["input_ids"], (number, chat)
            assert [bool(c) for c in counts] == [bool(c) for c in theirs["assistant_masks"]], (number, chat, counts)
    # A mark within what a template trims changes the text, so it cannot be found.
    template = "{% set all %}{% generation %} {{ messages[0]['content'] }}{% endgeneration %}{% endset %}{{ all | trim }}"
    try:
        encode_rows.FolderTokenizer(here("marks"), template).encode_chat(CHATS[0], {})
        raise AssertionError("it did not fail")
    except encode_rows.Refused as error:
        assert "writes other text" in str(error), error


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
    # The template's own marks find the same turns.
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
    if has("pyarrow"):  # chats as columns; check_parquet says it where it is missing
        import pyarrow
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2, 3], "messages": CHATS}), here("c.parquet"))
        run("--tokenizer", here("chatml"), "--output", here("q"), here("c.parquet"))
        assert contents(here("q")) == contents(here("c"))


def main():
    with tempfile.TemporaryDirectory() as top:
        here = lambda name: os.path.join(top, name)
        check_writer(here)
        check_cut(here)
        check_mark()
        if not has("tokenizers"):
            print(f"skipped: {sys.executable} has no tokenizers; set ND_PEER_PYTHON to one that has")
            return
        tokenizer = train(here("tokenizer.json"), CHATS)
        check_texts(here, tokenizer)
        check_zstd(here)
        check_parquet(here)
        if not has("transformers"):
            print(f"skipped: {sys.executable} has no transformers; set ND_PEER_PYTHON to one that has")
            return
        check_newlines(here)
        check_marks(here)
        check_chats(here, tokenizer)
    print("check_encode_rows: every id and mask as expected")


main()
