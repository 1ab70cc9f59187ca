// A model on the host device as tests need it: checkpoint -> image -> bound model, and streams to push through it in either form.
// Room: tests. Threads: the test's own.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "common/device/host/host_device.h"
#include "common/model/forward.h"
#include "common/model/step_runner.h"

namespace hearth {

// Environment of a test run: the source tree, and where outside oracles lie (may not exist).
std::string SourceDir();
std::string SharedDir();

// The published image of a checkpoint, built once per test process, shard count and share on disk, its files removed at exit. `on_disk`: of the routed
// experts' bytes, about; 1: all of them.
absl::StatusOr<std::shared_ptr<const WeightImage>> ImageOf(const std::string& model_dir, int num_shards, double on_disk = 0);

// A token stream's place in the KV pool.
struct TestStream {
  std::vector<int32_t> pages;
  int64_t length = 0;
  int64_t valid = 0;  // positions below are queried, not written
  // With an MTP module: the hidden state at `hidden_at`, the last position computed.
  std::vector<float> hidden;
  int64_t hidden_at = -1;
};

class ModelHarness {
 public:
  struct Options {
    HostDeviceOptions device;
    int num_shards = 1;
    double on_disk = 0;  // as ImageOf has it
    int64_t max_rows = 128;
    int64_t num_pages = 64;
    std::optional<StepOrder> order = StepOrder::kJoint;  // of decode steps of several streams; none: measured
  };
  static absl::StatusOr<std::unique_ptr<ModelHarness>> Make(const std::string& model_dir, const Options& options);

  const Model& model() const { return *model_; }
  const WeightImage& image() const { return *image_; }
  const std::shared_ptr<const WeightImage>& shared_image() const { return image_; }
  KvPool& kv() { return *kv_; }
  const StepRunner& runner() const { return *runner_; }
  HostDevice& device() { return *device_; }
  const std::string& description() const { return device_->caps().description; }
  int64_t vocab() const { return model_->config().vocab_size; }

  // A stream with places for `tokens` tokens; pages are taken from the pool in order and come back with Reset.
  TestStream NewStream(int64_t tokens);
  // Gives all pages back, zeroed.
  void Reset();

  struct Part {
    TestStream* stream;
    std::vector<int32_t> ids;
  };
  // The parts one after the other; logits of every row, or of each part's last one.
  static ForwardBatch BatchOf(Form form, const std::vector<Part>& parts, bool all_logits);
  // One Forward: appends each part's ids to its stream. Logits [rows, vocab] of every row, or of each part's last row.
  absl::StatusOr<std::vector<float>> Step(Form form, const std::vector<Part>& parts, bool all_logits, const ForwardHooks* hooks = nullptr);
  // The MTP module's logits [parts, vocab] of the token at position at + 1, from the one at `at` and the hidden state at at - 1, in whose place it
  // leaves its own.
  struct DraftPart {
    const TestStream* stream;
    int32_t id;
    int64_t at;
    std::vector<float>* hidden;
  };
  absl::StatusOr<std::vector<float>> Draft(const std::vector<DraftPart>& parts);
  // Hidden states [rows, hidden] of the last Step in the prefill form.
  absl::StatusOr<std::vector<float>> PrefillHidden(int64_t rows);
  // The ids through as many steps of at most `chunk` rows as they need; logits of all rows if wanted, else of the last one.
  absl::StatusOr<std::vector<float>> Feed(Form form, TestStream& stream, const std::vector<int32_t>& ids, int64_t chunk, bool all_logits,
                                          const ForwardHooks* hooks = nullptr);

 private:
  ModelHarness() = default;
  std::unique_ptr<HostDevice> device_;
  std::shared_ptr<const WeightImage> image_;
  std::unique_ptr<Model> model_;
  std::shared_ptr<KvPool> kv_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Model::Workspace> workspace_;
  std::unique_ptr<StepRunner> runner_;
  int32_t next_page_ = 0;
};

int32_t Argmax(const float* logits, int64_t n);

// Token ids that look like nothing, the same for a seed everywhere.
std::vector<int32_t> Ids(int64_t n, uint32_t seed, int64_t vocab);
// Bits, not values: -0 and 0 differ, NaN equals itself.
bool SameBits(const std::vector<float>& a, const std::vector<float>& b);
// All of the KV pool.
std::vector<uint8_t> PageBytes(ModelHarness& harness);

}  // namespace hearth
