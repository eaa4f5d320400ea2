// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_SLURM_SLURM_JOB_H
#define ND_TESTS_SLURM_SLURM_JOB_H
/*
 * Jobs of the private Slurm that tests/slurm/private_slurm runs these tests beside. A tiny model
 * trains on text in the test's folder; waits are bounded and generous, since a loaded machine is no
 * fault.
 */
#include <criterion/criterion.h>
#include <stdbool.h>

#include "tests/launch/launched.h"

enum { SLURM_ARGUMENTS_MAX = 80, SLURM_SECONDS = 120 };

/* A folder with the tiny model and its text; ND_LAUNCH names the ndlaunch of this build. */
void slurm_setup(tempdir *dir);

/* An argument list that grows; all pointers are borrowed. */
typedef struct slurm_arguments {
    const char *list[SLURM_ARGUMENTS_MAX];
    int count;
} slurm_arguments;
void slurm_add(slurm_arguments *arguments, const char *const *further); /* to NULL; NULL is legal */
/* Flags of the tiny job: model, data, output in dir/run-<name>, F32, one thread. Valid until the
 * next call. */
const char *const *slurm_flags(const tempdir *dir, const char *name);

/*
 * sbatch <options> <script> <the tiny job's flags> <further>; output goes to dir/<name>. Returns
 * the job's id. `script` is one of scripts/slurm, or a path.
 */
int slurm_submit(launched *l, const tempdir *dir, const char *name, const char *const *options,
                 const char *script, const char *const *further);
/* Its exit code, or 128 + signal, once it has ended. */
int slurm_wait(launched *l, int job, double seconds);

/* srun <options> <program> <further> in the background; launched_wait gives its exit code.
 * `program` is of the build, or a path. */
void slurm_run(launched *l, const tempdir *dir, const char *name, const char *const *options,
               const char *program, const char *const *further);

/* The one job that runs now. */
int slurm_current_job(void);

/* A shell command; its exit status. */
int slurm_shell(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The numbers of each step of dir/run-<name>: loss, norm and learning rate with 17 digits. */
void slurm_metrics(const tempdir *dir, const char *name, char *out, size_t capacity);
/* Content of dir/run-<name>/run.json. */
void slurm_run_record(const tempdir *dir, const char *name, char *out, size_t capacity);

/* The process on this host that is worker `rank` of the Slurm job, by its environment. */
pid_t slurm_worker(int job, int rank);

#endif
