// SPDX-License-Identifier: Apache-2.0
#ifndef ND_VIEW_CHARTS_H
#define ND_VIEW_CHARTS_H
/* The charts of a page of HTML: which curves there are, and what is in them. */
#include "trainer/view/page.h"

nd_status nd_charts_write(const nd_page *page, nd_doc *doc);

#endif
