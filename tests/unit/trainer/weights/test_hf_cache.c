// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

#include "tests/support/shell.h"
#include "trainer/weights/weights.h"

static tempdir dir;

static void setup(void)
{
    unsetenv("HF_HUB_CACHE");
    unsetenv("HUGGINGFACE_HUB_CACHE");
    unsetenv("HF_HOME");
    unsetenv("XDG_CACHE_HOME");
    setenv("HOME", dir.path, 1);
}

TEMPDIR_SUITE(hf_cache, setup);

static void assert_finds(const char *name, const char *ending)
{
    char *found, expected[256];
    assert_ok(nd_hf_cache_find(name, &found));
    snprintf(expected, sizeof expected, "%s/%s", dir.path, ending);
    cr_assert_str_eq(found, expected, "%s", found);
    free(found);
}

#define MAKE(hub, model)                                                                           \
    "mkdir -p " hub "/" model "/refs " hub "/" model "/blobs " hub "/" model                       \
    "/snapshots/abc123 " hub "/" model "/snapshots/def456 && cd " hub "/" model                    \
    " && echo '{}' > blobs/1 && ln -s ../../blobs/1 snapshots/abc123/config.json"                  \
    " && ln -s ../../blobs/1 snapshots/def456/config.json && touch -d 2020-01-01 snapshots/abc123" \
    " && printf abc123 > refs/main"

Test(hf_cache, finds_the_snapshot_of_main_in_each_place)
{
    shell(&dir, MAKE(".cache/huggingface/hub", "models--org--name"));
    assert_finds("org/name", ".cache/huggingface/hub/models--org--name/snapshots/abc123");
    shell(&dir, MAKE("xdg/huggingface/hub", "models--org--name"));
    setenv("XDG_CACHE_HOME", tempdir_file(&dir, "xdg"), 1);
    assert_finds("org/name", "xdg/huggingface/hub/models--org--name/snapshots/abc123");
    shell(&dir, MAKE("home/hub", "models--org--name"));
    setenv("HF_HOME", tempdir_file(&dir, "home"), 1);
    assert_finds("org/name", "home/hub/models--org--name/snapshots/abc123");
    shell(&dir, MAKE("older", "models--org--name"));
    setenv("HUGGINGFACE_HUB_CACHE", tempdir_file(&dir, "older"), 1);
    assert_finds("org/name", "older/models--org--name/snapshots/abc123");
    setenv("HF_HUB_CACHE", "", 1); /* as if it were not set */
    assert_finds("org/name", "older/models--org--name/snapshots/abc123");
    shell(&dir, MAKE("direct", "models--org--name"));
    setenv("HF_HUB_CACHE", tempdir_file(&dir, "direct"), 1);
    assert_finds("org/name", "direct/models--org--name/snapshots/abc123");
}

Test(hf_cache, without_main_the_newest_snapshot_counts)
{
    shell(&dir, MAKE("h", "models--gpt"));
    setenv("HF_HUB_CACHE", tempdir_file(&dir, "h"), 1);
    shell(&dir, "rm h/models--gpt/refs/main");
    assert_finds("gpt", "h/models--gpt/snapshots/def456");
    shell(&dir, "printf 999 > h/models--gpt/refs/main"); /* a snapshot that is gone */
    assert_finds("gpt", "h/models--gpt/snapshots/def456");
    shell(&dir, "touch -d '2019-01-01 0:0:0.9' h/models--gpt/snapshots/def456");
    assert_finds("gpt", "h/models--gpt/snapshots/abc123");
    shell(&dir, "touch -d '2020-01-01 0:0:0.5' h/models--gpt/snapshots/def456");
    assert_finds("gpt", "h/models--gpt/snapshots/def456");
}

Test(hf_cache, says_how_to_get_what_is_not_there)
{
    char *found;
    assert_fails(nd_hf_cache_find("org/name", &found), ND_ERR_DATA, "hf download org/name");
    static const char *const bad[] = {"",    "/name",  "org/",      "a/b/c",    "../x",
                                      "a b", "a/../b", "org/na;me", "org\\name"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_fails(nd_hf_cache_find(bad[i], &found), ND_ERR_CONFIG,
                     "is not of the form org/name");
    }
}
