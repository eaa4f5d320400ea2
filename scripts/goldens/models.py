# SPDX-License-Identifier: Apache-2.0
"""Whole-model goldens: transformers' models in F32 and BF16, and twelve AdamW steps.

A golden folder holds
  config.json, weights.json   the model before training: its weights are drawn (draw.py)
  golden.safetensors          input_ids, labels (steps, B, S) I8, and position_ids where documents are separate;
                              grad.<name>: gradients of step 1, not clipped; final.<name>: weights after the last step.
                              Of both sketches, from which a distance is told about as well as from all elements
  golden.json                 losses, gradient norms, hyper-parameters, distances of the BF16 run

Labels are those of the next token already (labels[i] belongs to input i); -100 is not counted. The loss is the mean
over counted labels.
"""
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from goldens import draw, write_json

transformers.utils.logging.disable_progress_bar()
STEPS, BATCH, SEQUENCE = 12, 2, 48
OPTIMIZER = dict(lr=2e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, max_grad_norm=1.0)

MODELS = {
    # Llama 2: as many KV heads as heads, plain RoPE, head of its own.
    "llama2": dict(vocab_size=96, hidden_size=32, intermediate_size=88, num_hidden_layers=2,
                   num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256,
                   rms_norm_eps=1e-5, tie_word_embeddings=False,
                   rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
    # Llama 3: grouped heads, heads wider than hidden / heads, scaled RoPE. With 64 original positions the wavelengths
    # 6.3, 32.4 and 167 to 6.0e5 fall into the kept (< 16), the smoothed (16 to 64) and the slowed band.
    "llama3": dict(vocab_size=128, hidden_size=32, intermediate_size=96, num_hidden_layers=2,
                   num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
                   rms_norm_eps=1e-5, tie_word_embeddings=False,
                   rope_parameters=dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
                                        high_freq_factor=4.0, original_max_position_embeddings=64)),
    # One tensor for embedding and head; sizes that no power of two divides.
    "tied": dict(vocab_size=97, hidden_size=48, intermediate_size=75, num_hidden_layers=3,
                 num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=256,
                 rms_norm_eps=1e-6, tie_word_embeddings=True,
                 rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
    # Biases of every linear.
    "llama_bias": dict(vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                       num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                       rms_norm_eps=1e-6, tie_word_embeddings=True, attention_bias=True, mlp_bias=True,
                       rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
    "qwen2": dict(model_type="qwen2", vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                  num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                  rms_norm_eps=1e-6, tie_word_embeddings=True,
                  rope_parameters=dict(rope_type="default", rope_theta=1000000.0)),
    # Heads that are normed, wider than hidden / heads.
    "qwen3": dict(model_type="qwen3", vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                  num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
                  rms_norm_eps=1e-6, tie_word_embeddings=False,
                  rope_parameters=dict(rope_type="default", rope_theta=1000000.0)),
    "seed_oss": dict(model_type="seed_oss", vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
                     rms_norm_eps=1e-6, tie_word_embeddings=False, attention_dropout=0.0, residual_dropout=0.0,
                     rope_parameters=dict(rope_type="default", rope_theta=1000000.0)),
    # One tensor for q k v and one for gate and up; RoPE of three quarters of a head.
    "phi3": dict(model_type="phi3", vocab_size=80, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                 num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, original_max_position_embeddings=256,
                 rms_norm_eps=1e-5, tie_word_embeddings=False, pad_token_id=None,
                 rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.75)),
    # RoPE whose pairs are kept, between and slowed, with larger cosines and sines; and one with its own range.
    "qwen2_yarn": dict(model_type="qwen2", vocab_size=80, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                       num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256,
                       rms_norm_eps=1e-6, tie_word_embeddings=True,
                       rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0,
                                            original_max_position_embeddings=64)),
    "mistral_yarn": dict(model_type="mistral", vocab_size=80, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, sliding_window=None,
                         rms_norm_eps=1e-6, tie_word_embeddings=True,
                         rope_parameters=dict(rope_type="yarn", rope_theta=1000.0, factor=8.0, beta_fast=16.0, beta_slow=2.0,
                                              mscale=1.0, mscale_all_dim=0.5, truncate=False,
                                              original_max_position_embeddings=64)),
    # Sliding windows: in all layers, in all but every second one, from the second one on.
    "mistral": dict(model_type="mistral", vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, sliding_window=11,
                    rms_norm_eps=1e-5, tie_word_embeddings=False,
                    rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
    "ministral": dict(model_type="ministral", vocab_size=80, hidden_size=32, intermediate_size=32, num_hidden_layers=3,
                      num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256, sliding_window=17,
                      layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                      rms_norm_eps=1e-5, tie_word_embeddings=True,
                      rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
    "qwen3_window": dict(model_type="qwen3", vocab_size=80, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
                         rms_norm_eps=1e-6, tie_word_embeddings=True, use_sliding_window=True, sliding_window=9,
                         max_window_layers=1, rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
    # Four multipliers, none of them a power of two. Embeddings so small that a text depends on attention.
    "granite": dict(model_type="granite", vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                    rms_norm_eps=1e-5, tie_word_embeddings=False, embedding_multiplier=0.7, residual_multiplier=0.22,
                    attention_multiplier=0.3, logits_scaling=6.0, rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
    # Each second layer without RoPE.
    "smollm3": dict(model_type="smollm3", vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
                    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, no_rope_layer_interval=2,
                    rms_norm_eps=1e-6, pad_token_id=None, rope_parameters=dict(rope_type="default", rope_theta=2000000.0)),
    # Separate documents, each of which ends with id 2.
    "documents": dict(vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                      rms_norm_eps=1e-5, tie_word_embeddings=False,
                      rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
    # A frequency for each pair; the sequence is longer than the original positions.
    "phi3_longrope": dict(model_type="phi3", vocab_size=80, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                          num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
                          original_max_position_embeddings=32, rms_norm_eps=1e-5, tie_word_embeddings=True, pad_token_id=None,
                          rope_parameters=dict(rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.75,
                                               short_factor=[1.0, 1.05, 1.1, 1.2, 1.3, 1.5],
                                               long_factor=[1.0, 1.5, 2.0, 4.0, 6.5, 9.0])),
    # Queries grow with their position: behind 16 and behind 32.
    "ministral3": dict(model_type="ministral3", vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                       num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
                       rms_norm_eps=1e-5, tie_word_embeddings=True, pad_token_id=None,
                       rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0,
                                            mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.4,
                                            original_max_position_embeddings=16, max_position_embeddings=64)),
    # Norms behind attention and MLP, and of q and k over all heads.
    "olmo2": dict(model_type="olmo2", vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                  num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5,
                  tie_word_embeddings=True, pad_token_id=None, rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
    # Like olmo2, with windows in all but each third layer, which alone has yarn, with another theta.
    "olmo3": dict(model_type="olmo3", vocab_size=80, hidden_size=32, intermediate_size=32, num_hidden_layers=3,
                  num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5, sliding_window=11,
                  layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                  tie_word_embeddings=True, pad_token_id=None,
                  rope_parameters=dict(full_attention=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0,
                                                           original_max_position_embeddings=64),
                                       sliding_attention=dict(rope_type="default", rope_theta=500.0))),
    # Norms behind attention and MLP, of heads of q and k; each second layer without a window, and without RoPE.
    "exaone4": dict(model_type="exaone4", vocab_size=80, hidden_size=32, intermediate_size=32, num_hidden_layers=3,
                    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256, rms_norm_eps=1e-5, sliding_window=11,
                    sliding_window_pattern=2, tie_word_embeddings=True,
                    rope_parameters=dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0,
                                         high_freq_factor=4.0, original_max_position_embeddings=64)),
    # Norms before and behind attention and MLP; RoPE of adjacent elements of the first half of a head; gate and up as one tensor.
    "glm4": dict(model_type="glm4", vocab_size=80, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256, rms_norm_eps=1e-5,
                 tie_word_embeddings=False, pad_token_id=None,
                 rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)),
    # Norms before and behind that multiply by 1 + w, also of heads; GELU; embeddings and scores with scales of their own;
    # one KV head; RoPE of the layer with a window has another theta, and that of the other layer a factor.
    "gemma3": dict(model_type="gemma3_text", vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                   num_attention_heads=4, num_key_value_heads=1, head_dim=8, max_position_embeddings=256, rms_norm_eps=1e-6,
                   sliding_window=11, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=12,
                   tie_word_embeddings=True, pad_token_id=None,
                   rope_parameters=dict(full_attention=dict(rope_type="linear", rope_theta=10000.0, factor=2.0),
                                        sliding_attention=dict(rope_type="default", rope_theta=500.0))),
}

# The seeds of weights and data: a model keeps its own when another one is added.
SEEDS = dict(llama2=0, llama3=1, tied=2, llama_bias=3, qwen2=4, qwen3=5, seed_oss=6, phi3=7, qwen2_yarn=7, mistral_yarn=8, mistral=7,
             ministral=8, qwen3_window=9, granite=10, smollm3=11, documents=12, phi3_longrope=12,
             ministral3=13, olmo2=14, olmo3=15, exaone4=17, glm4=18, gemma3=20)


def build(name):
    """A model whose weights are large enough that no part of it is near linear: std 1 / sqrt(fan in), norms not 1, biases not 0."""
    sizes = dict(MODELS[name])
    config = AutoConfig.for_model(sizes.pop("model_type", "llama"), use_cache=False, bos_token_id=1, eos_token_id=2, **sizes)
    packed = name == "documents"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa" if packed else "eager")
    model.packed = packed
    return draw.fill(model, 1000 + SEEDS[name], rule)


def rule(name, p):
    """Mean and deviation of a weight."""
    if name.endswith(".bias"):
        return 0.0, 0.5
    if p.dim() == 1:
        return 1.0, 0.2
    return 0.0, 0.3 if "embed_tokens" in name else p.shape[1] ** -0.5


def make_data(name):
    """A stream that can be learned in part, next = 5 t + 3 + noise; a prompt and scattered labels are not counted."""
    vocab = MODELS[name]["vocab_size"]
    generator = torch.Generator().manual_seed(2000 + SEEDS[name])

    def draw(steps):
        shape = (steps, BATCH)
        tokens = [torch.randint(0, vocab, shape, generator=generator)]
        for _ in range(SEQUENCE):
            tokens.append((5 * tokens[-1] + 3 + torch.randint(0, 3, shape, generator=generator)) % vocab)
        tokens = torch.stack(tokens, dim=2)  # (steps, B, S + 1)
        if name == "documents":
            tokens[torch.rand(tokens.shape, generator=generator) < 0.12] = 2
        labels = tokens[:, :, 1:].clone()
        if name == "documents":
            labels[tokens[:, :, :-1] == 2] = -100
        labels[torch.rand(labels.shape, generator=generator) < 0.1] = -100
        labels[:, 1, :17] = -100
        return tokens[:, :, :-1], labels

    return (torch.cat(parts).contiguous() for parts in zip(draw(10), draw(STEPS - 10)))


def to_bfloat16(model):
    """model.to(bfloat16) with the rotary frequencies left in F32, as a model loaded in BF16 has them."""
    rope = model.model.rotary_emb
    frequencies = {name: b.clone() for name, b in rope.named_buffers() if name.endswith("inv_freq") and "original" not in name}
    model = model.to(torch.bfloat16)
    for name, values in frequencies.items():
        setattr(rope, name, values)
    return model


def positions_of(ids):
    """Positions that begin at 0 behind each id 2, from which transformers makes the mask of packed documents."""
    positions = torch.zeros_like(ids)
    for i in range(1, ids.shape[-1]):
        positions[..., i] = torch.where(ids[..., i - 1] == 2, 0, positions[..., i - 1] + 1)
    return positions


def loss_of(model, ids, labels):
    logits = model(input_ids=ids, position_ids=positions_of(ids) if model.packed else None).logits.float()
    return torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=-100)


def check_separate(model, ids):
    """The first token of a block changes nothing behind the first document, or the golden would be that of joined ones."""
    other = ids.clone()
    other[:, 0] = (other[:, 0] + 1) % 2 + 3
    positions = positions_of(ids)
    with torch.no_grad():
        a, b = (model(input_ids=x, position_ids=positions).logits for x in (ids, other))
    behind = (positions == 0).cumsum(-1) > 1
    assert torch.equal(a[behind], b[behind]) and not torch.equal(a, b)


def gradients(model, ids, labels):
    model.zero_grad()
    loss = loss_of(model, ids, labels)
    loss.backward()
    return loss.item(), {key: p.grad.detach().float().clone() for key, p in model.named_parameters()}


def train(model, ids, labels):
    """AdamW with decay on matrices only and clipping by the global norm; losses and norms before clipping."""
    o = OPTIMIZER
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [dict(params=matrices, weight_decay=o["weight_decay"]), dict(params=vectors, weight_decay=0.0)],
        lr=o["lr"], betas=(o["beta1"], o["beta2"]), eps=o["eps"], foreach=False)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, ids[step], labels[step])
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), o["max_grad_norm"], foreach=False).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def relative_l2(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def bfloat16_distances(name, ids, labels):
    """The same model's loss in BF16 in step 1's batch, and how far each gradient there is from F32 (relative L2)."""
    _, exact = gradients(build(name), ids, labels)
    loss, rounded = gradients(to_bfloat16(build(name)), ids, labels)
    return dict(loss=loss, gradient_relative_l2={key: relative_l2(rounded[key], exact[key]) for key in exact})


def make(name, folder):
    ids, labels = make_data(name)
    model = build(name)
    draw.save(model, folder)
    loss, grads = gradients(model, ids[0], labels[0])
    losses, norms = train(model, ids, labels)
    assert losses[0] == loss
    tensors = dict(input_ids=ids.to(torch.int8), labels=labels.to(torch.int8))
    if model.packed:
        tensors["position_ids"] = positions_of(ids).to(torch.int8)
        check_separate(model, ids[0])
    tensors |= {f"grad.{key}": draw.sketch(value) for key, value in grads.items()}
    tensors |= {f"final.{key}": draw.sketch(p) for key, p in model.named_parameters()}
    save_file(tensors, folder / "golden.safetensors")
    record = dict(
        versions=dict(torch=torch.__version__, transformers=transformers.__version__),
        steps=STEPS, batch=BATCH, sequence=SEQUENCE, optimizer=OPTIMIZER,
        loss=loss, losses=losses, grad_norms=norms, bf16=bfloat16_distances(name, ids[0], labels[0]))
    write_json(folder / "golden.json", record)
