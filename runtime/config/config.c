// SPDX-License-Identifier: Apache-2.0
#include "runtime/config/config.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/printable.h"
#include "runtime/config/reader.h"

nd_status nd_config_init(nd_config *config)
{
    memset(config, 0, sizeof *config);
    nd_status status = nd_text_replace(&config->source, "");
    for (int i = 0; i < ND_FIELD_COUNT && status == ND_OK; i++) {
        nd_setting setting = {"", nd_fields[i].key, nd_fields[i].initial, false};
        status = nd_field_set(config, (nd_field_id)i, &setting);
    }
    if (status != ND_OK) {
        nd_config_fini(config);
    }
    return status;
}

void nd_config_fini(nd_config *config)
{
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        if (nd_fields[i].type == ND_FIELD_TYPE_TEXT || nd_fields[i].type == ND_FIELD_TYPE_LIST) {
            char **text = (char **)((char *)config + nd_fields[i].offset);
            free(*text);
            *text = NULL;
        }
    }
    for (int i = 0; i < ND_PATH_COUNT; i++) {
        free(config->path_origin[i]);
        config->path_origin[i] = NULL;
    }
    free(config->source);
    config->source = NULL;
}

static nd_status read_root(nd_reader *reader, const nd_yaml_node *root, const char *name)
{
    char where[600];
    snprintf(where, sizeof where, "%.500s: ", name);
    nd_reader_begin(reader, ND_LAYER_FILE);
    reader->config->from_accelerate = false;
    ND_TRY(nd_read_yaml(reader, root, name));
    ND_TRY(nd_reader_end(reader, where));
    return nd_text_replace(&reader->config->source, name);
}

static void note_sequence(const nd_reader *reader)
{
    reader->config->sequence_given =
        reader->set_by[ND_FIELD_train_sequence_length] != ND_LAYER_DEFAULT;
}

nd_status nd_config_read_text(nd_config *config, const char *text, size_t bytes, const char *name)
{
    nd_reader reader;
    nd_yaml_node *root = NULL;
    nd_reader_init(&reader, config);
    ND_TRY(nd_yaml_parse(text, bytes, name, &root));
    nd_status status = read_root(&reader, root, name);
    nd_yaml_destroy(root);
    note_sequence(&reader);
    return status == ND_OK ? nd_reader_finish(&reader) : status;
}

static nd_status read_file(nd_reader *reader, const char *path)
{
    nd_yaml_node *root = NULL;
    char folder[4096];
    if (!nd_is_printable(path)) {
        return nd_fail(ND_ERR_CONFIG,
                       "--config-file %s: the name holds a control character or is not UTF-8; "
                       "rename the file, because a run's folder is named after it",
                       path);
    }
    bool there = true;
    ND_TRY(path[0] != '/' ? nd_fs_exists(path, &there) : ND_OK);
    if (!there) {
        return nd_fail(ND_ERR_CONFIG,
                       "--config-file %s does not exist; paths are relative to the working "
                       "directory, %s",
                       path, getcwd(folder, sizeof folder) ? folder : "which cannot be read");
    }
    ND_TRY(nd_yaml_read(path, &root));
    nd_status status = read_root(reader, root, path);
    nd_yaml_destroy(root);
    return status;
}

/* Drops the default validation file when no layer named it and it does not exist. */
static nd_status drop_unnamed_validation(nd_reader *reader)
{
    char **path = &reader->config->data.validation_path;
    bool unnamed = reader->set_by[ND_FIELD_data_validation_path] == ND_LAYER_DEFAULT;
    bool there = true;
    ND_TRY(unnamed ? nd_fs_exists(*path, &there) : ND_OK);
    return there ? ND_OK : nd_text_replace(path, "");
}

nd_status nd_config_parse(nd_config *config, nd_cli *cli, int argc, char **argv)
{
    const char *config_file = NULL;
    nd_reader reader;
    nd_reader_init(&reader, config);
    reader.notes_origins = true;
    *cli = (nd_cli){.help_topic = ""};
    ND_TRY(nd_flags_scan(argc, argv, &config_file, cli));
    if (cli->help || cli->version) {
        return ND_OK;
    }
    if (config_file) {
        ND_TRY(read_file(&reader, config_file));
    }
    nd_reader_begin(&reader, ND_LAYER_FLAGS);
    ND_TRY(nd_flags_apply(&reader, argc, argv));
    ND_TRY(nd_reader_end(&reader, ""));
    ND_TRY(nd_reader_finish(&reader));
    note_sequence(&reader);
    return drop_unnamed_validation(&reader);
}

const char *nd_fp8_recipe_name(nd_fp8_recipe recipe)
{
    static const char *const names[ND_FP8_RECIPE_COUNT] = {
#define ND_FP8_RECIPE(id, name, ...) name,
#include "runtime/config/fp8_recipes.def"
    };
    return names[recipe];
}

bool nd_fp8_recipe_is_per_tensor(nd_fp8_recipe recipe)
{
    enum { TENSOR, ROW, COLUMN };
#define CURRENT(format, along) along
#define DELAYED(format)        TENSOR
    static const int x_of_y[ND_FP8_RECIPE_COUNT] = {
#define ND_FP8_RECIPE(id, name, x, ...) x,
#include "runtime/config/fp8_recipes.def"
    };
    return x_of_y[recipe] == TENSOR;
}
