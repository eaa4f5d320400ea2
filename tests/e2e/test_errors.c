// SPDX-License-Identifier: Apache-2.0
/*
 * Bad input as a user meets it: ndlaunch as a process, its exit code (docs/launch.md) and the words
 * of its sentence. Every case runs in a folder of its own with a good model, good data and a good
 * configuration, of which one thing is broken. Nothing may be written where a run is refused.
 */
#include <criterion/criterion.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "runtime/base/clock.h"
#include "tests/support/patience.h"
#include "tests/support/port.h"
#include "tests/support/sentences.h"
#include "tests/support/shell.h"
#include "tests/support/skip.h"

static tempdir dir;

static const char model[] =
    "{\"model_type\": \"llama\", \"vocab_size\": 256, \"hidden_size\": 32, \"intermediate_size\": "
    "64, "
    "\"num_hidden_layers\": 1, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, "
    "\"max_position_embeddings\": 128%s}";

static void setup(void)
{
    char text[4096], config[1024];
    cr_assert_eq(setenv("XDG_CACHE_HOME", dir.path, 1), 0); /* of JSON lines */
    memset(text, 'a', sizeof text);
    tempdir_write(&dir, "text.txt", text, sizeof text);
    int n = snprintf(config, sizeof config, model, "");
    tempdir_write(&dir, "model.json", config, (size_t)n);
}

TEMPDIR_SUITE(errors, setup, .timeout = 280);

/* The good flags, then the broken ones; FROM names the model. */
#define FROM_FLAGS(model_flag)                                                                     \
    " " model_flag " --set data.path=text.txt --sequence-length 32 --num-steps 1 --device cpu "    \
    "--set output.dir=out --set output.save_model=false "
#define FROM(model_flag) ND_LAUNCH FROM_FLAGS(model_flag)
#define LAUNCH           FROM("--set model.config=model.json")
#define TRAIN            ND_TRAIN " train" FROM_FLAGS("--set model.config=model.json")
#define PLAN             ND_TRAIN " plan" FROM_FLAGS("--set model.config=model.json")
#define CHECK_ON_CUDA                                                                              \
    "CUDA_VISIBLE_DEVICES= " ND_TRAIN " check --set model.config=model.json --data-path text.txt " \
    "--device cuda --sequence-length "

static void write_file(const char *name, const char *text)
{
    tempdir_write(&dir, name, text, strlen(text));
}

static int run_soon_ended(const char *command)
{
    double begin = nd_clock_seconds();
    int code = shell_run(&dir, command);
    cr_assert_lt(nd_clock_seconds() - begin, patience(PATIENCE_SECONDS), "%s", command);
    return code;
}

static void refused_with(int code, const char *command, const char *word_1, const char *word_2)
{
    int got = run_soon_ended(command);
    cr_assert_eq(got, code, "%s\nexit code %d, not %d:\n%s", command, got, code, shell_output);
    says(word_1, word_2);
    struct stat st;
    cr_assert_neq(stat(tempdir_file(&dir, "out/metrics.jsonl"), &st), 0, "%s\nwrote a run",
                  command);
}

static void refused_model(int code, const char *extra, const char *word_1, const char *word_2)
{
    char config[1024];
    int n = snprintf(config, sizeof config, model, extra);
    tempdir_write(&dir, "model.json", config, (size_t)n);
    refused_with(code, LAUNCH, word_1, word_2);
}

Test(errors, the_good_run_is_good)
{
    shell(&dir, LAUNCH);
}

Test(errors, yaml)
{
    write_file("c.yaml", "train:\n  stepz: 3\n");
    refused_with(2, LAUNCH "--config-file c.yaml", "c.yaml:2", "steps");
    write_file("c.yaml", "train:\n  steps: 3\n  steps: 4\n");
    refused_with(2, LAUNCH "--config-file c.yaml", "c.yaml:3", "steps");
    write_file("c.yaml", "train:\n  steps: many\n");
    refused_with(2, LAUNCH "--config-file c.yaml", "c.yaml:2", "many");
    write_file("c.yaml", "train:\n\tsteps: 3\n");
    refused_with(2, LAUNCH "--config-file c.yaml", "c.yaml:2", "tab");
    write_file("c.yaml", "train: [1, 2\n");
    refused_with(2, LAUNCH "--config-file c.yaml", "c.yaml:", "");
    write_file("c.yaml", "optimizer:\n  lr: -1\n");
    refused_with(2, LAUNCH "--config-file c.yaml", "lr", "-1");
    refused_with(2, LAUNCH "--config-file missing.yaml", "missing.yaml", "");
}

/* As some editors write it. */
Test(errors, a_byte_order_mark_is_none)
{
    write_file("c.yaml", "\xef\xbb\xbftrain:\n  steps: 1\n");
    write_file("rows.jsonl", "\xef\xbb\xbf{\"text\": \"abcdefghijklmnopqrstuvwxyz0123456789\"}\n");
    shell(&dir, LAUNCH "--config-file c.yaml --data-path rows.jsonl");
}

Test(errors, flags)
{
    refused_with(2, LAUNCH "--num-stepz 3", "--num-stepz", "num-steps");
    refused_with(2, LAUNCH "train.py", "train.py", "");
    refused_with(65, LAUNCH "--resume-from-checkpoint latest", "there is no folder out",
                 "--save-dir");
    refused_with(2, LAUNCH "--max-restarts 1", "max_restarts", "--checkpoint-frequency");
    refused_with(2, LAUNCH "--precision fp7", "fp7", "fp8");
    refused_with(2, "CUDA_VISIBLE_DEVICES= " LAUNCH "--device cuda", "cuda", "");
}

Test(errors, flags_of_another_command)
{
    refused_with(2, LAUNCH "--rank 0", "--rank; ", "`ndtrain plan`");
    refused_with(2, TRAIN "--rank 0", "--rank; ", "`ndtrain plan`");
    shell(&dir, TRAIN "--version");
    cr_assert_eq(strncmp(shell_output, "ndtrain " ND_VERSION "\n", strlen(ND_VERSION) + 9), 0);
}

Test(errors, mesh_and_shape)
{
    refused_with(2, LAUNCH "--num-processes 6 --dp-shard-size 2 --tp-size 2", "4", "6");
    refused_with(2, LAUNCH "--num-processes 3 --dp-shard-size 1 --tp-size 3", "heads", "3");
    refused_with(2, LAUNCH "--num-processes 8 --dp-shard-size 1 --cp-size 8 --sequence-length 40",
                 "40", "16");
    refused_with(2, LAUNCH "--num-processes 2 --dp-shard-size 1 --tp-size 2 --sequence-length 31",
                 "31", "2");
    refused_with(2, LAUNCH "--sequence-length 256", "256", "128");
}

#define FP8 LAUNCH "--precision fp8 "

Test(errors, fp8)
{
    refused_with(2, FP8 "--fp8-recipe tensorwize", "tensorwize", "it must be tensorwise");
    refused_with(2, FP8 "--fp8-recipe rowwise --fp8-all-gather", "fp8.all_gather", "delayed");
    refused_with(2, FP8 "--fp8-filter w1", "w1 matches no linear", "q_proj");
    refused_with(2, FP8 "--sequence-length 24", "24 tokens", "divisible by 16");
    refused_with(2, FP8 "--num-processes 2 --dp-shard-size 1 --tp-size 2", "8 x 32",
                 "divisible by 16");
    write_file("c.yaml", "distributed_type: FSDP\nnum_processes: 1\nmixed_precision: fp8\n"
                         "fp8_config:\n  backend: AO\n  amax_history_len: 16\n");
    refused_with(2, LAUNCH "--config-file c.yaml", "amax_history_len", "backend: TE");
}

Test(errors, model_config)
{
    refused_model(65, ", \"rope_scaling\": {\"rope_type\": \"ntk\", \"factor\": 2}", "model.json",
                  "ntk");
    refused_model(65, ", \"hidden_size\": 32", "model.json", "hidden_size");
    refused_model(65, ", \"attention_dropout\": 0.1", "model.json", "attention_dropout");
    refused_with(65, LAUNCH "--set model.config=nowhere.json", "nowhere.json", "");
    char config[1024];
    int n = snprintf(config, sizeof config, model, "");
    char *at = strstr(config, "\"hidden_size\": 32");
    memcpy(at, "\"hidden_size\": 33", 17);
    tempdir_write(&dir, "model.json", config, (size_t)n);
    refused_with(65, LAUNCH, "33", "");
}

/* The readers accept these numbers and ops do not: the sentence has key, value and limit. */
Test(errors, numbers_that_no_op_supports)
{
#define WIDE_MODEL                                                                                 \
    "{\"model_type\": \"llama\", \"vocab_size\": 256, \"intermediate_size\": 2, "                  \
    "\"num_hidden_layers\": 1, \"num_attention_heads\": 1, "                                       \
    "\"max_position_embeddings\": 134217728, "
    write_file("model.json", WIDE_MODEL "\"head_dim\": 2, \"hidden_size\": 1048576}");
    refused_with(65, LAUNCH, "hidden_size is 1048576", "at most 262144");
    refused_with(65, TRAIN, "hidden_size is 1048576", "at most 262144");
    refused_with(65, PLAN, "hidden_size is 1048576", "at most 262144");
    write_file("model.json", WIDE_MODEL "\"head_dim\": 1024, \"hidden_size\": 64}");
    refused_with(65, CHECK_ON_CUDA "32", "head_dim is 1024", "at most 256");
    refused_with(65, PLAN "--device cuda", "head_dim is 1024", "at most 256");
    refused_with(2, PLAN "--sequence-length 134217728 --micro-batch-size 65536",
                 "train.micro_batch_size 65536 x train.sequence_length 134217728",
                 "= 8796093022208 tokens");
    write_file("model.json",
               "{\"model_type\": \"llama\", \"vocab_size\": 16777216, \"hidden_size\": 262144, "
               "\"intermediate_size\": 4194304, \"num_hidden_layers\": 4096, "
               "\"num_attention_heads\": 4096, \"head_dim\": 1024, "
               "\"max_position_embeddings\": 134217728}");
    refused_with(1, PLAN "--sequence-length 134217728 --micro-batch-size 15",
                 "4096 layers of 2013265920 tokens", "no host can address");
}

/* One of the words, by a generator with a fixed seed. */
static const char *pick(uint64_t *state, const char *const *words, size_t count)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return words[(*state >> 33) % count];
}

#define PICK(...)                                                                                  \
    pick(&state, (const char *const[]){__VA_ARGS__},                                               \
         sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *))

/*
 * Numbers at the ends of what the readers accept, and in between: each is planned, or refused with
 * a documented code. A crash, an assertion or an endless loop is none.
 */
Test(errors, every_number_that_is_accepted_can_be_planned, .timeout = 280)
{
    enum { CASES = 80 };
    uint64_t state = 1;
    int planned = 0;
    for (int i = 0; i < CASES; i++) {
        char text[1024], command[2048];
        const char *heads = PICK("1", "8", "4096");
        snprintf(text, sizeof text,
                 "{\"model_type\": \"llama\", \"vocab_size\": %s, \"hidden_size\": %s, "
                 "\"intermediate_size\": %s, \"num_hidden_layers\": %s, \"num_attention_heads\": "
                 "%s, \"num_key_value_heads\": %s, \"head_dim\": %s, \"max_position_embeddings\": "
                 "1073741824, \"tie_word_embeddings\": %s}",
                 PICK("1", "3", "256", "16777216"), PICK("1", "32", "4096", "262144", "1048576"),
                 PICK("1", "16", "4194304"), PICK("1", "5", "4096"), heads, PICK("1", heads, heads),
                 PICK("2", "64", "258", "1024"), PICK("true", "false"));
        write_file("model.json", text);
        snprintf(command, sizeof command,
                 "ulimit -t 30; " ND_TRAIN " plan --set model.config=model.json --device %s "
                 "--sequence-length %s --micro-batch-size %s --set "
                 "train.gradient_accumulation_steps=%s --precision %s --set fp8.recipe=%s "
                 "--set parallel.recompute=%s --set parallel.cp_comm=%s --dp-replicate-size %s "
                 "--dp-shard-size %s --cp-size %s --tp-size %s --set "
                 "launch.threads_per_worker=%s --set fp8.filter='*'",
                 PICK("cpu", "cpu", "cuda"), PICK("1", "64", "4096", "134217728"),
                 PICK("1", "2", "65536"), PICK("1", "1000000"), PICK("bf16", "fp32", "fp8"),
                 PICK("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"),
                 PICK("none", "selective", "all_but_attention", "full"),
                 PICK("allgather", "ring", "ulysses"), PICK("1", "1", "4096"),
                 PICK("1", "2", "1024"), PICK("1", "1", "2", "64"), PICK("1", "1", "1", "8"),
                 PICK("1", "2", "4"));
        int code = shell_run(&dir, command);
        planned += strstr(shell_output, "\nestimated step") != NULL; /* it need not fit */
        const bool no = code == 1 && (strstr(shell_output, "error: the job does not fit") ||
                                      strstr(shell_output, "no host can address"));
        cr_expect(no || code == 0 || code == 2 || code == 65 || code == 71,
                  "exit code %d of %s\n%s\n%s", code, command, text, shell_output);
    }
    cr_assert_gt(planned, CASES / 10, "%d of %d could be planned", planned, (int)CASES);
}

/* Terabytes: refused before a worker starts, and by a worker that is started alone. */
Test(errors, a_model_that_no_host_holds)
{
    write_file("model.json",
               "{\"model_type\": \"llama\", \"vocab_size\": 256, \"hidden_size\": 65536, "
               "\"intermediate_size\": 1048576, \"num_hidden_layers\": 1, "
               "\"num_attention_heads\": 512}");
    refused_with(71, LAUNCH "--num-processes 2 --dp-shard-size 2", "2 workers with a plan of",
                 "of memory");
    refused_with(71, TRAIN, "out of host memory", "state");
}

/* A model that generate and eval can use. */
static void save_model(void)
{
    shell(&dir, TRAIN "--set output.save_model=true --set output.dir=saved "
                      "--log-level error && mv saved/model kept");
}

#define GENERATE(program)                                                                          \
    program " generate --model kept --prompt aa --max-new-tokens 9 --log-level warning "

/* The command runs, or ends with 71, the limit's name and one sentence. */
static void runs_or_names_limit(const char *limit, const char *arguments)
{
    char command[1024], option[16];
    snprintf(command, sizeof command, "rm -rf out; ulimit %s; %s", limit, arguments);
    snprintf(option, sizeof option, "(ulimit %.2s)", limit);
    int code = run_soon_ended(command);
    cr_assert(code == 0 || (code == 71 && strstr(shell_output, option)), "%s: %d:\n%s", command,
              code, shell_output);
    cr_assert_eq(sentences_in(shell_output), code != 0, "%s: %d and not one sentence:\n%s", command,
                 code, shell_output);
}

/* Whatever the limit, a job runs or ends with 71 and the limit's name. */
Test(errors, limits_of_memory, .timeout = 280)
{
    static const char *const limits[] = {"-v 20000",  "-v 70000",  "-v 90000",  "-v 110000",
                                         "-v 125000", "-v 132000", "-v 150000", "-v 400000",
                                         "-d 5000",   "-d 10000",  "-d 30000",  "-d 60000",
                                         "-d 70000",  "-d 90000",  "-d 200000"};
    save_model();
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        runs_or_names_limit(limits[i], LAUNCH "--num-processes 2 --dp-shard-size 2");
        if (i % 2 == 0) {
            runs_or_names_limit(limits[i], GENERATE(ND_LAUNCH) "--num-processes 2 --tp-size 2");
        } else {
            runs_or_names_limit(limits[i], ND_TRAIN " eval --model kept --data text.txt "
                                                    "--sequence-length 32 --log-level warning");
        }
    }
}

/* Without a launcher nobody compared the threads with the limits. */
Test(errors, threads_that_no_limit_allows)
{
    refused_with(71, "ulimit -d 600000; " TRAIN "--set launch.threads_per_worker=200",
                 "a worker of this job needs about ", "(ulimit -d)");
    refused_with(71, "ulimit -v 4000000; OMP_STACKSIZE=1G " TRAIN "--threads-per-worker 8",
                 "a worker of this job needs about ", "(ulimit -v)");
    refused_with(71, "OMP_STACKSIZE=900000G " TRAIN "--threads-per-worker 8",
                 "a worker of 8 threads cannot start more than 1 here",
                 "(OMP_STACKSIZE, ulimit -s)");
}

/* Stacks count once: those of 60 threads have no room where it is said. Where it is, nothing but
 * memory for the ops can be missing. */
static void threads_with_memory(const char *arguments, const int beyond[], int count)
{
    char command[1024];
    const char *words = "a worker of this job needs about ";
    int code = -1;
    snprintf(command, sizeof command, "rm -rf out; ulimit -v 500000; %s --threads-per-worker 60",
             arguments);
    refused_with(71, command, words, "(ulimit -v)");
    long long needed = atoll(strstr(shell_output, words) + strlen(words));
    for (int i = 0; i < count; i++) {
        snprintf(command, sizeof command, "rm -rf out; ulimit -v %lld; %s --threads-per-worker 60",
                 needed + beyond[i], arguments);
        code = run_soon_ended(command);
        cr_assert(code == 0 || code == 71, "%s: %d: %s", command, code, shell_output);
        cr_assert_eq(sentences_in(shell_output), code != 0, "%s: %s", command, shell_output);
    }
    cr_assert_eq(code, 0, "%s: %s", command, shell_output);
}

Test(errors, limits_of_memory_for_many_threads)
{
    static const int beyond[] = {16384, 100000, 600000}; /* KiB */
    save_model();
    threads_with_memory(TRAIN, beyond, 3);
    threads_with_memory(GENERATE(ND_TRAIN), (const int[]){200000}, 1);
}

/* With what the sentence asks for, and a little more, a run with every thread that serves it ends
 * well: the libraries do not say when they have no memory left. */
Test(errors, the_memory_that_is_asked_for_is_enough)
{
    const char *words = "a worker of this job needs about ";
    refused_with(71, "rm -rf out; ulimit -v 110000; " LAUNCH "--num-processes 2 --dp-shard-size 2",
                 words, "(ulimit -v)");
    long long needed = atoll(strstr(shell_output, words) + strlen(words));
    for (int beyond = 64; beyond <= 8192; beyond += 1024) {
        char command[1024];
        snprintf(command, sizeof command, "rm -rf out; ulimit -v %lld; %s", needed + beyond,
                 LAUNCH
                 "--num-processes 2 --dp-shard-size 2 --checkpoint-frequency 1 --log-with all");
        cr_assert_eq(run_soon_ended(command), 0, "%s: %s", command, shell_output);
    }
}

/* The room that UCX will need is known before the start. */
Test(errors, a_small_folder_of_shared_memory)
{
    char command[1024];
    if (shell_run(&dir, "unshare -rm mount -t tmpfs tmpfs /dev/shm") != 0) {
        tempdir_remove(&dir);
        skip_test("file systems cannot be mounted here (unshare -rm)");
    }
    snprintf(command, sizeof command,
             "unshare -rm sh -c 'mount -t tmpfs -o size=8m tmpfs /dev/shm && %s --num-processes 2 "
             "--dp-shard-size 2'",
             LAUNCH);
    refused_with(71, command, "/dev/shm has room for 8.0 MiB, but the shared memory of 2 workers",
                 "enlarge it");
    /* Without a limit the file system says that it has no room, and UCX takes none. */
    snprintf(command, sizeof command,
             "rm -rf out; unshare -rm sh -c 'mount -t tmpfs -o size=0 tmpfs /dev/shm && %s "
             "--num-processes 2 --dp-shard-size 2'",
             LAUNCH);
    refused_with(71, command, "/dev/shm has room for 0.0 MiB", "enlarge it");
    save_model();
    snprintf(command, sizeof command,
             "unshare -rm sh -c 'mount -t tmpfs -o size=8m tmpfs /dev/shm && %s --num-processes 2 "
             "--tp-size 2'",
             GENERATE(ND_LAUNCH));
    refused_with(71, command, "/dev/shm has room for 8.0 MiB, but the shared memory of 2 workers",
                 "enlarge it");
    cr_assert_eq(sentences_in(shell_output), 1, "%s", shell_output);
}

/* Ranks without ndlaunch, as torchrun starts them. The code is 71 where a rank ends with it. */
#define TORCHRUN                                                                                   \
    "for r in 1 0; do RANK=$r LOCAL_RANK=$r WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 "                      \
    "MASTER_ADDR=127.0.0.1 MASTER_PORT=%d " TRAIN " --num-processes 2 --dp-shard-size 2 "          \
    "--threads-per-worker %d & pids=\"$pids $!\"; done; code=0; for p in $pids; do wait $p; "      \
    "c=$?; test $c -gt 0 -a $code -ne 71 && code=$c; done; exit $code"

Test(errors, limits_and_shared_memory_of_ranks_without_ndlaunch)
{
    char command[2048];
    snprintf(command, sizeof command, "ulimit -v 150000; " TORCHRUN, port_reserve(), 8);
    refused_with(71, command, "(ulimit -v)", "of memory");
    if (shell_run(&dir, "unshare -rm mount -t tmpfs tmpfs /dev/shm") != 0) {
        tempdir_remove(&dir);
        skip_test("file systems cannot be mounted here (unshare -rm)");
    }
    snprintf(command, sizeof command,
             "unshare -rm sh -c 'mount -t tmpfs -o size=8m tmpfs /dev/shm && " TORCHRUN "'",
             port_reserve(), 1);
    refused_with(71, command, "/dev/shm has room for 8.0 MiB, but the shared memory of 2 workers",
                 "enlarge it");
    shell(&dir, shell_line(TORCHRUN, port_reserve(), 1));
}

Test(errors, text_and_jsonl)
{
    char config[1024];
    refused_with(65, LAUNCH "--set data.path=nowhere.txt", "nowhere.txt", "");
    write_file("empty.txt", "");
    refused_with(65, LAUNCH "--set data.path=empty.txt", "empty.txt", "empty");
    write_file("rows.jsonl", "{\"text\": \"good\"}\n{\"text\": \n");
    refused_with(65, LAUNCH "--set data.path=rows.jsonl", "rows.jsonl", "2");
    int n = snprintf(config, sizeof config, model, "");
    char *at = strstr(config, "256");
    memcpy(at, "300", 3);
    tempdir_write(&dir, "model.json", config, (size_t)n);
    refused_with(2, LAUNCH, "300", "256");
}

/* The message has what corrects a wrong path: the key, where it was given, and the folder. */
Test(errors, missing_files_name_who_asked_for_them)
{
#define BARE ND_LAUNCH " --device cpu --num-steps 1 --set output.dir=out "
    write_file("c.yaml", "train: {steps: 1}\ndata:\n  path: nowhere.txt\n");
    refused_with(65, BARE, "model.config is \"configs/model-small.json\" (the default)", dir.path);
    refused_with(65, BARE "--model-config=model.json --config-file c.yaml",
                 "c.yaml:3: data.path is \"nowhere.txt\"", dir.path);
    refused_with(65, BARE "--model-config=model.json --data none.txt", "--data is \"none.txt\"",
                 dir.path);
    refused_with(65, BARE "--set model.config=/none.json", "model.config is \"/none.json\"",
                 "--model-config");
    refused_with(65, BARE "--model_path none", "--model-path is \"none\"", dir.path);
    refused_with(65, LAUNCH "--validation-path none.txt", "--validation-path is \"none.txt\"",
                 "an empty path, --validation-path=, for no validation");
    refused_with(65, LAUNCH "--data-path none --tokenizer file", "--data-path is \"none\"",
                 "does not exist");
    refused_with(65, TRAIN "--data-path none", "--data-path is \"none\"", dir.path);
    refused_with(2, BARE "--config-file none.yaml", "--config-file none.yaml does not exist",
                 dir.path);
}

/* JSON lines may be compressed whatever their name: their reader finds that these are damaged. */
Test(errors, binary_data)
{
    static const struct {
        const char *begin;
        size_t size;
        const char *as_text, *as_rows;
    } cases[] = {
        {"\x1f\x8b\x08rest", 7, "gzip", "damaged"},
        {"\x28\xb5\x2f\xfdrest", 8, "zstd", "truncated"},
        {"PAR1rest", 8, "Parquet", "Parquet"},
        {"PK\x03\x04rest", 8, "zip", "zip"},
        {"\x89PNG\r\n\x1a\n", 8, "PNG", "PNG"},
    };
    for (size_t i = 0; i < 2 * sizeof cases / sizeof *cases; i++) {
        const char *name = i % 2 ? "data.jsonl" : "data.txt";
        char command[1024];
        tempdir_write(&dir, name, cases[i / 2].begin, cases[i / 2].size);
        snprintf(command, sizeof command, "%s --data-path %s", LAUNCH, name);
        refused_with(65, command, i % 2 ? cases[i / 2].as_rows : cases[i / 2].as_text, name);
    }
}

static void write_llmc(int32_t count, uint32_t token)
{
    uint32_t words[256 + 128] = {20240801, 7, (uint32_t)count};
    for (int i = 0; i < 128; i++) {
        words[256 + i] = token;
    }
    tempdir_write(&dir, "tokens.bin", words, sizeof words);
}

#define TOKENS_FILE "--set data.path=tokens.bin --set data.format=llmc --set data.tokenizer=file"

Test(errors, llmc)
{
    write_llmc(129, 3);
    refused_with(65, LAUNCH TOKENS_FILE, "tokens.bin", "129");
    write_llmc(128, 256);
    shell_ends(&dir, 65, LAUNCH TOKENS_FILE, "tokens.bin", "256");
}

/* A .idx of one sequence of `length` tokens beside a .bin of 200. */
static void write_megatron(int32_t length)
{
    uint8_t idx[34 + 4 + 8 + 16] = {0}, bin[400] = {0};
    uint64_t one = 1, two = 2, documents[2] = {0, 1};
    memcpy(idx, "MMIDIDX\0\0", 9);
    memcpy(idx + 9, &one, 8);
    idx[17] = 8;
    memcpy(idx + 18, &one, 8);
    memcpy(idx + 26, &two, 8);
    memcpy(idx + 34, &length, 4);
    memcpy(idx + 46, documents, 16);
    tempdir_write(&dir, "corpus.idx", idx, sizeof idx);
    tempdir_write(&dir, "corpus.bin", bin, sizeof bin);
}

#define CORPUS "--set data.path=corpus --set data.format=megatron --set data.tokenizer=file"

Test(errors, megatron)
{
    write_megatron(200);
    shell(&dir, LAUNCH CORPUS);
    shell(&dir, "rm -r out");
    write_megatron(300);
    refused_with(65, LAUNCH CORPUS, "corpus", "");
    shell(&dir, "truncate -s 40 corpus.idx");
    refused_with(65, LAUNCH CORPUS, "corpus.idx", "");
    shell(&dir, "rm corpus.idx");
    refused_with(65, LAUNCH CORPUS, "corpus", "");
}

Test(errors, weights)
{
    shell(&dir, LAUNCH "--set output.save_model=true");
    shell(&dir, "mv out/model good && rm -r out");
    shell(&dir, FROM("--model-path good"));
    shell(&dir, "rm -r out; cp -r good cut && truncate -s -8 cut/model.safetensors");
    refused_with(65, FROM("--model-path cut"), "model.safetensors", "");
    shell(&dir, "cp -r good extra && sed -i 's/lm_head.weight/lm_hood.weight/' "
                "extra/model.safetensors");
    refused_with(65, FROM("--model-path extra"), "lm_", "extra");
    shell(&dir, "cp -r good two && sed -i 's/model.norm.weight/lm_head.weight\\x22,\\x22/' "
                "two/model.safetensors");
    refused_with(65, FROM("--model-path two"), "two", "");
    refused_with(65, FROM("--model-path nowhere"), "nowhere", "");
    refused_with(65, FROM("--model-name some/model-that-is-not-here"),
                 "some/model-that-is-not-here", "");
}

Test(errors, output_folder)
{
    shell(&dir, LAUNCH);
    shell(&dir, "cp out/metrics.jsonl before");
    shell_ends(&dir, 73, LAUNCH, "out");
    cr_assert_eq(shell_run(&dir, "cmp before out/metrics.jsonl"), 0, "the older run is as it was");
    shell(&dir, "rm -r out && mkdir -p out/model");
    refused_with(73, LAUNCH, "already holds a run", "model");
    write_file("file", "x");
    shell_ends(&dir, 73, LAUNCH "--set output.dir=file/out");
}

Test(errors, rendezvous)
{
    shell(&dir, ND_LAUNCH " --make-key key");
    shell(&dir, "stat -c %a key | grep -x 600");
    shell_ends(&dir, 73, ND_LAUNCH " --make-key key");
}

/* The configuration of a GPU job can be checked on any machine; only a run needs the GPU. */
Test(errors, check_of_a_gpu_job_needs_no_gpu)
{
    shell(&dir, CHECK_ON_CUDA "32");
    says("configuration, model and data are good",
         "warning: this machine cannot run the job: device cuda ");
    refused_with(2, CHECK_ON_CUDA "256", "256", "128");
    static const char words[] = "warning: data.documents is separate, and the plain attention";
    says_not(words);
    shell(&dir, CHECK_ON_CUDA "32 --documents separate");
    says(words);
}

Test(errors, check_says_what_is_good)
{
    shell(&dir, ND_TRAIN " check --set model.config=model.json --data-path text.txt "
                         "--sequence-length 32 --device cpu");
    says("are good: mesh 1 x 1 x 1 x 1 (", "; 0.03 M parameters; ", " 4096 training tokens\n");
}

Test(errors, an_unknown_command_is_named)
{
    refused_with(2, ND_TRAIN " frob", "ndtrain has no command \"frob\"", "usage: ndtrain train");
    refused_with(2, ND_TRAIN " 'a\033[31m'", "no command \"a\\x1b[31m\"", "usage: ");
}

Test(errors, help)
{
    static const char *const commands[] = {"train", "check", "plan", ""};
    char command[200];
    for (int i = 0; i < 4; i++) {
        snprintf(command, sizeof command, ND_TRAIN " %s --help", commands[i]);
        shell(&dir, command);
        int lines = 0;
        for (const char *c = shell_output; *c; c++) {
            lines += *c == '\n';
        }
        const bool own = strcmp(commands[i], "plan") == 0;
        cr_expect(lines >= (own ? 8 : 24) && lines <= 42, "%d lines of %s", lines, command);
        says(own ? "\n  --rank R " : "\n  plan --help ");
        shell(&dir, shell_line(ND_TRAIN " %s --help mesh", commands[i]));
        cr_expect(strstr(shell_output, "(mesh.tp; default 1;") &&
                      !strstr(shell_output, "train.steps"),
                  "%s", shell_output);
        shell(&dir, shell_line(ND_TRAIN " %s --help all", commands[i]));
        says("(train.steps;", "Exit codes:");
        shell_ends(&dir, 2, shell_line(ND_TRAIN " %s --help mash", commands[i]),
                   "did you mean --help mesh?");
    }
}

/* Bytes that would move the cursor or begin a line of their own are written as \x1b and \n. */
Test(errors, control_characters_of_a_file_are_not_printed)
{
    static const char *const texts[] = {
        "mesh:\n  \"tp\\e[31m\": 2\n",
        "\"\\e[2J\": {tp: 2}\n",
        "train:\n  steps: \"3\\e]0;x\\a\"\n",
        "data:\n  path: \"a\\e[31m\"\n",
        "train:\n  steps: \"3\\nfake: line\"\n",
        "distributed_type: \"FSDP\\e[31m\\u009b1m\"\n",
        "distributed_type: FSDP\nnum_processes: 2\n\"debug\\e[31m\": true\n",
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        write_file("esc.yaml", texts[i]);
        shell_ends(&dir, 2, ND_TRAIN " plan --config-file esc.yaml");
        int lines = 0;
        for (const char *c = shell_output; *c; c++) {
            cr_expect(*c == '\n' || (*c & 0xe0) != 0, "byte %d is printed for %s", *c, texts[i]);
            lines += *c == '\n';
        }
        cr_expect_eq(lines, 1, "%s", shell_output);
        says_not("\xc2\x9b");
    }
    shell_ends(&dir, 2,
               "cp esc.yaml \"$(printf 'a\\033[31m.yaml')\"; " ND_TRAIN
               " plan --config-file \"$(printf 'a\\033[31m.yaml')\"",
               "a\\x1b[31m.yaml: the name holds a control character");
}
