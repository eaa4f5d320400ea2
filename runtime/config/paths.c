// SPDX-License-Identifier: Apache-2.0
/* The files named in the configuration: where each was named, whether it exists, and how long it
 * takes to read them. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/text.h"
#include "runtime/config/reader.h"
#include "runtime/config/sources.h"

static const nd_field_id path_fields[ND_PATH_COUNT] = {
    [ND_PATH_MODEL_PATH] = ND_FIELD_model_path,
    [ND_PATH_MODEL_CONFIG] = ND_FIELD_model_config,
    [ND_PATH_DATA] = ND_FIELD_data_path,
    [ND_PATH_VALIDATION] = ND_FIELD_data_validation_path,
};

nd_status nd_path_note_origin(nd_config *config, nd_field_id id, const nd_setting *setting)
{
    char origin[700];
    for (int i = 0; i < ND_PATH_COUNT; i++) {
        if (path_fields[i] == id) {
            snprintf(origin, sizeof origin, "%s%s", setting->where, setting->name);
            return nd_text_replace(&config->path_origin[i], origin);
        }
    }
    return ND_OK;
}

/* A pair of Megatron files may be named without a suffix, and files of text by a pattern. */
static nd_status is_there(const char *path, bool is_data, bool *out)
{
    static const char *const suffixes[] = {"", ".bin", ".idx"};
    char name[8192];
    nd_fs_kind kind = ND_FS_ABSENT;
    nd_fs_names found = {0};
    for (int i = 0; i < (is_data ? 3 : 1) && kind == ND_FS_ABSENT; i++) {
        snprintf(name, sizeof name, "%s%s", path, suffixes[i]);
        ND_TRY(nd_fs_look(name, &kind, NULL));
    }
    if (kind == ND_FS_ABSENT && is_data && strpbrk(path, "*?[")) {
        ND_TRY(nd_fs_glob(path, &found));
    }
    *out = kind != ND_FS_ABSENT || found.count > 0;
    nd_fs_names_fini(&found);
    return ND_OK;
}

static nd_status check(const nd_config *config, nd_path_key key, const char *verb, const char *path,
                       const char *advice)
{
    const nd_field *f = &nd_fields[path_fields[key]];
    char name[64], folder[4096];
    bool there = true;
    ND_TRY(*path ? is_there(path, key == ND_PATH_DATA || key == ND_PATH_VALIDATION, &there)
                 : ND_OK);
    if (there) {
        return ND_OK;
    }
    const char *origin = config->path_origin[key];
    bool usual = strcmp(path, f->initial) == 0 && !origin;
    snprintf(name, sizeof name, "%s.%s", f->section, f->key);
    const bool relative = path[0] != '/';
    const char *from = getcwd(folder, sizeof folder) ? folder : "which cannot be read";
    return nd_fail(ND_ERR_DATA, "%s %s \"%s\"%s, which does not exist; %s%s%s%s",
                   origin ? origin : name, verb, path, usual ? " (the default)" : "",
                   relative ? "paths are relative to the working directory, " : "",
                   relative ? from : "", relative ? "; " : "", advice);
}

/* Each path of a list. */
static nd_status check_sources(const nd_config *config, nd_path_key key, const char *text,
                               const char *advice)
{
    const nd_field *f = &nd_fields[path_fields[key]];
    nd_data_sources sources;
    nd_status status = ND_OK;
    char name[64];
    snprintf(name, sizeof name, "%s.%s", f->section, f->key);
    ND_TRY(nd_data_sources_read("", name, text, &sources));
    for (int i = 0; i < sources.count && status == ND_OK; i++) {
        const char *path = sources.list[i].path;
        status = check(config, key, strcmp(path, text) == 0 ? "is" : "names", path, advice);
    }
    nd_data_sources_fini(&sources);
    return status;
}

nd_status nd_config_check_model_path(const nd_config *config)
{
    ND_TRY(
        check(config, ND_PATH_MODEL_PATH, "is", config->model.path,
              "give a Hugging Face folder with --model-path, or ORG/NAME of the local cache with "
              "--model-name"));
    return check(config, ND_PATH_MODEL_CONFIG, "is", config->model.config,
                 "change into the folder that the path starts from, or give a config.json with "
                 "--model-config or a folder with --model-path");
}

nd_status nd_config_check_data_paths(const nd_config *config)
{
    const nd_field *path = &nd_fields[path_fields[ND_PATH_DATA]];
    ND_TRY(check_sources(
        config, ND_PATH_DATA, config->data.path,
        strcmp(config->data.path, path->initial) == 0
            ? "give a file with --data-path, or make it: scripts/prepare_data writes this text"
            : "--data-path takes a file, a folder, a pattern, several as '[a.txt, b.txt]', and "
              "with weights '0.7 a.txt 0.3 b.txt'"));
    return check_sources(
        config, ND_PATH_VALIDATION, config->data.validation_path,
        "give a file with --validation-path, or an empty path, --validation-path=, "
        "for no validation");
}

/* How long a check of the data and of the model may take. */

typedef double seconds_of_file(const nd_config *config, const char *path, double bytes);

/* JSON lines and compressed texts are encoded also where ids are bytes. */
static double encode_seconds(const nd_config *config, const char *path, double bytes)
{
    const double to_encode = 400e-9; /* seconds a byte */
    const bool compressed = nd_ends_with(path, ".gz") || nd_ends_with(path, ".zst");
    const char *tokenizer = config->data.tokenizer;
    const bool rows = config->data.format == ND_DATA_JSONL ||
                      (config->data.format == ND_DATA_AUTO && nd_is_name_of_rows(path));
    const bool encoded =
        strcmp(tokenizer, "bytes") == 0 ? rows || compressed : strcmp(tokenizer, "file") != 0;
    return encoded ? to_encode * (compressed ? 8.0 : 1.0) * bytes : 0;
}

static double read_seconds(const nd_config *config, const char *path, double bytes)
{
    return 10e-9 * bytes;
}

/* Adds up the files that a path names: one, those of a folder, or of a pattern. They may be links,
 * as in the Hugging Face cache. What cannot be read counts as nothing: its reader says why. */
static double add_up(const nd_config *config, const char *path, seconds_of_file *seconds)
{
    nd_fs_names found = {0};
    nd_fs_kind kind = ND_FS_ABSENT;
    struct stat st;
    double sum = 0;
    (void)nd_fs_look(path, &kind, &st);
    if (kind == ND_FS_FILE) {
        return seconds(config, path, (double)st.st_size);
    }
    const bool folder = kind == ND_FS_FOLDER;
    (void)(folder ? nd_fs_list(path, &found) : nd_fs_glob(path, &found));
    for (int i = 0; i < found.count; i++) {
        char *file = NULL;
        if (nd_fs_format(&file, "%s%s%s", folder ? path : "", folder ? "/" : "", found.list[i]) ==
                ND_OK &&
            nd_fs_look(file, &kind, &st) == ND_OK && kind == ND_FS_FILE) {
            sum += seconds(config, file, (double)st.st_size);
        }
        free(file);
    }
    nd_fs_names_fini(&found);
    nd_error_clear();
    return sum;
}

static double seconds_of_sources(const nd_config *config, const char *text)
{
    nd_data_sources sources;
    double seconds = 0;
    if (nd_data_sources_read("", "data.path", text, &sources) != ND_OK) {
        nd_error_clear(); /* said when the text was set, or no memory, which the next call says */
        return 0;
    }
    for (int i = 0; i < sources.count; i++) {
        seconds += add_up(config, sources.list[i].path, encode_seconds);
    }
    nd_data_sources_fini(&sources);
    return seconds;
}

double nd_config_data_seconds(const nd_config *config)
{
    const char *model = config->model.path;
    bool has = false; /* model.verify reads every file */
    if (config->model.verify && *model && nd_fs_has(model, "SHA256SUMS", &has) != ND_OK) {
        nd_error_clear(); /* the check itself says what is wrong */
    }
    return seconds_of_sources(config, config->data.path) +
           seconds_of_sources(config, config->data.validation_path) +
           (has ? add_up(config, model, read_seconds) : 0);
}
