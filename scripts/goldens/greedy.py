# SPDX-License-Identifier: Apache-2.0
"""Greedy texts of the whole-model goldens by transformers' generate, with its cache, in F32.

greedy.safetensors holds for each model NAME.<i>: the ids of a prompt and NEW more that transformers continues it with (I32). Prompts are
shorter and longer than the sliding windows. In each place the likeliest id leads by at least LEAD, so that another order of sums gives
the same text, and the new ids are at least DIFFERENT ones, since a model that repeats one id does so whatever attention sees. The models of LISTS are other ones with layers that no interval names.
"""
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from goldens import models

NEW, LEAD, DIFFERENT, TEXTS, TRIES = 20, 2e-3, 3, 3, 300
LISTS = {
    "ministral_lists": ("ministral", dict(layer_types=["full_attention", "sliding_attention", "sliding_attention"])),
    "smollm3_lists": ("smollm3", dict(no_rope_layers=[0, 1, 1])),
}


def build(name):
    base, changes = LISTS.get(name, (name, {}))
    model = models.build(base)
    if changes:
        config = AutoConfig.for_model(**(model.config.to_dict() | changes))
        other = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        other.load_state_dict(model.state_dict())
        model = other
    model.generation_config.eos_token_id = None
    return base, model.eval()


def text(model, prompt):
    """The prompt and what follows it; None where a lead is too small, or too few ids are different."""
    out = model.generate(prompt[None], do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW, use_cache=True, pad_token_id=0,
                         attention_mask=torch.ones_like(prompt[None]), output_logits=True, return_dict_in_generate=True)
    best = torch.stack(out.logits)[:, 0].topk(2).values
    leads = (best[:, 0] - best[:, 1]).min() > LEAD
    return out.sequences[0].int() if leads and len(out.sequences[0][-NEW:].unique()) >= DIFFERENT else None


def make(folder):
    tensors = {}
    for name in [n for n in models.MODELS if n != "documents"] + list(LISTS):
        base, model = build(name)
        # Phi's longrope changes its frequencies, and with them all keys, where a text grows beyond 32 tokens.
        sizes = (33, 35, 40) if name == "phi3_longrope" else (5, 14, 40)
        rows = torch.randint(0, models.MODELS[base]["vocab_size"], (TRIES, max(sizes)), generator=torch.Generator().manual_seed(3000))
        found = 0
        for row in rows:
            ids = text(model, row[:sizes[found]])
            if ids is not None:
                tensors[f"{name}.{found}"] = ids.contiguous()
                found += 1
            if found == TEXTS:
                break
        assert found == TEXTS, name
    save_file(tensors, folder / "greedy.safetensors")
