// SPDX-License-Identifier: Apache-2.0
/* The scanners without vector instructions, as a CPU without SSE2 has them: nd_text_words_plain. */
#undef __SSE2__
#define nd_text_words    nd_text_words_plain
#define nd_text_cut      nd_text_cut_plain
#define nd_text_find_cut nd_text_find_cut_plain
#include "trainer/text/split.c"
