// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/fs.h"
#include "trainer/commands/ckpt.h"
#include "trainer/gguf/gguf.h"

enum { FLAG_TYPE };

static nd_status choose_type(const char *flag, nd_gguf_type *out)
{
    static const struct {
        const char *name;
        nd_gguf_type type;
    } types[] = {
        {"f32", ND_GGUF_F32}, {"f16", ND_GGUF_F16}, {"bf16", ND_GGUF_BF16}, {"q8_0", ND_GGUF_Q8_0}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (strcmp(flag, types[i].name) == 0) {
            *out = types[i].type;
            return ND_OK;
        }
    }
    return nd_fail(ND_ERR_CONFIG, "--type is \"%.40s\"; it must be f32, f16, bf16 or q8_0", flag);
}

/* The model folder: the argument itself, or the folder model of a run. Owned by the caller. */
static nd_status choose_model(const char *argument, char **out)
{
    bool own = false, run = false, checkpoint = false;
    char *folder = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_ckpt_folder(argument, &folder));
    ND_TRY_OUT(nd_fs_has(folder, "config.json", &own));
    ND_TRY_OUT(own ? ND_OK : nd_fs_has(folder, "model/config.json", &run));
    ND_TRY_OUT(own || run ? ND_OK : nd_ckpt_is_checkpoint(folder, &checkpoint));
    status = checkpoint
                 ? nd_fail(ND_ERR_DATA,
                           "%s is a checkpoint; ndtrain ckpt export makes a model of it", folder)
                 : nd_fs_format(out, "%s%s", folder, run ? "/model" : "");
out:
    free(folder);
    return status;
}

static nd_status run_gguf(const nd_ckpt_call *call, int *code)
{
    const char *flag = call->values[FLAG_TYPE] ? call->values[FLAG_TYPE] : "bf16";
    char *folder = NULL, size[ND_CKPT_TEXT_MAX];
    nd_gguf_type type = ND_GGUF_BF16;
    uint64_t bytes = 0;
    const double begin = nd_clock_seconds();
    (void)code;
    ND_TRY(choose_type(flag, &type));
    if (!call->places[1][0]) {
        return nd_fail(ND_ERR_CONFIG, "FILE is empty; give the name of the file to write");
    }
    nd_status status = choose_model(call->places[0], &folder);
    if (status == ND_OK) {
        status = nd_gguf_export(folder, type, call->places[1], &bytes);
    }
    if (status == ND_OK) {
        printf("%s: the model of %s, %s: %s in %.1f s\n", call->places[1], folder, flag,
               nd_ckpt_bytes(size, (double)bytes), nd_clock_seconds() - begin);
    }
    free(folder);
    return status;
}

const nd_ckpt_verb nd_ckpt_gguf = {
    .name = "gguf",
    .usage = "MODEL FILE [--type bf16|f16|f32|q8_0]",
    .help =
        "Writes a model with its tokenizer as one GGUF file, which llama.cpp and the programs "
        "built on it\nread. MODEL is a Hugging Face folder, or a run that saved its model. FILE "
        "does not exist yet; it\nappears when it is complete.\n",
    .least = 2,
    .most = 2,
    .flags = {{"--type", "bf16|f16|f32|q8_0",
               "How matrices are stored; bf16 if not given. q8_0 has 8 bits a weight."}},
    .run = run_gguf,
};
