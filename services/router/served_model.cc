#include "services/router/served_model.h"

#include <algorithm>
#include <filesystem>

#include "absl/strings/str_format.h"
#include "common/base/logging.h"
#include "common/rpc/rpc.h"

namespace hearth::router {
namespace {

constexpr size_t kGenerationsMax = 64;
constexpr absl::Duration kRetry = absl::Seconds(5);  // somebody may be mending the files

// One spelling for one directory. A path that can't be followed stays as it is.
std::string Canonical(const std::string& path) {
  std::error_code error;
  const auto canonical = std::filesystem::canonical(path, error);
  return error ? path : canonical.string();
}

}  // namespace

ServedModel::ServedModel(EventLoop* loop, const StoreClient* store, NodeConfig config, ModelInfo first)
    : loop_(loop), store_(store), config_(std::move(config)), current_(std::make_shared<const ModelInfo>(std::move(first))) {
  wanted_.model_dir = config_.model_path;
}

ServedModel::~ServedModel() { *alive_ = false; }

void ServedModel::Refresh() {
  const StoreView view = store_->View();
  if (!view.generation) return;
  const std::string generation = ToBytes(*view.generation);
  if (generations_.empty() || generations_.back() != std::make_pair(generation, view.fingerprint)) {
    generations_.emplace_back(generation, view.fingerprint);
    if (generations_.size() > kGenerationsMax) generations_.pop_front();
  }
  Wanted wanted{view.model_dir.empty() ? config_.model_path : view.model_dir, view.fingerprint, view.kv_tokens};
  if (wanted == wanted_) return;
  const Wanted before = std::exchange(wanted_, wanted);
  const bool first = before.fingerprint.IsZero();
  const bool same_dir = Canonical(before.model_dir) == Canonical(wanted.model_dir);
  if (!first && before.fingerprint != wanted.fingerprint) {
    spdlog::info("the model is now {} ({}): reading its tokenizer", wanted.model_dir, wanted.fingerprint.ToHex().substr(0, 8));
    current_ = nullptr;
  } else if (first && !same_dir) {
    current_ = nullptr;  // what was read at start is of another directory than what the store has
  } else if (current_ != nullptr) {
    // The same weights: what was read is right for them. Another directory may yet have another tokenizer: that is read, and then used.
    current_ = current_->In(wanted.fingerprint, wanted.kv_tokens);
  }
  if (current_ == nullptr || !same_dir) {
    failure_ = absl::OkStatus();
    StartReading();
  }
  if (!first && before.fingerprint != wanted.fingerprint) {
    loop_->Post([this, alive = alive_] {
      if (*alive && on_replaced_) on_replaced_();
    });
  }
}

void ServedModel::StartReading() {
  retry_timer_.reset();
  if (std::exchange(reading_, true)) return;  // OnRead sees that another one is wanted
  loop_->Offload([this, wanted = wanted_, config = config_, loop = loop_, alive = alive_] {
    auto info = std::make_shared<absl::StatusOr<ModelInfo>>(ModelInfo::Load(config, wanted.model_dir));
    loop->Post([this, wanted, info, alive] {
      if (*alive) OnRead(wanted, std::move(*info));
    });
  });
}

void ServedModel::OnRead(const Wanted& read, absl::StatusOr<ModelInfo> info) {
  reading_ = false;
  if (read.model_dir != wanted_.model_dir || read.fingerprint != wanted_.fingerprint) return StartReading();  // it has changed again
  if (info.ok()) {
    current_ = info->In(wanted_.fingerprint, wanted_.kv_tokens);
    failure_ = absl::OkStatus();
    spdlog::info("serving '{}' from {}: a context of {} tokens", current_->name, wanted_.model_dir, current_->context_tokens);
  } else {
    // With the same weights under an older directory's tokenizer `current_` stays, and requests are served.
    failure_ = info.status();
    if (const auto permit = LogAllowed("model-read", 4)) {
      spdlog::error("the store serves {}, whose tokenizer this router can't use: {}; trying again", wanted_.model_dir,
                    std::string(failure_.message()));
    }
    retry_timer_ = loop_->After(kRetry, [this] { StartReading(); });
  }
  Answer();
}

absl::Status ServedModel::Readiness() const {
  if (current_ != nullptr) return absl::OkStatus();
  if (failure_.ok()) return absl::UnavailableError("the model was changed: its tokenizer is being read");
  return absl::UnavailableError(absl::StrCat("the model was changed, and the new one's files can't be used: ", failure_.message()));
}

void ServedModel::WhenRead(std::function<void(absl::StatusOr<InfoPtr>)> use) {
  if (!*alive_) return use(absl::UnavailableError("the node is stopping"));
  Refresh();
  if (current_ != nullptr) return use(current_);
  if (!failure_.ok()) return use(Readiness());
  if (static_cast<int64_t>(waiting_.size()) >= config_.max_queue) {
    return use(
        absl::ResourceExhaustedError(absl::StrFormat("%d requests are waiting already (router.max_queue): try again shortly", waiting_.size())));
  }
  waiting_.push_back(std::move(use));
}

void ServedModel::Answer() {
  for (const auto& use : std::exchange(waiting_, {})) {
    if (current_ != nullptr) {
      use(current_);
    } else {
      use(Readiness());
    }
  }
}

bool ServedModel::IsOf(const std::string& generation, const ModelInfo& info) {
  const auto find = [&] {
    return std::find_if(generations_.rbegin(), generations_.rend(), [&](const auto& known) { return known.first == generation; });
  };
  auto at = find();
  if (at == generations_.rend()) {
    Refresh();  // its worker may have heard of it a moment before us
    at = find();
  }
  return at != generations_.rend() && at->second == FingerprintOf(info);
}

void ServedModel::Stop() {
  *alive_ = false;
  retry_timer_.reset();
  for (const auto& use : std::exchange(waiting_, {})) use(absl::UnavailableError("the node is stopping"));
}

}  // namespace hearth::router
