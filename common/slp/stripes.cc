#include "common/slp/stripes.h"

#include <algorithm>

namespace hearth {
namespace {

// Of a sequence of `rows`: where stripe i of `count` begins.
int64_t StripeBegin(int64_t rows, int64_t i, int64_t count) { return rows * i / count; }

// The rank that has stripe i: 0 1 .. n-1 n-1 .. 1 0, turned by `turn`.
int64_t OwnerOf(int64_t i, int64_t ranks, int64_t turn) { return (std::min(i, 2 * ranks - 1 - i) + turn) % ranks; }

// The ranks' rows once the sequence is shared out with this turn.
std::vector<int64_t> With(std::vector<int64_t> rank_rows, int64_t rows, int64_t turn) {
  const int64_t ranks = static_cast<int64_t>(rank_rows.size());
  for (int64_t i = 0; i < 2 * ranks; ++i) {
    rank_rows[static_cast<size_t>(OwnerOf(i, ranks, turn))] += StripeBegin(rows, i + 1, 2 * ranks) - StripeBegin(rows, i, 2 * ranks);
  }
  return rank_rows;
}

}  // namespace

Stripes CutIntoStripes(const std::vector<KvSequence>& sequences, int64_t ranks) {
  Stripes stripes;
  stripes.rank_rows.assign(static_cast<size_t>(ranks), 0);
  for (size_t s = 0; s < sequences.size(); ++s) {
    const KvSequence& sequence = sequences[s];
    const auto fullest = [&](int64_t turn) {
      const std::vector<int64_t> rows = With(stripes.rank_rows, sequence.num_rows, turn);
      return *std::max_element(rows.begin(), rows.end());
    };
    int64_t best = 0;
    for (int64_t turn = 1; turn < ranks; ++turn) {
      if (fullest(turn) < fullest(best)) best = turn;
    }
    stripes.rank_rows = With(std::move(stripes.rank_rows), sequence.num_rows, best);
    const int64_t count = ranks == 1 ? 1 : 2 * ranks;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t begin = StripeBegin(sequence.num_rows, i, count);
      const int64_t end = StripeBegin(sequence.num_rows, i + 1, count);
      if (begin == end) continue;
      stripes.all.push_back(
          {.sequence = static_cast<int64_t>(s), .first_row = sequence.first_row + begin, .num_rows = end - begin, .rank = OwnerOf(i, ranks, best)});
    }
  }
  return stripes;
}

}  // namespace hearth
