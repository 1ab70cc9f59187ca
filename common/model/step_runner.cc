#include "common/model/step_runner.h"

#include <algorithm>
#include <cstdlib>

#include "common/base/check.h"

namespace hearth {

// The attention stream and the expert engine: each lets the two micro-batches in by strict turns, so that neither overtakes the other while that one is
// still waking up; who has ended is not waited for.
class StepRunner::Places {
 public:
  enum Place { kAttention, kExperts };

  explicit Places(Device& device) : device_(device), changed_(device.MakeSignal()) {}

  // Before a step, while nobody is in.
  void Reset() {
    std::lock_guard lock(mutex_);
    turn_ = {0, 0};
    holder_ = {kNobody, kNobody};
    ended_ = {false, false};
  }
  void Enter(Place place, int who) {
    while (true) {
      const uint64_t seen = changed_->Current();
      {
        std::lock_guard lock(mutex_);
        const int other = 1 - who;
        if (holder_[place] == kNobody && (turn_[place] == who || ended_[static_cast<size_t>(other)])) {
          holder_[place] = who;
          turn_[place] = other;
          return;
        }
      }
      device_.HostWait(*changed_, seen, {});
    }
  }
  // Whatever `who` holds.
  void Leave(int who) {
    {
      std::lock_guard lock(mutex_);
      Free(who);
    }
    changed_->Notify();
  }
  void End(int who) {
    {
      std::lock_guard lock(mutex_);
      Free(who);
      ended_[static_cast<size_t>(who)] = true;
    }
    changed_->Notify();
  }

 private:
  static constexpr int kNobody = -1;
  void Free(int who) {
    for (int& holder : holder_) {
      if (holder == who) holder = kNobody;
    }
  }

  Device& device_;
  std::unique_ptr<HostSignal> changed_;
  std::mutex mutex_;  // guards all below
  std::array<int, 2> turn_{}, holder_{};
  std::array<bool, 2> ended_{};
};

absl::StatusOr<std::unique_ptr<StepRunner>> StepRunner::Make(Device& device, const Model& model, const Options& options) {
  auto runner = std::unique_ptr<StepRunner>(new StepRunner(device, model, options));
  ASSIGN_OR_RETURN(runner->parts_[0].workspace, model.MakeWorkspace(options.max_rows, options.max_logit_rows));
  if (options.order != StepOrder::kJoint) {
    ASSIGN_OR_RETURN(runner->parts_[1].workspace, model.MakeWorkspace(options.max_rows, options.max_logit_rows));
  }
  return runner;
}

StepRunner::StepRunner(Device& device, const Model& model, const Options& options)
    : device_(device),
      model_(model),
      chooser_(options.order),
      places_(std::make_unique<Places>(device)),
      second_stream_(device.MakeStream("second micro-batch")),
      asked_(device.MakeSignal()),
      done_(device.MakeSignal()) {}

StepRunner::~StepRunner() {
  stop_.Stop();
  asked_->Notify();
}

std::vector<absl::Status> StepRunner::Run(Stream& stream, const KvPool& kv, const ForwardBatch& batch, float* logits, const ForwardHooks* hooks) {
  const int64_t rows = static_cast<int64_t>(batch.token_ids.size());
  const int64_t streams = static_cast<int64_t>(batch.sequences.size());
  const bool can_be_cut = streams >= 2;
  const StepOrder order = can_be_cut ? chooser_.Next(streams, rows) : StepOrder::kJoint;
  const int64_t begin_ns = device_.Now();
  cut_row_ = 0;
  std::vector<absl::Status> statuses(batch.sequences.size());
  if (order == StepOrder::kJoint) {
    std::fill(statuses.begin(), statuses.end(), model_.Forward(stream, *parts_[0].workspace, kv, batch, logits, hooks));
  } else {
    Cut(batch, logits);
    if (order == StepOrder::kPlain) {
      for (Part& part : parts_) RunPart(part, stream, kv, hooks);
    } else {
      RunAlternating(stream, kv, hooks);
    }
    const size_t first = parts_[0].batch.sequences.size();
    for (size_t i = 0; i < statuses.size(); ++i) statuses[i] = parts_[i < first ? 0 : 1].status;
    // An error kills a stream; the next step is to find one that lives.
    if (!parts_[1].status.ok()) second_stream_ = device_.MakeStream("second micro-batch");
  }
  if (can_be_cut && std::all_of(statuses.begin(), statuses.end(), [](const absl::Status& s) { return s.ok(); })) {
    chooser_.Add(streams, rows, order, device_.Now() - begin_ns);
  }
  return statuses;
}

absl::Status StepRunner::Draft(Stream& stream, const KvPool& kv, const ForwardBatch& batch, float* logits) {
  cut_row_ = 0;
  return model_.Draft(stream, *parts_[0].workspace, kv, batch, logits);
}

absl::Status StepRunner::ReadHidden(Stream& stream, int64_t row, float* out) const {
  const bool in_second = cut_row_ > 0 && row >= cut_row_;
  return model_.ReadHidden(stream, *parts_[in_second ? 1 : 0].workspace, in_second ? row - cut_row_ : row, out);
}

void StepRunner::Cut(const ForwardBatch& batch, float* logits) {
  HEARTH_CHECK(std::is_sorted(batch.logit_rows.begin(), batch.logit_rows.end()));
  const int64_t rows = static_cast<int64_t>(batch.token_ids.size());
  size_t cut = 1;  // sequences of the first part: where both have as nearly as can be the same rows
  const auto unevenness = [&](size_t at) { return std::abs(2 * batch.sequences[at].first_row - rows); };
  for (size_t at = 2; at < batch.sequences.size(); ++at) {
    if (unevenness(at) < unevenness(cut)) cut = at;
  }
  const int64_t row = cut_row_ = batch.sequences[cut].first_row;
  const auto logit_cut = std::lower_bound(batch.logit_rows.begin(), batch.logit_rows.end(), static_cast<int32_t>(row));
  for (ForwardBatch* part : {&parts_[0].batch, &parts_[1].batch}) part->form = batch.form;
  ForwardBatch& first = parts_[0].batch;
  first.token_ids.assign(batch.token_ids.begin(), batch.token_ids.begin() + row);
  first.sequences.assign(batch.sequences.begin(), batch.sequences.begin() + static_cast<int64_t>(cut));
  first.logit_rows.assign(batch.logit_rows.begin(), logit_cut);
  first.prior_hidden = batch.prior_hidden;
  first.prior_hidden.resize(cut);
  ForwardBatch& second = parts_[1].batch;
  second.token_ids.assign(batch.token_ids.begin() + row, batch.token_ids.end());
  second.sequences.assign(batch.sequences.begin() + static_cast<int64_t>(cut), batch.sequences.end());
  for (KvSequence& sequence : second.sequences) sequence.first_row -= row;
  second.logit_rows.assign(logit_cut, batch.logit_rows.end());
  for (int32_t& logit_row : second.logit_rows) logit_row -= static_cast<int32_t>(row);
  second.prior_hidden.assign(batch.prior_hidden.begin() + static_cast<int64_t>(std::min(cut, batch.prior_hidden.size())), batch.prior_hidden.end());
  parts_[0].logits = logits;
  parts_[1].logits = logits == nullptr ? nullptr : logits + static_cast<int64_t>(first.logit_rows.size()) * model_.config().vocab_size;
}

void StepRunner::RunPart(Part& part, Stream& stream, const KvPool& kv, const ForwardHooks* hooks) {
  part.status = model_.Forward(stream, *part.workspace, kv, part.batch, part.logits, hooks);
}

void StepRunner::RunAlternating(Stream& stream, const KvPool& kv, const ForwardHooks* hooks) {
  if (second_ == nullptr) second_ = device_.Spawn("micro-batch", [this] { SecondActor(); });
  places_->Reset();
  const uint64_t before = done_->Current();
  {
    std::lock_guard lock(mutex_);
    job_ = Job{&kv, hooks};
  }
  asked_->Notify();
  RunInTurns(0, stream, kv, hooks);
  // No limit: the second part's pass ends as surely as the first's did, and its memory is ours.
  while (done_->Current() == before) device_.HostWait(*done_, before, {});
}

void StepRunner::RunInTurns(int who, Stream& stream, const KvPool& kv, const ForwardHooks* hooks) {
  ForwardHooks turns = hooks == nullptr ? ForwardHooks{} : *hooks;
  turns.before_experts = [&](int64_t) {
    places_->Leave(who);
    places_->Enter(Places::kExperts, who);
  };
  turns.after_experts = [&](int64_t) {
    places_->Leave(who);
    places_->Enter(Places::kAttention, who);
  };
  places_->Enter(Places::kAttention, who);
  RunPart(parts_[static_cast<size_t>(who)], stream, kv, &turns);
  places_->End(who);
}

void StepRunner::SecondActor() {
  while (!stop_.stopped()) {
    const uint64_t seen = asked_->Current();
    std::optional<Job> job;
    {
      std::lock_guard lock(mutex_);
      job.swap(job_);
    }
    if (!job.has_value()) {
      device_.HostWait(*asked_, seen, {.stop = &stop_});
      continue;
    }
    RunInTurns(1, *second_stream_, *job->kv, job->hooks);
    done_->Notify();
  }
}

}  // namespace hearth
