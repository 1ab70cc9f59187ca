// How far a long piece of work is, in one line for people: the store's load, `hearth load`, `verify`, `synth` and `wait` all show it alike.
// Room: common/base.
#pragma once

#include <cstdint>
#include <string>

namespace hearth {

// "[#####.....]  50 %  1.2 GB of 2.4 GB, 1.10 GB/s, 1.1 s left"; without the bar it begins at the percentage.
std::string FormatProgress(uint64_t done_bytes, uint64_t total_bytes, double bytes_per_second, double eta_seconds, bool with_bar);

}  // namespace hearth
