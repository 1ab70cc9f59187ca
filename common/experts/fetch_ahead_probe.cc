#include "common/experts/fetch_ahead_probe.h"

#include <algorithm>
#include <array>
#include <vector>

#include "absl/strings/str_format.h"

namespace hearth {
namespace {

// Less than this a large last-level cache may hold; twice as much is enough to walk.
constexpr int64_t kBytesMin = 512 << 20;
constexpr int64_t kBytesEnough = int64_t{1} << 30;
// Off must be faster by so much: on is what long rows want.
constexpr double kWorth = 1.02;

int64_t ExpertBytes(ExpertSource& source, const ExpertsArgs& shape, int64_t expert) {
  int64_t bytes = 0;
  for (int64_t shard = 0; shard < shape.num_shards; ++shard) {
    const ExpertView view = source.Acquire(shape.layer, expert, shard);
    for (const WeightView* w : {&view.gate, &view.up, &view.down}) {
      if (view.count > 0) bytes += static_cast<int64_t>(DTypeBytes(w->dtype, static_cast<uint64_t>(w->rows * w->cols)));
    }
    source.Release(shape.layer, expert, shard);
  }
  return bytes;
}

double Median(std::vector<double>& values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

std::string FetchAheadProbe::ToString() const {
  const char* state = on ? "on" : "off";
  if (!note.empty()) return absl::StrFormat("%s (not measured: %s)", state, note);
  return absl::StrFormat("%s (%.1f against %.1f GB/s)", state, on ? on_gb_per_s : off_gb_per_s, on ? off_gb_per_s : on_gb_per_s);
}

FetchAheadProbe ProbeFetchAhead(HostDevice& device, ExpertSource& source, ExpertsArgs shape, int64_t budget_ns) {
  FetchAheadProbe probe;
  const int64_t step_bytes = ExpertBytes(source, shape, 0) * shape.top_k;
  const int64_t sets = std::min(shape.num_experts / shape.top_k, (kBytesEnough + step_bytes - 1) / std::max<int64_t>(step_bytes, 1));
  if (sets * step_bytes < kBytesMin) {
    probe.note = absl::StrFormat("a layer's experts have %s, which caches may hold", HumanBytes(static_cast<double>(sets * step_bytes)));
    return probe;
  }
  const std::unique_ptr<Stream> stream = device.MakeStream("probe");
  const int terms = device.caps().activation_terms;
  const std::vector<bf16> x(static_cast<size_t>(terms * shape.hidden));
  const std::vector<float> weights(static_cast<size_t>(shape.top_k), 1.0f);
  std::vector<float> out(static_cast<size_t>(shape.hidden));
  std::vector<int32_t> ids(static_cast<size_t>(shape.top_k));
  shape.form = Form::kDecode;
  shape.source = &source;
  shape.terms = terms;
  shape.x = x.data();
  shape.weights = weights.data();
  shape.ids = ids.data();
  shape.m = 1;
  shape.out = out.data();

  std::array<std::vector<double>, 2> rates;  // off, on
  const int64_t begin_ns = device.Now();
  // The first walk maps the pages. Then neighbouring walks give each set to on and to off in turn.
  for (int64_t walk = 0; walk <= 2 || device.Now() - begin_ns < budget_ns; ++walk) {
    for (int64_t set = 0; set < sets; ++set) {
      const bool on = (walk + set) % 2 == 0;
      for (int64_t k = 0; k < shape.top_k; ++k) ids[static_cast<size_t>(k)] = static_cast<int32_t>(set * shape.top_k + k);
      device.SetFetchAhead(on);
      const int64_t step_ns = device.Now();
      device.ops().Experts(*stream, shape);
      const absl::Status ran = stream->Synchronize();
      if (!ran.ok()) {
        device.SetFetchAhead(true);
        probe.note = std::string(ran.message());
        return probe;
      }
      if (walk > 0) rates[on ? 1 : 0].push_back(static_cast<double>(step_bytes) / static_cast<double>(device.Now() - step_ns));
    }
  }
  probe.off_gb_per_s = Median(rates[0]);
  probe.on_gb_per_s = Median(rates[1]);
  probe.on = probe.off_gb_per_s < probe.on_gb_per_s * kWorth;
  device.SetFetchAhead(probe.on);
  return probe;
}

}  // namespace hearth
