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

/* A model with two snapshots, of which main is the older one. */
static void make_model(const char *hub, const char *model)
{
    shell(&dir, shell_line("mkdir -p %s/%s && cd %s/%s && mkdir refs blobs snapshots && "
                           "cd snapshots && mkdir abc123 def456 && echo '{}' > ../blobs/1 && "
                           "ln -s ../../blobs/1 abc123/config.json && "
                           "ln -s ../../blobs/1 def456/config.json && "
                           "touch -d 2020-01-01 abc123 && printf abc123 > ../refs/main",
                           hub, model, hub, model));
}

/* Each goes before those above it; an empty one is as if it were not set. */
Test(hf_cache, finds_the_snapshot_of_main_in_each_place)
{
    static const struct {
        const char *variable, *folder, *hub;
    } places[] = {{NULL, "", ".cache/huggingface/hub"},
                  {"XDG_CACHE_HOME", "xdg", "xdg/huggingface/hub"},
                  {"HF_HOME", "home", "home/hub"},
                  {"HUGGINGFACE_HUB_CACHE", "older", "older"},
                  {"HF_HUB_CACHE", "direct", "direct"}};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        make_model(places[i].hub, "models--org--name");
        if (places[i].variable) {
            setenv(places[i].variable, tempdir_file(&dir, places[i].folder), 1);
        }
        assert_finds("org/name", printed("%s/models--org--name/snapshots/abc123", places[i].hub));
    }
    setenv("HF_HUB_CACHE", "", 1);
    assert_finds("org/name", "older/models--org--name/snapshots/abc123");
}

Test(hf_cache, without_main_the_newest_snapshot_counts)
{
    make_model("h", "models--gpt");
    setenv("HF_HUB_CACHE", tempdir_file(&dir, "h"), 1);
    shell(&dir, "rm h/models--gpt/refs/main && cp -r h/models--gpt/snapshots/abc123 "
                "h/models--gpt/snapshots/.partial");
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
