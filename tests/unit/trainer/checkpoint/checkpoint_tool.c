// SPDX-License-Identifier: Apache-2.0
/*
 * Writes and reads checkpoints of fake states, for check_torch.py and test_golden.c.
 *   checkpoint_tool write FOLDER STEP tied|untied DP_REPLICATE DP_SHARD CP TP
 *   checkpoint_tool golden FOLDER    writes the checkpoints that golden/ keeps
 *   checkpoint_tool read DCP_FOLDER tied|untied ARRAYS    compares all that other meshes load
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/trainer/checkpoint/fake_checkpoint.h"

static int fail(const char *what)
{
    fprintf(stderr, "checkpoint_tool: %s: %s\n", what, nd_error_last()->message);
    return 1;
}

static int read_folder(const char *folder, const nd_shape *shape, int arrays)
{
    static const nd_mesh meshes[] = {{{1, 1, 1, 1, 1}}, {{1, 2, 3, 1, 2}}};
    for (int i = 0; i < 2; i++) {
        for (int rank = 0; rank < nd_mesh_world_size(&meshes[i]); rank++) {
            nd_source *source = NULL;
            fake_state state;
            nd_layout *layout = fake_layout(shape, &meshes[i], rank, i == 1);
            nd_holder holder = nd_holder_of(&meshes[i], rank);
            if (nd_source_open_dcp(folder, shape, &source) != ND_OK ||
                fake_load(source, layout, &holder, arrays, &state) != ND_OK) {
                return fail(folder);
            }
            fake_check(layout, &holder, &state, arrays);
            fake_free(&state);
            nd_source_close(source);
            nd_layout_destroy(layout);
        }
    }
    return 0;
}

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
    if (argc == 5 && strcmp(argv[1], "read") == 0) {
        nd_shape shape = fake_shape(strcmp(argv[3], "tied") == 0);
        return read_folder(argv[2], &shape, atoi(argv[4]));
    }
    fprintf(stderr, "checkpoint_tool: wrong arguments; see its source\n");
    return 2;
}
