// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DEVICE_HOST_MEMORY_H
#define ND_DEVICE_HOST_MEMORY_H
/*
 * The memory that this process may use: that of the machine, or of the control groups (version 2)
 * that it is in, as a container or a batch system sets them.
 */
#include <stdint.h>

typedef struct nd_host_memory {
    uint64_t physical;  /* bytes: of the machine, or the least limit of a control group */
    uint64_t available; /* bytes that no process uses now; the page cache counts as free */
} nd_host_memory;

/* `root` is "", or a folder that stands for "/" in a test. All zero where the kernel does not
 * provide the numbers. */
nd_host_memory nd_host_memory_read(const char *root);

#endif
