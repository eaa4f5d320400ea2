// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_TEXT_RECORDS_H
#define ND_TESTS_TEXT_RECORDS_H
/* The tools of Python checks read and write records: a number, 32 bits little-endian, and so many
 * bytes or numbers. */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "runtime/base/status.h"

/* The tool ends. */
static inline void fail(const char *what)
{
    fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, what, nd_error_last()->message);
    exit(1);
}

/* The next record, owned by the caller; NULL at the end. */
static inline void *read_record(size_t each, size_t *count)
{
    uint32_t n;
    if (fread(&n, sizeof n, 1, stdin) != 1) {
        return NULL;
    }
    void *data = malloc(n * each + 1);
    if (!data || fread(data, each, n, stdin) != n) {
        fail("a record is cut");
    }
    *count = n;
    return data;
}

static inline void write_all(const void *data, size_t each, size_t count)
{
    if (count > 0 && fwrite(data, each, count, stdout) != count) {
        fail("the output cannot be written");
    }
}

static inline void write_record(const void *data, size_t each, size_t count)
{
    write_all(&(uint32_t){(uint32_t)count}, sizeof(uint32_t), 1);
    write_all(data, each, count);
}

#endif
