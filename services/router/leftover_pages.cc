#include "services/router/leftover_pages.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/base/time.h"

namespace hearth::router {
namespace {

// Longer than most steps. Who is slower is asked about too early, which costs a call: the store frees nothing that a living worker holds.
constexpr int64_t kWorkerFreesWithinNs = 2'000'000'000;
// Then the store's own grace has freed them, whatever was in the way.
constexpr int64_t kGiveUpNs = 120'000'000'000;
constexpr absl::Duration kBetweenTries = absl::Seconds(1);

}  // namespace

void LeftoverPages::LeftTo(const WorkerLink& link, const Hash128& stream) {
  left_.push_back({stream, &link, link.status().pid(), MonotonicNowNs()});
  SetTimer();
}

void LeftoverPages::Free(const Hash128& stream) {
  due_.push_back({stream, MonotonicNowNs()});
  FreeDue();
}

void LeftoverPages::Look() {
  const int64_t now_ns = MonotonicNowNs();
  // While the store is away no worker can free anything.
  if (!store_->View().attached) attached_since_ns_ = now_ns;
  std::erase_if(left_, [&](const Left& each) {
    const bool lost = !each.link->answering() || each.link->status().pid() != each.pid;
    if (!lost && now_ns - std::max(each.since_ns, attached_since_ns_) <= kWorkerFreesWithinNs) return false;
    // A worker that lives may have offered the pages to the next one just before it heard of the end: then they are nobody's.
    due_.push_back({each.stream, now_ns});
    return true;
  });
  FreeDue();
}

void LeftoverPages::FreeDue() {
  SetTimer();
  if (asking_ || due_.empty()) return;
  asking_ = true;
  loop_->Offload([this, due = std::exchange(due_, {}), loop = loop_, store = store_, alive = alive_]() mutable {
    std::erase_if(due, [&](const Due& each) {
      if (MonotonicNowNs() - each.since_ns > kGiveUpNs) return true;
      // A store that is away would hold up the pool for a second each time. One that is there refuses while it takes the last holder for living.
      if (!store->View().attached) return false;
      const absl::Status freed = store->Free(each.stream, 0);
      return freed.ok() || absl::IsNotFound(freed);
    });
    loop->Post([this, due = std::move(due), alive] {
      if (!*alive) return;
      asking_ = false;
      due_.insert(due_.end(), due.begin(), due.end());
      SetTimer();
    });
  });
}

void LeftoverPages::SetTimer() {
  if (left_.empty() && due_.empty()) {
    timer_ = nullptr;
  } else if (timer_ == nullptr) {
    timer_ = loop_->After(kBetweenTries, [this] {
      timer_ = nullptr;
      Look();
    });
  }
}

}  // namespace hearth::router
