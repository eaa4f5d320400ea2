// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdio.h>

#include "tests/support/tempdir.h"
#include "trainer/text/vocab.h"

enum { PIECES = 600 };

Test(vocab, pieces_by_text_and_by_bytes)
{
    nd_vocab vocab;
    char text[16];
    assert_ok(nd_vocab_init(&vocab, PIECES, true));
    for (int32_t id = 0; id < PIECES; id++) {
        const int size = sprintf(text, "\xc4\xa0%d", id); /* U+0120 stands for a blank */
        assert_ok(nd_vocab_add(&vocab, id, text, (size_t)size, id % 7 != 0));
    }
    for (int32_t id = 0; id < 2 * PIECES; id++) {
        int size = sprintf(text, "\xc4\xa0%d", id);
        cr_assert_eq(nd_vocab_find(&vocab, text, (size_t)size), id < PIECES ? id : -1);
        size = sprintf(text, " %d", id);
        const int32_t expected = id < PIECES && id % 7 != 0 ? id : -1;
        const uint64_t asked = nd_vocab_ask_bytes(&vocab, text, (size_t)size);
        cr_assert_eq(nd_vocab_find_bytes(&vocab, text, (size_t)size), expected);
        cr_assert_eq(nd_vocab_answer_bytes(&vocab, text, (size_t)size, asked), expected);
    }
    assert_fails(nd_vocab_add(&vocab, PIECES, "\xc4\xa0\x35", 3, true), ND_ERR_DATA, "there twice");
    nd_vocab_fini(&vocab);
}
