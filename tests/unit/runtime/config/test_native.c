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
    {"fp8:\n  filter: \"[qk]_proj,*.[12]\"\n", "fp8.filter=[qk]_proj,*.[12]"},
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

static const char *const refused[][2] = {
    /* Names that are not known have file, line and hint. */
    {"train:\n  steps: 3\n  sequence_lenght: 9\n",
     "test.yaml:3|train.sequence_lenght|did you mean train.sequence_length?"},
    {"trian:\n  steps: 3\n", "test.yaml:1|'trian'|did you mean train?"},
    {"train:\n  lr: 3\n", "test.yaml:2|did you mean optimizer.lr?"},
    {"steps: 3\n", "test.yaml:1|belongs in a section: train.steps"},
    {"mesh:\n  zzzzzz: 3\n", "test.yaml:2|the keys of mesh are dp_replicate, dp_shard, cp, tp"},
    {"qqqq:\n  a: 3\n", "test.yaml:1|the sections are launch, mesh"},
    {"mesh:\n  pp: 2\n", "test.yaml:2|pipeline parallelism does not exist yet"},
    {"checkpoint:\n  frequency: 3\n",
     "test.yaml:2|checkpoint.frequency|keys of checkpoint are interval, keep_last"},
    {"train: {steps: 1}\ntrain: {steps: 2}\n", "test.yaml:2|'train' is given twice"},
    {"train:\n  steps: 1\n  steps: 2\n", "test.yaml:3|'steps' is given twice"},
    {"train: [1, 2\n", "test.yaml:|broken YAML"},
    /* Wrong types: key, value, and what is wanted. */
    {"train:\n  steps: many\n", "test.yaml:2|train.steps is 'many'|an integer"},
    {"train:\n  steps: 1.5\n", "'1.5'|an integer"},
    {"train:\n  steps: 0x10\n", "'0x10'|an integer"},
    {"train:\n  steps: 99999999999999999999\n", "an integer"},
    {"train:\n  steps: '7'\n", "'7' in quotes|an integer"},
    {"train:\n  steps: [7]\n", "test.yaml:2|train.steps is a list"},
    {"train:\n  steps: {a: 7}\n", "test.yaml:2|train.steps is a map"},
    {"train:\n  steps:\n", "test.yaml:2|train.steps has no value"},
    {"optimizer:\n  lr: fast\n", "optimizer.lr is 'fast'|a number"},
    {"optimizer:\n  lr: nan\n", "a number"},
    {"optimizer:\n  lr: 1e999\n", "a number"},
    {"optimizer:\n  betas: 0.9\n", "optimizer.betas|two numbers"},
    {"optimizer:\n  betas: [a, 0.9]\n", "'[a, 0.9]'|two numbers"},
    {"optimizer:\n  betas: [0.9, 0.9, 0.9]\n", "two numbers"},
    {"optimizer:\n  betas: [[0.9], 0.9]\n", "inside a list"},
    {"parallel:\n  reshard_after_forward: 1\n", "true or false"},
    {"parallel:\n  reshard_after_forward: maybe\n", "'maybe'|true or false"},
    {"train: 5\n", "test.yaml:1|section train is a single value|a map of keys"},
    {"- train\n", "test.yaml:1|the file is a list"},
    {"model:\n  path: \"a\\tb\"\n", "test.yaml:2|model.path|control character"},
    /* Values out of range: the range. */
    {"train:\n  steps: -1\n", "test.yaml:2|train.steps is -1|0 to 1000000000"},
    {"train:\n  sequence_length: -4\n", "train.sequence_length is -4|1 to"},
    {"train:\n  precision: fp16\n", "train.precision is fp16|bf16, fp32 or fp8"},
    {"mesh:\n  tp: 0\n", "mesh.tp is 0"},
    {"mesh:\n  tp: -1\n", "mesh.tp"},
    {"mesh:\n  dp_shard: 0\n", "mesh.dp_shard is 0|-1, or 1 to"},
    {"mesh:\n  dp_shard: -2\n", "mesh.dp_shard is -2"},
    {"optimizer:\n  betas: [1, 0.9]\n", "optimizer.betas is [1, 0.9]"},
    {"log:\n  level: loud\n", "log.level is loud|error, warning, info or debug"},
    {"data:\n  special_in_text: keep\n", "data.special_in_text is keep|text, parse or refuse"},
    /* Lists of choices. */
    {"log:\n  trackers: [wandb, comet]\n",
     "test.yaml:2|log.trackers is [wandb, comet], with \"comet\""},
    {"log:\n  trackers: [none, wandb]\n", "none goes with no other"},
    {"log:\n  trackers: [[wandb]]\n", "holds a list inside a list"},
    {"log:\n  trackers:\n", "log.trackers has no value"},
    {"log:\n  trackers: {wandb: 1}\n", "log.trackers is a map"},
    /* One model. */
    {"model: {path: a, config: b}\n", "test.yaml|model.path is 'a'|model.config is 'b'"},
    {"model: {config: ''}\n", "none of model.path"},
    /* Forms are not mixed. */
    {"distributed_type: FSDP\nmesh:\n  tp: 2\n", "section mesh (line 2)|distributed_type (line 1)"},
};

Test(native, what_is_wrong_in_a_file_is_named)
{
    expect_refusals(refused, sizeof refused / sizeof *refused, read_text);
    expect_bad_flags("--learning-rate 1e-3,2e-3", "is '1e-3,2e-3'|scripts/sweep");
}

Test(native, file_errors)
{
    expect_bad_flags("--config-file /nonexistent/a.yaml", "/nonexistent/a.yaml");
    expect_bad_flags("--config-file", "--config-file needs a value");
    expect_bad_flags("--config-file=a --config-file=b", "given twice|a|b");
}
