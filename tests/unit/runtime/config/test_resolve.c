// SPDX-License-Identifier: Apache-2.0
#include "support.h"

#include <sys/stat.h>
#include <unistd.h>

#include "runtime/config/reader.h"

static nd_config c;

#define MOST_TOKENS                                                                                \
    "--sequence-length 134217728 --micro-batch-size 65536 --gradient-accumulation-steps 512"
static const keys_case derived[] = {
    {"--dp-shard-size 2 --tp-size 2", "launch.workers=4", true}, /* what the mesh needs */
    {"--nproc-per-node 4 --nnodes 2 --dp-replicate-size -1 --dp-shard-size 2",
     "launch.workers=8;mesh.dp_replicate=4", true},
    /* The seed of the shuffle does not follow from that of the weights. */
    {"--seed 5 --model-seed 7", "model.seed=7;data.shuffle_seed=5", true},
    {"--seed 5 --shuffle-seed 7", "model.seed=5;data.shuffle_seed=7", true},
    /* Token files hold ids, so a tokenizer that nobody names is "file". */
    {"--data-format llmc", "data.tokenizer=file", true},
    {"--data-format megatron", "data.tokenizer=file", true},
    {"--data-format text", "data.tokenizer=bytes", true},
    {"--data-format auto", "data.tokenizer=bytes", true},
    {"--sp-size 2 --tp-size 2", "mesh.cp=2;launch.workers=4;parallel.cp_comm=ulysses", true},
    {"--sp-size 1 --cp-size 2 --cp-comm ulysses", "mesh.cp=2;parallel.cp_comm=ulysses", true},
    {"--rdzv-endpoint [::1]:0", "launch.rdzv_endpoint=[::1]:0", true},
    {"--rdzv-endpoint h:65535", "launch.rdzv_endpoint=h:65535", true},
    {"--warmup_ratio 0.021 --num-steps 50", "optimizer.warmup_steps=2", true},
    {"--log-with wandb --tracker-python python3", "log.python=python3", true},
    /* Rank 0 alone starts it. */
    {"--log-with wandb --nnodes 2 --node-rank 1 --rdzv-endpoint h:1 --rdzv-key-file k "
     "--dp-shard-size -1",
     "log.trackers=wandb", true},
    {"--lr 1e-4 --min-lr 1e-4", "optimizer.min_lr=0.0001", true},
    {"--save-total-limit 1", "checkpoint.keep_last=1", true}, /* nothing is saved */
    {"--resume_from_checkpoint None", "checkpoint.resume=", true},
    {MOST_TOKENS, "train.gradient_accumulation_steps=512", true},
    {"--nnodes 2 --min-nodes 2 --max-restarts 1 --save-steps 5 --rdzv-endpoint h:1 "
     "--rdzv-key-file k --dp-shard-size -1",
     "launch.min_nodes=2", true},
    {"--save-total-limit 0 --save-steps 7", "checkpoint.keep_last=0", true},
    {"--deterministic --autotune --autotune-from a/run.json", "kernels.autotune=true", true},
    {"--epochs 1 --profile-steps 7", "log.profile_steps=7", true}, /* of an unknown number */
    {"--num-steps 1000000000 --profile-steps 1000000000", "log.profile_steps=1000000000", true},
};

/* Resolving twice changes nothing. */
Test(resolve, what_follows_from_other_keys)
{
    for (size_t i = 0; i < sizeof derived / sizeof *derived; i++) {
        expect_cases(&derived[i], 1, flags_in);
        assert_ok(flags_in(&c, derived[i].input));
        assert_ok(nd_config_resolve(&c));
        assert_ok(nd_config_resolve(&c));
        expect_keys(&c, derived[i].keys, derived[i].input);
        nd_config_fini(&c);
    }
}

Test(resolve, ranks_that_exchange_heads)
{
    static const struct {
        const char *flags;
        int ranks;
    } cases[] = {{"--cp-size 4 --cp-comm ulysses", 4},
                 {"--cp-size 4 --cp-comm ulysses --ulysses 4", 4},
                 {"--cp-size 4 --cp-comm ring --ulysses 2", 2},
                 {"--cp-size 4 --cp-comm allgather", 1},
                 {"--sp-size 2 --tp-size 2", 2}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        resolve_flags(&c, cases[i].flags);
        cr_expect_eq(c.resolved_mesh.ulysses, cases[i].ranks, "case %zu", i);
        nd_config_fini(&c);
    }
}

Test(resolve, threads_of_the_environment)
{
    static const keys_case good[] = {
        {"--num-processes 1", "launch.threads_per_worker=3", true},
        /* The configuration goes before the variable. */
        {"--num-processes 1 --threads-per-worker 2", "launch.threads_per_worker=2", true}};
    setenv("OMP_NUM_THREADS", "3,2", 1);
    expect_cases(good, 2, flags_in);
    setenv("OMP_NUM_THREADS", "4096", 1);
    expect_cases(&(keys_case){"--cpu", "launch.threads_per_worker=4096", true}, 1, flags_in);
    static const char *const bad[] = {"", "0", "-3", "many", "4097", "99999999999999999999"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        setenv("OMP_NUM_THREADS", bad[i], 1);
        expect_bad_flags("--num-processes 1", "OMP_NUM_THREADS is '|1 to 4096");
    }
}

static const char *const refused[][2] = {
    /* The mesh against the workers. */
    {"--num-processes 6 --dp-replicate-size 2 --dp-shard-size 2 --tp-size 2",
     "dp_replicate 2 x dp_shard 2 x cp 1 x tp 2 = 8 workers|launch.workers is 6"},
    {"--num-processes 6 --dp-shard-size -1 --tp-size 4", "dp_shard is -1|= 4|6 workers"},
    {"--num-processes 6 --dp-replicate-size -1 --dp-shard-size 4", "dp_replicate is -1|= 4"},
    {"--dp-replicate-size 16777216 --dp-shard-size 16777216 --cp-size 16777216 --tp-size 16777216",
     "more than 16777216 ranks"},
    /* Ranks that exchange heads. */
    {"--sp-size 2 --cp-comm ring", "--sp-size 2 asks for"},
    {"--ulysses 2", "parallel.ulysses 2 does not divide mesh.cp 1|--cp-size a multiple"},
    {"--cp-size 4 --ulysses 3", "parallel.ulysses 3 does not divide mesh.cp 4"},
    {"--cp-size 4 --ulysses 2 --cp-comm ulysses", "all 4 ranks of mesh.cp|parallel.ulysses is 2"},
    /* Nodes. */
    {"--num-processes 8 --nproc-per-node 3", "= 3|launch.workers is 8"},
    {"--num-processes 9 --nnodes 2", "9|2|multiple"},
    {"--node-rank 1", "node_rank is 1|1 nodes"},
    {"--nnodes 2", "rdzv_endpoint|HOST:PORT"},
    {"--nnodes 2 --rdzv-endpoint h:1", "rdzv_key_file|--make-key"},
    {"--nnodes 2 --rdzv-endpoint h:0 --rdzv-key-file k", "'h:0'|fixed"},
    {"--gpu-ids 0,,1", "'0,,1'|all"},
    {"--gpu-ids 0,a", "'0,a'"},
    {"--gpu-ids 12345", "'12345'"},
    {"--gpu-ids 0-3", "'0-3'"},
    {"--nnodes 4096 --nproc-per-node 65536", "more workers than|16777216"},
    /* Model and data. */
    {"--model-name llama", "'llama'|ORG/NAME"},
    {"--model-name ./a/b", "'./a/b'|--model-path"},
    {"--model-name a/b/c", "ORG/NAME"},
    {"--model-name ./b", "'./b'|ORG/NAME"},
    {"--model-name ~/b", "'~/b'|ORG/NAME"},
    {"--model-name /b", "'/b'|ORG/NAME"},
    {"--model-name a/", "'a/'|ORG/NAME"},
    {"--data-format megatron --tokenizer bytes", "megatron|tokenizer: file"},
    {"--data-format llmc --tokenizer bytes", "llmc|tokenizer: file"},
    {"--data-format jsonl --tokenizer file", "jsonl|tokenizer: bytes"},
    {"--data-format text --tokenizer file", "text|tokenizer: bytes"},
    /* Training. */
    {"--lr 1e-4 --min-lr 1e-3", "min_lr 0.001|lr 0.0001"},
    {"--precision fp8 --fp8-recipe rowwise --fp8-all-gather",
     "fp8.all_gather|tensorwise|--fp8-all-gather false"},
    {"--precision bf16 --fp8-recipe rowwise --fp8-all-gather", "fp8.all_gather"},
    {"--deterministic --autotune", "train.deterministic and kernels.autotune"},
    {"--sequence-length 134217728 --micro-batch-size 65536 "
     "--gradient-accumulation-steps 1000000",
     "134217728|2^52"},
    {MOST_TOKENS " --dp-shard-size 2", "9.01e+15 tokens|x 2 data-parallel ranks"},
    {MOST_TOKENS " --dp-replicate-size 2", "9.01e+15 tokens"},
    /* Settings of GPUs are not for CPUs. */
    {"--cuda-graphs true --device cpu", "kernels.cuda_graphs is true|--cuda-graphs false"},
    {"--comm-blocks 16 --device cpu", "kernels.comm_blocks is 16|--comm-blocks 0"},
    {"--product-processors 116 --device cpu",
     "kernels.product_processors is 116|--product-processors 0"},
    {"--nccl-alone true --device cpu", "launch.nccl_alone is true|--nccl-alone false"},
};

Test(resolve, what_contradicts_itself_is_refused)
{
    expect_refusals(refused, sizeof refused / sizeof *refused, flags_in);
    expect_bad_value("--data-path", "", "data.path is empty");
    expect_bad_value("--tokenizer", "", "data.tokenizer is empty");
    expect_bad_text("launch: {device: cpu}\nkernels: {cuda_graphs: true}\n",
                    "kernels.cuda_graphs is true");
    static const char *const bad[] = {"h", "h:", ":5", "h:65536", "h:x", "::1:5", "[::1:5", "h:-1"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        expect_bad_value("--rdzv-endpoint", bad[i], bad[i]);
        cr_expect_not_null(strstr(nd_error_last()->message, "HOST:PORT"));
    }
    expect_bad_value("--gpu-ids", "", "launch.gpu_ids");
}

/* The file names both data files, as the shipped ones do. */
Test(resolve, the_usual_validation_file_goes_with_the_usual_data)
{
    static const char *const cases[][2] = {
        {"--data-path=my.txt", ""},
        {"--data-path=my.txt --validation-path=my_valid.txt", "my_valid.txt"},
        {"--validation-path=data/valid.txt --data-path=my.txt", "data/valid.txt"},
        {"--data-path=data/train.txt", "data/valid.txt"},
        {"--num-steps=3", "data/valid.txt"},
    };
    static const char shipped[] = "data: {path: data/train.txt, validation_path: data/valid.txt}\n"
                                  "train: {validation_interval: 50}\n";
    char *text = NULL;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_ok(file_and_flags(&c, shipped, cases[i][0]));
        assert_ok(nd_config_resolve(&c));
        cr_expect_str_eq(c.data.validation_path, cases[i][1], "case %zu", i);
        /* The worker reads what ndlaunch resolved. */
        assert_ok(nd_config_to_yaml(&c, false, &text));
        nd_config_fini(&c);
        assert_ok(read_text(&c, text));
        cr_expect_str_eq(c.data.validation_path, cases[i][1], "case %zu, read again", i);
        nd_config_fini(&c);
        free(text);
    }
}

Test(resolve, a_validation_file_that_nobody_named_may_be_missing)
{
    static const keys_case cases[] = {
        {"--num-steps 1", "data.validation_path="},
        /* An error when it is opened. */
        {"--validation-path data/valid.txt", "data.validation_path=data/valid.txt"}};
    cr_assert_eq(chdir("/"), 0, "where there is no data/valid.txt");
    expect_cases(cases, 2, flags_in);
}

Test(resolve, checks_what_was_put_into_the_struct)
{
    assert_ok(nd_config_init(&c));
    c.train.steps = 0;
    expect_sentence(nd_config_resolve(&c), ND_ERR_CONFIG, "train.steps is 0");
    c.train.steps = 1;
    c.optimizer.betas[1] = 2;
    expect_sentence(nd_config_resolve(&c), ND_ERR_CONFIG, "optimizer.betas");
    nd_config_fini(&c);
}

/* 400 s a GB of text that is encoded, and eight times as much where it is compressed; other formats
 * are mapped and open at once. 10 s a GB of a model that is verified, be its files links as in a
 * cache. Each file has 3 GB. */
Test(resolve, time_to_index_the_data)
{
    static const struct {
        const char *path, *validation, *tokenizer, *model; /* within the folder */
        nd_data_format format;
        double seconds;
    } cases[] = {{"none", "none", "bytes", "", ND_DATA_AUTO, 0},
                 {"big.jsonl", "none", "bytes", "", ND_DATA_AUTO, 1200},
                 {"big.jsonl", "big.jsonl", "bytes", "", ND_DATA_AUTO, 2400},
                 {"big.jsonl", "big.jsonl", "bytes", "", ND_DATA_TEXT, 0},
                 {"big.jsonl", "big.jsonl", "model", "", ND_DATA_TEXT, 2400},
                 {"x[1]", "none", "bytes", "", ND_DATA_AUTO, 1200}, /* its name is no pattern */
                 {"x*/*.jsonl", "none", "bytes", "", ND_DATA_AUTO, 1200},
                 {"x*/*.jsonl", "none", "model", "", ND_DATA_AUTO, 1200},
                 {"a.ndjson.zst", "none", "bytes", "", ND_DATA_AUTO, 9600},
                 {"none", "none", "bytes", "x[1]", ND_DATA_AUTO, 0}, /* nothing to verify by */
                 {"none", "none", "bytes", "model", ND_DATA_AUTO, 60}};
    static const char *const files[] = {"big.jsonl", "x[1]/a.jsonl", "a.ndjson.zst", "model/blob"};
    tempdir dir;
    tempdir_make(&dir);
    cr_assert_eq(mkdir(tempdir_file(&dir, "x[1]"), 0700), 0);
    cr_assert_eq(mkdir(tempdir_file(&dir, "model"), 0700), 0);
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        cr_assert_eq(truncate(tempdir_write(&dir, files[i], "", 0), 3000000000), 0); /* no disk */
    }
    tempdir_write(&dir, "model/SHA256SUMS", "", 0);
    cr_assert_eq(symlink("blob", tempdir_file(&dir, "model/model.safetensors")), 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_ok(nd_config_init(&c));
        assert_ok(nd_text_replace(&c.data.path, tempdir_file(&dir, cases[i].path)));
        assert_ok(
            nd_text_replace(&c.data.validation_path, tempdir_file(&dir, cases[i].validation)));
        assert_ok(nd_text_replace(&c.data.tokenizer, cases[i].tokenizer));
        assert_ok(nd_text_replace(&c.model.path, tempdir_file(&dir, cases[i].model)));
        c.data.format = cases[i].format;
        cr_expect_float_eq(nd_config_data_seconds(&c), cases[i].seconds, 1e-6, "case %zu", i);
        nd_config_fini(&c);
    }
    tempdir_remove(&dir);
}

/* Checks the text about idle keys among these flags. */
static void expect_idle(const char *flags, const char *wanted)
{
    char said[ND_IDLE_KEYS_MAX];
    assert_ok(flags_in(&c, flags));
    assert_ok(nd_config_idle_keys(&c, said));
    cr_expect_str_eq(said, wanted);
    nd_config_fini(&c);
}

Test(resolve, fp8_keys_without_effect_are_named)
{
    expect_idle("--precision bf16", "");
    expect_idle("--precision bf16 --fp8-all-gather --fp8-recipe delayed "
                "--fp8-health-interval 5",
                "fp8.recipe, fp8.all_gather, fp8.health_interval: without effect, because "
                "train.precision is not fp8");
    expect_idle("--precision fp8 --fp8-all-gather --fp8-filter auto", "");
    expect_idle("--precision fp8 --fp8-margin 1 --fp8-format e4m3 --fp8-amax-compute max "
                "--fp8-amax-history-length 4 --fp8-all-gather",
                "fp8.format, fp8.amax_history_length, fp8.amax_compute, fp8.margin: without "
                "effect, because only fp8.recipe delayed reads them");
    expect_idle("--precision fp8 --fp8-margin 1 --fp8-recipe delayed", "");
    expect_idle("--precision fp8 --fp8-health-interval 5", "");
}
