// SPDX-License-Identifier: Apache-2.0
#include "support.h"

Test(native, every_kind_of_value)
{
    nd_config c;
    cr_assert_eq(read_text(&c, "launch: {workers: 4, device: cpu, grace_seconds: 2.5}\n"
                               "mesh:\n  dp_shard: -1\n  tp: 2\n"
                               "model:\n  path: some/folder\n"
                               "data: {validation_path: ~, tokenizer: bytes}\n"
                               "train: {precision: FP32, steps: 7, seed: 9}\n"
                               "optimizer: {betas: [0.8, 0.99], lr: 1e-3, schedule: wsd}\n"
                               "parallel: {reshard_after_forward: off, recompute: selective}\n"
                               "fp8: {filter: [q_proj, \"o_proj\"]}\n"
                               "log: {level: debug}\noutput:\n"),
                 ND_OK, "%s", nd_error_last()->message);
    cr_assert_eq(nd_config_resolve(&c), ND_OK, "%s", nd_error_last()->message);
    cr_expect_eq(c.launch.workers, 4);
    cr_expect_eq(c.launch.device, ND_CHOOSE_CPU);
    cr_expect_eq(c.launch.grace_seconds, 2.5);
    cr_expect_eq(c.resolved_mesh.size[ND_AXIS_DP_SHARD], 2);
    cr_expect_str_eq(c.model.path, "some/folder");
    cr_expect_str_eq(c.model.config, "", "a given path replaces the default config");
    cr_expect_str_eq(c.data.validation_path, "");
    cr_expect_eq(c.train.precision, ND_PRECISION_FP32);
    cr_expect_eq(c.train.steps, 7);
    cr_expect_eq(c.model.seed, 9, "seeds that are -1 follow train.seed");
    cr_expect_eq(c.data.shuffle_seed, 9);
    cr_expect_eq(c.optimizer.betas[0], 0.8);
    cr_expect_eq(c.optimizer.betas[1], 0.99);
    cr_expect_eq(c.optimizer.lr, 1e-3);
    cr_expect_eq(c.optimizer.schedule, ND_SCHEDULE_WSD);
    cr_expect_eq(c.parallel.reshard_after_forward, false);
    cr_expect_eq(c.parallel.recompute, ND_RECOMPUTE_SELECTIVE);
    cr_expect_str_eq(c.fp8.filter, "q_proj,o_proj");
    cr_expect_eq(c.log.level, ND_LOG_DEBUG);
    cr_expect_str_eq(c.source, "test.yaml");
    cr_expect_not(c.from_accelerate);
    nd_config_fini(&c);
}

Test(native, defaults)
{
    nd_config c;
    cr_assert_eq(nd_config_init(&c), ND_OK);
    cr_assert_eq(nd_config_resolve(&c), ND_OK, "%s", nd_error_last()->message);
    cr_expect_eq(c.launch.workers, 1);
    cr_expect_eq(c.mesh.dp_shard, 1);
    cr_expect_eq(c.launch.nproc_per_node, 1);
    cr_expect_str_eq(c.model.config, "configs/model-small.json");
    cr_expect_str_eq(c.data.path, "data/train.txt");
    cr_expect_str_eq(c.data.validation_path, "data/valid.txt");
    nd_config_fini(&c);
}

Test(native, unknown_names_have_file_line_and_hint)
{
    EXPECT_BAD_TEXT("train:\n  steps: 3\n  sequence_lenght: 9\n", "test.yaml:3",
                    "train.sequence_lenght", "did you mean train.sequence_length?");
    EXPECT_BAD_TEXT("trian:\n  steps: 3\n", "test.yaml:1", "'trian'", "did you mean train?");
    EXPECT_BAD_TEXT("train:\n  lr: 3\n", "test.yaml:2", "did you mean optimizer.lr?");
    EXPECT_BAD_TEXT("steps: 3\n", "test.yaml:1", "belongs in a section: train.steps");
    EXPECT_BAD_TEXT("mesh:\n  zzzzzz: 3\n", "test.yaml:2",
                    "the keys of mesh are dp_replicate, dp_shard, cp, tp");
    EXPECT_BAD_TEXT("qqqq:\n  a: 3\n", "test.yaml:1", "the sections are launch, mesh");
    EXPECT_BAD_TEXT("mesh:\n  pp: 2\n", "test.yaml:2", "pipeline parallelism does not exist yet");
    EXPECT_BAD_TEXT("checkpoint:\n  frequency: 3\n", "test.yaml:2", "checkpoint.frequency",
                    "keys of checkpoint are interval, keep_last");
    EXPECT_BAD_TEXT("train: {steps: 1}\ntrain: {steps: 2}\n", "test.yaml:2",
                    "'train' is given twice");
}

Test(native, wrong_types_name_key_value_and_want)
{
    EXPECT_BAD_TEXT("train:\n  steps: many\n", "test.yaml:2", "train.steps is 'many'",
                    "an integer");
    EXPECT_BAD_TEXT("train:\n  steps: 1.5\n", "'1.5'", "an integer");
    EXPECT_BAD_TEXT("train:\n  steps: 0x10\n", "'0x10'", "an integer");
    EXPECT_BAD_TEXT("train:\n  steps: 99999999999999999999\n", "an integer");
    EXPECT_BAD_TEXT("train:\n  steps: '7'\n", "'7' in quotes", "an integer");
    EXPECT_BAD_TEXT("train:\n  steps: [7]\n", "test.yaml:2", "train.steps is a list");
    EXPECT_BAD_TEXT("train:\n  steps: {a: 7}\n", "test.yaml:2", "train.steps is a map");
    EXPECT_BAD_TEXT("train:\n  steps:\n", "test.yaml:2", "train.steps has no value");
    EXPECT_BAD_TEXT("optimizer:\n  lr: fast\n", "optimizer.lr is 'fast'", "a number");
    EXPECT_BAD_FLAGS(("--learning-rate", "1e-3,2e-3"), "is '1e-3,2e-3'", "scripts/sweep");
    EXPECT_BAD_TEXT("optimizer:\n  lr: nan\n", "a number");
    EXPECT_BAD_TEXT("optimizer:\n  lr: 1e999\n", "a number");
    EXPECT_BAD_TEXT("optimizer:\n  betas: 0.9\n", "optimizer.betas", "two numbers");
    EXPECT_BAD_TEXT("optimizer:\n  betas: [0.9, 0.9, 0.9]\n", "two numbers");
    EXPECT_BAD_TEXT("optimizer:\n  betas: [[0.9], 0.9]\n", "inside a list");
    EXPECT_BAD_TEXT("parallel:\n  reshard_after_forward: 1\n", "true or false");
    EXPECT_BAD_TEXT("parallel:\n  reshard_after_forward: maybe\n", "'maybe'", "true or false");
    EXPECT_BAD_TEXT("train: 5\n", "test.yaml:1", "section train is a single value",
                    "a map of keys");
    EXPECT_BAD_TEXT("- train\n", "test.yaml:1", "the file is a list");
    EXPECT_BAD_TEXT("model:\n  path: \"a\\tb\"\n", "test.yaml:2", "model.path",
                    "control character");
}

Test(native, out_of_range_names_the_range)
{
    EXPECT_BAD_TEXT("train:\n  steps: -1\n", "test.yaml:2", "train.steps is -1", "0 to 1000000000");
    EXPECT_BAD_TEXT("train:\n  sequence_length: -4\n", "train.sequence_length is -4", "1 to");
    EXPECT_BAD_TEXT("train:\n  precision: fp16\n", "train.precision is fp16", "bf16, fp32 or fp8");
    EXPECT_BAD_TEXT("mesh:\n  tp: 0\n", "mesh.tp is 0");
    EXPECT_BAD_TEXT("mesh:\n  tp: -1\n", "mesh.tp");
    EXPECT_BAD_TEXT("mesh:\n  dp_shard: 0\n", "mesh.dp_shard is 0", "-1, or 1 to");
    EXPECT_BAD_TEXT("mesh:\n  dp_shard: -2\n", "mesh.dp_shard is -2");
    EXPECT_BAD_TEXT("optimizer:\n  betas: [1, 0.9]\n", "optimizer.betas is [1, 0.9]");
    EXPECT_BAD_TEXT("log:\n  level: loud\n", "log.level is loud", "error, warning, info or debug");
    EXPECT_BAD_TEXT("data:\n  special_in_text: keep\n", "data.special_in_text is keep",
                    "text, parse or refuse");
}

Test(native, lists_of_choices)
{
    static const char *const texts[] = {
        "log:\n  trackers: [tensorboard, wandb]\n",
        "log:\n  trackers:\n  - wandb\n  - tensorboard\n",
        "log:\n  trackers: tensorboard, wandb\n",
        "log:\n  trackers: \"tensorboard,wandb\"\n",
    };
    nd_config c;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        cr_assert_eq(read_text(&c, texts[i]), ND_OK, "%s", nd_error_last()->message);
        cr_expect_eq(c.log.trackers, 1U << ND_TRACKER_TENSORBOARD | 1U << ND_TRACKER_WANDB, "%s",
                     texts[i]);
        nd_config_fini(&c);
    }
    cr_assert_eq(read_text(&c, "log:\n  trackers: []\n"), ND_OK);
    cr_expect_eq(c.log.trackers, 0);
    nd_config_fini(&c);
    EXPECT_BAD_TEXT("log:\n  trackers: [wandb, comet]\n", "test.yaml:2",
                    "log.trackers is [wandb, comet], with \"comet\"");
    EXPECT_BAD_TEXT("log:\n  trackers: [none, wandb]\n", "none goes with no other");
    EXPECT_BAD_TEXT("log:\n  trackers: [[wandb]]\n", "holds a list inside a list");
    EXPECT_BAD_TEXT("log:\n  trackers:\n", "log.trackers has no value");
    EXPECT_BAD_TEXT("log:\n  trackers: {wandb: 1}\n", "log.trackers is a map");
}

Test(native, one_model)
{
    EXPECT_BAD_TEXT("model: {path: a, config: b}\n", "test.yaml", "model.path is 'a'",
                    "model.config is 'b'");
    EXPECT_BAD_TEXT("model: {config: ''}\n", "none of model.path");
    nd_config c;
    cr_assert_eq(read_text(&c, "model: {path: '', config: b.json, name: ''}\n"), ND_OK);
    cr_assert_eq(nd_config_resolve(&c), ND_OK);
    nd_config_fini(&c);
}

Test(native, forms_are_not_mixed)
{
    EXPECT_BAD_TEXT("distributed_type: FSDP\nmesh:\n  tp: 2\n", "section mesh (line 2)",
                    "distributed_type (line 1)");
}

Test(native, file_errors)
{
    EXPECT_BAD_FLAGS(("--config-file", "/nonexistent/a.yaml"), "/nonexistent/a.yaml");
    EXPECT_BAD_FLAGS(("--config-file"), "--config-file needs a value");
    EXPECT_BAD_FLAGS(("--config-file=a", "--config-file=b"), "given twice", "a", "b");
}
