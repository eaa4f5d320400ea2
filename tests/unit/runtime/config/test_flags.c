// SPDX-License-Identifier: Apache-2.0
#include "support.h"

#include "runtime/config/commands.h"
#include "runtime/config/reader.h"

static nd_config c;

#define SPARES "--save-steps 7 --spare-nodes 2 --rdzv-endpoint h:1 --rdzv-key-file k"
static const keys_case good[] = {
    /* Both spellings and both forms; a switch may have a value. */
    {"--num-steps 5 --sequence_length=256 --micro_batch-size 3 --precision=fp32 --lr 1e-5 --betas "
     "0.8,0.9 --log_level=debug",
     "train.steps=5;train.sequence_length=256;train.micro_batch_size=3;train.precision=fp32;"
     "optimizer.lr=1e-05;optimizer.betas=[0.8, 0.9];log.level=debug"},
    {"--reshard-after-forward false --save-model --fp8-all-gather --num-steps 2",
     "parallel.reshard_after_forward=false;output.save_model=true;fp8.all_gather=true;train.steps="
     "2"},
    {"--dp-shard-size -1 --num-processes 4", "mesh.dp_shard=4", true},
    /* accelerate, torchrun and Finetrainers. */
    {"--num_machines 2 --machine_rank 1 --main_process_ip head --main-process-port=77 "
     "--rdzv-key-file k --num-processes 4 --mixed_precision no --use_fsdp --fsdp_version 2 "
     "--fsdp_activation_checkpointing true --max-restarts=0 --log-with=none "
     "--parallelism_config_tp_size 2 --rdzv_backend c10d",
     "launch.nnodes=2;launch.node_rank=1;launch.rdzv_endpoint=head:77;train.precision=fp32;"
     "parallel.recompute=full;mesh.tp=2;mesh.dp_shard=2",
     true},
    {"--standalone --nnodes=1:1 --nproc-per-node=4 --dp_degree 2 --dp_shards 2 --pp_degree 1 "
     "--cp_degree 1 --tp_degree 1 --train_steps 9 --batch_size 2 --gradient_checkpointing --beta1 "
     "0.7 --beta2 0.8 --lr_scheduler linear",
     "launch.workers=4;train.steps=9;train.micro_batch_size=2;parallel.recompute=full;optimizer."
     "betas=[0.7, 0.8];optimizer.schedule=linear",
     true},
    {"--multi-gpu --num-processes 4 --tp-size 2", "mesh.dp_replicate=2", true},
    {"--main_process_ip fd00::1 --main_process_port 77", "launch.rdzv_endpoint=[fd00::1]:77"},
    {"--main_process_port 77", "launch.rdzv_endpoint=127.0.0.1:77"},
    {"--cpu --quiet", "launch.device=cpu;log.level=error"},
    {"--cpu false --gradient_checkpointing no", "launch.device=auto;parallel.recompute=none"},
    {"--rdzv_id job7 --rdzv-backend c10d --monitor_interval 5 --tee=3 --redirects 0:1,1:2 "
     "--num-steps 3",
     "train.steps=3"},
    /* A word after a flag of accelerate's is its value, as it is after '='. */
    {"--use_fsdp --fsdp_sharding_strategy FULL_SHARD --num-processes 4",
     "parallel.reshard_after_forward=true;mesh.dp_replicate=1", true},
    {"--use_fsdp --fsdp_sharding_strategy SHARD_GRAD_OP --num-processes 4",
     "parallel.reshard_after_forward=false;mesh.dp_replicate=1", true},
    {"--use_fsdp --fsdp-reshard-after-forward FULL_SHARD --num-processes 4",
     "parallel.reshard_after_forward=true;mesh.dp_replicate=1", true},
    {"--use_fsdp --fsdp_reshard_after_forward false --num-processes 4",
     "parallel.reshard_after_forward=false;mesh.dp_replicate=1", true},
    {"--use_fsdp --fsdp_sharding_strategy 2 --num-processes 4",
     "parallel.reshard_after_forward=false;mesh.dp_replicate=1", true},
    {"--use_fsdp --fsdp_sharding_strategy NO_SHARD --num-processes 4",
     "parallel.reshard_after_forward=false;mesh.dp_replicate=4", true},
    {"--use_fsdp --fsdp_sharding_strategy NO_SHARD --dp-shard-size 4 --num-processes 4",
     "mesh.dp_replicate=1;mesh.dp_shard=4", true}, /* sizes go before */
    /* Without a meaning here: with a word or without. */
    {"--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --downcast_bf16 "
     "--fp8_override_linear_precision false,false,false --num-steps 3 --dynamo_use_dynamic",
     "train.steps=3"},
    /* mixed_precision fp8 means accelerate's backend AO, as in a file; the last one counts. */
    {"--mixed_precision fp16 --mixed_precision bf16", "train.precision=bf16"},
    {"--mixed-precision fp8", "train.precision=fp8;fp8.recipe=tensorwise;fp8.all_gather=true"},
    {"--precision fp8", "fp8.all_gather=false"},
    {"--mixed-precision fp8 --fp8-all-gather false", "fp8.all_gather=false"},
    {"--mixed-precision fp8 --mixed-precision bf16", "fp8.all_gather=false"},
    {"--mixed-precision fp8 --fp8-recipe rowwise", "fp8.recipe=rowwise;fp8.all_gather=false"},
    {"--mixed-precision fp8 --fp8-backend TE", "fp8.recipe=delayed;fp8.all_gather=false"},
    /* The flag of a model names a folder, which exists or is written as a path, or a name. */
    {"--model_name_or_path /tmp", "model.path=/tmp;model.name=;model.config="},
    {"--pretrained-model-name-or-path ./nowhere", "model.path=./nowhere;model.name="},
    {"--model_name_or_path some/model", "model.path=;model.name=some/model;model.config="},
    {"--model_name_or_path some/model.gguf", "model.path=some/model.gguf;model.name="},
    /* Checkpoints, as accelerate's scripts, transformers and we ourselves call them. */
    {"--total_limit 4 --project_dir a", "checkpoint.keep_last=4;output.dir=a"},
    {"--checkpoint-frequency 7 --save_total_limit 5 --max-restarts 2",
     "checkpoint.interval=7;checkpoint.keep_last=5;launch.max_restarts=2", true},
    {"--checkpointing_steps 7", "checkpoint.interval=7", true},
    {"--save-steps 7", "checkpoint.interval=7", true},
    {"--checkpoint-interval 7", "checkpoint.interval=7", true},
    {"--resume_from_checkpoint True", "checkpoint.resume=latest", true},
    {"--resume_from_checkpoint false", "checkpoint.resume=", true},
    {"--resume_from_checkpoint auto", "checkpoint.resume=auto", true},
    {"--resume_from_checkpoint 12", "checkpoint.resume=12", true},
    {"--resume_from_checkpoint a/b", "checkpoint.resume=a/b", true},
    /* Strategies of transformers' Trainer, in any order with steps; its default is 500. */
    {"--eval-strategy steps --eval_steps 10 --save_strategy steps --save_steps 20 "
     "--load_best_model_at_end --greater-is-better false --metric-for-best-model eval_loss "
     "--early-stopping-patience 3 --validation-path v.txt",
     "train.validation_interval=10;checkpoint.interval=20;checkpoint.load_best=true;train.early_"
     "stopping_patience=3",
     true},
    {"--save-strategy steps --eval-strategy steps --validation-path v.txt",
     "train.validation_interval=500;checkpoint.interval=500"},
    {"--save-steps 10 --save-strategy epoch", "checkpoint.interval=-1"},
    {"--save-strategy epoch --save-steps 10", "checkpoint.interval=-1"},
    {"--save-steps 50 --save-strategy no", "checkpoint.interval=0"},
    {"--save-strategy no --save-steps 50", "checkpoint.interval=0"},
    {"--validation-path v.txt --eval-strategy no", "data.validation_path="},
    {"--eval-strategy no --validation-path v.txt", "data.validation_path="},
    {"--eval-steps 7 --eval-strategy steps", "train.validation_interval=7"},
    {"--eval-strategy steps --eval-steps 7", "train.validation_interval=7"},
    /* The Trainer and its scripts. */
    {"--do_train --do_eval --greater_is_better False --metric_for_best_model loss "
     "--lr_scheduler_type constant_with_warmup --adam_beta1 0.7 --adam_beta2 0.8 --adam_epsilon "
     "1e-7 --optim adamw_torch_fused --num_warmup_steps 3",
     "optimizer.schedule=constant;optimizer.betas=[0.7, "
     "0.8];optimizer.eps=1e-07;optimizer.name=adamw;optimizer.warmup_steps=3"},
    {"--train_file t.txt --validation_file v.txt --max_seq_length 64 --data_seed 5 "
     "--max_train_steps 9",
     "data.path=t.txt;data.validation_path=v.txt;train.sequence_length=64;data.shuffle_seed=5;"
     "train.steps=9"},
    {"--max_steps -1 --num_train_epochs 2 --optim sgd --seq_len 32",
     "train.steps=0;train.epochs=2;train.sequence_length=32;optimizer.name=sgd"},
    {"--bf16 True --num-steps 3", "train.precision=bf16;train.steps=3"},
    {"--adam_beta1 0.7", "optimizer.betas=[0.7, 0.95]"},
    {"--main_process_ip [fd00::1]", "launch.rdzv_endpoint=[fd00::1]:29500"},
    {"--fsdp_sharding_strategy HYBRID_SHARD --dp-replicate-size 2 --tp-size 2 --num-processes 4",
     "mesh.dp_replicate=2;mesh.dp_shard=1", true},
    /* Each of these asks for what is so in every run. */
    {"--fp16 false --packing --eval_packing=True --tf32 no --assistant_only_loss yes --push_to_hub "
     "False --label_smoothing_factor 0.0 --remove_unused_columns --greater-is-better=0 "
     "--ddp_timeout 1800 --max_length 512 --num-steps 7",
     "train.steps=7;train.sequence_length=512;launch.comm_timeout_seconds=1800"},
    /* Lists: the Trainer's --report-to takes words, and a flag behind them ends the list. */
    {"--report-to tensorboard wandb --num-steps 7",
     "log.trackers=[tensorboard, wandb];train.steps=7"},
    {"--log_with=wandb,Trackio --num-steps 7", "log.trackers=[wandb, trackio];train.steps=7"},
    {"--num-steps=7 --log-trackers wandb,trackio all wandb",
     "log.trackers=[all, wandb, trackio];train.steps=7"},
    {"--num-steps=7 --set log.trackers=[all,trackio]", "log.trackers=[all, trackio]"},
    {"--log-with all --log-with wandb --num-steps=7", "log.trackers=wandb;train.steps=7"},
    {"--log-with all --report-to none", "log.trackers=none"},
    {"--log-with all --set log.trackers=[]", "log.trackers=none"},
    /* --set and --section.key set any key, and the later one of several wins. */
    {"--num-steps 5 --set train.steps=6 --set=optimizer.min-lr=1e-6 --set data.validation_path= "
     "--train.seed 3",
     "train.steps=6;optimizer.min_lr=1e-06;data.validation_path=;train.seed=3"},
    {"--set train.steps=6 --train-steps 5", "train.steps=5"},
    {"--save-steps 7 --save-total-limit 1 --checkpoint-staging wait", "checkpoint.keep_last=1",
     true},
    /* A spare node adds no worker. */
    {SPARES " --nnodes 2 --max-restarts 1 --node-rank 3 --nproc-per-node 2 --dp-shard-size -1",
     "launch.workers=4", true},
};

Test(flags, set_keys)
{
    expect_cases(good, sizeof good / sizeof *good, flags_in);
}

Test(flags, set_reaches_every_key)
{
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        char *value = NULL;
        assert_ok(nd_config_init(&c));
        assert_ok(nd_config_get(&c, nd_fields[i].name, &value));
        nd_config_fini(&c);
        cr_expect_eq(FLAGS(&c, "--set", printed("%s=%s", nd_fields[i].name, value)), ND_OK, "%s",
                     nd_error_last()->message);
        nd_config_fini(&c);
        free(value);
    }
}

Test(flags, each_flag_means_one_field)
{
    char word[ND_FLAG_NAME_MAX];
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        cr_expect(nd_list_word(nd_fields[i].flags, ' ', 0, word, sizeof word), "%s has no flag",
                  nd_fields[i].name);
        for (int w = 0; nd_list_word(nd_fields[i].flags, ' ', w, word, sizeof word); w++) {
            for (int other = 0; other < ND_FIELD_COUNT; other++) {
                cr_expect_eq(nd_flag_list_holds(nd_fields[other].flags, word), other == i, "--%s",
                             word);
            }
            cr_expect_null(strchr(word, '_'), "the table writes '-': %s", word);
        }
    }
}

Test(flags, processes_of_a_node_are_counted)
{
    static const struct {
        const char *visible, *text;
        int workers; /* 0: at least one */
    } cases[] = {{"0,1,5", "gpu", 3}, {"0,1,5", "auto", 3}, {"0", "cpu", 0},
                 {"", "auto", 0},     {"-1", "auto", 0},    {"0", "7", 7}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        setenv("CUDA_VISIBLE_DEVICES", cases[i].visible, 1);
        assert_ok(FLAGS(&c, "--standalone", "--nproc_per_node", cases[i].text));
        assert_ok(nd_config_resolve(&c));
        cr_expect(cases[i].workers ? c.launch.workers == cases[i].workers : c.launch.workers >= 1,
                  "case %zu: %lld workers", i, (long long)c.launch.workers);
        nd_config_fini(&c);
    }
}

/* -1 in CUDA's language, NoDevFiles in Slurm's. */
Test(flags, gpus_that_are_hidden_do_not_count)
{
    static const char *const hidden[] = {"", "-1", "NoDevFiles"};
    for (size_t i = 0; i < sizeof hidden / sizeof *hidden; i++) {
        setenv("CUDA_VISIBLE_DEVICES", hidden[i], 1);
        expect_bad_flags("--nproc_per_node gpu", "no GPU is visible here");
    }
}

#define FP16    "distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: fp16\n"
#define FSDP    "distributed_type: FSDP\nnum_processes: 2\n"
#define ADDRESS FSDP "main_process_ip: head\nmain_process_port: 1234\n"
/* Flags come after the file, wherever they stand; the last precision counts. A file's backend or
 * recipe is not replaced by the default of a flag. */
Test(flags, win_over_the_file)
{
    static const char *const cases[][3] = {
        {FP16, "--mixed_precision bf16", "train.precision=bf16"},
        {FP16, "--precision fp32", "train.precision=fp32"},
        {FSDP "fp8_config: {backend: TE}\n", "--mixed-precision fp8",
         "train.precision=fp8;fp8.recipe=delayed;fp8.all_gather=false"},
        {FSDP "mixed_precision: fp8\n", "--fp8-backend TE",
         "fp8.recipe=delayed;fp8.all_gather=false"},
        {"fp8: {recipe: delayed}\n", "--mixed-precision fp8",
         "train.precision=fp8;fp8.recipe=delayed;fp8.all_gather=false"},
        {FSDP "mixed_precision: fp8\n"
              "fp8_config: {backend: AO, enable_fsdp_float8_all_gather: false}\n",
         "--mixed-precision fp8", "fp8.recipe=tensorwise;fp8.all_gather=false"},
        {"fp8: {all_gather: false}\n", "--mixed-precision fp8",
         "train.precision=fp8;fp8.recipe=tensorwise;fp8.all_gather=false"},
        {"optimizer: {betas: [0.12345678901234568, 0.5]}\n", "--beta2 0.3",
         "optimizer.betas=[0.12345678901234568, 0.3]"},
        {"optimizer: {betas: [0.5, 0.12345678901234568]}\n", "--beta1 0.3",
         "optimizer.betas=[0.3, 0.12345678901234568]"},
        {"train: {epochs: 2}\n", "--num-steps 7", "train.steps=7;train.epochs=0"},
        {"train: {steps: 9}\n", "--num-train-epochs 2", "train.steps=0;train.epochs=2"},
        {"launch: {nnodes: 2, node_rank: 1, rdzv_endpoint: h:1}\n", "--standalone",
         "launch.nnodes=1;launch.node_rank=0;launch.rdzv_endpoint="},
        {ADDRESS, "--main_process_port 77", "launch.rdzv_endpoint=head:77"},
        {ADDRESS, "--standalone --main_process_port 77", "launch.rdzv_endpoint=127.0.0.1:77"},
        {ADDRESS, "--main-process-ip other", "launch.rdzv_endpoint=other:1234"},
        {"launch: {rdzv_endpoint: '[fd00::1]:1'}\n", "--master-port 77",
         "launch.rdzv_endpoint=[fd00::1]:77"},
        {"train: {epochs: 2}\n", "--num-steps 0", "train.steps=0;train.epochs=2"},
        {"train: {steps: 9}\n", "--num-train-epochs 0", "train.steps=9;train.epochs=0"},
        {"checkpoint: {interval: 7}\n", "--save-strategy steps", "checkpoint.interval=7"},
        {"checkpoint: {interval: epoch}\n", "--save-strategy steps", "checkpoint.interval=500"},
        {FSDP "parallelism_config: {parallelism_config_sp_size: 2}\n", "--cp-size 4 --cp-comm ring",
         "mesh.cp=4;parallel.cp_comm=ring"},
        {"mesh: {cp: 2}\n", "--sp-size 1", "mesh.cp=2"},
        {"mesh: {cp: 2}\nparallel: {cp_comm: ulysses}\n", "--sp-size 1", "mesh.cp=1"},
        {"mesh: {tp: 2}\nmodel: {config: a.json}\n", "--tp-size 1 --model-path folder",
         "mesh.tp=1;model.path=folder;model.config="},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_ok(file_and_flags(&c, cases[i][0], cases[i][1]));
        expect_keys(&c, cases[i][2], cases[i][0]);
        nd_config_fini(&c);
    }
    expect_bad(&c, file_and_flags(&c, FP16, "--num-steps 3"), ":3: mixed_precision is fp16|bf16");
    expect_bad_flags("--mixed_precision bf16 --mixed_precision fp16", "FP16");
}

static void take_four_nodes(const char *shards, const char *micro_batches)
{
    resolve_flags(
        &c, printed("--save-steps 7 --max-restarts 1 --min-nodes 1 --nnodes 4 --nproc-per-node 4 "
                    "--node-rank 3 --spare-nodes 1 --rdzv-endpoint h:1 --rdzv-key-file k "
                    "--tp-size 2 --dp-replicate-size 2 --dp-shard-size %s "
                    "--gradient-accumulation-steps %s",
                    shards, micro_batches));
}

/* Eight data-parallel ranks over four nodes. The samples of a step stay the same. */
Test(flags, of_fewer_nodes)
{
    nd_config fewer;
    take_four_nodes("-1", "3");
    static const struct {
        int64_t nodes, shards, micro_batches; /* 0: they do not divide */
    } cases[] = {{4, 4, 3}, {3, 3, 4}, {2, 2, 6}, {1, 1, 12}};
    for (int i = 0; i < 4; i++) {
        assert_ok(nd_config_with_nodes(&c, cases[i].nodes, &fewer));
        cr_expect_eq(fewer.launch.workers, 4 * cases[i].nodes);
        cr_expect_eq(fewer.launch.nnodes, cases[i].nodes);
        cr_expect(fewer.launch.node_rank == 0 && fewer.launch.spare_nodes == 0);
        cr_expect_eq(fewer.mesh.dp_shard, cases[i].shards);
        cr_expect_eq(fewer.resolved_mesh.size[ND_AXIS_DP_SHARD], cases[i].shards);
        cr_expect_eq(fewer.resolved_mesh.size[ND_AXIS_TP], 2);
        cr_expect_eq(fewer.train.gradient_accumulation_steps, cases[i].micro_batches);
        cr_expect_eq(nd_config_resolve(&fewer), ND_OK, "%s", nd_error_last()->message);
    }
    nd_config_fini(&c);
    take_four_nodes("-1", "1");
    expect_sentence(nd_config_with_nodes(&c, 3, &fewer), ND_ERR_CONFIG,
                    "the 8 micro-batches of a step do not divide over 6 data-parallel ranks");
    cr_expect_eq(nd_config_with_nodes(&c, 2, &fewer), ND_OK);
    nd_config_fini(&c);
    take_four_nodes("-1", "500001");
    expect_sentence(nd_config_with_nodes(&c, 2, &fewer), ND_ERR_CONFIG, "1000002|to 1000000");
    nd_config_fini(&c);
    take_four_nodes("4", "1");
    assert_ok(nd_config_with_nodes(&c, 4, &fewer));
    expect_sentence(nd_config_with_nodes(&c, 2, &fewer), ND_ERR_CONFIG,
                    "every axis of the mesh has a fixed size");
    nd_config_fini(&c);
}

Test(flags, profile_steps_are_steps_of_the_run)
{
    static const char *const bad[] = {"0", "3-2", "a", "1-", "1-2-3", "2-1001"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        expect_bad_value("--profile-steps", bad[i], "log.profile_steps is");
    }
    int64_t first = 0, last = 0;
    resolve_flags(&c, "--profile-steps 998-1000");
    cr_assert(nd_config_steps(c.log.profile_steps, &first, &last) && first == 998 && last == 1000);
    nd_config_fini(&c);
}

Test(flags, all_trackers_are_those_without_a_network)
{
    assert_ok(flags_in(&c, "--log-with all"));
    cr_expect(nd_config_tracks(&c, ND_TRACKER_TENSORBOARD));
    cr_expect_not(nd_config_tracks(&c, ND_TRACKER_WANDB));
    cr_expect_not(nd_config_tracks(&c, ND_TRACKER_TRACKIO));
    nd_config_fini(&c);
    assert_ok(flags_in(&c, "--log-with trackio"));
    cr_expect_not(nd_config_tracks(&c, ND_TRACKER_TENSORBOARD));
    cr_expect(nd_config_tracks(&c, ND_TRACKER_TRACKIO));
    nd_config_fini(&c);
}

#define BEST "--load-best-model-at-end"
static const char *const refused[][2] = {
    /* Checkpoints, and nodes. */
    {"--save-steps 7 --save-total-limit 1", "--save-total-limit (checkpoint.keep_last) is 1"},
    {"--max-restarts 1", "checkpoint.interval is 0"},
    {SPARES " --max-restarts 1", "launch.spare_nodes is 2, but launch.nnodes is 1"},
    {SPARES " --nnodes 2", "launch.spare_nodes is 2, but launch.max_restarts is 0"},
    {SPARES " --nnodes 2 --max-restarts 1 --node-rank 4",
     "launch.node_rank is 4, but the job has 4 nodes with its spare nodes"},
    {"--min-nodes 1", "launch.min_nodes is 1, and launch.nnodes is 1"},
    {"--min-nodes 3 --nnodes 2 --rdzv-endpoint h:1 --rdzv-key-file k",
     "launch.min_nodes is 3, and launch.nnodes is 2"},
    {"--min-nodes 1 --nnodes 2 --rdzv-endpoint h:1 --rdzv-key-file k",
     "launch.min_nodes is 1, but launch.max_restarts is 0"},
    {"--spike-factor 1", "train.spike_factor is 1, so that half of all losses would be spikes"},
    {"--report-to trackio", "pip install trackio"},
    {"--log-with tensorboard wandb", "log.trackers has wandb, which needs a Python"},
    {"--warmup-ratio 0.03 --warmup-steps 7",
     "optimizer.warmup_steps is 7, but optimizer.warmup_ratio 0.03 of 1000"},
    /* A key that needs another one. */
    {"--early-stopping-patience 2 --validation-path v.txt", "train.validation_interval is 0"},
    {"--early-stopping-patience 2 --eval-steps 3 --validation-path=",
     "data.validation_path is empty"},
    {"--sample-prompt Once --validation-path=",
     "train.sample_prompt is Once, but data.validation_path is empty"},
    {"--sample-prompt Once --validation-path v.txt --data-format llmc",
     "train.sample_prompt is Once, but data.tokenizer is file"},
    {BEST " --eval-steps 3", "there is no validation file"},
    {BEST " --validation-path v.txt", "train.validation_interval is 0"},
    {BEST " --validation-path v.txt --eval-steps 3", "checkpoint.interval is 0"},
    /* No validation of the state of step 10. */
    {BEST " --validation-path v.txt --eval-steps 3 --save-steps 10",
     "checkpoint.interval 10 is not a multiple of train.validation_interval 3|--save-steps 12"},
    {"--nonfinite rewind", "train.nonfinite is rewind|checkpoint.interval is 0"},
    {"--dump-steps 3", "log.dump_tensors is empty"},
    {"--dump-tensors *.grad", "log.dump_steps is empty"},
    {"--dump-tensors *.grad --dump-steps 3-2", "log.dump_steps is \"3-2\""},
    {"--max_steps -1", "train.steps is 0, but train.epochs is 0"},
    {"--log-with wandb --tracker-python /no/such",
     "log.python is \"/no/such\", which is no program here"},
    {"--log-with wandb --tracker-python no-such-python", "no program here"},
    {"--log-with wandb --tracker-python /tmp", "no program here"},
    {"--log-with wandb --tracker-python /etc/passwd", "no program here"},
    /* Flags of others that mean something else here, or nothing. */
    {"--greater-is-better True", "the lowest one"},
    {"--metric-for-best-model accuracy", "eval_loss"},
    {"--do-train false", "--do-train is false|ndtrain eval"},
    {"--per_device_eval_batch_size 8", "--micro-batch-size"},
    {"--with_tracking", "--log-with tensorboard"},
    {"--max_steps -2", "--max-steps is -2"},
    {"--overwrite_output_dir", "nothing is overwritten"},
    {"--log_with comet_ml", "--log-with is comet_ml|metrics.jsonl"},
    {"--log-trackers mlflow", "--log-trackers|tensorboard"},
    {"--num_train_epochs -3", "--num-train-epochs is -3|0 to"},
    {"--assistant_only_loss False", "--assistant-only-loss is False|--chat-format"},
    {"--label_smoothing_factor 0.1", "--label-smoothing-factor is 0.1"},
    {"--gradient_checkpointing_kwargs {}", "--recompute"},
    {"--config a.yaml", "--config-file"},
    {"--num_processes -1", "--num-processes is -1"},
    {"--use-fp8", "--precision fp8"},
    {"--fsdp_offload_params true", "--fsdp-offload-params|not offloaded"},
    {"--use-deepspeed", "--use-deepspeed"},
    {"--fsdp_sharding_strategy HALF_SHARD", "HALF_SHARD|SHARD_GRAD_OP"},
    {"--fsdp_sharding_strategy 6", "--fsdp-sharding-strategy is 6"},
    {"--fsdp_sharding_strategy 0", "--fsdp-sharding-strategy is 0"},
    {"--fsdp_sharding_strategy", "needs a value"},
    {"--fsdp_offload_params cpu", "cpu|not offloaded"},
    {"--same_network train.py", "train.py is a Python script"},
    {"--mixed-precision fp8 --fp8-margin 1", "margin|backend: TE"},
    {"--eval-strategy never", "--eval-strategy is never|--eval-steps"},
    {"--lr-scheduler-type polynomial", "constant, linear, cosine or wsd"},
    {"--optim adafactor", "--optim is adafactor|adamw"},
    {"--run_name x", "--save-dir runs/NAME"},
    {"--set train.warmup_ratio=0.1", "did you mean optimizer.warmup_ratio?"},
    {"--report-to tensorboard mlflow",
     "--report-to is tensorboard,mlflow|with \"mlflow\"|trackio, or a list of them"},
    {"--report-to trackio wandbb", "; did you mean wandb?"},
    {"--documents seperate",
     "--documents is seperate; it must be auto, join|; did you mean separate?"},
    {"--report-to none wandb", "none goes with no other"},
    {"--report-to=tensorboard,", "with \"\""},
    {"--report-to=", "--report-to is ; it must be none, tensorboard"},
    {"--report-to wandb train.py", "train.py is a Python script"},
    {"--report-to=wandb trackio", "unexpected argument 'trackio'"},
    {"--checkpointing-steps month", "--checkpointing-steps|month|epoch"},
    {"--save-strategy best", "--save-strategy is best|--save-steps"},
    {"--resume", "--resume|here it is --resume-from-checkpoint"},
    {"--max-restarts -1", "--max-restarts is -1|0 to"},
    {"--pp-size 2", "pipeline parallelism"},
    {"--mixed-precision fp16", "--mixed-precision|FP16"},
    {"--nnodes 1:4", "--nnodes is 1:4|one number"},
    {"--nnodes 1:10", "--nnodes is 1:10|one number"},
    {"--nproc-per-node many", "--nproc-per-node is 'many'|an integer"},
    {"train.py --num-steps 3", "train.py is a Python script"},
    {"-m pkg", "-m: ndlaunch starts its own worker"},
    {"--warmup_ratio=1.1", "--warmup-ratio is 1.1|0 to 1"},
    {"--bf16 false", "--precision fp32 or fp8"},
    {"--fp16", "--precision bf16, fp32 or fp8"},
    {"--packing 0", "--packing is 0|always packed"},
    {"--model a", "--model: |--model-path"},
    {"--training.steps 8", "unknown flag|did you mean --train.steps?"},
    {"--dynamo_bakend x", "unknown flag|dynamo_backend"},
    {"--fp8-backend TE --fp8-enable-fsdp-float8-all-gather true",
     "enable_fsdp_float8_all_gather|backend: AO"},
    {"--fp8-backend AO --fp8-margin 1", "margin|backend: TE"},
    {"--fp8-backend AO --fp8-format e4m3", "fp8_format|backend: TE"},
    {"--fp8-backend AO --fp8-amax-compute max", "amax_compute_algo|backend: TE"},
    /* Unknown or broken. */
    {"--num-stepz 3", "unknown flag --num-stepz|did you mean --num-steps?"},
    {"--sequence_lenght=3", "did you mean --sequence-length?"},
    {"--zzzzzzz", "unknown flag --zzzzzzz|--help"},
    {"train", "unexpected argument 'train'"},
    {"--num-steps", "--num-steps needs a value; --help train says which"},
    {"--resume_from_checkpoint", "needs a value; --help checkpoint says which"},
    {"--num-steps --lr 3", "--num-steps needs a value"},
    {"--num-steps x", "--num-steps is 'x'|an integer"},
    {"--num-steps 0", "train.steps is 0|--num-train-epochs"},
    {"--set train.stepz=3", "train.stepz|did you mean train.steps?"},
    {"--set optimizer.learning_rate=1", "did you mean optimizer.lr?"},
    {"--set optimizer.lerning_rate=1", "did you mean optimizer.lr?"},
    {"--set lr=1", "did you mean optimizer.lr?"},
    {"--set zzzzzzz=1", "--help all lists the keys"},
    {"--set train.steps", "section.key=value"},
    {"--set =3", "--set =3|section.key=value"},
    {"--rank 3", "unknown flag --rank|`ndtrain plan`"},
    {"--data-path a\nb", "--data-path|control character"},
    {"--data-path a\xff", "--data-path|UTF-8"},
    {"--model-path a --model-config b", "model.path is 'a'|model.config is 'b'"},
};

Test(flags, refused_with_a_sentence)
{
    char longer[300] = "train.";
    memset(longer + 6, 's', 290);
    strcpy(longer + 296, "=3");
    expect_refusals(refused, sizeof refused / sizeof *refused, flags_in);
    expect_bad_value("--set", longer, "section.key=value");
    expect_bad_value("--fsdp", "full_shard auto_wrap", "--dp-shard-size");
}

/* The arguments of transformers' Trainer: every one is known, so that a script's command line is
 * answered flag by flag, and not by a guess at a spelling. */
Test(flags, all_of_the_trainers_are_known)
{
    static const char names[] =
        "output_dir overwrite_output_dir do_train do_eval do_predict eval_strategy "
        "prediction_loss_only per_device_train_batch_size per_device_eval_batch_size "
        "gradient_accumulation_steps eval_accumulation_steps eval_delay torch_empty_cache_steps "
        "learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm "
        "num_train_epochs max_steps lr_scheduler_type lr_scheduler_kwargs warmup_ratio "
        "warmup_steps log_level log_level_replica log_on_each_node logging_dir logging_strategy "
        "logging_first_step logging_steps logging_nan_inf_filter save_strategy save_steps "
        "save_total_limit save_safetensors save_on_each_node save_only_model "
        "restore_callback_states_from_checkpoint use_cpu seed data_seed jit_mode_eval bf16 fp16 "
        "fp16_opt_level half_precision_backend bf16_full_eval fp16_full_eval tf32 local_rank "
        "ddp_backend debug dataloader_drop_last eval_steps dataloader_num_workers "
        "dataloader_prefetch_factor run_name disable_tqdm remove_unused_columns label_names "
        "load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip fsdp "
        "fsdp_config accelerator_config parallelism_config deepspeed label_smoothing_factor optim "
        "optim_args adafactor group_by_length length_column_name report_to "
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers dataloader_pin_memory "
        "dataloader_persistent_workers skip_memory_metrics push_to_hub resume_from_checkpoint "
        "hub_model_id hub_strategy hub_token hub_private_repo gradient_checkpointing "
        "gradient_checkpointing_kwargs auto_find_batch_size full_determinism torchdynamo "
        "ddp_timeout torch_compile torch_compile_backend torch_compile_mode "
        "include_tokens_per_second include_num_input_tokens_seen neftune_noise_alpha "
        "optim_target_modules batch_eval_metrics eval_on_start use_liger_kernel "
        "average_tokens_across_devices max_seq_length max_length dataset_text_field packing "
        "dataset_num_proc eval_packing";
    char flag[80] = "--";
    for (int i = 0; nd_list_word(names, ' ', i, flag + 2, sizeof flag - 2); i++) {
        nd_error_clear();
        (void)FLAGS(&c, flag, "true");
        cr_expect_null(strstr(nd_error_last()->message, "unknown"), "%s", nd_error_last()->message);
        nd_config_fini(&c);
    }
}

Test(flags, what_else_is_asked)
{
    static const struct {
        const char *flags, *topic;          /* topic: NULL: none is asked for */
    } cases[] = {{"--nonsense --help", ""}, /* help wins over mistakes */
                 {"--help fp8 --num-steps 3", "fp8"},
                 {"--help=all", "all"},
                 {"-h --num-steps 3", ""}, /* a flag is no section */
                 {"--version", NULL}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_ok(flags_in(&c, cases[i].flags));
        cr_expect(asked.help == (cases[i].topic != NULL) && asked.version == !cases[i].topic);
        cr_expect_str_eq(asked.help_topic, cases[i].topic ? cases[i].topic : "");
        nd_config_fini(&c);
    }
}

/* The text of --help TOPIC; owned by the caller. No line is longer than a screen is wide. */
static char *help_of(const char *topic, int *lines)
{
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    assert_ok(nd_config_help(out, ND_NDLAUNCH, topic));
    fclose(out);
    *lines = 0;
    for (const char *line = text; *line; ++*lines) {
        size_t n = strcspn(line, "\n");
        cr_expect_leq(n, 100u, "%.*s", (int)n, line);
        cr_expect(n == 0 || line[n - 1] != ' ', "'%.*s' ends with a space", (int)n, line);
        line += n + (line[n] == '\n');
    }
    return text;
}

Test(flags, help_fits_a_screen)
{
    int lines;
    char *text = help_of("", &lines);
    cr_expect(lines >= 24 && lines <= 40, "%d lines", lines);
    cr_expect(strstr(text, "usage: ndlaunch [") && strstr(text, "\n  --make-key FILE "));
    cr_expect(strstr(text, "\n  generate --help ") && !strstr(text, "\n  plan"));
    cr_expect(strstr(text, "of mode 0600\n"), "the rest of the sentence is for --help all");
    cr_expect(strstr(text, "\n  --num-steps N ") && strstr(text, "--help all"));
    cr_expect(strstr(text, "\n  --checkpoint-frequency N ") &&
              strstr(text, "\n  --resume-from-checkpoint TEXT "));
    for (int i = 0; i < ND_SECTION_COUNT; i++) {
        cr_expect(strstr(text, nd_sections[i].name), "%s is not named", nd_sections[i].name);
    }
    free(text);
}

Test(flags, help_all_names_every_key)
{
    int lines;
    char *text = help_of("all", &lines);
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        cr_expect(strstr(text, nd_fields[i].name), "%s is not in --help all", nd_fields[i].name);
    }
    cr_expect(strstr(text, "\n  --make-key FILE\n      writes a fresh job key") &&
              strstr(text, "; several nodes share one\n") &&
              strstr(text, "\nExit codes: 0 done, "));
    free(text);
}

Test(flags, help_of_a_section)
{
    int lines, all = 0;
    for (int s = 0; s < ND_SECTION_COUNT; s++) {
        char *text = help_of(nd_sections[s].name, &lines);
        for (int i = 0; i < ND_FIELD_COUNT; i++) {
            bool belongs = strcmp(nd_fields[i].section, nd_sections[s].name) == 0;
            const char *name = printed("(%s;", nd_fields[i].name);
            cr_expect_eq(strstr(text, name) != NULL, belongs, "%s with --help %s", name,
                         nd_sections[s].name);
            all += belongs;
        }
        free(text);
    }
    cr_expect_eq(all, ND_FIELD_COUNT);
    static const char *const wrong[][2] = {
        {"opimizer", "there is no such section; did you mean --help optimizer?"},
        {"lr", "there is no such section; --help optimizer has the key optimizer.lr"},
        {"zzzzzzzz", "--help alone lists the sections"},
        {"eval", "--help eval: this is a command; write ndlaunch eval --help"},
        {"ckpt", "there is no such section; --help alone lists the sections"}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        expect_sentence(nd_config_help(stdout, ND_NDLAUNCH, wrong[i][0]), ND_ERR_CONFIG,
                        wrong[i][1]);
    }
}

Test(flags, a_command_of_the_other_program_and_a_typo_are_named)
{
    static const struct {
        nd_program of;
        const char *word, *words;
    } cases[] = {
        {ND_NDLAUNCH, "plan", "no command \"plan\"; it is `ndtrain plan`"},
        {ND_NDLAUNCH, "report", "`ndtrain report`"},
        {ND_NDLAUNCH, "benc", "did you mean `ndlaunch bench`?"},
        {ND_NDLAUNCH, "train", "leave out the word train"},
        {ND_NDLAUNCH, "generat", "did you mean `ndlaunch generate`?"},
        {ND_NDLAUNCH, "tokenise", "did you mean `ndtrain tokenize`?"},
        {ND_NDTRAIN, "env", "it is `ndlaunch env`"},
        {ND_NDTRAIN, "pan", "did you mean `ndtrain plan`?"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        expect_sentence(nd_command_check_name(cases[i].of, cases[i].word), ND_ERR_CONFIG,
                        cases[i].words);
    }
    nd_error_clear();
    assert_ok(nd_command_check_name(ND_NDTRAIN, "something-else"));
}

Test(flags, a_typo_of_a_flag_of_a_command_is_named)
{
    static const struct {
        char *name, *flag;
        const char *word, *words;
    } cases[] = {
        {"generate", "--prompt", "--max-new-token", "did you mean --max-new-tokens?"},
        {"generate", "--prompt", "--modle=a", "did you mean --model?"},
        {"generate", "--prompt", "--json", "did you mean --jsonl?"},
        {"generate", "--prompt", "--sequence-lenght", "did you mean --sequence-length?"},
        {"generate", "--prompt", "--nothing-like-this",
         "ndtrain generate --help lists those of the command"},
        {"generate", "--prompt", "--tolerance", "it belongs to `ndtrain ckpt diff`"},
        {"generate", "--prompt", "--max_tokens=3", "--max_tokens: new tokens are counted by"},
        {"generate", "--prompt", "--lr", "--lr: it is about training"},
        {"plan", "--rank", "--explai", "did you mean --explain?"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *argv[] = {cases[i].name, cases[i].flag, "--a", (char *)cases[i].word, "3"};
        nd_cli cli;
        assert_ok(nd_config_init(&c));
        expect_sentence(nd_config_parse(&c, &cli, 5, argv), ND_ERR_CONFIG, cases[i].words);
        nd_config_fini(&c);
    }
}

/* Its dashes count as letters that are right. */
Test(flags, a_typo_of_a_flag_of_a_tool_is_named)
{
    static const struct {
        nd_command_id command;
        const char *flag, *words;
    } cases[] = {{ND_COMMAND_CONFIG, "--deflt", "did you mean --default?"},
                 {ND_COMMAND_REPORT, "--o=x", "has no flag --o; did you mean -o?"},
                 {ND_COMMAND_REPORT, "-p", "ndtrain report --help lists them"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *argv[] = {"", (char *)cases[i].flag};
        nd_command_flags line;
        expect_sentence(nd_command_flags_read(cases[i].command, 2, argv, &line), ND_ERR_CONFIG,
                        cases[i].words);
    }
}
