// SPDX-License-Identifier: Apache-2.0
/*
 * Before main of every test program: what the shell, a batch job or a container around it left is
 * put back to what tests expect, so that a result is of the code alone. Tests set what they need
 * themselves. Kept is what a developer sets for the tests: UCX_LOG_LEVEL, ND_CPU_ISA, ND_DOUBLE_*.
 */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

extern char **environ;

/* Variables in which ndlaunch, torchrun, Slurm and MPI name a worker and its job. */
static const char *const families[] = {"SLURM", "SBATCH_", "PMIX_",
                                       "PMI_",  "OMPI_",   "TORCHELASTIC_"};
static const char names[] =
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR "
    "MASTER_PORT ND_RUN_ID ND_NODE_RANK ND_NNODES ND_RESTART_EPOCH ND_RUN_FOLDER "
    "ND_MASTER_PORT ND_KEY_FD ND_PROGRESS_FD ND_CONFIG_FD ND_CONFIG_NAME ND_TERMINAL "
    "ND_LAUNCHER_PID ND_RDZV_KEY_FILE ND_WORKER OMP_WAIT_POLICY UCX_TLS UCX_NET_DEVICES "
    "POSIXLY_CORRECT CDPATH BASH_ENV ENV";

static int is_of_a_family(const char *entry)
{
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        if (strncmp(entry, families[i], strlen(families[i])) == 0) {
            return strncmp(entry, "SLURM_CONF=", 11) != 0; /* of the private Slurm of tests/slurm */
        }
    }
    return 0;
}

static void clear_environment(void)
{
    char list[sizeof names];
    memcpy(list, names, sizeof list);
    for (const char *name = strtok(list, " "); name; name = strtok(NULL, " ")) {
        unsetenv(name);
    }
    for (char **entry = environ; entry && *entry;) {
        char name[128];
        size_t length = strcspn(*entry, "=");
        if (is_of_a_family(*entry) && length < sizeof name) {
            memcpy(name, *entry, length);
            name[length] = '\0';
            unsetenv(name); /* the next one is in its place then */
        } else {
            entry++;
        }
    }
    setenv("LC_ALL", "C", 1);
}

/* nohup, cron and shells in the background leave signals ignored, and programs inherit that. */
static void reset_signals(void)
{
    static const int numbers[] = {SIGHUP,  SIGINT,  SIGQUIT, SIGPIPE, SIGALRM, SIGTERM,
                                  SIGUSR1, SIGUSR2, SIGCHLD, SIGTSTP, SIGTTIN, SIGTTOU};
    sigset_t none;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        signal(numbers[i], SIG_DFL);
    }
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

/* Tests that kill and abort leave no core files, which take long to write. */
static void limit_cores(void)
{
    struct rlimit cores;
    if (getrlimit(RLIMIT_CORE, &cores) == 0) {
        cores.rlim_cur = 0;
        setrlimit(RLIMIT_CORE, &cores);
    }
}

__attribute__((constructor)) static void put_back(void)
{
    clear_environment();
    reset_signals();
    limit_cores();
    umask(022);
}
