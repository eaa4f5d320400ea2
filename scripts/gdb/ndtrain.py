# SPDX-License-Identifier: Apache-2.0
"""gdb prints tensors with their values: gdb -ix scripts/gdb/ndtrain.py -p PID, then for instance

    print a->x_in               nd_tensor, of any type: type, shape, then its first values; FP8 codes as the numbers they stand for
    print *matrix               nd_matrix: that, and the first of its scales, by which the codes are to be divided
    print $nd_fp8("e4m3", 56)   what a code stands for; e5m2 likewise

A process that was stopped on a GPU has its tensors in the GPU's memory: their values cannot be read, and their shapes can."""
import itertools
import math
import struct

SHOWN = 8


def fp8(code, mantissa, bias, infinities):
    """The number of an FP8 code, as the OCP format has it."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, fraction = (code & 0x7F) >> mantissa, code & ((1 << mantissa) - 1)
    top = (0x7F >> mantissa) == exponent
    if top and (infinities or fraction == (1 << mantissa) - 1):
        return math.nan if fraction or not infinities else sign * math.inf
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias - mantissa)
    return sign * (1 + fraction / (1 << mantissa)) * 2.0 ** (exponent - bias)


def e4m3(code):
    return fp8(code, 3, 7, False)


def e5m2(code):
    return fp8(code, 2, 15, True)


# The size of an element of each type in bytes, and a function that reads its value from them.
TYPES = {"F64": (8, lambda b: struct.unpack("<d", b)[0]), "F32": (4, lambda b: struct.unpack("<f", b)[0]),
         "BF16": (2, lambda b: struct.unpack("<f", b"\0\0" + b)[0]), "I64": (8, lambda b: struct.unpack("<q", b)[0]),
         "I32": (4, lambda b: struct.unpack("<i", b)[0]), "F8_E4M3": (1, lambda b: e4m3(b[0])), "F8_E5M2": (1, lambda b: e5m2(b[0])),
         "U8": (1, lambda b: b[0])}


def first_places(shape, stride):
    """How many elements from the first one each of the first elements lies, row by row."""
    places = itertools.product(*(range(n) for n in shape))
    return [sum(i * s for i, s in zip(place, stride)) for place in itertools.islice(places, SHOWN)]


def describe(dtype, shape, stride, address, read):
    """The line of a tensor; read(address, bytes) raises MemoryError where it cannot."""
    head = f"{dtype} ({', '.join(map(str, shape))})"
    if address == 0:
        return head + ", no data"
    size, value = TYPES.get(dtype, (0, None))
    try:
        values = [f"{value(bytes(read(address + at * size, size))):g}" for at in first_places(shape, stride)] if value else []
    except MemoryError:
        return f"{head} at {address:#x}, which cannot be read here: on a GPU?"
    rest = ", ..." if len(values) < math.prod(shape) else ""
    return f"{head} at {address:#x}: {', '.join(values)}{rest}"


def register():
    import gdb
    import gdb.printing

    def line(tensor):
        axes = int(tensor["axes"])
        sizes = [[int(tensor[field][i]) for i in range(axes)] for field in ("shape", "stride")]

        def read(address, size):
            try:
                return gdb.selected_inferior().read_memory(address, size)
            except gdb.MemoryError as error:
                raise MemoryError from error
        return describe(str(tensor["dtype"]).replace("ND_DTYPE_", ""), *sizes, int(tensor["data"]), read)

    class Tensor:
        def __init__(self, value):
            self.value = value

        def to_string(self):
            return line(self.value)

    class Matrix(Tensor):
        def to_string(self):
            scale = self.value["scale"]
            try:
                said = f"{float(scale.dereference()):g}" if int(scale) else "none"
            except gdb.MemoryError:
                said = "one that cannot be read here: on a GPU?"
            return f"{line(self.value['stored'])}; its first scale: {said}"

    class Fp8(gdb.Function):
        def __init__(self):
            super().__init__("nd_fp8")

        def invoke(self, form, code):
            return {"e4m3": e4m3, "e5m2": e5m2}[form.string()](int(code) & 0xFF)

    printers = gdb.printing.RegexpCollectionPrettyPrinter("ndtrain")
    printers.add_printer("nd_tensor", "^nd_tensor$", Tensor)
    printers.add_printer("nd_matrix", "^nd_matrix$", Matrix)
    gdb.printing.register_pretty_printer(None, printers, replace=True)
    Fp8()


if __name__ == "__main__":
    register()
