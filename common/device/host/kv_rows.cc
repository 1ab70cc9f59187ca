#include "common/device/host/kv_rows.h"

#include "common/device/host/terms.h"

namespace hearth {

void LatentRows::WriteF8(const KernelTable& kernels, int32_t page, int64_t slot, const float* latent, const float* rotary) const {
  uint8_t* codes = kv_.layer(page, layer_);
  bf16* keys = reinterpret_cast<bf16*>(codes + kPageTokens * rank_);
  float* scales = reinterpret_cast<float*>(keys + kPageTokens * rope_);
  scales[slot] = QuantizeF8(latent, rank_, codes + slot * rank_);
  kernels.to_bf16(rotary, keys + slot * rope_, rope_);
}

void LatentRows::Widen(const KernelTable& kernels, int32_t page, int64_t count, float* out) const {
  const int64_t width = rank_ + rope_;
  if (!f8()) {
    kernels.widen_bf16(rows(page), terms_ * width, terms_ > 1 ? width : 0, count, width, out, width);
    return;
  }
  const uint8_t* codes = kv_.layer(page, layer_);
  const bf16* keys = reinterpret_cast<const bf16*>(codes + kPageTokens * rank_);
  const float* scales = reinterpret_cast<const float*>(keys + kPageTokens * rope_);
  kernels.widen_f8(codes, rank_, scales, count, rank_, out, width);
  kernels.widen_bf16(keys, rope_, 0, count, rope_, out + rank_, width);
}

NextRuns LatentRows::Next(int32_t page) const {
  return {.first = kv_.layer(page, layer_), .bytes_per_position = static_cast<int64_t>(kv_.geometry().layer_bytes()) / kPageTokens};
}

int64_t HeadRows::RunBytes() const {
  return kPageTokens * (f8_ ? head_dim_ + static_cast<int64_t>(sizeof(float)) : terms_ * head_dim_ * static_cast<int64_t>(sizeof(bf16)));
}

uint8_t* HeadRows::Run(int32_t page, Part part, int64_t head) const {
  return kv_.layer(page, layer_) + ((part == Part::kValues ? kv_heads_ : 0) + head) * RunBytes();
}

NextRuns HeadRows::Next(int32_t page, int64_t head) const {
  return {.first = Run(page, Part::kKeys, head), .second = Run(page, Part::kValues, head), .bytes_per_position = RunBytes() / kPageTokens};
}

void HeadRows::Write(const KernelTable& kernels, int32_t page, Part part, int64_t head, int64_t slot, const float* x) const {
  uint8_t* run = Run(page, part, head);
  if (f8_) {
    float* scales = reinterpret_cast<float*>(run + kPageTokens * head_dim_);
    scales[slot] = QuantizeF8(x, head_dim_, run + slot * head_dim_);
  } else {
    SplitTerms(kernels, x, head_dim_, terms_, reinterpret_cast<bf16*>(run) + slot * terms_ * head_dim_);
  }
}

void HeadRows::Widen(const KernelTable& kernels, int32_t page, Part part, int64_t head, int64_t count, float* out) const {
  const uint8_t* run = Run(page, part, head);
  if (f8_) {
    kernels.widen_f8(run, head_dim_, reinterpret_cast<const float*>(run + kPageTokens * head_dim_), count, head_dim_, out, head_dim_);
  } else {
    kernels.widen_bf16(reinterpret_cast<const bf16*>(run), terms_ * head_dim_, terms_ > 1 ? head_dim_ : 0, count, head_dim_, out, head_dim_);
  }
}

}  // namespace hearth
