// Small checkpoints with random weights, whose shapes are awkward on purpose: experts that cut into unequal shards (384 rows: 128 and 256, or the other
// way round), a dense layer, groups of experts, an MTP module.
// Room: tests. Threads: the test's own.
#pragma once

#include <string>

namespace hearth {

// "synth": latent attention; "gqa": grouped-query attention; "top8": latent, eight choices a row of sixteen experts. The checkpoint's folder, made once a process.
std::string SyntheticModelDir(const std::string& name);
// The same names, and "fable": the bundled model.
std::string TestModelDir(const std::string& name);

}  // namespace hearth
