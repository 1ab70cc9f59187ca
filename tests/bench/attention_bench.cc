// Attention of a decode step alone, over contexts far larger than the caches: the absorbed form of latent attention (DeepSeek-V3, Kimi-K2) and grouped
// queries (Qwen3-235B, Mixtral), beside a plain read of the cached bytes by the same threads and the cores' peak of products, all in one run.
// Usage: attention_bench [--shape TEXT] [--context N] [--rounds R] [--threads N] [--terms 1|2] [--kv bf16|fp8] [--spin-us N] [--isa NAME]
// --shape: only those whose name holds the text. Without --context: 4096 and 32768. Never run by ctest.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "common/base/time.h"
#include "common/device/op_cost.h"
#include "common/device/ops.h"
#include "common/experts/cpu_expert_engine.h"
#include "common/formats/model_config.h"
#include "tests/bench/limits.h"

namespace hearth {
namespace {

struct Flags {
  std::vector<int64_t> contexts = {4096, 32768};
  int64_t rounds = 12;
  std::string shape;
  HostDeviceOptions device;
};

struct Shape {
  const char* name;
  int64_t heads;
  int64_t kv_heads;  // 0: latent attention
  int64_t dim;       // of a head; latent: of its part without position, and of its values
  int64_t rank = 0, rope = 0;
};
constexpr Shape kShapes[] = {
    {.name = "DeepSeek-V3, MLA 128 heads", .heads = 128, .kv_heads = 0, .dim = 128, .rank = 512, .rope = 64},
    {.name = "Kimi-K2, MLA 64 heads", .heads = 64, .kv_heads = 0, .dim = 128, .rank = 512, .rope = 64},
    {.name = "Qwen3-235B, GQA 64 / 4", .heads = 64, .kv_heads = 4, .dim = 128},
    {.name = "Mixtral 8x7B, GQA 32 / 8", .heads = 32, .kv_heads = 8, .dim = 128},
};

// What ModelConfig::KvRow looks at.
ModelConfig ConfigOf(const Shape& shape) {
  ModelConfig config;
  config.attention = shape.kv_heads == 0 ? AttentionKind::kMla : AttentionKind::kGqa;
  config.num_key_value_heads = shape.kv_heads;
  config.v_head_dim = shape.dim;
  config.kv_lora_rank = shape.rank;
  config.qk_rope_head_dim = shape.rope;
  return config;
}

class AttentionOfBatch {
 public:
  AttentionOfBatch(HostDevice& device, const Shape& shape, int64_t context, int64_t batch)
      : device_(device), shape_(shape), stream_(device.MakeStream("attention")) {
    const int64_t terms = device.caps().activation_terms;
    const int64_t pages = (context + kPageTokens - 1) / kPageTokens;
    kv_ = KvPool::InMemory({.layers = 1,
                            .row_elements = static_cast<uint32_t>(ConfigOf(shape).KvRow(device.caps().kv_dtype, terms)),
                            .dtype = device.caps().kv_dtype,
                            .num_pages = static_cast<uint64_t>(pages * batch)});
    for (int64_t page = 0; page < pages * batch; ++page) {
      pages_.push_back(static_cast<int32_t>(page));
      // 0x3c3c: 0.0115 in BF16, 1.5 in E4M3, and an ordinary number as a scale in F32.
      std::memset(kv_->layer(static_cast<int32_t>(page), 0), 0x3c, kv_->geometry().layer_bytes());
    }
    for (int64_t i = 0; i < batch; ++i) {
      sequences_.push_back({.first_row = i, .num_rows = 1, .start_position = context - 1, .pages = pages_.data() + i * pages});
    }
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    q_bf16_.resize(static_cast<size_t>(batch * terms * shape.heads * (shape.dim + shape.rope)));
    for (bf16& x : q_bf16_) x = ToBf16(normal(random));
    q_f32_.resize(q_bf16_.size());
    for (float& x : q_f32_) x = normal(random);
    kv_b_.resize(static_cast<size_t>(shape.heads * 2 * shape.dim * shape.rank));
    for (bf16& x : kv_b_) x = ToBf16(0.05f * normal(random));
    out_.resize(static_cast<size_t>(batch * terms * shape.heads * shape.dim));
  }

  void Run() {
    if (shape_.kv_heads == 0) {
      device_.ops().MlaAttention(*stream_, Mla());
    } else {
      device_.ops().GqaAttention(*stream_, Gqa());
    }
  }
  OpCost Cost() const { return shape_.kv_heads == 0 ? CostOf(Mla()) : CostOf(Gqa()); }
  std::vector<MemoryRun> Cached() const {
    std::vector<MemoryRun> runs;
    for (const int32_t page : pages_) {
      runs.push_back({reinterpret_cast<const uint8_t*>(kv_->layer(page, 0)), static_cast<int64_t>(kv_->geometry().layer_bytes())});
    }
    return runs;
  }

 private:
  MlaAttentionArgs Mla() const {
    return {
        .form = Form::kDecode,
        .q = q_bf16_.data(),
        .kv_b = {.data = kv_b_.data(), .dtype = DType::kBF16, .rows = shape_.heads * 2 * shape_.dim, .cols = shape_.rank, .row_stride = shape_.rank},
        .heads = shape_.heads,
        .nope = shape_.dim,
        .rope_dim = shape_.rope,
        .v_dim = shape_.dim,
        .rank = shape_.rank,
        .softmax_scale = 0.1f,
        .kv = kv_.get(),
        .kv_dtype = device_.caps().kv_dtype,
        .sequences = sequences_.data(),
        .num_sequences = static_cast<int64_t>(sequences_.size()),
        .terms = device_.caps().activation_terms,
        .out = const_cast<bf16*>(out_.data())};
  }
  GqaAttentionArgs Gqa() const {
    return {.q = q_f32_.data(),
            .heads = shape_.heads,
            .kv_heads = shape_.kv_heads,
            .head_dim = shape_.dim,
            .softmax_scale = 0.1f,
            .kv = kv_.get(),
            .kv_dtype = device_.caps().kv_dtype,
            .sequences = sequences_.data(),
            .num_sequences = static_cast<int64_t>(sequences_.size()),
            .terms = device_.caps().activation_terms,
            .out = const_cast<bf16*>(out_.data())};
  }

  HostDevice& device_;
  const Shape& shape_;
  const std::unique_ptr<Stream> stream_;
  std::shared_ptr<KvPool> kv_;
  std::vector<int32_t> pages_;
  std::vector<KvSequence> sequences_;
  std::vector<bf16> q_bf16_, kv_b_, out_;
  std::vector<float> q_f32_;
};

absl::Status Run(const Flags& flags) {
  ASSIGN_OR_RETURN(auto device, MakeHostDevice(flags.device));
  const double peak = DotPeak(device->pool());
  std::printf("%s\nVDPBF16PS on registers: %.0f GFLOP/s; medians of %ld rounds, attention and plain read of the cached bytes in turn\n\n",
              device->caps().description.c_str(), peak, static_cast<long>(flags.rounds));
  std::printf("%-28s %5s %8s %10s %10s %12s %12s %9s\n", "shape", "batch", "context", "cached", "time", "plain read", "of the read", "GFLOP/s");
  for (const Shape& shape : kShapes) {
    if (std::string(shape.name).find(flags.shape) == std::string::npos) continue;
    for (const int64_t context : flags.contexts) {
      for (const int64_t batch : {1, 4}) {
        AttentionOfBatch attention(*device, shape, context, batch);
        const std::vector<MemoryRun> cached = attention.Cached();
        double bytes = 0;
        for (const MemoryRun& run : cached) bytes += static_cast<double>(run.bytes);
        StepsBesideReads steps;
        for (int64_t round = -1; round < flags.rounds; ++round) {
          const int64_t begin_ns = MonotonicNowNs();
          attention.Run();
          const double seconds = static_cast<double>(MonotonicNowNs() - begin_ns) * 1e-9;
          const double read = SecondsToRead(device->pool(), cached);
          if (round >= 0) steps.Add(seconds, read, bytes);
        }
        std::printf("%-28s %5ld %8ld %7.1f MB %7.2f ms %7.1f GB/s %10.0f %% %9.0f\n", shape.name, static_cast<long>(batch),
                    static_cast<long>(context), bytes * 1e-6, steps.seconds() * 1e3, steps.read_rate() * 1e-9, steps.of_read() * 100,
                    attention.Cost().flops / steps.seconds() * 1e-9);
        std::fflush(stdout);
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace hearth

int main(int argc, char** argv) {
  hearth::Flags flags;
  const auto take = [&](const std::string& name, const char* value) {
    if (name == "--context") {
      flags.contexts = {std::atol(value)};
      return flags.contexts[0] > 0;
    }
    if (name == "--shape") {
      flags.shape = value;
      return true;
    }
    if (name == "--rounds") {
      flags.rounds = std::atol(value);
      return flags.rounds > 0;
    }
    return false;
  };
  if (!hearth::TakeFlags(argc, argv, &flags.device, nullptr, take)) return 2;
  const absl::Status status = hearth::Run(flags);
  if (!status.ok()) std::fprintf(stderr, "attention_bench: %s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}
