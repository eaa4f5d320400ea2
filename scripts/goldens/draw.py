# SPDX-License-Identifier: Apache-2.0
"""What tests/parity/golden_data.c computes with the same bits, so that it need not be stored: weights drawn from a seed, and sketches.

Random numbers are those of runtime/base/rng.h (Philox4x32-10).
"""
import json

import numpy
import torch

from goldens import write_json

SKETCH, SKETCH_SEED = 128, 77
MASK = numpy.uint64(0xFFFFFFFF)


def philox(seed, stream, count):
    """The blocks 0 .. count - 1 of a stream: (4, count) 32-bit words in 64 bits."""
    word = numpy.uint64
    c = [numpy.arange(count, dtype=word), numpy.zeros(count, word), numpy.full(count, stream, word), numpy.zeros(count, word)]
    k0, k1 = seed, 0
    for _ in range(10):
        p0, p1 = word(0xD2511F53) * c[0], word(0xCD9E8D57) * c[2]
        c = [(p1 >> word(32)) ^ c[1] ^ word(k0), p1 & MASK, (p0 >> word(32)) ^ c[3] ^ word(k1), p0 & MASK]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return numpy.stack(c)


def normal(seed, stream, count):
    """nd_rng_normal: near normal, of integer sums and one multiplication in F32."""
    words = philox(seed, stream, count)
    sums = ((words & numpy.uint64(0xFFFF)) + (words >> numpy.uint64(16))).sum(0).astype(numpy.int64)
    scale = numpy.float32(1) / numpy.float32(53509.92)
    return (2 * sums - 8 * 65535).astype(numpy.float32) * numpy.float32(0.5) * scale


def fill(model, seed, rule):
    """
    Draws a model's weights with the mean and the deviation that rule(name, tensor) gives, and keeps the table of them. A deviation is an F32
    number, so that its product with a draw is exact in F64, and fusing product and sum changes nothing.
    """
    model.drawn = dict(seed=seed, tensors={})
    with torch.no_grad():
        for stream, (name, p) in enumerate(sorted(model.named_parameters())):
            mean, deviation = rule(name, p)
            deviation = float(numpy.float32(deviation))
            values = mean + deviation * normal(seed, stream, p.numel()).astype(numpy.float64)
            p.copy_(torch.from_numpy(values.astype(numpy.float32)).view(p.shape))
            model.drawn["tensors"][name] = dict(stream=stream, shape=list(p.shape), mean=float(mean), deviation=deviation)
    return model


def save(model, folder):
    """config.json with the keys that transformers writes, and weights.json, from which model.safetensors can be drawn."""
    model.save_pretrained(folder)
    write_json(folder / "config.json", json.loads((folder / "config.json").read_text()))
    for name in ("generation_config.json", "model.safetensors"):
        (folder / name).unlink(missing_ok=True)
    (folder / "weights.json").write_text(json.dumps(model.drawn) + "\n")


def sketch(tensor):
    """
    SKETCH sums, to one of which each element is added with a sign, both drawn by its index. The sums of a difference have on average the
    square norm of the difference, whatever it is, to sqrt(2 / SKETCH) of it (a count sketch); that of a single element has just its size.
    """
    values = tensor.detach().double().flatten().numpy()
    words = philox(SKETCH_SEED, 0, len(values))
    signs = 1.0 - 2.0 * (words[1] >> numpy.uint64(31)).astype(numpy.float64)
    sums = numpy.bincount((words[0] % numpy.uint64(SKETCH)).astype(numpy.int64), signs * values, SKETCH)
    return torch.from_numpy(sums.astype(numpy.float32))
