// SPDX-License-Identifier: Apache-2.0
#include "support.h"

static nd_status read_fixture(nd_config *c, const char *words)
{
    return flags_in(c, printed("--config-file %s/accelerate_%s",
                               source_path("tests/unit/runtime/config/fixtures"), words));
}

#define MESH(replicate, shard, cp, tp)                                                             \
    "mesh.dp_replicate=" replicate ";mesh.dp_shard=" shard ";mesh.cp=" cp ";mesh.tp=" tp
static const keys_case fixtures[] = {
    {"tp_hsdp.yaml",
     MESH("2", "2", "1", "2") ";launch.workers=8;launch.device=auto;train.precision=bf16;"
                              "parallel.recompute=none;parallel.reshard_after_forward=true;"
                              "model.config=configs/model-small.json",
     true},
    {"cp.yaml --sequence-length=128000",
     MESH("1", "1", "8", "1") ";parallel.cp_comm=allgather;parallel.recompute=full;"
                              "train.sequence_length=128000",
     true},
    {"nd.yaml", MESH("1", "2", "4", "1"), true},
    {"fsdp1.yaml --num_processes=4", MESH("1", "4", "1", "1"), true},
    /* The history's length in the wizard's spelling. */
    {"fp8_te.yaml",
     MESH("2", "1", "1", "1") ";train.precision=fp8;fp8.recipe=delayed;fp8.format=e4m3;"
                              "fp8.amax_history_length=512;fp8.amax_compute=max;"
                              "fp8.all_gather=false",
     true},
};

Test(accelerate, fixtures_set_keys)
{
    expect_cases(fixtures, sizeof fixtures / sizeof *fixtures, read_fixture);
}

/* One line names each key without a meaning, and no other. */
Test(accelerate, keys_without_a_meaning_are_named)
{
    nd_config c;
    tempdir dir;
    tempdir_make(&dir);
    tempdir_catch_stderr(&dir);
    assert_ok(read_fixture(&c, "tp_hsdp.yaml"));
    const char *said = tempdir_said(&dir);
    tempdir_remove(&dir);
    cr_expect_eq(strchr(said, '\n'), strrchr(said, '\n'), "%s", said);
    cr_expect(strstr(said, "tpu_env") && strstr(said, "downcast_bf16") &&
                  strstr(said, "fsdp_state_dict_type"),
              "%s", said);
    cr_expect_null(strstr(said, "mixed_precision"));
    cr_expect(c.from_accelerate);
    nd_config_fini(&c);
}

Test(accelerate, workers_that_nobody_names)
{
    nd_config c;
    expect_bad(&c, read_fixture(&c, "fsdp1.yaml"), "no num_processes|--num-processes N");
}

#define FSDP "distributed_type: FSDP\nnum_processes: 8\n"
static const keys_case texts[] = {
    /* The mesh follows the kind of job, and the sizes. */
    {"distributed_type: 'NO'\n", MESH("1", "1", "1", "1"), true},
    {"distributed_type: MULTI_GPU\nnum_processes: 8\n", MESH("8", "1", "1", "1"), true},
    {"distributed_type: MULTI_CPU\nnum_processes: 3\n", MESH("3", "1", "1", "1"), true},
    {FSDP, MESH("1", "8", "1", "1"), true},
    {FSDP "fsdp_config: {fsdp_sharding_strategy: NO_SHARD}\n", MESH("8", "1", "1", "1"), true},
    {FSDP "parallelism_config: {parallelism_config_tp_size: 8}\n", MESH("1", "1", "1", "8"), true},
    {FSDP "parallelism_config: {parallelism_config_tp_size: 1}\n", MESH("8", "1", "1", "1"), true},
    {FSDP "parallelism_config: {}\n", MESH("1", "8", "1", "1"), true},
    {"distributed_type: MULTI_GPU\nnum_processes: 8\nparallelism_config:\n"
     "  parallelism_config_dp_replicate_size: 4\n  parallelism_config_tp_size: 2\n",
     MESH("4", "1", "1", "2"), true},
    /* Ranks of Ulysses are cp. */
    {FSDP "parallelism_config:\n  parallelism_config_sp_size: 4\n"
          "  parallelism_config_cp_size: 1\n  parallelism_config_dp_shard_size: 2\n"
          "  parallelism_config_sp_backend: deepspeed\n"
          "  parallelism_config_sp_seq_length_is_variable: true\n",
     MESH("1", "2", "4", "1") ";parallel.cp_comm=ulysses", true},
    /* FP8 of torchao, which gathers codes unless it is told not to. */
    {FSDP "mixed_precision: fp8\n", "fp8.recipe=tensorwise;fp8.all_gather=true"},
    {FSDP "mixed_precision: fp8\nfp8_config: {backend: AO, enable_fsdp_float8_all_gather: false}\n",
     "fp8.all_gather=false"},
    /* A precision that is absent is no, which YAML also has as a boolean. */
    {FSDP, "train.precision=fp32"},
    {"distributed_type: 'NO'\nmixed_precision: 'no'\n", "train.precision=fp32"},
    {"distributed_type: 'NO'\nmixed_precision: no\nuse_cpu: true\n"
     "parallelism_config: {parallelism_config_cp_comm_strategy: alltoall}\n",
     "train.precision=fp32;launch.device=cpu;parallel.cp_comm=ring"},
    {"\xef\xbb\xbf" FSDP, "launch.workers=8"},
    {"distributed_type: FSDP\nnum_processes: -1\n", "launch.workers=0"},
    /* Replicas between nodes. */
    {"distributed_type: FSDP\nnum_processes: 8\nnum_machines: 2\nmachine_rank: 1\n"
     "main_process_ip: 'head'\nmain_process_port: 1234\n"
     "fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD_ZERO2}\n",
     MESH("2", "4", "1", "1") ";parallel.reshard_after_forward=false;"
                              "launch.rdzv_endpoint=head:1234;launch.node_rank=1",
     true},
    {FSDP "num_machines: 2\nmain_process_ip: head\n"
          "fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}\n",
     MESH("2", "4", "1", "1") ";parallel.reshard_after_forward=true;"
                              "launch.rdzv_endpoint=head:29500",
     true},
    {FSDP "deepspeed_config: {}\nmegatron_lm_config: {}\nfp16: false\n", "launch.workers=8"},
    /* As older versions of accelerate's wizard wrote them. */
    {"distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 2\nfsdp_config:\n"
     "  fsdp_backward_prefetch_policy: BACKWARD_PRE\n  fsdp_sharding_strategy: FULL_SHARD\n",
     "train.precision=bf16"},
    {"distributed_type: MULTI_CPU\nmixed_precision: bf16\nipex_config:\n  ipex: true\n"
     "mpirun_config:\n  mpirun_hostfile: hosts\nuse_mps_device: false\n",
     "launch.device=cpu"},
};

Test(accelerate, files_set_keys)
{
    expect_cases(texts, sizeof texts / sizeof *texts, read_text);
}

#define OF_FSDP "distributed_type: FSDP\n"
static const char *const refused[][2] = {
    {"mixed_precision: bf16\n", "test.yaml|no distributed_type"},
    {OF_FSDP "mixed_precision: fp16\n", "test.yaml:2|FP16 is not supported|bf16"},
    {OF_FSDP "fp16: true\n", "test.yaml:2|FP16"},
    {"distributed_type: DEEPSPEED\n", "test.yaml:1|DEEPSPEED|FSDP"},
    {"distributed_type: 'NO'\nnum_processes: 8\n", "num_processes is 8|MULTI_GPU"},
    {OF_FSDP "num_procesess: 8\n", "test.yaml:2|num_procesess|did you mean num_processes?"},
    {OF_FSDP "fsdp_config:\n  fsdp_offload_param: true\n",
     "test.yaml:3|fsdp_config.fsdp_offload_param|did you mean fsdp_offload_params?"},
    {OF_FSDP "fsdp_config:\n  fsdp_offload_params: true\n", "test.yaml:3|not offloaded"},
    {OF_FSDP "fsdp_config:\n  fsdp_version: 3\n", "fsdp_version is 3"},
    {OF_FSDP "fsdp_config: 3\n", "test.yaml:2|a map of keys"},
    {OF_FSDP "parallelism_config:\n  parallelism_config_tp_size: 0\n",
     "test.yaml:3|parallelism_config_tp_size is 0|1 or more"},
    {OF_FSDP "parallelism_config:\n  parallelism_config_sp_size: "
             "2\n  parallelism_config_cp_size: 4\n",
     "the sizes of cp, 4, and sp, 2|mesh.cp 8|parallel.ulysses 2"},
    {OF_FSDP "parallelism_config:\n  parallelism_config_sp_size: 0\n",
     "parallelism_config_sp_size is 0|1 or more"},
    {OF_FSDP "parallelism_config:\n  tp_size: 2\n", "tp_size"},
    {OF_FSDP "fp8_config:\n  backend: MSAMP\n", "AO|TE"},
    {OF_FSDP "fp8_config:\n  fp8_format: E5M2\n", "hybrid or e4m3"},
    {OF_FSDP "fp8_config:\n  backend: AO\n  margin: 1\n", "margin|backend: TE"},
    {OF_FSDP "fp8_config:\n  backend: TE\n  enable_fsdp_float8_all_gather: true\n",
     "enable_fsdp_float8_all_gather|backend: AO"},
    /* Without a backend it is AO. */
    {OF_FSDP "mixed_precision: fp8\nfp8_config:\n  amax_history_len: 16\n",
     "amax_history_len|backend: TE"},
    {OF_FSDP "fp8_config:\n  backend: TE\n  amax_history_len: 16\n  amax_history_length: 32\n",
     "test.yaml:5|amax_history_length|keep one"},
    {OF_FSDP "deepspeed_config:\n  zero_stage: 3\n", "test.yaml:2|deepspeed_config"},
    {OF_FSDP "main_process_port: -1\n", "is -1|65535"},
    {OF_FSDP "compute_environment: AMAZON_SAGEMAKER\n", "compute_environment"},
    {OF_FSDP "num_processes: 6\nparallelism_config:\n  parallelism_config_dp_shard_size: 4\n",
     "dp_shard 4|= 4 workers|is 6"},
    {OF_FSDP "main_process_port: 99999\n", "99999|65535"},
    {OF_FSDP "num_processes: 8\nnum_machines: 3\n", "8|3|multiple"},
    {"distributed_type: MULTI_GPU\nparallelism_config:\nparallelism_config_tp_size: 2\n",
     "test.yaml:3|is a key of parallelism_config|indent"},
    {OF_FSDP "fsdp_version: 2\n", "test.yaml:2|fsdp_version is a key of fsdp_config|indent"},
};

Test(accelerate, refusals)
{
    expect_refusals(refused, sizeof refused / sizeof *refused, read_text);
}
