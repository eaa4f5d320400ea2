// SPDX-License-Identifier: Apache-2.0
#include "runtime/config/config.h"

#include <dirent.h>
#include <fcntl.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/printable.h"
#include "runtime/config/reader.h"
#include "runtime/config/sources.h"

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
    if (access(path, F_OK) != 0 && path[0] != '/') {
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
    return unnamed && access(*path, F_OK) != 0 ? nd_text_replace(path, "") : ND_OK;
}

nd_status nd_config_parse(nd_config *config, nd_cli *cli, int argc, char **argv)
{
    const char *config_file = NULL;
    nd_reader reader;
    nd_reader_init(&reader, config);
    reader.notes_origins = true;
    *cli = (nd_cli){.plan_rank = -1, .help_topic = ""};
    ND_TRY(nd_flags_scan(argc, argv, &config_file, cli));
    if (cli->help || cli->version) {
        return ND_OK;
    }
    if (config_file) {
        ND_TRY(read_file(&reader, config_file));
    }
    nd_reader_begin(&reader, ND_LAYER_FLAGS);
    ND_TRY(nd_flags_apply(&reader, cli, argc, argv));
    ND_TRY(nd_reader_end(&reader, ""));
    ND_TRY(nd_reader_finish(&reader));
    note_sequence(&reader);
    return drop_unnamed_validation(&reader);
}

/* Bytes of a file of text; a compressed one counts eight times. */
static double text_bytes(const char *path)
{
    struct stat st;
    size_t length = strlen(path);
    bool compressed = (length > 3 && strcmp(path + length - 3, ".gz") == 0) ||
                      (length > 4 && strcmp(path + length - 4, ".zst") == 0);
    return stat(path, &st) == 0 && S_ISREG(st.st_mode)
               ? (compressed ? 8.0 : 1.0) * (double)st.st_size
               : 0.0;
}

/* Encoding the files that data.path names: a file, a folder or a pattern. */
static double encode_seconds(const char *path)
{
    const double seconds_per_byte = 400e-9;
    char pattern[8192];
    struct stat st;
    double bytes = 0.0;
    glob_t found = {0};
    bool folder = stat(path, &st) == 0 && S_ISDIR(st.st_mode);
    if (!folder && !strpbrk(path, "*?[")) {
        return seconds_per_byte * text_bytes(path);
    }
    snprintf(pattern, sizeof pattern, "%s%s", path, folder ? "/*" : "");
    if (glob(pattern, GLOB_NOSORT, NULL, &found) == 0) {
        for (size_t i = 0; i < found.gl_pathc; i++) {
            bytes += text_bytes(found.gl_pathv[i]);
        }
    }
    globfree(&found);
    return seconds_per_byte * bytes;
}

static double index_seconds_of(const nd_config *config, const char *path)
{
    const double seconds_per_byte = 100e-9;
    struct stat st;
    size_t length = strlen(path);
    if (strcmp(config->data.tokenizer, "bytes") != 0 &&
        strcmp(config->data.tokenizer, "file") != 0) {
        return encode_seconds(path);
    }
    bool named = length > 6 && strcmp(path + length - 6, ".jsonl") == 0;
    bool is_jsonl =
        config->data.format == ND_DATA_JSONL || (config->data.format == ND_DATA_AUTO && named);
    return is_jsonl && stat(path, &st) == 0 ? seconds_per_byte * (double)st.st_size : 0.0;
}

static double index_seconds(const nd_config *config, const char *text)
{
    nd_data_sources sources;
    double seconds = 0;
    if (nd_data_sources_read("", "data.path", text, &sources) != ND_OK) {
        nd_error_clear(); /* said when the text was set, or no memory, which the next call says */
        return 0;
    }
    for (int i = 0; i < sources.count; i++) {
        seconds += index_seconds_of(config, sources.list[i].path);
    }
    nd_data_sources_fini(&sources);
    return seconds;
}

/* Reading the files of model.path, as model.verify does where they have SHA256SUMS. */
static double verify_seconds(const nd_config *config)
{
    const double seconds_per_byte = 10e-9;
    const char *folder = config->model.path;
    double bytes = 0.0;
    struct stat st;
    int fd =
        config->model.verify && *folder ? open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    DIR *entries = fd >= 0 && fstatat(fd, "SHA256SUMS", &st, 0) == 0 ? opendir(folder) : NULL;
    for (struct dirent *entry; entries && (entry = readdir(entries));) {
        if (fstatat(fd, entry->d_name, &st, 0) == 0 && S_ISREG(st.st_mode)) {
            bytes += (double)st.st_size;
        }
    }
    if (entries) {
        closedir(entries);
    }
    if (fd >= 0) {
        close(fd);
    }
    return seconds_per_byte * bytes;
}

double nd_config_data_seconds(const nd_config *config)
{
    return index_seconds(config, config->data.path) +
           index_seconds(config, config->data.validation_path) + verify_seconds(config);
}
