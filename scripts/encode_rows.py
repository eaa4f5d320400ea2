#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns rows of Parquet or JSON lines into token files that ndtrain reads, with the chat template of a tokenizer.

    scripts/encode_rows.py --tokenizer ./SmolLM2-135M-Instruct --output data/chat train-*.parquet
    scripts/encode_rows.py --tokenizer ./tokenizer.json --output data/web --text-key content web.jsonl.gz

writes data/chat.bin and data/chat.idx (Megatron), and data/chat.mask, which says which tokens count in the loss. Then train
with `data.path: data/chat` and `data.tokenizer: file`.

A row is one document: a list of messages (--messages-key) that the chat template writes, of which only the turns of the
assistant count; or a prompt with its completion, of which only the completion counts; or a text (--text-key), of which
all counts. The form is that of the first of these columns that a row has.

The turns of the assistant are what stands between {% generation %} and {% endgeneration %} in the template. A template
without these is rendered up to each turn and behind it; it must write a turn alike whatever follows. What such a turn has
behind its last special token, as a newline, does not count. Nothing is added to what the template writes.

Special tokens are added to texts and pairs as the tokenizer does by default (--no-special-tokens leaves them out);
--append-eos ends those documents with the end of sequence. What they write like a special token stays text; in what a chat
template writes it is the token. Outputs appear under their names only when they are complete.

Needs the Python package transformers, or tokenizers for a tokenizer.json and rows without messages; pyarrow for Parquet;
zstandard (0.19 or later) for .zst files.
"""
import argparse
import contextlib
import gzip
import io
import itertools
import json
import os
import re
import sys
import zlib

from token_files import MegatronWriter

GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
BATCH_ROWS = 1024
PACKED_BYTES = 1 << 14  # of a .zst file at a time; what they hold may be many times as long


class Refused(Exception):
    """What is wrong with a row or an input, as a sentence."""


# Rows.

def import_or_refuse(name, purpose):
    try:
        return __import__(name, fromlist=["_"])
    except ImportError as error:
        raise Refused(f"{purpose} needs the Python package {name.split('.')[0]}, which cannot be imported ({error}): "
                      f"pip install {name.split('.')[0]}") from error


class ZstdBytes(io.RawIOBase):
    """The bytes that a .zst file of any number of frames holds. The package's own stream_reader takes a frame that is cut
    for one that has ended."""

    def __init__(self, path, file):
        self.package = import_or_refuse("zstandard", path)
        self.path, self.file = path, file
        self.frame, self.packed, self.ready = None, b"", b""

    def readable(self):
        return True

    def unpack(self):
        """The next bytes, which may be none, or None at the end of the file."""
        packed = self.packed or self.file.read(PACKED_BYTES)
        if not packed:
            if self.frame:
                raise Refused(f"{self.path} cannot be read: it ends in the middle of a zstd frame, so it was cut")
            return None
        self.frame = self.frame or self.package.ZstdDecompressor().decompressobj()
        try:
            data = self.frame.decompress(packed)
        except self.package.ZstdError as error:
            raise Refused(f"{self.path} cannot be read: {error}") from error
        self.packed = b""
        if self.frame.eof:
            self.packed, self.frame = self.frame.unused_data, None
        return data

    def readinto(self, buffer):
        while not self.ready:
            data = self.unpack()
            if data is None:
                return 0
            self.ready = memoryview(data)
        size = min(len(buffer), len(self.ready))
        buffer[:size], self.ready = self.ready[:size], self.ready[size:]
        return size


@contextlib.contextmanager
def open_lines(path):
    with contextlib.ExitStack() as stack:
        if path.endswith(".gz"):
            yield stack.enter_context(gzip.open(path, "rt", encoding="utf-8-sig"))
        elif path.endswith(".zst"):
            packed = stack.enter_context(open(path, "rb"))
            unpacked = io.BufferedReader(ZstdBytes(path, packed), PACKED_BYTES)
            yield stack.enter_context(io.TextIOWrapper(unpacked, encoding="utf-8-sig"))
        else:
            yield stack.enter_context(open(path, encoding="utf-8-sig"))


def read_lines(path):
    with open_lines(path) as lines:
        try:
            yield from lines
        except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
            raise Refused(f"{path} cannot be read: {error}") from error


def json_rows(path):
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        place = f"{path} line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise Refused(f"{place}: {error}") from error
        if not isinstance(row, dict):
            raise Refused(f"{place}: it is no JSON object")
        yield place, row


def parquet_rows(path, keys):
    parquet = import_or_refuse("pyarrow.parquet", f"{path} is Parquet, and")
    arrow = import_or_refuse("pyarrow", "Parquet")
    try:
        file = parquet.ParquetFile(path)
        names = [name for name in file.schema_arrow.names if name in keys]
        number = 0
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=names):
            for row in batch.to_pylist():
                number += 1
                yield f"{path} row {number}", row
    except (arrow.ArrowInvalid, arrow.ArrowException) as error:
        raise Refused(f"{path} cannot be read as Parquet: {error}") from error


def input_rows(path, keys):
    with open(path, "rb") as file:
        is_parquet = file.read(4) == b"PAR1"
    return parquet_rows(path, keys) if is_parquet else json_rows(path)


# Tokenizers.

class FileTokenizer:
    """A tokenizer.json with the package tokenizers: texts and pairs."""

    chats = False

    def __init__(self, path):
        package = import_or_refuse("tokenizers", path)
        try:
            self.tokenizer = package.Tokenizer.from_file(path)
        except Exception as error:  # the package raises nothing more special
            raise Refused(f"{path} is no tokenizer.json: {error}") from error
        self.tokenizer.encode_special_tokens = True  # what a text writes like a special token stays text
        self.vocab = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        known = (self.tokenizer.token_to_id(name) for name in ("<|end_of_text|>", "<|endoftext|>", "</s>"))
        self.eos = next((i for i in known if i is not None), None)

    def encode(self, text, special):
        return self.tokenizer.encode(text, add_special_tokens=special).ids


class FolderTokenizer:
    """A folder or a name with the package transformers."""

    chats = True

    def __init__(self, name, template):
        package = import_or_refuse("transformers", f"the tokenizer {name} is no file, and")
        try:
            self.tokenizer = package.AutoTokenizer.from_pretrained(name)
        except (ImportError, OSError, ValueError) as error:
            raise Refused(f"no tokenizer {name}: {error}") from error
        if not self.tokenizer.is_fast:
            raise Refused(f"the tokenizer {name} has no tokenizer.json, which says which token stands for which characters")
        self.tokenizer.model_max_length = sys.maxsize  # no warning about long documents: they are packed into blocks
        self.vocab = max(self.tokenizer.get_vocab().values()) + 1
        self.eos = self.tokenizer.eos_token_id
        self.bos = self.tokenizer.bos_token_id
        added = {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        self.special = tuple(sorted(added | set(self.tokenizer.all_special_tokens)))
        self.special_pattern = re.compile("|".join(map(re.escape, self.special)) or "(?!)")
        self.name, self.template = name, template

    def encode(self, text, special):
        return self.tokenizer(text, add_special_tokens=special, split_special_tokens=True)["input_ids"]

    def template_text(self):
        if self.template is None:
            try:
                self.template = self.tokenizer.get_chat_template()
            except ValueError as error:
                raise Refused(f"the tokenizer {self.name} has no chat template; give one with --chat-template") from error
        return self.template

    def render(self, messages, values, prompt=False, template=None):
        return self.tokenizer.apply_chat_template(messages, chat_template=template or self.template_text(), tokenize=False,
                                                  add_generation_prompt=prompt, **values)

    def encode_chat(self, messages, values):
        """Ids, and for each whether it counts."""
        text = self.render(messages, values)
        counts = {place: message.get("weight") != 0 for place, message in enumerate(messages) if message.get("role") == "assistant"}
        if GENERATION.search(self.template_text()):
            spans = self.marked(text, messages, values)
            if len(spans) == len(counts):
                spans = [span for span, counted in zip(spans, counts.values()) if counted]
            elif not all(counts.values()):
                raise Refused("a message has \"weight\": 0, and the chat template does not mark each assistant's turn once")
        else:
            spans = [self.turn(text, messages, place, values) for place, counted in counts.items() if counted]
        out = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return out["input_ids"], mark(out["offset_mapping"], spans)

    def marked(self, text, messages, values):
        """What stands between the marks of the template, in characters. The mask that transformers makes of them lacks an
        answer whose first blanks the tokenizer trims: it asks which token has the first character, and none has it. So
        this script renders the template once more, with a character of its own in the place of each mark."""
        begin, end = itertools.islice((c for c in map(chr, range(0xe000, 0xf900)) if c not in text), 2)

        def tag(match):  # what trims white space stays at the outside
            left, ends, right = match.groups()
            inner = "{% if true %}" if not ends else "{% endif %}"
            outer = inner.replace("{%", "{%" + left, 1), inner.replace("%}", right + "%}", 1)
            return f'{outer[0]}{{{{ "{end if ends else begin}" }}}}{outer[1]}'

        whole = self.render(messages, values, template=GENERATION.sub(tag, self.template_text()))
        if whole.replace(begin, "").replace(end, "") != text:
            raise Refused("the chat template writes other text when a character stands at its {% generation %} and "
                          "{% endgeneration %}; put them around the text of a turn, in a copy of the template, for "
                          "--chat-template")
        spans, at = [], 0
        for piece in re.split(f"([{begin}{end}])", whole):
            if piece == begin:
                spans.append([at, at])
            elif piece == end:
                spans[-1][1] = at
            else:
                at += len(piece)
        return [tuple(span) for span in spans]

    def turn(self, text, messages, place, values):
        """The characters that the assistant's message at this place gives."""
        before = self.render(messages[:place], values, prompt=True) if place > 0 else ""
        whole = self.render(messages[:place + 1], values)
        if place == 0 or not whole.startswith(before) or not text.startswith(whole):
            raise Refused(f"the chat template does not write message {place + 1} alike with and without the others, so its "
                          "part of the text cannot be found; put {% generation %} and {% endgeneration %} around it in a "
                          "copy of the template, for --chat-template")
        bare = whole.rstrip()
        return len(before), max(len(before), len(bare if bare.endswith(self.special) else whole))


def mark(offsets, spans):
    """Whether each token has a character of one of the spans, which are in order: a newline of the header may be one token
    with the newlines that an answer begins with. White space that a tokenizer trims has no characters left: it counts
    with the character before its place, which is its last one."""
    spans = [span for span in spans if span[0] < span[1]]
    counts, at = [], 0
    for begin, end in offsets:
        place = begin if begin < end else begin - 1
        while at < len(spans) and spans[at][1] <= place:
            at += 1
        counts.append(at < len(spans) and spans[at][0] < max(end, place + 1))
    return counts


# Documents.

class Encoder:
    def __init__(self, tokenizer, arguments):
        self.tokenizer, self.arguments = tokenizer, arguments
        self.tail = [tokenizer.eos] if arguments.append_eos else []
        self.prefix, self.suffix = self.special_ends()
        self.rows = self.empty = self.uncounted = self.cut = self.special = self.two_bos = 0

    def special_ends(self):
        """What the tokenizer adds before and behind a text."""
        if self.arguments.no_special_tokens:
            return [], []
        whole, bare = self.tokenizer.encode("a", True), self.tokenizer.encode("a", False)
        for at in range(len(whole) - len(bare) + 1):
            if whole[at:at + len(bare)] == bare:
                return whole[:at], whole[at + len(bare):]
        raise Refused("the tokenizer changes a text when it adds special tokens; give --no-special-tokens")

    def chat(self, row, key):
        messages = row[key]
        if isinstance(messages, str):
            messages = json.loads(messages)
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise Refused(f'"{key}" is no list of messages, each with a "role"')
        if not messages:
            return [], []
        if not self.tokenizer.chats:
            raise Refused(f'it has "{key}", which needs a chat template: give the folder of the tokenizer, not a file')
        messages = [{k: v for k, v in m.items() if v is not None or k == "content"} for m in messages]
        tools = row.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) and tools else tools
        values = {"date_string": self.arguments.date, **({"tools": tools} if tools else {})}
        self.special += sum(len(self.tokenizer.special_pattern.findall(str(m.get("content")))) for m in messages)
        ids, counts = self.tokenizer.encode_chat(messages, values)
        self.two_bos += len(ids) > 1 and ids[0] == ids[1] == self.tokenizer.bos
        return ids, counts

    def pair(self, row):
        for key in ("prompt", "completion"):
            if not isinstance(row.get(key), str):
                raise Refused(f'"{key}" is {"no string" if key in row else "missing"}')
        if not row["prompt"] + row["completion"]:
            return [], []
        prompt = self.prefix + (self.tokenizer.encode(row["prompt"], False) if row["prompt"] else [])
        completion = self.tokenizer.encode(row["completion"], False) if row["completion"] else []
        completion = completion + self.suffix + self.tail
        return prompt + completion, [False] * len(prompt) + [True] * len(completion)

    def text(self, row, key):
        if not isinstance(row[key], str):
            raise Refused(f'"{key}" is no string')
        if not row[key]:
            return [], []
        ids = self.prefix + self.tokenizer.encode(row[key], False) + self.suffix + self.tail
        return ids, [True] * len(ids)

    def row(self, row):
        a = self.arguments
        if a.messages_key in row:
            return self.chat(row, a.messages_key)
        if "prompt" in row or "completion" in row:
            return self.pair(row)
        if a.text_key in row:
            return self.text(row, a.text_key)
        raise Refused(f'it has none of "{a.messages_key}", "prompt" with "completion", and "{a.text_key}"')

    def documents(self):
        a = self.arguments
        keys = {a.messages_key, a.text_key, "prompt", "completion", "tools"}
        for path in a.inputs:
            for place, row in input_rows(path, keys):
                try:
                    ids, counts = self.row({key: value for key, value in row.items() if value is not None})
                except Refused as error:
                    raise Refused(f"{place}: {error}") from error
                except Exception as error:  # a template raises what it likes
                    raise Refused(f"{place}: {type(error).__name__}: {error}") from error
                self.rows += 1
                if a.max_tokens and len(ids) > a.max_tokens:
                    ids, counts = ids[:a.max_tokens], counts[:a.max_tokens]
                    self.cut += 1
                self.empty += not ids
                self.uncounted += bool(ids) and not any(counts)
                if ids:
                    yield ids, counts


def report(encoder, out):
    counted = out.tokens - out.ignored
    lines = [("rows", encoder.rows, ""), ("documents", len(out.lengths), ""), ("tokens", out.tokens, ""),
             ("tokens that count in the loss", counted, f"{100 * counted / out.tokens:.1f} %")]
    lines += [line for line in (
        ("empty rows", encoder.empty, "left out"),
        ("rows without a token that counts", encoder.uncounted, "kept: they have no turn of the assistant, or it was cut off"),
        ("rows that were cut", encoder.cut, "--max-tokens"),
        ("special tokens written in messages", encoder.special, "became tokens"),
        ("rows with two beginnings of sequence", encoder.two_bos, "the template writes one too many")) if line[1]]
    for what, count, remark in lines:
        print(f"  {what:38} {count:>16,}  {remark}".rstrip())
    print(f"{out.prefix}.bin{', .mask' if out.spans else ''} and .idx; train with data.path: {out.prefix}, data.tokenizer: file")


def warn_of_dates(tokenizer):
    template = tokenizer.template if tokenizer.chats else None
    if template and "strftime_now" in template and "date_string" not in template:
        print("encode_rows: the chat template writes the date of today, so the tokens depend on the day; give a copy of it "
              "with a fixed date to --chat-template", file=sys.stderr)


def encode(arguments):
    template = None
    if arguments.chat_template:
        with open(arguments.chat_template, encoding="utf-8") as file:
            template = file.read()
    if os.path.isfile(arguments.tokenizer):
        tokenizer = FileTokenizer(arguments.tokenizer)
    else:
        tokenizer = FolderTokenizer(arguments.tokenizer, template)
    if arguments.append_eos and tokenizer.eos is None:
        raise Refused(f"{arguments.tokenizer} names no end-of-sequence token; leave --append-eos out")
    encoder = Encoder(tokenizer, arguments)
    with MegatronWriter(arguments.output, tokenizer.vocab) as out:
        for ids, counts in encoder.documents():
            out.add(ids, counts)
        if out.tokens == 0:
            raise Refused("the inputs have no row with text in it")
        out.commit()
    warn_of_dates(tokenizer)
    report(encoder, out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", help="Parquet files, or JSON lines, also with .gz or .zst")
    parser.add_argument("--tokenizer", required=True, help="a folder or a name for AutoTokenizer, or a tokenizer.json")
    parser.add_argument("--output", required=True, help="path without suffix")
    parser.add_argument("--messages-key", default="messages", help="column of the messages")
    parser.add_argument("--text-key", default="text", help="column of the text")
    parser.add_argument("--chat-template", help="a file with a Jinja template, in the place of the tokenizer's own")
    parser.add_argument("--date", default="26 Jul 2024", help="date_string of the template: not that of today, so that the "
                        "tokens do not depend on the day")
    parser.add_argument("--max-tokens", type=int, default=0, help="cuts longer rows; 0: no limit")
    parser.add_argument("--append-eos", action="store_true", help="end texts and pairs with the end-of-sequence token")
    parser.add_argument("--no-special-tokens", action="store_true", help="add no beginning of sequence and the like")
    arguments = parser.parse_args()
    for path in arguments.inputs:
        if not os.path.isfile(path):
            sys.exit(f"encode_rows: {path} is not a file")
    try:
        encode(arguments)
    except (Refused, OSError, ValueError, EOFError) as error:
        sys.exit(f"encode_rows: {error}")


if __name__ == "__main__":
    main()
