// SPDX-License-Identifier: Apache-2.0
/* Where the tasks of a step are put: pretended GPUs, and masks of CPUs. */
#include <dirent.h>
#include <sched.h>
#include <signal.h>
#include <string.h>

#include "tests/slurm/slurm_job.h"

static tempdir dir;

static void setup(void)
{
    slurm_setup(&dir);
}

static void teardown(void)
{
    launched_remove(&dir);
}

TestSuite(placement, .init = setup, .fini = teardown, .timeout = 600);

static void probe(launched *l, const char *gpus)
{
    slurm_run(l, &dir, "probe",
              (const char *[]){"--nodes=2", "--ntasks=8", "--overcommit", "--mpi=pmix", gpus, NULL},
              "tests/slurm/slurm_probe", NULL);
    cr_assert_eq(launched_wait(l, SLURM_SECONDS), 0, "%s", launched_read(l));
}

Test(placement, a_gpu_per_task_is_ordinal_0)
{
    launched l;
    char words[128];
    probe(&l, "--gpus-per-task=1");
    for (int rank = 0; rank < 8; rank++) { /* Slurm shows each task another GPU */
        snprintf(words, sizeof words,
                 "rank %d of 8, local %d of 4, node %d of 2 (node%d): GPUs %d, ordinal 0\n", rank,
                 rank % 4, rank / 4, rank / 4 + 1, rank % 4);
        assert_says(&l, words);
    }
}

Test(placement, gpus_per_node_are_chosen_by_the_local_rank)
{
    launched l;
    char words[128];
    probe(&l, "--gpus-per-node=4");
    for (int rank = 0; rank < 8; rank++) {
        snprintf(words, sizeof words,
                 "local %d of 4, node %d of 2 (node%d): GPUs 0,1,2,3, ordinal %d\n", rank % 4,
                 rank / 4, rank / 4 + 1, rank % 4);
        assert_says(&l, words);
    }
}

/* Every thread of the process may run on `cpu` and nowhere else. */
static void assert_threads_on(pid_t pid, int cpu)
{
    char path[64];
    int threads = 0;
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    DIR *tasks = opendir(path);
    cr_assert_not_null(tasks);
    for (struct dirent *e; (e = readdir(tasks)) != NULL;) {
        cpu_set_t set;
        pid_t thread = (pid_t)atol(e->d_name);
        if (thread > 0 && sched_getaffinity(thread, sizeof set, &set) == 0) {
            cr_assert(CPU_COUNT(&set) == 1 && CPU_ISSET(cpu, &set), "thread %d of %d", (int)thread,
                      (int)pid);
            threads++;
        }
    }
    closedir(tasks);
    cr_assert_geq(threads, 2); /* data loading, at least, has one of its own */
}

/* Two tasks with a CPU each: neither divides it, and no thread leaves it. */
Test(placement, no_thread_leaves_the_mask_of_its_task)
{
    launched l;
    static char record[1 << 16];
    const char *const options[] = {"--nodes=1", "--ntasks=2", "--overcommit", "--mpi=pmix", NULL};
    int cpus[2], found = 0;
    cpu_set_t all;
    char bind[64];
    cr_assert_eq(sched_getaffinity(0, sizeof all, &all), 0);
    for (int cpu = 0; cpu < CPU_SETSIZE && found < 2; cpu++) {
        if (CPU_ISSET(cpu, &all)) {
            cpus[found++] = cpu;
        }
    }
    cpus[1] = found > 1 ? cpus[1] : cpus[0];
    snprintf(bind, sizeof bind, "taskset -c $((SLURM_PROCID ? %d : %d)) \"$@\"", cpus[1], cpus[0]);
    slurm_arguments a = {0};
    char ndtrain[PATH_MAX];
    snprintf(ndtrain, sizeof ndtrain, "%s/ndtrain", launched_build_root());
    slurm_add(&a, (const char *[]){"-c", bind, "bash", ndtrain, "train", "--num-processes", "2",
                                   "--dp-shard-size", "2", "--num-steps", "1000000", NULL});
    slurm_add(&a, slurm_flags(&dir, "bound"));
    slurm_add(&a, (const char *[]){"--threads-per-worker", "0", NULL});
    slurm_run(&l, &dir, "bound", options, "/bin/bash", a.list);
    launched_until(&l, "\nstep ", 1, SLURM_SECONDS);
    int job = slurm_current_job();
    assert_threads_on(slurm_worker(job, 0), cpus[0]);
    assert_threads_on(slurm_worker(job, 1), cpus[1]);
    kill(l.pid, SIGUSR1);
    cr_assert_eq(launched_wait(&l, SLURM_SECONDS), 75, "%s", launched_read(&l));
    slurm_run_record(&dir, "bound", record, sizeof record);
    snprintf(bind, sizeof bind, "\"cpus\": \"%d\"", cpus[0]);
    cr_assert_not_null(strstr(record, bind), "%s", record);
    cr_assert_not_null(strstr(record, "cpu, 1 thread\""), "%s", record);
}
