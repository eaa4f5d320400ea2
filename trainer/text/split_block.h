// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TEXT_SPLIT_BLOCK_H
#define ND_TEXT_SPLIT_BLOCK_H
/*
 * Words by the patterns of Llama 3 and Qwen 2 in ASCII text, 64 bytes at once, with vector
 * instructions and 64-bit masks that have a bit for each byte. What the masks do not tell is left
 * to the scanner of split.c: characters that are not ASCII, and what depends on bytes behind the
 * block.
 */
#include <stdint.h>

enum { ND_SPLIT_BLOCK = 64 };

/*
 * A word begins at `p`, with ND_SPLIT_BLOCK bytes behind it. The result has a bit for each byte but
 * the first at which a word begins, up to some place in the block, and none from there on; 0 also
 * where there are no vector instructions. `digits`: how many make a word at most, 3 or 1.
 */
uint64_t nd_split_block(const uint8_t *p, int digits);

#endif
