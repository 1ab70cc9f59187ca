#include "tests/model_harness.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <numeric>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "common/experts/cpu_expert_engine.h"
#include "common/formats/model_config.h"
#include "common/image/image_builder.h"
#include "common/image/image_plan.h"

namespace hearth {
namespace {

// Images of this process; the directory goes with it.
class Images {
 public:
  Images() : dir_(std::filesystem::temp_directory_path() / ("hearth_model_test." + std::to_string(getpid()))) {
    std::filesystem::create_directories(dir_);
  }
  ~Images() {
    images_.clear();
    std::error_code ignored;
    std::filesystem::remove_all(dir_, ignored);
  }
  absl::StatusOr<std::shared_ptr<const WeightImage>> Get(const std::string& model_dir, int num_shards, double on_disk) {
    auto& image = images_[{model_dir, num_shards, on_disk}];
    if (image == nullptr) {
      const RegionPlace place{.dir = dir_.string(), .node = "test", .disk_dir = dir_.string()};
      BuildOptions options;
      options.model_dir = model_dir;
      options.place = place;
      options.num_shards = num_shards;
      if (on_disk > 0) {
        ASSIGN_OR_RETURN(const ImagePlan plan, PlanImage(model_dir, num_shards));
        options.image_bytes_max = plan.segment_bytes() - static_cast<uint64_t>(on_disk * static_cast<double>(plan.expert_bytes()));
      }
      ASSIGN_OR_RETURN(const BuildResult built, BuildImage(options));
      ASSIGN_OR_RETURN(image, WeightImage::Attach(place, built.generation));
    }
    return image;
  }

 private:
  const std::filesystem::path dir_;
  std::map<std::tuple<std::string, int, double>, std::shared_ptr<const WeightImage>> images_;
};

std::string FromEnvironment(const char* name, const std::string& otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

}  // namespace

std::string SourceDir() { return FromEnvironment("HEARTH_SOURCE_DIR", "."); }
std::string SharedDir() { return FromEnvironment("HEARTH_SHARED_DIR", SourceDir() + "/../shared"); }

absl::StatusOr<std::shared_ptr<const WeightImage>> ImageOf(const std::string& model_dir, int num_shards, double on_disk) {
  static Images images;
  return images.Get(model_dir, num_shards, on_disk);
}

absl::StatusOr<std::unique_ptr<ModelHarness>> ModelHarness::Make(const std::string& model_dir, const Options& options) {
  auto harness = std::unique_ptr<ModelHarness>(new ModelHarness);
  ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(model_dir));
  ASSIGN_OR_RETURN(harness->image_, ImageOf(model_dir, options.num_shards, options.on_disk));
  ASSIGN_OR_RETURN(harness->device_, MakeHostDevice(options.device));
  ASSIGN_OR_RETURN(harness->model_, Model::Bind(config, harness->image_, *harness->device_));
  KvGeometry geometry = harness->model_->kv_geometry();
  geometry.num_pages = static_cast<uint64_t>(options.num_pages);
  harness->kv_ = KvPool::InMemory(geometry);
  harness->stream_ = harness->device_->MakeStream("test");
  ASSIGN_OR_RETURN(harness->workspace_, harness->model_->MakeWorkspace(options.max_rows, options.max_rows));
  ASSIGN_OR_RETURN(harness->runner_, StepRunner::Make(*harness->device_, *harness->model_,
                                                      {.max_rows = options.max_rows, .max_logit_rows = options.max_rows, .order = options.order}));
  return harness;
}

TestStream ModelHarness::NewStream(int64_t tokens) {
  TestStream stream;
  for (int64_t i = 0; i * kPageTokens < tokens; ++i) stream.pages.push_back(next_page_++);
  return stream;
}

void ModelHarness::Reset() {
  next_page_ = 0;
  std::memset(kv_->pages(), 0, kv_->geometry().num_pages * kv_->geometry().page_bytes());
}

ForwardBatch ModelHarness::BatchOf(Form form, const std::vector<Part>& parts, bool all_logits) {
  ForwardBatch batch;
  batch.form = form;
  for (const Part& part : parts) {
    const TestStream& stream = *part.stream;
    batch.sequences.push_back({.first_row = static_cast<int64_t>(batch.token_ids.size()),
                               .num_rows = static_cast<int64_t>(part.ids.size()),
                               .start_position = stream.length,
                               .write_from = stream.valid,
                               .pages = stream.pages.data()});
    batch.prior_hidden.push_back(stream.length > 0 && stream.hidden_at == stream.length - 1 ? stream.hidden.data() : nullptr);
    batch.token_ids.insert(batch.token_ids.end(), part.ids.begin(), part.ids.end());
    batch.logit_rows.push_back(static_cast<int32_t>(batch.token_ids.size()) - 1);
  }
  if (all_logits) {
    batch.logit_rows.resize(batch.token_ids.size());
    std::iota(batch.logit_rows.begin(), batch.logit_rows.end(), 0);
  }
  return batch;
}

absl::StatusOr<std::vector<float>> ModelHarness::Step(Form form, const std::vector<Part>& parts, bool all_logits, const ForwardHooks* hooks) {
  const ForwardBatch batch = BatchOf(form, parts, all_logits);
  for (const Part& part : parts) part.stream->length += static_cast<int64_t>(part.ids.size());
  std::vector<float> logits(batch.logit_rows.size() * static_cast<size_t>(vocab()));
  if (form == Form::kDecode) {
    for (const absl::Status& status : runner_->Run(*stream_, *kv_, batch, logits.data(), hooks)) RETURN_IF_ERROR(status);
  } else {
    RETURN_IF_ERROR(model_->Forward(*stream_, *workspace_, *kv_, batch, logits.data(), hooks));
  }
  if (!model_->has_mtp()) return logits;
  for (size_t i = 0; i < parts.size(); ++i) {
    TestStream& stream = *parts[i].stream;
    stream.hidden.resize(static_cast<size_t>(model_->config().hidden_size));
    stream.hidden_at = stream.length - 1;
    const int64_t row = batch.sequences[i].first_row + batch.sequences[i].num_rows - 1;
    RETURN_IF_ERROR(form == Form::kDecode ? runner_->ReadHidden(*stream_, row, stream.hidden.data())
                                          : model_->ReadHidden(*stream_, *workspace_, row, stream.hidden.data()));
  }
  return logits;
}

absl::StatusOr<std::vector<float>> ModelHarness::PrefillHidden(int64_t rows) {
  const int64_t width = model_->config().hidden_size;
  std::vector<float> hidden(static_cast<size_t>(rows * width));
  for (int64_t row = 0; row < rows; ++row) RETURN_IF_ERROR(model_->ReadHidden(*stream_, *workspace_, row, hidden.data() + row * width));
  return hidden;
}

absl::StatusOr<std::vector<float>> ModelHarness::Draft(const std::vector<DraftPart>& parts) {
  ForwardBatch batch;
  for (size_t i = 0; i < parts.size(); ++i) {
    const DraftPart& part = parts[i];
    batch.token_ids.push_back(part.id);
    batch.sequences.push_back(
        {.first_row = static_cast<int64_t>(i), .num_rows = 1, .start_position = part.at, .write_from = part.at, .pages = part.stream->pages.data()});
    batch.prior_hidden.push_back(part.hidden->data());
    batch.logit_rows.push_back(static_cast<int32_t>(i));
  }
  std::vector<float> logits(parts.size() * static_cast<size_t>(vocab()));
  RETURN_IF_ERROR(runner_->Draft(*stream_, *kv_, batch, logits.data()));
  for (size_t i = 0; i < parts.size(); ++i) {
    RETURN_IF_ERROR(runner_->ReadHidden(*stream_, static_cast<int64_t>(i), parts[i].hidden->data()));
  }
  return logits;
}

absl::StatusOr<std::vector<float>> ModelHarness::Feed(Form form, TestStream& stream, const std::vector<int32_t>& ids, int64_t chunk, bool all_logits,
                                                      const ForwardHooks* hooks) {
  std::vector<float> all;
  for (size_t begin = 0; begin < ids.size(); begin += static_cast<size_t>(chunk)) {
    const size_t end = std::min(ids.size(), begin + static_cast<size_t>(chunk));
    const std::vector<int32_t> part(ids.begin() + static_cast<int64_t>(begin), ids.begin() + static_cast<int64_t>(end));
    ASSIGN_OR_RETURN(std::vector<float> logits, Step(form, {{&stream, part}}, all_logits, hooks));
    if (all_logits) {
      all.insert(all.end(), logits.begin(), logits.end());
    } else {
      all = std::move(logits);
    }
  }
  return all;
}

int32_t Argmax(const float* logits, int64_t n) { return static_cast<int32_t>(std::max_element(logits, logits + n) - logits); }

std::vector<int32_t> Ids(int64_t n, uint32_t seed, int64_t vocab) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < n; ++i) {
    seed = seed * 1664525u + 1013904223u;
    ids.push_back(static_cast<int32_t>((seed >> 8) % static_cast<uint32_t>(vocab)));
  }
  return ids;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

std::vector<uint8_t> PageBytes(ModelHarness& harness) {
  const uint8_t* pages = harness.kv().pages();
  return std::vector<uint8_t>(pages, pages + harness.kv().geometry().num_pages * harness.kv().geometry().page_bytes());
}

}  // namespace hearth
