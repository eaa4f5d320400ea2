// SPDX-License-Identifier: Apache-2.0
/* Results of exchanges, packed and not. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/rng.h"
#include "runtime/rdzv/wire.h"
#include "runtime/rdzv/store.h"
#include "tests/support/tempdir.h"

enum { BYTES = 100000 };

/* Numbers below `below`. */
static void fill(uint8_t *out, size_t count, uint64_t below)
{
    for (size_t i = 0; i < count; i++) {
        out[i] = (uint8_t)(nd_rng_u64(5, 1, i) % below);
    }
}

Test(pack, what_comes_back_is_what_was_packed)
{
    static uint8_t bytes[BYTES], back[BYTES + 1];
    uint8_t *packed;
    size_t size;
    fill(bytes, BYTES, 4);
    cr_assert(nd_pack(bytes, BYTES, &packed, &size));
    cr_assert_lt(size, BYTES / 2);
    assert_ok(nd_unpack(packed, size, back, BYTES));
    cr_assert_arr_eq(back, bytes, BYTES);
    free(packed);
}

Test(pack, random_bytes_and_none_come_back_too)
{
    static uint8_t bytes[BYTES], back[BYTES];
    uint8_t *packed;
    size_t size;
    fill(bytes, BYTES, 256);
    cr_assert(nd_pack(bytes, BYTES, &packed, &size));
    assert_ok(nd_unpack(packed, size, back, BYTES));
    cr_assert_arr_eq(back, bytes, BYTES);
    free(packed);
    cr_assert(nd_pack(NULL, 0, &packed, &size));
    cr_assert_gt(size, 0);
    assert_ok(nd_unpack(packed, size, NULL, 0));
    free(packed);
}

/* The bytes are of another length than they should be, or damaged. */
Test(pack, damage_is_an_error_and_writes_nothing_behind_the_result)
{
    static uint8_t bytes[BYTES], back[BYTES + 1];
    uint8_t *packed;
    size_t size;
    fill(bytes, BYTES, 4);
    cr_assert(nd_pack(bytes, BYTES, &packed, &size));
    cr_expect_eq(nd_unpack(packed, size - 1, back, BYTES), ND_ERR_IO);
    cr_expect_eq(nd_unpack(packed, size, back, BYTES - 1), ND_ERR_IO);
    cr_expect_eq(nd_unpack(packed, size, back, BYTES + 1), ND_ERR_IO);
    for (size_t i = 0; i < size; i += size / 64) {
        packed[i] ^= 0x10;
        back[BYTES] = 77;
        (void)nd_unpack(packed, size, back, BYTES);
        cr_assert_eq(back[BYTES], 77, "byte %zu", i);
        packed[i] ^= 0x10;
    }
    free(packed);
}

/* The rank unpacks what its store packed. */
Test(pack, an_exchange_gives_the_same_bytes_either_way)
{
    static uint8_t own[BYTES], all[BYTES];
    const nd_identity one = {.world_size = 1, .local_world_size = 1, .nnodes = 1, .key_fd = -1};
    nd_store *store;
    assert_ok(nd_store_open(&one, 10, NULL, &store));
    for (uint64_t below = 1; below <= 256; below *= 4) {
        fill(own, BYTES, below);
        memset(all, 0xee, BYTES);
        assert_ok(nd_store_exchange(store, "bytes", own, all, BYTES));
        cr_assert_arr_eq(all, own, BYTES, "below %d", (int)below);
    }
    nd_store_close(store);
}
