// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_SLURM_SLURM_JOB_H
#define ND_TESTS_SLURM_SLURM_JOB_H
/*
 * Jobs of the private Slurm that tests/slurm/private_slurm runs these tests beside. A tiny model
 * trains on text in the test's folder; waits are bounded and generous, since a loaded machine is no
 * fault.
 */

#include "tests/launch/tiny_job.h"

/* A path in the source tree. */
const char *slurm_source(const char *path);

/* The tiny model and its text in the folder; ND_LAUNCH names the ndlaunch of this build. */
void slurm_setup(tempdir *dir);

/* tiny_flags, with a line in the log for every 20 steps and without the checkpoints of the batch
 * scripts. Valid until the next call. */
const char *const *slurm_flags(const tempdir *dir, const char *name);

/* Runs the job of slurm_flags, named "one", by ndlaunch on one host with a file of configs. */
void slurm_train_on_one_host(const tempdir *dir, const char *config, const char *const *further);

/*
 * sbatch <options> <script> <the tiny job's flags> <further>; output goes to dir/<name>. Returns
 * the job's id. `script` is one of scripts/slurm, or a path.
 */
int slurm_submit(launched *l, const tempdir *dir, const char *name, const char *const *options,
                 const char *script, const char *const *further);
/* Waits until the job was put back into the queue. */
void slurm_until_requeued(launched *l, int job);
/* Waits for its end, with this code, or 128 + signal. */
void slurm_expect(launched *l, int job, int code);
#define assert_job_ends(l, job, code, ...)                                                         \
    do {                                                                                           \
        slurm_expect(l, job, code);                                                                \
        assert_says(l, __VA_ARGS__);                                                               \
    } while (0)

/* srun <options> <program> <further> in the background; launched_wait gives its exit code.
 * `program` is of the build, or a path. */
void slurm_run(launched *l, const tempdir *dir, const char *name, const char *const *options,
               const char *program, const char *const *further);

/* The one job that runs now. */
int slurm_current_job(void);

/* The process on this host that is worker `rank` of the Slurm job, by its environment. */
pid_t slurm_worker(int job, int rank);

#endif
