// SPDX-License-Identifier: Apache-2.0
/* `ndlaunch config`: a first configuration file, to be edited. */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "launcher/launcher.h"
#include "runtime/base/fs.h"
#include "runtime/config/commands.h"

enum { PATH_CAPACITY = 1024 };

/* The lines with a place for a value are the number of workers and the model's file. */
static const char starter[] =
    "# Made by ndlaunch config. docs/config.md lists every key; ndlaunch --help SECTION prints\n"
    "# those of a section.\n"
    "\n"
    "launch:\n"
    "  workers: %d  # one for each GPU\n"
    "\n"
    "mesh:  # the product of all axes is the number of workers; -1 takes what the others leave\n"
    "  dp_replicate: 1  # replicas of the model\n"
    "  dp_shard: -1  # ranks that share weights, gradients and optimizer state\n"
    "  cp: 1  # ranks that share each sequence (context parallel)\n"
    "  tp: 1  # ranks that share each matrix (tensor parallel)\n"
    "\n"
    "model:\n"
    "  config: \"%s\"  # a config.json for fresh weights\n"
    "  # path: ./Llama-3.2-1B  # or a Hugging Face folder or a GGUF file with weights\n"
    "  # name: ORG/NAME  # or a model of the local Hugging Face cache\n"
    "\n"
    "data:\n"
    "  path: \"data/train.txt\"  # text, JSON lines, token files, or several: [a.jsonl, b.bin]\n"
    "  validation_path: \"data/valid.txt\"  # \"\" for none\n"
    "  tokenizer: \"bytes\"  # model: the model's own; file: ids are in the file; or a path\n"
    "\n"
    "train:\n"
    "  steps: 1000\n"
    "  sequence_length: 512  # tokens of a sample\n"
    "  micro_batch_size: 2  # samples of a data-parallel rank at once\n"
    "  precision: bf16  # or fp32, fp8\n"
    "  validation_interval: 100  # steps; 0 for one at the end\n"
    "\n"
    "optimizer:\n"
    "  lr: 3e-4  # the largest learning rate\n"
    "  warmup_ratio: 0.1  # share of the steps that warms up\n"
    "\n"
    "checkpoint:\n"
    "  interval: 500  # steps; 0 for none\n";

/* The small model of the repository, or of the folder that this program was installed in. */
static void find_model(char out[PATH_CAPACITY])
{
    static const char local[] = "configs/model-small.json";
    char program[PATH_CAPACITY / 2], path[PATH_CAPACITY];
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    snprintf(out, PATH_CAPACITY, "%s", local);
    bool there = false;
    if (n <= 0 || nd_fs_exists(local, &there) != ND_OK || there) {
        return;
    }
    program[n] = '\0';
    for (int up = 0; up < 2 && strrchr(program, '/'); up++) { /* PREFIX/bin/ndlaunch */
        *strrchr(program, '/') = '\0';
    }
    snprintf(path, sizeof path, "%s/share/ndtrain/%s", program, local);
    if (!strpbrk(path, "\"\\") && nd_fs_exists(path, &there) == ND_OK && there) {
        snprintf(out, PATH_CAPACITY, "%s", path);
    }
}

nd_status nd_starter_write(FILE *said, const char *path)
{
    char model[PATH_CAPACITY];
    const int gpus = nd_host_gpus();
    find_model(model);
    FILE *out = nd_fs_stream_new(path);
    if (!out) {
        return errno == EEXIST ? nd_fail(ND_ERR_CANTCREATE,
                                         "%s exists already; remove it, or name a new file with "
                                         "--config-file",
                                         path)
                               : nd_fail(ND_ERR_CANTCREATE,
                                         "%s cannot be created: %s; name a new file with "
                                         "--config-file",
                                         path, strerror(errno));
    }
    fprintf(out, starter, gpus > 0 ? gpus : 1, model);
    bool failed = ferror(out) != 0;
    failed = fclose(out) != 0 || failed;
    if (failed) {
        unlink(path);
        return nd_fail(ND_ERR_CANTCREATE, "%s cannot be written: %s", path, strerror(errno));
    }
    fprintf(said,
            "written: %s\n"
            "  edit it: model, data, steps\n"
            "  ndtrain plan --config-file %s     # what it will need\n"
            "  ndlaunch --config-file %s         # trains\n",
            path, path, path);
    return ND_OK;
}

nd_status nd_starter_main(int argc, char **argv)
{
    nd_command_flags line;
    if (nd_command_wants_help(argc, argv)) {
        nd_command_print_help(ND_COMMAND_CONFIG);
        return ND_OK;
    }
    ND_TRY(nd_command_flags_read(ND_COMMAND_CONFIG, argc, argv, &line));
    const nd_flag_value *file = &line.values[ND_CONFIG_FILE];
    const char *word = line.word[0];
    if (word && strcmp(word, "default") != 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "ndlaunch config does not take \"%.60s\"; it takes --config-file FILE, the "
                       "file to write",
                       word);
    }
    if (file->given && !file->text[0]) {
        return nd_fail(ND_ERR_CONFIG, "--config-file is empty; give the name of the file to write");
    }
    return nd_starter_write(stdout, file->given ? file->text : "ndtrain.yaml");
}
