// SPDX-License-Identifier: Apache-2.0
/* How long a check of the data and of the model may take. */
#include <dirent.h>
#include <fcntl.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/text.h"
#include "runtime/config/reader.h"
#include "runtime/config/sources.h"

/* A file, by its name in the folder that is open at `folder`. JSON lines are encoded also where ids
 * are bytes. */
static double seconds_of_file(const nd_config *config, int folder, const char *name)
{
    const double to_encode = 400e-9; /* seconds a byte */
    const bool compressed = nd_ends_with(name, ".gz") || nd_ends_with(name, ".zst");
    const char *tokenizer = config->data.tokenizer;
    struct stat st;
    if (fstatat(folder, name, &st, 0) != 0 || !S_ISREG(st.st_mode)) {
        return 0;
    }
    const bool rows = config->data.format == ND_DATA_JSONL ||
                      (config->data.format == ND_DATA_AUTO && nd_is_name_of_rows(name));
    const bool encoded = strcmp(tokenizer, "bytes") == 0 ? rows : strcmp(tokenizer, "file") != 0;
    return encoded ? to_encode * (compressed ? 8.0 : 1.0) * (double)st.st_size : 0;
}

static double seconds_of_folder(const nd_config *config, const char *path)
{
    double seconds = 0;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *entries = fd >= 0 ? fdopendir(fd) : NULL;
    for (struct dirent *entry; entries && (entry = readdir(entries));) {
        seconds += seconds_of_file(config, fd, entry->d_name);
    }
    if (entries) {
        closedir(entries);
    } else if (fd >= 0) {
        close(fd);
    }
    return seconds;
}

/* A file, a folder or a pattern. */
static double seconds_of_path(const nd_config *config, const char *path)
{
    struct stat st;
    glob_t found = {0};
    double seconds = 0;
    if (stat(path, &st) == 0) {
        return S_ISDIR(st.st_mode) ? seconds_of_folder(config, path)
                                   : seconds_of_file(config, AT_FDCWD, path);
    }
    if (strpbrk(path, "*?[") && glob(path, GLOB_NOSORT, NULL, &found) == 0) {
        for (size_t i = 0; i < found.gl_pathc; i++) {
            seconds += seconds_of_file(config, AT_FDCWD, found.gl_pathv[i]);
        }
    }
    globfree(&found);
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
    return encode_seconds(config, config->data.path) +
           encode_seconds(config, config->data.validation_path) + verify_seconds(config);
}
