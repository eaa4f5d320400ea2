// SPDX-License-Identifier: Apache-2.0
/*
 * Writes checkpoints of fake states, for check_torch.py and test_golden.c.
 *   checkpoint_tool write FOLDER STEP tied|untied DP_REPLICATE DP_SHARD CP TP
 *   checkpoint_tool golden FOLDER    writes the checkpoints that golden/ keeps
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/trainer/checkpoint/fake_checkpoint.h"

int main(int argc, char **argv)
{
    if (argc == 9 && strcmp(argv[1], "write") == 0) {
        nd_shape shape = fake_shape(strcmp(argv[4], "tied") == 0);
        nd_mesh mesh = {{1, atoi(argv[5]), atoi(argv[6]), atoi(argv[7]), atoi(argv[8])}};
        fake_write(argv[2], &shape, &mesh, ND_STATE_KINDS, atoll(argv[3]), true, ND_CHECKSUM_XXH3);
        return 0;
    }
    if (argc == 3 && strcmp(argv[1], "golden") == 0) {
        fake_write_golden(argv[2]);
        return 0;
    }
    fprintf(stderr, "checkpoint_tool: wrong arguments; see its source\n");
    return 2;
}
