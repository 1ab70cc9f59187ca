#include "common/device/host/host_ops.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/base/ceil_div.h"
#include "common/base/check.h"
#include "common/device/host/blocking.h"
#include "common/device/host/kv_rows.h"
#include "common/device/host/row_list.h"
#include "common/device/host/row_to_float.h"
#include "common/device/host/terms.h"
#include "common/kernels/portable_exp.h"

namespace hearth {
namespace {

HostStream& AsHost(Stream& stream) { return static_cast<HostStream&>(stream); }

}  // namespace

HostOps::HostOps(ThreadPool& pool, const KernelTable& kernels, int64_t parallel_work_min, int64_t link_bytes_per_s)
    : pool_(pool),
      kernels_(kernels),
      parallel_work_min_(parallel_work_min),
      worker_scratch_(static_cast<size_t>(pool.num_threads())),
      link_(link_bytes_per_s) {}

void HostOps::Embed(Stream& stream, const EmbedArgs& a) {
  if (!AsHost(stream).alive()) return;
  pool_.ParallelFor(Parallel(a.m * a.table.cols), a.m, [&](int64_t m, int) { RowToFloat(a.table, a.token_ids[m], a.out + m * a.table.cols); });
}

void HostOps::RmsNorm(Stream& stream, const RmsNormArgs& a) {
  if (!AsHost(stream).alive()) return;
  const int64_t ldo = a.ldo == 0 ? a.n : a.ldo;
  pool_.ParallelFor(Parallel(a.m * a.n), a.m, [&](int64_t m, int) {
    if (a.f32 != nullptr) {
      NormF32(a.x + m * a.ldx, a.weight, a.eps, a.n, a.f32 + m * a.n);
    } else {
      NormTerms(kernels_, a.x + m * a.ldx, a.weight, a.eps, a.n, a.terms, a.out + m * a.terms * ldo, ldo);
    }
  });
}

void HostOps::Linear(Stream& stream, const LinearArgs& a) {
  if (!AsHost(stream).alive()) return;
  Product(a);
}

void HostOps::Product(const LinearArgs& a) {
  const int64_t rows = a.w.rows;
  const int64_t at_once = TokensAtOnce(a.form, a.m, a.terms);
  const int64_t token_blocks = CeilDiv(a.m, at_once);
  if (rows == 0 || token_blocks == 0) return;
  const bool parallel = Parallel(a.m * rows * a.w.cols) && pool_.num_threads() > 1;
  // Several tasks a thread, so that one late to wake costs little; in prefill form so many that a thread with one more than the others costs little.
  const int64_t tasks = (a.form == Form::kPrefill ? 32 : 4) * pool_.num_threads();
  const int64_t wanted = parallel ? CeilDiv(tasks, token_blocks) : 1;
  const int64_t step = CeilDiv(CeilDiv(rows, std::min(wanted, rows)), kRowAlign) * kRowAlign;
  WeightView w = a.w;
  w.fetch_ahead = fetch_ahead_;
  // Tokens innermost: a block of weight rows is read once and met by all tokens while it is in cache.
  pool_.ParallelFor(parallel, CeilDiv(rows, step) * token_blocks, [&](int64_t task, int worker) {
    const int64_t row = task / token_blocks * step;
    const int64_t token = task % token_blocks * at_once;
    const int64_t tokens = std::min(at_once, a.m - token);
    const int64_t scratch_floats = LinearTermsScratch(a.form, tokens, step, a.terms);
    Scratch& scratch = worker_scratch_[static_cast<size_t>(worker)];
    scratch.Reserve(Scratch::Bytes<float>(scratch_floats));
    LinearTerms(kernels_, a.form, w, a.x + token * a.terms * a.ldx, a.ldx, tokens, a.terms, a.y + token * a.ldy, a.ldy, row,
                std::min(row + step, rows), scratch.Take<float>(scratch_floats));
  });
}

void HostOps::ToBf16(Stream& stream, const ToBf16Args& a) {
  if (!AsHost(stream).alive()) return;
  kernels_.to_bf16(a.x, a.out, a.n);
}

void HostOps::SiluMul(Stream& stream, const SiluMulArgs& a) {
  if (!AsHost(stream).alive()) return;
  pool_.ParallelFor(Parallel(a.m * a.n * 8), a.m, [&](int64_t m, int) {
    SiluMulTerms(kernels_, a.gate + m * a.ld, a.up + m * a.ld, a.n, a.terms, a.out + m * a.terms * a.n, a.n);
  });
}

void HostOps::Add(Stream& stream, const AddArgs& a) {
  if (!AsHost(stream).alive()) return;
  constexpr int64_t kStep = 16 * 1024;
  pool_.ParallelFor(Parallel(a.n), CeilDiv(a.n, kStep), [&](int64_t task, int) {
    const int64_t begin = task * kStep;
    kernels_.axpy(1.0f, a.x + begin, a.y + begin, std::min(kStep, a.n - begin));
  });
}

void HostOps::AddGated(Stream& stream, const AddGatedArgs& a) {
  if (!AsHost(stream).alive()) return;
  pool_.ParallelFor(Parallel(a.m * a.n), a.m,
                    [&](int64_t m, int) { kernels_.axpy(1.0f / (1.0f + PortableExp(-a.gate[m])), a.x + m * a.n, a.y + m * a.n, a.n); });
}

// Cut by columns: rows come more than once, and each adds up in the order of i.
void HostOps::AddRows(Stream& stream, const AddRowsArgs& a) {
  if (!AsHost(stream).alive()) return;
  constexpr int64_t kStep = 64;
  pool_.ParallelFor(Parallel(a.m * a.n), CeilDiv(a.n, kStep), [&](int64_t task, int) {
    const int64_t begin = task * kStep;
    const int64_t count = std::min(kStep, a.n - begin);
    for (int64_t i = 0; i < a.m; ++i) kernels_.axpy(a.weights[i], a.x + i * a.n + begin, a.sum + a.rows[i] * a.n + begin, count);
  });
}

void HostOps::GatherRows(Stream& stream, const GatherRowsArgs& a) {
  if (!AsHost(stream).alive()) return;
  for (int64_t m = 0; m < a.m; ++m) {
    std::memcpy(a.out + m * a.n, a.x + a.rows[m] * a.n, static_cast<size_t>(a.n) * sizeof(float));
  }
}

void HostOps::MlaWriteKv(Stream& stream, const MlaWriteKvArgs& a) {
  if (!AsHost(stream).alive()) return;
  const int64_t rope_dim = 2 * a.rope.half;
  const LatentRows cached(*a.kv, a.layer, a.rank, rope_dim, a.terms);
  const auto [rows, count] = ListRows(AsHost(stream), a.sequences, a.num_sequences);
  pool_.ParallelFor(Parallel(count * (a.rank + rope_dim) * 4), count, [&, rows = rows](int64_t task, int worker) {
    const auto& [sequence, row, position] = rows[task];
    if (position < sequence->write_from) return;
    Scratch& scratch = worker_scratch_[static_cast<size_t>(worker)];
    const int64_t width = a.rank + rope_dim;
    scratch.Reserve(Scratch::Bytes<float>(rope_dim) + Scratch::Bytes<float>(a.rank) + Scratch::Bytes<bf16>(a.terms * rope_dim) +
                    Scratch::Bytes<bf16>(a.terms * a.rank));
    float* key = scratch.Take<float>(rope_dim);
    const float* in = a.kv_a + row * width;
    std::copy_n(in + a.rank, rope_dim, key);
    RopeInterleaved(key, a.rope.cos + position * a.rope.half, a.rope.sin + position * a.rope.half, a.rope.half);
    const int32_t page = sequence->pages[position / kPageTokens];
    if (cached.f8()) {
      float* latent = scratch.Take<float>(a.rank);
      const float scale = RmsScale(in, a.rank, a.eps);
      for (int64_t i = 0; i < a.rank; ++i) latent[i] = in[i] * scale * a.norm_weight[i];
      cached.WriteF8(kernels_, page, position % kPageTokens, latent, key);
      return;
    }
    bf16* key_terms = scratch.Take<bf16>(a.terms * rope_dim);
    bf16* latent_terms = scratch.Take<bf16>(a.terms * a.rank);
    NormTerms(kernels_, in, a.norm_weight, a.eps, a.rank, a.terms, latent_terms, a.rank);
    SplitTerms(kernels_, key, rope_dim, a.terms, key_terms);
    bf16* out = cached.rows(page) + position % kPageTokens * a.terms * width;
    for (int64_t term = 0; term < a.terms; ++term) {
      std::copy_n(latent_terms + term * a.rank, a.rank, out + term * width);
      std::copy_n(key_terms + term * rope_dim, rope_dim, out + term * width + a.rank);
    }
  });
}

void HostOps::MlaRopeQuery(Stream& stream, const MlaRopeQueryArgs& a) {
  if (!AsHost(stream).alive()) return;
  const int64_t head_dim = a.nope + a.rope_dim;
  const auto [rows, count] = ListRows(AsHost(stream), a.sequences, a.num_sequences);
  pool_.ParallelFor(Parallel(count * a.heads * head_dim * 4), count, [&, rows = rows](int64_t task, int worker) {
    const auto& [sequence, row, position] = rows[task];
    Scratch& scratch = worker_scratch_[static_cast<size_t>(worker)];
    scratch.Reserve(Scratch::Bytes<float>(head_dim) + Scratch::Bytes<bf16>(a.terms * head_dim));
    float* rotated = scratch.Take<float>(head_dim);
    bf16* split = scratch.Take<bf16>(a.terms * head_dim);
    const float* cos = a.rope.cos + position * a.rope.half;
    const float* sin = a.rope.sin + position * a.rope.half;
    for (int64_t head = 0; head < a.heads; ++head) {
      std::copy_n(a.q + (row * a.heads + head) * head_dim, head_dim, rotated);
      RopeInterleaved(rotated + a.nope, cos, sin, a.rope.half);
      SplitTerms(kernels_, rotated, head_dim, a.terms, split);
      for (int64_t term = 0; term < a.terms; ++term) {
        std::copy_n(split + term * head_dim, head_dim, a.out + ((row * a.terms + term) * a.heads + head) * head_dim);
      }
    }
  });
}

void HostOps::Gate(Stream& stream, const GateArgs& a) {
  if (!AsHost(stream).alive() || a.m == 0) return;
  const int64_t experts = a.params.num_experts;
  // Two terms whatever the device's number: the choice of experts hangs on more than 8 bits of mantissa.
  constexpr int kTerms = 2;
  Scratch& scratch = AsHost(stream).scratch;
  scratch.Reserve(Scratch::Bytes<bf16>(kTerms * a.m * a.hidden) + Scratch::Bytes<float>(a.m * experts));
  bf16* terms = scratch.Take<bf16>(kTerms * a.m * a.hidden);
  float* logits = scratch.Take<float>(a.m * experts);

  pool_.ParallelFor(Parallel(a.m * a.hidden * 4), a.m, [&](int64_t m, int) {
    NormTerms(kernels_, a.x + m * a.hidden, a.norm_weight, a.eps, a.hidden, kTerms, terms + kTerms * m * a.hidden, a.hidden);
  });
  Product({.w = a.w, .terms = kTerms, .x = terms, .ldx = a.hidden, .m = a.m, .y = logits, .ldy = experts});
  pool_.ParallelFor(Parallel(a.m * experts * 32), a.m, [&](int64_t m, int worker) {
    Scratch& select = worker_scratch_[static_cast<size_t>(worker)];
    select.Reserve(Scratch::Bytes<float>(2 * experts + a.params.num_groups));
    GateSelect(a.params, logits + m * experts, a.bias, a.ids + m * a.params.top_k, a.weights + m * a.params.top_k,
               select.Take<float>(2 * experts + a.params.num_groups));
  });
}

void HostOps::Experts(Stream& stream, const ExpertsArgs& a) {
  OnEngine(AsHost(stream), [&](ExpertEngine& engine) { return engine.Run(a); });
}

void HostOps::ExpertRows(Stream& stream, const ExpertRowsArgs& a) {
  if (a.n == 0) return;
  OnEngine(AsHost(stream), [&](ExpertEngine& engine) { return engine.RunRows(a); });
}

void HostOps::OnEngine(HostStream& stream, absl::FunctionRef<absl::Status(ExpertEngine&)> run) {
  if (!stream.alive()) return;
  if (experts_ == nullptr) {
    stream.Fail(absl::FailedPreconditionError("this host device has no expert engine: make it with MakeHostDevice"));
    return;
  }
  if (absl::Status status = run(*experts_); !status.ok()) stream.Fail(Annotate(status, "experts"));
}

void HostOps::Clear(Stream& stream, const ClearArgs& a) {
  if (!AsHost(stream).alive()) return;
  constexpr int64_t kStep = 64 * 1024;
  pool_.ParallelFor(Parallel(a.n), CeilDiv(a.n, kStep), [&](int64_t task, int) {
    const int64_t begin = task * kStep;
    std::fill_n(a.x + begin, std::min(kStep, a.n - begin), 0.0f);
  });
}

void HostOps::ToDevice(Stream& stream, const ToDeviceArgs& a) {
  if (!AsHost(stream).alive() || a.bytes == 0) return;
  link_.Copy(a.host, a.device, a.bytes, a.stop);
}

void HostOps::ToHost(Stream& stream, const ToHostArgs& a) {
  if (!AsHost(stream).alive() || a.bytes == 0) return;
  std::memcpy(a.host, a.device, a.bytes);
}

}  // namespace hearth
