// SPDX-License-Identifier: Apache-2.0
/* Finds a model in the local Hugging Face cache:
 * <hub>/models--org--name/{refs/main, snapshots/<commit>}. */
#include "trainer/weights/weights.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "runtime/base/fs.h"

enum { REF_BYTES_MAX = 4096 };

static nd_status hub_folder(char out[PATH_MAX])
{
    static const struct {
        const char *name, *below;
    } variables[5] = {{"HF_HUB_CACHE", ""},
                      {"HUGGINGFACE_HUB_CACHE", ""}, /* its older name */
                      {"HF_HOME", "/hub"},
                      {"XDG_CACHE_HOME", "/huggingface/hub"},
                      {"HOME", "/.cache/huggingface/hub"}};
    const char *folder = "", *below = variables[4].below;
    for (int i = 4; i >= 0; i--) { /* the first one that is set */
        const char *value = getenv(variables[i].name);
        folder = value && *value ? value : folder;
        below = value && *value ? variables[i].below : below;
    }
    return nd_fs_path(out, "%s%s", folder, below);
}

/* [A-Za-z0-9._-]+ with at most one slash inside and without "..", since it becomes part of a
 * path. */
static bool is_model_name(const char *name)
{
    int slashes = 0;
    size_t n = strlen(name);
    for (size_t i = 0; i < n; i++) {
        slashes += name[i] == '/';
        if (!isalnum((unsigned char)name[i]) && !strchr("._-/", name[i])) {
            return false;
        }
    }
    return n > 0 && slashes <= 1 && name[0] != '/' && name[n - 1] != '/' && !strstr(name, "..");
}

static nd_status has_config(const char *snapshot, bool *out)
{
    char config[PATH_MAX];
    nd_fs_kind kind = ND_FS_ABSENT;
    ND_TRY(nd_fs_path(config, "%s/config.json", snapshot));
    ND_TRY(*snapshot ? nd_fs_look(config, &kind, NULL) : ND_OK); /* follows the link into blobs/ */
    *out = kind != ND_FS_ABSENT;
    return ND_OK;
}

/* The snapshot that refs/main points at; "" if there is none. */
static nd_status snapshot_of_main(const char *folder, char out[PATH_MAX])
{
    char ref[PATH_MAX], *commit = NULL;
    size_t size = 0;
    bool there = false;
    *out = '\0';
    ND_TRY(nd_fs_path(ref, "%s/refs/main", folder));
    ND_TRY(nd_fs_exists(ref, &there));
    if (!there) {
        return ND_OK;
    }
    ND_TRY(nd_fs_read(ref, REF_BYTES_MAX, ND_ERR_DATA, &commit, &size));
    commit[strspn(commit, "0123456789abcdefABCDEF")] = '\0';
    nd_status status = *commit ? nd_fs_path(out, "%s/snapshots/%s", folder, commit) : ND_OK;
    free(commit);
    return status;
}

/* The snapshot that was changed last; "" if there is none. */
static nd_status newest_snapshot(const char *folder, char out[PATH_MAX])
{
    char snapshots[PATH_MAX];
    struct timespec newest = {0};
    nd_fs_names names;
    *out = '\0';
    ND_TRY(nd_fs_path(snapshots, "%s/snapshots", folder));
    nd_status status = nd_fs_list(snapshots, &names);
    for (int i = 0; i < names.count && status == ND_OK; i++) {
        struct stat st;
        nd_fs_kind kind = ND_FS_ABSENT;
        char path[PATH_MAX];
        if (names.list[i][0] == '.') {
            continue;
        }
        status = nd_fs_path(path, "%s/%s", snapshots, names.list[i]);
        status = status == ND_OK ? nd_fs_look(path, &kind, &st) : status;
        if (kind == ND_FS_FOLDER &&
            (st.st_mtim.tv_sec > newest.tv_sec ||
             (st.st_mtim.tv_sec == newest.tv_sec && st.st_mtim.tv_nsec > newest.tv_nsec))) {
            newest = st.st_mtim;
            memcpy(out, path, sizeof path);
        }
    }
    nd_fs_names_fini(&names);
    return status;
}

nd_status nd_hf_cache_find(const char *name, char **out)
{
    const char *slash = strchr(name, '/');
    char hub[PATH_MAX], folder[PATH_MAX], snapshot[PATH_MAX];
    bool good = false;
    if (!is_model_name(name)) {
        return nd_fail(ND_ERR_CONFIG, "model name \"%.200s\" is not of the form org/name", name);
    }
    ND_TRY(hub_folder(hub));
    ND_TRY(
        slash ? nd_fs_path(folder, "%s/models--%.*s--%s", hub, (int)(slash - name), name, slash + 1)
              : nd_fs_path(folder, "%s/models--%s", hub, name));
    ND_TRY(snapshot_of_main(folder, snapshot));
    ND_TRY(has_config(snapshot, &good));
    if (!good) {
        ND_TRY(newest_snapshot(folder, snapshot));
        ND_TRY(has_config(snapshot, &good));
    }
    return good ? nd_fs_format(out, "%s", snapshot)
                : nd_fail(ND_ERR_DATA,
                          "model \"%s\" is not in the local Hugging Face cache (\"%s\"), and "
                          "nothing is downloaded here; get it with `hf download %s`, or give the "
                          "path of a folder",
                          name, folder, name);
}
