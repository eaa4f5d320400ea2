// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>

#include "runtime/base/clock.h"
#include "trainer/commands/ckpt.h"
#include "trainer/generate/model_files.h"
#include "trainer/gguf/gguf.h"

nd_status nd_ckpt_gguf(const nd_command_flags *line, int *code)
{
    static const nd_gguf_type types[] = {ND_GGUF_BF16, ND_GGUF_F16, ND_GGUF_F32, ND_GGUF_Q8_0};
    const nd_flag_value *type = &line->values[ND_CKPT_GGUF_TYPE];
    const char *path = nd_ckpt_place(line, 1);
    nd_model_files model;
    char size[ND_CKPT_TEXT_MAX];
    uint64_t bytes = 0;
    const double begin = nd_clock_seconds();
    (void)code;
    if (!path[0]) {
        return nd_fail(ND_ERR_CONFIG, "FILE is empty; give the name of the file to write");
    }
    ND_TRY(nd_model_files_open(nd_ckpt_place(line, 0), &model));
    nd_status status =
        model.kind == ND_MODEL_FOLDER
            ? nd_gguf_export(model.reader, model.folder, types[type->whole], path, &bytes)
            : nd_fail(ND_ERR_DATA, "%s is no model folder; ndtrain ckpt export makes one of it",
                      model.folder);
    if (status == ND_OK) {
        printf("%s: the model of %s, %s: %s in %.1f s\n", path, model.folder,
               type->given ? type->text : "bf16", nd_ckpt_bytes(size, (double)bytes),
               nd_clock_seconds() - begin);
    }
    nd_model_files_close(&model);
    return status;
}
