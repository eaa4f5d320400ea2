// SPDX-License-Identifier: Apache-2.0
/* How long a check of the data and of the model may take. */
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/text.h"
#include "runtime/config/reader.h"
#include "runtime/config/sources.h"

/* JSON lines are encoded also where ids are bytes. */
static double seconds_of_file(const nd_config *config, const char *path)
{
    const double to_encode = 400e-9; /* seconds a byte */
    const bool compressed = nd_ends_with(path, ".gz") || nd_ends_with(path, ".zst");
    const char *tokenizer = config->data.tokenizer;
    struct stat st;
    nd_fs_kind kind;
    if (nd_fs_look(path, &kind, &st) != ND_OK || kind != ND_FS_FILE) {
        return 0;
    }
    const bool rows = config->data.format == ND_DATA_JSONL ||
                      (config->data.format == ND_DATA_AUTO && nd_is_name_of_rows(path));
    const bool encoded = strcmp(tokenizer, "bytes") == 0 ? rows : strcmp(tokenizer, "file") != 0;
    return encoded ? to_encode * (compressed ? 8.0 : 1.0) * (double)st.st_size : 0;
}

/* A file, a folder or a pattern. What cannot be read counts as nothing: its reader says why. */
static double seconds_of_path(const nd_config *config, const char *path)
{
    nd_fs_names found = {0};
    double seconds = seconds_of_file(config, path);
    const bool pattern = strpbrk(path, "*?[");
    if (seconds == 0) {
        (void)nd_fs_list(path, &found);
    }
    for (int i = 0; i < found.count; i++) {
        char *inside = NULL;
        if (nd_fs_format(&inside, "%s/%s", path, found.list[i]) == ND_OK) {
            seconds += seconds_of_file(config, inside);
        }
        free(inside);
    }
    if (pattern && !found.there && seconds == 0 && nd_fs_glob(path, &found) == ND_OK) {
        for (int i = 0; i < found.count; i++) {
            seconds += seconds_of_file(config, found.list[i]);
        }
    }
    nd_fs_names_fini(&found);
    nd_error_clear();
    return seconds;
}

static double encode_seconds(const nd_config *config, const char *text)
{
    nd_data_sources sources;
    double seconds = 0;
    if (nd_data_sources_read("", "data.path", text, &sources) != ND_OK) {
        nd_error_clear(); /* said when the text was set, or no memory, which the next call says */
        return 0;
    }
    for (int i = 0; i < sources.count; i++) {
        seconds += seconds_of_path(config, sources.list[i].path);
    }
    nd_data_sources_fini(&sources);
    return seconds;
}

/* Reading the files of model.path, as model.verify does where they have SHA256SUMS. They may be
 * links, as those of the Hugging Face cache are. */
static double verify_seconds(const nd_config *config)
{
    const double seconds_per_byte = 10e-9;
    const char *folder = config->model.path;
    uint64_t bytes = 0;
    bool has = false;
    nd_fs_names names = {0};
    if (config->model.verify && *folder && nd_fs_has(folder, "SHA256SUMS", &has) == ND_OK && has) {
        (void)nd_fs_list(folder, &names);
    }
    for (int i = 0; i < names.count; i++) {
        char *path = NULL;
        struct stat st;
        nd_fs_kind kind;
        if (nd_fs_format(&path, "%s/%s", folder, names.list[i]) == ND_OK &&
            nd_fs_look(path, &kind, &st) == ND_OK && kind == ND_FS_FILE) {
            bytes += (uint64_t)st.st_size;
        }
        free(path);
    }
    nd_fs_names_fini(&names);
    nd_error_clear(); /* the check itself says what is wrong */
    return seconds_per_byte * (double)bytes;
}

double nd_config_data_seconds(const nd_config *config)
{
    return encode_seconds(config, config->data.path) +
           encode_seconds(config, config->data.validation_path) + verify_seconds(config);
}
