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
static bool is_private;

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

Test(shared_key, on_one_host_it_is_a_private_file_named_by_user_and_port)
{
    assert_ok(nd_shared_key_path(&id, path, &is_private));
    cr_assert(is_private);
    char name[64];
    snprintf(name, sizeof name, "ndtrain-key-%u-29500", (unsigned)geteuid());
    cr_assert_str_eq(path, tempdir_file(&dir, name));
    unsetenv("XDG_RUNTIME_DIR");
    assert_ok(nd_shared_key_path(&id, path, &is_private));
    cr_assert_str_eq(strrchr(path, '/') + 1, name);
    cr_assert_eq(strncmp(path, "/tmp/", 5), 0);
}

Test(shared_key, a_named_file_is_used_everywhere)
{
    setenv("ND_RDZV_KEY_FILE", "/keys/job.key", 1);
    snprintf(id.master_addr, sizeof id.master_addr, "10.0.0.1");
    id.local_world_size = 2;
    assert_ok(nd_shared_key_path(&id, path, &is_private));
    cr_assert_not(is_private);
    cr_assert_str_eq(path, "/keys/job.key");
    char longer[ND_SHARED_KEY_PATH_MAX + 1];
    memset(longer, 'a', sizeof longer);
    longer[ND_SHARED_KEY_PATH_MAX] = '\0';
    setenv("ND_RDZV_KEY_FILE", longer, 1);
    assert_fails(nd_shared_key_path(&id, path, &is_private), ND_ERR_CONFIG, "ND_RDZV_KEY_FILE");
}

Test(shared_key, beyond_one_host_a_file_must_be_named)
{
    id.local_world_size = 2;
    assert_fails(nd_shared_key_path(&id, path, &is_private), ND_ERR_CONFIG, "ND_RDZV_KEY_FILE");
    id.local_world_size = 4;
    snprintf(id.master_addr, sizeof id.master_addr, "10.0.0.1");
    assert_fails(nd_shared_key_path(&id, path, &is_private), ND_ERR_CONFIG, "10.0.0.1");
}

Test(shared_key, publishing_replaces_what_a_former_job_left)
{
    uint8_t first[ND_KEY_BYTES], second[ND_KEY_BYTES], read[ND_KEY_BYTES];
    struct stat st;
    assert_ok(nd_shared_key_path(&id, path, &is_private));
    assert_ok(nd_shared_key_publish(path, first));
    cr_assert_eq(stat(path, &st), 0);
    cr_assert_eq(st.st_mode & 07777, 0600);
    assert_ok(nd_key_read_file(path, read));
    cr_assert_arr_eq(read, first, ND_KEY_BYTES);
    assert_ok(nd_shared_key_publish(path, second));
    cr_assert_arr_neq(second, first, ND_KEY_BYTES);
    assert_ok(nd_key_read_file(path, read));
    cr_assert_arr_eq(read, second, ND_KEY_BYTES);
}

Test(shared_key, what_cannot_be_replaced_is_said_with_the_way_round_it)
{
    uint8_t key[ND_KEY_BYTES];
    assert_ok(nd_shared_key_path(&id, path, &is_private));
    cr_assert_eq(mkdir(path, 0700), 0);
    assert_fails(nd_shared_key_publish(path, key), ND_ERR_CANTCREATE,
                 "name a key file in ND_RDZV_KEY_FILE");
}
