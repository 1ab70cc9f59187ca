// Which model this node serves now: follows the weight store from generation to generation and has the tokenizer and template of each ready.
// Room: services/router. Threads: the loop; files are read on the pool.
//
// A request keeps the ModelInfo that it was parsed with; whether that is still the node's model is asked by fingerprint, when the request is
// submitted and again when a worker names the generation that computes it. So ids of one tokenizer never meet the weights of another.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "common/base/node_config.h"
#include "common/rpc/store_client.h"
#include "services/router/event_loop.h"
#include "services/router/model_info.h"

namespace hearth::router {

class ServedModel {
 public:
  using InfoPtr = std::shared_ptr<const ModelInfo>;

  // `first`: of config.model_path, read before there is a store, so that errors of the configuration come early.
  ServedModel(EventLoop* loop, const StoreClient* store, NodeConfig config, ModelInfo first);
  ~ServedModel();

  // Looks at the store and begins to read another model's files when it has one. Cheap; called wherever the answer matters.
  void Refresh();
  // Null while the files of the store's model are being read, or when they can't be.
  const InfoPtr& current() const { return current_; }
  // OK, or Unavailable with the reason.
  absl::Status Readiness() const;
  // Calls back at once, or when the files are read; Unavailable when they can't be, ResourceExhausted when too many wait already.
  void WhenRead(std::function<void(absl::StatusOr<InfoPtr>)> use);
  // A request may have been read before the store named its model: the same files under the name that it has now.
  InfoPtr Named(const InfoPtr& info) const { return IsUnnamedCurrent(*info) ? current_ : info; }
  // Whether `info` is of the model that the store has now.
  bool Serves(const ModelInfo& info) const { return FingerprintOf(info) == wanted_.fingerprint; }
  // Whether a worker of this generation computes that model. A generation that the store never named to us is none of ours.
  bool IsOf(const std::string& generation, const ModelInfo& info);
  // Called, on its own, after the store's model has become another one.
  void set_on_replaced(std::function<void()> callback) { on_replaced_ = std::move(callback); }
  // Those who wait are told that the node stops; nothing is read any more.
  void Stop();

 private:
  bool IsUnnamedCurrent(const ModelInfo& info) const {
    return info.fingerprint.IsZero() && current_ != nullptr && current_->tokenizer == info.tokenizer;
  }
  const Hash128& FingerprintOf(const ModelInfo& info) const { return IsUnnamedCurrent(info) ? current_->fingerprint : info.fingerprint; }
  struct Wanted {
    std::string model_dir;
    Hash128 fingerprint;
    int64_t kv_tokens = 0;
    bool operator==(const Wanted&) const = default;
  };
  void StartReading();
  void OnRead(const Wanted& read, absl::StatusOr<ModelInfo> info);
  void Answer();

  EventLoop* loop_;
  const StoreClient* store_;
  const NodeConfig config_;
  Wanted wanted_;
  InfoPtr current_;
  bool reading_ = false;
  absl::Status failure_;  // of the last try to read wanted_'s files
  std::shared_ptr<void> retry_timer_;
  std::vector<std::function<void(absl::StatusOr<InfoPtr>)>> waiting_;
  std::deque<std::pair<std::string, Hash128>> generations_;  // the last ones that the store named, and their models
  std::function<void()> on_replaced_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace hearth::router
