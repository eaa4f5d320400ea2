// SPDX-License-Identifier: Apache-2.0
/*
 * Systems that are not as they should be: disks that are full at any point of a run, and variables
 * of the environment with any content. A run works, or ends with a documented code and a sentence.
 */
#include <criterion/criterion.h>
#include <sched.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "tests/support/inputs.h"
#include "tests/support/patience.h"
#include "tests/support/sentences.h"
#include "tests/support/shell.h"

enum { COMMAND_MAX = 3000 };

static tempdir dir;

static void setup(void)
{
    inputs_write_text(&dir, 4000);
    inputs_write_model(&dir, 32, 64, 2);
}

TEMPDIR_SUITE(odd_systems, setup);

#define FLAGS                                                                                      \
    " --device cpu --model-config model.json --data-path text.txt --validation-path '' "           \
    "--sequence-length 32 --set launch.threads_per_worker=1 --log-level warning "

#define GENERATE                                                                                   \
    ND_TRAIN " generate --model kept --prompt ab --max-new-tokens 3 --threads-per-worker 1 "       \
             "--log-level warning "
#define EVAL                                                                                       \
    ND_TRAIN " eval --model kept --data text.txt --sequence-length 32 --threads-per-worker 1 "     \
             "--log-level warning "

static void save_model(void)
{
    shell(&dir, ND_TRAIN " train" FLAGS "--num-steps 1 --set output.save_model=true --set "
                         "output.dir=saved && mv saved/model kept");
}

static bool is_documented(int code)
{
    static const int codes[] = {0, 2, 65, 71, 73, 74};
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) {
        if (code == codes[i]) {
            return true;
        }
    }
    return false;
}

/* The command's code, which is documented and comes with one sentence unless it is 0. A checkpoint
 * that is not saved ends no run. */
static int ends_well(const char *command)
{
    double begin = nd_clock_seconds();
    int code = shell_run(&dir, command);
    cr_assert(is_documented(code), "%s\nended with %d:\n%s", command, code, shell_output);
    int unsaved = lines_that_begin(shell_output, "error: the checkpoint of step ");
    cr_assert_eq(sentences_in(shell_output) - unsaved, code != 0,
                 "%s\nended with %d and not one sentence:\n%s", command, code, shell_output);
    cr_assert_lt(nd_clock_seconds() - begin, patience(PATIENCE_SECONDS), "%s", command);
    return code;
}

/* One run in a small file system. 90: a saved model is not whole; 91: a checkpoint is not. */
static int run_on_disk(int kib, bool saves_model)
{
    return ends_well(shell_line(
        "unshare -rm sh -c \"mount -t tmpfs -o size=%dk none small; " ND_TRAIN " train" FLAGS
        "--num-steps 4 --checkpoint-frequency 2 --set output.dir=small/out "
        "--set output.save_model=%s; code=\\$?; cd small/out 2>/dev/null || exit \\$code; "
        "if test -e model; then (cd model && sha256sum --quiet -c SHA256SUMS) || exit 90; fi; "
        "for c in checkpoint-*; do test ! -e \\$c || " ND_TRAIN
        " ckpt verify \\$c >/dev/null || exit 91; done; exit \\$code\"",
        kib, saves_model ? "true" : "false"));
}

/* Disks of every size up to one that is large enough. Whatever is left there is whole. */
Test(odd_systems, full_disks)
{
    int codes[2][2] = {{0}};
    shell_needs_disk(&dir, "small");
    for (int i = 0, pages = 1; pages < 700; pages += pages < 16 ? 3 : pages / 4, i++) {
        int code = run_on_disk(pages * 4, i % 2);
        cr_assert(code == 0 || code == 73, "%d KiB: %d:\n%s", pages * 4, code, shell_output);
        codes[i % 2][code == 0]++;
    }
    cr_assert(codes[0][0] > 0 && codes[0][1] > 0 && codes[1][0] > 0 && codes[1][1] > 0,
              "full and large enough: %d %d, with a model %d %d", codes[0][0], codes[0][1],
              codes[1][0], codes[1][1]);
}

/* Limits of the size of a file (ulimit -f, in KiB), up to one that is large enough. */
Test(odd_systems, limits_of_files)
{
    static const int limits[] = {0, 1, 3, 8, 40, 150, 100000};
    int codes[2] = {0};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        int code =
            ends_well(shell_line("rm -rf out; bash -c \"ulimit -f %d; " ND_TRAIN " train" FLAGS
                                 "--num-steps 20 --checkpoint-frequency 10 --set log.interval=1 "
                                 "--set output.save_model=%s --set output.dir=out\"",
                                 limits[i], i % 2 ? "true" : "false"));
        cr_assert(code == 0 || code == 73, "ulimit -f %d: %d:\n%s", limits[i], code, shell_output);
        codes[code == 0]++;
    }
    cr_assert(codes[0] > 0 && codes[1] > 0, "too small %d, large enough %d", codes[0], codes[1]);
}

/* Variables that a worker without ndlaunch inherits. */
Test(odd_systems, environments_of_a_worker)
{
    static const char *const variables[] = {"RANK=abc",
                                            "RANK=-1",
                                            "RANK=5",
                                            "RANK=0 WORLD_SIZE=0",
                                            "RANK=0 WORLD_SIZE=99999999999",
                                            "WORLD_SIZE=2",
                                            "LOCAL_RANK=7",
                                            "MASTER_ADDR= MASTER_PORT=70000",
                                            "ND_CONFIG_FD=77",
                                            "ND_CONFIG_FD=x",
                                            "ND_KEY_FD=-5",
                                            "ND_PROGRESS_FD=1",
                                            "ND_RUN_ID=$(printf 'a\\033b')",
                                            "ND_NODE_RANK=9 ND_NNODES=3",
                                            "ND_RESTART_EPOCH=-2",

                                            "OMP_NUM_THREADS=0",
                                            "OMP_NUM_THREADS=many",
                                            "OMP_PLACES=nonsense",
                                            "OMP_PROC_BIND=spread GOMP_SPINCOUNT=infinite",
                                            "OMP_WAIT_POLICY=ACTIVE",
                                            "OMP_STACKSIZE=1",
                                            "OMP_THREAD_LIMIT=1",
                                            "ONEDNN_MAX_CPU_ISA=NONE",
                                            "ONEDNN_VERBOSE=9",
                                            "DNNL_MAX_CPU_ISA=SSE41",
                                            "HOME=",
                                            "-u HOME",
                                            "-u PATH",
                                            "-i",
                                            "TMPDIR=/nonexistent",
                                            "LANG=xx_YY.UTF-8 LC_ALL=tr_TR",
                                            "TZ=:../../etc/passwd",
                                            "COLUMNS=0",
                                            "COLUMNS=-1",
                                            "TERM=",
                                            "NO_COLOR=1 CLICOLOR_FORCE=1",
                                            "CUDA_VISIBLE_DEVICES=-1",
                                            "CUDA_HOME=/nonexistent",
                                            "MALLOC_ARENA_MAX=0 MALLOC_PERTURB_=85",
                                            "HF_HOME=/nonexistent",
                                            "SLURM_JOB_ID=x",
                                            "PMIX_RANK=0",
                                            "SLURM_PROCID=3 SLURM_NTASKS=2"};
    save_model();
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++) {
        ends_well(shell_line("rm -rf out; env %s " ND_TRAIN " train" FLAGS
                             "--num-steps 1 --set output.save_model=false --set output.dir=out",
                             variables[i]));
        if (i % 6 == 0) {
            ends_well(shell_line("env %s " GENERATE, variables[i]));
        }
    }
}

/* Outputs that take nothing. */
Test(odd_systems, full_and_closed_outputs_of_a_used_model)
{
    static const struct {
        const char *command;
        int code;
    } cases[] = {{GENERATE ">/dev/full", 73},
                 {GENERATE "--jsonl >/dev/full", 73},
                 {EVAL ">/dev/full", 73},
                 {GENERATE ">&-", 0},
                 {EVAL "2>&-", 0},
                 {"bash -c 'ulimit -f 0; " GENERATE ">text'", 73}};
    save_model();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int code = ends_well(cases[i].command);
        cr_expect_eq(code, cases[i].code, "%s: %d:\n%s", cases[i].command, code, shell_output);
    }
}

/* Variables that ndlaunch inherits, and its workers from it. */
Test(odd_systems, environments_of_a_job)
{
    static const char *const variables[] = {
        "RANK=3 WORLD_SIZE=7 LOCAL_RANK=9 MASTER_PORT=1 ND_KEY_FD=0 ND_CONFIG_FD=1 ND_RUN_ID=x",
        "-i",
        "TMPDIR=/nonexistent HOME=/nonexistent",
        "UCX_TLS=nonsense",
        "UCX_TLS=self",
        "UCX_TLS=tcp,self",
        "UCX_NET_DEVICES=none",
        "UCX_POSIX_DIR=/nonexistent",
        "UCX_LOG_LEVEL=nonsense",

        "OMP_NUM_THREADS=-3",
        "ND_WORKER=/",
        "ND_WORKER=/bin/true",
        "SLURM_JOB_ID=1 SLURM_NNODES=2 SLURM_NODEID=0"};
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++) {
        ends_well(shell_line(
            "rm -rf out; env %s " ND_LAUNCH FLAGS
            "--num-processes 2 --dp-shard-size 2 --num-steps 1 --set output.save_model=false "
            "--set output.dir=out --set launch.comm_timeout_seconds=10",
            variables[i]));
    }
}

/* Variables by which OpenMP's library would bind all threads to one CPU. */
static const char *const bindings[] = {
    "OMP_PROC_BIND=spread", "OMP_PROC_BIND=close OMP_PLACES=cores", "OMP_PLACES=threads",
    "GOMP_CPU_AFFINITY=0", "OMP_PROC_BIND=true GOMP_SPINCOUNT=100"};

/* Every thread of a program that computes with two may use the CPUs that the program was given. */
static void expect_own_mask(const char *binding)
{
    shell(&dir,
          shell_line(
              "rm -f lines text; mkfifo lines; env %s " ND_TRAIN
              " generate --model kept --interactive --max-new-tokens 3 --threads-per-worker 2 "
              "<lines >text 2>log & pid=$!; exec 3>lines; echo ab >&3; i=0; "
              "until test -s text; do i=$((i + 1)); test $i -lt 1000 || exit 1; sleep 0.01; done; "
              "grep -h Cpus_allowed_list /proc/$pid/task/*/status >all; exec 3>&-; wait $pid; "
              "test $(wc -l <all) -ge 2 && sort -u all >masks && "
              "grep Cpus_allowed_list /proc/self/status | diff - masks",
              binding));
}

Test(odd_systems, openmp_binds_no_thread)
{
    cpu_set_t set;
    char command[COMMAND_MAX];
    save_model();
    cr_assert_eq(sched_getaffinity(0, sizeof set, &set), 0);
    const int cpus = CPU_COUNT(&set);
    for (size_t i = 0; i < sizeof bindings / sizeof *bindings; i++) {
        expect_own_mask(bindings[i]);
        snprintf(
            command, sizeof command,
            "rm -rf out; env %s " ND_LAUNCH FLAGS
            "--num-processes 2 --dp-shard-size 2 --num-steps 1 --set output.save_model=false "
            "--set output.dir=out --log-level info 2>&1 | grep 'cpus: %d.* for 2 local workers'",
            bindings[i], cpus);
        shell(&dir, command);
    }
    for (int c = 0; c < CPU_SETSIZE && CPU_COUNT(&set) == cpus && cpus > 1; c++) {
        CPU_CLR(c, &set); /* the first one */
    }
    cr_assert_eq(sched_setaffinity(0, sizeof set, &set), 0);
    expect_own_mask(bindings[0]);
}

/* hwloc describes a machine whose cores have two CPUs each. */
Test(odd_systems, a_core_of_two_cpus_has_one_thread)
{
#define SMT "rm -rf out; HWLOC_SYNTHETIC='core:4 pu:2' " ND_TRAIN
#define RUN                                                                                        \
    " --num-steps 1 --set output.save_model=false --set output.dir=out --log-level info 2>&1 | "   \
    "grep "
    shell(&dir, SMT " train" FLAGS "--threads-per-worker 0" RUN
                    "'cpus: 8 of 4 cores for 1 local worker, 4 threads each, bound'");
    shell(&dir, SMT " train" FLAGS "--threads-per-worker 9" RUN
                    "'9 threads on 8 cpus, .* leave it out, or use 4$'");
}
