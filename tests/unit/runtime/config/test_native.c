// SPDX-License-Identifier: Apache-2.0
#include "support.h"

static const keys_case good[] = {
    {"launch: {workers: 4, device: cpu, grace_seconds: 2.5}\nmesh:\n  dp_shard: -1\n  tp: 2\n"
     "model:\n  path: some/folder\ndata: {validation_path: ~, tokenizer: bytes}\n"
     "train: {precision: FP32, steps: 7, seed: 9}\n"
     "optimizer: {betas: [0.8, 0.99], lr: 1e-3, schedule: 'wsd'}\n"
     "parallel: {reshard_after_forward: off, recompute: selective}\n"
     "fp8: {filter: [q_proj, \"o_proj\"]}\nlog: {level: debug}\noutput:\n",
     "launch.workers=4;launch.device=cpu;launch.grace_seconds=2.5;mesh.dp_shard=2;"
     "model.path=some/folder;model.config=;data.validation_path=;train.precision=fp32;"
     "train.steps=7;model.seed=9;data.shuffle_seed=9;optimizer.betas=[0.8, 0.99];"
     "optimizer.lr=0.001;optimizer.schedule=wsd;parallel.reshard_after_forward=false;"
     "parallel.recompute=selective;fp8.filter=q_proj,o_proj;log.level=debug",
     true},
    {"output:\n",
     "launch.workers=1;mesh.dp_shard=1;launch.nproc_per_node=1;"
     "model.config=configs/model-small.json;data.path=data/train.txt;"
     "data.validation_path=data/valid.txt",
     true},
    {"log:\n  trackers: [tensorboard, wandb]\n", "log.trackers=[tensorboard, wandb]"},
    {"log:\n  trackers:\n  - wandb\n  - tensorboard\n", "log.trackers=[tensorboard, wandb]"},
    {"log:\n  trackers: tensorboard, wandb\n", "log.trackers=[tensorboard, wandb]"},
    {"log:\n  trackers: \"tensorboard,wandb\"\n", "log.trackers=[tensorboard, wandb]"},
    {"log:\n  trackers: []\n", "log.trackers=none"},
    {"model: {path: '', config: b.json, name: ''}\n", "model.config=b.json", true},
};

Test(native, files_set_keys)
{
    nd_config c;
    expect_cases(good, sizeof good / sizeof *good, read_text);
    assert_ok(read_text(&c, good[0].input));
    cr_expect_str_eq(c.source, "test.yaml");
    cr_expect_not(c.from_accelerate);
    cr_expect_eq(c.log.level, ND_LOG_DEBUG, "members have the values of the keys");
    cr_expect(c.launch.workers == 4 && c.optimizer.betas[1] == 0.99 && c.fp8.filter[0] == 'q');
    nd_config_fini(&c);
}

Test(native, unknown_names_have_file_line_and_hint)
{
    expect_bad_text("train:\n  steps: 3\n  sequence_lenght: 9\n",
                    "test.yaml:3|train.sequence_lenght|did you mean train.sequence_length?");
    expect_bad_text("trian:\n  steps: 3\n", "test.yaml:1|'trian'|did you mean train?");
    expect_bad_text("train:\n  lr: 3\n", "test.yaml:2|did you mean optimizer.lr?");
    expect_bad_text("steps: 3\n", "test.yaml:1|belongs in a section: train.steps");
    expect_bad_text("mesh:\n  zzzzzz: 3\n",
                    "test.yaml:2|the keys of mesh are dp_replicate, dp_shard, cp, tp");
    expect_bad_text("qqqq:\n  a: 3\n", "test.yaml:1|the sections are launch, mesh");
    expect_bad_text("mesh:\n  pp: 2\n", "test.yaml:2|pipeline parallelism does not exist yet");
    expect_bad_text("checkpoint:\n  frequency: 3\n",
                    "test.yaml:2|checkpoint.frequency|keys of checkpoint are interval, keep_last");
    expect_bad_text("train: {steps: 1}\ntrain: {steps: 2}\n", "test.yaml:2|'train' is given twice");
    expect_bad_text("train:\n  steps: 1\n  steps: 2\n", "test.yaml:3|'steps' is given twice");
    expect_bad_text("train: [1, 2\n", "test.yaml:|broken YAML");
}

Test(native, wrong_types_name_key_value_and_want)
{
    expect_bad_text("train:\n  steps: many\n", "test.yaml:2|train.steps is 'many'|an integer");
    expect_bad_text("train:\n  steps: 1.5\n", "'1.5'|an integer");
    expect_bad_text("train:\n  steps: 0x10\n", "'0x10'|an integer");
    expect_bad_text("train:\n  steps: 99999999999999999999\n", "an integer");
    expect_bad_text("train:\n  steps: '7'\n", "'7' in quotes|an integer");
    expect_bad_text("train:\n  steps: [7]\n", "test.yaml:2|train.steps is a list");
    expect_bad_text("train:\n  steps: {a: 7}\n", "test.yaml:2|train.steps is a map");
    expect_bad_text("train:\n  steps:\n", "test.yaml:2|train.steps has no value");
    expect_bad_text("optimizer:\n  lr: fast\n", "optimizer.lr is 'fast'|a number");
    expect_bad_flags("--learning-rate 1e-3,2e-3", "is '1e-3,2e-3'|scripts/sweep");
    expect_bad_text("optimizer:\n  lr: nan\n", "a number");
    expect_bad_text("optimizer:\n  lr: 1e999\n", "a number");
    expect_bad_text("optimizer:\n  betas: 0.9\n", "optimizer.betas|two numbers");
    expect_bad_text("optimizer:\n  betas: [a, 0.9]\n", "'[a, 0.9]'|two numbers");
    expect_bad_text("optimizer:\n  betas: [0.9, 0.9, 0.9]\n", "two numbers");
    expect_bad_text("optimizer:\n  betas: [[0.9], 0.9]\n", "inside a list");
    expect_bad_text("parallel:\n  reshard_after_forward: 1\n", "true or false");
    expect_bad_text("parallel:\n  reshard_after_forward: maybe\n", "'maybe'|true or false");
    expect_bad_text("train: 5\n", "test.yaml:1|section train is a single value|a map of keys");
    expect_bad_text("- train\n", "test.yaml:1|the file is a list");
    expect_bad_text("model:\n  path: \"a\\tb\"\n", "test.yaml:2|model.path|control character");
}

Test(native, out_of_range_names_the_range)
{
    expect_bad_text("train:\n  steps: -1\n", "test.yaml:2|train.steps is -1|0 to 1000000000");
    expect_bad_text("train:\n  sequence_length: -4\n", "train.sequence_length is -4|1 to");
    expect_bad_text("train:\n  precision: fp16\n", "train.precision is fp16|bf16, fp32 or fp8");
    expect_bad_text("mesh:\n  tp: 0\n", "mesh.tp is 0");
    expect_bad_text("mesh:\n  tp: -1\n", "mesh.tp");
    expect_bad_text("mesh:\n  dp_shard: 0\n", "mesh.dp_shard is 0|-1, or 1 to");
    expect_bad_text("mesh:\n  dp_shard: -2\n", "mesh.dp_shard is -2");
    expect_bad_text("optimizer:\n  betas: [1, 0.9]\n", "optimizer.betas is [1, 0.9]");
    expect_bad_text("log:\n  level: loud\n", "log.level is loud|error, warning, info or debug");
    expect_bad_text("data:\n  special_in_text: keep\n",
                    "data.special_in_text is keep|text, parse or refuse");
}

Test(native, lists_of_choices)
{
    expect_bad_text("log:\n  trackers: [wandb, comet]\n",
                    "test.yaml:2|log.trackers is [wandb, comet], with \"comet\"");
    expect_bad_text("log:\n  trackers: [none, wandb]\n", "none goes with no other");
    expect_bad_text("log:\n  trackers: [[wandb]]\n", "holds a list inside a list");
    expect_bad_text("log:\n  trackers:\n", "log.trackers has no value");
    expect_bad_text("log:\n  trackers: {wandb: 1}\n", "log.trackers is a map");
}

Test(native, one_model)
{
    expect_bad_text("model: {path: a, config: b}\n",
                    "test.yaml|model.path is 'a'|model.config is 'b'");
    expect_bad_text("model: {config: ''}\n", "none of model.path");
}

Test(native, forms_are_not_mixed)
{
    expect_bad_text("distributed_type: FSDP\nmesh:\n  tp: 2\n",
                    "section mesh (line 2)|distributed_type (line 1)");
}

Test(native, file_errors)
{
    expect_bad_flags("--config-file /nonexistent/a.yaml", "/nonexistent/a.yaml");
    expect_bad_flags("--config-file", "--config-file needs a value");
    expect_bad_flags("--config-file=a --config-file=b", "given twice|a|b");
}
