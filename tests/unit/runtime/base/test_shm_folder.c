// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "runtime/base/shm_folder.h"
#include "tests/support/tempdir.h"

/* The folder of a dead process, with a file in it. Nobody has waited for the process yet. */
static void make_dead(char path[ND_SHM_FOLDER_MAX])
{
    int ends[2];
    cr_assert_eq(pipe(ends), 0);
    pid_t pid = fork();
    if (pid == 0) {
        char file[ND_SHM_FOLDER_MAX + 32];
        nd_shm_folder_make(path);
        snprintf(file, sizeof file, "%s/ucx_shm_posix_1", path);
        int fd = open(file, O_CREAT | O_WRONLY, 0600);
        bool good = fd >= 0 && write(ends[1], path, ND_SHM_FOLDER_MAX) == ND_SHM_FOLDER_MAX;
        _exit(good ? 0 : 1);
    }
    siginfo_t end;
    cr_assert_eq(read(ends[0], path, ND_SHM_FOLDER_MAX), ND_SHM_FOLDER_MAX);
    cr_assert_eq(waitid(P_PID, (id_t)pid, &end, WEXITED | WNOWAIT), 0);
    cr_assert_eq(end.si_status, 0);
    cr_assert_eq(access(path, F_OK), 0, "%s", path);
}

Test(shm_folder, is_private_and_goes_with_its_process)
{
    char path[ND_SHM_FOLDER_MAX], again[ND_SHM_FOLDER_MAX];
    struct stat st;
    nd_shm_folder_make(path);
    cr_assert_eq(stat(path, &st), 0, "%s", path);
    cr_assert_eq(st.st_mode & 0777, 0700);
    nd_shm_folder_make(again);
    cr_assert_str_eq(again, path);
    nd_shm_folder_remove();
    cr_assert_neq(access(path, F_OK), 0);
}

Test(shm_folder, those_of_dead_processes_are_removed_and_no_others)
{
    char dead[ND_SHM_FOLDER_MAX], alive[ND_SHM_FOLDER_MAX], others[3][ND_SHM_FOLDER_MAX];
    unsigned long user, space;
    long pid;
    nd_shm_folder_make(alive);
    make_dead(dead);
    /* They have another user, another namespace of pids, and another kind of name. */
    cr_assert_eq(sscanf(dead, "/dev/shm/ndtrain-%lu-%lu-%ld-", &user, &space, &pid), 3);
    for (unsigned long i = 0; i < 3; i++) {
        snprintf(others[i], sizeof others[i], "/dev/shm/ndtrain-%lu-%lu-%ld-1%s", user + (i == 0),
                 space + (i == 1), pid, i == 2 ? "x" : "");
        cr_assert_eq(mkdir(others[i], 0700), 0);
    }
    nd_shm_folders_clean();
    cr_expect_neq(access(dead, F_OK), 0, "%s is there", dead);
    cr_expect_eq(access(alive, F_OK), 0, "%s is gone", alive);
    for (int i = 0; i < 3; i++) {
        cr_expect_eq(rmdir(others[i]), 0, "%s is gone", others[i]);
    }
    nd_shm_folder_remove();
}

/* Anybody may make such a name in /dev/shm. */
Test(shm_folder, a_link_is_not_followed)
{
    tempdir dir;
    char dead[ND_SHM_FOLDER_MAX];
    tempdir_make(&dir);
    const char *file = tempdir_write(&dir, "kept", "x", 1);
    make_dead(dead);
    cr_assert_gt(waitpid(-1, NULL, 0), 0);
    nd_fs_remove_tree(dead);
    cr_assert_eq(symlink(dir.path, dead), 0);
    nd_shm_folders_clean();
    cr_expect_eq(access(file, F_OK), 0);
    unlink(dead);
    tempdir_remove(&dir);
}
