// CHECK: for our own invariants only. What a peer, a disk, a user or memory pressure can cause is a Status instead.
#pragma once

#include <cstdio>
#include <cstdlib>

#define HEARTH_CHECK(condition)                                                                     \
  do {                                                                                              \
    if (!(condition)) {                                                                             \
      std::fprintf(stderr, "%s:%d: invariant does not hold: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                                 \
    }                                                                                               \
  } while (false)
