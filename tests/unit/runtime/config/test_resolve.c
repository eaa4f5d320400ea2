// SPDX-License-Identifier: Apache-2.0
#include "support.h"

#include <sys/stat.h>
#include <unistd.h>

#include "runtime/config/reader.h"
#include "tests/support/tempdir.h"

static const keys_case derived[] = {
    {"--dp-shard-size 2 --tp-size 2", "launch.workers=4", true}, /* what the mesh needs */
    {"--nproc-per-node 4 --nnodes 2 --rdzv-endpoint h:1 --rdzv-key-file k --dp-replicate-size -1 "
     "--dp-shard-size 2",
     "launch.workers=8;mesh.dp_replicate=4", true},
    /* The seed of the shuffle does not follow from that of the weights. */
    {"--seed 5 --model-seed 7", "model.seed=7;data.shuffle_seed=5", true},
    {"--seed 5 --shuffle-seed 7", "model.seed=5;data.shuffle_seed=7", true},
    /* Token files hold ids, so a tokenizer that nobody names is "file". */
    {"--data-format llmc", "data.tokenizer=file", true},
    {"--data-format megatron", "data.tokenizer=file", true},
    {"--data-format text", "data.tokenizer=bytes", true},
    {"--data-format auto", "data.tokenizer=bytes", true},
};

/* Resolving twice changes nothing. */
Test(resolve, what_follows_from_other_keys)
{
    for (size_t i = 0; i < sizeof derived / sizeof *derived; i++) {
        nd_config c;
        expect_case(&derived[i], flags_in);
        assert_ok(flags_in(&c, derived[i].input));
        assert_ok(nd_config_resolve(&c));
        assert_ok(nd_config_resolve(&c));
        expect_keys(&c, derived[i].keys, derived[i].input);
        nd_config_fini(&c);
    }
}

Test(resolve, the_mesh_against_the_workers)
{
    EXPECT_BAD_TEXT("launch: {workers: 6}\nmesh: {dp_replicate: 2, dp_shard: 2, tp: 2}\n",
                    "dp_replicate 2 x dp_shard 2 x cp 1 x tp 2 = 8 workers", "launch.workers is 6");
    EXPECT_BAD_TEXT("launch: {workers: 6}\nmesh: {dp_shard: -1, tp: 4}\n", "dp_shard is -1", "= 4",
                    "6 workers");
    EXPECT_BAD_TEXT("launch: {workers: 6}\nmesh: {dp_replicate: -1, dp_shard: 4}\n",
                    "dp_replicate is -1", "= 4", "6 workers");
    EXPECT_BAD_TEXT("launch: {workers: 6}\nmesh: {dp_replicate: -1, dp_shard: -1}\n", "both -1");
    EXPECT_BAD_TEXT(
        "mesh: {dp_replicate: 16777216, dp_shard: 16777216, cp: 16777216, tp: 16777216}\n",
        "more than 16777216 ranks");
}

Test(resolve, ranks_that_exchange_heads)
{
    static const struct {
        const char *comm, *ulysses;
        int ranks;
    } cases[] = {{"ulysses", "1", 4}, {"ulysses", "4", 4}, {"ring", "2", 2}, {"allgather", "1", 1}};
    nd_config c;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cr_assert_eq(
            FLAGS(&c, "--cp-size", "4", "--cp-comm", cases[i].comm, "--ulysses", cases[i].ulysses),
            ND_OK);
        cr_assert_eq(nd_config_resolve(&c), ND_OK, "%s", nd_error_last()->message);
        cr_expect_eq(c.resolved_mesh.ulysses, cases[i].ranks, "case %zu", i);
        nd_config_fini(&c);
    }
    cr_assert_eq(FLAGS(&c, "--sp-size", "2", "--tp-size", "2"), ND_OK);
    cr_assert_eq(nd_config_resolve(&c), ND_OK, "%s", nd_error_last()->message);
    cr_expect(c.mesh.cp == 2 && c.launch.workers == 4 && c.resolved_mesh.ulysses == 2);
    nd_config_fini(&c);
    cr_assert_eq(FLAGS(&c, "--sp-size", "1", "--cp-size", "2", "--cp-comm", "ulysses"), ND_OK);
    cr_expect(c.mesh.cp == 2 && c.parallel.cp_comm == ND_CP_ULYSSES);
    nd_config_fini(&c);
    EXPECT_BAD_FLAGS(("--sp-size", "2", "--cp-comm", "ring"), "--sp-size 2 asks for");
    EXPECT_BAD_FLAGS(("--ulysses", "2"), "parallel.ulysses 2 does not divide mesh.cp 1",
                     "--cp-size a multiple");
    EXPECT_BAD_FLAGS(("--cp-size", "4", "--ulysses", "3"), "parallel.ulysses 3 does not divide "
                                                           "mesh.cp 4");
    EXPECT_BAD_FLAGS(("--cp-size", "4", "--ulysses", "2", "--cp-comm", "ulysses"),
                     "all 4 ranks of mesh.cp", "parallel.ulysses is 2");
}

Test(resolve, threads_of_the_environment)
{
    nd_config c;
    setenv("OMP_NUM_THREADS", "3,2", 1);
    cr_assert_eq(FLAGS(&c, "--num-processes", "1"), ND_OK);
    cr_assert_eq(nd_config_resolve(&c), ND_OK, "%s", nd_error_last()->message);
    cr_expect_eq(c.launch.threads_per_worker, 3);
    nd_config_fini(&c);
    cr_assert_eq(FLAGS(&c, "--num-processes", "1", "--threads-per-worker", "2"), ND_OK);
    cr_assert_eq(nd_config_resolve(&c), ND_OK, "%s", nd_error_last()->message);
    cr_expect_eq(c.launch.threads_per_worker, 2, "the configuration goes before the variable");
    nd_config_fini(&c);
    static const char *const bad[] = {"", "0", "-3", "many", "4097", "99999999999999999999"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        setenv("OMP_NUM_THREADS", bad[i], 1);
        EXPECT_BAD_FLAGS(("--num-processes", "1"), "OMP_NUM_THREADS is '", "1 to 4096");
    }
}

Test(resolve, nodes)
{
    EXPECT_BAD_FLAGS(("--num-processes", "8", "--nproc-per-node", "3"), "= 3",
                     "launch.workers is 8");
    EXPECT_BAD_FLAGS(("--num-processes", "9", "--nnodes", "2"), "9", "2", "multiple");
    EXPECT_BAD_FLAGS(("--node-rank", "1"), "node_rank is 1", "1 nodes");
    EXPECT_BAD_FLAGS(("--nnodes", "2"), "rdzv_endpoint", "HOST:PORT");
    EXPECT_BAD_FLAGS(("--nnodes", "2", "--rdzv-endpoint", "h:1"), "rdzv_key_file", "--make-key");
    EXPECT_BAD_FLAGS(("--nnodes", "2", "--rdzv-endpoint", "h:0", "--rdzv-key-file", "k"), "'h:0'",
                     "fixed");
    static const char *const bad[] = {"h", "h:", ":5", "h:99999", "h:x", "::1:5", "[::1:5", "h:-1"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        EXPECT_BAD_FLAGS(("--rdzv-endpoint", bad[i]), bad[i], "HOST:PORT");
    }
    nd_config c;
    cr_assert_eq(FLAGS(&c, "--rdzv-endpoint", "[::1]:0"), ND_OK);
    cr_assert_eq(nd_config_resolve(&c), ND_OK, "%s", nd_error_last()->message);
    nd_config_fini(&c);
    EXPECT_BAD_FLAGS(("--gpu-ids", "0,,1"), "'0,,1'", "all");
    EXPECT_BAD_FLAGS(("--gpu-ids", "0,a"), "'0,a'");
    EXPECT_BAD_FLAGS(("--gpu-ids", ""), "launch.gpu_ids");
}

Test(resolve, model_and_data)
{
    EXPECT_BAD_FLAGS(("--model-name", "llama"), "'llama'", "ORG/NAME");
    EXPECT_BAD_FLAGS(("--model-name", "./a/b"), "'./a/b'", "--model-path");
    EXPECT_BAD_FLAGS(("--model-name", "a/b/c"), "ORG/NAME");
    EXPECT_BAD_FLAGS(("--data-path", ""), "data.path is empty");
    EXPECT_BAD_FLAGS(("--data-format", "megatron", "--tokenizer", "bytes"), "megatron",
                     "tokenizer: file");
    EXPECT_BAD_FLAGS(("--data-format", "jsonl", "--tokenizer", "file"), "jsonl",
                     "tokenizer: bytes");
}

/* A native file that names both data files, as the shipped ones do. */
static void write_shipped(const char *path)
{
    FILE *f = fopen(path, "w");
    cr_assert_not_null(f);
    fputs("data: {path: data/train.txt, validation_path: data/valid.txt}\n"
          "train: {validation_interval: 50}\n",
          f);
    cr_assert_eq(fclose(f), 0);
}

Test(resolve, the_usual_validation_file_goes_with_the_usual_data)
{
    nd_config c;
    char path[] = "/tmp/nd_config_XXXXXX", *text = NULL;
    cr_assert_geq(mkstemp(path), 0);
    write_shipped(path);
    static const struct {
        const char *flags[4], *left;
    } cases[] = {
        {{"--data-path=my.txt"}, ""},
        {{"--data-path=my.txt", "--validation-path=my_valid.txt"}, "my_valid.txt"},
        {{"--validation-path=data/valid.txt", "--data-path=my.txt"}, "data/valid.txt"},
        {{"--data-path=data/train.txt"}, "data/valid.txt"},
        {{"--num-steps=3"}, "data/valid.txt"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *flags[6] = {"--config-file", path};
        size_t count = 0;
        for (; cases[i].flags[count]; count++) {
            flags[count + 2] = cases[i].flags[count];
        }
        cr_assert_eq(flags_of(&c, count + 2, flags), ND_OK, "%s", nd_error_last()->message);
        cr_assert_eq(nd_config_resolve(&c), ND_OK, "%s", nd_error_last()->message);
        cr_expect_str_eq(c.data.validation_path, cases[i].left, "case %zu", i);
        /* The worker reads what ndlaunch resolved. */
        cr_assert_eq(nd_config_to_yaml(&c, &text), ND_OK);
        nd_config_fini(&c);
        cr_assert_eq(read_text(&c, text), ND_OK);
        cr_expect_str_eq(c.data.validation_path, cases[i].left, "case %zu, read again", i);
        nd_config_fini(&c);
        free(text);
    }
    unlink(path);
}

Test(resolve, a_validation_file_that_nobody_named_may_be_missing)
{
    nd_config c;
    cr_assert_eq(chdir("/"), 0, "where there is no data/valid.txt");
    cr_assert_eq(FLAGS(&c, "--num-steps", "1"), ND_OK);
    cr_expect_str_eq(c.data.validation_path, "");
    nd_config_fini(&c);
    cr_assert_eq(FLAGS(&c, "--validation-path", "data/valid.txt"), ND_OK);
    cr_expect_str_eq(c.data.validation_path, "data/valid.txt", "an error when it is opened");
    nd_config_fini(&c);
}

Test(resolve, training)
{
    EXPECT_BAD_FLAGS(("--lr", "1e-4", "--min-lr", "1e-3"), "min_lr 0.001", "lr 0.0001");
    EXPECT_BAD_FLAGS(("--precision", "fp8", "--fp8-recipe", "rowwise", "--fp8-all-gather"),
                     "fp8.all_gather", "tensorwise", "--fp8-all-gather false");
    EXPECT_BAD_FLAGS(("--precision", "bf16", "--fp8-recipe", "rowwise", "--fp8-all-gather"),
                     "fp8.all_gather");
    EXPECT_BAD_FLAGS(("--sequence-length", "134217728", "--micro-batch-size", "65536",
                      "--gradient-accumulation-steps", "1000000"),
                     "134217728", "2^52");
}

Test(resolve, cuda_graphs_are_not_for_cpus)
{
    EXPECT_BAD_FLAGS(("--cuda-graphs", "true", "--device", "cpu"), "kernels.cuda_graphs is true",
                     "--cuda-graphs false");
    EXPECT_BAD_TEXT("launch: {device: cpu}\nkernels: {cuda_graphs: true}\n",
                    "kernels.cuda_graphs is true");
}

Test(resolve, processors_are_divided_on_gpus_alone)
{
    EXPECT_BAD_FLAGS(("--comm-blocks", "16", "--device", "cpu"), "kernels.comm_blocks is 16",
                     "--comm-blocks 0");
    EXPECT_BAD_FLAGS(("--product-processors", "116", "--device", "cpu"),
                     "kernels.product_processors is 116", "--product-processors 0");
}

Test(resolve, nccl_alone_is_not_for_cpus)
{
    EXPECT_BAD_FLAGS(("--nccl-alone", "true", "--device", "cpu"), "launch.nccl_alone is true",
                     "--nccl-alone false");
}

Test(resolve, checks_what_was_put_into_the_struct)
{
    nd_config c;
    cr_assert_eq(nd_config_init(&c), ND_OK);
    c.train.steps = 0;
    expect_sentence(nd_config_resolve(&c), ND_ERR_CONFIG, "steps", "train.steps is 0",
                    (char *)NULL);
    c.train.steps = 1;
    c.optimizer.betas[1] = 2;
    expect_sentence(nd_config_resolve(&c), ND_ERR_CONFIG, "betas", "optimizer.betas", (char *)NULL);
    nd_config_fini(&c);
}

/* 400 s a GB of text that is encoded; other formats are mapped and open at once. */
Test(resolve, time_to_index_the_data)
{
    tempdir dir;
    nd_config c;
    tempdir_make(&dir);
    cr_assert_eq(truncate(tempdir_write(&dir, "big.jsonl", "", 0), 3000000000), 0); /* no disk */
    cr_assert_eq(nd_config_init(&c), ND_OK);
    cr_expect_eq(nd_config_data_seconds(&c), 0.0);
    assert_ok(nd_text_replace(&c.data.path, tempdir_file(&dir, "big.jsonl")));
    cr_expect_float_eq(nd_config_data_seconds(&c), 1200.0, 1e-6);
    assert_ok(nd_text_replace(&c.data.validation_path, c.data.path));
    cr_expect_float_eq(nd_config_data_seconds(&c), 2400.0, 1e-6);
    c.data.format = ND_DATA_TEXT;
    cr_expect_eq(nd_config_data_seconds(&c), 0.0);
    assert_ok(nd_text_replace(&c.data.tokenizer, "model")); /* it is encoded */
    cr_expect_float_eq(nd_config_data_seconds(&c), 2400.0, 1e-6);
    assert_ok(nd_text_replace(&c.data.path, dir.path));
    cr_expect_float_eq(nd_config_data_seconds(&c), 2400.0, 1e-6);
    nd_config_fini(&c);
    /* As bytes, in a folder whose name is no pattern, and by a pattern. */
    char folder[PATH_MAX], file[PATH_MAX + 16];
    snprintf(folder, sizeof folder, "%s/x[1]", dir.path);
    snprintf(file, sizeof file, "%s/a.jsonl", folder);
    cr_assert_eq(mkdir(folder, 0700), 0);
    cr_assert_eq(rename(tempdir_file(&dir, "big.jsonl"), file), 0);
    cr_assert_eq(nd_config_init(&c), ND_OK);
    for (int i = 0; i < 3; i++) {
        assert_ok(nd_text_replace(&c.data.path, i ? tempdir_file(&dir, "x*/*.jsonl") : folder));
        cr_expect_float_eq(nd_config_data_seconds(&c), 1200.0, 1e-6, "%d", i);
        assert_ok(nd_text_replace(&c.data.tokenizer, i ? "model" : "bytes"));
    }
    nd_config_fini(&c);
    /* Compressed, as bytes. */
    char packed[PATH_MAX + 32];
    snprintf(packed, sizeof packed, "%s/a.ndjson.zst", folder);
    cr_assert_eq(rename(file, packed), 0);
    cr_assert_eq(nd_config_init(&c), ND_OK);
    assert_ok(nd_text_replace(&c.data.path, packed));
    cr_expect_float_eq(nd_config_data_seconds(&c), 9600.0, 1e-6);
    nd_config_fini(&c);
    /* 10 s a GB of a model that is verified, be its files links as in a cache. */
    cr_assert_eq(nd_config_init(&c), ND_OK);
    c.model.verify = true;
    assert_ok(nd_text_replace(&c.model.path, dir.path));
    cr_assert_eq(truncate(tempdir_write(&dir, "blob", "", 0), 3000000000), 0);
    cr_expect_eq(nd_config_data_seconds(&c), 0.0); /* nothing to verify by */
    tempdir_write(&dir, "SHA256SUMS", "", 0);
    cr_expect_float_eq(nd_config_data_seconds(&c), 30.0, 1e-6);
    cr_assert_eq(symlink("blob", tempdir_file(&dir, "model.safetensors")), 0);
    cr_expect_float_eq(nd_config_data_seconds(&c), 60.0, 1e-6);
    nd_config_fini(&c);
    cr_assert_eq(unlink(packed), 0);
    cr_assert_eq(rmdir(folder), 0);
    tempdir_remove(&dir);
}

static void append_line(void *context, const char *text)
{
    char *all = context;
    size_t used = strlen(all);
    snprintf(all + used, 1024 - used, "%s\n", text);
}

/* The warnings of these flags are exactly `wanted`, a line each. */
#define EXPECT_WARNINGS(list, wanted)                                                              \
    do {                                                                                           \
        nd_config c_;                                                                              \
        char got_[1024] = "";                                                                      \
        cr_assert_eq(FLAGS(&c_, UNWRAP list), ND_OK, "%s", nd_error_last()->message);              \
        cr_assert_eq(nd_config_each_warning(&c_, append_line, got_), ND_OK);                       \
        cr_expect_str_eq(got_, wanted);                                                            \
        nd_config_fini(&c_);                                                                       \
    } while (0)

Test(resolve, fp8_keys_without_effect_are_named)
{
    EXPECT_WARNINGS(("--precision", "bf16"), "");
    EXPECT_WARNINGS(("--precision", "bf16", "--fp8-all-gather", "--fp8-recipe", "delayed",
                     "--fp8-health-interval", "5"),
                    "fp8.recipe, fp8.all_gather, fp8.health_interval: without effect, because "
                    "train.precision is not fp8\n");
    EXPECT_WARNINGS(("--precision", "fp8", "--fp8-all-gather", "--fp8-filter", "auto"), "");
    EXPECT_WARNINGS(("--precision", "fp8", "--fp8-margin", "1", "--fp8-format", "e4m3",
                     "--fp8-amax-compute", "max", "--fp8-all-gather"),
                    "fp8.format, fp8.amax_compute, fp8.margin: without effect, because only "
                    "fp8.recipe delayed reads them\n");
    EXPECT_WARNINGS(("--precision", "fp8", "--fp8-margin", "1", "--fp8-recipe", "delayed"), "");
    EXPECT_WARNINGS(("--precision", "fp8", "--fp8-health-interval", "5"), "");
}
