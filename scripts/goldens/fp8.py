# SPDX-License-Identifier: Apache-2.0
"""FP8 goldens: torchao's Float8Linear with emulate=True, and a table of delayed scales.

  casts.safetensors    e4m3.bf16, e5m2.bf16: the codes of all BF16 values in the order of their bits (U8), saturating, one for each
                       run of equal ones; e4m3.runs, e5m2.runs: the bits where each run begins (I32);
                       f32.values, e4m3.f32, e5m2.f32: F32 values (halfway cases and the values next to them, random bits);
                       scale.amax, scale.<format>, scale.<format>.pow2: torchao's scale of an amax
  linear.safetensors   x (M, K), w (N, K), dy (M, N) BF16, and for each recipe <recipe>.y, .dx, .dw (BF16) and each cast
                       operand's .codes (U8) and .scale (F32): x, w for y; dy, w_dx for dx; dy_dw, x_dw for dw;
                       master.*: an F32 weight cast directly
  delayed.safetensors  delayed.py
  model/, qwen3/       a 4-layer Llama, and a Qwen3 with tensorwise alone; the data, and for bf16 and each recipe the losses and
                       gradient norms of ten AdamW steps
"""
import torch
import torchao
import torchao.float8.float8_linear as float8_linear
import transformers
from safetensors.torch import save_file
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated
from transformers import AutoConfig, AutoModelForCausalLM

from goldens import delayed, draw, write_json
from goldens.models import loss_of, to_bfloat16

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
MODEL = dict(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5, tie_word_embeddings=False,
             rope_parameters=dict(rope_type="default", rope_theta=10000.0))
MODELS = {"model": dict(model_type="llama", **MODEL), "qwen3": dict(model_type="qwen3", head_dim=16, **MODEL)}
STEPS, BATCH, SEQUENCE = 10, 4, 64
OPTIMIZER = dict(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, max_grad_norm=1.0)


def recipe_config(recipe):
    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    return config


def codes(t):
    return t.contiguous().view(torch.uint8)


def f32_values():
    """Around every value and every midpoint of both formats, then random bits; NaNs are left to the BF16 table."""
    points = []
    for form in FORMATS.values():
        grid = torch.arange(128, dtype=torch.uint8).view(form).float()
        grid = grid[torch.isfinite(grid)]
        points += [grid, (grid[1:] + grid[:-1]) / 2]
    points = torch.cat(points + [torch.tensor([448.0, 464.0, 480.0, 57344.0, 61440.0, 65536.0, 3.4e38, torch.inf])])
    points = torch.cat([points, torch.nextafter(points, torch.tensor(torch.inf)),
                        torch.nextafter(points, torch.tensor(-torch.inf))])
    generator = torch.Generator().manual_seed(21)
    bits = torch.randint(-2**31, 2**31, (2048,), generator=generator).int().view(torch.float32)
    scaled = torch.randn(2048, generator=generator) * 2.0 ** torch.randint(-18, 12, (2048,), generator=generator)
    values = torch.cat([points, -points, bits, scaled])
    return values[~torch.isnan(values)]


def casts():
    every = torch.arange(-2**15, 2**15).short().roll(2**15).view(torch.bfloat16)
    values = f32_values()
    amax = torch.tensor([0.0, 1e-45, 1e-38, 1e-13, 9.9e-13, 1e-12, 1.1e-12, 1e-6, 0.1, 0.3, 0.4375, 0.5, 1.0, 3.0, 7.0,
                         447.9, 448.0, 449.0, 57344.0, 1e30, 3.4e38, torch.inf, torch.nan])
    # Scales just below, at and just above a power of two: torchao's floor(log2 scale) rounds log2 to F32 first, so
    # that most scales one unit below a power of two become that power.
    powers = 448.0 * 2.0 ** torch.arange(-20, 21)
    amax = torch.cat([amax, torch.rand(200, generator=torch.Generator().manual_seed(22)) * 20, powers,
                      torch.nextafter(powers, torch.tensor(torch.inf)), torch.nextafter(powers, torch.tensor(0.0))])
    tensors = {"f32.values": values, "scale.amax": amax}
    for name, form in FORMATS.items():
        of_all = codes(to_fp8_saturated(every.float(), form))
        begins = torch.cat([torch.tensor([0]), (of_all[1:] != of_all[:-1]).nonzero().flatten() + 1])
        tensors |= {f"{name}.bf16": of_all[begins], f"{name}.runs": begins.int()}
        tensors[f"{name}.f32"] = codes(to_fp8_saturated(values.clone(), form))
        tensors[f"scale.{name}"] = amax_to_scale(amax, form)
        tensors[f"scale.{name}.pow2"] = amax_to_scale(amax, form, round_scales_to_power_of_2=True)
    return tensors


def run_recorded(linear, x, dy):
    """Forward and backward; also every operand that torchao cast, in its order: x, w, dy, w_dx, dy_dw, x_dw."""
    recorded, original = [], float8_linear.hp_tensor_to_float8_dynamic

    def record(*arguments, **options):
        recorded.append(original(*arguments, **options))
        return recorded[-1]

    float8_linear.hp_tensor_to_float8_dynamic = record
    try:
        y = linear(x)
        y.backward(dy)
    finally:
        float8_linear.hp_tensor_to_float8_dynamic = original
    return y.detach(), recorded


def linears():
    m, k, n = 32, 48, 64
    generator = torch.Generator().manual_seed(23)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    # Tokens and channels of unlike size, one token of zeros, one outlier: what the granularities differ on.
    x = normal(m, k) * torch.exp(normal(m, 1)) * torch.exp(0.5 * normal(1, k))
    x[5], x[9, 7] = 0, 300.0
    master = normal(n, k) * k ** -0.5 * torch.exp(0.5 * normal(n, 1))
    dy = normal(m, n) * 1e-4 * torch.exp(normal(m, 1))
    x, w, dy = x.bfloat16(), master.bfloat16(), dy.bfloat16()
    tensors = dict(x=x, w=w, dy=dy)
    for recipe in RECIPES:
        linear = torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
        with torch.no_grad():
            linear.weight.copy_(w)
        linear = float8_linear.Float8Linear.from_float(linear, recipe_config(recipe))
        leaf = x.clone().requires_grad_()
        y, operands = run_recorded(linear, leaf, dy)
        tensors |= {f"{recipe}.y": y, f"{recipe}.dx": leaf.grad, f"{recipe}.dw": linear.weight.grad}
        for name, operand in zip(("x", "w", "dy", "w_dx", "dy_dw", "x_dw"), operands):
            data = operand._data.t() if name.startswith("w") else operand._data
            tensors[f"{recipe}.{name}.codes"] = codes(data)
            tensors[f"{recipe}.{name}.scale"] = operand._scale.reshape(-1)
    scale = amax_to_scale(master.abs().max(), torch.float8_e4m3fn)
    tensors |= {"master.w": master, "master.scale": scale.reshape(1),
                "master.codes": codes(to_fp8_saturated(master * scale, torch.float8_e4m3fn))}
    return {key: value.contiguous() for key, value in tensors.items()}


def build_model(name):
    config = AutoConfig.for_model(use_cache=False, bos_token_id=1, eos_token_id=2, **MODELS[name])
    model = AutoModelForCausalLM.from_config(config)
    model.packed = False
    return draw.fill(model, 24, rule)


def rule(name, p):
    """Mean and deviation of a weight."""
    if p.dim() == 1:
        return 1.0, 0.1
    return 0.0, 0.3 if "embed" in name else 0.5 * p.shape[1] ** -0.5


def make_data():
    generator = torch.Generator().manual_seed(25)
    vocab, shape = MODEL["vocab_size"], (STEPS, BATCH)
    tokens = [torch.randint(0, vocab, shape, generator=generator)]
    for _ in range(SEQUENCE):
        tokens.append((5 * tokens[-1] + 3 + torch.randint(0, 3, shape, generator=generator)) % vocab)
    tokens = torch.stack(tokens, dim=2)
    return tokens[:, :, :-1].contiguous(), tokens[:, :, 1:].contiguous()


def build_rounded(name, recipe):
    """The model in BF16, its linears but the first and the last converted; and its F32 master weights."""
    model = to_bfloat16(build_model(name))
    if recipe != "bf16":
        names = [linear for linear, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
        convert_to_float8_training(model, config=recipe_config(recipe),
                                   module_filter_fn=lambda _, linear: linear not in (names[0], names[-1]))
    return model, dict(build_model(name).named_parameters())


def train(name, recipe, ids, labels):
    """Each step computes with BF16 copies of the master weights, which AdamW updates in F32."""
    model, master = build_rounded(name, recipe)
    o = OPTIMIZER
    optimizer = torch.optim.AdamW(
        [dict(params=[p for p in master.values() if p.dim() == 2], weight_decay=o["weight_decay"]),
         dict(params=[p for p in master.values() if p.dim() == 1], weight_decay=0.0)],
        lr=o["lr"], betas=(o["beta1"], o["beta2"]), eps=o["eps"], foreach=False)
    losses, norms = [], []
    for step in range(STEPS):
        with torch.no_grad():
            for key, p in model.named_parameters():
                p.copy_(master[key])
        model.zero_grad()
        loss = loss_of(model, ids[step], labels[step])
        loss.backward()
        for key, p in model.named_parameters():
            master[key].grad = p.grad.float()
        norms.append(torch.nn.utils.clip_grad_norm_(master.values(), o["max_grad_norm"], foreach=False).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def make_model(name, folder):
    folder.mkdir(exist_ok=True)
    draw.save(build_model(name), folder)
    ids, labels = make_data()
    save_file(dict(input_ids=ids.to(torch.int8), labels=labels.to(torch.int8)), folder / "golden.safetensors")
    record = dict(versions=dict(torch=torch.__version__, transformers=transformers.__version__,
                                torchao=torchao.__version__),
                  steps=STEPS, batch=BATCH, sequence=SEQUENCE, optimizer=OPTIMIZER, losses={}, grad_norms={})
    for recipe in ("bf16", *(RECIPES if name == "model" else RECIPES[:1])):
        record["losses"][recipe], record["grad_norms"][recipe] = train(name, recipe, ids, labels)
    write_json(folder / "golden.json", record)


def make(folder):
    save_file(casts(), folder / "casts.safetensors")
    save_file(linears(), folder / "linear.safetensors")
    save_file(delayed.tensors(), folder / "delayed.safetensors")
    for name in MODELS:
        make_model(name, folder / name)
