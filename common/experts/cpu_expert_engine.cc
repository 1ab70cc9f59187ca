#include "common/experts/cpu_expert_engine.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "common/base/ceil_div.h"
#include "common/device/host/blocking.h"
#include "common/device/host/scratch.h"
#include "common/device/host/task_board.h"
#include "common/device/host/terms.h"
#include "common/experts/expert_groups.h"
#include "common/experts/expert_quarters.h"
#include "common/experts/expert_source.h"

namespace hearth {
namespace {

constexpr int64_t kRowsMax = 512;
constexpr int64_t kSumStep = 1024;

// Rows of a task, so that `total_rows` over all experts make several tasks a thread.
int64_t RowStep(int64_t total_rows, int64_t rows, int threads) {
  const int64_t even = CeilDiv(total_rows, 4 * std::max(1, threads));
  return std::min(CeilDiv(std::clamp<int64_t>(even, kRowAlign, kRowsMax), kRowAlign) * kRowAlign, std::max(rows, kRowAlign));
}

class CpuExpertEngine : public ExpertEngine {
 public:
  CpuExpertEngine(HostDevice& device, int64_t workspace_bytes)
      : device_(device),
        workspace_most_(workspace_bytes),
        pool_(device.pool()),
        kernels_(device.kernels()),
        worker_scratch_(static_cast<size_t>(pool_.num_threads())),
        sum_board_(std::make_unique<TaskBoard>()) {}

  absl::Status Run(const ExpertsArgs& args) override {
    std::lock_guard<std::mutex> turn(mutex_);
    if (args.source->num_shards() != args.num_shards) {
      return absl::InvalidArgumentError("the expert source has another number of shards than the op");
    }
    // Three quarters of the workspace are for inputs and activations, one is for outputs (SliceColumns). Even parts: each reads its experts' weights anew.
    const int64_t token_bytes = args.top_k * args.terms * (args.hidden + args.intermediate) * static_cast<int64_t>(sizeof(bf16));
    const int64_t walks = CeilDiv(args.m, std::max<int64_t>(1, workspace_most_ / 4 * 3 / token_bytes));
    for (int64_t walk = 0; walk < walks; ++walk) {
      const int64_t begin = walk * args.m / walks;
      ExpertsArgs part = args;
      part.m = (walk + 1) * args.m / walks - begin;
      part.x += begin * args.terms * args.hidden;
      part.ids += begin * args.top_k;
      part.weights += begin * args.top_k;
      part.out += begin * args.hidden;
      RETURN_IF_ERROR(RunTokens(part));
    }
    return absl::OkStatus();
  }

  absl::Status RunRows(const ExpertRowsArgs& args) override {
    std::lock_guard<std::mutex> turn(mutex_);
    int64_t rows_max = args.n;
    while (rows_max > 0 && ExpertRowsWorkspaceBytes(rows_max, args.hidden, args.intermediate, args.num_shards, args.terms) > args.workspace_bytes) {
      rows_max /= 2;
    }
    if (rows_max == 0 && args.n > 0) return absl::InvalidArgumentError("the workspace given to ExpertRows holds no row");
    for (int64_t begin = 0; begin < args.n; begin += rows_max) RunPart(args, begin, std::min(rows_max, args.n - begin));
    return absl::OkStatus();
  }

 private:
  // A chosen expert and its tokens: pairs [first_pair, first_pair + count).
  struct Chosen {
    int64_t expert = 0;
    int64_t first_pair = 0;
    int64_t count = 0;
    const bf16* x = nullptr;  // [count, terms, hidden]
  };

  struct Shard {
    std::unique_ptr<TaskBoard> board = std::make_unique<TaskBoard>();
    std::vector<ExpertView> views;                         // by chosen expert
    std::unique_ptr<std::atomic<int32_t>[]> gate_up_left;  // by chosen expert
    size_t capacity = 0;
    int64_t rows = 0;  // this shard's part of the intermediate size
    int64_t gate_up_step = 0, gate_up_blocks = 0;
    int64_t down_step = 0, down_blocks = 0;  // of a slice
    bf16* activations = nullptr;             // [pairs, terms, rows]
    float* down = nullptr;                   // [pairs, slice_]
  };

  absl::Status RunTokens(const ExpertsArgs& args);
  void RunPart(const ExpertRowsArgs& rows, int64_t begin, int64_t count);
  void ChooseExperts(const ExpertsArgs& args);
  absl::Status TakeWorkspace(const ExpertsArgs& args);
  uint64_t LayOut(const ExpertsArgs& args, void* base);
  void Compute(const ExpertsArgs& args);
  int64_t SliceColumns(const ExpertsArgs& args) const;
  void GatherInputs(const ExpertsArgs& args);
  void MakeTasks(const ExpertsArgs& args);
  void Work(const ExpertsArgs& args, int worker, bool alone);
  void RunTask(const ExpertsArgs& args, Shard& shard, int64_t task, int worker);
  void GateUp(const ExpertsArgs& args, Shard& shard, int64_t index, int64_t block, int worker);
  void Down(const ExpertsArgs& args, Shard& shard, int64_t index, int64_t block, int worker);
  void Sum(const ExpertsArgs& args, int64_t task, int worker);
  const float* SumShards(int64_t pair, int64_t begin, int64_t n, float* sum);

  // y [count, rows of w]
  void Multiply(Form form, WeightView w, const bf16* x, int64_t ldx, int64_t count, int terms, float* y, int64_t ldy, float* scratch) {
    w.fetch_ahead = device_.fetch_ahead();
    const int64_t at_once = TokensAtOnce(form, count, terms);
    for (int64_t m = 0; m < count; m += at_once) {
      LinearTerms(kernels_, form, w, x + m * terms * ldx, ldx, std::min(at_once, count - m), terms, y + m * ldy, ldy, 0, w.rows, scratch);
    }
  }

  std::mutex mutex_;  // a Run at a time: all below is of the running one
  HostDevice& device_;
  const int64_t workspace_most_;
  ThreadPool& pool_;
  const KernelTable& kernels_;
  std::vector<Scratch> worker_scratch_;

  ExpertGroups groups_;           // RunRows uses its rows alone
  std::vector<Chosen> chosen_;    // ascending by id
  std::vector<int64_t> fetched_;  // their ids
  std::vector<Shard> shards_;
  std::unique_ptr<TaskBoard> sum_board_;
  std::atomic<int32_t> down_left_{0};  // over all shards; the task that takes it to zero releases the sums
  // Outputs are made and summed for some columns of hidden at a time: [slice_begin_, slice_begin_ + slice_count_), slice_ or less.
  int64_t slice_ = 0, slice_begin_ = 0, slice_count_ = 0;
  int64_t sum_tasks_ = 0;
  bool adds_rows_ = false;  // RunRows: pair i is row groups_.rows[i] of the sum, which is added to
  Buffer workspace_;
  bf16* gathered_ = nullptr;  // [pairs, terms, hidden]
};

absl::Status CpuExpertEngine::RunTokens(const ExpertsArgs& args) {
  ChooseExperts(args);
  fetched_.clear();
  for (const Chosen& chosen : chosen_) fetched_.push_back(chosen.expert);
  args.source->Fetch(args.layer, fetched_);
  shards_.resize(static_cast<size_t>(args.num_shards));
  for (int64_t s = 0; s < args.num_shards; ++s) {
    Shard& shard = shards_[static_cast<size_t>(s)];
    shard.views.clear();
    for (const Chosen& chosen : chosen_) shard.views.push_back(args.source->Acquire(args.layer, chosen.expert, s));
    shard.rows = shard.views.front().count;
  }
  const absl::Status status = TakeWorkspace(args);
  if (status.ok()) Compute(args);
  for (int64_t s = 0; s < args.num_shards; ++s) {
    for (const Chosen& chosen : chosen_) args.source->Release(args.layer, chosen.expert, s);
  }
  return status;
}

// One expert's rows are a batch of one choice a token, but for where its tokens come from and go to.
void CpuExpertEngine::RunPart(const ExpertRowsArgs& rows, int64_t begin, int64_t count) {
  const ExpertsArgs args{.form = rows.form,
                         .num_experts = 1,
                         .top_k = 1,
                         .hidden = rows.hidden,
                         .intermediate = rows.intermediate,
                         .num_shards = rows.num_shards,
                         .weight_dtypes = rows.weight_dtypes,
                         .terms = rows.terms,
                         .x = rows.x,
                         .weights = rows.weights + begin,
                         .m = count,
                         .out = rows.sum};
  chosen_.assign(1, {.expert = 0, .first_pair = 0, .count = count});
  groups_.rows.assign(rows.rows + begin, rows.rows + begin + count);
  shards_.resize(static_cast<size_t>(rows.num_shards));
  for (size_t s = 0; s < shards_.size(); ++s) {
    shards_[s].views.assign(1, rows.shards[s]);
    shards_[s].rows = rows.shards[s].count;
  }
  slice_ = rows.hidden;
  LayOut(args, rows.workspace);
  adds_rows_ = true;
  Compute(args);
  adds_rows_ = false;
}

void CpuExpertEngine::Compute(const ExpertsArgs& args) {
  GatherInputs(args);
  const int64_t work = args.m * args.top_k * 3 * args.hidden * args.intermediate;
  const bool alone = work < device_.parallel_work_min() || pool_.num_threads() == 1;
  for (slice_begin_ = 0; slice_begin_ < args.hidden; slice_begin_ += slice_) {
    slice_count_ = std::min(slice_, args.hidden - slice_begin_);
    MakeTasks(args);
    pool_.Run(!alone, [&](int worker) { Work(args, worker, alone); });
  }
}

// Columns of hidden whose outputs fit a quarter of the workspace, in even slices.
int64_t CpuExpertEngine::SliceColumns(const ExpertsArgs& args) const {
  const int64_t column_bytes = args.m * args.top_k * args.num_shards * static_cast<int64_t>(sizeof(float));
  const int64_t most = std::max(kRowAlign, workspace_most_ / 4 / column_bytes);
  return std::min(args.hidden, CeilDiv(CeilDiv(args.hidden, CeilDiv(args.hidden, most)), kRowAlign) * kRowAlign);
}

// Tokens that share an expert become neighbours, in the order of the batch.
void CpuExpertEngine::ChooseExperts(const ExpertsArgs& args) {
  GroupByExpert(args.ids, args.m, args.top_k, args.num_experts, groups_);
  chosen_.clear();
  for (int64_t e = 0; e < args.num_experts; ++e) {
    if (groups_.count(e) > 0) chosen_.push_back({.expert = e, .first_pair = groups_.begin[static_cast<size_t>(e)], .count = groups_.count(e)});
  }
}

absl::Status CpuExpertEngine::TakeWorkspace(const ExpertsArgs& args) {
  slice_ = SliceColumns(args);
  const uint64_t bytes = LayOut(args, nullptr);
  if (bytes > workspace_.bytes()) {
    workspace_ = Buffer();
    ASSIGN_OR_RETURN(workspace_, device_.Allocate(bytes));
  }
  LayOut(args, workspace_.data());
  return absl::OkStatus();
}

// Gives each part its place from `base` on; the bytes that they take together.
uint64_t CpuExpertEngine::LayOut(const ExpertsArgs& args, void* base) {
  const int64_t pairs = args.m * args.top_k;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(base);
  uintptr_t next = begin;
  auto take = [&](int64_t bytes) { return std::exchange(next, next + static_cast<uintptr_t>((bytes + 63) / 64 * 64)); };
  gathered_ = reinterpret_cast<bf16*>(take(pairs * args.terms * args.hidden * 2));
  for (Shard& shard : shards_) {
    shard.activations = reinterpret_cast<bf16*>(take(pairs * args.terms * shard.rows * 2));
    shard.down = reinterpret_cast<float*>(take(pairs * slice_ * 4));
  }
  return next - begin;
}

// An expert's tokens must lie row by row. Where they do so in the batch already (one token; all tokens) nothing is copied.
void CpuExpertEngine::GatherInputs(const ExpertsArgs& args) {
  const int64_t width = args.terms * args.hidden;
  int64_t copied = 0;
  for (Chosen& chosen : chosen_) {
    const int64_t first = groups_.rows[static_cast<size_t>(chosen.first_pair)];
    const int64_t last = groups_.rows[static_cast<size_t>(chosen.first_pair + chosen.count - 1)];
    const bool neighbours = last - first + 1 == chosen.count;
    chosen.x = neighbours ? args.x + first * width : gathered_ + chosen.first_pair * width;
    if (!neighbours) copied += chosen.count;
  }
  if (copied == 0) return;
  pool_.ParallelFor(copied * width >= device_.parallel_work_min(), static_cast<int64_t>(chosen_.size()), [&](int64_t index, int) {
    const Chosen& chosen = chosen_[static_cast<size_t>(index)];
    bf16* to = gathered_ + chosen.first_pair * width;
    if (chosen.x != to) return;
    for (int64_t i = 0; i < chosen.count; ++i) {
      const bf16* from = args.x + groups_.rows[static_cast<size_t>(chosen.first_pair + i)] * width;
      std::memcpy(to + i * width, from, static_cast<size_t>(width) * sizeof(bf16));
    }
  });
}

// Of a slice; the first one's need gate and up before them.
void CpuExpertEngine::MakeTasks(const ExpertsArgs& args) {
  const bool first = slice_begin_ == 0;
  const int64_t experts = static_cast<int64_t>(chosen_.size());
  const int threads = std::max(1, pool_.num_threads() / static_cast<int>(std::min<int64_t>(pool_.num_pools(), args.num_shards)));
  int32_t down_tasks = 0;
  for (Shard& shard : shards_) {
    if (shard.rows == 0) {
      shard.board->Reset(0);
      continue;
    }
    shard.gate_up_step = RowStep(experts * shard.rows, shard.rows, threads);
    shard.gate_up_blocks = first ? CeilDiv(shard.rows, shard.gate_up_step) : 0;
    shard.down_step = RowStep(experts * slice_count_, slice_count_, threads);
    shard.down_blocks = CeilDiv(slice_count_, shard.down_step);
    if (shard.capacity < static_cast<size_t>(experts)) {
      shard.capacity = static_cast<size_t>(args.num_experts);
      shard.gate_up_left = std::make_unique<std::atomic<int32_t>[]>(shard.capacity);
    }
    for (int64_t i = 0; i < experts; ++i) shard.gate_up_left[i].store(static_cast<int32_t>(shard.gate_up_blocks), std::memory_order_relaxed);
    shard.board->Reset(experts * (shard.gate_up_blocks + shard.down_blocks));
    shard.board->Publish(0, static_cast<int32_t>(experts * (first ? shard.gate_up_blocks : shard.down_blocks)));
    down_tasks += static_cast<int32_t>(experts * shard.down_blocks);
  }
  sum_tasks_ = args.m * CeilDiv(slice_count_, kSumStep);
  sum_board_->Reset(sum_tasks_);
  down_left_.store(down_tasks, std::memory_order_relaxed);
}

// A thread serves the shards of its own pool, which lie on its own node, and no others: what it read across nodes would take the bandwidth that the
// other node's threads use up already. Then it sums. The caller does not leave before all shards are through: until then the other pools' threads may
// still be on their way.
void CpuExpertEngine::Work(const ExpertsArgs& args, int worker, bool alone) {
  const int64_t spin_ns = pool_.spin_ns();
  // Fewer pools than shards share them out; more share them.
  const int num_shards = static_cast<int>(shards_.size());
  const int turns = std::min(pool_.num_pools(), num_shards);
  for (int s = 0; s < num_shards; ++s) {
    if (!alone && s % turns != pool_.pool_of(worker) % turns) continue;
    Shard& shard = shards_[static_cast<size_t>(s)];
    for (int32_t task = shard.board->Claim(spin_ns); task >= 0; task = shard.board->Claim(spin_ns)) RunTask(args, shard, task, worker);
  }
  if (worker == 0) {
    int32_t left = down_left_.load(std::memory_order_acquire);
    for (Spin spin(spin_ns); left > 0; left = down_left_.load(std::memory_order_acquire)) {
      if (!spin.Again()) down_left_.wait(left, std::memory_order_acquire);
    }
  }
  for (int32_t task = sum_board_->Claim(spin_ns); task >= 0; task = sum_board_->Claim(spin_ns)) Sum(args, task, worker);
}

void CpuExpertEngine::RunTask(const ExpertsArgs& args, Shard& shard, int64_t task, int worker) {
  const int64_t gate_up_tasks = static_cast<int64_t>(chosen_.size()) * shard.gate_up_blocks;
  if (task < gate_up_tasks) {
    const int64_t index = task / shard.gate_up_blocks;
    GateUp(args, shard, index, task % shard.gate_up_blocks, worker);
    if (shard.gate_up_left[index].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      shard.board->Publish(static_cast<int32_t>(gate_up_tasks + index * shard.down_blocks), static_cast<int32_t>(shard.down_blocks));
    }
    return;
  }
  const int64_t down_task = task - gate_up_tasks;
  Down(args, shard, down_task / shard.down_blocks, down_task % shard.down_blocks, worker);
  // Sequentially consistent, as notify wants it (task_board.h).
  if (down_left_.fetch_sub(1, std::memory_order_seq_cst) == 1) {
    down_left_.notify_all();
    sum_board_->Publish(0, static_cast<int32_t>(sum_tasks_));
  }
}

void CpuExpertEngine::GateUp(const ExpertsArgs& args, Shard& shard, int64_t index, int64_t block, int worker) {
  const Chosen& chosen = chosen_[static_cast<size_t>(index)];
  const ExpertView& view = shard.views[static_cast<size_t>(index)];
  const int64_t row = block * shard.gate_up_step;
  const int64_t rows = std::min(shard.gate_up_step, shard.rows - row);
  // Gate and up of some tokens stay in cache until they are one.
  const int64_t at_once = TokensAtOnce(args.form, chosen.count, args.terms);
  const int64_t term_floats = LinearTermsScratch(args.form, at_once, rows, args.terms);
  Scratch& scratch = worker_scratch_[static_cast<size_t>(worker)];
  scratch.Reserve(2 * Scratch::Bytes<float>(at_once * rows) + Scratch::Bytes<float>(term_floats));
  float* gate = scratch.Take<float>(at_once * rows);
  float* up = scratch.Take<float>(at_once * rows);
  float* terms = scratch.Take<float>(term_floats);
  for (int64_t begin = 0; begin < chosen.count; begin += at_once) {
    const int64_t count = std::min(at_once, chosen.count - begin);
    const bf16* x = chosen.x + begin * args.terms * args.hidden;
    Multiply(args.form, view.gate.Rows(row, rows), x, args.hidden, count, args.terms, gate, rows, terms);
    Multiply(args.form, view.up.Rows(row, rows), x, args.hidden, count, args.terms, up, rows, terms);
    bf16* activations = shard.activations + (chosen.first_pair + begin) * args.terms * shard.rows + row;
    for (int64_t i = 0; i < count; ++i) {
      SiluMulTerms(kernels_, gate + i * rows, up + i * rows, rows, args.terms, activations + i * args.terms * shard.rows, shard.rows);
    }
  }
}

void CpuExpertEngine::Down(const ExpertsArgs& args, Shard& shard, int64_t index, int64_t block, int worker) {
  const Chosen& chosen = chosen_[static_cast<size_t>(index)];
  const int64_t row = block * shard.down_step;
  const int64_t rows = std::min(shard.down_step, slice_count_ - row);
  const int64_t term_floats = LinearTermsScratch(args.form, TokensAtOnce(args.form, chosen.count, args.terms), rows, args.terms);
  Scratch& scratch = worker_scratch_[static_cast<size_t>(worker)];
  scratch.Reserve(Scratch::Bytes<float>(term_floats));
  Multiply(args.form, shard.views[static_cast<size_t>(index)].down.Rows(slice_begin_ + row, rows),
           shard.activations + chosen.first_pair * args.terms * shard.rows, shard.rows, chosen.count, args.terms,
           shard.down + chosen.first_pair * slice_ + row, slice_, scratch.Take<float>(term_floats));
}

void CpuExpertEngine::Sum(const ExpertsArgs& args, int64_t task, int worker) {
  const int64_t steps = CeilDiv(slice_count_, kSumStep);
  const int64_t token = task / steps;
  const int64_t begin = task % steps * kSumStep;  // in the slice
  const int64_t n = std::min(kSumStep, slice_count_ - begin);
  const int64_t row = adds_rows_ ? groups_.rows[static_cast<size_t>(token)] : token;
  float* out = args.out + row * args.hidden + slice_begin_ + begin;

  Scratch& scratch = worker_scratch_[static_cast<size_t>(worker)];
  scratch.Reserve((kExpertQuarters + 1) * Scratch::Bytes<float>(kSumStep));
  float* quarters[kExpertQuarters];
  for (float*& quarter : quarters) quarter = scratch.Take<float>(kSumStep);
  float* expert_sum = scratch.Take<float>(kSumStep);

  if (adds_rows_) {
    kernels_.axpy(args.weights[token], SumShards(token, begin, n, expert_sum), out, n);
    return;
  }
  auto clear_quarters = [&] {
    for (float* quarter : quarters) std::fill_n(quarter, n, 0.0f);
  };
  auto quarter_of = [&](int64_t id) {
    int64_t quarter = 0;
    while (id >= ExpertQuarterBegin(quarter + 1, args.num_experts)) ++quarter;
    return quarters[quarter];
  };
  auto joined = [&](int64_t i) { return (quarters[0][i] + quarters[1][i]) + (quarters[2][i] + quarters[3][i]); };
  auto pair = [&](int64_t j) { return groups_.pair_of[static_cast<size_t>(token * args.top_k + j)]; };
  const int32_t* ids = args.ids + token * args.top_k;
  const float* weights = args.weights + token * args.top_k;

  if (args.form == Form::kPrefill) {
    clear_quarters();
    for (int64_t j = 0; j < args.top_k; ++j) {
      kernels_.axpy(weights[j], SumShards(pair(j), begin, n, expert_sum), quarter_of(ids[j]), n);
    }
    for (int64_t i = 0; i < n; ++i) out[i] = joined(i);
    return;
  }
  std::fill_n(out, n, 0.0f);
  for (const Shard& shard : shards_) {
    if (shard.rows == 0) continue;
    clear_quarters();
    for (int64_t j = 0; j < args.top_k; ++j) kernels_.axpy(weights[j], shard.down + pair(j) * slice_ + begin, quarter_of(ids[j]), n);
    for (int64_t i = 0; i < n; ++i) out[i] += joined(i);
  }
}

// An expert's down output of the prefill form, [begin, begin + n) of the slice: its shards ascending, from zero, in `sum`; one shard's lies there already.
const float* CpuExpertEngine::SumShards(int64_t pair, int64_t begin, int64_t n, float* sum) {
  if (shards_.size() == 1) return shards_[0].down + pair * slice_ + begin;
  std::fill_n(sum, n, 0.0f);
  for (const Shard& shard : shards_) {
    if (shard.rows > 0) kernels_.axpy(1.0f, shard.down + pair * slice_ + begin, sum, n);
  }
  return sum;
}

}  // namespace

std::unique_ptr<ExpertEngine> MakeCpuExpertEngine(HostDevice& device, int64_t workspace_bytes) {
  return std::make_unique<CpuExpertEngine>(device, workspace_bytes);
}

absl::StatusOr<std::unique_ptr<HostDevice>> MakeHostDevice(const HostDeviceOptions& options) {
  ASSIGN_OR_RETURN(std::unique_ptr<HostDevice> device, HostDevice::Create(options));
  device->SetExpertEngine(MakeCpuExpertEngine(*device));
  return device;
}

}  // namespace hearth
