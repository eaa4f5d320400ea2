// SPDX-License-Identifier: Apache-2.0
/* Finds a model in the local Hugging Face cache:
 * <hub>/models--org--name/{refs/main, snapshots/<commit>}. */
#include "trainer/weights/weights.h"

#include <ctype.h>
#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "runtime/base/fsio.h"

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

static nd_status model_folder(const char *hub, const char *name, char **out)
{
    const char *slash = strchr(name, '/');
    return slash
               ? nd_fs_format(out, "%s/models--%.*s--%s", hub, (int)(slash - name), name, slash + 1)
               : nd_fs_format(out, "%s/models--%s", hub, name);
}

static bool has_config(const char *snapshot)
{
    char *config = NULL;
    struct stat st;
    if (nd_fs_format(&config, "%s/config.json", snapshot) != ND_OK) {
        return false;
    }
    bool found = stat(config, &st) == 0; /* follows the link into blobs/ */
    free(config);
    return found;
}

/* The snapshot that refs/main points at; *out is NULL if there is none. */
static nd_status snapshot_of_main(const char *folder, char **out)
{
    char *ref = NULL, *commit = NULL;
    size_t size = 0;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_fs_format(&ref, "%s/refs/main", folder));
    if (!nd_fs_exists(ref)) {
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
    DIR *dir = opendir(snapshots);
    nd_status status = ND_OK;
    for (struct dirent *e = dir ? readdir(dir) : NULL; e && status == ND_OK; e = readdir(dir)) {
        struct stat st;
        if (e->d_name[0] == '.' || fstatat(dirfd(dir), e->d_name, &st, 0) != 0) {
            continue;
        }
        bool newer = st.st_mtim.tv_sec > newest.tv_sec ||
                     (st.st_mtim.tv_sec == newest.tv_sec && st.st_mtim.tv_nsec > newest.tv_nsec);
        if (S_ISDIR(st.st_mode) && newer) {
            newest = st.st_mtim;
            free(*out);
            *out = NULL;
            status = nd_fs_format(out, "%s/%s", snapshots, e->d_name);
        }
    }
    if (dir) {
        closedir(dir);
    }
    free(snapshots);
    return status;
}

nd_status nd_hf_cache_find(const char *name, char **out)
{
    nd_status status = ND_OK;
    char *hub = NULL, *folder = NULL, *snapshot = NULL;
    if (!is_model_name(name)) {
        return nd_fail(ND_ERR_CONFIG, "model name \"%.200s\" is not of the form org/name", name);
    }
    ND_TRY_OUT(hub_folder(&hub));
    ND_TRY_OUT(model_folder(hub, name, &folder));
    ND_TRY_OUT(snapshot_of_main(folder, &snapshot));
    if (!snapshot || !has_config(snapshot)) {
        free(snapshot);
        snapshot = NULL;
        ND_TRY_OUT(newest_snapshot(folder, &snapshot));
    }
    if (!snapshot || !has_config(snapshot)) {
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
