// SPDX-License-Identifier: Apache-2.0
#include "tests/slurm/slurm_job.h"

#include <dirent.h>
#include <string.h>

#include "runtime/base/clock.h"

enum { POLL_US = 100000 };

const char *slurm_source(const char *path)
{
    return printed("%s/%s", getenv("ND_SOURCE_ROOT"), path);
}

void slurm_setup(tempdir *dir)
{
    cr_assert_not_null(getenv("ND_SLURM_FOLDER"), "run below tests/slurm/private_slurm");
    /* Jobs that a failed test left behind would keep this one waiting. */
    cr_assert_eq(
        launched_shell("scancel --user=root; for i in $(seq 300); do "
                       "[ -z \"$(squeue -h)\" ] && exit 0; sleep 0.1; done; squeue; exit 1"),
        0);
    tiny_write_inputs(dir);
    setenv("ND_LAUNCH", launched_program("ndlaunch"), 1);
}

const char *const *slurm_flags(const tempdir *dir, const char *name)
{
    static tiny_arguments a;
    a.count = 0;
    tiny_add(&a, tiny_flags(dir, name));
    tiny_add(&a, WORDS("--set", "log.interval=20", "--checkpoint-frequency=0",
                       "--resume-from-checkpoint=none"));
    a.list[a.count] = NULL;
    return a.list;
}

void slurm_train_on_one_host(const tempdir *dir, const char *config, const char *const *further)
{
    launched one;
    tiny_arguments a = {0};
    tiny_add(&a, WORDS(getenv("ND_LAUNCH"), "--config-file",
                       slurm_source(printed("configs/%s", config))));
    tiny_add(&a, slurm_flags(dir, "one"));
    tiny_add(&a, further);
    launched_start(&one, dir, "one", a.list);
    launched_expect(&one, 0);
}

static void start(launched *l, const tempdir *dir, const char *name, const tiny_arguments *a)
{
    const char *argv[TINY_ARGUMENTS_MAX + 3] = {"/usr/bin/env"}; /* finds the program in PATH */
    memcpy(argv + 1, a->list, sizeof a->list);
    launched_start(l, dir, name, argv);
}

int slurm_submit(launched *l, const tempdir *dir, const char *name, const char *const *options,
                 const char *script, const char *const *further)
{
    tiny_arguments a = {0};
    launched submitted;
    tiny_add(&a, WORDS("sbatch", "--parsable", printed("--output=%s/%s", dir->path, name)));
    tiny_add(&a, options);
    tiny_add(&a,
             WORDS(script[0] == '/' ? script : slurm_source(printed("scripts/slurm/%s", script))));
    tiny_add(&a, slurm_flags(dir, name));
    tiny_add(&a, further);
    start(&submitted, dir, printed("%s.sbatch", name), &a);
    launched_expect(&submitted, 0);
    snprintf(l->output, sizeof l->output, "%s/%s", dir->path, name);
    l->pid = 0;
    int job = atoi(launched_read(&submitted));
    cr_assert_gt(job, 0, "%s", submitted.text);
    return job;
}

/* The first number behind `key` in the job's record, and the one behind the next colon. */
static bool job_field(int job, const char *key, char *out, size_t capacity)
{
    char text[8192];
    FILE *f = popen(printed("scontrol show job --oneliner %d 2>/dev/null", job), "r");
    cr_assert_not_null(f);
    size_t got = fread(text, 1, sizeof text - 1, f);
    pclose(f);
    text[got] = '\0';
    const char *at = strstr(text, key);
    if (at) {
        at += strlen(key);
        snprintf(out, capacity, "%.*s", (int)strcspn(at, " \n"), at);
    }
    return at != NULL;
}

void slurm_until_requeued(launched *l, int job)
{
    int64_t deadline = nd_clock_ns() + (int64_t)LAUNCHED_SECONDS * 1000000000;
    char state[32] = "", restarts[32] = "";
    for (;;) {
        bool known = job_field(job, " JobState=", state, sizeof state) &&
                     job_field(job, " Restarts=", restarts, sizeof restarts);
        if (known && strcmp(state, "PENDING") == 0 && atoi(restarts) > 0) {
            return;
        }
        cr_assert_lt(nd_clock_ns(), deadline, "job %d is %s:\n%s", job, state, launched_read(l));
        usleep(POLL_US);
    }
}

/* Slurm has many states in between, such as REQUEUED. */
static bool has_ended(const char *state)
{
    static const char *const ends[] = {"COMPLETED", "FAILED",    "CANCELLED",
                                       "TIMEOUT",   "NODE_FAIL", "OUT_OF_MEMORY",
                                       "BOOT_FAIL", "DEADLINE",  "PREEMPTED"};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        if (strncmp(state, ends[i], strlen(ends[i])) == 0) {
            return true;
        }
    }
    return false;
}

void slurm_expect(launched *l, int job, int expected)
{
    enum { SECONDS = 300 }; /* some wait for a time limit */
    int64_t deadline = nd_clock_ns() + (int64_t)SECONDS * 1000000000;
    char state[32] = "", code[32] = "";
    int exit_code = 0, number = 0;
    for (;;) {
        bool known = job_field(job, " JobState=", state, sizeof state);
        if (known && has_ended(state)) {
            break;
        }
        if (nd_clock_ns() > deadline) {
            launched_shell("scancel --signal=KILL --full %d; scancel %d", job, job);
            cr_assert_fail("job %d is still %s after %d s:\n%s", job, state, SECONDS,
                           launched_read(l));
        }
        usleep(POLL_US);
    }
    cr_assert(job_field(job, " ExitCode=", code, sizeof code));
    cr_assert_eq(sscanf(code, "%d:%d", &exit_code, &number), 2);
    exit_code = number ? 128 + number : exit_code;
    cr_assert_eq(exit_code, expected, "%d, not %d: %s", exit_code, expected, launched_read(l));
}

void slurm_run(launched *l, const tempdir *dir, const char *name, const char *const *options,
               const char *program, const char *const *further)
{
    tiny_arguments a = {0};
    tiny_add(&a, WORDS("srun"));
    tiny_add(&a, options);
    tiny_add(&a, WORDS(program[0] == '/' ? program : launched_program(program)));
    tiny_add(&a, further);
    start(l, dir, name, &a);
}

int slurm_current_job(void)
{
    int job = 0;
    FILE *f = popen("squeue --noheader --states=RUNNING --format=%A", "r");
    cr_assert_not_null(f);
    cr_assert_eq(fscanf(f, "%d", &job), 1);
    pclose(f);
    return job;
}

pid_t slurm_worker(int job, int rank)
{
    char path[300], name[32];
    const char *of_job = printed("SLURM_JOB_ID=%d", job);
    const char *ranks[] = {printed("RANK=%d", rank), printed("PMIX_RANK=%d", rank)};
    pid_t found = 0;
    DIR *proc = opendir("/proc");
    cr_assert_not_null(proc);
    for (struct dirent *e; (e = readdir(proc)) != NULL;) {
        int pid = atoi(e->d_name);
        snprintf(path, sizeof path, "/proc/%d/comm", pid);
        FILE *f = pid > 0 ? fopen(path, "r") : NULL;
        bool worker = f && fgets(name, sizeof name, f) && strcmp(name, "ndtrain\n") == 0;
        if (f) {
            fclose(f);
        }
        if (worker && launched_has_entry(pid, of_job) &&
            (launched_has_entry(pid, ranks[0]) || launched_has_entry(pid, ranks[1]))) {
            found = pid;
        }
    }
    closedir(proc);
    cr_assert_gt(found, 0, "worker %d of job %d is not there", rank, job);
    return found;
}
