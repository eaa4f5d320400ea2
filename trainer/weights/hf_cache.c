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

static const char *env(const char *name)
{
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

static nd_status hub_folder(char **out)
{
    if (env("HF_HUB_CACHE")) {
        return nd_fs_format(out, "%s", env("HF_HUB_CACHE"));
    }
    if (env("HUGGINGFACE_HUB_CACHE")) { /* the older name of HF_HUB_CACHE */
        return nd_fs_format(out, "%s", env("HUGGINGFACE_HUB_CACHE"));
    }
    if (env("HF_HOME")) {
        return nd_fs_format(out, "%s/hub", env("HF_HOME"));
    }
    if (env("XDG_CACHE_HOME")) {
        return nd_fs_format(out, "%s/huggingface/hub", env("XDG_CACHE_HOME"));
    }
    return nd_fs_format(out, "%s/.cache/huggingface/hub", env("HOME") ? env("HOME") : "");
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
    char *config = NULL;
    nd_fs_kind kind = ND_FS_ABSENT;
    nd_status status = snapshot ? nd_fs_format(&config, "%s/config.json", snapshot) : ND_OK;
    status = config ? nd_fs_look(config, &kind, NULL) : status; /* follows the link into blobs/ */
    *out = kind != ND_FS_ABSENT;
    free(config);
    return status;
}

/* The snapshot that refs/main points at; *out is NULL if there is none. */
static nd_status snapshot_of_main(const char *folder, char **out)
{
    char *ref = NULL, *commit = NULL;
    size_t size = 0;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_fs_format(&ref, "%s/refs/main", folder));
    bool there = false;
    ND_TRY_OUT(nd_fs_exists(ref, &there));
    if (!there) {
        goto out;
    }
    ND_TRY_OUT(nd_fs_read(ref, REF_BYTES_MAX, ND_ERR_DATA, &commit, &size));
    commit[strspn(commit, "0123456789abcdefABCDEF")] = '\0';
    if (*commit) {
        ND_TRY_OUT(nd_fs_format(out, "%s/snapshots/%s", folder, commit));
    }
out:
    free(commit);
    free(ref);
    return status;
}

/* The snapshot that was changed last; *out is NULL if there is none. */
static nd_status newest_snapshot(const char *folder, char **out)
{
    char *snapshots = NULL;
    struct timespec newest = {0};
    ND_TRY(nd_fs_format(&snapshots, "%s/snapshots", folder));
    nd_fs_names names;
    nd_status status = nd_fs_list(snapshots, &names);
    for (int i = 0; i < names.count && status == ND_OK; i++) {
        struct stat st;
        nd_fs_kind kind = ND_FS_ABSENT;
        char *path = NULL;
        if (names.list[i][0] == '.') {
            continue;
        }
        status = nd_fs_format(&path, "%s/%s", snapshots, names.list[i]);
        status = status == ND_OK ? nd_fs_look(path, &kind, &st) : status;
        if (kind == ND_FS_FOLDER &&
            (st.st_mtim.tv_sec > newest.tv_sec ||
             (st.st_mtim.tv_sec == newest.tv_sec && st.st_mtim.tv_nsec > newest.tv_nsec))) {
            newest = st.st_mtim;
            free(*out);
            *out = path;
            path = NULL;
        }
        free(path);
    }
    nd_fs_names_fini(&names);
    free(snapshots);
    return status;
}

nd_status nd_hf_cache_find(const char *name, char **out)
{
    nd_status status = ND_OK;
    const char *slash = strchr(name, '/');
    char *hub = NULL, *folder = NULL, *snapshot = NULL;
    bool good = false;
    if (!is_model_name(name)) {
        return nd_fail(ND_ERR_CONFIG, "model name \"%.200s\" is not of the form org/name", name);
    }
    ND_TRY_OUT(hub_folder(&hub));
    ND_TRY_OUT(slash ? nd_fs_format(&folder, "%s/models--%.*s--%s", hub, (int)(slash - name), name,
                                    slash + 1)
                     : nd_fs_format(&folder, "%s/models--%s", hub, name));
    ND_TRY_OUT(snapshot_of_main(folder, &snapshot));
    ND_TRY_OUT(has_config(snapshot, &good));
    if (!good) {
        free(snapshot);
        snapshot = NULL;
        ND_TRY_OUT(newest_snapshot(folder, &snapshot));
        ND_TRY_OUT(has_config(snapshot, &good));
    }
    if (!good) {
        status =
            nd_fail(ND_ERR_DATA,
                    "model \"%s\" is not in the local Hugging Face cache (\"%s\"), and nothing is "
                    "downloaded here; get it with `hf download %s`, or give the path of a "
                    "folder",
                    name, folder, name);
        goto out;
    }
    *out = snapshot;
    snapshot = NULL;
out:
    free(snapshot);
    free(folder);
    free(hub);
    return status;
}
