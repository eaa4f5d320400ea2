// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/fs.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/commands/ckpt.h"
#include "trainer/gguf/gguf.h"

/* The model folder: the argument itself, or the folder model of a run. Owned by the caller. */
static nd_status choose_model(const char *argument, char **out)
{
    bool own = false, run = false, checkpoint = false;
    char *folder = NULL;
    int64_t *steps = NULL;
    int count = 0;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_ckpt_folder(argument, &folder));
    ND_TRY_OUT(nd_fs_has(folder, "config.json", &own));
    ND_TRY_OUT(own ? ND_OK : nd_fs_has(folder, "model/config.json", &run));
    ND_TRY_OUT(own || run ? ND_OK : nd_checkpoint_is_ours(folder, &checkpoint));
    ND_TRY_OUT(own || run || checkpoint ? ND_OK : nd_checkpoint_list(folder, &steps, &count));
    status =
        checkpoint || count > 0
            ? nd_fail(ND_ERR_DATA, "%s %s; ndtrain ckpt export makes a model of it", folder,
                      checkpoint ? "is a checkpoint" : "is a run with checkpoints and no model")
            : nd_fs_format(out, "%s%s", folder, run ? "/model" : "");
out:
    free(steps);
    free(folder);
    return status;
}

nd_status nd_ckpt_gguf(const nd_command_flags *line, int *code)
{
    static const nd_gguf_type types[] = {ND_GGUF_BF16, ND_GGUF_F16, ND_GGUF_F32, ND_GGUF_Q8_0};
    const nd_flag_value *type = &line->values[ND_CKPT_GGUF_TYPE];
    const char *path = nd_ckpt_place(line, 1);
    char *folder = NULL, size[ND_CKPT_TEXT_MAX];
    uint64_t bytes = 0;
    const double begin = nd_clock_seconds();
    (void)code;
    if (!path[0]) {
        return nd_fail(ND_ERR_CONFIG, "FILE is empty; give the name of the file to write");
    }
    nd_status status = choose_model(nd_ckpt_place(line, 0), &folder);
    if (status == ND_OK) {
        status = nd_gguf_export(folder, types[type->whole], path, &bytes);
    }
    if (status == ND_OK) {
        printf("%s: the model of %s, %s: %s in %.1f s\n", path, folder,
               type->given ? type->text : "bf16", nd_ckpt_bytes(size, (double)bytes),
               nd_clock_seconds() - begin);
    }
    free(folder);
    return status;
}
