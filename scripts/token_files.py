# SPDX-License-Identifier: Apache-2.0
"""Writes Megatron's P.bin and P.idx, with ndtrain's loss mask P.mask beside them when some tokens do not count in the loss
(docs/formats.md). Used by make_tokens.py and encode_rows.py.

Files appear under their names only when all of them are complete, the index last: without it a reader refuses the others.
"""
import array
import hashlib
import os
import struct
import sys

CODES = {"H": 8, "i": 4}
LENGTH_MAX = (1 << 31) - 1
SUFFIXES = (".bin", ".idx", ".mask")


def little_endian(typecode, values):
    data = array.array(typecode, values)
    if sys.byteorder == "big":
        data.byteswap()
    return data.tobytes()


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest().encode()


def bin_sha256(path):
    """What a mask knows of its .bin: 256 pieces of a large one."""
    pieces, piece = 256, 64 << 10
    size = os.path.getsize(path)
    if size <= pieces * piece:
        return sha256_of(path)
    digest, last = hashlib.sha256(), size - piece
    with open(path, "rb") as file:
        for number in range(pieces):
            file.seek(last if number == pieces - 1 else last // (pieces - 1) * number)
            digest.update(file.read(piece))
    return digest.hexdigest().encode()


def sync(path):
    """Makes a file, or the names in a folder, outlive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path):
    if os.path.lexists(path):
        os.remove(path)


class MegatronWriter:
    """`with MegatronWriter(prefix, vocab) as out:` add documents, then commit; else nothing is left behind."""

    def __init__(self, prefix, vocab):
        self.prefix = prefix
        self.typecode = "H" if vocab < 65500 else "i"  # Megatron's own rule
        self.lengths = array.array("i")
        self.spans = array.array("Q")  # begin and end of what does not count in the loss
        self.tokens = self.ignored = 0
        self.bin = open(self.temporary(".bin"), "wb")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.bin.close()
        for suffix in SUFFIXES:
            remove(self.temporary(suffix))

    def temporary(self, suffix):
        return self.prefix + suffix + ".tmp"

    def ignore(self, begin, end):
        if self.spans and self.spans[-1] == begin:
            self.spans[-1] = end
        else:
            self.spans.extend((begin, end))
        self.ignored += end - begin

    def add(self, ids, counts=None):
        """A document; `counts` has a truth value for each token: whether it counts in the loss. None: all do."""
        if len(ids) > LENGTH_MAX:
            raise ValueError(f"a document has {len(ids)} tokens, and Megatron's index counts at most {LENGTH_MAX}; split it")
        self.bin.write(little_endian(self.typecode, ids))
        self.lengths.append(len(ids))
        begin = None
        for place, counted in enumerate(counts if counts is not None else ()):
            if begin is None and not counted:
                begin = place
            elif begin is not None and counted:
                self.ignore(self.tokens + begin, self.tokens + place)
                begin = None
        if begin is not None:
            self.ignore(self.tokens + begin, self.tokens + len(ids))
        self.tokens += len(ids)

    def write_index(self):
        width, count, pointer = struct.calcsize(self.typecode), len(self.lengths), 0
        with open(self.temporary(".idx"), "wb") as file:
            file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[self.typecode], count, count + 1))
            file.write(little_endian("i", self.lengths))
            for length in self.lengths:
                file.write(struct.pack("<q", pointer))
                pointer += length * width
            for number in range(count + 1):
                file.write(struct.pack("<q", number))

    def write_mask(self):
        head = struct.pack("<8sIIQQQ", b"NDMASK", 2, 0, self.tokens, len(self.spans) // 2, self.ignored)
        digests = sha256_of(self.temporary(".idx")) + bin_sha256(self.temporary(".bin"))
        content = head + digests + little_endian("Q", self.spans)
        with open(self.temporary(".mask"), "wb") as file:
            file.write(content + hashlib.sha256(content).hexdigest().encode())

    def commit(self):
        """ValueError when there are tokens, and none of them counts."""
        if self.ignored and self.ignored == self.tokens:
            raise ValueError(f"none of the {self.tokens} tokens counts in the loss; completions, or turns of the assistant, "
                             "are missing")
        self.bin.close()
        self.write_index()
        if self.spans:
            self.write_mask()
        folder = os.path.dirname(os.path.abspath(self.prefix))
        kept = [suffix for suffix in (".bin", ".mask", ".idx") if os.path.exists(self.temporary(suffix))]
        for suffix in kept:
            sync(self.temporary(suffix))
        for suffix in (".idx", ".mask"):  # those of another .bin
            remove(self.prefix + suffix)
        sync(folder)
        for suffix in kept:
            os.replace(self.temporary(suffix), self.prefix + suffix)
        sync(folder)
