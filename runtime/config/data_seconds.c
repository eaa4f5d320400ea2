// SPDX-License-Identifier: Apache-2.0
/* How long a check of the data and of the model may take. */
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/text.h"
#include "runtime/config/reader.h"
#include "runtime/config/sources.h"

typedef double seconds_of_file(const nd_config *config, const char *path, double bytes);

/* JSON lines are encoded also where ids are bytes. */
static double encode_seconds(const nd_config *config, const char *path, double bytes)
{
    const double to_encode = 400e-9; /* seconds a byte */
    const bool compressed = nd_ends_with(path, ".gz") || nd_ends_with(path, ".zst");
    const char *tokenizer = config->data.tokenizer;
    const bool rows = config->data.format == ND_DATA_JSONL ||
                      (config->data.format == ND_DATA_AUTO && nd_is_name_of_rows(path));
    const bool encoded = strcmp(tokenizer, "bytes") == 0 ? rows : strcmp(tokenizer, "file") != 0;
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
