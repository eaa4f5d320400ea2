// SPDX-License-Identifier: Apache-2.0
/* Prints a token file for check_make_tokens.py: dataset_tool PATH VOCAB -> format, token count,
 * then one id a line. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "trainer/data/dataset.h"

int main(int argc, char **argv)
{
    nd_dataset *dataset = NULL;
    int32_t input, label;
    if (argc != 3) {
        return 2;
    }
    /* Blocks of one input and one label: every token but the last of an odd count. */
    nd_status status = nd_dataset_open(argv[1], ND_DATA_AUTO, "file", atoll(argv[2]), 1, &dataset);
    if (status == ND_OK) {
        printf("%s\n%" PRId64 "\n", dataset->format->name, nd_dataset_tokens(dataset));
        for (int64_t b = 0; b < nd_dataset_blocks(dataset) && status == ND_OK; b++) {
            status = nd_dataset_block(dataset, b, &(nd_block){&input, &label});
            printf("%d\n%d\n", input, label);
        }
    }
    if (status != ND_OK) {
        fprintf(stderr, "dataset_tool: %s\n", nd_error_last()->message);
    }
    nd_dataset_close(dataset);
    return (int)status;
}
