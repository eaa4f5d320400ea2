// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <string.h>

#include "runtime/device/host_memory.h"
#include "tests/support/tempdir.h"

static tempdir dir;

/* A file below the folder that stands for "/", with its folders. */
static void put(const char *path, const char *text)
{
    char *parent = NULL;
    assert_ok(nd_fs_parent(tempdir_file(&dir, path), &parent));
    assert_ok(nd_fs_make_folders(parent, "the folder", ""));
    free(parent);
    tempdir_write(&dir, path, text, strlen(text));
}

static void expect(uint64_t physical, uint64_t available)
{
    nd_host_memory m = nd_host_memory_read(dir.path);
    cr_expect_eq(m.physical, physical, "physical %llu", (unsigned long long)m.physical);
    cr_expect_eq(m.available, available, "available %llu", (unsigned long long)m.available);
}

Test(host_memory, the_least_of_machine_and_groups)
{
    tempdir_make(&dir);
    expect(0, 0);
    put("proc/meminfo", "MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    600 kB\n");
    expect(1000 * 1024, 600 * 1024);
    put("proc/self/cgroup", "1:cpu:/x\n0::/job/step\n");
    put("sys/fs/cgroup/job/step/memory.max", "max\n");
    put("sys/fs/cgroup/job/memory.max", "512000\n");
    put("sys/fs/cgroup/job/memory.stat", "anon 12000\nfile 400000\n");
    expect(512000, 500000);
    put("sys/fs/cgroup/memory.max", "9000000000\n");
    expect(512000, 500000);
    put("sys/fs/cgroup/job/memory.stat", "anon 600000\n");
    expect(512000, 0);
    put("proc/self/cgroup", "0::/\n"); /* a container's own name for its group */
    put("sys/fs/cgroup/memory.max", "800000\n");
    expect(800000, 600 * 1024);
    tempdir_remove(&dir);
}

Test(host_memory, of_this_machine)
{
    nd_host_memory m = nd_host_memory_read("");
    cr_assert_gt(m.physical, 0);
    cr_assert_leq(m.available, m.physical);
}
