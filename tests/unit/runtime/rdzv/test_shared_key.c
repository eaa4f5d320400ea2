// SPDX-License-Identifier: Apache-2.0
/* The key of a start without ndlaunch: which file it is in, and who may read that. */
#include <criterion/criterion.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/rdzv/key.h"
#include "tests/support/tempdir.h"

static tempdir dir;
static nd_identity id;
static char path[ND_SHARED_KEY_PATH_MAX];
static uint8_t key[ND_KEY_BYTES];

static void setup(void)
{
    unsetenv("ND_RDZV_KEY_FILE");
    setenv("XDG_RUNTIME_DIR", dir.path, 1); /* mode 0700 */
    id = (nd_identity){.source = ND_IDENTITY_ENVIRONMENT,
                       .world_size = 4,
                       .local_world_size = 4,
                       .nnodes = 1,
                       .master_addr = "127.0.0.1",
                       .master_port = 29500};
}

TEMPDIR_SUITE(shared_key, setup);

Test(shared_key, on_one_host_it_is_in_a_private_file_named_by_user_and_port)
{
    uint8_t second[ND_KEY_BYTES], read[ND_KEY_BYTES];
    char name[64];
    struct stat st;
    snprintf(name, sizeof name, "ndtrain-key-%u-29500", (unsigned)geteuid());
    assert_ok(nd_shared_key(&id, key, path));
    cr_assert_str_eq(path, tempdir_file(&dir, name));
    cr_assert_eq(stat(path, &st), 0);
    cr_assert_eq(st.st_mode & 07777, 0600);
    assert_ok(nd_shared_key(&id, second, path)); /* in place of what a former job left */
    cr_assert_arr_neq(second, key, ND_KEY_BYTES);
    id.rank = 1;
    assert_ok(nd_shared_key(&id, read, path));
    cr_assert_arr_eq(read, second, ND_KEY_BYTES);
    static const char *const unusable[] = {NULL, "", ".", "/nowhere"}; /* as behind su, or srun */
    id.master_port = 1; /* nobody has made this one */
    for (size_t i = 0; i < sizeof unusable / sizeof *unusable; i++) {
        unusable[i] ? setenv("XDG_RUNTIME_DIR", unusable[i], 1) : unsetenv("XDG_RUNTIME_DIR");
        assert_fails(nd_shared_key(&id, read, path), ND_ERR_CONFIG,
                     "cannot open \"/tmp/ndtrain-key-");
        cr_assert_eq(strncmp(path, "/tmp/ndtrain-key-", 17), 0);
    }
}

Test(shared_key, a_named_file_is_used_everywhere)
{
    uint8_t read[ND_KEY_BYTES];
    assert_ok(nd_key_make_file(tempdir_file(&dir, "job.key")));
    assert_ok(nd_key_read_file(dir.name, read));
    setenv("ND_RDZV_KEY_FILE", dir.name, 1);
    snprintf(id.master_addr, sizeof id.master_addr, "10.0.0.1");
    id.local_world_size = 2;
    assert_ok(nd_shared_key(&id, key, path));
    cr_assert_str_empty(path);
    cr_assert_arr_eq(read, key, ND_KEY_BYTES);
}

Test(shared_key, beyond_one_host_a_file_must_be_named)
{
    id.local_world_size = 2;
    assert_fails(nd_shared_key(&id, key, path), ND_ERR_CONFIG, "ND_RDZV_KEY_FILE");
    id.local_world_size = 4;
    snprintf(id.master_addr, sizeof id.master_addr, "10.0.0.1");
    assert_fails(nd_shared_key(&id, key, path), ND_ERR_CONFIG, "10.0.0.1");
}

Test(shared_key, what_cannot_be_replaced_is_said_with_the_way_round_it)
{
    assert_ok(nd_shared_key(&id, key, path));
    cr_assert_eq(unlink(path), 0);
    cr_assert_eq(mkdir(path, 0700), 0);
    assert_fails(nd_shared_key(&id, key, path), ND_ERR_CANTCREATE,
                 "name a key file in ND_RDZV_KEY_FILE");
}
