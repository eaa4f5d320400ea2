// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_FUZZ_FUZZ_H
#define TESTS_FUZZ_FUZZ_H
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runtime/base/fs.h"

/* libFuzzer calls this function with each input; it returns 0. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A file in memory with the input, for readers of files: its path; *fd stays the same. */
static inline const char *fuzz_file(const uint8_t *data, size_t size, int *fd)
{
    static int file = -1;
    static char path[64];
    if (file < 0) {
        file = memfd_create("input", MFD_CLOEXEC);
        snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    }
    ND_ASSERT(ftruncate(file, 0) == 0 && nd_fs_pwrite(file, "input", data, size, 0) == ND_OK);
    *fd = file;
    return path;
}

#endif
