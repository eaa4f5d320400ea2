// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TEXT_VERSION_H
#define ND_TEXT_VERSION_H

/* A part of the names of token caches. Raise it with each change that gives a text other ids than
 * before: of the tokenizer, of the rows and blocks of a corpus, of the forms of chats. */
enum { ND_TEXT_VERSION = 5 };

#endif
