// How cached vectors lie in a page's layer (docs/kv-pool.md), and the ways in and out of it: BF16 in so many terms, or FP8 with a scale a vector.
// Room: common/device/host. May touch: common/{kernels,shm,base}. Threads: any; a page has one writer (kv_pool.h).
#pragma once

#include <cstdint>

#include "common/kernels/kernels.h"
#include "common/shm/kv_pool.h"

namespace hearth {

// Latent attention, one latent and one rotary key a token.
//   BF16: [64, terms, rank + rope]
//   FP8: latents [64, rank] E4M3, rotary keys [64, rope] BF16, the latents' scales [64] F32. Rotary keys are few and position hangs on them.
class LatentRows {
 public:
  LatentRows(const KvPool& kv, int64_t layer, int64_t rank, int64_t rope, int terms)
      : kv_(kv), layer_(layer), rank_(rank), rope_(rope), terms_(terms), f8_(kv.geometry().dtype == DType::kF8E4M3) {}

  bool f8() const { return f8_; }
  // BF16: the page's rows, a token's terms beside each other.
  bf16* rows(int32_t page) const { return reinterpret_cast<bf16*>(kv_.layer(page, layer_)); }
  // FP8: one token.   latent [rank], rotary [rope]
  void WriteF8(const KernelTable& kernels, int32_t page, int64_t slot, const float* latent, const float* rotary) const;
  // The first `count` tokens, exactly.   out [count, rank + rope]
  void Widen(const KernelTable& kernels, int32_t page, int64_t count, float* out) const;
  NextRuns Next(int32_t page) const;

 private:
  const KvPool& kv_;
  const int64_t layer_, rank_, rope_;
  const int terms_;
  const bool f8_;
};

// Grouped-query attention: [2 (keys, values), kv_heads] runs, each of one head's 64 vectors.
//   BF16: [64, terms, head_dim];  FP8: vectors [64, head_dim] E4M3, their scales [64] F32.
class HeadRows {
 public:
  enum class Part { kKeys, kValues };
  HeadRows(const KvPool& kv, int64_t layer, int64_t kv_heads, int64_t head_dim, int terms)
      : kv_(kv), layer_(layer), kv_heads_(kv_heads), head_dim_(head_dim), terms_(terms), f8_(kv.geometry().dtype == DType::kF8E4M3) {}

  // One vector.   x [head_dim]
  void Write(const KernelTable& kernels, int32_t page, Part part, int64_t head, int64_t slot, const float* x) const;
  // Vectors are plain BF16, one behind the other: they may be read as they lie.
  bool plain() const { return terms_ == 1 && !f8_; }
  const bf16* rows(int32_t page, Part part, int64_t head) const { return reinterpret_cast<const bf16*>(Run(page, part, head)); }
  // The first `count` vectors, exactly.   out [count, head_dim]
  void Widen(const KernelTable& kernels, int32_t page, Part part, int64_t head, int64_t count, float* out) const;
  NextRuns Next(int32_t page, int64_t head) const;

 private:
  int64_t RunBytes() const;
  uint8_t* Run(int32_t page, Part part, int64_t head) const;

  const KvPool& kv_;
  const int64_t layer_, kv_heads_, head_dim_;
  const int terms_;
  const bool f8_;
};

}  // namespace hearth
