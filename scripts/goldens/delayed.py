# SPDX-License-Identifier: Apache-2.0
"""Scales of delayed scaling over 30 steps, worked out from the formulas of Transformer Engine's DelayedScaling
(fmax / amax / 2^margin over a window of amaxes) with Python's own arithmetic: no library computes them.

One update per step, with the step's reduced amax a:
  a = 0            nothing moves: the scale and the window stay
  otherwise        the window gets a, and loses its oldest entry when it holds more than `length`
  most_recent      m = a
  max              m = the largest entry of the window; a NaN is ignored, an infinity is not
  m finite, > 0    scale = (fmax 2^-margin) / m, rounded to F32; when that overflows, the largest F32
  else             the old scale
The first scale is 1 and the first window holds zeros.
"""
import math
import random
import struct

import torch

STEPS = 30
FMAX = {"e4m3": 448.0, "e5m2": 57344.0}
LARGEST = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
INF, NAN = math.inf, math.nan
CASES = [(algorithm, length, margin, form) for algorithm in ("max", "most_recent") for length in (1, 4, 1024)
         for margin, form in ((0, "e4m3"), (0, "e5m2"), (2, "e4m3"))]


def to_f32(x):
    """Rounds a double to the nearest F32. A quotient of two F32 rounded to F64 first is not rounded twice wrongly."""
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(INF, x)


def sequences():
    """Six runs of 30 amaxes."""
    source = random.Random(11)
    smooth = [to_f32(2.0 * math.exp(-0.05 * t) * source.uniform(0.8, 1.25)) for t in range(STEPS)]

    def with_values(changes):
        return [changes.get(t, a) for t, a in enumerate(smooth)]

    return {
        "smooth": smooth,
        "zeros": with_values({0: 0.0, 1: 0.0, 7: 0.0, 8: 0.0, 9: 0.0, 10: 0.0, 11: 0.0, 20: 0.0, 29: 0.0}),
        "infinity": with_values({3: INF, 12: INF, 13: 0.0, 29: INF}),
        "nan": with_values({0: NAN, 5: NAN, 6: NAN, 7: NAN, 8: NAN, 9: NAN, 21: NAN}),
        "tiny": with_values({2: to_f32(1e-40), 3: to_f32(1e-45), 15: to_f32(1.2e-36), 16: to_f32(1e-40)} |
                            {t: to_f32(1e-39) for t in range(20, 26)}),
        "spikes": with_values({4: 3000.0, 14: to_f32(3.4e38), 24: 448.0}),
    }


def window_maximum(window):
    largest = 0.0
    for a in window:
        if a > largest:  # false for a NaN
            largest = a
    return largest


def scales(amaxes, algorithm, length, margin, form):
    """The scale after each update: what the next step uses."""
    scale, window, result = 1.0, [0.0] * length, []
    for a in amaxes:
        if a != 0.0:
            window = (window + [a])[-length:]
            m = a if algorithm == "most_recent" else window_maximum(window)
            if math.isfinite(m) and m > 0:
                scale = min(to_f32(FMAX[form] * 2.0 ** -margin / m), LARGEST)
        result.append(scale)
    return result


def tensors():
    runs = sequences()
    table = {f"amax.{name}": torch.tensor(values, dtype=torch.float32) for name, values in runs.items()}
    for case in CASES:
        algorithm, length, margin, form = case
        for name, values in runs.items():
            key = f"{algorithm}.{length}.margin{margin}.{form}.{name}"
            table[key] = torch.tensor(scales(values, *case), dtype=torch.float32)
    return table
