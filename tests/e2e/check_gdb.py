#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What scripts/gdb/ndtrain.py prints of tensors and FP8 codes of a program: check_gdb.py SOURCE_ROOT CC."""
import math
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from steps import call, check

PROGRAM = r"""
#include <stdio.h>
#include "kernels/ops.h"
#include "runtime/tensor/fp8.h"
static float numbers[12];
static nd_bf16 halves[3];
static uint8_t codes[4] = {0x38, 0xb8, 0x7e, 0x01};
nd_tensor view, bf16, fp8, none, elsewhere;
nd_matrix matrix;
float scale = 16;
void stop(void) {}
int main(void)
{
    for (int i = 0; i < 12; i++) numbers[i] = (float)i / 4;
    for (int i = 0; i < 3; i++) halves[i] = nd_bf16_from_f32(1.5f + (float)i);
    view = (nd_tensor){.data = numbers + 1, .axes = 2, .shape = {3, 2}, .stride = {4, 1}};
    bf16 = (nd_tensor){.data = halves, .dtype = ND_DTYPE_BF16, .axes = 1, .shape = {3}, .stride = {1}};
    fp8 = (nd_tensor){.data = codes, .dtype = ND_DTYPE_F8_E4M3, .axes = 2, .shape = {2, 2}, .stride = {2, 1}};
    elsewhere = (nd_tensor){.data = (void *)16, .axes = 1, .shape = {5}, .stride = {1}};
    matrix = (nd_matrix){.stored = fp8, .scale = &scale};
    for (int code = 0; code < 256; code++)
        printf("%d %.9g %.9g\n", code, nd_fp8_to_f32(ND_DTYPE_F8_E4M3, (uint8_t)code), nd_fp8_to_f32(ND_DTYPE_F8_E5M2, (uint8_t)code));
    fflush(stdout);
    stop();
    return 0;
}
"""


def main():
    source, compiler = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:]
    if not shutil.which("gdb"):
        sys.exit("gdb: it is not here; scripts/setup --tests installs it")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "t.c").write_text(PROGRAM)
        subprocess.run([*compiler, "-std=gnu17", "-g", "-O0", f"-I{source}", "t.c", "-lm", "-o", "t"],
                       cwd=folder, check=True)
        codes = "\n".join(f"printf \"{form} %d %.9g\\n\", {code}, $nd_fp8(\"{form}\", {code})" for form in ("e4m3", "e5m2") for code in range(256))
        (folder / "commands").write_text("set debuginfod enabled off\nbreak stop\nrun >values\n" +
                                         "".join(f"print {n}\n" for n in ("view", "bf16", "fp8", "none", "elsewhere", "matrix")) + codes + "\n")
        said = call(["gdb", "-nx", "-batch", "-ix", source / "scripts/gdb/ndtrain.py", "-x", "commands", "t"], cwd=folder)
        check((folder / "values").exists(), f"the program did not run under gdb:\n{said}")
        values = [line.split() for line in (folder / "values").read_text().splitlines()]
    printed = dict(re.findall(r"^\$(\d+) = (.*)$", said, re.M))
    for number, words in (("1", r"F32 \(3, 2\) at 0x[0-9a-f]+: 0\.25, 0\.5, 1\.25, 1\.5, 2\.25, 2\.5"),
                          ("2", r"BF16 \(3\) at 0x[0-9a-f]+: 1\.5, 2\.5, 3\.5"), ("3", r"F8_E4M3 \(2, 2\) at 0x[0-9a-f]+: 1, -1, 448, 0\.00195312"),
                          ("4", r"F32 \(\), no data"), ("5", r"F32 \(5\) at 0x10, which cannot be read here.*"),
                          ("6", r"F8_E4M3 \(2, 2\) at 0x[0-9a-f]+: 1, -1, 448, 0\.00195312; its first scale: 16")):
        check(re.fullmatch(words, printed.get(number, "")), f"{words} is not what gdb prints:\n{said[:3000]}")
    for column, form in ((1, "e4m3"), (2, "e5m2")):
        shown = re.findall(rf"^{form} (\d+) (\S+)$", said, re.M)
        check(len(shown) == len(values) == 256, f"{len(shown)} codes of {form} were printed")
        for (_, got), row in zip(shown, values):
            expected = float(row[column])
            check(float(got) == expected or math.isnan(expected) and math.isnan(float(got)), f"{form} code {row[0]} is {got}, not {expected}")
    print("gdb: all good")


if __name__ == "__main__":
    main()
