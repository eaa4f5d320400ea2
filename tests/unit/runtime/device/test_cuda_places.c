// SPDX-License-Identifier: Apache-2.0
/* Where libraries of CUDA are found beside the loader's own folders. */
#include <string.h>

#include "runtime/device/cuda_library.h"
#include "tests/support/shell.h"

static tempdir dir;

TEMPDIR_SUITE(cuda_places, tempdir_leave_empty);

/* Makes the file, and the folders above it. */
static void touch(const char *name)
{
    shell(&dir, shell_line("mkdir -p \"$(dirname '%s')\" && : >'%s'", name, name));
}

/* A path in the test's folder. */
static const char *at(const char *name)
{
    return printed("%s/%s", dir.path, name);
}

/* Checks that exactly these files are found, in this order. */
static void expect_found(const nd_cuda_places *places, const char *const *names)
{
    char found[PATH_MAX];
    int n = 0;
    for (; names[n]; n++) {
        cr_assert(nd_cuda_places_find(places, "libx.so.2", n, found), "%d: %s", n, names[n]);
        cr_expect_str_eq(found, at(names[n]));
    }
    cr_expect_not(nd_cuda_places_find(places, "libx.so.2", n, found), "also %s", found);
}

Test(cuda_places, named_toolkits_come_first_and_the_one_that_built_it_last)
{
    static const char *const names[] = {
        "home/lib64/libx.so.2", "path/targets/sbsa-linux/lib/libx.so.2",
        "env/lib/python3.11/site-packages/nvidia/x/lib/libx.so.2", "toolkit/lib/libx.so.2", NULL};
    for (int i = 0; names[i]; i++) {
        touch(names[i]);
    }
    const nd_cuda_places places = {at("home"), at("path"), at("env/bin/ndtrain"), at("toolkit")};
    expect_found(&places, names);
    touch("home/lib/libx.so.2");
    touch("home/lib/liby.so.2");
    static const char *const both[] = {"home/lib64/libx.so.2", "home/lib/libx.so.2", NULL};
    expect_found(&(nd_cuda_places){.home = at("home"), .program = "", .toolkit = ""}, both);
}

Test(cuda_places, a_program_within_packages_finds_those_beside_it)
{
    static const char *const names[] = {"e/lib/python3.12/site-packages/nvidia/cu13/lib/libx.so.2",
                                        "e/lib/python3.12/site-packages/nvidia/nccl/lib/libx.so.2",
                                        NULL};
    touch(names[0]);
    touch(names[1]);
    touch("other/lib/python3.12/site-packages/nvidia/cu13/lib/libx.so.2");
    nd_cuda_places places = {.program = at("e/lib/python3.12/site-packages/ndtrain/bin/ndtrain"),
                             .toolkit = ""};
    char found[PATH_MAX];
    for (int i = 0; names[i]; i++) {
        cr_assert(nd_cuda_places_find(&places, "libx.so.2", i, found));
        cr_expect_str_eq(found, at(names[i]));
    }
    places.program = at("elsewhere/bin/ndtrain");
    expect_found(&places, names + 2);
}

/* Characters that mean something in a pattern stand for themselves in a folder's name. */
Test(cuda_places, names_of_folders_are_no_patterns)
{
    static const char *const names[] = {"cuda [13]*/lib/libx.so.2", NULL};
    touch(names[0]);
    touch("cuda 1/lib/libx.so.2");
    expect_found(&(nd_cuda_places){.home = at("cuda [13]*"), .program = "", .toolkit = ""}, names);
}

Test(cuda_places, none_and_empty_names_find_nothing)
{
    touch("libx.so.2");
    expect_found(&(nd_cuda_places){.home = "", .path = NULL, .program = "", .toolkit = ""},
                 (const char *const[]){NULL});
}

/* A damaged file is passed over; the library behind it is opened. */
Test(cuda_places, a_library_is_opened_from_cuda_home)
{
    static const char *const names[] = {"libnd_probe.so.7", NULL};
    int (*probe)(void) = NULL;
    const nd_cuda_symbol symbols[] = {{"nd_probe", (void **)&probe}};
    const nd_cuda_symbol missing[] = {{"nd_probe_of_later", (void **)&probe}};
    unsetenv("CUDA_HOME");
    unsetenv("CUDA_PATH");
    cr_assert_eq(nd_cuda_library_open("the probe", names, symbols, 1), ND_ERR_CONFIG);
    const char *message = nd_error_last()->message;
    cr_expect(strstr(message, "the probe") && strstr(message, "libnd_probe.so.7") &&
                  strstr(message, "LD_LIBRARY_PATH") && strstr(message, "CUDA_HOME"),
              "%s", message);
    touch("lib64/libnd_probe.so.7");
    cr_assert_eq(symlink(getenv("ND_PROBE_FOLDER"), at("lib")), 0);
    setenv("CUDA_HOME", dir.path, 1);
    assert_ok(nd_cuda_library_open("the probe", names, symbols, 1));
    cr_expect_eq(probe(), 7);
    assert_fails(nd_cuda_library_open("the probe", names, missing, 1), ND_ERR_CONFIG,
                 "nd_probe_of_later");
}

/* Another library asks for the preloaded one by its bare name. */
Test(cuda_places, a_preloaded_library_is_found_by_its_name)
{
    static const char *const names[] = {"libnd_probe.so.7", NULL};
    void *handle = NULL;
    cr_assert_eq(symlink(getenv("ND_PROBE_FOLDER"), at("lib64")), 0);
    setenv("CUDA_HOME", dir.path, 1);
    nd_cuda_library_preload("libnd_probe.so.7", "libnd_probe.so*");
    unsetenv("CUDA_HOME");
    assert_ok(nd_cuda_library_load("the probe", names, false, &handle));
    nd_cuda_library_preload("libnd_nowhere.so.7", "*");
}
