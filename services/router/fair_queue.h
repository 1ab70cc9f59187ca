// A bounded-by-its-owner queue that is fair between API keys: FIFO within a key, round robin between keys.
// Room: services/router. Threads: the loop. What returns after losing a worker goes to the head, before all keys' turns.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <utility>

namespace hearth::router {

template <typename T>
class FairQueue {
 public:
  void PushBack(int32_t key, T item) { lanes_[key].push_back(std::move(item)); }
  void PushHead(T item) { head_.push_back(std::move(item)); }

  bool empty() const { return head_.empty() && lanes_.empty(); }

  // Whose turn it is, without taking it; the queue must not be empty.
  const T& Next() const { return head_.empty() ? TurnOf()->second.front() : head_.front(); }
  T Pop() {
    if (!head_.empty()) {
      T item = std::move(head_.front());
      head_.pop_front();
      return item;
    }
    const auto lane = lanes_.find(TurnOf()->first);
    T item = std::move(lane->second.front());
    lane->second.pop_front();
    last_key_ = lane->first;
    if (lane->second.empty()) lanes_.erase(lane);
    return item;
  }

  template <typename F>
  void ForEach(F look) const {
    for (const T& item : head_) look(item);
    for (const auto& [key, lane] : lanes_) {
      for (const T& item : lane) look(item);
    }
  }

  bool Remove(const T& item) {
    if (const auto at = std::find(head_.begin(), head_.end(), item); at != head_.end()) {
      head_.erase(at);
      return true;
    }
    for (auto lane = lanes_.begin(); lane != lanes_.end(); ++lane) {
      const auto at = std::find(lane->second.begin(), lane->second.end(), item);
      if (at == lane->second.end()) continue;
      lane->second.erase(at);
      if (lane->second.empty()) lanes_.erase(lane);
      return true;
    }
    return false;
  }

 private:
  // The first waiting key behind the one served last, around the ring.
  typename std::map<int32_t, std::deque<T>>::const_iterator TurnOf() const {
    const auto next = lanes_.upper_bound(last_key_);
    return next == lanes_.end() ? lanes_.begin() : next;
  }

  std::deque<T> head_;
  std::map<int32_t, std::deque<T>> lanes_;  // no lane is empty
  int32_t last_key_ = -1;
};

}  // namespace hearth::router
