// SPDX-License-Identifier: Apache-2.0
/* Where the tasks of a step are put: pretended GPUs, and masks of CPUs. */
#include <dirent.h>
#include <sched.h>
#include <signal.h>
#include <string.h>

#include "tests/slurm/slurm_job.h"

static tempdir dir;
static launched l;

static void setup(void)
{
    slurm_setup(&dir);
}

TEMPDIR_SUITE(placement, setup, .timeout = 600);

static void probe(const char *gpus)
{
    slurm_run(&l, &dir, "probe",
              WORDS("--nodes=2", "--ntasks=8", "--overcommit", "--mpi=pmix", gpus),
              "tests/slurm/slurm_probe", NULL);
    launched_expect(&l, 0);
}

Test(placement, a_gpu_per_task_is_ordinal_0)
{
    probe("--gpus-per-task=1");
    for (int rank = 0; rank < 8; rank++) { /* Slurm shows each task another GPU */
        assert_says(
            &l, printed("rank %d of 8, local %d of 4, node %d of 2 (node%d): GPUs %d, ordinal 0\n",
                        rank, rank % 4, rank / 4, rank / 4 + 1, rank % 4));
    }
}

Test(placement, gpus_per_node_are_chosen_by_the_local_rank)
{
    probe("--gpus-per-node=4");
    for (int rank = 0; rank < 8; rank++) {
        assert_says(&l, printed("local %d of 4, node %d of 2 (node%d): GPUs 0,1,2,3, ordinal %d\n",
                                rank % 4, rank / 4, rank / 4 + 1, rank % 4));
    }
}

/* No thread of the process may run on a CPU that is not in the mask. */
static void assert_threads_within(pid_t pid, const cpu_set_t *mask)
{
    int threads = 0;
    DIR *tasks = opendir(printed("/proc/%d/task", pid));
    cr_assert_not_null(tasks);
    for (struct dirent *e; (e = readdir(tasks)) != NULL;) {
        cpu_set_t set, both;
        pid_t thread = (pid_t)atol(e->d_name);
        if (thread > 0 && sched_getaffinity(thread, sizeof set, &set) == 0) {
            CPU_OR(&both, &set, mask);
            cr_assert(CPU_EQUAL(&both, mask), "thread %d of %d", (int)thread, (int)pid);
            threads++;
        }
    }
    closedir(tasks);
    cr_assert_geq(threads, 2); /* data loading, at least, has one of its own */
}

/* The first task has two CPUs of this host and the second one has one of them, where there are
 * two. */
static int make_masks(cpu_set_t masks[2], char *commands, size_t capacity)
{
    int cpus[2] = {0, 0}, found = 0;
    cpu_set_t all;
    cr_assert_eq(sched_getaffinity(0, sizeof all, &all), 0);
    for (int cpu = 0; cpu < CPU_SETSIZE && found < 2; cpu++) {
        if (CPU_ISSET(cpu, &all)) {
            cpus[found++] = cpu;
        }
    }
    cpus[1] = found > 1 ? cpus[1] : cpus[0];
    CPU_ZERO(&masks[0]);
    CPU_ZERO(&masks[1]);
    CPU_SET(cpus[0], &masks[0]);
    CPU_SET(cpus[1], &masks[0]);
    CPU_SET(cpus[1], &masks[1]);
    snprintf(commands, capacity,
             "if [ $SLURM_PROCID = 0 ]; then exec taskset -c %d,%d \"$@\"; fi; "
             "exec taskset -c %d \"$@\"",
             cpus[0], cpus[1], cpus[1]);
    return found;
}

/* Masks of their own are not divided among the tasks of the node, and no thread leaves them. */
Test(placement, a_mask_is_used_whole_and_never_left)
{
    char commands[160];
    cpu_set_t masks[2];
    const char *const options[] = {"--nodes=1", "--ntasks=2", "--overcommit", "--mpi=pmix", NULL};
    tiny_arguments a = {0};
    int found = make_masks(masks, commands, sizeof commands);
    tiny_add(&a, WORDS("-c", commands, "bash", launched_program("ndtrain"), "train",
                       "--num-processes", "2", "--dp-shard-size", "2", "--num-steps", "1000000"));
    tiny_add(&a, slurm_flags(&dir, "bound"));
    tiny_add(&a, WORDS("--threads-per-worker", "0"));
    /* Slurm itself would bind the tasks to fewer. */
    setenv("SLURM_CPU_BIND", "none", 1);
    slurm_run(&l, &dir, "bound", options, "/bin/bash", a.list);
    launched_until(&l, "\nstep ", 1);
    int job = slurm_current_job();
    assert_threads_within(slurm_worker(job, 0), &masks[0]);
    assert_threads_within(slurm_worker(job, 1), &masks[1]);
    launched_end(&l, SIGUSR1, 75);
    const char *record = tiny_record(&dir, "bound");
    cr_assert_not_null(strstr(record, found > 1 ? "\"cpu, 2 threads\"" : "\"cpu, 1 thread\""), "%s",
                       record);
}
