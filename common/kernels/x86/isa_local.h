// Rules of this folder, and the one macro that helps to keep them.
//
// Each .cc here is compiled for its own instruction set. The linker merges inline functions and template instances that
// several files emit, and keeps any one of them: if it kept a copy made here, other code would run AVX-512 on a CPU
// without it. So nothing here may have external linkage but the tables and amx.cc's one product. The headers of this folder put all their code in
// an unnamed namespace on purpose: each .cc gets a copy of its own. Functions are forced inline or templates over a
// local type; of other headers only types and constants are used, no inline function of the standard library or of
// common/base. kernels_isolation_test checks the symbols.
//
// Speed: the tiles' arrays become registers only if all loops over them are unrolled, hence the pragmas in the
// skeletons.
#pragma once

#define HEARTH_INLINE inline __attribute__((always_inline))
