// SPDX-License-Identifier: Apache-2.0
/* accelerate's own configuration files, as they are, through --config-file: three steps of a tiny
 * model. */
#include <criterion/criterion.h>
#include <string.h>

#include "tests/support/inputs.h"
#include "tests/support/shell.h"

static tempdir dir;

static void setup(void)
{
    inputs_write_text(&dir, 8000);
    inputs_write_model(&dir, 32, 72, 2);
}

TEMPDIR_SUITE(accelerate, setup, .timeout = 120);

/* The file says workers, mesh, precision and recompute; flags say model, data and length, which it
 * has no keys for. */
static void trains(const char *file, const char *mesh, const char *recompute)
{
    shell(&dir, shell_line(ND_LAUNCH " --config-file " ND_FIXTURES
                                     "/%s --device cpu --model-config model.json "
                                     "--data-path text.txt --sequence-length 64 --num-steps 3 "
                                     "--save-dir out --save-model=false",
                           file));
    says(mesh);
    shell(&dir, "grep -c '\"loss\":[0-9]' out/metrics.jsonl");
    cr_assert_str_eq(shell_output, "3\n");
    shell(&dir, "tr -d ' \\n' <out/run.json");
    says(recompute, "\"train.precision\":\"bf16\"");
}

Test(accelerate, tp_hsdp_yaml)
{
    trains("accelerate_tp_hsdp.yaml", "8 workers, mesh 2 x 2 x 1 x 2",
           "\"parallel.recompute\":\"none\"");
}

Test(accelerate, cp_yaml)
{
    trains("accelerate_cp.yaml", "8 workers, mesh 1 x 1 x 8 x 1",
           "\"parallel.recompute\":\"full\"");
}

/* Its strategy as a flag over a file with another mesh. */
Test(accelerate, a_strategy_as_a_flag_says_what_it_replaces)
{
    shell(&dir, ND_TRAIN " check --config-file " ND_SOURCE "/configs/tp_hsdp.yaml --device cpu "
                         "--model-config model.json --data-path text.txt --validation-path '' "
                         "--sequence-length 64 --fsdp-sharding-strategy HYBRID_SHARD");
    says("--fsdp-sharding-strategy HYBRID_SHARD", "mesh.dp_replicate was 2 and is 1",
         "mesh.dp_shard was 2 and is -1 (");
}
