// SPDX-License-Identifier: Apache-2.0
#include "support.h"

#include <fcntl.h>
#include <unistd.h>

/* Reads a fixture with further flags and resolves it; what went to stderr is in `said`. */
static void fixture(nd_config *c, const char *name, const char *flag, char said[4096])
{
    char path[1024], relative[256], template[] = "/tmp/nd_config_XXXXXX";
    snprintf(relative, sizeof relative, "tests/unit/runtime/config/fixtures/%s", name);
    int fd = mkstemp(template);
    int old = dup(STDERR_FILENO);
    cr_assert(fd >= 0 && old >= 0 && unlink(template) == 0);
    dup2(fd, STDERR_FILENO);
    nd_status status = flag ? FLAGS(c, "--config-file", source_path(relative, path), flag)
                            : FLAGS(c, "--config-file", source_path(relative, path));
    dup2(old, STDERR_FILENO);
    ssize_t n = pread(fd, said, 4095, 0);
    said[n < 0 ? 0 : n] = '\0';
    close(fd);
    close(old);
    cr_assert_eq(status, ND_OK, "%s", nd_error_last()->message);
    cr_assert_eq(nd_config_resolve(c), ND_OK, "%s", nd_error_last()->message);
}

static void expect_mesh(const nd_config *c, int dp_replicate, int dp_shard, int cp, int tp)
{
    const int *size = c->resolved_mesh.size;
    cr_expect(size[ND_AXIS_DP_REPLICATE] == dp_replicate && size[ND_AXIS_DP_SHARD] == dp_shard &&
                  size[ND_AXIS_CP] == cp && size[ND_AXIS_TP] == tp,
              "the mesh is %d x %d x %d x %d", size[ND_AXIS_DP_REPLICATE], size[ND_AXIS_DP_SHARD],
              size[ND_AXIS_CP], size[ND_AXIS_TP]);
}

Test(accelerate, tp_hsdp_file)
{
    nd_config c;
    char said[4096];
    fixture(&c, "accelerate_tp_hsdp.yaml", NULL, said);
    expect_mesh(&c, 2, 2, 1, 2);
    cr_expect_eq(c.launch.workers, 8);
    cr_expect_eq(c.launch.device, ND_CHOOSE_AUTO);
    cr_expect_eq(c.train.precision, ND_PRECISION_BF16);
    cr_expect_eq(c.parallel.recompute, ND_RECOMPUTE_NONE);
    cr_expect(c.parallel.reshard_after_forward);
    cr_expect(c.from_accelerate);
    cr_expect_str_eq(c.model.config, "configs/model-small.json");
    /* One line names each key without a meaning, and no other. */
    cr_expect_eq(strchr(said, '\n'), strrchr(said, '\n'), "%s", said);
    cr_expect(strstr(said, "tpu_env") && strstr(said, "downcast_bf16") &&
                  strstr(said, "fsdp_state_dict_type"),
              "%s", said);
    cr_expect_null(strstr(said, "mixed_precision"));
    nd_config_fini(&c);
}

Test(accelerate, cp_and_nd_files)
{
    nd_config c;
    char said[4096];
    fixture(&c, "accelerate_cp.yaml", "--sequence-length=128000", said);
    expect_mesh(&c, 1, 1, 8, 1);
    cr_expect_eq(c.parallel.cp_comm, ND_CP_ALLGATHER);
    cr_expect_eq(c.parallel.recompute, ND_RECOMPUTE_FULL);
    cr_expect_eq(c.train.sequence_length, 128000);
    nd_config_fini(&c);
    fixture(&c, "accelerate_nd.yaml", NULL, said);
    expect_mesh(&c, 1, 2, 4, 1);
    nd_config_fini(&c);
}

Test(accelerate, processes_may_come_from_the_command_line)
{
    nd_config c;
    char said[4096], path[1024];
    fixture(&c, "accelerate_fsdp1.yaml", "--num_processes=4", said);
    expect_mesh(&c, 1, 4, 1, 1);
    nd_config_fini(&c);
    EXPECT_BAD_FLAGS(("--config-file", source_path("tests/unit/runtime/config/fixtures/"
                                                   "accelerate_fsdp1.yaml",
                                                   path)),
                     "no num_processes", "--num-processes N");
}

Test(accelerate, fp8_of_transformer_engine)
{
    nd_config c;
    char said[4096];
    fixture(&c, "accelerate_fp8_te.yaml", NULL, said);
    expect_mesh(&c, 2, 1, 1, 1);
    cr_expect_eq(c.train.precision, ND_PRECISION_FP8);
    cr_expect_eq(c.fp8.recipe, ND_FP8_DELAYED);
    cr_expect_eq(c.fp8.format, ND_FP8_E4M3);
    cr_expect_eq(c.fp8.amax_history_length, 512, "the wizard's spelling");
    cr_expect_eq(c.fp8.amax_compute, ND_FP8_AMAX_MAX);
    cr_expect_not(c.fp8.all_gather);
    nd_config_fini(&c);
}

#define FSDP "distributed_type: FSDP\nnum_processes: 8\n"
#define MESH(replicate, shard, cp, tp)                                                             \
    "mesh.dp_replicate=" replicate ";mesh.dp_shard=" shard ";mesh.cp=" cp ";mesh.tp=" tp
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
    {FSDP "mixed_precision: fp8\nfp8_config:\n  backend: AO\n"
          "  enable_fsdp_float8_all_gather: false\n",
     "fp8.all_gather=false"},
    /* A precision that is absent is no, which YAML also has as a boolean. */
    {FSDP, "train.precision=fp32"},
    {"distributed_type: 'NO'\nmixed_precision: 'no'\n", "train.precision=fp32"},
    {"distributed_type: 'NO'\nmixed_precision: no\nuse_cpu: true\n"
     "parallelism_config: {parallelism_config_cp_comm_strategy: alltoall}\n",
     "train.precision=fp32;launch.device=cpu;parallel.cp_comm=ring"},
    {"\xef\xbb\xbf" FSDP, "launch.workers=8"},
    {"distributed_type: FSDP\nnum_processes: -1\n", "launch.workers=0"},
};

Test(accelerate, files_set_keys)
{
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        expect_case(&texts[i], read_text);
    }
}

Test(accelerate, hybrid_shard_replicates_between_nodes)
{
    nd_config c;
    cr_assert_eq(read_text(&c, "distributed_type: FSDP\nnum_processes: 8\nnum_machines: 2\n"
                               "machine_rank: 1\nmain_process_ip: 'head'\nmain_process_port: 1234\n"
                               "fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD_ZERO2}\n"),
                 ND_OK);
    free(c.launch.rdzv_key_file); /* only a flag can give what accelerate's files lack */
    c.launch.rdzv_key_file = strdup("job.key");
    cr_assert_eq(nd_config_resolve(&c), ND_OK, "%s", nd_error_last()->message);
    expect_mesh(&c, 2, 4, 1, 1);
    cr_expect_not(c.parallel.reshard_after_forward);
    cr_expect_str_eq(c.launch.rdzv_endpoint, "head:1234");
    cr_expect_eq(c.launch.node_rank, 1);
    nd_config_fini(&c);
}

Test(accelerate, refusals)
{
    EXPECT_BAD_TEXT("mixed_precision: bf16\n", "test.yaml", "no distributed_type");
    EXPECT_BAD_TEXT("distributed_type: FSDP\nmixed_precision: fp16\n", "test.yaml:2",
                    "FP16 is not supported", "bf16");
    EXPECT_BAD_TEXT("distributed_type: FSDP\nfp16: true\n", "test.yaml:2", "FP16");
    EXPECT_BAD_TEXT("distributed_type: DEEPSPEED\n", "test.yaml:1", "DEEPSPEED", "FSDP");
    EXPECT_BAD_TEXT("distributed_type: 'NO'\nnum_processes: 8\n", "num_processes is 8",
                    "MULTI_GPU");
    EXPECT_BAD_TEXT("distributed_type: FSDP\nnum_procesess: 8\n", "test.yaml:2", "num_procesess",
                    "did you mean num_processes?");
    EXPECT_BAD_TEXT("distributed_type: FSDP\nfsdp_config:\n  fsdp_offload_param: true\n",
                    "test.yaml:3", "fsdp_config.fsdp_offload_param",
                    "did you mean fsdp_offload_params?");
    EXPECT_BAD_TEXT("distributed_type: FSDP\nfsdp_config:\n  fsdp_offload_params: true\n",
                    "test.yaml:3", "not offloaded");
    EXPECT_BAD_TEXT("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 3\n",
                    "fsdp_version is 3");
    EXPECT_BAD_TEXT("distributed_type: FSDP\nfsdp_config: 3\n", "test.yaml:2", "a map of keys");
    EXPECT_BAD_TEXT(
        "distributed_type: FSDP\nparallelism_config:\n  parallelism_config_tp_size: 0\n",
        "test.yaml:3", "parallelism_config_tp_size is 0", "1 or more");
    EXPECT_BAD_TEXT("distributed_type: FSDP\nparallelism_config:\n  "
                    "parallelism_config_sp_size: 2\n  parallelism_config_cp_size: 4\n",
                    "the sizes of cp, 4, and sp, 2", "mesh.cp 8", "parallel.ulysses 2");
    EXPECT_BAD_TEXT(
        "distributed_type: FSDP\nparallelism_config:\n  parallelism_config_sp_size: 0\n",
        "parallelism_config_sp_size is 0", "1 or more");
    EXPECT_BAD_TEXT("distributed_type: FSDP\nparallelism_config:\n  tp_size: 2\n", "tp_size");
    EXPECT_BAD_TEXT("distributed_type: FSDP\nfp8_config:\n  backend: MSAMP\n", "AO", "TE");
    EXPECT_BAD_TEXT("distributed_type: FSDP\nfp8_config:\n  fp8_format: E5M2\n", "hybrid or e4m3");
    EXPECT_BAD_TEXT("distributed_type: FSDP\nfp8_config:\n  backend: AO\n  margin: 1\n", "margin",
                    "backend: TE");
    EXPECT_BAD_TEXT("distributed_type: FSDP\nfp8_config:\n  backend: TE\n"
                    "  enable_fsdp_float8_all_gather: true\n",
                    "enable_fsdp_float8_all_gather", "backend: AO");
    EXPECT_BAD_TEXT("distributed_type: FSDP\nmixed_precision: fp8\nfp8_config:\n"
                    "  amax_history_len: 16\n", /* without a backend it is AO */
                    "amax_history_len", "backend: TE");
    EXPECT_BAD_TEXT("distributed_type: FSDP\nfp8_config:\n  backend: TE\n  amax_history_len: 16\n"
                    "  amax_history_length: 32\n",
                    "test.yaml:5", "amax_history_length", "keep one");
    EXPECT_BAD_TEXT("distributed_type: FSDP\ndeepspeed_config:\n  zero_stage: 3\n", "test.yaml:2",
                    "deepspeed_config");
    EXPECT_BAD_TEXT("distributed_type: FSDP\ncompute_environment: AMAZON_SAGEMAKER\n",
                    "compute_environment");
    EXPECT_BAD_TEXT("distributed_type: FSDP\nnum_processes: 6\nparallelism_config:\n"
                    "  parallelism_config_dp_shard_size: 4\n",
                    "dp_shard 4", "= 4 workers", "is 6");
    EXPECT_BAD_TEXT("distributed_type: FSDP\nmain_process_port: 99999\n", "99999", "65535");
    EXPECT_BAD_TEXT("distributed_type: FSDP\nnum_processes: 8\nnum_machines: 3\n", "8", "3",
                    "multiple");
}

/* Files as older versions of accelerate's wizard wrote them. */
Test(accelerate, keys_of_older_versions)
{
    nd_config c;
    cr_assert_eq(read_text(&c, "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 2\n"
                               "fsdp_config:\n  fsdp_backward_prefetch_policy: BACKWARD_PRE\n"
                               "  fsdp_sharding_strategy: FULL_SHARD\n"),
                 ND_OK, "%s", nd_error_last()->message);
    cr_expect_eq(c.train.precision, ND_PRECISION_BF16);
    nd_config_fini(&c);
    cr_assert_eq(read_text(&c, "distributed_type: MULTI_CPU\nmixed_precision: bf16\n"
                               "ipex_config:\n  ipex: true\nmpirun_config:\n"
                               "  mpirun_hostfile: hosts\nuse_mps_device: false\n"),
                 ND_OK, "%s", nd_error_last()->message);
    nd_config_fini(&c);
    EXPECT_BAD_TEXT("distributed_type: MULTI_GPU\nparallelism_config:\n"
                    "parallelism_config_tp_size: 2\n",
                    "test.yaml:3", "is a key of parallelism_config", "indent");
    EXPECT_BAD_TEXT("distributed_type: FSDP\nfsdp_version: 2\n", "test.yaml:2",
                    "fsdp_version is a key of fsdp_config", "indent");
}
