// SPDX-License-Identifier: Apache-2.0
/* A JSONL file: whatever opens gives all its blocks, with ids that are bytes and labels that are
 * bytes or ignored. */
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runtime/base/fsio.h"
#include "trainer/data/data.h"

enum { S = 7 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int fd = -1;
    static char path[64];
    if (fd < 0) {
        fd = memfd_create("rows", MFD_CLOEXEC);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    ND_ASSERT(ftruncate(fd, 0) == 0 && nd_fs_pwrite(fd, "input", data, size, 0) == ND_OK);
    nd_dataset *dataset;
    if (nd_dataset_open(path, ND_DATA_JSONL, "bytes", 256, S, &dataset) != ND_OK) {
        return 0;
    }
    for (int64_t b = 0; b < nd_dataset_blocks(dataset); b++) {
        int32_t inputs[S], labels[S];
        ND_ASSERT(nd_dataset_block(dataset, b, inputs, labels) == ND_OK);
        for (int i = 0; i < S; i++) {
            ND_ASSERT(inputs[i] >= 0 && inputs[i] < 256);
            ND_ASSERT(labels[i] == ND_LABEL_IGNORED || (labels[i] >= 0 && labels[i] < 256));
        }
    }
    nd_dataset_close(dataset);
    return 0;
}
